"""Attention as functions: check the call once, choose a backend, run it."""

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwise.backends import BACKENDS, Backend, choose
from headwise.backends.base import Inputs
from headwise.backends.reference import Stage, plain_precision, softmax
from headwise.errors import ShapeError
from headwise.masks import Dense, Full, Mask
from headwise.positions import Positions
from headwise.score_mods import ScoreMod

MaskLike = Mask | Bool[Tensor, "..."]
LARGE = 2**26  # scores that the reference holds in training from which on it says so: 256 MiB in float32
_warned: set[str] = set()


def attention(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B K S D"],
    value: Float[Tensor, "B K S V"],
    *,
    mask: MaskLike = Full(),
    score_mods: Sequence[ScoreMod] = (),
    sinks: Float[Tensor, " H"] | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Int[Tensor, ""] | None = None,
    query_positions: Positions | None = None,
    key_positions: Positions | None = None,
    backend: str | Backend = "auto",
) -> Float[Tensor, "B H T V"]:
    """Scaled dot-product attention: softmax(scale · query · keyᵀ) · value, for every head.

    Args:
        query: Queries. There may be a whole multiple of the key heads; query head h reads key head h // (H / K).
        key: Keys.
        value: Values, as many as keys; their size is free.
        mask: Which keys a query may attend to; a boolean tensor means ``Dense(tensor)``. Two masks are joined by &.
        score_mods: Modifications of the scaled scores, applied in this order, before the mask.
        sinks: An extra logit per head that takes part in the softmax and carries no value.
        scale: What the dot products are multiplied by; None means 1/sqrt(D).
        dropout_p: Probability that a weight is dropped. This function always drops; a layer drops in training only.
        seed: What makes dropout the same on every backend; None follows torch's generator.
        query_positions: Where the queries stand; None lets the last query stand with the last key.
        key_positions: Where the keys stand; None means from 0.
        backend: "auto", or the name of one, which is then never swapped for another.

    Returns:
        The output. Zeros for a query that may see nothing.

    Raises:
        ShapeError: When sizes, dtypes or devices do not fit together.
        UnsupportedError: When the backend named cannot run the call.

    Example:
        >>> query = key = torch.zeros(1, 1, 4, 2)
        >>> value = torch.arange(4.0).reshape(1, 1, 4, 1)
        >>> attention(query, key, value, mask=Causal()).flatten()
        tensor([0.0000, 0.5000, 1.0000, 1.5000])

    Reference: Vaswani et al., Attention Is All You Need, 2017, equation 1. https://arxiv.org/abs/1706.03762
    """
    x = prepare(query, key, value, mask, score_mods, sinks, scale, dropout_p, seed, query_positions, key_positions)
    return run(x, backend)[0]


def attention_with_lse(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B K S D"],
    value: Float[Tensor, "B K S V"],
    *,
    mask: MaskLike = Full(),
    score_mods: Sequence[ScoreMod] = (),
    sinks: Float[Tensor, " H"] | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Int[Tensor, ""] | None = None,
    query_positions: Positions | None = None,
    key_positions: Positions | None = None,
    backend: str | Backend = "auto",
) -> tuple[Float[Tensor, "B H T V"], Float[Tensor, "B H T"]]:
    """``attention``, and the logarithm of what each softmax divides by.

    The log-sum-exp is natural, includes the sink, and is -inf (or the sink) for a query that may see nothing. With it
    ``merge_partials`` joins attention over parts of the keys; give sinks to one part only.

    Args:
        query: As in ``attention``, like all other arguments.
        key: Keys.
        value: Values.
        mask: Which keys a query may attend to.
        score_mods: Modifications of the scores.
        sinks: An extra logit per head.
        scale: What the dot products are multiplied by.
        dropout_p: Probability that a weight is dropped; the log-sum-exp is that before dropout.
        seed: What makes dropout the same on every backend.
        query_positions: Where the queries stand.
        key_positions: Where the keys stand.
        backend: "auto", or the name of one.

    Returns:
        The output and the log-sum-exp, both differentiable.

    Raises:
        ShapeError: When sizes, dtypes or devices do not fit together.
        UnsupportedError: When the backend named cannot run the call.

    Example:
        >>> zeros = torch.zeros(1, 1, 1, 2)
        >>> attention_with_lse(zeros, zeros.expand(1, 1, 4, 2), zeros.expand(1, 1, 4, 2))[1].exp()
        tensor([[[4.]]])
    """
    x = prepare(
        query, key, value, mask, score_mods, sinks, scale, dropout_p, seed, query_positions, key_positions, "gradient"
    )
    out, lse = run(x, backend)
    if lse is None:
        raise ShapeError("The backend returned no log-sum-exp although it was asked for one; this is a fault in it.")
    return out, lse


def attention_weights(
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B K S D"],
    value: Float[Tensor, "B K S V"] | None = None,
    *,
    mask: MaskLike = Full(),
    score_mods: Sequence[ScoreMod] = (),
    sinks: Float[Tensor, " H"] | None = None,
    scale: float | None = None,
    query_positions: Positions | None = None,
    key_positions: Positions | None = None,
    rows: Sequence[int] | slice | Int[Tensor, " R"] | None = None,
    stage: Stage = "weights",
) -> Float[Tensor, "B H R S"]:
    """The weights of chosen query rows, before dropout, or the scores on the way to them.

    Args:
        query: As in ``attention``.
        key: Keys.
        value: Not needed.
        mask: Which keys a query may attend to.
        score_mods: Modifications of the scores.
        sinks: An extra logit per head; the weights of the keys then sum to less than 1.
        scale: What the dot products are multiplied by.
        query_positions: Where the queries stand.
        key_positions: Where the keys stand.
        rows: Numbers of the query rows, a slice, or None for all. Memory grows with their number.
        stage: "weights"; or "scores" (scaled), "capped" (after the last softcap), "biased" (after all modifications,
            hidden keys at -inf).

    Returns:
        Weights of the chosen rows, in float32 at least. Each row sums to 1, or to 0 where it may see nothing.

    Raises:
        ShapeError: When sizes, dtypes or devices do not fit together, or a row does not exist.

    Example:
        >>> query = key = torch.zeros(1, 1, 4, 2)
        >>> attention_weights(query, key, mask=Causal(), rows=[1]).flatten()
        tensor([0.5000, 0.5000, 0.0000, 0.0000])
    """
    if stage not in ("scores", "capped", "biased", "weights"):
        raise ShapeError(f"There is no stage {stage!r}; there are scores, capped, biased and weights.")
    value = key if value is None else value
    x = prepare(query, key, value, mask, score_mods, sinks, scale, 0.0, None, query_positions, key_positions)
    count = x.query.shape[-2]
    if rows is None:
        rows = slice(None)
    elif not isinstance(rows, slice):
        listed = rows.tolist() if isinstance(rows, Tensor) else list(rows)
        if any(not -count <= r < count for r in listed):
            raise ShapeError(f"Rows {listed} were asked for, but there are {count} queries; count them from 0.")
        rows = torch.tensor([r % count for r in listed], dtype=torch.int64, device=x.query.device)
    with plain_precision(x):
        return softmax(x, rows, stage)[0]


def merge_partials(
    out_a: Float[Tensor, "B H T V"],
    lse_a: Float[Tensor, "B H T"],
    out_b: Float[Tensor, "B H T V"],
    lse_b: Float[Tensor, "B H T"],
) -> tuple[Float[Tensor, "B H T V"], Float[Tensor, "B H T"]]:
    """Join attention over two disjoint sets of keys into attention over their union.

    Args:
        out_a: Output over the first set.
        lse_a: Its log-sum-exp.
        out_b: Output over the second set.
        lse_b: Its log-sum-exp.

    Returns:
        Output and log-sum-exp over the union, differentiable; zeros and -inf where both sides saw nothing.

    Raises:
        ShapeError: When the shapes differ.

    Example:
        >>> one, two = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1, 1), 2.0)
        >>> merge_partials(one, torch.zeros(1, 1, 1), two, torch.zeros(1, 1, 1))[0]
        tensor([[[[1.5000]]]])

    Reference: Dao et al., FlashAttention, 2022, section 3.1. https://arxiv.org/abs/2205.14135
    """
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape or lse_a.shape != out_a.shape[:-1]:
        raise ShapeError(
            f"Partial outputs of shapes {tuple(out_a.shape)} and {tuple(out_b.shape)} with log-sum-exps "
            f"{tuple(lse_a.shape)} and {tuple(lse_b.shape)} do not belong together; a log-sum-exp is its output's "
            "shape without the last dimension."
        )
    top = torch.maximum(lse_a, lse_b).detach()
    top = top.masked_fill(top == -torch.inf, 0)  # both sides empty: any finite number keeps 0/0 away
    weight_a, weight_b = (lse_a - top).exp(), (lse_b - top).exp()
    total = weight_a + weight_b
    empty = total == 0
    total = total.masked_fill(empty, 1)
    share_a, share_b = (weight_a / total)[..., None], (weight_b / total)[..., None]
    out = (share_a * out_a + share_b * out_b).to(out_a.dtype)
    return out, (top + total.log()).masked_fill(empty, -torch.inf)


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: MaskLike,
    score_mods: Sequence[ScoreMod],
    sinks: Tensor | None,
    scale: float | None,
    dropout_p: float,
    seed: int | Tensor | None,
    query_positions: Positions | None,
    key_positions: Positions | None,
    lse: Literal["no", "value", "gradient"] = "no",
) -> Inputs:
    """Check a call and complete it: the public border, after which everything trusts its inputs."""
    _check_tensors(query, key, value)
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (_autocast(t) for t in (query, key, value))
    _check_dtypes(query, key, value)
    batch, heads, rows, head_dim = query.shape
    slots = key.shape[-2]
    keys = Positions(slots) if key_positions is None else key_positions
    queries = Positions(rows, start=keys.stop - rows, offset=keys.offset) if query_positions is None else query_positions
    _check_positions(queries, rows, "query")
    _check_positions(keys, slots, "key")
    mask = as_mask(mask)
    for tensor in mask.tensors():
        _same_device(tensor, query, "mask")
    score_mods = tuple(score_mods)
    for mod in score_mods:
        if not isinstance(mod, ScoreMod):
            raise ShapeError(f"score_mods holds {type(mod).__name__}, which is no ScoreMod; wrap it in CustomScore.")
        mod.bind(batch, heads, rows, slots)
    if sinks is not None and sinks.shape != (heads,):
        raise ShapeError(f"Sinks of shape {tuple(sinks.shape)} do not fit {heads} query heads; give one per head.")
    if seed is not None and isinstance(seed, Tensor) and (seed.is_floating_point() or seed.dim() != 0):
        raise ShapeError(f"A seed is a whole number, not a {seed.dtype} tensor of shape {tuple(seed.shape)}.")
    x = Inputs(
        query,
        key,
        value,
        queries,
        keys,
        check_scale(scale, head_dim),
        mask.bind(batch, heads, queries, keys),
        score_mods,
        sinks,
        check_dropout(dropout_p),
        seed,
        lse,
    )
    for tensor in (*x.score_tensors(), *(() if sinks is None else (sinks,))):
        _same_device(tensor, query, "score modification or sink")
    return x


def run(x: Inputs, backend: str | Backend = "auto") -> tuple[Tensor, Tensor | None]:
    """Run a prepared call on the backend named, or on the first that can."""
    chosen = choose(x, backend)
    if backend == "auto" and chosen.name == "reference" and not torch.compiler.is_compiling():
        _warn_if_large(x)
    return chosen.run(x)


def as_mask(mask: Any) -> Mask:
    """A mask as it is, or a boolean tensor as ``Dense``; anything else is refused."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        return Dense(mask)
    if isinstance(mask, type) and issubclass(mask, Mask):
        raise ShapeError(f"mask={mask.__name__} is a class; call it: {mask.__name__}().")
    raise ShapeError(f"mask= takes a Mask or a boolean tensor, not {type(mask).__name__}; leave it out for no mask.")


def check_scale(scale: Any, head_dim: int) -> float:
    """The scale as a number, 1/sqrt(D) for None."""
    if scale is None:
        return head_dim**-0.5 if head_dim else 1.0
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ShapeError(f"A scale of {scale!r} cannot multiply scores; give a finite number, or None for 1/sqrt(D).")
    return float(scale)


def check_dropout(dropout_p: Any) -> float:
    """The dropout probability as a number of at least 0 and below 1."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)) or not 0 <= dropout_p < 1:
        raise ShapeError(f"A dropout probability of {dropout_p!r} is outside [0, 1); it is the share of weights dropped.")
    return float(dropout_p)


def _check_tensors(query: Any, key: Any, value: Any) -> None:
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise ShapeError(f"{name} is {type(tensor).__name__}, not a tensor.")
        if tensor.dim() != 4:
            raise ShapeError(
                f"{name} has {tensor.dim()} dimensions, not 4: (batch, heads, tokens, head size). Use unflatten and "
                "transpose to split heads, or MultiHeadAttention, which does."
            )
    sizes = {name: tuple(t.shape) for name, t in named.items()}
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        batches = ", ".join(f"{name} {s[0]}" for name, s in sizes.items())
        raise ShapeError(f"The batch sizes differ: {batches}. Expand the smaller ones if that is what you mean.")
    if key.shape[1] != value.shape[1]:
        raise ShapeError(f"{key.shape[1]} key heads and {value.shape[1]} value heads differ; give as many of each.")
    if query.shape[1] and (key.shape[1] == 0 or query.shape[1] % key.shape[1]):
        raise ShapeError(f"{query.shape[1]} query heads cannot share {key.shape[1]} key heads evenly.")
    if query.shape[-1] != key.shape[-1]:
        raise ShapeError(f"Queries of size {query.shape[-1]} cannot meet keys of size {key.shape[-1]}; make them equal.")
    if key.shape[-2] != value.shape[-2]:
        raise ShapeError(f"{key.shape[-2]} keys and {value.shape[-2]} values differ; each key needs one value.")
    for name in ("key", "value"):
        _same_device(named[name], query, name)


def _check_dtypes(query: Tensor, key: Tensor, value: Tensor) -> None:
    if not query.is_floating_point():
        raise ShapeError(f"Attention needs floating point numbers, not {query.dtype}; convert the inputs first.")
    if not query.dtype == key.dtype == value.dtype:
        raise ShapeError(
            f"The dtypes differ: query {query.dtype}, key {key.dtype}, value {value.dtype}. Convert them to one."
        )


def _check_positions(positions: Any, count: int, name: str) -> None:
    if not isinstance(positions, Positions):
        raise ShapeError(f"{name} positions are {type(positions).__name__}; give Positions(count, start).")
    if positions.count != count:
        raise ShapeError(f"The positions are for {positions.count} tokens, but the {name} has {count}.")


def _same_device(tensor: Tensor, query: Tensor, what: str) -> None:
    if tensor.device != query.device:
        raise ShapeError(f"The {what} is on {tensor.device} and the query on {query.device}; move it with .to().")


def _autocast(tensor: Tensor) -> Tensor:
    if tensor.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return tensor.to(torch.get_autocast_dtype(tensor.device.type))
    return tensor


def _warn_if_large(x: Inputs) -> None:
    size = math.prod(x.query.shape[:3]) * x.key.shape[-2]
    if size < LARGE or not x.needs_grad:
        return
    reasons = "; ".join(f"{b.name}: {reason}" for b in BACKENDS if (reason := b.why_not(x)) is not None)
    if reasons not in _warned:
        _warned.add(reasons)
        warnings.warn(
            f"headwise trains this call on its reference backend, which holds all {size:,} scores at once. "
            f"Why not another: {reasons}.",
            stacklevel=3,
        )
