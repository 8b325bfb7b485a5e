"""XBM: keys and values of an encoder, kept while a decoder writes, and beams."""

import pytest
import torch
from helpers import randn
from reports import CACHES, PAST, assert_probe, check_layer, counter, every_backend, every_cache, layer

from headwise import FixedCache, Padding, RollingCache, Window


def counting(projection):
    """How often a projection is called, as a list that grows."""
    calls = []
    projection.register_forward_hook(lambda *_: calls.append(1))
    return calls


@every_backend
@torch.no_grad()
def test_xbm_1_a_window_of_the_decoder_leaves_the_encoder_whole(backend):
    """The cache of the cross-attention took over the decoder's window, and dropped keys of the encoder."""
    own, across = counter(PAST & Window(4), backend=backend), counter(backend=backend)
    rolling, fixed = RollingCache(4), FixedCache()
    memory = torch.arange(9.0)[:, None]
    for step in range(6):
        token = torch.full((1, 1), float(step))
        assert_probe(own(token, cache=rolling)[:, 0], [sum(range(max(0, step - 3), step + 1)) / min(4, step + 1)])
        assert_probe(across(token, memory if step == 0 else None, cache=fixed)[:, 0], [4.0], slots=9)


@pytest.mark.parametrize("again", ["left out", "the same tensor"])
@torch.no_grad()
def test_xbm_2_the_keys_of_the_encoder_are_projected_once(again):
    """They were put into a copy of a dictionary, lost, and computed anew in each step."""
    made, memory, x = layer(12, 3), randn(2, 7, 12, seed=1), randn(2, 3, 12)
    keys, values, queries = counting(made.k_proj), counting(made.v_proj), counting(made.q_proj)
    cache, outs = FixedCache(), []
    for step, token in enumerate(x.split(1, 1)):
        outs.append(made(token, memory if step == 0 or again == "the same tensor" else None, cache=cache))
    assert (len(keys), len(values), len(queries)) == (1, 1, 3)
    check_layer(made, torch.cat(outs, 1), x, memory)
    longer = made(x, memory, cache=FixedCache())
    check_layer(made, longer, x, memory)


@torch.no_grad()
def test_xbm_3_rows_of_both_caches_follow_the_beams():
    """Two sentences of two beams: a swap inside a sentence changes nothing, and a sentence that ends takes its rows."""
    made = layer(12, 3)
    sentences = randn(2, 7, 12, seed=1)
    memory = sentences.repeat_interleave(2, 0)
    cache = FixedCache()
    x = randn(4, 1, 12)
    check_layer(made, made(x, memory, cache=cache), x, memory)
    cache.select(torch.tensor([1, 0, 3, 2]))
    check_layer(made, made(x, cache=cache), x, memory)
    cache.select(torch.tensor([2, 3]))
    check_layer(made, made(x[:2], cache=cache), x[:2], memory[2:])
    cache.select([0, 0, 1])  # and a beam may be repeated
    check_layer(made, made(x[:3], cache=cache), x[:3], memory[[2, 2, 3]])


@every_cache
@torch.no_grad()
def test_xbm_3_the_decoder_goes_on_as_its_beam_began(cache):
    """Each beam has seen other tokens, so here the order does matter."""
    made, kept = layer(12, 3, mask=PAST), CACHES[cache]()
    x, rows = randn(4, 3, 12), torch.tensor([1, 0, 2, 2])
    made(x[:, :2], cache=kept)
    kept.select(rows)
    got = made(x[:, 2:], cache=kept)
    whole = torch.cat([x[rows, :2], x[:, 2:]], 1)
    past = torch.ones(3, 3, dtype=torch.bool).tril()
    check_layer(made, torch.cat([made(whole[:, :2]), got], 1), whole, allowed=past)
    kept.select([3])
    assert kept.next_positions(1).start == 3
    last = randn(1, 1, 12, seed=5)
    whole = torch.cat([whole[3:], last], 1)
    got = torch.cat([made(whole[:, :3]), made(last, cache=kept)], 1)
    check_layer(made, got, whole, allowed=torch.ones(4, 4, dtype=torch.bool).tril())


@every_backend
@pytest.mark.parametrize("garbage", [1e4, torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("cached", [False, True], ids=["no cache", "cache"])
@torch.no_grad()
def test_xbm_4_more_padding_of_the_encoder_changes_nothing(cached, garbage, backend):
    """The same context padded further, with large numbers, gave a decoder other results."""
    made = layer(12, 3, backend=backend)
    lengths, x = torch.tensor([4, 2]), randn(2, 3, 12)
    real = randn(2, 4, 12, seed=1)
    allowed = (torch.arange(4) < lengths[:, None])[:, None, None]
    outs = []
    for width in (4, 5, 9):
        memory = torch.full((2, width, 12), garbage)
        for row, length in enumerate(lengths):
            memory[row, :length] = real[row, :length]
        if cached:
            cache = FixedCache()
            parts = [
                made(token, memory if step == 0 else None, cache=cache, mask=Padding(lengths))
                for step, token in enumerate(x.split(1, 1))
            ]
            outs.append(torch.cat(parts, 1))
        else:
            outs.append(made(x, memory, mask=Padding(lengths)))
        check_layer(made, outs[-1], x, real, allowed=allowed)


@torch.no_grad()
def test_xbm_4_lengths_of_the_encoder_are_kept_with_its_keys():
    """Given once, with the keys, they need no mask in later calls."""
    made, lengths, x = layer(12, 3), torch.tensor([5, 2]), randn(2, 3, 12)
    memory = randn(2, 5, 12, seed=1)
    allowed = (torch.arange(5) < lengths[:, None])[:, None, None]
    cache = FixedCache()
    first = made(x[:, :1], memory, cache=cache, lengths=lengths)
    got = torch.cat([first, made(x[:, 1:], cache=cache)], 1)
    check_layer(made, got, x, memory, allowed=allowed)
