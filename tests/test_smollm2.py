"""The committed adapters on the real model: our error is at most twice PEFT's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from smollm2 import encode_chat, load_smollm2
from torch import Tensor
from transformers import PreTrainedModel

from lora_slots import SlotManager, inspect_adapter

ADAPTERS = Path(__file__).resolve().parents[1] / "examples" / "adapters"
NAMES = ("pirate", "bard", "json", "robot")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def base_and_prompt() -> tuple[PreTrainedModel, Tensor]:
    model, tokenizer = load_smollm2()
    return model, encode_chat(tokenizer, "Tell me about the moon.")


@pytest.fixture
def slotted(
    base_and_prompt: tuple[PreTrainedModel, Tensor],
) -> Iterator[tuple[SlotManager, PreTrainedModel, Tensor]]:
    model, prompt = base_and_prompt
    manager = SlotManager(model, max_rank=32, num_slots=2)
    yield manager, model, prompt
    manager.detach()


def logits(model: torch.nn.Module, prompt: Tensor) -> Tensor:
    with torch.no_grad():
        return model(prompt).logits


def by_peft(base: PreTrainedModel, prompt: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """PEFT's logits, with base and adapter in ``dtype``; ``base`` is left as it was."""
    base.to(dtype)
    model = PeftModel.from_pretrained(base, ADAPTERS / name, autocast_adapter_dtype=False)
    result = logits(model.to(dtype).eval(), prompt)
    model.unload()
    base.to(torch.float32)
    return result


def test_every_committed_adapter_is_as_exact_as_under_peft(
    base_and_prompt: tuple[PreTrainedModel, Tensor],
) -> None:
    base, prompt = base_and_prompt
    exact = {name: by_peft(base, prompt, name, torch.float64) for name in NAMES}
    peft = {name: by_peft(base, prompt, name, torch.float32) for name in NAMES}
    unadapted = logits(base, prompt)
    manager = SlotManager(base, max_rank=32)
    try:
        for name in (*NAMES, *reversed(NAMES)):
            manager.load(ADAPTERS / name)
            ours = logits(base, prompt)
            assert (ours - exact[name]).abs().max() <= 2 * (peft[name] - exact[name]).abs().max()
            assert (ours - unadapted).abs().max() > 0.1
    finally:
        manager.detach()
    assert torch.equal(logits(base, prompt), unadapted)


def test_unloading_restores_the_real_models_output_bit_for_bit(
    slotted: tuple[SlotManager, PreTrainedModel, Tensor],
) -> None:
    manager, model, prompt = slotted
    before = logits(model, prompt)
    manager.load(ADAPTERS / "pirate", "pirate")
    manager.load(ADAPTERS / "robot", "robot")
    manager.set_adapters(["pirate", "robot"], [0.5, 2.0])
    assert not torch.equal(logits(model, prompt), before)
    manager.unload("pirate")
    manager.unload("robot")
    assert torch.equal(logits(model, prompt), before)


def test_the_committed_adapters_differ_in_everything_that_compiled_models_trip_over() -> None:
    infos = {name: inspect_adapter(ADAPTERS / name) for name in NAMES}
    assert sorted(info.max_rank for info in infos.values()) == [4, 8, 16, 32]
    assert len({frozenset(m.split(".")[-1] for m in i.modules) for i in infos.values()}) == 3
    assert len(set(infos["bard"].ranks.values())) > 1
    assert len(set(infos["bard"].scaling.values())) > 1
    assert infos["robot"].scaling["model.layers.0.self_attn.q_proj"] == 8 / 32**0.5
    assert sum(info.nbytes for info in infos.values()) < 15e6
