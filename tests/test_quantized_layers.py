"""Slots on quantised layers add exactly ``s B A x`` to what the layer returns, compiled too."""

from __future__ import annotations

import copy
from collections.abc import Callable

import bitsandbytes as bnb
import pytest
import torch
from quantized_layers import (
    INPUTS,
    KINDS,
    Two,
    bnb8_layer,
    hqq_layer,
    inputs,
    quantized,
    two_adapter,
    two_share,
)
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from toys import Snapshot, slot_buffers

from lora_slots import AttachError, SlotManager

EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def assert_close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@EVERY_KIND
@torch.no_grad()
def test_output_is_that_of_the_layer_plus_s_b_a_x_in_any_mix(kind: str) -> None:
    model, x = quantized(kind), inputs()
    base = model(x)
    manager = SlotManager(model, max_rank=8, num_slots=2)
    assert torch.equal(model(x), base)
    manager.load(two_adapter(8, seed=1))
    assert_close(model(x), base + two_share(8, seed=1))
    first = model(x)
    manager.load(two_adapter(3, alpha=-6, seed=2))
    assert_close(model(x), base + two_share(3, alpha=-6, seed=2))
    manager.load(two_adapter(8, seed=1), "other")
    manager.set_adapters(["default", "other"], [0.5, -1.5])
    mixed = 0.5 * two_share(3, alpha=-6, seed=2) - 1.5 * two_share(8, seed=1)
    assert_close(model(x), base + mixed)
    manager.unload("other")
    manager.set_weight("default", 0)
    assert torch.equal(model(x), base)
    manager.load(two_adapter(8, seed=1), weight=1)
    assert torch.equal(model(x), first)
    manager.unload("default")
    assert torch.equal(model(x), base)


@EVERY_KIND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_buffers_have_the_dtype_in_which_the_layer_computes(kind: str, dtype: torch.dtype) -> None:
    model, x = quantized(kind, dtype), inputs(dtype)
    base = model(x)
    manager = SlotManager(model, max_rank=8)
    found = {name: buffer.dtype for name, buffer in slot_buffers(model).items()}
    for name, buffer_dtype in found.items():
        assert buffer_dtype == (torch.float32 if name.endswith("scaling") else dtype), name
    assert torch.equal(model(x), base)
    manager.load(two_adapter(4, seed=1))
    ours = model(x)
    assert ours.dtype == base.dtype == dtype
    exact = base.double() + two_share(4, seed=1).double()
    step = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype]
    assert float((ours - exact).abs().max()) <= step * float(exact.abs().max())


def compiled(
    model: nn.Module, kind: str
) -> tuple[Callable[..., Tensor], CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    whole = KINDS[kind].compiles_whole
    return torch.compile(model, backend=counter, fullgraph=whole), counter


# quanto's operator that quantises anew in each forward is one that Dynamo cannot see, and Dynamo
# warns itself of how it calls an autograd function.
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin:UserWarning")
@pytest.mark.filterwarnings("ignore:.*Function.*should not be instantiated:DeprecationWarning")
@EVERY_KIND
@torch.no_grad()
def test_compiled_once_for_all_loads_and_equal_to_the_compiled_base_without(kind: str) -> None:
    x = inputs()
    alone, model, eager = quantized(kind), quantized(kind), quantized(kind)
    for each in (alone, model):
        # bitsandbytes rearranges its weights in the first forward, and compiles again after it.
        each(x)
    base = compiled(alone, kind)[0](x)
    torch._dynamo.reset()
    managers = [SlotManager(m, max_rank=8, num_slots=2) for m in (model, eager)]
    run, counter = compiled(model, kind)
    assert torch.equal(run(x), base)
    graphs = counter.frame_count
    assert graphs == 1 or not KINDS[kind].compiles_whole
    with managers[0].no_recompile():
        for rank, alpha in ((8, 8), (1, -4), (3, 16)):
            for manager in managers:
                manager.load(two_adapter(rank, alpha=alpha, seed=rank))
            assert_close(run(x), eager(x))
            assert not torch.equal(run(x), base)
        managers[0].load(two_adapter(2), "other")
        managers[0].set_adapters(["default", "other"], [0.0, 2.0])
        assert_close(run(x), base + 2 * two_share(2))
        managers[0].unload("other")
        managers[0].unload("default")
        assert torch.equal(run(x), base)
    assert counter.frame_count == graphs


@EVERY_KIND
@torch.no_grad()
def test_parameters_stay_as_they_were_and_detach_leaves_no_trace(kind: str) -> None:
    model, x = quantized(kind), inputs()
    classes = [type(module) for module in model.modules()]
    base = model(x)
    tensors = {name: id(p) for name, p in model.named_parameters()}
    manager = SlotManager(model, max_rank=8)
    for module, cls in zip((model.q_proj, model.v_proj), classes[-2:], strict=True):
        assert isinstance(module, cls)
    manager.load(two_adapter(4))
    assert not torch.equal(model(x), base)
    assert {name: id(p) for name, p in model.named_parameters()} == tensors
    manager.detach()
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(model(x), base)


@EVERY_KIND
def test_state_dict_knows_nothing_of_the_slots(kind: str) -> None:
    model = quantized(kind)
    SlotManager(model, max_rank=8).load(two_adapter(4))
    ours, theirs = model.state_dict(), quantized(kind).state_dict()
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if isinstance(value, Tensor) and type(value) is Tensor:
            # Packed bits may look like floats, and some of those like NaN.
            torch.testing.assert_close(ours[key], value, rtol=0, atol=0, equal_nan=True)


@EVERY_KIND
@torch.no_grad()
def test_a_deep_copy_works_as_far_as_that_of_the_base_does(kind: str) -> None:
    base, model, x = quantized(kind), quantized(kind), inputs()
    manager = SlotManager(model, max_rank=8)
    manager.load(two_adapter(4))
    if not KINDS[kind].copies:
        for each in (base, model):
            with pytest.raises(RuntimeError, match="__deepcopy__"):
                copy.deepcopy(each)
        return
    twin = copy.deepcopy(model)
    output = model(x)
    assert torch.equal(twin(x), output)
    before = Snapshot.of(manager, model)
    SlotManager.of(twin).unload("default")
    assert torch.equal(twin(x), copy.deepcopy(base)(x))
    before.assert_unchanged(manager, model)
    assert torch.equal(model(x), output)


def test_a_4_bit_layer_that_never_ran_computes_in_the_dtype_of_what_was_quantised() -> None:
    layer = bnb.nn.Linear4bit(INPUTS, 32, compute_dtype=None)
    layer.weight = bnb.nn.Params4bit(layer.weight.data.bfloat16(), requires_grad=False)
    model = nn.Sequential(layer.to("cpu"))
    SlotManager(model, max_rank=4)
    assert model[0].lora_slots.lora_A.dtype == torch.bfloat16


def test_an_8_bit_layer_without_a_bias_computes_in_the_dtype_of_the_model_around_it() -> None:
    def build(*around: nn.Module) -> nn.Sequential:
        return nn.Sequential(*around, bnb8_layer(nn.Linear(INPUTS, 32, bias=False)))

    model = build(nn.LayerNorm(INPUTS).bfloat16())
    SlotManager(model, max_rank=4)
    assert model[-1].lora_slots.lora_A.dtype == torch.bfloat16
    with pytest.raises(AttachError, match=r"0 stores its weight as torch.int8 .* with dtype="):
        SlotManager(build(), max_rank=4)
    SlotManager(model := build(), max_rank=4, dtype=torch.float16)
    assert model[0].lora_slots.lora_A.dtype == torch.float16


def test_all_linear_finds_quantised_layers_of_every_kind() -> None:
    for kind in KINDS:
        status = SlotManager(quantized(kind), max_rank=4).status()
        assert status.components[""].modules == 2, kind


@torch.no_grad()
def test_a_model_may_mix_quantised_and_plain_layers() -> None:
    model, x = Two().eval(), inputs()
    model.v_proj = hqq_layer(model.v_proj)
    base = model(x)
    SlotManager(model, max_rank=8).load(two_adapter(4, seed=3))
    assert_close(model(x), base + two_share(4, seed=3))
