"""Copy many tensors into few blocks of host memory, rank-major, and see that they are finite."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# The integers that floating-point numbers of each size are copied and looked at as.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# The bits of the exponent of each dtype, which are all set in infinity and NaN.
_EXPONENT = {
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}
# Below this many bytes a tensor, starting threads costs more than they save.
_WORTH_THREADS = 100_000
# From this many rows on, transposing 16-bit numbers by fours is faster than one by one.
_WORTH_WIDE = 32


@dataclass(frozen=True, eq=False)
class Part:
    """Rows on their way into a buffer.

    Attributes:
        target: The index of the target module.
        buffer: The name of the buffer.
        dtype: The dtype of the buffer.
        rows: ``[rows, width]``, strided in any way, of any dtype.
    """

    target: int
    buffer: str
    dtype: torch.dtype
    rows: Tensor


class NotFiniteError(Exception):
    """A part has values that are not finite after the copy into ``rows``."""

    def __init__(self, part: Part, rows: Tensor) -> None:
        """Keep both for a message."""
        self.part, self.rows = part, rows


def pack(parts: Sequence[Part], spare: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Copy parts into one block per dtype and width, as rows one below the other.

    Args:
        parts: What to copy; only read.
        spare: Memory that may be overwritten and kept; what is used is taken out.

    Returns:
        The rows of each part in the dtype of its buffer, and the blocks that hold them.

    Raises:
        NotFiniteError: A value is not finite, in its own dtype or in that of the buffer.
    """
    groups: dict[tuple[torch.dtype, int], list[int]] = defaultdict(list)
    for index, part in enumerate(parts):
        groups[part.dtype, part.rows.shape[1]].append(index)
    views: list[Tensor] = [torch.empty(0)] * len(parts)
    bits: list[NDArray[Any]] = [np.empty(0)] * len(parts)
    blocks = []
    for (dtype, width), indices in groups.items():
        counts = [parts[index].rows.shape[0] for index in indices]
        block = _memory(sum(counts) * width, dtype, spare)
        blocks.append(block)
        whole = block.view(_BITS[dtype.itemsize]).numpy().reshape(-1, width)
        rows = torch.split(block.view(-1, width), counts)
        ends = list(itertools.accumulate(counts))
        for index, view, end in zip(indices, rows, ends, strict=True):
            views[index], bits[index] = view, whole[end - view.shape[0] : end]
    if not _fill(views, bits, parts):
        raise NotFiniteError(
            *next(
                (part, view)
                for part, view in zip(parts, views, strict=True)
                if not torch.isfinite(view).all()
            )
        )
    return views, blocks


def _memory(numel: int, dtype: torch.dtype, spare: list[Tensor]) -> Tensor:
    """Host memory for ``numel`` elements, taken out of ``spare`` where that has just this size.

    Fresh pages cost several times what copying into them does.
    """
    for position, block in enumerate(spare):
        if block.dtype == dtype and block.numel() == numel:
            return spare.pop(position)
    return torch.empty(numel, dtype=dtype, device="cpu")


def _fill(views: Sequence[Tensor], bits: Sequence[NDArray[Any]], parts: Sequence[Part]) -> bool:
    """Copy every part into its rows, in as many threads as torch uses where that pays.

    Args:
        views: Where the rows go.
        bits: The same memory as integers of the same size.
        parts: What goes there.

    Returns:
        Whether every value is finite after the copy.
    """
    workers = torch.get_num_threads()
    if workers == 1 or sum(each.nbytes for each in bits) < _WORTH_THREADS * len(bits):
        return _fill_some(views, bits, parts)
    with ThreadPoolExecutor(workers) as pool:
        shares = [
            (views[first::workers], bits[first::workers], parts[first::workers])
            for first in range(workers)
        ]
        return all(pool.map(lambda share: _fill_some(*share), shares))


def _fill_some(
    views: Sequence[Tensor], bits: Sequence[NDArray[Any]], parts: Sequence[Part]
) -> bool:
    finite = True
    # Autograd's mode is a thread's own.
    with torch.no_grad():
        for view, own, part in zip(views, bits, parts, strict=True):
            source = part.rows
            if part.dtype == source.dtype and source.is_cpu:
                # numpy copies faster than torch, and waits for no other thread.
                _copy_rows(own, source.view(_BITS[source.itemsize]).numpy())
            else:
                view.copy_(source)
            finite = finite and _all_finite(part.dtype, own)
    return finite


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
