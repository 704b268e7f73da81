"""Who is loaded, where, with what weight, and who is active. Immutable; knows no tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lora_slots.errors import (
    AdapterInUseError,
    ArgumentError,
    NoFreeSlotError,
    UnknownAdapterError,
)

if TYPE_CHECKING:
    from lora_slots.routing import Routing, RowWeights


@dataclass(frozen=True)
class Entry:
    """A loaded adapter: its slot, the user's multiplier, and whether it is selected."""

    slot: int
    weight: float = 1.0
    selected: bool = True

    @property
    def active(self) -> bool:
        """Whether it contributes, as long as adapters are not disabled."""
        return self.selected and self.weight != 0


@dataclass(frozen=True)
class Roster:
    """The loaded adapters by name. Every change returns a new roster.

    Attributes:
        num_slots: How many slots there are.
        entries: The loaded adapters, in the order in which they were first loaded.
        enabled: Whether active adapters contribute.
        routing: The adapters of every row of a batch, in the place of the selected ones; or None.
        outer: What to go back to where contexts with another routing are left, the last first.
    """

    num_slots: int
    entries: Mapping[str, Entry] = field(default_factory=dict)
    enabled: bool = True
    routing: Routing | None = None
    outer: tuple[Routing | None, ...] = ()

    def __getitem__(self, adapter_name: str) -> Entry:
        """The entry of a loaded adapter.

        Raises:
            UnknownAdapterError: No adapter of that name is loaded.
        """
        entry = self.entries.get(adapter_name) if isinstance(adapter_name, str) else None
        if entry is None:
            raise UnknownAdapterError(
                f"no adapter {adapter_name!r} is loaded; loaded are "
                f"{', '.join(map(repr, self.entries)) or 'none'}"
            )
        return entry

    def slot_for(self, adapter_name: str) -> int:
        """The slot that a load under this name writes: the first free one, or else its own.

        What a loaded adapter holds is left alone where possible: it may be in use.

        Raises:
            ArgumentError: The name is no non-empty string.
            NoFreeSlotError: The name is new and every slot is taken.
        """
        checked_name(adapter_name)
        taken = {entry.slot for entry in self.entries.values()}
        free = next((slot for slot in range(self.num_slots) if slot not in taken), None)
        if free is None and adapter_name in self.entries:
            return self.entries[adapter_name].slot
        if free is None:
            raise NoFreeSlotError(
                f"adapter {adapter_name!r} needs a free slot, but all {self.num_slots} are taken "
                f"({', '.join(map(repr, self.entries))}); unload one, load over its name, or build "
                f"the SlotManager with num_slots={self.num_slots + 1}"
            )
        return free

    def with_loaded(
        self, adapter_name: str, *, weight: float | None = None, activate: bool | None = None
    ) -> Roster:
        """Add or replace an adapter; None keeps what a loaded one has, else means 1.0 and True."""
        slot = self.slot_for(adapter_name)
        known = adapter_name in self.entries
        entry = replace(self.entries[adapter_name], slot=slot) if known else Entry(slot)
        if weight is not None:
            entry = replace(entry, weight=checked_weight(weight))
        if activate is not None:
            entry = replace(entry, selected=bool(activate))
        alone = entry.selected and (activate or not known)
        others = {
            name: replace(other, selected=False) if alone else other
            for name, other in self.entries.items()
        }
        return replace(self, entries=others | {adapter_name: entry})

    def without(self, adapter_name: str) -> Roster:
        """Remove a loaded adapter.

        Raises:
            AdapterInUseError: It is routed to a row.
        """
        self[adapter_name]
        for routing in (self.routing, *self.outer):
            if routing is not None and (rows := routing.rows_of(adapter_name)):
                raise AdapterInUseError(
                    f"adapter {adapter_name!r} is routed to row "
                    f"{', '.join(map(str, rows))}; route() without it, or route(None), before "
                    "unloading it"
                )
        entries = {name: other for name, other in self.entries.items() if name != adapter_name}
        return replace(self, entries=entries)

    def with_selected(
        self, adapter_names: str | Sequence[str], weights: float | Sequence[float] | None
    ) -> Roster:
        """Select these adapters, and only these, with these weights; None: 1.0 each."""
        names = names_in(adapter_names)
        for name in names:
            self[name]
        if len(set(names)) != len(names):
            raise ArgumentError(f"adapter_names must not repeat a name, got {names}")
        chosen = dict(zip(names, _one_each(weights, len(names)), strict=True))
        entries = {
            name: Entry(entry.slot, chosen.get(name, entry.weight), selected=name in chosen)
            for name, entry in self.entries.items()
        }
        return replace(self, entries=entries)

    def with_weight(self, adapter_name: str, weight: float) -> Roster:
        """Set the weight of a loaded adapter."""
        entry = replace(self[adapter_name], weight=checked_weight(weight))
        return replace(self, entries={**self.entries, adapter_name: entry})

    def with_enabled(self, enabled: bool) -> Roster:
        """Let active adapters contribute, or none."""
        return replace(self, enabled=enabled)

    def with_routing(self, routing: Routing | None, *, nested: bool = False) -> Roster:
        """Route loaded adapters to rows, or none; ``nested``: until `without_routing`."""
        for row in routing.rows if routing else ():
            for name in row:
                self[name]
        outer = (self.routing, *self.outer) if nested else self.outer
        return replace(self, routing=routing, outer=outer)

    def without_routing(self) -> Roster:
        """Go back to the routing before the last nested one."""
        return replace(self, routing=self.outer[0], outer=self.outer[1:])

    def row_weights(self) -> RowWeights | None:
        """The weights of the slots for each row, if rows are told apart."""
        return None if self.routing is None else self.routing.by_slot(self.entries)

    @property
    def in_use(self) -> list[str]:
        """The names of those that contribute."""
        slots = self.slot_weights()
        return [name for name, entry in self.entries.items() if entry.slot in slots]

    def slot_weights(self) -> dict[int, float]:
        """The weight of every slot that contributes; 1 where `row_weights` says how much."""
        if not self.enabled:
            return {}
        rows = self.row_weights()
        if rows is not None:
            return {slot: 1.0 for row in rows.rows for slot, weight in row if weight != 0}
        return {entry.slot: entry.weight for entry in self.entries.values() if entry.active}


def checked_name(adapter_name: object) -> str:
    """Refuse a name that is no non-empty string.

    Raises:
        ArgumentError: Shows what it got.
    """
    if not isinstance(adapter_name, str) or not adapter_name:
        raise ArgumentError(f"adapter_name must be a non-empty string, got {adapter_name!r}")
    return adapter_name


def names_in(adapter_names: str | Iterable[str]) -> list[str]:
    """One name or several, as a list.

    Raises:
        ArgumentError: It is neither.
    """
    names = [adapter_names] if isinstance(adapter_names, str) else adapter_names
    if not isinstance(names, Iterable):
        raise ArgumentError(f"adapter_names must be a name or a sequence of names, got {names!r}")
    return list(names)


def checked_weight(weight: object) -> float:
    """Refuse a weight that is no finite number.

    Raises:
        ArgumentError: Shows what it got.
    """
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ArgumentError(f"a weight must be a finite number, got {weight!r}")
    try:
        number = float(weight)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ArgumentError(f"a weight must be a finite number, got {number!r}")
    return number


def _one_each(weights: object, count: int) -> list[float]:
    if weights is None:
        return [1.0] * count
    if isinstance(weights, int | float):
        return [checked_weight(weights)] * count
    if (
        isinstance(weights, str | bytes)
        or not isinstance(weights, Sequence)
        or len(weights) != count
    ):
        raise ArgumentError(
            f"weights must be one number, or one for each of {count} adapters, got {weights!r}; "
            "there are no weights per component or block"
        )
    return [checked_weight(weight) for weight in weights]
