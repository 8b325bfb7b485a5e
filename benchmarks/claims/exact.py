"""What the texts say that is a matter of calculation: formulas, shapes, derivatives, counts, and what follows exactly.

Nothing is trained but in ``two_places``, where the best that one head can do is searched for. All is in float64 unless
a name ends in 32; "error" and "difference" are the largest over all numbers; sizes are different, and prime where they
can be.
"""

import copy
import importlib
import itertools
import math
import os
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.utils._python_dispatch import TorchDispatchMode

import headwise
from benchmarks.claims.units import Unit
from headwise import ALiBi, Causal, Dense, MultiHeadAttention, RelativeBias, RotaryEmbedding, Window
from headwise.convert import textbook

BATCH, HEADS, LENGTH, KEYS, HEAD_DIM, D_IN = 2, 3, 7, 11, 5, 13
WIDTH = HEADS * HEAD_DIM  # the texts' d_out


def units(quick: bool) -> list[Unit]:
    """All of this family; ``quick`` searches less, permutes shorter sequences, and asks for three fields."""
    lengths, seeds = ([8, 16, 32], [0]) if quick else ([8, 16, 32, 128], [0, 1, 2])
    settings: dict[str, dict[str, Any]] = {
        "formula": {"seed": 0},
        "modules": {"seed": 0},
        "blind_rows": {"seed": 0},
        "reshape": {"seed": 0},
        "independence": {"seed": 0},
        "skipped": {"seed": 0},
        "costs": {"heads": [1, 2, 4, 8, 16]},
        "not_transposed": {"seed": 0},
        "softmax": {"seed": 0},
        "shapes": {},
        "one_sequence": {"seed": 0},
        "two_places": {"seeds": seeds, "sequences": 32 if quick else 256, "steps": 10 if quick else 100},
        "order": {"lengths": lengths, "heads": [1, 2, 4, 8, 16], "seed": 0},
        "models": {},
        "applications": {"fields": list(FIELDS)[-3:] if quick else list(FIELDS)},
    }
    return [Unit(f"exact/{name}", f"{__name__}:{name}", given) for name, given in settings.items()]


# ---- the formula, and the three modules that the texts print ----


def formula(seed: int) -> dict[str, Any]:
    """MultiHead(Q, K, V) = Concat(head_1, …, head_h) W^O, written out head by head, against the layer.

    Self-attention and cross-attention, in float64 and float32 (whose error is to the float64 value, beside that of the
    written-out formula in float32), on two backends; and the same as a sum of what each head adds.
    """
    layer = _layer(seed, bias=False, key_dim=17, value_dim=19, out_dim=23, v_head_dim=3)
    query, key, value = _tokens(seed, (LENGTH, D_IN), (KEYS, 17), (KEYS, 19))
    want = _by_heads(layer, query, key, value)
    summed = sum(
        head @ columns.mT
        for head, columns in zip(_heads(layer, query, key, value), layer.out_proj.weight.split(3, 1), strict=True)
    )
    single = _layer(seed, bias=False, key_dim=17, value_dim=19, out_dim=23, v_head_dim=3).float()
    inputs32 = [x.float() for x in (query, key, value)]
    rounded = _copy(single, dtype=torch.float64)
    want32 = _by_heads(rounded, *[x.double() for x in inputs32])
    errors, errors32 = {}, {}
    for backend in ("reference", "sdpa"):
        layer.backend = single.backend = backend
        errors[backend] = _difference(layer(query, key, value), want)
        errors32[backend] = _difference(single(*inputs32), want32)
    alone = _layer(seed, bias=False, out_dim=23)
    return {
        "cross_attention_error": errors,
        "cross_attention_error32": errors32,
        "written_out_error32": _difference(_by_heads(single, *inputs32), want32),
        "self_attention_error": _difference(alone(query), _by_heads(alone, query, query, query)),
        "sum_over_heads_error": _difference(summed, want),
        "largest_output": _plain(want.abs().max()),
    }


class DictionaryModule(nn.Module):
    """The dictionary's module, by its formula: self-attention without a mask."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        for name in ("q_lin", "k_lin", "v_lin", "out_lin"):
            self.add_module(name, nn.Linear(width, width))

    def forward(self, x_BTE: Tensor) -> Tensor:
        q, k, v = (_split(linear(x_BTE), self.heads) for linear in (self.q_lin, self.k_lin, self.v_lin))
        return self.out_lin(_merge(_attend(q, k, v)))


class ArticleModule(nn.Module):
    """The article's module: queries, keys and values of their own, and a mask in which 0 writes -1e9."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        for name in ("query_proj", "key_proj", "value_proj", "output_proj"):
            self.add_module(name, nn.Linear(width, width))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        linears = (self.query_proj, self.key_proj, self.value_proj)
        folded = [
            _split(linear(x), self.heads).flatten(0, 1) for linear, x in zip(linears, (query, key, value), strict=True)
        ]
        hide = None if mask is None else lambda scores: scores.masked_fill(mask == 0, -1e9)
        return self.output_proj(_merge(_attend(*folded, hide=hide).unflatten(0, (-1, self.heads))))


class QuestionModule(nn.Module):
    """The question's layer with the steps that the answers name: swap, dot products, softmax, sum, merge."""

    def __init__(self, d_in: int, d_out: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        for name in ("query_weight", "key_weight", "value_weight"):
            self.add_module(name, nn.Linear(d_in, d_out, bias=False))

    def forward(self, x_BTE: Tensor) -> Tensor:
        linears = (self.query_weight, self.key_weight, self.value_weight)
        hide = _hide_later if self.causal else None
        return _merge(_attend(*(_split(linear(x_BTE), self.heads) for linear in linears), hide=hide))


def modules(seed: int) -> dict[str, Any]:
    """Each of the three modules against headwise with its converted weights, in float64 and float32.

    Errors are those of headwise; the module's own in float32 stands beside it.
    """
    x, query, key, value = _tokens(seed, (LENGTH, D_IN), (LENGTH, WIDTH), (KEYS, WIDTH), (KEYS, WIDTH))
    mask = (torch.rand(BATCH * HEADS, LENGTH, KEYS, generator=_generator(seed)) < 0.6).long()
    mask[..., 0] = 1  # every query sees something; blind_rows has the others
    masked = {"mask": Dense.from_zeros(mask, HEADS)}
    cases: dict[str, tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...], dict[str, Any], bool]] = {
        "dictionary": (DictionaryModule(WIDTH, HEADS), (query,), (), {}, False),
        "article": (ArticleModule(WIDTH, HEADS), (query, key, value), (), {}, False),
        "article, mask": (ArticleModule(WIDTH, HEADS), (query, key, value), (mask,), masked, False),
        "question": (QuestionModule(D_IN, WIDTH, HEADS, causal=False), (x,), (), {}, False),
        "question, causal": (QuestionModule(D_IN, WIDTH, HEADS, causal=True), (x,), (), {}, True),
    }
    found = {}
    for name, (module, inputs, more, given, causal) in cases.items():
        single = _filled(module, seed).float()
        wide = _copy(single, dtype=torch.float64)
        want = wide(*[t.float().double() for t in inputs], *more)
        ours = textbook.load(wide.state_dict(), HEADS, causal=causal)
        ours32 = textbook.load(single.state_dict(), HEADS, causal=causal)
        inputs32 = [t.float() for t in inputs]
        found[name] = {
            "error": _difference(ours(*[t.double() for t in inputs32], **given), want),
            "error32": _difference(ours32(*inputs32, **given), want),
            "its_own_error32": _difference(single(*inputs32, *more), want),
            "parameters": sum(p.numel() for p in ours.parameters()),
        }
    return found


def blind_rows(seed: int) -> dict[str, Any]:
    """What the article's -1e9 does to a query that may see nothing, and which masks its code takes."""
    module = _filled(ArticleModule(WIDTH, HEADS), seed)
    layer = textbook.load(module.state_dict(), HEADS)
    query, key, value = _tokens(seed, (LENGTH, WIDTH), (KEYS, WIDTH), (KEYS, WIDTH))
    mask = torch.ones(LENGTH, KEYS)
    mask[4] = 0
    theirs, ours = module(query, key, value, mask), layer(query, key, value, mask=Dense.from_zeros(mask, HEADS))
    seen = torch.arange(LENGTH) != 4
    bias = module.output_proj.bias.detach()
    mean = module.output_proj(module.value_proj(value).mean(1))
    moved = jacobian(lambda v: module(query, key, v, mask)[0, 4], value)[:, 0].abs().amax((0, 2))
    moved_ours = jacobian(lambda v: layer(query, key, v, mask=Dense.from_zeros(mask, HEADS))[0, 4], value)[:, 0]
    return {
        "hidden_keys": KEYS,
        "hidden_keys_read_by_article": int((moved > 0).sum()),
        "hidden_keys_read_by_headwise": int((moved_ours.abs().amax((0, 2)) > 0).sum()),
        "article_from_mean_of_values": _difference(theirs[:, 4], mean),
        "headwise_from_output_bias": _difference(ours[:, 4], bias.expand(BATCH, -1)),
        "difference_there": _difference(theirs[:, 4], ours[:, 4]),
        "difference_elsewhere": _difference(theirs[:, seen], ours[:, seen]),
        "article_in_float16": _outcome(
            lambda: _copy(module, dtype=torch.float16)(query.half(), key.half(), value.half(), mask)
        ),
        "article_with_mask_per_sequence": _outcome(lambda: module(query, key, value, mask.expand(BATCH, -1, -1))),
    }


# ---- the reshape ----


def reshape(seed: int) -> dict[str, Any]:
    """``view`` moves nothing; head i is a slice of the projected vector, and so are the answer's six features."""
    linear = _filled(nn.Linear(D_IN, WIDTH), seed)
    (x,) = _tokens(seed, (LENGTH, D_IN))
    with torch.no_grad():
        projected = linear(x)
    viewed = projected.view(BATCH, LENGTH, HEADS, HEAD_DIM)
    turned = viewed.transpose(1, 2)
    slices = [projected[..., i * HEAD_DIM : (i + 1) * HEAD_DIM] for i in range(HEADS)]
    by_rows = [x @ w.mT + b for w, b in zip(linear.weight.split(HEAD_DIM), linear.bias.split(HEAD_DIM), strict=True)]
    kept = projected.clone()
    same_data = viewed.data_ptr() == projected.data_ptr() == turned.data_ptr()
    same_storage = viewed.untyped_storage().data_ptr() == projected.untyped_storage().data_ptr()
    difference = _difference(viewed.flatten(2), kept)
    viewed[1, 2, 1, 3] += 1
    seen_through = bool(projected[1, 2, HEAD_DIM + 3] == kept[1, 2, HEAD_DIM + 3] + 1)
    viewed[1, 2, 1, 3] -= 1

    six = [t.unflatten(-1, (3, 2)).transpose(1, 2) for t in _tokens(seed + 1, (LENGTH, 6), (LENGTH, 6), (LENGTH, 6))]
    whole = [_merge(t) for t in six]
    out = _merge(headwise.attention(*six))
    alone = [_attend(*(t[..., i : i + 2] for t in whole)) for i in (0, 2, 4)]
    return {
        "same_address": same_data,
        "same_storage": same_storage,
        "elements_before_and_after": [projected.numel(), viewed.numel()],
        "difference_of_numbers": difference,
        "a_write_is_seen_through": seen_through,
        "merging_needs_a_copy": _outcome(lambda: turned.transpose(1, 2).transpose(1, 2).view(BATCH, LENGTH, WIDTH)),
        "head_from_slice": max(_difference(viewed[:, :, i], part) for i, part in enumerate(slices)),
        "head_from_its_rows_of_the_weight": max(_difference(viewed[:, :, i], part) for i, part in enumerate(by_rows)),
        "six_features_three_heads_error": _difference(out, torch.cat(alone, -1)),
    }


def independence(seed: int) -> dict[str, Any]:
    """Derivatives of each head by the queries, keys and values of each head, and by the features of the tokens."""
    shapes = ((HEADS, LENGTH, HEAD_DIM), (HEADS, KEYS, HEAD_DIM), (HEADS, KEYS, HEAD_DIM + 2))
    query, key, value = (t[:1] for t in _tokens(seed, *shapes))

    def own_and_other(which: int) -> tuple[float, float]:
        def head_outputs(t: Tensor) -> Tensor:
            inputs = [query, key, value]
            inputs[which] = t
            return headwise.attention(*inputs)[0]

        by_HTVHSD = jacobian(head_outputs, (query, key, value)[which])[:, :, :, 0].abs()
        by_HH = by_HTVHSD.amax((1, 2, 4, 5))
        eye = torch.eye(HEADS, dtype=torch.bool)
        return _plain(by_HH[eye].min()), _plain(by_HH[~eye].max())

    found = {name: own_and_other(i) for i, name in enumerate(("queries", "keys", "values"))}
    layer = _layer(seed, out_dim=17, head_dim=HEAD_DIM)
    (x,) = _tokens(seed, (LENGTH, D_IN))
    projection, layer.out_proj = layer.out_proj, nn.Identity()
    by_TNE = jacobian(lambda t: layer(t)[0], x)[:, :, 0].abs().amax(2)
    used = by_TNE.amax(0).unflatten(0, (HEADS, HEAD_DIM)).amax(1) > 0
    parts = layer.q_proj.weight.detach().split(HEAD_DIM)
    mixed = projection.weight.detach().unflatten(1, (HEADS, HEAD_DIM)).abs().amax(2) > 0
    return {
        "largest_derivative_by_other_heads": {name: other for name, (_, other) in found.items()},
        "smallest_derivative_by_own_head": {name: own for name, (own, _) in found.items()},
        "features_of_a_token_used_by_each_head": used.sum(1).tolist(),
        "features_of_a_token": D_IN,
        "rank_of_each_head": [int(torch.linalg.matrix_rank(part)) for part in parts],
        "rank_of_each_pair_of_heads": [
            int(torch.linalg.matrix_rank(torch.cat(pair))) for pair in itertools.combinations(parts, 2)
        ],
        "rank_of_all_together": int(torch.linalg.matrix_rank(torch.cat(parts))),
        "heads_read_by_each_output_after_the_output_projection": sorted(set(mixed.sum(1).tolist())),
    }


def skipped(seed: int) -> dict[str, Any]:
    """The answers' steps without the reshape, against one head of the same width, and against several heads.

    ``single_head`` is a layer of one head with the same weights. Where the code goes on dividing by the root of the
    size of a head, it is a single head with scores √h times as large. Where it goes on swapping dimensions 1 and 2,
    features attend to features.
    """
    layer = _layer(seed, out_dim=17)
    single = MultiHeadAttention(D_IN, 1, head_dim=WIDTH, out_dim=17, dtype=torch.float64)
    single.load_state_dict(layer.state_dict())
    (x,) = _tokens(seed, (LENGTH, D_IN))
    q, k, v = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    flat = layer.out_proj(_attend(q, k, v))
    small_scale = layer.out_proj(_attend(q, k, v, scale=HEAD_DIM**-0.5))
    sharper = MultiHeadAttention(D_IN, 1, head_dim=WIDTH, out_dim=17, scale=HEAD_DIM**-0.5, dtype=torch.float64)
    sharper.load_state_dict(layer.state_dict())
    split = layer(x)
    swapped = [t.transpose(1, 2) for t in (q, k, v)]
    return {
        "from_single_head": _difference(flat, single(x)),
        "from_several_heads": _difference(flat, split),
        "from_several_heads_relative": _relative(flat, split),
        "largest_output": _plain(split.abs().max()),
        "kept_the_head_scale_from_single_head": _difference(small_scale, single(x)),
        "kept_the_head_scale_from_single_head_of_that_scale": _difference(small_scale, sharper(x)),
        "kept_the_swap_shape_of_scores": list((swapped[0] @ swapped[1].mT).shape),
        "kept_the_swap_relative": _relative(
            layer.out_proj(_attend(*swapped, scale=HEAD_DIM**-0.5).transpose(1, 2)), split
        ),
        "without_a_softmax_relative": _relative(
            _merge(_split(q, HEADS) @ _split(k, HEADS).mT @ _split(v, HEADS)), q @ k.mT @ v
        ),
    }


def costs(heads: list[int]) -> dict[str, Any]:
    """Parameters, multiply-adds, numbers in the scores, softmaxes and calls of a matrix product, by number of heads."""
    width, length, keys = 16 * 7, 29, 31
    rows = []
    for count in heads:
        layer = MultiHeadAttention(width, count, dtype=torch.float64, backend="reference")
        x, memory = torch.zeros(BATCH, length, width).double(), torch.zeros(BATCH, keys, width).double()

        def written_out(split: int, layer: MultiHeadAttention = layer, x: Tensor = x, s: Tensor = memory) -> Tensor:
            parts = [_split(f(t), split) for f, t in ((layer.q_proj, x), (layer.k_proj, s), (layer.v_proj, s))]
            return layer.out_proj(_merge(_attend(*parts)))

        with _Calls() as calls, torch.no_grad():
            written_out(count)
        with _Calls() as looped, torch.no_grad():
            _by_heads(layer, x, memory, memory)
        scores = headwise.attention_weights(
            _split(layer.q_proj(x), count), _split(layer.k_proj(memory), count), _split(layer.v_proj(memory), count)
        )[0]
        rows.append(
            {
                "heads": count,
                "parameters": sum(p.numel() for p in layer.parameters()),
                "multiply_adds_a_sequence": calls.multiply_adds // BATCH,
                "scores_a_sequence": scores.numel(),
                "softmaxes_a_sequence": scores.numel() // keys,
                "attention_products_batched": calls.batched,
                "products_in_a_loop_over_heads": looped.matrix,
            }
        )
    return {"queries": length, "keys": keys, "width": width, "rows": rows}


def not_transposed(seed: int) -> dict[str, Any]:
    """Two ways to go wrong whose shapes come out right: no swap of heads and tokens, or a view in its place.

    Counted are the pairs of tokens of which the output of one reads the other, by derivatives, and among them those
    that a causal mask forbids.
    """
    layer = _layer(seed)
    (x,) = _tokens(seed, (LENGTH, D_IN))

    def projected(t: Tensor) -> list[Tensor]:
        return [f(t) for f in (layer.q_proj, layer.k_proj, layer.v_proj)]

    def no_swap(t: Tensor) -> Tensor:
        return layer.out_proj(_attend(*(p.unflatten(-1, (HEADS, HEAD_DIM)) for p in projected(t))).flatten(2))

    def swap_after(t: Tensor) -> Tensor:
        out_BTHD = _attend(*(p.unflatten(-1, (HEADS, HEAD_DIM)) for p in projected(t)))
        return layer.out_proj(out_BTHD.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))

    def viewed(t: Tensor, hide: Callable[[Tensor], Tensor] | None) -> Tensor:
        return _attend(*(p.view(len(t), HEADS, LENGTH, HEAD_DIM) for p in projected(t)), hide=hide)

    def view_causal(t: Tensor) -> Tensor:
        return layer.out_proj(viewed(t, _hide_later).view(BATCH, LENGTH, WIDTH))

    def view_and_merge_causal(t: Tensor) -> Tensor:
        return layer.out_proj(_merge(viewed(t, _hide_later)))

    def read(module: Callable[[Tensor], Tensor]) -> Tensor:
        return jacobian(lambda t: module(t)[0], x)[:, :, 0].abs().amax((1, 3)) > 0

    later, others = torch.ones(LENGTH, LENGTH).triu(1).bool(), ~torch.eye(LENGTH, dtype=torch.bool)
    right, right_causal = layer(x), layer(x, mask=Causal())
    cases: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
        "right": (layer, right),
        "right, causal": (lambda t: layer(t, mask=Causal()), right_causal),
        "not swapped": (no_swap, right),
        "not swapped, but swapped back": (swap_after, right),
        "view for the swap, causal": (view_causal, right_causal),
        "view for the swap, swapped back, causal": (view_and_merge_causal, right_causal),
    }
    found = {}
    for name, (module, want) in cases.items():
        reads = read(module)
        found[name] = {
            "shape": list(module(x).shape),
            "relative_difference": _relative(module(x), want),
            "other_tokens_read": int(reads[others].sum()),
            "later_tokens_read": int(reads[later].sum()),
        }
    head0 = jacobian(lambda t: viewed(t, None)[0, 0], x)[:, :, 0].abs().amax((0, 1, 3)) > 0
    return {
        "pairs_of_different_tokens": int(others.sum()),
        "pairs_forbidden_by_a_causal_mask": int(later.sum()),
        "tokens": LENGTH,
        "tokens_head_0_reads_after_a_view": int(head0.sum()),
        "a_causal_mask_without_the_swap": _outcome(
            lambda: _hide_later(torch.zeros(BATCH, LENGTH, HEADS, HEADS), LENGTH)
        ),
        "cases": found,
    }


def softmax(seed: int) -> dict[str, Any]:
    """What the softmax does, and what it is not: the place where the heads come apart."""
    layer = _layer(seed)
    (x,) = _tokens(seed, (LENGTH, D_IN))
    q, k, v = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    qs, ks, vs = (_split(t, HEADS) for t in (q, k, v))
    single = (q @ k.mT / math.sqrt(WIDTH)).softmax(-1)
    per_head = (q @ k.mT / math.sqrt(WIDTH))[:, None].expand(-1, HEADS, -1, -1).softmax(-1)
    jointly = (qs @ ks.mT / math.sqrt(HEAD_DIM)).transpose(1, 2).flatten(2).softmax(-1)
    jointly = jointly.unflatten(2, (HEADS, LENGTH)).transpose(1, 2)
    right = _attend(qs, ks, vs)
    scores = qs @ ks.mT
    divided = scores / scores.sum(-1, keepdim=True)
    deviation: dict[str, float] = {}
    for name, dtype in (("float64", torch.float64), ("float32", torch.float32)):
        worst = 0.0
        for length in (7, 127, 1021):
            made = torch.randn(HEADS, 11, length, generator=_generator(seed), dtype=torch.float64).to(dtype)
            rows = headwise.attention_weights(
                torch.ones(1, 1, 11, 1, dtype=dtype),
                torch.ones(1, 1, length, 1, dtype=dtype),
                torch.ones(1, 1, length, 1, dtype=dtype),
                score_mods=[headwise.Bias(made[None, :1])],
            )
            worst = max(worst, (rows.double().sum(-1) - 1).abs().max().item())
        deviation[name] = _plain(worst)
    return {
        "row_sums_from_1": deviation,
        "one_score_softmaxed_per_head_from_single_head": _difference(_merge(per_head @ vs), single @ v),
        "head_dot_products_summed_from_the_whole": _difference(scores.sum(1), q @ k.mT),
        "head_dot_products_from_the_whole_relative": _relative(scores, (q @ k.mT)[:, None].expand_as(scores)),
        "one_softmax_over_all_heads_relative": _relative(jointly @ vs, right),
        "one_softmax_over_all_heads_row_sums": [_plain(jointly.sum(-1).min()), _plain(jointly.sum(-1).max())],
        "scores_negative": int((scores < 0).sum()),
        "scores_row_sums": [_plain(scores.sum(-1).min()), _plain(scores.sum(-1).max())],
        "without_the_scale_relative": _relative(_attend(qs, ks, vs, scale=1.0), right),
        "divided_by_the_sum_row_sums_from_1": _plain((divided.sum(-1) - 1).abs().max()),
        "divided_by_the_sum_negative_weights": int((divided < 0).sum()),
        "weights": divided.numel(),
    }


def shapes() -> dict[str, Any]:
    """The shapes that the answer names, with a d_out that is not d_in."""
    layer = MultiHeadAttention(D_IN, HEADS, head_dim=HEAD_DIM)
    x = torch.zeros(BATCH, LENGTH, D_IN)
    queries, keys, values = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    viewed = queries.view(BATCH, LENGTH, HEADS, HEAD_DIM)
    qs, ks, vs = (_split(t, HEADS) for t in (queries, keys, values))
    scores = headwise.attention_weights(qs, ks, vs, stage="scores")
    named = {"batch": BATCH, "seq_len": LENGTH, "heads": HEADS, "head_dim": HEAD_DIM, "d_in": D_IN, "d_out": WIDTH}
    got = {
        "projected": (queries, ("batch", "seq_len", "d_in")),
        "projected, by d_out": (queries, ("batch", "seq_len", "d_out")),
        "viewed": (viewed, ("batch", "seq_len", "heads", "head_dim")),
        "swapped": (qs, ("batch", "heads", "seq_len", "head_dim")),
        "keys transposed": (ks.transpose(-1, -2), ("batch", "heads", "head_dim", "seq_len")),
        "scores": (scores, ("batch", "heads", "seq_len", "seq_len")),
        "merged": (_merge(headwise.attention(qs, ks, vs)), ("batch", "seq_len", "d_out")),
    }
    return {
        "sizes": named,
        "shapes": {
            name: {
                "got": list(tensor.shape),
                "said": list(said),
                "holds": list(tensor.shape) == [named[letter] for letter in said],
            }
            for name, (tensor, said) in got.items()
        },
    }


# ---- what attention can see ----


def one_sequence(seed: int) -> dict[str, Any]:
    """Self-attention takes queries, keys and values of one sequence, and each element attends to every element."""
    layer = _layer(seed)
    x, memory = _tokens(seed, (LENGTH, D_IN), (KEYS, D_IN))

    def weights(a: Tensor, b: Tensor, **given: Any) -> Tensor:
        parts = [_split(f(t), HEADS) for f, t in ((layer.q_proj, a), (layer.k_proj, b), (layer.v_proj, b))]
        return headwise.attention_weights(*parts, **given)

    own, cross, causal = weights(x, x), weights(x, memory), weights(x, x, mask=Causal())
    reads = jacobian(lambda t: layer(t)[0], x)[:, :, 0].abs().amax((1, 3)) > 0
    return {
        "layer(x)_from_layer(x, x, x)": _difference(layer(x), layer(x, x, x)),
        "weights_a_head": [LENGTH, LENGTH],
        "zero_weights": int((own == 0).sum()),
        "smallest_weight": _plain(own.min()),
        "mean_weight_on_itself": _plain(own.diagonal(dim1=-2, dim2=-1).mean()),
        "pairs_read": int(reads.sum()),
        "pairs": LENGTH**2,
        "causal_pairs_seen": int((causal[0, 0] > 0).sum()),
        "cross_weights_a_head": list(cross.shape[2:]),
        "cross_zero_weights": int((cross == 0).sum()),
    }


def two_places(seeds: list[int], sequences: int, steps: int) -> dict[str, Any]:
    """A token that needs two others at once: two heads fetch both exactly; the best that one head can is searched for.

    Each of seven tokens holds five random numbers and its place. Wanted, at the last token: the numbers of tokens 1
    and 3, side by side. The weights of one head form one average: weights that do not look at the numbers leave half
    the variance, however wide the head is, and those that do can gain some of it. Errors are the mean square over that
    of the target. The layers have the same inputs and, but for the wide one, as many parameters, and the same search:
    L-BFGS on all of them, from several starts; the best is kept, and measured on sequences of its own as well.
    """
    tokens, size, first, second = 7, 5, 1, 3

    def batch(seed: int) -> tuple[Tensor, Tensor]:
        numbers = torch.randn(sequences, tokens, size, generator=_generator(seed), dtype=torch.float64)
        places = torch.eye(tokens, dtype=torch.float64).expand(sequences, -1, -1)
        return torch.cat([numbers, places], -1), torch.cat([numbers[:, first], numbers[:, second]], -1)

    def error(layer: MultiHeadAttention, x: Tensor, target: Tensor) -> Tensor:
        return (layer(x[:, -1:], x)[:, 0] - target).square().mean() / target.square().mean()

    (x, target), (fresh, fresh_target) = batch(1000), batch(1001)
    made: dict[str, Any] = {"out_dim": 2 * size, "dtype": torch.float64}
    built = _fetch_two(MultiHeadAttention(tokens + size, 2, head_dim=size, **made), first, second)
    found: dict[str, Any] = {"two heads, set by hand": {"error": _plain(error(built, fresh, fresh_target).detach())}}
    kinds = (("two heads", 2, size), ("one head", 1, 2 * size), ("one head, four times as wide", 1, 8 * size))
    for kind, heads, head_dim in kinds:
        reached = []
        for seed in seeds:
            torch.manual_seed(seed)
            layer = MultiHeadAttention(tokens + size, heads, head_dim=head_dim, **made)
            reached.append((_search(layer, lambda searched: error(searched, x, target), steps), seed, layer))
        best, _, layer = min(reached, key=lambda r: r[:2])
        found[kind] = {
            "best_error": _plain(best),
            "best_on_fresh": _plain(error(layer, fresh, fresh_target).detach()),
            "all_errors": [_plain(e) for e, _, _ in reached],
            "parameters": sum(p.numel() for p in layer.parameters()),
        }
    return found


def order(lengths: list[int], heads: list[int], seed: int) -> dict[str, Any]:
    """Permuted tokens give permuted outputs, at any length and number of heads; with positions they do not.

    "differences" are the largest, of outputs about 1 in size, between permuting before and after; "mean" those of the
    mean over the tokens, which then knows no order at all. ``every_order`` takes all 720 orders of six tokens.
    "with" gives, per part that knows positions, the difference over the size of the outputs (root mean squares).
    """
    width = 48
    rows = []
    for length in lengths:
        (x,) = _tokens(seed, (length, width))
        shuffle = torch.randperm(length, generator=_generator(seed + length))
        for count in heads:
            layer = _layer(seed, embed_dim=width, heads=count, head_dim=width // count)
            out, moved = layer(x), layer(x[:, shuffle])
            rows.append(
                {
                    "length": length,
                    "heads": count,
                    "difference": _difference(moved, out[:, shuffle]),
                    "mean": _difference(moved.mean(1), out.mean(1)),
                }
            )
    (six,) = _tokens(seed, (6, width))
    orders = torch.tensor(list(itertools.permutations(range(6))))
    layer = _layer(seed, embed_dim=width, heads=8, head_dim=6)
    every = _difference(layer(six[0][orders]), layer(six)[0][orders])
    relative = RelativeBias(8, num_buckets=8, max_distance=16)
    with torch.no_grad():
        relative.table.copy_(torch.randn(relative.table.shape, generator=_generator(seed)))
    parts: dict[str, dict[str, Any]] = {
        "nothing": {},
        "rotary": {"rotary": RotaryEmbedding(6)},
        "ALiBi": {"score_mods": [ALiBi(8)]},
        "relative bias": {"score_mods": [relative]},
        "causal mask": {"mask": Causal()},
        "window": {"mask": Window(3)},
    }
    aware: dict[str, dict[str, float]] = {}
    for name, given in parts.items():
        layer = _layer(seed, embed_dim=width, heads=8, head_dim=6, **given).double()
        aware[name] = {}
        for length in lengths:
            (x,) = _tokens(seed, (length, width))
            shuffle = torch.randperm(length, generator=_generator(seed + length))
            with torch.no_grad():
                aware[name][str(length)] = _relative(layer(x[:, shuffle]), layer(x)[:, shuffle])
    return {
        "rows": rows,
        "largest_difference": max(row["difference"] for row in rows),
        "largest_difference_of_the_mean": max(row["mean"] for row in rows),
        "every_order": {"tokens": 6, "orders": len(orders), "difference": every},
        "with": aware,
    }


# ---- models that others publish ----


def models() -> dict[str, Any]:
    """Layers, heads and feed-forward networks of BERT base, GPT-2 and the first Transformer, built without weights."""
    transformers = _transformers()
    if isinstance(transformers, dict):
        return transformers
    with torch.device("meta"):  # no numbers are drawn
        bert = transformers.BertModel(transformers.BertConfig())
        gpt = transformers.GPT2Model(transformers.GPT2Config())
        first = nn.Transformer(batch_first=True)
    return {
        "BERT base": {
            "layers": len(bert.encoder.layer),
            "with_self_attention": sum(hasattr(layer.attention, "self") for layer in bert.encoder.layer),
            "heads": [layer.attention.self.num_attention_heads for layer in bert.encoder.layer],
            "attention_followed_by_feed_forward": sum(
                _order_in(lay, "attention", "inter") for lay in bert.encoder.layer
            ),
            "causal": [layer.attention.self.is_causal for layer in bert.encoder.layer],
        },
        "GPT-2": {
            "layers": len(gpt.h),
            "with_self_attention": sum(hasattr(layer, "attn") for layer in gpt.h),
            "heads": [layer.attn.num_heads for layer in gpt.h],
            "attention_followed_by_feed_forward": sum(_order_in(layer, "attn", "mlp") for layer in gpt.h),
            "causal": [layer.attn.is_causal for layer in gpt.h],
        },
        "Transformer of 2017 (torch.nn.Transformer)": {
            "layers": len(first.encoder.layers) + len(first.decoder.layers),
            "with_self_attention": sum(
                hasattr(lay, "self_attn") for lay in (*first.encoder.layers, *first.decoder.layers)
            ),
            "heads": [layer.self_attn.num_heads for layer in (*first.encoder.layers, *first.decoder.layers)],
            "attention_followed_by_feed_forward": sum(
                _order_in(layer, "self_attn", "linear1") for layer in (*first.encoder.layers, *first.decoder.layers)
            ),
            "with_cross_attention": sum(hasattr(layer, "multihead_attn") for layer in first.decoder.layers),
        },
    }


# the article's fields, and the lists of transformers in which models for them are registered
FIELDS: dict[str, tuple[str, ...]] = {
    "machine translation": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "text similarity": ("TEXT_ENCODING",),
    "natural language processing": ("MASKED_LM", "CAUSAL_LM", "SEQUENCE_CLASSIFICATION"),
    "speech recognition": ("SPEECH_SEQ_2_SEQ", "CTC"),
    "image segmentation": ("SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION"),
    "image classification": ("IMAGE_CLASSIFICATION",),
    "video analysis": ("VIDEO_CLASSIFICATION",),
    "recommendation": (),
}
# a number of heads that are not of attention: of a state space, of a matrix memory
NOT_ATTENTION = frozenset({"mamba2", "xlstm"})
_HEADS = re.compile(r"(^|_)(n|num)_(\w+_)?heads?$|attention_heads$|(^|_)num_attention_heads(_\w+)?$")


def applications(fields: list[str]) -> dict[str, Any]:
    """Of the families of models that transformers has for each field of the article's list: how many have heads.

    By the default configuration of each: whether it, or a configuration inside it, has a number of attention heads.
    That says what is built, not that heads are what makes it good.
    """
    transformers = _transformers()
    if isinstance(transformers, dict):
        return transformers
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    found: dict[str, Any] = {"transformers": transformers.__version__}
    transformers.logging.set_verbosity_error()  # some defaults are not to their own liking
    for field in fields:
        families = sorted({name for kind in FIELDS[field] for name in getattr(auto, f"MODEL_FOR_{kind}_MAPPING_NAMES")})
        if not families:
            found[field] = {"not_tested": "transformers has no list of models for it."}
            continue
        has = {family: _has_heads(transformers, family) for family in families}
        found[field] = {
            "families": len(families),
            "with_heads": sum(value is True for value in has.values()),
            "without": [family for family, value in has.items() if value is False],
            "configuration_not_made": [family for family, value in has.items() if value is None],
        }
    return found


# ---- what the functions above share ----


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _tokens(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    made = _generator(seed + 7)
    return [torch.randn(BATCH, *shape, generator=made, dtype=torch.float64) for shape in shapes]


def _filled(module: nn.Module, seed: int) -> Any:
    """The module in float64, weights and biases normal, each output about 1 in size."""
    made = _generator(seed)
    module = module.double()
    with torch.no_grad():
        for linear in module.modules():
            if isinstance(linear, nn.Linear):
                shape = linear.weight.shape
                linear.weight.copy_(torch.randn(shape, generator=made, dtype=torch.float64) * shape[1] ** -0.5)
                if linear.bias is not None:
                    linear.bias.copy_(torch.randn(shape[0], generator=made, dtype=torch.float64))
    return module.requires_grad_(False)


def _layer(
    seed: int, embed_dim: int = D_IN, heads: int = HEADS, head_dim: int = HEAD_DIM, **given: Any
) -> MultiHeadAttention:
    return _filled(MultiHeadAttention(embed_dim, heads, head_dim=head_dim, **given), seed)


def _copy(module: nn.Module, dtype: torch.dtype) -> Any:
    return copy.deepcopy(module).to(dtype)


def _split(x_BTE: Tensor, heads: int) -> Tensor:
    return x_BTE.unflatten(-1, (heads, -1)).transpose(1, 2)


def _merge(x_BHTD: Tensor) -> Tensor:
    return x_BHTD.transpose(1, 2).flatten(2)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, hide: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Softmax(q · kᵀ · scale) · v, over whatever the last two dimensions are."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return (scores if hide is None else hide(scores)).softmax(-1) @ v


def _hide_later(scores: Tensor, length: int | None = None) -> Tensor:
    length = length or scores.shape[-1]
    return scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)


def _heads(layer: MultiHeadAttention, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V), each with matrices of its own."""
    found = []
    for i in range(layer.num_heads):
        parts = []
        for linear, x in ((layer.q_proj, query), (layer.k_proj, key), (layer.v_proj, value)):
            size = len(linear.weight) // layer.num_heads
            part = x @ linear.weight[i * size : (i + 1) * size].mT
            parts.append(part if linear.bias is None else part + linear.bias[i * size : (i + 1) * size])
        found.append(_attend(*parts))
    return found


def _by_heads(layer: MultiHeadAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out = torch.cat(_heads(layer, query, key, value), -1) @ layer.out_proj.weight.mT
    return out if layer.out_proj.bias is None else out + layer.out_proj.bias


def _plain(value: Any) -> float:
    return float(f"{float(value):.6g}")


def _difference(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        raise ValueError(f"shapes {tuple(a.shape)} and {tuple(b.shape)} are compared")
    return _plain((a.detach().double() - b.detach().double()).abs().max())


def _relative(a: Tensor, b: Tensor) -> float:
    """Root mean square of the difference over that of ``b``."""
    return _plain((a - b).detach().square().mean().sqrt() / b.detach().square().mean().sqrt())


def _outcome(call: Callable[[], object]) -> str:
    """The name of the error that a call ends with, and the first of what it says; or "works"."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
    return "works"


class _Calls(TorchDispatchMode):
    """Counts matrix products: in all, those of a batch of matrices, and their multiplications with an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.batched = self.matrix = self.multiply_adds = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("bmm", "mm", "addmm"):
            left, right = args[-2:]
            self.matrix += 1
            self.batched += name == "bmm"
            self.multiply_adds += left.numel() * right.shape[-1]
        return func(*args, **(kwargs or {}))


def _search(layer: MultiHeadAttention, loss: Callable[[MultiHeadAttention], Tensor], steps: int) -> float:
    """The lowest loss that L-BFGS comes to, with the layer left where it ended."""
    search = torch.optim.LBFGS(layer.parameters(), max_iter=steps, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        value = loss(layer)
        value.backward()
        return value

    search.step(closure)
    return loss(layer).item()


def _fetch_two(layer: MultiHeadAttention, first: int, second: int) -> MultiHeadAttention:
    """Set the weights so that head 0 reads token ``first`` and head 1 token ``second``, by place alone."""
    size, width = layer.head_dim, layer.embed_dim
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        for head, place in enumerate((first, second)):
            layer.q_proj.bias[head * size] = 2000  # so far below, the exponentials of the other tokens are 0
            layer.k_proj.weight[head * size, size + place] = 1
            layer.v_proj.weight[head * size : (head + 1) * size] = torch.eye(size, width)
        layer.out_proj.weight.copy_(torch.eye(2 * size))
    return layer


def _transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        return importlib.import_module("transformers")
    except ImportError:
        return {"not_tested": "transformers is not installed; pip install 'headwise[transformers]'."}


def _order_in(layer: nn.Module, first: str, second: str) -> bool:
    """Whether a layer has both, and the first before the second."""
    names = [name for name, _ in layer.named_children()]
    places = [next((i for i, name in enumerate(names) if name.startswith(part)), -1) for part in (first, second)]
    return -1 < places[0] < places[1]


def _has_heads(transformers: Any, family: str) -> bool | None:
    if family in NOT_ATTENTION:
        return False
    try:
        config = transformers.CONFIG_MAPPING[family]()
    except Exception:  # some need a part that has no default, or a package of their own
        return None
    return _named(config.to_dict()) or any(_HEADS.search(name) for name in config.attribute_map)


def _named(values: dict[str, Any]) -> bool:
    return any(
        _named(value) if isinstance(value, dict) else bool(_HEADS.search(str(name)) and value)
        for name, value in values.items()
    )
