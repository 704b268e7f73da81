"""SlotManager: names, slots, and who is active. It conducts and computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import nn

from lora_slots import trials
from lora_slots.attach.attachment import Attachment, manager_of
from lora_slots.attach.choices import ALL_LINEAR, TargetModules
from lora_slots.attach.components import root_of
from lora_slots.bank.bank import Bank
from lora_slots.bank.buckets import RankBuckets
from lora_slots.catalogue import Catalogue, CatalogueEntry
from lora_slots.changing import Changes
from lora_slots.errors import ArgumentError
from lora_slots.holding import HoldLock
from lora_slots.inspecting.fitting import fit
from lora_slots.loading import CompressTo, Loader
from lora_slots.options import OnFull, Options
from lora_slots.prefetching import Prefetch, Prefetcher
from lora_slots.reading import RawAdapter, Source
from lora_slots.report import LoadReport
from lora_slots.roster import Roster, names_in
from lora_slots.routing import Expand, Row
from lora_slots.status import ManagerStatus, status_of
from lora_slots.tally import Tally

# An nn.Module, a mapping of names to modules, or a diffusers pipeline, which has no common base.
Model = nn.Module | Mapping[str, nn.Module] | Any


class SlotManager:
    """Loads LoRA adapters into fixed buffers of a model, so that compiled code never changes.

    Constructing one gives every target module a slot layer whose buffers are zero: the model's
    output stays what it was. It should be built before `torch.compile`.

    A copy or a pickle of the model brings its own manager along. One component of a pipeline brings
    the others along with it: copy the pipeline, or all its components together.

    Args:
        model: Any `nn.Module`, plain or compiled; a compiled one is unwrapped, with a warning that
            it will be compiled once more. It is changed in place; `detach` undoes that. Or several
            modules that one adapter is for: a diffusers pipeline, meaning the components that
            diffusers loads LoRA into, or a mapping such as
            ``{"unet": unet, "text_encoder": text_encoder}``. Their modules are then named with the
            component first: ``"unet.conv_in"``.
        max_rank: The largest rank of an adapter that can be loaded.
        num_slots: How many adapters can be loaded at a time.
        target_modules: Which modules take adapters, as PEFT means it: ``"all-linear"`` (all but
            the output embeddings), a regular expression for whole names, or a collection of names
            and suffixes of names. In a pipeline that is asked of each component on its own, where
            names are those within the component; or give a mapping of components to any of these.
            Names may also be those of parameters that a module reads by itself, with two or three
            dimensions, such as ``"mlp.experts.gate_up_proj"``: what PEFT calls target_parameters.
        dtype: The dtype of ``lora_A`` and ``lora_B``; None: each layer's compute dtype.
        dora: Whether slots shall have room for DoRA adapters, which costs ``4 * out`` floats per
            slot and layer, and some time in each forward.
        bias: Whether slots shall have room for a bias, which costs ``out`` floats per slot and
            layer.
        token_rows: For how many trained rows of the embeddings (PEFT's ``trainable_token_indices``)
            each slot shall have room: of the model's input and output embeddings and of what is
            tied to them, or of every `nn.Embedding` where the model does not say which those are.
        full_modules: Ends of names of modules that an adapter may replace as a whole, such as
            ``["classifier"]``: what PEFT calls modules_to_save, with its meaning of names. All
            their parameters, and those of the modules in them, get room in full size once for each
            slot, and no low-rank slots.
        rank_budget: How many rows the slots share, from ``max_rank`` to ``num_slots * max_rank``.
            With fewer than the latter, an adapter takes as many as its largest rank needs, in
            multiples of 8 (or ``max_rank`` itself), and a load moves those of others together where
            the free ones are scattered. None: ``max_rank`` for each slot, which never move.
        rank_buckets: How many rows a forward may compute with; it then computes with the smallest
            number that the active adapters fit into, not with all that there are, and with 0 it
            costs nothing. ``"auto"`` means nothing, a sixteenth, a quarter and all of
            them. Each number is one more graph, compiled at its first use (see `warmup`) and never
            again. Making an adapter active may then copy its rows to where they are seen. None: one
            graph, all rows.
        cache_bytes: How many bytes of adapters to keep on the host as they are written into slots,
            those used last, so that loading one again reads no file. A file is known by its path,
            inode, size and time of change, and is read again whenever one of these is another.
            `prefetch` reads adapters into this cache.
        on_full: What a load does that finds no free slot, or too few free rows: ``"error"`` raises,
            ``"evict"`` unloads the adapters that were not used for longest, as few as it needs, but
            none that is active, routed or pinned. Any call that names an adapter uses it, and so
            does every moment in which it is active or routed.
        routing: Whether `route` can give the rows of a batch adapters of their own. The first
            forward after that is one more graph, and so is each ``expand``.

    Raises:
        ArgumentError: An argument has no meaning.
        TargetMismatchError: ``target_modules`` or ``full_modules`` matches nothing, or what takes
            no adapters; or both match one module; or one that cannot tell rows apart, with
            ``routing``.
        AttachError: The model has a manager or PEFT layers already, is sharded, would ignore its
            slots, or inductor's ``freezing`` is on.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_rank: int,
        num_slots: int = 1,
        target_modules: TargetModules = ALL_LINEAR,
        dtype: torch.dtype | None = None,
        dora: bool = False,
        bias: bool = False,
        token_rows: int = 0,
        full_modules: Collection[str] = (),
        rank_budget: int | None = None,
        rank_buckets: RankBuckets = None,
        cache_bytes: int = 0,
        on_full: OnFull = "error",
        routing: bool = False,
    ) -> None:
        """Attach slots to ``model``; see the class."""
        options = Options(
            max_rank=max_rank,
            num_slots=num_slots,
            target_modules=target_modules,
            dtype=dtype,
            dora=bool(dora),
            bias=bool(bias),
            token_rows=token_rows,
            full_modules=full_modules,
            rank_budget=rank_budget,
            rank_buckets=rank_buckets,
            cache_bytes=cache_bytes,
            on_full=on_full,
            routing=bool(routing),
        )
        self._attachment = Attachment(model, options)
        self._layout = self._attachment.layout
        self._lock = HoldLock()
        self._bank = Bank(
            self._layout,
            self._lock,
            max_rank=max_rank,
            num_slots=num_slots,
            rows=options.rows,
            buckets=options.buckets,
            routing=options.routing,
        )
        self._loader = Loader(self._layout, max_rank=max_rank, cache_bytes=cache_bytes)
        self._catalogue = Catalogue(max_rank)
        self._tally = Tally()
        self._changes = Changes(
            self._attachment,
            self._lock,
            self._bank,
            self._loader,
            self._catalogue,
            self._tally,
            evict=on_full == "evict",
        )
        self._prefetcher = Prefetcher()
        self._attachment.belong_to(self)

    @classmethod
    def from_adapters(cls, model: Model, paths: Iterable[Source], **kwargs: Any) -> Self:
        """Build a manager that fits the given adapters; it loads none of them.

        ``max_rank`` becomes their largest rank, ``target_modules`` the union of their modules, and
        ``dora``, ``bias``, ``full_modules`` and ``token_rows`` what they need, where not given. Of
        low-rank tensors only the headers are read, so that the rank of projections that a file
        fuses is an upper bound.

        Args:
            model: As for `SlotManager`.
            paths: Adapters, as for `inspect_adapter`.
            **kwargs: Arguments of `SlotManager`; they win over what is found.

        Raises:
            AdapterFileError: An adapter cannot be read.
            UnsupportedAdapterError: An adapter uses a feature that is not applied here.
            TargetMismatchError: A module of an adapter is none of this model's, and
                ``target_modules`` is not given.
        """
        sources = list(paths)
        if not sources:
            raise ArgumentError("paths must name at least one adapter, got none")
        found = fit(root_of(model), sources, strict="target_modules" not in kwargs)
        return cls(model, **(found | kwargs))

    @classmethod
    def of(cls, model: Model) -> Self:
        """The manager that ``model``, plain or compiled, already has; or its components, or one.

        Raises:
            NotAttachedError: It has none, or its components have several.
        """
        return manager_of(model, cls)

    def load(
        self,
        source: Source | RawAdapter,
        adapter_name: str = "default",
        *,
        weight: float | None = None,
        activate: bool | None = None,
        pin: bool | None = None,
        strict: bool = True,
        compress_to: CompressTo = None,
    ) -> LoadReport:
        """Copy an adapter into a slot. Never recompiles; a failure changes nothing.

        A new name takes a free slot. A name that is loaded is hotswapped: it moves to a free slot,
        so that nothing is written over rows in use, or if there is none its slot is overwritten.
        Where there is no room, ``on_full`` says whether others are evicted, in the same write. Only
        what a forward would notice waits for those who `hold`.

        Args:
            source: A PEFT folder, a file, a hub id, or what `read_adapter` returned.
            adapter_name: Any non-empty string.
            weight: The multiplier of the adapter's own scaling; None: 1.0 for a new name, unchanged
                for a loaded one.
            activate: True makes it the only active adapter, False an inactive one; None: True for a
                new name, unchanged for a loaded one.
            pin: Whether it is never evicted; `unload` still takes it out. None: False for a new
                name, unchanged for a loaded one.
            strict: Raise for modules that the model does not have and for tensors that slots cannot
                hold; otherwise skip and report them.
            compress_to: Truncate every module whose rank is above this one, from 1 to ``max_rank``,
                to the nearest update of this rank, and report the error; ``"max_rank"`` for as
                little as fits. None: exactly, or not at all.

        Raises:
            AdapterFileError: The file is missing, damaged, or has values that are not finite.
            UnsupportedAdapterError: It uses a feature that is not applied here.
            TargetMismatchError: Its modules or shapes do not fit the model.
            RankTooLargeError: A rank is above ``max_rank``, without ``compress_to``.
            NoFreeSlotError: The name is new and every slot is taken, or too few rows are free; with
                ``on_full="evict"`` only if too few adapters may go.
            ArgumentError: The name, the weight or ``compress_to`` has no meaning.
            AttachError: The manager was detached, or the model is in a state that ignores slots.
            HoldError: This thread holds.
        """
        return self._changes.load(
            source,
            adapter_name,
            weight=weight,
            activate=activate,
            pin=pin,
            strict=strict,
            compress_to=compress_to,
        )

    def check(
        self,
        source: Source | RawAdapter,
        adapter_name: str = "default",
        *,
        strict: bool = True,
        compress_to: CompressTo = None,
    ) -> LoadReport:
        """What `load` would report, or the error it would raise. Writes nothing."""
        return self._changes.check(source, adapter_name, strict=strict, compress_to=compress_to)

    def unload(self, adapter_name: str) -> None:
        """Empty the adapter's slot; the output is exactly what it was without it.

        Raises:
            UnknownAdapterError: No adapter of that name is loaded.
            HoldError: This thread holds, as for all changes below.
            AdapterInUseError: It is routed to a row.
        """
        self._changes.unload(adapter_name)

    def add(
        self,
        adapter_name: str,
        source: Source | RawAdapter,
        *,
        weight: float = 1.0,
        strict: bool = True,
        compress_to: CompressTo = None,
    ) -> None:
        """Say where an adapter is, so that it is loaded when it is needed. Reads nothing.

        `set_adapters`, `route` and `routed` load what they name and is in no slot; `prefetch`
        reads it before. A name that is loaded is used as it is, whatever the catalogue says.

        Args:
            adapter_name: Any non-empty string. A name that the catalogue has gets this source.
            source: As for `load`. A file is read whenever the adapter is loaded and the host has
                no copy; what `read_adapter` returned is kept.
            weight: The multiplier that it is loaded with. `set_adapters` sets another one; what
                `route` says multiplies it.
            strict: As for `load`.
            compress_to: As for `load`.

        Raises:
            ArgumentError: An argument has no meaning.
        """
        self._attachment.refuse_detached()
        self._catalogue.add(adapter_name, CatalogueEntry(source, weight, strict, compress_to))

    def remove(self, adapter_name: str) -> None:
        """Take an adapter out of the catalogue. Where it is loaded it stays so.

        Raises:
            UnknownAdapterError: The catalogue has no such name.
        """
        self._attachment.refuse_detached()
        self._catalogue.remove(adapter_name)

    @property
    def catalogue(self) -> Mapping[str, CatalogueEntry]:
        """Where each adapter is that `add` was told of, in that order: a view, always up to date.

        Take a ``dict`` of it where another thread may add while you go through it.
        """
        return self._catalogue.entries

    def prefetch(self, adapter_names: str | Iterable[str]) -> Prefetch:
        """Read adapters of the catalogue into the host cache, in background threads.

        Returns at once, and never touches a slot. What is loaded is left out. An adapter that is
        needed while it is being read is waited for, not read twice. One that cannot be read is no
        matter until it is needed; then its file is read again, and the error raised if there still
        is one. More adapters than ``cache_bytes`` has room for push out one another. Of a hub id
        only the download is kept.

        Args:
            adapter_names: Names in the catalogue, those needed first in front.

        Raises:
            UnknownAdapterError: A name is neither in the catalogue nor loaded.
            ArgumentError: ``cache_bytes`` is 0, or these are no names.
        """
        self._attachment.refuse_detached()
        if not self._loader.cache.limit:
            raise ArgumentError(
                "prefetch keeps adapters in the host cache, which has no room; build the "
                "SlotManager with cache_bytes, such as cache_bytes=1 << 30"
            )
        names = self._catalogue.missing(names_in(adapter_names), self._roster)
        return self._prefetcher.submit(list(names), self._changes.read_ahead)

    def set_adapters(
        self,
        adapter_names: str | Sequence[str],
        weights: float | Sequence[float] | None = None,
    ) -> None:
        """Make these, and only these, adapters active, as diffusers means it.

        Those of the catalogue that are in no slot are loaded first, as `load` does; what is seen
        changes once, when all are there. If one cannot be loaded, nothing changes.

        Args:
            adapter_names: Names that are loaded or in the catalogue; none deactivates all.
            weights: One multiplier for all, or one each; None: 1.0 each. There are no weights per
                component or block.

        Raises:
            UnknownAdapterError: A name is neither loaded nor in the catalogue.
            ArgumentError: Names repeat, or the weights are not finite numbers, one for each.
            LoraSlotsError: As `load` does, for what is loaded.
        """
        names = names_in(adapter_names)
        self._changes.make(lambda roster: roster.with_selected(names, weights), names)

    def set_weight(self, adapter_name: str, weight: float) -> None:
        """Set the multiplier of an adapter's own scaling; 0 takes it out, nothing compounds.

        The weight of an adapter that is not selected is kept until it is.

        Raises:
            UnknownAdapterError: No adapter of that name is loaded.
            ArgumentError: ``weight`` is not a finite number.
        """
        self._changes.make(lambda roster: roster.with_weight(adapter_name, weight))

    def disable_adapters(self) -> None:
        """Let no adapter contribute, whatever is loaded or set, until `enable_adapters`."""
        self._changes.make(lambda roster: roster.with_enabled(False))

    def enable_adapters(self) -> None:
        """Let the active adapters contribute again."""
        self._changes.make(lambda roster: roster.with_enabled(True))

    def route(self, adapter_names: Iterable[Row] | None, *, expand: Expand = None) -> None:
        """Give each row of the next forwards adapters of its own, whatever is active.

        Other names and weights in as many rows never recompile. Each row is computed with what its
        own adapters have, not with all slots; what the row that needs most has, all rows cost.
        Adapters of the catalogue that are in no slot are loaded first, as in `set_adapters`.

        Args:
            adapter_names: For each row of the leading dimension that layers see, a name that is
                loaded or in the catalogue, None for the base model, or a mapping of names to
                weights. The weights that the adapters have multiply these. None: go back to
                `set_adapters`, for all rows alike.
            expand: Where the model sees each row several times: ``"interleave"`` if those lie side
                by side (0 0 1 1: beams, ``num_return_sequences``), ``"tile"`` if the whole batch is
                repeated (0 1 0 1: classifier-free guidance).

        Raises:
            UnknownAdapterError: A name is neither loaded nor in the catalogue.
            ArgumentError: The rows have no meaning, or the manager was built without ``routing``.
                A forward whose leading dimension is another raises it, too; compiled, torch does.
            LoraSlotsError: As `load` does, for what is loaded.
        """
        self._changes.route(adapter_names, expand)

    def routed(
        self, adapter_names: Iterable[Row] | None, *, expand: Expand = None
    ) -> AbstractContextManager[None]:
        """`route` for as long as the context lasts; other threads wait for their turn to route.

        Raises:
            UnknownAdapterError: As in `route`.
            ArgumentError: As in `route`.
        """
        return self._changes.routed(adapter_names, expand)

    @property
    def routes(self) -> tuple[Mapping[str, float], ...] | None:
        """The adapters that each row is given, and their weights; None: rows are all alike."""
        routing = self._roster.routing
        return None if routing is None else routing.rows

    @property
    def loaded_adapters(self) -> tuple[str, ...]:
        """The names of all loaded adapters, in the order in which they were first loaded."""
        return tuple(self._roster.entries)

    @property
    def active_adapters(self) -> tuple[str, ...]:
        """The names of those that are selected and whose weight is not 0."""
        return tuple(name for name, entry in self._roster.entries.items() if entry.active)

    def hold(self) -> AbstractContextManager[None]:
        """A context in which no adapter changes: a forward sees the same ones in all its layers.

        Any number of threads hold at a time, and a thread may nest holds. A change in another
        thread waits until all have left, and new ones wait for it; what no forward would notice, as
        loading an adapter that is not activated into a free slot, does not wait. In a thread that
        holds, a change raises `HoldError`. Enter it outside of compiled code.

        On a GPU, what the current stream is given inside sees the same adapters, too, whenever the
        GPU comes to it: enter this inside of `torch.cuda.stream`.

        Raises:
            AttachError: The manager was detached.
        """
        self._attachment.refuse_detached()
        return self._bank.orders.forwards(self._lock.hold())

    def no_recompile(self, *, allow_first: bool = False) -> AbstractContextManager[None]:
        """A context that raises where code is compiled in the calling thread.

        What it raises is counted in ``status().counts.recompiles``.

        Args:
            allow_first: Whether code that was never compiled may be compiled.

        Raises:
            RecompileError: From the compiled call if a guard failed (``guard`` names it) or if
                compiled code fell back to eager; on leaving the context if code was compiled for
                the first time without ``allow_first``, or if the storage of a buffer changed.
        """
        self._attachment.refuse_detached()
        from lora_slots import guard  # Dynamo takes seconds to import.

        return self._tally.recompiles(guard.no_recompile(self._layout, allow_first=allow_first))

    def warmup(self, fn: Callable[[], object]) -> None:
        """Run ``fn`` once for each number of rows of ``rank_buckets``, so that all are compiled.

        What is loaded and active stays as it is, but is not applied in full meanwhile: the results
        of these runs mean nothing.

        Args:
            fn: Calls the compiled model as it will be used, for a prompt and for a token; in the
                thread that calls it, since all others that `hold` wait meanwhile.

        Raises:
            HoldError: This thread holds.
        """
        self._attachment.refuse_detached()
        trials.warmup(self._bank, self._lock, fn)

    def verify(self, fn: Callable[[], object]) -> None:
        """Run ``fn`` once, eagerly, and check that the model calls every target module.

        Catches layers whose weight the model reads without calling them, so that an adapter would
        be ignored. Compiled functions run eagerly meanwhile, in all threads.

        Args:
            fn: Calls the model as it will be used.

        Raises:
            TargetMismatchError: Lists the target modules that were never called.
        """
        self._attachment.refuse_detached()
        trials.verify(self._layout, fn)

    def status(self) -> ManagerStatus:
        """What is in slots, on the host and in the catalogue, what it costs, and what happened.

        Reads names, sizes and counts only, at once and in any thread. Printed, it is a table.
        """
        with self._attachment.staying():
            return status_of(
                self._bank, self._layout, self._loader.cache, len(self._catalogue), self._tally
            )

    def detach(self) -> None:
        """Take all slots away; classes, buffers and children are gone, and so is the manager.

        A compiled model compiles once more.

        Raises:
            AttachError: It was detached before, or the class of a target module was changed since;
                nothing is detached.
            HoldError: This thread holds.
        """
        self._changes.detach()
        self._prefetcher.stop()
        # A manager that is kept around keeps no buffers and no host copies alive.
        del self._bank, self._layout, self._loader

    def __repr__(self) -> str:
        """Show the sizes and what is loaded."""
        if "_bank" not in vars(self):
            return "SlotManager(detached)"
        return (
            f"SlotManager({self._attachment}, max_rank={self._bank.max_rank}, "
            f"num_slots={self._bank.num_slots}, loaded={list(self.loaded_adapters)})"
        )

    @property
    def _roster(self) -> Roster:
        bank = vars(self).get("_bank")
        return Roster(0) if bank is None else bank.state.roster
