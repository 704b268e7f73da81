"""``full_modules``: an adapter may bring whole modules along, and they are exactly its own."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from toys import WEIGHTS, peft_model
from whole_files import FULL, Headed, X, by_peft, headed, manager_of, with_pair, write_trained

from lora_slots import SlotManager


@pytest.fixture
def path(tmp_path):
    return write_trained(tmp_path / "a", headed(), modules_to_save=list(FULL))


@torch.no_grad()
def test_nothing_loaded_is_the_base_model_bit_for_bit(path):
    model = headed()
    base = model(X)
    manager = manager_of(model)
    assert torch.equal(model(X), base)
    manager.load(path)
    assert not torch.equal(model(X), base)
    for leave in (
        lambda: manager.set_weight("default", 0),
        manager.disable_adapters,
        lambda: manager.unload("default"),
        manager.detach,
    ):
        leave()
        assert torch.equal(model(X), base)
    assert type(model.norm) is nn.LayerNorm
    assert type(model.classifier.dense) is nn.Linear


@torch.no_grad()
def test_a_head_and_a_norm_are_those_of_peft(path):
    model = headed()
    report = manager_of(model).load(path)
    assert report.rank == 2
    assert report.scaling == {"q_proj": 4.0}
    assert report.modules == (
        "q_proj",
        "norm.weight",
        "norm.bias",
        "classifier.dense.weight",
        "classifier.dense.bias",
        "classifier.out_proj.weight",
        "classifier.out_proj.bias",
    )
    torch.testing.assert_close(model(X), by_peft(headed(), path), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_at_weight_1_a_parameter_is_that_of_the_file_bit_for_bit(path):
    model = headed()
    manager_of(model).load(path)
    tensors = load_file(path / WEIGHTS)
    for name in ("norm.weight", "norm.bias", "classifier.dense.weight", "classifier.out_proj.bias"):
        module = model.get_submodule(name.rpartition(".")[0])
        now = getattr(module, name.rpartition(".")[2])
        assert torch.equal(now, tensors[f"base_model.model.{name}"])
        assert torch.equal(
            module._parameters[name.rpartition(".")[2]], headed().get_parameter(name)
        )


def test_the_state_dict_and_the_parameters_stay_the_base_models(path):
    model = headed()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    manager_of(model).load(path)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert [name for name, _ in model.named_parameters()] == list(before)


def replaced(model: Headed, tensors, weights) -> Headed:
    """A copy of ``model`` whose parameters have moved towards those of several files."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, own in other.named_parameters():
            start = own.clone()
            for file, weight in zip(tensors, weights, strict=True):
                if f"base_model.model.{name}" in file:
                    own += weight * (file[f"base_model.model.{name}"] - start)
            if name == "q_proj.weight":
                for file, weight in zip(tensors, weights, strict=True):
                    A, B = (file[f"base_model.model.q_proj.lora_{side}.weight"] for side in "AB")
                    own += weight * 4 * B @ A
    return other


@torch.no_grad()
@pytest.mark.parametrize("weight", [0.5, -1.5, 2.0])
def test_a_weight_interpolates_between_the_base_and_the_adapter(path, weight):
    model = headed()
    manager_of(model).load(path, weight=weight)
    expected = replaced(headed(), [load_file(path / WEIGHTS)], [weight])
    torch.testing.assert_close(model(X), expected(X), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_changes_of_several_adapters_add_up(path, tmp_path):
    other = write_trained(tmp_path / "b", headed(), seed=1, modules_to_save=list(FULL))
    model = headed()
    manager = manager_of(model)
    manager.load(path, "one")
    manager.load(other, "two")
    manager.set_adapters(["one", "two"], [0.5, 0.7])
    files = [load_file(file / WEIGHTS) for file in (path, other)]
    expected = replaced(headed(), files, [0.5, 0.7])
    torch.testing.assert_close(model(X), expected(X), rtol=1e-5, atol=1e-5)
    manager.set_adapters("two")
    torch.testing.assert_close(model(X), by_peft(headed(), other), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_what_a_file_has_no_tensors_for_stays_the_base_models(tmp_path):
    model = headed()
    manager = manager_of(model)
    manager.load(write_trained(tmp_path / "a", headed(), modules_to_save=list(FULL)))
    raw = with_pair({"classifier.out_proj.weight": torch.ones(5, 8)})
    manager.load(raw)
    base = headed()
    assert torch.equal(model.classifier.out_proj.weight, torch.ones(5, 8))
    assert torch.equal(model.classifier.out_proj.bias, base.classifier.out_proj.bias)
    assert torch.equal(model.norm.weight, base.norm.weight)
    assert torch.equal(model.classifier.dense.weight, base.classifier.dense.weight)


@torch.no_grad()
@pytest.mark.parametrize(
    "spelling",
    [
        "base_model.model.classifier.modules_to_save.default.out_proj.weight",
        "base_model.model.classifier.modules_to_save.out_proj.weight",
        "classifier.modules_to_save.my_adapter.out_proj.weight",
        "module.classifier.out_proj.weight",
        "base_model.model._orig_mod.classifier.out_proj.weight",
        "classifier.base_layer.out_proj.weight",
    ],
)
def test_every_spelling_of_a_saved_module_is_understood(spelling):
    model = headed()
    manager_of(model).load(with_pair({spelling: torch.ones(5, 8)}))
    assert torch.equal(model.classifier.out_proj.weight, torch.ones(5, 8))


@torch.no_grad()
def test_with_every_bias_trained_too_what_was_replaced_is_left_out(tmp_path):
    path = write_trained(tmp_path / "a", headed(), modules_to_save=list(FULL), bias="all")
    model = headed()
    report = manager_of(model, bias=True).load(path)
    torch.testing.assert_close(model(X), by_peft(headed(), path), rtol=1e-5, atol=1e-5)
    reasons = {reason for key, reason in report.skipped if "original_module" in key}
    assert reasons <= {"replaced by the modules_to_save of the same file"}


@torch.no_grad()
def test_a_transformers_classifier_is_that_of_peft(tmp_path):
    from transformers import RobertaConfig, RobertaForSequenceClassification

    torch.manual_seed(0)
    model = RobertaForSequenceClassification(
        RobertaConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            vocab_size=32, num_labels=3, max_position_embeddings=20,
        )
    ).eval()  # fmt: skip
    # For this task PEFT saves "classifier" and "score", of which this model has the first.
    path = write_trained(
        tmp_path / "a", model, target_modules=["query", "value"], task_type="SEQ_CLS"
    )
    tokens = torch.arange(5, 15).reshape(2, 5)
    expected = peft_model(copy.deepcopy(model), path)(tokens).logits
    base = model(tokens).logits
    manager = SlotManager(model, max_rank=4, full_modules=["classifier"])
    assert torch.equal(model(tokens).logits, base)
    manager.load(path)
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_embeddings_and_a_tied_head_are_replaced_apart_from_each_other(tmp_path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 8)
            self.q_proj = nn.Linear(8, 8)
            self.head = nn.Linear(8, 9, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.q_proj(self.embed(ids)))

    torch.manual_seed(0)
    model = Tied().eval()
    ids = torch.arange(9)
    path = write_trained(tmp_path / "a", model, modules_to_save=["head"])
    expected = by_peft(model, path, ids)
    manager = SlotManager(model, max_rank=4, target_modules=["q_proj"], full_modules=["head"])
    manager.load(path)
    torch.testing.assert_close(model(ids), expected, rtol=1e-5, atol=1e-5)
    assert model.embed.weight is model.head._parameters["weight"]


@torch.no_grad()
def test_a_whole_attention_can_be_replaced(tmp_path):
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
            self.q_proj = nn.Linear(8, 8)

        def forward(self, x):
            return self.q_proj(self.attn(x, x, x)[0])

    torch.manual_seed(0)
    model = Attending().eval()
    x = torch.randn(2, 3, 8)
    path = write_trained(tmp_path / "a", model, modules_to_save=["attn"])
    expected = by_peft(model, path, x)
    manager = manager_of(model, full_modules=["attn"])
    manager.verify(lambda: model(x))
    manager.load(path)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_parameter_may_have_any_name():
    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = nn.Linear(8, 8)
            self.memory = nn.Module()
            self.memory.keys = nn.Parameter(torch.ones(3, 8))
            self.store = nn.ParameterList([torch.ones(8), torch.ones(8)])

        def forward(self, x):
            return self.q_proj(x) @ self.memory.keys.t() + self.store[1].sum()

    model = Memory().eval()
    base = model(X)
    manager = manager_of(model, full_modules=["memory", "store"])
    manager.load(with_pair({"memory.keys": torch.zeros(3, 8), "store.1": torch.zeros(8)}))
    assert not model(X).any()
    manager.unload("default")
    assert torch.equal(model(X), base)
