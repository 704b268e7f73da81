"""Copies, pickles and casts of a model keep what slots hold for DoRA and biases, in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from dora_files import dora_tensors
from test_copies_and_detach import by_pickle, by_torch_save
from torch import nn
from toys import TOY_MODULES, slot_buffers, toy, toy_input

from lora_slots import RawAdapter, SlotManager, read_adapter

COPIES: tuple[Callable[[nn.Module], nn.Module], ...] = (copy.deepcopy, by_pickle, by_torch_save)
SMALL = ("scaling", "lora_bias", "dora")


def adapter(seed: int, rank: int = 4) -> RawAdapter:
    """DoRA and a bias at once, which PEFT does not write but which means what it says."""
    generator = torch.Generator().manual_seed(seed)
    biases = {
        f"base_model.model.{module}.lora_B.bias": torch.randn(6, generator=generator)
        for module in TOY_MODULES
    }
    return read_adapter(dora_tensors(rank, seed=seed) | biases, {"r": rank, "lora_alpha": 6})


@pytest.fixture
def model() -> nn.Module:
    model = toy()
    manager = SlotManager(model, max_rank=4, num_slots=2, dora=True, bias=True)
    manager.load(adapter(1), "a")
    manager.load(adapter(2, rank=2), "b")
    manager.set_adapters(["a", "b"], [0.5, -1.0])
    return model


def small(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: b for name, b in slot_buffers(model).items() if name.split(".")[-1] in SMALL}


@pytest.mark.parametrize("copied", COPIES)
@torch.no_grad()
def test_a_copy_is_equal_and_independent(
    model: nn.Module, copied: Callable[[nn.Module], nn.Module]
) -> None:
    output = model(toy_input())
    twin = copied(model)
    assert torch.equal(twin(toy_input()), output)
    for name, buffer in slot_buffers(twin).items():
        assert torch.equal(buffer, slot_buffers(model)[name])
    manager = SlotManager.of(twin)
    manager.set_adapters("a", 2.0)
    manager.load(adapter(3), "b", activate=False)
    assert not torch.equal(twin(toy_input()), output)
    assert torch.equal(model(toy_input()), output)
    for name in ("a", "b"):
        manager.unload(name)
    assert torch.equal(twin(toy_input()), toy()(toy_input()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@torch.no_grad()
def test_a_cast_of_the_model_leaves_them_float32_and_untouched(
    model: nn.Module, dtype: torch.dtype
) -> None:
    before = {name: buffer.clone() for name, buffer in small(model).items()}
    assert len(before) == 12
    expected = model(toy_input())
    model.to(dtype)
    for name, buffer in small(model).items():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, before[name]), name
    assert model.model.layers[0].q_proj.lora_slots.lora_A.dtype == dtype
    output = model(toy_input().to(dtype))
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.1)
    # Weights still go where they should, and a load afterwards is exact again.
    manager = SlotManager.of(model)
    manager.set_adapters("b", 2.0)
    assert model.model.layers[0].q_proj.lora_slots.mix.slots.tolist() == [[0.0, 2.0]]
    manager.load(adapter(1), "b")
    reference = toy().to(dtype)
    fresh = SlotManager(reference, max_rank=4, num_slots=2, dora=True, bias=True)
    fresh.load(adapter(1), "b", weight=2.0)
    assert torch.equal(model(toy_input().to(dtype)), reference(toy_input().to(dtype)))
    for name in ("a", "b"):
        manager.unload(name)
    base = toy().to(dtype)(toy_input().to(dtype))
    assert torch.equal(model(toy_input().to(dtype)), base)


@torch.no_grad()
def test_to_empty_starts_with_empty_slots() -> None:
    with torch.device("meta"):
        model = toy()
    SlotManager(model, max_rank=4, dora=True, bias=True)
    model.to_empty(device="cpu")
    model.load_state_dict(toy().state_dict())
    assert not any(buffer.any() for buffer in slot_buffers(model).values())
    assert torch.equal(model(toy_input()), toy()(toy_input()))
    SlotManager.of(model).load(adapter(1))
    reference = toy()
    SlotManager(reference, max_rank=4, dora=True, bias=True).load(adapter(1))
    assert torch.equal(model(toy_input()), reference(toy_input()))


def test_room_is_made_only_for_what_was_asked_and_state_dicts_know_nothing_of_it() -> None:
    shapes = {}
    for options in ({}, {"dora": True}, {"bias": True}, {"dora": True, "bias": True}):
        model = toy()
        keys = set(model.state_dict())
        SlotManager(model, max_rank=4, num_slots=2, **options)
        assert set(model.state_dict()) == keys
        layer = model.model.layers[0].q_proj.lora_slots
        shapes[tuple(options)] = {n: tuple(b.shape) for n, b in layer.named_buffers(recurse=False)}
    plain = {"lora_A": (8, 8), "lora_B": (8, 6), "scaling": (1, 8)}
    bias, dora = {"lora_bias": (2, 6)}, {"dora": (8, 6)}
    assert shapes == {
        (): plain,
        ("dora",): plain | dora,
        ("bias",): plain | bias,
        ("dora", "bias"): plain | dora | bias,
    }
