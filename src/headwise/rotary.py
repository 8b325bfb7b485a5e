"""Rotary position embedding: queries and keys turned by angles that grow with their position.

A score then depends on the distance between query and key alone. Two layouts exist of which dimensions form a pair:
half-split (i with i + D/2; the default, as in most checkpoints on the Hugging Face hub) and interleaved (2i with
2i + 1, as in the paper). They are related by a permutation of the dimensions of the projections.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headwise.errors import ShapeError
from headwise.positions import integer


def default_frequencies(
    head_dim: int, base: float, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Float[Tensor, " F"]:
    """Angle per position of each pair: base^(-2i/head_dim)."""
    return base ** (-torch.arange(0, head_dim, 2, dtype=dtype, device=device) / head_dim)


class RotaryEmbedding(nn.Module):
    """Turn each pair of dimensions of a query or key by position · frequency.

    Args:
        head_dim: Dimensions of a head, even and at least 2.
        base: Pair i turns by base^(-2i/head_dim) radians per token: the first by 1, the last by nearly 1/base.
        interleaved: Whether neighbours form a pair (2i, 2i + 1) rather than (i, i + head_dim/2).

    Raises:
        ShapeError: When ``head_dim`` is odd or below 2, ``base`` is not above 0, or the last dimension of the input
            differs from ``head_dim``.

    Example:
        >>> rotary = RotaryEmbedding(2)
        >>> rotary(torch.tensor([[[[1.0, 0.0], [1.0, 0.0]]]]), torch.tensor([[0, 1]]))
        tensor([[[[1.0000, 0.0000],
                  [0.5403, 0.8415]]]])

    Reference: Su et al., RoFormer, 2021. https://arxiv.org/abs/2104.09864
    """

    def __init__(self, head_dim: int, *, base: float = 10_000.0, interleaved: bool = False) -> None:
        super().__init__()
        if integer(head_dim, "head_dim of a rotary embedding") < 2 or head_dim % 2:
            raise ShapeError(f"Rotary embeddings turn pairs of dimensions, and {head_dim} is not even and above 0.")
        if isinstance(base, bool) or not isinstance(base, (int, float)) or not 0 < base < math.inf:
            raise ShapeError(f"A rotary base of {base!r} gives no angles; give a number above 0, such as 10000.")
        self.head_dim = head_dim
        self.base = base
        self.interleaved = interleaved

    def forward(self, x: Float[Tensor, "B H T D"], position: Int[Tensor, "#B T"]) -> Float[Tensor, "B H T D"]:
        """Rotate ``x`` as tokens that stand at ``position``."""
        if x.dim() != 4 or not x.is_floating_point():
            raise ShapeError(
                f'A rotary embedding was given {x.dtype} of shape {tuple(x.shape)}; give floating point "B H T D".'
            )
        if x.shape[-1] != self.head_dim:
            raise ShapeError(
                f"A rotary embedding for heads of {self.head_dim} was given heads of {x.shape[-1]}; make them equal."
            )
        rows = (1, x.shape[0])
        if (
            not isinstance(position, Tensor)
            or position.is_floating_point()
            or position.dim() != 2
            or position.shape[1] != x.shape[2]
            or position.shape[0] not in rows
        ):
            given = tuple(position.shape) if isinstance(position, Tensor) else type(position).__name__
            raise ShapeError(
                f"Positions {given} do not fit heads of shape {tuple(x.shape)}; give one whole number per token, "
                "(1, tokens) or (batch, tokens)."
            )
        # float32 at least, whatever the dtype of x: half precision cannot tell neighbouring positions above 2048
        # apart. An elementwise product, since autocast would turn a matmul into half precision.
        wide = torch.promote_types(x.dtype, torch.float32)
        frequencies = default_frequencies(self.head_dim, self.base, wide, x.device)
        angle = position[:, None, :, None].to(wide) * frequencies
        cos, sin = angle.cos(), angle.sin()
        a, b = x.to(wide).unflatten(-1, (-1, 2)).unbind(-1) if self.interleaved else x.to(wide).chunk(2, -1)
        turned = (a * cos - b * sin, a * sin + b * cos)
        y = torch.stack(turned, -1).flatten(-2) if self.interleaved else torch.cat(turned, -1)
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, base={self.base:g}" + (", interleaved" if self.interleaved else "")
