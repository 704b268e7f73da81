"""Slots own rows by need: no two the same row, active ones low, and as few moves as possible."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lora_slots.bank.rows import free_rows, place

TOTAL = 64
slots = st.integers(0, 5)
steps = st.lists(
    st.tuples(slots, st.integers(0, 16), st.sets(slots), st.booleans()), min_size=1, max_size=10
)


@settings(deadline=None, max_examples=200)
@given(steps)
def test_slots_never_share_a_row_and_active_ones_lie_below_the_limit(changes):
    needs: dict[int, int] = {}
    starts: dict[int, int] = {}
    for slot, need, wanted, limited in changes:
        needs = {other: rows for other, rows in needs.items() if other != slot}
        before = {other: start for other, start in starts.items() if other in needs}
        if need:
            needs[slot] = need
        active = wanted & needs.keys()
        limit = sum(needs[slot] for slot in active) if limited else None
        placed = place(needs, before, total=TOTAL, active=active, limit=limit)
        if sum(needs.values()) > TOTAL:
            needs.pop(slot, None)
            starts = before
            continue
        assert placed is not None
        rows = [row for s, start in placed.items() for row in range(start, start + needs[s])]
        assert len(rows) == len(set(rows)) == sum(needs.values())
        assert all(row < TOTAL for row in rows)
        if limit is not None:
            assert all(placed[s] + needs[s] <= limit for s in active)
        free, largest = free_rows([range(s, s + needs[slot]) for slot, s in placed.items()], TOTAL)
        assert free == TOTAL - sum(needs.values())
        assert largest <= free
        starts = placed


def test_what_has_rows_keeps_them_where_that_is_possible():
    assert place({0: 8, 1: 8, 2: 8}, {0: 0, 1: 16}, total=32) == {0: 0, 1: 16, 2: 8}


def test_scattered_rows_are_moved_together_for_what_would_not_fit():
    needs = {0: 8, 1: 8, 2: 16}
    assert free_rows([range(16, 24), range(8)], 32) == (16, 8)
    placed = place(needs, {0: 0, 1: 16}, total=32)
    assert placed is not None
    assert sorted(placed.values()) == [0, 16, 24]


def test_active_slots_go_to_the_lowest_rows():
    assert place({0: 8, 1: 8}, {0: 0, 1: 8}, total=32, active={1}, limit=8) == {0: 8, 1: 0}


def test_what_does_not_fit_has_no_place():
    assert place({0: 16, 1: 17}, {}, total=32) is None


def test_rows_that_are_given_up_are_left_alone_where_there_is_room_beside_them():
    assert place({1: 8}, {}, total=32, given_up={0: range(8)}) == {1: 8}
    assert place({1: 8, 2: 8}, {2: 8}, total=32, given_up={0: range(8)}) == {1: 16, 2: 8}


def test_rows_that_are_given_up_are_taken_where_there_is_no_room_beside_them():
    assert place({1: 8}, {}, total=32, active={1}, limit=8, given_up={0: range(8)}) == {1: 0}
    assert place({1: 16}, {}, total=20, given_up={0: range(8)}) == {1: 0}
