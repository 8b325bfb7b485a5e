"""swap and unswap: the same outputs and gradients, everything kept, and a report that says what stays and why."""

import copy
import io
import json
import sys

import pytest
import torch
from helpers import assert_as_good_as, randn
from torch import nn
from torch.nn.utils import prune

import headwise
from benchmarks import models
from headwise import ConversionError, MultiHeadAttention
from headwise.convert import huggingface
from headwise.convert.dropin import MultiheadAttention
from headwise.convert.swap import Report, swap, unswap

swapping = sys.modules["headwise.convert.swap"]  # the function may have taken the module's name in the package
NOTE = "Make optimizers after the swap: the projections of nn.MultiheadAttention are new parameters."
E, H, V = 20, 4, 61  # an even number of heads, which the fast path of nn.MultiheadAttention asks for


class ViTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(E), nn.LayerNorm(E)
        self.attn = nn.MultiheadAttention(E, H, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(E, 37), nn.GELU(), nn.Linear(37, E))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A vision transformer as people write it: patches by a convolution, a class token, learned positions."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, E, 5, 5)
        self.cls, self.positions = nn.Parameter(torch.randn(1, 1, E)), nn.Parameter(torch.randn(1, 10, E))
        self.blocks = nn.Sequential(ViTBlock(), ViTBlock())
        self.head = nn.Linear(E, 7)

    def forward(self, images):
        x = self.patches(images).flatten(2).mT
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.blocks(x)[:, 0])


def lengths(count, tokens):
    return torch.arange(tokens) < torch.tensor([tokens, tokens - 3, 2])[:count, None]


class Padded(nn.Module):
    """An encoder and its padding mask; what it gives at real tokens."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(E, H, 37, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x):
        real = lengths(*x.shape[:2])
        return self.encoder(x, src_key_padding_mask=~real)[real]


class Translator(nn.Module):
    """``nn.Transformer``, tokens before the batch, with a causal mask and padding."""

    def __init__(self):
        super().__init__()
        self.core = nn.Transformer(E, H, 1, 2, 37, dropout=0.0)

    def forward(self, source, target):
        hides, later = ~lengths(source.shape[1], source.shape[0]), torch.ones(5, 5, dtype=torch.bool).triu(1)
        return self.core(
            source,
            target,
            tgt_mask=later,
            src_key_padding_mask=hides,
            memory_key_padding_mask=hides,
            tgt_is_causal=True,
        )


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        self.bert = transformers.BertModel(transformers.BertConfig(**BERT))

    def forward(self, ids):
        real = lengths(*ids.shape)
        return self.bert(input_ids=ids, attention_mask=real.long()).last_hidden_state[real]


class GPT2(nn.Module):
    def __init__(self):
        super().__init__()
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        self.gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT))

    def forward(self, ids):
        real = lengths(*ids.shape)
        return self.gpt(input_ids=ids, attention_mask=real.long()).logits[real]


BERT = {
    "vocab_size": V,
    "hidden_size": E,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "intermediate_size": 37,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.2,
}
GPT = {
    "vocab_size": V,
    "n_embd": E,
    "n_layer": 2,
    "n_head": H,
    "n_positions": 16,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tokens(*shape):
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(0))


# the model, its inputs, and how many attentions are swapped
MODELS = {
    "ViT": (ViT, (randn(3, 3, 15, 15),), 2),
    "encoder": (Padded, (randn(3, 7, E),), 2),
    "nn.Transformer": (Translator, (randn(7, 3, E), randn(5, 3, E, seed=1)), 5),
    "BERT": (Bert, (tokens(3, 7),), 2),
    "GPT-2": (GPT2, (tokens(3, 7),), 2),
}
every_model = pytest.mark.parametrize("name", MODELS)


def made(name, dtype=torch.float32):
    torch.manual_seed(0)
    build, inputs, _ = MODELS[name]
    model = build().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # biases are zeros at first, and would hide a swapped one
            parameter += 0.1 * torch.randn_like(parameter)
    return model, [x.to(dtype) if x.is_floating_point() else x for x in inputs]


def exactly(model, inputs):
    """The same in float64."""
    return copy.deepcopy(model).double(), [x.double() if x.is_floating_point() else x for x in inputs]


def drop_ins(model):
    return [part for part in model.modules() if type(part) is MultiheadAttention]


@every_model
@pytest.mark.parametrize("gradients", (False, True), ids=("no_grad", "gradients"))
def test_outputs_before_and_after(name, gradients):
    model, inputs = made(name)
    model.eval()
    exact, wide = exactly(model, inputs)
    with torch.set_grad_enabled(gradients):
        before, want = model(*inputs), exact(*wide)
        report = swap(model)
        assert len(report.swapped) == MODELS[name][2] and not report.left and "not checked" not in str(report)
        assert_as_good_as(model(*inputs), want.detach(), before, terms=37, what="swapped")
        back = unswap(model)
        assert not drop_ins(model) and len(back.swapped) == (MODELS[name][2] if drop_in_model(name) else 1)
        assert model(*inputs).equal(before)


def drop_in_model(name):
    return name not in ("BERT", "GPT-2")


@every_model
def test_gradients_in_training(name):
    model, inputs = made(name)
    exact, wide = exactly(model, inputs)
    grads = {}
    for key, (one, given) in {"want": (exact, wide), "before": (model, inputs), "after": (model, inputs)}.items():
        one.train().zero_grad()
        if key == "after":
            swap(one)
        out = one(*given)
        out.backward(randn(*out.shape, seed=3, dtype=out.dtype))
        if key == "after":
            unswap(one)  # gives the packed parameters the gradients of their parts
        grads[key] = {n: p.grad for n, p in one.named_parameters() if p.grad is not None}
    assert grads["after"].keys() == grads["want"].keys()
    most = max(want.abs().max().item() for want in grads["want"].values())
    for n, want in grads["want"].items():
        got, before = grads["after"][n], grads["before"][n]
        # a key's bias moves all scores of a query alike: its gradient is what rounding leaves of others'
        inner = most if want.abs().max() < 1e-12 * most else 0.0
        assert_as_good_as(got, want, before, terms=37, inner=inner, what=n)


@every_model
@pytest.mark.parametrize("training", (True, False), ids=("train", "eval"))
def test_state_dicts_keep_names_and_values(name, training):
    model = made(name)[0].train(training)
    old = {key: value.clone() for key, value in model.state_dict().items()}
    swap(model)
    new = model.state_dict()
    assert list(new) == list(old) and all(new[key].equal(old[key]) for key in old)
    assert all(part.training == training for part in model.modules())
    other, _ = made(name)
    other.load_state_dict(new)  # what was trained with headwise goes into stock
    for key in old:
        assert other.state_dict()[key].equal(old[key])
    zeros = {key: torch.zeros_like(value) for key, value in old.items()}
    model.load_state_dict(zeros)
    model.load_state_dict(old)
    unswap(model)
    assert list(model.state_dict()) == list(old) and all(model.state_dict()[key].equal(old[key]) for key in old)
    assert all(part.training == training for part in model.modules())


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16, torch.float16), ids=str)
def test_dtypes(dtype):
    model, inputs = made("ViT", dtype)
    exact, wide = exactly(model, inputs)
    plain = copy.deepcopy(model).float()(inputs[0].float())
    with torch.no_grad():
        before, want = model(*inputs), exact(*wide)
        swap(model)
        got = model(*inputs)
    assert {p.dtype for p in model.parameters()} == {dtype} and got.dtype == dtype
    assert_as_good_as(got, want, plain if dtype == torch.float64 else before, terms=37, what="swapped")


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_weights_that_make_rounding_large_are_no_fault(dtype):
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(E, H, batch_first=True, dtype=dtype)})
    with torch.no_grad():
        model.attn.in_proj_weight *= 100  # scores of some thousands, in which bfloat16 tells apart what differs by 16
    assert swap(model).swapped == {"attn": "nn.MultiheadAttention → headwise"}


@pytest.mark.parametrize(
    "options",
    (
        {"kdim": 11, "vdim": 13},
        {"bias": False},
        {"add_bias_kv": True},
        {"add_zero_attn": True, "batch_first": True},
        {"dropout": 0.25},
    ),
    ids=str,
)
def test_settings(options):
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(E, H, **options)})
    stock, old = model["attn"], copy.deepcopy(model.state_dict())
    assert swap(model).swapped == {"attn": "nn.MultiheadAttention → headwise"}
    unswap(model)
    assert type(model["attn"]) is nn.MultiheadAttention and list(model.state_dict()) == list(old)
    for name in ("embed_dim", "num_heads", "kdim", "vdim", "batch_first", "dropout", "add_zero_attn"):
        assert getattr(model["attn"], name) == getattr(stock, name)


def test_what_is_frozen_stays_frozen():
    model, _ = made("ViT")
    model.blocks[0].attn.requires_grad_(False)
    model.blocks[1].attn.out_proj.requires_grad_(False)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    swap(model)
    assert not any(p.requires_grad for p in model.blocks[0].attn.parameters())
    assert {n for n, p in model.blocks[1].attn.named_parameters() if not p.requires_grad} == {
        "out_proj.weight",
        "out_proj.bias",
    }
    unswap(model)
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == frozen


def test_hooks_move_and_are_not_called_by_the_check():
    model, inputs = made("ViT")
    calls = []
    attn = model.blocks[0].attn
    handles = [
        attn.register_forward_pre_hook(lambda *a: calls.append("before")),
        attn.register_forward_hook(lambda *a: calls.append("after")),
        attn.register_forward_hook(lambda m, a, options, out: calls.append(options["need_weights"]), with_kwargs=True),
        attn.register_full_backward_hook(lambda *a: calls.append("backward")),
        model.blocks[0].register_forward_hook(lambda *a: calls.append("block")),
    ]
    want = ["before", "after", False, "block", "backward"]
    model(*inputs).sum().backward()
    assert calls == want
    for change in (swap, unswap):
        calls.clear()
        change(model)
        assert not calls
        model(*inputs).sum().backward()
        assert calls == want
    swap(model)
    for handle in handles:
        handle.remove()
    calls.clear()
    model(*inputs).sum().backward()
    assert not calls


def test_hooks_of_a_model_of_transformers_are_not_called_by_the_check():
    model, _ = made("BERT")
    calls = []
    for part in model.modules():
        part.register_forward_hook(lambda *a: calls.append(a))
    swap(model)
    assert not calls and all(len(part._forward_hooks) == 1 for part in model.modules())


def test_what_somebody_set_on_a_module_stays_on_it():
    model, _ = made("ViT")
    model.blocks[0].attn.layer_index = 5
    swap(model)
    assert model.blocks[0].attn.layer_index == 5
    model.blocks[0].attn.layer_index = 6
    unswap(model)
    assert model.blocks[0].attn.layer_index == 6 and not any(hasattr(p, swapping.BEFORE) for p in model.modules())


def test_a_module_that_occurs_twice_stays_one():
    attn = nn.MultiheadAttention(E, H)
    model = nn.ModuleDict({"a": nn.ModuleList([attn, attn]), "b": nn.ModuleDict({"c": attn})})
    report = swap(model)
    assert report.swapped == {"a.0": "nn.MultiheadAttention → headwise"}
    assert model.a[0] is model.a[1] is model.b.c and type(model.a[0]) is MultiheadAttention
    unswap(model)
    assert model.a[0] is model.a[1] is model.b.c and type(model.a[0]) is nn.MultiheadAttention


@pytest.mark.parametrize("padded", (False, True))
def test_the_fast_path_of_encoder_layers_does_not_pass_it_by(padded, monkeypatch):
    model, (x,) = made("encoder")
    model.eval()
    swap(model)
    calls = []
    forward = MultiheadAttention.forward
    monkeypatch.setattr(MultiheadAttention, "forward", lambda *a, **o: calls.append(a) or forward(*a, **o))
    with torch.no_grad():
        model(x) if padded else model.encoder(x)
    assert len(calls) == 2


def test_padding_tokens_of_an_encoder_are_zeros_as_before(monkeypatch):
    model, (x,) = made("encoder")
    encoder, real = model.encoder.eval(), lengths(3, 7)
    with torch.no_grad():
        before = encoder(x, src_key_padding_mask=~real)
        assert swap(encoder).notes == (NOTE,) and encoder.use_nested_tensor
        rows, attend = [], MultiheadAttention._attend
        monkeypatch.setattr(MultiheadAttention, "_attend", lambda *a: rows.append(a[1].shape[:2]) or attend(*a))
        after = encoder(x, src_key_padding_mask=~real)
    assert (before[~real] == 0).all() and (after[~real] == 0).all()
    assert_as_good_as(after, before.double(), terms=E, inner=before.norm().item() / before.numel() ** 0.5)
    assert rows == [(1, int(real.sum()))] * 2  # one row of the real tokens alone


def test_copies_and_files_can_be_unswapped():
    model, inputs = made("encoder")
    model = nn.ModuleDict({"bert": made("BERT")[0], "encoder": model}).eval()
    before = model.encoder(*inputs)
    swap(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert len(drop_ins(other)) == 2 and other.bert.bert.config._attn_implementation == "headwise"
        unswap(other)
        assert not drop_ins(other) and other.bert.bert.config._attn_implementation == "sdpa"
        assert other.encoder(*inputs).equal(before) and other.encoder.encoder.use_nested_tensor
    assert len(drop_ins(model)) == 2


def test_an_optimizer_made_afterwards_trains_as_before():
    (stock, inputs), (model, _) = made("ViT"), made("ViT")
    exact, wide = exactly(stock, inputs)
    swap(model)
    for one, given in ((stock, inputs), (model, inputs), (exact, wide)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            one(*given).square().mean().backward()
            optimizer.step()
    unswap(model)
    for name, got in model.state_dict().items():
        assert_as_good_as(got, exact.state_dict()[name], stock.state_dict()[name], terms=37, what=name)


def test_an_optimizer_made_before_is_warned_of():
    model, _ = made("ViT")
    others = torch.optim.SGD(model.head.parameters()), torch.optim.Adam(made("ViT")[0].parameters())
    swap(model)
    unswap(model)  # no word: these have no parameter that goes
    for change in (swap, unswap):
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.warns(UserWarning, match=r"headwise: an optimizer \(AdamW\) has parameters of nn.Multi") as caught:
            change(model)
        assert len(caught) == 1
        del optimizer
    assert others


def test_it_draws_no_random_numbers_and_leaves_no_gradients():
    model = nn.ModuleList([made("ViT")[0], made("BERT")[0]])
    state = torch.get_rng_state()
    with torch.inference_mode():
        swap(model)
    assert torch.get_rng_state().equal(state)
    assert all(p.grad is None and not p.is_inference() and p.requires_grad for p in model.parameters())
    with torch.inference_mode():
        unswap(model)
    assert torch.get_rng_state().equal(state)
    assert all(p.grad is None and not p.is_inference() and p.requires_grad for p in model.parameters())


# what stays


class Mine(nn.MultiheadAttention):
    """A subclass may compute anything."""


class HandWritten(nn.Module):
    def __init__(self, names="q_lin k_lin v_lin out_lin"):
        super().__init__()
        for name in names.split():
            self.add_module(name, nn.Linear(E, E))


class GatedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.inner = nn.Linear(E, E), ScaledAttention()


class ScaledAttention(nn.Module):
    """Without weights: only a formula."""


class DistributedDataParallel(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def attention(change):
    attn = nn.MultiheadAttention(E, H)
    return change(attn) or attn


def with_shared_weights():
    model = nn.ModuleList([nn.MultiheadAttention(E, H), nn.MultiheadAttention(E, H)])
    model[1].in_proj_weight = model[0].in_proj_weight
    return model


def compiled(attn):
    attn._compiled_call_impl = attn._call_impl  # as compile() sets it


def replaced(attn):
    attn.forward = lambda *a, **o: (a[0], None)


LEFT = {
    "a subclass": (lambda: Mine(E, H), "Mine is a subclass of nn.MultiheadAttention and may compute something else"),
    "parametrised": (
        lambda: attention(lambda a: nn.utils.parametrizations.weight_norm(a, "in_proj_weight")),
        "ParametrizedMultiheadAttention is a subclass of",
    ),
    "pruned": (
        lambda: attention(lambda a: prune.l1_unstructured(a, "in_proj_weight", 0.5)),
        "its MultiheadAttention is changed: in_proj_weight_orig, in_proj_weight_mask",
    ),
    "a pruned output": (
        lambda: attention(lambda a: prune.l1_unstructured(a.out_proj, "weight", 0.5) and None),
        "its NonDynamicallyQuantizableLinear is changed: weight_orig, weight_mask",
    ),
    "another output": (
        lambda: attention(lambda a: setattr(a, "out_proj", nn.Bilinear(E, E, E))),
        "its Bilinear is changed: another class",
    ),
    "a part of its own": (
        lambda: attention(lambda a: a.register_parameter("scale", nn.Parameter(torch.ones(1)))),
        "its MultiheadAttention is changed: scale",
    ),
    "another forward": (
        lambda: attention(replaced),
        "MultiheadAttention is not nn.MultiheadAttention, or has a forward",
    ),
    "compiled": (lambda: attention(compiled), "it was compiled; swap before compile()"),
    "hooks of its state": (
        lambda: attention(lambda a: a.register_state_dict_pre_hook(lambda *x: None) and None),
        "it has hooks of its state dict, which would see other names",
    ),
    "other tensors": (
        lambda: attention(lambda a: setattr(a, "in_proj_bias", nn.Parameter(Tagged(torch.zeros(3 * E))))),
        "its in_proj_bias is a Tagged",
    ),
    "headwise": (lambda: MultiheadAttention(E, H), "headwise already"),
    "our layer": (lambda: MultiHeadAttention(E, H), "headwise already"),
    "hand-written": (
        HandWritten,
        "HandWritten is not known; headwise.convert.textbook.load reads its weights",
    ),
    "hand-written, of unknown names": (
        lambda: HandWritten("q_proj k_proj v_proj proj"),
        "HandWritten is not known; build a headwise.MultiHeadAttention and load its weights by hand",
    ),
    "by its name": (
        GatedAttention,
        "GatedAttention is not known; build a headwise.MultiHeadAttention and load its weights by hand",
    ),
}


class Tagged(torch.Tensor):
    """A tensor of another class, such as those that quantise or shard."""


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name):
    build, why = LEFT[name]
    model = nn.ModuleDict({"block": nn.ModuleDict({"attn": build()}), "known": nn.MultiheadAttention(E, H)})
    there = model.block.attn
    report = swap(model)
    assert report.left.keys() == {"block.attn"} and report.left["block.attn"].startswith(why)
    assert report.swapped == {"known": "nn.MultiheadAttention → headwise"}
    assert model.block.attn is there
    unswap(model)
    assert model.block.attn is there


def test_shared_weights_are_left():
    report = swap(with_shared_weights())
    assert report.left == dict.fromkeys("01", "its in_proj_weight is shared: 0.in_proj_weight, 1.in_proj_weight")
    assert report.notes == ("Nothing was swapped.",)


def test_a_wrapped_model_is_left():
    model = DistributedDataParallel(nn.Sequential(nn.MultiheadAttention(E, H)))
    assert swap(model).left == {"module.0": "DDP or FSDP has its parameters already; swap before the model is wrapped"}


def test_the_model_itself_is_left():
    report = swap(nn.MultiheadAttention(E, H))
    why = "it is the model itself; call headwise.convert.torch.MultiheadAttention.from_stock(model)"
    assert report.left == {"": why} and not report.swapped
    assert str(report) == f"1 left:\n  (the model)  {why}\nNothing was swapped."


def test_lora_that_was_put_on_before_is_left():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(made("ViT")[0], peft.LoraConfig(target_modules=["attn"], r=2))
    report = swap(model)
    assert set(report.left.values()) == {
        "peft has wrapped it and reads its weights; swap first, and put LoRA on its projections then"
    }
    assert len(report.left) == 2 and not report.swapped


def test_a_model_without_attention():
    report = swap(nn.Sequential(nn.Linear(3, 3)))
    assert report == Report({}, {}, ("There is no attention here that headwise could take over.",))
    assert unswap(nn.Linear(3, 3)) == Report({}, {}, ("There is nothing here that swap has put in.",))


def test_a_second_swap_changes_nothing():
    model = nn.ModuleDict({"vit": made("ViT")[0], "bert": made("BERT")[0]})
    first = swap(model)
    parts = list(model.modules())
    again = swap(model)
    assert (
        not again.swapped
        and set(again.left.values()) == {"headwise already"}
        and again.notes == ("Nothing was swapped.",)
    )
    assert all(a is b for a, b in zip(parts, model.modules(), strict=True))
    assert len(first.swapped) == 4
    unswap(model)
    assert not drop_ins(model) and model.bert.bert.config._attn_implementation == "sdpa"


# transformers


def small(name, **options):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, OTHERS[name][0])(**OTHERS[name][1] | options)).eval()


VIT = {
    "hidden_size": E,
    "num_hidden_layers": 1,
    "num_attention_heads": H,
    "intermediate_size": 37,
    "image_size": 15,
    "patch_size": 5,
}
TEXT = {
    "vocab_size": V,
    "hidden_size": E,
    "num_hidden_layers": 1,
    "num_attention_heads": H,
    "intermediate_size": 37,
    "max_position_embeddings": 16,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
OTHERS = {
    "ViTModel": ("ViTConfig", VIT),
    "CLIPModel": ("CLIPConfig", {"text_config": TEXT, "vision_config": VIT, "projection_dim": 12}),
    "SiglipVisionModel": ("SiglipVisionConfig", VIT),
    "LlamaForCausalLM": ("LlamaConfig", TEXT | {"hidden_size": 24, "num_key_value_heads": 2}),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"vocab_size": V, "d_model": E, "d_kv": 5, "num_heads": H, "d_ff": 37, "num_layers": 1},
    ),
    "GPT2ForSequenceClassification": ("GPT2Config", GPT | {"pad_token_id": None}),
    "BertModel": ("BertConfig", BERT),
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        {
            "vocab_size": V,
            "d_model": E,
            "num_mel_bins": 3,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": H,
            "decoder_attention_heads": H,
            "encoder_ffn_dim": 37,
            "decoder_ffn_dim": 37,
            "max_source_positions": 11,
            "max_target_positions": 16,
            "pad_token_id": 1,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "decoder_start_token_id": 3,
        },
    ),
    "Wav2Vec2Model": (
        "Wav2Vec2Config",
        {
            "vocab_size": V,
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": H,
            "intermediate_size": 37,
            "conv_dim": (8, 8),
            "conv_kernel": (10, 4),
            "conv_stride": (5, 2),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 16,
        },
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_models_of_transformers_are_checked(name):
    model = small(name)
    report = swap(model)
    assert report.swapped and not report.left and "not checked" not in str(report)
    assert swapping._configs(model.config)[""]._attn_implementation == "headwise"
    unswap(model)
    assert {c._attn_implementation for c in swapping._configs(model.config).values()} == {"sdpa"}


def test_each_part_gets_back_what_it_had():
    model = small("CLIPModel")
    model.vision_model.set_attn_implementation("eager")
    had = swapping._implementations(model)
    assert set(had.values()) == {"sdpa", "eager"}
    swap(model)
    assert set(swapping._implementations(model).values()) == {"headwise"}
    unswap(model)
    assert swapping._implementations(model) == had


def test_an_implementation_chosen_since_stays():
    model = small("BertModel")
    swap(model)
    model.set_attn_implementation("eager")
    assert unswap(model) == Report({}, {"": "BertModel: eager was chosen since, and stays"})
    assert model.config._attn_implementation == "eager"


def test_on_the_meta_device_nothing_is_checked():
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(E, H), "bert": small("BertModel")}).to("meta")
    report = swap(model)
    assert set(report.swapped) == {"attn", "bert.encoder.layer.0.attention.self", "bert.encoder.layer.1.attention.self"}
    assert all(text.endswith("not checked: its weights are on the meta device") for text in report.swapped.values())


def test_an_observer_stays_where_it_is():
    model = small("BertModel")
    seen = []
    part = model.encoder.layer[0].attention.self
    part.observer = lambda *a: seen.append(a)
    swap(model)
    assert not seen and "observer" not in vars(model.encoder.layer[1].attention.self)
    model(tokens(2, 5))
    assert len(seen) == 1


# faults


@pytest.fixture
def wrong_kernel(monkeypatch):
    """An attention implementation "headwise" that forgets the mask."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    huggingface.register()
    table = transformers.AttentionInterface._global_mapping
    right = table["headwise"]

    def wrong(module, query, key, value, attention_mask, **options):
        return right(module, query, key, value, None, **options | {"is_causal": False})

    monkeypatch.setattr(huggingface, "register", lambda name: None)
    monkeypatch.setitem(table, "headwise", wrong)


def test_a_difference_in_a_drop_in_is_an_error_and_nothing_is_changed(monkeypatch):
    model, inputs = made("ViT")
    calls = []
    model.blocks[0].attn.register_forward_hook(lambda *a: calls.append(a))
    parts, parameters = list(model.modules()), list(model.parameters())
    forward = MultiheadAttention.forward

    def causal(self, query, key, value, **options):
        return forward(self, query, key, value, **options | {"is_causal": True})

    monkeypatch.setattr(MultiheadAttention, "forward", causal)
    with pytest.raises(
        ConversionError, match=r"With headwise blocks.0.attn is .* off in norm, and rounding in torch.float32"
    ):
        swap(model)
    same_as(model, parts, parameters)
    model(*inputs)
    assert len(calls) == 1
    monkeypatch.undo()
    assert len(swap(model).swapped) == 2


def test_a_difference_in_a_model_of_transformers_is_an_error_and_nothing_is_changed(wrong_kernel):
    model = nn.ModuleDict({"gpt": made("GPT-2")[0], "bert": made("BERT")[0], "attn": nn.MultiheadAttention(E, H)})
    parts, parameters = list(model.modules()), list(model.parameters())
    with pytest.raises(ConversionError, match=r"With headwise gpt\.gpt is .* off in norm"):
        swap(model)
    same_as(model, parts, parameters)
    assert model.gpt.gpt.config._attn_implementation == model.bert.bert.config._attn_implementation == "sdpa"
    assert "observer" not in vars(model.gpt.gpt.transformer.h[0].attn)


def same_as(model, parts, parameters):
    assert all(a is b for a, b in zip(parts, model.modules(), strict=True))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert not any(hasattr(part, swapping.BEFORE) for part in parts)
    assert all(part.training for part in parts if not isinstance(part, nn.ModuleDict))


def test_what_headwise_refuses_is_left_with_its_reason(monkeypatch):
    def refusing(*args, **options):
        raise headwise.UnsupportedError("The model passes odd= to its attention.\nMore.")

    model = nn.ModuleDict({"bert": small("BertModel"), "attn": nn.MultiheadAttention(E, H)})
    huggingface.register()
    table = pytest.importorskip(
        "transformers", reason="transformers is not installed"
    ).AttentionInterface._global_mapping
    monkeypatch.setattr(huggingface, "register", lambda name: None)
    monkeypatch.setitem(table, "headwise", refusing)
    report = swap(model)
    assert report.left == {"bert": "BertModel: The model passes odd= to its attention."}
    assert report.swapped.keys() == {"attn"} and model.bert.config._attn_implementation == "sdpa"
    assert unswap(model).left == {}


def test_an_old_transformers_is_a_reason(monkeypatch):
    def missing(name):
        raise ImportError("The plug-in needs transformers 5 or newer")

    monkeypatch.setattr(huggingface, "register", missing)
    model = small("BertModel")
    assert swap(model).left == {"": "BertModel: The plug-in needs transformers 5 or newer"}
    assert model.config._attn_implementation == "sdpa"


def test_a_model_in_which_rounding_decides_is_no_fault(monkeypatch):
    # such as one of experts in bfloat16: its own implementations differ as much
    monkeypatch.setattr(swapping, "_apart", lambda got, want: 10.0)
    assert len(swap(small("BertModel")).swapped) == 2


@pytest.mark.plain
def test_no_model():
    for change in (swap, unswap):
        with pytest.raises(ConversionError, match=r"A list is not a model; give an nn.Module."):
            change([nn.MultiheadAttention(E, H)])


def lora(attn):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"], r=2), attn)


REFUSED = {
    "an observer": (lambda a: setattr(a, "observer", print), "attn has an observer"),
    "hooks of its state": (lambda a: a.register_state_dict_pre_hook(print), "attn was given hooks of its state dict"),
    "compiled": (compiled, "attn was compiled or its forward replaced"),
    "another forward": (replaced, "attn was compiled or its forward replaced"),
    "frozen in part": (
        lambda a: a.q_proj.weight.requires_grad_(False),
        "attn has projections of which some train their weight and some not",
    ),
    "LoRA": (lora, "q_proj is "),
    "hooks": (lambda a: a.q_proj.register_forward_hook(print), "q_proj has hooks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_stock_cannot_be_is_refused_and_nothing_is_changed(name):
    change, why = REFUSED[name]
    model = nn.ModuleDict({"first": nn.MultiheadAttention(E, H), "attn": nn.MultiheadAttention(E, H)})
    swap(model)
    change(model.attn)
    parts = list(model.modules())
    with pytest.raises(ConversionError, match=f"^{why}"):
        unswap(model)
    assert all(a is b for a, b in zip(parts, model.modules(), strict=True))


def test_a_drop_in_alone_is_not_unswapped():
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(E, H)})
    swap(model)
    with pytest.raises(ConversionError, match="A drop-in that is the model itself cannot be replaced in place"):
        unswap(model.attn)


@pytest.mark.plain
def test_a_swapped_model_compiles():
    model, inputs = made("ViT")
    exact, wide = exactly(model, inputs)
    with torch.no_grad():
        before, want = model(*inputs), exact(*wide)
        swap(model)
        got = torch.compile(model, fullgraph=True, backend="eager")(*inputs)
    assert_as_good_as(got, want, before, terms=37, what="compiled")


@pytest.mark.plain
def test_the_benchmark_of_models_runs(tmp_path, capsys):
    pytest.importorskip("transformers", reason="transformers is not installed")
    path = tmp_path / "models.jsonl"
    status = models.main(["--quick", "--output", str(path)])
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert status == records[-1]["void"] and records[-1]["kind"] == "self" and not records[-1]["left_out"]
    measured = {(r["case"], r["competitor"]): r for r in records if r["kind"] == "measurement"}
    assert [r["not_timed"] for r in measured.values()] == [None] * 42 and len(measured) == 42
    for case in models.cases(quick=True):
        names = {name for found, name in measured if found == case.name}
        assert names >= ({"stock", "headwise", "headwise padded"} if case.is_ragged else {"stock", "headwise"})
    assert capsys.readouterr().out.count("model/bert+ragged") > 8


def test_the_benchmark_of_models_times_only_what_is_right(monkeypatch):
    monkeypatch.setattr(
        models, "swap", lambda model: [p.mul_(1.1) for p in model.parameters()] and Report({"": ""}, {})
    )
    with torch.no_grad():
        entries, _ = models.prepare(models.cases(quick=True)[0])
    assert entries["stock"]["not_timed"] is None
    assert entries["headwise"]["not_timed"].startswith("not equal, not timed: output: error")


def test_the_benchmark_of_models_refuses(tmp_path, capsys):
    (tmp_path / "there").touch()
    for given, why in (
        (["--cases", "no"], "No case is called 'no'"),
        (["--repeats", "2"], "2 repeats are too few"),
        (["--output", str(tmp_path / "there")], "exists already"),
    ):
        assert models.main(given) == 2 and why in capsys.readouterr().err
    assert models.main(["--list"]) == 0 and len(capsys.readouterr().out.split()) == len(models.cases())
    models.main(["--quick", "--seconds", "0"])
    assert f"Left out, as the time was over: {len(models.cases())} cases" in capsys.readouterr().out


@pytest.mark.plain
def test_function_transforms_of_a_swapped_layer():
    layer, x = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True).eval(), randn(2, 5, 12)

    def gradients(layer, x):
        def loss(p):
            return torch.func.functional_call(layer, p, (x,)).square().sum()

        return torch.func.grad(loss)(dict(layer.named_parameters()))

    want, near = gradients(copy.deepcopy(layer).double(), x.double()), gradients(layer, x)
    swap(layer)
    got = gradients(layer, x)
    got["self_attn.in_proj_weight"] = torch.cat([got[f"self_attn.{name}_proj.weight"] for name in "qkv"])
    for name in ("linear1.weight", "self_attn.in_proj_weight"):
        assert_as_good_as(got[name], want[name], near[name], terms=2 * 5 * 12)
