"""The status shows every tier, what happened until now, and who did what last."""

from __future__ import annotations

import copy
import pickle
import time

import pytest
import torch
from threads import together
from toys import CountingBackend, toy, toy_adapter, toy_folder, toy_input

from lora_slots import AdapterFileError, RecompileError, SlotManager
from lora_slots.tally import SWAP_SECONDS, Counts


@pytest.fixture
def manager(tmp_path):
    manager = SlotManager(
        toy(), max_rank=8, num_slots=2, cache_bytes=1 << 20, on_full="evict", routing=True
    )
    for number in range(4):
        manager.add(f"n{number}", toy_folder(tmp_path / f"n{number}", 4, seed=number))
    return manager


def test_counts_are_of_what_succeeded(manager, tmp_path):
    for name in ("n0", "n1", "n2", "n0"):
        manager.set_adapters(name)
    nbytes = manager.load(tmp_path / "n3", "n0").nbytes
    counts = manager.status().counts
    assert (counts.loads, counts.cache_hits, counts.cache_misses) == (5, 1, 4)
    assert (counts.evictions, counts.nbytes) == (2, 5 * nbytes)
    assert (counts.prefetched, counts.recompiles) == (0, 0)
    assert sum(counts.swaps) == 5
    assert len(counts.swaps) == len(SWAP_SECONDS) + 1
    assert 0 < counts.seconds < 60
    (tmp_path / "n1" / "adapter_model.safetensors").unlink()
    manager.check(tmp_path / "n2")
    for refused in (lambda: manager.set_adapters("n1"), lambda: manager.load(tmp_path / "n1")):
        with pytest.raises(AdapterFileError):
            refused()
    manager.unload("n0")  # is no eviction
    assert manager.status().counts == counts


def test_a_hotswap_and_a_deactivation_evict_nobody(manager):
    manager.load(toy_adapter(seed=1), "a")
    manager.load(toy_adapter(seed=2), "a")
    manager.set_adapters([])
    counts = manager.status().counts
    assert (counts.loads, counts.evictions) == (2, 0)


def test_the_cache_is_shown_as_it_is(manager):
    manager.set_adapters(["n0", "n1"])
    manager.prefetch("n2").wait()
    manager.set_adapters("n2")
    cache = manager.status().cache
    assert (cache.adapters, cache.limit, cache.hits, cache.misses) == (3, 1 << 20, 1, 2)
    assert cache.nbytes == manager._loader.cache.nbytes > 0


def test_slots_tell_the_last_swap_and_the_last_use(manager):
    begun = time.time()
    report = manager.load(toy_adapter(), "a", activate=False)
    slot = manager.status().slots[0]
    assert (slot.swap_seconds, slot.last_used) == (report.seconds, None)
    manager.set_adapters("a")
    used = manager.status().slots[0].last_used
    assert begun <= used <= time.time()
    manager.route(["n0", "n0"])
    routed = manager.status().slots[1]
    assert (routed.routed, routed.active, routed.state) == (True, False, "inactive, routed")
    manager.route(None)
    manager.set_adapters([])
    slot, other = manager.status().slots
    assert slot.last_used > used
    manager.set_adapters("n0")
    assert manager.status().slots[0].last_used == slot.last_used
    assert manager.status().slots[1].last_used > other.last_used
    manager.unload("a")
    assert manager.status().slots[0].last_used is None
    assert manager._tally.swaps.keys() == manager._tally.used.keys() == {"n0"}


def test_printed_it_is_a_table_with_a_line_for_every_tier(manager, tmp_path):
    manager.load(tmp_path / "n0", "n0", weight=-0.5, pin=True)
    manager.route(["n0", None, {"n1": 0.5}], expand="tile")
    lines = str(manager.status()).splitlines()
    assert lines[0] == "2 slots of max_rank 8, adapters enabled"
    head = lines[1].split("  ")
    assert [cell.strip() for cell in head if cell] == [
        "slot", "adapter", "state", "weight", "rank", "modules", "last swap", "used", "source"
    ]  # fmt: skip
    for line, name, state, weight in (
        (lines[2], "'n0'", "active, routed, pinned", "-0.5"),
        (lines[3], "'n1'", "inactive, routed", "1"),
    ):
        columns = {
            "adapter": name, "state": state, "weight": weight, "rank": "4", "modules": "4",
            "used": "now", "source": str(tmp_path / name.strip("'")),
        }  # fmt: skip
        for column, cell in columns.items():
            assert line[lines[1].index(column) :].startswith(cell), column
        assert " ms" in line
    assert lines[4] == "rows: 0 n0, 1 base, 2 0.5 * n1 (tile)"
    assert lines[5].startswith("host cache: 2 adapters, ")
    assert lines[5].endswith("of 1.0 MB, 0 hits, 2 misses")
    assert lines[6] == "catalogue: 4 adapters"
    assert lines[7].startswith("until now: 2 loads, 0 of them from the host cache; 0 prefetched, ")
    assert lines[8] == "model: 4 modules, 3.8 kB of buffers, float32, on cpu"
    manager.route(None)
    manager.unload("n1")
    lines = str(manager.status()).splitlines()
    assert lines[3].split() == ["1", "free"]
    assert not any(line.startswith("rows:") for line in lines)


def test_two_pictures_in_a_row_are_equal(manager):
    manager.set_adapters("n0")
    assert manager.status() == manager.status()
    assert str(manager.status()) == str(manager.status())


def test_a_cache_that_is_off_says_so():
    status = SlotManager(toy(), max_rank=8).status()
    assert str(status.cache) == "off (cache_bytes=0)"
    assert status.counts == Counts()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_goes_on_counting_for_itself(manager, copied):
    manager.set_adapters("n0")
    model = manager._attachment.root
    other = SlotManager.of(copied(model))
    assert other.status().counts == manager.status().counts
    assert other.status().slots[0].last_used is not None
    other.set_adapters("n1")
    assert (other.status().counts.loads, manager.status().counts.loads) == (2, 1)


def test_what_no_recompile_raises_is_counted_and_nothing_else():
    model = toy()
    manager = SlotManager(model, max_rank=8)
    compiled = torch.compile(model, backend=CountingBackend())
    compiled(toy_input())
    with manager.no_recompile():
        manager.load(toy_adapter())
        compiled(toy_input())
    assert manager.status().counts.recompiles == 0
    with pytest.raises(ValueError, match="mine"), manager.no_recompile():
        raise ValueError("mine")
    assert manager.status().counts.recompiles == 0
    with pytest.raises(RecompileError), manager.no_recompile():
        compiled(toy_input().double().float().requires_grad_())
    assert manager.status().counts.recompiles == 1


def test_the_status_is_read_while_others_load(manager):
    def load() -> None:
        for turn in range(60):
            manager.set_adapters(f"n{turn % 4}")

    def look() -> None:
        for _ in range(100):
            status = manager.status()
            str(status)
            assert sum(slot.active for slot in status.slots) <= 1
            assert sum(status.counts.swaps) == status.counts.loads

    together(load, look, look)
