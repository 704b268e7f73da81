"""Loads of the user's own adapters, in linears of their sizes, beside what PEFT offers for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from torch import Tensor, nn

from benchmarks.figures import OURS, Figure
from benchmarks.harness import Harness, Run, alternating, bar
from benchmarks.models import check_equal
from benchmarks.swap import CACHE, COPY
from lora_slots import SlotManager, inspect_adapter

PEFT = "PEFT load, set, delete"


class Linears(nn.Module):
    """Linears under given names. Its output is that of them all, one after the other."""

    def __init__(
        self, sizes: dict[str, tuple[int, int]], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Make a linear, ``(in, out)``, for every name."""
        super().__init__()
        self.sizes = sizes
        torch.manual_seed(0)
        for name, (inputs, outputs) in sizes.items():
            parent: nn.Module = self
            *parents, leaf = name.split(".")
            for part in parents:
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent._modules[part]
            parent.add_module(leaf, nn.Linear(inputs, outputs, False, device, dtype))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """``[n]``, at least as long as the widest input, to ``[sum of out]``."""
        return torch.cat(
            [self.get_submodule(name)(x[:inputs]) for name, (inputs, _) in self.sizes.items()]
        )


def run(harness: Harness, paths: Sequence[Path]) -> Iterator[Figure]:
    """Load ``paths`` in turn, each over the one before."""
    infos = [inspect_adapter(path) for path in paths]
    sizes = {
        name: (shape.in_features, shape.out_features)
        for info in infos
        for name, shape in info.shapes.items()
    }
    x = torch.randn(max(inputs for inputs, _ in sizes.values()), device=harness.device)
    x = x.to(infos[0].dtypes[0])

    def model() -> Linears:
        return Linears(sizes, x.dtype, harness.device).eval()

    disk_model, cache_model = model(), model()
    disk = SlotManager.from_adapters(disk_model, paths)
    cache = SlotManager.from_adapters(cache_model, paths, cache_bytes=CACHE)
    models: list[Callable[[Tensor], Tensor]] = [disk_model, cache_model]
    loads: dict[str, Callable[[Path], Any]] = {OURS: disk.load, f"{OURS}, cached": cache.load}
    if all((path / "adapter_config.json").is_file() for path in paths):
        theirs = _peft(model(), paths[0], harness)
        models.append(theirs)
        loads[PEFT] = _replacing(theirs, harness)
    for path in bar(paths, "compared"):
        for load in loads.values():
            load(path)
        check_equal(models, x)
    runs: dict[str, Run] = {name: alternating(load, paths) for name, load in loads.items()}
    runs[COPY] = harness.copy_of(sum(info.nbytes for info in infos) // len(infos))
    yield harness.compare(f"load of {len(paths)} adapters in turn", runs)


def _peft(model: Linears, path: Path, harness: Harness) -> PeftModel:
    config = PeftConfig.from_pretrained(str(path))
    # A task would ask for more than the linears.
    config.task_type = None
    return PeftModel.from_pretrained(
        model,
        str(path),
        "0",
        config=config,
        autocast_adapter_dtype=False,
        torch_device=str(harness.device),
    ).eval()


def _replacing(model: PeftModel, harness: Harness) -> Callable[[Path], None]:
    """What PEFT has for adapters of any rank and any modules, where nothing is compiled."""
    turn = 0

    def load(path: Path) -> None:
        nonlocal turn
        model.load_adapter(
            str(path),
            str(turn + 1),
            autocast_adapter_dtype=False,
            torch_device=str(harness.device),
        )
        model.set_adapter(str(turn + 1))
        model.delete_adapter(str(turn))
        turn += 1

    return load
