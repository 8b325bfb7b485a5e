"""What the three texts say, each with the figure that it comes to and the verdict.

To add a statement, write a function of the results that returns the figure and the verdict, under ``@says``. Verdicts
follow from numbers, by the rules that stand in the functions, so that another run may come to another one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import geometric_mean, mean
from typing import Any

from . import heads, parallel
from .training import LENGTHS, PLAN, WIDTH, better, on_patches, percent, values
from .units import Record
from .variants import HEADS

Results = Mapping[str, Record]
Finding = tuple[str, str]  # the figure, the verdict

HOLDS, IN_PART, FAILS, NOT_TESTED = "holds", "holds in part", "does not hold here", "not tested"
BREAK = "<br>"
EXACT = 1e-12  # a difference in float64 that is rounding and nothing else
ENTRY, ARTICLE, QUESTION = "entry", "article", "question"
RECALL_2 = "recall of two"
TEXTS = {
    ENTRY: "a dictionary entry on multi-head self-attention, in Danish",
    ARTICLE: "an article on the principle, uses and examples of multi-head attention, in Chinese",
    QUESTION: "a question on why queries, keys and values are reshaped, with two answers, in English",
}
# English, Danish, Chinese
TERMS = {
    "self-attention": ("self-attention", "selvopmærksomhed", "自注意力"),
    "multi-head": ("multi-head attention", "flerhovedet opmærksomhed", "多頭注意力"),
    "mechanism": ("attention mechanism", "opmærksomhedsmekanisme", "注意力機制"),
    "heads": ("parallel heads", "parallelle hoveder", "多個平行的頭"),
    "query": ("query, key, value", "forespørgsel, nøgle, værdi", "查詢、鍵、值"),
    "aspects": ("aspects of representation", "repræsentationsaspekter", "不同的特徵表示"),
    "dependencies": ("local and global dependencies", "lokale og globale afhængigheder", "局部與全域依賴"),
    "feed-forward": ("feed-forward network", "feed-forward-netværk", "前饋網路"),
    "encoder": ("encoder, decoder", "koder, afkoder", "編碼器、解碼器"),
    "layer": ("layer", "lag", "層"),
    "tokens": ("token representations", "token-repræsentationer", "詞元表示"),
    "relations": ("syntactic and semantic relations", "syntaktiske og semantiske relationer", "句法與語義關係"),
    "subspace": ("subspace", "underrum", "子空間"),
    "contexts": ("different contexts", "forskellige kontekster", "不同的上下文"),
    "short": ("short sequences, order", "korte sekvenser, rækkefølge", "短序列、順序"),
    "others": ("feed-forward, scalar attention", "feed-forward- og skalaropmærksomhed", "前饋注意力、純量注意力"),
    "parallel": ("parallel, efficient", "parallel, effektiv", "平行化、計算效率"),
    "long": ("long sequences, robust", "lange sekvenser, robust", "長序列、魯棒性"),
    "uses": ("applications", "anvendelser", "應用"),
    "reshape": ("reshape", "omformning", "重塑"),
    "split": ("split over heads", "opdeling i hoveder", "分拆成多個頭"),
    "single": ("single head", "ét hoved", "單頭"),
    "product": ("scaled dot product", "skaleret prikprodukt", "縮放點積"),
    "swap": ("transpose", "transponering", "轉置"),
    "softmax": ("scores, softmax", "scorer, softmax", "分數、softmax"),
    "projection": ("linear projection", "lineær projektion", "線性投影"),
    "code": ("implementation", "implementering", "實作"),
    "best": ("the most advanced models", "de mest avancerede modeller", "最先進的模型"),
    "mask": ("mask", "maske", "遮罩"),
}
TOPICS = {
    "is": "What it is",
    "split": "Splitting into heads, and the reshape",
    "scores": "Scores and softmax",
    "learn": "What heads learn",
    "against": "Several heads against one, and against other kinds of attention",
    "short": "Short sequences, and order",
    "cost": "Parallel and efficient",
    "long": "Long sequences",
    "used": "Where it is used",
}


@dataclass(frozen=True)
class Statement:
    """Something that is said.

    Args:
        topic: One of ``TOPICS``.
        said: What, in our words.
        where: By text the numbers of its lines that say so.
        term: One of ``TERMS``.
        only: The units that measure it, as ``--only`` takes them; None where nothing does.
        judge: From the records to the figure and the verdict.
    """

    topic: str
    said: str
    where: Mapping[str, tuple[int, ...]]
    term: str
    only: str | None
    judge: Callable[[Results], Finding]


STATEMENTS: list[Statement] = []


def says(
    topic: str, said: str, term: str, only: str | None = None, **where: tuple[int, ...]
) -> Callable[[Callable[[Results], Finding]], Callable[[Results], Finding]]:
    """Add a statement that is judged by the function below."""

    def add(judge: Callable[[Results], Finding]) -> Callable[[Results], Finding]:
        STATEMENTS.append(Statement(topic, said, where, term, only, judge))
        return judge

    return add


# lines of the texts that state nothing
NOTHING = {
    ENTRY: {(1, 3, 9): "heading, numbers", (45, 46): "references"},
    ARTICLE: {(1, 3, 7, 11, 21, 68): "headings", (23, 24): "imports"},
    QUESTION: {
        (1, 34, 36, 37, 112, 120): "counts of votes and answers",
        (3, 17, 41, 43, 44, 49, 50, 95): "headings",
        (63, 65, 69, 71, 72, 73, 77, 78, 79, 87, 88, 89): "repeats the question or its code",
        (105,): "an opinion on the answer itself",
        (32, 107, 108, 110, 118, 124, 126, 128, 130, 132, 134, 136): "buttons and links",
    },
}


def of(results: Results, name: str) -> dict[str, Any]:
    """The result of a unit."""
    return results[name]["result"]


def exactly(*differences: float) -> str:
    """The verdict where all of these have to be rounding."""
    return HOLDS if all(abs(d) <= EXACT for d in differences) else FAILS


def as_if(condition: bool, otherwise: str = FAILS) -> str:
    """The verdict of a yes or no."""
    return HOLDS if condition else otherwise


def lines(*parts: int | tuple[int, int]) -> tuple[int, ...]:
    """Numbers of lines, from numbers and from pairs of the first and the last."""
    return tuple(n for part in parts for n in ([part] if isinstance(part, int) else range(part[0], part[1] + 1)))


# ---- what it is ----


@says("is", "The formula: MultiHead(Q, K, V), head_i, Attention.", "multi-head", "exact/formula", entry=(17,))
def _(r: Results) -> Finding:
    found = of(r, "exact/formula")
    errors = [*found["cross_attention_error"].values(), found["self_attention_error"]]
    text = f"The layer against the formula written out head by head, float64: at most {max(errors):.1e}"
    return f"{text}, where the largest output is {found['largest_output']:.2f}.", exactly(*errors)


@says(
    "is",
    "Self-attention: queries, keys and values come from one sequence, and attention is over its own elements.",
    "query",
    "exact/one_sequence",
    entry=(11, 43),
)
def _(r: Results) -> Finding:
    found = of(r, "exact/one_sequence")
    apart = found["layer(x)_from_layer(x, x, x)"]
    return f"`layer(x)` and `layer(x, x, x)` differ by {apart}.", exactly(apart)


@says(
    "is",
    "In self-attention each element attends to all others; tokens interact and gather information across the sequence.",
    "tokens",
    "exact/one_sequence",
    entry=(5, 15),
)
def _(r: Results) -> Finding:
    found = of(r, "exact/one_sequence")
    text = (
        f"In {found['pairs_read']} of {found['pairs']} pairs the output of the one depends on the input of the other;"
    )
    text += f" {found['zero_weights']} weights are 0. An element attends to itself too, here with"
    text += (
        f" {percent(found['mean_weight_on_itself'])} of its weight; under a causal mask {found['causal_pairs_seen']}"
    )
    return f"{text} pairs are left.", as_if(found["pairs_read"] == found["pairs"] and not found["zero_weights"])


@says(
    "is",
    "Beside multi-head attention, which encodes and decodes, multi-head self-attention is another important mechanism.",
    "self-attention",
    "exact/m*",
    article=(5, 9, 28),
)
def _(r: Results) -> Finding:
    error = of(r, "exact/modules")["article"]["error"]
    first = of(r, "exact/models")["Transformer of 2017 (torch.nn.Transformer)"]
    text = "It is important, and the same mechanism with one sequence for all three: the article's module computes both"
    text += f" (7 queries, 11 keys: {error:.1e} from headwise). Self-attention is how the Transformer encodes and"
    text += f" decodes: in {first['with_self_attention']} of its {first['layers']} layers, and cross-attention in"
    return f"{text} the {first['with_cross_attention']} of the decoder.", IN_PART if error <= EXACT else FAILS


@says(
    "is",
    "The entry's module, a simplified implementation, computes it.",
    "code",
    "exact/modules",
    entry=lines((19, 41)),
)
def _(r: Results) -> Finding:
    found = of(r, "exact/modules")["dictionary"]
    text = f"{found['error']:.1e} from headwise with its weights, float64; in float32 {found['error32']:.1e}, and the"
    text += f" module itself {found['its_own_error32']:.1e}. It has four biases that the formula lacks."
    return text, exactly(found["error"])


@says(
    "is",
    "The article's module computes it, with a mask that hides where it is 0.",
    "mask",
    "exact/[bm]*",
    article=lines((26, 66)),
)
def _(r: Results) -> Finding:
    free, masked = (of(r, "exact/modules")[name]["error"] for name in ("article", "article, mask"))
    blind = of(r, "exact/blind_rows")
    text = f"{free:.1e} from headwise, with a mask {masked:.1e}. But a query that may see nothing reads"
    text += f" {blind['hidden_keys_read_by_article']} of {blind['hidden_keys']} hidden keys, since -1e9 hides nothing"
    text += " when all scores have it; in float16 it overflows; and a mask for each sequence does not fit."
    return text, IN_PART if blind["hidden_keys_read_by_article"] else exactly(free, masked)


@says(
    "is",
    "The question's layer projects from d_in to d_out without biases, and has no attention yet.",
    "projection",
    "exact/modules",
    question=lines((5, 9), (12, 15), (19, 24), (26, 28), 75, 83),
)
def _(r: Results) -> Finding:
    found = of(r, "exact/modules")
    errors = [found[name]["error"] for name in ("question", "question, causal")]
    text = f"Completed as the answer says, {errors[0]:.1e} from headwise with its weights; causal {errors[1]:.1e}."
    return f"{text} It has no output projection, which the formula has.", exactly(*errors)


@says(
    "is",
    "Multi-head attention was introduced in 2017, was new, and came from a need for more than one query.",
    "multi-head",
    entry=(43,),
    article=(5,),
)
def _(r: Results) -> Finding:
    return "History, not an experiment: Vaswani et al., 2017, section 3.2.2.", NOT_TESTED


# ---- splitting into heads ----


@says(
    "split",
    "The query, and with it d_out, is split over the heads: head_dim = d_out // num_heads.",
    "split",
    "exact/reshape",
    entry=(5,),
    article=(5,),
    question=(10, 30, 39, 45, 46, 47, *range(51, 56)),
)
def _(r: Results) -> Finding:
    found = of(r, "exact/reshape")
    text = (
        f"A head is a slice of the projected query: difference {found['head_from_slice']}. The answer's example of six"
    )
    text += f" features in three heads: {found['six_features_three_heads_error']:.1e}."
    return text, exactly(found["head_from_slice"], found["six_features_three_heads_error"])


@says(
    "split",
    "Each head attends on its own, independently of the others, in a subspace of its own.",
    "subspace",
    "exact/independence",
    entry=(43,),
    article=(5,),
    question=(11, 57, 83),
)
def _(r: Results) -> Finding:
    found = of(r, "exact/independence")
    by_others = found["largest_derivative_by_other_heads"].values()
    text = f"Derivative by another head's queries, keys and values: {max(by_others):g}. Up to the output projection,"
    text += (
        f" which mixes {found['heads_read_by_each_output_after_the_output_projection'][0]} of 3 heads; and each head"
    )
    used = found["features_of_a_token_used_by_each_head"]
    return f"{text} projects from all {used[0]} features of a token, not from a part of them.", as_if(
        not max(by_others)
    )


@says(
    "split",
    "`view` gives a new tensor of another shape without changing the data.",
    "reshape",
    "exact/reshape",
    question=(25,),
)
def _(r: Results) -> Finding:
    found = of(r, "exact/reshape")
    same = found["same_address"] and found["same_storage"] and found["a_write_is_seen_through"]
    text = "Same address, same storage, and a write to the one is seen in the other." if same else "The data moved."
    return f"{text} Merging the heads again needs a copy: `view` refuses there.", as_if(same)


@says(
    "split",
    "Shapes: (batch, length, heads, head_dim), swapped to (batch, heads, length, head_dim); keys transposed; scores "
    "(batch, heads, length, length).",
    "swap",
    "exact/shapes",
    question=(81, 85, 97, 99, 101, 103),
)
def _(r: Results) -> Finding:
    shapes = of(r, "exact/shapes")["shapes"]
    names = ("viewed", "swapped", "keys transposed", "scores")
    text = "; ".join(f"{name} {tuple(shapes[name]['got'])}" for name in names)
    return f"{text[0].upper()}{text[1:]}.", as_if(all(shapes[name]["holds"] for name in names))


@says("split", "Projected tensors are of size (batch, length, d_in).", "projection", "exact/shapes", question=(75,))
def _(r: Results) -> Finding:
    found = of(r, "exact/shapes")
    sizes, projected = found["sizes"], found["shapes"]["projected"]
    text = f"With d_in {sizes['d_in']} and d_out {sizes['d_out']} they are {tuple(projected['got'])}: it is d_out."
    return text, as_if(projected["holds"])


@says(
    "split",
    "Skipping the reshape is fine, gives a single head, and is a simpler implementation.",
    "single",
    "exact/skipped",
    question=(67, 116),
)
def _(r: Results) -> Finding:
    found = of(r, "exact/skipped")
    text = f"{found['from_single_head']:.1e} from one head of the whole width with the same weights, and"
    text += f" {percent(found['from_several_heads_relative'])} of the output away from three. The scale has to follow"
    scaled, scores = found["kept_the_head_scale_from_single_head"], tuple(found["kept_the_swap_shape_of_scores"])
    text += f" (with 1/√head_dim: {scaled:.2f} off), and the swap of dimensions has to go (left in, features attend to"
    text += f" features: scores {scores}). One view, one swap and one merge less: simpler is in the eye of the reader."
    return text, exactly(found["from_single_head"])


@says("split", "One normally swaps heads and length.", "swap", "exact/not_transposed", question=(85,))
def _(r: Results) -> Finding:
    found = of(r, "exact/not_transposed")
    cases, pairs = found["cases"], found["pairs_of_different_tokens"]
    forgotten, viewed = cases["not swapped"], cases["view for the swap, swapped back, causal"]
    text = f"It is needed. Forgotten, the shape is right, but tokens read {forgotten['other_tokens_read']} of {pairs}"
    text += " others: heads attend to heads. With `view` in its place, head 0 reads"
    text += f" {found['tokens_head_0_reads_after_a_view']} of {found['tokens']} tokens, and a causal mask lets"
    text += f" {viewed['later_tokens_read']} of {found['pairs_forbidden_by_a_causal_mask']} forbidden pairs through."
    return text, as_if(not forgotten["other_tokens_read"])


# ---- scores and softmax ----


@says(
    "scores",
    "The reshape is needed for the softmax, which is taken of each head separately.",
    "softmax",
    "exact/softmax",
    question=(114,),
)
def _(r: Results) -> Finding:
    found = of(r, "exact/softmax")
    late = found["one_score_softmaxed_per_head_from_single_head"]
    over_all = found["one_softmax_over_all_heads_relative"]
    text = f"Softmax per head of one big score is a single head ({late:.1e} from it): the reshape has to come before"
    text += " the dot product, so the reason does not hold. That each head has a softmax of its own does: one over all"
    return f"{text} heads is {percent(over_all)} of the output off.", IN_PART if late <= EXACT < over_all else FAILS


@says(
    "scores",
    "The purpose goes beyond the softmax: dot products of the split vectors, as [q1 q2], [k1 k2] → [o1 o2].",
    "product",
    "exact/s*",
    question=(39, 59, 60, 61, 122),
)
def _(r: Results) -> Finding:
    found = of(r, "exact/softmax")
    apart, summed = (
        found[f"head_dot_products_{name}"] for name in ("from_the_whole_relative", "summed_from_the_whole")
    )
    bare = of(r, "exact/skipped")["without_a_softmax_relative"]
    text = f"A head's dot products differ from the whole one by {percent(apart)} of its size (all heads' sum to it,"
    text += f" {summed:.1e}), and without any softmax the reshape changes the output by {percent(bare)}."
    return text, as_if(apart > EXACT)


@says(
    "scores",
    "The softmax simply normalises to a sum of 1, as the last step.",
    "softmax",
    "exact/softmax",
    question=(122,),
)
def _(r: Results) -> Finding:
    found = of(r, "exact/softmax")
    text = (
        f"Rows sum to 1 within {found['row_sums_from_1']['float64']:.1e}. Division by the sum does that as well, with"
    )
    text += f" {found['divided_by_the_sum_negative_weights']} of {found['weights']} weights negative: the softmax also"
    verdict = IN_PART if found["divided_by_the_sum_negative_weights"] else HOLDS
    return f"{text} makes them positive. The weighted sum and the output projection follow.", verdict


@says(
    "scores",
    "The dot products of queries and keys give the weights.",
    "softmax",
    "exact/softmax",
    question=(91, 92, 93, 101),
)
def _(r: Results) -> Finding:
    found = of(r, "exact/softmax")
    text = f"They are scores: {found['scores_negative']} of {found['weights']} are negative, rows sum from"
    text += (
        f" {found['scores_row_sums'][0]:.0f} to {found['scores_row_sums'][1]:.0f}. Scale and softmax make weights of"
    )
    verdict = IN_PART if found["scores_negative"] else HOLDS
    return f"{text} them; without the scale the output is {percent(found['without_the_scale_relative'])} off.", verdict


# ---- what heads learn ----


@says(
    "learn",
    "Parallel heads catch different aspects of the representation; each can learn features of its own, so that one "
    "sequence is encoded as several representations.",
    "aspects",
    "heads/similarity/*",
    entry=(5,),
    article=(9, 15),
)
def _(r: Results) -> Finding:
    shown, told = [], []
    for model, name in MODELS.items():
        trained = heads.result(r, f"heads/similarity/{model}/trained")
        if trained is None:
            continue
        start = f"heads/similarity/{model}/initialised/seed"
        untrained = [heads.result(r, f"{start} {seed}") for seed in range(heads.SEEDS)]
        before = [found["others"] / found["itself"] for found in untrained if found is not None]
        times = trained["others"] / trained["itself"]
        text = (
            f"{name}: where a head looks (its weight by offset) differs from the other heads of its layer {times:.1f}"
        )
        text += (
            f" times as much as from itself on other text{f', {mean(before):.1f} times untrained' if before else ''};"
        )
        text += f" two heads weigh the same tokens {mean(trained['mean']):.2f} apart (0 alike, 1 disjoint);"
        shown.append(f"{text} {trained['alike']} of {trained['pairs']} pairs are near-copies (below {heads.ALIKE})")
        told.append(bool(before) and times > 2 * max(before))
    return f"{'. '.join(shown)}.", as_if(all(told), IN_PART) if told else NOT_TESTED


@says(
    "learn",
    "The model attends to local and to global dependencies at the same time.",
    "dependencies",
    "heads/distances/*",
    entry=(7,),
)
def _(r: Results) -> Finding:
    shown, told = [], []
    for model, name in MODELS.items():
        found = heads.result(r, f"heads/distances/{model}/trained")
        if found is None:
            continue
        local, far, layers = sum(found["local"]), sum(found["global"]), len(found["local"])
        distances = [distance for layer in found["distance"] for distance in layer]
        text = (
            f"{name}: of {len(distances)} heads {local} are local (at most {heads.LOCAL} of the distance that uniform"
        )
        text += f" weights have, {found['uniform']['distance']:.1f} tokens) and {far} global (at least {heads.GLOBAL});"
        text += f" mean distances {min(distances):.1f} to {max(distances):.1f} tokens"
        shown.append(f"{text}; {found['both']} of {layers} layers have both")
        told.append(found["both"] > 0)  # at the same time: in one layer
    return f"{'. '.join(shown)}.", as_if(all(told), IN_PART) if told else NOT_TESTED


@says(
    "learn",
    "Several heads catch relations of different kinds: syntactic ones.",
    "relations",
    "heads/grammar/*",
    entry=(15,),
)
def _(r: Results) -> Finding:
    return relations(r, "grammar", "dependency relations, by direction")


@says(
    "learn",
    "Several heads catch relations of different kinds: semantic ones.",
    "relations",
    "heads/meaning/*",
    entry=(15,),
)
def _(r: Results) -> Finding:
    return relations(r, "meaning", "kinds of reference and repetition")


MODELS = {"minilm": "MiniLM", "embedded": "The embedded model"}


def relations(r: Results, measure: str, kinds: str) -> Finding:
    """Whether single heads of MiniLM find relations that the best rule without a model does not."""
    name = f"heads/{measure}/minilm/trained"
    found = heads.result(r, name)
    if found is None:
        return r[name]["result"]["not_tested"] if name in r else "Only a full run tests it.", NOT_TESTED
    total = len(found["kinds"])
    best = max(found["kinds"].items(), key=lambda kind: kind[1]["gain"])
    right, by_rule, by_one = (percent(mean(found[name])) for name in ("accuracy", "rule_accuracy", "one_accuracy"))
    text = f"MiniLM on {found['words']:,} words annotated by people (GUM): of {total} {kinds}, one head, chosen on"
    text += f" other documents, beats the best rule without a model in {found['better']}, with {found['distinct']}"
    text += (
        f" different heads. Right on average {right}, the rules {by_rule}, the one head that is best over all {by_one}."
    )
    text += f" Most is gained for {best[0]}: {percent(mean(best[1]['accuracy']))} against"
    text += f" {percent(mean(best[1]['rule_accuracy']))}."
    untrained = heads.result(r, f"heads/{measure}/minilm/initialised/seed 0")
    text += f" Untrained heads beat a rule in {untrained['better']}." if untrained else ""
    most = found["better"] >= 0.9 * total
    return text, FAILS if not found["better"] or found["distinct"] < 2 else HOLDS if most else IN_PART


# ---- several heads against one and against others ----


def against(r: Results, ours: str, others: tuple[str, ...], remark: str = "") -> Finding:
    """Whether one kind is better than others, by the comparisons in which every seed says so."""
    texts, wins, losses, open_ = [], [], [], []
    for task in PLAN:
        texts.append(f"{task}: {', '.join(f'{kind} {middle(r, task, kind)}' for kind in (ours, *others))}")
        for other in others:
            verdict = better(r, task, ours, other)
            name = task if len(others) == 1 else f"{task} against {other}"
            (wins if verdict > 0 else losses if verdict < 0 else open_).append(name)
    named = [("better with every seed", wins), ("worse with every seed", losses), ("undecided", open_)]
    told = "; ".join(f"{said}: {', '.join(names)}" for said, names in named if names)
    verdict = HOLDS if not losses + open_ else IN_PART if wins and len(wins) >= len(losses) else FAILS
    return f"{BREAK.join(texts)}{BREAK}{told[0].upper()}{told[1:]}.{remark}", verdict


LOOKUP = f"{BREAK}A score without a query cannot look a word up: in copying and recall its figure is that of guessing."


def middle(r: Results, task: str, kind: str) -> str:
    """The mean over seeds of how well a kind does on a task."""
    found = mean(values(r, task, kind))
    return f"{found:.3f} bits" if task == "text" else percent(found)


@says(
    "against",
    "One head, attending once, does not suffice for complex tasks; several represent and predict better; with one a "
    "model may not work as well in practice.",
    "single",
    "training/*/*head*",
    article=(5, 9),
    question=(67,),
)
def _(r: Results) -> Finding:
    more = {h: [better(r, task, f"{h} heads", "1 head") for task in PLAN] for h in HEADS if h > 1}
    counts = ", ".join(
        f"{h} heads {sum(v > 0 for v in all_)} and {sum(v < 0 for v in all_)}" for h, all_ in more.items()
    )
    text = (
        f"{BREAK}Of {len(PLAN)} tasks, better and worse than 1 head with every seed: {counts}. A head has {WIDTH} / h"
    )
    return against(r, "8 heads", ("1 head",), f"{text} features.")


@says(
    "against",
    "Several heads attend to different contexts of the sequence at the same time.",
    "contexts",
    "exact/two_places",
    entry=(7,),
    article=(5,),
    question=(39,),
)
def _(r: Results) -> Finding:
    found = of(r, "exact/two_places")
    one, wide, two = (
        found[name]["best_on_fresh"] for name in ("one head", "one head, four times as wide", "two heads")
    )
    text = (
        f"Asked for two tokens at once, one layer of two heads leaves an error of {percent(two)} of the answer's size,"
    )
    text += f" one head {percent(one)}, four times as wide {percent(wide)}. Trained on text, recall of two:"
    text += f" {', '.join(f'{k} {middle(r, RECALL_2, k)}' for k in ('1 head', '2 heads', '8 heads'))}."
    return text, as_if(two < one / 2 and better(r, RECALL_2, "2 heads", "1 head") > 0)


@says(
    "against",
    "Several heads beat feed-forward attention.",
    "others",
    "training/*/[8f]*",
    article=(13,),
)
def _(r: Results) -> Finding:
    return against(r, "8 heads", ("feed-forward",), LOOKUP)


@says(
    "against",
    "Several heads beat scalar attention (which the article does not define; here one learned w · k for each key).",
    "others",
    "training/*/[8s]*",
    article=(13,),
)
def _(r: Results) -> Finding:
    return against(r, "8 heads", ("scalar",), LOOKUP)


@says(
    "against",
    "Several heads beat additive attention, the usual kind before.",
    "mechanism",
    "training/*/[8a]*",
    article=(5,),
)
def _(r: Results) -> Finding:
    return against(r, "8 heads", ("additive",))


@says(
    "against",
    "The traditional way uses one query and attends once to the whole sequence.",
    "single",
    "exact/costs",
    article=(5,),
)
def _(r: Results) -> Finding:
    found = of(r, "exact/costs")
    one, *_, many = found["rows"]
    text = f"One head takes one softmax for each query, h heads h: {one['softmaxes_a_sequence']} and"
    text += (
        f" {many['softmaxes_a_sequence']} with {many['heads']} heads for {found['queries']} queries. One query alone is"
    )
    verdict = IN_PART if one["softmaxes_a_sequence"] == found["queries"] > 1 else HOLDS
    return f"{text} that of a decoder's step; in self-attention there are as many as tokens.", verdict


@says(
    "against",
    "Multi-head attention is one of the most important parts of such models.",
    "best",
    "training/*",
    article=(70,),
)
def _(r: Results) -> Finding:
    verdicts = [better(r, task, "8 heads", "mean") for task in PLAN]
    shown = BREAK.join(f"{task}: {middle(r, task, '8 heads')} and {middle(r, task, 'mean')}" for task in PLAN)
    text = (
        f"Against weights that are all alike, parameters equal:{BREAK}{shown}{BREAK}What the other parts are worth is"
    )
    return f"{text} not measured.", IN_PART if max(verdicts) > 0 else FAILS


# ---- short sequences ----


@says(
    "short",
    "It encodes and predicts without regard to the order of the sequence.",
    "short",
    "exact/order",
    article=(9,),
)
def _(r: Results) -> Finding:
    found = of(r, "exact/order")
    with_ = {name: max(by_length.values()) for name, by_length in found["with"].items() if name != "nothing"}
    text = f"Permuting tokens before or after differs by at most {found['largest_difference']:.1e}, at 8 to 128 tokens,"
    text += f" with 1 to 16 heads, and in all {found['every_order']['orders']} orders of"
    text += (
        f" {found['every_order']['tokens']} tokens: exact at any length, not at short ones alone. With positions or a"
    )
    text += " causal mask it is not so: up to "
    text += ", ".join(f"{percent(size)} of the output ({name})" for name, size in with_.items())
    return f"{text}.", exactly(found["largest_difference"], found["every_order"]["difference"])


@says(
    "short",
    "Without the order it does well on rather short sequences (8 to 32 tokens).",
    "short",
    "order/*",
    article=(9,),
)
def _(r: Results) -> Finding:
    shown, losses = [], []
    for length in LENGTHS:
        with_, bag = (mean(on_patches(r, length, places, "8 heads")) for places in (True, False))
        losses.append(with_ - bag)
        shown.append(f"{length} patches {percent(with_)} with places and {percent(bag)} as a bag")
    recalled = [mean(values(r, "recall", "8 heads", n)) for n in LENGTHS]
    text = f"Digits cut into {'; '.join(shown)}. Where order carries nothing, as in recall from 8, 16 and 32 pairs:"
    verdict = HOLDS if max(losses) < 0.01 else IN_PART if min(recalled) > 0.9 else FAILS
    return f"{text} {', '.join(map(percent, recalled))}.", verdict


@says(
    "short",
    "It does especially well on short sequences, since it learns many aspects without regard to order.",
    "short",
    "training/*",
    article=(9,),
)
def _(r: Results) -> Finding:
    shown, wins = [], 0
    for task in ("recall", "recall of two", "copy"):
        gains = [mean(values(r, task, "8 heads", n)) - mean(values(r, task, "feed-forward", n)) for n in LENGTHS]
        own = [percent(mean(values(r, task, "8 heads", n))) for n in LENGTHS]
        wins += gains[0] > gains[1] > gains[2]
        shown.append(f"{task} {', '.join(own)} (ahead of feed-forward by {', '.join(percent(g) for g in gains)})")
    text = f"At 8, 16 and 32: {'; '.join(shown)}. Especially well would be a lead that grows as sequences get shorter."
    text += " That it comes from many aspects seen without order, the article's reason, is not tested apart."
    return text, HOLDS if wins == 3 else IN_PART if wins else FAILS


# ---- long sequences ----

KEPT = 0.9


@says("long", "It is robust and expressive on long sequences.", "long", "training/*", article=(19,))
def _(r: Results) -> Finding:
    kept, shown = [], []
    for task in ("recall", "recall of two", "copy"):
        by_length = [mean(values(r, task, "8 heads", n)) for n in (32, 64, 128)]
        best = max(mean(values(r, task, kind, 128)) for kind in ("additive", "feed-forward", "scalar"))
        ahead = min(better(r, task, "8 heads", kind, 128) for kind in ("feed-forward", "scalar"))
        kept.append(by_length[2] >= KEPT * by_length[0] and ahead > 0)
        shown.append(f"{task} {', '.join(map(percent, by_length))} (the best of the others at 128: {percent(best)})")
    text = f"Trained on at most 32 tokens, 8 heads right at 32, 64 and 128: {'; '.join(shown)}. Robust is what keeps"
    text += f" {percent(KEPT)} of what it had at 32 and is ahead of feed-forward and scalar attention."
    return text, HOLDS if all(kept) else IN_PART if any(kept) else FAILS


@says("long", "On long sequences it is efficient.", "long", "parallel/length/*", article=(17, 19))
def _(r: Results) -> Finding:
    found = parallel.summary(r)["length"]
    shown = [
        f"{name}: time grows by the power {one['time_exponent']:.2f} of the length, memory by"
        f" {one['memory_exponent']:.2f}; at {one['longest']:,} tokens {one['seconds']:.2f} s, which is"
        f" {one['by_useful']:.1f} times the least time, that of its multiplications in a large product of matrices, and"
        f" {one['peak_memory_bytes'] / 2**20:,.0f} MiB"
        for name, one in found.items()
        if name in parallel.MASKS
    ]
    linear = {name: one["memory_exponent"] < 1.2 for name, one in found.items() if name in parallel.MASKS}
    text = f"4 heads of 64, one sequence.{BREAK}{BREAK.join(shown)}{BREAK}The scores are still one for each pair:"
    quick = found["full"]["time_exponent"] < 1.2
    verdict = HOLDS if quick and all(linear.values()) else IN_PART if any(linear.values()) else FAILS
    return f"{text} without a mask, twice the length is four times the work.", verdict


# ---- parallel and efficient ----


@says(
    "cost",
    "Heads are computed in parallel: one operation for all.",
    "parallel",
    "parallel/heads/*",
    entry=(5, 43),
    article=(15, 17),
    question=(39, 114, 122),
)
def _(r: Results) -> Finding:
    measured = parallel.summary(r)["loop_by_batched"]
    most = max(next(iter(measured.values())), key=int)
    ratios = {name: geometric_mean(by_heads[most].values()) for name, by_heads in measured.items()}
    count = of(r, "exact/costs")["rows"][-1]
    text = f"Two batched products of matrices for any number of heads, where a loop over {count['heads']} has"
    text += f" {count['products_in_a_loop_over_heads']}. The loop takes "
    text += ", ".join(f"{ratio:.2f} times as long ({name})" for name, ratio in ratios.items())
    text += f": {most} heads, geometric mean over the shapes of the figure."
    all_ = ((ratio, f"{shape} tokens, {name}") for name, by in measured.items() for shape, ratio in by[most].items())
    least, where = min(all_)
    text += f" The least is {least:.2f} ({where})."
    return text, HOLDS if least > 1 else IN_PART if max(ratios.values()) > 1 else FAILS


@says(
    "cost",
    "The computation is rather parallel (beside recurrent layers, which the article does not name).",
    "parallel",
    "parallel/steps/*",
    article=(17,),
)
def _(r: Results) -> Finding:
    found = parallel.summary(r)["steps"]
    shown = [
        f"{rows} tokens: GRU {by_layer['GRU']['by_attention']:.1f}, LSTM {by_layer['LSTM']['by_attention']:.1f}"
        for rows, by_layer in found.items()
    ]
    threads = [by_layer["batched"]["speed_up"] for by_layer in found.values()]
    recurrent = [by_layer["GRU"]["speed_up"] for by_layer in found.values()]
    threads_ = {record["result"]["threads"] for name, record in r.items() if name.startswith("parallel/steps/")}
    text = f"Times as long as attention with 8 heads, forward and backward, equal width: {'; '.join(shown)}."
    text += f" {max(threads_)} threads speed attention up {min(threads):.2f} to {max(threads):.2f} times, a GRU"
    text += f" {min(recurrent):.2f} to"
    faster = [by_layer[kind]["by_attention"] > 1 for by_layer in found.values() for kind in ("GRU", "LSTM")]
    return f"{text} {max(recurrent):.2f} times.", HOLDS if all(faster) else IN_PART if any(faster) else FAILS


@says("cost", "It is more efficient than additive attention.", "product", "parallel/additive/*", article=(17,))
def _(r: Results) -> Finding:
    found = parallel.summary(r)["additive"]
    text = "; ".join(f"{rows} tokens {by_score['additive']:.0f} times" for rows, by_score in found.items())
    text = f"The additive score takes, against the dot product with weights in memory: {text}."
    return text, as_if(all(by_score["additive"] > 1 for by_score in found.values()))


@says(
    "cost",
    "It is more parallel and more efficient than feed-forward and scalar attention.",
    "others",
    "parallel/additive/*",
    article=(13, 17),
)
def _(r: Results) -> Finding:
    found = parallel.summary(r)["additive"]
    text = "; ".join(f"{rows} tokens {by_score['one row']:.3f} times" for rows, by_score in found.items())
    text = (
        f"A score of each key alone is one row for all queries. It takes, against the dot product: {text}. Both are one"
    )
    return f"{text} operation for all tokens.", as_if(all(by_score["one row"] > 1 for by_score in found.values()))


@says(
    "cost",
    "Efficient beside a single head: several heads cost no more than one of the same width.",
    "parallel",
    "parallel/heads/fused*",
    article=(17,),
    question=(67,),
)
def _(r: Results) -> Finding:
    one, *_, many = of(r, "exact/costs")["rows"]
    by_heads = parallel.summary(r)["by_one_head"]["fused both"]
    ratios = {count: geometric_mean(by_shape.values()) for count, by_shape in by_heads.items()}
    text = f"Parameters and multiply-adds are the same for 1 and {many['heads']} heads; scores are"
    text += f" {many['scores_a_sequence'] / one['scores_a_sequence']:.0f} times as many. Time, forward and backward, to"
    text += (
        f" one head: {', '.join(f'{ratio:.2f} ({count} heads)' for count, ratio in ratios.items() if count != '1')}."
    )
    worst = max(ratios.values())
    return text, HOLDS if worst < 1.1 else IN_PART if min(r for c, r in ratios.items() if c != "1") < 1.1 else FAILS


# ---- where it is used ----


@says("used", "BERT base has 12 heads.", "heads", "exact/models", entry=(13,))
def _(r: Results) -> Finding:
    found = of(r, "exact/models")["BERT base"]
    text = f"{sorted(set(found['heads']))[0]} heads in each of {len(found['heads'])} layers (transformers' model)."
    return text, as_if(set(found["heads"]) == {12})


@says(
    "used",
    "It is a central building block of BERT and GPT, used in every layer.",
    "layer",
    "exact/models",
    entry=(15,),
)
def _(r: Results) -> Finding:
    models = of(r, "exact/models")
    shown = [f"{name} {found['with_self_attention']} of {found['layers']} layers" for name, found in models.items()]
    whole = [found["layers"] == found["with_self_attention"] for found in models.values()]
    return f"{'; '.join(shown)}. Central is judged by presence.", as_if(all(whole))


@says(
    "used",
    "In a layer of the Transformer, a feed-forward network follows it.",
    "feed-forward",
    "exact/models",
    entry=(8,),
)
def _(r: Results) -> Finding:
    models = of(r, "exact/models")
    name = "attention_followed_by_feed_forward"
    shown = [f"{model} in {found[name]} of {found['layers']} layers" for model, found in models.items()]
    return f"{'; '.join(shown)}.", as_if(all(found["layers"] == found[name] for found in models.values()))


@says(
    "used",
    "It encodes and decodes sequences in the Transformer, and is standard in the encoder.",
    "encoder",
    "exact/models",
    entry=(11,),
    article=(5,),
)
def _(r: Results) -> Finding:
    found = of(r, "exact/models")["Transformer of 2017 (torch.nn.Transformer)"]
    text = f"Self-attention in {found['with_self_attention']} of {found['layers']} layers, encoder and decoder alike;"
    text += (
        f" cross-attention in {found['with_cross_attention']}. The blocks of `examples/transformer.py` equal torch's,"
    )
    return f"{text} BERT's and GPT-2's (`tests/test_examples.py`).", as_if(
        found["layers"] == found["with_self_attention"]
    )


@says(
    "used",
    "It is widely used: machine translation, text similarity, natural language processing, speech recognition, image "
    "segmentation, image classification, video analysis, recommendation.",
    "uses",
    "exact/applications",
    article=(70,),
)
def _(r: Results) -> Finding:
    fields = {name: found for name, found in of(r, "exact/applications").items() if isinstance(found, dict)}
    counted = {name: found for name, found in fields.items() if "families" in found}
    shown = ", ".join(f"{name} {found['with_heads']} of {found['families']}" for name, found in counted.items())
    left = [name for name in fields if name not in counted]
    text = f"Families of models in transformers that have attention heads: {shown}."
    text += f" {', '.join(left).capitalize()}: not tested, transformers has no list of such models." if left else ""
    most = all(found["with_heads"] > found["families"] / 2 for found in counted.values())
    return text, FAILS if not most else IN_PART if left else HOLDS


@says("used", "Many of the most advanced models are Transformers or variants.", "best", article=(70,))
def _(r: Results) -> Finding:
    return "No ranking of models is at hand here; the row above counts them.", NOT_TESTED
