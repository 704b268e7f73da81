"""What load, hotswap and unload mean, and what they report. Weights are in test_weights.py."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import (
    TOY_MODULES,
    Snapshot,
    expected_toy,
    pairs,
    slot_buffers,
    tensors_of,
    toy,
    toy_adapter,
    toy_folder,
    toy_input,
    write_folder,
)

from lora_slots import (
    ArgumentError,
    LoadReport,
    NoFreeSlotError,
    SlotManager,
    UnknownAdapterError,
    read_adapter,
)

Q_ONLY = TOY_MODULES[::2]


@pytest.fixture
def model():
    return toy()


@pytest.fixture
def manager(model):
    return SlotManager(model, max_rank=8, num_slots=2)


def assert_output(model, *adapters, base=True):
    """The output is the base's plus each ``(weight, rank, seed, modules)``, alpha 8."""
    expected = toy()(toy_input())
    for weight, rank, seed, modules in adapters:
        parts = pairs(dict.fromkeys(modules, rank), seed=seed)
        scaling = dict.fromkeys(modules, weight * 8 / rank)
        expected = expected + expected_toy(toy(), toy_input(), parts, scaling) - toy()(toy_input())
    torch.testing.assert_close(model(toy_input()), expected, rtol=1e-4, atol=1e-4)


def test_a_first_load_takes_slot_0_and_is_the_only_active_adapter(model, manager):
    report = manager.load(toy_adapter(4, seed=1), "a")
    assert report.slot == 0
    assert manager.loaded_adapters == manager.active_adapters == ("a",)
    assert_output(model, (1.0, 4, 1, TOY_MODULES))


def test_loading_another_name_takes_a_free_slot_and_deactivates_the_rest(model, manager):
    manager.load(toy_adapter(4, seed=1), "a")
    assert manager.load(toy_adapter(2, seed=2), "b").slot == 1
    assert manager.loaded_adapters == ("a", "b")
    assert manager.active_adapters == ("b",)
    assert_output(model, (1.0, 2, 2, TOY_MODULES))


def test_loading_without_activating_changes_nothing_that_is_active(model, manager):
    manager.load(toy_adapter(4, seed=1), "a")
    before = model(toy_input())
    manager.load(toy_adapter(2, seed=2), "b", activate=False)
    assert manager.active_adapters == ("a",)
    assert torch.equal(model(toy_input()), before)
    manager.set_adapters("b")
    assert_output(model, (1.0, 2, 2, TOY_MODULES))


def test_a_hotswap_keeps_slot_weight_and_activity(model, manager):
    manager.load(toy_adapter(4, seed=1), "a", weight=0.5)
    manager.load(toy_adapter(2, seed=2), "b", weight=2.0)
    manager.set_adapters(["a", "b"], [0.5, -1.0])
    assert manager.load(toy_adapter(8, seed=3), "a").slot == 0
    assert manager.active_adapters == ("a", "b")
    assert_output(model, (0.5, 8, 3, TOY_MODULES), (-1.0, 2, 2, TOY_MODULES))


def test_a_hotswap_of_an_inactive_adapter_leaves_it_inactive(model, manager):
    manager.load(toy_adapter(4, seed=1), "a")
    manager.load(toy_adapter(2, seed=2), "b")
    before = model(toy_input())
    manager.load(toy_adapter(8, seed=3), "a")
    assert manager.active_adapters == ("b",)
    assert torch.equal(model(toy_input()), before)


@pytest.mark.parametrize(("activate", "active"), [(True, ("a",)), (False, ("b",))])
def test_a_hotswap_can_change_activity_and_weight(model, manager, activate, active):
    manager.load(toy_adapter(4, seed=1), "a")
    manager.load(toy_adapter(2, seed=2), "b")
    manager.set_adapters(["a", "b"])
    manager.load(toy_adapter(8, seed=3), "a", weight=3.0, activate=activate)
    assert manager.active_adapters == active
    assert manager.status().slots[0].weight == 3.0
    assert_output(model, (3.0, 8, 3, TOY_MODULES) if activate else (1.0, 2, 2, TOY_MODULES))


def test_nothing_is_left_of_a_larger_adapter_on_more_layers(model, manager):
    manager.load(toy_adapter(8, seed=1))
    first = 8 * manager.load(toy_adapter(2, seed=2, modules=Q_ONLY)).slot
    assert_output(model, (1.0, 2, 2, Q_ONLY))
    base = toy()(toy_input())
    assert torch.equal(model(toy_input())[:, 1], base[:, 1])  # v_proj, which the second lacks
    for name, buffer in slot_buffers(model).items():
        if "scaling" not in name:
            used = 2 if "q_proj" in name else 0
            own = buffer[first : first + used].count_nonzero()
            assert buffer.count_nonzero() == own, name
            assert own > 0 or used == 0, name


def test_unloading_gives_the_base_back_and_zeroes_the_slot(model, manager):
    manager.load(toy_adapter(8, seed=1), "a")
    manager.load(toy_adapter(8, seed=2), "b")
    manager.unload("b")
    manager.unload("a")
    assert torch.equal(model(toy_input()), toy()(toy_input()))
    assert all(buffer.count_nonzero() == 0 for buffer in slot_buffers(model).values())
    assert manager.loaded_adapters == manager.active_adapters == ()


def test_unloading_one_of_two_leaves_the_other_as_it_was(model, manager):
    manager.load(toy_adapter(4, seed=2), "b")
    alone = model(toy_input())
    manager.load(toy_adapter(8, seed=1), "a")
    manager.set_adapters(["a", "b"])
    manager.unload("a")
    assert manager.active_adapters == ("b",)
    assert torch.equal(model(toy_input()), alone)


def test_an_unloaded_slot_is_taken_by_the_next_new_name(manager):
    manager.load(toy_adapter(), "a")
    manager.load(toy_adapter(), "b")
    manager.unload("a")
    assert manager.load(toy_adapter(), "c").slot == 0
    assert manager.loaded_adapters == ("b", "c")


def test_an_unloaded_name_is_forgotten_with_its_weight(model, manager):
    manager.load(toy_adapter(4, seed=1), "a", weight=5.0)
    manager.unload("a")
    with pytest.raises(UnknownAdapterError, match=r"no adapter 'a' is loaded; loaded are none"):
        manager.unload("a")
    manager.load(toy_adapter(4, seed=1), "a")
    assert_output(model, (1.0, 4, 1, TOY_MODULES))


def test_a_load_without_a_free_slot_says_what_to_do(manager):
    manager.load(toy_adapter(), "a")
    manager.load(toy_adapter(), "b")
    with pytest.raises(NoFreeSlotError, match=r"'c' needs a free slot, but all 2 .*'a', 'b'.*=3"):
        manager.load(toy_adapter(), "c")
    assert isinstance(NoFreeSlotError("x"), RuntimeError)


def test_a_b_a_is_bit_equal(model, manager):
    outputs = []
    for seed, rank in ((1, 8), (2, 3), (1, 8), (2, 3)):
        manager.load(toy_adapter(rank, seed=seed))
        outputs.append((model(toy_input()), {k: b.clone() for k, b in slot_buffers(model).items()}))
    for (output, buffers), (again, buffers_again) in zip(outputs[:2], outputs[2:], strict=True):
        assert torch.equal(output, again)
        assert all(torch.equal(buffers[name], buffers_again[name]) for name in buffers)
    assert not torch.equal(outputs[0][0], outputs[1][0])


def test_the_base_weights_are_never_written(manager, model):
    def fingerprint() -> dict[str, tuple[int, str]]:
        return {
            name: (p.data_ptr(), hashlib.sha256(p.detach().numpy().tobytes()).hexdigest())
            for name, p in model.named_parameters()
        }

    before = fingerprint()
    for swap in range(10):
        manager.load(toy_adapter(1 + swap % 8, seed=swap), weight=swap - 4.0)
        model(toy_input())
        manager.set_weight("default", 0.5)
    manager.unload("default")
    assert fingerprint() == before
    assert len(before) == 4


def test_the_callers_tensors_are_neither_written_nor_aliased(manager, model):
    adapter = toy_adapter(8)
    before = {name: value.clone() for name, value in adapter.tensors.items()}
    manager.load(adapter, weight=0.25)
    loaded = model(toy_input())
    manager.unload("default")
    manager.load(adapter, weight=0.25)
    assert all(torch.equal(before[name], value) for name, value in adapter.tensors.items())
    for value in adapter.tensors.values():
        value.zero_()
    assert torch.equal(model(toy_input()), loaded)
    manager.load(toy_adapter(2), weight=1.0)
    assert all(value.count_nonzero() == 0 for value in adapter.tensors.values())


NAMES = ["a", "a.b", "a.b.c", "a/b", "ab", " ", "a ", "\n", "default", "адаптер", "🦜", "base",
         "0", "lora_A", "../x", "a\x00b", "model.layers.0"]  # fmt: skip


def test_adapter_names_are_opaque_keys(model):
    manager = SlotManager(model, max_rank=1, num_slots=len(NAMES))
    outputs = {}
    for seed, name in enumerate(NAMES):
        report = manager.load(toy_adapter(1, seed=seed), name)
        assert (report.adapter_name, report.slot) == (name, seed)
        outputs[name] = model(toy_input())
    assert manager.loaded_adapters == tuple(NAMES)
    for name in NAMES:
        manager.set_adapters(name)
        assert manager.active_adapters == (name,)
        torch.testing.assert_close(model(toy_input()), outputs[name], rtol=1e-5, atol=1e-5)
    manager.unload("a.b")
    assert manager.loaded_adapters == tuple(name for name in NAMES if name != "a.b")


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(min_size=1), min_size=1, max_size=4, unique=True))
def test_any_names_that_differ_are_different_adapters(names):
    manager = SlotManager(toy(), max_rank=1, num_slots=len(names))
    for name in names:
        manager.load(toy_adapter(1), name)
    assert manager.loaded_adapters == tuple(names)
    assert [slot.adapter_name for slot in manager.status().slots] == names


@pytest.mark.parametrize("name", ["", None, 0, b"a", ("a",)])
def test_a_name_must_be_a_string_that_is_not_empty(manager, model, name):
    before = Snapshot.of(manager, model)
    with pytest.raises(ArgumentError, match="adapter_name must be a non-empty string"):
        manager.load(toy_adapter(), name)
    before.assert_unchanged(manager, model)


def test_a_report_says_what_was_loaded(manager, tmp_path):
    folder = toy_folder(tmp_path / "a", 4, rank_pattern={}, alpha_pattern={"1.v_proj": 2})
    report = manager.load(folder, "sql")
    assert report == LoadReport(
        adapter_name="sql",
        slot=0,
        source=str(folder),
        rank=4,
        modules=TOY_MODULES,
        skipped=(),
        scaling={**dict.fromkeys(TOY_MODULES[:3], 2.0), TOY_MODULES[3]: 0.5},
        nbytes=4 * 4 * (8 + 6) * 4,
        seconds=report.seconds,
    )
    assert 0 < report.seconds < 60
    printed = str(report)
    for part in ("'sql'", "slot 0", str(folder), "rank 4", "0.5 to 2", "4 modules", "0.9 kB"):
        assert part in printed


def test_a_report_says_the_largest_rank_and_the_modules_in_the_models_order(manager):
    ranks = {TOY_MODULES[3]: 1, TOY_MODULES[0]: 5}
    report = manager.load(read_adapter(tensors_of(pairs(ranks))))
    assert (report.rank, report.modules) == (5, (TOY_MODULES[0], TOY_MODULES[3]))
    assert report.scaling == {TOY_MODULES[0]: 1.0, TOY_MODULES[3]: 1.0}


def test_a_report_lists_what_was_skipped(manager, tmp_path):
    tensors = tensors_of(pairs({TOY_MODULES[0]: 4, "model.layers.7.q_proj": 4}))
    tensors["base_model.model.lm_head.weight"] = torch.ones(2, 2)
    folder = write_folder(tmp_path / "a", tensors, {"r": 4, "lora_alpha": 8})
    report = manager.load(folder, strict=False)
    assert dict(report.skipped) == {
        "base_model.model.lm_head.weight": "full weight",
        "base_model.model.model.layers.7.q_proj": "no such module in the model",
    }
    assert "skipped base_model.model.lm_head.weight: full weight" in str(report)


def test_the_weight_is_no_part_of_the_reported_scaling(manager):
    assert manager.load(toy_adapter(4), weight=3.0).scaling == dict.fromkeys(TOY_MODULES, 2.0)
