"""``explain``: every number against a count of its own, and no word that ``forward`` does not bear out."""

import json
import math
import re

import pytest
import torch
from cases import MASKS, SQUARE_MASKS, Call
from helpers import randn
from torch.utils.flop_counter import FlopCounterMode

from headwise import (
    ALiBi,
    Bias,
    CacheError,
    Causal,
    Chunk,
    CustomMask,
    Dense,
    Document,
    DynamicCache,
    FixedCache,
    Full,
    MultiHeadAttention,
    Padding,
    PerHead,
    Positions,
    Prefix,
    RollingCache,
    RotaryEmbedding,
    ShapeError,
    Softcap,
    StaticCache,
    UnsupportedError,
    Window,
    attention,
    pack,
)
from headwise.backends import choose
from headwise.backends.base import Backend
from headwise.backends.native import MISSING, instruction_sets
from headwise.caches import KVCache
from headwise.explain import amount, details, explain
from headwise.lint import called, lint_mask, look_at

B, T, S, E, H, K, D, V = 2, 7, 11, 10, 15, 3, 4, 5


def make(**settings):
    settings = {"num_kv_heads": K, "head_dim": D, "v_head_dim": V, "key_dim": 13, "value_dim": 17} | settings
    return MultiHeadAttention(E, H, **settings)


def tokens():
    return randn(B, T, E), randn(B, S, 13), randn(B, S, 17)


def step(found, name):
    return next(s for s in found.steps if s.name == name)


def test_the_steps_of_a_layer_in_order():
    layer = make(rotary=RotaryEmbedding(D), q_norm=torch.nn.RMSNorm(D), sinks=True, dropout_p=0.25, mask=Causal())
    found = explain(layer, *tokens(), score_mods=[Softcap(3.0), ALiBi(H)])
    assert [s.name for s in found.steps] == [
        *("project q", "project k", "project v", "split q", "split k", "split v"),
        *("transpose q", "transpose k", "transpose v", "norm q", "rotate q", "rotate k"),
        *("score", "scale", "modify", "modify", "mask", "softmax", "sink", "dropout", "sum"),
        *("transpose back", "merge", "project out"),
    ]
    assert found.sizes == {"B": B, "T": T, "S": S, "E": E, "H": H, "K": K, "D": D, "V": V}


def test_letters_and_sizes_agree_in_every_step():
    found = explain(make(rotary=RotaryEmbedding(D), out_dim=19), *tokens())
    sizes = found.sizes | {"E_k": 13, "E_v": 17, "E_out": 19}
    for s in found.steps:
        for letters, shape in ((s.letters_in, s.shape_in), (s.letters_out, s.shape_out)):
            want = [math.prod(sizes[letter] for letter in word.split("·")) for word in letters.split()]
            assert list(shape) == want, s.name


def test_strides_and_storage_are_those_of_the_tensors():
    layer = make()
    query, key, value = tokens()
    found = explain(layer, query, key, value)
    projected = layer.k_proj(key)
    split = projected.unflatten(-1, (K, D))
    for name, tensor, memory in (
        ("project k", projected, "new"),
        ("split k", split, "view"),
        ("transpose k", split.transpose(1, 2), "view"),
    ):
        assert (step(found, name).strides, step(found, name).memory) == (tensor.stride(), memory)
    assert step(found, "transpose k").strides == (S * K * D, D, K * D, 1)
    assert step(found, "score").strides is None
    assert step(found, "score").memory == "in the backend"


def test_a_merge_is_a_view_only_where_the_backend_left_tokens_outermost():
    query = randn(B, T, E)
    apart = explain(MultiHeadAttention(E, 5, backend="reference"), query)
    assert (step(apart, "transpose back").memory, step(apart, "merge").memory) == ("view", "copy")
    assert step(apart, "merge").bytes == 2 * B * T * E * 4
    seen = {}
    layer = MultiHeadAttention(E, 5, backend="sdpa")
    layer.out_proj.register_forward_hook(lambda module, args, out: seen.update(merged=args[0]))
    layer.observer = lambda x, out, lse: seen.update(out=out)
    found = explain(layer, query)
    shared = seen["merged"].data_ptr() == seen["out"].data_ptr()
    assert step(found, "merge").memory == ("view" if shared else "copy")


def test_a_rotation_of_half_precision_does_not_hide_the_way_to_the_projection():
    layer = make(rotary=RotaryEmbedding(D), dtype=torch.bfloat16)
    found = explain(layer, *(t.bfloat16() for t in tokens()))
    names = [s.name for s in found.steps]
    assert names[:3] == ["project q", "project k", "project v"]
    assert [n for n in names if n.startswith(("rotate", "convert"))] == ["rotate q", "rotate k"]
    assert step(found, "rotate q").bytes == 2 * B * T * H * D * 2


@pytest.mark.parametrize("settings", [{}, {"bias": False}, {"num_kv_heads": H}, {"v_head_dim": D}], ids=str)
def test_flops_are_what_torch_counts(settings):
    layer = make(backend="reference", **settings)
    found = explain(layer, *tokens())
    with FlopCounterMode(display=False) as counted:
        layer(*tokens())
    matmuls = [s for s in found.steps if s.name.split()[0] in ("project", "score", "sum")]
    biases = sum(math.prod(s.shape_out) for s in matmuls if s.formula.endswith("+ b"))
    assert sum(s.flops for s in matmuls) - biases == counted.get_total_flops()
    assert found.flops == sum(s.flops for s in found.steps) > counted.get_total_flops()


def test_useful_flops_follow_the_mask():
    found = explain(make(), *tokens(), mask=Window(2))
    pairs = sum(abs((S - T + t) - s) < 2 for t in range(T) for s in range(S)) * B * H
    assert (found.allowed_pairs, found.pairs) == (pairs, B * H * T * S)
    assert step(found, "score").useful_flops == 2 * pairs * D
    assert step(found, "sum").useful_flops == 2 * pairs * V
    assert step(found, "project q").useful_flops == step(found, "project q").flops
    assert found.useful_flops == sum(s.useful_flops for s in found.steps) < found.flops


def test_bytes_of_a_call():
    query, key, value = randn(B, H, T, D), randn(B, K, S, D), randn(B, K, S, V)
    found = explain(query, key, value)
    scores = B * H * T * S
    assert step(found, "score").bytes == 4 * (query.numel() + key.numel() + scores)
    assert step(found, "sum").bytes == 4 * (scores + value.numel() + B * H * T * V)
    assert found.fused_bytes == 4 * (query.numel() + key.numel() + value.numel() + B * H * T * V)
    half = explain(*(t.half() for t in (query, key, value)))
    assert half.fused_bytes == found.fused_bytes // 2
    assert step(half, "softmax").bytes == step(found, "softmax").bytes  # in float32 either way


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "call",
    [{}, {"score_mods": [Softcap(2.0)]}, {"mask": Causal()}, {"seed": 3}],
    ids=["plain", "softcap", "causal", "seed"],
)
def test_the_backend_is_the_one_that_forward_takes(call, training):
    layer = make(dropout_p=0.5).train(training)
    taken = []

    class Recorder(Backend):
        name = "recorder"

        def why_not(self, x):
            return None

        def run(self, x):
            taken.append(choose(x).name)
            return choose(x).run(x)

    found = explain(layer, *tokens(), **call)
    layer.backend = Recorder()
    layer(*tokens(), **call)
    assert [found.backend] == taken
    assert [c.backend for c in found.choices if c.verdict == "runs it"] == taken
    own = explain(layer, *tokens(), **call)
    assert own.backend == own.choices[0].backend == "recorder"


def test_a_backend_that_cannot_is_explained_and_not_swapped():
    layer = make(backend="sdpa", score_mods=[Softcap(2.0)])
    found = explain(layer, *tokens(), mask=Causal())
    assert found.backend is None
    sdpa = next(c for c in found.choices if c.backend == "sdpa")
    assert sdpa.verdict == "cannot"
    assert sdpa.why.startswith("it cannot modify scores (Softcap)")
    assert f"{found.pairs:,} scores, {found.allowed_pairs:,} allowed" in sdpa.why
    reference = next(c for c in found.choices if c.backend == "reference")
    assert (reference.verdict, reference.why[:20]) == ("could run it", "'sdpa' was asked for")


def test_the_kernel_is_the_one_that_torch_calls():
    query = randn(B, 5, T, D)
    for mask, told in (
        (Causal(), "is_causal=True, no mask tensor"),
        (Window(3), f"a mask tensor of {T * T} entries"),
    ):
        found = explain(query, query, query, mask=mask, backend="sdpa")
        why = next(choice.why for choice in found.choices if choice.backend == "sdpa")
        assert told in why, mask
        assert f"{T} query rows on {T} keys" in why
    sliced = explain(query, query, query, mask=Prefix(3), backend="sdpa")
    why = next(choice.why for choice in sliced.choices if choice.backend == "sdpa")
    assert f"{T} query rows on 3 keys, is_causal=False, no mask tensor" in why


@pytest.mark.skipif(MISSING is not None, reason=f"no kernel here: {MISSING}")
def test_the_call_of_the_own_kernel_is_told():
    query = randn(B, 5, T, D)
    isa = f"the kernel is called with {instruction_sets()[0]} instructions, "
    for mask, told in (
        (Causal(), "the keys of a query as one run, by numbers"),
        (Causal() | Prefix(3), "the keys of a query as up to 2 runs"),
        (Dense(torch.ones(T, T, dtype=torch.bool)), f"a mask tensor of {T * T} entries"),
    ):
        found = explain(query, query, query, mask=mask)
        assert found.backend == "native"
        assert isa + told in found.choices[0].why, found.choices[0].why


def test_what_the_reference_holds_depends_on_gradients():
    query = randn(1, 2, 3001, 1)
    with torch.no_grad():
        blocked = explain(query, query, query, backend="reference").choices[-1].why
    assert "computes all 18,012,002 scores, 8,384,794 at once (33.5 MB in float32)" in blocked
    assert 8_384_794 == 2 * 3001 * (2**23 // (2 * 3001))


def test_explaining_leaves_no_trace():
    layer = make(dropout_p=0.5).train()
    call = tokens()
    torch.manual_seed(5)
    want = layer(*call)
    torch.manual_seed(5)
    explain(layer, *call)
    assert torch.equal(layer(*call), want)
    assert layer.backend == "auto"
    with pytest.raises(ShapeError, match="tokens of size 11"):
        explain(layer, randn(B, T, 11))
    assert layer.backend == "auto"
    assert not any(m._forward_hooks for m in layer.modules())


class Growing(KVCache):
    """The simplest cache: it joins."""

    def __init__(self):
        self.held = None

    def next_positions(self, count):
        return Positions(count, start=0 if self.held is None else self.held[0].shape[2])

    def append(self, key, value, positions, lengths=None):
        if self.held is not None:
            key, value = torch.cat([self.held[0], key], 2), torch.cat([self.held[1], value], 2)
        self.held = key, value
        return key, value, Positions(key.shape[2])


def test_a_cache_is_explained_and_not_filled():
    layer, cache = MultiHeadAttention(E, 5, mask=Causal()), Growing()
    with torch.no_grad():
        layer(randn(B, T, E), cache=cache)
    found = explain(layer, randn(B, 3, E), cache=cache)
    assert cache.held[0].shape[2] == T
    cached = step(found, "cache k")
    assert (cached.shape_in, cached.shape_out, cached.memory) == ((B, 5, 3, 2), (B, 5, T + 3, 2), "copy")
    assert (found.sizes["T"], found.sizes["S"]) == (3, T + 3)
    assert [s.name for s in found.steps][:3] == ["project q", "project k", "project v"]
    layer(randn(B, T, E), cache=cache)
    with pytest.raises(UnsupportedError, match="fill it under torch"):
        explain(layer, randn(B, 3, E), cache=cache)


def test_unbatched_tokens_and_an_observer():
    layer = MultiHeadAttention(E, 5)
    seen = []
    layer.observer = lambda x, out, lse: seen.append(x) or out * 2
    found = explain(layer, randn(T, E))
    assert found.sizes["B"] == 1
    assert len(seen) == 1
    assert found.steps[-1].shape_out == (1, T, E)


def test_a_bias_that_hides_counts_as_a_mask():
    query = randn(B, 5, T, D)
    bias = torch.zeros(T, T)
    bias[:, 2] = -torch.inf
    found = explain(query, query, query, score_mods=[Bias(bias)])
    assert found.allowed_pairs == B * 5 * T * (T - 1)


def test_what_cannot_be_explained():
    with pytest.raises(ShapeError, match="explain takes a MultiHeadAttention or the queries first, not str"):
        explain("layer")
    query = randn(B, H, T, D)
    with pytest.raises(ShapeError, match="A dropout probability of"):
        explain(query, query, query, dropout_p=1.0)


def test_it_prints_and_becomes_json():
    found = explain(make(mask=Causal()), *tokens(), mask=Padding([S, 3]))
    said = str(found)
    for s in found.steps:
        assert f"{s.name}: {s.formula}" in said
        assert all(line in said for line in details(s))
    assert all(lint_.text in said for lint_ in found.lints)
    assert "tensor(" not in said
    told = json.loads(json.dumps(found.to_dict()))
    assert told["flops"] == found.flops
    assert told["steps"][0]["shape_out"] == [B, T, H * D]
    assert [c["backend"] for c in told["choices"]] == ["native", "sdpa", "reference"]


def test_no_line_of_the_details_is_cut_off_at_80_columns():
    found = explain(MultiHeadAttention(512, 8), randn(1, 128, 512))
    assert max(len("     " + line) for s in found.steps for line in details(s)) <= 80


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 "), (999, "999 "), (1000, "1 k"), (1536, "1.54 k"), (2.5e6, "2.5 M"), (3e15, "3e+03 T")],
)
def test_amounts(number, text):
    assert amount(number) == text


SMALL = {
    "some": Call(heads=3, rows=5, slots=7),
    "square": Call(heads=3, rows=5, slots=5),
    "more queries": Call(heads=3, rows=7, slots=5),
    "no query": Call(rows=0),
    "no key": Call(slots=0),
    "empty batch": Call(batch=0),
}


@pytest.mark.parametrize(
    ("case", "name"),
    [(c, name) for c in MASKS for name in SMALL] + [(c, "square") for c in SQUARE_MASKS],
    ids=lambda v: getattr(v, "name", v),
)
def test_a_mask_is_counted_right_with_and_without_its_spans(case, name, monkeypatch):
    call = SMALL[name]
    mask = case.make(call).bind(call.batch, call.heads, call.queries, call.keys)
    want = case.dense(call)
    monkeypatch.setattr("headwise.lint.BLOCK", 1 + 2 * call.batch * call.heads * call.slots)  # two rows at a time
    plain = CustomMask(mask.allowed)
    for each in (mask, plain):
        found = look_at(each, call.batch, call.heads, call.queries, call.keys)
        assert torch.equal(found.per_query, want.sum(-1))
        assert torch.equal(found.seen, want.any(-2))
        assert found.pairs == want.sum()


def kinds(mask, rows=5, slots=5, batch=2, heads=3):
    at, of = Positions(rows, start=slots - rows), Positions(slots)
    return [found.kind for found in lint_mask(mask.bind(batch, heads, at, of), batch, heads, at, of)]


LOWER = torch.ones(5, 5).tril() > 0


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        (Full(), []),
        (Causal(), []),
        (Causal() & Window(3), []),
        (Causal() & Window(4), []),
        (Causal() & Window(5), ["no effect"]),
        (Causal() & Window(left=3, right=0), ["no effect"]),
        (Causal() & Causal(), ["no effect"]),
        (Window(5), ["no effect"]),
        (Padding(5), ["no effect"]),
        (Padding([5, 5]), ["no effect"]),
        (Padding([5, 4]), ["unseen keys"]),
        (Causal() & Padding([5, 0]), ["empty rows", "unseen keys"]),
        (~Window(1) & Causal(), ["empty rows", "unseen keys"]),
        (Dense(LOWER), ["dense causal", "no spans"]),
        (Dense(LOWER.expand(2, 1, 5, 5)), ["dense causal", "no spans"]),
        (Dense(~LOWER), ["empty rows", "unseen keys", "polarity", "no spans"]),
        (~Dense(LOWER), ["empty rows", "unseen keys", "polarity", "no spans"]),
        (~Dense(~LOWER), ["no spans"]),
        (Dense(torch.eye(5) == 0), ["polarity", "no spans"]),
        (Dense(torch.eye(5) > 0), ["no spans"]),
        (Causal() | Dense(torch.eye(5).roll(2, 1) > 0), ["no spans"]),
        (CustomMask(lambda b, h, q, k: k != q), ["no spans"]),
        (Padding(torch.tensor([[True] * 3 + [False] * 2] * 2)), ["unseen keys", "no spans"]),
        (Padding(torch.tensor([[False] * 3 + [True] * 2] * 2)), ["unseen keys", "polarity", "no spans"]),
        (Padding(torch.tensor([[False] + [True] * 4, [True] * 4 + [False]])), ["unseen keys", "no spans"]),
        (Padding(torch.ones(2, 5, dtype=torch.bool)), ["no effect", "no spans"]),
        (Document(torch.tensor([0, 0, 1, 1, 1])), ["no spans"]),
        (Document.from_lengths([2, 3]), []),
        (Chunk(2), []),
        (Causal() | Prefix(2), []),
        (PerHead((Causal(), Window(2), Full())), []),
        (PerHead((Causal(), Dense(LOWER), Full())), ["no spans"]),
    ],
    ids=lambda v: re.sub(r"\s+", " ", repr(v))[:60],
)
def test_what_the_linter_finds(mask, found):
    assert kinds(mask) == found


def test_one_query_is_no_reason_to_speak_of_a_mask_without_effect():
    assert kinds(Causal(), rows=1) == []
    assert kinds(Causal() & Window(9), rows=1) == []
    assert kinds(Causal() & Window(2), rows=1) == ["unseen keys"]
    assert kinds(Causal(), rows=0) == kinds(Causal(), slots=0) == []


def test_lints_say_both_numbers_and_what_to_do():
    at = Positions(5)

    def said(mask, kind):
        return next(x.text for x in lint_mask(mask.bind(2, 3, at, at), 2, 3, at, at) if x.kind == kind)

    assert said(Causal() & Window(7), "no effect") == (
        "Window(7) changes nothing: 90 pairs are allowed with it and 90 without. Leave it out, or check its "
        "size against the call's."
    )
    assert said(Causal() & Padding([5, 2]), "unseen keys") == (
        "3 of 10 keys are seen by no query (in sequence 1: 3, keys 2 to 4): 30% of the work on keys and "
        "values is wasted. Cut off what all rows leave unseen, and put rows of like length together."
    )
    assert said(~Window(1) & Causal(), "empty rows") == (
        "6 of 30 query rows may see no key (the first: sequence 0, head 0, query 0); their output is zeros. "
        "If that is not meant, let each query see itself: mask | Window(1)."
    )
    assert said(Dense(~LOWER), "polarity") == (
        "Dense(tensor) hides the own token of all 5 queries and shows 60 of 150 pairs. True means may "
        "attend; if True hides in your tensor, write Dense(~mask)."
    )
    assert "4 of 10 keys" in said(Padding(torch.tensor([[False] * 3 + [True] * 2] * 2)), "polarity")
    assert "written as 25 booleans" in said(Dense(LOWER), "dense causal")
    assert "all 25 pairs of query and key are evaluated; the mask as a whole allows 15 a head" in said(
        Dense(LOWER), "no spans"
    )


def test_a_mask_is_called_by_its_name_without_its_numbers():
    assert called(Causal() & (Window(3) | Padding([2, 3]))) == "Causal() & (Window(3) | Padding(lengths=tensor))"
    assert called(Dense(torch.ones(40, 40) > 0)) == "Dense(tensor)"
    assert called(Dense(torch.ones(0, 3) > 0)) == "Dense(tensor)"
    assert " at 0x" not in called(CustomMask(lambda b, h, q, k: k <= q))


def test_lints_of_a_call_reach_the_explanation():
    query = randn(B, 5, T, D)
    found = explain(query, query, query, mask=torch.ones(T, T).tril() > 0)
    assert [x.kind for x in found.lints] == ["dense causal", "no spans"]
    assert attention(query, query, query, mask=Causal()).shape == query.shape


def test_useful_work_is_told_where_it_is_less():
    x = torch.randn(1, 3, 5, 2)
    assert "useful" in str(explain(x, x, x, mask=Causal()))
    assert "useful" not in str(explain(x, x, x))


def _calls_of_every_form():
    """A layer, tokens and keywords of a call, and how many pairs may attend in one head of each row."""
    layer = MultiHeadAttention(12, 3, mask=Causal() & Window(4), rotary=RotaryEmbedding(4))
    x = randn(2, 7, 12, seed=210)
    for cache in (DynamicCache(), StaticCache(9), RollingCache(4)):
        layer(x, cache=cache)
        yield layer, x[:, :1], {"cache": cache}, 2 * 4
    ragged = DynamicCache()
    layer(x, cache=ragged, lengths=torch.tensor([7, 2]))
    yield layer, x[:, :2], {"cache": ragged}, (4 + 4) + (3 + 4)
    packed = pack([x[0], x[1, :3]])
    yield layer, packed.tokens, {"mask": packed.mask, "positions": packed.positions}, 1 + 2 + 3 + 4 * 4 + 1 + 2 + 3
    cross, cache = MultiHeadAttention(12, 3), FixedCache()
    cross(x, x.clone(), cache=cache, lengths=torch.tensor([7, 3]))
    yield cross, x[:, :2], {"cache": cache}, 2 * 7 + 2 * 3
    yield layer, x, {"positions": torch.arange(14).reshape(2, 7)}, 2 * (1 + 2 + 3 + 4 * 4)


@pytest.mark.parametrize("number", range(7))
def test_calls_with_caches_packs_and_positions(number):
    layer, x, how, pairs = list(_calls_of_every_form())[number]
    cache = how.get("cache")
    before = None if cache is None else (cache.length, cache.lengths)
    found = explain(layer, x, **how)
    assert found.allowed_pairs == pairs * 3
    assert f"backend {'sdpa' if MISSING else 'native'}: runs it" in str(found)
    assert before is None or (cache.length, cache.lengths) == before, "explaining stores nothing"


def test_a_filled_cache_is_explained_as_it_is_called():
    cross, cache, x, memory = MultiHeadAttention(12, 3), FixedCache(), randn(2, 3, 12), randn(2, 7, 12, seed=1)
    cross(x, memory, cache=cache)
    assert explain(cross, x, memory, cache=cache).allowed_pairs == 2 * 3 * 3 * 7
    cross(x, memory, cache=cache)
    with pytest.raises(CacheError, match="belongs to another layer"):
        explain(MultiHeadAttention(12, 3), x, memory, cache=cache)
