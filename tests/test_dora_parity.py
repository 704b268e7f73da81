"""A DoRA adapter gives PEFT's output for the same file, beside every other promise of a load."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dora_files import dora_output, dora_tensors, write_dora
from safetensors.torch import load_file
from torch import Tensor, nn
from toys import TINY, TOY_MODULES, WEIGHTS, Tiny, peft_model, toy, toy_input, write_folder

from lora_slots import SlotManager, read_adapter

ADAPTERS: dict[str, Callable[[Tiny], dict[str, Any]]] = {
    "attention, rank 1": lambda tiny: {
        "r": 1, "lora_alpha": 12, "target_modules": list(tiny.attention),
    },
    "all layers, rank 7, negative alpha": lambda tiny: {
        "r": 7, "lora_alpha": -3.5, "target_modules": "all-linear",
    },
    "all layers, rank 13, rsLoRA": lambda tiny: {
        "r": 13, "lora_alpha": 8, "use_rslora": True, "target_modules": "all-linear",
    },
    "all layers, patterns of rank and alpha": lambda tiny: {
        "r": 4, "lora_alpha": 6, "target_modules": "all-linear",
        "rank_pattern": {tiny.attention[0]: 11, rf".*\.1\..*\.{tiny.attention[1]}": 2},
        "alpha_pattern": {tiny.attention[1]: 40, rf".*\.0\..*\.{tiny.attention[0]}": 0.5},
    },
}  # fmt: skip
NAMES = ("llama", "gpt2", "bert")
EVERY_TINY = pytest.mark.parametrize("tiny", [TINY[name] for name in NAMES], ids=NAMES)
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


class Files:
    def __init__(self, root: Path) -> None:
        self.path = functools.cache(functools.partial(_write, root))


def _write(root: Path, tiny: str, adapter: str, dtype: torch.dtype = torch.float32) -> Path:
    path = root / tiny / str(list(ADAPTERS).index(adapter)) / str(dtype)
    model = TINY[tiny].build()
    # The biases of a fresh model are zero.
    write_dora(path, with_biases(model).to(dtype), **ADAPTERS[adapter](TINY[tiny]))
    tensors = {key: value.to(dtype) for key, value in load_file(path / WEIGHTS).items()}
    return write_folder(path, tensors, None)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("adapters"))


def with_biases(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(11)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data.normal_(generator=generator)
    return model


def build(tiny: Tiny) -> nn.Module:
    return with_biases(tiny.build())


def slots(model: nn.Module, **options: Any) -> SlotManager:
    return SlotManager(model, **{"max_rank": 16, "dora": True, **options})


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


@EVERY_TINY
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_output_is_pefts_and_without_it_the_base_to_the_bit(
    tiny: Tiny, adapter: str, files: Files
) -> None:
    path = files.path(tiny.name, adapter)
    theirs = tiny.run(peft_model(build(tiny), path))
    model = build(tiny)
    base = tiny.run(model)
    manager = slots(model)
    assert torch.equal(tiny.run(model), base)
    manager.load(path)
    ours = tiny.run(model)
    assert_close(ours, theirs)
    assert float((ours - base).abs().max()) > 0.01 * float(base.abs().max())
    manager.set_weight("default", 0)
    assert torch.equal(tiny.run(model), base)
    manager.set_weight("default", 1)
    assert torch.equal(tiny.run(model), ours)
    manager.unload("default")
    assert torch.equal(tiny.run(model), base)


@EVERY_TINY
@pytest.mark.parametrize("weight", [0.5, -1.5, 3.0])
def test_at_every_weight_the_norm_is_that_of_w_plus_weight_times_s_b_a(
    tiny: Tiny, weight: float, files: Files
) -> None:
    path = files.path(tiny.name, "all layers, rank 7, negative alpha")
    oracle = peft_model(build(tiny), path)
    for module in oracle.modules():
        if hasattr(module, "lora_A"):
            module.set_scale("default", weight)
    model = build(tiny)
    manager = slots(model)
    manager.load(path, weight=weight)
    assert_close(tiny.run(model), tiny.run(oracle))
    manager.set_weight("default", 1)
    manager.set_weight("default", weight)
    assert_close(tiny.run(model), tiny.run(oracle))


def rms(error: Tensor) -> float:
    return float(error.double().square().mean().sqrt())


def oracle_in(dtype: torch.dtype, tiny: Tiny, path: Path) -> nn.Module:
    return peft_model(build(tiny).to(dtype), path, autocast_adapter_dtype=False)


@EVERY_TINY
@HALVES
def test_error_in_half_precision_is_at_most_twice_pefts(
    tiny: Tiny, dtype: torch.dtype, files: Files
) -> None:
    path = files.path(tiny.name, "all layers, rank 13, rsLoRA", dtype)
    rounded = build(tiny).to(dtype).double()
    exact = tiny.run(peft_model(rounded, path, autocast_adapter_dtype=False))
    theirs = tiny.run(oracle_in(dtype, tiny, path))
    model = build(tiny).to(dtype)
    base = tiny.run(model)
    manager = slots(model)
    assert torch.equal(tiny.run(model), base)
    manager.load(path)
    ours = tiny.run(model)
    assert ours.dtype == theirs.dtype
    assert rms(ours - exact) <= 2 * rms(theirs - exact)
    assert rms(exact - base) > 5 * rms(theirs - exact)
    manager.unload("default")
    assert torch.equal(tiny.run(model), base)


@EVERY_TINY
@HALVES
def test_error_under_autocast_is_at_most_twice_pefts(
    tiny: Tiny, dtype: torch.dtype, files: Files
) -> None:
    path = files.path(tiny.name, "all layers, rank 13, rsLoRA")
    exact = tiny.run(peft_model(build(tiny).double(), path, autocast_adapter_dtype=False))
    model = build(tiny)
    with torch.autocast("cpu", dtype):
        theirs = tiny.run(oracle_in(torch.float32, tiny, path))
        base = tiny.run(model)
        manager = slots(model)
        assert torch.equal(tiny.run(model), base)
        manager.load(path)
        ours = tiny.run(model)
    assert ours.dtype == theirs.dtype == base.dtype
    assert rms(ours - exact) <= 2 * rms(theirs - exact)


@torch.no_grad()
def test_base_bias_is_not_normalised() -> None:
    model, x = nn.Sequential(nn.Linear(8, 6)), toy_input()
    nn.init.constant_(model[0].bias, 100.0)
    tensors = dora_tensors(3, modules=("0",))
    slots(model).load(read_adapter(tensors, {"r": 3, "lora_alpha": 6}))
    A, B, m = (tensors[f"base_model.model.0.{part}"] for part in PARTS)
    expected = dora_output(model[0].weight, x, A, B, 2.0, m) + 100
    torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=1e-5)


PARTS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")


@pytest.mark.parametrize("shape", [(6,), (6, 1)], ids=["[out]", "[out, 1]"])
@torch.no_grad()
def test_magnitude_lies_on_the_output_axis_in_either_shape(shape: tuple[int, ...]) -> None:
    # 8 inputs, 6 outputs; as plain LoRA the result would be far off.
    model, x = toy(), toy_input()
    tensors = dora_tensors(4)
    reshaped = {k: t.reshape(shape) if "magnitude" in k else t for k, t in tensors.items()}
    slots(model).load(read_adapter(reshaped, {"r": 4, "lora_alpha": 8}))
    rows = []
    for module in TOY_MODULES:
        A, B, m = (tensors[f"base_model.model.{module}.{part}"] for part in PARTS)
        rows.append(dora_output(model.get_submodule(module).weight, x, A, B, 2.0, m))
    expected = torch.stack(rows).reshape(2, 2, 3, 6)
    torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=2e-6)
    plain = SlotManager(other := toy(), max_rank=4)
    plain.load(
        read_adapter(
            {k: t for k, t in tensors.items() if "lora_m" not in k}, {"r": 4, "lora_alpha": 8}
        )
    )
    assert float((other(x) - expected).abs().max()) > 0.3


@torch.no_grad()
def test_where_weight_and_update_cancel_the_output_stays_finite() -> None:
    # |W + BA| is 0, and PEFT divides by it. Here the norm has a floor.
    model, x = nn.Sequential(nn.Linear(2, 2, bias=False)), torch.randn(3, 2)
    nn.init.eye_(model[0].weight)
    slots(model).load(
        read_adapter(
            {
                "0.lora_A.weight": torch.eye(2),
                "0.lora_B.weight": -torch.eye(2),
                "0.lora_magnitude_vector": torch.ones(2),
            }
        )
    )
    assert torch.isfinite(model(x)).all()


@torch.no_grad()
def test_a_base_weight_of_zeros_takes_the_direction_of_the_update() -> None:
    model, x = nn.Sequential(nn.Linear(8, 6, bias=False)), toy_input()
    nn.init.zeros_(model[0].weight)
    tensors = dora_tensors(3, modules=("0",))
    slots(model).load(read_adapter(tensors, {"r": 3, "lora_alpha": 6}))
    A, B, m = (tensors[f"base_model.model.0.{part}"] for part in PARTS)
    expected = dora_output(model[0].weight, x, A, B, 2.0, m)
    torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=2e-6)
