"""The tables that tell the rows of a batch apart: `Routes` of every device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lora_slots.bank.sharing import share
from lora_slots.layers import LoraSlots, Routes, SlotLayer
from lora_slots.layout import Layout
from lora_slots.routing import Expand, RowWeights
from lora_slots.staging.copying import overwrite
from lora_slots.staging.staged import StagedAdapter


@dataclass(frozen=True, eq=False)
class RouteTables:
    """What `Routes` must hold.

    Attributes:
        picks: ``[rows, k]`` int64.
        factors: ``[rows, k]`` float32.
        weights: ``[rows, num_slots]`` float32.
        expand: How the model repeats rows.
    """

    picks: NDArray[np.int64]
    factors: NDArray[np.float32]
    weights: NDArray[np.float32]
    expand: Expand

    @classmethod
    def of(
        cls,
        rows: RowWeights,
        held: Sequence[StagedAdapter | None],
        owned: Mapping[int, range],
        *,
        least: int,
    ) -> Self:
        """Fill in the weights of every row.

        Args:
            rows: The weights.
            held: What each slot holds.
            owned: The rows by rank that each slot owns; those that own none may be left out.
            least: How many rows by rank each row is computed with at least.

        Raises:
            ArgumentError: A weight times a scaling leaves the range of float32.
        """
        counts = (sum(len(owned.get(slot, ())) for slot, _ in row) for row in rows.rows)
        # A single one would be a graph of its own, as every dimension of size 1 is to Dynamo.
        columns = max(2, least, *counts)
        picks = np.zeros((len(rows.rows), columns), dtype=np.int64)
        factors = np.zeros((len(rows.rows), columns), dtype=np.float32)
        weights = np.zeros((len(rows.rows), len(held)), dtype=np.float32)
        for slot, weight in {pair for row in rows.rows for pair in row}:
            staged = held[slot]
            assert staged is not None
            staged.check_weight(weight)
        for number, row in enumerate(rows.rows):
            stop = 0
            for slot, weight in row:
                own = owned.get(slot, range(0))
                start, stop = stop, stop + len(own)
                picks[number, start:stop] = own
                factors[number, start:stop] = weight
                weights[number, slot] = weight
        return cls(picks, factors, weights, rows.expand)

    def disabled(self) -> Self:
        """The same with nothing that contributes."""
        zero = {name: np.zeros_like(getattr(self, name)) for name in ("factors", "weights")}
        return replace(self, **zero)

    def says(self, other: RouteTables) -> bool:
        """Whether the other one has the same numbers."""
        return (
            self.expand == other.expand
            and np.array_equal(self.picks, other.picks)
            and np.array_equal(self.factors, other.factors)
            and np.array_equal(self.weights, other.weights)
        )


class RouteWriter:
    """Gives the slot layers on each device one `Routes`, and writes into those."""

    def __init__(self, layout: Layout) -> None:
        """Let no rows be told apart."""
        self._layers: list[LoraSlots] = []
        for target in layout:
            assert isinstance(target.slots, LoraSlots)
            target.slots.path = target.path
            target.slots.routing = True
            self._layers.append(target.slots)
        self._generation = -1
        self._routes: dict[torch.device, Routes] = {}

    def __getstate__(self) -> dict[str, object]:
        """Copies and pickles find the modules that the layers have."""
        return vars(self) | {"_generation": -1, "_routes": {}}

    def write(self, tables: RouteTables | None, shown: int | None) -> None:
        """Let the forward tell rows apart by ``tables``; it sees ``shown`` rows by rank, or all."""
        self._share()
        for device, routes in self._routes.items():
            if tables is None:
                routes.picks = routes.factors = routes.weights = None
                continue
            expand, picks = tables.expand, tables.picks
            if shown is not None:
                # What contributes nothing need not be seen: disabled adapters, and weights of 0.
                picks = np.minimum(picks, max(shown - 1, 0))
            routes.picks = _written(routes.picks, picks, expand, device)
            routes.factors = _written(routes.factors, tables.factors, expand, device)
            routes.weights = _written(routes.weights, tables.weights, expand, device, fixed=True)

    def _share(self) -> None:
        """Look where the layers are now, and give those on one device the same `Routes`."""
        if self._generation != SlotLayer.generation:
            self._routes = share(self._layers, "routes", lambda device: Routes())
            self._generation = SlotLayer.generation


def _written(
    known: Tensor | None,
    table: NDArray[Any],
    expand: Expand,
    device: torch.device,
    *,
    fixed: bool = False,
) -> Tensor:
    """``table`` as a tensor: in the memory of ``known`` where that has the shape.

    Code is compiled for any number of columns, if these are not ``fixed``, and for any number of
    rows where the batch is dynamic as well.
    """
    new = torch.from_numpy(table)
    if expand is not None:
        new = new.unsqueeze(1 if expand == "interleave" else 0)
    tensor = known
    with torch.inference_mode(False):
        if tensor is None or tensor.shape != new.shape or tensor.device != device:
            tensor = torch.empty(new.shape, dtype=new.dtype, device=device)
        overwrite(tensor, new)
    import torch._dynamo as dynamo  # takes seconds to import

    # Each time, since `.to()` makes other tensors.
    any_rows = [0] if len(table) > 1 and expand is None else []
    any_columns = [] if fixed else [tensor.ndim - 1]
    dynamo.maybe_mark_dynamic(tensor, any_rows + any_columns)
    return tensor
