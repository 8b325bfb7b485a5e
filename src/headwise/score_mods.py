"""Score modifications: what is done to a score between the scaled dot product and the mask.

They are applied in the order given, over *positions* (see ``Positions``). A new one is a module with ``forward``;
``lowered`` says what it amounts to, so that a fused backend can do it without calling Python for each score.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headwise.errors import ShapeError, UnsupportedError
from headwise.positions import integer
from headwise.shapes import broadcast_to_call, check_tile

Scores = Float[Tensor, "#B #H #T #S"]
Places = Int[Tensor, "#B #H #T #S"]


@dataclass(frozen=True, eq=False)
class Lowered:
    """What a score modification amounts to, for a backend that knows the kind.

    ``softcap``: cap · tanh(score / cap), ``values`` holds the cap. ``slopes``: score - slope · distance, ``values``
    holds a slope per head. ``table``: score + values[head, distance], where distance is key position less query
    position, clamped to ±M and counted from -M: ``values`` is (heads, 2M + 1). ``tile``: score + values, aligned to
    the last query and key of the call.
    """

    kind: Literal["softcap", "slopes", "table", "tile"]
    values: Any


class ScoreMod(nn.Module):
    """A modification of the scores; subclass it and write ``forward``.

    Example:
        >>> class Halved(ScoreMod):
        ...     def forward(self, score, b, h, q, k):
        ...         return score / 2
        >>> x = torch.eye(2)[None, None]
        >>> headwise.attention_weights(x, x, score_mods=[Halved()], scale=1.0, stage="biased")
        tensor([[[[0.5000, 0.0000],
                  [0.0000, 0.5000]]]])

    Attributes:
        over: What ``q`` and ``k`` of ``forward`` are: "positions", or "slots" for rows and columns of the call, in
            the order of its tokens.
    """

    over: Literal["positions", "slots"] = "positions"

    def forward(self, score: Scores, b: Places, h: Places, q: Places, k: Places) -> Scores:
        """The new score of query ``q`` and key ``k`` in row ``b`` of the batch and head ``h``."""
        raise UnsupportedError(f"{type(self).__name__} has no forward(score, b, h, q, k); write one.")

    def lowered(self) -> Lowered | None:
        """What it amounts to, or None when only ``forward`` can say."""
        return None

    def bind(self, batch: int, heads: int, rows: int, slots: int) -> None:
        """Check the sizes against a call; raise ShapeError when they do not fit."""


class Softcap(ScoreMod):
    """Keep scores between -cap and cap: cap · tanh(score / cap).

    Args:
        cap: The bound, above 0, in units of the scaled score.

    Raises:
        ShapeError: When the cap is not a positive number.

    Example:
        >>> Softcap(2.0)(torch.tensor([[[[0.0, 1.0, 100.0]]]]), *([torch.zeros(1, 1, 1, 1).long()] * 4))
        tensor([[[[0.0000, 0.9242, 2.0000]]]])

    Reference: Gemma Team, Gemma 2, 2024, section 2. https://arxiv.org/abs/2408.00118
    """

    over = "slots"  # it reads neither

    def __init__(self, cap: float) -> None:
        super().__init__()
        if isinstance(cap, bool) or not (isinstance(cap, (int, float)) and 0 < cap < math.inf):
            raise ShapeError(f"A softcap of {cap!r} bounds nothing; give a number above 0.")
        self.cap = float(cap)

    def forward(self, score: Scores, b: Places, h: Places, q: Places, k: Places) -> Scores:
        return self.cap * torch.tanh(score / self.cap)

    def lowered(self) -> Lowered:
        return Lowered("softcap", self.cap)

    def extra_repr(self) -> str:
        return f"{self.cap:g}"


class ALiBi(ScoreMod):
    """Take slope · distance off each score, with a slope of its own for each head.

    Nearer keys get more weight, on either side of the query.

    Args:
        num_heads: Number of query heads. The slopes are powers of 2^(-8/num_heads); where num_heads is no power of
            two, those of the next lower one, followed by every second slope of twice that.
        slopes: One slope per head, instead of those. A Parameter is registered and trains.

    Raises:
        ShapeError: When ``num_heads`` is below 1, or the number of slopes differs from it.

    Example:
        >>> ALiBi(8).slopes
        tensor([0.5000, 0.2500, 0.1250, 0.0625, 0.0312, 0.0156, 0.0078, 0.0039])

    Reference: Press et al., Train Short, Test Long, 2021. https://arxiv.org/abs/2108.12409
    """

    own_slopes: Tensor | None

    def __init__(self, num_heads: int, slopes: Float[Tensor, " H"] | None = None) -> None:
        super().__init__()
        if integer(num_heads, "num_heads") < 1:
            raise ShapeError(f"{num_heads} heads have no slopes; give at least 1.")
        if slopes is not None and (
            not isinstance(slopes, Tensor) or not slopes.is_floating_point() or slopes.shape != (num_heads,)
        ):
            given = (
                f"{slopes.dtype} of shape {tuple(slopes.shape)}"
                if isinstance(slopes, Tensor)
                else type(slopes).__name__
            )
            raise ShapeError(
                f"ALiBi for {num_heads} heads was given slopes as {given}; give as many floating point numbers."
            )
        self.num_heads = num_heads
        # The slopes of the paper follow from the number of heads. As a buffer they would be rounded with a layer in
        # half precision, and the error of a slope grows with the distance.
        if isinstance(slopes, nn.Parameter):
            self.own_slopes = slopes
        else:
            self.register_buffer("own_slopes", slopes, persistent=False)

    @property
    def slopes(self) -> Float[Tensor, " H"]:
        """The slope of each head."""
        return _alibi_slopes(self.num_heads, device="cpu") if self.own_slopes is None else self.own_slopes

    def forward(self, score: Scores, b: Places, h: Places, q: Places, k: Places) -> Scores:
        slopes = self.own_slopes
        if slopes is None:
            slopes = _alibi_slopes(self.num_heads, score.dtype, score.device)
        return score - slopes.to(score.dtype)[h] * (q - k).abs().to(score.dtype)

    def lowered(self) -> Lowered:
        return Lowered("slopes", self.slopes)

    def bind(self, batch: int, heads: int, rows: int, slots: int) -> None:
        if self.num_heads != heads:
            raise ShapeError(f"The call has {heads} heads, but ALiBi is for {self.num_heads}; build it for the call.")

    def extra_repr(self) -> str:
        return f"{self.num_heads}"


class RelativeBias(ScoreMod):
    """Add a trained number per head and range of distance: the relative position bias of T5.

    Distances fall into buckets: half of them hold one distance each, from 0 on; the others grow logarithmically up to
    ``max_distance``, and the last takes all that is farther. A decoder puts all buckets on earlier keys; an encoder
    gives one half of them to later keys.

    Args:
        num_heads: Number of query heads.
        num_buckets: Number of buckets, at least 2; even when ``bidirectional``, and then at least 4.
        max_distance: Distance in tokens from which on all share the last bucket.
        bidirectional: Whether keys after the query have buckets of their own (encoders), rather than count as
            distance 0 (decoders, beside a causal mask).
        device: Where the table is made.
        dtype: Of the table.

    Attributes:
        table: The trainable numbers, (buckets, heads): zero at first, and the layout of T5's checkpoints.

    Raises:
        ShapeError: When there are too few buckets, or ``max_distance`` leaves none to grow.

    Example:
        >>> bias = RelativeBias(2, num_buckets=8, max_distance=16)
        >>> bias.buckets(torch.arange(-20, 21, 5))
        tensor([3, 3, 3, 2, 0, 6, 7, 7, 7])

    Reference: Raffel et al., T5, 2019, section 2.1. https://arxiv.org/abs/1910.10683
    """

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if integer(num_heads, "num_heads") < 1:
            raise ShapeError(f"{num_heads} heads have no bias; give at least 1.")
        sides = 2 if bidirectional else 1
        if integer(num_buckets, "num_buckets") < 2 * sides or num_buckets % sides:
            need = "an even number of at least 4" if bidirectional else "at least 2"
            raise ShapeError(f"{num_buckets} buckets cannot hold near and far distances; give {need}.")
        if integer(max_distance, "max_distance") <= num_buckets // sides // 2:
            raise ShapeError(
                f"A max_distance of {max_distance} is within the {num_buckets // sides // 2} buckets of one distance "
                "each; give a larger one."
            )
        self.num_heads, self.num_buckets = num_heads, num_buckets
        self.max_distance, self.bidirectional = max_distance, bidirectional
        self.table = nn.Parameter(torch.zeros(num_buckets, num_heads, device=device, dtype=dtype))

    def buckets(self, distance: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """The bucket of each distance, which is key position less query position."""
        count = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        exact = count // 2
        away = distance.abs() if self.bidirectional else (-distance).clamp(min=0)
        # in float32 and in this order, as where T5 was trained: at a border the rounding decides
        grown = torch.log(away.clamp(min=1).float() / exact) / math.log(self.max_distance / exact) * (count - exact)
        bucket = torch.where(away < exact, away, (exact + grown.long()).clamp(max=count - 1))
        return bucket + count * (distance > 0) if self.bidirectional else bucket

    def forward(self, score: Scores, b: Places, h: Places, q: Places, k: Places) -> Scores:
        return score + self.table.to(score.dtype)[self.buckets(k - q), h]

    def lowered(self) -> Lowered:
        far = self.max_distance
        distance = torch.arange(-far, far + 1, device=self.table.device)
        # wide, so that the gradients of all distances of a bucket are summed before they are rounded
        table = self.table.to(torch.promote_types(self.table.dtype, torch.float32))
        return Lowered("table", table[self.buckets(distance)].T)

    def bind(self, batch: int, heads: int, rows: int, slots: int) -> None:
        if self.num_heads != heads:
            raise ShapeError(
                f"The call has {heads} heads, but RelativeBias is for {self.num_heads}; build it for the call."
            )

    def extra_repr(self) -> str:
        side = "" if self.bidirectional else ", bidirectional=False"
        return f"{self.num_heads}, num_buckets={self.num_buckets}, max_distance={self.max_distance}{side}"


class Bias(ScoreMod):
    """Add a tensor to the scores. Its last row and column are the last query and key of the call.

    A Parameter is registered and trains; a plain tensor is held as it is. An entry of -inf hides its key as a mask
    does.

    Args:
        values: (queries, keys), or four dimensions that broadcast to (batch, heads, queries, keys).

    Raises:
        ShapeError: When the tensor is not floating point or has three dimensions; in a call, if a size neither
            equals the call's nor is 1.

    Example:
        >>> query = key = value = torch.eye(2)[None, None]
        >>> print(headwise.attention_weights(query, key, value, score_mods=[Bias(torch.tensor([[0.0, -torch.inf]]))]))
        tensor([[[[1., 0.],
                  [1., 0.]]]])

    Reference: Raffel et al., T5, 2019, section 2.1 (a learned one). https://arxiv.org/abs/1910.10683
    """

    over = "slots"

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        if not isinstance(values, Tensor) or not values.is_floating_point():
            kind = f"a {values.dtype} tensor" if isinstance(values, Tensor) else type(values).__name__
            raise ShapeError(f"A bias is {kind}; give floating point numbers, or a mask if it is to hide keys.")
        check_tile(values, "bias")
        self.values = values

    def forward(self, score: Scores, b: Places, h: Places, q: Places, k: Places) -> Scores:
        values = self.values.to(score.dtype)
        if values.shape[-2] > 1:
            values = values.index_select(-2, q.flatten())  # rows of a call lie in one order
        if values.shape[-1] > 1 and k.shape[0] == 1:
            values = values.index_select(-1, k.flatten())
        elif values.shape[-1] > 1:  # a ring of its own in each row of the batch
            values = torch.take_along_dim(values.expand(1, 1, *values.shape) if values.dim() == 2 else values, k, -1)
        return score + values

    def lowered(self) -> Lowered:
        return Lowered("tile", self.values)

    def bind(self, batch: int, heads: int, rows: int, slots: int) -> None:
        broadcast_to_call(self.values.shape, batch, heads, rows, slots, "bias")

    def extra_repr(self) -> str:
        return " x ".join(map(str, self.values.shape))


class CustomScore(ScoreMod):
    """A modification by a function of yours.

    Args:
        function: Takes the score and the int64 tensors ``b, h, q, k`` (batch row, head, query position, key
            position), which broadcast against it, and returns the new score. Differentiable if it is to train.

    Raises:
        ShapeError: When it is not callable.

    Example:
        >>> double = CustomScore(lambda score, b, h, q, k: 2 * score)
        >>> double(torch.ones(1, 1, 1, 1), *([torch.zeros(1, 1, 1, 1).long()] * 4))
        tensor([[[[2.]]]])
    """

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        if not callable(function):
            raise ShapeError(f"A custom score takes a function of (score, b, h, q, k), not {type(function).__name__}.")
        self.function = function

    def forward(self, score: Scores, b: Places, h: Places, q: Places, k: Places) -> Scores:
        return self.function(score, b, h, q, k)


def _alibi_slopes(
    num_heads: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Float[Tensor, " H"]:
    power = 2 ** int(math.log2(num_heads))
    step = torch.arange(1, 2 * power + 1, dtype=dtype, device=device)
    slopes, between = torch.exp2(-8 / power * step[:power]), torch.exp2(-4 / power * step[0::2])
    return torch.cat([slopes, between[: num_heads - power]])
