"""Draw figures: a panel for each curve, and one of bars for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.figures import OURS, Figure

# Of the contenders that come up most, so that one colour means one of them in all pictures.
_COLORS = {OURS: "C0", "lora_slots, no rank_buckets": "C9", "base model": "C7"}
_BAR = 0.24  # inches
_SPAN = 10  # from here on, an axis is logarithmic


def plot(figures: Sequence[Figure], path: Path, caption: str) -> None:
    """Write a picture of ``figures`` with a line below it.

    Args:
        figures: What to draw; those without times are left out.
        path: Where to; its ending chooses the format, such as ``.svg``.
        caption: What the figures were measured on.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    # The same figures give the same file.
    mpl.rcParams |= {"svg.hashsalt": "lora_slots", "font.size": 8, "svg.fonttype": "none"}
    from matplotlib import pyplot

    timed = [figure for figure in figures if figure.times]
    panels: list[tuple[str, list[Figure]]] = [
        (name, list(members))
        for name, members in groupby(
            sorted(timed, key=lambda figure: figure.curve), lambda figure: figure.curve
        )
    ]
    heights = [2.4 if name else _BAR * _bars(members) + 0.7 for name, members in panels]
    chart, axes = pyplot.subplots(
        len(panels), 1, figsize=(7.5, sum(heights) + 0.3), height_ratios=heights, squeeze=False
    )
    colors = dict(_COLORS)
    for (name, members), (panel,) in zip(panels, axes, strict=True):
        for figure in members:
            for contender in figure.times:
                colors.setdefault(contender, f"C{1 + len(colors) % 6}")
        (_draw_curve if name else _draw_bars)(panel, members, colors)
    chart.supxlabel(caption, fontsize=7)
    chart.tight_layout()
    metadata = {"Date": None} if path.suffix == ".svg" else None
    chart.savefig(path, metadata=metadata)
    pyplot.close(chart)


def _bars(figures: Sequence[Figure]) -> int:
    return sum(len(figure.times) + 1 for figure in figures)


def _draw_bars(panel: Any, figures: Sequence[Figure], colors: dict[str, str]) -> None:
    """A bar for each contender, with its quartiles, on a logarithmic axis."""
    position, labels = 0, {}
    for figure in figures:
        labels[position] = figure.what
        position += 1
        for name, (middle, low, high) in figure.times.items():
            error = [[middle - low], [high - middle]]
            panel.barh(position, middle, xerr=error, color=colors[name], error_kw={"lw": 0.6})
            panel.annotate(
                f" {middle:.3g}", (high, position), va="center", fontsize=7, annotation_clip=False
            )
            labels[position] = name
            position += 1
    panel.set_yticks(list(labels), list(labels.values()), fontsize=7)
    titles = {figure.what for figure in figures}
    for tick in panel.get_yticklabels():
        tick.set_fontweight("bold" if tick.get_text() in titles else "normal")
    panel.tick_params(axis="y", length=0)
    panel.invert_yaxis()
    panel.set_xscale("log")
    times = [time[0] for figure in figures for time in figure.times.values()]
    panel.set_xlim(min(times) / 3, max(times) * 3)
    panel.set_xlabel("milliseconds, median and quartiles")


def _draw_curve(panel: Any, figures: Sequence[Figure], colors: dict[str, str]) -> None:
    """A line for each contender, with its quartiles as a band."""
    for name in dict.fromkeys(name for figure in figures for name in figure.times):
        points = [(f.at, *f.times[name]) for f in figures if name in f.times]
        at, middle, low, high = zip(*sorted(points), strict=True)
        panel.plot(at, middle, marker="o", markersize=3, lw=1, color=colors[name], label=name)
        panel.fill_between(at, low, high, color=colors[name], alpha=0.15, lw=0)
    places = sorted({figure.at for figure in figures})
    panel.set_xscale("symlog" if places[0] == 0 else "log", base=2)
    panel.set_xticks(places, [f"{place:g}" for place in places])
    panel.minorticks_off()
    times = [time[0] for figure in figures for time in figure.times.values()]
    if max(times) > _SPAN * min(times):
        panel.set_yscale("log")
    else:
        panel.set_ylim(bottom=0)
    panel.set_xlabel(figures[0].curve)
    panel.set_ylabel("milliseconds")
    panel.set_title(f"{figures[-1].what.split(',')[0]}, by {figures[0].curve}", fontsize=8)
    panel.legend(fontsize=6)
