"""headwise's own CPU kernel: masks by their runs of keys, score modifications in place, keys packed a tile at a time.

The kernel is C++ behind a C face (csrc/kernel.h), found beside this file's package and called by ctypes. It neither
links torch nor Python. What is passed to it is checked here or before: it trusts its caller.
"""

import contextlib
import ctypes
import functools
import struct
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

from headwise.backends.base import Backend, Inputs
from headwise.errors import UnsupportedError

SUFFIXES = (".so", ".dylib", ".dll")
MOST = 256  # largest head size of the kernel
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FAR = 2**40  # a bound that bounds nothing

# hw_call of csrc/kernel.h, field by field
CALL = struct.Struct(
    "@"
    "5P"  # query, key, value, out, lse
    "7q"  # batch, heads, kv_heads, rows, slots, head_dim, v_head_dim
    "12q"  # strides of query, key, value, out
    "4q"  # bounds
    "4P"  # first, last, left, right
    "P4q"  # runs, their strides and count
    "P4q"  # mask and its strides
    "P4q"  # bias and its strides
    "PPq"  # slopes, table and its size
    "q"  # distance
    "P"  # sinks
    "ffii"  # scale, softcap, dtype, threads
)


class Native(Backend):
    """The CPU kernel of headwise.

    Args:
        instructions: The instruction set to use, one of ``instruction_sets()``; None for the best of this processor.

    Raises:
        UnsupportedError: When the kernel or the processor has no such instructions.
    """

    name = "native"
    exports = False  # a file that holds its operator runs only where headwise is installed

    def __init__(self, instructions: str | None = None) -> None:
        if instructions is not None and instructions not in instruction_sets():
            there = ", ".join(instruction_sets()) or "none"
            raise UnsupportedError(
                f"The CPU kernel has no instructions {instructions!r:.40} on this processor; there are: {there}."
            )
        self.instructions = instructions or ""

    def why_not(self, x: Inputs) -> str | None:
        query = x.query
        if query.device.type != "cpu":
            return "it computes on the CPU only"
        if query.dtype not in DTYPES:
            return "it computes in float32, bfloat16 and float16 only"
        if x.needs_grad:
            return "its backward is not written yet"
        if x.dropout_p > 0:
            return "it has no dropout yet"
        if query.shape[-1] > MOST or x.value.shape[-1] > MOST:
            return "its heads have at most 256 features"
        if torch._C._functorch.maybe_current_level() is not None:
            return "it does not compose with function transforms (vmap, grad, jvp)"
        if torch._C._get_tracing_state() is not None:
            return "torch.jit.trace does not see it"
        if not torch.compiler.is_compiling() and not (_is_plain(query) and _is_plain(x.key) and _is_plain(x.value)):
            return "it reads the memory of plain tensors, and knows no subclass"
        if forward_ad._current_level >= 0 and any(
            t is not None and forward_ad.unpack_dual(t).tangent is not None
            for t in (query, x.key, x.value, x.sinks, *x.score_tensors())
        ):
            return "it has no forward-mode derivative"
        return _why_not_modified(x) or _loaded()[1]

    def run(self, x: Inputs) -> tuple[Float[Tensor, "B H T V"], Float[Tensor, "B H T"] | None]:
        wanted = x.lse != "no"
        call = OPERATOR if _is_watched() else forward
        out, lse = call(
            x.query, x.key, x.value, *_limits(x), *_modifications(x), x.sinks, x.scale, wanted, self.instructions
        )
        return out, lse if wanted else None  # an operator has to return a tensor


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor or type(tensor) is nn.Parameter


def _is_watched() -> bool:
    """Whether a compiler, a mode or a profiler is to see an operator of torch rather than a call of the kernel."""
    return (
        torch.compiler.is_compiling()
        or _python_dispatch._get_current_dispatch_mode() is not None
        or torch.autograd._profiler_enabled()
    )


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
    return x.queries.positions is x.keys.positions is None and not any(isinstance(n, Tensor) for n in numbers)


def _limits(x: Inputs) -> tuple[Any, ...]:
    """What each query may see: four bounds as numbers, the same as tensors, runs, and a mask."""
    spans = x.spans()
    if spans is None:
        return [0, FAR, -FAR, FAR], None, None, None, None, None, x.allowed()
    if spans.runs is not None:
        return [0, FAR, -FAR, FAR], None, None, None, None, spans.runs, None
    numbers: list[Any] = [0, FAR, -FAR, FAR]
    tensors: list[Tensor | None] = [None] * 4
    for i, bound in enumerate((spans.first, spans.last, spans.left, spans.right)):
        if isinstance(bound, Tensor):
            tensors[i] = bound
        elif bound is not None:
            numbers[i] = bound
    return numbers, *tensors, None, None


def _modifications(x: Inputs) -> tuple[Any, ...]:
    """What is done to the scores: a bias, slopes, a table, how far slot 0 is from row 0, and a cap."""
    if not x.score_mods:
        return None, None, None, 0, 0.0
    found: dict[str, Any] = {low.kind: low.values for mod in x.score_mods if (low := mod.lowered()) is not None}
    tile, distance = found.get("tile"), 0
    if "slopes" in found or "table" in found:
        distance = x.keys.start + x.keys.offset - x.queries.start - x.queries.offset
    return (
        None if tile is None else x._in_place(tile),
        found.get("slopes"),
        found.get("table"),
        distance,
        found.get("softcap", 0.0),
    )


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: list[int],
    first: Tensor | None,
    last: Tensor | None,
    left: Tensor | None,
    right: Tensor | None,
    runs: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    slopes: Tensor | None,
    table: Tensor | None,
    distance: int,
    softcap: float,
    sinks: Tensor | None,
    scale: float,
    with_lse: bool,
    instructions: str,
) -> tuple[Tensor, Tensor | None]:
    """Call the kernel: the output, laid out as the last projection reads it, and the log-sum-exp if it is wanted."""
    batch, heads, rows, head_dim = query.shape
    kv_heads, slots = key.shape[1], key.shape[2]
    v_head_dim = value.shape[3]
    query_strides, key_strides, value_strides = query.stride(), key.stride(), value.stride()
    if query_strides[3] != 1 or key_strides[3] != 1 or value_strides[3] != 1:
        query, key, value = (t if t.stride(3) == 1 else t.contiguous() for t in (query, key, value))
        query_strides, key_strides, value_strides = query.stride(), key.stride(), value.stride()
    out, lse = _results(query, v_head_dim, with_lse)
    threads = torch.get_num_threads()
    size = (batch, heads, rows, slots)
    kept: list[Tensor] = []  # what the kernel reads has to stay alive
    per_row = NOTHING if first is last is left is right is None else _per_row((first, last, left, right), batch, kept)
    runs_at, runs_strides, run_count = 0, NOTHING[:3], 0
    if runs is not None:
        runs = runs.to("cpu", torch.int32).contiguous()
        kept.append(runs)
        runs_at, run_count = runs.data_ptr(), runs.shape[3]
        runs_strides = tuple(n * (m > 1) for n, m in zip(runs.stride()[:3], runs.shape[:3], strict=True))
    status = library().hw_forward(
        CALL.pack(
            *(query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), 0 if lse is None else lse.data_ptr()),
            *(batch, heads, kv_heads, rows, slots, head_dim, v_head_dim),
            *query_strides[:3],
            *key_strides[:3],
            *value_strides[:3],
            *(rows * heads * v_head_dim, v_head_dim, heads * v_head_dim),
            *bounds,
            *per_row,
            runs_at,
            *runs_strides,
            run_count,
            *(NO_TILE if mask is None else _tile(mask, size, torch.bool, kept)),
            *(NO_TILE if bias is None else _tile(bias, size, torch.float32, kept)),
            0 if slopes is None else _numbers(slopes, kept),
            *((0, 0) if table is None else (_numbers(table, kept), table.shape[-1])),
            distance,
            0 if sinks is None else _numbers(sinks, kept),
            *(scale, softcap, DTYPES[query.dtype], threads),
        ),
        instructions.encode(),
    )
    if status:
        raise NO_MEMORY
    return out, lse


NO_MEMORY = MemoryError("The CPU kernel found no memory for what it packs; make some free.")
NOTHING = (0, 0, 0, 0)
NO_TILE = (0, 0, 0, 0, 0)


def _results(query: Tensor, v_head_dim: int, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    batch, heads, rows = query.shape[:3]
    strides = (rows * heads * v_head_dim, v_head_dim, heads * v_head_dim, 1)
    out = query.new_empty_strided((batch, heads, rows, v_head_dim), strides)
    return out, query.new_empty((batch, heads, rows), dtype=torch.float32) if with_lse else None


def _per_row(bounds: tuple[Tensor | None, ...], batch: int, kept: list[Tensor]) -> tuple[int, ...]:
    kept += [b.to("cpu", torch.int32).expand(batch).contiguous() for b in bounds if b is not None]
    alive = iter(kept)
    return tuple(0 if b is None else next(alive).data_ptr() for b in bounds)


def _tile(tile: Tensor, size: tuple[int, ...], dtype: torch.dtype, kept: list[Tensor]) -> tuple[int, ...]:
    tile = tile.to(dtype).expand(size)
    kept.append(tile)
    return tile.data_ptr(), *tile.stride()


def _numbers(values: Tensor, kept: list[Tensor]) -> int:
    values = values.float().contiguous()
    kept.append(values)
    return values.data_ptr()


# For compilers, modes and profilers; what they do not watch calls `forward` itself, which costs less.
_LIBRARY = torch.library.Library("headwise", "DEF")
_LIBRARY.define(
    "native(Tensor query, Tensor key, Tensor value, SymInt[] bounds, Tensor? first, Tensor? last, Tensor? left, "
    "Tensor? right, Tensor? runs, Tensor? mask, Tensor? bias, Tensor? slopes, Tensor? table, SymInt distance, "
    "float softcap, Tensor? sinks, float scale, bool with_lse, str instructions) -> (Tensor, Tensor)"
)


def _operator(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    out, lse = forward(query, *others)
    return out, query.new_empty(0, dtype=torch.float32) if lse is None else lse


_LIBRARY.impl("native", _operator, "CPU")
OPERATOR = torch.ops.headwise.native.default


@torch.library.register_fake("headwise::native", lib=_LIBRARY)
def _shape_of_results(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    out, lse = _results(query, value.shape[3], others[-2])
    return out, query.new_empty(0, dtype=torch.float32) if lse is None else lse


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
    kernel.hw_forward.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    if kernel.hw_call_size() != CALL.size:
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
