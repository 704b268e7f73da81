"""Room is made by the fewest that may go, or not at all. Names and numbers only."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_slots import NoFreeSlotError
from lora_slots.eviction import Room
from lora_slots.roster import Roster
from lora_slots.routing import Routing

TOTAL = 64
NAMES = "abcdefgh"
steps = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.integers(0, 3).map(lambda need: 8 * need),
        st.sampled_from([None, True, False]),
        st.booleans(),
        st.sampled_from(["", "select", "route", "deselect", "routed"]),
    ),
    max_size=12,
)


def fits(roster: Roster, needs: dict[str, int], wanted: dict[str, int]) -> bool:
    together = {name: needs[name] for name in roster.entries} | wanted
    return len(together) <= roster.num_slots and sum(together.values()) <= TOTAL


@settings(deadline=None, max_examples=300)
@given(steps, st.dictionaries(st.sampled_from(NAMES), st.integers(0, 32), min_size=1, max_size=2))
def test_who_goes_may_go_and_must(history, wanted):
    roster, needs = Roster(5), {}
    for name, need, pin, activate, then in history:
        if not fits(roster, needs, {name: need}):
            continue
        roster = roster.with_loaded(name, activate=activate, pin=pin)
        needs[name] = need
        if then in ("select", "deselect"):
            roster = roster.with_selected([name] if then == "select" else [], None)
        if then in ("route", "routed"):
            roster = roster.with_routing(Routing.of([name]), nested=then == "routed")
        assert sorted(roster.recent) == sorted(roster.entries)
    rows, start = {}, 0
    for name, entry in roster.entries.items():
        rows[entry.slot] = range(start, start + needs[name])
        start += needs[name]
    room = Room(roster, TOTAL, rows)
    may_go = {n for n in roster.entries if n not in wanted and not roster.stays_for(n)}
    left = roster
    for name in may_go:
        left = left.without(name)
    if not fits(left, needs, wanted):
        with pytest.raises(NoFreeSlotError):
            room.made_for(wanted, evict=True)
        return
    after, evicted = room.made_for(wanted, evict=True)
    assert set(evicted) <= may_go
    assert roster.entries.keys() - after.entries.keys() == set(evicted)
    assert fits(after, needs, wanted)
    for name in evicted:
        assert not fits(after, needs, wanted | {name: needs[name]})
    assert list(evicted) == sorted(evicted, key=roster.recent.index)
    if not evicted:
        assert room.made_for(wanted, evict=False) == (roster, ())
    else:
        with pytest.raises(NoFreeSlotError):
            room.made_for(wanted, evict=False)


def test_several_are_told_together_what_they_need():
    roster = Roster(3).with_loaded("a", pin=True).with_loaded("b", activate=False)
    room = Room(roster, 24, {0: range(8), 1: range(16, 24)})
    assert room.made_for({"c": 8, "b": 8}, evict=False) == (roster, ())
    with pytest.raises(NoFreeSlotError) as raised:
        room.made_for({"c": 8, "d": 8}, evict=False)
    assert str(raised.value).startswith(
        "adapters 'c', 'd' need 2 free slots, but 2 of 3 are taken: 'a', 'b'; unload one"
    )
    assert str(raised.value).endswith("num_slots=4")
    assert room.made_for({"c": 8, "d": 8}, evict=True)[1] == ("b",)
