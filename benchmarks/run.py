"""Time the competitors on the cases: ``python -m benchmarks.run --cases 'attention/causal/*'``.

A competitor is checked before it is timed: its result has to be as near to float64 as tests/helpers.py asks
of every backend. All competitors of a case run in one process, in an order that is drawn anew for each round,
so that what the machine does meanwhile falls on all of them. One case is also timed against itself, before
and after all others: if that does not read 1 within its spread, the run is void. So it is when others used
the processor meanwhile: two programs that compete for the cores slow down each other's threads, evenly for
the same code, unevenly for different.
"""

import argparse
import contextlib
import datetime
import gc
import importlib.util
import json
import math
import os
import platform
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TextIO

import torch
from torch import Tensor

import headwise

from . import competitors
from .cases import Case, Problem, select
from .competitors import Step

ROOT = Path(__file__).resolve().parents[1]
SAMPLE_S = 0.010  # a sample lasts at least this long: the clock and one call's luck no longer matter
BUDGET_S = 4.0  # of samples a competitor and case; at least LEAST of them are taken
LEAST = 3
PATIENCE_S = 4.0  # a competitor that needs longer for one call is not timed
LOUD = 0.2  # a run whose self-comparison spreads further than this says nothing, wherever its middle lies
CROWDED = 0.1  # likewise one during which other processes had more than this share of the processor

Record = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks; 0 when the run counts, 1 when it is void, 2 when it could not start."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default="*", metavar="GLOB", help="names of cases, such as 'decode/*'")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that all runs, times mean nothing")
    parser.add_argument("--repeats", type=int, metavar="N", help="samples a competitor and case (default 15)")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="default: a new file in benchmarks/results/, none with --quick",
    )
    options = parser.parse_args(argv)
    cases = select(options.cases, options.quick)
    repeats = (LEAST if options.quick else 15) if options.repeats is None else options.repeats
    path = options.output or (None if options.quick else default_path(options.cases))
    if not cases:
        return refuse(f"No case is called {options.cases!r}; --list prints their names.")
    if options.list:
        print(*(case.name for case in cases), sep="\n")
        return 0
    if repeats < LEAST:
        return refuse(f"{repeats} repeats are too few to show a spread; take at least {LEAST}.")
    if path is not None and path.exists():
        return refuse(f"{path} exists already; move it away or give --output.")
    if not __debug__:
        return refuse("python -O removes the checks of the results; run without it.")
    sample_s = SAMPLE_S / 50 if options.quick else SAMPLE_S
    with contextlib.ExitStack() as stack:
        sink = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            sink = stack.enter_context(path.open("w"))
        void = run(cases, repeats, sample_s, sink, options.quick)
    if path is not None:
        print(f"Written: {path}. Read it: python -m benchmarks.report {path}")
    return 1 if void else 0


def refuse(why: str) -> int:
    """Say why nothing is run."""
    print(why, file=sys.stderr)
    return 2


def run(cases: Sequence[Case], repeats: int, sample_s: float, sink: TextIO | None, quick: bool = False) -> bool:
    """Measure all, print each figure and write it as a line; whether the run is void."""
    shared = {**environment(), "quick": quick}

    def write(record: Record) -> None:
        if sink is not None:
            sink.write(json.dumps(shared | record) + "\n")
            sink.flush()

    limits: dict[str, list[float]] = {}
    for dtype in dict.fromkeys(case.dtype for case in cases):
        found = ceilings(dtype, repeats, sample_s, quick)
        limits[dtype] = [record["per_s"] for record in found]
        for record in found:
            write(record)
            print(ceiling_line(record))

    before = busy()
    own = against_itself(cases[0], repeats, sample_s)
    for case in progress(cases):
        for record in measure(case, repeats, sample_s, limits[case.dtype]):
            write(record)
            print(line(record), flush=True)
    own += against_itself(cases[0], repeats, sample_s)
    verdict = judge(cases[0].name, own, others(before, busy()))
    write(verdict)
    print(told(verdict))
    return bool(verdict["void"])


def measure(case: Case, repeats: int, sample_s: float, limits: Sequence[float]) -> Iterator[Record]:
    """A record for each competitor of a case: its figures, or why it was not timed."""
    problem = case.problem()
    steps, records = {}, {}
    for name, entry in prepare(problem).items():
        records[name] = {
            "kind": "measurement",
            "case": case.name,
            "level": case.level,
            "dtype": case.dtype,
            "competitor": name,
            **entry,
        }
        if entry["step"] is not None:
            steps[name] = entry["step"]
    samples, inner = interleave({name: step.run for name, step in steps.items()}, repeats, sample_s)
    for name, record in records.items():
        step = record.pop("step")
        times = samples.get(name)
        record |= figures(times, problem, limits)
        record |= {
            "inner": inner.get(name),
            "peak_memory_bytes": None if step is None else peak_memory(step),
            "peak_memory_by": "torch profiler: allocations of one call, results included",
            "samples_s": times,
        }
        yield record


def prepare(problem: Problem) -> dict[str, Record]:
    """For each competitor the step that may be timed, or the reason why not, and its error."""
    registry = competitors.ATTENTION if problem.case.level == "attention" else competitors.MODULE
    exact, nearly = reference(problem, torch.float64), reference(problem, torch.float32)
    entries: dict[str, Record] = {}
    for name, build in registry.items():
        entry: Record = {"step": None, "note": "", "max_error": None, "not_timed": None}
        entries[name] = entry
        try:
            step = build(problem)
            if isinstance(step, str):
                entry["not_timed"] = step
                continue
            start = time.perf_counter()
            results = step.run()
            took = time.perf_counter() - start
        except Exception as error:  # whatever a library raises is the reason why it is not timed
            entry["not_timed"] = f"failed: {type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        entry["note"] = step.note
        entry["max_error"], unequal = compare(results, exact, nearly, problem)
        if unequal is not None:
            entry["not_timed"] = f"not equal, not timed: {unequal}"
        elif took > PATIENCE_S:
            entry["not_timed"] = f"too slow: {took:.1f} s for one call, and {PATIENCE_S:.0f} s are waited for"
        else:
            entry["step"] = step
    return entries


def compare(
    results: Sequence[Tensor], exact: Sequence[Tensor], nearly: Sequence[Tensor], problem: Problem
) -> tuple[float | None, str | None]:
    """The largest error of all results against float64; and what is wrong with them, or None."""
    flat = torch.cat([t.detach().flatten() for t in results])
    sizes = [t.numel() for t in exact]
    if results[0].shape != exact[0].shape or len(flat) != sum(sizes):
        return None, f"an output of shape {tuple(results[0].shape)} and {len(flat)} numbers in all"
    worst, unequal = 0.0, None
    names = ["output", *(f"gradient {i}" for i in range(len(exact) - 1))]
    for name, got, want, close in zip(names, flat.split(sizes), exact, nearly, strict=True):
        worst = max(worst, (got.double() - want.flatten()).abs().max().item())
        try:
            _helpers().assert_as_good_as(got, want.flatten(), close.flatten(), terms=problem.case.terms, what=name)
        except AssertionError as error:
            unequal = unequal or str(error)
    return (worst if math.isfinite(worst) else None), unequal


def reference(problem: Problem, dtype: torch.dtype) -> list[Tensor]:
    """The output and the gradients by the plain formula in float64 or float32.

    A module rounds to the dtype of the case after each of its parts (projections, attention), as any module
    in that dtype has to; in float64 nothing is rounded.
    """
    backward = problem.case.backward
    inputs = [t.detach().to(dtype).requires_grad_(backward) for t in problem.inputs]
    own = problem.inputs[0].dtype

    def rounded(x: Tensor) -> Tensor:
        return x if dtype == torch.float64 else x.to(own).to(dtype)

    if problem.case.level == "attention":
        out = _helpers().plain_attention(*inputs, problem.allowed)[0]
    else:
        tokens, in_weight, in_bias, out_weight, out_bias = inputs
        packed = rounded(tokens @ in_weight.T + in_bias).unflatten(-1, (3, problem.scores[1], -1))
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        heads = rounded(_helpers().plain_attention(query, key, value, problem.allowed)[0])
        out = heads.transpose(1, 2).flatten(2) @ out_weight.T + out_bias
    grads = torch.autograd.grad(out, inputs, problem.grad.to(dtype)) if backward else ()
    return [out.detach(), *grads]


def interleave(
    calls: Mapping[str, Callable[[], object]], repeats: int, sample_s: float
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds a call, sample by sample, and how many calls a sample holds.

    In each round everyone gives one sample; one whose time is used up leaves, so sample i of two is of one
    round.
    """
    inner, samples = {}, {name: [] for name in calls}
    for name, call in calls.items():
        call()
        once = _seconds(call, 1)
        inner[name] = max(1, math.ceil(sample_s / max(once, 1e-7)))
        inner[name] = max(1, math.ceil(inner[name] * sample_s / max(_seconds(call, inner[name]), sample_s / 10)))
    order, draw = list(calls), random.Random(0)
    for _ in range(repeats):
        draw.shuffle(order)
        for name in order:
            spent = sum(samples[name]) * inner[name]
            if len(samples[name]) < LEAST or spent < BUDGET_S:
                samples[name].append(_seconds(calls[name], inner[name]) / inner[name])
    return samples, inner


def figures(times: list[float] | None, problem: Problem, limits: Sequence[float]) -> Record:
    """What follows from the times of a competitor: all None when it has none."""
    work, traffic = problem.work, problem.traffic
    found: Record = {"work_flop": work, "traffic_bytes": traffic}
    names = ("median_s", "quartiles_s", "flops", "share_of_matmul", "bytes_per_s", "share_of_memory")
    if times is None:
        return found | dict.fromkeys(names)
    middle, matmul, memory = median(times), *limits
    values = (middle, spread(times), work / middle, work / middle / matmul, traffic / middle)
    return found | dict(zip(names, (*values, traffic / middle / memory), strict=True))


def against_itself(case: Case, repeats: int, sample_s: float) -> list[float]:
    """Ratios, round by round, of the times of the same code called twice."""
    timed = [e["step"].run for e in prepare(case.problem()).values() if e["step"] is not None]
    if not timed:
        return []
    samples, _ = interleave({"one": timed[0], "the same": timed[0]}, repeats, sample_s)
    return [a / b for a, b in zip(samples["one"], samples["the same"], strict=False)]


def judge(name: str, ratios: list[float], others_share: float | None) -> Record:
    """The record that says whether the run counts. Without a ratio nothing shows that it does: it is void."""
    low, high = spread(ratios) if ratios else (None, None)
    why = []
    if low is None or high is None:
        why.append("nothing was timed against itself")
    elif not low <= 1 <= high:
        why.append("the same code against itself does not read 1")
    elif high - low > LOUD:
        why.append(f"the same code against itself spreads over more than {LOUD:.0%}")
    if others_share is not None and others_share > CROWDED:
        why.append(f"other processes had {others_share:.0%} of the processor, more than {CROWDED:.0%}")
    return {
        "kind": "self",
        "case": name,
        "ratio": median(ratios) if ratios else None,
        "ratio_quartiles": [low, high],
        "others_share": others_share,
        "void": bool(why),
        "why_void": "; ".join(why) or None,
    }


def told(verdict: Record) -> str:
    """The verdict on a run, for the eye."""
    low, high = verdict["ratio_quartiles"]
    ratio = "no time" if low is None else f"{verdict['ratio']:.3f} (quartiles {low:.3f} to {high:.3f})"
    text = f"Against itself: {ratio} on {verdict['case']}."
    if verdict["others_share"] is not None:
        text += f" Other processes had {verdict['others_share']:.0%} of the processor."
    return f"{text}\nVOID: {verdict['why_void']}. Run it again on a quiet machine." if verdict["void"] else text


def busy() -> tuple[float, float, float] | None:
    """Core-seconds passed, used by anyone, and used by this process; None where nothing says it."""
    try:
        rows = Path("/proc/stat").read_text().splitlines()
        ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        ticks = [[int(n) for n in row.split()[1:9]] for row in rows if row.split()[0] in ours]
        passed = sum(map(sum, ticks)) / os.sysconf("SC_CLK_TCK")
        idle = sum(row[3] + row[4] for row in ticks) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return None
    return passed, passed - idle, time.process_time()


def others(before: tuple[float, ...] | None, after: tuple[float, ...] | None) -> float | None:
    """Share of the processor that other processes had between two readings of ``busy``."""
    if before is None or after is None or after[0] <= before[0]:
        return None
    passed, used, own = (b - a for a, b in zip(before, after, strict=True))
    return max(0.0, (used - own) / passed)


def ceilings(dtype: str, repeats: int, sample_s: float, quick: bool) -> list[Record]:
    """What the machine can do at most: a product of square matrices in this dtype, and reading memory."""
    size, count = (64, 2**16) if quick else (1024, 2**26)
    square = torch.randn(size, size).to(getattr(torch, dtype))
    memory = torch.ones(count)
    calls = {"matmul": lambda: square @ square, "memory read": memory.sum}
    samples, _ = interleave(calls, repeats, sample_s)
    shared = {"kind": "ceiling", "dtype": dtype}
    flops, read = 2 * size**3 / median(samples["matmul"]), memory.nbytes / median(samples["memory read"])
    return [
        shared | {"ceiling": f"matmul {size}", "unit": "FLOP", "per_s": flops},
        shared | {"ceiling": f"memory read {memory.nbytes >> 20} MiB", "unit": "B", "per_s": read},
    ]


def ceiling_line(record: Record) -> str:
    """A ceiling for the eye."""
    return f"{record['ceiling']} {record['dtype']}: {record['per_s'] / 1e9:.1f} G{record['unit']}/s"


def peak_memory(step: Step) -> int:
    """Bytes that torch's allocator holds at most above what it held before the call."""
    with _quiet(), torch.autograd.profiler.profile(profile_memory=True) as profile:
        results = step.run()
    del results
    events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def spread(values: Sequence[float]) -> list[float]:
    """The lower and the upper quartile."""
    low, _, high = quantiles(values, n=4, method="inclusive")
    return [low, high]


def line(record: Record) -> str:
    """One record for the eye."""
    start = f"{record['case']}  {record['competitor']}"
    if record["not_timed"] is not None:
        return f"{start}: {record['not_timed']}"
    low, high = (t * 1e3 for t in record["quartiles_s"])
    rates = f"{record['flops'] / 1e9:.1f} GFLOP/s, {record['bytes_per_s'] / 1e9:.2f} GB/s"
    memory = f"{record['peak_memory_bytes'] / 2**20:.2f} MiB"
    return f"{start}: {record['median_s'] * 1e3:.3f} ms ({low:.3f} to {high:.3f}), {rates}, {memory}"


def environment() -> Record:
    """Where and with what: the part of a record that all lines of a run share."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "headwise": headwise.__version__,
        "commit": commit(),
    }


def processor() -> str:
    """The name that the processor gives itself."""
    with contextlib.suppress(OSError):
        found = re.search(r"(?m)^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text())
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of this checkout, with "+" where files differ from it; None where there is no git."""
    try:
        git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def default_path(glob: str) -> Path:
    """Where a run is kept: date, processor, and what was run."""
    what = "all" if glob == "*" else _slug(glob)
    name = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}_{_slug(processor())}_{what}.jsonl"
    return ROOT / "benchmarks" / "results" / name


def progress(cases: Sequence[Case]) -> Iterator[Case]:
    """The cases, with a bar where rich is installed and someone looks at it."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield from cases
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(cases, description="Cases", console=Console(stderr=True))


def _seconds(call: Callable[[], object], times: int) -> float:
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in range(times):
            call()
        return time.perf_counter() - start
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing on the standard error: the profiler's library reports its start and stop there."""
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def _helpers() -> Any:
    """tests/helpers.py, which holds the one tolerance rule; tests is no package, so from its file."""
    if "helpers" not in sys.modules:
        spec = importlib.util.spec_from_file_location("helpers", ROOT / "tests" / "helpers.py")
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        sys.modules["helpers"] = module
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    return sys.modules["helpers"]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
