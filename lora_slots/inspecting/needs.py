"""Which options of `SlotManager` a file needs, as far as it tells without a model."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from torch import Tensor

from lora_slots.layout import PEFT_PREFIX, without_wrappers
from lora_slots.reading import RawAdapter
from lora_slots.reading.keys import split_key
from lora_slots.resolve.pairing import Pair
from lora_slots.resolve.tokens import token_needs

# The bias of a module, and what is added to it.
_BIASES = ("bias", "diff_b", "b_norm")


def needs_of(
    raw: RawAdapter, pairs: Iterable[Pair], extras: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The options by their names.

    A whole tensor counts even if it turns out to be all zero or a copy of the model's own.

    Args:
        raw: The file.
        pairs: Its low-rank updates.
        extras: Its other tensors, by their names in the file.
    """
    pairs = list(pairs)
    full = full_tensors(pairs, extras)
    needs = low_rank_needs(pairs) | token_needs(extras)
    if len(full) < len(whole_tensors(extras)):
        needs["bias"] = True
    if full:
        needs["full_modules"] = tuple(dict.fromkeys(_saved_name(key, raw) for key in full))
    return needs


def low_rank_needs(pairs: Iterable[Pair]) -> dict[str, Any]:
    """The options that low-rank updates need, beside ``max_rank``."""
    pairs = list(pairs)
    needs = {
        "dora": any(pair.magnitude is not None for pair in pairs),
        "bias": any(pair.lora_bias is not None for pair in pairs),
    }
    return {name: True for name, needed in needs.items() if needed}


def full_tensors(pairs: Iterable[Pair], extras: Iterable[str]) -> list[str]:
    """The keys of those extras that need room for a whole parameter in each slot."""
    adapted = {pair.module for pair in pairs}
    return [key for key in whole_tensors(extras) if not _is_bias_of(key, adapted)]


def whole_tensors(extras: Iterable[str]) -> list[str]:
    """The keys of those extras that stand for, or are added to, a whole parameter."""
    splits = ((key, split_key(key)) for key in extras)
    return [
        key
        for key, split in splits
        if ".original_module." not in key
        and not key.endswith(".base_layer.weight")
        and (split is None or split[1] != "trainable_tokens")
    ]


def covers(options: Mapping[str, Any], name: str, needed: Any) -> bool:
    """Whether slots that were made with ``options`` have room for what an adapter needs."""
    given = options.get(name)
    if isinstance(needed, tuple):
        return all(any(_is_below(module, end) for end in given or ()) for module in needed)
    return bool((given or 0) >= needed)


def merge(needs: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The options that several adapters need between them."""
    options: dict[str, Any] = {}
    for each in needs:
        for name, value in each.items():
            known = options.get(name, type(value)())
            both = isinstance(value, tuple)
            options[name] = tuple(dict.fromkeys(known + value)) if both else max(known, value)
    return options


def _is_bias_of(key: str, modules: Container[str]) -> bool:
    """Whether a tensor is the bias of one of these modules."""
    module, parameter = _owner(key)
    return parameter in _BIASES and module in modules


def _owner(key: str) -> tuple[str, str]:
    """The module that a whole tensor belongs to, as the file calls it, and the part of it."""
    module, _, parameter = key.replace(".base_layer.", ".").rpartition(".")
    return split_key(key) or (module, parameter)


def _saved_name(key: str, raw: RawAdapter) -> str:
    """The name in a config's ``modules_to_save`` that is why a file has a tensor, or its module."""
    module = without_wrappers(_owner(key)[0]).removeprefix(PEFT_PREFIX)
    plain = module.partition(".modules_to_save")[0]
    saved = [config.get("modules_to_save") for config in raw.all_configs]
    names = (str(name) for names in saved if isinstance(names, list) for name in names)
    return next((name for name in names if _is_below(plain, name)), plain)


def _is_below(module: str, ending: str) -> bool:
    """Whether the name of a module, or of one that holds it, ends in ``ending``."""
    segments = module.split(".")
    return any(".".join(segments[: n + 1]).endswith(ending) for n in range(len(segments)))
