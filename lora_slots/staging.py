"""Adapter + Layout -> StagedAdapter: checked, cast, rank-major and packed. Writes into no model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lora_slots.errors import (
    AdapterFileError,
    AttachError,
    RankTooLargeError,
    TargetMismatchError,
)
from lora_slots.layout import Layout, Target
from lora_slots.resolve import Adapter, LoraModule

# What stands in for a dtype that numpy does not have, by size in bytes.
_SAME_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class StagedAdapter:
    """An adapter on the host, ready to be copied into slots row by row. Immutable.

    The tensors of one dtype share one packed block, so that finiteness is one reduction.

    Attributes:
        source: Where the adapter was read from.
        targets: Indices of its target modules in the layout.
        scaling: ``alpha / r`` or ``alpha / sqrt(r)``, one per target module.
        lora_A: ``[r, in]`` each, in the dtype of the module's buffers.
        lora_B: ``[r, out]`` each, likewise.
        blocks: The memory that they share, one block per dtype; none in a copy.
    """

    source: str
    targets: tuple[int, ...]
    scaling: tuple[float, ...]
    lora_A: tuple[Tensor, ...]
    lora_B: tuple[Tensor, ...]
    blocks: tuple[Tensor, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of each target module."""
        return tuple(A.shape[0] for A in self.lora_A)

    @property
    def nbytes(self) -> int:
        """The size of its tensors in bytes."""
        return sum(t.numel() * t.element_size() for t in (*self.lora_A, *self.lora_B))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle each tensor alone: a view would bring the whole block along."""
        sides = (tuple(part.clone() for part in side) for side in (self.lora_A, self.lora_B))
        return type(self), (self.source, self.targets, self.scaling, *sides)


def stage(
    adapter: Adapter, layout: Layout, *, max_rank: int, spare: Sequence[Tensor] = ()
) -> StagedAdapter:
    """Check an adapter against the buffers it is meant for, and copy it into packed host memory.

    Args:
        adapter: What to stage; its tensors are only read.
        layout: The model's target modules, with slots attached.
        max_rank: The number of rows of a slot.
        spare: Host memory that may be overwritten and kept, to spare the cost of fresh pages.

    Raises:
        RankTooLargeError: A rank is above ``max_rank``.
        TargetMismatchError: An input or output size is not the live layer's.
        AttachError: A buffer is on ``meta`` and can hold nothing.
        AdapterFileError: A value is NaN or infinite, in the file or after the cast to the buffers'
            dtype.
    """
    _check_ranks(adapter, max_rank)
    for module in adapter.modules:
        _check_target(module, layout.targets[module.target], adapter)
    return _pack(adapter, layout, spare)


def _check_ranks(adapter: Adapter, max_rank: int) -> None:
    largest = max(adapter.modules, key=lambda module: module.rank)
    if largest.rank > max_rank:
        raise RankTooLargeError(
            f"adapter {adapter.source} has rank {largest.rank} at {largest.path}, but max_rank is "
            f"{max_rank}; build the SlotManager with max_rank={largest.rank}"
        )


def _check_target(module: LoraModule, target: Target, adapter: Adapter) -> None:
    for side, tensor in (("lora_A", module.lora_A), ("lora_B", module.lora_B)):
        if tensor.is_meta or tensor.layout is not torch.strided:
            what = "is on the meta device" if tensor.is_meta else f"has layout {tensor.layout}"
            raise AdapterFileError(
                f"{side} of {module.path} in adapter {adapter.source} {what}; only dense tensors "
                "with data can be loaded"
            )
    shapes = (tuple(module.lora_A.shape), tuple(module.lora_B.shape))
    fitting = ((module.rank, target.in_features), (target.out_features, module.rank))
    if shapes != fitting:
        raise TargetMismatchError(
            f"{target.path} has in_features={target.in_features} and "
            f"out_features={target.out_features}, so lora_A must be {fitting[0]} and lora_B "
            f"{fitting[1]}; adapter {adapter.source} has {shapes[0]} and {shapes[1]}: it was made "
            "for another model"
        )
    if target.slots.lora_A.is_meta:
        raise AttachError(
            f"the slot of {target.path} is on the meta device and can hold no adapter; give the "
            "model real weights before building the SlotManager"
        )


def _pack(adapter: Adapter, layout: Layout, spare: Sequence[Tensor]) -> StagedAdapter:
    """Copy all tensors into one block per dtype: first every lora_A, then every lora_B."""
    positions: dict[torch.dtype, list[int]] = defaultdict(list)
    for position, module in enumerate(adapter.modules):
        positions[layout.targets[module.target].slots.lora_A.dtype].append(position)
    lora_A: dict[int, Tensor] = {}
    lora_B: dict[int, Tensor] = {}
    blocks = []
    for dtype, chosen in positions.items():
        modules = [adapter.modules[position] for position in chosen]
        A = [module.lora_A.detach() for module in modules]
        B = [module.lora_B.detach() for module in modules]
        sizes = [part.numel() for part in (*A, *B)]
        block = _memory(sum(sizes), dtype, spare)
        flat = torch.split(block, sizes)
        rows_A = [view.view(part.shape) for view, part in zip(flat, A, strict=False)]
        rows_B = [view.view(part.shape[::-1]) for view, part in zip(flat[len(A) :], B, strict=True)]
        torch._foreach_copy_(rows_A, A)
        for rows, part in zip(rows_B, B, strict=True):
            _copy_transposed(rows, part)
        _check_finite(block, modules, rows_A, rows_B, adapter)
        blocks.append(block)
        lora_A.update(zip(chosen, rows_A, strict=True))
        lora_B.update(zip(chosen, rows_B, strict=True))
    order = range(len(adapter.modules))
    return StagedAdapter(
        source=adapter.source,
        targets=tuple(module.target for module in adapter.modules),
        scaling=tuple(module.scaling for module in adapter.modules),
        lora_A=tuple(lora_A[position] for position in order),
        lora_B=tuple(lora_B[position] for position in order),
        blocks=tuple(blocks),
    )


def _memory(numel: int, dtype: torch.dtype, spare: Sequence[Tensor]) -> Tensor:
    """Host memory for ``numel`` elements: spare memory of that dtype where the size is right."""
    for block in spare:
        whole = torch.empty(0, dtype=dtype, device="cpu").set_(block.untyped_storage())
        if block.dtype == dtype and whole.numel() // 2 <= numel <= whole.numel():
            return whole[:numel]
    return torch.empty(numel, dtype=dtype, device="cpu")


def _copy_transposed(rows: Tensor, part: Tensor) -> None:
    """Copy ``part [out, r]`` into ``rows [r, out]``; numpy is faster where nothing is cast."""
    if rows.dtype == part.dtype and part.device == rows.device and rows.itemsize in _SAME_SIZE:
        same_size = _SAME_SIZE[rows.itemsize]
        np.copyto(rows.view(same_size).numpy(), part.view(same_size).numpy().T)
    else:
        rows.copy_(part.t())


def _check_finite(
    block: Tensor,
    modules: list[LoraModule],
    rows_A: list[Tensor],
    rows_B: list[Tensor],
    adapter: Adapter,
) -> None:
    # NaN and infinity both reach the smallest or the largest value: one pass, nothing allocated.
    smallest, largest = torch.aminmax(block)
    if torch.isfinite(smallest) and torch.isfinite(largest):
        return
    for module, A, B in zip(modules, rows_A, rows_B, strict=True):
        for side, rows, part in (("lora_A", A, module.lora_A), ("lora_B", B, module.lora_B)):
            bad = int((~torch.isfinite(rows)).sum())
            if bad == 0:
                continue
            where = f"{side} of {module.path} in adapter {adapter.source}"
            bad_in_file = int((~torch.isfinite(part.float() if part.itemsize == 1 else part)).sum())
            if bad_in_file:
                raise AdapterFileError(
                    f"{where} has {bad_in_file} NaN or infinite values of {part.numel()}"
                )
            raise AdapterFileError(
                f"{where} has {bad} values of {part.numel()} that are finite in its {part.dtype} "
                f"but not in the buffers' {rows.dtype}; build the SlotManager with "
                "dtype=torch.float32"
            )
