"""The script that tests the tests."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "mutate.py"


@pytest.fixture(scope="module")
def mutate():
    spec = importlib.util.spec_from_file_location("mutate", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = module
    spec.loader.exec_module(module)
    return module


def test_every_operator_is_turned_around(mutate):
    source = b"""
def f(a, b):
    "a < b in a text"
    if a < b <= 3 or a > b or a >= b:  # a < b
        return a == b, a != b, a is b, a is  not b
    return a in b, a not in b, (a) < (
        b), f"{a < b}", "\xc3\xa4" < a
"""
    found = mutate.comparisons("f", source)
    assert [m.operator for m in found] == ["<", "<=", ">", ">=", "==", "!=", "is", "is not", "in", "not in", "<", "<"]
    for mutant in found:
        changed = mutant.apply(source)
        assert [m.operator for m in mutate.comparisons("f", changed)] == [
            mutate.TURNED[m.operator] if m is mutant else m.operator for m in found
        ]
    assert found[-2].apply(source).decode().count(">= (\n        b)") == 1


def test_the_one_that_stands_for_a_module(mutate):
    found = mutate.comparisons("f", b"if a is b: pass\nif a in c: pass\nif a < c: pass\nif d > e: pass")
    assert mutate.choose("f", found).text == "a < c"
    assert mutate.choose("f", found[:2]).text == "a is b"
    mutate.INSTEAD["f"] = "d > e"
    try:
        assert mutate.choose("f", found).text == "d > e"
    finally:
        del mutate.INSTEAD["f"]
    assert not mutate.comparisons("f", b'if __name__ == "__main__": pass')


def test_every_module_with_a_comparison_has_tests(mutate):
    for module in mutate.modules():
        source = (ROOT / mutate.SOURCE / Path(*module.split("."))).with_suffix(".py").read_bytes()
        found = mutate.comparisons(module, source)
        if found:
            assert mutate.choose(module, found) in found
            assert mutate.tests_of(module), f"{module} has no tests; name them in scripts/mutate.py"
    assert set(mutate.INSTEAD) <= set(mutate.modules())


@pytest.mark.slow
def test_a_mutant_is_noticed_and_nothing_here_is_changed():
    before = {path: path.read_bytes() for path in (ROOT / "src").rglob("*.py")}
    done = subprocess.run([sys.executable, str(SCRIPT), "philox"], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 mutants were noticed" in done.stdout
    assert before == {path: path.read_bytes() for path in (ROOT / "src").rglob("*.py")}


@pytest.mark.slow
def test_a_mutant_that_no_test_notices_fails(tmp_path):
    for name in ("src/headwise", "tests", "scripts"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "src/headwise/__init__.py").write_text("")
    (tmp_path / "src/headwise/errors.py").write_text("def f(a, b):\n    return a < b\n")
    (tmp_path / "scripts/mutate.py").write_text(SCRIPT.read_text())
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['slow: ', 'gpu: ']\n")
    for body, status, said in (
        ("assert f(1, 2)", 0, "red"),
        ("f(1, 2)", 1, "ALIVE"),
        ("assert not f(1, 2)", 1, "Mend that first"),
    ):
        (tmp_path / "tests/test_errors.py").write_text(f"from headwise.errors import f\ndef test_f():\n    {body}\n")
        call = [sys.executable, str(tmp_path / "scripts/mutate.py")]
        done = subprocess.run(call, check=False, capture_output=True, text=True)
        assert done.returncode == status and said in done.stdout, done.stdout + done.stderr
