"""Many adapters -> the one SlotManager that would hold them all, from their headers alone."""

from __future__ import annotations

import functools
import math
import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from lora_slots.errors import AdapterFileError, LoraSlotsError, TargetMismatchError
from lora_slots.inspecting.inspecting import inspect_adapter
from lora_slots.inspecting.needs import covers, merge
from lora_slots.reading.files import PICKLE_SUFFIXES
from lora_slots.reading.folders import CONFIG_NAME, WEIGHT_NAMES
from lora_slots.report import AdapterInfo, ModuleShape

_T = TypeVar("_T")
_WEIGHT_SUFFIXES = (".safetensors", *PICKLE_SUFFIXES)
# What stands for a component of a pipeline before a module's name. What denoises needs no name.
_PREFIXES = {
    "unet.": "",
    "transformer.": "",
    "diffusion_model.": "",
    "lora_unet_": "",
    "lora_transformer_": "",
    "lora_te_": "text_encoder.",
    "lora_te1_": "text_encoder.",
    "lora_te2_": "text_encoder_2.",
    "lora_te3_": "text_encoder_3.",
}


@dataclass(frozen=True)
class AdapterRow:
    """What became of one adapter of many.

    Attributes:
        path: Where it is.
        info: What its header says; None if it could not be read.
        error: Why it cannot be used, or None.
        warnings: What reading it warned of.
    """

    path: str
    info: AdapterInfo | None = None
    error: LoraSlotsError | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The SlotManager that all adapters which can be used fit into.

    Attributes:
        rows: One entry per adapter, those that cannot be used included.
        num_slots: How many adapters it holds at a time.
        dtype: The dtype of the large buffers, which is the base model's.
        max_rank: The largest rank; 0 if no adapter can be used.
        shapes: The union of the modules, each with the sizes of its layer.
        others: The shapes of whole parameters and of trained rows of embeddings, by their names.
        options: What else `SlotManager` must be given, such as ``dora=True``.
    """

    rows: tuple[AdapterRow, ...]
    num_slots: int
    dtype: torch.dtype
    max_rank: int
    shapes: Mapping[str, ModuleShape]
    others: Mapping[str, tuple[int, ...]]
    options: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """The size of all buffers in bytes, as far as the adapters tell."""
        rows = self.num_slots * self.max_rank
        wide = sum(shape.in_features + shape.out_features for shape in self.shapes.values())
        out = sum(shape.out_features for shape in self.shapes.values())
        dora, bias = (bool(self.options.get(name)) for name in ("dora", "bias"))
        floats = len(self.shapes) * rows
        floats += self.num_slots * out * (4 * dora + bias)
        whole = self.num_slots * sum(self._whole(*other) for other in self.others.items())
        return rows * wide * self.dtype.itemsize + 4 * floats + whole

    def _whole(self, key: str, shape: tuple[int, ...]) -> int:
        """The bytes of each slot for a parameter as a whole, or for rows of an embedding."""
        if ".trainable_tokens_delta" in key:
            row = math.prod(shape[1:]) * self.dtype.itemsize + 8
            return int(self.options["token_rows"]) * row
        return math.prod(shape) * self.dtype.itemsize + 4


def find_adapters(path: str) -> list[str]:
    """The adapters that a path stands for.

    A file stands for itself, as does a folder that holds an adapter under one of PEFT's own file
    names. Any other folder stands for the weight files and the adapters' folders in it, by name; if
    it has none, for itself, so that reading it tells what is wrong.
    """
    if not os.path.isdir(path) or _is_adapter(path):
        return [path]
    inside = (os.path.join(path, name) for name in sorted(_names(path)))
    return [entry for entry in inside if _holds_weights(entry)] or [path]


def _names(folder: str) -> list[str]:
    """What a folder holds; nothing where that cannot be read, as reading it will say."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _is_adapter(folder: str) -> bool:
    return any(os.path.isfile(os.path.join(folder, n)) for n in (CONFIG_NAME, *WEIGHT_NAMES))


def _holds_weights(path: str) -> bool:
    if not os.path.isdir(path):
        return path.endswith(_WEIGHT_SUFFIXES)
    return any(name.endswith(_WEIGHT_SUFFIXES) or name == CONFIG_NAME for name in _names(path))


def look_at(path: str) -> AdapterRow:
    """Inspect one adapter of many; one that cannot be used is no error here."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            row = AdapterRow(path, info=inspect_adapter(path))
        except LoraSlotsError as error:
            row = AdapterRow(path, error=error)
        except OSError as error:
            reason = f"{path} cannot be read: {error.strerror or error}"
            row = AdapterRow(path, error=AdapterFileError(reason))
    return replace(row, warnings=tuple(str(warning.message) for warning in caught))


def plan(rows: Iterable[AdapterRow], *, num_slots: int, dtype: torch.dtype) -> Plan:
    """Find what a manager needs in order to hold any ``num_slots`` of these adapters.

    Where adapters disagree on the sizes of a module, most of them are right, and the first of them
    in a tie; the others are for another base model and cannot be used.
    """
    rows = tuple(rows)
    agreed = _agreed_sizes(rows)
    rows = tuple(_fitted(row, agreed) for row in rows)
    infos = usable(rows)
    return Plan(
        rows=rows,
        num_slots=num_slots,
        dtype=dtype,
        max_rank=max((info.max_rank for info in infos), default=0),
        shapes=_union(info.shapes for info in infos),
        others=_union(info.others for info in infos),
        options=merge(info.needs for info in infos),
    )


def usable(rows: Iterable[AdapterRow]) -> list[AdapterInfo]:
    """What the headers of those adapters say that can be used."""
    return [row.info for row in rows if row.info is not None and row.error is None]


def why_refused(info: AdapterInfo, max_rank: int, options: Mapping[str, Any]) -> str | None:
    """Why slots of ``max_rank`` that were made with ``options`` refuse an adapter, or None."""
    reasons = []
    if info.max_rank > max_rank:
        module = max(info.ranks, key=lambda name: info.ranks[name])
        reasons.append(
            f"it has rank {info.max_rank} at {module}, but max_rank is {max_rank}: it needs "
            f"max_rank={info.max_rank}"
        )
    reasons += [
        f"it needs {format_option(name, value)}"
        for name, value in info.needs.items()
        if not covers(options, name, value)
    ]
    return "; ".join(reasons) or None


def format_option(name: str, value: Any) -> str:
    """An option as it is written in Python."""
    return f"{name}={list(value) if isinstance(value, tuple) else value!r}"


def _agreed_sizes(rows: Sequence[AdapterRow]) -> dict[str, tuple[int, int]]:
    """The input and output sizes of each module that most adapters give it."""
    votes: dict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
    for info in usable(rows):
        for name, shape in info.shapes.items():
            votes[_key(name)][_sizes(shape)] += 1
    return {key: counter.most_common(1)[0][0] for key, counter in votes.items()}


def _sizes(shape: ModuleShape) -> tuple[int, int]:
    """In which a 1x1 convolution is a linear layer, and a kernel may be one with the inputs."""
    return shape.in_features, shape.out_features


def _fitted(row: AdapterRow, agreed: Mapping[str, tuple[int, int]]) -> AdapterRow:
    """The row, with an error if the adapter's sizes are not those agreed on."""
    shapes = row.info.shapes if row.info is not None else {}
    wrong = [name for name, shape in shapes.items() if _sizes(shape) != agreed[_key(name)]]
    if not wrong:
        return row
    name = wrong[0]
    inputs, outputs = agreed[_key(name)]
    return replace(
        row,
        error=TargetMismatchError(
            f"{row.path} is for another base model: {name} has {shapes[name]}, but most of the "
            f"other adapters have in {inputs}, out {outputs} there ({len(wrong)} of its "
            f"{len(shapes)} modules are unlike theirs)"
        ),
    )


def _union(each: Iterable[Mapping[str, _T]]) -> dict[str, _T]:
    """All entries, one for each module, under a name with dots where there is one."""
    names: dict[str, str] = {}
    values: dict[str, _T] = {}
    for mapping in each:
        for name, value in mapping.items():
            key = _key(name)
            values.setdefault(key, value)
            if key not in names or ("." in name and "." not in names[key]):
                names[key] = name
    return {names[key]: value for key, value in values.items()}


@functools.lru_cache(maxsize=2**16)
def _key(name: str) -> str:
    """What two names of one module have in common: kohya writes all dots as underscores."""
    for prefix, meaning in _PREFIXES.items():
        if name.startswith(prefix):
            name = meaning + name.removeprefix(prefix)
            break
    return name.replace(".", "_")
