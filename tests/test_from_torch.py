"""nn.MultiheadAttention, one way: weights, masks, gradients."""

import copy
import itertools

import pytest
import torch
from helpers import assert_as_good_as, randn
from torch import nn

from headwise import Bias, ConversionError, Full, Padding, ShapeError
from headwise.convert.torch import from_torch, from_torch_masks

B, H, T, S, E = 2, 3, 7, 11, 15
KDIM, VDIM = 13, 17
WIDTHS = {"packed": {}, "separate": {"kdim": KDIM, "vdim": VDIM}, "key width": {"kdim": KDIM}}
TERMS = E + S


def made(dtype=torch.float64, **options):
    module = nn.MultiheadAttention(E, H, batch_first=True, dtype=dtype, **options)
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):  # their biases start at zero
            parameter.copy_(randn(*parameter.shape, seed=i, scale=parameter.shape[-1] ** -0.5))
    return module.eval()


def inputs(module, dtype=torch.float64, batched=True):
    lead = (B,) if batched else ()
    return (
        randn(*lead, T, E, seed=1, dtype=dtype),
        randn(*lead, S, module.kdim, seed=2, dtype=dtype),
        randn(*lead, S, module.vdim, seed=3, dtype=dtype),
    )


def in_float64(module):
    return copy.deepcopy(module).double()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("widths", WIDTHS)
def test_same_outputs_and_gradients(widths, bias, batched, dtype):
    module = made(dtype, bias=bias, **WIDTHS[widths])
    layer, exact = from_torch(module), in_float64(module)
    x = inputs(module, dtype, batched)
    got, plain = layer(*x), module(*x)[0]
    want = exact(*(t.double() for t in x))[0]
    assert_as_good_as(got, want, plain, terms=TERMS)

    for out in (got, plain, want):
        (out**2).sum().backward()
    ours = _by_name(layer)
    theirs, wanted = _their_gradients(module), _their_gradients(exact)
    assert ours.keys() == wanted.keys()
    largest = max(g.abs().max().item() for g in wanted.values())
    for name, grad in ours.items():
        assert_as_good_as(grad, wanted[name], theirs[name], terms=B * T * TERMS, inner=largest, what=name)


def _by_name(layer):
    return {name: parameter.grad for name, parameter in layer.named_parameters()}


def _their_gradients(module):
    parts = {"out_proj.weight": module.out_proj.weight.grad}
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.grad.chunk(3)
    else:
        weights = [w.grad for w in (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)]
    for name, weight in zip("qkv", weights, strict=True):
        parts[f"{name}_proj.weight"] = weight
    if module.in_proj_bias is not None:
        parts["out_proj.bias"] = module.out_proj.bias.grad
        for name, bias in zip("qkv", module.in_proj_bias.grad.chunk(3), strict=True):
            parts[f"{name}_proj.bias"] = bias
    return parts


def _attn_mask(kind, rank, batch=B):
    """Their masks; every query is left a key, since they answer NaN otherwise."""
    shape = (T, S) if rank == 2 else (batch * H, T, S)
    if kind == "float":
        return randn(*shape, seed=5)
    hides = randn(*shape, seed=6) > 0.6
    hides[..., 1] = False
    return hides if kind == "bool" else randn(*shape, seed=5).masked_fill(hides, -torch.inf)


def _padding_mask(kind, batched=True):
    hides = torch.zeros(B, S, dtype=torch.bool)
    hides[0, 8:] = True
    hides[1, 0] = True
    mask = hides if kind == "bool" else randn(B, S, seed=7).masked_fill(hides, -torch.inf)
    return mask if batched else mask[0]


ATTN = [None, *itertools.product(("bool", "float", "float with -inf"), (2, 3))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
@pytest.mark.parametrize("padding", [None, "bool", "float"])
@pytest.mark.parametrize("attn", ATTN, ids=str)
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask:UserWarning")
def test_masks(attn, padding, batched, dtype):
    module = made(dtype)
    attn_mask = None if attn is None else _attn_mask(*attn, batch=B if batched else 1)
    padding_mask = None if padding is None else _padding_mask(padding, batched)
    attn_mask, padding_mask = (
        m if m is None or m.dtype == torch.bool else m.to(dtype) for m in (attn_mask, padding_mask)
    )
    mask, score_mods = from_torch_masks(attn_mask, padding_mask, num_heads=H)
    x = inputs(module, dtype, batched)

    def run(module, kind):
        masks = [m if m is None or m.dtype == torch.bool else m.to(kind) for m in (attn_mask, padding_mask)]
        return module(*(t.to(kind) for t in x), attn_mask=masks[0], key_padding_mask=masks[1])[0]

    want, plain = run(in_float64(module), torch.float64), run(module, dtype)
    assert want.isfinite().all()
    assert_as_good_as(from_torch(module)(*x, mask=mask, score_mods=score_mods), want, plain, terms=TERMS)


def test_no_masks_are_no_mask():
    assert from_torch_masks() == (Full(), ())


def test_each_mask_counts():
    """Leaving out either of two masks gives other numbers, so the comparison above would see a dropped one."""
    module = made()
    layer, x = from_torch(module), inputs(module)
    both = from_torch_masks(_attn_mask("bool", 3), _padding_mask("bool"), num_heads=H)[0]
    for mask in (both.a, both.b, Full()):
        assert not torch.equal(layer(*x, mask=mask), layer(*x, mask=both))


def test_a_float_mask_passes_its_gradient():
    module = made()
    attn_mask = _attn_mask("float", 3).double().requires_grad_()
    mask, score_mods = from_torch_masks(attn_mask, num_heads=H)
    assert [type(mod) for mod in score_mods] == [Bias]
    x = inputs(module)
    (grad,) = torch.autograd.grad(from_torch(module)(*x, mask=mask, score_mods=score_mods).square().sum(), attn_mask)
    (want,) = torch.autograd.grad(module(*x, attn_mask=attn_mask)[0].square().sum(), attn_mask)
    assert_as_good_as(grad, want, terms=TERMS * E, inner=want.abs().max().item())


def test_a_query_that_sees_nothing_gives_the_output_bias_instead_of_nan():
    module = made()
    hides = torch.zeros(T, S, dtype=torch.bool)
    hides[2] = True
    x = inputs(module)
    assert module(*x, attn_mask=hides)[0][:, 2].isnan().all()
    got = from_torch(module)(*x, mask=from_torch_masks(hides)[0])
    assert torch.equal(got[:, 2], module.out_proj.bias.detach().expand(B, -1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_zero_attention_is_a_sink_at_zero(dtype):
    module = made(dtype, add_zero_attn=True)
    layer, x = from_torch(module), inputs(module, dtype)
    want, plain = in_float64(module)(*(t.double() for t in x))[0], module(*x)[0]
    assert_as_good_as(layer(*x), want, plain, terms=TERMS)
    assert not layer.sinks.requires_grad and layer.sinks.dtype == dtype and not layer.sinks.any()
    without = from_torch(made(dtype))
    without.load_state_dict({k: v for k, v in layer.state_dict().items() if k != "sinks"})
    assert not torch.equal(without(*x), layer(*x))


def test_settings_are_kept():
    module = made(torch.bfloat16, dropout=0.25).train()
    module.in_proj_weight.requires_grad_(False)
    before = torch.get_rng_state()
    layer = from_torch(module)
    assert torch.equal(before, torch.get_rng_state())
    assert layer.training and not from_torch(module.eval()).training
    assert layer.dropout_p == 0.25
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    frozen = {name for name, p in layer.named_parameters() if not p.requires_grad}
    assert frozen == {"q_proj.weight", "k_proj.weight", "v_proj.weight"}
    assert {p.device.type for p in from_torch(module.to("meta")).parameters()} == {"meta"}


def test_dropout_drops_in_training():
    module = made(dropout=0.5).train()
    layer, x = from_torch(module), inputs(module)
    assert not torch.equal(layer(*x), layer(*x))
    assert torch.equal(layer.eval()(*x), from_torch(module.eval())(*x))


def test_batch_first_does_not_matter():
    module = made()
    x = inputs(module)
    want = from_torch(module)(*x)
    module.batch_first = False
    assert torch.equal(from_torch(module)(*x), want)
    assert_as_good_as(want, module(*(t.transpose(0, 1) for t in x))[0].transpose(0, 1), terms=TERMS)


def test_weights_are_copies():
    module = made()
    kept = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    layer = from_torch(module)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert all(torch.equal(kept[name], tensor) for name, tensor in module.state_dict().items())


class Sharper(nn.MultiheadAttention):
    def forward(self, query, key, value, **options):
        return super().forward(2 * query, key, value, **options)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nn.Linear(3, 3), "Linear is not nn.MultiheadAttention"),
        (Sharper(6, 2), "Sharper .* a forward of its own"),
        (nn.MultiheadAttention(6, 2, add_bias_kv=True), "add_bias_kv=True.*append them"),
    ],
    ids=["linear", "subclass", "bias_kv"],
)
def test_modules_that_are_refused(module, text):
    with pytest.raises(ConversionError, match=text):
        from_torch(module)


BOOL = torch.zeros(6, T, S, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: from_torch_masks(BOOL.int()), "attn_mask is of dtype torch.int32"),
        (lambda: from_torch_masks(None, BOOL[0].long()), "key_padding_mask is of dtype torch.int64"),
        (lambda: from_torch_masks(BOOL[None]), "attn_mask has 4 dimensions; .* takes 2 or 3"),
        (lambda: from_torch_masks(None, BOOL), "key_padding_mask has 3 dimensions; .* takes 1 or 2"),
        (lambda: from_torch_masks(BOOL), r"\(6, 7, 11\) mixes batch and heads"),
        (lambda: from_torch_masks(BOOL, num_heads=4), "6 masks cannot be shared evenly by 4 heads"),
        (lambda: from_torch_masks(BOOL, num_heads=0), "6 masks cannot be shared evenly by 0 heads"),
    ],
)
def test_masks_that_are_refused(call, text):
    with pytest.raises(ShapeError, match=text):
        call()


def test_a_padding_mask_hides_keys_only():
    mask = from_torch_masks(None, _padding_mask("bool"))[0]
    assert isinstance(mask, Padding) and torch.equal(mask.lengths, ~_padding_mask("bool"))
