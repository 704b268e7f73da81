"""With which weights adapters contribute: one table that all slot layers on one device share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from lora_slots.layers.base import SlotLayer, followed

_VIEWS = frozenset({"rows", "slots"})
_ALIGNED = 16  # elements, where vector instructions like a tensor to begin


class Mix(SlotLayer):
    """The weight of each row by rank, and of each slot, zero until adapters are active.

    To activate, weight or mix adapters is to write this one table, however many layers there are.
    It is a plain tensor: buffers of a module that is never called are not brought along by hooks
    that bring those of others. Being another module's module, it stays shared through ``.to()``.

    Attributes:
        table: ``[n]`` float32, the memory of ``rows`` and ``slots``.
        rows: ``[1, R]`` float32, the weight of the adapter that owns each row; 0 where that
            contributes nothing.
        slots: ``[1, num_slots]`` float32, the weight of each slot's adapter; 0 where that
            contributes nothing.
        owners: ``[R]`` int64, the slot that owns each row.
    """

    table: Tensor
    owners: Tensor
    rows: Tensor
    slots: Tensor

    def __init__(self, rows: int, num_slots: int, device: torch.device) -> None:
        """Let nothing contribute.

        Args:
            rows: How many rows by rank there are: R.
            num_slots: How many slots there are.
            device: Where the table is made.
        """
        super().__init__()
        self._rows, self._num_slots = rows, num_slots
        with torch.inference_mode(False):
            count = self.begin_of_slots(rows) + num_slots
            self._set(torch.zeros(count, dtype=torch.float32, device=device))
            self.owners = torch.zeros(rows, dtype=torch.int64, device=device)

    @staticmethod
    def begin_of_slots(rows: int) -> int:
        """Where the weights of slots begin in the table, after those of rows."""
        return -(-rows // _ALIGNED) * _ALIGNED

    def _set(self, table: Tensor) -> None:
        self.table = table
        self.rows = table[: self._rows].unsqueeze(0)
        self.slots = table[self.begin_of_slots(self._rows) :].unsqueeze(0)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the views: they would come back with memory of their own."""
        return {name: value for name, value in vars(self).items() if name not in _VIEWS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Undo `__getstate__`."""
        super().__setstate__(state)
        self._set(self.table)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow ``.to()``, but keep the dtypes."""
        self.owners = followed(self.owners, fn)
        new = followed(self.table, fn)
        if new is not self.table:
            SlotLayer.generation += 1
            self._set(new)
        return self

    def of_rows(self, scaling: Tensor) -> Tensor:
        """The weights of the rows that ``scaling [1, n]`` is for, on its device: ``[1, n]``."""
        return _fitted(self.rows, scaling.shape[1], scaling.device)

    def of_slots(self, device: torch.device) -> Tensor:
        """The weights of all slots, on a device: ``[1, num_slots]``."""
        return _fitted(self.slots, self.slots.shape[1], device)

    def owners_of(self, lora_B: Tensor) -> Tensor:
        """The slots that own the rows of ``lora_B [n, out]``, on its device: ``[n]``."""
        return _fitted(self.owners, lora_B.shape[0], lora_B.device)


def _fitted(table: Tensor, count: int, device: torch.device) -> Tensor:
    """The first values of a table, on a device; the table itself wherever that will do.

    A hook may have moved a layer since the table was placed.
    """
    if table.shape[-1] != count:
        table = table.narrow(-1, 0, count)
    return table if table.device == device else table.to(device)
