"""The benchmark harness: it times only what is right, writes whole records, and reports the losses."""

import json
import math
import subprocess
import sys

import pytest
import torch

import benchmarks.run as runner
from benchmarks import competitors, report
from benchmarks.cases import CASES, QUICK, Attention, Module, equal_parts, half_empty, ragged, select
from benchmarks.competitors import Step

SHARED = {
    *("date", "processor", "cores", "threads", "instructions", "system", "python", "torch", "headwise"),
    *("commit", "quick", "kind", "device", "cuda", "triton"),
}
FIELDS = {
    "measurement": {
        *("case", "level", "dtype", "competitor", "note", "max_error", "not_timed", "work_flop"),
        *("traffic_bytes", "median_s", "quartiles_s", "flops", "share_of_matmul", "bytes_per_s"),
        *("share_of_memory", "inner", "peak_memory_bytes", "peak_memory_by", "samples_s"),
    },
    "ceiling": {"dtype", "ceiling", "unit", "per_s"},
    "self": {"case", "ratio", "ratio_quartiles", "others_share", "void", "why_void", "left_out"},
}
FORWARD = Attention(batch=2, heads=3, rows=7, head_dim=5, mask="causal")
BACKWARD = Attention(batch=2, heads=3, rows=7, head_dim=5, backward=True)
HALF = Attention(batch=2, heads=3, rows=7, slots=1021, head_dim=5, dtype="bfloat16")
MODULE = Module(batch=2, rows=7, embed_dim=15, heads=3, backward=True)
PEERS = {"onnxruntime": "onnxruntime", "openvino": "openvino", "jax": "jax", "x-transformers": "x_transformers"}
# why a competitor may be missing in a quick run
REASONS = {
    "sdpa grouped": {"the same as sdpa where no heads are grouped"},
    "flex": {
        "it is compiled anew for every case, which a run has time for at 128 rows and more only",
        "it has no gradients on the CPU",
    },
    "onnxruntime": {"onnx, which writes its models, is not installed", "it has no kernel for bfloat16 on the CPU"},
    "openvino": {"its operator knows no groups of heads", "it has no kernel for bfloat16 on this processor"},
    "headwise sdpa": {"it cannot modify scores (Softcap)"},
    "x-transformers": {"it shares keys among other query heads, every K-th"},
}
UNKNOWN = {
    "softcap": "it knows no cap of scores",
    "sinks": "it knows no sinks",
    "dropout": "it knows no dropout",
    "bias": "it knows no bias that is trained",
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Threads that wait for one another on a busy machine take far longer than these tiny sizes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def quick(tmp_path_factory, _one_thread):
    path = tmp_path_factory.mktemp("results") / "quick.jsonl"
    status = runner.main(["--quick", "--output", str(path)])
    return status, path


def test_a_quick_run_writes_whole_records(quick):
    status, path = quick
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        assert set(record) == SHARED | FIELDS[record["kind"]]
    kinds = [record["kind"] for record in records]
    assert kinds.count("ceiling") == 2 * len({case.dtype for case in QUICK})
    assert kinds.count("self") == 1 and kinds[-1] == "self"
    assert status == (1 if records[-1]["void"] else 0)


def test_in_a_quick_run_every_competitor_is_right(quick):
    records = [json.loads(line) for line in quick[1].read_text().splitlines()]
    measured = [r for r in records if r["kind"] == "measurement"]
    assert {(r["case"], r["competitor"]) for r in measured} == {
        (case.name, name)
        for case in QUICK
        for name in (competitors.ATTENTION if case.level == "attention" else competitors.MODULE)
    }
    for r in measured:
        if r["not_timed"] is not None:
            peer = PEERS.get(r["competitor"])
            general = {reason for mod, reason in UNKNOWN.items() if f"+{mod}/" in r["case"]}
            general |= {f"{peer} is not installed", "it takes part on the CPU and forward only"} if peer else set()
            assert r["not_timed"] in REASONS.get(r["competitor"], set()) | general
            assert r["median_s"] is r["samples_s"] is r["peak_memory_bytes"] is None
            continue
        assert r["quartiles_s"][0] <= r["median_s"] <= r["quartiles_s"][1] and len(r["samples_s"]) == 3
        assert (r["peak_memory_bytes"] > 0 or r["competitor"] in PEERS) and r["inner"] >= 1
        assert r["note"].startswith("backend ") == (r["competitor"] == "headwise")


@pytest.mark.parametrize("peer", PEERS)
def test_a_library_that_is_missing_is_the_reason(peer, monkeypatch):
    monkeypatch.setattr(competitors.importlib.util, "find_spec", lambda name: None)
    assert competitors.ATTENTION[peer](FORWARD.problem()) == f"{PEERS[peer]} is not installed"


def test_other_libraries_take_part_forward_only(monkeypatch):
    monkeypatch.setattr(competitors.importlib.util, "find_spec", lambda name: name)
    for peer in PEERS:
        assert competitors.ATTENTION[peer](BACKWARD.problem()) == "it takes part on the CPU and forward only"


@pytest.mark.parametrize("mask", competitors.FLEX)
def test_flex_has_the_masks_of_the_cases(mask):
    problem = Attention(batch=3, heads=1, rows=293, head_dim=1, mask=mask).problem()
    rows, columns = torch.arange(293)[:, None], torch.arange(293)
    made = competitors.FLEX[mask]
    if made is None:
        assert bool(problem.allowed.all())
        return
    for b in range(3):
        want = problem.allowed.expand(3, -1, -1, -1)[b, 0]
        assert torch.equal(made(0, 3, 293)(torch.tensor(b), 0, rows, columns).expand(293, 293), want)


def test_flex_has_every_mask_of_the_cases_it_is_compiled_for():
    assert competitors.FLEX.keys() == {c.mask for c in CASES if c.level == "attention" and c.rows >= 128}


def scaled(factor, which):
    """A competitor that is right but for one of its results."""

    def build(problem):
        right = (competitors.sdpa if problem.case.level == "attention" else competitors.fused_module)(problem)

        def run():
            results = list(right.run())
            results[which] = results[which] * factor
            return results

        return Step(run)

    return build


def half_sums(problem):
    query, key, value = problem.inputs
    weights = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1)
    total = torch.zeros_like(query)
    for slot in range(key.shape[-2]):
        total = total + weights[..., slot, None] * value[..., slot, None, :]
    return Step(lambda: (total,))


def raising(problem):
    raise RuntimeError("no such kernel")


WRONG = {
    "the output, by 0.01 %": (FORWARD, scaled(1.0001, 0), "not equal, not timed: output: error "),
    "NaN": (FORWARD, scaled(math.nan, 0), "not equal, not timed: output: "),
    "the gradient of values": (BACKWARD, scaled(1.0001, 3), "not equal, not timed: gradient 2: error "),
    "a gradient forgotten": (
        BACKWARD,
        lambda problem: Step(lambda: competitors.sdpa(problem).run()[:3]),
        "not equal, not timed: an output of shape (2, 3, 7, 5) and 630 numbers in all",
    ),
    "a transposed output": (
        FORWARD,
        lambda problem: Step(lambda: (competitors.sdpa(problem).run()[0].transpose(1, 2),)),
        "not equal, not timed: an output of shape (2, 7, 3, 5)",
    ),
    "sums kept in bfloat16": (HALF, half_sums, "not equal, not timed: output: error "),
    "the gradient of a weight": (MODULE, scaled(1.0001, 2), "not equal, not timed: gradient 1: error "),
    "an exception": (FORWARD, raising, "failed: RuntimeError: no such kernel"),
    "a reason": (FORWARD, lambda problem: "it is not installed", "it is not installed"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_competitor_is_not_timed(what, monkeypatch):
    case, build, reason = WRONG[what]
    registry = "ATTENTION" if case.level == "attention" else "MODULE"
    right = {"right": scaled(1.0, 0)}
    monkeypatch.setattr(competitors, registry, {"wrong": build, **right})
    records = {r["competitor"]: r for r in runner.measure(case, 3, 1e-5, [1e9, 1e9])}
    wrong = records["wrong"]
    assert wrong["not_timed"].startswith(reason)
    assert wrong["samples_s"] is wrong["median_s"] is wrong["flops"] is wrong["peak_memory_bytes"] is None
    assert runner.line(wrong).startswith(f"{case.name}  wrong: {reason}")
    assert records["right"]["not_timed"] is None and len(records["right"]["samples_s"]) == 3


def test_a_slow_competitor_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(runner, "PATIENCE_S", 0.0)
    entries = runner.prepare(FORWARD.problem())
    assert all(e["step"] is None for e in entries.values())
    assert entries["sdpa"]["not_timed"].startswith("too slow: ")


def test_rounds_are_shared_and_the_slow_leave_early(monkeypatch):
    clock = {"now": 0.0}
    order = []

    def call(name, seconds):
        def run():
            clock["now"] += seconds
            order.append(name)

        return run

    monkeypatch.setattr(runner.time, "perf_counter", lambda: clock["now"])
    calls = {"fast": call("fast", 0.002), "slow": call("slow", 1.9)}
    samples, inner = runner.interleave(calls, 7, 0.010)
    assert inner["fast"] in (5, 6) and inner["slow"] == 1
    assert samples["fast"] == pytest.approx([0.002] * 7)
    # the third sample is taken in any case, and no fourth, since the budget of 4 seconds is spent
    assert samples["slow"] == pytest.approx([1.9] * 3)
    rounds = "".join("f" if name == "fast" else "s" for name in order[-7 * inner["fast"] - 3 :])
    assert rounds.count("s") == 3 and "s" in rounds[: inner["fast"] + 1]


@pytest.mark.parametrize(
    ("ratios", "others", "why"),
    [
        ([0.98, 0.99, 1.0, 1.01, 1.02], 0.05, None),
        ([0.98, 0.99, 1.0, 1.01, 1.02], None, None),
        ([1.02, 1.03, 1.04, 1.05], 0.0, "does not read 1"),
        ([0.95, 0.96, 0.97, 0.98], 0.0, "does not read 1"),
        ([0.7, 0.8, 1.0, 1.2, 1.3], 0.0, "spreads over more than 20%"),
        ([0.98, 0.99, 1.0, 1.01, 1.02], 0.5, "other processes had 50% of the processor"),
        ([], 0.0, "nothing was timed against itself"),
    ],
)
def test_what_makes_a_run_void(ratios, others, why):
    verdict = runner.judge("a case", ratios, others)
    assert verdict["void"] == (why is not None)
    assert (why or "a case") in runner.told(verdict) and ("VOID" in runner.told(verdict)) == verdict["void"]
    json.loads(json.dumps(verdict, allow_nan=False))


def test_a_void_run_says_so_by_its_status(monkeypatch):
    monkeypatch.setattr(runner, "against_itself", lambda *_: [1.5, 1.6, 1.7])
    assert runner.main(["--quick", "--cases", QUICK[0].name]) == 1
    monkeypatch.setattr(runner, "against_itself", lambda *_: [0.99, 1.0, 1.01])
    monkeypatch.setattr(runner, "busy", lambda: None)
    assert runner.main(["--quick", "--cases", QUICK[0].name]) == 0


def test_the_share_of_others():
    assert runner.others((10.0, 4.0, 1.0), (20.0, 9.0, 4.0)) == pytest.approx(0.2)
    assert runner.others((10.0, 4.0, 1.0), (10.0, 4.0, 1.0)) is None
    assert runner.others(None, (1.0, 1.0, 1.0)) is None


@pytest.mark.skipif(runner.busy() is None, reason="nothing here says how busy the processor is")
def test_what_the_process_starts_is_its_own():
    before = runner.busy()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
    assert runner.busy()[2] - before[2] >= 0.4


@pytest.mark.skipif(runner.busy() is None, reason="nothing here says how busy the processor is")
def test_a_process_may_have_any_name():
    cut = "import ctypes, sys; ctypes.CDLL(None).prctl(15, ('x' * 14 + 'é').encode()); print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", cut], **pipes) as process:  # half of the last letter is kept
        process.stdout.readline()
        assert runner.busy()[2] > 0
        process.communicate(b"\n")


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_useful_work_counts_the_pairs_that_the_mask_allows(case):
    problem = case.problem()
    assert problem.pairs == int(problem.allowed.expand(problem.scores).sum())


def test_work_and_traffic_of_known_sizes():
    problem = FORWARD.problem()
    assert problem.pairs == 2 * 3 * 28
    assert problem.work == 4 * 2 * 3 * 28 * 5
    assert problem.traffic == 4 * (2 * 3 * 7 * 5) * 4
    assert BACKWARD.problem().work == 3 * 4 * 2 * 3 * 49 * 5
    assert BACKWARD.problem().traffic == 3 * problem.traffic
    # attention of 3 heads of 5 dimensions, and four projections
    assert MODULE.problem().work == 3 * (4 * 2 * 3 * 49 * 5 + 4 * 2 * 2 * 7 * 15 * 15)


def test_padding_leaves_half():
    assert half_empty(8, 128).tolist() == [8, 24, 40, 56, 72, 88, 104, 120]
    assert ragged(4, 10).tolist() == [1, 4, 7, 10]
    assert equal_parts(4096, 8) == [512] * 8 and sum(equal_parts(23, 8)) == 23


def test_peak_memory_is_that_of_one_call():
    kept = torch.zeros(10)

    def run():
        first = torch.empty(1000)
        second = torch.empty(3000)
        del first
        return (torch.empty(500), second, kept)

    assert runner.peak_memory(Step(run)) == 4 * 4000


def test_names_are_unique_and_selected_by_pattern():
    names = [case.name for case in (*CASES, *QUICK)]
    assert len(set(names)) == len(names)
    assert {case.rows for case in select("decode/*")} == {1}
    assert all(case.backward for case in select("*/forward+backward"))


def test_what_cannot_start_says_why(tmp_path, capsys):
    there = tmp_path / "there.jsonl"
    there.write_text("kept")
    for arguments, said in [
        (["--cases", "nothing*"], "No case is called 'nothing*'"),
        (["--quick", "--repeats", "2"], "2 repeats are too few"),
        (["--quick", "--repeats", "0"], "0 repeats are too few"),
        (["--quick", "--output", str(there)], "exists already"),
    ]:
        assert runner.main(arguments) == 2
        assert said in capsys.readouterr().err
    assert there.read_text() == "kept"
    assert runner.main(["--list", "--cases", "decode/*"]) == 0
    assert capsys.readouterr().out.splitlines() == [case.name for case in select("decode/*")]


def test_the_default_file_names_date_processor_and_selection(monkeypatch):
    monkeypatch.setattr(runner, "processor", lambda: "A (R) Chip @ 3 GHz")
    assert runner.default_path("*").name.endswith("_a-r-chip-3-ghz_all.jsonl")
    assert runner.default_path("attention/causal/*").name.endswith("_attention-causal.jsonl")
    assert runner.default_path("*").parent == runner.ROOT / "benchmarks" / "results"


def test_without_git_there_is_no_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    assert runner.commit() is None


def records(scale=1.0, void=False, commit="a" * 40):
    """A run of one case: headwise takes 2 seconds, sdpa 1, plain 4, a fourth is wrong."""
    shared = dict.fromkeys(SHARED, "x") | {"commit": commit, "quick": False}
    times = {"sdpa": [1.0, 1.1, 0.9], "plain": [4.0, 4.4, 3.6], "headwise": [2.0, 2.2, 1.8], "odd": None}
    found = []
    for name, samples in times.items():
        samples = samples and [scale * t for t in samples]
        found.append(
            shared
            | dict.fromkeys(FIELDS["measurement"])
            | {"kind": "measurement", "case": "attention/a", "level": "attention", "competitor": name}
            | {"samples_s": samples, "median_s": samples and samples[0], "share_of_matmul": 0.25}
            | {"share_of_memory": 0.5, "not_timed": None if samples else "not equal, not timed: output"}
        )
    ratio = 1.5 if void else 1.0
    return [*found, shared | runner.judge("attention/a", [ratio - 0.01, ratio, ratio + 0.01], 0.0)]


def written(path, found):
    path.write_text("".join(json.dumps(record) + "\n" for record in found))
    return str(path)


def test_the_report_shows_every_loss(tmp_path, capsys):
    assert report.main([written(tmp_path / "a.jsonl", records())]) == 0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines()]
    assert ["attention/a", "2000.000", "0.25", "0.50", "0.50", "<", "2.00", "≠"] in rows
    assert "Losses: 1 of 2\n  attention/a  sdpa: 0.500 (0.500 to 0.500)" in said
    assert "odd: not equal, not timed: output (attention/a)" in said
    assert "VOID" not in said


def test_the_report_reads_what_a_run_writes(quick, capsys):
    assert report.main([str(quick[1])]) == quick[0]
    said = capsys.readouterr().out
    assert all(case.name in said for case in QUICK) and "nn.MultiheadAttention" in said


def test_two_files_are_compared(tmp_path, capsys):
    first = written(tmp_path / "a.jsonl", records())
    other = written(tmp_path / "b.jsonl", records(scale=0.5, commit="b" * 40)[1:])
    assert report.main([first, other]) == 0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines()]
    assert ["attention/a", "headwise", "2000.000", "1000.000", "2.00"] in rows
    assert ["geometric", "mean", "plain", "2.00"] in rows
    assert "Timed in one alone:\n  attention/a  sdpa: only in the first" in said
    assert f"commit: {'a' * 40} and {'b' * 40}" in said


@pytest.mark.parametrize("broken", [records(void=True), records()[:-1]])
def test_a_void_or_broken_off_run_is_no_result(tmp_path, capsys, broken):
    assert report.main([written(tmp_path / "a.jsonl", broken)]) == 1
    assert "VOID: " in capsys.readouterr().out


def test_files_without_results_are_refused(tmp_path, capsys):
    for content, said in [("{}\n", "line 1: not a record"), ("no json\n", "line 1"), ("", "no measurement")]:
        path = tmp_path / "a.jsonl"
        path.write_text(content)
        assert report.main([str(path)]) == 2
        assert said in capsys.readouterr().err
    assert report.main([str(tmp_path / "missing.jsonl")]) == 2


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_ratios_are_drawn(tmp_path, ending):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    figure = tmp_path / f"figure.{ending}"
    report.main([written(tmp_path / "a.jsonl", records()), "--plot", str(figure)])
    assert figure.stat().st_size > 1000
