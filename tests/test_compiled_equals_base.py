"""Promise 1: with nothing loaded, after unload and at weight 0, equal to the base, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from toys import INDUCTOR_WARNING, CountingBackend, block_adapter, blocks, toy_adapter

from lora_slots import SlotManager, read_adapter

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.compile
@pytest.mark.filterwarnings(INDUCTOR_WARNING)
@pytest.mark.parametrize(
    ("dtype", "shape", "residual"),
    [(torch.float32, (7, 64), False), (torch.bfloat16, (2, 7, 64), True)],
    ids=["float32", "bfloat16"],
)
@torch.no_grad()
def test_without_an_active_adapter_inductor_gives_the_compiled_base(dtype, shape, residual):
    # A layer with bias and one without; blocks compiled one by one share a graph.
    base = blocks(size=64, residual=residual).to(dtype)
    model = copy.deepcopy(base)
    manager = SlotManager(model, max_rank=8)
    for module in (*base, *model):
        module.compile(fullgraph=True)
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)]
    inputs += [inputs[0] * scale for scale in (1e-3, 30.0)]
    expected = [base(x) for x in inputs]

    def assert_base(moment: str) -> None:
        for x, y in zip(inputs, expected, strict=True):
            assert torch.equal(model(x), y), moment

    assert_base("never loaded")
    with manager.no_recompile():
        manager.load(block_adapter(8, size=64))
        assert not torch.equal(model(inputs[0]), expected[0])
        manager.set_weight("default", 0.0)
        assert_base("weight 0")
        manager.set_weight("default", 1.0)
        manager.disable_adapters()
        assert_base("disabled")
        manager.enable_adapters()
        manager.unload("default")
        assert_base("unloaded")


@pytest.mark.compile
@pytest.mark.filterwarnings(INDUCTOR_WARNING)
@torch.no_grad()
def test_a_residual_after_a_2d_layer_without_bias_differs_from_the_compiled_base_by_a_rounding():
    # For 2-D inputs, inductor makes the base's `residual + x @ W` one addmm, which rounds once.
    # Nothing inside the layer can join in that; documented in docs/how-it-works.md.
    base = blocks(size=64).to(torch.bfloat16)
    model = copy.deepcopy(base)
    SlotManager(model, max_rank=8)
    for module in (*base, *model):
        module.compile(fullgraph=True)
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    once = base(x)
    torch.testing.assert_close(model(x), once, rtol=2**-7, atol=2**-7 * once.abs().max().item())


STATES: dict[str, Callable[[SlotManager], object]] = {
    "never loaded": lambda manager: None,
    "unloaded": lambda manager: (manager.load(block_adapter(8)), manager.unload("default")),
    "weight 0": lambda manager: manager.load(block_adapter(8), weight=0.0),
    "inactive": lambda manager: manager.load(block_adapter(8), weight=1.0, activate=False),
    "alpha 0": lambda manager: manager.load(block_adapter(8, alpha=0), activate=True),
    "set to 0": lambda manager: (
        manager.load(block_adapter(8), activate=True),
        manager.set_adapters("default", 0.0),
    ),
    "none selected": lambda manager: (
        manager.set_weight("default", 1.0),
        manager.set_adapters([]),
    ),
    "disabled": lambda manager: (
        manager.set_adapters("default"),
        manager.disable_adapters(),
    ),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", None])
@torch.no_grad()
def test_without_an_active_adapter_the_output_is_the_bases(dtype, backend):
    base = blocks().to(dtype)
    model = copy.deepcopy(base)
    manager = SlotManager(model, max_rank=8)
    run = model if backend is None else torch.compile(model, backend=backend)
    run_base = base if backend is None else torch.compile(base, backend=backend)
    x = torch.randn(2, 3, 16).to(dtype)
    expected = run_base(x)
    for state, bring_about in STATES.items():
        bring_about(manager)
        assert torch.equal(run(x), expected), state
    manager.enable_adapters()
    assert not torch.equal(run(x), expected)


@torch.no_grad()
def test_without_an_active_adapter_the_output_under_autocast_is_the_bases():
    base = blocks()
    model = copy.deepcopy(base)
    manager = SlotManager(model, max_rank=8)
    manager.load(block_adapter(8), weight=0.0)
    x = torch.randn(5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), base(x))
        manager.set_weight("default", 1.0)
        assert not torch.equal(model(x), base(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_lower_precision_rows_do_not_round_the_base(dtype):
    base = blocks()
    model = copy.deepcopy(base)
    manager = SlotManager(model, max_rank=8, dtype=dtype)
    manager.load(block_adapter(8), weight=0.0)
    x = torch.randn(5, 16)
    assert torch.equal(model(x), base(x))


@pytest.mark.parametrize("backend", ["eager", None])
@torch.no_grad()
def test_an_inactive_adapter_of_huge_values_adds_nothing(backend):
    # 60000 * 16 inputs leaves the range of float16: inactive rows of x A^T are infinite.
    base = blocks().to(torch.float16)
    model = copy.deepcopy(base)
    manager = SlotManager(model, max_rank=8, num_slots=2)
    run = model if backend is None else torch.compile(model, backend=backend)
    manager.load(block_adapter(8, alpha=0.01, seed=1), "active")
    x = torch.full((3, 16), 4.0, dtype=torch.float16)
    x[1] = -x[1]
    x[2, ::2] *= -1
    alone = run(x).clone()
    manager.load(_huge(), "huge", activate=False)
    inactive_rows = x @ model[0].up.lora_slots.lora_A[8:].T
    assert not torch.isfinite(inactive_rows).all(dim=1).any()
    assert torch.isfinite(alone).all()
    assert torch.equal(run(x), alone)
    manager.set_adapters([])
    assert torch.equal(run(x), base(x))


def _huge() -> object:
    adapter = block_adapter(8, seed=2)
    tensors = {name: torch.full_like(value, 6e4) for name, value in adapter.tensors.items()}
    for value in tensors.values():
        value[:, 1::2] *= -1
        value[0] = 6e4
    return read_adapter(tensors, adapter.config)


@torch.no_grad()
def test_a_base_that_overflows_stays_what_it_was():
    base = nn.Sequential(nn.Linear(8, 6, bias=False)).to(torch.float16)
    base[0].weight.fill_(6e4)
    model = copy.deepcopy(base)
    manager = SlotManager(model, max_rank=8)
    manager.load(toy_adapter(modules=["0"]), weight=0.0)
    x = torch.ones(2, 8, dtype=torch.float16)
    assert torch.isinf(base(x)).all()
    assert torch.equal(model(x), base(x))


def test_the_counted_graphs_of_base_and_slots_differ():
    # The twin: the comparisons above would mean nothing if both ran the same code.
    base, x = blocks(1), torch.randn(3, 16)
    model = copy.deepcopy(base)
    SlotManager(model, max_rank=8)
    backend = CountingBackend()
    outputs: list[Tensor] = [torch.compile(m, backend=backend)(x) for m in (base, model)]
    assert backend.graphs == 2
    assert torch.equal(*outputs)
