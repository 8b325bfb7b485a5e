"""Every example in a docstring of the package runs and prints what it says."""

import doctest
import importlib
from pathlib import Path

import helpers
import pytest
import torch

SOURCE = Path(__file__).parents[1] / "src"
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def modules() -> list[str]:
    found = []
    for path in sorted((SOURCE / "headwise").rglob("*.py")):
        names = path.relative_to(SOURCE).with_suffix("").parts
        if names[-1] != "__main__":
            found.append(".".join(names[:-1] if names[-1] == "__init__" else names))
    return found


def examples(name: str) -> list[doctest.DocTest]:
    module = importlib.import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [test for test in finder.find(module, name, extraglobs=helpers.names()) if test.examples]


@pytest.mark.parametrize("name", modules())
def test_examples(name, tmp_path, monkeypatch):
    written = (SOURCE / Path(*name.split("."))).with_suffix(".py")
    written = written if written.exists() else written.with_suffix("") / "__init__.py"
    try:
        tests = examples(name)
    except ImportError as error:
        pytest.skip(f"{name} needs a package that is not installed: {error}")
    assert bool(tests) == (">>> " in written.read_text()), "an example that is written is not found"
    monkeypatch.chdir(tmp_path)  # what an example writes goes there
    for test in tests:
        torch.manual_seed(0)
        said = []
        runner = doctest.DocTestRunner(optionflags=OPTIONS)
        runner.run(test, out=said.append)
        assert not runner.summarize(verbose=False).failed, "".join(said)


def test_a_wrong_example_is_found():
    test = doctest.DocTestParser().get_doctest(">>> Causal()\nWindow(3)\n", helpers.names(), "wrong", None, 0)
    said = []
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    runner.run(test, out=said.append)
    assert runner.failures == 1 and "Expected" in "".join(said)
