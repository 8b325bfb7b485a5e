"""Read results: ``python -m benchmarks.report FILE [OTHER] [--plot FIGURE]``.

One file gives the table of ratios, with every loss; with ``--plot`` the same as a figure. Two files are
compared, measurement by measurement.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from .run import ceiling_line, spread, told

OURS = "headwise"
# Okabe and Ito's colours, which colour-blind readers can tell apart; the shapes say the same in grey print
LOOKS = [
    ("#56B4E9", "P"),
    ("#0072B2", "o"),
    ("#D55E00", "s"),
    ("#009E73", "^"),
    ("#CC79A7", "D"),
    ("#000000", "x"),
    ("#E69F00", "v"),
    ("#0072B2", "*"),
    ("#D55E00", "X"),
    ("#009E73", "<"),
    ("#CC79A7", ">"),
    ("#56B4E9", "h"),
    ("#E69F00", "p"),
]
SAME = ("processor", "cores", "threads", "instructions", "system", "python", "torch", "headwise", "commit")
LATER = {"device": "cpu", "cuda": None, "triton": None}  # what older files do not say, and what it was there

Record = dict[str, Any]


@dataclass(frozen=True)
class Ratio:
    """How much longer another took than headwise: above 1 headwise is faster.

    Args:
        case: Name of the case.
        competitor: The other.
        middle: Median over the rounds, in which both ran.
        low: Lower quartile.
        high: Upper quartile.
    """

    case: str
    competitor: str
    middle: float
    low: float
    high: float


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 0, or 2 for files that hold no results, or 1 when a run is void."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, help="a file that benchmarks.run wrote")
    parser.add_argument("other", type=Path, nargs="?", help="a later one to compare it with")
    parser.add_argument("--plot", type=Path, metavar="FIGURE", help="draw the ratios of FILE: .png, .svg or .pdf")
    options = parser.parse_args(argv)
    try:
        runs = [read(path) for path in (options.file, options.other) if path is not None]
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(table(runs[0]) if options.other is None else comparison(*runs))
    if options.plot is not None:
        draw(runs[0], options.plot)
        print(f"Drawn: {options.plot}")
    return 1 if any(verdict(run) is None or verdict(run)["void"] for run in runs) else 0  # type: ignore[index]


def read(path: Path) -> list[Record]:
    """The records of a file.

    Raises:
        ValueError: When a line of it is no record, or it has no measurement.
    """
    records = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            record = json.loads(text)
            known = record["kind"] in ("measurement", "ceiling", "self")
        except (ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise ValueError(f"{path}, line {number}: not a record of a benchmark.")
        records.append(record)
    if not any(r["kind"] == "measurement" for r in records):
        raise ValueError(f"{path} holds no measurement.")
    return records


def verdict(run: Iterable[Record]) -> Record | None:
    """The run's comparison with itself, its last record; None where the run was broken off."""
    return next((r for r in run if r["kind"] == "self"), None)


def measurements(run: Iterable[Record]) -> dict[str, dict[str, Record]]:
    """The measurements, by case and competitor."""
    found: dict[str, dict[str, Record]] = defaultdict(dict)
    for record in run:
        if record["kind"] == "measurement":
            found[record["case"]][record["competitor"]] = record
    return dict(found)


def ratios(run: Iterable[Record]) -> list[Ratio]:
    """Time of each competitor over the time of headwise, where both were timed."""
    found = []
    for case, entries in measurements(run).items():
        ours = entries.get(OURS, {}).get("samples_s")
        for name, entry in entries.items():
            if name != OURS and ours and entry["samples_s"]:
                # sample i of both is of one round, so what slowed a round down cancels
                pairs = [theirs / our for theirs, our in zip(entry["samples_s"], ours, strict=False)]
                found.append(Ratio(case, name, median(pairs), *spread(pairs)))
    return found


def table(run: list[Record]) -> str:
    """The table of ratios, what was not timed, every loss, and the geometric means."""
    parts = [heading(run)]
    every, known = ratios(run), measurements(run)
    for level in ("attention", "module"):
        cases = [c for c, entries in known.items() if next(iter(entries.values()))["level"] == level]
        names = list(dict.fromkeys(n for c in cases for n in known[c] if n != OURS))
        if not cases:
            continue
        rows = [[level, "headwise ms", "of matmul", "of memory", *names]]
        for case in cases:
            ours = known[case].get(OURS)
            found = {r.competitor: r for r in every if r.case == case}
            cells = [_cell(found.get(name), known[case].get(name)) for name in names]
            if ours is None or ours["median_s"] is None:
                rows.append([case, "not timed", "", "", *cells])
                continue
            shares = [f"{ours[key]:.2f}" for key in ("share_of_matmul", "share_of_memory")]
            rows.append([case, f"{ours['median_s'] * 1e3:.3f}", *shares, *cells])
        means = []
        for name in names:
            some = [r.middle for r in every if r.competitor == name and r.case in cases]
            means.append(f"{geometric_mean(some):.2f}" if some else "")
        parts.append(_aligned([*rows, ["geometric mean", "", "", "", *means]]))
    parts.append(
        "Ratios are the other's time over headwise's, so above 1 headwise is faster;\n"
        "< marks a loss, ~ one whose quartiles hold 1, ≠ a wrong result, – one that was not timed."
    )
    lost = [r for r in every if r.middle < 1]
    parts.append(
        "\n".join(
            [f"Losses: {len(lost)} of {len(every)}"]
            + [f"  {r.case}  {r.competitor}: {r.middle:.3f} ({r.low:.3f} to {r.high:.3f})" for r in lost]
        )
    )
    out: dict[str, list[str]] = defaultdict(list)
    for case, entries in known.items():
        for name, entry in entries.items():
            if entry["not_timed"]:
                out[f"{name}: {entry['not_timed']}"].append(case)
    if out:
        where = {why: cases[0] if len(cases) == 1 else f"{len(cases)} cases" for why, cases in out.items()}
        parts.append("\n".join(["Not timed:", *(f"  {why} ({cases})" for why, cases in where.items())]))
    return "\n\n".join([*parts, closing(run)])


def comparison(run: list[Record], other: list[Record]) -> str:
    """Two files, measurement by measurement: the first one's time over the other's."""
    a, b = measurements(run), measurements(other)
    rows = [["case", "competitor", "first ms", "other ms", "first/other"]]
    change: dict[str, list[float]] = defaultdict(list)
    lone = []
    for case, name in dict.fromkeys((c, n) for side in (a, b) for c in side for n in side[c]):
        times = [side.get(case, {}).get(name, {}).get("median_s") for side in (a, b)]
        if times == [None, None]:
            continue
        if None in times:
            lone.append(f"  {case}  {name}: only in the {'first' if times[1] is None else 'other'}")
            continue
        change[name].append(times[0] / times[1])
        rows.append([case, name, *(f"{t * 1e3:.3f}" for t in times), f"{times[0] / times[1]:.2f}"])
    rows += [["geometric mean", name, "", "", f"{geometric_mean(found):.2f}"] for name, found in change.items()]
    first, later = LATER | run[0], LATER | other[0]
    differs = [f"  {k}: {first.get(k)} and {later.get(k)}" for k in (*SAME, *LATER) if first.get(k) != later.get(k)]
    parts = ["First: " + heading(run), "Other: " + heading(other), _aligned(rows)]
    parts += ["\n".join(["Timed in one alone:", *lone])] if lone else []
    parts += ["\n".join(["The two differ in:", *differs])] if differs else []
    return "\n\n".join([*parts, "First: " + closing(run), "Other: " + closing(other)])


def draw(run: list[Record], path: Path) -> None:
    """Draw the ratios: a row for each case, a mark for each competitor, a bar from quartile to quartile."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        sys.exit("Drawing needs matplotlib: pip install 'headwise[plot]'")
    every = ratios(run)
    if not every:
        sys.exit("There is no ratio to draw: nothing was timed beside headwise.")
    cases = list(dict.fromkeys(r.case for r in every))
    names = list(dict.fromkeys(r.competitor for r in every))
    figure = Figure(figsize=(10, 1.8 + 0.3 * len(cases)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, name in enumerate(names):
        colour, shape = LOOKS[number % len(LOOKS)]
        some = [r for r in every if r.competitor == name]
        axes.errorbar(
            [r.middle for r in some],
            [cases.index(r.case) + 0.14 * _place(r, every) for r in some],
            xerr=[[r.middle - r.low for r in some], [r.high - r.middle for r in some]],
            fmt=shape,
            color=colour,
            markersize=6,
            elinewidth=1,
            label=name,
        )
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    for number in range(0, len(cases), 2):
        axes.axhspan(number - 0.5, number + 0.5, color="0.95", zorder=0)
    axes.set_yticks(range(len(cases)), cases, fontsize=8)
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.grid(axis="x", which="both", color="0.85", linewidth=0.5)
    axes.set_axisbelow(True)
    axes.set_xlabel("time of the other / time of headwise (right of the line headwise is faster)")
    said = verdict(run)
    void = "" if said is not None and not said["void"] else "VOID  "
    figure.suptitle(void + heading(run).split("\n")[0], fontsize=8)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=150)


def heading(run: list[Record]) -> str:
    """Where, when and with what; and the ceilings."""
    it = LATER | run[0]
    commit = (it["commit"] or "no commit")[:12] + "+" * (it["commit"] or "").endswith("+")
    text = (
        f"{it['processor']} ({it['instructions']}), {it['threads']} threads on {it['cores']} cores, "
        f"torch {it['torch']}, headwise {it['headwise']} at {commit}, {it['date']}"
    )
    if it["device"] != "cpu":
        text = f"{it['device']}, CUDA {it['cuda']}, Triton {it['triton']}; beside it {text}"
    if it["quick"]:
        text += "\nA quick run: its times mean nothing."
    tops = [ceiling_line(r) for r in run if r["kind"] == "ceiling"]
    return text + "\nCeilings: " + "; ".join(tops)


def closing(run: list[Record]) -> str:
    """Whether the run counts."""
    found = verdict(run)
    return "VOID: the run was broken off before it was compared with itself." if found is None else told(found)


def _place(ratio: Ratio, every: list[Ratio]) -> float:
    """Which mark of its row this is, counted from the middle."""
    row = [r for r in every if r.case == ratio.case]
    return row.index(ratio) - (len(row) - 1) / 2


def _cell(ratio: Ratio | None, entry: Record | None) -> str:
    if ratio is None:
        if entry is not None and (entry["not_timed"] or "").startswith("not equal"):
            return "≠"
        return "–"
    if ratio.middle >= 1:
        return f"{ratio.middle:.2f}"
    return f"{ratio.middle:.2f} {'~' if ratio.high >= 1 else '<'}"


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows)


if __name__ == "__main__":
    sys.exit(main())
