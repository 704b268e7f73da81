"""What managers did and hold, for Prometheus. Needs the extra ``metrics``."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from itertools import accumulate

from lora_slots.errors import ArgumentError, AttachError
from lora_slots.manager import SlotManager
from lora_slots.status import ManagerStatus
from lora_slots.tally import SWAP_SECONDS

try:
    from prometheus_client.core import (
        REGISTRY,
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector, CollectorRegistry
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "lora_slots.metrics needs prometheus_client; pip install 'lora_slots[metrics]'",
        name=error.name,
    ) from error

_BOUNDS = (*map(str, SWAP_SECONDS), "+Inf")
_collectors: weakref.WeakKeyDictionary[CollectorRegistry, _Managers] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def export(manager: SlotManager, registry: CollectorRegistry = REGISTRY, **labels: str) -> None:
    """Export what a manager did and holds, under names that begin with ``lora_slots_``.

    The numbers are those of ``manager.status()`` at the moment in which they are asked for. Several
    managers may be exported to one registry, with labels that tell them apart. One that was
    detached, or whose model is gone, is left out from then on.

    Args:
        manager: The manager; it is not kept alive.
        registry: Where to export it to.
        **labels: Labels of all its numbers, such as ``model="chat"``.

    Raises:
        ArgumentError: A manager that is exported there has the same labels, or other ones by name.
    """
    values = {name: str(value) for name, value in labels.items()}
    with _lock:
        known = _collectors.get(registry)
        if known is not None and not known.alive():
            known = None
        if known is None:
            known = _Managers(registry, tuple(values))
            registry.register(known)
            _collectors[registry] = known
        known.add(manager, values)


class _Managers(Collector):
    """All managers that are exported to one registry."""

    def __init__(self, registry: CollectorRegistry, names: tuple[str, ...]) -> None:
        self._registry = weakref.ref(registry)
        self._names = names
        self._managers: dict[tuple[str, ...], weakref.ref[SlotManager]] = {}

    def add(self, manager: SlotManager, labels: dict[str, str]) -> None:
        if labels.keys() != set(self._names):
            raise ArgumentError(
                f"all SlotManagers in a registry must have labels of the same names, "
                f"{list(self._names)}, got {list(labels)}"
            )
        values = tuple(labels[name] for name in self._names)
        if values in self._managers:
            raise ArgumentError(
                f"a SlotManager is exported with the labels {labels} already; tell them apart, as "
                'in export(manager, model="chat")'
            )
        self._managers[values] = weakref.ref(manager)

    def alive(self) -> dict[tuple[str, ...], ManagerStatus]:
        """The status of every manager, by its labels; forgets those that are gone."""
        found = {}
        with _lock:
            for values, reference in list(self._managers.items()):
                manager = reference()
                try:
                    if manager is not None:
                        found[values] = manager.status()
                        continue
                except AttachError:
                    pass
                del self._managers[values]
            if not found:
                self._unregister()
        return found

    def _unregister(self) -> None:
        registry = self._registry()
        if registry is not None and _collectors.get(registry) is self:
            del _collectors[registry]
            registry.unregister(self)

    def describe(self) -> Iterable[Metric]:
        """The names, which are asked for before there is a manager."""
        return _Families(self._names).all()

    def collect(self) -> Iterator[Metric]:
        """All numbers of all managers that are still there."""
        families = _Families(self._names)
        for values, status in self.alive().items():
            families.add(values, status)
        yield from families.all()


class _Families:
    """The metrics, each with the numbers of all managers."""

    def __init__(self, names: tuple[str, ...]) -> None:
        def counter(name: str, what: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"lora_slots_{name}", what, labels=names)

        def gauge(name: str, what: str, *more: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"lora_slots_{name}", what, labels=(*names, *more))

        self.loads = counter("loads", "Adapters written into slots")
        self.hits = counter("cache_hits", "Loads that found their adapter in the host cache")
        self.prefetched = counter("prefetched", "Adapters that were read in the background")
        self.evictions = counter("evictions", "Adapters that lost their slot to another one")
        self.recompiles = counter("recompiles", "Errors that no_recompile raised")
        self.written = counter("written_bytes", "Bytes that loads wrote into slots")
        self.seconds = HistogramMetricFamily(
            "lora_slots_swap_seconds", "How long loads took, reading included", labels=names
        )
        self.slots = gauge("slots", "Slots by what they do", "state")
        self.cached = gauge("cache_adapters", "Adapters in the host cache")
        self.cache_bytes = gauge("cache_bytes", "The size of the adapters in the host cache")
        self.limit = gauge("cache_limit_bytes", "The size that the host cache may have")
        self.known = gauge("catalogue_adapters", "Adapters in the catalogue")

    def all(self) -> list[Metric]:
        return list(vars(self).values())

    def add(self, labels: tuple[str, ...], status: ManagerStatus) -> None:
        counts, cache = status.counts, status.cache
        self.loads.add_metric(labels, counts.loads)
        self.hits.add_metric(labels, counts.cache_hits)
        self.prefetched.add_metric(labels, counts.prefetched)
        self.evictions.add_metric(labels, counts.evictions)
        self.recompiles.add_metric(labels, counts.recompiles)
        self.written.add_metric(labels, counts.nbytes)
        up_to = zip(_BOUNDS, map(float, accumulate(counts.swaps)), strict=True)
        self.seconds.add_metric(labels, list(up_to), counts.seconds)
        uses = [
            "free" if s.adapter_name is None else "used" if s.active or s.routed else "unused"
            for s in status.slots
        ]
        for use in ("used", "unused", "free"):
            self.slots.add_metric((*labels, use), uses.count(use))
        self.cached.add_metric(labels, cache.adapters)
        self.cache_bytes.add_metric(labels, cache.nbytes)
        self.limit.add_metric(labels, cache.limit)
        self.known.add_metric(labels, status.catalogue)
