"""All layers on a device read the weights of adapters from one place, wherever the model goes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from toys import TOY_MODULES, Snapshot, slot_buffers, toy, toy_adapter, toy_input

from lora_slots import SlotManager
from lora_slots.layers import Mix


@pytest.fixture
def model() -> nn.Module:
    return toy()


@pytest.fixture
def manager(model: nn.Module) -> SlotManager:
    manager = SlotManager(model, max_rank=4, num_slots=2)
    for seed, name in enumerate("ab"):
        manager.load(toy_adapter(4, seed=seed), name)
    manager.set_adapters(["a", "b"], [0.5, -2.0])
    return manager


def mixes(model: nn.Module) -> list[Mix]:
    return list({module.lora_slots.mix: None for module in slotted(model)})


def slotted(model: nn.Module) -> list[nn.Module]:
    return [model.get_submodule(name) for name in TOY_MODULES]


def assert_mix(mix: Mix, a: float, b: float) -> None:
    assert mix.rows.dtype == mix.slots.dtype == torch.float32
    assert mix.owners.dtype == torch.int64
    assert mix.rows.tolist() == [[a] * 4 + [b] * 4]
    assert mix.slots.tolist() == [[a, b]]
    assert mix.owners.tolist() == [0] * 4 + [1] * 4


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "as it is": lambda model: model,
    "half and back": lambda model: model.half().float(),
    "double and back": lambda model: model.double().float(),
    "share_memory": lambda model: model.share_memory(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "deepcopy of half": lambda model: copy.deepcopy(model.half()).float(),
}


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_one_table_holds_the_weights_of_all_layers(
    model: nn.Module, manager: SlotManager, way: str
) -> None:
    model = WAYS[way](model)
    (mix,) = mixes(model)
    assert_mix(mix, 0.5, -2.0)
    place = mix.rows.data_ptr()
    manager = SlotManager.of(model)
    manager.set_adapters("b", 3.0)
    assert_mix(mix, 0.0, 3.0)
    manager.set_adapters([])
    assert mixes(model) == [mix]
    assert mix.rows.data_ptr() == place
    assert torch.equal(model(toy_input()), WAYS[way](toy())(toy_input()))


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_row_is_multiplied_by_its_scaling_and_weight(model: nn.Module, num_slots: int) -> None:
    manager = SlotManager(model, max_rank=4, num_slots=num_slots)
    manager.load(toy_adapter(3, alpha=6), weight=0.25)
    slots = slotted(model)[0].lora_slots
    assert slots.by_row().tolist() == [[0.5] * 3 + [0.0] * (4 * num_slots - 3)]
    manager.set_weight("default", -1.5)
    assert slots.by_row().tolist() == [[-3.0] * 3 + [0.0] * (4 * num_slots - 3)]
    manager.disable_adapters()
    assert not slots.by_row().any()
    # What layers have in common decides which kernels inductor makes of them.
    assert slots.mix.of_rows(slots.scaling).shape == (1, 1 if num_slots == 1 else 8)


def test_a_copy_has_weights_of_its_own(model: nn.Module, manager: SlotManager) -> None:
    twin = copy.deepcopy(model)
    before = Snapshot.of(manager, model)
    SlotManager.of(twin).set_adapters("b", 3.0)
    before.assert_unchanged(manager, model)


def test_to_empty_keeps_the_weights(model: nn.Module, manager: SlotManager) -> None:
    model.to_empty(device="cpu")
    (mix,) = mixes(model)
    assert_mix(mix, 0.5, -2.0)


def test_layers_on_two_devices_have_a_table_each(model: nn.Module, manager: SlotManager) -> None:
    model.model.layers[1].to("meta")
    manager.set_weight("a", 0.25)
    near, far = mixes(model)
    assert_mix(near, 0.25, -2.0)
    assert far.rows.is_meta
    for layer in slotted(model):
        slots = layer.lora_slots
        assert slots.mix is (far if slots.scaling.is_meta else near)


def test_a_layer_that_was_moved_without_a_word_still_finds_its_weights(
    model: nn.Module, manager: SlotManager
) -> None:
    slots = slotted(model)[0].lora_slots
    for name, buffer in slots.named_buffers(recurse=False):
        slots._buffers[name] = buffer.to("meta")
    assert slots.by_row().is_meta
    # The next load notices.
    manager.load(toy_adapter(4, modules=TOY_MODULES[2:], seed=2), "a", weight=0.25)
    near, far = mixes(model)[1], slots.mix
    assert far.rows.is_meta
    assert_mix(near, 0.25, -2.0)


def test_a_failed_change_of_weights_leaves_the_table(
    model: nn.Module, manager: SlotManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, output = Snapshot.of(manager, model), model(toy_input())
    copy_ = Tensor.copy_
    calls = 0

    def dying(into: Tensor, *args: object, **kwargs: object) -> Tensor:
        nonlocal calls
        calls += 1
        result = copy_(into, *args, **kwargs)
        if calls == 1:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Tensor, "copy_", dying)
    with pytest.raises(KeyboardInterrupt):
        manager.set_adapters("b", 3.0)
    assert calls >= 2
    before.assert_unchanged(manager, model)
    assert torch.equal(model(toy_input()), output)
    manager.set_adapters("b", 3.0)
    (mix,) = mixes(model)
    assert_mix(mix, 0.0, 3.0)


def test_routes_follow_to_empty() -> None:
    model = toy()
    manager = SlotManager(model, max_rank=4, num_slots=2, routing=True)
    manager.load(toy_adapter(4), "a")
    manager.route(["a", None])
    routes = slotted(model)[0].lora_slots.routes
    names = ("picks", "factors", "weights")
    before = {name: getattr(routes, name).clone() for name in names}
    model.to_empty(device="cpu")
    for name, table in before.items():
        assert torch.equal(getattr(routes, name), table), name


def test_what_is_written_for_a_switch_does_not_grow_with_the_layers(
    model: nn.Module, manager: SlotManager
) -> None:
    versions = {name: buffer._version for name, buffer in slot_buffers(model).items()}
    manager.set_adapters("b")
    manager.disable_adapters()
    assert versions == {name: buffer._version for name, buffer in slot_buffers(model).items()}


@pytest.mark.parametrize("routing", [False, True])
def test_what_goes_to_meta_leaves_the_weights_to_the_layers_that_stay(routing: bool) -> None:
    model = toy()
    manager = SlotManager(model, max_rank=4, num_slots=2, routing=routing)
    manager.load(toy_adapter(4), "a")
    if routing:
        manager.route(["a", None, "a"])
    gone, stays = model.model.layers
    output, mix = stays(toy_input()), stays.q_proj.lora_slots.mix
    gone.to("meta")
    assert torch.equal(stays(toy_input()), output)
    manager.set_weight("a", 0.25)
    assert stays.q_proj.lora_slots.mix is mix


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float64])
def test_a_cast_leaves_the_table_where_it_is(
    model: nn.Module, manager: SlotManager, cast: torch.dtype
) -> None:
    (mix,) = mixes(model)
    rows, slots = mix.rows, mix.slots
    model.to(cast)
    assert mix.rows is rows
    assert mix.slots is slots
    assert_mix(mix, 0.5, -2.0)
