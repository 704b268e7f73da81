"""StagedAdapter -> the rows of a slot. The only place that writes into the model."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lora_slots.errors import ArgumentError
from lora_slots.layers import SlotLayer
from lora_slots.layout import Layout
from lora_slots.staging import StagedAdapter

Table = NDArray[np.float32]
_RECENT_TABLES = 16
_ALIGNED = 16  # float32 values, 64 bytes


@dataclass(frozen=True, eq=False)
class _ScalingGroup:
    """The ``scaling`` buffers on one device, and a table there that is copied into them.

    Attributes:
        indices: Which modules they belong to.
        scalings: The buffers, ``[1, R]`` each.
        table: ``[buffers, R]`` on their device.
        rows: The rows of ``table``, ``[1, R]`` each; none where the buffers are those rows.
    """

    indices: list[int]
    scalings: list[Tensor]
    table: Tensor
    rows: list[Tensor]

    def write(self, table: Table) -> None:
        """Copy the rows of ``table [modules, R]`` that belong to this group."""
        own = table if len(self.indices) == len(table) else table[self.indices]
        self.table.copy_(torch.from_numpy(own))
        if self.rows:
            torch._foreach_copy_(self.scalings, self.rows)


class Bank:
    """The slots of a model, and a staged host copy of what each one holds.

    Slot ``s`` owns rows ``s * max_rank : (s + 1) * max_rank`` of every module. An adapter of rank
    r fills the first r of them; the rest are zero. Every write happens whole or is rolled back.
    """

    def __init__(self, layout: Layout, *, max_rank: int, num_slots: int) -> None:
        """Start with all slots empty, as the buffers are."""
        self.max_rank = max_rank
        self.num_slots = num_slots
        self._layers: list[SlotLayer] = [target.slots for target in layout]
        self._held: list[StagedAdapter | None] = [None] * num_slots
        self._spare: tuple[Tensor, ...] = ()
        # Tables by the weights they are for, since users go back and forth between a few mixes.
        self._recent: dict[tuple[tuple[int, float], ...], Table] = {}
        # How often the buffers had been replaced when each slot was written.
        self._generations = [SlotLayer.generation] * num_slots
        # The scaling at weight 1 of every module and slot, which rows of a slot it holds for, and
        # the table [modules, R] that the model now holds.
        self._units = np.zeros((len(layout), num_slots))
        self._used = np.zeros((len(layout), num_slots, max_rank), dtype=np.float32)
        self._table = np.zeros((len(layout), num_slots * max_rank), dtype=np.float32)
        scalings = self._buffers("scaling", range(len(self._layers)))
        self._groups = self._group(scalings, shared=True)
        self._scalings = self._buffers("scaling", range(len(self._layers)))

    def __getstate__(self) -> dict[str, object]:
        """Leave out what is looked up again: copies and pickles have buffers of their own."""
        unknown = [-1] * self.num_slots
        return vars(self) | {
            "_groups": [],
            "_scalings": [None] * len(self._layers),
            "_spare": (),
            "_generations": unknown,
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
        units, used = self._units.copy(), self._used.copy()
        units[:, slot], used[:, slot] = _unit_rows(staged, len(self._layers), self.max_rank)
        table = _weighted(units, used, weights)
        undo = self._backup(slot, before)
        try:
            self._copy(slot, staged, used=before)
            self._write_scaling(table)
        except BaseException:
            self._copy(slot, undo, used=staged)
            self._write_scaling(self._table)
            raise
        self._held[slot], self._units, self._used, self._table = staged, units, used, table
        self._generations[slot] = SlotLayer.generation
        self._recent.clear()
        self._spare = () if before is None or staged is None else before.blocks

    def set_weights(self, weights: Mapping[int, float]) -> None:
        """Set which slots contribute, and how much. Writes ``scaling`` and nothing else.

        Raises:
            ArgumentError: A weight times a scaling leaves the range of float32. Nothing is written.
            BaseException: Whatever a copy raises, after everything was put back as it was.
        """
        key = tuple(sorted(weights.items()))
        table = self._recent.get(key)
        if table is None:
            table = _weighted(self._units, self._used, weights)
        try:
            self._write_scaling(table)
        except BaseException:
            self._write_scaling(self._table)
            raise
        self._table = table
        if len(self._recent) >= _RECENT_TABLES:
            self._recent.clear()
        self._recent[key] = table

    def _copy(self, slot: int, staged: StagedAdapter | None, *, used: StagedAdapter | None) -> None:
        """Write the rows of ``staged``, and zero those that only ``used`` has."""
        start = slot * self.max_rank
        ranks = {} if staged is None else dict(zip(staged.targets, staged.ranks, strict=True))
        if staged is not None:
            for name, rows in (("lora_A", staged.lora_A), ("lora_B", staged.lora_B)):
                buffers = self._buffers(name, staged.targets)
                views = [
                    buffer.narrow(0, start, part.shape[0])
                    for buffer, part in zip(buffers, rows, strict=True)
                ]
                _copy_each(views, rows)
        if used is not None:
            tails = [
                (target, ranks.get(target, 0), rank)
                for target, rank in zip(used.targets, used.ranks, strict=True)
                if rank > ranks.get(target, 0)
            ]
            for name in ("lora_A", "lora_B"):
                buffers = self._buffers(name, [target for target, _, _ in tails])
                _zero_each(
                    [
                        buffer.narrow(0, start + first, last - first)
                        for buffer, (_, first, last) in zip(buffers, tails, strict=True)
                    ]
                )

    def _backup(self, slot: int, staged: StagedAdapter | None) -> StagedAdapter | None:
        """What to put back if a write fails: the staged copy where that is still exact."""
        if staged is None:
            return None
        if self._generations[slot] == SlotLayer.generation:
            return staged
        # The model was cast since: the buffers hold what no staged copy does.
        rows = {
            name: tuple(
                buffer.narrow(0, slot * self.max_rank, rank).clone()
                for buffer, rank in zip(
                    self._buffers(name, staged.targets), staged.ranks, strict=True
                )
            )
            for name in ("lora_A", "lora_B")
        }
        return StagedAdapter(
            staged.source, staged.targets, staged.scaling, rows["lora_A"], rows["lora_B"]
        )

    def _write_scaling(self, table: Table) -> None:
        """Copy ``table [modules, R]`` into every ``scaling [1, R]``, once over to each device."""
        scalings = self._buffers("scaling", range(len(self._layers)))
        if not all(map(operator.is_, self._scalings, scalings)):
            self._scalings, self._groups = scalings, self._group(scalings)
        for group in self._groups:
            group.write(table)

    def _group(self, scalings: list[Tensor], *, shared: bool = False) -> list[_ScalingGroup]:
        """Sort the ``scaling`` buffers by device; ``shared`` makes them rows of one table each.

        One table is written in one copy, where hundreds of small tensors cost a look-up each. What
        ``.to()`` or a hook puts in their place later shares nothing, and is copied one by one.
        """
        by_device: dict[torch.device, list[int]] = defaultdict(list)
        for index, scaling in enumerate(scalings):
            by_device[scaling.device].append(index)
        groups = []
        with torch.inference_mode(False):
            for device, indices in by_device.items():
                columns = scalings[0].shape[1]
                # Rows begin where vector instructions like them to.
                stride = -(-columns // _ALIGNED) * _ALIGNED
                memory = torch.zeros(len(indices) * stride, dtype=torch.float32, device=device)
                table = memory.view(-1, stride)[:, :columns]
                rows = [
                    memory.as_strided((1, columns), (columns, 1), number * stride)
                    for number in range(len(indices))
                ]
                if shared:
                    for index, row in zip(indices, rows, strict=True):
                        self._layers[index].scaling = row
                    groups.append(_ScalingGroup(indices, rows, table, []))
                else:
                    own = [scalings[index] for index in indices]
                    groups.append(_ScalingGroup(indices, own, table, rows))
        return groups

    def _buffers(self, name: str, targets: Iterable[int]) -> list[Tensor]:
        # Read anew each time, since `.to()` replaces buffers; from the dict, since attribute
        # look-up on a module costs microseconds.
        return [self._layers[target]._buffers[name] for target in targets]  # type: ignore[misc]


def _copy_each(views: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
    if views:
        torch._foreach_copy_(list(views), list(rows))


def _zero_each(views: Sequence[Tensor]) -> None:
    if views:
        torch._foreach_zero_(list(views))


def _unit_rows(
    staged: StagedAdapter | None, modules: int, max_rank: int
) -> tuple[NDArray[np.float64], Table]:
    """What a slot's scalings are at weight 1, ``[modules]``, and for which rows of it.

    The rows are 1 or 0: ``[modules, max_rank]``.
    """
    units = np.zeros(modules)
    used = np.zeros((modules, max_rank), dtype=np.float32)
    if staged is not None:
        targets = list(staged.targets)
        units[targets] = staged.scaling
        used[targets] = np.arange(max_rank) < np.array(staged.ranks)[:, None]
    return units, used


def _weighted(units: NDArray[np.float64], used: Table, weights: Mapping[int, float]) -> Table:
    """The scaling table ``[modules, R]``.

    Args:
        units: The scalings at weight 1: ``[modules, slots]``.
        used: The rows they hold for: ``[modules, slots, max_rank]``.
        weights: The weight of each slot that contributes.
    """
    table = np.zeros_like(used)
    for slot, weight in weights.items():
        with np.errstate(over="ignore"):
            scalings = (units[:, slot] * weight).astype(np.float32)
        if not np.isfinite(scalings).all():
            raise ArgumentError(
                f"a weight times the adapter's scaling must be a finite float32, got weight "
                f"{weight!r} times scalings up to {float(abs(units[:, slot]).max())!r}"
            )
        np.multiply(used[:, slot], scalings[:, None], out=table[:, slot])
    return table.reshape(len(units), -1)
