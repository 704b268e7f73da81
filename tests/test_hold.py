"""Inside hold() adapters stay what they are; outside, loads wait for no more than they must."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from served import N, P, Served, X, adapter, served
from threads import LIMIT, Task, wait_until, waits
from toys import CountingBackend, Snapshot, slot_buffers, toy, toy_adapter, toy_input

from lora_slots import AttachError, HoldError, SlotManager

CHANGES: dict[str, Callable[[SlotManager], object]] = {
    "load a new name": lambda m: m.load(N, "other"),
    "load without activating": lambda m: m.load(N, "other", activate=False),
    "hotswap": lambda m: m.load(N, "a"),
    "unload": lambda m: m.unload("a"),
    "set_adapters": lambda m: m.set_adapters([]),
    "set_weight": lambda m: m.set_weight("a", 2.0),
    "disable": lambda m: m.disable_adapters(),
    "enable": lambda m: m.enable_adapters(),
    "warmup": lambda m: m.warmup(lambda: None),
    "detach": lambda m: m.detach(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_from_a_thread_that_holds_raises_and_changes_nothing(change):
    model, manager = served(2)
    manager.load(P, "a")
    before = Snapshot.of(manager, model)
    with manager.hold():
        with pytest.raises(HoldError, match="must not change inside hold"):
            CHANGES[change](manager)
        before.assert_unchanged(manager, model)
    CHANGES[change](manager)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_inside_a_forward_hook_raises_and_changes_nothing(change):
    model, manager = served(2)
    manager.load(P, "a")
    before = Snapshot.of(manager, model)
    errors = []

    def hook(*_: object) -> None:
        with pytest.raises(HoldError) as raised:
            CHANGES[change](manager)
        errors.append(raised.value)

    handle = model.first.register_forward_hook(hook)

    def forward() -> float:
        with manager.hold():
            return model(X).item()

    assert Task(forward).result() == 2
    handle.remove()
    assert len(errors) == 1
    before.assert_unchanged(manager, model)


def test_a_load_in_a_hook_without_hold_does_not_hang():
    model, manager = served()
    manager.load(P, "a")

    def hook(*_: object) -> None:
        manager.load(N, "a")

    model.first.register_forward_hook(hook)
    assert Task(lambda: model(X).item()).result() == 0  # one of each: there was no hold
    assert model(X).item() == -2


def between_layers(model: Served, manager: SlotManager, *, hold: bool) -> tuple[float, float]:
    """The output of a forward during which another thread swaps P for N, and of the next."""
    swap: list[Task] = []

    def hook(*_: object) -> None:
        swap.append(Task(lambda: manager.load(N, "a")))
        if hold:
            wait_until(lambda: manager._lock._closed)
        else:
            swap[0].result()

    handle = model.first.register_forward_hook(hook)
    if hold:
        with manager.hold():
            output = model(X).item()
    else:
        output = model(X).item()
    handle.remove()
    swap[0].result()
    return output, model(X).item()


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_forward_inside_hold_sees_one_adapter_from_first_layer_to_last(num_slots):
    model, manager = served(num_slots)
    manager.load(P, "a")
    assert between_layers(model, manager, hold=True) == (2, -2)


def test_without_hold_it_sees_a_mix():
    model, manager = served()
    manager.load(P, "a")
    assert between_layers(model, manager, hold=False) == (0, -2)


@pytest.mark.parametrize("rank_buckets", [None, [0, 8]])
def test_loading_an_inactive_adapter_waits_for_nobody_and_changes_no_bit(rank_buckets):
    model = toy()
    manager = SlotManager(model, max_rank=8, num_slots=3, rank_buckets=rank_buckets)
    manager.load(toy_adapter(8, seed=1), "a")
    with manager.hold():
        output = model(toy_input())
        tasks = [
            Task(lambda: manager.load(toy_adapter(6, seed=2), "b", activate=False)),
            Task(lambda: manager.load(toy_adapter(5, seed=3), "c", activate=False)),
        ]
        while any(task.thread.is_alive() for task in tasks):
            assert torch.equal(model(toy_input()), output)
        assert [task.result().adapter_name for task in tasks] == ["b", "c"]
        Task(lambda: manager.load(toy_adapter(7, seed=4), "b")).result()
        Task(lambda: manager.unload("c")).result()
        assert torch.equal(model(toy_input()), output)
    assert manager.loaded_adapters == ("a", "b")


def rows_by_rank(model):
    buffers = slot_buffers(model)
    return {name: b.t() if name.endswith("scaling") else b for name, b in buffers.items()}


def test_a_hotswap_with_a_free_slot_writes_beside_what_is_held_and_then_flips():
    model = toy()
    manager = SlotManager(model, max_rank=8, num_slots=2)
    manager.load(toy_adapter(8, seed=1), "a")
    before = {name: buffer.clone() for name, buffer in rows_by_rank(model).items()}
    with manager.hold():
        output = model(toy_input())
        swap = Task(lambda: manager.load(toy_adapter(8, seed=2), "a"))
        wait_until(lambda: manager._lock._closed)
        assert waits(swap)
        for name, buffer in rows_by_rank(model).items():
            assert torch.equal(buffer[:8], before[name][:8])
            assert buffer[8:].count_nonzero() > 0
        assert torch.equal(model(toy_input()), output)
        assert manager.status().slots[0].adapter_name == "a"
    assert swap.result().slot == 1
    assert [slot.adapter_name for slot in manager.status().slots] == [None, "a"]
    for name, buffer in rows_by_rank(model).items():
        assert buffer[:8].count_nonzero() == 0, name
    plain = toy()
    SlotManager(plain, max_rank=8).load(toy_adapter(8, seed=2))
    torch.testing.assert_close(model(toy_input()), plain(toy_input()), rtol=1e-5, atol=1e-5)


def test_hotswaps_go_to_and_fro_and_an_adapter_that_comes_back_is_bit_equal():
    model = toy()
    manager = SlotManager(model, max_rank=8, num_slots=3)
    outputs = {}
    for turn in range(6):
        seed = turn % 2
        report = manager.load(toy_adapter(8, seed=seed), "a")
        assert report.slot == manager.status().slots[seed].slot == seed
        assert manager.check(toy_adapter(8), "a").slot == 1 - seed
        assert torch.equal(outputs.setdefault(seed, model(toy_input())), model(toy_input()))


def test_without_a_free_slot_a_hotswap_waits_writes_and_flips():
    model, manager = served(2)
    manager.load(P, "a")
    manager.load(N, "b", activate=False)
    with manager.hold():
        before = Snapshot.of(manager, model)
        swap = Task(lambda: manager.load(N, "a"))
        wait_until(lambda: manager._lock._closed)
        before.assert_unchanged(manager, model)
    assert swap.result().slot == 0
    assert model(X).item() == -2


def test_reading_checking_and_staging_hold_nobody_up(monkeypatch):
    model, manager = served()
    manager.load(P, "a")
    reading, go_on = threading.Event(), threading.Event()
    prepare = manager._loader.prepare

    def slow(*args: object, **kwargs: object) -> object:
        prepared = prepare(*args, **kwargs)
        reading.set()
        assert go_on.wait(LIMIT)
        return prepared

    monkeypatch.setattr(manager._loader, "prepare", slow)
    load = Task(lambda: manager.load(N, "a"))
    assert reading.wait(LIMIT)
    with manager.hold():
        assert model(X).item() == 2
    manager.set_weight("a", 3.0)  # nor are other changes
    assert model(X).item() == 6
    go_on.set()
    load.result()
    assert model(X).item() == -6


def test_questions_are_answered_at_once_while_a_change_waits():
    _, manager = served(2)
    manager.load(P, "a")
    with manager.hold():
        swap = Task(lambda: manager.load(N, "b"))
        wait_until(lambda: manager._lock._closed)

        def ask() -> None:
            assert manager.loaded_adapters == manager.active_adapters == ("a",)
            assert manager.status().slots[1].adapter_name is None
            assert manager.check(N, "b").slot == 1
            assert "loaded=['a']" in repr(manager)

        Task(ask).result()
        ask()
    swap.result()
    assert manager.active_adapters == ("b",)


def test_a_compiled_forward_inside_hold_is_one_graph():
    model, manager = served(2)
    model.pause = False
    backend = CountingBackend()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    manager.load(P, "a")
    with manager.hold():
        assert compiled(X).item() == 2
    with manager.no_recompile():
        for _ in range(3):
            for source, value in ((N, -2), (P, 2)):
                Task(lambda s=source: manager.load(s, "a")).result()
                with manager.hold():
                    assert compiled(X).item() == value
    assert backend.graphs == 1


def test_a_warmup_may_hold_but_not_change():
    model, manager = served(2, rank_buckets=[0, 8])
    manager.load(P, "a")
    seen = []

    def forward() -> None:
        with manager.hold():
            seen.append(model.first.lora_slots.lora_A.shape[0])
        with pytest.raises(HoldError, match="warmup"):
            manager.load(N, "a")

    manager.warmup(forward)
    assert seen == [0, 8, 16]
    assert model(X).item() == 2


def test_a_copy_made_inside_hold_is_not_held():
    model, manager = served(2)
    manager.load(P, "a")
    with manager.hold():
        twin = copy.deepcopy(model)
        SlotManager.of(twin).load(adapter(3.0), "a")
        assert (twin(X).item(), model(X).item()) == (6, 2)
    assert SlotManager.of(twin)._bank._lock is SlotManager.of(twin)._lock


def test_a_detached_manager_cannot_be_held():
    _, manager = served()
    manager.load(P, "a")
    manager.detach()
    with pytest.raises(AttachError, match="was detached"):
        manager.hold()
    assert manager.loaded_adapters == ()
