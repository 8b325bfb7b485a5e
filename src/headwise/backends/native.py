"""headwise's own CPU kernel: masks by their runs of keys, score modifications in place, keys packed a tile at a time.

What the kernel can do, how a call is lowered to it (``native_call`` then packs it), and the operator with its
derivatives.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad

from headwise import philox
from headwise.backends.base import Backend, Inputs, is_watched
from headwise.backends.native_call import (
    DTYPES,
    KERNEL,
    LEARN,
    MISSING,
    Form,
    backward,
    forward,
    new_gradients,
    new_results,
)
from headwise.errors import UnsupportedError

MOST = 256  # largest head size of the kernel
FAR = 2**40  # a bound that bounds nothing


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
        if x.dropout_p > 0 and not (x.queries.is_run and x.keys.is_run and _starts_at_numbers(x)):
            return "its dropout is for runs of tokens that start at the same number in each sequence"
        if query.shape[-1] > MOST or x.value.shape[-1] > MOST:
            return "its heads have at most 256 features"
        if torch._C._functorch.maybe_current_level() is not None:
            return "it does not compose with function transforms (vmap, grad, jvp)"
        if not torch.compiler.is_compiling() and not all(_is_plain(t) for t in _read(x)):
            return "it reads the memory of plain tensors, and knows no subclass"
        if forward_ad._current_level >= 0 and any(
            t is not None and forward_ad.unpack_dual(t).tangent is not None
            for t in (query, x.key, x.value, x.sinks, *x.score_tensors())
        ):
            return "it has no forward-mode derivative"
        return _why_not_modified(x) or MISSING

    def run(self, x: Inputs) -> tuple[Float[Tensor, "B H T V"], Float[Tensor, "B H T"] | None]:
        wanted, learns = x.lse != "no", x.needs_grad
        call = OPERATOR if is_watched() else _Learned.apply if learns else forward
        out, lse, _rest = call(x.query, x.key, x.value, *_given(x), wanted or learns, learns, self.instructions)
        return out, lse if wanted else None

    def plan(self, x: Inputs) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        if type(self) is not Native:  # which may compute something else in its run
            return None
        given, tensors = _given(x), (x.query, x.key, x.value)
        if any(isinstance(value, Tensor) for value in given) or any(t.stride(3) != 1 for t in tensors):
            return None
        form = Form(*tensors, given, self.instructions)
        if x.needs_grad:
            return lambda query, key, value: _Repeated.apply(query, key, value, form)
        return lambda query, key, value: form.forward(query, key, value, False)[0]


def _given(x: Inputs) -> tuple[Any, ...]:
    """What ``pack`` takes beside query, key and value."""
    return *_limits(x), *_modifications(x), x.sinks, x.scale, *_dropout(x)


def _read(x: Inputs) -> list[Tensor]:
    """The tensors whose memory the kernel reads."""
    others = [] if x.sinks is None else [x.sinks]
    others += [tensor for mod in x.score_mods for tensor in mod.buffers()]
    return [x.query, x.key, x.value, *others, *x.score_tensors(), *x.mask.tensors()]


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor or type(tensor) is nn.Parameter


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
    # what comes after the cap only adds, in any order
    return "it caps scores before anything else" if "softcap" in kinds[1:] else None


def _starts_at_numbers(x: Inputs) -> bool:
    return not isinstance(x.queries.start, Tensor) and not isinstance(x.keys.start, Tensor)


def _dropout(x: Inputs) -> tuple[Any, ...]:
    """The probability, the seed, and where the rule begins to count queries, keys and heads."""
    if x.dropout_p == 0:
        return 0.0, None, [0, 0, 0]
    seed = x.seed
    if seed is None:  # one number of torch's generator
        seed = torch.randint(2**63 - 1, (), device="cpu")
    elif not isinstance(seed, Tensor):
        seed = torch.tensor(seed - 2**64 * (seed >= 2**63), device="cpu")
    return x.dropout_p, seed, [x.queries.start, x.keys.start, x.head_offset]


def _in_step(x: Inputs) -> bool:
    """Whether the distance of a query and a key is known by their rows and slots alone."""
    if not (x.queries.is_run and x.keys.is_run):
        return False
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
    found: dict[str, Any] = {}
    again = False  # a second one of a kind
    for mod in x.score_mods:
        low: Any = mod.lowered()
        again = again or low.kind in found
        found[low.kind] = low.values
    tile = found.get("tile")
    distance: Any = 0
    if again or (("slopes" in found or "table" in found) and not _in_step(x)):  # all that is added, as one bias
        zeros = torch.zeros((), device=x.query.device).expand(*x.query.shape[:3], x.key.shape[-2])
        added = tuple(mod for mod in x.score_mods if mod.lowered().kind != "softcap")  # type: ignore[union-attr]
        return x.modify(zeros, mods=added), None, None, 0, found.get("softcap", 0.0)
    if "slopes" in found or "table" in found:
        distance = x.keys.start + x.keys.offset - x.queries.start - x.queries.offset
    return (
        None if tile is None else x._in_place(tile),
        found.get("slopes"),
        found.get("table"),
        distance,
        found.get("softcap", 0.0),
    )


# For autograd, compilers, modes and profilers; a call that none of them watches goes to `forward`, which costs less.
_LIBRARY = torch.library.Library("headwise", "DEF")
_GIVEN = (
    "Tensor query, Tensor key, Tensor value, SymInt[] bounds, Tensor? first, Tensor? last, Tensor? left, "
    "Tensor? right, Tensor? runs, Tensor? mask, Tensor? bias, Tensor? slopes, Tensor? table, SymInt distance, "
    "float softcap, Tensor? sinks, float scale, float dropout_p, Tensor? seed, SymInt[] starts"
)
_LIBRARY.define(f"native({_GIVEN}, bool with_lse, bool with_rest, str instructions) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(
    f"native_backward(Tensor out_grad, Tensor? lse_grad, Tensor out, Tensor lse, Tensor rest, bool[] wanted, {_GIVEN}, "
    "str instructions) -> Tensor[]"
)
OPERATOR = torch.ops.headwise.native.default
BACKWARD = torch.ops.headwise.native_backward.default


def _operator(query: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, rest = forward(query, *others)
    # an operator has to return tensors
    return out, _empty(query) if lse is None else lse, _empty(query) if rest is None else rest


def _empty(like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.float32)


def _operator_backward(out_grad: Tensor, *others: Any) -> list[Tensor]:
    return [_empty(out_grad) if grad is None else grad for grad in backward(out_grad, *others)]


_LIBRARY.impl("native", _operator, "CPU")
_LIBRARY.impl("native_backward", _operator_backward, "CPU")


@torch.library.register_fake("headwise::native", lib=_LIBRARY)
def _shapes(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, rest = new_results(query, value.shape[3], *others[-3:-1])
    return out, _empty(query) if lse is None else lse, _empty(query) if rest is None else rest


@torch.library.register_fake("headwise::native_backward", lib=_LIBRARY)
def _shapes_backward(*args: Any) -> list[Tensor]:
    grads = new_gradients([args[6 + i] for i in LEARN], args[5])
    return [_empty(args[0]) if grad is None else grad for grad in grads]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.places = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
    ctx.rest = [None if isinstance(value, Tensor) else value for value in inputs]
    ctx.save_for_backward(*(inputs[i] for i in ctx.places), *output)


def _differentiate(ctx: Any, out_grad: Tensor | None, lse_grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    *tensors, out, lse, rest = ctx.saved_tensors
    out_grad = torch.zeros_like(out) if out_grad is None else out_grad
    given = list(ctx.rest)
    for i, tensor in zip(ctx.places, tensors, strict=True):
        given[i] = tensor
    wanted = [given[i] is not None and ctx.needs_input_grad[i] for i in LEARN]
    return tuple(_derive(given, wanted, out_grad, lse_grad, out, lse, rest))


def _derive(
    given: list[Any],
    wanted: list[bool],
    out_grad: Tensor,
    lse_grad: Tensor | None,
    out: Tensor,
    lse: Tensor,
    rest: Tensor,
) -> list[Tensor | None]:
    """The gradients of all that was given to the operator; None for those that are not wanted of ``LEARN``."""
    found: list[Tensor | None] = [None] * len(given)
    if torch.is_grad_enabled() or _is_many(out_grad) or (lse_grad is not None and _is_many(lse_grad)):
        # asked for a graph of the gradient, or for many at once: differentiate the plain formula instead
        leaves, again = [i for i, want in zip(LEARN, wanted, strict=True) if want], torch.is_grad_enabled()
        given = list(given)
        with torch.enable_grad():
            for i in leaves:  # query, key and value may be one tensor, or made of one another: each gets its own part
                given[i] = given[i].view_as(given[i]) if again else given[i].detach().requires_grad_()
            made_by = list(zip(_plain(*given[:-3]), (out_grad, lse_grad), strict=True))
        made_by = [(made, grad) for made, grad in made_by if made.requires_grad and grad is not None]
        grads = torch.autograd.grad(
            [made for made, _ in made_by],
            [given[i] for i in leaves],
            [grad for _, grad in made_by],
            create_graph=again,
            allow_unused=True,
        )
        for i, grad in zip(leaves, grads, strict=True):
            found[i] = grad
        return found
    call: Callable[..., list[Tensor | None]] = BACKWARD if is_watched() else backward
    own = call(out_grad, lse_grad, out, lse, rest, wanted, *given[:-3], given[-1])
    for i, part, want in zip(LEARN, own, wanted, strict=True):
        if want and i < 3:
            found[i] = part
        elif want and part is not None:  # slopes, table and sinks come for each sequence
            part = part if i == LEARN[3] else part.sum(0)
            found[i] = part.sum_to_size(given[i].shape).to(given[i].dtype)
    return found


def _is_many(grad: Tensor) -> bool:
    """Whether it stands for the gradients of ``is_grads_batched=True``, and has no memory of its own."""
    return torch._C._functorch.is_legacy_batchedtensor(grad)


torch.library.register_autograd("headwise::native", _differentiate, setup_context=_remember, lib=_LIBRARY)


class _Learned(torch.autograd.Function):
    """The same for autograd alone: torch takes a quarter of a millisecond to look up the arguments of an operator."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        output = _operator(*inputs)
        ctx.set_materialize_grads(False)
        _remember(ctx, inputs, output)
        return output

    backward = staticmethod(_differentiate)


class _Repeated(torch.autograd.Function):
    """The same for calls of a form: small ones are mostly Python."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, form: Form) -> Tensor:
        out, lse, rest = form.forward(query, key, value, True)
        ctx.save_for_backward(query, key, value, out, lse, rest)
        ctx.form = form
        return out

    @staticmethod
    def backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, lse, rest = ctx.saved_tensors
        form, wanted = ctx.form, ctx.needs_input_grad[:3]
        if not (torch.is_grad_enabled() or is_watched() or _is_many(out_grad)):
            return *form.backward(out_grad, *tensors, out, lse, rest, wanted), None
        given = [*tensors, *form.given, True, True, form.instructions.decode()]
        wanted = [*wanted, False, False, False, False]
        rest = _empty(out) if rest is None else rest
        return *_derive(given, wanted, out_grad, None, out, lse, rest)[:3], None


def _plain(
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
) -> tuple[Tensor, Tensor]:
    """The same by the formula, in operations of torch that can be differentiated to any order."""
    rows, slots, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    b, h, t, s = (torch.arange(n, device=query.device) for n in (*query.shape[:2], rows, slots))
    t = t[:, None]
    tensors = (None if bound is None else bound[:, None, None, None] for bound in (first, last, left, right))
    low, high, behind, ahead = zip(bounds, tensors, strict=True)
    seen = torch.ones(1, 1, rows, slots, dtype=torch.bool, device=query.device)
    for bound in low:
        seen = seen if bound is None else seen & (s >= bound)
    for bound in high:
        seen = seen if bound is None else seen & (s < bound)
    for bound in behind:
        seen = seen if bound is None else seen & (s >= t + bound)
    for bound in ahead:
        seen = seen if bound is None else seen & (s < t + bound)
    if runs is not None:
        inside = (s >= runs[..., :1]) & (s < runs[..., 1:])
        seen = seen & inside.any(-2)
    if mask is not None:
        seen = seen & mask
    if bias is not None:
        seen = seen & (bias != -torch.inf)
        bias = bias.masked_fill(bias == -torch.inf, 0)
    seen = seen.expand(*query.shape[:3], slots)
    # what nobody sees may hold NaN, and 0 times NaN is NaN; so may a query that sees nothing
    unseen, dead = ~seen.any(-2)[..., None], ~seen.any(-1, keepdim=True)
    key, value = (x.float().repeat_interleave(group, 1).masked_fill(unseen, 0) for x in (key, value))
    scores = query.float().masked_fill(dead, 0) @ key.mT * scale
    scores = scores if softcap == 0 else softcap * (scores / softcap).tanh()
    away = s - t + distance
    scores = scores if slopes is None else scores - slopes.float()[:, None, None] * away.abs()
    if table is not None:
        middle = table.shape[-1] // 2
        scores = scores + table.float()[:, (away + middle).clamp(0, table.shape[-1] - 1)]
    scores = scores if bias is None else scores + bias
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:  # one more key, without a value
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(*scores.shape[:3], 1)], -1)
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    alive = scores.masked_fill(nothing, 0)
    weights = alive.softmax(-1).masked_fill(nothing, 0)[..., :slots]
    if seed is not None:
        b, h = b[:, None, None, None], h[:, None, None]
        kept = philox.keeps(seed, dropout_p, b, h + starts[2], t + starts[0], s + starts[1])
        weights = torch.where(kept, weights / (1 - dropout_p), 0)
    return (weights @ value).to(query.dtype), alive.logsumexp(-1).masked_fill(nothing[..., 0], -torch.inf)


def instruction_sets() -> tuple[str, ...]:
    """The instruction sets that the library has and this processor knows, best first.

    Example:
        >>> from headwise.backends.native import instruction_sets
        >>> "portable" in instruction_sets() or instruction_sets() == ()
        True
    """
    return () if KERNEL is None else tuple(KERNEL.hw_instructions().decode().split())
