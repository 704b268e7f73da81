"""The ``scaling`` of every row by rank, in every slot layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lora_slots.bank.memory import Memory
from lora_slots.layers import SlotLayer
from lora_slots.staging.copying import overwrite

Table = NDArray[np.float32]
_NAME = "scaling"
_ALIGNED = 16  # elements


@dataclass(frozen=True, eq=False)
class _Group:
    """The buffers on one device, and a table there that is copied into them.

    Attributes:
        indices: Which modules they belong to.
        buffers: The buffers, ``[1, R]`` each.
        table: ``[buffers, R]`` on their device.
        rows: The rows of ``table``, ``[1, R]`` each; none where the buffers are those rows.
    """

    indices: list[int]
    buffers: list[Tensor]
    table: Tensor
    rows: list[Tensor]

    def write(self, table: Table) -> None:
        """Copy the rows of ``table [modules, R]`` that belong to this group."""
        own = table if len(self.indices) == len(table) else table[self.indices]
        overwrite(self.table, torch.from_numpy(own))
        if self.rows:
            torch._foreach_copy_(self.buffers, self.rows)


class ScalingWriter:
    """The buffer ``scaling`` of every slot layer that has it, ``[1, R]`` each.

    At first they are the rows of one table per device, which is written in one copy, where hundreds
    of small tensors cost a look-up each. What ``.to()`` or a hook puts in their place later shares
    nothing, and is copied one by one.
    """

    def __init__(self, layers: Sequence[SlotLayer]) -> None:
        """Put rows of a table of zeros into the place of the buffers of ``layers``."""
        self._layers = {
            index: layer for index, layer in enumerate(layers) if layer.whole(_NAME) is not None
        }
        self._groups = self._group(shared=True)
        self._known = Memory(self._buffers())

    def __getstate__(self) -> dict[str, object]:
        """Leave out what is looked up again: copies and pickles have buffers of their own."""
        return vars(self) | {"_groups": [], "_known": Memory()}

    def write(self, table: Table) -> bool:
        """Copy ``table [modules, R]`` into the buffers, once over to each device.

        Returns:
            Whether they are others than before: a hook, for one, may have moved layers.
        """
        buffers = self._buffers()
        are_others = not self._known.is_of(buffers)
        if are_others:
            self._known, self._groups = Memory(buffers), self._group()
        for group in self._groups:
            group.write(table)
        return are_others

    def _buffers(self) -> list[Tensor]:
        return [layer.whole(_NAME) for layer in self._layers.values()]  # type: ignore[misc]

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
                memory = torch.zeros(len(members) * stride, dtype=torch.float32, device=device)
                table = memory.view(-1, stride)[:, :columns]
                rows = [
                    memory.as_strided((1, columns), (columns, 1), number * stride)
                    for number in range(len(members))
                ]
                indices = [index for index, _ in members]
                if shared:
                    for index, row in zip(indices, rows, strict=True):
                        self._layers[index]._buffers[_NAME] = row
                    groups.append(_Group(indices, rows, table, []))
                else:
                    groups.append(_Group(indices, [b for _, b in members], table, rows))
        return groups
