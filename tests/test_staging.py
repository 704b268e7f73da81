"""Before a slot is written, every size and value is checked and every tensor is cast and packed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import (
    TOY_MODULES,
    Snapshot,
    expected_toy,
    pairs,
    refusal,
    slot_buffers,
    tensors_of,
    toy,
    toy_folder,
    toy_input,
    write_folder,
)

from lora_slots import (
    AdapterFileError,
    LoraSlotsError,
    RankTooLargeError,
    SlotManager,
    TargetMismatchError,
    inspect_adapter,
    read_adapter,
)
from lora_slots.resolve.resolving import resolve
from lora_slots.staging.stage import StagedAdapter, stage

Change = Callable[[dict[str, Tensor]], None]
LAST = f"base_model.model.{TOY_MODULES[-1]}"
A_KEY, B_KEY = f"{LAST}.lora_A.weight", f"{LAST}.lora_B.weight"


def good(rank: int = 4, seed: int = 1) -> dict[str, Tensor]:
    return tensors_of(pairs(dict.fromkeys(TOY_MODULES, rank), seed=seed))


def refuse(
    change: Change, error: type[LoraSlotsError], message: str, *, dtype: torch.dtype | None = None
) -> None:
    """A file whose last module is wrong is refused as a whole, strict or not."""
    tensors = good()
    change(tensors)
    refusal(read_adapter(tensors), error, message, strict=False, dtype=dtype)


# Ranks


def test_a_smaller_adapter_leaves_nothing_of_a_larger_one() -> None:
    model = toy()
    manager = SlotManager(model, max_rank=8)
    ones = {key: torch.ones_like(tensor) for key, tensor in good(8).items()}
    manager.load(read_adapter(ones, {"r": 8, "lora_alpha": 8}))
    both = pairs({TOY_MODULES[0]: 2})
    report = manager.load(read_adapter(tensors_of(both), {"r": 2, "lora_alpha": 8}))
    assert report.scaling == {TOY_MODULES[0]: 4.0}
    for name, buffer in slot_buffers(model).items():
        used = 2 if name.startswith(TOY_MODULES[0]) else 0
        rest = buffer[:, used:] if name.endswith("scaling") else buffer[used:]
        assert torch.equal(rest, torch.zeros_like(rest)), name
    slots = model.model.layers[0].q_proj.lora_slots
    assert torch.equal(slots.lora_A[:2], both[TOY_MODULES[0]][0])
    assert torch.equal(slots.lora_B[:2], both[TOY_MODULES[0]][1].t())
    assert slots.scaling[0, :2].tolist() == [4.0, 4.0]


def test_a_load_writes_no_row_of_another_slot() -> None:
    model = toy()
    manager = SlotManager(model, max_rank=8, num_slots=3)
    for name, rank in (("first", 8), ("second", 8), ("third", 8)):
        manager.load(read_adapter(good(rank, seed=rank)), name)
    manager.set_adapters(["first", "third"], [0.5, 2])
    before = Snapshot.of(manager, model)
    manager.load(read_adapter(good(3, seed=5)), "second")
    for name, buffer in slot_buffers(model).items():
        rows = buffer.t() if name.endswith("scaling") else buffer
        was = before.buffers[name]
        was = was.t() if name.endswith("scaling") else was
        assert torch.equal(rows[:8], was[:8])
        assert torch.equal(rows[16:], was[16:])
        assert torch.equal(rows[11:16], torch.zeros_like(rows[11:16]))


def test_a_rank_above_max_rank_is_refused_with_where_and_what_to_do(tmp_path: Path) -> None:
    ranks = {**dict.fromkeys(TOY_MODULES, 4), TOY_MODULES[2]: 16}
    path = write_folder(tmp_path / "large", tensors_of(pairs(ranks)), None)
    model = toy()
    manager = SlotManager(model, max_rank=8)
    manager.load(toy_folder(tmp_path / "live"))
    before = Snapshot.of(manager, model)
    message = (
        f"^adapter {path} has rank 16 at {TOY_MODULES[2]}, but max_rank is 8; "
        "build the SlotManager with max_rank=16, or load it with compress_to"
    )
    with pytest.raises(RankTooLargeError, match=message):
        manager.load(path)
    before.assert_unchanged(manager, model)
    assert SlotManager(toy(), max_rank=inspect_adapter(path).max_rank).load(path).rank == 16


# Shapes


@pytest.mark.parametrize(
    ("A", "B"),
    [((4, 6), (20, 4)), ((4, 10), (12, 4)), ((4, 11), (20, 4)), ((4, 10), (21, 4))],
)
def test_only_the_rank_axis_is_ever_padded(A: tuple[int, int], B: tuple[int, int]) -> None:
    model = nn.ModuleDict({"lin": nn.Linear(10, 20)})
    manager = SlotManager(model, max_rank=8)
    manager.load(read_adapter(tensors_of(pairs({"lin": 8}, inputs=10, outputs=20))))
    before = Snapshot.of(manager, model)
    message = (
        r"^lin has in_features=10 and out_features=20, so lora_A must be \(4, 10\) and lora_B "
        rf"\(20, 4\); adapter .* has \({A[0]}, {A[1]}\) and \({B[0]}, {B[1]}\): it was made for"
    )
    with pytest.raises(TargetMismatchError, match=message):
        manager.load(read_adapter(tensors_of({"lin": (torch.ones(A), torch.ones(B))})))
    before.assert_unchanged(manager, model)


def put(key: str, value: Tensor) -> Change:
    return lambda tensors: tensors.__setitem__(key, value)


BAD_SHAPES: dict[str, tuple[Change, type[LoraSlotsError], str]] = {
    "no B": (lambda tensors: tensors.pop(B_KEY), AdapterFileError, f"has no {B_KEY}, but its"),
    "no A": (lambda tensors: tensors.pop(A_KEY), AdapterFileError, f"has no {A_KEY}, but its"),
    "two ranks": (
        put(B_KEY, torch.ones(6, 3)), AdapterFileError,
        rf"of {LAST} in .* same rank, .* got 4 \(A is \(4, 8\)\) and 3 \(B is \(6, 3\)\)",
    ),
    "transposed": (
        lambda tensors: tensors.update({A_KEY: torch.ones(8, 4), B_KEY: torch.ones(4, 8)}),
        TargetMismatchError, r"has \(8, 4\) and \(4, 8\)",
    ),
    "rank 0": (
        lambda tensors: tensors.update({A_KEY: torch.ones(0, 8), B_KEY: torch.ones(6, 0)}),
        AdapterFileError, "same rank, at least 1, got 0",
    ),
    "one dimension": (
        put(A_KEY, torch.ones(8)), AdapterFileError, r"at least two dimensions, got shape \(8,\)",
    ),
    "convolution": (
        lambda tensors: tensors.update(
            {A_KEY: torch.ones(4, 8, 3, 3), B_KEY: torch.ones(6, 4, 1, 1)}
        ),
        TargetMismatchError, r"has \(4, 8, 3, 3\) and \(6, 4, 1, 1\)",
    ),
    "integers": (
        put(A_KEY, torch.ones(4, 8, dtype=torch.int8)), AdapterFileError,
        f"{A_KEY} of .* must be floating point, got torch.int8",
    ),
    "complex": (
        put(B_KEY, torch.ones(6, 4, dtype=torch.complex64)), AdapterFileError,
        f"{B_KEY} of .* must be floating point, got torch.complex64",
    ),
    "two As": (
        put(f"{LAST}.lora_A.other.weight", torch.ones(4, 8)), AdapterFileError,
        f"two lora_A tensors for '{LAST}'",
    ),
    "no data": (put(A_KEY, torch.ones(4, 8, device="meta")), LoraSlotsError, "meta"),
    "sparse": (put(A_KEY, torch.ones(4, 8).to_sparse()), LoraSlotsError, "sparse"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD_SHAPES)
def test_a_pair_that_is_no_pair_of_matrices_is_refused(bad: str) -> None:
    refuse(*BAD_SHAPES[bad])


# Values


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", ["lora_A", "lora_B"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_values_that_are_not_finite_are_refused_with_where_and_how_many(
    side: str, value: float, dtype: torch.dtype
) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        for key in tensors:
            tensors[key] = tensors[key].to(dtype)
        tensors[f"{LAST}.{side}.weight"][1, :2] = value

    count = 32 if side == "lora_A" else 24
    message = f"{side} of {TOY_MODULES[-1]} in adapter .* has 2 NaN or infinite values of {count}$"
    refuse(spoil, AdapterFileError, message)


def test_values_of_an_8_bit_file_that_are_not_finite_are_refused_too() -> None:
    spoiled = torch.full((4, 8), float("nan")).to(torch.float8_e4m3fn)
    refuse(put(A_KEY, spoiled), AdapterFileError, f"lora_A of {TOY_MODULES[-1]} .*32 NaN")


@pytest.mark.parametrize("side", ["lora_A", "lora_B"])
def test_values_that_overflow_the_buffers_dtype_are_refused_with_the_remedy(side: str) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAST}.{side}.weight"][0, 0] = 1e5

    message = (
        f"{side} of {TOY_MODULES[-1]} .* has 1 values of .* that are finite in its torch.float32 "
        "but not in the buffers' torch.float16; build the SlotManager with dtype=torch.float32"
    )
    refuse(spoil, AdapterFileError, message, dtype=torch.float16)


def test_after_a_refused_nan_the_next_adapter_and_weight_0_are_clean() -> None:
    model, x = toy(), toy_input()
    manager = SlotManager(model, max_rank=8)
    spoiled = good()
    spoiled[A_KEY][0, 0] = float("nan")
    with pytest.raises(AdapterFileError, match="1 NaN"):
        manager.load(read_adapter(spoiled))
    assert torch.equal(model(x), toy()(x))
    report = manager.load(read_adapter(good()))
    expected = expected_toy(toy(), x, pairs(dict.fromkeys(TOY_MODULES, 4), seed=1), report.scaling)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-4)
    manager.set_weight("default", 0)
    assert torch.equal(model(x), toy()(x))


# What is staged


def staged(model: nn.Module, tensors: dict[str, Tensor], **options: Any) -> StagedAdapter:
    layout = SlotManager(model, max_rank=8, **options)._layout
    return stage(resolve(read_adapter(tensors), layout), layout, max_rank=8)


def blocks_of(tensors: Iterable[Tensor]) -> set[int]:
    """The memory that tensors are views of."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@pytest.mark.parametrize("saved", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_staged_tensors_are_rank_major_exact_casts_in_memory_of_their_own(
    saved: torch.dtype, held: torch.dtype
) -> None:
    ranks = dict(zip(TOY_MODULES, [1, 8, 3, 4], strict=True))
    tensors = {key: tensor.to(saved) for key, tensor in tensors_of(pairs(ranks)).items()}
    # Neither layout in memory nor autograd of the caller's tensors may matter.
    tensors = {key: tensor.t().contiguous().t().requires_grad_() for key, tensor in tensors.items()}
    before = {key: tensor.detach().clone() for key, tensor in tensors.items()}
    adapter = staged(toy(), tensors, dtype=held)
    assert adapter.targets == (0, 1, 2, 3)
    assert adapter.ranks == tuple(ranks.values())
    for rows, side, size in (
        (adapter.rows["lora_A"].rows, "A", 8),
        (adapter.rows["lora_B"].rows, "B", 6),
    ):
        for part, module in zip(rows, TOY_MODULES, strict=True):
            source = before[f"base_model.model.{module}.lora_{side}.weight"]
            assert part.shape == (ranks[module], size)
            assert (part.dtype, part.is_contiguous(), part.requires_grad) == (held, True, False)
            assert torch.equal(part, (source if side == "A" else source.t()).to(held))
    blocks = [*blocks_of(adapter.rows["lora_A"].rows), *blocks_of(adapter.rows["lora_B"].rows)]
    assert len(blocks) == 2
    assert not blocks_of(tensors.values()).intersection(blocks)
    assert adapter.nbytes == sum(ranks.values()) * 14 * held.itemsize
    assert all(torch.equal(tensors[key], before[key]) for key in before)


def test_staged_tensors_share_one_block_per_dtype_and_width() -> None:
    model = toy()
    model.model.layers[1].bfloat16()
    tensors = good()
    adapter = staged(model, tensors)
    for rows, side in ((adapter.rows["lora_A"].rows, "A"), (adapter.rows["lora_B"].rows, "B")):
        assert [part.dtype for part in rows] == [torch.float32] * 2 + [torch.bfloat16] * 2
        for part, module in zip(rows, TOY_MODULES, strict=True):
            source = tensors[f"base_model.model.{module}.lora_{side}.weight"]
            assert torch.equal(part, (source if side == "A" else source.t()).to(part.dtype))
    shared = [
        blocks_of(side[i : i + 2])
        for side in (adapter.rows["lora_A"].rows, adapter.rows["lora_B"].rows)
        for i in (0, 2)
    ]
    assert [len(blocks) for blocks in shared] == [1] * 4
    assert len(set.union(*shared)) == 4


def test_what_slots_hold_on_the_host_stays_what_was_loaded_however_often_others_are() -> None:
    model = toy()
    manager = SlotManager(model, max_rank=8, num_slots=2)
    for number, rank in enumerate([8, 6, 7, 8, 3, 8, 5, 2, 8]):
        name = "even" if number % 3 else "odd"
        manager.load(read_adapter(good(rank, seed=number)), name)
        manager.check(read_adapter(good(8, seed=99)), name)
        for slot in range(len(manager.loaded_adapters)):
            held = manager._bank.held(slot)
            for index, module in enumerate(TOY_MODULES):
                slots = model.get_submodule(module).lora_slots
                rows = slice(8 * slot, 8 * slot + held.ranks[index])
                assert torch.equal(slots.lora_A[rows], held.rows["lora_A"].rows[index])
                assert torch.equal(slots.lora_B[rows], held.rows["lora_B"].rows[index])


def test_staged_tensors_are_on_the_host_whatever_the_default_device() -> None:
    model = toy()
    manager = SlotManager(model, max_rank=8)
    tensors = good()
    with torch.device("meta"):
        manager.load(read_adapter(tensors))
    slots = model.model.layers[0].q_proj.lora_slots
    assert torch.equal(
        slots.lora_A[:4], tensors[f"base_model.model.{TOY_MODULES[0]}.lora_A.weight"]
    )
    assert slots.scaling[0, :4].tolist() == [1.0] * 4
