"""Copies of much memory: shared among threads, or sent to a device at once."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch
from torch import Tensor

# Below this many bytes, starting threads costs more than they save.
_WORTH_THREADS = 40_000_000
_TURNS = 8
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def for_each(
    func: Callable[[_Item], _Result], items: Sequence[_Item], nbytes: int
) -> list[_Result]:
    """``func`` of every item, in as many threads as torch uses if it is much.

    Args:
        func: What to do. numpy lets other threads run while it copies.
        items: To what.
        nbytes: How much memory that is all together.
    """
    workers = min(torch.get_num_threads(), len(items))
    if workers < 2 or nbytes < _WORTH_THREADS:
        return [func(item) for item in items]
    # Few turns each: to hand out hundreds of items takes as long as tens of megabytes do.
    size = -(-len(items) // (workers * _TURNS))
    turns = [items[first : first + size] for first in range(0, len(items), size)]
    done: list[list[_Result]] = [[] for _ in turns]
    rest = iter(range(len(turns)))  # one at a time takes from it: the one with the GIL

    def take_turns() -> None:
        for turn in rest:
            done[turn] = [func(item) for item in turns[turn]]

    others = [_helpers().submit(take_turns) for _ in range(workers - 1)]
    try:
        take_turns()
    finally:
        wait(others)
    for other in others:
        other.result()
    return list(itertools.chain.from_iterable(done))


@functools.cache
def _helpers() -> ThreadPoolExecutor:
    """Threads that stay, since to start some takes milliseconds when caches are cold."""
    return ThreadPoolExecutor(max(torch.get_num_threads() - 1, 1), "lora_slots")


# A forked process has none of them.
os.register_at_fork(after_in_child=_helpers.cache_clear)


def sent(rows: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors as they are on a device: what shares memory on the host is sent there in one copy.

    From pinned memory the host does not wait for that.
    """
    blocks: dict[tuple[int, torch.dtype], Tensor] = {}
    there = []
    for row in rows:
        storage = row.untyped_storage()
        key = storage.data_ptr(), row.dtype
        if key not in blocks:
            whole = torch.empty(0, dtype=row.dtype, device=row.device).set_(storage)
            blocks[key] = whole.to(device, non_blocking=True)
        there.append(blocks[key].as_strided(row.shape, row.stride(), row.storage_offset()))
    return there


def overwrite(into: Tensor, table: Tensor) -> Tensor:
    """``into.copy_(table)`` from the host, without waiting for the device."""
    return into.copy_(table.pin_memory() if into.is_cuda else table, non_blocking=True)
