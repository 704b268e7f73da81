"""Adapters by name that can be loaded when they are needed. Reads no file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lora_slots.errors import ArgumentError, UnknownAdapterError
from lora_slots.loading import CompressTo
from lora_slots.reading import RawAdapter, Source
from lora_slots.roster import Roster, check_name, checked_weight
from lora_slots.staging.compress import rank_limit


@dataclass(frozen=True)
class CatalogueEntry:
    """Where an adapter can be read, and how it shall be loaded.

    Attributes:
        source: A path, a hub id, or an adapter in memory.
        weight: Its multiplier once it is loaded.
        strict: As for `SlotManager.load`.
        compress_to: As for `SlotManager.load`.
    """

    source: Source | RawAdapter
    weight: float = 1.0
    strict: bool = True
    compress_to: CompressTo = None


class Catalogue:
    """The known adapters. Any thread may add and remove; what is loaded is not its business.

    Args:
        max_rank: The largest rank of an adapter.
    """

    def __init__(self, max_rank: int) -> None:
        """Start empty."""
        self._max_rank = max_rank
        self._entries: dict[str, CatalogueEntry] = {}

    def __len__(self) -> int:
        """How many adapters are known."""
        return len(self._entries)

    def __getitem__(self, adapter_name: str) -> CatalogueEntry:
        """The entry of a known adapter.

        Raises:
            UnknownAdapterError: The catalogue has no such name.
        """
        entry = self._entries.get(adapter_name) if isinstance(adapter_name, str) else None
        if entry is None:
            raise UnknownAdapterError(
                f"the catalogue of {len(self)} adapters has no {adapter_name!r}; add it with "
                "SlotManager.add"
            )
        return entry

    @property
    def entries(self) -> Mapping[str, CatalogueEntry]:
        """All entries, as a view that cannot be written."""
        return MappingProxyType(self._entries)

    def add(self, adapter_name: str, entry: CatalogueEntry) -> None:
        """Know an adapter, in the place of what the name meant before.

        Raises:
            ArgumentError: The name or a field of the entry has no meaning.
        """
        check_name(adapter_name)
        _check_source(entry.source)
        checked_weight(entry.weight)
        rank_limit(entry.compress_to, self._max_rank)
        self._entries[adapter_name] = entry

    def remove(self, adapter_name: str) -> None:
        """Forget a known adapter.

        Raises:
            UnknownAdapterError: The catalogue has no such name.
        """
        self[adapter_name]
        self._entries.pop(adapter_name, None)

    def missing(self, adapter_names: Iterable[str], roster: Roster) -> dict[str, CatalogueEntry]:
        """What would have to be loaded so that all of these are.

        Raises:
            UnknownAdapterError: A name is neither loaded nor known.
        """
        found = {}
        for name in adapter_names:
            if not isinstance(name, str) or name not in roster.entries:
                entry = self._entries.get(name) if isinstance(name, str) else None
                if entry is None:
                    raise UnknownAdapterError(self._unknown(name, roster))
                found[name] = entry
        return found

    def _unknown(self, name: object, roster: Roster) -> str:
        loaded = ", ".join(map(repr, roster.entries)) or "none"
        text = f"no adapter {name!r} is loaded; loaded are {loaded}"
        if not self._entries:
            return text
        return f"{text}, and the catalogue of {len(self)} adapters has no such name either"


def _check_source(source: object) -> None:
    if isinstance(source, RawAdapter):
        return
    path = os.fspath(source) if isinstance(source, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise ArgumentError(
            "the source of an adapter must be a path, a hub id or what read_adapter returned, got "
            f"{source!r}"
        )
