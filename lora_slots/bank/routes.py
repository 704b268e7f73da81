"""The tables that tell the rows of a batch apart: `Routes` of every device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lora_slots.bank.steering import scaled
from lora_slots.layers import LoraSlots, Routes, SlotLayer
from lora_slots.layout import Layout
from lora_slots.routing import Expand, RowWeights
from lora_slots.staging.staged import StagedAdapter


@dataclass(frozen=True, eq=False)
class RouteTables:
    """What `Routes` must hold.

    Attributes:
        by_rank: ``[rows, R]`` float32.
        by_slot: ``[rows, num_slots]`` float32.
        expand: How the model repeats rows.
    """

    by_rank: NDArray[np.float32]
    by_slot: NDArray[np.float32]
    expand: Expand

    @classmethod
    def of(
        cls,
        rows: RowWeights,
        held: Sequence[StagedAdapter | None],
        owned: Mapping[int, range],
        *,
        columns: int,
    ) -> RouteTables:
        """Fill in the weights of every row.

        Args:
            rows: The weights.
            held: What each slot holds.
            owned: The rows by rank that each slot owns; those that own none may be left out.
            columns: R.

        Raises:
            ArgumentError: A weight times a scaling leaves the range of float32.
        """
        by_rank = np.zeros((len(rows.rows), columns), dtype=np.float32)
        by_slot = np.zeros((len(rows.rows), len(held)), dtype=np.float32)
        for slot, weight in {pair for row in rows.rows for pair in row}:
            staged = held[slot]
            assert staged is not None
            scaled(staged, weight)
        for number, row in enumerate(rows.rows):
            for slot, weight in row:
                own = owned.get(slot, range(0))
                by_rank[number, own.start : own.stop] = weight
                by_slot[number, slot] = weight
        return cls(by_rank, by_slot, rows.expand)

    def says(self, other: RouteTables) -> bool:
        """Whether the other one has the same numbers."""
        return (
            self.expand == other.expand
            and np.array_equal(self.by_rank, other.by_rank)
            and np.array_equal(self.by_slot, other.by_slot)
        )


class RouteWriter:
    """Gives the slot layers on each device one `Routes`, and writes into those."""

    def __init__(self, layout: Layout) -> None:
        """Let no rows be told apart."""
        self._layers: list[LoraSlots] = []
        for target in layout:
            assert isinstance(target.slots, LoraSlots)
            target.slots.path = target.path
            self._layers.append(target.slots)
        self._generation = -1
        self._routes: dict[torch.device, Routes] = {}

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles find the modules that the layers have."""
        return vars(self) | {"_generation": -1, "_routes": {}}

    def write(self, tables: RouteTables | None, shown: int | None) -> None:
        """Let the forward tell rows apart by ``tables``, whose columns it sees ``shown`` of."""
        self._share()
        for device, routes in self._routes.items():
            if tables is None:
                routes.by_rank = routes.by_slot = None
                continue
            by_rank = tables.by_rank[:, :shown]
            routes.by_rank = _written(routes.by_rank, by_rank, tables.expand, device)
            routes.by_slot = _written(routes.by_slot, tables.by_slot, tables.expand, device)

    def _share(self) -> None:
        """Look where the layers are now, and give those on one device the same `Routes`."""
        if self._generation == SlotLayer.generation:
            return
        self._routes = {}
        for layer in self._layers:
            device = next(layer.buffers(recurse=False)).device
            if device not in self._routes:
                known = layer.routes
                elsewhere = any(known is other for other in self._routes.values())
                self._routes[device] = Routes() if known is None or elsewhere else known
            layer.routes = self._routes[device]
        self._generation = SlotLayer.generation


def _written(
    known: Tensor | None, table: NDArray[np.float32], expand: Expand, device: torch.device
) -> Tensor:
    """``table`` as a tensor: in the memory of ``known`` where that has the shape."""
    new = torch.from_numpy(np.ascontiguousarray(table))
    if expand is not None:
        new = new.unsqueeze(1 if expand == "interleave" else 0)
    if known is not None and known.shape == new.shape and known.device == device:
        return known.copy_(new)
    with torch.inference_mode(False):
        tensor = torch.empty(new.shape, dtype=torch.float32, device=device)
        tensor.copy_(new)
    if len(table) > 1 and expand is None:
        import torch._dynamo as dynamo  # takes seconds to import

        # One graph for any number of rows, where the batch is dynamic as well.
        dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor
