"""Where the buffers of one name lie, and how rows get there in few strided copies."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lora_slots.staging.staged import Bits, StagedRows, as_bits

# Bytes that are copied at a time, so that threads can share a large copy.
_PIECE = 4_000_000


class Place(NamedTuple):
    """The same rows of several buffers: ``bits[which]`` is ``[buffers, rows, width]``."""

    bits: Bits
    which: slice | NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Slab:
    """Buffers of one shape that lie at equal distances in one piece of host memory.

    Attributes:
        bits: ``[n, rows, width]``; some of the n may be no buffers, or no longer.
        buffers: The buffers, by their index in ``bits``.
    """

    bits: Bits
    buffers: Mapping[int, Tensor]

    def place(self, indices: Sequence[int]) -> Place:
        """All rows of the buffers at ``indices``, which ascend."""
        first, last = indices[0], indices[-1]
        step = (last - first) // max(len(indices) - 1, 1) or 1
        if indices == list(range(first, last + 1, step)):
            return Place(self.bits[first : last + 1 : step], slice(None))
        return Place(self.bits, np.array(indices))

    def counted(self, indices: Iterable[int]) -> list[Tensor]:
        """Tensors with the version counters of the buffers at ``indices``; views share theirs."""
        owners = {}
        for index in indices:
            buffer = self.buffers[index]
            owners[id(buffer if buffer._base is None else buffer._base)] = buffer
        return list(owners.values())


class Home(NamedTuple):
    """Where a buffer lies: ``slab.bits[at]``."""

    slab: Slab
    at: int


def homes(buffers: Mapping[int, Tensor]) -> dict[int, Home]:
    """Where those buffers lie that are in the host's memory.

    It is read off their addresses, whoever gave them their memory.
    """
    alike: dict[Hashable, dict[int, Tensor]] = defaultdict(dict)
    for key, buffer in buffers.items():
        if buffer.is_cpu and buffer.is_contiguous():
            memory = buffer.untyped_storage().data_ptr()
            alike[memory, buffer.dtype, buffer.shape][key] = buffer
    found = {}
    for members in alike.values():
        found.update(_homes(members))
    return found


def _homes(members: Mapping[int, Tensor]) -> dict[int, Home]:
    """Where buffers of one shape and dtype lie in memory that they share."""
    first = min(members.values(), key=Tensor.storage_offset)
    begin, (rows, width) = first.storage_offset(), first.shape
    step = math.gcd(*(buffer.storage_offset() - begin for buffer in members.values()))
    if not 0 < first.numel() <= step:
        return {key: Home(Slab(_bits(each)[None], {0: each}), 0) for key, each in members.items()}
    indices = {key: (buffer.storage_offset() - begin) // step for key, buffer in members.items()}
    size, strides = (max(indices.values()) + 1, rows, width), (step, width, 1)
    slab = Slab(
        _bits(first.as_strided(size, strides, begin)),
        {index: members[key] for key, index in indices.items()},
    )
    return {key: Home(slab, index) for key, index in indices.items()}


@dataclass(frozen=True, eq=False)
class Copies:
    """What brings staged rows into buffers.

    Attributes:
        places: The buffers, those that one copy can write at a time together.
        values: What goes into each of the places, ``[buffers, rows, width]``.
        counted: Tensors with the version counters of what the copies write.
        rest: Indices of staged rows that they leave out: not on the host, or of another dtype.
    """

    places: Sequence[Place]
    values: Sequence[Bits]
    counted: Sequence[Tensor]
    rest: Sequence[int]

    @classmethod
    def of(cls, staged: StagedRows, known: Mapping[int, Home]) -> Self:
        """Plan few copies: one for all rows that lie one below the other on both sides."""
        groups: dict[tuple[Slab, int], list[tuple[int, int]]] = defaultdict(list)
        rest = []
        for number, (target, part) in enumerate(zip(staged.targets, staged.rows, strict=True)):
            home = known.get(target)
            if home is None or not _fits(part, home.slab.buffers[home.at]):
                rest.append(number)
            else:
                groups[home.slab, part.shape[0]].append((home.at, number))
        places, values, counted = [], [], []
        for (slab, _), members in groups.items():
            members.sort()
            for piece in _pieces([staged.rows[number] for _, number in members]):
                places.append(slab.place([index for index, _ in members[piece.start : piece.stop]]))
                values.append(piece.bits)
            counted += slab.counted(index for index, _ in members)
        return cls(places, values, counted, rest)


def _fits(part: Tensor, buffer: Tensor) -> bool:
    return part.is_cpu and part.dtype == buffer.dtype and part.is_contiguous()


class _Piece(NamedTuple):
    """Parts ``start : stop``, as one array ``[parts, rows, width]``."""

    start: int
    stop: int
    bits: Bits


def _pieces(parts: Sequence[Tensor]) -> Iterator[_Piece]:
    """Cut parts of one shape where they do not lie one below the other, or are much memory."""
    nbytes = parts[0].nbytes
    most = max(_PIECE // max(nbytes, 1), 1)
    start = 0
    addresses = [part.data_ptr() for part in parts]
    for stop in range(1, len(parts) + 1):
        ends = stop == len(parts) or addresses[stop] != addresses[stop - 1] + nbytes
        if ends or stop - start == most:
            yield from _stacked(parts, start, stop)
            start = stop


def _stacked(parts: Sequence[Tensor], start: int, stop: int) -> Iterator[_Piece]:
    first, (rows, width) = parts[start], parts[start].shape
    size, offset = (stop - start, rows, width), first.storage_offset()
    # What lies side by side by chance is not the same memory.
    if (offset + math.prod(size)) * first.itemsize <= first.untyped_storage().nbytes():
        yield _Piece(start, stop, _bits(first.as_strided(size, (rows * width, width, 1), offset)))
        return
    for number in range(start, stop):
        yield _Piece(number, number + 1, _bits(parts[number])[None])


def _bits(tensor: Tensor) -> Bits:
    bits = as_bits(tensor)
    assert bits is not None
    return bits
