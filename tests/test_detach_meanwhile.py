"""A load, a check or a prefetch that meets a detach in another thread says that, and no more."""

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from threads import wait_until_gone
from toys import toy, toy_adapter, toy_folder

from lora_slots import AttachError, SlotManager
from lora_slots.loading import Loader


@pytest.fixture
def during_reading(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Call something once, between a file's being read and its being staged."""

    def install(function: Callable[[], object]) -> None:
        stage = Loader._stage
        once = [function]

        def staged(self: Loader, *args: object) -> object:
            for each in (once.pop() for _ in once[:]):
                each()
            return stage(self, *args)

        monkeypatch.setattr(Loader, "_stage", staged)

    return install


Hook = Callable[[Callable[[], object]], None]


@pytest.mark.parametrize("call", ["load", "check"])
def test_a_load_or_check_says_detached(tmp_path: Path, during_reading: Hook, call: str) -> None:
    manager = SlotManager(toy(), max_rank=8)
    folder = toy_folder(tmp_path)
    during_reading(manager.detach)
    with pytest.raises(AttachError, match="was detached"):
        getattr(manager, call)(folder)


def test_a_prefetch_says_detached_and_keeps_no_model(tmp_path: Path, during_reading: Hook) -> None:
    model = toy()
    manager = SlotManager(model, max_rank=8, cache_bytes=1 << 20)
    manager.add("a", toy_folder(tmp_path))
    during_reading(manager.detach)
    handle = manager.prefetch(["a"])
    assert handle.wait(30)
    assert isinstance(handle.errors["a"], AttachError)
    alive = weakref.ref(model), weakref.ref(manager)
    del model, manager
    wait_until_gone(*alive)


def test_an_entry_that_is_replaced_while_it_is_read_is_loaded_as_it_was(
    tmp_path: Path, during_reading: Hook
) -> None:
    manager = SlotManager(toy(), max_rank=8, routing=True)
    manager.add("a", toy_folder(tmp_path / "old", 4), weight=0.5)
    new = toy_adapter(8)
    during_reading(lambda: manager.add("a", new, weight=2.0))
    manager.route(["a"])
    (slot,) = manager.status().slots
    assert (slot.rank, slot.weight) == (4, 0.5)
    manager.route(None)
    manager.unload("a")
    manager.route(["a"])
    (slot,) = manager.status().slots
    assert (slot.rank, slot.weight) == (8, 2.0)
