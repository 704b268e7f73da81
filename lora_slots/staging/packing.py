"""Copy many tensors into few blocks of host memory, rank-major, and see that they are finite."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lora_slots.staging.copying import for_each
from lora_slots.staging.staged import as_bits

# The bits of the exponent of each dtype, which are all set in infinity and NaN.
_EXPONENT = {
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}
# Bytes that are looked at together, and are still in the cache by then.
_RUN = 512 * 1024
# From this many rows on, transposing 16-bit numbers by fours is faster than one by one.
_WORTH_WIDE = 32


class Part(NamedTuple):
    """Rows on their way into a buffer.

    Attributes:
        target: The index of the target module.
        buffer: The name of the buffer.
        dtype: The dtype of the buffer.
        device: Where the buffer is.
        rows: ``[rows, width]``, strided in any way, of any dtype.
    """

    target: int
    buffer: str
    dtype: torch.dtype
    device: torch.device
    rows: Tensor


class NotFiniteError(Exception):
    """A part has values that are not finite after the copy into ``rows``."""

    def __init__(self, part: Part, rows: Tensor) -> None:
        """Keep both for a message."""
        self.part, self.rows = part, rows


def pack(parts: Sequence[Part], spare: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Copy parts into one block per dtype and width, as rows one below the other.

    Parts of one buffer with as many rows follow each other in the order of their targets.

    Args:
        parts: What to copy; only read.
        spare: Memory that may be overwritten and kept; what is used is taken out.

    Returns:
        The rows of each part in the dtype of its buffer, and the blocks that hold them: pinned
        where a GPU shall read them beside what the host does.

    Raises:
        NotFiniteError: A value is not finite, in its own dtype or in that of the buffer.
    """
    groups: dict[tuple[torch.dtype, int], list[int]] = defaultdict(list)
    for index, part in enumerate(parts):
        groups[part.dtype, part.rows.shape[1]].append(index)
    views: list[Tensor] = [torch.empty(0)] * len(parts)
    blocks = []
    runs: list[_Run] = []
    for (dtype, width), indices in groups.items():
        # What goes into buffers that lie side by side can be written in one copy.
        indices.sort(key=lambda index: _place(parts[index]))
        own = [parts[index] for index in indices]
        counts = [part.rows.shape[0] for part in own]
        pinned = any(part.device.type == "cuda" for part in own)
        block = _memory(sum(counts) * width, dtype, spare, pinned=pinned)
        blocks.append(block)
        rows = block.view(sum(counts), width)
        for index, view in zip(indices, torch.split(rows, counts), strict=True):
            views[index] = view
        runs += _runs(own, rows)
    if not all(for_each(_fill_run, runs, sum(run.rows.nbytes for run in runs))):
        raise NotFiniteError(
            *next(
                (part, view)
                for part, view in zip(parts, views, strict=True)
                if not torch.isfinite(view).all()
            )
        )
    return views, blocks


def _place(part: Part) -> tuple[str, int, int]:
    """What the order in a block goes by."""
    return part.buffer, part.rows.shape[0], part.target


@dataclass(frozen=True, eq=False)
class _Run:
    """Parts that lie one below the other, ``rows [rows, width]`` all together."""

    parts: Sequence[Part]
    rows: Tensor


def _runs(parts: Sequence[Part], rows: Tensor) -> Iterator[_Run]:
    """Cut the parts of one block into runs of some size, as far as whole parts make that."""
    some: list[Part] = []
    start = stop = 0
    least = -(-_RUN // max(rows.shape[1] * rows.itemsize, 1))  # layers may have no inputs
    for part in parts:
        some.append(part)
        stop += part.rows.shape[0]
        if stop - start >= least:
            yield _Run(some, rows[start:stop])
            some, start = [], stop
    if some:
        yield _Run(some, rows[start:stop])


def _memory(numel: int, dtype: torch.dtype, spare: list[Tensor], *, pinned: bool) -> Tensor:
    """Host memory for ``numel`` elements, taken out of ``spare`` where that has just this size.

    Fresh pages cost several times what copying into them does.
    """
    for position, block in enumerate(spare):
        if block.dtype == dtype and block.numel() == numel:
            return spare.pop(position)
    return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pinned)


def _fill_run(run: _Run) -> bool:
    """Copy parts into their rows. Returns whether every value is finite after that."""
    bits = as_bits(run.rows)
    assert bits is not None
    stop = 0
    # Autograd's mode is a thread's own.
    with torch.no_grad():
        for part in run.parts:
            source = part.rows
            start, stop = stop, stop + source.shape[0]
            source_bits = as_bits(source) if part.dtype == source.dtype else None
            if source_bits is None:
                run.rows[start:stop].copy_(source)
            else:
                # numpy copies faster than torch, and waits for no other thread.
                _copy_rows(bits[start:stop], source_bits)
    return _all_finite(run.rows.dtype, bits)


def _copy_rows(own: NDArray[Any], source: NDArray[Any]) -> None:
    """``own[:] = source``. ``lora_B`` is transposed here, once.

    Of many 16-bit numbers, four are moved at a time, which takes two thirds of the time.
    """
    rows, width = own.shape
    wide = own.itemsize == 2 and rows >= _WORTH_WIDE and rows % 4 == 0
    if not (wide and source.T.flags.c_contiguous):
        np.copyto(own, source)
        return
    fours = np.ascontiguousarray(source.T.view(np.int64).T).view(np.int16)
    np.copyto(own.reshape(-1, 4, width), fours.reshape(-1, width, 4).transpose(0, 2, 1))


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
