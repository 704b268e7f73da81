"""RawAdapter + Layout -> Adapter: the model's own module paths, and a scaling for each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lora_slots.errors import AdapterFileError, TargetMismatchError, UnsupportedAdapterError
from lora_slots.layout import PEFT_PREFIX, Layout, Target, spellings, without_wrappers
from lora_slots.pairing import Pair, pair_up, settle_scaling
from lora_slots.reading import RawAdapter
from lora_slots.settings import LoraSettings, whole_tensor_features

_SAMPLES = 3

# Tensors of features that would change the maths, by a piece of their names.
_VARIANTS = {
    "lora_magnitude_vector": "DoRA",
    "lora_diag": "KaSA",
}
_EMBEDDING_KEY = re.compile(r"(?P<module>.+)\.lora_embedding_[AB](?:\.[^.]+)?")


@dataclass(frozen=True, eq=False)
class ModuleUpdate:
    """One module of an adapter, matched to a target module of the model.

    Attributes:
        target: The index of the target module in the layout.
        path: The target module's path.
        lora_A: ``[r, in]`` in the file's dtype, or ``[r, in, *kernel]``; None if there is no
            low-rank update.
        lora_B: ``[out, r]`` in the file's dtype, with any number of axes of size 1 after it.
        scaling: ``alpha / r`` or ``alpha / sqrt(r)``.
        magnitude: DoRA's magnitude, ``[out]``, if there is one.
        others: Rows for buffers other than ``lora_A`` and ``lora_B``, by the buffer's name.
    """

    target: int
    path: str
    lora_A: Tensor | None
    lora_B: Tensor | None
    scaling: float
    magnitude: Tensor | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The number of rows of ``lora_A``; 0 without one."""
        return 0 if self.lora_A is None else self.lora_A.shape[0]


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter under the model's own names.

    Attributes:
        source: Where it was read from.
        modules: One entry per target module, in the order of the model.
        skipped: Keys that are not applied, each with the reason.
        base_model: The base model that the adapter names, or empty.
    """

    source: str
    modules: tuple[ModuleUpdate, ...]
    skipped: tuple[tuple[str, str], ...] = field(default=())
    base_model: str = ""


def resolve(raw: RawAdapter, layout: Layout, *, strict: bool = True) -> Adapter:
    """Match every tensor of ``raw`` to a target module and settle its scaling.

    Args:
        raw: What the file says.
        layout: What the model offers.
        strict: Raise for modules that are not found and for tensors that are not LoRA; otherwise
            skip and list them.

    Raises:
        AdapterFileError: The file contradicts itself: half a pair, two ranks, a bad alpha.
        UnsupportedAdapterError: A feature or a kind of layer that is not applied here.
        TargetMismatchError: Modules that this model does not have among its targets.
    """
    settings = None if raw.config is None else LoraSettings.of(raw.config, raw.source)
    pairs, extras = pair_up(raw)
    skipped = _check_extras(raw, extras, layout, strict=strict)
    found: dict[int, tuple[Pair, float]] = {}
    names: list[str] = []
    unmatched: list[str] = []
    for pair, path in zip(pairs, _without_ddp([p.module for p in pairs], layout), strict=True):
        match = layout.find(path)
        if match is None:
            unmatched.append(pair.module)
            continue
        index, name = match
        names.append(name)
        scaling = settle_scaling(pair, name, settings, raw)
        if index in found:
            _check_same(found[index], (pair, scaling), raw)
        else:
            found[index] = (pair, scaling)
    if unmatched and (strict or not found):
        raise _unmatched_error(raw, layout, unmatched, len(pairs))
    skipped += [(module, _why_unmatched(module, layout)) for module in unmatched]
    if not found:
        raise AdapterFileError(f"{raw.source} has no complete pair of lora_A and lora_B")
    if settings is not None:
        settings.warn_of_unused_patterns(names)
    modules = tuple(
        _update(index, layout.targets[index], pair, scaling)
        for index, (pair, scaling) in sorted(found.items())
    )
    base_model = (raw.config or {}).get("base_model_name_or_path") or ""
    return Adapter(raw.source, modules, tuple(skipped), str(base_model))


def _update(index: int, target: Target, pair: Pair, scaling: float) -> ModuleUpdate:
    others = {}
    if pair.lora_bias is not None:
        # In float64, so that the buffer's float32 is the only rounding.
        others["lora_bias"] = scaling * pair.lora_bias.detach().double().flatten()[None]
    return ModuleUpdate(
        target=index,
        path=target.path,
        lora_A=pair.lora_A,
        lora_B=pair.lora_B,
        scaling=scaling,
        magnitude=pair.magnitude,
        others=others,
    )


def _without_ddp(names: list[str], layout: Layout) -> list[str]:
    """The names less the ``module.`` that DDP put before all, where all then are the model's own.

    One name alone cannot tell it from a real submodule called ``module``.
    """
    if not all(_plain(name).startswith("module.") for name in names):
        return names
    plain = [_plain(name) for name in names]
    own = {without_wrappers(alias) for target in layout for alias in target.aliases}
    if own.issuperset(plain):
        return names
    bare = [name.removeprefix("module.").removeprefix(PEFT_PREFIX) for name in plain]
    return bare if own.issuperset(bare) else names


def _plain(name: str) -> str:
    return without_wrappers(name).removeprefix(PEFT_PREFIX)


def _check_same(one: tuple[Pair, float], other: tuple[Pair, float], raw: RawAdapter) -> None:
    (first, scaling), (second, other_scaling) = one, other
    same = torch.equal(first.lora_A, second.lora_A) and torch.equal(first.lora_B, second.lora_B)
    if scaling != other_scaling or not same:
        raise TargetMismatchError(
            f"{first.module} and {second.module} are one shared module in this model, but "
            f"{raw.source} has different tensors or scalings for them"
        )


def _check_extras(
    raw: RawAdapter, extras: Mapping[str, Tensor], layout: Layout, *, strict: bool
) -> list[tuple[str, str]]:
    """Return the extras that may be skipped, or raise."""
    skipped: list[tuple[str, str]] = []
    unwanted: dict[str, list[str]] = {}
    for key, tensor in extras.items():
        for piece, feature in _VARIANTS.items():
            if piece in key:
                raise UnsupportedAdapterError(
                    f"{raw.source} uses {feature}, as its key {key!r} shows, which is not applied "
                    "here"
                )
        if _is_live_tensor(key, tensor, layout):
            skipped.append((key, "equal to the model's own"))
        else:
            unwanted.setdefault(_kind_of_extra(key, layout), []).append(key)
    features = whole_tensor_features(raw.config or {})
    if strict and (unwanted or features):
        kinds = [f"{len(keys)} {kind} ({_some(keys)})" for kind, keys in unwanted.items()]
        raise UnsupportedAdapterError(
            f"{raw.source} asks for more than slots can hold: {'; '.join(features + kinds)}; pass "
            "strict=False to load its low-rank part without them"
        )
    return skipped + [(key, kind) for kind, keys in unwanted.items() for key in keys]


def _is_live_tensor(key: str, tensor: Tensor, layout: Layout) -> bool:
    """Whether an extra is a copy of what the model has already, as PEFT saves embeddings."""
    live = layout.parameter(key.replace(".base_layer.", "."))
    if live is None or live.is_meta or tensor.is_meta or live.shape != tensor.shape:
        return False
    return torch.equal(tensor.to(live.device, live.dtype), live)


def _kind_of_extra(key: str, layout: Layout) -> str:
    embedding = _EMBEDDING_KEY.fullmatch(key)
    if embedding is not None:
        return f"LoRA on {_class_name(embedding['module'], layout) or 'Embedding'}"
    if "lora_" in key:
        return "LoRA tensor of unknown meaning"
    if key.endswith(".bias"):
        return "bias"
    if key.endswith(".alpha"):
        return "alpha without LoRA tensors"
    if ".base_layer." in key:
        return "copy of a base weight"
    return "full weight"


def _class_name(module: str, layout: Layout) -> str | None:
    return next((layout.others[n] for n in spellings(module) if n in layout.others), None)


def _why_unmatched(module: str, layout: Layout) -> str:
    names = spellings(module)
    for name in names:
        if name in layout.bypassed:
            return layout.bypassed[name]
        if name in layout.others:
            return f"is {layout.others[name]}, not one of the target modules"
    return "no such module in the model"


def _unmatched_error(
    raw: RawAdapter, layout: Layout, unmatched: list[str], total: int
) -> TargetMismatchError | UnsupportedAdapterError:
    from lora_slots.layers import KINDS

    slotted = {kind.name for kind in KINDS}
    listed = _some([f"{name}: {_why_unmatched(name, layout)}" for name in unmatched], "; ")
    ours = _some([target.path for target in layout])
    message = (
        f"{len(unmatched)} of the {total} modules of {raw.source} match no target module of this "
        f"model ({listed}); the model's target modules are {ours}"
    )
    for module in unmatched:
        kind = _class_name(module, layout)
        if kind is not None and not any(name in kind for name in slotted):
            return UnsupportedAdapterError(
                f"{message}; {kind} layers such as {module} have no slots yet"
            )
    return TargetMismatchError(
        f"{message}; build the SlotManager with target_modules that include them, or pass "
        "strict=False to skip them"
    )


def _some(names: list[str], separator: str = ", ") -> str:
    """The first few names, and dots for the rest."""
    return separator.join(names[:_SAMPLES] + ["..."] * (len(names) > _SAMPLES))
