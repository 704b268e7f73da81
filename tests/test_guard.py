"""`no_recompile`: a recompile, a fall back to eager or a moved buffer is an error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
import torch._dynamo.config as dynamo
from torch._dynamo.callback import callback_handler
from toys import CountingBackend, blocks, toy, toy_adapter, toy_input

from lora_slots import RecompileError, SlotManager


@pytest.fixture
def model():
    return toy()


@pytest.fixture
def manager(model):
    return SlotManager(model, max_rank=8)


@pytest.fixture
def compiled(model):
    return torch.compile(model, backend="eager", dynamic=False)


@contextmanager
def raising(
    manager: SlotManager, match: str | None = None, *, allow_first: bool = False
) -> Iterator[pytest.ExceptionInfo[RecompileError]]:
    """A guarded block that must raise a RecompileError."""
    with (
        pytest.raises(RecompileError, match=match) as info,
        manager.no_recompile(allow_first=allow_first),
    ):
        yield info


def test_swaps_inside_the_guard_are_no_error_and_show(model, manager, compiled):
    outputs = [compiled(toy_input())]
    with manager.no_recompile():
        for rank in (1, 4, 8):
            manager.load(toy_adapter(rank))
            outputs.append(compiled(toy_input()))
            assert torch.equal(outputs[-1], model(toy_input()))
    assert not any(torch.equal(a, b) for a, b in pairwise(outputs))


def test_a_recompile_raises_and_names_the_guard_that_failed(manager, compiled):
    compiled(toy_input(3))
    with raising(manager, "Recompiling function forward") as info:
        compiled(toy_input(5))
    assert info.value.guard == "tensor 'x' size mismatch at index 0. expected 3, actual 5"
    assert info.value.guard in str(info.value)
    assert isinstance(info.value.__cause__, torch._dynamo.exc.RecompileError)


def test_the_guard_of_a_python_number_is_named_as_dynamo_spells_it(manager):
    class Scaled(torch.nn.Module):
        scaling = 1.0

        def forward(self, x):
            return x * self.scaling

    scaled = Scaled()
    compiled = torch.compile(scaled, backend="eager")
    compiled(toy_input())
    scaled.scaling = 2.0
    with raising(manager) as info:
        compiled(toy_input())
    assert "scaling" in info.value.guard
    assert not info.value.guard.startswith("0/0")


def test_a_first_compile_raises_unless_it_is_allowed(manager, compiled):
    with raising(manager, "1 graphs were compiled.*allow_first=True") as info:
        compiled(toy_input())
    assert info.value.guard is None


def test_a_first_compile_is_traced_to_the_callers_line(manager, compiled):
    with raising(manager, r"the first for .*test_guard\.py:\d+ in test_a_first"):
        compiled(toy_input())


def test_a_first_compile_is_allowed_on_request_and_a_second_is_not(model, manager, compiled):
    with manager.no_recompile(allow_first=True):
        assert torch.equal(compiled(toy_input(3)), model(toy_input(3)))
    with raising(manager, "size mismatch", allow_first=True):
        compiled(toy_input(4))


def test_reaching_the_recompile_limit_inside_the_guard_raises(manager, compiled):
    with dynamo.patch(recompile_limit=2):
        for rows in (1, 2):
            compiled(toy_input(rows))
        with raising(manager):
            compiled(toy_input(3))


def test_running_eagerly_since_a_limit_that_was_reached_before_raises(model, manager, compiled):
    with dynamo.patch(recompile_limit=2):
        for rows in (1, 2, 3):  # the third is given up, with a warning in the log
            compiled(toy_input(rows))
        with manager.no_recompile():
            assert torch.equal(compiled(toy_input(2)), model(toy_input(2)))
        for rows in (3, 4):
            with raising(manager, "ran eagerly") as info:
                compiled(toy_input(rows))
            assert "model.layers.0.q_proj" in str(info.value)
            assert "recompile_limit" in str(info.value)


@torch.no_grad()
def test_the_limit_of_blocks_compiled_one_by_one_raises():
    model = blocks(3)
    manager = SlotManager(model, max_rank=4)
    for number, block in enumerate(model):
        block.number = number  # what transformers' decoder layers have: a number each
        block.forward = _reads_number(block)
        block.compile(backend="eager")
    x = torch.randn(2, 16)
    with dynamo.patch(recompile_limit=1):
        model(x)
        with raising(manager, r"1\.up ran eagerly"):
            model(x)


def _reads_number(block):
    forward = type(block).forward

    def numbered(x):
        return forward(block, x) + block.number

    return numbered


def test_eager_calls_inside_the_guard_are_no_error(model, manager):
    manager.load(toy_adapter())
    with manager.no_recompile():
        inside = model(toy_input())
    assert torch.equal(inside, model(toy_input()))


@torch.no_grad()
def test_a_slot_behind_a_disabled_function_is_no_error(model, manager):
    model.model.layers[0].q_proj.forward = torch.compiler.disable(
        model.model.layers[0].q_proj.forward
    )
    compiled = torch.compile(model, backend="eager")
    compiled(toy_input())
    manager.load(toy_adapter())
    with manager.no_recompile():
        assert torch.equal(compiled(toy_input()), model(toy_input()))


def test_a_cast_raises_even_if_nothing_is_called(model, manager):
    with raising(manager, r"storage of \d+ slot buffers changed"):
        model.to(torch.float64)


def test_a_replaced_buffer_of_the_same_shape_raises_and_is_named(model, manager, compiled):
    compiled(toy_input())
    layer = model.model.layers[1].v_proj.lora_slots
    with raising(manager, r"1 slot buffers.*layers\.1\.v_proj\.lora_B"):
        layer.lora_B = layer.lora_B.clone()
        compiled(toy_input())  # Dynamo does not notice


def test_a_compile_in_another_thread_is_no_error(manager, compiled):
    compiled(toy_input())
    other, backend = toy(seed=1), CountingBackend()

    def compile_another() -> None:
        for rows in (1, 2):
            torch.compile(other, backend=backend, dynamic=False)(toy_input(rows))

    with manager.no_recompile():
        thread = threading.Thread(target=compile_another)
        thread.start()
        thread.join(60)
    assert backend.graphs == 2


def test_an_inner_guard_raises_through_an_outer_one(manager, compiled):
    compiled(toy_input(3))
    with raising(manager, "size mismatch"), manager.no_recompile():
        compiled(toy_input(4))


def test_an_outer_guard_still_guards_after_an_inner_one_ended(manager, compiled):
    compiled(toy_input(3))
    with raising(manager, "size mismatch"):
        with manager.no_recompile():
            compiled(toy_input(3))
        compiled(toy_input(4))


def test_an_outer_guard_counts_a_first_compile_that_an_inner_one_allows(manager, compiled):
    with raising(manager, "1 graphs were compiled"), manager.no_recompile(allow_first=True):
        compiled(toy_input())


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_the_guard_stays_behind(manager, compiled, fails):
    before = (dynamo.error_on_recompile, list(callback_handler.start_callbacks))
    compiled(toy_input(3))
    if fails:
        with raising(manager):
            compiled(toy_input(4))
    else:
        with manager.no_recompile():
            compiled(toy_input(3))
    assert (dynamo.error_on_recompile, callback_handler.start_callbacks) == before
    backend = CountingBackend()
    again = torch.compile(toy(), backend=backend, dynamic=False)
    for rows in (4, 5):
        again(toy_input(rows))
    assert backend.graphs == 2


@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt(), RuntimeError("mine")])
def test_an_error_of_the_guarded_code_passes_unchanged(manager, compiled, error):
    def fail() -> None:
        compiled(toy_input())  # this alone would raise on leaving
        raise error

    with pytest.raises(type(error)) as info, manager.no_recompile():
        fail()
    assert info.value is error


def test_an_error_raised_by_the_compiled_function_passes_unchanged(manager):
    def broken(x):
        torch._dynamo.graph_break()
        raise KeyError("mine")

    compiled = torch.compile(broken, backend="eager")
    with pytest.raises(KeyError, match="mine"):
        compiled(toy_input())
    with pytest.raises(KeyError, match="mine"), manager.no_recompile(allow_first=True):
        compiled(toy_input())


def test_the_guard_of_a_detached_manager_is_an_error(manager):
    manager.detach()
    with pytest.raises(RuntimeError, match="was detached"):
        manager.no_recompile()
