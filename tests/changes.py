"""What can be asked of a manager that has an adapter loaded as "default", one step at a time."""

from __future__ import annotations

from collections.abc import Iterator

from lora_slots import RawAdapter, SlotManager


def weights_mixes_and_unloads(manager: SlotManager, other: RawAdapter) -> Iterator[str]:
    """Every change but loads of "default"; ``other`` goes into a second slot, and both go."""
    for weight in (0.0, 0.5, 1.0, -1.5):
        manager.set_weight("default", weight)
        yield f"weight {weight}"
    manager.load(other, "other", activate=False)
    yield "a second adapter, inactive"
    for weights in ([1.0, 1.0], [0.25, -2.0], [0.0, 1.0]):
        manager.set_adapters(["default", "other"], weights)
        yield f"a mix of {weights}"
    manager.disable_adapters()
    yield "disabled"
    manager.enable_adapters()
    yield "enabled"
    for name in ("default", "other"):
        manager.unload(name)
        yield f"{name} unloaded"
