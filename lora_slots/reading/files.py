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
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            if header_only:
                return {name: _describe(view) for name, view in slices.items()}, metadata
            return _map(path, slices), metadata
    except (safetensors.SafetensorError, OSError, RuntimeError) as error:
        raise AdapterFileError(_diagnose(path, error)) from error


def _map(path: str, slices: dict[str, Any]) -> dict[str, Tensor]:
    """Map the file once and cut it into its tensors; opening it has checked that it is all there.

    The format has no gaps: tensors follow the header one after the other, in the order of their
    offsets. That is several times faster than asking safetensors for each tensor.
    """
    shapes = [torch.Size(view.get_shape()) for view in slices.values()]
    kinds = [view.get_dtype() for view in slices.values()]
    one_each = dict(zip(kinds, slices.values(), strict=True))
    dtypes = {kind: _dtype(view) for kind, view in one_each.items()}
    sizes = [
        shape.numel() * dtypes[kind].itemsize for shape, kind in zip(shapes, kinds, strict=True)
    ]
    file_size = os.path.getsize(path)
    mapped = torch.from_file(path, shared=False, size=file_size, dtype=torch.uint8)
    parts = torch.split(mapped[file_size - sum(sizes) :], sizes)
    return {
        name: _typed(part, dtypes[kind]).view(shape)
        for name, part, kind, shape in zip(slices, parts, kinds, shapes, strict=True)
    }


def _typed(part: Tensor, dtype: torch.dtype) -> Tensor:
    # Behind a tensor of a smaller dtype one may lie where its own dtype cannot be read.
    aligned = part.storage_offset() % dtype.itemsize == 0
    return (part if aligned else part.clone()).view(dtype)


def _dtype(view: Any) -> torch.dtype:
    # An empty slice is the one public way from a tensor in a file to its dtype.
    dtype: torch.dtype = view[:0].dtype if view.get_shape() else view[...].dtype
    return dtype


def _describe(view: Any) -> Tensor:
    shape = view.get_shape()
    if torch.Size(shape).numel() <= 1:
        scalar: Tensor = view[...]
        return scalar
    return torch.empty(shape, dtype=_dtype(view), device="meta")


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
