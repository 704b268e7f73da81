"""Routing in every kind of layer and slot, and the layers that cannot tell rows apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conv_nets import NET_TARGETS, net, net_adapter, one, pair, random
from dora_files import dora_tensors
from embedding_models import Plain, llama, token_rows
from routed import routed, routed_blocks, tokens
from torch import Tensor, nn
from toys import block_adapter, blocks, pairs, tensors_of

from lora_slots import ArgumentError, RawAdapter, SlotManager, TargetMismatchError, read_adapter

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
BLOCK_LAYERS = {"0.up": (16, 32), "0.down": (32, 16), "1.up": (16, 32), "1.down": (32, 16)}


def block_dora(rank: int, seed: int) -> RawAdapter:
    tensors: dict[str, Tensor] = {}
    for number, (name, (inputs, outputs)) in enumerate(BLOCK_LAYERS.items()):
        tensors |= dora_tensors(
            rank, modules=(name,), seed=10 * seed + number, inputs=inputs, outputs=outputs
        )
    return read_adapter(tensors, {"r": rank, "lora_alpha": 1, "use_dora": True})


def block_bias(rank: int, seed: int) -> RawAdapter:
    tensors: dict[str, Tensor] = {}
    for number, (name, (inputs, outputs)) in enumerate(BLOCK_LAYERS.items()):
        both = pairs({name: rank}, inputs=inputs, outputs=outputs, seed=10 * seed + number)
        tensors |= tensors_of(both)
        bias = random(outputs, seed=90 * seed + number)
        tensors[f"base_model.model.{name}.lora_B.bias"] = bias
    return read_adapter(tensors, {"r": rank, "lora_alpha": 1, "lora_bias": True})


def test_dora_and_bias_by_row():
    adapters = {
        "dora": block_dora(2, 1), "other dora": block_dora(3, 2), "bias": block_bias(2, 3),
        "plain": block_adapter(2, alpha=1, seed=4),
    }  # fmt: skip
    both = routed(blocks, adapters, dora=True, bias=True)
    rows = [
        "dora", None, "bias", "plain", {"dora": 0.4, "other dora": 0.8}, {"bias": -0.5, "dora": 1},
    ]  # fmt: skip
    both.manager.route(rows)
    both.assert_rows(rows, tokens(6), atol=1e-4)
    both.assert_rows(rows, tokens(6)[:, 0], atol=1e-4)
    both.manager.route(["other dora", None], expand="tile")
    both.assert_rows(["other dora", None] * 2, tokens(4), atol=1e-4)


def test_a_net_of_convolutions_and_an_embedding():
    adapters = {name: net_adapter(2 + n, seed=n) for n, name in enumerate("ab")}
    both = routed(net, adapters, target_modules=NET_TARGETS)
    rows = ["a", None, "b", {"a": 0.3, "b": 0.6}]
    both.manager.route(rows)
    inputs = random(4, 4, 8, 8, seed=5), torch.tensor([3, 7, 1, 3])
    both.assert_rows(rows, *inputs)
    both.manager.route(["a", "b"], expand="interleave")
    both.assert_rows(["a", "a", "b", "b"], *inputs)


@pytest.mark.parametrize("layer", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_convolutions_with_dora_and_bias(layer: type[nn.Module]):
    dims = int(layer.__name__[4])

    def adapter(seed: int) -> RawAdapter:
        A, B = random(2, 4, *[3] * dims, seed=seed), random(6, 2, *[1] * dims, seed=seed + 1)
        magnitude = 0.5 + random(6, *[1] * dims, seed=seed + 2).abs()
        return read_adapter(
            {
                "base_model.model.layer.lora_A.weight": A,
                "base_model.model.layer.lora_B.weight": B,
                "base_model.model.layer.lora_magnitude_vector": magnitude.view(1, 6, *[1] * dims),
            },
            {"r": 2, "lora_alpha": 3, "use_dora": True},
        )

    both = routed(
        lambda: one(layer, 4, 6, 3, padding=1), {"a": adapter(1), "b": adapter(7)},
        target_modules=["layer"], dora=True, bias=True,
    )  # fmt: skip
    rows = ["a", None, {"a": 0.5, "b": 0.5}]
    both.manager.route(rows)
    both.assert_rows(rows, random(3, 4, *[5] * dims), atol=1e-4)


def test_a_convolution_without_a_batch_is_refused():
    model = one(nn.Conv2d, 4, 4, 1)
    manager = SlotManager(model, max_rank=2, target_modules=["layer"], routing=True)
    manager.load(pair(random(2, 4, 1, 1), random(4, 2, 1, 1, seed=1)))
    manager.route(["default"] * 4)
    with pytest.raises(ArgumentError, match="layer was given no batch, so that it has no rows"):
        model(random(4, 5, 5))


def test_trained_rows_of_an_embedding():
    adapters = {
        "a": token_rows([5, 20], random(2, 16, seed=1)),
        "b": token_rows([5, 7], random(2, 16, seed=2)),
    }
    both = routed(Plain, adapters, target_modules=["embed_tokens"], token_rows=3)
    rows = ["a", None, "b", {"a": 0.25, "b": 0.5}]
    both.manager.route(rows)
    both.assert_rows(rows, torch.tensor([[5, 20, 7, 1]] * 4))


def test_trained_rows_of_a_tied_head():
    rows = ["a", None, "b"]

    def adapter(seed: int) -> RawAdapter:
        tensors = {
            "model.embed_tokens.token_adapter.trainable_tokens_delta": random(2, 16, seed=seed),
            "model.layers.0.self_attn.q_proj.lora_A.weight": random(2, 16, seed=seed + 1),
            "model.layers.0.self_attn.q_proj.lora_B.weight": random(16, 2, seed=seed + 2),
        }
        config = {"r": 2, "lora_alpha": 2, "trainable_token_indices": [5, 20]}
        return read_adapter(tensors, config)

    both = routed(lambda: Logits(llama(tied=True)), {}, token_rows=3, num_slots=2)
    for manager in (both.manager, both.by):
        for n, name in enumerate("ab"):
            manager.load(prefixed(adapter(10 * n)), name)
    both.manager.route(rows)
    both.assert_rows(rows, torch.tensor([[5, 20, 7, 1]] * 3))


class Logits(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.get_output_embeddings()

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids).logits


def prefixed(raw: RawAdapter) -> RawAdapter:
    tensors = {f"inner.{key}": tensor for key, tensor in raw.tensors.items()}
    return read_adapter(tensors, {"r": 2, "lora_alpha": 2, "trainable_token_indices": [5, 20]})


@DTYPES
def test_low_precision(dtype: torch.dtype):
    both = routed_blocks(alpha=0.5, dtype=dtype)
    both.model.to(dtype)
    both.twin.to(dtype)
    rows = ["a", None, {"b": 0.5}, "c"]
    both.manager.route(rows)
    for number, row in enumerate(rows):
        y = both.model(tokens(4).to(dtype))
        both.by.set_adapters([] if row is None else list(row) if isinstance(row, dict) else row)
        if isinstance(row, dict):
            both.by.set_weight("b", 0.5)
        alone = both.twin(tokens(4).to(dtype))[number]
        torch.testing.assert_close(y[number], alone, rtol=0.02, atol=0.02)


def test_a_large_scaling_of_fp16_is_finite():
    adapter = read_adapter(
        tensors_of({"layer": (torch.full((1, 8), 4.0), torch.full((8, 1), 1e-3))}, ""),
        {"r": 1, "lora_alpha": 1536},
    )
    both = routed(lambda: one(nn.Linear, 8, 8), {"a": adapter}, dtype=torch.float16)
    both.model.half()
    both.twin.half()
    both.manager.route(["a", None])
    x = torch.full((2, 8), 6.0).half()
    y = both.model(x)
    both.by.set_adapters("a")
    assert y.isfinite().all()
    torch.testing.assert_close(y[0], both.twin(x)[0], rtol=0.01, atol=0.01)


def test_autocast():
    both = routed_blocks()
    both.manager.route(["a", None])
    with torch.autocast("cpu", torch.bfloat16):
        y = both.model(tokens(2))
        both.by.set_adapters("a")
        torch.testing.assert_close(y[0], both.twin(tokens(2))[0], rtol=0.02, atol=0.02)
        both.by.set_adapters([])
        assert torch.equal(y[1], both.twin(tokens(2))[1])


class Mixture(nn.Module):
    """Two experts that are given the tokens that chose them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))


class ExpertsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(8, 8)
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.randn(2, 8, 8))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position_embeddings = nn.Embedding(8, 8)


class XLNetModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ff = nn.Linear(8, 8)


def attention() -> nn.Module:
    model = nn.Module()
    model.attn = nn.MultiheadAttention(8, 2, batch_first=True)
    return model


def sequence_first() -> nn.Module:
    return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16))


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "experts": (Mixture, {}, r"experts\.0 sees the tokens that were gathered for an expert"),
    "parameter of experts": (
        ExpertsParameter, {"target_modules": ["experts.gate_up_proj"]},
        r"experts\.gate_up_proj sees the tokens that were gathered for an expert",
    ),
    "attention": (
        attention, {"target_modules": ["attn"]},
        r"attn\.in_proj_weight is a parameter that all rows share",
    ),
    "whole modules": (
        blocks, {"full_modules": ["1.down"], "target_modules": ["up"]},
        r"1\.down\.weight is replaced as a whole",
    ),
    "positions": (
        Positions, {"target_modules": ["position_embeddings"]},
        "position_embeddings is an embedding of positions",
    ),
    "sequence first": (
        sequence_first, {"target_modules": ["linear1"]},
        r"0\.linear1 may see sequences first, as 0\.self_attn does \(batch_first=False\)",
    ),
    "sequence first by class": (XLNetModel, {}, "ff sees sequences first, since XLNetModel"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_tell_rows_apart_is_refused_by_name(name: str):
    make, options, message = REFUSED[name]
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        model = make()
        before = {id(m): type(m) for m in model.modules()}
        with pytest.raises(TargetMismatchError, match=message):
            SlotManager(model, max_rank=2, routing=True, **options)
        assert {id(m): type(m) for m in model.modules()} == before
        # The twin: the same without routing.
        SlotManager(model, max_rank=2, **options)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_what_is_left_out_is_no_obstacle():
    model = Mixture()
    SlotManager(model, max_rank=2, routing=True, target_modules=["gate"])
