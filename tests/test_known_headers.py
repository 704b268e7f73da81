"""A file whose header is known is not resolved again, and loads as if it were the first."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from adapter_files import write_file
from conv_nets import one, random
from dora_files import dora_tensors
from format_files import kohya
from safetensors.torch import save_file
from threads import Task
from torch import Tensor, nn
from toys import (
    TOY_MODULES,
    WEIGHTS,
    Snapshot,
    pairs,
    slot_buffers,
    tensors_of,
    toy,
    toy_folder,
    write_folder,
)

from lora_slots import AdapterFileError, LoadReport, SlotManager, TargetMismatchError, loading
from lora_slots.loading import Loader
from lora_slots.reading import read_adapter, read_file
from lora_slots.resolve.resolving import resolve
from lora_slots.staging.staged import StagedAdapter, nothing_to_spare

SETTINGS = {"r": 4, "lora_alpha": 8}
LAST = f"base_model.model.{TOY_MODULES[-1]}"


def tensors(seed: int = 0, rank: int = 4) -> dict[str, Tensor]:
    return tensors_of(pairs(dict.fromkeys(TOY_MODULES, rank), seed=seed))


@contextmanager
def resolving(times: int) -> Iterator[None]:
    """A context in which adapters are resolved so often."""
    with patch.object(loading, "resolve", wraps=resolve) as counted:
        yield
    assert counted.call_count == times


def load(manager: SlotManager, source: Any, **options: Any) -> LoadReport:
    """The report of a load, less what is never the same."""
    return replace(manager.load(source, **options), seconds=0.0)


def assert_as_first(
    manager: SlotManager,
    model: nn.Module,
    source: Any,
    make: Callable[[], nn.Module] = toy,
    build: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> None:
    """Load ``source``: buffers and report are those of a manager that never saw another file."""
    fresh = make()
    expected = load(SlotManager(fresh, max_rank=8, **build), source, **options)
    assert load(manager, source, **options) == expected
    for (name, buffer), own in zip(
        slot_buffers(fresh).items(), slot_buffers(model).values(), strict=True
    ):
        assert buffer.dtype == own.dtype
        assert torch.equal(buffer, own), name


def conv() -> nn.Module:
    return one(nn.Conv2d, 3, 5, 3, padding=1)


def conv_folder(path: Path, seed: int) -> Path:
    A, B = random(4, 3, 3, 3, seed=seed), random(5, 4, 1, 1, seed=seed + 9)
    prefix = "base_model.model.layer.lora_"
    return write_folder(path, {f"{prefix}A.weight": A, f"{prefix}B.weight": B}, SETTINGS)


FILES: dict[str, Callable[[Path, int], Path]] = {
    "PEFT": lambda path, seed: toy_folder(path, seed=seed),
    "rank 8": lambda path, seed: toy_folder(path, 8, seed=seed),
    "float64": lambda path, seed: write_folder(
        path, {key: value.double() for key, value in tensors(seed).items()}, SETTINGS
    ),
    "unaligned": lambda path, seed: write_folder(
        path, {**tensors(seed), f"{LAST}.lora_B.weight": random(6, 4, seed=seed).half()}, SETTINGS
    ),
    "kohya without alphas": lambda path, seed: write_file(
        path / "kohya.safetensors", kohya(pairs(dict.fromkeys(TOY_MODULES, 4), seed=seed))
    ),
    "config in the header": lambda path, seed: write_file(
        path / "one.safetensors", tensors(seed), {"lora_adapter_metadata": json.dumps(SETTINGS)}
    ),
}


@pytest.mark.parametrize("write", FILES.values(), ids=FILES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_second_file_with_a_header_is_not_resolved(
    write: Callable[[Path, int], Path], dtype: torch.dtype | None, tmp_path: Path
) -> None:
    model, build = toy(), {"dtype": dtype}
    manager = SlotManager(model, max_rank=8, **build)
    paths = [write(tmp_path / str(seed), seed) for seed in range(3)]
    with resolving(1):
        for path in paths:
            load(manager, path)
    assert_as_first(manager, model, paths[1], build=build)


def test_kernels_go_the_same_way(tmp_path: Path) -> None:
    model, build = conv(), {"target_modules": ["layer"]}
    manager = SlotManager(model, max_rank=8, **build)
    paths = [conv_folder(tmp_path / str(seed), seed) for seed in range(2)]
    with resolving(1):
        for path in paths:
            load(manager, path)
    assert_as_first(manager, model, paths[1], conv, build)


def test_so_do_ranks_of_many_rows_and_threads(tmp_path: Path) -> None:
    build = {"dtype": torch.bfloat16}
    sizes = {"inputs": 64, "outputs": 128}
    model, fresh = toy(**sizes), toy(**sizes)
    manager = SlotManager(model, max_rank=32, **build)
    both = [pairs(dict.fromkeys(TOY_MODULES, 32), seed=seed, **sizes) for seed in range(2)]
    paths = [
        write_folder(
            tmp_path / str(n),
            {key: value.bfloat16() for key, value in tensors_of(own).items()},
            {"r": 32, "lora_alpha": 8},
        )
        for n, own in enumerate(both)
    ]
    with resolving(1), patch("lora_slots.staging.copying._WORTH_THREADS", 0):
        for path in paths:
            load(manager, path)
    SlotManager(fresh, max_rank=32, **build).load(paths[1])
    for name, buffer in slot_buffers(fresh).items():
        assert torch.equal(buffer, slot_buffers(model)[name])


CHANGED: dict[str, dict[str, Any]] = {
    "alpha": {"lora_alpha": 16},
    "rsLoRA": {"use_rslora": True},
    "alpha_pattern": {"alpha_pattern": {"q_proj": 2}},
    "rank_pattern": {"r": 2, "rank_pattern": {".*_proj": 4}},
    "base model": {"base_model_name_or_path": "/other"},
}


@pytest.mark.parametrize("config", CHANGED.values(), ids=CHANGED)
def test_another_config_is_another_outcome(config: dict[str, Any], tmp_path: Path) -> None:
    model = toy()
    manager = SlotManager(model, max_rank=8)
    with resolving(1):
        load(manager, toy_folder(tmp_path / "0"))
        load(manager, toy_folder(tmp_path / "1", seed=1))
    other = toy_folder(tmp_path / "2", seed=2, **config)
    with resolving(1):
        load(manager, other)
    assert_as_first(manager, model, other)
    assert_as_first(manager, model, tmp_path / "1")


def test_a_config_that_contradicts_the_tensors_is_refused_as_ever(tmp_path: Path) -> None:
    model = toy()
    manager = SlotManager(model, max_rank=8)
    load(manager, toy_folder(tmp_path / "0"))
    other = write_folder(tmp_path / "1", tensors(1), {"r": 8, "lora_alpha": 8})
    before = Snapshot.of(manager, model)
    with pytest.raises(AdapterFileError, match="gives rank 8"):
        manager.load(other)
    before.assert_unchanged(manager, model)


def test_strict_and_compress_to_are_part_of_what_is_known(tmp_path: Path) -> None:
    manager = SlotManager(toy(), max_rank=8)
    path = toy_folder(tmp_path)
    for options in ({}, {"strict": False}, {"compress_to": "max_rank"}, {"compress_to": 2}):
        with resolving(1):
            load(manager, path, **options)
    with resolving(2):
        load(manager, path, compress_to=2)
        assert load(manager, path, compress_to=2).compressed
        assert not load(manager, path, compress_to="max_rank").compressed


def with_alphas(path: Path, seed: int) -> Path:
    own = pairs(dict.fromkeys(TOY_MODULES, 4), seed=seed)
    return write_file(path / "kohya.safetensors", kohya(own, alpha=seed + 1.0))


# Whatever in a file may mean something else by its values.
BY_VALUE: dict[str, tuple[Callable[[Path, int], Path], dict[str, Any], dict[str, Any]]] = {
    "alphas": (with_alphas, {}, {}),
    "DoRA": (
        lambda path, seed: write_folder(
            path, dora_tensors(seed=seed), {**SETTINGS, "use_dora": True}
        ),
        {"dora": True},
        {},
    ),
    "lora_bias": (
        lambda path, seed: write_folder(
            path,
            tensors(seed)
            | {
                f"base_model.model.{module}.lora_B.bias": random(6, seed=seed)
                for module in TOY_MODULES
            },
            {**SETTINGS, "lora_bias": True},
        ),
        {"bias": True},
        {},
    ),
    "skipped modules": (
        lambda path, seed: write_folder(
            path,
            tensors(seed) | tensors_of(pairs({"model.other": 4}, seed=seed)),
            SETTINGS,
        ),
        {},
        {"strict": False},
    ),
    "patterns": (
        lambda path, seed: toy_folder(path, seed=seed, alpha_pattern={"q_proj": 2}),
        {},
        {},
    ),
}


@pytest.mark.parametrize("case", BY_VALUE.values(), ids=BY_VALUE)
def test_what_values_decide_is_resolved_each_time(case: Any, tmp_path: Path) -> None:
    write, build, options = case
    model = toy()
    manager = SlotManager(model, max_rank=8, **build)
    paths = [write(tmp_path / str(seed), seed) for seed in range(2)]
    with resolving(2):
        for path in paths:
            load(manager, path, **options)
    assert_as_first(manager, model, paths[1], build=build, **options)


class Shared(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 6, bias=False)
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        return y


def test_a_shared_module_must_have_equal_tensors_in_each_file(tmp_path: Path) -> None:
    A, B = random(4, 8), random(6, 4)
    paths = []
    for factor in (1, 2):
        both = {"a": (A, B), "b": (factor * A, B.clone())}
        paths.append(write_folder(tmp_path / str(factor), tensors_of(both), SETTINGS))
    manager = SlotManager(Shared(), max_rank=8)
    with resolving(2):
        load(manager, paths[0])
        load(manager, paths[0])
    with pytest.raises(TargetMismatchError, match="one shared module"):
        manager.load(paths[1])


def test_tensors_in_memory_are_resolved_each_time(tmp_path: Path) -> None:
    manager = SlotManager(toy(), max_rank=8)
    path = toy_folder(tmp_path)
    load(manager, path)
    with resolving(3):
        load(manager, read_adapter(path))
        load(manager, replace(read_adapter(path), config=SETTINGS | {"lora_alpha": 3}))
        load(manager, read_adapter(tensors(), SETTINGS))


def test_a_cast_model_takes_what_its_buffers_are_now(tmp_path: Path) -> None:
    model = toy()
    manager = SlotManager(model, max_rank=8)
    paths = [toy_folder(tmp_path / str(seed), seed=seed) for seed in range(2)]
    load(manager, paths[0])
    model.bfloat16()
    with resolving(1):
        load(manager, paths[1])
        load(manager, paths[0])
    assert_as_first(manager, model, paths[1], build={"dtype": torch.bfloat16})


def test_so_does_one_whose_buffer_was_replaced(tmp_path: Path) -> None:
    """As offloading hooks do, which ask nobody."""
    models = toy(), toy()
    managers = [SlotManager(model, max_rank=8) for model in models]
    paths = [toy_folder(tmp_path / str(seed), seed=seed) for seed in range(2)]
    load(managers[0], paths[0])
    for model in models:
        slots = model.model.layers[1].v_proj.lora_slots
        slots._buffers["lora_A"] = slots.lora_A.half()
    with resolving(2):
        assert load(managers[0], paths[1]) == load(managers[1], paths[1])
    for name, buffer in slot_buffers(models[0]).items():
        assert torch.equal(buffer, slot_buffers(models[1])[name])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("half", ["A", "B"])
def test_a_value_that_is_not_finite_is_refused_by_the_name_of_its_file(
    half: str, value: float, tmp_path: Path
) -> None:
    model = toy()
    manager = SlotManager(model, max_rank=8)
    load(manager, toy_folder(tmp_path / "good"))
    bad = tensors(1)
    bad[f"{LAST}.lora_{half}.weight"][1, 2] = value
    path = write_folder(tmp_path / "bad", bad, SETTINGS)
    before = Snapshot.of(manager, model)
    for call in (manager.check, manager.load):
        with pytest.raises(AdapterFileError, match=f"lora_{half} of {TOY_MODULES[-1]} in .*/bad"):
            call(path)
        before.assert_unchanged(manager, model)
    with resolving(0):
        load(manager, tmp_path / "good")


def test_every_load_warns_of_what_the_first_did(tmp_path: Path) -> None:
    model = toy()
    model.config = type("Config", (), {"_name_or_path": "me/toy"})()
    manager = SlotManager(model, max_rank=8)
    config = {"base_model_name_or_path": "you/other", "new_option": 1}
    seen = []
    with resolving(1):
        for seed in range(2):
            path = toy_folder(tmp_path / str(seed), seed=seed, **config)
            with warnings.catch_warnings(record=True) as given:
                warnings.simplefilter("always")
                manager.load(path)
            assert all(str(path) in str(each.message) for each in given)
            where = [(each.filename, each.lineno) for each in given]
            seen.append((where[-1], [str(each.message).replace(str(path), "") for each in given]))
    assert len(seen[0][1]) == 2
    assert seen[0] == seen[1]


def test_reports_share_nothing_that_can_change(tmp_path: Path) -> None:
    manager = SlotManager(toy(), max_rank=8)
    for seed in range(2):
        report = manager.load(toy_folder(tmp_path / str(seed), seed=seed))
        assert report.scaling == dict.fromkeys(TOY_MODULES, 2.0)
        report.scaling.clear()  # type: ignore[attr-defined]


def test_copies_know_no_headers_and_load_into_their_own_model(tmp_path: Path) -> None:
    model = toy()
    manager = SlotManager(model, max_rank=8)
    paths = [toy_folder(tmp_path / str(seed), seed=seed) for seed in range(2)]
    load(manager, paths[0])
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = Snapshot.of(manager, model)
        with resolving(1):
            load(SlotManager.of(twin), paths[1])
        before.assert_unchanged(manager, model)
        assert_as_first(SlotManager.of(twin), twin, paths[1])


def test_models_have_their_own_outcomes(tmp_path: Path) -> None:
    small, large = SlotManager(toy(), max_rank=8), SlotManager(toy(inputs=16), max_rank=8)
    path = toy_folder(tmp_path)
    load(small, path)
    with pytest.raises(TargetMismatchError, match="in_features=16"):
        large.load(path)


def test_only_the_headers_used_last_are_known(tmp_path: Path) -> None:
    paths = [toy_folder(tmp_path / str(n), lora_alpha=n + 1) for n in range(3)]
    with patch.object(loading, "_MOST_OUTLINES", 2):
        manager = SlotManager(toy(), max_rank=8)
        with resolving(3):
            for path in paths[:2]:
                load(manager, path)
            load(manager, paths[0])
            load(manager, paths[2])
        with resolving(1):
            load(manager, paths[0])
            load(manager, paths[1])


def test_threads_that_load_files_of_one_header_each_get_their_own_values(tmp_path: Path) -> None:
    model = toy()
    manager = SlotManager(model, max_rank=8, num_slots=4)
    loader = Loader(manager._attachment.layout, max_rank=8, cache_bytes=0)
    paths = [toy_folder(tmp_path / str(seed), seed=seed) for seed in range(4)]

    def prepare(path: Path) -> StagedAdapter:
        options = {"strict": True, "compress_to": None, "spare": nothing_to_spare}
        return loader.prepare(path, **options).staged

    def staged(number: int) -> list[tuple[Tensor, ...]]:
        return [prepare(paths[number]).rows["lora_B"].rows for _ in range(20)]

    tasks = [Task(lambda n=n: staged(n)) for n in range(4)]  # type: ignore[misc]
    for number, task in enumerate(tasks):
        B = pairs(dict.fromkeys(TOY_MODULES, 4), seed=number)
        for rows in task.result():  # type: ignore[attr-defined]
            for (_, expected), own in zip(B.values(), rows, strict=True):
                assert torch.equal(own, expected.t())


def test_what_was_read_of_a_file_can_be_copied_and_pickled(tmp_path: Path) -> None:
    raw = read_file(toy_folder(tmp_path))
    for twin in (copy.deepcopy(raw), pickle.loads(pickle.dumps(raw))):
        (tmp_path / WEIGHTS).unlink(missing_ok=True)
        assert list(twin.tensors) == list(raw.tensors)
        assert all(torch.equal(twin.tensors[key], tensor) for key, tensor in tensors().items())


def test_what_a_user_read_of_a_file_can_be_changed_and_saved(tmp_path: Path) -> None:
    raw = read_adapter(toy_folder(tmp_path))
    doubled = {key: 2 * tensor for key, tensor in raw.tensors.items()}
    save_file(raw.tensors | doubled, tmp_path / "other.safetensors")
    other = read_adapter(tmp_path / "other.safetensors").tensors
    assert other.keys() == raw.tensors.keys()
    assert all(torch.equal(other[key], tensor) for key, tensor in doubled.items())
