"""HDS: heads, groups of heads, the scale, soft caps and sinks."""

import math

import oracle
import pytest
import torch
from helpers import assert_as_good_as, leaf, plain_attention, randn
from reports import (
    ALL,
    assert_probe,
    check,
    check_layer,
    each_backend,
    every_backend,
    every_mode,
    layer,
    probe,
    running,
)

from headwise import (
    Bias,
    Causal,
    Dense,
    MultiHeadAttention,
    ShapeError,
    Softcap,
    UnsupportedError,
    Window,
    attention,
    attention_weights,
    attention_with_lse,
)

# without the annotation hook: wrong sizes must meet headwise's own errors
pytestmark = pytest.mark.plain

# sdpa cannot cap, and says so
CAPPING = [name for name in ALL if name != "sdpa"]


def identity(embed_dim, num_heads, **how):
    """A layer whose projections change nothing."""
    made = MultiHeadAttention(embed_dim, num_heads, bias=False, **how)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.eye(embed_dim))
    return made


@every_backend
@every_mode
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_hds_1_a_head_mixes_no_tokens(heads, mode, backend):
    """Heads split or merged by a reshape without the transpose: the shapes are right, the tokens mixed."""
    made = identity(8, heads, backend=backend)
    own, x = Dense(torch.eye(4, dtype=torch.bool)), torch.arange(4.0)[:, None].expand(4, 8)
    with running(mode, made):
        for mask in (own, Window(1)):
            assert torch.equal(made(x, mask=mask), x)
        numbered = torch.arange(32.0).reshape(1, 4, 8)
        assert torch.equal(made(numbered, mask=own), numbered)
        shuffled = numbered[:, [0, 3, 1, 2]]
        assert torch.equal(made(numbered, numbered, shuffled, mask=own)[:, 0], numbered[:, 0])


@every_backend
def test_hds_2_the_scale_is_that_of_a_head(backend):
    """It was taken from the width of the model, or of the values."""
    made, x = layer(64, 4, backend=backend), randn(2, 5, 64, seed=50)
    check_layer(made, made(x), x, scale=16**-0.5)
    made = layer(64, 4, v_head_dim=9, head_dim=6, backend=backend)
    check_layer(made, made(x), x, scale=6**-0.5)
    query, key = randn(2, 4, 5, 7), randn(2, 2, 3, 7, seed=1)
    for width in (1, 2, 64):
        value = randn(2, 2, 3, width, seed=2)
        check(backend, query, key, value, same={"scale": 7**-0.5})


@every_backend
@pytest.mark.parametrize("scale", [None, 0.0, -0.3, 2])
def test_hds_3_a_scale_of_0_is_a_scale(scale, backend):
    """0 stood for the default in one place, so that scores vanished; a negative one is kept as well."""
    query, key, value = randn(2, 4, 5, 7), randn(2, 2, 3, 7, seed=1), randn(2, 2, 3, 6, seed=2)
    check(backend, query, key, value, same={"scale": 7**-0.5 if scale is None else scale}, scale=scale)
    made, x = layer(12, 3, scale=scale, backend=backend), randn(2, 5, 12, seed=50)
    check_layer(made, made(x), x, scale=4**-0.5 if scale is None else scale)
    if scale == 0:
        value = torch.arange(3.0)[:, None].expand(2, 2, 3, 1)
        assert_probe(attention(query, key, value, scale=scale, backend=backend)[..., 0], [1.0] * 5)


@pytest.mark.parametrize("backend", CAPPING)
def test_hds_4_the_cap_comes_before_the_mask(backend):
    """After it, a cap turns -inf into -cap, and hidden keys get weight."""
    query, key, value = (randn(1, 2, 4, 5, seed=i) for i in range(3))
    past = torch.ones(4, 4, dtype=torch.bool).tril()
    bias = randn(4, 4, seed=3)
    hiding = bias.masked_fill(~past, -torch.inf)
    check(backend, query, key, value, past, mask=Causal(), score_mods=[Softcap(2.0)], same={"softcap": 2.0})
    for mods, mask in (([Softcap(2.0), Bias(bias)], Causal()), ([Softcap(2.0), Bias(hiding)], Window(4))):
        same = {"softcap": 2.0, "bias": bias}
        check(backend, query, key, value, past, mask=mask, score_mods=mods, same=same)
        weights = attention_weights(query, key, mask=mask, score_mods=mods)
        assert (weights.masked_select(~past) == 0).all()
    # a bias of -inf hides its keys even from a cap that comes after it
    out = attention(query, key, value, score_mods=[Bias(hiding), Softcap(2.0)], backend=backend)
    assert torch.equal(out[:, :, 0], value[:, :, 0])
    assert_probe(probe(4, 4, mask=Causal(), score_mods=[Softcap(2.0)], backend=backend), [0, 0.5, 1, 1.5])


@pytest.mark.parametrize("backend", CAPPING)
@every_mode
def test_hds_5_no_route_drops_the_cap(mode, backend):
    """The fused route did, silently. Here a backend that has none says so, and with it no other is taken."""
    query, key, value = randn(2, 4, 5, 7, scale=6.0), randn(2, 2, 3, 7, seed=1, scale=6.0), randn(2, 2, 3, 6, seed=2)
    largest = (query.unflatten(1, (2, 2)) @ key[:, :, None].mT).abs().max() * 7**-0.5
    assert largest > 30
    want, weights, _ = oracle.attend(query, key, value, softcap=5.0)
    plain = plain_attention(query, key, value, modify=lambda s: 5 * torch.tanh(s / 5))
    with running(mode):
        out = attention(query.requires_grad_(), key, value, score_mods=[Softcap(5.0)], backend=backend)
        got = attention_weights(query, key, score_mods=[Softcap(5.0)])
    assert_as_good_as(out, want, plain[0], terms=10)
    assert_as_good_as(got, weights, plain[1], terms=10)
    with pytest.raises(UnsupportedError, match=r"it cannot modify scores \(Softcap\)"):
        attention(query, key, value, score_mods=[Softcap(5.0)], backend="sdpa")


@every_backend
@pytest.mark.parametrize(("sink", "each"), [(0.0, 1 / 4), (math.log(3.0), 1 / 6), (-math.inf, 1 / 3)])
def test_hds_6_a_sink_is_in_the_denominator_alone(sink, each, backend):
    """It was put inside the scores, or through a sigmoid."""
    sinks = torch.tensor([sink, sink])
    zeros, ones = torch.zeros(1, 2, 4, 5), torch.ones(1, 1, 3, 1)
    weights = attention_weights(zeros, zeros[:, :1, :3], sinks=sinks)
    assert_as_good_as(weights, torch.full((1, 2, 4, 3), each, dtype=torch.float64), terms=4)
    with torch.no_grad():
        out, lse = attention_with_lse(zeros, zeros[:, :1, :3], ones, sinks=sinks, backend=backend)
    assert_as_good_as(out, torch.full((1, 2, 4, 1), 3 * each, dtype=torch.float64), terms=4)
    assert_as_good_as(lse, torch.full((1, 2, 4), math.log(3 + math.exp(sink)), dtype=torch.float64), terms=4)
    out = attention(zeros.requires_grad_(), zeros[:, :1, :3], ones, sinks=torch.full((2,), 20.0), backend=backend)
    want = oracle.attend(zeros.detach(), zeros[:, :1, :3].detach(), ones, sinks=torch.full((2,), 20.0))[0]
    assert_as_good_as(out, want, terms=4)
    assert (out > 0).all() and (out < 1e-8).all()


@each_backend
def test_hds_6_the_gradient_of_a_sink(backend):
    """Its weight times what the output loses by it, -(sum over rows of p_sink · (g · out)); and by autograd."""
    query = leaf(randn(2, 4, 5, 7), torch.float64)
    key, value = leaf(randn(2, 2, 3, 7, seed=1), torch.float64), leaf(randn(2, 2, 3, 6, seed=2), torch.float64)
    sinks = leaf(randn(4, seed=3), torch.float64)
    grad = randn(2, 4, 5, 6, seed=4, dtype=torch.float64)
    out = attention(query, key, value, sinks=sinks, backend=backend)
    out.backward(grad)
    want, _, lse = oracle.attend(query, key, value, sinks=sinks)
    p_sink = (sinks[:, None] - lse).exp()
    formula = -(p_sink * (grad * want).sum(-1)).sum((0, 2)).detach()
    mine = sinks.grad.clone()
    sinks.grad = None
    want.backward(grad)
    assert_as_good_as(mine, sinks.grad, terms=40, inner=1.0)
    assert_as_good_as(mine, formula, terms=40, inner=1.0)


@every_backend
def test_hds_7_heads_that_cannot_be_shared(backend):
    """Key and value heads that differ, or none at all, were accepted."""

    def call(heads, key_heads, value_heads):
        query, key = torch.ones(1, heads, 5, 7), torch.ones(1, key_heads, 3, 7)
        return attention(query, key, torch.ones(1, value_heads, 3, 6), backend=backend)

    with pytest.raises(ShapeError, match=r"^4 query heads cannot share 3 key heads evenly\.$"):
        call(4, 3, 3)
    with pytest.raises(ShapeError, match="2 key heads and 4 value heads differ"):
        call(4, 2, 4)
    with pytest.raises(ShapeError, match=r"^4 query heads cannot share 0 key heads evenly\.$"):
        call(4, 0, 0)
    with pytest.raises(ShapeError, match=r"^2 query heads cannot share 4 key heads evenly\.$"):
        call(2, 4, 4)
    for heads, kv_heads in ((4, 3), (4, 8)):
        with pytest.raises(ShapeError, match=rf"^{heads} query heads cannot share {kv_heads} key heads evenly\.$"):
            MultiHeadAttention(8, heads, num_kv_heads=kv_heads)


@every_backend
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 1), (6, 2), (6, 3), (6, 6)])
def test_hds_query_heads_share_key_heads_in_blocks(heads, kv_heads, backend):
    """The kind behind the grouped entries: query head h reads key head h // (H / K), one query or many."""
    for rows in (1, 2, 19):
        value = torch.arange(float(kv_heads))[:, None, None].expand(1, kv_heads, 3, 2)
        got = attention(torch.zeros(1, heads, rows, 4), torch.ones(1, kv_heads, 3, 4), value, backend=backend)
        group = heads // kv_heads
        want = torch.tensor([float(h // group) for h in range(heads)]).double()[None, :, None, None]
        assert_as_good_as(got, want.expand(1, heads, rows, 2), terms=3)
    query, key, value = randn(2, heads, 5, 7), randn(2, kv_heads, 3, 7, seed=1), randn(2, kv_heads, 3, 6, seed=2)
    check(backend, query, key, value, torch.ones(5, 3, dtype=torch.bool).tril(-2), mask=Causal())
