"""A cached adapter is written without reading its file; a changed file is always read again."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import pytest
import torch
from toys import (
    TOY_MODULES,
    Snapshot,
    pairs,
    slot_buffers,
    tensors_of,
    toy,
    toy_adapter,
    toy_folder,
    toy_input,
    write_adapter,
    write_folder,
)

from lora_slots import AdapterFileError, SlotManager
from lora_slots import loading as loading_module

MEGABYTE = 1 << 20


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every source that is read from now on."""
    seen: list[object] = []
    original = loading_module.read_file

    def spy(source: object) -> object:
        seen.append(source)
        return original(source)

    monkeypatch.setattr(loading_module, "read_file", spy)
    return seen


def manager_of(model: torch.nn.Module, cache_bytes: int = MEGABYTE, **options: object):
    return SlotManager(model, max_rank=8, cache_bytes=cache_bytes, **options)


def test_a_cached_load_reads_nothing_and_writes_the_same_bits(tmp_path: Path, reads: list) -> None:
    one, other = toy_folder(tmp_path / "a", 4), toy_folder(tmp_path / "b", 6, seed=1)
    model = toy()
    manager = manager_of(model)
    first = manager.load(one)
    held = {name: buffer.clone() for name, buffer in slot_buffers(model).items()}
    manager.load(other)
    again = manager.load(one)
    assert reads == [one, other]
    assert all(torch.equal(held[name], b) for name, b in slot_buffers(model).items())
    assert (first.cached, again.cached) == (False, True)
    for field in ("source", "rank", "modules", "scaling", "nbytes", "skipped", "slot"):
        assert getattr(first, field) == getattr(again, field)


def test_without_cache_bytes_every_load_reads(tmp_path: Path, reads: list) -> None:
    path = toy_folder(tmp_path / "a")
    manager = manager_of(toy(), 0)
    assert not manager.load(path).cached
    assert not manager.load(path).cached
    assert len(reads) == 2


def rewritten(path: Path) -> None:
    toy_folder(path, 4, seed=5)


def replaced_with_the_same_times(path: Path) -> None:
    file = path / "adapter_model.safetensors"
    stat = file.stat()
    toy_folder(path.parent / "new", 4, seed=5)
    (path.parent / "new" / file.name).replace(file)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def given_another_config(path: Path) -> None:
    config = path / "adapter_config.json"
    text = config.read_text()
    config.write_text(text.replace('"lora_alpha": 8', '"lora_alpha": 16'))
    assert config.read_text() != text


@pytest.mark.parametrize("change", [rewritten, replaced_with_the_same_times, given_another_config])
def test_changed_bytes_are_read_again(change, tmp_path: Path, reads: list) -> None:
    path = toy_folder(tmp_path / "a", 4)
    model = toy()
    manager = manager_of(model)
    manager.load(path)
    before = model(toy_input())
    change(path)
    assert not manager.load(path).cached
    assert len(reads) == 2
    fresh = toy()
    SlotManager(fresh, max_rank=8).load(path)
    assert torch.equal(model(toy_input()), fresh(toy_input()))
    assert not torch.equal(model(toy_input()), before)


def test_a_file_that_went_away_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    path = toy_folder(tmp_path / "a", 4)
    model = toy()
    manager = manager_of(model)
    manager.load(path)
    before = Snapshot.of(manager, model)
    path.rename(tmp_path / "b")
    with pytest.raises(AdapterFileError, match="does not exist"):
        manager.load(path)
    before.assert_unchanged(manager, model)


def test_what_was_used_longest_ago_goes_first(tmp_path: Path, reads: list) -> None:
    paths = [toy_folder(tmp_path / str(seed), 4, seed=seed) for seed in range(3)]
    model = toy()
    size = manager_of(toy()).load(paths[0]).nbytes
    manager = manager_of(model, 2 * size)
    reads.clear()
    for path in (paths[0], paths[1], paths[0], paths[2]):  # the last one pushes out paths[1]
        manager.load(path)
    assert manager.load(paths[0]).cached
    assert not manager.load(paths[1]).cached
    assert manager._loader.cache.nbytes <= 2 * size


def test_an_adapter_larger_than_the_cache_is_not_kept(tmp_path: Path) -> None:
    path = toy_folder(tmp_path / "a", 4)
    manager = manager_of(toy(), 100)
    manager.load(path)
    assert not manager.load(path).cached
    assert manager._loader.cache.nbytes == 0


def test_options_of_a_load_are_part_of_what_it_is_known_by(tmp_path: Path) -> None:
    extra = {"base_model.model.head.weight": torch.ones(2, 2)}
    tensors = tensors_of(pairs(dict.fromkeys(TOY_MODULES, 4)))
    path = write_folder(tmp_path / "a", tensors | extra, {"r": 4, "lora_alpha": 8})
    manager = manager_of(toy())
    lenient = manager.load(path, strict=False)
    assert lenient.skipped
    with pytest.raises(ValueError, match="head"):
        manager.load(path)
    assert manager.load(path, strict=False).skipped == lenient.skipped
    assert manager.load(path, strict=False, compress_to=2).rank == 2
    assert manager.load(path, strict=False).rank == 4


def test_a_cast_model_gets_no_rows_of_its_old_dtype(tmp_path: Path) -> None:
    path = toy_folder(tmp_path / "a", 4)
    model = toy()
    manager = manager_of(model)
    manager.load(path)
    model.to(torch.bfloat16)
    assert not manager.load(path).cached
    fresh = toy().to(torch.bfloat16)
    SlotManager(fresh, max_rank=8).load(path)
    x = toy_input().to(torch.bfloat16)
    assert torch.equal(model(x), fresh(x))


def test_what_was_computed_from_a_base_weight_goes_when_that_changes(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "dora", toy(), r=4, use_dora=True, target_modules=["q_proj"])
    model = toy()
    manager = manager_of(model, dora=True)
    manager.load(path)
    assert manager.load(path).cached
    other = toy(seed=3)
    model.load_state_dict(other.state_dict())
    assert not manager.load(path).cached
    SlotManager(other, max_rank=8, dora=True).load(path)
    torch.testing.assert_close(model(toy_input()), other(toy_input()))


def test_a_new_weight_is_not_taken_for_an_old_one_that_was_where_it_is(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "dora", toy(), r=4, use_dora=True, target_modules=["q_proj"])
    model = toy()
    manager = manager_of(model, dora=True)
    manager.load(path)
    for _ in range(20):  # memory that was given back is soon given out again
        for _ in range(2):
            model.model.layers[0].q_proj.weight = torch.nn.Parameter(torch.ones(6, 8))
        assert not manager.load(path).cached


def test_a_tensor_that_was_like_the_models_own_is_compared_again(tmp_path: Path) -> None:
    path = write_adapter(
        tmp_path / "a", toy(bias=True), r=4, bias="all", target_modules=["q_proj", "v_proj"]
    )
    model = toy(bias=True)
    manager = manager_of(model, bias=True)
    assert len(manager.load(path).skipped) == 4
    assert manager.load(path).cached
    before = model(toy_input())
    with torch.no_grad():
        model.model.layers[0].q_proj.bias.add_(1)
    assert len(manager.load(path).skipped) == 3
    torch.testing.assert_close(model(toy_input()), before)


def test_copies_start_with_an_empty_cache(tmp_path: Path) -> None:
    path = toy_folder(tmp_path / "a", 4)
    model = toy()
    manager = manager_of(model)
    manager.load(path)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        own = SlotManager.of(copied)
        assert not own.load(path).cached
        assert own.load(path).cached
    assert manager.load(path).cached


def test_tensors_in_memory_are_never_cached() -> None:
    manager = manager_of(toy())
    raw = toy_adapter(4)
    manager.load(raw)
    assert not manager.load(raw).cached
    assert len(manager._loader.cache) == 0


def test_cached_memory_is_not_overwritten_by_the_next_load(tmp_path: Path) -> None:
    one, other = toy_folder(tmp_path / "a", 4), toy_folder(tmp_path / "b", 4, seed=1)
    model = toy()
    manager = manager_of(model)
    manager.load(one)
    output = model(toy_input())
    manager.load(other)
    manager.load(toy_folder(tmp_path / "c", 4, seed=2))
    assert manager.load(one).cached
    assert torch.equal(model(toy_input()), output)


@pytest.mark.parametrize("value", [-1, 1.5, True, None])
def test_cache_bytes_is_a_whole_number(value) -> None:
    with pytest.raises(ValueError, match="cache_bytes must be a whole number from 0"):
        manager_of(toy(), value)
