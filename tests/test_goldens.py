"""Numbers that other libraries' own tests hold their attention to, reproduced by the layer and its parts.

torchtune's layer is of the size of a 7B model. Its weights are ramps, matrices of rank two, so that a product with one
can be computed in a thousandth of the time: the fast test does so, in projections of its own; the slow one multiplies.
"""

import pytest
import torch
from helpers import assert_as_good_as, assert_published
from torch import nn

import headwise
from headwise import Causal, Llama3Schedule, MultiHeadAttention, RotaryEmbedding

TORCHTUNE = "torchtune, tests/torchtune/modules/test_attention.py, with its relative tolerance of 1e-3"
# by the number of key heads: the mean of the output of 32 query heads
MEANS = {8: -2545.42236328125, 32: -2597.248046875, 1: -2108.07666015625}
KERAS = "keras, keras/src/layers/attention/multi_head_attention_test.py, which allows 1e-2 in float16"


class Ramp(nn.Module):
    """The product with the matrix that counts 0, 1/n, 2/n … row by row through its n entries."""

    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.rows, self.columns = torch.arange(out_dim) / out_dim, torch.arange(in_dim) / (in_dim * out_dim)

    def forward(self, x):
        wide = x.double()  # neither sum cancels much, and the difference to float32 is none of the test's
        return (wide.sum(-1, keepdim=True) * self.rows + (wide @ self.columns.double())[..., None]).to(x.dtype)


def test_a_ramp_is_the_matrix_of_torchtune():
    torch.manual_seed(0)
    x, weight = torch.randn(3, 11), torch.arange(0, 1, 1 / 77, dtype=torch.float64).reshape(7, 11)
    assert_as_good_as(Ramp(11, 7)(x), x.double() @ weight.T, x @ weight.float().T, terms=11, what="a ramp")


@pytest.mark.parametrize("kv_heads", MEANS)
def test_torchtune_by_ramps(kv_heads):
    layer = MultiHeadAttention(
        4096, 32, num_kv_heads=kv_heads, bias=False, rotary=rotary(), mask=Causal(), device="meta"
    )
    layer.q_proj, layer.out_proj = Ramp(4096, 4096), Ramp(4096, 4096)
    layer.k_proj, layer.v_proj = Ramp(4096, 128 * kv_heads), Ramp(4096, 128 * kv_heads)
    check(layer, kv_heads)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", MEANS)
def test_torchtune(kv_heads):
    layer = MultiHeadAttention(4096, 32, num_kv_heads=kv_heads, bias=False, rotary=rotary(), mask=Causal())
    for weight in layer.parameters():
        weight.data = torch.arange(0, 1, 1 / weight.numel()).reshape(weight.shape)
    check(layer, kv_heads)


def rotary():
    return RotaryEmbedding(128, base=10_000.0, interleaved=True)


def check(layer, kv_heads):
    torch.manual_seed(16)
    x_BTE = torch.randn(4, 2048, 4096)
    with torch.no_grad():
        mean = layer(x_BTE).mean()
    assert_published(mean, MEANS[kv_heads], rtol=1e-3, atol=0, source=TORCHTUNE)


def test_the_sum_of_torchtunes_llama3_rotary():
    """Of 33 million numbers that nearly cancel, so of their roundings: as near to float64 as what torchtune prints."""
    torch.manual_seed(0)
    x_BTHD, schedule = torch.randn(4, 2048, 32, 128), Llama3Schedule(8.0, 8192, 1.0, 4.0)
    layer = RotaryEmbedding(128, interleaved=True, schedule=schedule)
    got = layer(x_BTHD.transpose(1, 2), torch.arange(2048)[None]).sum()
    plain = 10_000.0 ** -(torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    angles = torch.arange(2048, dtype=torch.float64)[:, None] * schedule.frequencies(plain, 10_000.0)
    first, second = x_BTHD.double().sum((0, 2)).unflatten(-1, (64, 2)).unbind(-1)
    exact = ((first + second) * angles.cos() + (first - second) * angles.sin()).sum()
    assert_as_good_as(got, exact, torch.tensor(-83.1523), terms=1, what="sum")


def test_keras():
    """Eight heads of width eight, identities for weights; theirs as an output kernel sums the width of each head."""
    eye, value_BSE = torch.eye(8)[None], torch.arange(64.0).view(1, 8, 8) / 100
    layer = MultiHeadAttention(8, 8, head_dim=8, bias=False)
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
            projection.weight.copy_(torch.eye(8).repeat(8, 1))
        layer.out_proj.weight.copy_(torch.eye(8).repeat_interleave(8, 1))
    want = torch.tensor([2.406, 2.440, 2.473, 2.504, 2.535, 2.568, 2.602, 2.633])[None, :, None].expand(1, 8, 8)
    assert_published(layer(eye, eye, value_BSE), want, rtol=0, atol=5e-3, source=KERAS)
    heads_BHTD = eye.expand(1, 8, 8, 8)
    want = torch.full((8, 8), 0.1187).fill_diagonal_(0.1691).expand(1, 8, 8, 8)
    weights = headwise.attention_weights(heads_BHTD, heads_BHTD)
    assert_published(weights, want, rtol=0, atol=5e-5, source=f"{KERAS}; here to the digits printed")
