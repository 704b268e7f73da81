"""Copies and pickles bring their own manager along; detach leaves the model as it came."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable

import pytest
import torch
from faults import Fault
from torch import nn
from toys import (
    TOY_MODULES,
    Snapshot,
    places,
    slot_buffers,
    toy,
    toy_adapter,
    toy_input,
)

from lora_slots import AttachError, NotAttachedError, SlotManager
from lora_slots import loading as loading_module


def by_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def by_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: tuple[Callable[[nn.Module], nn.Module], ...] = (copy.deepcopy, by_pickle, by_torch_save)


@pytest.fixture
def model():
    return toy()


@pytest.fixture
def manager(model):
    manager = SlotManager(model, max_rank=4, num_slots=2)
    manager.load(toy_adapter(4, seed=1), "a")
    manager.load(toy_adapter(2, seed=2), "b")
    manager.set_adapters(["a", "b"], [0.5, -1.0])
    return manager


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_has_an_equal_manager_of_its_own(model, manager, copied):
    twin = copied(model)
    other = SlotManager.of(twin)
    assert other is not manager
    assert torch.equal(twin(toy_input()), model(toy_input()))
    Snapshot.of(manager, model).assert_unchanged(other, twin)
    assert isinstance(twin.model.layers[0].q_proj, nn.Linear)
    assert type(twin.model.layers[0].q_proj) is type(model.model.layers[0].q_proj)
    shared = {p for _, p in places(model).values()} & {p for _, p in places(twin).values()}
    assert shared == set()


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_and_its_original_do_not_see_each_others_loads(model, manager, copied):
    twin = copied(model)
    other = SlotManager.of(twin)
    before, before_twin = Snapshot.of(manager, model), Snapshot.of(other, twin)
    other.load(toy_adapter(3, seed=5), "a", weight=2.0)
    other.unload("b")
    before.assert_unchanged(manager, model)
    twin = copied(model)
    other = SlotManager.of(twin)
    manager.load(toy_adapter(3, seed=6), "b")
    manager.unload("a")
    before_twin.assert_unchanged(other, twin)


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_can_do_all_that_the_original_could(model, manager, copied):
    twin = copied(model)
    other = SlotManager.of(twin)
    compiled = torch.compile(twin, backend="eager")
    compiled(toy_input())
    with other.no_recompile():
        other.load(toy_adapter(4, seed=9), "a")
        other.set_weight("b", 3.0)
        manager.load(toy_adapter(4, seed=9), "a")
        manager.set_weight("b", 3.0)
        assert torch.equal(compiled(toy_input()), model(toy_input()))
    other.verify(lambda: twin(toy_input()))
    other.detach()
    assert torch.equal(twin(toy_input()), toy()(toy_input()))
    assert type(twin.model.layers[0].q_proj) is nn.Linear


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("swaps", [0, 1, 2, 3])
def test_a_failed_write_in_a_copy_is_rolled_back_whatever_the_original_did(
    model, manager, copied, swaps
):
    twin = copied(model)
    other = SlotManager.of(twin)
    for swap in range(swaps):
        manager.load(toy_adapter(4, seed=20 + swap), "a")
    before = Snapshot.of(other, twin)
    with pytest.raises(RuntimeError, match="fault"), Fault(0, RuntimeError("fault"), only=twin):
        other.load(toy_adapter(4, seed=9), "a")
    before.assert_unchanged(other, twin)


def test_a_shared_module_stays_shared_in_a_copy(model):
    model.model.layers[1].q_proj = model.model.layers[0].q_proj
    SlotManager(model, max_rank=4)
    twin = copy.deepcopy(model)
    assert twin.model.layers[1].q_proj is twin.model.layers[0].q_proj
    SlotManager.of(twin).load(toy_adapter(modules=["model.layers.1.q_proj"]))
    changed = twin(toy_input()) != model(toy_input())
    assert changed.flatten(2).any(dim=2).tolist() == [[True, False], [True, False]]


def test_a_copy_of_a_part_has_its_slots_but_no_manager(model, manager):
    part = copy.deepcopy(model.model.layers[0])
    assert torch.equal(part(toy_input()), model.model.layers[0](toy_input()))
    with pytest.raises(NotAttachedError):
        SlotManager.of(part)


def test_a_saved_model_loads_in_another_process(tmp_path):
    plain = nn.Sequential(nn.Linear(8, 6))
    SlotManager(plain, max_rank=2).load(toy_adapter(2, modules=["0"]), "a")
    path = tmp_path / "model.pt"
    torch.save(plain, path)
    code = (
        "import torch\n"
        f"model = torch.load({str(path)!r}, weights_only=False)\n"
        "from lora_slots import SlotManager\n"
        "print(SlotManager.of(model), model(torch.ones(8)).tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    manager = "SlotManager(Sequential, max_rank=2, num_slots=1, loaded=['a'])"
    assert done.stdout.strip() == f"{manager} {plain(torch.ones(8)).tolist()}"


def test_the_size_of_a_pickle_does_not_double_the_staged_copies(model, manager):
    plain = len(pickle.dumps(toy()))
    slots = sum(b.numel() * b.element_size() for b in slot_buffers(model).values())
    held = (4 + 2) * (8 + 6) * 4 * 4
    assert len(pickle.dumps(model)) < plain + slots + held + 20_000


def test_detach_leaves_the_model_as_it_came(model):
    def picture(module: nn.Module) -> object:
        return {
            path: (type(m), list(vars(m)), list(m._modules), list(m._buffers), list(m._parameters))
            for path, m in module.named_modules()
        }

    before = picture(model)
    manager = SlotManager(model, max_rank=4)
    assert picture(model) != before
    manager.load(toy_adapter())
    model(toy_input())
    manager.detach()
    assert picture(model) == before
    assert slot_buffers(model) == {}
    assert torch.equal(model(toy_input()), toy()(toy_input()))


def test_a_detached_model_can_be_given_slots_again(model, manager):
    manager.detach()
    again = SlotManager(model, max_rank=8, target_modules=["q_proj"])
    assert again.load(toy_adapter(8, modules=TOY_MODULES[::2])).modules == TOY_MODULES[::2]
    assert SlotManager.of(model) is again
    with pytest.raises(AttachError, match="was detached"):
        manager.load(toy_adapter())


@pytest.mark.parametrize("call", ["load", "check", "set_adapters"])
def test_what_is_reading_while_the_manager_is_detached_says_so(model, manager, monkeypatch, call):
    manager.unload("a")
    manager.add("c", toy_adapter())
    resolve = loading_module.resolve

    def detaching(*args: object, **options: object) -> object:
        manager.detach()
        return resolve(*args, **options)

    monkeypatch.setattr(loading_module, "resolve", detaching)
    with pytest.raises(AttachError, match="was detached"):
        getattr(manager, call)("c" if call == "set_adapters" else toy_adapter())
    assert slot_buffers(model) == {}


def test_detaching_frees_the_buffers_even_if_the_manager_is_kept(model, manager):
    buffers = [weakref.ref(buffer) for buffer in slot_buffers(model).values()]
    manager.detach()
    gc.collect()
    assert [buffer().shape for buffer in buffers if buffer() is not None] == []


class Double(nn.Module):
    def forward(self, weight):
        return weight * 2


def test_a_layer_whose_class_changed_since_is_detached_or_refused_and_keeps_working(model):
    layer = model.model.layers[0].q_proj
    manager = SlotManager(model, max_rank=4)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Double())
    parametrized = model(toy_input())
    assert torch.equal(parametrized[0, 0], 2 * toy()(toy_input())[0, 0])
    manager.load(toy_adapter())
    loaded = model(toy_input())
    assert not torch.equal(loaded, parametrized)
    try:
        manager.detach()
    except AttachError as error:
        assert "layers.0.q_proj" in str(error)  # noqa: PT017
        assert torch.equal(model(toy_input()), loaded)
    else:
        assert torch.equal(model(toy_input()), parametrized)


def test_a_parametrized_layer_takes_slots(model):
    layer = model.model.layers[0].q_proj
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Double())
    parametrized = model(toy_input())
    cls = type(layer)
    manager = SlotManager(model, max_rank=4)
    assert torch.equal(model(toy_input()), parametrized)
    manager.load(toy_adapter())
    delta = model(toy_input()) - parametrized
    plain = toy()
    SlotManager(plain, max_rank=4).load(toy_adapter())
    torch.testing.assert_close(delta, plain(toy_input()) - toy()(toy_input()), rtol=1e-4, atol=1e-5)
    manager.detach()
    assert type(layer) is cls
    assert torch.equal(model(toy_input()), parametrized)
