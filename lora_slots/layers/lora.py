"""The buffers of low-rank updates of a base layer, and of what else slots may hold for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from lora_slots.layers.base import SlotLayer, SlotSizes

if TYPE_CHECKING:
    from lora_slots.layers.routes import Routes


class LoraSlots(SlotLayer):
    """The LoRA rows of all slots of one base layer.

    Attributes:
        lora_A: ``[R, in]``, R the number of rows that all slots share.
        lora_B: ``[R, out]``; rank-major, so that a slot is a run of whole rows here too.
        scaling: ``[1, R]`` float32, the adapter's own for each row that one fills, else 0. (Two
            dimensions, since ahead-of-time compilation inlines small vectors as constants.)
        lora_bias: ``[num_slots, out]`` float32; None without ``bias``.
        dora: ``[num_slots * 4, out]`` float32, for each slot the magnitude and three sums over the
            input axis: |W|^2, <W, sBA> and |sBA|^2; None without ``dora``. Zero where the adapter
            is no DoRA.
        token_ids: ``[num_slots * N, 1]`` int64, one more than the id of each token whose row is
            trained, or 0; None without ``token_rows``.
        token_rows: ``[num_slots * N, width]``, what stands in the place of those rows of the
            embedding; None without ``token_rows``.
        num_slots: How many slots there are.
        low_rank: Whether ``forward`` sees any rows of ``lora_A``, ``lora_B`` and ``scaling``.
        idle: Whether ``forward`` has nothing to add, whatever is active: it sees no rows, and slots
            hold nothing else. All that compiled code then looks at.
        routing: Whether the rows of a batch can be told apart.
        routes: What tells the rows of a batch apart, shared by all layers; None without routing.
        path: The name of the base layer, for errors; empty without routing.
    """

    lora_A: Tensor
    lora_B: Tensor
    scaling: Tensor
    lora_bias: Tensor | None
    dora: Tensor | None
    token_ids: Tensor | None
    token_rows: Tensor | None
    num_slots: int
    low_rank: bool
    idle: bool
    routing: bool = False
    routes: Routes | None
    path: str = ""

    def __init__(
        self, in_features: int, out_features: int, sizes: SlotSizes, *, token_width: int = 0
    ) -> None:
        """Allocate zeros: nothing loaded means the output is the base layer's."""
        super().__init__()
        slots = sizes.num_slots
        rows = sizes.rows
        vars(self).update(mix=sizes.mix, routes=None)
        self.num_slots = slots
        self.low_rank = rows > 0
        self.idle = False
        if self.low_rank:
            self.add_buffer("lora_A", rows, in_features, sizes)
            self.add_buffer("lora_B", rows, out_features, sizes)
            self.add_buffer("scaling", 1, rows, sizes)
        self._whole: dict[str, Tensor] = {}
        for name in _BESIDE:
            self.register_buffer(name, None)
        if sizes.bias:
            self.add_buffer("lora_bias", slots, out_features, sizes)
        if sizes.dora:
            self.add_buffer("dora", 4 * slots, out_features, sizes)
        if sizes.token_rows:
            tokens = slots * sizes.token_rows
            self.add_buffer("token_ids", tokens, 1, sizes, torch.int64)
            self.add_buffer("token_rows", tokens, token_width, sizes)

    def __getstate__(self) -> dict[str, Any]:
        """Hold all rows: a pickle does not know that what ``forward`` sees is a part of them."""
        shown = self.lora_A.shape[0] if self._whole else None
        return {"attributes": super().__getstate__() | {"_whole": {}}, "shown": shown}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Undo `__getstate__`."""
        super().__setstate__(state["attributes"])
        self.show(state["shown"])

    def show(self, rows: int | None) -> int | None:
        """Let ``forward`` see only the first rows of ``lora_A``, ``lora_B`` and ``scaling``.

        They are the first rows of the same memory, so that nothing is copied. Each number of rows
        is one more compiled graph; code that was compiled for it before is used again.

        Args:
            rows: How many; None: all.

        Returns:
            How many it saw before; None: all.
        """
        before = self.lora_A.shape[0] if self._whole else None
        if rows is None or not self._has("lora_A"):
            self._buffers.update(self._whole)
            self._whole = {}
        else:
            names = (name for name in BY_RANK if self._has(name))
            # Set before any is shortened: another thread may ask for whole ones meanwhile.
            self._whole = {name: cast("Tensor", self.whole(name)) for name in names}
            for name, whole in self._whole.items():
                self._buffers[name] = whole.narrow(BY_RANK[name], 0, rows)
        self.low_rank = self._has("lora_A") and self.lora_A.shape[0] > 0
        self.idle = not (self.low_rank or self.routing or any(map(self._has, _BESIDE)))
        return before

    @property
    def shows_some(self) -> bool:
        """Whether ``forward`` sees the first rows only."""
        return bool(self._whole)

    @property
    def is_torn(self) -> bool:
        """Whether the rows that ``forward`` sees are no longer those of the same memory.

        As after ``buffer.data = ...``, which knows of no others.
        """
        for name, whole in self._whole.items():
            part = cast("Tensor", self._buffers[name])
            if part.data_ptr() != whole.data_ptr() and part.numel() > 0:
                return True
        return False

    def whole(self, name: str) -> Tensor | None:
        """All rows of a buffer, however many of them ``forward`` sees."""
        seen = self._buffers.get(name)
        return self._whole.get(name, seen)

    def _has(self, name: str) -> bool:
        return self._buffers.get(name) is not None

    def by_row(self) -> Tensor:
        """By what each row is multiplied: its scaling times its adapter's weight, ``[1, R]``."""
        return self.scaling * self.mix.of_rows(self.scaling)

    def gain(self, rows: Tensor | None = None) -> Tensor:
        """By what DoRA multiplies each output: ``[num_slots, out]`` float32, 1 where it does not.

        The norm is that of ``W + w s B A`` for the weight w that a slot has now, or has for each of
        several ``rows [batch, num_slots]``: then ``[batch, num_slots, out]``.

        Source: DoRA, arXiv:2402.09353, equation 5.
        """
        assert self.dora is not None
        weights = self.mix.of_slots(self.dora.device).t() if rows is None else rows.unsqueeze(-1)
        magnitude, base, cross, update = self.dora.view(-1, 4, self.dora.shape[1]).unbind(1)
        norm = (base + 2 * weights * cross + weights**2 * update).clamp(min=_TINY).sqrt()
        return torch.where((weights != 0) & (base != 0), magnitude / norm, 1)

    def total_bias(self, rows: Tensor | None = None) -> Tensor:
        """What all slots add to the bias: ``[out]`` float32.

        With the weights of several ``rows [batch, num_slots]``: ``[batch, out]``.
        """
        assert self.lora_bias is not None
        if rows is not None:
            return (rows.unsqueeze(-1) * self.lora_bias).sum(1)
        return (self.mix.of_slots(self.lora_bias.device).t() * self.lora_bias).sum(0)


# Buffers with one row, or column, for each rank of an adapter, and which of the two.
BY_RANK = {"lora_A": 0, "lora_B": 0, "scaling": 1}
# What slots may hold beside low-rank updates.
_BESIDE = ("lora_bias", "dora", "token_ids", "token_rows")
_TINY = torch.finfo(torch.float32).tiny
