"""Hub ids come from the local cache; inspect_adapter reads nothing but the header."""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from toys import (
    TOY_MODULES,
    WEIGHTS,
    Snapshot,
    expected_toy,
    pairs,
    tensors_of,
    toy,
    toy_folder,
    toy_input,
    write_folder,
)

from lora_slots import (
    AdapterFileError,
    SlotManager,
    UnsupportedAdapterError,
    inspect_adapter,
    read_adapter,
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache; no network, as in all tests."""
    assert constants.HF_HUB_OFFLINE
    path = tmp_path / "hub"
    path.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(path))
    return path


def cached_snapshot(cache: Path, hub_id: str) -> Path:
    """The folder of a repository in the cache, as huggingface_hub lays it out."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    return repository / "snapshots" / commit


def test_a_hub_id_is_found_in_the_local_cache(cache: Path) -> None:
    both = pairs(dict.fromkeys(TOY_MODULES, 3), seed=4)
    write_folder(
        cached_snapshot(cache, "pirates/treasure-v1.0"), tensors_of(both),
        {"r": 3, "lora_alpha": 6, "base_model_name_or_path": "pirates/ship"},
    )  # fmt: skip
    model = toy()
    report = SlotManager(model, max_rank=4).load("pirates/treasure-v1.0")
    assert report.source == "pirates/treasure-v1.0"
    assert report.scaling == dict.fromkeys(TOY_MODULES, 2.0)
    expected = expected_toy(toy(), toy_input(), both, report.scaling)
    torch.testing.assert_close(model(toy_input()), expected, rtol=1e-5, atol=1e-4)
    info = inspect_adapter("pirates/treasure-v1.0")
    assert (info.max_rank, info.base_model) == (3, "pirates/ship")


def test_a_pickle_of_a_hub_repository_is_read_only_if_asked_for(cache: Path) -> None:
    folder = write_folder(cached_snapshot(cache, "pirates/old"), {}, {"r": 3, "lora_alpha": 6})
    (folder / WEIGHTS).unlink()
    tensors = tensors_of(pairs(dict.fromkeys(TOY_MODULES, 3)))
    torch.save(tensors, folder / "adapter_model.bin")
    with pytest.raises(UnsupportedAdapterError, match="is a pickle"):
        read_adapter("pirates/old")
    assert read_adapter("pirates/old", allow_pickle=True).tensors.keys() == tensors.keys()


def test_a_hub_id_that_cannot_be_fetched_is_refused_at_once(cache: Path, tmp_path: Path) -> None:
    model = toy()
    manager = SlotManager(model, max_rank=4)
    manager.load(toy_folder(tmp_path / "live"))
    before = Snapshot.of(manager, model)
    started = time.perf_counter()
    message = "^pirates/nowhere is neither a path that exists nor a hub id that can be fetched: ."
    with pytest.raises(AdapterFileError, match=message):
        manager.load("pirates/nowhere")
    assert time.perf_counter() - started < 5
    before.assert_unchanged(manager, model)


def test_a_missing_path_under_a_folder_that_exists_is_no_hub_id(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(
        cached_snapshot(cache, "adapters/pirate"), tensors_of(pairs({TOY_MODULES[0]: 2})), None
    )
    assert read_adapter("adapters/pirate").config is None
    (tmp_path / "adapters").mkdir()
    with pytest.raises(AdapterFileError, match=r"^adapters/pirate does not exist$"):
        read_adapter("adapters/pirate")


def sparse_file(path: Path, nbytes: int) -> Path:
    """A valid safetensors file with a lora_A of ``nbytes``, which takes no room on the disk."""
    inputs = nbytes // 16
    ends = (nbytes, nbytes + 96)
    tensors = {
        "base_model.model.huge.lora_A.weight": ([4, inputs], (0, ends[0])),
        "base_model.model.huge.lora_B.weight": ([6, 4], ends),
    }
    header = json.dumps(
        {k: {"dtype": "F32", "shape": s, "data_offsets": o} for k, (s, o) in tensors.items()}
    ).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + ends[1])
    return path


def peak_memory() -> int:
    """The most that this process had in memory so far, in bytes; pages of mapped files count."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def test_inspecting_reads_only_the_header(tmp_path: Path) -> None:
    path = sparse_file(tmp_path / "huge.safetensors", 2**32)
    before = peak_memory()
    info = inspect_adapter(path)
    assert peak_memory() - before < 2**28
    assert info.ranks == {"huge": 4}
    assert info.nbytes == 2**32 + 96
    assert info.dtypes == (torch.float32,)


def test_inspecting_says_what_the_load_would_do(tmp_path: Path) -> None:
    ranks = dict(zip(TOY_MODULES, [2, 4, 4, 1], strict=True))
    tensors = tensors_of(pairs(ranks)) | {"base_model.model.head.weight": torch.ones(3)}
    tensors["base_model.model." + TOY_MODULES[1] + ".alpha"] = torch.tensor(6.0)
    tensors = {k: v.half() if "layers.1" in k else v for k, v in tensors.items()}
    path = write_folder(
        tmp_path / "a", tensors,
        {
            "r": 4, "lora_alpha": 8, "alpha_pattern": {"0.q_proj": 1}, "modules_to_save": ["head"],
            "rank_pattern": {"0.q_proj": 2, "1.v_proj": 1}, "base_model_name_or_path": "me/toy",
        },
    )  # fmt: skip
    info = inspect_adapter(str(path))
    report = SlotManager(toy(), max_rank=info.max_rank).load(path, strict=False)
    assert (info.source, info.base_model) == (str(path), "me/toy")
    assert info.ranks == ranks
    assert info.modules == report.modules
    assert info.scaling == report.scaling == dict(zip(TOY_MODULES, [0.5, 1.5, 2, 8], strict=True))
    assert info.dtypes == (torch.float32, torch.float16)
    assert info.nbytes == sum(t.numel() * t.element_size() for t in tensors.values())
    features = ("rank_pattern", "alpha_pattern", "modules_to_save=['head']", "1 whole tensor")
    assert info.features == features
    text = f"{path}: rank 1 to 4, 4 modules, .* for me/toy, with rank_pattern, alpha_pattern, .*"
    assert re.fullmatch(text.replace("[", r"\["), str(info))


def test_inspecting_finds_no_fault_with_values_that_a_load_refuses(tmp_path: Path) -> None:
    both = pairs(dict.fromkeys(TOY_MODULES, 4))
    both[TOY_MODULES[2]][1][0, 0] = float("nan")
    path = write_folder(tmp_path / "nan", tensors_of(both), {"r": 4, "lora_alpha": 8})
    assert inspect_adapter(path).max_rank == 4
    with pytest.raises(AdapterFileError, match="1 NaN or infinite"):
        SlotManager(toy(), max_rank=4).load(path)


@pytest.mark.parametrize(
    ("name", "config", "error", "message"),
    [
        (WEIGHTS, {"r": 2}, AdapterFileError, "gives rank 2 to .* have rank 4"),
        (WEIGHTS, {"r": 4, "use_dora": True}, AdapterFileError, "says use_dora, but"),
        ("adapter_model.bin", {"r": 4}, UnsupportedAdapterError, "is a pickle"),
    ],
)
def test_inspecting_refuses_what_a_load_refuses_for_its_header_or_config(
    name: str, config: dict[str, object], error: type[Exception], message: str, tmp_path: Path
) -> None:
    path = toy_folder(tmp_path / "a")
    (path / "adapter_config.json").write_text(json.dumps(config))
    (path / WEIGHTS).rename(path / name)
    with pytest.raises(error, match=message):
        inspect_adapter(path)
