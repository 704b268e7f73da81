"""What a load of a file comes to, but for its values: known before for a file with its header.

Adapters of one trainer differ in their values alone. What `resolve` and the checks of `stage` make
of them is the same then, unless it depends on values, and need not be found again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lora_slots.layout import Layout
from lora_slots.reading import RawAdapter
from lora_slots.reading.mapped import Cut, MappedTensors
from lora_slots.report import LoadReport
from lora_slots.resolve.resolving import Adapter
from lora_slots.staging.packing import NotFiniteError, pack
from lora_slots.staging.stage import as_rows, by_buffer, part_of
from lora_slots.staging.staged import StagedAdapter

# How many outlines are kept.
_MOST_KNOWN = 32


class _Way(NamedTuple):
    """The way of one tensor of a file into one buffer of one target module."""

    key: str
    dtype: torch.dtype
    cut: Cut
    target: int
    buffer: str


@dataclass(frozen=True, eq=False)
class Outline:
    """What becomes of a file whose tensors each go into one buffer as they are.

    Attributes:
        staged: What was staged, less its rows.
        report: What a load of it reports.
        base_model: The base model that the adapter names, or empty.
    """

    staged: StagedAdapter
    report: LoadReport
    base_model: str
    _ways: tuple[_Way, ...]

    @classmethod
    def of(
        cls, raw: RawAdapter, adapter: Adapter, staged: StagedAdapter, report: LoadReport
    ) -> Outline | None:
        """The outline of ``raw``, and of what was made of it.

        None where a file with the same header might come to something else. Where a tensor was left
        out, used twice, in part or not as it is, its values may have decided that.
        """
        if not isinstance(raw.tensors, MappedTensors) or adapter.skipped or adapter.compressed:
            return None
        keys = {id(tensor): key for key, tensor in raw.tensors.items()}
        ways = []
        for module in adapter.modules:
            if module.magnitude is not None or module.outer is not None or module.others:
                return None
            for buffer, tensor in (("lora_A", module.lora_A), ("lora_B", module.lora_B)):
                key = keys.pop(id(tensor), None)
                if key is None or tensor is None:
                    return None
                cut = raw.tensors.cut(key, transposed=buffer == "lora_B")
                ways.append(_Way(key, tensor.dtype, cut, module.target, buffer))
        if keys:
            return None
        bare = replace(staged, rows={}, blocks=())
        return cls(bare, report, adapter.base_model, tuple(ways))

    def stage(
        self, raw: RawAdapter, layout: Layout, spare: Sequence[Tensor]
    ) -> StagedAdapter | None:
        """Copy the values of a file into packed host memory, as `stage` does.

        Args:
            raw: A file with the header and the config that the outline was made of.
            layout: The model.
            spare: Host memory that may be overwritten and kept.

        Returns:
            None where a value is not finite, of which `stage` has more to say.

        Raises:
            AttachError: As `stage` does.
        """
        tensors = raw.tensors
        assert isinstance(tensors, MappedTensors)
        matrices = tensors.take([way.cut for way in self._ways])
        # What inference_mode makes could not be overwritten outside of it.
        with torch.inference_mode(False), torch.no_grad():
            parts = []
            for (key, dtype, _, target, buffer), bits in zip(self._ways, matrices, strict=True):
                part = part_of(layout.targets[target], target, buffer, bits)
                if part.dtype != dtype:
                    part = part._replace(rows=as_rows(buffer, tensors[key]))
                parts.append(part)
            try:
                views, blocks = pack(parts, list(spare))
            except NotFiniteError:
                return None
        rows = by_buffer(parts, views)
        return replace(self.staged, source=raw.source, rows=rows, blocks=tuple(blocks))

    def report_of(self, staged: StagedAdapter) -> LoadReport:
        """What a load of ``staged`` reports."""
        scaling = dict(self.report.scaling)  # others may have theirs
        return replace(self.report, source=staged.source, scaling=scaling, nbytes=staged.nbytes)


class Outlines:
    """The outlines of the files that were loaded last; for any threads."""

    def __init__(self) -> None:
        """Start empty."""
        self._known: OrderedDict[Hashable, Outline] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        """Copies and pickles start empty: they are of other models."""
        return type(self), ()

    def __len__(self) -> int:
        """How many outlines are kept."""
        return len(self._known)

    def get(self, key: Hashable) -> Outline | None:
        """The outline of a file, if it is known; ``key`` is all that it follows from."""
        with self._lock:
            outline = self._known.get(key)
            if outline is not None:
                self._known.move_to_end(key)
            return outline

    def put(self, key: Hashable, outline: Outline) -> None:
        """Keep an outline, and let go of the one not used for longest where there are too many."""
        with self._lock:
            self._known[key] = outline
            self._known.move_to_end(key)
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
