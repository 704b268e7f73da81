"""Adapter + Layout -> StagedAdapter: checked, cast, rank-major and packed. Writes into no model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from lora_slots.errors import (
    AdapterFileError,
    AttachError,
    RankTooLargeError,
    TargetMismatchError,
    UnsupportedAdapterError,
)
from lora_slots.layout import Layout, Target
from lora_slots.resolve.resolving import Adapter, ModuleUpdate
from lora_slots.staging.dora import dora_rows
from lora_slots.staging.packing import Packing, Part
from lora_slots.staging.staged import StagedAdapter, StagedRows, blocks_of

# The option of SlotManager that makes a buffer, and what it is for.
_OPTIONS = {
    "lora_bias": ("a bias", "bias=True"),
    "dora": ("DoRA", "dora=True"),
}
# What messages call a buffer whose rows are not the file's own tensor.
_SHOWN = {"dora": "the DoRA magnitude, or a norm for it,"}


def stage(
    adapter: Adapter, layout: Layout, *, max_rank: int, spare: StagedAdapter | None = None
) -> StagedAdapter:
    """Check an adapter against the buffers it is meant for, and copy it into packed host memory.

    Args:
        adapter: What to stage; its tensors are only read.
        layout: The model's target modules, with slots attached.
        max_rank: The number of rows of a slot.
        spare: An adapter whose memory may be overwritten and kept: fresh pages cost more.

    Raises:
        RankTooLargeError: A rank is above ``max_rank``.
        TargetMismatchError: A size is not the live layer's.
        UnsupportedAdapterError: Slots were not made for a feature of the adapter; the message names
            the option that makes them.
        AttachError: A buffer is on ``meta`` and can hold nothing.
        AdapterFileError: A value is NaN or infinite, in the file or after the cast to the buffers'
            dtype.
    """
    _check_ranks(adapter, max_rank)
    adapter = replace(adapter, modules=tuple(module.expanded() for module in adapter.modules))
    for module in adapter.modules:
        _check_target(module, layout.targets[module.target], adapter)
    # What inference_mode makes could not be overwritten outside of it.
    with torch.inference_mode(False), torch.no_grad():
        parts, sources = _parts(adapter, layout)
        packing = Packing.of(parts, [rows.shape for rows in sources])
        unused = blocks_of(spare)
        blocks, views = _packed(packing, sources, unused, adapter, layout)
        more, sums = _dora_parts(adapter, layout, parts, views)
        more_packing = Packing.of(more, [rows.shape for rows in sums])
        more_blocks, more_views = _packed(more_packing, sums, unused, adapter, layout)
    rows = by_buffer(packing, views) | by_buffer(more_packing, more_views)
    return StagedAdapter(
        source=adapter.source,
        targets=tuple(module.target for module in adapter.modules),
        scaling=tuple(module.scaling for module in adapter.modules),
        ranks=tuple(module.rank for module in adapter.modules),
        rows=rows | _scaling_rows(adapter, rows, layout),
        blocks=(*blocks, *more_blocks),
    )


def _scaling_rows(
    adapter: Adapter, rows: Mapping[str, StagedRows], layout: Layout
) -> dict[str, StagedRows]:
    """What goes into ``scaling``: the same for each row of a module, in one piece of memory."""
    if "lora_A" not in rows:
        return {}
    scaling = {module.target: module.scaling for module in adapter.modules}
    counts = dict(zip(rows["lora_A"].targets, rows["lora_A"].counts, strict=True))
    targets = sorted(counts, key=lambda target: (counts[target], target))
    each = [counts[target] for target in targets]
    with np.errstate(over="ignore"):  # the bank refuses what is out of range
        values = np.array([scaling[target] for target in targets]).astype(np.float32)
    with torch.inference_mode(False):
        memory = torch.from_numpy(np.repeat(values, each)[:, None])
        if any(_buffer(layout.targets[target], "lora_A").is_cuda for target in targets):
            memory = memory.pin_memory()
        return {"scaling": StagedRows(tuple(targets), torch.split(memory, each))}


def _parts(adapter: Adapter, layout: Layout) -> tuple[list[Part], list[Tensor]]:
    """What goes into each buffer, as views of the file's tensors."""
    parts: list[Part] = []
    sources: list[Tensor] = []
    for module in adapter.modules:
        target = layout.targets[module.target]
        rows = dict(module.others)
        if module.lora_A is not None and module.lora_B is not None:
            rows["lora_A"] = as_rows("lora_A", module.lora_A)
            rows["lora_B"] = as_rows("lora_B", module.lora_B)
        if "full" in rows:
            rows["holds"] = torch.ones(1, 1)
        parts += [part_of(target, module.target, name) for name in rows]
        sources += rows.values()
    return parts, sources


def part_of(target: Target, index: int, name: str) -> Part:
    """What goes into the buffer ``name`` of a target module, whose index this is.

    Raises:
        AttachError: The buffer is on ``meta`` and can hold nothing.
    """
    buffer = _buffer(target, name)
    return Part(index, name, buffer.dtype, buffer.device)


def _packed(
    packing: Packing,
    sources: Sequence[Tensor],
    spare: list[Tensor],
    adapter: Adapter,
    layout: Layout,
) -> tuple[list[Tensor], list[Tensor]]:
    """Blocks that hold ``sources``, and the rows of each part in the dtype of its buffer."""
    blocks = packing.blocks(spare)
    views = packing.views(blocks)
    if not packing.fill(blocks, sources):
        index = next(i for i, view in enumerate(views) if not torch.isfinite(view).all())
        _raise_not_finite(packing.parts[index], sources[index], views[index], adapter, layout)
    return blocks, views


def as_rows(name: str, tensor: Tensor) -> Tensor:
    """``lora_A`` or ``lora_B`` of a file as rows of the buffer of this name, without a copy."""
    # Looks before it calls: this is done for hundreds of tensors, which mostly are matrices.
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.ndim != 2:
        tensor = tensor.flatten(1)
    return tensor.t() if name == "lora_B" else tensor


def _dora_parts(
    adapter: Adapter, layout: Layout, parts: Sequence[Part], views: Sequence[Tensor]
) -> tuple[list[Part], list[Tensor]]:
    """DoRA's sums, from what the slots will hold and the live base weight."""
    wanted = {m.target: m for m in adapter.modules if m.magnitude is not None}
    if not wanted:
        return [], []
    staged = {(part.target, part.buffer): view for part, view in zip(parts, views, strict=True)}
    more, sums = [], []
    for index, module in wanted.items():
        target = layout.targets[index]
        assert module.magnitude is not None
        try:
            weight = target.kind.weight(target.module)
        except UnsupportedAdapterError as error:
            raise UnsupportedAdapterError(
                f"adapter {adapter.source} has DoRA at {target.path}, which needs the norms of its "
                f"weight, but {error}"
            ) from error
        rows = dora_rows(
            weight, staged[index, "lora_A"], staged[index, "lora_B"],
            module.scaling, module.magnitude,
        )  # fmt: skip
        more.append(part_of(target, index, "dora"))
        sums.append(rows)
    return more, sums


def by_buffer(packing: Packing, views: Sequence[Tensor]) -> dict[str, StagedRows]:
    """The rows of each buffer, by its name, for the ``views`` of the parts of ``packing``."""
    found: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    for part, view in zip(packing.parts, views, strict=True):
        found[part.buffer].append((part.target, view))
    return {
        name: StagedRows(tuple(t for t, _ in each), tuple(view for _, view in each), packing)
        for name, each in found.items()
    }


def _check_ranks(adapter: Adapter, max_rank: int) -> None:
    largest = max(adapter.modules, key=lambda module: module.rank)
    if largest.rank > max_rank:
        raise RankTooLargeError(
            f"adapter {adapter.source} has rank {largest.rank} at {largest.path}, but max_rank is "
            f"{max_rank}; build the SlotManager with max_rank={largest.rank}, or load it with "
            'compress_to="max_rank", which truncates it and reports the error'
        )


def _check_target(module: ModuleUpdate, target: Target, adapter: Adapter) -> None:
    if module.lora_A is not None and module.lora_B is not None:
        _check_sizes(module, module.lora_A, module.lora_B, target, adapter)
    wanted = [*module.others, *(["dora"] if module.magnitude is not None else [])]
    for name in wanted:
        if target.slots._buffers.get(name) is None:
            feature, option = _OPTIONS[name]
            raise UnsupportedAdapterError(
                f"adapter {adapter.source} has {feature} at {target.path}, for which slots have "
                f"room only where asked; build the SlotManager with {option}"
            )
    if module.magnitude is not None and module.magnitude.numel() != target.out_features:
        raise TargetMismatchError(
            f"{target.path} has {target.out_features} outputs, but the DoRA magnitude of adapter "
            f"{adapter.source} has shape {tuple(module.magnitude.shape)}"
        )
    for name, rows in module.others.items():
        width = _buffer(target, name).shape[1]
        if rows.shape[1] != width:
            raise TargetMismatchError(
                f"{name} of {target.path} must have {width} values, but that of adapter "
                f"{adapter.source} has {rows.shape[1]}"
            )


def _check_sizes(
    module: ModuleUpdate, A: Tensor, B: Tensor, target: Target, adapter: Adapter
) -> None:
    rank, out = module.rank, target.out_features
    fits = A.shape == (rank, *target.in_shape) and B.shape == (out, rank)
    # A 1x1 kernel is as good as none, on either side.
    if not fits and (
        _squeezed(A.shape[1:]) != _squeezed(target.in_shape)
        or _squeezed(B.shape) != _squeezed((out, rank))
    ):
        raise TargetMismatchError(
            f"{target.path} has in_features={target.in_features} and out_features={out}, so "
            f"lora_A must be {(rank, *target.in_shape)} and lora_B {(out, rank)}; adapter "
            f"{adapter.source} has {tuple(A.shape)} and {tuple(B.shape)}: it was made for another "
            "model"
        )


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape less the ones at its end, but for its first axis."""
    shape = tuple(shape)
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _buffer(target: Target, name: str) -> Tensor:
    buffer = target.slots._buffers[name]
    assert buffer is not None
    if buffer.is_meta:
        raise AttachError(
            f"the slot of {target.path} is on the meta device and can hold no adapter; give the "
            "model real weights before building the SlotManager"
        )
    return buffer


def _raise_not_finite(
    part: Part, source: Tensor, rows: Tensor, adapter: Adapter, layout: Layout
) -> NoReturn:
    what = _SHOWN.get(part.buffer, part.buffer)
    where = f"{what} of {layout.targets[part.target].path} in adapter {adapter.source}"
    # isfinite knows no 8-bit floats
    tensor = source.float() if source.itemsize == 1 else source
    bad_in_file = int((~torch.isfinite(tensor)).sum())
    if bad_in_file:
        raise AdapterFileError(
            f"{where} has {bad_in_file} NaN or infinite values of {rows.numel()}"
        )
    bad = int((~torch.isfinite(rows)).sum())
    raise AdapterFileError(
        f"{where} has {bad} values of {rows.numel()} that are finite in its {source.dtype} "
        f"but not in the buffers' {rows.dtype}; build the SlotManager with dtype=torch.float32"
    )
