"""Shapes that adapters have in the wild, and that loaders have stumbled over, with their values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn
from toys import (
    TOY_MODULES,
    expected_toy,
    pairs,
    peft_model,
    refusal,
    tensors_of,
    toy,
    toy_input,
    write_folder,
)

from lora_slots import AdapterFileError, RawAdapter, SlotManager, read_adapter
from lora_slots.attach.survey import survey
from lora_slots.resolve.fused import convert
from lora_slots.resolve.pairing import pair_up, settle_scaling

Q, V = TOY_MODULES[:2]


# Half a pair


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lora_B": None}, rf"has no base_model\.model\.{Q}\.lora_B\.weight, but its other half"),
        ({"lora_A": None}, rf"has no base_model\.model\.{Q}\.lora_A\.weight, but its other half"),
        ({"lora_B": (6, 3)}, r"same rank, .* 4 \(A is \(4, 8\)\) and 3 \(B is \(6, 3\)\)"),
    ],
    ids=["only A", "only B", "two ranks"],
)
@pytest.mark.parametrize("strict", [True, False])
def test_half_a_pair_is_refused_even_where_peft_would_invent_the_other(
    changed: dict[str, Any], message: str, strict: bool, tmp_path: Path
) -> None:
    tensors = tensors_of(pairs({Q: 4, V: 4}))
    for part, shape in changed.items():
        key = f"base_model.model.{Q}.{part}.weight"
        del tensors[key]
        if shape is not None:
            tensors[key] = torch.ones(shape)
    # With this PEFT fills what is missing with random numbers.
    config = {"r": 4, "lora_alpha": 8, "init_lora_weights": False}
    refusal(write_folder(tmp_path / "a", tensors, config), AdapterFileError, message, strict=strict)


# GPT-2's layer keeps its weight as [in, out]


class Conv1DNet(nn.Module):
    """``c_attn`` with a weight ``(16, 48)`` and ``c_proj`` with one of ``(16, 16)``."""

    def __init__(self) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.c_attn = Conv1D(48, 16)
        self.c_proj = Conv1D(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.c_attn(x), self.c_proj(x)], dim=-1)


def conv1d_net() -> Conv1DNet:
    torch.manual_seed(0)
    return Conv1DNet().eval()


# PEFT corrects the flag by itself, and says so.
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")
@pytest.mark.parametrize("fan_in_fan_out", [True, False])
@torch.no_grad()
def test_a_layer_that_stores_in_by_out_takes_r_by_in_and_out_by_r_whatever_the_flag_says(
    fan_in_fan_out: bool, tmp_path: Path
) -> None:
    both = pairs({"c_attn": 4}, inputs=16, outputs=48) | pairs({"c_proj": 4}, inputs=16, outputs=16)
    config = {
        "r": 4, "lora_alpha": 12, "fan_in_fan_out": fan_in_fan_out,
        "target_modules": ["c_attn", "c_proj"],
    }  # fmt: skip
    path = write_folder(tmp_path / "a", tensors_of(both), config)
    model, x = conv1d_net(), torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    base = model(x)
    report = SlotManager(model, max_rank=8).load(path)
    assert report.scaling == {"c_attn": 3.0, "c_proj": 3.0}
    share = torch.cat([x @ A.T @ B.T for A, B in both.values()], dim=-1)
    torch.testing.assert_close(model(x), base + 3 * share, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(x), peft_model(conv1d_net(), path)(x), rtol=1e-5, atol=1e-5)


# Fused layers whose parts were trained apart


def test_a_fused_layer_of_four_parts_trained_apart_is_scaled_by_all_its_rows_and_warned_of() -> (
    None
):
    with torch.device("meta"):
        model = FluxTransformer2DModel(num_layers=0, num_single_layers=1)
    # Four parts of rank 8, and the alpha of one.
    A, B = torch.ones(32, 3072), torch.ones(3 * 3072 + 12288, 32)
    name = "lora_unet_single_blocks_0_linear1"
    given = read_adapter(
        {
            f"{name}.lora_down.weight": A,
            f"{name}.lora_up.weight": B,
            f"{name}.alpha": torch.tensor(8.0),
        }
    )
    metadata = {"ss_network_dim": "8", "ss_network_args": json.dumps({"split_qkv": "True"})}
    raw = RawAdapter(given.source, given.tensors, metadata=metadata, format="kohya")
    with pytest.warns(UserWarning, match="trained with split_qkv=True and ss_network_dim=8"):
        parts = convert(pair_up(raw)[0], survey(model), raw)[name]
    assert len(parts) == 4
    assert {settle_scaling(part, part.module, None, raw) for part in parts} == {0.25}


# Ranks


@torch.no_grad()
def test_a_rank_above_the_layers_and_one_on_a_single_layer_follow_each_other() -> None:
    wide, single = pairs({Q: 12}, seed=1), pairs({V: 1}, seed=2)
    model, x = toy(), toy_input()
    manager = SlotManager(model, max_rank=16)
    for both in (wide, single, wide):
        (module,) = both
        rank = len(both[module][0])
        raw = read_adapter(tensors_of(both), {"r": rank, "lora_alpha": 6})
        report = manager.load(raw)
        assert report.scaling == {module: 6 / rank}
        expected = expected_toy(toy(), x, both, report.scaling)
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
        others = [i for i, name in enumerate(TOY_MODULES) if name != module]
        own, base = model(x).flatten(0, 1), toy()(x).flatten(0, 1)
        assert torch.equal(own[others], base[others])
