"""Who is loaded, where, with what weight, and who is active. Immutable; knows no tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lora_slots.errors import AdapterInUseError, ArgumentError, UnknownAdapterError

if TYPE_CHECKING:
    from lora_slots.routing import Routing, RowWeights


NO_SLOT = -1


@dataclass(frozen=True)
class Entry:
    """A loaded adapter: its slot, the user's multiplier, whether it is selected, and may not go."""

    slot: int
    weight: float = 1.0
    selected: bool = True
    pinned: bool = False

    @property
    def active(self) -> bool:
        """Whether it contributes, as long as adapters are not disabled."""
        return self.selected and self.weight != 0

    def with_selected(self, selected: bool, weight: float) -> Entry:
        """The same, selected or not, with a weight."""
        if (selected, weight) == (self.selected, self.weight):
            return self
        return Entry(self.slot, weight, selected, self.pinned)


@dataclass(frozen=True)
class Roster:
    """The loaded adapters by name. Every change returns a new roster.

    An adapter is used by every call that names it, and for as long as it is active or routed.

    Attributes:
        num_slots: How many slots there are.
        entries: The loaded adapters, in the order in which they were first loaded.
        enabled: Whether active adapters contribute.
        routing: The adapters of every row of a batch, in the place of the selected ones; or None.
        outer: What to go back to where contexts with another routing are left, the last first.
        recent: The loaded adapters, those not used for longest first.
    """

    num_slots: int
    entries: Mapping[str, Entry] = field(default_factory=dict)
    enabled: bool = True
    routing: Routing | None = None
    outer: tuple[Routing | None, ...] = ()
    recent: tuple[str, ...] = ()

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

    def stays_for(self, adapter_name: str) -> str:
        """Why a loaded adapter must stay: "active", "routed" or "pinned"; empty: it may go."""
        entry = self[adapter_name]
        if entry.active:
            return "active"
        if adapter_name in self.routed_names:
            return "routed"
        return "pinned" if entry.pinned else ""

    @functools.cached_property
    def routed_names(self) -> frozenset[str]:
        """The adapters of all rows, and of those that a context will go back to."""
        routings = [routing for routing in (self.routing, *self.outer) if routing is not None]
        return frozenset().union(*(routing.names for routing in routings))

    def _recent(self, *names: str) -> tuple[str, ...]:
        """With what was in use until now and then ``names`` as those used last."""
        routed = self.routed_names if self.routing or self.outer else ()
        until_now = [n for n in self.recent if self.entries[n].active or n in routed]
        recent = dict.fromkeys(self.recent)
        for name in (*until_now, *names):
            recent.pop(name, None)
            recent[name] = None
        return tuple(recent)

    def slot_for(self, adapter_name: str) -> int:
        """The slot that a load under this name writes: the first free one, or else its own.

        What a loaded adapter holds is left alone where possible: it may be in use. For a new name
        a slot must be free, as `Room` sees to.
        """
        taken = {entry.slot for entry in self.entries.values()}
        free = next((slot for slot in range(self.num_slots) if slot not in taken), None)
        return self[adapter_name].slot if free is None else free

    def with_loaded(
        self,
        adapter_name: str,
        *,
        weight: float | None = None,
        activate: bool | None = None,
        pin: bool | None = None,
    ) -> Roster:
        """Add or replace an adapter; None keeps what a loaded one has.

        For a new one, None means a weight of 1.0, active, and not pinned.
        """
        slot = self.slot_for(adapter_name)
        known = adapter_name in self.entries
        entry = replace(self.entries[adapter_name], slot=slot) if known else Entry(slot)
        if weight is not None:
            entry = replace(entry, weight=checked_weight(weight))
        if activate is not None:
            entry = replace(entry, selected=bool(activate))
        if pin is not None:
            entry = replace(entry, pinned=bool(pin))
        alone = entry.selected and (activate or not known)
        others = {
            name: other.with_selected(False, other.weight) if alone else other
            for name, other in self.entries.items()
        }
        return replace(
            self, entries=others | {adapter_name: entry}, recent=self._recent(adapter_name)
        )

    def with_new(self, adapter_name: str, *, weight: float) -> Roster:
        """Add an inactive adapter that is in no slot yet, until `with_slots`."""
        entries = {**self.entries, adapter_name: Entry(NO_SLOT, weight, selected=False)}
        return replace(self, entries=entries, recent=self._recent(adapter_name))

    def with_slots(self) -> Roster:
        """Put the adapters that are in no slot yet into the first free ones."""
        roster = self
        for name, entry in self.entries.items():
            if entry.slot == NO_SLOT:
                placed = {name: replace(entry, slot=roster.slot_for(name))}
                roster = replace(roster, entries={**roster.entries, **placed})
        return roster

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
        recent = tuple(name for name in self.recent if name != adapter_name)
        return replace(self, entries=entries, recent=recent)

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
            name: entry.with_selected(name in chosen, chosen.get(name, entry.weight))
            for name, entry in self.entries.items()
        }
        return replace(self, entries=entries, recent=self._recent(*names))

    def with_weight(self, adapter_name: str, weight: float) -> Roster:
        """Set the weight of a loaded adapter."""
        entry = replace(self[adapter_name], weight=checked_weight(weight))
        entries = {**self.entries, adapter_name: entry}
        return replace(self, entries=entries, recent=self._recent(adapter_name))

    def with_enabled(self, enabled: bool) -> Roster:
        """Let active adapters contribute, or none."""
        return replace(self, enabled=enabled)

    def with_routing(self, routing: Routing | None, *, nested: bool = False) -> Roster:
        """Route loaded adapters to rows, or none; ``nested``: until `without_routing`."""
        names = [name for row in (routing.rows if routing else ()) for name in row]
        for name in names:
            self[name]
        outer = (self.routing, *self.outer) if nested else self.outer
        return replace(self, routing=routing, outer=outer, recent=self._recent(*names))

    def without_routing(self) -> Roster:
        """Go back to the routing before the last nested one."""
        outer, *rest = self.outer
        return replace(self, routing=outer, outer=tuple(rest), recent=self._recent())

    def row_weights(self) -> RowWeights | None:
        """The weights of the slots for each row, if rows are told apart."""
        return None if self.routing is None else self.routing.by_slot(self.entries)

    @property
    def in_use(self) -> list[str]:
        """The names of those that contribute."""
        slots = self.slot_weights
        return [name for name, entry in self.entries.items() if entry.slot in slots]

    @functools.cached_property
    def slot_weights(self) -> Mapping[int, float]:
        """The weight of every slot that contributes; 1 where `row_weights` says how much."""
        if not self.enabled:
            return {}
        rows = self.row_weights()
        if rows is not None:
            return {slot: 1.0 for row in rows.rows for slot, weight in row if weight != 0}
        return {entry.slot: entry.weight for entry in self.entries.values() if entry.active}


def check_name(adapter_name: object) -> None:
    """Refuse what is no name.

    Raises:
        ArgumentError: It is no non-empty string.
    """
    if not isinstance(adapter_name, str) or not adapter_name:
        raise ArgumentError(f"adapter_name must be a non-empty string, got {adapter_name!r}")


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
