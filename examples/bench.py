"""Measure lora_slots beside PEFT and the physical limit, in one process, on the same files.

    python examples/bench.py [swap] [switch] [forward] [route] [memory] [startup] [ADAPTERS ...]
                             [--rounds N] [--swaps N] [--json FILE] [--plot FILE]

Swaps are measured on the shape of a 1.4B model: 28 layers of 7 linears, hidden size 2048, bfloat16;
or on your own adapters, in linears of their sizes. Every figure is the median of interleaved runs,
files are in the page cache, and outputs are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import cycle
from pathlib import Path

import psutil
import torch
from contenders import (
    DEVICE,
    OURS,
    Figure,
    Model,
    Shape,
    base_weights,
    check_equal,
    environment,
    interleaved,
    milliseconds,
    peft_model,
    write_adapter,
)
from peft import PeftModel
from peft.utils.hotswap import hotswap_adapter
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from tqdm import tqdm

from lora_slots import SlotManager, inspect_adapter

LARGE = Shape(layers=28, hidden=2048, mlp=5504, dtype=torch.bfloat16)
# bfloat16 products are emulated on many CPUs, where they would hide what is measured here.
FORWARD = Shape(layers=4, hidden=1024, mlp=2752, dtype=torch.float32)
ROUTE = Shape(layers=6, hidden=768, mlp=2048, dtype=torch.float32)
MANY = Shape(layers=4, hidden=2048, mlp=5504, dtype=torch.bfloat16)
PARTS = ("swap", "switch", "forward", "route", "memory", "startup")
CACHE = 8 << 30
COPY = "memcpy of its bytes"
HOTSWAP = "PEFT hotswap_adapter"
console = Console(width=max(Console().width, 120))


def bench_swap(shape: Shape, root: Path, rounds: int) -> Iterator[Figure]:
    """`load` from disk and from the cache against `hotswap_adapter`, at rank 8 and 64."""
    weights = base_weights(shape)
    ranks = (8, 64)
    files = {
        rank: [write_adapter(root / f"r{rank}-{n}", shape, rank, rank + n) for n in range(2)]
        for rank in ranks
    }
    theirs = peft_model(Model(weights), files[64][0], padded_to=64)
    disk_model, cache_model = Model(weights).eval(), Model(weights).eval()
    disk = SlotManager(disk_model, max_rank=64)
    cache = SlotManager(cache_model, max_rank=64, cache_bytes=CACHE)
    x = torch.randn(1, shape.hidden, dtype=shape.dtype, device=DEVICE)
    for rank, pair in files.items():
        for path in pair:
            hotswap_adapter(theirs, str(path), "default", torch_device=DEVICE.type)
            disk.load(path)
            cache.load(path)
        check_equal([disk_model, cache_model, theirs], x)
        hotswap = alternating(
            lambda path: hotswap_adapter(theirs, path, "default", torch_device=DEVICE.type), pair
        )
        load = alternating(disk.load, pair)
        yield interleaved(f"load from disk, rank {rank}", {OURS: load, HOTSWAP: hotswap}, rounds)
        again = alternating(cache.load, pair)
        runs = {OURS: again, HOTSWAP: hotswap, COPY: copying(cache)}
        yield interleaved(f"load from the cache, rank {rank}", runs, rounds)


def bench_curve(shape: Shape, root: Path, rounds: int) -> Iterator[Figure]:
    """A cached load at ranks 4 to 256, against copying as many bytes, for two sizes of buffers."""
    weights = base_weights(shape)
    for max_rank, num_slots in ((256, 1), (64, 4)):
        manager = SlotManager(
            Model(weights), max_rank=max_rank, num_slots=num_slots, cache_bytes=CACHE
        )
        for rank in (4, 8, 16, 32, 64, 128, 256):
            if rank > max_rank:
                break
            pair = [write_adapter(root / f"c{rank}-{n}", shape, rank, rank + n) for n in range(2)]
            for path in pair:
                manager.load(path)
            load = alternating(manager.load, pair)
            what = f"cached load, rank {rank} of max_rank {max_rank}, {num_slots} slots"
            yield interleaved(what, {OURS: load, COPY: copying(manager)}, rounds)


def bench_many(shape: Shape, root: Path) -> Figure:
    """64 loads into 64 slots, against 64 single loads into one."""
    files = [write_adapter(root / f"many-{n}", shape, 8, n) for n in tqdm(range(64), "adapters")]
    weights = base_weights(shape)
    one = SlotManager(Model(weights), max_rank=8)
    all_ = SlotManager(Model(weights), max_rank=8, num_slots=64)
    one.load(files[0])
    times: dict[str, list[float]] = {OURS: [], "one slot": []}
    for number, path in enumerate(tqdm(files, "loads")):
        times["one slot"].append(milliseconds(lambda path=path: one.load(path)))
        into = milliseconds(lambda path=path, n=number: all_.load(path, str(n), activate=False))
        times[OURS].append(into)
    total = {name: (sum(each), sum(each), sum(each)) for name, each in times.items()}
    return Figure("64 loads from disk, rank 8, into 64 slots", total)


def bench_switch(shape: Shape, root: Path, rounds: int) -> Iterator[Figure]:
    """`set_adapters` between two loaded, against PEFT's hotswap and PEFT's `set_adapter`."""
    weights = base_weights(shape)
    files = [write_adapter(root / f"s{n}", shape, 8, n) for n in range(2)]
    hot = peft_model(Model(weights), files[0], padded_to=64)
    resident = peft_model(Model(weights), files[0], padded_to=None)
    resident.load_adapter(str(files[1]), "other", torch_device=DEVICE.type)
    manager = SlotManager(Model(weights), max_rank=64, num_slots=2)
    manager.load(files[0], "default")
    manager.load(files[1], "other")
    runs = {
        OURS: alternating(manager.set_adapters, ["default", "other"]),
        HOTSWAP: alternating(
            lambda path: hotswap_adapter(hot, path, "default", torch_device=DEVICE.type), files
        ),
        "PEFT set_adapter": alternating(resident.set_adapter, ["default", "other"]),
    }
    yield interleaved("switch between two loaded, rank 8", runs, rounds)


def bench_forward(shape: Shape, root: Path, rounds: int) -> Iterator[Figure]:
    """One token through compiled blocks whose slots have 128 rows, for several ranks in use."""
    weights = base_weights(shape)
    x = torch.randn(1, shape.hidden, dtype=shape.dtype, device=DEVICE)
    ranks = (8, 32, 128)
    paths = {rank: write_adapter(root / f"f{rank}", shape, rank, rank) for rank in ranks}
    base = Model(weights).eval()
    padded = peft_model(Model(weights), paths[128], padded_to=128)
    exact = {rank: peft_model(Model(weights), paths[rank], padded_to=None) for rank in ranks}
    whole, low = Model(weights).eval(), Model(weights).eval()
    one = SlotManager(whole, max_rank=128)
    buckets = SlotManager(low, max_rank=128, rank_buckets=[0, 8, 32])
    for model in tqdm([base, padded, *exact.values(), whole, low], "compiling"):
        compile_blocks(model.get_base_model() if hasattr(model, "get_base_model") else model)
    with torch.no_grad():
        buckets.warmup(lambda: low(x))
        runs = {OURS: low, "lora_slots, no buckets": whole, "base": base, "PEFT padded": padded}
        yield interleaved("forward, nothing loaded", calls(runs, x), rounds)
        for rank in ranks:
            hotswap_adapter(padded, str(paths[rank]), "default", torch_device=DEVICE.type)
            one.load(paths[rank])
            buckets.load(paths[rank])
            check_equal([exact[rank], padded, whole, low], x)
            runs = {
                OURS: low, "lora_slots, no buckets": whole, "base": base,
                "PEFT unpadded": exact[rank], "PEFT padded": padded,
            }  # fmt: skip
            yield interleaved(f"forward, rank {rank} of 128", calls(runs, x), rounds)
    yield from bench_eager(weights, paths[8], x, rounds)


def bench_eager(weights: object, path: Path, x: Tensor, rounds: int) -> Iterator[Figure]:
    """The same without compiling, one adapter active, slots of its rank."""
    ours, theirs = Model(weights).eval(), peft_model(Model(weights), path, padded_to=None)
    SlotManager(ours, max_rank=8).load(path)
    with torch.no_grad():
        check_equal([ours, theirs], x)
        yield interleaved(
            "eager forward, rank 8", calls({OURS: ours, "PEFT unpadded": theirs}, x), rounds
        )


def bench_route(shape: Shape, root: Path, rounds: int) -> Iterator[Figure]:
    """Eight rows with an adapter each, against PEFT's mixed batch and a PEFT pass for each.

    All are compiled as a whole; what new names cost in graphs is printed beside.
    """
    names = [f"adapter{n}" for n in range(8)]
    weights = base_weights(shape)
    files = {name: write_adapter(root / name, shape, 16, n) for n, name in enumerate(names)}
    model = Model(weights).eval()
    manager = SlotManager(model, max_rank=16, num_slots=len(names), routing=True)
    theirs = PeftModel.from_pretrained(Model(weights), str(files[names[0]]), names[0]).eval()
    for name, path in files.items():
        manager.load(path, name)
        if name != names[0]:
            theirs.load_adapter(str(path), name, torch_device=DEVICE.type)

    ours = torch.compile(model)
    mixed, single = torch.compile(theirs), torch.compile(theirs)

    def each(x: Tensor) -> Tensor:
        rows = []
        for row, name in zip(x.split(1), names, strict=True):
            theirs.set_adapter(name)
            rows.append(single(row))
        return torch.cat(rows)

    with torch.no_grad():
        for count in (1, 64):
            x = torch.randn(len(names), count, shape.hidden, dtype=shape.dtype, device=DEVICE)
            manager.route(names)
            runs = {
                OURS: ours,
                "PEFT adapter_names": lambda x: mixed(x, adapter_names=names),
                "PEFT pass for each": each,
            }
            check_equal(runs.values(), x)
            what = f"forward, 8 rows of 8 adapters, {count} tokens each"
            yield interleaved(what, calls(runs, x), rounds)
            lists = [names[n:] + names[:n] for n in (1, 2, 3)]
            routed = graphs_of(lambda each: (manager.route(each), ours(x)), lists)  # noqa: B023
            others = graphs_of(lambda each: mixed(x, adapter_names=each), lists)  # noqa: B023
            console.print(
                f"graphs compiled for 3 new lists of names, {count} tokens: "
                f"lora_slots {routed}, PEFT adapter_names {others}"
            )


def graphs_of(run: Callable[[list[str]], object], lists: list[list[str]]) -> int:
    """How many graphs Dynamo makes while ``run`` is given each of ``lists``."""
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    for names in lists:
        run(names)
    return stats["unique_graphs"] - before


def bench_startup(shape: Shape, root: Path) -> Iterator[Figure]:
    """Attaching slots without their allocation, and the first compile of one block."""
    weights = base_weights(shape)
    path = write_adapter(root / "startup", shape, 8, 0)
    model = Model(weights).eval()
    with torch.device("meta"):
        meta = Model([{k: nn.Parameter(v.to("meta")) for k, v in w.items()} for w in weights])
    attach = milliseconds(lambda: SlotManager(meta, max_rank=64))
    yield Figure("attach to all linears, nothing allocated", {OURS: (attach,) * 3})
    SlotManager(model, max_rank=64).load(path)
    padded = peft_model(Model(weights), path, padded_to=64)
    x = torch.randn(1, shape.hidden, dtype=shape.dtype, device=DEVICE)
    times = {}
    for name, each in {"warm-up": Model(weights), OURS: model, "PEFT padded": padded}.items():
        torch._dynamo.reset()
        compile_blocks(each.get_base_model() if hasattr(each, "get_base_model") else each)
        with torch.no_grad():
            times[name] = (milliseconds(lambda each=each: each(x)),) * 3
    del times["warm-up"]
    yield Figure("first compile of a block, and a forward", times)


def bench_memory(shape: Shape, root: Path, swaps: int) -> dict[str, float]:
    """Random swaps over 20 adapters: recompiles, resident memory, and the peak of a load."""
    files = [
        write_adapter(root / f"m{n}", shape, random.Random(n).choice((4, 8, 16, 32)), n)
        for n in tqdm(range(20), "adapters", leave=False)
    ]
    model = Model(base_weights(shape)).eval()
    manager = SlotManager(model, max_rank=64)
    compile_blocks(model)
    x = torch.randn(1, shape.hidden, dtype=shape.dtype, device=DEVICE)
    process, choose = psutil.Process(), random.Random(0)
    resident: list[int] = []
    with torch.no_grad(), manager.no_recompile(allow_first=True):
        model(x)
    with torch.no_grad(), manager.no_recompile():
        for swap in tqdm(range(swaps), "swaps", leave=False):
            manager.load(choose.choice(files))
            if swap % 25 == 0:
                model(x)
            resident.append(process.memory_info().rss)
    early = sorted(resident[50:150])[50] if len(resident) > 150 else resident[0]
    late = sorted(resident[-100:])[len(resident[-100:]) // 2]
    return {
        "swaps": swaps,
        "recompiles": 0,
        "resident_mb_after_50": early / 1e6,
        "resident_mb_at_end": late / 1e6,
        "growth": late / early - 1,
    }


def bench_own(paths: list[Path], rounds: int) -> Iterator[Figure]:
    """Loads of the user's own adapters, in linears of their sizes, beside `hotswap_adapter`."""
    infos = [inspect_adapter(path) for path in paths]
    sizes = {name: shape for info in infos for name, shape in info.shapes.items()}
    dtype = infos[0].dtypes[0]

    def model() -> nn.Module:
        root = nn.Module()
        for name, shape in sizes.items():
            parent = root
            *parents, leaf = name.split(".")
            for part in parents:
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent._modules[part]
            linear = nn.Linear(shape.in_features, shape.out_features, False, DEVICE, dtype)
            parent.add_module(leaf, linear)
        return root

    manager = SlotManager.from_adapters(model(), paths)
    cached = SlotManager.from_adapters(model(), paths, cache_bytes=CACHE)
    for path in paths:
        cached.load(path)
    runs: dict[str, Callable[[], object]] = {
        OURS: alternating(manager.load, paths),
        "lora_slots, cached": alternating(cached.load, paths),
    }
    yield interleaved(f"load of {len(paths)} adapters in turn", runs, rounds)


def alternating(run: Callable[[object], object], over: list) -> Callable[[], object]:
    """Call ``run`` with the next of ``over`` each time."""
    turns = cycle(str(item) if isinstance(item, Path) else item for item in over)
    return lambda: run(next(turns))


def calls(models: dict[str, Callable[[Tensor], Tensor]], x: Tensor) -> dict:
    """One forward of each."""
    return {name: (lambda model=model: model(x)) for name, model in models.items()}


def copying(manager: SlotManager) -> Callable[[], object]:
    """Copy as many bytes as the adapter in the manager's first slot has, block by block."""
    bank = manager._bank
    held = (bank.held(slot) for slot in range(bank.num_slots))
    blocks = next(staged for staged in held if staged is not None).blocks
    targets = [torch.empty_like(block, device=DEVICE) for block in blocks]
    return lambda: [target.copy_(b) for target, b in zip(targets, blocks, strict=True)]


def compile_blocks(model: nn.Module) -> None:
    """Compile each block by itself; all share one graph. On a GPU, as a CUDA graph."""
    mode = "reduce-overhead" if DEVICE.type == "cuda" else None
    for layer in model.layers:
        layer.compile(fullgraph=True, dynamic=False, mode=mode)


def table_of(figures: list[Figure]) -> Table:
    """The figures, for people: one row for each contender."""
    table = Table(title="median and quartiles in ms; ratio to lora_slots")
    for column in ("what", "contender", "ms", "quartiles", "ratio"):
        table.add_column(column, justify="left" if column in ("what", "contender") else "right")
    for figure in figures:
        what = figure.what
        for name, (middle, low, high) in figure.times.items():
            ratio = "" if name == OURS else f"{figure.ratio(name):.2f}"
            table.add_row(what, name, f"{middle:.2f}", f"{low:.2f}-{high:.2f}", ratio)
            what = ""
    return table


def plot(figures: list[Figure], path: Path) -> None:
    """Draw a bar for each contender of each figure, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [(f.what, name, t[0]) for f in figures for name, t in f.times.items()]
    names = list(dict.fromkeys(name for _, name, _ in rows))
    chart, axes = pyplot.subplots(figsize=(9, 0.28 * len(rows) + 1))
    for position, (_, name, middle) in enumerate(rows):
        axes.barh(position, middle, color=f"C{names.index(name)}")
    axes.set_yticks(range(len(rows)), [f"{what}: {name}" for what, name, _ in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds")
    chart.tight_layout()
    chart.savefig(path, dpi=120)


def main() -> None:
    """Run what was asked for, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", help=f"{', '.join(PARTS)}, or paths of adapters")
    parser.add_argument("--json", type=Path, default=Path(".cache/bench.json"))
    parser.add_argument("--plot", type=Path, help="write a picture (needs matplotlib)")
    parser.add_argument("--layers", type=int, help="another number of layers")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--swaps", type=int, default=1000)
    options = parser.parse_args()
    own = [Path(word) for word in options.what if word not in PARTS]
    parts = [word for word in options.what if word in PARTS] or ([] if own else list(PARTS))
    large = Shape(options.layers or LARGE.layers, LARGE.hidden, LARGE.mlp, LARGE.dtype)
    small = Shape(options.layers or FORWARD.layers, FORWARD.hidden, FORWARD.mlp, FORWARD.dtype)
    warnings.filterwarnings("ignore", category=FutureWarning)
    figures: list[Figure] = []
    result: dict[str, object] = {"environment": environment(), "large": str(large)}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        if own:
            figures += bench_own(own, options.rounds)
        if "swap" in parts:
            figures += bench_swap(large, root, options.rounds)
            figures += bench_curve(large, root, options.rounds)
            figures.append(bench_many(MANY, root))
        if "switch" in parts:
            figures += bench_switch(large, root, options.rounds)
        if "forward" in parts:
            # All contenders run the same `Block.forward`; Dynamo counts graphs by function.
            with torch._dynamo.config.patch(recompile_limit=64):
                figures += bench_forward(small, root, 4 * options.rounds)
        if "route" in parts:
            # A graph for each adapter, and for each list of names.
            with torch._dynamo.config.patch(recompile_limit=64):
                figures += bench_route(ROUTE, root, 2 * options.rounds)
        if "startup" in parts:
            figures += bench_startup(large, root)
        if "memory" in parts:
            result["memory"] = bench_memory(large, root, options.swaps)
    result["figures"] = [asdict(figure) for figure in figures]
    console.print(table_of(figures))
    if "memory" in result:
        console.print(result["memory"])
    if options.plot:
        plot(figures, options.plot)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"written to {options.json}")


if __name__ == "__main__":
    main()
