"""The benchmark's own parts: clocks, counts of graphs, and the files it writes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from benchmarks.clocks import CpuClock, CudaClock, clock_for, device_for
from benchmarks.figures import Figure, environment, markdown_of, spread
from benchmarks.graphs import counting_graphs
from benchmarks.harness import Harness, alternating
from benchmarks.models import Model, Shape, base_weights, check_equal, compiled, write_adapter
from benchmarks.plot import plot
from torch._dynamo.callback import CallbackTrigger, callback_handler

TINY = Shape(layers=2, hidden=8, mlp=12, dtype=torch.float32)
CPU = torch.device("cpu")


class FakeCuda:
    """Writes down what it is asked for; an event's time is how many were recorded before."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def Event(self, *, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def record(self) -> None:
        self.cuda.calls.append("record")
        self.at = self.cuda.calls.count("record")

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.cuda.calls[-1] == "synchronize"
        return 7.0 * (end.at - self.at)


def test_the_gpus_clock_waits_for_the_gpu_before_and_after():
    cuda = FakeCuda()
    assert CudaClock(cuda).milliseconds(lambda: cuda.calls.append("run")) == 7
    assert cuda.calls == ["synchronize", "record", "run", "record", "synchronize"]


def test_the_cpus_clock_calls_once_and_gives_milliseconds():
    called = []
    assert 0 < CpuClock().milliseconds(lambda: called.append(1)) < 1000
    assert called == [1]


def test_each_device_has_its_clock():
    assert isinstance(clock_for(CPU), CpuClock)
    assert isinstance(clock_for(torch.device("cuda:1")), CudaClock)
    assert device_for("cuda:1") == torch.device("cuda:1")
    assert device_for("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_contenders_take_turns_and_warm_up_is_not_counted(tmp_path):
    order, harness = [], make_harness(tmp_path, rounds=3)
    figure = harness.compare(
        "turns", {"lora_slots": lambda: order.append("us"), "them": lambda: order.append("them")}
    )
    assert order == ["us", "them"] * 5
    assert figure.times.keys() == {"lora_slots", "them"}
    assert figure.ratios.keys() == {"them"}


def test_a_ratio_is_taken_within_a_round():
    """The machine grew ten times slower; the other contender took twice as long throughout."""
    figure = Figure.of("x", {"lora_slots": [1, 10, 100], "them": [2, 20, 200]})
    assert figure.ratios == {"them": (2, 2, 2)}
    assert figure.times["them"][0] == 20
    assert spread([3.0]) == (3, 3, 3)


def test_graphs_that_are_compiled_and_recorded_are_counted_and_nothing_else():
    with counting_graphs() as counts:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        # What inductor does where it records a CUDA graph.
        with callback_handler.install_callbacks(CallbackTrigger.CUDAGRAPH_RECORDING, "0/0"):
            pass
        with callback_handler.install_callbacks(CallbackTrigger.LAZY_BACKWARD, "0/0"):
            pass
    assert (counts.compiled, counts.recorded) == (1, 1)
    assert counts.notes(CPU) == {"graphs compiled": 1}
    on_gpu = {"graphs compiled, here": 1, "CUDA graphs recorded, here": 1}
    assert counts.notes(torch.device("cuda"), ", here") == on_gpu
    with counting_graphs() as later:
        pass
    assert (later.compiled, later.recorded) == (0, 0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_compiled_model_is_the_same_model(device):
    """The whole is compiled, as on a GPU, and its blocks, as on a CPU; weights stay on the CPU."""
    x = torch.randn(3, TINY.hidden)
    model = Model(base_weights(TINY, CPU))
    expected = model(x)
    with counting_graphs() as counts:
        run = compiled(model, torch.device(device), backend="eager")
        run(x)
        torch.testing.assert_close(run(x), expected)
    assert counts.compiled == 1


def test_outputs_that_differ_end_the_benchmark():
    x = torch.ones(2, 2)
    check_equal([lambda x: x, lambda x: x + 1e-5], x)
    with pytest.raises(AssertionError, match=r"outputs differ by 0\.1"):
        check_equal([lambda x: x, lambda x: 1.1 * x], x)


def test_adapters_differ_by_seed_and_are_written_the_same_again(tmp_path):
    folders = [write_adapter(tmp_path / str(n), TINY, 4, seed) for n, seed in enumerate((1, 1, 2))]
    first, again, other = ((f / "adapter_model.safetensors").read_bytes() for f in folders)
    assert first == again != other


def test_a_copy_moves_all_bytes_from_two_places_in_turn(tmp_path):
    make_harness(tmp_path).copy_of(100)()
    seen: list[int] = []
    run = alternating(seen.append, [1, 2])
    for _ in range(3):
        run()
    assert seen == [1, 2, 1]


def test_the_table_says_what_was_run_where(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench.py", "swap"])
    figure = Figure.of(
        "a load", {"lora_slots": [1.0, 1.0], "PEFT": [3.0, 3.0]}, notes={"graphs": 0}
    )
    text = markdown_of([figure], environment(CPU))
    assert text.startswith("`python bench.py swap`, 20")
    assert f"torch {torch.__version__}" in text
    assert "| a load | lora_slots | 1 (1 to 1) |  |" in text
    assert "|  | PEFT | 3 (3 to 3) | 3 (3 to 3) |" in text
    assert "|  | graphs | 0 |  |" in text


def test_a_picture_has_the_bars_and_the_curves_and_is_the_same_again(tmp_path):
    pytest.importorskip("matplotlib")
    bars = Figure.of("a load", {"lora_slots": [1.0, 2.0], "PEFT": [3.0, 4.0]})
    points = [
        Figure.of(f"cached load, rank {n}", {"lora_slots": [n, n + 1.0]}, curve="rank", at=n)
        for n in (4, 8)
    ]
    nothing = Figure("memory", notes={"MB": 1})
    for name in ("one.svg", "two.svg"):
        plot([bars, *points, nothing], tmp_path / name, "some processor")
    drawn = (tmp_path / "one.svg").read_text()
    assert drawn == (tmp_path / "two.svg").read_text()
    assert all(word in drawn for word in ("a load", "PEFT", "by rank", "some processor"))


def make_harness(root: Path, *, rounds: int = 1) -> Harness:
    return Harness(CPU, CpuClock(), root, rounds, 1, TINY, TINY, TINY, "eager")
