"""Masks that are a thin band run in blocks of queries: the same numbers, in memory that does not grow with T · S."""

import oracle
import pytest
import torch
from helpers import NAN, assert_as_good_as, leaf, plain_attention, randn
from torch.profiler import profile

from headwise import Causal, Chunk, Padding, Positions, Prefix, Window, attention, explain
from headwise.algebra import evaluate
from headwise.backends import sdpa
from headwise.functional import prepare, run

MASKS = {
    "sliding": Causal() & Window(31),
    "both sides": Window(13),
    "narrow": Window(left=2, right=1),
    "itself": Window(1),
    "ahead": Window(left=0, right=17),
    "padded": Causal() & Window(19) & Padding(401),
    "padded left": Causal() & Window(19) & Padding(left=271),
    "between": Window(9) & Prefix(200, start=150),
    "short": Causal() & Window(19) & Padding(3),
}
SIZES = ((521, 613), (613, 521))


@pytest.fixture
def counted(monkeypatch):
    """The numbers of query rows and keys of every call of the backend, the one that is split included."""
    calls, right = [], sdpa.Sdpa.run

    def run(self, x):
        calls.append((x.query.shape[-2], x.key.shape[-2]))
        return right(self, x)

    monkeypatch.setattr(sdpa.Sdpa, "run", run)
    return calls


def made(rows, slots, batch=2, heads=4, kv_heads=2, dtype=torch.float32):
    shapes = ((heads, rows, 5), (kv_heads, slots, 5), (kv_heads, slots, 7))
    return [randn(batch, *shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def call(tensors, mask, sinks=None, lse="no", queries=None, keys=None, dropout=0.0):
    return run(prepare(*tensors, mask, (), sinks, None, dropout, None, queries, keys, lse), "sdpa")


def seen(tensors, mask, queries=None, keys=None):
    x = prepare(*tensors, mask, (), None, None, 0.0, None, queries, keys)
    return evaluate(x.mask, *x.query.shape[:2], x.queries, x.keys).expand(*x.query.shape[:3], x.key.shape[-2])


def gradients(out, grad, leaves):
    return torch.autograd.grad((out * grad.to(out.dtype)).sum(), leaves)


def cancelling(tensors, weights, grad):
    """Size of the terms behind the gradients of queries and keys: with one key in sight they cancel altogether."""
    query, key, value = (t.detach().square() for t in tensors[:3])
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    score = weights.detach().square() * (grad.double().square() @ value.mT)
    sizes = {"query": score @ key, "key": (score.mT @ query).unflatten(1, (tensors[1].shape[1], -1)).sum(2)}
    return {name: (size.max() / query.shape[-1]).sqrt().item() for name, size in sizes.items()}


@pytest.mark.parametrize("block", (8, 128))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_output_lse_and_gradients(name, sizes, block, counted, monkeypatch):
    monkeypatch.setattr(sdpa, "BLOCK", block)
    mask, (rows, slots) = MASKS[name], sizes
    tensors = [*made(rows, slots), randn(4, seed=4)]
    allowed, grad = seen(tensors[:3], mask), randn(2, 4, rows, 7, seed=5)
    sinks = block == 8
    wide, plain, given = ([leaf(t, dtype) for t in tensors[: 3 + sinks]] for dtype in (torch.float64, None, None))
    wanted = plain_attention(*wide[:3], allowed, sinks=wide[3] if sinks else None)
    nearly = plain_attention(*plain[:3], allowed, sinks=plain[3] if sinks else None)
    out, lse = call(given[:3], mask, given[3] if sinks else None, "value")
    assert len(counted) > 1 or name in ("padded left", "between", "short", "padded")  # of which few keys are left
    assert (lse is not None) and lse.shape == (2, 4, rows)
    assert_as_good_as(out, wanted[0], nearly[0], terms=slots, what="out")
    assert_as_good_as(lse, wanted[2], nearly[2], terms=slots, what="lse")
    inner = cancelling(wide, wanted[1], grad)
    sets = ((wanted[0], wide), (nearly[0], plain), (out, given))
    found = zip(*(gradients(result, grad, leaves) for result, leaves in sets), strict=True)
    for what, (want, near, got) in zip(("query", "key", "value", "sinks"), found, strict=False):
        assert_as_good_as(got, want, near, terms=max(rows * 2, slots), inner=inner.get(what, 0.0), what=what)
    with torch.no_grad():
        assert_as_good_as(call(given[:3], mask, given[3] if sinks else None)[0], wanted[0], nearly[0], terms=slots)


@pytest.mark.parametrize("name", ("sliding", "padded"))
def test_the_oracle_agrees(name, monkeypatch):
    monkeypatch.setattr(sdpa, "BLOCK", 4)
    mask = {"sliding": Causal() & Window(3), "padded": Window(2) & Padding(31)}[name]
    tensors = made(37, 41, batch=1)
    want = oracle.attend(*(t.double() for t in tensors), seen(tensors, mask))
    near = plain_attention(*tensors, seen(tensors, mask))
    out, lse = call(tensors, mask, lse="value")
    assert_as_good_as(out, want[0], near[0], terms=41)
    assert_as_good_as(lse, want[2], near[2], terms=41)


def test_where_tokens_stand(counted):
    """Calls that begin anywhere, and keys of which a part only is there."""
    mask = Causal() & Window(29)
    tensors = made(521, 613)
    places = (
        (Positions(521, 1000), Positions(613, 900)),
        (Positions(521, 92, offset=torch.tensor([3, -7])), Positions(613)),
        (Positions(521), Positions(613, filled=541)),
        (Positions(521, -40), Positions(613)),
    )
    for number, (queries, keys) in enumerate(places):
        counted.clear()
        allowed = seen(tensors, mask, queries, keys)
        want, near = (plain_attention(*(t.to(d) for t in tensors), allowed) for d in (torch.float64, torch.float32))
        out, lse = call(tensors, mask, lse="value", queries=queries, keys=keys)
        assert len(counted) > 1, number
        assert_as_good_as(out, want[0], near[0], terms=613, what=str(number))
        assert_as_good_as(lse, want[2], near[2], terms=613, what=str(number))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64))
def test_other_dtypes(dtype, counted):
    tensors = made(521, 613, dtype=dtype)
    want, near = (
        plain_attention(*(t.to(d) for t in tensors), seen(tensors, MASKS["sliding"]))
        for d in (torch.float64, torch.float32)
    )
    out, _ = call(tensors, MASKS["sliding"])
    assert len(counted) > 1 and out.dtype == dtype
    assert_as_good_as(out, want[0], near[0], terms=613)


def test_a_block_that_divides_the_queries_and_one_that_does_not(monkeypatch):
    tensors = made(640, 640)
    mask = MASKS["sliding"]
    want, near = (
        plain_attention(*(t.to(d) for t in tensors), seen(tensors, mask)) for d in (torch.float64, torch.float32)
    )
    for block in (64, 101, 128, 149, 10_000):
        monkeypatch.setattr(sdpa, "BLOCK", block)
        assert_as_good_as(call(tensors, mask)[0], want[0], near[0], terms=640, what=str(block))


@pytest.mark.parametrize("together", (1, 3000, 2**20))
def test_how_many_blocks_go_together_changes_nothing(together, counted, monkeypatch):
    tensors = made(640, 640)
    whole = call(tensors, MASKS["sliding"])[0]
    counted.clear()
    monkeypatch.setattr(sdpa, "TOGETHER", together)
    assert torch.equal(call(tensors, MASKS["sliding"])[0], whole)
    assert len(counted) == {1: 6, 3000: 5, 2**20: 3}[together]


def test_masks_that_are_no_band_of_numbers_stay_whole(counted):
    tensors = made(521, 521)
    sliding = Causal() & Window(31)
    masks = (
        Causal(),
        ~Window(3),
        sliding | Prefix(4),
        sliding & Chunk(100),
        sliding & Padding(torch.tensor([500, 400])),
        sliding & Padding(torch.ones(2, 521, dtype=torch.bool)),
    )
    for mask in masks:
        counted.clear()
        want, near = (
            plain_attention(*(t.to(d) for t in tensors), seen(tensors, mask)) for d in (torch.float64, torch.float32)
        )
        assert_as_good_as(call(tensors, mask)[0], want[0], near[0], terms=521, what=str(mask))
        assert counted == [(521, 521)], mask
    counted.clear()
    call(tensors, sliding, queries=Positions(521, torch.tensor([0, 3])), keys=Positions(521))  # a place per row
    assert counted == [(521, 521)]


def test_few_queries_or_a_wide_band_stay_whole(counted):
    for rows, slots, mask in ((128, 5000, Window(3)), (521, 521, Window(131)), (130, 5000, Window(100))):
        counted.clear()
        call(made(rows, slots, batch=1), mask)
        assert counted == [(rows, slots)]


def test_what_no_query_sees_does_not_leak(counted):
    query, key, value = (leaf(t) for t in made(521, 613))
    mask = MASKS["sliding"] & Padding(600)
    with torch.no_grad():
        hidden = ~seen((query, key, value), mask).any(-2)[:, :2]
        assert 0 < hidden.sum() < hidden.numel()
        key.masked_fill_(hidden[..., None], NAN)
        value.masked_fill_(hidden[..., None], NAN)
    out, _ = call((query, key, value), mask)
    assert len(counted) > 1 and out.isfinite().all()
    grads = torch.autograd.grad(out.sum(), (query, key, value))
    assert all(g.isfinite().all() for g in grads)
    assert not grads[2][hidden].any()


def test_a_query_that_sees_nothing_does_not_leak(counted):
    query, key, value = (leaf(t) for t in made(613, 521))
    with torch.no_grad():
        query[..., :92, :] = NAN  # before every key
    out, lse = call((query, key, value), MASKS["sliding"], lse="value")
    assert len(counted) > 1 and not out[..., :92, :].any() and lse[..., :92].eq(-torch.inf).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (query, key, value)))


def test_dropout(counted):
    query, key, _ = made(521, 613)
    torch.manual_seed(0)
    ones = torch.ones(2, 2, 613, 7)
    out, _ = call((query, key, ones), MASKS["sliding"], dropout=0.25)
    assert len(counted) > 1
    assert abs(out.mean() - 1) < 0.02 and 0.05 < out.std() < 1


def test_second_derivatives(counted):
    # in float64 by torch's own check, which asks for the gradient of the gradient in every direction
    tensors = [t.requires_grad_() for t in made(131, 131, batch=1, heads=1, kv_heads=1, dtype=torch.float64)]
    mask = Window(left=1, right=0)
    counted.clear()

    def gradient(backend):
        out = attention(*tensors, mask=mask, backend=backend)
        first = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), tensors)

    sdpa_block, sdpa.BLOCK = sdpa.BLOCK, 16
    try:
        got = gradient("sdpa")
    finally:
        sdpa.BLOCK = sdpa_block
    assert len(counted) > 1
    for mine, want in zip(got, gradient("reference"), strict=True):
        assert_as_good_as(mine, want, terms=1000)


def peak(step):
    step()
    with profile(profile_memory=True) as found:
        step()
    held = most = 0
    for event in sorted(found.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@pytest.mark.parametrize("grad", (False, True))
def test_memory_does_not_grow_with_the_square(grad):
    length, mask = 4096, Causal() & Window(256)
    tensors = [t.requires_grad_(grad) for t in made(length, length, batch=1, heads=1, kv_heads=1)]

    def step():
        out = attention(*tensors, mask=mask, backend="sdpa")
        if grad:
            torch.autograd.grad(out.sum(), tensors)

    assert peak(step) < length * length  # a mask of one byte a pair would be as much


def test_explain_says_how_often_torch_is_called():
    found = explain(*made(1024, 1024, batch=1), mask=Causal() & Window(128), backend="sdpa")
    assert found.backend == "sdpa"
    why = next(choice.why for choice in found.choices if choice.backend == "sdpa")
    assert "(128 query rows on 128 keys, is_causal=True, no mask tensor)" in why
    assert "(7 blocks of 128 query rows on 255 keys, is_causal=False, a mask tensor of 32,640 entries)" in why


@pytest.mark.plain
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiler_sees_no_blocks():
    """They would be a graph for each length."""
    torch._dynamo.reset()
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(
        lambda *tensors: attention(*tensors, mask=MASKS["sliding"]), backend=keep, fullgraph=True, dynamic=True
    )
    for length in (131, 521, 613):
        tensors = made(length, length)
        want, near = (
            plain_attention(*(t.to(d) for t in tensors), seen(tensors, MASKS["sliding"]))
            for d in (torch.float64, torch.float32)
        )
        assert_as_good_as(compiled(*tensors), want[0], near[0], terms=length)
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_places_of_the_keys_that_are_not_filled(counted):
    """A window that looks ahead, and queries that stand behind the last key that is there."""
    query, key, value = made(613, 613)
    keys, some = Positions(613, filled=541), slice(541, None)
    for mask in (Window(29), Window(29) & Padding(600)):
        allowed = seen((query, key, value), mask, Positions(613), keys)
        want, near = (plain_attention(*(t.to(d) for t in (query, key, value)), allowed) for d in (torch.float64, None))
        given = [tensor.clone() for tensor in (query, key, value)]
        given[1][:, :, some], given[2][:, :, some] = torch.nan, torch.nan
        counted.clear()
        out, lse = call(given, mask, lse="value", queries=Positions(613), keys=keys)
        assert len(counted) > 1
        assert_as_good_as(out, want[0], near[0], terms=613)
        assert_as_good_as(lse, want[2], near[2], terms=613)
