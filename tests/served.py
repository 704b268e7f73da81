"""A model of two layers whose output tells which adapters each layer saw."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from toys import tensors_of

from lora_slots import RawAdapter, SlotManager, read_adapter

X = torch.ones(1, 4)


class Served(nn.Module):
    """Zero, plus the value of every active adapter from each of two layers.

    Attributes:
        pause: Between the layers, other threads may take their turn.
    """

    def __init__(self, *, pause: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(4, 1, bias=False)
        self.second = nn.Linear(4, 1, bias=False)
        self.pause = pause
        nn.init.zeros_(self.first.weight)
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.pause:
            time.sleep(0)
        return y + self.second(x)


def adapter(value: float, rank: int = 4) -> RawAdapter:
    """One that makes each layer give ``value``, rank by rank, exactly."""
    parts = {
        layer: (torch.full((rank, 4), 0.25), torch.full((1, rank), value / rank))
        for layer in ("first", "second")
    }
    return read_adapter(tensors_of(parts), {"r": rank, "lora_alpha": rank})


# A forward that sees one in the first layer and the other in the second gives 0.
P, N = adapter(1.0, rank=4), adapter(-1.0, rank=2)


def served(num_slots: int = 1, **options: object) -> tuple[Served, SlotManager]:
    model = Served().eval().requires_grad_(False)
    return model, SlotManager(model, **{"max_rank": 8, "num_slots": num_slots, **options})


def expected(manager: SlotManager) -> float:
    """The output that `status` promises, with the value of each adapter for its name."""
    status = manager.status()
    if not status.enabled:
        return 0.0
    if status.routing is not None:
        weights = {slot.adapter_name: slot.weight for slot in status.slots}
        (row,) = status.routing.rows
        return sum(2 * weight * weights[name] * float(name) for name, weight in row.items())
    return sum(2 * slot.weight * float(slot.adapter_name) for slot in status.slots if slot.active)
