"""Copy many tensors into few blocks of host memory, rank-major, and see that they are finite."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lora_slots.staging.copying import for_each
from lora_slots.staging.pages import fresh
from lora_slots.staging.staged import Bits, as_bits

# The bits of the exponent of each dtype, which are all set in infinity and NaN.
_EXPONENT = {
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}
# Bytes that are looked at together, and are still in the cache by then.
_RUN = 512 * 1024
# From this many rows on, transposing 16-bit numbers by eights is faster than one by one.
_WORTH_WIDE = 32


class Part(NamedTuple):
    """Where some rows go.

    Attributes:
        target: The index of the target module.
        buffer: The name of the buffer.
        dtype: The dtype of the buffer.
        device: Where the buffer is.
    """

    target: int
    buffer: str
    dtype: torch.dtype
    device: torch.device


class _Run(NamedTuple):
    """Parts that lie one below the other in a block, by their indices, and where each begins."""

    block: int
    parts: tuple[int, ...]
    starts: tuple[int, ...]
    stop: int


@dataclass(frozen=True, eq=False)
class _Block:
    """Memory for parts of one dtype and width, by their indices, with as many rows each."""

    dtype: torch.dtype
    width: int
    parts: tuple[int, ...]
    counts: tuple[int, ...]
    pinned: bool

    @property
    def rows(self) -> int:
        return sum(self.counts)

    def matrix(self, memory: Tensor) -> Tensor:
        return memory.view(self.rows, self.width)


@dataclass(frozen=True, eq=False)
class Packing:
    """Which rows of which block parts are copied into: one block per dtype and width.

    Attributes:
        parts: The parts.
    """

    parts: tuple[Part, ...]
    _blocks: tuple[_Block, ...]
    _runs: tuple[_Run, ...]

    @classmethod
    def of(cls, parts: Sequence[Part], shapes: Sequence[Sequence[int]]) -> Packing:
        """Lay parts out whose rows are of these shapes, ``[rows, width]`` each.

        Parts of one buffer with as many rows follow each other in the order of their targets.
        """
        groups: dict[tuple[torch.dtype, int], list[int]] = defaultdict(list)
        for index, part in enumerate(parts):
            groups[part.dtype, shapes[index][1]].append(index)
        # What goes into buffers that lie side by side can be written in one copy.
        for group in groups.values():
            group.sort(
                key=lambda index: (parts[index].buffer, shapes[index][0], parts[index].target)
            )
        blocks = tuple(
            _Block(
                dtype,
                width,
                tuple(own),
                tuple(shapes[index][0] for index in own),
                pinned=any(parts[index].device.type == "cuda" for index in own),
            )
            for (dtype, width), own in groups.items()
        )
        runs = (run for number, block in enumerate(blocks) for run in _runs(number, block))
        return cls(tuple(parts), blocks, tuple(runs))

    def blocks(self, spare: list[Tensor]) -> list[Tensor]:
        """Memory for all parts: pinned where a GPU shall read it beside what the host does.

        Args:
            spare: Memory that may be overwritten and kept; what is used is taken out.
        """
        return [
            _memory(block.rows * block.width, block.dtype, spare, pinned=block.pinned)
            for block in self._blocks
        ]

    def views(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """The rows of each part in such blocks, in the dtype of its buffer."""
        views: list[Tensor] = [torch.empty(0)] * len(self.parts)
        for block, memory in zip(self._blocks, blocks, strict=True):
            rows = torch.split(block.matrix(memory), list(block.counts))
            for index, view in zip(block.parts, rows, strict=True):
                views[index] = view
        return views

    def fill(self, blocks: Sequence[Tensor], sources: Sequence[Tensor | Bits]) -> bool:
        """Copy the rows of all parts into such blocks.

        Args:
            blocks: Where to. Overwritten.
            sources: The rows of each part, strided in any way, of any dtype; or, of that of the
                buffer, their bits. Only read.

        Returns:
            Whether every value is finite, in its own dtype and in that of the buffer.
        """
        matrices = []
        for block, memory in zip(self._blocks, blocks, strict=True):
            matrix = block.matrix(memory)
            bits = as_bits(matrix)
            assert bits is not None
            matrices.append((matrix, bits))
        nbytes = sum(memory.nbytes for memory in blocks)
        return all(for_each(partial(_fill_run, sources, matrices), self._runs, nbytes))


def _runs(number: int, block: _Block) -> Iterator[_Run]:
    """Cut the parts of one block into runs of some size, as far as whole parts make that."""
    some: list[int] = []
    starts: list[int] = []
    stop = 0
    least = -(-_RUN // max(block.width * block.dtype.itemsize, 1))  # layers may have no inputs
    for index, count in zip(block.parts, block.counts, strict=True):
        some.append(index)
        starts.append(stop)
        stop += count
        if stop - starts[0] >= least:
            yield _Run(number, tuple(some), tuple(starts), stop)
            some, starts = [], []
    if some:
        yield _Run(number, tuple(some), tuple(starts), stop)


def _memory(numel: int, dtype: torch.dtype, spare: list[Tensor], *, pinned: bool) -> Tensor:
    """Host memory for ``numel`` elements, taken out of ``spare`` where that has just this size."""
    for position, block in enumerate(spare):
        if block.dtype == dtype and block.numel() == numel:
            return spare.pop(position)
    if pinned:
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)
    return fresh(numel, dtype)


def _fill_run(
    sources: Sequence[Tensor | Bits], matrices: Sequence[tuple[Tensor, Bits]], run: _Run
) -> bool:
    """Copy parts into their rows. Returns whether every value is finite after that."""
    rows, bits = matrices[run.block]
    for index, start, stop in zip(run.parts, run.starts, (*run.starts[1:], run.stop), strict=True):
        source = sources[index]
        if isinstance(source, Tensor) and rows.dtype == source.dtype:
            source = source if (own := as_bits(source)) is None else own
        if isinstance(source, Tensor):
            with torch.no_grad():  # which is a thread's own
                rows[start:stop].copy_(source)
        else:
            # numpy copies faster than torch, and waits for no other thread.
            _copy_rows(bits[start:stop], source)
    return _all_finite(rows.dtype, bits[run.starts[0] : run.stop])


def _copy_rows(own: NDArray[Any], source: NDArray[Any]) -> None:
    """``own[:] = source``. ``lora_B`` is transposed here, once.

    Of many 16-bit numbers, eight are moved at a time, which takes up to two fifths less time.
    """
    rows, width = own.shape
    wide = own.itemsize == 2 and rows >= _WORTH_WIDE and rows % 8 == 0 and width > 0
    if not (wide and source.T.flags.c_contiguous):
        np.copyto(own, source)
        return
    # A complex number is the one of 16 bytes that numpy has; a copy keeps all bits.
    eights = np.ascontiguousarray(source.T.view(np.complex128).T).view(np.int16)
    np.copyto(own.reshape(-1, 8, width), eights.reshape(-1, width, 8).transpose(0, 2, 1))


def _all_finite(dtype: torch.dtype, bits: NDArray[Any]) -> bool:
    """Whether numbers of ``dtype``, given as integers of the same size, are all finite.

    A number that is not finite has every bit of its exponent set. Where all numbers together have
    not, which one cheap pass tells and which holds for weights below 2, none has.

    Source: IEEE 754-2019, section 3.4.
    """
    exponent = _EXPONENT.get(dtype)
    if exponent is None:
        return True
    if bits.nbytes % 8 == 0:
        together = int(np.bitwise_or.reduce(bits.reshape(-1).view(np.uint64)))
        width = 8 * bits.itemsize
        if all((together >> shift) & exponent != exponent for shift in range(0, 64, width)):
            return True
    return not ((bits & exponent) == exponent).any()
