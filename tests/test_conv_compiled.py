"""A compiled network of convolutions: the base's output to the bit, and one compile for all."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from conv_nets import NET_INPUTS, NET_TARGETS, net, net_adapter, random
from torch import nn
from toys import INDUCTOR_WARNING, CountingBackend, places

from lora_slots import SlotManager, read_adapter


def every_change(manager: SlotManager) -> Iterator[str]:
    for seed, (rank, alpha) in enumerate([(1, 2), (4, 8), (2, -4)]):
        manager.load(net_adapter(rank, alpha=alpha, seed=seed))
        yield f"rank {rank} and alpha {alpha}"
    manager.load(net_adapter(3, seed=9), "other", activate=False)
    yield "a second adapter, inactive"
    for weights in ([1.0, 1.0], [0.25, -2.0], [0.0, 1.0]):
        manager.set_adapters(["default", "other"], weights)
        yield f"a mix of {weights}"
    for name in ("default", "other"):
        manager.unload(name)
        yield f"{name} unloaded"


@pytest.mark.compile
@pytest.mark.parametrize("options", [{}, {"dora": True, "bias": True}], ids=["plain", "dora, bias"])
@torch.no_grad()
def test_one_compile_serves_any_adapter_on_convolutions(options: dict[str, bool]):
    model = net()
    base = model(*NET_INPUTS)
    manager = SlotManager(model, max_rank=4, num_slots=2, target_modules=NET_TARGETS, **options)
    backend = CountingBackend()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert torch.equal(compiled(*NET_INPUTS), base)
    before, seen = places(model), [base]
    with manager.no_recompile():
        for change in every_change(manager):
            y = compiled(*NET_INPUTS)
            torch.testing.assert_close(y, model(*NET_INPUTS), msg=change)
            seen.append(y)
    assert backend.graphs == 1
    assert places(model) == before
    assert torch.equal(seen[-1], base)
    assert not any(torch.allclose(y, base, atol=1e-3) for y in seen[1:-1])


@pytest.mark.compile
@torch.no_grad()
def test_slots_of_another_size_do_compile_again():
    # The twin: what the counter above did not see, it can see.
    backend = CountingBackend()
    model = net()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for rank in (2, 3):
        manager = SlotManager(model, max_rank=rank, target_modules=NET_TARGETS)
        compiled(*NET_INPUTS)
        manager.detach()
    assert backend.graphs == 2


@pytest.mark.compile
@pytest.mark.filterwarnings(INDUCTOR_WARNING)
@torch.no_grad()
def test_without_an_active_adapter_inductor_gives_the_compiled_base():
    torch.manual_seed(0)
    base = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 8, 3, groups=2))
    model, x = copy.deepcopy(base), random(2, 4, 8, 8)
    expected = torch.compile(base, fullgraph=True)(x)
    manager = SlotManager(model, max_rank=4, target_modules=["0", "2"])
    compiled = torch.compile(model, fullgraph=True)
    assert torch.equal(compiled(x), expected)
    tensors = {
        "0.lora_A.weight": random(4, 4, 3, 3),
        "0.lora_B.weight": random(8, 4, 1, 1),
        "2.lora_A.weight": random(4, 8, 3, 3),
        "2.lora_B.weight": random(8, 2, 1, 1),
    }
    with manager.no_recompile():
        manager.load(read_adapter(tensors))
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(compiled(x), expected, atol=1e-2)
        manager.set_weight("default", 0.0)
        assert torch.equal(compiled(x), expected)
        manager.unload("default")
        assert torch.equal(compiled(x), expected)
