"""CAC: keys and values of earlier tokens in a self-attention."""

import copy

import oracle
import pytest
import torch
from helpers import assert_as_good_as, plain_attention, randn
from reports import CACHES, PAST, assert_probe, check_layer, counter, each_backend, every_backend, every_cache, layer

from headwise import (
    CacheError,
    FixedCache,
    Padding,
    Positions,
    RotaryEmbedding,
    StaticCache,
    attention,
)

CHUNKS = {"one by one": [1] * 10, "prompt and steps": [4, 1, 1, 1, 1, 1, 1], "chunks": [3, 5, 2]}


def held(cache):
    """How many tokens the next one stands after."""
    return cache.next_positions(1).start


def through(made, cache, x, chunks, **how):
    return torch.cat([made(chunk, cache=cache, **how) for chunk in x.split(chunks, 1)], 1)


def assert_one_pass(made, got, x, *others, **how):
    """Compare with one pass in float64, without a cache."""
    want = copy.deepcopy(made).double()(x.double(), *(t.double() for t in others), **how)
    plain = made(x, *others, **how)
    assert_as_good_as(got, want, plain, terms=3 * x.shape[-1] + x.shape[-2])


def turning(**how):
    return layer(24, 4, num_kv_heads=2, mask=PAST, rotary=RotaryEmbedding(6), **how)


@every_cache
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("mode", ["train", "no_grad"])
def test_cac_1_with_a_cache_as_without(mode, chunks, cache):
    """Rotary positions and a context beside them: the results with the cache differed from those without."""
    x, context = randn(2, 10, 24), randn(2, 7, 24, seed=1)
    made, across = turning(), layer(24, 3, seed=20)
    one, two = CACHES[cache](), FixedCache()
    with torch.set_grad_enabled(mode == "train"):
        selves = through(made, one, x, CHUNKS[chunks])
        outs = [across(chunk, context, cache=two) for chunk in selves.split(CHUNKS[chunks], 1)]
    assert_one_pass(made, selves, x)
    check_layer(across, torch.cat(outs, 1), selves, context)
    for t in range(1, 11):  # fed anew from the beginning, as a text that grows
        assert_one_pass(made, made(x[:, :t], cache=CACHES[cache]()), x[:, :t])


@every_cache
@pytest.mark.parametrize("steps", [[5, 1, 1, 1], [2, 3, 2, 1]], ids=str)
@torch.no_grad()
def test_cac_2_left_padding_stays_hidden(steps, cache):
    """With a cache the padding mask went to the wrong argument and had no effect."""
    made, x, left = turning(), randn(2, 8, 24), torch.tensor([0, 3])
    x[1, :3] = 1e4
    kept, outs, done = CACHES[cache](), [], 0
    for chunk in x.split(steps, 1):
        places = Positions(chunk.shape[1], start=done, offset=-left)
        outs.append(made(chunk, cache=kept, mask=Padding(left=left), positions=places))
        done += chunk.shape[1]
    got = torch.cat(outs, 1)
    assert_one_pass(made, got[:1], x[:1])
    assert_one_pass(made, got[1:, 3:], x[1:, 3:])
    # without rotary the padding needs no positions, and the probe gives exact numbers
    plain, kept = counter(PAST), CACHES[cache]()
    numbers = torch.arange(8.0).expand(2, 8)[..., None]
    got = through(plain, kept, numbers, steps, mask=Padding(left=left))[..., 0]
    assert_probe(got[0, 3:], [1.5, 2, 2.5, 3, 3.5], slots=8)
    assert_probe(got[1, 3:], [3, 3.5, 4, 4.5, 5], slots=8)


@each_backend
@torch.no_grad()
def test_cac_3_empty_slots_of_a_buffer_take_no_part(backend):
    """All of a buffer went to the attention, and each empty slot got the weight exp(0)."""
    query, key, value = randn(1, 1, 1, 8), randn(1, 1, 5, 8, seed=1), randn(1, 1, 5, 8, seed=2)
    cache = StaticCache(16)
    cache.append(key[:, :, :4], value[:, :, :4], cache.next_positions(4))
    last = cache.next_positions(1)
    keys, values, places = cache.append(key[:, :, 4:], value[:, :, 4:], last)
    got = attention(query, keys, values, query_positions=last, key_positions=places, backend=backend)
    want, plain = oracle.attend(query, key, value)[0], plain_attention(query, key, value)[0]
    assert_as_good_as(got, want, plain, terms=13)
    # rows of different length share a buffer, and each has empty slots of its own
    cache, lengths = StaticCache(16), torch.tensor([5, 2])
    query, key, value = (t.expand(2, -1, -1, -1) for t in (query, key, value))
    keys, values, places = cache.append(key, value, cache.next_positions(5), lengths)
    got = attention(
        query, keys, values, query_positions=Positions(1, start=lengths - 1), key_positions=places, backend=backend
    )
    seen = (torch.arange(5) < lengths[:, None])[:, None, None]
    want, plain = oracle.attend(query, key, value, seen)[0], plain_attention(query, key, value, seen)[0]
    assert_as_good_as(got, want, plain, terms=13)


@every_backend
@every_cache
def test_cac_4_a_prompt_does_not_see_its_future(cache, backend):
    """The causal mask was left out because there was a cache."""
    made = counter(backend=backend)
    numbers = torch.arange(5.0)[:, None]
    assert_probe(made(numbers, mask=PAST, cache=CACHES[cache]())[:, 0], [0, 0.5, 1, 1.5, 2])
    assert_probe(counter(PAST, backend=backend)(numbers, cache=CACHES[cache]())[:, 0], [0, 0.5, 1, 1.5, 2])
    if cache != "rolling":  # which refuses a mask that looks back without end
        assert_probe(made(numbers, cache=CACHES[cache]())[:, 0], [2.0] * 5)


@every_cache
def test_cac_5_each_layer_counts_for_itself(cache):
    """The first layer moved a counter that all shared, so that those above it saw one token too many."""
    first, second = turning(), turning(seed=30)
    x = randn(2, 3, 24)
    kept = [CACHES[cache]() for _ in range(2)]
    steps = [second(first(token, cache=kept[0]), cache=kept[1]) for token in x.split(1, 1)]
    middle = first(x)
    assert_one_pass(second, torch.cat(steps, 1), middle)
    assert [held(c) for c in kept] == [3, 3]
    with pytest.raises(CacheError, match="belongs to another layer"):
        second(first(x[:, :1], cache=kept[0]), cache=kept[0])


@every_cache
@pytest.mark.parametrize(("crop", "left"), [(0, 0), (-5, 0), (-1, 2), (7, 3), (3, 3), (-3, 0), (2, 2)])
@torch.no_grad()
def test_cac_6_what_is_cropped_is_gone(crop, left, cache):
    """A crop to 0 kept everything, and one by more than there was kept one token."""
    made, x = turning(), randn(2, 5, 24)
    kept = CACHES[cache]()
    made(x[:, :3], cache=kept)
    kept.crop(crop)
    assert held(kept) == left
    fresh = randn(2, 4, 24, seed=3)
    got = through(made, kept, fresh, [1, 3])
    assert held(kept) == left + 4
    assert_one_pass(made, torch.cat([made(x[:, :left]), got], 1), torch.cat([x[:, :left], fresh], 1))


@every_cache
@torch.no_grad()
def test_cac_6_rows_are_cropped_each_at_its_length(cache):
    made, kept = counter(PAST), CACHES[cache]()
    numbers = torch.arange(8.0).expand(2, 8)[..., None]
    made(numbers[:, :5], cache=kept, lengths=torch.tensor([5, 2]))
    kept.crop(3)  # which leaves 0 1 2, and 0 1
    assert_probe(made(numbers[:, 7:], cache=kept)[:, 0, 0], [10 / 4, 8 / 3], slots=4)
    kept.crop(-1)  # the 7 is gone again
    assert_probe(made(numbers[:, 6:7], cache=kept)[:, 0, 0], [9 / 4, 7 / 3], slots=4)
    kept.crop(-4)
    assert_probe(made(numbers[:, 6:7], cache=kept)[:, 0, 0], [6.0, 6], slots=4)


@every_cache
@pytest.mark.parametrize("mode", ["train", "no_grad"])
def test_cac_7_a_fork_leaves_the_original_alone(mode, cache):
    """A prefix was handed out by reference, and grew with each use."""
    made, x = turning(), randn(2, 4, 24)
    two, three, late = randn(2, 2, 24, seed=1), randn(2, 3, 24, seed=2), randn(2, 1, 24, seed=3)
    with torch.set_grad_enabled(mode == "train"):
        kept = CACHES[cache]()
        prefix = made(x, cache=kept)
        fork = kept.fork()
        one = torch.cat([prefix, made(two, cache=fork)], 1)
        other = torch.cat([prefix, made(three, cache=kept)], 1)
        one = torch.cat([one, made(late, cache=fork)], 1)
    assert (held(fork), held(kept)) == (7, 7)
    assert_one_pass(made, one, torch.cat([x, two, late], 1))
    assert_one_pass(made, other, torch.cat([x, three], 1))


@every_cache
@torch.no_grad()
def test_cac_7_a_prefix_is_used_again_and_again(cache):
    made, x = turning(), randn(2, 4, 24)
    kept = CACHES[cache]()
    made(x, cache=kept)
    for seed, count in enumerate((2, 3, 1)):
        more = randn(2, count, 24, seed=seed)
        got = made(more, cache=kept.fork())
        assert held(kept) == 4
        assert_one_pass(made, torch.cat([made(x), got], 1), torch.cat([x, more], 1))


@every_backend
@every_cache
@torch.no_grad()
def test_cac_8_stored_keys_are_normed_and_grouped(cache, backend):
    """Keys were stored before their norm, and grouped heads were not repeated on the way through the cache."""
    made = layer(
        24,
        4,
        num_kv_heads=2,
        mask=PAST,
        backend=backend,
        q_norm=torch.nn.RMSNorm(6, eps=1e-6),
        k_norm=torch.nn.RMSNorm(6, eps=1e-6),
    )
    x = randn(2, 4, 24)
    assert_one_pass(made, through(made, CACHES[cache](), x, [3, 1]), x)
    with torch.no_grad():
        made.k_norm.weight.mul_(3)
    changed = through(made, CACHES[cache](), x, [3, 1])
    assert_one_pass(made, changed, x)


@every_backend
@every_cache
@torch.no_grad()
def test_cac_9_prompts_of_different_length_in_one_batch(cache, backend):
    """Batches were right only when all prompts had one length: the causal mask knew nothing of padding."""
    made, kept = counter(PAST, backend=backend), CACHES[cache]()
    lengths = torch.tensor([4, 2, 1])
    numbers = torch.arange(6.0).expand(3, 6)[..., None]
    padding = Padding(left=4 - lengths)
    assert_probe(made(numbers[:, :4], mask=padding, cache=kept)[:, -1, 0], [1.5, 2.5, 3.0], slots=4)
    assert_probe(made(numbers[:, 4:5], mask=padding, cache=kept)[:, 0, 0], [2, 3, 3.5], slots=5)
    assert_probe(made(numbers[:, 5:], mask=padding, cache=kept)[:, 0, 0], [2.5, 3.5, 4], slots=6)
    # the same prompts padded on the right: the cache leaves the padding out
    kept = CACHES[cache]()
    prompts = torch.tensor([[0.0, 1, 2, 3], [2, 3, 99, 99], [3, 99, 99, 99]])[..., None]
    last = made(prompts, cache=kept, lengths=lengths)[torch.arange(3), lengths - 1, 0]
    assert_probe(last, [1.5, 2.5, 3.0], slots=4)
    assert_probe(made(numbers[:, 4:5], cache=kept)[:, 0, 0], [2, 3, 3.5], slots=5)
    assert_probe(made(numbers[:, 5:], cache=kept)[:, 0, 0], [2.5, 3.5, 4], slots=6)
