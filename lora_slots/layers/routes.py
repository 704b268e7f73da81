"""Which adapters each row of a batch gets: tables that all slot layers on one device share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor

from lora_slots.errors import ArgumentError
from lora_slots.layers.base import SlotLayer

if TYPE_CHECKING:
    from lora_slots.layers.base import LoraSlots


class Routes(SlotLayer):
    """By how much each row of a batch multiplies what the slots hold.

    They are plain tensors, since Dynamo takes the size of a buffer for a constant, and these have
    as many rows as the batch. Being another module's module, they stay shared through ``.to()``.

    Attributes:
        by_rank: ``[rows, R]`` float32, a factor of ``scaling``. Where the model sees each row
            several times: ``[rows, 1, R]`` if those lie side by side, ``[1, rows, R]`` if the whole
            batch is repeated. None: rows are not told apart.
        by_slot: The same for ``weights``, with ``num_slots`` columns.
    """

    by_rank: Tensor | None
    by_slot: Tensor | None

    def __init__(self) -> None:
        """Tell no rows apart."""
        super().__init__()
        self.by_rank = self.by_slot = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow ``.to()``, but keep float32."""
        with torch.inference_mode(False):
            self.by_rank = _moved(self.by_rank, fn)
            self.by_slot = _moved(self.by_slot, fn)
        return self


class RowFactors(NamedTuple):
    """What one layer needs to know of the rows of its input.

    Attributes:
        scaling: ``[batch, 1, ..., R]`` float32, a factor of ``scaling``, which broadcasts against
            the layer's ``h [batch, ..., R]``.
        weights: ``[batch, num_slots]`` float32, in the place of ``weights``; None where the layer
            has none.
    """

    scaling: Tensor
    weights: Tensor | None


def row_factors(slots: LoraSlots, like: Tensor, *, batched: bool = True) -> RowFactors | None:
    """The factors of every row of ``like [batch, ..., n]``; None where rows are not told apart.

    Raises:
        ArgumentError: The leading dimension is not that of the routed rows. In compiled code it is
            torch's own error that says so, when the code is compiled.
    """
    routes = slots.routes
    if routes is None or routes.by_rank is None or routes.by_slot is None:
        return None
    if not (batched and like.ndim > 1):
        _refuse(slots, "no batch")
    count = like.shape[0]
    scaling = _spread(slots, routes.by_rank, count)
    if slots.weights is None:
        return RowFactors(along(scaling, like.ndim), None)
    weights = slots.weights * _spread(slots, routes.by_slot, count)
    return RowFactors(along(scaling, like.ndim), weights)


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


def _moved(table: Tensor | None, fn: Callable[[Tensor], Tensor]) -> Tensor | None:
    if table is None:
        return None
    new = fn(table)
    if table.is_meta and not new.is_meta:
        return torch.zeros_like(new, dtype=torch.float32)
    return new if new.dtype == torch.float32 else table.to(new.device)
