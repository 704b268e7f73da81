"""What has to be written between two states, and what of it may be written at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from lora_slots.bank.state import BankState


@dataclass(frozen=True)
class Work:
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

    @classmethod
    def between(cls, old: BankState, new: BankState) -> Self:
        """Sort the slots by whether anyone may be reading their rows."""
        in_use, used_next = old.weights, new.weights
        changed = []
        moved = new.rows is not old.rows
        if new.held is not old.held or moved:
            changed = [
                slot
                for slot, (was, own) in enumerate(zip(old.held, new.held, strict=True))
                if own is not was or (moved and new.owned(slot) != old.owned(slot))
            ]
        read = [old.owned(slot) for slot in in_use]
        unused = [slot for slot in changed if slot not in in_use]
        early = [slot for slot in unused if not _overlap(new.owned(slot), read)]
        late = [s for s in changed if s not in early and new.held[s] is not None]
        is_seen = (
            bool(late)
            or new.shown != old.shown
            or in_use != used_next
            or any(slot in used_next for slot in changed)
            or new.routes is not old.routes
        )
        return cls(changed, unused, early, late, is_seen)

    @property
    def used(self) -> list[int]:
        """Those that contribute before."""
        return [slot for slot in self.changed if slot not in self.unused]


def _overlap(rows: range, others: Iterable[range]) -> bool:
    return any(rows.start < other.stop and other.start < rows.stop for other in others)
