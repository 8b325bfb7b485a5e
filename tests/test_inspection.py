"""Recording a model while it runs, and the statistics of its heads, against numbers worked out by hand."""

import dataclasses
import math

import helpers
import pytest
import torch

from headwise import (
    Bias,
    Causal,
    DynamicCache,
    Full,
    Inputs,
    MultiHeadAttention,
    Padding,
    PerHead,
    Positions,
    RollingCache,
    ShapeError,
    Softcap,
    StaticCache,
    Window,
)
from headwise.inspection import head_statistics, record, strongest_pairs
from headwise.inspection import statistics as module


def call(mask, heads=1, tokens=4, batch=1):
    """A call in which every key that may be seen has equal weight."""
    at = Positions(tokens)
    zeros = torch.zeros(batch, heads, tokens, 2)
    return Inputs(zeros, zeros, zeros, at, at, 1.0, mask.bind(batch, heads, at, at))


def test_statistics_of_a_causal_average():
    found = head_statistics(call(Causal()), separators=torch.tensor([False, False, True, False])).head(0)
    # rows see 1, 2, 3, 4 keys evenly
    assert found["entropy"] == pytest.approx((0 + 1 + math.log2(3) + 2) / 4)
    assert found["distance"] == pytest.approx((0 + 0.5 + 1 + 1.5) / 4)
    assert found["self"] == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    assert found["previous"] == pytest.approx((0 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    assert found["next"] == 0
    assert found["first"] == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    assert found["separator"] == pytest.approx((0 + 0 + 1 / 3 + 1 / 4) / 4)
    assert found["induction"] == 0


def test_next_token_share_and_kind():
    ahead = Window(left=0, right=1) & ~Window(1)
    found = head_statistics(call(ahead))
    # the last query sees nothing and is left out of the means
    assert found.head(0)["next"] == 1
    assert found.head(0)["distance"] == 1
    assert found.kind(0) == "next"
    assert head_statistics(call(Full(), tokens=11)).kind(0) == "mixed"


def test_induction_is_the_share_on_what_followed_the_same_token():
    tokens = torch.tensor([5, 7, 9, 5, 7])
    found = head_statistics(call(Causal(), tokens=5), tokens=tokens).head(0)
    # query 3 (a 5) finds the 7 at 1 among its 4 keys; query 4 (a 7) the 9 at 2 among its 5
    assert found["induction"] == pytest.approx((1 / 4 + 1 / 5) / 5)


def test_sinks_take_from_no_share():
    x = dataclasses.replace(call(Causal() & Window(1)), sinks=torch.tensor([math.log(3.0)]))
    found = head_statistics(x).head(0)
    # one key with score 0 beside a sink of log 3: the key has a quarter of the softmax, and all that keys have
    assert found["sink"] == pytest.approx(0.75)
    assert found["self"] == pytest.approx(1.0)
    assert found["entropy"] == 0
    assert head_statistics(x).kind(0) == "self"


def test_heads_and_batch_rows_are_told_apart():
    found = head_statistics(call(PerHead((Window(1), Causal())), heads=2, batch=3))
    assert found.self.tolist() == pytest.approx([1.0, (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4])


def test_padded_rows_of_the_batch_count_for_nothing():
    found = head_statistics(call(Padding([0, 2]), batch=2)).head(0)
    assert found["entropy"] == pytest.approx(1.0)


def test_blocks_give_what_one_pass_gives(monkeypatch):
    torch.manual_seed(3)
    at = Positions(11)
    q, k, v = torch.randn(3, 1, 5, 11, 7).unbind(0)
    x = Inputs(q, k, v, at, at, 0.4, Causal())
    once, pairs = head_statistics(x), strongest_pairs(x, 3)
    monkeypatch.setattr(module, "BLOCK", 5 * 11 * 2)
    blocks = head_statistics(x)
    for head in range(5):
        assert blocks.head(head) == pytest.approx(once.head(head), rel=1e-6)
    assert [[p[:2] for p in h] for h in strongest_pairs(x, 3)] == [[p[:2] for p in h] for h in pairs]


def test_strongest_pairs_leave_out_self_and_hidden_tokens():
    at = Positions(4)
    q = torch.zeros(1, 1, 4, 4)
    k = torch.eye(4)[None, None]
    q[0, 0, 2, 0], q[0, 0, 3, 1], q[0, 0, 1, 1] = 9.0, 6.0, 50.0
    x = Inputs(q, k, k, at, at, 1.0, Full())
    assert [p[:2] for p in strongest_pairs(x, 2)[0]] == [(2, 0), (3, 1)]
    hidden = torch.tensor([True, False, False, False])
    assert strongest_pairs(x, 1, hide=hidden)[0][0][:2] == (3, 1)


def test_statistics_want_self_attention_and_one_entry_per_token():
    zeros = torch.zeros(1, 1, 2, 2)
    cross = Inputs(zeros, zeros[..., :1, :], zeros[..., :1, :], Positions(2), Positions(1), 1.0)
    with pytest.raises(ShapeError, match="2 queries over 1 keys"):
        head_statistics(cross)
    with pytest.raises(ShapeError, match=r"tokens has shape \(3,\), but there are 4 keys"):
        head_statistics(call(Full()), tokens=torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_record_keeps_what_the_layer_computed(backend):
    layer = MultiHeadAttention(10, 5, num_kv_heads=1, mask=Causal(), backend=backend)
    model = torch.nn.Sequential(layer, torch.nn.Linear(10, 10), MultiHeadAttention(10, 2, backend=backend))
    x = torch.randn(2, 7, 10)
    with record(model) as calls:
        out = model(x)
    assert [c.layer for c in calls] == ["0", "2"]
    assert torch.equal(out, model(x)), "recording changed the output"
    assert layer.observer is None
    first = calls[0]
    rebuilt = first.weights() @ first.inputs.value.expand(2, 5, 7, 2)
    helpers.assert_as_good_as(first.output, rebuilt.double(), rebuilt, terms=7)
    assert torch.equal(first.weights(slice(2, 5)), first.weights()[..., 2:5, :])
    assert not first.inputs.query.requires_grad


def test_record_gives_scores_before_the_softmax():
    layer = MultiHeadAttention(6, 3, score_mods=[Softcap(1.5)], mask=Causal())
    with record(layer) as calls:
        layer(torch.randn(1, 4, 6))
    raw, capped = calls[0].weights(stage="scores"), calls[0].weights(stage="capped")
    assert torch.equal(capped, 1.5 * torch.tanh(raw / 1.5))
    assert (calls[0].weights(stage="biased")[..., 0, 1:] == -torch.inf).all()


def test_an_observer_that_was_there_goes_on_working_and_comes_back():
    layer = MultiHeadAttention(6, 3)
    layer.observer = before = lambda x, out, lse: out * 0
    with record(layer) as calls:
        y = layer(torch.randn(1, 4, 6))
    assert layer.observer is before
    assert (calls[0].output == 0).all()
    assert torch.equal(y, layer.out_proj.bias.expand_as(y))


def test_what_was_recorded_stays_as_it_was():
    bias = Bias(torch.nn.Parameter(torch.randn(4, 4)))
    layer = MultiHeadAttention(6, 3, sinks=True, score_mods=[bias])
    with record(layer) as calls:
        layer(torch.randn(1, 4, 6), score_mods=[Bias(2 * bias.values)])
    before = calls[0].weights()
    with torch.no_grad():
        layer.sinks.fill_(9.0)
        bias.values.zero_()
    assert torch.equal(calls[0].weights(), before)
    assert not any(t.requires_grad for t in (calls[0].inputs.sinks, *calls[0].inputs.score_tensors()))


def test_observers_are_removed_after_an_error_as_well():
    layer = MultiHeadAttention(6, 3)
    with pytest.raises(ShapeError), record(layer):
        layer(torch.randn(1, 4, 5))
    assert layer.observer is None


def test_modules_of_other_libraries_that_call_their_observer_are_recorded():
    class SelfAttention(torch.nn.Module):
        def forward(self, x):
            self.observer(x, torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3))
            return x

    model = torch.nn.Sequential(SelfAttention(), torch.nn.Linear(2, 2))
    with record(model) as calls:
        assert not hasattr(model[1], "observer")
        model[0](call(Full(), tokens=3))
    assert [c.layer for c in calls] == ["0"]
    assert not hasattr(model[0], "observer")


@pytest.mark.parametrize("make", [DynamicCache, lambda: StaticCache(9), lambda: RollingCache(3)])
def test_what_was_recorded_of_a_step_is_not_overwritten_by_later_ones(make):
    layer, cache, x = MultiHeadAttention(8, 2, mask=Causal() & Window(3)), make(), torch.randn(1, 9, 8)
    with torch.no_grad(), record(layer) as calls:
        for number, token in enumerate(x.split(1, 1)):
            layer(token, cache=cache)
            if number == 5 and not isinstance(cache, RollingCache):
                cache.crop(3)
    for call in calls:
        out = call.weights() @ call.inputs.value
        helpers.assert_as_good_as(call.output, out.double(), out, terms=9)


def test_pairs_of_queries_and_other_keys_are_refused():
    layer, cache = MultiHeadAttention(8, 2, mask=Causal()), DynamicCache()
    with record(layer) as calls:
        layer(torch.randn(1, 4, 8), cache=cache)
        layer(torch.randn(1, 1, 8), cache=cache)
    assert strongest_pairs(calls[0].inputs, 1)
    with pytest.raises(ShapeError, match="1 queries over 5 keys"):
        strongest_pairs(calls[1].inputs, 1)
