"""What a load of a file comes to, but for its values: known before for a file with its header.

Adapters of one trainer differ in their values alone. What `resolve` and the checks of `stage` make
of them is the same then, unless it depends on values, and need not be found again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lora_slots.layers import SlotLayer
from lora_slots.layout import Layout
from lora_slots.reading import RawAdapter
from lora_slots.reading.mapped import Cut, MappedTensors
from lora_slots.report import LoadReport
from lora_slots.resolve.resolving import Adapter
from lora_slots.staging.packing import Packing
from lora_slots.staging.stage import as_rows, by_buffer
from lora_slots.staging.staged import Bits, Spare, StagedAdapter, StagedRows, blocks_of


@dataclass(frozen=True, eq=False)
class Outline:
    """What becomes of a file whose tensors each go into one buffer as they are.

    Attributes:
        staged: What was staged, less the rows that a file has values for.
        report: What a load of it reports.
        base_model: The base model that the adapter names, or empty.
    """

    staged: StagedAdapter
    report: LoadReport
    base_model: str
    # Of each part: where the file has it, and the slots that it goes into.
    _cuts: tuple[Cut, ...]
    _slots: tuple[SlotLayer, ...]
    # The names of those tensors that are not of their buffer's dtype, by the index of the part.
    _cast: Mapping[int, str]
    _packing: Packing

    @classmethod
    def of(
        cls,
        raw: RawAdapter,
        adapter: Adapter,
        layout: Layout,
        staged: StagedAdapter,
        report: LoadReport,
    ) -> Outline | None:
        """The outline of ``raw``, and of what was made of it.

        None where a file with the same header might come to something else. Where a tensor was left
        out, used twice, in part or not as it is, its values may have decided that.
        """
        tensors, packing = raw.tensors, _packing_of(staged)
        if not isinstance(tensors, MappedTensors) or packing is None:
            return None
        if adapter.skipped or adapter.compressed:
            return None
        keys = {id(tensor): key for key, tensor in tensors.items()}
        cuts: list[Cut] = []
        slots: list[SlotLayer] = []
        cast: dict[int, str] = {}
        for module in adapter.modules:
            if module.magnitude is not None or module.outer is not None or module.others:
                return None
            target = layout.targets[module.target]
            for name, tensor in (("lora_A", module.lora_A), ("lora_B", module.lora_B)):
                key = keys.pop(id(tensor), None)
                if key is None or tensor is None:
                    return None
                if tensor.dtype != packing.parts[len(cuts)].dtype:
                    cast[len(cuts)] = key
                cuts.append(tensors.cut(key, transposed=name == "lora_B"))
                slots.append(target.slots)
        if keys:
            return None
        return cls(
            staged=replace(staged, rows={"scaling": staged.rows["scaling"]}, blocks=()),
            report=replace(report, scaling=dict(report.scaling)),
            base_model=adapter.base_model,
            _cuts=tuple(cuts),
            _slots=tuple(slots),
            _cast=cast,
            _packing=packing,
        )

    def stage(self, raw: RawAdapter, spare: Spare) -> StagedAdapter | None:
        """Copy the values of a file into packed host memory, as `stage` does.

        Args:
            raw: A file with the header and the config that the outline was made of.
            spare: Gives an adapter whose memory may be overwritten and kept.

        Returns:
            None where `stage` has more to say: a value is not finite, or a buffer was replaced by
            one of another dtype or on another device.
        """
        tensors = raw.tensors
        assert isinstance(tensors, MappedTensors)
        for slots, part in zip(self._slots, self._packing.parts, strict=True):
            buffer = slots._buffers.get(part.buffer)
            if buffer is None or buffer.dtype != part.dtype or buffer.device != part.device:
                return None
        sources: list[Tensor | Bits] = [*tensors.take(self._cuts)]
        # What inference_mode makes could not be overwritten outside of it.
        with torch.inference_mode(False), torch.no_grad():
            for index, key in self._cast.items():
                sources[index] = as_rows(self._packing.parts[index].buffer, tensors[key])
            blocks, rows = self._memory(spare())
            if not self._packing.fill(blocks, sources):
                return None
        return replace(self.staged, source=raw.source, rows=rows, blocks=blocks)

    def _memory(
        self, spare: StagedAdapter | None
    ) -> tuple[tuple[Tensor, ...], Mapping[str, StagedRows]]:
        """Blocks to fill, and the rows in them: those of ``spare`` where they are laid out so."""
        if spare is not None and _packing_of(spare) is self._packing:
            return spare.blocks, spare.rows
        blocks = self._packing.blocks(blocks_of(spare))
        rows = by_buffer(self._packing, self._packing.views(blocks))
        return tuple(blocks), {**self.staged.rows, **rows}

    def report_of(self, staged: StagedAdapter) -> LoadReport:
        """What a load of ``staged`` reports: nothing that others could change."""
        return replace(
            self.report,
            source=staged.source,
            scaling=dict(self.report.scaling),
            nbytes=staged.nbytes,
            compressed={},
        )


def _packing_of(staged: StagedAdapter) -> Packing | None:
    """How its low-rank pairs are packed; None if it has none, or is a copy."""
    rows = staged.rows.get("lora_A")
    return None if rows is None else rows.packing
