"""The kinds of attention that the texts compare, with equal parameters and the same way of being called.

Each has 4 E² weights for tokens of size E, and at most 4 E more, so that what a kind saves on scores it has for
values. A kind differs from another in its scores: what follows them is a softmax over the keys that the mask allows and
a weighted sum. All start with weights of the same spread.
"""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

import headwise
from headwise import Full, Mask

HEADS = (1, 2, 4, 8, 16)


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    """A linear layer that starts as the projections of headwise's layer do, so that no kind has a better start."""
    made = nn.Linear(inputs, outputs, bias=bias)
    nn.init.xavier_uniform_(made.weight)
    if bias:
        nn.init.zeros_(made.bias)
    return made


class OneScore(nn.Module):
    """Attention with one score for each query and key, however that is computed.

    Args:
        embed_dim: Size of a token.
        value_dim: Size of what is summed.
    """

    def __init__(self, embed_dim: int, value_dim: int) -> None:
        super().__init__()
        self.v_proj = linear(embed_dim, value_dim)
        self.out_proj = linear(value_dim, embed_dim)

    @abstractmethod
    def scores(self, query: Float[Tensor, "B T E"], key: Float[Tensor, "B S E"]) -> Float[Tensor, "B #T S"]:
        """How well each key fits each query; one row for all queries where it does not depend on them."""

    def forward(
        self,
        query: Float[Tensor, "B T E"],
        key: Float[Tensor, "B S E"] | None = None,
        value: Float[Tensor, "B S E"] | None = None,
        *,
        mask: Mask | None = None,
    ) -> Float[Tensor, "B T E"]:
        """Weigh the values by the softmax of the scores over the keys that the mask allows."""
        key = query if key is None else key
        value = key if value is None else value
        rows, slots = query.shape[1], key.shape[1]
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
        q, k = (slots - rows + torch.arange(rows))[None, None, :, None], torch.arange(slots)[None, None, None]
        allowed = (Full() if mask is None else mask).allowed(zero, zero, q, k)[0]
        weights = self.scores(query, key).masked_fill(~allowed, -torch.inf).softmax(-1)
        return self.out_proj(weights @ self.v_proj(value))


class Additive(OneScore):
    """Additive attention: v · tanh(W q + U k).

    Reference: Bahdanau et al., Neural Machine Translation by Jointly Learning to Align and Translate, 2014.
    https://arxiv.org/abs/1409.0473
    """

    def __init__(self, embed_dim: int) -> None:
        super().__init__(embed_dim, embed_dim)
        self.q_proj = linear(embed_dim, embed_dim)
        self.k_proj = linear(embed_dim, embed_dim)
        self.score = linear(embed_dim, 1)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return self.score(torch.tanh(self.q_proj(query)[:, :, None] + self.k_proj(key)[:, None])).squeeze(-1)


class FeedForward(OneScore):
    """Feed-forward attention: v · tanh(W k + b), without a query.

    Reference: Raffel and Ellis, Feed-Forward Networks with Attention Can Solve Some Long-Term Memory Problems, 2015.
    https://arxiv.org/abs/1512.08756
    """

    def __init__(self, embed_dim: int) -> None:
        super().__init__(embed_dim, embed_dim)
        self.k_proj = linear(embed_dim, 2 * embed_dim, bias=True)
        self.score = linear(2 * embed_dim, 1)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return self.score(torch.tanh(self.k_proj(key))).mT


class Scalar(OneScore):
    """Scalar attention as it is understood here: one learned scalar product w · k for each key, without a query."""

    def __init__(self, embed_dim: int) -> None:
        super().__init__(embed_dim, 2 * embed_dim)
        self.score = linear(embed_dim, 1)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return self.score(key).mT


class Mean(OneScore):
    """No attention: every key that the mask allows weighs the same. What is gained over this is due to scores."""

    def __init__(self, embed_dim: int) -> None:
        super().__init__(embed_dim, 2 * embed_dim)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return key.new_zeros(key.shape[0], 1, key.shape[1])


def with_heads(embed_dim: int, heads: int) -> nn.Module:
    """Multi-head attention, of which one head is the single head of the same width."""
    return headwise.MultiHeadAttention(embed_dim, heads, bias=False)


VARIANTS: dict[str, Callable[[int], nn.Module]] = {
    **{f"{h} head{'s' * (h > 1)}": partial(with_heads, heads=h) for h in HEADS},
    "additive": Additive,
    "feed-forward": FeedForward,
    "scalar": Scalar,
    "mean": Mean,
}
