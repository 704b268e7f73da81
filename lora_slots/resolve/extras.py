"""Tensors of a file that are no low-rank updates: whole parameters, biases, and what adds to them.

PEFT's ``modules_to_save`` and ``bias`` put another tensor in the place of a parameter; ``diff`` and
its like, of kohya's trainers and LyCORIS, are added to one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lora_slots.errors import (
    AttachError,
    TargetMismatchError,
    UnsupportedAdapterError,
)
from lora_slots.layout import Layout
from lora_slots.reading import RawAdapter
from lora_slots.resolve.leftovers import Extra, Leftovers, is_replaced, read_extra
from lora_slots.resolve.naming import Naming

# Tensors of features that would change the maths, by a piece of their names.
_VARIANTS = {
    "lora_magnitude_vector": "DoRA",
    "lora_diag": "KaSA",
}

# Why a tensor is skipped that would change nothing.
AS_IN_THE_MODEL = "equal to the model's own"

Rows = dict[int, dict[str, Tensor]]


def take_extras(
    raw: RawAdapter,
    extras: Mapping[str, Tensor],
    layout: Layout,
    naming: Naming,
    found: Iterable[str],
    *,
    strict: bool,
) -> tuple[Rows, list[tuple[str, str]]]:
    """Find the place of every tensor that is no low-rank update.

    Args:
        raw: The file.
        extras: The tensors, by their names in the file.
        layout: What the model offers.
        naming: Finds the modules of the file.
        found: All names of modules in the file that the model has.
        strict: Raise for what there is no room for; otherwise skip and list it.

    Returns:
        Rows for the buffers of each target module, by its index; and what was skipped, with the
        reasons.

    Raises:
        UnsupportedAdapterError: There is no room for a tensor, if ``strict``; or it belongs to a
            feature that is not applied here.
        TargetMismatchError: A shape is not the model's, or two tensors are for one place.
        AdapterFileError: A tensor has no data, or one is missing.
        AttachError: The model's own tensor has no data to add to or to compare with.
    """
    found = list(found)
    leftovers = Leftovers(raw, layout, naming, found)
    rows: Rows = {}
    skipped: list[tuple[str, str]] = []
    seen: list[Extra] = []
    for key, tensor in extras.items():
        _check_tensor(key, tensor, raw)
        extra = read_extra(key, tensor, layout, naming)
        seen.append(extra)
        reason = _why_idle(extra, extras, naming, found)
        if reason:
            skipped.append((key, reason))
        elif not _place(extra, rows, layout, naming, raw):
            leftovers.add(extra)
    if strict:
        leftovers.check(seen)
    return rows, skipped + [(key, kind) for kind, keys in leftovers.keys.items() for key in keys]


def _check_tensor(key: str, tensor: Tensor, raw: RawAdapter) -> None:
    for piece, feature in _VARIANTS.items():
        if piece in key:
            raise UnsupportedAdapterError(
                f"{raw.source} uses {feature}, as its key {key!r} shows, which is not applied here"
            )


def _why_idle(
    extra: Extra, extras: Mapping[str, Tensor], naming: Naming, found: Iterable[str]
) -> str:
    """Why an extra changes nothing in this model; empty where it does."""
    component = naming.other_component(extra.name, found)
    if component:
        return f"other_component: {component}"
    if is_replaced(extra.key):
        return "replaced by the modules_to_save of the same file"
    if extra.key.endswith(".alpha") and f"{extra.key.removesuffix('.alpha')}.diff" in extras:
        return "scales no diff"
    if extra.is_idle:
        return "all zero" if extra.diff else AS_IN_THE_MODEL
    return ""


def _place(extra: Extra, rows: Rows, layout: Layout, naming: Naming, raw: RawAdapter) -> bool:
    """Make the rows for an extra, if the model has room for it."""
    match = naming.find(extra.name)
    if match is not None and layout.targets[match.target].is_full:
        target, buffer, new = layout.targets[match.target], "full", _full(extra, raw)
    else:
        match = naming.find(extra.module) if extra.parameter == "bias" else None
        if match is None or layout.targets[match.target].slots._buffers.get("lora_bias") is None:
            return False
        target, buffer, new = layout.targets[match.target], "lora_bias", _bias(extra, raw)
    known = rows.setdefault(match.target, {}).setdefault(buffer, new)
    if known is not new and not torch.equal(known, new):
        raise TargetMismatchError(
            f"{raw.source} has two different tensors for one parameter of this model, at "
            f"{target.path}"
        )
    return True


def _full(extra: Extra, raw: RawAdapter) -> Tensor:
    """``[1, numel]``, what takes the place of the parameter."""
    live = _comparable(extra, raw)
    tensor = extra.tensor.detach().reshape(1, -1)
    if extra.diff and live is not None:
        tensor = tensor.float() + live.float()
    return tensor


def _bias(extra: Extra, raw: RawAdapter) -> Tensor:
    """``[1, out]``, what is added to the output of a layer at weight 1.

    In float64, so that the buffer's float32 is the only rounding.
    """
    live = _comparable(extra, raw)
    added = extra.tensor.detach().double().reshape(1, -1)
    return added if extra.diff or live is None else added - live.double()


def _comparable(extra: Extra, raw: RawAdapter) -> Tensor | None:
    """The model's own tensor as ``[1, numel]`` on the host; None where it has none."""
    live = extra.live
    if live is None:
        return None
    if live.is_meta:
        raise AttachError(
            f"{extra.owner}.{extra.parameter} is on the meta device, so that {extra.key} of "
            f"adapter {raw.source} cannot be compared with it; load the model's weights first"
        )
    if _without_ones(extra.tensor) != _without_ones(live):
        raise TargetMismatchError(
            f"{extra.owner}.{extra.parameter} has shape {tuple(live.shape)}, but {extra.key} in "
            f"adapter {raw.source} has {tuple(extra.tensor.shape)}: it was made for another model"
        )
    return live.detach().cpu().reshape(1, -1)


def _without_ones(tensor: Tensor) -> list[int]:
    return [size for size in tensor.shape if size != 1]
