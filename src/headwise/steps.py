"""Multi-head attention on numbers small enough to read: every step, and four mistakes on the same numbers.

Why split the embedding into heads, why transpose, and what goes wrong without: ``walk`` computes each variant
and says what it means and how to notice. Nothing here is fast; it is the layer written out.
"""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.algebra import Mask, evaluate
from headwise.attention import MultiHeadAttention
from headwise.errors import ShapeError
from headwise.explain import shape
from headwise.lint import called
from headwise.masks import Causal
from headwise.positions import Positions

WIDTH = 80
LARGEST = 512  # numbers of one tensor that are printed
CHANGED = 1e-9  # float64 rounding of these sums stays far below


@dataclass(frozen=True)
class Shown:
    """One step with its numbers.

    Args:
        title: The step and its line of code.
        letters: Dimensions of the tensors, such as "B H T T".
        says: What happened and why.
        tensors: The numbers by name.
    """

    title: str
    letters: str
    says: str
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Mistake:
    """A wrong variant on the same numbers.

    Args:
        title: What was left out, with its line of code.
        letters: Dimensions of its scores.
        scores: Shape of its scores.
        output: What comes out, "B T E".
        difference: Largest difference from the right output.
        wrong_rows: Tokens whose output differs, counted from 1.
        says: What it means.
        last: Tokens whose output changes when the last token is changed.
        first: Tokens whose output changes when the first token is changed.
        swapped: Tokens from the third on whose output changes when, without a mask, the first two swap.
        landed: For each head and token, or each token of the output, the numbers that landed there as
            (token, dimension), counted from 1; None where everything is where it belongs.
    """

    title: str
    letters: str
    scores: tuple[int, ...]
    output: Tensor
    difference: float
    wrong_rows: tuple[int, ...]
    says: str
    last: tuple[int, ...]
    first: tuple[int, ...]
    swapped: tuple[int, ...]
    landed: dict[str, list[tuple[int, int]]] | None = None


@dataclass(frozen=True)
class Steps:
    """The whole walk; printed as text.

    Args:
        tokens: The input, "B T E" with one sequence.
        mask: The mask as text.
        num_heads: Number of heads.
        steps: The steps in order.
        output: What the last step gives.
        error: Largest difference between it and the output of ``MultiHeadAttention`` with the same weights.
        right: The probes of a ``Mistake`` on the right formula, by name: last, first and swapped.
        mistakes: The four mistakes.
    """

    tokens: Tensor
    mask: str
    num_heads: int
    steps: tuple[Shown, ...]
    output: Tensor
    error: float
    right: dict[str, tuple[int, ...]]
    mistakes: tuple[Mistake, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers, texts, lists and dictionaries, for JSON."""
        return _plain(self)

    def __str__(self) -> str:
        _, length, width = self.tokens.shape
        lines = _wrap(
            f"{length} tokens of {width} numbers (E), {self.num_heads} heads of {width // self.num_heads} "
            f"(D), mask {self.mask}, one sequence (B = 1), float64."
        )
        for number, step in enumerate(self.steps, 1):
            lines += ["", *_wrap(f"{number}. {step.title}"), *_wrap(step.says)]
            for name, tensor in step.tensors.items():
                axes = step.letters if len(step.letters.split()) == tensor.dim() else ""
                lines += ["", f"{name}  ({axes}) {shape(tuple(tensor.shape))}", *_table(tensor, step.letters)]
        lines += [
            "",
            f"This equals the layer to within {self.error:.1e}.",
            "",
            "Four mistakes on the same numbers",
        ]
        for letter, m in zip("abcd", self.mistakes, strict=True):
            rows = _tokens(m.wrong_rows)
            lines += ["", *_wrap(f"({letter}) {m.title}"), f"scores ({m.letters}) {shape(m.scores)}"]
            lines += ["", f"out  (B T E) {shape(tuple(m.output.shape))}", *_table(m.output, "B T E")]
            lines += _wrap(f"Off by up to {m.difference:.2f}, in {rows}. {m.says}")
            for place, numbers in (m.landed or {}).items():
                lines += _wrap(f"{place}: {_runs(numbers)}", "    ")
            for name, text in PROBES.items():
                right, wrong = self.right[name], getattr(m, name)
                mark = "looks right" if right == wrong else "shows it"
                lines += _wrap(f"{text}: {_tokens(right)}; here {_tokens(wrong)}: {mark}.", "  ")
        return "\n".join(lines)


PROBES = {
    "last": "Change the last token, and these change",
    "first": "Change the first token, and these change",
    "swapped": "Without a mask, let the first two tokens trade places, and of the others these change",
}

Variant = Callable[[Tensor, Tensor, Tensor, int, Tensor | None], tuple[Tensor, Tensor]]
Layer = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]


def walk(embed_dim: int = 6, num_heads: int = 3, length: int = 3, *, seed: int = 0, mask: Mask | None = None) -> Steps:
    """Compute multi-head self-attention step by step on a small random input, and four ways to get it wrong.

    Args:
        embed_dim: Numbers of a token.
        num_heads: Number of heads, which must divide ``embed_dim``.
        length: Number of tokens.
        seed: Of the input and the weights, which are rounded to one decimal to be easy to check by hand.
        mask: Which keys a query may attend to; None means ``Causal()``.

    Returns:
        The steps and the mistakes, with their numbers. It prints as text.

    Raises:
        ShapeError: When the sizes do not fit together, or are too large to read.

    Example:
        >>> found = walk()
        >>> [tuple(t.shape) for t in found.steps[3].tensors.values()]  # a score for each head, query and key
        [(1, 3, 3, 3)]
        >>> [m.scores for m in found.mistakes]
        [(1, 3, 3), (1, 3, 3, 3), (1, 3, 3, 3), (1, 3, 3, 3)]
    """
    if length < 1 or max(length * embed_dim, num_heads * length**2) > LARGEST:
        raise ShapeError(
            f"{length} tokens of {embed_dim} numbers in {num_heads} heads cannot be read; give at least 1 "
            f"token, and at most {LARGEST} numbers in each tensor."
        )
    mask = Causal() if mask is None else mask
    made = torch.Generator().manual_seed(seed)

    def draw(*sizes: int) -> Tensor:
        return torch.randint(-10, 11, sizes, generator=made, dtype=torch.float64) / 10

    layer = MultiHeadAttention(embed_dim, num_heads, bias=False, dtype=torch.float64)
    tokens = draw(1, length, embed_dim)
    weights = {name: draw(embed_dim, embed_dim) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
    layer.load_state_dict({f"{name}.weight": weight for name, weight in weights.items()})
    at = Positions(length)
    allowed = evaluate(mask.bind(1, num_heads, at, at), 1, num_heads, at, at)
    with torch.no_grad():
        wanted = layer(tokens, mask=mask)
        steps, output = _steps(tokens, weights, num_heads, allowed, called(mask))
        mistakes = tuple(_mistakes(tokens, weights, num_heads, allowed, output))
        right = _probe(_between(_right, weights, num_heads), tokens, allowed)
    error = (output - wanted).abs().max().item()
    return Steps(tokens, called(mask), num_heads, steps, output, error, right, mistakes)


def _steps(
    tokens: Tensor, weights: dict[str, Tensor], heads: int, allowed: Tensor, mask: str
) -> tuple[tuple[Shown, ...], Tensor]:
    size = tokens.shape[-1] // heads
    found: list[Shown] = []

    def show(title: str, letters: str, says: str, **tensors: Tensor) -> None:
        found.append(Shown(title, letters, says, tensors))

    q, k, v = (tokens @ weights[name].T for name in ("q_proj", "k_proj", "v_proj"))
    show(
        "project: q = tokens · W_qᵀ, k = tokens · W_kᵀ, v = tokens · W_vᵀ",
        "B T E",
        "Each token asks (q), is looked up (k) and is read (v) in its own way. Every number may depend on "
        "every number of its token, and on no other token.",
        tokens=tokens,
        q=q,
        k=k,
        v=v,
    )
    q_BTHD, k_BTHD, v_BTHD = (t.unflatten(-1, (heads, size)) for t in (q, k, v))
    first = f"head 1 gets d1–d{size}" + (f", head 2 d{size + 1}–d{2 * size}" if heads > 1 else "")
    show(
        f"split: q.unflatten(-1, ({heads}, {size})), k and v alike",
        "B T H D",
        f"The last dimension is cut into heads: {first}. {_moved(q, q_BTHD)} Which numbers belong together "
        "is what changes: dot products and softmax will now stay within a head.",
        q=q_BTHD,
    )
    q_BHTD, k_BHTD, v_BHTD = (t.transpose(1, 2) for t in (q_BTHD, k_BTHD, v_BTHD))
    show(
        "transpose: q.transpose(1, 2), k and v alike",
        "B H T D",
        "matmul multiplies the last two dimensions and repeats over those before. With heads in front it "
        f"makes one (T, D) matrix per head. {_moved(q_BTHD, q_BHTD)} Strides {shape(q_BTHD.stride())} "
        f"become {shape(q_BHTD.stride())}.",
        q=q_BHTD,
        k=k_BHTD,
        v=v_BHTD,
    )
    raw_BHTT = q_BHTD @ k_BHTD.mT
    show(
        "score: q @ k.mT",
        "B H T T",
        "Each head compares every query with every key, by its own numbers alone. Added up over the heads "
        "these are the scores of one large head; kept apart, each head can look elsewhere.",
        scores=raw_BHTT,
    )
    scores_BHTT = raw_BHTT * size**-0.5
    show(
        f"scale: scores · 1/√{size}",
        "B H T T",
        "A sum of D products grows like √D; the scale keeps the softmax from becoming a hard choice.",
        scores=scores_BHTT,
    )
    hidden_BHTT = scores_BHTT.masked_fill(~allowed, -torch.inf)
    show(
        f"mask: -inf where {mask} does not allow the pair",
        "B H T T",
        f"{int(allowed.expand_as(scores_BHTT).sum())} of {scores_BHTT.numel()} pairs are allowed. exp(-inf) "
        "= 0, so a hidden key gets no weight.",
        scores=hidden_BHTT,
    )
    weights_BHTT = _softmax(hidden_BHTT)
    show(
        "softmax over the keys, in each head and row",
        "B H T T",
        f"Each row becomes weights that sum to 1 (0 where it may see nothing): {heads} rows of weights for "
        "each token, one a head, where a single head would have one.",
        weights=weights_BHTT,
    )
    out_BHTD = weights_BHTT @ v_BHTD
    show(
        "sum: weights @ v",
        "B H T D",
        "Each head mixes its own part of the values by its own weights.",
        out=out_BHTD,
    )
    out_BTHD = out_BHTD.transpose(1, 2)
    show(
        "transpose back: out.transpose(1, 2)",
        "B T H D",
        "Tokens come to the front again, so that what belongs to a token stands together. "
        f"{_moved(out_BHTD, out_BTHD)}",
        out=out_BTHD,
    )
    merged = out_BTHD.flatten(2)
    show(
        "merge: out.flatten(2)",
        "B T E",
        f"The heads of a token stand side by side. {_moved(out_BTHD, merged)}",
        out=merged,
    )
    output = merged @ weights["out_proj"].T
    show("project: out · W_outᵀ", "B T E", "Only here do the heads of a token meet.", out=output)
    return tuple(found), output


def _right(q: Tensor, k: Tensor, v: Tensor, heads: int, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    out, scores = _attend(q, k, v, allowed)
    return out.transpose(1, 2).flatten(2), scores


def _no_split(q: Tensor, k: Tensor, v: Tensor, heads: int, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    return _attend(q, k, v, None if allowed is None else allowed[:, 0])


def _no_transpose(q: Tensor, k: Tensor, v: Tensor, heads: int, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    q, k, v = (t.unflatten(-1, (heads, -1)) for t in (q, k, v))
    out, scores = _attend(q, k, v, None)  # a mask over tokens means nothing between heads
    return out.flatten(2), scores


def _view_straight(q: Tensor, k: Tensor, v: Tensor, heads: int, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, length, width = q.shape
    q, k, v = (t.view(batch, heads, length, width // heads) for t in (q, k, v))
    out, scores = _attend(q, k, v, allowed)
    return out.transpose(1, 2).flatten(2), scores


def _no_way_back(q: Tensor, k: Tensor, v: Tensor, heads: int, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    before = q.shape
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    out, scores = _attend(q, k, v, allowed)
    return out.reshape(before), scores


def _attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return _softmax(scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)) @ v, scores


def _softmax(scores: Tensor) -> Tensor:
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0)


def _mistakes(tokens: Tensor, weights: dict[str, Tensor], heads: int, allowed: Tensor, right: Tensor) -> list[Mistake]:
    _, length, width = tokens.shape
    size = width // heads
    place = torch.arange(length * width)
    from_view = place.view(heads, length, size)
    from_merge = place.view(length, heads, size).transpose(0, 1).reshape(length, heads, size)
    landed_view = {
        f"head {h + 1}, t{t + 1}": _from(from_view[h, t], width) for h in range(heads) for t in range(length)
    }
    landed_merge = {f"output t{t + 1}": _from(from_merge[t].flatten(), width) for t in range(length)}
    told = {
        f"no split: q @ k.mT with q of shape ({length}, {width})": (
            "B T T", _no_split, None,
            f"One score for each pair and one softmax: a single head of {width} numbers. A token has one "
            f"set of weights for all its numbers instead of {heads} sets. No number is mixed up: it is "
            "another model, which can look to one place at a time, so no probe of the mixing finds it; the "
            "shape of the scores does.",
        ),
        f"no transpose: q @ k.mT with q of shape ({length}, {heads}, {size})": (
            "B T H H", _no_transpose, None,
            "Heads attend to heads inside each token, and no token sees another: it is no attention over the "
            "sequence at all. A (T, T) mask does not fit (H, H)"
            + ", except by accident where H = T, as here" * (heads == length) + ".",
        ),
        f"view straight to heads: q.view(1, {heads}, {length}, {size})": (
            "B H T T", _view_straight, landed_view,
            "The shape is right and the numbers are not: view keeps the order in memory, where a token's "
            "numbers stand together. A head so gets parts of different tokens, and what it calls token t "
            "may be a later one. Here is what landed where:",
        ),
        f"no transpose back: out.reshape(1, {length}, {width}), out of shape ({heads}, {length}, {size})": (
            "B H T T", _no_way_back, landed_merge,
            "The heads did their work, and it was dealt to the wrong tokens: memory has all tokens of head "
            "1 first. These numbers of the right merge landed here:",
        ),
    }  # fmt: skip
    found = []
    for title, (letters, variant, landed, says) in told.items():
        layer = _between(variant, weights, heads)
        output, scores = layer(tokens, allowed)
        off = (output - right).abs()
        rows = _changed(output, right)
        probes = _probe(layer, tokens, allowed)
        found.append(
            Mistake(
                title,
                letters,
                tuple(scores.shape),
                output,
                off.max().item(),
                rows,
                says,
                **probes,
                landed=landed,
            )
        )
    return found


def _between(variant: Variant, weights: dict[str, Tensor], heads: int) -> Layer:
    """A variant between the same four projections."""

    def layer(tokens: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = (tokens @ weights[name].T for name in ("q_proj", "k_proj", "v_proj"))
        out, scores = variant(q, k, v, heads, allowed)
        return out @ weights["out_proj"].T, scores

    return layer


def _probe(layer: Layer, tokens: Tensor, allowed: Tensor) -> dict[str, tuple[int, ...]]:
    """Which rows of the output change when other tokens do: no look into the layer is needed for that."""
    found = {}
    for name, token in (("last", -1), ("first", 0)):
        changed = tokens.clone()
        changed[:, token] += 1
        found[name] = _changed(layer(changed, allowed)[0], layer(tokens, allowed)[0])
    order = torch.arange(tokens.shape[1])
    order[:2] = order[:2].flip(0)
    swapped = _changed(layer(tokens[:, order], None)[0], layer(tokens, None)[0])
    return found | {"swapped": tuple(t for t in swapped if t > 2)}


def _changed(a: Tensor, b: Tensor) -> tuple[int, ...]:
    return tuple((((a - b).abs() > CHANGED).any(-1)[0].nonzero()[:, 0] + 1).tolist())


def _from(places: Tensor, width: int) -> list[tuple[int, int]]:
    return [(p // width + 1, p % width + 1) for p in places.tolist()]


def _moved(before: Tensor, after: Tensor) -> str:
    same = before.untyped_storage()._cdata == after.untyped_storage()._cdata
    return "It is a view: no number moves." if same else "It is a copy: the numbers are written out in the new order."


def _runs(places: list[tuple[int, int]]) -> str:
    """Places as runs: "t1 d5–d6, t2 d1"."""
    parts: list[list[int]] = []
    for token, dim in places:
        if parts and parts[-1][0] == token and parts[-1][2] == dim - 1:
            parts[-1][2] = dim
        else:
            parts.append([token, dim, dim])
    return ", ".join(f"t{t} d{a}" + (f"–d{b}" if b > a else "") for t, a, b in parts)


def _tokens(rows: tuple[int, ...]) -> str:
    return ", ".join(f"t{t}" for t in rows) if rows else "none"


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  " * bool(indent))


def _table(tensor: Tensor, letters: str) -> list[str]:
    """The numbers of one sequence, labelled; matrices side by side while they fit."""
    names = {"T": "t", "H": "h", "D": "d", "E": "d"}
    axes = letters.split()[1:]
    blocks: list[list[str]] = []
    matrices = tensor[0].unsqueeze(0) if tensor.dim() == 3 else tensor[0]
    outer = {"H": "head ", "T": "token "}.get(axes[0], "") if tensor.dim() == 4 else ""
    row, column = names[axes[-2]], names[axes[-1]]
    for number, matrix in enumerate(matrices, 1):
        for start in range(0, matrix.shape[1], 10):
            part = matrix[:, start : start + 10]
            numbers = "".join(f"{column}{start + j + 1}".rjust(6) for j in range(part.shape[1]))
            head = [f"    {outer}{number}"] * bool(outer) + [f"    {numbers}"]
            rows = enumerate(part.tolist(), 1)
            blocks.append(head + [f"{row}{i}".ljust(4) + "".join(map(_number, r)) for i, r in rows])
    wide = 3 + max(len(line) for block in blocks for line in block)
    beside = max(1, (WIDTH + 3) // wide)
    lines: list[str] = []
    for first in range(0, len(blocks), beside):
        side_by_side = zip(*blocks[first : first + beside], strict=True)
        lines += ["".join(line.ljust(wide) for line in together).rstrip() for together in side_by_side]
    return lines


def _number(value: float) -> str:
    return "  -inf" if value == -torch.inf else f"{round(value, 2) + 0.0:6.2f}"


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return {k: _plain(v) for k, v in vars(value).items()} if isinstance(value, (Shown, Mistake, Steps)) else value
