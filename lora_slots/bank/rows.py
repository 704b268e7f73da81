"""Which rows of the buffers each slot owns. Arithmetic only; knows no tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise


def place(
    needs: Mapping[int, int],
    before: Mapping[int, int],
    *,
    total: int,
    active: Collection[int] = (),
    limit: int | None = None,
    given_up: Mapping[int, range] | None = None,
) -> dict[int, int] | None:
    """Choose the first row of every slot, moving as few as possible.

    Args:
        needs: How many rows each slot needs.
        before: The first row of each slot that has rows now; others are new.
        total: How many rows there are.
        active: Slots that contribute.
        limit: Rows of ``active`` slots must come before this one; None: they may be anywhere.
        given_up: The rows of slots that need none any more: nothing is put there if it fits beside.

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
    placed = None
    if given_up:
        sizes = {slot: len(rows) for slot, rows in given_up.items()}
        firsts = {slot: rows.start for slot, rows in given_up.items()}
        placed = _add({**needs, **sizes}, {**kept, **firsts}, ends)
    if placed is not None:
        return {slot: placed[slot] for slot in needs}
    placed = _add(needs, kept, ends)
    if placed is None:
        # Too scattered: active slots first, each as low as it goes.
        placed = _add(needs, {}, ends)
    return placed


def free_rows(needs: Mapping[int, int], starts: Mapping[int, int], total: int) -> tuple[int, int]:
    """How many rows no slot owns, and how many of them lie side by side at most."""
    gaps = [size for _, size in _gaps(needs, starts, total)]
    return sum(gaps), max(gaps, default=0)


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
    # Those that must be low choose first, then the large ones, which are the hardest to place.
    rest = sorted(needs.keys() - kept.keys(), key=lambda slot: (ends[slot], -needs[slot], slot))
    for slot in rest:
        start = next(
            (start for start, size in _gaps(needs, starts, ends[slot]) if size >= needs[slot]),
            None,
        )
        if start is None:
            return None
        starts[slot] = start
    return starts


def _gaps(needs: Mapping[int, int], starts: Mapping[int, int], end: int) -> list[tuple[int, int]]:
    """The runs of rows before ``end`` that no slot owns: the first row and the size of each."""
    taken = sorted((start, start + needs[slot]) for slot, start in starts.items() if start < end)
    edges = [(0, 0), *taken, (end, end)]
    return [
        (stop, min(start, end) - stop)
        for (_, stop), (start, _) in pairwise(edges)
        if min(start, end) > stop
    ]
