"""A model with routing beside a twin without it, which answers for one row and one adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from toys import block_adapter, blocks

from lora_slots import RawAdapter, SlotManager

Row = str | Mapping[str, float] | None
ROWS: list[Row] = ["a", None, "c", "a"]


@dataclass(frozen=True)
class Routed:
    """One model that tells rows apart, and its twin that does not.

    Attributes:
        model: With routing.
        manager: Its manager.
        twin: The same weights and adapters, without routing.
        by: The manager of the twin.
    """

    model: nn.Module
    manager: SlotManager
    twin: nn.Module
    by: SlotManager

    @torch.no_grad()
    def assert_rows(
        self,
        names: Sequence[Row],
        *inputs: Tensor,
        run: Callable[..., Tensor] | None = None,
        atol: float = 1e-5,
    ) -> Tensor:
        """Every row is what the twin makes of it with its adapter; the base's is so bit by bit.

        ``names`` are those of the rows that the model sees.
        """
        y = (run or self.model)(*inputs)
        for number, row in enumerate(names):
            weights = {row: 1.0} if isinstance(row, str) else dict(row or {})
            self.by.set_adapters(list(weights), list(weights.values()))
            if weights:
                alone = self.twin(*(x[number : number + 1] for x in inputs))[0]
                # Sums of large numbers are small here and there: some ulps of the largest.
                ulps = 1e-6 * alone.abs().max().item()
                torch.testing.assert_close(y[number], alone, rtol=1e-5, atol=atol + ulps)
            else:
                assert torch.equal(y[number], self.twin(*inputs)[number])
        return y


def routed(
    make: Callable[[], nn.Module], adapters: Mapping[str, RawAdapter], **options: Any
) -> Routed:
    """Load ``adapters`` into two models of ``make``."""
    options = {"max_rank": 4, "num_slots": len(adapters), **options}
    model, twin = make(), make()
    manager, by = SlotManager(model, routing=True, **options), SlotManager(twin, **options)
    for name, adapter in adapters.items():
        manager.load(adapter, name)
        by.load(adapter, name)
    return Routed(model, manager, twin, by)


def routed_blocks(alpha: float = 8, **options: Any) -> Routed:
    adapters = {name: block_adapter(2 + n, alpha=alpha, seed=n + 1) for n, name in enumerate("abc")}
    return routed(blocks, adapters, **options)


def tokens(rows: int, seed: int = 0) -> Tensor:
    """Three tokens for each row of `blocks`."""
    return torch.randn(rows, 3, 16, generator=torch.Generator().manual_seed(seed))
