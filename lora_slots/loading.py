"""The part of a load before anything is written: a path -> StagedAdapter, and what to report."""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from lora_slots.cache import Cached, StagedCache, base_state, identity
from lora_slots.errors import AdapterFileError
from lora_slots.layout import Layout
from lora_slots.reading import RawAdapter, Source, read_file
from lora_slots.reading.mapped import MappedTensors
from lora_slots.recent import Recent
from lora_slots.report import LoadReport
from lora_slots.resolve.pairing import read_settings
from lora_slots.resolve.resolving import Adapter, resolve
from lora_slots.staging.compress import compress, rank_limit
from lora_slots.staging.outline import Outline
from lora_slots.staging.stage import stage
from lora_slots.staging.staged import Spare, StagedAdapter, nothing_to_spare

CompressTo = int | Literal["max_rank"] | None
# What a config says of some modules only, which a load must look for in it.
_PATTERNS = ("rank_pattern", "alpha_pattern")
_MOST_OUTLINES = 32
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, eq=False)
class Prepared:
    """An adapter that is ready to be written.

    Attributes:
        staged: What to write.
        started: When the load began, by `time.perf_counter`.
        weight: Its multiplier, where a catalogue says so.
    """

    staged: StagedAdapter
    started: float
    _report: LoadReport
    weight: float = 1.0

    @property
    def cached(self) -> bool:
        """Whether it was on the host already."""
        return self._report.cached

    def report(self, adapter_name: str, slot: int, evicted: tuple[str, ...] = ()) -> LoadReport:
        """The report of a load that ends now."""
        seconds = time.perf_counter() - self.started
        return replace(
            self._report, adapter_name=adapter_name, slot=slot, evicted=evicted, seconds=seconds
        )


class Loader:
    """Reads, resolves and stages adapters for one model; keeps what it staged, if asked to.

    Args:
        layout: The target modules, with slots attached.
        max_rank: The largest rank of an adapter.
        cache_bytes: How many bytes of staged adapters to keep on the host.
    """

    def __init__(self, layout: Layout, *, max_rank: int, cache_bytes: int) -> None:
        """Start with an empty cache."""
        self.cache = StagedCache(cache_bytes)
        self._outlines: Recent[Hashable, Outline] = Recent(_MOST_OUTLINES)
        self._layout = layout
        self._max_rank = max_rank

    def prepare(
        self,
        source: Source | RawAdapter,
        *,
        strict: bool,
        compress_to: CompressTo,
        spare: Spare,
    ) -> Prepared:
        """Do all of a load that can fail, but for finding a slot. Writes nothing into the model.

        Args:
            source: As for `SlotManager.load`.
            strict: As for `SlotManager.load`.
            compress_to: As for `SlotManager.load`.
            spare: Gives an adapter whose memory may be overwritten and kept.

        Raises:
            LoraSlotsError: As `SlotManager.load` does.
        """
        started = time.perf_counter()
        rank = rank_limit(compress_to, self._max_rank)
        key = self._key(source, strict, rank)
        with self.cache.reading(key):
            known = self.cache.get(key, self._layout)
            if known is not None:
                return Prepared(known.staged, started, known.report)
            staged, report = self._stage(source, strict, rank, spare)
            if key is not None and key == self._key(source, strict, rank):
                base = base_state(staged, report, self._layout)
                self.cache.put(key, Cached(staged, replace(report, cached=True), base))
        return Prepared(staged, started, report)

    def _stage(
        self,
        source: Source | RawAdapter,
        strict: bool,
        rank: int | None,
        spare: Spare,
    ) -> tuple[StagedAdapter, LoadReport]:
        raw = source if isinstance(source, RawAdapter) else read_file(source)
        # What is cached must not be overwritten, so that there is nothing to spare.
        spare = nothing_to_spare if self.cache.limit else spare
        key = None if raw is source else _outlined_by(raw, strict, rank)
        outline = None if key is None else self._outlines.get(key)
        staged = None if outline is None else outline.stage(raw, spare)
        if outline is not None and staged is not None:
            read_settings(raw)  # which may warn
            self._warn_of_other_base(raw.source, outline.base_model)
            return staged, outline.report_of(staged)
        _check_dense(raw)
        adapter = resolve(raw, self._layout, strict=strict)
        self._warn_of_other_base(raw.source, adapter.base_model)
        if rank is not None:
            adapter = compress(adapter, rank, self._layout)
        staged = stage(adapter, self._layout, max_rank=self._max_rank, spare=spare())
        report = _report(adapter, staged)
        outline = None if key is None else Outline.of(raw, adapter, self._layout, staged, report)
        if outline is not None:
            self._outlines.put(key, outline)
        return staged, report

    def _key(self, source: Source | RawAdapter, strict: bool, rank: int | None) -> object:
        file = identity(source) if self.cache.limit else None
        return None if file is None else (file, bool(strict), rank)

    def _warn_of_other_base(self, source: str, theirs: str) -> None:
        ours = self._layout.model_name
        hub_ids = [n for n in (ours, theirs) if _HUB_ID.fullmatch(n) and not Path(n).exists()]
        if len(hub_ids) == 2 and ours.lower() != theirs.lower():
            warnings.warn(
                f"adapter {source} was trained on {theirs}, but this model is {ours}",
                stacklevel=7,
            )


def _outlined_by(raw: RawAdapter, strict: bool, rank: int | None) -> Hashable:
    """All but the values of its tensors that a load of a file depends on; None: values as well."""
    patterns = (config.get(key) for config in raw.all_configs for key in _PATTERNS)
    if not isinstance(raw.tensors, MappedTensors) or any(patterns):
        return None
    return raw.tensors.header, json.dumps([raw.config, raw.configs]), bool(strict), rank


def _check_dense(raw: RawAdapter) -> None:
    """Refuse tensors that are no plain numbers in memory.

    Raises:
        AdapterFileError: Names one.
    """
    for key, tensor in raw.tensors.items():
        if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_nested:
            what = "is sparse or nested"
            if tensor.is_meta:
                what = "has no values, since it is on the meta device"
            raise AdapterFileError(
                f"{key} in adapter {raw.source} {what}; only dense tensors with data can be loaded"
            )


def _report(adapter: Adapter, staged: StagedAdapter) -> LoadReport:
    return LoadReport(
        adapter_name="",
        slot=-1,
        source=adapter.source,
        rank=staged.rank,
        modules=tuple(module.path for module in adapter.modules),
        skipped=adapter.skipped,
        scaling={m.path: m.scaling for m in adapter.modules if m.lora_A is not None},
        nbytes=staged.nbytes,
        seconds=0.0,
        compressed=adapter.compressed,
    )
