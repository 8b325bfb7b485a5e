"""The layers of the package: imports point down only, and parts of one layer do not know each other."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "headwise"
# lowest first; within a layer only the pairs named may import
LAYERS = (
    {"errors", "positions", "philox", "projections", "linear", "shapes"},
    {"algebra", "masks", "spans", "score_mods", "rotary", "schedules", "caches"},
    {
        "checks",
        "backends.base",
        "backends.native",
        "backends.native_call",
        "backends.reference",
        "backends.sdpa",
        "backends",
        "notation",
    },
    {"functional", "config"},
    {"attention", "packing"},
    {"show", "convert", "inspection", "explain", "lint", "steps"},
    {"look", "demo", "commands", "cli", "__main__"},
)
WITHIN = {
    ("positions", "errors"),
    ("shapes", "errors"),
    ("algebra", "spans"),
    ("masks", "algebra"),
    ("masks", "spans"),
    ("rotary", "schedules"),
    ("backends.reference", "backends.base"),
    ("backends.native", "backends.base"),
    ("backends.native", "backends.native_call"),
    ("backends.sdpa", "backends.base"),
    ("backends", "backends.base"),
    ("backends", "backends.native"),
    ("backends", "backends.reference"),
    ("backends", "backends.sdpa"),
    ("checks", "backends"),
    ("checks", "backends.base"),
    ("explain", "lint"),
    ("steps", "lint"),
    ("steps", "explain"),
    ("look", "demo"),
    ("commands", "look"),
    ("commands", "demo"),
    ("cli", "commands"),
    ("__main__", "cli"),
}
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def part(module: str) -> str:
    """The part that a module belongs to: a file, or a folder taken as one; backends are apart."""
    names = module.split(".")
    return ".".join(names[:2]) if names[0] == "backends" else names[0]


def imports(text: str):
    """Modules of headwise that a source imports, wherever in it."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found = [node.module]
            if node.module in ("headwise", "headwise.backends"):  # `from headwise import philox`
                found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"headwise.{'?' * node.level}"]
        else:
            continue
        yield from (name.removeprefix("headwise.") for name in found if name.split(".")[0] == "headwise")


def wrong(name: str, text: str) -> list[str]:
    """Imports of a module that the layers do not allow."""
    faults = []
    for target in imports(text):
        target = part(target) if part(target) in LEVEL else target.split(".")[0]
        if target == part(name):
            continue
        if target not in LEVEL:
            faults.append(f"{name} imports {target}, which has no layer")
        elif LEVEL[target] > LEVEL[part(name)]:
            faults.append(f"{name} imports {target}, which is above it")
        elif LEVEL[target] == LEVEL[part(name)] and (part(name), target) not in WITHIN:
            faults.append(f"{name} imports {target} of its own layer")
    return faults


def modules() -> dict[str, Path]:
    found = {}
    for path in SOURCE.rglob("*.py"):
        names = path.relative_to(SOURCE).with_suffix("").parts
        names = names[:-1] if names[-1] == "__init__" else names
        if names:  # the package itself imports everything
            found[".".join(names)] = path
    return found


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_point_down(name):
    assert part(name) in LEVEL, f"{name} has no layer; give it one in this test"
    assert not wrong(name, modules()[name].read_text())


def test_every_layer_exists():
    assert {part(name) for name in modules()} == set(LEVEL)


def test_a_wrong_import_is_found():
    assert wrong("masks", "from headwise.functional import attention")
    assert wrong("masks", "def f():\n    import headwise.score_mods")
    assert wrong("backends.sdpa", "from headwise.backends.reference import softmax")
    assert wrong("functional", "from headwise import explain")
    assert wrong("errors", "from . import masks")
    assert wrong("masks", "from headwise.unheard_of import x")
    assert not wrong("masks", "from headwise.spans import Spans\nimport torch")
