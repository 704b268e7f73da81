"""What a change is: read what it needs, make room, enter the bank, and count it; all or nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from lora_slots.attach.attachment import Attachment
from lora_slots.attach.refusals import refuse_fast_path
from lora_slots.bank.bank import Bank
from lora_slots.catalogue import Catalogue, CatalogueEntry
from lora_slots.errors import ArgumentError
from lora_slots.holding import HoldLock
from lora_slots.loading import CompressTo, Loader, Prepared
from lora_slots.reading import RawAdapter, Source
from lora_slots.report import LoadReport
from lora_slots.roster import Roster, check_name
from lora_slots.routing import Expand, Routing, Row, Turn
from lora_slots.staging.staged import StagedAdapter, nothing_to_spare
from lora_slots.tally import Tally


class Changes:
    """Changes what is in slots and who is active, in one model, for any number of threads.

    Every change has two steps. The first prepares what is not in a slot: it reads and stages,
    writes nothing, and needs no lock. The second, which one thread makes at a time, makes room and
    lets the bank enter a new roster. Others may have made changes in between, so it looks again at
    all that the first one saw. Whatever raises has changed nothing.

    `SlotManager` says what the changes mean, and what they raise.
    """

    def __init__(
        self,
        attachment: Attachment,
        lock: HoldLock,
        bank: Bank,
        loader: Loader,
        catalogue: Catalogue,
        tally: Tally,
        *,
        evict: bool,
    ) -> None:
        """Change what these hold.

        Args:
            attachment: The model.
            lock: Keeps others out: of changes, and of forwards meanwhile.
            bank: What is in slots.
            loader: Prepares adapters.
            catalogue: Where those are that are loaded when they are needed.
            tally: Counts what was done.
            evict: Whether adapters may be evicted for others.
        """
        self._attachment = attachment
        self._lock = lock
        self._bank = bank
        self._loader = loader
        self._catalogue = catalogue
        self._tally = tally
        self._evict = evict
        self._turn = Turn()

    def load(
        self,
        source: Source | RawAdapter,
        adapter_name: str,
        *,
        weight: float | None,
        activate: bool | None,
        pin: bool | None,
        strict: bool,
        compress_to: CompressTo,
    ) -> LoadReport:
        """Load an adapter into a slot."""
        self._lock.refuse_holder()  # an error here saves the reading
        self._attachment.refuse_detached()
        self._make_room(adapter_name)  # and so does one here
        prepared = self._prepare(source, strict, compress_to)
        with self._lock.changing():
            self._attachment.refuse_detached()
            roster, evicted = self._make_room(adapter_name, prepared.staged)
            roster = roster.with_loaded(adapter_name, weight=weight, activate=activate, pin=pin)
            (report,) = self._enter(roster, {adapter_name: prepared}, evicted)
            return report

    def check(
        self,
        source: Source | RawAdapter,
        adapter_name: str,
        *,
        strict: bool,
        compress_to: CompressTo,
    ) -> LoadReport:
        """Do all of a load but the write."""
        self._attachment.refuse_detached()
        self._make_room(adapter_name)  # an error here saves the reading
        prepared = self._prepare(source, strict, compress_to, reuse=False)
        self._attachment.refuse_detached()
        roster, evicted = self._make_room(adapter_name, prepared.staged)
        return prepared.report(adapter_name, roster.slot_for(adapter_name), evicted)

    def unload(self, adapter_name: str) -> None:
        """Empty the slot of an adapter."""
        with self._lock.changing():
            self._attachment.refuse_detached()
            self._enter(self._roster.without(adapter_name))

    def make(
        self,
        change: Callable[[Roster], Roster],
        adapter_names: Collection[str] = (),
        prepared: Mapping[str, Prepared] | None = None,
    ) -> None:
        """Change who is active, and load those of these adapters that are not.

        Args:
            change: What to make of a roster that has all of ``adapter_names``.
            adapter_names: The adapters that it needs.
            prepared: Those that are ready to be loaded.
        """
        self._lock.refuse_holder()
        ready = dict(prepared or {})
        while True:  # since others unload meanwhile
            self._attachment.refuse_detached()
            missing = self._missing(adapter_names)
            unread = {name: entry for name, entry in missing.items() if name not in ready}
            if unread:
                self._changed(change, adapter_names, missing, ready)  # an error saves the reading
                ready |= self._prepare_all(unread)
            with self._lock.changing():
                self._attachment.refuse_detached()
                refuse_fast_path(self._attachment.layout)
                missing = self._missing(adapter_names)
                if missing.keys() <= ready.keys():
                    roster = self._changed(change, adapter_names, missing, ready)
                    self._enter(roster, {name: ready[name] for name in missing})
                    return

    def route(self, adapter_names: Iterable[Row] | None, expand: Expand) -> None:
        """Give rows adapters of their own."""
        routing, names = self._routing_of(adapter_names, expand)
        prepared = self._prepare_all(self._missing(names))
        with self._turn:
            self.make(lambda roster: roster.with_routing(routing), names, prepared)

    @contextmanager
    def routed(self, adapter_names: Iterable[Row] | None, expand: Expand) -> Iterator[None]:
        """`route` until the context is left."""
        routing, names = self._routing_of(adapter_names, expand)
        prepared = self._prepare_all(self._missing(names))
        with self._turn:
            self.make(lambda roster: roster.with_routing(routing, nested=True), names, prepared)
            try:
                yield
            finally:
                self.make(Roster.without_routing)

    def read_ahead(self, adapter_name: str) -> None:
        """Bring an adapter of the catalogue into the host cache: only the first step."""
        self._attachment.refuse_detached()
        cache = self._loader.cache  # which is gone if the manager is detached meanwhile
        prepared = self._prepare_entry(self._catalogue[adapter_name])
        cache.check_size(prepared.staged)
        if not prepared.cached:
            self._tally.prefetched()

    def detach(self) -> None:
        """Take the slots away: the last change."""
        with self._lock.changing():
            self._attachment.refuse_detached()
            self._lock.alone(self._detach)

    def _detach(self) -> None:
        self._attachment.detach()
        del self._bank, self._loader

    @property
    def _roster(self) -> Roster:
        return self._bank.state.roster

    def _missing(self, adapter_names: Iterable[str]) -> dict[str, CatalogueEntry]:
        """Those of these adapters that are not loaded."""
        return self._catalogue.missing(adapter_names, self._roster)

    def _routing_of(
        self, adapter_names: Iterable[Row] | None, expand: Expand
    ) -> tuple[Routing | None, list[str]]:
        """What to route, and the names in it."""
        self._attachment.refuse_detached()
        self._lock.refuse_holder()
        if not self._bank.routing:
            raise ArgumentError(
                "this SlotManager tells no rows apart; build it with routing=True to route"
            )
        if adapter_names is None:
            return None, []
        routing = Routing.of(adapter_names, expand)
        return routing, routing.names

    def _prepare(
        self,
        source: Source | RawAdapter,
        strict: bool,
        compress_to: CompressTo,
        *,
        reuse: bool = True,
    ) -> Prepared:
        """The part of a load that writes nothing; ``reuse``: into memory that a load has left."""
        with self._attachment.staying():
            self._attachment.refuse_ignored_slots()
            spare = self._bank.take_spare if reuse else nothing_to_spare
            return self._loader.prepare(source, strict=strict, compress_to=compress_to, spare=spare)

    def _prepare_entry(self, entry: CatalogueEntry) -> Prepared:
        prepared = self._prepare(entry.source, entry.strict, entry.compress_to)
        return replace(prepared, weight=entry.weight)  # `add` may know another one by now

    def _prepare_all(self, entries: Mapping[str, CatalogueEntry]) -> dict[str, Prepared]:
        return {name: self._prepare_entry(entry) for name, entry in entries.items()}

    def _make_room(
        self, adapter_name: str, staged: StagedAdapter | None = None
    ) -> tuple[Roster, tuple[str, ...]]:
        """The roster that has room for an adapter, and who is evicted for that."""
        check_name(adapter_name)
        with self._attachment.staying():
            return self._bank.make_room({adapter_name: staged}, evict=self._evict)

    def _changed(
        self,
        change: Callable[[Roster], Roster],
        adapter_names: Iterable[str],
        missing: Mapping[str, CatalogueEntry],
        ready: Mapping[str, Prepared],
    ) -> Roster:
        """The roster after a change for which ``missing`` are loaded, and others may be evicted."""
        roster = self._roster
        for name, entry in missing.items():
            roster = roster.with_new(name, weight=ready.get(name, entry).weight)
        roster = change(roster)
        if not missing:
            return roster
        staged = {name: ready[name].staged for name in missing if name in ready}
        wanted = dict.fromkeys(adapter_names) | staged
        # What the change takes out of use may go.
        roster, _ = self._bank.make_room(wanted, evict=self._evict, roster=roster)
        return roster.with_slots()

    def _enter(
        self,
        roster: Roster,
        prepared: Mapping[str, Prepared] | None = None,
        evicted: tuple[str, ...] = (),
    ) -> list[LoadReport]:
        """Bring the model to a roster, for which these were prepared; what is seen changes once."""
        before, prepared = self._roster, prepared or {}
        if prepared or roster.entries.keys() != before.entries.keys():
            staged = {roster[name].slot: each.staged for name, each in prepared.items()}
            self._bank.write(staged, roster)
        else:
            self._bank.set_weights(roster)
        reports = [each.report(name, roster[name].slot, evicted) for name, each in prepared.items()]
        self._tally.changed(before, roster, reports)
        return reports
