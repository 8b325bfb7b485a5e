"""The walk on small numbers: each tensor and each mistake against loops that share nothing with it."""

import json
import math

import pytest
import torch
from helpers import assert_as_good_as

from headwise import Causal, Full, MultiHeadAttention, Padding, ShapeError, Window
from headwise.steps import walk

SIZES = [(6, 3, 3), (6, 2, 5), (10, 5, 4), (7, 1, 3), (12, 4, 4)]


def tensor(found, start, name):
    return next(s for s in found.steps if s.title.startswith(start)).tensors[name]


def projected(found):
    return [tensor(found, "project: q", name)[0].tolist() for name in "qkv"]


def softmax(scores):
    total = sum(math.exp(s) for s in scores)
    return [math.exp(s) / total for s in scores]


def by_loops(q, k, v, heads, sees):
    """Merged heads of every token, one number after the other."""
    size = len(q[0]) // heads
    out = [[0.0] * len(q[0]) for _ in q]
    for h in range(heads):
        dims = range(h * size, (h + 1) * size)
        for t in range(len(q)):
            keys = [s for s in range(len(k)) if sees(t, s)]
            weights = softmax([sum(q[t][d] * k[s][d] for d in dims) / math.sqrt(size) for s in keys])
            for d in dims:
                out[t][d] = sum(w * v[s][d] for w, s in zip(weights, keys, strict=True))
    return out


def causal(t, s):
    return s <= t


def as_tensor(rows):
    return torch.tensor([rows], dtype=torch.float64)


@pytest.mark.parametrize(("width", "heads", "length"), SIZES)
def test_the_walk_is_multi_head_attention(width, heads, length):
    found = walk(width, heads, length, seed=3)
    merged = as_tensor(by_loops(*projected(found), heads, causal))
    assert_as_good_as(tensor(found, "merge", "out"), merged, terms=width)
    # the output projection is known by its effect only: a layer with the same weights gives the same
    made = torch.Generator().manual_seed(3)
    drawn = [
        torch.randint(-10, 11, size, generator=made, dtype=torch.float64) / 10
        for size in ((1, length, width), *[(width, width)] * 4)
    ]
    layer = MultiHeadAttention(width, heads, bias=False, dtype=torch.float64, mask=Causal())
    with torch.no_grad():
        for projection, weight in zip(
            (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj), drawn[1:], strict=True
        ):
            projection.weight.copy_(weight)
        want = layer(drawn[0])
    assert_as_good_as(found.output, want, terms=width)
    assert found.error == (found.output - want).abs().max()
    assert f"This equals the layer to within {found.error:.1e}." in str(found)


def test_every_step_has_the_shape_it_says():
    width, heads, length = 10, 5, 4
    found = walk(width, heads, length)
    sizes = {"B": 1, "T": length, "E": width, "H": heads, "D": width // heads}
    for s in found.steps:
        for name, numbers in s.tensors.items():
            assert list(numbers.shape) == [sizes[letter] for letter in s.letters.split()], (s.title, name)
    assert [s.title.split(":")[0].split(" over")[0] for s in found.steps] == [
        *(
            "project",
            "split",
            "transpose",
            "score",
            "scale",
            "mask",
            "softmax",
            "sum",
            "transpose back",
            "merge",
        ),
        "project",
    ]


def test_views_and_copies_are_told_as_they_are():
    found = walk()
    assert "It is a view" in found.steps[1].says
    assert "It is a view" in found.steps[2].says
    assert "Strides 18×6×2×1 become 18×2×6×1." in found.steps[2].says
    assert "It is a copy" in found.steps[9].says
    q, split, turned = (
        tensor(found, "project: q", "q"),
        tensor(found, "split", "q"),
        tensor(found, "transpose:", "q"),
    )
    assert q.data_ptr() == split.data_ptr() == turned.data_ptr()
    assert torch.equal(split[0, 1, 2], q[0, 1, 4:6])
    assert torch.equal(turned[0, 2, 1], q[0, 1, 4:6])


def test_weights_and_the_mask():
    found = walk(6, 2, 5, mask=Window(2))
    weights = tensor(found, "softmax", "weights")
    seen = torch.tensor([[abs(t - s) < 2 for s in range(5)] for t in range(5)])
    assert torch.equal(weights > 0, seen.expand(1, 2, 5, 5))
    assert_as_good_as(weights.sum(-1), torch.ones(1, 2, 5, dtype=torch.float64), terms=5)
    assert "26 of 50 pairs are allowed" in found.steps[5].says
    dead = walk(6, 2, 5, mask=Padding(0))
    assert dead.output.abs().max() == dead.error == 0


def test_no_split_is_one_head_whose_scores_are_the_sum_of_those_of_the_heads():
    found = walk(6, 3, 4)
    single = found.mistakes[0]
    assert (single.letters, single.scores) == ("B T T", (1, 4, 4))
    raw = tensor(found, "score", "scores").sum(1)
    q, k, _ = (torch.tensor(t, dtype=torch.float64) for t in projected(found))
    assert_as_good_as(raw, (q @ k.T)[None], terms=6)
    merged = by_loops(*projected(found), 1, causal)
    check_output(found, single, merged)
    assert single.wrong_rows == (2, 3, 4)  # the first token sees itself alone, and has nothing to weigh
    assert single.landed is None


def check_output(found, mistake, merged):
    """The output of a mistake against its merged heads, and how far it is off."""
    weight = out_weight(found)
    assert_as_good_as(mistake.output, as_tensor(merged) @ weight.T, terms=len(weight))
    off = (mistake.output - found.output).abs()
    assert mistake.difference == off.max()
    assert mistake.wrong_rows == tuple((off[0].amax(-1) > 1e-9).nonzero()[:, 0].add(1).tolist())


def out_weight(found):
    """The last of the four weights, drawn again."""
    _, length, width = found.tokens.shape
    made = torch.Generator().manual_seed(0)
    return [
        torch.randint(-10, 11, size, generator=made, dtype=torch.float64) / 10
        for size in ((1, length, width), *[(width, width)] * 4)
    ][-1]


def test_no_transpose_lets_heads_attend_to_heads():
    found = walk(6, 3, 4)
    wrong = found.mistakes[1]
    assert (wrong.letters, wrong.scores) == ("B T H H", (1, 4, 3, 3))
    q, k, v = projected(found)
    merged = []
    for t in range(4):
        q_heads, k_heads, v_heads = ([x[t][2 * h : 2 * h + 2] for h in range(3)] for x in (q, k, v))
        row = []
        for a in range(3):
            weights = softmax(
                [sum(x * y for x, y in zip(q_heads[a], k_heads[b], strict=True)) / math.sqrt(2) for b in range(3)]
            )
            row += [sum(w * v_heads[b][d] for b, w in enumerate(weights)) for d in range(2)]
        merged.append(row)
    check_output(found, wrong, merged)
    assert (wrong.last, wrong.first, wrong.swapped) == ((4,), (1,), ())
    assert "by accident" not in wrong.says
    assert "by accident where H = T" in walk(6, 3, 3).mistakes[1].says


def test_a_view_straight_to_heads_mixes_tokens():
    found = walk(6, 3, 4)
    wrong = found.mistakes[2]
    assert (wrong.letters, wrong.scores) == ("B H T T", (1, 3, 4, 4))
    # memory: t1d1 … t1d6 t2d1 …, dealt out in pairs, four to a head
    assert wrong.landed["head 1, t4"] == [(2, 1), (2, 2)]
    assert wrong.landed["head 2, t1"] == [(2, 3), (2, 4)]
    assert wrong.landed["head 3, t4"] == [(4, 5), (4, 6)]
    q, k, v = projected(found)
    merged = [[0.0] * 6 for _ in range(4)]
    for h in range(3):
        parts = [
            [[x[t - 1][d - 1] for t, d in wrong.landed[f"head {h + 1}, t{i + 1}"]] for i in range(4)] for x in (q, k, v)
        ]
        for t, row in enumerate(by_loops(*parts, 1, causal)):
            merged[t][2 * h : 2 * h + 2] = row
    check_output(found, wrong, merged)
    assert set(wrong.last) > {4}  # the last token leaks into earlier rows
    assert 3 in wrong.swapped or 4 in wrong.swapped


def test_no_transpose_back_deals_heads_to_the_wrong_tokens():
    found = walk(6, 3, 4)
    wrong = found.mistakes[3]
    right = by_loops(*projected(found), 3, causal)
    assert wrong.landed["output t1"] == [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)]
    assert wrong.landed["output t2"] == [(4, 1), (4, 2), (1, 3), (1, 4), (2, 3), (2, 4)]
    merged = [[right[t - 1][d - 1] for t, d in wrong.landed[f"output t{i + 1}"]] for i in range(4)]
    check_output(found, wrong, merged)
    assert set(wrong.last) > {4}


def test_the_probes_tell_right_from_wrong_without_a_look_inside():
    found = walk(6, 2, 5)
    assert found.right == {"last": (5,), "first": (1, 2, 3, 4, 5), "swapped": ()}
    no_split, no_transpose, view, no_way_back = found.mistakes
    assert (no_split.last, no_split.first, no_split.swapped) == tuple(found.right.values())
    assert no_transpose.first == (1,)
    assert {view.last, no_way_back.last}.isdisjoint({found.right["last"]})
    assert view.swapped and no_way_back.swapped
    assert walk(6, 2, 5, mask=Full()).right["last"] == (1, 2, 3, 4, 5)


def test_it_prints_every_step_and_number_within_80_columns():
    for sizes in SIZES:
        said = str(walk(*sizes))
        assert max(map(len, said.splitlines())) <= 80
    said = str(walk())
    assert "6. mask: -inf where Causal() does not allow the pair" in said
    assert "    head 1                   head 2                   head 3\n" in said
    assert "t1    1.00  0.00  0.00" in said
    assert "  -inf" in said
    assert "-0.00" not in said
    assert "head 3, t1: t3 d1–d2" in said
    for letter in "abcd":
        assert f"\n({letter}) " in said


def test_a_wide_token_is_printed_in_parts():
    said = str(walk(22, 2, 3))
    assert "d21" in said
    assert max(map(len, said.splitlines())) <= 80


def test_it_becomes_json():
    found = walk()
    told = json.loads(json.dumps(found.to_dict()))
    assert told["output"] == found.output.tolist()
    assert [m["scores"] for m in told["mistakes"]] == [[1, 3, 3], [1, 3, 3, 3], [1, 3, 3, 3], [1, 3, 3, 3]]


def test_the_same_seed_gives_the_same_numbers_and_another_others():
    assert torch.equal(walk(seed=1).output, walk(seed=1).output)
    assert not torch.equal(walk(seed=1).output, walk(seed=2).output)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((6, 3, 0), "0 tokens of 6 numbers"),
        ((6, 4, 3), "cannot be split evenly over 4"),
        ((64, 8, 9), "at most 512"),
    ],
)
def test_sizes_that_cannot_be_walked(sizes, said):
    with pytest.raises(ShapeError, match=said):
        walk(*sizes)


def test_the_letters_of_each_tensor_are_printed():
    printed = str(walk())
    for shown in ("q  (B T E) 1×3×6", "k  (B H T D) 1×3×3×2", "weights  (B H T T) 1×3×3×3", "out  (B T E) 1×3×6"):
        assert shown in printed
