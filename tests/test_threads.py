"""Loads from several threads: each is whole, whoever comes last."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from toys import TOY_MODULES, slot_buffers, toy, toy_adapter, toy_folder

from lora_slots import SlotManager

ADAPTERS = [toy_adapter(8, seed=seed) for seed in range(6)]


@pytest.fixture(autouse=True)
def many_switches() -> Iterator[None]:
    """Let threads take turns after a few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def run_together(*functions: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []


def buffers_with(**adapters: int) -> dict[str, torch.Tensor]:
    model = toy()
    manager = SlotManager(model, max_rank=8, num_slots=2)
    for name, number in adapters.items():
        manager.load(ADAPTERS[number], name)
    manager.set_adapters(list(adapters))
    return slot_buffers(model)


def same(buffers: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(buffer, others[name]) for name, buffer in buffers.items())


def test_threads_that_load_into_different_slots_do_not_spoil_each_other():
    expected = buffers_with(a=2, b=5)
    for _ in range(40):
        model = toy()
        manager = SlotManager(model, max_rank=8, num_slots=2)
        manager.load(ADAPTERS[0], "a")
        manager.load(ADAPTERS[3], "b")
        manager.set_adapters(["a", "b"])
        run_together(
            lambda m=manager: [m.load(ADAPTERS[n], "a") for n in (1, 0, 1, 2)],
            lambda m=manager: [m.load(ADAPTERS[n], "b") for n in (4, 3, 4, 5)],
        )
        assert same(slot_buffers(model), expected)


def test_threads_that_load_over_one_name_leave_one_of_the_two_whole():
    outcomes = [buffers_with(a=1), buffers_with(a=2)]
    for _ in range(40):
        model = toy()
        manager = SlotManager(model, max_rank=8, num_slots=2)
        manager.load(ADAPTERS[0], "a")
        run_together(
            lambda m=manager: [m.load(ADAPTERS[n], "a") for n in (3, 4, 1)],
            lambda m=manager: [m.load(ADAPTERS[n], "a") for n in (5, 0, 2)],
        )
        assert any(same(slot_buffers(model), outcome) for outcome in outcomes)


def test_threads_that_load_and_set_weights_agree_with_the_status():
    for _ in range(40):
        model = toy()
        manager = SlotManager(model, max_rank=8, num_slots=2)
        manager.load(ADAPTERS[0], "a")
        manager.load(ADAPTERS[3], "b", activate=False)
        run_together(
            lambda m=manager: [m.load(ADAPTERS[n], "b") for n in (4, 3, 4, 5)],
            lambda m=manager: [m.set_weight("a", weight) for weight in (0.5, 2.0, 3.0, 0.25)],
        )
        assert manager.status().slots[0].weight == 0.25
        for name in TOY_MODULES:
            factors = model.get_submodule(name).lora_slots.by_row()
            assert factors[0, :8].tolist() == [0.25] * 8, name


def test_threads_that_share_a_cache_get_what_they_load(tmp_path: Path):
    paths = [toy_folder(tmp_path / str(seed), 4, seed=seed) for seed in range(3)]
    model = toy()
    size = SlotManager(toy(), max_rank=8).load(paths[0]).nbytes
    manager = SlotManager(
        model, max_rank=8, num_slots=3, cache_bytes=size
    )  # one pushes out another

    def load(name: str) -> Callable[[], None]:
        def run() -> None:
            for turn in range(60):
                manager.load(paths[turn % 3], name, activate=False)

        return run

    run_together(load("a"), load("b"), load("c"))
    expected = SlotManager(toy(), max_rank=8)
    expected.load(paths[2])
    held = expected._bank.held(0).rows
    for slot in range(3):
        own = manager._bank.held(slot).rows
        assert own.keys() == held.keys()
        assert all(map(torch.equal, own["lora_B"].rows, held["lora_B"].rows))
    cache = manager._loader.cache
    assert cache.nbytes == len(cache) * size
