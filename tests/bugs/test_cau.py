"""CAU: causality, and how queries and keys are aligned."""

import pytest
import torch
from helpers import assert_as_good_as, randn
from reports import (
    ALL_CACHES,
    PAST,
    assert_probe,
    check,
    check_layer,
    counter,
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
    Document,
    Padding,
    PerHead,
    Positions,
    Prefix,
    Softcap,
    Window,
    attention,
    attention_weights,
    attention_with_lse,
)
from headwise.convert.torch import from_torch_masks

# without the annotation hook: wrong masks must meet headwise's own errors
pytestmark = pytest.mark.plain


@every_backend
@every_mode
def test_cau_1_the_last_query_stands_with_the_last_key(mode, backend):
    """One new query and a cache saw the first key alone, so that every step gave the same vector."""
    with running(mode):
        assert_probe(probe(1, 6, mask=Causal(), backend=backend, grad=True), [2.5], slots=6)
        assert_probe(probe(2, 6, mask=Causal(), backend=backend, grad=True), [2.0, 2.5], slots=6)


@every_backend
def test_cau_2_more_queries_than_keys(backend):
    """The first queries stand before every key."""
    assert_probe(probe(5, 2, mask=Causal(), backend=backend), [0, 0, 0, 0, 0.5])
    query, key, value = randn(1, 2, 5, 8), randn(1, 2, 2, 8, seed=1), randn(1, 2, 2, 8, seed=2)
    out = attention(query, key, value, mask=Causal(), backend=backend)
    assert (out[:, :, :3] == 0).all() and torch.equal(out[:, :, 3], value[:, :, 0])
    check(backend, query, key, value, torch.ones(5, 2, dtype=torch.bool).tril(-3), mask=Causal())


CHUNKS = {
    "CAU-3 one by one": [1] * 5,
    "CAU-4 seven and nine": [7, 9],
    "CAU-4 at once": [16],
    "CAU-5 prompt and steps": [4, 1, 1, 1],
    "prompt and chunks": [3, 2, 4],
}


@every_backend
@pytest.mark.parametrize("mask", ["layer", "call", "both"])
@pytest.mark.parametrize("cache", ALL_CACHES)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_cau_3_4_5_any_chunks_through_a_cache_are_one_pass(chunks, cache, mask, backend):
    """The causal mask was made for the first positions, of the wrong size, or over slots that were empty."""
    chunks = CHUNKS[chunks]
    count = sum(chunks)
    made = counter(PAST if mask != "call" else None, backend=backend)
    kept = ALL_CACHES[cache]()
    tokens, outs = torch.arange(float(count))[:, None], []
    with torch.no_grad():
        for chunk in tokens.split(chunks):
            outs.append(made(chunk, mask=PAST if mask != "layer" else Window(100), cache=kept))
    assert_probe(torch.cat(outs)[:, 0], torch.arange(count) / 2)


@each_backend
def test_cau_4_chunks_by_positions_alone(backend):
    """Without a cache: the second chunk of 9 against all 16 keys."""
    first = probe(7, 7, mask=Causal(), backend=backend)
    second = probe(9, 16, mask=Causal(), backend=backend, query_positions=Positions(9, start=7))
    assert_probe(torch.cat([first, second], -1), torch.arange(16) / 2)
    assert_probe(probe(9, 16, mask=Causal(), backend=backend), torch.arange(7, 16) / 2, slots=16)
    early = probe(7, 16, mask=Causal(), backend=backend, query_positions=Positions(7))
    assert_probe(early, torch.arange(7) / 2, slots=16)


@every_backend
@every_mode
@pytest.mark.parametrize("weights", [False, True], ids=["no weights", "weights"])
def test_cau_6_causality_and_a_mask_are_both_kept(weights, mode, backend):
    """The flag was dropped as soon as weights were asked for, and the mask when they were not."""
    x = randn(2, 4, 8, seed=50)
    past = torch.ones(4, 4, dtype=torch.bool).tril()
    other = torch.ones(4, 4, dtype=torch.bool)
    other[:, 1] = False
    of_layer, of_call = layer(8, 2, mask=Causal(), backend=backend), layer(8, 2, backend=backend)
    seen = []
    if weights:
        for made in (of_layer, of_call):
            made.observer = lambda x, out, lse: seen.append(attention_weights(x.query, x.key, mask=x.mask))
    outs = []
    for made, causal, mask in ((of_layer, None, other), (of_call, Causal(), other)):
        with running(mode, made):
            out = made(x) if causal is None else made(x, mask=causal)
            check_layer(made, out, x, allowed=past)
            mask = from_torch_masks(~mask)[0]
            out = made(x, mask=mask) if causal is None else made(x, mask=causal & mask)
            check_layer(made, out, x, allowed=past & other)
            outs.append(out)
    assert torch.equal(*outs)
    assert all((s.masked_select(~past) == 0).all() for s in seen)


@every_backend
@pytest.mark.parametrize("with_mask", ["mask", "bias", "trained bias"])
def test_cau_7_causality_goes_with_every_mask_and_bias(with_mask, backend):
    """One function refused them together and the next demanded both; a trained bias failed on one route only."""
    query, key, value = (randn(1, 1, 4, 8, seed=i) for i in range(3))
    past = torch.ones(4, 4, dtype=torch.bool).tril()
    if with_mask == "mask":
        shown = torch.tensor([[True, False, True, True]])
        check(backend, query, key, value, past & shown, mask=Causal() & Dense(shown))
        return
    values = randn(4, 4, seed=3)
    bias = Bias(torch.nn.Parameter(values) if with_mask == "trained bias" else values)
    check(backend, query, key, value, past, mask=Causal(), score_mods=[bias], same={"bias": values})
    if with_mask == "trained bias":
        assert bias.values.grad[past].abs().gt(0).any() and (bias.values.grad[~past] == 0).all()


# Routes that a backend may take: each is a way to say nothing more than Causal().
ROUTES = {
    "alone": {"mask": Causal()},
    "twice": {"mask": Causal() & Causal()},
    "wide window": {"mask": Causal() & Window(6)},
    "padding": {"mask": Causal() & Padding(6)},
    "lengths": {"mask": Causal() & Padding([6])},
    "booleans": {"mask": Causal() & Padding(torch.ones(1, 6, dtype=torch.bool))},
    "documents": {"mask": Causal() & Document(torch.zeros(1).long(), torch.zeros(6).long())},
    "prefix": {"mask": Causal() | Prefix(0)},
    "per head": {"mask": PerHead((Causal(), Causal()))},
    "not not": {"mask": ~~Causal()},
    "bias": {"mask": Causal(), "score_mods": [Bias(torch.zeros(1, 6))]},
    "cap": {"mask": Causal(), "score_mods": [Softcap(5.0)]},
    "positions": {"mask": Causal(), "query_positions": Positions(1, start=9), "key_positions": Positions(6, start=4)},
}


@every_backend
@pytest.mark.parametrize("mode", ["train", "no_grad"])
@pytest.mark.parametrize("route", ROUTES)
def test_cau_8_every_route_aligns_alike(route, mode, backend):
    """Two back ends of one operator aligned fewer queries than keys each in its own way."""
    if route == "cap" and backend == "sdpa":
        backend = "auto"  # sdpa says why not; the table of wrong calls has it
    with running(mode):
        assert_probe(probe(1, 6, backend=backend, grad=True, **ROUTES[route]), [2.5], slots=6)
        sinks = torch.full((2,), -torch.inf)
        assert_probe(probe(1, 6, backend=backend, grad=True, sinks=sinks, **ROUTES[route]), [2.5], slots=6)
    zeros = torch.zeros(1, 2, 1, 3)
    with torch.no_grad():
        lse = attention_with_lse(
            zeros, zeros.expand(1, 2, 6, 3), zeros.expand(1, 2, 6, 3), backend=backend, **ROUTES[route]
        )
    assert_as_good_as(lse[1].exp(), torch.full((1, 2, 1), 6.0, dtype=torch.float64), terms=6)
