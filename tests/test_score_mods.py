"""Score modifications one by one; with everything else they are in test_backends.py."""

import copy
import math

import pytest
import torch
from cases import BACKEND_NAMES, SCORE_MODS, SHAPES, Call, alibi_slopes
from helpers import assert_as_good_as, assert_published, leaf, randn
from torch import nn

from headwise import (
    ALiBi,
    Bias,
    Causal,
    CustomScore,
    MultiHeadAttention,
    Positions,
    ScoreMod,
    ShapeError,
    Softcap,
    attention,
    attention_weights,
)


def modified(mods, scores, call):
    """Modify scores as a call does, apart from softmax."""
    query, key, _ = call.tensors()
    one = torch.ones((), dtype=scores.dtype)
    # a dot product of one, so that scale times it is the score; then the modifications see the scores themselves
    del query, key, one
    b = torch.arange(call.batch)[:, None, None, None]
    h = torch.arange(call.heads)[None, :, None, None]
    for mod in mods:
        if mod.over == "slots":
            q, k = torch.arange(call.rows), torch.arange(call.slots)
        else:
            q, k = call.queries.index("cpu")[0], call.keys.index("cpu")[0]
        scores = mod(scores, b, h, q[None, None, :, None], k[None, None, None, :])
    return scores


@pytest.mark.parametrize("case", SCORE_MODS, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
def test_forward_is_the_formula(case, dtype):
    for call in (SHAPES["gqa"], SHAPES["more queries"], Call(rows=5, slots=7, query_start=20, key_start=3)):
        scores = randn(call.batch, call.heads, call.rows, call.slots, seed=30, dtype=dtype, scale=3.0)
        mods = case.make(call, dtype)
        trained = [p.detach() for mod in mods for p in mod.parameters()]
        want = case.apply(call, scores.double(), [t.double() for t in trained])
        plain = case.apply(call, scores.float(), [t.float() for t in trained])
        hidden = want.isneginf()
        got = modified(mods, scores, call)
        assert got.isneginf().equal(hidden)
        assert_as_good_as(
            got.masked_fill(hidden, 0), want.masked_fill(hidden, 0), plain.masked_fill(hidden, 0), terms=1
        )


@pytest.mark.parametrize("case", SCORE_MODS, ids=lambda case: case.name)
def test_what_a_modification_amounts_to_is_what_it_does(case):
    call = SHAPES["gqa"]
    scores = randn(call.batch, call.heads, call.rows, call.slots, seed=31, dtype=torch.float64)
    for mod in case.make(call, torch.float64):
        low = mod.lowered()
        if low is None:
            assert isinstance(mod, CustomScore)
            continue
        if low.kind == "softcap":
            want = low.values * torch.tanh(scores / low.values)
        elif low.kind == "slopes":
            distance = (call.queries.index("cpu")[0][:, None] - call.keys.index("cpu")[0]).abs()
            want = scores - low.values[:, None, None].double() * distance
        elif low.kind == "table":
            far = low.values.shape[1] // 2
            distance = call.keys.index("cpu")[0] - call.queries.index("cpu")[0][:, None]
            want = scores + low.values.double()[:, far + distance.clamp(-far, far)]
        else:
            want = scores + low.values.double()
        got = modified([mod], scores, call)
        assert got.isneginf().equal(want.isneginf())
        finite = ~want.isneginf()
        # slopes are handed over in float32
        plain = want.float()[finite]
        assert_as_good_as(got[finite].float(), want[finite], plain, terms=1)


def test_alibi_slopes_are_those_printed():
    source = "Press et al. 2021, section 3: for 8 heads 1/2, 1/2^2 ... 1/2^8; for 16 the square roots between"
    assert_published(ALiBi(8).slopes, [2.0**-i for i in range(1, 9)], rtol=0, atol=0, source=source)
    assert_published(ALiBi(16).slopes, [2.0 ** (-i / 2) for i in range(1, 17)], rtol=1e-6, atol=0, source=source)
    for heads in (1, 3, 6, 12, 15, 20, 71):
        assert len(set(ALiBi(heads).slopes.tolist())) == heads
        want = torch.tensor(alibi_slopes(heads), dtype=torch.float64)
        assert_as_good_as(ALiBi(heads).slopes, want, want.float(), terms=1)


def test_alibi_of_a_half_precision_layer_is_not_rounded():
    # a slope that is off by 2^-9 is off by 8 in the score at a distance of 4096
    mod = ALiBi(15).to(torch.bfloat16)
    q, k, zero = torch.tensor([[[[4096]]]]), torch.zeros(1, 1, 1, 1).long(), torch.zeros(1, 1, 1, 1).long()
    got = mod(torch.zeros(1, 15, 1, 1), zero, torch.arange(15)[None, :, None, None], q, k).flatten()
    want = -4096 * torch.tensor(alibi_slopes(15), dtype=torch.float64)
    assert_as_good_as(got, want, want.float(), terms=1)


def test_alibi_counts_distance_on_both_sides():
    mod = ALiBi(1, torch.ones(1))
    q = torch.tensor([5])[None, None, :, None]
    k = torch.arange(11)[None, None, None, :]
    zero = torch.zeros(1, 1, 1, 1).long()
    assert mod(torch.zeros(1, 1, 1, 11), zero, zero, q, k).flatten().tolist() == [-abs(5 - i) for i in range(11)]


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_modifications_see_positions_and_masks_see_indices(backend):
    # the second document of a row starts at position 0 again; distances stay, but what reads q itself changes
    call = Call(batch=1, heads=2, kv_heads=1, rows=5, slots=5)
    query, key, value = call.tensors()
    given = {"mask": Causal(), "score_mods": [ALiBi(2)], "backend": backend}
    shifted = Positions(5, start=0, offset=100)
    out = attention(query, key, value, **given)
    assert attention(query, key, value, **given, query_positions=shifted, key_positions=shifted).equal(out)
    moved = attention(query, key, value, **given, query_positions=shifted, key_positions=Positions(5))
    assert not moved.equal(out)
    seen = []

    def spy(score, b, h, q, k):
        seen.append((q.flatten().tolist(), k.flatten().tolist()))
        return score

    attention(query, key, value, score_mods=[CustomScore(spy)], query_positions=shifted, key_positions=Positions(5))
    assert seen == [([100, 101, 102, 103, 104], [0, 1, 2, 3, 4])]


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("shape", ((7, 11), (1, 11), (7, 1), (2, 1, 1, 11), (1, 15, 7, 11), (1, 15, 1, 1)))
def test_a_bias_broadcasts(backend, shape):
    call = SHAPES["gqa"]
    query, key, value = call.tensors(torch.float64)
    bias = randn(*shape, seed=32, dtype=torch.float64)
    got = attention(query, key, value, score_mods=[Bias(bias)], backend=backend)
    whole = bias.expand(2, 15, 7, 11).clone()
    assert got.equal(attention(query, key, value, score_mods=[Bias(whole)], backend=backend))


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_the_gradient_of_a_bias_is_summed_over_what_it_broadcasts(backend):
    call = SHAPES["gqa"]
    tensors = call.tensors(torch.float64)
    small = nn.Parameter(randn(1, 15, 7, 1, seed=33, dtype=torch.float64))
    whole = nn.Parameter(small.detach().expand(2, 15, 7, 11).clone())
    for values in (small, whole):
        out = attention(*tensors, score_mods=[Bias(values), Bias(randn(7, 11, seed=34).double())], backend=backend)
        out.square().sum().backward()
    want = whole.grad.sum((0, 3), keepdim=True)
    assert_as_good_as(small.grad, want, terms=22, inner=whole.grad.square().sum((0, 3)).max().sqrt().item())


def test_a_bias_is_trained_only_as_a_parameter():
    assert [n for n, _ in Bias(nn.Parameter(torch.zeros(2, 3))).named_parameters()] == ["values"]
    held = Bias(torch.zeros(2, 3))
    assert not list(held.parameters()) and not held.state_dict()
    layer = MultiHeadAttention(6, 2, score_mods=[Bias(nn.Parameter(torch.zeros(1, 2, 5, 5)))])
    assert "score_mods.0.values" in layer.state_dict()
    layer(torch.randn(3, 5, 6)).sum().backward()
    assert layer.score_mods[0].values.grad is not None


def test_a_bias_given_as_a_tensor_with_a_graph_passes_its_gradient():
    table = leaf(randn(13, seed=35), torch.float64)
    distance = torch.arange(7)[:, None] - torch.arange(7)[None, :] + 6
    call = SHAPES["square"]
    names = [name for name in BACKEND_NAMES if name != "native"]  # it has no float64
    for backend in names:
        query, key, value = (t[..., :7, :] for t in call.tensors(torch.float64))
        out = attention(query, key, value, score_mods=[Bias(table[distance])], backend=backend)
        (grad,) = torch.autograd.grad(out.square().sum(), table)
        if backend == names[0]:
            first = grad
    assert_as_good_as(grad, first, terms=49, inner=1.0)
    assert first.abs().min() > 0


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_minus_infinity_in_a_bias_hides_a_key_as_a_mask_does(backend):
    call = SHAPES["gqa"]
    query, key, value = call.tensors(torch.float64)
    seen = call.coin(7, 11)
    seen[3] = False
    bias = torch.zeros(7, 11, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    leaves, others = [leaf(t) for t in (query, key, value)], [leaf(t) for t in (query, key, value)]
    got = attention(*leaves, score_mods=[Bias(bias)], backend=backend)
    want = attention(*others, mask=seen, backend=backend)
    assert got[:, :, 3].eq(0).all()
    grads = torch.autograd.grad(got.square().sum(), leaves)
    wanted = torch.autograd.grad(want.square().sum(), others)
    for a, b in zip((got, *grads), (want, *wanted), strict=True):
        assert_as_good_as(a, b, terms=55, inner=1.0)


def test_the_order_given_is_the_order_taken():
    call = SHAPES["mha"]
    query, key, _ = call.tensors(torch.float64)
    double, add = CustomScore(lambda s, b, h, q, k: 2 * s), CustomScore(lambda s, b, h, q, k: s + 1)
    raw = attention_weights(query, key, stage="scores")
    for mods, want in (((double, add), 2 * raw + 1), ((add, double), 2 * (raw + 1))):
        assert attention_weights(query, key, score_mods=mods, stage="biased").equal(want)
    capped = attention_weights(query, key, score_mods=(double, Softcap(1.0), add), stage="capped")
    assert capped.equal(torch.tanh(2 * raw))
    assert attention_weights(query, key, score_mods=(double, add), stage="capped").equal(raw)


def test_layers_own_modifications_come_first():
    layer = MultiHeadAttention(6, 2, score_mods=[Softcap(0.5)]).double()
    x = torch.randn(1, 5, 6, dtype=torch.float64)
    add = CustomScore(lambda s, b, h, q, k: s + q)
    both = MultiHeadAttention(6, 2, score_mods=[Softcap(0.5), add]).double()
    both.load_state_dict(layer.state_dict())
    assert layer(x, score_mods=[add]).equal(both(x))


def test_a_subclass_is_a_modification():
    class Temperature(ScoreMod):
        def __init__(self, heads):
            super().__init__()
            self.by = nn.Parameter(torch.ones(heads))

        def forward(self, score, b, h, q, k):
            return score * self.by[h]

    mod = Temperature(2)
    layer = MultiHeadAttention(6, 2, score_mods=[mod])
    x = torch.randn(1, 5, 6)
    plain = MultiHeadAttention(6, 2, backend="reference")
    plain.load_state_dict(layer.state_dict(), strict=False)
    assert layer(x).equal(plain(x))
    layer(x).square().sum().backward()
    assert mod.by.grad.abs().min() > 0
    with pytest.raises(NotImplementedError):
        attention(*Call(heads=3).tensors(), score_mods=[type("Empty", (ScoreMod,), {})()])


@pytest.mark.parametrize("case", SCORE_MODS, ids=lambda case: case.name)
def test_copies_do_the_same(case):
    call = SHAPES["gqa"]
    mods = case.make(call, torch.float32)
    tensors = call.tensors()
    assert attention(*tensors, score_mods=copy.deepcopy(mods)).equal(attention(*tensors, score_mods=mods))
    assert all(repr(mod) for mod in mods)


@pytest.mark.plain
def test_what_makes_no_modification_is_refused():
    wrong = (
        lambda: Softcap(0),
        lambda: Softcap(-1.0),
        lambda: Softcap(math.inf),
        lambda: ALiBi(0),
        lambda: ALiBi(3, torch.ones(4)),
        lambda: Bias(torch.ones(3, 3, dtype=torch.int64)),
        lambda: Bias(torch.ones(2, 3, 3)),
        lambda: CustomScore(3),
        lambda: attention(*SHAPES["gqa"].tensors(), score_mods=[Bias(torch.ones(7, 10))]),
        lambda: attention(*SHAPES["gqa"].tensors(), score_mods=[ALiBi(14)]),
        lambda: attention(*SHAPES["gqa"].tensors(), score_mods=[lambda s, b, h, q, k: s]),
    )
    for call in wrong:
        with pytest.raises(ShapeError):
            call()


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_slopes_that_are_trained(backend):
    slopes = nn.Parameter(torch.tensor([0.5, 2.0]))
    mod = ALiBi(2, slopes)
    assert list(mod.parameters()) == [slopes] and list(mod.state_dict()) == ["own_slopes"]
    assert not list(ALiBi(2, slopes.detach()).parameters())
    query, key, value = (randn(1, 2, 5, 4, seed=seed) for seed in range(3))  # only the slopes are trained
    out = attention(query, key, value, score_mods=[mod], backend=backend)
    (grad,) = torch.autograd.grad(out.square().sum(), slopes)
    away, found = (torch.arange(5)[:, None] - torch.arange(5)).abs(), []
    for dtype in (torch.float64, torch.float32):
        own = leaf(slopes, dtype)
        scores = query.to(dtype) @ key.to(dtype).mT / 2 - own[:, None, None] * away
        found += torch.autograd.grad((scores.softmax(-1) @ value.to(dtype)).square().sum(), own)
    assert_as_good_as(grad, *found, terms=5 * 5 * 4)
