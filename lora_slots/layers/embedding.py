"""Slots for `nn.Embedding`: the row of a token is ``W[x] + scaling * A[:, x]^T B``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lora_slots.errors import UnsupportedAdapterError
from lora_slots.layers import watch
from lora_slots.layers.base import SlotSizes
from lora_slots.layers.kind import LayerKind, runs_as
from lora_slots.layers.linear import add_rows, with_bias
from lora_slots.layers.lora import LoraSlots
from lora_slots.layers.quantized import dequantized
from lora_slots.layers.routes import row_factors
from lora_slots.layers.tokens import replace_rows


class EmbeddingSlots(LoraSlots):
    """Adds ``sum over rows of weight * scaling * A[row, x] B[row]`` to the rows of an embedding.

    Slots may also hold trained rows, which stand in the place of the embedding's own.
    """

    def forward(self, x: Tensor, y: Tensor, base: nn.Embedding) -> Tensor:
        """Return ``y`` plus the share of every row that an active adapter fills.

        Args:
            x: ``[...]``, the ids of tokens.
            y: ``[..., dim]``, what the base layer returned; not changed.
            base: The base layer. What it multiplies its rows by (``embed_scale``) multiplies those
                of adapters, and its ``max_norm`` bounds ``A[:, x]`` as PEFT lets it.

        Returns:
            ``[..., dim]`` in the dtype of ``y``; equal to ``y`` when none is active.
        """
        if not torch.compiler.is_compiling():
            watch.notify(self)
        if self.idle:
            return y
        scale = _scale(base, y.dtype)
        if not y.is_meta and torch.is_autocast_enabled(y.device.type):
            with torch.autocast(y.device.type, enabled=False):
                return self._adapted(x, y, base, scale)
        return self._adapted(x, y, base, scale)

    def _adapted(self, x: Tensor, y: Tensor, base: nn.Embedding, scale: Tensor | float) -> Tensor:
        total = y
        rows = row_factors(self, y)
        if not self.low_rank:
            total = with_bias(self, y, rows)
        else:
            h = F.embedding(x, self.lora_A.t())
            if base.max_norm is not None:
                h = self._bounded_by_slot(h, base)
            if rows is not None:
                h = rows.columns_of(h)
            total = add_rows(self, y, h, base, rows, self.by_row() * scale)
        if self.token_rows is not None:
            total = replace_rows(
                self, x, y, total, lambda trained: _bounded(trained, base) * scale, rows
            )
        return total

    def _bounded_by_slot(self, h: Tensor, base: nn.Embedding) -> Tensor:
        """``h [..., R]`` with the share of each slot scaled down to ``base.max_norm``."""
        owners = self.mix.owners_of(self.lora_B)
        slots = torch.arange(self.num_slots, device=h.device).unsqueeze(1)
        shares = torch.where(owners == slots, h.unsqueeze(-2), 0)
        return _bounded(shares, base).sum(-2)


def _scale(base: nn.Embedding, dtype: torch.dtype) -> Tensor | float:
    """What some models multiply the rows of their embedding by."""
    scale: Tensor | float = getattr(base, "embed_scale", 1.0)
    return scale.to(dtype) if isinstance(scale, Tensor) else scale


def _bounded(rows: Tensor, base: nn.Embedding) -> Tensor:
    """``rows [..., width]`` scaled down to ``base.max_norm``, as `torch.embedding_renorm_` does."""
    if base.max_norm is None:
        return rows
    norm = torch.linalg.vector_norm(rows, base.norm_type, dim=-1, keepdim=True)
    return torch.where(norm > base.max_norm, rows * (base.max_norm / (norm + 1e-7)), rows)


def _is_embedding(module: nn.Module) -> bool:
    if not isinstance(module, nn.Embedding):
        return False
    scale = getattr(module, "embed_scale", None)
    if isinstance(scale, Tensor):
        return scale.numel() == 1
    return isinstance(scale, int | float) or runs_as(module, nn.Embedding)


def _shape(module: nn.Embedding) -> tuple[tuple[int, ...], int]:
    return (module.num_embeddings,), module.embedding_dim


def _make(module: nn.Embedding, sizes: SlotSizes) -> EmbeddingSlots:
    rows, width = module.num_embeddings, module.embedding_dim
    return EmbeddingSlots(rows, width, sizes, token_width=width)


def _weight(module: Any) -> Tensor:
    if module.max_norm is not None:
        raise UnsupportedAdapterError(
            f"an embedding with max_norm={module.max_norm} changes its weight whenever it runs, so "
            "that no norm of it is known"
        )
    return dequantized(module).t()


EMBEDDING = LayerKind(
    name="Embedding", matches=_is_embedding, shape=_shape, make=_make, weight=_weight
)
