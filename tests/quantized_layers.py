"""Small models whose layers are quantised, on the CPU, by every package that can do it there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import bitsandbytes as bnb
import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from optimum.quanto import freeze, qint8, quantize
from torch import Tensor, nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from toys import pairs, tensors_of

from lora_slots import RawAdapter, read_adapter

INPUTS, Q, V = 64, 96, 32


class Two(nn.Module):
    """A layer with a bias and one without, side by side; the output shows each on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(INPUTS, Q)
        self.v_proj = nn.Linear(INPUTS, V, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.v_proj(x)], dim=-1)


@dataclass(frozen=True)
class Kind:
    """One way to quantise.

    Attributes:
        apply: Quantises the linear layers of a model in place.
        compiles_whole: Whether the base alone compiles with ``fullgraph=True``.
        copies: Whether the base alone can be deep-copied.
    """

    apply: Callable[[nn.Module], object]
    compiles_whole: bool = True
    copies: bool = True


def replace_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, make(module))


def _bnb4(linear: nn.Linear, storage: torch.dtype = torch.uint8) -> nn.Module:
    layer = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=linear.bias is not None,
        compute_dtype=linear.weight.dtype, quant_type="nf4", quant_storage=storage,
    )  # fmt: skip
    layer.weight = bnb.nn.Params4bit(
        linear.weight.data, requires_grad=False, quant_type="nf4", quant_storage=storage
    )
    layer.bias = linear.bias
    return layer.to("cpu")


def bnb8_layer(linear: nn.Linear) -> nn.Module:
    layer = bnb.nn.Linear8bitLt(
        linear.in_features, linear.out_features, bias=linear.bias is not None,
        has_fp16_weights=False,
    )  # fmt: skip
    layer.weight = bnb.nn.Int8Params(
        linear.weight.data, requires_grad=False, has_fp16_weights=False
    )
    layer.bias = linear.bias
    return layer.to("cpu")


def hqq_layer(linear: nn.Linear) -> nn.Module:
    config = BaseQuantizeConfig(nbits=4, group_size=32)
    return HQQLinear(linear, config, compute_dtype=linear.weight.dtype, device="cpu")


def _quanto(model: nn.Module, *, frozen: bool = True) -> None:
    quantize(model, weights=qint8)
    if frozen:
        freeze(model)


KINDS = {
    "bitsandbytes 4-bit": Kind(lambda model: replace_linears(model, _bnb4)),
    # As for FSDP, which knows how to shard floats only.
    "bitsandbytes 4-bit stored as bfloat16": Kind(
        lambda model: replace_linears(model, lambda linear: _bnb4(linear, torch.bfloat16))
    ),
    "bitsandbytes 8-bit": Kind(lambda model: replace_linears(model, bnb8_layer)),
    "torchao int8": Kind(lambda model: quantize_(model, Int8WeightOnlyConfig())),
    "hqq 4-bit": Kind(lambda model: replace_linears(model, hqq_layer)),
    # Its int4 compiles an extension for more than a minute, once.
    "quanto int8": Kind(lambda model: _quanto(model), copies=False),
    "quanto, not frozen": Kind(lambda model: _quanto(model, frozen=False), compiles_whole=False),
}


def quantized(kind: str, dtype: torch.dtype = torch.float32) -> Two:
    torch.manual_seed(2)
    model = Two().to(dtype)
    KINDS[kind].apply(model)
    return model.eval()


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, INPUTS, generator=torch.Generator().manual_seed(6)).to(dtype)


def two_pairs(rank: int, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    q = pairs({"q_proj": rank}, inputs=INPUTS, outputs=Q, seed=seed)
    return q | pairs({"v_proj": rank}, inputs=INPUTS, outputs=V, seed=seed + 1)


def two_adapter(rank: int, *, alpha: float = 8, seed: int = 0) -> RawAdapter:
    return read_adapter(tensors_of(two_pairs(rank, seed)), {"r": rank, "lora_alpha": alpha})


def two_share(rank: int, *, alpha: float = 8, seed: int = 0) -> Tensor:
    """``alpha / rank * B A x`` of that adapter, in float64."""
    x = inputs().double()
    both = two_pairs(rank, seed)
    return torch.cat(
        [alpha / rank * (x @ A.double().t() @ B.double().t()) for A, B in both.values()], -1
    ).float()
