"""What a user chose when building a manager: refused where it has no meaning."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch

from lora_slots.attach.choices import TargetModules
from lora_slots.bank.buckets import RankBuckets, bucket_sizes
from lora_slots.bank.rows import count_rows
from lora_slots.errors import ArgumentError
from lora_slots.layers.quantized import can_compute

OnFull = Literal["error", "evict"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `SlotManager`, which says what they mean. Knows no model.

    Raises:
        ArgumentError: One of them has no meaning.
    """

    max_rank: int
    num_slots: int
    target_modules: TargetModules
    dtype: torch.dtype | None
    dora: bool
    bias: bool
    token_rows: int
    full_modules: Collection[str]
    rank_budget: int | None
    rank_buckets: RankBuckets
    cache_bytes: int
    on_full: OnFull
    routing: bool

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        _check_count("max_rank", self.max_rank)
        _check_count("num_slots", self.num_slots)
        dtype = self.dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and can_compute(dtype)):
            raise ArgumentError(
                f"dtype must be a floating-point torch.dtype of at least 16 bits, got {dtype!r}"
            )
        _check_count("token_rows", self.token_rows, least=0)
        _check_count("cache_bytes", self.cache_bytes, least=0)
        if self.target_modules is None:
            raise ArgumentError("target_modules must be a string or a collection, got None")
        if self.on_full not in ("error", "evict"):
            raise ArgumentError(f'on_full must be "error" or "evict", got {self.on_full!r}')
        bucket_sizes(self.rank_buckets, self.rows)

    @property
    def rows(self) -> int:
        """How many rows by rank the slots share: R."""
        return count_rows(self.rank_budget, max_rank=self.max_rank, num_slots=self.num_slots)

    @property
    def buckets(self) -> tuple[int, ...] | None:
        """How many of them a forward may see, ascending; None: always all."""
        return bucket_sizes(self.rank_buckets, self.rows)


def _check_count(name: str, value: object, *, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f"{name} must be a whole number from {least}, got {value!r}")
