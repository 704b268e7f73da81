"""Adapters are swapped while other threads run forwards: every output is of one set of adapters."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from faults import Fault
from served import N, P, Served, X, adapter, expected, served
from threads import LIMIT, together
from toys import CountingBackend, slot_buffers

from lora_slots import LoraSlotsError, SlotManager


@pytest.fixture(autouse=True)
def many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def serve(
    run: Callable[[torch.Tensor], torch.Tensor], manager: SlotManager, over: threading.Event
) -> list[float]:
    """The outputs of held forwards until it is over; the last one begins after that."""
    outputs = []
    last = False
    while not last:
        last = over.is_set()
        with manager.hold():
            outputs.append(run(X).item())
    return outputs


def swapping(manager: SlotManager, times: int, over: threading.Event) -> Callable[[], None]:
    def run() -> None:
        try:
            for turn in range(times):
                manager.load((N, P)[turn % 2], "a")
        finally:
            over.set()

    return run


@pytest.mark.parametrize(
    ("options", "readers", "swaps"),
    [({"num_slots": 1}, 1, 200), ({"num_slots": 2}, 7, 2000), ({"num_slots": 3}, 3, 200),
     ({"num_slots": 2, "rank_buckets": [0, 2, 4]}, 2, 200)],
)  # fmt: skip
def test_every_output_is_fully_one_adapter_over_hundreds_of_swaps(options, readers, swaps):
    model, manager = served(**options)
    manager.load(P, "a")
    over = threading.Event()
    *served_outputs, _ = together(
        *[lambda: serve(model, manager, over)] * readers, swapping(manager, swaps, over), limit=120
    )
    for outputs in served_outputs:
        assert set(outputs) == {2.0, -2.0}
        assert outputs[-1] == 2.0


def test_a_compiled_model_serves_likewise_with_one_graph():
    model, manager = served(2)
    model.pause = False
    backend = CountingBackend()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    manager.load(P, "a")
    compiled(X)
    over = threading.Event()
    first, second, _ = together(
        *[lambda: serve(compiled, manager, over)] * 2, swapping(manager, 200, over)
    )
    assert {*first, *second} == {2.0, -2.0}
    assert backend.graphs == 1


def outputs_of_writes(model: Served, manager: SlotManager) -> list[float]:
    """Will hold the output after each write, in their order."""
    outputs = []
    write = manager._bank.write

    def noting(*args: Any) -> None:
        write(*args)
        outputs.append(model(X).item())

    manager._bank.write = noting
    return outputs


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_of_two_threads_that_load_at_once_the_last_one_wins_whole(num_slots):
    for _ in range(30):
        model, manager = served(num_slots)
        finished = outputs_of_writes(model, manager)
        together(partial(manager.load, P, "a"), partial(manager.load, N, "a"))
        assert sorted(finished) == [-2, 2]
        assert model(X).item() == finished[-1]
        fresh, other = served(num_slots)
        other.load(P if finished[0] == 2 else N, "a")
        other.load(P if finished[-1] == 2 else N, "a")
        buffers = slot_buffers(fresh)
        assert all(torch.equal(b, buffers[name]) for name, b in slot_buffers(model).items())


# Seconds for each set of options; `make soak` takes more.
SOAK = float(os.environ.get("LORA_SLOTS_SOAK", "1.5"))
NAMES = [1.0, -4.0, 16.0, -64.0]
FLAWS = [torch.full((4, 4), float("nan")), torch.ones(4, 5)]


def random_change(dice: random.Random, manager: SlotManager) -> None:
    """One that works, or is refused, or fails halfway."""
    value = dice.choice(NAMES)
    name = str(value)
    change = dice.randrange(10)
    if change < 3:
        source = adapter(value, rank=dice.choice([1, 2, 4, 8, 16]))
        manager.load(source, name, activate=dice.choice([None, True, False]))
    elif change == 3:
        manager.unload(name)
    elif change == 4:
        loaded = manager.loaded_adapters
        manager.set_adapters(dice.sample(loaded, dice.randint(0, len(loaded))), 0.5)
    elif change == 5:
        manager.set_weight(name, dice.choice([0.0, 1.0, -0.5]))
    elif change == 6:
        dice.choice([manager.enable_adapters, manager.disable_adapters])()
    elif change == 7:
        loaded = manager.loaded_adapters
        row = {name: dice.choice([1.0, 0.5]) for name in dice.sample(loaded, min(2, len(loaded)))}
        manager.route([row])
    elif change == 8:
        manager.route(None)
    else:
        tensors = dict(adapter(value).tensors)
        tensors[next(iter(tensors))] = dice.choice(FLAWS)
        manager.load(type(P)(tensors=tensors, source="flawed"), name)


def change_at_random(manager: SlotManager, end: float, seed: int) -> int:
    dice = random.Random(seed)
    done = 0
    while time.monotonic() < end:
        try:
            if dice.random() < 0.3:
                with Fault(dice.randrange(12), OSError("fault")):
                    random_change(dice, manager)
            else:
                random_change(dice, manager)
            done += 1
        except (LoraSlotsError, OSError):
            pass
        time.sleep(0.0005)
    return done


def compare(model: Served, manager: SlotManager, end: float) -> int:
    count = 0
    while time.monotonic() < end:
        with manager.hold():
            before = expected(manager)
            assert model(X).item() == before == expected(manager)
        count += 1
    return count


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rank_buckets": [0, 4, 8]},
        {"max_rank": 16, "rank_budget": 32, "on_full": "evict"},
        {"max_rank": 16, "rank_budget": 40, "rank_buckets": [0, 16]},
        {"routing": True},
        {"routing": True, "max_rank": 16, "rank_budget": 32, "on_full": "evict"},
    ],
    ids=[
        "slots", "buckets", "rows by need, eviction", "rows by need, buckets", "routes",
        "routes, eviction",
    ],
)  # fmt: skip
def test_outputs_are_what_the_status_says_whatever_changes_or_fails(options):
    model, manager = served(3, **options)
    end = time.monotonic() + SOAK
    counts = together(
        *(lambda: compare(model, manager, end) for _ in range(3)),
        *(lambda seed=seed: change_at_random(manager, end, seed) for seed in range(2)),
        limit=SOAK + LIMIT,
    )
    assert min(counts) > 20
    if manager.routes is not None:
        manager.route(None)
    for name in manager.loaded_adapters:
        manager.unload(name)
    assert model(X).item() == 0
    for target in manager._layout:
        for name in ("lora_A", "lora_B", "scaling"):
            assert target.slots.whole(name).count_nonzero() == 0
