"""Copies rows into the buffers of the slot layers, zeroes them, and says what they hold."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lora_slots.bank.state import BankState
from lora_slots.layers import SlotLayer
from lora_slots.layers.base import BY_RANK
from lora_slots.staging.staged import StagedAdapter, StagedRows

# First row, targets, counts of rows, buffers, and the views of those buffers.
_KnownViews = tuple[int | None, tuple[int, ...], tuple[int, ...], list[Tensor], list[Tensor]]


class RowWriter:
    """Writes what slots hold, row by row.

    Of ``lora_A`` and ``lora_B`` a slot has the rows that a state says; of every other buffer, slot
    ``s`` has rows ``s * n : (s + 1) * n``, n the same for all. What an adapter does not fill of
    them is zero.
    """

    def __init__(self, layers: Sequence[SlotLayer], num_slots: int, *, shows_all: bool) -> None:
        """Start with all slots empty; ``shows_all`` tells that forwards always see all rows."""
        self._layers = layers
        self._num_slots = num_slots
        self._shows_all = shows_all
        self._known_views: dict[tuple[int, str], _KnownViews] = {}
        # How often the buffers had been replaced when each slot was written.
        self._generations = [SlotLayer.generation] * num_slots

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles have buffers of their own."""
        return vars(self) | {"_known_views": {}, "_generations": [-1] * self._num_slots}

    def zero(self, slots: Iterable[int], old: BankState, new: BankState) -> None:
        """Zero the rows of ``slots`` that were filled in ``old`` and are not in ``new``."""
        for slot in slots:
            own, other = old.held[slot], new.held[slot]
            for name, rows in ({} if own is None else own.rows).items():
                offset = _offset(slot, name, old)
                stays = other is not None and offset == _offset(slot, name, new)
                kept = other.rows.get(name) if other is not None and stays else None
                if kept is None:
                    views = self._views(slot, offset, name, rows.targets, rows.counts)
                else:
                    views = self._rows(slot, offset, name, *_tails(rows, kept))
                if views:
                    torch._foreach_zero_(views)

    def fill(self, slots: Iterable[int], new: BankState) -> None:
        """Write what ``slots`` hold in ``new``; what they held before is zero already."""
        for slot in slots:
            own = new.held[slot]
            for name, rows in ({} if own is None else own.rows).items():
                offset = _offset(slot, name, new)
                views = self._views(slot, offset, name, rows.targets, rows.counts)
                if views:
                    torch._foreach_copy_(views, list(rows.rows))

    def backup(self, slots: Collection[int], state: BankState) -> BankState:
        """``state``, the model's, with what the buffers of ``slots`` hold now."""
        held = [
            self._backup(slot, own, state) if slot in slots else own
            for slot, own in enumerate(state.held)
        ]
        return replace(state, held=tuple(held))

    def done(self, slots: Iterable[int]) -> None:
        """Take note that ``slots`` hold exactly what was staged for them."""
        for slot in slots:
            self._generations[slot] = SlotLayer.generation

    def _backup(
        self, slot: int, staged: StagedAdapter | None, state: BankState
    ) -> StagedAdapter | None:
        """What to put back if a write fails: the staged copy where that is still exact."""
        if staged is None or self._generations[slot] == SlotLayer.generation:
            return staged
        # The model was cast since: the buffers hold what no staged copy does.
        rows = {}
        for name, own in staged.rows.items():
            offset = _offset(slot, name, state)
            views = self._views(slot, offset, name, own.targets, own.counts)
            rows[name] = StagedRows(own.targets, tuple(view.clone() for view in views))
        return replace(staged, rows=rows, blocks=())

    def _views(
        self,
        slot: int,
        offset: int | None,
        name: str,
        targets: tuple[int, ...],
        counts: tuple[int, ...],
    ) -> list[Tensor]:
        """The first ``counts`` rows that a slot owns of the buffer ``name`` of each target.

        Making hundreds of views costs more than the copies into them, so the last ones are kept for
        as long as the buffers are the same.
        """
        buffers = self._buffers(name, targets)
        known = self._known_views.get((slot, name))
        if known is None or known[:3] != (offset, targets, counts) or not _same(known[3], buffers):
            views = self._rows(slot, offset, name, targets, [0] * len(targets), counts)
            known = self._known_views[slot, name] = (offset, targets, counts, buffers, views)
        return known[4]

    def _rows(
        self,
        slot: int,
        offset: int | None,
        name: str,
        targets: Sequence[int],
        firsts: Sequence[int],
        lasts: Sequence[int],
    ) -> list[Tensor]:
        """Rows ``first : last`` of those that a slot owns of the buffer ``name`` of each target."""
        views = []
        for buffer, first, last in zip(self._buffers(name, targets), firsts, lasts, strict=True):
            share = slot * (buffer.shape[0] // self._num_slots)
            start = share if offset is None else offset
            views.append(buffer.narrow(0, start + first, last - first))
        return views

    def _buffers(self, name: str, targets: Iterable[int]) -> list[Tensor]:
        # Read anew each time, since `.to()` replaces buffers.
        if self._shows_all:
            layers = self._layers
            return [layers[target]._buffers[name] for target in targets]  # type: ignore[misc]
        return [self._layers[target].whole(name) for target in targets]  # type: ignore[misc]


def _offset(slot: int, name: str, state: BankState) -> int | None:
    """The first row that a slot owns of a buffer; None: of those that fall to its share."""
    return state.owned(slot).start if name in BY_RANK else None


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(map(operator.is_, some, others))


def _tails(old: StagedRows, new: StagedRows) -> tuple[list[int], list[int], list[int]]:
    """The targets where ``old`` has more rows than ``new``, and from where to where."""
    if (old.targets, old.counts) == (new.targets, new.counts):
        return [], [], []
    filled = dict(zip(new.targets, new.counts, strict=True))
    tails = [
        (target, filled.get(target, 0), count)
        for target, count in zip(old.targets, old.counts, strict=True)
        if count > filled.get(target, 0)
    ]
    return (
        [t for t, _, _ in tails],
        [first for _, first, _ in tails],
        [last for _, _, last in tails],
    )
