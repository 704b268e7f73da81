"""DoRA adapters: written by PEFT with magnitudes of their own, or made in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from toys import TOY_MODULES, WEIGHTS, pairs, tensors_of, write_adapter, write_folder

from lora_slots import RawAdapter, read_adapter


def write_dora(path: Path, model: nn.Module, *, seed: int = 0, **config: Any) -> Path:
    """PEFT's random DoRA adapter for ``model``, with magnitudes 0.5 to 1.5 of its own norms.

    Those that PEFT starts with are the norms themselves, and so would change nothing.
    """
    write_adapter(path, model, seed=seed, use_dora=True, **config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        key: tensor * (0.5 + torch.rand(tensor.shape, generator=generator)).to(tensor.dtype)
        if "lora_magnitude_vector" in key
        else tensor
        for key, tensor in load_file(path / WEIGHTS).items()
    }
    return write_folder(path, tensors, None)


def dora_tensors(
    rank: int = 4,
    *,
    modules: tuple[str, ...] = TOY_MODULES,
    seed: int = 0,
    inputs: int = 8,
    outputs: int = 6,
    prefix: str = "base_model.model.",
) -> dict[str, Tensor]:
    """Random A, B and magnitude for these modules, as PEFT spells them."""
    both = pairs(dict.fromkeys(modules, rank), inputs=inputs, outputs=outputs, seed=seed)
    generator = torch.Generator().manual_seed(seed + 500)
    return tensors_of(both, prefix) | {
        f"{prefix}{module}.lora_magnitude_vector": 0.5 + torch.rand(outputs, generator=generator)
        for module in modules
    }


def dora_adapter(rank: int = 4, *, alpha: float = 6, **options: Any) -> RawAdapter:
    """A random DoRA adapter in memory for these modules of `Toy`."""
    return read_adapter(
        dora_tensors(rank, **options), {"r": rank, "lora_alpha": alpha, "use_dora": True}
    )


def dora_output(
    weight: Tensor, x: Tensor, A: Tensor, B: Tensor, scaling: float, magnitude: Tensor
) -> Tensor:
    """What DoRA makes of a layer without bias, in float64: ``m / |W + sBA| * (W + sBA) x``."""
    merged = weight.double() + scaling * B.double() @ A.double()
    scale = magnitude.double() / merged.norm(dim=1)
    return (x.double() @ (scale[:, None] * merged).t()).float()
