"""Wrong calls and the error that each gets: none passes, none crashes, and every text says what to do.

A row is a name, a call and the error's whole text (a pattern where a part of it is Python's own). These tests
run without the annotation hook, whose errors would come before headwise's own.
"""

import math
import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from headwise import (
    ALiBi,
    And,
    AttentionError,
    Backend,
    Bias,
    CacheError,
    Causal,
    Chunk,
    ConversionError,
    CustomMask,
    CustomScore,
    Dense,
    Document,
    DynamicCache,
    DynamicNTKSchedule,
    FixedCache,
    LinearSchedule,
    Llama3Schedule,
    LongRoPESchedule,
    Mask,
    MultiHeadAttention,
    Not,
    Padding,
    PerHead,
    Positions,
    Prefix,
    ProportionalSchedule,
    RelativeBias,
    RollingCache,
    RotaryEmbedding,
    ScoreMod,
    ShapeError,
    Softcap,
    StaticCache,
    UnsupportedError,
    Window,
    YaRNSchedule,
    attention,
    attention_weights,
    attention_with_lse,
    draw,
    merge_partials,
    pack,
    parse,
    rotate,
)
from headwise.backends.native import MISSING
from headwise.convert import fused

pytestmark = pytest.mark.plain

B, H, K, T, S, D, V = 2, 6, 3, 7, 11, 4, 5
query, key, value = torch.ones(B, H, T, D), torch.ones(B, K, S, D), torch.ones(B, K, S, V)
tokens = torch.ones(B, T, 12)
ABLE = "reference" if MISSING else "native, reference"
given = {"query": query, "key": key, "value": value}
meta = torch.device("meta")
booleans = torch.ones(T, S, dtype=torch.bool)
whole = torch.ones(T, S, dtype=torch.int64)


def call(**changes):
    """A right call of ``attention`` but for the changes."""
    return attention(**{**given, **changes})


def layer(*args, **changes):
    """A layer of 12 numbers and 3 heads but for the changes."""
    return MultiHeadAttention(*(args or (12, 3)), **changes)


class Plain(Mask):
    """A mask without the decorator that its class needs."""

    def allowed(self, b, h, q, k):
        return q == k


def observed(observer):
    """A call of a layer with an observer."""
    made = layer()
    made.observer = observer
    return made(tokens)


def partials(*changes):
    """A right call of ``merge_partials`` but for the changes, in its order."""
    right = [torch.ones(B, H, T, V), torch.ones(B, H, T)] * 2
    return merge_partials(*(r if c is None else c for r, c in zip(right, changes, strict=True)))


def filled(cache=None, **how):
    """A cache that holds the tokens."""
    cache = DynamicCache() if cache is None else cache
    layer(**how)(tokens, cache=cache)
    cache._owner = None  # for the next layer
    return cache


def rolled():
    return filled(RollingCache(5), mask=Causal() & Window(5))


def fixed(other=None):
    """A fixed cache that holds the tokens; then a call with others."""
    made, cache = layer(), FixedCache()
    made(tokens, tokens, cache=cache)
    if other is not None:
        made(tokens, other, cache=cache)
    cache._owner = None
    return cache


def axes(*counts):
    """Calls with a cache and positions along so many axes."""
    made, cache = layer(), DynamicCache()
    for count in counts:
        made(tokens, cache=cache, positions=torch.zeros(count, B, T).long())


def built(**changes):
    """A layer from a right configuration but for the changes; None takes a name out."""
    config = {"embed_dim": 12, "num_heads": 3, **changes}
    return MultiHeadAttention.from_config({name: value for name, value in config.items() if value is not None})


def changed(**parts):
    """The configuration of a layer with parts put in after it was built."""
    made = layer()
    for name, part in parts.items():
        setattr(made, name, part)
    return made.config()


def fuse(layout="qkv_proj", **changes):
    """A right call of ``fused`` but for entries of the state dict, with __ for a point; None takes one out."""
    state = layer().state_dict() | {name.replace("__", "."): value for name, value in changes.items()}
    return fused({name: value for name, value in state.items() if value is not None}, layout)


class Silent(Backend):
    """A backend with a fault: it forgets the log-sum-exp."""

    name = "silent"

    def why_not(self, x):
        return None

    def run(self, x):
        return x.query, None


# fmt: off
TENSORS = (
    ("a mask that is no dataclass", lambda: call(mask=Plain()),
        "Plain is no dataclass; put @dataclass(frozen=True, eq=False) above the class."),
    ("a list for a tensor", lambda: call(query=[[1.0]]),
        "query is list, not a tensor; make it one first."),
    ("nothing for a key", lambda: call(key=None),
        "key is NoneType, not a tensor; make it one first."),
    ("a NumPy array", lambda: call(value=value.numpy()),
        "value is ndarray, not a tensor; make it one first."),
    ("no head dimension", lambda: call(query=query[0]),
        "query has 3 dimensions, not 4: (batch, heads, tokens, head size). Use unflatten and transpose to "
        "split heads, or MultiHeadAttention, which does."),
    ("five dimensions", lambda: call(key=key[None]),
        "key has 5 dimensions, not 4: (batch, heads, tokens, head size). Use unflatten and transpose to "
        "split heads, or MultiHeadAttention, which does."),
    ("whole numbers", lambda: call(query=query.long(), key=key.long(), value=value.long()),
        "Attention needs float16, bfloat16, float32 or float64, not torch.int64; convert the inputs first."),
    ("booleans for numbers", lambda: call(query=query > 0, key=key > 0, value=value > 0),
        "Attention needs float16, bfloat16, float32 or float64, not torch.bool; convert the inputs first."),
    ("complex numbers", lambda: call(query=query + 0j, key=key + 0j, value=value + 0j),
        "Attention needs float16, bfloat16, float32 or float64, not torch.complex64; convert the inputs "
        "first."),
    ("eight-bit floats", lambda: call(**{n: t.to(torch.float8_e4m3fn) for n, t in given.items()}),
        "Attention needs float16, bfloat16, float32 or float64, not torch.float8_e4m3fn; convert the "
        "inputs first."),
    ("two dtypes", lambda: call(key=key.double()),
        "The dtypes differ: query torch.float32, key torch.float64, value torch.float32. Convert them to "
        "one."),
    ("half queries", lambda: call(query=query.half()),
        "The dtypes differ: query torch.float16, key torch.float32, value torch.float32. Convert them to "
        "one."),
    ("sparse tensor", lambda: call(query=query.to_sparse()),
        "The query is a sparse_coo tensor; make it an ordinary one, with padding or to_dense()."),
    ("nested tensor",
        lambda: call(query=torch.nested.nested_tensor([torch.ones(H, T, D), torch.ones(H, T - 1, D)])),
        "The query is a nested tensor; make it an ordinary one, with padding or to_dense()."),
    ("ragged tensor", lambda: call(value=torch.nested.nested_tensor([torch.ones(3, 2)], layout=torch.jagged)),
        "The value is a nested tensor; make it an ordinary one, with padding or to_dense()."),
    ("key on another device", lambda: call(key=key.to(meta)),
        "The key is on meta and the query on cpu; move it with .to()."),
    ("value on another device", lambda: call(value=value.to(meta)),
        "The value is on meta and the query on cpu; move it with .to()."),
    ("query on another device", lambda: call(query=query.to(meta)),
        "The key is on cpu and the query on meta; move it with .to()."),
    ("batch of one against two", lambda: call(query=query[:1]),
        "The batch sizes differ: query 1, key 2, value 2. Expand the smaller ones if that is what you mean."),
    ("three batches", lambda: call(key=key.expand(B, K, S, D)[:0]),
        "The batch sizes differ: query 2, key 0, value 2. Expand the smaller ones if that is what you mean."),
    ("key and value heads", lambda: call(value=value[:, :1]),
        "3 key heads and 1 value heads differ; give as many of each."),
    ("heads that do not divide",
        lambda: call(key=key[:, :1].expand(B, 4, S, D), value=value[:, :1].expand(B, 4, S, V)),
        "6 query heads cannot share 4 key heads evenly."),
    ("no key heads", lambda: call(key=key[:, :0], value=value[:, :0]),
        "6 query heads cannot share 0 key heads evenly."),
    ("more key heads than query heads", lambda: call(query=query[:, :1]),
        "1 query heads cannot share 3 key heads evenly."),
    ("key of another size", lambda: call(key=key[..., :3]),
        "Queries of size 4 cannot meet keys of size 3; make them equal."),
    ("fewer values than keys", lambda: call(value=value[:, :, :10]),
        "11 keys and 10 values differ; each key needs one value."),
)
MASKS = (
    ("no mask", lambda: call(mask=None),
        "mask= takes a Mask or a boolean tensor, not NoneType; leave it out for no mask."),
    ("mask as a class", lambda: call(mask=Causal),
        "mask=Causal is a class; call it: Causal()."),
    ("mask as text", lambda: call(mask="Causal()"),
        "mask= takes a Mask or a boolean tensor, not str; leave it out for no mask."),
    ("mask as a flag", lambda: call(mask=True),
        "mask= takes a Mask or a boolean tensor, not bool; leave it out for no mask."),
    ("masks in a list", lambda: call(mask=[Causal(), Window(3)]),
        "mask= takes a Mask or a boolean tensor, not list; leave it out for no mask."),
    ("padding as a mask", lambda: call(mask=torch.ones(B, S, dtype=torch.bool)),
        "A mask of shape (2, 11) does not fit scores of shape (2, 6, 7, 11) (batch, heads, queries, keys); each size "
        "must be equal or 1. For padding, one entry per token of each row, write Padding(mask)."),
    ("integer mask", lambda: call(mask=whole),
        "A mask of dtype torch.int64 does not say what its numbers mean. Pass Dense.from_zeros(tensor) where 0 "
        "hides, Padding(tensor.bool()) for one entry per token of each row, or booleans, True where a query may "
        "attend."),
    ("byte mask", lambda: call(mask=whole.to(torch.uint8)),
        "A mask of dtype torch.uint8 does not say what its numbers mean. Pass Dense.from_zeros(tensor) where 0 "
        "hides, Padding(tensor.bool()) for one entry per token of each row, or booleans, True where a query may "
        "attend."),
    ("float mask", lambda: call(mask=torch.zeros(T, S)),
        "A mask of dtype torch.float32 could mean numbers to be added or 0 for hidden. Pass Bias(tensor) "
        "in score_mods to add it to the scores, or Dense.from_zeros(tensor) where 0 hides."),
    ("complex mask", lambda: call(mask=booleans + 0j),
        "A mask of dtype torch.complex64 does not say what its numbers mean. Pass Dense.from_zeros(tensor) where 0 "
        "hides, Padding(tensor.bool()) for one entry per token of each row, or booleans, True where a query may "
        "attend."),
    ("mask of a row", lambda: call(mask=booleans[0]),
        "A mask of shape (11,) has 1 dimensions. Give (queries, keys), or four dimensions that broadcast "
        "to (batch, heads, queries, keys)."),
    ("mask of no dimension", lambda: call(mask=torch.tensor(True)),
        "A mask of shape () has 0 dimensions. Give (queries, keys), or four dimensions that broadcast to "
        "(batch, heads, queries, keys)."),
    ("mask of three dimensions", lambda: call(mask=booleans.expand(B, T, S)),
        "A mask of shape (2, 7, 11) is ambiguous: its first dimension could be the batch or the heads. "
        "Give (queries, keys), or four dimensions that broadcast to (batch, heads, queries, keys)."),
    ("mask of five dimensions", lambda: call(mask=booleans[None, None, None]),
        "A mask of shape (1, 1, 1, 7, 11) has 5 dimensions. Give (queries, keys), or four dimensions that "
        "broadcast to (batch, heads, queries, keys)."),
    ("mask turned round", lambda: call(mask=booleans.mT),
        "A mask of shape (11, 7) does not fit scores of shape (2, 6, 7, 11) (batch, heads, queries, keys); "
        "each size must be equal or 1."),
    ("mask for key heads", lambda: call(mask=booleans.expand(B, K, T, S)),
        "A mask of shape (2, 3, 7, 11) does not fit scores of shape (2, 6, 7, 11) (batch, heads, queries, "
        "keys); each size must be equal or 1."),
    ("mask for another batch", lambda: call(mask=booleans.expand(3, 1, T, S)),
        "A mask of shape (3, 1, 7, 11) does not fit scores of shape (2, 6, 7, 11) (batch, heads, queries, "
        "keys); each size must be equal or 1."),
    ("mask on another device", lambda: call(mask=booleans.to(meta)),
        "The mask is on meta and the query on cpu; move it with .to()."),
    ("sparse mask", lambda: call(mask=booleans.to_sparse()),
        "The mask is a sparse_coo tensor; make it an ordinary one, with padding or to_dense()."),
    ("dense mask of a list", lambda: Dense([[True]]),
        "A dense mask is a boolean tensor, not list; make it one first."),
    ("zeros in a list", lambda: Dense.from_zeros([[1, 0]]),
        "from_zeros reads a tensor in which 0 hides, not list; make it one first."),
    ("sparse zeros", lambda: Dense.from_zeros(whole.to_sparse()),
        "The mask is a sparse_coo tensor; make it an ordinary one, with padding or to_dense()."),
    ("zeros without heads", lambda: Dense.from_zeros(whole.expand(4, T, S)),
        "A mask of shape (4, 7, 11) mixes batch and heads in its first dimension; say how many heads there "
        "are with num_heads=."),
    ("zeros of too many heads", lambda: Dense.from_zeros(whole.expand(4, T, S), 3),
        "4 masks cannot be shared evenly by 3 heads; the first dimension must be batch * heads."),
    ("zeros of no heads", lambda: Dense.from_zeros(whole.expand(4, T, S), 0),
        "4 masks cannot be shared evenly by 0 heads; the first dimension must be batch * heads."),
    ("zeros of half heads", lambda: Dense.from_zeros(whole.expand(4, T, S), 2.0),
        "num_heads is 2.0; give a whole number."),
    ("zeros of five dimensions", lambda: Dense.from_zeros(whole[None, None, None]),
        "A mask of shape (1, 1, 1, 7, 11) has 5 dimensions. Give (queries, keys), or four dimensions that "
        "broadcast to (batch, heads, queries, keys)."),
    ("length below 0", lambda: Padding(-1),
        "A length is -1; give at least 0."),
    ("list with a length below 0", lambda: Padding([3, -4]),
        "A length is -4; give at least 0."),
    ("tensor with a length below 0", lambda: Padding(torch.tensor([3, -4])),
        "A length is -4; give at least 0."),
    ("length of a half", lambda: Padding(2.5),
        "A length is 2.5; give a whole number."),
    ("length as a flag", lambda: Padding(True),
        "A length is True; give a whole number."),
    ("length as text", lambda: Padding("3"),
        "A length is '3'; give a whole number."),
    ("float lengths", lambda: Padding(torch.tensor([3.0, 4.0])),
        "A length is a torch.float32 tensor of shape (2,); give one integer per row, (batch,)."),
    ("lengths in a table", lambda: Padding(whole),
        "A length is a torch.int64 tensor of shape (7, 11); give one integer per row, (batch,). A padding mask is "
        "given as booleans: Padding(mask.bool())."),
    ("length of 40 bits", lambda: Padding(2**40),
        "A length needs 41 bits; give a whole number that fits 31."),
    ("lengths for three rows", lambda: call(mask=Padding([3, 4, 5])),
        "The call has 2 rows, but lengths= of the mask is for 3; give one entry for each."),
    ("lengths on another device", lambda: call(mask=Padding(torch.tensor([3, 4], device=meta))),
        "The mask is on meta and the query on cpu; move it with .to()."),
    ("padding of nothing", lambda: Padding(None),
        "Padding takes either lengths or left=; give one of the two."),
    ("padding on both sides", lambda: Padding(3, left=2),
        "Padding takes either lengths or left=; give one of the two."),
    ("boolean left padding", lambda: Padding(left=booleans),
        "The amount of left padding is a torch.bool tensor of shape (7, 11); give one integer per row, "
        "(batch,). A padding mask is given as booleans: Padding(mask.bool())."),
    ("left padding below 0", lambda: Padding(left=-2),
        "The amount of left padding is -2; give at least 0."),
    ("boolean padding of a row", lambda: Padding(booleans[0]),
        "A boolean padding mask has 1 dimensions, not 2; give one row of keys per sequence, (batch, keys)."),
    ("boolean padding of the queries", lambda: call(mask=Padding(torch.ones(B, T, dtype=torch.bool))),
        "The call has 11 keys, but the boolean padding mask is for 7; give one entry for each."),
    ("boolean padding of another batch", lambda: call(mask=Padding(torch.ones(3, S, dtype=torch.bool))),
        "The call has 2 rows, but the boolean padding mask is for 3; give one entry for each."),
    ("empty window", lambda: Window(0),
        "A window of 0 tokens lets no query see anything; give at least 1."),
    ("negative window", lambda: Window(-1),
        "A window of -1 tokens lets no query see anything; give at least 1."),
    ("window of a half", lambda: Window(2.5),
        "The size of a window is 2.5; give a whole number."),
    ("window as a tensor", lambda: Window(torch.tensor(3)),
        "The size of a window is tensor(3); give a whole number."),
    ("window without a size", lambda: Window(size=None),
        "A window takes either a size or left= and right=; give one of the two forms."),
    ("window of two kinds", lambda: Window(2, left=1),
        "A window takes either a size or left= and right=; give one of the two forms."),
    ("window of a negative side", lambda: Window(left=-1),
        "A window cannot reach -1 tokens to the left; give 0 or more, or None."),
    ("window of a half side", lambda: Window(right=1.0),
        "right= of a window is 1.0; give a whole number."),
    ("empty chunk", lambda: Chunk(0),
        "The size of a chunk is 0; give at least 1."),
    ("tensor with an empty chunk", lambda: Chunk(torch.tensor([2, 0])),
        "The size of a chunk is 0; give at least 1."),
    ("chunk of nothing", lambda: Chunk(None),
        "The size of a chunk is None; give a whole number."),
    ("chunk from nothing", lambda: Chunk(2, None),
        "The start of a chunk is None; give a whole number."),
    ("negative prefix", lambda: Prefix(-1),
        "The size of a prefix is -1; give at least 0."),
    ("prefix of nothing", lambda: Prefix(None),
        "The size of a prefix is None; give a whole number."),
    ("prefix starts for three rows", lambda: call(mask=Prefix(2, start=[1, 2, 3])),
        "The call has 2 rows, but start= of the mask is for 3; give one entry for each."),
    ("document ids in a list", lambda: Document([0, 0, 1]),
        "query_ids of a document mask is list; give a tensor of integers, one id per token."),
    ("float document ids", lambda: Document(torch.ones(T)),
        "query_ids of a document mask is a torch.float32 tensor; give a tensor of integers, one id per "
        "token."),
    ("boolean document ids", lambda: Document(booleans),
        "query_ids of a document mask is a torch.bool tensor; give a tensor of integers, one id per token."),
    ("document ids of three dimensions", lambda: Document(whole[None]),
        "query_ids of a document mask has 3 dimensions; give (tokens,) or (batch, tokens)."),
    ("document ids for queries alone", lambda: call(mask=Document(whole[:, 0])),
        "A document mask was given ids for queries only, but there are 7 queries and 11 keys; pass "
        "key_ids= as well."),
    ("too many query ids", lambda: call(mask=Document(whole[0, :8], whole[0])),
        "The call has 7 queries, but the query ids of the document mask is for 8; give one entry for each."),
    ("too few key ids", lambda: call(mask=Document(whole[:, 0], whole[0, :10])),
        "The call has 11 keys, but the key ids of the document mask is for 10; give one entry for each."),
    ("document ids of three rows", lambda: call(mask=Document(whole[:3, :7], whole[0])),
        "The call has 2 rows, but the query ids of the document mask is for 3; give one entry for each."),
    ("document of a negative length", lambda: Document.from_lengths([3, -1]),
        "A document of -1 tokens does not exist; give lengths of 0 or more."),
    ("document of a half length", lambda: Document.from_lengths([3.5, 1]),
        "The length of a document is 3.5; give a whole number."),
    ("document length without a list", lambda: Document.from_lengths(3),
        "The lengths of documents are int; give a list of whole numbers."),
    ("a mask per wrong head", lambda: call(mask=PerHead((Causal(),) * 5)),
        "The call has 6 heads, but the per-head mask is for 5; give one entry for each."),
    ("one mask for all heads", lambda: PerHead(Causal()),
        "PerHead takes a tuple with one mask per head."),
    ("classes for heads", lambda: PerHead((Causal,) * 6),
        "PerHead takes a tuple with one mask per head."),
    ("mask and a tensor", lambda: Causal() & booleans,
        "& was given Tensor, which is no mask; wrap a boolean tensor in Dense(tensor), and call a class."),
    ("tensor and a mask", lambda: booleans & Causal(),
        "& was given Tensor, which is no mask; wrap a boolean tensor in Dense(tensor), and call a class."),
    ("mask or a number", lambda: Causal() | 3,
        "| was given int, which is no mask; wrap a boolean tensor in Dense(tensor), and call a class."),
    ("tensor or a mask", lambda: booleans | Causal(),
        "| was given Tensor, which is no mask; wrap a boolean tensor in Dense(tensor), and call a class."),
    ("mask and a class", lambda: Causal() & Window,
        "& was given Window, which is no mask; wrap a boolean tensor in Dense(tensor), and call a class."),
    ("mask and nothing", lambda: And(Causal(), None),
        "& was given NoneType, which is no mask; wrap a boolean tensor in Dense(tensor), and call a class."),
    ("not a tensor", lambda: Not(booleans),
        "~ was given Tensor, which is no mask; wrap a boolean tensor in Dense(tensor), and call a class."),
    ("masks joined by and", lambda: Causal() and Window(3),
        "A mask is neither true nor false; join masks with &, | and ~, not with and, or and not."),
    ("masks joined by or", lambda: Causal() or Window(3),
        "A mask is neither true nor false; join masks with &, | and ~, not with and, or and not."),
    ("mask turned by not", lambda: not Causal(),
        "A mask is neither true nor false; join masks with &, | and ~, not with and, or and not."),
    ("custom mask of nothing", lambda: CustomMask(None),
        "A custom mask takes a function of (b, h, q, k), not NoneType."),
    ("custom mask of whole numbers", lambda: call(mask=CustomMask(lambda b, h, q, k: q - k)),
        "A custom mask returned torch.int64, not booleans; return a comparison such as q >= k."),
    ("custom mask of a flag", lambda: call(mask=CustomMask(lambda b, h, q, k: True)),
        "A custom mask returned bool, not booleans; return a comparison such as q >= k."),
    ("custom mask of a wrong shape",
        lambda: call(mask=CustomMask(lambda b, h, q, k: torch.ones(3, 5, dtype=torch.bool))),
        "A custom mask returned shape (3, 5) when asked about (2, 6, 7, 11); compute with b, h, q and k "
        "elementwise, so that the shapes broadcast."),
    ("custom mask of five dimensions", lambda: call(mask=CustomMask(lambda b, h, q, k: (q >= k)[None])),
        "A custom mask returned shape (1, 1, 1, 7, 11) when asked about (2, 6, 7, 11); compute with b, h, "
        "q and k elementwise, so that the shapes broadcast."),
    ("custom mask of another batch",
        lambda: call(mask=CustomMask(lambda b, h, q, k: torch.ones(3, 1, 1, 1, dtype=torch.bool))),
        "A custom mask returned shape (3, 1, 1, 1) when asked about (2, 6, 7, 11); compute with b, h, q "
        "and k elementwise, so that the shapes broadcast."),
    ("custom mask on another device",
        lambda: call(mask=CustomMask(lambda b, h, q, k: torch.ones(1, 1, dtype=torch.bool, device=meta))),
        "A custom mask returned a tensor on meta for a call on cpu; move it there."),
    ("drawing of nothing", lambda: draw(None, 3),
        "draw was given NoneType, which is no mask; call a class, and wrap a boolean tensor in "
        "Dense(tensor)."),
    ("drawing of a class", lambda: draw(Causal, 3),
        "draw was given Causal, which is no mask; call a class, and wrap a boolean tensor in Dense(tensor)."),
    ("drawing of a tensor", lambda: draw(booleans, 3),
        "draw was given Tensor, which is no mask; call a class, and wrap a boolean tensor in Dense(tensor)."),
    ("drawing of half a query", lambda: draw(Causal(), 2.5),
        "The number of keys is 2.5; give a whole number."),
    ("drawing of a negative query", lambda: draw(Causal(), -1),
        "A run of -1 tokens does not exist; give 0 or more."),
    ("drawing of no batch", lambda: draw(Causal(), 2, batch=0),
        "There is nothing to draw for a batch of 0 with 1 heads; give at least 1 of each."),
    ("drawing of another head", lambda: draw(PerHead((Causal(), Causal())), 3),
        "The call has 1 head, but the per-head mask is for 2; give one entry for each."),
    ("drawing of another size", lambda: draw(Dense(booleans), 3),
        "A mask of shape (7, 11) does not fit scores of shape (1, 1, 3, 3) (batch, heads, queries, keys); "
        "each size must be equal or 1."),
)
MASK_TEXTS = (
    ("",
        re.compile(r"'' is not a mask: .+ at character \d+\.")),
    ("Causal", "Causal at character 1 needs parentheses: Causal()."),
    ("Causal() &",
        re.compile(r"'Causal\(\) &' is not a mask: .+ at character \d+\.")),
    ("Causal() & 3", "& and | at character 1 join two masks, and one side is not."),
    ("~3", "~ at character 1 goes before a mask."),
    ("3", "'3' is not a mask but int; write for example Causal() & Window(3)."),
    ("[Causal()]", "'[Causal()]' is not a mask but list; write for example Causal() & Window(3)."),
    ("Causl()",
        re.compile(r"There is no mask 'Causl' \(character 1\); there are And, Causal, .+, Window.*\.")),
    ("Window()", "A window takes either a size or left= and right=; give one of the two forms."),
    ("Window(0)", "A window of 0 tokens lets no query see anything; give at least 1."),
    ("Window(2, 3)",
        re.compile(r"Window cannot be built from this: .+\.")),
    ("Window(2.5)",
        "A mask text cannot hold Constant (character 8); it holds masks, numbers, &, |, ~ and parentheses."),
    ("Window(-3)", "A window of -3 tokens lets no query see anything; give at least 1."),
    ("Window(True)", "The size of a window is True; give a whole number."),
    ("Window(size=2, size=3)", "Window(…) at character 1 is given an argument twice."),
    ("Window(size=4, other=2)", "Window has no argument 'other'; it takes size, left, right."),
    ("Window(*[1])", "Window(…) at character 1 takes no * or **."),
    ("Window(**{})", "Window(…) at character 1 takes no * or **."),
    ("Window(99999999999999)", "The size of a window needs 47 bits; give a whole number that fits 31."),
    ("Padding('3')",
        "A mask text cannot hold Constant (character 9); it holds masks, numbers, &, |, ~ and parentheses."),
    ("Padding([9999999999999])", "A length needs 44 bits; give a whole number that fits 31."),
    ("Padding(keys=3)", "Padding has no argument 'keys'; it takes lengths, left."),
    ("Dense([[1, 0]])",
        "A mask of dtype torch.int64 does not say what its numbers mean. Pass Dense.from_zeros(tensor) where 0 "
        "hides, Padding(tensor.bool()) for one entry per token of each row, or booleans, True where a query may "
        "attend."),
    ("Dense([[True], [True, False]])",
        re.compile(r"These lists make no tensor \(.+\); give lists of equal length that hold numbers\.")),
    ("Dense(3)", "A dense mask is a boolean tensor, not int; make it one first."),
    ("Document(3)", "query_ids of a document mask is int; give a tensor of integers, one id per token."),
    ("Document([[1], [1, 2]])",
        re.compile(r"These lists make no tensor \(.+\); give lists of equal length that hold numbers\.")),
    ("Prefix(None)", "The size of a prefix is None; give a whole number."),
    ("PerHead([Causal(), 3])", "PerHead takes a tuple with one mask per head."),
    ("And(Causal(), 3)",
        "& was given int, which is no mask; wrap a boolean tensor in Dense(tensor), and call a class."),
    ("Not()",
        re.compile(r"Not cannot be built from this: .+\.")),
    ("CustomMask(print)",
        re.compile(r"There is no mask 'print' \(character 12\); there are And, Causal, .+, Window.*\.")),
    ("Mask()",
        re.compile(r"There is no mask 'Mask' \(character 1\); there are And, Causal, .+, Window.*\.")),
    ("Causal().spans",
        "A mask text cannot hold Attribute (character 1); it holds masks, numbers, &, |, ~ and parentheses."),
    ("Causal() and Window(2)",
        "A mask text cannot hold BoolOp (character 1); it holds masks, numbers, &, |, ~ and parentheses."),
    ("Causal() + Window(2)",
        "A mask text cannot hold BinOp (character 1); it holds masks, numbers, &, |, ~ and parentheses."),
    ("__import__('os').system('true')",
        "A mask text cannot hold Call (character 1); it holds masks, numbers, &, |, ~ and parentheses."),
    ("open('x')",
        re.compile(r"There is no mask 'open' \(character 1\); there are And, Causal, .+, Window.*\.")),
    ("lambda: 1",
        "A mask text cannot hold Lambda (character 1); it holds masks, numbers, &, |, ~ and parentheses."),
    ("f'{1}'",
        "A mask text cannot hold JoinedStr (character 1); it holds masks, numbers, &, |, ~ and parentheses."),
    ("Causal() if 1 else 2",
        "A mask text cannot hold IfExp (character 1); it holds masks, numbers, &, |, ~ and parentheses."),
    ("Causal() & (Window(3)",
        re.compile(r"'Causal\(\) & \(Window\(3\)' is not a mask: .+ at character \d+\.")),
    ("Causal();Window(2)",
        re.compile(r"'Causal\(\);Window\(2\)' is not a mask: .+ at character \d+\.")),
    ("Causal()\nWindow(2)",
        re.compile(r"'Causal\(\) Window\(2\)' is not a mask: .+ at character \d+\.")),
    ("Causal() & \0",
        re.compile(r"'Causal\(\) & \\x00' is not a mask: .+ at character \d+\.")),
)
SCORES = (
    ("a modification without a list", lambda: call(score_mods=Softcap(3.0)),
        "score_mods= is Softcap; give a list of ScoreMods, () for none."),
    ("no modifications", lambda: call(score_mods=None),
        "score_mods= is NoneType; give a list of ScoreMods, () for none."),
    ("class in the list", lambda: call(score_mods=[Softcap]),
        "score_mods holds the class Softcap; call it: Softcap(…)."),
    ("function in the list", lambda: call(score_mods=[lambda score, b, h, q, k: score]),
        "score_mods holds function, no ScoreMod; wrap a function in CustomScore."),
    ("module in the list", lambda: call(score_mods=[nn.Identity()]),
        "score_mods holds Identity, no ScoreMod; wrap a function in CustomScore."),
    ("tensor as the list", lambda: call(score_mods=torch.zeros(T, S)),
        "score_mods holds Tensor, no ScoreMod; wrap a function in CustomScore."),
    ("bias of a list", lambda: Bias([[0.0]]),
        "A bias is list; give floating point numbers, or a mask if it is to hide keys."),
    ("whole bias", lambda: Bias(whole),
        "A bias is a torch.int64 tensor; give floating point numbers, or a mask if it is to hide keys."),
    ("boolean bias", lambda: Bias(booleans),
        "A bias is a torch.bool tensor; give floating point numbers, or a mask if it is to hide keys."),
    ("bias of a row", lambda: Bias(torch.zeros(S)),
        "A bias of shape (11,) has 1 dimensions. Give (queries, keys), or four dimensions that broadcast "
        "to (batch, heads, queries, keys)."),
    ("bias of three dimensions", lambda: Bias(torch.zeros(H, T, S)),
        "A bias of shape (6, 7, 11) is ambiguous: its first dimension could be the batch or the heads. "
        "Give (queries, keys), or four dimensions that broadcast to (batch, heads, queries, keys)."),
    ("sparse bias", lambda: Bias(torch.zeros(T, S).to_sparse()),
        "The bias is a sparse_coo tensor; make it an ordinary one, with padding or to_dense()."),
    ("bias turned round", lambda: call(score_mods=[Bias(torch.zeros(S, T))]),
        "A bias of shape (11, 7) does not fit scores of shape (2, 6, 7, 11) (batch, heads, queries, keys); "
        "each size must be equal or 1."),
    ("bias of five heads", lambda: call(score_mods=[Bias(torch.zeros(1, 5, T, S))]),
        "A bias of shape (1, 5, 7, 11) does not fit scores of shape (2, 6, 7, 11) (batch, heads, queries, "
        "keys); each size must be equal or 1."),
    ("bias on another device", lambda: call(score_mods=[Bias(torch.zeros(T, S, device=meta))]),
        "The bias is on meta and the query on cpu; move it with .to()."),
    ("trained bias on another device",
        lambda: call(score_mods=[Bias(nn.Parameter(torch.zeros(T, S, device=meta)))]),
        "The Bias is on meta and the query on cpu; move it with .to()."),
    ("slopes of five heads", lambda: call(score_mods=[ALiBi(5)]),
        "The call has 6 heads, but ALiBi is for 5; build it for the call."),
    ("slopes of no heads", lambda: ALiBi(0),
        "0 heads have no slopes; give at least 1."),
    ("slopes of half heads", lambda: ALiBi(8.0),
        "num_heads is 8.0; give a whole number."),
    ("two slopes of three", lambda: ALiBi(3, torch.ones(2)),
        "ALiBi for 3 heads was given slopes as torch.float32 of shape (2,); give as many floating point "
        "numbers."),
    ("slopes in a list", lambda: ALiBi(3, [1.0, 2.0, 3.0]),
        "ALiBi for 3 heads was given slopes as list; give as many floating point numbers."),
    ("whole slopes", lambda: ALiBi(3, torch.ones(3, dtype=torch.int64)),
        "ALiBi for 3 heads was given slopes as torch.int64 of shape (3,); give as many floating point "
        "numbers."),
    ("slopes on another device", lambda: call(score_mods=[ALiBi(H, torch.ones(H)).to(meta)]),
        "The ALiBi is on meta and the query on cpu; move it with .to()."),
    ("cap of 0", lambda: Softcap(0),
        "A softcap of 0 bounds nothing; give a number above 0."),
    ("negative cap", lambda: Softcap(-1.0),
        "A softcap of -1.0 bounds nothing; give a number above 0."),
    ("endless cap", lambda: Softcap(math.inf),
        "A softcap of inf bounds nothing; give a number above 0."),
    ("cap that is no number", lambda: Softcap(math.nan),
        "A softcap of nan bounds nothing; give a number above 0."),
    ("cap as a flag", lambda: Softcap(True),
        "A softcap of True bounds nothing; give a number above 0."),
    ("cap as text", lambda: Softcap("3"),
        "A softcap of '3' bounds nothing; give a number above 0."),
    ("cap as a tensor", lambda: Softcap(torch.tensor(3.0)),
        "A softcap of tensor(3.) bounds nothing; give a number above 0."),
    ("custom score of nothing", lambda: CustomScore(None),
        "A custom score takes a function of (score, b, h, q, k), not NoneType."),
    ("custom score that returns nothing",
        lambda: call(score_mods=[CustomScore(lambda score, b, h, q, k: None)]),
        "CustomScore returned NoneType for scores of shape (2, 6, 7, 11); return a floating point score "
        "for each."),
    ("custom score that returns a number",
        lambda: call(score_mods=[CustomScore(lambda score, b, h, q, k: 0.0)]),
        "CustomScore returned float for scores of shape (2, 6, 7, 11); return a floating point score for "
        "each."),
    ("custom score of booleans", lambda: call(score_mods=[CustomScore(lambda score, b, h, q, k: q >= k)]),
        "CustomScore returned torch.bool of shape (1, 1, 7, 11) for scores of shape (2, 6, 7, 11); return "
        "a floating point score for each."),
    ("custom score without keys",
        lambda: call(score_mods=[CustomScore(lambda score, b, h, q, k: score.sum(-1))]),
        "CustomScore returned torch.float32 of shape (2, 6, 7) for scores of shape (2, 6, 7, 11); return a "
        "floating point score for each."),
    ("custom score of five dimensions",
        lambda: call(score_mods=[CustomScore(lambda score, b, h, q, k: score[None])]),
        "CustomScore returned torch.float32 of shape (1, 2, 6, 7, 11) for scores of shape (2, 6, 7, 11); "
        "return a floating point score for each."),
)
NUMBERS = (
    ("sinks in a list", lambda: call(sinks=[0.0] * H),
        "sinks is list, not a tensor; make it one first."),
    ("one sink", lambda: call(sinks=0.0),
        "sinks is float, not a tensor; make it one first."),
    ("sinks as a flag", lambda: call(sinks=True),
        "sinks is bool, not a tensor; make it one first."),
    ("five sinks", lambda: call(sinks=torch.zeros(5)),
        "Sinks are torch.float32 of shape (5,), but there are 6 query heads; give one floating point "
        "number per head."),
    ("sinks of two dimensions", lambda: call(sinks=torch.zeros(1, H)),
        "Sinks are torch.float32 of shape (1, 6), but there are 6 query heads; give one floating point "
        "number per head."),
    ("whole sinks", lambda: call(sinks=torch.zeros(H, dtype=torch.int64)),
        "Sinks are torch.int64 of shape (6,), but there are 6 query heads; give one floating point number "
        "per head."),
    ("complex sinks", lambda: call(sinks=torch.zeros(H) + 0j),
        "Sinks are torch.complex64 of shape (6,), but there are 6 query heads; give one floating point "
        "number per head."),
    ("sinks on another device", lambda: call(sinks=torch.zeros(H, device=meta)),
        "The sinks is on meta and the query on cpu; move it with .to()."),
    ("scale that is no number", lambda: call(scale=math.nan),
        "A scale of nan cannot multiply scores; give a finite number, or None for 1/sqrt(D)."),
    ("endless scale", lambda: call(scale=-math.inf),
        "A scale of -inf cannot multiply scores; give a finite number, or None for 1/sqrt(D)."),
    ("scale beyond float", lambda: call(scale=10**400 // 10**90),
        "A scale of 1000000000000000000000000000000000000000 cannot multiply scores; give a finite number, "
        "or None for 1/sqrt(D)."),
    ("scale as text", lambda: call(scale="0.5"),
        "A scale of '0.5' cannot multiply scores; give a finite number, or None for 1/sqrt(D)."),
    ("scale as a flag", lambda: call(scale=True),
        "A scale of True cannot multiply scores; give a finite number, or None for 1/sqrt(D)."),
    ("scale as a tensor", lambda: call(scale=torch.tensor(0.5)),
        "A scale of tensor(0.5000) cannot multiply scores; give a finite number, or None for 1/sqrt(D)."),
    ("complex scale", lambda: call(scale=1j),
        "A scale of 1j cannot multiply scores; give a finite number, or None for 1/sqrt(D)."),
    ("everything dropped", lambda: call(dropout_p=1.0),
        "A dropout probability of 1.0 is outside [0, 1); it is the share of weights dropped."),
    ("dropout in percent", lambda: call(dropout_p=10),
        "A dropout probability of 10 is outside [0, 1); it is the share of weights dropped."),
    ("negative dropout", lambda: call(dropout_p=-0.1),
        "A dropout probability of -0.1 is outside [0, 1); it is the share of weights dropped."),
    ("dropout that is no number", lambda: call(dropout_p=math.nan),
        "A dropout probability of nan is outside [0, 1); it is the share of weights dropped."),
    ("no dropout", lambda: call(dropout_p=None),
        "A dropout probability of None is outside [0, 1); it is the share of weights dropped."),
    ("dropout as a flag", lambda: call(dropout_p=True),
        "A dropout probability of True is outside [0, 1); it is the share of weights dropped."),
    ("dropout as a tensor", lambda: call(dropout_p=torch.tensor(0.1)),
        "A dropout probability of tensor(0.1000) is outside [0, 1); it is the share of weights dropped."),
    ("negative seed", lambda: call(seed=-1, dropout_p=0.5),
        "A seed of -0x1 is not in [0, 2**64); give one of 64 bits."),
    ("seed of 65 bits", lambda: call(seed=2**64, dropout_p=0.5),
        "A seed of 0x10000000000000000 is not in [0, 2**64); give one of 64 bits."),
    ("seed of a half", lambda: call(seed=1.5, dropout_p=0.5),
        "A seed is float; give a whole number, or None for torch's generator."),
    ("seed as text", lambda: call(seed="1", dropout_p=0.5),
        "A seed is str; give a whole number, or None for torch's generator."),
    ("seed as a flag", lambda: call(seed=True, dropout_p=0.5),
        "A seed is bool; give a whole number, or None for torch's generator."),
    ("seed as a generator", lambda: call(seed=torch.Generator(), dropout_p=0.5),
        "A seed is Generator; give a whole number, or None for torch's generator."),
    ("float tensor as a seed", lambda: call(seed=torch.tensor(1.5), dropout_p=0.5),
        "A seed is torch.float32 of shape (); give one int64 number, of shape ()."),
    ("two seeds", lambda: call(seed=torch.tensor([1, 2]), dropout_p=0.5),
        "A seed is torch.int64 of shape (2,); give one int64 number, of shape ()."),
    ("short seed", lambda: call(seed=torch.tensor(1, dtype=torch.int32), dropout_p=0.5),
        "A seed is torch.int32 of shape (); give one int64 number, of shape ()."),
    ("seed on another device", lambda: call(seed=torch.tensor(1, device=meta), dropout_p=0.5),
        "The seed is on meta and the query on cpu; move it with .to()."),
    ("wrong seed without dropout", lambda: call(seed=1.5),
        "A seed is float; give a whole number, or None for torch's generator."),
    ("unknown backend", lambda: call(backend="flash"),
        "There is no backend 'flash'; there are auto, native, sdpa, reference."),
    ("backend in capitals", lambda: call(backend="SDPA"),
        "There is no backend 'SDPA'; there are auto, native, sdpa, reference."),
    ("no backend", lambda: call(backend=None),
        "There is no backend None; there are auto, native, sdpa, reference."),
    ("backend as a class", lambda: call(backend=Silent),
        "backend=Silent is a class; call it, or give its name."),
    ("backend that forgets the log-sum-exp", lambda: attention_with_lse(query, key, value, backend=Silent()),
        "The backend returned no log-sum-exp although it was asked for one; this is a fault in it."),
)
POSITIONS = (
    ("negative count", lambda: Positions(-1),
        "A run of -1 tokens does not exist; give 0 or more."),
    ("half a count", lambda: Positions(2.5),
        "The number of tokens is 2.5; give a whole number."),
    ("count as text", lambda: Positions("2"),
        "The number of tokens is '2'; give a whole number."),
    ("no count", lambda: Positions(None),
        "The number of tokens is None; give a whole number."),
    ("half a start", lambda: Positions(2, start=0.5),
        "The start of a run of tokens is 0.5; give a whole number."),
    ("start as a tensor", lambda: Positions(2, start=torch.tensor(3)),
        "The start of a run of tokens is a torch.int64 tensor of shape (); give one integer per row, (batch,)."),
    ("half an offset", lambda: Positions(2, offset=0.5),
        "The offset of a run of tokens is 0.5; give a whole number."),
    ("start of 40 bits", lambda: Positions(2, start=2**40),
        "The start of a run of tokens needs 41 bits; give a whole number that fits 31."),
    ("positions for another query", lambda: call(query_positions=Positions(6)),
        "The query positions are for 6 tokens, but there are 7; give one each."),
    ("positions for another key", lambda: call(key_positions=Positions(6)),
        "The key positions are for 6 tokens, but there are 11; give one each."),
    ("query positions as a number", lambda: call(query_positions=3),
        "The query positions are int; give Positions(count, start), or a tensor of whole numbers, (tokens,) or "
        "(batch, tokens)."),
    ("query positions of floats", lambda: call(query_positions=torch.zeros(T)),
        "The positions of tokens are a torch.float32 tensor; give a tensor of integers, (batch, tokens)."),
    ("key positions of four dimensions", lambda: call(key_positions=torch.zeros(1, 1, 1, S).long()),
        "The positions of tokens have shape (1, 1, 1, 11) for 11 tokens; give (batch, 11) or (1, 11), or (axes, "
        "batch, 11)."),
    ("too few key positions", lambda: call(key_positions=torch.arange(S - 1)),
        "The positions of tokens have shape (1, 10) for 11 tokens; give (batch, 11) or (1, 11), or (axes, batch, 11)."),
    ("query positions of three rows", lambda: call(query_positions=torch.zeros(3, T).long()),
        "The query positions are for 3 rows, the call has 2; give (batch, tokens), or (axes, batch, tokens) where a "
        "token has several."),
    ("starts of three rows", lambda: call(query_positions=Positions(T, start=torch.arange(3))),
        "The query positions are for 3 rows, the call has 2; give (batch, tokens), or (axes, batch, tokens) where a "
        "token has several."),
    ("positions elsewhere", lambda: call(query_positions=torch.zeros(B, T, device="meta").long()),
        "The tensor of query positions is on meta and the query on cpu; move it with .to()."),
    ("key positions that do not say those of queries", lambda: call(key_positions=Positions(S, filled=torch.arange(B),
        positions=torch.arange(S)[None])),
        "The positions of 11 keys do not say those of 7 queries; give them as well."),
    ("filled by a flag", lambda: Positions(2, filled=True),
        "How many of the tokens are there is True; give a whole number."),
    ("starts as floats", lambda: Positions(2, start=torch.zeros(3)),
        "The start of a run of tokens is a torch.float32 tensor of shape (3,); give one integer per row, (batch,)."),
    ("ring of text", lambda: Positions(2, ring="x"),
        "The ring of a run of tokens is 'x'; give a whole number."),
    ("indices of three dimensions", lambda: Positions(2, indices=torch.zeros(1, 1, 2).long()),
        "The indices of tokens have shape (1, 1, 2) for 2 tokens; give (batch, 2) or (1, 2)."),
    ("indices as a list", lambda: Positions(2, indices=[0, 1]),
        "The indices of tokens are list; give a tensor of integers, (batch, tokens)."),
    ("slopes over axes", lambda: call(score_mods=[ALiBi(H)], query_positions=torch.zeros(3, B, T).long()),
        "ALiBi reads one position per token, but these have 3, one per axis; give (batch, tokens)."),
    ("key positions as a range", lambda: call(key_positions=range(S)),
        "The key positions are range; give Positions(count, start), or a tensor of whole numbers, (tokens,) or "
        "(batch, tokens)."),
    ("odd rotary", lambda: RotaryEmbedding(3),
        "Rotary embeddings turn pairs of dimensions, and 3 is not even and above 0."),
    ("empty rotary", lambda: RotaryEmbedding(0),
        "Rotary embeddings turn pairs of dimensions, and 0 is not even and above 0."),
    ("half a rotary", lambda: RotaryEmbedding(4.0),
        "head_dim of a rotary embedding is 4.0; give a whole number."),
    ("rotary as a flag", lambda: RotaryEmbedding(True),
        "head_dim of a rotary embedding is True; give a whole number."),
    ("rotary base of 0", lambda: RotaryEmbedding(4, base=0),
        "A rotary base of 0 gives no angles; give a number above 0, such as 10000."),
    ("rotary base that is no number", lambda: RotaryEmbedding(4, base=math.nan),
        "A rotary base of nan gives no angles; give a number above 0, such as 10000."),
    ("rotary base as text", lambda: RotaryEmbedding(4, base="1e4"),
        "A rotary base of '1e4' gives no angles; give a number above 0, such as 10000."),
    ("rotary for another head", lambda: RotaryEmbedding(6)(query, torch.arange(T)[None]),
        "A rotary embedding for heads of 6 was given heads of 4; make them equal."),
    ("rotary without heads", lambda: RotaryEmbedding(D)(query[0], torch.arange(T)[None]),
        'A rotary embedding was given torch.float32 of shape (6, 7, 4); give floating point "B H T D".'),
    ("rotary of whole numbers", lambda: RotaryEmbedding(D)(query.long(), torch.arange(T)[None]),
        'A rotary embedding was given torch.int64 of shape (2, 6, 7, 4); give floating point "B H T D".'),
    ("rotary positions of one dimension", lambda: RotaryEmbedding(D)(query, torch.arange(T)),
        "Positions (7,) do not fit heads of shape (2, 6, 7, 4); give one whole number per token, (1, "
        "tokens) or (batch, tokens)."),
    ("rotary positions that are too many", lambda: RotaryEmbedding(D)(query, torch.arange(T + 1)[None]),
        "Positions (1, 8) do not fit heads of shape (2, 6, 7, 4); give one whole number per token, (1, "
        "tokens) or (batch, tokens)."),
    ("one rotary position for all", lambda: RotaryEmbedding(D)(query, torch.zeros(1, 1, dtype=torch.int64)),
        "Positions (1, 1) do not fit heads of shape (2, 6, 7, 4); give one whole number per token, (1, "
        "tokens) or (batch, tokens)."),
    ("rotary positions of three rows", lambda: RotaryEmbedding(D)(query, torch.arange(T).expand(3, T)),
        "Positions (3, 7) do not fit heads of shape (2, 6, 7, 4); give one whole number per token, (1, "
        "tokens) or (batch, tokens)."),
    ("float rotary positions", lambda: RotaryEmbedding(D)(query, torch.zeros(1, T)),
        "Positions (1, 7) do not fit heads of shape (2, 6, 7, 4); give one whole number per token, (1, "
        "tokens) or (batch, tokens)."),
    ("rotary with Positions", lambda: RotaryEmbedding(D)(query, Positions(T)),
        "Positions Positions do not fit heads of shape (2, 6, 7, 4); give one whole number per token, (1, "
        "tokens) or (batch, tokens)."),
    ("rotary of more than the head", lambda: RotaryEmbedding(4, rotary_dim=6),
        "rotary_dim=6 is more than the 4 dimensions of a head; give fewer."),
    ("rotary of an odd part", lambda: RotaryEmbedding(4, rotary_dim=3),
        "Rotary embeddings turn pairs of dimensions, and 3 is not even and above 0."),
    ("rotary of a share", lambda: RotaryEmbedding(4, rotary_dim=0.5),
        "rotary_dim of a rotary embedding is 0.5; give a whole number."),
    ("rotary schedule as text", lambda: RotaryEmbedding(4, schedule="yarn"),
        "schedule= takes a Schedule, not 'yarn'; leave it out for none."),
    ("rotary schedule as a class", lambda: RotaryEmbedding(4, schedule=LinearSchedule),
        "schedule= takes a Schedule, not <class 'headwise.schedules.LinearSchedul; leave it out for none."),
    ("rotary sections as a number", lambda: RotaryEmbedding(4, sections=2),
        "sections= is int; give a tuple of whole numbers, one for each axis."),
    ("rotary sections of halves", lambda: RotaryEmbedding(4, sections=(0.5, 1.5)),
        "A section of rotary frequencies is 0.5; give a whole number."),
    ("rotary section of nothing", lambda: RotaryEmbedding(4, sections=(0, 2)),
        "A section of 0 rotary frequencies is none; give at least 1."),
    ("rotary sections of all dimensions", lambda: RotaryEmbedding(4, sections=(2, 2)),
        "sections=(2, 2) share out 4 of 2 pairs that turn; make them equal."),
    ("rotary sections that cannot be dealt", lambda: RotaryEmbedding(22, sections=(5, 5, 1), spectrum="interleaved"),
        "sections=(5, 5, 1), dealt in turn, come to (6, 4, 1); give these, or another spectrum=."),
    ("unknown spectrum", lambda: RotaryEmbedding(4, sections=(1, 1), spectrum="round"),
        "There is no spectrum 'round'; there are contiguous, interleaved, grouped, axial."),
    ("spectrum without sections", lambda: RotaryEmbedding(4, spectrum="axial"),
        "spectrum='axial' is for several axes; say with sections= how many frequencies each."),
    ("rotary positions of too few axes",
        lambda: RotaryEmbedding(D, sections=(1, 1))(query, torch.zeros(1, B, T, dtype=torch.int64)),
        "Positions (1, 2, 7) do not fit heads of shape (2, 6, 7, 4); give one whole number per token, (1, tokens) or "
        "(batch, tokens), or (2, batch, tokens) for the axes."),
    ("rotary positions of axes without sections",
        lambda: RotaryEmbedding(D)(query, torch.zeros(3, B, T, dtype=torch.int64)),
        "Positions (3, 2, 7) do not fit heads of shape (2, 6, 7, 4); give one whole number per token, (1, tokens) or "
        "(batch, tokens)."),
    ("rotary length of a half",
        lambda: RotaryEmbedding(D, schedule=DynamicNTKSchedule(2.0, 8))(query, torch.arange(T)[None], 7.5),
        "The length of a rotary call is 7.5; give a whole number."),
    ("schedule of factor 0", lambda: LinearSchedule(0.0),
        "factor=0.0 of a rotary schedule is no finite number above 0; give one."),
    ("schedule of a flag", lambda: ProportionalSchedule(True),
        "share=True of a rotary schedule is no finite number above 0; give one."),
    ("schedule of an infinite factor", lambda: DynamicNTKSchedule(math.inf, 8),
        "factor=inf of a rotary schedule is no finite number above 0; give one."),
    ("schedule of a factor in words", lambda: LongRoPESchedule(2.0, 8, (1.0, "2"), (1.0, 2.0)),
        "short_factor='2' of a rotary schedule is no finite number above 0; give one."),
    ("scaling below 0", lambda: YaRNSchedule(2.0, 8, attention_factor=-1.0),
        "attention_factor=-1.0 of a rotary schedule is no finite number above 0; give one."),
    ("schedule of half a length", lambda: DynamicNTKSchedule(2.0, 8.0),
        "original_length of a rotary schedule is 8.0; give a whole number."),
    ("schedule of one token", lambda: DynamicNTKSchedule(2.0, 8, length=1),
        "length=1 of a rotary schedule is too short; give at least 2 tokens."),
    ("dynamic schedule of one pair", lambda: RotaryEmbedding(2, schedule=DynamicNTKSchedule(2.0, 8)),
        "DynamicNTKSchedule stretches the slower of several pairs; turn more than 1."),
    ("yarn of base 1", lambda: RotaryEmbedding(4, base=1.0, schedule=YaRNSchedule(2.0, 8)),
        "YaRNSchedule tells fast pairs from slow ones, but base=1; give more than 1."),
    ("yarn upside down", lambda: YaRNSchedule(2.0, 8, beta_fast=1.0, beta_slow=32.0),
        "beta_fast=1.0 is below beta_slow=32.0; exchange them."),
    ("llama3 upside down", lambda: Llama3Schedule(2.0, 8, 4.0, 4.0),
        "high_freq_factor=4.0 is not above low_freq_factor=4.0; exchange or change them."),
    ("longrope of one number", lambda: LongRoPESchedule(2.0, 8, 1.0, 2.0),
        "short_factor= is float; give a tuple of numbers, one for each pair."),
    ("longrope of two sizes", lambda: LongRoPESchedule(2.0, 8, (1.0,), (1.0, 2.0)),
        "1 short and 2 long factors differ; give as many of each."),
    ("longrope for other pairs", lambda: RotaryEmbedding(4, schedule=LongRoPESchedule(2.0, 8, (1.0,), (2.0,))),
        "LongRoPESchedule has 1 factors for 2 pairs; give one for each."),
    ("more than all pairs", lambda: ProportionalSchedule(1.5),
        "share=1.5 is more than all pairs; give at most 1."),
    ("rotate without heads", lambda: rotate(query[0], *[torch.ones(1, T, 2)] * 2),
        'rotate was given torch.float32 of shape (6, 7, 4); give floating point "B H T D".'),
    ("rotate by doubled tables", lambda: rotate(query, *[torch.ones(1, T, D)] * 2),
        "Tables of shapes (1, 7, 4) and (1, 7, 4) do not fit heads of shape (2, 6, 7, 4); give (1 or batch, tokens, "
        "pairs), at most 2 pairs."),
    ("rotate by tables of other tokens", lambda: rotate(query, *[torch.ones(1, 1, 2)] * 2),
        "Tables of shapes (1, 1, 2) and (1, 1, 2) do not fit heads of shape (2, 6, 7, 4); give (1 or batch, tokens, "
        "pairs), at most 2 pairs."),
    ("rotate by tables of three rows", lambda: rotate(query, *[torch.ones(3, T, 2)] * 2),
        "Tables of shapes (3, 7, 2) and (3, 7, 2) do not fit heads of shape (2, 6, 7, 4); give (1 or batch, tokens, "
        "pairs), at most 2 pairs."),
    ("rotate by two sizes", lambda: rotate(query, torch.ones(1, T, 2), torch.ones(1, T, 1)),
        "Tables of shapes (1, 7, 2) and (1, 7, 1) do not fit heads of shape (2, 6, 7, 4); give (1 or batch, tokens, "
        "pairs), at most 2 pairs."),
    ("rotate by a table of pairs", lambda: rotate(query, *[torch.ones(T, 2)] * 2),
        "Tables of shapes (7, 2) and (7, 2) do not fit heads of shape (2, 6, 7, 4); give (1 or batch, tokens, pairs), "
        "at most 2 pairs."),
)
WEIGHTS = (
    ("unknown stage", lambda: attention_weights(query, key, stage="probs"),
        "There is no stage 'probs'; there are scores, capped, biased and weights."),
    ("no stage", lambda: attention_weights(query, key, stage=None),
        "There is no stage None; there are scores, capped, biased and weights."),
    ("row after the last", lambda: attention_weights(query, key, rows=[7]),
        "Rows [7] were asked for, but there are 7 queries; count them from 0."),
    ("row before the first", lambda: attention_weights(query, key, rows=[-8]),
        "Rows [-8] were asked for, but there are 7 queries; count them from 0."),
    ("one row without a list", lambda: attention_weights(query, key, rows=3),
        "rows=3 are no row numbers; give a list of whole numbers, a slice, or None for all."),
    ("half a row", lambda: attention_weights(query, key, rows=[1.5]),
        "rows=[1.5] are no row numbers; give a list of whole numbers, a slice, or None for all."),
    ("rows as booleans", lambda: attention_weights(query, key, rows=booleans[:, 0]),
        "rows=tensor([True, True, True, True, True, True, True]) are no row numbers; give a list of whole "
        "numbers, a slice, or None for all."),
    ("rows as flags", lambda: attention_weights(query, key, rows=[True, False]),
        "rows=[True, False] are no row numbers; give a list of whole numbers, a slice, or None for all."),
    ("rows as text", lambda: attention_weights(query, key, rows="01"),
        "rows='01' are no row numbers; give a list of whole numbers, a slice, or None for all."),
    ("rows of two dimensions", lambda: attention_weights(query, key, rows=torch.tensor([[1]])),
        "rows=tensor([[1]]) are no row numbers; give a list of whole numbers, a slice, or None for all."),
    ("rows without numbers", lambda: attention_weights(query, key, rows=torch.tensor([1], device=meta)),
        "rows= is on meta, which holds no numbers; give a list."),
    ("slice of halves", lambda: attention_weights(query, key, rows=slice(0.5, None)),
        "rows=slice(0.5, None, None) does not count forward in whole numbers; list the rows instead."),
    ("slice that counts back", lambda: attention_weights(query, key, rows=slice(None, None, -1)),
        "rows=slice(None, None, -1) does not count forward in whole numbers; list the rows instead."),
    ("values of another length", lambda: attention_weights(query, key, value[:, :, :3]),
        "11 keys and 3 values differ; each key needs one value."),
    ("outputs of two shapes", lambda: partials(None, None, torch.ones(B, H, 6, V), None),
        "Partial outputs of shapes (2, 6, 7, 5) and (2, 6, 6, 5) with log-sum-exps (2, 6, 7) and (2, 6, 7) "
        "do not belong together; outputs are (batch, heads, queries, size), and a log-sum-exp is its "
        "output's shape without the last dimension."),
    ("log-sum-exp of another shape", lambda: partials(None, torch.ones(B, H, 6), None, torch.ones(B, H, 6)),
        "Partial outputs of shapes (2, 6, 7, 5) and (2, 6, 7, 5) with log-sum-exps (2, 6, 6) and (2, 6, 6) "
        "do not belong together; outputs are (batch, heads, queries, size), and a log-sum-exp is its "
        "output's shape without the last dimension."),
    ("outputs without heads", lambda: partials(*[torch.ones(H, T, V), torch.ones(H, T)] * 2),
        "Partial outputs of shapes (6, 7, 5) and (6, 7, 5) with log-sum-exps (6, 7) and (6, 7) do not "
        "belong together; outputs are (batch, heads, queries, size), and a log-sum-exp is its output's "
        "shape without the last dimension."),
    ("no log-sum-exp", lambda: merge_partials(query, None, query, None),
        "lse_a is NoneType, not a tensor; make it one first."),
    ("outputs in lists", lambda: merge_partials([1.0], [1.0], [1.0], [1.0]),
        "out_a is list, not a tensor; make it one first."),
    ("outputs of two dtypes", lambda: partials(None, None, torch.ones(B, H, T, V).double(), None),
        "out_b is torch.float64 beside out_a of torch.float32; give one floating point dtype."),
    ("whole log-sum-exp", lambda: partials(None, torch.ones(B, H, T).long(), None, None),
        "lse_a is torch.int64 beside out_a of torch.float32; give one floating point dtype."),
    ("outputs on two devices", lambda: partials(None, None, torch.ones(B, H, T, V, device=meta), None),
        "The out_b is on meta and the first output on cpu; move it with .to()."),
)
LAYERS = (
    ("no width", lambda: layer(0, 4),
        "embed_dim is 0; give a whole number of at least 1."),
    ("no heads", lambda: layer(8, 0),
        "num_heads is 0; give a whole number of at least 1."),
    ("negative heads", lambda: layer(8, -2),
        "num_heads is -2; give a whole number of at least 1."),
    ("negative width", lambda: layer(-8, 2),
        "embed_dim is -8; give a whole number of at least 1."),
    ("width that heads do not divide", lambda: layer(8, 3),
        "embed_dim 8 cannot be split evenly over 3 heads; give head_dim= to choose freely."),
    ("float width", lambda: layer(8.0, 2),
        "embed_dim is 8.0; give a whole number of at least 1."),
    ("float heads", lambda: layer(8, 2.0),
        "num_heads is 2.0; give a whole number of at least 1."),
    ("heads as a flag", lambda: layer(8, True),
        "num_heads is True; give a whole number of at least 1."),
    ("width as text", lambda: layer("8", 2),
        "embed_dim is '8'; give a whole number of at least 1."),
    ("heads of nothing", lambda: layer(8, None),
        "num_heads is None; give a whole number of at least 1."),
    ("no key heads", lambda: layer(num_kv_heads=0),
        "num_kv_heads is 0; give a whole number of at least 1."),
    ("key heads that do not divide", lambda: layer(num_kv_heads=2),
        "3 query heads cannot share 2 key heads evenly."),
    ("more key heads than heads", lambda: layer(num_kv_heads=6),
        "3 query heads cannot share 6 key heads evenly."),
    ("empty head", lambda: layer(head_dim=0),
        "head_dim is 0; give a whole number of at least 1."),
    ("negative value head", lambda: layer(v_head_dim=-1),
        "v_head_dim is -1; give a whole number of at least 1."),
    ("no key width", lambda: layer(key_dim=0),
        "key_dim is 0; give a whole number of at least 1."),
    ("value width as text", lambda: layer(value_dim="x"),
        "value_dim is 'x'; give a whole number of at least 1."),
    ("half an output width", lambda: layer(out_dim=0.5),
        "out_dim is 0.5; give a whole number of at least 1."),
    ("no length", lambda: layer(max_length=0),
        "max_length is 0; give a whole number of at least 1."),
    ("length as a flag", lambda: layer(max_length=True),
        "max_length is True; give a whole number of at least 1."),
    ("bias as text", lambda: layer(bias="no"),
        "Biases, sinks and rotate_first are switched by True and False, not by (True, True, True, True, False, 'no', "
        "False)."),
    ("bias as a number", lambda: layer(bias=0),
        "Biases, sinks and rotate_first are switched by True and False, not by (True, True, True, True, False, 0, "
        "False)."),
    ("query bias as a tensor", lambda: layer(query_bias=torch.zeros(12)),
        "Biases, sinks and rotate_first are switched by True and False, not by (tensor([0., 0., 0., 0., 0., 0., 0., "
        "0., 0., 0., 0., 0.]), True, True, True, False, False, False)."),
    ("sinks as a tensor", lambda: layer(sinks=torch.zeros(3)),
        "Biases, sinks and rotate_first are switched by True and False, not by (True, True, True, True, tensor([0., "
        "0., 0.]), False, False)."),
    ("scale that is no number", lambda: layer(scale=math.nan),
        "A scale of nan cannot multiply scores; give a finite number, or None for 1/sqrt(D)."),
    ("everything dropped", lambda: layer(dropout_p=1.0),
        "A dropout probability of 1.0 is outside [0, 1); it is the share of weights dropped."),
    ("norm as a function", lambda: layer(q_norm=math.sqrt),
        "q_norm= takes a Module, not <built-in function sqrt>; leave it out for none."),
    ("norm as a class", lambda: layer(k_norm=nn.RMSNorm),
        "k_norm= takes a Module, not <class 'torch.nn.modules.normalization.RMSNorm'>; leave it out for "
        "none."),
    ("norm of another size", lambda: layer(k_norm=nn.RMSNorm(12)),
        "k_norm= is for heads of 12, the layer's have 4; make them equal."),
    ("rotary as a flag", lambda: layer(rotary=True),
        "rotary= takes a RotaryEmbedding, not True; leave it out for none."),
    ("rotary of another size", lambda: layer(rotary=RotaryEmbedding(6)),
        "rotary= is for heads of 6, the layer's have 4; make them equal."),
    ("rotary as a class", lambda: layer(rotary=RotaryEmbedding),
        "rotary= takes a RotaryEmbedding, not <class 'headwise.rotary.RotaryEmbedding'>; leave it out for "
        "none."),
    ("no mask", lambda: layer(mask=None),
        "mask= takes a Mask or a boolean tensor, not NoneType; leave it out for no mask."),
    ("mask as a class", lambda: layer(mask=Causal),
        "mask=Causal is a class; call it: Causal()."),
    ("mask of tensors", lambda: layer(mask=Padding([1, 2])),
        "A layer's own mask holds numbers only; give masks that hold tensors in the call."),
    ("tensor as the mask", lambda: layer(mask=booleans),
        "A layer's own mask holds numbers only; give masks that hold tensors in the call."),
    ("masks of two heads", lambda: layer(mask=PerHead((Causal(), Causal()))),
        "The call has 3 heads, but the per-head mask is for 2; give one entry for each."),
    ("a modification without a list", lambda: layer(score_mods=Softcap(2.0)),
        "score_mods= is Softcap; give a list of ScoreMods, () for none."),
    ("no modifications", lambda: layer(score_mods=None),
        "score_mods= is NoneType; give a list of ScoreMods, () for none."),
    ("class in the list", lambda: layer(score_mods=[Softcap]),
        "score_mods holds the class Softcap; call it: Softcap(…)."),
    ("function in the list", lambda: layer(score_mods=[math.sqrt]),
        "score_mods holds builtin_function_or_method, no ScoreMod; wrap a function in CustomScore."),
    ("slopes of two heads", lambda: layer(score_mods=[ALiBi(2)]),
        "ALiBi is for 2 heads, the layer has 3; make them equal."),
    ("unknown backend", lambda: layer(backend="x"),
        "There is no backend 'x'; there are auto, native, sdpa, reference."),
    ("whole weights", lambda: layer(dtype=torch.int32),
        "dtype=torch.int32 cannot hold weights; give a floating point dtype such as torch.float32."),
    ("complex weights", lambda: layer(dtype=torch.complex64),
        "dtype=torch.complex64 cannot hold weights; give a floating point dtype such as torch.float32."),
    ("dtype as text", lambda: layer(dtype="float32"),
        "dtype=float32 cannot hold weights; give a floating point dtype such as torch.float32."),
    ("text for tokens", lambda: layer()("x"),
        "query is str; give (batch, tokens, 12), or all (tokens, size) unbatched."),
    ("no tokens", lambda: layer()(None),
        "query is NoneType; give (batch, tokens, 12), or all (tokens, size) unbatched."),
    ("one token without a list", lambda: layer()(tokens[0, 0]),
        "query is (12,); give (batch, tokens, 12), or all (tokens, size) unbatched."),
    ("tokens of four dimensions", lambda: layer()(tokens[None]),
        "query is (1, 2, 7, 12); give (batch, tokens, 12), or all (tokens, size) unbatched."),
    ("tokens of another size", lambda: layer()(tokens[..., :11]),
        "query has tokens of size 11, but the layer takes 12; project them."),
    ("keys of another size", lambda: layer(key_dim=9)(tokens, tokens),
        "key has tokens of size 12, but the layer takes 9; project them."),
    ("batch against one sequence", lambda: layer()(tokens, tokens[0]),
        "key is (7, 12); give (batch, tokens, 12), or all (tokens, size) unbatched."),
    ("one sequence against a batch", lambda: layer()(tokens[0], tokens),
        "key is (2, 7, 12); give (batch, tokens, 12), or all (tokens, size) unbatched."),
    ("two batch sizes", lambda: layer()(tokens, tokens[:1]),
        "The batch sizes differ: query 2, key 1, value 1. Expand the smaller ones if that is what you mean."),
    ("fewer values than keys", lambda: layer()(tokens, tokens, tokens[:, :3]),
        "7 keys and 3 values differ; each key needs one value."),
    ("double tokens", lambda: layer()(tokens.double()),
        "query is torch.float64, but the layer's weights are torch.float32; convert one of them."),
    ("half keys", lambda: layer()(tokens, tokens.half()),
        "key is torch.float16, but the layer's weights are torch.float32; convert one of them."),
    ("whole tokens", lambda: layer()(tokens.long()),
        "query is torch.int64; a layer takes floating point tokens, so embed ids first."),
    ("sparse tokens", lambda: layer()(tokens.to_sparse()),
        "The query is a sparse_coo tensor; make it an ordinary one, with padding or to_dense()."),
    ("nested tokens", lambda: layer()(torch.nested.nested_tensor([tokens[0], tokens[1, :3]])),
        "The query is a nested tensor; make it an ordinary one, with padding or to_dense()."),
    ("too many tokens", lambda: layer(max_length=6)(tokens),
        "query has 7 tokens, more than the layer's max_length 6; cut them."),
    ("no mask in the call", lambda: layer()(tokens, mask=None),
        "mask= takes a Mask or a boolean tensor, not NoneType; leave it out for no mask."),
    ("mask of another size in the call", lambda: layer()(tokens, mask=booleans),
        "A mask of shape (7, 11) does not fit scores of shape (2, 3, 7, 7) (batch, heads, queries, keys); "
        "each size must be equal or 1."),
    ("a modification without a list in the call", lambda: layer()(tokens, score_mods=Softcap(2.0)),
        "score_mods= is Softcap; give a list of ScoreMods, () for none."),
    ("dictionary as a cache", lambda: layer()(tokens, cache={}),
        "cache= takes a KVCache, not dict; give each layer its own, or leave it out for none."),
    ("class as a cache", lambda: layer()(tokens, cache=DynamicCache),
        "cache=DynamicCache is a class; call it: DynamicCache(…)."),
    ("mask in place of keys", lambda: layer()(tokens, Causal()),
        "key is Causal; give (batch, tokens, 12), or all (tokens, size) unbatched. A mask goes into mask=."),
    ("lengths without a cache", lambda: layer()(tokens, lengths=torch.tensor([1, 2])),
        "lengths= tells a cache what to keep, and there is none; hide padding with Padding(lengths)."),
    ("rotated first by a number", lambda: layer(rotate_first=1),
        "Biases, sinks and rotate_first are switched by True and False, not by (True, True, True, True, False, False, "
        "1)."),
    ("positions as floats", lambda: layer()(tokens, positions=torch.zeros(T)),
        "The positions of tokens are a torch.float32 tensor; give a tensor of integers, (batch, tokens)."),
    ("more than max_length with a cache", lambda: layer(max_length=10)(tokens, cache=filled()),
        "The cache holds 7 tokens and query has 7 more, beyond the layer's max_length 10; crop() the cache."),
    ("queries in a ring", lambda: call(query_positions=Positions(T, ring=2)),
        "Queries stand in the order of the call; give ring= and filled= for keys only."),
    ("cache without room", lambda: StaticCache(0),
        "A cache with room for 0 tokens holds nothing; give at least 1."),
    ("cache of the last no tokens", lambda: RollingCache(0),
        "A cache of the last 0 tokens holds nothing; give at least 1."),
    ("cache of text", lambda: StaticCache("long"),
        "The capacity of a cache is 'long'; give a whole number."),
    ("crop to a half", lambda: filled().crop(1.5),
        "The length to crop to is 1.5; give a whole number."),
    ("rows that are not there", lambda: filled().select([0, 2]),
        "Rows [0, 2] were selected of 2; count them from 0."),
    ("rows of floats", lambda: filled().select(torch.ones(1)),
        "Rows to select are torch.float32 of shape (1,); give whole numbers."),
    ("lengths as a list", lambda: layer()(tokens, cache=DynamicCache(), lengths=[1, 2]),
        "lengths= is list; give a tensor of whole numbers, one per row, (batch,)."),
    ("lengths on another device", lambda: layer().to("meta")(
            tokens.to("meta"), cache=DynamicCache(), lengths=torch.tensor([1, 2])),
        "lengths= is on cpu and the keys are on meta; move it with .to()."),
    ("lengths of three rows", lambda: layer()(tokens, cache=DynamicCache(), lengths=torch.tensor([1, 2, 3])),
        "lengths= has shape (3,) for 2 rows; give one number per row."),
    ("lengths beyond the call", lambda: layer()(tokens, cache=DynamicCache(), lengths=torch.tensor([1, 8])),
        "lengths= runs from 1 to 8, but there are 7 tokens; stay within 0 … 7."),
    ("positions of another count", lambda: layer()(tokens, positions=Positions(6)),
        "The query positions are for 6 tokens, but there are 7; give one each."),
    ("key positions of another count", lambda: layer()(tokens, key_positions=Positions(6)),
        "The key positions are for 6 tokens, but there are 7; give one each."),
    ("seed of a half", lambda: layer()(tokens, seed=1.5),
        "A seed is float; give a whole number, or None for torch's generator."),
    ("observer that returns text", lambda: observed(lambda x, out, lse: "y"),
        "The observer returned str for an output of torch.float32 of shape (2, 3, 7, 4); return its like, "
        "or None to leave it."),
    ("observer that loses queries", lambda: observed(lambda x, out, lse: out[:, :, :1]),
        "The observer returned torch.float32 of shape (2, 3, 1, 4) for an output of torch.float32 of shape "
        "(2, 3, 7, 4); return its like, or None to leave it."),
    ("observer that turns the output", lambda: observed(lambda x, out, lse: out.mT),
        "The observer returned torch.float32 of shape (2, 3, 4, 7) for an output of torch.float32 of shape "
        "(2, 3, 7, 4); return its like, or None to leave it."),
    ("observer of another dtype", lambda: observed(lambda x, out, lse: out.double()),
        "The observer returned torch.float64 of shape (2, 3, 7, 4) for an output of torch.float32 of shape "
        "(2, 3, 7, 4); return its like, or None to leave it."),
)
UNSUPPORTED = (
    ("modification without a forward", lambda: call(score_mods=[ScoreMod()]),
        "ScoreMod has no forward(score, b, h, q, k); write one."),
    ("backend that cannot cap", lambda: call(backend="sdpa", score_mods=[Softcap(3.0)]),
        f"Backend 'sdpa' cannot run this call: it cannot modify scores (Softcap). These can: {ABLE}."),
    ("backend that has no seed", lambda: call(backend="sdpa", dropout_p=0.5, seed=1),
        "Backend 'sdpa' cannot run this call: its dropout follows torch's generator and cannot follow a "
        f"seed. These can: {ABLE}."),
    ("backend without a gradient of the log-sum-exp",
        lambda: attention_with_lse(query.clone().requires_grad_(), key, value, backend="sdpa"),
        f"Backend 'sdpa' cannot run this call: its log-sum-exp has no gradient. These can: {ABLE}."),
    ("backend in a function transform",
        lambda: torch.vmap(lambda q: attention(q, q, q, backend="sdpa"))(query[None]),
        "Backend 'sdpa' cannot run this call: its kernels do not compose with function transforms (vmap, "
        "grad, jvp). These can: reference."),
    ("backend in forward mode",
        lambda: torch.func.jvp(lambda q: attention(q, q, q, backend="sdpa"), (query,), (query,)),
        "Backend 'sdpa' cannot run this call: its kernels do not compose with function transforms (vmap, "
        "grad, jvp). These can: reference."),
    ("layer: backend that cannot cap", lambda: layer(score_mods=[Softcap(2.0)], backend="sdpa")(tokens),
        f"Backend 'sdpa' cannot run this call: it cannot modify scores (Softcap). These can: {ABLE}."),
)
SAVED = (
    ("configuration as text", lambda: MultiHeadAttention.from_config("{}"), ShapeError,
        "A configuration is str; give a dict, such as layer.config() returns."),
    ("nothing to build", lambda: MultiHeadAttention.from_config({}), ShapeError,
        "A configuration needs embed_dim and num_heads; add what is missing."),
    ("configuration without a width", lambda: built(embed_dim=None), ShapeError,
        "A configuration needs embed_dim; add what is missing."),
    ("configuration that the constructor refuses", lambda: built(embed_dim=13), ShapeError,
        "embed_dim 13 cannot be split evenly over 3 heads; give head_dim= to choose freely."),
    ("configuration of whole weights", lambda: built(dtype="int8"), ShapeError,
        "dtype of a configuration is 'int8'; there are float64, float32, bfloat16, float16."),
    ("dtype that is no text", lambda: built(dtype=torch.float32), ShapeError,
        "dtype of a configuration is torch.float32; there are float64, float32, bfloat16, float16."),
    ("mask that is no text", lambda: built(mask=Causal()), ShapeError,
        "A mask text is Causal; give a string such as 'Causal() & Window(3)'."),
    ("configuration of an unknown backend", lambda: built(backend="x"), ShapeError,
        "There is no backend 'x'; there are auto, native, sdpa, reference."),
    ("one modification in a configuration", lambda: built(score_mods={"kind": "Softcap", "cap": 2.0}), ShapeError,
        "score_mods of a configuration is dict; give a list of dicts."),
    ("modification by its name alone", lambda: built(score_mods=["Softcap"]), ShapeError,
        "score_mods[0] of a configuration is str; give a dict of its arguments."),
    ("modification of an unknown kind", lambda: built(score_mods=[{"kind": "Hardcap"}]), ShapeError,
        "score_mods[0] of a configuration is of kind 'Hardcap'; there are Softcap, ALiBi, RelativeBias, Bias."),
    ("modification of no kind", lambda: built(score_mods=[{"cap": 2.0}]), ShapeError,
        "score_mods[0] of a configuration is of kind None; there are Softcap, ALiBi, RelativeBias, Bias."),
    ("softcap without its number", lambda: built(score_mods=[{"kind": "Softcap"}]), ShapeError,
        "Softcap in a configuration needs cap; add what is missing."),
    ("softcap of another name", lambda: built(score_mods=[{"kind": "Softcap", "softcap": 2.0}]), ShapeError,
        "Softcap in a configuration has no softcap; it has cap."),
    ("softcap of a text", lambda: built(score_mods=[{"kind": "Softcap", "cap": "2"}]), ShapeError,
        "A softcap of '2' bounds nothing; give a number above 0."),
    ("slopes of text", lambda: built(score_mods=[{"kind": "ALiBi", "num_heads": 3, "slopes": ["x"]}]), ShapeError,
        re.compile(r"ALiBi cannot be built from this configuration: .+\.")),
    ("bias of a negative size", lambda: built(score_mods=[{"kind": "Bias", "shape": [-1, 2]}]), ShapeError,
        re.compile(r"Bias cannot be built from this configuration: .+\.")),
    ("norm of a text", lambda: built(q_norm={"kind": "LayerNorm", "normalized_shape": "4"}), ShapeError,
        re.compile(r"LayerNorm cannot be built from this configuration: .+\.")),
    ("norm of another kind", lambda: built(k_norm={"kind": "BatchNorm1d"}), ShapeError,
        "k_norm of a configuration is of kind 'BatchNorm1d'; there are RMSNorm, LayerNorm."),
    ("rotary as a number", lambda: built(rotary=10_000), ShapeError,
        "rotary of a configuration is int; give a dict of its arguments."),
    ("rotary without a size", lambda: built(rotary={"base": 500.0}), ShapeError,
        "RotaryEmbedding in a configuration needs head_dim; add what is missing."),
    ("schedule by another name", lambda: built(rotary={"head_dim": 4, "schedule": {"kind": "yarn"}}), ShapeError,
        "schedule of a configuration is of kind 'yarn'; there are LinearSchedule, DynamicNTKSchedule, YaRNSchedule, "
        "Llama3Schedule, LongRoPESchedule, ProportionalSchedule."),
    ("configuration of a function as a mask",
        lambda: layer(mask=CustomMask(lambda b, h, q, k: q >= k)).config(), UnsupportedError,
        re.compile(r"A configuration cannot describe the mask CustomMask\(function=.+, whose text does not read back; "
        r"give it in each call\.")),
    ("configuration of a function as a modification",
        lambda: layer(score_mods=[CustomScore(lambda score, b, h, q, k: score)]).config(), UnsupportedError,
        "A configuration cannot describe CustomScore; build such a layer in code, and load its state dict."),
    ("configuration of a class of one's own", lambda: layer(score_mods=[ScoreMod()]).config(), UnsupportedError,
        "A configuration cannot describe ScoreMod; build such a layer in code, and load its state dict."),
    ("configuration of a plain tensor", lambda: layer(score_mods=[Bias(torch.ones(2, 2))]).config(), UnsupportedError,
        "A configuration cannot describe a Bias of a plain tensor, which no state dict holds; make it "
        "nn.Parameter(tensor, requires_grad=False), or give it in each call."),
    ("configuration of another norm", lambda: layer(q_norm=nn.Identity()).config(), UnsupportedError,
        "A configuration cannot describe Identity; build such a layer in code, and load its state dict."),
    ("configuration of another backend", lambda: layer(backend=Silent()).config(), UnsupportedError,
        "A configuration names a backend, and 'silent' is none of headwise's; set layer.backend afterwards."),
    ("configuration of another projection", lambda: changed(out_proj=nn.Identity()), UnsupportedError,
        "A configuration cannot describe Identity as out_proj; build such a layer in code, and load its state dict."),
    ("configuration of a narrower projection", lambda: changed(k_proj=nn.Linear(12, 9)), UnsupportedError,
        "A configuration would build k_proj.weight as torch.float32 (12, 12), but it is torch.float32 (9, 12); build "
        "such a layer in code, and load its state dict."),
    ("configuration of two dtypes", lambda: changed(v_proj=nn.Linear(12, 12).half()), UnsupportedError,
        "A configuration would build v_proj.weight as torch.float32 (12, 12), but it is torch.float16 (12, 12); build "
        "such a layer in code, and load its state dict."),
    ("unknown layout", lambda: fuse("c_attn"), ConversionError,
        "There is no layout 'c_attn'; there are qkv_proj, kv_proj, in_proj."),
    ("fused without queries", lambda: fuse(q_proj__weight=None), ConversionError,
        "There is no q_proj.weight in the state dict; give that of a layer, and prefix= for one in a model."),
    ("fused without a bias", lambda: fuse(v_proj__bias=None), ConversionError,
        "There is no v_proj.bias beside other biases, and one matrix has all or none; add zeros for it."),
    ("fused beside a fused one", lambda: fuse("kv_proj", kv_proj__bias=torch.ones(24)), ConversionError,
        "There is a kv_proj.bias beside its parts already; take the one or the others out."),
    ("fused of two widths", lambda: fuse(k_proj__weight=torch.ones(12, 5)), ConversionError,
        "q_proj.weight and k_proj.weight cannot stand in one matrix: their widths differ, 12 and 5; leave them apart."),
    ("fused of two dtypes", lambda: fuse("kv_proj", v_proj__bias=torch.ones(12).half()), ConversionError,
        "k_proj.bias and v_proj.bias cannot stand in one matrix: their dtypes differ, torch.float32 and torch.float16; "
        "leave them apart."),
    ("fused of two devices", lambda: fuse("in_proj", k_proj__bias=torch.ones(12, device=meta)), ConversionError,
        "q_proj.bias and k_proj.bias cannot stand in one matrix: their devices differ, cpu and meta; leave them "
        "apart."),
    ("fused of a number", lambda: fuse(k_proj__bias=4), ConversionError,
        "k_proj.bias is int; a tensor of 1 dimensions is expected."),
    ("fused of one row", lambda: fuse(k_proj__weight=torch.ones(12)), ConversionError,
        "k_proj.weight is of shape (12,); a tensor of 2 dimensions is expected."),
)
# fmt: on

PACKED = (
    (
        "pack nothing",
        lambda: pack([]),
        "pack takes a list of at least one tensor (tokens, size), or a padded batch with lengths=.",
    ),
    (
        "pack numbers",
        lambda: pack([1, 2]),
        "pack takes a list of at least one tensor (tokens, size), or a padded batch with lengths=.",
    ),
    (
        "pack two sizes",
        lambda: pack([torch.ones(2, 3), torch.ones(2, 4)]),
        re.compile(r"Sequences of 2 kinds do not fit into one row: .*; make them alike\."),
    ),
    (
        "pack a batch without lengths",
        lambda: pack(tokens),
        "A padded batch of shape (2, 7, 12) needs (batch, tokens, …) and either lengths= or keep=.",
    ),
    (
        "pack a list with lengths",
        lambda: pack([tokens[0]], lengths=[3]),
        "lengths= and keep= are for a padded batch; a list of sequences has its lengths already.",
    ),
    (
        "pack with three lengths",
        lambda: pack(tokens, lengths=[1, 2, 3]),
        "3 lengths were given for 2 rows; give one each.",
    ),
    ("pack with a length too many", lambda: pack(tokens, lengths=[1, 8]), "Lengths 1 … 8 do not fit rows of 7 tokens."),
    (
        "pack what numbers keep",
        lambda: pack(tokens, keep=torch.ones(2, 7)),
        "keep= is torch.float32 of (2, 7); give booleans (2, 7), True at the real tokens.",
    ),
    (
        "unpack a batch",
        lambda: pack([tokens[0]]).unpack(tokens),
        "A packed batch of 7 tokens cannot unpack (2, 7, 12); give (1, 7, …).",
    ),
    (
        "look at fewer sequences",
        lambda: pack([tokens[0], tokens[1]]).mask_to(pack([tokens[0]])),
        "2 sequences cannot look at 1; pack as many on each side.",
    ),
    (
        "documents of keys for fewer queries",
        lambda: Document.from_lengths([2, 3], [4]),
        "2 documents of queries and 1 of keys differ; give as many.",
    ),
    ("bias of no head", lambda: RelativeBias(0), "0 heads have no bias; give at least 1."),
    (
        "bias of other heads",
        lambda: call(score_mods=[RelativeBias(2)]),
        "The call has 6 heads, but RelativeBias is for 2; build it for the call.",
    ),
    (
        "bias of three buckets",
        lambda: RelativeBias(2, num_buckets=3),
        "3 buckets cannot hold near and far distances; give an even number of at least 4.",
    ),
    (
        "bias of one bucket",
        lambda: RelativeBias(2, num_buckets=1, bidirectional=False),
        "1 buckets cannot hold near and far distances; give at least 2.",
    ),
    (
        "bias of near distances",
        lambda: RelativeBias(2, max_distance=8),
        "A max_distance of 8 is within the 8 buckets of one distance each; give a larger one.",
    ),
)


class Held(nn.Module):
    """A module that holds its cache, which a file cannot."""

    def __init__(self):
        super().__init__()
        self.layer, self.cache = layer(), StaticCache(9)

    def forward(self, x):
        return self.layer(x, cache=self.cache)


CACHED = (
    (
        "cache held by a module that is exported",
        lambda: torch.export.export(Held(), (tokens,)),
        "An exported file would hold this cache as it is now; make a cache in forward, and set its stored, length and "
        "lengths from tensors that the file is given.",
    ),
    (
        "cache that starts at a number for each row",
        lambda: layer()(tokens, cache=DynamicCache(), positions=Positions(T, start=torch.tensor([0, 2]))),
        "The cache holds 0 tokens, but the first token of the call has index a number in each row; leave positions "
        "out, or crop() the cache.",
    ),
    (
        "state of a cache without its length",
        lambda: DynamicCache().load_state_dict({"kind": "DynamicCache", "room": None, "lengths": None, "offset": 0}),
        "The state of a cache lacks length, next_position; give what state_dict() returned.",
    ),
    (
        "lengths for keys that are there",
        lambda: layer()(tokens, cache=fixed(), lengths=torch.tensor([1, 2])),
        "The cache is filled with 7 keys, and lengths and key_positions came with them; leave them out.",
    ),
    (
        "cache of another batch",
        lambda: layer()(tokens[:1], cache=filled()),
        "The cache holds keys of (batch, heads, size) (2, 3, 4), the call has (1, 3, 4); make a new cache, or select() "
        "rows of this one.",
    ),
    (
        "cache of another dtype",
        lambda: layer(dtype=torch.float64)(tokens.double(), cache=filled()),
        "The cache holds keys of torch.float32 on cpu, the call has torch.float64 on cpu; make a new cache.",
    ),
    (
        "cache before its end",
        lambda: layer()(tokens, cache=filled(), positions=Positions(T)),
        "The cache holds 7 tokens, but the first token of the call has index 0; leave positions out, or crop() the "
        "cache.",
    ),
    (
        "cache with indices",
        lambda: layer()(tokens, cache=filled(), positions=Positions(T, indices=torch.arange(T)[None])),
        "A cache numbers its tokens itself; give positions without indices, ring or filled.",
    ),
    (
        "full cache",
        lambda: layer()(tokens, cache=StaticCache(6)),
        "The cache has room for 6 tokens and would hold 7; make a larger one, crop() it, or use RollingCache for the "
        "last tokens only.",
    ),
    (
        "cache of another layer",
        lambda: [layer()(tokens, cache=made) for made in [filled()] for _ in range(2)],
        "This cache belongs to another layer, whose keys it holds; make a cache for each layer of a model.",
    ),
    (
        "cache of fewer axes",
        lambda: axes(2, 3),
        "The cache holds positions along 2 axes, the call has 3; give as many in every call.",
    ),
    (
        "rows of an empty cache",
        lambda: DynamicCache().select([0]),
        "An empty cache has no rows to select 1 from; fill it first.",
    ),
    (
        "state of another cache",
        lambda: StaticCache(3).load_state_dict(filled().state_dict()),
        "The state is that of DynamicCache with room for None tokens, but this is StaticCache with room for 3; make "
        "one of the same kind and size.",
    ),
    (
        "cache that keeps too little",
        lambda: layer(mask=Causal())(tokens, cache=RollingCache(5)),
        "The cache keeps the last 5 tokens, but the mask lets a query look further back; join Window(5) to it, or keep "
        "more tokens.",
    ),
    (
        "crop to what is forgotten",
        lambda: rolled().crop(6),
        "The cache has forgotten 2 tokens, some of which it would need after a crop to 6; keep more tokens, or fork() "
        "it before those that you may want to drop.",
    ),
    (
        "fixed cache without keys",
        lambda: layer()(tokens, cache=FixedCache()),
        "A FixedCache that is empty needs key tokens; give key= in the first call, or take DynamicCache for "
        "self-attention.",
    ),
    (
        "fixed cache asked before it is filled",
        lambda: FixedCache().recall(Positions(1)),
        "A FixedCache that is empty needs key tokens; give key= in the first call.",
    ),
    (
        "fixed cache for other keys",
        lambda: fixed(tokens.clone()),
        "The cache is filled with 7 keys, and key= may be others; leave key out, or make a new FixedCache.",
    ),
    (
        "fixed cache filled twice",
        lambda: fixed().append(key, value, Positions(S)),
        "The cache is filled with 7 keys; leave key out, or make a new FixedCache for others.",
    ),
    (
        "fixed cache with a ring",
        lambda: FixedCache().append(key, value, Positions(S, ring=1)),
        "A cache numbers its tokens itself; give positions without indices, ring or filled.",
    ),
    (
        "cropped fixed cache",
        lambda: fixed().crop(3),
        "A FixedCache is filled once and cannot be cropped to 3 keys; hide some with Padding(lengths).",
    ),
    (
        "schedule that follows the length",
        lambda: layer(rotary=RotaryEmbedding(4, schedule=DynamicNTKSchedule(2.0, 8)))(tokens, cache=DynamicCache()),
        "The rotary schedule follows the length of each call, but a cache holds keys that are turned already; give the "
        "schedule the length= that you will reach.",
    ),
)
ROWS = (
    *((name, made, ShapeError, text) for name, made, text in (*TENSORS, *MASKS, *SCORES, *NUMBERS)),
    *((name, made, ShapeError, text) for name, made, text in (*POSITIONS, *WEIGHTS)),
    *((f"layer: {name}", made, ShapeError, text) for name, made, text in LAYERS),
    *((f"parse({read!r})", lambda read=read: parse(read), ShapeError, text) for read, text in MASK_TEXTS),
    *((name, made, UnsupportedError, text) for name, made, text in UNSUPPORTED),
    *((name, made, ShapeError, text) for name, made, text in PACKED),
    *((name, made, CacheError, text) for name, made, text in CACHED),
    *SAVED,
)


@pytest.mark.parametrize(("made", "kind", "text"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_each_wrong_call_gets_its_error(made, kind, text):
    with pytest.raises(AttentionError) as caught:
        made()
    assert type(caught.value) is kind
    said = str(caught.value)
    assert text.fullmatch(said) if isinstance(text, re.Pattern) else said == text
    assert said.endswith(".") and "\n" not in said and len(said) < 260


def test_the_table_has_no_row_twice():
    assert len({row[0] for row in ROWS}) == len(ROWS) >= 40


HUGE = {
    "nots": "~" * 5000 + "Causal()",
    "parentheses": "(" * 4000 + "Causal()" + ")" * 4000,
    "ands": "&".join(["Causal()"] * 1000),
    "lists": "[" * 9000,
    "number": "9" * 5000,
    "window": "Window(" + "9" * 5000 + ")",
    "name": "x" * 9000,
    "long": "x" * 20_000,
    "minuses": "-" * 9000 + "1",
}


@pytest.mark.parametrize("text", HUGE.values(), ids=HUGE)
def test_a_huge_mask_text_is_refused_in_a_short_message(text):
    with pytest.raises(ShapeError) as caught:
        parse(text)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("given", [None, 3, b"Causal()"], ids=["nothing", "number", "bytes"])
def test_a_mask_text_is_a_string(given):
    with pytest.raises(ShapeError) as caught:
        parse(given)
    kind = type(given).__name__
    assert str(caught.value) == f"A mask text is {kind}; give a string such as 'Causal() & Window(3)'."


def test_what_python_itself_refuses_names_the_argument():
    """Signatures are Python's to check; these texts are its own and name what is wrong."""
    with pytest.raises(TypeError, match="attn_mask"):
        layer()(tokens, attn_mask=booleans)
    with pytest.raises(TypeError, match="is_causal"):
        call(is_causal=True)
    with pytest.raises(TypeError, match="positional"):
        layer()(tokens, tokens, tokens, booleans)


def in_a_process_of_its_own(script):
    """Run a script where a crash of the process shows as a failed test, in memory that is not zero by chance."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    poisoned = os.environ | {"MALLOC_PERTURB_": "128"}  # glibc: bytes of 0x7f, 3e38 as a number
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=poisoned)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"


def test_empty_calls_end_neither_in_a_crash_nor_in_nonsense():
    """torch's internal CPU kernel divides by the sizes and takes the whole process with it."""
    in_a_process_of_its_own("""
        import itertools, torch
        from headwise import Causal, Padding, Softcap, attention, attention_with_lse, attention_weights

        torch.set_num_threads(1)
        right = dict(b=2, h=4, k=2, t=3, s=5, d=7, v=3)
        for gone in ("b", "t", "s", "d", "v", "h", "bt", "ts", "bhkds"):
            n = right | {letter: 0 for letter in gone}
            if "h" in gone:
                n["k"] = 0
            query = torch.ones(n["b"], n["h"], n["t"], n["d"], requires_grad=True)
            key = torch.ones(n["b"], n["k"], n["s"], n["d"], requires_grad=True)
            value = torch.ones(n["b"], n["k"], n["s"], n["v"], requires_grad=True)
            shape = (n["b"], n["h"], n["t"], n["v"])
            masks = (Causal(), ~Causal(), torch.ones(n["t"], n["s"], dtype=torch.bool))
            ways = itertools.product(("auto", "sdpa", "reference"), masks, (False, True))
            for backend, mask, with_sinks in ways:
                sinks = torch.zeros(n["h"], requires_grad=True) if with_sinks else None
                given = dict(mask=mask, sinks=sinks, backend=backend)
                out = attention(query, key, value, **given)
                assert out.shape == shape, (gone, backend, mask, out.shape)
                assert n["s"] or (out == 0).all(), (gone, backend, mask)
                out.sum().backward()
                with torch.no_grad():
                    lse = attention_with_lse(query, key, value, **given)[1]
                assert lse.shape == shape[:3]
                assert n["s"] or (lse == (0 if with_sinks else -torch.inf)).all(), (gone, backend, lse)
                given["backend"] = "reference"
                with torch.no_grad():
                    assert torch.allclose(lse, attention_with_lse(query, key, value, **given)[1]), (gone, backend, mask)
            assert attention_weights(query, key, value).shape == (*shape[:3], n["s"])
            for tensor in (query, key, value):
                assert tensor.grad is None or tensor.grad.isfinite().all()
    """)


def test_wrong_calls_in_a_row_leave_no_process_dead():
    """Sizes and numbers at the edges of what is allowed, which do run."""
    in_a_process_of_its_own("""
        import torch
        from headwise import Chunk, Padding, Positions, Prefix, Window, attention, draw, parse

        torch.set_num_threads(1)
        x = torch.ones(1, 1, 3, 2)
        top = 2**31 - 1
        edges = (Window(top), Padding(top), Padding(left=top), Prefix(top), Prefix(2, top), Prefix(2, -top),
                 Chunk(top), Chunk(top, -top), Window(left=top, right=0))
        for mask in edges:
            for backend in ("sdpa", "reference"):
                assert attention(x, x, x, mask=mask, backend=backend).isfinite().all(), mask
            assert parse(repr(mask)) == mask
        for start in (-top, top - 3):
            places = Positions(3, start=start)
            seen = attention(x, x, x, query_positions=places, key_positions=places, mask=Window(1))
            assert torch.equal(seen, x), start
        for text in ("~" * 9000 + "Full()", "(" * 9000, "[" * 9000, "Full()" + "&Full()" * 1400):
            try:
                parse(text)
            except ValueError as error:
                assert type(error).__name__ == "ShapeError", error
    """)
