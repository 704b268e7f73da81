"""A path, a hub id or tensors in memory -> RawAdapter, under the file's names. Knows no model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from lora_slots.errors import ArgumentError
from lora_slots.reading.configs import under_config, with_own_config
from lora_slots.reading.files import read_weights
from lora_slots.reading.folders import locate
from lora_slots.reading.formats import check_keys, format_of
from lora_slots.reading.raw import RawAdapter

Source = str | os.PathLike[str]


def read_adapter(
    source: Source | Mapping[str, Tensor], config: Any = None, *, allow_pickle: bool = False
) -> RawAdapter:
    """Read an adapter completely, without a model.

    The format is told by the keys and the header, whatever a file is called. Of a folder or a hub
    id the first of these is read: ``adapter_model.safetensors``,
    ``pytorch_lora_weights.safetensors``, the only ``.safetensors`` file (folders only),
    ``adapter_model.bin``, ``pytorch_lora_weights.bin``.

    Args:
        source: A folder, a single file, a hub id (fetched by huggingface_hub where no such path
            exists), or a mapping of names to tensors.
        config: The adapter's config where the source has none, or in its place: a mapping with the
            keys of ``adapter_config.json`` or a ``peft.LoraConfig``. Keys that all begin with a
            component, such as ``"unet.r"``, give each component a config of its own.
        allow_pickle: Whether a ``.bin``, ``.pt`` or ``.ckpt`` file may be read; it is read with
            ``weights_only=True``.

    Returns:
        The tensors and the config as the source spells them. Tensors of a mapping are not copied.

    Raises:
        AdapterFileError: The source is missing, damaged or holds no LoRA tensors.
        UnsupportedAdapterError: The source is a pickle and ``allow_pickle`` is not set, or its keys
            are those of an algorithm that is no low-rank update.
        ArgumentError: The source or the config is of the wrong type.
    """
    if isinstance(source, Mapping):
        raw = _of_mapping(source)
    else:
        raw = _of_path(source, allow_pickle=allow_pickle)
        raw = replace(raw, tensors=dict(raw.tensors))
    if config is not None:
        raw = under_config(raw, _as_mapping(config))
    return _recognised(raw)


def read_file(source: Source) -> RawAdapter:
    """As `read_adapter`, but that of a safetensors file no tensor is made before it is looked at.

    Raises:
        AdapterFileError: As for `read_adapter`.
        UnsupportedAdapterError: As for `read_adapter`; a pickle is always refused.
        ArgumentError: The source is of the wrong type.
    """
    return _recognised(_of_path(source))


def read_header(source: Source) -> RawAdapter:
    """Read names, shapes and scalars only: every other tensor of the result is on ``meta``.

    Raises:
        AdapterFileError: As for `read_adapter`.
        UnsupportedAdapterError: As for `read_adapter`; a pickle has no header: always refused.
    """
    return _recognised(_of_path(source, header_only=True))


def _recognised(raw: RawAdapter) -> RawAdapter:
    check_keys(raw)
    return replace(raw, format=format_of(raw))


def _of_path(
    source: Source, *, header_only: bool = False, allow_pickle: bool = False
) -> RawAdapter:
    path = _checked(source)
    weights = locate(path, allow_pickle=allow_pickle)
    tensors, metadata = read_weights(weights, header_only=header_only, allow_pickle=allow_pickle)
    return with_own_config(RawAdapter(path, tensors, metadata=metadata), weights)


def _of_mapping(tensors: Mapping[str, Tensor]) -> RawAdapter:
    for name, value in tensors.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ArgumentError(
                f"an adapter in memory must map names to tensors, got {name!r}: "
                f"{type(value).__name__}"
            )
    return RawAdapter(source="<tensors in memory>", tensors=dict(tensors))


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


__all__ = ["RawAdapter", "read_adapter", "read_file", "read_header"]
