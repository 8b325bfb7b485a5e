"""torch.export: one file runs at every size, without the library, and equals the eager layer."""

import io
import warnings

import pytest
import torch
from helpers import assert_as_good_as, randn
from torch import nn
from torch.export import Dim

from headwise import (
    ALiBi,
    Bias,
    CacheError,
    Causal,
    Chunk,
    Document,
    DynamicCache,
    DynamicNTKSchedule,
    FixedCache,
    MultiHeadAttention,
    Not,
    Padding,
    PerHead,
    Prefix,
    RelativeBias,
    RotaryEmbedding,
    Softcap,
    StaticCache,
    UnsupportedError,
    Window,
)

pytestmark = [
    pytest.mark.plain,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
STRICT = pytest.mark.parametrize(
    "strict", (False, pytest.param(True, marks=pytest.mark.slow)), ids=("traced", "strict")
)
EMBED = 30
B, T, S = Dim("B", min=1), Dim("T", min=1), Dim("S", min=1)
# sizes that a file made at batch 2, T 7 and S 11 is run at: T < S, T = S, T > S, one token, one row
SIZES = ((2, 7, 11), (1, 5, 5), (3, 13, 4), (3, 1, 9), (1, 1, 1), (2, 17, 1), (1, 31, 37))


class Call(nn.Module):
    """A layer with the way it is called: x are its tokens, y those it looks at, n a length of each row."""

    def __init__(self, layer, call):
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, *given):
        return self.call(self.layer, *given)


def layer(**how):
    made = MultiHeadAttention(EMBED, 15, **{"head_dim": 4, "num_kv_heads": 3, **how})
    with torch.no_grad():
        for i, (name, parameter) in enumerate(made.named_parameters()):
            if name == "sinks" or name.endswith("bias"):
                parameter.copy_(randn(*parameter.shape, seed=300 + i))
    return made.eval()


ROTARY = {"rotary": RotaryEmbedding(4)}
CALLS = {
    "full": ({}, lambda f, x: f(x), "x"),
    "causal": ({"mask": Causal()}, lambda f, x: f(x), "x"),
    "causal, as many heads": ({"mask": Causal(), "num_kv_heads": 15}, lambda f, x: f(x), "x"),
    "window": ({"mask": Causal() & Window(4), **ROTARY}, lambda f, x: f(x), "x"),
    "unbatched": ({"mask": Causal()}, lambda f, x: f(x[0]), "x"),
    "padding": ({"mask": Causal(), **ROTARY}, lambda f, x, n: f(x, mask=Padding(n)), "xn"),
    "padding on the left": ({"mask": Causal()}, lambda f, x, n: f(x, mask=Padding(left=n)), "xn"),
    "padding as booleans": ({}, lambda f, x, p: f(x, mask=Padding(p)), "xp"),
    "documents": ({"mask": Causal()}, lambda f, x, i: f(x, mask=Document(i)), "xi"),
    "positions": ({"mask": Causal(), **ROTARY}, lambda f, x, i: f(x, positions=i), "xi"),
    "axes": (
        {"mask": Causal(), "rotary": RotaryEmbedding(4, sections=(1, 1))},
        lambda f, x, i: f(x, positions=torch.stack([i, 2 * i])),
        "xi",
    ),
    "rotary that follows the length": (
        {"mask": Causal(), "rotary": RotaryEmbedding(4, schedule=DynamicNTKSchedule(2.0, 6))},
        lambda f, x: f(x),
        "x",
    ),
    "cross": ({}, lambda f, x, y: f(x, y), "xy"),
    "cross, causal": ({"mask": Causal(), **ROTARY}, lambda f, x, y: f(x, y), "xy"),
    "cross, window": ({"mask": Causal() & Window(4)}, lambda f, x, y: f(x, y), "xy"),
    "cross, padding": ({"v_head_dim": 7}, lambda f, x, y, m: f(x, y, mask=Padding(m)), "xym"),
    "cross, fixed": ({}, lambda f, x, y: f(x, y, cache=FixedCache()), "xy"),
    "sinks": ({"mask": Causal(), "sinks": True}, lambda f, x, y: f(x, y), "xy"),
    "alibi": ({"mask": Causal(), "score_mods": [ALiBi(15)]}, lambda f, x, y: f(x, y), "xy"),
    "relative bias": ({"score_mods": [RelativeBias(15)]}, lambda f, x, y: f(x, y), "xy"),
    "softcap": ({"mask": Causal(), "score_mods": [Softcap(2.0)]}, lambda f, x, y: f(x, y), "xy"),
    "bias": ({"mask": Causal()}, lambda f, x, b: f(x, score_mods=[Bias(b)]), "xb"),
    "booleans": ({}, lambda f, x, a: f(x, mask=a), "xa"),
    "prefix": ({"mask": Causal() | Prefix(3)}, lambda f, x, y: f(x, y), "xy"),
    "chunk": ({"mask": Chunk(3)}, lambda f, x, y: f(x, y), "xy"),
    "not": ({}, lambda f, x, y: f(x, y, mask=Not(Window(2))), "xy"),
    "a mask for each head": ({"mask": PerHead((Causal(), Window(2), ~Window(1)) * 5)}, lambda f, x, y: f(x, y), "xy"),
    "norms": (
        {"q_norm": nn.RMSNorm(4), "k_norm": nn.RMSNorm(4), "rotate_first": True, **ROTARY},
        lambda f, x: f(x),
        "x",
    ),
    "reference": ({"mask": Causal(), "backend": "reference"}, lambda f, x, y: f(x, y), "xy"),
}
# the others take minutes, and run with the slow tests
FIRST = (
    "window", "padding", "unbatched", "cross, causal", "cross, padding", "sinks", "alibi", "bias", "not",
)  # fmt: skip
DIMS = {
    "x": {0: B, 1: T},
    "y": {0: B, 1: S},
    "n": {0: B},
    "m": {0: B},
    "p": {0: B, 1: T},
    "i": {0: B, 1: T},
    "a": {2: T, 3: T},
    "b": {2: T, 3: T},
}


def inputs(letters, batch=2, rows=7, slots=11):
    made = torch.Generator().manual_seed(batch + 10 * rows + 1000 * slots)
    square = torch.rand(1, 1, rows, rows, generator=made)
    given = {
        "x": randn(batch, rows, EMBED, seed=301),
        "y": randn(batch, slots, EMBED, seed=302),
        "n": torch.randint(0, rows + 1, (batch,), generator=made),
        "m": torch.randint(0, slots + 1, (batch,), generator=made),
        "p": torch.rand(batch, rows, generator=made) > 0.4,
        "i": torch.randint(0, 3, (batch, rows), generator=made).cumsum(1),
        "a": square > 0.4,
        "b": square.where(square > 0.2, -torch.inf),
    }
    return tuple(given[letter] for letter in letters)


def saved(module, given, dims, strict, grad=False):
    """What is read back from the file that a module is exported to."""
    torch._dynamo.reset()
    with warnings.catch_warnings(), torch.set_grad_enabled(grad):
        warnings.filterwarnings("ignore", module="torch")
        program = torch.export.export(module, given, dynamic_shapes=dims, strict=strict)
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        return torch.export.load(file).module()


def close(got, want, what=""):
    assert_as_good_as(got, want.double(), want, terms=64, inner=want.abs().max().item(), what=what)


@pytest.mark.parametrize(
    "call, strict",
    [
        pytest.param(call, strict, id=f"{call}{', strict' if strict else ''}", marks=[pytest.mark.slow] * slow)
        for call in CALLS
        for strict, slow in ((False, call not in FIRST), (True, call not in ("padding", "cross, causal")))
    ],
)
def test_one_file_runs_at_every_size(call, strict):
    how, run, letters = CALLS[call]
    module = Call(layer(**how), run)
    if call == "unbatched":
        dims = ({1: T},)
        sizes = tuple((1, rows, slots) for _, rows, slots in SIZES)
    else:
        dims, sizes = tuple(DIMS[letter] for letter in letters), SIZES
    given = inputs(letters, *sizes[0])
    file = saved(module, given, (dims,), strict)
    with torch.no_grad():
        for size in sizes:
            given = inputs(letters, *size)
            close(file(*given), module(*given), f"{call} at {size}")


@STRICT
def test_a_file_that_is_trained(strict):
    module = Call(layer(mask=Causal() & Window(4), **ROTARY), lambda f, x, n: f(x, mask=Padding(n)))
    file = saved(module, inputs("xn"), ((DIMS["x"], DIMS["n"]),), strict, grad=True)
    for size in SIZES:
        given = inputs("xn", *size)
        grads = [
            torch.autograd.grad(run(*given).square().sum(), list(run.parameters()), allow_unused=True)
            for run in (module, file)
        ]
        for name, want, got in zip(dict(module.named_parameters()), *grads, strict=True):
            assert_as_good_as(got, want.double(), want, terms=64 * 37, inner=want.abs().max().item(), what=name)


@STRICT
def test_sizes_that_are_known_cost_no_mask(strict):
    """Where nothing is hidden, or self-attention is causal, the file holds no mask of T times S."""
    for how, run, letters in ({}, lambda f, x, y: f(x, y), "xy"), ({"mask": Causal()}, lambda f, x: f(x), "x"):
        module = Call(layer(**how), run)
        torch._dynamo.reset()
        program = torch.export.export(
            module, inputs(letters), dynamic_shapes=(tuple(DIMS[letter] for letter in letters),), strict=strict
        )
        ops = [node for node in program.graph.nodes if node.op == "call_function"]
        (call,) = [node for node in ops if node.target is torch.ops.aten.scaled_dot_product_attention.default]
        assert len(call.args) < 4 or call.args[3] is None
        assert not [node for node in ops if "masked_fill" in str(node.target)]


def test_the_numbers_of_a_mask_are_constants_of_the_file():
    made = layer()
    files = {
        size: saved(Call(made, lambda f, x, size=size: f(x, mask=Window(size))), inputs("x"), ((DIMS["x"],),), False)
        for size in (2, 3)
    }
    (x,) = inputs("x", 2, 13)
    for size, file in files.items():
        close(file(x), made(x, mask=Window(size)).detach())
    assert not files[2](x).equal(files[3](x))


# --- caches: the file is given what is stored, and returns it

STEP = {"mask": Causal() & Window(9), **ROTARY}


class Step(nn.Module):
    """One step of a generation in a file: a static cache is three tensors."""

    def __init__(self, made):
        super().__init__()
        self.layer = made

    def forward(self, x, key, value, lengths):
        cache = StaticCache(key.shape[2])
        cache.stored, cache.length, cache.lengths = {"key": key, "value": value}, key.shape[2], lengths
        y = self.layer(x, cache=cache)
        return y, cache.stored["key"], cache.stored["value"], cache.lengths


class Holding(nn.Module):
    """The same with the tensors as buffers of the file."""

    def __init__(self, made, batch):
        super().__init__()
        self.layer = made
        self.register_buffer("key", torch.zeros(batch, 3, 32, 4))
        self.register_buffer("value", torch.zeros(batch, 3, 32, 4))
        self.register_buffer("lengths", torch.zeros(batch, dtype=torch.int64))

    def forward(self, x):
        y, _, _, lengths = Step.forward(self, x, self.key, self.value, self.lengths)
        self.lengths.copy_(lengths)
        return y


class Growing(nn.Module):
    """A dynamic cache is two tensors that the step makes longer."""

    def __init__(self, made):
        super().__init__()
        self.layer = made

    def forward(self, x, key, value):
        cache = DynamicCache()
        cache.stored, cache.length = {"key": key, "value": value}, key.shape[2]
        return self.layer(x, cache=cache), cache.stored["key"], cache.stored["value"]


@STRICT
@pytest.mark.parametrize("rows", (1, 5), ids=("one token", "any number"))
def test_a_static_cache_as_tensors(rows, strict):
    made = layer(**STEP)
    empty = [torch.zeros(2, 3, 32, 4), torch.zeros(2, 3, 32, 4), torch.zeros(2, dtype=torch.int64)]
    dims = ({0: B} if rows == 1 else {0: B, 1: T}, {0: B}, {0: B}, {0: B})
    file = saved(Step(made), (randn(2, rows, EMBED, seed=303), *(t.clone() for t in empty)), dims, strict)
    for batch in (1, 3):
        x = randn(batch, 29, EMBED, seed=304)
        state, ys = [t[:1].expand(batch, *t.shape[1:]).clone() for t in empty], []
        with torch.no_grad():
            for part in x.split((1,) * 29 if rows == 1 else (7, 1, 11, 1, 2, 7), 1):
                y, *state = file(part, *state)
                ys.append(y)
            close(torch.cat(ys, 1), made(x))
        assert state[2].tolist() == [29] * batch


@STRICT
def test_a_static_cache_as_buffers(strict):
    made = layer(**STEP)
    file = saved(Holding(made, 2), (randn(2, 5, EMBED, seed=305),), ({1: T},), strict)
    x = randn(2, 29, EMBED, seed=306)
    with torch.no_grad():
        close(torch.cat([file(part) for part in x.split((7, 1, 11, 1, 2, 7), 1)], 1), made(x))


@STRICT
def test_a_dynamic_cache_as_tensors(strict):
    made = layer(**STEP)
    P = Dim("P", min=1)
    given = (randn(2, 5, EMBED, seed=307), randn(2, 3, 7, 4, seed=308), randn(2, 3, 7, 4, seed=309))
    file = saved(Growing(made), given, ({0: B, 1: T}, {0: B, 2: P}, {0: B, 2: P}), strict)
    x = randn(3, 29, EMBED, seed=310)
    with torch.no_grad():
        cache = DynamicCache()
        ys = [made(x[:, :1], cache=cache)]
        state = [cache.stored[name][..., :1, :].clone() for name in ("key", "value")]
        for part in x[:, 1:].split((6, 1, 11, 1, 2, 7), 1):
            y, *state = file(part, *state)
            ys.append(y)
        close(torch.cat(ys, 1), made(x))


def test_a_cache_that_is_held_is_refused():
    """The file would hold it as it was at export, and forget every token without a word."""

    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.cache = layer(**STEP), StaticCache(9)

        def forward(self, x):
            return self.layer(x, cache=self.cache)

    with pytest.raises(CacheError, match="make a cache in forward"):
        torch.export.export(Held(), inputs("x"))
    with pytest.raises(Exception, match="StaticCache"):  # nor is it an input: torch names the type
        torch.export.export(Step(layer()), (*inputs("x"), StaticCache(9), None, None))


def test_sinks_are_no_kernel_of_the_cpu():
    """torch's kernel that gives the log-sum-exp is one of the CPU: in a file, the reference's formula stands."""
    module = Call(layer(mask=Causal(), sinks=True), lambda f, x: f(x))
    program = torch.export.export(module, inputs("x"))
    assert not [node for node in program.graph.nodes if "for_cpu" in str(node.target)]
    module.layer.backend = "sdpa"
    with pytest.raises(UnsupportedError, match="an exported file runs anywhere"):
        torch.export.export(module, inputs("x"))
