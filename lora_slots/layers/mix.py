"""With which weights adapters contribute: buffers that all slot layers on one device share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from lora_slots.layers.base import SlotLayer, followed


class Mix(SlotLayer):
    """The weight of each row by rank, and of each slot, zero until adapters are active.

    To activate, weight or mix adapters is to write these, however many layers there are. All layers
    refer to it; of only one it is a child, so that it is moved, and named, once.

    Attributes:
        rows: ``[1, R]`` float32, the weight of the adapter that owns each row; 0 where that
            contributes nothing.
        slots: ``[1, num_slots]`` float32, the weight of each slot's adapter; 0 where that
            contributes nothing.
        owners: ``[R]`` int64, the slot that owns each row.
    """

    rows: Tensor
    slots: Tensor
    owners: Tensor

    def __init__(self, rows: int, num_slots: int, device: torch.device) -> None:
        """Let nothing contribute.

        Args:
            rows: How many rows by rank there are: R.
            num_slots: How many slots there are.
            device: Where the buffers are made.
        """
        super().__init__()
        with torch.inference_mode(False):
            buffers = {
                "rows": torch.zeros(1, rows, dtype=torch.float32, device=device),
                "slots": torch.zeros(1, num_slots, dtype=torch.float32, device=device),
                "owners": torch.zeros(rows, dtype=torch.int64, device=device),
            }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow ``.to()``, but keep the dtypes."""
        for name, buffer in self.named_buffers(recurse=False):
            new = followed(buffer, fn)
            if new is not buffer:
                SlotLayer.generation += 1
                self._buffers[name] = new
        return self

    def of_rows(self, scaling: Tensor) -> Tensor:
        """The weights of the rows that ``scaling [1, n]`` is for, on its device.

        ``[1, n]``; or, of a single slot on a CPU, ``[1, 1]``. Layers that read only one number in
        common share the code of a kernel. Where they read more, inductor makes one kernel of two
        or three layers: fewer to start, as suits a GPU, but more to compile, about a second each.
        """
        if scaling.is_cpu and self.slots.shape[1] == 1:
            return self.of_slots(scaling.device)
        return _fitted(self.rows, scaling.shape[1], scaling.device)

    def of_slots(self, device: torch.device) -> Tensor:
        """The weights of all slots, on a device: ``[1, num_slots]``."""
        return _fitted(self.slots, self.slots.shape[1], device)

    def owners_of(self, lora_B: Tensor) -> Tensor:
        """The slots that own the rows of ``lora_B [n, out]``, on its device: ``[n]``."""
        return _fitted(self.owners, lora_B.shape[0], lora_B.device)


def _fitted(buffer: Tensor, count: int, device: torch.device) -> Tensor:
    """The first values of a buffer, on a device; the buffer itself wherever that will do.

    A hook may have moved a layer since the buffer was placed.
    """
    if buffer.shape[-1] != count:
        buffer = buffer.narrow(-1, 0, count)
    return buffer if buffer.device == device else buffer.to(device)
