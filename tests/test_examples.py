"""The Transformer of examples/ against the modules of torch and transformers, with the same weights."""

import copy
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import assert_as_good_as, randn
from torch import nn
from torch.nn import functional as F

from examples.transformer import Decoder, DecoderLayer, Encoder, EncoderLayer, Residual, Transformer
from headwise import Causal, DynamicCache, FixedCache, Full, Mask, MultiHeadAttention, Padding, Positions
from headwise.algebra import evaluate

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")

B, T, S, E, H, HIDDEN, N = 3, 7, 11, 15, 3, 23, 2
SOURCE, TARGET = torch.tensor([11, 6, 1]), torch.tensor([7, 2, 5])  # real tokens of each row
ROOT = Path(__file__).parents[1]
ORDERS = pytest.mark.parametrize("norm_first", [False, True], ids=["post norm", "pre norm"])
ACTIVATIONS = pytest.mark.parametrize("activation", [F.relu, F.gelu], ids=["relu", "gelu"])

ENCODER = {
    "self_attn": "self_attention",
    "norm1": "around_self_attention.norm",
    "linear1": "feed_forward.hidden_proj",
    "linear2": "feed_forward.out_proj",
    "norm2": "around_feed_forward.norm",
}
DECODER = ENCODER | {
    "multihead_attn": "cross_attention",
    "norm2": "around_cross_attention.norm",
    "norm3": "around_feed_forward.norm",
}
BERT = {
    "attention.self.query": "self_attention.q_proj",
    "attention.self.key": "self_attention.k_proj",
    "attention.self.value": "self_attention.v_proj",
    "attention.output.dense": "self_attention.out_proj",
    "attention.output.LayerNorm": "around_self_attention.norm",
    "intermediate.dense": "feed_forward.hidden_proj",
    "output.dense": "feed_forward.out_proj",
    "output.LayerNorm": "around_feed_forward.norm",
}
GPT2 = {
    "ln_1": "around_self_attention.norm",
    "attn.c_attn": "self_attention.in_proj",
    "attn.c_proj": "self_attention.out_proj",
    "ln_2": "around_feed_forward.norm",
    "mlp.c_fc": "feed_forward.hidden_proj",
    "mlp.c_proj": "feed_forward.out_proj",
}


def as_ours(theirs, names):
    """Weights or gradients under the names and in the shapes of the example."""
    found = {}
    for name, tensor in theirs.items():
        stack, name = re.fullmatch(r"((?:encoder\.|decoder\.)?(?:layers\.\d+\.)?)(.*)", name).groups()
        path, kind = name.replace("in_proj_", "in_proj.").rsplit(".", 1)
        table = names.get(stack.split(".")[0], names)
        head = next((head for head in table if path == head or path.startswith(head + ".")), path)
        path = stack + table.get(head, head) + path[len(head) :]
        tensor = tensor.mT if names is GPT2 and tensor.dim() == 2 else tensor  # a Conv1D has (in, out)
        if path.endswith("in_proj"):
            for letter, third in zip("qkv", tensor.chunk(3), strict=True):
                found[f"{path.removesuffix('in_proj')}{letter}_proj.{kind}"] = third
        else:
            found[f"{path}.{kind}"] = tensor
    return found


def filled(module):
    """The module with weights of which none are zero, and norms that do not only divide; in float64."""
    module = module.double().train()
    with torch.no_grad():
        for i, (name, parameter) in enumerate(module.named_parameters()):
            one = 1.0 if "norm" in name.lower() or "ln_" in name else 0.0
            one = one if name.endswith("weight") else 0.0
            scale = 0.2 if parameter.dim() == 1 else E**-0.5 if parameter.shape[0] < 100 else 100**-0.5
            parameter.copy_(one + randn(*parameter.shape, seed=i, scale=scale))
    return module


def run(module, call, inputs, dtype):
    """Output and gradients of a module in a dtype, as the call of it has them; dropout is 0 in all of them."""
    module = copy.deepcopy(module).to(dtype)
    module.zero_grad()
    inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out = call(module, *inputs)
    (out * randn(*out.shape, seed=9, dtype=dtype)).sum().backward()
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    return out.detach(), grads, [x.grad for x in inputs]


def check(ours, our_call, theirs, their_call, inputs, names, hidden=HIDDEN):
    """Outputs, gradients of every parameter and of the inputs are theirs."""
    theirs = filled(theirs)
    ours = ours.double()
    ours.load_state_dict(as_ours(theirs.state_dict(), names))
    want, want_grads, want_inputs = run(theirs, their_call, inputs, torch.float64)
    assert want.isfinite().all()
    want_grads = as_ours(want_grads, names)
    largest = max(grad.abs().max().item() for grad in want_grads.values())
    for dtype in (torch.float64, torch.float32):
        got, grads, input_grads = run(ours, our_call, inputs, dtype)
        plain, plain_grads, plain_inputs = run(theirs, their_call, inputs, dtype)
        plain_grads = as_ours(plain_grads, names)
        assert_as_good_as(got, want, plain, terms=hidden, what=f"output in {dtype}")
        assert grads.keys() == want_grads.keys()
        for name, grad in grads.items():
            # sums over all tokens, which cancel: the gradient of a key bias is zero by algebra
            options = {"terms": B * T * hidden, "inner": largest, "what": f"{name} in {dtype}"}
            assert_as_good_as(grad, want_grads[name], plain_grads[name], **options)
        for grad, wanted, plainly in zip(input_grads, want_inputs, plain_inputs, strict=True):
            assert_as_good_as(grad, wanted, plainly, terms=B * T * hidden, inner=largest, what=f"inputs in {dtype}")


def hides(lengths, count):
    """A boolean mask of torch's modules: True at padding."""
    return torch.arange(count) >= lengths[:, None]


def later(count):
    return torch.ones(count, count, dtype=torch.bool).triu(1)


def added(mask, rows, slots):
    """The mask as transformers' own attention takes it: a number to add to each score."""
    return torch.zeros(B, 1, rows, slots).masked_fill(~allowed(mask, rows, slots), torch.finfo(torch.float32).min)


def allowed(mask, rows, slots):
    call = (B, 1, Positions(rows), Positions(slots))
    return evaluate(mask.bind(*call), *call).expand(B, 1, rows, slots)


def tokens(count, embed_dim=E, seed=1):
    return randn(B, count, embed_dim, seed=seed, dtype=torch.float64)


def stock(**options):
    """What torch's modules and the example take alike, in the words of each."""
    theirs = {"dim_feedforward": HIDDEN, "dropout": 0.0, "batch_first": True}
    ours = {"hidden_dim": HIDDEN}
    for name, value in options.items():
        theirs["layer_norm_eps" if name == "norm_eps" else name] = value
        ours[name] = value
    return theirs, ours


MASKS = {
    "no mask": (Full(), {}),
    "padding": (Padding(SOURCE), {"src_key_padding_mask": hides(SOURCE, S)}),
    "causal": (Causal(), {"src_mask": later(S)}),
    "causal and padding": (
        Causal() & Padding(SOURCE),
        {"src_mask": later(S), "src_key_padding_mask": hides(SOURCE, S)},
    ),
}


@ACTIVATIONS
@ORDERS
@pytest.mark.parametrize("kind", MASKS)
def test_encoder_layer(kind, norm_first, activation):
    theirs, ours = stock(norm_first=norm_first, activation=activation)
    mask, masks = MASKS[kind]
    check(
        EncoderLayer(E, H, **ours),
        lambda layer, x: layer(x, mask=mask),
        nn.TransformerEncoderLayer(E, H, **theirs),
        lambda layer, x: layer(x, **masks),
        [tokens(S)],
        ENCODER,
    )


@pytest.mark.parametrize("options", [{"norm_eps": 0.1}, {"bias": False}, {"bias": False, "norm_first": True}], ids=str)
def test_norm_eps_and_bias(options):
    theirs, ours = stock(**options)
    x = [tokens(S), tokens(T, seed=2)]
    check(
        EncoderLayer(E, H, **ours),
        lambda layer, x: layer(x),
        nn.TransformerEncoderLayer(E, H, **theirs),
        lambda layer, x: layer(x),
        x[:1],
        ENCODER,
    )
    check(
        Transformer(E, H, N, final_norm=True, **ours),
        lambda model, source, target: model(source, target),
        nn.Transformer(E, H, N, N, **theirs),
        lambda model, source, target: model(source, target, tgt_mask=later(T)),
        x,
        {"encoder": ENCODER, "decoder": DECODER},
    )


@ACTIVATIONS
@ORDERS
@pytest.mark.parametrize("padded", [False, True], ids=["no padding", "padding"])
def test_decoder_layer(padded, norm_first, activation):
    theirs, ours = stock(norm_first=norm_first, activation=activation)
    masks = {"mask": Padding(TARGET), "memory_mask": Padding(SOURCE)} if padded else {}
    padding = {"tgt_key_padding_mask": hides(TARGET, T), "memory_key_padding_mask": hides(SOURCE, S)} if padded else {}
    check(
        DecoderLayer(E, H, **ours),
        lambda layer, x, memory: layer(x, memory, **masks),
        nn.TransformerDecoderLayer(E, H, **theirs),
        lambda layer, x, memory: layer(x, memory, tgt_mask=later(T), **padding),
        [tokens(T), tokens(S, seed=2)],
        DECODER,
    )


@ORDERS
@pytest.mark.parametrize("final_norm", [False, True], ids=["no final norm", "final norm"])
def test_stacks(final_norm, norm_first):
    theirs, ours = stock(norm_first=norm_first)
    ours["final_norm"] = final_norm
    norm = nn.LayerNorm(E) if final_norm else None
    check(
        Encoder(E, H, N, **ours),
        lambda stack, x: stack(x, mask=Padding(SOURCE)),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, **theirs), N, copy.deepcopy(norm)),
        lambda stack, x: stack(x, src_key_padding_mask=hides(SOURCE, S)),
        [tokens(S)],
        ENCODER,
    )
    check(
        Decoder(E, H, N, **ours),
        lambda stack, x, memory: stack(x, memory, mask=Padding(TARGET), memory_mask=Padding(SOURCE)),
        nn.TransformerDecoder(nn.TransformerDecoderLayer(E, H, **theirs), N, norm),
        lambda stack, x, memory: stack(
            x,
            memory,
            tgt_mask=later(T),
            tgt_key_padding_mask=hides(TARGET, T),
            memory_key_padding_mask=hides(SOURCE, S),
        ),
        [tokens(T), tokens(S, seed=2)],
        DECODER,
    )


@ORDERS
def test_whole(norm_first):
    theirs, ours = stock(norm_first=norm_first, activation=F.gelu)
    padding = hides(SOURCE, S)
    check(
        Transformer(E, H, N, final_norm=True, **ours),
        lambda model, source, target: model(source, target, source_mask=Padding(SOURCE), target_mask=Padding(TARGET)),
        nn.Transformer(E, H, N, N, **theirs),
        lambda model, source, target: model(
            source,
            target,
            tgt_mask=later(T),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_key_padding_mask=hides(TARGET, T),
        ),
        [tokens(S), tokens(T, seed=2)],
        {"encoder": ENCODER, "decoder": DECODER},
    )


def test_only_pre_norm_has_a_final_norm_by_itself():
    for stack in (Encoder, Decoder):
        assert isinstance(stack(E, H, 1).norm, nn.Identity)
        assert isinstance(stack(E, H, 1, norm_first=True).norm, nn.LayerNorm)


def theirs_alone(out):
    return out if isinstance(out, torch.Tensor) else out[0]  # some releases put it into a tuple


SIZES = {"small": (E, H, HIDDEN), "its own size": (768, 12, 3072)}


@pytest.mark.parametrize("padded", [False, True], ids=["no padding", "padding"])
@pytest.mark.parametrize("size", SIZES)
def test_bert_layer(size, padded):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.bert.modeling_bert import BertLayer

    embed_dim, heads, hidden = SIZES[size]
    config = transformers.BertConfig()
    if size == "small":
        config = transformers.BertConfig(hidden_size=embed_dim, num_attention_heads=heads, intermediate_size=hidden)
    assert (config.hidden_size, config.num_attention_heads, config.intermediate_size) == SIZES[size]
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    config._attn_implementation = "eager"
    mask = Padding(TARGET) if padded else Full()
    check(
        EncoderLayer(embed_dim, heads, hidden_dim=hidden, activation=F.gelu, norm_eps=config.layer_norm_eps),
        lambda layer, x: layer(x, mask=mask),
        BertLayer(config),
        lambda layer, x: theirs_alone(layer(x, added(mask, T, T).to(x.dtype))),
        [tokens(T, embed_dim)],
        BERT,
        hidden,
    )


@pytest.mark.parametrize("padded", [False, True], ids=["no padding", "padding"])
@pytest.mark.parametrize("size", SIZES)
def test_gpt2_block(size, padded):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    embed_dim, heads, hidden = SIZES[size]
    config = transformers.GPT2Config()
    if size == "small":
        config = transformers.GPT2Config(n_embd=embed_dim, n_head=heads, n_inner=hidden)
    assert (config.hidden_size, config.num_attention_heads, config.n_inner or 4 * config.hidden_size) == SIZES[size]
    assert config.activation_function == "gelu_new"
    config.resid_pdrop = config.attn_pdrop = 0.0
    config._attn_implementation = "eager"
    mask = Causal() & Padding(TARGET) if padded else Causal()
    options = {"activation": nn.GELU("tanh"), "norm_first": True, "norm_eps": config.layer_norm_epsilon}
    check(
        EncoderLayer(embed_dim, heads, hidden_dim=hidden, **options),
        lambda layer, x: layer(x, mask=mask),
        GPT2Block(config, layer_idx=0),
        lambda layer, x: theirs_alone(layer(x, attention_mask=added(mask, T, T).to(x.dtype))),
        [tokens(T, embed_dim)],
        GPT2,
        hidden,
    )


@pytest.mark.parametrize(
    "other",
    [{"activation": nn.GELU("tanh")}, {"norm_first": True}, {"norm_eps": 2e-5}],
    ids=["activation", "order", "eps"],
)
def test_another_choice_is_seen(other):
    theirs, ours = stock(activation=F.gelu)
    with pytest.raises(AssertionError, match="is above"):
        check(
            EncoderLayer(E, H, **ours | other),
            lambda layer, x: layer(x),
            nn.TransformerEncoderLayer(E, H, **theirs),
            lambda layer, x: layer(x),
            [tokens(S)],
            ENCODER,
        )


class Single(nn.Module):
    """Attention of one head, by its formula; it knows no caches."""

    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__()
        self.asked = (embed_dim, num_heads)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, nn.Linear(embed_dim, embed_dim))

    def forward(self, query, key, value, *, mask: Mask):
        scores_BTS = self.q_proj(query) @ self.k_proj(key).mT / query.shape[-1] ** 0.5
        seen = allowed(mask, query.shape[1], key.shape[1])[:, 0]
        return self.out_proj(scores_BTS.masked_fill(~seen, -torch.inf).softmax(-1) @ self.v_proj(value))


@ORDERS
def test_attention_can_be_replaced(norm_first):
    """One head by its formula, in each place of the model, is the model with one head."""
    options = {"hidden_dim": HIDDEN, "norm_first": norm_first}
    theirs = Transformer(E, 5, N, attention=Single, **options)
    places = [module for module in theirs.modules() if isinstance(module, Single)]
    assert [place.asked for place in places] == [(E, 5)] * 3 * N
    masks = {"source_mask": Padding(SOURCE), "target_mask": Padding(TARGET)}
    check(
        Transformer(E, 1, N, **options),
        lambda model, source, target: model(source, target, **masks),
        theirs,
        lambda model, source, target: model(source, target, **masks),
        [tokens(S), tokens(T, seed=2)],
        {},
    )


@ORDERS
def test_caches(norm_first):
    """Tokens in parts, with caches, give what they give at once."""
    options = {"hidden_dim": HIDDEN, "norm_first": norm_first}
    model = filled(Transformer(E, H, N, **options)).eval()
    encoder = filled(Encoder(E, H, N, **options)).eval()
    source, target, mask = tokens(S), tokens(T, seed=2), Padding(SOURCE)
    with torch.no_grad():
        want = model(source, target, source_mask=mask), encoder(target, mask=Causal())
        model, encoder, source, target = model.float(), encoder.float(), source.float(), target.float()
        plain = model(source, target, source_mask=mask), encoder(target, mask=Causal())
        memory = model.encoder(source, mask=mask)
        pairs, caches = [(DynamicCache(), FixedCache()) for _ in range(N)], [DynamicCache() for _ in range(N)]
        parts = target.split([2, 1, 4], 1)
        step = partial(model.decoder, memory=memory, memory_mask=mask, caches=pairs)
        got = [step(part) for part in parts], [encoder(part, mask=Causal(), caches=caches) for part in parts]
    for name, i in {"encoder–decoder": 0, "decoder alone": 1}.items():
        assert_as_good_as(torch.cat(got[i], 1), want[i], plain[i], terms=HIDDEN, what=name)
    assert [(a.length, b.length) for a, b in pairs] == [(T, S)] * N


def test_as_many_caches_as_layers():
    for caches in ([], [DynamicCache()]):
        with pytest.raises(ValueError, match="shorter"):
            Encoder(E, H, N)(tokens(T).float(), caches=caches)


def test_dropout():
    """It falls on what each part adds and on the weights, in training only."""
    residual = Residual(nn.Identity(), dropout_p=0.5)
    x = torch.zeros(B, T, E)
    dropped = residual(x, torch.ones_like)
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert set(residual.eval()(x, torch.ones_like).unique().tolist()) == {1.0}
    model = Transformer(E, H, N, dropout_p=0.25)
    modules = list(model.modules())
    assert {m.dropout_p for m in modules if isinstance(m, MultiHeadAttention)} == {0.25}
    assert {m.p for m in modules if isinstance(m, nn.Dropout)} == {0.25}
    assert sum(isinstance(m, nn.Dropout) for m in modules) == 5 * N


@pytest.mark.plain
def test_it_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "transformer.py")], capture_output=True, text=True, check=True
    )
    # by hand, for 512 features: 4 · (512² + 512), 2 · 2048 · 512 + 2048 + 512, and 2 · 512 for each norm
    attention, feed_forward, norm = 1_050_624, 2_099_712, 1024
    lines = done.stdout.splitlines()
    assert f"{6 * (attention + feed_forward + 2 * norm):,}" in lines[0]
    assert f"{6 * (2 * attention + feed_forward + 3 * norm):,}" in lines[1]
    assert float(re.search(r"(\S+) apart", lines[2])[1]) < 1e-5
