"""A call as the CPU kernel reads it: the C face of csrc/kernel.h, found beside this package and called by ctypes.

It neither links torch nor Python, and trusts its caller: what is passed here was checked before.
"""

import contextlib
import ctypes
import math
import struct
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.errors import UnsupportedError

SUFFIXES = (".so", ".dylib", ".dll")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LEARN = (0, 1, 2, 10, 11, 12, 15)  # where query, key, value, bias, slopes, table and sinks stand in what is given

# hw_call of csrc/kernel.h, field by field
CALL = struct.Struct(
    "@"
    "6P"  # query, key, value, out, rest, lse
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
    "QQ3q"  # seed, threshold, first_query, first_key, first_head
    "fffiii0q"  # keep, scale, softcap, dtype, threads, bias_hides
)
POINTERS = struct.Struct("@6P")  # what CALL begins with
# hw_gradients: out_grad, its strides, lse_grad, and what is written: query, key, value, bias, its stride, slopes …
GRADIENTS = struct.Struct("@P3qP4Pq3P")

SLOTS = 2**30  # more than a call has
NOTHING = (0, 0, 0, 0)
NO_TILE = (0, 0, 0, 0, 0)
NO_DROPOUT = (0, 0, 0, 0, 0, 0.0)


def _check(status: int) -> None:
    if status == 1:
        raise MemoryError("The CPU kernel found no memory for what it packs; make some free.")
    if status:
        raise UnsupportedError("The CPU kernel was told to use instructions that this processor lacks; name others.")


def forward(query: Tensor, key: Tensor, value: Tensor, *given: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Call the kernel: the output, laid out as the last projection reads it.

    With it the log-sum-exp if it is wanted, and what rounding took from the output, which the backward reads. What is
    given is that of ``pack``, then whether the two are wanted, and the instructions.
    """
    with_lse, with_rest, instructions = given[-3:]
    query, key, value = _dense(query), _dense(key), _dense(value)
    out, lse, rest = new_results(query, value.shape[3], with_lse, with_rest)
    call, _kept = pack(out, lse, rest, query, key, value, *given[:-3])
    _check(KERNEL.hw_forward(call, instructions.encode()))
    return out, lse, rest


def backward(
    out_grad: Tensor,
    lse_grad: Tensor | None,
    out: Tensor,
    lse: Tensor,
    rest: Tensor,
    wanted: list[bool],
    *given: Any,
) -> list[Tensor | None]:
    """The gradients of query, key, value, bias, slopes, table and sinks; None for those not wanted.

    Those of bias, slopes, table and sinks are still to be summed over what is broadcast. What is given is that of
    ``pack``, and the instructions.
    """
    query, key, value = (_dense(tensor) for tensor in given[:3])
    out_grad = _dense(out_grad.to(query.dtype))
    call, _kept = pack(out, lse, rest if rest.numel() else None, query, key, value, *given[3:-1])
    if lse_grad is not None:
        lse_grad = _dense(lse_grad.float()).contiguous()
    grads = new_gradients([given[i] for i in LEARN], wanted)
    pointers = [0 if grad is None else grad.data_ptr() for grad in grads]
    gradients = GRADIENTS.pack(
        out_grad.data_ptr(),
        *out_grad.stride()[:3],
        0 if lse_grad is None else lse_grad.data_ptr(),
        *pointers[:4],
        0 if grads[3] is None or len(grads[3]) == 1 else grads[3].stride(0),
        *pointers[4:],
    )
    _check(KERNEL.hw_backward(call, gradients, given[-1].encode()))
    return grads


class Form:
    """Calls that differ in nothing but the numbers in their tensors: all the rest is packed once.

    What is given is that of ``pack``, without tensors.
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, given: tuple[Any, ...], instructions: str) -> None:
        out, _, _ = new_results(query, value.shape[3], False, False)
        self.given, self.size, self.is_half = given, out.shape, query.dtype != torch.float32
        self.strides = [tensor.stride() for tensor in (query, key, value, out)]
        self.numbers = pack(out, None, None, query, key, value, *given)[0][POINTERS.size :]
        self.instructions = instructions.encode()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, learns: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What the function ``forward`` returns; the second and third are None unless the call learns."""
        out = query.new_empty_strided(self.size, self.strides[3])
        lse = query.new_empty(self.size[:3], dtype=torch.float32) if learns else None
        rest = torch.empty_like(out) if learns and self.is_half else None
        _check(KERNEL.hw_forward(_pointers(query, key, value, out, rest, lse) + self.numbers, self.instructions))
        return out, lse, rest

    def backward(
        self,
        out_grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        rest: Tensor | None,
        wanted: Sequence[bool],
    ) -> list[Tensor | None]:
        """The gradients of query, key and value; None for those not wanted."""
        laid = zip((query, key, value, out), self.strides, strict=True)
        if any(tensor.stride() != strides for tensor, strides in laid):  # by hooks on saved tensors
            rest = out.new_empty(0) if rest is None else rest
            wanted, given = [*wanted, False, False, False, False], (*self.given, self.instructions.decode())
            return backward(out_grad, None, out, lse, rest, wanted, query, key, value, *given)[:3]
        out_grad = _dense(out_grad.to(query.dtype))
        grads = [_room(x) if want else None for x, want in zip((query, key, value), wanted, strict=True)]
        gradients = GRADIENTS.pack(
            *(out_grad.data_ptr(), *out_grad.stride()[:3], 0),
            *(0 if grad is None else grad.data_ptr() for grad in grads),
            *(0, 0, 0, 0, 0),
        )
        call = _pointers(query, key, value, out, rest, lse) + self.numbers
        _check(KERNEL.hw_backward(call, gradients, self.instructions))
        return grads


def _pointers(query: Tensor, key: Tensor, value: Tensor, out: Tensor, rest: Tensor | None, lse: Tensor | None) -> bytes:
    given = (query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr())
    return POINTERS.pack(*given, 0 if rest is None else rest.data_ptr(), 0 if lse is None else lse.data_ptr())


def _room(tensor: Tensor) -> Tensor:
    batch, heads, length, size = tensor.shape
    return tensor.new_empty(batch, length, heads, size).transpose(1, 2)


def pack(
    out: Tensor,
    lse: Tensor | None,
    rest: Tensor | None,
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
    dropout_p: float,
    seed: Tensor | None,
    starts: list[int],
) -> tuple[bytes, list[Tensor]]:
    """A call as the kernel reads it, and the tensors that have to stay alive until it has."""
    batch, heads, rows, head_dim = query.shape
    kv_heads, slots = key.shape[1], key.shape[2]
    v_head_dim = value.shape[3]
    query_strides, key_strides, value_strides = query.stride(), key.stride(), value.stride()
    size = (batch, heads, rows, slots)
    kept: list[Tensor] = []
    per_row = NOTHING if first is last is left is right is None else _per_row((first, last, left, right), batch, kept)
    runs_at, run_count = 0, 0
    runs_strides: tuple[int, ...] = NOTHING[:3]
    if runs is not None:
        runs = runs.to("cpu", torch.int32).contiguous()
        kept.append(runs)
        runs_at, run_count = runs.data_ptr(), runs.shape[3]
        runs_strides = tuple(n * (m > 1) for n, m in zip(runs.stride()[:3], runs.shape[:3], strict=True))
    return (
        CALL.pack(
            *(query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()),
            *(0 if rest is None else rest.data_ptr(), 0 if lse is None else lse.data_ptr()),
            *(batch, heads, kv_heads, rows, slots, head_dim, v_head_dim),
            *query_strides[:3],
            *key_strides[:3],
            *value_strides[:3],
            *out.stride()[:3],
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
            *(
                NO_DROPOUT
                if seed is None
                else (int(seed) % 2**64, math.ceil(dropout_p * 2**32), *starts, 1 / (1 - dropout_p))
            ),
            *(scale, softcap, DTYPES[query.dtype], torch.get_num_threads(), 0),
        ),
        kept,
    )


def _dense(tensor: Tensor) -> Tensor:
    if tensor._is_zerotensor():
        return tensor.clone()  # it has no memory
    if tensor.stride(-1) == 1 and not tensor.is_neg():
        return tensor
    return tensor.contiguous().resolve_neg()  # views of complex numbers may be negated only when they are read


def new_results(
    query: Tensor, v_head_dim: int, with_lse: bool, with_rest: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Room for the output, the log-sum-exp and what rounding takes from the output."""
    batch, heads, rows = query.shape[:3]
    strides = (rows * heads * v_head_dim, v_head_dim, heads * v_head_dim, 1)
    out = query.new_empty_strided((batch, heads, rows, v_head_dim), strides)
    lse = query.new_empty((batch, heads, rows), dtype=torch.float32) if with_lse else None
    return out, lse, torch.empty_like(out) if with_rest and query.dtype != torch.float32 else None


def _per_row(bounds: tuple[Tensor | None, ...], batch: int, kept: list[Tensor]) -> tuple[int, ...]:
    # a bound beyond all slots may be one that 32 bits do not hold
    whole = (b.clamp(-SLOTS, SLOTS).to("cpu", torch.int32) for b in bounds if b is not None)
    kept += [b.expand(batch).contiguous() for b in whole]
    alive = iter(kept)
    return tuple(0 if b is None else next(alive).data_ptr() for b in bounds)


def _tile(tile: Tensor, size: tuple[int, ...], dtype: torch.dtype, kept: list[Tensor]) -> tuple[int, ...]:
    tile = tile.to(dtype).resolve_neg().expand(size)
    kept.append(tile)
    return tile.data_ptr(), *tile.stride()


def _numbers(values: Tensor, kept: list[Tensor]) -> int:
    values = values.to("cpu", torch.float32).contiguous().resolve_neg()
    kept.append(values)
    return values.data_ptr()


def new_gradients(learn: list[Any], wanted: list[bool]) -> list[Tensor | None]:
    """Room for the gradients of query, key, value, bias, slopes, table and sinks, of which some are wanted."""
    query, key, value, bias, _slopes, table, _sinks = learn
    (batch, heads, rows), slots = query.shape[:3], key.shape[2]
    grads = [_room(tensor) if want else None for tensor, want in zip((query, key, value), wanted[:3], strict=True)]
    each = 1 if bias is None or bias.dim() == 2 or bias.shape[0] == 1 else batch
    grads.append(query.new_zeros((each, heads, rows, slots), dtype=torch.float32) if wanted[3] else None)
    lengths = ((), () if table is None else (table.shape[-1],), ())
    for length, want in zip(lengths, wanted[4:], strict=True):
        grads.append(query.new_empty((batch, heads, *length), dtype=torch.float32) if want else None)
    return grads


def _load() -> tuple[Any, str | None]:
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
    kernel.hw_size.restype = ctypes.c_int64
    kernel.hw_instructions.restype = ctypes.c_char_p
    kernel.hw_forward.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
    kernel.hw_backward.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p)
    if kernel.hw_size() != CALL.size + GRADIENTS.size:
        return None, "its library is of another version; install headwise again"
    return kernel, None


KERNEL, MISSING = _load()  # MISSING is why it is not there
