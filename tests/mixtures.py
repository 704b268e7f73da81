"""A mixture of experts, and adapters that PEFT makes for its parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from toys import peft_model, write_adapter

from lora_slots import SlotManager


class Experts(nn.Module):
    """Every token goes to all experts; ``down`` has as many inputs as outputs."""

    def __init__(self, is_transposed: bool = False) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        self.up = nn.Parameter(torch.randn(3, *((8, 10) if is_transposed else (10, 8))) * 0.3)
        self.down = nn.Parameter(torch.randn(3, *((10, 8) if is_transposed else (8, 10))) * 0.3)
        self.gate = nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.up, self.down
        if not self.is_transposed:
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        y = torch.tanh(x[..., None, None, :] @ up) @ down
        return (torch.softmax(x @ self.gate.t(), -1)[..., None, None] * y).sum((-3, -2))


class Mixture(nn.Module):
    def __init__(self, is_transposed: bool = False) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 8)
        self.experts = Experts(is_transposed)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.q_proj(x))


def mixture(is_transposed: bool = False) -> Mixture:
    torch.manual_seed(0)
    return Mixture(is_transposed).eval()


X = torch.randn(5, 8, generator=torch.Generator().manual_seed(7))
ALL = ["experts.up", "experts.down", "experts.gate"]


def write(path, model, parameters=tuple(ALL[:2]), **config):
    settings = {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], **config}
    return write_adapter(path, model, target_parameters=list(parameters), **settings)


def by_peft(path, model):
    with torch.no_grad():
        return peft_model(model, path)(X)


def manager_of(model, *, targets=("q_proj", *ALL), **options):
    return SlotManager(model, **{"max_rank": 4, "target_modules": list(targets), **options})
