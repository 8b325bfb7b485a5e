"""The functions, and the rulings that every backend keeps in every mode."""

import contextlib

import oracle
import pytest
import torch
from cases import BACKEND_NAMES, DTYPES, SHAPES, Call
from helpers import assert_as_good_as, leaf, plain_attention, randn
from torch.autograd import forward_ad

import headwise.backends.reference
from headwise import (
    BACKENDS,
    ALiBi,
    Backend,
    Bias,
    Causal,
    CustomScore,
    Dense,
    Full,
    Inputs,
    MultiHeadAttention,
    Padding,
    PerHead,
    Positions,
    Prefix,
    ShapeError,
    Softcap,
    UnsupportedError,
    Window,
    attention,
    attention_weights,
    attention_with_lse,
    functional,
    merge_partials,
)
from headwise.algebra import evaluate
from headwise.backends.native import MISSING

MODES = {
    "training": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
BACKEND = pytest.mark.parametrize("backend", BACKEND_NAMES)
MODE = pytest.mark.parametrize("mode", MODES)
CALL = SHAPES["gqa"]


def inputs(call, mode, dtype=torch.float32):
    """Tensors of a call; in training they want gradients."""
    tensors = call.tensors(dtype)
    return [leaf(t) for t in tensors] if mode == "training" else list(tensors)


# --- rows that see nothing


@BACKEND
@MODE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sinks", (False, True))
def test_a_row_that_sees_nothing(backend, mode, dtype, sinks):
    seen = CALL.coin(2, 15, 7, 11)
    seen[0, :, 2] = False
    seen[1, 3] = False
    dead = ~seen.any(-1)
    query, key, value = inputs(CALL, mode, dtype)
    sink = randn(15, seed=40, dtype=dtype) if sinks else None
    given = {"mask": seen, "sinks": sink, "backend": backend}
    with MODES[mode]():
        out = attention(query, key, value, **given)
        assert out[dead].eq(0).all() and out[~dead].abs().sum(-1).gt(0).all()
        if backend != "sdpa" or mode != "training":
            lse = attention_with_lse(query, key, value, **given)[1]
            want = torch.full((2, 15, 7), -torch.inf) if sink is None else sink[None, :, None].expand(2, 15, 7)
            assert lse[dead].equal(want[dead].to(lse.dtype))
        weights = attention_weights(query, key, mask=seen, sinks=sink)
        assert weights[dead].eq(0).all()
    if mode == "training":
        grads = torch.autograd.grad(out.float().square().sum(), (query, key, value))
        assert all(g.isfinite().all() for g in grads)
        assert grads[0][dead].eq(0).all()


@BACKEND
def test_a_gradient_reaches_a_row_that_sees_nothing_as_zero(backend):
    # also where the incoming gradient is that of a mean over all rows, or not finite elsewhere
    query, key, value = inputs(CALL, "training")
    out = attention(query, key, value, mask=Causal() & ~Causal(), backend=backend)
    for incoming in (torch.ones_like(out), randn(*out.shape, seed=41)):
        for grad in torch.autograd.grad(out, (query, key, value), incoming, retain_graph=True):
            assert grad.eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_partials_that_saw_nothing(dtype):
    query, key, value = CALL.tensors(dtype)
    nothing = attention_with_lse(query, key, value, mask=~Full())
    out, lse = merge_partials(*nothing, *nothing)
    assert out.eq(0).all() and lse.eq(-torch.inf).all() and out.dtype == dtype
    some = attention_with_lse(query, key, value)
    for pair in ((*some, *nothing), (*nothing, *some)):
        out, lse = merge_partials(*pair)
        assert out.equal(some[0]) and lse.equal(some[1])


def test_gradients_through_partials_that_saw_nothing():
    query, key, value = inputs(CALL, "training", torch.float64)
    nothing = attention_with_lse(query, key, value, mask=~Full())
    out, lse = merge_partials(*nothing, *nothing)
    for grad in torch.autograd.grad(out.sum(), (query, key, value), retain_graph=True):
        assert grad.eq(0).all()
    some = attention_with_lse(query, key, value)
    out, lse = merge_partials(*some, *nothing)
    grads = torch.autograd.grad(out.square().sum() + lse.sum(), (query, key, value), retain_graph=True)
    wanted = torch.autograd.grad(some[0].square().sum() + some[1].sum(), (query, key, value))
    for got, want in zip(grads, wanted, strict=True):
        assert_as_good_as(got, want, terms=55, inner=10.0)


# --- what is stored where nobody looks

HIDDEN = {
    "lengths": (Padding([8, 5]), lambda b, s: s >= [8, 5][b]),
    "one length": (Padding(8), lambda b, s: s >= 8),
    "left": (Padding(left=[2, 3]), lambda b, s: s < [2, 3][b]),
    "booleans": (Padding(torch.arange(11)[None] < torch.tensor([[8], [5]])), lambda b, s: s >= [8, 5][b]),
    "causal and lengths": (Causal() & Padding([8, 5]), lambda b, s: s >= [8, 5][b]),
    "past the window": (Causal() & Window(3), lambda b, s: s < 2),
    "dense": (Dense((torch.arange(11) < 6).expand(7, 11).clone()), lambda b, s: s >= 6),
    "per head": (PerHead((Padding(6), Padding(4)) * 7 + (Padding(6),)), lambda b, s: s >= 6),
    "or": (Prefix(3) | Prefix(2, start=5), lambda b, s: s >= 7 or 3 <= s < 5),
}


@BACKEND
@MODE
@pytest.mark.parametrize("bad", (torch.nan, torch.inf))
@pytest.mark.parametrize("where", HIDDEN)
@pytest.mark.parametrize("sinks", (False, True))
def test_what_no_query_sees_does_not_leak(backend, mode, bad, where, sinks):
    mask, hidden = HIDDEN[where]
    gone = torch.tensor([[hidden(b, s) for s in range(11)] for b in range(2)])[:, None, :, None]
    given = {"mask": mask, "backend": backend, "sinks": torch.zeros(15) if sinks else None}
    query, key, value = inputs(CALL, mode)
    clean = [t.detach().masked_fill(gone, 0) for t in (key, value)]
    dirty = [t.detach().masked_fill(gone, bad) for t in (key, value)]
    if mode == "training":
        clean, dirty = [leaf(t) for t in clean], [leaf(t) for t in dirty]
    with MODES[mode]():
        want, got = (attention(query, *pair, **given) for pair in (clean, dirty))
        assert got.isfinite().all() and got.equal(want)
        if backend != "sdpa" or mode != "training":
            assert attention_with_lse(query, *dirty, **given)[1].isfinite().all()
    if mode == "training":
        wanted = torch.autograd.grad(want.square().sum(), (query, *clean))
        grads = torch.autograd.grad(got.square().sum(), (query, *dirty))
        for a, b in zip(grads, wanted, strict=True):
            assert a.equal(b)
        for grad in grads[1:]:
            assert grad.masked_fill(~gone, 0).eq(0).all()


@BACKEND
@MODE
def test_slots_after_the_last_query_do_not_leak(backend, mode):
    # a buffer longer than what is stored: its unused slots are out of a causal mask's reach
    query, key, value = inputs(CALL, mode)
    stand = {"query_positions": Positions(7, start=1), "backend": backend, "mask": Causal()}
    unused = (torch.arange(11) >= 8)[:, None]
    dirty = [t.detach().masked_fill(unused, torch.nan) for t in (key, value)]
    if mode == "training":
        dirty = [leaf(t) for t in dirty]
    with MODES[mode]():
        got = attention(query, *dirty, **stand)
        assert_as_good_as(got.double(), attention(query, key, value, **stand).double(), got, terms=2**30)
    assert got.isfinite().all()
    if mode == "training":
        for grad in torch.autograd.grad(got.square().sum(), (query, *dirty)):
            assert grad.isfinite().all()


@BACKEND
@MODE
@pytest.mark.parametrize("what", (0, 1, 2))
def test_nan_in_what_is_seen_stays_visible(backend, mode, what):
    tensors = inputs(CALL, mode)
    tensors[what].data[0, 1, 4] = torch.nan
    with MODES[mode]():
        out = attention(*tensors, mask=Causal(), backend=backend)
    rows = out.isnan().any(-1)
    if what == 0:
        assert rows[0, 1, 4] and rows.sum() == 1
    else:
        # key head 1 serves heads 5 to 9; the first query stands at index 4, so all see key 4
        assert rows[0, 5:10].all() and rows.sum() == 5 * 7


@BACKEND
def test_nan_is_seen_where_one_query_of_many_sees_it(backend):
    query, key, value = CALL.tensors()
    value = value.clone()
    value[0, 1, 8] = torch.nan
    out = attention(query, key, value, mask=Causal(), backend=backend)
    assert out[0, 5:10, 4:].isnan().any(-1).all()


# --- positions


@BACKEND
@pytest.mark.parametrize("rows, slots", ((7, 11), (11, 7), (7, 7), (1, 11), (11, 1)))
def test_the_last_query_stands_with_the_last_key(backend, rows, slots):
    call = Call(rows=rows, slots=slots)
    query, key, value = call.tensors(torch.float64)
    q, k = torch.arange(slots - rows, slots)[:, None], torch.arange(slots)
    for mask, seen in (
        (Causal(), k <= q),
        (Window(3), (q - k).abs() < 3),
        (Causal() & Window(3), (k <= q) & (q - k < 3)),
    ):
        got = attention(query, key, value, mask=mask, backend=backend)
        assert_as_good_as(got, plain_attention(query, key, value, seen)[0], terms=13)


@BACKEND
@pytest.mark.parametrize("start", (-3, 0, 2, 9))
def test_positions_decide_and_shapes_do_not(backend, start):
    call = Call(rows=5, slots=7, query_start=start, key_start=1)
    query, key, value = call.tensors(torch.float64)
    stand = {"query_positions": call.queries, "key_positions": call.keys, "backend": backend}
    q, k = start + torch.arange(5)[:, None], 1 + torch.arange(7)
    for mask, seen in ((Causal(), k <= q), (Window(3), (q - k).abs() < 3), (Causal() | Prefix(4), (k <= q) | (k < 4))):
        got = attention(query, key, value, mask=mask, **stand)
        assert_as_good_as(got, plain_attention(query, key, value, seen)[0], terms=13)


@BACKEND
@pytest.mark.parametrize("heads, kv_heads", ((15, 3), (6, 2), (5, 1), (4, 4)))
@pytest.mark.parametrize("rows", (1, 7, 19))
def test_query_head_h_reads_key_head_h_over_the_group(backend, heads, kv_heads, rows):
    call = Call(heads=heads, kv_heads=kv_heads, rows=rows, slots=23)
    query, key, value = call.tensors(torch.float64)
    which = torch.tensor([h // (heads // kv_heads) for h in range(heads)])
    want = attention(query, key[:, which], value[:, which], mask=Causal(), backend="reference")
    assert_as_good_as(attention(query, key, value, mask=Causal(), backend=backend), want, terms=23)


# --- gradients beyond the first, and transforms


@BACKEND
@pytest.mark.parametrize("causal", (False, True))
def test_a_gradient_can_be_differentiated_again(backend, causal):
    call = Call(batch=1, heads=2, kv_heads=1, rows=3, slots=5, head_dim=2, v_dim=3)
    leaves = [leaf(t) for t in call.tensors(torch.float64)]
    mask = Causal() if causal else Dense(call.coin(3, 5))
    assert torch.autograd.gradcheck(lambda *t: attention(*t, mask=mask, backend=backend), leaves)
    assert torch.autograd.gradgradcheck(lambda *t: attention(*t, mask=mask, backend=backend), leaves)


@pytest.mark.parametrize("mask", (Full(), Causal(), Causal() & Window(3), Padding([8, 5])), ids=repr)
@pytest.mark.parametrize("sinks", (False, True))
@pytest.mark.parametrize("shape", ("mha", "gqa", "many queries", "one query"))
def test_second_gradients_of_sdpa_are_those_of_the_reference(mask, sinks, shape):
    call = SHAPES[shape]
    if call.batch == 1 and isinstance(mask, Padding):
        mask = Padding([5])
    found = {}
    for backend, dtype in (("sdpa", torch.float32), ("reference", torch.float64), ("plain", torch.float32)):
        leaves = [leaf(t, dtype) for t in (*call.tensors(), torch.ones(call.heads) / 3)]
        sink = leaves[3] if sinks else None
        name = "reference" if backend == "plain" else backend
        out = attention(*leaves[:3], mask=mask, sinks=sink, backend=name)
        used = leaves if sinks else leaves[:3]
        grads = torch.autograd.grad(out.square().sum(), used, create_graph=True)
        total = sum((g * randn(*g.shape, seed=50 + i, dtype=dtype)).sum() for i, g in enumerate(grads))
        found[backend] = torch.autograd.grad(total, used)
    for got, want, plain in zip(*found.values(), strict=True):
        assert_as_good_as(got, want, plain, terms=23 * 5, inner=want.abs().max().item())


def test_forward_mode_and_transforms_take_the_reference():
    call = Call(batch=2, heads=4, kv_heads=2, rows=3, slots=5, head_dim=2, v_dim=3)
    tensors, tangents = call.tensors(torch.float64), [randn(*t.shape, seed=60).double() for t in call.tensors()]

    def run(*t):
        return attention(*t, mask=Causal())

    along = torch.func.jvp(run, tuple(tensors), tuple(tangents))[1]
    # the same derivative by reverse mode, differentiated twice: exact, and by other code
    want = torch.autograd.functional.jvp(run, tuple(tensors), tuple(tangents))[1]
    assert want.abs().max() > 0
    assert_as_good_as(along, want, terms=23, inner=want.abs().max().item())
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t, d) for t, d in zip(tensors, tangents, strict=True)]
        assert forward_ad.unpack_dual(run(*duals)).tangent.equal(along)
        with pytest.raises(UnsupportedError, match="forward-mode"):
            attention(*duals, backend="sdpa")

    grads = torch.func.grad(lambda *t: run(*t).square().sum(), argnums=(0, 1, 2))(*tensors)
    leaves = [leaf(t) for t in tensors]
    wanted = torch.autograd.grad(attention(*leaves, mask=Causal(), backend="reference").square().sum(), leaves)
    for got, want in zip(grads, wanted, strict=True):
        assert_as_good_as(got, want, terms=10, inner=1.0)

    stacked = [torch.stack([t, 2 * t, -t]) for t in tensors]
    mapped = torch.func.vmap(run)(*stacked)
    for i in range(3):
        assert_as_good_as(mapped[i], run(*(t[i] for t in stacked)), terms=5)
    with pytest.raises(UnsupportedError, match="function transforms"):
        torch.func.vmap(lambda *t: attention(*t, backend="sdpa"))(*stacked)
    hessian = torch.func.hessian(lambda v: run(tensors[0], tensors[1], v).square().sum())(tensors[2])
    assert hessian.isfinite().all() and hessian.abs().max() > 0


@BACKEND
def test_checkpointed_is_the_same(backend):
    leaves, others = ([leaf(t) for t in CALL.tensors()] for _ in range(2))
    out = attention(*leaves, mask=Causal(), backend=backend)
    again = torch.utils.checkpoint.checkpoint(
        lambda *t: attention(*t, mask=Causal(), backend=backend), *others, use_reentrant=False
    )
    assert again.equal(out)
    for a, b in zip(*(torch.autograd.grad(y.sum(), x) for y, x in ((out, leaves), (again, others))), strict=True):
        assert a.equal(b)


# --- precision


@BACKEND
@MODE
def test_scores_beyond_the_reach_of_float16(backend, mode):
    query, key, value = inputs(CALL, mode, torch.float16)
    wide = [t.detach() * 300 for t in (query, key)]
    if mode == "training":
        wide = [leaf(t) for t in wide]
    scores = torch.einsum("bhtd,bhsd->bhts", wide[0].double(), wide[1].double().repeat_interleave(5, 1))
    assert scores.abs().max() > 65504
    with MODES[mode]():
        out = attention(*wide, value, mask=Causal(), scale=1.0, backend=backend)
    seen = torch.ones(7, 11, dtype=torch.bool).tril(4)
    want = plain_attention(*(t.detach().double() for t in (*wide, value)), seen, scale=1.0)[0]
    plain = plain_attention(*(t.detach().float() for t in (*wide, value)), seen, scale=1.0)[0]
    assert_as_good_as(out, want, plain, terms=13)
    if mode == "training":
        for grad in torch.autograd.grad(out.float().sum(), (*wide, value)):
            assert not grad.isnan().any()


@BACKEND
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_autocast_casts_once_at_the_border(backend, dtype):
    tensors = CALL.tensors()
    given = {"mask": Causal(), "backend": backend}
    with torch.autocast("cpu", dtype):
        got = attention(*tensors, **given)
    assert got.dtype == dtype
    assert got.equal(attention(*(t.to(dtype) for t in tensors), **given))
    mixed = (tensors[0], tensors[1].to(dtype), tensors[2])
    with torch.autocast("cpu", dtype):
        assert attention(*mixed, **given).equal(got)
    with torch.autocast("cpu", dtype), torch.autocast("cpu", enabled=False):
        assert attention(*tensors, **given).dtype == torch.float32


def test_autocast_leaves_the_inside_of_the_reference_alone():
    # under CPU autocast a float32 matmul becomes a half-precision one
    tensors = [t.bfloat16() for t in CALL.tensors()]
    with torch.autocast("cpu", torch.bfloat16):
        got = attention(*tensors, score_mods=[Softcap(3.0)])
        weights = attention_weights(tensors[0], tensors[1])
    assert got.equal(attention(*tensors, score_mods=[Softcap(3.0)]))
    assert weights.dtype == torch.float32
    assert weights.equal(attention_weights(tensors[0], tensors[1]))


def test_the_gradient_of_a_layer_under_autocast():
    layer = MultiHeadAttention(30, 5, num_kv_heads=1, sinks=True)
    x = torch.randn(2, 7, 30)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, mask=Causal())
    out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


# --- memory


@BACKEND
@MODE
def test_strides_do_not_matter(backend, mode):
    made = CALL.tensors()
    given = {"mask": Causal(), "backend": backend}
    with MODES[mode]():
        want = attention(*(t.contiguous() for t in made), **given)
    layouts = {
        "tokens before heads": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        "size before tokens": lambda t: t.mT.contiguous().mT,
        "a slice of more": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
        "every second": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
        "tokens of more": lambda t: torch.cat([t, t, t], 2)[:, :, t.shape[2] : 2 * t.shape[2]],
    }
    for name, layout in layouts.items():
        tensors = [layout(t) for t in made]
        if mode == "training":
            base = [leaf(t) for t in made]
            tensors = [layout(t) for t in base]
        with MODES[mode]():
            got = attention(*tensors, **given)
        plain = plain_attention(*(t.detach() for t in made), torch.ones(7, 11, dtype=torch.bool).tril(4))[0]
        assert_as_good_as(got, want.double(), plain, terms=13, what=name)
        if mode == "training":
            assert all(g.isfinite().all() for g in torch.autograd.grad(got.sum(), base))


@BACKEND
@pytest.mark.parametrize("sinks", (False, True))
def test_strides_of_masks_and_biases_do_not_matter(backend, sinks):
    query, key, value = (leaf(t) for t in CALL.tensors())
    given = {"sinks": torch.zeros(15) if sinks else None, "backend": backend}
    bias, seen = randn(7, 11, seed=69), CALL.coin(7, 11)
    for make in (Bias, lambda t: Bias(t[None, None].expand(2, 15, 7, 11))):
        want = attention(query, key, value, score_mods=[make(bias)], **given)
        turned = bias.T.contiguous().T
        assert turned.stride() == (1, 7)
        assert attention(query, key, value, score_mods=[make(turned)], **given).equal(want)
    want = attention(query, key, value, mask=seen, **given)
    assert attention(query, key, value, mask=seen.T.contiguous().T, **given).equal(want)


@BACKEND
def test_expanded_inputs(backend):
    query, key, value = CALL.tensors(torch.float64)
    one = [t[:1].expand_as(t) for t in (query, key, value)]
    want = attention(*(t.contiguous() for t in one), mask=Causal(), backend=backend)
    assert_as_good_as(attention(*one, mask=Causal(), backend=backend), want, terms=13)
    small = [leaf(t[:1]) for t in (query, key, value)]
    out = attention(*(t.expand(2, -1, -1, -1) for t in small), mask=Causal(), backend=backend)
    grads = torch.autograd.grad(out.square().sum(), small)
    whole = [leaf(t.contiguous()) for t in one]
    out = attention(*whole, mask=Causal(), backend=backend)
    for got, want in zip(grads, torch.autograd.grad(out.square().sum(), whole), strict=True):
        assert_as_good_as(got, want.sum(0, keepdim=True), terms=110, inner=want.abs().max().item())


@BACKEND
@pytest.mark.parametrize("sinks", (False, True))
def test_incoming_gradients_of_any_stride(backend, sinks):
    sink = torch.zeros(15) if sinks else None
    for make in (
        lambda out: torch.ones((), dtype=out.dtype).expand_as(out),
        lambda out: randn(*out.shape, seed=70).mT.contiguous().mT,
        lambda out: randn(*out.shape, seed=71).transpose(1, 2).contiguous().transpose(1, 2),
        lambda out: randn(*out.shape[:-1], 1, seed=72).expand_as(out),
        lambda out: torch.cat([randn(*out.shape, seed=73)] * 2, -1)[..., : out.shape[-1]],
    ):
        leaves, others = ([leaf(t) for t in CALL.tensors()] for _ in range(2))
        out = attention(*leaves, mask=Causal(), sinks=sink, backend=backend)
        same = attention(*others, mask=Causal(), sinks=sink, backend=backend)
        incoming = make(out)
        grads = torch.autograd.grad(out, leaves, incoming)
        wanted = torch.autograd.grad(same, others, incoming.contiguous())
        for got, want in zip(grads, wanted, strict=True):
            assert_as_good_as(got, want.double(), want, terms=55, inner=want.abs().max().item())


@pytest.mark.parametrize("rows_at_once", (1, 2, 3, 6, 100))
def test_the_reference_in_blocks_of_queries(monkeypatch, rows_at_once):
    query, key, value = CALL.tensors(torch.float64)
    given = {
        "mask": Causal() & Padding([9, 6]),
        "score_mods": [
            Softcap(2.0),
            ALiBi(15),
            Bias(randn(7, 11, seed=80).double()),
            Bias(randn(1, 11, seed=81).double()),
        ],
        "sinks": randn(15, seed=82).double(),
        "backend": "reference",
    }
    want = attention_with_lse(query, key, value, **given)
    monkeypatch.setattr(headwise.backends.reference, "BLOCK", 2 * 15 * 11 * rows_at_once)
    ran = []
    inner = headwise.backends.reference.attend
    monkeypatch.setattr(headwise.backends.reference, "attend", lambda x, rows: ran.append(rows) or inner(x, rows))
    got = attention_with_lse(query, key, value, **given)
    assert len(ran) == -(-7 // rows_at_once)
    for a, b in zip(got, want, strict=True):
        assert_as_good_as(a, b, terms=13)
    ran.clear()
    attention(leaf(query), key, value, **given)
    assert len(ran) == 1, "where a gradient is needed it runs at once"


# --- merging


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("split", (1, 4, 10))
@pytest.mark.parametrize("sinks", (False, True))
def test_partials_merge_to_attention_over_the_union(dtype, split, sinks):
    call, grad = CALL, randn(2, 15, 7, 17, seed=90, dtype=dtype)
    sink = randn(15, seed=91, dtype=dtype) if sinks else None
    seen = call.coin(7, 11)
    seen[2, :split] = False
    seen[3, split:] = False
    seen[4] = False

    def merged(query, key, value):
        parts = []
        for side, s in ((slice(0, split), sink), (slice(split, None), None)):
            parts += attention_with_lse(
                query, key[:, :, side], value[:, :, side], mask=seen[:, side], sinks=s, backend="reference"
            )
        return merge_partials(*parts)

    leaves = [leaf(t) for t in call.tensors(dtype)]
    out, lse = merged(*leaves)
    assert out.dtype == dtype
    found = [out, lse, *torch.autograd.grad((out * grad).sum(), leaves)]
    wanted = []
    for formula, wide in ((oracle.attend, torch.float64), (plain_attention, torch.float32)):
        others = [leaf(t, wide) for t in call.tensors(dtype)]
        whole, _, total = formula(*others, seen, sinks=None if sink is None else sink.to(wide))
        wanted.append([whole, total, *torch.autograd.grad((whole * grad.to(wide)).sum(), others)])
    for got, want, plain, name in zip(found, *wanted, ("out", "lse", "query", "key", "value"), strict=True):
        # each partial output is rounded to the dtype before it is merged
        assert_as_good_as(got, want, plain, terms=55, inner=want[want.isfinite()].abs().max().item(), what=name)


def test_partials_of_other_shapes_are_refused():
    out, lse = attention_with_lse(*CALL.tensors())
    for wrong in ((out, lse, out[:, :1], lse[:, :1]), (out, lse[..., :1], out, lse), (out[..., 0], lse, out, lse)):
        with pytest.raises((ShapeError, TypeError)):
            merge_partials(*wrong)


# --- weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_are_those_of_the_output(dtype):
    query, key, value = CALL.tensors(dtype)
    sinks, seen = randn(15, seed=92, dtype=dtype), CALL.coin(2, 15, 7, 11)

    def weights(wide=dtype):
        given = {"mask": seen, "sinks": sinks.to(wide), "score_mods": [ALiBi(15)]}
        out = attention(query.to(wide), key.to(wide), value.to(wide), **given)
        return attention_weights(query.to(wide), key.to(wide), **given), out

    got, (want, out) = weights()[0], weights(torch.float64)
    assert got.dtype == torch.promote_types(dtype, torch.float32)
    assert got[~seen].eq(0).all()
    assert_as_good_as(got, want, weights(torch.float32)[0], terms=13)
    assert_as_good_as(want @ value.double().repeat_interleave(5, 1), out, terms=13)
    assert want.sum(-1).lt(1).all(), "the sink has its share"
    total = attention_weights(query.double(), key.double(), mask=seen).sum(-1)
    assert_as_good_as(total, seen.any(-1).double(), terms=11)


def test_rows_and_stages_of_weights():
    query, key, _ = CALL.tensors(torch.float64)
    mods = (Softcap(2.0), ALiBi(15))
    given = {"mask": Causal(), "score_mods": mods, "scale": 0.3}
    stages = {
        stage: attention_weights(query, key, **given, stage=stage)
        for stage in ("scores", "capped", "biased", "weights")
    }
    raw = torch.einsum("bhtd,bhsd->bhts", query, key.repeat_interleave(5, 1)) * 0.3
    assert_as_good_as(stages["scores"], raw, terms=13)
    assert_as_good_as(stages["capped"], 2 * torch.tanh(raw / 2), terms=13)
    seen = torch.ones(7, 11, dtype=torch.bool).tril(4)
    assert stages["biased"][..., ~seen].eq(-torch.inf).all() and stages["biased"][..., seen].isfinite().all()
    assert_as_good_as(stages["weights"], stages["biased"].softmax(-1), terms=11)
    for rows, want in (
        ([2, 5, 0], [2, 5, 0]),
        ([-1, -7], [6, 0]),
        ((3,), [3]),
        (slice(1, 6, 2), [1, 3, 5]),
        (torch.tensor([6, 6]), [6, 6]),
        ([], []),
        (None, list(range(7))),
    ):
        for stage, whole in stages.items():
            part = attention_weights(query, key, **given, rows=rows, stage=stage)
            assert part.shape == (2, 15, len(want), 11)
            assert part.isneginf().equal(whole[:, :, want].isneginf())
            finite = part.isfinite()
            assert_as_good_as(part[finite], whole[:, :, want][finite], terms=13)


def test_weights_can_be_differentiated():
    query, key, _ = (leaf(t) for t in CALL.tensors(torch.float64))
    weights = attention_weights(query, key, mask=Causal())
    (grad,) = torch.autograd.grad(weights.square().sum(), query)
    assert grad.abs().max() > 0


@pytest.mark.plain
def test_rows_and_stages_that_do_not_exist_are_refused():
    query, key, _ = CALL.tensors()
    for given in ({"rows": [7]}, {"rows": [-8]}, {"stage": "softmax"}, {"rows": torch.tensor([9])}):
        with pytest.raises(ShapeError):
            attention_weights(query, key, **given)


# --- the choice of a backend


def test_auto_takes_the_first_that_can():
    def chosen(**given):
        ran = []

        class Spy(Backend):
            name = "spy"

            def why_not(self, x):
                ran.append(next(b.name for b in BACKENDS if b.why_not(x) is None))

            def run(self, x):
                return x.query.new_zeros(2, 15, 7, 17), None

        attention(*CALL.tensors(), **given, backend=Spy())
        return ran[0]

    first = "sdpa" if MISSING else "native"
    assert chosen() == first
    assert chosen(score_mods=[CustomScore(lambda s, b, h, q, k: s)]) == "reference"
    assert chosen(dropout_p=0.5) == first
    assert chosen(dropout_p=0.5, query_positions=Positions(7, torch.tensor([4, 4]))) == "sdpa"
    assert chosen(dropout_p=0.5, seed=3) == ("reference" if MISSING else "native")
    assert chosen(dropout_p=0.5, seed=3, query_positions=Positions(7, torch.tensor([4, 4]))) == "reference"
    assert BACKENDS[-1].name == "reference"


def test_a_backend_of_your_own():
    class Mean(Backend):
        name = "mean"

        def why_not(self, x):
            return "it knows no mask" if not isinstance(x.mask, Full) else None

        def run(self, x: Inputs):
            return x.value.mean(2, keepdim=True).repeat_interleave(5, 1).expand(2, 15, 7, 17), None

    query, key, value = CALL.tensors()
    got = attention(query, key, value, backend=Mean())
    assert got[:, ::5, 0].equal(value.mean(2))
    with pytest.raises(UnsupportedError, match="it knows no mask"):
        attention(query, key, value, mask=Causal(), backend=Mean())


def test_the_reference_says_when_training_on_it_hurts(monkeypatch):
    monkeypatch.setattr(functional, "LARGE", 2 * 15 * 7 * 11)
    monkeypatch.setattr(functional, "_warned", set())
    tensors, mods = CALL.tensors(), [CustomScore(lambda score, b, h, q, k: score)]
    attention(*tensors, score_mods=mods)  # no gradient
    leaves = [leaf(t) for t in tensors]
    attention(*leaves)  # another backend
    attention(*leaves, score_mods=mods, backend="reference")  # asked for
    with pytest.warns(UserWarning, match=r"holds all 2,310 scores at once.*cannot modify scores \(CustomScore\)"):
        attention(*leaves, score_mods=mods)
    attention(*leaves, score_mods=mods)  # once
    monkeypatch.setattr(functional, "LARGE", 2 * 15 * 7 * 11 + 1)
    monkeypatch.setattr(functional, "_warned", set())
    attention(*leaves, score_mods=mods)


@BACKEND
def test_scale(backend):
    query, key, value = CALL.tensors(torch.float64)
    for scale in (0.3, 1.0, 0.0, -2.0):
        got = attention(query, key, value, scale=scale, backend=backend)
        assert_as_good_as(got, plain_attention(query, key, value, scale=scale)[0], terms=13)
    default = attention(query, key, value, backend=backend)
    assert default.equal(attention(query, key, value, scale=13**-0.5, backend=backend))


@BACKEND
@MODE
def test_the_same_numbers_in_every_mode(backend, mode):
    for mask in (Full(), Causal(), Causal() & Window(3), Padding([8, 5]), Dense(CALL.coin(7, 11))):
        with MODES[mode]():
            got = attention(*inputs(CALL, mode), mask=mask, backend=backend)
        want = attention(*CALL.tensors(torch.float64), mask=mask, backend="reference")
        plain = attention(*CALL.tensors(), mask=mask, backend="reference")
        assert_as_good_as(got, want, plain, terms=13)


@BACKEND
def test_inputs_are_left_as_they_are(backend):
    tensors = CALL.tensors()
    before = [t.clone() for t in tensors]
    sinks = torch.zeros(15)
    attention(*tensors, mask=Causal() & Padding([3, 4]), sinks=sinks, backend=backend)
    assert all(t.equal(b) for t, b in zip(tensors, before, strict=True)) and sinks.eq(0).all()


UNSEEN = {
    "padded away": (Padding([3, 0]), 7, 7),
    "nothing at all": (~Full(), 7, 7),
    "before every key": (Causal(), 7, 3),
    "left of the padding": (Padding(left=5) & Causal(), 7, 7),
    "out of the window": (Window(2) & Prefix(2), 7, 7),
}


@pytest.mark.parametrize("case", UNSEEN)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_what_a_query_that_sees_nothing_holds_does_not_matter(backend, sinks, case):
    mask, rows, slots = UNSEEN[case]
    q, k, v = (leaf(randn(2, heads, n, 4)) for heads, n in ((6, rows), (3, slots), (3, slots)))
    sink = leaf(randn(6)) if sinks else None
    at, keys = Positions(rows, start=slots - rows), Positions(slots)
    dead = ~evaluate(mask.bind(2, 6, at, keys), 2, 6, at, keys).any(-1).expand(2, 6, rows)
    assert dead.any()
    broken = q.detach().masked_fill(dead[..., None], torch.nan).requires_grad_()
    clean = attention(q, k, v, mask=mask, sinks=sink, backend=backend)
    found = attention(broken, k, v, mask=mask, sinks=sink, backend=backend)
    assert torch.equal(found, clean)
    assert (found[dead] == 0).all()
    leaves = [k, v] + ([sink] if sinks else [])
    wanted = torch.autograd.grad(clean.square().sum(), [q, *leaves])
    grads = torch.autograd.grad(found.square().sum(), [broken, *leaves])  # raises where one is None
    for a, b in zip(grads, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("where", ["sinks", "bias"])
def test_forward_mode_through_what_is_no_query(where):
    q, k, v = randn(1, 3, 5, 2), randn(1, 3, 7, 2), randn(1, 3, 7, 2)
    point, step = (randn(3), randn(3)) if where == "sinks" else (randn(5, 7), randn(5, 7))

    def run(x, backend="auto"):
        extra = {"sinks": x} if where == "sinks" else {"score_mods": [Bias(x)]}
        return attention(q, k, v, backend=backend, **extra)

    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(run(forward_ad.make_dual(point, step))).tangent
        with pytest.raises(UnsupportedError, match="no forward-mode derivative"):
            run(forward_ad.make_dual(point, step), "sdpa")
    assert found is not None
    q, k, v = q.double(), k.double(), v.double()
    there = (run(point.double() + 1e-6 * step.double()) - run(point.double() - 1e-6 * step.double())) / 2e-6
    assert_as_good_as(found, there, found, terms=7, inner=there.abs().max().item())
