"""`inspect_adapter` tells formats, sizes and needs from headers, and agrees with what loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import write_file
from format_files import dotted, kohya
from lycoris_files import convolutions, write_peft
from peft import LoHaConfig, LoKrConfig
from safetensors.torch import load_file
from torch import Tensor, nn
from toys import TINY, TOY_MODULES, WEIGHTS, pairs, tensors_of, toy, write_adapter, write_folder

from lora_slots import AdapterInfo, SlotManager, UnsupportedAdapterError, inspect_adapter
from lora_slots.report import ModuleShape

RANK_4 = pairs(dict.fromkeys(TOY_MODULES, 4))


def agrees_with_load(info: AdapterInfo, model: nn.Module, **options: Any) -> None:
    """What was told without the model is what a manager of just that size reports."""
    manager = SlotManager(model, max_rank=info.max_rank, **info.needs, **options)
    report = manager.load(info.source)
    assert report.rank == info.max_rank
    assert report.scaling == info.scaling


def shapes(info: AdapterInfo) -> dict[str, tuple[tuple[int, ...], int]]:
    return {name: (shape.in_shape, shape.out_features) for name, shape in info.shapes.items()}


def test_a_peft_folder_tells_everything_but_the_values(tmp_path: Path) -> None:
    write_adapter(tmp_path, toy(), r=4, lora_alpha=6, use_rslora=True, target_modules=["q_proj"])
    info = inspect_adapter(tmp_path)
    assert info.format == "PEFT"
    assert info.ranks == dict.fromkeys(TOY_MODULES[::2], 4)
    assert info.scaling == dict.fromkeys(TOY_MODULES[::2], 3.0)
    assert shapes(info) == dict.fromkeys(TOY_MODULES[::2], ((8,), 6))
    assert info.kinds == {"linear": 2}
    assert (info.needs, info.features, info.others) == ({}, ("rsLoRA",), {})
    agrees_with_load(info, toy())


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("kohya", kohya(RANK_4, alpha=2)),
        ("diffusion_model", dotted(RANK_4, alpha=2, prefix="diffusion_model.")),
        ("older diffusers", dotted(RANK_4, alpha=2, down=".lora.down", up=".lora.up")),
        ("diffusers", dotted(RANK_4, alpha=2, prefix="unet.")),
        ("PEFT", dotted(RANK_4, alpha=2, prefix="base_model.model.")),
    ],
)
def test_single_files_of_each_family_are_told_apart(
    name: str, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    info = inspect_adapter(write_file(tmp_path / "a.safetensors", tensors))
    assert info.format == name
    assert list(info.ranks.values()) == [4] * 4
    assert list(info.scaling.values()) == [0.5] * 4
    assert set(shapes(info).values()) == {((8,), 6)}


def test_the_base_model_of_a_kohya_file_is_in_its_metadata(tmp_path: Path) -> None:
    metadata = {"ss_base_model_version": "sdxl_base_v1-0", "ss_network_dim": "4"}
    info = inspect_adapter(write_file(tmp_path / "a.safetensors", kohya(RANK_4), metadata))
    assert info.base_model == "sdxl_base_v1-0"


def test_each_component_of_a_file_has_the_scaling_of_its_own_config(tmp_path: Path) -> None:
    other = pairs(dict.fromkeys(TOY_MODULES, 4), seed=1)
    parts = [dotted(RANK_4, prefix="unet."), dotted(other, prefix="text_encoder.")]
    config = {
        "unet.r": 4, "unet.lora_alpha": 8, "unet.alpha_pattern": {TOY_MODULES[0]: 2},
        "text_encoder.r": 4, "text_encoder.lora_alpha": 1, "text_encoder.use_rslora": True,
    }  # fmt: skip
    metadata = {"lora_adapter_metadata": json.dumps(config)}
    info = inspect_adapter(write_file(tmp_path / "a.safetensors", parts[0] | parts[1], metadata))
    scaling = [0.5, 2.0, 2.0, 2.0] + [0.5] * 4
    names = [f"{part}.{name}" for part in ("unet", "text_encoder") for name in TOY_MODULES]
    assert info.scaling == dict(zip(names, scaling, strict=True))
    assert info.features == ("alpha_pattern", "rsLoRA")


def test_convolutions_and_embeddings_are_told_from_linear_layers(tmp_path: Path) -> None:
    write_adapter(tmp_path / "conv", convolutions(), r=2, target_modules=["0", "1"])
    info = inspect_adapter(tmp_path / "conv")
    assert info.kinds == {"conv2d": 2}
    assert shapes(info) == {"0": ((4, 3, 3), 6), "1": ((6, 1, 1), 8)}
    model = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 3))
    write_adapter(tmp_path / "embedding", model, r=2, target_modules=["0", "1"])
    info = inspect_adapter(tmp_path / "embedding")
    assert info.kinds == {"embedding": 1, "linear": 1}
    assert shapes(info) == {"0": ((9,), 5), "1": ((5,), 3)}
    assert info.needs == {}


# PEFT takes a lora_bias for a shard of a matrix.
@pytest.mark.filterwarnings("ignore:Adapter 'default'. . LoRA tensor:UserWarning")
@pytest.mark.parametrize(
    ("setting", "option", "feature"),
    [("use_dora", "dora", "DoRA"), ("lora_bias", "bias", "lora_bias")],
)
def test_dora_and_lora_bias_are_features_that_need_their_options(
    setting: str, option: str, feature: str, tmp_path: Path
) -> None:
    write_adapter(tmp_path, toy(bias=True), r=2, target_modules=["q_proj"], **{setting: True})
    info = inspect_adapter(tmp_path)
    assert info.needs == {option: True}
    assert info.features == (feature,)
    agrees_with_load(info, toy(bias=True))


@pytest.mark.parametrize(
    ("config", "feature", "rank"),
    [
        (LoHaConfig(r=2, alpha=3, target_modules=["q_proj"], init_weights=False), "LoHa", 4),
        (LoKrConfig(r=2, alpha=3, target_modules=["q_proj"], init_weights=False), "LoKr", 6),
    ],
)
def test_loha_and_lokr_have_the_rank_that_their_slots_need(
    config: Any, feature: str, rank: int, tmp_path: Path
) -> None:
    write_peft(tmp_path, toy(), config)
    info = inspect_adapter(tmp_path)
    assert info.features == (feature,)
    assert info.max_rank == rank
    assert set(shapes(info).values()) == {((8,), 6)}
    assert info.dtypes == (torch.float32,)
    agrees_with_load(info, toy())


def test_modules_to_save_need_full_modules_by_the_name_of_the_config(tmp_path: Path) -> None:
    model = TINY["bert"].build()
    saved = {"target_modules": ["query"], "modules_to_save": ["pooler"]}
    write_adapter(tmp_path, model, r=2, **saved)
    info = inspect_adapter(tmp_path)
    assert info.needs == {"full_modules": ("pooler",)}
    assert info.features == ("modules_to_save=['pooler']", "2 whole tensors")
    assert sorted(info.others.values()) == [(64,), (64, 64)]


def test_full_deltas_need_the_modules_that_they_name(tmp_path: Path) -> None:
    tensors = kohya(RANK_4) | {
        "lora_unet_norm.w_norm": torch.ones(6), "lora_unet_norm.b_norm": torch.ones(6),
        f"lora_unet_{TOY_MODULES[0].replace('.', '_')}.diff_b": torch.ones(6),
    }  # fmt: skip
    info = inspect_adapter(write_file(tmp_path / "a.safetensors", tensors))
    assert info.needs == {"bias": True, "full_modules": ("lora_unet_norm",)}
    assert info.features == ("3 whole tensors",)
    assert list(info.others.values()) == [(6,), (6,)]


@pytest.mark.parametrize("layer", ["base_layer.bias", "bias"])
def test_a_trained_bias_of_an_adapted_module_needs_bias(layer: str, tmp_path: Path) -> None:
    tensors = tensors_of(RANK_4) | {f"base_model.model.{TOY_MODULES[1]}.{layer}": torch.ones(6)}
    config = {"r": 4, "lora_alpha": 8, "bias": "lora_only"}
    info = inspect_adapter(write_folder(tmp_path, tensors, config))
    assert info.needs == {"bias": True}
    assert info.features == ("bias='lora_only'", "1 whole tensor")


def test_a_copy_of_a_base_weight_needs_nothing(tmp_path: Path) -> None:
    key = f"base_model.model.{TOY_MODULES[1]}.base_layer.weight"
    path = write_file(tmp_path / "a.safetensors", tensors_of(RANK_4) | {key: torch.ones(6, 8)})
    assert inspect_adapter(path).needs == {}


def test_trained_tokens_need_as_many_rows(tmp_path: Path) -> None:
    model = TINY["llama"].build()
    config = {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [1, 5, 7]}}
    write_adapter(tmp_path, model, r=2, **config)
    info = inspect_adapter(tmp_path)
    assert info.needs == {"token_rows": 3}
    assert info.features == ("trainable tokens",)
    assert list(info.others.values()) == [(3, 64)]


def test_experts_have_the_rank_of_one_of_them(tmp_path: Path) -> None:
    experts, rank = 3, 2
    key = "base_model.model.mlp.experts.{}lora_{}.weight"
    tensors = {
        key.format("base_layer.", "A"): torch.ones(experts * rank, 8),
        key.format("base_layer.", "B"): torch.ones(10, experts * rank),
        key.format("", "A"): torch.ones(experts * rank, 5),
        key.format("", "B"): torch.ones(8, experts * rank),
    }
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = {"r": rank, "lora_alpha": 3, "target_parameters": names, "target_modules": []}
    info = inspect_adapter(write_folder(tmp_path, tensors, config))
    nested, plain = "mlp.experts.base_layer", "mlp.experts"
    assert info.ranks == {nested: rank, plain: rank}
    assert info.scaling == {nested: 1.5, plain: 1.5}
    assert info.shapes[nested] == ModuleShape((experts * 8,), experts * 10)
    assert info.shapes[plain] == ModuleShape((experts * 5,), experts * 8)
    assert info.kinds == {"experts": 2}
    assert info.features == ("target_parameters",)


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"q.oft_r": torch.ones(2, 2)}, None, "uses OFT, as its key 'q.oft_r' shows"),
        ({"q.vera_lambda_b": torch.ones(2)}, None, "uses VeRA"),
        (tensors_of(RANK_4), {"r": 4, "peft_type": "VERA"}, "has the peft_type VERA"),
        (tensors_of(RANK_4), {"r": 4, "init_lora_weights": "pissa"}, "initialised by 'pissa'"),
    ],
)
def test_what_no_slot_can_hold_is_refused_by_name(
    tensors: dict[str, Tensor], config: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedAdapterError, match=message):
        inspect_adapter(write_folder(tmp_path, tensors, config))


def test_a_header_shares_no_tensor_with_the_file(tmp_path: Path) -> None:
    from lora_slots.reading import read_header

    write_adapter(tmp_path, toy(), r=4, target_modules=["q_proj"])
    header, file = read_header(tmp_path), load_file(tmp_path / WEIGHTS)
    assert {k: (t.shape, t.dtype, t.is_meta) for k, t in header.tensors.items()} == {
        k: (t.shape, t.dtype, True) for k, t in file.items()
    }
