"""Adapters + a model -> the arguments of the SlotManager that they all fit into."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lora_slots.attach.survey import survey
from lora_slots.errors import TargetMismatchError
from lora_slots.inspecting.needs import low_rank_needs, merge
from lora_slots.layout import Layout
from lora_slots.reading import RawAdapter, Source, read_adapter, read_header
from lora_slots.resolve.fused import convert_extras
from lora_slots.resolve.leftovers import room_needs
from lora_slots.resolve.naming import Naming
from lora_slots.resolve.nesting import unnest
from lora_slots.resolve.pairing import Pair, pair_up, read_settings
from lora_slots.resolve.renamed import with_fused_experts
from lora_slots.resolve.resolving import find_targets
from lora_slots.resolve.tokens import token_needs


@dataclass(frozen=True)
class _Fit:
    """What one adapter needs.

    Attributes:
        targets: The paths of the target modules.
        max_rank: Its largest rank.
        options: The other options of `SlotManager`.
    """

    targets: tuple[str, ...]
    max_rank: int
    options: dict[str, Any]


def fit(root: nn.Module, sources: Iterable[Source], *, strict: bool) -> dict[str, Any]:
    """The arguments of `SlotManager` with which each of these adapters can be loaded.

    Args:
        root: A single model or the `Components` of a pipeline; not changed.
        sources: Adapters, as for `inspect_adapter`.
        strict: Raise for modules that the model does not have; otherwise pass over them.

    Raises:
        AdapterFileError: An adapter cannot be read.
        UnsupportedAdapterError: An adapter uses a feature that is not applied here.
        TargetMismatchError: A module of an adapter is none of this model's.
    """
    layout = survey(root)
    fits = [_fit(read_header(source), source, layout, strict=strict) for source in sources]
    return {
        "max_rank": max((each.max_rank for each in fits), default=1),
        "target_modules": list(dict.fromkeys(path for each in fits for path in each.targets)),
        **merge(each.options for each in fits),
    }


def _fit(raw: RawAdapter, source: Source, layout: Layout, *, strict: bool) -> _Fit:
    raw = with_fused_experts(raw, layout)
    read_settings(raw)  # for what it refuses
    pairs, extras = pair_up(raw)
    naming = Naming([pair.module for pair in pairs], layout)
    pairs = unnest(pairs, layout, naming, raw)
    found: list[tuple[str, Pair, str]] = []
    unmatched: list[str] = []
    for module, pair, match in find_targets(pairs, naming, layout, raw):
        if match is None:
            unmatched.append(module)
        else:
            found.append((module, pair, layout.targets[match.target].path))
    matched = {module for module, _, _ in found}
    lost = [module for module in unmatched if not naming.other_component(module, matched)]
    if strict and lost:
        raise TargetMismatchError(
            f"{raw.source} adapts {lost[0]}, which is no layer of this model that takes adapters"
        )
    needs = [low_rank_needs(pair for _, pair, _ in found), token_needs(extras)]
    if extras:
        # Those that change nothing need no room, which only their values tell.
        values = read_adapter(source).tensors
        whole = convert_extras({key: values[key] for key in extras}, layout, naming)
        known = matched.union(path for _, _, path in found)
        needs.append(room_needs(raw, whole, layout, naming, known))
    return _Fit(
        targets=tuple(path for _, _, path in found),
        max_rank=max((pair.rank for _, pair, _ in found), default=1),
        options=merge(needs),
    )
