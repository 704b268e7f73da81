"""Serve a trace of requests for many adapters, beside PEFT loading and deleting them on demand.

    python examples/trace_requests.py [--adapters 1000] [--requests 2000] [--zipf 1.0]
                                      [--slots 8] [--cached 64] [--seed 0] [--json FILE]

Every request names one of the adapters, popular ones more often (Zipf), makes it the only active
one and runs one forward, eagerly, since PEFT would recompile after each load. lora_slots has all in
its catalogue, a host cache and slots, and evicts; PEFT keeps as many adapters as there are slots,
and deletes the one not used for longest. Both serve each request, taking turns in being first, and
their outputs are compared on a sample. Every adapter is a file of its own in a temporary folder,
just written, so that disk means page cache.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from benchmarks.clocks import clock_for, device_for
from benchmarks.figures import OURS, environment
from benchmarks.models import (
    Model,
    Shape,
    Weights,
    base_weights,
    check_equal,
    peft_model,
    write_adapter,
)
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from tqdm import tqdm

from lora_slots import SlotManager

SHAPE = Shape(layers=2, hidden=512, mlp=1376, dtype=torch.float32)
# How often each rank occurs: most adapters are small.
RANKS = {4: 0.3, 8: 0.3, 16: 0.2, 32: 0.12, 64: 0.08}
THEIRS = "PEFT load_adapter, delete_adapter"
TIERS = ("slot", "host cache", "disk")
SAMPLE = 50
DEVICE = device_for("auto")
CLOCK = clock_for(DEVICE)
TOKENS = 16
console = Console(width=max(Console().width, 110))


class Contender(Protocol):
    """Makes an adapter the only active one."""

    model: nn.Module

    def tier(self, name: str) -> str:
        """Where the adapter is now."""

    def activate(self, name: str) -> None:
        """Load the adapter if need be, and let it, and only it, contribute."""


class Slots:
    """lora_slots: slots, a host cache, a catalogue."""

    def __init__(
        self, weights: Weights, paths: dict[str, Path], *, slots: int, cache_bytes: int
    ) -> None:
        """Know all adapters; nothing is loaded."""
        self.model = Model(weights).eval()
        self.manager = SlotManager(
            self.model,
            max_rank=max(RANKS),
            num_slots=slots,
            rank_buckets="auto",
            cache_bytes=cache_bytes,
            on_full="evict",
        )
        for name, path in paths.items():
            self.manager.add(name, path)

    def tier(self, name: str) -> str:
        """A slot, or what turns out to be another one."""
        return "slot" if name in self.manager.loaded_adapters else ""

    def activate(self, name: str) -> None:
        """One call, which loads and evicts."""
        self.manager.set_adapters(name)


class OnDemand:
    """PEFT: as many adapters as there are slots, the least recently used deleted for a new one."""

    def __init__(self, weights: Weights, paths: dict[str, Path], *, slots: int) -> None:
        """Begin with the first adapter, without which PEFT has no model."""
        self._paths = paths
        self._slots = slots
        first = next(iter(paths))
        self.model: PeftModel = peft_model(Model(weights), paths[first], DEVICE)
        self._kept: OrderedDict[str, str] = OrderedDict({first: "default"})

    def tier(self, name: str) -> str:
        """In the model, or on disk."""
        return "slot" if name in self._kept else "disk"

    def activate(self, name: str) -> None:
        """Load, activate and delete."""
        if name in self._kept:
            self._kept.move_to_end(name)
            self.model.set_adapter(self._kept[name])
            return
        self.model.load_adapter(
            str(self._paths[name]), name, autocast_adapter_dtype=False, torch_device=DEVICE.type
        )
        self.model.set_adapter(name)
        self._kept[name] = name
        if len(self._kept) > self._slots:
            self.model.delete_adapter(self._kept.popitem(last=False)[1])


@dataclass
class Outcome:
    """What a contender made of the trace.

    Attributes:
        tiers: How many requests found their adapter where.
        active: Of each request, the milliseconds until its adapter was active.
        forward: Of each request, the milliseconds of its forward.
        by_tier: The former, by where the adapter was.
    """

    tiers: Counter[str] = field(default_factory=Counter)
    active: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    by_tier: dict[str, list[float]] = field(default_factory=lambda: {t: [] for t in TIERS})

    def add(self, tier: str, active: float, forward: float) -> None:
        """Count a request."""
        self.tiers[tier] += 1
        self.active.append(active)
        self.forward.append(forward)
        self.by_tier[tier].append(active)

    def summary(self) -> dict[str, float]:
        """Shares of the tiers, milliseconds, and requests per second."""
        total = len(self.active)
        shares = {f"share from {tier}": self.tiers[tier] / total for tier in TIERS}
        medians = {
            f"p50 from {tier}, ms": statistics.median(times)
            for tier, times in self.by_tier.items()
            if times
        }
        return {
            **shares,
            **medians,
            "p50 to active, ms": percentile(self.active, 50),
            "p99 to active, ms": percentile(self.active, 99),
            "p50 forward, ms": percentile(self.forward, 50),
            "requests per second": 1e3 * total / (sum(self.active) + sum(self.forward)),
            "activations per second": 1e3 * total / sum(self.active),
        }


def percentile(times: Sequence[float], percent: int) -> float:
    """The value that so many per cent are not above."""
    return statistics.quantiles(times, n=100, method="inclusive")[percent - 1]


def write_all(root: Path, shape: Shape, count: int, dice: random.Random) -> dict[str, Path]:
    """As many adapters, of random ranks, each with tensors of its own."""
    ranks = dice.choices(list(RANKS), list(RANKS.values()), k=count)
    return {
        f"adapter-{number}": write_adapter(root / str(number), shape, rank, number)
        for number, rank in enumerate(tqdm(ranks, "adapters", disable=None))
    }


def zipf_trace(names: Sequence[str], count: int, exponent: float, dice: random.Random) -> list[str]:
    """Requests in which the n-th most popular adapter has the weight ``1 / n ** exponent``."""
    popular = dice.sample(names, len(names))
    weights = [(number + 1) ** -exponent for number in range(len(names))]
    return dice.choices(popular, weights, k=count)


@torch.no_grad()
def serve(contender: Contender, name: str, x: Tensor, outcome: Outcome) -> None:
    """One request."""
    tier = contender.tier(name)
    hits = contender.manager.status().counts.cache_hits if isinstance(contender, Slots) else 0
    active = CLOCK.milliseconds(lambda: contender.activate(name))
    if isinstance(contender, Slots) and tier != "slot":
        now = contender.manager.status().counts.cache_hits
        tier = "host cache" if now > hits else "disk"
    forward = CLOCK.milliseconds(lambda: contender.model(x))
    outcome.add(tier, active, forward)


def run(arguments: argparse.Namespace, shape: Shape = SHAPE) -> dict[str, Outcome]:
    """Let both serve the same trace."""
    dice = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        paths = write_all(Path(folder), shape, arguments.adapters, dice)
        sizes = [(path / "adapter_model.safetensors").stat().st_size for path in paths.values()]
        trace = zipf_trace(list(paths), arguments.requests, arguments.zipf, dice)
        weights = base_weights(shape, DEVICE)
        cache_bytes = arguments.cached * sum(sizes) // len(sizes)
        contenders: dict[str, Contender] = {
            OURS: Slots(weights, paths, slots=arguments.slots, cache_bytes=cache_bytes),
            THEIRS: OnDemand(weights, paths, slots=arguments.slots),
        }
        x = torch.randn(1, TOKENS, shape.hidden, dtype=shape.dtype, device=DEVICE)
        outcomes = {name: Outcome() for name in contenders}
        order = list(contenders)
        for number, name in enumerate(tqdm(trace, "requests", disable=None)):
            for contender in order:
                serve(contenders[contender], name, x, outcomes[contender])
            order.reverse()
            if number % SAMPLE == 0:
                check_equal([each.model for each in contenders.values()], x)
    return outcomes


def show(outcomes: dict[str, Outcome], arguments: argparse.Namespace) -> None:
    """One column for each contender."""
    title = (
        f"{arguments.requests} requests for {arguments.adapters} adapters, Zipf "
        f"{arguments.zipf:g}, {arguments.slots} slots, a host cache of {arguments.cached} adapters"
    )
    table = Table("", *outcomes, title=title)
    summaries = [outcome.summary() for outcome in outcomes.values()]
    for what in dict.fromkeys(key for summary in summaries for key in summary):
        cells = [summary.get(what) for summary in summaries]
        table.add_row(what, *(shown(what, cell) for cell in cells))
    console.print(table)


def shown(what: str, value: float | None) -> str:
    """A figure as text."""
    if value is None:
        return "-"
    return f"{value:.1%}" if what.startswith("share") else f"{value:,.4g}"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--cached", type=int, default=64, help="adapters in the host cache")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return parser


def main(argv: Sequence[str] | None = None, shape: Shape = SHAPE) -> dict[str, Outcome]:
    """Run, print, and write the figures if asked to."""
    arguments = parser().parse_args(argv)
    outcomes = run(arguments, shape)
    show(outcomes, arguments)
    if arguments.json is not None:
        figures = {name: outcome.summary() for name, outcome in outcomes.items()}
        trace = {k: v for k, v in vars(arguments).items() if k != "json"}
        content = {
            "environment": environment(DEVICE) | {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z")},
            "shape": asdict(shape) | {"dtype": str(shape.dtype)},
            "trace": trace,
            "figures": figures,
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return outcomes


if __name__ == "__main__":
    main()
