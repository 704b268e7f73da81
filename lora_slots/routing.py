"""Which adapters each row of a batch gets: what `SlotManager.route` is given. Knows no tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Self

from lora_slots.errors import ArgumentError
from lora_slots.roster import Entry, checked_weight

Expand = Literal["interleave", "tile"] | None
Row = str | Mapping[str, float] | None


@dataclass(frozen=True)
class Routing:
    """The adapters of every row, by name.

    Attributes:
        rows: Of each row, the adapters and their weights; none: the base model.
        expand: How the model repeats rows.
    """

    rows: tuple[Mapping[str, float], ...]
    expand: Expand = None

    @classmethod
    def of(cls, adapter_names: Iterable[Row], expand: Expand = None) -> Self:
        """Read what a user gives.

        Raises:
            ArgumentError: It is no sequence of names, Nones and mappings of names to weights, or
                ``expand`` has no meaning.
        """
        if expand not in (None, "interleave", "tile"):
            raise ArgumentError(f"expand must be 'interleave', 'tile' or None, got {expand!r}")
        if isinstance(adapter_names, str | Mapping) or not isinstance(adapter_names, Iterable):
            raise ArgumentError(
                "adapter_names must be a sequence with one entry for each row, or None, got "
                f"{adapter_names!r}"
            )
        rows = tuple(map(_weights, adapter_names))
        if not rows:
            raise ArgumentError("adapter_names must have an entry for each row, got none")
        return cls(rows, expand)

    @property
    def names(self) -> list[str]:
        """The adapters that rows are given, each once."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def rows_of(self, adapter_name: str) -> list[int]:
        """The rows that an adapter is routed to."""
        return [number for number, row in enumerate(self.rows) if adapter_name in row]

    def by_slot(self, entries: Mapping[str, Entry]) -> RowWeights:
        """The same by slot; the weights that the adapters have themselves multiply these."""
        rows = (
            {entries[name].slot: weight * entries[name].weight for name, weight in row.items()}
            for row in self.rows
        )
        return RowWeights(tuple(tuple(sorted(row.items())) for row in rows), self.expand)


@dataclass(frozen=True)
class RowWeights:
    """The same by slot.

    Attributes:
        rows: Of each row, the slots that contribute and their weights.
        expand: How the model repeats rows.
    """

    rows: tuple[tuple[tuple[int, float], ...], ...]
    expand: Expand = None


class Turn:
    """A lock that one thread at a time holds, again and again if it likes.

    Copies and pickles are free.
    """

    def __init__(self) -> None:
        """Start free."""
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        """Wait for other threads."""
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        """Let others in."""
        self._lock.release()

    def __reduce__(self) -> tuple[type[Turn], tuple[()]]:
        """Copies and pickles have a lock of their own."""
        return Turn, ()


def _weights(row: Row) -> Mapping[str, float]:
    if row is None:
        return {}
    if isinstance(row, str):
        return {row: 1.0}
    if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
        raise ArgumentError(
            "each row must be a name, None for the base model, or a mapping of names to weights, "
            f"got {row!r}"
        )
    return {name: checked_weight(weight) for name, weight in row.items()}
