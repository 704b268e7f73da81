"""Open weight files, and say what is wrong with one that does not open."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from typing import Any

import safetensors
import torch
from torch import Tensor

from lora_slots.errors import AdapterFileError, UnsupportedAdapterError

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")

# First bytes of what is often found in the place of a safetensors file.
_IMPOSTORS = (
    (b"version https://git-lfs", "it is a Git LFS pointer: run `git lfs pull`"),
    (b"<!doctype html", "it is a web page: the download went wrong"),
    (b"<html", "it is a web page: the download went wrong"),
    (b"pk\x03\x04", "it is a PyTorch pickle (zip) under another name"),
    (b"\x80", "it is a pickle under another name"),
    (b"{", "it is JSON, not a weight file"),
)


def read_weights(
    path: str, *, header_only: bool = False, allow_pickle: bool = False
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read all tensors, and the free text of the header, of one weight file.

    Args:
        path: A ``.safetensors`` file, or a pickle where ``allow_pickle`` is set.
        header_only: Leave tensors of more than one element on ``meta``.
        allow_pickle: Whether a pickle may be read, with ``weights_only=True``.

    Raises:
        AdapterFileError: The file cannot be opened; the message names the likely cause.
        UnsupportedAdapterError: A pickle that may not be read.
    """
    if path.endswith(PICKLE_SUFFIXES):
        if header_only or not allow_pickle:
            raise UnsupportedAdapterError(
                f"{path} is a pickle, which is not read unless asked for, since opening one can "
                "run code; convert it to safetensors, or pass read_adapter(path, "
                "allow_pickle=True)"
            )
        return _read_pickle(path), {}
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if header_only:
                return {name: _describe(file, name) for name in file.keys()}, metadata  # noqa: SIM118
            return file.get_tensors(), metadata
    except (safetensors.SafetensorError, OSError) as error:
        raise AdapterFileError(_diagnose(path, error)) from error


def _describe(file: Any, name: str) -> Tensor:
    view = file.get_slice(name)
    shape = view.get_shape()
    if torch.Size(shape).numel() <= 1:
        tensor: Tensor = file.get_tensor(name)
        return tensor
    # An empty slice is the one way to a dtype that needs no table of names.
    dtype = view[:0].dtype
    return torch.empty(shape, dtype=dtype, device="meta")


def _read_pickle(path: str) -> dict[str, Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise AdapterFileError(_diagnose(path, error)) from error
    if not isinstance(content, Mapping) or not all(
        isinstance(value, Tensor) for value in content.values()
    ):
        raise AdapterFileError(f"{path} must hold a mapping of names to tensors, nothing else")
    return dict(content)


def _diagnose(path: str, error: Exception) -> str:
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            start = file.read(64)
    except OSError as os_error:
        return f"{path} cannot be read: {os_error.strerror or os_error}"
    lowered = start.lstrip().lower()
    if size < 8:
        cause = "it is empty" if size == 0 else "it ends within the first 8 bytes"
    else:
        cause = next(
            (text for magic, text in _IMPOSTORS if lowered.startswith(magic)),
            "it is truncated, has bytes after its end, or is no safetensors file",
        )
    return f"{path} ({size} bytes) is not a readable weight file: {cause} ({error})"
