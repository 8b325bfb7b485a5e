"""Record: keep what enters and leaves the attention of every layer while a model runs.

Nothing of the size of the weights is kept: weights and statistics are computed afterwards, from queries and keys, for
the rows that are asked for. So recording works on the fast path and at any length.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headwise.attention import MultiHeadAttention
from headwise.backends.base import Inputs, Rows
from headwise.backends.reference import Stage, plain_precision, softmax
from headwise.score_mods import Bias, ScoreMod

_ABSENT = object()


@dataclass(frozen=True, eq=False)
class Call:
    """One call of one attention layer.

    Args:
        layer: Name of the module.
        inputs: What entered, as it was: queries, keys, values, mask and so on, cut off from training.
        output: What left it, before the heads are merged.
        lse: Log-sum-exp of each softmax.
    """

    layer: str
    inputs: Inputs
    output: Float[Tensor, "B H T V"]
    lse: Float[Tensor, "B H T"]

    def weights(self, rows: Rows = slice(None), stage: Stage = "weights") -> Float[Tensor, "B H R S"]:
        """Weights (or scores, see ``attention_weights``) of chosen query rows, before dropout."""
        with torch.no_grad(), plain_precision(self.inputs):
            return softmax(self.inputs, rows, stage)[0]


@contextmanager
def record(model: nn.Module) -> Iterator[list[Call]]:
    """Record every attention call of a model while the block runs.

    Works on headwise layers, and on transformers models that run with the headwise plug-in. An observer that is set
    already goes on working and is put back at the end.

    Args:
        model: The model, or a single layer.

    Yields:
        A list that grows by a ``Call`` at each call, in the order of the calls.

    Example:
        >>> layer = MultiHeadAttention(8, 2)
        >>> with headwise.inspection.record(layer) as calls:
        ...     _ = layer(torch.randn(1, 5, 8))
        >>> calls[0].weights().shape
        torch.Size([1, 2, 5, 5])
    """
    calls: list[Call] = []
    before: list[tuple[nn.Module, Any]] = []
    try:
        for name, module in model.named_modules():
            # a transformers model passes its own attention module to the plug-in, which looks for the same attribute
            if isinstance(module, MultiHeadAttention) or "Attention" in type(module).__name__:
                before.append((module, getattr(module, "observer", _ABSENT)))
                module.observer = _Recorder(name, calls, getattr(module, "observer", None))
        yield calls
    finally:
        for module, observer in before:
            if observer is _ABSENT:
                del module.observer
            else:
                module.observer = observer


def _copied(mod: ScoreMod) -> ScoreMod:
    if isinstance(mod, Bias):  # which may hold a tensor with a history, and that cannot be copied deeply
        return Bias(mod.values.detach().clone())
    return copy.deepcopy(mod) if any(True for _ in mod.parameters()) else mod


class _Recorder:
    def __init__(self, layer: str, calls: list[Call], previous: Any) -> None:
        self.layer, self.calls, self.previous = layer, calls, previous

    def __call__(self, inputs: Inputs, output: Tensor, lse: Tensor) -> Tensor | None:
        other = None if self.previous is None else self.previous(inputs, output, lse)
        kept = replace(
            inputs,
            query=inputs.query.detach(),
            # copies: a later call may write its own into the memory of a cache
            key=inputs.key.detach().clone(),
            value=inputs.value.detach().clone(),
            # parameters, which a later step of training changes in place
            sinks=None if inputs.sinks is None else inputs.sinks.detach().clone(),
            score_mods=tuple(_copied(mod) for mod in inputs.score_mods),
            lse="no",
        )
        self.calls.append(Call(self.layer, kept, (output if other is None else other).detach(), lse.detach()))
        return other
