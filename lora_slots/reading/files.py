"""Open weight files, and say what is wrong with one that does not open."""

from __future__ import annotations

import functools
import json
import mmap
import os
import pickle
from collections.abc import Mapping
from typing import Any, BinaryIO

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
            return (_describe if header_only else _map)(path, file), metadata
    except (safetensors.SafetensorError, OSError, RuntimeError) as error:
        raise AdapterFileError(_diagnose(path, error)) from error


def _map(path: str, file: Any) -> dict[str, Tensor]:
    """Map the file once and cut it into its tensors.

    Opening it has checked the header and that all of it is there. This is several times faster than
    asking safetensors for one tensor after the other.
    """
    with open(path, "rb") as stream:
        header = _header(stream)
        start_of_data = stream.tell()
        # Private, so that nothing could ever write into the file.
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    content = torch.frombuffer(mapped, dtype=torch.uint8)[start_of_data:]
    dtypes = _dtypes(header, file)
    whole = {kind: _typed(content, dtype) for kind, dtype in dtypes.items()}
    tensors = {}
    for name, entry in header.items():
        shape, (start, stop), kind = entry["shape"], entry["data_offsets"], entry["dtype"]
        base, itemsize = whole[kind], dtypes[kind].itemsize
        if start % itemsize:
            tensors[name] = _typed(content[start:stop], dtypes[kind]).view(shape)
        else:
            offset = base.storage_offset() + start // itemsize
            tensors[name] = base.as_strided(shape, _strides(shape), offset)
    return tensors


def _header(stream: BinaryIO) -> dict[str, Any]:
    """The shape, dtype and place of every tensor; leaves the stream where the data begin."""
    size = int.from_bytes(stream.read(8), "little")
    header: dict[str, Any] = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    return header


def _dtypes(header: Mapping[str, Any], file: Any) -> dict[str, torch.dtype]:
    """The dtype that each of the header's words for one stands for."""
    one_each = {entry["dtype"]: name for name, entry in header.items()}
    return {kind: _dtype(file.get_slice(name)) for kind, name in one_each.items()}


def _strides(shape: list[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]


def _typed(content: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as whole elements of ``dtype``; copied where they lie where those cannot be read."""
    content = content[: content.numel() // dtype.itemsize * dtype.itemsize]
    aligned = content.storage_offset() % dtype.itemsize == 0
    return (content if aligned else content.clone()).view(dtype)


def _dtype(view: Any) -> torch.dtype:
    # An empty slice is the one public way from a tensor in a file to its dtype.
    dtype: torch.dtype = view[:0].dtype if view.get_shape() else view[...].dtype
    return dtype


def _describe(path: str, file: Any) -> dict[str, Tensor]:
    """Every tensor of more than one element on ``meta``, the others whole."""
    with open(path, "rb") as stream:
        header = _header(stream)
    dtypes = _dtypes(header, file)
    return {
        name: file.get_tensor(name)
        if torch.Size(entry["shape"]).numel() <= 1
        else _on_meta(dtypes[entry["dtype"]], *entry["shape"])
        for name, entry in header.items()
    }


# The same few shapes come back in every adapter of a base model.
@functools.lru_cache(maxsize=4096)
def _on_meta(dtype: torch.dtype, *shape: int) -> Tensor:
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
