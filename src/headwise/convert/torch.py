"""``torch.nn.MultiheadAttention``, its weights and its masks.

The only place that knows that both boolean masks of that class mean the opposite of headwise's: True hides
there.
"""

import torch
from torch import Tensor, nn

from headwise.algebra import Mask
from headwise.attention import MultiHeadAttention
from headwise.errors import ConversionError, ShapeError
from headwise.masks import Dense, Full, Padding
from headwise.score_mods import Bias, ScoreMod


def from_torch(module: nn.Module) -> MultiHeadAttention:
    """A layer with the weights of an ``nn.MultiheadAttention``, and its outputs.

    The layer is batch first, (batch, tokens, features), whatever the module's ``batch_first`` says: that
    concerns its inputs and not its weights. It returns one tensor; weights come from ``attention_weights``.
    ``from_torch_masks`` translates masks. A query that may see nothing gets zeros before the output
    projection, where the module gives NaN.

    ``add_zero_attn``, a key and value of zeros at the end of every sequence, becomes a sink whose logit stays
    0.

    Args:
        module: An ``nn.MultiheadAttention``; it is not changed.

    Returns:
        A layer with copies of the weights: of their dtype, on their device, trainable where they are, with
        the module's dropout, and in training mode if it is.

    Raises:
        ConversionError: When it is another class, computes something else, or was made with ``add_bias_kv``.

    Example:
        >>> theirs = torch.nn.MultiheadAttention(12, 3, batch_first=True)
        >>> layer, x = headwise.convert.torch.from_torch(theirs), torch.randn(2, 7, 12)
        >>> torch.allclose(layer(x), theirs(x, x, x)[0], atol=1e-6)
        True
    """
    if not isinstance(module, nn.MultiheadAttention) or type(module).forward is not nn.MultiheadAttention.forward:
        raise ConversionError(
            f"{type(module).__name__} is not nn.MultiheadAttention, or has a forward of its own, so its "
            "formula is not known; for a hand-written module see headwise.convert.textbook."
        )
    if module.bias_k is not None or module.bias_v is not None:
        raise ConversionError(
            "The module was made with add_bias_kv=True: it appends a learned key and value to every "
            "sequence, and a layer has no parameter for them. Convert one without, or append them to the "
            "projected keys and values yourself and call headwise.attention."
        )
    embed_dim, out = module.embed_dim, module.out_proj
    packed = module.in_proj_weight
    if packed is not None:
        weights = packed.split(embed_dim)
        train_weights = [packed.requires_grad] * 3
    else:
        parts = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        weights, train_weights = parts, [p.requires_grad for p in parts]
    bias = module.in_proj_bias
    layer = MultiHeadAttention(
        embed_dim,
        module.num_heads,
        key_dim=module.kdim,
        value_dim=module.vdim,
        query_bias=bias is not None,
        key_bias=bias is not None,
        value_bias=bias is not None,
        out_bias=out.bias is not None,
        sinks=module.add_zero_attn,
        dropout_p=module.dropout,
        device="meta",  # the weights are put in their places below, so none are drawn
    )
    state, trains = {"out_proj.weight": out.weight}, {"out_proj.weight": out.weight.requires_grad}
    for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
        state[f"{name}.weight"], trains[f"{name}.weight"] = weights[i], train_weights[i]
        if bias is not None:
            state[f"{name}.bias"], trains[f"{name}.bias"] = bias.split(embed_dim)[i], bias.requires_grad
    if out.bias is not None:
        state["out_proj.bias"], trains["out_proj.bias"] = out.bias, out.bias.requires_grad
    if module.add_zero_attn:
        state["sinks"], trains["sinks"] = out.weight.new_zeros(module.num_heads), False
    layer.load_state_dict({name: tensor.detach().clone() for name, tensor in state.items()}, assign=True)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(trains[name])
    return layer.train(module.training)


def from_torch_masks(
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    *,
    num_heads: int | None = None,
) -> tuple[Mask, tuple[ScoreMod, ...]]:
    """The masks of a call of ``nn.MultiheadAttention`` as a mask and score modifications.

    Boolean masks are True where they *hide*; they are turned round and intersected. Floating point ones are
    added to the scores, so they become ``Bias``. The hint ``is_causal`` has no counterpart: it says what
    ``attn_mask`` holds, and a causal layer is better given ``Causal()``.

    Args:
        attn_mask: (queries, keys), or (batch * heads, queries, keys) with the heads of a sequence side by
            side.
        key_padding_mask: (batch, keys), or (keys,) for a call without a batch.
        num_heads: Number of heads; needed for an ``attn_mask`` of three dimensions.

    Returns:
        The mask and the score modifications, for ``mask=`` and ``score_mods=`` of a call.

    Raises:
        ShapeError: When a mask is neither boolean nor floating point, has another number of dimensions, or
            the number of heads is missing or does not divide it.

    Example:
        >>> hides = torch.ones(3, 3, dtype=torch.bool).triu(1)
        >>> mask, score_mods = headwise.convert.torch.from_torch_masks(hides)
        >>> print(draw(mask, 3))
        ■ · ·
        ■ ■ ·
        ■ ■ ■
        >>> score_mods
        ()
    """
    mask: Mask = Full()
    score_mods: list[ScoreMod] = []
    for name, given, dims in (
        ("attn_mask", attn_mask, (2, 3)),
        ("key_padding_mask", key_padding_mask, (1, 2)),
    ):
        if given is None:
            continue
        if given.dtype != torch.bool and not given.is_floating_point():
            raise ShapeError(f"{name} is of dtype {given.dtype}; nn.MultiheadAttention takes booleans or floats.")
        if given.dim() not in dims:
            raise ShapeError(
                f"{name} has {given.dim()} dimensions; nn.MultiheadAttention takes {dims[0]} or {dims[1]}."
            )
        if name == "key_padding_mask":
            given = given if given.dim() == 2 else given[None]
            hides: Mask | None = Padding(~given) if given.dtype == torch.bool else None
            added = given[:, None, None, :]
        else:
            added = given if given.dim() == 2 else _by_head(given, num_heads)
            hides = Dense(~added) if given.dtype == torch.bool else None
        if hides is None:
            score_mods.append(Bias(added))
        else:
            mask = hides if isinstance(mask, Full) else mask & hides
    return mask, tuple(score_mods)


def _by_head(mask: Tensor, num_heads: int | None) -> Tensor:
    """(batch * heads, T, S) as (batch, heads, T, S): the heads of one sequence stand side by side."""
    if num_heads is None:
        raise ShapeError(
            f"attn_mask of shape {tuple(mask.shape)} mixes batch and heads in its first dimension; say how "
            "many heads there are with num_heads=."
        )
    if num_heads < 1 or mask.shape[0] % num_heads:
        raise ShapeError(
            f"{mask.shape[0]} masks cannot be shared evenly by {num_heads} heads; the first dimension must "
            "be batch * heads."
        )
    return mask.unflatten(0, (mask.shape[0] // num_heads, num_heads))
