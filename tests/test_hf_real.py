"""Trained models in transformers through the plug-in: what they write, hear and find alike is known.

Their weights are no part of this project and are read from outside it, where they are there.
"""

import csv
from pathlib import Path

import pytest
import stories
import torch
import whisper_tiny
from helpers import assert_published
from stories import BOS, Stories
from test_minilm import padded, trained  # noqa: F401 (a fixture)

from headwise.convert import huggingface

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

# the models' code is not ours, and ours is annotated no otherwise than in the other tests of the plug-in
pytestmark = pytest.mark.plain

COUNT = 200
PAIRS = Path(__file__).parents[2] / "shared" / "data" / "stsb" / "stsb-en-dev.csv"


@pytest.fixture(autouse=True, scope="module")
def _registered():
    huggingface.register()


def rotated_by_halves(weight, heads):
    """Rows of a projection whose pairs lie side by side, with the first of all pairs before the second ones."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


@pytest.fixture(scope="module")
def llama():
    """stories260K as a Llama of transformers."""
    stories.needs_the_files()
    state = Stories().state_dict()
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=state["blocks.0.w1.weight"].shape[0], num_hidden_layers=5,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=512, rms_norm_eps=1e-5,
        tie_word_embeddings=True, bos_token_id=BOS, eos_token_id=None, pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip
    names = {
        "attention_norm": "input_layernorm", "feed_norm": "post_attention_layernorm", "attention.out_proj":
        "self_attn.o_proj", "attention": "self_attn", "w1": "mlp.gate_proj", "w2": "mlp.down_proj",
        "w3": "mlp.up_proj", "blocks": "model.layers",
    }  # fmt: skip
    named = {"model.embed_tokens.weight": state.pop("embedding.weight"), "model.norm.weight": state.pop("norm.weight")}
    for name, value in state.items():
        if "q_proj" in name or "k_proj" in name:
            value = rotated_by_halves(value, 8 if "q_proj" in name else 4)
        for old, new in names.items():
            name = name.replace(f"{old}.", f"{new}.") if f".{old}." in f".{name}" else name
        named[name] = value
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="headwise").eval()
    left = model.load_state_dict(named, strict=False)
    assert left.unexpected_keys == [] and left.missing_keys == ["lm_head.weight"]
    return model


def written(model, prompts, count, **options):
    """What follows each prompt, from a batch that is padded on the left."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    real = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(
        input_ids=ids, attention_mask=real, max_new_tokens=count, do_sample=False, disable_compile=True, **options
    )
    return out[:, width:].tolist()


@pytest.fixture(scope="module")
def tokens(llama):
    return [BOS, *written(llama, [[BOS]], COUNT)[0]]


def test_two_hundred_tokens(tokens):
    assert stories.text(tokens[1:]) == stories.published()


@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {"prefill_chunk_size": 7}], ids=str)
def test_two_hundred_tokens_of_ragged_prompts(llama, tokens, options):
    """Beginnings of the text go on with the rest of it, padded on the left, with a static cache and in parts."""
    lengths = [1, 13, 60]
    rows = written(llama, [tokens[:length] for length in lengths], COUNT - 59, **options)
    for row, length in zip(rows, lengths, strict=True):
        assert row == tokens[length : length + len(row)] and len(row) == 141


@torch.no_grad()
def test_the_text_packed_with_another(llama, tokens):
    """All of it at once in one row, behind another beginning of it, by positions that begin again."""
    ids = torch.tensor([tokens[:31] + tokens[:-1]])
    places = torch.cat([torch.arange(31), torch.arange(len(tokens) - 1)])[None]
    assert llama(input_ids=ids, position_ids=places).logits[0, 31:].argmax(-1).tolist() == tokens[1:]


@pytest.mark.slow
@pytest.mark.parametrize("together", [True, False], ids=["one batch", "one by one"])
@torch.no_grad()
def test_whisper_transcribes(together):
    """Three errors in 71 words, in the text that eager has."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    weights, sounds = whisper_tiny.needs_the_files()
    heard, said = whisper_tiny.sentences(sounds)
    tokenizer = tokenizers.Tokenizer.from_file(str(weights / "tokenizer.json"))
    model = whisper_tiny.model(weights)
    extract = transformers.WhisperFeatureExtractor(feature_size=80)
    features = extract([x.numpy() for x in heard], sampling_rate=16_000, return_tensors="pt").input_features
    wrong, count = 0, 0
    groups = [features] if together else features.split(1)
    texts = {}
    for implementation in ("headwise", "eager") if together else ("headwise",):
        model.set_attn_implementation(implementation)
        rows = [row for group in groups for row in model.generate(input_features=group)]
        texts[implementation] = [tokenizer.decode(row.tolist()) for row in rows]
    assert not together or texts["headwise"] == texts["eager"]
    for text, want in zip(texts["headwise"], said, strict=True):
        wrong += whisper_tiny.errors(whisper_tiny.words(text), whisper_tiny.words(want))
        count += len(whisper_tiny.words(want))
    assert (wrong, count) == (3, 71), texts


@pytest.mark.slow
def test_similarity_as_published(trained):  # noqa: F811
    """Of MiniLM on the other published part of STS-B; ``test_minilm`` has the first."""
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    if not PAIRS.exists():
        pytest.skip(f"{PAIRS.name} is not in ../shared/data/stsb beside this checkout")
    with PAIRS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    assert len(rows) == 1500
    model, tokenizer = trained
    states = padded(model, [torch.tensor(tokenizer.encode(row[side]).ids) for side in (0, 1) for row in rows])
    similar = (states[:1500] * states[1500:]).sum(-1)
    found = torch.tensor(100 * stats.spearmanr(similar.numpy(), [float(row[2]) for row in rows]).statistic)
    source = "Spearman correlation x 100 of all-MiniLM-L6-v2 on the development part of STS-B, to its last digit"
    assert_published(found, torch.tensor(86.7163), rtol=0, atol=5e-5, source=source)
