"""Whatever torch does with a module: copies, files, threads, processes, transforms, other dtypes; the numbers stay."""

import copy
import io
import multiprocessing
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import assert_as_good_as, leaf, randn
from torch import nn
from torch.utils.checkpoint import checkpoint

from headwise import (
    ALiBi,
    Causal,
    Document,
    DynamicCache,
    MultiHeadAttention,
    Padding,
    PerHead,
    Positions,
    Prefix,
    RelativeBias,
    RollingCache,
    RotaryEmbedding,
    ShapeError,
    Softcap,
    StaticCache,
    Window,
    YaRNSchedule,
)

LAYERS = {
    "plain": {},
    "window": {"mask": Causal() & Window(4), "num_kv_heads": 2, "rotary": RotaryEmbedding(2)},
    "everything": {
        "mask": Causal() & Window(5),
        "num_kv_heads": 2,
        "rotary": RotaryEmbedding(2, base=50.0, schedule=YaRNSchedule(2.0, 8)),
        "score_mods": [Softcap(3.0), ALiBi(6), RelativeBias(6)],
        "sinks": True,
        "q_norm": nn.RMSNorm(2),
        "k_norm": nn.LayerNorm(2),
    },
}
CACHES = {"dynamic": DynamicCache, "static": lambda: StaticCache(12), "rolling": lambda: RollingCache(5)}
EVERY = pytest.mark.parametrize("kind", LAYERS)
X = randn(2, 11, 12, seed=400)


def build(kind, **more):
    made = MultiHeadAttention(12, 6, **copy.deepcopy(LAYERS[kind]) | more)
    with torch.no_grad():
        for i, parameter in enumerate(made.parameters()):
            parameter.add_(randn(*parameter.shape, seed=410 + i, scale=0.3))
    return made


def close(got, want, terms=64):
    assert_as_good_as(got, want.double(), want, terms=terms, inner=want.abs().max().item())


def gradients(run, parameters):
    return torch.autograd.grad(run().square().sum(), list(parameters))


# --- copies and files


@EVERY
def test_a_whole_layer_in_a_file(kind):
    layer, file = build(kind), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.load(file, weights_only=False)(X).equal(layer(X))


@EVERY
def test_a_state_dict_in_a_file_of_weights_only(kind):
    layer, file = build(kind), io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = MultiHeadAttention(12, 6, **copy.deepcopy(LAYERS[kind]))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other(X).equal(layer(X))


@pytest.mark.parametrize("copied", (copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))), ids=("copy", "pickle"))
@pytest.mark.parametrize("cache", CACHES)
def test_a_layer_and_its_cache_in_one_copy(cache, copied):
    """In the middle of a generation: both go on alike, and neither sees what the other stores."""
    layer, held = build("window", mask=Causal() & Window(5)).eval(), CACHES[cache]()
    with torch.no_grad():
        layer(X[:, :7], cache=held)
        twin, theirs = copied((layer, held))
        want = torch.cat([layer(X[:, t : t + 1], cache=held) for t in range(7, 11)], 1)
        assert torch.cat([twin(X[:, t : t + 1], cache=theirs) for t in range(7, 11)], 1).equal(want)
        close(want, layer(X)[:, 7:])


@pytest.mark.parametrize(
    "value",
    (
        Causal() & ~Window(3) | Padding(5),
        Positions(5, start=3, offset=-1),
        Positions(3, positions=torch.arange(3)[None]),
        Padding(torch.tensor([3, 5])),
    ),
    ids=str,
)
def test_masks_and_positions_are_copied_and_pickled(value):
    for twin in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert type(twin) is type(value) and str(twin) == str(value)


# --- the meta device


@EVERY
def test_made_on_meta_and_filled(kind):
    layer = build(kind)
    with torch.device("meta"):
        empty = MultiHeadAttention(12, 6, **copy.deepcopy(LAYERS[kind]))
    for made in (empty, copy.deepcopy(layer).to("meta")):
        assert made.q_proj.weight.is_meta
        filled = made.to_empty(device="cpu")
        for module in filled.modules():  # the parts of LAYERS were made outside the block
            module.to("cpu")
        filled.load_state_dict(layer.state_dict())
        assert filled(X).equal(layer(X))
    assigned = copy.deepcopy(layer).to("meta")
    assigned.load_state_dict(layer.state_dict(), assign=True)
    assert assigned(X).equal(layer(X))


@EVERY
@pytest.mark.parametrize("grad", (False, True), ids=("no_grad", "grad"))
def test_shapes_on_meta(kind, grad):
    layer, x = build(kind).to("meta"), torch.empty(3, 7, 12, device="meta")
    with torch.set_grad_enabled(grad):
        out = layer(x, mask=Padding(5))
        assert out.is_meta and out.shape == (3, 7, 12)
        assert layer(x, x.new_empty(3, 4, 12)).shape == (3, 7, 12)
        if grad:
            out.sum().backward()
            assert all(p.grad.is_meta and p.grad.shape == p.shape for p in layer.parameters())
    with torch.no_grad():
        for cache in CACHES.values():
            made = cache()
            windowed = build("window", mask=Causal() & Window(5)).to("meta")
            assert windowed(x, cache=made).shape == windowed(x[:, :1], cache=made).expand(3, 7, 12).shape
            assert made.length == 8


# --- function transforms


# without the annotation hook: it cannot look at the shapes inside a transform
@pytest.mark.plain
@EVERY
def test_many_layers_in_one_call(kind):
    layers = [build(kind), build(kind), build(kind)]
    for layer in layers[1:]:
        layer.reset_parameters()
    parameters, buffers = torch.func.stack_module_state(layers)

    def one(parameters, buffers, x):
        return torch.func.functional_call(layers[0], (parameters, buffers), (x,))

    found = torch.func.vmap(one, in_dims=(0, 0, None))(parameters, buffers, X)
    for got, layer in zip(found, layers, strict=True):
        close(got, layer(X).detach())


@pytest.mark.plain
@EVERY
def test_gradients_of_each_sample(kind):
    layer = build(kind)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x[None],)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, X)
    exact, alone = copy.deepcopy(layer).double(), copy.deepcopy(layer)
    alone.backend = "reference"  # which is what function transforms are left with
    for row, x in enumerate(X):
        wants = gradients(lambda x=x: exact(x[None].double()), exact.parameters())
        plain = gradients(lambda x=x: alone(x[None]), alone.parameters())
        largest = max(want.abs().max().item() for want in wants)
        for name, want, near in zip(parameters, wants, plain, strict=True):
            assert_as_good_as(found[name][row], want, near, terms=500, inner=largest, what=name)


# --- checkpointing


@pytest.mark.parametrize("reentrant", (False, True), ids=("saved tensors", "reentrant"))
@pytest.mark.parametrize("seed", (None, 11), ids=("generator", "seed"))
@EVERY
def test_checkpointing_with_dropout(kind, seed, reentrant):
    """What is computed again drops the same weights."""
    layer = build(kind, dropout_p=0.4)
    results = []
    for run in (
        lambda x: layer(x, seed=seed),
        lambda x: (
            checkpoint(layer, x, seed=seed, use_reentrant=False)
            if not reentrant
            else checkpoint(lambda x: layer(x, seed=seed), x, use_reentrant=True)
        ),
    ):
        torch.manual_seed(3)
        x = leaf(X)
        layer.zero_grad()
        out = run(x)
        torch.rand(7)  # what happens in between must not matter
        out.square().sum().backward()
        results.append([out, x.grad, *(p.grad for p in layer.parameters())])
    assert all(a.equal(b) for a, b in zip(*results, strict=True))
    torch.manual_seed(4)
    assert layer(X, seed=seed).equal(results[0][0]) == (seed is not None)


# --- threads and processes


@EVERY
def test_threads_share_a_layer(kind):
    layer = build(kind)
    inputs = [randn(2, 5 + i % 7, 12, seed=420 + i) for i in range(24)]
    parameters = list(layer.parameters())

    def work(x):
        out = layer(x, mask=Padding(4))
        return [out, *torch.autograd.grad(out.square().sum(), parameters)]

    wants = [work(x) for x in inputs]
    with ThreadPoolExecutor(2) as pool:
        for got, want in zip(pool.map(work, inputs), wants, strict=True):
            assert all(a.equal(b) for a, b in zip(got, want, strict=True))


def _in_child(layer, x, pipe):
    torch.set_num_threads(1)
    with torch.no_grad():
        pipe.send(layer(x).numpy().tobytes())


@pytest.mark.skipif(sys.platform != "linux", reason="fork is how worker processes start on Linux only")
@EVERY
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process(kind):
    """As a DataLoader's workers start, after the parent has used the layer."""
    layer = build(kind)
    with torch.no_grad():
        want = layer(X).numpy().tobytes()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_in_child, args=(layer, X, there))
    process.start()
    assert here.poll(60), "the child gave no answer within a minute"
    assert here.recv() == want
    process.join(10)
    assert process.exitcode == 0


# --- modes of autograd


@EVERY
def test_with_and_without_gradients(kind):
    layer = build(kind)
    want = layer(X).detach()
    with torch.no_grad():
        close(layer(X), want)
    with torch.inference_mode():
        out = layer(X)
        assert out.is_inference()
    close(out.clone(), want)
    layer.eval()
    close(layer(X).detach(), want)
    frozen = copy.deepcopy(layer).requires_grad_(False)
    x = leaf(X)
    frozen(x).square().sum().backward()
    (grad,) = torch.autograd.grad(layer(X.requires_grad_()).square().sum(), X)
    X.requires_grad_(False)
    close(x.grad, grad)
    assert all(p.grad is None for p in frozen.parameters())


# --- dtypes


def as_in_double(kind, x, got, layer, terms=64):
    """Compare with the layer in float64, at most as far off as its float32 rounded once."""
    with torch.no_grad():
        want, plain = copy.deepcopy(layer).double()(x.double()), copy.deepcopy(layer).float()(x.float())
    assert_as_good_as(got, want, plain, terms=terms, inner=12**0.5 * want.abs().max().item())


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@EVERY
def test_half_types(kind, dtype):
    layer = build(kind).to(dtype)
    out = layer(X.to(dtype))
    assert out.dtype == dtype
    as_in_double(kind, X.to(dtype), out, layer)
    out.float().square().sum().backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in layer.parameters())


@EVERY
@pytest.mark.parametrize("grad", (False, True), ids=("no_grad", "grad"))
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's own norm, about its speed
def test_autocast(kind, grad):
    layer = build(kind)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
        out = layer(X)
        inner = []
        layer.observer = lambda x, out, lse: inner.append((x.query.dtype, x.key.dtype, x.value.dtype, out.dtype))
        layer(X)
        layer.observer = None
    assert out.dtype == torch.bfloat16 and set(inner[0]) == {torch.bfloat16}
    as_in_double(kind, X, out, layer)
    if grad:
        out.float().square().sum().backward()
        assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters())


def test_rotary_under_autocast_is_as_exact_as_without():
    """Angles in bfloat16 would not tell position 4096 from 4097."""
    layer = MultiHeadAttention(12, 6, rotary=RotaryEmbedding(2), bias=False)
    far = Positions(11, start=4090)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        near, out = layer(X), layer(X, positions=far)
    as_in_double(None, X, out, layer)
    as_in_double(None, X, near, layer)


def test_a_layer_that_is_made_under_a_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        layer = MultiHeadAttention(12, 6, rotary=RotaryEmbedding(2), score_mods=[ALiBi(6)], sinks=True, mask=Causal())
        out = layer(X.double())
    finally:
        torch.set_default_dtype(torch.float32)
    assert out.dtype == torch.float64
    assert all(p.dtype == torch.float64 for p in layer.parameters())
    assert_as_good_as(out, layer(X.double()), terms=64)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_a_default_device_is_not_that_of_a_call(dropout_p):
    """What is made on the way is made where the call is: the numbers of one on the CPU are not somewhere else."""
    layer = MultiHeadAttention(12, 6, rotary=RotaryEmbedding(2), score_mods=[ALiBi(6), RelativeBias(6)], sinks=True)
    layer.dropout_p = dropout_p
    mask, documents = Causal() & Padding([11, 4]), Document.from_lengths([4, 7])
    x, row = leaf(randn(2, 11, 12)), leaf(randn(1, 11, 12))

    def results():
        torch.manual_seed(1)
        out, packed = layer(x, mask=mask, seed=3), layer(row, mask=documents)
        loss = out.square().sum() + packed.square().sum()
        first = torch.autograd.grad(loss, x, create_graph=dropout_p == 0)[0]
        second = torch.autograd.grad(first.square().sum(), x)[0] if first.requires_grad else first
        return out, packed, first, second

    want = results()
    with torch.device("meta"):
        got = results()
        lists = layer(x, mask=Causal() & Padding([11, 4]), seed=3), layer(row, mask=Document.from_lengths([4, 7]))
    assert all(map(torch.equal, got, want))
    assert torch.equal(lists[0], want[0]) and (dropout_p or torch.equal(lists[1], want[1]))


def test_lists_of_numbers_are_on_no_device():
    """The first lines of the README on another device: a list was made a tensor on the CPU, and then refused."""
    layer, x = MultiHeadAttention(12, 6, device="meta"), torch.empty(2, 11, 12, device="meta")
    assert layer(x, mask=Causal() & Window(4) & Padding([11, 4])).shape == x.shape
    assert layer(x, mask=~Prefix([1, 2]) | Document.from_lengths([4, 7])).shape == x.shape
    assert layer(x, mask=PerHead((Padding([11, 4]),) * 6)).shape == x.shape
    for mask in (Padding(torch.tensor([11, 4])), Document.from_lengths([4, 7], device="cpu")):
        with pytest.raises(ShapeError, match="mask is on cpu and the query on meta"):
            layer(x, mask=mask)
