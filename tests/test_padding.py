"""The rows that an adapter leaves unused change nothing that can be seen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from toys import TOY_MODULES, expected_toy, pairs, slot_buffers, tensors_of, toy, toy_input

from lora_slots import SlotManager, read_adapter


@pytest.mark.parametrize("max_rank", [12, 16, 100])
@pytest.mark.parametrize("ranks", [dict.fromkeys(TOY_MODULES, 12), {TOY_MODULES[1]: 1}], ids=str)
def test_a_rank_above_the_layers_own_sizes_and_any_padding_give_scaling_times_b_a_x(
    ranks: dict[str, int], max_rank: int
) -> None:
    both = pairs(ranks)
    model = toy()
    report = SlotManager(model, max_rank=max_rank).load(
        read_adapter(tensors_of(both), {"r": max(ranks.values()), "lora_alpha": 6})
    )
    y = model(toy_input())
    expected = expected_toy(toy(), toy_input(), both, report.scaling)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)
    # Layers that the file does not cover contribute exactly nothing.
    base = toy()(toy_input()).flatten(0, 1)
    for index, module in enumerate(TOY_MODULES):
        assert torch.equal(y.flatten(0, 1)[index], base[index]) == (module not in ranks)


@given(
    ranks=st.dictionaries(st.sampled_from(TOY_MODULES), st.integers(1, 9), min_size=1),
    # A tensor that says 0 means the rank.
    alpha=st.floats(-32, 32, width=32).filter(bool),
    weight=st.floats(-2, 2, width=16),
    padding=st.integers(0, 23),
    slot=st.integers(0, 2),
)
@settings(max_examples=40, deadline=None)
@torch.no_grad()
def test_an_adapter_in_padded_rows_of_any_slot_equals_it_in_rows_of_its_own(
    ranks: dict[str, int], alpha: float, weight: float, padding: int, slot: int
) -> None:
    both = pairs(ranks)
    tensors = tensors_of(both) | {
        f"base_model.model.{module}.alpha": torch.tensor(alpha) for module in ranks
    }
    outputs = []
    for max_rank, before in ((max(ranks.values()), 0), (max(ranks.values()) + padding, slot)):
        model = toy()
        manager = SlotManager(model, max_rank=max_rank, num_slots=before + 1)
        for name in range(before):
            manager.load(read_adapter(tensors_of(pairs({TOY_MODULES[0]: 1}))), str(name))
        report = manager.load(read_adapter(tensors), weight=weight)
        outputs.append(model(toy_input()))
    scaling = {module: weight * value for module, value in report.scaling.items()}
    expected = expected_toy(toy(), toy_input(), both, scaling)
    tolerance = {"rtol": 1e-5, "atol": 1e-5 * max(1.0, float(expected.abs().max()))}
    torch.testing.assert_close(outputs[0], expected, **tolerance)
    torch.testing.assert_close(outputs[1], outputs[0], **tolerance)
    if not any(scaling.values()):
        assert torch.equal(outputs[1], toy()(toy_input()))


def test_slots_of_a_model_that_gets_its_memory_later_are_empty() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 6))
    SlotManager(model, max_rank=4)
    # Deterministic mode fills new memory with NaN, so that it is not zero by chance.
    torch.use_deterministic_algorithms(True)
    try:
        model.to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.isnan(model[0].weight).all()
    for name, buffer in slot_buffers(model).items():
        assert torch.equal(buffer, torch.zeros_like(buffer)), name
