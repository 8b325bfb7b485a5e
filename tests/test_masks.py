"""Masks: what each allows against plain Python, and the laws of their algebra."""

import copy
import pickle

import pytest
import torch
from cases import MASKS, SHAPES, SMALL_SHAPES, SQUARE_MASKS, Call
from helpers import randn
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise import (
    And,
    Bias,
    Causal,
    Chunk,
    CustomMask,
    Dense,
    Document,
    Full,
    Not,
    Or,
    Padding,
    PerHead,
    Positions,
    Prefix,
    ShapeError,
    Window,
    attention,
)
from headwise.algebra import evaluate

CALLS = {**SHAPES, **SMALL_SHAPES, "far apart": Call(rows=5, slots=7, query_start=20, key_start=13)}
ELSEWHERE = (
    Call(rows=5, slots=7, query_start=3, key_start=0),
    Call(rows=5, slots=7, query_start=-4, key_start=2),
    Call(rows=7, slots=5, query_start=0, key_start=0),
    Call(rows=7, slots=5, query_start=0, key_start=-3),
    Call(rows=3, slots=4, query_start=100, key_start=0),
)


def allowed(mask, call):
    """The mask as "B H T S" booleans."""
    bound = mask.bind(call.batch, call.heads, call.queries, call.keys)
    seen = evaluate(bound, call.batch, call.heads, call.queries, call.keys)
    return seen.expand(call.batch, call.heads, call.rows, call.slots)


@pytest.mark.parametrize("case", (*MASKS, *SQUARE_MASKS), ids=lambda case: case.name)
def test_allowed_is_what_plain_python_says(case):
    for call in (*CALLS.values(), *ELSEWHERE):
        if case in SQUARE_MASKS and call.rows != call.slots:
            continue
        assert allowed(case.make(call), call).equal(case.dense(call)), call


@pytest.mark.parametrize("case", MASKS, ids=lambda case: case.name)
def test_chosen_rows_are_those_of_the_whole(case):
    call = SHAPES["gqa"]
    mask = case.make(call).bind(call.batch, call.heads, call.queries, call.keys)
    whole = allowed(case.make(call), call)
    for rows in (slice(2, 5), torch.tensor([6, 0, 3])):
        part = evaluate(mask, call.batch, call.heads, call.queries, call.keys, rows=rows)
        assert part.expand_as(whole[:, :, rows]).equal(whole[:, :, rows])


def test_heads_are_counted_globally():
    # a process that holds heads 2 and 3 of four sees the masks of heads 2 and 3
    masks = PerHead((Causal(), Full(), Window(1), ~Causal()))
    queries = keys = Positions(5)
    whole = evaluate(masks.bind(1, 4, queries, keys), 1, 4, queries, keys)
    part = evaluate(masks.bind(1, 4, queries, keys), 1, 2, queries, keys, head_offset=2)
    assert part.equal(whole[:, 2:])


numbers = st.integers(0, 6)
leaves = st.one_of(
    st.just(Full()),
    st.just(Causal()),
    st.builds(Window, st.integers(1, 6)),
    st.builds(lambda a, b: Window(left=a, right=b), numbers, st.one_of(st.none(), numbers)),
    st.builds(Padding, st.one_of(numbers, st.tuples(numbers, numbers).map(torch.tensor))),
    st.builds(lambda n: Padding(left=n), st.one_of(numbers, st.lists(numbers, min_size=2, max_size=2))),
    st.builds(Prefix, numbers, st.integers(-2, 4)),
    st.builds(lambda a, b: Prefix([a, b], start=[b, a]), numbers, numbers),
    st.builds(Chunk, st.integers(1, 5), st.integers(-3, 3)),
    st.builds(lambda a, b: Chunk([a, b]), st.integers(1, 5), st.integers(1, 5)),
    st.integers(0, 9).map(lambda n: Dense(randn(5, 7, seed=n) > 0)),
    st.integers(0, 9).map(lambda n: Padding(randn(2, 7, seed=n) > 0)),
    st.integers(0, 9).map(lambda n: Document(torch.arange(5)[None] // (n + 1), torch.arange(7)[None] // 2)),
)
masks = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(And, inner, inner),
        st.builds(Or, inner, inner),
        st.builds(Not, inner),
        st.builds(lambda a, b, c: PerHead((a, b, c)), inner, inner, inner),
    ),
    max_leaves=6,
)
CALL = Call(batch=2, heads=3, rows=5, slots=7)


def examples(count):
    # beartype checks a random entry of a tuple, also where Hypothesis builds one
    quiet = pytest.mark.filterwarnings("ignore:Do not use the `random` module")
    return lambda test: quiet(settings(max_examples=count, deadline=None, derandomize=True)(test))


@examples(40)
@given(masks, masks, masks)
def test_boolean_laws(a, b, c):
    laws = (
        (~(a & b), ~a | ~b),
        (~(a | b), ~a & ~b),
        (~~a, a),
        (a & (b | c), (a & b) | (a & c)),
        (a | (b & c), (a | b) & (a | c)),
        (a & b, b & a),
        (a | b, b | a),
        (a & a, a),
        (a | (a & b), a),
        (a & Full(), a),
        (a | ~Full(), a),
        (a & ~a, ~Full()),
        (a | ~a, Full()),
    )
    for left, right in laws:
        assert allowed(left, CALL).equal(allowed(right, CALL)), f"{left!r} is not {right!r}"


@examples(60)
@given(masks, masks)
def test_algebra_is_that_of_booleans(a, b):
    # this is what the laws cannot tell: that & is not |
    seen_a, seen_b = allowed(a, CALL), allowed(b, CALL)
    assert allowed(a & b, CALL).equal(seen_a & seen_b)
    assert allowed(a | b, CALL).equal(seen_a | seen_b)
    assert allowed(~a, CALL).equal(~seen_a)


@examples(60)
@given(masks)
def test_spans_of_expressions_are_what_is_allowed(mask):
    bound = mask.bind(CALL.batch, CALL.heads, CALL.queries, CALL.keys)
    spans = bound.spans(CALL.queries, CALL.keys)
    if spans is not None:
        slots = torch.arange(CALL.slots)[:, None]
        runs = spans.tensor()[..., None, :, :]
        seen = ((slots >= runs[..., 0]) & (slots < runs[..., 1])).any(-1)
        assert seen.expand(2, 3, 5, 7).equal(allowed(mask, CALL))


def test_masks_are_values():
    for case in MASKS:
        mask = case.make(CALL)
        if any(True for _ in mask.tensors()) or case.name == "custom":
            continue
        again = case.make(CALL)
        assert mask == again and hash(mask) == hash(again)
    assert Window(3) != Window(4) and Window(3) != Chunk(3) and Causal() & Full() != Full() & Causal()
    ids = torch.zeros(1, 3, dtype=torch.int64)
    assert Document(ids) == Document(ids) and Document(ids) != Document(ids.clone())
    with pytest.raises(AttributeError):
        Window(3).size = 4


@pytest.mark.parametrize("case", MASKS, ids=lambda case: case.name)
def test_copies_mean_the_same(case):
    mask = case.make(CALL)
    copies = [copy.deepcopy(mask), mask.to("cpu")]
    if case.name != "custom":  # a lambda cannot be pickled
        copies.append(pickle.loads(pickle.dumps(mask)))
    for other in copies:
        assert allowed(other, CALL).equal(allowed(mask, CALL))


def test_to_moves_every_tensor():
    mask = PerHead((Dense(torch.ones(2, 2, dtype=torch.bool)), Causal() & Padding([1]))) & Document(
        torch.zeros(1, 2).int()
    )
    assert [t.device.type for t in mask.tensors()] == ["cpu"] * 3
    assert [t.device.type for t in mask.to("meta").tensors()] == ["meta"] * 3


@pytest.mark.plain
def test_a_boolean_tensor_means_dense():
    call = SHAPES["gqa"]
    for shape in ((7, 11), (2, 1, 1, 11), (1, 15, 7, 11)):
        seen = call.coin(*shape)
        assert attention(*call.tensors(), mask=seen).equal(attention(*call.tensors(), mask=Dense(seen)))
    with pytest.raises(ShapeError, match="Bias"):
        attention(*call.tensors(), mask=torch.zeros(7, 11))
    with pytest.raises(ShapeError, match="from_zeros"):
        attention(*call.tensors(), mask=torch.ones(7, 11, dtype=torch.int64))
    with pytest.raises(ShapeError, match="ambiguous"):
        attention(*call.tensors(), mask=torch.ones(2, 7, 11, dtype=torch.bool))


def test_from_zeros_is_the_textbook_form():
    shown = randn(7, 11) > 0
    for written in (shown.int(), shown.float(), shown.long() * -5, shown):
        assert Dense.from_zeros(written).values.equal(shown)
    heads = randn(2 * 3, 7, 11) > 0
    mask = Dense.from_zeros(heads.int(), num_heads=3)
    for b in range(2):
        for h in range(3):
            assert mask.values[b, h].equal(heads[b * 3 + h])
    assert Dense.from_zeros(heads[:1].int()).values.equal(heads[0])
    assert Dense.from_zeros(torch.ones(11)).values.shape == (1, 11)
    with pytest.raises(ShapeError, match="num_heads"):
        Dense.from_zeros(heads.int())
    with pytest.raises(ShapeError, match="6 masks cannot be shared evenly by 4"):
        Dense.from_zeros(heads.int(), num_heads=4)


def test_the_bottom_right_of_a_dense_mask_is_the_last_query_and_key():
    # in a call that stands elsewhere its rows and columns are still those of the call
    call = Call(rows=3, slots=5, query_start=40, key_start=10)
    seen = call.coin(3, 5)
    assert allowed(Dense(seen), call)[0, 0].equal(seen)
    out = attention(*call.tensors(), mask=seen, query_positions=call.queries, key_positions=call.keys)
    assert out.equal(attention(*call.tensors(), mask=seen))


def test_a_mask_for_other_sizes_is_refused():
    call = SHAPES["gqa"]
    wrong = (
        Padding([3, 4, 5]),
        Padding(torch.ones(2, 10, dtype=torch.bool)),
        Padding(left=[1]),
        Prefix([1, 2, 3]),
        Chunk(2, start=[0]),
        Document(torch.zeros(1, 7, dtype=torch.int64)),
        Document(torch.zeros(1, 7, dtype=torch.int64), torch.zeros(3, 11, dtype=torch.int64)),
        Dense(torch.ones(7, 10, dtype=torch.bool)),
        PerHead((Causal(),) * 14),
        Causal() & Padding([3, 4, 5]),
        ~PerHead((Causal(),) * 14),
    )
    for mask in wrong:
        with pytest.raises(ShapeError):
            attention(*call.tensors(), mask=mask)


@pytest.mark.plain
def test_what_makes_no_mask_is_refused():
    wrong = (
        lambda: Window(0),
        Window,
        lambda: Window(3, left=2),
        lambda: Window(left=-1),
        lambda: Window(True),
        lambda: Padding(-1),
        Padding,
        lambda: Padding(3, left=1),
        lambda: Padding([1, -1]),
        lambda: Padding(torch.ones(2, 3, 4, dtype=torch.bool)),
        lambda: Prefix(-1),
        lambda: Chunk(0),
        lambda: Chunk([2, 0]),
        lambda: PerHead((Causal(), 3)),
        lambda: CustomMask(3),
        lambda: Document.from_lengths([3, -1]),
        lambda: Dense(torch.ones(3, 3)),
    )
    for make in wrong:
        with pytest.raises(ShapeError):
            make()
    with pytest.raises(ShapeError, match="not booleans"):
        attention(*CALL_TENSORS, mask=CustomMask(lambda b, h, q, k: q - k))
    with pytest.raises(ShapeError, match="no mask"):
        Causal() & Bias(torch.zeros(3, 3))


CALL_TENSORS = SHAPES["gqa"].tensors()
