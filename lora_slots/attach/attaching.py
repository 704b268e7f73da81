"""Give the chosen base layers slots by swapping their class, and undo it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lora_slots.attach.refusals import is_compiled, refuse_fast_path, refuse_unattachable
from lora_slots.errors import AttachError
from lora_slots.layers import Mix, SlotSizes
from lora_slots.layers.quantized import can_compute, said_dtypes
from lora_slots.layers.slabs import allocate
from lora_slots.layers.swap import add_slots, has_other_class, has_slots, remove_slots
from lora_slots.layout import Layout, Target
from lora_slots.options import Options


def attach(layout: Layout, options: Options) -> None:
    """Give every target module of ``layout`` a slot layer.

    Either all get one or, if something raises, none.

    Raises:
        AttachError: The model is in a state in which slots would be ignored or are not supported.
    """
    for target in layout:
        refuse_unattachable(target)
    refuse_fast_path(layout)
    devices = [_device(target) for target in layout]
    mixes = {device: Mix(options.rows, options.num_slots, device) for device in set(devices)}
    made = [
        target.kind.make(target.module, _sizes(target, layout, options, mixes[device]))
        for target, device in zip(layout, devices, strict=True)
    ]
    allocate(made, devices)
    try:
        for target, slots in zip(layout, made, strict=True):
            slots.train(target.module.training)
            add_slots(target.module, slots, target.parameter)
    except BaseException:
        detach(layout)
        raise


def detach(layout: Layout) -> None:
    """Take the slots of all target modules away; the model is as it came.

    Raises:
        AttachError: The class of a target module was changed since. Nothing is detached.
    """
    for target in layout:
        if has_slots(target.module) and has_other_class(target.module):
            raise AttachError(
                f"{target.path} has become {type(target.module).__name__} since it got its slots; "
                "undo that first (torch.nn.utils.parametrize changes classes, for example)"
            )
    for target in layout:
        if has_slots(target.module):
            remove_slots(target.module)


def warn_if_compiled(modules: Iterable[nn.Module]) -> None:
    """Warn that a model that is compiled already will be compiled once more."""
    if any(map(is_compiled, modules)):
        warnings.warn(
            "the model was compiled before it got slots, so its next call compiles it once more; "
            "build the SlotManager before torch.compile to avoid that",
            stacklevel=4,
        )


def _sizes(target: Target, layout: Layout, options: Options, mix: Mix) -> SlotSizes:
    return SlotSizes(
        num_slots=options.num_slots,
        rows=options.rows if target.low_rank else 0,
        dtype=_dtype(target, layout, options),
        mix=mix,
        dora=options.dora and target.low_rank,
        bias=options.bias and target.low_rank,
        token_rows=target.token_rows,
    )


def _dtype(target: Target, layout: Layout, options: Options) -> torch.dtype:
    if target.is_full:
        return target.weight.dtype  # What stands in the place of a parameter is like it.
    return options.dtype or _compute_dtype(target, layout)


def _compute_dtype(target: Target, layout: Layout) -> torch.dtype:
    said = (target.weight.dtype,) if target.parameter else said_dtypes(target.module)
    # 8-bit layers of bitsandbytes compute in the dtype of their input.
    around = layout.dtypes_of(target.component)
    dtype = next(filter(can_compute, itertools.chain(said, around)), None)
    if dtype is None:
        raise AttachError(
            f"{target.path} stores its weight as {target.weight.dtype} and nothing says in which "
            "dtype it computes; build the SlotManager with dtype="
        )
    return dtype


def _device(target: Target) -> torch.device:
    """Where the layer computes: accelerate keeps offloaded weights on meta until needed."""
    weight: Tensor = target.weight
    hook: Any = vars(target.module).get("_hf_hook")
    for part in getattr(hook, "hooks", (hook,)):
        execution_device = getattr(part, "execution_device", None)
        if weight.is_meta and execution_device is not None:
            return torch.device(execution_device)
    return weight.device
