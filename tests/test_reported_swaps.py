"""What other loaders leave behind after a swap, a failed load or a bad value; here, nothing."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch
from faults import Fault
from torch import Tensor, nn
from toys import (
    TOY_MODULES,
    WEIGHTS,
    CountingBackend,
    Snapshot,
    expected_toy,
    pairs,
    places,
    scaling_in,
    slot_buffers,
    tensors_of,
    toy,
    toy_adapter,
    toy_folder,
    toy_input,
)

from lora_slots import AdapterFileError, LoraSlotsError, SlotManager, read_adapter

Q_ONLY = TOY_MODULES[::2]
LAST = f"base_model.model.{TOY_MODULES[-1]}"


@torch.no_grad()
def test_nothing_of_an_adapter_stays_after_one_with_fewer_layers_unloading_or_weight_0() -> None:
    model, base, x = toy(), toy()(toy_input()), toy_input()
    manager = SlotManager(model, max_rank=8)
    manager.load(toy_adapter(8, seed=1))
    manager.load(toy_adapter(4, modules=Q_ONLY, seed=2))
    fewer = pairs(dict.fromkeys(Q_ONLY, 4), seed=2)
    scaling = dict.fromkeys(Q_ONLY, 2.0)
    torch.testing.assert_close(
        model(x), expected_toy(toy(), x, fewer, scaling), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(model(x)[:, 1], base[:, 1])
    manager.set_weight("default", 0)
    assert torch.equal(model(x), base)
    manager.set_weight("default", -1.5)
    assert scaling_in(model.model.layers[0].q_proj, 4) == -3.0
    negative = {name: -1.5 * value for name, value in scaling.items()}
    torch.testing.assert_close(
        model(x), expected_toy(toy(), x, fewer, negative), rtol=1e-5, atol=1e-5
    )
    manager.unload("default")
    assert torch.equal(model(x), base)


@pytest.mark.parametrize(
    ("part", "value"), [("lora_A", float("nan")), ("lora_B", float("inf"))], ids=["NaN", "Inf"]
)
@torch.no_grad()
def test_one_bad_value_is_refused_and_spoils_no_later_adapter(part: str, value: float) -> None:
    model, x = toy(), toy_input()
    manager = SlotManager(model, max_rank=8)
    spoiled = tensors_of(pairs(dict.fromkeys(TOY_MODULES, 4)))
    spoiled[f"{LAST}.{part}.weight"][1, 2] = value
    message = f"{part} of {TOY_MODULES[-1]} in adapter .* has 1 NaN or infinite values"
    with pytest.raises(AdapterFileError, match=message):
        manager.load(read_adapter(spoiled))
    assert all(buffer.count_nonzero() == 0 for buffer in slot_buffers(model).values())
    manager.load(toy_adapter(4, seed=3))
    good = pairs(dict.fromkeys(TOY_MODULES, 4), seed=3)
    expected = expected_toy(toy(), x, good, dict.fromkeys(TOY_MODULES, 2.0))
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    manager.set_weight("default", 0)
    assert torch.equal(model(x), toy()(x))


def loaded() -> tuple[nn.Module, SlotManager]:
    model = toy()
    manager = SlotManager(model, max_rank=8, num_slots=2)
    manager.load(toy_adapter(6, seed=1), "live", weight=0.5)
    return model, manager


def test_a_last_layer_of_the_wrong_shape_changes_nothing_and_the_next_try_works() -> None:
    model, manager = loaded()
    before = Snapshot.of(manager, model)
    tensors = tensors_of(pairs(dict.fromkeys(TOY_MODULES, 4), seed=2))
    bad = tensors | {f"{LAST}.lora_B.weight": torch.ones(3, 2)}
    for name in ("live", "new"):
        with pytest.raises(LoraSlotsError, match=r"\(3, 2\)"):
            manager.load(read_adapter(bad), name, weight=2.0)
        before.assert_unchanged(manager, model)
    assert manager.load(read_adapter(tensors), "new").modules == TOY_MODULES


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_a_load_that_runs_out_of_memory_anywhere_changes_nothing(error: type[Exception]) -> None:
    model, manager = loaded()
    with Fault() as count:
        manager.load(toy_adapter(8, seed=4), "live")
    assert count.operations >= 2
    for operation in range(count.operations):
        model, manager = loaded()
        before = Snapshot.of(manager, model)
        with pytest.raises(error, match="gone"), Fault(operation, error("gone")):
            manager.load(toy_adapter(8, seed=4), "live")
        before.assert_unchanged(manager, model)
    assert manager.load(toy_adapter(8, seed=4), "live").rank == 8


def test_a_disk_that_fails_while_a_file_is_read_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise OSError(5, "Input/output error")

    folder = toy_folder(tmp_path / "next", 8, seed=4)
    model, manager = loaded()
    before = Snapshot.of(manager, model)
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", fail)
        with pytest.raises(AdapterFileError, match=rf"{WEIGHTS} .*Input/output error"):
            manager.load(folder, "live")
    before.assert_unchanged(manager, model)
    assert manager.load(folder, "live").rank == 8


def held() -> int:
    """The bytes behind all tensors that are alive."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
    strided = [t for t in tensors if t.layout is torch.strided]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in strided}.values()
    )


def test_a_hundred_swaps_in_compiled_code_hold_what_two_do_and_compile_nothing(
    tmp_path: Path,
) -> None:
    model, x = toy(), toy_input()
    manager = SlotManager(model, max_rank=8)
    where, backend = places(model), CountingBackend()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    folders = [toy_folder(tmp_path / str(rank), rank, seed=rank) for rank in (1, 8)]
    bytes_held = []
    for swap in range(1, 101):
        manager.load(folders[swap % 2])
        with torch.no_grad():
            compiled(x)
        if swap in (2, 100):
            bytes_held.append(held())
    assert bytes_held[0] == bytes_held[1]
    assert places(model) == where
    assert backend.graphs == 1
