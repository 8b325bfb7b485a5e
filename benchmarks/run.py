"""Time the competitors on the cases: ``python -m benchmarks.run --cases 'attention/causal/*'``.

A competitor is checked before it is timed: its result has to be as near to float64 as tests/helpers.py asks
of every backend. All competitors of a case run in one process, in an order that is drawn anew for each round,
so that what the machine does meanwhile falls on all of them. One case is also timed against itself, before
and after all others: if that does not read 1 within its spread, the run is void. So it is when others used
the processor meanwhile: two programs that compete for the cores slow down each other's threads, evenly for
the same code, unevenly for different.

``--device cuda`` runs the cases and competitors of a GPU there. Every sample then ends when the device is done.
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
from importlib import metadata
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TextIO

import torch
from torch import Tensor

import headwise

from . import competitors
from .cases import SUITES, Case, Problem, select
from .competitors import Step

ROOT = Path(__file__).resolve().parents[1]
SAMPLE_S = 0.010  # a sample lasts at least this long: the clock and one call's luck no longer matter
BUDGET_S = 4.0  # of samples a competitor and case; at least LEAST of them are taken
LEAST = 3
PATIENCE_S = 4.0  # a competitor that needs longer for one call is not timed
LOUD = 0.2  # a run whose self-comparison spreads further than this says nothing, wherever its middle lies
CROWDED = 0.1  # likewise one during which other processes had more than this share of the processor
HELD = 2**26  # scores held at once in the values to compare with: 512 MiB in float64, and several of them
CPU = torch.device("cpu")

Record = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks; 0 when the run counts, 1 when it is void, 2 when it could not start."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default="*", metavar="GLOB", help="names of cases, such as 'decode/*'")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that all runs, times mean nothing")
    parser.add_argument("--repeats", type=int, metavar="N", help="samples a competitor and case (default 15)")
    parser.add_argument("--device", type=torch.device, default=CPU, help="where to compute, such as cuda (default cpu)")
    parser.add_argument("--suite", choices=SUITES, help="cases and competitors; by default those for the device")
    parser.add_argument("--seconds", type=float, default=math.inf, metavar="S", help="start no case after so long")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="default: a new file in benchmarks/results/, none with --quick",
    )
    options = parser.parse_args(argv)
    stop, device = time.monotonic() + options.seconds, options.device
    suite = options.suite or ("cpu" if device == CPU else "gpu")
    cases = select(options.cases, options.quick, suite)
    repeats = (LEAST if options.quick else 15) if options.repeats is None else options.repeats
    if not cases:
        return refuse(f"No case is called {options.cases!r}; --list prints their names.")
    if options.list:
        print(*(case.name for case in cases), sep="\n")
        return 0
    if repeats < LEAST:
        return refuse(f"{repeats} repeats are too few to show a spread; take at least {LEAST}.")
    if not __debug__:
        return refuse("python -O removes the checks of the results; run without it.")
    if device != CPU and not torch.get_device_module(device).is_available():
        return refuse(f"There is no device {device} here that torch {torch.__version__} can use.")
    path = options.output or (None if options.quick else default_path(options.cases, device))
    if path is not None and path.exists():
        return refuse(f"{path} exists already; move it away or give --output.")
    sample_s = SAMPLE_S / 50 if options.quick else SAMPLE_S
    with contextlib.ExitStack() as stack:
        sink = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            sink = stack.enter_context(path.open("w"))
        void = run(cases, repeats, sample_s, sink, options.quick, device, suite, stop)
    if path is not None:
        print(f"Written: {path}. Read it: python -m benchmarks.report {path}")
    return 1 if void else 0


def refuse(why: str) -> int:
    """Say why nothing is run."""
    print(why, file=sys.stderr)
    return 2


def run(
    cases: Sequence[Case],
    repeats: int,
    sample_s: float,
    sink: TextIO | None,
    quick: bool = False,
    device: torch.device = CPU,
    suite: str = "cpu",
    stop: float = math.inf,
) -> bool:
    """Measure all that begins before ``stop``, print each figure and write it as a line; whether the run is void."""
    shared = {**environment(device), "quick": quick}
    # cuBLAS may otherwise round partial sums to half precision, which the check would take for a fault of its caller
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def write(record: Record) -> None:
        if sink is not None:
            sink.write(json.dumps(shared | record) + "\n")
            sink.flush()

    limits: dict[str, list[float]] = {}
    for dtype in dict.fromkeys(case.dtype for case in cases):
        found = ceilings(dtype, repeats, sample_s, quick, device)
        limits[dtype] = [record["per_s"] for record in found]
        for record in found:
            write(record)
            print(ceiling_line(record))

    before = busy()
    own, left_out = against_itself(cases[0], repeats, sample_s, device, suite), []
    for case in progress(cases):
        if time.monotonic() > stop:
            left_out.append(case.name)
            continue
        for record in measure(case, repeats, sample_s, limits[case.dtype], device, suite):
            write(record)
            print(line(record), flush=True)
    own += against_itself(cases[0], repeats, sample_s, device, suite)
    verdict = judge(cases[0].name, own, others(before, busy())) | {"left_out": left_out}
    write(verdict)
    print(told(verdict))
    return bool(verdict["void"])


def measure(
    case: Case,
    repeats: int,
    sample_s: float,
    limits: Sequence[float],
    device: torch.device = CPU,
    suite: str = "cpu",
) -> Iterator[Record]:
    """A record for each competitor of a case: its figures, or why it was not timed."""
    problem = case.problem(device)
    steps, records = {}, {}
    for name, entry in prepare(problem, suite).items():
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
    calls = {name: step.run for name, step in steps.items()}
    samples, inner = interleave(calls, repeats, sample_s, waiting(device))
    for name, record in records.items():
        step = record.pop("step")
        times = samples.get(name)
        record |= figures(times, problem, limits)
        record |= {
            "inner": inner.get(name),
            "peak_memory_bytes": None if step is None else peak_memory(step, device),
            "peak_memory_by": f"{PEAK_BY[device == CPU]}: allocations of one call, results included",
            "samples_s": times,
        }
        yield record


def prepare(problem: Problem, suite: str = "cpu") -> dict[str, Record]:
    """For each competitor the step that may be timed, or the reason why not, and its error."""
    sure = problem.sure
    exact, nearly = reference(sure, torch.float64), reference(sure, torch.float32)
    inner, wait = term_sizes(sure, len(exact)), waiting(problem.device)
    entries: dict[str, Record] = {}
    for name, build in competitors.registry(problem.case.level, suite).items():
        entry: Record = {"step": None, "note": "", "max_error": None, "not_timed": None}
        entries[name] = entry
        try:
            step = competitors.why_not(name, problem) or build(problem)
            if isinstance(step, str):
                entry["not_timed"] = step
                continue
            if problem.device != CPU:
                step.run()  # what is loaded or built at the first call is not its time
            wait()
            start = time.perf_counter()
            results = step.run()
            wait()
            took = time.perf_counter() - start
            if sure is not problem:
                checked = build(sure)
                assert not isinstance(checked, str), checked
                results = checked.run()
        except Exception as error:  # whatever a library raises is the reason why it is not timed
            entry["not_timed"] = f"failed: {type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        entry["note"] = step.note
        entry["max_error"], unequal = compare(results, exact, nearly, sure, inner)
        if unequal is not None:
            entry["not_timed"] = f"not equal, not timed: {unequal}"
        elif took > PATIENCE_S:
            entry["not_timed"] = f"too slow: {took:.1f} s for one call, and {PATIENCE_S:.0f} s are waited for"
        else:
            entry["step"] = step
    return entries


def compare(
    results: Sequence[Tensor],
    exact: Sequence[Tensor],
    nearly: Sequence[Tensor],
    problem: Problem,
    inner: Sequence[float],
) -> tuple[float | None, str | None]:
    """The largest error of all results against float64; and what is wrong with them, or None."""
    flat = torch.cat([t.detach().flatten() for t in results])
    sizes = [t.numel() for t in exact]
    if results[0].shape != exact[0].shape or len(flat) != sum(sizes):
        return None, f"an output of shape {tuple(results[0].shape)} and {len(flat)} numbers in all"
    worst, unequal = 0.0, None
    names = ["output", *(f"gradient {i}" for i in range(len(exact) - 1))]
    for name, got, want, close, size in zip(names, flat.split(sizes), exact, nearly, inner, strict=True):
        worst = max(worst, (got.double() - want.flatten()).abs().max().item())
        rule = {"terms": problem.case.terms, "inner": size, "what": name}
        try:
            _helpers().assert_as_good_as(got, want.flatten(), close.flatten(), **rule)
        except AssertionError as error:
            unequal = unequal or str(error)
    return (worst if math.isfinite(worst) else None), unequal


def reference(problem: Problem, dtype: torch.dtype) -> list[Tensor]:
    """The output and the gradients by the plain formula in float64 or float32.

    A module rounds to the dtype of the case after each of its parts (projections, attention), as any module
    in that dtype has to; in float64 nothing is rounded.
    """
    if problem.case.level == "attention":
        parts = [_attend(problem, dtype, rows, heads) for rows, heads in _pieces(problem)]
        return [_joined(problem, [part[i] for part in parts]) for i in range(len(parts[0]))]
    backward = problem.case.backward
    inputs = [t.detach().to(dtype).requires_grad_(backward) for t in problem.inputs]
    own = problem.inputs[0].dtype

    def rounded(x: Tensor) -> Tensor:
        return x if dtype == torch.float64 else x.to(own).to(dtype)

    tokens, in_weight, in_bias, out_weight, out_bias = inputs
    packed = rounded(tokens @ in_weight.T + in_bias).unflatten(-1, (3, problem.scores[1], -1))
    query, key, value = packed.permute(2, 0, 3, 1, 4)
    heads = rounded(_helpers().plain_attention(query, key, value, problem.allowed)[0])
    out = heads.transpose(1, 2).flatten(2) @ out_weight.T + out_bias
    grads = torch.autograd.grad(out, inputs, problem.grad.to(dtype)) if backward else ()
    return [out.detach(), *grads]


def term_sizes(problem: Problem, results: int) -> list[float]:
    """How large the terms of the sums are that a kernel has to round to the dtype of the inputs; 0 for none.

    Matrix units take weights and the gradients of scores in that dtype, and what query heads that share a key head
    add to its gradient is rounded before it is summed. In a forward pass that is granted to a GPU alone; what a
    module rounds is in its reference.
    """
    sizes = [0.0] * results
    backward, device = problem.case.backward, problem.device
    if problem.case.level != "attention" or problem.grad.dtype.itemsize > 2 or (device == CPU and not backward):
        return sizes
    for rows, heads in _pieces(problem):
        query, key, value, grad = (t.double() for t in _piece(problem, rows, heads))
        scale, group = query.shape[-1] ** -0.5, query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(group, 1).requires_grad_(backward) for t in (key, value))
        added = {} if problem.bias is None else {"modify": lambda scores: scores + problem.bias.detach().double()}
        allowed = _of(problem.allowed, rows, heads, group)
        out, weights, _ = _helpers().plain_attention(query, key, value, allowed, **added)
        shares = torch.autograd.grad(out, (key, value), grad) if backward else ()
        weights, key, value = (t.detach().square() for t in (weights, key, value))
        squares = [weights @ value * (device != CPU)]
        if backward:
            scores = scale**2 * weights * (grad.square() @ value.mT)
            sums = [scores.mT @ query.square(), weights.mT @ grad.square()]
            sums = [t + share.square() * (group > 1) for t, share in zip(sums, shares, strict=True)]
            squares += [scores @ key, *(t.unflatten(1, (-1, group)).sum(2) for t in sums)]
            if problem.bias is not None:
                squares.append(scores.sum(0) / scale**2)
        sizes = [max(size, t.max().sqrt().item()) for size, t in zip(sizes, squares, strict=True)]
    return sizes


def _pieces(problem: Problem) -> list[tuple[slice, slice]]:
    """Rows of the batch and key heads that are computed at once, as the scores of all may not fit in memory."""
    (batch, heads, rows, slots), kv_heads = problem.scores, problem.inputs[1].shape[1]
    if batch * heads * rows * slots <= HELD:
        return [(slice(None), slice(None))]
    step = max(1, HELD // (heads // kv_heads * rows * slots))
    return [(slice(b, b + 1), slice(k, k + step)) for b in range(batch) for k in range(0, kv_heads, step)]


def _piece(problem: Problem, rows: slice, heads: slice) -> list[Tensor]:
    """Query, key, value and the gradient of the output, of some rows of the batch and some key heads."""
    query, key, value = (t.detach() for t in problem.inputs)
    group = query.shape[1] // key.shape[1]
    query, grad = (_of(t, rows, heads, group) for t in (query, problem.grad))
    return [query, key[rows, heads], value[rows, heads], grad]


def _of(tensor: Tensor, rows: slice, heads: slice, group: int) -> Tensor:
    """The part of a tensor over query heads, or of one that broadcasts over the batch or the heads."""
    tensor = tensor[rows] if tensor.shape[0] > 1 else tensor
    return tensor.unflatten(1, (-1, group))[:, heads].flatten(1, 2) if tensor.shape[1] > 1 else tensor


def _attend(problem: Problem, dtype: torch.dtype, rows: slice, heads: slice) -> list[Tensor]:
    """The output of a piece, and its gradients where they are wanted."""
    backward = problem.case.backward
    *inputs, grad = (t.to(dtype) for t in _piece(problem, rows, heads))
    inputs = [t.detach().requires_grad_(backward) for t in inputs]
    group = inputs[0].shape[1] // inputs[1].shape[1]
    group_heads = range(problem.scores[1])[
        slice(heads.start and heads.start * group, heads.stop and heads.stop * group)
    ]
    extra = {}
    if problem.bias is not None:
        assert (rows, heads) == (slice(None), slice(None)), "the gradient of a bias is summed over the whole batch"
        bias = problem.bias.detach().to(dtype).requires_grad_(backward)
        inputs.append(bias)
        extra["modify"] = lambda scores: scores + bias
    elif problem.score_mods:
        extra["modify"] = lambda scores: problem.modified(scores, group_heads[0])
    if problem.sinks is not None:
        extra["sinks"] = problem.sinks[group_heads[0] : group_heads[-1] + 1].to(dtype)
    out = _helpers().plain_attention(*inputs[:3], _of(problem.allowed, rows, heads, group), **extra)[0]
    return [out.detach(), *(torch.autograd.grad(out, inputs, grad) if backward else ())]


def _joined(problem: Problem, parts: list[Tensor]) -> Tensor:
    """One tensor of its pieces, in the order of ``_pieces``."""
    if len(parts) == 1:
        return parts[0]
    batch = problem.scores[0]
    each = len(parts) // batch
    return torch.cat([torch.cat(parts[b * each : (b + 1) * each], 1) for b in range(batch)])


def interleave(
    calls: Mapping[str, Callable[[], object]],
    repeats: int,
    sample_s: float,
    wait: Callable[[], object] = lambda: None,
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds a call, sample by sample, and how many calls a sample holds.

    In each round everyone gives one sample; one whose time is used up leaves, so sample i of two is of one
    round. ``wait`` returns when the device has done what it was given.
    """
    inner, samples = {}, {name: [] for name in calls}
    for name, call in calls.items():
        call()
        once = _seconds(call, 1, wait)
        inner[name] = max(1, math.ceil(sample_s / max(once, 1e-7)))
        inner[name] = max(1, math.ceil(inner[name] * sample_s / max(_seconds(call, inner[name], wait), sample_s / 10)))
    order, draw = list(calls), random.Random(0)
    for _ in range(repeats):
        draw.shuffle(order)
        for name in order:
            spent = sum(samples[name]) * inner[name]
            if len(samples[name]) < LEAST or spent < BUDGET_S:
                samples[name].append(_seconds(calls[name], inner[name], wait) / inner[name])
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


def against_itself(
    case: Case, repeats: int, sample_s: float, device: torch.device = CPU, suite: str = "cpu"
) -> list[float]:
    """Ratios, round by round, of the times of the same code called twice."""
    timed = [e["step"].run for e in prepare(case.problem(device), suite).values() if e["step"] is not None]
    if not timed:
        return []
    samples, _ = interleave({"one": timed[0], "the same": timed[0]}, repeats, sample_s, waiting(device))
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
    left_out = verdict.get("left_out")
    if left_out:
        text += "\n".join([f"\nLeft out, as the time was over: {len(left_out)} cases", *(f"  {n}" for n in left_out)])
    return f"{text}\nVOID: {verdict['why_void']}. Run it again on a quiet machine." if verdict["void"] else text


def busy() -> tuple[float, float, float] | None:
    """Core-seconds passed, used by anyone, and used by this process and what it started; None where nothing says it."""
    try:
        rows = Path("/proc/stat").read_text().splitlines()
        ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        ticks = [[int(n) for n in row.split()[1:9]] for row in rows if row.split()[0] in ours]
        passed = sum(map(sum, ticks)) / os.sysconf("SC_CLK_TCK")
        idle = sum(row[3] + row[4] for row in ticks) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return None
    return passed, passed - idle, _used()


def _used() -> float:
    """Core-seconds of this process, and of those it started: the compilers of FlexAttention are not somebody else."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            parents[int(path.parent.name)], ticks[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    ours: set[int] = set()
    found = {os.getpid()}
    while found:
        ours |= found
        found = {process for process, parent in parents.items() if parent in found}
    return sum(ticks[process] for process in ours) / os.sysconf("SC_CLK_TCK")


def others(before: tuple[float, ...] | None, after: tuple[float, ...] | None) -> float | None:
    """Share of the processor that other processes had between two readings of ``busy``."""
    if before is None or after is None or after[0] <= before[0]:
        return None
    passed, used, own = (b - a for a, b in zip(before, after, strict=True))
    return max(0.0, (used - own) / passed)


def ceilings(dtype: str, repeats: int, sample_s: float, quick: bool, device: torch.device = CPU) -> list[Record]:
    """What the machine can do at most: a product of square matrices in this dtype, and reading or copying memory."""
    size, count = (64, 2**16) if quick else (1024, 2**26) if device == CPU else (8192, 2**28)
    square = torch.randn(size, size).to(device, getattr(torch, dtype))
    memory = torch.ones(count, device=device)
    mib = memory.nbytes >> 20
    if device == CPU:
        moving, moved, move = f"memory read {mib} MiB", memory.nbytes, memory.sum
    else:
        other = torch.empty_like(memory)
        moving, moved, move = f"device copy {mib} MiB", 2 * memory.nbytes, lambda: other.copy_(memory)
    samples, _ = interleave({"matmul": lambda: square @ square, "move": move}, repeats, sample_s, waiting(device))
    shared = {"kind": "ceiling", "dtype": dtype}
    flops, speed = 2 * size**3 / median(samples["matmul"]), moved / median(samples["move"])
    return [
        shared | {"ceiling": f"matmul {size}", "unit": "FLOP", "per_s": flops},
        shared | {"ceiling": moving, "unit": "B", "per_s": speed},
    ]


def ceiling_line(record: Record) -> str:
    """A ceiling for the eye."""
    return f"{record['ceiling']} {record['dtype']}: {record['per_s'] / 1e9:.1f} G{record['unit']}/s"


def waiting(device: torch.device) -> Callable[[], object]:
    """A function that returns when the device has done what it was given."""
    return torch.get_device_module(device).synchronize


# whether the device is the CPU: who counted the bytes
PEAK_BY = {True: "torch profiler", False: "torch's allocator on the device"}


def peak_memory(step: Step, device: torch.device = CPU) -> int:
    """Bytes that torch's allocator holds at most above what it held before the call."""
    if device != CPU:
        module = torch.get_device_module(device)
        module.synchronize()
        module.reset_peak_memory_stats()
        before = module.memory_allocated()
        step.run()
        module.synchronize()
        return module.max_memory_allocated() - before
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


def environment(device: torch.device = CPU) -> Record:
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
        "device": device_name(device),
        "cuda": torch.version.cuda,
        "triton": version("triton"),
        "headwise": headwise.__version__,
        "commit": commit(),
    }


def device_name(device: torch.device) -> str:
    """The name that the device gives itself, "cpu" for the processor."""
    return "cpu" if device == CPU else torch.get_device_module(device).get_device_name(device)


def version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


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


def default_path(glob: str, device: torch.device = CPU) -> Path:
    """Where a run is kept: date, processor or device, and what was run."""
    what = "all" if glob == "*" else _slug(glob)
    where = processor() if device == CPU else device_name(device)
    name = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}_{_slug(where)}_{what}.jsonl"
    return ROOT / "benchmarks" / "results" / name


def progress(cases: Sequence[Case]) -> Iterator[Case]:
    """The cases, with a bar where rich is installed and someone looks at it."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield from cases
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(cases, description="Cases", console=Console(stderr=True))


def _seconds(call: Callable[[], object], times: int, wait: Callable[[], object]) -> float:
    collecting = gc.isenabled()
    gc.disable()
    try:
        wait()
        start = time.perf_counter()
        for _ in range(times):
            call()
        wait()
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
