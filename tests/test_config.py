"""Configurations: plain values that build the layer again, whatever it was built of."""

import copy
import inspect
import json
from dataclasses import dataclass

import cases
import pytest
import torch
from helpers import randn
from torch import nn
from torch.nn.utils import prune

import headwise
from headwise import (
    ALiBi,
    Backend,
    Bias,
    Causal,
    CustomScore,
    Mask,
    MultiHeadAttention,
    RelativeBias,
    RotaryEmbedding,
    Schedule,
    ScoreMod,
    ShapeError,
    Softcap,
    UnsupportedError,
    Window,
    YaRNSchedule,
)
from headwise.config import NORMS, SCHEDULES, SCORE_MODS

CALL = cases.SHAPES["mha"]
EMBED, HEADS, HEAD = 42, CALL.heads, 14


def in_json(config):
    return json.loads(json.dumps(config, allow_nan=False))


def holds_tensors(mask):
    return any(True for _ in mask.tensors())


LAYERS = {
    "plain": {},
    "grouped": {"num_kv_heads": 1},
    "every width": {"head_dim": 10, "v_head_dim": 7, "key_dim": 11, "value_dim": 17, "out_dim": 19},
    "value as wide as key": {"key_dim": 11},
    "value as wide as query": {"key_dim": 11, "value_dim": EMBED},
    "no bias": {"bias": False},
    "some biases": {"query_bias": False, "out_bias": False},
    "query bias": {"query_bias": True, "key_bias": False, "value_bias": False, "out_bias": False},
    "scale": {"scale": 0.0},
    "sinks, dropout, length, backend": {"sinks": True, "dropout_p": 0.25, "max_length": 29, "backend": "reference"},
    "norms": {"q_norm": nn.RMSNorm(HEAD), "k_norm": nn.LayerNorm(HEAD, eps=1e-3, bias=False), "rotate_first": True},
    "bare norms": {"q_norm": nn.RMSNorm(HEAD, eps=1e-6, elementwise_affine=False), "k_norm": nn.LayerNorm(HEAD)},
    "norm over heads": {"q_norm": nn.LayerNorm((HEADS, 5, HEAD), elementwise_affine=False), "head_dim": HEAD},
    "half": {"dtype": torch.bfloat16, "sinks": True, "score_mods": [RelativeBias(HEADS, dtype=torch.bfloat16)]},
    "wide norm": {"dtype": torch.float16, "q_norm": nn.RMSNorm(HEAD), "k_norm": nn.RMSNorm(HEAD, dtype=torch.float16)},
    "wide slopes": {"score_mods": [ALiBi(HEADS, randn(HEADS, dtype=torch.float64))]},
    "bias that is kept": {"score_mods": [Bias(nn.Parameter(randn(5, 5, seed=1), requires_grad=False))]},
    "two dtypes": {"dtype": torch.float64, "score_mods": [Bias(nn.Parameter(randn(1, HEADS, 5, 5))), Softcap(3.0)]},
    **{
        f"mask: {case.name}": {"mask": case.make(CALL)}
        for case in cases.MASKS
        if case.name != "custom" and not holds_tensors(case.make(CALL))
    },
    **{
        f"scores: {case.name}": {"score_mods": case.make(cases.Call(heads=HEADS, rows=5, slots=5), torch.float32)}
        for case in cases.SCORE_MODS
        if case.name not in ("custom", "bias", "bias, hiding")
    },
    **{f"rotary: {case.name}": {"rotary": case.make(), "head_dim": case.head_dim} for case in cases.ROTARY},
}


def build(name):
    """A layer whose trainable numbers are all different."""
    layer = MultiHeadAttention(EMBED, HEADS, **copy.deepcopy(LAYERS[name]))
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=i, scale=EMBED**-0.5))
    return layer.eval()


def run(layer):
    dtype = layer.q_proj.weight.dtype
    sizes = (layer.embed_dim, layer.key_dim, layer.value_dim)
    tokens = [randn(2, 5, size, seed=i, dtype=dtype) for i, size in enumerate(sizes)]
    axes = layer.rotary.sections if layer.rotary is not None else None
    there = torch.arange(5).expand(2, 5)
    there = there if axes is None else torch.stack([there * (axis + 1) for axis in range(len(axes))])
    return layer(*tokens, positions=there, key_positions=there)


def shapes(layer):
    return {name: (tensor.shape, tensor.dtype) for name, tensor in layer.state_dict().items()}


@pytest.mark.parametrize("name", LAYERS)
def test_a_configuration_builds_the_same_layer(name):
    layer = build(name)
    config = layer.config()
    assert in_json(config) == config
    kept = copy.deepcopy(config)
    twin = MultiHeadAttention.from_config(in_json(config)).eval()
    assert config == kept
    assert repr(twin) == repr(layer)
    assert shapes(twin) == shapes(layer)
    twin.load_state_dict(layer.state_dict())
    assert run(twin).equal(run(layer))
    assert twin.config() == config
    assert [p.requires_grad for p in twin.score_mods.parameters()] == [
        p.requires_grad for p in layer.score_mods.parameters()
    ]
    assert twin.dropout_p == layer.dropout_p and twin.rotate_first == layer.rotate_first


def test_the_cases_cover_every_argument_and_every_part():
    """A new argument of the constructor, or a new part, that is forgotten here fails."""
    seen, kinds = set(), set()

    def look(value):
        if isinstance(value, dict):
            kinds.add(value.get("kind"))
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            look(inner)

    for name in LAYERS:
        config = build(name).config()
        seen |= set(config)
        look(config)
    assert seen == set(inspect.signature(MultiHeadAttention).parameters) - {"device"}
    assert kinds - {None} == {cls.__name__ for cls in (*NORMS, *SCORE_MODS, *SCHEDULES)}
    public = [value for value in vars(headwise).values() if isinstance(value, type)]
    assert {cls for cls in public if issubclass(cls, ScoreMod)} - {ScoreMod, CustomScore} == set(SCORE_MODS)
    assert {cls for cls in public if issubclass(cls, Schedule)} - {Schedule} == set(SCHEDULES)


def test_only_what_differs_is_said():
    assert MultiHeadAttention(12, 3).config() == {"embed_dim": 12, "num_heads": 3, "dtype": "float32"}
    rotary = RotaryEmbedding(4, base=500.0, schedule=YaRNSchedule(4.0, 64))
    layer = MultiHeadAttention(
        12, 3, bias=False, num_kv_heads=1, rotary=rotary, mask=Causal() & Window(9), q_norm=nn.RMSNorm(4, eps=1e-6),
        score_mods=[Softcap(30.0), ALiBi(3, torch.tensor([0.5, 0.25, 2.0]))], sinks=True, dtype=torch.bfloat16,
    )  # fmt: skip
    assert layer.config() == {
        "embed_dim": 12,
        "num_heads": 3,
        "num_kv_heads": 1,
        "bias": False,
        "q_norm": {"kind": "RMSNorm", "normalized_shape": [4], "eps": 1e-6, "dtype": "float32"},
        "rotary": {
            "head_dim": 4,
            "base": 500.0,
            "schedule": {"kind": "YaRNSchedule", "factor": 4.0, "original_length": 64},
        },
        "score_mods": [
            {"kind": "Softcap", "cap": 30.0},
            {"kind": "ALiBi", "num_heads": 3, "slopes": [0.5, 0.25, 2.0], "dtype": "float32"},
        ],
        "mask": "Causal() & Window(9)",
        "sinks": True,
        "dtype": "bfloat16",
    }


def test_a_head_size_that_rounds_to_the_default_is_said():
    # 10 // 4 is 2, but a width of 10 is not split over 4 heads without being told so
    layer = MultiHeadAttention(10, 4, head_dim=2)
    assert layer.config()["head_dim"] == 2
    assert MultiHeadAttention.from_config(layer.config()).head_dim == 2


def test_what_is_left_out_is_the_constructors_default():
    layer = MultiHeadAttention.from_config({"embed_dim": 12, "num_heads": 3})
    assert repr(layer) == repr(MultiHeadAttention(12, 3)) and layer.training
    whole = {
        name: p.default if p.default is not p.empty else {"embed_dim": 12, "num_heads": 3}[name]
        for name, p in inspect.signature(MultiHeadAttention).parameters.items()
        if name not in ("device", "mask", "score_mods")
    }
    assert repr(MultiHeadAttention.from_config({**whole, "mask": "Full()", "score_mods": []})) == repr(layer)


def test_device_and_dtype_of_a_new_layer():
    given = {"q_norm": nn.RMSNorm(4), "k_norm": nn.RMSNorm(4, dtype=torch.float64), "sinks": True}
    mods = [RelativeBias(3), Bias(nn.Parameter(torch.ones(2, 2))), ALiBi(3, torch.tensor([1.0, 2.0, 3.0]))]
    config = MultiHeadAttention(12, 3, **given, score_mods=mods).config()
    layer = MultiHeadAttention.from_config(config, device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta for p in layer.parameters())
    dtypes = {name: p.dtype for name, p in layer.named_parameters()}
    assert dtypes.pop("k_norm.weight") == torch.float64  # which was not the layer's before either
    assert set(dtypes.values()) == {torch.bfloat16}
    # of these no state dict brings the numbers
    assert layer.score_mods[2].slopes.tolist() == [1.0, 2.0, 3.0]
    layer.load_state_dict(MultiHeadAttention.from_config(config, dtype=torch.bfloat16).state_dict(), assign=True)
    assert layer(torch.ones(1, 2, 12, dtype=torch.bfloat16)).isfinite().all()
    with pytest.raises(ShapeError, match="cannot hold weights"):
        MultiHeadAttention.from_config(config, dtype=torch.int8)


def test_a_moved_or_converted_layer_says_what_it_is_now():
    layer = MultiHeadAttention(12, 3, q_norm=nn.RMSNorm(4)).to(torch.float16)
    assert layer.config()["dtype"] == "float16" and "dtype" not in layer.config()["q_norm"]
    assert MultiHeadAttention(12, 3, device="meta").config() == MultiHeadAttention(12, 3).config()
    layer.dropout_p, layer.backend, layer.mask = 0.5, headwise.BACKENDS[-1], Causal()
    config = layer.config()
    assert (config["dropout_p"], config["backend"], config["mask"]) == (0.5, headwise.BACKENDS[-1].name, "Causal()")


def test_one_norm_for_queries_and_keys_stays_one():
    norm = nn.RMSNorm(4)
    layer = MultiHeadAttention(12, 3, q_norm=norm, k_norm=norm)
    assert layer.config()["k_norm"] == "q_norm"
    twin = MultiHeadAttention.from_config(in_json(layer.config()))
    assert twin.q_norm is twin.k_norm and twin.q_norm is not norm
    assert len(list(twin.parameters())) == len(list(layer.parameters()))


def test_a_bias_is_zeros_until_its_numbers_are_loaded():
    layer = MultiHeadAttention(12, 3, score_mods=[Bias(nn.Parameter(torch.ones(2, 2)))])
    twin = MultiHeadAttention.from_config(layer.config())
    assert twin.score_mods[0].values.eq(0).all()
    twin.load_state_dict(layer.state_dict())
    assert twin.score_mods[0].values.eq(1).all()


@dataclass(frozen=True, eq=False)
class Strided(Mask):
    """A mask of one's own, whose text reads back as long as its class is there."""

    step: int

    def allowed(self, b, h, q, k):
        return (q - k) % self.step == 0


class Own(Backend):
    """A backend with the name of another."""

    name = "reference"

    def why_not(self, x):
        return None

    def run(self, x):
        return x.query, None


def test_parts_of_ones_own():
    layer = MultiHeadAttention(12, 3, mask=Causal() & Strided(2))
    assert layer.config()["mask"] == "Causal() & Strided(step=2)"
    twin = MultiHeadAttention.from_config(layer.config())
    twin.load_state_dict(layer.state_dict())
    x = randn(2, 7, 12)
    assert twin(x).equal(layer(x)) and not twin(x).equal(layer(x, mask=Window(2)))
    with pytest.raises(UnsupportedError, match="'reference' is none of headwise's"):
        MultiHeadAttention(12, 3, backend=Own()).config()


class Halved(RotaryEmbedding):
    """A rotary embedding of one's own."""


class Slow(YaRNSchedule):
    """A schedule of one's own."""


@pytest.mark.parametrize(
    ("change", "said"),
    (
        (lambda layer: setattr(layer, "rotary", Halved(4)), "cannot describe Halved"),
        (lambda layer: setattr(layer, "rotary", RotaryEmbedding(4, schedule=Slow(2.0, 8))), "cannot describe Slow"),
        (
            lambda layer: prune.l1_unstructured(layer.q_proj, "weight", 0.5),
            "q_proj.weight_orig as nothing, but it is torch",
        ),
        (lambda layer: layer.register_buffer("extra", torch.ones(2)), "extra as nothing, but it is torch.float32"),
        (
            lambda layer: setattr(layer, "num_heads", 6),
            r"q_proj.weight as torch.float32 \(24, 12\), but it is torch.float32 \(12, 12\)",
        ),
        (lambda layer: layer.add_module("probe", nn.Identity()), "probe as nothing, but it is Identity"),
        (
            lambda layer: nn.utils.parametrize.register_parametrization(layer.v_proj, "weight", nn.Identity()),
            "ParametrizedLinear as v_proj",
        ),
    ),
)
def test_what_a_configuration_would_not_build_is_refused(change, said):
    layer = MultiHeadAttention(12, 3)
    change(layer)
    with pytest.raises(UnsupportedError, match=said):
        layer.config()


@pytest.mark.plain
def test_unknown_names_are_listed_with_the_known():
    with pytest.raises(ShapeError) as caught:
        MultiHeadAttention.from_config({"embed_dim": 12, "num_heads": 3, "num_head": 3, "device": "cpu"})
    known = [name for name in inspect.signature(MultiHeadAttention).parameters if name != "device"]
    assert str(caught.value) == f"A configuration has no num_head, device; it has {', '.join(known)}."


@pytest.mark.plain
def test_a_configured_layer_compiles_like_another():
    layer = MultiHeadAttention(12, 3, rotary=RotaryEmbedding(4), mask=Causal(), num_kv_heads=1)
    twin = MultiHeadAttention.from_config(in_json(layer.config()))
    twin.load_state_dict(layer.state_dict())
    x = randn(2, 7, 12)
    compiled = torch.compile(twin, fullgraph=True, backend="eager")
    assert compiled(x).equal(torch.compile(layer, fullgraph=True, backend="eager")(x))


@pytest.mark.parametrize("trained", [True, False])
def test_slopes_of_a_state_dict(trained):
    slopes = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]), trained)
    layer = MultiHeadAttention(12, 3, score_mods=[ALiBi(3, slopes)])
    described = json.loads(json.dumps(layer.config()))
    with torch.no_grad():
        slopes.mul_(2)
    twin = MultiHeadAttention.from_config(described)
    twin.load_state_dict(layer.state_dict())
    assert twin.score_mods[0].slopes.tolist() == [2.0, 4.0, 6.0]
    assert twin.score_mods[0].slopes.requires_grad is trained and twin.config() == layer.config()
