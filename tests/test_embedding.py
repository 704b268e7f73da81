"""Adapters on embeddings give what PEFT gives, and leave tied heads alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conv_nets import random
from dora_files import write_dora
from embedding_models import MODELS, VOCABULARY, Plain, llama, run
from safetensors.torch import load_file
from torch import Tensor, nn
from toys import (
    INDUCTOR_WARNING,
    TOKENS,
    WEIGHTS,
    CountingBackend,
    Snapshot,
    peft_model,
    write_adapter,
    write_folder,
)

from lora_slots import LoraSlotsError, SlotManager, TargetMismatchError, read_adapter

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Could not identify embedding layer:UserWarning"),
]
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)


def targets(model: nn.Module) -> list[str]:
    return ["embed_tokens"] + ["q_proj"] * (not isinstance(model, Plain))


@EVERY_MODEL
@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
def test_an_embedding_with_an_adapter_is_pefts(name: str, use_dora: bool, tmp_path: Path):
    make = MODELS[name]
    config = {"r": 3, "lora_alpha": 6, "target_modules": targets(make())}
    (write_dora if use_dora else write_adapter)(tmp_path, make(), **config)
    expected = peft_model(make(), tmp_path)
    model = make()
    base = run(model)
    manager = SlotManager(model, max_rank=8, target_modules=targets(model), dora=use_dora)
    assert torch.equal(run(model), base)
    manager.load(tmp_path)
    torch.testing.assert_close(run(model), run(expected), **CLOSE)
    assert not torch.allclose(run(model), base, atol=1e-3)
    for weight in (-0.5, 2.0):
        for layer in expected.modules():
            if hasattr(layer, "set_scale"):
                layer.set_scale("default", weight)
        manager.set_weight("default", weight)
        torch.testing.assert_close(run(model), run(expected), **CLOSE)
    manager.unload("default")
    assert torch.equal(run(model), base)


@pytest.mark.parametrize("buckets", [None, "auto"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_max_norm_bounds_the_rows_of_lora_A_as_in_peft(norm_type: float, buckets, tmp_path: Path):
    def make() -> nn.Module:
        return Plain(max_norm=1.5, norm_type=norm_type)

    for seed, name in enumerate("ab"):
        write_adapter(
            tmp_path / name, make(), seed=seed, r=3, lora_alpha=6, target_modules=["embed_tokens"]
        )
    model = make()
    manager = SlotManager(
        model, max_rank=4, num_slots=2, target_modules=["embed_tokens"], rank_buckets=buckets
    )
    expected = peft_model(make(), tmp_path / "a", adapter_name="a")
    expected.load_adapter(tmp_path / "b", "b")
    expected.base_model.set_adapter(["a", "b"])
    for name in "ab":
        manager.load(tmp_path / name, name)
    manager.set_adapters(["a", "b"])
    torch.testing.assert_close(run(model), run(expected), **CLOSE)
    # Unlike PEFT's, the adapter itself is not changed by that.
    before = model.embed_tokens.lora_slots.lora_A.clone()
    run(model)
    assert torch.equal(model.embed_tokens.lora_slots.lora_A, before)


def test_a_tied_head_is_not_changed_by_an_adapter_on_its_embedding():
    model = llama(tied=True)
    weight, x = model.lm_head.weight.clone(), random(3, 16)
    logits, rows = model.lm_head(x), model.model.embed_tokens(TOKENS)
    SlotManager(model, max_rank=2, target_modules=["embed_tokens"]).load(rank_two())
    assert not torch.allclose(model.model.embed_tokens(TOKENS), rows)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, weight)
    assert torch.equal(model.lm_head(x), logits)


def rank_two(seed: int = 0, vocabulary: int = VOCABULARY, prefix: str = "model."):
    return read_adapter(
        {
            f"{prefix}embed_tokens.lora_embedding_A": random(2, vocabulary, seed=seed),
            f"{prefix}embed_tokens.lora_embedding_B": random(16, 2, seed=seed + 100),
        }
    )


def test_a_copy_of_the_base_weight_is_reported_and_another_weight_refused(tmp_path: Path):
    path = tmp_path / "adapter"
    write_adapter(path, llama(), r=2, target_modules=["q_proj", "embed_tokens"])
    copy_key = "base_model.model.model.embed_tokens.base_layer.weight"
    tensors = load_file(path / WEIGHTS)
    assert copy_key in tensors
    model = llama()
    manager = SlotManager(model, max_rank=2, target_modules=["q_proj", "embed_tokens"])
    assert manager.load(path).skipped == ((copy_key, "equal to the model's own"),)
    before = Snapshot.of(manager, model)
    write_folder(path, {**tensors, copy_key: tensors[copy_key] + 1}, None)
    with pytest.raises(LoraSlotsError, match=r"1 copy of a base weight \(base_model"):
        manager.load(path)
    before.assert_unchanged(manager, model)
    assert copy_key in dict(manager.load(path, strict=False).skipped)


def test_an_adapter_for_another_vocabulary_is_refused_and_changes_nothing():
    model = llama()
    manager = SlotManager(model, max_rank=2, target_modules=["embed_tokens"])
    manager.load(rank_two())
    before = Snapshot.of(manager, model)
    for attempt in (manager.check, manager.load):
        with pytest.raises(TargetMismatchError, match=r"lora_A must be \(2, 128\) .* \(2, 130\)"):
            attempt(rank_two(vocabulary=130))
    before.assert_unchanged(manager, model)


def test_dora_is_refused_where_max_norm_changes_the_weight_in_every_forward(tmp_path: Path):
    write_dora(tmp_path, Plain(), r=2, target_modules=["embed_tokens"])
    manager = SlotManager(Plain(max_norm=1.0), max_rank=2, target_modules="embed_tokens", dora=True)
    with pytest.raises(LoraSlotsError, match=r"has DoRA at embed_tokens.*max_norm=1\.0"):
        manager.load(tmp_path)


class Shifted(nn.Embedding):
    """Looks up other rows than it is asked for, as BART's positions do."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids + 2)


def test_an_embedding_that_looks_up_other_rows_is_refused_by_name():
    with pytest.raises(TargetMismatchError, match="target module embed_tokens is Shifted; only"):
        SlotManager(Plain(Shifted), max_rank=2, target_modules=["embed_tokens"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_in_sixteen_bits_it_is_as_near_to_the_exact_result_as_peft(dtype, tmp_path: Path):
    for name in ("plain", "a scale that is a float"):
        model = MODELS[name]().to(dtype)
        path = tmp_path / name
        write_adapter(path, copy.deepcopy(model), r=4, target_modules=["embed_tokens"])
        expected = peft_model(copy.deepcopy(model), path, autocast_adapter_dtype=False)
        exact = run(copy.deepcopy(expected).double())
        base = run(model)
        manager = SlotManager(model, max_rank=4, target_modules=["embed_tokens"])
        assert torch.equal(run(model), base)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(run(model), base)
        manager.load(path)
        ours, theirs = ((run(m).double() - exact).abs().max() for m in (model, expected))
        assert run(model).dtype == dtype
        assert ours <= 2 * theirs


@pytest.mark.compile
def test_one_compile_serves_any_adapter_on_embeddings():
    model = Plain()
    base = run(model)
    manager = SlotManager(
        model, max_rank=2, num_slots=2, target_modules=["embed_tokens"], dora=True, token_rows=2
    )
    backend = CountingBackend()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert torch.equal(run(compiled), base)
    with manager.no_recompile():
        for seed in range(3):
            manager.load(rank_two(seed, prefix=""), f"number {seed % 2}")
            assert not torch.allclose(run(compiled), base)
            torch.testing.assert_close(run(compiled), run(model))
        manager.set_adapters(["number 0", "number 1"], [0.5, -1.0])
        torch.testing.assert_close(run(compiled), run(model))
        manager.set_adapters([])
        assert torch.equal(run(compiled), base)
    assert backend.graphs == 1
    # The twin: slots of another size do compile again.
    manager.detach()
    SlotManager(model, max_rank=3, target_modules=["embed_tokens"])
    run(compiled)
    assert backend.graphs == 2


@pytest.mark.compile
@pytest.mark.filterwarnings(INDUCTOR_WARNING)
def test_without_an_active_adapter_inductor_gives_the_compiled_base():
    expected = run(torch.compile(Plain(), fullgraph=True))
    model = Plain()
    manager = SlotManager(model, max_rank=2, target_modules=["embed_tokens"], token_rows=2)
    compiled = torch.compile(model, fullgraph=True)
    assert torch.equal(run(compiled), expected)
    with manager.no_recompile():
        manager.load(rank_two(prefix=""))
        torch.testing.assert_close(run(compiled), run(model))
        manager.unload("default")
        assert torch.equal(run(compiled), expected)
