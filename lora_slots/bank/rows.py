"""Which rows of the buffers each slot owns. Arithmetic only; knows no tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import pairwise

from lora_slots.errors import ArgumentError


def count_rows(rank_budget: int | None, *, max_rank: int, num_slots: int) -> int:
    """How many rows there are: R.

    Raises:
        ArgumentError: ``rank_budget`` has no room for ``max_rank``, or more rows than slots can
            own.
    """
    most = num_slots * max_rank
    if rank_budget is None:
        return most
    whole = isinstance(rank_budget, int) and not isinstance(rank_budget, bool)
    if not (whole and max_rank <= rank_budget <= most):
        raise ArgumentError(
            f"rank_budget must be a whole number from max_rank, {max_rank}, to num_slots * "
            f"max_rank, {most}, got {rank_budget!r}"
        )
    return rank_budget


def place(
    needs: Mapping[int, int],
    before: Mapping[int, int],
    *,
    total: int,
    active: Collection[int] = (),
    limit: int | None = None,
    given_up: Mapping[int, range] | None = None,
    in_use: Collection[int] = (),
) -> dict[int, int] | None:
    """Choose the first row of every slot, moving as few as possible.

    Args:
        needs: How many rows each slot needs.
        before: The first row of each slot that has rows now; others are new.
        total: How many rows there are.
        active: Slots that contribute.
        limit: Rows of ``active`` slots must come before this one; None: they may be anywhere.
        given_up: The rows of slots that need none any more: nothing is put there if it fits beside.
        in_use: Slots whose rows are being read: idle ones move first, so that nothing need be put
            on rows that are read.

    Returns:
        The first row of each slot, or None if they do not fit.
    """
    limit = total if limit is None else min(limit, total)
    ends = {slot: limit if slot in active else total for slot in needs}
    kept = {
        slot: before[slot]
        for slot in needs
        if slot in before and before[slot] + needs[slot] <= ends[slot]
    }
    kept = _without_overlaps(needs, kept)
    for staying, avoided in _attempts(needs, kept, given_up or {}, in_use):
        sizes = {slot: len(rows) for slot, rows in avoided.items()}
        firsts = {slot: rows.start for slot, rows in avoided.items()}
        placed = _add({**needs, **sizes}, {**staying, **firsts}, ends)
        if placed is not None:
            return {slot: placed[slot] for slot in needs}
    return None


def free_rows(owned: Iterable[range], total: int) -> tuple[int, int]:
    """How many rows no slot owns, and how many of them lie side by side at most."""
    gaps = [len(gap) for gap in _gaps(owned, total)]
    return sum(gaps), max(gaps, default=0)


def _attempts(
    needs: Mapping[int, int],
    kept: Mapping[int, int],
    given_up: Mapping[int, range],
    in_use: Collection[int],
) -> Iterator[tuple[Mapping[int, int], Mapping[int, range]]]:
    """Which slots stay, and which rows are avoided: the attempt that disturbs least comes first."""
    yield kept, given_up
    # Too scattered: let go of small slots before large ones, and of those that are read last.
    order = sorted(kept, key=lambda slot: (slot in in_use, needs[slot], slot))
    staying = [{slot: kept[slot] for slot in order[gone:]} for gone in range(len(order) + 1)]
    idle = sum(slot not in in_use for slot in order)
    read = {slot: rows for slot, rows in given_up.items() if slot in in_use}
    for some in staying[: idle + 1]:
        yield some, read
    for some in staying:
        yield some, {}


def _without_overlaps(needs: Mapping[int, int], starts: Mapping[int, int]) -> dict[int, int]:
    """Leave out slots whose rows run into those of one before."""
    kept: dict[int, int] = {}
    end = 0
    for slot in sorted(starts, key=lambda slot: starts[slot]):
        if starts[slot] >= end:
            kept[slot], end = starts[slot], starts[slot] + needs[slot]
    return kept


def _add(
    needs: Mapping[int, int], kept: Mapping[int, int], ends: Mapping[int, int]
) -> dict[int, int] | None:
    """Put every slot that has no rows yet into the lowest gap that is large enough."""
    starts = dict(kept)
    owned = (range(start, start + needs[slot]) for slot, start in kept.items())
    gaps = _gaps(owned, max(ends.values(), default=0))
    # Those that must be low choose first, then the large ones, which are the hardest to place.
    rest = sorted(needs.keys() - kept.keys(), key=lambda slot: (ends[slot], -needs[slot], slot))
    for slot in rest:
        fitting = (
            number
            for number, gap in enumerate(gaps)
            if min(gap.stop, ends[slot]) - gap.start >= needs[slot]
        )
        number = next(fitting, None)
        if number is None:
            return None
        gap = gaps[number]
        starts[slot], gaps[number] = gap.start, gap[needs[slot] :]
    return starts


def _gaps(owned: Iterable[range], end: int) -> list[range]:
    """The runs of rows before ``end`` that no slot owns."""
    taken = sorted((rows for rows in owned if rows.start < end), key=lambda rows: rows.start)
    edges = [range(0), *taken, range(end, end)]
    gaps = (range(below.stop, min(above.start, end)) for below, above in pairwise(edges))
    return [gap for gap in gaps if gap]
