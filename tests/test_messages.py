"""Every error text of the core has a line in the table of wrong calls, or here."""

import ast
import traceback
from pathlib import Path

import pytest
from test_bad_calls import ROWS, key, query, value

import headwise
from headwise import MultiHeadAttention, ShapeError, Softcap, UnsupportedError, Window, attention, parse
from headwise.backends import native_call
from headwise.backends.native import Native

pytestmark = pytest.mark.plain

CORE = Path(headwise.__file__).parent
MODULES = (
    "algebra", "attention", "backends/__init__", "backends/base", "backends/native", "backends/native_call",
    "backends/reference", "backends/sdpa", "caches", "checks", "config", "errors", "functional", "masks",
    "notation", "packing", "philox", "positions", "rotary", "schedules", "score_mods", "shapes", "spans",
)  # fmt: skip

# Texts that the table cannot reach, each with what raises it.
MORE = (
    ("a text that is no string", lambda: parse(None), ShapeError),
    ("a text that is too long", lambda: parse("x" * 20_000), ShapeError),
    ("a text that is nested too deeply", lambda: parse("&".join(["Causal()"] * 1000)), ShapeError),
    ("instructions that are not there", lambda: Native("mmx"), UnsupportedError),
    ("instructions of another processor", lambda: native_call._check(2), UnsupportedError),
    ("no memory", lambda: native_call._check(1), MemoryError),
)


def raised_in(path):
    """The statements of a module that raise one of headwise's errors, by their first line, with the last."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = getattr(node.exc.func, "id", "")
            assert name.endswith("Error"), f"{path.name}:{node.lineno} raises {name}"
            found[node.lineno] = node.end_lineno
    return found


def places_reached():
    """File and line of the statement behind each error of the tables."""
    reached = set()
    for name, made, kind, *_ in (*ROWS, *MORE):
        try:
            made()
        except kind as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            reached.add((Path(last.filename), last.lineno))
        else:
            pytest.fail(f"{name} passed")
    return reached


def test_every_error_of_the_core_is_seen():
    reached = places_reached()
    unseen = []
    for module in MODULES:
        path = CORE / f"{module}.py"
        lines = {line for file, line in reached if file == path}
        unseen += [
            f"{module}.py:{first}"
            for first, last in raised_in(path).items()
            if not any(first <= line <= last for line in lines)
        ]
    assert not unseen, f"errors that no table reaches: {', '.join(unseen)}"


def test_the_core_is_listed_whole():
    """A backend that raises errors and is not listed would go unnoticed."""
    listed = {CORE / f"{module}.py" for module in MODULES}
    assert all(path.exists() for path in listed)
    assert set((CORE / "backends").glob("*.py")) <= listed


def test_the_three_texts_of_the_design():
    """Their form is the model of all others: what is wrong, with both numbers, and what to do."""
    with pytest.raises(ShapeError, match=r"^6 query heads cannot share 4 key heads evenly\.$"):
        MultiHeadAttention(12, 6, num_kv_heads=4)
    with pytest.raises(ShapeError, match=r"^A window of 0 tokens lets no query see anything; give at least 1\.$"):
        Window(0)
    with pytest.raises(UnsupportedError) as caught:
        attention(query, key, value, score_mods=[Softcap(2.0)], backend="sdpa")
    able = ", ".join(b.name for b in headwise.BACKENDS if b.name != "sdpa")
    assert str(caught.value) == (
        f"Backend 'sdpa' cannot run this call: it cannot modify scores (Softcap). These can: {able}."
    )
