"""The buffers of a slot layer, and what a kind of base layer has to say about itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn


class SlotLayer(nn.Module):
    """The LoRA rows of all slots of one base layer, zero until an adapter is written into them.

    The buffers are made once and never replaced by lora_slots, so compiled graphs and CUDA graphs
    keep reading the same memory. They are not part of the state dict.

    Attributes:
        lora_A: ``[R, in]``, R = num_slots * max_rank.
        lora_B: ``[R, out]``; rank-major, so that a slot is a run of whole rows here too.
        scaling: ``[1, R]`` float32, always; 0 for rows that contribute nothing. (Two dimensions,
            since ahead-of-time compilation inlines small vectors as constants.)
        generation: How often ``.to()`` and its like have replaced buffers of any slot layer in this
            process; while it stands still, references to buffers stay good.
    """

    lora_A: Tensor
    lora_B: Tensor
    scaling: Tensor
    generation: ClassVar[int] = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rows: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate zeros: nothing loaded means the output is the base layer's."""
        super().__init__()
        # A buffer made under inference_mode could not be written to outside of it.
        with torch.inference_mode(False):
            A = torch.zeros(rows, in_features, dtype=dtype, device=device)
            B = torch.zeros(rows, out_features, dtype=dtype, device=device)
            scaling = torch.zeros(1, rows, dtype=torch.float32, device=device)
        self.register_buffer("lora_A", A, persistent=False)
        self.register_buffer("lora_B", B, persistent=False)
        self.register_buffer("scaling", scaling, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow ``.to()``, ``.half()`` and ``.to_empty()``, but keep ``scaling`` float32."""
        lora_A, scaling = self.lora_A, self.scaling
        # As in __init__: what inference_mode makes could not be written to outside of it.
        with torch.inference_mode(False):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.lora_A is not lora_A:
            SlotLayer.generation += 1
        if self.scaling.dtype != torch.float32:
            self.scaling = scaling.to(self.scaling.device)
        if scaling.is_meta and not self.scaling.is_meta:
            # The memory is new and holds anything; slots start empty.
            for buffer in self.buffers(recurse=False):
                buffer.zero_()
        return self

    def extra_repr(self) -> str:
        """Show the sizes and the dtype, as `nn.Linear` does."""
        rows, in_features = self.lora_A.shape
        return (
            f"rows={rows}, in_features={in_features}, out_features={self.lora_B.shape[1]}, "
            f"dtype={self.lora_A.dtype}"
        )


@dataclass(frozen=True)
class LayerKind:
    """How one kind of base layer takes slots.

    Attributes:
        name: The class name users know it by.
        matches: Whether a module is of this kind.
        features: ``(in_features, out_features)`` of a module of this kind.
        slot_layer: The `SlotLayer` whose ``forward(x, y)`` adds the adapters' share to ``y``.
    """

    name: str
    matches: Callable[[nn.Module], bool]
    features: Callable[[Any], tuple[int, int]]
    slot_layer: type[SlotLayer]
