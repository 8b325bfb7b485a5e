"""Tests of the tests: the tolerance rule, the oracle, and what conftest promises."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import oracle
import pytest
import torch
from helpers import assert_as_good_as, assert_published, leaf, plain_attention, randn
from torch.nn import functional as F

SIZES = ((7, 11), (7, 101), (3, 1009))
HALVES = (torch.bfloat16, torch.float16)


def _call(rows, slots, dtype, seed=0):
    sizes = ((15, rows, 13), (3, slots, 13), (3, slots, 17))
    return [randn(2, *size, seed=3 * seed + i).to(dtype) for i, size in enumerate(sizes)]


def _in(dtype, tensors):
    return [t.to(dtype) for t in tensors]


def _sums_in_half(query, key, value):
    """A kernel that keeps its running sum of the output in the dtype of its inputs."""
    weights = plain_attention(*_in(torch.float32, (query, key, value)))[1].to(query.dtype)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    out = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=query.dtype)
    for s in range(value.shape[2]):
        out = out + weights[..., s, None] * value[..., None, s, :]
    return out


@pytest.mark.parametrize("rows, slots", SIZES)
@pytest.mark.parametrize("dtype", HALVES)
def test_the_rule_passes_one_rounding_and_fails_sums_in_half_precision(rows, slots, dtype):
    for seed in range(5):
        call = _call(rows, slots, dtype, seed)
        want, plain = (plain_attention(*_in(d, call))[0] for d in (torch.float64, torch.float32))
        assert_as_good_as(want.to(dtype), want, plain, terms=slots)
        assert_as_good_as(plain.to(dtype), want, plain, terms=slots)
        with pytest.raises(AssertionError, match="is above"):
            assert_as_good_as(_sums_in_half(*call), want, plain, terms=slots)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_room_for_rounded_terms_is_none_for_sums_in_half_precision(dtype):
    # the gradient of the values: each term may have been rounded once, the sum over the queries may not
    weights, grad = randn(101, 11).softmax(-1).to(dtype), randn(101, 17, seed=1).to(dtype)
    want, plain = weights.double().mT @ grad.double(), weights.float().mT @ grad.float()
    terms = weights.double()[:, :, None] * grad.double()[:, None, :]
    inner = terms.square().sum(0).sqrt().max().item()
    assert_as_good_as(terms.to(dtype).float().sum(0).to(dtype), want, plain, terms=101, inner=inner)
    running = torch.zeros_like(want, dtype=dtype)
    for term in terms.to(dtype):
        running = running + term
    with pytest.raises(AssertionError, match="is above"):
        assert_as_good_as(running, want, plain, terms=101, inner=inner)


def test_the_rule_in_float32_allows_another_order_and_no_lower_precision():
    query, key, value = _call(7, 101, torch.float32)
    want = plain_attention(*_in(torch.float64, (query, key, value)))[0]
    plain = plain_attention(query, key, value)[0]
    backwards = plain_attention(query, key.flip(2), value.flip(2))[0]
    assert_as_good_as(backwards, want, plain, terms=101)
    rounded = plain_attention(*_in(torch.float32, _in(torch.bfloat16, (query, key, value))))[0]
    with pytest.raises(AssertionError, match="is above"):
        assert_as_good_as(rounded, want, plain, terms=101)


def test_float64_is_compared_at_the_rounding_of_float64():
    query, key, value = _call(7, 101, torch.float64)
    want = plain_attention(query, key, value)[0]
    plain = plain_attention(query.float(), key.float(), value.float())[0]
    assert_as_good_as(plain_attention(query, key.flip(2), value.flip(2))[0], want, plain, terms=101)
    with pytest.raises(AssertionError, match="is above"):
        assert_as_good_as(plain.double(), want, plain, terms=101)


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, *HALVES))
def test_a_causal_mask_that_is_off_by_one_fails(dtype):
    call = _call(7, 11, dtype)
    seen = torch.ones(7, 11, dtype=torch.bool).tril(4)
    want = plain_attention(*_in(torch.float64, call), seen)[0]
    plain = plain_attention(*_in(torch.float32, call), seen)[0]
    for off in (3, 5):
        wrong = plain_attention(*_in(torch.float64, call), torch.ones_like(seen).tril(off))[0].to(dtype)
        with pytest.raises(AssertionError, match="is above"):
            assert_as_good_as(wrong, want, plain, terms=11)


def test_values_that_are_not_finite_must_be_so_in_kind_and_place():
    want = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf], dtype=torch.float64)
    assert_as_good_as(want.float(), want, terms=1)
    for place in range(4):
        for wrong in (0.0, torch.nan, torch.inf, -torch.inf):
            got = want.clone()
            got[place] = wrong
            if got[place].equal(want[place]) or (got[place].isnan() and want[place].isnan()):
                continue
            with pytest.raises(AssertionError, match=r"differ in being|is above"):
                assert_as_good_as(got, want, terms=1)


def test_beyond_the_reach_of_float16_infinity_is_right():
    want = torch.tensor([1.0, 1e5, -1e5], dtype=torch.float64)
    assert_as_good_as(torch.tensor([1.0, torch.inf, -torch.inf], dtype=torch.float16), want, terms=1)
    with pytest.raises(AssertionError, match="differ in being"):
        assert_as_good_as(torch.tensor([1.0, 65504.0, -torch.inf], dtype=torch.float16), want, terms=1)


def test_shape_and_precision_of_what_is_compared():
    one = torch.ones(3, dtype=torch.float64)
    with pytest.raises(AssertionError, match="shape"):
        assert_as_good_as(one[:, None], one, terms=1)
    with pytest.raises(AssertionError, match="not float64"):
        assert_as_good_as(one, one.float(), terms=1)
    assert_as_good_as(one[:0], one[:0], terms=1)


def test_published_numbers_keep_their_own_tolerance():
    assert_published(torch.tensor([0.5403]), [0.5403], rtol=0, atol=5e-5, source="cos 1")
    with pytest.raises(AssertionError, match="cos 1: off by"):
        assert_published(torch.tensor([0.5405]), [0.5403], rtol=0, atol=5e-5, source="cos 1")
    with pytest.raises(AssertionError, match="cos 1"):
        assert_published(torch.tensor([torch.nan]), [0.5403], rtol=0, atol=5e-5, source="cos 1")
    with pytest.raises(AssertionError, match="source"):
        assert_published(torch.tensor([1.0]), [1.0], rtol=0, atol=0, source="")


def _theirs():
    path = Path(__file__).parents[2] / "shared" / "reference.py"
    if not path.exists():
        pytest.skip("the project's other float64 reference is not beside this checkout")
    spec = importlib.util.spec_from_file_location("other_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_oracle_agrees_with_another_reference():
    theirs = _theirs()
    seen = randn(2, 6, 5, 7, seed=4) > 0
    seen[1, 3, 2] = False
    drop = (randn(2, 6, 5, 7, seed=5) > 0) * 2.0
    bias = randn(1, 6, 5, 7, seed=6).masked_fill(randn(1, 6, 5, 7, seed=7) > 1, -torch.inf)
    options = (
        {},
        {"scale": 0.3},
        {"sinks": randn(6, seed=8)},
        {"softcap": 1.5, "bias": bias},
        {"drop": drop},
        {"softcap": 2.0, "bias": bias, "sinks": randn(6, seed=8), "drop": drop},
    )
    grad = randn(2, 6, 5, 5, seed=9, dtype=torch.float64)
    for given in options:
        results = []
        for run, rename, flags in (
            (oracle.attend, {}, {}),
            (theirs.attend, {"sinks": "sink"}, {"return_weights": True, "return_lse": True}),
        ):
            leaves = [leaf(randn(2, h, n, d, seed=h + n + d), torch.float64) for h, n, d in
                      ((6, 5, 3), (2, 7, 3), (2, 7, 5))]  # fmt: skip
            found = run(*leaves, seen, **{rename.get(k, k): v for k, v in given.items()}, **flags)
            (found[0] * grad).sum().backward()
            results.append([*found, *(x.grad for x in leaves)])
        names = ("out", "weights", "lse", "query", "key", "value")
        for ours, other, name in zip(*results, names, strict=True):
            if name == "weights" and "drop" in given:
                continue  # ours are those before dropout
            assert_as_good_as(ours, other, terms=11, inner=1.0, what=f"{name} with {list(given)}")


def test_the_oracle_agrees_with_torch():
    query, key, value = (randn(2, 3, n, 5, seed=n, dtype=torch.float64) for n in (7, 11, 12))
    seen = randn(2, 3, 7, 11, seed=9) > -0.5
    want = F.scaled_dot_product_attention(query, key, value[:, :, :11], seen)
    assert_as_good_as(oracle.attend(query, key, value[:, :, :11], seen)[0], want, terms=11)


def test_the_plain_formula_agrees_with_the_oracle():
    query, key, value = _call(7, 11, torch.float64)
    seen = randn(2, 15, 7, 11, seed=9) > 0
    seen[0, 0, 0] = False
    sinks = randn(15, seed=10, dtype=torch.float64)
    for given in ({}, {"sinks": sinks}, {"scale": 0.3, "modify": lambda s: 2 * s.tanh()}):
        theirs = plain_attention(query, key, value, seen, **given)
        ours = oracle.attend(query, key, value, seen, **given)
        for a, b, what in zip(theirs, ours, ("out", "weights", "lse"), strict=True):
            assert_as_good_as(a, b, terms=11, what=what)


def test_memory_that_was_never_written_holds_nan():
    x = torch.empty(3)
    assert x.isnan().all() and torch.empty_like(x).isnan().all() and x.new_empty(5).isnan().all()


def test_seed_is_the_same_in_every_test():
    assert torch.initial_seed() == 0


def test_the_network_is_closed():
    with pytest.raises(OSError, match="wanted the network"):
        socket.create_connection(("192.0.2.1", 80), timeout=1)


SKIPS = """
import pytest

def test_fine_call(): pytest.skip("no GPU here")

@pytest.mark.skipif(True, reason="no GPU here")
def test_fine_mark(): pass

@pytest.mark.xfail(reason="not written yet")
def test_fine_xfail(): assert False

def test_silent_call(): pytest.skip()

@pytest.mark.skip
def test_silent_mark(): pass

@pytest.mark.xfail
def test_silent_xfail(): assert False
"""


def test_a_skip_without_a_reason_is_a_failure(tmp_path):
    tests = Path(__file__).parent
    (tmp_path / "conftest.py").write_text((tests / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(SKIPS)
    call = [
        sys.executable,
        "-m",
        "pytest",
        "-rA",
        "-p",
        "no:cacheprovider",
        f"--rootdir={tmp_path}",
        str(tmp_path),
    ]
    paths = {"PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent / "src")])}
    done = subprocess.run(call, check=False, capture_output=True, text=True, env={**os.environ, **paths})
    for name in ("call", "mark", "xfail"):
        assert f"test_silent_{name} was skipped without a reason" in done.stdout, done.stdout
    assert "2 failed, 2 skipped, 1 xfailed, 1 error" in done.stdout  # a mark fails in its set-up
