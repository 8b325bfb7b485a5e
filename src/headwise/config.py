"""Configurations: what builds a layer, as plain values that JSON can hold.

They are the arguments of the constructor that are not their defaults, and the dtype of the weights. A mask is its
text (see ``parse``), any other part a dict of its own arguments, with its dtype where that is not the layer's. What
such values cannot say is refused, never left out.
"""

import inspect
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from headwise.algebra import Mask
from headwise.backends import BACKENDS
from headwise.checks import FLOATS, check_weight_dtype
from headwise.errors import AttentionError, ShapeError, UnsupportedError
from headwise.masks import Full
from headwise.notation import parse
from headwise.rotary import RotaryEmbedding
from headwise.schedules import (
    DynamicNTKSchedule,
    LinearSchedule,
    Llama3Schedule,
    LongRoPESchedule,
    ProportionalSchedule,
    Schedule,
    YaRNSchedule,
)
from headwise.score_mods import ALiBi, Bias, RelativeBias, Softcap

Device = torch.device | str | None
# What makes each kind of part from its description, and is told where its tensors go if it asks.
Kinds = Mapping[type, Callable[..., Any]]

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
OTHERWISE = "build such a layer in code, and load its state dict."


def _alibi(
    num_heads: int,
    slopes: Any = None,
    trained: bool | None = None,
    *,
    device: Device = None,
    dtype: torch.dtype | None = None,
) -> ALiBi:
    if slopes is None:
        return ALiBi(num_heads)
    if trained is not None:
        return ALiBi(num_heads, nn.Parameter(torch.tensor(slopes, device=device, dtype=dtype), trained))
    if device is not None and torch.device(device).type == "meta":
        device = "cpu"  # no state dict brings these slopes, so they are numbers from the beginning
    return ALiBi(num_heads, torch.tensor(slopes, device=device, dtype=dtype))


def _bias(shape: Any, trained: bool = True, *, device: Device = None, dtype: torch.dtype | None = None) -> Bias:
    return Bias(nn.Parameter(torch.zeros(shape, device=device, dtype=dtype), requires_grad=trained))


NORMS: Kinds = {nn.RMSNorm: nn.RMSNorm, nn.LayerNorm: nn.LayerNorm}
ROTARY: Kinds = {RotaryEmbedding: RotaryEmbedding}
SCORE_MODS: Kinds = {Softcap: Softcap, ALiBi: _alibi, RelativeBias: RelativeBias, Bias: _bias}
SCHEDULES: Kinds = {
    kind: kind
    for kind in (
        LinearSchedule,
        DynamicNTKSchedule,
        YaRNSchedule,
        Llama3Schedule,
        LongRoPESchedule,
        ProportionalSchedule,
    )
}


def describe(layer: Any) -> dict[str, Any]:
    """The configuration of a ``MultiHeadAttention``."""
    biases = {"query_bias": "q_proj", "key_bias": "k_proj", "value_bias": "v_proj", "out_bias": "out_proj"}
    for name in biases.values():
        kind = type(getattr(layer, name))
        if kind is not nn.Linear:
            raise UnsupportedError(f"A configuration cannot describe {kind.__name__} as {name}; {OTHERWISE}")
    found: dict[str, Any] = {"embed_dim": layer.embed_dim, "num_heads": layer.num_heads}
    defaults = {
        "num_kv_heads": layer.num_heads,
        "head_dim": layer.embed_dim / layer.num_heads,  # not //, which would be no default where it rounds
        "v_head_dim": layer.head_dim,
        "key_dim": layer.embed_dim,
        "value_dim": layer.key_dim,
        "out_dim": layer.embed_dim,
        "scale": None,
        "rotate_first": False,
        "dropout_p": 0.0,
        "max_length": None,
    }
    found |= {name: value for name, default in defaults.items() if (value := getattr(layer, name)) != default}
    off = {switch: False for switch, name in biases.items() if getattr(layer, name).bias is None}
    found |= {"bias": False} if len(off) == len(biases) else off
    dtype = layer.q_proj.weight.dtype
    for name in ("q_norm", "k_norm"):
        if (norm := getattr(layer, name)) is not None:
            found[name] = _describe(norm, NORMS, dtype)
    if layer.k_norm is not None and layer.k_norm is layer.q_norm:
        found["k_norm"] = "q_norm"
    if layer.rotary is not None:
        found["rotary"] = _describe(layer.rotary, ROTARY, dtype)
    if len(layer.score_mods):
        found["score_mods"] = [_describe(mod, SCORE_MODS, dtype) for mod in layer.score_mods]
    if not isinstance(layer.mask, Full):
        found["mask"] = _text(layer.mask)
    if layer.sinks is not None:
        found["sinks"] = True
    if layer.backend != "auto":
        found["backend"] = _name(layer.backend)
    found["dtype"] = str(dtype).removeprefix("torch.")
    _check_twin(layer, type(layer)(**arguments(type(layer), found, device="meta")))
    return found


def arguments(
    cls: type, config: Mapping[str, Any], device: Device = None, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """The arguments with which ``cls``, which is ``MultiHeadAttention``, builds the layer of a configuration."""
    check_weight_dtype(dtype)
    if not isinstance(config, Mapping):
        raise ShapeError(f"A configuration is {type(config).__name__}; give a dict, such as layer.config() returns.")
    _check_names("A configuration", config, cls)
    dtype = _dtype(config.get("dtype")) if dtype is None else dtype
    given = {**config, "device": device, "dtype": dtype}
    for name in ("q_norm", "k_norm"):
        if name == "k_norm" and given.get(name) == "q_norm":
            given[name] = given.get("q_norm")
        elif given.get(name) is not None:
            given[name] = _make(given[name], name, NORMS, device, dtype)
    if given.get("rotary") is not None:
        given["rotary"] = _make(given["rotary"], "rotary", ROTARY, device, dtype)
    mods = given.get("score_mods", ())
    if not isinstance(mods, (list, tuple)):
        raise ShapeError(f"score_mods of a configuration is {type(mods).__name__}; give a list of dicts.")
    given["score_mods"] = [_make(mod, f"score_mods[{i}]", SCORE_MODS, device, dtype) for i, mod in enumerate(mods)]
    if "mask" in given:
        given["mask"] = parse(given["mask"])
    return given


def _describe(part: Any, kinds: Kinds, dtype: torch.dtype) -> dict[str, Any]:
    """The kind of a part and its arguments, but for those that are their defaults."""
    made = kinds.get(type(part))
    if made is None:
        raise UnsupportedError(f"A configuration cannot describe {type(part).__name__}; {OTHERWISE}")
    if isinstance(part, Bias) and not isinstance(part.values, nn.Parameter):
        raise UnsupportedError(
            "A configuration cannot describe a Bias of a plain tensor, which no state dict holds; make it "
            "nn.Parameter(tensor, requires_grad=False), or give it in each call."
        )
    found: dict[str, Any] = {"kind": type(part).__name__} if len(kinds) > 1 else {}
    for name, argument in inspect.signature(made).parameters.items():
        if name not in ("device", "dtype") and (value := _value(part, name, dtype)) != argument.default:
            found[name] = value
    if isinstance(part, nn.Module):
        others = {t.dtype for t in chain(part.parameters(), part.buffers())} - {dtype}
        if others:
            found["dtype"] = str(others.pop()).removeprefix("torch.")
    return found


def _value(part: Any, name: str, dtype: torch.dtype) -> Any:
    """What the constructor of a part was given as ``name``, as a plain value."""
    if isinstance(part, Bias):
        value = {"shape": part.values.shape, "trained": part.values.requires_grad}[name]
    elif name == "trained":
        value = part.own_slopes.requires_grad if isinstance(part.own_slopes, nn.Parameter) else None
    elif name == "slopes":
        value = None if part.own_slopes is None else part.own_slopes.tolist()
    elif name == "bias":
        value = part.bias is not None
    else:
        value = getattr(part, name)
    if isinstance(value, Schedule):
        return _describe(value, SCHEDULES, dtype)
    if name == "rotary_dim" and value == part.head_dim:
        return None
    return list(value) if isinstance(value, tuple) else value


def _make(given: Any, name: str, kinds: Kinds, device: Device, dtype: torch.dtype | None) -> Any:
    """A part from its description."""
    if not isinstance(given, Mapping):
        raise ShapeError(f"{name} of a configuration is {type(given).__name__}; give a dict of its arguments.")
    named = {cls.__name__: make for cls, make in kinds.items()}
    kind = given.get("kind", next(iter(named)) if len(named) == 1 else None)
    if not isinstance(kind, str) or kind not in named:
        raise ShapeError(f"{name} of a configuration is of kind {kind!r:.40}; there are {', '.join(named)}.")
    make = named[kind]
    numbers = {argument: value for argument, value in given.items() if argument != "kind"}
    _check_names(f"{kind} in a configuration", numbers, make)
    if "device" in inspect.signature(make).parameters:
        numbers |= {"device": device, "dtype": _dtype(numbers["dtype"]) if "dtype" in numbers else dtype}
    if numbers.get("schedule") is not None:
        numbers["schedule"] = _make(numbers["schedule"], "schedule", SCHEDULES, device, dtype)
    try:
        return make(**numbers)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, AttentionError):
            raise
        said = str(error).split("\n")[0].rstrip(".")
        raise ShapeError(f"{kind} cannot be built from this configuration: {said:.120}.") from None


def _check_names(what: str, given: Mapping[str, Any], make: Callable[..., Any]) -> None:
    """Refuse arguments that ``make`` does not have, and those that it lacks."""
    takes = {name: p for name, p in inspect.signature(make).parameters.items() if name != "device"}
    unknown = [str(name) for name in given if name not in takes]
    if unknown:
        raise ShapeError(f"{what} has no {', '.join(unknown)[:80]}; it has {', '.join(takes)}.")
    missing = [name for name, p in takes.items() if p.default is p.empty and name not in given]
    if missing:
        raise ShapeError(f"{what} needs {' and '.join(missing)}; add what is missing.")


def _dtype(name: Any) -> torch.dtype | None:
    if name is None:
        return None
    if not isinstance(name, str) or name not in DTYPES:
        raise ShapeError(f"dtype of a configuration is {name!r:.40}; there are {', '.join(DTYPES)}.")
    return DTYPES[name]


def _text(mask: Mask) -> str:
    """The notation of a mask, if it reads back as the same."""
    text = repr(mask)
    try:
        if parse(text) == mask:
            return text
    except ShapeError:
        pass
    raise UnsupportedError(
        f"A configuration cannot describe the mask {text:.60}, whose text does not read back; give it in each call."
    )


def _name(backend: Any) -> str:
    if isinstance(backend, str) or backend in BACKENDS:
        return backend if isinstance(backend, str) else backend.name
    raise UnsupportedError(
        f"A configuration names a backend, and {backend.name!r} is none of headwise's; set layer.backend afterwards."
    )


def _check_twin(layer: nn.Module, twin: nn.Module) -> None:
    """Refuse a layer that was changed after it was built, into what its configuration does not build."""
    mine, its = _anatomy(layer), _anatomy(twin)
    for name in mine | its:
        if mine.get(name) != its.get(name):
            was, built = mine.get(name, "nothing"), its.get(name, "nothing")
            raise UnsupportedError(f"A configuration would build {name} as {built}, but it is {was}; {OTHERWISE}")


def _anatomy(layer: nn.Module) -> dict[str, str]:
    """The type of every module, and dtype and shape of every tensor, by their names."""
    modules = {name or "a layer": type(m).__name__ for name, m in layer.named_modules(remove_duplicate=False)}
    tensors = chain(layer.named_parameters(remove_duplicate=False), layer.named_buffers(remove_duplicate=False))
    return modules | {name: f"{t.dtype} {tuple(t.shape)}" for name, t in tensors}
