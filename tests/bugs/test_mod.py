"""MOD: the module: its sizes, its biases, its layout, its first weights, and what its state dict is called."""

import subprocess
import sys

import pytest
import torch
from helpers import randn
from reports import check_layer, each_backend, every_backend, every_mode, layer, running

from headwise import ConversionError, MultiHeadAttention, Padding, ShapeError
from headwise.convert import fused

# without the annotation hook: wrong sizes must meet headwise's own errors
pytestmark = pytest.mark.plain


@pytest.mark.parametrize(
    ("embed_dim", "num_heads", "said"),
    [
        (0, 4, "embed_dim is 0; give a whole number of at least 1."),
        (8, 0, "num_heads is 0; give a whole number of at least 1."),
        (8, -2, "num_heads is -2; give a whole number of at least 1."),
        (-8, 2, "embed_dim is -8; give a whole number of at least 1."),
        (8, 3, "embed_dim 8 cannot be split evenly over 3 heads; give head_dim= to choose freely."),
    ],
)
def test_mod_1_sizes_that_make_no_layer(embed_dim, num_heads, said):
    """A division by zero, an empty layer, or an assertion, which is not there under python -O."""
    with pytest.raises(ValueError) as caught:
        MultiHeadAttention(embed_dim, num_heads)
    assert type(caught.value) is ShapeError and str(caught.value) == said


def test_mod_1_without_assertions():
    code = (
        "import headwise\n"
        "for sizes in ((0, 4), (8, 0), (8, -2), (-8, 2), (8, 3)):\n"
        "    try:\n"
        "        headwise.MultiHeadAttention(*sizes)\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 5, done.stdout + done.stderr


@every_backend
@every_mode
def test_mod_2_no_bias_means_none_anywhere(mode, backend):
    """The output projection kept one, and evaluation crashed for the lack of the others."""
    made, x = layer(10, 1, bias=False, backend=backend), randn(2, 5, 10, seed=60)
    assert not [name for name, _ in made.named_parameters() if "bias" in name]
    with running(mode, made):
        out = made(x)
        nothing = made(x, mask=Padding(0))
    check_layer(made, out, x)
    assert nothing.eq(0).all()


@every_backend
@every_mode
def test_mod_2_an_odd_number_of_heads_with_padding(mode, backend):
    made, x = layer(15, 5, backend=backend), randn(3, 7, 15, seed=61)
    lengths = torch.tensor([7, 4, 1])
    with running(mode, made):
        out = made(x, mask=Padding(lengths))
    check_layer(made, out, x, allowed=(torch.arange(7) < lengths[:, None])[:, None, None])


@every_backend
def test_mod_3_samples_do_not_meet(backend):
    """Batch-first data in a layer that takes sequences first: no error, and samples attend to each other."""
    made, x, memory = layer(8, 2, backend=backend), randn(2, 5, 8, seed=62), randn(2, 3, 8, seed=63)
    other, other_memory = x.clone(), memory.clone()
    other[1], other_memory[1] = randn(5, 8, seed=64), randn(3, 8, seed=65)
    for was, now in ((made(x), made(other)), (made(x, memory), made(other, other_memory))):
        assert was.shape == (2, 5, 8)
        assert was[0].equal(now[0]) and not was[1].equal(now[1])
    check_layer(made, made(x), x)
    check_layer(made, made(x, memory), x, memory)


@every_backend
@every_mode
@pytest.mark.parametrize("padding", ["the last columns", "holes", "a whole sample"])
def test_mod_4_the_output_is_as_long_as_the_input(padding, mode, backend):
    """Columns that were padded in every sample were cut off, and padded rows were zeros in evaluation alone."""
    real = torch.ones(3, 6, dtype=torch.bool)
    if padding == "the last columns":
        real[:, 4:] = False
        real[1, 2:] = False
    elif padding == "holes":
        real[0, 1:3], real[1, ::2], real[2, 0] = False, False, False
    else:
        real[1] = False
    made, x = layer(8, 2, backend=backend), randn(3, 6, 8, seed=66)
    with running(mode, made):
        out = made(x, mask=Padding(real))
    assert out.shape == (3, 6, 8)
    check_layer(made, out, x, allowed=real[:, None, None])


@pytest.mark.parametrize("widths", [{}, {"key_dim": 64, "value_dim": 64}], ids=["left out", "given"])
def test_mod_5_each_matrix_starts_with_a_spread_of_its_own(widths):
    """One matrix of three projections was initialised as one, and spread less than three of them."""
    made = MultiHeadAttention(64, 4, **widths)
    bound = (6 / (64 + 64)) ** 0.5
    whole = fused(made.state_dict())["qkv_proj.weight"]
    for weight in (made.q_proj.weight, made.k_proj.weight, made.v_proj.weight, whole[:64], whole[64:128], whole[128:]):
        # the largest of n uniform numbers is within bound / n of the bound but for one time in e^k at k times that
        assert bound * (1 - 20 / weight.numel()) < weight.abs().max() <= bound


@each_backend
@pytest.mark.parametrize("layout", ["qkv_proj", "kv_proj", "in_proj"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_mod_6_fused_and_separate_load_into_each_other(kv_heads, layout, backend):
    """Checkpoints of the one form did not load into modules of the other."""
    made, other = (layer(12, 4, num_kv_heads=kv_heads, backend=backend, seed=seed) for seed in (0, 50))
    x = randn(2, 5, 12, seed=67)
    assert not other(x).equal(made(x))
    state = fused(made.state_dict(), layout)
    parts = ["q_proj", "k_proj", "v_proj"][layout == "kv_proj" :]
    weight = next(value for name, value in state.items() if name.startswith(layout) and "weight" in name)
    assert weight.equal(torch.cat([getattr(made, part).weight for part in parts]))
    other.load_state_dict(state)
    assert other(x).equal(made(x))
    assert fused(other.state_dict(), layout).keys() == state.keys()


def test_mod_6_unknown_names_are_reported():
    made = layer(12, 4)
    state = fused(made.state_dict()) | {"qkv_proj.scale": torch.ones(3), "wqkv.weight": torch.ones(36, 12)}
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "qkv_proj.scale", "wqkv.weight"'):
        made.load_state_dict(state)
    assert made.load_state_dict(state, strict=False).unexpected_keys == ["qkv_proj.scale", "wqkv.weight"]
    with pytest.raises(RuntimeError, match=r"the shape is \(36, 12\), but \(24, 12\) in the layer"):
        layer(12, 4, num_kv_heads=2).load_state_dict(fused(made.state_dict()))
    with pytest.raises(ConversionError, match=r"no q_proj\.weight in the state dict"):
        fused(state)
