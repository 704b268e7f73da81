"""Promise 3: one compile, then any number of loads, unloads, weights and mixes; nothing moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from changes import weights_mixes_and_unloads
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from toys import (
    TOY_MODULES,
    CountingBackend,
    block_adapter,
    blocks,
    places,
    toy,
    toy_adapter,
    toy_input,
)

from lora_slots import SlotManager

Q_ONLY = [name for name in TOY_MODULES if name.endswith("q_proj")]
V_ONLY = [name for name in TOY_MODULES if name.endswith("v_proj")]


def every_change(manager: SlotManager) -> Iterator[str]:
    """All that a manager of two slots can be asked to do, one step at a time."""
    for seed, (rank, alpha) in enumerate([(1, 2), (4, 8), (8, -4), (4, 2), (1, -4), (8, 8)]):
        manager.load(toy_adapter(rank, alpha=alpha, seed=seed))
        yield f"rank {rank} and alpha {alpha}"
    for modules in (Q_ONLY, V_ONLY, TOY_MODULES):
        manager.load(toy_adapter(2, modules=modules, seed=len(modules)))
        yield f"only {modules}"
    yield from weights_mixes_and_unloads(manager, toy_adapter(3, seed=9))
    manager.load(toy_adapter(5, seed=11), "late")
    yield "one more load"


def whole(model: nn.Module, **options: object) -> Callable[..., Tensor]:
    return torch.compile(model, **options)


def in_place(model: nn.Module, **options: object) -> Callable[..., Tensor]:
    model.compile(**options)
    return model


def method(model: nn.Module, **options: object) -> Callable[..., Tensor]:
    model.forward = torch.compile(model.forward, **options)
    return model


@pytest.mark.parametrize("compiled_as", [whole, in_place, method])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("options", [{}, {"fullgraph": True}], ids=["breaks", "fullgraph"])
def test_one_graph_serves_every_load_unload_weight_and_mix(compiled_as, backend, options):
    model, reference = toy(), toy()
    manager = SlotManager(model, max_rank=8, num_slots=2)
    eager = SlotManager(reference, max_rank=8, num_slots=2)
    counter = CompileCounterWithBackend(backend)
    run = compiled_as(model, backend=counter, **options)
    x = toy_input()
    seen = [run(x)]
    for step, _ in zip(every_change(manager), every_change(eager), strict=True):
        output = run(x)
        assert torch.equal(output, reference(x)), step
        seen.append(output)
    assert counter.frame_count == 1
    # The steps are not all alike: most of them must show in the output.
    assert len({tuple(output.flatten().tolist()) for output in seen}) >= 15


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_one_graph_serves_every_change_without_gradients_too(grad):
    model = toy()
    manager = SlotManager(model, max_rank=8, num_slots=2)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with grad():
        compiled(toy_input())
        for step in every_change(manager):
            assert torch.equal(compiled(toy_input()), model(toy_input())), step
    assert counter.frame_count == 1


def test_no_buffer_is_ever_replaced_or_moved():
    model = toy()
    manager = SlotManager(model, max_rank=8, num_slots=2)
    before = places(model)
    assert len(before) == 12 + 3  # and what all share
    for step in every_change(manager):
        assert places(model) == before, step


def test_places_notice_a_moved_buffer():
    model = toy()
    SlotManager(model, max_rank=8)
    before = places(model)
    layer = model.model.layers[0].q_proj.lora_slots
    layer.lora_A = layer.lora_A.clone()
    assert places(model) != before


@pytest.mark.parametrize("first", [0, 1, 2])
def test_adapters_on_disjoint_layers_load_in_any_order(first):
    adapters = [
        toy_adapter(4, modules=modules, seed=seed)
        for seed, modules in enumerate([Q_ONLY, V_ONLY, TOY_MODULES])
    ]
    backend = CountingBackend()
    model = toy()
    manager = SlotManager(model, max_rank=4)
    compiled = torch.compile(model, backend=backend)
    base = compiled(toy_input())
    touched = [{0}, {1}, {0, 1}]
    for step in range(6):
        turn = (first + step) % 3
        manager.load(adapters[turn])
        changed = (compiled(toy_input()) != base).any(dim=-1).any(dim=-1)  # [layers, q or v]
        assert {int(i) for i in changed.any(dim=0).nonzero()} == touched[turn]
    assert backend.graphs == 1


@torch.no_grad()
def test_blocks_compiled_in_place_one_by_one_share_one_graph():
    model, reference = blocks(4), blocks(4)
    manager = SlotManager(model, max_rank=8)
    eager = SlotManager(reference, max_rank=8)
    counter = CompileCounterWithBackend("aot_eager")
    for block in model:
        block.compile(backend=counter, fullgraph=True)
    _swap_blocks_and_compare(model, reference, manager, eager)
    assert counter.frame_count == 1


@torch.no_grad()
def test_blocks_replaced_by_compiled_wrappers_share_one_graph():
    model, reference = blocks(4), blocks(4)
    manager = SlotManager(model, max_rank=8)
    eager = SlotManager(reference, max_rank=8)
    counter = CompileCounterWithBackend("aot_eager")
    for index, block in enumerate(model):
        model[index] = torch.compile(block, backend=counter, fullgraph=True)
    _swap_blocks_and_compare(model, reference, manager, eager)
    assert counter.frame_count == 1


def _swap_blocks_and_compare(model, reference, manager, eager):
    x = torch.randn(3, 16)
    previous = model(x)
    for seed, rank in enumerate((1, 8, 4)):
        for each in (manager, eager):
            each.load(block_adapter(rank, count=4, seed=seed))
        output = model(x)
        assert torch.equal(output, reference(x))
        assert not torch.equal(output, previous)
        previous = output


def test_dynamic_shapes_and_swaps_share_one_graph():
    model = toy()
    manager = SlotManager(model, max_rank=8)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, dynamic=True, fullgraph=True)
    for seed, (batch, length) in enumerate([(2, 3), (5, 3), (2, 7), (4, 9)]):
        manager.load(toy_adapter(2 * seed + 1, seed=seed))
        x = torch.randn(batch, length, 8)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-6, atol=1e-6)
    assert counter.frame_count == 1


class Scaled(nn.Module):
    """A LoRA layer as it should not be: its scaling is a Python float."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 6)
        self.scaling = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * self.scaling


def test_twin_a_python_float_in_forward_recompiles():
    model = Scaled()
    backend = CountingBackend()
    compiled = torch.compile(model, backend=backend)
    compiled(toy_input())
    model.scaling = 2.0
    assert torch.equal(compiled(toy_input()), model(toy_input()))
    assert backend.graphs == 2


def test_twin_a_cast_recompiles():
    model = toy()
    SlotManager(model, max_rank=8)
    backend = CountingBackend()
    compiled = torch.compile(model, backend=backend)
    compiled(toy_input())
    model.to(torch.float64)
    compiled(toy_input().double())
    assert backend.graphs == 2


def test_twin_slots_of_another_size_recompile():
    model = toy()
    backend = CountingBackend()
    compiled = torch.compile(model, backend=backend)
    for max_rank in (4, 8):
        manager = SlotManager(model, max_rank=max_rank)
        compiled(toy_input())
        manager.detach()
    assert backend.graphs == 2


def test_twin_peft_recompiles_for_another_scaling():
    model = get_peft_model(
        toy(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ).eval()
    backend = CountingBackend()
    compiled = torch.compile(model, backend=backend)
    compiled(toy_input())
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 3.0)
    compiled(toy_input())
    assert backend.graphs == 2


class Numbered(nn.Module):
    """A block that reads a Python number of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.number


@torch.no_grad()
def test_twin_a_number_per_block_compiles_every_block():
    model = nn.Sequential(Numbered(0), Numbered(1), Numbered(2))
    SlotManager(model, max_rank=4)
    backend = CountingBackend()
    for block in model:
        block.compile(backend=backend, dynamic=False)
    model(toy_input())
    assert backend.graphs == 3
