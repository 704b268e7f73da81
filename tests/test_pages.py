"""Memory for large adapters comes in large pages, and is like any other."""

from __future__ import annotations

import copy
import mmap
import pickle

import pytest
import torch
from toys import toy, toy_adapter, toy_input

from lora_slots import SlotManager
from lora_slots.staging import pages as pages_module
from lora_slots.staging.pages import fresh

MEGABYTE = 1 << 20
LINUX = hasattr(mmap, "MADV_HUGEPAGE")


class Mapping(mmap.mmap):
    """A mapping that says how it was made."""

    made: list[tuple[int, tuple[int, ...]]]

    def __new__(cls, *args: int, **options: int) -> Mapping:
        self = super().__new__(cls, *args, **options)
        self.flags = options["flags"]
        self.advice: tuple[int, ...] = ()
        cls.made.append(self)
        return self

    def madvise(self, *advice: int) -> None:
        self.advice = advice
        super().madvise(*advice)


class OldKernel(Mapping):
    """A mapping of a kernel that was built without large pages."""

    def madvise(self, *advice: int) -> None:
        raise OSError(22, "Invalid argument")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Mapping]:
    monkeypatch.setattr(Mapping, "made", [], raising=False)
    monkeypatch.setattr(pages_module.mmap, "mmap", Mapping)
    return Mapping.made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_memory_has_the_size_and_the_dtype_asked_for(dtype: torch.dtype) -> None:
    for nbytes in (0, 8, 32 * MEGABYTE, 33 * MEGABYTE + 8):
        memory = fresh(nbytes // dtype.itemsize, dtype)
        assert (memory.dtype, memory.nbytes, memory.is_cpu) == (dtype, nbytes, True)
        assert torch.equal(memory.fill_(3), torch.full_like(memory, 3))


@pytest.mark.skipif(not LINUX, reason="asks Linux for large pages")
def test_large_blocks_ask_for_large_pages_and_small_ones_do_not(made: list[Mapping]) -> None:
    fresh(32 * MEGABYTE - 1, torch.uint8)
    assert made == []
    memory = fresh(32 * MEGABYTE, torch.uint8)
    (mapping,) = made
    assert mapping.advice == (mmap.MADV_HUGEPAGE,)
    assert len(mapping) == memory.nbytes
    # Not seen by a forked process, which must not write to what is put back after an error.
    assert mapping.flags == mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


@pytest.mark.skipif(not LINUX, reason="asks Linux for large pages")
def test_a_kernel_without_large_pages_gives_others(
    made: list[Mapping], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module.mmap, "mmap", OldKernel)
    assert fresh(32 * MEGABYTE, torch.uint8).fill_(7).min() == 7
    assert len(made) == 1


def test_a_system_without_advice_gives_others(
    made: list[Mapping], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module, "_LARGE", None)
    assert fresh(32 * MEGABYTE, torch.uint8).fill_(7).min() == 7
    assert made == []


@pytest.mark.parametrize("options", [{}, {"cache_bytes": 1 << 30}])
@torch.no_grad()
def test_adapters_in_large_pages_are_loaded_copied_and_put_back_like_others(
    monkeypatch: pytest.MonkeyPatch, made: list[Mapping], options: dict[str, int]
) -> None:
    model, expected = toy(), toy()
    plain = SlotManager(expected, max_rank=4)
    monkeypatch.setattr(pages_module, "_WORTH_LARGE", 0)
    manager = SlotManager(model, max_rank=4, **options)
    for seed in (0, 1, 0):
        adapter = toy_adapter(4, seed=seed)
        manager.load(adapter)
        with monkeypatch.context() as patch:
            patch.setattr(pages_module, "_LARGE", None)
            plain.load(adapter)
        for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(toy_input()), expected(toy_input()))
    assert bool(made) == LINUX
