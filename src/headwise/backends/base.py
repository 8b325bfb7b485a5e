"""What a backend is given, and what it must give back.

B batch   H query heads      T query tokens   D head dimension of query and key   R chosen query rows
          K key/value heads  S key tokens     V head dimension of value           G = H // K
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

from headwise.algebra import Mask, evaluate, spans_of
from headwise.errors import ShapeError
from headwise.masks import Full
from headwise.positions import Positions
from headwise.score_mods import ScoreMod
from headwise.shapes import broadcasts
from headwise.spans import Spans

Rows = slice | Int[Tensor, " R"]


@dataclass(frozen=True, eq=False)
class Inputs:
    """One call of attention, checked and complete.

    Example:
        >>> layer = MultiHeadAttention(8, 2, mask=Causal())
        >>> layer.observer = lambda x, out, lse: print(x.mask, x.query.shape, x.allowed().sum().item())
        >>> y = layer(torch.randn(1, 3, 8))
        Causal() torch.Size([1, 2, 3, 4]) 6

    Args:
        query: Queries, as they enter the score: normed and rotated.
        key: Keys, likewise.
        value: Values.
        queries: Where the queries stand.
        keys: Where the keys stand.
        scale: What the dot product is multiplied by.
        mask: Which keys a query may attend to, bound to this call.
        score_mods: What is done to the scaled scores, in this order.
        sinks: An extra logit per head, in the denominator of the softmax alone; None for none.
        dropout_p: Probability that a weight is dropped; 0 outside training.
        seed: Seed of the counter rule, or None for the backend's own random stream.
        lse: Whether the log-sum-exp is wanted, and whether a gradient will flow through it.
        head_offset: Global number of the first head, above 0 where another process holds the heads before it.
    """

    query: Float[Tensor, "B H T D"]
    key: Float[Tensor, "B K S D"]
    value: Float[Tensor, "B K S V"]
    queries: Positions
    keys: Positions
    scale: float
    mask: Mask = field(default_factory=Full)
    score_mods: tuple[ScoreMod, ...] = ()
    sinks: Float[Tensor, " H"] | None = None
    dropout_p: float = 0.0
    seed: int | Int[Tensor, ""] | None = None
    lse: Literal["no", "value", "gradient"] = "no"
    head_offset: int = 0

    @property
    def needs_grad(self) -> bool:
        """Whether autograd will ask for a gradient of this call."""
        return torch.is_grad_enabled() and any(
            t is not None and t.requires_grad
            for t in (self.query, self.key, self.value, self.sinks, *self.score_tensors())
        )

    def score_tensors(self) -> list[Tensor]:
        """Tensors of the score modifications through which a gradient may flow."""
        tensors = [p for mod in self.score_mods for p in mod.parameters()]
        return tensors + [tile for tile in self.tiles() if not isinstance(tile, torch.nn.Parameter)]

    def tiles(self) -> list[Float[Tensor, "..."]]:
        """Tensors that are added to the scores as they are."""
        lowered = (mod.lowered() for mod in self.score_mods)
        return [low.values for low in lowered if low is not None and low.kind == "tile"]

    def spans(self) -> Spans | None:
        """The mask as runs of key places per query row, or None where runs cannot say it."""
        return spans_of(self.mask, self.queries, self.keys)

    def allowed(self, rows: Rows = slice(None)) -> Bool[Tensor, "#B #H R S"]:
        """The mask of chosen query rows; keys that a bias of -inf hides are hidden."""
        batch, heads, device = self.query.shape[0], self.query.shape[1], self.query.device
        seen = evaluate(
            self.mask,
            batch,
            heads,
            self.queries,
            self.keys,
            device=device,
            head_offset=self.head_offset,
            rows=rows,
        )
        for tile in self.tiles():
            part = tile[..., rows, :] if tile.shape[-2] > 1 else tile
            seen = seen & (self._in_place(part) != -torch.inf)
        return seen

    def _in_place(self, tile: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """A tile whose columns follow the order of tokens, with its columns where the keys lie."""
        if tile.shape[-1] == 1 or (isinstance(self.keys.ring, int) and self.keys.ring == 0):
            return tile
        column = self.keys.column(tile.device)[:, None, None, :]
        tile = tile.expand(1, 1, *tile.shape) if tile.dim() == 2 else tile
        return torch.take_along_dim(tile, column, -1)

    def modify(
        self,
        scores: Float[Tensor, "B H R S"],
        rows: Rows = slice(None),
        mods: tuple[ScoreMod, ...] | None = None,
    ) -> Float[Tensor, "B H R S"]:
        """Apply the score modifications to the scores of chosen query rows."""
        b, h = self.batch_index(), self.head_index()
        for mod in self.score_mods if mods is None else mods:
            q, k = self.places(mod.over, rows)
            new = mod(scores, b, h, q, k)
            fits = isinstance(new, Tensor) and new.is_floating_point() and broadcasts(new.shape, scores.shape)
            if not fits:
                given = f"{new.dtype} of shape {tuple(new.shape)}" if isinstance(new, Tensor) else type(new).__name__
                raise ShapeError(
                    f"{type(mod).__name__} returned {given} for scores of shape {tuple(scores.shape)}; return a "
                    "floating point score for each."
                )
            scores = new.to(scores.dtype).expand(scores.shape)
        return scores

    def batch_index(self) -> Int[Tensor, "B 1 1 1"]:
        """Number of each row of the batch."""
        return torch.arange(self.query.shape[0], device=self.query.device)[:, None, None, None]

    def head_index(self) -> Int[Tensor, "1 H 1 1"]:
        """Global number of each head."""
        first = self.head_offset
        return torch.arange(first, first + self.query.shape[1], device=self.query.device)[None, :, None, None]

    def places(self, kind: str, rows: Rows) -> tuple[Int[Tensor, "#B 1 R 1"], Int[Tensor, "#B 1 1 S"]]:
        """Places of chosen queries and of all keys: "index", "positions" or "slots" (rows and columns of the call)."""
        device = self.query.device
        if kind == "slots":
            q, k = self.queries.column(device), self.keys.column(device)
        elif kind == "positions":
            q, k = self.queries.position(device), self.keys.position(device)
        else:
            q, k = self.queries.index(device), self.keys.index(device)
        return q[:, rows][:, None, :, None], k[:, None, None, :]


def is_watched() -> bool:
    """Whether a compiler, a mode, a profiler or a transform of functions is to see operators of torch."""
    return (
        torch.compiler.is_compiling()
        or _python_dispatch._get_current_dispatch_mode() is not None
        or torch._C._autograd._profiler_enabled()
        or torch._C._functorch.maybe_current_level() is not None
        or forward_ad._current_level >= 0
    )


class Backend(ABC):
    """A way to compute attention.

    ``why_not`` gives a reason or None; the reason is what errors, ``explain``, tests and benchmarks show. On the path
    of a call it is a constant text: one with a length in it would recompile at every length.

    Example:
        >>> class Mean(Backend):
        ...     name = "mean"
        ...     def why_not(self, x):
        ...         return None if isinstance(x.mask, Full) else "it knows no mask"
        ...     def run(self, x):
        ...         return x.value.mean(-2, keepdim=True).expand(*x.query.shape[:3], -1), None
        >>> x = torch.ones(1, 1, 2, 4)
        >>> attention(x, x, x, backend=Mean()).shape
        torch.Size([1, 1, 2, 4])
    """

    name: str
    # Whether a file of torch.export that holds its work runs where headwise is not installed; if not, it is taken for
    # such a file only where it is asked for by name.
    exports: bool = True

    @abstractmethod
    def why_not(self, x: Inputs) -> str | None:
        """Why this backend cannot run the call, as the end of "it …"; None when it can."""

    @abstractmethod
    def run(self, x: Inputs) -> tuple[Float[Tensor, "B H T V"], Float[Tensor, "B H T"] | None]:
        """The output, and the log-sum-exp if it was asked for."""

    def plan(self, x: Inputs) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """What computes the output of such calls from query, key and value alone; None where there is nothing to gain.

        It is kept, and used for plain tensors of the same sizes, strides and dtypes when all else is the same, with a
        gradient if ``x.needs_grad``, but without log-sum-exp and dropout. So it may hold numbers, but no tensors.
        """
        return None
