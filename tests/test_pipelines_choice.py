"""Several components under one manager: which of their layers take adapters, and names for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from toys import (
    TOY_MODULES,
    CountingBackend,
    Snapshot,
    blocks,
    pairs,
    slot_buffers,
    tensors_of,
    toy,
    toy_input,
)

from lora_slots import (
    ArgumentError,
    AttachError,
    RecompileError,
    SlotManager,
    TargetMismatchError,
    read_adapter,
)


def two(seed: int = 0) -> dict[str, nn.Module]:
    return {"unet": toy(seed), "text_encoder": blocks(1, seed=seed, size=8)}


def slotted(model: nn.Module) -> list[str]:
    return list(dict.fromkeys(name.split(".lora_slots.")[0] for name in slot_buffers(model)))


QS, VS = list(TOY_MODULES[::2]), list(TOY_MODULES[1::2])
CHOICES = {
    "all-linear": ("all-linear", [*TOY_MODULES], ["0.up", "0.down"]),
    "a suffix of both": (["q_proj", "up"], QS, ["0.up"]),
    "a suffix of one": (["q_proj"], QS, []),
    "names with their component": (
        ["unet.model.layers.0.q_proj", "text_encoder.0.down"], QS[:1], ["0.down"],
    ),
    "a regex of names within a component": (r"model.*v_proj|0\.up", VS, ["0.up"]),
    "by component": ({"unet": "all-linear", "text_encoder": ["down"]}, [*TOY_MODULES], ["0.down"]),
    "one component only": ({"text_encoder": r"0\.up"}, [], ["0.up"]),
}  # fmt: skip


@pytest.mark.parametrize("choice", CHOICES)
def test_target_modules_is_asked_of_each_component(choice):
    target_modules, of_unet, of_encoder = CHOICES[choice]
    parts = two()
    manager = SlotManager(parts, max_rank=2, target_modules=target_modules)
    assert slotted(parts["unet"]) == of_unet
    assert slotted(parts["text_encoder"]) == of_encoder
    expected = {"unet": len(of_unet), "text_encoder": len(of_encoder)}
    found = {name: part.modules for name, part in manager.status().components.items()}
    assert found == {name: count for name, count in expected.items() if count}


@pytest.mark.parametrize(
    ("target_modules", "error", "message"),
    [
        (["nowhere"], TargetMismatchError, "no module of unet, this Toy and of text_encoder, this"),
        ({"unet": ["up"]}, TargetMismatchError, "no module of unet, this Toy; .*unet.model.layers"),
        ({"unet": ["q_proj"], "text_encoder": []}, TargetMismatchError, "of text_encoder, this"),
        ({"vae": ["up"]}, ArgumentError, "some of 'unet', 'text_encoder', got"),
        ({"unet": None}, ArgumentError, "a string or a collection"),
        ({}, ArgumentError, "some of 'unet', 'text_encoder', got {}"),
        ({"unet": [3]}, ArgumentError, "a collection of strings"),
        ("(", ArgumentError, "no valid regular expression"),
        ([r"layers\.0"], TargetMismatchError, "no module of"),
    ],
)
def test_a_choice_that_matches_nothing_is_refused_and_attaches_nothing(
    target_modules, error, message
):
    parts = two()
    with pytest.raises(error, match=message):
        SlotManager(parts, max_rank=2, target_modules=target_modules)
    assert [slotted(part) for part in parts.values()] == [[], []]
    SlotManager(parts, max_rank=2)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({}, "at least one component"),
        ({"unet": None}, "component 'unet' must be an nn.Module, got NoneType"),
        ({"unet": nn.Linear}, "component 'unet' must be an nn.Module, got type"),
        ({"a.b": nn.Linear(2, 2)}, "non-empty string without dots, got 'a.b'"),
        ({"": nn.Linear(2, 2)}, "non-empty string without dots, got ''"),
        ({3: nn.Linear(2, 2)}, "non-empty string without dots, got 3"),
        ([nn.Linear(2, 2)], "a mapping of names to modules or a diffusers pipeline, got list"),
    ],
)
def test_what_is_no_set_of_components_is_refused(model, message):
    for attempt in (lambda: SlotManager(model, max_rank=2), lambda: SlotManager.of(model)):
        with pytest.raises(ArgumentError, match=message):
            attempt()


def part_adapter(rank: int = 2, *, seed: int = 0):
    """An adapter for ``unet``'s first projection and ``text_encoder``'s second layer."""
    ours = pairs({"unet.model.layers.0.q_proj": rank}, seed=seed)
    theirs = pairs({"text_encoder.0.down": rank}, inputs=16, outputs=8, seed=seed)
    return read_adapter(tensors_of(ours | theirs, prefix=""))


def outputs(parts):
    x = toy_input()
    return parts["unet"](x), parts["text_encoder"](x)


def test_a_name_means_the_module_of_its_own_component():
    parts, plain = two(), two()
    manager = SlotManager(parts, max_rank=2)
    report = manager.load(part_adapter())
    assert report.modules == ("unet.model.layers.0.q_proj", "text_encoder.0.down")
    changed, base = outputs(parts), outputs(plain)
    assert (changed[0] != base[0]).flatten(2).any(dim=2).tolist() == [[True, False], [False] * 2]
    assert not torch.equal(changed[1], base[1])


def test_a_module_that_two_components_share_has_one_slot_and_both_names():
    shared = toy()
    manager = SlotManager({"one": shared, "two": shared}, max_rank=2)
    assert manager.status().components.keys() == {"one"}
    for component in ("one", "two"):
        name = f"{component}.model.layers.0.q_proj"
        report = manager.load(read_adapter(tensors_of(pairs({name: 1}), prefix="")))
        assert report.modules == ("one.model.layers.0.q_proj",)


def test_the_repr_names_the_components():
    manager = SlotManager(two(), max_rank=2)
    assert repr(manager) == (
        "SlotManager(unet=Toy, text_encoder=Sequential, max_rank=2, num_slots=1, loaded=[])"
    )


def test_a_component_that_has_a_manager_already_is_refused():
    parts = two()
    SlotManager(parts["text_encoder"], max_rank=2)
    with pytest.raises(AttachError, match="text_encoder already has a SlotManager"):
        SlotManager(parts, max_rank=2)
    assert slotted(parts["unet"]) == []


def test_a_component_that_was_compiled_is_unwrapped_with_the_warning():
    parts = two()
    backend = CountingBackend()
    compiled = parts | {"unet": torch.compile(parts["unet"], backend=backend)}
    with pytest.warns(UserWarning, match="compiled before it got slots"):
        manager = SlotManager(compiled, max_rank=2)
    assert SlotManager.of(compiled) is SlotManager.of(parts["unet"]) is manager
    assert manager.load(part_adapter()).modules[0] == "unet.model.layers.0.q_proj"
    assert torch.equal(outputs(compiled)[0], outputs(parts)[0])


def test_a_component_compiled_in_place_is_warned_of_too():
    parts = two()
    parts["text_encoder"].compile(backend="eager")
    with pytest.warns(UserWarning, match="compiled before it got slots"):
        SlotManager(parts, max_rank=2)


def test_no_recompile_watches_all_components():
    parts = two()
    manager = SlotManager(parts, max_rank=4)
    backend = CountingBackend()
    compiled = {name: torch.compile(part, backend=backend) for name, part in parts.items()}
    outputs(compiled)
    graphs = backend.graphs
    with manager.no_recompile():
        for rank in (1, 4, 2):
            manager.load(part_adapter(rank))
            outputs(compiled)
        manager.unload("default")
        outputs(compiled)
    assert backend.graphs == graphs
    with pytest.raises(RecompileError), manager.no_recompile():
        compiled["text_encoder"](toy_input(5)[None])
    slots = parts["text_encoder"][0].up.lora_slots
    moved = slots.lora_A.clone()
    with pytest.raises(RecompileError, match="text_encoder"), manager.no_recompile():
        slots.register_buffer("lora_A", moved, persistent=False)


def test_verify_lists_the_layers_of_a_component_that_never_ran():
    parts = two()
    manager = SlotManager(parts, max_rank=2)
    manager.verify(lambda: outputs(parts))
    with pytest.raises(TargetMismatchError, match=r"2 of 6 .*: text_encoder\.0\.up, text_encoder"):
        manager.verify(lambda: parts["unet"](toy_input()))


def test_a_failed_load_changes_nothing_in_any_component():
    parts = two()
    root = nn.ModuleDict(parts)
    manager = SlotManager(parts, max_rank=4)
    manager.load(part_adapter(4), "live")
    before = Snapshot.of(manager, root)
    good = part_adapter(2, seed=3).tensors
    bad_shape = {**good, "text_encoder.0.down.lora_B.weight": torch.ones(9, 2)}
    bad_value = {**good, "text_encoder.0.down.lora_A.weight": torch.full((2, 16), torch.nan)}
    unknown = {name.replace("0.down", "9.down"): tensor for name, tensor in good.items()}
    for tensors in (bad_shape, bad_value, unknown):
        with pytest.raises(ValueError, match=r"text_encoder"):
            manager.load(read_adapter(tensors), "live")
        before.assert_unchanged(manager, root)
    manager.load(read_adapter(good), "live")
