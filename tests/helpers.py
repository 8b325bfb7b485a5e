"""The tolerance rule of the whole test suite, and the inputs that tests share."""

import itertools
import math
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

NAN = math.nan


def assert_as_good_as(
    got: Tensor,
    want64: Tensor,
    plain: Tensor | None = None,
    *,
    terms: int,
    inner: float = 0.0,
    what: str = "",
) -> None:
    """Fail unless ``got`` is as near to the float64 value as an honest computation in its dtype can be.

    The error against float64, the largest over the tensor, may be at most twice that of ``plain``, plus a
    rounding term that is stated here and nowhere else:

        accumulation in float32 (float64 for float64)    8 · eps(wide) · √terms · largest magnitude
        terms that are rounded before they are summed    eps(dtype) · inner

    √terms is how rounding errors of random sign grow in a sum of ``terms`` terms, in whatever order; 8 covers
    the steps that follow one another (score, exponential, sum, division, sum). ``plain`` is counted with at
    least eps(dtype) / 4 · largest magnitude: of a few numbers it may by luck have paid less for its own
    rounding. None of this leaves room for a sum that is itself kept in half precision: its errors grow with
    √terms at eps(dtype). A rounding is even in ±eps/2 of its term, so that three standard deviations of a sum of
    rounded terms are √3/2 · eps · the root of the sum of their squares.

    Args:
        got: What the library computed.
        want64: The same in float64, by other code.
        plain: The same by the plain formula, computed in float32 and rounded once to the dtype of ``got``.
            Without it only the rounding term is allowed, which is the rule for float64.
        terms: Number of terms in the longest sum behind one number of the result (keys, head size, queries).
        inner: Size of the terms, the root of the sum of their squares, where a sum may cancel, or where an
            algorithm must round its terms to the dtype because matrix units take them so (the gradient of a
            score, in a backward; a weight, where products of bfloat16 are of hardware). Else leave it at 0.
        what: Said in the failure.
    """
    assert want64.dtype == torch.float64, f"{what}: the value to compare with is {want64.dtype}, not float64"
    assert got.shape == want64.shape, f"{what}: shape {tuple(got.shape)}, wanted {tuple(want64.shape)}"
    got64, want = got.detach().double(), want64.detach()
    # what is finite in float64 may be out of the dtype's reach, and then infinity is the right answer
    want = torch.where(want.to(got.dtype).isinf(), want.to(got.dtype).double(), want)
    for kind, is_kind in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        odd = is_kind(got64) != is_kind(want)
        assert not odd.any(), f"{what}: {int(odd.sum())} of {odd.numel()} numbers differ in being {kind}"
    finite = want.isfinite()
    if not finite.any():
        return
    want, got64 = want[finite], got64[finite]
    wide = torch.promote_types(got.dtype, torch.float32)
    size = want.abs().max().item()
    by_plain = 0.0
    if plain is not None and got.dtype != torch.float64:
        assert plain.shape == want64.shape, f"{what}: the plain formula gave shape {tuple(plain.shape)}"
        rounded = plain.detach().to(got.dtype).double()[finite]
        assert rounded.isfinite().all(), f"{what}: the plain formula is not finite where the float64 value is"
        by_plain = max((rounded - want).abs().max().item(), torch.finfo(got.dtype).eps / 4 * size)
    limit = 2 * by_plain + 8 * torch.finfo(wide).eps * math.sqrt(max(1, terms)) * max(size, inner)
    limit += torch.finfo(got.dtype).eps * inner
    error = (got64 - want).abs()
    assert error.max() <= limit, (
        f"{what}: error {error.max().item():.3e} is above {limit:.3e}, in {int((error > limit).sum())} of "
        f"{error.numel()} numbers of {got.dtype}"
    )


def assert_published(got: Tensor, published: Tensor | Sequence, *, rtol: float, atol: float, source: str) -> None:
    """Fail unless ``got`` equals numbers that somebody published, at the tolerance that the publisher states.

    ``source`` says where they are printed, and whether the tolerance is stated there or the digits printed.
    """
    assert source, "published numbers need their source"
    want = torch.as_tensor(published, dtype=torch.float64)
    assert got.shape == want.shape, f"{source}: shape {tuple(got.shape)}, published {tuple(want.shape)}"
    error = (got.detach().double() - want).abs()
    over = error > atol + rtol * want.abs()
    assert not (over | error.isnan()).any(), (
        f"{source}: off by {error.max().item():.3e} at most, {int(over.sum())} over"
    )


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None = None,
    *,
    scale: float | None = None,
    modify: Callable[[Tensor], Tensor] | None = None,
    sinks: Tensor | None = None,
    drop: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The plain formula in the dtype of its inputs: output, weights before dropout, and log-sum-exp.

    Give it float32 inputs and round the results once: that is the ``plain`` of ``assert_as_good_as``.
    """
    group = query.shape[1] // max(1, key.shape[1])
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bhtd,bhsd->bhts", query, key) * scale
    if modify is not None:
        scores = modify(scores)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    if scores.shape[-1] == 0:
        lse = scores.new_full(scores.shape[:-1], -torch.inf)
        return scores @ value, scores, lse
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0)
    lse = scores.masked_fill(dead, 0).logsumexp(-1).masked_fill(dead[..., 0], -torch.inf)
    weights = weights if sinks is None else weights[..., :-1]
    dropped = weights if drop is None else weights * drop
    return dropped @ value, weights, lse


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Normal numbers that depend on the seed and shape alone, the same in every dtype up to its rounding."""
    made = torch.Generator().manual_seed(1_000_003 * seed + sum(n * 7919**i for i, n in enumerate(shape)) % 999_983)
    return (torch.randn(*shape, generator=made, dtype=torch.float64) * scale).to(dtype)


def leaf(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of a tensor, in another dtype if wanted, that collects a gradient of its own."""
    return x.detach().clone().to(dtype or x.dtype).requires_grad_()


def names() -> dict:
    """What an example in a docstring may use without importing it: torch, headwise and its public names."""
    import headwise

    public = {name: getattr(headwise, name) for name in vars(headwise) if not name.startswith("_")}
    return {"torch": torch, "headwise": headwise, **public}


def pairwise(axes: dict[str, tuple], fits=lambda row: True, chosen=()) -> list[dict]:
    """Choose combinations that fit, so that every two values of two axes meet that can.

    Those in ``chosen`` are counted as made already.
    """
    pairs = list(itertools.combinations(axes, 2))
    place = {name: {value: n for n, value in enumerate(values)} for name, values in axes.items()}
    left = {(i, a, j, b) for i, j in pairs for a in place[i].values() for b in place[j].values()}

    def meets(row):
        return {(i, place[i][row[i]], j, place[j][row[j]]) for i, j in pairs}

    for row in chosen:
        left -= meets(row)
    rows, draw = [], random.Random(0)
    while left:
        i, a, j, b = min(left)
        tries = [{name: draw.choice(values) for name, values in axes.items()} for _ in range(300)]
        tries = [row for row in ({**row, i: axes[i][a], j: axes[j][b]} for row in tries) if fits(row)]
        left.discard((i, a, j, b))
        if tries:
            rows.append(max(tries[:30], key=lambda row: len(left & meets(row))))
            left -= meets(rows[-1])
    return rows
