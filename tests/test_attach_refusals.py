"""What cannot take slots, or would ignore them, is refused by name and left as it was."""

from __future__ import annotations

import functools
import types

import pytest
import torch
import torch._inductor.config as inductor
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from toys import INDUCTOR_WARNING, TOY_MODULES, Snapshot, slot_buffers, toy, toy_adapter, toy_input

from lora_slots import AttachError, SlotManager


def assert_untouched(model: nn.Module) -> None:
    assert slot_buffers(model) == {}
    assert not [m for m in model.modules() if type(m).__name__.startswith("Slot")]


@pytest.fixture
def peft_toy():
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    return get_peft_model(toy(), config, adapter_name="pirate")


@pytest.mark.parametrize("part", [lambda m: m, lambda m: m.base_model.model])
def test_live_peft_layers_are_refused_with_the_remedy(peft_toy, part):
    match = r"layers\.0\.q_proj is a PEFT layer; take PEFT's adapters away.*unload\(\)"
    with pytest.raises(AttachError, match=match):
        SlotManager(part(peft_toy), max_rank=4)
    assert_untouched(peft_toy)


def test_merged_peft_layers_are_refused_and_the_merge_is_named(peft_toy):
    peft_toy.merge_adapter()
    with pytest.raises(AttachError, match=r"with \['pirate'\] merged into its base"):
        SlotManager(peft_toy, max_rank=4)


def test_what_peft_unloaded_is_a_plain_model(peft_toy):
    model = peft_toy.unload()
    manager = SlotManager(model, max_rank=4)
    assert manager.load(toy_adapter()).modules == TOY_MODULES
    assert not torch.equal(model(toy_input()), toy()(toy_input()))


def _lambda(layer):
    layer.forward = lambda x: torch.zeros(x.shape[0], 6)


def _wraps(layer):
    forward = layer.forward
    layer.forward = functools.wraps(forward)(lambda x: forward(x) * 2)


def _method(layer):
    layer.forward = types.MethodType(lambda self, x: nn.Linear.forward(self, x) * 2, layer)


def _partial(layer):
    layer.forward = functools.partial(nn.Linear.forward, layer)


def _compiled(layer):
    layer.forward = torch.compile(layer.forward, backend="eager")


@pytest.mark.parametrize("hide", [_lambda, _wraps, _method, _partial, _compiled])
def test_a_forward_of_unknown_origin_on_the_instance_is_refused(hide):
    model = toy()
    layer = model.model.layers[1].q_proj
    hide(layer)
    output = model(toy_input())
    with pytest.raises(AttachError, match=r"layers\.1\.q_proj has a forward set on the instance"):
        SlotManager(model, max_rank=4)
    assert_untouched(model)
    assert torch.equal(model(toy_input()), output)
    del layer.forward
    SlotManager(model, max_rank=4)
    assert torch.equal(model(toy_input()), toy()(toy_input()))


def test_a_forward_of_unknown_origin_under_an_accelerate_hook_is_refused():
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = toy()
    layer = model.model.layers[1].q_proj
    _lambda(layer)
    add_hook_to_module(layer, ModelHook())
    output = model(toy_input())
    with pytest.raises(AttachError, match=r"layers\.1\.q_proj has a forward set on the instance"):
        SlotManager(model, max_rank=4)
    assert torch.equal(model(toy_input()), output)


def test_the_classes_own_forward_set_on_the_instance_is_no_obstacle():
    model = toy()
    layer = model.model.layers[1].q_proj
    layer.forward = layer.forward  # as accelerate leaves it behind
    manager = SlotManager(model, max_rank=4)
    manager.load(toy_adapter())
    assert (model(toy_input()) != toy()(toy_input())).any(dim=-1).all()


@pytest.mark.parametrize("value", [3, None, nn.Linear(2, 2), torch.ones(2)])
def test_an_attribute_called_lora_slots_is_a_collision(value):
    model = toy()
    layer = model.model.layers[0].v_proj
    layer.lora_slots = value
    with pytest.raises(AttachError, match=r"0\.v_proj already has an attribute 'lora_slots'"):
        SlotManager(model, max_rank=4)
    assert_untouched(model)
    assert layer.lora_slots is value


def test_lazy_layers_are_refused_until_they_are_initialised():
    model = nn.ModuleDict({"lazy": nn.LazyLinear(6), "q": nn.Linear(6, 8)})
    with pytest.raises(AttachError, match="lazy is not initialised yet; run the model once first"):
        SlotManager(model, max_rank=4)
    assert_untouched(model)
    model["lazy"](toy_input())
    manager = SlotManager(model, max_rank=4)
    assert manager.load(toy_adapter(modules=["lazy"])).modules == ("lazy",)


@pytest.fixture
def gloo(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_dtensor_weight_is_refused_by_name(gloo):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = toy()
    layer = model.model.layers[1].v_proj
    mesh = init_device_mesh("cpu", (1,))
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(AttachError, match=r"layers\.1\.v_proj has a DTensor weight"):
        SlotManager(model, max_rank=4)
    assert_untouched(model)


@pytest.mark.parametrize("part", ["whole", "layer"])
def test_fsdp_2_is_refused_by_name(gloo, part):
    from torch.distributed.fsdp import fully_shard

    model = toy()
    fully_shard(model if part == "whole" else model.model.layers[1].q_proj)
    where = "the model" if part == "whole" else r"layers\.1\.q_proj"
    with pytest.raises(AttachError, match=f"{where} is sharded by FSDP"):
        SlotManager(model, max_rank=4)
    assert_untouched(model)


class FullyShardedDataParallel(nn.Module):
    """Stands for FSDP 1, which needs an accelerator."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._fsdp_wrapped_module(x)


def test_fsdp_1_is_refused_by_name():
    model = nn.Sequential(FullyShardedDataParallel(toy()))
    with pytest.raises(AttachError, match="0 is sharded by FSDP, which is not supported yet"):
        SlotManager(model, max_rank=4)
    assert_untouched(model)


def test_freezing_is_refused_at_construction_and_at_load():
    model = toy()
    with inductor.patch(freezing=True), pytest.raises(AttachError, match="freezing is on"):
        SlotManager(model, max_rank=4)
    assert_untouched(model)
    manager = SlotManager(model, max_rank=4)
    before = Snapshot.of(manager, model)
    with inductor.patch(freezing=True), pytest.raises(AttachError, match="freezing is on"):
        manager.load(toy_adapter())
    before.assert_unchanged(manager, model)
    manager.load(toy_adapter())
    assert manager.loaded_adapters == ("default",)


@pytest.mark.filterwarnings(INDUCTOR_WARNING)
def test_freezing_in_the_options_of_a_compiled_model_is_refused():
    options = {"freezing": True}
    with pytest.raises(AttachError, match="freezing is on"):
        SlotManager(torch.compile(toy(), options=options), max_rank=4)
    model = toy()
    manager = SlotManager(model, max_rank=4)
    model.model.layers[0].compile(options=options)
    with pytest.raises(AttachError, match="freezing is on"):
        manager.load(toy_adapter())


@pytest.mark.filterwarnings(INDUCTOR_WARNING)
def test_a_compiled_model_without_freezing_is_not_refused():
    model = toy()
    manager = SlotManager(model, max_rank=4)
    model.compile(options={"freezing": False})
    assert manager.load(toy_adapter()).modules == TOY_MODULES


class Final(nn.Linear):
    """A class that refuses to be derived from."""

    def __init_subclass__(cls) -> None:
        raise TypeError("Final must not be derived from")


@pytest.mark.parametrize("place", [0, 1])
def test_a_class_that_refuses_subclasses_leaves_the_model_as_it_was(place):
    model = toy()
    model.model.layers[place].v_proj = Final(8, 6)
    before = {path: type(m) for path, m in model.named_modules()}
    output = model(toy_input())
    with pytest.raises(TypeError, match="must not be derived from"):
        SlotManager(model, max_rank=4)
    assert {path: type(m) for path, m in model.named_modules()} == before
    assert_untouched(model)
    assert torch.equal(model(toy_input()), output)


def test_a_packed_weight_that_names_no_compute_dtype_is_refused():
    class Packed(nn.Linear):
        """Stores bytes, as quantised layers do."""

        def __init__(self) -> None:
            super().__init__(8, 6, bias=False)
            self.weight = nn.Parameter(torch.ones(6, 8, dtype=torch.uint8), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight.to(x.dtype))

    model = nn.ModuleDict({"packed": Packed()})
    with pytest.raises(AttachError, match=r"packed stores its weight as torch\.uint8.*dtype="):
        SlotManager(model, max_rank=4)
    assert_untouched(model)
    model["packed"].compute_dtype = torch.bfloat16
    SlotManager(model, max_rank=4)
    assert slot_buffers(model)["packed.lora_slots.lora_A"].dtype == torch.bfloat16
    SlotManager.of(model).detach()
    manager = SlotManager(model, max_rank=4, dtype=torch.float32)
    base = model["packed"](toy_input())
    manager.load(toy_adapter(modules=["packed"]))
    assert (model["packed"](toy_input()) != base).any(dim=-1).all()
