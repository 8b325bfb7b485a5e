"""Packed sequences: each gets what it gets alone."""

import pytest
import torch
from cases import BACKEND_NAMES
from helpers import assert_as_good_as, randn

from headwise import (
    ALiBi,
    Causal,
    Document,
    Full,
    MultiHeadAttention,
    Padding,
    RelativeBias,
    RotaryEmbedding,
    Window,
    pack,
)

E, HEADS = 24, 6
LENGTHS = (5, 1, 0, 7)
PLACES = {
    "rotary": lambda: {"rotary": RotaryEmbedding(4, base=50.0)},
    "alibi": lambda: {"score_mods": [ALiBi(HEADS)]},
    "t5": lambda: {"score_mods": [RelativeBias(HEADS, num_buckets=8, max_distance=9)]},
    "none": lambda: {},
}
BACKEND = pytest.mark.parametrize("backend", BACKEND_NAMES)


def sequences(seed: int = 80, lengths=LENGTHS) -> list[torch.Tensor]:
    return [randn(n, E, seed=seed + i, dtype=torch.float64) for i, n in enumerate(lengths)]


def layer(places: str = "rotary", **more) -> MultiHeadAttention:
    made = MultiHeadAttention(E, HEADS, num_kv_heads=2, **PLACES[places](), **more).double()
    with torch.no_grad():
        for i, parameter in enumerate(made.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=90 + i, scale=0.4))
    return made


@BACKEND
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("mask", (Full(), Causal(), Causal() & Window(3), Window(2)))
def test_each_sequence_gets_what_it_gets_alone(backend, places, mask):
    made, parts = layer(places, mask=mask, backend=backend), sequences()
    for part in parts:
        part.requires_grad_()
    packed = pack(parts)
    assert packed.tokens.shape == (1, 13, E) and packed.lengths == LENGTHS
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5, 6]]
    found = packed.unpack(made(packed.tokens, mask=packed.mask, positions=packed.positions))
    alone = [made(part) for part in parts]
    for got, want in zip(found, alone, strict=True):
        assert_as_good_as(got, want, terms=64, inner=1.0)
    grads = [torch.autograd.grad(sum(o.square().sum() for o in outs), parts) for outs in (found, alone)]
    for got, want in zip(*grads, strict=True):
        assert_as_good_as(got, want, terms=200, inner=10.0)


@BACKEND
def test_cross_attention_of_packed_to_packed(backend):
    made = layer("none", backend=backend)
    queries, keys = sequences(), sequences(85, (2, 3, 4, 6))
    one, other = pack(queries), pack(keys)
    found = one.unpack(made(one.tokens, other.tokens, mask=one.mask_to(other)))
    for got, q, k in zip(found, queries, keys, strict=True):
        assert_as_good_as(got, made(q, k), terms=64, inner=1.0)


def test_documents_of_known_lengths_are_runs():
    packed = pack(sequences())
    spans = (Causal() & packed.mask).spans(packed.positions, packed.positions)
    assert spans.runs.shape == (1, 1, 13, 1, 2)
    assert int(spans.work()) == sum(n * (n + 1) // 2 for n in LENGTHS)
    cross = packed.mask_to(pack(sequences(85, (2, 3, 4, 6))))
    assert cross.runs[0, :5].tolist() == [[0, 2]] * 5 and cross.runs[0, 5].tolist() == [2, 5]
    assert cross.runs[0, -1].tolist() == [9, 15]


def test_padded_batches_are_packed_and_padded_again():
    parts = sequences()
    packed = pack(parts)
    for left in (False, True):
        batch = packed.pad(packed.tokens, 7.0, left=left)
        assert batch.shape == (4, 7, E)
        for row, part in zip(batch, parts, strict=True):
            real = row[7 - len(part) :] if left else row[: len(part)]
            assert real.equal(part) and row.eq(7.0).all(-1).sum() == 7 - len(part)
        keep = ~batch.eq(7.0).all(-1)
        again = pack(batch, keep=keep)
        assert again.tokens.equal(packed.tokens) and again.lengths == LENGTHS
    lengths = torch.tensor(LENGTHS)
    for given in (lengths, list(LENGTHS)):
        assert pack(packed.pad(packed.tokens), lengths=given).tokens.equal(packed.tokens)


def test_ids_are_packed_too():
    packed = pack([torch.tensor([4, 2]), torch.tensor([9])])
    assert packed.tokens.tolist() == [[4, 2, 9]] and packed.pad(packed.tokens, -1).tolist() == [[4, 2], [9, -1]]
    assert isinstance(packed.mask, Document) and packed.mask.query_ids.tolist() == [[0, 0, 1]]


def test_one_sequence_of_one_token():
    made, part = layer(), sequences()[1]
    packed = pack([part])
    out = made(packed.tokens, mask=packed.mask, positions=packed.positions)
    assert_as_good_as(packed.unpack(out)[0], made(part), terms=64, inner=1.0)


@pytest.mark.plain
def test_nested_tensors_and_numbers_of_numpy():
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    parts = sequences()
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(parts, layout=layout)
        assert torch.equal(pack(nested).tokens, pack(parts).tokens)
    padded = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    lengths = numpy.array([len(part) for part in parts])
    assert torch.equal(pack(padded, lengths=lengths).tokens, pack(parts).tokens)
    assert torch.equal(pack(padded, lengths=list(lengths)).tokens, pack(parts).tokens)
    assert Padding(list(lengths)).lengths.tolist() == lengths.tolist()
