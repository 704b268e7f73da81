"""accelerate puts a forward on the instance; slots work before, under and after it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from torch import nn
from toys import TOY_MODULES, expected_toy, pairs, slot_buffers, toy, toy_adapter, toy_input

from lora_slots import SlotManager


def one_hook(model: nn.Module) -> None:
    for path in TOY_MODULES:
        add_hook_to_module(model.get_submodule(path), ModelHook())


def two_hooks(model: nn.Module) -> None:
    for path in TOY_MODULES:
        for _ in range(2):
            add_hook_to_module(model.get_submodule(path), ModelHook(), append=True)


def align_devices(model: nn.Module) -> None:
    for path in TOY_MODULES:
        hook = AlignDevicesHook(execution_device="cpu", io_same_device=True)
        add_hook_to_module(model.get_submodule(path), hook)


def dispatched(model: nn.Module) -> None:
    dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)


def offloaded(model: nn.Module) -> None:
    cpu_offload(model, execution_device=torch.device("cpu"))


def offloaded_with_buffers(model: nn.Module) -> None:
    cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)


HOOKS: tuple[Callable[[nn.Module], None], ...] = (
    one_hook,
    two_hooks,
    align_devices,
    dispatched,
    offloaded,
    offloaded_with_buffers,
)
BASE = toy()(toy_input())


def assert_adapter_works(model: nn.Module, manager: SlotManager) -> None:
    """Load, compare with the oracle, and unload."""
    assert torch.equal(model(toy_input()), BASE)
    for seed, rank in enumerate((4, 2)):
        manager.load(toy_adapter(rank, seed=seed))
        parts = pairs(dict.fromkeys(TOY_MODULES, rank), seed=seed)
        expected = expected_toy(toy(), toy_input(), parts, dict.fromkeys(TOY_MODULES, 8 / rank))
        torch.testing.assert_close(model(toy_input()), expected, rtol=1e-5, atol=1e-5)
    manager.unload("default")
    assert torch.equal(model(toy_input()), BASE)


@pytest.mark.parametrize("hook", HOOKS)
def test_slots_work_in_a_model_that_had_hooks_before(hook):
    model = toy()
    hook(model)
    manager = SlotManager(model, max_rank=4)
    assert not any(buffer.is_meta for buffer in slot_buffers(model).values())
    assert_adapter_works(model, manager)
    remove_hook_from_submodules(model)
    assert_adapter_works(model, manager)


@pytest.mark.parametrize("hook", HOOKS)
def test_slots_work_in_a_model_that_gets_hooks_afterwards(hook):
    model = toy()
    manager = SlotManager(model, max_rank=4)
    manager.load(toy_adapter(3, seed=9))
    hook(model)
    manager.unload("default")
    assert_adapter_works(model, manager)
    remove_hook_from_submodules(model)
    assert_adapter_works(model, manager)


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_are_run_as_often_with_slots_as_without(hook):
    counts = []
    for slots in (False, True):
        model, calls = toy(), []
        hook(model)
        layer = model.model.layers[0].q_proj
        _count_calls(layer._hf_hook, calls)
        if slots:
            SlotManager(model, max_rank=4)
        model(toy_input())
        counts.append(len(calls))
    assert counts[0] == counts[1] == 1


def _count_calls(hook: ModelHook, calls: list[int]) -> None:
    pre_forward = hook.pre_forward

    def counted(module, *args, **kwargs):
        calls.append(1)
        return pre_forward(module, *args, **kwargs)

    hook.pre_forward = counted


@pytest.mark.parametrize("hook", HOOKS)
def test_detaching_under_hooks_leaves_a_hooked_model_as_it_came(hook):
    model, untouched = toy(), toy()
    hook(model)
    hook(untouched)
    manager = SlotManager(model, max_rank=4)
    manager.load(toy_adapter())
    manager.detach()
    assert torch.equal(model(toy_input()), BASE)
    for path in TOY_MODULES:
        layer, reference = model.get_submodule(path), untouched.get_submodule(path)
        assert type(layer) is nn.Linear
        assert vars(layer).keys() == vars(reference).keys()
        assert layer._old_forward.__func__ is nn.Linear.forward
        assert layer._modules == {}
    remove_hook_from_submodules(model)
    assert torch.equal(model(toy_input()), BASE)


@pytest.mark.parametrize("hook", HOOKS)
def test_detaching_after_hooks_came_and_went_leaves_plain_layers(hook):
    model = toy()
    manager = SlotManager(model, max_rank=4)
    hook(model)
    manager.load(toy_adapter())
    remove_hook_from_submodules(model)
    manager.detach()
    assert torch.equal(model(toy_input()), BASE)
    for path in TOY_MODULES:
        layer = model.get_submodule(path)
        assert type(layer) is nn.Linear
        assert "forward" not in vars(layer)
        assert layer.forward.__func__ is nn.Linear.forward


def test_a_hook_that_was_removed_before_leaves_no_obstacle():
    model = toy()
    one_hook(model)
    remove_hook_from_module(model, recurse=True)
    assert_adapter_works(model, SlotManager(model, max_rank=4))


def test_a_hooked_layer_behind_a_sequence_of_hooks_is_placed_where_it_computes():
    model = toy()
    offloaded(model)
    layer = model.model.layers[0].q_proj
    add_hook_to_module(layer, ModelHook(), append=True)
    assert isinstance(layer._hf_hook, SequentialHook)
    assert layer.weight.is_meta
    assert_adapter_works(model, SlotManager(model, max_rank=4))


@pytest.mark.parametrize("hook", [one_hook, align_devices, offloaded])
def test_a_copy_of_a_hooked_model_has_slots_of_its_own(hook):
    model = toy()
    hook(model)
    manager = SlotManager(model, max_rank=4)
    twin = copy.deepcopy(model)
    SlotManager.of(twin).load(toy_adapter())
    assert (twin(toy_input()) != BASE).any(dim=-1).all()
    assert torch.equal(model(toy_input()), BASE)
    manager.load(toy_adapter())
    assert torch.equal(twin(toy_input()), model(toy_input()))
