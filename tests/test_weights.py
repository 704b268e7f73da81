"""Weights, selection, disabling: who contributes, and how much."""

from __future__ import annotations

import fractions
import math

import numpy as np
import pytest
import torch
from toys import (
    TOY_MODULES,
    Snapshot,
    expected_toy,
    pairs,
    slot_buffers,
    toy,
    toy_adapter,
    toy_input,
)

from lora_slots import ArgumentError, SlotManager, UnknownAdapterError
from lora_slots.layers import Mix


@pytest.fixture
def model():
    return toy()


@pytest.fixture
def manager(model):
    manager = SlotManager(model, max_rank=4, num_slots=3)
    for seed, name in enumerate("abc"):
        manager.load(toy_adapter(4, seed=seed), name)
    return manager


def assert_mix(model, **weights):
    """The output is the base plus ``weight * 2 * B A x`` of each named adapter."""
    x, base = toy_input(), toy()(toy_input())
    expected = base.clone()
    for name, weight in weights.items():
        parts = pairs(dict.fromkeys(TOY_MODULES, 4), seed="abc".index(name))
        expected += expected_toy(toy(), x, parts, dict.fromkeys(TOY_MODULES, 2 * weight)) - base
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


def factors(model):
    return {name: model.get_submodule(name).lora_slots.by_row() for name in TOY_MODULES}


def test_set_adapters_makes_these_and_only_these_active(model, manager):
    assert manager.active_adapters == ("c",)
    manager.set_adapters(["b", "a"])
    assert manager.active_adapters == ("a", "b")
    assert_mix(model, a=1, b=1)


def test_set_adapters_takes_one_weight_for_each(model, manager):
    manager.set_adapters(["c", "a"], [0.25, -1.5])
    assert_mix(model, c=0.25, a=-1.5)


def test_set_adapters_takes_one_weight_for_all(model, manager):
    manager.set_adapters(("a", "b"), 0.5)
    assert_mix(model, a=0.5, b=0.5)


def test_set_adapters_takes_one_name(model, manager):
    manager.set_adapters("a", 3)
    assert manager.active_adapters == ("a",)
    assert_mix(model, a=3)


def test_set_adapters_without_weights_means_1_whatever_was_set_before(model, manager):
    manager.set_weight("a", 7.0)
    manager.set_adapters(["a", "b"])
    assert_mix(model, a=1, b=1)


def test_set_adapters_with_no_names_deactivates_all(model, manager):
    manager.set_adapters([])
    assert manager.active_adapters == ()
    assert manager.loaded_adapters == ("a", "b", "c")
    assert torch.equal(model(toy_input()), toy()(toy_input()))


def test_weights_never_compound(model, manager):
    manager.set_weight("c", 0.5)
    once = factors(model)
    for _ in range(10):
        manager.set_weight("c", 0.5)
        manager.set_adapters("c", 0.5)
        manager.load(toy_adapter(4, seed=2), "c", weight=0.5)
    assert all(torch.equal(once[name], now) for name, now in factors(model).items())
    assert_mix(model, c=0.5)


def test_weight_0_takes_an_adapter_out_exactly_and_a_weight_brings_it_back(model, manager):
    before = model(toy_input())
    manager.set_weight("c", 0.0)
    assert manager.active_adapters == ()
    assert torch.equal(model(toy_input()), toy()(toy_input()))
    manager.set_weight("c", 1)
    assert manager.active_adapters == ("c",)
    assert torch.equal(model(toy_input()), before)


@pytest.mark.parametrize("zero", [0, 0.0, -0.0])
def test_every_zero_means_inactive(model, manager, zero):
    manager.set_adapters(["a", "c"], [1.0, zero])
    assert manager.active_adapters == ("a",)
    assert_mix(model, a=1)


def test_the_weight_of_an_inactive_adapter_is_kept_until_it_is_loaded_active(model, manager):
    before = model(toy_input())
    manager.set_weight("a", 0.25)
    assert manager.active_adapters == ("c",)
    assert torch.equal(model(toy_input()), before)
    manager.load(toy_adapter(4, seed=0), "a", activate=True)
    assert_mix(model, a=0.25)


def test_a_deactivated_adapter_keeps_its_weight(manager):
    manager.set_weight("c", 0.75)
    manager.set_adapters("a")
    assert manager.status().slots[2].weight == 0.75


def test_weights_write_what_all_layers_share_and_nothing_else(model, manager):
    before = {name: b.clone() for name, b in slot_buffers(model).items()}
    versions = {name: b._version for name, b in slot_buffers(model).items()}
    (mix,) = (module for module in model.modules() if isinstance(module, Mix))
    place = mix.rows.data_ptr()
    manager.set_adapters(["a", "b", "c"], [1.0, 2.0, 3.0])
    manager.set_weight("a", -1.0)
    for name, buffer in slot_buffers(model).items():
        assert torch.equal(buffer, before[name]), name
        assert buffer._version == versions[name], name
    assert mix.slots.tolist() == [[-1.0, 2.0, 3.0]]
    assert mix.rows.tolist() == [[-1.0] * 4 + [2.0] * 4 + [3.0] * 4]
    assert mix.rows.data_ptr() == place
    assert {id(model.get_submodule(name).lora_slots.mix) for name in TOY_MODULES} == {id(mix)}


def test_rows_are_multiplied_by_weight_times_alpha_over_r_in_float32(model, manager):
    manager.set_adapters(["a", "c"], [0.1, -3.0])
    for name, factor in factors(model).items():
        assert factor.dtype == torch.float32
        expected = torch.tensor([0.1 * 2] * 4 + [0.0] * 4 + [-3.0 * 2] * 4, dtype=torch.float64)
        assert torch.equal(factor, expected.float()[None])
        # The scaling is the adapters' own, active or not.
        assert model.get_submodule(name).lora_slots.scaling.tolist() == [[2.0] * 12]


def test_disabling_wins_over_everything_until_enabled(model, manager):
    base = toy()(toy_input())
    manager.disable_adapters()
    assert torch.equal(model(toy_input()), base)
    for change in (
        lambda: manager.set_weight("c", 2.0),
        lambda: manager.set_adapters(["a", "b"], [0.5, 2.0]),
        lambda: manager.load(toy_adapter(4, seed=2), "c"),
        lambda: manager.unload("c"),
        manager.disable_adapters,
    ):
        change()
        assert torch.equal(model(toy_input()), base)
    assert manager.active_adapters == ("a", "b")
    manager.enable_adapters()
    assert_mix(model, a=0.5, b=2.0)


def test_enabling_what_is_enabled_changes_nothing(model, manager):
    before = Snapshot.of(manager, model)
    manager.enable_adapters()
    before.assert_unchanged(manager, model)


BAD_WEIGHTS = [math.nan, math.inf, -math.inf, "1", None, True, [1.0], {"q": 1.0}, 1j,
               torch.tensor(1.0), 10**400]  # fmt: skip


@pytest.mark.parametrize("weight", BAD_WEIGHTS, ids=lambda weight: repr(weight)[:20])
def test_a_weight_must_be_a_finite_number(model, manager, weight):
    before = Snapshot.of(manager, model)
    calls = [
        lambda: manager.set_weight("c", weight),
        lambda: manager.set_adapters(["a", "c"], [1.0, weight]),
    ]
    if weight is not None:
        calls.append(lambda: manager.load(toy_adapter(), "c", weight=weight))
    for call in calls:
        with pytest.raises(ArgumentError, match="must be"):
            call()
        before.assert_unchanged(manager, model)


@pytest.mark.parametrize(
    "weights", [[1.0], [1.0, 2.0, 3.0], [], "ab", b"ab", {"a": 1.0, "b": 2.0}, True, math.nan]
)
def test_weights_must_be_one_number_or_one_for_each(model, manager, weights):
    before = Snapshot.of(manager, model)
    with pytest.raises(ArgumentError):
        manager.set_adapters(["a", "b"], weights)
    before.assert_unchanged(manager, model)


def test_weights_per_block_are_refused_by_name(manager):
    with pytest.raises(ArgumentError, match="no weights per component or block"):
        manager.set_adapters("a", {"unet": 0.5})


@pytest.mark.parametrize("weight", [np.float64(0.5), fractions.Fraction(1, 2), np.float32(0.5)])
def test_numbers_of_other_libraries_are_taken_exactly_or_refused(model, manager, weight):
    try:
        manager.set_weight("c", weight)
    except ArgumentError as error:
        assert "must be a finite number" in str(error)  # noqa: PT017
        assert_mix(model, c=1)
    else:
        assert_mix(model, c=0.5)


def test_repeated_names_are_refused(model, manager):
    before = Snapshot.of(manager, model)
    with pytest.raises(ArgumentError, match="must not repeat"):
        manager.set_adapters(["a", "b", "a"])
    before.assert_unchanged(manager, model)


@pytest.mark.parametrize("names", [["a", "x"], "x", "", ["a", None], ["a", 3], [["a"]]])
def test_unknown_names_are_refused_and_the_loaded_ones_listed(model, manager, names):
    before = Snapshot.of(manager, model)
    with pytest.raises(UnknownAdapterError, match="loaded are 'a', 'b', 'c'"):
        manager.set_adapters(names)
    before.assert_unchanged(manager, model)


@pytest.mark.parametrize("names", [None, 3])
def test_names_that_are_no_names_are_refused(model, manager, names):
    before = Snapshot.of(manager, model)
    with pytest.raises((ArgumentError, UnknownAdapterError)):
        manager.set_adapters(names)
    before.assert_unchanged(manager, model)


def test_a_weight_that_float32_cannot_hold_with_the_scaling_is_refused(model, manager):
    before = Snapshot.of(manager, model)
    with pytest.raises(ArgumentError, match=r"weight 1e\+39 times scalings up to 2\.0"):
        manager.set_weight("c", 1e39)
    before.assert_unchanged(manager, model)


def test_so_is_one_that_rounds_up_to_what_float32_cannot_hold():
    # Each by itself rounds up, and with that their product leaves the range.
    weight = 1 + 2**-24 + 2**-30
    scaling = torch.finfo(torch.float32).max / weight
    manager = SlotManager(toy(), max_rank=1)
    manager.load(toy_adapter(1, alpha=scaling))
    with pytest.raises(ArgumentError, match="must be a finite float32"):
        manager.set_weight("default", weight)
    manager.set_weight("default", 0.5)
