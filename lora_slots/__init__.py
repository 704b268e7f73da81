"""Fixed LoRA slots for compiled PyTorch models: swap adapters with no recompile."""

from lora_slots.errors import (
    AdapterFileError,
    AdapterInUseError,
    ArgumentError,
    AttachError,
    HoldError,
    LoraSlotsError,
    NoFreeSlotError,
    NotAttachedError,
    RankTooLargeError,
    RecompileError,
    TargetMismatchError,
    UnknownAdapterError,
    UnsupportedAdapterError,
)
from lora_slots.inspecting.inspecting import inspect_adapter
from lora_slots.manager import SlotManager
from lora_slots.reading import RawAdapter, read_adapter
from lora_slots.report import AdapterInfo, ComponentStatus, LoadReport, ManagerStatus, SlotStatus

__version__ = "0.1.0"

__all__ = [
    "AdapterFileError",
    "AdapterInUseError",
    "AdapterInfo",
    "ArgumentError",
    "AttachError",
    "ComponentStatus",
    "HoldError",
    "LoadReport",
    "LoraSlotsError",
    "ManagerStatus",
    "NoFreeSlotError",
    "NotAttachedError",
    "RankTooLargeError",
    "RawAdapter",
    "RecompileError",
    "SlotManager",
    "SlotStatus",
    "TargetMismatchError",
    "UnknownAdapterError",
    "UnsupportedAdapterError",
    "inspect_adapter",
    "read_adapter",
]
