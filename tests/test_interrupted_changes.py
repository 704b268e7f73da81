"""A change that is interrupted has happened whole or not at all, and the next one works."""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from served import N, P, Served, X, adapter, served
from threads import Task
from torch import nn
from toys import Snapshot, holdings

import lora_slots
from lora_slots import SlotManager

ROOM = Path(lora_slots.__file__).parent
TRACED = {str(path) for path in (ROOM / "bank").glob("*.py")}.union(
    str(ROOM / name)
    for name in (
        "manager.py",
        "changing.py",
        "catalogue.py",
        "eviction.py",
        "roster.py",
        "layers/base.py",
    )
)


class Lines:
    """Counts the lines of the library that run, and raises before one of them."""

    def __init__(self, at: int = -1) -> None:
        self.at = at
        self.count = 0
        self._entered: set[tuple[int, int]] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename not in TRACED:
            return None
        place = (id(frame), frame.f_lineno)
        # The line of a `with` comes again when it is left, where Python raises nothing by itself.
        if event == "call":
            self._entered = {(other, line) for other, line in self._entered if other != id(frame)}
        elif event == "line" and place not in self._entered:
            self._entered.add(place)
            self.count += 1
            if self.count - 1 == self.at:
                raise KeyboardInterrupt
        return self

    @contextmanager
    def watching(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)


def start(options: dict[str, Any]) -> tuple[Served, SlotManager]:
    model, manager = served(**options)
    manager.load(P, "a")
    manager.load(adapter(4.0, rank=8), "b", activate=False)
    manager.add("known", adapter(16.0, rank=2))
    return model, manager


CHANGES: dict[str, Callable[[SlotManager], object]] = {
    "hotswap": lambda m: m.load(N, "a", weight=2.0),
    "new name": lambda m: m.load(N, "c"),
    "unload": lambda m: m.unload("a"),
    "set_adapters": lambda m: m.set_adapters(["b", "a"], [0.5, -1.0]),
    "set_adapters that loads": lambda m: m.set_adapters(["known", "a"]),
}
OPTIONS = {
    "a free slot": {"num_slots": 3},
    "buckets": {"num_slots": 3, "rank_buckets": [0, 4, 8]},
    "no free slot": {"num_slots": 2},
    "no free rows": {"num_slots": 3, "rank_budget": 16, "on_full": "evict"},
    "one must go": {"num_slots": 2, "on_full": "evict"},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("options", OPTIONS)
def test_an_interrupt_at_any_line_leaves_all_or_nothing(change, options):
    if options == "no free slot" and change in ("new name", "set_adapters that loads"):
        return  # refused before anything
    assert_all_or_nothing(lambda: start(OPTIONS[options]), CHANGES[change], most=120)


def assert_all_or_nothing(
    make: Callable[[], tuple[nn.Module, SlotManager]],
    change: Callable[[SlotManager], object],
    most: int,
) -> None:
    """Interrupt a change at ``most`` of its lines, in a model of its own each time."""
    model, manager = make()
    before = Snapshot.of(manager, model)
    lines = Lines()
    with lines.watching():
        change(manager)
    after = Snapshot.of(manager, model)
    assert lines.count > 50
    outcomes = set()
    for at in range(0, lines.count, 1 + lines.count // most):
        model, manager = make()
        with pytest.raises(KeyboardInterrupt), Lines(at).watching():
            change(manager)
        done = holdings(manager) == after.status
        (after if done else before).assert_unchanged(manager, model)
        outcomes.add(done)
        if not done:
            Task(lambda m=manager: change(m)).result()
            after.assert_unchanged(manager, model)
    assert False in outcomes


def fresh() -> tuple[nn.Module, SlotManager]:
    return served(2)


def cast() -> tuple[nn.Module, SlotManager]:
    model, manager = start({"num_slots": 2})
    return model.double(), manager


def copied() -> tuple[nn.Module, SlotManager]:
    model = copy.deepcopy(start({"num_slots": 2})[0])
    return model, SlotManager.of(model)


@pytest.mark.parametrize("make", [fresh, cast, copied])
def test_so_does_one_while_the_buffers_are_looked_up(make):
    assert_all_or_nothing(make, CHANGES["hotswap"], most=400)


@pytest.fixture
def many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


# Where Python runs a callback of a weak reference, it drops the interrupt.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("many_switches")
@pytest.mark.parametrize("num_slots", [1, 2])
def test_an_interrupt_out_of_nowhere_leaves_one_adapter_whole(num_slots):
    model, manager = served(num_slots)
    manager.load(P, "a")
    dice = random.Random(1)
    interrupted = 0
    for turn in range(150):
        swap = Task(lambda source=(N, P)[turn % 2]: [manager.load(source, "a") for _ in range(20)])
        time.sleep(dice.random() * 0.01)
        swap.interrupt()
        try:
            swap.result()
        except KeyboardInterrupt:
            interrupted += 1
        del swap
        with manager.hold():
            output = model(X).item()
        slot = next(slot for slot in manager.status().slots if slot.adapter_name)
        assert (output, slot.rank) in {(2, 4), (-2, 2)}
        rows = [0.0] * 8 * num_slots
        rows[8 * slot.slot : 8 * slot.slot + slot.rank] = [output / 2 / slot.rank] * slot.rank
        for layer in (model.first, model.second):
            assert layer.lora_slots.lora_B[:, 0].tolist() == rows
        Task(lambda: manager.set_weight("a", 1.0)).result()
    assert interrupted > 20
