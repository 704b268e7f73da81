"""StagedAdapter -> the rows of a slot. The only place that writes into the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lora_slots.errors import ArgumentError
from lora_slots.layers import SlotLayer
from lora_slots.layout import Layout
from lora_slots.staging import StagedAdapter


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
        # What each row's scaling is at weight 1, and what the model now holds.
        self._units = _zeros(num_slots, len(layout), max_rank, dtype=torch.float64)
        self._table = _zeros(len(layout), num_slots * max_rank, dtype=torch.float32)

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
        units = self._units.clone()
        units[slot] = _unit_rows(staged, len(self._layers), self.max_rank)
        table = _weighted(units, weights)
        undo = self._backup(slot, before)
        try:
            self._copy(slot, staged, used=before)
            self._write_scaling(table)
        except BaseException:
            self._copy(slot, undo, used=staged)
            self._write_scaling(self._table)
            raise
        self._held[slot], self._units, self._table = staged, units, table
        self._spare = () if before is None or staged is None else before.blocks

    def set_weights(self, weights: Mapping[int, float]) -> None:
        """Set which slots contribute, and how much. Writes ``scaling`` and nothing else.

        Raises:
            ArgumentError: A weight times a scaling leaves the range of float32. Nothing is written.
            BaseException: Whatever a copy raises, after everything was put back as it was.
        """
        table = _weighted(self._units, weights)
        try:
            self._write_scaling(table)
        except BaseException:
            self._write_scaling(self._table)
            raise
        self._table = table

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
        buffers = self._buffers("lora_A", staged.targets)
        if all(
            buffer.dtype == part.dtype for buffer, part in zip(buffers, staged.lora_A, strict=True)
        ):
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

    def _write_scaling(self, table: Tensor) -> None:
        """Copy ``table [modules, R]`` into every ``scaling [1, R]``, once over each device."""
        by_device: dict[torch.device, list[int]] = defaultdict(list)
        scalings = self._buffers("scaling", range(len(self._layers)))
        for index, scaling in enumerate(scalings):
            by_device[scaling.device].append(index)
        for device, indices in by_device.items():
            rows = table if len(indices) == len(table) else table[indices]
            _copy_each(
                [scalings[index] for index in indices], rows.to(device).unsqueeze(1).unbind()
            )

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


def _unit_rows(staged: StagedAdapter | None, modules: int, max_rank: int) -> Tensor:
    """The scaling of every row of a slot at weight 1: ``[modules, max_rank]`` float64."""
    rows = _zeros(modules, max_rank, dtype=torch.float64)
    if staged is not None:
        ranks = torch.tensor(staged.ranks, device="cpu")
        scaling = torch.tensor(staged.scaling, dtype=torch.float64, device="cpu")
        used = torch.arange(max_rank, device="cpu") < ranks[:, None]
        rows[torch.tensor(staged.targets, device="cpu")] = torch.where(used, scaling[:, None], 0.0)
    return rows


def _zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    # On the host whatever the user's default device is.
    return torch.zeros(shape, dtype=dtype, device="cpu")


def _weighted(units: Tensor, weights: Mapping[int, float]) -> Tensor:
    """The scaling table ``[modules, R]`` float32 of ``units [slots, modules, max_rank]``."""
    slots = units.shape[0]
    factors = _zeros(slots, dtype=torch.float64)
    for slot, weight in weights.items():
        factors[slot] = weight
    table = (units * factors[:, None, None]).float()
    if not torch.isfinite(table).all():
        slot = next(s for s in range(slots) if not torch.isfinite(table[s]).all())
        raise ArgumentError(
            f"a weight times the adapter's scaling must be a finite float32, got weight "
            f"{weights[slot]!r} times scalings up to {float(units[slot].abs().max())!r}"
        )
    return table.permute(1, 0, 2).reshape(units.shape[1], -1)
