"""The ONNX operators ``Attention`` (opsets 23 to 25) and ``RotaryEmbedding`` (23) in headwise's public functions.

What the operators say with flags, ranks and alignments becomes masks, score modifications and positions here. Inputs
and attributes have the names and the order of the operators; an attribute that is left out has its default.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from headwise import (
    Bias,
    Causal,
    Dense,
    Full,
    Padding,
    Positions,
    Softcap,
    Window,
    attention,
    attention_weights,
    rotate,
)

STAGES = ("scores", "capped", "biased", "weights")  # by qk_matmul_output_mode


def attention_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad_kv_seqlen: Tensor | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, keys and values with the past before them, and the stage of the scores that the mode names.

    ``softmax_precision`` needs nothing done: the softmax is in float32 at least, as the tolerances allow.
    """
    flat = query.dim() == 3
    if flat:  # (batch, tokens, heads · size)
        query, key, value = _split(query, q_num_heads), _split(key, kv_num_heads), _split(value, kv_num_heads)
    past = 0
    if past_key is not None:
        past = past_key.shape[2]
        key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
    count, slots = query.shape[2], key.shape[2]

    mask, score_mods = Full(), [Softcap(softcap)] if softcap else []
    if attn_mask is not None:
        tile = _tile(attn_mask, slots)
        if tile.dtype == torch.bool:
            mask = mask & Dense(tile)
        else:
            score_mods.append(Bias(tile))
    start = past  # index of the first query: a past stands before it, and without one the first query has the first key
    if nonpad_kv_seqlen is not None:  # a cache of its own length per row: the last query stands with the last real key
        mask = mask & Padding(nonpad_kv_seqlen)
        start = nonpad_kv_seqlen - count
    if is_causal:
        mask = mask & Causal()
    if left_window_size >= 0:
        mask = mask & Window(left=left_window_size)
    if right_window_size >= 0:
        mask = mask & Window(right=right_window_size)

    how = {"mask": mask, "score_mods": score_mods, "scale": scale, "query_positions": Positions(count, start=start)}
    out = attention(query, key, value, backend=backend, **how)
    stage = attention_weights(query, key, value, stage=STAGES[qk_matmul_output_mode], **how).to(query.dtype)
    return out.transpose(1, 2).flatten(2) if flat else out, key, value, stage


def rotary_operator(
    x: Tensor,
    cos_cache: Tensor,
    sin_cache: Tensor,
    position_ids: Tensor | None = None,
    *,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    """``x`` turned by the angles in the tables; with positions a table has a row per position, else one per token."""
    heads = _split(x, num_heads) if x.dim() == 3 else x
    if position_ids is not None:
        cos_cache, sin_cache = cos_cache[position_ids], sin_cache[position_ids]
    turned = 2 * cos_cache.shape[-1]
    if turned != (rotary_embedding_dim or heads.shape[-1]):
        raise ValueError(f"Tables for {turned} dimensions cannot turn {rotary_embedding_dim or heads.shape[-1]}.")
    out = rotate(heads, cos_cache, sin_cache, interleaved=bool(interleaved))
    return out.transpose(1, 2).flatten(2) if x.dim() == 3 else out


def _split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _tile(mask: Tensor, slots: int) -> Tensor:
    """A mask as headwise takes it: two or four dimensions, a column per key; keys beyond its last one are hidden."""
    short = slots - mask.shape[-1]
    mask = F.pad(mask, (0, short), value=False if mask.dtype == torch.bool else -torch.inf) if short > 0 else mask
    return mask[None] if mask.dim() in (1, 3) else mask  # ONNX aligns shapes on the right: (H, T, S) is per head
