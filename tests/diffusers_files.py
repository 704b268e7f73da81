"""Files that diffusers wrote for a tiny Stable Diffusion, and what PEFT's layers in it answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pipes import PIPES, write_lora
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from lora_slots import SlotManager

PIPE = PIPES["sd"]
FILE = "pytorch_lora_weights.safetensors"
CONFIGS: dict[str, dict[str, Any]] = {
    "unet": {
        "r": 3, "lora_alpha": 6, "target_modules": ["to_q", "to_v", "to_out.0"],
        "rank_pattern": {"to_v": 5}, "alpha_pattern": {"attn1.to_q": -3},
    },
    "text_encoder": {
        "r": 4, "lora_alpha": 2, "use_rslora": True, "target_modules": ["q_proj", "out_proj"],
    },
}  # fmt: skip
# Scaling 1, as in files without any alpha.
PLAIN = {
    name: {"r": 4, "lora_alpha": 4, "target_modules": config["target_modules"]}
    for name, config in CONFIGS.items()
}


def run(component: str, module: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        if component == "unet":
            sample = torch.randn(1, 4, 16, 16, generator=generator)
            context = torch.randn(1, 3, 32, generator=generator)
            output: Tensor = module(sample, 5, context).sample
        else:
            output = module(torch.arange(6)[None]).last_hidden_state
    return output


class Written:
    """A file that diffusers wrote, and what PEFT's layers in its components answer."""

    def __init__(self, folder: Path, configs: Mapping[str, Mapping[str, Any]]) -> None:
        pipe = PIPE.build()
        self.folder = write_lora(folder, pipe, configs, seed=1)
        self.answers = {name: run(name, getattr(pipe, name)) for name in configs}
        self.tensors = load_file(folder / FILE)

    def pairs(self, component: str) -> dict[str, tuple[Tensor, Tensor]]:
        """Of one component, by the names of its modules within it."""
        prefix, end = f"{component}.", ".lora_A.weight"
        modules = [k[len(prefix) : -len(end)] for k in self.tensors if k.endswith(end)
                   and k.startswith(prefix)]  # fmt: skip
        return {
            m: (self.tensors[f"{prefix}{m}{end}"], self.tensors[f"{prefix}{m}.lora_B.weight"])
            for m in modules
        }

    def assert_loads(self, source: Any, component: str) -> Any:
        """``source`` must make the fresh component answer as PEFT's does."""
        module = getattr(PIPE.build(), component)
        base = run(component, module)
        report = SlotManager(module, max_rank=8).load(source)
        torch.testing.assert_close(
            run(component, module), self.answers[component], rtol=1e-5, atol=1e-5
        )
        assert not torch.allclose(base, self.answers[component], atol=1e-3)
        return report
