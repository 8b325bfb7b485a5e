"""The contract of every backend: output, log-sum-exp and every gradient against the oracle in float64.

The parts come from cases.py. Here every two of them meet; the full product is marked slow.
"""

import functools
import itertools

import oracle
import pytest
import torch
from cases import (
    BACKEND_NAMES,
    DTYPES,
    MASKS,
    SCORE_MODS,
    SHAPES,
    SMALL_SHAPES,
    SQUARE_MASKS,
    Call,
    MaskCase,
    ScoreCase,
)
from helpers import assert_as_good_as, leaf, pairwise, plain_attention, randn

from headwise import BACKENDS, ALiBi, Backend, Bias, Full, Softcap, UnsupportedError, attention, attention_with_lse
from headwise.backends.native import MISSING, Native, instruction_sets
from headwise.backends.reference import Reference
from headwise.functional import prepare, run

AXES = {
    "shape": tuple(SHAPES),
    "mask": (*MASKS, *SQUARE_MASKS),
    "mods": SCORE_MODS,
    "sinks": (False, True),
    "dtype": DTYPES,
    "lse": ("no", "value", "gradient"),
}
# every way in which a call of this file may be refused; a reason that is never given fails as well
REASONS = {
    "sdpa": {
        "it cannot modify scores",
        "its log-sum-exp has no gradient",
        "its log-sum-exp, which sinks need too, is not to be had with the gradient of a bias",
    },
    "native": {"it knows no custom modification of scores", "it caps scores before anything else"},
    "reference": set(),
}


def test_the_chooser_meets_every_pair():
    axes = {"a": tuple(range(5)), "b": tuple(range(3)), "c": (True, False), "d": tuple("wxyz")}
    rows = pairwise(axes)
    for one, two in itertools.combinations(axes, 2):
        assert {(row[one], row[two]) for row in rows} == set(itertools.product(axes[one], axes[two]))
    assert len(rows) < 40
    assert {row["a"] for row in pairwise(axes, lambda row: row["a"] != 2)} == {0, 1, 3, 4}
    assert pairwise(axes, chosen=rows) == []


CALLS = {**SHAPES, **SMALL_SHAPES}


def _name(row: dict) -> str:
    parts = (row["shape"], row["mask"].name, row["mods"].name, "sinks" * row["sinks"])
    return ", ".join((*filter(None, parts), str(row["dtype"])[6:], "lse " + row["lse"]))


def _fits(row: dict) -> bool:
    call = CALLS[row["shape"]]
    return row["mask"] not in SQUARE_MASKS or call.rows == call.slots


# the CPU kernel with each instruction set of this processor as well: auto takes the first
ALL: dict[str, Backend] = {backend.name: backend for backend in BACKENDS}
ALL |= {f"native {isa}": Native(isa) for isa in instruction_sets()[1:]}


def _backend(name: str) -> Backend:
    return ALL[name]


@functools.cache
def _reason(backend: str, mods: ScoreCase, sinks: bool, lse: str) -> str | None:
    """Why a backend cannot run a call with these parts; nothing else may decide it."""
    call = SHAPES["gqa"]
    leaves = [leaf(t) for t in (*call.tensors(), torch.zeros(call.heads))]
    made = mods.make(call, torch.float32)
    x = prepare(*leaves[:3], Full(), made, leaves[3] if sinks else None, None, 0.0, None, None, None, lse)
    return _backend(backend).why_not(x)


def _able(row: dict) -> list[str]:
    return [name for name in ALL if _reason(name, row["mods"], row["sinks"], row["lse"]) is None]


def _chosen() -> list[dict]:
    """Rows in which, for each backend, every two parts meet that it can run together."""
    rows = []
    for name in ALL:
        runs = [row for row in rows if name in _able(row)]
        rows += pairwise(AXES, lambda row, name=name: _fits(row) and name in _able(row), runs)
    return rows


@functools.cache
def _seen(shape: str, mask: str) -> torch.Tensor:
    return next(case for case in AXES["mask"] if case.name == mask).dense(CALLS[shape])


def _gradients(row: dict, total: torch.Tensor, leaves: tuple) -> dict:
    found = [torch.zeros_like(x) for x in leaves]
    if total.requires_grad:
        found = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    return dict(zip(("query", "key", "value", *["sinks"] * row["sinks"], "trained"), found, strict=False))


def _wanted(row: dict, tensors: list, trained: list, dtype: torch.dtype, grad: dict, formula) -> dict:
    """Everything that a call yields by a formula: output, weights, log-sum-exp and gradients."""
    call, case = CALLS[row["shape"]], row["mods"]
    leaves = [leaf(t, dtype) for t in tensors]
    extra = [leaf(t, dtype) for t in trained]
    seen = _seen(row["shape"], row["mask"].name)
    if case.hidden is not None:
        seen = seen & ~case.hidden(call)

    def modify(scores):  # hidden scores are finite here, so that what is not seen has no part in a gradient
        return case.apply(call, scores, extra).masked_fill(~seen, 0)

    out, weights, lse = formula(*leaves[:3], seen, modify=modify, sinks=leaves[3] if row["sinks"] else None)
    total = (out * grad["out"].to(dtype)).sum()
    if row["lse"] == "gradient":
        total = total + (lse.masked_fill(lse == -torch.inf, 0) * grad["lse"].to(dtype)).sum()
    found = _gradients(row, total, (*leaves[: 3 + row["sinks"]], *extra))
    return {**found, "out": out.detach(), "lse": lse.detach(), "weights": weights.detach()}


def _given(row: dict, backend: str, tensors: list, grad: dict) -> dict:
    """The same as the library gives it; the log-sum-exp only if asked for."""
    call = CALLS[row["shape"]]
    mods = row["mods"].make(call, row["dtype"])
    leaves = [leaf(t) for t in tensors]
    sinks = leaves[3] if row["sinks"] else None
    mask = row["mask"].make(call)
    x = prepare(*leaves[:3], mask, mods, sinks, None, 0.0, None, None, None, row["lse"])
    out, lse = run(x, ALL[backend])
    assert (lse is None) == (row["lse"] == "no")
    total = (out * grad["out"]).sum()
    if row["lse"] == "gradient":
        total = total + (lse.masked_fill(lse == -torch.inf, 0) * grad["lse"]).sum()
    leaves = (*leaves[: 3 + row["sinks"]], *(p for mod in mods for p in mod.parameters()))
    return {"out": out, **({} if lse is None else {"lse": lse}), **_gradients(row, total, leaves)}


def _inner(call: Call, tensors: list, weights: torch.Tensor, grad: dict) -> dict[str, float]:
    """Size of the terms of the sum behind each gradient, before anything cancels."""
    if 0 in weights.shape:
        return {}
    query, key, value = (t.double().square() for t in tensors[:3])
    key, value = (t.repeat_interleave(call.heads // call.kv_heads, 1) for t in (key, value))
    by_out = torch.einsum("bhtv,bhsv->bhts", grad["out"].double().square(), value)
    score = weights.square() * (by_out + grad["lse"].double().square()[..., None])
    scale = 2 * call.head_dim**-0.5  # 2: a modification may double a score

    def largest(squares):  # over the key heads, whose query heads are summed
        return squares.unflatten(1, (call.kv_heads, -1)).sum(2).max().sqrt().item()

    return {
        "query": scale * (score @ key).max().sqrt().item(),
        "key": scale * largest(score.mT @ query),
        "value": largest(weights.square().mT @ grad["out"].double().square()),
        "sinks": score.sum((0, 2, 3)).max().sqrt().item(),
        "trained": score.max().sqrt().item(),
    }


@functools.lru_cache(maxsize=2)
def _expected(shape: str, mask: MaskCase, mods: ScoreCase, sinks: bool, dtype: torch.dtype, through_lse: bool) -> tuple:
    """Inputs and incoming gradients of a combination, and what the oracle and the plain formula make of them."""
    call = CALLS[shape]
    tensors = [*call.tensors(dtype), randn(call.heads, seed=21, dtype=dtype)]
    grad = {
        "out": randn(call.batch, call.heads, call.rows, call.v_dim, seed=22, dtype=dtype),
        "lse": randn(call.batch, call.heads, call.rows, seed=23, dtype=dtype) * through_lse,
    }
    row = {"shape": shape, "mask": mask, "mods": mods, "sinks": sinks, "lse": "gradient" if through_lse else "no"}
    trained = [p.detach() for mod in mods.make(call, dtype) for p in mod.parameters()]
    want = _wanted(row, tensors, trained, torch.float64, grad, oracle.attend)
    return tensors, grad, want, _wanted(row, tensors, trained, torch.float32, grad, plain_attention)


def _check(row: dict) -> None:
    """Compare one combination on every backend that can run it."""
    call, dtype = CALLS[row["shape"]], row["dtype"]
    through_lse = row["lse"] == "gradient"
    tensors, grad, want, plain = _expected(row["shape"], row["mask"], row["mods"], row["sinks"], dtype, through_lse)
    inner = _inner(call, tensors, want["weights"], grad)
    terms = max(call.slots, call.head_dim, call.v_dim, call.rows * call.heads // call.kv_heads)
    for backend in _able(row):
        for name, got in _given(row, backend, tensors, grad).items():
            what = f"{backend}, {_name(row)}: {name}"
            if name == "lse" and backend == "sdpa" and dtype.itemsize == 2:
                # torch's kernel takes a coarser exponential for half types, good for their own precision
                assert got.dtype == torch.float32
                assert_as_good_as(got.to(dtype), want[name], plain[name], terms=terms, what=what)
                continue
            size = inner.get(name, 0.0)
            if name == "out" and backend == "sdpa" and row["sinks"] and dtype.itemsize == 2 and got.numel():
                size = want["out"].abs().max().item()  # the kernel rounds its output before the sink scales it
            assert got.dtype == (torch.promote_types(dtype, torch.float32) if name == "lse" else dtype), what
            assert_as_good_as(got, want[name], plain[name], terms=terms, inner=size, what=what)


ROWS = _chosen()


@pytest.mark.parametrize("row", [pytest.param(row, id=_name(row)) for row in ROWS])
def test_output_and_gradients(row):
    _check(row)


@pytest.mark.parametrize("shape", SMALL_SHAPES)
def test_one_of_everything_and_nothing(shape):
    parts = [AXES[name] for name in ("mods", "sinks", "dtype", "lse")]
    for number, mask in enumerate(AXES["mask"]):
        # walk through the other parts, so that all of them have their turn
        rest = [values[(number // 2**i) % len(values)] for i, values in enumerate(parts)]
        row = dict(zip(("mods", "sinks", "dtype", "lse"), rest, strict=True))
        row |= {"shape": shape, "mask": mask}
        if _fits(row):
            _check(row)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", AXES["mask"], ids=lambda case: case.name)
@pytest.mark.parametrize("shape", CALLS)
def test_the_full_product(shape, mask, dtype):
    given = {"shape": shape, "mask": mask, "dtype": dtype}
    if not _fits(given):
        pytest.skip("the mask is for as many queries as keys")
    for mods, sinks, lse in itertools.product(*(AXES[name] for name in ("mods", "sinks", "lse"))):
        _check({**given, "mods": mods, "sinks": sinks, "lse": lse})


def test_a_backend_refuses_for_exactly_the_known_reasons():
    # in full over the parts that decide it: a backend that refuses everything, or one thing more, fails
    given, able = {name: set() for name in BACKEND_NAMES}, dict.fromkeys(BACKEND_NAMES, 0)
    for mods, sinks, lse in itertools.product(*(AXES[name] for name in ("mods", "sinks", "lse"))):
        for name in BACKEND_NAMES:
            reason = _reason(name, mods, sinks, lse)
            able[name] += reason is None
            if reason is not None:
                given[name].add(reason.split(" (")[0])
    own = {"native": {MISSING}} if MISSING else {}
    assert given == REASONS | own
    assert able == {"native": 0 if MISSING else 60, "sdpa": 23, "reference": len(SCORE_MODS) * 6}


def test_a_refusal_is_an_error_that_gives_the_reason():
    call = SHAPES["gqa"]
    with pytest.raises(UnsupportedError, match=r"'sdpa' cannot run this call: it cannot modify scores \(Softcap\)"):
        attention(*call.tensors(), score_mods=[Softcap(2.0)], backend="sdpa")


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("mask", AXES["mask"], ids=lambda case: case.name)
def test_a_backend_runs_every_mask(backend, mask):
    call = SHAPES["square" if mask in SQUARE_MASKS else "gqa"]
    attention(*call.tensors(), mask=mask.make(call), backend=backend)
    attention_with_lse(*call.tensors(), mask=mask.make(call), sinks=torch.zeros(call.heads), backend=backend)


def test_the_suite_notices_a_wrong_backend(monkeypatch):
    row = next(row for row in ROWS if row["shape"] == "gqa" and row["dtype"] == torch.bfloat16)
    _check(row)
    right = Reference.run

    def wrong(self, x):
        out, lse = right(self, x)
        return out * 1.02, lse

    monkeypatch.setattr(Reference, "run", wrong)
    with pytest.raises(AssertionError, match=r"reference.*is above"):
        _check(row)


def test_off_the_cpu_sdpa_takes_a_bias_in_the_dtype_of_the_queries_only():
    """Some of torch's kernels there refuse another dtype, and one reads it wrongly. No device is needed to ask."""
    call, sdpa = SHAPES["gqa"], _backend("sdpa")
    reason = "its kernels off the CPU take a bias in the dtype of the queries only"
    for dtype, device, mods, want in (
        (torch.bfloat16, "meta", [ALiBi(15)], reason),
        (torch.float16, "meta", [Bias(torch.zeros(7, 11, device="meta"))], reason),
        (torch.bfloat16, "meta", [Bias(torch.zeros(7, 11, dtype=torch.bfloat16, device="meta"))], None),
        (torch.bfloat16, "meta", [], None),
        (torch.float32, "meta", [ALiBi(15)], None),
        (torch.bfloat16, "cpu", [ALiBi(15)], None),
    ):
        tensors = [t.to(device) for t in call.tensors(dtype)]
        x = prepare(*tensors, Full(), mods, None, None, 0.0, None, None, None)
        assert sdpa.why_not(x) == want, (dtype, device, mods)
