"""Prefetch reads in the background: into the host cache, never into a slot, and nothing twice."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from threads import LIMIT, Task, together, wait_until, wait_until_gone
from torch import nn
from toys import Snapshot, holdings, slot_buffers, toy, toy_adapter, toy_folder, toy_input

from lora_slots import (
    AdapterFileError,
    ArgumentError,
    AttachError,
    Prefetch,
    SlotManager,
    UnknownAdapterError,
)
from lora_slots import loading as loading_module
from lora_slots import prefetching as prefetching_module

MEGABYTE = 1 << 20
WEIGHTS = "adapter_model.safetensors"


class Reads:
    """Every file that is read; the first reading waits until it may go on."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self._read = loading_module.read_file

    def __call__(self, source: object) -> object:
        self.seen.append(Path(str(source)).name)
        self.begun.set()
        assert self.go_on.wait(LIMIT)
        return self._read(source)


@pytest.fixture
def reads(monkeypatch) -> Reads:
    reads = Reads()
    monkeypatch.setattr(loading_module, "read_file", reads)
    return reads


def start(root: Path, count: int = 3, **options: object) -> tuple[torch.nn.Module, SlotManager]:
    model = toy()
    options = {"max_rank": 8, "num_slots": 3, "cache_bytes": MEGABYTE, **options}
    manager = SlotManager(model, **options)
    for number in range(count):
        manager.add(f"n{number}", toy_folder(root / f"n{number}", 4, seed=number))
    return model, manager


def held_up(manager: SlotManager, reads: Reads, count: int) -> Prefetch:
    """Prefetch as many adapters; two are being read, and no further until ``reads.go_on``."""
    reads.go_on.clear()
    handle = manager.prefetch([f"n{number}" for number in range(count)])
    wait_until(lambda: len(reads.seen) == 2)
    return handle


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lora_slots prefetch"]


def test_a_prefetched_adapter_is_used_without_reading_and_no_slot_was_touched(tmp_path, reads):
    model, manager = start(tmp_path)
    manager.load(toy_adapter(8, seed=9), "mine")
    before = {name: b.clone() for name, b in slot_buffers(model).items()}
    handle = manager.prefetch(["n0", "n1"])
    assert handle.wait(LIMIT)
    assert (handle.done(), handle.errors, handle.adapter_names) == (True, {}, ("n0", "n1"))
    assert manager.loaded_adapters == ("mine",)
    assert all(torch.equal(before[name], b) for name, b in slot_buffers(model).items())
    assert sorted(reads.seen) == ["n0", "n1"]
    manager.set_adapters(["n0", "n1"])
    assert sorted(reads.seen) == ["n0", "n1"]
    counts = manager.status().counts
    assert (counts.prefetched, counts.loads, counts.cache_hits) == (2, 3, 2)
    twin, other = start(tmp_path)
    other.load(toy_adapter(8, seed=9), "mine")
    other.set_adapters(["n0", "n1"])
    assert torch.equal(model(toy_input()), twin(toy_input()))


def test_prefetch_returns_at_once_and_changes_may_go_on(tmp_path, reads):
    _, manager = start(tmp_path)
    reads.go_on.clear()
    handle = manager.prefetch("n0")
    assert reads.begun.wait(LIMIT)
    with manager.hold():
        assert not handle.done()
        assert not handle.wait(0.01)
        assert repr(handle) == "Prefetch(0 of 1 done, 0 failed)"
    manager.load(toy_adapter(seed=9), "mine")  # in memory: nothing is read
    reads.go_on.set()
    assert handle.wait(LIMIT)
    assert repr(handle) == "Prefetch(1 of 1 done, 0 failed)"


def test_what_is_needed_while_it_is_read_is_waited_for_and_not_read_twice(tmp_path, reads):
    _, manager = start(tmp_path)
    reads.go_on.clear()
    handle = manager.prefetch("n0")
    assert reads.begun.wait(LIMIT)
    uses = [Task(lambda: manager.set_adapters("n0")), Task(lambda: manager.check(tmp_path / "n0"))]
    assert all(use.thread.is_alive() for use in uses)
    reads.go_on.set()
    for use in uses:
        use.result()
    assert handle.wait(LIMIT)
    assert reads.seen == ["n0"]
    assert manager.active_adapters == ("n0",)


def test_threads_that_load_one_file_at_once_read_it_once(tmp_path, reads):
    _, manager = start(tmp_path, num_slots=8)
    path = tmp_path / "n0"
    together(*[lambda n=n: manager.load(path, f"name {n}") for n in range(8)])
    assert reads.seen == ["n0"]
    held = [manager._bank.held(slot) for slot in range(8)]
    assert all(staged is held[0] for staged in held)


def test_this_check_sees_a_file_that_is_read_twice(tmp_path, reads):
    _, manager = start(tmp_path, num_slots=8, cache_bytes=0)
    path = tmp_path / "n0"
    together(*[lambda n=n: manager.load(path, f"name {n}") for n in range(8)])
    assert reads.seen == ["n0"] * 8


def test_one_that_is_only_queued_is_not_waited_for(tmp_path, reads):
    _, manager = start(tmp_path, count=6)
    handle = held_up(manager, reads, count=5)
    use = Task(lambda: manager.set_adapters("n4"))
    wait_until(lambda: "n4" in reads.seen)
    reads.go_on.set()
    use.result()
    assert handle.wait(LIMIT)
    assert sorted(reads.seen) == [f"n{number}" for number in range(5)]


def break_file(folder: Path) -> bytes:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(b"no tensors")
    return whole


USES: dict[str, Callable[[SlotManager, Path], object]] = {
    "set_adapters": lambda m, path: m.set_adapters("n1"),
    "route": lambda m, path: m.route(["n1"]),
    "load": lambda m, path: m.load(path, "n1"),
}


@pytest.mark.parametrize("use", USES)
def test_an_error_of_the_background_is_raised_at_use_with_the_name_of_the_file(tmp_path, use):
    model, manager = start(tmp_path, routing=True)
    whole = break_file(tmp_path / "n1")
    handle = manager.prefetch(["n0", "n1", "n2"])
    assert handle.wait(LIMIT)
    assert list(handle.errors) == ["n1"]
    assert isinstance(handle.errors["n1"], AdapterFileError)
    manager.set_adapters(["n0", "n2"])  # which the others know nothing of
    before = Snapshot.of(manager, model)
    for _ in range(2):
        with pytest.raises(AdapterFileError, match=str(tmp_path / "n1" / WEIGHTS)):
            USES[use](manager, tmp_path / "n1")
        before.assert_unchanged(manager, model)
    (tmp_path / "n1" / WEIGHTS).write_bytes(whole)  # and once the file is whole, all is well
    USES[use](manager, tmp_path / "n1")
    assert "n1" in manager.loaded_adapters


def test_a_file_that_changed_since_is_read_again(tmp_path, reads):
    model, manager = start(tmp_path)
    assert manager.prefetch("n0").wait(LIMIT)
    toy_folder(tmp_path / "n0", 6, seed=7)
    manager.set_adapters("n0")
    assert reads.seen == ["n0", "n0"]
    twin = toy()
    SlotManager(twin, max_rank=8, num_slots=3).load(tmp_path / "n0")
    assert torch.equal(model(toy_input()), twin(toy_input()))


def test_what_is_loaded_is_not_prefetched_and_what_is_cached_not_read(tmp_path, reads):
    _, manager = start(tmp_path)
    manager.set_adapters("n0")
    assert manager.prefetch("n1").wait(LIMIT)
    handle = manager.prefetch(["n0", "n1", "n2"])
    assert handle.adapter_names == ("n1", "n2")
    assert handle.wait(LIMIT)
    assert reads.seen == ["n0", "n1", "n2"]
    assert manager.status().counts.prefetched == 2


def test_an_adapter_larger_than_the_cache_is_an_error_of_the_prefetch_alone(tmp_path):
    _, manager = start(tmp_path, cache_bytes=100)
    handle = manager.prefetch("n0")
    assert handle.wait(LIMIT)
    assert "cache_bytes is 100" in str(handle.errors["n0"])
    manager.set_adapters("n0")


def test_without_a_cache_or_with_an_unknown_name_nothing_begins(tmp_path, reads):
    _, manager = start(tmp_path)
    with pytest.raises(UnknownAdapterError, match="catalogue of 3 adapters has no such name"):
        manager.prefetch(["n0", "who"])
    with pytest.raises(ArgumentError, match="a name or a sequence of names"):
        manager.prefetch(3)
    _, manager = start(tmp_path, cache_bytes=0)
    with pytest.raises(ArgumentError, match="cache_bytes"):
        manager.prefetch("n0")
    assert reads.seen == []


def test_cancel_begins_nothing_more(tmp_path, reads):
    _, manager = start(tmp_path, count=6)
    handle = held_up(manager, reads, count=6)
    handle.cancel()
    reads.go_on.set()
    assert handle.wait(LIMIT)
    assert sorted(reads.seen) == ["n0", "n1"]
    assert handle.errors == {}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_made_while_a_prefetch_runs_is_whole_and_reads_for_itself(tmp_path, reads, copied):
    model, manager = start(tmp_path)
    manager.load(toy_adapter(seed=9), "mine")
    handle = held_up(manager, reads, count=3)
    twin = copied(model)
    other = SlotManager.of(twin)
    reads.go_on.set()
    assert handle.wait(LIMIT)
    assert other.catalogue == manager.catalogue
    assert len(other._loader.cache) == 0
    assert other.prefetch("n0").wait(LIMIT)
    for each in (manager, other):
        each.set_adapters("n0")
    assert torch.equal(model(toy_input()), twin(toy_input()))
    assert sorted(reads.seen) == ["n0", "n0", "n1", "n2"]


def test_detach_drops_what_nobody_has_begun(tmp_path, reads):
    _, manager = start(tmp_path, count=6)
    handle = held_up(manager, reads, count=6)
    manager.detach()
    reads.go_on.set()
    assert handle.wait(LIMIT)
    assert sorted(reads.seen) == ["n0", "n1"]
    assert {name: type(error) for name, error in handle.errors.items()} == {
        "n0": AttachError,
        "n1": AttachError,
    }
    wait_until(lambda: readers() == [])


def test_a_detach_that_is_refused_drops_nothing(tmp_path, reads):
    model, manager = start(tmp_path, count=4)
    handle = held_up(manager, reads, count=4)
    layer = model.model.layers[0].q_proj
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    with pytest.raises(AttachError, match="q_proj has become"):
        manager.detach()
    reads.go_on.set()
    assert handle.wait(LIMIT)
    assert sorted(reads.seen) == ["n0", "n1", "n2", "n3"]
    assert handle.errors == {}


def test_no_thread_is_left_when_there_is_nothing_to_read(tmp_path):
    _, manager = start(tmp_path)
    for _ in range(3):
        handle = manager.prefetch(["n0", "n1", "n2"])
        assert handle.wait(LIMIT)
        wait_until(lambda: readers() == [])


def test_what_is_yet_to_be_read_keeps_no_owner_alive_and_is_dropped_with_it(monkeypatch):
    monkeypatch.setattr(prefetching_module, "_WORKERS", 1)
    seen = []
    begun, go_on = threading.Event(), threading.Event()

    class Owner:
        def __init__(self):
            self.prefetcher = prefetching_module.Prefetcher()

        def read(self, name):
            seen.append(name)
            begun.set()
            assert go_on.wait(LIMIT)

    owner = Owner()
    handle = owner.prefetcher.submit(["a", "b", "c"], owner.read)
    assert begun.wait(LIMIT)
    del owner
    go_on.set()
    assert handle.wait(LIMIT)
    wait_until(lambda: readers() == [])
    assert seen == ["a"]


def test_neither_a_queue_nor_a_handle_with_errors_keeps_the_model_alive(tmp_path, reads):
    model, manager = start(tmp_path, count=40)
    break_file(tmp_path / "n0")
    handle = held_up(manager, reads, count=40)
    alive = weakref.ref(model)
    del model, manager
    reads.go_on.set()
    wait_until_gone(alive)
    assert handle.wait(LIMIT)
    wait_until(lambda: readers() == [])
    assert isinstance(handle.errors["n0"], AdapterFileError)


def test_python_ends_at_once_while_thousands_wait_to_be_read(tmp_path):
    toy_folder(tmp_path / "a")
    code = (
        "import time, torch, lora_slots.loading as loading\n"
        "from torch import nn\n"
        "from lora_slots import SlotManager\n"
        "model = nn.Sequential(nn.Linear(8, 6))\n"
        "manager = SlotManager(model, max_rank=4, cache_bytes=1 << 20)\n"
        "loading.read_file = lambda source: time.sleep(0.2)\n"
        f"for n in range(5000): manager.add(str(n), {str(tmp_path / 'a')!r})\n"
        "manager.prefetch(list(manager.catalogue))\n"
        "print('over')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("over\n", "")


def test_the_status_while_a_prefetch_runs_is_of_that_moment(tmp_path, reads):
    _, manager = start(tmp_path)
    before = holdings(manager)
    reads.go_on.clear()
    handle = manager.prefetch("n0")
    assert reads.begun.wait(LIMIT)
    assert holdings(manager) == before
    reads.go_on.set()
    assert handle.wait(LIMIT)
    assert manager.status().cache.adapters == 1
