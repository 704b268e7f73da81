"""What the command line prints: tables for people, and the same as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lora_slots.inspecting.planning import AdapterRow, Plan, format_option
from lora_slots.report import AdapterInfo, format_range, format_size

_LEAVES = 12
_DETAILS = ("format", "base_model", "ranks", "scaling", "kinds", "dtypes", "nbytes", "features")


def inspection_table(rows: Iterable[AdapterRow]) -> RenderableType:
    """One line per adapter."""
    table = _table("adapter", "format", "rank", "scaling", "layers", "size", "dtype")
    for row in rows:
        table.add_row(Text(row.path, overflow="fold"), *_cells(row.info), _notes(row))
    return table


def inspection_json(rows: Iterable[AdapterRow]) -> dict[str, Any]:
    """The same, every key in every file; those of a file that cannot be used are null."""
    return {"files": [_basics(row) | _details(row.info) for row in rows]}


def plan_table(plan: Plan) -> RenderableType:
    """What to build, and one line per adapter."""
    table = _table("adapter", "fits", "rank", "modules")
    for row in plan.rows:
        fits = Text("yes", "green") if row.error is None else Text("no", "red")
        info = row.info
        sizes = (str(info.max_rank), str(len(info.ranks))) if info is not None else ("", "")
        table.add_row(Text(row.path, overflow="fold"), fits, *sizes, _notes(row))
    return Group(Text(_summary(plan)), table)


def plan_json(plan: Plan) -> dict[str, Any]:
    """The same."""
    return {
        "max_rank": plan.max_rank,
        "num_slots": plan.num_slots,
        "dtype": _name(plan.dtype),
        "options": dict(plan.options),
        "nbytes": plan.nbytes,
        "modules": {
            name: {"in_shape": list(shape.in_shape), "out_features": shape.out_features}
            for name, shape in plan.shapes.items()
        },
        "files": [
            _basics(row) | {"fits": row.error is None} | _needs(row.info) for row in plan.rows
        ],
    }


def check_json(row: AdapterRow, reason: str | None) -> dict[str, Any]:
    """Whether one adapter fits, and why not."""
    return {"path": row.path, "fits": reason is None, "reason": reason} | _needs(row.info)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column)
    table.add_column("notes", overflow="fold")
    return table


def _cells(info: AdapterInfo | None) -> Sequence[Text]:
    if info is None:
        return [Text()] * 6
    cells = (
        info.format,
        format_range(info.ranks.values()),
        format_range(info.scaling.values()),
        ", ".join(f"{count} {kind}" for kind, count in info.kinds.items()),
        format_size(info.nbytes),
        ", ".join(map(_name, info.dtypes)),
    )
    return [Text(cell) for cell in cells]


def _notes(row: AdapterRow) -> Text:
    if row.error is not None:
        return Text(str(row.error), "red")
    notes = []
    if row.info is not None:
        notes += [f"for {row.info.base_model}"] if row.info.base_model else []
        notes += row.info.features
        notes += [f"needs {_options(row.info.needs)}"] if row.info.needs else []
    return Text("; ".join([*notes, *(f"warning: {warning}" for warning in row.warnings)]))


def _summary(plan: Plan) -> str:
    if not plan.max_rank and not plan.options:
        return "none of these adapters can be used"
    wanted = {"max_rank": plan.max_rank, "num_slots": plan.num_slots, **plan.options}
    return (
        f"SlotManager(model, {_options(wanted)}, target_modules=[...])\n"
        f"{len(plan.shapes)} modules: {_leaves(plan.shapes)}\n"
        f"{format_size(plan.nbytes)} of buffers in {_name(plan.dtype)}"
    )


def _leaves(modules: Iterable[str]) -> str:
    """The last parts of the names, each once."""
    leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in modules))
    return ", ".join(leaves[:_LEAVES] + ["..."] * (len(leaves) > _LEAVES))


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(format_option(name, value) for name, value in options.items())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _basics(row: AdapterRow) -> dict[str, Any]:
    error = None
    if row.error is not None:
        error = {"type": type(row.error).__name__, "message": str(row.error)}
    return {"path": row.path, "error": error, "warnings": list(row.warnings)}


def _needs(info: AdapterInfo | None) -> dict[str, Any]:
    if info is None:
        return dict.fromkeys(("max_rank", "modules", "needs"))
    return {"max_rank": info.max_rank, "modules": len(info.ranks), "needs": dict(info.needs)}


def _details(info: AdapterInfo | None) -> dict[str, Any]:
    if info is None:
        return _needs(info) | dict.fromkeys(_DETAILS)
    return _needs(info) | {
        "format": info.format,
        "base_model": info.base_model or None,
        "ranks": _range(info.ranks),
        "scaling": _range(info.scaling),
        "kinds": dict(info.kinds),
        "dtypes": [_name(dtype) for dtype in info.dtypes],
        "nbytes": info.nbytes,
        "features": list(info.features),
    }


def _range(values: Mapping[str, float]) -> dict[str, float] | None:
    return {"min": min(values.values()), "max": max(values.values())} if values else None
