"""How much faster whole models are once swapped: ``python -m benchmarks.models --seconds 600``.

Each model is stock and, a copy of it, swapped (``headwise.convert.swap``); where sequences are ragged it also runs on
them packed into one row. It is timed in inference and in training (forward and backward, without dropout), and before
that held against stock in float64, output and gradients, on real tokens. The rest is as in ``benchmarks.run``, and so
are the results, which ``benchmarks.report`` reads.

``headwise`` is the swapped model, packed where the case is ragged and the model can be; ``headwise padded`` the swapped
one on the padded batch. To pack and to unpack counts.
"""

import argparse
import contextlib
import copy
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

import headwise
from headwise.convert.swap import swap

from . import report
from . import run as runner
from .cases import ragged
from .competitors import Step

Record = dict[str, Any]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model on a batch.

    Args:
        kind: Its name in MODELS.
        batch: Sequences.
        rows: Tokens of the longest.
        width: Size of a token.
        heads: Heads.
        layers: Layers.
        is_ragged: Whether the lengths grow evenly from 1 to ``rows``, rather than all being ``rows``.
        backward: Whether the gradients of all weights are part of the work.
        dtype: Of weights and tokens, by its name in torch.
    """

    kind: str
    batch: int
    rows: int
    width: int
    heads: int
    layers: int
    is_ragged: bool = False
    backward: bool = False
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """Kind, sizes batch×tokens×width, number of heads and layers, dtype and direction."""
        sizes = f"{self.batch}x{self.rows}x{self.width}-h{self.heads}-l{self.layers}"
        kind = f"{self.kind}+ragged" if self.is_ragged else self.kind
        return f"model/{kind}/{sizes}/{self.dtype}/{'forward+backward' if self.backward else 'forward'}"

    @property
    def lengths(self) -> Tensor:
        """Real tokens of each sequence."""
        return ragged(self.batch, self.rows) if self.is_ragged else torch.full((self.batch,), self.rows)

    @property
    def real(self) -> Tensor:
        """Which tokens are real, (batch, tokens)."""
        return torch.arange(self.rows) < self.lengths[:, None]


@dataclass
class Subject:
    """A model as it is timed.

    Args:
        model: It.
        inputs: Tokens, (batch, rows, width), or their ids, (batch, rows).
        padded: Gives the outputs of the real tokens, one after another, from the padded batch.
        packed: The same by way of one row; None where the model cannot.
        note: What stock is.
        others: What else to time on the padded batch: a name, and what makes stock that.
    """

    model: nn.Module
    inputs: Tensor
    padded: Callable[[nn.Module, Tensor], Tensor]
    packed: Callable[[nn.Module, Tensor], Tensor] | None = None
    note: str = ""
    others: dict[str, Callable[[nn.Module], None]] = field(default_factory=dict)


def vit(case: Model) -> Subject:
    """The blocks of a vision transformer, written in plain ``nn.MultiheadAttention``."""
    model = nn.Sequential(*(Block(case.width, case.heads) for _ in range(case.layers)))
    return Subject(model, _tokens(case), lambda m, x: m(x).flatten(0, 1), note="nn.MultiheadAttention")


def encoder(case: Model) -> Subject:
    """``nn.TransformerEncoder``: in inference stock takes its fast path, and nested tensors where there is padding."""
    layer = nn.TransformerEncoderLayer(case.width, case.heads, 4 * case.width, 0.0, "gelu", batch_first=True)
    real, lengths = case.real, case.lengths.tolist()
    hides = ~real if case.is_ragged else None

    def packed(model: nn.Module, x: Tensor) -> Tensor:
        row = headwise.pack(x, lengths=lengths)
        number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        return model(row.tokens, mask=number[:, None] != number)[0]

    return Subject(
        nn.TransformerEncoder(layer, case.layers),
        _tokens(case),
        lambda m, x: m(x, src_key_padding_mask=hides)[real],
        packed,
        "nn.TransformerEncoder",
    )


def bert(case: Model) -> Subject:
    """BERT of transformers, of MiniLM's size where 384 wide."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=1009,
        hidden_size=case.width,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        intermediate_size=4 * case.width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return _of_transformers(case, BertModel(config, add_pooling_layer=False))


def gpt2(case: Model) -> Subject:
    """GPT-2 of transformers, without its head."""
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(
        vocab_size=1009,
        n_embd=case.width,
        n_layer=case.layers,
        n_head=case.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    return _of_transformers(case, GPT2Model(config))


def _of_transformers(case: Model, model: Any) -> Subject:
    real, lengths = case.real, case.lengths.tolist()
    mask = real.long() if case.is_ragged else None

    def packed(model: Any, ids: Tensor) -> Tensor:
        row = headwise.pack(ids, lengths=lengths)
        return model(input_ids=row.tokens, position_ids=row.position_ids).last_hidden_state[0]

    ids = torch.randint(1009, (case.batch, case.rows), generator=torch.Generator().manual_seed(0))
    return Subject(
        model,
        ids,
        lambda m, x: m(input_ids=x, attention_mask=mask).last_hidden_state[real],
        packed,
        f"attn_implementation={model.config._attn_implementation}",
        {"eager": lambda m: m.set_attn_implementation("eager")},
    )


MODELS: dict[str, Callable[[Model], Subject]] = {"vit": vit, "encoder": encoder, "bert": bert, "gpt2": gpt2}
SIZES: tuple[dict[str, Any], ...] = (
    {"kind": "vit", "batch": 4, "rows": 197, "width": 384, "heads": 6, "layers": 6},
    {"kind": "encoder", "batch": 8, "rows": 128, "width": 384, "heads": 12, "layers": 6},
    {"kind": "bert", "batch": 8, "rows": 128, "width": 384, "heads": 12, "layers": 6},
    {"kind": "gpt2", "batch": 2, "rows": 256, "width": 384, "heads": 6, "layers": 6},
)


def cases(quick: bool = False, dtype: str = "float32") -> list[Model]:
    """All cases; with ``quick`` of tiny sizes, which only show that everything runs."""
    tiny = {"batch": 3, "rows": 11, "width": 20, "heads": 4, "layers": 1}
    return [
        Model(**size | (tiny if quick else {}), is_ragged=is_ragged, backward=backward, dtype=dtype)
        for size in SIZES
        for is_ragged in ((False,) if size["kind"] == "vit" else (False, True))
        for backward in (False, True)
    ]


@dataclass(frozen=True)
class Problem:
    """The work and the traffic of a case, for ``benchmarks.run.figures``.

    Args:
        work: Useful floating point operations: matrices of the layers on real tokens, and pairs that may attend.
        traffic: Bytes of the weights of the layers, once; three times with gradients.
    """

    work: int
    traffic: int


def problem(case: Model) -> Problem:
    """What a case is at least."""
    lengths = case.lengths
    pairs = int((lengths * (lengths + 1) // 2 if case.kind == "gpt2" else lengths**2).sum())
    weights = 12 * case.width**2 * case.layers  # four projections, and two matrices of four times the width
    times = 3 if case.backward else 1
    work = 2 * int(lengths.sum()) * weights + 4 * pairs * case.width * case.layers
    return Problem(times * work, times * weights * getattr(torch, case.dtype).itemsize)


def prepare(case: Model) -> tuple[dict[str, Record], Problem]:
    """For each competitor the step that may be timed, or the reason why not, and its error."""
    try:
        subject = _subject(case)
    except ImportError as error:
        reason = f"{error.name} is not installed"
        return {name: _entry(not_timed=reason) for name in ("stock", "headwise")}, problem(case)
    stock = subject.model
    swapped = copy.deepcopy(stock)
    changed = swap(swapped)
    if len(changed.swapped) != case.layers:
        return {"headwise": _entry(not_timed=f"not swapped: {changed}")}, problem(case)
    makers: dict[str, tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor], str]] = {
        "stock": (stock, subject.padded, subject.note)
    }
    for name, change in subject.others.items():
        other = copy.deepcopy(stock)
        change(other)
        makers[name] = (other, subject.padded, name)
    if case.is_ragged and subject.packed is not None:
        makers["headwise padded"] = (swapped, subject.padded, "swapped")
        makers["headwise"] = (swapped, subject.packed, "swapped, packed")
    else:
        makers["headwise"] = (swapped, subject.padded, "swapped")
    inputs = subject.inputs
    grad = _grad(case)
    wide = inputs.double() if inputs.is_floating_point() else inputs
    exact = _results(case, copy.deepcopy(stock).double(), subject.padded, wide, grad.double())
    nearly = _results(case, stock, subject.padded, inputs, grad)
    entries = {}
    for name, (model, forward, note) in makers.items():
        step = _step(case, model, forward, inputs, grad)
        try:
            error, unequal = compare(_results(case, model, forward, inputs, grad), exact, nearly, case)
            start = time.perf_counter()
            step.run()
            took = time.perf_counter() - start
        except Exception as failure:  # whatever a library raises is the reason why it is not timed
            entries[name] = _entry(note=note, not_timed=f"failed: {type(failure).__name__}: {failure!s:.200}")
            continue
        reason = None if unequal is None else f"not equal, not timed: {unequal}"
        if took > runner.PATIENCE_S:
            reason = f"too slow: {took:.1f} s for one call, and {runner.PATIENCE_S:.0f} s are waited for"
        entries[name] = _entry(step if reason is None else None, note, error, reason)
    return entries, problem(case)


def _subject(case: Model) -> Subject:
    """The model of a case, its weights by a fixed seed."""
    torch.manual_seed(0)
    subject = MODELS[case.kind](case)
    with torch.no_grad():
        for parameter in subject.model.parameters():  # biases are zeros at first, and would hide a wrong one
            parameter += 0.02 * torch.randn_like(parameter)
    subject.model.to(getattr(torch, case.dtype)).train(case.backward)
    return subject


def _grad(case: Model) -> Tensor:
    return _normal(int(case.lengths.sum()), case.width).to(getattr(torch, case.dtype))


def _entry(
    step: Step | None = None, note: str = "", error: float | None = None, not_timed: str | None = None
) -> Record:
    return {"step": step, "note": note, "max_error": error, "not_timed": not_timed}


def _step(
    case: Model, model: nn.Module, forward: Callable[[nn.Module, Tensor], Tensor], inputs: Tensor, grad: Tensor
) -> Step:
    """One call; with gradients, those of all weights are left in the model."""

    def run() -> list[Tensor]:
        with torch.set_grad_enabled(case.backward):
            out = forward(model, inputs)
        if case.backward:
            model.zero_grad()
            out.backward(grad)
        return [out]

    return Step(run)


def _results(
    case: Model, model: nn.Module, forward: Callable[[nn.Module, Tensor], Tensor], inputs: Tensor, grad: Tensor
) -> list[Tensor]:
    """The outputs at real tokens, and all gradients in a row, in an order that a swap does not change."""
    out = _step(case, model, forward, inputs, grad).run()[0].detach().clone()
    if not case.backward:
        return [out]
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and ".in_proj_" in name:  # a drop-in has the three apart
            parts = zip("qkv", parameter.grad.chunk(3), strict=True)
            found |= {name.replace(".in_proj_", f".{letter}_proj."): part for letter, part in parts}
        elif parameter.grad is not None:
            found[name] = parameter.grad
    return [out, torch.cat([found[name].flatten() for name in sorted(found)])]


def compare(
    results: Sequence[Tensor], exact: Sequence[Tensor], nearly: Sequence[Tensor], case: Model
) -> tuple[float, str | None]:
    """The largest error against float64; and what is wrong, or None: stock in the dtype of the case is the measure."""
    worst, unequal = 0.0, None
    for what, got, want, close in zip(("output", "gradients"), results, exact, nearly, strict=False):
        if got.shape != want.shape:
            return math.inf, f"{what} of shape {tuple(got.shape)}, not {tuple(want.shape)}"
        worst = max(worst, (got.double() - want).abs().max().item())
        try:
            runner._helpers().assert_as_good_as(got, want, close, terms=case.batch * case.rows, what=what)
        except AssertionError as error:
            unequal = unequal or str(error)
    return worst, unequal


def measure(case: Model, repeats: int, sample_s: float, limits: Sequence[float]) -> Iterator[Record]:
    """A record for each competitor of a case: its figures, or why it was not timed."""
    entries, work = prepare(case)
    steps = {name: entry["step"].run for name, entry in entries.items() if entry["step"] is not None}
    samples, inner = runner.interleave(steps, repeats, sample_s)
    for name, entry in entries.items():
        step, times = entry.pop("step"), samples.get(name)
        yield {
            "kind": "measurement",
            "case": case.name,
            "level": "module",
            "dtype": case.dtype,
            "competitor": name,
            **entry,
            **runner.figures(times, work, limits),  # type: ignore[arg-type]
            "inner": inner.get(name),
            "peak_memory_bytes": None if step is None else runner.peak_memory(step),
            "peak_memory_by": f"{runner.PEAK_BY[True]}: allocations of one call, results included",
            "samples_s": times,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0 when the run counts, 1 when it is void, 2 when it could not start."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default="*", metavar="GLOB", help="names of cases, such as 'model/bert*'")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and tokens")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that all runs, times mean nothing")
    parser.add_argument("--repeats", type=int, metavar="N", help="samples a competitor and case (default 15)")
    parser.add_argument("--seconds", type=float, default=math.inf, metavar="S", help="start no case after so long")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="default: a new file in benchmarks/results/, none with --quick"
    )
    options = parser.parse_args(argv)
    stop = time.monotonic() + options.seconds
    chosen = [case for case in cases(options.quick, options.dtype) if fnmatchcase(case.name, options.cases)]
    repeats = (runner.LEAST if options.quick else 15) if options.repeats is None else options.repeats
    if not chosen:
        return runner.refuse(f"No case is called {options.cases!r}; --list prints their names.")
    if options.list:
        print(*(case.name for case in chosen), sep="\n")
        return 0
    if repeats < runner.LEAST:
        return runner.refuse(f"{repeats} repeats are too few to show a spread; take at least {runner.LEAST}.")
    if not __debug__:
        return runner.refuse("python -O removes the checks of the results; run without it.")
    path = options.output or (None if options.quick else runner.default_path(f"models {options.dtype}"))
    if path is not None and path.exists():
        return runner.refuse(f"{path} exists already; move it away or give --output.")
    with contextlib.ExitStack() as stack:
        sink = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            sink = stack.enter_context(path.open("w"))
        records = run(chosen, repeats, options.quick, stop, sink)
    print(report.table(records))
    if path is not None:
        print(f"Written: {path}. Read it: python -m benchmarks.report {path}")
    return 1 if records[-1]["void"] else 0


def run(chosen: Sequence[Model], repeats: int, quick: bool, stop: float, sink: TextIO | None) -> list[Record]:
    """Measure all that begins before ``stop``: the records, each written as a line as soon as it is there."""
    shared = {**runner.environment(), "quick": quick}
    sample_s = runner.SAMPLE_S / 50 if quick else runner.SAMPLE_S
    records: list[Record] = []

    def keep(record: Record) -> None:
        records.append(shared | record)
        if sink is not None:
            sink.write(json.dumps(records[-1]) + "\n")
            sink.flush()

    ceilings = runner.ceilings(chosen[0].dtype, repeats, sample_s, quick)
    for record in ceilings:
        keep(record)
    before = runner.busy()
    own, left_out = _against_itself(chosen[0], repeats, sample_s), []
    for case in chosen:
        if time.monotonic() > stop:
            left_out.append(case.name)
            continue
        for record in measure(case, repeats, sample_s, [ceiling["per_s"] for ceiling in ceilings]):
            keep(record)
            print(runner.line(record), flush=True)
    own += _against_itself(chosen[0], repeats, sample_s)
    keep(runner.judge(chosen[0].name, own, runner.others(before, runner.busy())) | {"left_out": left_out})
    return records


def _against_itself(case: Model, repeats: int, sample_s: float) -> list[float]:
    """Ratios, round by round, of the times of stock called twice."""
    try:
        subject = _subject(case)
    except ImportError:
        return []
    step = _step(case, subject.model, subject.padded, subject.inputs, _grad(case))
    samples, _ = runner.interleave({"one": step.run, "the same": step.run}, repeats, sample_s)
    return [a / b for a, b in zip(samples["one"], samples["the same"], strict=False)]


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(20171206))


def _tokens(case: Model) -> Tensor:
    return _normal(case.batch, case.rows, case.width).to(getattr(torch, case.dtype))


if __name__ == "__main__":
    sys.exit(main())
