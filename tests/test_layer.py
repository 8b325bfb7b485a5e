"""MultiHeadAttention: every argument of the constructor and of the call, against the formula written out."""

import copy
import io
import pickle

import oracle
import pytest
import torch
from cases import BACKEND_NAMES
from helpers import assert_as_good_as, leaf, plain_attention, randn
from torch import nn
from torch.nn.utils import prune

from headwise import (
    ALiBi,
    Bias,
    CacheError,
    Causal,
    CustomScore,
    Full,
    KVCache,
    MultiHeadAttention,
    Padding,
    PerHead,
    Positions,
    RotaryEmbedding,
    ShapeError,
    Softcap,
    UnsupportedError,
    Window,
    attention,
)

BACKEND = pytest.mark.parametrize("backend", BACKEND_NAMES)
WIDTHS = {
    "as the paper": {},
    "no bias": {"bias": False},
    "grouped": {"num_kv_heads": 2},
    "one key head": {"num_kv_heads": 1},
    "head_dim": {"head_dim": 5},
    "v_head_dim": {"v_head_dim": 7},
    "head sizes that divide nothing": {"head_dim": 5, "v_head_dim": 7, "num_kv_heads": 3},
    "key_dim": {"key_dim": 11},
    "key_dim and value_dim": {"key_dim": 11, "value_dim": 17},
    "value_dim": {"value_dim": 17},
    "out_dim": {"out_dim": 19},
    "every width": {"head_dim": 5, "v_head_dim": 7, "key_dim": 11, "value_dim": 17, "out_dim": 19, "num_kv_heads": 2},
    "query bias only": {"query_bias": True, "key_bias": False, "value_bias": False, "out_bias": False},
    "key bias only": {"query_bias": False, "key_bias": True, "value_bias": False, "out_bias": False},
    "value bias only": {"query_bias": False, "key_bias": False, "value_bias": True, "out_bias": False},
    "out bias only": {"query_bias": False, "key_bias": False, "value_bias": False, "out_bias": True},
    "bias overrides": {"query_bias": False, "bias": True},
    "scale": {"scale": 0.3},
}
EMBED, HEADS = 12, 6


def build(given, **more):
    """A layer whose biases and sinks are not zero, so that a forgotten one shows."""
    layer = MultiHeadAttention(EMBED, HEADS, **given, **more)
    with torch.no_grad():
        for i, (name, parameter) in enumerate(layer.named_parameters()):
            if name.endswith("bias") or name == "sinks":
                parameter.copy_(randn(*parameter.shape, seed=100 + i))
    return layer


def formula(layer, query, key, value, allowed, attend, **more):
    """softmax(scale · (query W) (key W)ᵀ) (value W) W, from the state dict alone."""
    state = {name: t.detach().to(query.dtype) for name, t in layer.state_dict().items()}

    def project(tokens, name, heads):
        y = tokens @ state[f"{name}.weight"].T
        y = y + state[f"{name}.bias"] if f"{name}.bias" in state else y
        width = y.shape[-1] // heads
        return torch.stack([y[..., h * width : (h + 1) * width] for h in range(heads)], 1)

    q = project(query, "q_proj", layer.num_heads)
    k, v = project(key, "k_proj", layer.num_kv_heads), project(value, "v_proj", layer.num_kv_heads)
    sinks = state.get("sinks")
    out = attend(q, k, v, allowed, scale=layer.scale, sinks=sinks, **more)[0]
    out = torch.cat(list(out.unbind(1)), -1) @ state["out_proj.weight"].T
    return out + state["out_proj.bias"] if "out_proj.bias" in state else out


def tokens(layer, dtype=torch.float32, rows=5, slots=7):
    sizes = ((rows, layer.embed_dim), (slots, layer.key_dim), (slots, layer.value_dim))
    return tuple(randn(2, *size, seed=110 + i, dtype=dtype) for i, size in enumerate(sizes))


def same_as_formula(layer, mask, allowed, **more):
    """Compare with the formula in cross-attention."""
    inputs = tokens(layer)
    got = layer(*inputs, mask=mask)
    want = formula(layer, *(t.double() for t in inputs), allowed, oracle.attend, **more)
    plain = formula(layer, *inputs, allowed, plain_attention, **more)
    assert got.shape == (2, 5, layer.out_dim)
    assert_as_good_as(got, want, plain, terms=64, inner=want.abs().max().item())


@BACKEND
@pytest.mark.parametrize("widths", WIDTHS)
def test_widths_and_biases(widths, backend):
    layer = build(WIDTHS[widths], backend=backend)
    names = [n for n, _ in layer.named_parameters()]
    given = {"bias": None, "query_bias": True, "key_bias": True, "value_bias": True, "out_bias": True}
    given |= {k: v for k, v in WIDTHS[widths].items() if k in given}
    for name, switch in (("q", "query_bias"), ("k", "key_bias"), ("v", "value_bias"), ("out", "out_bias")):
        on = given[switch] if given["bias"] is None else given["bias"]
        assert (f"{name}_proj.bias" in names) == on
    seen = randn(2, 1, 5, 7, seed=113) > -0.5
    same_as_formula(layer, Full(), None)
    same_as_formula(layer, seen, seen)


@BACKEND
@pytest.mark.parametrize("kv_heads", (6, 2, 1))
def test_gradients_of_every_parameter(backend, kv_heads):
    layer = build({"num_kv_heads": kv_heads, "value_dim": 17, "sinks": True}, backend=backend).double()
    inputs = [leaf(t) for t in tokens(layer, torch.float64)]
    others = [leaf(t) for t in inputs]
    seen = torch.ones(5, 7, dtype=torch.bool).tril(2)
    grad = randn(2, 5, 12, seed=114, dtype=torch.float64)
    layer(*inputs, mask=Causal()).backward(grad)
    twin = {n: leaf(p) for n, p in layer.named_parameters()}

    class Twin:
        num_heads, num_kv_heads, scale = layer.num_heads, layer.num_kv_heads, layer.scale

        @staticmethod
        def state_dict():
            return twin

    # the formula detaches what it reads; here the parameters are what is wanted
    out = _differentiable(Twin, twin, *others, seen)
    out.backward(grad)
    for name, parameter in layer.named_parameters():
        assert_as_good_as(parameter.grad, twin[name].grad, terms=100, inner=10.0, what=name)
    for got, want, name in zip(inputs, others, ("query", "key", "value"), strict=True):
        assert_as_good_as(got.grad, want.grad, terms=100, inner=10.0, what=name)


def _differentiable(layer, state, query, key, value, seen):
    def project(x, name, heads):
        return (x @ state[f"{name}.weight"].T + state[f"{name}.bias"]).unflatten(-1, (heads, -1)).transpose(1, 2)

    q = project(query, "q_proj", layer.num_heads)
    k, v = project(key, "k_proj", layer.num_kv_heads), project(value, "v_proj", layer.num_kv_heads)
    out = oracle.attend(q, k, v, seen, sinks=state["sinks"])[0]
    return out.transpose(1, 2).flatten(2) @ state["out_proj.weight"].T + state["out_proj.bias"]


@BACKEND
@pytest.mark.parametrize(
    "mask, seen",
    (
        (Causal(), torch.ones(5, 7, dtype=torch.bool).tril(2)),
        (Causal() & Window(2), torch.ones(5, 7, dtype=torch.bool).tril(2).triu(1)),
        (Padding([3, 6]), torch.arange(7)[None, None, None] < torch.tensor([3, 6])[:, None, None, None]),
    ),
)
def test_masks_of_layer_and_call_are_joined(mask, seen, backend):
    same_as_formula(build({}, backend=backend), mask, seen)
    if not isinstance(mask, Padding):  # a layer's own mask holds numbers only
        same_as_formula(build({"mask": mask}, backend=backend), Full(), seen)
    own = torch.ones(5, 7, dtype=torch.bool).tril(2).triu(-1)
    same_as_formula(build({"mask": Causal() & Window(4)}, backend=backend), mask, seen & own)


@BACKEND
@pytest.mark.parametrize("kv_heads", (6, 2))
def test_sinks_take_their_share(backend, kv_heads):
    layer = build({"sinks": True, "num_kv_heads": kv_heads}, backend=backend)
    assert layer.sinks.shape == (6,) and "sinks" in layer.state_dict()
    same_as_formula(layer, Full(), None)
    same_as_formula(layer, Causal(), torch.ones(5, 7, dtype=torch.bool).tril(2))
    fresh = MultiHeadAttention(EMBED, HEADS, sinks=True)
    assert fresh.sinks.eq(0).all() and MultiHeadAttention(EMBED, HEADS).sinks is None


def test_score_modifications_of_layer_and_call():
    cap = Softcap(0.5)
    bias = Bias(nn.Parameter(randn(1, 6, 5, 7, seed=115)))
    layer = build({"score_mods": [cap, bias]})

    def modify(scores):
        return 0.5 * torch.tanh(scores / 0.5) + bias.values.detach().to(scores.dtype)

    same_as_formula(layer, Full(), None, modify=modify)
    assert set(layer.state_dict()) >= {"score_mods.1.values"}
    query = tokens(layer)[0]
    layer(query, query.new_zeros(2, 7, 12)).square().sum().backward()
    assert bias.values.grad is not None


def test_norms_come_before_rotation_and_see_each_head():
    q_norm, k_norm = nn.RMSNorm(2), nn.LayerNorm(2)
    nn.init.normal_(q_norm.weight)
    nn.init.normal_(k_norm.weight)
    rotary = RotaryEmbedding(2)
    layer = build({"q_norm": q_norm, "k_norm": k_norm, "rotary": rotary, "num_kv_heads": 2})
    kept = []
    layer.observer = lambda x, out, lse: kept.append(x)
    x = tokens(layer)[0]
    layer(x)
    for tensor, projection, norm, heads in (
        (kept[0].query, layer.q_proj, q_norm, 6),
        (kept[0].key, layer.k_proj, k_norm, 2),
    ):
        normed = norm(projection(x).unflatten(-1, (heads, 2))).transpose(1, 2)
        assert tensor.equal(rotary(normed, torch.arange(5)[None]))
        assert not tensor.equal(normed)
    names = set(layer.state_dict())
    assert names >= {"q_norm.weight", "k_norm.weight", "k_norm.bias"}


@pytest.mark.parametrize("interleaved", (False, True))
def test_rotary_turns_queries_and_keys_and_not_values(interleaved):
    rotary = RotaryEmbedding(2, interleaved=interleaved)
    layer = build({"rotary": rotary})
    kept = []
    layer.observer = lambda x, out, lse: kept.append(x)
    query, key, value = tokens(layer)
    layer(query, key, value)
    x = kept[0]
    heads = [p(t).unflatten(-1, (6, 2)).transpose(1, 2) for p, t in
             ((layer.q_proj, query), (layer.k_proj, key), (layer.v_proj, value))]  # fmt: skip
    # the last query stands with the last key
    assert x.query.equal(rotary(heads[0], torch.arange(2, 7)[None]))
    assert x.key.equal(rotary(heads[1], torch.arange(7)[None]))
    assert x.value.equal(heads[2])


def test_unbatched_is_a_batch_of_one():
    layer = build({"value_dim": 17})
    query, key, value = (t[0] for t in tokens(layer))
    out = layer(query, key, value, mask=Causal())
    assert out.shape == (5, 12)
    assert out.equal(layer(query[None], key[None], value[None], mask=Causal())[0])
    assert build({})(query).shape == (5, 12)


def test_key_defaults_to_query_and_value_to_key():
    layer = build({})
    query, key, _ = tokens(layer)
    assert layer(query).equal(layer(query, query, query))
    assert layer(query, key).equal(layer(query, key, key))
    assert not layer(query, key).equal(layer(query))
    assert MultiHeadAttention(12, 6, key_dim=11).value_dim == 11
    assert MultiHeadAttention(12, 6).key_dim == 12


def test_max_length_refuses_longer_inputs():
    layer = build({"max_length": 6})
    query, key, _ = tokens(layer)
    layer(query)
    layer(query, key[:, :6])
    with pytest.raises(ShapeError, match=r"7 tokens.*max_length 6"):
        layer(query, key)
    with pytest.raises(ShapeError, match="max_length 6"):
        layer(key, query)


def test_positions():
    layer = build({"rotary": RotaryEmbedding(2), "mask": Causal()})
    kept = []
    layer.observer = lambda x, out, lse: kept.append((x.queries, x.keys))
    query, key, _ = tokens(layer)
    for given, want in (
        ({}, (Positions(5), Positions(5))),
        ({"positions": Positions(5, start=3)}, (Positions(5, start=3), Positions(5, start=3))),
        ({"key": key}, (Positions(5, start=2), Positions(7))),
        ({"key": key, "positions": Positions(5, start=9)}, (Positions(5, start=9), Positions(7))),
        ({"key": key, "key_positions": Positions(7, start=4)}, (Positions(5, start=6), Positions(7, start=4))),
    ):
        layer(query, **given)
        assert kept[-1] == want, given
    # rotation and masks depend on distances alone
    moved = layer(query, positions=Positions(5, start=100))
    assert_as_good_as(moved, layer(query).double(), layer(query), terms=12 * 100, inner=1.0)
    for wrong in ({"positions": Positions(4)}, {"key_positions": Positions(6), "key": key}):
        with pytest.raises(ShapeError, match="positions are for"):
            layer(query, **wrong)


@BACKEND
def test_a_query_that_sees_nothing_gets_the_output_bias(backend):
    layer = build({}, backend=backend)
    out = layer(tokens(layer)[0], mask=~Full())
    assert out.equal(layer.out_proj.bias.expand_as(out))


@BACKEND
def test_a_named_backend_is_never_swapped(backend):
    layer = build({"score_mods": [Softcap(1.0)]}, backend=backend)
    x = tokens(layer)[0]
    if backend == "sdpa":
        with pytest.raises(UnsupportedError, match="cannot modify scores"):
            layer(x)
    else:
        layer(x)
    with pytest.raises(ShapeError, match="no backend 'fast'"):
        MultiHeadAttention(12, 6, backend="fast")


# --- the observer


def test_the_observer_sees_the_call():
    layer = build({"sinks": True, "num_kv_heads": 2, "mask": Causal()})
    query, key, value = tokens(layer)
    kept = []
    layer.observer = lambda x, out, lse: kept.append((x, out, lse))
    got = layer(query, key, value, mask=Padding([3, 6]))
    x, out, lse = kept[0]
    assert x.query.shape == (2, 6, 5, 2) and x.key.shape == (2, 2, 7, 2) and out.shape == (2, 6, 5, 2)
    assert lse.shape == (2, 6, 5) and x.sinks is layer.sinks
    assert x.mask.parts()[0] == Causal()
    assert layer.out_proj(out.transpose(1, 2).flatten(2)).equal(got)
    again = attention(
        x.query, x.key, x.value, mask=Causal() & Padding([3, 6]), sinks=x.sinks, scale=x.scale,
        query_positions=x.queries, key_positions=x.keys,
    )  # fmt: skip
    assert again.equal(out)
    layer.observer = None
    assert layer(query, key, value, mask=Padding([3, 6])).equal(got)


def test_the_observer_may_replace_the_output():
    layer = build({})
    x = tokens(layer)[0]

    def silence(x, out, lse):
        keep = torch.ones(6)
        keep[[1, 4]] = 0
        return out * keep[:, None, None]

    layer.observer = silence
    out = layer(x)
    layer.observer = None
    assert not out.equal(layer(x))
    quiet = copy.deepcopy(layer)
    with torch.no_grad():
        quiet.out_proj.weight[:, 2:4] = 0
        quiet.out_proj.weight[:, 8:10] = 0
    assert_as_good_as(out, quiet.double()(x.double()), quiet.float()(x), terms=12)
    layer.observer = lambda x, out, lse: out[:, :1]
    with pytest.raises(ShapeError, match="observer returned"):
        layer(x)


# --- the cache


class ListCache(KVCache):
    """As simple as a cache can be: everything so far, in one tensor."""

    def __init__(self):
        self.key = self.value = None

    def next_positions(self, count):
        return Positions(count, start=0 if self.key is None else self.key.shape[2])

    def append(self, key, value, positions, lengths=None):
        if self.key is not None and positions.start != self.key.shape[2]:
            raise CacheError(f"Tokens from {positions.start} on do not follow {self.key.shape[2]} stored ones.")
        self.key = key if self.key is None else torch.cat([self.key, key], 2)
        self.value = value if self.value is None else torch.cat([self.value, value], 2)
        return self.key, self.value, Positions(self.key.shape[2])


@BACKEND
@pytest.mark.parametrize("chunks", ((1,) * 11, (11,), (4, 1, 6), (1, 10)))
@pytest.mark.parametrize("kv_heads", (6, 1))
def test_any_chunking_with_a_cache_equals_one_pass(backend, chunks, kv_heads):
    layer = build(
        {"num_kv_heads": kv_heads, "rotary": RotaryEmbedding(2), "mask": Causal() & Window(5)}, backend=backend
    )
    layer = layer.double()
    x = randn(2, 11, 12, seed=120, dtype=torch.float64)
    want = layer(x)
    cache, outs = ListCache(), []
    for part in x.split(chunks, 1):
        outs.append(layer(part, cache=cache))
    assert_as_good_as(torch.cat(outs, 1), want, terms=64, inner=1.0)
    with pytest.raises(CacheError):
        layer(x[:, :1], cache=cache, positions=Positions(1, start=3))


def test_what_is_no_cache_is_refused():
    layer = build({})
    x = tokens(layer)[0]
    with pytest.raises((ShapeError, TypeError)):
        layer(x, cache={})
    with pytest.raises(ShapeError, match="lengths= tells a cache"):
        layer(x, lengths=torch.tensor([1, 2]))


# --- parameters


def test_names_of_the_state_dict():
    layer = MultiHeadAttention(12, 6, num_kv_heads=2)
    shapes = {name: tuple(t.shape) for name, t in layer.state_dict().items()}
    assert shapes == {
        "q_proj.weight": (12, 12),
        "q_proj.bias": (12,),
        "k_proj.weight": (4, 12),
        "k_proj.bias": (4,),
        "v_proj.weight": (4, 12),
        "v_proj.bias": (4,),
        "out_proj.weight": (12, 12),
        "out_proj.bias": (12,),
    }
    more = MultiHeadAttention(12, 6, sinks=True, score_mods=[ALiBi(6)], rotary=RotaryEmbedding(2))
    assert set(more.state_dict()) == set(MultiHeadAttention(12, 6).state_dict()) | {"sinks"}


@pytest.mark.parametrize("given", ({}, {"num_kv_heads": 1}, {"key_dim": 101, "value_dim": 303}, {"out_dim": 505}))
def test_each_projection_starts_with_its_own_spread(given):
    # Xavier: uniform in ±sqrt(6 / (in + out)), whatever the other projections are
    torch.manual_seed(0)
    layer = MultiHeadAttention(204, 4, **given)
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
        bound = (6 / (projection.in_features + projection.out_features)) ** 0.5
        weight = projection.weight.detach()
        assert weight.abs().max() <= bound
        # the largest of n uniform numbers is within bound / n of the bound but for one time in e^k at k times that
        assert weight.abs().max() > bound * (1 - 20 / weight.numel())
        deviation = bound / 3**0.5
        assert (weight.std() - deviation).abs() < 5 * deviation / (2 * weight.numel()) ** 0.5
        assert projection.bias.eq(0).all()
    before = layer.q_proj.weight.clone()
    layer.reset_parameters()
    assert not layer.q_proj.weight.equal(before)


def test_device_and_dtype():
    layer = MultiHeadAttention(12, 6, sinks=True, device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in layer.parameters())
    assert layer(torch.empty(2, 5, 12, device="meta", dtype=torch.bfloat16), mask=Causal()).shape == (2, 5, 12)
    made = layer.to_empty(device="cpu")
    made.reset_parameters()
    assert all(p.isfinite().all() for p in made.parameters())
    assert MultiHeadAttention(12, 6, dtype=torch.float64)(torch.zeros(1, 3, 12).double()).dtype == torch.float64


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float64), ids=str)
def test_dtypes(dtype):
    layer = build({"num_kv_heads": 2, "sinks": True, "rotary": RotaryEmbedding(2), "score_mods": [ALiBi(6)]}).to(dtype)
    x = tokens(layer, dtype)[0]
    out = layer(x, mask=Causal())
    assert out.dtype == dtype and out.isfinite().all()
    out.float().sum().backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in layer.parameters())


def test_the_text_of_a_layer():
    assert MultiHeadAttention(12, 6).extra_repr() == "12, 6"
    layer = MultiHeadAttention(
        12, 6, num_kv_heads=2, head_dim=5, v_head_dim=7, key_dim=11, value_dim=13, out_dim=17, scale=0.5,
        mask=Causal() & Window(3), sinks=True, dropout_p=0.1, max_length=9, backend="reference",
    )  # fmt: skip
    assert layer.extra_repr() == (
        "12, 6, num_kv_heads=2, head_dim=5, v_head_dim=7, key_dim=11, value_dim=13, out_dim=17, scale=0.5, "
        "mask=Causal() & Window(3), dropout_p=0.1, max_length=9, backend='reference', sinks=True"
    )
    assert "(rotary): RotaryEmbedding(2" in repr(MultiHeadAttention(12, 6, rotary=RotaryEmbedding(2)))


def everything():
    return build(
        {
            "num_kv_heads": 2,
            "rotary": RotaryEmbedding(2),
            "score_mods": [Softcap(3.0), ALiBi(6), Bias(nn.Parameter(randn(1, 6, 5, 5)))],
            "mask": PerHead((Causal(), Window(2), Full(), Causal(), ~Window(1), Causal())),
            "sinks": True,
            "q_norm": nn.RMSNorm(2),
            "k_norm": nn.RMSNorm(2),
        }
    )


def test_copied_pickled_saved():
    layer = everything()
    x = tokens(layer)[0]
    want = layer(x)
    kept = io.BytesIO()
    torch.save(layer.state_dict(), kept)
    kept.seek(0)
    loaded = everything()
    loaded.reset_parameters()
    assert not loaded(x).equal(want)
    loaded.load_state_dict(torch.load(kept))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert other(x).equal(want)
        assert other.q_proj.weight is not layer.q_proj.weight


def test_functional_call_and_checkpoint():
    layer = everything()
    x = leaf(tokens(layer)[0])
    want = layer(x)
    assert torch.func.functional_call(layer, dict(layer.named_parameters()), (x,)).equal(want)
    again = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    assert again.equal(want)
    grads = [torch.autograd.grad(y.square().sum(), list(layer.parameters())) for y in (want, again)]
    assert all(a.equal(b) for a, b in zip(*grads, strict=True))


def test_checkpointing_replays_dropout():
    layer = build({"dropout_p": 0.5})
    x = tokens(layer)[0]
    results = []
    for run in (layer, lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(1)
        out = run(x)
        results.append([out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))])
    assert all(a.equal(b) for a, b in zip(*results, strict=True))


# --- the projections are modules


def test_hooks_on_the_projections_are_called():
    layer = build({})
    x = tokens(layer)[0]
    called = []
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        module = getattr(layer, name)
        module.register_forward_pre_hook(lambda m, args, name=name: called.append(f"{name} in"))
        module.register_forward_hook(lambda m, args, out, name=name: called.append(f"{name} out"))
    layer(x)
    assert called == [f"{n} {e}" for n in ("q_proj", "k_proj", "v_proj", "out_proj") for e in ("in", "out")]


def test_a_projection_may_be_another_module():
    class LoRA(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.down, self.up = nn.Linear(12, 2, bias=False), nn.Linear(2, 12, bias=False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    layer = build({})
    x = tokens(layer)[0]
    layer.q_proj = LoRA(layer.q_proj)
    folded = copy.deepcopy(layer)
    weight = layer.q_proj.up.weight @ layer.q_proj.down.weight
    folded.q_proj = layer.q_proj.base
    folded = copy.deepcopy(folded)
    with torch.no_grad():
        folded.q_proj.weight += weight
    assert_as_good_as(layer(x), folded.double()(x.double()), folded.float()(x), terms=12)


def test_a_parametrised_weight_is_seen():
    layer = build({})
    x = tokens(layer)[0]
    before = layer(x)

    class Half(nn.Module):
        def forward(self, weight):
            return weight / 2

    nn.utils.parametrize.register_parametrization(layer.v_proj, "weight", Half())
    assert not layer(x).equal(before)
    prune.random_unstructured(layer.out_proj, "weight", 0.5)
    assert layer(x).isfinite().all()


# --- what makes no sense


@pytest.mark.plain
@pytest.mark.parametrize(
    "given",
    (
        {"embed_dim": 13},
        {"num_kv_heads": 4},
        {"num_kv_heads": 0},
        {"head_dim": 0},
        {"v_head_dim": -1},
        {"key_dim": 2.5},
        {"out_dim": True},
        {"num_heads": 0},
        {"dropout_p": 1.0},
        {"scale": "small"},
        {"max_length": 0},
        {"mask": Causal},
        {"mask": torch.ones(3, 3, dtype=torch.bool)},
        {"mask": Padding([3])},
        {"mask": PerHead((Causal(),) * 5)},
        {"rotary": RotaryEmbedding(4)},
        {"q_norm": nn.RMSNorm(3)},
        {"score_mods": [lambda s, b, h, q, k: s]},
        {"score_mods": [ALiBi(5)]},
        {"score_mods": CustomScore(lambda s, b, h, q, k: s)},
        {"sinks": 1},
        {"bias": "yes"},
        {"dtype": torch.int64},
        {"backend": "fast"},
    ),
    ids=", ".join,
)
def test_a_constructor_that_makes_no_sense_is_refused(given):
    with pytest.raises(ShapeError):
        MultiHeadAttention(**{"embed_dim": 12, "num_heads": 6, **given})


@pytest.mark.plain
def test_a_call_that_makes_no_sense_is_refused():
    layer = build({"value_dim": 17})
    query, key, value = tokens(layer)
    for call in (
        lambda: layer(query[..., :11], key, value),
        lambda: layer(query, key, key),
        lambda: layer(query, key[:, :6], value),
        lambda: layer(query, key[0], value),
        lambda: layer(query[:1], key, value),
        lambda: layer(query.double(), key.double(), value.double()),
        lambda: layer(query[None], key[None], value[None]),
        lambda: layer(query, key, value, mask=torch.zeros(5, 7)),
        lambda: layer(query, key, value, mask=torch.ones(5, 6, dtype=torch.bool)),
        lambda: layer(query, key, value, score_mods=[ALiBi(5)]),
        lambda: layer(query, key, value, seed=1.5),
        lambda: layer([1, 2], key, value),
    ):
        with pytest.raises(ShapeError):
            call()


def test_a_norm_that_gives_its_size_as_a_number():
    class Norm(torch.nn.Module):
        normalized_shape = 4

        def forward(self, x):
            return x

    MultiHeadAttention(8, 2, q_norm=Norm())
    with pytest.raises(ShapeError, match="heads of 4, the layer's have 8"):
        MultiHeadAttention(8, 1, q_norm=Norm())
