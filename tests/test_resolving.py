"""Every tensor of a file finds its module under the model's own names, or the load is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import (
    TOY_MODULES,
    Snapshot,
    expected_toy,
    pairs,
    refusal,
    tensors_of,
    toy,
    toy_input,
    write_folder,
)

from lora_slots import (
    RawAdapter,
    SlotManager,
    TargetMismatchError,
    inspect_adapter,
    read_adapter,
)

PAIRS = pairs(dict.fromkeys(TOY_MODULES, 4), seed=1)
CONFIG = {"r": 4, "lora_alpha": 8, "alpha_pattern": {"layers.1.q_proj": 16}}
SCALING = dict(zip(TOY_MODULES, [2.0, 2.0, 4.0, 2.0], strict=True))


def expected() -> Tensor:
    return expected_toy(toy(), toy_input(), PAIRS, SCALING)


@pytest.mark.parametrize("name", ["default", "my-adapter"])
def test_keys_that_carry_an_adapters_name_are_read(name: str) -> None:
    tensors = {
        key.replace(".weight", f".{name}.weight"): tensor
        for key, tensor in tensors_of(PAIRS).items()
    }
    model = toy()
    report = SlotManager(model, max_rank=4).load(read_adapter(tensors, CONFIG))
    assert report.scaling == SCALING
    torch.testing.assert_close(model(toy_input()), expected(), rtol=1e-5, atol=1e-4)


# What torch.compile, DDP, FSDP and activation checkpointing put into names


def renamed(rename: Callable[[str], str]) -> RawAdapter:
    """PAIRS under other names of their modules."""
    return read_adapter(
        tensors_of({rename(module): both for module, both in PAIRS.items()}, prefix=""), CONFIG
    )


def inside(segment: str) -> Callable[[str], str]:
    return lambda name: name.replace("layers.1", f"{segment}.layers.1.{segment}", 1)


SAVED: dict[str, Callable[[str], str]] = {
    "plain": lambda name: name,
    "PEFT": lambda name: f"base_model.model.{name}",
    "compiled PEFT model": lambda name: f"_orig_mod.base_model.model.{name}",
    "PEFT of a compiled base": lambda name: f"base_model.model._orig_mod.{name}",
    "DDP": lambda name: f"module.{name}",
    "DDP of PEFT": lambda name: f"module.base_model.model.{name}",
    "PEFT of DDP": lambda name: f"base_model.model.module.{name}",
    "FSDP": lambda name: f"_fsdp_wrapped_module.{name}",
    "FSDP of PEFT": lambda name: f"_fsdp_wrapped_module.base_model.model.{name}",
    "checkpointed": lambda name: f"_checkpoint_wrapped_module.{name}",
    "compiled layers": inside("_orig_mod"),
    "FSDP layers": inside("_fsdp_wrapped_module"),
    "checkpointed layers": inside("_checkpoint_wrapped_module"),
    "DDP layers": inside("module"),
    "all at once": lambda name: (
        "_orig_mod.module.base_model.model._fsdp_wrapped_module."
        + inside("_checkpoint_wrapped_module._orig_mod")(name)
    ),
}


@pytest.mark.parametrize("saved", SAVED)
def test_wrapper_segments_in_a_files_names_are_seen_through(saved: str) -> None:
    model = toy()
    report = SlotManager(model, max_rank=4).load(renamed(SAVED[saved]))
    assert report.modules == TOY_MODULES
    assert report.scaling == SCALING
    torch.testing.assert_close(model(toy_input()), expected(), rtol=1e-5, atol=1e-4)


class Wrapper(nn.Module):
    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, module)

    def forward(self, *args: Any) -> Any:
        return self.get_submodule(self.name)(*args)


def with_wrapped_layer(segment: str) -> nn.Module:
    model = toy()
    model.model.layers[1] = Wrapper(segment, model.model.layers[1])
    return model


def with_compiled_layer() -> nn.Module:
    model = toy()
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    return model


LIVE: dict[str, Callable[[], nn.Module]] = {
    "DataParallel": lambda: Wrapper("module", toy()),
    "compiled layer": with_compiled_layer,
    "FSDP layer": lambda: with_wrapped_layer("_fsdp_wrapped_module"),
    "checkpointed layer": lambda: with_wrapped_layer("_checkpoint_wrapped_module"),
}


@pytest.mark.filterwarnings("ignore:the model was compiled before it got slots:UserWarning")
@pytest.mark.parametrize("saved", ["plain", "compiled layers", "PEFT of DDP", "all at once"])
@pytest.mark.parametrize("live", LIVE)
def test_wrapper_segments_in_the_live_models_names_are_seen_through(live: str, saved: str) -> None:
    model = LIVE[live]()
    report = SlotManager(model, max_rank=4).load(renamed(SAVED[saved]))
    assert tuple(report.scaling.values()) == tuple(SCALING.values())
    assert [path.removeprefix("module.") for path in report.modules] == list(TOY_MODULES)
    with torch.compiler.set_stance("force_eager"):
        y = model(toy_input())
    torch.testing.assert_close(y, expected(), rtol=1e-5, atol=1e-4)


class HasModule(nn.Module):
    """A model with a real submodule called ``module``, and a layer of the same name outside it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 6, bias=False)
        self.module = nn.Module()
        self.module.lin = nn.Linear(8, 6, bias=False)


REAL = {**pairs({"lin": 2}, seed=1), **pairs({"module.lin": 3}, seed=2)}
REAL_CONFIG = {"r": 2, "lora_alpha": 6, "rank_pattern": {"module.lin": 3}}


@pytest.mark.parametrize("prefix", ["", "base_model.model.", "_orig_mod.base_model.model."])
def test_a_real_submodule_called_module_is_not_stripped(prefix: str) -> None:
    model = HasModule()
    report = SlotManager(model, max_rank=3).load(
        read_adapter(tensors_of(REAL, prefix), REAL_CONFIG)
    )
    assert report.scaling == {"lin": 3.0, "module.lin": 2.0}
    assert torch.equal(model.lin.lora_slots.lora_A[:2], REAL["lin"][0])
    assert torch.equal(model.module.lin.lora_slots.lora_A, REAL["module.lin"][0])


@pytest.mark.parametrize("prefix", ["module.", "module.base_model.model."])
def test_a_file_saved_through_ddp_does_not_swap_a_real_submodule_called_module(prefix: str) -> None:
    model = HasModule()
    report = SlotManager(model, max_rank=3).load(read_adapter(tensors_of(REAL, prefix)))
    assert report.modules == ("lin", "module.lin")
    assert torch.equal(model.lin.lora_slots.lora_A[:2], REAL["lin"][0])
    assert torch.equal(model.module.lin.lora_slots.lora_A, REAL["module.lin"][0])


def test_inspecting_keeps_a_real_submodule_called_module(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "a", tensors_of(REAL), REAL_CONFIG)
    info = inspect_adapter(path)
    assert info.ranks == {"lin": 2, "module.lin": 3}
    assert info.scaling == {"lin": 3.0, "module.lin": 2.0}


# Names that do not fit


@pytest.mark.parametrize("strict", [True, False])
def test_an_adapter_of_which_no_module_matches_is_refused_with_samples_of_both_sides(
    strict: bool,
) -> None:
    text = refusal(
        renamed(lambda name: f"language_{name}"), TargetMismatchError,
        "^4 of the 4 modules of .* match no target module", strict=strict,
    )  # fmt: skip
    for name in TOY_MODULES[:3]:
        assert f"language_{name}: no such module in the model" in text
        assert f" {name}" in text.split("the model's target modules are")[1]
    assert f"language_{TOY_MODULES[3]}" not in text


def half_matching() -> RawAdapter:
    return renamed(lambda name: name.replace("layers.1", "layers.7"))


def test_an_adapter_of_which_half_the_modules_match_is_refused() -> None:
    message = r"^2 of the 4 modules .*layers.7.q_proj: no such module.*or pass strict=False"
    refusal(half_matching(), TargetMismatchError, message)


@pytest.mark.filterwarnings("ignore:alpha_pattern in the config:UserWarning")
def test_an_adapter_of_which_half_the_modules_match_loads_if_not_strict_and_reports_the_rest() -> (
    None
):
    model = toy()
    manager = SlotManager(model, max_rank=4)
    checked = manager.check(half_matching(), strict=False)
    report = manager.load(half_matching(), strict=False)
    assert report.modules == checked.modules == TOY_MODULES[:2]
    assert report.skipped == checked.skipped
    assert report.skipped == tuple(
        (f"model.layers.7.{name}", "no such module in the model") for name in ("q_proj", "v_proj")
    )
    assert "skipped model.layers.7.q_proj: no such module in the model" in str(report)
    y, base = model(toy_input()), toy()(toy_input())
    torch.testing.assert_close(y[0], expected()[0], rtol=1e-5, atol=1e-4)
    assert torch.equal(y[1], base[1])


def test_the_last_segment_of_a_name_alone_matches_nothing() -> None:
    raw = read_adapter(tensors_of(pairs({"q_proj": 4}), prefix=""))
    refusal(raw, TargetMismatchError, "^1 of the 1 modules")


def test_a_layer_outside_the_registered_set_is_refused_with_the_remedy() -> None:
    model = toy()
    manager = SlotManager(model, max_rank=8, target_modules=["q_proj"])
    q_only = {name: PAIRS[name] for name in TOY_MODULES if "q_proj" in name}
    manager.load(read_adapter(tensors_of(q_only), CONFIG))
    before = Snapshot.of(manager, model)
    message = (
        "^2 of the 4 .*model.layers.0.v_proj: is Linear, not one of the target modules; .*"
        "build the SlotManager with target_modules that include them, or pass strict=False"
    )
    raw = read_adapter(tensors_of(PAIRS), CONFIG)
    with pytest.raises(TargetMismatchError, match=message):
        manager.load(raw)
    before.assert_unchanged(manager, model)
    report = manager.load(raw, strict=False)
    assert report.modules == tuple(q_only)
    assert [reason for _, reason in report.skipped] == [
        "is Linear, not one of the target modules"
    ] * 2


# One module under two names


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 6, bias=False)
        self.second = self.first


ONE = pairs({"m": 4}, seed=1)["m"]
OTHER = pairs({"m": 4}, seed=2)["m"]


@pytest.mark.parametrize("names", [("first",), ("second",), ("first", "second")])
def test_every_name_of_a_shared_module_resolves_to_its_one_slot(names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = Shared()
    base = model.first(toy_input())
    report = SlotManager(model, max_rank=4).load(
        read_adapter(tensors_of(dict.fromkeys(names, ONE)), {"r": 4, "lora_alpha": 8})
    )
    assert report.modules == ("first",)
    both = base + 2 * (toy_input() @ ONE[0].t() @ ONE[1].t())
    torch.testing.assert_close(model.second(toy_input()), both, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("second", "config"),
    [
        (OTHER, {}),
        ((ONE[0], OTHER[1]), {}),
        ((ONE[0][:2], ONE[1][:, :2]), {"rank_pattern": {"second": 2}}),
        ((ONE[0].double(), ONE[1].double() + 1e-12), {}),
        (ONE, {"alpha_pattern": {"second": 100}}),
    ],
    ids=["both", "lora_B", "rank", "dtype", "scaling"],
)
def test_two_names_of_a_shared_module_that_disagree_are_refused(
    second: tuple[Tensor, Tensor], config: dict[str, Any]
) -> None:
    model = Shared()
    manager = SlotManager(model, max_rank=8)
    manager.load(read_adapter(tensors_of({"first": OTHER})))
    before = Snapshot.of(manager, model)
    raw = read_adapter(
        tensors_of({"first": ONE, "second": second}), {"r": 4, "lora_alpha": 8, **config}
    )
    with pytest.raises(TargetMismatchError, match=r"first and .*second are one shared module"):
        manager.load(raw)
    before.assert_unchanged(manager, model)
