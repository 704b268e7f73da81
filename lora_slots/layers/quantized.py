"""What quantised base layers say of themselves: bitsandbytes, torchao, HQQ, optimum-quanto.

None of these packages is imported here; what their layers and tensors are is told by attributes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from lora_slots.errors import UnsupportedAdapterError

# bitsandbytes' parameters, which dequantise by functions of the package.
_BITSANDBYTES = ("Params4bit", "Int8Params")


def stored_weight(module: nn.Module) -> Tensor:
    """The weight as the module stores it: floats, packed integers, or a subclass of `Tensor`."""
    # HQQ's layers have no weight, or an empty one that transformers gives them.
    return cast("Tensor", getattr(module, "W_q", None) if is_hqq(module) else module.weight)


def is_hqq(module: nn.Module) -> bool:
    """Whether a module is HQQ's ``HQQLinear``, which is no subclass of `nn.Linear`."""
    return any(cls.__name__ == "HQQLinear" for cls in type(module).__mro__)


def said_dtypes(module: nn.Module) -> Iterator[torch.dtype]:
    """The dtypes in which a layer may compute, the most telling first; some are for storage."""
    weight = stored_weight(module)
    for owner, name in (
        # bitsandbytes settles it in the first forward, if nobody does before.
        (module, "compute_dtype"),
        (getattr(weight, "quant_state", None), "dtype"),
        (weight, "dtype"),
        (getattr(module, "bias", None), "dtype"),
    ):
        dtype = getattr(owner, name, None)
        if isinstance(dtype, torch.dtype):
            yield dtype


def can_compute(dtype: torch.dtype) -> bool:
    """Whether products run in ``dtype``; 8-bit floats only store."""
    return dtype.is_floating_point and dtype.itemsize > 1


def dequantized(module: nn.Module) -> Tensor:
    """The weight of a base layer as floats, in the shape that it has without quantisation.

    Changes nothing, unlike ``peft.utils.integrations.dequantize_module_weight``, which puts a new
    parameter into a layer of bitsandbytes on the CPU.

    Raises:
        UnsupportedAdapterError: The layer does not give it.
    """
    with torch.no_grad():
        weight = _dequantized(module)
    if weight is None or weight.is_meta:
        name = type(module).__name__.removeprefix("Slot")
        where = "on the meta device" if weight is not None else "quantised in an unknown way"
        raise UnsupportedAdapterError(f"the weight of this {name} is {where}")
    return weight.detach()


def _dequantized(module: Any) -> Tensor | None:
    if is_hqq(module):
        full: Tensor = module.dequantize()
        return full
    # quanto multiplies by its qweight, also where the weight itself is not frozen yet.
    qweight = getattr(module, "qweight", None)
    weight: Tensor = module.weight if qweight is None else qweight
    if type(weight).__name__ in _BITSANDBYTES and _is_quantized(weight):
        return _of_bitsandbytes(module, weight)
    if type(weight).dequantize is not Tensor.dequantize:
        return weight.dequantize()
    return weight if weight.is_floating_point() and weight.itemsize > 1 else None


def _is_quantized(weight: Tensor) -> bool:
    # 4-bit weights may be stored in a tensor that claims to hold floats.
    return getattr(weight, "quant_state", None) is not None or not weight.is_floating_point()


def _of_bitsandbytes(module: nn.Module, weight: Any) -> Tensor:
    quant_state: Any = getattr(weight, "quant_state", None)
    if getattr(quant_state, "packing_format_for_cpu", False):
        # Where the processor has instructions for bfloat16, the first forward packs 4-bit weights
        # in a way that only the product knows: what it makes of the identity is the weight.
        bitsandbytes: Any = sys.modules["bitsandbytes"]
        identity = torch.eye(quant_state.shape[1], dtype=quant_state.dtype, device=weight.device)
        product: Tensor = bitsandbytes.matmul_4bit(identity, weight, quant_state=quant_state)
        return product.t()
    from peft.utils.integrations import dequantize_bnb_weight

    # The scale of 8-bit weights moves from the weight to the layer in the first forward.
    scales = (getattr(owner, "SCB", None) for owner in (weight, getattr(module, "state", None)))
    state = SimpleNamespace(SCB=next((scale for scale in scales if scale is not None), None))
    return dequantize_bnb_weight(weight, state=state)
