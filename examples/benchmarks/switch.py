"""`set_adapters` between two loaded, against PEFT's hotswap and PEFT's `set_adapter`."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.figures import OURS, Figure
from benchmarks.harness import Harness, alternating
from benchmarks.models import Model, base_weights, check_equal, peft_model, write_pair
from benchmarks.swap import HOTSWAP, hotswap
from lora_slots import SlotManager


def run(harness: Harness) -> Iterator[Figure]:
    """Two adapters of rank 8, in slots of 64 rows."""
    shape, device = harness.large, harness.device
    weights = base_weights(shape, device, alike=True)
    files = write_pair(harness.root / "switch", shape, 8)
    hot = peft_model(Model(weights), files[0], device, padded_to=64)
    resident = peft_model(Model(weights), files[0], device)
    resident.load_adapter(
        str(files[1]), "other", torch_device=str(device), autocast_adapter_dtype=False
    )
    model = Model(weights).eval()
    manager = SlotManager(model, max_rank=64, num_slots=2)
    manager.load(files[0], "default")
    manager.load(files[1], "other")
    runs = {
        OURS: alternating(manager.set_adapters, ["default", "other"]),
        HOTSWAP: hotswap(hot, harness, files),
        "PEFT set_adapter": alternating(resident.set_adapter, ["default", "other"]),
    }
    for _ in files:
        for each in runs.values():
            each()
        check_equal([hot, resident, model], harness.input(shape, 1))
    # A switch is shorter than the timer's other work, so that more of them are asked for.
    yield harness.compare("switch between two loaded, rank 8", runs, rounds=2 * harness.rounds)
