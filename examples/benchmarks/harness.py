"""Interleaved timing: every contender in turn, many times, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.clocks import Clock
from benchmarks.figures import Figure
from benchmarks.models import Shape

_WARM_UP = 2
Run = Callable[[], object]


@dataclass(frozen=True)
class Harness:
    """What all parts measure with.

    Attributes:
        device: Where the models are.
        clock: What times.
        root: A folder for adapters.
        rounds: How often every contender runs.
        swaps: How many swaps have to leave memory as it was.
        large: The shape that swaps are measured on.
        forward: The shape that forwards are measured on.
        route: The shape that mixed batches are measured on.
        backend: Of `torch.compile`.
    """

    device: torch.device
    clock: Clock
    root: Path
    rounds: int
    swaps: int
    large: Shape
    forward: Shape
    route: Shape
    backend: str = "inductor"

    def compare(
        self,
        what: str,
        runs: Mapping[str, Run],
        *,
        rounds: int | None = None,
        curve: str = "",
        at: float = 0,
    ) -> Figure:
        """Time all in turn, ``rounds`` times, after two rounds that do not count."""
        times: dict[str, list[float]] = {name: [] for name in runs}
        for number in bar(range((rounds or self.rounds) + _WARM_UP), what):
            for name, run in runs.items():
                elapsed = self.clock.milliseconds(run)
                if number >= _WARM_UP:
                    times[name].append(elapsed)
        return Figure.of(what, times, curve=curve, at=at)

    def input(self, shape: Shape, *leading: int) -> Tensor:
        """Random ``[*leading, hidden]``."""
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(*leading, shape.hidden, generator=generator)
        return x.to(self.device, shape.dtype)

    def copy_of(self, nbytes: int) -> Run:
        """Copy as many bytes from the host to the device: what no swap can do without.

        From two places in turn, as two adapters lie in two places; page-locked for a GPU.
        """
        pinned = self.device.type == "cuda"
        sources = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        target = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        return alternating(lambda source: target.copy_(source, non_blocking=pinned), sources)


def bar(items: Iterable[Any], what: str) -> Iterable[Any]:
    """``items``, with progress shown."""
    return tqdm(items, what, leave=False)


def alternating(run: Callable[..., object], over: Sequence[object]) -> Run:
    """Call ``run`` with the next of ``over`` each time."""
    turns = cycle(over)
    return lambda: run(next(turns))


def calls(models: Mapping[str, Callable[[Tensor], Tensor]], x: Tensor) -> dict[str, Run]:
    """One forward of each."""
    return {name: (lambda model=model: model(x)) for name, model in models.items()}
