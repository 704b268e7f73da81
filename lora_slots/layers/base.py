"""The buffers of a slot layer, and what a kind of base layer has to say about itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class SlotSizes:
    """What the slot layers of one model have in common.

    Attributes:
        num_slots: How many adapters can be loaded at a time.
        max_rank: The largest rank of each.
        dtype: The dtype of what is as large as the base layer: ``lora_A``, ``lora_B`` and the like.
        device: Where the buffers are made.
        dora: Whether slots hold DoRA magnitudes.
        bias: Whether slots hold a bias.
    """

    num_slots: int
    max_rank: int
    dtype: torch.dtype
    device: torch.device
    dora: bool = False
    bias: bool = False


class SlotLayer(nn.Module):
    """What all slots hold for one base layer, zero until an adapter is written into them.

    Every buffer but ``scaling`` and ``weights`` has two dimensions, and the same number of rows for
    each slot, one slot's below the other's: a slot is a run of whole rows. The buffers are made
    once and never replaced by lora_slots, so compiled graphs and CUDA graphs keep reading the same
    memory. They are not part of the state dict.

    Attributes:
        generation: How often ``.to()`` and its like have replaced buffers of any slot layer in this
            process; while it stands still, references to buffers stay good.
    """

    generation: ClassVar[int] = 0
    # Buffers that steer, and small ones: float32 whatever the model is cast to.
    float32: ClassVar[frozenset[str]] = frozenset({"scaling", "weights", "lora_bias", "dora"})

    def add_buffer(self, name: str, rows: int, width: int, sizes: SlotSizes) -> None:
        """Register a buffer of zeros, ``[rows, width]``."""
        dtype = torch.float32 if name in self.float32 else sizes.dtype
        # A buffer made under inference_mode could not be written to outside of it.
        with torch.inference_mode(False):
            buffer = torch.zeros(rows, width, dtype=dtype, device=sizes.device)
        self.register_buffer(name, buffer, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow ``.to()``, ``.half()`` and ``.to_empty()``, but keep float32 what must be."""
        before = dict(self.named_buffers(recurse=False))
        # As in add_buffer: what inference_mode makes could not be written to outside of it.
        with torch.inference_mode(False):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self.get_buffer(name)
            if new is not old:
                SlotLayer.generation += 1
            if name in self.float32 and new.dtype != torch.float32:
                new = old.to(new.device)
                self.register_buffer(name, new, persistent=False)
            if old.is_meta and not new.is_meta:
                # The memory is new and holds anything; slots start empty.
                new.zero_()
        return self

    def extra_repr(self) -> str:
        """Show the sizes and the dtype of every buffer."""
        return ", ".join(
            f"{name}={list(buffer.shape)} {str(buffer.dtype).removeprefix('torch.')}"
            for name, buffer in self.named_buffers(recurse=False)
        )


class LoraSlots(SlotLayer):
    """The LoRA rows of all slots of one base layer.

    Attributes:
        lora_A: ``[R, in]``, R = num_slots * max_rank.
        lora_B: ``[R, out]``; rank-major, so that a slot is a run of whole rows here too.
        scaling: ``[1, R]`` float32; 0 for rows that contribute nothing. (Two dimensions, since
            ahead-of-time compilation inlines small vectors as constants.)
        weights: ``[1, num_slots]`` float32, the weight of each slot that contributes, else 0; None
            without ``dora`` and ``bias``.
        lora_bias: ``[num_slots, out]`` float32; None without ``bias``.
        dora: ``[num_slots * 4, out]`` float32, for each slot the magnitude and three sums over the
            input axis: |W|^2, <W, sBA> and |sBA|^2; None without ``dora``. Zero where the adapter
            is no DoRA.
    """

    lora_A: Tensor
    lora_B: Tensor
    scaling: Tensor
    weights: Tensor | None
    lora_bias: Tensor | None
    dora: Tensor | None

    def __init__(self, in_features: int, out_features: int, sizes: SlotSizes) -> None:
        """Allocate zeros: nothing loaded means the output is the base layer's."""
        super().__init__()
        slots = sizes.num_slots
        rows = slots * sizes.max_rank
        self.add_buffer("lora_A", rows, in_features, sizes)
        self.add_buffer("lora_B", rows, out_features, sizes)
        self.add_buffer("scaling", 1, rows, sizes)
        self.weights = self.lora_bias = self.dora = None
        if sizes.dora or sizes.bias:
            self.add_buffer("weights", 1, slots, sizes)
        if sizes.bias:
            self.add_buffer("lora_bias", slots, out_features, sizes)
        if sizes.dora:
            self.add_buffer("dora", 4 * slots, out_features, sizes)

    def gain(self) -> Tensor:
        """By what DoRA multiplies each output: ``[num_slots, out]`` float32, 1 where it does not.

        The norm is that of ``W + w s B A`` for the weight w that a slot has now.

        Source: DoRA, arXiv:2402.09353, equation 5.
        """
        assert self.dora is not None
        assert self.weights is not None
        weights = self.weights.t()
        magnitude, base, cross, update = self.dora.view(-1, 4, self.dora.shape[1]).unbind(1)
        norm = (base + 2 * weights * cross + weights**2 * update).clamp(min=_TINY).sqrt()
        return torch.where((weights != 0) & (base != 0), magnitude / norm, 1)

    def total_bias(self) -> Tensor:
        """What all slots add to the bias: ``[out]`` float32."""
        assert self.lora_bias is not None
        assert self.weights is not None
        return (self.weights.t() * self.lora_bias).sum(0)


_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class LayerKind:
    """How one kind of base layer takes slots.

    Attributes:
        name: The class name users know it by.
        matches: Whether a module is of this kind.
        shape: Of a module of this kind, the axes of ``lora_A`` in a file but for the rank, such as
            ``(in,)``, and the size of its output.
        make: Makes the slot layer of a module. Its ``forward(x, y, module)`` returns ``y``, what
            the module made of ``x``, plus the adapters' share.
        weight: The weight of a module as ``[out, in]`` floats, dequantised; DoRA needs it.
        is_linear: Whether PEFT's ``"all-linear"`` means it.
    """

    name: str
    matches: Callable[[nn.Module], bool]
    shape: Callable[[Any], tuple[tuple[int, ...], int]]
    make: Callable[[Any, SlotSizes], SlotLayer]
    weight: Callable[[Any], Tensor]
    is_linear: bool = False


def dequantized(module: nn.Module) -> Tensor:
    """The weight of a base layer as floats, by PEFT's own function where it is quantised."""
    weight = module.weight
    if isinstance(weight, Tensor) and weight.is_floating_point() and weight.itemsize > 1:
        return weight
    from peft.utils.integrations import dequantize_module_weight

    full: Tensor = dequantize_module_weight(module)
    return full
