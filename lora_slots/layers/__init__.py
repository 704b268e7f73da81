"""What lives in the model: one slot layer per kind of base layer. Knows no files."""

from __future__ import annotations

from torch import nn

from lora_slots.layers.base import SlotLayer, SlotSizes
from lora_slots.layers.conv import CONVOLUTIONS
from lora_slots.layers.conv1d import CONV1D
from lora_slots.layers.embedding import EMBEDDING
from lora_slots.layers.kind import LayerKind
from lora_slots.layers.linear import LINEAR
from lora_slots.layers.lora import LoraSlots
from lora_slots.layers.mix import Mix
from lora_slots.layers.routes import Routes

KINDS: tuple[LayerKind, ...] = (LINEAR, CONV1D, *CONVOLUTIONS, EMBEDDING)


def kind_of(module: nn.Module) -> LayerKind | None:
    """The kind of base layer that ``module`` is, or None if it cannot take slots."""
    return next((kind for kind in KINDS if kind.matches(module)), None)


__all__ = ["KINDS", "LayerKind", "LoraSlots", "Mix", "Routes", "SlotLayer", "SlotSizes", "kind_of"]
