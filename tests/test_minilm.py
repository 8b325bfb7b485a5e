"""A trained BERT through the transformers plug-in, padded and packed: sentence similarity as its publisher measures it.

Weights and sentences are no part of this project and are read from outside it. The benchmark is STS-B: 1,379 pairs of
sentences with the similarity that people gave them; the model's is the cosine of the means of the last hidden states.

Reference: Cer et al., SemEval-2017 Task 1. https://arxiv.org/abs/1708.00055
"""

import copy
import csv
from pathlib import Path

import pytest
import torch
from helpers import assert_as_good_as, assert_published

import headwise
from headwise import ConversionError
from headwise.convert import huggingface
from headwise.demo import minilm

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("tokenizers", reason="tokenizers is not installed")

PAIRS = Path(__file__).parents[2] / "shared" / "data" / "stsb" / "stsb-en-test.csv"
TOGETHER = 32  # sentences in a batch, or in a packed row


@pytest.fixture(scope="module")
def trained():
    """MiniLM and its tokenizer, from the cache or the installed package: a test fetches nothing."""

    def nowhere(work):
        raise ConversionError("MiniLM is not on this machine; headwise look --model minilm fetches it")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minilm, "_download", nowhere)
        try:
            folder = minilm.fetch()
        except ConversionError as reason:
            pytest.skip(str(reason))
    huggingface.register()
    model, tokenizer = minilm.load(folder, "headwise")
    tokenizer.enable_truncation(256)
    return model, tokenizer


@pytest.fixture(scope="module")
def sentences(trained):
    """Token ids of the first and of the second sentence of each pair, and how similar people found them."""
    if not PAIRS.exists():
        pytest.skip("stsb-en-test.csv is not in ../shared/data/stsb beside this checkout")
    with PAIRS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    encoded = [[torch.tensor(trained[1].encode(row[side]).ids) for row in rows] for side in (0, 1)]
    return (*encoded, [float(row[2]) for row in rows])


def batches(ids):
    return [ids[start : start + TOGETHER] for start in range(0, len(ids), TOGETHER)]


@torch.no_grad()
def padded(model, ids):
    """Embeddings of sentences, side by side in batches with padding at the end."""
    found = []
    for group in batches(ids):
        tokens = torch.nn.utils.rnn.pad_sequence(group, batch_first=True)
        real = torch.arange(tokens.shape[1]) < torch.tensor([len(i) for i in group])[:, None]
        states = model(input_ids=tokens, attention_mask=real.long()).last_hidden_state
        found.append((states * real[..., None]).sum(1) / real.sum(1, keepdim=True))
    return torch.nn.functional.normalize(torch.cat(found), dim=-1)


@torch.no_grad()
def packed(model, ids):
    """The same, one after the other in a row: no padding and no attention mask, only positions that begin again."""
    found = []
    for group in batches(ids):
        row = headwise.pack(group)
        states = model(input_ids=row.tokens, position_ids=row.position_ids).last_hidden_state
        found += [sentence.mean(0) for sentence in row.unpack(states)]
    return torch.nn.functional.normalize(torch.stack(found), dim=-1)


@pytest.mark.slow
@pytest.mark.parametrize("way", [padded, packed])
def test_similarity_as_published(trained, sentences, way):
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    first, second, people = sentences
    assert len(people) == 1379
    states = way(trained[0], first + second)
    similar = (states[:1379] * states[1379:]).sum(-1)
    found = torch.tensor(100 * stats.spearmanr(similar.numpy(), people).statistic)
    source = "Spearman correlation x 100 of all-MiniLM-L6-v2 on the test part of STS-B, to its last digit"
    assert_published(found, torch.tensor(82.0325), rtol=0, atol=5e-5, source=source)


@torch.no_grad()
def test_packed_equals_padded(trained, sentences):
    """The first hundred pairs, both ways, against each sentence alone in float64."""
    model = trained[0]
    ids = sentences[0][:100] + sentences[1][:100]
    assert len({len(sentence) for sentence in ids}) > 5
    got = {way: way(model, ids) for way in (padded, packed)}
    model.set_attn_implementation("eager")
    try:
        plain, want = (
            torch.nn.functional.normalize(
                torch.cat([kind(input_ids=i[None]).last_hidden_state.mean(1) for i in ids]), dim=-1
            )
            for kind in (model, copy.deepcopy(model).double())
        )
    finally:
        model.set_attn_implementation("headwise")
    for way, states in got.items():
        assert_as_good_as(states, want, plain, terms=384, what=way.__name__)
