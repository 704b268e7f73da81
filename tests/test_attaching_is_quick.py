"""Attaching costs little beside the allocation of the buffers, which is not counted here."""

from __future__ import annotations

import pytest
import torch
from benchmarks.clocks import CpuClock
from benchmarks.models import Model, Shape, base_weights
from peft import LoraConfig, get_peft_model

from lora_slots import SlotManager

SHAPE = Shape(layers=28, hidden=2048, mlp=5504, dtype=torch.bfloat16)


@pytest.fixture
def models() -> list[Model]:
    """Models of 196 linears on ``meta``, where nothing is allocated."""
    weights = base_weights(SHAPE, torch.device("meta"), alike=True)
    return [Model(weights) for _ in range(6)]


def test_attaching_to_196_linears_takes_less_than_peft_and_than_half_a_second(models):
    config = LoraConfig(r=64, target_modules=list(SHAPE.linears))
    clock, ours, theirs = CpuClock(), [], []
    for _ in range(3):
        attach = clock.milliseconds(lambda: SlotManager(models.pop(), max_rank=64))
        ours.append(attach)
        theirs.append(
            clock.milliseconds(lambda: get_peft_model(models.pop(), config, low_cpu_mem_usage=True))
        )
    assert min(ours) < 500
    assert min(ours) < min(theirs)
