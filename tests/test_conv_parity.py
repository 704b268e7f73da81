"""Adapters on convolutions give what PEFT gives for the same files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conv_nets import DIMS, NET_INPUTS, NET_TARGETS, net, one, pair, random
from dora_files import write_dora
from torch import nn
from toys import peft_model, write_adapter

from lora_slots import SlotManager

pytestmark = [
    pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed but the targeted layer"),
    # PEFT takes a bias for a damaged lora_B.
    pytest.mark.filterwarnings("ignore:Adapter 'default'. 1 LoRA tensor.* have invalid shape"),
]
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}

CASES = {
    "1d, kernel 3, stride 2": (1, (7, 5, 3), {"stride": 2, "padding": 1}),
    "1d, same": (1, (7, 5, 3), {"padding": "same"}),
    "1d, 1x1": (1, (7, 5, 1), {"bias": False}),
    "2d, kernel 3, stride 2": (2, (7, 5, 3), {"stride": 2, "padding": 1}),
    "2d, nothing square": (2, (7, 5, (3, 2)), {"stride": (1, 2), "padding": (0, 1)}),
    "2d, same, no bias": (2, (7, 5, 3), {"padding": "same", "bias": False}),
    "2d, valid": (2, (7, 5, 2), {"padding": "valid"}),
    "2d, 1x1": (2, (7, 5, 1), {}),
    "2d, 1x1, stride 2": (2, (7, 5, 1), {"stride": 2}),
    "2d, two groups": (2, (6, 8, 3), {"padding": 1, "groups": 2}),
    "2d, depthwise": (2, (4, 4, 3), {"padding": 1, "groups": 4}),
    "3d, kernel 3": (3, (4, 5, 3), {"padding": 1}),
    "3d, kernel (1, 3, 2)": (3, (4, 5, (1, 3, 2)), {"stride": (2, 1, 1)}),
}
CASE = pytest.mark.parametrize(("dims", "sizes", "options"), CASES.values(), ids=CASES.keys())


@CASE
@torch.no_grad()
def test_a_convolution_with_an_adapter_is_pefts(dims, sizes, options, tmp_path: Path):
    model = one(DIMS[dims], *sizes, **options)
    write_adapter(tmp_path, copy.deepcopy(model), r=4, lora_alpha=6, target_modules=["layer"])
    expected = peft_model(copy.deepcopy(model), tmp_path)
    x = random(2, sizes[0], *[6] * dims)
    base = model(x)
    manager = SlotManager(model, max_rank=8, target_modules=["layer"])
    assert torch.equal(model(x), base)
    assert manager.load(tmp_path).scaling == {"layer": 1.5}
    torch.testing.assert_close(model(x), expected(x), **CLOSE)
    assert not torch.allclose(model(x), base, atol=0.01)
    manager.unload("default")
    assert torch.equal(model(x), base)


@pytest.mark.parametrize(
    ("dims", "sizes", "options"),
    [case for case in CASES.values() if "groups" not in case[2]],
    ids=[name for name, case in CASES.items() if "groups" not in case[2]],
)
@torch.no_grad()
def test_dora_on_a_convolution_is_pefts(dims, sizes, options, tmp_path: Path):
    model = one(DIMS[dims], *sizes, **options)
    write_dora(tmp_path, copy.deepcopy(model), r=3, lora_alpha=6, target_modules=["layer"])
    expected = peft_model(copy.deepcopy(model), tmp_path)
    x = random(2, sizes[0], *[6] * dims)
    base = model(x)
    manager = SlotManager(model, max_rank=8, target_modules=["layer"], dora=True)
    assert torch.equal(model(x), base)
    manager.load(tmp_path)
    torch.testing.assert_close(model(x), expected(x), **CLOSE)
    # The norm follows the weight.
    expected.base_model.model.layer.set_scale("default", 0.5)
    manager.set_weight("default", 0.5)
    torch.testing.assert_close(model(x), expected(x), **CLOSE)
    manager.set_weight("default", 0.0)
    assert torch.equal(model(x), base)


@pytest.mark.parametrize("case", ["1d, 1x1", "2d, two groups", "3d, kernel 3"])
@torch.no_grad()
def test_lora_bias_on_a_convolution_is_pefts(case: str, tmp_path: Path):
    dims, sizes, options = CASES[case]
    model = one(DIMS[dims], *sizes, **options)
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["layer"], "lora_bias": True}
    write_adapter(tmp_path, copy.deepcopy(model), **config)
    expected = peft_model(copy.deepcopy(model), tmp_path)
    # PEFT starts it at random.
    assert expected.base_model.model.layer.lora_B["default"].bias.abs().min() > 0
    x = random(2, sizes[0], *[6] * dims)
    base = model(x)
    manager = SlotManager(model, max_rank=8, target_modules=["layer"], bias=True)
    assert torch.equal(model(x), base)
    manager.load(tmp_path)
    torch.testing.assert_close(model(x), expected(x), **CLOSE)
    manager.unload("default")
    assert torch.equal(model(x), base)


@torch.no_grad()
def test_two_adapters_on_a_convolution_add_up_with_their_weights(tmp_path: Path):
    model = one(nn.Conv2d, 7, 5, 3, padding=1)
    for seed, name in enumerate("ab"):
        write_adapter(
            tmp_path / name, copy.deepcopy(model), seed=seed, r=2 + seed, lora_alpha=4,
            target_modules=["layer"],
        )  # fmt: skip
    expected = peft_model(copy.deepcopy(model), tmp_path / "a", adapter_name="a")
    expected.load_adapter(tmp_path / "b", "b")
    expected.base_model.set_adapter(["a", "b"])
    for name, weight in {"a": 0.5, "b": -2.0}.items():
        expected.base_model.model.layer.set_scale(name, weight)
    manager = SlotManager(model, max_rank=4, num_slots=2, target_modules=["layer"])
    for name in "ba":
        manager.load(tmp_path / name, name)
    manager.set_adapters(["a", "b"], [0.5, -2.0])
    x = random(2, 7, 6, 6)
    torch.testing.assert_close(model(x), expected(x), **CLOSE)


@torch.no_grad()
def test_a_whole_network_is_pefts_after_loads_in_any_order(tmp_path: Path):
    model = net()
    manager = SlotManager(model, max_rank=4, target_modules=NET_TARGETS)
    base = model(*NET_INPUTS)
    expected = {}
    for seed, targets in enumerate([NET_TARGETS, ["conv1", "time_emb_proj"], ["conv_in", "down"]]):
        path = tmp_path / str(seed)
        write_adapter(path, net(), seed=seed, r=2 + seed, lora_alpha=3, target_modules=targets)
        expected[path] = peft_model(net(), path)(*NET_INPUTS)
    for path in [*expected, *reversed(expected)]:
        manager.load(path)
        torch.testing.assert_close(model(*NET_INPUTS), expected[path], rtol=1e-5, atol=1e-4)
    manager.unload("default")
    assert torch.equal(model(*NET_INPUTS), base)


@torch.no_grad()
def test_sixteen_bit_convolutions_are_as_near_to_the_exact_result_as_pefts(tmp_path: Path):
    for dtype in (torch.bfloat16, torch.float16):
        model = one(nn.Conv2d, 7, 5, 3, padding=1).to(dtype)
        path = tmp_path / str(dtype)
        write_adapter(path, copy.deepcopy(model), r=4, lora_alpha=8, target_modules=["layer"])
        expected = peft_model(copy.deepcopy(model), path, autocast_adapter_dtype=False)
        exact = copy.deepcopy(expected).double()
        SlotManager(model, max_rank=4, target_modules=["layer"]).load(path)
        x = random(2, 7, 6, 6).to(dtype)
        ours, theirs = ((m(x).double() - exact(x.double())).abs().max() for m in (model, expected))
        assert model(x).dtype == dtype
        assert ours <= 2 * theirs


@torch.no_grad()
def test_a_scaling_that_would_leave_float16_before_lora_B_does_no_harm():
    model = one(nn.Conv2d, 4, 4, 3).half()
    manager = SlotManager(model, max_rank=1, target_modules=["layer"])
    A, B = random(1, 4, 3, 3, scale=10), random(4, 1, 1, 1, scale=1e-3)
    manager.load(pair(A, B, alpha=1536.0))
    x = random(1, 4, 6, 6, scale=10).half()
    delta = 1536.0 * torch.einsum("or,rikl->oikl", B.flatten(1), A)
    W, bias = model.layer.weight.double(), model.layer.bias.double()
    exact = nn.functional.conv2d(x.double(), W + delta.double(), bias)
    h = nn.functional.conv2d(x.float(), A)
    assert 1536 * h.abs().max() > torch.finfo(torch.float16).max
    assert torch.isfinite(model(x)).all()
    torch.testing.assert_close(model(x).double(), exact, rtol=0.01, atol=0.01 * exact.abs().max())
