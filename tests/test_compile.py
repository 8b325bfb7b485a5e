"""Compiled equals eager, without a break in the graph. The backends of torch.compile here need no compiler."""

import pytest
import torch
from cases import BACKEND_NAMES, SHAPES, Call
from helpers import assert_as_good_as, leaf, randn

from headwise import (
    ALiBi,
    Bias,
    Causal,
    Dense,
    Full,
    MultiHeadAttention,
    Padding,
    Prefix,
    RotaryEmbedding,
    Softcap,
    Window,
    attention,
)

pytestmark = [
    pytest.mark.plain,
    # torch's own modules warn about themselves while they trace
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
CALL = SHAPES["gqa"]
MASKS = {
    "full": Full,
    "causal": Causal,
    "sliding": lambda: Causal() & Window(3),
    "padded": lambda: Causal() & Padding(torch.tensor([8, 5])),
    "prefix": lambda: Causal() | Prefix(4),
    "dense": lambda: Dense(CALL.coin(7, 11)),
    "not": lambda: ~Window(2),
}
BACKEND = pytest.mark.parametrize("backend", BACKEND_NAMES)
GRAD = pytest.mark.parametrize("grad", (False, True), ids=("no_grad", "grad"))


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def both(run, grad=True):
    """A function and itself compiled, with its backward where there is one."""
    return run, torch.compile(run, fullgraph=True, backend="aot_eager" if grad else "eager")


def close(got, want, terms=64):
    """The same numbers up to the rounding of float32; a compiler may take another order."""
    assert_as_good_as(got, want.double(), want, terms=terms, inner=want.abs().max().item() if want.numel() else 0.0)


@BACKEND
@GRAD
@pytest.mark.parametrize("mask", MASKS)
def test_attention(backend, grad, mask):
    # sinks in every second one, so that all four pairs with `grad` occur
    sink = randn(15, seed=130) if (list(MASKS).index(mask) + grad) % 2 else None
    mask = MASKS[mask]()
    results = []
    for run in both(lambda q, k, v: attention(q, k, v, mask=mask, sinks=sink, backend=backend), grad):
        tensors = [leaf(t) if grad else t for t in CALL.tensors()]
        with torch.set_grad_enabled(grad):
            out = run(*tensors)
        results.append([out, *(torch.autograd.grad(out.square().sum(), tensors) if grad else ())])
    for want, got in zip(*results, strict=True):
        close(got, want)


@GRAD
@pytest.mark.parametrize(
    "mods", ([Softcap(2.0)], [ALiBi(15)], [Bias(randn(7, 11))]), ids=lambda mods: type(mods[0]).__name__
)
def test_score_modifications(grad, mods):
    results = []
    for run in both(lambda q, k, v: attention(q, k, v, mask=Causal(), score_mods=mods), grad):
        tensors = [leaf(t) if grad else t for t in CALL.tensors()]
        with torch.set_grad_enabled(grad):
            out = run(*tensors)
        results.append([out, *(torch.autograd.grad(out.square().sum(), tensors) if grad else ())])
    for want, got in zip(*results, strict=True):
        close(got, want)


@BACKEND
@GRAD
@pytest.mark.parametrize("mask", ("full", "sliding", "padded"))
def test_layer(backend, grad, mask):
    mask = MASKS[mask]()
    layer = MultiHeadAttention(
        30, 15, num_kv_heads=3, head_dim=4, rotary=RotaryEmbedding(4), sinks=True, q_norm=torch.nn.RMSNorm(4),
        mask=Causal(), backend=backend,
    )  # fmt: skip
    x = randn(2, 11, 30, seed=131)
    results = []
    for run in both(layer, grad):
        with torch.set_grad_enabled(grad):
            out = run(x, mask=mask)
        found = torch.autograd.grad(out.square().sum(), list(layer.parameters())) if grad else ()
        results.append([out, *found])
    for want, got in zip(*results, strict=True):
        close(got, want)


@BACKEND
def test_a_layer_with_an_observer(backend):
    layer = MultiHeadAttention(30, 15, head_dim=4, backend=backend)
    x = randn(2, 11, 30, seed=132)
    want, run = layer(x), both(layer)[1]
    close(run(x), want)
    layer.observer = lambda x, out, lse: out * 0
    close(run(x), layer(x))  # a guarded attribute: setting it compiles once more
    layer.observer = None
    close(run(x), want)


@BACKEND
def test_equal_masks_cost_no_new_compilation_and_other_numbers_one(backend):
    compiled = []

    def count(graph, inputs):
        compiled.append(graph)
        return graph.forward

    run = torch.compile(
        lambda q, k, v, mask: attention(q, k, v, mask=mask, backend=backend), fullgraph=True, backend=count
    )
    tensors = CALL.tensors()
    with torch.no_grad():
        for mask in (Causal() & Window(3), Causal() & Window(3), Causal() & Window(3)):
            close(run(*tensors, mask), attention(*tensors, mask=mask))
        assert len(compiled) == 1, "equal new objects cost nothing"
        for size in (4, 5, 6):
            close(run(*tensors, Causal() & Window(size)), attention(*tensors, mask=Causal() & Window(size)))
        assert len(compiled) <= 3, "a number may become a variable after one recompilation"


@BACKEND
def test_other_lengths(backend):
    run = torch.compile(
        lambda q, k, v: attention(q, k, v, mask=Causal(), backend=backend),
        fullgraph=True,
        backend="eager",
        dynamic=True,
    )
    with torch.no_grad():
        for rows, slots in ((7, 11), (5, 13), (9, 9), (1, 17)):
            tensors = Call(rows=rows, slots=slots).tensors()
            close(run(*tensors), attention(*tensors, mask=Causal()))


def test_dropout_with_a_seed():
    run = both(lambda q, k, v, seed: attention(q, k, v, mask=Causal(), dropout_p=0.5, seed=seed))[1]
    tensors = CALL.tensors()
    for seed in (3, 4):
        close(run(*tensors, torch.tensor(seed)), attention(*tensors, mask=Causal(), dropout_p=0.5, seed=seed))
