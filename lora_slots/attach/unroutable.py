"""Layers whose input has no leading dimension of rows, which routing would mistake."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import nn

from lora_slots.attach.components import split_component
from lora_slots.errors import TargetMismatchError
from lora_slots.layout import Layout, Target

_EXPERT = re.compile(r"experts?(_?\d+)?")
_POSITION = re.compile(r"(position|relative|\bwpe\b)")
# Classes of transformers that turn batches to sequences first, for what is in them.
_SEQUENCE_FIRST = frozenset(
    {"FSMTModel", "LEDEncoderSelfAttention", "LongformerSelfAttention", "XLNetModel"}
)
_SHOWN = 3


def refuse_unroutable(model: nn.Module, layout: Layout) -> None:
    """Refuse target modules that do not see one row of the batch after the other.

    Args:
        model: A single model or the `Components` of a pipeline.
        layout: The target modules.

    Raises:
        TargetMismatchError: Names them, and why.
    """
    found = dict(_unroutable(model, layout))
    if found:
        listed = "; ".join(f"{path} {why}" for path, why in list(found.items())[:_SHOWN])
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise TargetMismatchError(
            f"routing=True needs layers that see the rows of a batch along their leading dimension:"
            f" {listed}{more}; leave them out of target_modules, or build the SlotManager without "
            "routing"
        )


def _unroutable(model: nn.Module, layout: Layout) -> Iterator[tuple[str, str]]:
    modules = dict(model.named_modules(remove_duplicate=False))
    turned = _sequence_first(model)
    for target in layout:
        why = next(filter(None, (_why(target, alias, modules) for alias in target.aliases)), None)
        if why is None and target.component in turned:
            why = f"may see sequences first, as {turned[target.component]} does (batch_first=False)"
        if why is not None:
            yield target.path, why


def _why(target: Target, alias: str, modules: Mapping[str, nn.Module]) -> str | None:
    if target.is_full:
        return "is replaced as a whole, for all rows alike"
    *parents, own = alias.split(".")
    around = [
        type(modules[".".join(parents[:depth])]).__name__ for depth in range(len(parents) + 1)
    ]
    if any(map(_EXPERT.fullmatch, parents)) or any("Expert" in name for name in around[1:]):
        return "sees the tokens that were gathered for an expert"
    if target.parameter:
        return "is a parameter that all rows share"
    turned = next((name for name in around if name in _SEQUENCE_FIRST), None)
    if turned is not None:
        return f"sees sequences first, since {turned} turns them"
    if isinstance(target.module, nn.Embedding) and _POSITION.search(own):
        return "is an embedding of positions, which have no rows"
    return None


def _sequence_first(model: nn.Module) -> dict[str, str]:
    """The components that have modules with sequences first, and the first of these."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        if getattr(module, "batch_first", None) is False:
            found.setdefault(split_component(path, model)[0], path or type(module).__name__)
    return found
