"""What the model holds, and for whom, as one immutable value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lora_slots.bank.routes import RouteTables
from lora_slots.roster import Roster
from lora_slots.staging.staged import StagedAdapter


@dataclass(frozen=True, eq=False)
class BankState:
    """What the model holds, and for whom. Replaced as one: who reads it once sees no half change.

    Attributes:
        roster: Whose the slots are.
        held: What each slot holds.
        rows: The rows by rank that each slot owns; slots that own none are left out.
        weights: The weight of every slot that contributes.
        shown: How many rows the model's forward sees; None: all.
        routes: What tells the rows of a batch apart; None: nothing.
    """

    roster: Roster
    held: tuple[StagedAdapter | None, ...]
    rows: Mapping[int, range]
    weights: Mapping[int, float]
    shown: int | None = None
    routes: RouteTables | None = None

    def owned(self, slot: int) -> range:
        """The rows by rank that a slot owns."""
        return self.rows.get(slot, range(0))
