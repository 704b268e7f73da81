"""Adapter + Layout -> StagedAdapter: checked, cast, rank-major and packed. Writes into no model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lora_slots.errors import (
    AdapterFileError,
    AttachError,
    RankTooLargeError,
    TargetMismatchError,
)
from lora_slots.layout import Layout, Target
from lora_slots.resolve import Adapter, LoraModule

# The integers that floating-point numbers of each size are copied and looked at as.
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# The bits of the exponent of each dtype, which are all set in infinity and NaN.
_EXPONENT = {
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}
# Below this many bytes a tensor, starting threads costs more than they save.
_WORTH_THREADS = 100_000


@dataclass(frozen=True, eq=False)
class _Part:
    """One tensor of an adapter on its way into a block."""

    module: LoraModule
    side: str

    @property
    def tensor(self) -> Tensor:
        tensor = self.module.lora_A if self.side == "lora_A" else self.module.lora_B
        return tensor.detach() if tensor.requires_grad else tensor


@dataclass(frozen=True, eq=False)
class StagedAdapter:
    """An adapter on the host, ready to be copied into slots row by row. Immutable.

    Tensors of one dtype and width share one packed block.

    Attributes:
        source: Where the adapter was read from.
        targets: Indices of its target modules in the layout.
        scaling: ``alpha / r`` or ``alpha / sqrt(r)``, one per target module.
        lora_A: ``[r, in]`` each, in the dtype of the module's buffers.
        lora_B: ``[r, out]`` each, likewise.
        blocks: The memory that they share, one flat block per dtype and width; none in a copy.
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
    # What inference_mode makes could not be overwritten outside of it.
    with torch.inference_mode(False):
        return _pack(adapter, layout, list(spare))


def _check_ranks(adapter: Adapter, max_rank: int) -> None:
    largest = max(adapter.modules, key=lambda module: module.rank)
    if largest.rank > max_rank:
        raise RankTooLargeError(
            f"adapter {adapter.source} has rank {largest.rank} at {largest.path}, but max_rank is "
            f"{max_rank}; build the SlotManager with max_rank={largest.rank}"
        )


def _check_target(module: LoraModule, target: Target, adapter: Adapter) -> None:
    A, B, rank = module.lora_A, module.lora_B, module.rank
    if A.shape != (rank, target.in_features) or B.shape != (target.out_features, rank):
        raise TargetMismatchError(
            f"{target.path} has in_features={target.in_features} and out_features="
            f"{target.out_features}, so lora_A must be {(rank, target.in_features)} and lora_B "
            f"{(target.out_features, rank)}; adapter {adapter.source} has {tuple(A.shape)} and "
            f"{tuple(B.shape)}: it was made for another model"
        )
    for side, tensor in (("lora_A", A), ("lora_B", B)):
        if tensor.is_meta or tensor.layout is not torch.strided:
            what = "is on the meta device" if tensor.is_meta else f"has layout {tensor.layout}"
            raise AdapterFileError(
                f"{side} of {module.path} in adapter {adapter.source} {what}; only dense tensors "
                "with data can be loaded"
            )
    if target.slots.lora_A.is_meta:
        raise AttachError(
            f"the slot of {target.path} is on the meta device and can hold no adapter; give the "
            "model real weights before building the SlotManager"
        )


def _pack(adapter: Adapter, layout: Layout, spare: list[Tensor]) -> StagedAdapter:
    """Copy all tensors into one block per dtype and width, as rows one below the other."""
    wanted: dict[tuple[torch.dtype, int], list[_Part]] = defaultdict(list)
    for module in adapter.modules:
        target = layout.targets[module.target]
        dtype = target.slots.lora_A.dtype
        wanted[dtype, target.in_features].append(_Part(module, "lora_A"))
        wanted[dtype, target.out_features].append(_Part(module, "lora_B"))
    blocks, views = [], []
    for (dtype, width), parts in wanted.items():
        ranks = [part.module.rank for part in parts]
        block = _memory(sum(ranks) * width, dtype, spare)
        blocks.append(block)
        views.append(torch.split(block.view(-1, width), ranks))
    all_parts = [part for parts in wanted.values() for part in parts]
    all_views = [view for each in views for view in each]
    if not _fill(all_views, all_parts):
        _raise_not_finite(all_views, all_parts, adapter)
    rows = {
        (part.module.target, part.side): view
        for part, view in zip(all_parts, all_views, strict=True)
    }
    return StagedAdapter(
        source=adapter.source,
        targets=tuple(module.target for module in adapter.modules),
        scaling=tuple(module.scaling for module in adapter.modules),
        lora_A=tuple(rows[module.target, "lora_A"] for module in adapter.modules),
        lora_B=tuple(rows[module.target, "lora_B"] for module in adapter.modules),
        blocks=tuple(blocks),
    )


def _memory(numel: int, dtype: torch.dtype, spare: list[Tensor]) -> Tensor:
    """Host memory for ``numel`` elements, taken out of ``spare`` where that has just this size.

    Fresh pages cost several times what copying into them does.
    """
    for position, block in enumerate(spare):
        if block.dtype == dtype and block.numel() == numel:
            return spare.pop(position)
    return torch.empty(numel, dtype=dtype, device="cpu")


def _fill(views: list[Tensor], parts: list[_Part]) -> bool:
    """Copy every part into its rows, in as many threads as torch uses where that pays.

    Returns:
        Whether every value is finite after the copy.
    """
    workers = torch.get_num_threads()
    if workers == 1 or sum(view.nbytes for view in views) < _WORTH_THREADS * len(views):
        return _fill_some(views, parts)
    with ThreadPoolExecutor(workers) as pool:
        shares = [(views[first::workers], parts[first::workers]) for first in range(workers)]
        return all(pool.map(lambda share: _fill_some(*share), shares))


def _fill_some(views: Sequence[Tensor], parts: Sequence[_Part]) -> bool:
    finite = True
    # Autograd's mode is a thread's own.
    with torch.no_grad():
        for view, part in zip(views, parts, strict=True):
            # B is transposed, once: a slot is a run of rows there too.
            source = part.tensor if part.side == "lora_A" else part.tensor.t()
            bits = view.view(_BITS[view.itemsize]).numpy()
            if view.dtype == source.dtype and source.device == view.device:
                # numpy transposes faster than torch, and waits for no other thread.
                np.copyto(bits, source.view(_BITS[view.itemsize]).numpy())
            else:
                view.copy_(source)
            finite = finite and _all_finite(view, bits)
    return finite


def _all_finite(view: Tensor, bits: NDArray[Any]) -> bool:
    """Whether ``view`` is finite; ``bits`` is the same memory as integers of the same size.

    A number that is not finite has every bit of its exponent set. Where no two numbers together
    have, which one cheap pass tells and which holds for weights below 2, none has.

    Source: IEEE 754-2019, section 3.4.
    """
    if view.nbytes % 8 == 0:
        together = int(np.bitwise_or.reduce(bits.reshape(-1).view(np.uint64)))
        width = 8 * view.itemsize
        exponent = _EXPONENT[view.dtype]
        if all((together >> shift) & exponent != exponent for shift in range(0, 64, width)):
            return True
    return bool(torch.isfinite(view).all())


def _raise_not_finite(views: list[Tensor], parts: list[_Part], adapter: Adapter) -> NoReturn:
    view, part = next(
        (view, part)
        for view, part in zip(views, parts, strict=True)
        if not torch.isfinite(view).all()
    )
    where = f"{part.side} of {part.module.path} in adapter {adapter.source}"
    # isfinite knows no 8-bit floats
    tensor = part.tensor.float() if part.tensor.itemsize == 1 else part.tensor
    bad_in_file = int((~torch.isfinite(tensor)).sum())
    if bad_in_file:
        raise AdapterFileError(
            f"{where} has {bad_in_file} NaN or infinite values of {view.numel()}"
        )
    bad = int((~torch.isfinite(view)).sum())
    raise AdapterFileError(
        f"{where} has {bad} values of {view.numel()} that are finite in its {part.tensor.dtype} "
        f"but not in the buffers' {view.dtype}; build the SlotManager with dtype=torch.float32"
    )
