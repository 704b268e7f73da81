"""With rank_buckets a forward computes with the rows in use; each number of rows is one graph."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from faults import Fault
from torch import Tensor, nn
from toys import CountingBackend, Snapshot, block_adapter, blocks, toy, toy_input, write_adapter

from lora_slots import ArgumentError, RecompileError, SlotManager
from lora_slots.bank.buckets import bucket_sizes

RANKS = {"a": 4, "b": 8, "c": 7, "d": 30}
SIZES = [0, 8, 16]
X = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))


def attached(rank_buckets: Any = SIZES, **options: Any) -> tuple[nn.Module, SlotManager]:
    model = blocks(2)
    return model, SlotManager(model, max_rank=32, num_slots=4, rank_buckets=rank_buckets, **options)


def filled(rank_buckets: Any = SIZES) -> tuple[nn.Module, SlotManager]:
    model, manager = attached(rank_buckets)
    for seed, (name, rank) in enumerate(RANKS.items()):
        manager.load(block_adapter(rank, seed=seed), name, activate=False)
    return model, manager


@torch.no_grad()
def expected(names: Iterable[str], weights: list[float] | None = None) -> Tensor:
    model, manager = filled(None)
    manager.set_adapters(list(names), weights)
    return model(X)


def rows_seen(model: nn.Module) -> int:
    return model[0].up.lora_slots.lora_A.shape[0]


CHOICES = [["a"], ["b"], ["d", "a"], ["c"], ["a", "b", "c", "d"], [], ["c", "a"], ["d"], ["b", "c"]]


@torch.no_grad()
def test_whatever_is_active_the_output_is_that_of_all_rows_and_nothing_recompiles():
    model, manager = filled()
    backend = CountingBackend()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    manager.warmup(lambda: compiled(X))
    assert backend.graphs == 4  # 0, 8, 16 and all 128
    with manager.no_recompile():
        for names in CHOICES:
            manager.set_adapters(names)
            torch.testing.assert_close(compiled(X), expected(names), rtol=1e-4, atol=1e-3)
        manager.set_weight("b", -0.5)
        torch.testing.assert_close(
            compiled(X), expected(["b", "c"], [-0.5, 1.0]), rtol=1e-4, atol=1e-3
        )
    assert backend.graphs == 4


@pytest.mark.parametrize(
    ("names", "rows"),
    [([], 0), (["a"], 8), (["b"], 8), (["c", "a"], 16), (["d"], 128), (["d", "b"], 128)],
)
def test_the_forward_sees_the_smallest_bucket_that_the_active_adapters_fit_into(names, rows):
    model, manager = filled()
    manager.set_adapters(names)
    assert rows_seen(model) == rows


def test_two_adapters_of_rank_8_in_four_slots_of_128_pay_for_16_rows():
    model = blocks(1, size=64)
    manager = SlotManager(model, max_rank=128, num_slots=4, rank_buckets=[0, 16, 64])
    for seed in range(4):
        manager.load(block_adapter(8, count=1, seed=seed, size=64), str(seed), activate=False)
    for pair in (["0", "1"], ["2", "3"], ["1", "3"]):
        manager.set_adapters(pair)
        assert rows_seen(model) == 16


@torch.no_grad()
def test_with_nothing_active_the_model_computes_nothing_but_itself():
    model, manager = filled()
    manager.set_adapters([])
    base = blocks(2)(X)
    assert torch.equal(model(X), base)
    manager.set_adapters(["d"])
    manager.disable_adapters()
    assert rows_seen(model) == 0
    assert torch.equal(model(X), base)
    manager.enable_adapters()
    assert rows_seen(model) == 128


def test_the_first_use_of_a_bucket_is_told_from_a_recompile():
    model, manager = attached("auto")
    compiled = torch.compile(model, backend=CountingBackend())
    compiled(X)
    manager.load(block_adapter(4))
    with pytest.raises(RecompileError, match="warmup"), manager.no_recompile():
        compiled(X)
    with manager.no_recompile(allow_first=True):
        compiled(X)
    with manager.no_recompile():
        compiled(X)
    # The twin: another reason to compile is no first use of a bucket.
    with pytest.raises(RecompileError) as raised, manager.no_recompile():
        compiled(X[:2])
    assert "size mismatch" in str(raised.value)


@torch.no_grad()
def test_memory_never_moves():
    model, manager = filled()
    places = {
        (target.path, name): target.slots.whole(name).data_ptr()
        for target in manager._layout
        for name in ("lora_A", "lora_B", "scaling")
    }
    for names in CHOICES:
        manager.set_adapters(names)
        for (path, name), place in places.items():
            slots = model.get_submodule(path).lora_slots
            assert slots.whole(name).data_ptr() == place
            if slots.get_buffer(name).numel():
                assert slots.get_buffer(name).data_ptr() == place


@torch.no_grad()
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_fault_while_rows_move_changes_nothing(error):
    def start() -> tuple[nn.Module, SlotManager]:
        model, manager = filled()
        manager.set_adapters(["a", "d"])
        return model, manager

    def whole(manager: SlotManager) -> dict[tuple[str, str], Tensor]:
        return {
            (t.path, name): t.slots.whole(name).clone()
            for t in manager._layout
            for name in ("lora_A", "lora_B", "scaling")
        }

    for change in (lambda m: m.set_adapters(["c"]), lambda m: m.load(block_adapter(20), "a")):
        operation = 0
        while True:
            model, manager = start()
            before, rows = Snapshot.of(manager, model), whole(manager)
            try:
                with Fault(operation, error("fault")):
                    change(manager)
            except error:
                before.assert_unchanged(manager, model)
                after = whole(manager)
                assert all(torch.equal(rows[key], after[key]) for key in rows)
                operation += 1
            else:
                break
        assert operation > 2


@torch.no_grad()
def test_copies_pickles_and_casts_keep_all_rows():
    model, manager = filled()
    manager.set_adapters(["b"])
    output = model(X)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    pickled = pickle.loads(pickle.dumps(model))
    for copied in (copy.deepcopy(model), torch.load(stream, weights_only=False), pickled):
        own = SlotManager.of(copied)
        assert torch.equal(copied(X), output)
        own.set_adapters(["a", "b", "c", "d"])
        torch.testing.assert_close(copied(X), expected(RANKS), rtol=1e-4, atol=1e-3)
        assert torch.equal(model(X), output)
    model.to(torch.float64)
    assert rows_seen(model) == 8
    assert model[0].up.lora_slots.whole("lora_A").shape == (128, 16)
    manager.set_adapters(["a", "b", "c", "d"])
    result = model(X.double()).float()
    torch.testing.assert_close(result, expected(RANKS), rtol=1e-4, atol=1e-3)


@torch.no_grad()
def test_adapters_of_max_rank_fit_whatever_that_is_a_multiple_of():
    model = blocks(2)
    manager = SlotManager(model, max_rank=12, num_slots=2, rank_buckets=[0, 12])
    for seed, name in enumerate("ab"):
        manager.load(block_adapter(12, seed=seed), name)
        assert rows_seen(model) == 12
    manager.set_adapters(["a", "b"])
    whole = blocks(2)
    other = SlotManager(whole, max_rank=12, num_slots=2)
    for seed, name in enumerate("ab"):
        other.load(block_adapter(12, seed=seed), name)
    other.set_adapters(["a", "b"])
    torch.testing.assert_close(model(X), whole(X), rtol=1e-4, atol=1e-3)


# PEFT takes the bias of lora_B for one of its matrices.
@pytest.mark.filterwarnings("ignore:Adapter 'default'. 4 LoRA tensor:UserWarning")
@torch.no_grad()
def test_dora_and_biases_know_whose_rows_they_see(tmp_path):
    paths = {
        "dora": write_adapter(tmp_path / "dora", toy(), r=3, use_dora=True, seed=1,
                              target_modules=["q_proj"]),
        "bias": write_adapter(tmp_path / "bias", toy(bias=True), r=5, lora_bias=True, seed=2,
                              target_modules=["q_proj", "v_proj"]),
        "plain": write_adapter(tmp_path / "plain", toy(), r=8, seed=3, target_modules=["v_proj"]),
    }  # fmt: skip
    outputs = []
    for buckets in (None, [0, 8, 16]):
        model = toy()
        manager = SlotManager(
            model, max_rank=8, num_slots=3, dora=True, bias=True, rank_buckets=buckets
        )
        for name, path in paths.items():
            manager.load(path, name)
        run = []
        for names in (["dora"], ["bias"], ["plain", "dora"], ["bias", "dora", "plain"], ["dora"]):
            manager.set_adapters(names, 0.5)
            run.append(model(toy_input()))
        manager.set_adapters([])
        assert torch.equal(model(toy_input()), toy()(toy_input()))
        outputs.append(run)
    for whole, low in zip(*outputs, strict=True):
        torch.testing.assert_close(whole, low, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rank_buckets", "sizes"),
    [
        (None, None),
        ("auto", (0, 8, 32, 128)),
        ([16], (16, 128)),
        ([0, 128, 64], (0, 64, 128)),
        ((), (128,)),
    ],
)
def test_sizes_always_end_with_all_rows(rank_buckets, sizes):
    assert bucket_sizes(rank_buckets, 128) == sizes


@pytest.mark.parametrize("rank_buckets", ["all", 8, [129], [-1], [1.5], [True]])
def test_sizes_without_meaning_are_refused(rank_buckets):
    with pytest.raises(ArgumentError, match="rank_buckets must be"):
        attached(rank_buckets)


def test_more_sizes_than_dynamo_would_compile_are_refused():
    with pytest.raises(ArgumentError, match="recompile_limit=8; name fewer sizes"):
        attached([0, 8, 16, 32])
    with torch._dynamo.config.patch(recompile_limit=16):
        attached([0, 8, 16, 32])
