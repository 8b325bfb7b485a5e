"""State dicts of a layer, with its projections fused as other code has them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headwise.errors import ConversionError
from headwise.projections import LAYOUTS


def fused(state_dict: Mapping[str, Any], layout: str = "qkv_proj", prefix: str = "") -> dict[str, Any]:
    """A state dict in which one matrix holds the projections of queries, keys and values.

    Its rows are those of queries, then of keys, then of values, in each the heads one after the other. The other
    direction needs no function: a layer's ``load_state_dict`` takes all of these forms.

    Args:
        state_dict: The state dict of a layer, or that of a larger model together with ``prefix``; not changed.
        layout: What the fused projections are called: "qkv_proj" for ``qkv_proj.weight``, "in_proj" for
            ``in_proj_weight`` as in ``nn.MultiheadAttention``, or "kv_proj" for ``kv_proj.weight``, which leaves
            ``q_proj`` apart. Biases likewise.
        prefix: Where the layer is in a larger model, such as "blocks.0.attention"; "" when it is the whole.

    Returns:
        A dict with the fused entries in place of their parts, and all others as they are.

    Raises:
        ConversionError: When a projection is missing, or they cannot stand in one matrix: their inputs have different
            widths, some have no bias, or their dtypes or devices differ.

    Example:
        >>> layer = MultiHeadAttention(12, 6, num_kv_heads=2)
        >>> state = headwise.convert.fused(layer.state_dict())
        >>> {name: tuple(tensor.shape) for name, tensor in state.items()}
        {'qkv_proj.weight': (20, 12), 'qkv_proj.bias': (20,), 'out_proj.weight': (12, 12), 'out_proj.bias': (12,)}
        >>> layer.load_state_dict(state)
        <All keys matched successfully>
    """
    if layout not in LAYOUTS:
        raise ConversionError(f"There is no layout {layout!r:.40}; there are {', '.join(LAYOUTS)}.")
    if prefix and not prefix.endswith("."):
        prefix += "."
    start, projections = LAYOUTS[layout]
    instead: dict[str, tuple[str, Tensor] | None] = {}  # of a part: the fused entry that takes its place, or none
    for kind in ("weight", "bias"):
        keys = [f"{prefix}{name}.{kind}" for name in projections]
        lacking = [key for key in keys if key not in state_dict]
        if kind == "bias" and len(lacking) == len(keys):
            continue
        if lacking and kind == "weight":
            raise ConversionError(
                f"There is no {lacking[0]} in the state dict; give that of a layer, and prefix= for one in a model."
            )
        if lacking:
            raise ConversionError(
                f"There is no {lacking[0]} beside other biases, and one matrix has all or none; add zeros for it."
            )
        name = f"{prefix}{start}{kind}"
        if name in state_dict:
            raise ConversionError(f"There is a {name} beside its parts already; take the one or the others out.")
        instead |= dict.fromkeys(keys)
        instead[keys[0]] = (name, _stacked(keys, [state_dict[key] for key in keys]))
    found: dict[str, Any] = {}
    for key, value in state_dict.items():
        entry = instead.get(key, (key, value))
        if entry is not None:
            found[entry[0]] = entry[1]
    return found


def _stacked(keys: list[str], parts: list[Any]) -> Tensor:
    for key, part in zip(keys, parts, strict=True):
        dims = 2 if key.endswith("weight") else 1
        if not isinstance(part, Tensor) or part.dim() != dims:
            given = f"of shape {tuple(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
            raise ConversionError(f"{key} is {given}; a tensor of {dims} dimensions is expected.")
        for what in ("width", "dtype", "device"):
            first, other = (t.shape[-1] if what == "width" else getattr(t, what) for t in (parts[0], part))
            if first != other and (dims == 2 or what != "width"):
                raise ConversionError(
                    f"{keys[0]} and {key} cannot stand in one matrix: their {what}s differ, {first} and {other}; leave "
                    "them apart."
                )
    return torch.cat([part.detach() for part in parts])
