"""What a manager holds, on every tier: frozen, and a table when printed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch

from lora_slots.bank.bank import Bank
from lora_slots.bank.state import BankState
from lora_slots.cache import StagedCache
from lora_slots.layout import Layout
from lora_slots.report import format_size
from lora_slots.routing import Routing
from lora_slots.tally import Counts, Tally


@dataclass(frozen=True)
class SlotStatus:
    """What one slot holds.

    Attributes:
        slot: Its number.
        adapter_name: The adapter's name, or None if the slot is free.
        source: Where the adapter was read from; empty if the slot is free.
        rank: The adapter's largest rank.
        weight: The user's multiplier.
        active: Whether it is selected and its weight is not 0.
        modules: How many target modules it adapts.
        pinned: Whether it is never evicted.
        routed: Whether rows of a batch are given it.
        swap_seconds: How long its last load took, reading included; None if the slot is free.
            Times do not count where two of these are compared.
        last_used: When it was active or routed last, in seconds since the epoch; None: never.
    """

    slot: int
    adapter_name: str | None = None
    source: str = ""
    rank: int = 0
    weight: float = 0.0
    active: bool = False
    modules: int = 0
    pinned: bool = False
    routed: bool = False
    swap_seconds: float | None = field(default=None, compare=False)
    last_used: float | None = field(default=None, compare=False)

    @property
    def state(self) -> str:
        """What it is doing, in a word or more."""
        if self.adapter_name is None:
            return "free"
        use = "active" if self.active else "inactive"
        return use + ", routed" * self.routed + ", pinned" * self.pinned

    def __str__(self) -> str:
        """One line."""
        if self.adapter_name is None:
            return f"slot {self.slot}: free"
        return (
            f"slot {self.slot}: {self.adapter_name!r} {self.state}, weight {self.weight:g}, rank "
            f"{self.rank}, {self.modules} modules, from {self.source}"
        )


@dataclass(frozen=True)
class ComponentStatus:
    """The buffers of one component of the model.

    Attributes:
        modules: How many target modules have slots.
        nbytes: The size of their buffers in bytes.
        dtypes: The dtypes of lora_A and lora_B.
        devices: The devices that the buffers are on.
    """

    modules: int
    nbytes: int
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[torch.device, ...]

    def __str__(self) -> str:
        """One line."""
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        devices = ", ".join(map(str, self.devices))
        nbytes = format_size(self.nbytes)
        return f"{self.modules} modules, {nbytes} of buffers, {dtypes}, on {devices}"


@dataclass(frozen=True)
class CacheStatus:
    """The adapters that are kept on the host.

    Attributes:
        adapters: How many.
        nbytes: Their size in bytes.
        limit: ``cache_bytes``; 0: none are kept.
        hits: Loads that found their adapter here.
        misses: Loads that did not.
    """

    adapters: int
    nbytes: int
    limit: int
    hits: int
    misses: int

    def __str__(self) -> str:
        """One line."""
        if not self.limit:
            return "off (cache_bytes=0)"
        return (
            f"{self.adapters} adapters, {format_size(self.nbytes)} of {format_size(self.limit)}, "
            f"{self.hits} hits, {self.misses} misses"
        )


@dataclass(frozen=True)
class ManagerStatus:
    """What a manager holds now: in slots, on the host, and by name only.

    Attributes:
        slots: One entry per slot.
        enabled: Whether active adapters contribute; False after ``disable_adapters``.
        max_rank: The largest rank of an adapter.
        components: The buffers of each component, by its name; ``""`` for a single model.
        cache: The host cache.
        catalogue: How many adapters the catalogue has.
        counts: What happened until now.
        rank_budget: How many rows the slots share.
        free_rows: How many of them no adapter owns.
        routing: The adapters of each row, where `route` told rows apart.
    """

    slots: tuple[SlotStatus, ...]
    enabled: bool
    max_rank: int
    components: Mapping[str, ComponentStatus]
    cache: CacheStatus
    catalogue: int
    counts: Counts
    rank_budget: int
    free_rows: int
    routing: Routing | None = None

    def __str__(self) -> str:
        """A table of the slots, and a line for each other thing."""
        state = "enabled" if self.enabled else "disabled"
        shared = ""
        if self.rank_budget < len(self.slots) * self.max_rank:
            shared = f" in {self.rank_budget} rows, {self.free_rows} of them free"
        return "\n".join(
            [
                f"{len(self.slots)} slots of max_rank {self.max_rank}{shared}, adapters {state}",
                *_aligned([_HEAD, *map(_cells, self.slots)]),
                *([] if self.routing is None else [f"rows: {_rows(self.routing)}"]),
                f"host cache: {self.cache}",
                f"catalogue: {self.catalogue} adapters",
                f"until now: {self.counts}",
                *(f"{name or 'model'}: {part}" for name, part in self.components.items()),
            ]
        )


def status_of(
    bank: Bank, layout: Layout, cache: StagedCache, known: int, tally: Tally
) -> ManagerStatus:
    """Collect what a manager holds. Reads names and sizes only.

    Args:
        bank: What is in the slots.
        layout: The target modules.
        cache: The host cache.
        known: How many adapters the catalogue has.
        tally: What was counted.
    """
    state = bank.state  # once: another thread may change it
    counts = tally.counts
    names = {entry.slot: name for name, entry in state.roster.entries.items()}
    parts = dict.fromkeys(target.component for target in layout)
    return ManagerStatus(
        slots=tuple(_slot(s, names.get(s), state, tally) for s in range(len(state.held))),
        enabled=state.roster.enabled,
        max_rank=bank.max_rank,
        components={part: _component(part, layout) for part in parts},
        cache=CacheStatus(
            len(cache), cache.nbytes, cache.limit, counts.cache_hits, counts.cache_misses
        ),
        catalogue=known,
        counts=counts,
        rank_budget=bank.rows,
        free_rows=bank.rows - sum(map(len, state.rows.values())),
        routing=state.roster.routing,
    )


def _slot(slot: int, name: str | None, state: BankState, tally: Tally) -> SlotStatus:
    staged = state.held[slot]
    if name is None or staged is None:
        return SlotStatus(slot)
    entry, routing = state.roster[name], state.roster.routing
    return SlotStatus(
        slot=slot,
        adapter_name=name,
        source=staged.source,
        rank=staged.rank,
        weight=entry.weight,
        active=entry.active,
        modules=len(staged.targets),
        pinned=entry.pinned,
        routed=routing is not None and bool(routing.rows_of(name)),
        swap_seconds=tally.swaps.get(name),
        last_used=tally.used.get(name),
    )


def _component(component: str, layout: Layout) -> ComponentStatus:
    layers = [target.slots for target in layout if target.component == component]
    named = [
        (layer, name, buffer)
        for layer in layers
        for name in layer._buffers
        if (buffer := layer.whole(name)) is not None
    ]
    buffers = [buffer for _, _, buffer in named]
    large = [buffer for layer, name, buffer in named if name not in layer.float32]
    return ComponentStatus(
        modules=len(layers),
        nbytes=sum(b.numel() * b.element_size() for b in buffers),
        dtypes=tuple(dict.fromkeys(b.dtype for b in large)),
        devices=tuple(dict.fromkeys(b.device for b in large)),
    )


_HEAD = ("slot", "adapter", "state", "weight", "rank", "modules", "last swap", "used", "source")


def _cells(slot: SlotStatus) -> Sequence[str]:
    """A row of the table."""
    if slot.adapter_name is None:
        return (str(slot.slot), "", slot.state)
    swap = "" if slot.swap_seconds is None else f"{slot.swap_seconds * 1e3:.1f} ms"
    used = "never" if slot.last_used is None else _clock(slot.last_used)
    return (
        str(slot.slot), repr(slot.adapter_name), slot.state, f"{slot.weight:g}", str(slot.rank),
        str(slot.modules), swap, "now" if slot.active or slot.routed else used, slot.source,
    )  # fmt: skip


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Cells side by side, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        yield "  ".join(cells).rstrip()


def _rows(routing: Routing) -> str:
    rows = [
        " + ".join(name if weight == 1 else f"{weight:g} * {name}" for name, weight in row.items())
        for row in routing.rows
    ]
    expand = f" ({routing.expand})" if routing.expand else ""
    return ", ".join(f"{number} {row or 'base'}" for number, row in enumerate(rows)) + expand
