"""One graph for any names and, where the batch is dynamic, for any number of rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from routed import ROWS, routed_blocks, tokens
from toys import INDUCTOR_WARNING, CountingBackend, blocks

from lora_slots import RecompileError, SlotManager

NAMES = [["b", "c", None, "a"], [None] * 4, ["a"] * 4, [{"a": 0.5, "b": 0.25}, "c", {}, None]]


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """Dynamo guards on whether gradients are wanted."""
    with torch.no_grad():
        yield


def operations(**options: Any) -> list[tuple[str, str, str]]:
    """What Dynamo makes of one layer with slots: every node and what it takes."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = torch.nn.Sequential(torch.nn.Linear(8, 6))
    SlotManager(model, max_rank=4, **options)
    torch.compile(model, backend=backend, fullgraph=True)(torch.zeros(3, 8))
    (graph,) = graphs
    return [(node.op, str(node.target), str(node.args)) for node in graph.graph.nodes]


PLAIN = ["linear", "linear", "mul", "eq", "mul", "masked_fill_", "addmm"]


def test_without_routing_the_graph_is_as_it_ever_was():
    names = [re.sub(r"<built-in (function|method) (\w+).*", r"\2", o[1]) for o in operations()]
    inputs = [name for name in names if name.startswith("L_")]
    kinds = [name.rstrip("_").rpartition("_")[2] for name in inputs[3:]]
    assert kinds == ["A", "B", "scaling", "slots"]
    assert [n for n in names if n not in (*inputs, "getattr", "output")] == PLAIN
    # With routing, but nothing routed, it is the same.
    assert operations(routing=True) == operations()


@pytest.mark.parametrize("expand", [None, "interleave", "tile"])
def test_other_names_compile_nothing(expand: Any):
    both = routed_blocks()
    backend = CountingBackend()
    model = torch.compile(both.model, backend=backend, fullgraph=True)
    times = 1 if expand is None else 2
    both.manager.route(ROWS, expand=expand)
    model(tokens(4 * times))
    assert backend.graphs == 1
    with both.manager.no_recompile():
        for names in NAMES:
            both.manager.route(names, expand=expand)
            seen = names * times if expand == "tile" else [n for n in names for _ in range(times)]
            both.assert_rows(seen, tokens(4 * times), run=model)
    assert backend.graphs == 1


def test_twin_static_batches_compile_once_for_each_size():
    both = routed_blocks()
    backend = CountingBackend()
    model = torch.compile(both.model, backend=backend, dynamic=False)
    for rows in (2, 3, 4):
        both.manager.route(["a"] * rows)
        model(tokens(rows))
    assert backend.graphs == 3
    both.manager.route(["a"] * 5)
    with pytest.raises(RecompileError), both.manager.no_recompile():
        model(tokens(5))


MIXES: list[Any] = ["a", {"a": 1.0, "b": 0.5}, {"a": 1.0, "b": 0.5, "c": 2.0}, "b"]


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_one_graph_for_any_number_of_adapters_in_a_row(dynamic: bool | None):
    both = routed_blocks()
    backend = CountingBackend()
    model = torch.compile(both.model, backend=backend, fullgraph=True, dynamic=dynamic)
    for row in MIXES:
        both.manager.route([row, None, "c", row])
        both.assert_rows([row, None, "c", row], tokens(4), run=model)
    assert backend.graphs == 1


def test_tables_in_new_memory_serve_any_number_of_adapters_in_a_row_with_one_graph():
    both = routed_blocks()
    both.manager.route(["a"] * 4)
    both.model._apply(torch.clone)  # as .to() does on its way to another device
    backend = CountingBackend()
    model = torch.compile(both.model, backend=backend, fullgraph=True, dynamic=False)
    for row in ["a", *MIXES]:
        both.manager.route([row] * 4)
        both.assert_rows([row] * 4, tokens(4), run=model)
    assert backend.graphs == 1


def test_twin_of_tables_whose_width_dynamo_takes_for_constant_each_is_a_graph(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(torch._dynamo, "maybe_mark_dynamic", lambda tensor, dimensions: None)
    both = routed_blocks()
    backend = CountingBackend()
    model = torch.compile(both.model, backend=backend, fullgraph=True, dynamic=False)
    for row in MIXES:
        both.manager.route([row] * 4)
        model(tokens(4))
    assert backend.graphs == 3


@pytest.mark.parametrize("how", ["dynamic", "marked", "automatic"])
def test_one_graph_for_any_number_of_rows(how: str):
    both = routed_blocks()
    backend = CountingBackend()
    model = torch.compile(
        both.model, backend=backend, fullgraph=True, dynamic=True if how == "dynamic" else None
    )

    def run(x: torch.Tensor) -> torch.Tensor:
        if how == "marked":
            torch._dynamo.mark_dynamic(x, 0)
        return model(x)

    both.manager.route(ROWS)
    both.assert_rows(ROWS, tokens(4), run=run)
    both.manager.route(ROWS[:3])
    both.assert_rows(ROWS[:3], tokens(3), run=run)
    # Without being told, Dynamo finds out with the second size that sizes change.
    assert backend.graphs == (2 if how == "automatic" else 1)
    graphs = backend.graphs
    for names in (["b", None], ["c", "a", "b", None, "a", "c", None], ROWS):
        both.manager.route(names)
        both.assert_rows(names, tokens(len(names)), run=run)
    assert backend.graphs == graphs


def test_going_back_to_set_adapters_and_routing_again_compiles_nothing():
    both = routed_blocks()
    backend = CountingBackend()
    model = torch.compile(both.model, backend=backend, fullgraph=True)
    with both.manager.no_recompile(allow_first=True):
        model(tokens(4))
        both.manager.route(ROWS)
        model(tokens(4))
    assert backend.graphs == 2
    for _ in range(2):
        both.manager.route(None)
        both.manager.set_adapters("b")
        both.assert_rows(["b"] * 4, tokens(4), run=model)
        with both.manager.routed(ROWS):
            both.assert_rows(ROWS, tokens(4), run=model)
    assert backend.graphs == 2


def test_after_a_warmup_of_all_rank_buckets_routes_that_are_seen_and_hidden_compile_nothing():
    both = routed_blocks(rank_buckets=[4], max_rank=16)
    backend = CountingBackend()
    model = torch.compile(both.model, backend=backend, fullgraph=True)
    both.manager.route(ROWS)
    both.manager.warmup(lambda: model(tokens(4)))
    assert backend.graphs == len(both.manager._bank.buckets) == 2
    with both.manager.no_recompile():
        both.assert_rows(ROWS, tokens(4), run=model)
        both.manager.disable_adapters()
        both.assert_rows([None] * 4, tokens(4), run=model)
    assert backend.graphs == 2


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(("names", "rows"), [(ROWS, 3), (["a"], 4), (ROWS, 1), (ROWS, 8)])
def test_another_leading_dimension_is_an_error_there_too(
    fullgraph: bool, dynamic: bool, names: Any, rows: int
):
    both = routed_blocks()
    backend = CountingBackend()
    model = torch.compile(both.model, backend=backend, fullgraph=fullgraph, dynamic=dynamic)
    both.manager.route(names)
    both.assert_rows(names, tokens(len(names)), run=model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"0\.up was given another leading dimension"):
            model(tokens(rows))
    # And no obstacle to the next.
    with both.manager.no_recompile():
        both.assert_rows(names, tokens(len(names)), run=model)


def test_blocks_compiled_one_by_one_share_a_graph():
    both = routed_blocks()
    backend = CountingBackend()
    for block in both.model:
        block.compile(backend=backend, fullgraph=True)
    both.manager.route(ROWS)
    both.assert_rows(ROWS, tokens(4))
    both.manager.route(NAMES[0])
    both.assert_rows(NAMES[0], tokens(4))
    assert backend.graphs == 1


@pytest.mark.compile
@pytest.mark.filterwarnings(INDUCTOR_WARNING)
@pytest.mark.parametrize("dynamic", [True, False])
def test_inductor_gives_a_row_without_adapter_the_compiled_bases_result(dynamic: bool):
    both = routed_blocks(alpha=1)
    base = torch.compile(blocks(), dynamic=dynamic)
    model = torch.compile(both.model, dynamic=dynamic)
    for names in (ROWS, NAMES[0], NAMES[3]):
        both.manager.route(names)
        y = model(tokens(4))
        expected = base(tokens(4))
        eager = both.model(tokens(4))
        torch.testing.assert_close(y, eager, rtol=1e-5, atol=1e-4)
        for number, row in enumerate(names):
            if not row:
                assert torch.equal(y[number], expected[number])
