"""A class swap, not a wrapper: to everyone else the model stays what it was."""

from __future__ import annotations

import inspect

import pytest
import torch
from safetensors import safe_open
from torch import nn
from toys import (
    TINY,
    TOY_MODULES,
    block_adapter,
    blocks,
    pairs,
    slot_buffers,
    tensors_of,
    toy,
    toy_adapter,
    toy_input,
)

from lora_slots import AttachError, SlotManager, read_adapter


@pytest.fixture
def model():
    return toy(bias=True)


def test_state_dict_keys_and_parameters_stay_as_they_were(model):
    keys, parameters = list(model.state_dict()), dict(model.named_parameters())
    manager = SlotManager(model, max_rank=4)
    manager.load(toy_adapter())
    assert list(model.state_dict()) == keys
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(p is parameters[name] for name, p in model.named_parameters())


def test_a_target_is_still_what_it_was_to_isinstance_and_by_attribute(model):
    layer = model.model.layers[0].q_proj
    weight, bias = layer.weight, layer.bias
    SlotManager(model, max_rank=4)
    assert model.model.layers[0].q_proj is layer
    assert isinstance(layer, nn.Linear)
    assert layer.weight is weight
    assert layer.bias is bias
    assert (layer.in_features, layer.out_features) == (8, 6)
    assert type(layer).__bases__ == (nn.Linear,)


def test_layers_of_one_class_share_one_new_class(model):
    SlotManager(model, max_rank=4)
    other = toy()
    SlotManager(other, max_rank=2)
    layers = [m for each in (model, other) for m in each.modules() if isinstance(m, nn.Linear)]
    assert len({type(layer) for layer in layers}) == 1
    assert len(layers) == 8


def test_load_state_dict_goes_in_and_out(model):
    manager = SlotManager(model, max_rank=4)
    manager.load(toy_adapter())
    other = toy(seed=1, bias=True)
    assert model.load_state_dict(other.state_dict()) == ([], [])
    manager.set_adapters([])
    assert torch.equal(model(toy_input()), other(toy_input()))
    assert toy(bias=True).load_state_dict(model.state_dict()) == ([], [])


def test_save_pretrained_writes_the_same_keys_and_bytes(tmp_path):
    model = TINY["llama"].build()
    model.save_pretrained(tmp_path / "before")
    manager = SlotManager(model, max_rank=4)
    modules = {f"model.layers.{i}.self_attn.q_proj": 4 for i in range(2)}
    manager.load(read_adapter(tensors_of(pairs(modules, inputs=64, outputs=64))))
    model.save_pretrained(tmp_path / "after")
    files = [tmp_path / when / "model.safetensors" for when in ("before", "after")]
    assert files[0].read_bytes() == files[1].read_bytes()
    with safe_open(files[1], "pt") as file:
        assert not [key for key in file.keys() if "lora" in key]  # noqa: SIM118
    again = type(model).from_pretrained(tmp_path / "after")
    manager.unload("default")
    assert torch.equal(TINY["llama"].run(again.eval()), TINY["llama"].run(model))


def test_tied_weights_stay_tied():
    model = nn.ModuleDict({"embed": nn.Embedding(6, 8), "head": nn.Linear(8, 6, bias=False)})
    model["head"].weight = model["embed"].weight
    SlotManager(model, max_rank=4)
    assert model["head"].weight is model["embed"].weight
    model.to(torch.float64)
    assert model["head"].weight is model["embed"].weight


def test_gradients_flow_to_inputs_and_base_as_before(model):
    x, y = toy_input().requires_grad_(), toy_input().requires_grad_()
    base = toy(bias=True)
    SlotManager(model, max_rank=4)
    model(x).square().sum().backward()
    base(y).square().sum().backward()
    assert torch.equal(x.grad, y.grad)
    for (name, p), q in zip(model.named_parameters(), base.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


def test_the_repr_shows_the_slots(model):
    SlotManager(model, max_rank=4, num_slots=2, dtype=torch.float16)
    assert repr(model.model.layers[0].q_proj) == (
        "SlotLinear(\n"
        "  in_features=8, out_features=6, bias=True\n"
        "  (lora_slots): LinearSlots(\n"
        "    lora_A=[8, 8] float16, lora_B=[8, 6] float16, scaling=[1, 8] float32\n"
        "    (mix): Mix(rows=[1, 8] float32, slots=[1, 2] float32, owners=[8] int64)\n"
        "  )\n"
        ")"
    )


def test_train_and_eval_reach_the_slots_and_change_nothing(model):
    manager = SlotManager(model, max_rank=4)
    manager.load(toy_adapter())
    output = model(toy_input())
    assert not any(m.training for m in model.modules())
    model.train()
    assert all(m.training for m in model.modules())
    assert torch.equal(model(toy_input()), output)


def test_slots_have_no_parameters_and_three_buffers_of_the_right_shape(model):
    SlotManager(model, max_rank=4, num_slots=3)
    for path in TOY_MODULES:
        slots = model.get_submodule(f"{path}.lora_slots")
        assert list(slots.parameters()) == []
        assert {n: (tuple(b.shape), b.dtype) for n, b in slots.named_buffers(recurse=False)} == {
            "lora_A": ((12, 8), torch.float32),
            "lora_B": ((12, 6), torch.float32),
            "scaling": ((1, 12), torch.float32),
        }
        assert not any(b.requires_grad or b.is_inference() for b in slots.buffers())


@pytest.mark.parametrize("base", [torch.float64, torch.bfloat16, torch.float16])
def test_slots_have_the_layers_dtype_unless_another_is_given(base):
    for dtype in (None, torch.float32):
        model = toy().to(base)
        SlotManager(model, max_rank=4, dtype=dtype)
        found = {b.dtype for n, b in slot_buffers(model).items() if "scaling" not in n}
        assert found == {dtype or base}


def test_a_shared_module_gets_one_slot_and_answers_to_both_names():
    model = toy()
    model.model.layers[1].v_proj = model.model.layers[0].q_proj
    base = model(toy_input())
    manager = SlotManager(model, max_rank=4)
    assert manager.status().components[""].modules == 3
    outputs = []
    for name in ("model.layers.0.q_proj", "model.layers.1.v_proj"):
        report = manager.load(toy_adapter(modules=[name]))
        assert report.modules == ("model.layers.0.q_proj",)
        outputs.append(model(toy_input()))
        changed = (outputs[-1] != base).flatten(2).any(dim=2)
        assert changed.tolist() == [[True, False], [False, True]]
    assert torch.equal(*outputs)
    model.to(torch.float64)
    assert model.model.layers[1].v_proj.lora_slots is model.model.layers[0].q_proj.lora_slots


class Doubled(nn.Linear):
    """A subclass with a forward, an argument name and a keyword of its own."""

    def forward(self, hidden: torch.Tensor, *, times: float = 2.0) -> torch.Tensor:
        return super().forward(hidden) * times


def test_a_subclass_keeps_its_own_forward_and_arguments():
    model = nn.ModuleDict({"x": Doubled(8, 6)})
    plain = model["x"](toy_input(), times=3.0)
    manager = SlotManager(model, max_rank=4)
    layer = model["x"]
    assert isinstance(layer, Doubled)
    assert type(layer).__name__ == "SlotDoubled"
    assert torch.equal(layer(toy_input(), times=3.0), plain)
    adapter = toy_adapter(modules=["x"])
    manager.load(adapter)
    A, B = adapter.tensors.values()
    delta = 2.0 * toy_input() @ A.T @ B.T
    for output in (layer(toy_input(), times=3.0), layer(hidden=toy_input(), times=3.0)):
        torch.testing.assert_close(output, plain + delta, rtol=1e-5, atol=1e-5)


def test_hooks_of_the_user_run_around_the_slots(model):
    seen = []
    layer = model.model.layers[0].q_proj
    layer.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    manager = SlotManager(model, max_rank=4)
    manager.load(toy_adapter())
    output = model(toy_input())
    assert torch.equal(seen[0], output[0, 0])
    assert not torch.equal(seen[0], toy(bias=True)(toy_input())[0, 0])


def test_a_second_manager_on_one_model_is_an_error(model):
    manager = SlotManager(model, max_rank=4)
    manager.load(toy_adapter())
    output = model(toy_input())
    for again in (model, torch.compile(model, backend="eager")):
        with pytest.raises(AttachError, match=r"already has a SlotManager; use SlotManager\.of"):
            SlotManager(again, max_rank=4)
    for part in (model.model, model.model.layers[0]):
        with pytest.raises(AttachError, match="q_proj already has an attribute 'lora_slots'"):
            SlotManager(part, max_rank=4)
    assert torch.equal(model(toy_input()), output)
    assert SlotManager.of(model) is manager


def test_a_manager_over_a_part_that_has_one_is_an_error_and_leaves_it_working(model):
    manager = SlotManager(model.model.layers[1], max_rank=4)
    with pytest.raises(AttachError, match=r"layers\.1\.q_proj already has"):
        SlotManager(model, max_rank=4)
    assert not hasattr(model.model.layers[0].q_proj, "lora_slots")
    manager.load(toy_adapter(modules=["q_proj"]))
    assert not torch.equal(model(toy_input())[1, 0], toy(bias=True)(toy_input())[1, 0])


def test_managers_of_disjoint_parts_do_not_meet(model):
    first, second = (SlotManager(layer, max_rank=4) for layer in model.model.layers)
    first.load(toy_adapter(modules=["q_proj"]))
    assert second.loaded_adapters == ()
    changed = model(toy_input()) != toy(bias=True)(toy_input())
    assert changed.flatten(2).any(dim=2).tolist() == [[True, False], [False, False]]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_unwrapped_with_a_warning(in_place):
    model = toy()
    compiled = torch.compile(model, backend="eager")
    if in_place:
        model.compile(backend="eager")
        compiled = model
    before = compiled(toy_input())
    with pytest.warns(UserWarning, match="compiled before it got slots.*once more") as caught:
        manager = SlotManager(compiled, max_rank=4)
    assert caught[0].filename == __file__
    assert SlotManager.of(model) is manager
    assert manager.load(toy_adapter()).modules == TOY_MODULES
    assert torch.equal(compiled(toy_input()), model(toy_input()))
    assert not torch.equal(compiled(toy_input()), before)


@torch.no_grad()
def test_a_model_with_compiled_wrappers_inside_is_known_by_its_plain_names():
    model = blocks(2)
    for index, block in enumerate(model):
        model[index] = torch.compile(block, backend="eager")
    x = torch.randn(3, 16)
    before = model(x)
    with pytest.warns(UserWarning, match="compiled before it got slots"):
        manager = SlotManager(model, max_rank=4)
    report = manager.load(block_adapter())
    assert report.modules == ("0.up", "0.down", "1.up", "1.down")
    assert not torch.equal(model(x), before)


def test_a_plain_model_gets_no_warning(recwarn, model):
    SlotManager(model, max_rank=4)
    assert [str(w.message) for w in recwarn] == []


def test_the_signature_of_forward_stays_readable(model):
    SlotManager(model, max_rank=4)
    forward = model.model.layers[0].q_proj.forward
    assert list(inspect.signature(forward).parameters) == ["input"]
    assert inspect.unwrap(forward) is nn.Linear.forward
