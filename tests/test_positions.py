"""Positions in their three forms, and masks and backends over them, against a count by hand."""

import pytest
import torch
from cases import BACKEND_NAMES, MASKS, SHAPES
from helpers import assert_as_good_as, plain_attention, randn
from test_spans import check_form

from headwise import (
    ALiBi,
    Causal,
    Chunk,
    Full,
    Padding,
    PerHead,
    Positions,
    Prefix,
    ShapeError,
    Softcap,
    Window,
    attention,
    attention_weights,
)
from headwise.backends.base import Inputs

B, H, K, T, S, D = 3, 4, 2, 5, 9, 6
# by name: the keys of a call, and the index of each place by hand (None where there is no token)
START, RING, FILLED = [2, 0, 7], [0, 4, 8], [9, 6, 3]


def _lists(start, ring, filled):
    rows = []
    for b in range(B):
        row = [None] * S
        for i in range(filled[b]):
            row[(i + ring[b]) % S] = start[b] + i
        rows.append(row)
    return rows


def _tensor(numbers):
    return torch.tensor(numbers)


HOLES = [[4, -1, 0, 1, 2, 3, -1, 5, 6], [0, 1, 2, -1, -1, -1, -1, 3, 4], [-1] * 9]
KEYS = {
    "a run": (Positions(S), _lists([0] * B, [0] * B, [S] * B)),
    "starts": (Positions(S, start=_tensor(START)), _lists(START, [0] * B, [S] * B)),
    "starts of int32": (Positions(S, start=_tensor(START).int()), _lists(START, [0] * B, [S] * B)),
    "filled": (Positions(S, filled=_tensor(FILLED)), _lists([0] * B, [0] * B, FILLED)),
    "one ring": (Positions(S, start=3, ring=4), _lists([3] * B, [4] * B, [S] * B)),
    "one ring, filled": (Positions(S, ring=2, filled=5), _lists([0] * B, [2] * B, [5] * B)),
    "rings": (
        Positions(S, start=_tensor(START), ring=_tensor(RING), filled=_tensor(FILLED)),
        _lists(START, RING, FILLED),
    ),
    "indices": (
        Positions(S, indices=_tensor(HOLES)),
        [[None if i < 0 else i for i in row] for row in HOLES],
    ),
}
QUERIES = {
    "a run": (Positions(T, start=3), [[3 + t for t in range(T)]] * B),
    "starts": (Positions(T, start=_tensor([4, 1, -2])), [[s + t for t in range(T)] for s in (4, 1, -2)]),
    "indices": (Positions(T, indices=_tensor([[7, 0, 3, 3, 8]])), [[7, 0, 3, 3, 8]] * B),
}
MASK = {
    "full": (Full(), lambda b, h, q, k: True),
    "causal": (Causal(), lambda b, h, q, k: k <= q),
    "window": (Causal() & Window(3), lambda b, h, q, k: 0 <= q - k < 3),
    "not": (~Window(2), lambda b, h, q, k: abs(q - k) >= 2),
    "or": (Prefix(2) | Window(left=1, right=0), lambda b, h, q, k: 0 <= k < 2 or 0 <= q - k <= 1),
    "chunk": (Chunk(3, start=[0, 1, 2]), lambda b, h, q, k: (q - b) // 3 == (k - b) // 3),
    "padding": (Padding([3, 9, 8]), lambda b, h, q, k: k < (3, 9, 8)[b]),
    "left": (Causal() & Padding(left=[0, 2, 8]), lambda b, h, q, k: k <= q and k >= (0, 2, 8)[b]),
    "per head": (
        PerHead((Causal(), Window(2), Full(), ~Causal())),
        lambda b, h, q, k: (k <= q, abs(q - k) < 2, True, k > q)[h],
    ),
}
every_form = pytest.mark.parametrize("keys", KEYS)


def dense(queries: str, keys: str, seen) -> torch.Tensor:
    q, k = QUERIES[queries][1], KEYS[keys][1]
    return torch.tensor(
        [
            [[[j is not None and seen(b, h, i, j) for j in k[b]] for i in q[b]] for h in range(H)]
            for b in range(B)
        ]
    )  # fmt: skip


def inputs(mask, queries: str, keys: str) -> Inputs:
    q, k = QUERIES[queries][0], KEYS[keys][0]
    tensors = randn(B, H, T, D, seed=20), randn(B, K, S, D, seed=21), randn(B, K, S, D, seed=22)
    return Inputs(*tensors, q, k, 0.3, mask.bind(B, H, q, k))


@every_form
@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("mask", MASK)
def test_masks_and_spans_follow_the_index(mask, queries, keys):
    x, want = inputs(MASK[mask][0], queries, keys), dense(queries, keys, MASK[mask][1])
    assert x.allowed().expand(want.shape).equal(want)
    assert x.allowed(torch.tensor([3, 1])).expand(B, H, 2, S).equal(want[..., [3, 1], :])
    spans = x.spans()
    if "indices" in (queries, keys):
        assert spans is None
        return
    runs = spans.tensor()
    place = torch.arange(S)[:, None]
    inside = ((place >= runs[..., None, :, 0]) & (place < runs[..., None, :, 1])).any(-1)
    assert inside.expand(want.shape).equal(want)
    check_form(spans, type("Call", (), {"rows": T, "slots": S}), 4)


@every_form
@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("mask", ("causal", "or", "per head"))
def test_every_backend_reads_them(backend, mask, keys):
    q, k, v = randn(B, H, T, D, seed=20), randn(B, K, S, D, seed=21), randn(B, K, S, D, seed=22)
    seen = dense("starts", keys, MASK[mask][1])
    places = {"query_positions": QUERIES["starts"][0], "key_positions": KEYS[keys][0]}
    got = attention(q, k, v, mask=MASK[mask][0], **places, backend=backend)
    want = plain_attention(q.double(), k.double(), v.double(), seen)[0]
    assert_as_good_as(got, want, plain_attention(q, k, v, seen)[0], terms=D + S)
    weights = attention_weights(q, k, mask=MASK[mask][0], **places, rows=[4])
    assert weights.gt(0).equal(seen[..., 4:, :])


@every_form
def test_distances_follow_the_position(keys):
    """ALiBi over index + offset, or over positions of their own."""
    q, k = randn(B, H, T, D, seed=20, dtype=torch.float64), randn(B, K, S, D, seed=21, dtype=torch.float64)
    offset, slopes = torch.tensor([0, -3, 5]), ALiBi(H).slopes.double()
    at_keys, numbers = KEYS[keys]
    index = torch.tensor([[0 if i is None else i for i in row] for row in numbers])
    own = randn(B, S, seed=23).mul(9).long()
    for given, position in (
        ({"offset": offset}, index + offset[:, None]),
        ({"positions": own}, own),
        ({"positions": own[:1].int()}, own[:1].expand(B, S)),
    ):
        places = Positions(S, at_keys.start, ring=at_keys.ring, filled=at_keys.filled, indices=at_keys.indices, **given)
        found = attention_weights(
            q, k, score_mods=[ALiBi(H)], key_positions=places, query_positions=Positions(T, start=3), stage="capped"
        )
        assert found.shape == (B, H, T, S)
        found = attention_weights(
            q, k, score_mods=[ALiBi(H)], key_positions=places, query_positions=Positions(T, start=3), stage="biased"
        )
        distance = (torch.arange(3, 3 + T)[None, :, None] - position[:, None]).abs()[:, None]
        scores = q @ k.repeat_interleave(2, 1).mT * D**-0.5 - slopes[:, None, None] * distance
        there = torch.tensor([[i is not None for i in row] for row in numbers])[:, None, None]
        assert_as_good_as(found, scores.masked_fill(~there, -torch.inf), terms=D)


def test_tensors_that_masks_hold_follow_the_order_of_tokens():
    """Column number c is that of token number c, wherever a ring or an index puts it."""
    for case in MASKS:
        if case.name not in ("dense", "dense, per row and head", "dense, broadcast", "padding, booleans", "document"):
            continue
        call = SHAPES["gqa"]
        mask = case.make(call)
        plain = Positions(call.slots)
        want = Inputs(*call.tensors(), call.queries, plain, 1.0, mask.bind(2, 15, call.queries, plain)).allowed()
        for ring in (3, torch.tensor([3, 8])):
            keys = Positions(call.slots, ring=ring)
            found = Inputs(*call.tensors(), call.queries, keys, 1.0, mask.bind(2, 15, call.queries, keys)).allowed()
            for b in range(2):
                turn = ring if isinstance(ring, int) else int(ring[b])
                one = want.expand(2, *want.shape[1:])[b]
                assert found.expand(2, *found.shape[1:])[b].equal(one.roll(turn, -1))
        order = torch.randperm(call.slots, generator=torch.Generator().manual_seed(1))
        keys = Positions(call.slots, indices=order[None])
        queries = Positions(call.rows, indices=torch.arange(4, 4 + call.rows)[None])
        found = Inputs(*call.tensors(), queries, keys, 1.0, mask.bind(2, 15, queries, keys)).allowed()
        full = (call.batch, call.heads, call.rows, call.slots)
        assert found.expand(full).equal(want.expand(full))  # explicit indices leave columns where they are


def test_what_stands_last():
    assert Positions(4, start=3).stop == 7 and Positions(4, start=3, filled=2).stop == 5
    assert Positions(4, start=torch.tensor([1, 2]), filled=torch.tensor([4, 1])).stop.tolist() == [5, 3]
    assert Positions(3, indices=torch.tensor([[4, -1, 9], [0, 1, -1]])).stop.tolist() == [10, 2]
    assert Positions(0, indices=torch.zeros(2, 0, dtype=torch.int64)).stop.tolist() == [0, 0]
    # the last query stands with the last key that is there
    keys = Positions(S, filled=torch.tensor([9, 5, 3]))
    q = k = torch.zeros(B, 1, S, 2)
    found = attention_weights(q[:, :, :2], k, mask=Causal(), key_positions=keys).gt(0).sum(-1)[:, 0]
    assert found.tolist() == [[8, 9], [4, 5], [2, 3]]


def test_values():
    one, ids = Positions(3, start=2), torch.zeros(1, 3, dtype=torch.int64)
    assert one == Positions(3, 2) and hash(one) == hash(Positions(3, 2)) and one != Positions(3) and one != 3
    assert Positions(3, indices=ids) == Positions(3, indices=ids) != Positions(3, indices=ids.clone())
    assert one.axes == 1 and Positions(3, positions=torch.zeros(4, 1, 3).long()).axes == 4
    assert one.is_run and not Positions(3, ring=1).is_run and not Positions(3, filled=2).is_run
    assert not Positions(3, indices=ids).is_run and Positions(3, positions=ids).is_run


@pytest.mark.plain
def test_tensors_of_positions_through_attention():
    q, k = randn(B, H, S, D, seed=20), randn(B, H, S, D, seed=21)
    at = randn(B, S, seed=24).mul(9).long()
    mods = [ALiBi(H)]
    found = attention(q, k, k, score_mods=mods, query_positions=at, key_positions=at)
    # without positions for the queries they have those of the last keys
    assert attention(q, k, k, score_mods=mods, key_positions=at).equal(found)
    part = attention(q[:, :, 6:], k, k, score_mods=mods, key_positions=at)
    want = attention(q[:, :, 6:], k, k, score_mods=mods, query_positions=at[:, 6:], key_positions=at)
    assert part.equal(want)
    with pytest.raises(ShapeError, match="give them as well"):
        attention(torch.cat([q, q], 2), k, k, score_mods=mods, key_positions=at)


def test_numbers_of_few_bits_and_of_many():
    """Sums and differences of what is given must not wrap."""
    queries, keys = Positions(3, start=torch.tensor([127], dtype=torch.int8)), Positions(4, start=126)
    spans = Causal().spans(queries, keys)
    assert spans.tensor()[0, 0, :, 0].tolist() == [[0, 2], [0, 3], [0, 4]]
    mask = Padding(torch.tensor([3, 7], dtype=torch.uint8))
    assert mask.spans(Positions(1), Positions(4, start=5)).tensor()[:, 0, 0, 0].tolist() == [[4, 4], [0, 2]]
    wide = Window(2**31 - 1) | Prefix(1)
    assert int(wide.spans(Positions(5), Positions(5)).work()) == 25


def test_a_ring_is_taken_modulo_its_size():
    for ring, other in ((7, 2), (-1, 4), (torch.tensor([12]), 2)):
        one, two = Positions(5, ring=ring), Positions(5, ring=other)
        assert one.index("cpu").equal(two.index("cpu"))
        spans = (Inputs(*[torch.zeros(1, 1, 5, 2)] * 3, Positions(5), at, 1.0, Window(2)).spans() for at in (one, two))
        assert next(spans).tensor().equal(next(spans).tensor())


def test_one_axis_is_none():
    at = torch.arange(5)[None, None].expand(1, 2, 5)
    assert Positions(5, positions=at).axes == 1
    q = torch.zeros(2, H, 5, 2)
    assert attention(q, q, q, score_mods=[ALiBi(H)], query_positions=at, key_positions=at).shape == q.shape


@pytest.mark.plain
def test_queries_stand_in_the_order_of_the_call():
    q = torch.zeros(1, H, 5, 2)
    for odd in ({"ring": 2}, {"filled": 3}):
        with pytest.raises(ShapeError, match="Queries stand in the order of the call"):
            attention(q, q, q, query_positions=Positions(5, **odd))


def test_a_softcap_reads_no_position():
    q, at = torch.zeros(2, H, 5, 2), torch.zeros(3, 2, 5, dtype=torch.int64)
    assert attention(q, q, q, score_mods=[Softcap(2.0)], query_positions=at, key_positions=at).shape == q.shape


def test_heads_of_an_empty_batch():
    mask = PerHead((Causal(), Padding(torch.zeros(0, dtype=torch.int64))))
    q = torch.zeros(0, 2, 5, 2)
    assert attention(q, q, q, mask=mask).shape == q.shape
