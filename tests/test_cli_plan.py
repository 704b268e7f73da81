"""`lora-slots plan`: what to build for many adapters, and which of them do not fit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import write_file
from dora_files import dora_tensors
from format_files import dotted, kohya
from test_cli import damaged, run, run_json
from toys import TOY_MODULES, pairs, tensors_of, toy, toy_folder, write_folder

from lora_slots import SlotManager
from lora_slots.inspecting.planning import find_adapters, look_at, plan

Q = TOY_MODULES[0]


@pytest.fixture
def adapters(tmp_path: Path) -> list[Path]:
    """Two plain ones of different ranks and modules, one with DoRA, one with a bias."""
    folder = tmp_path / "adapters"
    bias = {f"base_model.model.{Q}.lora_B.bias": torch.ones(6)}
    return [
        toy_folder(folder / "a-all", 2),
        write_file(folder / "b.safetensors", tensors_of(pairs({Q: 5}))),
        write_folder(folder / "c-dora", dora_tensors(3), {"r": 3, "lora_alpha": 3}),
        write_file(folder / "d.safetensors", tensors_of(pairs({Q: 1})) | bias),
    ]


def test_plan_names_what_to_build_and_why_each_adapter_fits(adapters: list[Path]) -> None:
    status, output = run("plan", *adapters, "--num-slots", 2)
    assert status == 0
    summary, modules, size, header, *rows = output.splitlines()
    assert summary == (
        "SlotManager(model, max_rank=5, num_slots=2, dora=True, bias=True, target_modules=[...])"
    )
    assert modules == "4 modules: q_proj, v_proj"
    assert size == "2.2 kB of buffers in bfloat16"
    assert header.split() == ["adapter", "fits", "rank", "modules", "notes"]
    assert [row.split()[:4] for row in rows] == [
        [str(path), "yes", str(rank), str(count)]
        for path, rank, count in zip(adapters, (2, 5, 3, 1), (4, 1, 4, 1), strict=True)
    ]
    assert rows[2].endswith("DoRA; needs dora=True")


def test_plan_as_json_has_the_documented_keys(adapters: list[Path]) -> None:
    status, output = run_json("plan", *adapters, "--dtype", "float16")
    assert status == 0
    files = output.pop("files")
    assert output == {
        "max_rank": 5,
        "num_slots": 1,
        "dtype": "float16",
        "options": {"dora": True, "bias": True},
        "nbytes": 4 * (5 * (8 + 6) * 2 + 4 * (5 + 6 + 4 * 6)),
        "modules": {name: {"in_shape": [8], "out_features": 6} for name in TOY_MODULES},
    }
    assert files[3] == {
        "path": str(adapters[3]),
        "fits": True,
        "error": None,
        "warnings": [],
        "max_rank": 1,
        "modules": 1,
        "needs": {"bias": True},
    }
    assert all(file.keys() == files[3].keys() for file in files)


@pytest.mark.parametrize("names", [["a-all"], ["b.safetensors"], ["a-all", "c-dora"], None])
def test_the_bytes_of_a_plan_are_those_of_the_buffers(
    names: list[str] | None, adapters: list[Path]
) -> None:
    paths = [path for path in adapters if names is None or path.name in names]
    found = plan(map(look_at, map(str, paths)), num_slots=3, dtype=torch.float32)
    manager = SlotManager.from_adapters(toy(), paths, num_slots=3)
    (component,) = manager.status().components.values()
    assert found.nbytes == component.nbytes
    assert found.max_rank == manager.status().max_rank


def test_the_bytes_of_whole_parameters_and_token_rows_are_counted(tmp_path: Path) -> None:
    prefix = "base_model.model."
    tensors = tensors_of(pairs({Q: 2})) | {
        f"{prefix}head.weight": torch.ones(3, 6),
        f"{prefix}head.bias": torch.ones(3),
        f"{prefix}embed.token_adapter.trainable_tokens_delta": torch.ones(4, 8),
    }
    config = {
        "r": 2, "lora_alpha": 2, "modules_to_save": ["head"],
        "trainable_token_indices": {"embed": [1, 2, 3, 4]},
    }  # fmt: skip
    row = look_at(str(write_folder(tmp_path, tensors, config)))
    found = plan([row], num_slots=2, dtype=torch.bfloat16)
    assert found.options == {"full_modules": ("head",), "token_rows": 4}
    low_rank = 4 * (8 + 6) * 2 + 4 * 4
    whole = (3 * 6 * 2 + 4) + (3 * 2 + 4)
    tokens = 4 * (8 * 2 + 8)
    assert found.nbytes == low_rank + 2 * (whole + tokens)


def test_files_that_do_not_fit_are_rows_with_the_reason_and_exit_1(
    adapters: list[Path], tmp_path: Path
) -> None:
    bad = damaged(tmp_path / "bad.safetensors")
    alien = toy_folder(tmp_path / "alien", peft_type="VERA")
    other_base = tensors_of(pairs({Q: 64, TOY_MODULES[1]: 64}, inputs=10, outputs=6))
    large = write_file(tmp_path / "large.safetensors", other_base)
    status, output = run_json("plan", bad, alien, large, *adapters)
    assert status == 1
    errors = [file["error"] and file["error"]["message"] for file in output["files"]]
    assert "it is a web page" in errors[0]
    assert "has the peft_type VERA" in errors[1]
    assert errors[2] == (
        f"{large} is for another base model: {Q} has in 10, out 6, but most of the other adapters "
        "have in 8, out 6 there (2 of its 2 modules are unlike theirs)"
    )
    assert errors[3:] == [None] * 4
    assert [file["fits"] for file in output["files"]] == [False] * 3 + [True] * 4
    # What cannot be used asks for nothing.
    assert output["max_rank"] == 5
    status, table = run("plan", bad, *adapters)
    assert status == 1
    assert [line.split()[1] for line in table.splitlines()[4:]] == ["no"] + ["yes"] * 4


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        ({"q.lora_A.weight": torch.ones(()), "q.lora_mid.weight": torch.ones(2, 2, 3, 3)}, {}),
        ({"q.lora_A.weight": torch.ones(())}, {}),
        ({"q.lora_A.weight": torch.ones(0, 8), "q.lora_B.weight": torch.ones(6, 0)}, {}),
        ({"q.lokr_w1": torch.ones(0, 8), "q.lokr_w2": torch.ones(2, 2)}, {"peft_type": "LOKR"}),
        ({"q.trainable_tokens_delta": torch.ones(())}, {}),
        (tensors_of(pairs({Q: 2})), {"target_parameters": 2.5, "modules_to_save": 3}),
        (tensors_of(pairs({Q: 2})), {"rank_pattern": [1], "r": "2"}),
        ({}, {}),
    ],
)
def test_strange_files_are_rows_too(
    tensors: dict[str, torch.Tensor], config: dict[str, Any], tmp_path: Path
) -> None:
    strange = write_folder(tmp_path / "strange", tensors, {"r": 2, "lora_alpha": 2, **config})
    status, output = run_json("plan", strange, toy_folder(tmp_path / "good", 3))
    assert output["files"][0]["path"] == str(strange)
    assert (output["files"][1]["fits"], output["max_rank"]) == (True, 3)
    assert status == (output["files"][0]["error"] is not None)


def test_a_plan_without_any_usable_adapter_says_so(tmp_path: Path) -> None:
    status, output = run("plan", tmp_path / "none")
    assert status == 1
    assert output.startswith("none of these adapters can be used\n")
    assert run_json("plan", tmp_path / "none")[1]["max_rank"] == 0


def test_one_module_under_the_names_of_several_formats_is_counted_once(tmp_path: Path) -> None:
    both = pairs({Q: 2})
    files: dict[str, dict[str, Any]] = {
        "kohya": kohya(both),
        "peft": tensors_of(both),
        "unet": dotted(both, prefix="unet."),
        "comfy": dotted(both, prefix="diffusion_model."),
    }
    paths = [write_file(tmp_path / f"{name}.safetensors", each) for name, each in files.items()]
    assert list(run_json("plan", *paths)[1]["modules"]) == [Q]
    # Text encoders are told from each other and from what denoises.
    encoders = kohya(both, prefix="lora_te1_") | kohya(pairs({Q: 2}, seed=1), prefix="lora_te2_")
    paths.append(write_file(tmp_path / "encoders.safetensors", encoders))
    assert len(run_json("plan", *paths)[1]["modules"]) == 3


def test_a_folder_of_adapters_stands_for_each_of_them(adapters: list[Path]) -> None:
    folder = adapters[0].parent
    (folder / "notes.txt").write_text("not an adapter")
    (folder / "empty").mkdir()
    assert find_adapters(str(folder)) == [str(path) for path in adapters]
    assert find_adapters(str(adapters[0])) == [str(adapters[0])]
    assert find_adapters(str(adapters[1])) == [str(adapters[1])]
    assert len(run_json("inspect", folder)[1]["files"]) == 4


def test_a_folder_that_is_an_adapter_is_one_whatever_else_it_holds(tmp_path: Path) -> None:
    path = toy_folder(tmp_path / "a", 2)
    toy_folder(path / "checkpoint-500", 2)
    assert find_adapters(str(path)) == [str(path)]


def test_a_folder_without_adapters_is_a_row_that_says_so(tmp_path: Path) -> None:
    status, output = run_json("plan", tmp_path)
    assert (status, len(output["files"])) == (1, 1)
    assert f"{tmp_path} must hold" in output["files"][0]["error"]["message"]


def test_a_thousand_adapters_are_planned_in_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = [f"model.layers.{n}.{name}_proj" for n in range(4) for name in "qkvo"]
    for number in range(1000):
        rank = number % 5 + 1
        tensors = tensors_of(pairs(dict.fromkeys(modules, rank)))
        write_folder(tmp_path / f"{number:03}", tensors, {"r": rank, "lora_alpha": 8})
    started = time.perf_counter()
    status, output = run_json("plan", tmp_path)
    seconds = time.perf_counter() - started
    with capsys.disabled():
        print(f"\n1,000 adapters of {len(modules)} modules planned in {seconds:.1f} s")
    assert (status, len(output["files"]), output["max_rank"]) == (0, 1000, 5)
    assert seconds < 20
