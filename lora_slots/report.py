"""What the manager tells its user: frozen, and readable when printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LoadReport:
    """What a load did, or would do.

    Attributes:
        adapter_name: The name it is loaded under.
        slot: The slot it fills.
        source: Where it was read from.
        rank: Its largest rank.
        modules: The paths of the target modules it adapts, in the order of the model.
        skipped: Keys of the file that were not applied, each with the reason.
        scaling: alpha / r (or alpha / sqrt(r)) of every module, before any weight.
        nbytes: The size of what was copied, in bytes.
        seconds: How long it took, reading included.
    """

    adapter_name: str
    slot: int
    source: str
    rank: int
    modules: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]
    scaling: Mapping[str, float]
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        """One line, and one more per skipped key."""
        low, high = min(self.scaling.values()), max(self.scaling.values())
        scaling = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        lines = [
            f"{self.adapter_name!r} in slot {self.slot} from {self.source}: rank {self.rank}, "
            f"scaling {scaling}, {len(self.modules)} modules, {_size(self.nbytes)}, "
            f"{self.seconds * 1e3:.1f} ms"
        ]
        lines += [f"  skipped {key}: {reason}" for key, reason in self.skipped]
        return "\n".join(lines)


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
    """

    slot: int
    adapter_name: str | None = None
    source: str = ""
    rank: int = 0
    weight: float = 0.0
    active: bool = False
    modules: int = 0

    def __str__(self) -> str:
        """One line."""
        if self.adapter_name is None:
            return f"slot {self.slot}: free"
        state = "active" if self.active else "inactive"
        return (
            f"slot {self.slot}: {self.adapter_name!r} {state}, weight {self.weight:g}, rank "
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
        return f"{self.modules} modules, {_size(self.nbytes)} of buffers, {dtypes}, on {devices}"


@dataclass(frozen=True)
class ManagerStatus:
    """What a manager holds now.

    Attributes:
        slots: One entry per slot.
        enabled: Whether active adapters contribute; False after ``disable_adapters``.
        max_rank: The number of rows of a slot.
        components: The buffers of each component, by its name; ``""`` for a single model.
    """

    slots: tuple[SlotStatus, ...]
    enabled: bool
    max_rank: int
    components: Mapping[str, ComponentStatus]

    def __str__(self) -> str:
        """One line per slot and component."""
        head = f"{len(self.slots)} slots of max_rank {self.max_rank}, adapters " + (
            "enabled" if self.enabled else "disabled"
        )
        components = (f"{name or 'model'}: {part}" for name, part in self.components.items())
        return "\n".join([head, *map(str, self.slots), *components])


@dataclass(frozen=True)
class AdapterInfo:
    """What the header and the config of an adapter say, without a model.

    Attributes:
        source: Where it was read from.
        base_model: The base model it names, or empty.
        ranks: The rank of every module, by the file's name for it less ``base_model.model.``.
        scaling: The scaling of every module.
        dtypes: The dtypes of its LoRA tensors.
        nbytes: The size of all its tensors in bytes.
        features: What it asks for beyond low-rank tensors, such as ``modules_to_save``.
    """

    source: str
    base_model: str
    ranks: Mapping[str, int]
    scaling: Mapping[str, float]
    dtypes: tuple[torch.dtype, ...]
    nbytes: int
    features: tuple[str, ...]

    @property
    def max_rank(self) -> int:
        """The largest rank: what a SlotManager's ``max_rank`` must be at least."""
        return max(self.ranks.values())

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the modules it adapts."""
        return tuple(self.ranks)

    def __str__(self) -> str:
        """One line."""
        low, high = min(self.ranks.values()), self.max_rank
        ranks = str(low) if low == high else f"{low} to {high}"
        features = f", asks for {', '.join(self.features)}" if self.features else ""
        return (
            f"{self.source}: rank {ranks}, {len(self.ranks)} modules, {_size(self.nbytes)}"
            f"{f', for {self.base_model}' if self.base_model else ''}{features}"
        )


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.1f} kB"
