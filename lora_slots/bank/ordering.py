"""In which order a device runs forwards and what is written into slots.

A GPU runs what threads gave it later, and in several streams at a time, so that a lock between the
threads does not order the work itself. On the host there is nothing to order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch


class Order:
    """The order of one device.

    Rows that no forward notices are copied in a stream of their own, beside the forwards. What one
    would notice is written in the current stream of the thread that makes the change: after those
    copies, and after all forwards that held; forwards that hold later come after it.

    Args:
        device: The device.
        api: `torch.cuda`, or what acts like it.
    """

    def __init__(self, device: torch.device, api: Any = torch.cuda) -> None:
        """Whatever was given to the current stream, such as zeroing the slots, comes first."""
        self._device = device
        self._api = api
        self._beside = api.Stream(device)
        self._lock = threading.Lock()
        self._read: list[Any] = []
        self._copied: Any = None
        self._written = self._record()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Copies into rows that no forward notices since the last change."""
        self._beside.wait_event(self._written)
        with self._api.stream(self._beside):
            try:
                yield
            finally:
                self._copied = self._record()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A change of what forwards notice."""
        current = self._api.current_stream(self._device)
        with self._lock:
            read, self._read = self._read, []
        for event in [*read, self._written, *([self._copied] if self._copied else [])]:
            current.wait_event(event)
        try:
            yield
        finally:
            self._written = self._record()

    def before_forwards(self) -> None:
        """The current stream's next forwards see the last change."""
        self._api.current_stream(self._device).wait_event(self._written)

    def after_forwards(self) -> None:
        """The next change waits for what the current stream was given until now."""
        event = self._record()
        with self._lock:
            self._read = [other for other in self._read if not other.query()]
            self._read.append(event)

    def _record(self) -> Any:
        event = self._api.Event()
        event.record(self._api.current_stream(self._device))
        return event


class Orders:
    """The orders of all devices that hold slots and need one. Copies and pickles start anew."""

    def __init__(self) -> None:
        """Start with no device."""
        self._by_device: dict[torch.device, Order] = {}

    def __reduce__(self) -> tuple[object, ...]:
        """Streams and events are a process's own."""
        return type(self), ()

    def __bool__(self) -> bool:
        """Whether there is a device that needs one."""
        return bool(self._by_device)

    def cover(self, devices: Iterable[torch.device]) -> None:
        """Order these devices, and only these."""
        known = self._by_device
        self._by_device = {
            device: known.get(device) or Order(device)
            for device in devices
            if device.type == "cuda"
        }

    def beside(self) -> AbstractContextManager[object]:
        """See `Order.beside`."""
        return self._all("beside")

    def alone(self) -> AbstractContextManager[object]:
        """See `Order.alone`."""
        return self._all("alone")

    def forwards(self, hold: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """``hold``, with forwards in the stream that is current on entering and on leaving it."""
        orders = tuple(self._by_device.values())
        return _ordered(hold, orders) if orders else hold

    def _all(self, name: str) -> AbstractContextManager[object]:
        if not self._by_device:
            return nullcontext()
        stack = ExitStack()
        for order in self._by_device.values():
            stack.enter_context(getattr(order, name)())
        return stack


@contextmanager
def _ordered(hold: AbstractContextManager[None], orders: Iterable[Order]) -> Iterator[None]:
    with hold:
        for order in orders:
            order.before_forwards()
        try:
            yield
        finally:
            for order in orders:
                order.after_forwards()
