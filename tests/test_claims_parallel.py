"""The claims about parallel heads and long sequences: both forms are the same numbers, results say what they mean."""

import json
import math
from statistics import median

import helpers
import pytest
import torch
from helpers import leaf, plain_attention
from torch.nn import functional as F

import headwise
from benchmarks.claims import parallel
from benchmarks.claims import units as runner
from headwise import Causal, Full, Window

BATCH, ROWS, HEADS, SIZE = 2, 11, 5, 7
WIDTH = HEADS * SIZE
PACE = {"rounds": 3, "sample_s": 1e-5}


def by_formula(tokens, weights, grad, heads):
    """Output and gradients as the formula has it, by einsum over an axis of heads that the weights are given."""
    leaves = [leaf(x, grad.dtype) for x in (tokens, *weights)]
    tokens, to_query, to_key, to_value, to_out = leaves
    query, key, value = (
        torch.einsum("bte,hde->bhtd", tokens, weight.unflatten(0, (heads, -1)))
        for weight in (to_query, to_key, to_value)
    )
    heads_BHTD = plain_attention(query, key, value)[0]
    out = torch.einsum("bhtd,ehd->bte", heads_BHTD, to_out.unflatten(1, (heads, -1)))
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("kernel", parallel.KERNELS)
@pytest.mark.parametrize("form", [parallel.batched, parallel.loop])
def test_loop_and_batched_form_are_multi_head_attention(form, kernel, heads):
    tokens, weights, grad = parallel.problem(BATCH, ROWS, WIDTH, backward=True)
    got = parallel.call_of(form, tokens, weights, grad, heads, kernel)()
    exact = by_formula(tokens, weights, grad.double(), heads)
    nearly = by_formula(tokens, weights, grad, heads)
    names = ("output", "tokens", "to_query", "to_key", "to_value", "to_out")
    for name, one, want, close in zip(names, got, exact, nearly, strict=True):
        helpers.assert_as_good_as(one, want, close, terms=max(BATCH * ROWS, WIDTH), what=name)


def test_the_batched_form_is_the_layer():
    tokens, weights, _ = parallel.problem(BATCH, ROWS, WIDTH, backward=False)
    layer = headwise.MultiHeadAttention(WIDTH, HEADS, bias=False)
    with torch.no_grad():
        for proj, weight in zip((layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj), weights, strict=True):
            proj.weight.copy_(weight)
        got = layer(tokens)
    exact = by_formula(tokens, weights, torch.zeros(tokens.shape, dtype=torch.float64), HEADS)[0]
    nearly = parallel.batched(tokens, weights, HEADS, F.scaled_dot_product_attention)
    helpers.assert_as_good_as(got, exact, nearly, terms=WIDTH, what="layer")


def test_results_of_heads_agree_with_one_another():
    settings = {"batch": 1, "rows": 5, "width": 12, "heads": [1, 3], "kernel": "fused", "backward": True}
    found = parallel.heads_at_once(**settings, **PACE)
    assert [entry["heads"] for entry in found["heads"]] == [1, 3]
    for entry in found["heads"]:
        assert entry["difference"] < 1e-5  # they are the same numbers, which another test holds to the rule
        for what in ("batched", "loop", "loop_by_batched", "by_one_head"):
            low, high = entry[what]["quartiles"]
            assert 0 < low <= entry[what]["median"] <= high and entry[what]["rounds"] == 3
    assert found["heads"][0]["by_one_head"] == {"median": 1.0, "quartiles": [1.0, 1.0], "rounds": 3}
    json.dumps(found, allow_nan=False)


def test_threads_are_as_before_and_every_layer_has_its_ratios():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = parallel.steps_in_order(batch=1, rows=3, width=8, heads=2, **PACE)
        assert torch.get_num_threads() == found["threads"] == 2
    finally:
        torch.set_num_threads(threads)
    by_layer = {entry["layer"]: entry for entry in found["layers"]}
    assert set(by_layer) == {"batched", "loop", "GRU", "LSTM"}
    assert by_layer["batched"]["by_attention"]["quartiles"] == [1.0, 1.0]
    assert by_layer["GRU"]["steps_in_order"] == 3 and by_layer["loop"]["steps_in_order"] == 1


def test_the_useful_work_is_that_of_the_pairs_that_may_attend():
    rows, heads, size, window = 13, 2, 8, 5
    found = parallel.at_length(rows, heads, size, window, **PACE, quick=True)
    by_mask = {entry["what"]: entry for entry in found["masks"]}
    row, slot = torch.arange(rows)[:, None], torch.arange(rows)
    seen = {"full": slot >= 0, "causal": slot <= row, "window": (slot <= row) & (slot > row - window)}
    for name, allowed in seen.items():
        entry = by_mask[name]
        assert entry["pairs"] == heads * int(allowed.expand(rows, rows).sum())
        assert entry["work_flop"] == 4 * size * entry["pairs"]
        assert math.isclose(entry["useful_s"], entry["work_flop"] / found["matmul_per_s"], rel_tol=1e-5)
        assert entry["peak_memory_bytes"] >= 4 * heads * rows * size  # the result is counted
    assert by_mask["plain full"]["peak_memory_bytes"] >= 4 * heads * rows**2  # so are the weights
    assert not found["not_run"]


def test_of_long_calls_two_are_timed_and_the_memory_is_the_same(monkeypatch):
    usual = parallel.at_length(13, 2, 8, 5, **PACE, quick=True)
    monkeypatch.setattr(parallel, "SLOW", 13)
    found = parallel.at_length(13, 2, 8, 5, **PACE, quick=True)
    assert [entry["seconds"]["rounds"] for entry in found["masks"]] == [2] * 4
    assert [e["peak_memory_bytes"] for e in found["masks"]] == [e["peak_memory_bytes"] for e in usual["masks"]]


def test_a_mask_that_the_memory_does_not_hold_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr(parallel, "physical_memory", lambda: 1)
    found = parallel.at_length(13, 2, 8, 5, **PACE, quick=True)
    assert set(found["not_run"]) == set(parallel.MASKS) and [e["what"] for e in found["masks"]] == ["plain full"]


def test_the_masks_are_those_that_the_names_say():
    assert {"full": Full(), "causal": Causal(), "window": Causal() & Window(parallel.WINDOW)} == parallel.MASKS


def test_the_additive_score_holds_a_number_for_each_pair_and_feature():
    rows, size = 13, 8
    scores = {entry["score"]: entry for entry in parallel.additive(rows, size, **PACE)["scores"]}
    assert scores["additive"]["peak_memory_bytes"] >= 4 * rows**2 * size > scores["dot"]["peak_memory_bytes"]
    assert scores["dot"]["by_dot"]["median"] == 1


def test_a_score_without_a_query_holds_one_row_and_gives_as_many_as_the_others(monkeypatch):
    rows, size = 13, 8
    calls = {}
    real = parallel.interleave
    monkeypatch.setattr(parallel, "interleave", lambda given, *pace: calls.update(given) or real(given, *pace))
    scores = {entry["score"]: entry for entry in parallel.additive(rows, size, **PACE)["scores"]}
    assert list(calls) == list(scores) == ["dot", "fused", "additive", "one row"]  # in the same rounds
    results = {score: call()[0] for score, call in calls.items()}
    assert {tuple(result.shape) for result in results.values()} == {(1, 1, rows, size)}
    assert torch.equal(results["one row"], results["one row"][:, :, :1].expand(-1, -1, rows, -1))
    assert 4 * rows * size <= scores["one row"]["peak_memory_bytes"] < scores["dot"]["peak_memory_bytes"]


def test_an_exponent_is_the_power():
    assert parallel.exponent([2, 4, 16], [3 * n**2.5 for n in (2, 4, 16)]) == 2.5
    assert parallel.exponent([2], [1]) is None


def test_a_ratio_is_of_one_round():
    assert parallel.ratio([2.0, 9.0, 8.0], [1.0, 3.0, 2.0])["median"] == median([2.0, 3.0, 4.0])
    assert parallel.ratio([2.0, 9.0, 8.0], [1.0, 3.0])["rounds"] == 2


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of a quick run, each unit called in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    records = {}
    for unit in parallel.units(quick=True):
        module, name = unit.function.split(":")
        assert module == parallel.__name__ and unit.alone
        result = getattr(parallel, name)(**unit.settings)
        records[unit.name] = json.loads(json.dumps({"unit": unit.name, "settings": unit.settings, "result": result}))
    torch.set_num_threads(threads)
    return records


def test_the_summary_is_of_all_units(results):
    found = parallel.summary(results)
    assert set(found["length"]) == {"full", "causal", "window", "plain full"}
    assert found["length"]["full"]["longest"] == 128
    assert set(found["loop_by_batched"]) == {"fused forward", "fused both", "plain forward", "plain both"}
    assert set(found["loop_by_batched"]["plain both"]) == {"1", "2"}
    assert set(found["steps"]) == {"8"} and set(found["additive"]) == {"16"}
    assert set(found["additive"]["16"]) == {"dot", "fused", "additive", "one row"}
    json.dumps(found, allow_nan=False)


def test_the_figures_are_drawn(results, tmp_path):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    for draw in (parallel.draw_time_and_memory, parallel.draw_loop_against_batched):
        for name in ("figure.svg", "again.svg"):
            draw(results, tmp_path / name)
        drawn = (tmp_path / "figure.svg").read_bytes()
        assert len(drawn) > 5000 and (b"<!-- heads -->" in drawn or b"<!-- tokens -->" in drawn)
        assert drawn == (tmp_path / "again.svg").read_bytes(), "the same numbers give the same bytes"


def test_a_figure_says_where_a_bar_is_cut(results, tmp_path):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    for upper, said in ((1.1, False), (64.0, True)):
        records = json.loads(json.dumps(results))
        for name in [name for name in records if name.startswith("parallel/heads/")]:
            for entry in records[name]["result"]["heads"]:
                for what in ("loop_by_batched", "by_one_head"):
                    entry[what] = {"median": 1.0, "quartiles": [0.9, upper], "rounds": 3}
        parallel.draw_loop_against_batched(records, tmp_path / "figure.svg")
        text = (tmp_path / "figure.svg").read_text(encoding="utf-8")
        assert ("go on beyond it" in text) == said and "<!-- 64 -->" not in text


def test_names_of_units_are_different_and_a_run_goes_on_where_it_stopped(tmp_path, results):
    for quick in (True, False):
        names = [unit.name for unit in parallel.units(quick)]
        assert len(set(names)) == len(names)
    quick, path = parallel.units(quick=True), tmp_path / "results.jsonl"
    lines = [json.dumps({**results[unit.name], **unit.key(), "seconds": 0.0}) for unit in quick]
    path.write_text("\n".join(lines) + "\n" + lines[0][:20])  # a killed run leaves half a line
    told = []
    found = runner.run(quick, path, told=told.append)
    assert not told and list(found) == [unit.name for unit in quick]
    assert found[quick[0].name]["result"] == results[quick[0].name]["result"]
    full = runner.stored(parallel.units(quick=False), path)
    assert not full, "tiny sizes do not stand for the whole"
