"""Units of work: an experiment is many of them, and a run that was killed goes on with those that are missing."""

import importlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.run import environment

Record = dict[str, Any]
MADE = ("date", "processor", "cores", "instructions", "system", "python", "torch", "headwise", "commit")


@dataclass(frozen=True)
class Unit:
    """One call whose result is kept.

    Args:
        name: What is measured, from the general to the particular: ``training/digits/8 heads/seed 0``.
        function: Where it is, as ``module:name``, so that another process finds it. It returns plain numbers, texts,
            lists and dictionaries; ``{"not_tested": reason}`` where something that it needs is not there.
        settings: The arguments, as JSON has them. A stored result counts only where they are the same.
        alone: Whether it is timed: nothing else runs meanwhile, and it has every core. Otherwise it has one
            thread, so that the same seed gives the same bits on any number of cores.
    """

    name: str
    function: str
    settings: Mapping[str, Any]
    alone: bool = False


def run(
    units: Iterable[Unit],
    path: Path,
    jobs: int = 0,
    told: Callable[[Record], object] = lambda record: None,
) -> dict[str, Record]:
    """Run the units that ``path`` has no result of, and add each result to it the moment it is there.

    Args:
        units: All that the file shall have.
        path: A file of JSON lines, made where it is not there.
        jobs: Processes that work at once; 0 means one for each core that this process may use.
        told: Called with each new record.

    Returns:
        The records of these units by name, old and new, in the order of the units.

    Raises:
        RuntimeError: When units failed: after all others were run, with the first error.
    """
    units = list(units)
    done = stored(units, path)
    todo = [unit for unit in units if unit.name not in done]
    path.parent.mkdir(parents=True, exist_ok=True)
    made = {name: value for name, value in environment().items() if name in MADE}
    failed: list[tuple[Unit, BaseException]] = []
    with path.open("a") as file:
        for alone in (False, True):
            some = [unit for unit in todo if unit.alone == alone]
            for unit, outcome in _finished(some, 1 if alone else jobs or cores(), 0 if alone else 1):
                if isinstance(outcome, BaseException):
                    failed.append((unit, outcome))
                    continue
                record = {"unit": unit.name, "settings": dict(unit.settings), **outcome, "made": made}
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())
                done[unit.name] = record
                told(record)
    if failed:
        unit, error = failed[0]
        raise RuntimeError(f"{len(failed)} of {len(todo)} units failed; the first is {unit.name!r}: {error}") from error
    return {unit.name: done[unit.name] for unit in units}


def stored(units: Iterable[Unit], path: Path) -> dict[str, Record]:
    """The results in a file that are of these units with these settings. What could not be tested is tried again."""
    wanted = {unit.name: json.loads(json.dumps(dict(unit.settings))) for unit in units}
    found = {}
    for record in read(path) if path.exists() else ():
        if wanted.get(record["unit"]) == record["settings"] and "not_tested" not in record["result"]:
            found[record["unit"]] = record
    return found


def read(path: Path) -> list[Record]:
    """The records of a file, without a last line that a killed run left unfinished."""
    text = path.read_text()
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        path.write_text(text)  # or the next record would be written on the same line
    return [json.loads(line) for line in text.splitlines()]


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _finished(units: list[Unit], jobs: int, threads: int) -> Iterator[tuple[Unit, Any]]:
    """Each unit with its result or its error, in the order in which they end."""
    if not units:
        return
    # "spawn": a forked child would inherit the threads of OpenMP half alive
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_begin, initargs=(threads, os.getpid())) as pool:
        left = iter(units)
        running: dict[Future[Record], Unit] = {}
        while True:
            # no more than there are processes: what waits in the pool's queue is lost for good when it breaks
            while len(running) < jobs and (unit := next(left, None)) is not None:
                running[pool.submit(_call, unit.function, dict(unit.settings))] = unit
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                unit = running.pop(future)
                error = future.exception()
                yield unit, future.result() if error is None else error


def _begin(threads: int, parent: int) -> None:
    """Prepare a process of the pool; it ends when the one that started it is gone, however that ended."""
    import threading

    torch.set_num_threads(threads or cores())

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _call(function: str, settings: dict[str, Any]) -> Record:
    module, name = function.split(":")
    start = time.perf_counter()
    result = getattr(importlib.import_module(module), name)(**settings)
    return {"seconds": round(time.perf_counter() - start, 2), "result": result}
