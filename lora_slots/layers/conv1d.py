"""Slots for transformers' GPT-2 ``Conv1D``: a linear layer that stores its weight as ``[in, out]``.

Its input and output are those of a linear layer, so only the two sizes are read elsewhere; whether
an adapter's config says ``fan_in_fan_out`` changes nothing here.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from lora_slots.layers.base import SlotSizes
from lora_slots.layers.kind import LayerKind
from lora_slots.layers.linear import LinearSlots
from lora_slots.layers.quantized import dequantized


def _is_conv1d(module: nn.Module) -> bool:
    # Where transformers was never imported, no module can be one of its classes.
    pytorch_utils = sys.modules.get("transformers.pytorch_utils")
    return pytorch_utils is not None and isinstance(module, pytorch_utils.Conv1D)


def _shape(module: Any) -> tuple[tuple[int, ...], int]:
    in_features, out_features = module.weight.shape
    return (in_features,), out_features


def _make(module: Any, sizes: SlotSizes) -> LinearSlots:
    in_features, out_features = module.weight.shape
    return LinearSlots(in_features, out_features, sizes)


def _weight(module: Any) -> Tensor:
    return dequantized(module).t()


CONV1D = LayerKind(
    name="Conv1D", matches=_is_conv1d, shape=_shape, make=_make, weight=_weight, is_linear=True
)
