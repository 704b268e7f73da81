"""Tiny models whose embeddings are plain, tied to the head or scaled, and adapters for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from toys import TOKENS, WEIGHTS, write_adapter, write_folder

from lora_slots import RawAdapter, SlotManager, read_adapter

VOCABULARY = 128
SMALL = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": VOCABULARY, "head_dim": 8,
}  # fmt: skip


def llama(*, tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=tied)).eval()


def gemma() -> nn.Module:
    """Its embedding multiplies its rows by a buffer, and is tied to the head."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(3)
    return Gemma3ForCausalLM(Gemma3TextConfig(**SMALL)).eval()


class Scaled(nn.Embedding):
    """Its rows are multiplied by a float, as BART's are."""

    embed_scale = 4.0

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.embed_scale


class Plain(nn.Module):
    """``embed_tokens`` and nothing else; says nothing of its embeddings."""

    def __init__(self, cls: type[nn.Embedding] = nn.Embedding, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed_tokens = cls(VOCABULARY, 16, **options)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed_tokens(ids)


@torch.no_grad()
def run(model: nn.Module, tokens: Tensor = TOKENS) -> Tensor:
    """What a model makes of tokens: rows of its embedding, or logits."""
    output = model(tokens)
    return output if isinstance(output, Tensor) else output.logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "padding_idx": lambda: Plain(padding_idx=5),
    "a scale that is a float": lambda: Plain(Scaled),
    "llama": llama,
    "llama, tied": lambda: llama(tied=True),
    "gemma, scaled and tied": gemma,
}


def write_tokens(
    path: Path, make: Callable[[], nn.Module], indices: Any, *, seed: int = 0, **config: Any
) -> Path:
    """PEFT's adapter for ``make()`` with random trained rows for the tokens of ``indices``."""
    config = {"target_modules": ["q_proj"], "r": 2, **config}
    write_adapter(path, make(), seed=seed, trainable_token_indices=indices, **config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        key: torch.randn(tensor.shape, generator=generator) if "token_adapter" in key else tensor
        for key, tensor in load_file(path / WEIGHTS).items()
    }
    return write_folder(path, tensors, None)


def token_rows(ids: Any, rows: Tensor, **more: Tensor) -> RawAdapter:
    """Trained rows for ``embed_tokens`` of `Plain`, and a LoRA that does nothing."""
    tensors = {
        "embed_tokens.token_adapter.trainable_tokens_delta": rows,
        "embed_tokens.lora_embedding_A": torch.zeros(1, VOCABULARY),
        "embed_tokens.lora_embedding_B": torch.zeros(16, 1),
    }
    return read_adapter(tensors | more, {"r": 1, "lora_alpha": 1, "trainable_token_indices": ids})


def plain_with_room(**options: Any) -> tuple[Plain, SlotManager]:
    model = Plain(**options)
    return model, SlotManager(
        model, max_rank=2, num_slots=2, target_modules=["embed_tokens"], token_rows=3
    )
