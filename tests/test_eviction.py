"""With on_full="evict" a load makes room for itself: who goes, who stays, and who is told why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from toys import Snapshot, Toy, toy, toy_adapter, toy_input

from lora_slots import ArgumentError, NoFreeSlotError, RankTooLargeError, SlotManager


def full(names: str = "abc", **options: Any) -> tuple[Toy, SlotManager]:
    """One slot for each of these, loaded in their order; none is active."""
    options = {"max_rank": 8, "num_slots": len(names), "on_full": "evict", **options}
    model = toy()
    manager = SlotManager(model, **options)
    for seed, name in enumerate(names):
        manager.load(toy_adapter(4, seed=seed), name, activate=False)
    return model, manager


def evicted_by_a_load(manager: SlotManager, name: str = "new") -> tuple[str, ...]:
    """Who goes when another adapter is loaded; `check` says the same before."""
    new = toy_adapter(4, seed=9)
    checked = manager.check(new, name)
    before = set(manager.loaded_adapters)
    report = manager.load(new, name, activate=False)
    assert (checked.slot, checked.evicted) == (report.slot, report.evicted)
    assert before - set(manager.loaded_adapters) == set(report.evicted)
    return report.evicted


USES: dict[str, Callable[[SlotManager], object]] = {
    "load": lambda m: m.load(toy_adapter(4, seed=0), "a"),
    "load, not activated": lambda m: m.load(toy_adapter(4, seed=0), "a", activate=False),
    "set_adapters": lambda m: (m.set_adapters("a"), m.set_adapters([])),
    "set_adapters at weight 0": lambda m: m.set_adapters("a", 0.0),
    "set_weight": lambda m: m.set_weight("a", 2.0),
    "route": lambda m: (m.route(["a", None]), m.route(None)),
    "routed": lambda m: _leave(m.routed(["a"])),
}


def _leave(context: Any) -> None:
    with context:
        pass


def test_without_uses_the_first_that_was_loaded_goes_first():
    _, manager = full()
    assert [evicted_by_a_load(manager, name) for name in "xyz"] == [("a",), ("b",), ("c",)]
    assert manager.loaded_adapters == ("x", "y", "z")


@pytest.mark.parametrize("use", USES)
def test_what_was_used_stays_longer(use):
    _, manager = full(routing=True)
    USES[use](manager)
    manager.set_adapters([])
    assert [evicted_by_a_load(manager, name) for name in "xyz"] == [("b",), ("c",), ("a",)]


def test_what_was_active_until_now_was_used_until_now():
    _, manager = full()
    manager.set_adapters("a")
    manager.load(toy_adapter(4, seed=5), "b", activate=False)
    manager.load(toy_adapter(4, seed=5), "c", activate=False)
    manager.set_adapters([])
    assert [evicted_by_a_load(manager, name) for name in "xyz"] == [("b",), ("c",), ("a",)]


def test_of_those_named_together_the_last_one_stays_longest():
    _, manager = full()
    manager.set_adapters(["c", "a", "b"])
    manager.set_adapters([])
    assert [evicted_by_a_load(manager, name) for name in "xyz"] == [("c",), ("a",), ("b",)]


def test_unloading_and_asking_use_nothing():
    _, manager = full("abcd")
    manager.check(toy_adapter(4), "a")
    manager.status()
    manager.disable_adapters()
    manager.enable_adapters()
    manager.unload("b")
    assert [evicted_by_a_load(manager, name) for name in "wxyz"] == [(), ("a",), ("c",), ("d",)]


def test_active_routed_and_pinned_adapters_stay():
    model, manager = full("abcde", routing=True)
    manager.load(toy_adapter(4, seed=0), "a", pin=True)
    manager.set_adapters("b")
    manager.route(["c", None, {"e": 0.0}])
    with manager.routed(["d", None, None]):
        before = Snapshot.of(manager, model)
        for call in (manager.check, manager.load):
            with pytest.raises(NoFreeSlotError) as raised:
                call(toy_adapter(4), "new")
            assert str(raised.value) == (
                "adapter 'new' needs a free slot, but all 5 are taken, and none can be evicted: "
                "'a' (pinned), 'b' (active), 'c' (routed), 'd' (routed), 'e' (routed); deselect, "
                "unpin or unload one, or build the SlotManager with num_slots=6"
            )
        before.assert_unchanged(manager, model)
    assert evicted_by_a_load(manager) == ("d",)
    manager.route(None)
    assert [evicted_by_a_load(manager, name) for name in "xyz"] == [("new",), ("c",), ("e",)]


def test_disabled_adapters_are_still_the_active_ones():
    _, manager = full("ab")
    manager.set_adapters("a")
    manager.disable_adapters()
    assert evicted_by_a_load(manager) == ("b",)


def test_a_pin_stays_until_it_is_taken_or_its_adapter_is_unloaded():
    _, manager = full("ab")
    manager.load(toy_adapter(4, seed=1), "a", pin=True, activate=False)
    manager.load(toy_adapter(4, seed=2), "a")
    manager.set_adapters("a", 0.5)
    manager.set_weight("a", 2.0)
    manager.set_adapters([])
    pinned = {slot.adapter_name: slot.pinned for slot in manager.status().slots}
    assert pinned == {"a": True, "b": False}
    assert "'a' inactive, pinned, weight 2" in str(manager.status().slots[0])
    manager.load(toy_adapter(4), "b", activate=False)
    assert evicted_by_a_load(manager, "c") == ("b",)
    manager.load(toy_adapter(4, seed=2), "a", pin=False, activate=False)
    assert evicted_by_a_load(manager, "d") == ("c",)
    assert evicted_by_a_load(manager, "e") == ("a",)
    manager.load(toy_adapter(4), "e", pin=True)
    manager.unload("e")
    assert manager.loaded_adapters == ("d",)
    manager.load(toy_adapter(4), "e")
    assert not any(slot.pinned for slot in manager.status().slots)


def test_without_evict_nothing_is_ever_unloaded():
    model, manager = full(on_full="error")
    before = Snapshot.of(manager, model)
    with pytest.raises(NoFreeSlotError, match="all 3 are taken: 'a', 'b', 'c'; unload one"):
        manager.load(toy_adapter(4), "new")
    before.assert_unchanged(manager, model)
    assert manager.load(toy_adapter(4), "a").evicted == ()


def test_a_hotswap_evicts_nobody_for_a_slot():
    _, manager = full()
    assert evicted_by_a_load(manager, "a") == ()
    assert manager.load(toy_adapter(8), "b").slot == 1


def pool() -> tuple[Toy, SlotManager]:
    """Of 48 rows "a" has 8, "b" 24, "c" 8 and "d" 8."""
    model, manager = full("", max_rank=32, num_slots=8, rank_budget=48)
    for name, rank in {"a": 8, "b": 20, "c": 3, "d": 8}.items():
        manager.load(toy_adapter(rank, seed=rank), name, activate=False)
    return model, manager


@pytest.mark.parametrize(
    ("rank", "evicted"),
    [(8, ("a",)), (9, ("b",)), (24, ("b",)), (32, ("a", "b")), (1, ("a",))],
)
def test_no_more_go_than_must_for_their_rows(rank, evicted):
    model, manager = pool()
    report = manager.load(toy_adapter(rank, seed=9), "new")
    assert report.evicted == evicted
    assert f"\n  evicted {', '.join(map(repr, evicted))}" in str(report)
    plain = toy()
    SlotManager(plain, max_rank=32).load(toy_adapter(rank, seed=9))
    torch.testing.assert_close(model(toy_input()), plain(toy_input()), rtol=1e-5, atol=1e-4)


def test_a_hotswap_evicts_others_for_rows():
    _, manager = pool()
    assert manager.load(toy_adapter(24), "b").evicted == ()
    assert manager.load(toy_adapter(32), "b").evicted == ("a",)


def test_what_cannot_be_evicted_is_told_with_its_rows():
    model, manager = pool()
    manager.load(toy_adapter(8), "a", pin=True, activate=False)
    manager.set_adapters("b")
    before = Snapshot.of(manager, model)
    with pytest.raises(NoFreeSlotError) as raised:
        manager.load(toy_adapter(17), "new", weight=3.0)
    assert str(raised.value) == (
        "adapter 'new' needs 24 rows, but of 48 only 0 are free, 0 side by side at most, and too "
        "few can be evicted: 'a' has 8 (pinned), 'b' has 24 (active), 'c' has 8, 'd' has 8; "
        "deselect, unpin or unload one, or build the SlotManager with rank_budget=56"
    )
    before.assert_unchanged(manager, model)


def test_a_load_that_cannot_be_evicts_nobody():
    model, manager = full()
    before = Snapshot.of(manager, model)
    with pytest.raises(RankTooLargeError):
        manager.load(toy_adapter(9), "new")
    with pytest.raises(ArgumentError, match="finite float32"):
        manager.load(toy_adapter(4), "new", weight=1e39)
    before.assert_unchanged(manager, model)
    assert evicted_by_a_load(manager) == ("a",)


@pytest.mark.parametrize("on_full", ["drop", None, True, ""])
def test_a_policy_without_meaning_is_refused(on_full):
    with pytest.raises(ArgumentError, match='on_full must be "error" or "evict", got'):
        SlotManager(toy(), max_rank=8, on_full=on_full)
