"""State dicts of the multi-head attention that textbooks and tutorials write by hand.

Three modules are known, by the names of their projections, each an ``nn.Linear`` with or without a bias.
Their formula is one: project, split into heads of d_out / num_heads, softmax(query · keyᵀ / sqrt(head size))
· value, merge the heads, project.

    query         key         value         output
    q_lin         k_lin       v_lin         out_lin
    query_proj    key_proj    value_proj    output_proj
    query_weight  key_weight  value_weight  none, or one of out_proj, output_proj, out_weight, output_weight

The first is self-attention without a mask. The second takes ``mask``, in which 0 hides, of any shape that
broadcasts to (batch * heads, queries, keys): give the layer ``mask=Dense.from_zeros(mask, num_heads)``. The
third has a ``context_length`` and may widen its tokens (d_out is not d_in); without an output projection its
result is that of the merged heads.

One thing differs on purpose. A query whose keys are all hidden gets the mean of the values there, since its
scores are all the same large negative number; here its heads give zeros, and what comes out is the output
bias.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention import MultiHeadAttention
from headwise.backends.base import Backend
from headwise.errors import ConversionError, ShapeError
from headwise.masks import Causal, Full

# names of query, key and value; of the output projection; whether that may be missing
_LAYOUTS: tuple[tuple[tuple[str, str, str], tuple[str, ...], bool], ...] = (
    (("q_lin", "k_lin", "v_lin"), ("out_lin",), False),
    (("query_proj", "key_proj", "value_proj"), ("output_proj",), False),
    (
        ("query_weight", "key_weight", "value_weight"),
        ("out_proj", "output_proj", "out_weight", "output_weight"),
        True,
    ),
)


def load(
    state_dict: Mapping[str, Any],
    num_heads: int,
    *,
    prefix: str = "",
    causal: bool = False,
    context_length: int | None = None,
    dropout_p: float = 0.0,
    backend: str | Backend = "auto",
) -> MultiHeadAttention:
    """A layer with the weights, and the outputs, of one of the hand-written modules above.

    Args:
        state_dict: The module's ``state_dict()``, or that of a larger model together with ``prefix``.
        num_heads: Number of heads; a state dict does not say.
        prefix: Where the module sits in a larger model, such as "blocks.0.attention"; "" when it is the
            whole.
        causal: Whether each token sees only itself and earlier ones.
        context_length: The most tokens that the module was made for, which the layer then enforces as
            ``max_length``; None for no limit.
        dropout_p: Probability that a weight is dropped in training.
        backend: "auto", or the name of one.

    Returns:
        A layer in training mode, as a new module is, with copies of the weights in their dtype and on their
        device.

    Raises:
        ConversionError: When the names are not those of one such module, or something else is among them.
        ShapeError: When the shapes do not belong together, or ``num_heads`` does not divide them.

    Example:
        >>> names = ("query_weight", "key_weight", "value_weight")
        >>> theirs = torch.nn.ModuleDict({name: torch.nn.Linear(5, 6, bias=False) for name in names})
        >>> layer = headwise.convert.textbook.load(theirs.state_dict(), 3, causal=True, context_length=8)
        >>> layer(torch.randn(2, 7, 5)).shape
        torch.Size([2, 7, 6])

    Reference: Vaswani et al., Attention Is All You Need, 2017, section 3.2.2.
        https://arxiv.org/abs/1706.03762
    """
    names, state = _read(state_dict, prefix)
    wide, width = _check_shapes(names, state)
    if isinstance(num_heads, bool) or not isinstance(num_heads, int) or num_heads < 1:
        raise ShapeError(f"num_heads is {num_heads!r}; give a whole number of at least 1.")
    if wide % num_heads:
        raise ShapeError(
            f"Projections to {wide} features cannot be split evenly over {num_heads} heads; give the number "
            "of heads that the module was made with."
        )
    projects = f"{names[3]}.weight" in state
    layer = MultiHeadAttention(
        width,
        num_heads,
        head_dim=wide // num_heads,
        out_dim=len(state[f"{names[3]}.weight"]) if projects else wide,
        query_bias=f"{names[0]}.bias" in state,
        key_bias=f"{names[1]}.bias" in state,
        value_bias=f"{names[2]}.bias" in state,
        out_bias=f"{names[3]}.bias" in state,
        mask=Causal() if causal else Full(),
        max_length=context_length,
        dropout_p=dropout_p,
        backend=backend,
        device="meta",  # the weights are put in their places below, so none are drawn
    )
    if not projects:
        layer.out_proj = nn.Identity()
    ours = dict(zip(names, ("q_proj", "k_proj", "v_proj", "out_proj"), strict=True))
    copies = {}
    for key, tensor in state.items():
        name, kind = key.rsplit(".", 1)
        copies[f"{ours[name]}.{kind}"] = tensor.detach().clone(memory_format=torch.contiguous_format)
    layer.load_state_dict(copies, assign=True)
    return layer


def _read(state_dict: Mapping[str, Any], prefix: str) -> tuple[tuple[str, str, str, str], dict[str, Tensor]]:
    """The four names in use, and the tensors of the module, by their names in it."""
    if prefix and not prefix.endswith("."):
        prefix += "."
    state = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
    where = f"under {prefix!r}" if prefix else "in the state dict"
    layouts = [lay for lay in _LAYOUTS if any(f"{n}.{kind}" in state for n in lay[0] for kind in ("weight", "bias"))]
    if len(layouts) != 1:
        many = "names of more than one hand-written module" if layouts else "no hand-written attention"
        known = "; ".join(", ".join(lay[0]) for lay in _LAYOUTS)
        raise ConversionError(f"There is {many} {where}: found {_shown(state)}, expected {known}.{_hint(state_dict)}")
    inputs, outputs, optional = layouts[0]
    found = [n for n in outputs if f"{n}.weight" in state or f"{n}.bias" in state]
    if len(found) > 1:
        raise ConversionError(
            f"There are {len(found)} output projections {where}, {' and '.join(found)}; remove all but one."
        )
    output = found[0] if found else outputs[0]
    needed = inputs if optional and not found else (*inputs, output)
    missing = [f"{n}.weight" for n in needed if f"{n}.weight" not in state]
    if missing:
        raise ConversionError(f"{', '.join(missing)} is missing {where}: found {_shown(state)}.")
    extra = [key for key in state if key not in {f"{n}.{kind}" for n in needed for kind in ("weight", "bias")}]
    if extra:
        raise ConversionError(
            f"There is more {where} than one attention module: {_shown({k: state[k] for k in extra})}. "
            "Remove what is not part of its formula (for a buffer with a causal mask, pass causal=True "
            f"instead).{_hint(state_dict)}"
        )
    for key, tensor in state.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ConversionError(f"{key} is {kind}; floating point weights are expected, so dequantise it first.")
    for what in ("dtype", "device"):
        kinds = sorted({str(getattr(tensor, what)) for tensor in state.values()})
        if len(kinds) > 1:
            raise ConversionError(f"The weights have more than one {what}: {', '.join(kinds)}; convert them to one.")
    return (*inputs, output), state


def _check_shapes(names: tuple[str, str, str, str], state: dict[str, Tensor]) -> tuple[int, int]:
    """The number of features that the heads share, and the size of an input token."""
    first = state[f"{names[0]}.weight"]
    if first.dim() != 2:
        raise ShapeError(f"{names[0]}.weight has shape {tuple(first.shape)}; (features out, features in) is expected.")
    wide, width = first.shape
    expected: dict[str, tuple[int, ...]] = {f"{name}.weight": (wide, width) for name in names[:3]}
    expected |= {f"{name}.bias": (wide,) for name in names[:3]}
    output = state.get(f"{names[3]}.weight")
    if output is not None:
        rows = output.shape[0] if output.dim() else 0
        expected |= {f"{names[3]}.weight": (rows, wide), f"{names[3]}.bias": (rows,)}
    for key, tensor in state.items():
        if tuple(tensor.shape) != expected[key]:
            raise ShapeError(
                f"{key} has shape {tuple(tensor.shape)}, but {expected[key]} is expected beside "
                f"{names[0]}.weight of shape {(wide, width)}."
            )
    return wide, width


def _shown(state: Mapping[str, Any]) -> str:
    shown = [f"{k} {tuple(v.shape)}" if isinstance(v, Tensor) else f"{k} {type(v).__name__}" for k, v in state.items()]
    return ", ".join(shown[:12] + [f"and {len(shown) - 12} more"] * (len(shown) > 12)) or "nothing"


def _hint(state_dict: Mapping[str, Any]) -> str:
    """Where modules with known names sit in a larger state dict."""
    ends = tuple(f".{lay[0][0]}.weight" for lay in _LAYOUTS)
    places = [key.rsplit(".", 2)[0] for key in state_dict if key.endswith(ends)]
    return f" There is one under prefix={places[0]!r}." if places else ""
