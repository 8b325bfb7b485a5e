"""POL: what the values of a mask mean."""

import warnings

import oracle
import pytest
import torch
from helpers import assert_as_good_as, randn
from reports import check_layer, every_backend, every_mode, formula, layer, running

from headwise import Bias, Causal, Dense, Padding, ShapeError, attention_weights
from headwise.convert.torch import from_torch_masks

# without the annotation hook: wrong masks must meet headwise's own errors
pytestmark = pytest.mark.plain

INF = torch.inf


@every_backend
def test_pol_1_zeros_and_ones_are_never_taken_for_hidden_and_shown(backend):
    """A float mask of 0 and 1 did not hide the future: its numbers are added."""
    made, x = layer(6, 2, backend=backend), randn(1, 4, 6, seed=50)
    ones = torch.ones(4, 4).tril()
    for mask in (ones, ones.long(), ones.to(torch.uint8)):
        with pytest.raises(ShapeError, match=r"from_zeros"):
            made(x, mask=mask)
    # what it can be made to mean, each by its own name
    check_layer(made, made(x, mask=Dense.from_zeros(ones)), x, allowed=ones.bool())
    check_layer(made, made(x, score_mods=[Bias(ones)]), x, bias=ones)
    mask, mods = from_torch_masks(ones)
    check_layer(made, made(x, mask=mask, score_mods=mods), x, bias=ones)
    q, k = randn(1, 2, 4, 3), randn(1, 2, 4, 3, seed=1)
    assert (attention_weights(q, k, score_mods=mods)[..., 0, 1:] > 0).all()


@every_backend
@every_mode
@pytest.mark.parametrize("padding", ["bool", "float"])
@pytest.mark.parametrize("causal", ["bool", "float"])
def test_pol_2_every_pair_of_mask_kinds_is_an_intersection(causal, padding, mode, backend):
    """A float padding mask was ignored when the other mask was boolean."""
    made, x = layer(8, 2, backend=backend), randn(2, 4, 8, seed=50)
    future = torch.ones(4, 4, dtype=torch.bool).triu(1)
    padded = torch.tensor([[False] * 4, [False, False, False, True]])
    given = [
        hides if kind == "bool" else torch.zeros(hides.shape).masked_fill(hides, -INF)
        for hides, kind in ((future, causal), (padded, padding))
    ]
    mask, mods = from_torch_masks(*given)
    with running(mode, made):
        out = made(x, mask=mask, score_mods=mods)
    check_layer(made, out, x, allowed=~future & ~padded[:, None, None])


@every_backend
@every_mode
def test_pol_3_float_padding_is_added_to_scores(mode, backend):
    """Not to the vectors of the keys: 1 raises every score of its key by 1, and weights still sum to 1."""
    made, x = layer(2, 1, bias=False, backend=backend), randn(1, 2, 2, seed=50)
    added = torch.tensor([[0.0, 1.0]])
    mask, mods = from_torch_masks(key_padding_mask=added)
    seen = []
    made.observer = lambda x, out, lse: seen.append(attention_weights(x.query, x.key, score_mods=x.score_mods))
    with running(mode, made):
        out = made(x, mask=mask, score_mods=mods)
    check_layer(made, out, x, bias=added[:, None, None])
    with torch.no_grad():
        want = formula(made.double(), oracle.attend, x.double(), bias=added[:, None, None])[1]
    assert_as_good_as(seen[0], want, terms=4)
    assert_as_good_as(seen[0].sum(-1), torch.ones(1, 1, 2, dtype=torch.float64), terms=2)


@every_backend
@every_mode
@pytest.mark.parametrize("same", [True, False], ids=["self", "copy"])
def test_pol_4_a_float_mask_is_added_in_every_mode(same, mode, backend):
    """A mask of ordinary numbers was read as booleans on the inference path: everything hidden, NaN."""
    made, x, added = layer(8, 2, backend=backend), randn(3, 4, 8, seed=50), randn(4, 4, seed=51)
    mask, mods = from_torch_masks(added)
    with running(mode, made):
        out = made(x, mask=mask, score_mods=mods) if same else made(x.clone(), x, x, mask=mask, score_mods=mods)
    check_layer(made, out, x, allowed=None, bias=added)


@every_backend
@every_mode
def test_pol_5_a_bias_per_sample_and_head_with_padding(mode, backend):
    """The same inside an encoder layer, with a bias of three dimensions and padding beside it."""
    made, x = layer(8, 2, backend=backend), randn(3, 5, 8, seed=50)
    for added in (randn(5, 5, seed=51), randn(6, 5, 5, seed=52)):
        padded = torch.tensor([[False] * 5, [False, False, True, True, True], [False, False, False, False, True]])
        mask, mods = from_torch_masks(added, padded, num_heads=2)
        with running(mode, made):
            out = made(x, mask=mask, score_mods=mods)
        bias = added if added.dim() == 2 else added.unflatten(0, (3, 2))
        check_layer(made, out, x, allowed=~padded[:, None, None], bias=bias)


@every_backend
def test_pol_6_an_integer_padding_mask_is_refused_in_every_mode(backend):
    """It meant one thing in training and another in evaluation."""
    layers = torch.nn.ModuleList([layer(4, 2, seed=i, backend=backend) for i in (0, 20)])
    x = randn(2, 4, 4, seed=50)
    whole = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]])
    outs = []
    for mode in (True, False):
        layers.train(mode)
        with pytest.raises(ShapeError, match="int64"):
            layers[0](x, mask=Padding(whole))
        with pytest.raises(ShapeError, match="int64"):
            layers[0](x, mask=whole)
        with pytest.raises(ShapeError, match="int64"):
            from_torch_masks(key_padding_mask=whole)
        y = x
        for made in layers:
            got = made(y, mask=Padding(whole == 0))
            check_layer(made, got, y, allowed=(whole == 0)[:, None, None])
            y = got
        outs.append(y)
    assert torch.equal(*outs)


@every_backend
@every_mode
def test_pol_7_two_boolean_masks_warn_of_nothing(mode, backend):
    """A decoder warned of masks of different kinds although it was given two boolean ones."""
    made, x = layer(16, 2, backend=backend), randn(2, 5, 16, seed=50)
    future, padded = torch.ones(5, 5, dtype=torch.bool).triu(1), torch.zeros(2, 5, dtype=torch.bool)
    with warnings.catch_warnings(record=True) as warned, running(mode, made):
        warnings.simplefilter("always")
        made(x, mask=from_torch_masks(future, padded)[0])
        made(x, mask=Causal() & Padding(~padded))
    assert not [w for w in warned if "headwise" in str(w.message) or "headwise" in w.filename]
