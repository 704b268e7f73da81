"""Trained rows that do not fit are refused, with the remedy where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conv_nets import random
from embedding_models import Plain, llama, plain_with_room, token_rows, write_tokens
from torch import nn
from toys import Snapshot

from lora_slots import (
    AdapterFileError,
    ArgumentError,
    LoraSlotsError,
    RawAdapter,
    SlotManager,
    TargetMismatchError,
    UnsupportedAdapterError,
    read_adapter,
)

LIST = [5, 20]


def test_room_that_no_embedding_can_take_is_refused():
    with pytest.raises(TargetMismatchError, match="token_rows=2 gives room to embeddings, but"):
        SlotManager(nn.Sequential(nn.Linear(4, 4)), max_rank=2, token_rows=2)


@pytest.mark.parametrize("value", [-1, 2.0, True, "2"])
def test_room_must_be_a_whole_number(value: Any):
    with pytest.raises(ArgumentError, match="token_rows must be a whole number from 0"):
        SlotManager(Plain(), max_rank=2, target_modules=["embed_tokens"], token_rows=value)


ROWS = random(2, 16)
REFUSED: dict[str, tuple[RawAdapter, type[LoraSlotsError], str]] = {
    "too many": (
        token_rows([1, 2, 3, 4], random(4, 16)), UnsupportedAdapterError,
        "has 4 trained token rows for embed_tokens, but token_rows is 3; build the SlotManager "
        "with token_rows=4",
    ),
    "no ids": (token_rows(None, ROWS), AdapterFileError, "must give the ids of their tokens"),
    "ids for another module": (
        token_rows({"wte": LIST}, ROWS), AdapterFileError, "must give the ids .*'wte'"
    ),
    "ids that are none": (token_rows([5, -1], ROWS), AdapterFileError, "must give the ids"),
    "an id twice": (token_rows([5, 5], ROWS), AdapterFileError, r"names a token twice: \[5, 5\]"),
    "rows for other ids": (
        token_rows([5], ROWS), AdapterFileError, r"one row for each of the 1 tokens .* \(2, 16\)"
    ),
    "a single number": (token_rows([5], torch.tensor(1.0)), AdapterFileError, r"a row .* \(\)"),
    "no rows": (token_rows([], torch.ones(0, 16)), AdapterFileError, r"a row for .* \(0, 16\)"),
    "an id beyond the vocabulary": (
        token_rows([5, 128], ROWS), TargetMismatchError,
        "has 128 rows of 16, but .* tokens up to 128",
    ),
    "another width": (
        token_rows(LIST, random(2, 15)), TargetMismatchError,
        "128 rows of 16, but .* has rows of 15",
    ),
    "rows that are not finite": (
        token_rows(LIST, ROWS / 0), AdapterFileError, "token_rows of embed_tokens .* 32 NaN or inf"
    ),
    "rows of a module that has no room": (
        read_adapter(
            {"other.token_adapter.trainable_tokens_delta": ROWS, **token_rows(LIST, ROWS).tensors},
            {"r": 1, "lora_alpha": 1, "trainable_token_indices": LIST},
        ),
        UnsupportedAdapterError, "for other, but only embed_tokens have room for them",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("source", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_rows_that_do_not_fit_are_refused_and_change_nothing(source, error, message):
    model, manager = plain_with_room()
    manager.load(token_rows([7, 9, 11], random(3, 16, seed=4)))
    before = Snapshot.of(manager, model)
    for attempt in (manager.check, manager.load):
        with pytest.raises(error, match=message):
            attempt(source)
        before.assert_unchanged(manager, model)


def test_without_room_a_file_is_refused_with_the_remedy_or_loaded_without_its_rows(tmp_path: Path):
    write_tokens(tmp_path, llama, LIST)
    model = llama()
    manager = SlotManager(model, max_rank=2)
    message = "has 2 trained token rows .* but token_rows is 0; build .* with token_rows=2"
    with pytest.raises(UnsupportedAdapterError, match=message):
        manager.load(tmp_path)
    ((key, reason),) = manager.load(tmp_path, strict=False).skipped
    assert key.endswith("embed_tokens.token_adapter.trainable_tokens_delta")
    assert reason.startswith("trained token rows, but token_rows is 0")


def test_indices_without_rows_are_an_incomplete_file():
    _, manager = plain_with_room()
    whole = token_rows(LIST, ROWS)
    kept = {key: tensor for key, tensor in whole.tensors.items() if "lora_" in key}
    source = RawAdapter(whole.source, kept, whole.config)
    with pytest.raises(AdapterFileError, match=r"trainable_token_indices=\[5, 20\], but no tensor"):
        manager.load(source)
    assert "trainable_token_indices" in dict(manager.load(source, strict=False).skipped)
