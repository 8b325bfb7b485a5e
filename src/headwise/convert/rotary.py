"""Rotary embeddings from transformers' configurations.

A configuration says how fast pairs turn, in ``rope_parameters`` (``rope_scaling`` and ``rope_theta`` in older files).
It does not say which dimensions form a pair, nor how several axes share the frequencies: that stands in each model's
code, so it is known here for the models listed below, and otherwise asked for. transformers is not imported.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from headwise.errors import ConversionError
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

# Models whose pairs are neighbours. Where the choice is the configuration's, it is called rope_interleave.
NEIGHBOURS = {
    "codegen", "cohere", "cohere2", "deepseek_v2", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "glm4v", "gptj",
    "helium", "llama4", "llama4_vision_model",
}  # fmt: skip
# Models that turn neighbours as well, or in an order of their own, and were not compared with.
ASKED = {
    "axk2", "bailing_hybrid", "blt", "cohere2_moe", "deepseek_v32", "deepseek_v4", "dots3_note", "efficientloftr",
    "glm_moe_dsa", "hy_v4", "hy_v4_vl", "lightglue", "longcat_flash", "mistral_large4", "moonshine",
    "moonshine_streaming", "musicflamingo", "roformer",
}  # fmt: skip
# How several axes share the frequencies: text with three, images with two.
SPECTRUM = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "glm4v", "glm4v_moe", "paddleocr_vl"), "contiguous"),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "interleaved"),
    **dict.fromkeys(("qwen2_vl_vision", "qwen2_5_vl_vision", "qwen3_vl_vision", "qwen3_vl_moe_vision"), "axial"),
    **dict.fromkeys(("qwen3_5_vision", "qwen3_5_moe_vision", "glm4v_vision", "llama4_vision_model"), "axial"),
    "pixtral": "grouped",
}
NAMES = {"mrope": "default", "su": "longrope"}  # what older files call them
KNOWN = {
    "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "long_factor", "low_freq_factor",
    "max_position_embeddings", "mrope_interleaved", "mrope_section", "mscale", "mscale_all_dim",
    "original_max_position_embeddings", "partial_rotary_factor", "rope_theta", "rope_type", "short_factor", "truncate",
    "type",
}  # fmt: skip


def from_config(
    config: Any, layer_type: str | None = None, *, interleaved: bool | None = None, length: int | None = None
) -> RotaryEmbedding:
    """The rotary embedding that a transformers configuration describes.

    Args:
        config: A configuration of a model's text or vision part, or its ``config.json`` as a dict, in which what is
            left out means a base of 10000 and whole heads, whatever the model's own default.
        layer_type: Which of several rotary embeddings, such as "full_attention" of Gemma 3; None where there is one.
        interleaved: Whether pairs are neighbours. None: as the configuration says, or as is known of its
            ``model_type``; half-split for others, but for those that are known to turn otherwise.
        length: Tokens of the sequences to come, for types that depend on it (dynamic, longrope); None follows the
            length of each call, which goes without a cache only.

    Returns:
        The module; it has no parameters.

    Raises:
        ConversionError: When the type is not known, a number that it needs is missing, the parameters hold
            something else that would be lost, or it is not known how several axes share the frequencies or which
            numbers are pairs.

    Example:
        >>> from headwise.convert.rotary import from_config
        >>> parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
        >>> from_config({"hidden_size": 64, "num_attention_heads": 4, "rope_parameters": parameters})
        RotaryEmbedding(16, base=10000, schedule=LinearSchedule(factor=2.0))
    """
    get = _reader(config)
    parameters = _parameters(get, layer_type)
    model = str(get("model_type") or "").removesuffix("_text")
    head_dim = _head_dim(config, layer_type)
    share = _first(parameters.get("partial_rotary_factor"), get("partial_rotary_factor"), get("rotary_pct"), 1.0)
    kind = _first(parameters.get("rope_type"), parameters.get("type"), "default")
    kind = NAMES.get(kind, kind)
    rotary_dim = head_dim if kind == "proportional" else _first(get("rotary_dim"), int(head_dim * share))
    if interleaved is None and get("rope_interleave") is None and any(f"{model}_".startswith(f"{m}_") for m in ASKED):
        raise ConversionError(
            f"How {model} pairs the numbers that it turns was not compared with what is done here; give "
            "interleaved=True for neighbours, or False for halves."
        )
    if interleaved is None:
        interleaved = bool(_first(get("rope_interleave"), model in NEIGHBOURS))
    sections, spectrum = _axes(kind, model, parameters, rotary_dim // 2)
    return RotaryEmbedding(
        head_dim,
        base=float(_first(parameters.get("rope_theta"), get("rope_theta"), get("rotary_emb_base"), 10_000)),
        interleaved=interleaved,
        rotary_dim=rotary_dim,
        schedule=_schedule(kind, parameters, get, share, length),
        sections=sections,
        spectrum=spectrum,
    )


def _reader(config: Any) -> Callable[[str], Any]:
    """Look a name up in a dict or an object; None where it is missing."""
    return config.get if isinstance(config, Mapping) else lambda name: getattr(config, name, None)


def _first(*values: Any) -> Any:
    """The first that is given."""
    return next((value for value in values if value is not None), None)


def _head_dim(config: Any, layer_type: str | None) -> int:
    get = _reader(config)
    if layer_type is not None and get("per_layer_config"):  # the type of layer may decide, as in Gemma 4
        with contextlib.suppress(KeyError, ValueError):
            get = _reader(get("per_layer_config")[layer_type])
    # the width of Qwen2-VL's vision part is its embed_dim, its hidden_size that of the text
    widths = ("embed_dim",) if get("model_type") == "qwen2_vl_vision" else ("hidden_size", "n_embd")
    size = _first(*map(get, widths))
    heads = _first(get("num_attention_heads"), get("num_heads"), get("n_head"))
    if get("head_dim"):
        return get("head_dim")
    if not size or not heads:
        raise ConversionError(
            "The configuration has no head_dim, nor hidden_size and num_attention_heads; give that of the text or "
            "vision part, such as config.text_config."
        )
    return size // heads


def _parameters(get: Callable[[str], Any], layer_type: str | None) -> Mapping[str, Any]:
    found = _first(get("rope_parameters"), get("rope_scaling"))
    if found is None and _first(*map(get, ("rope_theta", "rotary_emb_base", "rotary_dim", "text_config"))) is None:
        raise ConversionError("The configuration says nothing of a rotary embedding; if there is one, add rope_theta.")
    parameters: Mapping[str, Any] = found or {}
    nested = [key for key, value in parameters.items() if isinstance(value, Mapping)]
    if nested:
        if layer_type not in nested:
            raise ConversionError(f"There is no layer_type {layer_type!r} with a rotary embedding; there are {nested}.")
        parameters = parameters[layer_type]
    lost = [key for key, value in parameters.items() if key not in KNOWN and value is not None]
    if lost:
        raise ConversionError(
            f"The rotary parameters hold {', '.join(lost)}, which RotaryEmbedding does not have; see in the model's "
            "code what it means, and take it out of the configuration."
        )
    return parameters


def _axes(kind: str, model: str, parameters: Mapping[str, Any], pairs: int) -> tuple[tuple[int, ...] | None, str]:
    """Sections and spectrum, for models whose tokens have several coordinates."""
    two = kind == "axial" or SPECTRUM.get(model) == "axial"
    sections = (pairs // 2, pairs // 2) if two else parameters.get("mrope_section")
    if sections is None:
        return None, "contiguous"
    stated = {True: "interleaved", False: "contiguous"}.get(parameters.get("mrope_interleaved", ""), "")
    spectrum = SPECTRUM.get(model, stated)
    if not spectrum:
        raise ConversionError(
            f"How the axes of model type {model!r} share the frequencies is not known; make a RotaryEmbedding with "
            "the sections= and spectrum= of its code."
        )
    return tuple(sections), spectrum


def _schedule(
    kind: str, parameters: Mapping[str, Any], get: Callable[[str], Any], share: float, length: int | None
) -> Schedule | None:
    trained = "original_max_position_embeddings"
    longest = get("max_position_embeddings")
    numbers = {name: float(value) if type(value) is int else value for name, value in parameters.items()}
    numbers["max_position_embeddings"] = longest
    numbers[trained] = _first(get(trained), parameters.get(trained), longest)
    if kind in ("yarn", "longrope") and numbers.get("factor") is None and longest:
        numbers["factor"] = longest / numbers[trained]

    def need(name: str) -> Any:
        if numbers.get(name) is None:
            raise ConversionError(f"A rotary embedding of type {kind!r} needs {name}, which is missing; add it.")
        return numbers[name]

    match kind:
        case "default" | "axial":
            return None
        case "linear":
            return LinearSchedule(need("factor"))
        case "dynamic":
            return DynamicNTKSchedule(need("factor"), need("max_position_embeddings"), length)
        case "proportional":
            return ProportionalSchedule(float(share), _first(numbers.get("factor"), 1.0))
        case "llama3":
            return Llama3Schedule(need("factor"), need(trained), need("low_freq_factor"), need("high_freq_factor"))
        case "longrope":
            lists = tuple(map(float, need("short_factor"))), tuple(map(float, need("long_factor")))
            return LongRoPESchedule(need("factor"), need(trained), *lists, numbers.get("attention_factor"), length)
        case "yarn":
            return YaRNSchedule(
                need("factor"),
                need(trained),
                beta_fast=numbers.get("beta_fast") or 32.0,
                beta_slow=numbers.get("beta_slow") or 1.0,
                attention_factor=_attention_factor(need("factor"), numbers),
                truncate=_first(numbers.get("truncate"), True),
            )
    raise ConversionError(f"There is no schedule for rope type {kind!r} here; make a RotaryEmbedding with one.")


def _attention_factor(factor: float, numbers: Mapping[str, Any]) -> float | None:
    """The factor given, or DeepSeek's quotient; of its two numbers one alone means nothing."""
    above, below = numbers.get("mscale"), numbers.get("mscale_all_dim")
    if numbers.get("attention_factor") is not None or not above or not below:
        return numbers.get("attention_factor")
    grown = YaRNSchedule(factor, 2).attention_scaling - 1
    return (above * grown + 1) / (below * grown + 1)
