"""`target_modules` means what PEFT means by it."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from toys import TINY, TOY_MODULES, slot_buffers, toy

from lora_slots import ArgumentError, SlotManager, TargetMismatchError


def slotted(model: nn.Module) -> list[str]:
    """The modules that got slots, in the order of the model."""
    return list(dict.fromkeys(name.split(".lora_slots.")[0] for name in slot_buffers(model)))


def chosen_by_peft(model: nn.Module, **config: object) -> list[str]:
    get_peft_model(model, LoraConfig(**config))
    return [
        name.removesuffix(".lora_A")
        for name, module in model.named_modules()
        if name.endswith(".lora_A") and module
    ]


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")  # PEFT on GPT-2
@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize(
    "target_modules", ["all-linear", "ALL-LINEAR", "attention", "one suffix", "regex"]
)
def test_the_choice_is_pefts_on_real_architectures(name, target_modules):
    tiny = TINY[name]
    first = chosen_by_peft(tiny.build(), target_modules="all-linear")[0]
    target_modules = {
        "attention": list(tiny.attention),
        "one suffix": [".".join(first.split(".")[-2:])],
        "regex": rf".*\.1\..*({'|'.join(tiny.attention)})",
    }.get(target_modules, target_modules)
    model = tiny.build()
    SlotManager(model, max_rank=2, target_modules=target_modules)
    expected = chosen_by_peft(tiny.build(), target_modules=target_modules)
    assert slotted(model) == expected
    assert expected


FORMS = {
    "all-linear": ("all-linear", TOY_MODULES),
    "a suffix": (["q_proj"], TOY_MODULES[::2]),
    "a tuple": (("v_proj",), TOY_MODULES[1::2]),
    "a set": ({"q_proj", "v_proj"}, TOY_MODULES),
    "a longer suffix": (["1.q_proj"], TOY_MODULES[2:3]),
    "a whole name": ([TOY_MODULES[1]], TOY_MODULES[1:2]),
    "a regex": (r".*layers\.0\..*", TOY_MODULES[:2]),
    "a regex of one name": (r"model\.layers\.1\.v_proj", TOY_MODULES[3:]),
    "one of two that matches": (["q_proj", "nowhere"], TOY_MODULES[::2]),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_target_modules_chooses_what_it_says(form):
    target_modules, expected = FORMS[form]
    model = toy()
    manager = SlotManager(model, max_rank=2, target_modules=target_modules)
    assert slotted(model) == list(expected)
    assert manager.status().components[""].modules == len(expected)


@pytest.mark.parametrize("target_modules", [["proj"], ["q_pro"], "q_proj", [], "", r"layers\.0"])
def test_matching_nothing_is_an_error_that_shows_what_there_is(target_modules):
    model = toy()
    with pytest.raises((TargetMismatchError, ArgumentError)) as info:
        SlotManager(model, max_rank=2, target_modules=target_modules)
    assert "matches no module" in str(info.value)
    assert "model.layers.0.q_proj" in str(info.value)
    assert slotted(model) == []


@pytest.mark.parametrize("target_modules", [3, [3], [None], b"q_proj", [["q_proj"]]])
def test_what_is_no_string_or_collection_of_strings_is_refused(target_modules):
    model = toy()
    with pytest.raises(ArgumentError, match="target_modules must be a string or a collection"):
        SlotManager(model, max_rank=2, target_modules=target_modules)


@pytest.mark.parametrize("pattern", ["(", "*q"])
def test_a_broken_regular_expression_is_refused(pattern):
    with pytest.raises(ArgumentError, match="target_modules"):
        SlotManager(toy(), max_rank=2, target_modules=pattern)


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (nn.ConvTranspose2d(3, 3, 1), "ConvTranspose2d"),
        (nn.Bilinear(8, 8, 6), "Bilinear"),
        (nn.LayerNorm(8), "LayerNorm"),
        (nn.Sequential(nn.Linear(8, 8)), "Sequential"),
    ],
)
def test_a_named_module_of_another_kind_is_refused_by_name(layer, kind):
    model = toy()
    model.extra = layer
    with pytest.raises(TargetMismatchError, match=rf"target module extra is {kind}; only Linear"):
        SlotManager(model, max_rank=2, target_modules=["q_proj", "extra"])
    assert slotted(model) == []
    SlotManager(model, max_rank=2)  # the keyword passes over it
    assert "extra" not in slotted(model)


def test_a_model_without_linear_layers_is_an_error():
    with pytest.raises(TargetMismatchError, match="layers that take adapters are none"):
        SlotManager(nn.Sequential(nn.LayerNorm(3)), max_rank=2)


def test_the_output_embeddings_can_be_named():
    model = TINY["llama"].build()
    SlotManager(model, max_rank=2, target_modules=["lm_head"])
    assert slotted(model) == ["lm_head"]


def test_a_model_that_is_no_module_is_refused():
    for thing in (None, {}, torch.ones(3), nn.Linear):
        with pytest.raises(ArgumentError, match=r"model must (be an nn\.Module|hold)"):
            SlotManager(thing, max_rank=2)


def test_a_wrapper_segment_of_the_live_model_is_no_part_of_a_name():
    model = nn.Sequential()
    model.add_module("_orig_mod", toy())
    manager = SlotManager(model, max_rank=2, target_modules=[r"model.layers.0.q_proj"])
    assert slotted(model) == ["_orig_mod.model.layers.0.q_proj"]
    assert manager.status().components[""].modules == 1


def test_a_module_of_the_model_called_lora_slots_is_no_exception():
    model = toy()
    model.lora_slots = nn.Linear(8, 6)
    SlotManager(model, max_rank=2)
    assert model.lora_slots.lora_slots.lora_A.shape == (2, 8)


def test_the_choice_does_not_depend_on_what_the_user_did_to_requires_grad_or_training():
    model = toy().train().requires_grad_(False)
    SlotManager(model, max_rank=2)
    assert slotted(model) == list(TOY_MODULES)
    assert all(m.training for m in model.modules())
