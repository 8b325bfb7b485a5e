"""Every architecture through the transformers plug-in against eager: gradients, twenty tokens, masks as values.

``test_huggingface`` has the small models and what is tested of them one by one; here is what holds for all of them.
"""

import copy
import inspect

import pytest
import torch
from helpers import assert_as_good_as, plain_attention, randn
from test_huggingface import (
    DECODERS,
    ENCODER_DECODERS,
    ENCODERS,
    FAMILIES,
    FEW,
    FREE,
    LENGTHS,
    OLD,
    PAD,
    PLACES,
    ROWS,
    WINDOWS,
    B,
    T,
    V,
    batch,
    double_of,
    family,
    inputs_of,
    made,
    positions_of,
    run,
    three,
)

from headwise import Dense
from headwise.algebra import evaluate
from headwise.convert import huggingface, huggingface_masks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from transformers import masking_utils as hf  # noqa: E402


@pytest.fixture(autouse=True)
def _registered():
    huggingface.register()


# Positions of three kinds for each token, and images between the words.
QWEN2_VL = {
    "text_config": FEW | {
        "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]},
    },
    "vision_config": {"depth": 2, "embed_dim": 16, "hidden_size": 48, "num_heads": 2, "patch_size": 2},
    "image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93,
    "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def qwen2_vl():
    return made("Qwen2VLForConditionalGeneration", "Qwen2VLConfig", QWEN2_VL)


# --- masks as values -------------------------------------------------------------------------------------------------

WINDOW, CHUNK = 3, 4
# how transformers says where queries stand, and what it does for positions in one document, differs by version
PLACES_OF_ALL = "cache_position" in inspect.signature(hf.sdpa_mask).parameters
remapped = getattr(hf, "remap_positions_for_packed_sequence", lambda function, places: function)


def pattern(name, rows, slots):
    left = torch.tensor([0, 0, PAD])
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0]])
    places = torch.stack([torch.cat([torch.arange(n) for n in row.bincount().tolist()]) for row in ids])
    packed = hf.packed_sequence_mask_function(ids)
    return {
        "causal": lambda: hf.causal_mask_function,
        "full": lambda: hf.bidirectional_mask_function,
        "window": lambda: hf.sliding_window_causal_mask_function(WINDOW),
        "window on both sides": lambda: hf.sliding_window_bidirectional_mask_function(WINDOW),
        "chunks": lambda: hf.chunked_causal_mask_function(CHUNK, left),
        "equal chunks": lambda: hf.chunked_causal_mask_function(CHUNK, torch.zeros(B, dtype=torch.int64)),
        "documents": lambda: hf.and_masks(remapped(hf.causal_mask_function, places), packed),
        "documents and a window": lambda: hf.and_masks(
            remapped(hf.sliding_window_causal_mask_function(2), places), packed
        ),
    }[name]()


def given(name):
    """Which of twelve tokens are real."""
    place = torch.arange(12)
    return {
        "none": None,
        "all": torch.ones(B, 12, dtype=torch.bool),
        "right": place < torch.tensor([12, 9, 12])[:, None],
        "left": place >= torch.tensor([0, 2, 3])[:, None],
        "both": (place >= torch.tensor([0, 2, 3])[:, None]) & (place < torch.tensor([12, 12, 8])[:, None]),
        "one row of padding": (place < torch.tensor([12, 0, 12])[:, None]),
        "alike": (place >= 2).expand(B, -1),
        "few": torch.ones(B, 5, dtype=torch.bool),  # of a cache of fixed length
    }[name]


def asked(function, real, rows, slots, start, first):
    where = {"q_length": rows, "q_offset": start, "device": "cpu"}
    if PLACES_OF_ALL:
        where = {"cache_position": torch.arange(rows) + start}
    return transformers.AttentionMaskInterface()["headwise"](
        batch_size=B, kv_length=slots, kv_offset=first, mask_function=function, attention_mask=real,
        allow_is_causal_skip=False, **where,
    )  # fmt: skip


PLACED = {  # queries, keys, index of the first of each
    "all at once": (7, 7, 0, 0),
    "a step": (1, 9, 8, 0),
    "a chunk": (3, 9, 6, 0),
    "a chunk after a window": (3, 6, 9, 6),
    "a cache of fixed length": (4, 12, torch.tensor([3]), 0),
    "a step of a full window": (1, 3, torch.tensor(11), 9),
}
PATTERNS = ["causal", "full", "window", "window on both sides", "chunks", "equal chunks"]


@pytest.mark.parametrize("padding", ["none", "all", "right", "left", "both", "one row of padding", "alike", "few"])
@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("name", PATTERNS)
def test_a_mask_arrives_as_a_value(name, placed, padding):
    """Equal to the tensor that transformers makes, and with runs of keys for each query."""
    rows, slots, start, first = PLACED[placed]
    made_of = asked(pattern(name, rows, slots), given(padding), rows, slots, start, first)
    value = huggingface_masks.value_of(made_of, B, rows, slots)
    check(value, made_of)
    if padding in ("none", "alike") and name not in ("chunks", "equal chunks"):  # chunks are no band
        assert value.mask.spans(value.queries, value.keys).is_numbers


def check(value, tensor):
    mask = value.mask.bind(B, 6, value.queries, value.keys)
    seen = evaluate(mask, B, 6, value.queries, value.keys)
    assert torch.equal(seen.expand_as(tensor), tensor)
    runs = mask.spans(value.queries, value.keys).tensor()
    place = torch.arange(tensor.shape[-1])[:, None]
    inside = ((place >= runs[..., None, :, 0]) & (place < runs[..., None, :, 1])).any(-1)
    assert torch.equal(inside.expand_as(tensor), tensor)


@pytest.mark.parametrize("name", ["documents", "documents and a window"])
def test_documents_arrive_as_a_value(name):
    tensor = asked(pattern(name, T, T), None, T, T, 0, 0)
    check(huggingface_masks.value_of(tensor, B, T, T), tensor)


def holes():
    real = given("all")
    real[1, 4] = False
    return real


def other_positions():
    """Causality by positions that are not told to be those of documents."""
    places = torch.arange(7).flip(0).expand(B, -1)
    known = hasattr(hf, "remap_positions_for_packed_sequence")
    return remapped(hf.causal_mask_function, places) if known else None


def chunks_of_documents():
    """Which begin with each document, so that indices do not tell them."""
    places, known = PLACES[:1, :7].expand(B, -1), hasattr(hf, "remap_positions_for_packed_sequence")
    chunks = remapped(hf.chunked_causal_mask_function(2, torch.zeros(B, dtype=torch.long)), places)
    return hf.and_masks(chunks, hf.packed_sequence_mask_function((places == 0).cumsum(-1))) if known else None


@pytest.mark.parametrize(
    ("function", "real"),
    [
        (lambda *index: index[3] <= index[2], None),
        (hf.or_masks(hf.causal_mask_function, lambda b, h, q, k: k < 2), None),
        (hf.and_masks(hf.causal_mask_function, lambda b, h, q, k: k % 2 == 0), None),
        (other_positions(), None),
        (chunks_of_documents(), None),
        (hf.causal_mask_function, holes()),
    ],
)
def test_what_is_not_known_stays_a_tensor(function, real):
    if function is None:
        pytest.skip("masks of this version of transformers look at indices only")
    tensor = asked(function, real, 7, 7, 0, 0)
    assert tensor.dtype == torch.bool and tensor.shape == (B, 1, 7, 7)
    assert huggingface_masks.value_of(tensor, B, 7, 7) is None


@pytest.mark.parametrize(("places", "start"), [([3, 4, 5], 3), ([], 0), ([0, 2, 4], None)])
def test_queries_placed_one_by_one(places, start):
    """As versions before 5.4 do it."""
    places = torch.tensor(places, dtype=torch.long)
    options = {"cache_position": places, "mask_function": hf.causal_mask_function, "kv_offset": 0}
    tensor = torch.arange(6) <= places[:, None]
    made_of = huggingface_masks.make(lambda **_: tensor.expand(B, 1, -1, -1), (), options)
    value = huggingface_masks.value_of(made_of, B, len(places), 6)
    assert (None if value is None else value.queries.start) == start
    if len(places) and value is not None:
        check(value, made_of)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_tensor_that_was_changed_is_read_anew(mode):
    with mode():
        tensor = asked(hf.causal_mask_function, given("left"), 7, 7, 0, 0)
        assert huggingface_masks.value_of(tensor, B, 7, 7) is not None
        for other in (tensor.clone(), tensor[:, :, :5], tensor[:, :, :, :6], tensor & True, tensor[:1]):
            assert huggingface_masks.value_of(other, len(other), *other.shape[2:]) is None
        assert huggingface_masks.value_of(tensor, B, 7, 8) is huggingface_masks.value_of(tensor, 1, 7, 7) is None
        tensor[:, :, 3] = True
        assert huggingface_masks.value_of(tensor, B, 7, 7) is None


def test_the_values_of_models_in_inference_mode():
    """Tensors that are made there do not count what is written into them."""
    model, (inputs, _) = family("Bert")[0], batch("padded")
    with torch.inference_mode():
        masks = masks_of(model, inputs | {"attention_mask": inputs["attention_mask"] * 1})
    assert len(masks) == 2 and not any(isinstance(mask, Dense) for mask, _ in masks)


def masks_of(model, inputs, **more):
    """The mask of each attention of a model, in order, and whether it has runs."""
    found, modules = [], [m for m in model.modules() if hasattr(m, "scaling") or "Attention" in type(m).__name__]
    for module in modules:
        module.observer = lambda x, out, lse: found.append((x.mask, x.spans() is not None))
    try:
        run(model, "headwise", inputs, **more)
    finally:
        for module in modules:
            del module.observer
    return found


@pytest.mark.parametrize("padding", ["no mask", "padded"])
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_no_model_sees_a_tensor(name, padding):
    """In each family every attention gets its mask as runs, whatever is padded."""
    masks = masks_of(family(name)[0], inputs_of(name, padding)[0])
    assert len(masks) >= 2 and all(runs for _, runs in masks)
    if name in WINDOWS:
        assert any("Window(left=3" in repr(mask) for mask, _ in masks)
    if padding == "padded" and name in DECODERS | ENCODERS:
        assert all("Padding" in repr(mask) for mask, _ in masks)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Bert", "T5 encoder"])
@torch.no_grad()
def test_no_model_sees_a_tensor_of_documents(name, cached):
    inputs = {"input_ids": ROWS, "position_ids": PLACES}
    more = {"use_cache": cached} if name in DECODERS else {}
    masks = masks_of(family(name)[0], inputs, **more)
    assert all(runs and repr(mask).count("Document") == 1 for mask, runs in masks)


# --- every architecture ----------------------------------------------------------------------------------------------


def first_of(out):
    return out["logits"] if "logits" in out else next(v for k, v in out.items() if torch.is_tensor(v))


def alone_rows(name, inputs, real):
    """A decoder's padded rows, each without its padding."""
    return [({"input_ids": inputs["input_ids"][i : i + 1, r]}, i, r) for i, r in enumerate(real)]


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_gradients(name):
    """Of rows padded on the left and on the right; those of a decoder against each row alone."""
    # eager's softmax in float32 answers NaN in float64 for a query that sees nothing
    inputs, real = inputs_of(name, "padded at the end" if name in ("CLIP", "Whisper") else "padded")
    if name == "CLIP":
        inputs["input_ids"][:, -1 - PAD] = 96  # where a sentence ends, which it is taken to mean
    single, double = family(name)
    if name in DECODERS:
        inputs["position_ids"] = positions_of(real, 0)
    runs = []
    for model, implementation in ((single, "headwise"), (double, "eager"), (single, "eager")):
        if name in DECODERS and model is double:
            outs = [first_of(run(model, "eager", row))[0] for row, _, _ in alone_rows(name, inputs, real)]
            out = torch.zeros(B, T, V, dtype=torch.float64)
            out = out.index_put((real,), torch.cat(outs).double())
        else:
            out = first_of(run(model, implementation, inputs if model is single else double_of(inputs)))
        if real is not None and out.shape[:2] == real.shape:
            out = out[real]
        loss = (out * randn(*out.shape, seed=3, dtype=out.dtype)).sum()
        learned = [p for p in model.parameters() if p.requires_grad]  # but tables of positions
        grads = torch.autograd.grad(loss, learned, allow_unused=True)
        runs.append((out, grads))
    assert_as_good_as(runs[0][0], runs[1][0].detach().double(), runs[2][0].detach(), terms=48)
    names = [key for key, p in single.named_parameters() if p.requires_grad]
    sizes = {key: 0.0 if g is None else g.abs().max().item() for key, g in zip(names, runs[1][1], strict=True)}
    for key, got, want, plain in zip(names, *(grads for _, grads in runs), strict=True):
        assert (got is None) == (want is None), key
        if got is not None:
            # the gradient of a key bias is zero by algebra: rounding leaves something of the size of the others; what
            # little is left to queries and keys is a difference of terms as large as those of the values
            inner = 0.0
            if key.endswith("bias"):
                inner = max(sizes.values())
            elif "q_proj" in key or "k_proj" in key:
                inner = sizes[key.replace("q_proj", "v_proj").replace("k_proj", "v_proj")]
            assert_as_good_as(got, want.double(), plain, terms=48, inner=inner, what=key)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_every_row_of_padding_is_finite(name):
    out = run(family(name)[0], "headwise", inputs_of(name, "padded")[0])
    assert all(v.isfinite().all() for v in out.values() if torch.is_tensor(v))


# the token of padding is none of a row alone, which might write it
TWENTY = FREE | {"max_new_tokens": 20, "suppress_tokens": [0], "return_dict_in_generate": True, "output_logits": True}


def twenty(model, implementation, inputs, cache):
    model.set_attn_implementation(implementation)
    more = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
    out = model.generate(**inputs, **TWENTY, **more)
    return out.sequences[:, -20:], torch.stack(out.logits, 1)


def check_twenty(models, inputs, rows, cache):
    """The tokens and the logits behind them, from padded rows as from each row alone in float64."""
    single, double = models
    (got, logits), (_, plain) = (twenty(single, kind, inputs, cache) for kind in ("headwise", "eager"))
    wants = [twenty(double, "eager", double_of(row), cache) for row in rows]
    assert torch.equal(got, torch.cat([tokens for tokens, _ in wants])) and got.unique().numel() > 20
    assert_as_good_as(logits, torch.cat([row for _, row in wants]).double(), plain, terms=48)


@pytest.mark.plain
@pytest.mark.parametrize("cache", ["dynamic", pytest.param("static", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*DECODERS, *ENCODER_DECODERS])
@torch.no_grad()
def test_twenty_tokens(name, cache):
    """A decoder pads on the left; an encoder on both sides, with rows of its own positions."""
    inputs, _ = inputs_of(name, "no mask")
    rows = [{key: value[i : i + 1] for key, value in inputs.items() if value is not None} for i in range(B)]
    if name != "Whisper":
        real = torch.ones(B, T, dtype=torch.bool)
        real[2, : PAD + 1] = real[1, :PAD] = False
        if name in ENCODER_DECODERS:
            real[1] = torch.arange(T) < T - PAD
        inputs["input_ids"] = inputs["input_ids"].masked_fill(~real, 0)
        inputs["attention_mask"] = real.long()
        for i, row in enumerate(rows[1:], 1):
            if name in DECODERS or i == 1:
                row["input_ids"] = row["input_ids"][:, real[i]]
            else:  # padding in front moves the positions of an encoder
                row |= {"input_ids": inputs["input_ids"][i : i + 1], "attention_mask": real[i : i + 1].long()}
    check_twenty(family(name), inputs, rows, cache)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_weights_equal_those_of_eager(name):
    """Of softcaps, sinks, biases of positions, windows and padding, in self- and cross-attention."""
    inputs, _ = inputs_of(name, "padded at the end")
    outs = three(family(name), inputs, output_attentions=True)
    if name == "CLIP":  # its towers have the weights, and the whole does not
        outs = [getattr(out, tower) for tower in ("text_model_output", "vision_model_output") for out in outs]
    for at in range(0, len(outs), 3):
        found = [key for key, value in outs[at].items() if "attentions" in key and value]
        assert found == [key for key, value in outs[at + 1].items() if "attentions" in key and value] != []
        for key in found:
            layers = [out[key] for out in outs[at : at + 3]]
            for got, want, plain in zip(*layers, strict=True):
                assert got.shape == want.shape
                assert_as_good_as(got, want.double(), plain, terms=48, what=key)


@pytest.mark.parametrize(("name", "attention"), [("Bert", "BertSelfAttention"), ("Llama", "LlamaAttention")])
@torch.no_grad()
def test_what_padded_query_rows_hold(name, attention):
    """On the left of a causal row zeros, elsewhere what their token finds among the real ones, as any other query."""
    model, (inputs, real) = family(name)[0], batch("padded")
    module, seen = next(m for m in model.modules() if type(m).__name__ == attention), []
    module.observer = lambda x, out, lse: seen.append((x, out))
    try:
        run(model, "headwise", inputs)
    finally:
        del module.observer
    ((x, out),) = seen
    place = torch.arange(T)
    before = place <= place[:, None] if name == "Llama" else torch.ones(T, T, dtype=torch.bool)
    allowed = (real[:, None] & before)[:, None]
    wide, plain = (
        plain_attention(*(t.to(dtype) for t in (x.query, x.key, x.value)), allowed)[0]
        for dtype in (torch.float64, torch.float32)
    )
    assert_as_good_as(out, wide, plain, terms=T)
    dead = ~allowed.any(-1).expand(B, 6, T)
    assert (out[dead] == 0).all() and int(dead.sum()) == (6 * PAD if name == "Llama" else 0)


# --- Qwen2-VL --------------------------------------------------------------------------------------------------------


def axes_of(places):
    """Positions in time, height and width, as those of a picture would be."""
    return torch.stack([places, places // 2, places * 3 % 5])


def test_positions_of_three_kinds(qwen2_vl):
    """Rows padded on both sides against each alone, and their gradients."""
    inputs, real = batch("padded")
    inputs["input_ids"] = inputs["input_ids"].clamp(max=89)
    places, runs = positions_of(real, 0), []
    single, double = qwen2_vl
    for model, implementation in ((single, "headwise"), (double, "eager"), (single, "eager")):
        if model is double:
            rows = [(inputs["input_ids"][i : i + 1, r], axes_of(places[i : i + 1, r])) for i, r in enumerate(real)]
            out = torch.cat([run(model, "eager", {"input_ids": a, "position_ids": p}).logits[0] for a, p in rows])
        else:
            out = run(model, implementation, inputs | {"position_ids": axes_of(places)}).logits[real]
        loss = (out * randn(*out.shape, seed=3, dtype=out.dtype)).sum()
        learned = list(model.model.language_model.parameters())
        runs.append((out, torch.autograd.grad(loss, learned)))
    assert_as_good_as(runs[0][0], runs[1][0].detach(), runs[2][0].detach(), terms=48)
    names = [key for key, _ in single.model.language_model.named_parameters()]
    largest = max(g.abs().max().item() for g in runs[1][1])
    for key, got, want, plain in zip(names, *(grads for _, grads in runs), strict=True):
        assert_as_good_as(got, want, plain, terms=48, inner=largest if key.endswith("bias") else 0.0, what=key)


def alone_at(model, ids):
    places = axes_of(torch.arange(len(ids))[None])
    return run(model, "eager", {"input_ids": ids[None], "position_ids": places}).logits


@pytest.mark.parametrize("way", ["text positions in front", "packed()"])
@torch.no_grad()
def test_documents_with_positions_of_three_kinds(qwen2_vl, way):
    rows, outs = ROWS.clamp(max=89), []
    for model in reversed(qwen2_vl):
        parts = [row.split(counts) for row, counts in zip(rows, LENGTHS, strict=True)]
        whole = [[alone_at(model, part) for part in row] for row in parts]
        outs.append(torch.cat([torch.cat(row, 1) for row in whole]))
    axes = axes_of(PLACES)
    if way == "packed()":
        with huggingface.packed(qwen2_vl[0].model.language_model, PLACES):
            got = run(qwen2_vl[0], "headwise", {"input_ids": rows, "position_ids": axes}).logits
    else:
        got = run(qwen2_vl[0], "headwise", {"input_ids": rows, "position_ids": torch.cat([PLACES[None], axes])}).logits
    assert_as_good_as(got, *outs, terms=48)


def pictured():
    """Two rows with one image each, of 4 x 6 patches, which are 2 x 3 tokens."""
    ids = torch.randint(5, 80, (2, 13), generator=torch.Generator().manual_seed(4))
    ids[:, 3], ids[:, 4:10], ids[:, 10] = 92, 90, 93
    grid = torch.tensor([[1, 4, 6]] * 2)
    kinds = (ids == 90).int()
    return {"input_ids": ids, "pixel_values": randn(48, 24), "image_grid_thw": grid, "mm_token_type_ids": kinds}


@torch.no_grad()
def test_images(qwen2_vl):
    outs = [out.logits for out in three(qwen2_vl, pictured())]
    assert_as_good_as(outs[0], outs[1].double(), outs[2], terms=48)
    blind = run(qwen2_vl[0], "headwise", pictured() | {"pixel_values": torch.zeros(48, 24)}).logits
    assert not torch.equal(blind[:, -1], outs[0][:, -1])


@pytest.mark.plain
@pytest.mark.parametrize("cache", ["dynamic", pytest.param("static", marks=pytest.mark.slow)])
@torch.no_grad()
def test_twenty_tokens_with_positions_of_three_kinds(qwen2_vl, cache):
    inputs, real = batch("no mask")
    ids = inputs["input_ids"].clamp(max=89)
    real[2, : PAD + 1] = real[1, :PAD] = False
    rows = [{"input_ids": ids[i : i + 1, r]} for i, r in enumerate(real)]
    inputs = {"input_ids": ids.masked_fill(~real, 0), "attention_mask": real.long()}
    check_twenty(qwen2_vl, inputs, rows, cache)


# --- training and compiling ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reentrant"),
    # T5's reentrant checkpoints lose the gradient of its position bias in eager too
    [
        (n, r)
        for n in ("Llama", "Gemma3", "GptOss", "Bert", "ModernBert", "T5")
        for r in (False, True)
        if n != "T5" or not r
    ],
)
def test_checkpointed_gradients(name, reentrant):
    """Computed again in the backward, they are the same to the last bit, dropout and windows included."""
    model, (inputs, _) = copy.deepcopy(family(name)[0]).train(), inputs_of(name, "padded")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
        for key in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, key, None), float):
                setattr(module, key, 0.3)
    calls, grads = [], []
    more = {"use_cache": False} if name in DECODERS else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface, "attend", lambda *call: calls.append(call[7]) or attend(*call))
        for checkpointed in (False, True):
            if checkpointed:
                older = getattr(model, "gradient_checkpointing_enable", None)
                getattr(model, "activation_checkpointing_enable", older)({"use_reentrant": reentrant})
            torch.manual_seed(5)
            calls.append(None)
            out = first_of(run(model, "headwise", inputs, **more))
            loss = (out * randn(*out.shape, seed=3)).sum()
            loss.backward()
            grads.append([p.grad for p in model.parameters()])
            model.zero_grad()
    once = calls.index(None, 1) - 1
    assert len(calls) - once - 2 == 2 * once and once >= 2
    assert set(calls) == {None, 0.3}
    for first, again in zip(*grads, strict=True):
        assert (first is None) == (again is None) and (first is None or torch.equal(first, again))


attend = huggingface.attend


@pytest.mark.plain
@pytest.mark.parametrize(
    ("name", "graphs"),
    # a window that moves has a graph of its own for the first step, and one for all others
    [
        ("Gemma3", 2),
        pytest.param("Llama", 1, marks=pytest.mark.slow),
        pytest.param("Mistral", 2, marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_compiled_generation(name, graphs):
    """``generate`` with a static cache compiles each step after the first, and writes the same twenty tokens."""
    inputs, real = batch("no mask")
    real[2, : PAD + 1] = real[1, :PAD] = False
    rows = [{"input_ids": inputs["input_ids"][i : i + 1, r]} for i, r in enumerate(real)]
    inputs = {"input_ids": inputs["input_ids"].masked_fill(~real, 0), "attention_mask": real.long()}
    single, double = copy.deepcopy(family(name)[0]), family(name)[1]
    torch.compiler.reset()
    made_graphs = []

    def backend(graph, _inputs):
        made_graphs.append(graph)
        return graph.forward

    config = transformers.CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    single.set_attn_implementation("headwise")
    out = single.generate(**inputs, **TWENTY, cache_implementation="static", compile_config=config)
    logits = torch.stack(out.logits, 1)
    assert len(made_graphs) <= graphs or OLD
    assert made_graphs
    plain = twenty(family(name)[0], "eager", inputs, "static")[1]
    wants = [twenty(double, "eager", row, "static") for row in rows]
    assert torch.equal(out.sequences[:, -20:], torch.cat([tokens for tokens, _ in wants]))
    assert_as_good_as(logits, torch.cat([row for _, row in wants]).double(), plain, terms=48)
