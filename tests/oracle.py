"""Attention by its definition, a row at a time: the values that tests compare with.

Each query row picks the keys it may see and touches no other (selection, never multiplication by zero), in
float64. It is made of ordinary differentiable indexing, so autograd gives the gradients as well.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None = None,
    *,
    scale: float | None = None,
    modify: Callable[[Tensor], Tensor] | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    drop: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output "B H T V", weights before dropout "B H T S" and log-sum-exp "B H T", in float64.

    Args:
        query: "B H T D".
        key: "B K S D"; query head h reads key head h // (H / K).
        value: "B K S V".
        allowed: Booleans that broadcast to "B H T S", True where a query may see a key; None for all.
        scale: What the dot products are multiplied by; None for 1/sqrt(D).
        modify: Score modifications as a function of all scores "B H T S" at once.
        softcap: A cap on the scaled scores, after ``modify``.
        bias: Added after the cap; broadcasts to "B H T S", and -inf in it hides a key.
        sinks: One more logit per head, in the sum of exponentials alone.
        drop: What the weights are multiplied by, dropout and its 1/(1-p) together.
    """
    batch, heads, rows, size = query.shape
    group = heads // key.shape[1] if key.shape[1] else 1
    slots = key.shape[2]
    everything = (batch, heads, rows, slots)
    query, key, value = query.double(), key.double(), value.double()
    allowed = torch.ones(everything, dtype=torch.bool) if allowed is None else allowed.expand(everything)
    if bias is not None:
        bias = bias.double().expand(everything)
        allowed = allowed & (bias != -math.inf)
    scale = 1 / math.sqrt(size) if scale is None else scale

    outs, weights, lses = [], [], []
    modified = None
    if modify is not None:  # over all pairs, hidden ones included: only those that are seen are read below
        modified = modify(torch.einsum("bhtd,bhsd->bhts", query, key.repeat_interleave(group, 1)) * scale)
    # taken apart once: the gradient of an index into a whole tensor is a whole tensor
    query_bht, key_bk, value_bk = _apart(query, 3), _apart(key, 2), _apart(value, 2)
    modified_bht = None if modified is None else _apart(modified, 3)
    for b in range(batch):
        for h in range(heads):
            keys, values = key_bk[b][h // group], value_bk[b][h // group]
            for t in range(rows):
                seen = allowed[b, h, t].nonzero()[:, 0]
                score = keys[seen] @ query_bht[b][h][t] * scale if modify is None else modified_bht[b][h][t][seen]
                if softcap is not None:
                    score = softcap * torch.tanh(score / softcap)
                if bias is not None:
                    score = score + bias[b, h, t, seen]
                logits = score if sinks is None else torch.cat([score, sinks[h, None].double()])
                if len(logits) == 0:
                    outs.append(value.new_zeros(value.shape[-1]))
                    weights.append(value.new_zeros(slots))
                    lses.append(value.new_tensor(-math.inf))
                    continue
                lse = logits.logsumexp(0)
                weight = (score - lse).exp()
                lses.append(lse)
                weights.append(value.new_zeros(slots).index_put((seen,), weight))
                if drop is not None:
                    weight = weight * drop.double().expand(everything)[b, h, t, seen]
                outs.append(weight @ values[seen])
    if not outs:
        shapes = ((batch, heads, rows, value.shape[-1]), everything, everything[:3])
        return tuple(value.new_zeros(shape) for shape in shapes)
    out, weight, lse = torch.stack(outs), torch.stack(weights), torch.stack(lses)
    return (
        out.unflatten(0, everything[:3]),
        weight.unflatten(0, everything[:3]),
        lse.unflatten(0, everything[:3]),
    )


def _apart(x: Tensor, levels: int) -> list | Tensor:
    return x if levels == 0 else [_apart(part, levels - 1) for part in x.unbind()]
