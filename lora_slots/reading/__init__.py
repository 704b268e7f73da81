"""A path, a hub id or tensors in memory -> RawAdapter, under the file's names. Knows no model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lora_slots.errors import ArgumentError
from lora_slots.reading import peft
from lora_slots.reading.raw import RawAdapter

Source = str | os.PathLike[str]


def read_adapter(
    source: Source | Mapping[str, Tensor], config: Any = None, *, allow_pickle: bool = False
) -> RawAdapter:
    """Read an adapter completely, without a model.

    Args:
        source: A PEFT folder, a single ``.safetensors`` file, a hub id (read by PEFT's own loader
            where no such path exists), or a mapping of names to tensors.
        config: The adapter's config where the source has none, or in its place: a mapping with the
            keys of ``adapter_config.json`` or a ``peft.LoraConfig``.
        allow_pickle: Whether a ``.bin`` file may be read; it is read with ``weights_only=True``.

    Returns:
        The tensors and the config as the source spells them. Tensors of a mapping are not copied.

    Raises:
        AdapterFileError: The source is missing, damaged or holds no LoRA tensors.
        UnsupportedAdapterError: The source is a pickle and ``allow_pickle`` is not set, or its keys
            are of a format that is not read here.
        ArgumentError: The source or the config is of the wrong type.
    """
    raw = peft.read_mapping(source) if isinstance(source, Mapping) else _read(source, allow_pickle)
    if config is not None:
        raw = raw.with_config(_as_mapping(config))
    peft.check_keys(raw)
    return raw


def read_header(source: Source) -> RawAdapter:
    """Read names, shapes and scalars only: every other tensor of the result is on ``meta``.

    Raises:
        AdapterFileError: As for `read_adapter`.
        UnsupportedAdapterError: As for `read_adapter`; a pickle has no header: always refused.
    """
    raw = peft.read_path(_checked(source), header_only=True)
    peft.check_keys(raw)
    return raw


def _read(source: Source, allow_pickle: bool) -> RawAdapter:
    return peft.read_path(_checked(source), allow_pickle=allow_pickle)


def _checked(source: Source) -> str:
    if not isinstance(source, str | os.PathLike):
        raise ArgumentError(
            "an adapter must be a path, a hub id or a mapping of names to tensors, "
            f"got {type(source).__name__}"
        )
    path = os.fspath(source)
    if not isinstance(path, str) or not path:
        raise ArgumentError(f"an adapter's path must be a non-empty string, got {path!r}")
    return path


def _as_mapping(config: Any) -> Mapping[str, Any]:
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise ArgumentError(
            "config must be a mapping with the keys of adapter_config.json or a peft.LoraConfig, "
            f"got {type(config).__name__}"
        )
    return dict(config)


__all__ = ["RawAdapter", "read_adapter", "read_header"]
