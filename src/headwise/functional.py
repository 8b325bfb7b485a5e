"""Attention as functions: check the call once, choose a backend, run it."""

import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwise.algebra import And
from headwise.backends import BACKENDS, choose
from headwise.backends.base import Backend, Inputs, is_watched
from headwise.backends.reference import Stage, plain_precision, softmax
from headwise.checks import (
    MaskLike,
    as_mask,
    as_score_mods,
    check_axes,
    check_dropout,
    check_dtypes,
    check_edit,
    check_partials,
    check_scale,
    check_seed,
    check_sinks,
    check_tensors,
    row_numbers,
    same_device,
    stand,
)
from headwise.errors import ShapeError
from headwise.masks import Causal, Full, Window
from headwise.positions import Positions
from headwise.score_mods import ScoreMod

Places = Positions | Int[Tensor, "..."]
Observer = Callable[[Inputs, Tensor, Tensor | None], Tensor | None]
LARGE = 2**26  # scores that the reference holds in training from which on it says so: 256 MiB in float32
PLANS = 1024  # calls that are remembered, about a kilobyte each
_warned: set[str] = set()
_plans: dict[Hashable, Callable[[Tensor, Tensor, Tensor], Tensor]] = {}


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
    query_positions: Places | None = None,
    key_positions: Places | None = None,
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
        query_positions: Where the queries stand: ``Positions``, or a tensor of positions (batch, tokens), which leaves
            indices as they are; None lets the last query stand with the last key.
        key_positions: Where the keys stand, likewise; None means from 0.
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
    return attend(
        query, key, value, mask, score_mods, sinks, scale, dropout_p, seed, query_positions, key_positions, backend
    )


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
    query_positions: Places | None = None,
    key_positions: Places | None = None,
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
        query,
        key,
        value,
        mask,
        score_mods,
        sinks,
        scale,
        dropout_p,
        seed,
        query_positions,
        key_positions,
        "gradient",
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
    query_positions: Places | None = None,
    key_positions: Places | None = None,
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
    with plain_precision(x):
        return softmax(x, row_numbers(rows, x.query), stage)[0]


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
    check_partials(out_a, lse_a, out_b, lse_b)
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
    query_positions: Places | None,
    key_positions: Places | None,
    lse: Literal["no", "value", "gradient"] = "no",
) -> Inputs:
    """Check a call and complete it: the public border, after which everything trusts its inputs."""
    check_tensors(query, key, value)
    if not query.is_meta and torch.is_autocast_enabled(query.device.type):
        query, key, value = (_autocast(t) for t in (query, key, value))
    check_dtypes(query, key, value)
    batch, heads, rows, head_dim = query.shape
    slots = key.shape[-2]
    queries, keys = stand(query, slots, query_positions, key_positions)
    mask = as_mask(mask)
    if any(tensor.device != query.device for tensor in mask.tensors()):
        mask = mask.beside(query.device)
    for tensor in mask.tensors():
        same_device(tensor, query, "mask")
    score_mods = as_score_mods(score_mods)
    check_axes(queries, keys, score_mods)
    for mod in score_mods:
        mod.bind(batch, heads, rows, slots)
        for tensor in (*mod.parameters(), *mod.buffers()):
            same_device(tensor, query, type(mod).__name__)
    check_sinks(sinks, query)
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
        check_seed(seed, query),
        lse,
    )
    for tensor in x.tiles():
        same_device(tensor, query, "bias")
    return x


def run(x: Inputs, backend: str | Backend = "auto") -> tuple[Tensor, Tensor | None]:
    """Run a prepared call on the backend named, or on the first that can."""
    chosen = choose(x, backend)
    if backend == "auto" and chosen.name == "reference" and not torch.compiler.is_compiling():
        _warn_if_large(x)
    return chosen.run(x)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: MaskLike,
    score_mods: Sequence[ScoreMod],
    sinks: Tensor | None,
    scale: float | None,
    dropout_p: float,
    seed: int | Tensor | None,
    query_positions: Places | None,
    key_positions: Places | None,
    backend: str | Backend,
) -> Tensor:
    """Prepare a call and run it. What repeats an earlier call in all but its numbers is not worked out again."""
    form = None
    if sinks is None is seed and type(score_mods) is tuple and not score_mods and type(dropout_p) is float:
        form = _form(query, key, value, mask, scale, dropout_p, query_positions, key_positions, backend)
    plan = None if form is None else _plans.get(form)
    if plan is not None:
        return plan(query, key, value)
    x = prepare(query, key, value, mask, score_mods, sinks, scale, dropout_p, seed, query_positions, key_positions)
    if form is not None:
        plan = choose(x, backend).plan(x)
    if plan is None:
        return run(x, backend)[0]
    if len(_plans) >= PLANS:
        _plans.clear()
    _plans[form] = plan
    return plan(query, key, value)


def _form(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    scale: Any,
    dropout_p: float,
    query_positions: Any,
    key_positions: Any,
    backend: Any,
) -> Hashable:
    """All of a call but its numbers; None where a call has to be looked at each time."""
    if is_watched() or dropout_p != 0 or not (type(query) is type(key) is type(value) is Tensor):
        return None
    for t in (query, key, value):
        if not t.is_cpu or t.layout is not torch.strided or t.is_nested or t.is_neg() or t._is_zerotensor():
            return None
    if torch.is_autocast_enabled("cpu") or not (scale is None or type(scale) is float):
        return None
    if type(backend) is not str and not (isinstance(backend, Backend) and isinstance(backend, Hashable)):
        return None
    if not _is_ours(mask):
        return None
    places: list[tuple[int, ...] | None] = []
    for positions in (query_positions, key_positions):
        if positions is None:
            places.append(None)
        elif type(positions) is Positions and positions.is_plain:
            places.append((positions.count, positions.start, positions.offset))  # type: ignore[arg-type]
        else:
            return None
    learns = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    return (
        *(query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(), learns),
        *(query.dtype, key.dtype, value.dtype, mask, scale, *places, backend, torch.get_num_threads()),
    )


def _is_ours(mask: Any) -> bool:
    """Whether a mask holds nothing but numbers, and nothing else decides what it says."""
    return type(mask) in (Full, Causal, Window) or (type(mask) is And and _is_ours(mask.a) and _is_ours(mask.b))


def observed(observer: Observer, x: Inputs, out: Tensor, lse: Tensor | None) -> Tensor:
    """Show a call to an observer, and take the output that it gives back, if any."""
    other = observer(x, out, lse)
    if other is None:
        return out
    check_edit(other, out)
    return other


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
