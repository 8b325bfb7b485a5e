"""How parallel the calculation is, and what long sequences cost: time and memory, nothing that is learned.

Four experiments, all timed, so that their units run alone:

- ``parallel/heads``: h heads in one batched operation against a loop over them; and h heads against one.
- ``parallel/steps``: attention, a loop over its heads and recurrent layers, on one thread and on all.
- ``parallel/length``: time and memory of attention against the number of tokens, under three masks.
- ``parallel/additive``: Bahdanau's additive score, and a score without a query, against the dot product.

``summary`` makes of their results what a page says, ``draw_loop_against_batched`` and ``draw_time_and_memory`` the
figures. A ratio is a median over rounds in which both sides ran, with its quartiles.
"""

import itertools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from headwise import Causal, Full, Mask, Window

from ..cases import Attention, Problem
from ..competitors import Step, headwise_auto, plain
from ..run import busy, ceilings, interleave, others, peak_memory, spread
from .drawing import BLACK, BLUE, GREEN, GREY, GRID, PINK, RED, figure, save
from .units import Record, Unit

MODULE = "benchmarks.claims.parallel"
HEADS = (1, 2, 4, 8, 16)
SHAPES = ((1, 64), (16, 128), (1, 2048))  # sequences, tokens: overhead, a usual batch, one long sequence
KERNELS = ("fused", "plain")
STEPS = (32, 128, 512, 2048)
LENGTHS = tuple(2**n for n in range(7, 16))
ADDITIVE = (128, 512, 1024)
WINDOW = 256
MASKS: dict[str, Mask] = {"full": Full(), "causal": Causal(), "window": Causal() & Window(WINDOW)}
PLAIN_BYTES = 2**32  # so much may the plain formula hold
UPPER = 4096  # exponents are those of this length and longer ones: below it what a call costs in any case shows
SLOW = 8192  # from here on a call takes seconds: it needs no calibration, and neither clock nor profiler matters

Call = Callable[[], Sequence[Tensor]]


def units(quick: bool) -> list[Unit]:
    """All units; with ``quick`` few and tiny ones, whose numbers mean nothing."""
    width, pace = (32, {"rounds": 3, "sample_s": 1e-4}) if quick else (256, {"rounds": 7, "sample_s": 0.01})
    heads, found = [1, 2] if quick else list(HEADS), []
    for kernel, (batch, rows), backward in itertools.product(KERNELS, ((2, 16),) if quick else SHAPES, (False, True)):
        settings = {"batch": batch, "rows": rows, "width": width, "heads": heads, "kernel": kernel}
        name = f"heads/{kernel}/{batch}x{rows}/{'both' if backward else 'forward'}"
        found.append(_unit(name, "heads_at_once", settings | {"backward": backward, **pace}))
    for rows in (8,) if quick else STEPS:
        settings = {"batch": 2 if quick else 4, "rows": rows, "width": width, "heads": 4 if quick else 8}
        found.append(_unit(f"steps/{settings['batch']}x{rows}", "steps_in_order", settings | pace))
    count, size, window = (2, 8, 16) if quick else (4, 64, WINDOW)
    for rows in (32, 64, 128) if quick else LENGTHS:
        settings = {"rows": rows, "heads": count, "head_dim": size, "window": window, **pace, "quick": quick}
        found.append(_unit(f"length/{rows}", "at_length", settings))
    for rows in (16,) if quick else ADDITIVE:
        found.append(_unit(f"additive/{rows}", "additive", {"rows": rows, "head_dim": size, **pace}))
    return found


def _unit(name: str, function: str, settings: Mapping[str, Any]) -> Unit:
    return Unit(f"parallel/{name}", f"{MODULE}:{function}", settings, alone=True)


def heads_at_once(
    batch: int, rows: int, width: int, heads: Sequence[int], kernel: str, backward: bool, rounds: int, sample_s: float
) -> Record:
    """Self-attention with its projections, h heads in one batched operation and in a loop, at the same width.

    Both take the same weights and tokens. ``seconds`` are of a call; ``loop_by_batched`` says how many times as
    long the loop takes. With one head the two are the same calculation: how far that ratio is from 1 is what the
    machine adds. ``by_one_head`` is the batched form with h heads against that with one. ``difference`` is the
    largest between the outputs of the two forms, by the largest number in them.

    Args:
        batch: Sequences.
        rows: Tokens of each.
        width: Size of a token, and of all heads together.
        heads: Numbers of heads.
        kernel: "fused" is torch's ``scaled_dot_product_attention``, "plain" the formula with weights in memory;
            loop and batched form use the same.
        backward: Whether the gradients of tokens and weights are part of the call.
        rounds: Samples of each.
        sample_s: A sample lasts at least so long, in seconds.
    """
    tokens, weights, grad = problem(batch, rows, width, backward)
    calls = {
        f"{form.__name__} {count}": call_of(form, tokens, weights, grad, count, kernel)
        for form, count in itertools.product((batched, loop), heads)
    }
    before = busy()
    samples, _ = interleave(calls, rounds, sample_s)
    found = []
    for count in heads:
        names = [f"{form.__name__} {count}" for form in (batched, loop)]
        one, other = (calls[name]()[0] for name in names)
        found.append(
            {
                "heads": count,
                "batched": seconds(samples[names[0]]),
                "loop": seconds(samples[names[1]]),
                "loop_by_batched": ratio(samples[names[1]], samples[names[0]]),
                "by_one_head": ratio(samples[names[0]], samples[f"batched {heads[0]}"]),
                "difference": digits(((one - other).abs().max() / one.abs().max()).item()),
            }
        )
    return {"heads": found, "threads": torch.get_num_threads(), **_others(before)}


def steps_in_order(batch: int, rows: int, width: int, heads: int, rounds: int, sample_s: float) -> Record:
    """Forward and backward pass of a layer of the same width over the same tokens, on one thread and on all.

    ``speed_up`` is the time on one thread by that on all. ``by_attention`` is the time by that of batched
    attention, both on all threads: above 1 attention is faster. A recurrent layer has to take ``rows`` steps one
    after another, attention has a fixed number whatever the length; but attention does work for every pair of
    tokens, a recurrent layer for every token.

    Args:
        batch: Sequences.
        rows: Tokens of each.
        width: Size of a token, of all heads together, and of the recurrent state.
        heads: Heads of the attention.
        rounds: Samples of each.
        sample_s: A sample lasts at least so long, in seconds.
    """
    tokens, weights, grad = problem(batch, rows, width, backward=True)
    layers: dict[str, Call] = {
        "batched": call_of(batched, tokens, weights, grad, heads, "fused"),
        "loop": call_of(loop, tokens, weights, grad, heads, "fused"),
        "GRU": _recurrent(nn.GRU(width, width, batch_first=True), tokens, grad),
        "LSTM": _recurrent(nn.LSTM(width, width, batch_first=True), tokens, grad),
    }
    threads, before = torch.get_num_threads(), busy()
    try:
        calls = {(name, n): _on(n, call) for n in {1, threads} for name, call in layers.items()}
        by_text = {f"{name} {n}": call for (name, n), call in calls.items()}
        samples, _ = interleave(by_text, rounds, sample_s)
    finally:
        torch.set_num_threads(threads)
    found = [
        {
            "layer": name,
            "seconds": seconds(samples[f"{name} {threads}"]),
            "speed_up": ratio(samples[f"{name} 1"], samples[f"{name} {threads}"]),
            "by_attention": ratio(samples[f"{name} {threads}"], samples[f"batched {threads}"]),
            "steps_in_order": rows if name in ("GRU", "LSTM") else 1,
        }
        for name in layers
    ]
    return {"layers": found, "threads": threads, **_others(before)}


def at_length(rows: int, heads: int, head_dim: int, window: int, rounds: int, sample_s: float, quick: bool) -> Record:
    """Time and memory of ``headwise.attention`` on one sequence, forward without gradients, under three masks.

    ``pairs`` are those of a query and a key that may attend, over all heads; ``work_flop`` two products of
    matrices on these. ``useful_s`` is the time that this work would take at ``matmul_per_s``, the rate of a product
    of square matrices measured just before: about the least that it can take on this machine. ``peak_memory_bytes`` is
    what torch's allocator holds at most above what it held before the call, result included. "plain full" is the
    formula with the weights in memory, at lengths where these and a copy fit into 4 GiB.

    Args:
        rows: Tokens, as queries and as keys.
        heads: Heads.
        head_dim: Size of a head.
        window: Keys that a query of the window mask sees, itself included; it is causal too.
        rounds: Samples of each. Where a call takes seconds there are two, one of them while memory is counted.
        sample_s: A sample lasts at least so long, in seconds.
        quick: Whether the rate is that of tiny matrices.
    """
    before = busy()
    rate = ceilings("float32", rounds, sample_s, quick)[0]["per_s"]
    masks = {**MASKS, "window": Causal() & Window(window)}
    problems = {name: masked(rows, heads, head_dim, mask) for name, mask in masks.items()}
    small = {name: masked(min(rows, 1024), heads, head_dim, mask) for name, mask in masks.items()}
    steps: dict[str, Step] = {}
    not_run = {}
    for name, one in problems.items():
        # what is held grows by the square of the length at most
        bound = peak_memory(headwise_auto(small[name])) * (rows / small[name].scores[2]) ** 2
        if bound > 0.75 * physical_memory():
            not_run[name] = f"it may take {bound / 2**30:.0f} GiB, too much for this machine"
        else:
            steps[name] = headwise_auto(one)
    if 2 * 4 * heads * rows**2 <= PLAIN_BYTES:
        problems["plain full"], steps["plain full"] = problems["full"], plain(problems["full"])
    if rows >= SLOW:
        samples: dict[str, list[float]] = {name: [] for name in steps}
        timed = {name: Step(_timed(step.run, samples[name])) for name, step in steps.items()}
        memory = {name: peak_memory(step) for name, step in timed.items()}
        for step in timed.values():
            step.run()
    else:
        memory = {name: peak_memory(step) for name, step in steps.items()}
        samples, _ = interleave({name: step.run for name, step in steps.items()}, rounds, sample_s)
    found: list[Record] = [
        {
            "what": name,
            "note": step.note,
            "seconds": seconds(samples[name]),
            "peak_memory_bytes": memory[name],
            "pairs": problems[name].pairs,
            "work_flop": problems[name].work,
            "useful_s": digits(problems[name].work / rate),
        }
        for name, step in steps.items()
    ]
    return {"masks": found, "not_run": not_run, "matmul_per_s": digits(rate), **_others(before)}


def additive(rows: int, head_dim: int, rounds: int, sample_s: float) -> Record:
    """Time and memory of one head without a mask by other scores, against that by the dot product.

    The additive score of a query and a key is v · tanh(query + key), where both are projected already; it has to
    compute ``head_dim`` numbers for each pair and cannot be a product of matrices. "one row" is what feed-forward
    and scalar attention have: a score v · key of each key, without a query, so that all queries have the same
    weights. Its one row of results is copied to ``rows``, to give what the others give; under a mask the rows would
    differ, and this saving would be gone. All but "fused", the dot product by torch's kernel, hold their weights in
    memory; forward without gradients. ``by_dot`` is the time by that of the dot product with the weights in memory.

    Args:
        rows: Tokens, as queries and as keys.
        head_dim: Size of queries, keys and values.
        rounds: Samples of each.
        sample_s: A sample lasts at least so long, in seconds.
    """
    query, key, value = normal((1, 1, rows, head_dim), 0), normal((1, 1, rows, head_dim), 1), normal((1, rows, 1), 2)
    value, v = value.expand(-1, -1, head_dim)[None].contiguous(), normal((head_dim,), 3)

    def by_dot() -> Tensor:
        return attend_plain(query, key, value)

    def by_kernel() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)

    def by_sum() -> Tensor:
        return ((query[:, :, :, None] + key[:, :, None]).tanh() @ v).softmax(-1) @ value

    def by_key() -> Tensor:
        return ((key @ v)[:, :, None].softmax(-1) @ value).expand_as(query).contiguous()

    forms = {"dot": by_dot, "fused": by_kernel, "additive": by_sum, "one row": by_key}
    calls = {name: _without_graph(form) for name, form in forms.items()}
    before = busy()
    samples, _ = interleave(calls, rounds, sample_s)
    found = [
        {
            "score": name,
            "seconds": seconds(samples[name]),
            "by_dot": ratio(samples[name], samples["dot"]),
            "peak_memory_bytes": peak_memory(Step(call)),
        }
        for name, call in calls.items()
    ]
    return {"scores": found, **_others(before)}


Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]


def batched(tokens: Float[Tensor, "B T E"], weights: Sequence[Tensor], heads: int, attend: Kernel) -> Tensor:
    """Multi-head self-attention with all heads in each operation."""
    to_query, to_key, to_value, to_out = weights
    query, key, value = (
        F.linear(tokens, weight).unflatten(-1, (heads, -1)).transpose(1, 2) for weight in (to_query, to_key, to_value)
    )
    return F.linear(attend(query, key, value).transpose(1, 2).flatten(2), to_out)


def loop(tokens: Float[Tensor, "B T E"], weights: Sequence[Tensor], heads: int, attend: Kernel) -> Tensor:
    """The same, one head after another: its rows of the projections, its columns of the output projection."""
    to_query, to_key, to_value, to_out = weights
    size = len(to_query) // heads
    out = None
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        query, key, value = (F.linear(tokens, weight[part])[:, None] for weight in (to_query, to_key, to_value))
        own = F.linear(attend(query, key, value)[:, 0], to_out[:, part])
        out = own if out is None else out + own
    assert out is not None, "there is at least one head"
    return out


def attend_plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Scaled dot-product attention with the weights in memory."""
    return (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) @ value


ATTEND: dict[str, Kernel] = {"fused": F.scaled_dot_product_attention, "plain": attend_plain}


def problem(batch: int, rows: int, width: int, backward: bool) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """Tokens, the four weights and the gradient of the output, by fixed seeds; no gradient where none is wanted."""
    tokens = normal((batch, rows, width), 0).requires_grad_(backward)
    weights = [(normal((width, width), seed) * width**-0.5).requires_grad_(backward) for seed in range(1, 5)]
    return tokens, weights, normal((batch, rows, width), 5) if backward else None


def call_of(
    form: Callable[..., Tensor], tokens: Tensor, weights: Sequence[Tensor], grad: Tensor | None, heads: int, kernel: str
) -> Call:
    """What is timed: the output; with the gradient of the output also those of tokens and weights."""

    def forward() -> Tensor:
        return form(tokens, weights, heads, ATTEND[kernel])

    if grad is None:
        return _without_graph(forward)

    def both() -> Sequence[Tensor]:
        out = forward()
        return out.detach(), *torch.autograd.grad(out, (tokens, *weights), grad)

    return both


def masked(rows: int, heads: int, head_dim: int, mask: Mask) -> Problem:
    """One sequence under a mask."""
    case = Attention(batch=1, heads=heads, rows=rows, head_dim=head_dim)
    made = case.problem()
    return Problem(case, made.inputs, made.grad, mask, made.scores)


def normal(shape: Sequence[int], seed: int) -> Tensor:
    """Normal numbers by a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _recurrent(layer: nn.RNNBase, tokens: Tensor, grad: Tensor | None) -> Call:
    leaves = (tokens, *layer.parameters())

    def both() -> Sequence[Tensor]:
        out = layer(tokens)[0]
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    return both


def _without_graph(form: Callable[[], Tensor]) -> Call:
    def run() -> Sequence[Tensor]:
        with torch.no_grad():
            return (form(),)

    return run


def _on(threads: int, call: Call) -> Call:
    def run() -> Sequence[Tensor]:
        torch.set_num_threads(threads)
        return call()

    return run


def _timed(call: Call, samples: list[float]) -> Call:
    """A call that keeps the seconds it takes."""

    def run() -> Sequence[Tensor]:
        start = time.perf_counter()
        results = call()
        samples.append(time.perf_counter() - start)
        return results

    return run


def seconds(samples: Sequence[float]) -> Record:
    """Median and quartiles of the time of a call, and how many samples they are of."""
    return {
        "median": digits(median(samples)),
        "quartiles": [digits(s) for s in spread(samples)],
        "rounds": len(samples),
    }


def ratio(above: Sequence[float], below: Sequence[float]) -> Record:
    """Median and quartiles of the ratios of two times, round by round."""
    return seconds([a / b for a, b in zip(above, below, strict=False)])


def digits(x: float) -> float:
    """A number to six digits."""
    return float(f"{x:.6g}")


def physical_memory() -> float:
    """Bytes of memory of this machine; infinity where it does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return math.inf


def _others(before: tuple[float, float, float] | None) -> Record:
    """Share of the processor that other processes had since: above a tenth the times of the unit are in doubt."""
    share = others(before, busy())
    return {"others_share": None if share is None else digits(share)}


def summary(records: Mapping[str, Record]) -> Record:
    """What the results say in few numbers.

    - ``loop_by_batched``: for each kernel and direction, by number of heads, the ratio of each shape.
    - ``by_one_head``: the same for h heads against one, both batched.
    - ``steps``: for each number of tokens and layer, the speed-up by threads and the time by that of attention.
    - ``length``: for each mask the exponents of time and memory: n where the cost grows by the n-th power of the
      length, fitted to the lengths from 4096 on (with a quick run, to the longer half); the time and memory at
      the longest; and how many times as long as its useful work it takes there.
    - ``additive``: for each number of tokens, by score, the time by that of the dot product.
    - ``others_share``: the largest share of the processor that other processes had in any unit.
    """
    own = {name: record for name, record in records.items() if name.startswith("parallel/")}
    found: Record = {"loop_by_batched": {}, "by_one_head": {}, "steps": {}, "length": {}, "additive": {}}
    for name, record in own.items():
        _, kind, *rest = name.split("/")
        result = record["result"]
        if kind == "heads":
            kernel, shape, direction = rest
            for what in ("loop_by_batched", "by_one_head"):
                group = found[what].setdefault(f"{kernel} {direction}", {})
                for entry in result["heads"]:
                    group.setdefault(str(entry["heads"]), {})[shape] = entry[what]["median"]
        elif kind == "steps":
            found["steps"][str(record["settings"]["rows"])] = {
                entry["layer"]: {what: entry[what]["median"] for what in ("speed_up", "by_attention")}
                for entry in result["layers"]
            }
        elif kind == "additive":
            by_score = {entry["score"]: entry["by_dot"]["median"] for entry in result["scores"]}
            found["additive"][str(record["settings"]["rows"])] = by_score
    rate = median([r["result"]["matmul_per_s"] for r in _of(own, "length")]) if _of(own, "length") else None
    for what, entries in curves(own).items():
        lengths = sorted(entries)
        upper = [n for n in lengths if n >= min(UPPER, lengths[len(lengths) // 2])]
        last = entries[lengths[-1]]
        time_s = last["seconds"]["median"]
        found["length"][what] = {
            "time_exponent": exponent(upper, [entries[n]["seconds"]["median"] for n in upper]),
            "memory_exponent": exponent(upper, [entries[n]["peak_memory_bytes"] for n in upper]),
            "longest": lengths[-1],
            "seconds": time_s,
            "peak_memory_bytes": last["peak_memory_bytes"],
            "by_useful": digits(time_s * rate / last["work_flop"]) if rate else None,
        }
    shares = [r["result"]["others_share"] for r in own.values()]
    found["others_share"] = max((share for share in shares if share is not None), default=None)
    found["matmul_per_s"] = rate
    return found


def curves(records: Mapping[str, Record]) -> dict[str, dict[int, Record]]:
    """For each mask, and for the plain formula, what was measured by number of tokens."""
    found: dict[str, dict[int, Record]] = {}
    for record in _of(records, "length"):
        for entry in record["result"]["masks"]:
            found.setdefault(entry["what"], {})[record["settings"]["rows"]] = entry
    return found


def exponent(lengths: Sequence[float], costs: Sequence[float]) -> float | None:
    """The n where costs grow by the n-th power of the length: a slope on logarithmic axes. None of fewer than two."""
    if len(lengths) < 2:
        return None
    return digits(linear_regression([math.log(n) for n in lengths], [math.log(c) for c in costs]).slope)


def _of(records: Mapping[str, Record], kind: str) -> list[Record]:
    return [record for name, record in records.items() if name.startswith(f"parallel/{kind}/")]


LOOKS = {
    "full": (BLUE, "o", "full"),
    "causal": (RED, "s", "causal"),
    "window": (GREEN, "^", "causal, window"),
    "plain full": (BLACK, "x", "full, weights in memory"),
}
SHAPE_LOOKS = ((BLUE, "o", "-"), (RED, "s", "--"), (GREEN, "^", "-."), (PINK, "D", ":"))


def draw_time_and_memory(records: Mapping[str, Record], path: Path) -> None:
    """Time and peak memory against the number of tokens, and the time that the useful work would take."""
    from matplotlib.ticker import NullLocator

    canvas = figure(10.5, 5)
    left, right = canvas.subplots(1, 2)
    rate = median([record["result"]["matmul_per_s"] for record in _of(records, "length")])
    lengths: list[int] = []
    work = {"linestyle": ":", "linewidth": 1.4}
    for what, entries in curves(records).items():
        colour, marker, label = LOOKS[what]
        lengths = sorted({*lengths, *entries})
        xs = sorted(entries)
        # rings, so that where two curves lie on one another both are seen
        style = {"color": colour, "marker": marker, "markersize": 8 if what == "full" else 5, "linewidth": 1.4}
        style |= {"markerfacecolor": "none"} if what == "full" else {}
        left.plot(xs, [entries[x]["seconds"]["median"] for x in xs], label=label, **style)
        right.plot(xs, [entries[x]["peak_memory_bytes"] / 2**20 for x in xs], label=label, **style)
        if what in MASKS:
            useful = [entries[x]["work_flop"] / rate for x in xs]
            left.plot(xs, useful, color=colour, marker=marker, markersize=4, markerfacecolor="none", **work)
    left.plot([], [], color=GREY, label="useful work at the rate of square matrices", **work)
    left.set(title="Time of a call", ylabel="seconds")
    right.set(title="Peak memory of a call, result included", ylabel="MiB")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="tokens")
        axes.set_xticks(lengths, [str(n) if n < 1024 else f"{n // 1024}k" for n in lengths])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(color=GRID, linewidth=0.6)
    canvas.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    save(canvas, path)


def draw_loop_against_batched(records: Mapping[str, Record], path: Path) -> None:
    """How many times as long a loop over the heads takes, and h heads against one, by the number of heads.

    Medians, with quartiles as bars. Axes reach a little beyond the medians, so that one disturbed sample does not
    squash the rest; the figure says so where a bar is cut.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    canvas = figure(11, 6.4)
    grid = canvas.subplots(2, 3, sharex=True, sharey="col")
    columns = (
        ("forward", "loop_by_batched", "loop ÷ batched, forward"),
        ("both", "loop_by_batched", "loop ÷ batched, with gradients"),
        ("both", "by_one_head", "h heads ÷ one head, batched,\nwith gradients"),
    )
    kernels = {"fused": "fused kernel", "plain": "weights in memory"}
    ticks = sorted({entry["heads"] for record in _of(records, "heads") for entry in record["result"]["heads"]})
    seen: list[list[Record]] = [[] for _ in columns]
    for (row, (kernel, said)), (column, (direction, what, title)) in itertools.product(
        enumerate(kernels.items()), enumerate(columns)
    ):
        axes = grid[row][column]
        chosen = [r for r in _of(records, f"heads/{kernel}") if r["settings"]["backward"] == (direction == "both")]
        for record, (colour, marker, line) in zip(chosen, itertools.cycle(SHAPE_LOOKS), strict=False):
            entries, settings = record["result"]["heads"], record["settings"]
            seen[column] += [entry[what] for entry in entries]
            middles = [entry[what]["median"] for entry in entries]
            lows, highs = zip(*(entry[what]["quartiles"] for entry in entries), strict=True)
            errors = [
                [max(0.0, m - low) for m, low in zip(middles, lows, strict=True)],
                [max(0.0, high - m) for m, high in zip(middles, highs, strict=True)],
            ]
            label = f"{settings['batch']} × {settings['rows']} tokens"
            style = {"color": colour, "marker": marker, "linestyle": line, "capsize": 3, "label": label}
            axes.errorbar([entry["heads"] for entry in entries], middles, errors, **style)
        axes.axhline(1, color=GREY, linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(n) for n in ticks])
        axes.grid(color=GRID, linewidth=0.6)
        axes.set_yscale("log", base=2)  # half as long is as far from 1 as twice as long
        if row == 0:
            axes.set_title(title, fontsize=11)
        else:
            axes.set_xlabel("heads")
        if column == 0:
            axes.set_ylabel(f"{said}\ntimes as long")
    cut = False
    for axes, found in zip(grid[0], seen, strict=True):  # a column shares its axis
        low, high = (choose([1.0, *(one["median"] for one in found)]) for choose in (min, max))
        room = 2**0.25 * (high / low) ** 0.1
        axes.set_ylim(low / room, high * room)
        cut |= any(one["quartiles"][0] < low / room or one["quartiles"][1] > high * room for one in found)
        # powers of 2 where there are several; else round numbers
        axes.yaxis.set_major_locator(LogLocator(base=2) if high / low > 4 else MaxNLocator(5))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    said = "Marks are medians, bars reach from the lower to the upper quartile"
    canvas.supxlabel(said + ("; those that meet an edge go on beyond it." if cut else "."), fontsize=10)
    canvas.legend(*grid[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    save(canvas, path)
