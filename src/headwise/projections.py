"""Fused projections: state dicts in which one matrix holds the rows of several projections.

A layer has one matrix for each of queries, keys and values. Others put two or three into one, the rows of queries
before those of keys before those of values, in each the heads one after the other.
"""

from typing import Any

from torch import Tensor

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
# What comes before "weight" and "bias" in the name of a fused projection, and the projections in it.
LAYOUTS = {
    "qkv_proj": ("qkv_proj.", PROJECTIONS),
    "kv_proj": ("kv_proj.", PROJECTIONS[1:]),
    "in_proj": ("in_proj_", PROJECTIONS),  # nn.MultiheadAttention
}
# Each name that a state dict may have instead of a layer's own: the projections in it, and of what they are.
FORMS = {f"{start}{kind}": (names, kind) for start, names in LAYOUTS.values() for kind in ("weight", "bias")}
FORMS |= {f"{name}_weight": ((name,), "weight") for name in PROJECTIONS}  # nn.MultiheadAttention of unequal widths


def take_apart(layer: Any, state_dict: dict[str, Any], prefix: str, copy: bool) -> list[str]:
    """Replace fused projections in a state dict by those of a layer, in place.

    Args:
        layer: The ``MultiHeadAttention`` that is to load it.
        state_dict: The state dict of the layer or of a larger model.
        prefix: What the layer's names begin with in it.
        copy: Whether each projection gets memory of its own, rather than its part of the matrix.

    Returns:
        A text for each fused projection that does not fit the layer.
    """
    rows = {
        "q_proj": layer.num_heads * layer.head_dim,
        "k_proj": layer.num_kv_heads * layer.head_dim,
        "v_proj": layer.num_kv_heads * layer.v_head_dim,
    }
    widths = {"q_proj": layer.embed_dim, "k_proj": layer.key_dim, "v_proj": layer.value_dim}
    faults = []
    for name, (projections, kind) in FORMS.items():
        key = prefix + name
        if key not in state_dict:
            continue
        fused = state_dict.pop(key)
        parts = [f"{prefix}{projection}.{kind}" for projection in projections]
        counts = [rows[projection] for projection in projections]
        want = (sum(counts), widths[projections[0]]) if kind == "weight" else (sum(counts),)
        shape = tuple(fused.shape) if isinstance(fused, Tensor) else type(fused).__name__
        if twice := [part for part in parts if part in state_dict]:
            faults.append(f"{key} holds {twice[0]}, which is there as well; leave one of them out.")
        elif kind == "weight" and len({widths[projection] for projection in projections}) > 1:
            inputs = ", ".join(f"{projection} {widths[projection]}" for projection in projections)
            faults.append(f"{key} is one matrix, but the widths of the layer's inputs differ: {inputs}. Give it apart.")
        elif shape != want:
            outputs = " + ".join(map(str, counts))
            faults.append(f"size mismatch for {key}: the shape is {shape}, but {want} in the layer, {outputs} rows.")
        else:
            for part, tensor in zip(parts, fused.detach().split(counts), strict=True):
                state_dict[part] = tensor.clone() if copy else tensor
            continue
        for part, projection in zip(parts, projections, strict=True):  # else they would be called missing, too
            if (own := getattr(getattr(layer, projection), kind, None)) is not None:
                state_dict.setdefault(part, own)
    return faults
