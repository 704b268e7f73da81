"""`load` against PEFT's `hotswap_adapter` and against copying the adapter's bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from peft import PeftModel
from peft.utils.hotswap import hotswap_adapter

from benchmarks.figures import OURS, Figure
from benchmarks.harness import Harness, Run, alternating, bar
from benchmarks.models import (
    Model,
    Shape,
    Weights,
    base_weights,
    change_header,
    check_equal,
    peft_model,
    write_adapter,
    write_pair,
)
from lora_slots import SlotManager

CACHE = 8 << 30
COPY = "memcpy of its bytes"
HOTSWAP = "PEFT hotswap_adapter"
UNSEEN = f"{OURS}, a header not seen before"
KEPT = f"{OURS}, and kept in the cache"
RANKS = (4, 8, 16, 32, 64, 128, 256)
SINGLE_LOADS = 64


def run(harness: Harness) -> Iterator[Figure]:
    """Every swap that the documentation has a figure of."""
    weights = base_weights(harness.large, harness.device, alike=True)
    yield from against_peft(harness, weights)
    yield from by_rank(harness, weights)
    yield from by_size_of_slots(harness, weights)
    yield many(harness)


def hotswap(model: PeftModel, harness: Harness, paths: list[Path]) -> Run:
    """PEFT's swap to the next of ``paths``."""
    device = str(harness.device)
    return alternating(
        lambda path: hotswap_adapter(model, str(path), "default", torch_device=device), paths
    )


def unseen(load: Callable[[Path], object], paths: list[Path]) -> Run:
    """Loads of files that no other file has the header of: nothing is known of them."""
    numbers = itertools.count(1)

    def load_unseen(path: Path) -> None:
        change_header(path, next(numbers))
        load(path)

    return alternating(load_unseen, paths)


def against_peft(harness: Harness, weights: Weights) -> Iterator[Figure]:
    """`load` from disk and from the cache, at rank 8 and 64."""
    shape = harness.large
    files = {rank: write_pair(harness.root / "swap", shape, rank) for rank in (8, 64)}
    theirs = peft_model(Model(weights), files[64][0], harness.device, padded_to=64)
    disk_model, cache_model = Model(weights).eval(), Model(weights).eval()
    disk = SlotManager(disk_model, max_rank=64)
    cache = SlotManager(cache_model, max_rank=64, cache_bytes=CACHE)
    x = harness.input(shape, 1)
    for rank, pair in files.items():
        own = write_pair(harness.root / "unseen", shape, rank)
        nbytes = cache.check(pair[0]).nbytes
        # With room for one of the two, so that every load reads, and keeps what it has read.
        kept_model = Model(weights).eval()
        kept = SlotManager(kept_model, max_rank=64, cache_bytes=nbytes)
        swaps = {
            OURS: alternating(disk.load, pair),
            UNSEEN: unseen(disk.load, own),
            KEPT: alternating(kept.load, pair),
            HOTSWAP: hotswap(theirs, harness, pair),
        }
        cached = alternating(cache.load, pair)
        for _ in pair:
            for swap in (*swaps.values(), cached):
                swap()
            check_equal([theirs, disk_model, cache_model, kept_model], x)
        yield harness.compare(f"load from disk, rank {rank}", swaps)
        _remove(own)
        swaps = {OURS: cached, HOTSWAP: swaps[HOTSWAP], COPY: harness.copy_of(nbytes)}
        yield harness.compare(f"load from the cache, rank {rank}", swaps)


def by_rank(harness: Harness, weights: Weights) -> Iterator[Figure]:
    """A cached load at every rank: its cost grows as the bytes do."""
    model = Model(weights).eval()
    manager = SlotManager(model, max_rank=max(RANKS), cache_bytes=CACHE)
    for rank in RANKS:
        pair = write_pair(harness.root / "ranks", harness.large, rank)
        yield _cached(harness, manager, model, pair, f"cached load, rank {rank}", "rank", rank)
        _remove(pair)


def by_size_of_slots(harness: Harness, weights: Weights) -> Iterator[Figure]:
    """A cached load at rank 8 into slots of several sizes and numbers: its cost stays."""
    pair = write_pair(harness.root / "sizes", harness.large, 8)
    for max_rank in (8, 64, 256):
        model = Model(weights).eval()
        manager = SlotManager(model, max_rank=max_rank, cache_bytes=CACHE)
        what = f"cached load, rank 8, max_rank {max_rank}"
        yield _cached(harness, manager, model, pair, what, "max_rank", max_rank)
    for num_slots in (1, 4, 16):
        model = Model(weights).eval()
        manager = SlotManager(model, max_rank=16, num_slots=num_slots, cache_bytes=CACHE)
        what = f"cached load, rank 8, {num_slots} slots"
        yield _cached(harness, manager, model, pair, what, "num_slots", num_slots)


def _cached(
    harness: Harness,
    manager: SlotManager,
    model: Model,
    pair: list[Path],
    what: str,
    curve: str,
    at: float,
) -> Figure:
    """A cached load beside a copy of its bytes; the output is that of the load from disk."""
    x = harness.input(harness.large, 1)
    outputs = [(manager.load(path), model(x))[1].clone() for path in pair]
    load = alternating(manager.load, pair)
    figure = harness.compare(
        what, {OURS: load, COPY: harness.copy_of(manager.check(pair[0]).nbytes)}, curve=curve, at=at
    )
    for path, output in zip(pair, outputs, strict=True):
        assert manager.load(path).cached
        check_equal([lambda _, output=output: output, model], x)
    return figure


def _remove(pair: list[Path]) -> None:
    for folder in pair:
        for file in folder.iterdir():
            file.unlink()


def many(harness: Harness) -> Figure:
    """64 loads in a row into as many slots, against 64 into one."""
    large = harness.large
    shape = Shape(min(4, large.layers), large.hidden, large.mlp, large.dtype)
    numbers = range(SINGLE_LOADS)
    files = [
        write_adapter(harness.root / f"many-{n}", shape, 8, n) for n in bar(numbers, "adapters")
    ]
    weights = base_weights(shape, harness.device, alike=True)
    one_model, all_model = Model(weights).eval(), Model(weights).eval()
    one = SlotManager(one_model, max_rank=8)
    all_ = SlotManager(all_model, max_rank=8, num_slots=SINGLE_LOADS)

    def into_one() -> None:
        for path in bar(files, "loads"):
            one.load(path)

    def into_all() -> None:
        for number, path in enumerate(bar(files, "loads")):
            all_.load(path, str(number))

    what = f"{SINGLE_LOADS} loads from disk in a row, rank 8"
    name = f"{OURS}, one slot"
    figure = harness.compare(what, {OURS: into_all, name: into_one}, rounds=3)
    check_equal([one_model, all_model], harness.input(shape, 1))
    return figure
