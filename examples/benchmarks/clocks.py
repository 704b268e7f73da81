"""How long something takes: on a CPU by its own clock, on a GPU by events in its stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Times work on one kind of device."""

    def milliseconds(self, run: Callable[[], object]) -> float:
        """How long ``run`` takes, until all that it asked for is done."""
        ...


class CpuClock:
    """Work on a CPU is done when the call returns."""

    def milliseconds(self, run: Callable[[], object]) -> float:
        """How long ``run`` takes."""
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e3


class CudaClock:
    """Work on a GPU goes on after the call returns.

    The span between two events holds what Python takes as well: the first event passes at once,
    since the GPU is idle, and the second only after everything in between was issued and done.

    Args:
        cuda: `torch.cuda`, or what stands in for it in a test.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        """Use the current device and stream of ``cuda``."""
        self._cuda = cuda

    def milliseconds(self, run: Callable[[], object]) -> float:
        """How long ``run`` takes, until the GPU has done what it was asked for."""
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        self._cuda.synchronize()
        start.record()
        run()
        end.record()
        self._cuda.synchronize()
        return float(start.elapsed_time(end))


def clock_for(device: torch.device) -> Clock:
    """The clock that suits ``device``."""
    return CudaClock() if device.type == "cuda" else CpuClock()


def device_for(choice: str) -> torch.device:
    """The device that ``choice`` means: ``"auto"``, or what `torch.device` takes."""
    if choice == "auto":
        choice = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(choice)
