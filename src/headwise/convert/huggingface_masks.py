"""What the masks of transformers mean, as masks of headwise.

transformers describes a mask by a function of indices that is put together from a few parts, and makes a boolean
tensor of it. Models look at that tensor, slice it and move it, so it is made as ever; what it was made from goes with
it as attributes, which whatever makes another tensor of it loses (``origin`` finds one that shares its memory). The
attention then reads a ``Mask`` where it still knows one, whose runs of keys need no queries × keys booleans, and the
tensor where it does not.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from headwise.algebra import Mask
from headwise.errors import UnsupportedError
from headwise.masks import Causal, Chunk, Document, Full, Padding, Window
from headwise.positions import Positions

READ = ("attention_mask", "q_offset", "cache_position")  # tensors whose numbers are looked at
# By the memory of a mask: reentrant checkpoints recompute with tensors that share it, but have no attributes.
_made: dict[int, "weakref.ref[Tensor]"] = {}
_heard: set[type] = set()  # configurations of models that take transformers' choice of attention
# What every layer of a model asks about the same positions.
_documents = WeakTensorKeyDictionary()


class Value(NamedTuple):
    """A mask tensor of transformers as a mask, and where the queries and keys then stand."""

    mask: Mask
    queries: Positions
    keys: Positions
    version: int  # of the tensor: one that was written into since means something else


def make(
    mask_of_transformers: Callable[..., Tensor | None], args: tuple[Any, ...], options: dict[str, Any]
) -> Tensor | None:
    """The mask that transformers makes for its own ``sdpa``, with what is known of it."""
    config = options.get("config")
    if not torch.compiler.is_compiling():
        _refuse_deaf(type(config))
    if getattr(config, "num_kv_shared_layers", 0):
        # Gemma 4 cuts its queries behind the mask, and no mask would not say where those that are left stand
        options["allow_is_causal_skip"] = False
    reads = not args and _readable(options)
    # tensors made in inference mode do not count what is written into them
    counted = reads and torch.is_inference_mode_enabled()
    with torch.inference_mode(False) if counted else contextlib.nullcontext():
        made = mask_of_transformers(*args, **options)
    if made is None:
        return None
    start = _start(options)
    start = start.clone() if isinstance(start, Tensor) else start  # a static cache counts on in it
    # an attribute passes through models and compilers, and costs nothing
    made.headwise_made = (options.get("attention_mask"), start, options.get("kv_offset", 0))  # type: ignore[attr-defined]
    if reads:
        _remember(made)
    if reads and not made.is_inference():
        value = _value(made, options)
        if value is not None:
            made.headwise_value = value  # type: ignore[attr-defined]
    return made


def _refuse_deaf(config: type) -> None:
    """Refuse models that take transformers' masks, but not its choice of attention: they would misread this one."""
    if config in _heard:
        return
    package = config.__module__.rpartition(".")[0] + ".modeling_"
    for name in [name for name in sys.modules if name.startswith(package)]:
        held = vars(sys.modules[name])
        own = [part for part in held.values() if isinstance(part, type) and part.__module__ == name]
        attends = any("Attention" in part.__name__ and issubclass(part, nn.Module) for part in own)
        makes = any(getattr(part, "__module__", "") == "transformers.masking_utils" for part in held.values())
        if attends and makes and "ALL_ATTENTION_FUNCTIONS" not in held:
            raise UnsupportedError(
                f"The models of {name} compute attention by code of their own and would misread headwise's masks; "
                "make the model with attn_implementation='eager'."
            )
    _heard.add(config)


def _remember(made: Tensor) -> None:
    place = made.untyped_storage()._cdata

    def forget(gone: "weakref.ref[Tensor]") -> None:
        if _made.get(place) is gone:
            del _made[place]

    _made[place] = weakref.ref(made, forget)


def origin(mask: Tensor | None) -> Tensor | None:
    """The tensor that was made here and that a mask is, or shows as a whole; else the mask."""
    if mask is None or hasattr(mask, "headwise_made") or torch.compiler.is_compiling() or type(mask) is not Tensor:
        return mask
    if mask.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(mask):
        return mask
    found = _made.get(mask.untyped_storage()._cdata, lambda: None)()
    if found is None or (found.shape, found.stride()) != (mask.shape, mask.stride()):
        return mask
    return found if found.data_ptr() == mask.data_ptr() else mask


def value_of(mask: Tensor, batch: int, rows: int, slots: int) -> Value | None:
    """What a mask tensor was made from, if that is known and the tensor is as it was made, for this very call."""
    if torch.compiler.is_compiling():
        return None  # a compiler would make a graph for each of its numbers
    value: Value | None = getattr(mask, "headwise_value", None)
    if value is None or mask.shape != (batch, 1, rows, slots) or mask._version != value.version:
        return None
    return value


def _readable(options: dict[str, Any]) -> bool:
    """Whether the numbers of a mask can be read without waiting for a device: on the CPU, outside of compilers."""
    if (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.maybe_current_level() is not None
    ):
        return False
    tensors = [options[name] for name in READ if isinstance(options.get(name), Tensor)]
    plain = all(type(tensor) is Tensor and tensor.device.type == "cpu" for tensor in tensors)
    return plain and torch.device(options.get("device", "cpu")).type == "cpu"


def _start(options: dict[str, Any]) -> Any:
    """Index of the first query, a number or a tensor of one."""
    places = options.get("cache_position")  # of all queries, in older versions
    return options.get("q_offset", 0) if places is None or not len(places) else places[0]


def _value(made: Tensor, options: dict[str, Any]) -> Value | None:
    rows, slots = made.shape[2:]
    start, first = int(_start(options)), int(options.get("kv_offset", 0))
    mask, real = known(options.get("mask_function")), options.get("attention_mask")
    places = options.get("cache_position")
    if places is not None and not torch.equal(places, torch.arange(start, start + rows)):
        return None
    if mask is None or first < 0 or (real is not None and real.dim() != 2):
        return None
    if real is not None:
        hidden = padding(real[:, first : first + slots].bool(), first, slots)
        if hidden is None:
            return None
        mask = mask if isinstance(hidden, Full) else hidden if isinstance(mask, Full) else mask & hidden
    return Value(mask, Positions(rows, start=start), Positions(slots, start=first), made._version)


def known(function: Callable[..., Any] | None, packed: bool = False) -> Mask | None:
    """The mask that a mask function of transformers describes; None for one that is not put together from its parts.

    Args:
        function: Made by one of the functions of ``transformers.masking_utils``, or one of those.
        packed: Whether it is joined with a mask that keeps documents apart.
    """
    if not isinstance(function, FunctionType) or function.__module__ != "transformers.masking_utils":
        return None
    names = function.__code__.co_freevars
    held = dict(zip(names, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
    maker = function.__qualname__.split(".")[0]
    if maker == "causal_mask_function":
        return Causal()
    if maker == "bidirectional_mask_function":
        return Full()
    if maker == "sliding_window_overlay":
        return Window(left=held["sliding_window"] - 1)
    if maker == "sliding_window_bidirectional_overlay":
        return Window(held["sliding_window"] + 1)
    if maker == "chunked_overlay" and not packed:
        return Chunk(held["chunk_size"], start=_one(held["left_padding"]))
    if maker == "packed_sequence_mask_function":
        return Document.ascending(held["packed_sequence_mask"])
    if maker == "remap_positions_for_packed_sequence" and packed:
        # in one document positions are as far apart as indices, and what is known here but chunks counts no more
        return known(held["mask_function"], packed)
    if maker == "and_masks":
        functions = held["mask_functions"]
        packed = packed or any("packed_sequence_mask_function." in getattr(f, "__qualname__", "") for f in functions)
        return _all([known(f, packed) for f in functions])
    return None


def padding(real: Bool[Tensor, "B N"], first: int, slots: int) -> Mask | None:
    """The mask that hides keys which are not real; None where they have holes, which no run of keys can say.

    Args:
        real: Which keys are real, of the first N of all.
        first: Index of the first key.
        slots: Number of keys; those behind N are hidden.
    """
    count = real.shape[1]
    place = torch.arange(count, device=real.device)
    left = torch.where(real, place, count).amin(-1) if count else torch.zeros(len(real), dtype=torch.int64)
    stop = torch.where(real, place + 1, 0).amax(-1) if count else left
    if (real.sum(-1) < stop - left).any():
        return None
    mask: Mask = Full()
    if (left > 0).any():
        mask = Padding(left=_one(left + first))
    if count < slots or (stop < slots).any():
        after = Padding(_one(stop + first))
        mask = after if isinstance(mask, Full) else mask & after
    return mask


def implied(
    module: nn.Module, rows: int, slots: int, is_causal: bool | None, window: int | None
) -> tuple[Mask, Positions | None]:
    """What no mask means, and where the queries then stand (None: the last with the last key)."""
    if rows == 1 and (window is None or slots <= window):
        return Full(), None  # the newest token sees all
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if causal is None:
        raise UnsupportedError(
            f"{type(module).__name__} gave no mask and does not say whether that means a causal one; set "
            "is_causal to True or False on the module."
        )
    if not causal:
        if window is not None and slots > window:
            raise UnsupportedError(
                f"{type(module).__name__} has a window of {window} for {slots} keys and gave no mask; pass "
                "one, since whether the window counts the query itself is not known."
            )
        return Full(), None
    mask = Causal() if window is None or slots <= window else Causal() & Window(window)
    # several queries and more keys: an empty cache of fixed length, whose first slots were just written
    return mask, Positions(rows) if 1 < rows < slots else None


def shared(
    module: nn.Module, position_ids: Tensor | None, attention_mask: Tensor | None, rows: int, slots: int
) -> Document | None:
    """The documents that share the rows of this call, if there are several and the mask may not say so."""
    given = getattr(module, "packed_positions", None)
    real, start, first = getattr(attention_mask, "headwise_made", (None, 0, 0))
    made = attention_mask is None or hasattr(attention_mask, "headwise_made")
    crosses = (
        "Cross" in type(module).__name__
        or getattr(module, "is_cross_attention", False)
        or (getattr(module, "is_decoder", False) and not getattr(module, "is_causal", True))
    )
    if given is not None:
        if crosses or rows != slots or given.shape[-1] != rows:
            raise UnsupportedError(
                f"packed() was given the positions of {given.shape[-1]} tokens, but {type(module).__name__} has {rows} "
                f"queries and {slots} keys{' of cross-attention' if crosses else ''}; give it the part of the model "
                "that runs on the packed tokens, without a cache."
            )
        position_ids = given
    elif position_ids is None or rows < 2 or position_ids.shape != (*position_ids.shape[:1], rows) or not made:
        return None
    elif crosses or _apart(attention_mask) or slots < rows or (slots > rows and not getattr(module, "is_causal", True)):
        return None  # the keys are other tokens, or the mask keeps the documents apart
    reads = not (torch.compiler.is_compiling() or position_ids.is_meta)
    given_numbers = isinstance(start, int) and isinstance(first, int)
    # tensors made in inference mode do not count what is written into them
    if not reads or not given_numbers or position_ids.is_inference() or (real is not None and real.is_inference()):
        return _shared(position_ids, real, start, first, rows, slots, reads)
    form = (position_ids._version, None if real is None else real._version, slots, start, first)
    held = _documents.get(position_ids)
    if held is None or held[0] != form or held[1]() is not real:
        of = (lambda: None) if real is None else weakref.ref(real)
        held = _documents[position_ids] = (form, of, _shared(position_ids, real, start, first, rows, slots, reads))
    return held[2]


def _shared(
    position_ids: Tensor, real: Tensor | None, start: Any, first: Any, rows: int, slots: int, reads: bool
) -> Document | None:
    """The same, of positions that concern the keys of this call."""
    if reads and not (position_ids.diff(dim=-1) != 1).any():
        return None
    if real is not None:
        place = torch.arange(rows, device=real.device) + start
        real = real[:, place.clamp(max=real.shape[1] - 1)].to(position_ids.device, torch.bool)
    ids = _numbered(position_ids, real)
    if reads and not ids.any():
        return None
    if slots == rows:
        return Document.ascending(ids)
    if reads and start > 0:
        raise UnsupportedError(
            f"Documents begin inside {rows} tokens that continue a cache, and which of its keys belong to the first is "
            "not known. Pass such a row in one call, or a mask of four dimensions."
        )
    number = torch.arange(slots, device=ids.device) + first - start  # of a key, counted from the first query
    return Document.ascending(ids, ids[:, number.clamp(0, rows - 1)])


def _numbered(position_ids: Int[Tensor, "#B T"], real: Bool[Tensor, "#B T"] | None) -> Int[Tensor, "#B T"]:
    """The number of each token's document: a new one where a position does not follow that of the real one before."""
    if real is None:
        return F.pad((position_ids.diff(dim=-1) != 1).cumsum(-1), (1, 0))
    position_ids, real = torch.broadcast_tensors(position_ids, real)
    place = torch.arange(real.shape[-1], device=real.device)
    last = torch.where(real, place, -1).cummax(-1).values
    before = F.pad(last[:, :-1], (1, 0), value=-1)
    # positions may count what is not real in between, or leave it out
    ahead, at = position_ids - position_ids.gather(1, before.clamp(min=0)), place - before
    follows = (ahead == 1) | (ahead == at)
    return (real & (before >= 0) & ~follows).cumsum(-1)


def is_own(attention_mask: Tensor | None) -> bool:
    """Whether a mask may keep documents apart: one that transformers did not make, or made for them."""
    return attention_mask is not None and (not hasattr(attention_mask, "headwise_made") or _apart(attention_mask))


def _apart(attention_mask: Tensor | None) -> bool:
    """Whether a mask is known to keep documents apart."""
    value: Value | None = None if torch.compiler.is_compiling() else getattr(attention_mask, "headwise_value", None)
    masks = [] if value is None else [value.mask]
    for mask in masks:
        masks.extend(mask.parts())
    return any(isinstance(mask, Document) for mask in masks)


def _one(numbers: Tensor) -> Any:
    """A number per row of the batch, as one number where all rows have the same."""
    found = numbers.tolist()
    return found[0] if len(set(found)) == 1 else numbers


def _all(masks: list[Mask | None]) -> Mask | None:
    """The intersection, without what hides nothing; None if one is not known."""
    known_masks = [mask for mask in masks if mask is not None]
    if len(known_masks) < len(masks):
        return None
    joined: Mask = Full()
    for mask in known_masks:
        joined = mask if isinstance(joined, Full) else joined if isinstance(mask, Full) else joined & mask
    return joined
