"""Slots for low-rank updates of a parameter that a module reads by itself.

The update is added to the parameter itself, since the module calls no layer that its product with
the input could be added to: the projections of `nn.MultiheadAttention`, and the experts of a
mixture, which lie in one parameter of three dimensions.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from lora_slots.layers import watch
from lora_slots.layers.base import SlotSizes
from lora_slots.layers.kind import LayerKind
from lora_slots.layers.linear import add_product, factors
from lora_slots.layers.lora import LoraSlots
from lora_slots.layers.parameter import has_parameter, own_parameter, parameter_kind


class MatrixSlots(LoraSlots):
    """Adds ``sum over rows of weight * scaling * B^T A`` to a parameter ``[out, in]``."""

    def forward(self, parameter: Tensor) -> Tensor:
        """Return the parameter plus the share of every row that an active adapter fills.

        Args:
            parameter: The base model's, ``[out, in]``; not changed.

        Returns:
            The same shape and dtype; equal to ``parameter`` when none is active.
        """
        if not torch.compiler.is_compiling():
            watch.notify(self)
        if not self.low_rank:
            return parameter
        with torch.autocast(parameter.device.type, enabled=False):
            return add_product(parameter, self.lora_B.t(), self.lora_A, self.by_row())


class ExpertSlots(LoraSlots):
    """Adds as much to each expert of a parameter ``[experts, out, in]``.

    Attributes:
        lora_A: ``[R, experts * in]``, so that ranks are rows here too.
        lora_B: ``[R, experts * out]``.
    """

    def forward(self, parameter: Tensor) -> Tensor:
        """Return the parameter plus the share of every row that an active adapter fills.

        Args:
            parameter: The base model's, ``[experts, out, in]``; not changed.

        Returns:
            The same shape and dtype; equal to ``parameter`` when none is active.

        Source: PEFT, ``ParamWrapper.get_delta_weight``.
        """
        if not torch.compiler.is_compiling():
            watch.notify(self)
        if not self.low_rank:
            return parameter
        with torch.autocast(parameter.device.type, enabled=False):
            B, A = factors(parameter, self.lora_B.t(), self.lora_A, self.by_row())
            experts, ranks = parameter.shape[0], len(A)
            B = B.view(experts, -1, ranks)
            A = A.view(ranks, experts, -1).transpose(0, 1)
            return self.add(parameter.to(A.dtype), B, A).to(parameter.dtype)

    def add(self, parameter: Tensor, B: Tensor, A: Tensor) -> Tensor:
        """Add ``B [experts, out, R] @ A [experts, R, in]``."""
        return torch.baddbmm(parameter, B, A)


class TransposedExpertSlots(ExpertSlots):
    """The same for a parameter that is stored as ``[experts, in, out]``."""

    def add(self, parameter: Tensor, B: Tensor, A: Tensor) -> Tensor:
        """Add the transpose of ``B [experts, out, R] @ A [experts, R, in]``."""
        return torch.baddbmm(parameter, A.transpose(1, 2), B.transpose(1, 2))


def low_rank_kind(parameter: str) -> LayerKind:
    """How a module takes low-rank updates of its own parameter of this name."""
    return parameter_kind(parameter, takes_low_rank, _shape, _make)


def takes_low_rank(module: nn.Module, name: str) -> bool:
    """Whether the parameter is a matrix, or one for each of several experts."""
    return has_parameter(module, name) and own_parameter(module, name).ndim in (2, 3)


def expert_sizes(module: nn.Module, name: str) -> tuple[int, int, int]:
    """The number of experts, and the sizes of the input and the output of each.

    Source: PEFT, ``ParamWrapper.update_layer``.
    """
    shape = own_parameter(module, name).shape
    experts, out_features, in_features = (1, *shape) if len(shape) == 2 else shape
    if len(shape) == 3 and _is_transposed(module):
        in_features, out_features = out_features, in_features
    return experts, in_features, out_features


def _is_transposed(module: nn.Module) -> bool:
    return bool(getattr(module, "is_transposed", False))


def _shape(module: nn.Module, name: str) -> tuple[tuple[int, ...], int]:
    experts, in_features, out_features = expert_sizes(module, name)
    return (experts * in_features,), experts * out_features


def _make(module: nn.Module, sizes: SlotSizes, name: str) -> LoraSlots:
    (in_features,), out_features = _shape(module, name)
    kind: type[LoraSlots] = MatrixSlots
    if own_parameter(module, name).ndim == 3:
        kind = TransposedExpertSlots if _is_transposed(module) else ExpertSlots
    plain = replace(sizes, dora=False, bias=False, token_rows=0)
    return kind(in_features, out_features, plain)
