"""Measure lora_slots beside PEFT's hotswap, in one process, on the same files and weights.

    python examples/bench.py [swap] [forward] [memory] [--json FILE] [--layers N] [--rounds N]

The shape is that of a 1.4B model: 28 layers of 7 linears, hidden size 2048, bfloat16. Every figure
is the median of interleaved runs, files are in the page cache, and outputs are compared before
anything is timed.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import peft
import psutil
import torch
from peft import LoraConfig, PeftModel
from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import lora_slots
from lora_slots import SlotManager

HIDDEN, MLP = 2048, 5504
LINEARS = {
    "q_proj": (HIDDEN, HIDDEN),
    "k_proj": (HIDDEN, HIDDEN),
    "v_proj": (HIDDEN, HIDDEN),
    "o_proj": (HIDDEN, HIDDEN),
    "gate_proj": (HIDDEN, MLP),
    "up_proj": (HIDDEN, MLP),
    "down_proj": (MLP, HIDDEN),
}
MAX_RANK = 64
DTYPE = torch.bfloat16
console = Console()


class Block(nn.Module):
    """Seven linears, wired like a decoder layer without its attention."""

    def __init__(self, weights: dict[str, nn.Parameter]) -> None:
        """Share ``weights``, so that both contenders read the same memory."""
        super().__init__()
        for name, (inputs, outputs) in LINEARS.items():
            linear = nn.Linear(inputs, outputs, bias=False, device="meta")
            linear.weight = weights[name]
            self.add_module(name, linear)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` to ``[..., hidden]``."""
        x = F.rms_norm(x, x.shape[-1:])
        x = x + self.o_proj(self.q_proj(x) * torch.sigmoid(self.k_proj(x)) + self.v_proj(x))
        return x + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Model(nn.Module):
    """A stack of blocks."""

    def __init__(self, weights: list[dict[str, nn.Parameter]]) -> None:
        """One block for each entry of ``weights``."""
        super().__init__()
        self.layers = nn.ModuleList(Block(each) for each in weights)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` to ``[..., hidden]``."""
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass(frozen=True)
class Figure:
    """One measured comparison; times in milliseconds, spread from the 1st to the 3rd quartile."""

    what: str
    ours: float
    ours_spread: tuple[float, float]
    peft: float
    peft_spread: tuple[float, float]

    @property
    def ratio(self) -> float:
        """How many times faster than PEFT."""
        return self.peft / self.ours


def base_weights(layers: int) -> list[dict[str, nn.Parameter]]:
    """Random weights of the size that keeps activations near 1."""
    torch.manual_seed(0)
    return [
        {
            name: nn.Parameter(
                torch.randn(outputs, inputs, dtype=DTYPE) * 0.5 * inputs**-0.5, requires_grad=False
            )
            for name, (inputs, outputs) in LINEARS.items()
        }
        for _ in range(layers)
    ]


def write_adapter(folder: Path, rank: int, layers: int, seed: int) -> Path:
    """A PEFT folder with all seven linears of every layer at ``rank``."""
    generator = torch.Generator().manual_seed(seed)

    def random_(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.01).to(DTYPE)

    tensors = {
        f"base_model.model.layers.{layer}.{name}.lora_{side}.weight": tensor
        for layer in range(layers)
        for name, (inputs, outputs) in LINEARS.items()
        for side, tensor in (("A", random_(rank, inputs)), ("B", random_(outputs, rank)))
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(LINEARS))
    config.save_pretrained(str(folder))
    return folder


def peft_model(weights: list[dict[str, nn.Parameter]], first: Path) -> PeftModel:
    """PEFT's side: prepared for hotswapping up to `MAX_RANK`."""
    model = PeftModel.from_pretrained(
        Model(weights), str(first), autocast_adapter_dtype=False, torch_device="cpu"
    )
    prepare_model_for_compiled_hotswap(model, target_rank=MAX_RANK, config=model.peft_config)
    return model.eval()


def interleaved(
    what: str, ours: Callable[[], object], theirs: Callable[[], object], rounds: int
) -> Figure:
    """Time both in turn, after one round that does not count."""
    times: tuple[list[float], list[float]] = ([], [])
    for round_ in range(rounds + 1):
        for run, kept in zip((ours, theirs), times, strict=True):
            started = time.perf_counter()
            run()
            if round_:
                kept.append((time.perf_counter() - started) * 1e3)
    (a, a_spread), (b, b_spread) = map(_median_and_spread, times)
    return Figure(what, a, a_spread, b, b_spread)


def _median_and_spread(times: list[float]) -> tuple[float, tuple[float, float]]:
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, (low, high)


def bench_swap(weights: list[dict[str, nn.Parameter]], root: Path, rounds: int) -> Iterator[Figure]:
    """`load` from disk, and `set_adapters` between residents, against `hotswap_adapter`."""
    layers = len(weights)
    files = {
        rank: [write_adapter(root / f"r{rank}-{n}", rank, layers, seed=rank + n) for n in range(2)]
        for rank in (8, MAX_RANK)
    }
    theirs = peft_model(weights, files[MAX_RANK][0])
    ours = Model(weights).eval()
    manager = SlotManager(ours, max_rank=MAX_RANK, num_slots=2)
    x = torch.randn(1, HIDDEN, dtype=DTYPE)
    for rank, pair in files.items():
        turn = {"ours": 0, "peft": 0}

        def load(pair: list[Path] = pair, turn: dict[str, int] = turn) -> None:
            turn["ours"] += 1
            manager.load(pair[turn["ours"] % 2], "default")

        def hotswap(pair: list[Path] = pair, turn: dict[str, int] = turn) -> None:
            turn["peft"] += 1
            hotswap_adapter(theirs, str(pair[turn["peft"] % 2]), "default", torch_device="cpu")

        load()
        hotswap()
        check_equal(ours, theirs, x)
        yield interleaved(f"load from disk, rank {rank}", load, hotswap, rounds)
    manager.load(files[8][0], "default")
    manager.load(files[MAX_RANK][1], "other")
    turn = {"ours": 0}

    def switch() -> None:
        turn["ours"] += 1
        manager.set_adapters("default" if turn["ours"] % 2 else "other")

    yield interleaved("set_adapters between residents (PEFT: hotswap, rank 8)", switch,
                      lambda: hotswap_adapter(theirs, str(files[8][0]), "default",
                                              torch_device="cpu"), rounds)  # fmt: skip


def bench_forward(
    weights: list[dict[str, nn.Parameter]], root: Path, rounds: int
) -> Iterator[Figure]:
    """One compiled forward of each, block by block, with a rank-8 adapter in rank-64 buffers."""
    path = write_adapter(root / "forward", 8, len(weights), seed=1)
    ours, theirs = Model(weights).eval(), peft_model(weights, path)
    manager = SlotManager(ours, max_rank=MAX_RANK)
    manager.load(path)
    for model in (ours, theirs.get_base_model()):
        for layer in tqdm(model.layers, desc="compiling", leave=False):
            layer.compile(fullgraph=True, dynamic=False)
    for rows in (1, 8):
        x = torch.randn(rows, HIDDEN, dtype=DTYPE)
        check_equal(ours, theirs, x)
        with torch.no_grad():
            yield interleaved(
                f"compiled forward, {rows} tokens",
                lambda x=x: ours(x),
                lambda x=x: theirs(x),
                rounds,
            )


def bench_memory(
    weights: list[dict[str, nn.Parameter]], root: Path, swaps: int = 1000
) -> dict[str, float]:
    """Random swaps over 20 adapters: recompiles, resident memory after 50 swaps and at the end."""
    layers = len(weights)
    files = [
        write_adapter(root / f"memory-{n}", random.Random(n).choice((4, 8, 16, 32)), layers, seed=n)
        for n in tqdm(range(20), desc="adapters", leave=False)
    ]
    model = Model(weights).eval()
    manager = SlotManager(model, max_rank=MAX_RANK)
    for layer in model.layers:
        layer.compile(fullgraph=True)
    x = torch.randn(1, HIDDEN, dtype=DTYPE)
    process, choose = psutil.Process(), random.Random(0)
    resident: list[int] = []
    with torch.no_grad(), manager.no_recompile(allow_first=True):
        model(x)
    with torch.no_grad(), manager.no_recompile():
        for swap in tqdm(range(swaps), desc="swaps", leave=False):
            manager.load(choose.choice(files))
            if swap % 25 == 0:
                model(x)
            resident.append(process.memory_info().rss)
    early, late = statistics.median(resident[50:150]), statistics.median(resident[-100:])
    return {
        "swaps": swaps,
        "recompiles": 0,
        "resident_mb_after_50": early / 1e6,
        "resident_mb_at_end": late / 1e6,
        "growth": late / early - 1,
    }


def check_equal(ours: nn.Module, theirs: nn.Module, x: Tensor) -> None:
    """Both outputs, before anything is timed; they differ by bfloat16 rounding alone."""
    with torch.no_grad():
        a, b = ours(x).float(), theirs(x).float()
    error = ((a - b).norm() / b.norm()).item()
    if not error < 0.03:
        raise AssertionError(f"outputs differ by {error:.3f} of their norm")


def table_of(figures: list[Figure]) -> Table:
    """The figures, for people."""
    table = Table(title="lora_slots beside PEFT (ms, median, quartiles in brackets)")
    for column in ("what", "lora_slots", "PEFT", "PEFT / lora_slots"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for f in figures:
        table.add_row(
            f.what,
            f"{f.ours:.2f} ({f.ours_spread[0]:.2f}-{f.ours_spread[1]:.2f})",
            f"{f.peft:.2f} ({f.peft_spread[0]:.2f}-{f.peft_spread[1]:.2f})",
            f"{f.ratio:.2f}",
        )
    return table


def processor_name() -> str:
    """The processor's model, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def environment() -> dict[str, str | int]:
    """What a figure was measured on."""
    return {
        "processor": processor_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": psutil.cpu_count() or 0,
        "torch": torch.__version__,
        "peft": peft.__version__,
        "lora_slots": lora_slots.__version__,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Run what was asked for, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="swap, forward, memory; all if none is named")
    parser.add_argument("--json", type=Path, default=Path(".cache/bench.json"))
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    parts = options.parts or ["swap", "forward", "memory"]
    warnings.filterwarnings("ignore", message=".*", category=FutureWarning)
    weights = base_weights(options.layers)
    figures: list[Figure] = []
    result: dict[str, object] = {"environment": environment(), "layers": options.layers}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        if "swap" in parts:
            figures += bench_swap(weights, root, options.rounds)
        if "forward" in parts:
            figures += bench_forward(weights, root, options.rounds)
        if "memory" in parts:
            result["memory"] = bench_memory(weights, root)
    result["figures"] = [asdict(figure) | {"ratio": figure.ratio} for figure in figures]
    console.print(table_of(figures))
    if "memory" in result:
        console.print(result["memory"])
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"written to {options.json}")


if __name__ == "__main__":
    main()
