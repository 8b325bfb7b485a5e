"""Spans: the runs of keys that masks claim, against what they allow."""

import random

import pytest
import torch
from cases import MASKS, SHAPES, SMALL_SHAPES, SQUARE_MASKS, Call

from headwise import Causal, Full, Padding, Positions, Spans, Window

DRAW = random.Random(0)
ELSEWHERE = [
    Call(rows=DRAW.randint(1, 8), slots=DRAW.randint(1, 9), query_start=DRAW.randint(-6, 12), key_start=start)
    for start in (0, 0, 0, 5, -4, 30, -30, 1)
]
SQUARE_ELSEWHERE = [Call(rows=6, slots=6, query_start=q, key_start=k) for q, k in ((0, 0), (-3, 2), (9, 4))]


def seen(spans, call):
    """Booleans "B H T S" from the runs."""
    slots = torch.arange(call.slots)[:, None]
    runs = spans.tensor()[..., None, :, :]
    inside = ((slots >= runs[..., 0]) & (slots < runs[..., 1])).any(-1)
    return inside.expand(call.batch, call.heads, call.rows, call.slots)


def of(mask, call):
    return mask.bind(call.batch, call.heads, call.queries, call.keys).spans(call.queries, call.keys)


@pytest.mark.parametrize("case", (*MASKS, *SQUARE_MASKS), ids=lambda case: case.name)
def test_spans_are_what_is_allowed(case):
    square = case in SQUARE_MASKS
    for call in (*SHAPES.values(), *SMALL_SHAPES.values(), *ELSEWHERE, *SQUARE_ELSEWHERE):
        if square and call.rows != call.slots:
            continue
        spans = of(case.make(call), call)
        assert (spans is None) == (case.runs is None), "a mask has spans always or never"
        if spans is None:
            continue
        want = case.dense(call)
        assert seen(spans, call).equal(want), call
        work = spans.work().expand(call.batch, call.heads)
        assert work.equal(want.sum((-1, -2)))
        assert not spans.is_full or want.all()
        check_form(spans, call, case.runs)
        if spans.is_numbers and call.batch:
            check_reach(spans, want)


def check_form(spans, call, most):
    runs = spans.tensor()
    assert runs.dtype == torch.int32 and runs.shape[2:4] == (call.rows, runs.shape[3])
    assert runs.shape[3] <= most, f"{runs.shape[3]} runs where the structure allows {most}"
    start, stop = runs[..., 0], runs[..., 1]
    assert (start >= 0).all() and (stop <= call.slots).all() and (start <= stop).all()
    # ascending and apart, the empty ones last
    assert (start[..., 1:] >= stop[..., :-1]).all()
    assert (start[start == stop] == call.slots).all()


def check_reach(spans, want):
    start, stop = spans.reach()
    columns = want.any(2).any(0).any(0).nonzero()
    if len(columns):
        assert (start, stop) == (columns.min(), columns.max() + 1)
    else:
        assert start == stop


def test_numbers_stay_numbers():
    call = SHAPES["gqa"]
    for mask in (Full(), Causal(), Window(3), Window(left=2), Causal() & Window(3), Padding(5), Causal() & Padding(5)):
        spans = of(mask, call)
        assert spans.is_numbers, mask
        assert spans.runs is None
    assert not of(~Causal(), call).is_numbers
    assert not of(Padding([1, 2]), call).is_numbers


def test_full_is_known_without_looking():
    queries = Positions(1, start=10)
    assert Causal().spans(queries, Positions(11)).is_full
    assert not Causal().spans(queries, Positions(12)).is_full
    assert Window(11).spans(queries, Positions(11)).is_full
    assert not Window(10).spans(queries, Positions(11)).is_full
    assert Padding(11).spans(queries, Positions(11)).is_full
    assert not Padding(10).spans(queries, Positions(11)).is_full
    assert Full().spans(Positions(3), Positions(5)).is_full


def test_runs_of_an_expression_are_bounded_by_its_structure():
    call = Call(batch=1, heads=1, rows=5, slots=31)
    one, two = of(~Window(3), call), of(~Window(5), call)
    assert (one & two).tensor().shape[3] == 3  # R1 + R2 - 1
    assert (~one).tensor().shape[3] == 3  # R + 1
    assert (one | two).tensor().shape[3] <= 4


def test_runs_may_be_given_as_a_tensor():
    runs = torch.tensor([[[[[0, 2], [4, 5]], [[1, 3], [5, 5]]]]], dtype=torch.int32)
    spans = Spans(2, 5, runs=runs)
    assert not spans.is_numbers and spans.work().item() == 5
    assert (~spans).work().item() == 5
    assert (spans & spans).work().item() == 5
    assert (spans | ~spans).work().item() == 10
