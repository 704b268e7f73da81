"""Where the buffers of one name lie, and how rows get there in few strided copies."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from torch import Tensor

from lora_slots.staging.staged import Bits, StagedRows, as_bits


@dataclass(frozen=True, eq=False)
class Slab:
    """Buffers of one shape that lie at equal distances in one piece of host memory.

    Attributes:
        bits: ``[n, rows, width]``; some of the n may be no buffers, or no longer.
        buffers: The buffers, by their index in ``bits``.
    """

    bits: Bits
    buffers: Mapping[int, Tensor]

    def rows_of(self, indices: Sequence[int]) -> Bits:
        """All rows of the buffers at ``indices``, which ascend by equal steps."""
        first, last = indices[0], indices[-1]
        return self.bits[first : last + 1 : (last - first) // max(len(indices) - 1, 1) or 1]

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
        into: All rows of some buffers of one slab, ``[buffers, rows, width]``.
        runs: For each of these, the index of the first staged part, and how many there are: they go
            into the first rows of a slot of one buffer each, and lie one below the other.
        counted: Tensors with the version counters of what the copies write.
        rest: Indices of staged parts that they leave out: not on the host, or of another dtype.
    """

    into: Sequence[Bits]
    runs: Sequence[tuple[int, int]]
    counted: Sequence[Tensor]
    rest: Sequence[int]

    @classmethod
    def of(cls, staged: StagedRows, known: Mapping[int, Home]) -> Self:
        """Plan few copies: one for rows that lie at equal distances on both sides."""
        groups: dict[tuple[Slab, int], list[tuple[int, int]]] = defaultdict(list)
        rest = []
        for number, (target, part) in enumerate(zip(staged.targets, staged.rows, strict=True)):
            home = known.get(target)
            if home is None or not _fits(part, home.slab.buffers[home.at]):
                rest.append(number)
            else:
                groups[home.slab, part.shape[0]].append((home.at, number))
        into, runs, counted = [], [], []
        for (slab, _), members in groups.items():
            members.sort()
            indices, numbers = [at for at, _ in members], [number for _, number in members]
            for run in progressions(indices, _gaps([staged.rows[number] for number in numbers])):
                into.append(slab.rows_of(indices[run]))
                runs.append((numbers[run.start], run.stop - run.start))
            counted += slab.counted(indices)
        return cls(into, runs, counted, rest)

    def values(self, staged: StagedRows) -> list[Bits]:
        """What goes into each of ``into``, ``[buffers, r, width]``: rows that lie as planned."""
        return [_stacked(staged.rows[first], count) for first, count in self.runs]


# A target, and of the rows that its slot owns, the first and the last (exclusive) to be zeroed.
Tail = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Zeroes:
    """What zeroes rows of buffers.

    Attributes:
        into: All rows of some buffers of one slab, ``[buffers, rows, width]``, and of those that a
            slot owns the first and the last (exclusive).
        counted: Tensors with the version counters of what is zeroed.
        rest: What is left out: not on the host.
    """

    into: Sequence[tuple[Bits, int, int]]
    counted: Sequence[Tensor]
    rest: Sequence[Tail]

    @classmethod
    def of(cls, tails: Iterable[Tail], known: Mapping[int, Home]) -> Self:
        """Plan few pieces: one for rows that lie at equal distances."""
        groups: dict[tuple[Slab, int, int], list[int]] = defaultdict(list)
        rest = []
        for tail in tails:
            target, first, last = tail
            if (home := known.get(target)) is not None:
                groups[home.slab, first, last].append(home.at)
            else:
                rest.append(tail)
        into, counted = [], []
        for (slab, first, last), indices in groups.items():
            indices.sort()
            runs = progressions(indices)
            into += [(slab.rows_of(indices[run]), first, last) for run in runs]
            counted += slab.counted(indices)
        return cls(into, counted, rest)


def progressions(numbers: Sequence[int], cuts: Container[int] = ()) -> Iterator[slice]:
    """Cut ascending numbers into pieces that ascend by equal steps; and also before ``cuts``."""
    start = 0
    for stop in range(1, len(numbers) + 1):
        if (
            stop == len(numbers)
            or stop in cuts
            or (
                stop - start > 1
                and numbers[stop] - numbers[stop - 1] != numbers[start + 1] - numbers[start]
            )
        ):
            yield slice(start, stop)
            start = stop


def _fits(part: Tensor, buffer: Tensor) -> bool:
    return part.is_cpu and part.dtype == buffer.dtype and part.is_contiguous()


def _gaps(parts: Sequence[Tensor]) -> Container[int]:
    """Which of some parts of one shape do not lie right below the one before."""
    addresses = [part.data_ptr() for part in parts]
    nbytes = parts[0].nbytes
    memory = parts[0].untyped_storage()
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes()
    if min(addresses) < begin or max(addresses) + nbytes > end:
        return range(len(parts))  # Of memory of their own, even if that is side by side by chance.
    pairs = itertools.pairwise(addresses)
    return {number for number, (a, b) in enumerate(pairs, 1) if b != a + nbytes}


def _stacked(first: Tensor, count: int) -> Bits:
    """As many parts of one shape that lie one below the other, as one array."""
    rows, width = first.shape
    size, strides = (count, rows, width), (rows * width, width, 1)
    return _bits(first.as_strided(size, strides, first.storage_offset()))


def _bits(tensor: Tensor) -> Bits:
    bits = as_bits(tensor)
    assert bits is not None
    return bits
