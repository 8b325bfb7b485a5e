"""Fused projections: state dicts in which one matrix holds several, loaded into a layer and made from one."""

import copy
import io

import pytest
import torch
from helpers import assert_as_good_as, randn
from torch import nn
from torch.nn.functional import linear

from headwise import Bias, ConversionError, MultiHeadAttention, RotaryEmbedding
from headwise.convert import fused

SIZES = {
    "as the paper": {},
    "grouped": {"num_kv_heads": 2},
    "one key head": {"num_kv_heads": 1},
    "every size": {"num_kv_heads": 2, "head_dim": 5, "v_head_dim": 7, "out_dim": 19},
    "no bias": {"num_kv_heads": 2, "bias": False},
    "no output bias": {"out_bias": False},
}
LAYOUTS = ("qkv_proj", "kv_proj", "in_proj")
EMBED, HEADS = 12, 6
every_size = pytest.mark.parametrize("size", SIZES)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def build(seed=0, **given):
    layer = MultiHeadAttention(EMBED, HEADS, **given)
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=100 * seed + i))
    return layer


def by_hand(layer, layout):
    """The fused state dict, written out."""
    state = dict(layer.state_dict())
    first, names = {"qkv_proj": ("qkv_proj.", "qkv"), "kv_proj": ("kv_proj.", "kv"), "in_proj": ("in_proj_", "qkv")}[
        layout
    ]
    for kind in ("weight", "bias"):
        rows = [row for name in names for row in state.pop(f"{name}_proj.{kind}", ())]
        if rows:
            state[f"{first}{kind}"] = torch.stack(rows)
    return state


def same(a, b):
    return set(a) == set(b) and all(a[name].equal(b[name]) for name in a)


@every_size
@every_layout
def test_there_and_back(layout, size):
    layer, other = build(1, **SIZES[size]), build(2, **SIZES[size])
    state = fused(layer.state_dict(), layout)
    assert same(state, by_hand(layer, layout))
    kept = dict(state)
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    assert state == kept  # the very tensors
    assert same(other.state_dict(), layer.state_dict())
    x = randn(2, 5, EMBED, seed=3)
    assert other(x).equal(layer(x)) and not build(2, **SIZES[size])(x).equal(layer(x))


@every_size
def test_one_product_with_the_fused_matrix_gives_all_three(size):
    layer = build(1, **SIZES[size]).double()
    state = fused(layer.state_dict())
    x = randn(2, 5, EMBED, dtype=torch.float64)
    rows = linear(x, state["qkv_proj.weight"], state.get("qkv_proj.bias"))
    apart = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)
    assert_as_good_as(rows, apart, terms=EMBED)


@pytest.mark.parametrize("bias", (True, False))
def test_torch_loads_what_is_fused_for_it(bias):
    layer, theirs = build(1, bias=bias), nn.MultiheadAttention(EMBED, HEADS, bias=bias, batch_first=True)
    theirs.load_state_dict(fused(layer.state_dict(), "in_proj"))
    x = randn(2, 5, EMBED, seed=3)
    want = copy.deepcopy(layer).double()(x.double())
    assert_as_good_as(theirs(x, x, x)[0], want, layer(x), terms=3 * EMBED)
    assert_as_good_as(layer(x), want, theirs(x, x, x)[0], terms=3 * EMBED)
    other = build(2, bias=bias)
    other.load_state_dict(theirs.state_dict())
    assert other(x).equal(layer(x))


def test_torchs_own_names_where_widths_differ():
    theirs = nn.MultiheadAttention(EMBED, HEADS, kdim=11, vdim=17, batch_first=True).double()
    nn.init.normal_(theirs.in_proj_bias)
    layer = MultiHeadAttention(EMBED, HEADS, key_dim=11, value_dim=17).double()
    layer.load_state_dict(theirs.state_dict())
    query, key, value = (randn(2, 5, size, seed=size, dtype=torch.float64) for size in (EMBED, 11, 17))
    assert_as_good_as(layer(query, key, value), theirs(query, key, value)[0], terms=3 * EMBED)


class Block(nn.Module):
    """A part of a larger model."""

    def __init__(self, seed):
        super().__init__()
        self.norm = nn.LayerNorm(EMBED)
        self.attention = build(seed, num_kv_heads=2, sinks=True, q_norm=nn.RMSNorm(2), rotary=RotaryEmbedding(2))
        self.memory = build(seed + 1, score_mods=[Bias(nn.Parameter(randn(5, 5, seed=seed)))])

    def forward(self, x):
        return self.memory(self.attention(self.norm(x)), x)


def model(seed):
    return nn.ModuleDict({"blocks": nn.ModuleList([Block(seed), Block(seed + 2)]), "head": nn.Linear(EMBED, 3)})


def test_layers_in_a_larger_model():
    one, other = model(10), model(20)
    state = one.state_dict()
    for i, layout in ((0, "qkv_proj"), (1, "in_proj")):
        state = fused(state, layout, f"blocks.{i}.attention")
        state = fused(state, "kv_proj", f"blocks.{i}.memory.")
    assert "blocks.0.attention.qkv_proj.weight" in state and "blocks.1.attention.in_proj_bias" in state
    assert "blocks.1.memory.kv_proj.bias" in state and "blocks.1.memory.q_proj.bias" in state
    assert len(state) == len(one.state_dict()) - 2 * (4 + 2)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file)
    names = list(loaded)
    other.load_state_dict(loaded)
    assert list(loaded) == names
    assert same(other.state_dict(), one.state_dict())
    x = randn(2, 5, EMBED)
    assert other["blocks"][1](x).equal(one["blocks"][1](x))


def test_names_stand_where_their_parts_stood():
    names = list(fused(build(score_mods=[Bias(nn.Parameter(torch.ones(2, 2)))]).state_dict(), "kv_proj"))
    apart = list(build(score_mods=[Bias(nn.Parameter(torch.ones(2, 2)))]).state_dict())
    assert names == [n.replace("k_proj", "kv_proj") for n in apart if not n.startswith("v_proj")]


def test_fusing_copies():
    layer = build(1)
    state = layer.state_dict()
    names = list(state)
    made = fused(state)
    assert list(state) == names
    made["qkv_proj.weight"].zero_()
    assert not layer.q_proj.weight.eq(0).any()


def test_assigned_projections_have_memory_of_their_own():
    layer = build(1, num_kv_heads=2)
    state = fused(layer.state_dict())
    other = MultiHeadAttention(EMBED, HEADS, num_kv_heads=2, device="meta")
    other.v_proj.requires_grad_(False)
    other.load_state_dict(state, assign=True)
    x = randn(2, 5, EMBED)
    assert other(x).equal(layer(x))
    parts = (other.q_proj, other.k_proj, other.v_proj)
    assert len({p.weight.untyped_storage().data_ptr() for p in parts}) == 3
    assert [p.weight.untyped_storage().nbytes() for p in parts] == [4 * p.weight.numel() for p in parts]
    assert [p.weight.requires_grad for p in parts] == [True, True, False]
    state["qkv_proj.weight"].zero_()
    assert other(x).equal(layer(x))


def test_a_copied_layer_loads_it_too():
    layer = build(1)
    other = copy.deepcopy(build(2))
    other.load_state_dict(fused(layer.state_dict()))
    assert same(other.state_dict(), layer.state_dict())


# --- what does not fit


def said(layer, state, strict=True):
    with pytest.raises(RuntimeError) as caught:
        layer.load_state_dict(state, strict=strict)
    return str(caught.value)


@every_layout
def test_wrong_sizes_are_told_with_both_numbers(layout):
    state = by_hand(build(1, num_kv_heads=3), layout)
    text = said(build(2, num_kv_heads=2), state)
    weight, bias = (next(n for n in state if layout in n and kind in n) for kind in ("weight", "bias"))
    queries = layout != "kv_proj"
    was, want, rows = (24, 20, "12 + 4 + 4") if queries else (12, 8, "4 + 4")
    assert f"size mismatch for {weight}: the shape is ({was}, 12), but ({want}, 12) in the layer, {rows} rows." in text
    assert f"size mismatch for {bias}: the shape is ({was},), but ({want},) in the layer, {rows} rows." in text
    assert "Missing" not in text and "Unexpected" not in text
    assert "size mismatch" in said(build(2, num_kv_heads=2), state, strict=False)


def test_a_wrong_width_is_told():
    state = by_hand(build(1), "qkv_proj") | {"qkv_proj.weight": torch.ones(36, 11)}
    assert "size mismatch for qkv_proj.weight: the shape is (36, 11), but (36, 12) in the layer" in said(build(), state)
    assert "the shape is int" in said(build(), state | {"qkv_proj.weight": 3})


def test_one_matrix_for_inputs_of_different_widths_is_told():
    layer = build(key_dim=11)
    text = said(layer, by_hand(build(1), "qkv_proj"))
    assert "widths of the layer's inputs differ: q_proj 12, k_proj 11, v_proj 11. Give it apart." in text
    # keys and values of one width may be fused all the same
    other = build(2, key_dim=11)
    other.load_state_dict(fused(layer.state_dict(), "kv_proj"))
    assert same(other.state_dict(), layer.state_dict())
    with pytest.raises(ConversionError, match="widths differ, 12 and 11"):
        fused(layer.state_dict())


def test_one_projection_given_twice_is_told():
    state = by_hand(build(1), "kv_proj")
    text = said(build(), state | {"v_proj.weight": torch.ones(12, 12)})
    assert "kv_proj.weight holds v_proj.weight, which is there as well; leave one of them out." in text
    assert "in_proj_weight holds q_proj.weight" in said(
        build(), by_hand(build(1), "qkv_proj") | by_hand(build(1), "in_proj")
    )


def test_missing_and_unknown_names_are_reported_as_always():
    state = by_hand(build(1), "qkv_proj")
    bias = state.pop("qkv_proj.bias")
    text = said(build(), state | {"c_attn.weight": bias, "bias_k": bias})
    assert 'Missing key(s) in state_dict: "q_proj.bias", "k_proj.bias", "v_proj.bias".' in text
    assert 'Unexpected key(s) in state_dict: "c_attn.weight", "bias_k".' in text
    found = build().load_state_dict(state | {"bias_k": bias}, strict=False)
    assert found.unexpected_keys == ["bias_k"]
    assert found.missing_keys == ["q_proj.bias", "k_proj.bias", "v_proj.bias"]
    # a bias for a projection that has none
    assert 'Unexpected key(s) in state_dict: "k_proj.bias".' in said(
        build(key_bias=False), by_hand(build(1), "qkv_proj")
    )
    # and in a larger model, by the whole name
    wrong = model(10).state_dict() | {"blocks.0.attention.wqkv.weight": bias}
    assert '"blocks.0.attention.wqkv.weight"' in said(model(20), wrong)


def test_a_layer_keeps_its_weights_where_nothing_fits():
    layer, kept = build(1), copy.deepcopy(build(1).state_dict())
    said(layer, {"qkv_proj.weight": torch.ones(35, 12), "qkv_proj.bias": torch.ones(35)})
    assert same(layer.state_dict(), kept)
