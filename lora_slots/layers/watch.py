"""Tell whoever asks that a slot layer ran eagerly, in the calling thread.

Inside compiled code no Python of a slot layer runs, so hearing from one there means that the
compiled code was abandoned. `guard` listens for that, and `SlotManager.verify` for silence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lora_slots.layers.base import SlotLayer

Listener = Callable[["SlotLayer"], None]


class _Listeners(threading.local):
    active: tuple[Listener, ...] = ()


_listeners = _Listeners()


def notify(layer: SlotLayer) -> None:
    """Report that ``layer`` is running eagerly."""
    for listener in _listeners.active:
        listener(layer)


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Call ``listener(layer)`` for every slot layer that runs eagerly in this thread."""
    before = _listeners.active
    _listeners.active = (*before, listener)
    try:
        yield
    finally:
        _listeners.active = before
