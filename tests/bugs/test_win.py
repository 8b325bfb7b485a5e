"""WIN: windows, and several sequences in one row."""

import oracle
import pytest
import torch
from helpers import assert_as_good_as, plain_attention, randn
from reports import (
    ALL_CACHES,
    CACHES,
    PAST,
    assert_probe,
    check,
    counter,
    each_backend,
    every_backend,
    every_cache,
    probe,
)

from headwise import (
    Causal,
    Chunk,
    Dense,
    Document,
    Full,
    Padding,
    Positions,
    RollingCache,
    RotaryEmbedding,
    Window,
    attention,
)

# without the annotation hook: wrong masks must meet headwise's own errors
pytestmark = pytest.mark.plain

SLIDING = [0, 0.5, 1, 2, 3, 4, 5, 6]


@every_backend
def test_win_1_a_window_counts_its_query(backend):
    """A window of w reached one key too far where a kernel counts without the query itself."""
    assert_probe(probe(8, 8, mask=Causal() & Window(3), backend=backend), SLIDING)
    for w in range(1, 9):
        want = [sum(range(max(0, t - w + 1), t + 1)) / min(w, t + 1) for t in range(8)]
        assert_probe(probe(8, 8, mask=Causal() & Window(w), backend=backend), want)
        assert_probe(probe(8, 8, mask=Window(left=w - 1, right=0), backend=backend), want)


@each_backend
@pytest.mark.parametrize("cache", [*ALL_CACHES, "rolling just so"])
@pytest.mark.parametrize("chunks", [[4, 1, 1, 1, 1], [8], [1] * 8, [3, 5]], ids=str)
def test_win_2_single_steps_see_the_same_window(chunks, cache, backend):
    """The window left the new token out in single steps, and not in one pass."""
    made = counter(Causal() & Window(3), backend=backend)
    kept = RollingCache(3) if cache == "rolling just so" else ALL_CACHES[cache]()
    with torch.no_grad():
        outs = [made(chunk, cache=kept) for chunk in torch.arange(8.0)[:, None].split(chunks)]
    assert_probe(torch.cat(outs)[:, 0], SLIDING)
    start, outs = 0, []
    for count in chunks:
        places = Positions(count, start=start)
        start += count
        outs.append(probe(count, start, mask=Causal() & Window(3), query_positions=places, backend=backend))
    assert_probe(torch.cat(outs, -1), SLIDING)


@every_backend
def test_win_3_a_window_needs_no_other_mask(backend):
    """It was ignored wherever no explicit mask was given."""
    query, key, value = (randn(1, 2, 40, 5, seed=i) for i in range(3))
    place = torch.arange(40)
    near = (place[:, None] - place).abs() < 4
    check(backend, query, key, value, near, mask=Window(4))
    everything = Dense(torch.ones(40, 40, dtype=torch.bool))
    for mask in (Window(4) & everything, Full() & Window(4), Window(4) & Padding(40)):
        check(backend, query, key, value, near, mask=mask)


@every_backend
def test_win_4_a_side_of_0_hides_the_future(backend):
    """A window of three to the left and none to the right, without a causal flag, saw the whole future."""
    assert_probe(probe(6, 6, mask=Window(left=2, right=0), backend=backend), [0, 0.5, 1, 2, 3, 4])
    assert_probe(probe(6, 6, mask=Window(left=0, right=2), backend=backend), [1, 2, 3, 4, 4.5, 5])
    assert_probe(probe(6, 6, mask=Window(left=0, right=0), backend=backend), [0.0, 1, 2, 3, 4, 5])
    assert_probe(probe(6, 6, mask=Window(right=0), backend=backend), [t / 2 for t in range(6)])


PACKED = [0, 0.5, 1, 3, 3.5]


@every_backend
@pytest.mark.parametrize("ids", ["lengths", "tensor", "two tensors"])
def test_win_5_documents_in_one_row_stay_apart(ids, backend):
    """Positions that restart do not keep documents apart; a mask does, whatever the first one holds."""
    numbers = torch.tensor([0, 0, 0, 1, 1])
    mask = {
        "lengths": Document.from_lengths([3, 2]),
        "tensor": Document(numbers),
        "two tensors": Document(numbers, numbers[None]),
    }[ids]
    assert_probe(probe(5, 5, mask=Causal() & mask, backend=backend), PACKED)
    rotary, place = RotaryEmbedding(4), torch.tensor([[0, 1, 2, 0, 1]])
    query, key, value = (randn(1, 2, 5, 4, seed=i) for i in range(3))
    outs = []
    for change in (0.0, 7.0):
        k, v = key.clone(), value.clone()
        k[:, :, :3] += change
        v[:, :, :3] += change
        outs.append(attention(rotary(query, place), rotary(k, place), v, mask=Causal() & mask, backend=backend))
    assert torch.equal(outs[0][:, :, 3:], outs[1][:, :, 3:])
    assert not torch.equal(outs[0][:, :, :3], outs[1][:, :, :3])


@every_backend
def test_win_6_a_padding_mask_does_not_join_documents(backend):
    """An all-true padding mask, or a batch of more than one, switched the separation off."""
    everything = torch.ones(1, 5, dtype=torch.bool)
    for padding in (Padding(everything), Padding(5), Padding([5]), Full()):
        for documents in (Document.from_lengths([3, 2]), Document(torch.tensor([4, 4, 4, 9, 9]))):
            for mask in (Causal() & documents & padding, padding & documents & Causal()):
                assert_probe(probe(5, 5, mask=mask, backend=backend), PACKED)
    two = Document(torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 2]]))
    want = torch.tensor([PACKED, [0, 1, 1.5, 2, 4]])[:, None].expand(2, 2, 5)
    for mask in (Causal() & two, Causal() & two & Padding(everything.expand(2, 5)), Causal() & two & Padding([5, 5])):
        assert_probe(probe(5, 5, batch=2, mask=mask, backend=backend), want)


@every_backend
def test_win_7_chunks_are_counted_from_the_first_real_token(backend):
    """They were counted from the start of the row, so a left-padded row had its borders in the wrong place."""
    alone = [0, 0.5, 1, 1.5, 4, 4.5]
    assert_probe(probe(6, 6, mask=Causal() & Chunk(4), backend=backend), alone)
    left = torch.tensor([0, 2])
    mask = Causal() & Chunk(4, start=left) & Padding(left=left)
    got = probe(8, 8, batch=2, mask=mask, backend=backend)
    assert_probe(got[1:, :, 2:] - 2, torch.tensor(alone).expand(1, 2, 6), slots=8)
    assert (got[1, :, :2] == 0).all()
    assert_probe(got[:1], torch.tensor([0, 0.5, 1, 1.5, 4, 4.5, 5, 5.5]).expand(1, 2, 8))

    query, key, value = (randn(1, 2, 8, 5, seed=i) for i in range(3))
    padded = attention(query, key, value, mask=Causal() & Chunk(4, start=[2]) & Padding(left=[2]), backend=backend)
    place = torch.arange(6)
    allowed = (place[:, None] // 4 == place // 4) & (place[:, None] >= place)
    real = [t[:, :, 2:] for t in (query, key, value)]
    want, plain = oracle.attend(*real, allowed)[0], plain_attention(*real, allowed)[0]
    assert_as_good_as(padded[:, :, 2:], want, plain, terms=13)


@every_backend
@every_cache
@pytest.mark.parametrize("steps", [[8], [5, 1, 1, 1], [3, 4, 1]], ids=str)
@torch.no_grad()
def test_win_7_chunks_through_a_cache(steps, cache, backend):
    """The same in a generation: one row with 2 pads in front, one without; and rows of real tokens only."""
    left = torch.tensor([0, 2])
    made, kept = counter(PAST, backend=backend), CACHES[cache]()
    numbers = torch.arange(8.0).expand(2, 8)[..., None]
    mask = Chunk(4, start=left) & Padding(left=left)
    got = torch.cat([made(chunk, mask=mask, cache=kept) for chunk in numbers.split(steps, 1)], 1)[..., 0]
    assert_probe(got[1, 2:] - 2, [0, 0.5, 1, 1.5, 4, 4.5], slots=8)
    assert_probe(got[0], [0, 0.5, 1, 1.5, 4, 4.5, 5, 5.5])

    kept, outs = CACHES[cache](), []
    lengths = torch.tensor([8, 6])
    for start, stop in zip(range(0, 8, 3), (3, 6, 8), strict=True):
        real = (lengths - start).clamp(0, stop - start)
        outs.append(made(numbers[:, start:stop], mask=Chunk(4), cache=kept, lengths=real))
    got = torch.cat(outs, 1)[..., 0]
    assert_probe(got[0], [0, 0.5, 1, 1.5, 4, 4.5, 5, 5.5])
    assert_probe(got[1, :6], [0, 0.5, 1, 1.5, 4, 4.5], slots=8)
