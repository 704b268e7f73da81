"""DoRA and biases on quantised layers: from the dequantised weight, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dora_files import write_dora
from quantized_layers import INPUTS, KINDS, Q, Two, V, inputs, quantized, two_pairs
from torch import Tensor, nn
from toys import Snapshot, pairs, peft_model, tensors_of

from lora_slots import SlotManager, UnsupportedAdapterError, read_adapter
from lora_slots.layers.quantized import dequantized

EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
CONFIG = {"r": 4, "lora_alpha": 8, "use_dora": True}


def magnitudes() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(12)
    return {
        "q_proj": 0.5 + torch.rand(Q, generator=generator),
        "v_proj": 0.5 + torch.rand(V, generator=generator),
    }


def dora_tensors() -> dict[str, Tensor]:
    return tensors_of(two_pairs(4, 1), "") | {
        f"{name}.lora_magnitude_vector": magnitude for name, magnitude in magnitudes().items()
    }


def expected(model: nn.Module, base: Tensor, scaling: float) -> Tensor:
    """DoRA of both layers of `Two` by the maths, on what the quantised layers returned."""
    x, outputs = inputs().double(), []
    for name, y in zip(("q_proj", "v_proj"), base.double().split([Q, V], -1), strict=True):
        A, B = (tensor.double() for tensor in two_pairs(4, 1)[name])
        merged = dequantized(getattr(model, name)).double() + scaling * B @ A
        gain = magnitudes()[name].double() / merged.norm(dim=1)
        bias = getattr(model, name).bias
        bias = 0 if bias is None else bias.double()
        outputs.append(gain * (y - bias + scaling * (x @ A.t() @ B.t())) + bias)
    return torch.cat(outputs, -1).float()


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


@EVERY_KIND
@pytest.mark.parametrize("ran", [False, True], ids=["before its first forward", "after it"])
@torch.no_grad()
def test_dequantised_weight_is_what_the_layer_multiplies_by(kind: str, ran: bool) -> None:
    model, x = quantized(kind), inputs()
    y = quantized(kind)(x)
    if ran:
        model(x)
    tensors = {name: id(p) for name, p in model.named_parameters()}
    products = [x @ dequantized(layer).float().t() for layer in (model.q_proj, model.v_proj)]
    products[0] += model.q_proj.bias
    # bitsandbytes' 8-bit layers round x, and its 4-bit layers pack and round their scales.
    assert float((torch.cat(products, -1) - y).norm()) < 0.01 * float(y.norm())
    # Asking for it changes nothing.
    assert {name: id(p) for name, p in model.named_parameters()} == tensors
    assert torch.equal(model(x), y)


@EVERY_KIND
@pytest.mark.parametrize("weight", [1.0, 0.5, -1.5])
@torch.no_grad()
def test_dora_is_exact_at_every_weight(kind: str, weight: float) -> None:
    model, x = quantized(kind), inputs()
    base = model(x)
    manager = SlotManager(model, max_rank=8, num_slots=2, dora=True)
    manager.load(read_adapter(dora_tensors(), CONFIG), weight=weight)
    ours = model(x)
    assert_close(ours, expected(model, base, 2.0 * weight))
    manager.load(read_adapter(dora_tensors(), CONFIG), "again")
    manager.set_adapters("again", weight)
    assert torch.equal(model(x), ours)
    manager.set_weight("again", 0)
    assert torch.equal(model(x), base)
    manager.unload("again")
    manager.unload("default")
    assert torch.equal(model(x), base)


@EVERY_KIND
@torch.no_grad()
def test_dora_may_be_loaded_before_the_first_forward(kind: str) -> None:
    model, x = quantized(kind), inputs()
    SlotManager(model, max_rank=8, dora=True).load(read_adapter(dora_tensors(), CONFIG))
    ours = model(x)
    exact = expected(model, quantized(kind)(x), 2.0)
    # What bitsandbytes rounds in the first forward was not rounded when the norms were taken.
    assert float((ours - exact).norm()) < 1e-3 * float(exact.norm())


def test_dora_on_hqq_is_pefts(tmp_path: Path) -> None:
    torch.manual_seed(2)
    path = write_dora(
        tmp_path / "dora", Two(), r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]
    )
    oracle = peft_model(quantized("hqq 4-bit"), path)
    model = quantized("hqq 4-bit")
    SlotManager(model, max_rank=8, dora=True).load(path)
    with torch.no_grad():
        assert_close(model(inputs()), oracle(inputs()))


@EVERY_KIND
@torch.no_grad()
def test_a_bias_of_an_adapter_is_added_to_what_the_layer_returns(kind: str) -> None:
    model, x = quantized(kind), inputs()
    base = model(x)
    silent = {name: (A, torch.zeros_like(B)) for name, (A, B) in two_pairs(4, 1).items()}
    tensors = tensors_of(silent, "") | {
        "q_proj.lora_B.bias": torch.ones(Q), "v_proj.lora_B.bias": torch.ones(V),
    }  # fmt: skip
    manager = SlotManager(model, max_rank=8, bias=True)
    manager.load(read_adapter(tensors, {"r": 4, "lora_alpha": 8}))
    assert_close(model(x), base + 2)
    manager.unload("default")
    assert torch.equal(model(x), base)


class Packed(nn.Linear):
    """A layer that keeps how its integers are meant to itself."""

    def __init__(self) -> None:
        super().__init__(INPUTS, 32)
        packed = torch.randint(-9, 9, (32, INPUTS)).to(torch.int8)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) / 7, self.bias)


def _on_meta() -> nn.Module:
    layer = nn.Linear(INPUTS, 32)
    layer.weight = nn.Parameter(layer.weight.to("meta"))
    return layer


@pytest.mark.parametrize(
    ("build", "reason"),
    [(Packed, "this Packed is quantised in an unknown way"), (_on_meta, "is on the meta device")],
)
def test_a_layer_that_does_not_give_its_weight_refuses_dora_by_name(
    build: Any, reason: str
) -> None:
    model = nn.ModuleDict({"layer": build()})
    device_hidden = model["layer"].weight.is_meta
    if device_hidden:
        model["layer"].weight = nn.Parameter(torch.randn(32, INPUTS))
    manager = SlotManager(model, max_rank=8, dora=True)
    if device_hidden:
        # As accelerate leaves it after offloading.
        model["layer"].weight = _on_meta().weight
    both = pairs({"layer": 4}, inputs=INPUTS, outputs=32)
    plain = read_adapter(tensors_of(both, ""), {"r": 4, "lora_alpha": 8})
    manager.load(plain)
    before = Snapshot.of(manager, model)
    tensors = tensors_of(both, "") | {"layer.lora_magnitude_vector": torch.ones(32)}
    message = (
        f"has DoRA at layer, which needs the norms of its weight, but the weight of .*{reason}"
    )
    for call in (manager.check, manager.load):
        with pytest.raises(UnsupportedAdapterError, match=message):
            call(read_adapter(tensors, CONFIG))
        before.assert_unchanged(manager, model)
