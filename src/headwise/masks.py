"""Masks: which keys a query may attend to.

``Causal() & Window(4)`` is sliding-window attention, ``Causal() | Prefix(3)`` a prefix language model,
``~Document(ids)`` everything but one's own document. Masks compare indices (see ``Positions``).

A new mask is a frozen dataclass with one method, ``allowed``; ``spans`` makes it fast and ``bind`` is for masks that
hold tensors of the call. It then works on every backend, can be drawn, and ``parse`` finds it by its name.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from headwise.algebra import Allowed, Indices, Mask
from headwise.errors import ShapeError
from headwise.positions import Positions, integer, plain
from headwise.shapes import broadcast_to_call, broadcasts, check_tile, strided
from headwise.spans import Spans, make_runs, stack_heads, surely


@dataclass(frozen=True, eq=False)
class Full(Mask):
    """Attend to every key.

    Example:
        >>> print(draw(Full(), 2))
        ■ ■
        ■ ■
    """

    def allowed(self, b: Indices, h: Indices, q: Indices, k: Indices) -> Allowed:
        return torch.ones_like(q, dtype=torch.bool)

    def spans(self, queries: Positions, keys: Positions) -> Spans:
        return Spans(queries.count, keys.count)


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """Attend to the query's own token and to earlier ones: key index <= query index.

    By index, so with more keys than queries the last query sees every key.

    Example:
        >>> print(draw(Causal(), 2, 4))
        ■ ■ ■ ·
        ■ ■ ■ ■

    Reference: Vaswani et al., Attention Is All You Need, 2017, section 3.2.3. https://arxiv.org/abs/1706.03762
    """

    def allowed(self, b: Indices, h: Indices, q: Indices, k: Indices) -> Allowed:
        return k <= q

    def spans(self, queries: Positions, keys: Positions) -> Spans:
        return Spans(queries.count, keys.count, right=queries.start - keys.start + 1)


@dataclass(frozen=True, eq=False)
class Window(Mask):
    """Attend only to the nearest keys: fewer than ``size`` tokens away, the query itself included.

    ``Causal() & Window(4)`` is sliding-window attention: each token sees itself and the three before it. Other
    libraries count without the token itself; write such a pair as ``Window(left=3, right=0)``.

    Args:
        size: Number of tokens on either side, the query itself counted, at least 1.
        left: Number of tokens before the query, itself not counted; None for no limit. Instead of ``size``.
        right: Number of tokens after the query, itself not counted; None for no limit. Instead of ``size``.

    Raises:
        ShapeError: When ``size`` is below 1, a side is negative, or both forms or neither is given.

    Example:
        >>> print(draw(Causal() & Window(2), 4))
        ■ · · ·
        ■ ■ · ·
        · ■ ■ ·
        · · ■ ■

    Reference: Beltagy et al., Longformer, 2020. https://arxiv.org/abs/2004.05150
    """

    size: int | None = None
    left: int | None = field(default=None, kw_only=True)
    right: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if (self.size is None) == (self.left is None and self.right is None):
            raise ShapeError("A window takes either a size or left= and right=; give one of the two forms.")
        if self.size is not None and integer(self.size, "The size of a window") < 1:
            raise ShapeError(f"A window of {self.size} tokens lets no query see anything; give at least 1.")
        for name in ("left", "right"):
            side = getattr(self, name)
            if side is not None and integer(side, f"{name}= of a window") < 0:
                raise ShapeError(f"A window cannot reach {side} tokens to the {name}; give 0 or more, or None.")

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """Tokens before and after the query, itself not counted; None for no limit."""
        return (self.left, self.right) if self.size is None else (self.size - 1, self.size - 1)

    def allowed(self, b: Indices, h: Indices, q: Indices, k: Indices) -> Allowed:
        left, right = self.sides
        inside = torch.ones_like(q - k, dtype=torch.bool)
        if left is not None:
            inside = inside & (q - k <= left)
        return inside if right is None else inside & (k - q <= right)

    def spans(self, queries: Positions, keys: Positions) -> Spans:
        left, right = self.sides
        ahead = queries.start - keys.start
        return Spans(
            queries.count,
            keys.count,
            left=None if left is None else ahead - left,
            right=None if right is None else ahead + right + 1,
        )

    def __repr__(self) -> str:
        return f"Window({self.size})" if self.size is not None else f"Window(left={self.left}, right={self.right})"


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    """Hide padding keys. It hides keys only, never queries.

    Args:
        lengths: How many tokens at the start of each row are real: an int for all rows, or one int per row; or a
            boolean tensor that is True at the real tokens, one entry per key of the call.
        left: How many tokens at the start of each row are padding, in the same forms.

    Raises:
        ShapeError: When a length is negative, or both or neither of the arguments are given; when bound to a call,
            if the number of rows or keys differs.

    Example:
        >>> print(draw(Padding(2), 3))
        ■ ■ ·
        ■ ■ ·
        ■ ■ ·
    """

    lengths: int | list[int] | Shaped[Tensor, "..."] | None = None
    left: int | list[int] | Int[Tensor, " B"] | None = field(default=None, kw_only=True)
    keys: Positions | None = field(default=None, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        if (self.lengths is None) == (self.left is None):
            raise ShapeError("Padding takes either lengths or left=; give one of the two.")
        if self.left is not None:
            _per_row(self, "left", 0, "The amount of left padding")
        elif not self.is_boolean:
            _per_row(self, "lengths", 0, "A length")
        elif self.lengths.dim() != 2:  # type: ignore[union-attr]
            raise ShapeError(
                f"A boolean padding mask has {self.lengths.dim()} dimensions, not 2; give one row of keys per "  # type: ignore[union-attr]
                "sequence, (batch, keys)."
            )

    @property
    def is_boolean(self) -> bool:
        """Whether the mask was given as booleans rather than as lengths."""
        return isinstance(self.lengths, Tensor) and self.lengths.dtype == torch.bool

    def bind(self, batch: int, heads: int, queries: Positions, keys: Positions) -> Mask:
        if self.is_boolean:
            _same_size(self.lengths.shape[0], batch, "row", "the boolean padding mask")  # type: ignore[union-attr]
            _same_size(self.lengths.shape[1], keys.count, "key", "the boolean padding mask")  # type: ignore[union-attr]
            return replace(self, keys=keys)
        _rows_match(self.lengths, batch, "lengths")
        _rows_match(self.left, batch, "left")
        return self

    def allowed(self, b: Indices, h: Indices, q: Indices, k: Indices) -> Allowed:
        if self.is_boolean:
            return self.lengths[b, _column_of(self.keys, b, k)]  # type: ignore[index, call-overload]
        return k < _at(self.lengths, b) if self.left is None else k >= _at(self.left, b)

    def spans(self, queries: Positions, keys: Positions) -> Spans | None:
        if self.is_boolean:
            return None
        if self.left is None:
            return _between(queries, keys, None, self.lengths)
        return _between(queries, keys, self.left, None)


@dataclass(frozen=True, eq=False)
class Document(Mask):
    """Attend only within one's own document: where the ids of query and key are equal.

    Args:
        query_ids: An id per query of the call, for every row of the batch or for all rows alike.
        key_ids: An id per key; None means that keys and queries are the same tokens.

    Raises:
        ShapeError: When the ids are not integers, or their number differs from the call's.

    Example:
        >>> print(draw(Causal() & Document.from_lengths([3, 2]), 5))
        ■ · · · ·
        ■ ■ · · ·
        ■ ■ ■ · ·
        · · · ■ ·
        · · · ■ ■

    Reference: Krell et al., Efficient Sequence Packing without Cross-contamination, 2021.
    https://arxiv.org/abs/2107.02027
    """

    query_ids: Int[Tensor, "#B T"] | Int[Tensor, " T"]
    key_ids: Int[Tensor, "#B S"] | Int[Tensor, " S"] | None = None
    # per query the run of its document's keys; only the constructors below know that documents are contiguous
    runs: Int[Tensor, "#B T 2"] | None = field(default=None, repr=False, kw_only=True)
    at: tuple[Positions, Positions] | None = field(default=None, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("query_ids", "key_ids"):
            ids = getattr(self, name)
            if ids is None and name == "key_ids":
                continue
            if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
                kind = f"a {ids.dtype} tensor" if isinstance(ids, Tensor) else type(ids).__name__
                raise ShapeError(f"{name} of a document mask is {kind}; give a tensor of integers, one id per token.")
            if ids.dim() not in (1, 2):
                raise ShapeError(
                    f"{name} of a document mask has {ids.dim()} dimensions; give (tokens,) or (batch, tokens)."
                )
            object.__setattr__(self, name, ids if ids.dim() == 2 else ids[None])

    @classmethod
    def from_lengths(
        cls, lengths: list[int], key_lengths: list[int] | None = None, *, device: torch.device | str | None = None
    ) -> "Document":
        """Documents of the given lengths, one after the other in each row; keys have the same unless given.

        Without a device the mask goes where each call is.
        """
        ids, bounds = _contiguous(lengths, device or "cpu")
        key_ids = None
        if key_lengths is not None:
            key_ids, bounds = _contiguous(key_lengths, device or "cpu")
            if len(key_lengths) != len(lengths):
                raise ShapeError(
                    f"{len(lengths)} documents of queries and {len(key_lengths)} of keys differ; give as many."
                )
        made = cls(ids, key_ids, runs=bounds[ids][None])
        object.__setattr__(made, "listed", device is None)
        return made

    @classmethod
    def ascending(
        cls, query_ids: Int[Tensor, "#B T"] | Int[Tensor, " T"], key_ids: Int[Tensor, "#B S"] | None = None
    ) -> "Document":
        """Documents one after the other in each row: ids that never decrease, which is not looked at.

        The mask is then known as one run of keys for each query, which costs less than ids that may come in any order.

        Example:
            >>> print(draw(Document.ascending(torch.tensor([0, 0, 3])), 3))
            ■ ■ ·
            ■ ■ ·
            · · ■
        """
        made = cls(query_ids, key_ids)
        keys = made.query_ids if made.key_ids is None else made.key_ids
        rows = len(keys) if len(made.query_ids) == 1 else len(made.query_ids)
        keys, queries = (ids.expand(rows, -1).contiguous() for ids in (keys, made.query_ids))
        ends = [torch.searchsorted(keys, queries, right=right) for right in (False, True)]
        return replace(made, runs=torch.stack(ends, -1))

    def bind(self, batch: int, heads: int, queries: Positions, keys: Positions) -> Mask:
        key_ids = self.query_ids if self.key_ids is None else self.key_ids
        if self.key_ids is None and queries.count != keys.count:
            raise ShapeError(
                f"A document mask was given ids for queries only, but there are {queries.count} queries and "
                f"{keys.count} keys; pass key_ids= as well."
            )
        for ids, name in ((self.query_ids, "query"), (key_ids, "key")):
            count = queries.count if name == "query" else keys.count
            _same_size(ids.shape[1], count, name, f"the {name} ids of the document mask")
            if ids.shape[0] != 1:
                _same_size(ids.shape[0], batch, "row", f"the {name} ids of the document mask")
        return replace(self, at=(queries, keys))

    def allowed(self, b: Indices, h: Indices, q: Indices, k: Indices) -> Allowed:
        key_ids = self.query_ids if self.key_ids is None else self.key_ids
        queries, keys = self.at or (None, None)
        row, slot = _column_of(queries, b, q), _column_of(keys, b, k)
        query_row = b if self.query_ids.shape[0] > 1 else torch.zeros_like(b)
        key_row = b if key_ids.shape[0] > 1 else torch.zeros_like(b)
        return self.query_ids[query_row, row] == key_ids[key_row, slot]

    def spans(self, queries: Positions, keys: Positions) -> Spans | None:
        if self.runs is None:
            return None
        start, stop = self.runs[:, None, :, None, 0], self.runs[:, None, :, None, 1]
        return Spans(queries.count, keys.count, runs=make_runs(start, stop, keys.count))


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """Let every query see the first ``size`` tokens: start <= key index < start + size.

    ``Causal() | Prefix(n)`` is a prefix language model.

    Args:
        size: Number of tokens in the prefix: an int for all rows, or one int per row.
        start: Index of the first token of the prefix, in the same forms; above 0 in left-padded rows.

    Raises:
        ShapeError: When ``size`` is negative; when bound to a call, if the number of rows differs.

    Example:
        >>> print(draw(Causal() | Prefix(2), 4))
        ■ ■ · ·
        ■ ■ · ·
        ■ ■ ■ ·
        ■ ■ ■ ■

    Reference: Raffel et al., T5, 2019, section 3.2.1. https://arxiv.org/abs/1910.10683
    """

    size: int | list[int] | Int[Tensor, " B"]
    start: int | list[int] | Int[Tensor, " B"] = 0

    def __post_init__(self) -> None:
        _per_row(self, "size", 0, "The size of a prefix")
        _per_row(self, "start", None, "The start of a prefix")

    def bind(self, batch: int, heads: int, queries: Positions, keys: Positions) -> Mask:
        _rows_match(self.size, batch, "size")
        _rows_match(self.start, batch, "start")
        return self

    def allowed(self, b: Indices, h: Indices, q: Indices, k: Indices) -> Allowed:
        start = _at(self.start, b)
        return (k >= start) & (k < start + _at(self.size, b))

    def spans(self, queries: Positions, keys: Positions) -> Spans:
        return _between(queries, keys, self.start, self.start + self.size)  # type: ignore[operator]


@dataclass(frozen=True, eq=False)
class Chunk(Mask):
    """Attend only within chunks of ``size`` tokens: (q - start) // size == (k - start) // size.

    Args:
        size: Number of tokens in a chunk, at least 1: an int for all rows, or one int per row.
        start: Index at which a chunk begins, in the same forms; chunks run on to both sides of it.

    Raises:
        ShapeError: When ``size`` is below 1; when bound to a call, if the number of rows differs.

    Example:
        >>> print(draw(Causal() & Chunk(2), 4))
        ■ · · ·
        ■ ■ · ·
        · · ■ ·
        · · ■ ■

    Reference: Child et al., Sparse Transformers, 2019. https://arxiv.org/abs/1904.10509
    """

    size: int | list[int] | Int[Tensor, " B"]
    start: int | list[int] | Int[Tensor, " B"] = 0

    def __post_init__(self) -> None:
        _per_row(self, "size", 1, "The size of a chunk")
        _per_row(self, "start", None, "The start of a chunk")

    def bind(self, batch: int, heads: int, queries: Positions, keys: Positions) -> Mask:
        _rows_match(self.size, batch, "size")
        _rows_match(self.start, batch, "start")
        return self

    def _number(self, b: Indices, index: Indices) -> Indices:
        return torch.div(index - _at(self.start, b), _at(self.size, b), rounding_mode="floor")

    def allowed(self, b: Indices, h: Indices, q: Indices, k: Indices) -> Allowed:
        return self._number(b, q) == self._number(b, k)

    def spans(self, queries: Positions, keys: Positions) -> Spans:
        size, start, ahead = _rows(self.size), _rows(self.start), _rows(keys.start)
        held = (size, start, ahead, queries.start)
        device = next((v.device for v in held if isinstance(v, Tensor)), torch.device("cpu"))
        q = queries.index(device)[:, None, :, None]
        begin = torch.div(q - start, size, rounding_mode="floor") * size + start - ahead
        return Spans(queries.count, keys.count, runs=make_runs(begin, begin + size, keys.count))


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """Attend where a boolean tensor is True; what a bare tensor given as ``mask=`` means.

    Its last row and column are the last query and key of the call.

    Args:
        values: (queries, keys), or four dimensions that broadcast to (batch, heads, queries, keys).

    Raises:
        ShapeError: When the tensor is not boolean, or has three dimensions (which could mean one mask per row of the
            batch or one per head); when bound to a call, if a size neither equals the call's nor is 1.

    Example:
        >>> print(draw(Dense(torch.eye(3, dtype=torch.bool)), 3))
        ■ · ·
        · ■ ·
        · · ■
    """

    values: Shaped[Tensor, "..."]
    at: tuple[Positions, Positions] | None = field(default=None, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        values = self.values
        if not isinstance(values, Tensor):
            raise ShapeError(f"A dense mask is a boolean tensor, not {type(values).__name__}; make it one first.")
        if values.is_floating_point():
            raise ShapeError(
                f"A mask of dtype {values.dtype} could mean numbers to be added or 0 for hidden. Pass Bias(tensor) in "
                "score_mods to add it to the scores, or Dense.from_zeros(tensor) where 0 hides."
            )
        if values.dtype != torch.bool:
            raise ShapeError(
                f"A mask of dtype {values.dtype} does not say what its numbers mean. Pass Dense.from_zeros(tensor) "
                "where 0 hides, Padding(tensor.bool()) for one entry per token of each row, or booleans, True where a "
                "query may attend."
            )
        check_tile(values, "mask")

    @classmethod
    def from_zeros(cls, mask: Shaped[Tensor, "..."], num_heads: int | None = None) -> "Dense":
        """The textbook form, in which 0 hides a key and anything else shows it.

        Args:
            mask: Any dtype and any shape that broadcasts to (batch * heads, queries, keys), in which row
                ``b * num_heads + h`` is head h of sequence b; or four dimensions as for ``Dense``.
            num_heads: Number of heads; needed when the first of three dimensions is not 1.

        Returns:
            The mask, True where ``mask`` is not 0.

        Raises:
            ShapeError: When the number of heads is missing or does not divide the first dimension.

        Example:
            >>> print(draw(Dense.from_zeros(torch.tensor([[1, 0], [1, 1]])), 2))
            ■ ·
            ■ ■
        """
        if not isinstance(mask, Tensor):
            raise ShapeError(
                f"from_zeros reads a tensor in which 0 hides, not {type(mask).__name__}; make it one first."
            )
        strided(mask, "mask")
        shown = mask != 0
        if mask.dim() < 2:
            shown = shown.expand(1, 1) if mask.dim() == 0 else shown[None]
        if mask.dim() == 3 and mask.shape[0] == 1:
            shown = shown[0]
        elif mask.dim() == 3:
            if num_heads is None:
                raise ShapeError(
                    f"A mask of shape {tuple(mask.shape)} mixes batch and heads in its first dimension; say how many "
                    "heads there are with num_heads=."
                )
            if integer(num_heads, "num_heads") < 1 or mask.shape[0] % num_heads:
                raise ShapeError(
                    f"{mask.shape[0]} masks cannot be shared evenly by {num_heads} heads; the first dimension must be "
                    "batch * heads."
                )
            shown = shown.unflatten(0, (mask.shape[0] // num_heads, num_heads))
        return cls(shown)

    def bind(self, batch: int, heads: int, queries: Positions, keys: Positions) -> Mask:
        broadcast_to_call(self.values.shape, batch, heads, queries.count, keys.count, "mask")
        return replace(self, at=(queries, keys))

    def allowed(self, b: Indices, h: Indices, q: Indices, k: Indices) -> Allowed:
        queries, keys = self.at or (None, None)
        row, slot = _column_of(queries, b, q), _column_of(keys, b, k)
        where = (b, h, row, slot)[4 - self.values.dim() :]
        return self.values[
            tuple(torch.zeros_like(i) if surely(n == 1) else i for i, n in zip(where, self.values.shape, strict=True))
        ]


@dataclass(frozen=True, eq=False)
class PerHead(Mask):
    """A mask of its own for each head.

    Args:
        masks: One mask per query head, in the order of the heads.

    Raises:
        ShapeError: When bound to a call with another number of heads.

    Example:
        >>> print(draw(PerHead((Causal(), Window(1))), 2, heads=2))
        head 0
        ■ ·
        ■ ■
        head 1
        ■ ·
        · ■

    Reference: Sukhbaatar et al., Adaptive Attention Span in Transformers, 2019. https://arxiv.org/abs/1905.07799
    """

    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.masks, (tuple, list)) or not all(isinstance(m, Mask) for m in self.masks):
            raise ShapeError("PerHead takes a tuple with one mask per head.")
        object.__setattr__(self, "masks", tuple(self.masks))

    def bind(self, batch: int, heads: int, queries: Positions, keys: Positions) -> Mask:
        _same_size(len(self.masks), heads, "head", "the per-head mask")
        return PerHead(tuple(m.bind(batch, heads, queries, keys) for m in self.masks))

    def parts(self) -> tuple[Mask, ...]:
        return self.masks

    def allowed(self, b: Indices, h: Indices, q: Indices, k: Indices) -> Allowed:
        seen = torch.zeros_like(h, dtype=torch.bool)
        for head, mask in enumerate(self.masks):
            seen = torch.where(h == head, mask.allowed(b, h, q, k), seen)
        return seen

    def spans(self, queries: Positions, keys: Positions) -> Spans | None:
        spans = [m.spans(queries, keys) for m in self.masks]
        found = [s for s in spans if s is not None]
        # a part that itself differs by head (PerHead inside PerHead) would need its own slice of heads
        if not found or len(found) < len(spans) or any(s.runs is not None and s.runs.shape[1] > 1 for s in found):
            return None
        return stack_heads(found)


@dataclass(frozen=True, eq=False)
class CustomMask(Mask):
    """Attend where a function of yours says so.

    Args:
        function: Takes the int64 tensors ``b, h, q, k`` (batch row, head, query index, key index), which broadcast
            against each other, and returns booleans. It has no spans, so every pair is evaluated.

    Example:
        >>> print(draw(CustomMask(lambda b, h, q, k: (q + k) % 2 == 0), 3))
        ■ · ■
        · ■ ·
        ■ · ■
    """

    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ShapeError(f"A custom mask takes a function of (b, h, q, k), not {type(self.function).__name__}.")

    def allowed(self, b: Indices, h: Indices, q: Indices, k: Indices) -> Allowed:
        seen = self.function(b, h, q, k)
        if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
            kind = seen.dtype if isinstance(seen, Tensor) else type(seen).__name__
            raise ShapeError(f"A custom mask returned {kind}, not booleans; return a comparison such as q >= k.")
        asked = torch.broadcast_shapes(b.shape, h.shape, q.shape, k.shape)
        if not broadcasts(seen.shape, asked):
            raise ShapeError(
                f"A custom mask returned shape {tuple(seen.shape)} when asked about {tuple(asked)}; compute with b, h, "
                "q and k elementwise, so that the shapes broadcast."
            )
        if seen.device != q.device:
            raise ShapeError(
                f"A custom mask returned a tensor on {seen.device} for a call on {q.device}; move it there."
            )
        return seen


def _per_row(mask: Mask, name: str, least: int | None, what: str) -> None:
    """Check a number, or make a list of one number per row a tensor.

    Tensors are read where that costs no waiting: on the CPU, outside compilers and function transforms.
    """
    value = getattr(mask, name)
    if isinstance(value, (list, tuple)):
        numbers = [integer(plain(v), what) for v in value]
        object.__setattr__(mask, name, torch.tensor(numbers, dtype=torch.int64, device="cpu"))
        object.__setattr__(mask, "listed", True)
    elif isinstance(value, Tensor):
        if value.is_floating_point() or value.dtype == torch.bool or value.dim() != 1:
            raise ShapeError(
                f"{what} is a {value.dtype} tensor of shape {tuple(value.shape)}; give one integer per row, (batch,)."
                + (" A padding mask is given as booleans: Padding(mask.bool())." if value.dim() == 2 else "")
            )
        if value.dtype not in (torch.int32, torch.int64):  # sums and differences would not fit
            value = value.to(torch.int64)
            object.__setattr__(mask, name, value)
        hidden = torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(value)
        numbers = value.tolist() if type(value) is Tensor and value.device.type == "cpu" and not hidden else []
    else:
        numbers = [integer(value, what)]
    if least is not None and any(n < least for n in numbers):
        raise ShapeError(f"{what} is {min(numbers)}; give at least {least}.")


def _rows_match(value: Any, batch: int, name: str) -> None:
    if isinstance(value, Tensor):
        _same_size(value.shape[0], batch, "row", f"{name}= of the mask")


def _same_size(has: int, needs: int, unit: str, what: str) -> None:
    if has != needs:
        units = unit if needs == 1 else "queries" if unit == "query" else f"{unit}s"
        raise ShapeError(f"The call has {needs} {units}, but {what} is for {has}; give one entry for each.")


def _at(value: Any, b: Tensor) -> Any:
    return value.to(torch.int64)[b] if isinstance(value, Tensor) else value


def _contiguous(lengths: Any, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
    """The document of each token, and where each document starts and stops."""
    if not isinstance(lengths, (list, tuple)):
        raise ShapeError(f"The lengths of documents are {type(lengths).__name__}; give a list of whole numbers.")
    if any(integer(n, "The length of a document") < 0 for n in lengths):
        raise ShapeError(f"A document of {min(lengths)} tokens does not exist; give lengths of 0 or more.")
    counts = torch.tensor(lengths, dtype=torch.int64, device=device)
    stop = counts.cumsum(0)
    ids = torch.repeat_interleave(torch.arange(len(lengths), device=device), counts)
    return ids, torch.stack([stop - counts, stop], -1)


def _column_of(positions: Positions | None, b: Indices, index: Indices) -> Tensor:
    return index if positions is None else positions.column_of(b, index)


def _between(queries: Positions, keys: Positions, start: Any, stop: Any) -> Spans:
    """Spans of start <= key index < stop, the same for every query; None for no bound."""
    first = 0 if start is None else start - keys.start
    return Spans(queries.count, keys.count, first=first, last=None if stop is None else stop - keys.start)


def _rows(value: Any) -> Any:
    return value.to(torch.int64)[:, None, None, None] if isinstance(value, Tensor) else value
