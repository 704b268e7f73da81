"""A path -> AdapterInfo, from the header and the config alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lora_slots.inspecting.needs import full_tensors, needs_of, whole_tensors
from lora_slots.layout import PEFT_PREFIX, without_wrappers
from lora_slots.reading import RawAdapter, Source, read_header
from lora_slots.reading.keys import split_key
from lora_slots.report import AdapterInfo, ModuleShape
from lora_slots.resolve.pairing import Pair, pair_up, read_settings, settle_scaling
from lora_slots.resolve.settings import LoraSettings, whole_tensor_features

# Unusual parts of an update, by how their names begin.
_PARTS = {
    "hada_": "LoHa",
    "lokr_": "LoKr",
    "lora_mid": "Tucker convolutions",
    "magnitude": "DoRA",
    "dora_scale": "DoRA",
    "lora_bias": "lora_bias",
    "trainable_tokens": "trainable tokens",
}
# Unusual settings of a config.
_SETTINGS = {
    "use_rslora": "rsLoRA",
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
    "target_parameters": "target_parameters",
}
# Where trainers of the kohya family name the base model, or at least its architecture.
_BASE_MODELS = ("ss_base_model_version", "modelspec.architecture", "ss_sd_model_name")


def inspect_adapter(path: Source) -> AdapterInfo:
    """Say what an adapter is, without a model and without reading its tensors.

    The rank of a module is an upper bound where several projections are fused in it, since which
    rows of theirs are zero is not in the header.

    Args:
        path: A PEFT folder, a ``.safetensors`` file or a hub id.

    Raises:
        AdapterFileError: It is missing, damaged, or contradicts itself.
        UnsupportedAdapterError: It uses a feature that is not applied here.
    """
    raw = read_header(path)
    settings = read_settings(raw)
    pairs, extras = pair_up(raw)
    modules = {module.name: module for module in (_Module.of(p, raw, settings) for p in pairs)}
    return AdapterInfo(
        source=raw.source,
        format=raw.format,
        base_model=_base_model(raw),
        ranks={name: module.pair.rank for name, module in modules.items()},
        scaling={name: module.scaling for name, module in modules.items()},
        shapes={name: module.shape for name, module in modules.items()},
        kinds=_kinds(modules.values(), raw),
        others={key: tuple(extras[key].shape) for key in _others(pairs, extras)},
        dtypes=_dtypes(raw),
        nbytes=raw.nbytes,
        needs=needs_of(raw, pairs, extras),
        features=tuple(dict.fromkeys(_features(raw, extras))),
    )


@dataclass(frozen=True)
class _Module:
    """The update of one module.

    Attributes:
        name: The file's name for it, less ``base_model.model.``.
        pair: The update, of which one expert has the rank.
        scaling: Its scaling.
        experts: How many experts a parameter holds that it is for; 1 for a layer.
    """

    name: str
    pair: Pair
    scaling: float
    experts: int

    @classmethod
    def of(cls, pair: Pair, raw: RawAdapter, settings: Mapping[str, LoraSettings]) -> _Module:
        """Settle what depends on the config."""
        name = without_wrappers(pair.module).removeprefix(PEFT_PREFIX)
        component = raw.component_of(pair.module)
        ours = settings.get(component)
        # The patterns of a config speak of what is wrapped, within its component.
        configured = name.removeprefix(f"{component}.")
        experts = 1
        config = raw.config_of(pair.module)
        parameters = (config or {}).get("target_parameters")
        if ours is not None and parameters and isinstance(parameters, list):
            configured = configured.replace(".base_layer", "")
            experts = _experts(pair, configured, parameters, ours)
            pair = _of_one_expert(pair, experts) if experts > 1 else pair
        return cls(name, pair, settle_scaling(pair, configured, ours, raw), experts)

    @property
    def shape(self) -> ModuleShape:
        """The sizes of the layer, or of the parameter of all experts."""
        inputs, *kernel = self.pair.lora_A.shape[1:]
        if self.pair.outer is not None:
            inputs *= self.pair.outer[1].shape[1]
        return ModuleShape((inputs * self.experts, *kernel), self.pair.outputs * self.experts)


def _experts(pair: Pair, name: str, parameters: Iterable[str], settings: LoraSettings) -> int:
    """How many experts have their rows in a pair, PEFT's way, if it is for a parameter."""
    owners = {str(parameter).rpartition(".")[0] for parameter in parameters}
    rank = settings.rank(name)
    is_one = any(name.endswith(owner) for owner in owners)
    return max(pair.dim // rank, 1) if is_one and pair.dim % rank == 0 else 1


def _of_one_expert(pair: Pair, experts: int) -> Pair:
    rank = pair.dim // experts
    return replace(pair, lora_A=pair.lora_A[:rank], lora_B=pair.lora_B[:, :rank], dim=rank)


def _base_model(raw: RawAdapter) -> str:
    named = [config.get("base_model_name_or_path") for config in raw.all_configs]
    return str(next(filter(None, [*named, *map(raw.metadata.get, _BASE_MODELS)]), ""))


def _kinds(modules: Iterable[_Module], raw: RawAdapter) -> dict[str, int]:
    splits = (split_key(key) for key in raw.tensors if ".lora_embedding_" in key)
    embeddings = {split[0] for split in splits if split is not None}
    return dict(Counter(_kind(module, embeddings) for module in modules))


def _kind(module: _Module, embeddings: set[str]) -> str:
    if module.pair.module in embeddings:
        return "embedding"
    if module.experts > 1:
        return "experts"
    axes = module.pair.lora_A.ndim - 2
    return f"conv{axes}d" if axes else "linear"


def _others(pairs: Iterable[Pair], extras: Iterable[str]) -> list[str]:
    tokens = [key for key in extras if ".trainable_tokens_delta" in key]
    return full_tensors(pairs, extras) + tokens


def _dtypes(raw: RawAdapter) -> tuple[torch.dtype, ...]:
    parts = ((split_key(key), tensor) for key, tensor in raw.tensors.items())
    found = (tensor.dtype for split, tensor in parts if split is not None and split[1] != "alpha")
    return tuple(dict.fromkeys(found))


def _features(raw: RawAdapter, extras: Mapping[str, Tensor]) -> Iterator[str]:
    parts = {split[1] for key in raw.tensors if (split := split_key(key)) is not None}
    yield from (name for start, name in _PARTS.items() if any(p.startswith(start) for p in parts))
    for config in raw.all_configs:
        yield from (name for key, name in _SETTINGS.items() if config.get(key))
        yield from whole_tensor_features(config)
    if whole := whole_tensors(extras):
        yield f"{len(whole)} whole tensor{'s' * (len(whole) > 1)}"
