"""Masks as text: what is drawn, and what is read."""

import pytest
import torch
from cases import MASKS, SHAPES, Call
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise import (
    And,
    Causal,
    Chunk,
    CustomMask,
    Dense,
    Document,
    Full,
    Mask,
    Not,
    Or,
    Padding,
    PerHead,
    Prefix,
    ShapeError,
    Window,
    draw,
    parse,
)


@pytest.mark.parametrize("case", MASKS, ids=lambda case: case.name)
def test_drawn_is_what_plain_python_says(case):
    call = SHAPES["mha"]
    text = draw(case.make(call), call.rows, call.slots, batch=call.batch, heads=call.heads)
    want = case.dense(call)
    pictures = {}
    for b in range(call.batch):
        for h in range(call.heads):
            lines = [" ".join("■" if s else "·" for s in row) for row in want[b, h].tolist()]
            pictures[b, h] = "\n".join(lines)
    headed = [line for line in text.splitlines() if line.startswith(("sequence", "head"))]
    if len(set(pictures.values())) == 1:
        assert text == pictures[0, 0] and not headed
        return
    for (b, h), picture in pictures.items():
        # sequences or heads that do not matter to the mask are not drawn apart
        titles = (f"sequence {b}, head {h}", f"sequence {b}", f"head {h}")
        assert any(f"{title}\n{picture}" in text for title in titles), (b, h)


def test_the_last_query_is_drawn_with_the_last_key():
    assert draw(Causal(), 2, 4) == "■ ■ ■ ·\n■ ■ ■ ■"
    assert draw(Causal(), 3, 2) == "· ·\n■ ·\n■ ■"
    assert draw(Full(), 0) == "" and draw(Full(), 2, 0) == "\n"


numbers = st.integers(0, 40)
leaves = st.one_of(
    st.just(Full()),
    st.just(Causal()),
    st.builds(Window, st.integers(1, 40)),
    st.builds(lambda a, b: Window(left=a, right=b), numbers, st.one_of(st.none(), numbers)),
    st.builds(Padding, numbers),
    st.builds(lambda n: Padding(left=n), numbers),
    st.builds(Prefix, numbers, st.integers(-9, 9)),
    st.builds(Chunk, st.integers(1, 40), st.integers(-9, 9)),
)
masks = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(And, inner, inner),
        st.builds(Or, inner, inner),
        st.builds(Not, inner),
        st.builds(lambda a, b: PerHead((a, b)), inner, inner),
        st.builds(lambda a: PerHead((a,)), inner),
    ),
    max_leaves=8,
)


# beartype checks a random entry of a tuple, also where Hypothesis builds one
@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@settings(max_examples=200, deadline=None, derandomize=True)
@given(masks)
def test_a_mask_of_numbers_is_read_back_from_its_text(mask):
    assert parse(repr(mask)) == mask
    assert parse(f"  ({mask!r})\n") == mask


def test_what_is_typed():
    both = Causal() & Window(3)
    for text in (
        "Causal() & Window(3)",
        "Causal()&Window(size=3)",
        "(Causal()) & (Window(3))",
        "Causal()\n& Window(3)",
    ):
        assert parse(text) == both, text
    assert parse("Causal() & Window(2) | Prefix(1)") == (Causal() & Window(2)) | Prefix(1)
    assert parse("Causal() & (Window(2) | Prefix(1))") == Causal() & (Window(2) | Prefix(1))
    assert parse("~Causal() & Full()") == ~Causal() & Full()
    assert parse("~(Causal() & Full())") == ~(Causal() & Full())
    assert parse("Window(left=None, right=2)") == Window(right=2)
    assert parse("Chunk(4, start=-1)") == Chunk(4, -1)
    assert parse("PerHead((Causal(), Window(2)))") == PerHead((Causal(), Window(2)))


def test_lists_become_tensors():
    call = Call(batch=2, heads=1, kv_heads=1, rows=3, slots=3)
    for text, mask in (
        ("Padding([1, 2])", Padding([1, 2])),
        ("Prefix([1, 2], start=[0, 1])", Prefix([1, 2], start=[0, 1])),
        ("Dense([[True, False, True]])", Dense(torch.tensor([[True, False, True]]))),
        ("Document([0, 0, 1])", Document(torch.tensor([0, 0, 1]))),
    ):
        drawn = [draw(m, call.rows, call.slots, batch=2) for m in (parse(text), mask)]
        assert drawn[0] == drawn[1], text


def test_a_mask_of_your_own_is_found_by_its_name():
    from dataclasses import dataclass

    @dataclass(frozen=True, eq=False)
    class Strided(Mask):
        step: int

        def allowed(self, b, h, q, k):
            return (q - k) % self.step == 0

    assert parse("Causal() & Strided(2)") == Causal() & Strided(2)
    assert draw(parse("Strided(2)"), 3) == "■ · ■\n· ■ ·\n■ · ■"


WRONG = (
    ("", "not a mask"),
    ("Causal", "needs parentheses"),
    ("Causal(", "at character"),
    ("Causal() &", "at character"),
    ("Causal() and Window(3)", "cannot hold BoolOp"),
    ("Causal() + Window(3)", "cannot hold BinOp"),
    ("Causal() & 3", "one side is not"),
    ("3 | Causal()", "one side is not"),
    ("~3", "goes before a mask"),
    ("not Causal()", "cannot hold UnaryOp"),
    ("3", "not a mask but int"),
    ("[Causal()]", "not a mask but list"),
    ("Windows(3)", "There is no mask 'Windows'"),
    ("window(3)", "There is no mask 'window'"),
    ("Mask()", "There is no mask 'Mask'"),
    ("Window(0)", "at least 1"),
    ("Window(3.5)", "cannot hold Constant"),
    ("Window('3')", "cannot hold Constant"),
    ("Window(1 + 2)", "cannot hold BinOp"),
    ("Window(3, 4, 5)", "cannot be built"),
    ("Window(size=3, size=4)", "given an argument twice"),
    ("Window(width=3)", "has no argument 'width'"),
    ("Padding(3, keys=2)", "has no argument 'keys'"),
    ("Window(*[3])", "takes no *"),
    ("Window(**{'size': 3})", "takes no *"),
    ("__import__('os').system('true')", "cannot hold"),
    ("open('x')", "There is no mask 'open'"),
    ("Causal().spans", "cannot hold Attribute"),
    ("(lambda: Causal())()", "cannot hold"),
    ("[Causal() for _ in [1]]", "cannot hold ListComp"),
    ("Causal(); Full()", "at character"),
    ("CustomMask(Causal())", "function"),
    ("~" * 3000 + "Causal()", "nest it less deeply"),
    ("(" * 3000 + "Causal()" + ")" * 3000, r"cannot be read|at character"),
    ("Causal() & " * 2000 + "Causal()", "too long"),
    ("Causal()\0", r"cannot be read|at character"),
)


@pytest.mark.parametrize("text, said", WRONG, ids=[text[:30] for text, _ in WRONG])
def test_what_is_no_mask_is_refused(text, said):
    with pytest.raises(ShapeError, match=said):
        parse(text)


def test_the_message_points_at_the_place():
    with pytest.raises(ShapeError, match="character 12"):
        parse("Causal() & Windows(3)")


def test_a_custom_mask_shows_its_function():
    assert "CustomMask" in repr(CustomMask(lambda b, h, q, k: q == k))
