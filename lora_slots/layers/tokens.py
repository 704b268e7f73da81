"""Trained rows of an embedding, in the place of its own, and their outputs where a head is tied.

Source: ``peft.tuners.trainable_tokens``: whole rows, not deltas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from lora_slots.layers.lora import LoraSlots
from lora_slots.layers.routes import RowFactors, along


def replace_rows(
    slots: LoraSlots,
    x: Tensor,
    y: Tensor,
    total: Tensor,
    finish: Callable[[Tensor], Tensor],
    factors: RowFactors | None = None,
) -> Tensor:
    """Put the trained rows of all slots in the place of an embedding's.

    Each slot adds ``weight * (row - y)``; exact for a weight of 1, and ``total`` where no slot has
    a row.

    Args:
        slots: The slots.
        x: ``[...]``, ids of tokens.
        y: ``[..., dim]``, what the embedding made of them.
        total: ``[..., dim]``, ``y`` plus what the slots add otherwise.
        finish: What the embedding does to its rows, ``[..., dim]``, after looking them up.
        factors: What tells the rows of a batch apart.
    """
    assert slots.token_ids is not None
    assert slots.token_rows is not None
    kept: Tensor | float = 1.0
    own: Tensor | float = 0.0
    replaced = torch.zeros_like(x, dtype=torch.bool).unsqueeze(-1)
    held = slots.token_ids.chunk(slots.num_slots), slots.token_rows.chunk(slots.num_slots)
    weights: Iterable[Tensor] = slots.mix.of_slots(x.device)[0]
    if factors is not None:
        weights = [along(own, y.ndim) for own in factors.weights.unsqueeze(-1).unbind(1)]
    for ids, rows, weight in zip(*held, weights, strict=True):
        hits = x.unsqueeze(-1) + 1 == ids.flatten()
        hit = hits.any(-1, keepdim=True)
        row = finish(F.embedding(hits.int().argmax(-1), rows).to(y.dtype))
        share = torch.where(hit, weight, 0)
        kept, own = kept - share, own + share * row
        replaced = replaced | (share != 0)
    # What a row replaces is y; what is added otherwise stays.
    new = (total - y) + (kept * y + own)
    return torch.where(replaced, new, total).to(total.dtype)


def replace_outputs(
    slots: LoraSlots,
    x: Tensor,
    y: Tensor,
    total: Tensor,
    bias: Tensor | None,
    factors: RowFactors | None = None,
) -> Tensor:
    """Make the outputs of a linear layer those of a weight with the trained rows of all slots.

    Args:
        slots: The slots.
        x: ``[..., in]``, what the layer was given.
        y: ``[..., out]``, what it returned.
        total: ``[..., out]``, ``y`` plus what the slots add otherwise.
        bias: The layer's bias, ``[out]``.
        factors: What tells the rows of a batch apart.
    """
    assert slots.token_ids is not None
    assert slots.token_rows is not None
    ids = slots.token_ids.flatten()
    each = len(ids) // slots.num_slots
    if factors is not None:
        weights = along(factors.weights.repeat_interleave(each, dim=1), y.ndim)
    else:
        weights = slots.mix.of_slots(ids.device)[0].repeat_interleave(each)
    weights = torch.where(ids != 0, weights, 0)
    outputs = (ids - 1).clamp(min=0)
    row = F.linear(x.to(slots.token_rows.dtype), slots.token_rows).float()
    if bias is not None:
        row = row + bias[outputs]
    change = weights * (row - y.index_select(-1, outputs))
    change = torch.where(weights != 0, change, 0)
    return total.index_add(-1, outputs, change.to(total.dtype))
