"""Promise 4, inside the write: whatever dies halfway is rolled back to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from faults import Fault
from torch import nn
from toys import (
    TOY_MODULES,
    Snapshot,
    expected_toy,
    pairs,
    toy,
    toy_adapter,
    toy_input,
)

from lora_slots import SlotManager


def start(model: nn.Module | None = None) -> tuple[nn.Module, SlotManager]:
    """Slots 0 and 1 of 3 are taken and active; ranks and layers differ."""
    model = toy() if model is None else model
    manager = SlotManager(model, max_rank=8, num_slots=3)
    manager.load(toy_adapter(6, seed=1), "first")
    manager.load(toy_adapter(2, modules=TOY_MODULES[1:3], seed=2), "second")
    manager.set_adapters(["first", "second"], [0.5, -2.0])
    return model, manager


Q_ONLY = TOY_MODULES[::2]
CALLS: dict[str, Callable[[SlotManager], object]] = {
    "new load": lambda m: m.load(toy_adapter(4, seed=3), "third"),
    "hotswap to a smaller rank": lambda m: m.load(toy_adapter(3, seed=3), "first", weight=4.0),
    "hotswap to a larger rank": lambda m: m.load(toy_adapter(8, seed=3), "first"),
    "hotswap to fewer layers": lambda m: m.load(toy_adapter(8, modules=Q_ONLY), "first"),
    "hotswap to other layers": lambda m: m.load(
        toy_adapter(1, modules=TOY_MODULES[:1]), "second", activate=True
    ),
    "unload": lambda m: m.unload("first"),
    "set_adapters": lambda m: m.set_adapters(["second"], [3.0]),
    "set_weight": lambda m: m.set_weight("second", 7.0),
    "disable": lambda m: m.disable_adapters(),
}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("call", CALLS)
def test_a_fault_in_any_operation_changes_nothing(call, error):
    model, manager = start()
    operations = count_operations(manager, CALLS[call])
    assert operations >= 1
    changed = Snapshot.of(manager, model)
    model, manager = start()
    before = Snapshot.of(manager, model)
    with pytest.raises(AssertionError):  # the call does change something
        changed.assert_unchanged(manager, model)
    output = model(toy_input())
    for operation in range(operations):
        model, manager = start()  # a second call would need fewer operations
        with pytest.raises(error, match="fault"), Fault(operation, error("fault")):
            CALLS[call](manager)
        before.assert_unchanged(manager, model)
        assert torch.equal(model(toy_input()), output)
    CALLS[call](manager)
    changed.assert_unchanged(manager, model)


@pytest.mark.parametrize("call", CALLS)
def test_a_load_after_any_fault_equals_the_oracle(call):
    model, manager = start()
    operations = count_operations(manager, CALLS[call])
    for operation in range(operations):
        model, manager = start()
        with pytest.raises(RuntimeError, match="fault"), Fault(operation, RuntimeError("fault")):
            CALLS[call](manager)
        manager.load(toy_adapter(5, alpha=10, seed=4), "second", weight=1.0)
        manager.set_adapters("second")
        good = pairs(dict.fromkeys(TOY_MODULES, 5), seed=4)
        expected = expected_toy(model, toy_input(), good, dict.fromkeys(TOY_MODULES, 2.0))
        torch.testing.assert_close(model(toy_input()), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "casts",
    [(torch.bfloat16,), (torch.bfloat16, torch.float32), (torch.float64,)],
    ids=["to bfloat16", "to bfloat16 and back", "to float64"],
)
def test_a_fault_after_the_model_was_cast_changes_nothing(casts):
    # The buffers hold rounded values then, which the staged copy on the host does not.
    def cast_start() -> tuple[nn.Module, SlotManager]:
        model, manager = start()
        for dtype in casts:
            model.to(dtype)
        return model, manager

    hotswap = CALLS["hotswap to a larger rank"]
    operations = count_operations(cast_start()[1], hotswap)
    before = Snapshot.of(*reversed(cast_start()))
    for operation in range(operations):
        model, manager = cast_start()
        with pytest.raises(RuntimeError, match="fault"), Fault(operation, RuntimeError("fault")):
            hotswap(manager)
        before.assert_unchanged(manager, model)
    hotswap(manager)


def test_a_fault_in_the_last_operation_leaves_a_compiled_model_with_its_graph():
    hotswap = CALLS["hotswap to a larger rank"]
    last = count_operations(start()[1], hotswap) - 1
    model, manager = start()
    compiled = torch.compile(model, backend="eager")
    output = compiled(toy_input())
    with manager.no_recompile():
        with pytest.raises(KeyboardInterrupt), Fault(last, KeyboardInterrupt()):
            hotswap(manager)
        assert torch.equal(compiled(toy_input()), output)
        hotswap(manager)
        assert not torch.equal(compiled(toy_input()), output)


def count_operations(manager: SlotManager, call: Callable[[SlotManager], object]) -> int:
    with Fault() as count:
        call(manager)
    return count.operations
