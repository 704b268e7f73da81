"""What a manager has done so far, counted and timed."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

from lora_slots.errors import RecompileError
from lora_slots.report import LoadReport, format_size
from lora_slots.roster import Roster

# The classes that loads are counted in, by their upper bounds in seconds; the last has none.
SWAP_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0,
)  # fmt: skip


@dataclass(frozen=True)
class Counts:
    """What happened since the manager was built. Only what succeeded counts.

    A copy of a model goes on from the counts of the original.

    Attributes:
        loads: Adapters written into slots, by `load` or because they were needed.
        cache_hits: Those of them that were on the host already.
        prefetched: Adapters that `prefetch` read.
        evictions: Adapters that lost their slot to another one.
        nbytes: The bytes that loads wrote into slots.
        recompiles: How often `no_recompile` raised `RecompileError`.
        seconds: The time that all loads took, reading included.
        swaps: How many loads fell into each class of `SWAP_SECONDS`, and how many took longer.
    """

    loads: int = 0
    cache_hits: int = 0
    prefetched: int = 0
    evictions: int = 0
    nbytes: int = 0
    recompiles: int = 0
    seconds: float = 0.0
    swaps: tuple[int, ...] = (0,) * (len(SWAP_SECONDS) + 1)

    @property
    def cache_misses(self) -> int:
        """Loads of what was not on the host."""
        return self.loads - self.cache_hits

    def with_load(self, report: LoadReport) -> Counts:
        """One load more."""
        swaps = list(self.swaps)
        swaps[bisect_left(SWAP_SECONDS, report.seconds)] += 1
        return replace(
            self,
            loads=self.loads + 1,
            cache_hits=self.cache_hits + report.cached,
            nbytes=self.nbytes + report.nbytes,
            seconds=self.seconds + report.seconds,
            swaps=tuple(swaps),
        )

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.loads} loads, {self.cache_hits} of them from the host cache; "
            f"{self.prefetched} prefetched, {self.evictions} evicted, "
            f"{format_size(self.nbytes)} written, {self.recompiles} recompiles"
        )


class Tally:
    """The counts of a manager, and what was last done with each loaded adapter; for any threads.

    Attributes:
        counts: What happened until now. Replaced as one.
        swaps: How many seconds the last load of each loaded adapter took.
        used: When each loaded adapter was active or routed last, in seconds since the epoch.
    """

    def __init__(
        self,
        counts: Counts | None = None,
        swaps: Mapping[str, float] | None = None,
        used: Mapping[str, float] | None = None,
    ) -> None:
        """Start at 0, or where another one is."""
        self.counts = counts or Counts()
        self.swaps = dict(swaps or {})
        self.used = dict(used or {})
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles go on from here, with a lock of their own."""
        with self._lock:
            return type(self), (self.counts, dict(self.swaps), dict(self.used))

    def changed(self, before: Roster, after: Roster, reports: Iterable[LoadReport] = ()) -> None:
        """Count a change that was made.

        Args:
            before: Who was loaded.
            after: Who is loaded now.
            reports: What was loaded. If anything was, who is missing now was evicted.
        """
        now = time.time()
        reports = list(reports)
        gone = before.entries.keys() - after.entries.keys()
        with self._lock:
            for report in reports:
                self.counts = self.counts.with_load(report)
                self.swaps[report.adapter_name] = report.seconds
            self.used.update(dict.fromkeys((*before.in_use, *after.in_use), now))
            for name in gone:
                self.swaps.pop(name, None)
                self.used.pop(name, None)
            if reports:
                self.counts = replace(self.counts, evictions=self.counts.evictions + len(gone))

    def prefetched(self) -> None:
        """Count an adapter that was read in the background."""
        with self._lock:
            self.counts = replace(self.counts, prefetched=self.counts.prefetched + 1)

    @contextmanager
    def recompiles(self, guard: AbstractContextManager[None]) -> Iterator[None]:
        """Be in ``guard``, and count it if that raises `RecompileError`."""
        try:
            with guard:
                yield
        except RecompileError:
            with self._lock:
                self.counts = replace(self.counts, recompiles=self.counts.recompiles + 1)
            raise
