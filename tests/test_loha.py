"""A LoHa is an exact LoRA: PEFT's files and LyCORIS's, on linear layers and convolutions."""

from __future__ import annotations

from pathlib import Path

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
    loha,
    write_peft,
)
from peft import LoHaConfig
from peft.tuners.lora.conversion import convert_to_lora
from safetensors.torch import save_file
from torch import nn
from toys import TOY_MODULES, refusal, toy, toy_input

from lora_slots import (
    AdapterFileError,
    RankTooLargeError,
    SlotManager,
    inspect_adapter,
    read_adapter,
)
from lora_slots.resolve.pairing import pair_up

SIZES = st.integers(1, 7)


@settings(max_examples=150, deadline=None)
@given(SIZES, SIZES, st.integers(1, 4), st.integers(0, 1000))
def test_every_linear_loha_is_the_product_of_its_factors(
    outputs: int, inputs: int, r: int, seed: int
) -> None:
    parts = loha(outputs, inputs, r, seed=seed)
    expected = (parts["hada_w1_a"] @ parts["hada_w1_b"]) * (parts["hada_w2_a"] @ parts["hada_w2_b"])
    torch.testing.assert_close(delta_of(parts), expected)


@settings(max_examples=150, deadline=None)
@given(
    SIZES, SIZES, st.integers(1, 3), st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.booleans(), st.integers(0, 1000),
)  # fmt: skip
def test_every_loha_of_a_convolution_is_the_product_of_its_factors(
    outputs: int, inputs: int, r: int, kernel: list[int], tucker: bool, seed: int
) -> None:
    parts = loha(outputs, inputs, r, tuple(kernel), tucker=tucker, seed=seed)
    halves = []
    for half in "12":
        a, b = parts[f"hada_w{half}_a"], parts[f"hada_w{half}_b"]
        if tucker:
            core = parts[f"hada_t{half}"]
            halves.append(torch.einsum("ij...,io,jn->on...", core, a, b).flatten(1))
        else:
            halves.append(a @ b)
    torch.testing.assert_close(delta_of(parts), halves[0] * halves[1])


def test_its_factors_are_the_products_of_columns_and_of_rows() -> None:
    parts = loha(6, 8, 2)
    (pair,), _ = pair_up(read_adapter(for_modules({"m": parts}, alpha=3)))
    assert (pair.rank, pair.dim, pair.alpha) == (4, 2, 3.0)
    for i in range(2):
        for j in range(2):
            column = parts["hada_w1_a"][:, i] * parts["hada_w2_a"][:, j]
            row = parts["hada_w1_b"][i] * parts["hada_w2_b"][j]
            assert torch.equal(pair.lora_B[:, 2 * i + j], column)
            assert torch.equal(pair.lora_A[2 * i + j], row)


def test_its_rank_is_never_above_the_smaller_side_of_the_weight() -> None:
    (pair,), _ = pair_up(read_adapter(for_modules({"m": loha(6, 8, 5)})))
    assert pair.rank == 6
    (pair,), _ = pair_up(read_adapter(for_modules({"m": loha(30, 2, 5, (2,), tucker=True)})))
    assert pair.rank == 4
    assert pair.lora_A.shape == (4, 2, 2)


def test_16_bit_factors_are_multiplied_without_rounding() -> None:
    parts = loha(6, 8, 2, dtype=torch.float16)
    (pair,), _ = pair_up(read_adapter(for_modules({"m": parts})))
    exact = parts["hada_w1_b"][1].double() * parts["hada_w2_b"][0].double()
    assert pair.lora_A.dtype == torch.float32
    assert torch.equal(pair.lora_A[2].double(), exact)


def test_what_peft_saves_gives_pefts_output(tmp_path: Path) -> None:
    config = LoHaConfig(
        r=2, alpha=5, target_modules=["q_proj", "v_proj"], init_weights=False,
        rank_pattern={"layers.1.q_proj": 1}, alpha_pattern={"v_proj": 3}, rank_dropout=0.1,
    )  # fmt: skip
    adapted = write_peft(tmp_path, toy(), config)
    model = toy()
    report = SlotManager(model, max_rank=4).load(tmp_path)
    assert report.rank == 4
    assert report.scaling == dict(zip(TOY_MODULES, (2.5, 1.5, 5.0, 1.5), strict=True))
    torch.testing.assert_close(model(toy_input()), adapted(toy_input()), rtol=1e-5, atol=1e-5)


def test_it_equals_what_peft_converts_it_to(tmp_path: Path) -> None:
    config = LoHaConfig(r=2, alpha=5, target_modules=["q_proj", "v_proj"], init_weights=False)
    adapted = write_peft(tmp_path, toy(), config)
    lora_config, tensors = convert_to_lora(adapted, rank=6)
    ours, theirs = toy(), toy()
    SlotManager(ours, max_rank=6).load(tmp_path)
    SlotManager(theirs, max_rank=6).load(read_adapter(tensors, lora_config))
    torch.testing.assert_close(ours(toy_input()), theirs(toy_input()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("effective", [False, True])
@pytest.mark.parametrize("layer", [nn.Conv2d(4, 6, 3), nn.Conv2d(4, 6, 1), nn.Conv1d(4, 6, 3)])
def test_deltas_of_convolutions_are_pefts(
    tmp_path: Path, layer: nn.Module, effective: bool
) -> None:
    config = LoHaConfig(
        r=2, alpha=3, target_modules=["0"], init_weights=False, use_effective_conv2d=effective
    )
    expected = deltas_by_peft(write_peft(tmp_path, nn.Sequential(layer), config))
    found = deltas_of(read_adapter(tmp_path))
    torch.testing.assert_close(found["0"], expected["0"].flatten(1))


@pytest.mark.parametrize("effective", [False, True])
def test_convolutions_give_pefts_output(tmp_path: Path, effective: bool) -> None:
    config = LoHaConfig(
        r=2, alpha=3, target_modules=["0", "1", "2"], init_weights=False,
        use_effective_conv2d=effective, rank_pattern={"1": 1}, alpha_pattern={"2": 5},
    )  # fmt: skip
    assert_convolutions_are_pefts(tmp_path, config, max_rank=8)


def test_a_lycoris_file_is_scaled_by_alpha_over_its_dim_and_by_1_without_alpha() -> None:
    parts = {module: loha(6, 8, 2, seed=i) for i, module in enumerate(TOY_MODULES)}
    manager = SlotManager(toy(), max_rank=4)
    with_alpha = manager.load(read_adapter(for_modules(parts, alpha=3)))
    assert with_alpha.scaling == dict.fromkeys(TOY_MODULES, 1.5)
    without = manager.load(read_adapter(for_modules(parts)))
    assert without.scaling == dict.fromkeys(TOY_MODULES, 1.0)


def test_the_dora_scale_beside_it_is_the_magnitude_of_dora() -> None:
    parts, magnitude = loha(6, 8, 2, dtype=torch.float32), torch.rand(6, 1) + 1
    tensors = for_modules({TOY_MODULES[0]: parts | {"dora_scale": magnitude}}, alpha=3)
    model = toy()
    SlotManager(model, max_rank=4, dora=True).load(read_adapter(tensors))
    weight = toy().model.layers[0].q_proj.weight + 1.5 * delta_of(parts)
    weight = magnitude * weight / weight.norm(dim=1, keepdim=True)
    torch.testing.assert_close(
        model(toy_input())[0, 0], toy_input() @ weight.T, rtol=1e-5, atol=1e-5
    )


def test_its_rank_is_told_from_the_header(tmp_path: Path) -> None:
    parts = {"a": loha(6, 8, 2), "b": loha(6, 8, 1, (3, 3), tucker=True), "c": loha(6, 8, 4)}
    save_file(for_modules(parts, alpha=3), tmp_path / "x.safetensors")
    info = inspect_adapter(tmp_path / "x.safetensors")
    assert info.ranks == {"a": 4, "b": 1, "c": 6}
    assert info.scaling == {"a": 1.5, "b": 3.0, "c": 0.75}


@pytest.mark.parametrize("tucker", [False, True])
def test_a_missing_factor_is_named(tucker: bool) -> None:
    parts = loha(6, 8, 2, (2,), tucker=tucker)
    for part in parts:
        rest = {name: tensor for name, tensor in parts.items() if name != part}
        with pytest.raises(AdapterFileError, match=rf"has no m\.{part}, but hada_"):
            pair_up(read_adapter(for_modules({"m": rest})))


def test_factors_that_do_not_fit_each_other_are_refused() -> None:
    good = loha(6, 8, 2)
    for part, size in [
        ("hada_w1_a", (6, 3)), ("hada_w2_a", (5, 2)), ("hada_w2_b", (2, 7)), ("hada_w1_b", (8,)),
    ]:  # fmt: skip
        bad = for_modules({TOY_MODULES[0]: good | {part: torch.zeros(size)}})
        refusal(read_adapter(bad), AdapterFileError, f"{part}.*{size[0]}")


def test_halves_of_different_ranks_are_refused() -> None:
    two, three = loha(6, 8, 2), loha(6, 8, 3)
    mixed = {name: (two if "w1" in name else three)[name] for name in two}
    source = read_adapter(for_modules({TOY_MODULES[0]: mixed}))
    refusal(source, AdapterFileError, r"hada_w1_b \(2, 8\), hada_w2_b \(3, 8\)")


def test_tensors_of_two_algorithms_for_one_module_are_refused() -> None:
    both = loha(6, 8, 2) | {"lora_A.weight": torch.zeros(1, 8), "lora_B.weight": torch.zeros(6, 1)}
    for parts in (both, dict(reversed(both.items()))):
        source = read_adapter(for_modules({TOY_MODULES[0]: parts}))
        refusal(source, AdapterFileError, f"tensors of LOHA and LORA for {TOY_MODULES[0]}")


def test_tensors_of_another_algorithm_than_the_config_are_refused() -> None:
    tensors = for_modules({TOY_MODULES[0]: loha(6, 8, 2)})
    for config, got in [({"r": 2}, "LORA"), ({"r": 2, "peft_type": "LOKR"}, "LOKR")]:
        refusal(read_adapter(tensors, config), AdapterFileError, f"peft_type {got}.*those of LOHA")


def test_a_rank_that_contradicts_the_config_is_refused() -> None:
    tensors = for_modules({TOY_MODULES[0]: loha(6, 8, 2)})
    source = read_adapter(tensors, LoHaConfig(r=4))
    refusal(source, AdapterFileError, "gives rank 4 to .* have rank 2")


def test_a_rank_above_max_rank_is_refused_with_both_remedies() -> None:
    tensors = for_modules({TOY_MODULES[1]: loha(12, 16, 3)})
    text = refusal(read_adapter(tensors), RankTooLargeError, "has rank 9 at model.layers.0.v_proj")
    assert "max_rank=9" in text
    assert 'compress_to="max_rank"' in text
