"""The commands of ``lora-slots``: look at files, print a table or JSON, exit with a status."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console, RenderableType
from rich.progress import track

from lora_slots.cli import rendering
from lora_slots.inspecting.planning import AdapterRow, find_adapters, look_at, plan, why_refused

app = typer.Typer(
    name="lora-slots",
    help="What LoRA adapters are, and what slots they need. Only headers are read.",
    epilog="Exit status: 0 if every adapter can be used, 1 if one cannot, 2 if called wrongly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


_UNLIMITED = 100_000


class Dtype(enum.StrEnum):
    """What slots compute in."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


Paths = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH...",
        help="Adapters: files, PEFT folders, folders of either, or hub ids.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def inspect(paths: Paths, as_json: AsJson = False) -> None:
    """Show the format, base model, ranks, scalings, layers and unusual features of adapters."""
    rows = _look_at_all(paths, quiet=as_json)
    _print(rendering.inspection_json(rows) if as_json else rendering.inspection_table(rows))
    _exit(rows)


@app.command("plan")
def plan_(
    paths: Paths,
    num_slots: Annotated[
        int, typer.Option(min=1, help="How many adapters are loaded at a time.")
    ] = 1,
    dtype: Annotated[
        Dtype, typer.Option(help="What the base model computes in, and so the slots.")
    ] = Dtype.bfloat16,
    as_json: AsJson = False,
) -> None:
    """Find the one SlotManager that all these adapters fit into, and which do not fit."""
    rows = _look_at_all(paths, quiet=as_json)
    found = plan(rows, num_slots=num_slots, dtype=getattr(torch, dtype))
    _print(rendering.plan_json(found) if as_json else rendering.plan_table(found))
    _exit(found.rows)


@app.command()
def check(
    path: Annotated[str, typer.Argument(help="An adapter: a file, a PEFT folder or a hub id.")],
    max_rank: Annotated[int, typer.Option(min=1, help="The largest rank of the slots.")],
    dora: Annotated[bool, typer.Option("--dora", help="The slots are made for DoRA.")] = False,
    bias: Annotated[bool, typer.Option("--bias", help="The slots are made for a bias.")] = False,
    full_module: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A module that may be replaced; may be repeated."),
    ] = None,
    token_rows: Annotated[
        int, typer.Option(min=0, help="How many trained rows of embeddings a slot holds.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Say whether slots of this size would refuse an adapter, and why; exit with 1 if so."""
    row = look_at(path)
    options = {
        "dora": dora,
        "bias": bias,
        "full_modules": tuple(full_module or ()),
        "token_rows": token_rows,
    }
    reason = why_refused(row.info, max_rank, options) if row.info is not None else str(row.error)
    if as_json:
        _print(rendering.check_json(row, reason))
    else:
        _print(f"refused: {reason}" if reason else f"fits: {row.info}")
    raise typer.Exit(1 if reason else 0)


def _look_at_all(paths: Iterable[str], *, quiet: bool) -> list[AdapterRow]:
    found = [adapter for path in paths for adapter in find_adapters(path)]
    errors = Console(stderr=True)
    hidden = quiet or not errors.is_terminal
    steps = track(found, "Reading headers", console=errors, disable=hidden, transient=True)
    return [look_at(path) for path in steps]


def _print(content: RenderableType | dict[str, Any]) -> None:
    if isinstance(content, dict):
        print(json.dumps(content, indent=2))
        return
    console = Console(highlight=False, markup=False)
    if console.is_terminal:
        console.print(content)
        return
    # A line in a file or a pipe has no end; one row is one line there.
    console.width = _UNLIMITED
    with console.capture() as captured:
        console.print(content)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _exit(rows: Iterable[AdapterRow]) -> NoReturn:
    raise typer.Exit(1 if any(row.error is not None for row in rows) else 0)
