"""What the tests of public bug reports share: every backend, every mode, the counting probe, a layer's own formula.

Counting probe: queries of zeros give every key that may be seen the same weight, and value j is j, so a row must be
the mean index of the keys it sees. Whatever is wrong with a mask shows as a wrong rational number.
"""

import contextlib
import copy

import oracle
import pytest
import torch
from cases import BACKEND_NAMES
from helpers import assert_as_good_as, leaf, plain_attention, randn

from headwise import (
    Causal,
    DynamicCache,
    KVCache,
    MultiHeadAttention,
    Positions,
    RollingCache,
    StaticCache,
    Window,
    attention,
)

ALL = ("auto", *BACKEND_NAMES)
MODES = ("train", "eval", "no_grad", "inference_mode")
every_backend = pytest.mark.parametrize("backend", ALL)
each_backend = pytest.mark.parametrize("backend", BACKEND_NAMES)  # where "auto" is one of them and nothing else
with_and_without_gradients = pytest.mark.parametrize("mode", ("train", "no_grad"))
every_mode = pytest.mark.parametrize("mode", MODES)


@contextlib.contextmanager
def running(mode, layer=None):
    """The mode of a call, and of the layer where there is one."""
    if layer is not None:
        layer.train(mode == "train")
    off = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(mode, contextlib.nullcontext)
    with off():
        yield


def probe(rows, slots, *, batch=1, heads=2, kv_heads=1, grad=False, **how):
    """The mean index of the keys that each query sees, "B H T"."""
    query = torch.zeros(batch, heads, rows, 3, requires_grad=grad)
    key = randn(batch, kv_heads, slots, 3, seed=1)
    value = torch.arange(float(slots))[:, None].expand(batch, kv_heads, slots, 1)
    return attention(query, key, value, **how)[..., 0]


def assert_probe(got, want, slots=None):
    """Compare with the mean indices, which hold for every sequence and head unless given for each."""
    want = torch.as_tensor(want, dtype=torch.float64)
    want = want.expand(got.shape) if want.dim() < 2 else want
    assert_as_good_as(got, want, terms=slots or got.shape[-1])


def check(backend, query, key, value, allowed=None, *, same=None, grad=None, **how):
    """Output and gradients of a call against the oracle: in float32 the output, in float64 everything.

    ``same`` is what the oracle needs to compute the same; ``how`` goes to ``attention``.
    """
    same = {} if same is None else same
    terms = query.shape[-1] + key.shape[-2]
    given = [t.detach() for t in (query, key, value)]
    want = oracle.attend(*given, allowed, **same)[0]
    plain = plain_attention(*(t.float() for t in given), allowed, **_narrow(same))[0]
    with torch.no_grad():
        got = attention(*given, backend=backend, **how)
    assert_as_good_as(got, want, plain, terms=terms, what="without gradients")

    ours, theirs = ([leaf(t, torch.float64) for t in given] for _ in range(2))
    out = attention(*ours, backend=backend, **how)
    want = oracle.attend(*theirs, allowed, **same)[0]
    assert_as_good_as(out, want, terms=terms, what="with gradients")
    grad = randn(*out.shape, seed=9, dtype=torch.float64) if grad is None else grad
    out.backward(grad)
    want.backward(grad)
    size = max([0.0, *(t.grad.abs().max().item() for t in theirs if t.grad is not None and t.numel())])
    for name, a, b in zip(("query", "key", "value"), ours, theirs, strict=True):
        wanted = torch.zeros_like(b) if b.grad is None else b.grad
        terms = query.shape[-2] * query.shape[1] + value.shape[-1] + key.shape[-2]
        assert_as_good_as(a.grad, wanted, terms=terms, inner=size, what=f"gradient of {name}")


def _narrow(same):
    """The oracle's keywords for the plain formula, which takes a bias and a cap as one modification."""
    same = dict(same)
    bias, cap = same.pop("bias", None), same.pop("softcap", None)
    if bias is not None or cap is not None:

        def modify(scores):
            scores = scores if cap is None else cap * torch.tanh(scores / cap)
            return scores if bias is None else scores + bias.float()

        same["modify"] = modify
    return same


def layer(embed_dim, num_heads, *, seed=0, **how):
    """A layer with random weights, biases included."""
    made = MultiHeadAttention(embed_dim, num_heads, **how)
    with torch.no_grad():
        for i, parameter in enumerate(made.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=seed + i, scale=parameter.shape[-1] ** -0.5))
    return made


def formula(made, attend, query, key=None, value=None, allowed=None, **same):
    """A layer's output and weights with ``attend`` at its centre."""
    key = query if key is None else key
    value = key if value is None else value

    def heads(x, projection, count):
        return projection(x).unflatten(-1, (count, -1)).transpose(1, 2)

    q, k = heads(query, made.q_proj, made.num_heads), heads(key, made.k_proj, made.num_kv_heads)
    out, weights, _ = attend(q, k, heads(value, made.v_proj, made.num_kv_heads), allowed, **same)
    return made.out_proj(out.transpose(1, 2).flatten(2)), weights


def check_layer(made, got, query, key=None, value=None, allowed=None, **same):
    """Compare a layer's output with its formula in float64."""
    given = [None if t is None else t.detach() for t in (query, key, value)]
    exact = copy.deepcopy(made).double()
    want = formula(exact, oracle.attend, *(t if t is None else t.double() for t in given), allowed, **same)[0]
    plain = formula(
        copy.deepcopy(made).float(),
        plain_attention,
        *(t if t is None else t.float() for t in given),
        allowed,
        **_narrow(same),
    )[0]
    assert_as_good_as(got, want, plain, terms=3 * query.shape[-1] + got.shape[-2])


def counter(mask=None, **how):
    """A layer that is the counting probe: token j is the number j, and all scores are 0."""
    made = MultiHeadAttention(1, 1, bias=False, **({} if mask is None else {"mask": mask}), **how)
    with torch.no_grad():
        for projection, weight in ((made.q_proj, 0.0), (made.k_proj, 1.0), (made.v_proj, 1.0), (made.out_proj, 1.0)):
            projection.weight.fill_(weight)
    return made


CACHES = {"dynamic": DynamicCache, "static": lambda: StaticCache(16), "rolling": lambda: RollingCache(16)}
PAST = Causal() & Window(16)  # no test has more tokens, and a cache that forgets demands a window
every_cache = pytest.mark.parametrize("cache", CACHES)


class Grows(KVCache):
    """A cache of one's own: keeps what it is given, and returns all of it."""

    def __init__(self):
        self.count, self.key, self.value = 0, None, None

    def next_positions(self, count):
        return Positions(count, start=self.count)

    def append(self, key, value, positions, lengths=None):
        if self.count:
            key, value = torch.cat([self.key, key], 2), torch.cat([self.value, value], 2)
        self.key, self.value, self.count = key, value, key.shape[2]
        return key, value, Positions(self.count)


class Buffer(KVCache):
    """Another, a buffer of fixed size, which it returns whole: slots without a token hold NaN."""

    def __init__(self, size):
        self.count, self.size, self.key, self.value = 0, size, None, None

    def next_positions(self, count):
        return Positions(count, start=self.count)

    def append(self, key, value, positions, lengths=None):
        if self.key is None:
            self.key, self.value = (torch.full((*t.shape[:2], self.size, t.shape[3]), torch.nan) for t in (key, value))
        self.key, self.value = self.key.clone(), self.value.clone()
        stop = self.count + key.shape[2]
        self.key[:, :, self.count : stop], self.value[:, :, self.count : stop] = key, value
        self.count = stop
        return self.key, self.value, Positions(self.size)


ALL_CACHES = CACHES | {"grows": Grows, "buffer": lambda: Buffer(19)}
