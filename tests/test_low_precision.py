"""In bfloat16, float16 and under autocast we are as near to the exact result as PEFT is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import (
    TINY,
    TOY_MODULES,
    Tiny,
    peft_model,
    slot_buffers,
    tensors_of,
    toy,
    write_adapter,
    write_folder,
)

from lora_slots import ArgumentError, SlotManager, read_adapter
from lora_slots.layers import linear

HALVES = [torch.bfloat16, torch.float16]
BOTH_HALVES = pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])
EVERY_TINY = pytest.mark.parametrize("tiny", TINY.values(), ids=TINY.keys())


@pytest.fixture(autouse=True, params=["as this processor does", "in the dtype itself"])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors without instructions for 16 bits multiply in float32; others must be right too."""
    if request.param == "in the dtype itself":
        monkeypatch.setattr(linear, "_SLOW_ON_CPU", ())


CONFIGS: dict[str, Callable[[Tiny], dict[str, Any]]] = {
    "rank 7 on attention": lambda tiny: {
        "r": 7, "lora_alpha": 28, "target_modules": list(tiny.attention),
    },
    "rank 64, rsLoRA, all layers": lambda tiny: {
        "r": 64, "lora_alpha": 8, "use_rslora": True, "target_modules": "all-linear",
    },
}  # fmt: skip


class Files:
    """Adapters written by PEFT in a dtype, so that no reader has to round them again."""

    def __init__(self, root: Path) -> None:
        self.path = functools.cache(functools.partial(_write, root))


def _write(root: Path, tiny: str, config: str, dtype: torch.dtype) -> Path:
    path = root / tiny / config.replace(" ", "_") / str(dtype)
    model = TINY[tiny].build().to(dtype)
    write_adapter(path, model, **CONFIGS[config](TINY[tiny]))
    tensors = {key: value.to(dtype) for key, value in read_adapter(path).tensors.items()}
    return write_folder(path, tensors, read_adapter(path).config)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("adapters"))


def oracle(model: nn.Module, path: Path) -> nn.Module:
    return peft_model(model, path, autocast_adapter_dtype=False)


def rms(error: Tensor) -> float:
    return float(error.double().square().mean().sqrt())


def assert_as_exact_as_peft(ours: Tensor, theirs: Tensor, exact: Tensor) -> None:
    assert torch.isfinite(theirs).all()
    assert rms(ours - exact) <= 2 * rms(theirs - exact)


@EVERY_TINY
@BOTH_HALVES
@pytest.mark.parametrize("config", CONFIGS)
def test_error_in_half_precision_is_at_most_twice_pefts(
    tiny: Tiny, dtype: torch.dtype, config: str, files: Files
) -> None:
    path = files.path(tiny.name, config, dtype)
    exact = tiny.run(oracle(tiny.build().to(dtype).double(), path))
    theirs = tiny.run(oracle(tiny.build().to(dtype), path))
    model = tiny.build().to(dtype)
    base = tiny.run(model)
    manager = SlotManager(model, max_rank=64)
    assert torch.equal(tiny.run(model), base)
    assert {A.dtype for n, A in slot_buffers(model).items() if "scaling" not in n} == {dtype}
    manager.load(path)
    ours = tiny.run(model)
    assert ours.dtype == theirs.dtype
    assert_as_exact_as_peft(ours, theirs, exact)
    # The adapter shows far above the rounding, so the bound says something about it.
    assert rms(exact - base) > 5 * rms(theirs - exact)
    manager.unload("default")
    assert torch.equal(tiny.run(model), base)


@EVERY_TINY
@BOTH_HALVES
def test_error_of_float32_weights_under_autocast_is_at_most_twice_pefts(
    tiny: Tiny, dtype: torch.dtype, files: Files
) -> None:
    path = files.path(tiny.name, "rank 64, rsLoRA, all layers", torch.float32)
    exact = tiny.run(oracle(tiny.build().double(), path))
    with torch.autocast("cpu", dtype):
        theirs = tiny.run(oracle(tiny.build(), path))
    model = tiny.build()
    with torch.autocast("cpu", dtype):
        base = tiny.run(model)
    manager = SlotManager(model, max_rank=64)
    with torch.autocast("cpu", dtype):
        assert torch.equal(tiny.run(model), base)
        manager.load(path)
        ours = tiny.run(model)
    assert ours.dtype == theirs.dtype == base.dtype
    assert_as_exact_as_peft(ours, theirs, exact)


@EVERY_TINY
def test_float32_buffers_make_a_bfloat16_model_no_less_exact(tiny: Tiny, files: Files) -> None:
    path = files.path(tiny.name, "rank 64, rsLoRA, all layers", torch.bfloat16)
    exact = tiny.run(oracle(tiny.build().bfloat16().double(), path))
    theirs = tiny.run(oracle(tiny.build().bfloat16(), path))
    model = tiny.build().bfloat16()
    base = tiny.run(model)
    manager = SlotManager(model, max_rank=64, dtype=torch.float32)
    assert torch.equal(tiny.run(model), base)
    manager.load(path)
    ours = tiny.run(model)
    assert ours.dtype == base.dtype
    assert_as_exact_as_peft(ours, theirs, exact)


@EVERY_TINY
@BOTH_HALVES
def test_half_precision_buffers_do_not_round_what_a_float32_model_computes(
    tiny: Tiny, dtype: torch.dtype, files: Files
) -> None:
    path = files.path(tiny.name, "rank 7 on attention", dtype)
    exact = tiny.run(oracle(tiny.build().double(), path))
    all_half = tiny.run(oracle(tiny.build().to(dtype), path))
    model = tiny.build()
    base = tiny.run(model)
    manager = SlotManager(model, max_rank=64, dtype=dtype)
    assert torch.equal(tiny.run(model), base)
    manager.load(path)
    ours = tiny.run(model)
    assert ours.dtype == torch.float32
    # Only the adapter's share is rounded: better than a model that is rounded everywhere.
    assert rms(ours - exact) < rms(all_half - exact)
    manager.set_weight("default", 0)
    assert torch.equal(tiny.run(model), base)


@torch.no_grad()
def test_output_keeps_the_dtype_of_the_base_layer_under_autocast() -> None:
    model, x = nn.Sequential(nn.Linear(8, 6)), torch.randn(3, 8)
    A, B = torch.randn(2, 8), torch.randn(6, 2)
    exact = model(x) + 3 * (x @ A.t() @ B.t())
    SlotManager(model, max_rank=4).load(
        read_adapter(tensors_of({"0": (A, B)}), {"r": 2, "lora_alpha": 6})
    )
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        # A nested region that turns it off computes in float32 again.
        with torch.autocast("cpu", enabled=False):
            full = model(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), exact, rtol=0.03, atol=0.03 * float(exact.abs().max()))
    assert full.dtype == torch.float32
    torch.testing.assert_close(full, exact, rtol=1e-5, atol=1e-4)


class Float32Linear(nn.Linear):
    """A layer that computes in float32 whatever autocast says."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


@torch.no_grad()
def test_autocast_does_not_round_the_output_of_a_layer_that_leaves_it() -> None:
    model, x = nn.Sequential(Float32Linear(8, 6)), torch.randn(3, 8)
    base = model(x)
    manager = SlotManager(model, max_rank=4)
    A, B = torch.randn(2, 8), torch.randn(6, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), base)
        manager.load(read_adapter(tensors_of({"0": (A, B)})), weight=0)
        assert torch.equal(model(x), base)
        manager.set_weight("default", 1)
        y = model(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, base + x @ A.t() @ B.t(), rtol=0.03, atol=0.1)


@torch.no_grad()
def test_an_inactive_adapter_contributes_nothing_even_where_its_products_overflow() -> None:
    model, x = toy().half(), torch.ones(3, 8).half()
    base = model(x)
    manager = SlotManager(model, max_rank=4, num_slots=2)
    huge = {m: (torch.full((4, 8), 6e4), torch.full((6, 4), 6e4)) for m in TOY_MODULES}
    manager.load(read_adapter(tensors_of(huge)), "huge")
    assert not torch.isfinite(model(x)).any()
    manager.set_weight("huge", 0)
    assert torch.equal(model(x), base)
    small = {m: (torch.full((1, 8), 0.5), torch.full((6, 1), 0.25)) for m in TOY_MODULES}
    manager.load(read_adapter(tensors_of(small)), "small")
    torch.testing.assert_close(model(x), base + 1, rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, "bfloat16"], ids=str)
def test_a_dtype_in_which_slots_cannot_add_is_refused(dtype: Any) -> None:
    model = toy()
    with pytest.raises(ArgumentError, match="dtype must be"):
        SlotManager(model, max_rank=4, dtype=dtype)
    assert slot_buffers(model) == {}


# (h, B): what lora_A makes of the input, and the entries of lora_B; h * B * 1536 is about 3400.
ORDERS = {
    "h times scaling is above float16": (220.0, 0.01),
    "both are moderate": (1.5, 1.5),
    "B times scaling is above float16": (0.03, 75.0),
}


@pytest.mark.parametrize("order", ORDERS)
@torch.no_grad()
def test_float16_does_not_overflow_where_peft_does_not(order: str, tmp_path: Path) -> None:
    h, b = ORDERS[order]
    torch.manual_seed(0)
    x = torch.rand(3, 8).add(0.5).half()
    A = (torch.full((1, 8), h) / 8).half()
    B = (torch.full((6, 1), b) * torch.linspace(-1, 1, 6)[:, None]).half()
    both = {module: (A.clone(), B.clone()) for module in TOY_MODULES}
    path = write_folder(
        tmp_path / "large", tensors_of(both),
        {"r": 1, "lora_alpha": 1536, "target_modules": ["q_proj", "v_proj"]},
    )  # fmt: skip
    exact = oracle(toy().half().double(), path)(x.double())
    theirs = oracle(toy().half(), path)(x)
    assert float(exact.abs().max()) > 2000

    model = toy().half()
    SlotManager(model, max_rank=4).load(path)
    ours = model(x)
    assert torch.isfinite(ours).all()
    assert_as_exact_as_peft(ours, theirs, exact)


@torch.no_grad()
def test_float16_overflows_in_the_order_that_is_not_used() -> None:
    """The twin of the test above: the first case there does overflow if h is scaled first."""
    h = torch.tensor(220.0, dtype=torch.float16)
    assert torch.isinf(h * 1536)
    assert torch.isfinite(h * 0.01 * 1536)
