"""A forward of one token, for several ranks in use, against PEFT's and the base model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import torch
from peft.utils.hotswap import hotswap_adapter
from torch import Tensor

from benchmarks.figures import OURS, Figure
from benchmarks.graphs import counting_graphs
from benchmarks.harness import Harness, bar, calls
from benchmarks.models import (
    Model,
    Weights,
    base_weights,
    check_equal,
    compiled,
    peft_model,
    write_adapter,
)
from lora_slots import SlotManager

ROWS = 128
RANKS = (8, 32, 64, 128)
WHOLE = "lora_slots, no rank_buckets"


def run(harness: Harness) -> Iterator[Figure]:
    """Compiled at every rank, and eagerly at one."""
    shape, device = harness.forward, harness.device
    weights = base_weights(shape, device)
    x = harness.input(shape, 1)
    paths = {
        rank: write_adapter(harness.root / f"forward{rank}", shape, rank, rank) for rank in RANKS
    }
    with torch.no_grad():
        yield from by_rank(harness, weights, paths, x)
        yield eagerly(harness, weights, paths[8], x)


def by_rank(
    harness: Harness, weights: Weights, paths: dict[int, Path], x: Tensor
) -> Iterator[Figure]:
    """Compiled models whose slots, and whose PEFT layers, have 128 rows."""
    device = harness.device
    base, whole, low = (Model(weights).eval() for _ in range(3))
    one = SlotManager(whole, max_rank=ROWS)
    buckets = SlotManager(low, max_rank=ROWS, rank_buckets="auto")
    padded = peft_model(Model(weights), paths[ROWS], device, padded_to=ROWS)
    exact = {rank: peft_model(Model(weights), path, device) for rank, path in paths.items()}
    models = {OURS: low, WHOLE: whole, "base model": base, "PEFT padded": padded}
    runs = {
        name: compiled(model, device, backend=harness.backend) for name, model in models.items()
    }
    unpadded = {
        rank: compiled(model, device, backend=harness.backend) for rank, model in exact.items()
    }
    buckets.warmup(lambda: runs[OURS](x))
    for run in bar([*runs.values(), *unpadded.values()], "compiling"):
        # On a GPU the first call warms up, and the second records.
        for _ in range(2):
            run(x)
    check_equal([runs["base model"], runs[OURS], runs[WHOLE]], x)
    rounds = 4 * harness.rounds
    base_only = {name: run for name, run in runs.items() if name != "PEFT padded"}
    yield harness.compare(
        "forward, nothing loaded", calls(base_only, x), rounds=rounds, curve="rank in use", at=0
    )
    for rank, path in paths.items():
        hotswap_adapter(padded, str(path), "default", torch_device=str(device))
        one.load(path)
        buckets.load(path)
        rivals = runs | {"PEFT at its rank": unpadded[rank]}
        check_equal([run for name, run in rivals.items() if name != "base model"], x)
        what = f"forward, rank {rank} of {ROWS}"
        yield harness.compare(what, calls(rivals, x), rounds=rounds, curve="rank in use", at=rank)
    yield swapped(harness, buckets, runs[OURS], paths, x)


def swapped(
    harness: Harness,
    manager: SlotManager,
    run: Callable[[Tensor], Tensor],
    paths: dict[int, Path],
    x: Tensor,
) -> Figure:
    """A forward right after a swap to another rank, and the graphs that swaps cost: none."""
    turns = cycle(paths.values())

    def swap_and_run() -> None:
        manager.load(next(turns))
        run(x)

    with counting_graphs() as counts:
        figure = harness.compare("load from disk, then forward", {OURS: swap_and_run})
    return replace(figure, notes=counts.notes(harness.device))


def eagerly(harness: Harness, weights: Weights, path: Path, x: Tensor) -> Figure:
    """Without compiling: one adapter active, slots of its rank."""
    ours = Model(weights).eval()
    theirs = peft_model(Model(weights), path, harness.device)
    SlotManager(ours, max_rank=8).load(path)
    check_equal([theirs, ours], x)
    runs = calls({OURS: ours, "PEFT at its rank": theirs}, x)
    return harness.compare("eager forward, rank 8", runs, rounds=4 * harness.rounds)
