"""A LoKr is an exact LoRA: PEFT's files and LyCORIS's, on linear layers and convolutions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lycoris_files import (
    assert_convolutions_are_pefts,
    delta_of,
    deltas_by_peft,
    deltas_of,
    for_modules,
    lokr,
    write_peft,
)
from peft import LoKrConfig
from peft.tuners.lora.conversion import convert_to_lora
from safetensors.torch import save_file
from torch import Tensor, nn
from toys import TOY_MODULES, refusal, toy, toy_input

from lora_slots import (
    AdapterFileError,
    RankTooLargeError,
    SlotManager,
    TargetMismatchError,
    UnsupportedAdapterError,
    inspect_adapter,
    read_adapter,
)
from lora_slots.resolve.pairing import pair_up

SIZES = st.tuples(st.integers(1, 4), st.integers(1, 4))
RANKS = st.none() | st.integers(1, 3)


def product(parts: dict[str, Tensor], kernel: tuple[int, ...] = ()) -> Tensor:
    """``kron(w1, w2)`` by its definition: ``[out, in * kernel]``."""
    w1 = parts["lokr_w1"] if "lokr_w1" in parts else parts["lokr_w1_a"] @ parts["lokr_w1_b"]
    if "lokr_t2" in parts:
        core = (parts["lokr_t2"], parts["lokr_w2_a"], parts["lokr_w2_b"])
        w2 = torch.einsum("ij...,io,jn->on...", *core)
    elif "lokr_w2" in parts:
        w2 = parts["lokr_w2"]
    else:
        w2 = parts["lokr_w2_a"] @ parts["lokr_w2_b"]
    w2 = w2.reshape(len(w2), -1, torch.Size(kernel).numel())
    return torch.einsum("ac,bdk->abcdk", w1, w2).flatten(2).flatten(0, 1)


@settings(max_examples=150, deadline=None)
@given(SIZES, SIZES, RANKS, RANKS, st.integers(0, 1000))
def test_every_linear_lokr_is_the_kronecker_product_of_its_factors(
    w1: tuple[int, int], w2: tuple[int, int], r1: int | None, r2: int | None, seed: int
) -> None:
    same = r2 if r1 is not None and r2 is not None else r1
    parts = lokr(w1, w2, same, r2, seed=seed)
    torch.testing.assert_close(delta_of(parts), product(parts))


@settings(max_examples=150, deadline=None)
@given(
    SIZES, SIZES, RANKS, st.lists(st.integers(1, 3), min_size=1, max_size=3), st.booleans(),
    st.integers(0, 1000),
)  # fmt: skip
def test_every_lokr_of_a_convolution_is_the_kronecker_product_of_its_factors(
    w1: tuple[int, int], w2: tuple[int, int], r2: int | None, kernel: list[int], tucker: bool,
    seed: int,
) -> None:  # fmt: skip
    parts = lokr(w1, w2, None, r2, tuple(kernel), tucker=tucker, seed=seed)
    torch.testing.assert_close(delta_of(parts), product(parts, tuple(kernel)))


@pytest.mark.parametrize(
    ("r1", "r2", "rank"), [(None, None, 2 * 3), (None, 2, 2 * 2), (1, None, 3), (1, 1, 1)]
)
def test_its_rank_is_the_product_of_its_factors_ranks(
    r1: int | None, r2: int | None, rank: int
) -> None:
    (pair,), _ = pair_up(read_adapter(for_modules({"m": lokr((2, 4), (5, 3), r1, r2)})))
    assert pair.rank == rank


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("r", [1, 2, 8])
def test_what_peft_saves_gives_pefts_output(tmp_path: Path, r: int, both: bool) -> None:
    config = LoKrConfig(
        r=r, alpha=5, target_modules=["q_proj", "v_proj"], init_weights=False, decompose_both=both,
        rank_pattern={"layers.1.q_proj": 1}, alpha_pattern={"v_proj": 3}, rank_dropout=0.1,
    )  # fmt: skip
    adapted = write_peft(tmp_path, toy(inputs=8, outputs=16), config)
    model = toy(inputs=8, outputs=16)
    report = SlotManager(model, max_rank=8).load(tmp_path)
    assert report.scaling == dict(zip(TOY_MODULES, (5 / r, 3 / r, 5.0, 3 / r), strict=True))
    torch.testing.assert_close(model(toy_input()), adapted(toy_input()), rtol=1e-5, atol=1e-5)


def test_it_equals_what_peft_converts_it_to(tmp_path: Path) -> None:
    config = LoKrConfig(r=1, alpha=5, target_modules=["q_proj"], init_weights=False)
    adapted = write_peft(tmp_path, toy(), config)
    lora_config, tensors = convert_to_lora(adapted, rank=6)
    ours, theirs = toy(), toy()
    SlotManager(ours, max_rank=6).load(tmp_path)
    SlotManager(theirs, max_rank=6).load(read_adapter(tensors, lora_config))
    torch.testing.assert_close(ours(toy_input()), theirs(toy_input()), rtol=1e-5, atol=1e-5)


CONVOLUTIONS = [
    (layer, effective, r)
    for layer in (nn.Conv2d(4, 6, 3), nn.Conv2d(4, 6, 1), nn.Conv1d(4, 6, 3), nn.Conv1d(4, 6, 1))
    for effective in (False, True)
    for r in (1, 8)
]


@pytest.mark.parametrize(("layer", "effective", "r"), CONVOLUTIONS)
def test_deltas_of_convolutions_are_pefts(
    tmp_path: Path, layer: nn.Module, effective: bool, r: int
) -> None:
    config = LoKrConfig(
        r=r, alpha=3, target_modules=["0"], init_weights=False, use_effective_conv2d=effective
    )
    adapted = write_peft(tmp_path, nn.Sequential(layer), config)
    found = deltas_of(read_adapter(tmp_path))["0"]
    if (type(layer), effective, r, layer.kernel_size) == (nn.Conv1d, True, 1, (3,)):
        # PEFT fails to multiply this out.
        raw = read_adapter(tmp_path).tensors
        parts = {key.removeprefix("base_model.model.0."): tensor for key, tensor in raw.items()}
        expected = 3 * product(parts, (3,))
    else:
        expected = deltas_by_peft(adapted)["0"].flatten(1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("effective", [False, True])
def test_convolutions_give_pefts_output(tmp_path: Path, effective: bool) -> None:
    config = LoKrConfig(
        r=2, alpha=3, target_modules=["0", "1", "2"], init_weights=False,
        use_effective_conv2d=effective, rank_pattern={"1": 1}, alpha_pattern={"2": 5},
    )  # fmt: skip
    assert_convolutions_are_pefts(tmp_path, config, max_rank=16)


@pytest.mark.parametrize(
    ("r1", "r2", "scaling"), [(None, 2, 1.5), (1, None, 3.0), (2, 2, 1.5), (None, None, 1.0)]
)
def test_a_lycoris_file_is_scaled_by_alpha_over_its_dim_and_by_1_where_both_factors_are_whole(
    r1: int | None, r2: int | None, scaling: float
) -> None:
    parts = {TOY_MODULES[0]: lokr((2, 4), (3, 2), r1, r2)}
    manager = SlotManager(toy(), max_rank=4)
    assert (
        manager.load(read_adapter(for_modules(parts, alpha=3))).scaling[TOY_MODULES[0]] == scaling
    )
    assert manager.load(read_adapter(for_modules(parts))).scaling[TOY_MODULES[0]] == 1.0


def test_whole_factors_under_a_config_of_peft_are_scaled_by_its_alpha_over_its_rank() -> None:
    tensors = for_modules({TOY_MODULES[0]: lokr((2, 2), (3, 4))})
    manager = SlotManager(toy(), max_rank=6)
    report = manager.load(read_adapter(tensors, LoKrConfig(r=8, alpha=1)))
    assert report.scaling == {TOY_MODULES[0]: 0.125}


def test_a_tucker_file_has_the_rows_of_its_core_as_its_dim() -> None:
    tensors = for_modules({"m": lokr((2, 2), (5, 4), None, 2, (3, 3), tucker=True)}, alpha=3)
    (pair,), _ = pair_up(read_adapter(tensors))
    assert (pair.dim, pair.rank, pair.outputs) == (2, 4, 10)
    assert pair.expanded().lora_A.shape == (4, 8, 3, 3)


def test_its_rank_is_told_from_the_header(tmp_path: Path) -> None:
    parts = {
        "a": lokr((2, 4), (5, 3)),
        "b": lokr((2, 4), (5, 3), 1, 1),
        "c": lokr((2, 2), (5, 4), None, 2, (3, 3), tucker=True),
        "d": lokr((1, 1), (5, 4), None, 2),
    }
    save_file(for_modules(parts, alpha=3), tmp_path / "x.safetensors")
    info = inspect_adapter(tmp_path / "x.safetensors")
    assert info.ranks == {"a": 6, "b": 1, "c": 4, "d": 2}
    assert info.scaling == {"a": 1.0, "b": 3.0, "c": 1.5, "d": 1.5}


def test_a_product_too_large_for_its_slot_is_refused_before_it_is_multiplied_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("multiplied out")

    source = read_adapter(for_modules({TOY_MODULES[0]: lokr((4, 4), (3, 4))}))
    for module in ("pairing", "resolving"):
        monkeypatch.setattr(f"lora_slots.resolve.{module}.expand", never)
    text = refusal(source, RankTooLargeError, "has rank 12 at model.layers.0.q_proj")
    assert 'compress_to="max_rank"' in text


@pytest.mark.parametrize("missing", ["lokr_w1", "lokr_w2_a", "lokr_w2_b"])
def test_a_missing_factor_is_named(missing: str) -> None:
    parts = lokr((2, 4), (3, 2), None, 2)
    del parts[missing]
    source = read_adapter(for_modules({TOY_MODULES[0]: parts}))
    refusal(source, AdapterFileError, rf"has no {TOY_MODULES[0]}\.{missing}, but lokr_")


def test_a_core_without_its_factors_is_refused() -> None:
    parts = lokr((2, 4), (3, 2)) | {"lokr_t2": torch.zeros(2, 2, 3, 3)}
    source = read_adapter(for_modules({TOY_MODULES[0]: parts}))
    refusal(source, AdapterFileError, "lokr_w2 of .*, which lokr_t2 stand")


def test_a_factor_given_twice_is_refused() -> None:
    parts = lokr((2, 4), (3, 2)) | lokr((2, 4), (3, 2), 1)
    source = read_adapter(for_modules({TOY_MODULES[0]: parts}))
    refusal(source, AdapterFileError, "lokr_w1 of .*, which lokr_w1_a, lokr_w1_b stand")


def test_factors_of_different_ranks_are_refused() -> None:
    source = read_adapter(for_modules({TOY_MODULES[0]: lokr((2, 4), (3, 2), 1, 2)}, alpha=1))
    refusal(source, AdapterFileError, r"lokr_w1_b \(1, 4\), lokr_w2_b \(2, 2\)")


def test_a_core_of_the_left_factor_is_refused_by_name() -> None:
    parts = lokr((2, 4), (3, 2), 1, 1) | {"lokr_t1": torch.zeros(1, 1, 3, 3)}
    source = read_adapter(for_modules({TOY_MODULES[0]: parts}))
    refusal(source, UnsupportedAdapterError, "lokr_t1")


def test_sizes_of_another_model_are_refused() -> None:
    source = read_adapter(for_modules({TOY_MODULES[0]: lokr((2, 4), (3, 3), 1, 1)}))
    refusal(source, TargetMismatchError, r"lora_A must be \(1, 8\)")
