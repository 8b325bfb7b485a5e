"""``torch.nn.MultiheadAttention``: a class that takes its place, its weights in a layer, and its masks."""

from torch import nn

from headwise.attention import MultiHeadAttention
from headwise.convert.dropin import MultiheadAttention as MultiheadAttention
from headwise.convert.dropin import from_torch_masks as from_torch_masks
from headwise.errors import ConversionError


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
