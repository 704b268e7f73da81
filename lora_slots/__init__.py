"""Fixed LoRA slots for compiled PyTorch models: swap adapters with no recompile."""

from lora_slots.catalogue import CatalogueEntry
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
from lora_slots.prefetching import Prefetch
from lora_slots.reading import RawAdapter, read_adapter
from lora_slots.report import AdapterInfo, LoadReport
from lora_slots.status import CacheStatus, ComponentStatus, ManagerStatus, SlotStatus
from lora_slots.tally import Counts

__version__ = "0.1.0"

__all__ = [
    "AdapterFileError",
    "AdapterInUseError",
    "AdapterInfo",
    "ArgumentError",
    "AttachError",
    "CacheStatus",
    "CatalogueEntry",
    "ComponentStatus",
    "Counts",
    "HoldError",
    "LoadReport",
    "LoraSlotsError",
    "ManagerStatus",
    "NoFreeSlotError",
    "NotAttachedError",
    "Prefetch",
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
