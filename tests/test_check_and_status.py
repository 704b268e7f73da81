"""`check`, `status`, `from_adapters` and `of`: what a manager tells, without changing anything."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from toys import (
    TINY,
    TOY_MODULES,
    Snapshot,
    pairs,
    places,
    slot_buffers,
    tensors_of,
    toy,
    toy_adapter,
    toy_folder,
    toy_input,
    write_adapter,
)

from lora_slots import (
    ArgumentError,
    AttachError,
    LoraSlotsError,
    NoFreeSlotError,
    NotAttachedError,
    RankTooLargeError,
    SlotManager,
    SlotStatus,
    TargetMismatchError,
    read_adapter,
)


@pytest.fixture
def model():
    return toy()


@pytest.fixture
def manager(model):
    return SlotManager(model, max_rank=8, num_slots=2)


@pytest.mark.parametrize("name", ["a", "new"])
def test_check_reports_what_load_reports_and_writes_nothing(model, manager, tmp_path, name):
    manager.load(toy_adapter(8), "a")
    folder = toy_folder(tmp_path / "a", 4, seed=2)
    before, where = Snapshot.of(manager, model), places(model)
    checked = manager.check(folder, name)
    before.assert_unchanged(manager, model)
    assert places(model) == where
    loaded = manager.load(folder, name)
    assert dataclasses.replace(checked, seconds=0) == dataclasses.replace(loaded, seconds=0)


@pytest.mark.parametrize(
    ("adapter", "name", "strict", "error"),
    [
        (toy_adapter(9), "a", True, RankTooLargeError),
        (toy_adapter(4, modules=["model.layers.9.q_proj"]), "a", False, TargetMismatchError),
        (toy_adapter(4), "third", True, NoFreeSlotError),
        (toy_adapter(4), "", True, ArgumentError),
        ("does/not/exist/anywhere", "a", True, LoraSlotsError),
    ],
)
def test_check_raises_what_load_raises(model, manager, adapter, name, strict, error):
    manager.load(toy_adapter(), "a")
    manager.load(toy_adapter(), "b")
    before = Snapshot.of(manager, model)
    messages = []
    for call in (manager.check, manager.load):
        with pytest.raises(error) as info:
            call(adapter, name, strict=strict)
        messages.append(str(info.value))
    assert messages[0] == messages[1]
    before.assert_unchanged(manager, model)


def test_the_status_lists_every_slot(manager, tmp_path):
    folder = toy_folder(tmp_path / "a", 4)
    manager.load(folder, "a", weight=-0.5)
    status = manager.status()
    assert status.slots == (
        SlotStatus(0, "a", str(folder), rank=4, weight=-0.5, active=True, modules=4),
        SlotStatus(1),
    )
    assert (status.enabled, status.max_rank) == (True, 8)
    (component,) = status.components.values()
    assert component.modules == 4
    assert component.nbytes == 4 * 16 * (8 + 6 + 1) * 4
    assert (component.dtypes, component.devices) == ((torch.float32,), (torch.device("cpu"),))
    assert list(map(str, status.slots)) == [
        f"slot 0: 'a' active, weight -0.5, rank 4, 4 modules, from {folder}",
        "slot 1: free",
    ]
    assert str(component) == "4 modules, 3.8 kB of buffers, float32, on cpu"


def test_the_status_follows_weights_activity_and_disabling(manager):
    manager.load(toy_adapter(), "a")
    manager.load(toy_adapter(), "b")
    manager.set_adapters(["a", "b"], [2.0, 0.0])
    manager.disable_adapters()
    status = manager.status()
    assert [(s.weight, s.active) for s in status.slots] == [(2.0, True), (0.0, False)]
    assert not status.enabled
    assert "adapters disabled" in str(status)
    manager.unload("a")
    assert manager.status().slots[0] == SlotStatus(0)


def test_a_status_is_a_picture_that_later_calls_do_not_change(manager):
    manager.load(toy_adapter(), "a")
    status = manager.status()
    before = str(status)
    manager.unload("a")
    assert str(status) == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        status.enabled = False


def test_the_status_counts_the_dtype_that_the_slots_were_given():
    model = toy()
    manager = SlotManager(model, max_rank=4, dtype=torch.bfloat16)
    (component,) = manager.status().components.values()
    assert component.dtypes == (torch.bfloat16,)
    assert component.nbytes == 4 * 4 * ((8 + 6) * 2 + 4)


def test_from_adapters_fits_the_sizes_and_loads_nothing(tmp_path):
    model = toy()
    small = toy_folder(tmp_path / "small", 2)
    ranks = {TOY_MODULES[0]: 5}
    large = tmp_path / "large.safetensors"
    from safetensors.torch import save_file

    save_file({k: v.contiguous() for k, v in tensors_of(pairs(ranks)).items()}, large)
    manager = SlotManager.from_adapters(model, [small, large], num_slots=2)
    assert manager.status().max_rank == 5
    assert manager.loaded_adapters == ()
    assert all(buffer.count_nonzero() == 0 for buffer in slot_buffers(model).values())
    assert torch.equal(model(toy_input()), toy()(toy_input()))
    manager.load(small, "small")
    manager.load(large, "large")
    with pytest.raises(RankTooLargeError, match="max_rank=6"):
        manager.load(toy_adapter(6), "large")


def test_from_adapters_gives_slots_to_the_adapters_modules_only(tmp_path):
    model = toy()
    adapter = tmp_path / "q"
    write_adapter(adapter, toy(), r=3, target_modules=["q_proj"])
    SlotManager.from_adapters(model, [adapter])
    assert {name.split(".lora_slots")[0] for name in slot_buffers(model)} == set(TOY_MODULES[::2])


def test_from_adapters_lets_the_caller_win(tmp_path):
    folder = toy_folder(tmp_path / "a", 2)
    model = toy()
    manager = SlotManager.from_adapters(
        model, [folder], max_rank=16, target_modules=["v_proj"], dtype=torch.float16
    )
    assert manager.status().max_rank == 16
    assert {name.split(".lora_slots")[0] for name in slot_buffers(model)} == set(TOY_MODULES[1::2])
    (component,) = manager.status().components.values()
    assert component.dtypes == (torch.float16,)


def test_from_adapters_refuses_an_adapter_of_another_model_and_none_at_all(tmp_path):
    model = toy()
    other = tmp_path / "llama"
    write_adapter(other, TINY["llama"].build(), r=2, target_modules=["gate_proj"])
    with pytest.raises(TargetMismatchError, match="gate_proj, which is no layer of this model"):
        SlotManager.from_adapters(model, [other])
    with pytest.raises(ArgumentError, match="at least one adapter"):
        SlotManager.from_adapters(model, [])
    assert slot_buffers(model) == {}


def test_of_finds_the_manager_of_a_model_plain_or_compiled(model, manager):
    assert SlotManager.of(model) is manager
    assert SlotManager.of(torch.compile(model, backend="eager")) is manager


def test_of_a_model_without_a_manager_is_an_error(model, manager):
    for other in (toy(), model.model):
        with pytest.raises(NotAttachedError, match="has no SlotManager; build one with"):
            SlotManager.of(other)
    assert issubclass(NotAttachedError, LookupError)
    with pytest.raises(ArgumentError, match=r"must be an nn\.Module, .* got int"):
        SlotManager.of(3)


def test_a_detached_manager_refuses_every_call(model, manager):
    manager.load(toy_adapter(), "a")
    manager.detach()
    calls = [
        lambda: manager.load(toy_adapter()),
        lambda: manager.check(toy_adapter()),
        lambda: manager.unload("a"),
        lambda: manager.set_adapters("a"),
        lambda: manager.set_weight("a", 1.0),
        manager.disable_adapters,
        manager.enable_adapters,
        manager.status,
        manager.detach,
        lambda: manager.verify(lambda: model(toy_input())),
    ]
    for call in calls:
        with pytest.raises(AttachError, match="was detached; build a new one"):
            call()
    with pytest.raises(NotAttachedError):
        SlotManager.of(model)
    assert manager.loaded_adapters == manager.active_adapters == ()


def test_the_repr_shows_sizes_and_names(manager):
    manager.load(toy_adapter(), "a")
    assert repr(manager) == "SlotManager(Toy, max_rank=8, num_slots=2, loaded=['a'])"


@pytest.mark.parametrize("argument", ["max_rank", "num_slots"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, None, "8"])
def test_sizes_must_be_whole_numbers_from_1(argument, value):
    model = toy()
    with pytest.raises(ArgumentError, match=f"{argument} must be a whole number from 1, got"):
        SlotManager(model, **{"max_rank": 8, argument: value})
    assert slot_buffers(model) == {}


@pytest.mark.parametrize("dtype", [torch.int8, "float16", float, torch.complex64])
def test_the_dtype_must_be_a_floating_point_dtype(dtype):
    with pytest.raises(ArgumentError, match=r"dtype must be a floating-point torch\.dtype"):
        SlotManager(toy(), max_rank=8, dtype=dtype)


def test_an_adapter_in_memory_needs_no_file(model, manager):
    report = manager.load(read_adapter(tensors_of(pairs({TOY_MODULES[0]: 2}))))
    assert report.source == "<tensors in memory>"
    assert report.modules == TOY_MODULES[:1]


def test_an_adapter_for_another_base_is_a_warning_where_the_load_stands():
    model = toy()
    model.config = types.SimpleNamespace(_name_or_path="maker/base")
    manager = SlotManager(model, max_rank=8)
    config = {"r": 4, "base_model_name_or_path": "maker/other"}
    with pytest.warns(UserWarning, match="trained on maker/other.*is maker/base") as caught:
        manager.load(toy_adapter().with_config(config))
    assert caught[0].filename == __file__
    assert manager.loaded_adapters == ("default",)


@pytest.mark.parametrize("ours", ["maker/base", "Maker/Base", "", "/a/folder", None])
@pytest.mark.parametrize("theirs", ["maker/base", "", None, "/some/where"])
def test_bases_that_agree_or_cannot_be_compared_give_no_warning(recwarn, ours, theirs):
    model = toy()
    model.config = types.SimpleNamespace(_name_or_path=ours)
    manager = SlotManager(model, max_rank=8)
    manager.load(toy_adapter().with_config({"r": 4, "base_model_name_or_path": theirs}))
    assert [str(w.message) for w in recwarn] == []
