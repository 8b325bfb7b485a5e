"""Test the tests: turn one comparison of each module around and demand that a test fails.

    python scripts/mutate.py                    every module of the package that has a comparison
    python scripts/mutate.py masks functional   these modules
    python scripts/mutate.py --all masks        every comparison of a module, one after the other
    python scripts/mutate.py --list             what would be turned around, and which tests would run

It works on a temporary copy of the project, so that nothing here is ever changed, whatever interrupts it. Before the
first mutant the tests must pass on that copy; a mutant that no test notices makes the exit status 1.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path("src/headwise")
TURNED = {
    "<": ">=",
    "<=": ">",
    ">": "<=",
    ">=": "<",
    "==": "!=",
    "!=": "==",
    "is not": "is",
    "is": "is not",
    "not in": "in",
    "in": "not in",
}
OPERATOR = re.compile(rb"<=|>=|==|!=|<|>|\bis\s+not\b|\bis\b|\bnot\s+in\b|\bin\b")

# Where the first comparison makes no difference that a test could see, the text of the one to take instead.
INSTEAD: dict[str, str] = {}

# Tests of a module, the most telling first; otherwise those that bear its name.
TESTS = {
    "attention": ["test_layer.py"],
    "backends.__init__": ["test_backends.py"],
    "backends.base": ["test_functional.py", "test_backends.py"],
    "backends.reference": ["test_functional.py", "test_backends.py"],
    "backends.native": ["test_native.py"],
    "backends.native_call": ["test_native.py"],
    "backends.sdpa": ["test_functional.py", "test_bands.py", "test_backends.py"],
    "checks": ["test_bad_calls.py", "test_layer.py"],
    "commands": ["test_cli.py"],
    "config": ["test_config.py", "test_bad_calls.py"],
    "convert.dropin": ["test_dropin.py"],
    "convert.huggingface": ["test_huggingface.py", "test_hf_models.py"],
    "convert.huggingface_masks": ["test_hf_models.py", "test_huggingface.py"],
    "convert.layouts": ["test_fused.py", "test_bad_calls.py"],
    "convert.rotary": ["test_convert_rotary.py"],
    "convert.swap": ["test_swap.py"],
    "convert.textbook": ["test_textbook.py"],
    "convert.torch": ["test_from_torch.py"],
    "demo": ["test_demo.py", "test_look.py"],
    "functional": ["test_functional.py", "test_plans.py"],
    "inspection": ["test_inspection.py"],
    "lint": ["test_explain.py"],
    "algebra": ["test_masks.py", "test_positions.py"],
    "caches": ["test_caches.py", "test_bad_calls.py"],
    "masks": ["test_masks.py", "test_bad_calls.py"],
    "notation": ["test_notation.py"],
    "packing": ["test_packing.py", "test_bad_calls.py"],
    "philox": ["test_dropout.py"],
    "positions": ["test_positions.py", "test_bad_calls.py"],
    "linear": ["test_linear.py"],
    "projections": ["test_fused.py"],
    "rotary": ["test_rotary.py", "test_bad_calls.py"],
    "schedules": ["test_rotary.py", "test_bad_calls.py"],
    "shapes": ["test_bad_calls.py"],
    "show": ["test_show.py"],
    "spans": ["test_spans.py"],
}


@dataclass(frozen=True)
class Mutant:
    """One comparison of a module, by the place of its operator in the file."""

    module: str
    line: int
    start: int
    stop: int
    operator: str
    text: str

    @property
    def path(self) -> Path:
        """The file, from the root of the project."""
        return SOURCE / Path(*self.module.split(".")).with_suffix(".py")

    def apply(self, source: bytes) -> bytes:
        """The source with the comparison turned around."""
        return source[: self.start] + TURNED[self.operator].encode() + source[self.stop :]


def comparisons(module: str, source: bytes) -> list[Mutant]:
    """Every comparison of a source, in the order of the file."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(source)
    inside_text = {inner for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for inner in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare) or node in inside_text:  # an f-string's places are not those of the file
            continue
        if ast.unparse(node.left) == "__name__":  # whether a file is run is not for the tests of the package
            continue
        left = node.left
        for right in node.comparators:
            first = starts[left.end_lineno - 1] + left.end_col_offset
            last = starts[right.lineno - 1] + right.col_offset
            match = OPERATOR.search(source, first, last)
            operator = " ".join(match[0].decode().split())
            text = " ".join(ast.get_source_segment(source.decode(), node).split())
            found.append(Mutant(module, right.lineno, match.start(), match.end(), operator, text))
            left = right
    return sorted(found, key=lambda mutant: mutant.start)


def choose(module: str, found: list[Mutant]) -> Mutant:
    """The one comparison that stands for a module: the first of sizes if there is one, unless INSTEAD names another."""
    if module in INSTEAD:
        return next(mutant for mutant in found if mutant.text == INSTEAD[module])
    sizes = [mutant for mutant in found if mutant.operator[0] in "<>=!"]
    return (sizes or found)[0]


def modules() -> list[str]:
    """Modules of the package, by name."""
    paths = sorted((ROOT / SOURCE).rglob("*.py"))
    return [".".join(path.relative_to(ROOT / SOURCE).with_suffix("").parts) for path in paths]


def tests_of(module: str) -> list[str]:
    """Test files of a module, those that exist."""
    name = module
    while name not in TESTS and "." in name:
        name = name.rpartition(".")[0]
    files = TESTS.get(name, [f"test_{module.split('.')[-1]}.py"])
    return [f"tests/{file}" for file in files if (ROOT / "tests" / file).exists()]


def run(tree: Path, files: list[str], limit: float) -> tuple[str, str]:
    """Run tests on the copy: "passed", "failed", "timed out" or "no tests", and the first that failed."""
    call = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", *files]
    environ = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(call, check=False, cwd=tree, env=environ, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return "timed out", ""
    said = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    outcome = {0: "passed", 1: "failed", 2: "failed", 5: "no tests"}.get(done.returncode, "failed")
    return outcome, said[1] if said else done.stdout[-2000:] if done.returncode > 2 else ""


def copy_project(tree: Path) -> None:
    """Copy what the tests need."""
    for name in ("src", "tests", "scripts", "docs", "examples", "benchmarks"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "_build"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, tree / path.name)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="modules of the package, such as masks or backends.sdpa")
    parser.add_argument("--all", action="store_true", help="turn every comparison around, not one of each module")
    parser.add_argument("--list", action="store_true", help="say what would be done")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for the tests of one mutant")
    options = parser.parse_args()
    unknown = set(options.modules) - set(modules())
    if unknown:
        parser.error(f"there is no module {', '.join(sorted(unknown))}; there are {', '.join(modules())}")

    chosen = []
    for module in options.modules or modules():
        found = comparisons(module, (ROOT / SOURCE / Path(*module.split("."))).with_suffix(".py").read_bytes())
        chosen += found if options.all else [choose(module, found)] if found else []
    width = max((len(mutant.module) for mutant in chosen), default=0)
    if options.list:
        for mutant in chosen:
            files = " ".join(tests_of(mutant.module)) or "no tests"
            print(f"{mutant.module:{width}}  {mutant.line:4}  {mutant.text:.70}  [{files}]")
        return 0

    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_project(tree)
        files = sorted({file for mutant in chosen for file in tests_of(mutant.module)})
        outcome, said = run(tree, files, 3 * options.timeout) if files else ("no tests", "")
        if outcome != "passed":
            print(f"Without a mutant the tests {outcome}: {said}\nMend that first.")
            return 1
        for mutant in chosen:
            started, path = time.monotonic(), tree / mutant.path
            source = path.read_bytes()
            path.write_bytes(mutant.apply(source))
            files = tests_of(mutant.module)
            outcome, said = run(tree, files, options.timeout) if files else ("no tests", "")
            path.write_bytes(source)
            red = outcome in ("failed", "timed out")
            survivors += not red
            shown = f"{mutant.operator} → {TURNED[mutant.operator]}"
            print(
                f"{'red  ' if red else 'ALIVE'}  {mutant.module:{width}}  {mutant.line:4}  {shown:12}  "
                f"{mutant.text:.60}  {said or outcome}  {time.monotonic() - started:.0f} s",
                flush=True,
            )
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants were noticed.")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
