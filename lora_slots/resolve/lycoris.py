"""LoHa and LoKr are low-rank updates too: their factors as ``lora_A`` and ``lora_B``, exactly.

Source: FedPara, arXiv:2108.06098 (LoHa); LyCORIS, arXiv:2309.14859 (LoKr).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_slots.errors import AdapterFileError, UnsupportedAdapterError

# How the parts of each algorithm begin, and the peft_type of its configs.
_ALGORITHMS = {"hada_": "LOHA", "lokr_": "LOKR"}


@dataclass(frozen=True, eq=False)
class Factors:
    """An update ``lora_B @ lora_A``, or ``kron(outer[0] @ outer[1], lora_B @ lora_A)``.

    A Kronecker product is not multiplied out until its rank is known to fit: it may be as large as
    the weight, while its factors are small.

    Attributes:
        lora_A: ``[r, in, *kernel]``, or ``[r, in * kernel]`` where the file holds it so.
        lora_B: ``[out, r]``.
        outer: The left factor of a Kronecker product as ``[out, r]`` and ``[r, in]``; None without.
        dim: What alpha is divided by; 0 where no tensor tells.
    """

    lora_A: Tensor
    lora_B: Tensor
    outer: tuple[Tensor, Tensor] | None
    dim: int


def peft_type_of(module: str, parts: Iterable[str], source: str) -> str:
    """``LORA``, ``LOHA`` or ``LOKR``, by the names of a module's parts.

    Raises:
        AdapterFileError: There are parts of several.
    """
    names = tuple(parts)
    found = _types_in(names)
    if len(found) > 1:
        raise AdapterFileError(
            f"{source} has tensors of {' and '.join(sorted(found))} for {module}: "
            f"{', '.join(sorted(names))}"
        )
    return next(iter(found), "LORA")


# Most modules have the same few parts.
@functools.cache
def _types_in(names: tuple[str, ...]) -> frozenset[str]:
    starts = {**_ALGORITHMS, "lora_A": "LORA", "lora_B": "LORA", "lora_mid": "LORA"}
    return frozenset(starts[start] for start in starts for n in names if n.startswith(start))


@torch.no_grad()
def to_factors(module: str, parts: Mapping[str, Tensor], source: str, *, by_peft: bool) -> Factors:
    """Turn the LoHa or LoKr tensors of one module into low-rank factors; on ``meta``, their shapes.

    LoHa, ``(w1a w1b) * (w2a w2b)``: the rank is that of the file squared, or the smaller side of
    the weight where that is less. LoKr, ``kron(w1, w2)``, each a matrix or a product of two: the
    rank is the product of theirs. A matrix that is not factored is multiplied by an identity on its
    smaller side. Nothing is approximated; 16-bit factors are multiplied in float32.

    What alpha is divided by (``dim``) is the number of rows of ``hada_w1_b``, ``lokr_w1_b`` or
    ``lokr_w2_b``. Where both factors of a LoKr are whole matrices, no tensor tells: LyCORIS then
    sets alpha to its dim when it trains, and loaders ignore the alpha of such files, so that the
    scaling is 1.0. PEFT divides by the rank of its config there as everywhere.

    Args:
        module: The module's name in the file, for messages.
        parts: Its tensors by the names of LyCORIS; others are ignored.
        source: The file, for messages.
        by_peft: Whether PEFT trained it, where a LoKr of an `nn.Conv1d` whose right factor is a
            whole one has its factors swapped.

    Raises:
        AdapterFileError: A tensor is missing, or shapes do not fit each other.
        UnsupportedAdapterError: A Tucker core of ``lokr_w1``, which nothing writes.

    Source: ``lycoris/modules/loha.py`` and ``lokr.py`` of LyCORIS 4.1.3 (``alpha``, ``scale``);
    ``peft/tuners/loha/layer.py`` and ``lokr/layer.py`` of PEFT 0.21.2 (``scaling``).
    """
    own = {part: tensor for part, tensor in parts.items() if part.startswith(tuple(_ALGORITHMS))}
    if any(tensor.is_meta for tensor in own.values()):
        own = {part: tensor.to("meta") for part, tensor in own.items()}
    group = _Group(module, own, source)
    group.check()
    is_loha = any(part.startswith("hada_") for part in own)
    return _loha(group) if is_loha else _lokr(group, by_peft=by_peft)


@torch.no_grad()
def expand(lora_A: Tensor, lora_B: Tensor, outer: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """``lora_A`` and ``lora_B`` of a Kronecker product, multiplied out.

    The rank, the inputs and the outputs are the products of both sides'; kernels are those of one.
    """
    outer_B, outer_A = outer
    axes = max(outer_A.ndim, lora_A.ndim)
    left, right = (A.reshape(*A.shape, *[1] * (axes - A.ndim)) for A in (outer_A, lora_A))
    return _kron(left, right), _kron(outer_B, lora_B.flatten(1))


def _kron(left: Tensor, right: Tensor) -> Tensor:
    """The Kronecker product over the first two axes; `torch.kron` wants contiguous tensors."""
    return (left[:, None, :, None] * right[None, :, None, :]).flatten(0, 1).flatten(1, 2)


def unflatten(
    lora_A: Tensor, outer: tuple[Tensor, Tensor] | None, in_shape: Sequence[int]
) -> Tensor:
    """``lora_A`` with the axes of the kernel, where the file holds them as one with the inputs.

    Args:
        lora_A: ``[r, in * kernel]``, or anything else, which is returned as it is.
        outer: The left factor of a Kronecker product, which has the first of the input axes.
        in_shape: ``(in, *kernel)`` of the layer.
    """
    if lora_A.ndim != 2 or len(in_shape) < 2:
        return lora_A
    inputs = in_shape[0] // (1 if outer is None else outer[1].shape[1])
    if inputs * math.prod(in_shape[1:]) != lora_A.shape[1]:
        return lora_A
    return lora_A.reshape(len(lora_A), inputs, *in_shape[1:])


@dataclass(frozen=True, eq=False)
class _Group:
    """The tensors of one module, and what to say where they do not fit."""

    module: str
    parts: Mapping[str, Tensor]
    source: str

    def check(self) -> None:
        for part, tensor in self.parts.items():
            dense = tensor.layout is torch.strided and tensor.is_floating_point()
            if not dense or tensor.ndim < 2 or not tensor.numel():
                raise AdapterFileError(
                    f"{self.module}.{part} of {self.source} must be a dense matrix of floating "
                    f"point, got {tensor.dtype} of shape {tuple(tensor.shape)}"
                )

    def __contains__(self, part: str) -> bool:
        return part in self.parts

    def require(self, *parts: str) -> None:
        for part in parts:
            if part not in self.parts:
                others = ", ".join(sorted(self.parts))
                raise AdapterFileError(
                    f"{self.source} has no {self.module}.{part}, but {others} of the same module"
                )

    def __getitem__(self, part: str) -> Tensor:
        self.require(part)
        wide = any(tensor.dtype == torch.float64 for tensor in self.parts.values())
        return self.parts[part].to(torch.float64 if wide else torch.float32)

    def product(self, left: str, right: str, core: str) -> tuple[Tensor, Tensor]:
        """B ``[out, r]`` and A ``[r, in, *kernel]`` of a product, a Tucker core folded into A."""
        a, b = self[left], self[right]
        if core in self:
            t = self[core]
            self.need(t.shape[:2] == (a.shape[0], b.shape[0]) and b.ndim == 2, left, right, core)
            a, b = a.t(), torch.einsum("ij...,jn->in...", t, b)
        a = a.flatten(1)
        self.need(a.shape[1] == b.shape[0] > 0, left, right)
        return (a, b) if b.shape[0] <= _rank((a.shape[0], *b.shape[1:])) else _whole(_dense(a, b))

    def need(self, fits: bool, *parts: str) -> None:
        if not fits:
            shapes = ", ".join(f"{part} {tuple(self.parts[part].shape)}" for part in parts)
            raise AdapterFileError(
                f"the tensors of {self.module} in {self.source} do not fit each other: {shapes}"
            )


def _loha(group: _Group) -> Factors:
    if "hada_t1" in group or "hada_t2" in group:
        group.require("hada_t1", "hada_t2")
    B1, A1 = group.product("hada_w1_a", "hada_w1_b", "hada_t1")
    B2, A2 = group.product("hada_w2_a", "hada_w2_b", "hada_t2")
    group.need(len(B1) == len(B2) and A1.shape[1:] == A2.shape[1:], *sorted(group.parts))
    dim = group["hada_w1_b"].shape[0]
    group.need(dim == group["hada_w2_b"].shape[0], "hada_w1_b", "hada_w2_b")
    if A1.shape[0] * A2.shape[0] > _rank((len(B1), *A1.shape[1:])):
        B, A = _whole(_dense(B1, A1) * _dense(B2, A2))
    else:
        B = (B1[:, :, None] * B2[:, None, :]).flatten(1)
        A = (A1[:, None] * A2[None, :]).flatten(0, 1)
    return Factors(A, B, outer=None, dim=dim)


def _lokr(group: _Group, *, by_peft: bool) -> Factors:
    if "lokr_t1" in group:
        raise UnsupportedAdapterError(
            f"{group.source} uses a Tucker core of the left factor of LoKr, as its key "
            f"{group.module}.lokr_t1 shows, which is not applied here"
        )
    w1 = _factor(group, "lokr_w1", "lokr_t1")
    w2 = _factor(group, "lokr_w2", "lokr_t2")
    group.need(w1[1].ndim == 2, *(part for part in group.parts if part.startswith("lokr_w1")))
    bs = [part for part in ("lokr_w1_b", "lokr_w2_b") if part in group]
    dims = {group[part].shape[0] for part in bs}
    group.need(len(dims) < 2, *bs)
    # torch.kron pads the shape of a matrix on its left, so PEFT's order of axes comes out swapped.
    if by_peft and "lokr_w2" in group and group["lokr_w2"].ndim == 3:
        w1, w2 = w2, w1
    return Factors(w2[1], w2[0], outer=w1, dim=dims.pop() if dims else 0)


def _factor(group: _Group, name: str, core: str) -> tuple[Tensor, Tensor]:
    """B and A of one factor of a Kronecker product."""
    given = [part for part in (f"{name}_a", f"{name}_b", core) if part in group]
    if not given:
        return _whole(group[name])
    if name in group:
        raise AdapterFileError(
            f"{group.source} has {name} of {group.module}, which {', '.join(given)} stand for too"
        )
    return group.product(f"{name}_a", f"{name}_b", core)


def _whole(weight: Tensor) -> tuple[Tensor, Tensor]:
    """B ``[out, r]`` and A ``[r, in, *kernel]`` of a matrix: itself, and an identity."""
    inputs = weight[0].numel()
    if weight.shape[0] <= inputs:
        return torch.eye(weight.shape[0], dtype=weight.dtype, device=weight.device), weight
    identity = torch.eye(inputs, dtype=weight.dtype, device=weight.device)
    return weight.flatten(1), identity.reshape(inputs, *weight.shape[1:])


def _dense(B: Tensor, A: Tensor) -> Tensor:
    return (B @ A.flatten(1)).reshape(len(B), *A.shape[1:])


def _rank(shape: Sequence[int]) -> int:
    """The largest rank of a matrix ``[out, in * kernel]``."""
    return min(shape[0], math.prod(shape[1:]))
