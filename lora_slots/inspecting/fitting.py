"""Adapters + a model -> the arguments of the SlotManager that they all fit into."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lora_slots.attach.survey import survey
from lora_slots.errors import TargetMismatchError
from lora_slots.inspecting.needs import low_rank_needs, merge
from lora_slots.layout import Layout, Target
from lora_slots.reading import RawAdapter, Source, read_adapter, read_header
from lora_slots.resolve.fused import convert_extras
from lora_slots.resolve.leftovers import room_needs
from lora_slots.resolve.naming import Naming
from lora_slots.resolve.nesting import unnest
from lora_slots.resolve.pairing import Pair, pair_up, read_settings
from lora_slots.resolve.renamed import with_fused_experts
from lora_slots.resolve.resolving import find_targets, update_of
from lora_slots.resolve.tokens import token_needs


@dataclass(frozen=True, eq=False)
class _Found:
    """What one adapter adapts.

    Attributes:
        source: The adapter.
        raw: Its names and shapes.
        naming: Finds its modules.
        pairs: Its low-rank updates, each with its target module.
        extras: Its other tensors, by their names.
        known: All names of modules in the file that the model has.
    """

    source: Source
    raw: RawAdapter
    naming: Naming
    pairs: list[tuple[Pair, Target]]
    extras: dict[str, Tensor]
    known: set[str]


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
    found = [_find(source, layout, strict=strict) for source in sources]
    pairs = [pair for each in found for pair in each.pairs]
    adapted = {target.module for _, target in pairs}
    return {
        "max_rank": max((_rank(pair, target) for pair, target in pairs), default=1),
        "target_modules": list(dict.fromkeys(target.path for _, target in pairs)),
        **merge(options for each in found for options in _options(each, layout, adapted)),
    }


def _find(source: Source, layout: Layout, *, strict: bool) -> _Found:
    raw = with_fused_experts(read_header(source), layout)
    read_settings(raw)  # for what it refuses
    pairs, extras = pair_up(raw)
    naming = Naming([pair.module for pair in pairs], layout)
    pairs = unnest(pairs, layout, naming, raw)
    found: list[tuple[Pair, Target]] = []
    matched: set[str] = set()
    unmatched: list[str] = []
    for module, pair, match in find_targets(pairs, naming, layout, raw):
        if match is None:
            unmatched.append(module)
        else:
            matched.add(module)
            found.append((pair, layout.targets[match.target]))
    lost = [module for module in unmatched if not naming.other_component(module, matched)]
    if strict and lost:
        raise TargetMismatchError(
            f"{raw.source} adapts {lost[0]}, which is no layer of this model that takes adapters"
        )
    known = matched.union(target.path for _, target in found)
    return _Found(source, raw, naming, found, extras, known)


def _rank(pair: Pair, target: Target) -> int:
    """The rank that slots need: that of all groups of a convolution."""
    return update_of(0, target, pair, 1.0).rank


def _options(
    found: _Found, layout: Layout, adapted: Collection[nn.Module]
) -> Iterator[dict[str, Any]]:
    """The options that one adapter needs where slots adapt these modules."""
    yield low_rank_needs(pair for pair, _ in found.pairs)
    yield token_needs(found.extras)
    if found.extras:
        # Those that change nothing need no room, which only their values tell.
        values = read_adapter(found.source).tensors
        whole = {key: values[key] for key in found.extras}
        whole = convert_extras(whole, layout, found.naming)
        yield room_needs(found.raw, whole, layout, found.naming, found.known, adapted)
