"""A hotswap from disk reads into the memory of the adapter before, and never into one in use."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from faults import Fault
from torch import nn
from toys import (
    TOY_MODULES,
    Snapshot,
    pairs,
    slot_buffers,
    tensors_of,
    toy,
    toy_folder,
    write_folder,
)

from lora_slots import AdapterFileError, SlotManager
from lora_slots.staging.staged import StagedAdapter

RANKS = (4, 7)
SEEDS = range(4)


@pytest.fixture
def folders(tmp_path: Path) -> dict[tuple[int, int], Path]:
    """Files of two headers, one for each rank."""
    return {
        (rank, seed): toy_folder(tmp_path / f"{rank}-{seed}", rank, seed=seed)
        for rank in RANKS
        for seed in SEEDS
    }


def held(manager: SlotManager, slot: int = 0) -> StagedAdapter:
    adapter = manager._bank.held(slot)
    assert adapter is not None
    return adapter


def assert_exact(manager: SlotManager, model: nn.Module, names: dict[str, Path]) -> None:
    """What slots and their copies on the host hold is what a new manager makes of these files."""
    for name, folder in names.items():
        (slot,) = (slot.slot for slot in manager.status().slots if slot.adapter_name == name)
        fresh = toy()
        one = SlotManager(fresh, max_rank=8)
        one.load(folder)
        for key, rows in held(one).rows.items():
            for own, expected in zip(held(manager, slot).rows[key].rows, rows.rows, strict=True):
                assert torch.equal(own, expected), key
        for key, buffer in slot_buffers(fresh).items():
            own = slot_buffers(model)[key]
            if "mix" in key:
                continue
            axis = 1 if key.endswith("scaling") else 0
            assert torch.equal(own.narrow(axis, 8 * slot, 8), buffer), key


def test_loads_of_one_header_take_turns_with_two_pieces_of_memory(folders) -> None:
    model = toy()
    manager = SlotManager(model, max_rank=8)
    seen = []
    for number in range(8):
        folder = folders[4, number % 4]
        manager.load(folder)
        assert_exact(manager, model, {"default": folder})
        seen.append(held(manager))
    assert len(set(map(id, seen))) == 8
    # The rows, and so where they are copied to, are found once for each piece.
    assert len({id(adapter.rows["lora_A"]) for adapter in seen}) == 2
    assert [a.rows["lora_A"] is b.rows["lora_A"] for a, b in zip(seen, seen[2:], strict=False)] == (
        [True] * 6
    )


def test_memory_of_another_header_is_laid_out_anew(folders) -> None:
    model = toy()
    manager = SlotManager(model, max_rank=8)
    for number in range(6):
        folder = folders[RANKS[number % 2], number % 4]
        manager.load(folder)
        assert_exact(manager, model, {"default": folder})


def test_what_the_cache_keeps_is_not_overwritten(folders) -> None:
    model = toy()
    manager = SlotManager(model, max_rank=8, cache_bytes=1 << 20)
    for _ in range(2):
        for folder in folders.values():
            manager.load(folder)
            assert_exact(manager, model, {"default": folder})


def test_a_refused_file_spoils_nothing(folders, tmp_path: Path) -> None:
    model = toy()
    manager = SlotManager(model, max_rank=8)
    tensors = tensors_of(pairs(dict.fromkeys(TOY_MODULES, 4), seed=9))
    list(tensors.values())[-1][-1, -1] = float("nan")
    flawed = write_folder(tmp_path / "flawed", tensors, {"r": 4, "lora_alpha": 8})
    for seed in SEEDS:
        manager.load(folders[4, seed])
        before = Snapshot.of(manager, model)
        with pytest.raises(AdapterFileError, match="NaN"):
            manager.load(flawed)
        before.assert_unchanged(manager, model)
        assert_exact(manager, model, {"default": folders[4, seed]})


@torch.no_grad()
def test_a_write_that_dies_is_put_back_from_what_no_load_has_overwritten(folders) -> None:
    model = toy()
    manager = SlotManager(model, max_rank=8)
    for seed in SEEDS:
        manager.load(folders[4, seed])
    died = 0
    for at in range(40):
        before = Snapshot.of(manager, model)
        try:
            with Fault(at, KeyboardInterrupt()):
                manager.load(folders[4, at % 4])
        except KeyboardInterrupt:
            died += 1
            before.assert_unchanged(manager, model)
            assert_exact(manager, model, {"default": folders[4, 3]})
        else:
            break
    assert died > 2
    assert_exact(manager, model, {"default": folders[4, at % 4]})


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_loads_and_unloads_into_several_slots_is_exact(folders, seed: int) -> None:
    dice = random.Random(seed)
    model = toy()
    manager = SlotManager(model, max_rank=8, num_slots=3)
    loaded: dict[str, Path] = {}
    for _ in range(40):
        name = dice.choice("abc")
        if name in loaded and dice.random() < 0.3:
            manager.unload(name)
            del loaded[name]
        else:
            loaded[name] = dice.choice(list(folders.values()))
            manager.load(loaded[name], name)
        assert_exact(manager, model, loaded)


def test_an_adapter_that_is_still_in_another_slot_is_not_spare(folders) -> None:
    manager = SlotManager(toy(), max_rank=8, num_slots=2, cache_bytes=1 << 20)
    for name in "ab":
        manager.load(folders[4, 0], name)
    assert held(manager, 0) is held(manager, 1)
    manager.load(folders[4, 1], "a")
    assert manager._bank.take_spare() is None
    last = held(manager, 1)
    manager.load(folders[4, 2], "b")
    assert manager._bank.take_spare() is last
