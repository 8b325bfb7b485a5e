"""WGT: the weights that are handed out, dropout, and what is held in memory."""

import math

import oracle
import pytest
import torch
from helpers import assert_as_good_as, leaf, plain_attention, randn
from reports import each_backend, every_backend, layer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headwise import Causal, Padding, attention, attention_weights

# without the annotation hook, which itself holds tensors
pytestmark = pytest.mark.plain


def watched(made):
    """The layer's weights, call by call, as an observer sees them."""
    seen = []

    def see(x, out, lse):
        seen.append(attention_weights(x.query, x.key, mask=x.mask, score_mods=x.score_mods, sinks=x.sinks))

    made.observer = see
    return seen


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("seed", [None, 3])
def test_wgt_1_weights_are_those_before_dropout(seed, backend):
    """Returned weights summed to anything from 0.28 to 1.34 in training, and to NaN for a padded sample."""
    made, x = layer(8, 2, dropout_p=0.5, backend=backend), randn(2, 6, 8, seed=50)
    seen = watched(made)
    outs = [made(x, mask=Padding([6, 0]), seed=seed) for _ in range(3)]
    for weights in seen:
        assert torch.equal(weights, seen[0]) and (weights[1] == 0).all()
        assert_as_good_as(weights[0].sum(-1), torch.ones(2, 6, dtype=torch.float64), terms=6)
    assert torch.equal(outs[0], outs[1]) == (seed is not None)
    made(x[:, :1], seed=seed)
    assert (seen[-1] == 1).all()  # one key: no 0 and no 2
    made.eval()(x)
    assert_as_good_as(seen[-1].sum(-1), torch.ones(2, 2, 6, dtype=torch.float64), terms=6)


@every_backend
def test_wgt_2_no_dropout_in_evaluation(backend):
    """It stayed active where a function was handed the bare probability."""
    made, plain = (layer(8, 2, dropout_p=p, backend=backend) for p in (0.5, 0.0))
    x = randn(2, 6, 8, seed=50)
    want = plain.eval()(x)
    assert torch.equal(made.eval()(x), want) and torch.equal(made(x), want)
    with torch.no_grad():
        want = plain(x)
        assert torch.equal(made(x), want) and torch.equal(made(x), want)
    made.train()
    assert not torch.equal(made(x), made(x))


class Largest(TorchDispatchMode):
    """The most numbers that any operation gave back."""

    def __init__(self):
        super().__init__()
        self.numel, self.op = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                # what is held: an expanded view has no more than what it is a view of
                held = tensor.untyped_storage().nbytes() // tensor.element_size()
                if held > self.numel:
                    self.numel, self.op = held, str(func)
        return out


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
@pytest.mark.parametrize("mask", [None, Causal()], ids=["no mask", "causal"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "training"])
def test_wgt_3_no_matrix_of_weights_unless_asked_for(grad, mask, backend):
    """The default built it for every caller, and most threw it away."""
    count, width = 2048, 64
    made, x = layer(width, 8, backend=backend), randn(1, count, width)
    with torch.set_grad_enabled(grad), Largest() as largest:
        out = made(x) if mask is None else made(x, mask=mask)
        if grad:
            out.sum().backward()
    assert largest.numel <= 4 * count * width < count * count, largest.op


def test_wgt_3_the_reference_holds_a_block_of_rows_without_gradients():
    count = 2048
    made, x = layer(64, 8, backend="reference"), randn(1, count, 64)
    with torch.no_grad(), Largest() as largest:
        made(x)
    assert largest.numel < 8 * count * count, largest.op
    with torch.no_grad(), Largest() as largest:
        attention_weights(*[randn(1, 8, count, 8)] * 2, rows=[5])
    assert largest.numel <= 8 * count * 8, largest.op


def dropped_weights(query, key, value, *, before, **how):
    """The weights after dropout, read off as the output for values that are the rows of an identity."""
    before()
    slots = key.shape[-2]
    return attention(query, key, torch.eye(slots).to(query).expand(*key.shape[:3], slots), **how)


@pytest.mark.parametrize(("backend", "seed"), [("auto", 7), ("reference", 7), ("reference", None), ("sdpa", None)])
def test_wgt_4_dropout_scales_what_it_keeps_forward_and_backward(backend, seed):
    """The backward pass scaled by p instead of 1/(1 - p)."""
    p, how = 0.25, {"dropout_p": 0.25, "seed": seed, "backend": backend}

    def before():
        torch.manual_seed(11)

    query, key, value = (leaf(randn(2, 4, 3, 5, seed=i), torch.float64) for i in range(3))
    weights = attention_weights(query, key).detach()
    after = dropped_weights(query, key, value, before=before, **how).detach()
    drop = (after != 0).double() / (1 - p)
    assert 0 < (drop == 0).sum() < drop.numel()
    assert_as_good_as(after, weights * drop, terms=8)

    before()
    out = attention(query, key, value, **how)
    grad = randn(2, 4, 3, 5, seed=3, dtype=torch.float64)
    out.backward(grad)
    assert_as_good_as(value.grad, after.mT @ grad, terms=8, inner=1.0)
    exact = [leaf(t) for t in (query, key, value)]
    want = oracle.attend(*exact, drop=drop)[0]
    assert_as_good_as(out, want, terms=8)
    want.backward(grad)
    for got, right in zip((query, key, value), exact, strict=True):
        assert_as_good_as(got.grad, right.grad, terms=30, inner=right.grad.abs().max().item())


@each_backend
def test_wgt_4_the_average_over_many_draws_is_the_output_without(backend):
    """Each weight is kept with probability 1 - p; five standard deviations are allowed, and the draws are fixed."""
    p, draws = 0.25, 400
    zeros, ones = torch.zeros(draws, 1, 8, 2), torch.ones(draws, 1, 8, 1)
    mean = attention(zeros, zeros, ones, dropout_p=p, backend=backend).mean().item()
    deviation = math.sqrt(p / (1 - p) / (draws * 8 * 8))
    assert abs(mean - 1) < 5 * deviation


def test_wgt_5_weights_are_probabilities_of_the_keys_there_are():
    """They came padded to 128 columns, signed and not normalised."""
    for slots in (4, 1, 130):
        weights = attention_weights(randn(2, 4, 4, 7), randn(2, 2, slots, 7, seed=1))
        assert weights.shape == (2, 4, 4, slots) and (weights >= 0).all() and (weights <= 1).all()
        assert_as_good_as(weights.sum(-1), torch.ones(2, 4, 4, dtype=torch.float64), terms=slots)
        given = randn(2, 4, 4, 7), randn(2, 2, slots, 7, seed=1), randn(2, 2, slots, 1, seed=2)
        want, plain = oracle.attend(*given)[1], plain_attention(*given)[1]
        assert_as_good_as(weights, want, plain, terms=slots + 7)
