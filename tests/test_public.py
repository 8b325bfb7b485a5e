"""Every public part is tested, documented and shown: what is forgotten fails here."""

import ast
import inspect
import re
from pathlib import Path

import cases
import pytest
import torch

import headwise
from headwise import Backend, KVCache, Mask, Schedule, ScoreMod
from headwise.backends.native import Native

ROOT = Path(__file__).parents[1]
INIT = ROOT / "src" / "headwise" / "__init__.py"
# what a public function returns, tested with it
RESULTS = {"Explanation", "Packed"}
ABSTRACT = {"Mask", "ScoreMod", "KVCache", "Backend", "Schedule"}
TESTED_BY_NAME = {
    "attention": "test_functional.py",
    "attention_with_lse": "test_functional.py",
    "attention_weights": "test_functional.py",
    "merge_partials": "test_functional.py",
    "MultiHeadAttention": "test_layer.py",
    "Positions": "test_functional.py",
    "RotaryEmbedding": "test_rotary.py",
    "rotate": "test_rotary.py",
    "Spans": "test_spans.py",
    "draw": "test_notation.py",
    "parse": "test_notation.py",
    "BACKENDS": "test_backends.py",
    "Inputs": "test_functional.py",
    "Backend": "test_functional.py",
    "KVCache": "test_layer.py",
    "AttentionError": "test_bad_calls.py",
    "ShapeError": "test_messages.py",
    "UnsupportedError": "test_messages.py",
    "CacheError": "test_layer.py",
    "DynamicCache": "test_caches.py",
    "StaticCache": "test_caches.py",
    "RollingCache": "test_caches.py",
    "FixedCache": "test_caches.py",
    "pack": "test_packing.py",
    "explain": "test_explain.py",
    "convert": "test_textbook.py",
    "inspection": "test_inspection.py",
    "ConversionError": "test_textbook.py",
}


def public() -> dict:
    return {name: value for name, value in vars(headwise).items() if name in exported(INIT.read_text())}


def exported(text: str) -> set[str]:
    """Names that a module re-exports explicitly, ``X as X``."""
    imports = [node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom)]
    return {alias.asname for node in imports for alias in node.names if alias.asname == alias.name}


def forgotten(kind: type, covered: set[type], among: dict) -> set[str]:
    """Public classes of a kind that no case covers."""
    classes = {value for value in among.values() if isinstance(value, type) and issubclass(value, kind)}
    return {cls.__name__ for cls in classes - covered if cls.__name__ not in ABSTRACT}


def parts(mask: Mask) -> set[type]:
    return {type(mask)}.union(*(parts(part) for part in mask.parts()))


def masks_covered() -> set[type]:
    call, square = cases.SHAPES["gqa"], cases.SHAPES["square"]
    made = [case.make(call) for case in cases.MASKS] + [case.make(square) for case in cases.SQUARE_MASKS]
    return set().union(*(parts(mask) for mask in made))


def mods_covered() -> set[type]:
    call = cases.SHAPES["gqa"]
    return {type(mod) for case in cases.SCORE_MODS for mod in case.make(call, torch.float32)}


def schedules_covered() -> set[type]:
    return {type(case.make().schedule) for case in cases.ROTARY}


def test_every_mask_score_modification_and_schedule_has_a_case():
    assert not forgotten(Mask, masks_covered(), public())
    assert not forgotten(ScoreMod, mods_covered(), public())
    assert not forgotten(Schedule, schedules_covered(), public())


def test_every_cache_and_schedule_has_a_case():
    # a FixedCache is filled once: test_caches.py has tests of its own for it
    made = {type(make()) for make in cases.CACHES.values()} | {headwise.FixedCache}
    assert not forgotten(KVCache, made, public())
    assert forgotten(KVCache, made - {headwise.StaticCache}, public()) == {"StaticCache"}
    schedules = {type(case.given.get("schedule")) for case in cases.ROTARY}
    assert not forgotten(headwise.Schedule, schedules, public())


def test_a_forgotten_one_is_found():
    class Diagonal(Mask):
        def allowed(self, b, h, q, k):
            return q == k

    class Double(ScoreMod):
        pass

    assert forgotten(Mask, masks_covered(), {**public(), "Diagonal": Diagonal}) == {"Diagonal"}
    assert forgotten(ScoreMod, mods_covered(), {**public(), "Double": Double}) == {"Double"}
    assert forgotten(Mask, masks_covered() - {headwise.Chunk}, public()) == {"Chunk"}
    assert forgotten(Schedule, schedules_covered() - {headwise.YaRNSchedule}, public()) == {"YaRNSchedule"}


@pytest.mark.parametrize("kind", (Mask, ScoreMod, Backend, KVCache, Schedule))
def test_every_part_of_the_package_is_public(kind):
    ours = {cls for cls in descendants(kind) if cls.__module__.startswith("headwise.") and cls.__name__[0] != "_"}
    if kind is Backend:
        # public by their names; the kernel is asked for by its class as long as it has no backward
        assert {type(b) for b in headwise.BACKENDS} | {Native} == ours
        return
    hidden = {cls.__name__ for cls in ours} - set(public())
    assert not hidden


def descendants(kind: type) -> set[type]:
    return set(kind.__subclasses__()).union(*(descendants(cls) for cls in kind.__subclasses__()))


def test_every_public_name_has_its_test():
    classes = masks_covered() | mods_covered() | schedules_covered() | {Mask, ScoreMod, Schedule}
    names = {name for name, value in public().items() if value not in (c for c in classes if c is value)}
    assert names - RESULTS == set(TESTED_BY_NAME), "a public name is tested by cases.py, or has its file named here"
    for name, file in TESTED_BY_NAME.items():
        assert re.search(rf"\b{name}\b", (Path(__file__).parent / file).read_text()), f"{file} has no {name}"


def test_names_are_exported_one_by_one():
    imports = [node for node in ast.parse(INIT.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    for node in imports:
        assert isinstance(node, ast.ImportFrom) and len(node.names) == 1
        assert node.names[0].asname == node.names[0].name
    for name, value in public().items():
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__name__ == name
    assert re.fullmatch(r"\d+\.\d+\.\d+", headwise.__version__)


def undocumented(name: str, value) -> list[str]:
    """What the docstring of a public name lacks."""
    text = inspect.getdoc(value) or ""
    faults = [] if text else [f"{name} has no docstring"]
    error = inspect.isclass(value) and issubclass(value, Exception)
    if not error and ">>>" not in text:
        faults.append(f"{name} has no example")
    if inspect.isfunction(value):
        faults += [f"{name} does not describe {p}" for p in inspect.signature(value).parameters if f"{p}:" not in text]
        faults += [f"{name} has no {part}" for part in ("Args:", "Returns:") if part not in text]
    return faults


@pytest.mark.parametrize("name", sorted(exported(INIT.read_text()) - {"BACKENDS"}))
def test_public_names_are_documented(name):
    if inspect.ismodule(getattr(headwise, name)):
        assert inspect.getdoc(getattr(headwise, name))
        return
    assert not undocumented(name, getattr(headwise, name))


def test_an_undocumented_name_is_found():
    def bare(x):
        return x

    def half(x):
        """Half of x.

        Example:
            >>> half(2)
            1
        """

    assert undocumented("bare", bare)
    assert undocumented("half", half) == ["half does not describe x", "half has no Args:", "half has no Returns:"]


def test_methods_of_public_classes_are_documented():
    # what an abstract class documents, those below it need not say again
    for name, cls in public().items():
        if not inspect.isclass(cls) or issubclass(cls, Exception):
            continue
        for method, value in vars(cls).items():
            value = getattr(value, "__func__", value)
            if not method.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                assert inspect.getdoc(getattr(cls, method)), f"{name}.{method}"


def test_public_names_are_in_the_documentation():
    pages = sorted((ROOT / "docs").rglob("*.md"))
    if not pages:
        pytest.skip("the documentation is not beside these tests")
    text = "\n".join(page.read_text() for page in pages)
    whole = re.findall(r"automodule:: (\S+)", text)
    missing = [
        name
        for name, value in public().items()
        if not re.search(rf"\b{name}\b", text) and getattr(value, "__module__", "") not in whole
    ]
    assert not missing


def test_importing_does_nothing():
    import subprocess
    import sys

    code = (
        "import sys, torch; before = set(sys.modules); threads = torch.get_num_threads();"
        "import headwise; new = {m.split('.')[0] for m in set(sys.modules) - before};"
        "print(sorted(new & {'matplotlib', 'transformers', 'typer', 'rich', 'safetensors', 'jax', 'triton'}));"
        "print(torch.get_num_threads() == threads, torch.is_grad_enabled(), torch.get_default_dtype())"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["[]", "True True torch.float32"], done.stdout
