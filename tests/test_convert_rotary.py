"""Rotary embeddings read from configurations: the same numbers as transformers' own modules."""

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from helpers import assert_as_good_as, randn

from headwise import ConversionError, LongRoPESchedule, RotaryEmbedding
from headwise.convert.rotary import ASKED, NEIGHBOURS, SPECTRUM, from_config

NEAR = torch.tensor([[0, 1, 2, 11, 29], [3, 5, 0, 23, 1]])
SHORT = NEAR % 12  # below 16, the length of training
THREE = torch.stack([NEAR, NEAR.roll(1, 1), NEAR.roll(2, 1) // 2])
TWO = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 0, 1, 7]])[:, None]  # rows and columns of patches
SMALL = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "num_hidden_layers": 2}
LIST = [1.0, 1.1, 1.3, 1.2, 1.7, 1.9, 2.3, 2.9]


def halves(code, tables, x):
    """Turn with a model's own function, which knows which dimensions form a pair; some models pass the rest by it."""
    cos, sin = (table if table.dim() == 3 else table[None] for table in tables)
    size = cos.shape[-1]
    turned = code.apply_rotary_pos_emb(x[..., :size], x[..., :size], cos, sin)[0]
    return torch.cat([turned, x[..., size:]], -1)


def gpt_oss(code, tables, x):
    return code.apply_rotary_pos_emb(x, x, *tables)[0]


def one(code, tables, x):
    return code.apply_rotary_pos_emb(x, *tables)


def tokens_first(code, tables, x):
    return code.apply_rotary_emb(x.transpose(1, 2), x.transpose(1, 2), tables)[0].transpose(1, 2)


def heads_first(code, tables, x):
    return code.apply_rotary_emb(x, x, tables)[0]


def interleaved(code, tables, x):
    # stored with the first of each pair before all second ones, in queries and keys alike, which scores do not see
    turned = code.apply_rotary_pos_emb_interleave(x, x, *tables)[0]
    return turned.unflatten(-1, (2, -1)).mT.flatten(-2)


def vision(code, tables, x):
    return code.apply_rotary_pos_emb_vision(*[x[0].transpose(0, 1)] * 2, *tables)[0].transpose(0, 1)[None]


@dataclass(frozen=True)
class Model:
    """A configuration, the module of transformers that it makes, and how its tables are applied."""

    code: str
    kind: str  # what the names of its classes begin with
    given: dict = field(default_factory=dict)
    position: torch.Tensor = NEAR
    turn: Callable = halves
    layer_type: str | None = None
    part: str = ""  # of the configuration's class, "Text" or "Vision"

    @property
    def module(self):
        return importlib.import_module(f"transformers.models.{self.code}.modeling_{self.code}")

    def config(self):
        code = importlib.import_module(f"transformers.models.{self.code}.configuration_{self.code}")
        return getattr(code, f"{self.kind}{self.part}Config")(**{**SMALL, **self.given})

    def theirs(self, config, x):
        names = (f"{self.kind}{self.part}RotaryEmbedding", f"{self.kind}RotaryEmbedding")
        rotary = next(getattr(self.module, name) for name in names if hasattr(self.module, name))(config)
        position = self.position[:, 0].mT if self.part == "Vision" else self.position
        more = () if self.layer_type is None else (self.layer_type,)
        return self.turn(self.module, rotary(x, position, *more), x)


def llama(**parameters):
    return {"max_position_embeddings": 64, "rope_parameters": {"rope_theta": 500.0, **parameters}}


def trained(length, **parameters):
    return llama(original_max_position_embeddings=length, **parameters)


YARN = {"rope_type": "yarn", "factor": 4.0}
PHI3 = {
    "original_max_position_embeddings": 16,
    **llama(rope_type="longrope", short_factor=LIST, long_factor=LIST[::-1]),
}
MODELS = {
    "llama": Model("llama", "Llama"),
    "linear": Model("llama", "Llama", llama(rope_type="linear", factor=3.0)),
    "dynamic, longer": Model(
        "llama", "Llama", llama(rope_type="dynamic", factor=3.0) | {"max_position_embeddings": 16}
    ),
    "dynamic, shorter": Model(
        "llama", "Llama", llama(rope_type="dynamic", factor=3.0) | {"max_position_embeddings": 16}, SHORT
    ),
    "yarn": Model("llama", "Llama", trained(16, **YARN)),
    "yarn with bounds": Model("llama", "Llama", trained(64, **YARN, beta_fast=4, beta_slow=2)),
    "yarn with a factor of its own": Model("llama", "Llama", trained(16, **YARN, attention_factor=0.7, mscale=1.0)),
    "yarn without a factor": Model("llama", "Llama", trained(16, rope_type="yarn", factor=None)),
    "yarn of gpt-oss": Model(
        "gpt_oss", "GptOss", {"head_dim": 16, **trained(64, **YARN, truncate=False)}, turn=gpt_oss
    ),
    "yarn of deepseek": Model(
        "deepseek_v3",
        "DeepseekV3",
        {"qk_rope_head_dim": 16, **trained(16, **YARN, mscale=0.7, mscale_all_dim=1.3)},
        turn=interleaved,
    ),
    "llama3": Model("llama", "Llama", trained(32, rope_type="llama3", factor=8, low_freq_factor=1, high_freq_factor=5)),
    "longrope, longer": Model("phi3", "Phi3", PHI3),
    "longrope, shorter": Model("phi3", "Phi3", PHI3, SHORT),
    "gemma 4, proportional": Model("gemma4", "Gemma4", {"head_dim": 16}, NEAR, one, "full_attention", "Text"),
    "gemma 4, sliding": Model("gemma4", "Gemma4", {"head_dim": 16}, NEAR, one, "sliding_attention", "Text"),
    "gemma 3, full": Model(
        "gemma3",
        "Gemma3",
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        layer_type="full_attention",
        part="Text",
    ),
    "gpt-neox": Model("gpt_neox", "GPTNeoX"),
    "phi": Model("phi", "Phi"),
    "stablelm": Model("stablelm", "StableLm"),
    "cohere": Model("cohere", "Cohere"),
    "cohere2": Model("cohere2", "Cohere2"),
    "ernie4_5": Model("ernie4_5", "Ernie4_5"),
    "ernie4_5_moe": Model("ernie4_5_moe", "Ernie4_5_Moe"),
    "glm": Model("glm", "Glm", {"head_dim": 16}),
    "glm4": Model("glm4", "Glm4", {"head_dim": 16}),
    "helium": Model("helium", "Helium", {"head_dim": 16}),
    "llama4": Model("llama4", "Llama4", {"head_dim": 16}, turn=tokens_first, part="Text"),
    "deepseek_v2": Model("deepseek_v2", "DeepseekV2", {"qk_rope_head_dim": 16}, turn=heads_first),
    "pixtral": Model("pixtral", "Pixtral", {}, TWO, part="Vision"),
    "qwen2_vl, vision": Model(
        "qwen2_vl", "Qwen2VL", {"embed_dim": 48, "num_heads": 3, "hidden_size": 7}, TWO, vision, part="Vision"
    ),
    **{
        code: Model(code, kind, {"head_dim": 16, **llama(mrope_section=sections, **more)}, THREE, part="Text")
        for code, kind, sections, more in (
            ("qwen2_vl", "Qwen2VL", [2, 3, 3], {}),
            ("qwen2_5_vl", "Qwen2_5_VL", [1, 5, 2], {**YARN, "original_max_position_embeddings": 16}),
            ("glm4v", "Glm4v", [2, 3, 3], {}),
            ("glm4v_moe", "Glm4vMoe", [2, 3, 3], {"partial_rotary_factor": 1.0}),
            ("paddleocr_vl", "PaddleOCR", [2, 3, 3], {}),
            ("qwen3_vl", "Qwen3VL", [4, 2, 2], {}),
            ("qwen3_vl_moe", "Qwen3VLMoe", [3, 3, 2], {}),
            ("qwen3_5", "Qwen3_5", [2, 1, 1], {"partial_rotary_factor": 0.5}),
            ("qwen3_5_moe", "Qwen3_5Moe", [2, 1, 1], {"partial_rotary_factor": 0.5}),
        )
    },
    **{
        f"{code}, vision": Model(code, kind, {"num_heads": 3}, TWO, vision, part="Vision")
        for code, kind in (
            ("qwen2_5_vl", "Qwen2_5_VL"),
            ("qwen3_vl", "Qwen3VL"),
            ("qwen3_vl_moe", "Qwen3VLMoe"),
            ("qwen3_5", "Qwen3_5"),
            ("qwen3_5_moe", "Qwen3_5Moe"),
            ("glm4v", "Glm4v"),
        )
    },
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore")  # transformers warns of settings that are made to be unusual
def test_the_same_numbers_as_transformers(name):
    pytest.importorskip("transformers", reason="transformers is not installed")
    model = MODELS[name]
    config = model.config()
    rotary = from_config(config, model.layer_type)
    x = randn(model.position.shape[-2], 3, 5, rotary.head_dim)
    theirs = model.theirs(config, x)
    # 8 steps follow one another to a frequency
    assert_as_good_as(theirs, rotary(x.double(), model.position), rotary(x, model.position), terms=8)
    assert not theirs.equal(x)
    if rotary.follows_length:
        fixed = from_config(config, length=int(model.position.max()) + 1)
        assert not fixed.follows_length and fixed(x, model.position).equal(rotary(x, model.position))


def test_llama4_vision():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    code = importlib.import_module("transformers.models.llama4.modeling_llama4")
    config = transformers.Llama4VisionConfig(hidden_size=48, num_attention_heads=3, image_size=12, patch_size=4)
    rotary, x = from_config(config), randn(1, 3, 10, 16)
    theirs = code.vision_apply_rotary_emb(*[x.transpose(1, 2)] * 2, code.Llama4VisionRotaryEmbedding(config)(x))[0]
    # 3 x 3 patches counted from 1, the column first, and a token for the image, which stays
    patches = [(1 + i % 3, 1 + i // 3) for i in range(9)] + [(0, 0)]
    position = torch.tensor(patches).mT[:, None]
    assert_as_good_as(theirs.transpose(1, 2), rotary(x.double(), position), rotary(x, position), terms=8)


@pytest.mark.parametrize("name, kind", (("gptj", "GPTJ"), ("codegen", "CodeGen")))
def test_gptj(name, kind):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    code = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    rotary = from_config(getattr(transformers, f"{kind}Config")(n_embd=48, n_head=3, rotary_dim=6))
    x = randn(2, 3, 5, 16)
    sin, cos = code.create_sinusoidal_positions(30, 6)[NEAR].chunk(2, -1)
    theirs = code.apply_rotary_pos_emb(x.transpose(1, 2)[..., :6], sin, cos).transpose(1, 2)
    assert_as_good_as(theirs, rotary(x.double(), NEAR)[..., :6], rotary(x, NEAR)[..., :6], terms=8)
    assert rotary(x, NEAR)[..., 6:].equal(x[..., 6:])


def test_every_model_that_is_known_is_compared():
    tried = {f"{m.code}_vision" if m.part == "Vision" else m.code for m in MODELS.values()} | {"gptj", "codegen"}
    tried |= {"llama4_vision_model", "pixtral"}
    assert tried >= set(NEIGHBOURS) | set(SPECTRUM)


def test_files_as_dicts():
    plain = {"hidden_size": 64, "num_attention_heads": 4}
    for given, want in (
        ({"rope_theta": 500}, RotaryEmbedding(16, base=500.0)),
        ({"rope_theta": 1e4, "head_dim": 10, "rope_scaling": None}, RotaryEmbedding(10)),
        ({"rotary_emb_base": 500, "rotary_pct": 0.25}, RotaryEmbedding(16, base=500.0, rotary_dim=4)),
        ({"rope_theta": 500.0, "partial_rotary_factor": 0.5}, RotaryEmbedding(16, base=500.0, rotary_dim=8)),
        ({"rotary_dim": 8, "model_type": "gptj"}, RotaryEmbedding(16, interleaved=True, rotary_dim=8)),
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "model_type": "qwen2_vl"},
            RotaryEmbedding(16, sections=(2, 3, 3)),
        ),
        (
            {"rope_scaling": {"type": "default", "mrope_section": [3, 3, 2], "mrope_interleaved": True}},
            RotaryEmbedding(16, sections=(3, 3, 2), spectrum="interleaved"),
        ),
        (
            {
                "rope_scaling": {"type": "su", "short_factor": [1] * 8, "long_factor": [2] * 8},
                "max_position_embeddings": 64,
                "original_max_position_embeddings": 16,
            },
            RotaryEmbedding(16, schedule=LongRoPESchedule(4.0, 16, (1.0,) * 8, (2.0,) * 8)),
        ),
    ):
        assert repr(from_config({**plain, **given})) == repr(want)
    assert from_config({**plain, "rope_theta": 500.0}, interleaved=True).interleaved
    assert not from_config({**plain, "rotary_dim": 8, "model_type": "gptj"}, interleaved=False).interleaved


@pytest.mark.plain
def test_what_is_not_understood_is_refused():
    plain = {"hidden_size": 64, "num_attention_heads": 4, "rope_theta": 500.0}
    nested = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
    for given, text in (
        ({"rope_theta": None}, "says nothing of a rotary embedding"),
        ({"hidden_size": None}, "has no head_dim"),
        ({"rope_parameters": nested}, r"no layer_type None .* \['full_attention', 'sliding_attention'\]"),
        ({"rope_parameters": {"rope_type": "linear"}}, "type 'linear' needs factor"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "needs max_position_embeddings"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "type 'yarn' needs factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "needs original_max_position_embeddings"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "no schedule for rope type 'spiral'"),
        ({"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}}, "hold llama_4_scaling_beta"),
        ({"rope_parameters": {"mrope_section": [2, 3, 3]}, "model_type": "hunyuan_vl"}, "'hunyuan_vl' share"),
        ({"rope_parameters": {"rope_type": "axial"}, "model_type": "gemma4_vision"}, "'gemma4_vision' share"),
    ):
        with pytest.raises(ConversionError, match=text):
            from_config({**plain, **given})


def test_the_pairs_of_every_model_are_known_or_asked_for():
    """A model whose own rotation takes neighbours is never turned by halves without a word."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if tuple(int(n) for n in transformers.__version__.split(".")[:2]) < (5, 24):
        pytest.skip("the models of older versions read their configurations otherwise")
    turn = re.compile(r"def (rotate_half|rotate_every_two|apply_rotary\w*)\(.*?(?=\ndef |\nclass |\n@)", re.S)
    neighbours = re.compile(r"\.\.\., (0)?::2|\.\.\., 1::2|view_as_complex|reshape\([^)]*-1, 2\)")
    found, lost = 0, []
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        name = path.parent.name
        if not any(neighbours.search(match.group(0)) for match in turn.finditer(path.read_text())):
            continue
        found += 1
        chosen = "rope_interleave" in "".join(p.read_text() for p in path.parent.glob("configuration_*.py"))
        known = any(f"{name}_".startswith(f"{other}_") for other in (*NEIGHBOURS, *ASKED))
        lost += [] if chosen or known else [name]
    assert not lost and found > 10


def test_pairs_that_were_not_compared_are_asked_for():
    for name in ("cohere2_moe", "moonshine", "blt_patcher"):
        plain = {"hidden_size": 64, "num_attention_heads": 4, "rope_theta": 1e4, "model_type": name}
        with pytest.raises(ConversionError, match=f"How {name} pairs"):
            from_config(plain)
        assert from_config(plain, interleaved=True).interleaved
        assert from_config({**plain, "rope_interleave": True}).interleaved
