"""What all slot layers on one device have in common, and what is written into their `Mix`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from lora_slots.layers import Mix, SlotLayer
from lora_slots.staging.copying import overwrite

_Shared = TypeVar("_Shared", bound=SlotLayer)


class MixWriter:
    """Gives the slot layers on each device one `Mix`, and writes into those."""

    def __init__(self, layers: Sequence[SlotLayer], *, rows: int, num_slots: int) -> None:
        """Let nothing contribute, in what the layers were made with."""
        self._layers = layers
        self._rows, self._num_slots = rows, num_slots
        self._generation = -1
        self._mixes: dict[torch.device, Mix] = {}
        # What is written, kept since new memory takes longer to get than to fill.
        self._begin = Mix.begin_of_slots(rows)
        self._weights = np.zeros(self._begin + num_slots, dtype=np.float32)
        self._owners = np.zeros(rows, dtype=np.int64)
        self._tensors = torch.from_numpy(self._weights), torch.from_numpy(self._owners)
        self._owned: Mapping[int, range] | None = None

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles find the modules that the layers have."""
        return vars(self) | {"_generation": -1, "_mixes": {}, "_tensors": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Let the tensors be the arrays again."""
        vars(self).update(state)
        self._tensors = torch.from_numpy(self._weights), torch.from_numpy(self._owners)

    @property
    def devices(self) -> Collection[torch.device]:
        """Where the layers are."""
        self._find()
        return self._mixes.keys()

    def write(self, weights: Mapping[int, float], owned: Mapping[int, range]) -> None:
        """Let these be the weights of slots that contribute, and these the rows that slots own."""
        table = self._weights
        table.fill(0)
        for slot, weight in weights.items():
            own = owned.get(slot, range(0))
            table[own.start : own.stop].fill(weight)
            table[self._begin + slot] = weight
        moved = owned != self._owned
        if moved:
            self._owned = None  # until it is true, whatever interrupts this
            self._owners[:] = 0
            for slot, own in owned.items():
                self._owners[own.start : own.stop] = slot
        self._find()
        for mix in self._mixes.values():
            self._fill(mix, owners=moved)
        self._owned = owned

    def _find(self) -> None:
        """Look where the layers are, if any may have moved."""
        if self._generation == SlotLayer.generation:
            return
        self._mixes = share(self._layers, "mix", self._make)
        for device, mix in self._mixes.items():
            if mix.table.device != device and device.type != "meta":
                mix.to_empty(device=device)  # which it can leave meta with, too
            self._fill(mix)
        self._generation = SlotLayer.generation

    def _fill(self, mix: Mix, *, owners: bool = True) -> None:
        table, owned = self._tensors
        if owners:
            overwrite(mix.owners, owned)
        overwrite(mix.table, table)

    def _make(self, device: torch.device) -> Mix:
        return Mix(self._rows, self._num_slots, device)


def share(
    layers: Iterable[SlotLayer], name: str, make: Callable[[torch.device], _Shared]
) -> dict[torch.device, _Shared]:
    """Let the layers on each device have one module in common: their child ``name``.

    Args:
        layers: The layers. Their children are replaced where they differ.
        name: What the child is called.
        make: Makes one for a device where no layer has one.
    """
    shared: dict[torch.device, _Shared] = {}
    placed = [(layer, _device(layer)) for layer in layers]
    # What layers on meta share with others is left to those, who use it.
    for layer, device in sorted(placed, key=lambda pair: pair[1].type == "meta"):
        if device not in shared:
            known = layer._modules.get(name)
            elsewhere = any(known is other for other in shared.values())
            shared[device] = make(device) if known is None or elsewhere else known  # type: ignore[assignment]
        layer._modules[name] = shared[device]
    return shared


def _device(layer: SlotLayer) -> torch.device:
    return next(buffer.device for buffer in layer._buffers.values() if buffer is not None)
