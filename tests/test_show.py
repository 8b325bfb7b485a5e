"""Tables and pictures: what is in them, for any text."""

import io
import struct

import pytest
import torch
from rich.console import Console

from headwise import AttentionError
from headwise.show import figures
from headwise.show.labels import printable
from headwise.show.tables import head_table

NUMBERS = {
    "entropy": 1.25,
    "distance": 3.5,
    "self": 0.1,
    "previous": 0.81,
    "next": 0.0,
    "first": 0.004,
    "separator": 0.0,
    "induction": 0.0,
}


def shown(table, width=80):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_a_table_has_a_row_per_head_with_its_numbers():
    text = shown(head_table("layer 0", [NUMBERS], ["previous"], [[(1, 0, 0.97)]], ["the", "cat"]))
    assert "layer 0" in text
    for part in ("previous", "1.25", "3.5", "10%", "81%", "cat→the 97%"):
        assert part in text


def test_markup_and_control_characters_in_tokens_are_text():
    table = head_table("t", [NUMBERS], ["mixed"], [[(1, 0, 0.5)]], ["[red]", "\x1b[2J\n"])
    text = shown(table)
    assert "[red]" in text
    assert "\x1b[2J" not in text
    assert r"\x1b[2J⏎" in text


@pytest.mark.parametrize(
    ("piece", "label"), [("", "∅"), ("a b", "a␣b"), ("\t", "⇥"), ("\u202e", "\\u202e"), ("é漢", "é漢")]
)
def test_printable(piece, label):
    assert printable(piece) == label


def size_of_png(path):
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return struct.unpack(">II", data[16:24])


def test_a_picture_has_a_cell_per_head(tmp_path):
    weights = [torch.eye(3).expand(2, 3, 3), torch.ones(1, 3, 3) / 3]
    found = figures.draw_heads(
        weights, ["a", "b", "c"], tmp_path / "heads.png", title="t", captions=[["x", "y"], ["z"]]
    )
    assert found == []
    wide, high = size_of_png(tmp_path / "heads.png")
    assert wide > 300
    assert high > 300


def test_tokens_without_a_font_are_named_by_number_and_dollars_are_no_formula(tmp_path, monkeypatch):
    letters = set("$\\{}frac bx")
    monkeypatch.setattr(figures, "_letters", lambda file: letters)
    tokens = ["$\\frac{", "漢", "b"]
    found = figures.draw_heads([torch.eye(3)[None]], tokens, tmp_path / "heads.png", title="$x 漢")
    assert found == [1]
    assert (tmp_path / "heads.png").exists()


def test_long_texts_name_every_so_many_tokens(tmp_path):
    tokens = [f"t{i}" for i in range(figures.MOST_LABELS * 2 + 1)]
    weights = [torch.rand(1, len(tokens), len(tokens))]
    figures.draw_heads(weights, tokens, tmp_path / "heads.png")
    size_of_png(tmp_path / "heads.png")
    named = []
    figures._name(lambda places, labels=(), **style: named.append((places, labels)), tokens, True)
    places, labels = named[0]
    assert len(labels) <= figures.MOST_LABELS
    assert list(labels) == [tokens[place] for place in places]


@pytest.mark.parametrize("name", ["heads.foo", "absent/heads.png"])
def test_a_picture_that_cannot_be_saved_says_why(tmp_path, name):
    with pytest.raises(AttentionError, match=r"cannot be saved as .*heads"):
        figures.draw_heads([torch.eye(3)[None]], list("abc"), tmp_path / name)


def test_tokens_of_one_name_are_told_apart():
    text = shown(head_table("t", [NUMBERS], ["mixed"], [[(2, 0, 0.5), (1, 0, 0.25)]], ["the", "cat", "the"]))
    assert "the[2]→the[0] 50%" in text
    assert "cat→the[0] 25%" in text


def test_pictures_of_many_tokens_are_larger(tmp_path):
    sizes = []
    for count in (3, figures.MOST_LABELS + 1):
        figures.draw_heads([torch.eye(count)[None]], [f"t{i}" for i in range(count)], tmp_path / "heads.png")
        sizes.append(size_of_png(tmp_path / "heads.png"))
    assert sizes[1] > sizes[0]
