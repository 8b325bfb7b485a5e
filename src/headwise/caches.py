"""Caches: keys and values of earlier tokens, kept between the calls of a generation."""

from abc import ABC, abstractmethod

from jaxtyping import Float, Int
from torch import Tensor

from headwise.positions import Positions


class KVCache(ABC):
    """Where a layer leaves keys and values for its next call; passed to ``forward`` and changed in place.

    Keys are stored rotated, so nothing is turned twice.
    """

    @abstractmethod
    def next_positions(self, count: int) -> Positions:
        """Where the next ``count`` tokens stand: after those that are stored."""

    @abstractmethod
    def append(
        self,
        key: Float[Tensor, "B K T D"],
        value: Float[Tensor, "B K T V"],
        positions: Positions,
        lengths: Int[Tensor, " B"] | None = None,
    ) -> tuple[Tensor, Tensor, Positions]:
        """Store new keys and values, and return all that the queries may look at with their positions.

        ``lengths`` says how many of the new tokens of each row are real; None means all.
        """
