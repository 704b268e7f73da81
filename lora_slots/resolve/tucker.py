"""Tucker convolutions (``lora_mid``): three factors, of which two are folded into ``lora_A``."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_slots.errors import AdapterFileError


@torch.no_grad()
def fold(module: str, lora_A: Tensor, lora_mid: Tensor, source: str) -> Tensor:
    """The ``lora_A [r, in, *kernel]`` of a Tucker convolution: exact, since its core is linear.

    Args:
        module: The module's name in the file, for messages.
        lora_A: ``[m, in]``, with any number of axes of size 1 after it.
        lora_mid: ``[r, m, *kernel]``.
        source: The file, for messages.

    Returns:
        In the wider dtype of both, at least float32.

    Raises:
        AdapterFileError: The shapes do not fit each other.

    Source: LyCORIS, arXiv:2309.14859, section 3.3.
    """
    inner = lora_A.shape[0] if lora_A.ndim else 0
    floats = lora_A.is_floating_point() and lora_mid.is_floating_point()
    plain = lora_A.ndim > 1 and lora_A.shape[2:].numel() == 1
    if not (floats and plain and lora_mid.ndim > 2 and lora_mid.shape[1] == inner):
        raise AdapterFileError(
            f"lora_mid of {module} in {source} must be floats [r, {inner}, *kernel] beside a "
            f"lora_A of [{inner}, in], got {lora_mid.dtype} of shape {tuple(lora_mid.shape)} "
            f"beside {lora_A.dtype} of shape {tuple(lora_A.shape)}"
        )
    if lora_A.is_meta or lora_mid.is_meta:
        lora_A, lora_mid = lora_A.to("meta"), lora_mid.to("meta")
    # 8-bit floats promote to nothing.
    wide = [tensor if tensor.itemsize > 4 else tensor.float() for tensor in (lora_A, lora_mid)]
    lora_A, lora_mid = wide
    dtype = torch.promote_types(lora_A.dtype, lora_mid.dtype)
    return torch.einsum("rm...,mi->ri...", lora_mid.to(dtype), lora_A.flatten(1).to(dtype))
