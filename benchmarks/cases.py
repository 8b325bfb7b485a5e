"""The workloads: what is computed, at which sizes, under which mask, in which dtype.

A case knows its name, its inputs and how much work it is; who computes it, and how, is for competitors.py. A
new case is a line in ``_first``, ``_cpu`` or ``_gpu_sized``, a new mask a line in MASKS.

B batch   H query heads      T query tokens   D head dimension   E embedding
          K key/value heads  S key tokens
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import product

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from headwise import (
    ALiBi,
    Bias,
    Causal,
    Document,
    Full,
    Mask,
    Padding,
    Positions,
    Prefix,
    RelativeBias,
    Softcap,
    Window,
)
from headwise.algebra import evaluate
from headwise.score_mods import ScoreMod

MASKS: dict[str, Callable[[int, int], Mask]] = {  # from the batch size and the number of keys
    "full": lambda batch, slots: Full(),
    "causal": lambda batch, slots: Causal(),
    "window128": lambda batch, slots: Causal() & Window(128),
    "window3": lambda batch, slots: Causal() & Window(3),
    "padded": lambda batch, slots: Padding(half_empty(batch, slots)),
    "ragged": lambda batch, slots: Padding(ragged(batch, slots)),
    "packed8": lambda batch, slots: Causal() & Document.from_lengths(equal_parts(slots, 8)),
    "prefix256": lambda batch, slots: Causal() | Prefix(256),
}
CAP = 3.0  # so that scores of this size are changed
DROPPED = 0.1
# From the number of heads. Beside them there are "sinks", "dropout", and "bias", a dense one that is trained.
MODS: dict[str, Callable[[int], ScoreMod]] = {
    "softcap": lambda heads: Softcap(CAP),
    "alibi": ALiBi,
    "t5": lambda heads: t5_bias(heads),  # noqa: PLW0108
}


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One call of attention on heads that exist already.

    Args:
        batch: Sequences B.
        heads: Query heads H.
        rows: Query tokens T; 1 makes it a step of decoding.
        head_dim: Size D of a head.
        kv_heads: Key and value heads K; None means H.
        slots: Key tokens S; None means T.
        mask: Its name in MASKS.
        mod: What else is done: a name in MODS, "sinks", "dropout" or "bias"; "" for nothing.
        dtype: Of all inputs, by its name in torch.
        backward: Whether the gradients of queries, keys and values are part of the work.
    """

    batch: int
    heads: int
    rows: int
    head_dim: int
    kv_heads: int | None = None
    slots: int | None = None
    mask: str = "full"
    mod: str = ""
    dtype: str = "float32"
    backward: bool = False

    level = "attention"

    @property
    def name(self) -> str:
        """Kind, mask, sizes B×H×T×D, dtype and direction."""
        sizes = f"{self.batch}x{self.heads}x{self.rows}x{self.head_dim}"
        if self.kv_heads is not None or self.slots is not None:
            sizes += f"-k{self.kv_heads or self.heads}-s{self.slots or self.rows}"
        kind = "decode" if self.rows == 1 else self.level
        scores = f"{self.mask}+{self.mod}" if self.mod else self.mask
        return f"{kind}/{scores}/{sizes}/{self.dtype}/{_direction(self)}"

    def problem(self, device: torch.device | str = "cpu") -> "Problem":
        """Inputs by a fixed seed: query, key, value; and the gradient of the output."""
        slots, kv_heads = self.slots or self.rows, self.kv_heads or self.heads
        query = (self.batch, self.heads, self.rows, self.head_dim)
        key = (self.batch, kv_heads, slots, self.head_dim)
        *inputs, grad = _normal(query, key, key, query)
        return _problem(self, inputs, grad, (self.batch, self.heads, self.rows, slots), device)

    def work(self, pairs: int) -> int:
        """Useful floating point operations: two products of matrices, on the pairs that may attend.

        With the gradients three times as many: four more products. That a backward pass computes the weights
        again is not useful work.
        """
        return (3 if self.backward else 1) * 4 * pairs * self.head_dim

    @property
    def terms(self) -> int:
        """Terms in the longest sum behind one number of the result."""
        group = self.heads // (self.kv_heads or self.heads)
        return max(self.slots or self.rows, self.head_dim, group * self.rows if self.backward else 0)


@dataclass(frozen=True, kw_only=True)
class Module:
    """Self-attention with its projections, which all have a bias.

    Args:
        batch: Sequences B.
        rows: Tokens T.
        embed_dim: Size E of a token.
        heads: Heads H.
        mask: Its name in MASKS.
        dtype: Of tokens and weights, by its name in torch.
        backward: Whether the gradients of tokens and weights are part of the work.
    """

    batch: int
    rows: int
    embed_dim: int
    heads: int
    mask: str = "full"
    dtype: str = "float32"
    backward: bool = False

    level = "module"
    mod = ""

    @property
    def name(self) -> str:
        """Kind, mask, sizes B×T×E and number of heads, dtype and direction."""
        sizes = f"{self.batch}x{self.rows}x{self.embed_dim}-h{self.heads}"
        return f"{self.level}/{self.mask}/{sizes}/{self.dtype}/{_direction(self)}"

    def problem(self, device: torch.device | str = "cpu") -> "Problem":
        """Inputs by a fixed seed: tokens, packed projections (query, key, value), output projection."""
        tokens, embed = (self.batch, self.rows, self.embed_dim), self.embed_dim
        *inputs, grad = _normal(tokens, (3 * embed, embed), (3 * embed,), (embed, embed), (embed,), tokens)
        for weight in (inputs[1], inputs[3]):
            weight *= embed**-0.5  # projected tokens are as large as tokens
        return _problem(self, inputs, grad, (self.batch, self.heads, self.rows, self.rows), device)

    def work(self, pairs: int) -> int:
        """Useful floating point operations: as in attention, and four projections."""
        projections = 4 * 2 * self.batch * self.rows * self.embed_dim**2
        return (3 if self.backward else 1) * (4 * pairs * (self.embed_dim // self.heads) + projections)

    @property
    def terms(self) -> int:
        """Terms in the longest sum behind one number of the result."""
        return max(self.rows * (self.batch if self.backward else 1), self.embed_dim)


Case = Attention | Module


@dataclass(frozen=True, eq=False)
class Problem:
    """A case with its numbers.

    Args:
        case: What it is.
        inputs: What goes in, in the dtype of the case; leaves of autograd where gradients are asked for.
        grad: Gradient of the output.
        mask: The mask, on the device of the inputs.
        scores: The four sizes B, H, T, S of the scores.
    """

    case: Case
    inputs: list[Float[Tensor, "..."]]
    grad: Float[Tensor, "..."]
    mask: Mask
    scores: tuple[int, int, int, int]

    @cached_property
    def score_mods(self) -> tuple[ScoreMod, ...]:
        """What is done to the scores before the mask."""
        if self.bias is not None:
            return (Bias(self.bias),)
        made = MODS.get(self.case.mod)
        return () if made is None else (made(self.scores[1]).to(self.device),)

    @cached_property
    def bias(self) -> nn.Parameter | None:
        """A dense bias for each head that is trained, in the dtype of the inputs; or None."""
        if self.case.mod != "bias":
            return None
        made = _normal((1, *self.scores[1:]))[0].to(self.device, self.grad.dtype)
        return nn.Parameter(made, requires_grad=self.case.backward)

    @property
    def dropout_p(self) -> float:
        """Probability that a weight is dropped."""
        return DROPPED if self.case.mod == "dropout" else 0.0

    @property
    def sure(self) -> "Problem":
        """The same without chance, for the check: where weights are dropped no two results are equal."""
        return replace(self, case=replace(self.case, mod="")) if self.dropout_p else self

    @cached_property
    def sinks(self) -> Float[Tensor, " H"] | None:
        """An extra logit a head, or None."""
        return _normal((self.scores[1],))[0].to(self.device) if self.case.mod == "sinks" else None

    def modified(self, scores: Float[Tensor, "#B h T S"], first: int = 0) -> Float[Tensor, "#B h T S"]:
        """The scores, modified; of the heads from ``first`` on."""
        rows, slots = self.scores[2:]
        sizes = (scores.shape[0], scores.shape[1], rows, slots)
        b, h, q, k = (
            torch.arange(n, device=scores.device).view([-1 if i == j else 1 for j in range(4)])
            for i, n in enumerate(sizes)
        )
        for mod in self.score_mods:
            scores = mod(scores, b, h + first, q + slots - rows, k)
        return scores

    @property
    def device(self) -> torch.device:
        """Where the inputs are."""
        return self.grad.device

    @cached_property
    def allowed(self) -> Bool[Tensor, "#B #H T S"]:
        """The mask, evaluated."""
        batch, heads, rows, slots = self.scores
        queries, keys = Positions(rows, start=slots - rows), Positions(slots)
        return evaluate(self.mask.bind(batch, heads, queries, keys), batch, heads, queries, keys, device=self.device)

    @cached_property
    def pairs(self) -> int:
        """Pairs of a query and a key that may attend, over the whole batch and all heads."""
        batch, heads, rows, slots = self.scores
        queries, keys = Positions(rows, start=slots - rows), Positions(slots)
        spans = self.mask.bind(batch, heads, queries, keys).spans(queries, keys)
        if spans is None:
            return int(self.allowed.expand(self.scores).sum())
        return int(spans.work().expand(batch, heads).sum())

    @property
    def work(self) -> int:
        """Useful floating point operations under the mask."""
        return self.case.work(self.pairs)

    @property
    def traffic(self) -> int:
        """Bytes that have to move at least: each input and each output once.

        The gradients add that of the output and those of the inputs, and read inputs and output again.
        """
        once = sum(t.nbytes for t in self.inputs) + self.grad.nbytes
        return 3 * once if self.case.backward else once


def half_empty(batch: int, slots: int) -> Tensor:
    """Lengths that spread evenly and fill half of the batch: 1/16, 3/16, … 15/16 for eight rows."""
    return torch.tensor([max(1, slots * (2 * row + 1) // (2 * batch)) for row in range(batch)])


def ragged(batch: int, slots: int) -> Tensor:
    """Lengths that grow evenly from 1 to all slots, as in a batch of conversations of any age."""
    return torch.linspace(1, slots, batch).round().long()


def equal_parts(slots: int, parts: int) -> list[int]:
    """Lengths of documents that fill the slots, equal but for a rest of one."""
    return [slots * (part + 1) // parts - slots * part // parts for part in range(parts)]


def t5_bias(heads: int) -> RelativeBias:
    """The bias of a decoder of T5, with a table of fixed numbers."""
    bias = RelativeBias(heads, bidirectional=False).requires_grad_(False)
    bias.table.copy_(_normal(tuple(bias.table.shape))[0])
    return bias


def select(glob: str, quick: bool = False, suite: str = "cpu") -> list[Case]:
    """The cases of a suite whose name matches; with ``quick`` the tiny ones, which only show that everything runs."""
    return [case for case in SUITES[suite][quick] if fnmatchcase(case.name, glob)]


def _direction(case: Case) -> str:
    return "forward+backward" if case.backward else "forward"


def _normal(*shapes: tuple[int, ...]) -> list[Tensor]:
    made = torch.Generator().manual_seed(20171206)
    return [torch.randn(shape, generator=made) for shape in shapes]


def _problem(
    case: Case,
    inputs: list[Tensor],
    grad: Tensor,
    scores: tuple[int, int, int, int],
    device: torch.device | str,
) -> Problem:
    dtype = getattr(torch, case.dtype)
    # rounded first: the numbers are the same on every device
    inputs = [t.to(dtype).to(device).requires_grad_(case.backward) for t in inputs]
    return Problem(case, inputs, grad.to(dtype).to(device), MASKS[case.mask](scores[0], scores[3]).to(device), scores)


def _first() -> Iterator[Case]:
    wide: list[dict] = [{"dtype": "float32"}, {"dtype": "float32", "backward": True}]
    both: list[dict] = [*wide, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "backward": True}]
    sizes = [(8, 12, 128, 64), (32, 12, 33, 32), (1, 12, 512, 64), (2, 12, 1024, 64)]
    for (batch, heads, rows, dim), mask, how in product(sizes, ("full", "causal"), both):
        yield Attention(batch=batch, heads=heads, rows=rows, head_dim=dim, mask=mask, **how)
    for how in both:
        yield Attention(batch=2, heads=12, rows=1024, head_dim=64, mask="window128", **how)
        yield Attention(batch=8, heads=12, rows=128, head_dim=64, mask="padded", **how)
    for dtype in ("float32", "bfloat16"):
        # a batch of four, so that the keys and values are more than a processor's cache holds
        yield Attention(batch=4, heads=32, rows=1, head_dim=128, kv_heads=8, slots=4096, dtype=dtype)
    for (batch, rows, embed), how in product([(1, 16, 384), (8, 128, 384), (4, 512, 768)], wide):
        yield Module(batch=batch, rows=rows, embed_dim=embed, heads=12, **how)
    yield Module(batch=8, rows=128, embed_dim=384, heads=12, mask="causal")
    yield Module(batch=8, rows=128, embed_dim=384, heads=12, dtype="bfloat16")


def _cpu() -> Iterator[Case]:
    """Sizes and kinds of calls at which a kernel for the CPU shows what it is worth."""
    half: list[dict] = [{"dtype": "float32"}, {"dtype": "bfloat16"}]
    for how in half:
        for (heads, rows, dim), mask in product([(8, 4096, 64), (8, 2048, 128)], ("full", "causal")):
            yield Attention(batch=1, heads=heads, rows=rows, head_dim=dim, mask=mask, **how)
        yield Attention(batch=1, heads=8, rows=4096, head_dim=64, mask="window128", **how)
        for slots in (4096, 32768):
            yield Attention(batch=1, heads=32, rows=1, head_dim=128, kv_heads=8, slots=slots, **how)
        yield Attention(batch=8, heads=12, rows=1, head_dim=64, slots=1024, **how)
    ragged: dict = {"mask": "ragged", "dtype": "bfloat16"}
    yield Attention(batch=16, heads=32, rows=1, head_dim=128, kv_heads=8, slots=4096, **ragged)
    yield Attention(batch=8, heads=12, rows=512, head_dim=64, mask="padded")
    yield Attention(batch=1, heads=12, rows=4096, head_dim=64, mask="packed8")
    yield Attention(batch=2, heads=12, rows=1024, head_dim=64, mask="prefix256")
    for mod, how in product((*MODS, "sinks"), half):
        yield Attention(batch=2, heads=12, rows=1024, head_dim=64, mask="causal", mod=mod, **how)
    for mask in ("full", "causal"):
        yield Attention(batch=1, heads=4, rows=8, head_dim=32, mask=mask)  # little but the call itself
    for how in half:
        yield Module(batch=1, rows=2048, embed_dim=768, heads=12, **how)
    for batch, rows, embed in [(1, 16, 384), (4, 512, 768)]:
        yield Module(batch=batch, rows=rows, embed_dim=embed, heads=12, dtype="bfloat16")
    trained: list[dict] = [how | {"backward": True} for how in half]
    for (batch, rows), mod, how in product([(8, 128), (2, 1024)], ("dropout", "bias"), trained):
        yield Attention(batch=batch, heads=12, rows=rows, head_dim=64, mod=mod, **how)
    for mod in (*MODS, "sinks"):
        yield Attention(batch=2, heads=12, rows=1024, head_dim=64, mask="causal", mod=mod, backward=True)
    for (rows, dim), mask, how in product([(4096, 64), (2048, 128)], ("full", "causal"), trained):
        yield Attention(batch=1, heads=8, rows=rows, head_dim=dim, mask=mask, **how)
    for (batch, heads, rows), mask in [
        ((1, 8, 4096), "window128"),
        ((8, 12, 512), "padded"),
        ((1, 12, 4096), "packed8"),
    ]:
        yield Attention(batch=batch, heads=heads, rows=rows, head_dim=64, mask=mask, backward=True)
    for batch, rows, embed in [(1, 16, 384), (8, 128, 384), (4, 512, 768), (1, 2048, 768)]:
        yield Module(batch=batch, rows=rows, embed_dim=embed, heads=12, dtype="bfloat16", backward=True)
    yield Module(batch=1, rows=2048, embed_dim=768, heads=12, backward=True)


def _gpu() -> Iterator[Case]:
    """Sizes that fill a GPU, and the first cases in bfloat16, with and without gradients."""
    yield from GPU_SIZED
    for case in _first():
        if case.dtype == "bfloat16":
            yield case
    half: list[dict] = [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "backward": True}]
    for (batch, rows, embed), how in product([(1, 16, 384), (8, 128, 384), (4, 512, 768)], half):
        module = Module(batch=batch, rows=rows, embed_dim=embed, heads=12, **how)
        if module not in _first():
            yield module


def _gpu_sized() -> Iterator[Case]:
    half: list[dict] = [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "backward": True}]
    for mask, how in product(("full", "causal", "window128"), half):
        yield Attention(batch=4, heads=16, rows=2048, head_dim=64, mask=mask, **how)
    for how in half:
        yield Attention(batch=1, heads=32, rows=8192, head_dim=128, mask="causal", **how)
        yield Attention(batch=2, heads=32, rows=2048, head_dim=128, kv_heads=8, mask="causal", **how)
    yield Attention(batch=1, heads=32, rows=1, head_dim=128, kv_heads=8, slots=32768, dtype="bfloat16")


CASES: tuple[Case, ...] = (*_first(), *_cpu())
GPU_SIZED: tuple[Case, ...] = tuple(_gpu_sized())
QUICK: tuple[Case, ...] = (
    Attention(batch=2, heads=3, rows=7, head_dim=5),
    Attention(batch=2, heads=3, rows=11, head_dim=5, mask="causal", backward=True),
    Attention(batch=2, heads=3, rows=11, head_dim=5, mask="window3", dtype="bfloat16"),
    Attention(batch=3, heads=2, rows=11, head_dim=5, mask="padded"),
    Attention(batch=1, heads=2, rows=23, head_dim=5, mask="packed8"),
    *(Attention(batch=2, heads=3, rows=11, head_dim=5, mask="causal", mod=mod) for mod in (*MODS, "sinks")),
    *(Attention(batch=2, heads=3, rows=11, head_dim=5, mod=mod, backward=True) for mod in ("dropout", "bias")),
    Attention(batch=2, heads=6, rows=1, head_dim=13, kv_heads=3, slots=17),
    Attention(batch=3, heads=6, rows=1, head_dim=13, kv_heads=3, slots=17, mask="ragged"),
    Module(batch=2, rows=7, embed_dim=15, heads=3, backward=True),
    # an even number of heads, which the fast path of nn.MultiheadAttention asks for
    Module(batch=2, rows=7, embed_dim=20, heads=4, mask="causal"),
)
# by suite: the cases, and the tiny ones
SUITES: dict[str, tuple[tuple[Case, ...], tuple[Case, ...]]] = {
    "cpu": (CASES, QUICK),
    "gpu": (
        tuple(_gpu()),
        (
            Attention(batch=2, heads=3, rows=7, head_dim=8, dtype="bfloat16"),
            Attention(
                batch=2, heads=4, rows=11, head_dim=8, kv_heads=2, mask="causal", dtype="bfloat16", backward=True
            ),
            Attention(batch=2, heads=3, rows=11, head_dim=8, mask="window3", dtype="bfloat16", backward=True),
            Attention(batch=2, heads=6, rows=1, head_dim=16, kv_heads=3, slots=17, dtype="bfloat16"),
            Module(batch=2, rows=7, embed_dim=24, heads=3, mask="causal", dtype="bfloat16", backward=True),
        ),
    ),
}
