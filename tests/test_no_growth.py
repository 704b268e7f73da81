"""Memory stays what it was over any number of swaps: one staged copy per slot, nothing else."""

from __future__ import annotations

import gc
import statistics
import time
import weakref
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor, nn
from toys import toy, toy_adapter, toy_folder

from lora_slots import SlotManager


def test_a_hundred_swaps_hold_no_more_than_six_do(tmp_path):
    model = toy()
    manager = SlotManager(model, max_rank=8, num_slots=2)
    folders = [toy_folder(tmp_path / str(rank), rank, seed=rank) for rank in (1, 4, 8)]
    _swap(manager, folders, 6)
    before = _tensors_held()
    _swap(manager, folders, 96)
    assert _tensors_held() == before


def test_counting_tensors_notices_a_copy_that_is_kept(tmp_path):
    model = toy()
    manager = SlotManager(model, max_rank=8, num_slots=2)
    folders = [toy_folder(tmp_path / "a"), toy_folder(tmp_path / "b")]
    _swap(manager, folders, 6)
    before = _tensors_held()
    kept = model.model.layers[0].q_proj.lora_slots.lora_A.clone()
    _swap(manager, folders, 6)
    assert _tensors_held() == (before[0] + 1, before[1] + kept.untyped_storage().nbytes())


def test_the_callers_tensors_are_not_kept_alive_by_a_load():
    manager = SlotManager(toy(), max_rank=8)
    adapter = toy_adapter()
    tensors = [weakref.ref(tensor) for tensor in adapter.tensors.values()]
    manager.load(adapter)
    del adapter
    gc.collect()
    assert [tensor() for tensor in tensors] == [None] * len(tensors)


def _swap(manager: SlotManager, folders: list[Path], times: int) -> None:
    for swap in range(times):
        manager.load(folders[swap % len(folders)], f"slot {swap % 2}")


def _tensors_held() -> tuple[int, int]:
    """How many tensors are alive, and the bytes behind them."""
    gc.collect()
    # By exact type: isinstance() would wake lazy objects of other libraries.
    tensors = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
    tensors = [t for t in tensors if t.layout is torch.strided]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return len(tensors), sum(storages.values())


@pytest.mark.slow
def test_ten_thousand_swaps_leave_memory_and_speed_as_they_were(tmp_path):
    manager = SlotManager(toy(), max_rank=8, num_slots=2, cache_bytes=4096)
    folders = [toy_folder(tmp_path / str(rank), rank, seed=rank) for rank in range(1, 9)]
    process, seconds = psutil.Process(), []
    for swap in range(10_000):
        if swap == 2_000:
            tensors, objects = _tensors_held(), len(gc.get_objects())
            resident = process.memory_info().rss
        started = time.perf_counter()
        manager.load(folders[swap % len(folders)], f"slot {swap % 2}")
        seconds.append(time.perf_counter() - started)
    assert _tensors_held() == tensors
    assert abs(len(gc.get_objects()) - objects) < 500
    assert process.memory_info().rss - resident < 8e6
    # The quickest tenth of each: what other processes take is not in it.
    early, late = (statistics.quantiles(s, n=10)[0] for s in (seconds[1000:2000], seconds[-1000:]))
    assert late < 1.5 * early
