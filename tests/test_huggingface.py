"""The transformers plug-in against eager: hidden states, gradients, padding, caches, documents in one row."""

import contextlib
import copy
import inspect
import io
import sys

import pytest
import torch
from helpers import assert_as_good_as, randn
from torch import nn

import headwise
from headwise import UnsupportedError
from headwise.convert import huggingface, huggingface_masks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from transformers import masking_utils  # noqa: E402

V, B, T, PAD = 97, 3, 7, 2
# some models got another attention than eager only in the course of version 5
OLD = tuple(int(n) for n in transformers.__version__.split(".")[:2]) < (5, 24)
# what a model calls its cache, which depends on the version of transformers
CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaModel.forward).parameters else "past_key_values"


@pytest.fixture(autouse=True)
def _registered():
    huggingface.register()


@pytest.fixture(scope="module")
def bert_base():
    """BERT of base size: 12 layers of 12 heads on 768 features, with random weights."""
    return made("BertForMaskedLM", "BertConfig", {"vocab_size": V})


@pytest.fixture(scope="module")
def narrow_bert():
    """The same on 156 features."""
    options = {"vocab_size": V, "hidden_size": 156, "intermediate_size": 40, "initializer_range": 0.045}
    return made("BertForMaskedLM", "BertConfig", options)


GPT2 = {
    "vocab_size": V,
    "n_embd": 156,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 32,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": None,
}


@pytest.fixture(scope="module")
def gpt2_base():
    """GPT-2 with 12 layers of 12 heads, on 156 features."""
    return made("GPT2LMHeadModel", "GPT2Config", GPT2)


@pytest.fixture(scope="module")
def gpt2():
    """GPT-2 with 2 layers of 12 heads."""
    return made("GPT2LMHeadModel", "GPT2Config", GPT2 | {"n_layer": 2})


@pytest.fixture(scope="module")
def bert():
    """A small BERT."""
    options = {k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "head_dim")}
    return made("BertForMaskedLM", "BertConfig", options)


def made(model_name, config_name, options):
    """A model in evaluation mode, and the same in float64.

    Its biases are not zero, and BERT's heads not nearly uniform, which twelve layers of would make all tokens alike.
    """
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**options)
    model = getattr(transformers, model_name)._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for i, (name, parameter) in enumerate(model.named_parameters()):
            if name.endswith("bias"):
                parameter.copy_(randn(*parameter.shape, seed=i, scale=0.1))
            elif name.endswith(("self.query.weight", "self.key.weight")):
                parameter.mul_(2.5)
    return model, copy.deepcopy(model).double()


def batch(padding):
    """Tokens with their attention mask, and which of them are real: padding at the end of row 1, the start of row 2."""
    ids = torch.randint(5, V, (B, T), generator=torch.Generator().manual_seed(1))
    real = torch.ones(B, T, dtype=torch.bool)
    if padding in ("padded", "padded at the end"):
        real[1, -PAD:] = False
    if padding == "padded":
        real[2, :PAD] = False
    mask = None if padding == "no mask" else real.long()
    return {"input_ids": ids.masked_fill(~real, 0), "attention_mask": mask}, real


def run(model, implementation, inputs, **more):
    model.set_attn_implementation(implementation)
    if model.config._attn_implementation != implementation and OLD:
        pytest.skip(f"{type(model).__name__} of transformers {transformers.__version__} has eager attention only")
    assert model.config._attn_implementation == implementation
    return model(**inputs, **more)


def three(models, inputs, **more):
    """The plug-in, eager in float64, and eager: what ``assert_as_good_as`` compares."""
    single, double = models
    exact = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}
    return (
        run(single, "headwise", inputs, **more),
        run(double, "eager", exact, **more),
        run(single, "eager", inputs, **more),
    )


@pytest.mark.parametrize("padding", ["no mask", "padded"])
@pytest.mark.parametrize("family", [pytest.param("bert_base", marks=pytest.mark.slow), "narrow_bert", "gpt2_base"])
def test_equals_eager(family, padding, request):
    models = request.getfixturevalue(family)
    inputs, real = batch(padding)
    outs = three(models, inputs, output_hidden_states=True)
    states = [[h[real] for h in out.hidden_states] for out in outs]
    assert len(states[0]) == 13
    width = states[0][0].shape[-1]
    for i, (got, want, plain) in enumerate(zip(*states, strict=True)):
        assert_as_good_as(got, want, plain, terms=width, what=f"hidden states {i}")

    names = [name for name, _ in models[0].named_parameters()]
    grads = []
    for out, model in zip(outs, (models[0], models[1], models[0]), strict=True):
        loss = torch.nn.functional.cross_entropy(out.logits[real], inputs["input_ids"][real])
        grads.append(torch.autograd.grad(loss, list(model.parameters())))
    # the gradient of a key bias is zero by algebra: rounding leaves something of the size of the others
    largest = max(g.abs().max().item() for name, g in zip(names, grads[1], strict=True) if ".0." in name)
    for name, got, want, plain in zip(names, *grads, strict=True):
        inner = largest if name.endswith("bias") else 0.0
        assert_as_good_as(got, want, plain, terms=width, inner=inner, what=name)
    with torch.no_grad():
        if padding == "no mask":  # one that hides nothing is none
            full = run(models[0], "headwise", batch("full mask")[0]).logits
            assert_as_good_as(full, outs[1].logits, outs[2].logits, terms=width)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_the_registered_mask_is_used(family, request, monkeypatch):
    models = request.getfixturevalue(family)
    inputs, real = batch("padded")
    mapping = masking_utils.AttentionMaskInterface._global_mapping
    with torch.no_grad():
        good = [out.logits[real] for out in three(models, inputs)]
        assert_as_good_as(*good, terms=156)
        monkeypatch.setitem(mapping, "headwise", lambda **options: None)
        bad = run(models[0], "headwise", inputs).logits[real]
    with pytest.raises(AssertionError, match="is above"):
        assert_as_good_as(bad, *good[1:], terms=156)


def test_rows_that_see_nothing_are_zero(gpt2):
    """Padding at the start of a causal model: its queries see no key."""
    model, inputs = gpt2[0], batch("padded")[0]
    attention, seen = model.transformer.h[0].attn, []
    attention.observer = lambda x, out, lse: seen.append((out, lse))
    try:
        run(model, "headwise", inputs)
    finally:
        del attention.observer
    ((out, lse),) = seen
    dead = torch.zeros(B, 12, T, dtype=torch.bool)
    dead[2, :, :PAD] = True
    assert (out[dead] == 0).all() and (lse[dead] == -torch.inf).all() and lse[~dead].isfinite().all()


def test_observer(bert):
    """It sees the complete call, and may return another output, as that of MultiHeadAttention."""
    model, (inputs, real) = bert[0], batch("padded")
    attention = model.bert.encoder.layer[1].attention.self
    before = run(model, "headwise", inputs).logits
    calls = []
    try:
        attention.observer = lambda x, out, lse: calls.append((x, out, lse))
        run(model, "headwise", inputs)
        ((x, out, lse),) = calls
        assert isinstance(x, headwise.Inputs) and x.query.shape == (B, 6, T, 8)
        assert out.shape == x.query.shape and lse.shape == (B, 6, T)
        assert torch.equal(x.allowed().expand(B, 6, T, T)[:, 0, 0], real)
        attention.observer = lambda x, out, lse: torch.zeros_like(out)
        silenced = run(model, "headwise", inputs).logits
        attention.observer = None
        assert torch.equal(run(model, "headwise", inputs).logits, before)
    finally:
        del attention.observer
    hook = attention.register_forward_hook(lambda module, args, output: (torch.zeros_like(output[0]), None))
    try:
        assert torch.equal(silenced, run(model, "headwise", inputs).logits)
    finally:
        hook.remove()
    assert not torch.equal(silenced, before)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_returns_weights_when_asked(family, request):
    models = request.getfixturevalue(family)
    inputs, real = batch("padded")
    with torch.no_grad():
        found = [out.attentions for out in three(models, inputs, output_attentions=True)]
        assert run(models[0], "headwise", inputs).attentions is None
    assert len(found[0]) == models[0].config.num_hidden_layers
    for triple in zip(*found, strict=True):
        assert_as_good_as(*(w.transpose(1, 2)[real] for w in triple), terms=156)


def test_trains_with_dropout(gpt2):
    model = copy.deepcopy(gpt2[0]).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    inputs, _ = batch("padded")
    still = [run(model, "headwise", inputs, labels=inputs["input_ids"]).loss for _ in range(2)]
    assert torch.equal(*still)
    for block in model.transformer.h:
        block.attn.attn_dropout.p = 0.5
    losses = [run(model, "headwise", inputs, labels=inputs["input_ids"]).loss for _ in range(2)]
    assert not torch.equal(*losses)
    losses[0].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert torch.equal(run(model.eval(), "headwise", inputs, labels=inputs["input_ids"]).loss, still[0])


SMALL = {
    "vocab_size": V,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}


FEW = {k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "head_dim")}
LAYERS = {
    "vocab_size": V, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 6,
    "decoder_attention_heads": 6, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 2, "init_std": 0.3,
}  # fmt: skip
TINY_GPT2 = GPT2 | {"n_layer": 2, "n_embd": 48, "n_head": 6, "initializer_range": 0.2}
TOWER = FEW | {"hidden_size": 48, "projection_dim": 16, "image_size": 12, "patch_size": 4}

# What each family adds: grouped heads, windows, a cap, sinks.
DECODERS = {
    "GPT2": ("GPT2LMHeadModel", "GPT2Config", TINY_GPT2),
    "GPTNeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", FEW),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", SMALL),
    "Mistral": ("MistralForCausalLM", "MistralConfig", SMALL | {"sliding_window": 4}),
    "Qwen3": (
        "Qwen3ForCausalLM", "Qwen3Config",
        SMALL | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "Gemma2": (
        "Gemma2ForCausalLM", "Gemma2Config",
        SMALL | {"sliding_window": 4, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 8},
    ),
    "Gemma3": (
        "Gemma3ForCausalLM", "Gemma3TextConfig",
        SMALL | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
                 "query_pre_attn_scalar": 8},
    ),
    "GptOss": (
        "GptOssForCausalLM", "GptOssConfig",
        SMALL | {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1,
                 "experts_implementation": "eager"},
    ),
}  # fmt: skip
WINDOWS = ["Mistral", "Qwen3", "Gemma2", "Gemma3", "GptOss"]

ENCODERS = {
    "Bert": ("BertModel", "BertConfig", FEW),
    "Roberta": ("RobertaModel", "RobertaConfig", FEW),
    "DistilBert": (
        "DistilBertModel", "DistilBertConfig",
        {"vocab_size": V, "dim": 48, "n_heads": 6, "n_layers": 2, "hidden_dim": 40, "initializer_range": 0.2},
    ),
    "ModernBert": (
        "ModernBertModel", "ModernBertConfig",
        FEW | {"local_attention": 6, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "T5 encoder": (
        "T5EncoderModel", "T5Config",
        {"vocab_size": V, "d_model": 48, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 6},
    ),
}  # fmt: skip

# Cross-attention and its caches; T5 adds a bias for positions.
ENCODER_DECODERS = {
    "T5": (
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": V, "d_model": 48, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 6,
         "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": None},
    ),
    "Bart": ("BartForConditionalGeneration", "BartConfig", LAYERS | {"forced_eos_token_id": None}),
    "Marian": ("MarianMTModel", "MarianConfig", LAYERS | {"decoder_vocab_size": V, "forced_eos_token_id": None}),
    "Whisper": (
        "WhisperForConditionalGeneration", "WhisperConfig",
        LAYERS | {"num_mel_bins": 5, "max_source_positions": 9, "max_target_positions": 32,
                  "suppress_tokens": None, "begin_suppress_tokens": None},
    ),
}  # fmt: skip

# Images and sound: no mask at all, keys fewer than queries, two towers.
OTHERS = {
    "ViT": (
        "ViTModel", "ViTConfig",
        {"image_size": 12, "patch_size": 4, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6,
         "intermediate_size": 40},
    ),
    "CLIP": (
        "CLIPModel", "CLIPConfig",
        {"text_config": TOWER | {"eos_token_id": 96, "bos_token_id": 1}, "vision_config": TOWER, "projection_dim": 16},
    ),
    "Wav2Vec2": (
        "Wav2Vec2Model", "Wav2Vec2Config",
        {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 40,
         "conv_dim": (16, 16), "conv_stride": (3, 2), "conv_kernel": (4, 3), "num_feat_extract_layers": 2,
         "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer"},
    ),
    "Segformer": (
        "SegformerModel", "SegformerConfig",
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [12, 24],
         "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [2, 3], "mlp_ratios": [2, 2]},
    ),
}  # fmt: skip
FAMILIES = DECODERS | ENCODERS | ENCODER_DECODERS | OTHERS

_kept = {}


def family(name):
    """A small model of a family, with the same in float64."""
    if name not in _kept:
        _kept[name] = made(*FAMILIES[name])
    return _kept[name]


def inputs_of(name, padding):
    """What a model takes, and which of the tokens that it gives back are real (None: all)."""
    inputs, real = batch(padding)
    images = randn(B, 3, 12, 12)
    if name == "CLIP":
        return inputs | {"pixel_values": images}, None
    if name in ("ViT", "Segformer"):
        return {"pixel_values": images}, None
    if name == "Wav2Vec2":
        heard = torch.arange(80) < torch.tensor([80, 41, 80])[:, None]
        mask = {} if padding == "no mask" else {"attention_mask": heard.long()}
        return {"input_values": randn(B, 80) * heard} | mask, None
    if name == "Whisper":
        mask = {} if padding == "no mask" else {"decoder_attention_mask": inputs["attention_mask"]}
        return {"input_features": randn(B, 5, 18), "decoder_input_ids": inputs["input_ids"]} | mask, real
    if name in ENCODER_DECODERS:
        return inputs | {"decoder_input_ids": inputs["input_ids"][:1, :5].expand(B, -1)}, None
    return inputs, real


# Not at the start: some of these models take softmax in float32 even in float64, where eager then answers NaN for a
# query that sees nothing, and so for all that follow.
@pytest.mark.parametrize("padding", ["no mask", "padded at the end"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name, padding):
    inputs, real = inputs_of(name, padding)
    with torch.no_grad():
        outs = three(family(name), inputs)
    for key in [k for k, v in outs[0].items() if torch.is_tensor(v)]:
        got, want, plain = (out[key] for out in outs)
        if real is not None and got.shape[:2] == real.shape:
            got, want, plain = got[real], want[real], plain[real]
        assert_as_good_as(got, want.double(), plain, terms=48, what=key)


# Tokens that follow one another without the model's end or a repetition: random weights would answer with one token,
# which would compare nothing.
FREE = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "no_repeat_ngram_size": 1}
WAYS = {
    "dynamic cache": {},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "no cache": {"use_cache": False},
    "beams": {"num_beams": 3},
    "chunked prefill": {"prefill_chunk_size": 3},
}


def generated(model, implementation, inputs, way):
    model.set_attn_implementation(implementation)
    more = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    return model.generate(**inputs, **FREE, **WAYS[way], **more)


@pytest.mark.parametrize("padding", ["padded", pytest.param("no mask", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "way"),  # an encoder takes its tokens at once
    [(n, w) for n in (*DECODERS, *ENCODER_DECODERS) for w in WAYS if n in DECODERS or w != "chunked prefill"],
)
@torch.no_grad()
def test_generates_as_each_row_alone(name, way, padding):
    """Equal tokens, and the logits behind them, from padded rows as from each row alone in float64."""
    ids, real = batch("no mask")[0]["input_ids"], torch.ones(B, T, dtype=torch.bool)
    if name == "Whisper":  # its prompt has no padding, its sound is padded to one length
        inputs = {"input_features": randn(B, 5, 18), "decoder_input_ids": ids}
        rows = [{key: value[i : i + 1] for key, value in inputs.items()} for i in range(B)]
    else:
        if padding == "padded" and name in DECODERS:
            real[1, :PAD] = real[2, : PAD + 1] = False
        elif padding == "padded":
            real[1, -PAD:] = real[2, : PAD + 1] = False
        inputs = {"input_ids": ids.masked_fill(~real, 0), "attention_mask": real.long()}
        rows = [{"input_ids": ids[i : i + 1, r]} for i, r in enumerate(real)]
        if name in ("T5", "Bart", "Marian"):  # padding in front moves the positions of an encoder
            rows[2] = {key: value[2:] for key, value in inputs.items()}
    single, double = family(name)
    got, plain = (generated(single, implementation, inputs, way) for implementation in ("headwise", "eager"))
    wants = [generated(double, "eager", double_of(row), way) for row in rows]
    new = [out.sequences[:, -5:] for out in (got, plain)]
    assert torch.equal(new[0], torch.cat([want.sequences[:, -5:] for want in wants]))
    assert new[0].unique().numel() > 5
    if way == "beams":
        want = torch.cat([want.sequences_scores for want in wants])
        assert_as_good_as(got.sequences_scores, want.double(), plain.sequences_scores, terms=48, inner=10.0)
        return
    for step, logits in enumerate(got.logits):
        want = torch.cat([want.logits[step] for want in wants])
        assert_as_good_as(logits, want.double(), plain.logits[step], terms=48, what=f"step {step}")


def double_of(inputs):
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def caches_of(name, config):
    return {
        "dynamic": lambda: transformers.DynamicCache(config=config),
        "every token": transformers.DynamicCache,  # also beyond the window
        "static": lambda: transformers.StaticCache(config=config, max_cache_len=T + 6),
    }[name]()


@pytest.mark.parametrize("chunks", [[4, 1, 1, 1], [3, 2, 2], pytest.param([1] * T, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("cache", ["dynamic", "every token", "static"])
@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_a_cache_filled_in_parts(name, cache, chunks):
    """Any chunking of padded rows gives each row's real tokens what the row alone gives in one pass."""
    inputs, real = batch("padded")
    real[0, 2] = False  # and a hole, as where a padded conversation went on
    ids, positions = inputs["input_ids"], (real.long().cumsum(-1) - 1).clamp(min=0)
    single, double = family(name)
    plain = run(single, "eager", {"input_ids": ids, "attention_mask": real.long(), "position_ids": positions}).logits
    single.set_attn_implementation("headwise")
    kept, parts, start = caches_of(cache, single.config), [], 0
    for count in chunks:
        stop = start + count
        part = {"input_ids": ids[:, start:stop], "position_ids": positions[:, start:stop]}
        parts.append(single(**part, attention_mask=real[:, :stop].long(), **{CACHE: kept}).logits)
        start = stop
    got = torch.cat(parts, 1)
    for i in range(B):
        want = run(double, "eager", {"input_ids": ids[i : i + 1, real[i]]}).logits[0]
        assert_as_good_as(got[i, real[i]], want.double(), plain[i, real[i]], terms=48, what=f"row {i}")


# Rows of several documents, of different lengths in each row.
LENGTHS = [[3, 2, 4], [5, 4]]
ROWS = torch.randint(5, V, (2, 9), generator=torch.Generator().manual_seed(2))
PLACES = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])


def output(out):
    return out["logits"] if "logits" in out else out[0]


_alone = {}


def alone(name):
    """What each document gives alone, side by side: by eager in float64 and in float32."""
    if name not in _alone:
        outs = []
        for model in reversed(family(name)):
            parts = [row.split(counts) for row, counts in zip(ROWS, LENGTHS, strict=True)]
            rows = [[output(run(model, "eager", {"input_ids": part[None]})) for part in row] for row in parts]
            outs.append(torch.cat([torch.cat(row, 1) for row in rows]))
        _alone[name] = outs[0].double(), outs[1]
    return _alone[name]


def first_position(name):
    """RoBERTa counts positions from the number after its padding token's."""
    return 1 if name == "Roberta" else 0


@pytest.mark.parametrize("rows", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("cache", ["none", "the model's", "dynamic", "every token", "static"])
@pytest.mark.parametrize("mask", ["no mask", "ones", pytest.param("padding", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_win_6_neither_a_mask_nor_a_cache_joins_documents(name, mask, cache, rows):
    """transformers' masks tell documents apart only without an attention mask and a cache (and in gpt-oss never)."""
    model = family(name)[0]
    want, plain = (x[:rows] for x in alone(name))
    inputs, size = {"input_ids": ROWS[:rows], "position_ids": PLACES[:rows]}, 9
    if mask == "padding":
        inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.zeros(rows, 2, dtype=torch.long)], 1)
        inputs["position_ids"] = torch.cat([inputs["position_ids"], torch.tensor([[1, 0]]).expand(rows, -1)], 1)
    if mask != "no mask":
        inputs["attention_mask"] = (torch.arange(inputs["input_ids"].shape[1]) < size).long().expand(rows, -1)
    if cache not in ("none", "the model's"):
        inputs[CACHE] = caches_of(cache, model.config)
    got = run(model, "headwise", inputs, use_cache=cache != "none").logits[:, :size]
    assert_as_good_as(got, want, plain, terms=48)


@pytest.mark.parametrize("mask", ["no mask", "ones", "padding"])
@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_documents_of_an_encoder_stay_apart(name, mask):
    """By the positions that its attention is passed; where it is passed none, by those given to ``packed``."""
    model, places = family(name)[0], PLACES
    inputs = {"input_ids": ROWS}
    if mask == "padding":
        inputs["input_ids"] = torch.cat([ROWS, torch.zeros(2, 2, dtype=torch.long)], 1)
        places = torch.cat([places, torch.tensor([[5, 0]]).expand(2, -1)], 1)
    if mask != "no mask":
        inputs["attention_mask"] = (torch.arange(inputs["input_ids"].shape[1]) < 9).long().expand(2, -1)
    inputs["position_ids"] = places + first_position(name)
    apart = huggingface.packed(model, places) if name in ("DistilBert", "ModernBert") else contextlib.nullcontext()
    with apart:
        got = run(model, "headwise", inputs)[0][:, :9]
    assert_as_good_as(got, *alone(name), terms=48)
    assert not any(hasattr(module, "packed_positions") for module in model.modules())


@pytest.mark.parametrize("name", ["Llama", "Bert"])
@torch.no_grad()
def test_win_5_one_document_does_not_see_another(name):
    """Changing the first document leaves the rows of the others as they are, to the last bit."""
    model, outs = family(name)[0], []
    for change in (0, 1):
        ids = ROWS.clone()
        ids[:, :3] = (ids[:, :3] + change) % V
        inputs = {"input_ids": ids, "position_ids": PLACES, "attention_mask": torch.ones(2, 9, dtype=torch.long)}
        outs.append(output(run(model, "headwise", inputs)))
    assert torch.equal(outs[0][0, 3:], outs[1][0, 3:]) and torch.equal(outs[0][1, 5:], outs[1][1, 5:])
    assert not torch.equal(outs[0][:, :3], outs[1][:, :3])


def test_gradients_of_documents():
    single, double = family("Llama")
    names, grads = [name for name, _ in single.named_parameters()], []
    ones = torch.ones(2, 9, dtype=torch.long)
    out = run(single, "headwise", {"input_ids": ROWS, "position_ids": PLACES, "attention_mask": ones}).logits
    for model in (single, double, single):
        if grads:
            parts = [row.split(counts) for row, counts in zip(ROWS, LENGTHS, strict=True)]
            outs = [[run(model, "eager", {"input_ids": part[None]}).logits for part in row] for row in parts]
            out = torch.cat([torch.cat(row, 1) for row in outs])
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), ROWS.flatten())
        grads.append(torch.autograd.grad(loss, list(model.parameters())))
    for name, got, want, plain in zip(names, *grads, strict=True):
        assert_as_good_as(got, want, plain, terms=48, what=name)


def positions_of(real, padding):
    """Positions of real tokens counted on over padding, whose own are given."""
    counted = real.long().cumsum(-1) - 1
    return counted if padding == "counted on" else counted.masked_fill(~real, padding)


@pytest.mark.parametrize("padding", [0, 1, "counted on"])
@pytest.mark.parametrize("name", ["GPT2", "Llama", "Mistral", "Bert", "Roberta"])
@torch.no_grad()
def test_padding_begins_no_document(name, padding):
    """Odd positions of padding, in front, behind and in the middle, change nothing for the real tokens around it."""
    inputs, real = batch("padded")
    real[0, 2:4] = False
    positions = (positions_of(real, padding) + first_position(name)).clamp(min=0)
    single, double = family(name)
    inputs = {"input_ids": inputs["input_ids"], "attention_mask": real.long(), "position_ids": positions}
    got, plain = (output(run(single, implementation, inputs)) for implementation in ("headwise", "eager"))
    for i in range(B):
        want = output(run(double, "eager", {"input_ids": inputs["input_ids"][i : i + 1, real[i]]}))[0]
        assert_as_good_as(got[i, real[i]], want.double(), plain[i, real[i]], terms=48, what=f"row {i}")


@torch.no_grad()
def test_padding_queries():
    """What nobody should read: zeros where they may see nothing, what the real tokens say elsewhere."""
    model, (inputs, real) = family("Llama")[0], batch("padded")
    positions = positions_of(real, 0)
    seen, attention = [], model.model.layers[0].self_attn
    attention.observer = lambda x, out, lse: seen.append((x.allowed().expand(B, 6, T, T), out))
    try:
        run(model, "headwise", inputs | {"position_ids": positions})
    finally:
        del attention.observer
    ((allowed, out),) = seen
    sees = torch.tensor(
        [[min(t + 1, T - PAD if i == 1 else T) - (PAD if i == 2 else 0) for t in range(T)] for i in range(B)]
    )
    assert torch.equal(allowed.sum(-1), sees.clamp(min=0)[:, None].expand(B, 6, T))
    assert (out[2, :, :PAD] == 0).all() and (out[1, :, -PAD:] != 0).all()


@pytest.mark.parametrize("implementation", ["headwise", "sdpa"])
@torch.no_grad()
def test_a_mask_of_four_dimensions_is_taken_as_it_is(implementation):
    """Two continuations of one beginning share positions, which makes them no documents where a mask says what is."""
    single, double = family("Llama")
    allowed = torch.ones(6, 6, dtype=torch.bool).tril()
    allowed[4:, 2:4] = False
    ids, places = ROWS[:1, :6], torch.tensor([[0, 1, 2, 3, 2, 3]])
    inputs = {"input_ids": ids, "position_ids": places, "attention_mask": allowed[None, None]}
    got = run(single, implementation, inputs).logits
    ways = [[0, 1, 2, 3], [0, 1, 4, 5]]
    want, plain = (
        torch.cat([run(m, "eager", {"input_ids": ids[:, way]}).logits[:, -2:] for way in ways], 1)
        for m in (double, single)
    )
    assert_as_good_as(got[:, 2:], want.double(), plain, terms=48)


@torch.no_grad()
def test_cross_attention_sees_its_whole_row():
    """Documents of the decoder, whose tokens are as many as those that it looks at, say nothing of these."""
    options = FEW | {"is_decoder": True, "add_cross_attention": True}
    models = made("BertLMHeadModel", "BertConfig", options)
    states = {"encoder_hidden_states": randn(1, 9, 48)}
    got = run(models[0], "headwise", {"input_ids": ROWS[:1], "position_ids": PLACES[:1]} | states).logits
    want, plain = (
        torch.cat([run(m, "eager", {"input_ids": p} | s).logits for p in ROWS[:1].split(LENGTHS[0], 1)], 1)
        for m, s in zip(reversed(models), (double_of(states), states), strict=True)
    )
    assert_as_good_as(got, want.double(), plain, terms=48)


@torch.no_grad()
def test_where_documents_cannot_be_known():
    model = family("Llama")[0]
    first = run(model, "headwise", {"input_ids": ROWS[:, :4]})
    more = {"position_ids": torch.tensor([[4, 0, 1]]).expand(2, -1), CACHE: first[CACHE]}
    with pytest.raises(UnsupportedError, match=r"Documents begin inside 3 tokens that continue a cache"):
        run(model, "headwise", {"input_ids": ROWS[:, 4:7]} | more)
    model = family("T5")[0]
    with (
        pytest.raises(UnsupportedError, match=r"positions of 9 tokens, but T5Attention has 9 queries .* of cross-att"),
        huggingface.packed(model.decoder, PLACES),
    ):
        run(model, "headwise", {"input_ids": ROWS, "decoder_input_ids": ROWS})
    with (
        pytest.raises(UnsupportedError, match=r"positions of 9 tokens, but T5Attention has 5 queries and 5 keys;"),
        huggingface.packed(model, PLACES),
    ):
        run(model, "headwise", {"input_ids": ROWS, "decoder_input_ids": ROWS[:, :5]})
    assert not any(hasattr(module, "packed_positions") for module in model.modules())


@torch.no_grad()
def test_observers_and_weights_see_documents():
    model, seen = family("Bert")[0], []
    attention = model.encoder.layer[1].attention.self
    attention.observer = lambda x, out, lse: seen.append(x.allowed())
    inputs = {"input_ids": ROWS, "position_ids": PLACES}
    try:
        weights = run(model, "headwise", inputs, output_attentions=True).attentions[1]
    finally:
        del attention.observer
    number = (PLACES == 0).cumsum(-1)
    same = (number[:, :, None] == number[:, None])[:, None].expand(2, 6, 9, 9)
    assert torch.equal(seen[0].expand_as(same), same) and torch.equal(weights > 0, same)


@pytest.mark.plain
@pytest.mark.parametrize("mask", ["ones", pytest.param("no mask", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "cache"), [("Bert", "none"), pytest.param("Llama", "none", marks=pytest.mark.slow), ("Llama", "static")]
)
@torch.no_grad()
def test_documents_in_compiled_models(name, cache, mask):
    model = family(name)[0]
    model.set_attn_implementation("headwise")
    inputs = {"input_ids": ROWS, "position_ids": PLACES}
    if mask == "ones":
        inputs["attention_mask"] = torch.ones(2, 9, dtype=torch.long)
    if cache == "static":
        inputs[CACHE] = caches_of("static", model.config)
        inputs[CACHE].early_initialization(2, 2, 8, torch.float32, "cpu")
    torch.compiler.reset()
    got = output(torch.compile(model, fullgraph=True, backend="eager")(**inputs))
    assert_as_good_as(got, *alone(name), terms=48)


@pytest.mark.plain
@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_call_that_continues_a_cache():
    """It cannot look at positions and refuse; what it continues is the one document that the cache holds."""
    model = family("Llama")[0]
    model.set_attn_implementation("headwise")
    cache = caches_of("static", model.config)
    cache.early_initialization(1, 2, 8, torch.float32, "cpu")
    model(input_ids=ROWS[1:, :4], position_ids=PLACES[1:, :4], **{CACHE: cache})
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    got = compiled(input_ids=ROWS[1:, 4:], position_ids=PLACES[1:, 4:], **{CACHE: cache}).logits
    assert_as_good_as(got, *(x[1:, 4:] for x in alone("Llama")), terms=48)


@pytest.mark.plain
@torch.no_grad()
def test_a_compiled_step_with_a_static_cache():
    """One graph for every step of a left-padded batch, with the tokens and logits of eager."""
    single, double = family("Llama")
    inputs, real = batch("padded")
    ids, mask, count = inputs["input_ids"], real.long(), 5
    ids[1], mask[1] = ids[0].flip(0), 1
    single.set_attn_implementation("headwise")
    cache = transformers.StaticCache(config=single.config, max_cache_len=T + count)
    cache.early_initialization(B, 2, 8, torch.float32, "cpu")
    places = positions_of(mask.bool(), 0)
    logits = [single(input_ids=ids, attention_mask=mask, position_ids=places, **{CACHE: cache}).logits[:, -1]]
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounter()
    step = torch.compile(single, fullgraph=True, backend=counter, dynamic=False)
    for i in range(count):
        token = logits[-1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, token], 1)
        # the mask of its full length, as generate prepares it, so that no size changes
        full = torch.nn.functional.pad(torch.cat([mask, torch.ones(B, i + 1, dtype=torch.long)], 1), (0, count - i - 1))
        place = (places[:, -1:] + i + 1).contiguous()
        logits.append(step(input_ids=token, attention_mask=full, position_ids=place, **{CACHE: cache}).logits[:, -1])
    assert counter.frame_count == 1
    for i, kept in enumerate(mask.bool()):
        row = torch.cat([ids[i, :T][kept], ids[i, T:]])[None]
        want, plain = (run(m, "eager", {"input_ids": row}).logits[0, -count - 1 :] for m in (double, single))
        assert_as_good_as(torch.stack(logits, 1)[i], want.double(), plain, terms=48)


class Attention(nn.Module):
    """What transformers hands to a kernel, at its barest."""

    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def call(module=None, mask=None, rows=5, slots=5, **options):
    module = Attention(is_causal=True) if module is None else module
    query, key, value = (randn(B, n, count, 13, seed=n) for n, count in ((6, rows), (3, slots), (3, slots)))
    options.setdefault("is_causal", None)
    return huggingface.kernel(module, query, key, value, mask, **options), (query, key, value)


def test_what_no_mask_means():
    (got, weights), x = call()
    assert weights is None and got.shape == (B, 5, 6, 13) and got.is_contiguous()
    causal = headwise.attention(*x, mask=headwise.Causal()).transpose(1, 2)
    full = headwise.attention(*x).transpose(1, 2)
    assert torch.equal(got, causal) and not torch.equal(causal, full)
    assert torch.equal(call(is_causal=False)[0][0], full)
    assert torch.equal(call(Attention(is_causal=False))[0][0], full)
    # one new token sees everything that is cached; several see the first slots of an empty cache of fixed length
    (got, _), x = call(rows=1, slots=7)
    assert torch.equal(got, headwise.attention(*x).transpose(1, 2))
    (got, _), (query, key, value) = call(rows=5, slots=7)
    early = headwise.attention(query, key[..., :5, :], value[..., :5, :], mask=headwise.Causal())
    assert torch.equal(got, early.transpose(1, 2))


def test_a_window_without_a_mask():
    for rows, slots, window in ((7, 7, 3), (1, 7, 3)):
        (got, _), x = call(rows=rows, slots=slots, sliding_window=window)
        want = headwise.attention(*x, mask=headwise.Causal() & headwise.Window(window)).transpose(1, 2)
        assert torch.equal(got, want)
    assert torch.equal(call(sliding_window=5)[0][0], call()[0][0])


def test_order_of_cap_bias_and_mask():
    bias, added = (
        randn(1, 6, 5, 5, seed=8),
        randn(B, 1, 5, 5, seed=9).masked_fill(torch.eye(5).bool(), -torch.inf),
    )
    sinks = randn(6, seed=10)
    (got, weights), (query, key, value) = call(
        mask=added, softcap=0.7, position_bias=bias, s_aux=sinks, scaling=0.4, output_attentions=True
    )
    scores = 0.7 * torch.tanh(query.double() @ key.double().repeat_interleave(2, 1).mT * 0.4 / 0.7) + bias + added
    scores = torch.cat([scores, sinks.double()[:, None, None].expand(B, 6, 5, 1)], -1)
    want = scores.softmax(-1)[..., :-1]
    assert_as_good_as(weights, want, terms=13)
    assert_as_good_as(got, (want @ value.double().repeat_interleave(2, 1)).transpose(1, 2), terms=13)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"indices": torch.zeros(1)}, "passes indices= .* may not ignore"),
        ({"something_new": 3}, "passes something_new="),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 5])}, "cu_seq_lens_q packs 2 sequences .* pass position_ids"),
        ({"module": Attention()}, "Attention gave no mask .* set is_causal"),
        ({"is_causal": False, "sliding_window": 3}, "window of 3 for 5 keys"),
        ({"mask": torch.ones(B, 5, dtype=torch.bool)}, r"a mask \(3, 5\); one of four dimensions"),
        ({"mask": torch.ones(B, 1, 5, 5, dtype=torch.int64)}, "dtype torch.int64"),
        ({"mask": torch.ones(B, 1, 5, 4, dtype=torch.bool)}, r"\(3, 1, 5, 4\) does not fit"),
    ],
)
def test_what_is_not_understood_is_refused(options, text):
    with pytest.raises(headwise.AttentionError, match=text):
        call(**options)


def test_what_does_not_matter_is_known():
    options = dict.fromkeys(huggingface.HARMLESS - {"output_attentions"}, 1) | {
        "indices": None, "something_new": False, "cu_seq_lens_q": torch.tensor([0, 5]),
    }  # fmt: skip
    assert torch.equal(call(**options)[0][0], call()[0][0])
    mask = torch.ones(B, 1, 5, 5, dtype=torch.bool)
    packed = call(mask=mask, cu_seq_lens_q=torch.tensor([0, 2, 5]))[0][0]
    assert torch.equal(packed, call(mask=mask)[0][0])
    (got, _), x = call(position_ids=torch.tensor([[0, 1, 0, 1, 2]]), cu_seq_lens_q=torch.tensor([0, 2, 5]))
    apart = headwise.Causal() & headwise.Document.from_lengths([2, 3])
    assert torch.equal(got, headwise.attention(*x, mask=apart).transpose(1, 2))


def test_registering_again_and_under_other_names():
    huggingface.register()
    huggingface.register("headwise_too")
    interface = transformers.AttentionInterface()
    assert interface["headwise"] is interface["headwise_too"] is huggingface.kernel
    for name in ("eager", "sdpa"):
        with pytest.raises(UnsupportedError, match=f"already has an attention implementation '{name}'"):
            huggingface.register(name)


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'headwise\[transformers\]'"):
        huggingface.register()


@pytest.mark.parametrize("version", ["5.2.0", "4.57.6", "5.0.0.dev0"])
def test_an_old_transformers_is_refused(monkeypatch, version):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(ImportError, match=rf"needs transformers 5.3 or newer, not {version}; run: pip install -U"):
        huggingface.register()


def test_importing_does_not_import_transformers():
    import subprocess

    code = "import sys, headwise.convert; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_documents_found_once_are_found_again_after_a_write():
    """All layers ask about the same tensors, so the answer stays with them, until they hold other numbers."""
    positions = torch.tensor([[0, 1, 0, 1, 2]])
    for lengths in ([2, 3], [3, 2], [5]):
        positions.copy_(torch.cat([torch.arange(n) for n in lengths])[None])
        for _ in range(2):
            (got, _), x = call(position_ids=positions)
            apart = headwise.Causal() & headwise.Document.from_lengths(lengths)
            assert torch.equal(got, headwise.attention(*x, mask=apart).transpose(1, 2))
    with torch.inference_mode():  # whose tensors do not count what is written into them
        for lengths in ([2, 3], [3, 2]):
            own = torch.cat([torch.arange(n) for n in lengths])[None]
            (got, _), x = call(position_ids=own)
            apart = headwise.Causal() & headwise.Document.from_lengths(lengths)
            assert torch.equal(got, headwise.attention(*x, mask=apart).transpose(1, 2))


def test_models_that_would_misread_the_masks_are_refused():
    """Their own code adds a boolean mask to the scores, or hides nothing where there is none."""
    from transformers import BloomConfig, BloomForCausalLM, MPNetConfig, MPNetModel

    ids = torch.arange(6)[None]
    bloom = BloomConfig(hidden_size=32, n_head=4, n_layer=2, vocab_size=50)
    mpnet = MPNetConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=32, vocab_size=50)
    # the older MPNet made its own masks
    for kind, config in ((BloomForCausalLM, bloom), *(() if OLD else ((MPNetModel, mpnet),))):
        model = kind._from_config(config, attn_implementation="headwise")
        with pytest.raises(headwise.UnsupportedError, match="compute attention by code of their own"):
            model(input_ids=ids, attention_mask=torch.tensor([[1, 1, 1, 1, 0, 0]]))


@torch.no_grad()
def test_models_that_take_the_choice_of_attention_are_not_refused():
    """Names that a module imports are not its own attention, nor are those of another model of the same package."""
    from transformers import Data2VecTextConfig, Data2VecTextModel, PaliGemmaConfig
    from transformers.models.data2vec import modeling_data2vec_vision
    from transformers.models.paligemma import modeling_paligemma

    assert "ALL_ATTENTION_FUNCTIONS" not in vars(modeling_data2vec_vision) | vars(modeling_paligemma)
    for config in (Data2VecTextConfig, PaliGemmaConfig):
        huggingface_masks._refuse_deaf(config)
    config = Data2VecTextConfig(
        hidden_size=24, num_attention_heads=3, num_hidden_layers=1, intermediate_size=24, vocab_size=50
    )
    model = Data2VecTextModel._from_config(config, attn_implementation="headwise").eval()
    ids, mask = torch.arange(6)[None] + 3, torch.tensor([[1, 1, 1, 1, 0, 0]])
    got = model(input_ids=ids, attention_mask=mask).last_hidden_state[:, :4]
    near = run(model, "eager", {"input_ids": ids[:, :4]}).last_hidden_state
    want = run(copy.deepcopy(model).double(), "eager", {"input_ids": ids[:, :4]}).last_hidden_state
    assert_as_good_as(got, want, near, terms=24)


@torch.no_grad()
def test_layers_that_share_keys_and_a_few_logits():
    """Gemma 4 cuts its queries to those whose logits are wanted, behind the mask."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if not hasattr(transformers, "Gemma4ForCausalLM"):
        pytest.skip("this transformers has no Gemma 4")
    config = transformers.Gemma4TextConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, global_head_dim=8, vocab_size=50,
        num_hidden_layers=4, intermediate_size=32, num_kv_shared_layers=2, sliding_window=4,
        hidden_size_per_layer_input=4, vocab_size_per_layer_input=50,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Gemma4ForCausalLM._from_config(config, attn_implementation="eager").eval()
    ids = torch.randint(0, 50, (2, 9))
    double = copy.deepcopy(model).double()
    tokens = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    model.set_attn_implementation("headwise")
    for count in (1, 3):
        inputs = {"input_ids": ids, "logits_to_keep": count}
        got, near, want = (
            run(m, how, inputs).logits for m, how in ((model, "headwise"), (model, "eager"), (double, "eager"))
        )
        assert_as_good_as(got, want.double(), near, terms=32)
    model.set_attn_implementation("headwise")
    how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for cache in ({}, {"cache_implementation": "static", "disable_compile": True}):
        assert torch.equal(model.generate(ids, **how, **cache), tokens)


@pytest.mark.plain
@torch.no_grad()
def test_a_hole_begins_no_document_in_compiled_models():
    model = family("Llama")[0]
    real = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1, 1]])
    near, want = (run(m, "eager", {"input_ids": ROWS, "attention_mask": real}).logits for m in family("Llama"))
    model.set_attn_implementation("headwise")
    torch.compiler.reset()
    got = torch.compile(model, fullgraph=True, backend="eager")(input_ids=ROWS, attention_mask=real).logits
    assert_as_good_as(got[real.bool()], want[real.bool()], near[real.bool()], terms=48)


def test_documents_in_checkpoints_that_are_computed_again():
    """Reentrant checkpoints recompute with tensors that share the memory of a mask, but not its attributes."""
    real = torch.ones(2, 9, dtype=torch.long)
    real[0, :2] = 0
    for name in ("Bert", "GPT2", "Llama"):
        model, grads = copy.deepcopy(family(name)[0]).train(), []
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        more = {"use_cache": False} if name in DECODERS else {}
        for checkpointed in (False, True):
            if checkpointed:
                older = getattr(model, "gradient_checkpointing_enable", None)
                getattr(model, "activation_checkpointing_enable", older)({"use_reentrant": True})
            out = run(model, "headwise", {"input_ids": ROWS, "position_ids": PLACES, "attention_mask": real}, **more)
            output(out)[real.bool()].square().sum().backward()
            grads.append([p.grad for p in model.parameters()])
            model.zero_grad()
        for first, again in zip(*grads, strict=True):
            assert (first is None) == (again is None) and (first is None or torch.equal(first, again)), name


def test_positions_stay_as_they_were():
    positions = torch.tensor([[0, 1, 0, 1, 2]])
    call(position_ids=positions)
    assert not vars(positions)
    torch.save(positions, file := io.BytesIO())
    file.seek(0)
    assert torch.equal(torch.load(file), positions)


@torch.no_grad()
def test_where_sequences_begin_is_not_lost_beside_a_mask():
    """A mask of padding or of a window, which transformers made, does not say where sequences begin."""
    ids, ends = torch.arange(9)[None] + 3, torch.tensor([0, 4, 9], dtype=torch.int32)
    packs = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 5, "max_length_k": 5}
    padded = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 0]])
    for name, more in (("Llama", {}), ("Llama", {"attention_mask": padded}), ("Mistral", {})):
        model = family(name)[0]
        with pytest.raises(headwise.UnsupportedError, match="packs 2 sequences into one row and no mask keeps them"):
            run(model, "headwise", {"input_ids": ids, **more}, **packs)
        places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
        run(model, "headwise", {"input_ids": ids, "position_ids": places, **more}, **packs)


def test_learned_queries_of_one_row():
    """The queries of a Q-Former are one row for all rows of keys, which torch broadcasts."""
    module = Attention(is_causal=False)
    query, key, value = randn(1, 2, 3, 4), randn(5, 2, 7, 4, seed=1), randn(5, 2, 7, 4, seed=2)
    for q, k, v in ((query, key, value), (key, query, query)):
        got = huggingface.kernel(module, q, k, v, None)[0].transpose(1, 2)
        want, near = (
            torch.nn.functional.scaled_dot_product_attention(*(t.to(d).expand(5, -1, -1, -1) for t in (q, k, v)))
            for d in (torch.float64, torch.float32)
        )
        assert_as_good_as(got, want, near, terms=7)
