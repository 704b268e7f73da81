"""An identical model that was compiled earlier in the process must not swallow the slots.

Dynamo finds compiled code by the code object of ``forward`` and skips guards on module hooks, so
adapters attached by hooks are ignored there without a word.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from toys import CountingBackend, blocks, toy, toy_adapter, toy_input

from lora_slots import SlotManager, read_adapter


@pytest.mark.parametrize("in_place", [False, True])
def test_slots_work_in_a_model_whose_twin_was_compiled_before(in_place):
    backend = CountingBackend()
    base, model = toy(), toy()
    first = torch.compile(base, backend=backend)(toy_input())
    manager = SlotManager(model, max_rank=8)
    if in_place:
        model.compile(backend=backend)
    compiled = model if in_place else torch.compile(model, backend=backend)
    assert torch.equal(compiled(toy_input()), first)
    manager.load(toy_adapter())
    loaded = compiled(toy_input())
    assert (loaded != first).any(dim=-1).all()
    assert torch.equal(torch.compile(base, backend=backend)(toy_input()), first)
    assert backend.graphs == 2


def test_slots_work_in_the_very_model_that_was_compiled_before():
    backend = CountingBackend()
    model = toy()
    compiled = torch.compile(model, backend=backend)
    before = compiled(toy_input())
    manager = SlotManager(model, max_rank=8)
    manager.load(toy_adapter())
    assert (compiled(toy_input()) != before).any(dim=-1).all()
    manager.detach()
    assert torch.equal(compiled(toy_input()), before)


@torch.no_grad()
def test_slots_work_in_one_block_of_several_that_share_a_graph():
    backend = CountingBackend()
    model = blocks(3)
    for block in model:
        block.compile(backend=backend)
    x = torch.randn(2, 16)
    before = [block(x) for block in model]
    with pytest.warns(UserWarning, match="compiled before it got slots"):
        manager = SlotManager(model[1], max_rank=4)
    tensors = {"up.lora_A.weight": torch.ones(4, 16), "up.lora_B.weight": torch.ones(32, 4)}
    manager.load(read_adapter(tensors))
    after = [block(x) for block in model]
    same = [torch.equal(old, new) for old, new in zip(before, after, strict=True)]
    assert same == [True, False, True]
    assert backend.graphs == 2


def test_twin_a_forward_hook_is_swallowed_by_a_model_compiled_before():
    def double(module: nn.Module, args: object, output: Tensor) -> Tensor:
        return output * 2

    backend = CountingBackend()
    base, model = toy(), toy()
    torch.compile(base, backend=backend)(toy_input())
    model.model.layers[0].q_proj.register_forward_hook(double)
    eager = model(toy_input())
    assert torch.equal(torch.compile(model, backend=backend)(toy_input()), base(toy_input()))
    assert not torch.equal(eager, base(toy_input()))
    assert backend.graphs == 1
