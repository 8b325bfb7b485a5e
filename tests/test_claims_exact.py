"""The statements that are calculated: each figure is what it says, and would be another if the library were wrong."""

import importlib
import json
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.claims import exact

UNITS = {unit.name.removeprefix("exact/"): unit for unit in exact.units(quick=True)}
CHEAP = [name for name in UNITS if name not in ("two_places", "models", "applications")]
ROUNDING = 1000 * torch.finfo(torch.float64).eps


def call(name, **others):
    return getattr(exact, name)(**{**UNITS[name].settings, **others})


@pytest.fixture(scope="module", params=CHEAP)
def found(request):
    return request.param, call(request.param)


def test_units_are_named_and_found():
    full = exact.units(quick=False)
    assert [unit.name for unit in full] == [unit.name for unit in UNITS.values()]
    for unit in full:
        module, name = unit.function.split(":")
        assert callable(getattr(importlib.import_module(module), name)) and not unit.alone
        assert json.loads(json.dumps(dict(unit.settings))) == unit.settings


def test_results_are_plain_and_the_same_each_time(found):
    name, result = found
    again = json.loads(json.dumps(result, allow_nan=False))
    assert again == result == call(name)


def test_formula():
    result = call("formula")
    assert max(result["cross_attention_error"].values()) < ROUNDING
    assert max(result["self_attention_error"], result["sum_over_heads_error"]) < ROUNDING
    for error in result["cross_attention_error32"].values():
        assert 0 < error <= 2 * result["written_out_error32"] + torch.finfo(torch.float32).eps
    assert result["largest_output"] > 0.1


def test_formula_sees_another_scale(monkeypatch):
    monkeypatch.setattr(exact, "_attend", lambda q, k, v: (q @ k.mT).softmax(-1) @ v)
    assert call("formula")["self_attention_error"] > 0.01


def test_modules():
    result = call("modules")
    assert len(result) == 5
    for case in result.values():
        assert case["error"] < ROUNDING < case["error32"]
        assert case["error32"] <= 2 * case["its_own_error32"] + torch.finfo(torch.float32).eps


def test_the_two_completions_of_the_question_differ():
    x = torch.randn(2, 7, 13, dtype=torch.float64)
    both = [exact._filled(exact.QuestionModule(13, 15, 3, causal=causal), 0)(x) for causal in (False, True)]
    assert exact._difference(both[0][:, -1], both[1][:, -1]) < ROUNDING
    assert exact._difference(both[0][:, 0], both[1][:, 0]) > 0.01


def test_blind_rows():
    result = call("blind_rows")
    assert result["hidden_keys_read_by_article"] == result["hidden_keys"] == exact.KEYS
    assert result["hidden_keys_read_by_headwise"] == result["headwise_from_output_bias"] == 0
    assert max(result["article_from_mean_of_values"], result["difference_elsewhere"]) < ROUNDING
    assert result["difference_there"] > 0.1
    assert "overflow" in result["article_in_float16"] and "size" in result["article_with_mask_per_sequence"]


def test_reshape():
    result = call("reshape")
    assert result["same_address"] and result["same_storage"] and result["a_write_is_seen_through"]
    assert len(set(result["elements_before_and_after"])) == 1
    assert result["difference_of_numbers"] == result["head_from_slice"] == 0
    assert max(result["head_from_its_rows_of_the_weight"], result["six_features_three_heads_error"]) < ROUNDING
    assert result["merging_needs_a_copy"].startswith("RuntimeError: view")


def test_independence():
    result = call("independence")
    assert set(result["largest_derivative_by_other_heads"].values()) == {0.0}
    assert min(result["smallest_derivative_by_own_head"].values()) > 0.01
    assert result["features_of_a_token_used_by_each_head"] == [exact.D_IN] * exact.HEADS
    assert result["rank_of_each_head"] == [exact.HEAD_DIM] * exact.HEADS
    assert result["rank_of_each_pair_of_heads"] == [2 * exact.HEAD_DIM] * math.comb(exact.HEADS, 2)
    assert result["heads_read_by_each_output_after_the_output_projection"] == [exact.HEADS]


def test_skipped():
    result = call("skipped")
    assert max(result["from_single_head"], result["kept_the_head_scale_from_single_head_of_that_scale"]) < ROUNDING
    assert result["from_several_heads_relative"] > 0.1 and result["kept_the_head_scale_from_single_head"] > 0.1
    assert result["kept_the_swap_shape_of_scores"] == [exact.BATCH, exact.WIDTH, exact.WIDTH]
    assert result["kept_the_swap_relative"] > 0.1 and result["without_a_softmax_relative"] > 0.1


def test_costs():
    result = call("costs")
    rows, queries, keys = result["rows"], result["queries"], result["keys"]
    assert len({(row["parameters"], row["multiply_adds_a_sequence"]) for row in rows}) == 1
    for row in rows:
        assert row["scores_a_sequence"] == row["heads"] * queries * keys
        assert row["softmaxes_a_sequence"] == row["heads"] * queries
        assert row["attention_products_batched"] == 2
        # each head has three projections and two products of its own, and the output one for all
        assert row["products_in_a_loop_over_heads"] == 5 * row["heads"] + 1


def test_multiply_adds_are_those_of_torch():
    layer = exact._layer(0)
    x = torch.zeros(2, 7, exact.D_IN, dtype=torch.float64)
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        exact._by_heads(layer, x, x, x)
    with torch.no_grad(), exact._Calls() as calls:
        exact._by_heads(layer, x, x, x)
    assert 2 * calls.multiply_adds == flops.get_total_flops() > 0


def test_not_transposed():
    result = call("not_transposed")
    cases, forbidden = result["cases"], result["pairs_forbidden_by_a_causal_mask"]
    assert len({tuple(case["shape"]) for case in cases.values()}) == 1
    assert cases["right"]["other_tokens_read"] == result["pairs_of_different_tokens"] == 2 * forbidden
    assert cases["right, causal"] == {**cases["right"], "other_tokens_read": forbidden, "later_tokens_read": 0}
    assert cases["not swapped"]["other_tokens_read"] == 0
    assert cases["view for the swap, swapped back, causal"]["later_tokens_read"] > 0
    assert all(case["relative_difference"] > 0.1 for name, case in cases.items() if "right" not in name)
    assert result["tokens_head_0_reads_after_a_view"] == math.ceil(exact.LENGTH / exact.HEADS)


def test_softmax():
    result = call("softmax")
    assert 0 < result["row_sums_from_1"]["float64"] < ROUNDING < result["row_sums_from_1"]["float32"] < 1e-5
    assert result["one_score_softmaxed_per_head_from_single_head"] < ROUNDING
    assert result["head_dot_products_summed_from_the_whole"] < ROUNDING
    assert result["head_dot_products_from_the_whole_relative"] > 0.1
    assert result["one_softmax_over_all_heads_row_sums"][1] < 1
    assert 0 < result["divided_by_the_sum_negative_weights"] < result["weights"]
    assert 0 < result["scores_negative"] < result["weights"]


def test_shapes():
    shapes = call("shapes")["shapes"]
    assert [name for name, shape in shapes.items() if not shape["holds"]] == ["projected"]
    assert len(shapes) == 7


def test_one_sequence():
    result = call("one_sequence")
    assert result["layer(x)_from_layer(x, x, x)"] == result["zero_weights"] == result["cross_zero_weights"] == 0
    assert result["pairs_read"] == result["pairs"] and result["smallest_weight"] > 0
    assert result["causal_pairs_seen"] == exact.LENGTH * (exact.LENGTH + 1) // 2
    assert result["cross_weights_a_head"] == [exact.LENGTH, exact.KEYS]


def test_two_places():
    result = exact.two_places(seeds=[0], sequences=128, steps=40)  # a quick unit searches less
    assert result["two heads, set by hand"]["error"] == 0
    assert result["two heads"]["best_on_fresh"] < 0.05 < 0.2 < result["one head"]["best_on_fresh"]
    assert result["two heads"]["parameters"] == result["one head"]["parameters"]


def test_order():
    result = call("order")
    assert max(result["largest_difference"], result["largest_difference_of_the_mean"]) < ROUNDING
    assert result["every_order"]["orders"] == 720 and result["every_order"]["difference"] < ROUNDING
    for part, by_length in result["with"].items():
        assert all((value < ROUNDING) == (part == "nothing") for value in by_length.values())
        assert part == "nothing" or min(by_length.values()) > 0.01


def test_models():
    pytest.importorskip("transformers", reason="transformers is not installed")
    result = call("models")
    assert len(result) == 3
    for model in result.values():
        assert model["layers"] == model["with_self_attention"] == model["attention_followed_by_feed_forward"] == 12
    assert result["BERT base"]["heads"] == result["GPT-2"]["heads"] == [12] * 12


def test_heads_of_a_configuration():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    with_heads = ("bert", "gpt2", "t5", "whisper", "segformer", "swin", "vit", "videomae", "clip", "xlm", "perceiver")
    assert [name for name in with_heads if not exact._has_heads(transformers, name)] == []
    without = ("resnet", "convnext", "mamba", "mamba2", "fnet", "rwkv", "upernet")
    assert [name for name in without if exact._has_heads(transformers, name)] == []


def test_every_field_of_the_article_has_lists_that_exist():
    auto = pytest.importorskip("transformers.models.auto.modeling_auto", reason="transformers is not installed")
    assert len(exact.FIELDS) == 8
    for lists in exact.FIELDS.values():
        assert all(getattr(auto, f"MODEL_FOR_{name}_MAPPING_NAMES") for name in lists)


@pytest.mark.parametrize("name", ["models", "applications"])
def test_without_transformers_it_is_not_tested(monkeypatch, name):
    def missing(module):
        raise ImportError(module)

    monkeypatch.setattr(exact.importlib, "import_module", missing)
    assert list(call(name)) == ["not_tested"]
