"""Buffers have no element too many, and a load needs at most twice the adapter beside them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.models import Model, Shape, base_weights, write_adapter
from torch import nn

from lora_slots import SlotManager

WIDE = Shape(layers=8, hidden=1024, mlp=2752, dtype=torch.float32)
RANK = 64

# A process of its own, whose high-water mark nothing else raised.
LOAD = """
import sys
from pathlib import Path
import psutil, torch
from benchmarks.models import Model, Shape, base_weights
from lora_slots import SlotManager

def mark():
    # Not getrusage's, which begins with the parent's.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

torch.set_num_threads(1)
small, large, extra = sys.argv[1], sys.argv[2], int(sys.argv[3])
shape = Shape(layers=8, hidden=1024, mlp=2752, dtype=torch.float32)
model = Model(base_weights(shape, torch.device("cpu"), alike=True))
manager = SlotManager(model, max_rank=64)
manager.load(small)  # imports what loading needs
before = psutil.Process().memory_info().rss
assert mark() < before + 40e6, (mark(), before)
if extra:
    copies = [torch.ones(extra, dtype=torch.uint8)]
report = manager.load(large)
print(mark() - before, report.nbytes)
"""


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [write_adapter(root / str(rank), WIDE, rank, rank) for rank in (1, RANK)]


def test_the_peak_of_a_load_is_at_most_twice_the_adapter(adapters):
    """Of the slots' own memory all is there before."""
    peak, nbytes = peak_of_load(adapters)
    assert nbytes > 30e6
    assert 0.9 * nbytes < peak < 2 * nbytes + 4e6, (peak, nbytes)


def test_the_peak_shows_a_copy_too_many(adapters):
    peak, nbytes = peak_of_load(adapters, extra=int(120e6))
    assert peak > 2.5 * nbytes


def peak_of_load(adapters: list[Path], extra: int = 0) -> tuple[int, int]:
    """How far a load raises the high-water mark of its process, and the adapter's bytes."""
    examples = Path(__file__).parents[1] / "examples"
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *map(str, adapters), str(extra)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": f"{examples}:{examples.parent}"},
    )
    peak, nbytes = done.stdout.split()
    return int(peak), int(nbytes)


@pytest.mark.parametrize(("max_rank", "num_slots"), [(1, 1), (7, 3), (64, 2)])
def test_buffers_have_the_elements_of_their_rows_and_scaling(max_rank, num_slots):
    shape = Shape(layers=2, hidden=24, mlp=40, dtype=torch.bfloat16)
    model = Model(base_weights(shape, torch.device("cpu")))
    before = {name for name, _ in model.named_buffers()}
    SlotManager(model, max_rank=max_rank, num_slots=num_slots)
    rows = max_rank * num_slots
    for layer in model.layers:
        for name, (inputs, outputs) in shape.linears.items():
            slots = layer.get_submodule(name).lora_slots
            sizes = {n: (b.numel(), b.dtype) for n, b in slots.named_buffers(recurse=False)}
            assert sizes == {
                "lora_A": (rows * inputs, torch.bfloat16),
                "lora_B": (rows * outputs, torch.bfloat16),
                "scaling": (rows, torch.float32),
            }
    added = {name: b.numel() for name, b in model.named_buffers() if name not in before}
    shared = {name: n for name, n in added.items() if ".mix." in name}
    assert sorted(shared.values()) == sorted([rows, rows, num_slots])
    assert len(added) - len(shared) == 3 * 2 * len(shape.linears)
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
