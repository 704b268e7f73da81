"""What slots do not hold is refused by name; what may be left out is left out only if asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftType
from torch import Tensor, nn
from toys import (
    TOY_MODULES,
    Snapshot,
    expected_toy,
    pairs,
    refusal,
    tensors_of,
    toy,
    toy_input,
    write_adapter,
)

from lora_slots import (
    SlotManager,
    TargetMismatchError,
    UnsupportedAdapterError,
    read_adapter,
)
from lora_slots.reading.configs import SCALING_KEYS
from lora_slots.resolve.settings import _FEATURES, WHOLE_TENSOR_KEYS

PAIRS = pairs(dict.fromkeys(TOY_MODULES, 4), seed=1)
CONFIG = {"r": 4, "lora_alpha": 8}
FIRST = f"base_model.model.{TOY_MODULES[0]}"


def refuse(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], message: str, *, strict: bool = True
) -> None:
    refusal(read_adapter(tensors, config), UnsupportedAdapterError, message, strict=strict)


BOTH_MODES = pytest.mark.parametrize("strict", [True, False])

VALUES: dict[str, Any] = {
    "alora_invocation_tokens": [1, 2],
    "layer_replication": [[0, 1], [0, 2]],
    "target_parameters": ["experts.weight"],
    "arrow_config": {"top_k": 2},
    "kasa_config": {"beta": 1},
    "monteclora_config": {"samples": 2},
}


@BOTH_MODES
@pytest.mark.parametrize(("key", "feature"), _FEATURES.items())
def test_a_config_feature_that_changes_the_maths_is_refused_by_name(
    key: str, feature: str, strict: bool
) -> None:
    value = VALUES.get(key, True)
    message = f"uses {feature} \\({key}={re.escape(repr(value))}\\), which is not applied here"
    refuse(tensors_of(PAIRS), {**CONFIG, key: value}, message, strict=strict)


@pytest.mark.parametrize("value", [None, False, [], {}])
@pytest.mark.parametrize("key", [*_FEATURES, "modules_to_save", "trainable_token_indices"])
def test_a_config_feature_that_is_off_is_fine(key: str, value: Any) -> None:
    raw = read_adapter(tensors_of(PAIRS), {**CONFIG, key: value})
    report = SlotManager(toy(), max_rank=4).load(raw)
    assert report.scaling == dict.fromkeys(TOY_MODULES, 2.0)


def test_no_other_key_of_pefts_own_config_matters() -> None:
    config = json.loads(json.dumps(LoraConfig().to_dict(), default=list))
    meaningful = {
        *_FEATURES, *WHOLE_TENSOR_KEYS, *SCALING_KEYS, "peft_type", "init_lora_weights",
        "trainable_token_indices",
    }  # fmt: skip
    # A key that was not known would be warned of, and warnings are errors here.
    meaningful |= {"use_dora", "lora_bias"}  # their tensors are applied
    noise = {key: value or "set" for key, value in config.items() if key not in meaningful}
    assert "lora_dropout" in noise
    raw = read_adapter(tensors_of(PAIRS), {**config, **noise, **CONFIG})
    report = SlotManager(toy(), max_rank=4).load(raw)
    assert report.scaling == dict.fromkeys(TOY_MODULES, 2.0)


LOW_RANK = (PeftType.LORA, PeftType.LOHA, PeftType.LOKR)


@BOTH_MODES
@pytest.mark.parametrize("peft_type", [t.value for t in PeftType if t not in LOW_RANK])
def test_other_peft_types_are_refused_by_name(peft_type: str, strict: bool) -> None:
    message = f"has the peft_type {peft_type}; only LORA"
    refuse(tensors_of(PAIRS), {**CONFIG, "peft_type": peft_type}, message, strict=strict)


@BOTH_MODES
@pytest.mark.parametrize(
    "init", ["pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga", "brand_new"]
)
def test_initialisations_that_changed_the_base_are_refused_unless_converted(
    init: str, strict: bool
) -> None:
    config = {**CONFIG, "init_lora_weights": init}
    message = f"initialised by '{init}', which changes the base weight, .*save_pretrained"
    refuse(tensors_of(PAIRS), config, message, strict=strict)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_pefts_own_unconverted_files_are_refused(init: str, tmp_path: Path) -> None:
    path = write_adapter(
        tmp_path / init, toy(), r=4, init_lora_weights=init, target_modules=["q_proj"]
    )
    # PEFT writes True once it has converted, and the name until then.
    assert json.loads((path / "adapter_config.json").read_text())["init_lora_weights"] == init
    with pytest.raises(UnsupportedAdapterError, match=f"initialised by '{init}'"):
        SlotManager(toy(), max_rank=4).load(path)


# Tensors that change the maths


@BOTH_MODES
@pytest.mark.parametrize(
    ("key", "shape", "feature"),
    [
        (f"{FIRST}.lora_magnitude_vector", (6,), "has DoRA at .* dora=True"),
        (f"{FIRST}.lora_magnitude_vector.weight", (6,), "has DoRA at .* dora=True"),
        (f"{FIRST}.lora_magnitude_vector.default.weight", (6,), "has DoRA at .* dora=True"),
        (f"{FIRST}.lora_B.bias", (6,), "has a bias at .* bias=True"),
        (f"{FIRST}.lora_B.default.bias", (6,), "has a bias at .* bias=True"),
        (f"{FIRST}.lora_diag", (4,), f"uses KaSA, as its key '{FIRST}.lora_diag' shows"),
    ],
)
def test_a_tensor_that_changes_the_maths_is_refused_by_name(
    key: str, shape: tuple[int, ...], feature: str, strict: bool
) -> None:
    refuse({**tensors_of(PAIRS), key: torch.ones(shape)}, CONFIG, feature, strict=strict)


def test_pefts_own_dora_file_is_refused_even_without_its_config(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "dora", toy(), r=4, use_dora=True, target_modules=["q_proj"])
    (path / "adapter_config.json").unlink()
    with pytest.raises(UnsupportedAdapterError, match=r"has DoRA at .* dora=True"):
        SlotManager(toy(), max_rank=4).load(path, strict=False)


# Whole tensors that ride along

ONES, WEIGHT = torch.ones(6), torch.ones(6, 8)
EXTRAS: dict[str, tuple[dict[str, Tensor], dict[str, Any], str]] = {
    "modules_to_save": (
        {"base_model.model.head.weight": WEIGHT, "base_model.model.norm.weight": ONES},
        {"modules_to_save": ["head", "norm"]},
        r"modules_to_save=\['head', 'norm'\]; 2 full weight "
        r"\(base_model.model.head.weight, base_model.model.norm.weight\)",
    ),
    "trained bias": (
        {f"{FIRST}.base_layer.bias": ONES}, {"bias": "lora_only"},
        r"bias='lora_only'; 1 bias \(.*q_proj.base_layer.bias\)",
    ),
    "trained bias, old style": (
        {f"{FIRST}.bias": ONES}, {"bias": "all"}, r"bias='all'; 1 bias \(.*q_proj.bias\)",
    ),
    "base weight that is not the model's": (
        {f"{FIRST}.base_layer.weight": WEIGHT}, {}, r"1 copy of a base weight \(.*\)",
    ),
    "base weight of another layer": (
        {"base_model.model.head.base_layer.weight": WEIGHT}, {}, r"1 copy of a base weight \(.*\)",
    ),
    "unknown LoRA tensor": (
        {f"{FIRST}.lora_C.weight": ONES}, {}, r"1 LoRA tensor of unknown meaning \(.*\)",
    ),
    "several kinds": (
        {f"{FIRST}.bias": ONES, "a.weight": ONES, "b.weight": ONES, "c": ONES, "d": ONES}, {},
        r"1 bias \(.*\); 4 full weight \(a.weight, b.weight, c, \.\.\.\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("extra", EXTRAS)
def test_whole_tensors_are_refused_by_kind_and_count(extra: str) -> None:
    tensors, config, kinds = EXTRAS[extra]
    remedy = r"(build the SlotManager with bias=True, or )?pass strict=False"
    message = f"asks for more than slots can hold: {kinds}; {remedy}"
    refuse({**tensors_of(PAIRS), **tensors}, {**CONFIG, **config}, message)


@pytest.mark.parametrize("extra", EXTRAS)
def test_whole_tensors_are_left_out_and_reported_if_not_strict(extra: str) -> None:
    tensors, config, _ = EXTRAS[extra]
    model = toy()
    raw = read_adapter({**tensors_of(PAIRS), **tensors}, {**CONFIG, **config})
    report = SlotManager(model, max_rank=4).load(raw, strict=False)
    assert {key for key, _ in report.skipped} == tensors.keys()
    assert all(reason in str(report) for _, reason in report.skipped)
    expected = expected_toy(toy(), toy_input(), PAIRS, dict.fromkeys(TOY_MODULES, 2.0))
    torch.testing.assert_close(model(toy_input()), expected, rtol=1e-5, atol=1e-4)


def test_a_feature_without_its_tensors_is_refused_too() -> None:
    config = {**CONFIG, "modules_to_save": ["head"]}
    message = r"modules_to_save=\['head'\]; pass"
    refuse(tensors_of(PAIRS), config, message)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_of_the_base_weight_that_equals_it_is_ignored_and_reported(
    dtype: torch.dtype,
) -> None:
    model = toy().to(dtype)
    key = f"{FIRST}.base_layer.weight"
    # Saved in float32 even where the model runs in bfloat16.
    tensors = {**tensors_of(PAIRS), key: toy().model.layers[0].q_proj.weight.detach()}
    report = SlotManager(model, max_rank=4).load(read_adapter(tensors, CONFIG))
    assert report.skipped == ((key, "equal to the model's own"),)


# Layers that are not among the targets, or cannot be


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.conv = nn.Conv2d(7, 5, 3)
        self.up = nn.ConvTranspose2d(5, 7, 3)
        self.lin = nn.Linear(8, 6)


@pytest.mark.parametrize(
    ("target", "kind"), [("embed", "Embedding"), ("conv", "Conv2d")], ids=["embed", "conv"]
)
@pytest.mark.parametrize("beside", [[], ["lin"]], ids=["alone", "beside a linear layer"])
# PEFT says that it will store the embeddings, too.
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_adapters_on_layers_that_are_no_targets_are_refused_with_the_remedy(
    target: str, kind: str, beside: list[str], tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "a", Mixed(), r=2, target_modules=[target, *beside])
    model = Mixed()
    manager = SlotManager(model, max_rank=4)
    before = Snapshot.of(manager, model)
    message = f"is {kind}, not one of the target modules.*build the SlotManager with target_modules"
    with pytest.raises(TargetMismatchError, match=message):
        manager.load(path)
    before.assert_unchanged(manager, model)
    if beside:
        report = manager.load(path, strict=False)
        assert report.modules == ("lin",)
        assert report.skipped
        assert all(target in key and kind in reason for key, reason in report.skipped)


def test_adapters_on_layers_that_take_none_are_refused_by_kind() -> None:
    tensors = {
        "up.lora_A.weight": torch.ones(2, 5, 3, 3),
        "up.lora_B.weight": torch.ones(7, 2, 1, 1),
    }
    manager = SlotManager(Mixed(), max_rank=4)
    with pytest.raises(UnsupportedAdapterError, match="ConvTranspose2d layers such as up have no"):
        manager.load(read_adapter(tensors))
