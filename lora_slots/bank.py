"""StagedAdapter -> the rows of a slot. The only place that writes into the model."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lora_slots.errors import ArgumentError
from lora_slots.layers import SlotLayer
from lora_slots.layout import Layout
from lora_slots.staged import StagedAdapter, StagedRows
from lora_slots.steering import Steering, Table

_RECENT_TABLES = 16
# Targets, counts of rows, buffers, and the views of those buffers.
_KnownViews = tuple[tuple[int, ...], tuple[int, ...], list[Tensor], list[Tensor]]


class _Tables(NamedTuple):
    """What the steering buffers hold.

    Attributes:
        scaling: ``[modules, R]``.
        weights: ``[modules, slots]``.
    """

    scaling: Table
    weights: Table


class Bank:
    """The slots of a model, and a staged host copy of what each one holds.

    Slot ``s`` owns rows ``s * n : (s + 1) * n`` of every buffer, n its share: max_rank rows of
    ``lora_A`` and ``lora_B``. An adapter fills the first rows of a share; the rest are zero. Every
    write happens whole or is rolled back.
    """

    def __init__(self, layout: Layout, *, max_rank: int, num_slots: int) -> None:
        """Start with all slots empty, as the buffers are."""
        self.max_rank = max_rank
        self.num_slots = num_slots
        self._layers: list[SlotLayer] = [target.slots for target in layout]
        self._held: list[StagedAdapter | None] = [None] * num_slots
        self._spare: tuple[Tensor, ...] = ()
        self._known_views: dict[tuple[int, str], _KnownViews] = {}
        # Tables by the weights they are for, since users go back and forth between a few mixes.
        self._recent: dict[tuple[tuple[int, float], ...], _Tables] = {}
        # How often the buffers had been replaced when each slot was written.
        self._generations = [SlotLayer.generation] * num_slots
        # The scaling at weight 1 of every module and slot, which rows of a slot it holds for,
        # which modules a slot's adapter covers, and the tables that the model now holds.
        modules = len(layout)
        self._units = np.zeros((modules, num_slots))
        self._used = np.zeros((modules, num_slots, max_rank), dtype=np.float32)
        self._covered = np.zeros((modules, num_slots), dtype=bool)
        self._tables = _weighted(self._units, self._used, self._covered, {})
        self._scaling = Steering(self._layers, "scaling")
        self._weights = Steering(self._layers, "weights")

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles have buffers of their own."""
        return vars(self) | {
            "_spare": (),
            "_known_views": {},
            "_generations": [-1] * self.num_slots,
        }

    def held(self, slot: int) -> StagedAdapter | None:
        """What ``slot`` holds."""
        return self._held[slot]

    @property
    def spare(self) -> tuple[Tensor, ...]:
        """Host memory of the adapter that was overwritten last, which nothing refers to now."""
        return self._spare

    def write(self, slot: int, staged: StagedAdapter | None, weights: Mapping[int, float]) -> None:
        """Replace what ``slot`` holds, then set the weight of every slot.

        Args:
            slot: The slot to write; other slots' rows are not touched.
            staged: What it shall hold; None empties it.
            weights: The weight of each slot that shall contribute; others contribute nothing.

        Raises:
            ArgumentError: A weight times a scaling leaves the range of float32. Nothing is written.
            BaseException: Whatever a copy raises, after everything was put back as it was.
        """
        before = self._held[slot]
        units, used, covered = self._units.copy(), self._used.copy(), self._covered.copy()
        _describe(staged, units[:, slot], used[:, slot], covered[:, slot])
        tables = _weighted(units, used, covered, weights)
        undo = self._backup(slot, before)
        try:
            self._copy(slot, staged, used=before)
            self._steer(tables)
        except BaseException:
            self._copy(slot, undo, used=staged)
            self._steer(self._tables)
            raise
        self._held[slot], self._tables = staged, tables
        self._units, self._used, self._covered = units, used, covered
        self._generations[slot] = SlotLayer.generation
        self._recent.clear()
        self._spare = () if before is None or staged is None else before.blocks

    def set_weights(self, weights: Mapping[int, float]) -> None:
        """Set which slots contribute, and how much. Writes steering buffers and nothing else.

        Raises:
            ArgumentError: A weight times a scaling leaves the range of float32. Nothing is written.
            BaseException: Whatever a copy raises, after everything was put back as it was.
        """
        key = tuple(sorted(weights.items()))
        tables = self._recent.get(key)
        if tables is None:
            tables = _weighted(self._units, self._used, self._covered, weights)
        try:
            self._steer(tables)
        except BaseException:
            self._steer(self._tables)
            raise
        self._tables = tables
        if len(self._recent) >= _RECENT_TABLES:
            self._recent.clear()
        self._recent[key] = tables

    def _steer(self, tables: _Tables) -> None:
        self._scaling.write(tables.scaling)
        self._weights.write(tables.weights)

    def _copy(self, slot: int, staged: StagedAdapter | None, *, used: StagedAdapter | None) -> None:
        """Write the rows of ``staged``, and zero those that only ``used`` has."""
        new = {} if staged is None else staged.rows
        old = {} if used is None else used.rows
        for name, rows in new.items():
            views = self._views(slot, name, rows.targets, rows.counts)
            if views:
                torch._foreach_copy_(views, list(rows.rows))
        for name, rows in old.items():
            targets, firsts, lasts = _tails(rows, new.get(name))
            if targets:
                torch._foreach_zero_(self._rows(slot, name, targets, firsts, lasts))

    def _views(
        self, slot: int, name: str, targets: tuple[int, ...], counts: tuple[int, ...]
    ) -> list[Tensor]:
        """The first ``counts`` rows that a slot owns of the buffer ``name`` of each target.

        Making hundreds of views costs more than the copies into them, so the last ones are kept for
        as long as the buffers are the same.
        """
        buffers = self._buffers(name, targets)
        known = self._known_views.get((slot, name))
        if known is None or known[:2] != (targets, counts) or not _same(known[2], buffers):
            views = self._rows(slot, name, targets, [0] * len(targets), counts)
            known = self._known_views[slot, name] = (targets, counts, buffers, views)
        return known[3]

    def _rows(
        self,
        slot: int,
        name: str,
        targets: Sequence[int],
        firsts: Sequence[int],
        lasts: Sequence[int],
    ) -> list[Tensor]:
        """Rows ``first : last`` of those that a slot owns of the buffer ``name`` of each target."""
        return [
            buffer.narrow(0, slot * (buffer.shape[0] // self.num_slots) + first, last - first)
            for buffer, first, last in zip(self._buffers(name, targets), firsts, lasts, strict=True)
        ]

    def _backup(self, slot: int, staged: StagedAdapter | None) -> StagedAdapter | None:
        """What to put back if a write fails: the staged copy where that is still exact."""
        if staged is None or self._generations[slot] == SlotLayer.generation:
            return staged
        # The model was cast since: the buffers hold what no staged copy does.
        rows = {
            name: StagedRows(
                own.targets,
                tuple(view.clone() for view in self._views(slot, name, own.targets, own.counts)),
            )
            for name, own in staged.rows.items()
        }
        return StagedAdapter(staged.source, staged.targets, staged.scaling, staged.ranks, rows)

    def _buffers(self, name: str, targets: Iterable[int]) -> list[Tensor]:
        # Read anew each time, since `.to()` replaces buffers; from the dict, since attribute
        # look-up on a module costs microseconds.
        return [self._layers[target]._buffers[name] for target in targets]  # type: ignore[misc]


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(map(operator.is_, some, others))


def _tails(old: StagedRows, new: StagedRows | None) -> tuple[list[int], list[int], list[int]]:
    """The targets where ``old`` has more rows than ``new``, and from where to where."""
    if new is not None and (old.targets, old.counts) == (new.targets, new.counts):
        return [], [], []
    filled = {} if new is None else dict(zip(new.targets, new.counts, strict=True))
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


def _describe(
    staged: StagedAdapter | None,
    units: NDArray[np.float64],
    used: Table,
    covered: NDArray[np.bool_],
) -> None:
    """Fill in what one slot's adapter says of every module.

    Args:
        staged: The adapter; None for none.
        units: Becomes its scalings at weight 1: ``[modules]``.
        used: Becomes the rows they hold for, 1 or 0: ``[modules, max_rank]``.
        covered: Becomes the modules it covers: ``[modules]``.
    """
    units[:], used[:], covered[:] = 0, 0, False
    if staged is not None:
        targets = list(staged.targets)
        units[targets] = staged.scaling
        used[targets] = np.arange(used.shape[1]) < np.array(staged.ranks)[:, None]
        covered[targets] = True


def _weighted(
    units: NDArray[np.float64],
    used: Table,
    covered: NDArray[np.bool_],
    weights: Mapping[int, float],
) -> _Tables:
    """What the steering buffers must hold.

    Args:
        units: The scalings at weight 1: ``[modules, slots]``.
        used: The rows they hold for: ``[modules, slots, max_rank]``.
        covered: Which modules the adapter of a slot covers: ``[modules, slots]``.
        weights: The weight of each slot that contributes.
    """
    scaling = np.zeros_like(used)
    by_slot = np.zeros(covered.shape, dtype=np.float32)
    for slot, weight in weights.items():
        with np.errstate(over="ignore"):
            scalings = (units[:, slot] * weight).astype(np.float32)
            by_slot[:, slot] = covered[:, slot] * np.float32(weight)
        if not (np.isfinite(scalings).all() and np.isfinite(by_slot[:, slot]).all()):
            raise ArgumentError(
                f"a weight times the adapter's scaling must be a finite float32, got weight "
                f"{weight!r} times scalings up to {float(abs(units[:, slot]).max())!r}"
            )
        np.multiply(used[:, slot], scalings[:, None], out=scaling[:, slot])
    return _Tables(scaling.reshape(len(units), -1), by_slot)
