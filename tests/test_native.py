"""The CPU kernel, forward and backward, on every instruction set of this processor, by the tolerance rule."""

import copy
import functools
import math
import os
import random

import pytest
import torch
from cases import MASKS, SCORE_MODS, SHAPES, SMALL_SHAPES, SQUARE_MASKS
from helpers import assert_as_good_as, pairwise, randn

from headwise import (
    ALiBi,
    Bias,
    Causal,
    Chunk,
    CustomScore,
    Dense,
    Document,
    Full,
    Padding,
    Positions,
    Prefix,
    RelativeBias,
    Softcap,
    UnsupportedError,
    Window,
    attention,
    attention_weights,
    attention_with_lse,
)
from headwise.backends import native
from headwise.backends.native import MISSING, Native, instruction_sets

NEEDS = pytest.mark.skipif(MISSING is not None, reason=f"no kernel here: {MISSING}")
ISA = pytest.mark.parametrize("isa", instruction_sets() or ("none",))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = ("pairs", "avx512_bf16")
CALLS = {**SHAPES, **SMALL_SHAPES}


def check(isa, query, key, value, dtype=None, **options):
    """Output and log-sum-exp of the kernel, as near to float64 as the rule asks."""
    terms = query.shape[-1] + key.shape[-2]
    sinks = options.pop("sinks", None)

    def made(kind, backend):
        tensors = (t.to(kind) for t in (query, key, value))
        with torch.no_grad():
            given = None if sinks is None else sinks.to(kind)
            return attention_with_lse(*tensors, sinks=given, backend=backend, **options)

    with torch.no_grad():
        got = attention_with_lse(query, key, value, sinks=sinks, backend=Native(isa), **options)
    exact, plain = made(torch.float64, "reference"), made(torch.float32, "reference")
    assert got[0].dtype == query.dtype and got[1].dtype == torch.float32
    # few queries on many keys are multiplied in float32 (csrc/forward.hpp, forward)
    few = query.shape[1] // key.shape[1] * query.shape[2] <= 16 and key.shape[2] >= 64
    rounds = isa in ROUNDING and query.dtype == torch.bfloat16 and not few
    inner = _rounded_terms(query, key, value, sinks, **options) if rounds else 0.0
    for what, *three in zip(("output", "log-sum-exp"), got, exact, plain, strict=True):
        alive = three[1] > -torch.inf
        assert ((three[0] == -torch.inf) == ~alive).all(), what
        assert_as_good_as(*(t[alive] for t in three), terms=terms, what=what, inner=inner if what == "output" else 0.0)


def _rounded_terms(query, key, value, sinks, dropout_p=0.0, seed=None, **options):
    """Root of the sum of squares of what an output sums up: products of bfloat16 take weights rounded to it."""
    mods = [copy.deepcopy(mod).double() for mod in options.pop("score_mods", ())]
    given = {"score_mods": mods, "sinks": None if sinks is None else sinks.double(), **options}
    with torch.no_grad():
        weights = attention_weights(query.double(), key.double(), **given) / (1 - dropout_p)
    values = value.double().repeat_interleave(query.shape[1] // value.shape[1], 1)
    return (weights.square() @ values.square()).max().sqrt().item() if weights.numel() else 0.0


def check_gradients(isa, query, key, value, *, score_mods=(), sinks=None, **options):
    """Gradients of everything, through the output and the log-sum-exp, as near to float64 as the rule asks."""
    shape = (*query.shape[:3], value.shape[-1])
    out_grad, lse_grad = torch.randn(shape).to(query.dtype), torch.randn(shape[:3]) * 0.3

    def found(kind, backend):
        leaves = [t.detach().to(kind).requires_grad_() for t in (query, key, value)]
        if sinks is not None:
            leaves.append(sinks.detach().to(torch.promote_types(kind, torch.float32)).requires_grad_())
        mods = [copy.deepcopy(mod).to(torch.promote_types(kind, torch.float32)) for mod in score_mods]
        given = {"sinks": leaves[3] if sinks is not None else None, "score_mods": mods, "backend": backend}
        out, lse = attention_with_lse(*leaves[:3], **given, **options)
        total = (out.to(lse.dtype) * out_grad).sum() + (lse.masked_fill(lse == -torch.inf, 0) * lse_grad).sum()
        wanted = (*leaves, *(p for mod in mods for p in mod.parameters()))
        return torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)

    # the size of the terms of the sums, before anything cancels
    group, scale = query.shape[1] // key.shape[1], 2 * query.shape[-1] ** -0.5
    wide, dropped = [t.detach().double() for t in (query, key, value)], 1 - options.get("dropout_p", 0.0)
    place = {name: options[name] for name in ("mask",) if name in options}
    mods = [copy.deepcopy(mod).double().requires_grad_(False) for mod in score_mods]
    weights = attention_weights(*wide, score_mods=mods, sinks=None if sinks is None else sinks.double(), **place)
    q2, k2, v2 = (t.square() for t in (wide[0], *(t.repeat_interleave(group, 1) for t in wide[1:])))
    score = weights.square() * (out_grad.double().square() @ v2.mT / dropped**2 + lse_grad.double().square()[..., None])

    def largest(squares):
        return squares.unflatten(1, (-1, group)).sum(2).max().sqrt().item()

    inner = [
        scale * (score @ k2).max().sqrt().item(),
        scale * largest(score.mT @ q2),
        largest((weights / dropped).square().mT @ out_grad.double().square()),
        *([score.sum((0, 2, 3)).max().sqrt().item()] if sinks is not None else []),
    ]
    terms = max(query.shape[-1], key.shape[-2], value.shape[-1], query.shape[-2] * group)
    three = found(query.dtype, Native(isa)), found(torch.float64, "reference"), found(torch.float32, "reference")
    sums = score.sum((0, 2, 3)).max().sqrt().item()  # of a parameter: all rows of a head
    for number, (got, exact, plain) in enumerate(zip(*three, strict=True)):
        size = inner[number] if number < len(inner) else sums
        assert_as_good_as(got, exact, plain, terms=terms, inner=size, what=f"gradient {number}")


AXES = {
    "shape": tuple(CALLS),
    "mask": (*MASKS, *SQUARE_MASKS),
    "mods": SCORE_MODS,
    "sinks": (False, True),
    "dtype": DTYPES,
    "isa": instruction_sets() or ("none",),
}


@functools.cache  # asked of every pair of parts
def _known(shape, mods):
    lowered = [mod.lowered() for mod in mods.make(CALLS[shape], torch.float32)]
    kinds = [None if low is None else low.kind for low in lowered]
    return None not in kinds and "softcap" not in kinds[1:]


def _fits(row):
    call = CALLS[row["shape"]]
    return _known(row["shape"], row["mods"]) and (row["mask"] not in SQUARE_MASKS or call.rows == call.slots)


def _name(row):
    parts = (
        row["shape"],
        row["mask"].name,
        row["mods"].name,
        "sinks" * row["sinks"],
        str(row["dtype"])[6:],
        row["isa"],
    )
    return ", ".join(filter(None, parts))


@NEEDS
@pytest.mark.parametrize("row", pairwise(AXES, _fits), ids=_name)
def test_every_two_parts_meet(row):
    call = CALLS[row["shape"]]
    tensors = [t.detach().to(row["dtype"]) for t in call.tensors()]
    mods = [mod.requires_grad_(False) for mod in row["mods"].make(call, row["dtype"])]
    for mod in mods:
        if isinstance(mod, Bias) and mod.values.requires_grad:
            mod.values = mod.values.detach()
    sinks = randn(call.heads) if row["sinks"] else None
    check(row["isa"], *tensors, mask=row["mask"].make(call), score_mods=mods, sinks=sinks)


def random_call(draw):
    """A call that nobody thought of: sizes about the borders of blocks and tiles, strides, masks, modifications."""
    torch.manual_seed(draw.randrange(2**31))
    kv_heads, group = draw.choice([1, 2, 3]), draw.choice([1, 1, 2, 4])
    rows = draw.choice([1, 1, 2, 5, 16, 17, 63, 191, 193, 200, 386])
    slots = draw.choice([1, 3, 31, 127, 128, 129, 257, 511, 513, 1100])
    batch, heads = draw.choice([1, 2, 3]), kv_heads * group
    head_dim, v_head_dim = (draw.choice([1, 5, 8, 16, 24, 33, 64, 80, 128, 256]) for _ in range(2))
    dtype = draw.choice(DTYPES)

    def tensor(heads, length, width):
        form = draw.choice(["plain", "swapped", "sliced", "expanded", "odd"])
        if form == "swapped":
            return torch.randn(batch, length, heads, width).transpose(1, 2).to(dtype)
        if form == "sliced":
            return torch.randn(batch, heads, length + 3, width + 5).to(dtype)[:, :, 2:-1, 4:-1]
        if form == "expanded":
            return torch.randn(1, 1, length, width).to(dtype).expand(batch, heads, length, width)
        if form == "odd":  # the last dimension is not dense
            return torch.randn(batch, heads, width, length).to(dtype).mT
        return torch.randn(batch, heads, length, width).to(dtype)

    tensors = tensor(heads, rows, head_dim), tensor(kv_heads, slots, head_dim), tensor(kv_heads, slots, v_head_dim)
    lengths = [draw.randint(0, slots) for _ in range(batch)]
    masks = [
        Full(),
        Causal(),
        Causal() & Window(draw.randint(1, 2 * slots)),
        Window(left=draw.randint(0, slots), right=draw.randint(0, slots)),
        Padding(lengths),
        Causal() & Padding(lengths),
        Causal() | Prefix(draw.randint(0, slots)),
        Chunk(draw.randint(1, slots)),
        ~Window(draw.randint(1, slots)),
        Dense(torch.rand(batch, heads, rows, slots) > 0.6),
        Dense(torch.rand(rows, slots) > 0.9),
        Document(torch.arange(rows)[None] * 3 // rows, torch.arange(slots)[None] * 3 // slots) & Causal(),
    ]
    bias = torch.randn(draw.choice([1, batch]), draw.choice([1, heads]), rows, slots)
    bias = bias.masked_fill(torch.rand_like(bias) > 0.8, -torch.inf)
    mods = [
        *([Softcap(draw.choice([0.5, 5.0, 30.0]))] * (draw.random() < 0.2)),
        *([ALiBi(heads)] * (draw.random() < 0.2)),
        *([RelativeBias(heads, num_buckets=8, max_distance=20)] * (draw.random() < 0.2)),
        *([Bias(torch.nn.Parameter(bias))] * (draw.random() < 0.2)),
    ]
    options = {"mask": draw.choice(masks), "score_mods": mods, "sinks": None}
    if draw.random() < 0.3:
        options["sinks"] = torch.randn(heads)
    if draw.random() < 0.2:
        options |= {"dropout_p": draw.choice([0.1, 0.5]), "seed": draw.randrange(2**64)}
    return tensors, options


def _random_calls(seed, isa, count, checks=(check, check_gradients)):
    draw = random.Random(seed)
    for number in range(count):
        tensors, options = random_call(draw)
        try:
            for kind in checks:
                kind(isa, *tensors, **options)
        except AssertionError as error:
            shapes = [tuple(t.shape) for t in tensors]
            raise AssertionError(f"call {number} of seed {seed}: {shapes}, {tensors[0].dtype}, {options}") from error


@NEEDS
@ISA
@pytest.mark.parametrize("seed", range(3))
def test_random_calls(isa, seed):
    _random_calls(seed, isa, 30)


@NEEDS
@ISA
@pytest.mark.parametrize("score", [1e-3, 0.2, 3.0, 40.0])
def test_a_cap_is_as_good_for_small_scores(isa, score):
    query, key, value = torch.full((1, 2, 9, 1), score), torch.ones(1, 2, 1, 1), randn(1, 2, 1, 8)
    check(isa, query, key, value, score_mods=[Softcap(30.0)])  # the log-sum-exp of one key is its score
    check_gradients(isa, query, key, value, score_mods=[Softcap(30.0)])


@NEEDS
@ISA
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 125))
def test_ten_thousand_random_calls(isa, seed):
    _random_calls(seed, isa, 400 // len(instruction_sets()))


@NEEDS
@ISA
def test_threads_do_not_change_a_bit(isa):
    draw, threads = random.Random(7), torch.get_num_threads()
    try:
        for _ in range(12):
            tensors, options = random_call(draw)
            results = []
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                leaves = [t.detach().clone().requires_grad_() for t in tensors]
                found = attention_with_lse(*leaves, backend=Native(isa), **options)
                alive = found[1].masked_fill(found[1] == -torch.inf, 0)
                results.append((*found, *torch.autograd.grad(found[0].sum() + alive.sum(), leaves)))
            for other in results[1:]:
                assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    finally:
        torch.set_num_threads(threads)


@NEEDS
@ISA
@pytest.mark.parametrize("rows", [1, 40], ids=["few queries", "many"])
def test_what_nobody_sees_does_not_leak(isa, rows):
    query, key, value = randn(2, 2, rows, 16), randn(2, 2, 300, 16), randn(2, 2, 300, 16)
    mask = Padding([300, 150])
    wanted = attention(query, key, value, mask=mask, backend=Native(isa))
    for poison in (math.nan, math.inf):
        dirty = [t.clone() for t in (key, value)]
        for t in dirty:
            t[1, :, 150:] = poison
        assert torch.equal(attention(query, *dirty, mask=mask, backend=Native(isa)), wanted)
    key[0, :, 7] = math.nan
    seen = attention(query, key, value, mask=mask, backend=Native(isa))
    assert seen[0].isnan().all() and torch.equal(seen[1], wanted[1]), "what may be seen stays visible"


@NEEDS
@ISA
@pytest.mark.parametrize("rows", [3, 40], ids=["few queries", "many"])
def test_a_query_that_sees_nothing_gives_zeros_whatever_it_holds(isa, rows):
    query, key, value = randn(1, 2, rows, 8), randn(1, 2, 50, 8), randn(1, 2, 50, 8)
    query[:, :, 1] = math.nan
    seen = torch.ones(rows, 50, dtype=torch.bool)
    seen[1] = False
    out, lse = attention_with_lse(query, key, value, mask=Dense(seen), backend=Native(isa))
    assert (out[:, :, 1] == 0).all() and (lse[:, :, 1] == -torch.inf).all()
    assert not out.isnan().any()


@NEEDS
@ISA
@pytest.mark.parametrize("sizes", [(0, 2, 3, 5, 4), (1, 2, 0, 5, 4), (1, 2, 3, 0, 4)], ids=["batch", "rows", "slots"])
def test_empty_sizes(isa, sizes):
    batch, heads, rows, slots, dim = sizes
    tensors = randn(batch, heads, rows, dim), randn(batch, heads, slots, dim), randn(batch, heads, slots, dim)
    out, lse = attention_with_lse(*tensors, sinks=torch.tensor([0.5, -torch.inf]), backend=Native(isa))
    assert out.shape == (batch, heads, rows, dim) and (out == 0).all()
    assert torch.equal(lse, torch.tensor([0.5, -torch.inf])[None, :, None].expand(batch, heads, rows))


@NEEDS
@ISA
def test_float16_scores_beyond_its_range(isa):
    query = torch.full((1, 1, 20, 256), 60.0, dtype=torch.float16)
    key = randn(1, 1, 30, 256).half() * 100
    check(isa, query, key, randn(1, 1, 30, 8).half(), scale=1.0)


@NEEDS
def test_bits_of_half_types_are_those_of_torch():
    """One key: the output is the value, read and written again; every bfloat16 and float16 that is finite."""
    for dtype in (torch.bfloat16, torch.float16):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        value = every[every.isfinite()][None, None, :, None]
        query, key = torch.ones(1, 1, value.shape[2], 1, dtype=dtype), torch.zeros_like(value)
        seen = Window(1)
        for isa in instruction_sets():
            assert torch.equal(attention(query, key, value, mask=seen, backend=Native(isa)), value)


X = torch.ones(1, 2, 3, 4)


class _Marked(torch.Tensor):
    """A subclass that does nothing."""


def _with_tangent():
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(X, X)
        return attention(x, x, x, backend=Native())


REASONS = {
    "it computes in float32, bfloat16 and float16 only": lambda: attention(*[X.double()] * 3, backend=Native()),
    "its dropout is for runs of tokens that start at the same number": lambda: attention(
        X, X, X, dropout_p=0.5, query_positions=Positions(3, torch.tensor([0])), backend=Native()
    ),
    "its heads have at most 256 features": lambda: attention(*[torch.ones(1, 1, 2, 257)] * 3, backend=Native()),
    "it knows no custom modification of scores": lambda: attention(
        X, X, X, score_mods=[CustomScore(lambda score, b, h, q, k: score)], backend=Native()
    ),
    "it caps scores before anything else": lambda: attention(
        X, X, X, score_mods=[ALiBi(2), Softcap(1.0)], backend=Native()
    ),
    "it reads the memory of plain tensors": lambda: attention(*[_Marked(X)] * 3, backend=Native()),
    "it does not compose with function transforms": lambda: torch.func.vmap(
        lambda x: attention(x, x, x, backend=Native())
    )(X[None]),
    "it computes on the CPU only": lambda: attention(*[X.to("meta")] * 3, backend=Native()),
    "it has no forward-mode derivative": _with_tangent,
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_it_cannot_do_it_says(reason):
    with pytest.raises(UnsupportedError, match=reason.replace("(", r"\(")):
        REASONS[reason]()


def test_where_it_is_required_it_is_there():
    """Without it the tests here are skipped: continuous integration asks for it."""
    assert MISSING is None or not os.environ.get("HEADWISE_REQUIRE_NATIVE"), MISSING


def test_instructions_that_are_not_there_are_refused():
    with pytest.raises(UnsupportedError, match=r"has no instructions 'mmx' on this processor; there are: "):
        Native("mmx")


def test_without_its_library_it_says_so(monkeypatch):
    gone = "its library was not built when headwise was installed"
    monkeypatch.setattr(native, "KERNEL", None)
    monkeypatch.setattr(native, "MISSING", gone)
    with pytest.raises(UnsupportedError, match=gone):
        attention(X, X, X, backend=Native())
    assert instruction_sets() == ()


def test_bounds_that_32_bits_do_not_hold():
    x = randn(2, 2, 5, 4)
    for far in (2**32, 2**63 - 1, 2**31):
        lengths = torch.tensor([far, 3])
        for mask, near in (
            (Padding(lengths), Padding([5, 3])),
            (Padding(lengths) & Window(3), Padding([5, 3]) & Window(3)),
            (Causal() | Prefix(lengths), Causal() | Prefix([5, 3])),
        ):
            assert torch.equal(attention(x, x, x, mask=mask, backend=Native()), attention(x, x, x, mask=near))


@pytest.mark.parametrize("what", ["sinks", "slopes", "bias", "mask"])
def test_other_tensors_without_plain_memory_are_refused_as_well(what):
    given = {
        "sinks": lambda: {"sinks": _Marked(torch.zeros(2))},
        "slopes": lambda: {"score_mods": [ALiBi(2, _Marked(torch.ones(2)))]},
        "bias": lambda: {"score_mods": [Bias(_Marked(torch.zeros(3, 3)))]},
        "mask": lambda: {"mask": Dense(_Marked(torch.ones(3, 3)).bool())},
    }[what]()
    with pytest.raises(UnsupportedError, match="it reads the memory of plain tensors"):
        attention(X, X, X, backend=Native(), **given)


def test_what_the_kernel_answers():
    """A layer may be loaded on another processor than the one it was made on."""
    elsewhere = copy.copy(Native())
    elsewhere.instructions = "avx1024"
    for grad in (False, True):
        with pytest.raises(UnsupportedError, match="instructions that this processor lacks"):
            attention(*[X.clone().requires_grad_(grad)] * 3, backend=elsewhere)
