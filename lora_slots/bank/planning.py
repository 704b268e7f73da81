"""What the model shall hold next: which rows are whose, and all tables. Writes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lora_slots.bank.routes import RouteTables
from lora_slots.bank.rows import place
from lora_slots.bank.state import BankState
from lora_slots.bank.steering import Tables
from lora_slots.roster import Roster
from lora_slots.staging.staged import StagedAdapter

_GRANULE = 8


class Planner:
    """Goes from one state of the model to the next, moving as few rows as possible.

    Attributes:
        max_rank: The largest rank of an adapter.
        num_slots: How many adapters can be held.
        rows: How many rows by rank there are for all of them: R.
        buckets: How many rows the model's forward may see, ascending; None: always all.
        granule: Rows are owned in multiples of this, but for ``max_rank`` itself. Where every slot
            can have ``max_rank`` rows and all are seen, it has, so that rows never move.
    """

    def __init__(
        self,
        modules: int,
        *,
        max_rank: int,
        num_slots: int,
        rows: int,
        buckets: tuple[int, ...] | None,
    ) -> None:
        """Plan for as many ``modules``; the rest is as above."""
        self.max_rank = max_rank
        self.num_slots = num_slots
        self.rows = rows
        self.buckets = buckets
        by_need = buckets is not None or rows < num_slots * max_rank
        self.granule = min(_GRANULE, max_rank) if by_need else max_rank
        self._modules = modules

    def empty(self) -> BankState:
        """The state of buffers that were just made."""
        nothing: tuple[None, ...] = (None,) * self.num_slots
        return BankState(Roster(self.num_slots), nothing, {}, self._tables(nothing, {}, {}))

    def need(self, staged: StagedAdapter | None) -> int:
        """How many rows by rank an adapter owns."""
        rank = 0 if staged is None else staged.rank
        return min(-(-rank // self.granule) * self.granule, self.max_rank)

    def plan(
        self, old: BankState, held: tuple[StagedAdapter | None, ...], roster: Roster
    ) -> BankState:
        """The state after ``old`` that holds ``held`` and steers by ``roster``.

        All must have room, as `Room` sees to.

        Raises:
            ArgumentError: A weight times a scaling leaves the range of float32.
        """
        weights = roster.slot_weights()
        needs = {slot: need for slot, own in enumerate(held) if (need := self.need(own))}
        active = [slot for slot in weights if slot in needs]
        shown = None
        if self.buckets is not None:
            low = sum(needs[slot] for slot in active)
            shown = next(rows for rows in self.buckets if rows >= low)
        starts = place(
            needs,
            {s: own.start for s, own in old.rows.items() if 0 < needs.get(s, 0) <= len(own)},
            total=self.rows,
            active=active,
            limit=shown,
            given_up={slot: own for slot, own in old.rows.items() if slot not in needs},
            in_use=old.roster.slot_weights(),
        )
        assert starts is not None
        rows = {slot: range(start, start + needs[slot]) for slot, start in starts.items()}
        tables = self._tables(held, rows, weights)
        return BankState(roster, held, rows, tables, shown, self._routes(old, held, rows, roster))

    def _tables(
        self,
        held: Sequence[StagedAdapter | None],
        rows: Mapping[int, range],
        weights: Mapping[int, float],
    ) -> Tables:
        tables = Tables.zero(self._modules, self.rows, self.num_slots)
        for slot, staged in enumerate(held):
            if staged is not None:
                own = rows.get(slot, range(0))
                tables.own(slot, own.start, len(own))
                if slot in weights:
                    tables.activate(slot, staged, own.start, weights[slot])
        return tables

    def _routes(
        self,
        old: BankState,
        held: Sequence[StagedAdapter | None],
        rows: Mapping[int, range],
        roster: Roster,
    ) -> RouteTables | None:
        """The tables of ``roster``: those of ``old`` where they say the same."""
        weights = roster.row_weights()
        if weights is None:
            return None
        routes = RouteTables.of(weights, held, rows, least=self.granule)
        return old.routes if old.routes is not None and old.routes.says(routes) else routes
