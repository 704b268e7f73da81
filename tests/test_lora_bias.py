"""PEFT's lora_bias: a bias of the adapter, times its scaling and its weight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dora_files import dora_adapter
from safetensors.torch import load_file
from torch import Tensor, nn
from toys import (
    TINY,
    TOY_MODULES,
    WEIGHTS,
    Snapshot,
    Tiny,
    expected_toy,
    pairs,
    peft_model,
    slot_buffers,
    tensors_of,
    toy,
    toy_adapter,
    toy_input,
    write_adapter,
    write_folder,
)

from lora_slots import (
    AdapterFileError,
    LoraSlotsError,
    SlotManager,
    TargetMismatchError,
    UnsupportedAdapterError,
    read_adapter,
)

FIRST = f"base_model.model.{TOY_MODULES[0]}"
CONFIG = {"r": 4, "lora_alpha": 8, "lora_bias": True}
# PEFT takes its own biases, on saving, for the shards of a matrix.
PEFT_WARNING = "ignore:Adapter 'default'. .* LoRA tensor.* have invalid shape:UserWarning"
NAMES = ("llama", "gpt2", "bert")
EVERY_TINY = pytest.mark.parametrize("tiny", [TINY[name] for name in NAMES], ids=NAMES)


def slots(model: nn.Module, **options: Any) -> SlotManager:
    return SlotManager(model, **{"max_rank": 16, "bias": True, **options})


def write_biased(path: Path, tiny: Tiny, *, dtype: torch.dtype = torch.float32) -> Path:
    """PEFT's file with biases that are not zero, as its own fresh ones are."""
    write_adapter(
        path, with_base_biases(tiny), r=7, lora_alpha=21, lora_bias=True,
        target_modules=list(tiny.attention), rank_pattern={tiny.attention[0]: 5},
    )  # fmt: skip
    generator = torch.Generator().manual_seed(4)
    tensors = {
        key: (torch.randn(t.shape, generator=generator) if key.endswith("lora_B.bias") else t)
        for key, t in load_file(path / WEIGHTS).items()
    }
    assert any(key.endswith("lora_B.bias") for key in tensors)
    return write_folder(path, {key: t.to(dtype) for key, t in tensors.items()}, None)


def with_base_biases(tiny: Tiny) -> nn.Module:
    """The tiny model; PEFT refuses lora_bias on layers that have no bias themselves."""
    model = tiny.build()
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is None and module.out_features != 128:
            module.bias = nn.Parameter(torch.zeros(module.out_features))
    return model


@EVERY_TINY
@pytest.mark.filterwarnings(PEFT_WARNING)
def test_output_is_pefts_at_every_weight_and_the_base_to_the_bit_without(
    tiny: Tiny, tmp_path: Path
) -> None:
    path = write_biased(tmp_path / "bias", tiny)
    oracle = peft_model(with_base_biases(tiny), path)
    model = with_base_biases(tiny)
    base = tiny.run(model)
    manager = slots(model)
    assert torch.equal(tiny.run(model), base)
    manager.load(path)
    for weight in (1.0, 0.5, -1.5):
        for module in oracle.modules():
            if hasattr(module, "lora_A"):
                module.set_scale("default", weight)
        manager.set_weight("default", weight)
        theirs = tiny.run(oracle)
        torch.testing.assert_close(
            tiny.run(model), theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max())
        )
        assert float((theirs - base).abs().max()) > 1e-3
    manager.set_weight("default", 0)
    assert torch.equal(tiny.run(model), base)
    manager.unload("default")
    assert torch.equal(tiny.run(model), base)


def rms(error: Tensor) -> float:
    return float(error.double().square().mean().sqrt())


@EVERY_TINY
@pytest.mark.filterwarnings(PEFT_WARNING)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_error_in_half_precision_is_at_most_twice_pefts(
    tiny: Tiny, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = write_biased(tmp_path / "bias", tiny, dtype=dtype)

    def oracle(model: nn.Module) -> Tensor:
        return tiny.run(peft_model(model, path, autocast_adapter_dtype=False))

    exact = oracle(with_base_biases(tiny).to(dtype).double())
    theirs = oracle(with_base_biases(tiny).to(dtype))
    model = with_base_biases(tiny).to(dtype)
    base = tiny.run(model)
    manager = slots(model)
    assert torch.equal(tiny.run(model), base)
    manager.load(path)
    ours = tiny.run(model)
    assert ours.dtype == theirs.dtype
    assert rms(ours - exact) <= 2 * rms(theirs - exact)


def biased(
    rank: int = 4, *, seed: int = 1, modules: tuple[str, ...] = TOY_MODULES
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed + 100)
    both = pairs(dict.fromkeys(modules, rank), seed=seed)
    return both, {module: torch.randn(6, generator=generator) for module in modules}


def tensors_with_bias(
    both: dict[str, tuple[Tensor, Tensor]], biases: dict[str, Tensor]
) -> dict[str, Tensor]:
    return tensors_of(both) | {
        f"base_model.model.{module}.lora_B.bias": bias for module, bias in biases.items()
    }


@torch.no_grad()
def test_a_bias_of_1_at_scaling_2_adds_2_and_half_of_it_at_weight_one_half() -> None:
    both = pairs(dict.fromkeys(TOY_MODULES, 4))
    silent = {module: (A, torch.zeros_like(B)) for module, (A, B) in both.items()}
    ones = dict.fromkeys(TOY_MODULES, torch.ones(6))
    model = toy()
    base = model(toy_input())
    manager = slots(model)
    manager.load(read_adapter(tensors_with_bias(silent, ones), CONFIG))
    torch.testing.assert_close(model(toy_input()), base + 2, rtol=0, atol=1e-6)
    manager.set_weight("default", 0.5)
    torch.testing.assert_close(model(toy_input()), base + 1, rtol=0, atol=1e-6)


@torch.no_grad()
def test_active_adapters_with_and_without_a_bias_and_dora_add_up() -> None:
    both, biases = biased()
    alone = toy()
    SlotManager(alone, max_rank=8, dora=True).load(dora_adapter(3, seed=7), weight=0.5)
    dora = alone(toy_input()) - toy()(toy_input())
    model = toy()
    manager = slots(model, num_slots=3, dora=True)
    manager.load(read_adapter(tensors_with_bias(both, biases), CONFIG), "biased")
    manager.load(toy_adapter(2, alpha=6, seed=2), "plain")
    manager.load(dora_adapter(3, seed=7), "dora")
    manager.set_adapters(["biased", "plain", "dora"], [-1.5, 0.25, 0.5])
    expected = expected_toy(toy(), toy_input(), both, dict.fromkeys(TOY_MODULES, -3.0))
    stacked = torch.stack([biases[module] for module in TOY_MODULES]).reshape(2, 2, 1, 6)
    expected = expected - 3.0 * stacked + dora
    plain = pairs(dict.fromkeys(TOY_MODULES, 2), seed=2)
    expected += expected_toy(toy(), toy_input(), plain, dict.fromkeys(TOY_MODULES, 0.75))
    expected -= toy()(toy_input())
    torch.testing.assert_close(model(toy_input()), expected, rtol=1e-5, atol=1e-5)


def test_hotswaps_with_and_without_a_bias_leave_nothing_behind() -> None:
    few = TOY_MODULES[1:3]
    sources = [
        read_adapter(tensors_with_bias(*biased()), CONFIG),
        toy_adapter(8, seed=3),
        read_adapter(tensors_with_bias(*biased(2, seed=4, modules=few)), {**CONFIG, "r": 2}),
    ]
    alone = []
    for source in sources:
        model = toy()
        slots(model).load(source)
        alone.append({name: buffer.clone() for name, buffer in slot_buffers(model).items()})
    model = toy()
    manager = slots(model)
    for index in (0, 1, 2, 1, 0, 2, 0):
        manager.load(sources[index])
        for name, buffer in slot_buffers(model).items():
            assert torch.equal(buffer, alone[index][name]), (name, index)
    manager.unload("default")
    assert not any(buffer.any() for buffer in slot_buffers(model).values())


def _with(change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    tensors = tensors_with_bias(*biased())
    tensors[f"{FIRST}.lora_B.bias"] = change(tensors[f"{FIRST}.lora_B.bias"])
    return tensors


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], type[LoraSlotsError], str]] = {
    "NaN": (lambda b: b.fill_(float("nan")), AdapterFileError, "lora_bias of .* 6 NaN or inf"),
    "too long": (lambda b: torch.ones(8), TargetMismatchError, "lora_bias of .* must have 6"),
    "one value": (lambda b: torch.ones(1), TargetMismatchError, "lora_bias of .* must have 6"),
    "integers": (lambda b: torch.ones(6).int(), AdapterFileError, "must be floating point"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bias_that_does_not_fit_is_refused_and_changes_nothing(case: str) -> None:
    change, error, message = REFUSED[case]
    model = toy()
    manager = slots(model)
    manager.load(read_adapter(tensors_with_bias(*biased(seed=8)), CONFIG))
    before = Snapshot.of(manager, model)
    source = read_adapter(_with(change), CONFIG)
    for call in (manager.check, manager.load):
        with pytest.raises(error, match=message):
            call(source)
        before.assert_unchanged(manager, model)


def test_a_bias_that_the_config_says_and_the_file_lacks_is_refused() -> None:
    tensors = _with(torch.clone)
    del tensors[f"{FIRST}.lora_B.bias"]
    message = r"says lora_bias, but there is no lora_B\.bias for base_model.*"
    with pytest.raises(AdapterFileError, match=message):
        slots(toy()).load(read_adapter(tensors, CONFIG))


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
def test_without_room_for_a_bias_the_remedy_is_named_and_nothing_changes(strict: bool) -> None:
    model = toy()
    manager = SlotManager(model, max_rank=8, dora=True)
    manager.load(toy_adapter(8))
    before = Snapshot.of(manager, model)
    source = read_adapter(tensors_with_bias(*biased()), CONFIG)
    message = rf"has a bias at {TOY_MODULES[0]}, .*build the SlotManager with bias=True"
    for call in (manager.check, manager.load):
        with pytest.raises(UnsupportedAdapterError, match=message):
            call(source, strict=strict)
        before.assert_unchanged(manager, model)
