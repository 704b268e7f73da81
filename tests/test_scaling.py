"""Scaling is alpha / r (or alpha / sqrt(r)) of the file, per module, and never compounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from toys import (
    TOY_MODULES,
    Snapshot,
    expected_toy,
    pairs,
    refusal,
    scaling_in,
    slot_buffers,
    tensors_of,
    toy,
    toy_folder,
    toy_input,
    write_folder,
)

from lora_slots import (
    AdapterFileError,
    LoadReport,
    SlotManager,
    UnsupportedAdapterError,
    inspect_adapter,
    read_adapter,
)


def load_toy(
    ranks: Mapping[str, int], config: Mapping[str, Any] | None, *, max_rank: int = 8
) -> tuple[nn.Module, LoadReport]:
    model = toy()
    manager = SlotManager(model, max_rank=max_rank)
    return model, manager.load(read_adapter(tensors_of(pairs(ranks)), config))


def everywhere(rank: int) -> dict[str, int]:
    return dict.fromkeys(TOY_MODULES, rank)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"r": 64, "lora_alpha": 16, "use_rslora": True}, 2.0),
        ({"r": 64, "lora_alpha": 16}, 0.25),
        ({"r": 1, "lora_alpha": 1, "use_rslora": True}, 1.0),
        ({"r": 4, "lora_alpha": -8}, -2.0),
        ({"r": 1, "lora_alpha": 1536}, 1536.0),
        ({"r": 8, "lora_alpha": 0.1}, 0.0125),
        ({"r": 4, "lora_alpha": 0}, 0.0),
        ({"r": 16}, 0.5),  # PEFT's default alpha is 8
        ({}, 1.0),  # and its default rank is 8
    ],
)
def test_scaling_is_what_peft_computes_from_the_config(
    config: dict[str, Any], expected: float
) -> None:
    rank = config.get("r", 8)
    model, report = load_toy(everywhere(rank), config, max_rank=64)
    assert set(report.scaling.values()) == {expected}
    with torch.no_grad():
        theirs = get_peft_model(toy(), LoraConfig(**config, target_modules=["q_proj", "v_proj"]))
    for name, peft_layer in theirs.base_model.model.named_modules():
        if name in TOY_MODULES:
            layer = model.get_submodule(name)
            assert scaling_in(layer, rank) == torch.tensor(peft_layer.scaling["default"]).item()
            assert peft_layer.scaling["default"] == expected


def test_alpha_0_in_a_config_means_that_the_output_is_the_base_models() -> None:
    model, report = load_toy(everywhere(4), {"r": 4, "lora_alpha": 0})
    assert set(report.scaling.values()) == {0.0}
    assert torch.equal(model(toy_input()), toy()(toy_input()))


@pytest.mark.parametrize("first", ["q_proj", "v_proj"])
def test_without_any_alpha_scaling_is_1_whatever_the_ranks_and_the_order_of_keys(
    first: str,
) -> None:
    ranks = {name: 2 if "q_proj" in name else 8 for name in TOY_MODULES}
    ordered = dict(sorted(ranks.items(), key=lambda item: not item[0].endswith(first)))
    model, report = load_toy(ordered, None)
    assert report.scaling == dict.fromkeys(TOY_MODULES, 1.0)
    for name, rank in ranks.items():
        assert scaling_in(model.get_submodule(name), rank) == 1.0
    expected = expected_toy(toy(), toy_input(), pairs(ordered), report.scaling)
    torch.testing.assert_close(model(toy_input()), expected, rtol=1e-5, atol=1e-4)


RANKS = {TOY_MODULES[0]: 5, TOY_MODULES[1]: 7, TOY_MODULES[2]: 1, TOY_MODULES[3]: 1}


def alpha_tensors(
    alphas: Mapping[str, Any], prefix: str = "base_model.model."
) -> dict[str, Tensor]:
    return {f"{prefix}{module}.alpha": torch.tensor(alpha) for module, alpha in alphas.items()}


@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
def test_every_module_has_its_own_rank_and_alpha_tensor(prefix: str, tmp_path: Path) -> None:
    alphas = {TOY_MODULES[0]: 5.0, TOY_MODULES[1]: [3.5], TOY_MODULES[2]: 1, TOY_MODULES[3]: -2.0}
    both = pairs(RANKS)
    path = write_folder(
        tmp_path / "a", tensors_of(both, prefix) | alpha_tensors(alphas, prefix), None
    )
    model = toy()
    report = SlotManager(model, max_rank=8).load(path)
    assert report.scaling == dict(zip(TOY_MODULES, [1.0, 0.5, 1.0, -2.0], strict=True))
    assert inspect_adapter(path).scaling == report.scaling
    expected = expected_toy(toy(), toy_input(), both, report.scaling)
    torch.testing.assert_close(model(toy_input()), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("use_rslora", "expected"), [(False, 2.0), (True, 4.0)])
def test_an_alpha_tensor_beats_the_config_and_keeps_its_rslora(
    use_rslora: bool, expected: float
) -> None:
    tensors = tensors_of(pairs(everywhere(4)))
    tensors |= alpha_tensors({TOY_MODULES[0]: 8.0})
    model = toy()
    config = {"r": 4, "lora_alpha": 100, "use_rslora": use_rslora}
    report = SlotManager(model, max_rank=8).load(read_adapter(tensors, config))
    assert report.scaling[TOY_MODULES[0]] == expected
    assert report.scaling[TOY_MODULES[1]] == (50.0 if use_rslora else 25.0)


NAN = float("nan")


@pytest.mark.parametrize(
    ("config", "alphas", "message"),
    [
        ({"lora_alpha": NAN}, {}, "alpha must be .*finite.*, got nan for 'lora_alpha'"),
        ({"lora_alpha": float("inf")}, {}, "alpha must be .*finite.*, got inf"),
        ({"lora_alpha": 10**400}, {}, "alpha must be .*finite"),
        ({"lora_alpha": 1e300}, {}, "finite"),
        ({}, {TOY_MODULES[0]: 1e300}, "finite"),
        ({}, {TOY_MODULES[0]: 1 + 1j}, "must hold one .*number"),
        ({"lora_alpha": None}, {}, "alpha must be a number, got None"),
        ({"lora_alpha": "16"}, {}, "alpha must be a number, got '16'"),
        ({"alpha_pattern": {"q_proj": NAN}}, {}, "must be .*finite.*, got nan for 'q_proj'"),
        ({"alpha_pattern": {"q_proj": "a"}}, {}, "must be a number, got 'a' for 'q_proj'"),
        ({"alpha_pattern": {"q_proj(": 2}}, {}, r"'q_proj\(', which is no valid regular"),
        ({"rank_pattern": {"q_proj": 4.5}}, {}, "whole number from 1, got 4.5 for 'q_proj'"),
        ({"rank_pattern": [4]}, {}, r"rank_pattern .* must be an object, got \[4\]"),
        ({"r": 0}, {}, "valid|whole number from 1"),
        ({"r": 8}, {}, "gives rank 8 to model.layers.0.q_proj, but its tensors have rank 4"),
        ({"rank_pattern": {"0.v_proj": 2}}, {}, "gives rank 2 to model.layers.0.v_proj, but"),
        ({}, {TOY_MODULES[0]: NAN}, r"got nan for 'base_model.model.model.layers.0.q_proj.alpha'"),
        ({}, {TOY_MODULES[0]: float("-inf")}, "alpha must be .*finite.*, got -inf"),
        ({}, {TOY_MODULES[0]: [1.0, 2.0]}, r"must hold one .*number, got .*shape \(2,\)"),
    ],
)
def test_ranks_and_alphas_without_meaning_are_refused_and_change_nothing(
    config: dict[str, Any], alphas: dict[str, Any], message: str
) -> None:
    tensors = tensors_of(pairs(everywhere(4))) | alpha_tensors(alphas)
    raw = read_adapter(tensors, {"r": 4, "lora_alpha": 8, **config})
    refusal(raw, AdapterFileError, message)


def test_an_alpha_beside_no_lora_tensors_is_refused_as_an_extra_and_changes_nothing() -> None:
    stray = alpha_tensors({"model.layers.0.k_proj": 1.0})
    raw = read_adapter(tensors_of(pairs(everywhere(4))) | stray, {"r": 4, "lora_alpha": 8})
    refusal(raw, UnsupportedAdapterError, "1 alpha without LoRA tensors .*k_proj.alpha")


def test_loading_the_same_file_again_changes_no_bit(tmp_path: Path) -> None:
    path = toy_folder(tmp_path / "a")
    model = toy()
    manager = SlotManager(model, max_rank=8)
    manager.load(path)
    once = Snapshot.of(manager, model)
    for _ in range(4):
        manager.load(path)
        once.assert_unchanged(manager, model)


@pytest.mark.parametrize(
    ("config", "weight", "expected"),
    [
        ({"r": 4, "lora_alpha": 8}, 0.5, 1.0),
        ({"r": 4, "lora_alpha": 8}, -1.5, -3.0),
        ({"r": 64, "lora_alpha": 16, "use_rslora": True}, 0.5, 1.0),
    ],
)
def test_a_weight_multiplies_the_adapters_own_scaling_and_never_compounds(
    config: dict[str, Any], weight: float, expected: float, tmp_path: Path
) -> None:
    model = toy()
    manager = SlotManager(model, max_rank=64)
    path = toy_folder(tmp_path / "a", config["r"], **config)
    manager.load(path, weight=weight)
    layers = [model.get_submodule(name) for name in TOY_MODULES]
    assert [scaling_in(layer, config["r"]) for layer in layers] == [expected] * 4
    for _ in range(10):
        manager.set_weight("default", weight)
        manager.set_adapters("default", weight)
        assert [scaling_in(layer, config["r"]) for layer in layers] == [expected] * 4
    manager.load(path)
    assert [scaling_in(layer, config["r"]) for layer in layers] == [expected] * 4
    manager.set_weight("default", 1)
    assert [scaling_in(layer, config["r"]) for layer in layers] == [expected / weight] * 4


def test_tensors_given_in_memory_stay_the_callers_own() -> None:
    tensors = tensors_of(pairs(everywhere(4)))
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    model = toy()
    manager = SlotManager(model, max_rank=4)
    manager.load(read_adapter(tensors, {"r": 4, "lora_alpha": 8}), weight=0.5)
    manager.set_weight("default", 3)
    assert all(torch.equal(tensors[key], before[key]) for key in before)
    loaded = Snapshot.of(manager, model)
    for tensor in tensors.values():
        tensor.fill_(float("nan"))
    loaded.assert_unchanged(manager, model)
    # Nor does the copy that a failing load would put back follow the caller's tensors.
    manager.set_weight("default", 2)
    manager.set_weight("default", 3)
    loaded.assert_unchanged(manager, model)


CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to bfloat16": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "double": lambda model: model.double(),
    "bfloat16 and back": lambda model: model.bfloat16().float(),
}


@pytest.mark.parametrize("cast", CASTS)
def test_scaling_stays_float32_and_exact_when_the_model_is_cast(cast: str, tmp_path: Path) -> None:
    # 0.1 / 3 has no exact value in any of these dtypes.
    model = toy()
    manager = SlotManager(model, max_rank=4)
    manager.load(toy_folder(tmp_path / "a", 3, lora_alpha=0.1))
    CASTS[cast](model)
    scalings = [b for name, b in slot_buffers(model).items() if name.endswith("scaling")]
    assert len(scalings) == len(TOY_MODULES)
    for name in TOY_MODULES:
        assert scaling_in(model.get_submodule(name), 3) == torch.tensor(0.1 / 3).item()
    manager.set_weight("default", 2)
    for name in TOY_MODULES:
        assert scaling_in(model.get_submodule(name), 3) == torch.tensor(0.2 / 3).item()
