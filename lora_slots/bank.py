"""StagedAdapter -> the rows of a slot. The only place that writes into the model."""

from __future__ import annotations

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
        return vars(self) | {"_spare": (), "_generations": [-1] * self.num_slots}

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
        for name, rows in new.items():
            starts = self._starts(name, rows.targets, slot)
            torch._foreach_copy_(
                [
                    buffer.narrow(0, start, part.shape[0])
                    for (buffer, start), part in zip(starts, rows.rows, strict=True)
                ],
                list(rows.rows),
            )
        for name, rows in ({} if used is None else used.rows).items():
            filled = _counts(new.get(name))
            tails = [
                (target, filled.get(target, 0), count)
                for target, count in _counts(rows).items()
                if count > filled.get(target, 0)
            ]
            starts = self._starts(name, [target for target, _, _ in tails], slot)
            _zero_each(
                [
                    buffer.narrow(0, start + first, last - first)
                    for (buffer, start), (_, first, last) in zip(starts, tails, strict=True)
                ]
            )

    def _backup(self, slot: int, staged: StagedAdapter | None) -> StagedAdapter | None:
        """What to put back if a write fails: the staged copy where that is still exact."""
        if staged is None or self._generations[slot] == SlotLayer.generation:
            return staged
        # The model was cast since: the buffers hold what no staged copy does.
        rows = {
            name: StagedRows(
                own.targets,
                tuple(
                    buffer.narrow(0, start, part.shape[0]).clone()
                    for (buffer, start), part in zip(
                        self._starts(name, own.targets, slot), own.rows, strict=True
                    )
                ),
            )
            for name, own in staged.rows.items()
        }
        return StagedAdapter(staged.source, staged.targets, staged.scaling, staged.ranks, rows)

    def _starts(self, name: str, targets: Iterable[int], slot: int) -> list[tuple[Tensor, int]]:
        """The buffer ``name`` of each target, and the first of its rows that ``slot`` owns."""
        # Read anew each time, since `.to()` replaces buffers; from the dict, since attribute
        # look-up on a module costs microseconds.
        buffers: list[Tensor] = [self._layers[t]._buffers[name] for t in targets]  # type: ignore[misc]
        return [(b, slot * (b.shape[0] // self.num_slots)) for b in buffers]


def _counts(rows: StagedRows | None) -> dict[int, int]:
    """How many rows each target module has."""
    if rows is None:
        return {}
    return {target: part.shape[0] for target, part in zip(rows.targets, rows.rows, strict=True)}


def _zero_each(views: Sequence[Tensor]) -> None:
    if views:
        torch._foreach_zero_(list(views))


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
