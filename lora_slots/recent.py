"""A few things that were found out before, the least recently used out first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


class Recent(Generic[_Key, _Value]):
    """Values by what they follow from; for any threads. Copies and pickles start empty.

    Args:
        limit: How many are kept.
    """

    def __init__(self, limit: int) -> None:
        """Start empty."""
        self._limit = limit
        self._known: OrderedDict[_Key, _Value] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        """What is known here may not hold for a copy."""
        return type(self), (self._limit,)

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._known)

    def get(self, key: _Key) -> _Value | None:
        """The value for ``key``, if it is known."""
        with self._lock:
            value = self._known.get(key)
            if value is not None:
                self._known.move_to_end(key)
            return value

    def put(self, key: _Key, value: _Value) -> None:
        """Keep a value, and let go of the one not used for longest where there are too many."""
        with self._lock:
            self._known[key] = value
            self._known.move_to_end(key)
            if len(self._known) > self._limit:
                self._known.popitem(last=False)
