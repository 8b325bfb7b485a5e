"""Positions: where the tokens of a call stand.

A token has two coordinates. Its *index* is its place in its row of the batch, padding included; masks compare
indices. Its *position* is what rotary embeddings, ALiBi and relative biases see. They are the same unless a caller
says otherwise, with ``offset``.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from headwise.errors import ShapeError


@dataclass(frozen=True)
class Positions:
    """A run of consecutive tokens.

    Held as integers, so that comparing two of them costs nothing and needs no tensor.

    Args:
        count: Number of tokens in the run, 0 or more.
        start: Index of the first token. Negative when there are more queries than keys: the last query stands
            with the last key, so the first ones stand before every key.
        offset: What to add to an index to get a position.

    Raises:
        ShapeError: When ``count`` is negative, or one of the three is not a whole number.

    Example:
        >>> Positions(3, start=5).index("cpu")
        tensor([[5, 6, 7]])
        >>> Positions(3, start=5, offset=-5).position("cpu")
        tensor([[0, 1, 2]])
    """

    count: int
    start: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        integer(self.start, "The start of a run of tokens")
        integer(self.offset, "The offset of a run of tokens")
        if integer(self.count, "The number of tokens") < 0:
            raise ShapeError(f"A run of {self.count} tokens does not exist; give 0 or more.")

    @property
    def stop(self) -> int:
        """Index of the token after the last one."""
        return self.start + self.count

    def index(self, device: torch.device | str) -> Int[Tensor, "#B L"]:
        """Indices as int64, with a batch dimension of one: every row of the batch has the same."""
        return torch.arange(self.start, self.stop, device=device)[None]

    def position(self, device: torch.device | str) -> Int[Tensor, "#B L"]:
        """Positions as int64, in the same form."""
        return self.index(device) + self.offset


def integer(value: Any, what: str) -> int:
    """A whole number that fits 32 bits, as it is; anything else is refused as ``what``."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise ShapeError(f"{what} is {value!r:.40}; give a whole number.")
    if isinstance(value, int) and abs(value) >= 2**31:
        raise ShapeError(f"{what} needs {value.bit_length()} bits; give a whole number that fits 31.")
    return value  # type: ignore[return-value]
