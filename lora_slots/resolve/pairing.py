"""RawAdapter -> pairs of lora_A and lora_B, and the rank and scaling of each. Asks no model."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

from torch import Tensor

from lora_slots.errors import AdapterFileError, UnsupportedAdapterError
from lora_slots.reading import RawAdapter
from lora_slots.reading.keys import split_key
from lora_slots.resolve.lycoris import Factors, expand, peft_type_of, to_factors
from lora_slots.resolve.settings import LoraSettings, check_alpha, config_type
from lora_slots.resolve.tucker import fold

# Parts that only belong to an update where its module has one.
_BESIDE = frozenset({"alpha", "lora_bias", "magnitude", "dora_scale"})
# Parts that are no low-rank updates.
_WHOLE = frozenset({"trainable_tokens", "diff", "diff_b", "w_norm", "b_norm"})


@dataclass(frozen=True, eq=False)
class Pair:
    """The low-rank update of one module under the file's name for it.

    Attributes:
        module: The module as the file calls it.
        lora_A: ``[r, in]``, or ``[r, in, *kernel]`` for a convolution.
        lora_B: ``[out, r]``, or ``[out, r, 1, ...]`` for a convolution.
        alpha: The value of the file's ``.alpha`` tensor, if it has one.
        dim: What alpha is divided by: the rank under which the file was trained; 0 where no tensor
            tells, and alpha only means something in a config.
        lora_bias: ``[out]``, scaled like ``lora_B``, if there is one.
        magnitude: DoRA's norm of each output's weights, in any shape of one element each, if there
            is one.
        outer: The left factor of a Kronecker product as ``[out, r]`` and ``[r, in]``, whose right
            one is ``lora_B @ lora_A``, if the update is one.
        configured_as: The name by which the patterns of a config mean it; empty: the module's.
    """

    module: str
    lora_A: Tensor
    lora_B: Tensor
    alpha: float | None = None
    dim: int = 0
    lora_bias: Tensor | None = None
    magnitude: Tensor | None = None
    outer: tuple[Tensor, Tensor] | None = None
    configured_as: str = ""

    @property
    def rank(self) -> int:
        """The rank that both tensors agree on; of a Kronecker product, the product of both."""
        return self.lora_A.shape[0] * (1 if self.outer is None else self.outer[1].shape[0])

    @property
    def outputs(self) -> int:
        """The number of outputs; of a Kronecker product, the product of both factors'."""
        return self.lora_B.shape[0] * (1 if self.outer is None else self.outer[0].shape[0])

    def expanded(self) -> Pair:
        """The same update, a Kronecker product multiplied out."""
        if self.outer is None:
            return self
        A, B = expand(self.lora_A, self.lora_B, self.outer)
        return replace(self, lora_A=A, lora_B=B, outer=None)


def pair_up(raw: RawAdapter) -> tuple[list[Pair], dict[str, Tensor]]:
    """Sort the tensors of a file into low-rank updates, and extras.

    Raises:
        AdapterFileError: Half a pair, ranks of A and B that differ, or an alpha that is no number.
        UnsupportedAdapterError: A part that is not applied here.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    extras: dict[str, Tensor] = {}
    loose: dict[tuple[str, str], tuple[str, Tensor]] = {}
    for key, tensor in raw.tensors.items():
        split = split_key(key)
        if split is None or split[1] in _WHOLE:
            extras[key] = tensor
            continue
        if split[1] in _BESIDE:
            if split in loose:
                raise AdapterFileError(f"{raw.source} has two {split[1]} tensors for {split[0]!r}")
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
    pairs = [_pair(module, found, raw) for module, found in modules.items()]
    return _with_alphas(pairs, raw), extras


def _with_alphas(pairs: list[Pair], raw: RawAdapter) -> list[Pair]:
    """The pairs, where an alpha of 0 means the rank, as to the trainers that write such tensors."""
    zero = [pair.module for pair in pairs if pair.alpha == 0]
    if zero:
        warnings.warn(
            f"{raw.source} has an alpha of 0 for {len(zero)} modules ({zero[0]}, ...), which is "
            "taken to mean their rank, so that their scaling is 1, as its trainer takes it",
            stacklevel=2,
        )
    return [replace(p, alpha=float(p.dim)) if p.alpha == 0 else p for p in pairs]


def _pair(module: str, found: dict[str, Tensor], raw: RawAdapter) -> Pair:
    found = _with_magnitude(module, found, raw)
    factors = _factors(module, found, raw)
    alpha = found.get("alpha")
    config = raw.config_of(module)
    if config is not None and config.get("use_dora") and "magnitude" not in found:
        raise AdapterFileError(
            f"the config of {raw.source} says use_dora, but there is no lora_magnitude_vector for "
            f"{module}"
        )
    if config is not None and config.get("lora_bias") is True and "lora_bias" not in found:
        raise AdapterFileError(
            f"the config of {raw.source} says lora_bias, but there is no lora_B.bias for {module}"
        )
    for part in ("lora_bias", "magnitude"):
        if part in found and not found[part].is_floating_point():
            raise AdapterFileError(
                f"{part} of {module} in {raw.source} must be floating point, got "
                f"{found[part].dtype}"
            )
    return Pair(
        module=module,
        lora_A=factors.lora_A,
        lora_B=factors.lora_B,
        alpha=None if alpha is None else _alpha(f"{module}.alpha", alpha, raw),
        dim=factors.dim,
        lora_bias=found.get("lora_bias"),
        magnitude=found.get("magnitude"),
        outer=factors.outer,
    )


def _with_magnitude(module: str, found: dict[str, Tensor], raw: RawAdapter) -> dict[str, Tensor]:
    """The parts, kohya's name for the magnitude replaced by PEFT's.

    Its shape is ``[out, 1, ...]`` where the norm was taken for each output, as in PEFT, and
    ``[1, in, ...]`` where LyCORIS took it for each input.
    """
    scale = found.get("dora_scale")
    if scale is None:
        return found
    if "magnitude" in found:
        raise AdapterFileError(f"{raw.source} has two magnitudes for {module!r}")
    if scale.ndim == 0 or scale.shape[0] != scale.numel():
        raise UnsupportedAdapterError(
            f"{module}.dora_scale of {raw.source} has the shape {tuple(scale.shape)}, one value "
            "for each input; only DoRA with one for each output, such as PEFT's, is applied"
        )
    return {**found, "magnitude": scale.flatten()}


def _factors(module: str, found: dict[str, Tensor], raw: RawAdapter) -> Factors:
    """The low-rank factors of a LoRA, LoHa or LoKr."""
    algorithm = peft_type_of(module, found, raw.source)
    config = raw.config_of(module)
    if config is not None and config_type(config) != algorithm:
        raise AdapterFileError(
            f"the config of {raw.source} has the peft_type {config_type(config)}, but the "
            f"tensors of {module} are those of {algorithm}"
        )
    if algorithm != "LORA":
        return to_factors(module, found, raw.source, by_peft=config is not None)
    dim = next(iter(found["lora_A"].shape), 0) if "lora_A" in found else 0
    if "lora_mid" in found and "lora_A" in found:
        whole = fold(module, found["lora_A"], found["lora_mid"], raw.source)
        found = {**found, "lora_A": whole}
    _check_pair(module, found, raw)
    return Factors(found["lora_A"], found["lora_B"], outer=None, dim=dim)


def read_settings(raw: RawAdapter) -> dict[str, LoraSettings]:
    """The settings of each component of a file; those for all of it are under ``""``.

    Raises:
        AdapterFileError: A value of a config has no meaning.
        UnsupportedAdapterError: A config asks for something that is not applied here.
    """
    configs = dict(raw.configs) if raw.config is None else {"": raw.config}
    return {name: LoraSettings.of(config, raw.source) for name, config in configs.items()}


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
        return 1.0 if pair.alpha is None or not pair.dim else pair.alpha / pair.dim
    if pair.dim not in (0, settings.rank(name)):
        raise AdapterFileError(
            f"the config of {raw.source} gives rank {settings.rank(name)} to {name}, but its "
            f"tensors have rank {pair.dim}"
        )
    return settings.scaling(name, settings.rank(name), pair.alpha if pair.dim else None)


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
    # PEFT stores only the ranks of one group of a grouped convolution's lora_B.
    groups = A.shape[0] // max(B.shape[1], 1) if A.ndim > 2 and B.ndim > 2 else 1
    if A.shape[0] != B.shape[1] * groups or A.shape[0] == 0:
        raise AdapterFileError(
            f"lora_A and lora_B of {module} in {raw.source} must have the same rank, at least 1, "
            f"got {A.shape[0]} (A is {tuple(A.shape)}) and {B.shape[1]} (B is {tuple(B.shape)})"
        )
