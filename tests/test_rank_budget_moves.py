"""Scattered rows are moved together inside a load: whole, unseen, and with no recompile."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_failed_write_is_rolled_back import Fault, count_operations
from threads import Task, wait_until
from torch import Tensor
from toys import (
    TOY_MODULES,
    CountingBackend,
    Pairs,
    Snapshot,
    Toy,
    pairs,
    places,
    slot_buffers,
    tensors_of,
    toy,
    toy_adapter,
    toy_input,
)

from lora_slots import NoFreeSlotError, RawAdapter, SlotManager, read_adapter

BUDGET = 40
GRANULE = 8
SLOTS = 5
MAX_RANK = 20
NAMES = "abcdef"


def pool(num_slots: int = SLOTS) -> tuple[Toy, SlotManager]:
    model = toy()
    return model, SlotManager(model, max_rank=MAX_RANK, num_slots=num_slots, rank_budget=BUDGET)


def scattered(active: str) -> tuple[Toy, SlotManager]:
    """Rows 8:16 and 24:32 of 40 are free; "a", "c" and "e" have the others."""
    model, manager = pool()
    for seed, name in enumerate("abcde"):
        manager.load(toy_adapter(5 + seed % 4, seed=seed), name, activate=False)
    for name in "bd":
        manager.unload(name)
    manager.set_adapters(list(active))
    return model, manager


def rows_of(model: Toy, manager: SlotManager) -> dict[str, int]:
    """Where the rows of each adapter begin."""
    state = manager._bank.state
    return {name: state.owned(entry.slot).start for name, entry in state.roster.entries.items()}


def test_a_load_moves_as_little_as_it_must():
    model, manager = scattered(active="c")
    assert rows_of(model, manager) == {"a": 0, "c": 16, "e": 32}
    manager.load(toy_adapter(16, seed=9), "f", activate=False)
    assert rows_of(model, manager) == {"a": 24, "c": 16, "e": 32, "f": 0}


@torch.no_grad()
def test_idle_adapters_move_while_a_forward_is_held_and_change_no_bit():
    model, manager = scattered(active="c")
    with manager.hold():
        output = model(toy_input())
        moving = Task(lambda: manager.load(toy_adapter(16, seed=9), "f", activate=False))
        while moving.thread.is_alive():
            assert torch.equal(model(toy_input()), output)
        moving.result()
        assert rows_of(model, manager)["a"] == 24
        assert torch.equal(model(toy_input()), output)


@torch.no_grad()
def test_adapters_in_use_move_only_when_nobody_holds():
    model, manager = scattered(active="ace")
    expected = model(toy_input())
    with manager.hold():
        before = Snapshot.of(manager, model)
        moving = Task(lambda: manager.load(toy_adapter(16, seed=9), "f", activate=False))
        wait_until(lambda: manager._lock._closed)
        before.assert_unchanged(manager, model)
    moving.result()
    assert rows_of(model, manager) != {"a": 0, "c": 16, "e": 32}
    torch.testing.assert_close(model(toy_input()), expected, rtol=1e-5, atol=1e-4)


@torch.no_grad()
def test_a_hotswap_moves_idle_rows_rather_than_write_over_those_that_are_read():
    model, manager = pool(num_slots=4)
    for seed, name in enumerate("abc"):
        manager.load(toy_adapter(8, seed=seed), name, activate=False)
    manager.set_adapters("a")
    manager.unload("b")  # rows 8:16 are free, and 24:40
    with manager.hold():
        output = model(toy_input())
        swap = Task(lambda: manager.load(toy_adapter(20, seed=6), "a"))
        wait_until(lambda: manager._lock._closed)
        assert torch.equal(model(toy_input()), output)
        for name, buffer in slot_buffers(model).items():
            if name.endswith("lora_B"):
                assert buffer.count_nonzero(dim=1).bool().sum() == 8 + 8 + 20
    swap.result()


@torch.no_grad()
def test_moves_compile_nothing_and_keep_all_memory():
    model, manager = pool()
    compiled = torch.compile(model, backend=(backend := CountingBackend()), fullgraph=True)
    compiled(toy_input())
    where = places(model)
    moved = set()
    with manager.no_recompile():
        for turn, rank in enumerate([5, 16, 8, 3, 20, 9, 1, 12, 17, 8] * 3):
            while True:
                try:
                    manager.load(toy_adapter(rank, seed=turn), f"{turn}")
                    break
                except NoFreeSlotError:
                    manager.unload(manager.loaded_adapters[turn % len(manager.loaded_adapters)])
            moved.add(tuple(rows_of(model, manager).items()))
            plain = toy()
            SlotManager(plain, max_rank=MAX_RANK).load(toy_adapter(rank, seed=turn))
            torch.testing.assert_close(
                compiled(toy_input()), plain(toy_input()), rtol=1e-5, atol=1e-4
            )
        assert places(model) == where
    assert backend.graphs == 1
    assert len(moved) == 30
    # The twin: another shape is another graph.
    compiled(toy_input(5))
    assert backend.graphs == 2


@pytest.mark.parametrize("active", ["c", "ace", "a"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_fault_in_any_operation_of_a_move_changes_nothing(active, error):
    def load(manager: SlotManager) -> None:
        manager.load(toy_adapter(16, seed=9), "f")

    model, manager = scattered(active)
    operations = count_operations(manager, load)
    after = Snapshot.of(manager, model)
    model, manager = scattered(active)
    before, rows = Snapshot.of(manager, model), rows_of(model, manager)
    for operation in range(operations):
        with pytest.raises(error, match="fault"), Fault(operation, error("fault")):
            load(manager)
        before.assert_unchanged(manager, model)
        assert rows_of(model, manager) == rows
        model, manager = scattered(active)
    load(manager)
    after.assert_unchanged(manager, model)


@dataclass
class Loaded:
    """What the plain model knows of an adapter."""

    parts: Pairs
    weight: float = 1.0
    selected: bool = False

    @property
    def rank(self) -> int:
        return max(A.shape[0] for A, _ in self.parts.values())

    @property
    def need(self) -> int:
        return min(-(-self.rank // GRANULE) * GRANULE, MAX_RANK)


def raw(parts: Pairs) -> RawAdapter:
    ranks = {f"^{module}": A.shape[0] for module, (A, _) in parts.items()}
    return read_adapter(tensors_of(parts), {"r": 1, "lora_alpha": 4.0, "rank_pattern": ranks})


def expected(adapters: list[Loaded]) -> Tensor:
    x = toy_input().double()
    out = toy().double()(x).detach()
    for adapter in adapters:
        for module, (A, B) in adapter.parts.items():
            number = TOY_MODULES.index(module)
            scaling = adapter.weight * 4.0 / A.shape[0]
            out[number // 2, number % 2] += scaling * (x @ A.double().T @ B.double().T)
    return out


class Pool(RuleBasedStateMachine):
    """Loads, unloads and mixes in a pool that is often full, against a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.manager = pool()
        self.places = places(self.model)
        self.loaded: dict[str, Loaded] = {}

    @rule(
        name=st.sampled_from(NAMES),
        ranks=st.dictionaries(st.sampled_from(TOY_MODULES), st.integers(1, MAX_RANK), min_size=1),
        seed=st.integers(0, 50),
        activate=st.booleans(),
    )
    def load(self, name, ranks, seed, activate):
        new = Loaded(pairs(ranks, seed=seed), selected=activate)
        others = {other: loaded for other, loaded in self.loaded.items() if other != name}
        room = sum(loaded.need for loaded in others.values()) + new.need <= BUDGET
        if not room or len(others) == SLOTS:
            before = Snapshot.of(self.manager, self.model)
            for call in (self.manager.check, self.manager.load):
                with pytest.raises(NoFreeSlotError):
                    call(raw(new.parts), name)
            before.assert_unchanged(self.manager, self.model)
            return
        slot = self.manager.check(raw(new.parts), name).slot
        report = self.manager.load(raw(new.parts), name, activate=activate)
        assert report.slot == slot
        new.weight = self.loaded[name].weight if name in self.loaded else 1.0
        if activate:
            for other in others.values():
                other.selected = False
        self.loaded[name] = new

    @precondition(lambda self: self.loaded)
    @rule(data=st.data())
    def unload(self, data):
        name = data.draw(st.sampled_from(sorted(self.loaded)))
        before = rows_of(self.model, self.manager)
        self.manager.unload(name)
        del self.loaded[name], before[name]
        assert rows_of(self.model, self.manager) == before

    @rule(data=st.data())
    def set_adapters(self, data):
        names = data.draw(st.lists(st.sampled_from(NAMES), unique=True))
        names = [name for name in names if name in self.loaded]
        self.manager.set_adapters(names, 0.5)
        for name, loaded in self.loaded.items():
            loaded.selected = name in names
            loaded.weight = 0.5 if loaded.selected else loaded.weight

    @invariant()
    @torch.no_grad()
    def the_output_is_the_plain_models(self):
        active = [loaded for loaded in self.loaded.values() if loaded.selected]
        output = self.model(toy_input())
        if not active:
            assert torch.equal(output, toy()(toy_input()))
        torch.testing.assert_close(output.double(), expected(active), rtol=1e-5, atol=1e-4)
        assert places(self.model) == self.places

    @invariant()
    def rows_are_owned_once_and_others_are_zero(self):
        state = self.manager._bank.state
        slots = {name: state.roster[name].slot for name in self.loaded}
        owned = [row for slot in slots.values() for row in state.owned(slot)]
        assert len(owned) == len(set(owned)) == sum(a.need for a in self.loaded.values())
        assert self.manager.status().free_rows == BUDGET - len(owned)
        for number, module in enumerate(TOY_MODULES):
            filled = {
                state.owned(slots[name]).start + row
                for name, loaded in self.loaded.items()
                if module in loaded.parts
                for row in range(loaded.parts[module][0].shape[0])
            }
            layer = self.model.model.layers[number // 2]
            held = getattr(layer, module.rpartition(".")[2]).lora_slots
            for buffer in (held.lora_A, held.lora_B, held.scaling.T):
                assert set(buffer.count_nonzero(dim=1).nonzero().flatten().tolist()) <= filled


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)
