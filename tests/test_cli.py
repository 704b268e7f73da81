"""`lora-slots`: a row per file, whatever is in it; exit statuses; JSON with fixed keys."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import write_file
from toys import TOY_MODULES, WEIGHTS, pairs, tensors_of, toy_folder, write_folder
from typer.testing import CliRunner

from lora_slots.cli.__main__ import main
from lora_slots.cli.commands import app


def run(*arguments: object) -> tuple[int, str]:
    """The exit status and the output."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def run_json(*arguments: object) -> tuple[int, Any]:
    status, output = run(*arguments, "--json")
    return status, json.loads(output)


def damaged(path: Path) -> Path:
    path.write_bytes(b"<!doctype html> not found")
    return path


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return toy_folder(tmp_path / "rank4", base_model_name_or_path="me/toy")


def test_inspect_shows_each_file_in_a_row(adapter: Path, tmp_path: Path) -> None:
    other = write_file(tmp_path / "other.safetensors")
    status, output = run("inspect", adapter, other)
    assert status == 0
    header, first, second = output.splitlines()
    assert header.split()[:3] == ["adapter", "format", "rank"]
    assert " ".join(first.split()) == f"{adapter} PEFT 4 2 4 linear 0.9 kB float32 for me/toy"
    assert " ".join(second.split()) == f"{other} PEFT 4 1 4 linear 0.9 kB float32"


def test_inspect_as_json_has_the_documented_keys(adapter: Path) -> None:
    status, output = run_json("inspect", adapter)
    assert status == 0
    assert output == {
        "files": [
            {
                "path": str(adapter),
                "error": None,
                "warnings": [],
                "format": "PEFT",
                "base_model": "me/toy",
                "max_rank": 4,
                "ranks": {"min": 4, "max": 4},
                "scaling": {"min": 2.0, "max": 2.0},
                "modules": 4,
                "kinds": {"linear": 4},
                "dtypes": ["float32"],
                "nbytes": 4 * 4 * 4 * (8 + 6),
                "needs": {},
                "features": [],
            }
        ]
    }


def test_a_bad_file_is_a_row_with_its_error_and_exit_1(adapter: Path, tmp_path: Path) -> None:
    bad = damaged(tmp_path / "bad.safetensors")
    status, output = run("inspect", bad, adapter)
    assert status == 1
    assert "it is a web page" in output
    assert "me/toy" in output
    status, output = run_json("inspect", bad, adapter)
    assert status == 1
    broken, good = output["files"]
    assert broken["error"]["type"] == "AdapterFileError"
    assert broken["error"]["message"].startswith(f"{bad} (25 bytes) is not a readable weight file")
    assert broken.keys() == good.keys()
    values = {key: broken[key] for key in broken.keys() - {"path", "error", "warnings"}}
    assert set(values.values()) == {None}
    assert good["error"] is None


def test_what_reading_warns_of_is_told_in_the_files_row(tmp_path: Path) -> None:
    path = toy_folder(tmp_path / "a", brand_new_option=True)
    status, output = run_json("inspect", path)
    assert status == 0
    (warning,) = output["files"][0]["warnings"]
    assert "keys that are not known here and are ignored: brand_new_option" in warning
    assert "warning: the config of" in run("inspect", path)[1]


def test_check_exits_with_0_and_one_line_if_the_adapter_fits(adapter: Path) -> None:
    status, output = run("check", adapter, "--max-rank", 4)
    assert (status, output.count("\n")) == (0, 1)
    assert output.startswith(f"fits: {adapter}: rank 4, 4 modules")
    assert run_json("check", adapter, "--max-rank", 4) == (
        0,
        {
            "path": str(adapter),
            "fits": True,
            "reason": None,
            "max_rank": 4,
            "modules": 4,
            "needs": {},
        },
    )


def test_check_exits_with_1_and_the_reason_if_the_rank_is_too_large(tmp_path: Path) -> None:
    ranks = dict(zip(TOY_MODULES, (2, 5, 3, 1), strict=True))
    path = write_file(tmp_path / "a.safetensors", tensors_of(pairs(ranks)))
    reason = f"it has rank 5 at {TOY_MODULES[1]}, but max_rank is 4: it needs max_rank=5"
    assert run("check", path, "--max-rank", 4) == (1, f"refused: {reason}\n")
    status, output = run_json("check", path, "--max-rank", 4)
    assert (status, output["fits"], output["reason"]) == (1, False, reason)


def test_check_exits_with_1_for_options_that_were_not_named(tmp_path: Path) -> None:
    tensors = tensors_of(pairs(dict.fromkeys(TOY_MODULES, 4))) | {
        f"base_model.model.{TOY_MODULES[0]}.lora_magnitude_vector": torch.ones(6),
        f"base_model.model.{TOY_MODULES[1]}.lora_B.bias": torch.ones(6),
    }
    path = write_folder(tmp_path / "a", tensors, {"r": 4, "lora_alpha": 8})
    size = ("--max-rank", 4)
    assert run("check", path, *size) == (1, "refused: it needs dora=True; it needs bias=True\n")
    assert run("check", path, *size, "--dora") == (1, "refused: it needs bias=True\n")
    assert run("check", path, *size, "--dora", "--bias")[0] == 0


def test_check_knows_whole_modules_and_token_rows(tmp_path: Path) -> None:
    tensors = tensors_of(pairs({TOY_MODULES[0]: 4})) | {
        "base_model.model.score.weight": torch.ones(2, 6),
        "base_model.model.embed.token_adapter.trainable_tokens_delta": torch.ones(3, 6),
    }
    indices = {"trainable_token_indices": {"embed": [1, 2, 3]}, "modules_to_save": ["score"]}
    path = write_folder(tmp_path / "a", tensors, {"r": 4, "lora_alpha": 8, **indices})
    size = ("--max-rank", 4)
    reason = "it needs token_rows=3; it needs full_modules=['score']"
    assert run("check", path, *size) == (1, f"refused: {reason}\n")
    room = ("--full-module", "classifier", "--full-module", "score", "--token-rows", 2)
    assert run("check", path, *size, *room) == (1, "refused: it needs token_rows=3\n")
    assert run("check", path, *size, *room[:4], "--token-rows", 3)[0] == 0


def test_check_exits_with_1_for_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    status, output = run("check", tmp_path / "none.safetensors", "--max-rank", 4)
    assert (status, output) == (1, f"refused: {tmp_path}/none.safetensors does not exist\n")
    status, output = run_json("check", tmp_path / "none.safetensors", "--max-rank", 4)
    assert (status, output["fits"], output["max_rank"]) == (1, False, None)


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "a"],
        ["check", "a", "--max-rank", "0"],
        ["plan"],
        ["plan", "a", "--num-slots", "0"],
        ["plan", "a", "--dtype", "int8"],
        ["inspect"],
        ["conjure"],
    ],
)
def test_a_wrong_call_exits_with_2(arguments: list[str]) -> None:
    assert run(*arguments)[0] == 2


def test_the_installed_command_prints_no_progress_into_a_pipe(adapter: Path) -> None:
    command = [str(Path(sys.executable).with_name("lora-slots")), "plan", str(adapter), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    # Packages for quantisation, which PEFT imports, log what they miss.
    assert not any(mark in done.stderr for mark in ("\r", "\x1b", "%", "\u2501")), done.stderr
    assert json.loads(done.stdout)["max_rank"] == 4


def test_the_module_runs_as_a_program(
    adapter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lora-slots", "check", str(adapter), "--max-rank", "3"])
    monkeypatch.delitem(sys.modules, "lora_slots.cli.__main__", raising=False)
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("lora_slots.cli", run_name="__main__")
    assert exit_.value.code == 1
    assert capsys.readouterr().out.startswith("refused: it has rank 4")


@pytest.mark.parametrize("missing", ["typer", "rich.console"])
def test_without_the_extra_it_says_what_to_install(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "lora_slots.cli.commands")
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    library = missing.split(".")[0]
    assert capsys.readouterr().err == (
        f"lora-slots needs {library}, which is not installed; install lora-slots[cli]\n"
    )


def test_another_missing_module_is_not_blamed_on_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "lora_slots.cli.commands")
    monkeypatch.setitem(sys.modules, "lora_slots.inspecting.planning", None)
    with pytest.raises(ModuleNotFoundError, match=r"lora_slots\.inspecting\.planning"):
        main()


def test_the_commands_import_no_library_that_takes_seconds() -> None:
    code = "import sys, lora_slots.cli.commands as c; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    heavy = {"torch._dynamo", "torch._inductor", "peft", "transformers", "diffusers"}
    assert done.returncode == 0
    assert heavy.isdisjoint(done.stdout.split())


def test_a_pickle_is_refused_in_its_row(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "adapter_model.bin")
    (status, output), name = run_json("inspect", tmp_path), WEIGHTS.replace("safetensors", "bin")
    assert status == 1
    assert output["files"][0]["error"]["type"] == "UnsupportedAdapterError"
    assert name in output["files"][0]["error"]["message"]
