"""scripts/gpu.sh on the CPU: all of it runs, and what is wrong shows in its status."""

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import plain_attention

import benchmarks.run as runner
from benchmarks import cases, competitors, report
from benchmarks.cases import GPU_SIZED, SUITES, Attention
from benchmarks.competitors import Step

ROOT = Path(__file__).resolve().parents[1]
SMALL = Attention(batch=2, heads=4, rows=7, head_dim=8, kv_heads=2, mask="causal", dtype="bfloat16", backward=True)


@pytest.fixture(scope="module")
def gpu():
    spec = importlib.util.spec_from_file_location("gpu", ROOT / "scripts" / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.plain
def test_the_reduced_run(tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    out = tmp_path / "a folder"
    environ = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = ["bash", str(ROOT / "scripts" / "gpu.sh"), "--reduced", "--out", out.name]
    done = subprocess.run(command, check=False, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert f"torch {torch.__version__}" in said and "Nothing wrong" in said and " passed" in said
    (results,) = out.glob("*.jsonl")
    assert results.name.endswith("_cpu-reduced_gpu.jsonl") and " passed" in results.with_suffix(".log").read_text()
    run = report.read(results)
    assert report.table(run) in said
    measured = [r for r in run if r["kind"] == "measurement"]
    assert {r["case"] for r in measured} == {case.name for case in SUITES["gpu"][1]}
    assert {r["competitor"] for r in measured} == {*competitors.GPU_ATTENTION, *competitors.MODULE}
    timed = {r["competitor"] for r in measured if r["samples_s"]}
    assert timed >= {"headwise", "headwise sdpa", "headwise reference", "sdpa", "sdpa flash", "sdpa math"}
    for r in measured:
        assert r["device"] == "cpu" and not (r["not_timed"] or "").startswith(("not equal", "failed"))


def scaled(factor):
    def build(problem):
        right = competitors.sdpa(problem)
        return Step(lambda: tuple(t * factor for t in right.run()))

    return build


def failing(problem):
    raise RuntimeError("no such kernel")


def memory(problem):
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("name", "build", "tests", "status", "said"),
    [
        ("headwise", competitors.headwise_auto, 0, 0, "Nothing wrong"),
        ("headwise", scaled(1.05), 0, 1, "headwise: not equal, not timed: output"),
        ("sdpa flash", scaled(math.nan), 0, 1, "sdpa flash: not equal, not timed: output"),
        ("headwise sdpa", failing, 0, 1, "headwise sdpa: failed: RuntimeError: no such kernel"),
        ("flex", failing, 0, 0, "Nothing wrong"),
        ("headwise reference", memory, 0, 0, "Nothing wrong"),
        ("headwise", competitors.headwise_auto, 1, 1, "WRONG: pytest ended with status 1"),
        ("headwise", competitors.headwise_auto, 124, 1, "WRONG: the tests were not done in time"),
    ],
)
def test_what_is_wrong_shows_in_the_status(gpu, monkeypatch, tmp_path, capsys, name, build, tests, status, said):
    commands = []

    def call(command, environ, seconds, log):
        commands.append(command)
        module, arguments = command[2], command[3:]
        if module == "pytest":
            assert environ == {"HEADWISE_DEVICE": "cpu"}
            return tests
        return {"benchmarks.run": runner, "benchmarks.report": report}[module].main(arguments)

    monkeypatch.setattr(gpu, "call", call)
    monkeypatch.setitem(cases.SUITES, "gpu", ((), (SMALL,)))
    monkeypatch.setitem(competitors.GPU_ATTENTION, name, build)
    assert gpu.main(["--reduced", "--out", str(tmp_path)]) == status
    assert said in capsys.readouterr().out
    assert [command[2] for command in commands] == ["pytest", "benchmarks.run", "benchmarks.report"]
    assert gpu.main(["--reduced", "--out", str(tmp_path)]) == status
    assert len(list(tmp_path.glob("*.jsonl"))) == 2, "a second run leaves the first one's file alone"


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([{"kind": "measurement", "case": "a", "competitor": "b", "not_timed": None}], "were broken off"),
        ([{"kind": "self"}], "there was no time for any"),
        (None, "did not start (status 3)"),
    ],
)
def test_benchmarks_that_were_broken_off(gpu, monkeypatch, tmp_path, records, said):
    results = tmp_path / "a.jsonl"

    def call(command, environ, seconds, log):
        if records is not None:
            results.write_text("".join(json.dumps(r) + "\n" for r in records) + '{"kind": "self", "ca')
        return 3

    monkeypatch.setattr(gpu, "call", call)
    (wrong,) = gpu.benchmarks("cpu", True, results, tmp_path / "log", 100.0)
    assert wrong.startswith("WRONG: ") and said in wrong


@pytest.mark.skipif(os.name == "nt", reason="processes are ended by groups, a notion of POSIX")
def test_what_takes_too_long_is_ended_with_its_children(gpu, tmp_path):
    log = tmp_path / "log"
    child = "import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', '{}'])"
    command = [sys.executable, "-c", child.format("import time; time.sleep(600)")]
    assert gpu.call(command, {}, 3.0, log) == gpu.LATE
    assert (
        gpu.call([sys.executable, "-c", "import os, sys; sys.exit(int(os.environ['X']))"], {"X": "7"}, 60.0, log) == 7
    )
    assert log.read_text() == "begun\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_device(gpu, tmp_path, capsys):
    assert gpu.main(["--out", str(tmp_path)]) == 2
    assert "finds no CUDA device; --reduced" in capsys.readouterr().out
    assert runner.main(["--device", "cuda", "--output", str(tmp_path / "a.jsonl")]) == 2
    assert "There is no device cuda here" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_a_package(gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "there", lambda package: package not in ("pytest", "beartype"))
    assert gpu.main(["--reduced", "--out", str(tmp_path)]) == 2
    assert "has no pytest;" in capsys.readouterr().out
    assert "No beartype: the annotations are not checked" in gpu.machine("cpu")


def test_cases_are_left_out_when_the_time_is_over(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    runner.main(["--suite", "gpu", "--quick", "--seconds", "0", "--output", str(path)])
    (verdict,) = (json.loads(line) for line in path.read_text().splitlines() if '"self"' in line)
    names = [case.name for case in SUITES["gpu"][1]]
    assert verdict["left_out"] == names
    said = capsys.readouterr().out
    assert "Left out, as the time was over: 5 cases" in said and f"  {names[0]}" in said
    assert '"measurement"' not in path.read_text()


class Device:
    """What torch.cuda is to a run, for a device that is not there."""

    waited = allocated = 0

    def is_available(self):
        return True

    def get_device_name(self, device):
        return "A (TM) Device"

    def synchronize(self):
        self.waited += 1

    def reset_peak_memory_stats(self):
        self.allocated += 5

    def memory_allocated(self):
        return self.allocated

    def max_memory_allocated(self):
        return self.allocated + 77


def test_a_run_on_a_device(monkeypatch, tmp_path, capsys):
    fake = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    monkeypatch.setattr(runner, "CPU", torch.device("meta"))  # the CPU is the device now
    monkeypatch.setitem(cases.SUITES, "gpu", ((), (SMALL,)))
    calls = []

    def counted(problem):
        step = competitors.sdpa(problem)
        return Step(lambda: (calls.append(fake.waited), step.run())[1])

    monkeypatch.setattr(competitors, "GPU_ATTENTION", {"sdpa": counted, "headwise": competitors.headwise_auto})
    path = tmp_path / "a.jsonl"
    runner.main(["--device", "cpu", "--quick", "--output", str(path)])
    run = report.read(path)
    tops = [r["ceiling"] for r in run if r["kind"] == "ceiling"]
    assert tops == ["matmul 64", "device copy 0 MiB"]
    for r in run:
        assert r["device"] == "A (TM) Device"
        if r["kind"] == "measurement":
            assert r["not_timed"] is None and r["peak_memory_bytes"] == 77 and "on the device" in r["peak_memory_by"]
    assert calls[1] == calls[0] + 1, "once for what is built at the first call; when that is done, for the clock"
    assert report.main([str(path)]) in (0, 1)
    assert "A (TM) Device, CUDA " in capsys.readouterr().out
    assert runner.default_path("*", torch.device("cpu")).name.endswith("_a-tm-device_all.jsonl")


def test_the_cases_of_a_gpu():
    chosen, tiny = SUITES["gpu"]
    assert len({case.name for case in chosen}) == len(chosen) and chosen[: len(GPU_SIZED)] == GPU_SIZED
    assert all(case.dtype == "bfloat16" for case in (*chosen, *tiny))
    assert {case.backward for case in chosen} == {case.backward for case in tiny} == {False, True}
    assert {case for case in cases._first() if case.dtype == "bfloat16"} <= set(chosen)


@pytest.mark.parametrize("mask", ("full", "causal", "padded"))
def test_values_to_compare_with_are_the_same_in_pieces(monkeypatch, mask):
    case = Attention(
        batch=3, heads=10, rows=7, slots=11, head_dim=5, kv_heads=5, mask=mask, dtype="bfloat16", backward=True
    )
    problem = case.problem()
    whole, sizes = runner.reference(problem, torch.float64), runner.term_sizes(problem, 4)
    assert sizes[0] == 0 and min(sizes[1:]) > 0
    monkeypatch.setattr(runner, "HELD", 2 * 7 * 11 * 2)
    assert len(runner._pieces(problem)) == 3 * 3
    for a, b in zip(whole, runner.reference(problem, torch.float64), strict=True):
        assert a.equal(b)
    assert runner.term_sizes(problem, 4) == pytest.approx(sizes, rel=1e-12)


def test_sizes_of_terms_by_hand(monkeypatch):
    monkeypatch.setattr(runner, "CPU", torch.device("meta"))  # as if on a GPU, where weights are rounded as well
    problem = SMALL.problem()
    query, key, value = (t.detach().double() for t in problem.inputs)
    grad = problem.grad.double()
    weights = plain_attention(query, key, value, problem.allowed)[1]
    out, by_query, by_key, by_value = (0.0 for _ in range(4))
    for b in range(2):
        for d in range(8):
            for k in range(2):
                for s in range(7):
                    keys, values = 0.0, 0.0
                    for h in (2 * k, 2 * k + 1):
                        score = weights[b, h, :, s] * grad[b, h].square().matmul(value[b, k, s].square()).sqrt()
                        full = weights[b, h] * (grad[b, h] @ value[b, k].T)
                        exact = full - weights[b, h] * full.sum(-1, keepdim=True)
                        keys += (score * query[b, h, :, d]).square().sum() / 8
                        keys += (exact[:, s] @ query[b, h, :, d]).square() / 8  # the share of a head, rounded as well
                        values += (weights[b, h, :, s] * grad[b, h, :, d]).square().sum()
                        values += (weights[b, h, :, s] @ grad[b, h, :, d]).square()
                    by_key, by_value = max(by_key, keys.item()), max(by_value, values.item())
            for h in range(4):
                for t in range(7):
                    terms = weights[b, h, t] * value[b, h // 2, :, d]
                    out = max(out, terms.square().sum().item())
                    score = weights[b, h, t].square() * (value[b, h // 2].square() @ grad[b, h, t].square())
                    by_query = max(by_query, (score @ key[b, h // 2, :, d].square()).item() / 8)
    wanted = [math.sqrt(size) for size in (out, by_query, by_key, by_value)]
    assert runner.term_sizes(problem, 4) == pytest.approx(wanted, rel=1e-9)
