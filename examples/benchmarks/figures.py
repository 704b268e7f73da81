"""What was measured: figures, a table of them, and what they were measured on."""

from __future__ import annotations

import datetime
import platform
import shlex
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import peft
import psutil
import torch
from rich.table import Table

import lora_slots

OURS = "lora_slots"
Spread = tuple[float, float, float]
_COLUMNS = ("what", "contender", "ms, or as named", "times lora_slots")


@dataclass(frozen=True)
class Figure:
    """One comparison.

    Attributes:
        what: What every contender did.
        times: Of each contender, the median and the first and third quartile, in milliseconds.
        ratios: Of each other contender, how many times as long as lora_slots it took: the same
            three numbers of the ratios within a round, which a change of the machine's speed
            between rounds does not touch.
        curve: The curve that this is a point of, by the name of its axis; empty: of none.
        at: Where on that axis.
        notes: What else was counted, such as graphs.
    """

    what: str
    times: Mapping[str, Spread] = field(default_factory=dict)
    ratios: Mapping[str, Spread] = field(default_factory=dict)
    curve: str = ""
    at: float = 0
    notes: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, what: str, times: Mapping[str, Sequence[float]], **others: Any) -> Self:
        """Summarise the times of every round, ``others`` as they are."""
        ours = times[OURS]
        ratios = {
            name: spread([time / our for time, our in zip(each, ours, strict=True)])
            for name, each in times.items()
            if name != OURS
        }
        spreads = {name: spread(each) for name, each in times.items()}
        return cls(what, spreads, ratios, **others)


def spread(times: Sequence[float]) -> Spread:
    """The median, and the first and the third quartile."""
    if len(times) == 1:
        return (times[0],) * 3
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, low, high


def rows_of(figures: Sequence[Figure]) -> Iterator[tuple[str, ...]]:
    """The rows of a table under ``_COLUMNS``."""
    for figure in figures:
        what = figure.what
        for name, times in figure.times.items():
            ratio = _shown(figure.ratios[name]) if name in figure.ratios else ""
            yield what, name, _shown(times), ratio
            what = ""
        for name, count in figure.notes.items():
            yield what, name, f"{count:.4g}", ""
            what = ""


def _shown(numbers: Spread) -> str:
    middle, low, high = (
        f"{number:.3g}" if number < 1000 else f"{number:.0f}" for number in numbers
    )
    return f"{middle} ({low} to {high})"


def table_of(figures: Sequence[Figure]) -> Table:
    """The figures, for people: one row for each contender."""
    table = Table(title="medians (quartiles)")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in _COLUMNS[:2] else "right")
    for row in rows_of(figures):
        table.add_row(*row)
    return table


def markdown_of(figures: Sequence[Figure], where: Mapping[str, str | int | float]) -> str:
    """The same for the documentation, below what made it and on what it ran."""
    lines = [
        f"`{where['command']}`, {where['date']}. {where['processor']} "
        f"({where['instructions']}), {where['cores']} cores, {where['threads']} threads, "
        f"{where['memory_gb']} GB; device {where['device']}; torch {where['torch']}, "
        f"PEFT {where['peft']}, lora_slots {where['lora_slots']}.",
        "",
        "| " + " | ".join(_COLUMNS) + " |",
        "|---|---|---:|---:|",
    ]
    lines += ["| " + " | ".join(row) + " |" for row in rows_of(figures)]
    return "\n".join(lines) + "\n"


def environment(device: torch.device) -> dict[str, str | int | float]:
    """What the figures of this run were measured on, and by which command."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "processor": processor_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": psutil.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "system": platform.platform(terse=True),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "peft": peft.__version__,
        "lora_slots": lora_slots.__version__,
    }


def processor_name() -> str:
    """The processor's model, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
