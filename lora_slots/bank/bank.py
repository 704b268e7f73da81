"""StagedAdapter -> the rows of a slot. The only place that writes into the model."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from lora_slots.bank.routes import RouteTables, RouteWriter
from lora_slots.bank.rows import place
from lora_slots.bank.steering import Steering, Table, Tables
from lora_slots.layers import SlotLayer
from lora_slots.layers.base import BY_RANK
from lora_slots.layout import Layout
from lora_slots.routing import RowWeights
from lora_slots.staging.staged import StagedAdapter, StagedRows

_RECENT_TABLES = 16
_GRANULE = 8
# First row, targets, counts of rows, buffers, and the views of those buffers.
_KnownViews = tuple[int | None, tuple[int, ...], tuple[int, ...], list[Tensor], list[Tensor]]


@dataclass(frozen=True, eq=False)
class _State:
    """What the model holds.

    Attributes:
        held: What each slot holds.
        starts: The first row by rank of each slot that holds something.
        tables: What the steering buffers hold.
        shown: How many rows the model's forward sees; None: all.
        routes: What tells the rows of a batch apart; None: nothing.
    """

    held: tuple[StagedAdapter | None, ...]
    starts: Mapping[int, int]
    tables: Tables
    shown: int | None = None
    routes: RouteTables | None = None


class Bank:
    """The slots of a model, and a staged host copy of what each one holds.

    In ``lora_A``, ``lora_B`` and ``scaling``, a slot owns a run of as many rows as its adapter
    needs; in every other buffer, slot ``s`` owns rows ``s * n : (s + 1) * n``, n the same for all.
    What is not needed is zero. Every write happens whole or is rolled back.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        max_rank: int,
        num_slots: int,
        buckets: Sequence[int] | None = None,
        routing: bool = False,
    ) -> None:
        """Start with all slots empty, as the buffers are.

        Args:
            layout: The target modules, with slots attached.
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
        self._layers: list[SlotLayer] = [target.slots for target in layout]
        self._spare: tuple[Tensor, ...] = ()
        self._known_views: dict[tuple[int, str], _KnownViews] = {}
        # Tables by the weights they are for, since users go back and forth between a few mixes.
        self._recent: dict[object, _State] = {}
        # How often the buffers had been replaced when each slot was written.
        self._generations = [SlotLayer.generation] * num_slots
        nothing: tuple[None, ...] = (None,) * num_slots
        self._routes = RouteWriter(layout) if routing else None
        self._steering = [Steering(self._layers, name) for name in Tables._fields]
        self._state = _State(nothing, {}, self._tables(nothing, {}, {}))
        self._enter(self._planned(nothing, {}))

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles have buffers of their own."""
        return vars(self) | {
            "_spare": (),
            "_known_views": {},
            "_generations": [-1] * self.num_slots,
        }

    def held(self, slot: int) -> StagedAdapter | None:
        """What ``slot`` holds."""
        return self._state.held[slot]

    def take_spare(self) -> tuple[Tensor, ...]:
        """Host memory of the adapter that was overwritten last, which nothing refers to now."""
        spare, self._spare = self._spare, ()
        return spare

    @property
    def routing(self) -> bool:
        """Whether the rows of a batch can be told apart."""
        return self._routes is not None

    def write(
        self,
        slot: int,
        staged: StagedAdapter | None,
        weights: Mapping[int, float],
        rows: RowWeights | None = None,
    ) -> None:
        """Replace what ``slot`` holds, then set the weight of every slot.

        Args:
            slot: The slot to write.
            staged: What it shall hold; None empties it.
            weights: The weight of each slot that shall contribute; others contribute nothing.
            rows: How much each of those contributes to each row of a batch; None: alike.

        Raises:
            ArgumentError: A weight times a scaling leaves the range of float32. Nothing is written.
            BaseException: Whatever a copy raises, after everything was put back as it was.
        """
        before = self._state.held[slot]
        held = list(self._state.held)
        held[slot] = staged
        self._recent.clear()
        self._enter(self._planned(tuple(held), weights, rows))
        self._spare = () if before is None or staged is None else before.blocks

    def set_weights(self, weights: Mapping[int, float], rows: RowWeights | None = None) -> None:
        """Set which slots contribute, and how much, and to which row of a batch.

        Raises:
            ArgumentError: A weight times a scaling leaves the range of float32. Nothing is written.
            BaseException: Whatever a copy raises, after everything was put back as it was.
        """
        key = (tuple(sorted(weights.items())), rows)
        state = self._recent.get(key) or self._planned(self._state.held, weights, rows)
        self._enter(state)
        if len(self._recent) >= _RECENT_TABLES:
            self._recent.clear()
        self._recent[key] = state

    def _planned(
        self,
        held: tuple[StagedAdapter | None, ...],
        weights: Mapping[int, float],
        rows: RowWeights | None = None,
    ) -> _State:
        """The state that holds ``held`` and steers by ``weights``, moving as little as possible."""
        needs = {slot: need for slot, own in enumerate(held) if (need := self._need(own))}
        known = self._state.held
        before = {
            slot: start
            for slot, start in self._state.starts.items()
            if slot in needs and needs[slot] <= self._need(known[slot])
        }
        active = [slot for slot in weights if slot in needs]
        shown = None
        if self._buckets is not None:
            low = sum(needs[slot] for slot in active)
            shown = next(rows for rows in self._buckets if rows >= low)
        starts = place(needs, before, total=self.rows, active=active, limit=shown)
        assert starts is not None
        routes = None
        if rows is not None:
            owned = {slot: (start, needs[slot]) for slot, start in starts.items()}
            routes = RouteTables.of(rows, held, owned, columns=self.rows)
        return _State(held, starts, self._tables(held, starts, weights), shown, routes)

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
        self._show(rows if self._buckets else None, self._state.routes)
        try:
            yield
        finally:
            self._show(self._state.shown, self._state.routes)

    def _show(self, rows: int | None, routes: RouteTables | None) -> None:
        for layer in self._layers:
            layer.show(rows)
        if self._routes is not None:
            self._routes.write(routes, rows)

    def _need(self, staged: StagedAdapter | None) -> int:
        """How many rows by rank an adapter owns."""
        rank = 0 if staged is None else max(staged.ranks)
        return min(-(-rank // self._granule) * self._granule, self.max_rank)

    def _enter(self, state: _State) -> None:
        """Bring the model from its state to another, or leave it as it was."""
        changed = [
            slot
            for slot in range(self.num_slots)
            if state.held[slot] is not self._state.held[slot]
            or state.starts.get(slot) != self._state.starts.get(slot)
        ]
        undo = self._state
        if changed:
            held = [
                self._backup(slot, own) if slot in changed else own
                for slot, own in enumerate(self._state.held)
            ]
            undo = replace(self._state, held=tuple(held))
        try:
            self._copy(changed, self._state, state)
            self._steer(self._state, state)
        except BaseException:
            self._copy(changed, state, undo)
            self._steer(state, undo)
            raise
        self._state = state
        for slot in changed:
            self._generations[slot] = SlotLayer.generation

    def _steer(self, old: _State, new: _State) -> None:
        for steering, table in zip(self._steering, new.tables, strict=True):
            steering.write(cast("Table", table))
        if new.shown != old.shown:
            self._show(new.shown, new.routes)
        elif self._routes is not None:
            self._routes.write(new.routes, new.shown)

    def _copy(self, slots: Sequence[int], old: _State, new: _State) -> None:
        """Write what ``slots`` hold in ``new``, where in ``old`` they hold something else.

        Rows that were used and no longer are become zero first: another slot may get them.
        """
        for slot in slots:
            self._zero(slot, old, new)
        for slot in slots:
            own = new.held[slot]
            for name, rows in ({} if own is None else own.rows).items():
                offset = self._offset(slot, name, new)
                views = self._views(slot, offset, name, rows.targets, rows.counts)
                if views:
                    torch._foreach_copy_(views, list(rows.rows))

    def _zero(self, slot: int, old: _State, new: _State) -> None:
        own, other = old.held[slot], new.held[slot]
        for name, rows in ({} if own is None else own.rows).items():
            offset = self._offset(slot, name, old)
            stays = other is not None and offset == self._offset(slot, name, new)
            kept = other.rows.get(name) if other is not None and stays else None
            targets, firsts, lasts = _tails(rows, kept)
            if targets:
                torch._foreach_zero_(self._rows(slot, offset, name, targets, firsts, lasts))

    def _offset(self, slot: int, name: str, state: _State) -> int | None:
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
            offset = self._offset(slot, name, self._state)
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
        return [self._layers[target].whole(name) for target in targets]  # type: ignore[misc]


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
