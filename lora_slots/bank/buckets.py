"""How many rows a compiled forward may see: the sizes that ``rank_buckets`` means."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from lora_slots.errors import ArgumentError

RankBuckets = Literal["auto"] | Collection[int] | None
_SHARES = (16, 4)
_STEP = 8


def bucket_sizes(rank_buckets: RankBuckets, rows: int) -> tuple[int, ...] | None:
    """The sizes that ``rank_buckets`` means, ascending; the last is ``rows``.

    Args:
        rank_buckets: ``"auto"``: nothing, a sixteenth, a quarter and all of the rows, in multiples
            of 8; or the sizes; or None for no buckets.
        rows: How many rows there are: R.

    Raises:
        ArgumentError: A size has no meaning, or there are more than Dynamo would compile.
    """
    if rank_buckets is None:
        return None
    if isinstance(rank_buckets, str):
        if rank_buckets != "auto":
            raise ArgumentError(
                f"rank_buckets must be 'auto', None or whole numbers, got {rank_buckets!r}"
            )
        sizes = {0, rows, *(-(-rows // share // _STEP) * _STEP for share in _SHARES)}
        return tuple(sorted(size for size in sizes if size <= rows))
    if not isinstance(rank_buckets, Collection):
        raise ArgumentError(
            f"rank_buckets must be 'auto', None or whole numbers, got {rank_buckets!r}"
        )
    for size in rank_buckets:
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= rows:
            raise ArgumentError(
                f"rank_buckets must be whole numbers from 0 to {rows}, the number of all rows, got "
                f"{size!r}"
            )
    sizes = {*rank_buckets, rows}
    _check_limit(len(sizes))
    return tuple(sorted(sizes))


def _check_limit(count: int) -> None:
    import torch._dynamo.config as dynamo  # takes seconds to import

    if 2 * count > dynamo.recompile_limit:
        raise ArgumentError(
            f"rank_buckets gives {count} sizes, which for a prompt and a token is {2 * count} "
            f"graphs, but Dynamo gives up after torch._dynamo.config.recompile_limit="
            f"{dynamo.recompile_limit}; name fewer sizes, or raise that limit first"
        )
