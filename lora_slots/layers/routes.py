"""What each row of a batch is computed with: tables that all slot layers on one device share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor

from lora_slots.errors import ArgumentError
from lora_slots.layers.base import SlotLayer, followed

if TYPE_CHECKING:
    from lora_slots.layers.lora import LoraSlots


class Routes(SlotLayer):
    """Which rows by rank each row of a batch is computed with, and by what it multiplies them.

    They are plain tensors, since Dynamo takes the size of a buffer for a constant, and these have
    as many rows as the batch. Being another module's module, they stay shared through ``.to()``.

    Where the model sees each row several times, tables have one more dimension: ``[rows, 1, n]`` if
    those lie side by side, ``[1, rows, n]`` if the whole batch is repeated.

    Attributes:
        picks: ``[rows, k]`` int64, the rows by rank that each row of the batch is computed with. A
            row that needs fewer has any of them more than once. None: rows are not told apart.
        factors: ``[rows, k]`` float32, a factor of ``scaling`` for each; 0 for those not needed.
        weights: ``[rows, num_slots]`` float32, the weight of each slot.
    """

    picks: Tensor | None
    factors: Tensor | None
    weights: Tensor | None

    def __init__(self) -> None:
        """Tell no rows apart."""
        super().__init__()
        self.picks = self.factors = self.weights = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow ``.to()``, but keep the dtypes."""
        self.picks, self.factors, self.weights = (
            None if table is None else followed(table, fn)
            for table in (self.picks, self.factors, self.weights)
        )
        return self


class RowFactors(NamedTuple):
    """What one layer needs to know of the rows of its input.

    Attributes:
        picks: ``[batch, k]`` int64, the rows by rank that each is computed with.
        factors: ``[batch, k]`` float32, a factor of ``scaling`` for each of these.
        weights: ``[batch, num_slots]`` float32, the weight of each slot.
    """

    picks: Tensor
    factors: Tensor
    weights: Tensor

    def rows_of(self, buffer: Tensor) -> Tensor:
        """The rows of ``buffer [R, width]`` that each is computed with: ``[batch, k, width]``."""
        return buffer.index_select(0, self.picks.flatten()).view(*self.picks.shape, -1)

    def columns_of(self, h: Tensor) -> Tensor:
        """The columns of ``h [batch, ..., R]`` for these: ``[batch, -1, k]``."""
        flat = h.reshape(h.shape[0], -1, h.shape[-1])
        return flat.gather(2, self.picks.unsqueeze(1).expand(-1, flat.shape[1], -1))


def row_factors(slots: LoraSlots, like: Tensor, *, batched: bool = True) -> RowFactors | None:
    """The factors of every row of ``like [batch, ..., n]``; None where rows are not told apart.

    Raises:
        ArgumentError: The leading dimension is not that of the routed rows. In compiled code it is
            torch's own error that says so, when the code is compiled.
    """
    routes = slots.routes
    if routes is None or routes.picks is None or routes.factors is None or routes.weights is None:
        return None
    if not (batched and like.ndim > 1):
        _refuse(slots, "no batch")
    count = like.shape[0]
    picks = _spread(slots, routes.picks, count)
    factors = _spread(slots, routes.factors, count)
    return RowFactors(picks, factors, _spread(slots, routes.weights, count))


def along(table: Tensor, ndim: int) -> Tensor:
    """``[batch, n]`` as ``[batch, 1, ..., n]`` with as many dimensions."""
    for _ in range(ndim - 2):
        table = table.unsqueeze(1)
    return table


def _spread(slots: LoraSlots, table: Tensor, count: int) -> Tensor:
    """One row of ``table`` for each of ``count``; never broadcast."""
    if table.ndim == 2:
        if table.shape[0] != count:
            _refuse(slots, "another leading dimension", table, count)
        return table
    interleaved = table.shape[1] == 1
    own = table[:, 0] if interleaved else table[0]
    rows = own.shape[0]
    if count % rows != 0:
        _refuse(slots, "another leading dimension", table, count)
    # Chosen by index, since Dynamo takes minutes to reason about quotients of dynamic sizes.
    numbers = torch.arange(count, device=table.device)
    return own.index_select(0, numbers * rows // count if interleaved else numbers % rows)


def _refuse(slots: LoraSlots, what: str, table: Tensor | None = None, count: int = 0) -> None:
    if torch.compiler.is_compiling():
        # What is raised here would make Dynamo give up on the code, not so what an operator raises.
        torch.ops.aten._assert_scalar(
            False, f"{slots.path} was given {what}, not the rows that route() names"
        )
    if table is None:
        raise ArgumentError(f"{slots.path} was given {what}, so that it has no rows to route to")
    routed = table.shape[:-1].numel()
    remedy = "its leading dimension must be a multiple of that"
    if table.ndim == 2:
        remedy = "each row of its leading dimension needs one"
        if count % routed == 0:
            remedy += (
                "; if the model repeats rows, say how: expand='interleave' (0 0 1 1, as for beams) "
                "or 'tile' (0 1 0 1, as for guidance)"
            )
    raise ArgumentError(
        f"{slots.path} was given a leading dimension of {count}, but route() names {routed} rows; "
        f"{remedy}"
    )
