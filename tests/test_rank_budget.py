"""With rank_budget adapters take as many rows as they need, from one pool; all is as without it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from dora_files import dora_adapter
from routed import ROWS, routed_blocks, tokens
from toys import (
    TINY,
    CountingBackend,
    Snapshot,
    block_adapter,
    blocks,
    peft_model,
    places,
    slot_buffers,
    toy,
    toy_adapter,
    toy_input,
    write_adapter,
)

from lora_slots import ArgumentError, NoFreeSlotError, RankTooLargeError, SlotManager

X = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))


def pool(rank_budget: int | None, **options: Any) -> tuple[torch.nn.Module, SlotManager]:
    options = {"max_rank": 32, "num_slots": 4, **options}
    model = blocks()
    return model, SlotManager(model, rank_budget=rank_budget, **options)


@torch.no_grad()
def test_16_adapters_of_rank_16_fit_where_4_of_rank_64_would_and_equal_peft(tmp_path: Path):
    tiny = TINY["llama"]
    paths = [
        write_adapter(tmp_path / str(n), tiny.build(), seed=n, r=16, lora_alpha=8 + n,
                      target_modules=list(tiny.attention))
        for n in range(16)
    ]  # fmt: skip
    model = tiny.build()
    manager = SlotManager(
        model, max_rank=64, num_slots=16, rank_budget=256, target_modules=list(tiny.attention)
    )
    for path in paths:
        manager.load(path, path.name, activate=False)
    assert len(manager.loaded_adapters) == 16
    assert manager.status().free_rows == 0
    for path in paths:
        manager.set_adapters(path.name)
        expected = tiny.run(peft_model(tiny.build(), path))
        torch.testing.assert_close(tiny.run(model), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(NoFreeSlotError):
        manager.load(paths[0], "one more")
    for path in paths[4:]:
        manager.unload(path.name)
    large = [
        write_adapter(tmp_path / f"large {n}", tiny.build(), seed=20 + n, r=64,
                      target_modules=list(tiny.attention))
        for n in range(3)
    ]  # fmt: skip
    for path in large:
        manager.load(path, path.name)
        expected = tiny.run(peft_model(tiny.build(), path))
        torch.testing.assert_close(tiny.run(model), expected, rtol=1e-5, atol=1e-5)


def test_the_buffers_have_exactly_as_many_rows_as_the_budget():
    model = toy()
    manager = SlotManager(model, max_rank=16, num_slots=5, rank_budget=24, dora=True, bias=True)
    slots = model.model.layers[0].q_proj.lora_slots
    shapes = {name: list(buffer.shape) for name, buffer in slots.named_buffers(recurse=False)}
    assert shapes == {
        "lora_A": [24, 8], "lora_B": [24, 6], "scaling": [1, 24],
        "lora_bias": [5, 6], "dora": [20, 6],
    }  # fmt: skip
    plain = SlotManager(toy(), max_rank=16, num_slots=5, rank_budget=24)
    (component,) = plain.status().components.values()
    assert component.nbytes == 4 * 24 * (8 + 6 + 1) * 4
    assert manager.status().rank_budget == 24


@pytest.mark.parametrize(
    ("max_rank", "rank", "rows"),
    [(64, 1, 8), (64, 8, 8), (64, 9, 16), (64, 64, 64), (12, 9, 12), (6, 2, 6), (20, 17, 20)],
)
def test_rows_are_given_in_multiples_of_8_or_all_that_one_adapter_can_have(max_rank, rank, rows):
    manager = SlotManager(toy(), max_rank=max_rank, num_slots=3, rank_budget=2 * max_rank)
    manager.load(toy_adapter(rank))
    assert manager.status().free_rows == 2 * max_rank - rows


def test_without_a_budget_below_it_every_slot_has_max_rank_rows():
    for budget in (None, 96):
        manager = SlotManager(toy(), max_rank=32, num_slots=3, rank_budget=budget)
        manager.load(toy_adapter(1))
        status = manager.status()
        assert (status.rank_budget, status.free_rows) == (96, 64)
        assert str(status).startswith("3 slots of max_rank 32, adapters enabled\n")


def test_max_rank_stays_the_limit_of_one_adapter():
    _, manager = pool(96, max_rank=16, num_slots=8)
    with pytest.raises(RankTooLargeError, match="max_rank is 16"):
        manager.load(block_adapter(17))


def test_what_does_not_fit_is_refused_and_told_who_has_what():
    model, manager = pool(64)
    manager.load(block_adapter(17, seed=1), "a")
    manager.load(block_adapter(8, seed=2), "b")
    manager.load(block_adapter(20, seed=3), "c")
    before = Snapshot.of(manager, model)
    messages = []
    for call in (manager.check, manager.load):
        with pytest.raises(NoFreeSlotError) as raised:
            call(block_adapter(10, seed=4), "d")
        messages.append(str(raised.value))
        before.assert_unchanged(manager, model)
    expected = (
        "adapter 'd' needs 16 rows, but of 64 only 8 are free, 8 side by side at most: 'a' has 24, "
        "'b' has 8, 'c' has 24; unload one, load over its name, or build the SlotManager with "
        "rank_budget=72"
    )
    assert messages == [expected] * 2
    manager.load(block_adapter(8, seed=4), "d")
    with pytest.raises(NoFreeSlotError, match="num_slots=5"):
        manager.load(block_adapter(1), "e")


def test_scattered_rows_are_told_apart_from_those_side_by_side():
    _, manager = pool(40, num_slots=5)
    for name in "abcde":
        manager.load(block_adapter(8), name)
    manager.unload("b")
    manager.unload("d")
    with pytest.raises(NoFreeSlotError, match="24 rows, but of 40 only 16 are free, 8 side by"):
        manager.load(block_adapter(24), "f")
    manager.load(block_adapter(16), "f")
    assert manager.status().free_rows == 0


def test_the_status_tells_how_many_rows_are_free():
    _, manager = pool(48)
    manager.load(block_adapter(9), "a")
    assert str(manager.status()).startswith(
        "4 slots of max_rank 32 in 48 rows, 32 of them free, adapters enabled\n"
    )


@pytest.mark.parametrize("rank_budget", [31, 129, 0, -8, 64.0, True, "auto"])
def test_a_budget_without_meaning_is_refused(rank_budget):
    model = blocks()
    expected = r"rank_budget must be a whole number from max_rank, 32, to .* 128, got"
    with pytest.raises(ArgumentError, match=expected):
        SlotManager(model, max_rank=32, num_slots=4, rank_budget=rank_budget)
    assert slot_buffers(model) == {}


@torch.no_grad()
def test_a_hotswap_needs_no_room_for_both_and_takes_it_where_it_is():
    model, manager = pool(48)
    manager.load(block_adapter(32, seed=1), "a")
    manager.load(block_adapter(16, seed=2), "b", activate=False)
    manager.load(block_adapter(30, seed=3), "a")
    twin, other = pool(None)
    other.load(block_adapter(30, seed=3), "a")
    torch.testing.assert_close(model(X), twin(X), rtol=1e-5, atol=1e-4)
    with pytest.raises(NoFreeSlotError, match="'b' needs 24 rows, but of 48 only 16 are free"):
        manager.load(block_adapter(17), "b")


@torch.no_grad()
def test_buckets_are_counted_within_the_budget():
    with pytest.raises(ArgumentError, match="from 0 to 48, the number of all rows"):
        pool(48, rank_buckets=[49])
    model, manager = pool(48, rank_buckets=[0, 8, 16])
    compiled = torch.compile(model, backend=(backend := CountingBackend()), fullgraph=True)
    manager.warmup(lambda: compiled(X))
    assert backend.graphs == 4
    for seed, (name, rank) in enumerate({"a": 16, "b": 8, "c": 7, "d": 10}.items()):
        manager.load(block_adapter(rank, seed=seed), name, activate=False)
    twin, other = pool(None)
    for seed, (name, rank) in enumerate({"a": 16, "b": 8, "c": 7, "d": 10}.items()):
        other.load(block_adapter(rank, seed=seed), name, activate=False)
    with manager.no_recompile():
        for names, rows in (["c"], 8), (["c", "b"], 16), (["d"], 16), (["a", "d"], 48), ([], 0):
            for each in (manager, other):
                each.set_adapters(names)
            torch.testing.assert_close(compiled(X), twin(X), rtol=1e-4, atol=1e-3)
            assert model[0].up.lora_slots.lora_A.shape[0] == rows
    assert backend.graphs == 4


@torch.no_grad()
def test_rows_of_a_batch_are_told_apart_in_any_rows_of_the_pool():
    both = routed_blocks(num_slots=5, max_rank=8, rank_budget=24)
    both.manager.route(ROWS)
    both.assert_rows(ROWS, tokens(4))
    both.manager.unload("b")
    both.manager.load(block_adapter(8, seed=9), "b")
    both.by.load(block_adapter(8, seed=9), "b")
    both.manager.route(["b", None, "c", "a"])
    both.assert_rows(["b", None, "c", "a"], tokens(4))


@torch.no_grad()
def test_dora_knows_its_rows_wherever_they_lie():
    outputs = []
    for budget in (None, 24):
        model = toy()
        manager = SlotManager(model, max_rank=16, num_slots=3, dora=True, rank_budget=budget)
        manager.load(toy_adapter(8, seed=1), "a")
        manager.load(toy_adapter(3, seed=2), "b")
        manager.unload("a")
        manager.load(dora_adapter(9, seed=3), "dora")
        manager.set_adapters(["b", "dora"], [0.5, 0.75])
        outputs.append(model(toy_input()))
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_share_rows_among_their_own_adapters(copied):
    model, manager = pool(48)
    manager.load(block_adapter(24, seed=1), "a")
    manager.load(block_adapter(8, seed=2), "b", activate=False)
    before = Snapshot.of(manager, model)
    output = model(X)
    twin = copied(model)
    own = SlotManager.of(twin)
    before.assert_unchanged(own, twin)
    own.unload("a")
    own.load(block_adapter(32, seed=3), "c")
    assert own.status().free_rows == 8
    before.assert_unchanged(manager, model)
    assert torch.equal(model(X), output)
    fresh, other = pool(None)
    other.load(block_adapter(32, seed=3), "c")
    torch.testing.assert_close(twin(X), fresh(X), rtol=1e-5, atol=1e-4)


def test_from_adapters_takes_a_budget(tmp_path: Path):
    path = write_adapter(tmp_path / "a", toy(), r=12, target_modules=["q_proj"])
    manager = SlotManager.from_adapters(toy(), [path], num_slots=4, rank_budget=20)
    status = manager.status()
    assert (status.max_rank, status.rank_budget) == (12, 20)


@torch.no_grad()
def test_to_and_casts_leave_everyone_his_rows():
    model, manager = pool(48)
    manager.load(block_adapter(20, seed=1), "a")
    manager.load(block_adapter(4, seed=2), "b")
    manager.set_adapters(["a", "b"])
    output = model(X)
    where = places(model)
    model.to(torch.float64)
    assert places(model).keys() == where.keys()
    manager.unload("a")
    manager.load(block_adapter(32, seed=3), "c", activate=False)
    manager.unload("c")
    manager.load(block_adapter(20, seed=1), "a", activate=False)
    manager.set_adapters(["a", "b"])
    torch.testing.assert_close(model(X.double()).float(), output, rtol=1e-4, atol=1e-3)
