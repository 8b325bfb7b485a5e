"""The page: docs/claims.md and its figures, made from the results and from nothing else."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from . import figures, heads, parallel
from .statements import FAILS, HOLDS, IN_PART, NOT_TESTED, STATEMENTS, TERMS, TEXTS, TOPICS
from .tables import TABLES
from .units import Record

Records = Mapping[str, Record]
COMMAND = "python -m benchmarks.claims"
# by topic: the name of the file, what draws it, what it shows
FIGURES: dict[str, list[tuple[str, Callable[[Records, Path], None], str]]] = {
    "learn": [
        ("claims_distances", heads.draw_heads_by_distance, "How far each head of the trained models looks."),
        ("claims_relations", heads.draw_relations, "How often the best head finds a relation, against the best rule."),
    ],
    "against": [
        (
            "claims_kinds",
            figures.draw_kinds,
            "The kinds of attention on the five tasks: a mark for each seed, a line at their mean.",
        ),
    ],
    "short": [("claims_order", figures.draw_order, "Digits as 8, 16 or 32 patches, with their places and as a bag.")],
    "cost": [
        ("claims_parallel", parallel.draw_loop_against_batched, "A loop over heads against one batched operation."),
        ("claims_length", parallel.draw_time_and_memory, "Time and memory against length, and the useful work."),
    ],
    "long": [("claims_lengths", figures.draw_lengths, "Right answers by length; the grey part was seen in training.")],
}


def write(records: Records, folder: Path) -> Path:
    """Write the page and its figures into a folder, and return the page."""
    folder.mkdir(parents=True, exist_ok=True)
    for found in FIGURES.values():
        for name, draw, _ in found:
            draw(records, folder / f"{name}.svg")
    path = folder / "claims.md"
    path.write_text(text(records), encoding="utf-8")
    return path


def install(records: Records, folder: Path, root: Path) -> Iterable[Path]:
    """Copy page, figures and results to where the documentation has them."""
    names = [f"{name}.svg" for found in FIGURES.values() for name, *_ in found]
    targets = {"claims.md": root / "docs" / "claims.md", **{name: root / "docs" / "images" / name for name in names}}
    for name, target in targets.items():
        yield Path(shutil.copyfile(folder / name, target))
    # the page's own records: the file may have older ones as well
    stored(root).write_text("".join(json.dumps(record) + "\n" for record in records.values()))
    yield stored(root)


def stored(root: Path) -> Path:
    """The results from which the page of the documentation was made."""
    return root / "benchmarks" / "results" / "claims.jsonl"


def overview(records: Records) -> str:
    """How many statements came to which verdict."""
    counts = Counter(statement.judge(records)[1] for statement in STATEMENTS)
    return f"{len(STATEMENTS)} statements: " + ", ".join(
        f"{counts[verdict]} {verdict}" for verdict in (HOLDS, IN_PART, FAILS, NOT_TESTED)
    )


def text(records: Records) -> str:
    """The page, in MyST Markdown."""
    counts = f"{overview(records)}."
    parts = [INTRODUCTION.format(texts=texts(), counts=counts, command=COMMAND, where=where(records))]
    for topic, title in TOPICS.items():
        parts.append(f"## {title}\n")
        rows = [statement for statement in STATEMENTS if statement.topic == topic]
        table = ["| said | measured | verdict |", "|---|---|---|"]
        for statement in rows:
            figure, verdict = statement.judge(records)
            english, danish, chinese = TERMS[statement.term]
            sources = "; ".join(f"{name} {spans(numbers)}" for name, numbers in statement.where.items())
            command = "" if statement.only is None else f"<br>`{COMMAND} --only '{statement.only}'`"
            said = f"{statement.said}<br>*{english} · {danish} · {chinese}*<br>({sources})"
            table.append(f"| {said} | {figure}{command} | **{verdict}** |".replace("\n", " "))
        parts.append("\n".join(table) + "\n")
        parts += [table_of(records) + "\n" for table_of in TABLES.get(topic, ())]
        for name, _, caption in FIGURES.get(topic, ()):
            parts.append(f"```{{figure}} images/{name}.svg\n:alt: {caption}\n:width: 100%\n\n{caption}\n```\n")
    return "\n".join(parts)


def texts() -> str:
    """The three texts, as a list."""
    return "\n".join(f"- **{name}**: {what}." for name, what in TEXTS.items())


def spans(numbers: Iterable[int]) -> str:
    """Numbers of lines with neighbours joined: 5, 9–11."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def where(records: Records) -> str:
    """With what the results were made, once for each that differs, and how long that took."""
    told = {}
    for made in (record["made"] for record in records.values()):
        machine = f"{made['processor']} ({made['instructions']}), {made['cores']} cores, Python {made['python']}"
        commit = (made["commit"] or "no commit")[:9] + "+" * str(made["commit"]).endswith("+")
        told[f"{machine}, torch {made['torch']}, headwise {made['headwise']} at {commit}, {made['date'][:10]}"] = None
    minutes = sum(record["seconds"] for record in records.values()) / 60
    others = [record["result"].get("others_share") or 0 for record in records.values()]
    text = f"{'; '.join(sorted(told))}. The {len(records)} units took {minutes:.0f} minutes; those that are timed run"
    text += " alone, the others one on each core. While a unit was timed, other processes had at most"
    return f"{text} {100 * max(others):.0f} % of the processor."


INTRODUCTION = """# What is said about multi-head attention, measured

% Made by `python -m benchmarks.claims --docs`. Change benchmarks/claims, not this page.

Three public texts were the start of headwise. Each says what multi-head attention is, what it is better than, and what
it is for. Every sentence of theirs that states something is in a row below, in our words, with what it comes to when it
is measured. Numbers after the name of a text are the lines that say so, counted as the text was stored.

{texts}

{counts}

*Holds* and *does not hold here* follow from the numbers beside them, by rules that stand in
`benchmarks/claims/statements.py`; *holds in part* names what does not; *not tested* says why. "Here" is meant: models
of 62,000 to 100,000 parameters, trained for a minute each, do not speak for large ones.

Everything on this page comes from

```sh
{command}            # all of it, in under an hour on 2 cores; a run that was stopped goes on where it was
{command} --quick    # tiny sizes, in under a minute: shows that everything runs
{command} --list     # the units; each row below names those that it needs
```

{where}
"""
