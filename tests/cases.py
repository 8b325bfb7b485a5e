"""The parts that the contract suites run over: a line here tests a new mask, score modification or backend.

Every case says twice what it is: with headwise, and in plain Python that shares nothing with it.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from helpers import randn
from torch import Tensor

from headwise import (
    BACKENDS,
    ALiBi,
    And,
    Bias,
    Causal,
    Chunk,
    CustomMask,
    CustomScore,
    Dense,
    Document,
    DynamicCache,
    DynamicNTKSchedule,
    Full,
    LinearSchedule,
    Llama3Schedule,
    LongRoPESchedule,
    Mask,
    Not,
    Or,
    Padding,
    PerHead,
    Positions,
    Prefix,
    ProportionalSchedule,
    RelativeBias,
    RollingCache,
    RotaryEmbedding,
    ScoreMod,
    Softcap,
    StaticCache,
    Window,
    YaRNSchedule,
)

BACKEND_NAMES = tuple(backend.name for backend in BACKENDS)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Call:
    """Sizes of a call, and where its first query and key stand; None: the last query with the last key."""

    batch: int = 2
    heads: int = 15
    kv_heads: int = 3
    rows: int = 7
    slots: int = 11
    head_dim: int = 13
    v_dim: int = 17
    query_start: int | None = None
    key_start: int = 0

    @property
    def queries(self) -> Positions:
        start = self.key_start + self.slots - self.rows if self.query_start is None else self.query_start
        return Positions(self.rows, start=start)

    @property
    def keys(self) -> Positions:
        return Positions(self.slots, start=self.key_start)

    def tensors(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, different for every seed and size."""
        query = randn(self.batch, self.heads, self.rows, self.head_dim, seed=1, dtype=dtype)
        key = randn(self.batch, self.kv_heads, self.slots, self.head_dim, seed=2, dtype=dtype)
        return query, key, randn(self.batch, self.kv_heads, self.slots, self.v_dim, seed=3, dtype=dtype)

    def coin(self, *shape: int, seed: int = 4) -> Tensor:
        """Booleans, two thirds of them True."""
        return randn(*shape, seed=seed) > -0.43


SHAPES = {
    "mha": Call(heads=3),
    "gqa": Call(),
    "mqa": Call(heads=5, kv_heads=1),
    "square": Call(rows=11, head_dim=7, v_dim=5),
    "more queries": Call(rows=11, slots=7),
    "one query": Call(rows=1),
    "many queries": Call(batch=1, heads=6, rows=19, slots=23),  # too many to fold into groups
}
# too small for most faults; tested over all masks, but not with everything else
SMALL_SHAPES = {
    "one of everything": Call(batch=1, heads=1, kv_heads=1, rows=1, slots=1, head_dim=1, v_dim=1),
    "empty batch": Call(batch=0),
    "no query": Call(rows=0),
    "no key": Call(slots=0),
}

Seen = Callable[[int, int, int, int], bool]


@dataclass(frozen=True)
class MaskCase:
    """A mask, what it means, and the most runs its spans may have (None: it has no spans)."""

    name: str
    make: Callable[[Call], Mask]
    seen: Callable[[Call], Seen]  # over batch row, head, query index and key index
    runs: int | None = 1

    def dense(self, call: Call) -> Tensor:
        """Every pair asked for on its own, "B H T S"."""
        seen, (q, k) = self.seen(call), (call.queries, call.keys)
        places = itertools.product(range(call.batch), range(call.heads), range(q.start, q.stop), range(k.start, k.stop))
        pairs = torch.tensor([seen(*place) for place in places], dtype=torch.bool)
        return pairs.reshape(call.batch, call.heads, call.rows, call.slots)


def _lengths(call: Call) -> list[int]:
    """One length per row: 0 keys (nothing to see), all keys, and some in between."""
    return [[call.slots - 3, call.slots, 0][b % 3] if call.slots > 3 else 1 for b in range(call.batch)]


def _left(call: Call) -> list[int]:
    return [[2, 0, call.slots][b % 3] for b in range(call.batch)]


def _row_tensor(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def _ids(call: Call, count: int, rows: int, seed: int) -> Tensor:
    return (randn(rows, count, seed=seed) * 2).round().long() % 3


def _documents(call: Call, queries: list, keys: list) -> Seen:
    q_start, k_start = call.queries.start, call.keys.start
    return lambda b, h, q, k: queries[b][q - q_start] == keys[b % len(keys)][k - k_start]


def _padding_booleans(call: Call) -> Seen:
    real, k_start = call.coin(call.batch, call.slots).tolist(), call.keys.start
    return lambda b, h, q, k: real[b][k - k_start]


def _packed(call: Call) -> list[int]:
    return [call.rows // 3, call.rows - call.rows // 3 - call.rows // 4, call.rows // 4]


def _document_of(t: int, lengths: list[int]) -> int:
    for number, length in enumerate(lengths):
        if t < length:
            return number
        t -= length
    return -1


def _packed_seen(call: Call) -> Seen:
    numbers = [_document_of(t, _packed(call)) for t in range(call.rows)]
    q_start, k_start = call.queries.start, call.keys.start
    return lambda b, h, q, k: k <= q and numbers[q - q_start] == numbers[k - k_start]


def _dense(*shape: str | int) -> Callable[[Call], Seen]:
    """Look up a tensor of two or four dimensions by hand, sizes of 1 broadcast."""

    def seen(call: Call) -> Seen:
        values = call.coin(*_shape(call, shape)).tolist()
        q_start, k_start = call.queries.start, call.keys.start

        def look(b: int, h: int, q: int, k: int) -> bool:
            place = (b, h, q - q_start, k - k_start)[4 - len(shape) :]
            found = values
            for i in place:
                found = found[0] if len(found) == 1 else found[i]
            return bool(found)

        return look

    return seen


def _shape(call: Call, shape: tuple) -> tuple[int, ...]:
    return tuple(getattr(call, n) if isinstance(n, str) else n for n in shape)


def _per_head(call: Call) -> tuple[Mask, ...]:
    return tuple((Causal(), Window(2), Full(), Causal() & Window(3), Not(Window(4)))[h % 5] for h in range(call.heads))


def _per_head_seen(b: int, h: int, q: int, k: int) -> bool:
    return (k <= q, abs(q - k) < 2, True, 0 <= q - k < 3, abs(q - k) >= 4)[h % 5]


MASKS = (
    MaskCase("full", lambda c: Full(), lambda c: lambda b, h, q, k: True),
    MaskCase("causal", lambda c: Causal(), lambda c: lambda b, h, q, k: k <= q),
    MaskCase("window", lambda c: Window(3), lambda c: lambda b, h, q, k: abs(q - k) < 3),
    MaskCase("window, two sides", lambda c: Window(left=4, right=1), lambda c: lambda b, h, q, k: -1 <= q - k <= 4),
    MaskCase("window, left", lambda c: Window(left=2), lambda c: lambda b, h, q, k: q - k <= 2),
    MaskCase("window, right", lambda c: Window(right=2), lambda c: lambda b, h, q, k: k - q <= 2),
    MaskCase("sliding", lambda c: Causal() & Window(3), lambda c: lambda b, h, q, k: 0 <= q - k < 3),
    MaskCase("padding, one number", lambda c: Padding(5), lambda c: lambda b, h, q, k: k < 5),
    MaskCase(
        "padding, lengths",
        lambda c: Padding(_row_tensor(_lengths(c))),
        lambda c: lambda b, h, q, k: k < _lengths(c)[b],
    ),
    MaskCase(
        "padding, left",
        lambda c: Padding(left=_row_tensor(_left(c))),
        lambda c: lambda b, h, q, k: k >= _left(c)[b],
    ),
    MaskCase(
        "padding, booleans",
        lambda c: Padding(c.coin(c.batch, c.slots)),
        _padding_booleans,
        runs=None,
    ),
    MaskCase(
        "causal, padded",
        lambda c: Causal() & Padding(_lengths(c)),
        lambda c: lambda b, h, q, k: k <= q and k < _lengths(c)[b],
    ),
    MaskCase(
        "document",
        lambda c: Document(_ids(c, c.rows, c.batch, 5), _ids(c, c.slots, 1, 6)),
        lambda c: _documents(c, _ids(c, c.rows, c.batch, 5).tolist(), _ids(c, c.slots, 1, 6).tolist()),
        runs=None,
    ),
    MaskCase("prefix", lambda c: Prefix(4), lambda c: lambda b, h, q, k: 0 <= k < 4),
    MaskCase(
        "prefix language model",
        lambda c: Causal() | Prefix(_row_tensor([(b + 3) % 5 for b in range(c.batch)]), start=1),
        lambda c: lambda b, h, q, k: k <= q or 1 <= k < 1 + (b + 3) % 5,
        runs=2,
    ),
    MaskCase("chunk", lambda c: Chunk(3), lambda c: lambda b, h, q, k: q // 3 == k // 3),
    MaskCase(
        "chunk, per row",
        lambda c: Causal() & Chunk([b + 2 for b in range(c.batch)], start=[b - 1 for b in range(c.batch)]),
        lambda c: lambda b, h, q, k: k <= q and (q - b + 1) // (b + 2) == (k - b + 1) // (b + 2),
    ),
    MaskCase(
        "dense",
        lambda c: Dense(c.coin(c.rows, c.slots)),
        _dense("rows", "slots"),
        runs=None,
    ),
    MaskCase(
        "dense, per row and head",
        lambda c: Dense(c.coin(c.batch, c.heads, c.rows, c.slots)),
        _dense("batch", "heads", "rows", "slots"),
        runs=None,
    ),
    MaskCase(
        "dense, broadcast",
        lambda c: Dense(c.coin(1, c.heads, 1, c.slots)),
        _dense(1, "heads", 1, "slots"),
        runs=None,
    ),
    MaskCase("per head", lambda c: PerHead(_per_head(c)), lambda c: _per_head_seen, runs=2),
    MaskCase(
        "custom",
        lambda c: CustomMask(lambda b, h, q, k: (b + h + q + 2 * k) % 3 != 0),
        lambda c: lambda b, h, q, k: (b + h + q + 2 * k) % 3 != 0,
        runs=None,
    ),
    MaskCase(
        "documents of other keys in ascending order",
        lambda c: Document.ascending(
            *(_ids(c, n, rows, 9).sort(-1).values for n, rows in ((c.rows, c.batch), (c.slots, 1)))
        ),
        lambda c: _documents(
            c, *(_ids(c, n, rows, 9).sort(-1).values.tolist() for n, rows in ((c.rows, c.batch), (c.slots, 1)))
        ),
    ),
    MaskCase("not", lambda c: ~Window(3), lambda c: lambda b, h, q, k: abs(q - k) >= 3, runs=2),
    MaskCase(
        "and, or, not",
        lambda c: And(Or(Causal(), Prefix(2)), Not(Chunk(4))),
        lambda c: lambda b, h, q, k: (k <= q or 0 <= k < 2) and q // 4 != k // 4,
        runs=3,
    ),
    MaskCase("nothing", lambda c: ~Full(), lambda c: lambda b, h, q, k: False, runs=2),
)

# needs as many queries as keys
SQUARE_MASKS = (
    MaskCase(
        "packed documents",
        lambda c: Causal() & Document.from_lengths(_packed(c)),
        _packed_seen,
    ),
    MaskCase(
        "documents in ascending order",
        lambda c: Document.ascending(_ids(c, c.rows, c.batch, 7).sort(-1).values),
        lambda c: _documents(c, *[_ids(c, c.rows, c.batch, 7).sort(-1).values.tolist()] * 2),
    ),
    MaskCase(
        "document, same tokens",
        lambda c: Document(_ids(c, c.rows, c.batch, 7)),
        lambda c: _documents(c, *[_ids(c, c.rows, c.batch, 7).tolist()] * 2),
        runs=None,
    ),
)


@dataclass(frozen=True)
class ScoreCase:
    """Score modifications of a call, and the same as a function of whole score tensors in any precision.

    ``apply(call, scores, tensors)`` gets the scores "B H T S" and the trainable tensors, in one precision;
    ``hidden`` says which keys a bias of -inf hides.
    """

    name: str
    make: Callable[[Call, torch.dtype], list[ScoreMod]]
    apply: Callable[[Call, Tensor, list[Tensor]], Tensor]
    hidden: Callable[[Call], Tensor] | None = None


def _distance(call: Call) -> Tensor:
    q = torch.tensor([call.queries.start + t for t in range(call.rows)], dtype=torch.float64)
    k = torch.tensor([call.keys.start + s for s in range(call.slots)], dtype=torch.float64)
    return (q[:, None] - k[None, :]).abs()


def alibi_slopes(heads: int) -> list[float]:
    """Slopes as printed in the paper: 2^(-8i/n) for a power of two, else filled up from twice that."""
    two = 1
    while two * 2 <= heads:
        two *= 2
    slopes = [2.0 ** (-8 * i / two) for i in range(1, two + 1)]
    return slopes + [2.0 ** (-8 * i / (2 * two)) for i in range(1, 2 * two + 1, 2)][: heads - two]


def _alibi(call: Call, scores: Tensor, slopes: list[float]) -> Tensor:
    return scores - torch.tensor(slopes, dtype=scores.dtype)[:, None, None] * _distance(call).to(scores.dtype)


def _bias(*shape: int, seed: int) -> Tensor:
    """Numbers that every dtype holds exactly, so that the case and the library add the same."""
    return randn(*shape, seed=seed).bfloat16().float()


def _bias_2d(call: Call) -> Tensor:
    return _bias(call.rows, call.slots, seed=8)


def _bias_4d(call: Call) -> Tensor:
    return _bias(1, call.heads, call.rows, call.slots, seed=9)


def _bias_inf(call: Call) -> Tensor:
    bias = _bias(call.batch, 1, 1, call.slots, seed=10)
    return bias.masked_fill(~call.coin(*bias.shape, seed=11), -torch.inf)


def _cap(scores: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(scores / cap)


def _trained(values: Tensor, dtype: torch.dtype) -> Bias:
    return Bias(torch.nn.Parameter(values.to(dtype)))


def _own_slopes(call: Call) -> Tensor:
    return randn(call.heads, seed=12).abs()


def _t5(call: Call, dtype: torch.dtype, both_sides: bool) -> RelativeBias:
    mod = RelativeBias(call.heads, num_buckets=8, max_distance=7, bidirectional=both_sides, dtype=dtype)
    torch.nn.init.zeros_(mod.table).data += _bias(*mod.table.shape, seed=13).to(dtype)
    return mod


def _t5_bucket(distance: int, both_sides: bool) -> int:
    """Buckets as the paper's code makes them: 8 of them, the last from distance 7 on."""
    count, first = (4, 4 * (distance > 0)) if both_sides else (8, 0)
    away = abs(distance) if both_sides else max(0, -distance)
    if away < count // 2:
        return first + away
    grown = math.log(away / (count // 2)) / math.log(7 / (count // 2)) * (count - count // 2)
    return first + min(count - 1, count // 2 + int(grown))


def _t5_bias(call: Call, table: Tensor, both_sides: bool) -> Tensor:
    steps = [
        [k - q for k in range(call.keys.start, call.keys.stop)] for q in range(call.queries.start, call.queries.stop)
    ]
    buckets = torch.tensor([[_t5_bucket(d, both_sides) for d in row] for row in steps], dtype=torch.int64)
    return table[buckets.reshape(call.rows, call.slots)].permute(2, 0, 1)


SCORE_MODS = (
    ScoreCase("none", lambda c, d: [], lambda c, s, p: s),
    ScoreCase("softcap", lambda c, d: [Softcap(1.5)], lambda c, s, p: _cap(s, 1.5)),
    ScoreCase("alibi", lambda c, d: [ALiBi(c.heads)], lambda c, s, p: _alibi(c, s, alibi_slopes(c.heads))),
    ScoreCase(
        "alibi, own slopes",
        lambda c, d: [ALiBi(c.heads, _own_slopes(c))],
        lambda c, s, p: _alibi(c, s, _own_slopes(c).tolist()),
    ),
    ScoreCase("t5", lambda c, d: [_t5(c, d, True)], lambda c, s, p: s + _t5_bias(c, p[0], True)),
    ScoreCase("t5, one side", lambda c, d: [_t5(c, d, False)], lambda c, s, p: s + _t5_bias(c, p[0], False)),
    ScoreCase("bias", lambda c, d: [Bias(_bias_2d(c).to(d))], lambda c, s, p: s + _bias_2d(c).to(s.dtype)),
    ScoreCase("bias, trained", lambda c, d: [_trained(_bias_4d(c), d)], lambda c, s, p: s + p[0]),
    ScoreCase(
        "bias, hiding",
        lambda c, d: [Bias(_bias_inf(c).to(d))],
        lambda c, s, p: s + _bias_inf(c).to(s.dtype),
        hidden=lambda c: _bias_inf(c).isneginf(),
    ),
    ScoreCase(
        "custom",
        lambda c, d: [CustomScore(lambda s, b, h, q, k: s * (1 + h % 2) - (q - k).abs() / 8)],
        lambda c, s, p: s * (1 + torch.arange(c.heads) % 2)[:, None, None].to(s.dtype) - _distance(c).to(s.dtype) / 8,
    ),
    ScoreCase(
        "softcap, alibi, bias",
        lambda c, d: [Softcap(2.0), ALiBi(c.heads), _trained(_bias_4d(c), d)],
        lambda c, s, p: _alibi(c, _cap(s, 2.0), alibi_slopes(c.heads)) + p[0],
    ),
    ScoreCase(
        "bias, softcap",
        lambda c, d: [_trained(_bias_4d(c), d), Softcap(2.0)],
        lambda c, s, p: _cap(s + p[0], 2.0),
    ),
)


def _spectrum(pairs: int, base: float = 10_000.0) -> list[float]:
    """Radians per position of each pair, as in the paper."""
    return [base ** (-2 * i / (2 * pairs)) for i in range(pairs)]


def _dynamic(length: int) -> list[float]:
    """The base that transformers computes for a factor of 3 beyond 16 tokens, and its spectrum of 7 pairs."""
    longer = max(length, 16)
    return _spectrum(7, 10_000.0 * (3 * longer / 16 - (3 - 1)) ** (14 / (14 - 2)))


def _yarn(pairs: int, base: float, factor: float, original: int, fast: float, slow: float, whole: bool) -> list[float]:
    """Between the pairs that turn ``fast`` and ``slow`` times in the original length, a straight ramp."""
    ends = [pairs * math.log(original / (2 * math.pi * turns)) / math.log(base) for turns in (fast, slow)]
    low, high = (math.floor(ends[0]), math.ceil(ends[1])) if whole else ends
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    shares = [min(1.0, max(0.0, (i - low) / (high - low))) for i in range(pairs)]
    turns = _spectrum(pairs, base)
    return [turn * (1 - share) + turn / factor * share for turn, share in zip(turns, shares, strict=True)]


def _llama3(turn: float, factor: float, original: int, low: float, high: float) -> float:
    """By wavelength, in the three cases of the code published with Llama 3.1."""
    wavelength = 2 * math.pi / turn
    if wavelength < original / high:
        return turn
    if wavelength > original / low:
        return turn / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * turn / factor + smooth * turn


SHORT, LONG = (1.0, 1.1, 1.3, 1.2, 1.7, 1.9, 2.3), (1.0, 1.5, 2.9, 4.1, 5.3, 7.7, 8.9)


@dataclass(frozen=True)
class RotaryCase:
    """Arguments of a rotary embedding, and what each pair does: its axis, and its radians per position.

    ``turns`` is asked for the number of tokens of the call.
    """

    name: str
    given: dict
    turns: Callable[[int], list[float]]
    head_dim: int = 14
    axes: tuple[int, ...] | None = None
    scaling: float = 1.0

    def make(self) -> RotaryEmbedding:
        return RotaryEmbedding(self.head_dim, **self.given)


ROTARY = (
    RotaryCase("half-split", {}, lambda n: _spectrum(7)),
    RotaryCase("interleaved", {"interleaved": True}, lambda n: _spectrum(7)),
    RotaryCase("another base", {"base": 500.0}, lambda n: _spectrum(7, 500.0)),
    RotaryCase("partial", {"rotary_dim": 6}, lambda n: _spectrum(3)),
    RotaryCase("partial, interleaved, odd head", {"rotary_dim": 10, "interleaved": True}, lambda n: _spectrum(5), 13),
    RotaryCase("linear", {"schedule": LinearSchedule(3.0)}, lambda n: [turn / 3 for turn in _spectrum(7)]),
    RotaryCase("dynamic", {"schedule": DynamicNTKSchedule(3.0, 16)}, _dynamic),
    RotaryCase("dynamic, fixed", {"schedule": DynamicNTKSchedule(3.0, 16, length=29)}, lambda n: _dynamic(29)),
    RotaryCase(
        "yarn",
        {"schedule": YaRNSchedule(4.0, 16, beta_fast=2.0), "base": 50.0},
        lambda n: _yarn(7, 50.0, 4.0, 16, 2, 1, True),
        scaling=0.1 * math.log(4.0) + 1,
    ),
    RotaryCase(
        "yarn, not truncated",
        {"schedule": YaRNSchedule(4.0, 64, attention_factor=1.25, truncate=False)},
        lambda n: _yarn(7, 10_000.0, 4.0, 64, 32, 1, False),
        scaling=1.25,
    ),
    RotaryCase(
        "llama3",
        {"schedule": Llama3Schedule(8.0, 64, 1.0, 5.0), "base": 500.0},
        lambda n: [_llama3(turn, 8.0, 64, 1.0, 5.0) for turn in _spectrum(7, 500.0)],
    ),
    RotaryCase(
        "longrope",
        {"schedule": LongRoPESchedule(4.0, 16, SHORT, LONG)},
        lambda n: [turn / slower for turn, slower in zip(_spectrum(7), LONG if n > 16 else SHORT, strict=True)],
        scaling=math.sqrt(1 + math.log(4.0) / math.log(16)),
    ),
    RotaryCase(
        "longrope, fixed",
        {"schedule": LongRoPESchedule(4.0, 16, SHORT, LONG, attention_factor=0.9, length=17)},
        lambda n: [turn / slower for turn, slower in zip(_spectrum(7), LONG, strict=True)],
        scaling=0.9,
    ),
    RotaryCase(
        "proportional",
        {"schedule": ProportionalSchedule(0.45, 2.0)},
        lambda n: [turn / 2 if i < 3 else 0.0 for i, turn in enumerate(_spectrum(7))],
    ),
    RotaryCase("axes", {"sections": (2, 3, 2)}, lambda n: _spectrum(7), axes=(0, 0, 1, 1, 1, 2, 2)),
    RotaryCase(
        "axes in turn",
        {"sections": (4, 2, 1), "spectrum": "interleaved", "interleaved": True},
        lambda n: _spectrum(7),
        axes=(0, 1, 2, 0, 1, 0, 0),
    ),
    RotaryCase(
        "axes in turn, grouped",
        {"sections": (4, 3), "spectrum": "grouped"},
        lambda n: [_spectrum(7)[i] for i in (0, 2, 4, 6, 1, 3, 5)],
        axes=(0, 0, 0, 0, 1, 1, 1),
    ),
    RotaryCase(
        "axes with a spectrum each",
        {"sections": (4, 3), "spectrum": "axial", "schedule": LinearSchedule(2.0)},
        lambda n: [turn / 2 for turn in _spectrum(4) + _spectrum(3)],
        axes=(0, 0, 0, 0, 1, 1, 1),
    ),
    RotaryCase(
        "axes, partial, dynamic",
        {"sections": (3, 4), "rotary_dim": 14, "schedule": DynamicNTKSchedule(3.0, 16)},
        _dynamic,
        head_dim=17,
        axes=(0, 0, 0, 1, 1, 1, 1),
    ),
)

# a cache that is new for every use; the tests of test_caches.py give it 11 tokens and a window of 5
CACHES = {
    "dynamic": DynamicCache,
    "static": lambda: StaticCache(12),
    "rolling": lambda: RollingCache(5),
    "rolling, larger": lambda: RollingCache(8),
}
# how the 11 tokens are cut into calls
CUTS = {
    "at once": (11,),
    "one by one": (1,) * 11,
    "prompt, steps": (6, 1, 1, 1, 1, 1),
    "pieces": (3, 1, 5, 2),
    "with nothing": (0, 4, 0, 7),
}
