"""The small buffers that say which rows contribute, how much, and whose they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lora_slots.bank.memory import Memory
from lora_slots.errors import ArgumentError
from lora_slots.layers import SlotLayer
from lora_slots.staging.copying import overwrite
from lora_slots.staging.staged import StagedAdapter

Table = NDArray[np.float32] | NDArray[np.int64]
_ALIGNED = 16  # elements


class Tables(NamedTuple):
    """What the steering buffers of all modules must hold.

    Attributes:
        scaling: ``[modules, R]`` float32, by which each row is multiplied.
        weights: ``[modules, slots]`` float32, the weight of each slot that contributes.
        owners: ``[modules, R]`` int64, the slot that owns each row.
    """

    scaling: NDArray[np.float32]
    weights: NDArray[np.float32]
    owners: NDArray[np.int64]

    @classmethod
    def zero(cls, modules: int, rows: int, slots: int) -> Tables:
        """Nothing contributes."""
        return cls(
            np.zeros((modules, rows), dtype=np.float32),
            np.zeros((modules, slots), dtype=np.float32),
            np.zeros((modules, rows), dtype=np.int64),
        )

    def own(self, slot: int, first: int, count: int) -> None:
        """Let a slot own rows."""
        self.owners[:, first : first + count] = slot

    def activate(self, slot: int, staged: StagedAdapter, first: int, weight: float) -> None:
        """Let what a slot holds contribute.

        Args:
            slot: The slot.
            staged: What it holds.
            first: The first row that it owns.
            weight: The user's multiplier.

        Raises:
            ArgumentError: A weight times a scaling leaves the range of float32.
        """
        targets = list(staged.targets)
        scaling = scaled(staged, weight)
        self.weights[targets, slot] = weight
        ranks = np.array(staged.ranks)[:, None]
        rows = np.arange(ranks.max())
        self.scaling[targets, first : first + len(rows)] = np.where(
            rows < ranks, scaling[:, None], np.float32(0)
        )


def scaled(staged: StagedAdapter, weight: float) -> NDArray[np.float32]:
    """The scaling of each module of an adapter times the user's multiplier.

    Raises:
        ArgumentError: They, or the weight itself, leave the range of float32.
    """
    with np.errstate(over="ignore"):
        scaling = (np.array(staged.scaling) * weight).astype(np.float32)
        finite = np.isfinite(scaling).all() and np.isfinite(np.float32(weight))
    if not finite:
        raise ArgumentError(
            "a weight times the adapter's scaling must be a finite float32, got weight "
            f"{weight!r} times scalings up to {max(map(abs, staged.scaling))!r}"
        )
    return scaling


@dataclass(frozen=True, eq=False)
class _Group:
    """The buffers on one device, and a table there that is copied into them.

    Attributes:
        indices: Which modules they belong to.
        buffers: The buffers, ``[1, columns]`` each.
        table: ``[buffers, columns]`` on their device.
        rows: The rows of ``table``, ``[1, columns]`` each; none where the buffers are those rows.
    """

    indices: list[int]
    buffers: list[Tensor]
    table: Tensor
    rows: list[Tensor]

    def write(self, table: Table) -> None:
        """Copy the rows of ``table [modules, columns]`` that belong to this group."""
        own = table if len(self.indices) == len(table) else table[self.indices]
        overwrite(self.table, torch.from_numpy(own))
        if self.rows:
            torch._foreach_copy_(self.buffers, self.rows)


class Steering:
    """One such buffer of every slot layer that has it, ``[1, columns]`` each, all of one dtype.

    At first they are the rows of one table per device, which is written in one copy, where hundreds
    of small tensors cost a look-up each. What ``.to()`` or a hook puts in their place later shares
    nothing, and is copied one by one.
    """

    def __init__(self, layers: Sequence[SlotLayer], name: str) -> None:
        """Put rows of a table of zeros into the place of the buffers ``name`` of ``layers``."""
        self._name = name
        self._layers = {
            index: layer for index, layer in enumerate(layers) if layer.whole(name) is not None
        }
        self._groups = self._group(shared=True)
        self._known = Memory(self._buffers())

    def __getstate__(self) -> dict[str, object]:
        """Leave out what is looked up again: copies and pickles have buffers of their own."""
        return vars(self) | {"_groups": [], "_known": Memory()}

    def write(self, table: Table) -> None:
        """Copy ``table [modules, columns]`` into the buffers, once over to each device."""
        buffers = self._buffers()
        if not self._known.is_of(buffers):
            self._known, self._groups = Memory(buffers), self._group()
        for group in self._groups:
            group.write(table)

    def _buffers(self) -> list[Tensor]:
        name = self._name
        return [layer.whole(name) for layer in self._layers.values()]  # type: ignore[misc]

    def _group(self, *, shared: bool = False) -> list[_Group]:
        """Sort the buffers by device; ``shared`` makes them rows of the table of their group."""
        by_device: dict[torch.device, list[tuple[int, Tensor]]] = defaultdict(list)
        for index, buffer in zip(self._layers, self._buffers(), strict=True):
            by_device[buffer.device].append((index, buffer))
        groups = []
        with torch.inference_mode(False):
            for device, members in by_device.items():
                columns = members[0][1].shape[1]
                # Rows begin where vector instructions like them to.
                stride = -(-columns // _ALIGNED) * _ALIGNED
                dtype = members[0][1].dtype
                memory = torch.zeros(len(members) * stride, dtype=dtype, device=device)
                table = memory.view(-1, stride)[:, :columns]
                rows = [
                    memory.as_strided((1, columns), (columns, 1), number * stride)
                    for number in range(len(members))
                ]
                indices = [index for index, _ in members]
                if shared:
                    for index, row in zip(indices, rows, strict=True):
                        self._layers[index]._buffers[self._name] = row
                    groups.append(_Group(indices, rows, table, []))
                else:
                    groups.append(_Group(indices, [b for _, b in members], table, rows))
        return groups
