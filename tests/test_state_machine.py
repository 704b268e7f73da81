"""Random sequences of calls against a plain dict of adapters, computed in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from toys import (
    TOY_MODULES,
    Pairs,
    Snapshot,
    pairs,
    places,
    slot_buffers,
    tensors_of,
    toy,
    toy_input,
)

from lora_slots import (
    AdapterFileError,
    NoFreeSlotError,
    RankTooLargeError,
    RawAdapter,
    SlotManager,
    TargetMismatchError,
    read_adapter,
)

MAX_RANK = 6
SLOTS = 3
NAMES = ("a", "b", "a.b", "c")
ranks = st.dictionaries(st.sampled_from(TOY_MODULES), st.integers(1, MAX_RANK), min_size=1)
alphas = st.sampled_from([1.0, 8.0, -4.0, 0.5, 0.0])
weights = st.sampled_from([0.0, 0.5, 1.0, -1.5, 3.0])
seeds = st.integers(0, 50)


@dataclass(frozen=True)
class Loaded:
    """What the plain model knows of an adapter."""

    pairs: Pairs
    alpha: float
    weight: float = 1.0
    selected: bool = True


def raw(parts: Pairs, alpha: float) -> RawAdapter:
    config = {
        "r": 1,
        "lora_alpha": alpha,
        "rank_pattern": {f"^{module}": A.shape[0] for module, (A, _) in parts.items()},
    }
    return read_adapter(tensors_of(parts), config)


def expected(adapters: list[Loaded]) -> torch.Tensor:
    """Base plus every adapter's weight * alpha / r * B A x, in float64."""
    x = toy_input().double()
    model = toy().double()
    out = model(x).detach()
    for adapter in adapters:
        for module, (A, B) in adapter.pairs.items():
            number = TOY_MODULES.index(module)
            scaling = adapter.weight * adapter.alpha / A.shape[0]
            out[number // 2, number % 2] += scaling * (x @ A.double().T @ B.double().T)
    return out


class Calls(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model = toy()
        self.manager = SlotManager(self.model, max_rank=MAX_RANK, num_slots=SLOTS)
        self.places = places(self.model)
        self.loaded: dict[str, Loaded] = {}
        self.enabled = True

    @rule(
        name=st.sampled_from(NAMES),
        ranks=ranks,
        alpha=alphas,
        seed=seeds,
        weight=st.none() | weights,
        activate=st.sampled_from([None, True, False]),
    )
    def load(self, name, ranks, alpha, seed, weight, activate):
        parts = pairs(ranks, seed=seed)
        if name not in self.loaded and len(self.loaded) == SLOTS:
            with pytest.raises(NoFreeSlotError):
                self.manager.load(raw(parts, alpha), name, weight=weight, activate=activate)
            return
        report = self.manager.load(raw(parts, alpha), name, weight=weight, activate=activate)
        assert report.rank == max(ranks.values())
        assert report.modules == tuple(module for module in TOY_MODULES if module in ranks)
        new = name not in self.loaded
        old = self.loaded.get(name, Loaded({}, 0.0))
        becomes_only = activate or (new and activate is None)
        if becomes_only:
            self.loaded = {n: replace(a, selected=False) for n, a in self.loaded.items()}
        self.loaded[name] = Loaded(
            parts,
            alpha,
            old.weight if weight is None else weight,
            bool(becomes_only or (activate is None and old.selected)),
        )

    @rule(
        name=st.sampled_from(NAMES),
        seed=seeds,
        flaw=st.sampled_from([RankTooLargeError, TargetMismatchError, AdapterFileError]),
    )
    def load_a_bad_one(self, name, seed, flaw):
        parts = pairs(dict.fromkeys(TOY_MODULES, 3), seed=seed)
        last = TOY_MODULES[-1]
        A, B = parts[last]
        if flaw is RankTooLargeError:
            parts |= pairs({last: MAX_RANK + 1})
        elif flaw is TargetMismatchError:
            parts[last] = (A, B[:3])
        else:
            B[-1, -1] = math.nan
        if name not in self.loaded and len(self.loaded) == SLOTS:
            flaw = NoFreeSlotError
        before = Snapshot.of(self.manager, self.model)
        with pytest.raises(flaw):
            self.manager.load(raw(parts, 8.0), name, weight=2.0)
        before.assert_unchanged(self.manager, self.model)

    @precondition(lambda self: self.loaded)
    @rule(data=st.data())
    def unload(self, data):
        name = data.draw(st.sampled_from(sorted(self.loaded)))
        self.manager.unload(name)
        del self.loaded[name]

    @rule(data=st.data())
    def set_adapters(self, data):
        chosen = data.draw(st.lists(st.sampled_from([*self.loaded, None]), unique=True))
        names = [name for name in chosen if name is not None]
        given_weights = data.draw(st.none() | st.lists(weights, min_size=len(names)))
        each = None if given_weights is None else given_weights[: len(names)]
        self.manager.set_adapters(names, each)
        new = dict(zip(names, each or [1.0] * len(names), strict=True))
        self.loaded = {
            name: replace(a, selected=name in new, weight=new.get(name, a.weight))
            for name, a in self.loaded.items()
        }

    @precondition(lambda self: self.loaded)
    @rule(data=st.data(), weight=weights)
    def set_weight(self, data, weight):
        name = data.draw(st.sampled_from(sorted(self.loaded)))
        self.manager.set_weight(name, weight)
        self.loaded[name] = replace(self.loaded[name], weight=weight)

    @rule(enabled=st.booleans())
    def enable_or_disable(self, enabled):
        (self.manager.enable_adapters if enabled else self.manager.disable_adapters)()
        self.enabled = enabled

    @rule()
    def check_writes_nothing(self):
        before = Snapshot.of(self.manager, self.model)
        if self.loaded:
            self.manager.check(raw(pairs({TOY_MODULES[0]: 2}), 1.0), next(iter(self.loaded)))
        before.assert_unchanged(self.manager, self.model)

    @invariant()
    def names_agree(self):
        assert self.manager.loaded_adapters == tuple(self.loaded)
        active = tuple(n for n, a in self.loaded.items() if a.selected and a.weight != 0)
        assert self.manager.active_adapters == active

    @invariant()
    def the_output_is_the_plain_models(self):
        active = [a for a in self.loaded.values() if self.enabled and a.selected and a.weight]
        output = self.model(toy_input())
        if not active:
            assert torch.equal(output, toy()(toy_input()))
        torch.testing.assert_close(output.double(), expected(active), rtol=1e-4, atol=1e-4)

    @invariant()
    def buffers_never_move(self):
        assert places(self.model) == self.places

    @invariant()
    def rows_that_no_adapter_uses_are_zero(self):
        slots = {s.adapter_name: s.slot for s in self.manager.status().slots if s.adapter_name}
        used = {
            (module, slots[name] * MAX_RANK + row)
            for name, adapter in self.loaded.items()
            for module, (A, _) in adapter.pairs.items()
            for row in range(A.shape[0])
        }
        for name, buffer in slot_buffers(self.model).items():
            module, _, kind = name.partition(".lora_slots.")
            rows = buffer.T if kind == "scaling" else buffer
            for row in rows.count_nonzero(dim=1).nonzero().flatten().tolist():
                assert (module, row) in used, (name, row)


TestCalls = Calls.TestCase
TestCalls.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)


@settings(max_examples=30, deadline=None)
@given(ranks=ranks, alpha=alphas, weight=weights, seed=seeds, extra=st.integers(0, 20))
def test_padded_equals_unpadded(ranks, alpha, weight, seed, extra):
    parts = pairs(ranks, seed=seed)
    outputs = []
    for max_rank in (max(ranks.values()), max(ranks.values()) + extra):
        model = toy()
        manager = SlotManager(model, max_rank=max_rank)
        report = manager.load(raw(parts, alpha), weight=weight)
        assert report.scaling == {module: alpha / ranks[module] for module in report.modules}
        outputs.append(model(toy_input()))
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    reference = expected([Loaded(parts, alpha, weight)])
    torch.testing.assert_close(outputs[1].double(), reference, rtol=1e-4, atol=1e-4)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(ranks, alphas, seeds), min_size=1, max_size=4), ranks, alphas, seeds)
def test_what_was_loaded_before_leaves_no_trace(history, last, alpha, seed):
    used, fresh = toy(), toy()
    manager = SlotManager(used, max_rank=MAX_RANK)
    for earlier, earlier_alpha, earlier_seed in history:
        manager.load(raw(pairs(earlier, seed=earlier_seed), earlier_alpha))
    manager.load(raw(pairs(last, seed=seed), alpha))
    SlotManager(fresh, max_rank=MAX_RANK).load(raw(pairs(last, seed=seed), alpha))
    assert all(
        torch.equal(buffer, slot_buffers(fresh)[name])
        for name, buffer in slot_buffers(used).items()
    )
    assert torch.equal(used(toy_input()), fresh(toy_input()))
