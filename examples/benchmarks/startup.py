"""Attaching to a model without its allocation, and the first compile of a block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from peft import LoraConfig, get_peft_model
from torch._inductor.utils import fresh_cache

from benchmarks.figures import OURS, Figure
from benchmarks.harness import Harness, bar
from benchmarks.models import Model, base_weights, check_equal, compiled, peft_model, write_adapter
from lora_slots import SlotManager

RANK = 64
ATTACHMENTS = 7
COMPILES = 3


def run(harness: Harness) -> Iterator[Figure]:
    """Both, beside PEFT's."""
    yield attaching(harness)
    yield compiling(harness)


def attaching(harness: Harness) -> Figure:
    """Give every linear slots, where all is on ``meta``, so that nothing is allocated."""
    shape = harness.large
    weights = base_weights(shape, torch.device("meta"), alike=True)
    ours, theirs = ([Model(weights) for _ in range(2 * ATTACHMENTS)] for _ in range(2))
    config = LoraConfig(r=RANK, target_modules=list(shape.linears))
    runs = {
        OURS: lambda: SlotManager(ours.pop(), max_rank=RANK),
        "PEFT get_peft_model": lambda: get_peft_model(theirs.pop(), config, low_cpu_mem_usage=True),
    }
    what = f"attach to {shape.layers * len(shape.linears)} linears, nothing allocated"
    return harness.compare(what, runs, rounds=ATTACHMENTS)


def compiling(harness: Harness) -> Figure:
    """The first forward of a block with one token, with nothing compiled before."""
    shape = replace(harness.forward, layers=1)
    weights = base_weights(shape, harness.device)
    path = write_adapter(harness.root / "startup", shape, 8, 0)
    ours = Model(weights).eval()
    SlotManager(ours, max_rank=RANK).load(path)
    padded = peft_model(Model(weights), path, harness.device, padded_to=RANK)
    models = {OURS: ours, "PEFT padded": padded, "base model": Model(weights).eval()}
    x = harness.input(shape, 1)
    check_equal([padded, ours], x)
    times: dict[str, list[float]] = {name: [] for name in models}
    with torch.no_grad():
        for _ in bar(range(1 + COMPILES), "compiling from nothing"):
            for name, model in models.items():
                torch._dynamo.reset()
                with fresh_cache():
                    first = compiled(model, harness.device, backend=harness.backend)
                    times[name].append(harness.clock.milliseconds(lambda first=first: first(x)))
    # The first round also imports what compiling needs.
    counted = {name: each[1:] for name, each in times.items()}
    return Figure.of("first compile of a block, and a forward", counted)
