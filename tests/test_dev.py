"""scripts/dev.py: the functions that decide, without installing anything."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def dev():
    spec = importlib.util.spec_from_file_location("dev", ROOT / "scripts" / "dev.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path):
    """The files that decide what is installed, in a folder with a space."""
    root = tmp_path / "head wise"
    (root / ".venv").mkdir(parents=True)
    (root / "pyproject.toml").write_text("[project]\n")
    (root / "constraints.txt").write_text("torch==2.13.0\n")
    (root / ".venv" / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.11.2\n")
    return root


def python(version=(3, 11, 2), venv=True, torch=None):
    return {"path": sys.executable, "version": list(version), "venv": venv, "torch": torch}


def test_probe_describes_the_running_python(dev):
    found = dev.probe(sys.executable)
    assert found["version"] == list(sys.version_info[:3])
    assert dev.numbers(found["torch"]) >= (2, 11)


def test_a_command_that_does_not_run_is_no_python(dev, tmp_path):
    shim = tmp_path / "python3.14"
    shim.write_text("#!/bin/sh\necho 'command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    assert dev.probe(shim) is None
    assert dev.probe(tmp_path / "missing") is None


def test_why_not_a_python(dev):
    assert dev.why_not(python(), reuse_torch=False) is None
    assert dev.why_not(python((3, 14, 1)), reuse_torch=False) is None
    assert dev.why_not(python((3, 10, 13)), reuse_torch=False) == "headwise needs Python 3.11 to 3.14"
    assert dev.why_not(python((3, 15, 0)), reuse_torch=False) == "headwise needs Python 3.11 to 3.14"
    assert dev.why_not(python((3, 12, 3), venv=False), reuse_torch=False).endswith("apt install python3.12-venv")


def test_why_not_reuse_a_torch(dev):
    assert dev.why_not(python(torch="2.11.0+cu130"), reuse_torch=True) is None
    assert dev.why_not(python(), reuse_torch=True) == "it has no torch to reuse"
    assert dev.why_not(python(torch="2.9.1"), reuse_torch=True) == "its torch 2.9.1 is older than 2.11"


def test_no_usable_python_says_which_were_found(dev, monkeypatch):
    monkeypatch.setattr(dev, "probe", lambda command, environ: python((3, 9, 18)))
    with pytest.raises(dev.Problem) as error:
        dev.find_python(False, {})
    assert f"{sys.executable} (Python 3.9.18): headwise needs Python 3.11 to 3.14." in str(error.value)


def test_ready_only_when_finished_unchanged_and_complete(dev, checkout):
    now = dev.fingerprint(checkout)
    stamp = {"finished": True, "fingerprint": now, "extras": ["cli", "plot"]}
    assert dev.ready(stamp, ["plot"], now)
    assert not dev.ready(stamp, ["plot", "test"], now)
    assert not dev.ready({**stamp, "finished": False}, ["plot"], now)
    assert not dev.ready({}, [], now)


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", ".venv/pyvenv.cfg", "csrc/forward.hpp"])
def test_fingerprint_notices_a_change(dev, checkout, name):
    before = dev.fingerprint(checkout)
    (checkout / name).parent.mkdir(exist_ok=True)
    with open(checkout / name, "a") as file:
        file.write("version_info = 3.12.1\n")
    assert dev.fingerprint(checkout) != before


def test_fingerprint_notices_a_moved_folder(dev, checkout):
    before = dev.fingerprint(checkout)
    assert dev.fingerprint(checkout.rename(checkout.parent / "moved")) != before


def test_every_extra_exists_has_a_size_and_belongs_to_all(dev):
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(dev.ALL) == set(extras) - {"all", "bench-peers"}
    assert set(dev.SIZES) == {"torch", *dev.ALL}
    (everything,) = extras["all"]
    assert set(everything[len("headwise[") : -1].split(",")) == set(dev.ALL)


def test_reused_torch_moves_only_its_own_pin(dev):
    pins = "numpy==2.4.6\ntorch==2.13.0\ntorchlike==1.0\n"
    assert dev.pins_for(pins, "2.12.0+cu130") == "numpy==2.4.6\ntorch==2.12.0+cu130\ntorchlike==1.0\n"


def test_cpu_torch_is_seen_in_the_settings_of_pip(dev, tmp_path):
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    assert dev.has_cpu_torch(f":env:.find-links='{tmp_path}'", 11)
    assert dev.has_cpu_torch(f"global.find-links='file://{tmp_path}'", 11)
    assert not dev.has_cpu_torch(f":env:.find-links='{tmp_path}'", 12)
    assert dev.has_cpu_torch("global.extra-index-url='https://example.org/whl/cpu'", 12)
    assert not dev.has_cpu_torch("global.cache-dir='/cpu'\nglobal.index-url='https://example.org/simple'", 11)
    assert not dev.has_cpu_torch("", 11)


def test_size_note(dev):
    assert "GB" in dev.size_note(["torch", "cli"], cuda=True)
    assert "GB" not in dev.size_note(["docs"], cuda=True)
    assert dev.size_note(["torch"], cuda=False).endswith("Most of it is torch.")


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("ERROR: Could not install packages: [Errno 28] No space left on device", "disk is full"),
        (
            "NewConnectionError(...)\nERROR: No matching distribution found for torch",
            "reach its package index",
        ),
        ("connection error: ProxyError(...)\nERROR: ResolutionImpossible", "reach its package index"),
        ("ERROR: No matching distribution found for torch==2.13.0", "finds no torch==2.13.0"),
        ("something else", "run this again"),
    ],
)
def test_advice_names_the_cause(dev, log, words):
    assert words in dev.advice(log)


@pytest.mark.skipif(os.name == "nt", reason="HOME is a notion of POSIX")
@pytest.mark.parametrize("home", [None, "", "/nowhere/at/all"])
def test_home_is_always_a_folder(dev, monkeypatch, tmp_path, home):
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    child = dev.child_environment({} if home is None else {"HOME": home})
    assert os.path.isdir(child["HOME"]) and os.access(child["HOME"], os.W_OK)


def test_child_environment_keeps_pip_and_drops_make(dev, tmp_path):
    environ = {"HOME": str(tmp_path), "PIP_FIND_LINKS": "/wheels", "MAKEFLAGS": "-j2", "TEXT": "x"}
    assert dev.child_environment(environ) == {"HOME": str(tmp_path), "PIP_FIND_LINKS": "/wheels"}


def test_text_travels_under_its_own_name(dev, tmp_path):
    home = str(tmp_path)
    assert dev.look_environment({"HOME": home, "TEXT": "a $b\n"})["HEADWISE_TEXT"] == "a $b\n"
    assert "HEADWISE_TEXT" not in dev.look_environment({"HOME": home, "TEXT": ""})
    assert dev.look_environment({"HOME": home, "HEADWISE_TEXT": "kept"})["HEADWISE_TEXT"] == "kept"


def test_two_pytest_calls(dev):
    hooked, plain = dev.pytest_calls(everything=False, extra=["-k", "mask"])
    assert hooked == [
        "--jaxtyping-packages=headwise,examples,beartype.beartype",
        "-m",
        "not plain and not slow and not gpu",
        "-k",
        "mask",
    ]
    assert plain == ["-m", "plain and not slow", "-k", "mask"]
    assert [call[call.index("-m") + 1] for call in dev.pytest_calls(True, [])] == ["not plain", "plain"]


@pytest.mark.parametrize(
    ("hooked", "plain", "chosen", "status"),
    [
        (0, 0, False, 0),
        (1, 0, False, 1),
        (0, 1, False, 1),
        (0, 5, False, 0),
        (5, 0, False, 5),
        (5, 0, True, 0),
        (5, 5, True, 5),
        (-11, 0, False, -11),
    ],
)
def test_worst_status(dev, hooked, plain, chosen, status):
    assert dev.worst(hooked, plain, chosen) == status


TEXT = """$(shell touch "{0}")`touch "{0}"`$$HOME ${{HOME}} "q" 's' \\ # %
second line 😀"""


@pytest.mark.skipif(not os.path.exists("/usr/bin/make"), reason="there is no make here")
@pytest.mark.parametrize("by", ["argument", "environment"])
def test_make_passes_text_and_executes_none_of_it(tmp_path, by):
    ran = tmp_path / "ran"
    text = TEXT.format(ran)
    shown = tmp_path / "shown"
    shown.write_text("#!/bin/sh\nexec env -0\n")  # stands in for Python, and prints what it was given
    shown.chmod(0o755)
    environ = {**os.environ, "PYTHON": str(shown), **({"TEXT": text} if by == "environment" else {})}
    given = [f"TEXT={text}"] if by == "argument" else []
    printed = subprocess.run(
        ["make", "-s", "-C", str(ROOT), "look", *given], check=True, stdout=subprocess.PIPE, env=environ
    ).stdout
    assert f"TEXT={text}".encode() in printed.split(b"\0")
    assert not ran.exists()


def test_stamp_survives_a_round_trip_and_nonsense(dev, monkeypatch, tmp_path):
    monkeypatch.setattr(dev, "STAMP", tmp_path / "headwise-setup.json")
    assert dev.read_stamp() == {}
    dev.write_stamp({"finished": True})
    assert dev.read_stamp() == {"finished": True}
    dev.STAMP.write_text(json.dumps({"finished": True})[:5])
    assert dev.read_stamp() == {}
