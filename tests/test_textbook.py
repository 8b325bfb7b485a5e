"""Hand-written modules, told by the names of their projections, against their formulas."""

import math
import re

import pytest
import torch
from helpers import assert_as_good_as, randn
from torch import nn

from headwise import Causal, ConversionError, Dense, ShapeError
from headwise.convert import textbook

B, H, T, S, D, WIDE = 2, 3, 7, 11, 5, 15

LIN = ("q_lin", "k_lin", "v_lin", "out_lin")
PROJ = ("query_proj", "key_proj", "value_proj", "output_proj")
WEIGHT = ("query_weight", "key_weight", "value_weight")
OUTPUTS = ("out_proj", "output_proj", "out_weight", "output_weight")


def written(names, width=WIDE, wide=WIDE, out=WIDE, biases=(True,) * 4, dtype=torch.float64):
    """Linear layers under the names of a hand-written module, with weights that do not depend on luck."""
    module = nn.Module()
    for i, (name, bias) in enumerate(zip(names, biases, strict=False)):
        rows, columns = (wide, width) if i < 3 else (out, wide)
        linear = nn.Linear(columns, rows, bias=bias, dtype=dtype)
        with torch.no_grad():
            linear.weight.copy_(randn(rows, columns, seed=i, scale=columns**-0.5))
            if bias:
                linear.bias.copy_(randn(rows, seed=10 + i))
        module.add_module(name, linear)
    return module


def formula(module, names, heads, query, key, value, hide=None):
    """What all three compute; ``hide`` acts on scores of shape (batch * heads, queries, keys)."""

    def split(name, x):
        return getattr(module, name)(x).unflatten(-1, (heads, -1)).transpose(1, 2).flatten(0, 1)

    q, k, v = (split(name, x) for name, x in zip(names, (query, key, value), strict=False))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    weights = torch.softmax(scores if hide is None else hide(scores), -1)
    merged = (weights @ v).unflatten(0, (-1, heads)).transpose(1, 2).flatten(2)
    return getattr(module, names[3])(merged) if len(names) > 3 else merged


def tokens(width=WIDE, count=T, seed=1, dtype=torch.float64):
    return randn(B, count, width, seed=seed, dtype=dtype)


@pytest.mark.parametrize("names", [LIN, PROJ, WEIGHT, *((*WEIGHT, out) for out in OUTPUTS)], ids=" ".join)
@pytest.mark.parametrize("biases", [(True,) * 4, (False,) * 4, (True, False, False, True)], ids=str)
def test_same_outputs(names, biases):
    module = written(names, biases=biases)
    layer = textbook.load(module.state_dict(), H)
    x = tokens()
    assert_as_good_as(layer(x), formula(module, names, H, x, x, x), terms=WIDE + T)
    assert isinstance(layer.out_proj, nn.Identity) == (len(names) == 3)
    given = [layer.q_proj.bias, layer.k_proj.bias, layer.v_proj.bias, getattr(layer.out_proj, "bias", None)]
    assert [bias is not None for bias in given[: len(names)]] == list(biases[: len(names)])


@pytest.mark.parametrize("names", [LIN, WEIGHT, (*WEIGHT, "out_proj")], ids=" ".join)
def test_same_gradients(names):
    module = written(names)
    layer = textbook.load(module.state_dict(), H)
    x = tokens()
    (layer(x) ** 2).sum().backward()
    (formula(module, names, H, x, x, x) ** 2).sum().backward()
    ours = (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
    for linear, name in zip(ours, names, strict=False):
        for kind in ("weight", "bias"):
            want = getattr(getattr(module, name), kind).grad
            # the gradient of a key bias is zero by algebra, so its largest term says how large its rounding may be
            inner = max(p.grad.abs().max().item() for p in module.parameters())
            got = getattr(linear, kind).grad
            assert_as_good_as(got, want, terms=B * T * WIDE, inner=inner, what=f"{name}.{kind}")


def test_float32_is_as_good_as_the_formula():
    wide, single = written(LIN), written(LIN, dtype=torch.float32)
    layer = textbook.load(single.state_dict(), H)
    x = tokens(dtype=torch.float32)
    assert layer.q_proj.weight.dtype == torch.float32
    # the float64 weights are not those of float32; the value to compare with has the rounded ones
    wide.load_state_dict({name: tensor.double() for name, tensor in single.state_dict().items()})
    want = formula(wide, LIN, H, *[x.double()] * 3)
    assert_as_good_as(layer(x), want, formula(single, LIN, H, x, x, x), terms=WIDE + T)


@pytest.mark.parametrize("output", [None, "out_proj"])
@pytest.mark.parametrize("causal", [False, True])
def test_wider_heads_than_tokens_and_a_context_length(output, causal):
    names = WEIGHT if output is None else (*WEIGHT, output)
    module = written(names, width=13, wide=WIDE, out=17, biases=(False, False, False, True))
    layer = textbook.load(module.state_dict(), H, causal=causal, context_length=T, dropout_p=0.25).eval()
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    hide = (lambda scores: scores.masked_fill(later, -torch.inf)) if causal else None
    x = tokens(13)
    assert layer(x).shape == (B, T, WIDE if output is None else 17)
    assert_as_good_as(layer(x), formula(module, names, H, x, x, x, hide), terms=WIDE + T)
    assert layer.dropout_p == 0.25 and layer.max_length == T
    assert (layer.mask == Causal()) == causal
    with pytest.raises(ShapeError, match=f"max_length {T}"):
        layer(tokens(13, T + 1))


# Every shape that the second module's masked_fill accepts for scores of (batch * heads, queries, keys)
MASK_SHAPES = [
    (T, S), (1, T, S), (B * H, T, S), (S,), (1, S), (T, 1), (1, 1, S), (1, T, 1), (B * H, 1, S), (B * H, T, 1),
    (B * H, 1, 1), (1,), (1, 1), (),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_masks_in_which_zero_hides(shape, dtype):
    module = written(PROJ)
    layer = textbook.load(module.state_dict(), H)
    shown = torch.Generator().manual_seed(sum(shape))
    mask = torch.randint(0, 2, shape, generator=shown).to(dtype)
    if dtype == torch.float32:
        mask = mask * -0.5  # anything but 0 shows
    query, key, value = tokens(count=T), tokens(count=S, seed=2), tokens(count=S, seed=3)
    want = formula(module, PROJ, H, query, key, value, lambda s: s.masked_fill(mask == 0, -1e9))
    got = layer(query, key, value, mask=Dense.from_zeros(mask, H))
    # rows of which a head sees nothing: zeros here, the mean of the values there
    seen = (mask != 0).expand(B * H, T, S).any(-1).unflatten(0, (B, H)).all(1)
    assert_as_good_as(got[seen], want[seen], terms=WIDE + S, what=f"{shape} {dtype}")
    if len(shape) == 3 and shape[0] == B * H and min(shape) > 1:
        assert seen.any() and len({tuple(m.flatten().tolist()) for m in mask}) > 1


def test_a_mask_that_is_not_sample_major_would_be_seen():
    """The masks of (batch * heads, queries, keys) are told apart: reading them head by head gives other numbers."""
    mask = torch.rand(B * H, T, S).gt(0.3)
    mask[..., 0] = True
    by_head = mask.unflatten(0, (H, B)).transpose(0, 1).flatten(0, 1)
    layer = textbook.load(written(PROJ).state_dict(), H)
    query, key = tokens(count=T), tokens(count=S, seed=2)
    right = layer(query, key, mask=Dense.from_zeros(mask, H))
    assert not torch.equal(right, layer(query, key, mask=Dense.from_zeros(by_head, H)))


def test_rows_that_see_nothing_give_the_output_bias():
    module = written(PROJ)
    layer = textbook.load(module.state_dict(), H)
    x = tokens()
    mask = torch.ones(T, T)
    mask[4] = 0
    got = layer(x, mask=Dense.from_zeros(mask, H))
    assert torch.equal(got[:, 4], module.output_proj.bias.detach().expand(B, -1))


def test_a_module_inside_a_larger_model():
    model = nn.ModuleDict({"embed": nn.Embedding(17, WIDE), "blocks": nn.ModuleList([nn.Module(), nn.Module()])})
    for i, block in enumerate(model["blocks"]):
        block.add_module("attn", written(LIN if i else WEIGHT))
    state = model.state_dict()
    x = tokens()
    for prefix in ("blocks.1.attn", "blocks.1.attn."):
        layer = textbook.load(state, H, prefix=prefix)
        assert torch.equal(layer.out_proj.weight, state["blocks.1.attn.out_lin.weight"])
    assert textbook.load(state, H, prefix="blocks.0.attn")(x).shape == (B, T, WIDE)
    with pytest.raises(ConversionError, match=re.escape("prefix='blocks.0.attn'")):
        textbook.load(state, H)


def test_weights_are_copies_and_nothing_is_drawn():
    state = written(LIN, dtype=torch.bfloat16).state_dict()
    before = torch.get_rng_state()
    layer = textbook.load(state, H)
    assert torch.equal(before, torch.get_rng_state())
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert all(p.requires_grad and p.is_leaf for p in layer.parameters())
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert all(tensor.abs().sum() > 0 for tensor in state.values())
    layer.load_state_dict(textbook.load(state, H).state_dict())
    assert torch.equal(layer.k_proj.weight, state["k_lin.weight"])


def test_weights_stay_on_their_device():
    state = {name: tensor.to("meta") for name, tensor in written(LIN).state_dict().items()}
    assert {p.device.type for p in textbook.load(state, H).parameters()} == {"meta"}


def _changed(names=LIN, remove=(), **entries):
    state = dict(written(names).state_dict())
    for name in remove:
        del state[name.replace("__", ".")]
    return state | {name.replace("__", "."): value for name, value in entries.items()}


WRONG = {
    "nothing": ({}, ConversionError, "found nothing, expected q_lin"),
    "other names": ({"wq.weight": torch.zeros(5, 5)}, ConversionError, r"found wq.weight \(5, 5\)"),
    "two at once": (_changed() | _changed(PROJ), ConversionError, "more than one hand-written module"),
    "no output": (_changed(remove=["out_lin__weight", "out_lin__bias"]), ConversionError, "out_lin.weight is missing"),
    "no second output": (
        _changed(PROJ, remove=["output_proj__weight"]), ConversionError, "output_proj.weight is missing",
    ),
    "no key": (_changed(WEIGHT, remove=["key_weight__weight"]), ConversionError, "key_weight.weight is missing"),
    "bias only": ({"q_lin.bias": torch.zeros(15)}, ConversionError, "q_lin.weight, k_lin.weight"),
    "two outputs": (
        _changed(WEIGHT, out_proj__weight=torch.zeros(15, 15), output_weight__weight=torch.zeros(15, 15)),
        ConversionError,
        "2 output projections .*, out_proj and output_weight",
    ),
    "mask buffer": (_changed(WEIGHT, mask=torch.ones(8, 8)), ConversionError, r"mask \(8, 8\).*causal=True"),
    "norm beside it": (_changed(norm__weight=torch.ones(15)), ConversionError, r"norm.weight \(15,\)"),
    "bare parameter": (_changed(WEIGHT, query_weight=torch.ones(5, 5)), ConversionError, r"query_weight \(5, 5\)"),
    "quantised": (
        _changed(k_lin__weight=torch.ones(15, 15, dtype=torch.int8)), ConversionError, "k_lin.weight is torch.int8",
    ),
    "not a tensor": (_changed(k_lin__weight=3), ConversionError, "k_lin.weight is int"),
    "dtypes": (_changed(k_lin__bias=torch.ones(15)), ConversionError, "torch.float32, torch.float64"),
    "devices": (
        _changed(k_lin__bias=torch.ones(15, dtype=torch.float64, device="meta")), ConversionError, "cpu, meta",
    ),
    "key width": (
        _changed(k_lin__weight=torch.ones(15, 14).double()),
        ShapeError,
        r"k_lin.weight has shape \(15, 14\).*\(15, 15\)",
    ),
    "value rows": (
        _changed(v_lin__weight=torch.ones(12, 15).double()), ShapeError, r"v_lin.weight has shape \(12, 15\)",
    ),
    "bias length": (
        _changed(q_lin__bias=torch.ones(14).double()), ShapeError, r"q_lin.bias has shape \(14,\).*\(15,\)",
    ),
    "output width": (
        _changed(out_lin__weight=torch.ones(15, 12).double()), ShapeError, r"out_lin.weight has shape \(15, 12\)",
    ),
    "output bias": (
        _changed(out_lin__bias=torch.ones(12).double()), ShapeError, r"out_lin.bias has shape \(12,\).*\(15,\)",
    ),
    "flat weight": (_changed(q_lin__weight=torch.ones(225).double()), ShapeError, r"q_lin.weight has shape \(225,\)"),
    "flat output": (_changed(out_lin__weight=torch.ones(()).double()), ShapeError, r"out_lin.weight has shape \(\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(case):
    state, error, text = WRONG[case]
    with pytest.raises(error, match=text):
        textbook.load(state, H)


@pytest.mark.parametrize(
    ("heads", "text"),
    [
        (4, "15 features cannot be split evenly over 4 heads"),
        (0, "num_heads is 0"),
        (True, "num_heads is True"),
    ],
)
def test_heads_that_do_not_divide(heads, text):
    with pytest.raises(ShapeError, match=text):
        textbook.load(written(LIN).state_dict(), heads)
