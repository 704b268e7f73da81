"""RawAdapter -> pairs of lora_A and lora_B, and the rank and scaling of each. Asks no model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lora_slots.errors import AdapterFileError
from lora_slots.reading import RawAdapter
from lora_slots.reading.keys import split_key
from lora_slots.settings import LoraSettings, check_alpha

# Parts that only belong to an update where its module has one.
_BESIDE = frozenset({"alpha", "lora_bias", "magnitude"})


@dataclass(frozen=True, eq=False)
class Pair:
    """The low-rank update of one module under the file's name for it.

    Attributes:
        module: The module as the file calls it.
        lora_A: ``[r, in]``, or ``[r, in, *kernel]`` for a convolution.
        lora_B: ``[out, r]``, or ``[out, r, 1, ...]`` for a convolution.
        alpha: The value of the file's ``.alpha`` tensor, if it has one.
        dim: What alpha is divided by: the rank under which the file was trained.
        lora_bias: ``[out]``, scaled like ``lora_B``, if there is one.
        magnitude: DoRA's norm of each output's weights, in any shape of one element each, if there
            is one.
    """

    module: str
    lora_A: Tensor
    lora_B: Tensor
    alpha: float | None = None
    dim: int = 0
    lora_bias: Tensor | None = None
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        """The rank that both tensors agree on."""
        return self.lora_A.shape[0]


def pair_up(raw: RawAdapter) -> tuple[list[Pair], dict[str, Tensor]]:
    """Sort the tensors of a file into low-rank updates, and extras.

    Raises:
        AdapterFileError: Half a pair, ranks of A and B that differ, or an alpha that is no number.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    extras: dict[str, Tensor] = {}
    loose: dict[tuple[str, str], tuple[str, Tensor]] = {}
    for key, tensor in raw.tensors.items():
        split = split_key(key)
        if split is None:
            extras[key] = tensor
        elif split[1] in _BESIDE:
            loose[split] = key, tensor
        else:
            module, part = split
            found = modules.setdefault(module, {})
            if part in found:
                raise AdapterFileError(f"{raw.source} has two {part} tensors for {module!r}")
            found[part] = tensor
    # Beside no LoRA tensors, such a name is that of an ordinary parameter.
    for (module, part), (key, tensor) in loose.items():
        if module in modules:
            modules[module][part] = tensor
        else:
            extras[key] = tensor
    return [_pair(module, found, raw) for module, found in modules.items()], extras


def _pair(module: str, found: dict[str, Tensor], raw: RawAdapter) -> Pair:
    _check_pair(module, found, raw)
    alpha = found.get("alpha")
    if raw.config is not None and raw.config.get("use_dora") and "magnitude" not in found:
        raise AdapterFileError(
            f"the config of {raw.source} says use_dora, but there is no lora_magnitude_vector for "
            f"{module}"
        )
    return Pair(
        module=module,
        lora_A=found["lora_A"],
        lora_B=found["lora_B"],
        alpha=None if alpha is None else _alpha(f"{module}.alpha", alpha, raw),
        dim=found["lora_A"].shape[0],
        lora_bias=found.get("lora_bias"),
        magnitude=found.get("magnitude"),
    )


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
        return 1.0 if pair.alpha is None else pair.alpha / pair.dim
    if settings.rank(name) != pair.dim:
        raise AdapterFileError(
            f"the config of {raw.source} gives rank {settings.rank(name)} to {name}, but its "
            f"tensors have rank {pair.dim}"
        )
    return settings.scaling(name, pair.dim, pair.alpha)


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
    for part in ("lora_A", "lora_B"):
        key = f"{module}.{part}.weight"
        tensor = found.get(part)
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
    A, B = found["lora_A"], found["lora_B"]
    if A.shape[0] != B.shape[1] or A.shape[0] == 0:
        raise AdapterFileError(
            f"lora_A and lora_B of {module} in {raw.source} must have the same rank, at least 1, "
            f"got {A.shape[0]} (A is {tuple(A.shape)}) and {B.shape[1]} (B is {tuple(B.shape)})"
        )
