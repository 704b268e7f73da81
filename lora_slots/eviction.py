"""Room for adapters: a slot and rows for each, by evicting others if that is allowed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from lora_slots.bank.rows import free_rows
from lora_slots.errors import NoFreeSlotError
from lora_slots.roster import NO_SLOT, Roster

# How many of the adapters that one call wants a message names.
_MOST_NAMED = 8


@dataclass(frozen=True)
class Room:
    """The slots and rows of a model, and whose they are. Knows no tensors.

    Attributes:
        roster: Whose the slots are, and who shall get one.
        total: How many rows there are for all of them: R.
        rows: The rows that each slot owns; slots that own none are left out.
    """

    roster: Roster
    total: int
    rows: Mapping[int, range]

    def made_for(self, wanted: Mapping[str, int], *, evict: bool) -> tuple[Roster, tuple[str, ...]]:
        """Make room for adapters, or for what shall be loaded over them.

        Rows need not lie side by side, since what lies between them is moved.

        Args:
            wanted: How many rows each of them needs.
            evict: Whether others may be evicted: those not used for longest, none that is active,
                routed or pinned, and none without need.

        Returns:
            The roster without those that are evicted, and their names, those not used for longest
            first.

        Raises:
            NoFreeSlotError: There is no room.
        """
        if self._fits(wanted, ()):
            return self.roster, ()
        others = [name for name in self.roster.recent if name not in wanted]
        gone = {n: None for n in others if not self.roster.stays_for(n)} if evict else {}
        if not self._fits(wanted, gone):
            raise NoFreeSlotError(self._refusal(wanted, gone, evict=evict))
        for name in reversed(others):
            rest = {other: None for other in gone if other != name}
            if self._fits(wanted, rest):
                gone = rest
        roster = self.roster
        for name in gone:
            roster = roster.without(name)
        return roster, tuple(gone)

    def _slots_missing(self, wanted: Mapping[str, int], gone: Collection[str]) -> int:
        return len(self.roster.entries.keys() | wanted.keys()) - len(gone) - self.roster.num_slots

    def _rows_missing(self, wanted: Mapping[str, int], gone: Collection[str]) -> int:
        taken = sum(
            len(self.rows.get(entry.slot, ()))
            for name, entry in self.roster.entries.items()
            if name not in wanted and name not in gone
        )
        return taken + sum(wanted.values()) - self.total

    @property
    def _loaded(self) -> list[str]:
        return [name for name, entry in self.roster.entries.items() if entry.slot != NO_SLOT]

    def _fits(self, wanted: Mapping[str, int], gone: Collection[str]) -> bool:
        return self._slots_missing(wanted, gone) <= 0 and self._rows_missing(wanted, gone) <= 0

    def _owned(self, adapter_name: str) -> range:
        return self.rows.get(self.roster[adapter_name].slot, range(0))

    def _refusal(self, wanted: Mapping[str, int], gone: Collection[str], *, evict: bool) -> str:
        """What is wanted, what there is, who has it, and what can be done."""
        who = f"adapter {next(iter(wanted))!r} needs"
        if len(wanted) > 1:
            more = len(wanted) - _MOST_NAMED
            some = ", ".join(map(repr, list(wanted)[:_MOST_NAMED]))
            who = f"adapters {some}{f' and {more} more' if more > 0 else ''} need"
        few_slots = self._slots_missing(wanted, gone) > 0
        lack, option = (self._lack_of_slots if few_slots else self._lack_of_rows)(wanted, gone)
        remedy = "unload one, load over its name"
        if evict:
            lack += f", and {'too few' if gone else 'none'} can be evicted"
            remedy = "deselect, unpin or unload one"
        holders = []
        for name in self._loaded:
            rows = "" if few_slots else f" has {len(self._owned(name))}"
            stays = self.roster.stays_for(name) if evict else ""
            holders.append(f"{name!r}{rows}{f' ({stays})' if stays else ''}")
        return (
            f"{who} {lack}: {', '.join(holders)}; {remedy}, or build the SlotManager with {option}"
        )

    def _lack_of_slots(self, wanted: Mapping[str, int], gone: Collection[str]) -> tuple[str, str]:
        slots, taken = self.roster.num_slots, len(self._loaded)
        new = len(wanted.keys() - set(self._loaded))
        what = "a free slot" if new == 1 else f"{new} free slots"
        there = f"all {slots} are taken" if taken == slots else f"{taken} of {slots} are taken"
        return f"{what}, but {there}", f"num_slots={slots + self._slots_missing(wanted, gone)}"

    def _lack_of_rows(self, wanted: Mapping[str, int], gone: Collection[str]) -> tuple[str, str]:
        owned = [self._owned(name) for name in self._loaded if name not in wanted]
        free, largest = free_rows(owned, self.total)
        there = f"of {self.total} only {free} are free, {largest} side by side at most"
        budget = self.total + self._rows_missing(wanted, gone)
        return f"{sum(wanted.values())} rows, but {there}", f"rank_budget={budget}"
