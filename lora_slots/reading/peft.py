"""The PEFT family: folders that `save_pretrained` wrote, and single files with PEFT's key names."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lora_slots.errors import AdapterFileError, ArgumentError, UnsupportedAdapterError
from lora_slots.reading.files import read_weights
from lora_slots.reading.hub import download, looks_like_hub_id
from lora_slots.reading.raw import RawAdapter

CONFIG_NAME = "adapter_config.json"
WEIGHT_NAMES = ("adapter_model.safetensors", "adapter_model.bin")
# Where writers put the config of a single file; diffusers' `save_lora_adapter` uses the first.
METADATA_KEYS = ("lora_adapter_metadata", "adapter_config")
# What settles a scaling; a file's metadata and the config beside it must not disagree on these.
SCALING_KEYS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")

# A piece of a key that only another format or algorithm uses.
_FOREIGN = {
    "hada_w": "LoHa",
    "lokr_w": "LoKr",
    "lora_down": "kohya or older diffusers key names",
    "lora.down": "older diffusers key names",
    "lora_linear_layer": "older diffusers key names",
    "oft_": "OFT",
    "vera_lambda": "VeRA",
    "ia3_l": "IA3",
    "lora_mid": "Tucker convolutions (lora_mid)",
    "dora_scale": "DoRA (dora_scale)",
}
_FOREIGN_PIECE = re.compile(rf"(?:^|[._])({'|'.join(map(re.escape, _FOREIGN))})")


def read_path(path: str, *, header_only: bool = False, allow_pickle: bool = False) -> RawAdapter:
    """Read a folder, a file or a hub id.

    Raises:
        AdapterFileError: Nothing is there, or what is there is damaged or contradicts itself.
        UnsupportedAdapterError: The weights are a pickle that may not be read.
    """
    weights = _locate(path, allow_pickle)
    tensors, metadata = read_weights(weights, header_only=header_only, allow_pickle=allow_pickle)
    beside = _read_config(os.path.join(os.path.dirname(weights), CONFIG_NAME))
    inside = _config_in_metadata(metadata, weights)
    if beside is not None and inside is not None:
        _check_agreement(beside, inside, weights)
    return RawAdapter(
        source=path,
        tensors=tensors,
        config=beside if beside is not None else inside,
        metadata=metadata,
    )


def read_mapping(tensors: Mapping[str, Tensor]) -> RawAdapter:
    """Wrap tensors in memory, under PEFT's key names; nothing is copied.

    Raises:
        ArgumentError: A name is not a string or a value is not a tensor.
    """
    for name, value in tensors.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ArgumentError(
                f"an adapter in memory must map names to tensors, got {name!r}: "
                f"{type(value).__name__}"
            )
    return RawAdapter(source="<tensors in memory>", tensors=dict(tensors))


def check_keys(raw: RawAdapter) -> None:
    """Refuse what holds no LoRA, or holds it under names that are not PEFT's.

    Raises:
        AdapterFileError: There are no LoRA tensors at all.
        UnsupportedAdapterError: The names are those of another format or algorithm.
    """
    for key in raw.tensors:
        foreign = _FOREIGN_PIECE.search(key)
        if foreign is not None:
            raise UnsupportedAdapterError(
                f"{raw.source} uses {_FOREIGN[foreign[1]]}, as its key {key!r} shows; only LoRA "
                "under PEFT's key names ('....lora_A.weight') is read"
            )
    if not any("lora_" in key for key in raw.tensors):
        keys = ", ".join(repr(key) for key in list(raw.tensors)[:3]) or "none at all"
        raise AdapterFileError(f"{raw.source} holds no LoRA tensors; its keys are {keys}")


def _locate(path: str, allow_pickle: bool) -> str:
    if not os.path.exists(path):
        if not looks_like_hub_id(path):
            raise AdapterFileError(f"{path} does not exist")
        path = download(path, [CONFIG_NAME, *WEIGHT_NAMES[: 2 if allow_pickle else 1]])
    if not os.path.isdir(path):
        return path
    for name in WEIGHT_NAMES:
        if os.path.isfile(os.path.join(path, name)):
            return os.path.join(path, name)
    others = sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))
    if len(others) == 1:
        return os.path.join(path, others[0])
    found = f"it holds {', '.join(others)}; pass the path of one" if others else "it holds neither"
    raise AdapterFileError(
        f"{path} must hold {' or '.join(WEIGHT_NAMES)}, or a single .safetensors file: {found}"
    )


def _read_config(path: str) -> dict[str, Any] | None:
    if not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return _parse(file.read(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise AdapterFileError(f"{path} cannot be read: {error}") from error


def _config_in_metadata(metadata: Mapping[str, str], path: str) -> dict[str, Any] | None:
    for key in METADATA_KEYS:
        if key in metadata:
            config = _parse(metadata[key], f"the metadata {key!r} of {path}")
            if config and all("." in name for name in config):
                raise UnsupportedAdapterError(
                    f"{path} holds the configs of several components ({next(iter(config))!r}, "
                    f"...) in its metadata {key!r}; only files for one component are read"
                )
            return config
    return None


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise AdapterFileError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterFileError(f"{where} must be a JSON object, got {type(config).__name__}")
    return config


def _check_agreement(beside: Mapping[str, Any], inside: Mapping[str, Any], path: str) -> None:
    for key in SCALING_KEYS:
        if key in beside and key in inside and (beside[key] or None) != (inside[key] or None):
            raise AdapterFileError(
                f"{path} contradicts the {CONFIG_NAME} beside it: {key} is {inside[key]!r} in its "
                f"metadata and {beside[key]!r} there; remove or correct one"
            )
