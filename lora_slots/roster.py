"""Who is loaded, where, with what weight, and who is active. Immutable; knows no tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lora_slots.errors import ArgumentError, NoFreeSlotError, UnknownAdapterError


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
    """

    num_slots: int
    entries: Mapping[str, Entry] = field(default_factory=dict)
    enabled: bool = True

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
        if not isinstance(adapter_name, str) or not adapter_name:
            raise ArgumentError(f"adapter_name must be a non-empty string, got {adapter_name!r}")
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
        """Remove a loaded adapter."""
        self[adapter_name]
        entries = {name: other for name, other in self.entries.items() if name != adapter_name}
        return replace(self, entries=entries)

    def with_selected(
        self, adapter_names: str | Sequence[str], weights: float | Sequence[float] | None
    ) -> Roster:
        """Select these adapters, and only these, with these weights; None: 1.0 each."""
        names = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        if not isinstance(names, Iterable):
            raise ArgumentError(
                f"adapter_names must be a name or a sequence of names, got {names!r}"
            )
        names = list(names)
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

    def slot_weights(self) -> dict[int, float]:
        """The weight of every slot that contributes."""
        if not self.enabled:
            return {}
        return {entry.slot: entry.weight for entry in self.entries.values() if entry.active}


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
