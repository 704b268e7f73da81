"""The same pairs as other trainers would write them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from toys import Pairs

Alphas = Mapping[str, float] | float | None


def kohya(pairs: Pairs, alpha: Alphas = None, prefix: str = "lora_unet_") -> dict[str, Tensor]:
    """``lora_unet_a_b.lora_down.weight``: one prefix for a component, dots as underscores."""
    names = {module: prefix + module.replace(".", "_") for module in pairs}
    return spelt(pairs, names, alpha, ".lora_down.weight", ".lora_up.weight")


def dotted(
    pairs: Pairs, alpha: Alphas = None, prefix: str = "", down: str = ".lora_A", up: str = ".lora_B"
) -> dict[str, Tensor]:
    """``prefix.a.b.lora_A.weight``, or with other words in the place of ``lora_A``."""
    names = {module: prefix + module for module in pairs}
    return spelt(pairs, names, alpha, f"{down}.weight", f"{up}.weight")


def spelt(
    pairs: Pairs, names: Mapping[str, str], alpha: Alphas, down: str, up: str
) -> dict[str, Tensor]:
    """``pairs`` under these names, those of their halves ending in ``down`` and ``up``."""
    tensors: dict[str, Tensor] = {}
    for module, (A, B) in pairs.items():
        tensors |= {names[module] + down: A, names[module] + up: B}
        value = alpha.get(module) if isinstance(alpha, Mapping) else alpha
        if value is not None:
            tensors[f"{names[module]}.alpha"] = torch.tensor(float(value))
    return tensors
