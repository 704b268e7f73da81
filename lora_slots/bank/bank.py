"""StagedAdapter -> the rows of a slot. The only place that writes into the model."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from lora_slots.bank.routes import RouteTables, RouteWriter
from lora_slots.bank.rows import place
from lora_slots.bank.steering import Steering, Table, Tables
from lora_slots.holding import HoldLock
from lora_slots.layers import SlotLayer
from lora_slots.layers.base import BY_RANK
from lora_slots.layout import Layout
from lora_slots.roster import Roster
from lora_slots.staging.staged import StagedAdapter, StagedRows

_RECENT_TABLES = 16
_GRANULE = 8
# First row, targets, counts of rows, buffers, and the views of those buffers.
_KnownViews = tuple[int | None, tuple[int, ...], tuple[int, ...], list[Tensor], list[Tensor]]


@dataclass(frozen=True, eq=False)
class BankState:
    """What the model holds, and for whom. Replaced as one: who reads it once sees no half change.

    Attributes:
        roster: Whose the slots are.
        held: What each slot holds.
        starts: The first row by rank of each slot that holds something.
        tables: What the steering buffers hold.
        shown: How many rows the model's forward sees; None: all.
        routes: What tells the rows of a batch apart; None: nothing.
    """

    roster: Roster
    held: tuple[StagedAdapter | None, ...]
    starts: Mapping[int, int]
    tables: Tables
    shown: int | None = None
    routes: RouteTables | None = None


@dataclass(frozen=True)
class _Work:
    """Slots that hold something else, or elsewhere, than before.

    Attributes:
        changed: All of them.
        unused: Those that contribute nothing before.
        early: Those of ``unused`` that get rows that contribute nothing before.
        late: The others that hold something.
        is_seen: Whether a forward would notice the change.
    """

    changed: Sequence[int]
    unused: Sequence[int]
    early: Sequence[int]
    late: Sequence[int]
    is_seen: bool

    @property
    def used(self) -> list[int]:
        """Those that contribute before."""
        return [slot for slot in self.changed if slot not in self.unused]


class Bank:
    """The slots of a model, and a staged host copy of what each one holds.

    In ``lora_A``, ``lora_B`` and ``scaling``, a slot owns a run of as many rows as its adapter
    needs; in every other buffer, slot ``s`` owns rows ``s * n : (s + 1) * n``, n the same for all.
    What is not needed is zero. Every write happens whole or is rolled back, and rows in use are
    written only while nobody holds. One thread changes at a time: callers see to that.
    """

    def __init__(
        self,
        layout: Layout,
        lock: HoldLock,
        *,
        max_rank: int,
        num_slots: int,
        buckets: Sequence[int] | None = None,
        routing: bool = False,
    ) -> None:
        """Start with all slots empty, as the buffers are.

        Args:
            layout: The target modules, with slots attached.
            lock: Keeps holders out where they would notice a write.
            max_rank: The largest rank of an adapter.
            num_slots: How many adapters can be held.
            buckets: How many rows the model's forward may see, ascending, all rows last: it sees
                the smallest of these that has room for the active slots, whose rows are moved there
                where need be. None: all rows, and a slot's rows never move.
            routing: Whether the rows of a batch can be told apart.
        """
        self.max_rank = max_rank
        self.num_slots = num_slots
        self._buckets = None if buckets is None else tuple(buckets)
        # Rows are owned in multiples of this.
        self._granule = max_rank if buckets is None else min(_GRANULE, max_rank)
        self._lock = lock
        self._layers: list[SlotLayer] = [target.slots for target in layout]
        self._spare: list[tuple[Tensor, ...]] = []
        self._known_views: dict[tuple[int, str], _KnownViews] = {}
        # Tables by the weights they are for, since users go back and forth between a few mixes.
        self._recent: dict[object, BankState] = {}
        # How often the buffers had been replaced when each slot was written.
        self._generations = [SlotLayer.generation] * num_slots
        nothing: tuple[None, ...] = (None,) * num_slots
        self._routes = RouteWriter(layout) if routing else None
        self._steering = [Steering(self._layers, name) for name in Tables._fields]
        nobody = Roster(num_slots)
        self.state = BankState(nobody, nothing, {}, self._tables(nothing, {}, {}))
        self._enter(self._planned(nothing, nobody))

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles have buffers of their own."""
        return vars(self) | {
            "_spare": [],
            "_known_views": {},
            "_generations": [-1] * self.num_slots,
        }

    def held(self, slot: int) -> StagedAdapter | None:
        """What ``slot`` holds."""
        return self.state.held[slot]

    def take_spare(self) -> tuple[Tensor, ...]:
        """Host memory of the adapter that was replaced last, which nothing refers to now."""
        try:
            return self._spare.pop()  # in one step: loads stage in any thread
        except IndexError:
            return ()

    @property
    def routing(self) -> bool:
        """Whether the rows of a batch can be told apart."""
        return self._routes is not None

    def write(self, slot: int, staged: StagedAdapter | None, roster: Roster) -> None:
        """Replace what ``slot`` holds, empty those that are nobody's, and set all weights.

        Args:
            slot: The slot to write.
            staged: What it shall hold; None empties it.
            roster: Whose the slots are now.

        Raises:
            ArgumentError: A weight times a scaling leaves the range of float32. Nothing is written.
            BaseException: Whatever a copy raises, after everything was put back as it was.
        """
        self.write_all({slot: staged}, roster)

    def write_all(self, changes: Mapping[int, StagedAdapter | None], roster: Roster) -> None:
        """Replace what several slots hold, as `write` does for one: all of it, or nothing.

        Args:
            changes: What each of these slots shall hold; None empties it.
            roster: Whose the slots are now.

        Raises:
            ArgumentError: As `write` does.
            BaseException: As `write` does.
        """
        before = self.state.held
        owned = {entry.slot for entry in roster.entries.values()}
        held = [own if number in owned else None for number, own in enumerate(before)]
        for slot, staged in changes.items():
            held[slot] = staged
        self._recent.clear()
        self._enter(self._planned(tuple(held), roster))
        replaced = (own.blocks for own in before if own is not None and own not in held)
        loads = any(staged is not None for staged in changes.values())
        self._spare = list(itertools.islice(replaced, 1)) if loads else []

    def set_weights(self, roster: Roster) -> None:
        """Set which slots contribute, and how much.

        Raises:
            ArgumentError: A weight times a scaling leaves the range of float32. Nothing is written.
            BaseException: Whatever a copy raises, after everything was put back as it was.
        """
        key = (tuple(sorted(roster.slot_weights().items())), roster.row_weights())
        state = self._recent.get(key) or self._planned(self.state.held, roster)
        self._enter(replace(state, roster=roster))
        if len(self._recent) >= _RECENT_TABLES:
            self._recent.clear()
        self._recent[key] = state

    def _planned(self, held: tuple[StagedAdapter | None, ...], roster: Roster) -> BankState:
        """The state that holds ``held`` and steers by ``roster``, moving as little as possible."""
        weights = roster.slot_weights()
        needs = {slot: need for slot, own in enumerate(held) if (need := self._need(own))}
        known = self.state.held
        before = {
            slot: start
            for slot, start in self.state.starts.items()
            if slot in needs and needs[slot] <= self._need(known[slot])
        }
        active = [slot for slot in weights if slot in needs]
        shown = None
        if self._buckets is not None:
            low = sum(needs[slot] for slot in active)
            shown = next(rows for rows in self._buckets if rows >= low)
        # Rows that are given up may be in use until then.
        left = {s: self._owned(s, self.state) for s in self.state.starts if s not in needs}
        starts = place(needs, before, total=self.rows, active=active, limit=shown, given_up=left)
        assert starts is not None
        routes, rows = None, roster.row_weights()
        if rows is not None:
            owned = {slot: (start, needs[slot]) for slot, start in starts.items()}
            routes = RouteTables.of(rows, held, owned, columns=self.rows)
        tables = self._tables(held, starts, weights)
        return BankState(roster, held, starts, tables, shown, routes)

    @property
    def rows(self) -> int:
        """How many rows by rank there are: R."""
        return self.num_slots * self.max_rank

    @property
    def buckets(self) -> tuple[int, ...]:
        """How many of them the model's forward may see."""
        return self._buckets or (self.rows,)

    @contextmanager
    def showing(self, rows: int) -> Iterator[None]:
        """Let the model's forward see as many rows for a while, whatever is active."""
        self._show(rows if self._buckets else None, self.state.routes)
        try:
            yield
        finally:
            self._show(self.state.shown, self.state.routes)

    def _show(self, rows: int | None, routes: RouteTables | None) -> None:
        for layer in self._layers:
            layer.show(rows)
        if self._routes is not None:
            self._routes.write(routes, rows)

    def _need(self, staged: StagedAdapter | None) -> int:
        """How many rows by rank an adapter owns."""
        rank = 0 if staged is None else max(staged.ranks)
        return min(-(-rank // self._granule) * self._granule, self.max_rank)

    def _enter(self, state: BankState) -> None:
        """Bring the model from its state to another, or leave it as it was.

        First what contributes nothing yet is written. Then holders are waited for, if they would
        notice what follows, and what they see is flipped. At last rows that were given up are
        zeroed.
        """
        old = self.state
        work = self._work(old, state)
        undo = self._undo(work.changed)
        try:
            self._zero(work.unused, old, state)
            self._fill(work.early, state)
            flip = partial(self._flip, work, state, undo)
            if work.is_seen:
                self._lock.alone(flip)
            else:
                flip()
            if not work.late:
                self._zero(work.used, old, state)
        except BaseException:
            if self.state is state:
                self._lock.alone(partial(self._flip_back, work, state, undo, old))
            self._zero(work.early, state, undo)
            self._fill(work.unused, undo)
            raise
        for slot in work.changed:
            self._generations[slot] = SlotLayer.generation

    def _work(self, old: BankState, new: BankState) -> _Work:
        """What has to be written between two states, by whether anyone may be reading it."""
        changed = [
            slot
            for slot in range(self.num_slots)
            if new.held[slot] is not old.held[slot] or new.starts.get(slot) != old.starts.get(slot)
        ]
        in_use = old.roster.slot_weights().keys()
        read = [self._owned(slot, old) for slot in in_use]
        unused = [slot for slot in changed if slot not in in_use]
        early = [slot for slot in unused if not _overlap(self._owned(slot, new), read)]
        late = [s for s in changed if s not in early and new.held[s] is not None]
        is_seen = (
            bool(late)
            or new.shown != old.shown
            or not np.array_equal(new.tables.scaling, old.tables.scaling)
            or not np.array_equal(new.tables.weights, old.tables.weights)
            or new.routes is not old.routes
        )
        return _Work(changed, unused, early, late, is_seen)

    def _owned(self, slot: int, state: BankState) -> range:
        """The rows by rank that a slot owns."""
        start = state.starts.get(slot, 0)
        return range(start, start + self._need(state.held[slot]))

    def _undo(self, changed: Collection[int]) -> BankState:
        """The state of the model, with what its buffers hold now."""
        held = [
            self._backup(slot, own) if slot in changed else own
            for slot, own in enumerate(self.state.held)
        ]
        return replace(self.state, held=tuple(held))

    def _flip(self, work: _Work, new: BankState, undo: BankState) -> None:
        """Let the new state be seen, and be what this bank says; or neither."""
        old = self.state
        try:
            if work.late:
                self._zero(work.used, old, new)
                self._fill(work.late, new)
            self._steer(old, new)
            self.state = new
        except BaseException:
            self._flip_back(work, new, undo, old)
            raise

    def _flip_back(self, work: _Work, new: BankState, undo: BankState, old: BankState) -> None:
        self._zero(work.changed, new, undo)
        self._fill(work.changed, undo)
        self._steer(new, undo)
        self.state = old

    def _steer(self, old: BankState, new: BankState) -> None:
        for steering, table in zip(self._steering, new.tables, strict=True):
            steering.write(cast("Table", table))
        if new.shown != old.shown:
            self._show(new.shown, new.routes)
        elif self._routes is not None:
            self._routes.write(new.routes, new.shown)

    def _zero(self, slots: Iterable[int], old: BankState, new: BankState) -> None:
        """Zero the rows of ``slots`` that were filled in ``old`` and are not in ``new``."""
        for slot in slots:
            own, other = old.held[slot], new.held[slot]
            for name, rows in ({} if own is None else own.rows).items():
                offset = self._offset(slot, name, old)
                stays = other is not None and offset == self._offset(slot, name, new)
                kept = other.rows.get(name) if other is not None and stays else None
                if kept is None:
                    views = self._views(slot, offset, name, rows.targets, rows.counts)
                else:
                    views = self._rows(slot, offset, name, *_tails(rows, kept))
                if views:
                    torch._foreach_zero_(views)

    def _fill(self, slots: Iterable[int], new: BankState) -> None:
        """Write what ``slots`` hold in ``new``; what they held before is zero already."""
        for slot in slots:
            own = new.held[slot]
            for name, rows in ({} if own is None else own.rows).items():
                offset = self._offset(slot, name, new)
                views = self._views(slot, offset, name, rows.targets, rows.counts)
                if views:
                    torch._foreach_copy_(views, list(rows.rows))

    def _offset(self, slot: int, name: str, state: BankState) -> int | None:
        """The first row that a slot owns of a buffer; None: of those that fall to its share."""
        return state.starts[slot] if name in BY_RANK else None

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
            share = slot * (buffer.shape[0] // self.num_slots)
            start = share if offset is None else offset
            views.append(buffer.narrow(0, start + first, last - first))
        return views

    def _backup(self, slot: int, staged: StagedAdapter | None) -> StagedAdapter | None:
        """What to put back if a write fails: the staged copy where that is still exact."""
        if staged is None or self._generations[slot] == SlotLayer.generation:
            return staged
        # The model was cast since: the buffers hold what no staged copy does.
        rows = {}
        for name, own in staged.rows.items():
            offset = self._offset(slot, name, self.state)
            views = self._views(slot, offset, name, own.targets, own.counts)
            rows[name] = StagedRows(own.targets, tuple(view.clone() for view in views))
        return replace(staged, rows=rows, blocks=())

    def _tables(
        self,
        held: Sequence[StagedAdapter | None],
        starts: Mapping[int, int],
        weights: Mapping[int, float],
    ) -> Tables:
        tables = Tables.zero(len(self._layers), self.rows, self.num_slots)
        for slot, staged in enumerate(held):
            if staged is not None:
                first = starts.get(slot, 0)
                tables.own(slot, first, self._need(staged))
                if slot in weights:
                    tables.activate(slot, staged, first, weights[slot])
        return tables

    def _buffers(self, name: str, targets: Iterable[int]) -> list[Tensor]:
        # Read anew each time, since `.to()` replaces buffers.
        if self._buckets is None:
            layers = self._layers
            return [layers[target]._buffers[name] for target in targets]  # type: ignore[misc]
        return [self._layers[target].whole(name) for target in targets]  # type: ignore[misc]


def _overlap(rows: range, others: Iterable[range]) -> bool:
    return any(rows.start < other.stop and other.start < rows.stop for other in others)


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
