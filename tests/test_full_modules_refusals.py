"""What there is no room for is refused with the option that makes room, or left out if asked."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from toys import WEIGHTS, Snapshot
from whole_files import FULL, X, headed, manager_of, with_pair, write_trained

from lora_slots import (
    AdapterFileError,
    ArgumentError,
    SlotManager,
    TargetMismatchError,
    UnsupportedAdapterError,
    read_adapter,
)

HEAD = "base_model.model.classifier.out_proj.weight"
NORM = "base_model.model.norm.weight"
NORM_BIAS = "base_model.model.norm.bias"


def refused(manager, model, source, error, match):
    manager.load(with_pair({}), "other")
    before = Snapshot.of(manager, model)
    for call in (manager.check, manager.load):
        with pytest.raises(error, match=match):
            call(source, "other")
        before.assert_unchanged(manager, model)


def test_without_the_option_a_saved_module_is_refused_with_the_remedy(tmp_path):
    path = write_trained(tmp_path / "a", headed(), modules_to_save=list(FULL))
    model = headed()
    match = (
        r"modules_to_save=\['norm', 'classifier'\]; 3 bias \(.*\); 3 full weight \(.*\); build the "
        r"SlotManager with full_modules=\['classifier', 'norm'\], or pass strict=False"
    )
    refused(manager_of(model, full_modules=()), model, path, UnsupportedAdapterError, match)


def test_the_remedy_names_what_to_list_where_no_config_does():
    model = headed()
    source = with_pair({HEAD: torch.ones(5, 8), "norm.w_norm": torch.ones(8)})
    match = r"1 full weight .*; 1 w_norm .*full_modules=\['classifier\.out_proj', 'norm'\]"
    refused(manager_of(model, full_modules=()), model, source, UnsupportedAdapterError, match)
    manager_of(headed(), full_modules=["classifier.out_proj", "norm"]).load(source)


@torch.no_grad()
def test_it_is_left_out_and_reported_if_not_strict(tmp_path):
    path = write_trained(tmp_path / "a", headed(), modules_to_save=list(FULL))
    model, plain = headed(), headed()
    report = manager_of(model, full_modules=()).load(path, strict=False)
    assert report.modules == ("q_proj",)
    assert {reason for _, reason in report.skipped} == {"bias", "full weight"}
    assert len(report.skipped) == 6
    assert torch.equal(model.norm.weight, plain.norm.weight)


def test_a_module_of_the_config_that_the_file_lacks_is_refused(tmp_path):
    model = headed()
    config = {"r": 2, "modules_to_save": ["norm", "classifier"]}
    source = with_pair({NORM: torch.ones(8) * 2}, config)
    match = r"asks for more than slots can hold: modules_to_save=\['classifier'\]; pass strict"
    refused(manager_of(model), model, source, UnsupportedAdapterError, match)
    # PEFT lists the usual names of heads, whatever the model has.
    config = {"r": 2, "modules_to_save": ["norm", "score"]}
    whole = {NORM: torch.ones(8) * 2, NORM_BIAS: torch.ones(8)}
    manager_of(headed()).load(with_pair(whole, config))


@pytest.mark.parametrize("missing", [HEAD, NORM, NORM_BIAS])
def test_a_saved_module_that_is_not_whole_is_refused(missing, tmp_path):
    path = write_trained(tmp_path / "a", headed(), modules_to_save=list(FULL))
    tensors = load_file(path / WEIGHTS)
    del tensors[missing]
    save_file(tensors, path / WEIGHTS)
    model = headed()
    name = missing.removeprefix("base_model.model.")
    match = rf"is incomplete: its config says modules_to_save=.*, but it has no tensor for {name}"
    refused(manager_of(model), model, path, AdapterFileError, match)


@pytest.mark.parametrize("key", [HEAD, "classifier.out_proj.diff"])
def test_a_tensor_of_another_shape_is_refused(key):
    model = headed()
    match = r"classifier\.out_proj\.weight has shape \(5, 8\), but .*\(4, 8\): it was made for ano"
    refused(
        manager_of(model), model, with_pair({key: torch.ones(4, 8)}), TargetMismatchError, match
    )


def test_a_tensor_that_is_not_finite_is_refused():
    model = headed()
    bad = torch.ones(8)
    bad[3] = torch.nan
    match = r"full of norm\.weight in adapter .* has 1 NaN or infinite values of 8"
    refused(manager_of(model), model, with_pair({NORM: bad}), AdapterFileError, match)


def test_two_different_tensors_for_one_parameter_are_refused():
    model = headed()
    source = with_pair({NORM: torch.ones(8) * 2, "norm.weight": torch.ones(8) * 3})
    match = r"two different tensors for one parameter of this model, at norm\.weight"
    refused(manager_of(model), model, source, TargetMismatchError, match)


def test_a_tensor_without_data_is_refused():
    model = headed()
    source = with_pair({NORM: torch.ones(8, device="meta")})
    refused(manager_of(model), model, source, AdapterFileError, r"norm\.weight .* on the meta dev")


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.q_proj(x))


def test_running_statistics_are_refused_unless_they_are_the_models_own(tmp_path):
    torch.manual_seed(0)
    model = Normed().eval()
    path = write_trained(tmp_path / "a", model, modules_to_save=["norm"])
    report = manager_of(model, full_modules=["norm"]).load(path)
    assert [key.rpartition(".")[2] for key, _ in report.skipped] == [
        "num_batches_tracked", "running_mean", "running_var",
    ]  # fmt: skip
    assert {reason for _, reason in report.skipped} == {"equal to the model's own"}
    other = Normed().eval()
    other(X)
    other.norm.running_mean += 1
    manager = manager_of(other, full_modules=["norm"])
    match = r"1 buffer \(base_model\.model\.norm\.running_mean\); pass strict=False"
    refused(manager, other, path, UnsupportedAdapterError, match)
    report = manager.load(path, "other", strict=False)
    assert ("base_model.model.norm.running_mean", "buffer") in report.skipped


@pytest.mark.parametrize("value", ["norm", [3], [""], [None]])
def test_names_must_be_a_collection_of_strings(value):
    with pytest.raises(ArgumentError, match="full_modules must be a collection of names"):
        manager_of(headed(), full_modules=value)


@pytest.mark.parametrize("name", ["nrm", "norm.weight"])
def test_a_name_that_matches_nothing_is_refused(name):
    match = f"full_modules has '{name}', which ends the name of no module with parameters"
    with pytest.raises(TargetMismatchError, match=match):
        manager_of(headed(), full_modules=["classifier", name])


def test_a_module_cannot_be_both_replaced_and_adapted():
    match = r"classifier\.dense is in full_modules, so that it takes whole tensors and nothing else"
    with pytest.raises(TargetMismatchError, match=match):
        manager_of(headed(), target_modules=["q_proj", "dense"])


def test_all_linear_means_all_but_the_modules_that_are_replaced():
    model = headed()
    manager_of(model)
    assert set(model.norm.lora_slots) == set(model.classifier.dense.lora_slots)
    assert hasattr(model.q_proj.lora_slots, "lora_A")


def test_a_model_may_have_nothing_but_modules_to_replace():
    model = headed()
    manager = manager_of(model, full_modules=["proj", "dense", "norm"])
    report = manager.load(read_adapter({"norm.diff": torch.ones(8)}))
    assert report.modules == ("norm.weight",)
    assert report.rank == 0
    assert "scaling 0" in str(report)


def test_parameters_that_are_not_read_by_name_or_not_floats_are_refused():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = nn.Linear(8, 8)
            self.rnn = nn.LSTM(8, 8)
            self.table = nn.Embedding(3, 8)
            self.table.weight = nn.Parameter(torch.ones(3, 8, dtype=torch.int8), False)

    for name, match in (
        ("rnn", r"rnn\.weight_ih_l0, .* is kept by LSTM in a list of its own"),
        ("table", r"table\.weight, .* is stored as torch\.int8"),
    ):
        with pytest.raises(TargetMismatchError, match=match):
            SlotManager(Odd(), max_rank=4, target_modules=["q_proj"], full_modules=[name])


def test_from_adapters_makes_room_for_what_is_not_the_models_own(tmp_path):
    path = write_trained(tmp_path / "a", headed(), modules_to_save=list(FULL), bias="lora_only")
    model = headed()
    manager = SlotManager.from_adapters(model, [path])
    assert manager.load(path).skipped == ()
    assert not hasattr(model.k_proj, "lora_slots")
