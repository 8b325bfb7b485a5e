"""FMR: rows without keys, and numbers that are not numbers."""

import pytest
import torch
from helpers import assert_as_good_as, leaf, randn
from reports import (
    assert_probe,
    check,
    check_layer,
    each_backend,
    every_backend,
    every_mode,
    layer,
    probe,
    running,
    with_and_without_gradients,
)

from headwise import (
    Bias,
    Causal,
    Chunk,
    Dense,
    Document,
    Full,
    Padding,
    PerHead,
    Positions,
    Window,
    attention,
    attention_weights,
    attention_with_lse,
)
from headwise.convert.torch import from_torch_masks

# without the annotation hook: wrong masks must meet headwise's own errors
pytestmark = pytest.mark.plain

NAN, INF = torch.nan, torch.inf

# Ways in which the queries of a call of 5 queries and 7 keys see nothing, and which of them do.
DEAD = {
    "nothing": (lambda: ~Full(), [0, 1, 2, 3, 4]),
    "padding of a whole row": (lambda: Padding([0, 0]), [0, 1, 2, 3, 4]),
    "boolean padding": (lambda: Padding(torch.zeros(2, 7, dtype=torch.bool)), [0, 1, 2, 3, 4]),
    "causal and left padding": (lambda: Causal() & Padding(left=5), [0, 1, 2]),
    "window and padding": (lambda: Window(2) & Padding(3), [2, 3, 4]),
    "dense row": (lambda: Dense(torch.tensor([1, 0, 1, 0, 1]).bool()[:, None]), [1, 3]),
    "documents": (lambda: Document(torch.tensor([1, 2, 2, 1, 3]), torch.tensor([1] * 7)), [1, 2, 4]),
    "chunks": (lambda: Causal() & Chunk(3) & Padding(3), [1, 2, 3, 4]),
    "all heads": (lambda: PerHead((~Full(), Window(1) & Padding(4), ~Full(), ~Full())), [2, 3, 4]),
}


def given(dtype=torch.float32):
    return (
        randn(2, 4, 5, 3, dtype=dtype),
        randn(2, 2, 7, 3, seed=1, dtype=dtype),
        randn(2, 2, 7, 2, seed=2, dtype=dtype),
    )


@each_backend
@with_and_without_gradients
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dead", DEAD)
def test_fmr_a_row_without_keys_is_zero_everywhere(dead, dtype, mode, backend):
    """The kind behind FMR-1 to FMR-4 and FMR-7: 0/0, or the mean of the values, in a row that may see nothing."""
    make, rows = DEAD[dead]
    query, key, value = (leaf(t) for t in given(dtype))
    with running(mode):
        out = attention(query, key, value, mask=make(), backend=backend)
    assert (out[:, :, rows] == 0).all() and out.isfinite().all()
    if mode == "train":
        out.sum().backward()
        assert (query.grad[:, :, rows] == 0).all()
        assert all(t.grad.isfinite().all() for t in (query, key, value))
    with torch.no_grad():
        assert (attention_weights(query, key, value, mask=make(), rows=rows) == 0).all()
        lse = attention_with_lse(query, key, value, mask=make(), backend=backend)[1]
    assert (lse[:, :, rows] == -INF).all()


@every_backend
@pytest.mark.parametrize("weights", [False, True], ids=["no weights", "weights"])
def test_fmr_1_a_padded_sample_spoils_no_gradient(weights, backend):
    """One sample that is all padding turned every gradient into NaN, those of the other sample too."""
    made = layer(8, 2, backend=backend)
    seen = []
    if weights:
        made.observer = lambda x, out, lse: seen.append(attention_weights(x.query, x.key, mask=x.mask))
    x = leaf(randn(2, 4, 8, seed=50))
    padded = torch.tensor([[False] * 4, [True] * 4])
    mask, _ = from_torch_masks(key_padding_mask=padded)
    out = made(x, mask=mask)
    assert torch.equal(out[1], made.out_proj.bias.expand(4, 8))
    out[0].sum().backward()
    together = {name: p.grad.clone() for name, p in made.named_parameters()}
    assert all(g.isfinite().all() for g in together.values()) and x.grad.isfinite().all()
    assert (x.grad[1] == 0).all()
    if weights:
        assert (seen[0][1] == 0).all()
        assert_as_good_as(seen[0][0].sum(-1), torch.ones(2, 4, dtype=torch.float64), terms=4)

    made.zero_grad()
    alone = leaf(x[:1])
    made(alone).sum().backward()
    for name, parameter in made.named_parameters():
        size = together[name].abs().max().item()
        assert_as_good_as(together[name], parameter.grad.double(), terms=2 * 4 * 8, inner=size, what=name)
    assert_as_good_as(x.grad[:1], alone.grad.double(), terms=2 * 4 * 8, inner=alone.grad.abs().max().item())


@every_backend
@every_mode
def test_fmr_2_the_mode_changes_nothing(mode, backend):
    """The inference path gave NaN in rows where the ordinary path gave zeros."""
    made = layer(16, 4, backend=backend)
    x = randn(1, 8, 16, seed=50)
    place = torch.arange(8)
    band = (place[:, None] - place).abs() > 2
    padded = (place >= 3)[None]
    mask, mods = from_torch_masks(band, padded)
    with running(mode, made):
        out = made(x, mask=mask, score_mods=mods)
    check_layer(made, out, x, allowed=~band & ~padded[:, None, None])
    assert torch.equal(out[0, 5:], made.out_proj.bias.expand(3, 16))

    x = randn(2, 8, 16, seed=51)
    padded = torch.tensor([[False] * 8, [True] * 8])
    with running(mode, made):
        out = made(x, mask=from_torch_masks(key_padding_mask=padded)[0])
    check_layer(made, out, x, allowed=~padded[:, None, None])
    assert torch.equal(out[1], made.out_proj.bias.expand(8, 16))


@every_backend
def test_fmr_3_a_padded_query_row_is_zero(backend):
    """Query rows that a mask blocks wholly gave NaN, where a large negative number gave something."""
    query, key, value = randn(1, 2, 6, 8), randn(1, 2, 10, 8, seed=1), randn(1, 2, 10, 8, seed=2)
    allowed = torch.ones(6, 10, dtype=torch.bool).tril()
    allowed[-1] = False
    check(backend, query, key, value, allowed, same={"scale": 0.125}, mask=allowed, scale=0.125)

    bias = torch.nn.Parameter(torch.zeros(6, 10).masked_fill(~allowed, -INF))
    q, k, v = (leaf(t) for t in (query, key, value))
    out = attention(q, k, v, score_mods=[Bias(bias)], scale=0.125, backend=backend)
    assert (out[:, :, -1] == 0).all()
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v, bias))
    assert (bias.grad[-1] == 0).all() and (bias.grad[~allowed] == 0).all()


@every_backend
def test_fmr_4_a_dead_row_is_not_the_mean_of_the_values(backend):
    """A finite stand-in for -inf cancels in the softmax, and the row becomes the mean of all values."""
    got = probe(5, 5, mask=Causal() & Padding(left=2), backend=backend)
    assert_probe(got, [0, 0, 2, 2.5, 3])
    only_row_1 = torch.ones(5, 5, dtype=torch.bool)
    only_row_1[1] = False
    assert_probe(probe(5, 5, mask=Causal() & Dense(only_row_1), backend=backend), [0, 0, 1, 1.5, 2])


# How key 2 of 4 is hidden from all 3 queries.
HIDDEN = {
    "dense": {"mask": torch.tensor([[True, True, False, True]])},
    "boolean padding": {"mask": Padding(torch.tensor([[True, True, False, True]]))},
    "bias": {"score_mods": [Bias(torch.tensor([[0.0, 0.0, -INF, 0.0]]))]},
    "per head": {"mask": PerHead((Padding(2), Padding(2) | Padding(left=3)))},
    "documents": {"mask": Document(torch.zeros(3).long(), torch.tensor([0, 0, 1, 0]))},
}
# Masks and positions that leave out the last key, or the first.
ENDS = {
    "length": ({"mask": Padding(3)}, 3),
    "lengths": ({"mask": Padding([3])}, 3),
    "left": ({"mask": Padding(left=1)}, 0),
    "causal": ({"mask": Causal(), "query_positions": Positions(3)}, 3),
    "window": ({"mask": Window(3), "query_positions": Positions(3, start=3)}, 0),
}


@each_backend
@with_and_without_gradients
@pytest.mark.parametrize(("where", "bad"), [("both", NAN), ("key", INF), ("value", -INF)], ids=str)
@pytest.mark.parametrize("hidden", [*HIDDEN, *ENDS])
def test_fmr_5_what_nobody_sees_does_not_leak(hidden, where, bad, mode, backend):
    """A masked key or value that held NaN made the output NaN, as 0 times NaN is NaN."""
    how, slot = (HIDDEN[hidden], 2) if hidden in HIDDEN else ENDS[hidden]
    query, key, value = (leaf(t) for t in (randn(1, 2, 3, 8), randn(1, 2, 4, 8, seed=1), randn(1, 2, 4, 8, seed=2)))
    outs = []
    for number in (0.0, bad):
        k, v = key.clone(), value.clone()
        if where != "value":
            k[:, :, slot] = number
        if where != "key":
            v[:, :, slot] = number
        with running(mode):
            outs.append(attention(query, k, v, backend=backend, **how))
    assert torch.equal(*outs)
    if mode == "train":
        outs[1].sum().backward()
        assert all(t.grad.isfinite().all() for t in (query, key, value))
        assert (key.grad[:, :, slot] == 0).all() and (value.grad[:, :, slot] == 0).all()


@every_backend
@every_mode
@pytest.mark.parametrize("weights", [False, True], ids=["no weights", "weights"])
def test_fmr_5_padding_of_inf_through_a_layer(weights, mode, backend):
    """The same with inf in the tokens: those rows are lost, the others are bit for bit those of zeros.

    Gradients of the weights are not: a linear layer multiplies its input, inf, by the gradient, 0.
    """
    made = layer(8, 2, backend=backend)
    if weights:
        made.observer = lambda x, out, lse: None
    real = torch.tensor([[True] * 5, [True, True, True, False, False]])
    x = randn(2, 5, 8, seed=50)
    outs = []
    for number in (0.0, INF):
        filled = x.clone()
        filled[~real] = number
        with running(mode, made):
            outs.append(made(filled, mask=Padding(real)))
    assert torch.equal(outs[0][real], outs[1][real])


@every_backend
@with_and_without_gradients
@pytest.mark.parametrize(
    "mask", [Full(), torch.ones(16, 16, dtype=torch.bool), Causal()], ids=["no mask", "all", "causal"]
)
def test_fmr_6_nan_that_may_be_seen_stays(mask, mode, backend):
    """NaN in a query gave finite zeros: a broken input that looks healthy. Its row is lost, and no other."""
    query, key, value = (randn(2, 4, 16, 8, seed=i).requires_grad_() for i in range(3))
    with running(mode):
        right = attention(query, key, value, mask=mask, backend=backend)
        broken = query.clone()
        broken[1, 2, 5] = NAN
        out = attention(broken, key, value, mask=mask, backend=backend)
        assert out[1, 2, 5].isnan().all()
    rest = torch.ones(2, 4, 16, dtype=torch.bool)
    rest[1, 2, 5] = False
    assert torch.equal(out[rest], right[rest])


@every_backend
@with_and_without_gradients
@pytest.mark.parametrize("where", ["key", "value"])
def test_fmr_6_nan_in_a_key_that_is_seen_shows_in_every_row_that_sees_it(where, mode, backend):
    query, key, value = (randn(2, 4, 7, 8, seed=i).requires_grad_() for i in range(3))
    broken = {"key": key.clone(), "value": value.clone()}
    broken[where][0, 1, 3] = NAN
    with running(mode):
        right = attention(query, key, value, mask=Window(2), backend=backend)
        out = attention(query, broken["key"], broken["value"], mask=Window(2), backend=backend)
    assert out[0, 1, 2:5].isnan().all()
    rest = torch.ones(2, 4, 7, dtype=torch.bool)
    # a fused kernel multiplies the values of one sequence and head in blocks, so more rows of that one may be NaN
    rest[0, 1] = False
    assert torch.equal(out[rest], right[rest])


# with weights asked for, sdpa is out: an observer is given a log-sum-exp, which torch's kernel has not with dropout
@pytest.mark.parametrize(
    ("backend", "seed", "weights"),
    [
        *((name, None, False) for name in ("auto", "sdpa", "reference")),
        *((name, seed, True) for name in ("auto", "reference") for seed in (None, 5)),
    ],
)
def test_fmr_7_a_dead_row_under_dropout(backend, seed, weights):
    """A dead row and dropout in training gave NaN, but only with weights asked for."""
    made = layer(8, 2, bias=False, dropout_p=0.5, backend=backend)
    seen = []
    if weights:
        made.observer = lambda x, out, lse: seen.append(attention_weights(x.query, x.key, mask=x.mask))
    x, context = randn(2, 3, 8, seed=50), randn(2, 4, 8, seed=51)
    blocked = torch.zeros(3, 4, dtype=torch.bool)
    blocked[0] = True
    for _ in range(5):
        out = made(leaf(x), context, mask=from_torch_masks(blocked)[0], seed=seed)
        assert out.isfinite().all() and (out[:, 0] == 0).all()
        out.sum().backward()
        assert all(p.grad.isfinite().all() for p in made.parameters())
    assert all((s[:, :, 0] == 0).all() and s.isfinite().all() for s in seen)
