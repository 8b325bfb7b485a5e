"""The commands explain and mask: what they print, where, and how they end."""

import json
import os
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from headwise import Causal, Window, draw
from headwise.backends.native import MISSING
from headwise.commands import ASCII, app
from headwise.steps import walk


def call(*words):
    return CliRunner().invoke(app, [str(w) for w in words], catch_exceptions=False)


def told(*words):
    found = call(*words)
    assert found.exit_code == 0, found.output
    assert found.stderr == ""
    return found.stdout


def refused(*words):
    """The one line on standard error with which a command ends that cannot be carried out."""
    found = call(*words)
    assert found.exit_code == 2
    assert found.stdout == ""
    assert found.stderr.startswith("headwise: ")
    assert found.stderr.count("\n") == 1
    return found.stderr


def test_a_mask_is_drawn_and_counted():
    said = told("mask", "Causal() & Window(3)", 8)
    assert said.startswith(draw(Causal() & Window(3), 8) + "\n")
    assert "pairs of query and key: 21 of 64 allowed = 32.8%" in said
    assert "runs of keys: one per query t, as numbers: max(0, t-2) <= key < min(8, t+1)" in said


def test_the_kernel_of_a_mask_is_told():
    how = "backend sdpa" if MISSING else "the keys of a query as one run, by numbers"
    assert how in told("mask", "Causal()", 5).replace("\n ", "")
    how = "backend sdpa" if MISSING else "the keys of a query as up to 2 runs"
    assert how in told("mask", "Causal() | Prefix(3)", 5).replace("\n ", "")


def test_queries_and_keys_batch_and_heads():
    said = told("mask", "Causal() | Prefix(2)", 3, 5)
    assert said.splitlines()[:3] == ["■ ■ ■ · ·", "■ ■ ■ ■ ·", "■ ■ ■ ■ ■"]
    said = told("mask", "PerHead((Causal(), Window(1)))", 2, "--heads", 2)
    assert said.startswith("head 0\n■ ·\n■ ■\nhead 1\n■ ·\n· ■\n")
    said = told("mask", "Causal() & Padding([3, 1])", 3, "--batch", 2)
    assert "sequence 1\n■ · ·\n" in said
    assert "at most 1 per query, as a tensor of 12 numbers" in said
    assert "unseen keys: 2 of 6 keys" in said


def test_a_run_is_counted_to_its_last_key():
    said = " ".join(told("mask", "~Window(2)", 5).split())
    assert "query 0: 2-4; query 1: 3-4; query 2: 0-0, 4-4; query 3: 0-1; query 4: 0-2" in said


def test_a_mask_without_runs_and_the_lints():
    said = " ".join(told("mask", "Document([0, 0, 1])", 3).split())
    assert "runs of keys: none are known" in said
    assert "no spans: Document(" in said
    assert "no effect: Window(9) changes nothing" in told("mask", "Window(9)", 3)


@pytest.mark.parametrize(("queries", "keys"), [(0, None), (0, 3), (3, 0)])
def test_nothing_to_draw(queries, keys):
    said = told("mask", "Causal()", queries, *([] if keys is None else [keys]))
    assert "0 of 0 allowed" in said
    if queries == 0:
        assert said.startswith("(no queries)\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("mask", "Causal( & ", 4), "is not a mask"),
        (("mask", "Casual()", 4), "There is no mask 'Casual'"),
        (("mask", "__import__('os').system('true')", 4), "cannot hold|There is no mask"),
        (("mask", "Causal()\n& 3", 4), "."),
        (("mask", "Window(0)", 4), "A window of 0 tokens"),
        (("mask", "Padding([1, 2])", 4), "for 2"),
        (("mask", "Causal()", 2001), "A picture of 2,001 queries and 2,001 keys .* at most 2,000"),
        (("mask", "Causal()", 1, 2001), "A picture of 1 queries and 2,001 keys"),
        (("mask", "Causal()", 2000, "--heads", 2), "4,000,000 pairs"),
        (("explain", "--heads", 7), "embed_dim 512 cannot be split evenly over 7 heads"),
        (("explain", "--kv-heads", 3), "8 query heads cannot share 3 key heads evenly"),
        (("explain", "--dtype", "int8"), "There is no dtype 'int8' here; there are float32"),
        (("explain", "--backend", "magic"), "There is no backend 'magic'"),
        (("explain", "--mask", "Window()"), "window"),
        (("explain", "--softcap", "-1"), "A softcap of -1.0 bounds nothing"),
        (("explain", "--rotary", "--head-dim", 3), "3 is not even"),
        (("explain", "--length", 10**6), "this one has 8,000,000,000,000 scores .* at most 536,870,912"),
        (("explain", "--length", 4096, "--training", "--heads", 16), "at most 134,217,728"),
        (("explain", "--embed-dim", 10**6), "tensors of 1,000,000,000,000 numbers"),
        (("explain", "--steps", "--heads", 4), "cannot be split evenly"),
        (("explain", "--steps", "--length", 99), "at most 512 numbers"),
    ],
    ids=lambda v: " ".join(map(str, v)) if isinstance(v, tuple) else "",
)
def test_what_cannot_be_done_is_said_in_one_line(words, said):
    assert re.search(said, refused(*words))


@pytest.mark.parametrize(
    "words",
    [
        ("mask",),
        ("mask", "Causal()", "x"),
        ("mask", "Causal()", "-1"),
        ("explain", "--length", "x"),
        ("nothing",),
    ],
)
def test_wrong_usage_ends_with_2(words):
    found = call(*words)
    assert found.exit_code == 2
    assert "Traceback" not in found.output


def test_help_has_examples():
    said = " ".join(told("mask", "--help").split())
    assert 'headwise mask "Causal() & Window(3)" 8' in said
    said = " ".join(told("explain", "--help").split())
    assert "headwise explain --steps" in said
    assert '--mask "Causal() & Window(32)"' in said


def test_an_explanation_is_printed_whole():
    said = told(
        *(
            "explain",
            "--embed-dim",
            20,
            "--heads",
            4,
            "--kv-heads",
            2,
            "--head-dim",
            6,
            "--length",
            7,
            "--key-length",
            11,
        ),
        *("--batch", 3, "--mask", "Causal() & Window(3)", "--softcap", 5, "--alibi", "--sinks", "--rotary"),
    )
    assert "\x1b" not in said
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= 80
    for name in (
        "project q",
        "split k",
        "transpose v",
        "rotate q",
        "score",
        "modify",
        "sink",
        "sum",
        "merge",
        "project out",
    ):
        assert f" {name} " in said
    assert "K = 2 key/value heads; D = 6" in said
    assert "S = 11 keys" in said
    assert "3×4×7×11" in said
    flat = " ".join(re.sub(r"[│┃|]", " ", said).split())
    assert "cannot it cannot modify scores (Softcap, ALiBi)" in flat
    assert "6 of 33 keys" in flat


def test_an_explanation_as_json():
    found = json.loads(told("explain", "--length", 5, "--embed-dim", 12, "--heads", 3, "--dtype", "bfloat16", "--json"))
    assert found["dtype"] == "bfloat16"
    assert found["sizes"] == {"B": 1, "T": 5, "S": 5, "E": 12, "H": 3, "K": 3, "D": 4, "V": 4}
    assert found["backend"] == ("sdpa" if MISSING else "native")
    assert found["mask"] == "Full()"


def test_training_asks_for_gradients():
    words = ("explain", "--length", 3000, "--embed-dim", 2, "--heads", 1, "--backend", "reference", "--json")
    held = [json.loads(told(*words, *more))["choices"][-1]["why"] for more in ((), ("--training",))]
    assert "9,000,000 at once" in held[1]
    assert "9,000,000 at once" not in held[0]


def test_a_backend_that_cannot_is_explained():
    found = json.loads(told("explain", "--length", 3, "--softcap", 2, "--backend", "sdpa", "--json"))
    assert found["backend"] is None
    own = "cannot" if MISSING else "could run it"
    assert [c["verdict"] for c in found["choices"]] == [own, "cannot", "could run it"]


def test_the_steps_are_those_of_walk():
    assert told("explain", "--steps") == str(walk()) + "\n"
    words = (
        "explain",
        "--steps",
        "--embed-dim",
        8,
        "--heads",
        2,
        "--length",
        4,
        "--seed",
        5,
        "--mask",
        "Window(2)",
    )
    assert told(*words) == str(walk(8, 2, 4, seed=5, mask=Window(2))) + "\n"
    assert json.loads(told(*words, "--json"))["output"] == walk(8, 2, 4, seed=5, mask=Window(2)).output.tolist()


@pytest.mark.parametrize(("encoding", "seen"), [("ascii", "# ."), ("latin-1", "# ·")])
def test_a_pipe_of_any_encoding(encoding, seen):
    for words in (
        ["mask", "Causal()", "2"],
        ["explain", "--length", "3", "--mask", "Window(9)"],
        ["explain", "--steps"],
    ):
        found = CliRunner(charset=encoding).invoke(app, words, catch_exceptions=False)
        assert (found.exit_code, found.stderr) == (0, "")
        assert found.stdout
        assert "?" not in found.stdout
        assert found.stdout.startswith(seen) == (words[0] == "mask")


def test_a_wrong_mask_in_a_process_of_its_own():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [sys.executable, "-m", "headwise", "mask", "Causal( &", "3"],
        env=environment,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert (found.returncode, found.stdout) == (2, b"")
    assert found.stderr.count(b"\n") == 1


def test_every_sign_has_a_stand_in():
    printed = "".join(
        told(*w) for w in (("explain", "--steps"), ("explain", "--length", 3, "--alibi"), ("mask", "Causal()", 3))
    )
    frame = set("─│┌┐└┘├┤┬┴┼━┃┏┓┗┛┣┫┳┻╋┡┩╇")
    assert {c for c in printed if ord(c) > 127} - frame <= set(ASCII)


def test_steps_refuse_what_they_do_not_take():
    found = CliRunner().invoke(app, ["explain", "--steps", "--softcap", "3", "--kv-heads", "1", "--heads", "3"])
    assert found.exit_code == 2
    assert "--steps does not take --kv-heads, --softcap;" in found.stderr
