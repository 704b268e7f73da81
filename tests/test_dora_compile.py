"""With room for DoRA and biases: one graph for everything, and without them the plain graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from changes import weights_mixes_and_unloads
from dora_files import dora_adapter, write_dora
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from toys import (
    INDUCTOR_WARNING,
    TINY,
    TOY_MODULES,
    blocks,
    pairs,
    places,
    tensors_of,
    toy,
    toy_adapter,
    toy_input,
    write_adapter,
)

from lora_slots import RawAdapter, RecompileError, SlotManager, read_adapter

Q_ONLY = TOY_MODULES[::2]


def biased_adapter(rank: int, seed: int) -> RawAdapter:
    generator = torch.Generator().manual_seed(seed)
    tensors = tensors_of(pairs(dict.fromkeys(TOY_MODULES, rank), seed=seed), "") | {
        f"{module}.lora_B.bias": torch.randn(6, generator=generator) for module in TOY_MODULES
    }
    return read_adapter(tensors, {"r": rank, "lora_alpha": 6, "lora_bias": True})


def every_change(manager: SlotManager) -> Iterator[str]:
    """All that can become of two slots, one step at a time."""
    for seed, source in enumerate(
        [
            dora_adapter(1), dora_adapter(8, alpha=-4), toy_adapter(3), biased_adapter(2, 1),
            dora_adapter(4, modules=Q_ONLY), biased_adapter(8, 2), dora_adapter(2, alpha=0),
        ]
    ):  # fmt: skip
        manager.load(source)
        yield f"load {seed}"
    yield from weights_mixes_and_unloads(manager, dora_adapter(3, seed=9))


def slots(model: nn.Module) -> SlotManager:
    return SlotManager(model, max_rank=8, num_slots=2, dora=True, bias=True)


@pytest.mark.parametrize("grad", [torch.enable_grad, torch.inference_mode])
def test_one_graph_serves_every_change_and_no_buffer_moves(grad: type) -> None:
    model, reference = toy(bias=True), toy(bias=True)
    manager, eager = slots(model), slots(reference)
    before = places(model)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    seen = []
    with grad():
        base = compiled(toy_input())
        for step, _ in zip(every_change(manager), every_change(eager), strict=True):
            output = compiled(toy_input())
            assert torch.equal(output, reference(toy_input())), step
            seen.append(tuple(output.flatten().tolist()))
        assert torch.equal(output, base)
    assert counter.frame_count == 1
    assert places(model) == before
    assert len(set(seen)) >= 10


def test_twin_slots_without_room_for_dora_are_another_graph() -> None:
    counter = CompileCounterWithBackend("eager")
    models = [toy(), toy()]
    SlotManager(models[0], max_rank=8, dora=True)
    manager = SlotManager(models[1], max_rank=8)

    @torch.compile(backend=counter)
    def run(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)

    run(models[0].model.layers[0].q_proj, toy_input())
    run(models[0].model.layers[1].q_proj, toy_input())
    assert counter.frame_count == 1
    with pytest.raises(RecompileError), manager.no_recompile():
        run(models[1].model.layers[0].q_proj, toy_input())


def test_blocks_of_a_transformer_compiled_one_by_one_stay_compiled(tmp_path: Path) -> None:
    tiny = TINY["bert"]
    dora = write_dora(tmp_path / "dora", tiny.build(), r=4, target_modules=["query", "dense"])
    plain = write_adapter(tmp_path / "plain", tiny.build(), r=8, target_modules=["value"])
    model, reference = tiny.build(), tiny.build()
    manager, eager = slots(model), slots(reference)
    for block in model.encoder.layer:
        block.compile(backend="aot_eager", fullgraph=True)
    base = tiny.run(model)
    with manager.no_recompile():
        for path in (dora, plain, dora):
            manager.load(path)
            eager.load(path)
            expected = tiny.run(reference)
            torch.testing.assert_close(tiny.run(model), expected, rtol=1e-5, atol=1e-5)
        manager.unload("default")
        assert torch.equal(tiny.run(model), base)


def operations(**options: bool) -> list[str]:
    """What the graph of one layer without a bias calls."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(nn.Linear(8, 6, bias=False))
    SlotManager(model, max_rank=4, **options)
    torch.compile(model, backend=backend, fullgraph=True)(toy_input())
    (graph,) = graphs
    calls = [node for node in graph.graph.nodes if node.op.startswith("call")]
    return [getattr(node.target, "__name__", str(node.target)) for node in calls]


def test_slots_without_the_options_run_the_plain_graph_and_nothing_more() -> None:
    base = ["linear"]
    product = ["linear", "mul", "eq", "mul", "masked_fill_"]
    total = ["addmm"]
    of_no_cost = {"to", "reshape", "getattr"}
    plain = [call for call in operations() if call not in of_no_cost]
    assert plain == [*base, *product, *total]
    # The twins.
    assert len(operations(dora=True)) > len(operations(bias=True)) > len(operations())


@pytest.mark.compile
@pytest.mark.filterwarnings(INDUCTOR_WARNING)
@torch.no_grad()
def test_without_an_active_adapter_inductor_gives_the_compiled_base() -> None:
    # A layer with bias and one without.
    base = blocks(1, size=64).to(torch.bfloat16)
    model, eager = copy.deepcopy(base), copy.deepcopy(base)
    manager, reference = slots(model), slots(eager)
    for module in (base, model):
        module.compile(fullgraph=True)
    inputs = [torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(5)).bfloat16()]
    inputs += [inputs[0] * scale for scale in (1e-3, 30.0)]
    expected = [base(x) for x in inputs]

    def assert_base(moment: str) -> None:
        for x, y in zip(inputs, expected, strict=True):
            assert torch.equal(model(x), y), moment

    assert_base("never loaded")
    dora = dora_adapter(8, modules=("0.up",), inputs=64, outputs=128)
    with manager.no_recompile():
        manager.load(dora)
        reference.load(dora)
        like = eager(inputs[0])
        torch.testing.assert_close(
            model(inputs[0]), like, rtol=2**-7, atol=2**-7 * float(like.abs().max())
        )
        assert not torch.equal(model(inputs[0]), expected[0])
        manager.set_weight("default", 0.0)
        assert_base("weight 0")
        manager.unload("default")
        assert_base("unloaded")
