"""Counts what inductor and CUDA make anew while something runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler


@dataclass
class GraphCounts:
    """What was made since counting began.

    Attributes:
        compiled: Graphs that Dynamo compiled.
        recorded: CUDA graphs that were recorded; always 0 on a CPU.
    """

    compiled: int = 0
    recorded: int = 0

    def notes(self, device: torch.device, when: str = "") -> dict[str, float]:
        """Both by their names, or only what ``device`` can have; ``when`` is added to the names."""
        notes: dict[str, float] = {f"graphs compiled{when}": self.compiled}
        if device.type == "cuda":
            notes[f"CUDA graphs recorded{when}"] = self.recorded
        return notes


@contextmanager
def counting_graphs() -> Iterator[GraphCounts]:
    """Count graphs that are compiled, and CUDA graphs that are recorded, in the body."""
    counts = GraphCounts()

    def on_start(args: CallbackArgs) -> None:
        if args.callback_trigger == CallbackTrigger.DYNAMO:
            counts.compiled += 1
        elif args.callback_trigger == CallbackTrigger.CUDAGRAPH_RECORDING:
            counts.recorded += 1

    callback_handler.register_start_callback(on_start)
    try:
        yield counts
    finally:
        callback_handler.remove_start_callback(on_start)
