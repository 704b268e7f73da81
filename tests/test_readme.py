"""What the README shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import TINY, TOKENS, write_adapter

from lora_slots import SlotManager

ROOT = Path(__file__).resolve().parents[1]


def example() -> str:
    match = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert match is not None
    return match[1]


def test_the_readme_example_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is a tiny one of the same architecture, and so are the adapters at its paths."""
    tiny = TINY["llama"]
    for name in re.findall(r"examples/adapters/(\w+)", example()):
        write_adapter(
            tmp_path / "examples" / "adapters" / name, tiny.build(), r=4, target_modules=["q_proj"]
        )
    compile_ = torch.compile
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "transformers.AutoModelForCausalLM.from_pretrained", lambda name: tiny.build()
    )
    monkeypatch.setattr(torch, "compile", lambda model: compile_(model, backend="eager"))
    names: dict[str, Any] = {}
    exec(compile(example(), "README.md", "exec"), names)
    assert names["manager"] is SlotManager.of(names["model"])
    assert names["manager"].active_adapters == ("pirate",)
    with torch.no_grad():
        adapted = names["model"](TOKENS).logits
    assert not torch.allclose(adapted, tiny.run(tiny.build()))


def test_the_readme_example_is_about_ten_lines_long() -> None:
    assert len([line for line in example().splitlines() if line]) <= 10


def test_every_public_name_the_readme_mentions_exists() -> None:
    table = (ROOT / "README.md").read_text().split("## From PEFT and diffusers")[1]
    ours = [row.split("|")[-2] for row in table.splitlines() if row.startswith("| `")]
    called = re.findall(r"`(\w+)", " ".join(ours))
    assert len(ours) == 11
    assert all(name == "SlotManager" or hasattr(SlotManager, name) for name in called)
