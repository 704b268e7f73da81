"""Buffers that are alike lie in one piece of memory, and a load writes it in few strided copies."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from benchmarks.models import Model, Shape, base_weights
from torch import Tensor, nn
from toys import pairs, slot_buffers, tensors_of, toy, toy_adapter, toy_input

from lora_slots import RawAdapter, SlotManager, read_adapter
from lora_slots.bank import buffers
from lora_slots.bank.buffers import copy_bits
from lora_slots.bank.places import Copies, homes, progressions
from lora_slots.staging.staged import StagedRows

LAYERS = 6
MODULES = [f"model.layers.{n}.{name}" for n in range(LAYERS) for name in ("q_proj", "v_proj")]
CPU = torch.device("cpu")

# The rank of each module, and how many copies write as many rows at equal distances.
ADAPTERS: dict[str, tuple[Mapping[str, int], int]] = {
    "all modules": (dict.fromkeys(MODULES, 4), 1),
    "one kind": (dict.fromkeys(MODULES[::2], 4), 1),
    "one layer": (dict.fromkeys(MODULES[4:6], 4), 1),
    "one module": ({MODULES[7]: 4}, 1),
    "no pattern": ({MODULES[n]: 4 for n in (0, 1, 2, 5, 7, 9, 10)}, 3),
    "a rank for each kind": ({module: 2 if "q_" in module else 5 for module in MODULES}, 2),
    "a rank for each module": ({module: n % 8 + 1 for n, module in enumerate(MODULES)}, 8),
}


def adapter(ranks: Mapping[str, int], seed: int = 1) -> tuple[RawAdapter, dict[str, Any]]:
    """An adapter with these ranks, and its tensors by module."""
    tensors = pairs(ranks, seed=seed)
    config = {"r": 4, "lora_alpha": 8, "rank_pattern": dict(ranks)}
    return read_adapter(tensors_of(tensors), config), tensors


def assert_holds(model: nn.Module, tensors: Mapping[str, Any]) -> None:
    """The first rows are those of an adapter, and all others zero."""
    for module in MODULES:
        slots = model.get_submodule(module).lora_slots
        A, B = tensors.get(module, (torch.zeros(0, 8), torch.zeros(6, 0)))
        for buffer, rows in ((slots.lora_A, A), (slots.lora_B, B.t())):
            expected = torch.zeros_like(buffer)
            expected[: len(rows)] = rows
            assert torch.equal(buffer, expected), module


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many arrays each call of `copy_bits` copies."""
    counts: list[int] = []
    copy_bits = buffers.copy_bits

    def counted(into: list[Any], values: list[Any]) -> None:
        counts.append(len(into))
        copy_bits(into, values)

    monkeypatch.setattr(buffers, "copy_bits", counted)
    return counts


def own_memory(model: nn.Module) -> None:
    for buffer in model.buffers():
        buffer.data = buffer.data.clone()


@pytest.mark.parametrize("what", ADAPTERS)
def test_rows_at_equal_distances_are_written_in_one_copy(what, copies):
    ranks, expected = ADAPTERS[what]
    model = toy(layers=LAYERS)
    manager = SlotManager(model, max_rank=8)
    manager.load(toy_adapter(8, modules=MODULES, seed=9))
    copies.clear()
    source, tensors = adapter(ranks)
    manager.load(source)
    assert copies == [expected] * 3  # lora_A, lora_B and scaling
    assert_holds(model, tensors)


def test_buffers_with_memory_of_their_own_are_written_one_by_one(copies):
    """The twin: what the test above counts is due to the slabs."""
    model = toy(layers=LAYERS)
    manager = SlotManager(model, max_rank=8)
    own_memory(model)
    source, tensors = adapter(ADAPTERS["all modules"][0])
    manager.load(source)
    assert copies == [len(MODULES)] * 3
    assert_holds(model, tensors)


def test_a_deep_model_of_several_widths_takes_as_many_copies_as_a_shallow_one(copies):
    for layers in (1, 5):
        shape = Shape(layers=layers, hidden=16, mlp=24, dtype=torch.bfloat16)
        model = Model(base_weights(shape, CPU)).eval()
        tensors = {
            f"layers.{n}.{name}": (torch.ones(2, inputs), torch.ones(outputs, 2))
            for n in range(layers)
            for name, (inputs, outputs) in shape.linears.items()
        }
        manager = SlotManager(model, max_rank=4)
        manager.load(read_adapter(tensors_of(tensors), {"r": 2, "lora_alpha": 2}))
    # Of both buffers there are two widths, and all of one width lie side by side; all scalings do.
    assert [sorted(copies[:3]), sorted(copies[3:])] == [[1, 2, 2]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_rank", [1, 7, 16])
def test_a_slab_has_the_size_of_its_buffers_and_each_is_aligned(max_rank, dtype):
    model = toy(layers=3)
    SlotManager(model, max_rank=max_rank, dtype=dtype)
    by_memory: dict[int, list[Tensor]] = {}
    for buffer in slot_buffers(model).values():
        by_memory.setdefault(buffer.untyped_storage().data_ptr(), []).append(buffer)
        assert buffer.data_ptr() % 64 == 0
        assert buffer.is_contiguous()
    assert len(by_memory) == 3  # lora_A, lora_B and scaling
    for members in by_memory.values():
        assert len({(m.shape, m.dtype) for m in members}) == 1
        padded = -(-members[0].nbytes // 64) * 64
        assert members[0].untyped_storage().nbytes() == len(members) * padded
        assert len({m.data_ptr() for m in members}) == len(members) == 6


def test_attaching_allocates_the_slabs_and_nothing_else_of_their_size():
    model = toy(inputs=256, outputs=256, layers=4)
    with torch.profiler.profile(profile_memory=True) as profile:
        SlotManager(model, max_rank=64)
    made = sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())
    slots = sum(buffer.nbytes for buffer in slot_buffers(model).values())
    assert slots <= made < 1.1 * slots


def test_on_meta_nothing_is_allocated():
    model = toy(layers=3).to("meta")
    SlotManager(model, max_rank=8)
    assert all(buffer.is_meta for buffer in slot_buffers(model).values())


def test_slabs_do_not_mix_dtypes():
    model = toy(layers=2)
    model.model.layers[1].to(torch.bfloat16)
    SlotManager(model, max_rank=8)
    first, second = (layer.q_proj.lora_slots.lora_A for layer in model.model.layers)
    assert (first.dtype, second.dtype) == (torch.float32, torch.bfloat16)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def by_pickle(model: nn.Module) -> tuple[nn.Module, int]:
    data = pickle.dumps(model)
    return pickle.loads(data), len(data)


def by_torch_save(model: nn.Module) -> tuple[nn.Module, int]:
    file = io.BytesIO()
    torch.save(model, file)
    size = file.tell()
    file.seek(0)
    return torch.load(file, weights_only=False), size


def to_a_process(model: nn.Module) -> nn.Module:
    return pickle.loads(ForkingPickler.dumps(model))


def test_what_another_process_gets_of_shared_memory_stays_shared():
    model = toy(layers=LAYERS)
    manager = SlotManager(model, max_rank=8)
    model.share_memory()
    source, tensors = adapter(ADAPTERS["all modules"][0])
    twin = to_a_process(model)
    manager.load(source)
    assert_holds(twin, tensors)


def by_deepcopy(model: nn.Module) -> tuple[nn.Module, int]:
    twin = copy.deepcopy(model)
    memory = {t.untyped_storage().data_ptr(): t for t in (*twin.parameters(), *twin.buffers())}
    return twin, sum(tensor.untyped_storage().nbytes() for tensor in memory.values())


@pytest.mark.parametrize("options", [{}, {"rank_buckets": [8]}], ids=["all rows", "some rows"])
@pytest.mark.parametrize("copied", [by_pickle, by_torch_save, by_deepcopy])
def test_copies_and_pickles_hold_a_slab_once_and_keep_it_one(
    copied: Callable[[nn.Module], tuple[nn.Module, int]], options: dict[str, Any], copies: list[int]
) -> None:
    model = toy(layers=LAYERS)
    manager = SlotManager(model, max_rank=256, **options)
    manager.load(adapter(ADAPTERS["all modules"][0])[0])
    seen = slot_buffers(model)
    twin, size = copied(model)
    slots = len(MODULES) * 256 * (8 + 6 + 1) * 4
    assert slots < size < 1.6 * slots  # beside the staged adapter, names and code
    assert {n: b.shape for n, b in slot_buffers(twin).items()} == {
        n: b.shape for n, b in seen.items()
    }
    source, _ = adapter(ADAPTERS["one kind"][0], seed=2)
    copies.clear()
    SlotManager.of(twin).load(source)
    assert copies == [1, 1, 1]
    plain = toy(layers=LAYERS)
    SlotManager(plain, max_rank=256).load(source)
    torch.testing.assert_close(twin(toy_input()), plain(toy_input()))
    assert not torch.equal(twin(toy_input()), model(toy_input()))


@pytest.mark.parametrize("what", ADAPTERS)
def test_where_some_buffers_got_other_memory_only_that_is_written(what):
    model = toy(layers=LAYERS)
    manager = SlotManager(model, max_rank=8)
    manager.load(toy_adapter(8, modules=MODULES, seed=9), "other")
    manager.unload("other")
    source, tensors = adapter(ADAPTERS[what][0])
    manager.load(source, "a")  # so that what was found out once could be used again
    old = []
    for number, module in enumerate(MODULES):
        slots = model.get_submodule(module).lora_slots
        for name in ("lora_A", "lora_B"):
            buffer = slots.get_buffer(name)
            if number % 5 == 1:
                old.append((buffer.data, buffer.clone()))
                buffer.data = buffer.clone()
            elif number % 5 == 2:
                old.append((buffer, buffer.clone()))
                slots._buffers[name] = buffer.clone()
    assert_holds(model, tensors)
    source, tensors = adapter(ADAPTERS[what][0], seed=3)
    manager.load(source, "a")
    assert_holds(model, tensors)
    assert all(torch.equal(memory, before) for memory, before in old)
    manager.unload("a")
    assert_holds(model, {})
    assert all(torch.equal(memory, before) for memory, before in old)


@pytest.mark.parametrize("what", ADAPTERS)
def test_what_is_large_enough_for_torchs_threads_gets_the_same_bits(what, monkeypatch):
    monkeypatch.setattr(buffers, "_WORTH_TORCH", 0)
    model = toy(layers=LAYERS)
    manager = SlotManager(model, max_rank=8)
    source, tensors = adapter(ADAPTERS[what][0])
    with torch.inference_mode():
        manager.load(toy_adapter(8, modules=MODULES, seed=9))
    manager.load(source)
    assert_holds(model, tensors)
    manager.unload("default")
    assert_holds(model, {})


def test_autograd_notices_a_load_between_forward_and_backward():
    model = toy(layers=LAYERS)
    manager = SlotManager(model, max_rank=8)
    manager.load(toy_adapter(4, modules=MODULES))
    x = toy_input().requires_grad_()
    loss = model(x).sum()
    manager.load(toy_adapter(4, modules=MODULES[:1]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("numbers", "cuts", "pieces"),
    [
        ([], (), []),
        ([3], (), [[3]]),
        ([0, 1, 2], (), [[0, 1, 2]]),
        ([0, 1, 2], {2}, [[0, 1], [2]]),
        ([0, 2, 6, 8, 12, 14], (), [[0, 2], [6, 8], [12, 14]]),
        ([0, 5, 6, 7], {1, 2, 3}, [[0], [5], [6], [7]]),
    ],
)
def test_progressions_are_pieces_with_equal_steps(numbers, cuts, pieces):
    assert [numbers[piece] for piece in progressions(numbers, cuts)] == pieces


def test_rows_of_other_memory_are_not_taken_for_neighbours():
    # Some allocators put tensors right side by side.
    memory = torch.arange(3 * 8, dtype=torch.float32).numpy()
    low, middle, high = (torch.from_numpy(part.reshape(2, 4)) for part in memory.reshape(3, 8))
    buffers = torch.zeros(3, 2, 4)
    rows = StagedRows((0, 1, 2), (middle, high, low))
    copies = Copies.of(rows, homes(dict(enumerate(buffers))))
    copy_bits(copies.into, copies.values(rows))
    assert torch.equal(buffers, torch.stack([middle, high, low]))
