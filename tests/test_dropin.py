"""The drop-in for nn.MultiheadAttention: torch's samples, state dicts, stock's wrong answers, what is built on it."""

import copy
import io
import math
import pickle
import warnings
from collections import Counter

import pytest
import torch
from helpers import assert_as_good_as, randn
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from headwise import (
    Causal,
    ConversionError,
    Dense,
    MultiHeadAttention,
    Positions,
    ShapeError,
    UnsupportedError,
    attention,
)
from headwise.convert.torch import MultiheadAttention, from_torch
from headwise.score_mods import Bias

B, H, T, S, E = 2, 3, 7, 11, 15
KDIM, VDIM = 13, 17
TERMS = E + S
FORMS = {
    "packed": {},
    "separate": {"kdim": KDIM, "vdim": VDIM},
    "no bias": {"bias": False},
    "appended": {"add_bias_kv": True, "add_zero_attn": True},
    "appended to separate": {"kdim": KDIM, "add_bias_kv": True},
}
DRAWS = 4096
SIGMAS = 6  # of some ten thousand numbers none is as far off by chance


def stock(seed=0, dtype=torch.float32, **options):
    """An ``nn.MultiheadAttention`` with no weight or bias at zero."""
    module = nn.MultiheadAttention(E, H, dtype=dtype, **options)
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=seed + i, scale=parameter.shape[-1] ** -0.5))
    return module


def tokens(module, dtype=torch.float32, rows=T, slots=S, batch=B):
    lead = (lambda n: (batch, n)) if module.batch_first else (lambda n: (n, batch))
    return (
        randn(*lead(rows), E, seed=1, dtype=dtype),
        randn(*lead(slots), module.kdim, seed=2, dtype=dtype),
        randn(*lead(slots), module.vdim, seed=3, dtype=dtype),
    )


def put_in(model):
    """Every nn.MultiheadAttention of a model replaced by its drop-in."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.MultiheadAttention:
                setattr(module, name, MultiheadAttention.from_stock(child))
    return model


def doubled(thing):
    """The same in float64: tensors that are floating point, in whatever holds them."""
    if isinstance(thing, torch.Tensor):
        thing = thing.detach()
        return thing.double().requires_grad_() if thing.is_floating_point() else thing
    if isinstance(thing, (tuple, list)):
        return type(thing)(doubled(x) for x in thing)
    return {name: doubled(x) for name, x in thing.items()} if isinstance(thing, dict) else thing


def leaves(thing):
    """A copy of arguments whose floating point tensors collect gradients of their own."""
    if isinstance(thing, torch.Tensor):
        return thing.detach().clone().requires_grad_() if thing.is_floating_point() else thing
    if isinstance(thing, (tuple, list)):
        return type(thing)(leaves(x) for x in thing)
    return {name: leaves(x) for name, x in thing.items()} if isinstance(thing, dict) else thing


def gradients(module, args, kwargs):
    """Gradients after a backward: of the inputs by their place, of parameters by the names of stock's."""
    found = {str(i): x.grad for i, x in enumerate([*args, *kwargs.values()]) if isinstance(x, torch.Tensor)}
    grads = {name: p.grad for name, p in module.named_parameters()}
    for name in [name for name in grads if name.endswith("q_proj.weight") or name.endswith("q_proj.bias")]:
        before, _, kind = name.rpartition("q_proj.")
        parts = [grads.pop(f"{before}{x}_proj.{kind}") for x in "qkv"]
        if kind == "weight" and len({part.shape for part in parts}) > 1:
            grads |= {f"{before}{x}_proj_weight": part for x, part in zip("qkv", parts, strict=True)}
        else:
            grads[f"{before}in_proj_{kind}"] = torch.cat(parts)
    return found | {f"of {name}": grad for name, grad in grads.items()}


def compare(got, want, plain, terms, what):
    for i, (one, wanted, other) in enumerate(zip(got, want, plain, strict=True)):
        assert_as_good_as(one, wanted, other, terms=terms, what=f"{what}, result {i}")


def compare_gradients(got, want, plain, terms, what, times=1.0):
    assert got.keys() == want.keys() == plain.keys()
    largest = times * max((g.abs().max().item() for g in want.values() if g is not None), default=0.0)
    for name, wanted in want.items():
        assert (got[name] is None) == (wanted is None), f"{what}: gradient {name}"
        if wanted is not None:
            assert_as_good_as(
                got[name], wanted, plain[name], terms=terms, inner=largest, what=f"{what}, gradient {name}"
            )


def as_tuple(result):
    return tuple(x for x in result if x is not None) if isinstance(result, tuple) else (result,)


def total(results):
    return sum((x**2).sum() + x.sum() for x in results)


# --- torch's own samples ---------------------------------------------------------------------------------------------

pytest.importorskip("expecttest", reason="torch's samples import it")
warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.common_modules import module_db  # noqa: E402

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
MODES = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])


def module_samples(cls, dtype, training):
    info = next(info for info in module_db if info.module_cls is cls)
    return info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)


def operator_samples(name, dtype, requires_grad):
    (op,) = (op for op in op_db if op.name == name and not op.variant_test_name)
    return list(op.sample_inputs("cpu", dtype, requires_grad=requires_grad))


@pytest.mark.plain
@DTYPES
@MODES
def test_torchs_samples_of_the_module(training, dtype):
    """64 for each mode and dtype, 256 in all: outputs, weights, gradients, and each sample's own reference."""
    compared = 0
    for sample in module_samples(nn.MultiheadAttention, dtype, training):
        made, call = sample.constructor_input, sample.forward_input
        theirs = nn.MultiheadAttention(*made.args, **made.kwargs, dtype=dtype).train(training)
        ours = MultiheadAttention(*made.args, **made.kwargs, dtype=dtype).train(training)
        ours.load_state_dict(theirs.state_dict(), strict=True)
        exact = copy.deepcopy(theirs).double()
        runs = []
        for module, own in ((ours, leaves), (exact, doubled), (theirs, leaves)):
            args, kwargs = own(tuple(call.args)), own(call.kwargs)
            results = module(*args, **kwargs)
            total(results).backward()
            runs.append((results, gradients(module, args, kwargs)))
        what = f"sample {compared}"
        compare(*(results for results, _ in runs), 3 + 5, what)
        compare_gradients(*(grads for _, grads in runs), 3 * (3 + 5), what)
        with torch.no_grad():
            batched = sample.reference_fn(ours, *call.args, **call.kwargs)
            compare(batched, [x.detach() for x in runs[1][0]], runs[2][0], 3 + 5, f"{what}, in a batch")
        compared += 1
    assert compared == 64


CALLS = {nn.TransformerEncoderLayer: 1, nn.TransformerEncoder: 2, nn.TransformerDecoderLayer: 2, nn.Transformer: 3}
LARGE = (nn.TransformerEncoder, nn.Transformer)
SAMPLES = {
    (nn.TransformerEncoderLayer, False): 35,
    (nn.TransformerEncoderLayer, True): 39,
    (nn.TransformerEncoder, False): 35,
    (nn.TransformerEncoder, True): 39,
    (nn.TransformerDecoderLayer, False): 67,
    (nn.TransformerDecoderLayer, True): 67,
    (nn.Transformer, False): 64,
    (nn.Transformer, True): 64,
}


ROWS = [
    pytest.param(
        cls,
        training,
        dtype,
        id=f"{cls.__name__}-{'train' if training else 'eval'}-{dtype}",
        # in the fast run each class in evaluation, and in training those that are not made of the others
        marks=[pytest.mark.slow] if training == (dtype is torch.float32) or (training and cls in LARGE) else [],
    )
    for cls in CALLS
    for training in (False, True)
    for dtype in (torch.float32, torch.float64)
]


@pytest.fixture
def calls(monkeypatch):
    """Counts the calls of the drop-in. (A hook would not do: stock's fast path looks for hooks.)"""
    counted, forward = Counter(), MultiheadAttention.forward

    def count(*args, **kwargs):
        counted["calls"] += 1
        return forward(*args, **kwargs)

    monkeypatch.setattr(MultiheadAttention, "forward", count)
    return counted


@pytest.mark.plain
@pytest.mark.parametrize(("cls", "training", "dtype"), ROWS)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torchs_samples_of_transformers(cls, training, dtype, calls):
    """With every attention replaced they equal stock, and never pass it by: with and without gradients."""
    compared = 0
    for sample in module_samples(cls, dtype, training):
        made, call = sample.constructor_input, sample.forward_input
        given = {} if cls is nn.TransformerEncoder else {"dtype": dtype}
        theirs = cls(*made.args, **made.kwargs, **given).train(training)
        ours, exact = put_in(copy.deepcopy(theirs)), copy.deepcopy(theirs).double()
        what, runs = f"{cls.__name__} sample {compared}", []
        for module, own in ((ours, leaves), (exact, doubled), (theirs, leaves)):
            args, kwargs = own(tuple(call.args)), own(call.kwargs)
            calls.clear()
            results = as_tuple(module(*args, **kwargs))
            assert calls["calls"] == (CALLS[cls] if module is ours else 0), what
            total(results).backward()
            runs.append((results, gradients(module, args, kwargs)))
        compare(*(results for results, _ in runs), 8 + 5, what)
        compare_gradients(*(grads for _, grads in runs), 6 * (8 + 5), what)
        calls.clear()
        with torch.no_grad():
            args = tuple(call.args)
            got, want = ours(*args, **call.kwargs), exact(*doubled(args), **doubled(call.kwargs))
            assert calls["calls"] == CALLS[cls], what
            assert_as_good_as(got, want, theirs(*args, **call.kwargs), terms=8 + 5, what=f"{what}, no gradient")
            if sample.reference_fn is not None:
                # in the same mode: of padded rows stock's encoder makes zeros in evaluation alone
                results = [
                    as_tuple(sample.reference_fn(module, *own(tuple(call.args)), **own(call.kwargs)))
                    for module, own in ((ours, leaves), (exact, doubled), (theirs, leaves))
                ]
                compare(*results, 8 + 5, f"{what}, reference")
        compared += 1
    assert compared == SAMPLES[cls, training]


def assert_same_spread(draws, mean, variance, what):
    """Means and variances over many draws, (draws, numbers), each within its standard error of what they must be."""
    draws, mean, variance = draws.double(), mean.double(), variance.double()
    assert ((draws.mean(0) - mean).abs() <= SIGMAS * (variance / len(draws)).sqrt() + 1e-6).all(), f"{what}: mean"
    # a sum of a few two-valued terms has a kurtosis of at most 3, so that a variance is off by sqrt(2 / draws)
    off = SIGMAS * math.sqrt(2 / len(draws)) * variance
    assert ((draws.var(0) - variance).abs() <= off + 1e-9).all(), f"{what}: variance"


def sizes_of_terms(query, key, value, weights, out_grad):
    """Size of the terms of the sum behind each gradient, before anything cancels."""
    score = weights**2 * (out_grad**2 @ value.mT**2)
    scale, over_batch = query.shape[-1] ** -0.5, score.flatten(0, -3)
    terms = {
        "0": scale**2 * (score @ key**2),
        "1": scale**2 * (score.mT @ query**2),
        "2": weights.mT**2 @ out_grad**2,
        "3": over_batch.sum(0),
    }
    return {name: (4 * x).max().sqrt().item() for name, x in terms.items()}  # 4: two terms to a score


@pytest.mark.plain
@DTYPES
def test_torchs_samples_of_the_function(dtype):
    """25 for each dtype; the 12 that drop weights by their statistics. Their causal mask lets both begin together."""
    counted = Counter()
    for i, sample in enumerate(operator_samples("nn.functional.scaled_dot_product_attention", dtype, True)):
        what, kwargs = f"sample {i}", dict(sample.kwargs)
        dropout_p = kwargs.pop("dropout_p")
        tensors = (sample.input, *sample.args)
        given = [*tensors, *([kwargs["attn_mask"]] if "attn_mask" in kwargs else [])]

        def ours(*given, sample=sample, causal=kwargs["is_causal"], dropout_p=0.0, many=1):
            query, key, value, *bias = given
            if query.dim() == 3 and key.dim() == 4:
                query = query.expand(len(key), *query.shape)
            batched = query.dim() == 4
            query, key, value = (x if batched else x[None] for x in (query, key, value))
            query, key, value = (x.repeat(many, 1, 1, 1) for x in (query, key, value))
            out = attention(
                query,
                key,
                value,
                mask=Causal() if causal else Dense(torch.ones(1, 1, dtype=torch.bool)),
                score_mods=[Bias(x) for x in bias],
                query_positions=Positions(query.shape[-2]),
                dropout_p=dropout_p,
            )
            return out if batched else out[0] if many == 1 else out

        def theirs(*given, causal=kwargs["is_causal"]):
            return F.scaled_dot_product_attention(*given, is_causal=causal)

        runs = []
        for function, own in ((ours, leaves), (theirs, doubled), (theirs, leaves)):
            args = own(given)
            out = function(*args)
            total([out]).backward()
            runs.append((out, {str(i): x.grad for i, x in enumerate(args)}))
        compare(*([out] for out, _ in runs), 8 + 6, what)
        query, key, value = (x.detach().double() for x in tensors)
        eye = torch.eye(key.shape[-2], dtype=torch.float64).expand(*key.shape[:-1], -1)
        rest = [x.detach().double() for x in given[3:]]
        weights = theirs(query, key, eye, *rest)
        out_grad = 2 * runs[1][0].detach() + 1
        inner = sizes_of_terms(query, key, value, weights, out_grad)
        for name, wanted in runs[1][1].items():
            one, other = runs[0][1][name], runs[2][1][name]
            assert_as_good_as(one, wanted, other, terms=16 * 6, inner=inner[name], what=f"{what}, gradient {name}")
        if dropout_p:
            variance = dropout_p / (1 - dropout_p) * weights**2 @ value**2
            with torch.no_grad():
                draws = ours(*(x.detach() for x in tensors), dropout_p=dropout_p, many=DRAWS)
            draws = draws.reshape(DRAWS, *runs[0][0].shape)
            assert_same_spread(draws, runs[1][0].detach(), variance, what)
        counted["dropped" if dropout_p else "plain"] += 1
    assert counted == {"plain": 13, "dropped": 12}


# where the function has its arguments
PLACES = {"query": 0, "key": 1, "value": 2, "in bias": 6, "bias_k": 7, "bias_v": 8, "out weight": 11, "out bias": 12}


@pytest.mark.plain
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=["float32", "float64"]
)
def test_torchs_samples_of_the_functional_module(dtype):
    """192 for each dtype, each put into a module; the 96 that drop weights by their statistics."""
    counted = Counter()
    for i, sample in enumerate(operator_samples("nn.functional.multi_head_attention_forward", dtype, False)):
        what, kwargs = f"sample {i}", sample.kwargs
        query = sample.input
        key, value, embed_dim, heads, packed, bias, bias_k, bias_v, zero, dropout_p, out_weight, out_bias = sample.args
        if kwargs["use_separate_proj_weight"]:
            packed = torch.cat([kwargs[f"{x}_proj_weight"] for x in "qkv"])
        module = MultiheadAttention(embed_dim, heads, dropout_p, add_bias_kv=True, add_zero_attn=zero, dtype=dtype)
        state = {"in_proj_weight": packed, "in_proj_bias": bias, "bias_k": bias_k[None, None]}
        state |= {"bias_v": bias_v[None, None], "out_proj.weight": out_weight, "out_proj.bias": out_bias}
        module.load_state_dict(state, strict=True)
        module.train(kwargs["training"])
        assert module.training == (dropout_p > 0)

        runs = []
        for own in (doubled, leaves):
            args, options = own((query, *sample.args)), own(dict(kwargs, training=False))
            out, weights = F.multi_head_attention_forward(*args, **options)
            runs.append(((out, weights), args, options))
        (want, *exact), (plain, *near) = runs
        terms, attn_mask = embed_dim + key.shape[0] + 1, kwargs["attn_mask"]
        if dropout_p == 0:
            own, own_mask, seen = leaves((query, key, value)), leaves(attn_mask), []
            module.observer = lambda x, out, lse, seen=seen: seen.append(x)
            results = module(*own, attn_mask=own_mask)
            # a fused backward rounds each score once more before it is exponentiated, and these reach several hundred
            scores = seen[0].modify(seen[0].query @ seen[0].key.mT * seen[0].scale).abs().max().item()
            compare(results, want, plain, terms, what)
            for made in (results, want, plain):
                total(made).backward()
            theirs = [
                {name: args[place].grad for name, place in PLACES.items()}
                | {"mask": getattr(options["attn_mask"], "grad", None)}
                for args, options in (exact, near)
            ]
            got = dict(zip(("query", "key", "value"), (x.grad for x in own), strict=True))
            got |= {"mask": getattr(own_mask, "grad", None), "out weight": module.out_proj.weight.grad}
            got |= {"out bias": module.out_proj.bias.grad, "bias_k": module.bias_k.grad[0, 0]}
            got |= {"bias_v": module.bias_v.grad[0, 0]}
            got |= {"in bias": torch.cat([getattr(module, f"{x}_proj").bias.grad for x in "qkv"])}
            compare_gradients(got, *theirs, 10 * terms, what, max(1.0, scores))
        else:
            many, batched = DRAWS // 8, query.dim() == 3
            query, key, value = (x if batched else x[:, None] for x in (query, key, value))
            repeated = [x.repeat(1, many, 1) for x in (query, key, value)]
            mask = attn_mask.repeat(many, 1, 1) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
            with torch.no_grad():
                out, weights = module(*repeated, attn_mask=mask)
            batch = query.shape[1]
            once = want[0] if batched else want[0][:, None]
            draws = out.unflatten(1, (many, batch)).movedim(1, 0)
            wanted, rounded = (x[1].detach().expand(batch, -1, -1).repeat(many, 1, 1) for x in (want, plain))
            assert_as_good_as(weights, wanted, rounded, terms=terms, what=f"{what}, weights before dropout")
            variance = variance_of(module, query, key, value, attn_mask, heads)
            assert_same_spread(draws, once.detach(), variance, what)
        counted["dropped" if dropout_p else "plain"] += 1
    assert counted == {"plain": 96, "dropped": 96}


def variance_of(module, query, key, value, attn_mask, heads):
    """The variance of an output, (tokens, batch, size), when each weight is dropped or not by itself."""
    module = copy.deepcopy(module).double().eval()
    seen = []
    module.observer = lambda x, out, lse: seen.append(x)
    with torch.no_grad():
        mask = None if attn_mask is None else attn_mask.double()
        weights = module(*(x.double() for x in (query, key, value)), attn_mask=mask, average_attn_weights=False)[1]
    value_BHSD = seen[0].value
    by_head = module.out_proj.weight.unflatten(1, (heads, -1))  # (out, heads, head size)
    reached_BHSO = torch.einsum("bhsd,ohd->bhso", value_BHSD, by_head)
    p = module.dropout
    return p / (1 - p) * torch.einsum("bhts,bhso->tbo", weights**2, reached_BHSO**2).detach()


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_state_dicts_have_the_names_and_order_of_stock(form):
    theirs, ours = stock(**FORMS[form]), MultiheadAttention(E, H, **FORMS[form])
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert str(ours.load_state_dict(theirs.state_dict(), strict=True)) == "<All keys matched successfully>"
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name
    blank = nn.MultiheadAttention(E, H, **FORMS[form])
    blank.load_state_dict(ours.state_dict(), strict=True)
    x = tokens(theirs)
    assert torch.equal(blank(*x)[0], theirs(*x)[0])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_of_a_larger_model(form, assign):
    theirs = nn.ModuleDict({"a": stock(**FORMS[form]), "ab": stock(9, **FORMS[form]), "norm": nn.LayerNorm(E)})
    ours = put_in(copy.deepcopy(theirs))
    for parameter in ours.parameters():
        nn.init.zeros_(parameter)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict(), strict=True, assign=assign)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name]), name
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in ours.parameters())
    given = theirs["a"].in_proj_weight
    if given is not None:
        assert (ours["a"].v_proj.weight.data_ptr() == given[2 * E :].data_ptr()) == assign


def test_a_state_dict_may_have_projections_apart():
    ours = MultiheadAttention.from_stock(stock())
    apart = {name: parameter.detach().clone() for name, parameter in ours.named_parameters()}
    assert "q_proj.weight" in apart
    blank = MultiheadAttention(E, H)
    blank.load_state_dict(apart, strict=True)
    assert torch.equal(blank.in_proj_weight, ours.in_proj_weight)


def test_a_state_dict_is_the_memory_of_the_weights():
    ours = MultiheadAttention(E, H)
    ours.state_dict()["in_proj_weight"].fill_(2)
    assert ours.v_proj.weight.eq(2).all()
    kept = ours.state_dict(keep_vars=True)["in_proj_weight"]
    kept.sum().backward()
    assert ours.k_proj.weight.grad.eq(1).all()


@pytest.mark.plain
def test_state_dicts_that_do_not_fit():
    ours = MultiheadAttention(E, H)
    state = stock().state_dict()
    with pytest.raises(RuntimeError, match=r"in_proj_weight: the shape is \(30, 15\), but \(45, 15\) in the layer"):
        ours.load_state_dict(state | {"in_proj_weight": torch.zeros(2 * E, E)})
    with pytest.raises(RuntimeError, match=r"q_proj.weight, which is there as well"):
        ours.load_state_dict(state | {"q_proj.weight": torch.zeros(E, E)})
    del state["in_proj_bias"]
    with pytest.raises(RuntimeError, match="Missing key"):
        ours.load_state_dict(state)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        ours.load_state_dict(stock(add_bias_kv=True).state_dict())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_first_weights_are_those_of_stock(form, dtype):
    """The very numbers under the same seed: also their spread, which is not that of ``MultiHeadAttention``."""
    made = []
    for cls in (nn.MultiheadAttention, MultiheadAttention):
        torch.manual_seed(7)
        made.append((cls(E, H, dtype=dtype, **FORMS[form]).state_dict(), torch.rand(3)))
    (theirs, after), (ours, ours_after) = made
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    assert torch.equal(after, ours_after)  # and as many numbers drawn


@pytest.mark.parametrize("form", FORMS)
def test_attributes_are_those_of_stock(form):
    theirs = stock(dropout=0.25, batch_first=True, **FORMS[form])
    ours = MultiheadAttention.from_stock(theirs)
    assert isinstance(ours, nn.MultiheadAttention)
    for name in ("embed_dim", "num_heads", "head_dim", "kdim", "vdim", "dropout", "batch_first", "add_zero_attn"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in (
        "in_proj_weight",
        "in_proj_bias",
        "q_proj_weight",
        "k_proj_weight",
        "v_proj_weight",
        "bias_k",
        "bias_v",
    ):
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert (mine is None) == (other is None), name
        assert mine is None or torch.equal(mine, other), name
    hides = torch.zeros(T, T, dtype=torch.bool)
    merged, kind = ours.merge_masks(hides, None, tokens(theirs)[0])
    assert kind == 2 and merged.shape == (B, H, T, T)


def test_what_is_written_to_the_packed_weights_is_written_to_the_projections():
    """As code does that gives modules their first weights."""
    ours = MultiheadAttention(E, H)
    nn.init.constant_(ours.in_proj_weight, 3.0)
    ours.in_proj_bias.data.fill_(5)
    assert ours.q_proj.weight.eq(3).all() and ours.v_proj.weight.eq(3).all() and ours.k_proj.bias.eq(5).all()
    (ours.in_proj_weight * torch.arange(3.0).repeat_interleave(E)[:, None]).sum().backward()
    assert ours.q_proj.weight.grad.eq(0).all() and ours.v_proj.weight.grad.eq(2).all()


def test_weights_given_apart_are_laid_together_again():
    ours, packed = MultiheadAttention(E, H), randn(3 * E, E)
    for name, part in zip("qkv", packed.chunk(3), strict=True):
        getattr(ours, f"{name}_proj").weight = nn.Parameter(part.clone())
    assert torch.equal(ours.state_dict()["in_proj_weight"], packed)
    nn.init.ones_(ours.in_proj_weight)
    assert all(getattr(ours, f"{name}_proj").weight.eq(1).all() for name in "qkv")
    ours.k_proj.weight = nn.Parameter(randn(E, E))
    torch.manual_seed(3)
    ours._reset_parameters()
    torch.manual_seed(3)
    want = nn.init.xavier_uniform_(torch.empty(3 * E, E))
    assert torch.equal(torch.cat([ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight]), want)


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "float64": lambda m: copy.deepcopy(m).double(),
    "bfloat16 and back": lambda m: copy.deepcopy(m).bfloat16().float(),
    "of stock": lambda m: MultiheadAttention.from_stock(m.to_stock()),
    "through meta": lambda m: loaded(copy.deepcopy(m).to("meta").to_empty(device="cpu"), m.state_dict()),
}


def loaded(module, state):
    module.load_state_dict(state)
    return module


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", COPIES)
def test_copies(way, form):
    ours = MultiheadAttention.from_stock(stock(batch_first=True, **FORMS[form]))
    if "bfloat16" in way:
        ours.bfloat16().float()
    other = COPIES[way](ours)
    dtype = torch.float64 if way == "float64" else torch.float32
    got, want = other(*tokens(ours, dtype))[0], ours(*tokens(ours))[0]
    assert_as_good_as(got.float(), want.double(), want, terms=TERMS)
    assert list(other.state_dict()) == list(ours.state_dict())
    if ours.q_proj.bias is not None:  # still one after another in memory
        first = other.q_proj.bias
        assert other.k_proj.bias.data_ptr() == first.data_ptr() + E * first.element_size()
        assert other.in_proj_bias.data_ptr() == other.q_proj.bias.data_ptr()
        assert (other.q_proj.bias.data_ptr() == ours.q_proj.bias.data_ptr()) == (way in ("copy", "of stock"))


def test_saved_whole():
    ours, file = MultiheadAttention.from_stock(stock()), io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert torch.equal(other(*tokens(ours))[0], ours(*tokens(ours))[0])


def test_functional_call_and_func_grad():
    ours = MultiheadAttention.from_stock(stock(batch_first=True))
    given = {name: p.detach() * 2 for name, p in ours.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(ours, parameters, tokens(ours))[0].square().sum()

    grads = torch.func.grad(loss)(given)
    twice = copy.deepcopy(ours)
    with torch.no_grad():
        for parameter in twice.parameters():
            parameter.mul_(2)
    twice(*tokens(ours))[0].square().sum().backward()
    plain = {name: parameter.grad for name, parameter in twice.named_parameters()}
    compare_gradients(grads, doubled(plain), plain, T * TERMS, "func.grad")


# --- to and from stock -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_from_stock_and_back_share_memory(form):
    theirs = stock(batch_first=True, dropout=0.5, **FORMS[form]).eval()
    ours = MultiheadAttention.from_stock(theirs)
    back = ours.to_stock()
    assert type(back) is nn.MultiheadAttention and not ours.training and not back.training
    for name, parameter in theirs.named_parameters():
        other = dict(back.named_parameters())[name]
        assert other.data_ptr() == parameter.data_ptr() and other.shape == parameter.shape, name
        if not name.startswith("in_proj"):
            assert other is parameter, name
    assert list(back.state_dict()) == list(theirs.state_dict())
    assert repr(back) == repr(theirs)
    x = tokens(theirs)
    got, want, plain = ours(*x), copy.deepcopy(theirs).double()(*(t.double() for t in x)), theirs(*x)
    compare(got, want, plain, TERMS, form)
    assert torch.equal(back(*x)[0], plain[0])


def test_training_after_from_stock_reaches_stocks_weights():
    theirs = stock(batch_first=True)
    before = {name: p.detach().clone() for name, p in theirs.named_parameters()}
    ours = MultiheadAttention.from_stock(theirs)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    ours(*tokens(ours))[0].square().sum().backward()
    optimizer.step()
    back = dict(ours.to_stock().named_parameters())
    for name, parameter in theirs.named_parameters():
        assert not torch.equal(parameter, before[name]), name
        assert torch.equal(parameter, back[name]), name


def test_what_trains_and_gradients_are_taken_over():
    theirs = stock()
    theirs(*tokens(theirs))[0].sum().backward()
    theirs.in_proj_bias.requires_grad_(False)
    theirs.out_proj.weight.requires_grad_(False)
    ours = MultiheadAttention.from_stock(theirs)
    assert torch.equal(ours.k_proj.weight.grad, theirs.in_proj_weight.grad[E : 2 * E])
    assert ours.k_proj.weight.requires_grad and not ours.k_proj.bias.requires_grad
    assert not ours.out_proj.weight.requires_grad and ours.out_proj.bias.requires_grad
    back = ours.to_stock()
    assert torch.equal(back.in_proj_weight.grad, theirs.in_proj_weight.grad)
    assert not back.in_proj_bias.requires_grad and back.in_proj_weight.requires_grad


def test_hooks_are_taken_over_and_still_removed_by_their_handles():
    theirs, seen = stock(), []
    handles = [
        theirs.register_forward_hook(lambda m, args, out: seen.append("forward")),
        theirs.register_forward_pre_hook(lambda m, args, kwargs: seen.append("before"), with_kwargs=True),
        theirs.register_full_backward_hook(lambda m, into, out: seen.append("backward")),
        theirs.register_state_dict_post_hook(lambda m, state, prefix, metadata: seen.append(list(state))),
        theirs.out_proj.register_forward_hook(lambda m, args, out: seen.append("out_proj")),
    ]
    ours = MultiheadAttention.from_stock(theirs)
    query = randn(T, B, E).requires_grad_()
    ours(query, query, query)[0].sum().backward()
    assert seen == ["before", "out_proj", "forward", "backward"]
    ours.state_dict()
    assert seen[-1] == list(theirs.state_dict()) == list(ours.to_stock().state_dict())
    for handle in handles:
        handle.remove()
    seen.clear()
    ours(query, query, query)[0].sum().backward()
    ours.state_dict()
    assert seen == []


@pytest.mark.plain
def test_modules_that_are_not_stock_are_refused():
    class Own(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    with pytest.raises(ConversionError, match=r"^Own is not nn.MultiheadAttention, or has a forward of its own"):
        MultiheadAttention.from_stock(Own(E, H))
    with pytest.raises(ConversionError, match=r"^Linear is not nn.MultiheadAttention"):
        MultiheadAttention.from_stock(nn.Linear(3, 3))
    patched = stock()
    patched.forward = lambda *args: None
    with pytest.raises(ConversionError, match="a forward of its own"):
        MultiheadAttention.from_stock(patched)
    with pytest.raises(ConversionError, match=r"^MultiheadAttention is not nn.MultiheadAttention, or has a forward"):
        MultiheadAttention.from_stock(MultiheadAttention(E, H))
    with pytest.raises(ConversionError):
        from_torch(MultiheadAttention(E, H))
    normed = torch.nn.utils.parametrizations.weight_norm(stock(), "in_proj_weight")
    with pytest.raises(ConversionError, match=r"^in_proj_weight is no parameter of its own, but computed from others"):
        MultiheadAttention.from_stock(normed)
    pruned = stock()
    prune.random_unstructured(pruned.out_proj, "weight", 0.5)
    with pytest.raises(ConversionError, match=r"^out_proj.weight is no parameter of its own"):
        MultiheadAttention.from_stock(pruned)


@pytest.mark.plain
def test_modules_that_cannot_be_stock_are_refused():
    ours = MultiheadAttention(E, H)
    handle = ours.k_proj.register_forward_hook(lambda *args: None)
    with pytest.raises(ConversionError, match=r"^k_proj has hooks, which nn.MultiheadAttention would never call"):
        ours.to_stock()
    handle.remove()
    ours.to_stock()
    ours.v_proj = nn.Sequential(ours.v_proj)
    with pytest.raises(ConversionError, match=r"^v_proj is Sequential, not nn.Linear"):
        ours.to_stock()


# --- calls -----------------------------------------------------------------------------------------------------------

HIDES = torch.rand(T, S, generator=torch.Generator().manual_seed(1)) < 0.3
HIDES[:, 2] = False
BY_HEAD = torch.rand(B * H, T, S, generator=torch.Generator().manual_seed(2)) < 0.3
BY_HEAD[..., 2] = False
PADS = torch.arange(S) >= torch.tensor([S, 5])[:, None]
ADDED = randn(T, S, seed=31).masked_fill(HIDES, -torch.inf)
ADDED_BY_HEAD = randn(B * H, T, S, seed=32)
ADDED_TO_KEYS = randn(B, S, seed=33).masked_fill(PADS, -torch.inf)
MASKS = {
    "none": {},
    "attn_mask": {"attn_mask": HIDES},
    "attn_mask by head": {"attn_mask": BY_HEAD},
    "added": {"attn_mask": ADDED},
    "added by head": {"attn_mask": ADDED_BY_HEAD},
    "padding": {"key_padding_mask": PADS},
    "added to keys": {"key_padding_mask": ADDED_TO_KEYS},
    "both": {"attn_mask": HIDES, "key_padding_mask": PADS},
    "both added": {"attn_mask": ADDED_BY_HEAD, "key_padding_mask": ADDED_TO_KEYS},
    "mixed": {"attn_mask": BY_HEAD, "key_padding_mask": ADDED_TO_KEYS},
    "mixed the other way": {"attn_mask": ADDED, "key_padding_mask": PADS},
}


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        pytest.param(torch.float64, marks=pytest.mark.slow),
        pytest.param(torch.float16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_masks(dtype, form, masks):
    """Every mask with every form; both layouts, both kinds of weights, and none."""
    for batch_first in (True, False):
        theirs = stock(batch_first=batch_first, **FORMS[form]).to(dtype)
        ours, exact = MultiheadAttention.from_stock(theirs), copy.deepcopy(theirs).double()
        wide = copy.deepcopy(theirs).to(torch.promote_types(dtype, torch.float32))
        x, given = tokens(theirs, dtype), MASKS[masks]
        fits = {name: mask if mask.dtype == torch.bool else mask.to(dtype) for name, mask in given.items()}
        for average in (True, False):
            want = exact(*(t.double() for t in x), average_attn_weights=average, **doubled(fits))
            plain = wide(
                *(t.to(wide.out_proj.weight.dtype) for t in x),
                average_attn_weights=average,
                **{n: m if m.dtype == torch.bool else m.to(wide.out_proj.weight.dtype) for n, m in fits.items()},
            )
            got = ours(*x, average_attn_weights=average, **fits)
            for i, (one, wanted, other) in enumerate(zip(got, want, plain, strict=True)):
                assert one.dtype == dtype
                # projections round queries, keys and values to the dtype
                inner = wanted.abs().max().item() if dtype in (torch.bfloat16, torch.float16) else 0.0
                assert_as_good_as(one, wanted, other, terms=TERMS, inner=4 * inner, what=f"result {i}")
        out, none = ours(*x, need_weights=False, **fits)
        assert none is None and torch.equal(out, got[0])


@pytest.mark.parametrize("form", FORMS)
def test_without_a_batch(form):
    theirs = stock(dtype=torch.float64, **FORMS[form])
    for module in (theirs, MultiheadAttention.from_stock(theirs)):
        query, key, value = (x[:, 0] for x in tokens(theirs, torch.float64))
        got = module(query, key, value, attn_mask=BY_HEAD[:H], key_padding_mask=PADS[1], average_attn_weights=False)
        batched = theirs(
            query[:, None],
            key[:, None],
            value[:, None],
            attn_mask=BY_HEAD[:H],
            key_padding_mask=PADS[1:],
            average_attn_weights=False,
        )
        assert got[0].shape == (T, E) and got[1].shape[:2] == (H, T)
        compare(got, (batched[0][:, 0], batched[1][0]), got, TERMS, form)


def test_gradients_of_masks_that_are_added():
    theirs = stock(dtype=torch.float64, batch_first=True, add_bias_kv=True, add_zero_attn=True)
    ours, found = MultiheadAttention.from_stock(theirs), []
    for module in (ours, theirs):
        masks = [randn(B * H, T, S, seed=5, dtype=torch.float64).requires_grad_()]
        masks.append(randn(B, S, seed=6, dtype=torch.float64).requires_grad_())
        out, weights = module(*tokens(theirs, torch.float64), attn_mask=masks[0], key_padding_mask=masks[1])
        total((out, weights)).backward()
        found.append([mask.grad for mask in masks])
    for got, want in zip(*found, strict=True):
        assert_as_good_as(got, want, terms=10 * TERMS, inner=want.abs().max().item())


MODES_OF_STOCK = [
    (training, grad, weights) for training in (False, True) for grad in (False, True) for weights in (False, True)
]
EVERY_MODE = pytest.mark.parametrize(
    ("training", "grad", "need_weights"),
    MODES_OF_STOCK,
    ids=[
        "-".join(("train" if t else "eval", "grad" if g else "no grad", "weights" if w else "none"))
        for t, g, w in MODES_OF_STOCK
    ],
)


@EVERY_MODE
@pytest.mark.parametrize("masks", ["alone", "nothing hidden", "padding", "a mask"])
@pytest.mark.parametrize("appended", [False, True], ids=["", "appended"])
def test_is_causal_means_causal_in_every_mode(appended, masks, training, grad, need_weights):
    """Of stock three answers, by mode, and none without a mask; the hint also hid the keys that are appended."""
    theirs = stock(batch_first=True, add_bias_kv=appended, add_zero_attn=appended).train(training)
    ours, exact = MultiheadAttention.from_stock(theirs), copy.deepcopy(theirs).double()
    x = randn(B, T, E, seed=3)
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    other = HIDES[:, :T] & ~torch.eye(T, dtype=torch.bool)
    given = {
        "alone": {},
        "nothing hidden": {"attn_mask": torch.zeros(T, T, dtype=torch.bool)},
        "padding": {"key_padding_mask": PADS[:, :T]},
        "a mask": {"attn_mask": other},
    }[masks]
    said = dict(given, attn_mask=later | given["attn_mask"] if "attn_mask" in given else later)
    with torch.set_grad_enabled(grad):
        got = ours(x, x, x, need_weights=need_weights, is_causal=True, **given)
        want = exact(x.double(), x.double(), x.double(), **said)
        plain = theirs(x, x, x, **said)
    compare(got[: 1 + need_weights], want[: 1 + need_weights], plain[: 1 + need_weights], TERMS, masks)


@pytest.mark.parametrize(("rows", "slots"), [(3, 7), (7, 3), (1, 5)])
@pytest.mark.parametrize("appended", [False, True], ids=["", "appended"])
def test_is_causal_goes_by_index(rows, slots, appended):
    """The last query stands with the last key. A query before the first key sees only what is appended."""
    theirs = stock(batch_first=True, add_zero_attn=appended, dtype=torch.float64)
    ours = MultiheadAttention.from_stock(theirs)
    x = tokens(theirs, torch.float64, rows, slots)
    out, weights = ours(*x, is_causal=True, average_attn_weights=False)
    later = torch.arange(slots) > torch.arange(rows)[:, None] + slots - rows
    want, wanted = theirs(*x, attn_mask=later, average_attn_weights=False)
    dead = later.all(-1) if not appended else torch.zeros(rows, dtype=torch.bool)
    want, wanted = want.clone(), wanted.clone()
    want[:, dead], wanted[:, :, dead] = theirs.out_proj.bias, 0.0
    compare((out, weights), (want, wanted), (want, wanted), TERMS, "by index")


@EVERY_MODE
@pytest.mark.parametrize("added", [False, True], ids=["boolean", "added"])
def test_a_sequence_that_is_all_padding(added, training, grad, need_weights):
    """Of stock NaN or zeros, by mode, and a backward from the other sequence made every weight's gradient NaN."""
    ours = MultiheadAttention.from_stock(stock(batch_first=True)).train(training)
    pads = torch.tensor([[False] * T, [True] * T])
    mask = torch.zeros(2, T).masked_fill(pads, -torch.inf) if added else pads
    x = randn(B, T, E, seed=4)
    with torch.set_grad_enabled(grad):
        out, weights = ours(x, x, x, key_padding_mask=mask, need_weights=need_weights)
    assert torch.equal(out[1], ours.out_proj.bias.expand(T, E))
    alone = ours(x[:1], x[:1], x[:1])[0]
    assert_as_good_as(out[:1], alone.double(), alone, terms=TERMS)
    if need_weights:
        assert weights[1].eq(0).all() and weights[0].sum(-1).sub(1).abs().max() < 1e-6
    if grad:
        out[0].square().sum().backward()
        found = {name: p.grad.clone() for name, p in ours.named_parameters()}
        ours.zero_grad()
        ours(x[:1], x[:1], x[:1])[0].square().sum().backward()
        for name, parameter in ours.named_parameters():
            want = parameter.grad
            inner = want.abs().max().item() + 1.0
            assert_as_good_as(found[name], want.double(), want, terms=T * TERMS, inner=inner, what=name)


def test_weights_are_those_before_dropout():
    """Rows of stock's summed to 0.88 to 1.21."""
    theirs = stock(batch_first=True, dropout=0.5).train()
    ours = MultiheadAttention.from_stock(theirs)
    x = tokens(ours)
    out, weights = ours(*x)
    assert_as_good_as(weights.sum(-1), torch.ones(B, T, dtype=torch.float64), torch.ones(B, T), terms=S)
    kept = ours.eval()(*x)
    ours.dropout = 0.0
    assert torch.equal(kept[0], ours(*x)[0])
    assert torch.equal(weights, kept[1]) and not torch.equal(out, kept[0])


def test_dropout_follows_torchs_generator_and_the_attribute():
    ours = MultiheadAttention.from_stock(stock(batch_first=True, dropout=0.5)).train()
    x, outs = tokens(ours), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(ours(*x, need_weights=False)[0])
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    ours.dropout = 0.0
    want = copy.deepcopy(ours).eval()(*x)[0]
    assert torch.equal(ours(*x, need_weights=False)[0], want)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("sizes", [(0, 3, 5), (2, 0, 5), (2, 3, 0), (0, 0, 0), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("form", ["packed", "appended", "separate"])
def test_sizes_of_nothing(form, sizes, batch_first):
    batch, rows, slots = sizes
    ours = MultiheadAttention.from_stock(stock(batch_first=batch_first, **FORMS[form]))
    x = tokens(ours, rows=rows, slots=slots, batch=batch)
    masks = {"attn_mask": torch.zeros(rows, slots), "key_padding_mask": torch.zeros(batch, slots, dtype=torch.bool)}
    for given in ({}, masks, {"is_causal": True}):
        out, weights = ours(*x, **given)
        assert out.shape == ((batch, rows, E) if batch_first else (rows, batch, E)) and out.isfinite().all()
        assert weights.shape == (batch, rows, slots + ours._appended)
        out.sum().backward()
    if slots == 0 and form != "appended" and out.numel():
        assert torch.equal(out, ours.out_proj.bias.expand_as(out))


def test_large_scores_in_half_precision():
    """fp16 scores above 65504: NaN of stock, with weights."""
    theirs = stock(batch_first=True).half()
    ours = MultiheadAttention.from_stock(theirs)
    x = (randn(B, T, E, seed=1) * 400).half()
    out, weights = ours(x, x, x)
    assert out.isfinite().all() and weights.isfinite().all()


def test_autocast():
    theirs = stock(batch_first=True, add_bias_kv=True, add_zero_attn=True)
    ours, exact = MultiheadAttention.from_stock(theirs), copy.deepcopy(theirs).double()
    x = tokens(theirs)
    want = exact(*(t.double() for t in x), attn_mask=ADDED.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, plain = ours(*x, attn_mask=ADDED), theirs(*x, attn_mask=ADDED)
    assert got[0].dtype == torch.bfloat16
    for one, wanted, other in zip(got, want, plain, strict=True):
        inner = wanted.abs().max().item()
        assert_as_good_as(one.bfloat16(), wanted, other, terms=TERMS, inner=inner)
    got[0].float().sum().backward()
    assert all(p.grad is not None for p in ours.parameters())


def test_checkpointing_repeats_dropout():
    ours = MultiheadAttention.from_stock(stock(batch_first=True, dropout=0.5, dtype=torch.float64)).train()
    x, found = tokens(ours, torch.float64), []
    for through in (
        lambda: ours(*x)[0],
        lambda: torch.utils.checkpoint.checkpoint(lambda: ours(*x)[0], use_reentrant=False),
    ):
        ours.zero_grad()
        torch.manual_seed(3)
        through().square().sum().backward()
        found.append([p.grad.clone() for p in ours.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("form", ["packed", "appended"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_nested_tensors(batch_first, causal, form, layout):
    """A sequence in each row of its own length: as each alone. Stock takes them in evaluation, without a graph."""
    ours = MultiheadAttention.from_stock(stock(batch_first=batch_first, **FORMS[form]))
    rows = [randn(n, E, seed=n) for n in (5, 1, T)]
    x = torch.nested.nested_tensor(rows, layout=layout, requires_grad=True)
    out, weights = ours(x, x, x, is_causal=causal)
    assert out.layout == layout and (x + out).is_nested
    for i, row in enumerate(rows):
        want, wanted = ours(row, row, row, is_causal=causal)
        assert_as_good_as(out.unbind()[i], want.double(), want, terms=TERMS)
        assert_as_good_as(
            weights[i, : len(row), : len(row)], wanted[:, : len(row)].double(), wanted[:, : len(row)], terms=TERMS
        )
    torch.cat(list(out.unbind())).sum().backward()
    assert x.grad is not None and ours.q_proj.weight.grad.isfinite().all()
    memory = torch.nested.nested_tensor([randn(n, E, seed=9 + n) for n in (2, 4, 3)], layout=layout)
    crossed = ours(x, memory, memory)[0]
    want = ours(rows[1], memory.unbind()[1], memory.unbind()[1])[0]
    assert_as_good_as(crossed.unbind()[1], want.double(), want, terms=TERMS)


BAD_CALLS = {
    "a query that is no tensor": (lambda m, x: m([1.0], x, x), "query is list, not a tensor; make it one first."),
    "dimensions": (
        lambda m, x: m(x[None], x[None], x[None]),
        "query is (1, 2, 7, 15); give (batch, tokens, 15), or all (tokens, width) unbatched.",
    ),
    "a batch for the query alone": (
        lambda m, x: m(x, x[0], x[0]),
        "key is (7, 15); give (batch, tokens, 15), or all (tokens, width) unbatched.",
    ),
    "the order of another layout": (
        lambda m, x: MultiheadAttention(E, H)(x[0, 0], x, x),
        "query is (15,); give (tokens, batch, 15), or all (tokens, width) unbatched.",
    ),
    "a width": (lambda m, x: m(x, x[..., 1:], x), "key has tokens of size 14, but the module takes 15; project them."),
    "a dtype": (
        lambda m, x: m(x.double(), x, x),
        "query is torch.float64, but the layer's weights are torch.float32; convert one of them.",
    ),
    "batches": (
        lambda m, x: m(x, x[:1], x[:1]),
        "The batch sizes differ: query 2, key 1, value 1. Expand the smaller ones if that is what you mean.",
    ),
    "numbers of keys": (lambda m, x: m(x, x, x[:, 1:]), "7 keys and 6 values differ; each key needs one value."),
    "an attn_mask of another size": (
        lambda m, x: m(x, x, x, attn_mask=torch.zeros(7, 6)),
        "attn_mask is (7, 6); give (7, 7) or (6, 7, 7).",
    ),
    "an attn_mask of four dimensions": (
        lambda m, x: m(x, x, x, attn_mask=torch.zeros(2, 3, 7, 7)),
        "attn_mask is (2, 3, 7, 7); give (7, 7) or (6, 7, 7).",
    ),
    "an attn_mask by head without a batch": (
        lambda m, x: m(x[0], x[0], x[0], attn_mask=torch.zeros(6, 7, 7)),
        "attn_mask is (6, 7, 7); give (7, 7) or (3, 7, 7).",
    ),
    "a key_padding_mask of another size": (
        lambda m, x: m(x, x, x, key_padding_mask=torch.zeros(7, 2)),
        "key_padding_mask is (7, 2); give (2, 7).",
    ),
    "a key_padding_mask with a batch": (
        lambda m, x: m(x[0], x[0], x[0], key_padding_mask=torch.zeros(1, 7)),
        "key_padding_mask is (1, 7); give (7,).",
    ),
    "an attn_mask of whole numbers": (
        lambda m, x: m(x, x, x, attn_mask=torch.zeros(7, 7).long()),
        "attn_mask is of dtype torch.int64; nn.MultiheadAttention takes booleans or floats.",
    ),
    "an attn_mask that is no tensor": (
        lambda m, x: m(x, x, x, attn_mask=Causal()),
        "attn_mask is Causal, not a tensor; make it one first.",
    ),
    "dropout of all": (
        lambda m, x: MultiheadAttention(E, H, dropout=1.0),
        "A dropout probability of 1.0 is outside [0, 1); it is the share of weights dropped.",
    ),
    "heads": (
        lambda m, x: MultiheadAttention(E, 4),
        "embed_dim 15 cannot be split evenly over 4 heads; MultiHeadAttention takes head_dim= to choose freely.",
    ),
    "no heads": (lambda m, x: MultiheadAttention(E, 0), "num_heads is 0; give a whole number of at least 1."),
    "a width of nothing": (
        lambda m, x: MultiheadAttention(E, H, kdim=0),
        "kdim is 0; give a whole number of at least 1.",
    ),
    "a switch": (lambda m, x: MultiheadAttention(E, H, 0.0, 64), "bias is 64; give True or False."),
    "a dtype of whole numbers": (
        lambda m, x: MultiheadAttention(E, H, dtype=torch.int64),
        "dtype=torch.int64 cannot hold weights; give a floating point dtype such as torch.float32.",
    ),
}


@pytest.mark.plain
@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(name):
    call, said = BAD_CALLS[name]
    with pytest.raises(ShapeError) as caught:
        call(MultiheadAttention(E, H, batch_first=True), randn(B, T, E))
    assert str(caught.value) == said


@pytest.mark.plain
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_bad_calls_with_nested_tensors():
    ours, x = MultiheadAttention(E, H, batch_first=True), randn(B, T, E)
    nested, other = (torch.nested.nested_tensor([x[0], x[1, :n]]) for n in (3, 4))
    with pytest.raises(UnsupportedError, match=r"^Some of query, key and value are nested tensors; give all three so"):
        ours(nested, x, x)
    with pytest.raises(UnsupportedError, match=r"^A nested tensor says by its lengths what is padding"):
        ours(nested, nested, nested, key_padding_mask=torch.zeros(B, T))
    with pytest.raises(UnsupportedError, match=r"^is_causal=True needs query and key to be the same nested tensor"):
        ours(nested, other, other, is_causal=True)


# --- what is built on it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_fast_path_of_transformers_does_not_pass_it_by(frozen, calls, monkeypatch):
    """Where stock's own module is not called at all, the drop-in is, layer by layer, with equal results."""
    layer = nn.TransformerEncoderLayer(12, 4, 24, batch_first=True)
    theirs = nn.TransformerEncoder(layer, 3).eval()
    built = {"put in": put_in(copy.deepcopy(theirs)), "built with": nn.TransformerEncoder(put_in(layer), 3).eval()}
    built["built with"].load_state_dict(theirs.state_dict(), strict=True)
    if frozen:
        for module in (theirs, *built.values()):
            module.requires_grad_(False)
    passed = []
    monkeypatch.setattr(nn.MultiheadAttention, "forward", lambda *args, **kwargs: passed.append(1))
    x = randn(B, T, 12, seed=1)
    pads = torch.arange(T) >= torch.tensor([T, 4])[:, None]
    later = nn.Transformer.generate_square_subsequent_mask(T)
    for given in ({}, {"src_key_padding_mask": pads}, {"mask": later}, {"mask": later, "is_causal": True}):
        with torch.set_grad_enabled(frozen):
            wide = {
                name: m.double() if isinstance(m, torch.Tensor) and m.is_floating_point() else m
                for name, m in given.items()
            }
            plain, want = theirs(x, **given), copy.deepcopy(theirs).double()(x.double(), **wide)
            assert not passed  # so the test can tell
            for name, module in built.items():
                calls.clear()
                got = module(x, **given)
                assert calls["calls"] == 3
                real = ~pads if "src_key_padding_mask" in given and name == "built with" else slice(None)
                assert_as_good_as(got[real], want[real], plain[real], terms=36, what=f"{name} {list(given)}")


def test_hooks_on_the_projections_are_called():
    """A forward hook on stock's out_proj never was."""
    ours, seen = MultiheadAttention.from_stock(stock(batch_first=True)), []
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        getattr(ours, name).register_forward_hook(lambda m, args, out, name=name: seen.append(name))
    x = tokens(ours)
    for mode in (True, False):
        ours.train(mode)
        with torch.set_grad_enabled(mode):
            ours(*x, need_weights=False)
    assert seen == ["q_proj", "k_proj", "v_proj", "out_proj"] * 2
    ours.v_proj.register_forward_hook(lambda m, args, out: torch.zeros_like(out))
    assert torch.equal(ours(*x)[0], ours.out_proj.bias.expand(B, T, E))


def test_an_observer_sees_and_edits_a_call():
    ours, seen = MultiheadAttention.from_stock(stock(batch_first=True)), []

    def observer(x, out, lse):
        seen.append((x, out, lse))
        return torch.zeros_like(out)

    ours.observer = observer
    x = tokens(ours)
    out, weights = ours(*x, key_padding_mask=PADS)
    ((inputs, head_out, lse),) = seen
    assert torch.equal(out, ours.out_proj.bias.expand(B, T, E)) and weights.shape == (B, T, S)
    assert head_out.shape == (B, H, T, E // H) and lse.shape == (B, H, T)
    assert torch.equal(inputs.allowed().expand(B, H, T, S)[:, 0, 0], ~PADS)
    assert copy.deepcopy(MultiheadAttention(E, H)).observer is None


@pytest.mark.plain
@pytest.mark.parametrize(
    ("form", "masks"),
    [
        ("appended to separate", "mixed"),
        pytest.param("packed", "none", marks=pytest.mark.slow),
        pytest.param("packed", "both", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_compiled(form, masks):
    ours = MultiheadAttention.from_stock(stock(batch_first=True, **FORMS[form]))
    compiled = torch.compile(copy.deepcopy(ours), fullgraph=True, backend="aot_eager")
    x, runs = tokens(ours), []
    for module in (compiled, ours):
        results = module(*x, **MASKS[masks], is_causal=True)
        total(results).backward()
        runs.append((results, [p.grad for p in module.parameters()]))
    for got, want in zip(runs[0][0], runs[1][0], strict=True):
        assert_as_good_as(got, want.double(), want, terms=TERMS)
    for got, want in zip(runs[0][1], runs[1][1], strict=True):
        assert_as_good_as(got, want.double(), want, terms=T * TERMS, inner=want.abs().max().item() + 1.0)
    with torch.no_grad():
        got, want = compiled(*x, need_weights=False)[0], ours(*x, need_weights=False)[0]
    assert_as_good_as(got, want.double(), want, terms=TERMS)


@pytest.mark.plain
@pytest.mark.filterwarnings("ignore")
def test_exported_with_sizes_left_open():
    ours = MultiheadAttention.from_stock(stock(batch_first=True)).eval()
    batch, rows = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("rows", min=2, max=128)
    x = randn(B, T, E)
    pads = torch.arange(T) >= torch.tensor([T, 4])[:, None]
    program = torch.export.export(
        ours,
        (x, x, x),
        {"key_padding_mask": pads},
        dynamic_shapes={name: {0: batch, 1: rows} for name in ("query", "key", "value", "key_padding_mask")},
    )
    x = randn(3, 19, E, seed=5)
    pads = torch.arange(19) >= torch.tensor([19, 4, 9])[:, None]
    got, want = program.module()(x, x, x, key_padding_mask=pads), ours(x, x, x, key_padding_mask=pads)
    compare(got, [t.double() for t in want], want, TERMS, "exported")


@pytest.mark.plain
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_transformer():
    theirs = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 4, 24, batch_first=True, dropout=0.0), 2)
    ours = put_in(copy.deepcopy(theirs))
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x = randn(B, T, 12)
    for mode in (True, False):
        compiled.train(mode)
        theirs.train(mode)
        with torch.set_grad_enabled(mode):
            want = copy.deepcopy(theirs).double()(x.double())
            assert_as_good_as(compiled(x), want, theirs(x), terms=36)


@pytest.mark.plain
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="no engine for int8 here")
def test_dynamic_quantisation_applies_to_the_projections():
    ours = MultiheadAttention.from_stock(stock(batch_first=True)).eval()
    quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(ours), {nn.Linear}, dtype=torch.qint8)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        assert type(getattr(quantised, name)) is torch.ao.nn.quantized.dynamic.Linear, name
    x = tokens(ours)
    with torch.no_grad():
        got, want = quantised(*x)[0], copy.deepcopy(ours).double()(*(t.double() for t in x))[0]
        heads = [
            p(t).unflatten(-1, (H, -1)).transpose(1, 2)
            for p, t in zip((quantised.q_proj, quantised.k_proj, quantised.v_proj), x, strict=True)
        ]
        plain = quantised.out_proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
    assert not torch.equal(got, ours(*x)[0])
    assert_as_good_as(got, want, plain, terms=TERMS)
    assert quantised.in_proj_weight.shape == (3 * E, E)
    back = copy.deepcopy(quantised)
    assert torch.equal(back(*x)[0], got)


@pytest.mark.plain
@pytest.mark.filterwarnings("ignore")
def test_lora_trains_every_projection(tmp_path):
    peft = pytest.importorskip("peft", reason="LoRA is peft's")
    targets = ["q_proj", "k_proj", "v_proj", "out_proj"]
    base = put_in(nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 4, 24, batch_first=True, dropout=0.0), 2))
    x = randn(B, T, 12)
    before = base(x).detach()
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=targets))
    assert torch.equal(model(x), before)
    lora = {name: p for name, p in model.named_parameters() if "lora_" in name}
    assert len(lora) == 2 * 4 * 2 and all(p.requires_grad == (name in lora) for name, p in model.named_parameters())
    optimizer = torch.optim.SGD(lora.values(), lr=0.5)
    for step in range(2):
        optimizer.zero_grad()
        model(x).square().mul(randn(B, T, 12, seed=7)).sum().backward()
        for name, parameter in lora.items():  # the first step moves B away from zero, the second A as well
            moved = parameter.grad.abs().max() > 0
            assert moved == (step == 1 or "lora_B" in name), name
        optimizer.step()
    after = model.eval()(x)
    assert not torch.equal(after, before)
    model.save_pretrained(tmp_path)
    again = put_in(nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 4, 24, batch_first=True, dropout=0.0), 2))
    again.load_state_dict(model.get_base_model().state_dict(), strict=False)
    merged = model.merge_and_unload()
    compare([merged(x)], [after.double()], [after], 36, "merged")
    # and what is merged is stock again
    assert merged.layers[0].self_attn.to_stock().in_proj_weight.shape == (36, 12)
    assert list(merged.state_dict()) == list(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 4, 24), 2).state_dict()
    )


def test_it_is_the_layer_with_stocks_interface():
    theirs = stock(batch_first=True)
    layer, ours = from_torch(theirs), MultiheadAttention.from_stock(theirs)
    assert isinstance(layer, MultiHeadAttention)
    x = tokens(theirs)
    assert torch.equal(layer(*x), ours(*x)[0])
    assert torch.equal(layer(*x, mask=Dense(~HIDES)), ours(*x, attn_mask=HIDES)[0])


def test_it_says_what_it_is():
    said = repr(MultiheadAttention(E, H, dropout=0.5, kdim=3, add_bias_kv=True, add_zero_attn=True, batch_first=True))
    first = "15, 3, dropout=0.5, add_zero_attn=True, kdim=3, batch_first=True, add_bias_kv=True"
    assert said.splitlines()[1].strip() == first
