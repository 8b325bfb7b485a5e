"""The algebra of masks: what a mask is, and ``&``, ``|`` and ``~`` of masks.

True means *may attend*. The masks themselves are in ``masks``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headwise.errors import ShapeError
from headwise.positions import Positions
from headwise.spans import Spans

Indices = Int[Tensor, "#B #H #T #S"]
Allowed = Bool[Tensor, "#B #H #T #S"]


class Mask(ABC):
    """Which keys each query may attend to. Combine with ``&``, ``|`` and ``~``.

    Example:
        >>> print(draw(Causal() & ~Window(2), 4))
        · · · ·
        · · · ·
        ■ · · ·
        ■ ■ · ·
    """

    listed = False  # whether its tensor was given as a list of numbers, which is on no device

    @abstractmethod
    def allowed(self, b: Indices, h: Indices, q: Indices, k: Indices) -> Allowed:
        """Whether query index ``q`` may attend to key index ``k``, in row ``b`` of the batch and head ``h``.

        The four are int64 tensors that broadcast against each other; compute with them elementwise.
        """

    def spans(self, queries: Positions, keys: Positions) -> Spans | None:
        """The same answer as key runs per query row, or None where runs cannot say it.

        ``queries.start`` and ``keys.start`` are ints, or tensors with one number per row of the batch; both sides
        are runs of consecutive indices here. What else a ``Positions`` can say is seen to by the caller.
        """
        return None

    def bind(self, batch: int, heads: int, queries: Positions, keys: Positions) -> "Mask":
        """Check the sizes against a call, and align what is counted from the call's last query and key."""
        return self

    def parts(self) -> "tuple[Mask, ...]":
        """The masks that this one is made of."""
        return ()

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held by this mask or by its parts."""
        for part in self.parts():
            yield from part.tensors()
        yield from (v for v in self._values() if isinstance(v, Tensor))

    def to(self, device: torch.device | str) -> "Mask":
        """The same mask with its tensors on another device."""
        return self._moved(lambda held: held.to(device))

    def beside(self, device: torch.device) -> "Mask":
        """The same mask with what was given as lists of numbers on the device of a call."""
        if self.listed:
            return self.to(device)
        return self._moved(lambda held: held.beside(device) if isinstance(held, Mask) else held)

    def _moved(self, move: Callable[[Any], Any]) -> "Mask":
        changes = {f.name: _each(getattr(self, f.name), move) for f in fields(self) if f.init}  # type: ignore[arg-type]
        return replace(self, **changes)  # type: ignore[type-var]

    def _values(self) -> tuple[Any, ...]:
        if not is_dataclass(self):
            raise ShapeError(
                f"{type(self).__name__} is no dataclass; put @dataclass(frozen=True, eq=False) above the class."
            )
        return tuple(getattr(self, name) for name in type(self).__dataclass_fields__)

    # Two masks are equal when they are of one kind and hold equal numbers; tensors are compared by identity,
    # since comparing their contents would wait for the device.
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((type(self), self._key()))

    def _key(self) -> tuple[Any, ...]:
        return tuple(id(v) if isinstance(v, Tensor) else v for v in self._values())

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, other)

    def __rand__(self, other: "Mask") -> "Mask":
        return And(other, self)

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, other)

    def __ror__(self, other: "Mask") -> "Mask":
        return Or(other, self)

    def __invert__(self) -> "Mask":
        return Not(self)

    def __bool__(self) -> bool:
        # `Causal() and Window(3)` would be Window(3)
        raise ShapeError("A mask is neither true nor false; join masks with &, | and ~, not with and, or and not.")


@dataclass(frozen=True, eq=False)
class And(Mask):
    """Attend where both masks allow it; what ``a & b`` builds.

    Example:
        >>> And(Causal(), Window(2)) == Causal() & Window(2)
        True
    """

    a: Mask
    b: Mask

    def __post_init__(self) -> None:
        _masks("&", self.a, self.b)

    def allowed(self, b: Indices, h: Indices, q: Indices, k: Indices) -> Allowed:
        return self.a.allowed(b, h, q, k) & self.b.allowed(b, h, q, k)

    def spans(self, queries: Positions, keys: Positions) -> Spans | None:
        a = self.a.spans(queries, keys)
        b = self.b.spans(queries, keys) if a is not None else None
        return a & b if a is not None and b is not None else None

    def bind(self, batch: int, heads: int, queries: Positions, keys: Positions) -> Mask:
        return And(self.a.bind(batch, heads, queries, keys), self.b.bind(batch, heads, queries, keys))

    def parts(self) -> tuple[Mask, ...]:
        return (self.a, self.b)

    def __repr__(self) -> str:
        # parentheses where & binds tighter or would join from the left: parse(repr(mask)) == mask
        a = f"({self.a!r})" if isinstance(self.a, Or) else repr(self.a)
        return f"{a} & ({self.b!r})" if isinstance(self.b, (And, Or)) else f"{a} & {self.b!r}"


@dataclass(frozen=True, eq=False)
class Or(Mask):
    """Attend where either mask allows it; what ``a | b`` builds.

    Example:
        >>> Or(Causal(), Prefix(2)) == Causal() | Prefix(2)
        True
    """

    a: Mask
    b: Mask

    def __post_init__(self) -> None:
        _masks("|", self.a, self.b)

    def allowed(self, b: Indices, h: Indices, q: Indices, k: Indices) -> Allowed:
        return self.a.allowed(b, h, q, k) | self.b.allowed(b, h, q, k)

    def spans(self, queries: Positions, keys: Positions) -> Spans | None:
        a = self.a.spans(queries, keys)
        b = self.b.spans(queries, keys) if a is not None else None
        return a | b if a is not None and b is not None else None

    def bind(self, batch: int, heads: int, queries: Positions, keys: Positions) -> Mask:
        return Or(self.a.bind(batch, heads, queries, keys), self.b.bind(batch, heads, queries, keys))

    def parts(self) -> tuple[Mask, ...]:
        return (self.a, self.b)

    def __repr__(self) -> str:
        return f"{self.a!r} | ({self.b!r})" if isinstance(self.b, Or) else f"{self.a!r} | {self.b!r}"


@dataclass(frozen=True, eq=False)
class Not(Mask):
    """Attend where the mask does not allow it; what ``~a`` builds.

    Example:
        >>> print(draw(Not(Causal()), 3))
        · ■ ■
        · · ■
        · · ·
    """

    a: Mask

    def __post_init__(self) -> None:
        _masks("~", self.a)

    def allowed(self, b: Indices, h: Indices, q: Indices, k: Indices) -> Allowed:
        return ~self.a.allowed(b, h, q, k)

    def spans(self, queries: Positions, keys: Positions) -> Spans | None:
        a = self.a.spans(queries, keys)
        return None if a is None else a.__invert__()  # torch.compile cannot trace ~ of such an object

    def bind(self, batch: int, heads: int, queries: Positions, keys: Positions) -> Mask:
        return Not(self.a.bind(batch, heads, queries, keys))

    def parts(self) -> tuple[Mask, ...]:
        return (self.a,)

    def __repr__(self) -> str:
        return f"~({self.a!r})" if isinstance(self.a, (And, Or)) else f"~{self.a!r}"


def spans_of(mask: Mask, queries: Positions, keys: Positions) -> Spans | None:
    """A bound mask as runs of key places per query row, or None where runs cannot say it."""
    if queries.indices is not None or keys.indices is not None:
        return None
    spans = mask.spans(queries, keys)
    if spans is None:
        return None
    if keys.filled is not None:  # joined after the algebra: no Not and no Or shows an empty place
        spans = spans & Spans(spans.rows, spans.slots, last=keys.filled)
    return spans.rolled(keys.ring)


def evaluate(
    mask: Mask,
    batch: int,
    heads: int,
    queries: Positions,
    keys: Positions,
    *,
    device: torch.device | str = "cpu",
    head_offset: int = 0,
    rows: slice | Int[Tensor, " R"] = slice(None),
) -> Bool[Tensor, "#B #H R S"]:
    """Evaluate a bound mask on chosen query rows of a call; dimensions of one are left to broadcast."""
    q = queries.index(device)[:, rows][:, None, :, None]
    k = keys.index(device)[:, None, None, :]
    b = torch.arange(batch, device=device)[:, None, None, None]
    h = torch.arange(head_offset, head_offset + heads, device=device)[None, :, None, None]
    seen = mask.allowed(b, h, q, k)
    lead = seen.shape[: max(0, seen.dim() - 2)]
    seen = seen.expand(*lead, q.shape[2], k.shape[3])[(None,) * (2 - len(lead))]
    there = keys.there(device)  # as in spans_of
    return seen if there is None else seen & there[:, None, None, :]


def _masks(sign: str, *sides: Any) -> None:
    for side in sides:
        if not isinstance(side, Mask):
            kind = side.__name__ if isinstance(side, type) else type(side).__name__
            raise ShapeError(
                f"{sign} was given {kind}, which is no mask; wrap a boolean tensor in Dense(tensor), and call a class."
            )


def _each(value: Any, move: Callable[[Any], Any]) -> Any:
    """A field of a mask, with the tensors and masks in it moved."""
    if isinstance(value, (Tensor, Mask)):
        return move(value)
    if isinstance(value, tuple) and value and isinstance(value[0], Mask):
        return tuple(move(held) for held in value)
    return value
