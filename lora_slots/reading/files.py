"""Open weight files, and say what is wrong with one that does not open."""

from __future__ import annotations

import functools
import itertools
import json
import math
import mmap
import operator
import os
import pickle
from collections.abc import Mapping
from typing import Any, BinaryIO

import safetensors
import torch
from torch import Tensor

from lora_slots.errors import AdapterFileError, UnsupportedAdapterError
from lora_slots.reading.mapped import Entry, Header, MappedTensors
from lora_slots.recent import Recent

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
) -> tuple[Mapping[str, Tensor], dict[str, str]]:
    """Read all tensors, and the free text of the header, of one weight file.

    Args:
        path: A ``.safetensors`` file, or a pickle where ``allow_pickle`` is set.
        header_only: Leave tensors of more than one element on ``meta``.
        allow_pickle: Whether a pickle may be read, with ``weights_only=True``.

    Raises:
        AdapterFileError: The file cannot be opened; the message names the likely cause.
        UnsupportedAdapterError: A pickle that may not be read.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        # Opening a pipe would wait for somebody to write into it.
        kind = "a folder" if os.path.isdir(path) else "a pipe or a device"
        raise AdapterFileError(f"{path} must be a file, but it is {kind}")
    if path.endswith(PICKLE_SUFFIXES):
        if header_only or not allow_pickle:
            raise UnsupportedAdapterError(
                f"{path} is a pickle, which is not read unless asked for, since opening one can "
                "run code; convert it to safetensors, or pass read_adapter(path, "
                "allow_pickle=True)"
            )
        return _read_pickle(path), {}
    try:
        with open(path, "rb") as stream:
            header = _header_of(path, stream)
            if header_only:
                return _describe(path, header), dict(header.metadata)
            # Private, so that nothing could ever write into the file.
            mapped = mmap.mmap(stream.fileno(), header.size, access=mmap.ACCESS_COPY)
    except (safetensors.SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise AdapterFileError(_diagnose(path, error)) from error
    return MappedTensors(mapped, header), dict(header.metadata)


# Files of one training set-up differ in their data alone. What safetensors makes of a file follows
# from its header and its size.
_known_headers: Recent[tuple[bytes, int], Header] = Recent(64)


def _header_of(path: str, stream: BinaryIO) -> Header:
    """The header of an open file, which safetensors has checked: all of its data are there.

    Raises:
        safetensors.SafetensorError: It is damaged.
    """
    size = os.fstat(stream.fileno()).st_size
    length = stream.read(8)
    text = stream.read(min(int.from_bytes(length, "little"), size))
    header = _known_headers.get((text, size))
    if header is None:
        with safetensors.safe_open(path, framework="pt") as file:
            header = _read_header(text, size, file)
        if not os.path.samestat(os.fstat(stream.fileno()), os.stat(path)):
            raise OSError(f"{path} was replaced while it was read")
        _known_headers.put((text, size), header)
    return header


def _read_header(text: bytes, size: int, file: Any) -> Header:
    content: dict[str, Any] = json.loads(text)
    content.pop("__metadata__", None)
    # The dtype that each of the header's words for one stands for.
    one_each = {entry["dtype"]: name for name, entry in content.items()}
    dtypes = {kind: _dtype(file.get_slice(name)) for kind, name in one_each.items()}
    entries = {}
    for name, entry in content.items():
        shape = tuple(entry["shape"])
        strides = tuple(itertools.accumulate(shape[:0:-1], operator.mul, initial=1))[::-1]
        dtype = dtypes[entry["dtype"]]
        start, stop = entry["data_offsets"]
        if stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} has elements of {dtype} that are no whole bytes")
        entries[name] = Entry(dtype, shape, strides[: len(shape)], start, stop)
    return Header(entries, file.metadata() or {}, 8 + len(text), size)


def _dtype(view: Any) -> torch.dtype:
    # An empty slice is the one public way from a tensor in a file to its dtype.
    dtype: torch.dtype = view[:0].dtype if view.get_shape() else view[...].dtype
    return dtype


def _describe(path: str, header: Header) -> dict[str, Tensor]:
    """Every tensor of more than one element on ``meta``, the others whole."""
    entries = header.entries
    small = {name for name, entry in entries.items() if math.prod(entry.shape) <= 1}
    tensors = {name: _on_meta(entry.dtype, *entry.shape) for name, entry in entries.items()}
    if small:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in small}
    return tensors


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
