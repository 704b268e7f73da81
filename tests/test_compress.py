"""``compress_to``: an adapter of too large a rank becomes the nearest one that fits."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lycoris_files import for_modules, loha, lokr
from torch import Tensor, nn
from toys import (
    TOY_MODULES,
    Snapshot,
    expected_toy,
    pairs,
    tensors_of,
    toy,
    toy_adapter,
    toy_folder,
    toy_input,
)

from lora_slots import (
    AdapterFileError,
    ArgumentError,
    RankTooLargeError,
    SlotManager,
    inspect_adapter,
    read_adapter,
)
from lora_slots.attach.survey import survey
from lora_slots.resolve.resolving import Adapter, ModuleUpdate
from lora_slots.staging.compress import compress

SMALL = st.integers(1, 5)
# Of a layer; what its sizes are does not matter here.
LAYOUT = survey(nn.Sequential(nn.Linear(2, 2)))


def delta(module: ModuleUpdate) -> Tensor:
    plain = module.expanded()
    assert plain.lora_A is not None
    assert plain.lora_B is not None
    return plain.lora_B.double().flatten(1) @ plain.lora_A.double().flatten(1)


def nearest(weight: Tensor, rank: int) -> tuple[Tensor, float]:
    """The best matrix of this rank, and its relative error, from the whole matrix."""
    U, S, V = torch.linalg.svd(weight, full_matrices=False)
    best = U[:, :rank] * S[:rank] @ V[:rank]
    return best, float((weight - best).norm() / weight.norm())


def compressed(module: ModuleUpdate, rank: int) -> tuple[ModuleUpdate, float]:
    result = compress(Adapter("x", (module,)), rank, LAYOUT)
    return result.modules[0], result.compressed["m"]


@settings(max_examples=100, deadline=None)
@given(
    SMALL, SMALL, st.integers(2, 6), SMALL, st.lists(st.integers(1, 3), max_size=2),
    st.integers(0, 1000),
)  # fmt: skip
def test_it_is_the_nearest_update_of_its_rank(
    outputs: int, inputs: int, r: int, rank: int, kernel: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(r, inputs, *kernel, generator=generator)
    B = torch.randn(outputs, r, *[1] * len(kernel), generator=generator)
    rank = min(rank, r - 1)
    module = ModuleUpdate(0, "m", A, B, scaling=-0.5)
    small, error = compressed(module, rank)
    best, smallest_error = nearest(delta(module), rank)
    assert small.rank <= rank
    assert small.scaling == -0.5
    assert small.lora_A is not None
    assert small.lora_A.shape[1:] == A.shape[1:]
    torch.testing.assert_close(delta(small), best)
    assert error == pytest.approx(smallest_error, abs=1e-7)


@settings(max_examples=100, deadline=None)
@given(
    st.tuples(SMALL, SMALL), st.tuples(SMALL, SMALL), SMALL, st.sampled_from([(), (2,), (3, 2)]),
    st.integers(0, 1000), st.booleans(),
)  # fmt: skip
def test_that_of_a_kronecker_product_comes_from_its_factors_alone(
    w1: tuple[int, int], w2: tuple[int, int], rank: int, kernel: tuple[int, ...], seed: int,
    swapped: bool,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(s, generator=generator).double() for s in (w1, (*w2, *kernel)))
    A, B, outer = right, torch.eye(w2[0]).double(), (torch.eye(w1[0]).double(), left)
    if swapped:
        A, B, outer = left, outer[0], (B, right)
    module = ModuleUpdate(0, "m", A, B, scaling=1.0, outer=outer)
    if module.rank <= rank:
        return
    small, error = compressed(module, rank)
    best, smallest_error = nearest(delta(module), rank)
    assert small.outer is None
    torch.testing.assert_close(delta(small), best)
    assert error == pytest.approx(smallest_error, abs=1e-7)


def test_it_never_makes_the_whole_update() -> None:
    wide = ModuleUpdate(0, "m", torch.randn(3, 300_000), torch.randn(300_000, 3), scaling=1.0)
    small, error = compressed(wide, 2)  # the whole would take 720 GB
    assert small.rank == 2
    assert 0 < error < 1
    square = torch.randn(2, 256, 256)
    outer = (torch.eye(256), square[0])
    kron = ModuleUpdate(0, "m", square[1], torch.eye(256), scaling=1.0, outer=outer)
    assert kron.rank == 65_536
    assert compressed(kron, 4)[0].rank == 4


def test_each_expert_of_a_mixture_gets_the_nearest_update_of_its_own() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 6, 8))

    layout = survey(nn.Sequential(Experts()), ["0.weight"])
    A, B = torch.randn(4, 3 * 8).double(), torch.randn(3 * 6, 4).double()
    module = ModuleUpdate(0, "m", A, B, scaling=1.0)
    result = compress(Adapter("x", (module,)), 2, layout)
    small = result.modules[0]
    assert small.lora_A is not None
    assert small.lora_B is not None
    found = small.lora_B.view(3, 6, 2) @ small.lora_A.view(2, 3, 8).transpose(0, 1)
    exact = B.view(3, 6, 4) @ A.view(4, 3, 8).transpose(0, 1)
    best = torch.stack([nearest(each, 2)[0] for each in exact])
    torch.testing.assert_close(found, best)
    assert result.compressed == {"m": pytest.approx(float((exact - best).norm() / exact.norm()))}


def test_the_error_of_an_update_of_zeros_is_0() -> None:
    module = ModuleUpdate(0, "m", torch.zeros(3, 8), torch.randn(6, 3), scaling=1.0)
    small, error = compressed(module, 1)
    assert error == 0.0
    assert torch.equal(delta(small), torch.zeros(6, 8, dtype=torch.float64))


def test_what_fits_is_untouched_and_the_rest_is_reported() -> None:
    given = pairs({TOY_MODULES[0]: 3, TOY_MODULES[2]: 6, TOY_MODULES[3]: 5})
    source = read_adapter(tensors_of(given))
    plain, model = toy(), toy()
    SlotManager(plain, max_rank=6).load(source)
    manager = SlotManager(model, max_rank=3)
    report = manager.load(source, compress_to="max_rank")
    assert report.rank == 3
    assert set(report.compressed) == {TOY_MODULES[2], TOY_MODULES[3]}
    same = model.model.layers[0].q_proj.lora_slots
    exact = plain.model.layers[0].q_proj.lora_slots
    assert torch.equal(same.lora_A, exact.lora_A[:3])
    assert torch.equal(same.lora_B, exact.lora_B[:3])
    best = dict(given)
    for name in report.compressed:
        A, B = (tensor.double() for tensor in given[name])
        whole, error = nearest(B @ A, 3)
        assert report.compressed[name] == pytest.approx(error)
        best[name] = torch.eye(8), whole @ torch.eye(8, dtype=torch.float64)
    expected = expected_toy(toy(), toy_input(), best, report.scaling)
    torch.testing.assert_close(model(toy_input()), expected, rtol=1e-5, atol=1e-5)
    worst = max(report.compressed, key=lambda name: report.compressed[name])
    shown = f"compressed 2 modules with a relative error of up to {report.compressed[worst]:.2g}"
    assert f"{shown}, at {worst}" in str(report)


def test_where_everything_fits_nothing_is_compressed() -> None:
    model = toy()
    report = SlotManager(model, max_rank=4).load(toy_adapter(4), compress_to="max_rank")
    assert report.compressed == {}
    assert "compressed" not in str(report)
    plain = toy()
    SlotManager(plain, max_rank=4).load(toy_adapter(4))
    assert torch.equal(model(toy_input()), plain(toy_input()))


def test_a_rank_may_be_asked_for_that_is_below_max_rank() -> None:
    manager = SlotManager(toy(), max_rank=8)
    report = manager.load(toy_adapter(4), compress_to=2)
    assert report.rank == 2
    assert set(report.compressed) == set(TOY_MODULES)


def test_check_tells_of_it_and_writes_nothing() -> None:
    model = toy()
    manager = SlotManager(model, max_rank=2)
    before = Snapshot.of(manager, model)
    checked = manager.check(toy_adapter(4), compress_to="max_rank")
    before.assert_unchanged(manager, model)
    assert checked.compressed == manager.load(toy_adapter(4), compress_to=2).compressed


@pytest.mark.parametrize("value", [0, -1, 5, True, 2.0, "min_rank", "", [2]])
def test_another_value_is_refused_before_anything_is_read(value: Any) -> None:
    manager = SlotManager(toy(), max_rank=4)
    for call in (manager.load, manager.check):
        with pytest.raises(ArgumentError, match=r"compress_to must be .*from 1 to max_rank"):
            call("nowhere/at/all", compress_to=value)


def test_without_it_a_rank_too_large_changes_nothing_and_names_both_remedies() -> None:
    # One of two layers has rank 16.
    tensors = tensors_of(pairs({TOY_MODULES[0]: 8, TOY_MODULES[1]: 16}))
    model = toy()
    manager = SlotManager(model, max_rank=8)
    manager.load(toy_adapter(8, seed=3))
    before = Snapshot.of(manager, model)
    with pytest.raises(RankTooLargeError) as raised:
        manager.load(read_adapter(tensors))
    before.assert_unchanged(manager, model)
    text = str(raised.value)
    assert f"has rank 16 at {TOY_MODULES[1]}, but max_rank is 8" in text
    assert "max_rank=16" in text
    assert 'compress_to="max_rank"' in text


def test_a_rank_above_both_sides_of_the_weight_loads_exactly_and_compresses_without_loss(
    tmp_path: Path,
) -> None:
    given = pairs({TOY_MODULES[0]: 12})
    source = read_adapter(tensors_of(given), {"r": 12, "lora_alpha": 6})
    expected = expected_toy(toy(), toy_input(), given, {TOY_MODULES[0]: 0.5})
    large, small = toy(), toy()
    assert SlotManager(large, max_rank=16).load(source).rank == 12
    torch.testing.assert_close(large(toy_input()), expected, rtol=1e-5, atol=1e-5)
    report = SlotManager(small, max_rank=6).load(source, compress_to="max_rank")
    assert report.compressed[TOY_MODULES[0]] < 1e-12
    assert report.scaling == {TOY_MODULES[0]: 0.5}
    torch.testing.assert_close(small(toy_input()), expected, rtol=1e-5, atol=1e-5)
    # Layers that a file does not cover add nothing, and what it needs is told without reading it.
    assert torch.equal(small(toy_input())[1], toy()(toy_input())[1])
    assert inspect_adapter(toy_folder(tmp_path, 12)).max_rank == 12


@pytest.mark.parametrize("parts", [loha(6, 8, 2), lokr((2, 2), (3, 4))], ids=["LoHa", "LoKr"])
def test_a_loha_and_a_lokr_are_compressed_to_their_nearest(parts: dict[str, Tensor]) -> None:
    source = read_adapter(for_modules({TOY_MODULES[0]: parts}))
    exact, near = toy(), toy()
    SlotManager(exact, max_rank=6).load(source)
    report = SlotManager(near, max_rank=3).load(source, compress_to="max_rank")

    def update(model: nn.Module) -> Tensor:
        slots = model.model.layers[0].q_proj.lora_slots
        return slots.lora_B.double().T @ slots.lora_A.double()

    best, error = nearest(update(exact), 3)
    torch.testing.assert_close(update(near), best, rtol=1e-5, atol=1e-5)
    assert report.compressed == {TOY_MODULES[0]: pytest.approx(error, rel=1e-4)}


def test_the_magnitude_of_dora_stays() -> None:
    given = pairs({TOY_MODULES[0]: 5})
    magnitude = torch.rand(6) + 1
    key = f"base_model.model.{TOY_MODULES[0]}.lora_magnitude_vector"
    source = read_adapter(tensors_of(given) | {key: magnitude}, {"r": 5, "use_dora": True})
    model = toy()
    report = SlotManager(model, max_rank=2, dora=True).load(source, compress_to="max_rank")
    A, B = (tensor.double() for tensor in given[TOY_MODULES[0]])
    weight = (
        toy().model.layers[0].q_proj.weight.double()
        + report.scaling[TOY_MODULES[0]] * (nearest(B @ A, 2)[0])
    )
    weight = magnitude.double()[:, None] * weight / weight.norm(dim=1, keepdim=True)
    expected = (toy_input().double() @ weight.T).float()
    torch.testing.assert_close(model(toy_input())[0, 0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_refused_before_they_are_compressed(bad: float) -> None:
    tensors = tensors_of(pairs(dict.fromkeys(TOY_MODULES, 4)))
    tensors[f"base_model.model.{TOY_MODULES[1]}.lora_A.weight"][0, 3] = bad
    model = toy()
    manager = SlotManager(model, max_rank=2)
    manager.load(toy_adapter(2, seed=3))
    before = Snapshot.of(manager, model)
    with pytest.raises(AdapterFileError, match=f"{TOY_MODULES[1]} .* has 1 NaN or infinite"):
        manager.load(read_adapter(tensors), compress_to="max_rank")
    before.assert_unchanged(manager, model)


def test_tensors_without_values_are_refused() -> None:
    tensors = {k: t.to("meta") for k, t in tensors_of(pairs({TOY_MODULES[0]: 4})).items()}
    with pytest.raises(AdapterFileError, match="has no values"):
        SlotManager(toy(), max_rank=2).load(read_adapter(tensors), compress_to="max_rank")


def test_it_says_nothing_else() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SlotManager(toy(), max_rank=2).load(toy_adapter(4), compress_to="max_rank")
