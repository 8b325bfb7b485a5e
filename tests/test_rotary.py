"""Rotary embedding against complex numbers in float64, and against published numbers."""

import pytest
import torch
from cases import ROTARY
from helpers import assert_as_good_as, assert_published, leaf, randn

from headwise import MultiHeadAttention, Positions, RotaryEmbedding, ShapeError, attention_weights

POSITION = torch.tensor([[0, 1, 2, 17, 2049], [3, 5, 0, 4096, 1]])


def by_complex_numbers(x, position, interleaved, base, dtype=torch.complex128):
    """Each pair is a complex number, turned by multiplying it with e^(i · position · frequency)."""
    size = x.shape[-1]
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    real = torch.float64 if dtype == torch.complex128 else torch.float32
    turn = torch.tensor([base ** (-2 * i / size) for i in range(size // 2)], dtype=real)
    angle = position[:, None, :, None].to(real) * turn
    turned = torch.view_as_complex(pairs.contiguous().to(real)) * torch.polar(torch.ones_like(angle), angle)
    back = torch.view_as_real(turned)
    return back.flatten(-2) if interleaved else back.transpose(-1, -2).flatten(-2)


@pytest.mark.parametrize("interleaved, base", ROTARY)
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16))
def test_turns_pairs_as_complex_numbers_do(interleaved, base, dtype):
    x = randn(2, 3, 5, 14, dtype=dtype)
    rotary = RotaryEmbedding(14, base=base, interleaved=interleaved)
    for position in (POSITION, POSITION[:1]):
        ours, other = leaf(x), leaf(x, torch.float64)
        third = leaf(x, torch.float32)
        got = rotary(ours, position)
        want = by_complex_numbers(other, position, interleaved, base)
        plain = by_complex_numbers(third, position, interleaved, base, torch.complex64)
        grad = randn(*x.shape, seed=1, dtype=dtype)
        assert got.dtype == dtype
        # an angle of some thousand radians carries that many roundings of float32
        assert_as_good_as(got, want, plain, terms=2, what="turned")
        assert_as_good_as(
            *(torch.autograd.grad(y, z, grad.to(y.dtype))[0] for y, z in ((got, ours), (want, other), (plain, third))),
            terms=2,
            what="gradient",
        )


def test_published_numbers():
    source = "Su et al. 2021, equation 34: the pair (x1, x2) turns by m·theta; cosine and sine of 1 and 0.01 radians"
    x = torch.tensor([1.0, 0.0, 1.0, 0.0])[None, None, None]
    got = RotaryEmbedding(4, interleaved=True)(x, torch.tensor([[1]])).flatten()
    assert_published(got, [0.540302, 0.841471, 0.999950, 0.010000], rtol=0, atol=1e-6, source=source)


def test_scores_depend_on_distance_alone():
    query, key = (randn(1, 1, 1, 14, seed=s, dtype=torch.float64).expand(1, 1, 9, 14) for s in (1, 2))
    for interleaved, base in ROTARY:
        rotary = RotaryEmbedding(14, base=base, interleaved=interleaved)
        position = torch.arange(9)[None] + 1000
        scores = (rotary(query, position) @ rotary(key, position).mT)[0, 0]
        for distance in range(-8, 9):
            line = scores.diagonal(distance)
            # an angle near 1000 is rounded to a thousandth of what an angle near 1 is
            size = 1000 * query.norm().item() * key.norm().item()
            assert_as_good_as(line, line[:1].expand_as(line), terms=14, inner=size)


def test_position_zero_and_lengths_stay():
    x = randn(2, 3, 5, 14)
    for interleaved in (False, True):
        rotary = RotaryEmbedding(14, interleaved=interleaved)
        assert rotary(x, torch.zeros(1, 5, dtype=torch.int64)).equal(x)
        y, want = rotary(x.double(), POSITION), x.double().square().sum(-1)
        assert_as_good_as(y.square().sum(-1), want, terms=14)


def test_the_layouts_are_a_permutation_of_each_other():
    x = randn(2, 3, 5, 14, dtype=torch.float64)
    half = torch.cat([torch.arange(0, 14, 2), torch.arange(1, 14, 2)])  # neighbours to halves
    ours = RotaryEmbedding(14)(x[..., half], POSITION)
    assert ours.equal(RotaryEmbedding(14, interleaved=True)(x, POSITION)[..., half])


def test_neighbours_far_away_are_told_apart_in_half_precision():
    x = torch.ones(1, 1, 2, 2, dtype=torch.bfloat16)
    near = RotaryEmbedding(2)(x, torch.tensor([[100_000, 100_001]]))
    assert not near[..., 0, :].equal(near[..., 1, :])


def test_autocast_leaves_the_tables_in_float32():
    x = randn(1, 1, 3, 6)
    position = torch.tensor([[7, 5000, 5001]])
    with torch.autocast("cpu", torch.bfloat16):
        assert RotaryEmbedding(6)(x, position).equal(RotaryEmbedding(6)(x, position))
        inside = RotaryEmbedding(6)(x, position)
    assert inside.equal(RotaryEmbedding(6)(x, position))


def test_a_layer_turns_queries_and_keys_by_their_positions():
    layer = MultiHeadAttention(12, 2, rotary=RotaryEmbedding(6, base=100.0)).double()
    seen = []
    layer.observer = lambda x, out, lse: seen.append((x.query, x.key)) and None
    x = torch.randn(1, 5, 12, dtype=torch.float64)
    layer(x)
    layer(x, positions=Positions(5, start=0, offset=3))
    for offset, (query, key) in zip((0, 3), seen, strict=True):
        for turned, projection in ((query, layer.q_proj), (key, layer.k_proj)):
            plain = projection(x).unflatten(-1, (2, 6)).transpose(1, 2)
            want = by_complex_numbers(plain, torch.arange(5)[None] + offset, False, 100.0)
            assert_as_good_as(turned, want, terms=6)
    first, moved = (attention_weights(*pair) for pair in seen)
    assert_as_good_as(moved, first, terms=6 * 5)


def test_state_and_text():
    assert not RotaryEmbedding(6).state_dict()
    assert repr(RotaryEmbedding(6, interleaved=True)) == "RotaryEmbedding(6, base=10000, interleaved)"
    assert repr(RotaryEmbedding(6, base=500.0)) == "RotaryEmbedding(6, base=500)"


@pytest.mark.plain
def test_what_cannot_be_turned_is_refused():
    for call in (
        lambda: RotaryEmbedding(5),
        lambda: RotaryEmbedding(0),
        lambda: RotaryEmbedding(6, base=0),
        lambda: RotaryEmbedding(6)(torch.zeros(1, 1, 3, 4), torch.zeros(1, 3).long()),
        lambda: MultiHeadAttention(12, 2, rotary=RotaryEmbedding(4)),
    ):
        with pytest.raises(ShapeError):
            call()
