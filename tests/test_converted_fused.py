"""One module of a file that is several of the model, and files that cannot be converted."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import write_file
from torch import Tensor, nn
from toys import Snapshot

from lora_slots import (
    SlotManager,
    TargetMismatchError,
    UnsupportedAdapterError,
    inspect_adapter,
    read_adapter,
)

LAYERS = ("to_q", "to_k", "to_v")
PATHS = tuple(f"transformer_blocks.0.attn.{layer}" for layer in LAYERS)
NAME = "lora_unet_double_blocks_0_img_attn_qkv"


class FluxTransformer2DModel(nn.Module):
    """Of the name that diffusers knows, with three projections ``Linear(8 -> 6)``."""

    def __init__(self, inputs: int = 8) -> None:
        super().__init__()
        block = nn.Module()
        block.attn = nn.Module()
        for layer in LAYERS:
            setattr(block.attn, layer, nn.Linear(inputs, 6, bias=False))
        self.transformer_blocks = nn.ModuleList([block])

    def forward(self, x: Tensor) -> Tensor:
        attn = self.transformer_blocks[0].attn
        return torch.cat([getattr(attn, layer)(x) for layer in LAYERS], dim=-1)


def model(**sizes: int) -> FluxTransformer2DModel:
    torch.manual_seed(0)
    return FluxTransformer2DModel(**sizes)


def x() -> Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def file(A: Tensor, B: Tensor, alpha: float | None) -> dict[str, Tensor]:
    tensors = {f"{NAME}.lora_down.weight": A, f"{NAME}.lora_up.weight": B}
    return tensors if alpha is None else tensors | {f"{NAME}.alpha": torch.tensor(alpha)}


def dense() -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(4, 8), torch.randn(18, 4)


def sparse() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(12, 8), torch.block_diag(*torch.randn(3, 6, 4))


def base_and_fused(A: Tensor, B: Tensor, scaling: float) -> Tensor:
    return model()(x()) + scaling * (x() @ A.T @ B.T)


def test_dense_file_gives_each_the_whole_A_and_its_rows_of_B() -> None:
    A, B = dense()
    net = model()
    report = SlotManager(net, max_rank=8).load(read_adapter(file(A, B, 2.0)))
    assert report.scaling == dict.fromkeys(PATHS, 0.5)
    assert report.rank == 4
    for number, layer in enumerate(LAYERS):
        slots = getattr(net.transformer_blocks[0].attn, layer).lora_slots
        assert torch.equal(slots.lora_A[:4], A)
        assert torch.equal(slots.lora_B[:4].T, B[6 * number : 6 * number + 6])
    torch.testing.assert_close(net(x()), base_and_fused(A, B, 0.5), rtol=1e-5, atol=1e-5)


def test_sparse_file_is_compacted_with_the_scaling_that_it_had() -> None:
    A, B = sparse()
    net = model()
    report = SlotManager(net, max_rank=8).load(read_adapter(file(A, B, 12.0)))
    assert report.scaling == dict.fromkeys(PATHS, 1.0)
    assert report.rank == 4
    torch.testing.assert_close(net(x()), base_and_fused(A, B, 1.0), rtol=1e-5, atol=1e-5)


def test_a_part_that_is_all_zero_keeps_one_row() -> None:
    A, B = dense()
    B[6:12] = 0
    net = model()
    report = SlotManager(net, max_rank=8).load(read_adapter(file(A, B, 4.0)))
    assert report.scaling == dict.fromkeys(PATHS, 1.0)
    torch.testing.assert_close(net(x()), base_and_fused(A, B, 1.0), rtol=1e-5, atol=1e-5)


def test_header_of_a_sparse_file_gives_an_upper_bound(tmp_path: Path) -> None:
    A, B = sparse()
    assert inspect_adapter(write_file(tmp_path / "a.safetensors", file(A, B, 12.0))).max_rank == 12


def test_without_alpha_the_scaling_is_1() -> None:
    A, B = sparse()
    report = SlotManager(model(), max_rank=8).load(read_adapter(file(A, B, None)))
    assert report.scaling == dict.fromkeys(PATHS, 1.0)


def test_alpha_goes_through_the_renaming() -> None:
    name = "diffusion_model.double_blocks.0.img_attn.qkv"
    A, B = dense()
    tensors = {
        f"{name}.lora_A.weight": A,
        f"{name}.lora_B.weight": B,
        f"{name}.alpha": torch.tensor(8.0),
    }
    report = SlotManager(model(), max_rank=8).load(read_adapter(tensors))
    assert report.scaling == dict.fromkeys(PATHS, 2.0)


def test_patterns_of_a_config_speak_of_the_names_in_the_file() -> None:
    name = "double_blocks.0.img_attn.qkv"
    A, B = dense()
    tensors = {
        f"base_model.model.{name}.lora_A.weight": A,
        f"base_model.model.{name}.lora_B.weight": B,
    }
    config = {"r": 7, "lora_alpha": 7, "rank_pattern": {"qkv": 4}, "alpha_pattern": {"qkv": 6}}
    report = SlotManager(model(), max_rank=8).load(read_adapter(tensors, config))
    assert report.scaling == dict.fromkeys(PATHS, 1.5)


def trained_apart(path: Path, **arguments: Any) -> Path:
    torch.manual_seed(4)
    tensors = file(torch.randn(24, 8), torch.block_diag(*torch.randn(3, 6, 8)), 8.0)
    return write_file(
        path, tensors, {"ss_network_dim": "8", "ss_network_args": json.dumps(arguments)}
    )


def test_split_qkv_scales_by_the_rows_of_the_stored_A_and_warns(tmp_path: Path) -> None:
    path = trained_apart(tmp_path / "a.safetensors", split_qkv="True")
    manager = SlotManager(model(), max_rank=8)
    with pytest.warns(UserWarning, match=r"trained with split_qkv=True and ss_network_dim=8"):
        report = manager.load(path)
    assert report.scaling == dict.fromkeys(PATHS, 8 / 24)
    assert report.rank == 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager.load(trained_apart(tmp_path / "b.safetensors", split_qkv="False"))


def test_bias_and_magnitude_are_cut_like_B() -> None:
    from lora_slots.attach.survey import survey
    from lora_slots.resolve.fused import convert
    from lora_slots.resolve.pairing import pair_up

    A, B = dense()
    bias, magnitude = torch.arange(18.0), torch.arange(18.0) + 100
    raw = read_adapter(
        file(A, B, 4.0) | {f"{NAME}.lora_up.bias": bias, f"{NAME}.lora_magnitude_vector": magnitude}
    )
    parts = convert(pair_up(raw)[0], survey(model()), raw)[NAME]
    assert torch.equal(torch.cat([part.lora_bias for part in parts]), bias)
    assert torch.equal(torch.cat([part.magnitude for part in parts]), magnitude)


def assert_refused(
    tensors: Mapping[str, Tensor], error: type[Exception], message: str, **sizes: int
) -> None:
    net = model(**sizes)
    manager = SlotManager(net, max_rank=8)
    before = Snapshot.of(manager, net)
    with pytest.raises(error, match=message):
        manager.load(read_adapter(tensors))
    before.assert_unchanged(manager, net)


def test_without_diffusers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers.loaders", None)
    assert_refused(file(*dense(), 2.0), UnsupportedAdapterError, r"lora-slots\[diffusers\]")


def test_a_name_that_no_converter_knows_is_an_error() -> None:
    tensors = {key.replace("qkv", "kqv"): tensor for key, tensor in file(*dense(), 2.0).items()}
    assert_refused(tensors, TargetMismatchError, "match no target module of this model")


def test_a_model_that_diffusers_does_not_know_is_not_asked_about() -> None:
    net = nn.Sequential(nn.Linear(8, 6))
    manager = SlotManager(net, max_rank=8)
    with pytest.raises(TargetMismatchError, match="no such module in the model"):
        manager.load(read_adapter(file(*dense(), 2.0)))


def test_parts_of_the_wrong_size_are_refused() -> None:
    assert_refused(file(*dense(), 2.0), TargetMismatchError, r"to_q", inputs=5)


def test_every_class_and_every_loader_that_is_named_exists() -> None:
    import diffusers
    from diffusers.loaders import lora_pipeline

    from lora_slots.resolve.converting import _LOADERS

    assert all(hasattr(diffusers, name) for name in _LOADERS)
    assert all(hasattr(lora_pipeline, name) for name in _LOADERS.values())


def test_what_diffusers_would_log_of_a_search_is_kept_from_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers.utils import logging

    monkeypatch.setattr(logging._get_library_root_logger(), "propagate", True)
    logger = logging.get_logger("diffusers.loaders.lora_conversion_utils")
    net = type("Flux2Transformer2DModel", (FluxTransformer2DModel,), {})()
    tensors = {
        f"{NAME}.lora_down.weight": torch.ones(2, 8),
        f"{NAME}.lora_up.weight": torch.ones(18, 2),
    }
    other = {key.replace("qkv", "kqv"): tensor for key, tensor in tensors.items()}
    manager = SlotManager(net, max_rank=8)
    report = manager.load(read_adapter(tensors | other), strict=False)
    assert [key for key, _ in report.skipped] == [NAME.replace("qkv", "kqv")]
    assert caplog.text == ""
    logger.error("after")
    assert "after" in caplog.text
