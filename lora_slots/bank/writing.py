"""Copies rows into the buffers of the slot layers, zeroes them, and says what they hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from lora_slots.bank.buffers import Buffers, Start
from lora_slots.bank.places import Tail
from lora_slots.bank.state import BankState
from lora_slots.layers import SlotLayer
from lora_slots.layers.lora import BY_RANK
from lora_slots.staging.staged import StagedAdapter, StagedRows


class RowWriter:
    """Writes what slots hold, row by row.

    Of ``lora_A`` and ``lora_B`` a slot has the rows that a state says; of every other buffer, slot
    ``s`` has rows ``s * n : (s + 1) * n``, n the same for all. What an adapter does not fill of
    them is zero.
    """

    def __init__(self, layers: Sequence[SlotLayer], num_slots: int) -> None:
        """Start with all slots empty."""
        self._num_slots = num_slots
        names = dict.fromkeys(name for layer in layers for name in layer._buffers)
        self._buffers = {name: Buffers(layers, name) for name in names}
        # How often the buffers had been replaced when each slot was written.
        self._generations = [SlotLayer.generation] * num_slots

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles have buffers of their own."""
        return vars(self) | {"_generations": [-1] * self._num_slots}

    def zero(self, slots: Iterable[int], old: BankState, new: BankState) -> None:
        """Zero the rows of ``slots`` that were filled in ``old`` and are not in ``new``."""
        for slot in slots:
            own, other = old.held[slot], new.held[slot]
            for name, rows in ({} if own is None else own.rows).items():
                stays = other is not None and _begin(slot, name, old) == _begin(slot, name, new)
                kept = other.rows.get(name) if other is not None and stays else None
                if tails := _tails(rows, kept):
                    self._buffers[name].zero(tails, self._start(slot, name, old))

    def fill(self, slots: Iterable[int], new: BankState) -> None:
        """Write what ``slots`` hold in ``new``; what they held before is zero already."""
        for slot in slots:
            own = new.held[slot]
            for name, rows in ({} if own is None else own.rows).items():
                self._buffers[name].copy(rows, self._start(slot, name, new))

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
            start = self._start(slot, name, state)
            buffers = self._buffers[name].of(own.targets)
            copies = (
                buffer.narrow(0, start(buffer.shape[0]), count).clone()
                for buffer, count in zip(buffers, own.counts, strict=True)
            )
            rows[name] = StagedRows(own.targets, tuple(copies))
        return replace(staged, rows=rows, blocks=())

    def _start(self, slot: int, name: str, state: BankState) -> Start:
        """Says which row of a buffer ``name`` is the first that a slot owns."""
        begin = _begin(slot, name, state)
        if begin is not None:
            return lambda rows: begin
        return lambda rows: slot * (rows // self._num_slots)


def _begin(slot: int, name: str, state: BankState) -> int | None:
    """The first row that a slot owns of a buffer; None: of those that fall to its share."""
    return state.owned(slot).start if name in BY_RANK else None


def _tails(old: StagedRows, new: StagedRows | None) -> tuple[Tail, ...]:
    """The targets where ``old`` has more rows than ``new``, and from where to where."""
    if new is not None and (old.targets, old.counts) == (new.targets, new.counts):
        return ()
    filled = {} if new is None else dict(zip(new.targets, new.counts, strict=True))
    return tuple(
        (target, filled.get(target, 0), count)
        for target, count in zip(old.targets, old.counts, strict=True)
        if count > filled.get(target, 0)
    )
