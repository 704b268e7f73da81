"""Promise 4: a load that fails, at any step, changes nothing; the next good one works.

Writes that die halfway are in test_failed_write_is_rolled_back.py.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor
from toys import (
    TOY_MODULES,
    WEIGHTS,
    Snapshot,
    expected_toy,
    pairs,
    places,
    tensors_of,
    toy,
    toy_folder,
    toy_input,
    write_folder,
)

from lora_slots import (
    AdapterFileError,
    ArgumentError,
    AttachError,
    LoraSlotsError,
    NoFreeSlotError,
    RankTooLargeError,
    SlotManager,
    TargetMismatchError,
    UnknownAdapterError,
    UnsupportedAdapterError,
)

LAST = TOY_MODULES[-1]
GOOD = {"r": 4, "lora_alpha": 8}


def missing(path: Path) -> Path:
    return path / "nowhere"


def truncated(path: Path) -> Path:
    folder = toy_folder(path)
    weights = folder / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-5])
    return folder


def empty(path: Path) -> Path:
    folder = toy_folder(path)
    (folder / WEIGHTS).write_bytes(b"")
    return folder


def _with_last(path: Path, config: dict[str, object] = GOOD, **changed: torch.Tensor) -> Path:
    tensors = tensors_of(pairs(dict.fromkeys(TOY_MODULES, 4)))
    for side, tensor in changed.items():
        tensors[f"base_model.model.{LAST}.lora_{side}.weight"] = tensor
    return write_folder(path, tensors, config)


def wrong_output_size_in_the_last_layer(path: Path) -> Path:
    return _with_last(path, B=torch.ones(3, 4))


def wrong_input_size_in_the_last_layer(path: Path) -> Path:
    return _with_last(path, A=torch.ones(4, 10))


def two_ranks_in_the_last_layer(path: Path) -> Path:
    return _with_last(path, B=torch.ones(6, 2))


def nan_in_the_last_tensor(path: Path) -> Path:
    B = torch.ones(6, 4)
    B[5, 3] = math.nan
    return _with_last(path, B=B)


def infinity_in_the_last_tensor(path: Path) -> Path:
    B = torch.ones(6, 4)
    B[5, 3] = -math.inf
    return _with_last(path, B=B)


def rank_too_large_in_the_last_layer(path: Path) -> Path:
    config = {**GOOD, "rank_pattern": {LAST: 9}}
    return _with_last(path, config, A=torch.ones(9, 8), B=torch.ones(6, 9))


def dora_without_magnitudes(path: Path) -> Path:
    return toy_folder(path, use_dora=True)


def another_algorithm(path: Path) -> Path:
    return toy_folder(path, peft_type="IA3")


def modules_that_the_model_lacks(path: Path) -> Path:
    names = [*TOY_MODULES, "model.layers.2.q_proj"]
    return write_folder(path, tensors_of(pairs(dict.fromkeys(names, 4))), GOOD)


def alpha_beyond_float32(path: Path) -> Path:
    return toy_folder(path, lora_alpha=1e300)


BAD: dict[Callable[[Path], Path], type[LoraSlotsError]] = {
    missing: AdapterFileError,
    truncated: AdapterFileError,
    empty: AdapterFileError,
    wrong_output_size_in_the_last_layer: TargetMismatchError,
    wrong_input_size_in_the_last_layer: TargetMismatchError,
    two_ranks_in_the_last_layer: AdapterFileError,
    nan_in_the_last_tensor: AdapterFileError,
    infinity_in_the_last_tensor: AdapterFileError,
    rank_too_large_in_the_last_layer: RankTooLargeError,
    dora_without_magnitudes: AdapterFileError,
    another_algorithm: UnsupportedAdapterError,
    modules_that_the_model_lacks: TargetMismatchError,
    alpha_beyond_float32: AdapterFileError,
}


@pytest.fixture
def model():
    return toy()


@pytest.fixture
def manager(model, tmp_path):
    """Two of three slots are taken, both active, at weights that are not 1."""
    manager = SlotManager(model, max_rank=8, num_slots=3)
    manager.load(toy_folder(tmp_path / "first", 8, seed=1), "first")
    manager.load(toy_folder(tmp_path / "second", 2, seed=2), "second")
    manager.set_adapters(["first", "second"], [0.5, -2.0])
    return manager


@pytest.mark.parametrize("name", ["first", "new"], ids=["hotswap", "new load"])
@pytest.mark.parametrize("make", BAD, ids=lambda make: make.__name__)
def test_a_bad_file_changes_nothing_and_the_next_good_one_loads(
    model, manager, tmp_path, make, name
):
    before, where = Snapshot.of(manager, model), places(model)
    output = model(toy_input())
    with pytest.raises(BAD[make]):
        manager.load(make(tmp_path / "bad"), name, weight=3.0)
    before.assert_unchanged(manager, model)
    assert places(model) == where
    assert torch.equal(model(toy_input()), output)

    manager.load(toy_folder(tmp_path / "good", 4, seed=5), name, weight=1.0)
    manager.set_adapters(name)
    good = pairs(dict.fromkeys(TOY_MODULES, 4), seed=5)
    expected = expected_toy(model, toy_input(), good, dict.fromkeys(TOY_MODULES, 2.0))
    torch.testing.assert_close(model(toy_input()), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", BAD, ids=lambda make: make.__name__)
def test_a_bad_file_leaves_an_empty_manager_empty(tmp_path, make):
    model = toy()
    manager = SlotManager(model, max_rank=8)
    before = Snapshot.of(manager, model)
    with pytest.raises(BAD[make]):
        manager.load(make(tmp_path / "bad"))
    before.assert_unchanged(manager, model)
    assert torch.equal(model(toy_input()), toy()(toy_input()))
    assert manager.loaded_adapters == ()


def test_no_free_slot_changes_nothing(model, manager, tmp_path):
    manager.load(toy_folder(tmp_path / "third"), "third")
    before = Snapshot.of(manager, model)
    with pytest.raises(NoFreeSlotError, match="num_slots=4"):
        manager.load(toy_folder(tmp_path / "fourth"), "fourth")
    before.assert_unchanged(manager, model)


def test_no_free_slot_is_found_before_the_file_is_read(model, manager, tmp_path):
    manager.load(toy_folder(tmp_path / "third"), "third")
    with pytest.raises(NoFreeSlotError):
        manager.load(tmp_path / "missing", "fourth")


CALLS: dict[str, tuple[Callable[[SlotManager, Path], object], type[LoraSlotsError]]] = {
    "weight": (lambda m, path: m.load(path, "first", weight=math.nan), ArgumentError),
    "weight of a new name": (lambda m, path: m.load(path, "new", weight=math.inf), ArgumentError),
    "product": (lambda m, path: m.load(path, "first", weight=1e308), ArgumentError),
    "name": (lambda m, path: m.load(path, ""), ArgumentError),
    "unload": (lambda m, path: m.unload("nobody"), UnknownAdapterError),
    "set_weight": (lambda m, path: m.set_weight("nobody", 1.0), UnknownAdapterError),
    "bad weight": (lambda m, path: m.set_weight("first", -math.inf), ArgumentError),
    "huge weight": (lambda m, path: m.set_weight("second", 1e200), ArgumentError),
    "one unknown of two": (lambda m, path: m.set_adapters(["first", "x"]), UnknownAdapterError),
    "one bad weight of two": (
        lambda m, path: m.set_adapters(["second", "first"], [1.0, math.nan]),
        ArgumentError,
    ),
    "one huge weight of two": (
        lambda m, path: m.set_adapters(["second", "first"], [1.0, 1e200]),
        ArgumentError,
    ),
    "fewer weights": (lambda m, path: m.set_adapters(["first", "second"], [1.0]), ArgumentError),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_bad_argument_changes_nothing(model, manager, tmp_path, call):
    do, error = CALLS[call]
    folder = toy_folder(tmp_path / "good", seed=5)
    before = Snapshot.of(manager, model)
    with pytest.raises(error):
        do(manager, folder)
    before.assert_unchanged(manager, model)


def test_weights_in_range_alone_but_not_when_enabled_together_change_nothing(tmp_path):
    # While disabled, a weight contributes nothing; whether it fits shows when it is enabled.
    model = toy()
    manager = SlotManager(model, max_rank=8)
    manager.load(toy_folder(tmp_path / "big", lora_alpha=4e30))
    manager.disable_adapters()
    try:
        manager.set_weight("default", 1e30)
    except ArgumentError:
        return
    before = Snapshot.of(manager, model)
    with pytest.raises(ArgumentError):
        manager.enable_adapters()
    before.assert_unchanged(manager, model)


def test_a_model_that_would_ignore_slots_is_refused_and_nothing_changes(model, manager, tmp_path):
    folder = toy_folder(tmp_path / "good", seed=5)
    before = Snapshot.of(manager, model)
    with inductor.patch(freezing=True), pytest.raises(AttachError, match="freezing"):
        manager.load(folder, "first")
    before.assert_unchanged(manager, model)


def test_a_file_that_vanishes_between_check_and_load_changes_nothing(model, manager, tmp_path):
    folder = toy_folder(tmp_path / "good", seed=5)
    manager.check(folder, "first")
    shutil.rmtree(folder)
    before = Snapshot.of(manager, model)
    with pytest.raises(AdapterFileError, match="does not exist"):
        manager.load(folder, "first")
    before.assert_unchanged(manager, model)


def test_the_snapshot_notices_a_single_bit(model, manager):
    before = Snapshot.of(manager, model)
    buffer = model.model.layers[1].v_proj.lora_slots.lora_B
    buffer[23, 5] = torch.nextafter(buffer[23, 5], torch.tensor(math.inf))
    with pytest.raises(AssertionError, match=r"v_proj\.lora_slots\.lora_B"):
        before.assert_unchanged(manager, model)
