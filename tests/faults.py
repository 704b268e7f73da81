"""Faults in the middle of a write: in torch's operations, and in numpy's copies into buffers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from toys import slot_buffers

from lora_slots.bank import buffers

_local = threading.local()


class Fault(TorchDispatchMode):
    """Raises in the n-th operation of this thread; one on a list has done half of it by then.

    Args:
        at: Which operation, from 0; -1: none, they are only counted.
        error: What to raise.
        only: Counts only operations on lists that write into this model's slots.
    """

    def __init__(
        self, at: int = -1, error: BaseException | None = None, only: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.at = at
        self.error = error
        self.operations = 0
        slots = {} if only is None else slot_buffers(only)
        self.memory = None if only is None else [_extent(buffer) for buffer in slots.values()]

    def __enter__(self) -> Self:
        self.outer = getattr(_local, "fault", None)
        _local.fault = self
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        _local.fault = self.outer
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        lists = args if "_foreach_" in str(func) else ()
        written = [tensor.data_ptr() for tensor in lists[0]] if lists else []
        return self.run(lambda *args: func(*args, **(kwargs or {})), args, written, bool(lists))

    def run(
        self, func: Callable[..., Any], args: Sequence[Any], written: list[int], on_lists: bool
    ) -> Any:
        """Do it, unless it is the n-th that counts."""
        if self.memory is not None and not any(
            start <= pointer < stop for pointer in written for start, stop in self.memory
        ):
            return func(*args)
        self.operations += 1
        if self.operations - 1 == self.at:
            if on_lists and (halves := _halves(args)):
                func(*halves)
            assert self.error is not None
            raise self.error
        return func(*args)


def _halves(args: Sequence[Any]) -> list[Any]:
    """The first half of each list; of an array that is alone in it, half of its buffers."""
    half = len(args[0]) // 2
    if half:
        return [a[:half] if isinstance(a, list | tuple) else a for a in args]
    if not isinstance(args[0][0], np.ndarray):
        return []
    return [[array[: len(array) // 2]] for (array,) in args]


def _extent(buffer: Tensor) -> tuple[int, int]:
    start = buffer.data_ptr()
    return start, start + buffer.nbytes


def _watched(func: Callable[..., None]) -> Callable[..., None]:
    def watched(*lists: Any) -> None:
        fault = getattr(_local, "fault", None)
        if fault is None or not lists[0]:
            func(*lists)
        else:
            fault.run(func, lists, [array.ctypes.data for array in lists[0]], True)

    return watched


buffers.copy_bits = _watched(buffers.copy_bits)
buffers.zero_bits = _watched(buffers.zero_bits)
