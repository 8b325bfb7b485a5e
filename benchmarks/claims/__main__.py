"""Measure what the texts say: ``python -m benchmarks.claims``.

A run that was stopped or killed goes on where it was. The page and its figures are written at the end, beside the
results.
"""

import json
import sys
import tempfile
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import exact, heads, page, parallel, training
from .units import Record, Unit, run, stored

FAMILIES = (exact, training, heads, parallel)
ROOT = Path(__file__).resolve().parents[2]
app = typer.Typer(add_completion=False)


@app.command()
def main(
    only: Annotated[str, typer.Option(help="Units to run, such as 'training/digits/*'; no page is written.")] = "*",
    quick: Annotated[bool, typer.Option(help="Tiny sizes: shows that all runs; its numbers mean nothing.")] = False,
    folder: Annotated[Path | None, typer.Option(help="Where results, page and figures go [build/claims].")] = None,
    fresh: Annotated[bool, typer.Option(help="Start anew, without the results that are there.")] = False,
    docs: Annotated[bool, typer.Option(help="Put the page, figures and results into docs and benchmarks/results.")] = (
        False
    ),
    listed: Annotated[bool, typer.Option("--list", help="Print the names of the units and stop.")] = False,
) -> None:
    """Measure what three texts say about multi-head attention, and write the page that says what holds."""
    console = Console()
    units = [unit for family in FAMILIES for unit in family.units(quick) if fnmatchcase(unit.name, only)]
    if listed:
        return print(*(unit.name for unit in units), sep="\n")
    if not units:
        return stop(f"No unit is called {only!r}; --list prints their names.")
    if docs and (quick or only != "*"):
        return stop("The documentation is made of all units in full; leave out --quick and --only.")
    if fresh and only != "*":
        return stop("--fresh starts everything anew; leave out --only.")
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="claims-")) if quick else ROOT / "build" / "claims"
    path = folder / "results.jsonl"
    if fresh:
        path.unlink(missing_ok=True)
    start = time.monotonic()
    try:
        records = measure(units, path, console)
    except RuntimeError as error:
        return stop(str(error))
    console.print(f"{len(records)} units in {time.monotonic() - start:.0f} s. Results: {path}", soft_wrap=True)
    if only != "*":
        return console.print_json(json.dumps({name: record["result"] for name, record in records.items()}))
    text = page.write(records, folder)
    console.print(page.overview(records))
    console.print(f"The page: {text}", soft_wrap=True)
    if docs:
        for made in page.install(records, folder, ROOT):
            console.print(f"Written: {made}", soft_wrap=True)


def measure(units: list[Unit], path: Path, console: Console) -> dict[str, Record]:
    """Run what is missing, with a bar that says how many units are done."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(units))

        def told(record: Record) -> None:
            progress.update(bar, advance=1, description=record["unit"])
            if not console.is_terminal:
                console.print(f"{record['seconds']:7.1f} s  {record['unit']}", soft_wrap=True)

        progress.update(bar, advance=len(stored(units, path)))
        return run(units, path, told=told)


def stop(why: str) -> None:
    """Say why nothing comes of it."""
    print(why, file=sys.stderr)
    raise typer.Exit(2)


if __name__ == "__main__":
    app()
