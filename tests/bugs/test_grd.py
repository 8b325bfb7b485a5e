"""GRD: gradients of every kind, and function transforms."""

import oracle
import pytest
import torch
from helpers import assert_as_good_as, leaf, randn
from reports import ALL, check, each_backend, every_backend, layer

from headwise import Bias, Causal, Dense, Padding, UnsupportedError, Window, attention, attention_with_lse

# without the annotation hook: it cannot look at the shapes inside a transform
pytestmark = pytest.mark.plain

MASKS = {
    "no mask": ({}, None),
    "causal": ({"mask": Causal()}, torch.ones(5, 5, dtype=torch.bool).tril()),
    "window": ({"mask": Window(2)}, (torch.arange(5)[:, None] - torch.arange(5)).abs() < 2),
    "padding": ({"mask": Padding([3, 0])}, (torch.arange(5) < torch.tensor([3, 0])[:, None])[:, None, None]),
    "booleans": (
        {"mask": torch.ones(5, 5, dtype=torch.bool).tril(-1)},
        torch.ones(5, 5, dtype=torch.bool).tril(-1),
    ),
}


def given(dtype=torch.float64):
    return [randn(2, 2, 5, 8, seed=i, dtype=dtype) for i in range(3)]


def penalised(f, tensors):
    """A gradient penalty on the query, and its gradients."""
    query, key, value = (leaf(t) for t in tensors)
    (first,) = torch.autograd.grad(f(query, key, value).square().sum(), query, create_graph=True)
    penalty = first.square().sum()
    return penalty, torch.autograd.grad(penalty, (query, key, value))


@every_backend
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_grd_1_the_second_derivative(dtype, mask, backend):
    """It was not implemented for the fused route, which showed only at the second derivative."""
    how, allowed = MASKS[mask]
    penalty, seconds = penalised(lambda q, k, v: attention(q, k, v, backend=backend, **how), given(dtype))
    wants = penalised(lambda q, k, v: oracle.attend(q, k, v, allowed)[0], given())
    assert_as_good_as(penalty, wants[0], terms=2 * 2 * 5 * 8 * 13)
    for second, want in zip(seconds, wants[1], strict=True):
        assert_as_good_as(second, want, terms=2 * 5 * 8 * 13, inner=want.abs().max().item())


@pytest.mark.parametrize("backend", ALL)
def test_grd_1_the_second_derivative_through_a_layer_with_sinks(backend):
    made, x = layer(8, 2, sinks=True, backend=backend).double(), leaf(randn(2, 5, 8, seed=50), torch.float64)

    def penalty(tokens):
        (first,) = torch.autograd.grad(made(tokens, mask=Causal()).square().sum(), tokens, create_graph=True)
        return first.square().sum()

    torch.autograd.gradcheck(penalty, x)
    penalty(x).backward()
    assert all(
        p.grad.isfinite().all() and (p.grad != 0).any() for n, p in made.named_parameters() if n != "out_proj.bias"
    )


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("mask", MASKS)
def test_grd_2_forward_mode(mask, backend):
    """It was not implemented."""
    how, allowed = MASKS[mask]
    query, key, value = given()
    for place in range(3):

        def ours(x, place=place):
            tensors = [query, key, value]
            tensors[place] = x
            return attention(*tensors, backend=backend, **how)

        def theirs(x, place=place):
            tensors = [query, key, value]
            tensors[place] = x
            return oracle.attend(*tensors, allowed)[0]

        x, tangent = given()[place], torch.ones(2, 2, 5, 8, dtype=torch.float64)
        out, moved = torch.func.jvp(ours, (x,), (tangent,))
        # the oracle by reverse mode: column by column of the output, since it has no forward mode to trust
        leaf_x = leaf(x)
        want = theirs(leaf_x)
        cotangent = torch.zeros_like(want, requires_grad=True)
        (pulled,) = torch.autograd.grad(want, leaf_x, cotangent, create_graph=True)
        (pushed,) = torch.autograd.grad(pulled, cotangent, tangent)
        assert_as_good_as(out, want, terms=13)
        assert_as_good_as(moved, pushed, terms=13 * 8, inner=max(1.0, pushed.abs().max().item()))


def test_grd_2_the_backend_that_has_no_forward_mode_says_so():
    query, key, value = given()
    with pytest.raises(UnsupportedError, match=r"function transforms|no forward-mode derivative"):
        torch.func.jvp(lambda q: attention(q, key, value, backend="sdpa"), (query,), (torch.ones_like(query),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(query, torch.ones_like(query))
        for tensors in ((dual, key, value), (query, dual, value), (query, key, dual)):
            with pytest.raises(UnsupportedError, match="no forward-mode derivative"):
                attention(*tensors, backend="sdpa")
            moved = torch.autograd.forward_ad.unpack_dual(attention(*tensors)).tangent
            assert moved is not None and (moved != 0).any()


def mapped():
    return [randn(3, 2, 2, 5, 8, seed=i, dtype=torch.float64) for i in range(3)]


def booleans(*shape):
    mask = randn(*shape, seed=7) > 0
    mask[..., 0] = True
    return mask


FIXED = booleans(5, 5)
# How a function that is mapped over comes by its mask: name, the mask for sample i, and whether it is mapped as well.
SHARED = {
    "none": lambda mask: {},
    "shared": lambda mask: {"mask": Causal()},
    "shared tensor": lambda mask: {"mask": FIXED},
    "made inside": lambda mask: {"mask": torch.ones(5, 5, dtype=torch.bool).tril()},
    "made of numbers inside": lambda mask: {"mask": Causal() & Padding([2, 4])},
    "mapped": lambda mask: {"mask": mask},
    "mapped and joined": lambda mask: {"mask": Causal() & Dense(mask)},
    "mapped as a bias": lambda mask: {"score_mods": [Bias(mask.double())]},
    "mapped as lengths": lambda mask: {"mask": Padding(mask.sum((-1, -2))[..., 0])},
}


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("shared", SHARED)
def test_grd_3_vmap_is_the_loop(shared, backend):
    """With a mask it failed, or paired the masks wrongly."""
    tensors, masks = mapped(), booleans(3, 2, 1, 5, 5)
    if shared == "mapped as lengths":
        masks = masks.transpose(2, 4)  # (3, 2, 5, 5, 1): one length for each of the two rows

    def f(query, key, value, mask):
        return attention(query, key, value, backend=backend, **SHARED[shared](mask))

    got = torch.vmap(f)(*tensors, masks)
    want = torch.stack([f(*(t[i] for t in tensors), masks[i]) for i in range(3)])
    assert_as_good_as(got, want, terms=13)

    def loss(*given):
        return f(*given).square().sum()

    got = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*tensors, masks)
    for place in range(3):
        want = torch.stack([torch.func.grad(loss, argnums=place)(*(t[i] for t in tensors), masks[i]) for i in range(3)])
        assert_as_good_as(got[place], want, terms=13 * 8, inner=want.abs().max().item())
    one = torch.vmap(f, in_dims=(0, None, None, None))(tensors[0], tensors[1][0], tensors[2][0], masks[0])
    want = torch.stack([f(tensors[0][i], tensors[1][0], tensors[2][0], masks[0]) for i in range(3)])
    assert_as_good_as(one, want, terms=13)


def test_grd_3_the_backend_that_cannot_be_mapped_says_so():
    tensors = mapped()
    with pytest.raises(UnsupportedError, match="function transforms"):
        torch.vmap(lambda q, k, v: attention(q, k, v, backend="sdpa"))(*tensors)
    with pytest.raises(UnsupportedError, match="function transforms"):
        torch.func.grad(lambda q: attention(q, tensors[1][0], tensors[2][0], backend="sdpa").sum())(tensors[0][0])


@every_backend
def test_grd_4_strictly_causal_with_a_sink(backend):
    """A key of zeros beside a strictly causal mask "broke causality": a row then depends on its own query, no more.

    A key and value of zeros are a sink of 0.
    """
    mask, sinks = Causal() & ~Window(1), torch.zeros(2, dtype=torch.float64)
    tensors = [randn(1, 2, 4, 3, seed=i, dtype=torch.float64) for i in range(3)]

    def depends(place):
        """Which token's tensors each row depends on."""
        x = leaf(tensors[place])
        given = [*tensors]
        given[place] = x
        out = attention(*given, mask=mask, sinks=sinks, backend=backend)
        rows = [torch.autograd.grad(out[0, :, t].sum(), x, retain_graph=True)[0] for t in range(4)]
        return torch.stack([row[0].abs().sum((0, 2)) > 0 for row in rows])

    strictly = torch.ones(4, 4, dtype=torch.bool).tril(-1)
    assert torch.equal(depends(1), strictly) and torch.equal(depends(2), strictly)
    own = torch.eye(4, dtype=torch.bool)
    own[0] = False  # the first row sees nothing but the sink: it depends on nothing
    assert torch.equal(depends(0), own)
    out = attention(*tensors, mask=mask, sinks=sinks, backend=backend)
    assert (out[:, :, 0] == 0).all()
    with torch.no_grad():
        assert (attention_with_lse(*tensors, mask=mask, sinks=sinks, backend=backend)[1][:, :, 0] == 0).all()


@each_backend
@pytest.mark.parametrize("mask", ["no mask", "causal"])
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_grd_5_incoming_gradients_of_any_stride(kv_heads, mask, backend):
    """A transposed or expanded one was read as if it were contiguous."""
    query = randn(1, 2, 16, 8)
    key, value = randn(1, kv_heads, 16, 8, seed=1), randn(1, kv_heads, 16, 8, seed=2)
    how = {} if mask == "no mask" else {"mask": Causal()}
    allowed = None if mask == "no mask" else torch.ones(16, 16, dtype=torch.bool).tril()
    wide = randn(1, 2, 16, 16, seed=3, dtype=torch.float64)
    grads = {
        "transposed": randn(1, 2, 8, 16, seed=4, dtype=torch.float64).mT,
        "heads last": randn(1, 16, 8, 2, seed=5, dtype=torch.float64).permute(0, 3, 1, 2),
        "expanded": torch.ones((), dtype=torch.float64).expand(1, 2, 16, 8),
        "expanded rows": randn(1, 2, 1, 8, seed=6, dtype=torch.float64).expand(1, 2, 16, 8),
        "step of 2": wide[..., ::2],
        "offset": wide[..., 3:11],
    }
    for grad in grads.values():
        check(backend, query, key, value, allowed, grad=grad, **how)
