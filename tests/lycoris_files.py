"""Random LoHa and LoKr files, of PEFT and of LyCORIS, and the deltas they mean."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from lora_slots import RawAdapter, SlotManager, read_adapter
from lora_slots.resolve.pairing import pair_up, settle_scaling
from lora_slots.resolve.settings import LoraSettings


def write_peft(path: Path, model: nn.Module, config: PeftConfig, *, seed: int = 0) -> PeftModel:
    """Let PEFT make a random adapter for ``model``, which it changes, and save it."""
    torch.manual_seed(seed)
    adapted = get_peft_model(model, config).eval()
    adapted.save_pretrained(path)
    return adapted


def convolutions() -> nn.Sequential:
    """Kernels of 3 and of 1, a stride, padding, and two groups."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 8, 1), nn.Conv2d(8, 4, 3, stride=2, groups=2)
    ).eval()


def image() -> Tensor:
    return torch.randn(2, 4, 7, 7, generator=torch.Generator().manual_seed(7))


def deltas_by_peft(adapted: PeftModel) -> dict[str, Tensor]:
    """What PEFT adds to the weight of every module."""
    return {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").detach()
        for name, module in adapted.named_modules()
        if isinstance(module, BaseTunerLayer)
    }


def deltas_of(raw: RawAdapter) -> dict[str, Tensor]:
    """What the low-rank factors of ``raw`` add to every weight, ``[out, in * kernel]``."""
    settings = None if raw.config is None else LoraSettings.of(raw.config, raw.source)
    deltas = {}
    for pair in pair_up(raw)[0]:
        name = pair.module.removeprefix("base_model.model.")
        scaling = settle_scaling(pair, name, settings, raw)
        plain = pair.expanded()
        assert plain.rank == pair.rank == plain.lora_A.shape[0] == plain.lora_B.shape[1]
        deltas[name] = scaling * (plain.lora_B @ plain.lora_A.flatten(1))
    return deltas


def delta_of(parts: Mapping[str, Tensor], config: Mapping[str, Any] | None = None) -> Tensor:
    """What these tensors of one module mean."""
    (delta,) = deltas_of(read_adapter({f"m.{k}": v for k, v in parts.items()}, config)).values()
    return delta


def loha(
    outputs: int, inputs: int, r: int, kernel: tuple[int, ...] = (), *, tucker: bool = False,
    seed: int = 0, dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:  # fmt: skip
    """LyCORIS's tensors of one module; without Tucker cores, kernels are flattened."""
    generator = torch.Generator().manual_seed(seed)
    sizes: dict[str, tuple[int, ...]] = {}
    for half in "12":
        if tucker:
            sizes[f"hada_t{half}"] = (r, r, *kernel)
            sizes[f"hada_w{half}_a"], sizes[f"hada_w{half}_b"] = (r, outputs), (r, inputs)
        else:
            sizes[f"hada_w{half}_a"] = (outputs, r)
            sizes[f"hada_w{half}_b"] = (r, inputs * torch.Size(kernel).numel())
    return {
        name: torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
        for name, size in sizes.items()
    }


def lokr(
    w1: tuple[int, int], w2: tuple[int, int], r1: int | None = None, r2: int | None = None,
    kernel: tuple[int, ...] = (), *, tucker: bool = False, seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:  # fmt: skip
    """LyCORIS's tensors of one module; a factor whose rank is None is a whole matrix."""
    generator = torch.Generator().manual_seed(seed)
    sizes: dict[str, tuple[int, ...]] = {}
    if r1 is None:
        sizes["lokr_w1"] = w1
    else:
        sizes["lokr_w1_a"], sizes["lokr_w1_b"] = (w1[0], r1), (r1, w1[1])
    if r2 is None:
        sizes["lokr_w2"] = (*w2, *kernel)
    elif tucker:
        sizes["lokr_t2"] = (r2, r2, *kernel)
        sizes["lokr_w2_a"], sizes["lokr_w2_b"] = (r2, w2[0]), (r2, w2[1])
    else:
        sizes["lokr_w2_a"] = (w2[0], r2)
        sizes["lokr_w2_b"] = (r2, w2[1] * torch.Size(kernel).numel())
    return {
        name: torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
        for name, size in sizes.items()
    }


def for_modules(
    parts: Mapping[str, Mapping[str, Tensor]], alpha: float | None = None, prefix: str = ""
) -> dict[str, Tensor]:
    """The tensors of a whole file: ``module.part``, and one alpha for each module."""
    tensors = {f"{prefix}{m}.{part}": t for m, own in parts.items() for part, t in own.items()}
    if alpha is not None:
        tensors |= {f"{prefix}{module}.alpha": torch.tensor(float(alpha)) for module in parts}
    return tensors


def assert_convolutions_are_pefts(path: Path, config: PeftConfig, *, max_rank: int) -> None:
    """Save an adapter with PEFT and load it: outputs, scalings and what an unload leaves."""
    adapted = write_peft(path, convolutions(), config)
    model = convolutions()
    manager = SlotManager(model, max_rank=max_rank, target_modules=["0", "1", "2"])
    report = manager.load(path)
    assert report.scaling == {"0": 1.5, "1": 3.0, "2": 2.5}
    torch.testing.assert_close(model(image()), adapted(image()), rtol=1e-5, atol=1e-5)
    manager.unload("default")
    assert torch.equal(model(image()), convolutions()(image()))
