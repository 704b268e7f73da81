"""What slots, a load, and thousands of swaps take of memory."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import psutil
import torch

from benchmarks.figures import OURS, Figure
from benchmarks.graphs import counting_graphs
from benchmarks.harness import Harness, bar
from benchmarks.models import (
    Model,
    base_weights,
    check_equal,
    compiled,
    write_adapter,
    write_pair,
)
from lora_slots import SlotManager

MAX_RANK = 64
NUM_SLOTS = 2
ADAPTERS = 20
RUN_EVERY = 25
_MB = 1e6


def run(harness: Harness) -> Iterator[Figure]:
    """Buffers, the peak of a load, and growth."""
    yield buffers_and_peak(harness)
    yield growth(harness)


def buffers_and_peak(harness: Harness) -> Figure:
    """The size of the buffers against what their rows need, and the peak of a hotswap."""
    shape = harness.large
    model = Model(base_weights(shape, harness.device, alike=True)).eval()
    manager = SlotManager(model, max_rank=MAX_RANK, num_slots=NUM_SLOTS)
    pair = write_pair(harness.root / "peak", shape, MAX_RANK)
    for path in (*pair, *pair):
        manager.load(path)
    with peak_of_memory(harness.device) as peak:
        report = manager.load(pair[0])
    rows = NUM_SLOTS * MAX_RANK
    needed = sum(rows * sum(sizes) for sizes in shape.linears.values()) * shape.layers
    buffers = dict(model.named_buffers())
    held = sum(b.numel() for name, b in buffers.items() if name.endswith(("lora_A", "lora_B")))
    steering = sum(b.nbytes for b in buffers.values()) - held * shape.dtype.itemsize
    notes = {
        "elements of lora_A and lora_B, of R * (in + out)": held / needed,
        "bytes of all other buffers, of lora_A and lora_B": steering
        / (held * shape.dtype.itemsize),
        "MB of the adapter": report.nbytes / _MB,
        "peak of a hotswap from disk, of the adapter": peak.resident / report.nbytes,
        "the same without the pages of its file": peak.anonymous / report.nbytes,
    }
    if harness.device.type == "cuda":
        notes["peak of a hotswap on the GPU, of the adapter"] = peak.device / report.nbytes
    return Figure(f"memory, rank {MAX_RANK}, {NUM_SLOTS} slots", notes=notes)


def growth(harness: Harness) -> Figure:
    """Random swaps over 20 adapters from disk, with a forward now and then."""
    shape = replace(harness.forward, layers=min(2, harness.forward.layers))
    choose = random.Random(0)
    files = [
        write_adapter(harness.root / f"growth{n}", shape, choose.choice((4, 8, 16, 32)), n)
        for n in bar(range(ADAPTERS), "adapters")
    ]
    model = Model(base_weights(shape, harness.device)).eval()
    manager = SlotManager(model, max_rank=MAX_RANK)
    forward = compiled(model, harness.device, backend=harness.backend)
    x = harness.input(shape, 1)
    manager.load(files[0])
    process = psutil.Process()
    resident, times = [], []
    with torch.no_grad():
        first = [forward(x).clone() for _ in range(3)][-1]
        with counting_graphs() as counts:
            for swap in bar(range(harness.swaps), "swaps"):
                path = choose.choice(files)
                times.append(harness.clock.milliseconds(lambda path=path: manager.load(path)))
                if swap % RUN_EVERY == 0:
                    forward(x)
                    resident.append(process.memory_info().rss)
    manager.load(files[0])
    check_equal([lambda _: first, model], x)
    tenth = max(len(times) // 10, 1)
    notes = {
        "MB resident after a tenth": resident[len(resident) // 10] / _MB,
        "MB resident at the end": resident[-1] / _MB,
        **counts.notes(harness.device),
    }
    tenths = {OURS: times[-tenth:], f"{OURS}, first tenth": times[:tenth]}
    return Figure.of(f"{harness.swaps} swaps from disk, ranks 4 to 32", tenths, notes=notes)


@dataclass
class Peak:
    """How many bytes more than at the begin there were at a time.

    Attributes:
        resident: Of the process, pages of files included.
        anonymous: Of the process, without those.
        device: Of the GPU's allocator; 0 on a CPU.
    """

    resident: int = 0
    anonymous: int = 0
    device: int = 0


@contextmanager
def peak_of_memory(device: torch.device) -> Iterator[Peak]:
    """Look at this process every fifth of a millisecond in the body."""
    process, peak, done = psutil.Process(), Peak(), threading.Event()
    before = process.memory_info()

    def watch() -> None:
        while not done.is_set():
            now = process.memory_info()
            peak.resident = max(peak.resident, now.rss - before.rss)
            anonymous = (now.rss - now.shared) - (before.rss - before.shared)
            peak.anonymous = max(peak.anonymous, anonymous)
            time.sleep(2e-4)

    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    allocated = torch.cuda.memory_allocated(device) if on_gpu else 0
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()
        if on_gpu:
            peak.device = torch.cuda.max_memory_allocated(device) - allocated
