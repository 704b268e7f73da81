"""The buffers of a slot layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from lora_slots.layers.slabs import Share

if TYPE_CHECKING:
    from lora_slots.layers.mix import Mix


@dataclass(frozen=True)
class SlotSizes:
    """What the slot layers of one model have in common.

    Attributes:
        num_slots: How many adapters can be loaded at a time.
        rows: How many rows by rank they share; 0 where a layer takes no low-rank updates.
        dtype: The dtype of what is as large as the base layer: ``lora_A``, ``lora_B`` and the like.
        mix: The weights of the adapters, which all layers on a device share.
        dora: Whether slots hold DoRA magnitudes.
        bias: Whether slots hold a bias.
        token_rows: How many trained rows of an embedding each slot holds.
    """

    num_slots: int
    rows: int
    dtype: torch.dtype
    mix: Mix
    dora: bool = False
    bias: bool = False
    token_rows: int = 0


class SlotLayer(nn.Module):
    """What all slots hold for one base layer, zero until an adapter is written into them.

    A slot is a run of whole rows of every buffer, or of columns of ``scaling``: of that, ``lora_A``
    and ``lora_B`` those that the bank gives it, of all others as many as any slot. The buffers are
    made once and never replaced by lora_slots, so compiled graphs and CUDA graphs keep reading the
    same memory. They are not part of the state dict.

    Attributes:
        mix: With which weights adapters contribute; shared with other layers.
        generation: How often ``.to()`` and its like have replaced buffers of any slot layer in this
            process; while it stands still, references to buffers stay good.
    """

    mix: Mix
    generation: ClassVar[int] = 0
    # Buffers that steer, and small ones: float32 whatever the model is cast to.
    float32: ClassVar[frozenset[str]] = frozenset({"scaling", "holds", "lora_bias", "dora"})

    def add_buffer(
        self,
        name: str,
        rows: int,
        width: int,
        sizes: SlotSizes,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Register a buffer, ``[rows, width]``, on ``meta`` until memory is shared out.

        ``dtype`` is for what are no floats.
        """
        dtype = dtype or (torch.float32 if name in self.float32 else sizes.dtype)
        buffer = torch.empty(rows, width, dtype=dtype, device="meta")
        self.register_buffer(name, buffer, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow ``.to()``, ``.half()`` and ``.to_empty()``, but keep float32 what must be.

        ``fn`` says where buffers are and of which dtype; what they hold stays, ``.to_empty()`` or
        not.
        """
        shown = self.show(None)
        before = dict(self.named_buffers(recurse=False))
        try:
            # What inference_mode makes could not be written to outside of it.
            with torch.inference_mode(False):
                super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            for name, old in before.items():
                self._settle(name, old)
        finally:
            self.show(shown)
        return self

    def _settle(self, name: str, old: Tensor) -> None:
        """Let the buffer that took the place of ``old`` hold what that held."""
        new = self.get_buffer(name)
        if new is old:
            return
        SlotLayer.generation += 1
        if name in self.float32 and new.dtype != torch.float32:
            self.register_buffer(name, old.to(new.device), persistent=False)
        if new.is_meta:
            return
        if old.is_meta:
            # The memory is new and holds anything; slots start empty.
            self.get_buffer(name).zero_()
        else:
            self.get_buffer(name).copy_(old)

    def show(self, rows: int | None) -> int | None:
        """Let ``forward`` see only as many rows; None: all. Return how many it saw before.

        Only `LoraSlots` have rows that may be left out.
        """
        return None

    @property
    def shows_some(self) -> bool:
        """Whether ``forward`` sees the first rows only."""
        return False

    @property
    def is_torn(self) -> bool:
        """Whether ``forward`` sees rows in memory of their own, apart from the others."""
        return False

    def whole(self, name: str) -> Tensor | None:
        """All rows of a buffer, however many of them ``forward`` sees; None if it has none."""
        return self._buffers.get(name)

    def __getstate__(self) -> dict[str, Any]:
        """Hold all rows, as shares of the memory that layers have in common."""
        buffers = {name: Share.of(self.whole(name)) for name in self._buffers}
        return vars(self) | {"_buffers": buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Undo `__getstate__`."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name, share in self._buffers.items():
            if isinstance(share, Share):
                self._buffers[name] = share.buffer()

    def extra_repr(self) -> str:
        """Show the sizes and the dtype of every buffer."""
        return ", ".join(
            f"{name}={list(buffer.shape)} {str(buffer.dtype).removeprefix('torch.')}"
            for name, buffer in self.named_buffers(recurse=False)
        )


def followed(old: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """What ``.to()`` and its like make of a tensor: elsewhere, but of the same dtype and values.

    A mere cast leaves it where it is. So does a move to ``meta``, which would lose the values for
    layers that share it and stay.
    """
    # What inference_mode makes could not be written outside of it.
    with torch.inference_mode(False):
        new = fn(old)
        is_cast = new.dtype != old.dtype and new.device == old.device
        if new is old or new.is_meta or is_cast:
            return old
        if new.dtype != old.dtype:
            new = torch.empty_like(old, device=new.device)
        # What was on meta has no values; and ``.to_empty()`` keeps none.
        return torch.zeros_like(new) if old.is_meta else new.copy_(old)
