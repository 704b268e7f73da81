"""Loads reach the memory that forwards read, whoever replaced that since the last one."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from toys import toy, toy_adapter, toy_input

from lora_slots import SlotManager

X = toy_input()


def assign_data(model: nn.Module) -> None:
    for buffer in model.buffers():
        buffer.data = buffer.data.clone()


def set_storage(model: nn.Module) -> None:
    for buffer in model.buffers():
        buffer.set_(buffer.clone())


def share_memory(model: nn.Module) -> None:
    model.share_memory()


def to_empty(model: nn.Module) -> None:
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.to_empty(device="cpu")
    model.load_state_dict(weights)


@pytest.mark.parametrize("replace", [assign_data, set_storage, share_memory, to_empty])
@pytest.mark.parametrize("rank_buckets", [None, [8], "auto"])
def test_what_is_loaded_stays_and_later_changes_are_seen(
    replace: Callable[[nn.Module], None], rank_buckets: object
) -> None:
    model = toy()
    manager = SlotManager(model, max_rank=8, num_slots=2, rank_buckets=rank_buckets)
    base = model(X)
    a, b = toy_adapter(4, seed=1), toy_adapter(8, seed=2)
    manager.load(b, "b")
    with_b = model(X)
    manager.unload("b")
    manager.load(a, "a")
    with_a = model(X)

    replace(model)

    assert torch.equal(model(X), with_a)
    manager.load(b, "b")
    torch.testing.assert_close(model(X), with_b)
    manager.set_adapters("a")
    torch.testing.assert_close(model(X), with_a)
    manager.unload("a")
    assert torch.equal(model(X), base)
    manager.detach()
    assert torch.equal(model(X), base)


def test_with_nothing_loaded_empty_slots_stay_empty() -> None:
    model = toy()
    SlotManager(model, max_rank=8, dora=True, bias=True)
    base = model(X)
    # So that fresh memory is not zero by chance.
    rubbish = [torch.full_like(buffer, 7) for buffer in model.buffers()]
    del rubbish
    to_empty(model)
    assert torch.equal(model(X), base)


def test_a_cast_that_fails_leaves_the_rows_that_forwards_see() -> None:
    model = toy()
    manager = SlotManager(model, max_rank=8, num_slots=2, rank_buckets=[0, 8])
    manager.load(toy_adapter(4), "a")
    output = model(X)
    seen = {name: buffer.shape for name, buffer in model.named_buffers()}

    def fail(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    slots = model.model.layers[0].q_proj.lora_slots
    with pytest.raises(RuntimeError, match="out of memory"):
        slots._apply(fail)

    assert {name: buffer.shape for name, buffer in model.named_buffers()} == seen
    assert torch.equal(model(X), output)
