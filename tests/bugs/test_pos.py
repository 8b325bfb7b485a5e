"""POS: positions, in rotary embeddings and in biases by distance."""

import copy

import oracle
import pytest
import torch
from helpers import assert_as_good_as, plain_attention, randn
from reports import CACHES, PAST, counter, each_backend, every_backend, every_cache, formula, layer

from headwise import (
    ALiBi,
    Padding,
    Positions,
    RelativeBias,
    RotaryEmbedding,
    ShapeError,
    attention,
    attention_weights,
)
from headwise.linear import project


@every_cache
@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_pos_1_a_position_counts_the_real_tokens_before(side, interleaved, cache):
    """Padded rows got the positions of the padded width, or all rows the same one."""
    rotary = RotaryEmbedding(6, interleaved=interleaved)
    made = layer(24, 4, num_kv_heads=2, mask=PAST, rotary=rotary)
    x = randn(2, 8, 24)  # a prompt of 5 and 3 steps; in the second row 3 of the prompt are padding
    kept, got = CACHES[cache](), []
    if side == "left":
        left = torch.tensor([0, 3])
        for start, stop in ((0, 5), (5, 6), (6, 7), (7, 8)):
            places = Positions(stop - start, start=start, offset=-left)
            got.append(made(x[:, start:stop], cache=kept, mask=Padding(left=left), positions=places))
        rows = [torch.cat(got, 1)[0], torch.cat(got, 1)[1, 3:]]
        alone = [x[0], x[1, 3:]]
    else:
        lengths = torch.tensor([5, 2])
        got = [
            made(x[:, :5], cache=kept, lengths=lengths),
            *(made(token, cache=kept) for token in x[:, 5:].split(1, 1)),
        ]
        rows = [torch.cat(got, 1)[0], torch.cat([got[0][1, :2], *(step[1] for step in got[1:])])]
        alone = [x[0], torch.cat([x[1, :2], x[1, 5:]])]
    for row, tokens in zip(rows, alone, strict=True):
        want = rotated(made, tokens[None].double(), oracle.attend, interleaved)
        plain = rotated(made, tokens[None], plain_attention, interleaved)
        assert_as_good_as(row[None], want, plain, terms=3 * 24 + len(tokens))


def rotated(made, x, attend, interleaved):
    """The layer's formula for one sequence from position 0, with the angles of each pair written out."""
    made = copy.deepcopy(made).to(x.dtype)
    count, size = x.shape[1], made.head_dim
    angle = torch.outer(torch.arange(count, dtype=x.dtype), 10_000.0 ** (-torch.arange(0, size, 2).to(x.dtype) / size))

    def turned(heads):
        a, b = (heads[..., 0::2], heads[..., 1::2]) if interleaved else heads.chunk(2, -1)
        a, b = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
        return torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)

    def attend_turned(q, k, v, allowed):
        return attend(turned(q), turned(k), v, allowed)

    return formula(made, attend_turned, x, allowed=torch.ones(count, count, dtype=torch.bool).tril())[0]


HALF = (torch.float16, torch.bfloat16)
both_layouts = pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])


def table(rotary, position, dtype=torch.float32):
    """Cosine and sine of each pair: what becomes of (1, 0), tokens first."""
    x = torch.zeros(1, 1, len(position), rotary.head_dim, dtype=dtype)
    first = slice(0, None, 2) if rotary.interleaved else slice(0, rotary.head_dim // 2)
    x[..., first] = 1
    turned = rotary(x, position[None])[0, 0]
    return turned.unflatten(-1, (-1, 2) if rotary.interleaved else (2, -1))


def exact_table(position, size, base=10_000.0, interleaved=False):
    angle = position.double()[:, None] * base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    return torch.stack([angle.cos(), angle.sin()], -1 if interleaved else -2)


@both_layouts
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_pos_2_tables_are_in_float32_whatever_the_model(dtype, interleaved):
    """Tables in half precision were off by up to 0.8, and by 2, the whole way, in bfloat16."""
    position = torch.arange(2048)
    want = exact_table(position, 32, interleaved=interleaved)
    plain = RotaryEmbedding(32, interleaved=interleaved)
    assert (table(plain, position) - want).abs().max() < 1e-3
    cast = copy.deepcopy(plain).to(dtype)
    assert torch.equal(table(cast, position), table(plain, position))
    assert torch.equal(table(cast, position, dtype), table(plain, position).to(dtype))
    made = layer(64, 2, rotary=plain).to(dtype)
    seen = []
    made.observer = lambda x, out, lse: seen.append(x.query)
    x = randn(1, 2048, 64, dtype=dtype)
    made(x)
    projected = project(made.q_proj, x).unflatten(-1, (2, 32)).transpose(1, 2)
    assert seen[0].dtype == dtype and torch.equal(seen[0], plain(projected.float(), position[None]).to(dtype))


@both_layouts
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_pos_3_positions_stay_whole_numbers(dtype, interleaved):
    """Positions cast to half precision: above 2048 neighbours coincided."""
    rotary = RotaryEmbedding(2, interleaved=interleaved).to(dtype)
    turned = table(rotary, torch.arange(32768)).flatten(1)
    assert len(turned.unique(dim=0)) == 32768


@pytest.mark.plain
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_pos_3_positions_in_half_precision_are_refused(dtype):
    """They cannot be whole numbers above 2048, so they are taken as none."""
    with pytest.raises(ShapeError, match="whole number per token"):
        RotaryEmbedding(2)(torch.zeros(1, 1, 3, 2, dtype=dtype), torch.arange(3, dtype=dtype)[None])


@both_layouts
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_pos_4_autocast_leaves_angles_alone(dtype, interleaved):
    """Angles computed by a matmul fell under autocast, and eight neighbours far away had one angle."""
    position = torch.arange(65536, 65544)
    rotary = RotaryEmbedding(8, interleaved=interleaved)
    want = table(rotary, position)
    with torch.autocast("cpu", dtype=dtype):
        got = table(rotary, position)
    assert got.dtype == torch.float32 and torch.equal(got, want)
    assert len(got.flatten(1).unique(dim=0)) == 8


@both_layouts
def test_pos_5_a_score_depends_on_the_distance_alone(interleaved):
    """Tables laid out for one kind of pairs, and a rotation of the other: scores moved with the position."""
    rotary = RotaryEmbedding(8, interleaved=interleaved)
    query, key = (randn(1, 1, 1, 8, seed=seed, dtype=torch.float64).expand(1, 1, 6, 8) for seed in (1, 2))
    place = torch.arange(6)[None]
    for distance in (0, 1, 5):
        scores = (rotary(query, place) * rotary(key, place + distance)).sum(-1)[0, 0]
        assert_as_good_as(scores, scores[:1].expand(6), terms=8, inner=(query.norm() * key.norm()).item())


@torch.no_grad()
def test_pos_5_the_layouts_differ_by_a_permutation_of_the_projections():
    """A checkpoint of the other layout gives the same outputs once its rows are permuted."""
    pairs = layer(24, 3, num_kv_heads=1, mask=PAST, rotary=RotaryEmbedding(8, interleaved=True)).double()
    halves = copy.deepcopy(pairs)
    halves.rotary = RotaryEmbedding(8)
    x = randn(2, 7, 24, dtype=torch.float64)
    assert not torch.equal(halves(x), pairs(x))
    for projection in (halves.q_proj, halves.k_proj):
        for parameter in projection.parameters():
            parameter.copy_(parameter.unflatten(0, (-1, 4, 2)).transpose(1, 2).flatten(0, 2))
    assert_as_good_as(halves(x), pairs(x), terms=3 * 24 + 7)


def slope_1(kind):
    """Minus the distance: as a slope, and as a table of T5 whose first eight buckets hold one distance each."""
    if kind == "ALiBi":
        return ALiBi(1, torch.tensor([1.0]))
    made = RelativeBias(1, num_buckets=16, bidirectional=False)
    with torch.no_grad():
        made.table.copy_(-torch.arange(16.0)[:, None])
    return made


both_biases = pytest.mark.parametrize("bias", ["ALiBi", "T5"])


@every_cache
@both_biases
@pytest.mark.parametrize("steps", [[4], [1] * 4, [2, 2], [3, 1]], ids=str)
@torch.no_grad()
def test_pos_6_a_bias_by_distance_reaches_all_stored_keys(steps, bias, cache):
    """A bias was made for the queries' length alone: it failed for chunks, and was zero for single steps."""
    made = counter(PAST, score_mods=[slope_1(bias)])
    kept = CACHES[cache]()
    got = torch.cat([made(chunk, cache=kept) for chunk in torch.arange(4.0)[:, None].split(steps)])
    weights = torch.exp(-torch.arange(4, dtype=torch.float64))  # of the key at each distance
    want = torch.stack([(torch.arange(t, -1, -1) * weights[: t + 1]).sum() / weights[: t + 1].sum() for t in range(4)])
    assert_as_good_as(got[:, 0], want, terms=4)


@every_cache
@both_biases
@pytest.mark.parametrize("steps", [[7], [4, 1, 1, 1], [2, 3, 2]], ids=str)
@torch.no_grad()
def test_pos_6_distances_in_rows_with_padding_in_front(steps, bias, cache):
    """Stored keys keep the positions that their rows gave them: a distance is one of real tokens."""
    made, kept = counter(PAST, score_mods=[slope_1(bias)]), CACHES[cache]()
    left, outs, done = torch.tensor([0, 3]), [], 0
    for chunk in torch.arange(7.0).expand(2, 7)[..., None].split(steps, 1):
        places = Positions(chunk.shape[1], start=done, offset=-left)
        outs.append(made(chunk, cache=kept, mask=Padding(left=left), positions=places))
        done += chunk.shape[1]
    got = torch.cat(outs, 1)[..., 0]
    place = torch.arange(7)
    scores = (place - place[:, None]).double()
    for row, pads in enumerate(left.tolist()):
        weights = scores.masked_fill((scores > 0) | (place < pads), -torch.inf)[pads:].softmax(-1)
        assert_as_good_as(got[row, pads:], weights @ place.double(), terms=7)


@each_backend
@both_biases
def test_pos_6_a_single_step_by_positions_alone(bias, backend):
    """Row 3 of four: its weights are as e^-3, e^-2, e^-1 and 1."""
    query, key = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 4, 2)
    mods = [slope_1(bias)]
    weights = torch.exp(torch.arange(-3.0, 1, dtype=torch.float64))
    got = attention_weights(query, key, mask=PAST, score_mods=mods)[0, 0, 0]
    assert_as_good_as(got, weights / weights.sum(), terms=4)
    value = torch.eye(4)[None, None]
    got = attention(query, key, value, mask=PAST, score_mods=mods, backend=backend)[0, 0, 0]
    assert_as_good_as(got, weights / weights.sum(), terms=4)


@every_backend
def test_pos_7_slopes_of_any_number_of_heads_favour_near_keys(backend):
    """Slopes were wrong where the heads are no power of two; elsewhere the sign was turned."""
    want = [2.0**-n for n in range(1, 9)] + [2.0 ** -(n + 0.5) for n in range(4)]
    assert_as_good_as(ALiBi(12).slopes, torch.tensor(want, dtype=torch.float64), terms=1)
    query, key, value = torch.zeros(1, 12, 6, 2), torch.zeros(1, 12, 6, 2), torch.eye(6).expand(1, 12, 6, 6)
    weights = attention(query, key, value, mask=PAST, score_mods=[ALiBi(12)], backend=backend)[0]
    place = torch.arange(6)
    distance = (place[:, None] - place).double()
    bias = -torch.tensor(want, dtype=torch.float64)[:, None, None] * distance
    exact = bias.masked_fill(distance < 0, -torch.inf).softmax(-1)
    assert_as_good_as(weights, exact, terms=6)
    for t in range(1, 6):
        assert (weights[:, t, 1 : t + 1] > weights[:, t, :t]).all()
    both = attention(query, key, value, score_mods=[ALiBi(12)], backend=backend)[0]  # on either side of the query
    assert (both.argmax(-1) == place).all()
