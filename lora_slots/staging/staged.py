"""StagedAdapter: an adapter on the host, in the shape and dtype of the buffers it is meant for."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lora_slots.errors import ArgumentError

if TYPE_CHECKING:
    from lora_slots.staging.packing import Packing

# Numbers of any dtype as integers of the same size, and the dtypes of those.
Bits = NDArray[np.signedinteger]
# Far enough from what float32 cannot hold for rounding not to matter.
_SURELY_FINITE = 2.0**127
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(tensor: Tensor) -> Bits | None:
    """The memory of a tensor, as integers; None where it is not the host's."""
    if not tensor.is_cpu:
        return None
    bits: Bits = tensor.view(_BITS[tensor.itemsize]).numpy()
    return bits


@dataclass(frozen=True, eq=False)
class StagedRows:
    """The rows of one buffer.

    Attributes:
        targets: Indices of the target modules whose buffer they are for.
        rows: ``[rows, width]`` each, in the dtype of the buffer.
        packing: What says where they lie in memory, if others lie just so; else None.
    """

    targets: tuple[int, ...]
    rows: tuple[Tensor, ...]
    packing: Packing | None = None

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """How many rows there are for each target module."""
        return tuple(part.shape[0] for part in self.rows)


@dataclass(frozen=True, eq=False)
class StagedAdapter:
    """An adapter on the host, ready to be copied into slots row by row. Immutable.

    Tensors of one dtype and width share one packed block.

    Attributes:
        source: Where the adapter was read from.
        targets: Indices of its target modules in the layout.
        scaling: ``alpha / r`` or ``alpha / sqrt(r)``, one per target module.
        ranks: The rank of each target module.
        rows: For each buffer by its name, what goes into the first rows of a slot; in ``scaling``,
            the first columns.
        blocks: The memory that ``lora_A`` and ``lora_B`` share, one flat block per dtype and width;
            none in a copy.
    """

    source: str
    targets: tuple[int, ...]
    scaling: tuple[float, ...]
    ranks: tuple[int, ...]
    rows: Mapping[str, StagedRows]
    blocks: tuple[Tensor, ...] = ()

    @functools.cached_property
    def rank(self) -> int:
        """The largest of ``ranks``."""
        return max(self.ranks)

    @functools.cached_property
    def _largest_scaling(self) -> float:
        return max(map(abs, self.scaling))

    def check_weight(self, weight: float) -> None:
        """Refuse a multiplier of its scaling that is too large.

        Raises:
            ArgumentError: The product, or the weight itself, leaves the range of float32.
        """
        largest = self._largest_scaling
        if max(abs(weight), largest, abs(weight * largest)) < _SURELY_FINITE:
            return
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = np.float32(weight)  # as it is multiplied
            product = rounded * np.float32(largest)
        if not (np.isfinite(rounded) and np.isfinite(product)):
            raise ArgumentError(
                "a weight times the adapter's scaling must be a finite float32, got weight "
                f"{weight!r} times scalings up to {largest!r}"
            )

    @property
    def nbytes(self) -> int:
        """The size of its tensors in bytes; what scales them is not counted."""
        rows = (rows.rows for name, rows in self.rows.items() if name != "scaling")
        return sum(tensor.nbytes for tensor in itertools.chain.from_iterable(rows))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle each tensor alone: a view would bring the whole block along."""
        alone = {
            name: StagedRows(rows.targets, tuple(part.clone() for part in rows.rows))
            for name, rows in self.rows.items()
        }
        return type(self), (self.source, self.targets, self.scaling, self.ranks, alone)


# Gives, once, an adapter that nobody needs any more.
Spare = Callable[[], StagedAdapter | None]


def nothing_to_spare() -> StagedAdapter | None:
    """The `Spare` of who has none."""
    return None


def blocks_of(spare: StagedAdapter | None) -> list[Tensor]:
    """The memory that may be overwritten, to be taken out as it is used."""
    return [] if spare is None else list(spare.blocks)
