"""Trained rows of embeddings (PEFT's ``trainable_token_indices``): who has room, and what fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lora_slots.attach.components import parts_of
from lora_slots.errors import AdapterFileError, TargetMismatchError, UnsupportedAdapterError
from lora_slots.layers import kind_of
from lora_slots.layers.embedding import EMBEDDING
from lora_slots.layers.linear import LINEAR
from lora_slots.layout import Layout, Target
from lora_slots.reading import RawAdapter
from lora_slots.reading.keys import split_key

_KEY = "trainable_token_indices"


def token_layers(root: nn.Module) -> dict[nn.Module, nn.Module | None]:
    """The layers that get room for trained rows, each with the embedding that it is tied to.

    They are the input and the output embeddings of a model, or every `nn.Embedding` of one that
    does not say which those are; and what the model's config ties to them.
    """
    layers: dict[nn.Module, nn.Module | None] = {}
    for part in parts_of(root).values():
        own = [module for module in _embeddings(part) if kind_of(module) in (EMBEDDING, LINEAR)]
        for module in part.modules() if _ties(part) else ():
            source = next((e for e in own if _same_weight(module, e)), None)
            if source is not None and source is not module and kind_of(module) is not None:
                layers[module] = source
        for module in own:
            layers.setdefault(module, None)
    return layers


def _embeddings(part: nn.Module) -> list[nn.Module]:
    source = _answer(part, "get_input_embeddings")
    if source is None:
        return [module for module in part.modules() if isinstance(module, nn.Embedding)]
    head = _answer(part, "get_output_embeddings")
    return [source] if head is None else [source, head]


def _answer(part: nn.Module, method: str) -> nn.Module | None:
    """What a model says when asked by ``method``, if it can be asked and knows."""
    try:
        answer: nn.Module | None = getattr(part, method, lambda: None)()
    except NotImplementedError:
        return None
    return answer


def _ties(part: nn.Module) -> bool:
    return bool(getattr(getattr(part, "config", None), "tie_word_embeddings", False))


def _same_weight(module: nn.Module, embedding: nn.Module) -> bool:
    return isinstance(embedding, nn.Embedding) and (
        module._parameters.get("weight") is embedding.weight
    )


def take_tokens(
    raw: RawAdapter, extras: dict[str, Tensor], layout: Layout, *, strict: bool
) -> tuple[dict[int, dict[str, Tensor]], list[tuple[str, str]]]:
    """Take the trained rows out of ``extras``.

    What is tied to an embedding gets its rows, where the file has none for it, as in PEFT.

    Returns:
        Rows for the buffers of each target module, by its index; and what was skipped, with the
        reasons.

    Raises:
        AdapterFileError: Rows and indices do not fit each other.
        TargetMismatchError: The model has no such rows.
        UnsupportedAdapterError: There is no room for them, if ``strict``.
    """
    keys = [key for key in extras if _module(key)]
    skipped = []
    indices = next((config[_KEY] for config in raw.all_configs if config.get(_KEY)), None)
    if indices and not keys:
        reason = f"its config says {_KEY}={indices!r}, but no tensor holds the rows"
        if strict:
            raise AdapterFileError(f"{raw.source} is incomplete: {reason}")
        skipped.append((_KEY, reason))
    found: dict[int, dict[str, Tensor]] = {}
    for key in keys:
        rows = extras.pop(key)
        if rows.ndim != 2 or not len(rows) or not rows.is_floating_point():
            raise AdapterFileError(
                f"{key} of {raw.source} must hold a row for each trained token, got {rows.dtype} "
                f"of shape {tuple(rows.shape)}"
            )
        match = layout.find(_module(key))
        target = None if match is None else layout.targets[match[0]]
        problem = _lack_of_room(rows, target, layout)
        if match is None or target is None or problem:
            if strict:
                raise UnsupportedAdapterError(
                    f"{raw.source} has {len(rows)} trained token rows for {_module(key)}, {problem}"
                )
            skipped.append((key, f"trained token rows, {problem}"))
            continue
        ids = _ids(match[1], key, raw)
        _check(rows, ids, target, key, raw)
        new = {"token_ids": torch.tensor(ids)[:, None] + 1, "token_rows": rows}
        known = found.setdefault(match[0], new)
        if known is not new and not _same(known, new):
            raise TargetMismatchError(
                f"{target.path} is one shared module in this model, but {raw.source} has different "
                "token rows for its names"
            )
    return found | _for_tied(found, layout), skipped


def token_needs(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The option of `SlotManager` that these tensors of a file need."""
    counts = [next(iter(t.shape), 0) for key, t in tensors.items() if _module(key)]
    return {"token_rows": max(counts)} if counts else {}


def _module(key: str) -> str:
    """The module that a key with trained rows names; empty for other keys."""
    split = split_key(key)
    return split[0] if split is not None and split[1] == "trainable_tokens" else ""


def _lack_of_room(rows: Tensor, target: Target | None, layout: Layout) -> str:
    """Why a target has no room for so many rows; empty where it has."""
    have = [other for other in layout if other.token_rows]
    if target is not None and target.token_rows >= len(rows):
        return ""
    if have and (target is None or not target.token_rows):
        return f"but only {', '.join(other.path for other in have)} have room for them"
    room = have[0].token_rows if have else 0
    return f"but token_rows is {room}; build the SlotManager with token_rows={len(rows)}"


def _ids(name: str, key: str, raw: RawAdapter) -> list[int]:
    """The ids of the tokens whose rows are trained in the module ``name``."""
    given: Any = (raw.config_of(_module(key)) or {}).get(_KEY)
    ids = given
    if isinstance(given, Mapping):
        # PEFT lets any end of a module's name stand for it.
        ends = [end for end in given if name.endswith(str(end))]
        ids = given[max(ends, key=len)] if ends else None
    if not isinstance(ids, Iterable) or not all(map(_is_id, ids)):
        raise AdapterFileError(
            f"{key} of {raw.source} has trained token rows, so {_KEY} in its config must give the "
            f"ids of their tokens, got {given!r}"
        )
    return list(ids)


def _is_id(token: object) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and token >= 0


def _check(rows: Tensor, ids: list[int], target: Target, key: str, raw: RawAdapter) -> None:
    if len(rows) != len(ids):
        raise AdapterFileError(
            f"{key} of {raw.source} must hold one row for each of the {len(ids)} tokens that "
            f"{_KEY} names, got {rows.dtype} of shape {tuple(rows.shape)}"
        )
    if len(set(ids)) != len(ids):
        raise AdapterFileError(f"{_KEY} in the config of {raw.source} names a token twice: {ids}")
    count, width = target.weight.shape
    if rows.shape[1] != width or max(ids) >= count:
        raise TargetMismatchError(
            f"{target.path} has {count} rows of {width}, but {raw.source} has rows of "
            f"{rows.shape[1]} for tokens up to {max(ids)}: it was made for another model"
        )


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def _for_tied(
    found: Mapping[int, dict[str, Tensor]], layout: Layout
) -> dict[int, dict[str, Tensor]]:
    by_module = {layout.targets[index].module: rows for index, rows in found.items()}
    return {
        index: by_module[target.tied_to]
        for index, target in enumerate(layout)
        if index not in found and target.tied_to in by_module
    }
