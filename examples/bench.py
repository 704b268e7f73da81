"""Measure lora_slots beside PEFT and the physical limit, in one process, on the same files.

    python examples/bench.py [swap] [switch] [forward] [route] [memory] [startup] [ADAPTERS ...]
                             [--device auto] [--rounds N] [--swaps N]
                             [--json FILE] [--plot FILE] [--table FILE]

Swaps are measured on the shape of a 1.4B model: 28 layers of 7 linears, hidden size 2048, bfloat16;
or on your own adapters, in linears of their sizes. Every figure is the median of interleaved runs,
files are in the page cache, and outputs are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from benchmarks import forward, memory, own, plot, route, startup, swap, switch
from benchmarks.clocks import clock_for, device_for
from benchmarks.figures import Figure, environment, markdown_of, table_of
from benchmarks.harness import Harness
from benchmarks.models import Shape
from rich.console import Console

LARGE = Shape(layers=28, hidden=2048, mlp=5504, dtype=torch.bfloat16)
# bfloat16 products are emulated on many CPUs, where they would hide what is measured here.
FORWARD = Shape(layers=4, hidden=1024, mlp=2752, dtype=torch.float32)
ROUTE = Shape(layers=6, hidden=768, mlp=2048, dtype=torch.float32)
PARTS = {
    "swap": swap.run,
    "switch": switch.run,
    "forward": forward.run,
    "route": route.run,
    "memory": memory.run,
    "startup": startup.run,
}
console = Console(width=max(Console().width, 120))


def measure(parts: Sequence[str], adapters: Sequence[Path], harness: Harness) -> Iterator[Figure]:
    """All figures of ``parts``; of ``adapters``, if there are any."""
    for part in parts:
        console.print(f"[bold]{part}")
        # What one part compiled must not slow another down.
        torch._dynamo.reset()
        yield from PARTS[part](harness)
    if adapters:
        yield from own.run(harness, adapters)


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", help=f"{', '.join(PARTS)}, or paths of adapters")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--json", type=Path, default=Path(".cache/bench.json"))
    parser.add_argument("--plot", type=Path, help="write a picture (needs matplotlib)")
    parser.add_argument("--table", type=Path, help="write a table in Markdown")
    parser.add_argument("--layers", type=int, help="another number of layers")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--swaps", type=int, default=10_000, help="of the part memory")
    return parser.parse_args()


def main() -> None:
    """Measure what was asked for, print a table, and write the files."""
    options = arguments()
    adapters = [Path(word) for word in options.what if word not in PARTS]
    parts = [word for word in options.what if word in PARTS]
    if adapters:
        # "swap my/adapters": the user's own stand in for ours.
        parts = [part for part in parts if part != "swap"]
    elif not parts:
        parts = list(PARTS)
    device = device_for(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    large, small, routed = (
        replace(shape, layers=options.layers or shape.layers) for shape in (LARGE, FORWARD, ROUTE)
    )
    warnings.filterwarnings("ignore", category=FutureWarning)
    with tempfile.TemporaryDirectory() as root:
        harness = Harness(
            device, clock_for(device), Path(root), options.rounds, options.swaps,
            large, small, routed,
        )  # fmt: skip
        figures = list(measure(parts, adapters, harness))
    where = environment(device)
    console.print(table_of(figures))
    result = {"environment": where, "figures": [asdict(figure) for figure in figures]}
    _write(options.json, json.dumps(result, indent=1) + "\n")
    if options.table:
        _write(options.table, markdown_of(figures, where))
    if options.plot:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        plot.plot(figures, options.plot, f"{where['processor']}, {where['device']}")
        console.print(f"written to {options.plot}")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()
