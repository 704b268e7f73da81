"""Slots for `nn.Linear`, its subclasses, and what else has its ``in_features``: HQQ's layer."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lora_slots.layers import watch
from lora_slots.layers.base import LayerKind, LoraSlots, SlotSizes
from lora_slots.layers.quantized import dequantized, is_hqq
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
    """Adds ``sum over rows of scaling * (x A^T) B`` to the output of a linear layer.

    Where its weight is also an embedding's, slots may hold trained rows of that, too.
    """

    def forward(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        """Return ``y`` plus the share of every row whose scaling is not 0.

        Args:
            x: ``[..., in]``, what the base layer was given.
            y: ``[..., out]``, what the base layer returned; not changed.
            base: The base layer.

        Returns:
            ``[..., out]`` in the dtype of ``y``; equal to ``y`` when every scaling is 0.

        The product with A runs in the dtype of the buffers, or in autocast's. The sum runs in the
        wider of that and the dtype of ``y``, so ``y`` itself is never rounded; in float32 on
        processors that only emulate the 16-bit dtypes.

        Source: LoRA, arXiv:2106.09685, section 4.1.
        """
        if not torch.compiler.is_compiling():
            watch.notify(self)
        total = self._with_rows(x, y, base) if self.low_rank else with_bias(self, y)
        if self.token_rows is not None:
            bias = cast("Tensor | None", base.bias)
            total = replace_outputs(self, x, y, total, bias)
        return total

    def _with_rows(self, x: Tensor, y: Tensor, base: nn.Module) -> Tensor:
        if not y.is_meta and torch.is_autocast_enabled(y.device.type):
            h = F.linear(x, self.lora_A)
            with torch.autocast(y.device.type, enabled=False):
                return add_rows(self, y, h, base)
        lora_A = self.lora_A
        return add_rows(self, y, F.linear(cast_to(x, lora_A.dtype), lora_A), base)


def add_rows(
    slots: LoraSlots, y: Tensor, h: Tensor, base: nn.Module, scaling: Tensor | None = None
) -> Tensor:
    """Add to ``y [..., out]`` what ``slots`` make of ``h [..., R]``, the product of x with A.

    ``scaling [1, R]`` stands for the slots' own where the base layer scales its output.
    """
    y, lora_B = with_dora(slots, y, base)
    y = add_product(y, h, lora_B, slots.scaling if scaling is None else scaling)
    return with_bias(slots, y)


def with_dora(slots: LoraSlots, y: Tensor, base: nn.Module) -> tuple[Tensor, Tensor]:
    """``y [..., out]`` and ``lora_B [R, out]`` as DoRA multiplies them."""
    if slots.dora is None:
        return y, slots.lora_B
    gain = slots.gain()
    assert slots.owners is not None
    return lift(y, gain, base), slots.lora_B * gain.index_select(0, slots.owners[0])


def with_bias(slots: LoraSlots, y: Tensor) -> Tensor:
    """``y [..., out]`` plus the bias of all slots."""
    return y if slots.lora_bias is None else (y + slots.total_bias()).to(y.dtype)


def lift(y: Tensor, gain: Tensor, base: nn.Module) -> Tensor:
    """Multiply what the base weight gave, ``y [..., out]`` less the bias, as DoRA does.

    Every slot does so by ``gain [num_slots, out]`` for itself; their changes add up.
    """
    change = (gain - 1).sum(0)
    bias = getattr(base, "bias", None)
    product = y.to(torch.promote_types(y.dtype, change.dtype))
    if bias is not None:
        product = product - bias
    return torch.where(change != 0, y + change * product, y).to(y.dtype)


def add_product(y: Tensor, h: Tensor, lora_B: Tensor, scaling: Tensor) -> Tensor:
    """``y [..., out] + where(scaling != 0, scaling * h [..., R], 0) @ lora_B [R, out]``.

    The sum is an `addmm` because inductor fuses ``y + h @ B`` otherwise than the base layer alone,
    which would round differently even with nothing loaded.
    """
    h, lora_B = factors(y, h, lora_B, scaling)
    if y.ndim == 2:
        return cast_to(torch.addmm(cast_to(y, h.dtype), h, lora_B), y.dtype)
    flat = cast_to(y.reshape(-1, y.shape[-1]), h.dtype)
    total = torch.addmm(flat, h.reshape(-1, h.shape[-1]), lora_B)
    return cast_to(total, y.dtype).reshape(y.shape)


def cast_to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, without the cost of a call that changes nothing."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def factors(y: Tensor, h: Tensor, lora_B: Tensor, scaling: Tensor) -> tuple[Tensor, Tensor]:
    """Two factors whose product is ``where(scaling != 0, scaling * h, 0) @ lora_B``.

    Both in the dtype in which the product is to be added to ``y``.
    """
    dtype = y.dtype if y.dtype == h.dtype else torch.promote_types(y.dtype, h.dtype)
    if y.is_cpu and dtype in _SLOW_ON_CPU:
        dtype = torch.float32
    on = scaling != 0
    if dtype == torch.float16:
        # scaling * h can leave the range of float16 where scaling * (h @ B) does not, and so can
        # scaling * B. What shrinks is applied to h; of what grows, B takes what it has room for.
        room = 2**15 / lora_B.abs().amax(dim=1).float()
        grow = torch.minimum(scaling.abs().clamp(min=1), room)
        lora_B = lora_B * grow.t()
        scaling = scaling / grow
    return cast_to(torch.where(on, h * scaling, 0), dtype), cast_to(lora_B, dtype)


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
