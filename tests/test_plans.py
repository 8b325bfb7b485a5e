"""A call that repeats an earlier one in all but its numbers is not worked out again: the same answers all the same."""

from dataclasses import dataclass

import pytest
import torch
import torch.utils.checkpoint
from helpers import assert_as_good_as
from torch.utils._python_dispatch import TorchDispatchMode

from headwise import (
    Causal,
    Full,
    MultiHeadAttention,
    Padding,
    Positions,
    ShapeError,
    Softcap,
    UnsupportedError,
    Window,
    attention,
    attention_with_lse,
    functional,
)
from headwise.backends.native import MISSING, Native, instruction_sets

pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"only the kernel makes plans: {MISSING}")


@pytest.fixture(autouse=True)
def plans(monkeypatch):
    monkeypatch.setattr(functional, "_plans", {})
    return functional._plans


def inputs(seed=0, batch=2, heads=6, kv_heads=3, rows=11, slots=13, size=8, value_size=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, heads, rows, size), (batch, kv_heads, slots, size), (batch, kv_heads, slots, value_size))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def check(call, **options):
    got = attention(*call, **options)
    wide = [tensor.double() for tensor in call]
    options = options | {"backend": "reference"}
    plain = attention(*(tensor.float() for tensor in call), **options)
    assert_as_good_as(got, attention(*wide, **options), plain, terms=call[1].shape[2])
    return got


def strided(tensor):
    return torch.cat([tensor, tensor], 1).transpose(1, 2).contiguous().transpose(1, 2)[:, : tensor.shape[1]]


# what makes two calls different, each but the last with another answer or another path
CALLS = {
    "as it is": ({}, {}),
    "causal": ({}, {"mask": Causal()}),
    "window": ({}, {"mask": Window(3)}),
    "causal and window": ({}, {"mask": Causal() & Window(3)}),
    "causal and a wider window": ({}, {"mask": Causal() & Window(4)}),
    "either": ({}, {"mask": Causal() | Window(3)}),
    "padding": ({}, {"mask": Padding([13, 2])}),
    "scale": ({}, {"scale": 0.7}),
    "query positions": ({}, {"mask": Causal(), "query_positions": Positions(11, 1)}),
    "key positions": ({}, {"mask": Causal(), "key_positions": Positions(13, 4)}),
    "bfloat16": ({"dtype": torch.bfloat16}, {}),
    "batch": ({"batch": 1}, {}),
    "heads": ({"kv_heads": 1}, {}),
    "rows": ({"rows": 10}, {"mask": Causal()}),
    "slots": ({"slots": 12}, {"mask": Causal()}),
    "sizes": ({"size": 9, "value_size": 6}, {}),
    "no values": ({"value_size": 0}, {}),
    "no rows": ({"rows": 0}, {}),
    "sdpa": ({}, {"backend": "sdpa"}),
    "softcap": ({}, {"score_mods": (Softcap(0.3),)}),
    "sinks": ({}, {"sinks": torch.ones(6)}),
}
REMEMBERED = {name for name in CALLS if name not in {"either", "padding", "sdpa", "softcap", "sinks"}}


def test_each_call_has_its_own_answer_the_second_time_too(plans):
    for seed in range(3):
        for shape, options in CALLS.values():
            call = inputs(seed, **shape)
            check(call, **options)
            check([strided(tensor) for tensor in call], **options)
    assert len(plans) == 2 * len(REMEMBERED)


@pytest.mark.parametrize("name", CALLS)
def test_what_is_remembered(plans, name):
    shape, options = CALLS[name]
    attention(*inputs(**shape), **options)
    assert len(plans) == (name in REMEMBERED)
    attention(*inputs(1, **shape), **options)
    assert len(plans) == (name in REMEMBERED)


def test_equal_masks_share_a_plan(plans):
    for _ in range(2):
        attention(*inputs(), mask=Causal() & Window(3))
    assert len(plans) == 1


def test_instructions_are_those_asked_for(plans):
    for name in instruction_sets():
        for seed in range(2):
            check(inputs(seed), backend=Native(name))


def test_a_gradient_flows_after_a_call_without():
    call = inputs()
    attention(*call)
    for i in range(3):
        learned = [tensor.clone().requires_grad_(n == i) for n, tensor in enumerate(call)]
        attention(*learned).sum().backward()
        want = [tensor.double().requires_grad_(n == i) for n, tensor in enumerate(call)]
        attention(*want, backend="reference").sum().backward()
        assert_as_good_as(learned[i].grad, want[i].grad, terms=11, inner=learned[i].grad.norm().item())
        with torch.no_grad():
            assert not attention(*learned).requires_grad


def gradients(call, options, learns=(True, True, True), **how):
    """The output and the gradients of those of query, key and value that learn."""
    leaves = [tensor.clone().requires_grad_(learn) for tensor, learn in zip(call, learns, strict=True)]
    out = attention(*leaves, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return out, torch.autograd.grad(out, [leaf for leaf in leaves if leaf.requires_grad], weights, **how)


def without_plans(monkeypatch, *args, **how):
    with monkeypatch.context() as patch:
        patch.setattr(functional, "_form", lambda *_: None)
        return gradients(*args, **how)


def assert_same(one, other):
    assert torch.equal(one[0], other[0])
    for a, b in zip(one[1], other[1], strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype


@pytest.mark.parametrize("name", sorted(REMEMBERED))
def test_gradients_are_those_of_a_call_that_is_worked_out(name, plans, monkeypatch):
    shape, options = CALLS[name]
    for seed in range(2):
        call = inputs(seed, **shape)
        for given in (call, [strided(tensor) for tensor in call]):
            assert_same(gradients(given, options), without_plans(monkeypatch, given, options))
    with torch.no_grad():
        attention(*call, **options)
    assert 2 <= len(plans) <= 3  # a call that learns is another than one that does not


def test_only_what_learns_gets_a_gradient(plans, monkeypatch):
    call = inputs()
    for learns in ((True, False, False), (False, True, False), (False, False, True), (True, False, True)):
        assert_same(gradients(call, {}, learns), without_plans(monkeypatch, call, {}, learns))
    assert len(plans) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_may_be_kept_elsewhere(dtype, plans):
    call = [strided(tensor) for tensor in inputs(dtype=dtype)]
    want = gradients(call, {"mask": Causal()})
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.contiguous()):
        assert_same(gradients(call, {"mask": Causal()}), want)
    with torch.autograd.graph.save_on_cpu():
        assert_same(gradients(call, {"mask": Causal()}), want)
    for reentrant in (False, True):
        leaves = [tensor.clone().requires_grad_() for tensor in call]
        out = torch.utils.checkpoint.checkpoint(
            lambda *tensors: attention(*tensors, mask=Causal()), *leaves, use_reentrant=reentrant
        )
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape))
        assert_same((out, [leaf.grad for leaf in leaves]), want)
    assert len(plans) == 2


def test_what_is_saved_may_have_been_expanded():
    query, shared = torch.randn(2, 4, 6, 8), torch.randn(1, 4, 6, 8)

    def learn():
        leaves = [tensor.clone().requires_grad_() for tensor in (query, shared)]
        key = leaves[1].expand(2, 4, 6, 8)
        out = attention(leaves[0], key, key)
        return torch.autograd.grad(out.square().sum(), leaves)

    want = learn()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.contiguous()):
        for part, whole in zip(learn(), want, strict=True):
            assert torch.equal(part, whole)


@pytest.mark.parametrize("form", ["one tensor", "keys and values are one", "keys are made of queries"])
@pytest.mark.parametrize("way", ["planned", "native", "sdpa"])
def test_a_tensor_given_twice_gets_each_part_once(form, way, monkeypatch):
    backend = "native" if way == "planned" else way
    if way != "planned":
        monkeypatch.setattr(functional, "_form", lambda *_: None)
    x, y = (torch.randn(1, 2, 5, 8).requires_grad_() for _ in range(2))

    def out():
        if form == "one tensor":
            return attention(x, x, x, backend=backend)
        keys = (y, y) if form == "keys and values are one" else (2 * x, y)
        return attention(x, *keys, backend=backend)

    leaves = [x] if form == "one tensor" else [x, y]
    weights = torch.randn(3, 1, 2, 5, 8)
    for grads in weights:
        want = torch.autograd.grad(out(), leaves, grads)
        for got, wanted in zip(torch.autograd.grad(out(), leaves, grads, create_graph=True), want, strict=True):
            assert_as_good_as(got, wanted.double(), wanted, terms=5 * 8)
    many = torch.autograd.grad(out(), leaves, weights, is_grads_batched=True)
    for got, wanted in zip(many, want, strict=True):
        assert_as_good_as(got[-1], wanted.double(), wanted, terms=5 * 8)
    twice = x.detach().double().requires_grad_(), y.detach().double().requires_grad_()

    def wide(x, y):
        keys = {"one tensor": (x, x), "keys and values are one": (y, y), "keys are made of queries": (2 * x, y)}[form]
        return attention(x, *keys, backend="reference")

    def penalty(out, of):
        return torch.autograd.grad(
            sum(grad.square().sum() for grad in torch.autograd.grad(out.square().sum(), of, create_graph=True)), of
        )

    exact = penalty(wide(*twice), twice[: len(leaves)])
    near, largest = penalty(wide(x, y), leaves), max(part.abs().max().item() for part in exact)
    for got, wanted, plain in zip(penalty(out(), leaves), exact, near, strict=True):
        assert_as_good_as(got, wanted, plain, terms=5 * 8, inner=largest)


def test_gradients_of_gradients_and_many_at_once(plans, monkeypatch):
    call = inputs()
    both = [
        compute(call, {}, create_graph=True)
        for compute in (gradients, lambda *args, **how: without_plans(monkeypatch, *args, **how))
    ]
    assert_same(*both)
    assert all(grad.requires_grad for grad in both[0][1])
    leaves = [tensor.clone().requires_grad_() for tensor in (*call, torch.zeros(6))]
    made = (attention(*leaves[:3]), *attention_with_lse(*leaves[:3], sinks=leaves[3]))
    for out, learned in zip(made, (leaves[:3], leaves, [*leaves[:2], leaves[3]]), strict=True):
        many = torch.randn(3, *out.shape)
        at_once = torch.autograd.grad(out, learned, many, is_grads_batched=True, retain_graph=True)
        for i in range(3):
            for part, want in zip(at_once, torch.autograd.grad(out, learned, many[i], retain_graph=True), strict=True):
                assert_as_good_as(part[i], want.double(), want, terms=11 * 13)
    assert len(plans) == 1


def test_who_looks_on_sees_an_operator():
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    call = inputs()
    attention(*call)
    with Watch():
        attention(*call)
    assert "headwise.native.default" in seen
    with torch.profiler.profile() as profile:
        attention(*call)
    assert any("headwise::native" in event.key for event in profile.key_averages())


def test_autocast_transforms_and_subclasses_are_not_forgotten():
    call = inputs()
    want = attention(*call)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(*call).dtype == torch.bfloat16
    mapped = torch.func.vmap(attention)(*(tensor[None] for tensor in call))
    assert_as_good_as(mapped[0], want.double(), terms=13)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(call[0], torch.ones_like(call[0]))
        tangent = torch.autograd.forward_ad.unpack_dual(attention(dual, *call[1:])).tangent
    assert tangent is not None and tangent.abs().sum() > 0
    meta = [tensor.to("meta") for tensor in call]
    assert attention(*meta).is_meta


def test_views_that_are_negated_when_they_are_read():
    call = inputs()
    attention(*call)
    for backend in ("auto", "native"):
        negated = [torch._neg_view(tensor) for tensor in call]
        assert all(tensor.is_neg() for tensor in negated)
        assert_as_good_as(attention(*negated, backend=backend), -attention(*call).double(), terms=13)


@pytest.mark.plain
def test_wrong_calls_are_refused_after_right_ones():
    call = inputs()
    attention(*call)
    attention(*call, scale=1.0)
    wrong = (
        {"scale": True},
        {"scale": "1"},
        {"dropout_p": False},
        {"dropout_p": -0.5},
        {"score_mods": None},
        {"mask": Full},
        {"mask": None},
        {"seed": -1},
        {"backend": "fastest"},
        {"backend": None},
        {"query_positions": Positions(10)},
        {"key_positions": Positions(12)},
    )
    for options in wrong:
        for _ in range(2):
            with pytest.raises(ShapeError):
                attention(*call, **options)
    with pytest.raises(ShapeError):
        attention(call[0], call[1].tolist(), call[2])
    wide = [tensor.double() for tensor in call]
    for _ in range(2):
        with pytest.raises(UnsupportedError):
            attention(*wide, backend="native")


def test_there_are_not_more_than_that(plans, monkeypatch):
    monkeypatch.setattr(functional, "PLANS", 5)
    for rows in range(1, 20):
        check(inputs(rows=rows), mask=Causal())
        assert len(plans) <= 5


def test_a_layer_and_its_observer():
    layer, x = MultiHeadAttention(12, 3, mask=Causal()).eval(), torch.randn(2, 7, 12)
    with torch.no_grad():
        want = layer(x)
        assert torch.equal(layer(x), want)
        seen = []
        layer.observer = lambda x, out, lse: seen.append(lse.shape)
        assert torch.equal(layer(x), want)
        layer.observer = lambda x, out, lse: torch.zeros_like(out)
        assert torch.equal(layer(x), layer.out_proj(torch.zeros(2, 7, 12)))
    assert seen == [(2, 3, 7)]


def test_zeros_without_memory():
    """Autograd makes them where a gradient is known to be nothing; the kernel read them where they are not."""
    call = [tensor.requires_grad_() for tensor in inputs()]
    none = [torch._efficientzerotensor(tensor.shape) for tensor in call]
    for given in (call, none):
        with torch.no_grad():
            out, _lse = attention_with_lse(*given)
            assert torch.equal(out, attention(*given))
            assert given is call or not out.any()
    for attend, options in ((attention, {}), (attention_with_lse, {}), (attention, {"score_mods": [Softcap(2.0)]})):
        out = attend(*call, **options)
        outs = out if isinstance(out, tuple) else (out,)
        grads = torch.autograd.grad(outs, call, [torch._efficientzerotensor(o.shape) for o in outs])
        assert not any(grad.any() for grad in grads)


def test_a_backend_of_ones_own_is_asked_each_time():
    class Counted(Native):
        runs = 0

        def run(self, x):
            self.runs += 1
            return super().run(x)

    own = Counted()
    for _ in range(3):
        attention(*inputs(), backend=own)
    assert own.runs == 3


def test_a_backend_without_a_hash():
    @dataclass
    class Scaled(Native):
        factor: float = 2.0
        instructions: str = ""

        def run(self, x):
            out, lse = super().run(x)
            return out * self.factor, lse

    for factor in (2.0, 3.0):
        out = attention(*inputs(), backend=Scaled(factor))
        assert torch.equal(out, attention(*inputs()) * factor)
