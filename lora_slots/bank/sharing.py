"""What all slot layers on one device have in common, and what is written into their `Mix`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

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
        self._values = _Values(
            np.zeros(rows, dtype=np.float32),
            np.zeros(num_slots, dtype=np.float32),
            np.zeros(rows, dtype=np.int64),
        )
        self._owned: Mapping[int, range] | None = None

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles find the modules that the layers have."""
        return vars(self) | {"_generation": -1, "_mixes": {}}

    @property
    def devices(self) -> Collection[torch.device]:
        """Where the layers are."""
        self._find()
        return self._mixes.keys()

    def write(self, weights: Mapping[int, float], owned: Mapping[int, range]) -> None:
        """Let these be the weights of slots that contribute, and these the rows that slots own."""
        values = self._values
        values.rows.fill(0)
        values.slots.fill(0)
        for slot, weight in weights.items():
            own = owned.get(slot, range(0))
            values.rows[own.start : own.stop].fill(weight)
            values.slots[slot] = weight
        moved = owned != self._owned
        if moved:
            self._owned = None  # until it is true, whatever interrupts this
            values.owners.fill(0)
            for slot, own in owned.items():
                values.owners[own.start : own.stop] = slot
        self._find()
        for mix in self._mixes.values():
            values.write(mix, owners=moved)
        self._owned = owned

    def _find(self) -> None:
        """Look where the layers are, if any may have moved."""
        if self._generation == SlotLayer.generation:
            return
        self._mixes = share(self._layers, "mix", self._make)
        for device, mix in self._mixes.items():
            if mix.rows.device != device and device.type != "meta":
                mix.to_empty(device=device)  # which it can leave meta with, too
            self._values.write(mix, owners=True)
        self._generation = SlotLayer.generation

    def _make(self, device: torch.device) -> Mix:
        return Mix(self._rows, self._num_slots, device)


class _Values:
    """What `Mix` is to hold, on the host, as arrays and as tensors of the same memory."""

    def __init__(
        self,
        rows: NDArray[np.float32],
        slots: NDArray[np.float32],
        owners: NDArray[np.int64],
    ) -> None:
        self.rows, self.slots, self.owners = rows, slots, owners
        arrays = rows[None], slots[None], owners
        self._rows, self._slots, self._owners = map(torch.from_numpy, arrays)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.rows, self.slots, self.owners)

    def write(self, mix: Mix, *, owners: bool) -> None:
        overwrite(mix.rows, self._rows)
        overwrite(mix.slots, self._slots)
        if owners:
            overwrite(mix.owners, self._owners)


def share(
    layers: Iterable[SlotLayer], name: str, make: Callable[[torch.device], _Shared]
) -> dict[torch.device, _Shared]:
    """Let the layers on each device have one module in common: their attribute ``name``.

    It is a child of the first of them only: what goes through a model's modules finds it once.

    Args:
        layers: The layers. Their attributes are replaced where they differ.
        name: What the attribute is called.
        make: Makes one for a device where no layer has one.
    """
    shared: dict[torch.device, _Shared] = {}
    placed = [(layer, _device(layer)) for layer in layers]
    # What layers on meta share with others is left to those, who use it.
    for layer, device in sorted(placed, key=lambda pair: pair[1].type == "meta"):
        layer._modules.pop(name, None)
        if device not in shared:
            known = vars(layer)[name]
            elsewhere = any(known is other for other in shared.values())
            shared[device] = make(device) if known is None or elsewhere else known
            shared[device].training = layer.training
            layer._modules[name] = shared[device]
        # Found before children are, so that code compiled for one layer runs any of them.
        vars(layer)[name] = shared[device]
    return shared


def _device(layer: SlotLayer) -> torch.device:
    return next(buffer.device for buffer in layer._buffers.values() if buffer is not None)
