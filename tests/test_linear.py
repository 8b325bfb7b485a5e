"""Projections in half precision, where the processor has no instructions for it: through float32, else the same."""

import copy

import pytest
import torch
from helpers import assert_as_good_as, leaf, randn
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrizations import weight_norm

from headwise import Causal, MultiHeadAttention, explain, linear
from headwise.convert.dropin import MultiheadAttention
from headwise.linear import FEWEST, project, widens

HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(params=[True, False], ids=["without instructions", "with instructions"])
def lacks(request, monkeypatch):
    """Whether the processor is taken for one that lacks them; what is computed is right on any."""
    monkeypatch.setattr(linear, "SLOW", frozenset(HALVES if request.param else ()))
    return request.param


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(linear, "SLOW", frozenset(HALVES))


def made(dtype, width=24, out=17, bias=True):
    torch.manual_seed(0)
    return nn.Linear(width, out, bias, dtype=dtype)


def calls(monkeypatch, kind=nn.Linear):
    """The modules that are called, as they are called."""
    seen = []
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda module, *x: (seen.append(module), forward(module, *x))[1])
    return seen


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(FEWEST,), (3, 11), (1, FEWEST - 1), (2, 0)], ids=str)
def test_output_and_gradients_are_those_of_the_layer(lacks, dtype, bias, shape):
    layer, x = made(dtype, bias=bias), leaf(randn(*shape, 24, seed=1), dtype)
    grad = randn(*shape, 17, seed=2).to(dtype)
    results = []
    for run, wide in ((project, False), (lambda module, tokens: module(tokens), False), (None, True)):
        tokens = x.detach().double().requires_grad_() if wide else x
        weights = [p.detach().double().requires_grad_() if wide else p for p in layer.parameters()]
        out = nn.functional.linear(tokens, *weights) if wide else run(layer, tokens)
        results.append([out, *torch.autograd.grad(out, (tokens, *weights), grad.to(out.dtype))])
    for ours, stock, exact in zip(*results, strict=True):
        assert ours.dtype == dtype
        assert_as_good_as(ours, exact, stock, terms=max(24, x[..., 0].numel()))


def test_it_rounds_once(slow):
    layer, x = made(torch.bfloat16, width=512), randn(40, 512, seed=1).bfloat16()
    assert torch.equal(project(layer, x), layer.float()(x.float()).bfloat16())


def test_few_tokens_many_tokens_and_other_dtypes(slow, monkeypatch):
    seen = calls(monkeypatch)
    layer, wide = made(torch.bfloat16), made(torch.float32)
    project(layer, randn(FEWEST, 24).bfloat16())
    assert seen == []
    project(layer, randn(FEWEST - 1, 24).bfloat16())
    project(wide, randn(FEWEST, 24))
    assert seen == [layer, wide]


def hooked(layer, kind):
    counts = []

    def count(*_):
        counts.append(1)

    if kind == "forward":
        layer.register_forward_hook(count)
    elif kind == "before":
        layer.register_forward_pre_hook(count)
    elif kind == "backward":
        layer.register_full_backward_hook(count)
    elif kind == "before backward":
        layer.register_full_backward_pre_hook(count)
    else:
        forward = layer.forward
        layer.forward = lambda x: (count(), forward(x))[1]
    return counts


@pytest.mark.parametrize("kind", ["forward", "before", "backward", "before backward", "replaced"])
def test_what_was_added_to_a_projection_runs(slow, kind):
    layer = MultiHeadAttention(24, 3, dtype=torch.bfloat16)
    counts = [hooked(module, kind) for module in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)]
    layer(leaf(randn(2, FEWEST, 24), torch.bfloat16)).sum().backward()
    assert [len(count) for count in counts] == [1, 1, 1, 1]


def test_a_hook_of_all_modules_runs(slow):
    layer, seen = MultiHeadAttention(24, 3, dtype=torch.bfloat16), []
    handle = register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        layer(randn(2, FEWEST, 24).bfloat16())
    finally:
        handle.remove()
    assert seen == [layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj, layer]


def test_other_classes_and_weights_run_as_they_are(slow, monkeypatch):
    class Adapted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    x = randn(FEWEST, 24).bfloat16()
    adapted = Adapted(24, 17, dtype=torch.bfloat16)
    assert torch.equal(project(adapted, x), adapted(x))
    normed = weight_norm(made(torch.bfloat16))
    assert torch.equal(project(normed, x), normed(x))

    class Packed(torch.Tensor):
        pass

    layer = made(torch.bfloat16)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Packed))
    seen = calls(monkeypatch)
    project(layer, x)
    assert seen == [layer]


def test_autocast_decides_itself(slow, monkeypatch):
    layer, x, seen = made(torch.bfloat16), randn(FEWEST, 24).bfloat16(), calls(monkeypatch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert project(layer, x).dtype == torch.bfloat16
    assert seen == [layer]


def test_a_meta_layer(slow):
    with torch.device("meta"):
        assert MultiHeadAttention(24, 3, dtype=torch.bfloat16)(torch.randn(2, 20, 24).bfloat16()).shape == (2, 20, 24)


@pytest.mark.plain
def test_an_export_holds_the_projections_themselves(slow):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = MultiHeadAttention(24, 3, dtype=torch.bfloat16, mask=Causal())

        def forward(self, x):
            return self.layer(x)

    model, x = Model().eval(), randn(2, FEWEST, 24).bfloat16()
    program = torch.export.export(model, (x,), dynamic_shapes=({1: torch.export.Dim("tokens", min=2, max=64)},))
    made_by = [node for node in program.graph.nodes if node.target is torch.ops.aten.linear.default]
    assert [node.meta["val"].dtype for node in made_by] == [torch.bfloat16] * 4  # not of float32
    out, plain = program.module()(x), model(x)
    assert_as_good_as(out, model.double()(x.double()), plain, terms=FEWEST)


@pytest.mark.parametrize("make", [MultiHeadAttention, MultiheadAttention], ids=["layer", "drop-in"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_layers_go_that_way(slow, monkeypatch, make, dtype):
    layer = make(24, 3, dtype=dtype)
    x = leaf(randn(2, FEWEST, 24, seed=1), dtype)
    own = layer(x, x, x)
    seen = calls(monkeypatch)
    assert seen == []
    out, stock = [], []
    for kept in (out, stock):
        monkeypatch.setattr(linear, "SLOW", frozenset(HALVES if kept is out else ()))
        result = layer(x, x, x)
        result = result[0] if isinstance(result, tuple) else result
        kept += [result, *torch.autograd.grad(result.square().sum(), (x, *layer.parameters()))]
    assert len(seen) == 4  # without instructions none of them was called
    assert torch.equal(out[0], own[0] if isinstance(own, tuple) else own)
    layer.double()
    wide = x.detach().double().requires_grad_()
    result = layer(wide, wide, wide)
    result = result[0] if isinstance(result, tuple) else result
    exact = [result, *torch.autograd.grad(result.square().sum(), (wide, *layer.parameters()))]
    for ours, theirs, expected in zip(out, stock, exact, strict=True):
        assert_as_good_as(ours, expected, theirs, terms=2 * FEWEST * 24)


def test_double_backward_forward_mode_and_maps(slow):
    layer = made(torch.bfloat16)
    x = leaf(randn(FEWEST, 24, seed=1), torch.bfloat16)

    def second(run, module, tokens):
        (first,) = torch.autograd.grad(run(module, tokens).square().sum(), tokens, create_graph=True)
        return torch.autograd.grad(first.sum(), (tokens, module.weight))

    exact = second(nn.Module.__call__, copy.deepcopy(layer).double(), leaf(x, torch.float64))
    stock = second(nn.Module.__call__, layer, x)
    for ours, expected, theirs in zip(second(project, layer, x), exact, stock, strict=True):
        assert ours.dtype == torch.bfloat16
        assert_as_good_as(ours, expected, theirs, terms=FEWEST * 24)
    step = randn(FEWEST, 24, seed=2).bfloat16()
    _, pushed = torch.func.jvp(lambda t: project(layer, t), (x.detach(),), (step,))
    assert torch.equal(pushed, nn.functional.linear(step.float(), layer.weight.float()).bfloat16())
    batch = randn(3, FEWEST, 24, seed=3).bfloat16()
    mapped = torch.func.vmap(lambda t: project(layer, t))(batch)
    assert_as_good_as(
        mapped,
        nn.functional.linear(batch.double(), layer.weight.double(), layer.bias.double()),
        layer(batch),
        terms=24,
    )


@pytest.mark.plain
def test_compiled(slow):
    torch._dynamo.reset()
    layer = MultiHeadAttention(24, 3, dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (FEWEST, 1, 20):
        x = randn(2, tokens, 24, seed=tokens).bfloat16()
        assert torch.equal(compiled(x), layer(x))


def test_explain_says_so(lacks):
    layer = MultiHeadAttention(24, 3, dtype=torch.bfloat16)
    for tokens, said in ((FEWEST, lacks), (FEWEST - 1, False)):
        text = str(explain(layer, randn(1, tokens, 24).bfloat16()))
        assert text.count("in float32, since the processor lacks products of the dtype") == 4 * said


def test_what_is_kept_for_the_gradients_is_what_was_given(slow):
    layer, x, kept = made(torch.bfloat16), leaf(randn(FEWEST, 24), torch.bfloat16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        project(layer, x)
    assert [t.data_ptr() for t in kept] == [x.data_ptr(), layer.weight.data_ptr()]


def test_only_what_needs_a_gradient_gets_one(slow):
    layer, x = made(torch.bfloat16), leaf(randn(FEWEST, 24), torch.bfloat16)
    layer.weight.requires_grad_(False)
    project(layer, x).sum().backward()
    assert layer.weight.grad is None and x.grad is not None and torch.equal(layer.bias.grad, torch.full((17,), 16.0))
    with torch.no_grad():
        assert not project(layer, x).requires_grad


def test_a_bias_of_another_dtype_is_refused_by_torch(lacks):
    layer = made(torch.bfloat16)
    layer.bias = nn.Parameter(layer.bias.float())
    with pytest.raises(RuntimeError, match="dtype"):
        project(layer, randn(FEWEST, 24).bfloat16())


def test_a_projection_that_was_compiled_is_called(slow):
    layer, x = made(torch.bfloat16), randn(FEWEST, 24).bfloat16()
    assert widens(layer, x)
    layer.compile(backend="eager")
    assert not widens(layer, x)


def test_gradients_under_autocast(slow):
    layer, x = made(torch.bfloat16, width=512), leaf(randn(FEWEST, 512), torch.bfloat16)
    out, grad = project(layer, x), randn(FEWEST, 17, seed=3).bfloat16()
    want = torch.autograd.grad(out, (x, layer.weight), grad, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.autograd.grad(out, (x, layer.weight), grad)
    assert all(map(torch.equal, got, want))
