"""Units of work: an experiment is many of them, and a run that was killed goes on with those that are missing."""

import hashlib
import importlib
import json
import multiprocessing
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

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

    def key(self) -> Record:
        """What a stored result has to say of itself to count: name, settings, and the code that made it."""
        settings = json.loads(json.dumps(dict(self.settings)))
        return {"unit": self.name, "settings": settings, "code": code(self.function.partition(":")[0])}


def code(module: str) -> str:
    """A hash of the file of a module and of those beside it that it imports."""
    path = Path(importlib.import_module(module).__file__ or "")
    texts = [path.read_bytes()]
    for name in USES.get(path.stem, ()):
        texts.append((path.parent / name).read_bytes())
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


# the files whose change makes other numbers
USES = {"training": ("tasks.py", "variants.py", "../../examples/transformer.py"), "parallel": ("../run.py",)}


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
        RuntimeError: When another run writes to the file, or when units failed: after all others were run, with the
            first error.
    """
    units = list(units)
    path.parent.mkdir(parents=True, exist_ok=True)
    made = {name: value for name, value in environment().items() if name in MADE}
    failed: list[tuple[Unit, BaseException]] = []
    with writing(path) as file:
        done = stored(units, path)
        todo = [unit for unit in units if unit.name not in done]
        for alone in (False, True):
            some = [unit for unit in todo if unit.alone == alone]
            for unit, outcome in _finished(some, 1 if alone else jobs or cores(), 0 if alone else 1):
                if isinstance(outcome, BaseException):
                    failed.append((unit, outcome))
                    continue
                record = {**unit.key(), **outcome, "made": made}
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())
                done[unit.name] = record
                told(record)
    if failed:
        unit, error = failed[0]
        raise RuntimeError(f"{len(failed)} of {len(todo)} units failed; the first is {unit.name!r}: {error}") from error
    return {unit.name: done[unit.name] for unit in units}


@contextmanager
def writing(path: Path) -> Iterator[TextIO]:
    """The file, for this process alone, without a last line that a killed run left unfinished."""
    with path.open("a+") as file:
        try:
            import fcntl  # not on Windows, where nobody is kept out

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass
        except OSError:
            raise RuntimeError(f"Another run writes to {path}; wait for it, or give another --folder.") from None
        text = path.read_bytes()
        file.truncate(text.rfind(b"\n") + 1)
        yield file


def stored(units: Iterable[Unit], path: Path) -> dict[str, Record]:
    """The results in a file that count for these units. What could not be tested is tried again."""
    wanted = {unit.name: unit.key() for unit in units}
    found = {}
    for record in read(path) if path.exists() else ():
        key = {name: record.get(name) for name in ("unit", "settings", "code")}
        if wanted.get(record["unit"]) == key and "not_tested" not in record["result"]:
            found[record["unit"]] = record
    return found


def read(path: Path) -> list[Record]:
    """The records of a file; a last line that is not finished is none."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _finished(units: Iterable[Unit], jobs: int, threads: int) -> Iterator[tuple[Unit, Any]]:
    """Each unit with its result or its error, in the order in which they end.

    A process that is killed, as for want of memory, takes its pool with it. What ran then is tried once more, one at
    a time, so that only the one that gets its process killed fails.
    """
    left = deque(units)
    suspects: deque[Unit] = deque()
    # "spawn": a forked child would inherit the threads of OpenMP half alive
    context = multiprocessing.get_context("spawn")
    while left or suspects:
        again = not left
        waiting, at_once = (deque([suspects.popleft()]), 1) if again else (left, jobs)
        with ProcessPoolExecutor(at_once, context, initializer=_begin, initargs=(threads, os.getpid())) as pool:
            running: dict[Future[Record], Unit] = {}
            broken = False
            while running or (waiting and not broken):
                while waiting and not broken and len(running) < at_once:
                    try:
                        unit = waiting[0]
                        running[pool.submit(_call, unit.function, dict(unit.settings))] = unit
                        waiting.popleft()
                    except BrokenProcessPool:
                        broken = True
                if not running:
                    break
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    unit, error = running.pop(future), future.exception()
                    if isinstance(error, BrokenProcessPool):
                        broken = True
                        if not again:
                            suspects.append(unit)
                            continue
                    yield unit, future.result() if error is None else error


def _begin(threads: int, parent: int) -> None:
    """Prepare a process of the pool; it ends when the one that started it is gone, however that ended."""
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
    json.dumps(result)  # here, where an error is this unit's
    return {"seconds": round(time.perf_counter() - start, 2), "result": result}
