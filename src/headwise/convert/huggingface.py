"""The transformers plug-in: ``attn_implementation="headwise"``.

``register()`` gives transformers two functions. The *mask* is that of its own ``sdpa``: a boolean tensor,
(batch, 1, queries, keys), True where a query may attend, and None where ``is_causal`` of the module says the
same. What it was made from goes with it (see ``huggingface_masks``). The *kernel* turns what arrives into a ``Mask``,
``score_mods`` and ``sinks``, and takes the fastest backend that can run it.

Several documents may share a row. transformers' masks keep them apart only for decoders without a cache and without
an attention mask; the kernel does so wherever it is passed the positions that tell where documents begin.

transformers is imported by ``register``, not before.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headwise.algebra import Mask
from headwise.convert import huggingface_masks
from headwise.errors import ShapeError, UnsupportedError
from headwise.functional import attend, attention_weights, observed, prepare, run
from headwise.masks import Dense, Full
from headwise.score_mods import Bias, ScoreMod, Softcap

# What models hand on to their attention and its result does not depend on: positions are in the queries and
# keys by now, caches in the keys and values, padding in the mask.
HARMLESS = frozenset(
    [
        "cache",
        "cache_offset",
        "cache_position",
        "debug_io",
        "debug_io_dir",
        "deterministic",
        "encoder_attention_mask",
        "encoder_hidden_states",
        "input_ids",
        "inputs_embeds",
        "key_value_states",
        "labels",
        "layer_idx",
        "layer_past",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "mm_token_type_ids",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_value",
        "past_key_values",
        "position_embeddings",
        "return_dict",
        "seq_idx",
        "token_type_ids",
        "use_cache",
    ]
)
# Where sequences begin that share a row. A mask says it too, and positions do; without either it would be lost.
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k")


def register(name: str = "headwise") -> None:
    """Make headwise an attention implementation of transformers: kernel and mask at once.

    Models then take ``attn_implementation="headwise"`` when they are made, or
    ``set_attn_implementation("headwise")`` afterwards. An ``observer`` set on an attention module of the
    model (the one that transformers passes to its kernels, such as ``BertSelfAttention``) is called as that
    of ``MultiHeadAttention`` is. ``output_attentions=True`` returns the weights before dropout. A padding
    query that may see nothing gets zeros.

    Documents that share a row stay apart where the model hands its ``position_ids`` on to its attention, as BERT,
    RoBERTa, T5 and the decoders do: a document begins at each token, padding aside, whose position does not follow
    that of the token before it. For the others (DistilBERT, ModernBERT) there is ``packed``. A call that continues a
    cache is taken to continue the one document in it. A mask of four dimensions that is your own is taken as it is,
    and cross-attention sees all of its row. Models that take transformers' masks but compute attention by code of
    their own (BLOOM, MPNet) are refused when they make a mask, outside compiled code.

    Calling it again changes nothing.

    Args:
        name: What the implementation is called; a name of transformers' own is refused.

    Raises:
        ImportError: When transformers is not installed, or older than 5.3.
        UnsupportedError: When the name is taken.

    Example, where transformers is installed::

        headwise.convert.huggingface.register()
        model = BertModel.from_pretrained("bert-base-uncased", attn_implementation="headwise")
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, __version__
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(
            "The plug-in needs transformers 5.3 or newer; run: pip install 'headwise[transformers]'"
        ) from error
    # before, some models tell their attention no positions, and the documents of a row would be joined in silence
    if tuple(int(number) for number in __version__.split(".")[:2]) < (5, 3):
        raise ImportError(
            f"The plug-in needs transformers 5.3 or newer, not {__version__}; run: pip install -U 'transformers>=5.3'"
        )
    taken = AttentionInterface().get(name, kernel)
    if name == "eager" or taken is not kernel:
        raise UnsupportedError(f"transformers already has an attention implementation {name!r}; choose another name.")
    AttentionInterface.register(name, kernel)

    AttentionMaskInterface.register(name, lambda *args, **options: huggingface_masks.make(sdpa_mask, args, options))


@contextlib.contextmanager
def packed(model: nn.Module, position_ids: Int[Tensor, "#B T"]) -> Iterator[None]:
    """Keep documents that share a row apart, in a model that does not pass positions on to its attention.

    Inside, every attention of the model is one of a token with those of its own document.

    Args:
        model: A transformers model, or the part of one that runs on the packed tokens, such as an encoder.
        position_ids: The positions of the tokens, such as ``headwise.pack(…).position_ids``. A document begins
            where one does not follow the one before it.

    Raises:
        UnsupportedError: From the model, when one of its attentions is not over these tokens alone.

    Example, where transformers is installed::

        batch = headwise.pack(sequences_of_token_ids)
        with headwise.convert.huggingface.packed(model, batch.position_ids):
            out = model(input_ids=batch.tokens, position_ids=batch.position_ids)
        states = batch.unpack(out.last_hidden_state)
    """
    modules = list(model.modules())
    for module in modules:
        module.packed_positions = position_ids
    try:
        yield
    finally:
        for module in modules:
            del module.packed_positions


def kernel(
    module: nn.Module,
    query: Float[Tensor, "#B H T D"],
    key: Float[Tensor, "#B K S D"],
    value: Float[Tensor, "#B K S V"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Float[Tensor, " H"] | None = None,
    position_bias: Float[Tensor, "..."] | None = None,
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "B H T S"] | None]:
    """One call of attention, as transformers makes it.

    Args:
        module: The attention module of the model; its ``training``, ``is_causal`` and ``observer`` are read.
        query: Queries, rotated if the model rotates; one row of them serves all rows of keys, and the reverse.
        key: Keys. There may be fewer heads than of queries; the first ones then share the first key head.
        value: Values.
        attention_mask: Boolean, True where a query may attend, or floating point, to be added; four
            dimensions. None leaves it to ``is_causal``.
        scaling: What dot products are multiplied by; None means 1/sqrt(D).
        dropout: Probability that a weight is dropped, in training only.
        is_causal: Whether no mask means a causal one; None asks the module.
        sliding_window: The window of the layer. It is in the mask already; without a mask it is added.
        softcap: Bound of the scores.
        s_aux: An extra logit per head without a value (attention sinks).
        position_bias: Added to the scores.
        position_ids: Where the queries stand; documents begin where a position does not follow the one before.
        others: Known not to matter, or refused.

    Returns:
        The output, tokens before heads, and the weights if ``output_attentions`` was asked for.

    Raises:
        UnsupportedError: When an argument is not understood, or it is not clear what no mask means, or which tokens
            belong to one document.
        ShapeError: When sizes, dtypes or devices do not fit together.
    """
    attention_mask = huggingface_masks.origin(attention_mask)
    documents = huggingface_masks.shared(module, position_ids, attention_mask, query.shape[-2], key.shape[-2])
    _refuse(others, documents is None and not huggingface_masks.is_own(attention_mask))
    if len(query) != len(key) and 1 in (len(query), len(key)):  # the learned queries of a Q-Former
        query = query.expand(max(len(query), len(key)), -1, -1, -1)
        key, value = (t.expand(len(query), -1, -1, -1) for t in (key, value))
    mods: list[ScoreMod] = [] if softcap is None else [Softcap(softcap)]
    if position_bias is not None:
        mods.append(Bias(position_bias))
    mask: Mask = Full()
    queries = keys = None
    if attention_mask is None:
        mask, queries = huggingface_masks.implied(module, query.shape[-2], key.shape[-2], is_causal, sliding_window)
    elif attention_mask.dim() != 4:
        raise ShapeError(
            f"The model gave its attention a mask {tuple(attention_mask.shape)}; one of four dimensions, (batch, "
            "heads or 1, queries, keys), is expected. Was it made for another attention implementation?"
        )
    elif attention_mask.is_floating_point():
        mods.append(Bias(attention_mask))
    else:
        made_from = huggingface_masks.value_of(attention_mask, len(query), query.shape[-2], key.shape[-2])
        if made_from is None:
            mask = Dense(attention_mask)
        else:
            mask, queries, keys = made_from[:3]
    if documents is not None:
        mask = mask & documents
    observer: Callable[..., Tensor | None] | None = getattr(module, "observer", None)
    dropout_p = dropout if module.training else 0.0
    call = (query, key, value, mask, tuple(mods), s_aux, scaling, dropout_p, None, queries, keys)
    if observer is None:
        out = attend(*call, "auto")
    else:
        x = prepare(*call, "value")
        out = observed(observer, x, *run(x))
    weights = None
    if others.get("output_attentions") or _captures_weights():
        weights = attention_weights(
            query,
            key,
            mask=mask,
            score_mods=mods,
            sinks=s_aux,
            scale=scaling,
            query_positions=queries,
            key_positions=keys,
        ).to(out.dtype)
    return out.transpose(1, 2).contiguous(), weights


def _refuse(others: dict[str, Any], joined: bool) -> None:
    for name, value in others.items():
        if value is None or value is False or name in HARMLESS:
            continue
        if name in PACKED:
            if joined and value.numel() > 2:
                raise UnsupportedError(
                    f"{name} packs {value.numel() - 1} sequences into one row and no mask keeps them "
                    "apart; pass position_ids that begin again with each sequence."
                )
        else:
            raise UnsupportedError(
                f"The model passes {name}= to its attention, which headwise does not know and may not "
                "ignore. Use attn_implementation='eager' for this model."
            )


def _captures_weights() -> bool:
    """Whether transformers is collecting weights: some models (GPT-2) do not tell their attention."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return False
    if torch.compiler.is_compiling():
        return False
    wanted = _active_collector.get()
    return bool(wanted) and any("attentions" in name for name in wanted)
