"""The example that serves a trace of requests runs, agrees with PEFT, and adds up."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import trace_requests
from benchmarks.figures import OURS
from benchmarks.models import Shape

SMALL = Shape(layers=1, hidden=32, mlp=48, dtype=torch.float32)
REQUESTS = 80
ARGUMENTS = ["--adapters", "12", "--requests", str(REQUESTS), "--slots", "3", "--cached", "5"]


@pytest.fixture(autouse=True)
def compare_every_output(monkeypatch):
    monkeypatch.setattr(trace_requests, "SAMPLE", 1)


def test_a_tiny_trace_is_served_by_both_alike(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    with trace_requests.console.capture() as capture:
        outcomes = trace_requests.main([*ARGUMENTS, "--json", str(path)], SMALL)
    ours, theirs = outcomes[OURS], outcomes[trace_requests.THEIRS]
    assert ours.tiers.total() == theirs.tiers.total() == REQUESTS
    assert ours.tiers["host cache"] > 0
    assert ours.tiers["disk"] > 0
    assert theirs.tiers["host cache"] == 0
    # Both keep the adapters used last; PEFT begins with one that nobody asked for.
    assert abs(ours.tiers["slot"] - theirs.tiers["slot"]) <= 1
    text = capture.get()
    assert "share from host cache" in text
    assert "p99 to active, ms" in text
    written = json.loads(path.read_text())
    assert written["environment"]["torch"] == torch.__version__
    assert written["environment"]["processor"]
    assert written["trace"]["adapters"] == 12
    shares = written["figures"][OURS]
    assert sum(shares[f"share from {tier}"] for tier in trace_requests.TIERS) == pytest.approx(1)


def test_slots_hold_what_was_used_last(monkeypatch) -> None:
    seen: list[tuple[str, str]] = []
    serve = trace_requests.serve

    def noting(contender, name, x, outcome) -> None:
        tier = contender.tier(name)
        serve(contender, name, x, outcome)
        if isinstance(contender, trace_requests.Slots):
            seen.append((name, tier))

    monkeypatch.setattr(trace_requests, "serve", noting)
    with trace_requests.console.capture():
        trace_requests.main(ARGUMENTS, SMALL)
    kept: OrderedDict[str, None] = OrderedDict()
    for name, tier in seen:
        assert (tier == "slot") == (name in kept)
        kept[name] = None
        kept.move_to_end(name)
        if len(kept) > 3:
            kept.popitem(last=False)
