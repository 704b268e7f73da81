"""The slots of a model: every change of what they hold is made here, whole or not at all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from lora_slots.bank.ordering import Orders
from lora_slots.bank.planning import Planner
from lora_slots.bank.routes import RouteTables, RouteWriter
from lora_slots.bank.sharing import MixWriter
from lora_slots.bank.state import BankState
from lora_slots.bank.work import Work
from lora_slots.bank.writing import RowWriter
from lora_slots.eviction import Room
from lora_slots.holding import HoldLock
from lora_slots.layers import SlotLayer
from lora_slots.layout import Layout
from lora_slots.roster import Roster
from lora_slots.staging.staged import StagedAdapter


class Bank:
    """The slots of a model, and a staged host copy of what each one holds.

    In ``lora_A``, ``lora_B`` and ``scaling``, a slot owns a run of as many rows as its adapter
    needs; in every other buffer, slot ``s`` owns rows ``s * n : (s + 1) * n``, n the same for all.
    What is not needed is zero. Every write happens whole or is rolled back, and rows in use are
    written only while nobody holds. One thread changes at a time: callers see to that.

    A `Planner` says what the model shall hold next, `Work` what has to be written for that and
    when; a `RowWriter` and a `MixWriter` write it.
    """

    def __init__(
        self,
        layout: Layout,
        lock: HoldLock,
        *,
        max_rank: int,
        num_slots: int,
        rows: int,
        buckets: Sequence[int] | None = None,
        routing: bool = False,
    ) -> None:
        """Start with all slots empty, as the buffers are.

        Args:
            layout: The target modules, with slots attached.
            lock: Keeps holders out where they would notice a write.
            max_rank: The largest rank of an adapter.
            num_slots: How many adapters can be held.
            rows: How many rows by rank there are for all of them. As many as ``num_slots *
                max_rank``, and a slot's rows never move; fewer, and adapters have as many as they
                need, which are moved together where they are scattered.
            buckets: How many rows the model's forward may see, ascending, all rows last: it sees
                the smallest of these that has room for the active slots, whose rows are moved there
                where need be. None: all rows.
            routing: Whether the rows of a batch can be told apart.
        """
        layers = [target.slots for target in layout]
        self._planner = Planner(
            max_rank=max_rank,
            num_slots=num_slots,
            rows=rows,
            buckets=None if buckets is None else tuple(buckets),
        )
        self._writer = RowWriter(layers, num_slots)
        self._lock = lock
        self._layers: list[SlotLayer] = layers
        self._spare: list[StagedAdapter] = []
        self._routes = RouteWriter(layout) if routing else None
        self._mix = MixWriter(layers, rows=rows, num_slots=num_slots)
        self.orders = Orders()
        self.state = self._planner.empty()
        self._enter(self._planner.plan(self.state, self.state.held, self.state.roster))

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles have memory of their own."""
        return vars(self) | {"_spare": []}

    @property
    def max_rank(self) -> int:
        """The largest rank of an adapter."""
        return self._planner.max_rank

    @property
    def num_slots(self) -> int:
        """How many adapters can be held."""
        return self._planner.num_slots

    @property
    def rows(self) -> int:
        """How many rows by rank there are: R."""
        return self._planner.rows

    @property
    def buckets(self) -> tuple[int, ...]:
        """How many of them the model's forward may see."""
        return self._planner.buckets or (self.rows,)

    @property
    def routing(self) -> bool:
        """Whether the rows of a batch can be told apart."""
        return self._routes is not None

    def held(self, slot: int) -> StagedAdapter | None:
        """What ``slot`` holds."""
        return self.state.held[slot]

    def take_spare(self) -> StagedAdapter | None:
        """The adapter that was replaced last, whose memory nobody needs now."""
        try:
            return self._spare.pop()  # in one step: loads stage in any thread
        except IndexError:
            return None

    def make_room(
        self,
        wanted: Mapping[str, StagedAdapter | None],
        *,
        evict: bool,
        roster: Roster | None = None,
    ) -> tuple[Roster, tuple[str, ...]]:
        """Make room for adapters that will be written under these names; see `Room.made_for`.

        Args:
            wanted: The adapters. None stands for what is held under that name; for a new one, for
                an adapter without rows.
            evict: Whether others may be evicted.
            roster: Who is in use when they are written, if that is not who is now.
        """
        state = self.state
        needs = {}
        for name, staged in wanted.items():
            entry = state.roster.entries.get(name)
            if staged is None and entry is not None:
                staged = state.held[entry.slot]
            needs[name] = self._planner.need(staged)
        return Room(roster or state.roster, self.rows, state.rows).made_for(needs, evict=evict)

    def write(self, changes: Mapping[int, StagedAdapter], roster: Roster) -> None:
        """Replace what slots hold, empty those that are nobody's, and set all weights.

        Args:
            changes: What the slots that are written shall hold.
            roster: Whose the slots are now. All that they hold must have room.

        Raises:
            ArgumentError: A weight times a scaling leaves the range of float32. Nothing is written.
            BaseException: Whatever a copy raises, after everything was put back as it was.
        """
        before = self.state.held
        owned = {entry.slot for entry in roster.entries.values()}
        held = tuple(
            changes.get(slot, own) if slot in owned else None for slot, own in enumerate(before)
        )
        self._enter(self._planner.plan(self.state, held, roster))
        replaced = (
            was
            for was, own in zip(before, held, strict=True)
            if was is not None and own is not was and was not in held
        )
        # A GPU may still be reading pinned memory; torch's own allocator knows when it is free.
        keeps = bool(changes) and not self.orders
        self._spare = list(itertools.islice(replaced, 1)) if keeps else []

    def set_weights(self, roster: Roster) -> None:
        """Set which slots contribute, and how much.

        Raises:
            ArgumentError: A weight times a scaling leaves the range of float32. Nothing is written.
            BaseException: Whatever a copy raises, after everything was put back as it was.
        """
        self._enter(self._planner.plan(self.state, self.state.held, roster))

    @contextmanager
    def showing(self, rows: int) -> Iterator[None]:
        """Let the model's forward see as many rows for a while, whatever is active."""
        self._show(rows if self._planner.buckets else None, self.state.routes)
        try:
            yield
        finally:
            self._show(self.state.shown, self.state.routes)

    def _show(self, rows: int | None, routes: RouteTables | None) -> None:
        for layer in self._layers:
            layer.show(rows)
        if self._routes is not None:
            self._routes.write(routes, rows)

    def _enter(self, state: BankState) -> None:
        """Bring the model from its state to another, or leave it as it was.

        First what contributes nothing yet is written. Then holders are waited for, if they would
        notice what follows, and what they see is flipped. At last rows that were given up are
        zeroed.
        """
        old, writer, orders = self.state, self._writer, self.orders
        work = Work.between(old, state)
        undo = writer.backup(work.changed, old) if work.changed else old
        self._find_devices()
        try:
            with orders.beside():
                writer.zero(work.unused, old, state)
                writer.fill(work.early, state)
            flip = partial(self._flip, work, state, undo)
            if work.is_seen:
                self._lock.alone(flip)
            else:
                flip()
            if not work.late:
                with orders.beside():
                    writer.zero(work.used, old, state)
        except BaseException:
            if self.state is state:
                self._lock.alone(partial(self._flip_back, work, state, undo, old))
            with orders.beside():
                writer.zero(work.early, state, undo)
                writer.fill(work.unused, undo)
            raise
        writer.done(work.changed)

    def _find_devices(self) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self.orders.cover(self._mix.devices)

    def _flip(self, work: Work, new: BankState, undo: BankState) -> None:
        """Let the new state be seen, and be what this bank says; or neither."""
        old = self.state
        try:
            with self.orders.alone():
                if work.late:
                    self._writer.zero(work.used, old, new)
                    self._writer.fill(work.late, new)
                self._steer(old, new)
            self.state = new
        except BaseException:
            self._flip_back(work, new, undo, old)
            raise

    def _flip_back(self, work: Work, new: BankState, undo: BankState, old: BankState) -> None:
        with self.orders.alone():
            self._writer.zero(work.changed, new, undo)
            self._writer.fill(work.changed, undo)
            self._steer(new, undo)
        self.state = old

    def _steer(self, old: BankState, new: BankState) -> None:
        self._mix.write(new.weights, new.rows)
        torn = new.shown is not None and any(layer.is_torn for layer in self._layers)
        if torn or new.shown != old.shown:
            self._show(new.shown, new.routes)
        elif self._routes is not None:
            self._routes.write(new.routes, new.shown)
