"""Eight rows with an adapter each, against PEFT's mixed batch and a PEFT pass for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor

from benchmarks.figures import OURS, Figure
from benchmarks.graphs import counting_graphs
from benchmarks.harness import Harness, bar, calls
from benchmarks.models import Model, Weights, base_weights, check_equal, compiled, write_adapter
from lora_slots import SlotManager

NAMES = [f"adapter{n}" for n in range(8)]
RANK = 16
NEW_LISTS = [NAMES[n:] + NAMES[:n] for n in (1, 2, 3)]
MIXED = "PEFT adapter_names"
EACH = "PEFT pass for each"


def run(harness: Harness) -> Iterator[Figure]:
    """One token each and 64 tokens each; then what new lists of names cost in graphs."""
    shape = harness.route
    weights = base_weights(shape, harness.device)
    files = {
        name: write_adapter(harness.root / name, shape, RANK, n) for n, name in enumerate(NAMES)
    }
    with torch.no_grad():
        yield with_tokens(harness, weights, files, tokens=1, new_lists=NEW_LISTS)
        yield with_tokens(harness, weights, files, tokens=64, new_lists=[])


def with_tokens(
    harness: Harness,
    weights: Weights,
    files: dict[str, Path],
    *,
    tokens: int,
    new_lists: list[list[str]],
) -> Figure:
    """All contenders, compiled for ``[8, tokens, hidden]``, and then given new lists of names."""
    base, model = Model(weights).eval(), Model(weights).eval()
    manager = SlotManager(model, max_rank=RANK, num_slots=len(NAMES), routing=True)
    for name, path in files.items():
        manager.load(path, name)
    mixed_model, each_model = (_resident(weights, files, harness) for _ in range(2))
    alone, ours, mixed, single = (
        compiled(each, harness.device, backend=harness.backend)
        for each in (base, model, mixed_model, each_model)
    )

    def routed(x: Tensor, names: list[str]) -> Tensor:
        manager.route(names)
        return ours(x)

    def pass_for_each(x: Tensor) -> Tensor:
        rows = []
        for row, name in zip(x.split(1), NAMES, strict=True):
            each_model.set_adapter(name)
            # On a GPU the next pass may overwrite what this one gave.
            rows.append(single(row).clone())
        return torch.cat(rows)

    x = harness.input(harness.route, len(NAMES), tokens)
    runs: dict[str, Callable[[Tensor], Tensor]] = {
        OURS: lambda x: routed(x, NAMES),
        MIXED: lambda x: mixed(x, adapter_names=NAMES),
        EACH: pass_for_each,
        "base model, no adapters": alone,
    }
    for each in bar(runs.values(), f"compiling for {tokens} tokens each"):
        for _ in range(2):
            each(x)
    check_equal([runs[EACH], runs[MIXED], runs[OURS]], x)
    figure = harness.compare(f"8 rows of 8 adapters, {tokens} tokens each", calls(runs, x))
    rivals = {
        OURS: lambda names: routed(x, names),
        MIXED: lambda names: mixed(x, adapter_names=names),
    }
    return replace(figure, notes=_graphs_for(rivals, new_lists, harness.device))


def _resident(weights: Weights, files: dict[str, Path], harness: Harness) -> PeftModel:
    """PEFT with all adapters loaded."""
    first, *others = NAMES
    model = PeftModel.from_pretrained(
        Model(weights), str(files[first]), first, torch_device=str(harness.device)
    )
    for name in others:
        model.load_adapter(str(files[name]), name, torch_device=str(harness.device))
    return model.eval()


def _graphs_for(
    rivals: dict[str, Callable[[list[str]], Tensor]],
    lists: list[list[str]],
    device: torch.device,
) -> dict[str, float]:
    """How many graphs each rival makes for lists of names never seen."""
    notes: dict[str, float] = {}
    for name, rival in rivals.items() if lists else ():
        with counting_graphs() as counts:
            for names in bar(lists, f"new names, {name}"):
                rival(names)
        notes |= counts.notes(device, f" for {len(lists)} new lists of names, {name}")
    return notes
