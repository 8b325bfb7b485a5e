"""Figures of what was trained."""

from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from .drawing import BLACK, BLUE, GREEN, GRID, PINK, RED, SKY, figure, save
from .tasks import TASKS
from .training import LENGTHS, PLAN, SHORT, on_patches, values
from .units import Record
from .variants import VARIANTS

Records = Mapping[str, Record]
LOOKS = {
    "1 head": (BLUE, "o", "-"),
    "2 heads": (SKY, "v", "--"),
    "8 heads": (RED, "s", "-"),
    "additive": (GREEN, "^", "-."),
    "feed-forward": (PINK, "D", ":"),
    "scalar": (BLACK, "x", (0, (5, 1))),
}


def draw_kinds(records: Records, path: Path) -> None:
    """A panel for each task: kinds of attention from top to bottom, a mark for each seed and a line at the mean."""
    canvas, panels = _panels(11, 3.6, len(PLAN), sharey=True)
    for panel, task in zip(panels, PLAN, strict=True):
        for row, variant in enumerate(VARIANTS):
            found = values(records, task, variant)
            scaled = [value if task == "text" else 100 * value for value in found]
            color = RED if "head" in variant else BLUE
            marker = "s" if "head" in variant else "o"
            panel.plot(scaled, [row] * len(scaled), marker, color=color, ms=5, mfc="none")
            panel.plot([mean(scaled)] * 2, [row - 0.32, row + 0.32], color=color, lw=2)
        panel.set_title(task)
        panel.set_xlabel("bits a byte (less is better)" if task == "text" else "right, %")
        panel.grid(axis="x", color=GRID)
        panel.set_axisbelow(True)
    panels[0].set_yticks(range(len(VARIANTS)), list(VARIANTS))
    panels[0].invert_yaxis()
    save(canvas, path)


def draw_lengths(records: Records, path: Path) -> None:
    """Right answers against length, up to lengths that training had not."""
    tasks = ("recall", "recall of two", "copy")
    canvas, panels = _panels(10, 3.6, len(tasks), sharey=True)
    for panel, task in zip(panels, tasks, strict=True):
        low, high = TASKS[task].trained
        panel.axvspan(low, high, color="#eeeeee")
        for kind, (color, marker, line) in LOOKS.items():
            lengths = TASKS[task].tested
            middle = [100 * mean(values(records, task, kind, length)) for length in lengths]
            panel.plot(lengths, middle, linestyle=line, marker=marker, color=color, label=kind, ms=5, mfc="none")
        panel.set_xscale("log", base=2)
        panel.set_xticks(TASKS[task].tested, [str(n) for n in TASKS[task].tested])
        panel.minorticks_off()
        panel.margins(x=0.1)  # the last label is wider than its mark
        panel.set_title(task)
        panel.set_xlabel("pairs" if "recall" in task else "bytes")
        panel.grid(axis="y", color=GRID)
        panel.set_axisbelow(True)
    panels[0].set_ylabel("right, %")
    panels[0].set_ylim(0, 102)
    canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    save(canvas, path)


def draw_order(records: Records, path: Path) -> None:
    """Digits by the number of patches, with and without their places."""
    canvas, (panel,) = _panels(6, 3.4, 1)
    for kind in SHORT:
        color, marker, _ = LOOKS[kind]
        for places, line in ((True, "-"), (False, "--")):
            found = [[100 * value for value in on_patches(records, n, places, kind)] for n in LENGTHS]
            label = f"{kind}, {'with places' if places else 'as a bag'}"
            panel.plot(LENGTHS, list(map(mean, found)), line, marker=marker, color=color, label=label, mfc="none")
            for length, each in zip(LENGTHS, found, strict=True):
                panel.plot([length] * len(each), each, marker, color=color, ms=3, alpha=0.5)
    panel.set_xscale("log", base=2)
    panel.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
    panel.minorticks_off()
    panel.set_xlabel("patches of an image")
    panel.set_ylabel("right, %")
    panel.grid(axis="y", color=GRID)
    canvas.legend(loc="outside right center", frameon=False)
    save(canvas, path)


def _panels(width: float, height: float, columns: int, sharey: bool = False) -> tuple[Any, Any]:
    canvas = figure(width, height)
    return canvas, canvas.subplots(1, columns, sharey=sharey, squeeze=False)[0]
