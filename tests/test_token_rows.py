"""Trained rows of embeddings (``trainable_token_indices``): PEFT's results, room by request."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conv_nets import random
from embedding_models import (
    VOCABULARY,
    Scaled,
    gemma,
    llama,
    plain_with_room,
    run,
    token_rows,
    write_tokens,
)
from torch import Tensor, nn
from toys import (
    INDUCTOR_WARNING,
    TOKENS,
    CountingBackend,
    peft_model,
    places,
    slot_buffers,
)

from lora_slots import SlotManager, read_adapter

CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
# Both are tokens of TOKENS.
LIST = [5, 20]
MODELS = {
    "llama": llama,
    "llama, tied": lambda: llama(tied=True),
    "gemma, scaled and tied": gemma,
}


@pytest.mark.parametrize("indices", [LIST, {"embed_tokens": LIST}], ids=["list", "by name"])
@pytest.mark.parametrize("name", MODELS)
def test_trained_rows_are_pefts_at_every_weight(name: str, indices: Any, tmp_path: Path):
    make = MODELS[name]
    write_tokens(tmp_path, make, indices)
    expected = run(peft_model(make(), tmp_path))
    model = make()
    base = run(model)
    manager = SlotManager(model, max_rank=2, token_rows=3)
    assert torch.equal(run(model), base)
    manager.load(tmp_path)
    torch.testing.assert_close(run(model), expected, **CLOSE)
    assert not torch.allclose(expected, base, atol=1e-2)
    embedding = model.get_input_embeddings()
    assert torch.equal(embedding(TOKENS), run_rows(make(), tmp_path))
    manager.set_weight("default", 0.0)
    assert torch.equal(run(model), base)
    manager.unload("default")
    assert torch.equal(run(model), base)
    assert not any(buffer.any() for buffer in slot_buffers(model).values())


def test_rows_in_8_bits_are_loaded_as_they_are():
    model, manager = plain_with_room()
    rows = random(2, 16).to(torch.float8_e4m3fn)
    manager.load(token_rows(LIST, rows))
    assert torch.equal(run(model, torch.tensor(LIST)), rows.float())


def test_a_head_that_is_replaced_leaves_the_embedding_its_room(tmp_path: Path):
    write_tokens(tmp_path, llama, {"embed_tokens": LIST}, modules_to_save=["lm_head"])
    model = llama()
    manager = SlotManager.from_adapters(model, [tmp_path])
    manager.load(tmp_path)
    torch.testing.assert_close(run(model), run(peft_model(llama(), tmp_path)), **CLOSE)


def run_rows(model: nn.Module, path: Path) -> Tensor:
    """What PEFT's embedding gives."""
    with torch.no_grad():
        return peft_model(model, path).get_input_embeddings()(TOKENS)


@pytest.mark.parametrize(
    ("tied", "indices"),
    [
        (False, {"embed_tokens": [5], "lm_head": [20, 0]}),
        (True, {"embed_tokens": [5], "lm_head": [20]}),
        (True, {"embed_tokens": LIST, "lm_head": LIST}),
    ],
    ids=["not tied", "tied, each its own", "tied, the same"],
)
def test_rows_of_the_head_are_pefts(tied: bool, indices: dict[str, list[int]], tmp_path: Path):
    def make() -> nn.Module:
        return llama(tied=tied)

    write_tokens(tmp_path, make, indices)
    model = make()
    manager = SlotManager(model, max_rank=2, token_rows=2)
    report = manager.load(tmp_path)
    assert {"model.embed_tokens", "lm_head"} <= set(report.modules)
    torch.testing.assert_close(run(model), run(peft_model(make(), tmp_path)), **CLOSE)


@pytest.mark.filterwarnings("ignore:The attention mask")
def test_every_tied_embedding_of_an_encoder_and_a_decoder_follows(tmp_path: Path):
    from transformers import T5Config, T5ForConditionalGeneration

    def make() -> nn.Module:
        torch.manual_seed(3)
        config = T5Config(
            d_model=16, d_ff=24, d_kv=8, num_layers=1, num_heads=2, vocab_size=VOCABULARY,
            decoder_start_token_id=0,
        )  # fmt: skip
        return T5ForConditionalGeneration(config).eval()

    def logits(model: nn.Module) -> Tensor:
        with torch.no_grad():
            return model(input_ids=TOKENS, decoder_input_ids=TOKENS[:, :4]).logits

    write_tokens(tmp_path, make, LIST, target_modules=["q"])
    model = make()
    SlotManager(model, max_rank=2, token_rows=2).load(tmp_path)
    torch.testing.assert_close(logits(model), logits(peft_model(make(), tmp_path)), **CLOSE)


def test_two_adapters_add_their_changes_with_their_weights():
    model, manager = plain_with_room()
    base = run(model)
    rows = random(2, 16), random(2, 16, seed=1)
    manager.load(token_rows([5, 20], rows[0]), "a")
    manager.load(token_rows([20, 50], rows[1]), "b", activate=False)
    at = {token: (token == TOKENS) for token in (5, 20, 50)}
    expected = base.clone()
    expected[at[5]], expected[at[20]] = rows[0]
    # A weight of 1 puts the very rows in the place of the model's.
    assert torch.equal(run(model), expected)
    manager.set_adapters(["a", "b"], [0.5, -2.0])
    old = {token: model.embed_tokens.weight[token].detach() for token in at}
    expected[at[5]] = old[5] + 0.5 * (rows[0][0] - old[5])
    expected[at[20]] = old[20] + 0.5 * (rows[0][1] - old[20]) - 2.0 * (rows[1][0] - old[20])
    expected[at[50]] = old[50] - 2.0 * (rows[1][1] - old[50])
    torch.testing.assert_close(run(model), expected)
    manager.unload("a")
    manager.unload("b")
    assert torch.equal(run(model), base)


def test_a_low_rank_update_of_another_adapter_comes_on_top():
    model, manager = plain_with_room(cls=Scaled)
    base, rows = run(model), random(1, 16)
    A, B = random(2, VOCABULARY), random(16, 2, seed=1)
    lora = {"embed_tokens.lora_embedding_A": A, "embed_tokens.lora_embedding_B": B}
    manager.load(token_rows([5], rows), "rows")
    manager.load(read_adapter(lora), "lora")
    manager.set_adapters(["rows", "lora"])
    expected = torch.where((TOKENS == 5)[..., None], 4.0 * rows[0], base)
    expected = expected + 4.0 * (B @ A).t()[TOKENS]
    torch.testing.assert_close(run(model), expected, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_rows_are_exact_in_sixteen_bits_and_heads_as_near_as_pefts(dtype, tmp_path: Path):
    def make() -> nn.Module:
        return gemma().to(dtype)

    write_tokens(tmp_path, make, LIST)
    model, expected = make(), peft_model(make(), tmp_path, autocast_adapter_dtype=False)
    SlotManager(model, max_rank=2, token_rows=2).load(tmp_path)
    assert torch.equal(model.get_input_embeddings()(TOKENS), run_rows(make(), tmp_path))
    exact = run(copy.deepcopy(expected).double())
    ours, theirs = ((run(m).double() - exact).abs().max() for m in (model, expected))
    assert ours <= 2 * theirs


def test_without_lora_targets_of_their_own_embeddings_and_heads_hold_rows_alone():
    model = llama(tied=True)
    SlotManager(model, max_rank=2, num_slots=2, target_modules=["q_proj"], token_rows=3)
    for layer in (model.model.embed_tokens, model.lm_head):
        buffers = dict(layer.lora_slots.named_buffers(recurse=False))
        assert {name: tuple(buffer.shape) for name, buffer in buffers.items()} == {
            "token_ids": (6, 1),
            "token_rows": (6, 16),
        }
    assert buffers["token_ids"].dtype == torch.int64
    model.half()
    assert model.lm_head.lora_slots.token_ids.dtype == torch.int64
    assert not hasattr(model.model.layers[0].mlp.up_proj, "lora_slots")


def test_a_model_that_does_not_name_its_embeddings_gives_room_to_all_of_them():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.kind = nn.Embedding(9, 4), nn.Embedding(3, 4)
            self.head = nn.Linear(4, 9, bias=False)
            self.head.weight = self.token.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.token(ids) + self.kind(ids % 3))

    model = Two()
    SlotManager(model, max_rank=1, target_modules=["head"], token_rows=1)
    assert model.token.lora_slots.token_rows.shape == model.kind.lora_slots.token_rows.shape
    # Like PEFT: nothing says that the head is tied.
    assert model.head.lora_slots.token_rows is None


@pytest.mark.compile
def test_one_compile_serves_any_rows(tmp_path: Path):
    model = llama(tied=True)
    base = run(model)
    for seed, indices in enumerate([LIST, [5], [35, 20, 0]]):
        write_tokens(tmp_path / str(seed), lambda: llama(tied=True), indices, seed=seed)
    manager = SlotManager(model, max_rank=2, num_slots=2, token_rows=3)
    backend = CountingBackend()
    compiled = torch.compile(model, backend=backend)
    torch.testing.assert_close(run(compiled), base)
    graphs, before = backend.graphs, places(model)
    with manager.no_recompile():
        for seed in (0, 1, 2, 1, 0):
            manager.load(tmp_path / str(seed), f"number {seed % 2}")
            torch.testing.assert_close(run(compiled), run(model))
            assert not torch.allclose(run(compiled), base, atol=1e-2)
        manager.set_adapters(["number 0", "number 1"], [0.5, -1.0])
        torch.testing.assert_close(run(compiled), run(model))
        manager.set_adapters([])
        torch.testing.assert_close(run(compiled), base)
    assert backend.graphs == graphs
    assert places(model) == before
    # The twin: room for more rows does compile again.
    manager.detach()
    SlotManager(model, max_rank=2, num_slots=2, token_rows=4)
    run(compiled)
    assert backend.graphs > graphs


@pytest.mark.compile
@pytest.mark.filterwarnings(INDUCTOR_WARNING)
def test_without_active_rows_inductor_gives_the_compiled_head():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
            self.head.weight = self.embed.weight
            self.config = type("Config", (), {"tie_word_embeddings": True})()

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids))

    ids = torch.arange(12)
    with torch.no_grad():
        expected = torch.compile(Tied(), fullgraph=True)(ids)
        model = Tied()
        manager = SlotManager(model, max_rank=1, target_modules=["head"], token_rows=2)
        compiled = torch.compile(model, fullgraph=True)
        assert torch.equal(compiled(ids), expected)
        tensors = {
            "embed.token_adapter.trainable_tokens_delta": random(2, 8),
            "head.lora_A.weight": torch.zeros(1, 8),
            "head.lora_B.weight": torch.zeros(12, 1),
        }
        config = {"r": 1, "lora_alpha": 1, "trainable_token_indices": [3, 0]}
        with manager.no_recompile():
            manager.load(read_adapter(tensors, config))
            whole = Tied()
            whole.embed.weight[[3, 0]] = tensors["embed.token_adapter.trainable_tokens_delta"]
            torch.testing.assert_close(compiled(ids), whole(ids), **CLOSE)
            manager.unload("default")
            assert torch.equal(compiled(ids), expected)


def test_an_adapter_of_trained_rows_alone_can_be_routed():
    model = llama()
    width = model.get_input_embeddings().embedding_dim
    rows = {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta":
            random(2, width)}  # fmt: skip
    config = {"r": 2, "lora_alpha": 4, "trainable_token_indices": LIST}
    manager = SlotManager(model, max_rank=2, num_slots=2, token_rows=2, routing=True)
    base = run(model)
    manager.load(read_adapter(rows, config), "rows")
    alone = run(model)
    manager.route(["rows", None])
    output = run(model)
    torch.testing.assert_close(output[0], alone[0], **CLOSE)
    assert torch.equal(output[1], base[1])
    assert not torch.allclose(alone, base, atol=1e-2)
