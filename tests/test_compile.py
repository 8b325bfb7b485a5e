"""Compiled equals eager, without a break in the graph. The backends of torch.compile here need no compiler."""

import shutil

import pytest
import torch
from cases import BACKEND_NAMES, SHAPES, Call
from helpers import assert_as_good_as, leaf, randn

from headwise import (
    ALiBi,
    Bias,
    Causal,
    Chunk,
    Dense,
    Document,
    DynamicCache,
    FixedCache,
    Full,
    MultiHeadAttention,
    Not,
    Padding,
    Positions,
    Prefix,
    RollingCache,
    RotaryEmbedding,
    Softcap,
    StaticCache,
    Window,
    attention,
    pack,
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


# --- how many graphs: what changes from call to call, and what it costs


def counted(run, dynamic=None):
    """A function compiled by a compiler that counts the graphs it is given."""
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    return torch.compile(run, fullgraph=True, backend=count, dynamic=dynamic), graphs


def turning(**how):
    return MultiHeadAttention(30, 15, num_kv_heads=3, head_dim=4, rotary=RotaryEmbedding(4), **how)


LENGTHS = (7, 9, 23, 5, 31, 2, 64, 17)  # both sides of a window, and of the few rows whose heads are folded
LENGTHWISE = {
    "full": ({}, lambda f, t: f(randn(2, t, 30))),
    "causal": ({"mask": Causal()}, lambda f, t: f(randn(2, t, 30))),
    "window": ({"mask": Causal() & Window(6)}, lambda f, t: f(randn(2, t, 30))),
    "prefix": ({"mask": Causal() | Prefix(4)}, lambda f, t: f(randn(2, t, 30))),
    "not": ({"mask": ~Window(2)}, lambda f, t: f(randn(2, t, 30))),
    "batch": ({"mask": Causal()}, lambda f, t: f(randn(2 + t % 3, t, 30))),
    "padding": ({"mask": Causal()}, lambda f, t: f(randn(2, t, 30), mask=Padding(torch.tensor([t, t // 2])))),
    "cross": ({"mask": Causal()}, lambda f, t: f(randn(2, t, 30), randn(2, 2 + (t * 5) % 27, 30))),
    "packed": (
        {"mask": Causal() & Window(6)},
        lambda f, t: _packed(f, [randn(n, 30, seed=n) for n in (t, 3, 2 * t)]),
    ),
}


def _packed(run, sequences):
    packed = pack(sequences)
    return run(packed.tokens, mask=packed.mask, positions=packed.positions)


@pytest.mark.parametrize(
    "case, grad",
    [
        pytest.param(case, grad, id=f"{case}{', grad' * grad}", marks=[pytest.mark.slow] * slow)
        for case in LENGTHWISE
        for grad, slow in (
            (False, case in ("full", "prefix", "not", "batch")),
            (True, case not in ("window", "packed")),
        )
    ],
)
def test_new_lengths_cost_nothing_after_the_second(case, grad):
    how, call = LENGTHWISE[case]
    layer = turning(**how)
    run, graphs = counted(layer, True if grad else None)  # True: dynamic from the first call on
    with torch.set_grad_enabled(grad):
        for n, length in enumerate(LENGTHS):
            out = call(run, length)
            close(out, call(layer, length).detach())
            assert len(graphs) <= 2 - grad, f"length {length}, the {n + 1}th, cost another graph"
    if grad:
        out.square().sum().backward()


NUMBERS = {
    "window": lambda n: Causal() & Window(n),
    "prefix": lambda n: Causal() | Prefix(n),
    "chunk": Chunk,
    "padding": Padding,
}


@pytest.mark.parametrize("mask", NUMBERS)
def test_a_changed_number_costs_one_graph_and_then_nothing(mask):
    layer, x = turning(), randn(2, 23, 30, seed=133)
    run, graphs = counted(layer)
    seen = []
    with torch.no_grad():
        for number in (3, 3, 4, 5, 9, 3, 40):
            close(run(x, mask=NUMBERS[mask](number)), layer(x, mask=NUMBERS[mask](number)))
            seen.append(len(graphs))
    assert seen == [1, 1, 2, 2, 2, 2, 2], "one when it changes first, from when on it is a variable"


def test_new_tensors_in_a_mask_cost_nothing():
    layer, x = turning(mask=Causal()), randn(2, 23, 30, seed=134)
    run, graphs = counted(layer)
    with torch.no_grad():
        for n in range(4):
            lengths = torch.tensor([23 - n, 5 + n])
            for mask in (
                Padding(lengths),
                Padding(left=lengths),
                Document(randn(2, 23, seed=n).gt(0).long().cumsum(1)),
            ):
                close(run(x, mask=mask), layer(x, mask=mask))
    assert len(graphs) == 3, "one for each kind of mask"


CACHES = {"static": lambda: StaticCache(240), "dynamic": DynamicCache, "rolling": lambda: RollingCache(40)}


@pytest.mark.parametrize(
    "cache, ragged",
    [
        pytest.param(cache, ragged, id=f"{cache}{', ragged' * ragged}", marks=[pytest.mark.slow] * slow)
        for cache in CACHES
        for ragged, slow in ((False, False), (True, cache != "static"))
    ],
)
def test_200_steps_of_a_generation_cost_nothing(cache, ragged):
    """One graph for the prompt, one for the first token, which stands at a number; a buffer that grows costs one."""
    layer = turning(mask=Causal() & Window(40)).eval()
    x = randn(2, 7 + 200, 30, seed=135)
    for dynamic in (None, True) if cache == "static" and not ragged else (True,):
        torch._dynamo.reset()
        run, graphs = counted(layer, dynamic)
        ours, theirs = CACHES[cache](), CACHES[cache]()
        given = {"lengths": torch.tensor([7, 4])} if ragged else {}
        with torch.no_grad():
            for made, call in ((ours, run), (theirs, layer)):
                call(x[:, :7], cache=made, **given)
            steps = []
            for t in range(7, 207):
                want = layer(x[:, t : t + 1], cache=theirs)
                close(run(x[:, t : t + 1], cache=ours), want)
                steps.append(len(graphs))
        assert steps[0] == 2 and steps[1] == (3 if dynamic is None else 2)
        assert steps[-1] == steps[1] or (cache == "dynamic" and steps[-1] <= steps[1] + 3), steps
        assert ours.length == theirs.length == 207


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
def test_chunks_of_a_prompt(cache):
    layer = turning(mask=Causal() & Window(40)).eval()
    x = randn(2, 87, 30, seed=136)
    run, graphs = counted(layer, True)
    for grad in (False, True):
        made, ys = CACHES[cache](), []
        with torch.set_grad_enabled(grad):
            ys = [run(part, cache=made) for part in x.split((5, 7, 9, 11, 4, 6, 3, 8, 12, 13, 9), 1)]
        close(torch.cat(ys, 1), layer(x).detach())
    # each: nothing stored, something, the window passed, the buffer grown
    assert len(graphs) <= 8


def test_a_filled_fixed_cache():
    layer = turning().eval()
    memory, x = randn(2, 11, 30, seed=137), randn(2, 9, 30, seed=138)
    run, graphs = counted(layer, True)
    cache = FixedCache()
    with torch.no_grad():
        ys = [run(x[:, :1], memory, cache=cache), *(run(x[:, t : t + 1], cache=cache) for t in range(1, 9))]
    close(torch.cat(ys, 1), layer(x, memory, positions=Positions(9)).detach())
    assert len(graphs) == 2  # one that fills it, and one that asks


# --- modes


@pytest.mark.parametrize("how", ({}, {"sinks": True}, {"score_mods": [Softcap(3.0)]}), ids=("sdpa", "sinks", "softcap"))
def test_training_under_autocast(how):
    layer = turning(mask=Causal(), q_norm=torch.nn.RMSNorm(4), k_norm=torch.nn.RMSNorm(4), **how)
    x = randn(2, 11, 30, seed=139)

    def step(x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    results = []
    for run in both(step):
        out = run(x)
        assert out.dtype == torch.bfloat16
        results.append([out, *torch.autograd.grad(out.float().square().sum(), list(layer.parameters()))])
    layer.double()
    exact = layer(x.double())
    exact = [exact, *torch.autograd.grad(exact.square().sum(), list(layer.parameters()))]
    for eager, compiled, want in zip(*results, exact, strict=True):
        assert_as_good_as(compiled, want, eager, terms=64, inner=want.abs().max().item())


def test_dropout_in_training():
    """Without a seed each call draws anew, from torch's generator; with one, compiled equals eager."""
    layer = turning(mask=Causal(), dropout_p=0.5)
    x = randn(2, 11, 30, seed=140)
    run = both(layer)[1]
    torch.manual_seed(5)
    first, second = run(x), run(x)
    torch.manual_seed(5)
    assert run(x).equal(first) and not first.equal(second)
    seed = torch.tensor(11)
    results = []
    for call in (layer, run):
        out = call(x, seed=seed)
        results.append([out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))])
    for want, got in zip(*results, strict=True):
        close(got, want)


def test_not_is_built_outside_or_by_its_name():
    """Dynamo knows no ``~`` of an object: it says so, and ``Not`` is the same."""
    layer, x = turning(), randn(2, 11, 30, seed=141)
    want = layer(x, mask=~Window(2)).detach()
    close(both(lambda x: layer(x, mask=Not(Window(2))))[1](x), want)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="invert"):
        both(lambda x: layer(x, mask=~Window(2)))[1](x)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, and there is no g++")
def test_inductor():
    layer = turning(mask=Causal() & Window(4))
    run = torch.compile(layer, fullgraph=True, dynamic=True)
    for length in (7, 23):
        x = randn(2, length, 30, seed=142)
        results = []
        for call in (layer, run):
            out = call(x)
            results.append([out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))])
        for want, got in zip(*results, strict=True):
            close(got, want)
