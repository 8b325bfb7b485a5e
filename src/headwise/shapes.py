"""Shapes: what tensors that lie over scores must look like."""

import torch
from torch import Tensor

from headwise.errors import ShapeError


def broadcast_to_call(shape: torch.Size, batch: int, heads: int, rows: int, slots: int, what: str) -> None:
    """Refuse a tensor of two or four dimensions that does not broadcast to the scores of a call."""
    if torch.compiler.is_exporting():  # sizes that data decides cannot be asked; the file itself will not fit others
        return
    call = (batch, heads, rows, slots)[4 - len(shape) :]
    if any(n not in (1, size) for n, size in zip(shape, call, strict=True)):
        hint = " For padding, one entry per token of each row, write Padding(mask)." if what == "mask" else ""
        raise ShapeError(
            f"A {what} of shape {tuple(shape)} does not fit scores of shape {(batch, heads, rows, slots)} (batch, "
            "heads, queries, keys); each size must be equal or 1." + (hint if tuple(shape) == (batch, slots) else "")
        )


def check_tile(tensor: Tensor, what: str) -> None:
    """Refuse a tensor that cannot lie over scores: sparse, nested, or of neither two nor four dimensions."""
    strided(tensor, what)
    if tensor.dim() == 3:
        raise ShapeError(
            f"A {what} of shape {tuple(tensor.shape)} is ambiguous: its first dimension could be the batch or the "
            "heads. Give (queries, keys), or four dimensions that broadcast to (batch, heads, queries, keys)."
        )
    if tensor.dim() not in (2, 4):
        raise ShapeError(
            f"A {what} of shape {tuple(tensor.shape)} has {tensor.dim()} dimensions. Give (queries, keys), or four "
            "dimensions that broadcast to (batch, heads, queries, keys)."
        )


def strided(tensor: Tensor, what: str) -> None:
    """Refuse sparse and nested tensors, and other layouts that have no strides."""
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise ShapeError(f"The {what} is a {kind} tensor; make it an ordinary one, with padding or to_dense().")


def broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    """Whether a tensor of one shape can be expanded to the other."""
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(shape[::-1], to[::-1], strict=False))
