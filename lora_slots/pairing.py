"""RawAdapter -> pairs of lora_A and lora_B, and the rank and scaling of each. Asks no model."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

from lora_slots.errors import AdapterFileError
from lora_slots.reading import RawAdapter
from lora_slots.settings import LoraSettings, check_alpha

_LORA_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight")


@dataclass(frozen=True, eq=False)
class Pair:
    """The two tensors of one module under the file's name for it.

    Attributes:
        module: The module as the file calls it.
        lora_A: ``[r, in]``.
        lora_B: ``[out, r]``.
        alpha: The value of the file's ``.alpha`` tensor, if it has one.
    """

    module: str
    lora_A: Tensor
    lora_B: Tensor
    alpha: float | None = None

    @property
    def rank(self) -> int:
        """The rank that both tensors agree on."""
        return self.lora_A.shape[0]


def pair_up(raw: RawAdapter) -> tuple[list[Pair], dict[str, Tensor]]:
    """Sort the tensors of a file into pairs of A and B, and extras.

    Raises:
        AdapterFileError: Half a pair, ranks of A and B that differ, or an alpha that is no number.
    """
    sides: dict[str, dict[str, Tensor]] = {}
    extras: dict[str, Tensor] = {}
    for key, tensor in raw.tensors.items():
        match = _LORA_KEY.fullmatch(key)
        if match is not None:
            found = sides.setdefault(match["module"], {})
            if match["side"] in found:
                raise AdapterFileError(
                    f"{raw.source} has two lora_{match['side']} tensors for {match['module']!r}"
                )
            found[match["side"]] = tensor
        else:
            extras[key] = tensor
    # An ``.alpha`` beside no LoRA tensors is a parameter of that name.
    alphas = {
        module: _alpha(f"{module}.alpha", extras.pop(f"{module}.alpha"), raw)
        for module in sides
        if f"{module}.alpha" in extras
    }
    for module, found in sides.items():
        _check_pair(module, found, raw)
    return [
        Pair(module, found["A"], found["B"], alphas.get(module)) for module, found in sides.items()
    ], extras


def settle_scaling(pair: Pair, name: str, settings: LoraSettings | None, raw: RawAdapter) -> float:
    """The scaling of one module: 1.0 where the file has no alpha anywhere.

    Args:
        pair: The module's tensors.
        name: The module's path, without ``base_model.model.``; the config's patterns speak of it.
        settings: The adapter's config, if it has one.
        raw: The adapter, for messages.

    Raises:
        AdapterFileError: The config gives the module another rank than its tensors have.
    """
    if settings is None:
        return 1.0 if pair.alpha is None else pair.alpha / pair.rank
    if settings.rank(name) != pair.rank:
        raise AdapterFileError(
            f"the config of {raw.source} gives rank {settings.rank(name)} to {name}, but its "
            f"tensors have rank {pair.rank}"
        )
    return settings.scaling(name, pair.rank, pair.alpha)


def _alpha(key: str, tensor: Tensor, raw: RawAdapter) -> float:
    if tensor.numel() != 1 or tensor.is_complex():
        raise AdapterFileError(
            f"{key} of {raw.source} must hold one real number, got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)}"
        )
    alpha = float(tensor)
    check_alpha(alpha, key, raw.source)
    return alpha


def _check_pair(module: str, found: dict[str, Tensor], raw: RawAdapter) -> None:
    for side in "AB":
        key = f"{module}.lora_{side}.weight"
        tensor = found.get(side)
        if tensor is None:
            raise AdapterFileError(f"{raw.source} has no {key}, but its other half")
        if not tensor.is_floating_point():
            raise AdapterFileError(
                f"{key} of {raw.source} must be floating point, got {tensor.dtype}"
            )
        if tensor.ndim < 2:
            raise AdapterFileError(
                f"{key} of {raw.source} must have at least two dimensions, got shape "
                f"{tuple(tensor.shape)}"
            )
    A, B = found["A"], found["B"]
    if A.shape[0] != B.shape[1] or A.shape[0] == 0:
        raise AdapterFileError(
            f"lora_A and lora_B of {module} in {raw.source} must have the same rank, at least 1, "
            f"got {A.shape[0]} (A is {tuple(A.shape)}) and {B.shape[1]} (B is {tuple(B.shape)})"
        )
