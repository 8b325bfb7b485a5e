"""The reference: the definition of attention, which every other backend is compared with.

    scores  = scale · query · keyᵀ, modified
    weights = softmax(scores) over the keys that the mask allows, and the sink where there is one
    output  = weights · value

A query that may see nothing gets zeros. It is computed in float32 at least, is differentiable to any order, and
without gradients runs in blocks of queries, so that memory grows with the number of keys and not with its square.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from headwise import philox
from headwise.backends.base import Backend, Inputs, Rows

Stage = Literal["scores", "capped", "biased", "weights"]
BLOCK = 2**23  # scores held at once where no gradient is needed: 32 MiB in float32


class Reference(Backend):
    """Attention by its definition. It runs everything."""

    name = "reference"

    def why_not(self, x: Inputs) -> str | None:
        return None

    def run(self, x: Inputs) -> tuple[Float[Tensor, "B H T V"], Float[Tensor, "B H T"] | None]:
        with plain_precision(x):
            parts = [attend(x, rows) for rows in blocks(x)]
        out_BHTV = torch.cat([out for out, _ in parts], -2).to(x.value.dtype)
        return out_BHTV, torch.cat([lse for _, lse in parts], -1) if x.lse != "no" else None


def attend(x: Inputs, rows: Rows) -> tuple[Float[Tensor, "B H R V"], Float[Tensor, "B H R"]]:
    """Output and log-sum-exp of chosen query rows."""
    weights_BHRS, lse_BHR, value_BHSV = softmax(x, rows)
    if x.dropout_p > 0:
        weights_BHRS = drop(x, weights_BHRS, rows)
    return weights_BHRS @ value_BHSV, lse_BHR


def softmax(
    x: Inputs, rows: Rows, stage: Stage = "weights"
) -> tuple[Float[Tensor, "B H R S"], Float[Tensor, "B H R"], Float[Tensor, "B H S V"]]:
    """Weights of chosen query rows before dropout (or scores on the way there), log-sum-exp, and the values."""
    wide = torch.promote_types(x.query.dtype, torch.float32)
    group = x.query.shape[1] // max(1, x.key.shape[1])
    query_BHRD = x.query[..., rows, :].to(wide)
    key_BHSD = x.key.to(wide).repeat_interleave(group, 1)
    value_BHSV = x.value.to(wide).repeat_interleave(group, 1)

    allowed_BHRS = x.allowed(rows).expand(*query_BHRD.shape[:3], key_BHSD.shape[-2])
    if stage in ("biased", "weights"):
        # what no query may see may hold anything (padding, unused slots), and 0 times NaN is NaN
        unseen_BHS1 = ~allowed_BHRS.any(-2)[..., None]
        key_BHSD, value_BHSV = key_BHSD.masked_fill(unseen_BHS1, 0), value_BHSV.masked_fill(unseen_BHS1, 0)
        # and so may a query that sees nothing: its zero would meet it in the gradient of the keys
        query_BHRD = query_BHRD.masked_fill(~allowed_BHRS.any(-1, keepdim=True), 0)

    scores_BHRS = query_BHRD @ key_BHSD.mT * x.scale
    if stage != "scores":
        mods = x.score_mods if stage != "capped" else _up_to_cap(x)
        scores_BHRS = x.modify(scores_BHRS, rows, mods)
    lse_BHR = query_BHRD.new_full(query_BHRD.shape[:-1], -torch.inf)
    if stage in ("scores", "capped"):
        return scores_BHRS, lse_BHR, value_BHSV
    scores_BHRS = scores_BHRS.masked_fill(~allowed_BHRS, -torch.inf)
    if stage == "biased" or (scores_BHRS.shape[-1] == 0 and x.sinks is None):
        return scores_BHRS, lse_BHR, value_BHSV

    keys = scores_BHRS.shape[-1]
    if x.sinks is not None:  # one more key, which carries no value
        sink_BHR1 = x.sinks.to(wide)[:, None, None].expand(*scores_BHRS.shape[:3], 1)
        scores_BHRS = torch.cat([scores_BHRS, sink_BHR1], -1)
    # a row that sees nothing would be 0/0: give it finite scores, then zeros, so that its gradient is zero as well
    dead_BHR1 = (scores_BHRS == -torch.inf).all(-1, keepdim=True)
    alive_BHRS = scores_BHRS.masked_fill(dead_BHR1, 0)
    lse_BHR = alive_BHRS.logsumexp(-1).masked_fill(dead_BHR1[..., 0], -torch.inf)
    return alive_BHRS.softmax(-1).masked_fill(dead_BHR1, 0)[..., :keys], lse_BHR, value_BHSV


def drop(x: Inputs, weights: Float[Tensor, "B H R S"], rows: Rows) -> Float[Tensor, "B H R S"]:
    """Dropout of the weights: by the counter rule where a seed is given, else from torch's generator."""
    if x.seed is None:
        return F.dropout(weights, x.dropout_p)
    kept = philox.keeps(x.seed, x.dropout_p, x.batch_index(), x.head_index(), *x.places("index", rows))
    return torch.where(kept, weights / (1 - x.dropout_p), 0)


def blocks(x: Inputs) -> list[slice]:
    """Query rows in blocks; all at once where a gradient is needed, or a compiler must not see the sizes."""
    batch, heads, count = x.query.shape[:3]
    if x.needs_grad or torch.compiler.is_compiling():
        return [slice(None)]
    step = max(1, BLOCK // max(1, batch * heads * x.key.shape[-2]))
    return [slice(first, first + step) for first in range(0, max(1, count), step)]


def plain_precision(x: Inputs) -> AbstractContextManager:
    """Autocast off: on the CPU it would turn an explicit float32 matmul into a half-precision one."""
    if x.query.is_meta:  # which has none
        return nullcontext()
    return torch.autocast(x.query.device.type, enabled=False)


def _up_to_cap(x: Inputs) -> tuple:
    """The modifications up to and including the last softcap."""
    caps = [i for i, mod in enumerate(x.score_mods) if (low := mod.lowered()) is not None and low.kind == "softcap"]
    return x.score_mods[: caps[-1] + 1] if caps else ()
