"""Threads that cannot hang a test, and exceptions out of nowhere."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import weakref
from collections.abc import Callable

LIMIT = 30.0  # seconds


class Task:
    """A function in a thread of its own; `result` raises what it raised."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._value: object = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._over = False
        self._begun = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._begun.set()
            self._value = self._function()
            with self._lock:
                self._over = True
        except BaseException as error:
            self._over = True
            # Of an interrupt, no traceback: its frames would keep what was interrupted.
            interrupted = isinstance(error, KeyboardInterrupt)
            self._error = KeyboardInterrupt() if interrupted else error

    def result(self, limit: float = LIMIT) -> object:
        self.thread.join(limit)
        assert not self.thread.is_alive(), "a thread hangs"
        if self._error is not None:
            raise self._error
        return self._value

    def interrupt(self, error: type[BaseException] = KeyboardInterrupt) -> bool:
        """Let ``error`` be raised wherever the thread is; False: it was over already."""
        assert self._begun.wait(LIMIT)
        with self._lock:
            if self._over:
                return False
            ident = ctypes.c_ulong(self.thread.ident or 0)
            return ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(error)) == 1


def together(*functions: Callable[[], object], limit: float = LIMIT) -> list[object]:
    """Run all at a time, and return what each returned."""
    return [task.result(limit) for task in [Task(function) for function in functions]]


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


def wait_until_gone(*references: weakref.ref[object]) -> None:
    """Collect garbage until nothing holds these; other threads get as long as collecting takes."""

    def gone() -> bool:
        begun = time.monotonic()
        gc.collect()
        time.sleep(time.monotonic() - begun)
        return all(reference() is None for reference in references)

    wait_until(gone)


def waits(task: Task, seconds: float = 0.05) -> bool:
    """Whether ``task`` is not over after a while."""
    task.thread.join(seconds)
    return task.thread.is_alive()
