"""A host cache of staged adapters, the least recently used out first."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from torch import nn
from torch.utils.weak import WeakIdRef

from lora_slots.errors import ArgumentError
from lora_slots.layers import SlotLayer
from lora_slots.layout import Layout
from lora_slots.reading.folders import CONFIG_NAME, locate, usual_file
from lora_slots.report import LoadReport
from lora_slots.resolve.extras import AS_IN_THE_MODEL
from lora_slots.staging.staged import StagedAdapter

# Rows that were computed from the base weights as they were.
_FROM_BASE = frozenset({"dora", "full", "lora_bias"})


@dataclass(frozen=True, eq=False)
class Cached:
    """What a load of a file came to.

    Attributes:
        staged: The adapter.
        report: What a load from the cache reports.
        base: The state of the base weights that it was computed from.
    """

    staged: StagedAdapter
    report: LoadReport
    base: Hashable


class StagedCache:
    """Staged adapters by the identity of the file they were read from; for any threads.

    Args:
        limit: How many bytes to keep at most; 0 keeps nothing.
    """

    def __init__(self, limit: int) -> None:
        """Start empty."""
        self.limit = limit
        self.nbytes = 0
        self._entries: OrderedDict[Hashable, Cached] = OrderedDict()
        self._lock = threading.Lock()
        self._readers: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles start empty: their model has base weights of its own."""
        return type(self), (self.limit,)

    def __len__(self) -> int:
        """How many adapters are kept."""
        return len(self._entries)

    def get(self, key: Hashable, layout: Layout) -> Cached | None:
        """What is kept for ``key``, if the base weights that it depends on are as they were."""
        with self._lock:
            entry = None if key is None else self._entries.get(key)
            if entry is None:
                return None
            if entry.base != base_state(entry.staged, entry.report, layout):
                self._drop(key)
                return None
            self._entries.move_to_end(key)
            return entry

    def reading(self, key: Hashable) -> AbstractContextManager[object]:
        """A context for one thread at a time: what others read meanwhile is here afterwards."""
        if key is None:
            return nullcontext()
        with self._lock:
            lock: AbstractContextManager[object] = self._readers.setdefault(key, threading.Lock())
            return lock

    def put(self, key: Hashable, entry: Cached) -> None:
        """Keep an adapter, and let go of those not used for longest until all fit."""
        if key is None or entry.staged.nbytes > self.limit:
            return
        with self._lock:
            self._drop(key)
            self._entries[key] = entry
            self.nbytes += entry.staged.nbytes
            while self.nbytes > self.limit:
                self._drop(next(iter(self._entries)))

    def check_size(self, staged: StagedAdapter) -> None:
        """Refuse an adapter that there can be no room for.

        Raises:
            ArgumentError: It is larger than the cache.
        """
        if staged.nbytes > self.limit:
            raise ArgumentError(
                f"{staged.source} takes {staged.nbytes} bytes, but cache_bytes is {self.limit}; "
                f"build the SlotManager with cache_bytes={staged.nbytes} at least"
            )

    def _drop(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.nbytes -= entry.staged.nbytes


def identity(source: object) -> Hashable:
    """What tells whether a file, or the config beside it, is another one than before.

    None where there is no file to look at: for tensors in memory, and for hub ids.

    Raises:
        AdapterFileError: As `read_adapter` does for a path that means no file.
    """
    if not isinstance(source, str | os.PathLike):
        return None
    path = os.fspath(source)
    weights = usual_file(path) or (locate(path) if os.path.exists(path) else None)
    if weights is None:
        return None
    beside = os.path.join(os.path.dirname(weights), CONFIG_NAME)
    # How it was asked for is part of it: a report repeats that.
    return path, _stat(weights), _stat(beside), SlotLayer.generation


def _stat(path: str) -> Hashable:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return path, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def base_state(staged: StagedAdapter, report: LoadReport, layout: Layout) -> Hashable:
    """Changes whenever a base weight does that ``staged`` was computed from.

    That is every one if the report says that a tensor was skipped for being equal to the model's.
    It sees what torch counts: in-place operations and new parameters, not writes through ``.data``.
    """
    # An id alone comes back with the next parameter once the old one is gone.
    return tuple(
        (WeakIdRef(parameter), _version(parameter))
        for parameter in _looked_at(staged, report, layout)
    )


def _looked_at(staged: StagedAdapter, report: LoadReport, layout: Layout) -> Iterator[nn.Parameter]:
    if any(reason == AS_IN_THE_MODEL for _, reason in report.skipped):
        yield from layout.parameters()
        return
    names = _FROM_BASE.intersection(staged.rows)
    for target in sorted({target for name in names for target in staged.rows[name].targets}):
        yield from layout.targets[target].module.parameters(recurse=False)


def _version(parameter: Any) -> object:
    # Inference tensors count nothing, and so are never taken for what they were.
    return object() if parameter.is_inference() else parameter._version
