"""Rotary embedding against complex numbers in float64, and against published numbers."""

import copy
import inspect
import pickle

import pytest
import torch
from cases import ROTARY, RotaryCase
from helpers import assert_as_good_as, assert_published, leaf, randn

from headwise import (
    DynamicNTKSchedule,
    Llama3Schedule,
    LongRoPESchedule,
    MultiHeadAttention,
    Positions,
    ProportionalSchedule,
    RotaryEmbedding,
    Schedule,
    ShapeError,
    YaRNSchedule,
    attention_weights,
    rotate,
)

FAR = torch.tensor([[0, 1, 2, 17, 2049], [3, 5, 0, 4096, 1]])
NEAR = torch.tensor([[0, 1, 2, 11, 29], [3, 5, 0, 23, 1]])
every_case = pytest.mark.parametrize("case", ROTARY, ids=lambda case: case.name)
SCHEDULES = {type(case.given["schedule"]) for case in ROTARY if "schedule" in case.given}


def positions(case, near=NEAR):
    """Positions for a case: another row of numbers for each of its axes."""
    if case.axes is None:
        return near
    return torch.stack([near.roll(axis, 1) for axis in range(max(case.axes) + 1)])


def by_complex_numbers(x, position, case, dtype=torch.complex128):
    """Each pair is a complex number, turned by multiplying it with scaling · e^(i · position · frequency)."""
    real = torch.float64 if dtype == torch.complex128 else torch.float32
    turns = torch.tensor(case.turns(int(position.max()) + 1), dtype=real)
    x, rest = x[..., : 2 * len(turns)], x[..., 2 * len(turns) :]
    interleaved = case.given.get("interleaved", False)
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    place = position[..., None].expand(*position.shape, len(turns))
    if position.dim() == 3:
        place = torch.stack([position[axis] for axis in case.axes], -1)
    angle = place[:, None].to(real) * turns
    turned = torch.view_as_complex(pairs.contiguous().to(real)) * torch.polar(torch.ones_like(angle), angle)
    back = torch.view_as_real(turned * case.scaling)
    back = back.flatten(-2) if interleaved else back.transpose(-1, -2).flatten(-2)
    return torch.cat([back, rest.to(real)], -1)


def check(case, dtype, position):
    x = randn(2, 3, 5, case.head_dim, dtype=dtype)
    ours, other, third = leaf(x), leaf(x, torch.float64), leaf(x, torch.float32)
    got = case.make()(ours, position)
    want = by_complex_numbers(other, position, case)
    plain = by_complex_numbers(third, position, case, torch.complex64)
    grad = randn(*x.shape, seed=1, dtype=dtype)
    assert got.dtype == dtype
    terms = 8 if "schedule" in case.given else 2  # as many steps follow one another to a frequency
    assert_as_good_as(got, want, plain, terms=terms, what="turned")
    assert_as_good_as(
        *(torch.autograd.grad(y, z, grad.to(y.dtype))[0] for y, z in ((got, ours), (want, other), (plain, third))),
        terms=terms,
        what="gradient",
    )


@every_case
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_turns_pairs_as_complex_numbers_do(case, dtype):
    check(case, dtype, positions(case))
    check(case, dtype, positions(case)[..., :1, :])
    check(case, dtype, NEAR)  # one number a token is that of every axis


@pytest.mark.parametrize("case", ROTARY[:3], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_far_away(case, dtype):
    # an angle of some thousand radians carries that many roundings of float32
    check(case, dtype, FAR)


def test_published_numbers():
    source = "Su et al. 2021, equation 34: the pair (x1, x2) turns by m·theta; cosine and sine of 1 and 0.01 radians"
    x = torch.tensor([1.0, 0.0, 1.0, 0.0])[None, None, None]
    got = RotaryEmbedding(4, interleaved=True)(x, torch.tensor([[1]])).flatten()
    assert_published(got, [0.540302, 0.841471, 0.999950, 0.010000], rtol=0, atol=1e-6, source=source)


def test_torchtune():
    source = "torchtune's tests of its rotary embeddings, with their default tolerance; x has 33,554,432 numbers"
    torch.manual_seed(0)
    x_BTHD = torch.randn(4, 2048, 32, 128)
    for schedule, mean, largest in ((None, 6.4543e-05, 5.4546), (Llama3Schedule(8.0, 8192), -2.4781e-06, 5.4625)):
        rotary = RotaryEmbedding(128, interleaved=True, schedule=schedule)
        got = rotary(x_BTHD.transpose(1, 2), torch.arange(2048)[None]).transpose(1, 2)
        assert_published(got.mean(), mean, rtol=1e-5, atol=1e-8, source=source)
        assert_published(got.max(), largest, rtol=1e-5, atol=1e-8, source=source)
        if schedule is None:  # a sum near 0 depends on the order of all those numbers
            assert_published(got.sum(), 2165.7053, rtol=1e-5, atol=1e-8, source=source)


@every_case
def test_scores_depend_on_distance_alone(case):
    query, key = (randn(1, 1, 1, case.head_dim, seed=s, dtype=torch.float64).expand(1, 1, 9, -1) for s in (1, 2))
    rotary = case.make()
    for start in (0, 1000):
        position = torch.arange(9)[None] + start
        scores = (rotary(query, position, 1009) @ rotary(key, position, 1009).mT)[0, 0]
        for distance in range(-8, 9):
            line = scores.diagonal(distance)
            # an angle near 1000 is rounded to a thousandth of what an angle near 1 is
            size = max(1, start) * case.scaling**2 * query.norm().item() * key.norm().item()
            assert_as_good_as(line, line[:1].expand_as(line), terms=case.head_dim, inner=size)


@every_case
def test_position_zero_and_lengths_stay(case):
    x = randn(2, 3, 5, case.head_dim, dtype=torch.float64)
    rotary, size = case.make(), case.given.get("rotary_dim", case.head_dim)
    still = torch.cat([x[..., :size] * case.scaling, x[..., size:]], -1)
    assert rotary(x, torch.zeros(1, 5, dtype=torch.int64)).equal(still)
    y = rotary(x, positions(case))
    assert y[..., size:].equal(x[..., size:])
    assert_as_good_as(y.square().sum(-1), still.square().sum(-1), terms=case.head_dim)


def test_the_layouts_are_a_permutation_of_each_other():
    x = randn(2, 3, 5, 14, dtype=torch.float64)
    half = torch.cat([torch.arange(0, 14, 2), torch.arange(1, 14, 2)])  # neighbours to halves
    ours = RotaryEmbedding(14)(x[..., half], FAR)
    assert ours.equal(RotaryEmbedding(14, interleaved=True)(x, FAR)[..., half])


@every_case
def test_tables_are_in_float32_whatever_the_module_is_cast_to(case):
    x, position = randn(2, 3, 5, case.head_dim), positions(case)
    want = case.make()(x, position)
    with torch.autocast("cpu", torch.bfloat16):
        inside = case.make()(x, position)
    assert inside.dtype == torch.float32 and inside.equal(want)
    assert case.make().half()(x, position).equal(want)
    low = x.bfloat16()
    assert case.make()(low, position).equal(case.make()(low.float(), position).bfloat16())


FOLLOWING = [case for case in ROTARY if case.make().follows_length]


def test_the_two_kinds_that_follow_the_length():
    assert {case.name for case in FOLLOWING} == {"dynamic", "longrope", "axes, partial, dynamic"}
    assert {kind.__name__ for kind in SCHEDULES if "length" in kind.__dataclass_fields__} == {
        "DynamicNTKSchedule",
        "LongRoPESchedule",
    }


@pytest.mark.parametrize("case", FOLLOWING, ids=lambda case: case.name)
def test_the_length_of_a_call(case):
    rotary, x = case.make(), randn(2, 3, 5, case.head_dim)
    none = rotary(x, NEAR)
    for length in (30, torch.tensor(30)):  # the highest position is 29
        assert rotary(x, NEAR, length).equal(none)
    longer = rotary(x, NEAR, 31 if "dynamic" in case.name else 16)
    assert not longer.equal(none)
    # up to the length of training nothing depends on it
    assert rotary(x, NEAR, 16).equal(rotary(x, NEAR, 3)) and not rotary(x, NEAR, 17).equal(rotary(x, NEAR, 16))
    # queries that come later and fewer than the keys are turned by the keys' frequencies
    part = rotary(x[:, :, :2], NEAR[:, :2], torch.tensor(30))
    assert part.equal(none[:, :, :2]) and not rotary(x[:, :, :2], NEAR[:, :2]).equal(part)
    assert rotary(x[:, :, :0], NEAR[:, :0]).shape == (2, 3, 0, case.head_dim)
    assert rotary(x[:0], NEAR[:0]).shape == (0, 3, 5, case.head_dim)


def test_a_length_of_its_own_fixes_the_frequencies():
    x = randn(2, 3, 5, 14)
    for follows, fixed in (
        (DynamicNTKSchedule(3.0, 16), DynamicNTKSchedule(3.0, 16, length=29)),
        (
            LongRoPESchedule(1.0, 16, (1.0,) * 7, (2.0,) * 7),
            LongRoPESchedule(1.0, 16, (1.0,) * 7, [2.0] * 7, length=29),
        ),
    ):
        rotary = RotaryEmbedding(14, schedule=fixed)
        assert not rotary.follows_length
        want = RotaryEmbedding(14, schedule=follows)(x, NEAR, 29)
        assert rotary(x, NEAR).equal(want) and rotary(x, NEAR, 16).equal(want)
        # by itself a schedule that is told nothing stands at the length of training
        plain = torch.tensor([1.0, 0.1, 0.01, 0.001, 0.001, 0.001, 0.001])
        assert follows.frequencies(plain, 10.0).equal(plain)


def test_what_schedules_do_to_few_and_odd_numbers():
    plain = torch.tensor([1.0, 0.1], dtype=torch.float64)
    # an attention factor of its own counts; without one, factors below 1 ask for none
    assert (
        YaRNSchedule(0.5, 64).attention_scaling == 1
        and YaRNSchedule(4.0, 64, attention_factor=3.0).attention_scaling == 3
    )
    assert LongRoPESchedule(0.5, 64, (1.0,), (1.0,)).attention_scaling == 1
    # both ends of the ramp at the first pair: it stays, and the next one is slowed down in full
    assert YaRNSchedule(2.0, 2).frequencies(plain, 100.0).tolist() == [1.0, 0.05]
    assert ProportionalSchedule(1.0).frequencies(plain, 100.0).equal(plain)
    assert ProportionalSchedule(0.49).frequencies(plain, 100.0).equal(plain * 0)


def test_a_layer_turns_queries_and_keys_by_their_positions():
    layer = MultiHeadAttention(12, 2, rotary=RotaryEmbedding(6, base=100.0)).double()
    case = RotaryCase("", {}, lambda n: [100.0 ** (-i / 3) for i in range(3)], 6)
    seen = []
    layer.observer = lambda x, out, lse: seen.append((x.query, x.key)) and None
    x = torch.randn(1, 5, 12, dtype=torch.float64)
    layer(x)
    layer(x, positions=Positions(5, start=0, offset=3))
    for offset, (query, key) in zip((0, 3), seen, strict=True):
        for turned, projection in ((query, layer.q_proj), (key, layer.k_proj)):
            plain = projection(x).unflatten(-1, (2, 6)).transpose(1, 2)
            want = by_complex_numbers(plain, torch.arange(5)[None] + offset, case)
            assert_as_good_as(turned, want, terms=6)
    first, moved = (attention_weights(*pair) for pair in seen)
    assert_as_good_as(moved, first, terms=6 * 5)


@every_case
def test_state_arguments_and_copies(case):
    rotary, position = case.make(), positions(case)
    x = randn(2, 3, 5, case.head_dim)
    assert not rotary.state_dict() and not list(rotary.buffers())
    names = [name for name in inspect.signature(RotaryEmbedding).parameters if name != "head_dim"]
    same = RotaryEmbedding(rotary.head_dim, **{name: getattr(rotary, name) for name in names})
    made = (same, copy.deepcopy(rotary), pickle.loads(pickle.dumps(rotary)))
    for other in made:
        assert other(x, position).equal(rotary(x, position)) and repr(other) == repr(rotary)
    if rotary.schedule is not None:
        assert all(hash(other.schedule) == hash(rotary.schedule) for other in made)
        assert same.schedule == rotary.schedule
    meta = rotary(x.to("meta"), position.to("meta"))
    assert meta.shape == x.shape and meta.is_meta


def test_text():
    assert repr(RotaryEmbedding(6, interleaved=True)) == "RotaryEmbedding(6, base=10000, interleaved)"
    assert repr(RotaryEmbedding(6, base=500.0)) == "RotaryEmbedding(6, base=500)"
    assert repr(RotaryEmbedding(8, rotary_dim=6, sections=[2, 1], spectrum="axial")) == (
        "RotaryEmbedding(8, base=10000, rotary_dim=6, sections=(2, 1), spectrum='axial')"
    )
    assert repr(RotaryEmbedding(4, schedule=DynamicNTKSchedule(2.0, 8))) == (
        "RotaryEmbedding(4, base=10000, schedule=DynamicNTKSchedule(factor=2.0, original_length=8, length=None))"
    )


def test_a_schedule_of_ones_own():
    class Doubled(Schedule):
        def frequencies(self, plain, base, length=None):
            return plain * 2

    x = randn(2, 3, 5, 6)
    rotary = RotaryEmbedding(6, schedule=Doubled())
    assert not rotary.follows_length
    assert_as_good_as(
        rotary(x, NEAR), RotaryEmbedding(6)(x.double(), NEAR * 2), RotaryEmbedding(6)(x, NEAR * 2), terms=2
    )


@pytest.mark.parametrize("interleaved", (False, True))
def test_rotate_by_tables(interleaved):
    x, angle = randn(2, 3, 5, 7), randn(2, 5, 3, seed=1)
    got = rotate(x, angle.cos(), angle.sin(), interleaved)
    for row in range(2):  # one table for all sequences
        table = angle[row : row + 1]
        assert rotate(x, table.cos(), table.sin(), interleaved=interleaved)[row].equal(got[row])
    x64, angle = x.double(), angle.double()
    first, second = (0, 2, 4, 1, 3, 5)[:3] if interleaved else (0, 1, 2), (1, 3, 5) if interleaved else (3, 4, 5)
    a, b = x64[..., first], x64[..., second]
    want = x64.clone()
    want[..., first] = a * angle.cos()[:, None] - b * angle.sin()[:, None]
    want[..., second] = a * angle.sin()[:, None] + b * angle.cos()[:, None]
    assert_as_good_as(got, want, want.float(), terms=2)
    half = rotate(x.half(), angle.cos(), angle.sin(), interleaved)
    assert half.dtype == torch.float16
    assert_as_good_as(half, want, want.float(), terms=2, inner=x.abs().max().item())


@pytest.mark.plain
@every_case
def test_compiled(case):
    torch._dynamo.reset()
    rotary, position = case.make(), positions(case)
    run = torch.compile(rotary, fullgraph=True, backend="aot_eager")
    ours, other = leaf(randn(2, 3, 5, case.head_dim)), leaf(randn(2, 3, 5, case.head_dim))
    want, got = rotary(other, position), run(ours, position)
    assert_as_good_as(got, want.double(), want, terms=2)
    grad = randn(*want.shape, seed=1)
    want, got = (torch.autograd.grad(y, x, grad)[0] for y, x in ((want, other), (got, ours)))
    assert_as_good_as(got, want.double(), want, terms=2)
    torch._dynamo.reset()


@pytest.mark.plain
@every_case
def test_exported_with_any_number_of_tokens(case):
    rotary, position = case.make(), positions(case)
    tokens = torch.export.Dim("tokens", min=1, max=64)
    axis = position.dim() - 1
    x = randn(2, 3, 5, case.head_dim)
    exported = torch.export.export(rotary, (x, position), dynamic_shapes=({2: tokens}, {axis: tokens})).module()
    for count in (5, 7, 1):
        x = randn(2, 3, count, case.head_dim)
        place = torch.arange(count).expand(*position.shape[:-1], count) * 5
        want = rotary(x, place)
        assert_as_good_as(exported(x, place), want.double(), want, terms=2)


@pytest.mark.plain
def test_a_length_given_as_a_tensor_costs_no_new_compilation():
    torch._dynamo.reset()
    compiled = []

    def count(graph, inputs):
        compiled.append(graph)
        return graph.forward

    rotary, x = RotaryEmbedding(14, schedule=DynamicNTKSchedule(3.0, 16)), randn(2, 3, 5, 14)
    run = torch.compile(rotary, fullgraph=True, backend=count)
    for length in range(14, 20):
        want = rotary(x, NEAR, length)
        assert_as_good_as(run(x, NEAR, torch.tensor(length)), want.double(), want, terms=2)
    assert len(compiled) == 1
    torch._dynamo.reset()


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
