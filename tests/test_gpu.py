"""The contract on a GPU: masks, score modifications, caches and the layer, as the other files test them on the CPU.

HEADWISE_DEVICE names the device. ``scripts/gpu.sh`` runs all of it on CUDA, and with ``--reduced`` the part that is
not slow on the CPU, so that the file is known to run before a GPU is at hand. The numbers to compare with are always
computed on the CPU in float64.
"""

import copy
import functools
import importlib.util
import itertools
import math
import os
import re
import warnings

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS starts: same bits for the same sums

import pytest
import torch
from cases import MASKS, SCORE_MODS, SHAPES, SMALL_SHAPES, SQUARE_MASKS, Call
from helpers import assert_as_good_as, leaf, pairwise, plain_attention, randn
from torch.nn.attention import SDPBackend, sdpa_kernel

import headwise
import headwise.backends.reference
from headwise import (
    BACKENDS,
    ALiBi,
    Backend,
    Bias,
    CacheError,
    Causal,
    CustomMask,
    Dense,
    MultiHeadAttention,
    Padding,
    RotaryEmbedding,
    ShapeError,
    Softcap,
    UnsupportedError,
    Window,
    attention,
    attention_weights,
    attention_with_lse,
    explain,
    merge_partials,
    philox,
)
from headwise.inspection import head_statistics, record

HERE = os.environ.get("HEADWISE_DEVICE") or ("cuda" if torch.cuda.is_available() else "")
DEVICE = torch.device(HERE or "cpu")
ON_CPU = DEVICE.type == "cpu"
OTHER = "meta" if ON_CPU else "cpu"  # a device that is not the one under test
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HERE, reason="no CUDA device here; HEADWISE_DEVICE=cpu runs this on the CPU"),
    # kernels of a GPU add in any order; the rounding that comes of it is within the tolerance
    pytest.mark.filterwarnings("ignore:(?s).*deterministic"),
]

REFERENCE = next(backend for backend in BACKENDS if backend.name == "reference")
BACKEND = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# fused kernels take other paths for sizes that are multiples of 8, and have more than one tile from 128 on
CALLS = {
    **SHAPES,
    "tiles": Call(batch=2, heads=4, kv_heads=2, rows=67, slots=131, head_dim=64, v_dim=64),
    "tiles, square": Call(batch=1, heads=3, kv_heads=3, rows=137, slots=137, head_dim=32, v_dim=32),
    **SMALL_SHAPES,
}
LSE = ("no", "forward", "gradient")
SLOW = pytest.mark.slow  # not part of the reduced run


@pytest.fixture(autouse=True)
def _whole_precision():
    """float32 means float32, without TF32, and sums of half types are kept in float32."""
    matmul = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: getattr(matmul, name) for name in names}
    precision = torch.get_float32_matmul_precision()
    for name in names:
        setattr(matmul, name, False)
    torch.set_float32_matmul_precision("highest")  # which is to say no TF32
    yield
    torch.set_float32_matmul_precision(precision)
    for name, value in before.items():
        setattr(matmul, name, value)


class Probe(Backend):
    """Takes down which backends cannot run a call, and why, and lets the reference answer."""

    name = "probe"

    def why_not(self, x):
        return None

    def run(self, x):
        self.reasons = {backend.name: backend.why_not(x) for backend in BACKENDS}
        return REFERENCE.run(x)


def moved(mod):
    """A score modification on the device; a bias that is no parameter is not moved by the module."""
    if isinstance(mod, Bias):
        values = mod.values.detach().to(DEVICE)
        return Bias(torch.nn.Parameter(values) if isinstance(mod.values, torch.nn.Parameter) else values)
    return mod.to(DEVICE)


def on_device(tensors):
    return [leaf(t.to(DEVICE)) for t in tensors]


def name_of(row):
    parts = (row["shape"], row["mask"].name, row["mods"].name, "sinks" * row["sinks"], str(row["dtype"])[6:])
    return ", ".join((*filter(None, parts), "lse " + row["lse"]))


def fits(row):
    return row["mask"] not in SQUARE_MASKS or CALLS[row["shape"]].rows == CALLS[row["shape"]].slots


AXES = {
    "shape": tuple(name for name in CALLS if name not in SMALL_SHAPES),
    "mask": (*MASKS, *SQUARE_MASKS),
    "mods": SCORE_MODS,
    "sinks": (False, True),
    "dtype": DTYPES,
    "lse": LSE,
}


def rows_and_marks():
    """Combinations in which every two parts meet; those that bring no part for the first time are slow."""
    rows, met = [], set()
    for row in pairwise(AXES, fits):
        new = {(axis, id(part)) for axis, part in row.items()} - met
        met |= new
        rows.append(pytest.param(row, id=name_of(row), marks=() if new else SLOW))
    return rows


def wanted(row, tensors, trained, seen, grad, dtype):
    """Everything that a call yields by the plain formula on the CPU."""
    call, case = CALLS[row["shape"]], row["mods"]
    leaves, extra = [leaf(t, dtype) for t in tensors], [leaf(t, dtype) for t in trained]

    def modify(scores):  # what is hidden is made finite, so that it has no part in a gradient
        return case.apply(call, scores, extra).masked_fill(~seen, 0)

    out, weights, lse = plain_attention(*leaves[:3], seen, modify=modify, sinks=leaves[3] if row["sinks"] else None)
    found = {"out": out.detach(), "lse": lse.detach(), "weights": weights.detach()}
    return found | gradients(row, out, lse, (*leaves[: 3 + row["sinks"]], *extra), grad)


def given(row, tensors, grad, backend):
    """The same from the library, on the device."""
    out, lse, leaves = called(row, tensors, backend)
    found = {"out": out} | ({} if lse is None else {"lse": lse})
    return {name: t.cpu() for name, t in (found | gradients(row, out, lse, leaves, grad)).items()}


def called(row, tensors, backend):
    call = CALLS[row["shape"]]
    leaves = on_device(tensors)
    mods = [moved(mod) for mod in row["mods"].make(call, row["dtype"])]
    how = {"mask": row["mask"].make(call).to(DEVICE), "score_mods": mods, "backend": backend}
    how["sinks"] = leaves[3] if row["sinks"] else None
    with torch.set_grad_enabled(row["lse"] != "forward"):
        if row["lse"] == "no":
            out, lse = attention(*leaves[:3], **how), None
        else:
            out, lse = attention_with_lse(*leaves[:3], **how)
    return out, lse, (*leaves[: 3 + row["sinks"]], *(p for mod in mods for p in mod.parameters()))


def gradients(row, out, lse, leaves, grad):
    if row["lse"] == "forward":
        return {}
    total = (out * grad["out"].to(out.device, out.dtype)).sum()
    if row["lse"] == "gradient":
        through = grad["lse"].to(lse.device, lse.dtype)
        total = total + (lse.masked_fill(lse == -torch.inf, 0) * through).sum()
    found = [torch.zeros_like(x) for x in leaves]
    if total.requires_grad:
        found = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    return dict(zip(("query", "key", "value", *["sinks"] * row["sinks"], "trained"), found, strict=False))


def term_sizes(call, tensors, weights, grad):
    """Size of the terms of the sum behind each result, before anything cancels."""
    if 0 in weights.shape:
        return {}
    query, key, value = (t.double().square() for t in tensors[:3])
    key, value = (t.repeat_interleave(call.heads // call.kv_heads, 1) for t in (key, value))
    by_out = grad["out"].double().square() @ value.mT
    score = weights.square() * (by_out + grad["lse"].double().square()[..., None])
    scale = 2 * call.head_dim**-0.5  # 2: a modification may double a score

    def largest(squares):  # over the key heads, whose query heads are summed
        return squares.unflatten(1, (call.kv_heads, -1)).sum(2).max().sqrt().item()

    return {
        "out": (weights.square() @ value).max().sqrt().item(),
        "query": scale * (score @ key).max().sqrt().item(),
        "key": scale * largest(score.mT @ query),
        "value": largest(weights.square().mT @ grad["out"].double().square()),
        "sinks": score.sum((0, 2, 3)).max().sqrt().item(),
        "trained": score.max().sqrt().item(),
    }


@functools.cache
def dense(mask, shape):
    return mask.dense(CALLS[shape])


def check(row):
    """Compare a combination on every backend that can run it; the others give a reason."""
    call, dtype = CALLS[row["shape"]], row["dtype"]
    tensors = [*call.tensors(dtype), randn(call.heads, seed=21, dtype=dtype)]
    grad = {
        "out": randn(call.batch, call.heads, call.rows, call.v_dim, seed=22, dtype=dtype),
        "lse": randn(call.batch, call.heads, call.rows, seed=23, dtype=dtype) * (row["lse"] == "gradient"),
    }
    probe = Probe()
    called(row, tensors, probe)
    for name, reason in probe.reasons.items():
        if reason is not None:
            with pytest.raises(UnsupportedError, match=re.escape(reason)):
                called(row, tensors, name)
    seen = dense(row["mask"], row["shape"])
    if row["mods"].hidden is not None:
        seen = seen & ~row["mods"].hidden(call)
    trained = [p.detach() for mod in row["mods"].make(call, dtype) for p in mod.parameters()]
    want, plain = (wanted(row, tensors, trained, seen, grad, d) for d in (torch.float64, torch.float32))
    sizes = term_sizes(call, tensors, want["weights"], grad)
    terms = max(call.slots, call.head_dim, call.v_dim, call.rows * call.heads // max(1, call.kv_heads))
    for backend in (backend for backend in BACKENDS if probe.reasons[backend.name] is None):
        half = dtype.itemsize == 2 and backend is not REFERENCE
        for name, tensor in given(row, tensors, grad, backend.name).items():
            what = f"{backend.name} on {DEVICE}, {name_of(row)}: {name}"
            size = sizes.get(name, 0.0)
            if name == "out" and (not half or ON_CPU):
                # a GPU's matrix units take weights in the dtype of the values; what sinks scale is rounded before
                size = want["out"].abs().max().item() if half and row["sinks"] and tensor.numel() else 0.0
            if name == "lse":
                assert tensor.dtype == torch.float32, what
                tensor = tensor.to(dtype) if half else tensor  # a coarser exponential, good for its own precision
            else:
                assert tensor.dtype == dtype, what
            assert_as_good_as(tensor, want[name], plain[name], terms=terms, inner=size, what=what)


@pytest.mark.parametrize("row", rows_and_marks() if HERE else ())
def test_output_and_gradients(row):
    check(row)


@pytest.mark.parametrize("shape", SMALL_SHAPES)
def test_one_of_everything_and_nothing(shape):
    call = CALLS[shape]
    for number, mask in enumerate((*MASKS, *SQUARE_MASKS)):
        if mask in SQUARE_MASKS and call.rows != call.slots:
            continue
        row = {"shape": shape, "mask": mask, "mods": SCORE_MODS[number % len(SCORE_MODS)]}
        check(row | {"sinks": number % 2 == 1, "dtype": DTYPES[number % 3], "lse": LSE[number // 2 % 3]})


@pytest.mark.parametrize("shape", ("tiles", "tiles, square"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=SLOW)), ids=str)
@pytest.mark.parametrize("kernel", ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"))
def test_each_kernel_of_torch(kernel, dtype, shape):
    """Whichever torch chooses, on this GPU or another: the sdpa backend is right, rows that see nothing included."""
    call, ran = CALLS[shape], []
    masks = ("full", "causal", "sliding", "padding, lengths", "causal, padded", "custom")
    for mask in (mask for mask in MASKS if mask.name in masks):
        row = {"shape": shape, "mask": mask, "mods": SCORE_MODS[0], "sinks": False, "dtype": dtype, "lse": "no"}
        tensors = [t.to(DEVICE) for t in call.tensors(dtype)]
        try:
            with warnings.catch_warnings(), sdpa_kernel(getattr(SDPBackend, kernel)):
                warnings.simplefilter("ignore")  # torch lists why each kernel was passed over
                attention(*tensors, mask=mask.make(call).to(DEVICE), backend="sdpa")
                check(row)
        except RuntimeError as error:
            if not any(said in str(error) for said in ("No available kernel", "No viable backend")):
                raise
            continue
        ran.append(mask.name)
    if not ran:
        pytest.skip(f"torch's {kernel} takes none of these calls on {DEVICE}")


def test_what_sdpa_does_not_run_here_the_reference_does():
    call = SHAPES["gqa"]
    query, key, value = (t.to(DEVICE) for t in call.tensors())
    probe, sinks = Probe(), torch.zeros(15, device=DEVICE)
    for run in (
        lambda backend: attention(query, key, value, sinks=sinks, backend=backend),
        lambda backend: attention_with_lse(query, key, value, backend=backend)[0],
        lambda backend: attention(query, key, value, score_mods=[Softcap(2.0)], backend=backend),
    ):
        want, reason = run(probe), probe.reasons["sdpa"]
        if ON_CPU and reason is None:
            continue
        assert reason is not None
        with pytest.raises(UnsupportedError, match=re.escape(reason)):
            run("sdpa")
        able = next(name for name, why in probe.reasons.items() if why is None)  # the CPU has a kernel between them
        assert run("auto").equal(run(able)) and run("reference").equal(want)


# --- what must not be seen


@BACKEND
@DTYPE
def test_a_query_that_sees_nothing(backend, dtype):
    for shape, mask in itertools.product(("gqa", "tiles"), ("nothing", "padding, lengths", "padding, left", "dense")):
        call, case = CALLS[shape], next(case for case in MASKS if case.name == mask)
        dead = ~dense(case, shape).any(-1)
        for grad in (False, True):
            leaves = on_device(call.tensors(dtype))
            with torch.set_grad_enabled(grad):
                out = attention(*leaves, mask=case.make(call).to(DEVICE), backend=backend.name)
            assert out.cpu()[dead].eq(0).all() and out.isfinite().all(), (shape, mask)
            if grad:
                found = torch.autograd.grad(out.float().square().sum(), leaves)
                assert all(g.isfinite().all() for g in found), (shape, mask)
                assert found[0].cpu()[dead].eq(0).all(), (shape, mask)
        lse = attention_with_lse(*leaves, mask=case.make(call).to(DEVICE))[1].cpu()
        assert lse[dead].isneginf().all() and lse[~dead].isfinite().all()


HIDING = {
    "padding, lengths": (lambda c: Padding([c.slots - 9, 5]), lambda b, s, c: s >= (c.slots - 9, 5)[b]),
    "padding, left": (lambda c: Padding(left=[3, 7]), lambda b, s, c: s < (3, 7)[b]),
    "padding, booleans": (
        lambda c: Padding(torch.arange(c.slots) % torch.tensor([[2], [3]]) > 0),
        lambda b, s, c: s % (2, 3)[b] == 0,
    ),
    "sliding": (lambda c: Causal() & Window(7), lambda b, s, c: s < c.slots - c.rows - 6),
    "custom": (lambda c: CustomMask(lambda b, h, q, k: k % 5 > b), lambda b, s, c: s % 5 <= b),
}


@BACKEND
@pytest.mark.parametrize("bad", (math.nan, math.inf))
@pytest.mark.parametrize("hiding", HIDING)
def test_what_no_query_may_see_may_hold_anything(hiding, bad, backend):
    make, is_hidden = HIDING[hiding]
    for dtype, shape in itertools.product(DTYPES, ("gqa", "tiles")):
        call = CALLS[shape]
        hidden = torch.tensor([[is_hidden(b, s, call) for s in range(call.slots)] for b in range(2)])
        hidden = hidden.to(DEVICE)[:, None, :, None]
        results = []
        for fill in (0.0, bad):
            query, key, value = (t.to(DEVICE) for t in call.tensors(dtype))
            leaves = [leaf(t) for t in (query, key.masked_fill(hidden, fill), value.masked_fill(hidden, fill))]
            out = attention(*leaves, mask=make(call).to(DEVICE), backend=backend.name)
            results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
        for clean, dirty in zip(*results, strict=True):
            size = clean.abs().max().item()  # a sum in another order may be rounded to the neighbouring number
            what = f"{backend.name}, {shape}, {dtype}"
            assert_as_good_as(dirty, clean.double(), clean, terms=call.slots, inner=size, what=what)
        for grad in results[1][2:]:
            assert grad.masked_select(hidden).eq(0).all()


@BACKEND
def test_nan_that_may_be_seen_stays_visible(backend):
    for shape, what in itertools.product(("gqa", "tiles"), (1, 2)):
        tensors = [t.to(DEVICE) for t in CALLS[shape].tensors()]
        tensors[what][0, 1, 4] = math.nan
        rows = attention(*tensors, mask=Causal(), backend=backend.name).isnan().any(-1)
        group = CALLS[shape].heads // CALLS[shape].kv_heads
        assert rows[0, group : 2 * group].all(), "all queries stand after key 4"
        assert rows.sum() == group * CALLS[shape].rows


@BACKEND
def test_large_scores_of_half_types(backend):
    call = CALLS["tiles"]
    query, key, value = (t.to(DEVICE) for t in call.tensors(torch.float16))
    out = attention(query * 60, key * 60, value, scale=1.0, mask=Causal(), backend=backend.name)
    assert out.isfinite().all()
    weights = attention_weights(query * 60, key * 60, scale=1.0, mask=Causal())
    assert weights.isfinite().all() and weights.max() > 0.99


# --- other devices


def test_tensors_on_another_device_are_refused():
    call = SHAPES["gqa"]
    query, key, value = (t.to(DEVICE) for t in call.tensors())
    both = rf"{OTHER}.*{DEVICE.type}|{DEVICE.type}.*{OTHER}"
    length = torch.tensor([3, 5], device=OTHER)
    for how in (
        {"mask": Padding(length)},
        {"mask": Causal() & Padding(left=length)},
        {"mask": torch.ones(7, 11, dtype=torch.bool, device=OTHER)},
        {"sinks": torch.zeros(15, device=OTHER)},
        {"score_mods": [Bias(torch.zeros(7, 11, device=OTHER))]},
        {"score_mods": [ALiBi(15, torch.ones(15, device=OTHER))]},
        {"mask": CustomMask(lambda b, h, q, k: torch.ones(1, 1, 7, 11, dtype=torch.bool, device=OTHER))},
    ):
        for backend in ("auto", *(b.name for b in BACKENDS)):
            with pytest.raises(ShapeError, match=both):
                attention(query, key, value, backend=backend, **how)
    with pytest.raises(ShapeError, match=both):
        attention(query, key.to(OTHER), value)
    with pytest.raises(ShapeError, match=both):
        attention(query, key, value.to(OTHER))
    out, lse = attention_with_lse(query, key, value)
    with pytest.raises(ShapeError, match=both):
        merge_partials(out, lse, out.to(OTHER), lse.to(OTHER))
    layer = MultiHeadAttention(30, 5, device=DEVICE)
    with pytest.raises(ShapeError, match=both):
        layer(torch.zeros(2, 7, 30, device=DEVICE), mask=Padding(length))


def test_masks_and_layers_move():
    mask = (Causal() & Padding([3, 5])) | Dense(torch.ones(1, 1, dtype=torch.bool))
    assert {t.device.type for t in mask.to(DEVICE).tensors()} == {DEVICE.type}
    assert mask.to(DEVICE).to("cpu").tensors().__next__().device.type == "cpu"
    layer = MultiHeadAttention(30, 5, rotary=RotaryEmbedding(6), sinks=True, score_mods=[ALiBi(5)]).to(DEVICE)
    assert {p.device.type for p in (*layer.parameters(), *layer.buffers())} == {DEVICE.type}
    x = randn(2, 7, 30).to(DEVICE)
    assert copy.deepcopy(layer)(x).equal(layer(x)) and layer(x).device.type == DEVICE.type


# --- dropout


@BACKEND
def test_dropout_follows_torchs_generator_and_keeps_the_mean(backend):
    call = Call(batch=4, heads=5, kv_heads=5, rows=131, slots=131, head_dim=64, v_dim=64)
    query, key, value = (t.to(DEVICE) for t in call.tensors())
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        # values of one: the output is the sum of the weights that are kept, of mean 1
        runs.append(attention(query, key, torch.ones_like(value), dropout_p=0.3, backend=backend.name)[..., 0])
    assert runs[0].equal(runs[1]) and not runs[0].equal(runs[2])
    weights = attention_weights(query, key).cpu()
    deviation = (weights.square().sum(-1).flatten() * 0.3 / 0.7).sum().sqrt() / runs[0].numel()
    assert (runs[0].cpu().mean() - 1).abs() < 5 * deviation
    assert (runs[0] - 1).abs().max() > 0.05


def test_a_seed_drops_the_same_on_every_device():
    for seed, b, h, q, k, word in (
        (0, 0, 0, 0, 0, 0x6627E8D5),
        (1234, 1, 2, 3, 5, 0xE8F4A476),
        (2**40 + 7, 0, 11, 4095, 4094, 0xE698F250),
    ):
        places = [torch.tensor(i, device=DEVICE)[None, None, None, None] for i in (b, h, q, k)]
        for given in (seed, torch.tensor(seed), torch.tensor(seed, device=DEVICE)):
            assert philox.words(given, *places).item() == word
    call = SHAPES["gqa"]
    query, key, _ = call.tensors()
    value = torch.eye(11).expand(2, 3, 11, 11)  # the output is the weights themselves
    here = attention(*(t.to(DEVICE) for t in (query, key, value)), dropout_p=0.5, seed=3)
    assert (here != 0).cpu().equal(attention(query, key, value, dropout_p=0.5, seed=3) != 0)
    probe = Probe()
    attention(*(t.to(DEVICE) for t in (query, key, value)), dropout_p=0.5, seed=3, backend=probe)
    assert probe.reasons["sdpa"] is not None


# --- functions beside attention


@DTYPE
def test_partial_results_merge(dtype):
    call = CALLS["tiles"]
    query, key, value = (t.to(DEVICE) for t in call.tensors(dtype))
    first, later = Padding(37), ~Padding(37) & Causal()
    parts = [attention_with_lse(query, key, value, mask=mask) for mask in (first, later)]
    out, lse = merge_partials(*parts[0], *parts[1])
    tensors = [t.double().cpu() for t in (query, key, value)]
    seen = torch.ones(67, 131, dtype=torch.bool).tril(64) | (torch.arange(131) < 37)
    want, plain = plain_attention(*tensors, seen), plain_attention(*(t.float() for t in tensors), seen)
    # each part is rounded before they are joined
    assert_as_good_as(out.cpu(), want[0], plain[0], terms=131, inner=want[0].abs().max().item(), what="out")
    assert_as_good_as(lse.cpu(), want[2], plain[2], terms=131, what="lse")


def test_weights_records_and_explanations():
    call = SHAPES["square"]
    query, key, value = call.tensors()
    here = [t.to(DEVICE) for t in (query, key, value)]
    how = {"mask": Causal(), "score_mods": [Softcap(2.0)]}
    for stage in ("scores", "capped", "biased", "weights"):
        want = attention_weights(query.double(), key.double(), rows=[1, 3], stage=stage, **how)
        plain = attention_weights(query, key, rows=[1, 3], stage=stage, **how)
        got = attention_weights(*here, rows=torch.tensor([1, 3], device=DEVICE), stage=stage, **how)
        assert_as_good_as(got.cpu(), want, plain, terms=call.head_dim, what=stage)
    assert "causal" in str(explain(*here, mask=Causal())).lower()
    layer = MultiHeadAttention(30, 5, mask=Causal(), device=DEVICE)
    x = randn(2, 11, 30).to(DEVICE)
    with record(layer) as calls:
        layer(x)
    assert_as_good_as(calls[0].weights().sum(-1), torch.ones(2, 5, 11, dtype=torch.float64, device=DEVICE), terms=11)
    assert head_statistics(calls[0].inputs).head(0)["next"] == 0
    assert str(explain(layer, x))


# --- the layer

LAYERS = {
    "plain": {},
    "gqa, rotary": {"num_kv_heads": 2, "rotary": lambda: RotaryEmbedding(8)},
    "mqa, sinks": {"num_kv_heads": 1, "sinks": True, "bias": False},
    "norms, alibi": {
        "q_norm": lambda: torch.nn.RMSNorm(8),
        "k_norm": lambda: torch.nn.RMSNorm(8),
        "score_mods": lambda: [ALiBi(6)],
    },
    "softcap, wide values": {"v_head_dim": 11, "out_dim": 17, "score_mods": lambda: [Softcap(3.0)]},
}


def layer_of(name, **more):
    """A layer on the CPU, and the same in float64 there and in float32 on the device."""
    made = {k: v() if callable(v) else v for k, v in LAYERS[name].items()}
    layer = MultiHeadAttention(48, 6, **made, **more)
    with torch.no_grad():  # biases and sinks begin at zero
        for number, p in enumerate(layer.parameters()):
            p.add_(randn(*p.shape, seed=40 + number, scale=0.1))
    return layer, copy.deepcopy(layer).double(), copy.deepcopy(layer).to(DEVICE)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_and_every_parameter(name):
    x, lengths = randn(2, 131, 48, seed=31), torch.tensor([131, 90])
    results = []
    for layer, tokens in zip(layer_of(name), (x, x.double(), x.to(DEVICE)), strict=True):
        tokens, mask = leaf(tokens), Causal() & Padding(lengths).to(tokens.device)
        out = layer(tokens, mask=mask)
        results.append([out, *torch.autograd.grad(out.square().sum(), [tokens, *layer.parameters()])])
    for number, (plain, want, got) in enumerate(zip(*results, strict=True)):
        # the gradient of a key bias is a sum that cancels: its terms are as large as those of other gradients
        inner = max(t.abs().max().item() for t in results[1][1:]) if number else 0.0
        assert_as_good_as(got.cpu(), want, plain, terms=2 * 131, inner=inner, what=f"{name}, result {number}")


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_layer_in_half_precision(dtype):
    layer, double, here = layer_of("gqa, rotary", mask=Causal())
    layer, double, here = (x.to(dtype) for x in (layer, double, here))
    x = randn(2, 131, 48, seed=32, dtype=dtype)

    def by_parts(width):
        """Every part rounds what it returns to the dtype, as any layer in that dtype has to; float64 does not."""
        own = copy.deepcopy(layer).to(width)

        def rounded(t):
            return t if width == torch.float64 else t.to(dtype).to(width)

        q, k, v = (rounded(p(x.to(width))) for p in (own.q_proj, own.k_proj, own.v_proj))
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (q, k, v))
        q, k = (rounded(own.rotary(t, torch.arange(131)[None])) for t in (q, k))
        seen = torch.ones(131, 131, dtype=torch.bool).tril()
        return own.out_proj(rounded(plain_attention(q, k, v, seen)[0]).transpose(1, 2).flatten(2))

    with torch.no_grad():
        got = here(x.to(DEVICE))
        assert got.dtype == dtype
        assert_as_good_as(got.cpu(), by_parts(torch.float64), by_parts(torch.float32), terms=131)
        with torch.autocast(DEVICE.type, dtype=dtype):
            inside = here.float()(x.to(DEVICE).float())
        assert inside.dtype == dtype
        assert_as_good_as(inside.cpu(), by_parts(torch.float64), by_parts(torch.float32), terms=131, what="autocast")


@BACKEND
def test_the_same_in_every_mode(backend, monkeypatch):
    layer = MultiHeadAttention(48, 6, mask=Causal() & Window(30), backend=backend.name, device=DEVICE)
    x = randn(2, 131, 48, seed=33).to(DEVICE)
    want = layer(x).detach()
    monkeypatch.setattr(headwise.backends.reference, "BLOCK", 2 * 6 * 131 * 17)  # many blocks of queries
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            got = layer.eval()(x)
        assert_as_good_as(got, want.double(), want, terms=131, inner=want.abs().max().item(), what=str(mode))


# --- caches

CACHES = {
    "DynamicCache": lambda kind: kind(),
    "StaticCache": lambda kind: kind(40),
    "RollingCache": lambda kind: kind(9),
}
CACHE = pytest.mark.parametrize("cache", CACHES)
WITH = pytest.mark.parametrize("name", ("plain", "gqa, rotary", "mqa, sinks", "norms, alibi"))


def in_chunks(layer, x, cache, sizes):
    return torch.cat([layer(part, cache=cache) for part in x.split(sizes, 1)], 1)


@CACHE
@WITH
@pytest.mark.parametrize("grad", (False, True), ids=("no_grad", "grad"))
def test_any_chunking_equals_one_pass(cache, name, grad):
    kind = getattr(headwise, cache)
    layer, double, here = layer_of(name, mask=Causal() & Window(9))
    x = randn(2, 31, 48, seed=34)
    want, plain = double(x.double()).detach(), layer(x).detach()
    for sizes in ([31], [1] * 31, [13, 1, 1, 5, 11], [1, 30]):
        with torch.set_grad_enabled(grad):
            got = in_chunks(here, x.to(DEVICE), CACHES[cache](kind), sizes)
        assert_as_good_as(got.cpu(), want, plain, terms=48, what=f"{cache}, {name}, {sizes}")


@CACHE
@WITH
def test_rows_of_different_lengths_equal_each_sequence_alone(cache, name):
    kind = getattr(headwise, cache)
    layer, double, here = layer_of(name, mask=Causal() & Window(9))
    chunks = [(11, [11, 4]), (1, [1, 1]), (1, [1, 1]), (7, [3, 7]), (1, [1, 1])]
    x, held = randn(2, 31, 48, seed=35), CACHES[cache](kind)
    place, found = [0, 0], [[], []]
    for count, lengths in chunks:
        part = torch.full((2, count, 48), 100.0)  # what fills up a row is not stored
        for row, length in enumerate(lengths):
            part[row, :length] = x[row, place[row] : place[row] + length]
        with torch.no_grad():
            out = here(part.to(DEVICE), cache=held, lengths=torch.tensor(lengths, device=DEVICE)).cpu()
        for row, length in enumerate(lengths):
            found[row].append(out[row, :length])
            place[row] += length
    for row in range(2):
        alone = x[row : row + 1, : place[row]]
        want, plain = double(alone.double()).detach()[0], layer(alone).detach()[0]
        assert_as_good_as(torch.cat(found[row]), want, plain, terms=48, what=f"{cache}, {name}, row {row}")


def test_a_fixed_cache_of_cross_attention():
    kind = headwise.FixedCache
    layer, double, here = layer_of("plain")
    memory, x = randn(2, 23, 48, seed=36), randn(2, 5, 48, seed=37)
    cache = kind()
    with torch.no_grad():
        got = [here(x[:, :1].to(DEVICE), memory.to(DEVICE), cache=cache)]
        got += [here(part.to(DEVICE), cache=cache) for part in x[:, 1:].split(2, 1)]
        want, plain = double(x.double(), memory.double()), layer(x, memory)
    assert_as_good_as(torch.cat(got, 1).cpu(), want, plain, terms=48)


@CACHE
def test_a_cache_is_reordered_copied_saved_and_refuses_other_devices(cache, tmp_path):
    kind = getattr(headwise, cache)
    layer, double, here = layer_of("gqa, rotary", mask=Causal() & Window(9))
    x, last = randn(2, 7, 48, seed=38), randn(2, 1, 48, seed=39)
    order = [1, 0]
    with torch.no_grad():
        want = double(torch.cat([x[order], last], 1).double())[:, -1:]
        plain = layer(torch.cat([x[order], last], 1))[:, -1:]
        first = CACHES[cache](kind)
        here(x.to(DEVICE), cache=first)
        twin = first.fork()
        torch.save(first.state_dict(), tmp_path / "cache.pt")
        loaded = CACHES[cache](kind)
        loaded.load_state_dict(torch.load(tmp_path / "cache.pt", map_location=DEVICE))
        for held in (twin, loaded):
            held.select(torch.tensor(order, device=DEVICE))
            assert_as_good_as(here(last.to(DEVICE), cache=held).cpu(), want, plain, terms=48, what=cache)
        elsewhere = torch.zeros(2, 2, 1, 8, device=OTHER)
        with pytest.raises(CacheError, match=f"{DEVICE.type}.*{OTHER}"):
            first.append(elsewhere, elsewhere, first.next_positions(1))


# --- compiled; on a GPU by Triton, which takes a while, so these come last

compiled = pytest.mark.skipif(
    not ON_CPU and importlib.util.find_spec("triton") is None, reason="there is no Triton to compile with"
)
TRACED = [
    pytest.mark.plain,
    compiled,
    # torch's own modules warn about themselves while they trace
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def traced(function, tmp_path, monkeypatch, **how):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # leaves nothing behind, finds nothing
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager" if ON_CPU else "inductor", **how)


@SLOW
@pytest.mark.parametrize("backend", [pytest.param(b, id=b.name, marks=TRACED) for b in BACKENDS])
def test_compiled_layer(backend, tmp_path, monkeypatch):
    layer, double, here = layer_of("gqa, rotary", mask=Causal() & Window(30), backend=backend.name)
    run = traced(here, tmp_path, monkeypatch)
    for count in (67, 131):
        x = randn(2, count, 48, seed=41)
        results = []
        for one, tokens in ((layer, x), (double, x.double()), (run, x.to(DEVICE))):
            tokens = leaf(tokens)
            out = one(tokens)
            results.append([out, torch.autograd.grad(out.square().sum(), tokens)[0]])
        for plain, want, got in zip(*results, strict=True):
            inner = want.abs().max().item()  # a compiler fuses steps, and takes another order
            assert_as_good_as(got.cpu(), want, plain, terms=131, inner=inner, what=f"{backend.name}, {count} tokens")


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=TRACED), pytest.param(torch.bfloat16, marks=[*TRACED, SLOW])], ids=str
)
def test_compiled_attention_of_padded_rows(dtype, tmp_path, monkeypatch):
    def run(query, key, value, lengths):
        return attention(query, key, value, mask=Causal() & Padding(lengths))

    fast = traced(run, tmp_path, monkeypatch)
    call = CALLS["tiles"]
    lengths = torch.tensor([131, 90])
    tensors = call.tensors(dtype)
    seen = torch.ones(67, 131, dtype=torch.bool).tril(64) & (torch.arange(131) < lengths[:, None, None, None])
    with torch.no_grad():
        got = fast(*(t.to(DEVICE) for t in tensors), lengths.to(DEVICE)).cpu()
    want, plain = (plain_attention(*(t.to(d) for t in tensors), seen) for d in (torch.float64, torch.float32))
    inner = (want[1].square() @ tensors[2].double().repeat_interleave(2, 1).square()).max().sqrt().item()
    assert_as_good_as(got, want[0], plain[0], terms=131, inner=inner * (dtype.itemsize == 2))
