"""The config settles ranks and scalings, wherever it is; what does not matter changes nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from adapter_files import SCALING_2, TENSORS, assert_loads_as, write_file
from toys import (
    TOY_MODULES,
    WEIGHTS,
    refusal,
    toy,
    write_folder,
)

from lora_slots import (
    AdapterFileError,
    SlotManager,
    read_adapter,
)
from lora_slots.reading.configs import SCALING_KEYS

CONFIG = "adapter_config.json"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not valid JSON"),
        (b"[1, 2]", "must be a JSON object, got list"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_damaged_config_is_refused_by_path(content: bytes, message: str, tmp_path: Path) -> None:
    path = write_folder(tmp_path / "a", TENSORS, SCALING_2)
    (path / CONFIG).write_bytes(content)
    refusal(path, AdapterFileError, f"{re.escape(str(path / CONFIG))} {message}")


@pytest.mark.parametrize("key", ["lora_adapter_metadata", "adapter_config"])
def test_the_config_may_be_in_the_metadata_of_the_file(key: str, tmp_path: Path) -> None:
    config = json.dumps({"r": 4, "lora_alpha": 12})
    assert_loads_as(write_file(tmp_path / "a.safetensors", TENSORS, {key: config}), 3.0)


def test_metadata_that_agrees_with_the_config_beside_it_is_fine(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "a", TENSORS, {**SCALING_2, "alpha_pattern": {}})
    inside = {"r": 4, "lora_alpha": 8, "alpha_pattern": None, "lora_dropout": 0.5}
    write_file(path / WEIGHTS, TENSORS, {"adapter_config": json.dumps(inside)})
    assert_loads_as(path, 2.0)


@pytest.mark.parametrize(
    ("key", "value"), list(zip(SCALING_KEYS, [8, 9, 9, {"a": 1}, {"a": 1}, True], strict=True))
)
def test_metadata_that_contradicts_the_config_beside_it_is_refused(
    key: str, value: Any, tmp_path: Path
) -> None:
    agreed = {
        **SCALING_2, "alpha": 8, "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False,
    }  # fmt: skip
    path = write_folder(tmp_path / "a", TENSORS, agreed)
    write_file(path / WEIGHTS, TENSORS, {"adapter_config": json.dumps({**agreed, key: value})})
    message = f"contradicts the {CONFIG} beside it: {key} is {re.escape(repr(value))} in its"
    refusal(path, AdapterFileError, message)


def test_metadata_for_components_that_no_tensor_belongs_to_is_refused(tmp_path: Path) -> None:
    metadata = {"lora_adapter_metadata": json.dumps({"unet.r": 4, "text_encoder.r": 8})}
    path = write_file(tmp_path / "a.safetensors", TENSORS, metadata)
    message = "is for unet, text_encoder, but the key of no tensor begins with that: base_model"
    refusal(path, AdapterFileError, message)


NOISE: list[dict[str, Any]] = [
    {"brand_new_option": None},
    {"brand_new_option": False},
    {"lora_dropout": 0.5},
    {"target_modules": ["k_proj"]},
    {"target_modules": r".*\.nothing"},
    {"target_modules": "all-linear"},
    {"target_modules": None},
    {"layers_to_transform": [0], "layers_pattern": "layers"},
    {"exclude_modules": ["v_proj"]},
    {"inference_mode": True},
    {"inference_mode": False},
    {"fan_in_fan_out": True},
    {"init_lora_weights": "gaussian"},
    {"task_type": "CAUSAL_LM", "revision": "main", "peft_version": "99.0", "auto_mapping": {}},
]


@pytest.mark.parametrize("noise", NOISE, ids=str)
def test_config_keys_that_do_not_matter_change_nothing(
    noise: dict[str, Any], tmp_path: Path
) -> None:
    assert_loads_as(write_folder(tmp_path / "a", TENSORS, {**SCALING_2, **noise}), 2.0)


def test_an_unknown_config_key_that_is_set_is_warned_of_by_name(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "a", TENSORS, {**SCALING_2, "brand_new_option": True})
    with pytest.warns(UserWarning, match="keys that are not known here .*: brand_new_option"):
        assert_loads_as(path, 2.0)


def test_hotswaps_between_configs_that_differ_in_everything_work(tmp_path: Path) -> None:
    model = toy()
    manager = SlotManager(model, max_rank=4)
    for number, (config, scaling) in enumerate(
        [
            ({"use_rslora": True}, 4.0),
            ({"lora_dropout": 0.1, "alpha_pattern": {"_proj": 2, "v_proj|q_proj": 4}}, 1.0),
            ({"lora_dropout": 0.0, "target_modules": ["q_proj"]}, 2.0),
        ]
    ):
        path = write_folder(tmp_path / str(number), TENSORS, {**SCALING_2, **config})
        if number == 1:
            with pytest.warns(UserWarning, match="'_proj'"):
                report = manager.load(path)
        else:
            report = manager.load(path)
        assert report.scaling == dict.fromkeys(TOY_MODULES, scaling)


def named_toy(name: str) -> Any:
    model = toy()
    model.config = SimpleNamespace(_name_or_path=name)
    return model


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("me/toy", "me/toy"),
        ("me/toy", "Me/Toy"),
        ("me/toy", None),
        ("me/toy", "/home/me/toy"),
        ("/home/me/toy", "you/other"),
        ("", "you/other"),
    ],
)
def test_a_base_model_that_may_be_the_same_is_not_warned_of(ours: str, theirs: str | None) -> None:
    raw = read_adapter(TENSORS, {**SCALING_2, "base_model_name_or_path": theirs})
    report = SlotManager(named_toy(ours), max_rank=4).load(raw)
    assert report.scaling == dict.fromkeys(TOY_MODULES, 2.0)


def test_an_adapter_of_another_base_model_loads_with_a_warning_that_names_both() -> None:
    raw = read_adapter(TENSORS, {**SCALING_2, "base_model_name_or_path": "you/other"})
    with pytest.warns(UserWarning, match="trained on you/other, but this model is me/toy"):
        report = SlotManager(named_toy("me/toy"), max_rank=4).load(raw)
    assert report.scaling == dict.fromkeys(TOY_MODULES, 2.0)
