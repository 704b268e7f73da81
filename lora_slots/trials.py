"""Runs of the user's own forward that try what a model does: all its graphs, all its layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lora_slots.bank.bank import Bank
from lora_slots.errors import TargetMismatchError
from lora_slots.holding import HoldLock
from lora_slots.layers.watch import listen
from lora_slots.layout import Layout


def warmup(bank: Bank, lock: HoldLock, fn: Callable[[], object]) -> None:
    """Run ``fn`` once for each number of rows that a forward may see, while nobody holds."""
    from tqdm import tqdm

    def run() -> None:
        for rows in tqdm(bank.buckets, desc="compiling", unit="graph", disable=None):
            with bank.showing(rows):
                fn()

    with lock.changing():
        lock.alone(run)


def verify(layout: Layout, fn: Callable[[], object]) -> None:
    """Run ``fn`` once, eagerly, and see that it calls every target module.

    Raises:
        TargetMismatchError: Lists the target modules that were never called.
    """
    ran: set[nn.Module] = set()
    with listen(ran.add), torch.compiler.set_stance("force_eager"):
        fn()
    silent = [target.path for target in layout if target.slots not in ran]
    if silent:
        raise TargetMismatchError(
            f"{len(silent)} of {len(layout)} target modules were never called, so "
            f"adapters on them would be ignored: {', '.join(silent)}; leave them out of "
            "target_modules, or let the model call them"
        )
