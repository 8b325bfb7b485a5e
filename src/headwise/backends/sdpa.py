"""torch's scaled_dot_product_attention, in its best form.

``is_causal`` only where it means the same, slices instead of masks, windows in blocks, grouped heads without copies,
and the log-sum-exp of torch's fused CPU kernel for sinks.
"""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from headwise.backends.base import Backend, Inputs
from headwise.masks import Causal, Full
from headwise.positions import Positions
from headwise.spans import Spans, surely

FEW_QUERIES = 16  # up to here, grouped heads are folded into the query rows: the keys are then read once per group
BLOCK = 128  # query rows taken together, at least, where the mask is a band
TOGETHER = 2**14  # query rows of all heads that go through the kernel at once, in blocks


class Sdpa(Backend):
    """torch.nn.functional.scaled_dot_product_attention."""

    name = "sdpa"

    def why_not(self, x: Inputs) -> str | None:
        if any((low := mod.lowered()) is None or low.kind == "softcap" for mod in x.score_mods):
            names = ", ".join(dict.fromkeys(type(mod).__name__ for mod in x.score_mods))
            return f"it cannot modify scores ({names})"
        if x.score_mods and x.query.device.type != "cpu" and x.query.dtype.itemsize == 2:
            tiles = x.tiles()
            if len(x.score_mods) > 1 or not tiles or tiles[0].dtype != x.query.dtype:
                return "its kernels off the CPU take a bias in the dtype of the queries only"
        if x.dropout_p > 0 and x.seed is not None:
            return "its dropout follows torch's generator and cannot follow a seed"
        if torch._C._functorch.maybe_current_level() is not None:
            return "its kernels do not compose with function transforms (vmap, grad, jvp)"
        inputs = (x.query, x.key, x.value, x.sinks, *x.score_tensors())
        if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in inputs):
            return "its kernels have no forward-mode derivative"
        if x.lse == "gradient" and x.needs_grad:
            return "its log-sum-exp has no gradient"
        if x.lse != "no" or x.sinks is not None:
            if x.query.device.type != "cpu":
                return "its log-sum-exp, which sinks need too, is to be had on the CPU only"
            if torch.compiler.is_exporting():
                return (
                    "its log-sum-exp, which sinks need too, is a kernel of the CPU, and an exported file runs anywhere"
                )
            if x.dropout_p > 0:
                return "its log-sum-exp, which sinks need too, is not to be had with dropout"
            if x.needs_grad and any(t.requires_grad for t in x.score_tensors()):
                return "its log-sum-exp, which sinks need too, is not to be had with the gradient of a bias"
        return None

    def run(self, x: Inputs) -> tuple[Float[Tensor, "B H T V"], Float[Tensor, "B H T"] | None]:
        query, key, value = x.query, x.key, x.value
        spans = x.spans() if _may_slice(x) else None
        causal, tile = False, None
        if spans is not None and spans.is_numbers and not x.tiles():
            band = _thin_band(x, spans)
            if band is not None:
                return self._in_blocks(x, *spans.reach(), *band)
            start, stop = spans.reach()
            # slices, not masks: they are free, and what nobody sees cannot leak
            key, value = key[..., start:stop, :], value[..., start:stop, :]
            inner = x.mask.spans(x.queries, Positions(stop - start, x.keys.start + start, x.keys.offset))
            # a branch, here and for the heads: under torch.compile a condition is symbolic, which SDPA does not take
            if inner is not None and _is_causal(inner):
                causal = True
            if causal or (inner is not None and inner.is_full):
                allowed = None
            elif inner is None or torch.compiler.is_compiling():
                allowed = x.allowed()[..., start:stop]
            else:
                allowed = _band(inner, query.device)
            slots = slice(start, stop)
            if not causal and not spans.reaches_all:
                seen = x.allowed() if allowed is None else allowed
                query = query.masked_fill(~seen.any(-1, keepdim=True), 0)
        else:
            allowed, slots = x.allowed(), slice(None)
            # what no query sees may hold NaN, and SDPA would multiply it by zero
            unseen = ~_per_kv_head(allowed.any(-2), key.shape[1])[..., None]
            key, value = key.masked_fill(unseen, 0), value.masked_fill(unseen, 0)
            # likewise a query that may see nothing, whose output is zero whatever it holds
            query = query.masked_fill(~allowed.any(-1, keepdim=True), 0)
        if x.score_mods:
            zeros = torch.zeros((), dtype=_wide(query), device=query.device).expand(*query.shape[:3], x.key.shape[-2])
            tile = x.modify(zeros)[..., slots]
            if query.device.type != "cpu":
                tile = tile.to(query.dtype)  # torch's cuDNN kernel reads another dtype wrongly, without a word
        if tile is not None and causal:
            causal, allowed = False, x.allowed()[..., slots]
        if tile is not None and allowed is not None:
            tile = tile.masked_fill(~allowed, -torch.inf)
        if torch.compiler.is_exporting() and allowed is not None:
            # whatever runs the file may make a mean, or NaN, of a row that sees nothing
            dead = ~allowed.any(-1, keepdim=True)
            tile = None if tile is None else tile.masked_fill(dead, 0)
            out, lse = _attend(x, query, key, value, allowed | dead, tile, causal)
            return out.masked_fill(dead, 0), lse
        return _attend(x, query, key, value, allowed, tile, causal)

    def _in_blocks(
        self, x: Inputs, low: int, high: int, left: int, right: int, step: int
    ) -> tuple[Tensor, Tensor | None]:
        """The same in blocks of queries, each with the few keys that it reaches; equal blocks are rows of one batch.

        Work and memory then grow with T · width, where one mask for all queries has T · S entries.
        """
        batch, heads = x.query.shape[:2]
        together = max(1, TOGETHER // max(1, batch * heads * step))
        # pieces that are joined again, not slices: the gradient of a slice is as long as all the keys, in each block
        # what lies behind the band, such as places of a cache that are not filled, is left out
        queries, keys, values = (t.split(step, -2) for t in (x.query, x.key[..., :high, :], x.value[..., :high, :]))
        alike: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}  # in the order of the blocks
        for i, query in enumerate(queries):
            first, rows = i * step, query.shape[-2]
            ends = (first + left, first + rows - 2 + right)  # the first and the last slot of the band
            start, last = (min(max(end, low), high - 1) // step for end in ends)
            at = start * step
            edges = (max(0, low - at), min(high, (last + 1) * step) - at)
            kind = (i // together, rows, last - start, first + left - at, *edges)
            alike.setdefault(kind, []).append((i, start, last + 1 - start))
        outs: list[Tensor] = []
        lses: list[Tensor] = []
        for blocks in alike.values():
            (i, start, pieces), count = blocks[0], len(blocks)
            query = _stacked(queries[i : i + count], count)
            near = [start + block + j for block in range(count) for j in range(pieces)]
            key, value = (_stacked([side[j] for j in near], count) for side in (keys, values))
            stand = Positions(query.shape[-2], x.queries.start + i * step, x.queries.offset)
            place = Positions(key.shape[-2], x.keys.start + start * step, x.keys.offset)
            out, lse = self.run(replace(x, query=query, key=key, value=value, queries=stand, keys=place))
            outs.extend(out.unflatten(0, (count, batch)).unbind())
            lses.extend(() if lse is None else lse.unflatten(0, (count, batch)).unbind())
        return torch.cat(outs, -2), torch.cat(lses, -1) if lses else None


def _attend(
    x: Inputs,
    query: Float[Tensor, "B H T D"],
    key: Float[Tensor, "B K N D"],
    value: Float[Tensor, "B K N V"],
    allowed: Bool[Tensor, "#B #H T N"] | None,
    tile: Float[Tensor, "#B #H T N"] | None,
    causal: bool,
) -> tuple[Tensor, Tensor | None]:
    heads, kv_heads, rows, v_dim = query.shape[1], key.shape[1], query.shape[2], value.shape[-1]
    mask = allowed if tile is None else tile
    # the fused kernel wants one head size; zeros add nothing to a dot product, and nothing to a sum
    width = max(query.shape[-1], v_dim)
    query, key, value = (F.pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t for t in (query, key, value))
    fold = heads != kv_heads and not causal and (mask is None or surely(rows <= FEW_QUERIES))
    if fold:
        group = heads // kv_heads
        query = query.unflatten(1, (kv_heads, group)).flatten(2, 3)
        if mask is not None:
            mask = mask.expand(mask.shape[0], heads, rows, mask.shape[-1])
            mask = mask.unflatten(1, (kv_heads, group)).flatten(2, 3)

    lse = None
    if x.lse != "no" or x.sinks is not None or _differentiates_fused(x, query, key, mask):
        sinks = None
        if x.sinks is not None:
            sinks = x.sinks.to(_wide(query))[None, :, None].expand(query.shape[0], heads, rows)
            sinks = sinks.unflatten(1, (kv_heads, group)).flatten(2, 3) if fold else sinks
        out, lse = _fused(query, key, value, mask, sinks, causal, x.scale)
    else:
        grouped = False
        if key.shape[1] != query.shape[1]:
            grouped = True
        out = F.scaled_dot_product_attention(
            query, key, value, mask, x.dropout_p, causal, scale=x.scale, enable_gqa=grouped
        )
    if fold:
        out = out.unflatten(2, (group, rows)).flatten(1, 2)
        lse = lse.unflatten(2, (group, rows)).flatten(1, 2) if lse is not None else None
    return out[..., :v_dim], lse if x.lse != "no" else None


def _differentiates_fused(x: Inputs, query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Whether torch would take its fused CPU kernel, whose own backward cannot be differentiated again.

    Compilers see torch's own node: they do not differentiate twice, and know how to fuse around it.
    """
    return (
        x.needs_grad
        and not torch.compiler.is_compiling()
        and x.query.device.type == "cpu"
        and x.dropout_p == 0
        and (mask is None or not mask.requires_grad)
        and 0 not in query.shape
        and 0 not in key.shape
    )


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Float[Tensor, "B H T"] | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    if 0 in query.shape or 0 in key.shape:  # the kernel divides by the sizes
        lse = torch.full(query.shape[:-1], -torch.inf, dtype=_wide(query), device=query.device)
        nothing = _zero(query)
        for tensor in (key, value):  # so that every input gets its gradient of zero
            heads = query.shape[1] // max(1, key.shape[1])
            nothing = nothing + _zero(tensor).sum(-2, keepdim=True).repeat_interleave(heads, 1)
        if sinks is not None:
            nothing, lse = nothing + _zero(sinks).to(query.dtype)[..., None], sinks
        return nothing, lse
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=_wide(query), device=mask.device).masked_fill(~mask, -torch.inf)
    # called by its own name, the kernel takes a stride of 1 in the last dimension for granted
    query, key, value = (_unit_stride(t) for t in (query, key, value))
    mask = None if mask is None else _unit_stride(mask)
    return _Fused.apply(query, key, value, sinks, mask, causal, scale)


def _zero(tensor: Tensor) -> Tensor:
    """Zeros that depend on a tensor, whatever it holds: 0 times NaN would be NaN."""
    return tensor.masked_fill(torch.ones((), dtype=torch.bool, device=tensor.device), 0)


def _unit_stride(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _Fused(torch.autograd.Function):
    """torch's fused CPU kernel with a log-sum-exp that is right, sinks, and a backward that can be differentiated.

    A sink is one more logit of a key without a value. With the log-sum-exp including it and the output scaled, the
    kernel's own backward gives the right gradients: its probabilities are exp(score - lse).
    """

    @staticmethod
    def forward(ctx, query, key, value, sinks, mask, causal, scale):  # type: ignore[no-untyped-def]
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = op(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
        if mask is not None:  # the kernel reports 0 for a row that sees nothing
            lse = lse.masked_fill((mask == -torch.inf).all(-1), -torch.inf)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype))
            share = torch.where(total == -torch.inf, 0, (lse - total).exp())
            out, lse = (out * share[..., None]).to(out.dtype), total
        ctx.save_for_backward(query, key, value, sinks, mask, out, lse)
        ctx.causal, ctx.scale = causal, scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad, _):  # type: ignore[no-untyped-def]
        query, key, value, sinks, mask, out, lse = ctx.saved_tensors
        if torch.is_grad_enabled():  # asked for a graph of the gradient: differentiate the plain formula instead
            # query, key and value may be one tensor, or made of one another: each gets its own part
            own = [t if t is None else t.view_as(t) for t in (query, key, value, sinks)]
            wanted = [t for t in own if t is not None and t.requires_grad]
            again = _plain(own[0], own[1], own[2], own[3], mask, ctx.causal, ctx.scale)
            found = iter(torch.autograd.grad(again, wanted, grad, create_graph=True, allow_unused=True))
            grads = [next(found) if t is not None and t.requires_grad else None for t in own]
            return *grads, None, None, None
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        # a finite stand-in for the rows that see nothing: their probabilities are exp(-inf - 0) = 0
        finite = lse.masked_fill(lse == -torch.inf, 0)
        # a broadcast gradient (that of a sum) has strides of 0, which the kernel would read as they are
        d_query, d_key, d_value = op(
            grad.contiguous(),
            query,
            key,
            value,
            out,
            finite,
            0.0,
            ctx.causal,
            attn_mask=mask,
            scale=ctx.scale,
        )
        d_sinks = None
        if sinks is not None:
            d_sinks = -(sinks - finite).exp() * (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        return d_query, d_key, d_value, d_sinks, None, None, None


def _plain(query, key, value, sinks, mask, causal, scale):  # type: ignore[no-untyped-def]
    """The same by torch's formula in matmuls, which can be differentiated to any order."""
    rows, slots = query.shape[-2], key.shape[-2]
    wide = _wide(query)
    if causal:
        seen = torch.ones(rows, slots, dtype=torch.bool, device=query.device).tril()
        mask = torch.zeros(rows, slots, dtype=wide, device=query.device).masked_fill(~seen, -torch.inf)
    if sinks is not None:  # one more key and value of zeros, whose score is the sink
        key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
        mask = torch.zeros((), dtype=wide, device=query.device) if mask is None else mask
        mask = torch.cat([mask.expand(*query.shape[:3], slots), sinks[..., None].to(wide)], -1)
    grouped = key.shape[1] != query.shape[1]
    op = torch.ops.aten._scaled_dot_product_attention_math
    return op(query.to(wide), key.to(wide), value.to(wide), mask, scale=scale, enable_gqa=grouped)[0].to(query.dtype)


def _may_slice(x: Inputs) -> bool:
    """Whether slices and ``is_causal`` may be tried: in an exported file, where they are right at every size."""
    if not torch.compiler.is_exporting() or isinstance(x.mask, Full):
        return True
    starts = (x.queries.start, x.keys.start)
    return (
        isinstance(x.mask, Causal)
        and not any(isinstance(start, Tensor) for start in starts)
        and surely(starts[0] == starts[1])
        and surely(x.queries.count == x.keys.count)
    )


def _stacked(pieces: tuple[Tensor, ...] | list[Tensor], count: int) -> Tensor:
    """Pieces of ``count`` blocks, each block's behind one another, as that many times the rows of the batch."""
    joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces, -2)
    return joined.unflatten(-2, (count, -1)).movedim(-3, 0).flatten(0, 1)


def _thin_band(x: Inputs, spans: Spans) -> tuple[int, int, int] | None:
    """Bounds of a band and the query rows of a block, where a block reaches few enough of the keys to pay; or None.

    A block has as many rows as the band is wide, so that half of what it computes lies in the band.
    """
    left: Any = spans.left
    right: Any = spans.right
    if torch.compiler.is_compiling():  # asked first: a compiler would make a graph for each number of blocks
        return None
    if spans.rows <= BLOCK or left is None or right is None or left >= right or x.score_mods:
        return None
    (start, stop), step = spans.reach(), max(BLOCK, right - left)
    pays = stop - start >= 2 * (step + right - left - 1) and x.queries.is_run
    return (left, right, step) if pays else None


def _band(spans: Spans, device: torch.device) -> Bool[Tensor, "1 1 T N"]:
    """The mask of keys none of which lies before the first or after the last, in booleans and not by indices."""
    left: Any = spans.left
    right: Any = spans.right
    seen = torch.ones(1, 1, spans.rows, spans.slots, dtype=torch.bool, device=device)
    seen = seen if left is None else seen.triu(left)
    return seen if right is None else seen.tril(right - 1)


def _is_causal(spans: Spans) -> bool:
    """Whether row t sees exactly the slots up to t, which is what SDPA's ``is_causal`` means."""
    no_left = spans.left is None or surely(spans.left + spans.rows - 1 <= 0)
    no_last = spans.last is None or surely(spans.last >= spans.slots)
    return surely(spans.right == 1) and surely(spans.first <= 0) and no_last and no_left


def _per_kv_head(seen: Bool[Tensor, "#B #H S"], kv_heads: int) -> Bool[Tensor, "#B #K S"]:
    return seen if seen.shape[1] == 1 else seen.unflatten(1, (kv_heads, -1)).any(2)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
