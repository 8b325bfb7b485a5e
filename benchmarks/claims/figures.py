"""Figures of what was trained. Colours are Okabe and Ito's; shapes and lines say the same in grey print."""

from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from .tasks import TASKS
from .training import LENGTHS, PLAN, SHORT, on_patches, values
from .units import Record
from .variants import VARIANTS

Records = Mapping[str, Record]
LOOKS = {
    "1 head": ("#0072B2", "o", "-"),
    "2 heads": ("#56B4E9", "v", "--"),
    "8 heads": ("#D55E00", "s", "-"),
    "additive": ("#009E73", "^", "-."),
    "feed-forward": ("#CC79A7", "D", ":"),
    "scalar": ("#000000", "x", ":"),
}


def draw_kinds(records: Records, path: Path) -> None:
    """A panel for each task: kinds of attention from top to bottom, a mark for each seed and a line at the mean."""
    figure, panels = _figure(11, 3.6, len(PLAN), sharey=True)
    for panel, task in zip(panels, PLAN, strict=True):
        for row, variant in enumerate(VARIANTS):
            found = values(records, task, variant)
            scaled = [value if task == "text" else 100 * value for value in found]
            color = "#D55E00" if "head" in variant else "#0072B2"
            marker = "s" if "head" in variant else "o"
            panel.plot(scaled, [row] * len(scaled), marker, color=color, ms=5, mfc="none")
            panel.plot([mean(scaled)] * 2, [row - 0.32, row + 0.32], color=color, lw=2)
        panel.set_title(task)
        panel.set_xlabel("bits a byte (less is better)" if task == "text" else "right, %")
        panel.grid(axis="x", color="#dddddd")
        panel.set_axisbelow(True)
    panels[0].set_yticks(range(len(VARIANTS)), list(VARIANTS))
    panels[0].invert_yaxis()
    _save(figure, path)


def draw_lengths(records: Records, path: Path) -> None:
    """Right answers against length, up to lengths that training had not."""
    tasks = ("recall", "recall of two", "copy")
    figure, panels = _figure(10, 3.6, len(tasks), sharey=True)
    for panel, task in zip(panels, tasks, strict=True):
        low, high = TASKS[task].trained
        panel.axvspan(low, high, color="#eeeeee")
        for kind, (color, marker, line) in LOOKS.items():
            lengths = TASKS[task].tested
            middle = [100 * mean(values(records, task, kind, length)) for length in lengths]
            panel.plot(lengths, middle, line, marker=marker, color=color, label=kind, ms=5, mfc="none")
        panel.set_xscale("log", base=2)
        panel.set_xticks(TASKS[task].tested, [str(n) for n in TASKS[task].tested])
        panel.minorticks_off()
        panel.set_title(task)
        panel.set_xlabel("pairs" if "recall" in task else "bytes")
        panel.grid(axis="y", color="#dddddd")
        panel.set_axisbelow(True)
    panels[0].set_ylabel("right, %")
    panels[0].set_ylim(0, 102)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    _save(figure, path)


def draw_order(records: Records, path: Path) -> None:
    """Digits by the number of patches, with and without their places."""
    figure, (panel,) = _figure(6, 3.4, 1)
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
    panel.grid(axis="y", color="#dddddd")
    figure.legend(loc="outside right center", frameon=False)
    _save(figure, path)


def _figure(width: float, height: float, columns: int, sharey: bool = False) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns, sharey=sharey, squeeze=False)[0]


def _save(figure: Any, path: Path) -> None:
    import matplotlib

    # the same bytes for the same numbers: no date, and names of its parts that do not change
    with matplotlib.rc_context({"svg.hashsalt": "headwise", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
