"""Every example runs; what takes minutes under inductor runs eagerly or smaller here."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import bench
import pytest
import quickstart
import torch
import train_adapters
from benchmarks import route, startup

pytestmark = pytest.mark.slow

bench_adapters = quickstart.ADAPTERS


def test_the_quickstart_shows_right_answers_and_no_recompile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The graphs are run eagerly, so that the compile takes seconds; everything else is real."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda m, **kw: compile_(m, backend="eager", **kw))
    monkeypatch.setattr(quickstart, "NEW_TOKENS", 3)
    with quickstart.console.capture() as capture:
        rows, peft_rows = quickstart.main()
    assert [row.graphs for row in rows] == [0] * 7
    assert all(row.difference < 1e-3 for row in rows)
    assert rows[-1].difference == 0
    assert [row.rank for row in rows[1:5]] == ["4", "8", "16", "32"]
    assert any("refused" in row for row in peft_rows)
    assert all(name in capture.get() for name in quickstart.NAMES)


@pytest.mark.parametrize(
    ("part", "figures"),
    [("swap", 18), ("switch", 1), ("forward", 7), ("route", 2), ("memory", 2), ("startup", 2)],
)
def test_the_benchmark_compares_outputs_and_writes_json(
    part: str, figures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = {"layers": 1, "hidden": 64, "mlp": 96}
    monkeypatch.setattr(bench, "LARGE", bench.Shape(**tiny, dtype=torch.bfloat16))
    monkeypatch.setattr(bench, "FORWARD", bench.Shape(**tiny, dtype=torch.float32))
    monkeypatch.setattr(bench, "ROUTE", bench.Shape(**tiny, dtype=torch.float32))
    monkeypatch.setattr(route, "NEW_LISTS", route.NEW_LISTS[:1])
    monkeypatch.setattr(startup, "COMPILES", 1)
    # Eagerly, so that the compile takes seconds; everything else is real.
    monkeypatch.setattr(bench, "Harness", partial(bench.Harness, backend="eager"))
    output = tmp_path / "bench.json"
    few = ["--rounds", "2", "--swaps", "30", "--json", str(output)]
    monkeypatch.setattr(sys, "argv", ["bench.py", part, *few])
    bench.main()
    result = json.loads(output.read_text())
    assert result["environment"]["torch"] == torch.__version__
    assert part in result["environment"]["command"]
    assert len(result["figures"]) == figures
    times = [each for figure in result["figures"] for each in figure["times"].values()]
    assert all(middle > 0 for middle, _, _ in times)
    notes = {name: n for figure in result["figures"] for name, n in figure["notes"].items()}
    graphs = {name: n for name, n in notes.items() if "graphs" in name and "PEFT" not in name}
    assert set(graphs.values()) <= {0}
    assert bool(graphs) == (part in ("forward", "route", "memory"))


def test_the_benchmark_takes_the_users_own_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [str(bench_adapters / name) for name in ("pirate", "robot")]
    output = tmp_path / "bench.json"
    few = ["--rounds", "2", "--json", str(output)]
    monkeypatch.setattr(sys, "argv", ["bench.py", "swap", *own, *few])
    bench.main()
    (figure,) = json.loads(output.read_text())["figures"]
    assert figure["what"] == "load of 2 adapters in turn"
    assert figure["times"].keys() == {
        "lora_slots",
        "lora_slots, cached",
        "PEFT load, set, delete",
        "memcpy of its bytes",
    }


def test_an_adapter_can_be_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One epoch over four of the texts: the whole path, not the quality."""
    recipe = train_adapters.Recipe(r=4, lora_alpha=8, target_modules=("q_proj",), epochs=1)
    monkeypatch.setitem(train_adapters.RECIPES, "pirate", recipe)
    read = train_adapters.read_texts
    monkeypatch.setattr(train_adapters, "read_texts", lambda path: read(path)[:4])
    monkeypatch.setattr(sys, "argv", ["train_adapters.py", "pirate", "--output", str(tmp_path)])
    train_adapters.main()
    assert {file.name for file in (tmp_path / "pirate").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
