"""headwise's own CPU kernel: masks by their runs of keys, score modifications in place, keys packed a tile at a time.

The kernel is C++ behind a C face (csrc/kernel.h), found beside this file's package and called by ctypes. It neither
links torch nor Python. What is passed to it is checked here or before: it trusts its caller.
"""

import contextlib
import ctypes
import functools
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

from headwise.backends.base import Backend, Inputs
from headwise.errors import UnsupportedError

SUFFIXES = (".so", ".dylib", ".dll")
MOST = 256  # largest head size of the kernel
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Native(Backend):
    """The CPU kernel of headwise.

    Args:
        instructions: The instruction set to use, one of ``instruction_sets()``; None for the best of this processor.

    Raises:
        UnsupportedError: When the kernel or the processor has no such instructions.
    """

    name = "native"

    def __init__(self, instructions: str | None = None) -> None:
        if instructions is not None and instructions not in instruction_sets():
            there = ", ".join(instruction_sets()) or "none"
            raise UnsupportedError(
                f"The CPU kernel has no instructions {instructions!r:.40} on this processor; there are: {there}."
            )
        self.instructions = instructions

    def why_not(self, x: Inputs) -> str | None:
        if x.query.device.type != "cpu":
            return "it computes on the CPU only"
        if x.query.dtype not in DTYPES:
            return "it computes in float32, bfloat16 and float16 only"
        if torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return "compilers do not know it yet"
        if x.needs_grad:
            return "its backward is not written yet"
        if x.dropout_p > 0:
            return "it has no dropout yet"
        if max(x.query.shape[-1], x.value.shape[-1]) > MOST:
            return "its heads have at most 256 features"
        if torch._C._functorch.maybe_current_level() is not None:
            return "it does not compose with function transforms (vmap, grad, jvp)"
        if any(forward_ad.unpack_dual(t).tangent is not None for t in (x.query, x.key, x.value)):
            return "it has no forward-mode derivative"
        return _why_not_modified(x) or why_missing()

    def run(self, x: Inputs) -> tuple[Float[Tensor, "B H T V"], Float[Tensor, "B H T"] | None]:
        with torch.no_grad():
            return _run(x, self.instructions)


def _why_not_modified(x: Inputs) -> str | None:
    """Why the score modifications are not for the kernel."""
    if not x.score_mods:
        return None
    kinds = []
    for mod in x.score_mods:
        low = mod.lowered()
        if low is None:
            return "it knows no custom modification of scores"
        kinds.append(low.kind)
        if low.kind in ("slopes", "table") and not (x.queries.is_run and x.keys.is_run and _in_step(x)):
            return "distances that are not those of two runs of positions are not for its kernel"
    if any(kinds.count(kind) > 1 for kind in kinds):
        return "it takes one modification of each kind"
    # what comes after the cap only adds, in any order
    return "it caps scores before anything else" if "softcap" in kinds[1:] else None


def _in_step(x: Inputs) -> bool:
    """Whether the distance of a query and a key is known by their rows and slots alone."""
    numbers = (x.queries.start, x.queries.offset, x.keys.start, x.keys.offset)
    return x.queries.positions is x.keys.positions is None and all(isinstance(number, int) for number in numbers)


class _Call(ctypes.Structure):
    """``hw_call`` of csrc/kernel.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "out", "lse")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "rows", "slots", "head_dim", "v_head_dim")),
        *((f"{name}_stride", ctypes.c_int64 * 3) for name in ("query", "key", "value", "out")),
        *((name, ctypes.c_void_p) for name in ("first", "last", "left", "right", "runs")),
        ("runs_stride", ctypes.c_int64 * 3),
        ("run_count", ctypes.c_int64),
        ("mask", ctypes.c_void_p),
        ("mask_stride", ctypes.c_int64 * 4),
        ("bias", ctypes.c_void_p),
        ("bias_stride", ctypes.c_int64 * 4),
        ("slopes", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("table_size", ctypes.c_int64),
        ("distance", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


def _run(x: Inputs, instructions: str | None) -> tuple[Tensor, Tensor | None]:
    (batch, heads, rows, head_dim), (kv_heads, slots) = x.query.shape, x.key.shape[1:3]
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (x.query, x.key, x.value))
    v_head_dim = value.shape[-1]
    # in memory as the last projection reads it
    out = query.new_empty(batch, rows, heads, v_head_dim).transpose(1, 2)
    lse = query.new_empty(batch, heads, rows, dtype=torch.float32) if x.lse != "no" else None
    call = _Call(
        *(t.data_ptr() for t in (query, key, value, out)),
        None if lse is None else lse.data_ptr(),
        *(batch, heads, kv_heads, rows, slots, head_dim, v_head_dim),
        *(t.stride()[:3] for t in (query, key, value, out)),
    )
    call.scale, call.dtype, call.threads = x.scale, DTYPES[query.dtype], torch.get_num_threads()
    kept = [*_limits(call, x), *_modifications(call, x)]  # alive until the kernel has read them
    status = library().hw_forward(ctypes.byref(call), None if instructions is None else instructions.encode())
    del kept
    if status:
        raise NO_MEMORY
    return out, lse


NO_MEMORY = MemoryError("The CPU kernel found no memory for what it packs; make some free.")


def _limits(call: _Call, x: Inputs) -> list[Tensor]:
    """What each query may see: by numbers, by runs, or by a mask."""
    spans = x.spans()
    if spans is None:
        mask = x.allowed().expand(*x.query.shape[:3], x.key.shape[-2])
        call.mask, call.mask_stride = mask.data_ptr(), mask.stride()
        return [mask]
    if spans.runs is not None:
        runs = spans.runs.to("cpu").contiguous()
        batch, heads, rows, count = runs.shape[:4]
        call.runs, call.run_count = runs.data_ptr(), count
        strides = runs.stride()
        call.runs_stride = (strides[0] * (batch > 1), strides[1] * (heads > 1), strides[2] * (rows > 1))
        return [runs]
    kept = []
    for name, number in (("first", spans.first), ("last", spans.last), ("left", spans.left), ("right", spans.right)):
        if number is None or (isinstance(number, int) and number == 0 and name == "first"):
            continue
        if not isinstance(number, Tensor):
            number = torch.full((x.query.shape[0],), number, dtype=torch.int32)
        number = number.to("cpu", torch.int32).expand(x.query.shape[0]).contiguous()
        setattr(call, name, number.data_ptr())
        kept.append(number)
    return kept


def _modifications(call: _Call, x: Inputs) -> list[Tensor]:
    """What is done to the scores, and the sinks."""
    kept: list[Tensor] = []
    if x.sinks is not None:
        sinks = x.sinks.float().contiguous()
        call.sinks = sinks.data_ptr()
        kept.append(sinks)
    for mod in x.score_mods:
        low: Any = mod.lowered()
        if low.kind == "softcap":
            call.softcap = low.values
            continue
        if low.kind == "tile":
            bias = x._in_place(low.values).float().expand(*x.query.shape[:3], x.key.shape[-2])
            call.bias, call.bias_stride = bias.data_ptr(), bias.stride()
            kept.append(bias)
            continue
        values = torch.as_tensor(low.values).float().contiguous()
        setattr(call, low.kind, values.data_ptr())
        kept.append(values)
        if low.kind == "table":
            call.table_size = values.shape[-1]
        queries, keys = x.queries, x.keys
        call.distance = keys.start + keys.offset - queries.start - queries.offset
    return kept


@functools.cache
def _loaded() -> tuple[Any, str | None]:
    """The library, or why it is not there."""
    places = [Path(__file__).parent]
    with contextlib.suppress(metadata.PackageNotFoundError):
        # an editable installation leaves the source where it is and puts what was built elsewhere
        places.append(Path(str(metadata.distribution("headwise").locate_file("headwise/backends"))))
    found = next((path for place in places for path in place.glob("kernel.*") if path.suffix in SUFFIXES), None)
    if found is None:
        return None, "its library was not built when headwise was installed"
    try:
        kernel = ctypes.CDLL(str(found))
    except OSError:
        return None, "its library cannot be loaded"
    kernel.hw_call_size.restype = ctypes.c_int64
    kernel.hw_instructions.restype = ctypes.c_char_p
    kernel.hw_forward.argtypes = (ctypes.POINTER(_Call), ctypes.c_char_p)
    if kernel.hw_call_size() != ctypes.sizeof(_Call):
        return None, "its library is of another version; install headwise again"
    return kernel, None


def library() -> Any:
    """The loaded library; None where there is none."""
    return _loaded()[0]


def why_missing() -> str | None:
    """Why the library is not there; None when it is."""
    return _loaded()[1]


def instruction_sets() -> tuple[str, ...]:
    """The instruction sets that the library has and this processor knows, best first.

    Example:
        >>> from headwise.backends.native import instruction_sets
        >>> "portable" in instruction_sets() or instruction_sets() == ()
        True
    """
    return () if library() is None else tuple(library().hw_instructions().decode().split())
