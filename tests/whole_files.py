"""A model with a head and norms, and adapters for it that PEFT has trained whole tensors of."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from toys import peft_model

from lora_slots import RawAdapter, SlotManager, read_adapter


class Head(nn.Module):
    """A head of several layers, as RoBERTa has it."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 8)
        self.out_proj = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(torch.tanh(self.dense(x)))


class Headed(nn.Module):
    """``q_proj``, ``k_proj`` without a bias, ``norm``, and a ``classifier`` of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 8)
        self.k_proj = nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.classifier = Head()

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.norm(self.q_proj(x) + self.k_proj(x)))


def headed() -> Headed:
    torch.manual_seed(0)
    return Headed().eval()


X = torch.randn(3, 8, generator=torch.Generator().manual_seed(7))
FULL = ("norm", "classifier")


def write_trained(path: Path, model: nn.Module, *, seed: int = 0, **config: Any) -> Path:
    """Let PEFT save an adapter for a copy of ``model`` whose every trained tensor has moved."""
    torch.manual_seed(seed)
    config = {"r": 2, "init_lora_weights": False, "target_modules": ["q_proj"], **config}
    peft = get_peft_model(copy.deepcopy(model), LoraConfig(**config))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if parameter.requires_grad and "lora_" not in name:
                parameter.add_(torch.randn_like(parameter))
    peft.save_pretrained(path)
    return path


def by_peft(model: nn.Module, path: Path, x: Tensor = X) -> Tensor:
    """What PEFT makes of ``model`` with the adapter at ``path``."""
    with torch.no_grad():
        output: Tensor = peft_model(copy.deepcopy(model), path)(x)
    return output


def manager_of(model: nn.Module, **options: Any) -> SlotManager:
    settings = {"max_rank": 4, "num_slots": 2, "full_modules": FULL, **options}
    return SlotManager(model, **settings)


def with_pair(tensors: Mapping[str, Tensor], config: Any = None) -> RawAdapter:
    """An adapter in memory that has ``tensors`` beside a low-rank update of ``q_proj``."""
    generator = torch.Generator().manual_seed(5)
    pair = {
        "q_proj.lora_A.weight": torch.randn(2, 8, generator=generator),
        "q_proj.lora_B.weight": torch.randn(8, 2, generator=generator),
    }
    return read_adapter({**pair, **tensors}, config)
