"""Adapters are read as PEFT writes them; what cannot be read is refused with its likely cause."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import SCALING_2, TENSORS, assert_loads_as, write_file
from peft import LoraConfig
from torch import Tensor, nn
from toys import (
    WEIGHTS,
    pairs,
    refusal,
    tensors_of,
    write_folder,
)

from lora_slots import (
    AdapterFileError,
    ArgumentError,
    SlotManager,
    UnsupportedAdapterError,
    read_adapter,
)
from lora_slots.reading.formats import FOREIGN

# Damaged files


def torch_file(**options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(TENSORS, buffer, **options)
    return buffer.getvalue()


DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut 5 bytes short": (lambda good: good[:-5], "it is truncated"),
    "cut within its header": (lambda good: good[:100], "it is truncated"),
    "with bytes after its end": (lambda good: good + b"12345", "has bytes after its end"),
    "empty": (lambda good: b"", "it is empty"),
    "of 4 bytes": (lambda good: good[:4], "ends within the first 8 bytes"),
    "a web page": (lambda good: b"\n<!DOCTYPE html><html>Sign in</html>", "it is a web page"),
    "a Git LFS pointer": (
        lambda good: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
        "Git LFS pointer: run `git lfs pull`",
    ),
    "a zip pickle": (lambda good: torch_file(), r"it is a PyTorch pickle \(zip\)"),
    "an old pickle": (
        lambda good: torch_file(_use_new_zipfile_serialization=False),
        "it is a pickle under another name",
    ),
    "JSON": (lambda good: b'{"r": 4, "lora_alpha": 8}', "it is JSON"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused_with_its_path_size_and_likely_cause(
    damage: str, tmp_path: Path
) -> None:
    make, cause = DAMAGED[damage]
    path = write_folder(tmp_path / "bad", TENSORS, SCALING_2)
    content = make((path / WEIGHTS).read_bytes())
    (path / WEIGHTS).write_bytes(content)
    text = refusal(path, AdapterFileError, cause)
    assert f"{path / WEIGHTS} ({len(content)} bytes)" in text


@pytest.mark.parametrize("tensors", [{}, {"model.layers.0.q_proj.weight": torch.ones(2)}])
def test_a_file_without_lora_tensors_is_refused(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.safetensors", tensors)
    keys = next(iter(tensors), "none at all")
    refusal(path, AdapterFileError, f"holds no LoRA tensors; its keys are .*{keys}")


@pytest.mark.parametrize(("piece", "what"), FOREIGN.items())
def test_key_names_of_other_formats_are_refused_by_name(
    piece: str, what: str, tmp_path: Path
) -> None:
    key = f"lora_unet_model_layers_0_q_proj.{piece}.weight"
    message = f"uses {re.escape(what)}, as its key {key!r} shows"
    path = write_file(tmp_path / "a.safetensors", {**TENSORS, key: torch.ones(2)})
    refusal(path, UnsupportedAdapterError, message)


def test_a_module_whose_name_only_contains_such_a_piece_is_read() -> None:
    model = nn.ModuleDict({"soft_gate": nn.Linear(8, 6)})
    raw = read_adapter(tensors_of(pairs({"soft_gate": 2})))
    assert SlotManager(model, max_rank=2).load(raw).modules == ("soft_gate",)


def by_hand(tensors: Mapping[str, Tensor], padding: int) -> bytes:
    """A safetensors file whose data starts ``padding`` bytes after a multiple of 8."""
    names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
             torch.float64: "F64", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3"}  # fmt: skip
    header, data = {}, b""
    for key, value in tensors.items():
        raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        data += raw
        header[key] = {
            "dtype": names[value.dtype], "shape": list(value.shape), "data_offsets": offsets,
        }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + padding)
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("padding", [0, 1, 4])
def test_tensors_of_every_dtype_size_and_place_in_a_file_are_read_exactly(
    padding: int, tmp_path: Path
) -> None:
    tensors = {
        "z.lora_A.weight": torch.randn(3, 5).to(torch.float8_e4m3fn),
        "b.alpha": torch.tensor(2.5, dtype=torch.float64),
        "a.lora_A.weight": torch.randn(1, 3).half(),
        "byte": torch.tensor([7], dtype=torch.uint8),
        "nothing": torch.empty(0, 4),
        "a.lora_B.weight": torch.randn(7, 1),
        "c": torch.randn(3).bfloat16(),
        "d": torch.randn(2, 3, 5, dtype=torch.float64),
    }
    path = tmp_path / "a.safetensors"
    path.write_bytes(by_hand(tensors, padding))
    read = read_adapter(path).tensors
    assert read.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert (read[key].dtype, read[key].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read[key].double(), tensor.double()), key


def test_reading_and_loading_a_file_never_changes_it(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "a", TENSORS, SCALING_2)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    raw = read_adapter(path)
    assert_loads_as(raw, 2.0)
    for tensor in raw.tensors.values():
        tensor.zero_()
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


# Which file of a folder


def test_a_file_given_directly_needs_no_config(tmp_path: Path) -> None:
    assert_loads_as(write_file(tmp_path / "any name.safetensors"), 1.0)


@pytest.mark.parametrize(
    "extra",
    ["other.safetensors", "adapter_model.bin", "optimizer.pt", f"checkpoint-500/{WEIGHTS}"],
)
def test_the_canonical_safetensors_file_of_a_folder_wins(extra: str, tmp_path: Path) -> None:
    path = write_folder(tmp_path / "a", TENSORS, SCALING_2)
    (path / extra).parent.mkdir(exist_ok=True)
    (path / extra).write_bytes(b"not read")
    assert_loads_as(path, 2.0)


def test_the_only_safetensors_file_of_a_folder_is_read_whatever_its_name(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "a", TENSORS, SCALING_2)
    (path / WEIGHTS).rename(path / "pytorch_lora_weights.safetensors")
    assert_loads_as(str(path), 2.0)


def test_a_folder_with_two_unknown_files_is_refused_listing_both(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_file(tmp_path / "two" / f"{name}.safetensors")
    message = "must hold adapter_model.safetensors .* a.safetensors, b.safetensors; pass the path"
    refusal(tmp_path / "two", AdapterFileError, message)


@pytest.mark.parametrize("content", [None, "checkpoint-500"])
def test_a_folder_without_weights_is_refused(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "none"
    path.mkdir()
    if content is not None:
        write_folder(path / content, TENSORS, SCALING_2)
    refusal(path, AdapterFileError, f"{re.escape(str(path))} must hold .*neither")


@pytest.mark.parametrize("name", ["gone", "gone.safetensors", "a/b/c"])
def test_a_path_that_does_not_exist_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    refusal(path, AdapterFileError, f"{re.escape(str(path))} does not exist")


# Pickles


@pytest.mark.parametrize("name", ["adapter_model.bin", "a.pt", "a.pth", "a.ckpt"])
def test_a_pickle_is_refused_unless_asked_for_and_then_read(name: str, tmp_path: Path) -> None:
    path = write_folder(tmp_path / "p", TENSORS, SCALING_2)
    (path / WEIGHTS).unlink()
    torch.save(TENSORS, path / name)
    source = path if name == "adapter_model.bin" else path / name
    refusal(source, UnsupportedAdapterError, "is a pickle, .* allow_pickle=True")
    assert_loads_as(read_adapter(source, allow_pickle=True), 2.0)


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("payload ran",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (Payload(), "not a readable weight file"),
        ([torch.ones(2)], "must hold a mapping of names to tensors"),
        ({"a": 1}, "must hold a mapping of names to tensors"),
    ],
)
def test_a_pickle_that_is_asked_for_runs_no_code_and_must_hold_tensors(
    content: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(content, "adapter_model.bin")
    with pytest.raises(AdapterFileError, match=message):
        read_adapter("adapter_model.bin", allow_pickle=True)
    assert os.listdir() == ["adapter_model.bin"]


# In memory


@pytest.mark.parametrize(
    ("config", "scaling"),
    [
        (None, 1.0),
        ({"r": 4, "lora_alpha": 12}, 3.0),
        (LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj"], task_type="CAUSAL_LM"), 3.0),
    ],
    ids=["none", "mapping", "LoraConfig"],
)
def test_tensors_in_memory_load_under_the_config_given_with_them(
    config: Any, scaling: float
) -> None:
    raw = read_adapter(TENSORS, config)
    assert_loads_as(raw, scaling)
    assert all(raw.tensors[key] is tensor for key, tensor in TENSORS.items())


def test_a_config_given_beside_a_path_takes_the_place_of_its_own(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "a", TENSORS, SCALING_2)
    assert_loads_as(read_adapter(path, {"r": 4, "lora_alpha": 4}), 1.0)
    assert_loads_as(path, 2.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), "must be a path, a hub id or a mapping of names to tensors, got int"),
        (("",), "must be a non-empty string, got ''"),
        ((b"a",), "must be a path, .* got bytes"),
        (({1: torch.ones(1)},), "must map names to tensors, got 1: Tensor"),
        (({"a": [1.0]},), "must map names to tensors, got 'a': list"),
        ((TENSORS, "config.json"), "config must be a mapping .* got str"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        read_adapter(*arguments)
