"""Checks: what the public border refuses, and what it says. Inside it, code trusts its inputs."""

import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from headwise.algebra import And, Mask, Or
from headwise.backends import named
from headwise.backends.base import Rows
from headwise.caches import FixedCache, KVCache
from headwise.errors import CacheError, ShapeError
from headwise.masks import Dense, PerHead
from headwise.positions import Positions
from headwise.rotary import RotaryEmbedding
from headwise.score_mods import ScoreMod
from headwise.shapes import strided

MaskLike = Mask | Bool[Tensor, "..."]
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def as_mask(mask: Any) -> Mask:
    """A mask as it is, or a boolean tensor as ``Dense``; anything else is refused."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        return Dense(mask)
    if isinstance(mask, type) and issubclass(mask, Mask):
        raise ShapeError(f"mask={mask.__name__} is a class; call it: {mask.__name__}().")
    raise ShapeError(f"mask= takes a Mask or a boolean tensor, not {type(mask).__name__}; leave it out for no mask.")


def as_score_mods(score_mods: Any) -> tuple[ScoreMod, ...]:
    """Score modifications as a tuple; anything that is none is refused."""
    if isinstance(score_mods, ScoreMod) or not isinstance(score_mods, Iterable):
        raise ShapeError(f"score_mods= is {type(score_mods).__name__}; give a list of ScoreMods, () for none.")
    score_mods = tuple(score_mods)
    for mod in score_mods:
        if isinstance(mod, type) and issubclass(mod, ScoreMod):
            raise ShapeError(f"score_mods holds the class {mod.__name__}; call it: {mod.__name__}(…).")
        if not isinstance(mod, ScoreMod):
            raise ShapeError(f"score_mods holds {type(mod).__name__}, no ScoreMod; wrap a function in CustomScore.")
    return score_mods


def check_scale(scale: Any, head_dim: int) -> float:
    """The scale as a number, 1/sqrt(D) for None."""
    if scale is None:
        return head_dim**-0.5 if head_dim else 1.0
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not abs(scale) <= sys.float_info.max:
        raise ShapeError(
            f"A scale of {scale!r:.40} cannot multiply scores; give a finite number, or None for 1/sqrt(D)."
        )
    return float(scale)


def check_dropout(dropout_p: Any) -> float:
    """The dropout probability as a number of at least 0 and below 1."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)) or not 0 <= dropout_p < 1:
        raise ShapeError(
            f"A dropout probability of {dropout_p!r} is outside [0, 1); it is the share of weights dropped."
        )
    return float(dropout_p)


def check_tensors(query: Any, key: Any, value: Any) -> None:
    """Refuse queries, keys and values whose sizes or devices do not fit together."""
    for tensor, name in ((query, "query"), (key, "key"), (value, "value")):
        check_tensor(tensor, name)
        if tensor.dim() != 4:
            raise ShapeError(
                f"{name} has {tensor.dim()} dimensions, not 4: (batch, heads, tokens, head size). Use unflatten and "
                "transpose to split heads, or MultiHeadAttention, which does."
            )
    (batch, heads, _, size), (key_batch, key_heads, keys, key_size) = query.shape, key.shape
    value_batch, value_heads, values, _ = value.shape
    if not batch == key_batch == value_batch:
        batches = f"query {batch}, key {key_batch}, value {value_batch}"
        raise ShapeError(f"The batch sizes differ: {batches}. Expand the smaller ones if that is what you mean.")
    if key_heads != value_heads:
        raise ShapeError(f"{key_heads} key heads and {value_heads} value heads differ; give as many of each.")
    if heads and (key_heads == 0 or heads % key_heads):
        raise ShapeError(f"{heads} query heads cannot share {key_heads} key heads evenly.")
    if size != key_size:
        raise ShapeError(f"Queries of size {size} cannot meet keys of size {key_size}; make them equal.")
    if keys != values:
        raise ShapeError(f"{keys} keys and {values} values differ; each key needs one value.")
    same_device(key, query, "key")
    same_device(value, query, "value")


def check_tensor(tensor: Any, name: str) -> None:
    """Refuse what is no ordinary tensor."""
    if not isinstance(tensor, Tensor):
        raise ShapeError(f"{name} is {type(tensor).__name__}, not a tensor; make it one first.")
    strided(tensor, name)


def check_dtypes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse dtypes that attention does not compute with, or that differ."""
    if query.dtype not in FLOATS:
        raise ShapeError(
            f"Attention needs float16, bfloat16, float32 or float64, not {query.dtype}; convert the inputs first."
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ShapeError(
            f"The dtypes differ: query {query.dtype}, key {key.dtype}, value {value.dtype}. Convert them to one."
        )


def check_dtype(tokens: Tensor, projection: nn.Module, name: str) -> None:
    """Refuse tokens of another dtype than the weights that they meet in a linear layer that nobody has wrapped."""
    if getattr(getattr(projection, "weight", None), "dtype", None) == tokens.dtype:
        return
    if type(projection) is not nn.Linear or projection._forward_pre_hooks or "forward" in vars(projection):
        return
    if tokens.is_meta or not torch.is_autocast_enabled(tokens.device.type):
        raise ShapeError(
            f"{name} is {tokens.dtype}, but the layer's weights are {projection.weight.dtype}; convert one of them."
        )


def as_positions(positions: Any, base: Positions, query: Tensor, name: str) -> Positions:
    """Positions of ``base.count`` tokens: as given, ``base`` with a tensor of positions, or ``base`` for None."""
    if positions is None:
        return base
    if isinstance(positions, Tensor):
        positions = positions[None] if positions.dim() == 1 else positions
        positions = replace(base, offset=0, positions=positions)
    if not isinstance(positions, Positions):
        raise ShapeError(
            f"The {name} positions are {type(positions).__name__}; give Positions(count, start), or a tensor of whole "
            "numbers, (tokens,) or (batch, tokens)."
        )
    if positions.count != base.count:
        raise ShapeError(
            f"The {name} positions are for {positions.count} tokens, but there are {base.count}; give one each."
        )
    for tensor in positions.tensors():
        rows = tensor.shape[0] if tensor.dim() == 1 else tensor.shape[-2]
        if rows != query.shape[0] and (rows != 1 or tensor.dim() == 1):
            raise ShapeError(
                f"The {name} positions are for {rows} rows, the call has {query.shape[0]}; give (batch, tokens), or "
                "(axes, batch, tokens) where a token has several."
            )
        same_device(tensor, query, f"tensor of {name} positions")
    return positions


def check_seed(seed: Any, query: Tensor) -> int | Tensor | None:
    """A seed for the counter rule: a whole number of 64 bits, an int64 tensor of shape (), or None."""
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.dim() != 0:
            raise ShapeError(
                f"A seed is {seed.dtype} of shape {tuple(seed.shape)}; give one int64 number, of shape ()."
            )
        if seed.device.type != "cpu":
            same_device(seed, query, "seed")
    elif seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ShapeError(f"A seed is {type(seed).__name__}; give a whole number, or None for torch's generator.")
    elif seed is not None and not 0 <= seed < 2**64:
        raise ShapeError(f"A seed of {seed:#x} is not in [0, 2**64); give one of 64 bits.")
    return seed


def row_numbers(rows: Any, query: Tensor) -> Rows:
    """Rows of a call as a slice, or as a tensor of numbers from 0."""
    count = query.shape[-2]
    if rows is None or isinstance(rows, slice):
        rows = slice(None) if rows is None else rows
        if not all(n is None or isinstance(n, int) for n in (rows.start, rows.stop, rows.step)) or (rows.step or 1) < 1:
            raise ShapeError(f"rows={rows} does not count forward in whole numbers; list the rows instead.")
        return rows
    if isinstance(rows, Tensor) and rows.is_meta:
        raise ShapeError("rows= is on meta, which holds no numbers; give a list.")
    listed = rows.tolist() if isinstance(rows, Tensor) else rows
    if not isinstance(listed, (list, tuple, range)) or not all(type(r) is int for r in listed):
        raise ShapeError(f"rows={rows!r} are no row numbers; give a list of whole numbers, a slice, or None for all.")
    if any(not -count <= r < count for r in listed):
        raise ShapeError(f"Rows {list(listed)} were asked for, but there are {count} queries; count them from 0.")
    return torch.tensor([r % count for r in listed], dtype=torch.int64, device=query.device)


def same_device(tensor: Tensor, query: Tensor, what: str, beside: str = "query") -> None:
    """Refuse a tensor on another device than that of the query, or of what else it stands beside."""
    if tensor.device != query.device:
        raise ShapeError(f"The {what} is on {tensor.device} and the {beside} on {query.device}; move it with .to().")


def check_sinks(sinks: Any, query: Tensor) -> None:
    """Refuse sinks that are not one number per query head."""
    if sinks is None:
        return
    check_tensor(sinks, "sinks")
    heads = query.shape[1]
    if sinks.shape != (heads,) or sinks.dtype not in FLOATS:
        given = f"{sinks.dtype} of shape {tuple(sinks.shape)}"
        raise ShapeError(
            f"Sinks are {given}, but there are {heads} query heads; give one floating point number per head."
        )
    same_device(sinks, query, "sinks")


def check_partials(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Refuse partial results that do not belong together."""
    named = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    for name, tensor in named.items():
        check_tensor(tensor, name)
        if tensor.dtype not in FLOATS or (name == "out_b" and tensor.dtype != out_a.dtype):
            raise ShapeError(f"{name} is {tensor.dtype} beside out_a of {out_a.dtype}; give one floating point dtype.")
        same_device(tensor, out_a, name, "first output")
    if out_a.dim() != 4 or out_a.shape != out_b.shape or lse_a.shape != lse_b.shape or lse_a.shape != out_a.shape[:-1]:
        raise ShapeError(
            f"Partial outputs of shapes {tuple(out_a.shape)} and {tuple(out_b.shape)} with log-sum-exps "
            f"{tuple(lse_a.shape)} and {tuple(lse_b.shape)} do not belong together; outputs are (batch, heads, "
            "queries, size), and a log-sum-exp is its output's shape without the last dimension."
        )


def check_size(value: Any, name: str) -> int:
    """A size of a layer: a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ShapeError(f"{name} is {value!r}; give a whole number of at least 1.")
    return value


def check_switches(*switches: Any) -> None:
    """Refuse switches of a layer that are neither True nor False."""
    if not all(isinstance(switch, bool) for switch in switches):
        raise ShapeError(f"Biases, sinks and rotate_first are switched by True and False, not by {switches}.")


def check_weight_dtype(dtype: Any) -> None:
    """Refuse a dtype that cannot hold weights."""
    if dtype is not None and dtype not in FLOATS:
        raise ShapeError(f"dtype={dtype} cannot hold weights; give a floating point dtype such as torch.float32.")


def check_edit(other: Any, out: Tensor) -> None:
    """Refuse what an observer returned in place of an output, if it cannot take that place."""
    if not isinstance(other, Tensor) or other.shape != out.shape or other.dtype != out.dtype:
        given = f"{other.dtype} of shape {tuple(other.shape)}" if isinstance(other, Tensor) else type(other).__name__
        raise ShapeError(
            f"The observer returned {given} for an output of {out.dtype} of shape {tuple(out.shape)}; return its "
            "like, or None to leave it."
        )


def check_layer(layer: Any) -> None:
    """Refuse a layer whose parts do not fit it."""
    named(layer.backend)
    as_mask(layer.mask)
    if isinstance(layer.mask, Tensor) or any(True for _ in layer.mask.tensors()):
        raise ShapeError("A layer's own mask holds numbers only; give masks that hold tensors in the call.")
    layer.mask.bind(1, layer.num_heads, Positions(1), Positions(1))
    parts = {"q_norm": (layer.q_norm, nn.Module), "k_norm": (layer.k_norm, nn.Module)}
    parts["rotary"] = (layer.rotary, RotaryEmbedding)
    for name, (part, kind) in parts.items():
        if part is not None and not isinstance(part, kind):
            raise ShapeError(f"{name}= takes a {kind.__name__}, not {part!r}; leave it out for none.")
        size = getattr(part, "head_dim", getattr(part, "normalized_shape", layer.head_dim))
        size = size[-1] if isinstance(size, (tuple, list)) and size else size
        if size != layer.head_dim:
            raise ShapeError(f"{name}= is for heads of {size}, the layer's have {layer.head_dim}; make them equal.")
    for mod in layer.score_mods:
        wants = getattr(mod, "num_heads", layer.num_heads)
        if wants != layer.num_heads:
            raise ShapeError(
                f"{type(mod).__name__} is for {wants} heads, the layer has {layer.num_heads}; make them equal."
            )


def complete(
    layer: Any, query: Any, key: Any, value: Any, cache: Any = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The tokens of a call in batches, each defaulting to those before it; refuse what the layer does not take.

    Keys and values are None where a cache has them already.
    """
    wants = {"query": (query, layer.embed_dim, layer.q_proj)}
    recalls = isinstance(cache, FixedCache) and cache.is_filled
    if recalls:
        if key is not None and not (cache.is_from(key) and (value is None or value is key)):
            raise CacheError(
                f"The cache is filled with {cache.length} keys, and key= may be others; leave key out, or make a new "
                "FixedCache."
            )
    else:
        if isinstance(cache, FixedCache) and key is None:
            raise CacheError(
                "A FixedCache that is empty needs key tokens; give key= in the first call, or take DynamicCache for "
                "self-attention."
            )
        key = query if key is None else key
        value = key if value is None else value
        wants |= {"key": (key, layer.key_dim, layer.k_proj), "value": (value, layer.value_dim, layer.v_proj)}
    for name, (tokens, size, projection) in wants.items():
        if name == "query" or tokens is not query or size != layer.embed_dim:
            _check_tokens(layer, tokens, query, size, name)
        check_dtype(tokens, projection, name)
    if isinstance(cache, FixedCache) and not recalls:
        cache.remember(key if value is key else None)
    if recalls:
        return (query if query.dim() == 3 else query[None]), None, None
    if query.dim() == 3:
        return query, key, value
    # the same tokens stay the same tensor: that is how self-attention is known
    batched = {id(tokens): tokens[None] for tokens in (query, key, value)}
    return batched[id(query)], batched[id(key)], batched[id(value)]


def _check_tokens(layer: Any, tokens: Any, query: Any, size: int, name: str) -> None:
    if not isinstance(tokens, Tensor) or tokens.dim() not in (2, 3) or tokens.dim() != query.dim():
        shape = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        hint = " A mask goes into mask=." if isinstance(tokens, Mask) else ""
        raise ShapeError(f"{name} is {shape}; give (batch, tokens, {size}), or all (tokens, size) unbatched.{hint}")
    strided(tokens, name)
    if not tokens.is_floating_point():
        raise ShapeError(f"{name} is {tokens.dtype}; a layer takes floating point tokens, so embed ids first.")
    if tokens.shape[-1] != size:
        raise ShapeError(f"{name} has tokens of size {tokens.shape[-1]}, but the layer takes {size}; project them.")
    if layer.max_length is not None and tokens.shape[-2] > layer.max_length:
        raise ShapeError(
            f"{name} has {tokens.shape[-2]} tokens, more than the layer's max_length {layer.max_length}; cut them."
        )


def place(
    layer: Any,
    query: Tensor,
    key: Tensor | None,
    mask: Mask,
    cache: Any,
    lengths: Any,
    queries: Any,
    keys: Any,
) -> tuple[Positions, Positions]:
    """Where the tokens of a layer's call stand; see ``stand`` for what is not given."""
    if isinstance(cache, type) and issubclass(cache, KVCache):
        raise ShapeError(f"cache={cache.__name__} is a class; call it: {cache.__name__}(…).")
    if cache is not None and not isinstance(cache, KVCache):
        raise ShapeError(
            f"cache= takes a KVCache, not {type(cache).__name__}; give each layer its own, or leave it out for none."
        )
    if cache is None and lengths is not None:
        raise ShapeError("lengths= tells a cache what to keep, and there is none; hide padding with Padding(lengths).")
    rows = query.shape[-2]
    if cache is not None:
        cache.claim(layer)
        if cache.keeps is not None and not _looks_within(mask, cache.keeps):
            raise CacheError(
                f"The cache keeps the last {cache.keeps} tokens, but the mask lets a query look further back; join "
                f"Window({cache.keeps}) to it, or keep more tokens."
            )
        if layer.rotary is not None and layer.rotary.follows_length:
            raise CacheError(
                "The rotary schedule follows the length of each call, but a cache holds keys that are turned already; "
                "give the schedule the length= that you will reach."
            )
        total = 0 if isinstance(cache, FixedCache) else cache.length + rows
        if layer.max_length is not None and total > layer.max_length:
            raise ShapeError(
                f"The cache holds {cache.length} tokens and query has {rows} more, beyond the layer's max_length "
                f"{layer.max_length}; crop() the cache."
            )
    if isinstance(cache, FixedCache):
        if key is None and (lengths is not None or keys is not None):
            raise CacheError(
                f"The cache is filled with {cache.length} keys, and lengths and key_positions came with them; leave "
                "them out."
            )
        queries = as_positions(queries, cache.next_positions(rows), query, "query")
        return (queries, queries) if key is None else stand(query, key.shape[-2], queries, keys)
    slots = rows if key is None else key.shape[-2]
    if cache is not None:
        base = cache.next_positions(slots)
        if keys is not None or key is not query:
            keys = as_positions(keys, base, query, "key")
        if rows != slots:  # fewer queries than new keys are the last of them
            base = replace(base, count=rows, start=base.start + (slots if lengths is None else lengths) - rows)
        queries = as_positions(queries, base, query, "query")
    if keys is None and key is query and queries is not None:
        keys = queries = as_positions(queries, Positions(rows), query, "query")
    return stand(query, slots, queries, keys)


def stand(query: Tensor, slots: int, queries: Any, keys: Any) -> tuple[Positions, Positions]:
    """Positions of queries and keys: keys stand from 0 and the last query with the last key, unless given."""
    rows = query.shape[-2]
    if queries is None and keys is None:
        return Positions(rows, slots - rows), Positions(slots)
    keys = as_positions(keys, Positions(slots), query, "key")
    if queries is None and keys.positions is not None:
        if not keys.is_run or rows > slots:
            raise ShapeError(f"The positions of {slots} keys do not say those of {rows} queries; give them as well.")
        queries = keys.positions[..., slots - rows :]
    base = Positions(rows, start=keys.stop - rows, offset=keys.offset)
    queries = as_positions(queries, base, query, "query")
    if queries.indices is None and not queries.is_run:
        raise ShapeError("Queries stand in the order of the call; give ring= and filled= for keys only.")
    return queries, keys


def check_axes(queries: Positions, keys: Positions, score_mods: Iterable[ScoreMod]) -> None:
    """Refuse positions along several axes where a score modification reads one."""
    axes = max(queries.axes, keys.axes)
    for mod in score_mods:
        if axes > 1 and mod.over == "positions":
            raise ShapeError(
                f"{type(mod).__name__} reads one position per token, but these have {axes}, one per axis; give "
                "(batch, tokens)."
            )


def _looks_within(mask: Mask, tokens: int) -> bool:
    """Whether no query may look at other than the last ``tokens`` keys, itself counted, by the mask's numbers."""
    if isinstance(mask, And):
        return any(_looks_within(part, tokens) for part in mask.parts())
    if isinstance(mask, (Or, PerHead)):
        return all(_looks_within(part, tokens) for part in mask.parts())
    if any(True for _ in mask.tensors()):
        return False
    # as many neighbours as there are tokens, and one, meet every case of a mask that repeats
    far = 2**20
    spans = mask.spans(Positions(tokens + 1, start=far), Positions(far + tokens + 1))
    if spans is None:
        return False
    if spans.is_numbers:
        return isinstance(spans.left, int) and spans.left > far - tokens
    start = spans.tensor()[..., 0].amin(-1)
    within = (torch.arange(far, far + tokens + 1, device=start.device) - start < tokens).all()
    if torch.compiler.is_compiling():  # where reading a tensor would break the graph
        torch._assert_async(within, "The cache keeps fewer tokens than the mask lets a query look back.")
        return True
    return bool(within)
