"""MEM: how tensors lie in memory, empty ones, and batches of different sizes.

MEM-5, offsets that wrap beyond 2^31 elements, is not here: it is a fault of kernels on a GPU, and needs tensors of
several GB.
"""

import itertools
import subprocess
import sys
import textwrap

import oracle
import pytest
import torch
from helpers import assert_as_good_as, leaf, plain_attention, randn
from reports import ALL, check, check_layer, each_backend, every_backend, layer, running, with_and_without_gradients

from headwise import Causal, Dense, Padding, ShapeError, attention, attention_weights, attention_with_lse

# without the annotation hook: wrong sizes must meet headwise's own errors
pytestmark = pytest.mark.plain

# how a tensor can lie: what is stored, for a shape "B H L D", and the view of it that has that shape
LIES = {
    "transposed": (lambda b, h, n, d: (b, h, d, n), lambda x: x.mT),
    "every second number": (lambda b, h, n, d: (b, h, n, 2 * d), lambda x: x[..., ::2]),
    "every second token": (lambda b, h, n, d: (b, h, 2 * n, d), lambda x: x[:, :, 1::2]),
    "tokens first": (lambda b, h, n, d: (n, d, h, b), lambda x: x.permute(3, 2, 0, 1)),
    "one for all heads": (lambda b, h, n, d: (b, 1, n, d), lambda x: x),
    "one number per token": (lambda b, h, n, d: (b, h, n, 1), lambda x: x),
}
SHAPES = ((2, 3, 7, 8), (2, 3, 11, 8), (2, 3, 11, 8))


def lying(how, shape, seed):
    """What is stored, and the function that views it in a shape."""
    stored, view = LIES[how]
    return randn(*stored(*shape), seed=seed), lambda x: view(x).expand(shape)


@every_backend
@with_and_without_gradients
@pytest.mark.parametrize("how", LIES)
def test_mem_1_any_strides(how, mode, backend):
    """The fused route ignored the stride of the last dimension: silent garbage."""
    for lies in itertools.product((False, True), repeat=3):
        made = [
            lying(how, shape, i) if lie else (randn(*shape, seed=i), lambda x: x)
            for i, (shape, lie) in enumerate(zip(SHAPES, lies, strict=True))
        ]
        ours, theirs = ([leaf(stored, dtype) for stored, _ in made] for dtype in (torch.float32, torch.float64))
        views = [view(x) for x, (_, view) in zip(ours, made, strict=True)]
        wide = [view(x) for x, (_, view) in zip(theirs, made, strict=True)]
        want = oracle.attend(*wide)[0]
        with running(mode):
            out = attention(*views, backend=backend)
        assert_as_good_as(out, want, plain_attention(*(v.detach() for v in views))[0], terms=8 + 11, what=str(lies))
        if mode == "train":
            grad = randn(*out.shape, seed=9)
            out.backward(grad)
            want.backward(grad.double())
            for a, b in zip(ours, theirs, strict=True):
                inner = b.grad.abs().max().item()
                assert_as_good_as(a.grad, b.grad, terms=7 * 3 * 8 + 11, inner=inner, what=str(lies))


@every_backend
@pytest.mark.parametrize(
    ("stored", "view"),
    [
        ((2, 3, 11, 7), lambda seen: seen.mT),
        ((2, 1, 7, 1), lambda seen: seen.expand(2, 3, 7, 11)),
        ((2, 3, 14, 22), lambda seen: seen[:, :, ::2, 1::2]),
    ],
    ids=["transposed", "expanded", "sliced"],
)
def test_mem_1_any_strides_of_a_mask(stored, view, backend):
    query, key, value = (randn(*shape, seed=i) for i, shape in enumerate(SHAPES))
    mask = view(randn(*stored, seed=5) > -0.4)
    check(backend, query, key, value, mask, mask=mask)
    check(backend, query, key, value, mask[0, 0], mask=Dense(mask[0, 0]))


@every_backend
def test_mem_2_a_last_dimension_of_one(backend):
    """A size of 1 with an odd stride counted as contiguous in one place and was refused in another."""
    query = randn(1, 1, 1, 2).mT
    assert query.shape == (1, 1, 2, 1) and query.stride(-1) == 2 and query.is_contiguous()
    key, value = randn(1, 1, 1, 1, seed=1), randn(1, 1, 1, 1, seed=2)
    assert attention(query, key, value, backend=backend).equal(value.expand(1, 1, 2, 1))
    check(backend, query, key, value)
    check(backend, query, randn(1, 1, 1, 3, seed=1).mT, randn(1, 1, 1, 3, seed=2).mT)


RIGHT = {"B": 2, "H": 4, "K": 2, "T": 3, "S": 5, "D": 8}


@every_backend
@pytest.mark.parametrize("mask", [None, Causal(), Padding(4), "booleans"], ids=str)
@pytest.mark.parametrize("gone", ["B", "T", "S", "HK", "D", "BTS"])
def test_mem_3_empty_calls(gone, mask, backend):
    """An empty batch, sequence or head raised an error."""
    n = RIGHT | dict.fromkeys(gone, 0)
    query = leaf(randn(n["B"], n["H"], n["T"], n["D"]))
    key, value = (leaf(randn(n["B"], n["K"], n["S"], n["D"], seed=i)) for i in (1, 2))
    mask = torch.ones(n["T"], n["S"], dtype=torch.bool) if mask == "booleans" else mask
    how = {} if mask is None else {"mask": mask}
    out = attention(query, key, value, backend=backend, **how)
    assert out.shape == (n["B"], n["H"], n["T"], n["D"])
    out.sum().backward()
    for tensor in (query, key, value):
        assert tensor.grad is None or (tensor.grad.shape == tensor.shape and tensor.grad.isfinite().all())
    assert attention_weights(query, key, **how).shape == (n["B"], n["H"], n["T"], n["S"])
    if gone == "S":  # nothing to see: zeros, and not the NaN of a softmax over nothing
        assert out.eq(0).all()
        with torch.no_grad():
            assert attention_with_lse(query, key, value, backend=backend, **how)[1].eq(-torch.inf).all()


@every_backend
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_mem_3_empty_calls_of_a_layer(mode, backend):
    made = layer(8, 2, backend=backend)
    with running(mode, made):
        for rows, slots in (((0, 3), (0, 5)), ((2, 0), (2, 5)), ((2, 0), (2, 0))):
            x, memory = torch.ones(*rows, 8, requires_grad=True), torch.ones(*slots, 8)
            out = made(x, memory, mask=Causal())
            assert out.shape == (*rows, 8)
            out.sum().backward()
        # no key: what is left is the bias of the output
        out = made(torch.ones(2, 3, 8), torch.ones(2, 0, 8))
        assert out.equal(made.out_proj.bias.expand(2, 3, 8))


def test_mem_4_no_call_kills_the_process():
    """The internal kernel divides by a size of 0, and takes the process with it."""
    script = f"""
        import torch
        from headwise import Causal, Full, ShapeError, attention

        torch.set_num_threads(1)
        for backend in {ALL}:
            for mask in (Causal(), Full()):
                for dtype in (torch.half, torch.float):
                    for rows, slots in ((0, 0), (0, 5), (3, 0)):
                        query = torch.empty(7, 9, rows, 7, dtype=dtype)
                        try:
                            attention(query, *torch.empty(2, 7, 7, slots, 7, dtype=dtype), mask=mask, backend=backend)
                        except ShapeError as error:
                            assert str(error) == "9 query heads cannot share 7 key heads evenly.", error
                        else:
                            raise SystemExit("9 heads shared 7")
                        key, value = torch.empty(2, 7, 3, slots, 7, dtype=dtype)
                        out = attention(query, key, value, mask=mask, backend=backend)
                        assert out.shape == query.shape and out.eq(0).all()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"


@each_backend
def test_mem_6_a_batch_of_one_does_not_meet_a_batch_of_four(backend):
    """It was spread over the batch in silence in one place, and in another ended in an error without the sizes."""
    made, x, memory = layer(8, 2, backend=backend), randn(1, 1, 8), randn(4, 5, 8, seed=1)
    with pytest.raises(ShapeError, match=r"^The batch sizes differ: query 1, key 4, value 4\. Expand the smaller ones"):
        made(x, memory)
    with pytest.raises(ShapeError, match=r"^The batch sizes differ: query 1, key 4, value 4\."):
        attention(x[:, None], memory[:, None], memory[:, None], backend=backend)
    # what the error says to do, does it
    everywhere = x.expand(4, 1, 8)
    check_layer(made, made(everywhere, memory), everywhere, memory)
