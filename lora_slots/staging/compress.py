"""Adapter -> Adapter of a smaller rank: the nearest one, and how near it is."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from lora_slots.errors import AdapterFileError, ArgumentError
from lora_slots.layers.low_rank import expert_sizes
from lora_slots.layout import Layout, Target
from lora_slots.resolve.resolving import Adapter, ModuleUpdate


def rank_limit(compress_to: int | Literal["max_rank"] | None, max_rank: int) -> int | None:
    """The rank that ``compress_to`` stands for; None for none.

    Raises:
        ArgumentError: It is neither ``"max_rank"`` nor a rank that slots can hold.
    """
    if compress_to is None:
        return None
    if isinstance(compress_to, str) and compress_to == "max_rank":
        return max_rank
    whole = isinstance(compress_to, int) and not isinstance(compress_to, bool)
    if not (whole and 1 <= compress_to <= max_rank):
        raise ArgumentError(
            f'compress_to must be "max_rank" or a whole number from 1 to max_rank, which is '
            f"{max_rank}, got {compress_to!r}"
        )
    return compress_to


def compress(adapter: Adapter, rank: int, layout: Layout) -> Adapter:
    """Truncate every module whose rank is above ``rank``; the others stay the very same.

    Scalings and DoRA's magnitudes stay as they are.

    Raises:
        AdapterFileError: What would be truncated has values that are not finite.
    """
    modules, errors = [], {}
    for module in adapter.modules:
        if module.rank > rank:
            experts = _experts(layout.targets[module.target])
            module, errors[module.path] = _truncated(module, rank, experts, adapter.source)
        modules.append(module)
    return replace(adapter, modules=tuple(modules), compressed=errors)


def _experts(target: Target) -> int:
    """How many matrices the target is, each of which has its own update in the same rows."""
    return expert_sizes(target.module, target.parameter)[0] if target.parameter else 1


def _truncated(
    module: ModuleUpdate, rank: int, experts: int, source: str
) -> tuple[ModuleUpdate, float]:
    """The update of ``rank`` that is nearest to a module's, and its relative error."""
    A, B = module.lora_A, module.lora_B
    assert A is not None
    assert B is not None
    outer = module.outer or (torch.ones(1, 1), torch.ones(1, 1))
    for tensor in (A, B, *outer):
        _check_values(tensor, module, source)
    each = [
        _nearest(own_A, own_B, outer, rank)
        for own_A, own_B in zip(A.chunk(experts, dim=1), B.chunk(experts), strict=True)
    ]
    lora_A = torch.cat([own_A for own_A, _, _ in each], dim=1)
    lora_B = torch.cat([own_B for _, own_B, _ in each])
    squares = torch.stack([values.square() for _, _, values in each])
    total, lost = float(squares.sum()), float(squares[:, rank:].sum())
    error = math.sqrt(lost / total) if total else 0.0
    return replace(module, lora_A=lora_A, lora_B=lora_B, outer=None), error


def _nearest(
    A: Tensor, B: Tensor, outer: tuple[Tensor, Tensor], rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A and B of ``rank`` nearest in the Frobenius norm, in float64, and all singular values.

    The whole of B A is never made. The singular values and vectors of a Kronecker product are the
    products of those of its factors, so that large factors cost no more than small ones.

    Source: Eckart and Young, 1936; Van Loan, "The ubiquitous Kronecker product", 2000, section 1.
    """
    outer_B, outer_A = outer
    outer_U, outer_S, outer_V = _svd(outer_B, outer_A)
    inner_U, inner_S, inner_V = _svd(B, A)
    values, order = torch.outer(outer_S, inner_S).flatten().sort(descending=True, stable=True)
    i, j = order[:rank] // len(inner_S), order[:rank] % len(inner_S)
    # Half of each value to either side keeps both within the range of 16-bit buffers.
    half = values[:rank].sqrt()
    lora_B = (outer_U[:, None, i] * inner_U[None, :, j]).flatten(0, 1) * half
    axes = max(outer_A.ndim, A.ndim)
    left, right = _shaped(outer_V[i] * half[:, None], outer_A, axes), _shaped(inner_V[j], A, axes)
    return (left.unsqueeze(2) * right.unsqueeze(1)).flatten(1, 2), lora_B, values


def _svd(B: Tensor, A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U ``[out, q]``, S ``[q]`` and V ``[q, in * kernel]`` of B A, from a matrix of its rank."""
    B, A = (tensor.detach().to("cpu", torch.float64).flatten(1) for tensor in (B, A))
    left, left_R = torch.linalg.qr(B)
    right, right_R = torch.linalg.qr(A.t())
    U, S, V = torch.linalg.svd(left_R @ right_R.t(), full_matrices=False)
    return left @ U, S, V @ right.t()


def _shaped(rows: Tensor, A: Tensor, axes: int) -> Tensor:
    """Flat rows with the axes of A but for its first, and ones up to ``axes``."""
    return rows.reshape(len(rows), *A.shape[1:], *[1] * (axes - A.ndim))


def _check_values(tensor: Tensor, module: ModuleUpdate, source: str) -> None:
    bad = int((~torch.isfinite(tensor.float())).sum())
    if bad:
        raise AdapterFileError(
            f"a LoRA tensor of {module.path} in adapter {source} has {bad} NaN or infinite values "
            f"of {tensor.numel()}"
        )
