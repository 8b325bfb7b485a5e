"""CMP: compiled, exported, ragged. What is wanted is derived from the oracle, or from the layer run eagerly.

Of CMP-3 the half about lengths is here, by torch.export; the other half is about an exporter of ONNX files.
"""

import oracle
import pytest
import torch
from cases import BACKEND_NAMES
from helpers import assert_as_good_as, leaf, plain_attention, randn

from headwise import (
    ALiBi,
    Causal,
    Dense,
    DynamicCache,
    MultiHeadAttention,
    Padding,
    RotaryEmbedding,
    attention,
    attention_with_lse,
    pack,
)

pytestmark = [pytest.mark.plain, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counted(run, **how):
    """A function compiled without a break in its graph, and the list of its graphs."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    return torch.compile(run, fullgraph=True, backend=count, dynamic=True, **how), graphs


def close(got, want, terms=64):
    assert_as_good_as(got, want.double(), want, terms=terms, inner=want.abs().max().item() if want.numel() else 0.0)


def test_cmp_1_lengths_that_vary_make_at_most_two_graphs():
    layer = MultiHeadAttention(24, 4, num_kv_heads=2, rotary=RotaryEmbedding(6), mask=Causal()).eval()
    with torch.no_grad():
        run, graphs = counted(layer)
        for length in (3, 5, 9, 17):
            x = randn(2, length, 24, seed=300)
            close(run(x), layer(x))
        assert len(graphs) == 1
        run, graphs = counted(layer)
        cache, x = DynamicCache(), randn(2, 11, 24, seed=301)
        steps = [run(x[:, :2], cache=cache), *(run(token, cache=cache) for token in x[:, 2:].split(1, 1))]
        close(torch.cat(steps, 1), layer(x))
        assert len(graphs) == 2


def test_cmp_1_forward_and_backward_at_several_lengths():
    layer, graphs = MultiHeadAttention(384, 6, mask=Causal()), []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    run = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
    for length in (16, 24, 40):
        found = []
        for one in (run, layer):
            x = leaf(randn(2, length, 384, seed=302))
            found.append(torch.autograd.grad(one(x).square().mean(), [x, *layer.parameters()]))
        for got, want in zip(*found, strict=True):
            close(got, want, terms=384 * length)
    assert len(graphs) <= 2


@pytest.mark.parametrize("mask", ("padding", "dense"))
def test_cmp_2_exports_with_a_batch_that_data_decides(mask):
    class Chosen(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = MultiHeadAttention(24, 4)

        def forward(self, x, seen, rows):
            x, seen = x[rows], seen[rows]
            return self.attention(x, mask=Padding(seen) if mask == "padding" else Dense(seen[:, None, None]))

    model = Chosen().eval()
    x, seen = randn(4, 5, 24, seed=303), randn(4, 5, seed=304) > -0.5
    program = torch.export.export(model, (x, seen, torch.tensor([True, False, True, True])))
    for rows in ([True, False, True, True], [False, True, True, False], [True] * 4):
        rows = torch.tensor(rows)
        close(program.module()(x, seen, rows), model(x, seen, rows))


def test_cmp_3_an_exported_file_keeps_no_length():
    layer = MultiHeadAttention(24, 4, mask=Causal(), scale=0.3).eval()
    sizes = {"query": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}}
    program = torch.export.export(layer, (randn(16, 128, 24, seed=305),), dynamic_shapes=sizes)
    for shape in ((3, 7), (16, 128), (1, 1)):
        x = randn(*shape, 24, seed=306)
        close(program.module()(x), layer(x))


@pytest.mark.parametrize("backend", BACKEND_NAMES)
@pytest.mark.parametrize("lengths", ((1,), (5,), (3, 5), (3, 5, 1)))
def test_cmp_4_ragged_batches_of_few_and_short_samples(backend, lengths):
    layer = MultiHeadAttention(24, 8, mask=Causal(), backend=backend).double()
    parts = [randn(n, 24, seed=307 + n, dtype=torch.float64) for n in lengths]
    packed = pack(parts)
    found = packed.unpack(layer(packed.tokens, mask=packed.mask, positions=packed.positions))
    for got, part in zip(found, parts, strict=True):
        assert got.shape == part.shape
        assert_as_good_as(got, layer(part), terms=64, inner=1.0)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_cmp_5_lengths_off_a_block_give_finite_gradients_and_a_natural_log_sum_exp(backend):
    length, heads = 130, 4
    tensors = [leaf(randn(1, heads, length, 16, seed=310 + i)) for i in range(3)]
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    distance = (torch.arange(length)[:, None] - torch.arange(length)).abs()
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], dtype=torch.float64)[:, None, None]
    out = attention(*tensors, mask=Causal(), score_mods=[ALiBi(heads)], backend=backend)
    exact = [leaf(t, torch.float64) for t in tensors]
    near = [leaf(t) for t in tensors]

    def formula(attend, q, k, v):
        bias = slopes.to(q.dtype) * distance
        return attend(q, k, v, seen, modify=lambda scores: scores - bias)

    want, _, want_lse = formula(oracle.attend, *exact)
    plain, _, plain_lse = formula(plain_attention, *near)
    assert_as_good_as(out, want, plain, terms=length)
    grads = [torch.autograd.grad(o.square().sum(), t) for o, t in ((out, tensors), (want, exact), (plain, near))]
    for got, exactly, nearly in zip(*grads, strict=True):
        assert got.isfinite().all()
        assert_as_good_as(got, exactly, nearly, terms=length * 16, inner=1.0)
    with torch.no_grad():
        hidden = seen.clone()
        hidden[7] = False
        _, lse = attention_with_lse(*tensors, mask=Dense(hidden), score_mods=[ALiBi(heads)], backend=backend)
    assert lse[:, :, 7].eq(-torch.inf).all()
    alive = torch.arange(length) != 7
    assert_as_good_as(lse[..., alive], want_lse.detach()[..., alive], plain_lse.detach()[..., alive], terms=length)
