"""Adapters of experts are swapped without a recompile; copies and other dtypes have their own."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch._dynamo
from mixtures import ALL, X, by_peft, manager_of, mixture, write
from toys import CountingBackend

from lora_slots import SlotManager


@torch.no_grad()
def test_swaps_in_any_order_are_one_graph(tmp_path):
    torch._dynamo.reset()
    model = mixture()
    names = [ALL[:2], ALL[:1], ALL[2:], []]
    paths = [write(tmp_path / str(n), mixture(), each, r=n + 1) for n, each in enumerate(names)]
    base = model(X)
    manager = manager_of(model, num_slots=2)
    backend = CountingBackend()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert torch.equal(compiled(X), base)
    with manager.no_recompile():
        for index in (0, 1, 2, 3, 0, 2, 1):
            manager.load(paths[index])
            expected = by_peft(paths[index], mixture())
            torch.testing.assert_close(compiled(X), expected, rtol=1e-5, atol=1e-5)
        manager.unload("default")
        assert torch.equal(compiled(X), base)
    assert backend.graphs == 1
    model.experts.is_transposed = 0  # the twin: what the module itself reads is guarded
    compiled(X)
    assert backend.graphs == 2
    torch._dynamo.reset()


@torch.no_grad()
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_bring_their_own_slots_and_several_adapters_add_up(duplicate, tmp_path):
    model = mixture()
    base = model(X)
    manager = manager_of(model, num_slots=2)
    manager.load(write(tmp_path / "a", mixture()), "a")
    manager.load(write(tmp_path / "b", mixture(), ALL[1:], seed=1), "b")
    only = {}
    for name in "ab":
        manager.set_adapters(name)
        only[name] = model.experts.down - mixture().experts.down
    manager.set_adapters(["a", "b"], [1.0, -0.5])
    change = model.experts.down - mixture().experts.down
    torch.testing.assert_close(change, only["a"] - 0.5 * only["b"], rtol=1e-4, atol=1e-5)
    active = model(X)
    other = duplicate(model)
    assert torch.equal(other(X), active)
    SlotManager.of(other).disable_adapters()
    assert torch.equal(other(X), base)
    assert torch.equal(model(X), active)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_nothing_loaded_is_the_base(dtype, tmp_path):
    path = write(tmp_path / "a", mixture())
    full = mixture()
    manager_of(full).load(path)
    model = mixture().to(dtype)
    x = X.to(dtype)
    base = model(x)
    manager = manager_of(model)
    assert torch.equal(model(x), base)
    manager.load(path)
    torch.testing.assert_close(model.experts.up.float(), full.experts.up, rtol=2e-2, atol=2e-2)
    manager.unload("default")
    assert torch.equal(model(x), base)
