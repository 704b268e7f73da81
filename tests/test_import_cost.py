"""Importing the package costs torch and safetensors alone."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("accelerate", "diffusers", "huggingface_hub", "peft", "rich", "transformers", "typer")


def heavy_modules_after(statement: str) -> list[str]:
    code = f"import sys; {statement}; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.split()


def test_importing_lora_slots_imports_no_other_library() -> None:
    assert heavy_modules_after("import lora_slots") == []


def test_this_check_sees_a_library_that_is_imported() -> None:
    assert heavy_modules_after("import huggingface_hub") == ["huggingface_hub"]


def test_attaching_to_a_plain_model_and_loading_without_a_config_imports_none_either() -> None:
    statement = (
        "import torch, lora_slots; "
        "manager = lora_slots.SlotManager(torch.nn.Sequential(torch.nn.Linear(8, 6)), max_rank=2); "
        "tensors = {'0.lora_A.weight': torch.ones(2, 8), '0.lora_B.weight': torch.ones(6, 2)}; "
        "manager.load(lora_slots.read_adapter(tensors))"
    )
    assert heavy_modules_after(statement) == []
