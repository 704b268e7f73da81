"""What DoRA needs to know of a base weight, so that it is exact for every weight of an adapter."""

from __future__ import annotations

import torch
from torch import Tensor


def dora_rows(
    weight: Tensor, lora_A: Tensor, lora_B: Tensor, scaling: float, magnitude: Tensor
) -> Tensor:
    """The magnitude, |W|^2, <W, sBA> and |sBA|^2 of each output: ``[4, out]`` float32.

    With these, the norm of ``W + w s B A`` follows for any w without another look at W. All sums
    are over the input axis.

    Args:
        weight: The base weight W, ``[out, in]``, on any device; moved nowhere.
        lora_A: ``[r, in]``.
        lora_B: ``[r, out]``.
        scaling: s.
        magnitude: One value for each output.

    Source: DoRA, arXiv:2402.09353, equation 5, with the square of the norm written out.
    """
    W = weight.detach().float()
    A = lora_A.to(W.device).float()
    B = lora_B.to(W.device).float()
    base = W.square().sum(1)
    cross = scaling * ((A @ W.t()) * B).sum(0)
    update = scaling**2 * ((A @ A.t() @ B) * B).sum(0)
    # 0 says that a slot holds no DoRA.
    base = base.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.stack([magnitude.flatten().to(W.device).float(), base, cross, update]).cpu()
