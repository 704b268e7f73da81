"""An eviction and the load it is for are one write: whole or not at all, and unseen by others."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from served import adapter, served
from test_eviction import evicted_by_a_load, full, pool
from test_failed_write_is_rolled_back import Fault, count_operations
from threads import Task, wait_until
from toys import CountingBackend, Snapshot, places, toy, toy_adapter, toy_folder, toy_input

from lora_slots import SlotManager


@pytest.mark.parametrize("start", [full, pool])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_fault_in_any_operation_leaves_everyone_where_he_was(start, error):
    def load(manager: SlotManager) -> None:
        manager.load(toy_adapter(8, seed=9), "new", weight=0.5)

    model, manager = start()
    manager.set_adapters("c")
    operations = count_operations(manager, load)
    after = Snapshot.of(manager, model)
    for operation in range(operations):
        model, manager = start()
        manager.set_adapters("c")
        before, output = Snapshot.of(manager, model), model(toy_input())
        with pytest.raises(error, match="fault"), Fault(operation, error("fault")):
            load(manager)
        before.assert_unchanged(manager, model)
        assert torch.equal(model(toy_input()), output)
        assert manager.check(toy_adapter(4), "new").evicted == ("a",)
    load(manager)
    after.assert_unchanged(manager, model)


def test_an_eviction_waits_for_nobody_who_would_not_notice_and_changes_no_bit():
    model, manager = full(routing=True)
    manager.route(["c", None, "c"])
    with manager.hold():
        output = model(toy_input())
        load = Task(lambda: manager.load(toy_adapter(8, seed=9), "new", activate=False))
        while load.thread.is_alive():
            assert torch.equal(model(toy_input()), output)
        assert load.result().evicted == ("a",)
        assert torch.equal(model(toy_input()), output)


def test_what_a_forward_would_notice_waits_for_it():
    model, manager = served(2, on_full="evict")
    for value in (1.0, 2.0):
        manager.load(adapter(value), str(value))
    x = torch.ones(1, 4)
    with manager.hold():
        load = Task(lambda: manager.load(adapter(3.0), "3.0"))
        wait_until(lambda: manager._lock._closed)
        assert model(x).item() == 4
        assert manager.loaded_adapters == ("1.0", "2.0")
    assert load.result().evicted == ("1.0",)
    assert model(x).item() == 6


def test_evictions_compile_nothing_and_keep_all_memory():
    model, manager = full(num_slots=4)
    compiled = torch.compile(model, backend=(backend := CountingBackend()), fullgraph=True)
    compiled(toy_input())
    where = places(model)
    with manager.no_recompile():
        for seed in range(12):
            manager.load(toy_adapter(1 + seed % 8, seed=seed), str(seed))
            plain = toy()
            SlotManager(plain, max_rank=8).load(toy_adapter(1 + seed % 8, seed=seed))
            torch.testing.assert_close(
                compiled(toy_input()), plain(toy_input()), rtol=1e-5, atol=1e-4
            )
    assert manager.loaded_adapters == ("8", "9", "10", "11")
    assert (places(model), backend.graphs) == (where, 1)
    # The twin: another shape is another graph.
    compiled(toy_input(5))
    assert backend.graphs == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_remember_who_was_used_and_who_is_pinned(copied):
    model, manager = full()
    manager.load(toy_adapter(4), "b", pin=True, activate=False)
    manager.set_weight("a", 0.5)
    own = SlotManager.of(copied(model))
    before = Snapshot.of(manager, model)
    assert [evicted_by_a_load(own, name) for name in "xyz"] == [("c",), ("a",), ("x",)]
    before.assert_unchanged(manager, model)
    assert evicted_by_a_load(manager) == ("c",)


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
def test_what_was_evicted_comes_back_as_it_was(tmp_path: Path, cache_bytes: int):
    paths = [toy_folder(tmp_path / str(n), 3 + n, seed=n) for n in range(4)]
    model, manager = full("", num_slots=2, cache_bytes=cache_bytes)
    outputs = {}
    for turn in range(16):
        path = paths[(turn * turn) % 4 if turn % 3 else turn % 4]
        if path.name in manager.loaded_adapters:
            manager.set_adapters(path.name)
        else:
            report = manager.load(path, path.name)
            assert report.cached == (cache_bytes > 0 and path in outputs)
        output = model(toy_input())
        torch.testing.assert_close(outputs.setdefault(path, output), output, rtol=1e-5, atol=1e-5)
    assert len(outputs) == 4
