"""Slots for `nn.Linear`, its subclasses, and what else has its ``in_features``: HQQ's layer."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lora_slots.layers import watch
from lora_slots.layers.base import SlotSizes
from lora_slots.layers.kind import LayerKind
from lora_slots.layers.lora import LoraSlots
from lora_slots.layers.quantized import dequantized, is_hqq
from lora_slots.layers.routes import RowFactors, along, row_factors
from lora_slots.layers.tokens import replace_outputs

# Where the processor has no instructions for a dtype, torch multiplies in it many times slower than
# it casts to float32 and multiplies there.
_SLOW_ON_CPU = tuple(
    dtype
    for dtype, is_fast in (
        (torch.bfloat16, torch.ops.mkldnn._is_mkldnn_bf16_supported),
        (torch.float16, torch.ops.mkldnn._is_mkldnn_fp16_supported),
    )
    if not is_fast()
)


class LinearSlots(LoraSlots):
    """Adds ``sum over rows of weight * scaling * (x A^T) B`` to the output of a linear layer.

    Where its weight is also an embedding's, slots may hold trained rows of that, too.
    """

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """Return ``y`` plus the share of every row that an active adapter fills.

        Args:
            x: ``[..., in]``, what the base layer was given.
            y: ``[..., out]``, what the base layer returned; not changed.
            base: The base layer.

        Returns:
            ``[..., out]`` in the dtype of ``y``; equal to ``y`` when none is active.

        The product with A runs in the dtype of the buffers, or in autocast's. The sum runs in the
        wider of that and the dtype of ``y``, so ``y`` itself is never rounded; in float32 on
        processors that only emulate the 16-bit dtypes.

        Source: LoRA, arXiv:2106.09685, section 4.1.
        """
        if not torch.compiler.is_compiling():
            watch.notify(self)
        if self.idle:
            return y
        rows = row_factors(self, y)
        total = self._with_rows(x, y, base, rows) if self.low_rank else with_bias(self, y, rows)
        if self.token_rows is not None:
            bias = cast("Tensor | None", base.bias)
            total = replace_outputs(self, x, y, total, bias, rows)
        return total

    def _with_rows(self, x: Tensor, y: Tensor, base: nn.Module, rows: RowFactors | None) -> Tensor:
        if not y.is_meta and torch.is_autocast_enabled(y.device.type):
            h = self._by_rank(x, rows)
            with torch.autocast(y.device.type, enabled=False):
                return add_rows(self, y, h, base, rows)
        return add_rows(self, y, self._by_rank(cast_to(x, self.lora_A.dtype), rows), base, rows)

    def _by_rank(self, x: Tensor, rows: RowFactors | None) -> Tensor:
        """The product of x with A: ``[..., R]``, or what is picked of that, ``[batch, -1, k]``."""
        if rows is None:
            return F.linear(x, self.lora_A)
        lora_A = rows.rows_of(self.lora_A)
        return torch.bmm(x.reshape(x.shape[0], -1, x.shape[-1]), lora_A.transpose(1, 2))


def add_rows(
    slots: LoraSlots,
    y: Tensor,
    h: Tensor,
    base: nn.Module,
    rows: RowFactors | None = None,
    scaling: Tensor | None = None,
) -> Tensor:
    """Add to ``y [..., out]`` what ``slots`` make of ``h [..., R]``, the product of x with A.

    With ``rows``, of ``h [batch, -1, k]``, the columns picked for each. ``scaling [1, R]`` stands
    for ``slots.by_row()`` where the base layer scales its output.
    """
    y, lora_B = with_dora(slots, y, base, rows)
    y = add_product(y, h, lora_B, slots.by_row() if scaling is None else scaling, rows)
    return with_bias(slots, y, rows)


def with_dora(
    slots: LoraSlots, y: Tensor, base: nn.Module, rows: RowFactors | None = None
) -> tuple[Tensor, Tensor]:
    """``y [..., out]`` and ``lora_B [R, out]`` as DoRA multiplies them.

    With ``rows``, each has a ``lora_B`` of its own: ``[batch, k, out]``.
    """
    lora_B = slots.lora_B if rows is None else rows.rows_of(slots.lora_B)
    if slots.dora is None:
        return y, lora_B
    owners = slots.mix.owners_of(slots.lora_B)
    if rows is None:
        gain = slots.gain()
        y = lift(y, (gain - 1).sum(0), base)
        return y, lora_B * gain.index_select(0, owners)
    gain = slots.gain(rows.weights)
    y = lift(y, along((gain - 1).sum(1), y.ndim), base)
    picked = rows.rows_of(owners.unsqueeze(1))
    return y, lora_B * gain.gather(1, picked.expand(-1, -1, gain.shape[-1]))


def with_bias(slots: LoraSlots, y: Tensor, rows: RowFactors | None = None) -> Tensor:
    """``y [..., out]`` plus the bias of all slots."""
    if slots.lora_bias is None:
        return y
    if rows is not None:
        return (y + along(slots.total_bias(rows.weights), y.ndim)).to(y.dtype)
    return (y + slots.total_bias()).to(y.dtype)


def lift(y: Tensor, change: Tensor, base: nn.Module) -> Tensor:
    """Multiply what the base weight gave, ``y [..., out]`` less the bias, as DoRA does.

    Every slot does so for itself; ``change``, which broadcasts against ``y``, is the sum of what
    they change it by.
    """
    bias = getattr(base, "bias", None)
    product = y.to(torch.promote_types(y.dtype, change.dtype))
    if bias is not None:
        product = product - bias
    return torch.where(change != 0, y + change * product, y).to(y.dtype)


def add_product(
    y: Tensor, h: Tensor, lora_B: Tensor, scaling: Tensor, rows: RowFactors | None = None
) -> Tensor:
    """``y [..., out] + where(scaling != 0, scaling * h [..., R], 0) @ lora_B [R, out]``.

    With ``rows``, ``h [batch, -1, k]`` and ``lora_B [batch, k, out]`` are those picked for each.

    The sum is an `addmm` because inductor fuses ``y + h @ B`` otherwise than the base layer alone,
    which would round differently even with nothing loaded.
    """
    h, lora_B = factors(y, h, lora_B, scaling, rows)
    if rows is not None:
        flat = cast_to(y.reshape(y.shape[0], -1, y.shape[-1]), h.dtype)
        total = torch.baddbmm(flat, h, lora_B)
    elif y.ndim == 2:
        return cast_to(torch.addmm(cast_to(y, h.dtype), h, lora_B), y.dtype)
    else:
        flat = cast_to(y.reshape(-1, y.shape[-1]), h.dtype)
        total = torch.addmm(flat, h.reshape(-1, h.shape[-1]), lora_B)
    return cast_to(total, y.dtype).reshape(y.shape)


def cast_to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, without the cost of a call that changes nothing."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def factors(
    y: Tensor, h: Tensor, lora_B: Tensor, scaling: Tensor, rows: RowFactors | None = None
) -> tuple[Tensor, Tensor]:
    """Two factors whose product is ``where(scaling != 0, scaling * h, 0) @ lora_B``.

    Both in the dtype in which the product is to be added to ``y``; ``rows`` as in `add_product`.
    """
    dtype = y.dtype if y.dtype == h.dtype else torch.promote_types(y.dtype, h.dtype)
    if y.is_cpu and dtype in _SLOW_ON_CPU:
        dtype = torch.float32
    if rows is not None:
        scaling = rows.rows_of(scaling.t()).transpose(1, 2)
    off = scaling == 0
    if dtype == torch.float16:
        # scaling * h can leave the range of float16 where scaling * (h @ B) does not, and so can
        # scaling * B. What shrinks is applied to h; of what grows, B takes what it has room for.
        room = 2**15 / lora_B.abs().amax(dim=-1).float()
        grow = torch.minimum(scaling.abs().clamp(min=1), room.unsqueeze(-2))
        lora_B = lora_B * grow.transpose(-1, -2)
        scaling = scaling / grow
    if rows is not None:
        factor = rows.factors.unsqueeze(1)
        scaling = scaling * factor
        off = off | (factor == 0)
    return cast_to((h * scaling).masked_fill_(off, 0), dtype), cast_to(lora_B, dtype)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_hqq(module)


def _shape(module: nn.Linear) -> tuple[tuple[int, ...], int]:
    return (module.in_features,), module.out_features


def _make(module: nn.Linear, sizes: SlotSizes) -> LinearSlots:
    inputs, outputs = module.in_features, module.out_features
    return LinearSlots(inputs, outputs, sizes, token_width=inputs)


LINEAR = LayerKind(
    name="Linear",
    matches=_is_linear,
    shape=_shape,
    make=_make,
    weight=dequantized,
    is_linear=True,
)
