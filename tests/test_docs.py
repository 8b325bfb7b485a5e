"""The examples of README and pages run, and what they print is what the page says."""

import doctest
import re
from pathlib import Path

import helpers
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


@pytest.mark.plain  # one of them exports
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page):
    torch.manual_seed(0)
    names: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M):
        exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_printed_blocks_are_true(page):
    torch.manual_seed(0)
    said: list[str] = []
    test = doctest.DocTestParser().get_doctest(
        "\n".join(re.findall(r"^```pycon\n(.*?)^```", page.read_text(), re.S | re.M)),
        helpers.names(),
        page.name,
        str(page),
        0,
    )
    result = doctest.DocTestRunner().run(test, out=said.append)
    assert result.failed == 0, "".join(said)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pictures_are_there(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_pages_have_examples_at_all():
    texts = [page.read_text() for page in PAGES]
    assert sum(text.count("```pycon") for text in texts) >= 6
    assert sum(text.count("```python") for text in texts) >= 3
