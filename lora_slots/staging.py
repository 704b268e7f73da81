"""Adapter + Layout -> StagedAdapter: checked, cast, rank-major and packed. Writes into no model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

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
    """

    source: str
    targets: tuple[int, ...]
    scaling: tuple[float, ...]
    lora_A: tuple[Tensor, ...]
    lora_B: tuple[Tensor, ...]

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

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return itself: nothing in it ever changes."""
        return self


def stage(adapter: Adapter, layout: Layout, *, max_rank: int) -> StagedAdapter:
    """Check an adapter against the buffers it is meant for, and copy it into packed host memory.

    Args:
        adapter: What to stage; its tensors are only read.
        layout: The model's target modules, with slots attached.
        max_rank: The number of rows of a slot.

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
    dtypes = [layout.targets[module.target].slots.lora_A.dtype for module in adapter.modules]
    lora_A = _pack(adapter, dtypes, lambda module: module.lora_A)
    # Transposed while it is copied, once: a slot is a run of rows in B as well.
    lora_B = _pack(adapter, dtypes, lambda module: module.lora_B.t())
    return StagedAdapter(
        source=adapter.source,
        targets=tuple(module.target for module in adapter.modules),
        scaling=tuple(module.scaling for module in adapter.modules),
        lora_A=lora_A,
        lora_B=lora_B,
    )


def _check_ranks(adapter: Adapter, max_rank: int) -> None:
    largest = max(adapter.modules, key=lambda module: module.rank)
    if largest.rank > max_rank:
        raise RankTooLargeError(
            f"adapter {adapter.source} has rank {largest.rank} at {largest.path}, but max_rank is "
            f"{max_rank}; build the SlotManager with max_rank={largest.rank}"
        )


def _check_target(module: LoraModule, target: Target, adapter: Adapter) -> None:
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


def _pack(
    adapter: Adapter, dtypes: list[torch.dtype], side: Callable[[LoraModule], Tensor]
) -> tuple[Tensor, ...]:
    """Copy one side of every module into one block per dtype; the views come in module order."""
    sources = [side(module).detach() for module in adapter.modules]
    positions: dict[torch.dtype, list[int]] = defaultdict(list)
    for position, dtype in enumerate(dtypes):
        positions[dtype].append(position)
    staged: list[Tensor] = sources.copy()
    for dtype, chosen in positions.items():
        parts = [sources[position] for position in chosen]
        sizes = [part.numel() for part in parts]
        block = torch.empty(sum(sizes), dtype=dtype, device="cpu")
        views = [
            flat.view(part.shape)
            for flat, part in zip(torch.split(block, sizes), parts, strict=True)
        ]
        torch._foreach_copy_(views, parts)
        _check_finite(block, views, parts, [adapter.modules[p] for p in chosen], adapter)
        for position, view in zip(chosen, views, strict=True):
            staged[position] = view
    return tuple(staged)


def _check_finite(
    block: Tensor,
    views: list[Tensor],
    parts: list[Tensor],
    modules: list[LoraModule],
    adapter: Adapter,
) -> None:
    # NaN and infinity both reach the smallest or the largest value: one pass, nothing allocated.
    smallest, largest = torch.aminmax(block)
    if torch.isfinite(smallest) and torch.isfinite(largest):
        return
    for view, part, module in zip(views, parts, modules, strict=True):
        bad = int((~torch.isfinite(view)).sum())
        if bad == 0:
            continue
        side = "lora_A" if part.data_ptr() == module.lora_A.data_ptr() else "lora_B"
        where = f"{side} of {module.path} in adapter {adapter.source}"
        bad_in_file = int((~torch.isfinite(part)).sum())
        if bad_in_file:
            raise AdapterFileError(
                f"{where} has {bad_in_file} NaN or infinite values of {part.numel()}"
            )
        raise AdapterFileError(
            f"{where} has {bad} values of {view.numel()} that are finite in its {part.dtype} but "
            f"not in the buffers' {view.dtype}; build the SlotManager with dtype=torch.float32"
        )
