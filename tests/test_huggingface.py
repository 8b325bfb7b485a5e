"""The transformers plug-in against eager: hidden states, gradients, padding, caches, and what models hand over."""

import copy
import sys

import pytest
import torch
from helpers import assert_as_good_as, randn
from torch import nn

import headwise
from headwise import UnsupportedError
from headwise.convert import huggingface

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from transformers import masking_utils  # noqa: E402

V, B, T, PAD = 97, 3, 7, 2


@pytest.fixture(autouse=True)
def _registered():
    huggingface.register()


@pytest.fixture(scope="module")
def bert_base():
    """BERT of base size: 12 layers of 12 heads on 768 features, with random weights."""
    return made("BertForMaskedLM", "BertConfig", {"vocab_size": V})


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
@pytest.mark.parametrize("family", ["bert_base", "gpt2_base"])
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


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["no mask", "left"])
def test_generates_as_eager(gpt2, padding, cache):
    inputs, _ = batch("no mask")
    if padding == "left":
        real = torch.ones(B, T, dtype=torch.bool)
        real[1, :PAD] = real[2, : PAD + 1] = False
        inputs = {"input_ids": inputs["input_ids"].masked_fill(~real, 0), "attention_mask": real.long()}
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    options["no_repeat_ngram_size"] = 1  # or random weights answer with one token, which would compare nothing
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    found = []
    for model, name in ((gpt2[0], "headwise"), (gpt2[1], "eager"), (gpt2[0], "eager")):
        model.set_attn_implementation(name)
        found.append(model.generate(**inputs, **options, output_logits=True, return_dict_in_generate=True))
    assert torch.equal(found[0].sequences, found[1].sequences)
    for got, want, plain in zip(*(out.logits for out in found), strict=True):
        assert_as_good_as(got, want.double(), plain, terms=156)


def test_a_cache_filled_in_parts(gpt2):
    """Several queries after several cached keys: neither their first rows nor their shapes coincide."""
    inputs, real = batch("padded")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        _, want, plain = three(gpt2, inputs)
        gpt2[0].set_attn_implementation("headwise")
        first = gpt2[0](input_ids=ids[:, :4], attention_mask=mask[:, :4], use_cache=True)
        second = gpt2[0](input_ids=ids[:, 4:], attention_mask=mask, cache=first.cache, use_cache=True)
    got = torch.cat([first.logits, second.logits], 1)[real]
    assert_as_good_as(got, want.logits[real], plain.logits[real], terms=156)


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


# What each family adds: grouped heads, windows, a cap, sinks, biases, cross-attention, no mask at all.
FAMILIES = {
    "grouped heads": ("LlamaModel", "LlamaConfig", SMALL),
    "window": ("MistralModel", "MistralConfig", SMALL | {"sliding_window": 4}),
    "wide window": ("MistralModel", "MistralConfig", SMALL | {"sliding_window": 64}),
    "softcap": (
        "Gemma2Model", "Gemma2Config",
        SMALL | {"sliding_window": 4, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 8},
    ),
    "sinks": (
        "GptOssModel", "GptOssConfig",
        SMALL | {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1,
                 "experts_implementation": "eager"},
    ),
    "bidirectional window": (
        "ModernBertModel", "ModernBertConfig",
        SMALL | {"local_attention": 6, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "position bias and cross-attention": (
        "T5Model", "T5Config",
        {"vocab_size": V, "d_model": 48, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 6,
         "decoder_start_token_id": 0, "initializer_factor": 1.0},
    ),
}  # fmt: skip


# Not at the start: some of these models take softmax in float32 even in float64, where eager then answers NaN for a
# query that sees nothing, and so for all that follow.
@pytest.mark.parametrize("padding", ["no mask", "padded at the end"])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_families(family, padding):
    models = made(*FAMILIES[family])
    inputs, real = batch(padding)
    if family.startswith("position bias"):
        inputs, real = {**inputs, "decoder_input_ids": inputs["input_ids"][:, :5]}, torch.ones(B, 5, dtype=torch.bool)
    with torch.no_grad():
        got, want, plain = (out[0][real] for out in three(models, inputs))
    assert_as_good_as(got, want.double(), plain, terms=48)


def test_images_without_a_mask():
    options = {"image_size": 12, "patch_size": 4, "hidden_size": 48, "num_hidden_layers": 2}
    models = made("ViTModel", "ViTConfig", options | {"num_attention_heads": 6, "intermediate_size": 40})
    with torch.no_grad():
        assert_as_good_as(*(out[0] for out in three(models, {"pixel_values": randn(B, 3, 12, 12)})), terms=48)


def test_packed_sequences_stay_apart():
    """Positions that begin again tell transformers where a sequence begins; its mask tells the kernel."""
    models = made(*FAMILIES["grouped heads"])
    ids = batch("no mask")[0]["input_ids"]
    inputs = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]]).expand(B, -1)}
    with torch.no_grad():
        got, want, plain = (out[0] for out in three(models, inputs, use_cache=False))
        alone = run(models[1], "eager", {"input_ids": ids[:, 3:]}, use_cache=False)[0]
    assert_as_good_as(got, want.double(), plain, terms=48)
    assert_as_good_as(got[:, 3:], alone.double(), plain[:, 3:], terms=48)


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
        ({"cu_seq_lens_q": torch.tensor([0, 2, 5])}, "cu_seq_lens_q packs 2 sequences"),
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


def test_importing_does_not_import_transformers():
    import subprocess

    code = "import sys, headwise.convert; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
