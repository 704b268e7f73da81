"""Who may use the adapters, and who may change them: a lock for readers and writers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from lora_slots.errors import HoldError

# Seconds. A thread that an exception ended on its way out may not have woken those who wait.
_POLL = 0.2


class HoldLock:
    """Any number of threads hold, or one changes what they see.

    Holds are shared, and a thread may nest them. A change is made in two steps: `changing`, for all
    that no holder can notice, goes on beside the holders; inside it, `alone` waits until they have
    left. From then on new holders wait, but for those that hold already; whoever waits is let in
    before the next change, so that neither side starves.

    Copies and pickles are new locks.
    """

    def __init__(self) -> None:
        """Start with nobody inside."""
        self._changes = threading.RLock()
        # Reentrant, so that a thread that is interrupted can release none but its own; entered by
        # itself, since an interrupt can end Condition.__enter__ halfway.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        # Holds by a token of their own, each with its thread.
        self._holds: dict[object, int] = {}
        self._waiting: dict[object, int] = {}

    def __reduce__(self) -> tuple[object, ...]:
        """Nobody is inside a copy."""
        return type(self), ()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep what is seen as it is, together with any others who hold."""
        token, thread = object(), threading.get_ident()
        try:
            with self._lock:
                if self._closed and not self._is_inside(thread):
                    self._waiting[token] = thread
                    while self._closed and token not in self._holds:
                        self._changed.wait(_POLL)
                self._holds[token] = thread
                self._waiting.pop(token, None)
            yield
        finally:
            # Before anything that waits: an interrupt may end this block, too.
            self._holds.pop(token, None)
            with self._lock:
                self._waiting.pop(token, None)
                self._holds.pop(token, None)
                self._changed.notify_all()

    def changing(self) -> AbstractContextManager[bool | None]:
        """A context that keeps other changes out.

        Raises:
            HoldError: This thread holds, or is changing something: it would wait for itself.
        """
        self.refuse_holder()
        return self._changes

    def alone(self, change: Callable[[], None]) -> None:
        """Inside `changing`: wait for all holders to leave, and make a change before any come.

        Args:
            change: Makes it. No context, since Python may be interrupted while it leaves one.
        """
        try:
            with self._lock:
                self._closed = True
                while self._holds:
                    self._changed.wait(_POLL)
            change()
        finally:
            self._closed = False
            with self._lock:
                self._holds.update(self._waiting)
                self._waiting.clear()
                self._changed.notify_all()

    def refuse_holder(self) -> None:
        """Refuse a thread that could not change anything without waiting for itself.

        Raises:
            HoldError: This thread holds, or is changing something.
        """
        if self._is_changing():
            raise HoldError(
                "adapters must not change while this thread is changing them already, as inside "
                "warmup(); make the change afterwards"
            )
        if self._is_inside(threading.get_ident()):
            raise HoldError(
                "adapters must not change inside hold(), got a change from a thread that holds; "
                "make it after the `with` block, or in another thread without waiting for it there"
            )

    def _is_inside(self, thread: int) -> bool:
        """Whether this thread, whose identity is given, need not wait for a change to hold."""
        return self._is_changing() or thread in self._holds.values()

    def _is_changing(self) -> bool:
        """Whether this thread is the one that changes something."""
        return self._changes._is_owned()  # type: ignore[attr-defined, no-any-return]
