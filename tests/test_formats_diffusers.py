"""What diffusers saved loads into whatever components the model has, with each one's own config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from adapter_files import write_file
from diffusers_files import CONFIGS, PIPE, PLAIN, Written, run
from format_files import Alphas, dotted, kohya
from toys import Snapshot

from lora_slots import (
    AdapterFileError,
    SlotManager,
    TargetMismatchError,
    inspect_adapter,
    read_adapter,
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("rich"), CONFIGS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("plain"), PLAIN)


@pytest.mark.parametrize(("ours", "other"), [("unet", "text_encoder"), ("text_encoder", "unet")])
def test_one_component_takes_its_part_of_what_diffusers_saved_and_reports_the_rest(
    ours: str, other: str, written: Written
) -> None:
    report = written.assert_loads(written.folder, ours)
    names = {f"{other}.{module}" for module in written.pairs(other)}
    assert set(report.skipped) == {(name, f"other_component: {other}") for name in names}
    assert set(report.modules) == {m.removeprefix("text_model.") for m in written.pairs(ours)}


def test_each_component_has_the_config_that_the_header_gives_it(written: Written) -> None:
    pipe = PIPE.build()
    parts = {name: getattr(pipe, name) for name in CONFIGS}
    report = SlotManager(parts, max_rank=8).load(written.folder)
    assert report.skipped == ()
    for path, scaling in report.scaling.items():
        if path.startswith("text_encoder."):
            assert scaling == 1.0  # 2 / sqrt(4)
        elif path.endswith("attn1.to_q"):
            assert scaling == -1.0
        else:
            assert scaling == pytest.approx(1.2 if path.endswith("to_v") else 2.0)
    for name, part in parts.items():
        torch.testing.assert_close(run(name, part), written.answers[name], rtol=1e-5, atol=1e-5)


def test_inspecting_applies_each_components_config_from_the_header(written: Written) -> None:
    info = inspect_adapter(written.folder)
    assert info.format == "diffusers"
    assert {rank for name, rank in info.ranks.items() if name.endswith("to_v")} == {5}
    scalings = {n: s for n, s in info.scaling.items() if n.startswith("text_encoder.")}
    assert set(scalings.values()) == {1.0}
    assert {s for n, s in info.scaling.items() if n.endswith("attn1.to_q")} == {-1.0}


def test_what_a_model_saves_by_itself_loads_with_its_own_config(tmp_path: Path) -> None:
    torch.manual_seed(2)
    from peft import LoraConfig

    unet = PIPE.build().unet
    unet.add_adapter(LoraConfig(init_lora_weights=False, **CONFIGS["unet"]))
    unet.save_lora_adapter(tmp_path)
    expected, fresh = run("unet", unet), PIPE.build().unet
    report = SlotManager(fresh, max_rank=8).load(tmp_path)
    torch.testing.assert_close(run("unet", fresh), expected, rtol=1e-5, atol=1e-5)
    assert report.skipped == ()


def test_a_file_without_alpha_and_metadata_has_scaling_1(plain: Written, tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.safetensors", plain.tensors)
    report = plain.assert_loads(path, "unet")
    assert set(report.scaling.values()) == {1.0}


# What contradicts


def unet(written: Written, alpha: Alphas = None) -> dict[str, torch.Tensor]:
    return dotted(written.pairs("unet"), alpha, prefix="unet.")


def test_an_alpha_tensor_beats_the_header(written: Written, tmp_path: Path) -> None:
    module = next(m for m in written.pairs("unet") if m.endswith("to_v"))
    tensors = unet(written, {module: 20})
    config = {**PLAIN["unet"], "r": 3, "rank_pattern": {"to_v": 5}}
    header = {"lora_adapter_metadata": json.dumps({f"unet.{k}": v for k, v in config.items()})}
    path = write_file(tmp_path / "a.safetensors", tensors, header)
    report = SlotManager(PIPE.build().unet, max_rank=8).load(path)
    assert report.scaling[module] == 4.0
    others = {s for path, s in report.scaling.items() if path.endswith("to_v") and path != module}
    assert others == {0.8}


def test_a_header_that_contradicts_the_config_beside_it_is_refused(
    plain: Written, tmp_path: Path
) -> None:
    header = {"lora_adapter_metadata": json.dumps({"unet.r": 4, "unet.lora_alpha": 4})}
    path = write_file(tmp_path / "a.safetensors", unet(plain), header)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8}))
    with pytest.raises(AdapterFileError, match="lora_alpha is 4 in its metadata and 8 there"):
        read_adapter(path)


def test_the_config_of_a_component_must_fit_its_tensors(plain: Written, tmp_path: Path) -> None:
    header = {"lora_adapter_metadata": json.dumps({"unet.r": 2, "unet.lora_alpha": 4})}
    path = write_file(tmp_path / "a.safetensors", unet(plain), header)
    with pytest.raises(AdapterFileError, match=r"gives rank 2 to .* have rank 4"):
        SlotManager(PIPE.build().unet, max_rank=8).load(path)


# What is for other components


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "prefix",
    ["text_encoder.", "text_encoder_2.", "lora_te_", "lora_te1_", "lora_te2_", "lora_te3_"],
)
def test_keys_of_other_components_are_no_error_unless_nothing_else_is_left(
    prefix: str, strict: bool, plain: Written
) -> None:
    both = plain.pairs("text_encoder")
    spell = kohya if prefix.startswith("lora_") else dotted
    others = spell(both, prefix=prefix)
    module = PIPE.build().unet
    manager = SlotManager(module, max_rank=8)
    report = manager.load(read_adapter({**unet(plain), **others}), strict=strict)
    assert len(report.skipped) == len(both)
    assert all(reason.startswith("other_component: text_encoder") for _, reason in report.skipped)
    before = Snapshot.of(manager, module)
    with pytest.raises(
        TargetMismatchError, match=r"match no target module .* target modules are"
    ) as e:
        manager.load(read_adapter(others), strict=strict)
    assert str(e.value).count("q_proj") + str(e.value).count("out_proj") >= 3
    before.assert_unchanged(manager, module)


def test_two_text_encoders_that_fit_one_model_alike_are_refused(plain: Written) -> None:
    both = plain.pairs("text_encoder")
    raw = read_adapter({**kohya(both, prefix="lora_te1_"), **kohya(both, prefix="lora_te2_")})
    message = r"has for text_encoder and for text_encoder_2 fits this model alike; .* by name"
    with pytest.raises(TargetMismatchError, match=message):
        SlotManager(PIPE.build().text_encoder, max_rank=8).load(raw)


@pytest.mark.parametrize("key", ["text_encoder.text_projection.weight", "lora_te1_norm.w_norm"])
def test_whole_tensors_of_other_components_are_skipped_and_reported(
    key: str, plain: Written
) -> None:
    raw = read_adapter({**unet(plain), key: torch.ones(3)})
    report = SlotManager(PIPE.build().unet, max_rank=8).load(raw)
    assert [reason for _, reason in report.skipped] == ["other_component: text_encoder"]
    assert report.skipped[0][0].startswith(key.rpartition(".")[0])
