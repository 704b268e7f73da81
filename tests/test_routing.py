"""Each row of a batch gets the adapters that it is routed, and nothing of the other rows'."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from routed import ROWS, routed_blocks, tokens
from toys import Snapshot, block_adapter, blocks

from lora_slots import (
    AdapterInUseError,
    ArgumentError,
    SlotManager,
    UnknownAdapterError,
)


def test_every_row_is_that_row_alone_and_one_without_adapter_the_bases():
    both = routed_blocks()
    both.manager.route(ROWS)
    both.assert_rows(ROWS, tokens(4))
    both.assert_rows(ROWS, tokens(4)[:, 0])


def test_rows_may_be_mixes_whose_weights_multiply_those_of_the_adapters():
    both = routed_blocks()
    rows = [{"a": 0.7, "b": -0.3}, {"c": 0.0}, {}, {"b": 2.0}]
    both.manager.route(rows)
    both.assert_rows([rows[0], None, None, rows[3]], tokens(4))
    both.manager.set_weight("b", 0.5)
    both.assert_rows([{"a": 0.7, "b": -0.15}, None, None, {"b": 1.0}], tokens(4))


@pytest.mark.parametrize("times", [1, 2, 3])
def test_interleaved_and_tiled_rows(times: int):
    both = routed_blocks()
    both.manager.route(ROWS, expand="interleave")
    seen = [row for row in ROWS for _ in range(times)]
    both.assert_rows(seen, tokens(len(seen)))
    both.manager.route(ROWS, expand="tile")
    both.assert_rows(ROWS * times, tokens(4 * times))


@pytest.mark.parametrize(
    ("names", "expand", "rows"),
    [
        (ROWS, None, 3), (ROWS, None, 8), (ROWS, None, 1), (["a"], None, 4),
        (ROWS, "tile", 6), (ROWS, "interleave", 2), (["a", "b"], "tile", 1),
    ],
)  # fmt: skip
def test_another_leading_dimension_is_refused_by_the_layer(names: Any, expand: Any, rows: int):
    both = routed_blocks()
    both.manager.route(names, expand=expand)
    expected = rf"0\.up was given a leading dimension of {rows}, but route\(\) names .*{len(names)}"
    with pytest.raises(ArgumentError, match=expected):
        both.model(tokens(rows))


def test_no_batch_is_refused():
    both = routed_blocks()
    both.manager.route(["a"])
    with pytest.raises(ArgumentError, match=r"0\.up was given no batch, so that it has no rows"):
        both.model(torch.zeros(16))


def test_route_none_goes_back_to_set_adapters():
    both = routed_blocks()
    both.manager.set_adapters(["a", "b"], [0.5, 2.0])
    before = both.model(tokens(4))
    both.manager.route(ROWS)
    assert both.manager.routes == ({"a": 1.0}, {}, {"c": 1.0}, {"a": 1.0})
    assert both.manager.active_adapters == ("a", "b")
    both.manager.route(None)
    assert both.manager.routes is None
    assert torch.equal(both.model(tokens(4)), before)


def test_set_adapters_while_routed_is_kept_for_later():
    both = routed_blocks()
    both.manager.route(ROWS)
    both.manager.set_adapters("b")
    both.assert_rows(ROWS, tokens(4))
    both.manager.route(None)
    both.assert_rows(["b"] * 4, tokens(4))


def test_disabled_adapters_contribute_to_no_row():
    both = routed_blocks()
    both.manager.route(ROWS)
    both.manager.disable_adapters()
    both.assert_rows([None] * 4, tokens(4))
    both.manager.enable_adapters()
    both.assert_rows(ROWS, tokens(4))


def test_the_context_restores_what_was_before():
    both = routed_blocks()
    with both.manager.routed(ROWS):
        both.assert_rows(ROWS, tokens(4))
        with both.manager.routed(["b", "a"], expand="tile"):
            both.assert_rows(["b", "a"] * 2, tokens(4))
        both.assert_rows(ROWS, tokens(4))
        with pytest.raises(KeyError), both.manager.routed(["b"]):
            raise KeyError
        both.assert_rows(ROWS, tokens(4))
    assert both.manager.routes is None


def test_another_thread_waits_for_its_turn_to_route():
    both = routed_blocks()
    done = threading.Event()

    def other() -> None:
        both.manager.route(["b"] * 4)
        done.set()

    thread = threading.Thread(target=other)
    with both.manager.routed(ROWS):
        thread.start()
        assert not done.wait(0.05)
        both.assert_rows(ROWS, tokens(4))
    thread.join(10)
    both.assert_rows(["b"] * 4, tokens(4))


def test_unloading_a_routed_adapter_is_an_error_that_names_it_and_its_rows():
    both = routed_blocks()
    both.manager.route(ROWS)
    before = Snapshot.of(both.manager, both.model)
    with pytest.raises(AdapterInUseError, match=r"'a' is routed to row 0, 3;"):
        both.manager.unload("a")
    with both.manager.routed(["b"]), pytest.raises(AdapterInUseError, match="'c'"):
        both.manager.unload("c")
    before.assert_unchanged(both.manager, both.model)
    both.manager.unload("b")
    both.assert_rows(ROWS, tokens(4))


def test_hotswapping_a_routed_adapter_shows_at_once():
    both = routed_blocks()
    both.manager.route(ROWS)
    for manager in (both.manager, both.by):
        manager.load(block_adapter(1, seed=20), "a")
    both.assert_rows(ROWS, tokens(4))


@pytest.mark.parametrize(
    ("names", "expand", "message"),
    [
        ("a", None, "a sequence with one entry for each row"),
        ({"a": 1.0}, None, "a sequence with one entry for each row"),
        (7, None, "a sequence with one entry for each row"),
        ([], None, "an entry for each row, got none"),
        ([3], None, "a name, None for the base model, or a mapping"),
        ([{3: 1.0}], None, "a name, None for the base model, or a mapping"),
        ([{"a": float("nan")}], None, "a weight must be a finite number"),
        ([{"a": 1e39}], None, "must be a finite float32"),
        (["a"], "repeat", "expand must be 'interleave', 'tile' or None"),
        (["a"], ["tile"], "expand must be 'interleave', 'tile' or None"),
    ],
)
def test_rows_without_meaning_change_nothing(names: Any, expand: Any, message: str):
    both = routed_blocks()
    both.manager.route(ROWS)
    before = Snapshot.of(both.manager, both.model)
    with pytest.raises(ArgumentError, match=message):
        both.manager.route(names, expand=expand)
    before.assert_unchanged(both.manager, both.model)
    both.assert_rows(ROWS, tokens(4))


def test_an_unknown_name_changes_nothing():
    both = routed_blocks()
    both.manager.route(ROWS)
    with pytest.raises(UnknownAdapterError, match="no adapter 'z' is loaded"):
        both.manager.route(["a", "z"])
    both.assert_rows(ROWS, tokens(4))


def test_without_routing_there_is_no_route():
    manager = SlotManager(blocks(), max_rank=4)
    with pytest.raises(ArgumentError, match="build it with routing=True"):
        manager.route([None])
    with pytest.raises(ArgumentError, match="build it with routing=True"), manager.routed(None):
        pass


def test_copies_and_pickles_route_on_their_own():
    both = routed_blocks()
    both.manager.route(ROWS)
    for twin in (copy.deepcopy(both.model), pickle.loads(pickle.dumps(both.model))):
        assert torch.equal(twin(tokens(4)), both.model(tokens(4)))
        manager = SlotManager.of(twin)
        manager.route(["b", None])
        both.assert_rows(["b", None], tokens(2), run=twin)
        both.assert_rows(ROWS, tokens(4))
        tables = {id(layer.lora_slots.routes) for block in twin for layer in (block.up, block.down)}
        assert len(tables) == 1


def test_a_cast_keeps_the_tables_in_float32_and_shared():
    both = routed_blocks()
    both.manager.route([{"a": 1 / 3}, None])
    expected = both.model(tokens(2))
    both.model.to(torch.bfloat16)
    tables = {id(layer.lora_slots.routes) for block in both.model for layer in block.children()}
    assert len(tables) == 1
    table = both.model[0].up.lora_slots.routes.factors
    assert table.dtype == torch.float32
    assert table.max() == torch.tensor(1 / 3)
    found = both.model(tokens(2).bfloat16())
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)
    both.manager.route([None, {"b": 1 / 3}])
    assert both.model[1].down.lora_slots.routes.factors is table


def test_the_same_number_of_rows_is_written_into_the_same_memory():
    both = routed_blocks()
    both.manager.route(ROWS)
    before = vars(both.model[0].up.lora_slots.routes).copy()
    both.manager.route(["b"] * 4)
    after = vars(both.model[1].up.lora_slots.routes)
    assert all(after[name] is before[name] for name in ("picks", "factors", "weights"))
    both.assert_rows(["b"] * 4, tokens(4))


def test_rank_buckets_show_what_is_routed():
    both = routed_blocks(rank_buckets=[0, 4, 8], max_rank=4)
    for names in ([None, None], ["a", None], ["a", "b"], ["c", {"a": 1.0, "b": 0.5}], ["b", None]):
        both.manager.route(names)
        both.assert_rows(names, tokens(2))
    both.manager.warmup(lambda: both.model(tokens(2)))
    both.assert_rows(["b", None], tokens(2))
    both.manager.route(None)
    both.manager.set_adapters("a")
    both.assert_rows(["a", "a"], tokens(2))


def test_rank_buckets_may_hide_what_contributes_to_no_row():
    both = routed_blocks(rank_buckets=[4], max_rank=16)
    routes: list[Any] = [["a", "b", "c", None], ["a", None, "a", {"b": 0.0, "c": 0.0}]]
    for names in routes:
        both.manager.route(names)
        both.assert_rows([name if isinstance(name, str) else None for name in names], tokens(4))
        both.manager.warmup(lambda: both.model(tokens(4)))
        both.manager.disable_adapters()
        both.assert_rows([None] * 4, tokens(4))
        both.manager.enable_adapters()
        both.assert_rows([name if isinstance(name, str) else None for name in names], tokens(4))


def test_with_nothing_routed_or_all_rows_the_bases_it_is_the_base():
    both = routed_blocks()
    both.manager.set_adapters([])
    base = blocks()(tokens(4))
    assert torch.equal(both.model(tokens(4)), base)
    both.manager.route([None] * 4)
    assert torch.equal(both.model(tokens(4)), base)


def test_detach_takes_the_tables_along():
    both = routed_blocks()
    both.manager.route(ROWS)
    both.manager.detach()
    assert torch.equal(both.model(tokens(3)), blocks()(tokens(3)))
    assert {type(m) for m in both.model.modules()} == {type(m) for m in blocks().modules()}
