"""rank_pattern and alpha_pattern mean what they mean to PEFT, on a load and on a hotswap."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from toys import pairs, peft_model, scaling_in, tensors_of, write_folder

from lora_slots import SlotManager, read_adapter


class Many(nn.Module):
    """A root ``lin0`` and ``model.layers.{0..11}.lin0``."""

    def __init__(self) -> None:
        super().__init__()
        self.lin0 = nn.Linear(8, 6, bias=False)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(nn.Module() for _ in range(12))
        for layer in self.model.layers:
            layer.lin0 = nn.Linear(8, 6, bias=False)


ROOT, LAYERS = "lin0", tuple(f"model.layers.{i}.lin0" for i in range(12))
ALL = (ROOT, *LAYERS)


@pytest.mark.parametrize(
    ("alpha_pattern", "rank_pattern", "expected"),
    [
        ({"lin0": 100}, {}, dict.fromkeys(ALL, 25.0)),
        ({"^lin0": 100}, {}, {ROOT: 25.0}),
        ({"^model.layers.0.lin0": 100}, {}, {LAYERS[0]: 25.0}),
        ({"1.lin0": 100}, {}, {LAYERS[1]: 25.0}),
        ({"0.lin0": 100}, {}, {LAYERS[0]: 25.0}),
        ({"layers.1.lin0": 40, "lin0": 100}, {}, dict.fromkeys(ALL, 25.0) | {LAYERS[1]: 10.0}),
        ({"lin0": 100, "layers.1.lin0": 40}, {}, dict.fromkeys(ALL, 25.0)),
        (
            {"layers.1.lin0": 9},
            {"layers.1.lin0": 3, "layers.2.lin0": 16},
            {LAYERS[1]: 3.0, LAYERS[2]: 0.5},
        ),
    ],
    ids=str,
)
def test_pattern_keys_match_whole_names_or_their_ends_and_the_first_wins(
    alpha_pattern: dict[str, float], rank_pattern: dict[str, int], expected: dict[str, float]
) -> None:
    config = {
        "r": 4, "lora_alpha": 8, "alpha_pattern": alpha_pattern, "rank_pattern": rank_pattern,
    }  # fmt: skip
    ranks = dict.fromkeys(ALL, 4)
    if rank_pattern:
        ranks |= {LAYERS[1]: 3, LAYERS[2]: 16}
    model = Many()
    report = SlotManager(model, max_rank=16).load(read_adapter(tensors_of(pairs(ranks)), config))
    assert report.scaling == dict.fromkeys(ALL, 2.0) | expected
    for name in ALL:
        assert scaling_in(model.get_submodule(name), ranks[name]) == report.scaling[name]
    theirs = get_peft_model(Many(), LoraConfig(**config, target_modules=["lin0"]))
    layers = {name: theirs.base_model.model.get_submodule(name) for name in ALL}
    assert report.scaling == {name: layer.scaling["default"] for name, layer in layers.items()}


@pytest.mark.parametrize("key", ["base_model.model.model.layers.1.lin0", "in0", "layers.12.lin0"])
def test_pattern_keys_that_match_nothing_change_nothing_and_are_warned_of(key: str) -> None:
    raw = read_adapter(
        tensors_of(pairs(dict.fromkeys(ALL, 4))),
        {"r": 4, "lora_alpha": 8, "alpha_pattern": {key: 100}},
    )
    manager = SlotManager(Many(), max_rank=4)
    with pytest.warns(UserWarning, match=f"alpha_pattern .*match no module.*{key!r}"):
        report = manager.load(raw)
    assert report.scaling == dict.fromkeys(ALL, 2.0)


@pytest.mark.parametrize("key", ["lin1", "^lin1"])
def test_a_hotswap_divides_by_the_rank_that_the_pattern_gives(key: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleDict({"lin0": nn.Linear(8, 6), "lin1": nn.Linear(8, 6)})

    path = write_folder(
        tmp_path / "patterned", tensors_of(pairs({"lin0": 3, "lin1": 4})),
        {"r": 3, "lora_alpha": 9, "rank_pattern": {key: 4}, "target_modules": ["lin0", "lin1"]},
    )  # fmt: skip
    model = build()
    manager = SlotManager(model, max_rank=8)
    manager.load(read_adapter(tensors_of(pairs({"lin0": 8, "lin1": 8}))))
    report = manager.load(path)
    assert report.scaling == {"lin0": 3.0, "lin1": 2.25}
    assert (scaling_in(model.lin0, 3), scaling_in(model.lin1, 4)) == (3.0, 2.25)
    theirs = peft_model(build(), path).base_model.model
    assert [theirs[name].scaling["default"] for name in ("lin0", "lin1")] == [3.0, 2.25]
