"""One adapter for `Toy`, in every kind of file, and the check that it was read right."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from toys import TOY_MODULES, expected_toy, pairs, tensors_of, toy, toy_input

from lora_slots import RawAdapter, SlotManager
from lora_slots.reading import Source

PAIRS = pairs(dict.fromkeys(TOY_MODULES, 4), seed=1)
TENSORS = tensors_of(PAIRS)
SCALING_2 = {"r": 4, "lora_alpha": 8}


def assert_loads_as(source: Source | RawAdapter, scaling: float) -> None:
    """Load ``source``, which must hold PAIRS with this scaling."""
    model = toy()
    report = SlotManager(model, max_rank=8).load(source)
    assert report.scaling == dict.fromkeys(TOY_MODULES, scaling)
    expected = expected_toy(toy(), toy_input(), PAIRS, report.scaling)
    torch.testing.assert_close(model(toy_input()), expected, rtol=1e-5, atol=1e-4)


def write_file(
    path: Path, tensors: Mapping[str, Tensor] = TENSORS, metadata: dict[str, str] | None = None
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), path, metadata)
    return path
