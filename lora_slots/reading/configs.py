"""The config of an adapter: in ``adapter_config.json`` beside it, or in the header of its file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from lora_slots.errors import AdapterFileError
from lora_slots.reading.folders import CONFIG_NAME
from lora_slots.reading.raw import RawAdapter

# Where writers put the config of a file; diffusers uses the first.
METADATA_KEYS = ("lora_adapter_metadata", "adapter_config")
# What settles a scaling; two configs of one file must not disagree on these.
SCALING_KEYS = ("r", "lora_alpha", "alpha", "rank_pattern", "alpha_pattern", "use_rslora")

Config = Mapping[str, Any]


def with_own_config(raw: RawAdapter, path: str) -> RawAdapter:
    """``raw``, which was read from the weight file ``path``, under the config that it came with.

    Raises:
        AdapterFileError: A config is damaged, contradicts another, or is that of no tensor.
    """
    beside = _read(os.path.join(os.path.dirname(path), CONFIG_NAME))
    inside = _in_metadata(raw.metadata, path)
    if inside is None:
        return raw if beside is None else raw.with_config(beside)
    under_own = under_config(raw, inside)
    if beside is None:
        return under_own
    for config in under_own.all_configs:
        _check_agreement(beside, config, path)
    return raw.with_config(beside) if under_own.config is not None else under_own


def under_config(raw: RawAdapter, config: Config) -> RawAdapter:
    """``raw`` under ``config``, whose keys may each begin with a component, as diffusers has it.

    Raises:
        AdapterFileError: No tensor belongs to one of its components.
    """
    configs = _by_component(config)
    if configs is None:
        return raw.with_config(config)
    under = replace(raw, config=None, configs=configs)
    if not any(under.component_of(key) for key in raw.tensors):
        raise AdapterFileError(
            f"the config of {raw.source} is for {_listed(configs)}, but the key of no tensor "
            f"begins with that: {_listed(raw.tensors)}"
        )
    return under


def _by_component(config: Config) -> dict[str, dict[str, Any]] | None:
    """The config of each component, if the keys of ``config`` begin with components at all."""
    if not config or not all("." in key for key in config):
        return None
    configs: dict[str, dict[str, Any]] = {}
    for key, value in config.items():
        component, _, name = key.partition(".")
        configs.setdefault(component, {})[name] = value
    return configs


def _read(path: str) -> dict[str, Any] | None:
    if not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            return _parse(file.read(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise AdapterFileError(f"{path} cannot be read: {error}") from error


def _in_metadata(metadata: Mapping[str, str], path: str) -> dict[str, Any] | None:
    for key in METADATA_KEYS:
        if key in metadata:
            return _parse(metadata[key], f"the metadata {key!r} of {path}")
    return None


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AdapterFileError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterFileError(f"{where} must be a JSON object, got {type(config).__name__}")
    return config


def _check_agreement(beside: Config, inside: Config, path: str) -> None:
    for key in SCALING_KEYS:
        if key in beside and key in inside and (beside[key] or None) != (inside[key] or None):
            raise AdapterFileError(
                f"{path} contradicts the {CONFIG_NAME} beside it: {key} is {inside[key]!r} in its "
                f"metadata and {beside[key]!r} there; remove or correct one"
            )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(list(names)[:3])
