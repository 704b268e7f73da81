"""What DoRA files are refused for, by name; a refusal and a fault alike change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dora_files import dora_adapter, dora_tensors
from faults import Fault
from torch import Tensor, nn
from toys import TOY_MODULES, Snapshot, toy, toy_adapter, toy_input

from lora_slots import (
    AdapterFileError,
    LoraSlotsError,
    SlotManager,
    TargetMismatchError,
    UnsupportedAdapterError,
    read_adapter,
)

FIRST = f"base_model.model.{TOY_MODULES[0]}"
MAGNITUDE = f"{FIRST}.lora_magnitude_vector"
CONFIG = {"r": 4, "lora_alpha": 8, "use_dora": True}


def refuse(
    tensors: dict[str, Tensor],
    error: type[LoraSlotsError],
    message: str,
    *,
    config: dict[str, Any] | None = CONFIG,
    dora: bool = True,
    strict: bool = True,
) -> None:
    """Check and load over a live adapter: both must raise, and change nothing."""
    model = toy()
    manager = SlotManager(model, max_rank=8, dora=dora)
    manager.load(dora_adapter(4, seed=9) if dora else toy_adapter(4, seed=9))
    before, output = Snapshot.of(manager, model), model(toy_input())
    source = read_adapter(tensors, config)
    for call in (manager.check, manager.load):
        with pytest.raises(error, match=message):
            call(source, strict=strict)
        before.assert_unchanged(manager, model)
        assert torch.equal(model(toy_input()), output)
    manager.load(toy_adapter(2))


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
@pytest.mark.parametrize("config", [CONFIG, None], ids=["config", "tensors alone"])
def test_without_room_for_dora_the_remedy_is_named(
    config: dict[str, Any] | None, strict: bool
) -> None:
    refuse(
        dora_tensors(4), UnsupportedAdapterError,
        rf"has DoRA at {TOY_MODULES[0]}, .*build the SlotManager with dora=True",
        config=config, dora=False, strict=strict,
    )  # fmt: skip


def test_a_config_that_says_dora_needs_a_magnitude_for_every_module() -> None:
    tensors = dora_tensors(4)
    del tensors[f"base_model.model.{TOY_MODULES[2]}.lora_magnitude_vector"]
    message = rf"says use_dora, but there is no lora_magnitude_vector for .*{TOY_MODULES[2]}"
    refuse(tensors, AdapterFileError, message)
    plain = {key: tensor for key, tensor in tensors.items() if "magnitude" not in key}
    refuse(plain, AdapterFileError, "says use_dora")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_magnitude_that_is_not_finite_is_refused(value: float) -> None:
    tensors = dora_tensors(4)
    tensors[MAGNITUDE][2] = value
    refuse(tensors, AdapterFileError, rf"{TOY_MODULES[0]}.* has 1 NaN or infinite values")


@pytest.mark.parametrize("shape", [(5,), (8,), (1,), (6, 2), ()], ids=str)
def test_a_magnitude_of_another_size_is_refused(shape: tuple[int, ...]) -> None:
    tensors = {**dora_tensors(4), MAGNITUDE: torch.ones(shape)}
    refuse(tensors, TargetMismatchError, r"has 6 outputs, but the DoRA magnitude of .* has shape")


def test_a_magnitude_of_integers_is_refused() -> None:
    tensors = {**dora_tensors(4), MAGNITUDE: torch.ones(6, dtype=torch.int64)}
    refuse(tensors, AdapterFileError, r"magnitude of .*must be floating point")


@pytest.mark.parametrize("scale", [3e19, 1e30])
def test_an_update_whose_norm_leaves_float32_is_refused(scale: float) -> None:
    tensors = dora_tensors(4)
    tensors[f"{FIRST}.lora_B.weight"] *= scale
    refuse(tensors, AdapterFileError, rf"a norm for it, of {TOY_MODULES[0]} .* infinite values")


@torch.no_grad()
def test_kohyas_dora_scale_is_right_on_the_output_axis_and_refused_on_the_input_axis() -> None:
    pefts = dora_tensors(4, prefix="")
    kohyas = {key: t for key, t in pefts.items() if "magnitude" not in key}
    kohyas |= {f"{m}.alpha": torch.tensor(8.0) for m in TOY_MODULES}
    out_axis = {f"{m}.dora_scale": pefts[f"{m}.lora_magnitude_vector"][:, None]
                for m in TOY_MODULES}  # fmt: skip
    models = toy(), toy()
    SlotManager(models[0], max_rank=4, dora=True).load(read_adapter(pefts, CONFIG))
    SlotManager(models[1], max_rank=4, dora=True).load(read_adapter(kohyas | out_axis))
    assert torch.equal(models[0](toy_input()), models[1](toy_input()))
    in_axis = {f"{m}.dora_scale": torch.ones(1, 8) for m in TOY_MODULES}
    refuse(kohyas | in_axis, UnsupportedAdapterError, "dora_scale", config=None)


CALLS: dict[str, Callable[[SlotManager], object]] = {
    "dora over dora": lambda m: m.load(dora_adapter(3, seed=5), "first"),
    "plain over dora": lambda m: m.load(toy_adapter(8, seed=5), "first"),
    "dora over plain": lambda m: m.load(dora_adapter(3, modules=TOY_MODULES[::2]), "second"),
    "unload": lambda m: m.unload("first"),
    "set_adapters": lambda m: m.set_adapters("first", 3.0),
}


def start() -> tuple[nn.Module, SlotManager]:
    model = toy()
    manager = SlotManager(model, max_rank=8, num_slots=2, dora=True)
    manager.load(dora_adapter(6, seed=1), "first")
    manager.load(toy_adapter(2, seed=2), "second")
    manager.set_adapters(["first", "second"], [0.5, -2.0])
    return model, manager


class FaultError(Exception):
    """Nothing but a fault raises it."""


def is_interrupted(manager: SlotManager, call: str, operation: int) -> bool:
    """Whether a fault in the n-th operation came before the call was through."""
    try:
        with Fault(operation, FaultError()):
            CALLS[call](manager)
    except FaultError:
        return True
    return False


@pytest.mark.parametrize("call", CALLS)
def test_a_fault_in_any_operation_changes_nothing(call: str) -> None:
    model, manager = start()
    CALLS[call](manager)
    changed = Snapshot.of(manager, model)
    model, manager = start()
    before, output = Snapshot.of(manager, model), model(toy_input())
    operation = 0
    while is_interrupted(manager, call, operation):
        before.assert_unchanged(manager, model)
        assert torch.equal(model(toy_input()), output)
        operation += 1
    assert operation >= 1
    changed.assert_unchanged(manager, model)
