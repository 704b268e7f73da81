"""A package compiled ahead of time follows loads and weights, once buffers are bound to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from toys import toy, toy_adapter, toy_input

from lora_slots import SlotManager


@pytest.fixture(scope="module")
def attached() -> tuple[nn.Module, SlotManager]:
    model = toy(layers=1)
    return model, SlotManager(model, max_rank=16, num_slots=2)


# torch 2.13 warns of its own use of what it has deprecated.
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
@torch.no_grad()
def test_a_package_sees_every_load_and_every_weight(
    attached: tuple[nn.Module, SlotManager], tmp_path: Path
) -> None:
    model, manager = attached
    exported = torch.export.export(model, (toy_input(),))
    path = torch._inductor.aoti_compile_and_package(
        exported,
        package_path=str(tmp_path / "model.pt2"),
        inductor_configs={"always_keep_tensor_constants": True},
    )
    package = torch._inductor.aoti_load_package(path)
    names = set(package.get_constant_fqns())
    bound = {name: b for name, b in model.named_buffers() if name in names}
    assert {name.rpartition(".")[2] for name in bound} == {"lora_A", "lora_B", "scaling", "rows"}
    package.load_constants(bound, check_full_update=False, user_managed=True)

    outputs = []
    changes = (
        lambda: None,
        lambda: manager.load(toy_adapter(4, seed=1, modules=MODULES), "a"),
        lambda: manager.set_weight("a", -0.5),
        lambda: manager.load(toy_adapter(16, seed=2, modules=MODULES), "b"),
        lambda: manager.set_adapters(["a", "b"], [0.5, 2.0]),
        lambda: manager.unload("b"),
        lambda: manager.disable_adapters(),
    )
    for change in changes:
        change()
        outputs.append(package(toy_input()))
        torch.testing.assert_close(outputs[-1], model(toy_input()))
    assert torch.equal(outputs[0], outputs[-1])
    assert all(not torch.equal(outputs[0], output) for output in outputs[1:-1])


MODULES = ["model.layers.0.q_proj", "model.layers.0.v_proj"]
