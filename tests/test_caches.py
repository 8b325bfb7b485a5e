"""The contract of every cache: however tokens are cut into calls, the results are those of one pass.

Masks, caches, cuts, backends, groups of heads, positions, sinks and ragged rows: here every two of them meet; the
full product is marked slow.
"""

import copy
import itertools
import pickle

import pytest
import torch
from cases import BACKEND_NAMES, CACHES, CUTS
from helpers import assert_as_good_as, pairwise, randn
from torch import nn

from headwise import (
    ALiBi,
    Bias,
    CacheError,
    Causal,
    Chunk,
    CustomMask,
    Dense,
    Document,
    DynamicCache,
    FixedCache,
    Full,
    MultiHeadAttention,
    Padding,
    PerHead,
    Positions,
    Prefix,
    RelativeBias,
    RollingCache,
    RotaryEmbedding,
    ShapeError,
    StaticCache,
    Window,
)

B, T, E, HEADS, WINDOW = 3, 11, 24, 6, 5
LENGTHS = (11, 4, 0)
LEFT = torch.tensor([0, 2, 3])
SEEN, IDS, REAL = randn(T, T, seed=60) > -0.5, (randn(B, T, seed=61) > 0).long(), randn(B, T, seed=62) > -1.0

# by name: the mask of a call, given the rows of the batch, and which queries and keys take part
NUMBERS = {
    "causal": lambda b, q, k: Causal(),
    "window": lambda b, q, k: Causal() & Window(3),
    "window, one side": lambda b, q, k: Window(left=2, right=0),
    "not a window": lambda b, q, k: Causal() & ~Window(2),
    "chunk": lambda b, q, k: Causal() & Chunk(4, start=1),
    "prefix": lambda b, q, k: Causal() & (Prefix(2) | Window(3)),
    "per head": lambda b, q, k: PerHead((Causal(), Causal() & Window(2), Causal() & Chunk(3)) * 2),
    "custom": lambda b, q, k: CustomMask(lambda b, h, q, k: (k <= q) & ((q + k + h) % 3 != 0)),
    "padding, left": lambda b, q, k: Causal() & Padding(left=LEFT[b]),
    "nothing": lambda b, q, k: ~Full(),
}
TENSORS = {
    "dense": lambda b, q, k: Causal() & Dense(SEEN[q, k]),
    "document": lambda b, q, k: Causal() & Document(IDS[b][:, q], IDS[b][:, k]),
    "padding, booleans": lambda b, q, k: Causal() & Padding(REAL[b][:, k]),
}
PLACES = {
    "no positions": lambda: {},
    "rotary": lambda: {"rotary": RotaryEmbedding(4, base=50.0)},
    "alibi": lambda: {"score_mods": [ALiBi(HEADS)]},
    "t5": lambda: {"score_mods": [RelativeBias(HEADS, num_buckets=6, max_distance=9, bidirectional=False)]},
}
AXES = {
    "mask": (*NUMBERS, *TENSORS),
    "cache": tuple(CACHES),
    "cut": tuple(CUTS),
    "backend": BACKEND_NAMES,
    "kv_heads": (6, 3, 1),
    "places": tuple(PLACES),
    "sinks": (False, True),
    "ragged": (False, True),
    "grad": (False, True),
}


def fits(row: dict) -> bool:
    # the columns of a tensor are the keys of one order; ragged rows each have their own
    if row["ragged"] and row["mask"] in TENSORS:
        return False
    # torch's log-sum-exp, which sinks need, is not to be had with the gradient of a bias (tested in test_backends)
    return not (row["backend"] == "sdpa" and row["places"] == "t5" and row["sinks"] and row["grad"])


def build(row: dict, **more) -> MultiHeadAttention:
    window = Window(WINDOW) if row["cache"].startswith("rolling") else Full()
    layer = MultiHeadAttention(
        E, HEADS, num_kv_heads=row["kv_heads"], sinks=row["sinks"], mask=window, **PLACES[row["places"]](), **more
    )
    with torch.no_grad():
        for i, (_, parameter) in enumerate(sorted(layer.named_parameters())):
            parameter.copy_(randn(*parameter.shape, seed=70 + i, scale=0.4))
    return layer


def columns(cache, rows: int) -> slice:
    """The indices of the keys that an append of so many tokens returns."""
    stop = cache.length + rows
    if cache.keeps is None:
        return slice(0, stop)
    if rows == 1:
        return slice(max(0, stop - cache.keeps), stop)
    return slice(max(0, cache.length - cache.keeps), stop)


def in_pieces(layer, row: dict, x: torch.Tensor) -> torch.Tensor:
    cache, outs, done = CACHES[row["cache"]](), [], 0
    for part in x.split(CUTS[row["cut"]], 1):
        rows = part.shape[1]
        mask = NUMBERS.get(row["mask"]) or TENSORS[row["mask"]]
        mask = mask(slice(0, B), slice(done, done + rows), columns(cache, rows))
        fresh = (torch.tensor(LENGTHS) - done).clamp(0, rows) if row["ragged"] else None
        outs.append(layer(part, mask=mask, cache=cache, lengths=fresh))
        done += rows
    if row["ragged"]:
        assert cache.lengths.tolist() == list(LENGTHS)
    else:
        assert cache.lengths is None or cache.lengths.tolist() == [T] * B
    return torch.cat(outs, 1)


def check(row: dict) -> None:
    x = randn(B, T, E, seed=63)
    layer = build(row, backend=row["backend"])
    exact, plain = build(row, backend="reference").double(), build(row, backend="reference")
    with torch.set_grad_enabled(row["grad"]):
        got = in_pieces(layer, row, x)
    mask = NUMBERS.get(row["mask"]) or TENSORS[row["mask"]]
    for b in range(B):
        length = LENGTHS[b] if row["ragged"] else T
        alone, tokens = slice(b, b + 1), slice(0, length)
        with torch.no_grad():
            want, near = (
                one(x[alone, tokens].to(one.q_proj.weight.dtype), mask=mask(alone, tokens, tokens))
                for one in (exact, plain)
            )
        assert_as_good_as(got[alone, tokens], want, near, terms=3 * E + T, what=f"{row}, row {b}")


CHOSEN = pairwise(AXES, fits)


@pytest.mark.parametrize("row", CHOSEN, ids=lambda row: ", ".join(str(v) for v in row.values()))
def test_pieces_equal_one_pass(row):
    check(row)


def test_the_choice_meets_every_pair():
    for one, two in itertools.combinations(AXES, 2):
        met = {(row[one], row[two]) for row in CHOSEN}
        can = {
            (a, b)
            for a, b in itertools.product(AXES[one], AXES[two])
            if any(fits(dict(zip(AXES, v, strict=True))) for v in _around({one: a, two: b}))
        }
        assert met == can, (one, two, can - met)


def _around(fixed: dict):
    free = [name for name in ("mask", "backend", "places", "sinks", "ragged", "grad") if name not in fixed]
    rest = {name: AXES[name][0] for name in AXES} | fixed
    for values in itertools.product(*(AXES[name] for name in free)):
        yield (rest | dict(zip(free, values, strict=True))).values()


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("mask", AXES["mask"])
def test_the_whole_product(mask, cache, cut):
    rest = {k: v for k, v in AXES.items() if k not in ("mask", "cache", "cut")}
    for values in itertools.product(*rest.values()):
        row = {"mask": mask, "cache": cache, "cut": cut, **dict(zip(rest, values, strict=True))}
        if fits(row):
            check(row)


# --- what else a cache can do


def decoder(window: int | None = None, **more) -> MultiHeadAttention:
    mask = Causal() if window is None else Causal() & Window(window)
    layer = MultiHeadAttention(E, HEADS, num_kv_heads=3, rotary=RotaryEmbedding(4), mask=mask, **more)
    return layer.double().requires_grad_(False)


def close(got, want):
    assert_as_good_as(got, want, terms=64, inner=1.0)


def tokens(*shape: int, seed: int = 64) -> torch.Tensor:
    return randn(*shape, E, seed=seed, dtype=torch.float64)


every = pytest.mark.parametrize("kind", CACHES)


@every
@pytest.mark.parametrize("grad", (False, True))
def test_rows_go_on_at_their_own_lengths(kind, grad):
    layer, cache, x = decoder(5), CACHES[kind](), tokens(B, T)
    with torch.set_grad_enabled(grad):
        layer(x[:, :7], cache=cache, lengths=torch.tensor([7, 4, 0]))
        layer(x[:, 7:8], cache=cache, lengths=torch.tensor([1, 0, 1]))
        got = torch.cat([layer(x[:, 8:9], cache=cache), layer(x[:, 9:], cache=cache)], 1)
    assert cache.lengths.tolist() == [11, 7, 4]
    for b, real in enumerate(([*range(11)], [0, 1, 2, 3, 8, 9, 10], [7, 8, 9, 10])):
        close(got[b : b + 1], layer(x[b : b + 1, real])[:, -3:])


@every
def test_what_lies_in_unused_places_never_shows(kind):
    layer, x = decoder(5), tokens(2, 6)
    filled = {}
    for filler in (0.0, torch.nan):
        cache = CACHES[kind]()
        outs = [layer(x[:, :3], cache=cache, lengths=torch.tensor([3, 1]))]
        for tensor in cache.stored.values():
            places = torch.arange(tensor.shape[2])[None] >= cache.lengths[:, None]
            tensor.masked_fill_(places[:, None, :, None], filler)
        outs += [layer(x[:, 3:4], cache=cache), layer(x[:, 4:], cache=cache)]
        filled[filler] = torch.cat([o[:, :1] if i == 0 else o for i, o in enumerate(outs)], 1)
    assert filled[0.0].equal(next(v for k, v in filled.items() if k != 0.0))


@every
@pytest.mark.parametrize("cut", ((4, 1, 2), (1,) * 7, (7,)))
def test_explicit_positions(kind, cut):
    """Positions of any order, through rotary and through distances that a bias reads from the cache."""
    x, position = tokens(2, 7), torch.tensor([[3, 1, 4, 1, 5, 9, 2], [0, 2, 4, 6, 8, 10, 12]])
    for more in ({}, {"score_mods": [ALiBi(HEADS)]}):
        layer, cache = decoder(5, **more), CACHES[kind]()
        want = layer(x, positions=position)
        assert not want.equal(layer(x)) and not want.equal(layer(x, positions=position[:1]))
        pieces = zip(x.split(cut, 1), position.split(cut, 1), strict=True)
        close(torch.cat([layer(part, positions=at, cache=cache) for part, at in pieces], 1), want)
        # and on, after the highest
        more_tokens = tokens(2, 1, seed=65)
        after = torch.cat([position, torch.tensor([[10], [13]])], 1)
        close(layer(more_tokens, cache=cache), layer(torch.cat([x, more_tokens], 1), positions=after)[:, -1:])


@every
def test_left_padded_rows_go_on_after_their_tokens(kind):
    layer, cache, x = decoder(5), CACHES[kind](), tokens(2, 6)
    pads = torch.tensor([0, 3])
    first = layer(x[:, :4], cache=cache, mask=Padding(left=pads), positions=Positions(4, offset=-pads))
    got = torch.cat([first, *(layer(t, cache=cache, mask=Padding(left=pads)) for t in x[:, 4:].split(1, 1))], 1)
    close(got[:1], layer(x[:1]))
    close(got[1:, 3:], layer(x[1:, 3:]))


@every
def test_crop(kind):
    layer, x = decoder(5), tokens(2, 5)
    for length, left in ((3, 3), (-2, 3), (0, 0), (-9, 0), (7, 5), (-5, 0)):
        for lengths in (None, torch.tensor([5, 2])):
            cache = CACHES[kind]()
            layer(x, cache=cache, lengths=lengths)
            cache.crop(length)
            real = [5, 5] if lengths is None else [5, 2]
            real = [max(0, n + length) if length < 0 else min(n, length) for n in real]
            assert cache.length == left and (lengths is None or cache.lengths.tolist() == real)
            y = tokens(2, 2, seed=66)
            got = layer(y, cache=cache)
            for b in range(2):
                close(got[b : b + 1], layer(torch.cat([x[b : b + 1, : real[b]], y[b : b + 1]], 1))[:, -2:])


def test_crop_with_explicit_positions_goes_on_after_what_is_left():
    layer, cache, x = decoder(), DynamicCache(), tokens(1, 5)
    at = torch.tensor([[0, 1, 2, 7, 8]])
    layer(x, cache=cache, positions=at)
    cache.crop(3)
    y = tokens(1, 1, seed=66)
    close(layer(y, cache=cache), layer(torch.cat([x[:, :3], y], 1))[:, -1:])


def test_a_rolling_cache_cannot_go_back_to_what_it_has_forgotten():
    layer, cache, x = decoder(5), RollingCache(5), tokens(2, 7)
    layer(x, cache=cache)
    with pytest.raises(CacheError, match="has forgotten 2 tokens"):
        cache.crop(6)
    cache.crop(7)  # nothing to drop
    close(layer(x[:, :1], cache=cache), layer(torch.cat([x, x[:, :1]], 1))[:, -1:])


@every
@pytest.mark.parametrize("lengths", (None, torch.tensor([3, 6, 5])))
def test_select_reorders_repeats_and_drops_rows(kind, lengths):
    layer, x = decoder(5), tokens(3, 6)
    y = tokens(4, 2, seed=67)
    for rows in ([2, 0, 1], [1], [0, 0, 2, 1], torch.tensor([2, 2])):
        cache = CACHES[kind]()
        layer(x, cache=cache, lengths=lengths)
        cache.select(rows)
        got = layer(y[: len(rows)], cache=cache)
        for i, b in enumerate(rows):
            real = 6 if lengths is None else int(lengths[b])
            close(got[i : i + 1], layer(torch.cat([x[b][None, :real], y[i : i + 1]], 1))[:, -2:])


@every
@pytest.mark.parametrize("ragged", (False, True))
def test_copies_are_independent_and_states_travel(kind, ragged, tmp_path):
    layer, x = decoder(5), tokens(2, 7)
    lengths = torch.tensor([4, 2]) if ragged else None
    cache = CACHES[kind]()
    layer(x[:, :4], cache=cache, lengths=lengths)
    loaded = CACHES[kind]()
    torch.save(cache.state_dict(), tmp_path / "cache.pt")
    loaded.load_state_dict(torch.load(tmp_path / "cache.pt", weights_only=True))
    twins = [cache.fork(), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), loaded]
    want = layer(x[:, 4:5], cache=cache)
    layer(x[:, 6:], cache=cache)  # more in the original: the others must not see it
    for twin in twins:
        assert repr(twin) == repr(cache) and twin.length == 4
        assert layer(x[:, 4:5], cache=twin).equal(want)
        assert twin.length == 5 and cache.length == 6


def test_a_state_fits_its_own_kind_and_size_only():
    cache = StaticCache(9)
    decoder()(tokens(1, 3), cache=cache)
    for other in (StaticCache(8), DynamicCache(), RollingCache(9)):
        with pytest.raises(CacheError, match=r"StaticCache with room for 9 tokens, but this is"):
            other.load_state_dict(cache.state_dict())


def test_gradients_flow_through_a_cache():
    layer, x = decoder(), tokens(2, 6).requires_grad_()
    for kind in ("dynamic", "static"):
        cache = CACHES[kind]()
        got = torch.cat([layer(part, cache=cache) for part in x.split((2, 1, 3), 1)], 1)
        one, other = (torch.autograd.grad(y.square().sum(), x)[0] for y in (got, layer(x)))
        assert_as_good_as(one, other, terms=200, inner=10.0)


def test_a_cache_keeps_up_with_changes_of_mode():
    layer, x = decoder(5), tokens(2, 6)
    want = layer(x)
    for kind in CACHES:
        cache, outs = CACHES[kind](), []
        modes = (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode, torch.no_grad)
        for mode, part in zip((*modes, torch.enable_grad), x.split(1, 1), strict=True):
            with mode():
                outs.append(layer(part, cache=cache).clone())
        close(torch.cat([o.clone() for o in outs], 1), want)


# --- what a cache refuses


def test_a_full_cache_says_so():
    layer, x = decoder(), tokens(2, 4)
    cache = StaticCache(5)
    layer(x, cache=cache)
    with pytest.raises(CacheError, match="room for 5 tokens and would hold 8"):
        layer(x, cache=cache)
    assert cache.length == 4
    ragged = StaticCache(5)
    layer(x, cache=ragged, lengths=torch.tensor([4, 1]))
    layer(x[:, :3], cache=ragged, lengths=torch.tensor([1, 3]))  # 5 and 4: they fit, though 7 tokens were given
    with pytest.raises(CacheError, match="room for 5 tokens and would hold 6"):
        layer(x[:, :1], cache=ragged)
    assert ragged.lengths.tolist() == [5, 4]


def test_two_layers_do_not_share_a_cache():
    one, two, cache, x = decoder(), decoder(), DynamicCache(), tokens(1, 2)
    one(x, cache=cache)
    with pytest.raises(CacheError, match="belongs to another layer"):
        two(x, cache=cache)
    one(x, cache=cache.fork())
    with pytest.raises(CacheError, match="belongs to another layer"):
        two(x, cache=cache.fork())
    two(x, cache=copy.deepcopy(cache))  # a copy goes to whoever asks first, such as a copy of the layer


@pytest.mark.plain
@every
def test_what_does_not_fit_the_cache_is_refused(kind):
    layer, cache, x = decoder(5), CACHES[kind](), tokens(2, 3)
    layer(x, cache=cache)
    for call, text in (
        (lambda: layer(x[:1], cache=cache), r"\(2, 3, 4\), the call has \(1, 3, 4\)"),
        (lambda: layer.float()(x.float(), cache=cache), "torch.float64 on cpu, the call has torch.float32 on cpu"),
        (lambda: layer.double()(x, cache=cache, positions=Positions(3, start=1)), "holds 3 tokens, but .* index 1"),
    ):
        with pytest.raises(CacheError, match=text):
            call()
    for lengths, text in (
        (torch.tensor([1, 4]), "runs from 1 to 4, but there are 3 tokens"),
        (torch.tensor([-1, 2]), "runs from -1 to 2"),
        (torch.tensor([1, 2, 3]), r"shape \(3,\) for 2 rows"),
        (torch.tensor([1.0, 2.0]), "torch.float32"),
        ([1, 2], "list"),
    ):
        with pytest.raises(ShapeError, match=text):
            layer(x, cache=cache, lengths=lengths)
    assert cache.length == 3


def test_a_window_that_a_rolling_cache_cannot_serve_is_refused():
    x = tokens(2, 3)
    for mask in (
        Causal(),
        Causal() & Window(6),
        Causal() & Chunk(6),
        Causal() & (Window(3) | Prefix(2)),
        Full(),
        Causal() & CustomMask(lambda b, h, q, k: q - k < 5),
        PerHead((Causal() & Window(5),) * 5 + (Causal() & Window(6),)),
        ~Window(3),
    ):
        layer = MultiHeadAttention(E, HEADS, mask=mask).double()
        with pytest.raises(CacheError, match="keeps the last 5 tokens"):
            layer(x, cache=RollingCache(5))
        layer(x, cache=RollingCache(5), mask=Window(5))  # joined with the layer's
    for mask in (Causal() & Chunk(5), PerHead((Causal() & Window(5),) * 6), Causal() & ~~Window(4), Window(left=4)):
        MultiHeadAttention(E, HEADS, mask=mask).double()(x, cache=RollingCache(5))


# --- the fixed cache of cross-attention


@pytest.mark.parametrize("cut", ((5,), (1,) * 5, (2, 1, 2)))
@pytest.mark.parametrize("lengths", (None, torch.tensor([9, 6])))
@pytest.mark.parametrize("mask", (Full(), Causal(), Window(4), Prefix(3)))
def test_a_fixed_cache_equals_no_cache(cut, lengths, mask):
    layer = MultiHeadAttention(E, HEADS, num_kv_heads=3, rotary=RotaryEmbedding(4), mask=mask).double()
    x, memory, cache = tokens(2, 5), tokens(2, 9, seed=68), FixedCache()
    calls = []
    layer.k_proj.register_forward_hook(lambda *a: calls.append(1))
    outs = []
    for i, part in enumerate(x.split(cut, 1)):
        how = {"key": memory, "lengths": lengths} if i == 0 else {"key": memory} if i == 1 else {}
        outs.append(layer(part, **how, cache=cache))
    assert len(calls) == 1 and cache.length == 9
    hidden = Full() if lengths is None else Padding(lengths)
    close(torch.cat(outs, 1), layer(x, memory, mask=hidden, positions=Positions(5)))


@pytest.mark.plain
def test_a_fixed_cache_takes_one_memory():
    layer, x, memory, cache = MultiHeadAttention(E, HEADS).double(), tokens(2, 1), tokens(2, 9), FixedCache()
    with pytest.raises(CacheError, match="empty needs key tokens"):
        layer(x, cache=cache)
    want = layer(x, memory, cache=cache)
    for other in (memory.clone(), tokens(2, 9, seed=69)):
        with pytest.raises(CacheError, match="filled with 9 keys"):
            layer(x, other, cache=cache)
    for twin in (cache, cache.fork(), pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
        assert layer(x, cache=twin).equal(want)
    cache.select([1, 1, 0])
    close(layer(x[[1, 1, 0]], cache=cache), want[[1, 1, 0]])
    with pytest.raises(CacheError, match="filled with 9 keys"):
        layer(x[[1, 1, 0]], memory, cache=cache)
    with pytest.raises(CacheError, match="cannot be cropped"):
        cache.crop(3)


def test_a_fixed_cache_selects_lengths_and_counts_with_its_rows():
    layer = MultiHeadAttention(E, HEADS, rotary=RotaryEmbedding(4)).double()
    x, memory, cache = tokens(2, 3), tokens(2, 9, seed=68), FixedCache()
    at = torch.tensor([[4, 1, 0, 2, 3, 8, 7, 6, 5], [0, 1, 2, 3, 4, 5, 6, 7, 9]])
    layer(x[:, :2], memory, cache=cache, lengths=torch.tensor([9, 4]), key_positions=at)
    cache.select([1])
    want = layer(x[1:], memory[1:, :4], key_positions=at[1:, :4], positions=Positions(3))
    close(layer(x[1:, 2:], cache=cache), want[:, 2:])


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_a_bias_of_a_call_follows_the_order_of_tokens(backend):
    """Also where the keys of a ring lie in another: whole rows alike, and rows of their own lengths."""
    layer, x = decoder(5, backend=backend), tokens(2, 9)
    table = nn.Parameter(randn(1, HEADS, 9, 9, seed=71, dtype=torch.float64), requires_grad=False)
    want = layer(x, score_mods=[Bias(table)])
    for ragged in (False, True):
        cache, got = RollingCache(5), []
        for t, part in enumerate(x.split(1, 1)):
            first = max(0, t - 4)
            values = table[..., t : t + 1, first : t + 1]
            if ragged:  # every place of the ring has a column, used or not
                values = nn.functional.pad(values, (0, 5 - values.shape[-1]))
            fresh = torch.ones(2, dtype=torch.int64) if ragged else None
            got.append(layer(part, cache=cache, lengths=fresh, score_mods=[Bias(values)]))
        close(torch.cat(got, 1), want)


# --- what a reviewer found


def test_a_start_that_contradicts_the_cache_is_refused():
    layer, x = decoder(), tokens(2, 5)
    cache = DynamicCache()
    with pytest.raises(CacheError, match=r"holds 0 tokens, but .* index a number in each row"):
        layer(x, cache=cache, positions=Positions(5, start=torch.tensor([0, 2])))
    layer(x[:, :3], cache=cache, lengths=torch.tensor([3, 1]))
    for start in (0, 3, torch.tensor([3, 1])):  # also right ones: only the cache's own can be told from wrong ones
        with pytest.raises(CacheError, match="a number of its own in each row"):
            layer(x[:, 3:], cache=cache, positions=Positions(2, start=start))
    for odd in ({"ring": 2}, {"filled": 2}, {"indices": torch.arange(5)[None]}):
        with pytest.raises((CacheError, ShapeError)):
            layer(x, cache=DynamicCache(), positions=Positions(5, **odd))


@every
def test_keys_that_are_given_apart_stand_after_those_stored(kind):
    layer, x = decoder(5), tokens(2, 6)
    for lengths, real in ((None, (3, 3)), (torch.tensor([3, 1]), (3, 1))):
        cache = CACHES[kind]()
        layer(x[:, :3], cache=cache, lengths=lengths)
        got = layer(x[:, 3:5], x[:, 3:5].clone(), cache=cache)
        got = torch.cat([got, layer(x[:, 5:], x[:, 5:].clone(), cache=cache, key_positions=None)], 1)
        for b in range(2):
            close(got[b : b + 1], layer(torch.cat([x[b : b + 1, : real[b]], x[b : b + 1, 3:]], 1))[:, -3:])


@every
@pytest.mark.parametrize("lengths", (None, torch.tensor([4, 6])))
def test_fewer_queries_than_new_keys_are_the_last_of_them(kind, lengths):
    layer, x, cache = decoder(5), tokens(2, 6), CACHES[kind]()
    real = (6, 6) if lengths is None else (4, 6)
    rows = torch.tensor(real)[:, None] - torch.tensor([2, 1])
    last = torch.take_along_dim(x, rows[..., None], 1)  # the two last real tokens of each row
    got = layer(last, x, cache=cache, lengths=lengths)
    for b in range(2):
        close(got[b : b + 1], layer(x[b : b + 1, : real[b]])[:, -2:])


@every
def test_a_state_is_a_snapshot(kind):
    layer, x, cache = decoder(5), tokens(1, 9), CACHES[kind]()
    with torch.no_grad():
        layer(x[:, :5], cache=cache)
        state = cache.state_dict()
        want = layer(x[:, 5:6], cache=cache)
        layer(x[:, 6:7], cache=cache)
        cache.load_state_dict(state)
        close(layer(x[:, 5:6], cache=cache), want)
        layer(x[:, 7:8], cache=cache)  # nor does loading share it
        cache.load_state_dict(state)
        close(layer(x[:, 5:6], cache=cache), want)
    with pytest.raises(CacheError, match="lacks length"):
        cache.load_state_dict({"kind": type(cache).__name__, "room": cache.capacity or cache.keeps})
    with pytest.raises(CacheError, match="The state is that of None"):
        cache.load_state_dict({})


def test_a_loaded_fixed_cache_does_not_know_where_its_keys_come_from():
    layer, x = MultiHeadAttention(E, HEADS).double(), tokens(1, 2)
    memories, caches = (tokens(1, 4, seed=81), tokens(1, 4, seed=82)), (FixedCache(), FixedCache())
    wants = [layer(x, memory, cache=cache) for memory, cache in zip(memories, caches, strict=True)]
    caches[0].load_state_dict(caches[1].state_dict())
    with pytest.raises(CacheError, match="may be others"):
        layer(x, memories[0], cache=caches[0])
    close(layer(x, cache=caches[0]), wants[1])


def test_a_fixed_cache_forgets_the_memory_of_a_call_that_was_refused():
    layer, x, cache = MultiHeadAttention(E, HEADS).double(), tokens(1, 2), FixedCache()
    refused, memory, values = (tokens(1, 4, seed=s) for s in (81, 82, 83))
    with pytest.raises(ShapeError):
        layer(x, refused, cache=cache, lengths=torch.tensor([9]))
    want = layer(x, memory, values, cache=cache)
    with pytest.raises(CacheError, match="may be others"):
        layer(x, refused, cache=cache)
    close(layer(x, cache=cache), want)


def test_a_filled_fixed_cache_refuses_what_came_with_its_keys():
    layer, x, memory, cache = MultiHeadAttention(E, HEADS).double(), tokens(2, 2), tokens(2, 4), FixedCache()
    layer(x, memory, cache=cache)
    for how in ({"lengths": torch.tensor([1, 2])}, {"key_positions": Positions(4)}):
        with pytest.raises(CacheError, match="came with them"):
            layer(x, cache=cache, **how)


def test_queries_of_a_fixed_cache_keep_their_offset():
    layer = MultiHeadAttention(E, HEADS, score_mods=[ALiBi(HEADS)]).double()
    x, memory, cache = tokens(2, 5), tokens(2, 4), FixedCache()
    got = [layer(x[:, :3], memory, cache=cache, positions=Positions(3, offset=7)), layer(x[:, 3:], cache=cache)]
    close(torch.cat(got, 1), layer(x, memory, positions=Positions(5, offset=7)))


@every
def test_tensors_of_the_caller_are_neither_kept_nor_changed(kind):
    layer, x = decoder(5, score_mods=[ALiBi(HEADS)]), tokens(1, 6)
    at, pads = torch.arange(6)[None], torch.tensor([2])
    cache, twin = CACHES[kind](), CACHES[kind]()
    layer(x[:, :4], cache=cache, positions=at[:, :4])
    cache.crop(3)
    with torch.no_grad():
        layer(x[:, 3:4], cache=cache, positions=torch.tensor([[50]]))
    assert at.tolist() == [[0, 1, 2, 3, 4, 5]]
    layer(x[:, :3], cache=twin, positions=Positions(3, offset=-pads))
    pads += 10
    assert twin.next_positions(1).position("cpu").tolist() == [[1]]


def test_lengths_of_a_fixed_cache_are_its_own():
    layer, x, memory, cache = MultiHeadAttention(E, HEADS).double(), tokens(2, 2), tokens(2, 4), FixedCache()
    lengths = torch.tensor([2, 3])
    want = layer(x, memory, cache=cache, lengths=lengths)
    lengths += 1
    close(layer(x, cache=cache), want)


def test_a_cache_that_says_it_is_full_is_as_it_was():
    layer, x = decoder(), tokens(2, 3)
    for how in ({}, {"positions": torch.tensor([[4, 5, 6]])}, {"lengths": torch.tensor([3, 2])}):
        cache = StaticCache(4)
        layer(x, cache=cache, **how)
        before = cache.next_positions(1).position("cpu")
        with pytest.raises(CacheError, match="would hold"):
            layer(x, cache=cache)
        assert cache.next_positions(1).position("cpu").equal(before)
        assert cache.length == 3


def test_a_row_without_a_new_token_keeps_its_position():
    layer, x, cache = decoder(), tokens(2, 3), DynamicCache()
    layer(x[:, :2], cache=cache, positions=Positions(2, offset=-5))
    layer(x[:, 2:], cache=cache, positions=torch.tensor([[0], [0]]), lengths=torch.tensor([1, 0]))
    assert cache.next_positions(1).position("cpu").tolist() == [[1], [-3]]


def test_crop_of_a_ring():
    layer, x = decoder(3), tokens(2, 6)
    explicit = RollingCache(3)
    layer(x, cache=explicit, positions=torch.arange(6)[None])
    explicit.crop(9)  # nothing to drop
    assert explicit.length == 6
    explicit.crop(0)  # nothing is needed
    close(layer(x[:, :2], cache=explicit), layer(x[:, :2]))
    ragged = RollingCache(3)
    layer(x[:, :4], cache=ragged, lengths=torch.tensor([3, 1]))
    ragged.crop(2)  # no row has forgotten anything
    assert ragged.lengths.tolist() == [2, 1]
    got = layer(x[:, 4:], cache=ragged)
    close(got[:1], layer(torch.cat([x[:1, :2], x[:1, 4:]], 1))[:, -2:])


def test_changes_of_mode_leave_what_a_gradient_needs():
    for kind, window in (("dynamic", 11), ("rolling", 5)):
        layer, cache, x = decoder(window), CACHES[kind](), tokens(1, 6).requires_grad_()
        outs = [layer(x[:, t : t + 1], cache=cache) for t in range(4)]
        if kind == "dynamic":
            cache.crop(3)
        with torch.no_grad():
            layer(x[:, 4:5], cache=cache)
        torch.cat(outs, 1).sum().backward()
        assert x.grad[:, :4].ne(0).any()


def test_rows_that_get_nothing_at_all():
    layer, x, cache = decoder(), tokens(2, 2), DynamicCache()
    layer(x[:, :0], cache=cache)
    with torch.no_grad():
        layer(x[:, :1], cache=cache, lengths=torch.tensor([0, 0]))
        got = layer(x, cache=cache)
    close(got, layer(x))


def test_max_length_counts_what_is_stored():
    layer, cache = decoder(max_length=5), DynamicCache()
    layer(tokens(1, 4), cache=cache)
    with pytest.raises(ShapeError, match="holds 4 tokens and query has 2 more, beyond the layer's max_length 5"):
        layer(tokens(1, 2), cache=cache)


def test_selecting_no_row():
    layer, cache = decoder(), DynamicCache()
    layer(tokens(2, 4), cache=cache)
    cache.select([])
    assert layer(tokens(0, 1), cache=cache).shape == (0, 1, E)


def test_a_fixed_cache_notices_that_its_memory_was_written_to():
    cross, cache, memory = MultiHeadAttention(8, 2), FixedCache(), torch.randn(1, 5, 8)
    x, other = torch.randn(1, 2, 8), torch.randn(1, 5, 8)
    cross(x, memory, cache=cache)
    cross(x, memory, cache=cache)
    memory.copy_(other)
    with pytest.raises(CacheError, match="key= may be others"):
        cross(x, memory, cache=cache)
    with torch.inference_mode():  # where nobody counts
        cache, memory = FixedCache(), torch.randn(1, 5, 8)
        assert torch.equal(cross(x, memory, cache=cache), cross(x, memory, cache=cache))


@pytest.mark.plain
def test_rows_to_select_are_a_list():
    layer, cache = MultiHeadAttention(8, 2), DynamicCache()
    with pytest.raises(CacheError, match="empty cache"):
        cache.select(3)
    layer(torch.randn(2, 3, 8), cache=cache)
    for rows in (1, torch.tensor(1)):
        with pytest.raises(ShapeError, match=r"Rows to select are torch.int64 of shape \(\)"):
            cache.select(rows)


def test_lengths_on_another_device():
    layer, x = MultiHeadAttention(8, 2, device="meta"), torch.empty(2, 5, 8, device="meta")
    for cache in (DynamicCache(), StaticCache(9), RollingCache(3), FixedCache()):
        with pytest.raises(ShapeError, match="lengths= is on cpu and the keys are on meta"):
            layer(x, x, cache=cache, lengths=torch.tensor([5, 2]), mask=Causal() & Window(3))
