"""Whole modules are swapped like everything else: no recompile, nothing half done, copies apart."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch._dynamo
from safetensors.torch import load_file
from torch import nn
from toys import WEIGHTS, CountingBackend, Snapshot, slot_buffers
from whole_files import FULL, X, by_peft, headed, manager_of, with_pair, write_trained

from lora_slots import AdapterFileError, SlotManager


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def paths(tmp_path):
    return [
        write_trained(tmp_path / "all", headed(), modules_to_save=list(FULL), bias="all"),
        write_trained(tmp_path / "norm", headed(), seed=1, r=4, modules_to_save=["norm"]),
        write_trained(tmp_path / "none", headed(), seed=2, r=1, target_modules=["k_proj"]),
    ]


@torch.no_grad()
def test_any_order_of_swaps_is_one_graph_and_pefts_output(paths):
    model = headed()
    backend = CountingBackend()
    base = model(X)
    manager = manager_of(model, bias=True)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert torch.equal(compiled(X), base)
    expected = [by_peft(headed(), path) for path in paths]
    with manager.no_recompile():
        for index in (0, 1, 2, 1, 0, 2, 0):
            manager.load(paths[index])
            torch.testing.assert_close(compiled(X), expected[index], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(model(X), expected[index], rtol=1e-5, atol=1e-5)
        manager.set_weight("default", 0.0)
        assert torch.equal(compiled(X), base)
        manager.unload("default")
        assert torch.equal(compiled(X), base)
    assert backend.graphs == 1


def test_assigning_another_parameter_would_recompile():
    model = headed()
    backend = CountingBackend()
    manager_of(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    compiled(X)
    model.norm.weight = nn.Parameter(torch.ones(8), requires_grad=False)
    compiled(X)
    assert backend.graphs == 2


@torch.no_grad()
@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_inductor_gives_the_base_bit_for_bit_and_the_adapter(paths):
    plain = headed()
    base = torch.compile(plain, fullgraph=True)(X)
    model = headed()
    manager = manager_of(model, bias=True)
    compiled = torch.compile(model, fullgraph=True)
    assert torch.equal(compiled(X), base)
    manager.load(paths[0])
    torch.testing.assert_close(compiled(X), by_peft(headed(), paths[0]), rtol=1e-5, atol=1e-5)
    manager.unload("default")
    assert torch.equal(compiled(X), base)


@torch.no_grad()
def test_a_failed_load_changes_nothing(paths):
    model = headed()
    manager = manager_of(model, bias=True)
    manager.load(paths[0])
    before = Snapshot.of(manager, model)
    bad = torch.ones(5)
    bad[4] = torch.inf
    source = with_pair({"norm.weight": torch.ones(8) * 3, "classifier.out_proj.bias": bad})
    with pytest.raises(AdapterFileError, match=r"classifier\.out_proj\.bias"):
        manager.load(source)
    before.assert_unchanged(manager, model)
    torch.testing.assert_close(model(X), by_peft(headed(), paths[0]), rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_bring_their_own_slots(paths, duplicate):
    model = headed()
    base = model(X)
    manager = manager_of(model, bias=True)
    manager.load(paths[0])
    active = model(X)
    other = duplicate(model)
    SlotManager.of(other).unload("default")
    assert torch.equal(other(X), base)
    assert torch.equal(model(X), active)
    SlotManager.of(other).load(paths[1])
    torch.testing.assert_close(other(X), by_peft(headed(), paths[1]), rtol=1e-5, atol=1e-5)
    assert torch.equal(model(X), active)


@torch.no_grad()
@pytest.mark.parametrize("when", ["before", "after"])
def test_in_bfloat16_a_parameter_is_the_files_rounded_once(paths, when):
    model = headed()
    plain = headed().to(torch.bfloat16)
    x = X.to(torch.bfloat16)
    if when == "before":
        model = model.to(torch.bfloat16)
    manager = manager_of(model, bias=True)
    if when == "after":
        model = model.to(torch.bfloat16)
    assert torch.equal(model(x), plain(x))
    manager.load(paths[0])
    tensors = load_file(paths[0] / WEIGHTS)
    head = tensors["base_model.model.classifier.out_proj.weight"].to(torch.bfloat16)
    assert torch.equal(model.classifier.out_proj.weight, head)
    assert model.norm.lora_slots["weight"].full.dtype == torch.bfloat16
    assert model.norm.lora_slots["weight"].holds.dtype == torch.float32
    manager.unload("default")
    assert torch.equal(model(x), plain(x))


def test_the_buffers_are_as_large_as_the_modules_for_each_slot():
    model = headed()
    manager = manager_of(model, num_slots=3, dtype=torch.bfloat16)
    buffers = slot_buffers(model)
    full = {name: b for name, b in buffers.items() if name.endswith(".full")}
    assert {name: tuple(b.shape) for name, b in full.items()} == {
        "norm.lora_slots.weight.full": (3, 8),
        "norm.lora_slots.bias.full": (3, 8),
        "classifier.dense.lora_slots.weight.full": (3, 64),
        "classifier.dense.lora_slots.bias.full": (3, 8),
        "classifier.out_proj.lora_slots.weight.full": (3, 40),
        "classifier.out_proj.lora_slots.bias.full": (3, 5),
    }
    # Unlike lora_A and lora_B, they are of the parameter's own dtype.
    assert {b.dtype for b in full.values()} == {torch.float32}
    assert manager.status().components[""].modules == 8
