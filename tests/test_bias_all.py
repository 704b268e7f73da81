"""PEFT's ``bias="all"`` and ``"lora_only"``: biases that take the place of the model's own."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch._dynamo
from safetensors.torch import load_file
from toys import WEIGHTS, CountingBackend, Snapshot
from whole_files import X, by_peft, headed, manager_of, with_pair, write_trained

from lora_slots import SlotManager, TargetMismatchError, UnsupportedAdapterError, read_adapter

TARGETS = ["q_proj", "k_proj", "dense", "out_proj"]


@pytest.fixture
def lora_only(tmp_path):
    return write_trained(tmp_path / "lora_only", headed(), target_modules=TARGETS, bias="lora_only")


def biased(model, **options):
    settings = {"full_modules": (), "bias": True, **options}
    return manager_of(model, **settings)


@torch.no_grad()
@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_the_output_is_that_of_peft_and_of_the_base_without(bias, tmp_path):
    path = write_trained(tmp_path / "a", headed(), target_modules=TARGETS, bias=bias)
    model = headed()
    base = model(X)
    manager = biased(model, full_modules=["norm"])
    assert torch.equal(model(X), base)
    report = manager.load(path)
    assert report.skipped == ()
    torch.testing.assert_close(model(X), by_peft(headed(), path), rtol=1e-5, atol=1e-5)
    manager.set_weight("default", 0.0)
    assert torch.equal(model(X), base)
    manager.unload("default")
    assert torch.equal(model(X), base)


@torch.no_grad()
def test_old_files_name_the_bias_without_base_layer(lora_only):
    tensors = load_file(lora_only / WEIGHTS)
    old = {name.replace(".base_layer.", "."): tensor for name, tensor in tensors.items()}
    assert old.keys() != tensors.keys()
    model = headed()
    config = {"r": 2, "lora_alpha": 8, "bias": "lora_only"}
    biased(model).load(read_adapter(old, config))
    torch.testing.assert_close(model(X), by_peft(headed(), lora_only), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_change_of_the_bias_is_scaled_by_the_weight_alone():
    model = headed()
    bias = torch.arange(8.0)
    source = with_pair({"q_proj.bias": bias, "q_proj.alpha": torch.tensor(64.0)})
    biased(model).load(source, weight=0.5)
    expected = headed()
    A, B = (source.tensors[f"q_proj.lora_{side}.weight"] for side in "AB")
    expected.q_proj.weight += 0.5 * 32 * B @ A
    expected.q_proj.bias += 0.5 * (bias - expected.q_proj.bias)
    torch.testing.assert_close(model(X), expected(X), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_lora_bias_and_the_base_bias_add_up():
    model = headed()
    lora_bias, bias = torch.arange(8.0), torch.ones(8)
    source = with_pair(
        {"q_proj.lora_B.bias": lora_bias, "q_proj.base_layer.bias": bias},
        {"r": 2, "lora_alpha": 6, "lora_bias": True, "bias": "lora_only"},
    )
    biased(model).load(source)
    x = torch.zeros(1, 8)
    torch.testing.assert_close(model.q_proj(x)[0], bias + 3 * lora_bias)


@torch.no_grad()
def test_several_adapters_each_change_the_bias(lora_only, tmp_path):
    model = headed()
    manager = biased(model)
    other = write_trained(tmp_path / "b", headed(), seed=1, target_modules=TARGETS, bias="all")
    manager.load(lora_only, "one")
    manager.load(other, "two", strict=False)
    manager.set_adapters(["one", "two"])
    own = headed().q_proj.bias
    changes = [
        load_file(path / WEIGHTS)["base_model.model.q_proj.base_layer.bias"] - own
        for path in (lora_only, other)
    ]
    x = torch.zeros(1, 8)
    torch.testing.assert_close(model.q_proj(x)[0], own + changes[0] + changes[1])


def test_without_the_option_it_is_refused_with_the_remedy_or_left_out(lora_only):
    model = headed()
    manager = manager_of(model, full_modules=())
    before = Snapshot.of(manager, model)
    match = r"bias='lora_only'; 3 bias \(.*\); build the SlotManager with bias=True, or pass strict"
    with pytest.raises(UnsupportedAdapterError, match=match):
        manager.load(lora_only)
    before.assert_unchanged(manager, model)
    report = manager.load(lora_only, strict=False)
    assert {reason for _, reason in report.skipped} == {"bias"}
    assert len(report.skipped) == 3


def test_biases_that_were_not_trained_need_no_room(tmp_path):
    raw = with_pair(
        {f"base_model.model.{name}": headed().get_parameter(name) for name in (
            "q_proj.bias", "norm.bias", "classifier.dense.bias",
        )}, {"r": 2, "bias": "all"},
    )  # fmt: skip
    report = manager_of(headed(), full_modules=()).load(raw)
    assert {reason for _, reason in report.skipped} == {"equal to the model's own"}
    assert len(report.skipped) == 3


def test_the_bias_of_what_is_no_layer_needs_full_modules(tmp_path):
    path = write_trained(tmp_path / "a", headed(), target_modules=TARGETS, bias="all")
    with pytest.raises(UnsupportedAdapterError, match=r"with full_modules=\['norm'\], or pass"):
        biased(headed()).load(path)


def test_a_bias_of_another_shape_is_refused():
    match = r"q_proj\.bias has shape \(8,\), but q_proj\.bias .* \(7,\)"
    with pytest.raises(TargetMismatchError, match=match):
        biased(headed()).load(with_pair({"q_proj.bias": torch.ones(7)}))


@torch.no_grad()
def test_swaps_compile_nothing_and_copies_keep_their_own(lora_only, tmp_path):
    torch._dynamo.reset()
    plain = write_trained(tmp_path / "b", headed(), seed=1, target_modules=["k_proj"])
    model = headed()
    base = model(X)
    manager = biased(model)
    backend = CountingBackend()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    compiled(X)
    with manager.no_recompile():
        for path in (lora_only, plain, lora_only):
            manager.load(path)
            torch.testing.assert_close(compiled(X), by_peft(headed(), path), rtol=1e-5, atol=1e-5)
    assert backend.graphs == 1
    active = model(X)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        SlotManager.of(other).unload("default")
        assert torch.equal(other(X), base)
    assert torch.equal(model(X), active)
    torch._dynamo.reset()


@torch.no_grad()
def test_in_bfloat16_the_change_is_that_of_the_live_bias(lora_only):
    model = headed().to(torch.bfloat16)
    biased(model).load(lora_only)
    bias = load_file(lora_only / WEIGHTS)["base_model.model.q_proj.base_layer.bias"]
    output = model.q_proj(torch.zeros(1, 8, dtype=torch.bfloat16))[0]
    assert torch.equal(output, bias.to(torch.bfloat16))
    assert model.q_proj.lora_slots.lora_bias.dtype == torch.float32
