"""The commands of ``headwise``, on typer and rich; cli.py imports them where both are installed."""

import codecs
import io
import json
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import typer.core
from rich.console import Console
from rich.table import Table

from headwise import look
from headwise.algebra import Mask
from headwise.attention import MultiHeadAttention
from headwise.errors import AttentionError, ShapeError
from headwise.explain import Explanation, details, explain
from headwise.masks import Full
from headwise.notation import draw, parse
from headwise.positions import Positions
from headwise.rotary import RotaryEmbedding
from headwise.score_mods import ALiBi, ScoreMod, Softcap
from headwise.show.figures import draw_heads
from headwise.show.tables import LEGEND, head_table
from headwise.steps import walk

DTYPES = ("float32", "bfloat16", "float16", "float64")
LARGEST_PICTURE = 2_000  # queries or keys that `mask` draws
MOST = 2**29  # numbers of a tensor, or scores, that `explain` computes
# what a terminal without Unicode is shown instead
ASCII = {"■": "#", "·": ".", "→": ">", "×": "x", "√": "root ", "ᵀ": "'", "…": "...", "–": "-"}


class _Commands(typer.core.TyperGroup):
    """Errors of headwise in one line, with exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        codecs.register_error("headwise", _to_ascii)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="headwise")
        try:
            return super().invoke(ctx)
        except AttentionError as error:
            print(f"headwise: {' '.join(str(error).split())}", file=sys.stderr)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    help="Multi-head attention: look at it, explain it, draw its masks.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def _main() -> None:
    """Keep the names of the commands, however many there are."""


@app.command("mask")
def mask_command(
    text: Annotated[str, typer.Argument(help='Such as "Causal() & (Window(4) | Prefix(2))".', metavar="MASK")],
    queries: Annotated[int, typer.Argument(min=0, help="Number of queries.")],
    keys: Annotated[int | None, typer.Argument(min=0, help="Number of keys; as many as queries if left out.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Number of sequences.")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Number of heads.")] = 1,
) -> None:
    """Draw a mask: a row for each query, a column for each key.

    headwise mask "Causal() & Window(3)" 8

    headwise mask "Causal() & Padding([3, 5])" 5 --batch 2

    headwise mask "PerHead((Causal(), Window(1)))" 4 --heads 2
    """
    keys = queries if keys is None else keys
    if max(queries, keys) > LARGEST_PICTURE or batch * heads * queries * keys > LARGEST_PICTURE**2:
        raise ShapeError(
            f"A picture of {queries:,} queries and {keys:,} keys for {batch} sequences and {heads} heads is "
            f"too large; at most {LARGEST_PICTURE:,} of each, and {LARGEST_PICTURE**2:,} pairs in all, are "
            "drawn."
        )
    mask = parse(text)
    with torch.no_grad():
        zeros = torch.zeros(batch, heads, max(queries, keys), 1)
        found = explain(zeros[:, :, :queries], zeros[:, :, :keys], zeros[:, :, :keys], mask=mask)
    print(draw(mask, queries, keys, batch=batch, heads=heads) or "(no queries)")
    print(f"\n{found.totals()[0]}")
    _paragraph(_runs(mask, batch, heads, queries, keys))
    chosen = next(c for c in found.choices if c.verdict == "runs it")
    _paragraph(f"backend {chosen.backend}: {chosen.why}")
    for lint in found.lints:
        _paragraph(f"{lint.kind}: {lint.text}")


@app.command("explain")
def explain_command(
    embed_dim: Annotated[int | None, typer.Option(min=1, help="Numbers of a token. [512; with --steps 6]")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads. [8; with --steps 3]")] = None,
    length: Annotated[int | None, typer.Option(min=0, help="Query tokens. [128; with --steps 3]")] = None,
    key_length: Annotated[int | None, typer.Option(min=0, help="Key tokens, for cross-attention.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Key/value heads; as many as --heads if left out.")
    ] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Size of a head.")] = None,
    mask: Annotated[
        str | None, typer.Option(help='Such as "Causal() & Window(32)". [Full(); with --steps Causal()]')
    ] = None,
    softcap: Annotated[float | None, typer.Option(help="Bound the scores by this.")] = None,
    alibi: Annotated[bool, typer.Option("--alibi", help="Lower scores with the distance.")] = False,
    sinks: Annotated[bool, typer.Option("--sinks", help="One more logit in the softmax of each head.")] = False,
    rotary: Annotated[bool, typer.Option("--rotary", help="Rotary position embedding.")] = False,
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES) + ".")] = "float32",
    backend: Annotated[str, typer.Option(help="auto, or the name of one.")] = "auto",
    training: Annotated[bool, typer.Option("--training", help="With gradients.")] = False,
    steps: Annotated[bool, typer.Option("--steps", help="Real numbers on a small input, and four mistakes.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the numbers of --steps.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
) -> None:
    """Explain one call of a layer: its steps, shapes, strides, cost, backend, and what is odd about its mask.

    headwise explain --embed-dim 512 --heads 8 --kv-heads 2 --length 128 --mask "Causal() & Window(32)"

    headwise explain --steps
    """
    if steps:
        settings: dict[str, object] = {
            "key-length": key_length,
            "kv-heads": kv_heads,
            "head-dim": head_dim,
            "softcap": softcap,
        }
        settings |= {"alibi": alibi or None, "sinks": sinks or None, "rotary": rotary or None}
        settings |= {"training": training or None, "batch": None if batch == 1 else batch}
        settings |= {"dtype": None if dtype == "float32" else dtype, "backend": None if backend == "auto" else backend}
        given = [f"--{name}" for name, value in settings.items() if value is not None]
        if given:
            raise ShapeError(
                f"--steps does not take {', '.join(given)}; it takes --embed-dim, --heads, --length, --mask and --seed."
            )
        small = {"embed_dim": embed_dim, "num_heads": heads, "length": length, "mask": mask and parse(mask)}
        told = walk(**{k: v for k, v in small.items() if v is not None}, seed=seed)  # type: ignore[arg-type]
        print(json.dumps(told.to_dict()) if as_json else str(told))
        return
    embed_dim, heads, length = embed_dim or 512, heads or 8, 128 if length is None else length
    if dtype not in DTYPES:
        raise ShapeError(f"There is no dtype {dtype!r} here; there are {', '.join(DTYPES)}.")
    size = head_dim or max(1, embed_dim // heads)
    keys = length if key_length is None else key_length
    scores, numbers = (
        batch * heads * length * keys,
        max(batch * max(length, keys), embed_dim) * max(embed_dim, heads * size),
    )
    most = MOST // 4 if training else MOST  # the reference then holds several tensors of all scores
    if max(scores, numbers) > most:
        raise ShapeError(
            f"explain makes the call, and this one has {scores:,} scores and tensors of {numbers:,} "
            f"numbers; at most {most:,} of either are computed. Take fewer tokens or heads: the costs grow "
            "evenly."
        )
    mods: list[ScoreMod] = [] if softcap is None else [Softcap(softcap)]
    mods += [ALiBi(heads)] * alibi
    layer = MultiHeadAttention(
        embed_dim,
        heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary=RotaryEmbedding(size) if rotary else None,
        score_mods=mods,
        sinks=sinks,
        backend=backend,
        dtype=getattr(torch, dtype),
    ).train(training)
    tokens = torch.randn(batch, length, embed_dim, dtype=layer.q_proj.weight.dtype)
    others = None if key_length is None else torch.randn(batch, key_length, embed_dim, dtype=tokens.dtype)
    with torch.set_grad_enabled(training):
        found = explain(layer, tokens, others, mask=Full() if mask is None else parse(mask))
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        _print_explanation(found)


@app.command("look")
def look_command(
    text: Annotated[
        str | None,
        typer.Argument(envvar="HEADWISE_TEXT", show_envvar=True, show_default=False, help="Any text."),
    ] = None,
    model: Annotated[str, typer.Option(help="embedded, minilm, or a folder that transformers loads.")] = "embedded",
    png: Annotated[Path | None, typer.Option(help="Draw all heads into this file.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
) -> None:
    """Show what each head of a trained model does on a text.

    headwise look "one two three, one two three"

    headwise look "The animal didn't cross the street" --model minilm --png heads.png
    """
    text = look.SENTENCE if text is None else text
    if png is not None and not png.absolute().parent.is_dir():
        raise ShapeError(f"There is no folder {png.absolute().parent} to draw into; make it, or name another file.")
    if model == "embedded":
        found = look.look_embedded(text)
    elif model == "minilm":
        found = look.look_minilm(text)
    else:
        found = look.look_folder(Path(model), text)
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        _print_look(found)
    if png is not None:
        captions = [layer.kinds() for layer in found.layers]
        weights = [layer.weights for layer in found.layers]
        unwritable = draw_heads(weights, found.tokens, png, title=" ".join(text.split()), captions=captions)
        says = f"All heads are drawn in {png}."
        if unwritable:
            says += f" No installed font writes {len(unwritable)} of the tokens; they are shown by number."
        print(says, file=sys.stderr if as_json else sys.stdout)


def _print_look(found: look.Look) -> None:
    console = Console(highlight=False, markup=False)
    heads = len(found.layers[0].pairs)
    if found.remark:
        _paragraph(found.remark)
    _paragraph(f"{found.model}: {len(found.layers)} layers of {heads} heads, {len(found.tokens)} tokens.")
    _paragraph(f"It differs from {found.against} by at most {found.difference:.1e}.")
    print()
    _paragraph(LEGEND)
    print()
    for number, layer in enumerate(found.layers):
        statistics = [layer.statistics.head(head) for head in range(len(layer.pairs))]
        title = f"layer {number} ({layer.name})"
        console.print(head_table(title, statistics, layer.kinds(), layer.pairs, found.tokens))


def _print_explanation(found: Explanation) -> None:
    table = Table("step", "shapes, memory, cost", show_lines=True)
    for step in found.steps:
        table.add_row(f"{step.name}\n{step.formula}", "\n".join(details(step)))
    backends = Table("backend", "verdict", "why", show_lines=True)
    for choice in found.choices:
        backends.add_row(choice.backend, choice.verdict, choice.why)
    lints = Table("mask", "what was found", show_lines=True)
    for lint in found.lints:
        lints.add_row(lint.kind, lint.text)
    for line in found.heading():
        _paragraph(line)
    console = Console(highlight=False, markup=False)
    console.print(table)
    for line in found.totals():
        _paragraph(line)
    console.print(backends)
    if found.lints:
        console.print(lints)


def _runs(mask: Mask, batch: int, heads: int, queries: int, keys: int) -> str:
    at, of = Positions(queries, start=keys - queries), Positions(keys)
    spans = mask.bind(batch, heads, at, of).spans(at, of)
    if spans is None:
        return "runs of keys: none are known, so every pair is evaluated"
    if spans.is_numbers:
        first, last = ["0"], [str(keys if spans.last is None else spans.last)]
        first += [str(spans.first)] * (spans.first > 0)
        first += [] if spans.left is None else [f"t{spans.left:+d}"]
        last += [] if spans.right is None else [f"t{spans.right:+d}"]
        low = f"max({', '.join(first)})" if len(first) > 1 else first[0]
        high = f"min({', '.join(last)})" if len(last) > 1 else last[0]
        return f"runs of keys: one per query t, as numbers: {low} <= key < {high}"
    runs = spans.tensor()
    text = f"runs of keys: at most {runs.shape[-2]} per query, as a tensor of {runs.numel():,} numbers"
    if queries <= 16:
        parts = [", ".join(f"{a}-{b - 1}" for a, b in row if b > a) or "none" for row in runs[0, 0].tolist()]
        text += "; " + "; ".join(f"query {t}: {part}" for t, part in enumerate(parts))
    return text


def _paragraph(text: str) -> None:
    print(textwrap.fill(text, 80, subsequent_indent="  "))


def _to_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(ASCII.get(c, "?") for c in error.object[error.start : error.end]), error.end
