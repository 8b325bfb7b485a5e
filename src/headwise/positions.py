"""Positions: where the tokens of a call stand.

A token has two coordinates. Its *index* is its place in its row of the batch, padding included; masks compare
indices. Its *position* is what rotary embeddings, ALiBi and relative biases see. They are the same unless a caller
says otherwise, with ``offset`` or with ``positions``.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headwise.errors import ShapeError

Number = int | Int[Tensor, " B"]
LIMIT = 2**31


@dataclass(frozen=True, eq=False)
class Positions:
    """The tokens of one side of a call: a run of indices, one run per row of the batch, or explicit numbers.

    Held as integers while they can be, so that comparing two of them costs nothing and needs no tensor. ``start``,
    ``offset``, ``ring`` and ``filled`` may each be an integer tensor with one number per row: rows that have seen
    different numbers of tokens, left padding, and rings, without a number per token. ``positions`` (and in rare cases
    ``indices``) give a number for each token.

    Args:
        count: Number of tokens, 0 or more.
        start: Index of the first token. Negative when there are more queries than keys: the last query stands
            with the last key, so the first ones stand before every key.
        offset: What to add to an index to get a position; minus the padding in left-padded rows.
        ring: Place of the first token: token number i lies at (i + ring) modulo count, as in a ring buffer.
        filled: How many of the tokens are there, counted from the first; the places of the others are empty, and no
            query sees them. None for all.
        indices: Index of each token, -1 for an empty place, instead of ``start``.
        positions: Position of each token, instead of index + offset; with a dimension in front for positions along
            several axes (time, height and width of M-RoPE).

    Raises:
        ShapeError: When ``count`` is negative, or one of the others is not a whole number, nor a tensor of them.

    Example:
        >>> Positions(3, start=5).index("cpu")
        tensor([[5, 6, 7]])
        >>> Positions(3, start=5, offset=-5).position("cpu")
        tensor([[0, 1, 2]])
        >>> Positions(3, start=torch.tensor([0, 4])).index("cpu")
        tensor([[0, 1, 2],
                [4, 5, 6]])
    """

    count: int
    start: Number = 0
    offset: Number = 0
    ring: Number = field(default=0, kw_only=True)
    filled: Number | None = field(default=None, kw_only=True)
    indices: Int[Tensor, "#B L"] | None = field(default=None, kw_only=True)
    positions: Int[Tensor, "#B L"] | Int[Tensor, "A #B L"] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        plain = type(self.count) is type(self.start) is type(self.offset) is int
        plain = plain and self.filled is self.indices is self.positions is None and not torch.compiler.is_exporting()
        plain = plain and isinstance(self.ring, int) and self.ring == 0 <= self.count < LIMIT
        if plain and -LIMIT < self.start < LIMIT and -LIMIT < self.offset < LIMIT:
            return  # nearly every call comes through here
        if integer(self.count, "The number of tokens") < 0:
            raise ShapeError(f"A run of {self.count} tokens does not exist; give 0 or more.")
        _number(self.start, "The start of a run of tokens")
        _number(self.offset, "The offset of a run of tokens")
        _number(self.ring, "The ring of a run of tokens")
        if self.filled is not None:
            _number(self.filled, "How many of the tokens are there")
        if self.indices is not None:
            _numbers(self.indices, self.count, (2,), "indices")
        if self.positions is not None:
            _numbers(self.positions, self.count, (2, 3), "positions")
            if self.positions.dim() == 3 and len(self.positions) == 1:  # one axis is none
                object.__setattr__(self, "positions", self.positions[0])
        for name in ("start", "offset", "ring", "filled"):  # in fewer bits, sums and differences would not fit
            value = getattr(self, name)
            if isinstance(value, Tensor) and value.dtype not in (torch.int32, torch.int64):
                object.__setattr__(self, name, value.to(torch.int64))

    # As for masks: equal numbers are equal, tensors are compared by identity, since reading them would wait.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Positions) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return tuple(id(v) if isinstance(v, Tensor) else v for v in self._values())

    def _values(self) -> tuple[Any, ...]:
        return self.count, self.start, self.offset, self.ring, self.filled, self.indices, self.positions

    def tensors(self) -> list[Tensor]:
        """Every tensor among the numbers."""
        return [v for v in self._values() if isinstance(v, Tensor)]

    @property
    def is_run(self) -> bool:
        """Whether consecutive indices say it all, without a ring, empty places or a tensor of indices."""
        ring = isinstance(self.ring, Tensor) or self.ring != 0
        return not ring and self.filled is None and self.indices is None

    @property
    def is_plain(self) -> bool:
        """Whether three numbers say it all: the count, the start and the offset."""
        plain = type(self.start) is type(self.offset) is type(self.ring) is int and self.ring == 0
        return plain and self.filled is self.indices is self.positions is None

    @property
    def stop(self) -> Number:
        """Index of the token after the last one that is there."""
        if self.indices is not None:
            return self.indices.amax(-1) + 1 if self.count else self.indices.new_zeros(self.indices.shape[0])
        return self.start + (self.count if self.filled is None else self.filled)

    @property
    def axes(self) -> int:
        """Along how many axes a token has a position."""
        return 1 if self.positions is None or self.positions.dim() == 2 else self.positions.shape[0]

    def index(self, device: torch.device | str) -> Int[Tensor, "#B L"]:
        """Indices as int64; a batch dimension of one where every row has the same."""
        if self.indices is not None:
            return self.indices.to(torch.int64)
        if isinstance(self.start, Tensor) or isinstance(self.ring, Tensor) or self.ring != 0:
            return _column(self.start) + self.column(device)
        return torch.arange(self.start, self.start + self.count, device=device)[None]

    def position(self, device: torch.device | str) -> Int[Tensor, "#B L"] | Int[Tensor, "A #B L"]:
        """Positions as int64, in the same form; axes, if several, come first."""
        if self.positions is not None:
            return self.positions.to(torch.int64)
        return self.index(device) + _column(self.offset)

    def column(self, device: torch.device | str) -> Int[Tensor, "#B L"]:
        """What number in the order of tokens lies at each place; tensors of masks and biases follow that order."""
        place = torch.arange(self.count, device=device)[None]
        if isinstance(self.ring, int) and self.ring == 0:
            return place
        return (place - _column(self.ring)) % max(1, self.count)

    def column_of(self, b: Int[Tensor, "#B #H #T #S"], index: Int[Tensor, "#B #H #T #S"]) -> Tensor:
        """The same for tokens that are known by row of the batch and index."""
        if self.indices is None:
            return index - (self.start[b] if isinstance(self.start, Tensor) else self.start)
        order = self.indices.to(torch.int64).sort(-1)
        rows = max(b.shape[0], order.values.shape[0], index.shape[0])
        asked = index.expand(rows, *index.shape[1:])
        found = torch.searchsorted(order.values.expand(rows, -1).contiguous(), asked.flatten(1).contiguous())
        found = found.clamp(max=max(0, self.count - 1))
        return order.indices.expand(rows, -1).gather(1, found).unflatten(1, asked.shape[1:])

    def there(self, device: torch.device | str) -> Bool[Tensor, "#B L"] | None:
        """Which places hold a token; None when all do."""
        if self.indices is not None:
            return self.indices >= 0
        return None if self.filled is None else self.column(device) < _column(self.filled)


def plain(value: Any) -> Any:
    """A number of numpy as one of Python; anything else as it is."""
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0 else value


def integer(value: Any, what: str) -> int:
    """A whole number that fits 32 bits, as it is; anything else is refused as ``what``."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise ShapeError(f"{what} is {value!r:.40}; give a whole number.")
    # an exported file would keep the question as a condition on its sizes
    if isinstance(value, int) and not torch.compiler.is_exporting() and abs(value) >= LIMIT:
        raise ShapeError(f"{what} needs {value.bit_length()} bits; give a whole number that fits 31.")
    return value  # type: ignore[return-value]


def _number(value: Any, what: str) -> None:
    if not isinstance(value, Tensor):
        integer(value, what)
    elif value.is_floating_point() or value.dtype == torch.bool or value.dim() != 1:
        raise ShapeError(
            f"{what} is a {value.dtype} tensor of shape {tuple(value.shape)}; give one integer per row, (batch,)."
        )


def _numbers(value: Any, count: int, dims: tuple[int, ...], name: str) -> None:
    if not isinstance(value, Tensor) or value.is_floating_point() or value.dtype == torch.bool:
        kind = f"a {value.dtype} tensor" if isinstance(value, Tensor) else type(value).__name__
        raise ShapeError(f"The {name} of tokens are {kind}; give a tensor of integers, (batch, tokens).")
    if value.dim() not in dims or value.shape[-1] != count:
        raise ShapeError(
            f"The {name} of tokens have shape {tuple(value.shape)} for {count} tokens; give (batch, {count}) or "
            f"(1, {count})" + (f", or (axes, batch, {count})." if 3 in dims else ".")
        )


def _column(value: Number) -> Any:
    return value.to(torch.int64)[:, None] if isinstance(value, Tensor) else value
