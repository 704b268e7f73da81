"""Background threads that read adapters before they are needed. Knows no model."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, as_completed
from contextlib import suppress

_WORKERS = 2
# Names above which waiting shows a bar, where there is a terminal.
_MANY = 8
# Seconds that the interpreter waits at its end for a file that is being read.
_PATIENCE = 10.0

Read = Callable[[str], None]


class Prefetch:
    """Adapters that are being read in the background.

    An adapter that could not be read is no matter until it is used: that reads its file again, and
    raises if it still cannot be. `errors` tells before.
    """

    def __init__(self, futures: Mapping[str, Future[None]]) -> None:
        """Follow the futures of these names."""
        self._futures = dict(futures)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """What is being read: the names that were not in a slot."""
        return tuple(self._futures)

    @property
    def errors(self) -> Mapping[str, BaseException]:
        """Why adapters could not be read, by their names, as far as is known now."""
        over = {name: f for name, f in self._futures.items() if f.done() and not f.cancelled()}
        return {name: error for name, f in over.items() if (error := f.exception()) is not None}

    def done(self) -> bool:
        """Whether nothing is left to read: every adapter was read, failed or was cancelled."""
        return all(future.done() for future in self._futures.values())

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to read; of many adapters with a bar on a terminal.

        Args:
            timeout: How many seconds to wait at most; None: as long as it takes.

        Returns:
            Whether nothing is left. Never raises what `errors` has.
        """
        from tqdm import tqdm

        total = len(self._futures)
        disable = None if total > _MANY else True
        bar = tqdm(total=total, desc="reading", unit="adapter", disable=disable)
        with bar, suppress(TimeoutError):
            for _ in as_completed(self._futures.values(), timeout):
                bar.update()
        return self.done()

    def cancel(self) -> None:
        """Do not begin to read what is not being read yet."""
        for future in self._futures.values():
            future.cancel()

    def __repr__(self) -> str:
        """How far it is."""
        over = sum(future.done() for future in self._futures.values())
        return f"Prefetch({over} of {len(self._futures)} done, {len(self.errors)} failed)"


class Prefetcher:
    """Runs readings in a few threads that exist for as long as there is something to read.

    Neither the threads nor what they have yet to read keep the reader's owner alive. Copies and
    pickles start with nothing to read.
    """

    def __init__(self) -> None:
        """Start without a thread."""
        self._queue = _Queue()
        weakref.finalize(self, self._queue.clear).atexit = False

    def __reduce__(self) -> tuple[object, ...]:
        """What is being read is read for the original."""
        return type(self), ()

    def submit(self, adapter_names: list[str], read: Read) -> Prefetch:
        """Read these adapters in the background, the first ones first.

        Args:
            adapter_names: What to read.
            read: A method that reads one of them; its object is not kept alive.
        """
        futures: dict[str, Future[None]] = {name: Future() for name in adapter_names}
        method = weakref.WeakMethod(read)
        self._queue.extend(_Job(name, future, method) for name, future in futures.items())
        return Prefetch(futures)

    def stop(self) -> None:
        """Drop what nobody has begun to read."""
        self._queue.clear()


class _Job:
    """One adapter to read."""

    def __init__(self, name: str, future: Future[None], read: weakref.WeakMethod[Read]) -> None:
        self._name = name
        self._future = future
        self._read = read

    def run(self) -> None:
        read = self._read()
        if read is None:
            self.drop()
        elif self._future.set_running_or_notify_cancel():
            try:
                read(self._name)
            except BaseException as error:
                self._future.set_exception(_without_frames(error))
            else:
                self._future.set_result(None)

    def drop(self) -> None:
        if self._future.cancel():
            self._future.set_running_or_notify_cancel()  # lets go of who waits


class _Queue:
    """Jobs, and the threads that do them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: deque[_Job] = deque()
        self._threads: list[threading.Thread] = []
        _queues.add(self)

    def extend(self, jobs: Iterable[_Job]) -> None:
        with self._lock:
            self._jobs.extend(jobs)
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            for _ in range(min(_WORKERS, len(self._jobs)) - len(self._threads)):
                # A daemon, since others are waited for until all is read when Python ends.
                thread = threading.Thread(
                    target=self._work, name="lora_slots prefetch", daemon=True
                )
                thread.start()
                self._threads.append(thread)

    def clear(self) -> None:
        # Without the lock: this may run wherever garbage is collected.
        while self._jobs:
            with suppress(IndexError):
                self._jobs.popleft().drop()

    def join(self, timeout: float) -> None:
        for thread in list(self._threads):
            thread.join(timeout)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            job.run()

    def _next(self) -> _Job | None:
        with self._lock:
            try:
                return self._jobs.popleft()
            except IndexError:
                self._threads.remove(threading.current_thread())
                return None


_queues: weakref.WeakSet[_Queue] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Let no thread run torch while Python takes it apart."""
    queues = list(_queues)
    for queue in queues:
        queue.clear()
    for queue in queues:
        queue.join(_PATIENCE)


def _without_frames(error: BaseException) -> BaseException:
    """The error, and what led to it, less all that would keep the model alive."""
    parts: list[BaseException | None] = [error]
    seen = set()
    while parts:
        part = parts.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        part.__traceback__ = None
        if isinstance(part, AttributeError):
            part.obj = None
        parts += [part.__cause__, part.__context__]
    return error
