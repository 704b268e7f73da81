"""The tensors of a safetensors file where they lie: mapped into memory, not read."""

from __future__ import annotations

import functools
import math
import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Integers by their size in bytes.
_INTEGERS = {size: np.dtype(f"i{size}") for size in (1, 2, 4, 8)}


class Entry(NamedTuple):
    """A tensor in a file: its bytes are ``start : stop`` of the data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Header:
    """What the header of a file says, where its data begin, and how large the file is.

    Files of the same size whose headers are the same, byte by byte, share one as long as it is
    remembered.
    """

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    start_of_data: int
    size: int


class Cut(NamedTuple):
    """Where the numbers of a matrix lie in a file, as integers of the same size."""

    shape: tuple[int, int]
    dtype: np.dtype[np.signedinteger]
    offset: int
    strides: tuple[int, int]


class MappedTensors(Mapping[str, Tensor]):
    """The tensors of one file by their names, all made when the first of them is looked at.

    Attributes:
        header: What the file says of them.
    """

    def __init__(self, mapped: mmap.mmap, header: Header) -> None:
        """Cut ``mapped``, the whole file, as ``header`` says."""
        self.header = header
        self._mapped = mapped

    def __getitem__(self, name: str) -> Tensor:
        """One tensor, as a view of the file."""
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, in the order of the header."""
        return iter(self.header.entries)

    def __len__(self) -> int:
        """The number of tensors."""
        return len(self.header.entries)

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles are of the tensors, not of the file."""
        return dict, (dict(self),)

    @functools.cached_property
    def _tensors(self) -> dict[str, Tensor]:
        """This is several times faster than asking safetensors for one tensor after the other."""
        entries = self.header.entries
        content = torch.frombuffer(self._mapped, dtype=torch.uint8)[self.header.start_of_data :]
        whole = {dtype: _typed(content, dtype) for dtype in {e.dtype for e in entries.values()}}
        tensors = {}
        for name, (dtype, shape, strides, start, stop) in entries.items():
            base, itemsize = whole[dtype], dtype.itemsize
            if start % itemsize:
                tensors[name] = _typed(content[start:stop], dtype).view(shape)
            else:
                offset = base.storage_offset() + start // itemsize
                tensors[name] = base.as_strided(shape, strides, offset)
        return tensors

    def cut(self, name: str, *, transposed: bool) -> Cut:
        """Where the matrix lies whose rows are a tensor's first axis, or whose columns are."""
        entry = self.header.entries[name]
        size = entry.dtype.itemsize
        rows = entry.shape[0]
        width = math.prod(entry.shape[1:])
        shape, strides = (rows, width), (width * size, size)
        if transposed:
            shape, strides = shape[::-1], strides[::-1]
        offset = self.header.start_of_data + entry.start
        return Cut(shape, _INTEGERS[size], offset, strides)

    def take(self, cuts: Iterable[Cut]) -> list[NDArray[np.signedinteger]]:
        """Matrices of the file, or of another one with the same header, without a copy."""
        return [
            np.ndarray(shape, dtype, self._mapped, offset, strides)
            for shape, dtype, offset, strides in cuts
        ]


def _typed(content: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as whole elements of ``dtype``; copied where they lie where those cannot be read."""
    content = content[: content.numel() // dtype.itemsize * dtype.itemsize]
    aligned = content.storage_offset() % dtype.itemsize == 0
    return (content if aligned else content.clone()).view(dtype)
