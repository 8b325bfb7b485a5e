"""Packing: a ragged batch without padding, as one long row.

Sequences lie one after the other; a document mask keeps them apart, and positions begin again in each. A layer then
gives each sequence what it gives it alone, and nothing is computed for padding.

Masks compare indices, which run on through the row: a mask by distances (``Causal``, ``Window``) is the same in every
sequence, one that counts from the start of the row (``Chunk``, ``Prefix``, ``Padding``) is not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headwise.errors import ShapeError
from headwise.masks import Document
from headwise.positions import Positions, integer, plain

Tokens = Shaped[Tensor, "1 N E"] | Int[Tensor, "1 N"]


@dataclass(frozen=True, eq=False)
class Packed:
    """Sequences in one row, with the mask and the positions that go with it; made by ``pack``.

    Example:
        >>> packed = headwise.pack([torch.tensor([4, 2]), torch.tensor([9])])
        >>> packed.tokens, packed.lengths, packed.position_ids
        (tensor([[4, 2, 9]]), (2, 1), tensor([[0, 1, 0]]))
        >>> packed.pad(packed.tokens)
        tensor([[4, 2],
                [9, 0]])

    Attributes:
        tokens: All tokens, one sequence after the other, in a batch of one.
        lengths: Number of tokens of each sequence.
        mask: Lets a token see its own sequence only; join it with & to what else there is.
        positions: Where the tokens stand; they count from 0 in each sequence.
    """

    tokens: Tokens
    lengths: tuple[int, ...]
    mask: Document
    positions: Positions

    @property
    def position_ids(self) -> Int[Tensor, "1 N"]:
        """The positions as a tensor, as embeddings of positions and transformers' models take them."""
        return self.positions.position(self.tokens.device)

    def unpack(self, tokens: Shaped[Tensor, "1 N *sizes"]) -> list[Shaped[Tensor, "_ *sizes"]]:
        """The sequences of something that has one entry per token, such as the output of a layer."""
        return list(self._checked(tokens)[0].split(self.lengths))

    def pad(
        self, tokens: Shaped[Tensor, "1 N *sizes"], value: float | int = 0.0, *, left: bool = False
    ) -> Shaped[Tensor, "B T *sizes"]:
        """The same as a padded batch: ``value`` after each sequence, or before it."""
        side = "left" if left else "right"
        return pad_sequence(self.unpack(tokens), True, value, padding_side=side)

    def mask_to(self, keys: "Packed") -> Document:
        """For cross-attention: lets each sequence see the one of the same number in another packed batch."""
        if len(keys.lengths) != len(self.lengths):
            raise ShapeError(
                f"{len(self.lengths)} sequences cannot look at {len(keys.lengths)}; pack as many on each side."
            )
        return Document.from_lengths(list(self.lengths), list(keys.lengths), device=self.tokens.device)

    def _checked(self, tokens: Any) -> Tensor:
        count = sum(self.lengths)
        if not isinstance(tokens, Tensor) or tokens.dim() < 2 or tokens.shape[:2] != (1, count):
            given = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
            raise ShapeError(f"A packed batch of {count} tokens cannot unpack {given}; give (1, {count}, …).")
        return tokens


def pack(
    sequences: Sequence[Shaped[Tensor, "_ *sizes"]] | Shaped[Tensor, "B T *sizes"],
    *,
    lengths: Sequence[int] | Int[Tensor, " B"] | None = None,
    keep: Bool[Tensor, "B T"] | None = None,
) -> Packed:
    """Put sequences of different lengths into one row, without padding.

    Args:
        sequences: Tokens or token ids of each sequence: a list of (tokens, size) or (tokens,); or a padded batch
            (batch, tokens, size) or (batch, tokens) with ``lengths`` or ``keep``.
        lengths: How many tokens at the start of each row of a padded batch are real.
        keep: Which tokens of a padded batch are real, True for those; for padding on the left.

    Returns:
        The packed tokens with their mask and positions.

    Raises:
        ShapeError: When the sequences do not fit together, or a length exceeds the batch.

    Example:
        >>> layer = MultiHeadAttention(8, 2, mask=Causal(), rotary=RotaryEmbedding(4))
        >>> a, b = torch.randn(3, 8), torch.randn(5, 8)
        >>> packed = headwise.pack([a, b])
        >>> y = layer(packed.tokens, mask=packed.mask, positions=packed.positions)
        >>> [torch.allclose(part, layer(alone), atol=1e-6) for part, alone in zip(packed.unpack(y), (a, b))]
        [True, True]

    Reference: Krell et al., Efficient Sequence Packing without Cross-contamination, 2021.
    https://arxiv.org/abs/2107.02027
    """
    if isinstance(sequences, Tensor) and not sequences.is_nested:
        parts = _rows(sequences, lengths, keep)
    elif lengths is not None or keep is not None:
        raise ShapeError("lengths= and keep= are for a padded batch; a list of sequences has its lengths already.")
    else:
        parts = list(sequences.unbind()) if isinstance(sequences, Tensor) else list(sequences)
    if not parts or not all(isinstance(part, Tensor) and part.dim() >= 1 for part in parts):
        raise ShapeError("pack takes a list of at least one tensor (tokens, size), or a padded batch with lengths=.")
    sizes = {(tuple(part.shape[1:]), part.dtype, part.device) for part in parts}
    if len(sizes) > 1:
        raise ShapeError(
            f"Sequences of {len(sizes)} kinds do not fit into one row: "
            + ", ".join(f"size {shape}, {dtype} on {device}" for shape, dtype, device in sizes)
            + "; make them alike."
        )
    counts = [len(part) for part in parts]
    tokens = torch.cat(parts)[None]
    mask = Document.from_lengths(counts, device=tokens.device)
    position = torch.cat([torch.arange(n, device=tokens.device) for n in counts])[None]
    return Packed(tokens, tuple(counts), mask, Positions(sum(counts), positions=position))


def _rows(batch: Tensor, lengths: Any, keep: Any) -> list[Tensor]:
    if batch.dim() < 2 or (lengths is None) == (keep is None):
        raise ShapeError(
            f"A padded batch of shape {tuple(batch.shape)} needs (batch, tokens, …) and either lengths= or keep=."
        )
    rows, width = batch.shape[:2]
    if keep is not None:
        if not isinstance(keep, Tensor) or keep.dtype != torch.bool or keep.shape != (rows, width):
            given = f"{keep.dtype} of {tuple(keep.shape)}" if isinstance(keep, Tensor) else type(keep).__name__
            raise ShapeError(f"keep= is {given}; give booleans ({rows}, {width}), True at the real tokens.")
        return [row[real] for row, real in zip(batch, keep, strict=True)]
    counts = lengths.tolist() if hasattr(lengths, "tolist") else [plain(length) for length in lengths]
    if len(counts) != rows:
        raise ShapeError(f"{len(counts)} lengths were given for {rows} rows; give one each.")
    if any(not 0 <= integer(n, "A length") <= width for n in counts):
        raise ShapeError(f"Lengths {min(counts)} … {max(counts)} do not fit rows of {width} tokens.")
    return [row[:n] for row, n in zip(batch, counts, strict=True)]
