"""Adapters of the catalogue are loaded when they are named; all that a call names, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from served import N, P, X, adapter, served
from threads import LIMIT, Task, together
from toys import Snapshot, toy, toy_adapter, toy_folder, toy_input

from lora_slots import (
    AdapterFileError,
    ArgumentError,
    AttachError,
    CatalogueEntry,
    HoldError,
    LoraSlotsError,
    NoFreeSlotError,
    SlotManager,
    UnknownAdapterError,
)
from lora_slots import loading as loading_module


def folders(tmp_path: Path, count: int, rank: int = 4) -> dict[str, Path]:
    return {f"n{i}": toy_folder(tmp_path / f"n{i}", rank, seed=i) for i in range(count)}


def with_catalogue(
    paths: dict[str, Path], **options: object
) -> tuple[torch.nn.Module, SlotManager]:
    model = toy()
    manager = SlotManager(model, **{"max_rank": 8, "num_slots": 3, **options})
    for name, path in paths.items():
        manager.add(name, path)
    return model, manager


def loaded_by_hand(
    paths: dict[str, Path], names: list[str], weights: list[float] | None = None
) -> torch.Tensor:
    model = toy()
    manager = SlotManager(model, max_rank=8, num_slots=3)
    for name in names:
        manager.load(paths[name], name, activate=False)
    manager.set_adapters(names, weights)
    return model(toy_input())


def test_set_adapters_loads_what_is_in_the_catalogue_and_in_no_slot(tmp_path):
    paths = folders(tmp_path, 3)
    model, manager = with_catalogue(paths)
    assert torch.equal(model(toy_input()), toy()(toy_input()))
    manager.set_adapters("n1")
    assert (manager.loaded_adapters, manager.active_adapters) == (("n1",), ("n1",))
    assert torch.equal(model(toy_input()), loaded_by_hand(paths, ["n1"]))
    manager.set_adapters(["n0", "n1", "n2"], [0.5, -1.0, 2.0])
    assert manager.loaded_adapters == ("n1", "n0", "n2")
    expected = loaded_by_hand(paths, ["n1", "n0", "n2"], [-1.0, 0.5, 2.0])
    assert torch.equal(model(toy_input()), expected)


def test_route_and_routed_load_what_rows_name(tmp_path):
    paths = folders(tmp_path, 3)
    model, manager = with_catalogue(paths, routing=True)
    x = toy_input(3)
    manager.route(["n0", None, {"n1": 0.5}])
    assert (manager.loaded_adapters, manager.active_adapters) == (("n0", "n1"), ())
    y = model(x)
    base = toy()(x)
    assert torch.equal(y[:, :, 1], base[:, :, 1])
    torch.testing.assert_close(y[:, :, 0], loaded_by_hand(paths, ["n0"])[:, :, 0])
    torch.testing.assert_close(y[:, :, 2], loaded_by_hand(paths, ["n1"], [0.5])[:, :, 2])
    with manager.routed(["n2"] * 3):
        torch.testing.assert_close(model(x), loaded_by_hand(paths, ["n2"]))
    assert manager.loaded_adapters == ("n0", "n1", "n2")
    assert torch.equal(model(x), y)


def test_the_weight_of_the_catalogue_is_what_it_is_loaded_with(tmp_path):
    paths = folders(tmp_path, 1)
    model, manager = with_catalogue({}, routing=True)
    manager.add("n0", paths["n0"], weight=-2.0)
    manager.route(["n0"] * 3)
    torch.testing.assert_close(model(toy_input()), loaded_by_hand(paths, ["n0"], [-2.0]))
    manager.route(None)
    manager.set_adapters("n0")
    assert torch.equal(model(toy_input()), loaded_by_hand(paths, ["n0"]))


def test_the_other_arguments_are_those_of_the_load(tmp_path):
    path = toy_folder(tmp_path / "a", 6)
    model = toy()
    manager = SlotManager(model, max_rank=4, num_slots=2)
    manager.add("exact", path)
    manager.add("smaller", path, compress_to="max_rank")
    with pytest.raises(LoraSlotsError, match="rank 6"):
        manager.set_adapters("exact")
    manager.set_adapters("smaller")
    assert manager.status().slots[0].rank == 4


def test_adding_thousands_reads_nothing(monkeypatch):
    monkeypatch.setattr(loading_module, "read_file", None)
    manager = SlotManager(toy(), max_rank=8)
    for number in range(5000):
        manager.add(f"n{number}", f"no/such/folder/{number}")
    assert len(manager.catalogue) == manager.status().catalogue == 5000
    assert manager.catalogue["n7"] == CatalogueEntry("no/such/folder/7")
    assert manager.loaded_adapters == ()


def test_the_catalogue_is_a_view_that_cannot_be_written():
    manager = SlotManager(toy(), max_rank=8)
    view = manager.catalogue
    manager.add("a", "some/where", strict=False)
    assert dict(view) == {"a": CatalogueEntry("some/where", strict=False)}
    with pytest.raises(TypeError):
        view["b"] = CatalogueEntry("else/where")
    manager.remove("a")
    assert dict(view) == {}


def test_a_loaded_name_is_used_as_it_is_whatever_the_catalogue_says(tmp_path):
    paths = folders(tmp_path, 2)
    model, manager = with_catalogue({})
    manager.load(paths["n0"], "a", activate=False)
    manager.add("a", paths["n1"])
    manager.set_adapters("a")
    assert torch.equal(model(toy_input()), loaded_by_hand(paths, ["n0"]))
    manager.unload("a")
    manager.set_adapters("a")
    assert torch.equal(model(toy_input()), loaded_by_hand(paths, ["n1"]))


def test_removing_a_loaded_name_leaves_it_loaded(tmp_path):
    model, manager = with_catalogue(folders(tmp_path, 1))
    manager.set_adapters("n0")
    before = model(toy_input())
    manager.remove("n0")
    assert torch.equal(model(toy_input()), before)
    manager.unload("n0")
    with pytest.raises(UnknownAdapterError, match="no adapter 'n0' is loaded"):
        manager.set_adapters("n0")


CALLS: dict[str, Callable[[SlotManager, list[str]], object]] = {
    "set_adapters": lambda m, names: m.set_adapters(names),
    "route": lambda m, names: m.route(names),
    "routed": lambda m, names: ExitStack().enter_context(m.routed(names)),
}


@pytest.fixture
def crowded(tmp_path):
    """Three good names, a broken and a missing file in the catalogue; one of three slots taken."""
    paths = folders(tmp_path, 3)
    broken = tmp_path / "broken"
    toy_folder(broken)
    (broken / "adapter_model.safetensors").write_bytes(b"no tensors")
    paths |= {"broken": broken, "gone": tmp_path / "gone"}
    model, manager = with_catalogue(paths, routing=True)
    manager.load(toy_adapter(8, seed=9), "mine")
    return model, manager


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (["n0", "broken"], AdapterFileError, "broken"),
        (["gone", "n0"], AdapterFileError, "gone"),
        (["n0", "who"], UnknownAdapterError, "catalogue of 5 adapters has no such name either"),
        (["n0", "n1", "mine", "n2"], NoFreeSlotError, "3 free slots, but 1 of 3 are taken"),
    ],
)
def test_if_one_of_several_cannot_be_loaded_nothing_changes(crowded, call, names, error, message):
    model, manager = crowded
    before = Snapshot.of(manager, model)
    with pytest.raises(error, match=message):
        CALLS[call](manager, names)
    before.assert_unchanged(manager, model)
    CALLS[call](manager, ["n0", "n1", "mine"])
    assert manager.loaded_adapters == ("mine", "n0", "n1")


def test_what_is_refused_anyway_reads_no_file(tmp_path, monkeypatch):
    _, manager = with_catalogue(folders(tmp_path, 4))
    monkeypatch.setattr(loading_module, "read_file", None)
    with pytest.raises(ArgumentError, match="finite"):
        manager.set_adapters("n0", float("nan"))
    with pytest.raises(ArgumentError, match="repeat"):
        manager.set_adapters(["n0", "n0"])
    with pytest.raises(NoFreeSlotError, match="4 free slots"):
        manager.set_adapters(["n0", "n1", "n2", "n3"])
    with manager.hold(), pytest.raises(HoldError):
        manager.set_adapters("n0")


@pytest.mark.parametrize("call", CALLS)
def test_a_thread_that_holds_can_load_nothing(crowded, call):
    model, manager = crowded
    before = Snapshot.of(manager, model)
    with manager.hold():
        with pytest.raises(HoldError, match="must not change inside hold"):
            CALLS[call](manager, ["n0"])
        before.assert_unchanged(manager, model)


def test_what_a_fault_in_the_write_interrupts_is_put_back(crowded, monkeypatch):
    model, manager = crowded
    before = Snapshot.of(manager, model)
    monkeypatch.setattr(manager._bank, "_steer", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        manager.set_adapters(["n0", "n1"])
    monkeypatch.undo()
    before.assert_unchanged(manager, model)
    manager.set_adapters(["n0", "n1"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", "path"), "adapter_name must be a non-empty string"),
        ((3, "path"), "adapter_name must be a non-empty string"),
        (("a", ""), "must be a path, a hub id or what read_adapter returned"),
        (("a", None), "must be a path"),
        (("a", b"path"), "must be a path"),
    ],
)
def test_arguments_without_a_meaning_are_refused(arguments, message):
    manager = SlotManager(toy(), max_rank=8)
    with pytest.raises(ArgumentError, match=message):
        manager.add(*arguments)
    for options in ({"weight": float("inf")}, {"weight": "1"}, {"compress_to": 9}):
        with pytest.raises(ArgumentError):
            manager.add("a", "path", **options)
    with pytest.raises(UnknownAdapterError, match="catalogue of 0 adapters has no 'a'"):
        manager.remove("a")
    assert len(manager.catalogue) == 0


def test_a_detached_manager_has_no_catalogue_any_more(tmp_path):
    _, manager = with_catalogue(folders(tmp_path, 1), cache_bytes=1 << 20)
    manager.detach()
    for call in (
        lambda: manager.add("a", "path"),
        lambda: manager.remove("n0"),
        lambda: manager.prefetch("n0"),
        lambda: manager.set_adapters("n0"),
    ):
        with pytest.raises(AttachError, match="was detached"):
            call()


def test_what_a_call_takes_out_of_use_may_be_evicted_for_what_it_names(tmp_path):
    paths = folders(tmp_path, 5)
    model, manager = with_catalogue(paths, num_slots=2, on_full="evict")
    for name in [*paths, *reversed(paths)]:
        manager.set_adapters(name)
        assert torch.equal(model(toy_input()), loaded_by_hand(paths, [name]))
    manager.set_adapters(["n0", "n1"])
    manager.set_adapters(["n2", "n3"])
    assert set(manager.loaded_adapters) == {"n2", "n3"}
    manager.set_adapters(["n3", "n4"])  # what it names is not evicted for what else it names
    assert set(manager.loaded_adapters) == {"n3", "n4"}
    torch.testing.assert_close(model(toy_input()), loaded_by_hand(paths, ["n3", "n4"]))


def test_routes_evict_what_is_routed_no_more_but_nothing_pinned(tmp_path):
    paths = folders(tmp_path, 4)
    model, manager = with_catalogue(paths, num_slots=2, on_full="evict", routing=True)
    manager.load(paths["n0"], "n0", pin=True, activate=False)
    for name in ("n1", "n2", "n3"):
        manager.route([name] * 3)
        torch.testing.assert_close(model(toy_input()), loaded_by_hand(paths, [name]))
        assert set(manager.loaded_adapters) == {"n0", name}
    before = Snapshot.of(manager, model)
    with pytest.raises(NoFreeSlotError), manager.routed(["n1", "n2", "n3"]):
        pass
    before.assert_unchanged(manager, model)


def test_an_adapter_of_the_catalogue_may_be_in_memory():
    model, manager = served(2)
    manager.add("plus", P)
    manager.add("minus", N)
    manager.set_adapters("plus")
    assert model(X).item() == 2
    manager.set_adapters("minus")
    assert model(X).item() == -2


@pytest.mark.parametrize("num_slots", [1, 2])
def test_threads_that_need_more_than_there_are_slots_get_theirs_each_whole(num_slots):
    model, manager = served(num_slots, on_full="evict")
    values = {str(value): float(value) for value in (1, 3, 5, 7, 9)}
    for name, value in values.items():
        manager.add(name, adapter(value))

    def switch(names: list[str]) -> None:
        for name in names * 20:
            manager.set_adapters(name)

    def read() -> None:
        for _ in range(200):
            with manager.hold():
                seen.add(model(X).item())

    seen: set[float] = set()
    manager.set_adapters("1")
    together(lambda: switch(["1", "3", "5"]), lambda: switch(["7", "9", "3"]), read)
    assert seen <= {2 * value for value in values.values()}
    (active,) = manager.active_adapters
    assert model(X).item() == 2 * values[active]


def test_what_another_thread_unloads_meanwhile_is_loaded_again(monkeypatch):
    model, manager = served(2)
    manager.add("plus", P)
    manager.add("other", adapter(4.0))
    manager.set_adapters("plus")
    prepare = manager._loader.prepare

    def unloading(*args: object, **kwargs: object) -> object:
        if "plus" in manager.loaded_adapters:
            Task(lambda: manager.unload("plus")).result(LIMIT)
        return prepare(*args, **kwargs)

    monkeypatch.setattr(manager._loader, "prepare", unloading)
    manager.set_adapters(["plus", "other"])
    assert set(manager.active_adapters) == {"plus", "other"}
    assert model(X).item() == 10


def test_a_refusal_names_a_few_of_a_thousand():
    manager = SlotManager(toy(), max_rank=8, num_slots=3)
    source = toy_adapter()
    for number in range(1000):
        manager.add(f"n{number}", source)
    with pytest.raises(NoFreeSlotError, match="'n7' and 992 more need 1000 free slots") as raised:
        manager.set_adapters(list(manager.catalogue))
    assert len(str(raised.value)) < 300
