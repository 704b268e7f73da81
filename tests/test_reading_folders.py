"""Which file of a folder is read follows one rule, and what is read is never told by its name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_files import PAIRS, TENSORS, assert_loads_as, write_file
from format_files import dotted, kohya
from huggingface_hub import constants
from toys import TOY_MODULES, WEIGHTS, refusal, write_folder

from lora_slots import (
    AdapterFileError,
    UnsupportedAdapterError,
    inspect_adapter,
    read_adapter,
)
from lora_slots.reading import read_header

DIFFUSERS = "pytorch_lora_weights.safetensors"
PICKLES = ("adapter_model.bin", "pytorch_lora_weights.bin")


def folder_of(path: Path, *names: str) -> Path:
    """A folder with these files, of which the first, and no other, has scaling 2."""
    for number, name in enumerate(names):
        tensors = dotted(PAIRS, 4 if number else 8)
        if name.endswith(".bin"):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            torch.save(tensors, path / name)
        else:
            write_file(path / name, tensors)
    return path


@pytest.mark.parametrize(
    "names",
    [
        (WEIGHTS, DIFFUSERS),
        (WEIGHTS, "other.safetensors", *PICKLES),
        (DIFFUSERS, "other.safetensors"),
        (DIFFUSERS, *PICKLES),
        ("other.safetensors", *PICKLES),
        ("other.safetensors", f"checkpoint-500/{WEIGHTS}"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("allow_pickle", [True, False])
def test_of_several_files_the_first_by_the_rule_is_read(
    names: tuple[str, ...], allow_pickle: bool, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "a", *names)
    assert_loads_as(read_adapter(folder, allow_pickle=allow_pickle), 2.0)
    assert inspect_adapter(folder).scaling == dict.fromkeys(TOY_MODULES, 2.0)


@pytest.mark.parametrize("names", [PICKLES, PICKLES[1:]], ids=" ".join)
def test_a_folder_of_pickles_is_refused_unless_asked_for(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "a", *names)
    refusal(folder, UnsupportedAdapterError, f"{names[0]} is a pickle, .* allow_pickle=True")
    assert_loads_as(read_adapter(folder, allow_pickle=True), 2.0)
    with pytest.raises(UnsupportedAdapterError, match="is a pickle"):
        read_header(folder)


def test_two_unknown_files_are_refused_listing_both_even_beside_a_pickle(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", "b.safetensors", "a.safetensors", PICKLES[0])
    message = r"holds a\.safetensors, b\.safetensors; pass the path of one"
    refusal(folder, AdapterFileError, message)


@pytest.mark.parametrize("inner", [WEIGHTS, DIFFUSERS, "x.safetensors", PICKLES[0]])
def test_a_folder_whose_folder_has_the_weights_is_refused_naming_it(
    inner: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "a", f"checkpoint-500/{inner}")
    (folder / "logs").mkdir()
    message = "holds neither, but checkpoint-500 in it does; pass the path of that folder"
    refusal(folder, AdapterFileError, message)


def test_the_config_beside_a_file_with_another_name_applies(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", TENSORS, {"r": 4, "lora_alpha": 8})
    (folder / WEIGHTS).rename(folder / DIFFUSERS)
    assert_loads_as(folder, 2.0)
    assert_loads_as(folder / DIFFUSERS, 2.0)


def test_a_hub_repository_may_have_diffusers_name_for_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--pirates--style"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    write_file(repository / "snapshots" / commit / DIFFUSERS, dotted(PAIRS, 8, prefix="unet."))
    raw = read_adapter("pirates/style")
    assert raw.format == "diffusers"
    assert_loads_as(raw, 2.0)


# What a file is


FORMATS = {
    "PEFT": (TENSORS, {}),
    "kohya": (kohya(PAIRS, 8), {"ss_network_dim": "4"}),
    "LyCORIS": (kohya(PAIRS, 8) | {"lora_unet_x.hada_w1_a": torch.ones(2, 2)}, {}),
    "diffusers": (dotted(PAIRS, 8, prefix="unet."), {}),
    "older diffusers": (dotted(PAIRS, 8, prefix="unet.", down=".lora.down", up=".lora.up"), {}),
    "diffusion_model": (dotted(PAIRS, 8, prefix="diffusion_model."), {}),
    "ai-toolkit": (
        dotted(PAIRS, 8, prefix="transformer."), {"software": '{"name": "ai-toolkit"}'},
    ),
    "OneTrainer": (kohya(PAIRS, 8, "lora_transformer_"), {"ot_branch": "master"}),
}  # fmt: skip


@pytest.mark.parametrize("name", ["adapter_model.safetensors", DIFFUSERS, "lora_unet_kohya.st"])
@pytest.mark.parametrize("format_", FORMATS)
def test_a_format_is_told_by_keys_and_header_whatever_the_files_name(
    format_: str, name: str, tmp_path: Path
) -> None:
    tensors, metadata = FORMATS[format_]
    path = write_file(tmp_path / name, tensors, metadata)
    assert read_adapter(path).format == read_header(path).format == format_


@pytest.mark.parametrize("format_", [name for name in FORMATS if name not in ("PEFT", "LyCORIS")])
def test_a_header_says_as_much_as_the_file_in_every_format(format_: str, tmp_path: Path) -> None:
    path = write_file(tmp_path / "a", *FORMATS[format_])
    info = inspect_adapter(path)
    assert set(info.scaling.values()) == {2.0}
    assert set(info.ranks.values()) == {4}
    assert len(info.modules) == len(TOY_MODULES)
    assert_loads_as(path, 2.0)
    assert all(t.is_meta for k, t in read_header(path).tensors.items() if "alpha" not in k)


def wrapped(segment: str, place: str) -> str:
    """A prefix with ``segment`` before, or after, the component."""
    return {"before": f"{segment}.unet.", "after": f"unet.{segment}."}[place]


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize(
    "segment", ["_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"]
)
@pytest.mark.parametrize("half", [(".lora_A", ".lora_B"), (".lora.down", ".lora.up")])
def test_components_saved_from_wrapped_models_load_as_if_they_were_not(
    half: tuple[str, str], segment: str, place: str
) -> None:
    down, up = half
    assert_loads_as(read_adapter(dotted(PAIRS, 8, wrapped(segment, place), down, up)), 2.0)
