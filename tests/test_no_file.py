"""What is no readable file is refused as such: no other error, and no waiting for one."""

import json
import os
from pathlib import Path

import pytest
from safetensors.torch import save_file
from toys import TOY_MODULES, WEIGHTS, pairs, refusal, tensors_of, toy_folder

from lora_slots import AdapterFileError, inspect_adapter


@pytest.mark.parametrize("name", ["pipe.safetensors", "pipe"])
def test_a_pipe(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    refusal(tmp_path / name, AdapterFileError, "must be a file, but it is a pipe or a device")
    with pytest.raises(AdapterFileError, match="must be a file"):
        inspect_adapter(tmp_path / name)


def test_a_folder_in_the_place_of_the_weights(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).mkdir()
    refusal(tmp_path, AdapterFileError, "must be a file, but it is a folder")


def test_a_folder_that_may_not_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = toy_folder(tmp_path)
    (folder / WEIGHTS).rename(folder / "other.safetensors")

    def denied(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", denied)
    refusal(folder, AdapterFileError, "cannot be read: Permission denied")


def test_a_folder_with_another_in_it_that_may_not_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    listed = os.listdir

    def denied(path: str) -> list[str]:
        if os.path.basename(path) == "inner":
            raise PermissionError(13, "Permission denied", path)
        return listed(path)

    monkeypatch.setattr(os, "listdir", denied)
    refusal(tmp_path, AdapterFileError, "it holds neither")


DEEP = "[" * 100_000


def test_a_config_that_is_nested_too_deep(tmp_path: Path) -> None:
    folder = toy_folder(tmp_path)
    (folder / "adapter_config.json").write_text(DEEP)
    refusal(folder, AdapterFileError, "is not valid JSON")


def test_a_config_in_the_header_that_is_nested_too_deep(tmp_path: Path) -> None:
    tensors = tensors_of(pairs({TOY_MODULES[0]: 2}))
    save_file(tensors, tmp_path / WEIGHTS, {"lora_adapter_metadata": json.dumps({"r": 2})[:-1]})
    refusal(tmp_path, AdapterFileError, "is not valid JSON")
    save_file(tensors, tmp_path / WEIGHTS, {"lora_adapter_metadata": DEEP})
    refusal(tmp_path, AdapterFileError, "is not valid JSON")
