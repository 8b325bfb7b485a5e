"""PRC: half precision and autocast."""

import oracle
import pytest
import torch
from helpers import assert_as_good_as, plain_attention, randn
from reports import check_layer, each_backend, every_backend, every_mode, formula, layer, running
from torch import nn

from headwise import Bias, Causal, Document, Padding, RotaryEmbedding, attention
from headwise.convert.torch import from_torch_masks

# with the other reports, in the call without the annotation hook
pytestmark = pytest.mark.plain

HALF = (torch.bfloat16, torch.float16)


@every_backend
@every_mode
@pytest.mark.parametrize("masked", ["bias", "trained bias", "padding", "both"])
def test_prc_1_float32_masks_under_autocast(masked, mode, backend):
    """A float32 mask met bfloat16 queries: a dtype error, on one device and not on the other."""
    made, x = layer(16, 2, backend=backend), randn(2, 4, 16, seed=50)
    zeros = torch.zeros(4, 4)
    bias = Bias(nn.Parameter(zeros) if masked == "trained bias" else zeros)
    real = torch.tensor([[True] * 4, [True, True, True, False]])
    mods = () if masked == "padding" else (bias,)
    mask = Padding(real if "padding" in masked or masked == "both" else torch.ones(2, 4, dtype=torch.bool))
    with running(mode, made), torch.autocast("cpu", dtype=torch.bfloat16):
        out = made(x, mask=mask, score_mods=mods)
        seen = []
        made.observer = lambda x, out, lse: seen.append((x.query.dtype, out.dtype))
        # an observer asks for the log-sum-exp, which sdpa has not together with the gradient of a bias
        if not (masked == "trained bias" and backend == "sdpa" and mode in ("train", "eval")):
            assert torch.equal(made(x, mask=mask, score_mods=mods), out)
            assert seen == [(torch.bfloat16, torch.bfloat16)]
    assert out.dtype == torch.bfloat16
    # the same by hand: projections in bfloat16, attention from there
    want = layer(16, 2, backend=backend).bfloat16()
    with torch.no_grad():
        right = formula(want.double(), oracle.attend, x.double(), allowed=mask.lengths[:, None, None])[0]
        plain = formula(want.bfloat16(), as_bfloat16, x.bfloat16(), allowed=mask.lengths[:, None, None])[0]
    assert_as_good_as(out, right, plain.float(), terms=16)


def as_bfloat16(query, key, value, allowed):
    """The plain formula in float32 on bfloat16 tensors, rounded once."""
    return [t.bfloat16() for t in plain_attention(query.float(), key.float(), value.float(), allowed)]


@every_backend
@pytest.mark.parametrize("size", [110, 250, 400])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@every_mode
def test_prc_2_scores_beyond_float16(mode, dtype, size, backend):
    """The dot product overflowed before it was scaled: inf, then NaN; with weights asked for and not, differently."""
    query, key = (randn(1, 2, 6, 64, seed=i, dtype=dtype, scale=size).requires_grad_() for i in range(2))
    value = randn(1, 2, 6, 8, seed=2, dtype=dtype).requires_grad_()
    with torch.no_grad():
        scores = query.float() @ key.float().mT
        assert scores.abs().max() > torch.finfo(torch.float16).max
        want = oracle.attend(query, key, value)[0]
        plain = plain_attention(query.float(), key.float(), value.float())[0]
    with running(mode):
        out = attention(query, key, value, backend=backend)
    assert_as_good_as(out, want, plain, terms=70)
    if mode in ("train", "eval"):
        out.sum().backward()
        assert value.grad.isfinite().all()


@every_backend
@every_mode
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_prc_3_no_constant_that_does_not_fit(dtype, mode, backend):
    """-1e9 stood for hidden, and float16 ends at 65504."""
    made, x = layer(16, 2, backend=backend).to(dtype), randn(2, 5, 16, seed=50, dtype=dtype)
    padded = torch.tensor([[False] * 5, [False, False, False, True, True]])
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for mask in (from_torch_masks(future, padded)[0], Causal() & Padding(~padded)):
        with running(mode, made):
            out = made(x, mask=mask)
        assert out.dtype == dtype
        if dtype in HALF:
            assert out.isfinite().all()
            near = [t.detach() for t in projected(made, x)]
            got = attention(*near, mask=mask, backend=backend)
            want = oracle.attend(*near, ~future & ~padded[:, None, None])[0]
            plain = plain_attention(*(t.float() for t in near), ~future & ~padded[:, None, None])[0]
            assert_as_good_as(got, want, plain, terms=13)
        else:
            check_layer(made, out, x, allowed=~future & ~padded[:, None, None])


def projected(made, x):
    """Heads as the layer makes them."""
    return [
        projection(x).unflatten(-1, (made.num_heads, -1)).transpose(1, 2)
        for projection in (made.q_proj, made.k_proj, made.v_proj)
    ]


class InFloat32(nn.Module):
    """A norm that gives float32 back whatever it gets, as some do under autocast."""

    def __init__(self, size):
        super().__init__()

    def forward(self, x):
        return nn.functional.rms_norm(x.float(), x.shape[-1:])


@every_backend
@every_mode
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm, InFloat32])
@pytest.mark.parametrize("rotary", [False, True], ids=["no rotary", "rotary"])
def test_prc_4_norms_that_widen_under_autocast(rotary, norm, mode, backend):
    """The norms gave float32 queries and keys beside bfloat16 values, and the fused call refused them."""
    made = layer(16, 2, backend=backend)
    made.q_norm, made.k_norm = norm(8), norm(8)
    made.rotary = RotaryEmbedding(8) if rotary else None
    x = randn(2, 5, 16, seed=50)
    with running(mode, made), torch.autocast("cpu", dtype=torch.bfloat16):
        out = made(x, mask=Causal())
        again = made(x.bfloat16(), mask=Causal())
    assert out.dtype == again.dtype == torch.bfloat16 and out.isfinite().all()
    assert torch.equal(out, again)
    if mode in ("train", "eval"):
        out.sum().backward()
        assert made.q_proj.weight.grad.isfinite().all() and made.q_proj.weight.grad.dtype == torch.float32


@each_backend
@pytest.mark.parametrize(
    ("dtype", "lengths"),
    [
        (torch.bfloat16, [13, 13, 34]),
        (torch.float16, [13, 13, 34]),
        (torch.float32, [100, 100, 100, 20, 150, 130, 100]),
    ],
    ids=str,
)
def test_prc_5_blocks_together_are_the_blocks_alone(dtype, lengths, backend):
    """A block-diagonal mask differed from the blocks run apart."""
    count = sum(lengths)
    query, key, value = (randn(1, 2, count, 16, seed=i, dtype=dtype) for i in range(3))
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    boolean = numbers[:, None] == numbers
    for mask in (Document.from_lengths(lengths), Document(numbers), boolean):
        together = attention(query, key, value, mask=mask, backend=backend)
        start = 0
        for length in lengths:
            block = [t[:, :, start : start + length] for t in (query, key, value)]
            plain = plain_attention(*(t.float() for t in block))[0]
            want = plain_attention(*(t.double() for t in block))[0]
            assert_as_good_as(together[:, :, start : start + length], want, plain, terms=length + 16)
            start += length
