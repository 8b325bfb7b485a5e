"""``headwise look``: any text, each kind of model, tables, JSON and pictures."""

import json

import pytest
import torch
from helpers import assert_as_good_as
from typer.testing import CliRunner

from headwise import AttentionError, ConversionError, look
from headwise.commands import app
from headwise.demo import minilm

ODD = 'it\'s "$HOME" `x` $(touch pwned)\n\x1b[31m😀 漢 [bold]'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small BERT with random weights and a tokenizer, as transformers saves them."""
    import tokenizers
    import transformers

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "animal", "it", "was", "tired", "too", "'", "s"]
    into = tmp_path_factory.mktemp("bert")
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=30,
        num_hidden_layers=2,
        num_attention_heads=5,
        intermediate_size=14,
        max_position_embeddings=24,
    )
    transformers.BertModel(config).save_pretrained(into)
    tokenizer = tokenizers.BertWordPieceTokenizer({w: i for i, w in enumerate(words)})
    tokenizer.save(str(into / "tokenizer.json"))
    return into


def run(*arguments, **environment):
    return CliRunner().invoke(app, ["look", *arguments], env=environment)


def test_a_trained_folder_equals_the_stock_model_and_shows_every_head(folder):
    found = look.look_folder(folder, "the animal was too tired")
    assert found.tokens == ["[CLS]", "the", "animal", "was", "too", "tired", "[SEP]"]
    assert found.against == "the stock model"
    assert 0 <= found.difference <= 2e-5
    assert [layer.weights.shape for layer in found.layers] == [(5, 7, 7)] * 2
    for layer in found.layers:
        assert_as_good_as(layer.weights.sum(-1), torch.ones(5, 7).double(), torch.ones(5, 7), terms=7)
        assert len(layer.pairs) == 5
        # the pairs are of words: neither special tokens nor a token with itself
        assert all(q != k and {q, k} <= set(range(1, 6)) for pairs in layer.pairs for q, k, _ in pairs)


def test_the_difference_is_measured(folder, monkeypatch):
    from headwise.backends import BACKENDS

    for kind in (type(backend) for backend in BACKENDS):

        def wrong(self, x, right=kind.run):
            out, lse = right(self, x)
            return out * 1.5, lse

        monkeypatch.setattr(kind, "run", wrong)
    assert look.look_folder(folder, "the animal was too tired").difference > 1e-3


def test_unknown_pieces_are_named_by_their_source(folder):
    found = look.look_folder(folder, "the 漢 was Zürich 😀")
    assert found.tokens == ["[CLS]", "the", "漢", "was", "Zürich", "😀", "[SEP]"]


def test_long_texts_are_cut_and_say_so(folder):
    found = look.look_folder(folder, "the animal was tired " * 20)
    assert len(found.tokens) == 24
    assert found.remark == "The text has 82 tokens; the first 24 are shown."
    assert "82 tokens" in run("the animal was tired " * 20, "--model", str(folder)).output


def test_the_embedded_model_needs_no_transformers():
    found = look.look_embedded("one two three, one two three")
    assert [len(layer.pairs) for layer in found.layers] == [8, 8]
    assert found.difference <= 2e-5
    assert all((layer.weights.triu(1) == 0).all() for layer in found.layers), "a causal model saw the future"
    with pytest.raises(AttentionError, match="empty"):
        look.look_embedded("")


def test_the_embedded_model_takes_the_start_of_a_long_text():
    found = look.look_embedded("abc" * 500)
    assert len(found.tokens) < 1500
    assert found.remark.startswith("The text has 1500 bytes; the first")


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_any_text_is_shown_and_none_of_it_runs(how, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(ODD) if how == "argument" else run(HEADWISE_TEXT=ODD)
    assert result.exit_code == 0, result.output
    assert list(tmp_path.iterdir()) == []
    assert "\x1b[31m" not in result.output


def test_tables_say_what_the_heads_do(folder):
    output = run("the animal was too tired", "--model", str(folder)).output
    assert "differs from the stock model by at most" in output
    assert "layer 0" in output
    assert "layer 1" in output
    assert output.count("mixed") + output.count("first") + output.count("self") > 0


def test_json_holds_the_same_numbers(folder):
    result = run("the animal was too tired", "--model", str(folder), "--json")
    told = json.loads(result.output)
    found = look.look_folder(folder, "the animal was too tired")
    assert told == json.loads(json.dumps(found.to_dict()))
    assert {"entropy", "distance", "self", "previous", "next", "first", "separator", "mostly"} <= set(
        told["layers"][0]["heads"][0]
    )


def test_a_picture_is_drawn(tmp_path):
    result = run("abcabc", "--png", str(tmp_path / "heads.png"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")
    assert "heads.png" in result.output


def test_without_minilm_the_reason_and_the_embedded_model_are_shown(monkeypatch):
    def nowhere(cache=None):
        raise ConversionError("There is no network here.")

    monkeypatch.setattr(minilm, "fetch", nowhere)
    result = run("--model", "minilm")
    assert result.exit_code == 0
    assert "There is no network here." in " ".join(result.output.split())
    assert "the embedded model: 2 layers of 8 heads" in result.output


def test_a_folder_that_is_no_model_is_one_line(tmp_path):
    result = run("--model", str(tmp_path))
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_an_empty_text_and_a_picture_without_a_folder_are_one_line(tmp_path):
    for words in (["", "--model", "embedded"], ["abc", "--png", str(tmp_path / "absent" / "heads.png")]):
        result = run(*words)
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1


def save(folder, kind, **options):
    """A model of transformers with random weights, and a tokenizer of whole words."""
    import tokenizers
    import transformers

    words = {word: i for i, word in enumerate(["<unk>", "the", "animal", "was", "tired"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(2)
    config = getattr(transformers, f"{kind}Config")(vocab_size=5, **options)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(folder)


def test_a_folder_with_a_decoder(tmp_path):
    import transformers

    save(tmp_path, "GPT2", n_embd=30, n_layer=2, n_head=3, n_positions=16)
    assert type(minilm.load(tmp_path)[0]) is transformers.GPT2Model
    found = look.look_folder(tmp_path, "the animal was so tired")
    assert found.tokens == ["the", "animal", "was", "so", "tired"]
    assert found.difference <= 2e-5
    assert all((layer.weights.triu(1) == 0).all() for layer in found.layers)


def test_a_roberta_shows_as_many_tokens_as_it_has_positions(tmp_path):
    """Its positions are counted from behind the number of padding."""
    sizes = {"hidden_size": 30, "num_hidden_layers": 1, "num_attention_heads": 5, "intermediate_size": 14}
    save(tmp_path, "Roberta", max_position_embeddings=18, pad_token_id=1, **sizes)
    found = look.look_folder(tmp_path, "the tired " * 20)
    assert len(found.tokens) == 16 and found.difference <= 2e-5


def test_a_model_that_takes_more_than_a_text_is_one_line(tmp_path):
    save(tmp_path, "T5", d_model=16, d_kv=4, num_heads=4, d_ff=16, num_layers=1)
    with pytest.raises(ConversionError, match="T5Model cannot be looked at with a text alone"):
        look.look_folder(tmp_path, "the animal")
