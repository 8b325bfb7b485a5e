"""The mask linter: what a mask lets be seen in a call, and what is odd about it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.algebra import And, Mask, Not, Or, evaluate, spans_of
from headwise.masks import Causal, Dense, Full, Padding, PerHead
from headwise.positions import Positions

BLOCK = 2**24  # pairs of a mask without spans that are evaluated at once


@dataclass(frozen=True)
class Lint:
    """A mask that is probably not meant, or that costs more than it has to.

    Args:
        kind: "empty rows", "unseen keys", "no effect", "polarity", "dense causal" or "no spans".
        text: What is wrong, with both numbers, and what to do.
    """

    kind: str
    text: str


@dataclass(frozen=True, eq=False)
class Sight:
    """What a mask shows: how many keys each query sees, "B H T", and which keys any query sees, "B H S"."""

    per_query: Tensor
    seen: Tensor

    @property
    def pairs(self) -> int:
        """Number of allowed pairs."""
        return int(self.per_query.sum())


def look_at(
    mask: Mask,
    batch: int,
    heads: int,
    queries: Positions,
    keys: Positions,
    *,
    device: torch.device | str = "cpu",
) -> Sight:
    """Count what a bound mask allows: from its spans, or else by evaluating it in blocks of queries."""
    spans = spans_of(mask, queries, keys)
    if spans is not None:
        runs = spans.tensor("cpu" if spans.is_numbers else device).long()
        counts = (runs[..., 1] - runs[..., 0]).sum(-1)
        # a key is seen where more runs have begun than ended
        edges = torch.zeros(*runs.shape[:2], keys.count + 1, dtype=torch.int64, device=runs.device)
        for end, sign in ((0, 1), (1, -1)):
            places = runs[..., end].flatten(2)
            edges.scatter_add_(-1, places, torch.full_like(places, sign))
        seen = edges.cumsum(-1)[..., : keys.count] > 0
    else:
        step = max(1, BLOCK // max(1, batch * heads * keys.count))
        parts = [
            evaluate(mask, batch, heads, queries, keys, device=device, rows=slice(first, first + step))
            for first in range(0, max(1, queries.count), step)
        ]
        counts = torch.cat([p.sum(-1) for p in parts], -1)
        seen = torch.stack([p.any(-2) for p in parts]).any(0)
    return Sight(counts.expand(batch, heads, -1), seen.expand(batch, heads, -1))


def lint_mask(
    mask: Mask,
    batch: int,
    heads: int,
    queries: Positions,
    keys: Positions,
    *,
    device: torch.device | str = "cpu",
) -> Iterator[Lint]:
    """Find what is odd about a bound mask in a call of these sizes.

    Args:
        mask: The mask, bound to the call.
        batch: Number of sequences.
        heads: Number of query heads.
        queries: Where the queries stand.
        keys: Where the keys stand.
        device: Where to evaluate it.

    Yields:
        What was found, each with its numbers and what to do.

    Example:
        >>> at = Positions(5)
        >>> [found.kind for found in lint_mask(Causal() & Window(9), 1, 1, at, at)]
        ['no effect']
    """
    call = (batch, heads, queries, keys)
    rows, slots = queries.count, keys.count
    found = look_at(mask, *call, device=device)
    yield from _unseen(found, rows, slots)
    # one query that stands last sees everything under most masks, and nobody means anything by it
    if rows > 1 and slots:
        yield from _without_effect(mask, found.pairs, call, device)
    for part in _conjuncts(mask):
        if text := _polarity(part, call, device):
            yield Lint("polarity", text)
        elif isinstance(part, Dense) and rows > 1 and part.values.shape[-2:] == (rows, slots):
            causal = evaluate(Causal(), *call, device=device).expand(1, 1, rows, slots)
            if bool((part.values == causal).all()):
                yield Lint(
                    "dense causal",
                    f"{called(part)} is Causal() written as {part.values.numel():,} booleans; Causal() "
                    "needs 0, and fused kernels know it. Write Causal().",
                )
    for leaf in {id(leaf): leaf for leaf in _leaves(mask)}.values():
        if leaf.spans(queries, keys) is None:
            yield Lint(
                "no spans",
                f"{called(leaf)} has no runs of keys, so all {rows * slots:,} pairs of query and key are "
                f"evaluated; the mask as a whole allows {found.pairs / max(1, batch * heads):,.4g} a head. "
                "Where you can, say it with Causal, Window, Prefix, Chunk, Padding(lengths) or "
                "Document.from_lengths.",
            )


def _unseen(found: Sight, rows: int, slots: int) -> Iterator[Lint]:
    empty = (found.per_query == 0).nonzero()
    total = found.per_query.numel()
    if len(empty) and slots:
        first = ", ".join(f"{n} {i}" for n, i in zip(("sequence", "head", "query"), empty[0].tolist(), strict=True))
        yield Lint(
            "empty rows",
            f"{len(empty):,} of {total:,} query rows may see no key (the first: {first}); their output is "
            "zeros. If that is not meant, let each query see itself: mask | Window(1).",
        )
    unseen = ~found.seen.any(1)
    if rows and unseen.any():
        row = int(unseen.any(-1).nonzero()[0, 0])
        numbers = unseen[row].nonzero()[:, 0].tolist()
        span = f"key {numbers[0]}" if len(numbers) == 1 else f"keys {numbers[0]} to {numbers[-1]}"
        count = int(unseen.sum())
        yield Lint(
            "unseen keys",
            f"{count:,} of {unseen.numel():,} keys are seen by no query (in sequence {row}: "
            f"{len(numbers):,}, {span}): {count / unseen.numel():.0%} of the work on keys and values is "
            "wasted. Cut off what all rows leave unseen, and put rows of like length together.",
        )


def _without_effect(mask: Mask, pairs: int, call: Any, device: Any) -> Iterator[Lint]:
    rest = _conjuncts(mask)
    for part in [p for p in rest if not isinstance(p, Full)]:
        others = [p for p in rest if p is not part]
        without: Mask = Full()
        for p in others:
            without = p if isinstance(without, Full) else without & p
        if look_at(without, *call, device=device).pairs == pairs:
            rest = others
            yield Lint(
                "no effect",
                f"{called(part)} changes nothing: {pairs:,} pairs are allowed with it and {pairs:,} "
                "without. Leave it out, or check its size against the call's.",
            )


def _polarity(leaf: Mask, call: Any, device: Any) -> str | None:
    """Why a mask of booleans may have True and False exchanged."""
    batch, heads, queries, keys = call
    if isinstance(leaf, Padding):
        real = leaf.lengths
        if not leaf.is_boolean or not isinstance(real, Tensor) or not real.shape[-1]:
            return None
        mixed = real[real.any(-1) & ~real.all(-1)]
        tail = not mixed[:, 0].any() and bool((mixed[:, 1:] >= mixed[:, :-1]).all())
        if not len(mixed) or not tail:
            return None
        return (
            f"In all {len(mixed)} rows that have padding, it shows only the tail: {int(mixed.sum())} of "
            f"{mixed.numel()} keys. True means a real token; if True marks padding in your tensor, write "
            "Padding(~mask), and if rows are padded on the left, Padding(left=n)."
        )
    if not isinstance(leaf.a if isinstance(leaf, Not) else leaf, Dense):
        return None
    if not (queries.is_run and keys.is_run) or isinstance(queries.start, Tensor) or isinstance(keys.start, Tensor):
        return None  # whose own token is where would be a guess
    own = torch.arange(max(queries.start, keys.start), min(queries.stop, keys.stop), device=device)[None, None, :, None]
    b = torch.arange(batch, device=device)[:, None, None, None]
    h = torch.arange(heads, device=device)[None, :, None, None]
    pairs = look_at(leaf, *call, device=device).pairs
    if own.numel() < 2 or not pairs or bool(leaf.allowed(b, h, own, own).any()):
        return None
    return (
        f"{called(leaf)} hides the own token of all {own.numel()} queries and shows {pairs:,} of "
        f"{batch * heads * queries.count * keys.count:,} pairs. True means may attend; if True hides in "
        "your tensor, write Dense(~mask)."
    )


def _conjuncts(mask: Mask) -> list[Mask]:
    return [*_conjuncts(mask.a), *_conjuncts(mask.b)] if isinstance(mask, And) else [mask]


def _leaves(mask: Mask) -> Iterator[Mask]:
    """The masks that one is made of; a Not is one with what it denies."""
    if isinstance(mask, (And, Or, PerHead)):
        for part in mask.parts():
            yield from _leaves(part)
    else:
        yield mask


def called(mask: Mask) -> str:
    """A mask as text, with the shapes of its tensors in place of their numbers."""
    text = re.sub(r"(values=)?tensor\([^()]*(\([^()]*\)[^()]*)*\)", "tensor", repr(mask))
    return re.sub(r" at 0x[0-9a-f]+|, \w+=None", "", text)
