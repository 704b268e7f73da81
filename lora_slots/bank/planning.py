"""What the model shall hold next: which rows are whose, and all tables. Writes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lora_slots.bank.routes import RouteTables
from lora_slots.bank.rows import place
from lora_slots.bank.state import BankState
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
        *,
        max_rank: int,
        num_slots: int,
        rows: int,
        buckets: tuple[int, ...] | None,
    ) -> None:
        """Keep what is described above."""
        self.max_rank = max_rank
        self.num_slots = num_slots
        self.rows = rows
        self.buckets = buckets
        by_need = buckets is not None or rows < num_slots * max_rank
        self.granule = min(_GRANULE, max_rank) if by_need else max_rank

    def empty(self) -> BankState:
        """The state of buffers that were just made."""
        nothing: tuple[None, ...] = (None,) * self.num_slots
        return BankState(Roster(self.num_slots), nothing, {}, {})

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
        weights = roster.slot_weights
        for slot, (was, own) in enumerate(zip(old.held, held, strict=True)):
            weight = weights.get(slot, 1.0)
            if own is not None and (own is not was or weight != old.weights.get(slot, 1.0)):
                own.check_weight(weight)
        rows, shown = self._placed(old, held, weights)
        return BankState(
            roster,
            held,
            rows,
            weights,
            shown,
            self._routes(old, held, rows, roster),
        )

    def _placed(
        self, old: BankState, held: Sequence[StagedAdapter | None], weights: Mapping[int, float]
    ) -> tuple[Mapping[int, range], int | None]:
        """The rows that slots own, and how many rows are shown."""
        changed = [pair for pair in zip(old.held, held, strict=True) if pair[0] is not pair[1]]
        if self.buckets is None and all(self.need(was) == self.need(own) for was, own in changed):
            return old.rows, None
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
            in_use=old.weights,
        )
        assert starts is not None
        return {s: range(start, start + needs[s]) for s, start in starts.items()}, shown

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
        if not roster.enabled:
            routes = routes.disabled()
        return old.routes if old.routes is not None and old.routes.says(routes) else routes
