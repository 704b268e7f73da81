"""Swaps, switches and forwards do no more than they must: counted, not timed.

What is timed is recorded by pytest-benchmark (``--benchmark-save``, ``--benchmark-compare``), and
only compared with what ran in turn with it.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import pytest
import torch
from benchmarks.clocks import CpuClock
from benchmarks.harness import alternating
from benchmarks.models import (
    Model,
    Shape,
    base_weights,
    change_header,
    check_equal,
    peft_model,
    write_adapter,
)
from pytest_benchmark.fixture import BenchmarkFixture
from routed import Row, routed_blocks, tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from toys import blocks

from lora_slots import SlotManager
from lora_slots.bank import buffers

CPU = torch.device("cpu")
LINEARS = 7  # of a layer
CACHE = 1 << 30


def shape_of(layers: int) -> Shape:
    return Shape(layers=layers, hidden=64, mlp=96, dtype=torch.float32)


class Setup:
    """A model whose slots hold the second of two adapters, and those adapters' folders."""

    def __init__(self, root: Path, layers: int, ranks: tuple[int, int] = (8, 8), **options: Any):
        shape = shape_of(layers)
        self.weights = base_weights(shape, CPU)
        self.model = Model(self.weights).eval()
        self.manager = SlotManager(self.model, max_rank=16, **options)
        self.paths = [
            write_adapter(root / f"{layers}-{n}", shape, rank, n) for n, rank in enumerate(ranks)
        ]
        self.x = torch.randn(3, shape.hidden, generator=torch.Generator().manual_seed(0))
        for path in (*self.paths, *self.paths):
            self.manager.load(path)


class Operators(TorchDispatchMode):
    """Counts what reaches torch's operators, and the elements that are copied and zeroed.

    numpy's copies into buffers count as the operators on lists that they stand for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()
        self.patches = ExitStack()

    def __enter__(self) -> Self:
        for name, what in (("copy_bits", "copy_"), ("zero_bits", "zero_")):
            counted = partial(self.count, getattr(buffers, name), what)
            self.patches.enter_context(patch.object(buffers, name, counted))
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self.patches.close()
        super().__exit__(*error)

    def count(self, func: Callable[..., None], what: str, into: Any, *values: Any) -> None:
        self.calls[f"_foreach_{what}"] += 1
        self.elements[what] += sum(array.size for array in into)
        func(into, *values)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        self.calls[name] += 1
        if name in ("copy_", "_foreach_copy_", "zero_", "_foreach_zero_"):
            written = args[0] if isinstance(args[0], list) else [args[0]]
            self.elements[name.removeprefix("_foreach_")] += sum(t.numel() for t in written)
        return func(*args, **kwargs or {})


@contextmanager
def counting_calls() -> Iterator[Counter[str]]:
    """How many Python functions, and functions in C, are called in the body."""
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, arg: calls.update([event]))
    try:
        yield calls
    finally:
        sys.setprofile(None)


CHANGES: dict[str, Callable[[Setup], object]] = {
    "a cached load": lambda setup: setup.manager.load(setup.paths[0]),
    "set_weight": lambda setup: setup.manager.set_weight("default", 0.5),
    "set_adapters": lambda setup: setup.manager.set_adapters([]),
    "disable_adapters": lambda setup: setup.manager.disable_adapters(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_runs_as_many_operators_on_a_deep_model_as_on_a_shallow_one(change, tmp_path):
    counts = []
    for layers in (1, 6):
        setup = Setup(tmp_path, layers, cache_bytes=CACHE)
        with Operators() as operators:
            CHANGES[change](setup)
        counts.append(operators.calls)
    assert counts[0] == counts[1]
    assert counts[0].total() > 0


@pytest.mark.parametrize("change", CHANGES)
def test_a_load_calls_little_python_for_each_linear_and_a_change_of_weights_none(change, tmp_path):
    limit = 3 if change == "a cached load" else 0.1
    assert calls_per_linear(tmp_path, CHANGES[change], cache_bytes=CACHE) < limit


def test_so_does_a_load_from_disk_of_a_file_whose_header_is_known(tmp_path):
    assert calls_per_linear(tmp_path, CHANGES["a cached load"], cache_bytes=0) < 16


def test_counting_notices_what_is_done_for_each_linear(tmp_path):
    numbers = itertools.count(1)

    def load_unseen(setup: Setup) -> None:
        change_header(setup.paths[0], next(numbers))
        setup.manager.load(setup.paths[0])

    assert calls_per_linear(tmp_path, load_unseen) > 30
    counts = []
    for layers in (1, 6):
        setup = Setup(tmp_path, layers)
        with torch.no_grad(), Operators() as operators:
            setup.model(setup.x)
        counts.append(operators.calls.total())
    assert counts[1] > counts[0] + 5 * LINEARS


def calls_per_linear(root: Path, change: Callable[[Setup], object], **options: Any) -> float:
    totals = []
    for layers in (1, 6):
        setup = Setup(root, layers, **options)
        change(setup)
        setup.manager.enable_adapters()
        setup.manager.load(setup.paths[1], weight=1.0, activate=True)
        with counting_calls() as calls:
            change(setup)
        totals.append(calls["call"] + calls["c_call"])
    return (totals[1] - totals[0]) / (5 * LINEARS)


def test_new_routes_run_as_many_operators_on_a_deep_model_as_on_a_shallow_one(tmp_path):
    counts = []
    for layers in (1, 6):
        setup = Setup(tmp_path, layers, num_slots=2, routing=True)
        setup.manager.load(setup.paths[0], "other")
        setup.manager.route(["default", "other", None])
        with Operators() as operators:
            setup.manager.route(["other", None, "default"])
        counts.append(operators.calls)
    assert counts[0] == counts[1]


def test_routed_rows_cost_what_their_own_adapters_need_however_many_slots_there_are():
    one, two = "a", {"a": 1.0, "b": 0.5}
    assert routed_flops(4, one) == routed_flops(16, one) > 0
    assert routed_flops(16, two) == 2 * routed_flops(16, one)
    # Where rows are not told apart, all slots are multiplied.
    assert routed_flops(16, None) == 4 * routed_flops(4, None) > 2 * routed_flops(16, two)


def routed_flops(num_slots: int, row: Row) -> int:
    """What slots add to the products of a forward of four rows; None: rows are not told apart."""
    both = routed_blocks(max_rank=8, num_slots=num_slots)
    both.manager.route(None if row is None else [row, None, row, row])
    return flops(both.model) - flops(blocks())


def flops(model: torch.nn.Module) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens(4))
    return counter.get_total_flops()


@pytest.mark.parametrize("ranks", [(8, 8), (4, 8), (8, 4)])
def test_a_swap_copies_its_own_rows_and_zeroes_those_of_the_one_before(ranks, tmp_path):
    setup = Setup(tmp_path, 2, ranks, cache_bytes=CACHE)
    widths = 2 * sum(map(sum, shape_of(2).linears.values()))
    with Operators() as operators:
        setup.manager.load(setup.paths[0])
    scalings = 2 * LINEARS
    weights = operators.elements["copy_"] - ranks[0] * (widths + scalings)
    assert 0 <= weights < widths
    assert operators.elements["zero_"] == max(ranks[1] - ranks[0], 0) * (widths + scalings)


def test_a_change_of_weights_copies_no_rows(tmp_path):
    setup = Setup(tmp_path, 2)
    with Operators() as operators:
        setup.manager.set_weight("default", 0.5)
    assert operators.elements["copy_"] <= 3 * 16 * 2 * LINEARS
    assert operators.elements["zero_"] == 0


def test_a_swap_allocates_nothing_of_the_size_of_an_adapter(tmp_path):
    """From the cache nothing is made; from disk the memory of the one before is used again."""
    for cache_bytes in (CACHE, 0):
        setup = Setup(tmp_path, 2, cache_bytes=cache_bytes)
        nbytes = setup.manager.check(setup.paths[0]).nbytes
        assert allocated(partial(setup.manager.load, setup.paths[0])) < nbytes / 4
        # What is only checked is staged in memory of its own.
        if not cache_bytes:
            assert allocated(partial(setup.manager.check, setup.paths[0])) >= nbytes


def allocated(run: Callable[[], object]) -> int:
    """How many bytes torch allocates for tensors in ``run``."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    return sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())


def test_the_last_of_many_loads_costs_little_more_than_the_second_did(tmp_path):
    """An adapter that is loaded already adds less than a call for each fourth module."""
    setup = Setup(tmp_path, 24, num_slots=64)
    costs = []
    for number in range(63):
        with counting_calls() as calls:
            setup.manager.load(setup.paths[0], str(number), activate=False)
        costs.append(calls["call"] + calls["c_call"])
    assert costs[-1] - costs[1] < 61 * 24 * LINEARS / 4


def test_an_eager_forward_runs_few_operators_more_than_the_base_and_no_more_than_peft(tmp_path):
    setup = Setup(tmp_path, 2)
    theirs = peft_model(Model(setup.weights), setup.paths[1], CPU)
    check_equal([theirs, setup.model], setup.x)
    counts = []
    for model in (Model(setup.weights).eval(), setup.model, theirs):
        with torch.no_grad(), Operators() as operators:
            model(setup.x)
        counts.append(operators.calls.total() / (2 * LINEARS))
    base, ours, peft = counts
    assert ours - base <= 7
    assert ours <= peft + 2


def test_a_switch_is_faster_than_a_cached_load_and_that_than_one_from_disk(tmp_path):
    """The best of many, in turn: a slow machine is slow for all of them."""
    disk, cached = Setup(tmp_path, 12), Setup(tmp_path, 12, cache_bytes=CACHE)
    resident = Setup(tmp_path, 12, num_slots=2)
    resident.manager.load(resident.paths[0], "other")
    runs = {
        "switch": alternating(resident.manager.set_adapters, ["default", "other"]),
        "cached": alternating(cached.manager.load, cached.paths),
        "disk": alternating(disk.manager.load, disk.paths),
    }
    clock = CpuClock()
    best = {name: min(clock.milliseconds(run) for _ in range(15)) for name, run in runs.items()}
    assert best["switch"] < best["cached"] < best["disk"]


@pytest.mark.parametrize("source", ["disk", "cache"])
def test_record_a_load(source, benchmark: BenchmarkFixture, tmp_path):
    setup = Setup(tmp_path, 4, cache_bytes=CACHE if source == "cache" else 0)
    record(benchmark, alternating(setup.manager.load, setup.paths))
    assert setup.manager.load(setup.paths[0]).cached == (source == "cache")


def test_record_a_switch(benchmark: BenchmarkFixture, tmp_path):
    setup = Setup(tmp_path, 4, num_slots=2)
    setup.manager.load(setup.paths[0], "other")
    record(benchmark, alternating(setup.manager.set_adapters, ["default", "other"]))
    assert len(setup.manager.active_adapters) == 1


def test_record_a_route(benchmark: BenchmarkFixture, tmp_path):
    setup = Setup(tmp_path, 4, num_slots=2, routing=True)
    setup.manager.load(setup.paths[0], "other")
    lists = [["default", "other", None], ["other", None, "default"]]
    record(benchmark, alternating(setup.manager.route, lists))
    assert setup.model(setup.x).shape == setup.x.shape


@pytest.mark.parametrize("who", ["base", "lora_slots", "PEFT"])
def test_record_an_eager_forward(who, benchmark: BenchmarkFixture, tmp_path):
    setup = Setup(tmp_path, 4)
    models: dict[str, Callable[[Tensor], Tensor]] = {
        "base": Model(setup.weights).eval(),
        "lora_slots": setup.model,
        "PEFT": peft_model(Model(setup.weights), setup.paths[1], CPU),
    }
    with torch.no_grad():
        record(benchmark, lambda: models[who](setup.x))
    check_equal([models["PEFT"], models["lora_slots"]], setup.x)


def record(benchmark: BenchmarkFixture, run: Callable[[], object]) -> None:
    benchmark.pedantic(run, rounds=20, warmup_rounds=2)
