"""Slots for `nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d` of any kernel, stride, padding and groups."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lora_slots.errors import UnsupportedAdapterError
from lora_slots.layers import watch
from lora_slots.layers.base import SlotSizes
from lora_slots.layers.kind import LayerKind, runs_as
from lora_slots.layers.linear import factors, with_bias, with_dora
from lora_slots.layers.lora import LoraSlots
from lora_slots.layers.quantized import dequantized
from lora_slots.layers.routes import RowFactors, row_factors

_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class ConvSlots(LoraSlots):
    """Adds ``sum over rows of weight * scaling * conv(x, A) B`` to the output of a convolution.

    A row of ``lora_A`` is a flattened kernel over all input channels, which moves over the input as
    the base layer's own kernels do.
    """

    def forward(self, x: Tensor, y: Tensor, base: Any) -> Tensor:
        """Return ``y`` plus the share of every row that an active adapter fills.

        Args:
            x: ``[in, *size]``, or the same for each item of a batch: what the base layer was given.
            y: ``[out, *size]`` or a batch of it, what the base layer returned; not changed.
            base: The base layer.

        Returns:
            The shape, dtype and memory format of ``y``; equal to it when none is active.

        Source: LoRA for convolutions, as in LoCon: ``conv(x, B A) = B conv(x, A)``.
        """
        if not torch.compiler.is_compiling():
            watch.notify(self)
        if self.idle:
            return y
        channels = y.ndim - len(base.kernel_size) - 1
        rows = row_factors(self, y, batched=channels == 1)
        if not self.low_rank:
            return with_bias(self, y.movedim(channels, -1), rows).movedim(-1, channels)
        if not y.is_meta and torch.is_autocast_enabled(y.device.type):
            h = _convolve(x, self.lora_A, base)
            with torch.autocast(y.device.type, enabled=False):
                return self._add(y, h, base, rows)
        return self._add(y, _convolve(x.to(self.lora_A.dtype), self.lora_A, base), base, rows)

    def _add(self, y: Tensor, h: Tensor, base: Any, rows: RowFactors | None) -> Tensor:
        dims = len(base.kernel_size)
        channels = y.ndim - dims - 1
        last, lora_B = with_dora(self, y.movedim(channels, -1), base, rows)
        h = h.movedim(channels, -1)
        h = h if rows is None else rows.columns_of(h)
        h, lora_B = factors(y, h, lora_B, self.by_row(), rows)
        if rows is not None:
            share = torch.bmm(h, lora_B).view(last.shape)
        else:
            kernel = lora_B.t().view(*reversed(lora_B.shape), *[1] * dims)
            share = _CONVOLVE[dims](h.movedim(-1, channels), kernel).movedim(channels, -1)
        last = (last + share).to(y.dtype)
        return with_bias(self, last, rows).movedim(-1, channels)


def _convolve(x: Tensor, lora_A: Tensor, base: Any) -> Tensor:
    """The base layer's convolution of ``x`` with the rows of ``lora_A``, in one group."""
    kernel = lora_A.view(-1, base.in_channels, *base.kernel_size)
    padding = base.padding
    if base.padding_mode != "zeros":
        x = F.pad(x, base._reversed_padding_repeated_twice, mode=base.padding_mode)
        padding = 0
    convolve = _CONVOLVE[len(base.kernel_size)]
    return convolve(x, kernel, None, base.stride, padding, base.dilation)


def _whole(module: Any, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """The ``lora_A`` and ``lora_B`` of a grouped convolution, as those of one in a single group.

    PEFT gives each group its own rows of ``lora_A``, over all input channels, and stores of
    ``lora_B`` only those, ``[out, r / groups]``. Files made after LyCORIS hold a ``lora_A`` over
    the channels of one group, ``[r, in / groups, *kernel]``, which all groups share.
    """
    groups, rank = module.groups, A.shape[0]
    in_shape, out_channels = _shape(module)
    one_group = (module.in_channels // groups, *module.kernel_size)
    if groups == 1 or B.shape[0] != out_channels:
        return A, B
    if A.shape[1:] == in_shape and B.shape[1] * groups == rank:
        return A, _on_diagonal(B.reshape(groups, out_channels // groups, -1))
    if A.shape[1:] in (one_group, (math.prod(one_group),)) and B.shape[1] == rank:
        A = _on_diagonal(A.flatten(1).expand(groups, -1, -1)).view(-1, *in_shape)
        return A, _on_diagonal(B.reshape(groups, out_channels // groups, -1))
    return A, B


def _on_diagonal(blocks: Tensor) -> Tensor:
    """``blocks [n, rows, columns]`` on the diagonal of a matrix of zeros."""
    matrix: Tensor = torch.block_diag(*blocks.unbind(0))  # type: ignore[no-untyped-call]
    return matrix


def _weight(module: Any) -> Tensor:
    if module.groups > 1:
        raise UnsupportedAdapterError(
            f"the norms of a convolution with groups={module.groups} are not defined alike by "
            "those who train it"
        )
    return dequantized(module).flatten(1)


def _shape(module: Any) -> tuple[tuple[int, ...], int]:
    return (module.in_channels, *module.kernel_size), module.out_channels


def _make(module: Any, sizes: SlotSizes) -> ConvSlots:
    in_shape, out_channels = _shape(module)
    return ConvSlots(math.prod(in_shape), out_channels, sizes)


def _kind(cls: type[nn.Module]) -> LayerKind:
    return LayerKind(
        name=cls.__name__,
        matches=partial(runs_as, cls=cls),
        shape=_shape,
        make=_make,
        weight=_weight,
        whole=_whole,
    )


CONVOLUTIONS = tuple(map(_kind, (nn.Conv1d, nn.Conv2d, nn.Conv3d)))
