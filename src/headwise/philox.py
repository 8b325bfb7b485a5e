"""Counter-based dropout: which weights a seed drops, whatever computes them.

Whether a weight is dropped depends on the seed and on its own batch row, head, query and key alone, so every backend,
tiling and thread count that follows the rule drops the same ones.

The generator is Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011): four words for a
counter of (key // 4, query, head, batch row) under the seed's low and high word. Word ``key % 4``, divided by 2^32,
below ``dropout_p`` drops the weight.
"""

import math

import torch
from jaxtyping import Bool, Int
from torch import Tensor

_LOW = 0xFFFFFFFF


def keeps(
    seed: int | Int[Tensor, ""],
    dropout_p: float,
    b: Int[Tensor, "#B #H #T #S"],
    h: Int[Tensor, "#B #H #T #S"],
    q: Int[Tensor, "#B #H #T #S"],
    k: Int[Tensor, "#B #H #T #S"],
) -> Bool[Tensor, "B H T S"]:
    """Whether the weight at each index survives dropout with this seed."""
    return words(seed, b, h, q, k) >= math.ceil(dropout_p * 2**32)


def words(
    seed: int | Int[Tensor, ""],
    b: Int[Tensor, "#B #H #T #S"],
    h: Int[Tensor, "#B #H #T #S"],
    q: Int[Tensor, "#B #H #T #S"],
    k: Int[Tensor, "#B #H #T #S"],
) -> Int[Tensor, "B H T S"]:
    """The 32-bit word of each index, in an int64 tensor."""
    key = (seed & _LOW, (seed >> 32) & _LOW)
    four = philox(torch.div(k, 4, rounding_mode="floor") & _LOW, q & _LOW, h & _LOW, b & _LOW, key)
    lane = k % 4
    return torch.where(lane == 0, four[0], torch.where(lane == 1, four[1], torch.where(lane == 2, four[2], four[3])))


def philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, key: tuple) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x32 on counters held in int64; a product of two words wraps, and its bits stay right."""
    k0, k1 = key
    for _ in range(10):
        even, odd = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((odd >> 32) & _LOW) ^ c1 ^ k0,
            odd & _LOW,
            ((even >> 32) & _LOW) ^ c3 ^ k1,
            even & _LOW,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3
