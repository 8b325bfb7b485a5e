"""SHP: the shape of a mask, and what its dimensions are taken for."""

import pytest
import torch
from helpers import randn
from reports import assert_probe, check, check_layer, each_backend, every_backend, every_mode, layer, probe, running

from headwise import Bias, Dense, Padding, ShapeError, attention
from headwise.convert.torch import from_torch_masks

# without the annotation hook: wrong masks must meet headwise's own errors
pytestmark = pytest.mark.plain


def per_sample(*shape, seed=3):
    """Booleans that differ everywhere, with at least one key for each query."""
    mask = randn(*shape, seed=seed) > 0
    mask[..., 0] = True
    return mask


@every_backend
def test_shp_1_one_mask_for_each_sample(backend):
    """(B, T, S) was refused, and of the form that was taken, (B * H, T, S), the order was told nowhere."""
    query, key, value = (randn(2, 2, 3, 5, seed=i) for i in range(3))
    mask = per_sample(2, 1, 3, 3)
    check(backend, query, key, value, mask, mask=mask)
    with pytest.raises(ShapeError, match="batch or the heads"):
        attention(query, key, value, mask=mask[:, 0], backend=backend)
    flat = per_sample(4, 3, 3)
    both = flat.reshape(2, 2, 3, 3)  # the heads of a sample side by side
    check(backend, query, key, value, both, mask=Dense.from_zeros(flat.long(), num_heads=2))
    check(backend, query, key, value, both, mask=from_torch_masks(~flat, num_heads=2)[0])


@every_backend
@every_mode
@pytest.mark.parametrize("kind", ["float", "bool"])
def test_shp_2_a_mask_per_sample_and_head_with_padding(kind, mode, backend):
    """It worked in training, and failed or differed in evaluation."""
    made, x = layer(4, 4, backend=backend), randn(2, 8, 4, seed=50)
    padded = torch.zeros(2, 8, dtype=torch.bool)
    padded[1, -2:] = True
    given = randn(8, 8, 8, seed=51) if kind == "float" else ~per_sample(8, 8, 8)
    mask, mods = from_torch_masks(given, padded, num_heads=4)
    with running(mode, made):
        out = made(x, mask=mask, score_mods=mods)
    full, allowed = given.unflatten(0, (2, 4)), ~padded[:, None, None]
    if kind == "float":
        check_layer(made, out, x, allowed=allowed, bias=full)
    else:
        check_layer(made, out, x, allowed=allowed & ~full)


@every_backend
@pytest.mark.parametrize("batch", [2, 8])
def test_shp_3_three_dimensions_are_refused(batch, backend):
    """(B, T, S) meets the heads, not the batch: an error where the two differ, silently wrong where B = H."""
    query, key, value = randn(batch, 8, 3, 5), randn(batch, 2, 4, 5, seed=1), randn(batch, 2, 4, 5, seed=2)
    mask = per_sample(batch, 3, 4)
    for how in ({"mask": mask}, {"mask": mask.float()}, {"mask": mask.long()}):
        with pytest.raises(ShapeError):
            attention(query, key, value, backend=backend, **how)
    with pytest.raises(ShapeError, match="batch or the heads"):
        Bias(mask.float())
    with pytest.raises(ShapeError, match="mixes batch and heads"):
        Dense.from_zeros(mask)
    check(backend, query, key, value, mask[:, None], mask=mask[:, None])


@every_backend
def test_shp_4_where_batch_and_heads_are_equal_nothing_is_guessed(backend):
    """A mask per head was read as one per sample, which fails only where the two numbers differ."""
    per_head = torch.eye(2, dtype=torch.bool)[:, None]  # head 0 sees key 0, head 1 key 1
    with pytest.raises(ShapeError, match="batch or the heads"):
        probe(1, 2, batch=2, mask=per_head, backend=backend)
    assert_probe(probe(1, 2, batch=2, mask=per_head[None], backend=backend), [[[0.0], [1.0]]] * 2, slots=2)
    assert_probe(probe(1, 2, batch=2, mask=per_head[:, None], backend=backend), [[[0.0]] * 2, [[1.0]] * 2], slots=2)


@every_backend
def test_shp_5_what_is_taken_broadcasts_like_any_array(backend):
    """A mask of lower rank was taken in one place, refused in another, and one of rank 1 ended in an IndexError."""
    query, key, value = randn(2, 4, 7, 16), randn(2, 4, 5, 16, seed=1), randn(2, 4, 5, 8, seed=2)
    columns, rows = torch.tensor([True, False, True, True, False]), per_sample(7, 1)
    rows[3] = False
    check(backend, query, key, value, columns.expand(7, 5), mask=columns[None])
    check(backend, query, key, value, columns.expand(7, 5), mask=columns[None, None, None])
    check(backend, query, key, value, rows.expand(7, 5), mask=rows)
    with pytest.raises(ShapeError, match=r"shape \(5,\) has 1 dimensions"):
        attention(query, key, value, mask=columns, backend=backend)
    with pytest.raises(ShapeError, match="ambiguous"):
        attention(query, key, value, mask=columns[None, None], backend=backend)
    with pytest.raises(ShapeError, match="query has 5 dimensions, not 4"):
        attention(query[None], key[None], value[None], backend=backend)
    with pytest.raises(ShapeError, match="each size must be equal or 1"):
        attention(query, key, value, mask=columns[None, :4], backend=backend)


@each_backend
@pytest.mark.parametrize("heads", [2, 6])
def test_shp_6_each_sample_gets_its_own_mask(heads, backend):
    """Heads were merged into the batch in one order, and the masks repeated in the other."""
    lengths = [1, 2, 4]
    for mask in (Padding(lengths), Padding(torch.arange(4) < torch.tensor(lengths)[:, None])):
        got = probe(1, 4, batch=3, heads=heads, kv_heads=2, mask=mask, backend=backend)
        assert_probe(got, torch.tensor([0.0, 0.5, 1.5])[:, None, None].expand(3, heads, 1), slots=4)


@each_backend
def test_shp_7_a_key_mask_is_not_one_of_queries(backend):
    """(B, S) met scores (B, T, S) without the missing dimension: wrong rows where B = T."""
    lengths = torch.tensor([1, 2, 3])
    want = torch.tensor([0.0, 0.5, 1.0])[:, None, None].expand(3, 2, 3)
    boolean = torch.arange(3) < lengths[:, None]
    for mask in (Padding(lengths), Padding(boolean), Dense(boolean[:, None, None])):
        assert_probe(probe(3, 3, batch=3, mask=mask, backend=backend), want)
