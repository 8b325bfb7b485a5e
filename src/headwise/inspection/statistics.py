"""Statistics of heads: where each looks, how far and how evenly, computed in blocks of queries."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.backends.base import Inputs
from headwise.backends.reference import plain_precision, softmax
from headwise.errors import ShapeError

BLOCK = 2**22  # weights held at once: 16 MiB in float32


@dataclass(frozen=True, eq=False)
class HeadStatistics:
    """Means over the queries that see something, per head. Shares are parts of the weight on keys, 0 to 1.

    Args:
        entropy: How evenly a query spreads its weight, in bits: 0 for one key, log2(n) for n keys alike.
        distance: Mean distance in tokens between a query and what it looks at.
        self: Share on the query's own token.
        previous: Share on the token before it.
        next: Share on the token after it.
        first: Share on the first token.
        separator: Share on separator tokens; 0 when none were named.
        induction: Share on tokens that follow an earlier copy of the query's token; 0 when no tokens were given.
        sink: Part of the softmax that the sink takes from the keys; 0 without sinks.
    """

    entropy: Float[Tensor, " H"]
    distance: Float[Tensor, " H"]
    self: Float[Tensor, " H"]
    previous: Float[Tensor, " H"]
    next: Float[Tensor, " H"]
    first: Float[Tensor, " H"]
    separator: Float[Tensor, " H"]
    induction: Float[Tensor, " H"]
    sink: Float[Tensor, " H"]

    def head(self_, head: int) -> dict[str, float]:
        """The numbers of one head by name."""
        return {f.name: float(getattr(self_, f.name)[head]) for f in fields(self_)}

    def kind(self_, head: int) -> str:
        """A word for what takes at least two fifths of a head's weight, or "mixed"."""
        shares = {name: share for name, share in self_.head(head).items() if name not in ("entropy", "distance")}
        name, share = max(shares.items(), key=lambda item: item[1])
        return name if share >= 0.4 else "mixed"


def head_statistics(
    inputs: Inputs, *, separators: Bool[Tensor, " S"] | None = None, tokens: Int[Tensor, " S"] | None = None
) -> HeadStatistics:
    """Statistics of the heads of one call of self-attention.

    Args:
        inputs: The call, as ``record`` keeps it.
        separators: Which keys are separator tokens; None for none.
        tokens: Numbers of the tokens, for the induction share; None leaves it 0.

    Returns:
        Means over the batch and over all queries that see something.

    Raises:
        ShapeError: When queries and keys are not the same tokens, or the number of tokens differs.

    Example:
        >>> layer = MultiHeadAttention(8, 2, mask=Causal() & Window(1))
        >>> with headwise.inspection.record(layer) as calls:
        ...     _ = layer(torch.randn(1, 5, 8))
        >>> headwise.inspection.head_statistics(calls[0].inputs).self.tolist()
        [1.0, 1.0]
    """
    slots = _tokens(inputs)
    for given, name in ((separators, "separators"), (tokens, "tokens")):
        if given is not None and given.shape != (slots,):
            raise ShapeError(f"{name} has shape {tuple(given.shape)}, but there are {slots} keys; give one for each.")
    zeros = torch.zeros(inputs.query.shape[1], dtype=torch.float64, device="cpu")
    sums = {f.name: zeros.clone() for f in fields(HeadStatistics)}
    alive = zeros.clone()
    k = torch.arange(slots, device=inputs.query.device)
    for rows, softmax_BHRS in _blocks(inputs):
        total = softmax_BHRS.sum(-1, keepdim=True)
        seen = total > 0
        weights = softmax_BHRS / total.masked_fill(~seen, 1)
        q = k[rows, None]
        what = {"self": k == q, "previous": k == q - 1, "next": k == q + 1, "first": (k == 0).expand(len(q), -1)}
        if separators is not None:
            what["separator"] = separators.to(k.device).expand(len(q), -1)
        if tokens is not None:
            before = torch.cat([tokens.new_full((1,), -1), tokens[:-1]]).to(k.device)
            what["induction"] = (before == tokens.to(k.device)[rows, None]) & (k <= q)
        for name, where in what.items():
            sums[name] += (weights * where).sum((0, 2, 3)).double().cpu()
        sums["distance"] += (weights * (q - k).abs()).sum((0, 2, 3)).double().cpu()
        sums["entropy"] -= torch.special.xlogy(weights, weights).sum((0, 2, 3)).double().cpu() / math.log(2)
        if inputs.sinks is not None:
            sums["sink"] += ((1 - total) * seen).sum((0, 2, 3)).double().cpu()
        alive += seen.sum((0, 2, 3)).double().cpu()
    return HeadStatistics(**{name: (total / alive.clamp(min=1)).float() for name, total in sums.items()})


def strongest_pairs(
    inputs: Inputs, count: int, *, hide: Bool[Tensor, " S"] | None = None
) -> list[list[tuple[int, int, float]]]:
    """The strongest (query, key, weight) of each head in the first row of the batch, strongest first.

    Args:
        inputs: The call, as ``record`` keeps it.
        count: How many pairs per head.
        hide: Tokens to leave out, as queries and as keys, such as separators; a token's look at itself is left out
            as well.

    Returns:
        A list per head. Shorter than ``count`` where there are fewer pairs.

    Raises:
        ShapeError: When queries and keys are not the same tokens.

    Example:
        >>> layer = MultiHeadAttention(8, 2, mask=Causal())
        >>> with headwise.inspection.record(layer) as calls:
        ...     _ = layer(torch.randn(1, 2, 8))
        >>> [pairs[0][:2] for pairs in headwise.inspection.strongest_pairs(calls[0].inputs, 1)]
        [(1, 0), (1, 0)]
    """
    heads, slots = inputs.query.shape[1], _tokens(inputs)
    best: list[list[tuple[int, int, float]]] = [[] for _ in range(heads)]
    k = torch.arange(slots, device=inputs.query.device)
    for rows, weights in _blocks(inputs):
        q = k[rows, None]
        shown = k != q
        if hide is not None:
            hidden = hide.to(k.device)
            shown = shown & ~hidden & ~hidden[rows, None]
        flat = (weights[0] * shown).flatten(1)
        top, where = flat.topk(min(count, flat.shape[1]), -1)
        for head in range(heads):
            found = [
                (int(i) // slots + int(q[0]), int(i) % slots, float(w))
                for i, w in zip(where[head], top[head], strict=True)
                if w > 0
            ]
            best[head] = sorted(best[head] + found, key=lambda pair: -pair[2])[:count]
    return best


def _tokens(inputs: Inputs) -> int:
    """The number of tokens, which are queries and keys."""
    count, slots = inputs.query.shape[-2], inputs.key.shape[-2]
    if count != slots:
        raise ShapeError(f"Statistics of {count} queries over {slots} keys are not of self-attention; give as many.")
    return slots


def _blocks(inputs: Inputs) -> Iterator[tuple[slice, Float[Tensor, "B H R S"]]]:
    batch, heads, count = inputs.query.shape[:3]
    step = max(1, BLOCK // max(1, batch * heads * inputs.key.shape[-2]))
    with torch.no_grad(), plain_precision(inputs):
        for first in range(0, count, step):
            rows = slice(first, min(count, first + step))
            yield rows, softmax(inputs, rows)[0]
