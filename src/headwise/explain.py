"""What one call of attention does: steps, shapes, costs, the backend and why, what is odd about the mask.

The call is really made, and watched: the tensors are those of the layer's own modules, and the ``Inputs``
those that its backend is given, so an explanation cannot disagree with ``forward``.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from headwise.attention import MultiHeadAttention
from headwise.backends import BACKENDS, named
from headwise.backends.base import Backend, Inputs
from headwise.backends.native import OPERATOR, instruction_sets
from headwise.backends.reference import blocks
from headwise.errors import ShapeError, UnsupportedError
from headwise.functional import attention
from headwise.linear import widens
from headwise.lint import Lint, called, lint_mask, look_at
from headwise.masks import Dense, Full

INSIDE = "in the backend"
Event = tuple[str, Tensor, Tensor, nn.Module | None]  # what was done, before, after, by which module
MOVES = {"view": "split", "transpose": "transpose", "flatten": "merge", "to": "convert"}


@dataclass(frozen=True)
class Step:
    """One step of a call.

    Args:
        name: Such as "project q" or "softmax".
        formula: What is computed.
        letters_in: The dimensions of what goes in, such as "B T E".
        shape_in: Their sizes.
        letters_out: The dimensions of what comes out.
        shape_out: Their sizes.
        strides: Of what comes out, in elements; None where it exists in the backend only.
        memory: "given", "view" (the same numbers read in another order), "copy" (moved), "new" (computed), or
            "in the backend" (a fused kernel never writes it out).
        flops: Floating point operations for all pairs of query and key; exp and tanh count as one.
        useful_flops: The same for the pairs that the mask allows.
        bytes: Read and written if the step runs on its own; 0 for a view.
    """

    name: str
    formula: str
    letters_in: str
    shape_in: tuple[int, ...]
    letters_out: str
    shape_out: tuple[int, ...]
    strides: tuple[int, ...] | None
    memory: str
    flops: int = 0
    useful_flops: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Choice:
    """What one backend says to the call.

    Args:
        backend: Its name.
        verdict: "runs it", "could run it" or "cannot".
        why: The reason, with numbers.
    """

    backend: str
    verdict: str
    why: str


@dataclass(frozen=True)
class Explanation:
    """One call of attention, explained; printed as text.

    Example:
        >>> found = headwise.explain(MultiHeadAttention(8, 2), torch.randn(1, 3, 8))
        >>> found.sizes["H"], found.steps[0].name
        (2, 'project q')

    Args:
        sizes: B, H, K, T, S, D, V and E where there is one.
        dtype: Of queries, keys and values.
        mask: The mask as text.
        steps: The steps in order.
        backend: The one that runs the call; None where the one asked for cannot.
        choices: What each backend says, in order of preference.
        pairs: Pairs of query and key over batch and heads.
        allowed_pairs: How many of them the mask allows.
        fused_bytes: Bytes moved when the steps between score and sum keep their numbers in the backend.
        lints: What the mask linter found.
    """

    sizes: dict[str, int]
    dtype: str
    mask: str
    steps: tuple[Step, ...]
    backend: str | None
    choices: tuple[Choice, ...]
    pairs: int
    allowed_pairs: int
    fused_bytes: int
    lints: tuple[Lint, ...]

    @property
    def flops(self) -> int:
        """Floating point operations of all steps, for all pairs."""
        return sum(s.flops for s in self.steps)

    @property
    def useful_flops(self) -> int:
        """The same for the pairs that the mask allows."""
        return sum(s.useful_flops for s in self.steps)

    @property
    def bytes(self) -> int:
        """Bytes read and written if each step ran on its own."""
        return sum(s.bytes for s in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers, texts, lists and dictionaries, for JSON."""
        return asdict(self) | {"flops": self.flops, "useful_flops": self.useful_flops, "bytes": self.bytes}

    def heading(self) -> list[str]:
        """The sizes, the dtype and the mask, as lines."""
        words = {"B": "batch", "T": "queries", "S": "keys", "E": "embedding", "H": "query heads"}
        words |= {"K": "key/value heads", "D": "head size of q, k", "V": "of v"}
        sizes = [f"{k} = {n:,} {words[k]}" for k, n in self.sizes.items()]
        half = (len(sizes) + 1) // 2
        return ["; ".join(sizes[:half]) + ";", "; ".join(sizes[half:]), f"{self.dtype}, mask {self.mask}"]

    def totals(self) -> list[str]:
        """The sums over all steps, as lines."""
        share = f" = {self.allowed_pairs / self.pairs:.1%}" if self.pairs else ""
        return [
            f"pairs of query and key: {self.allowed_pairs:,} of {self.pairs:,} allowed{share}",
            f"forward: {amount(self.flops)}FLOP for all pairs, {amount(self.useful_flops)}FLOP for the allowed ones",
            f"memory: {amount(self.bytes)}B if each step runs on its own, {amount(self.fused_bytes)}B if "
            "score to sum are fused",
        ]

    def __str__(self) -> str:
        lines = [*self.heading(), ""]
        for number, s in enumerate(self.steps, 1):
            lines += [f"{number:2d} {s.name}: {s.formula}", *("     " + line for line in details(s))]
        lines += ["", *self.totals(), ""]
        lines += [f"backend {c.backend}: {c.verdict}: {c.why}" for c in self.choices]
        lines += ["", *(f"mask, {lint.kind}: {lint.text}" for lint in self.lints)]
        return "\n".join(lines if self.lints else lines[:-1])


def details(step: Step) -> list[str]:
    """Shapes, strides and costs of a step, as short lines."""
    lines = [f"({step.letters_in}) {shape(step.shape_in)} → ({step.letters_out}) {shape(step.shape_out)}"]
    lines += [step.memory + ("" if step.strides is None else f", strides {shape(step.strides)}")]
    if step.flops or step.bytes:
        useful = "" if step.useful_flops == step.flops else f" ({amount(step.useful_flops).strip()} useful)"
        lines += [f"{amount(step.flops)}FLOP{useful}, {amount(step.bytes)}B"]
    return lines


def shape(sizes: tuple[int, ...]) -> str:
    """Sizes as 2×3×5."""
    return "×".join(map(str, sizes))


def amount(number: float | int) -> str:
    """A number in three digits with the prefix of its unit: 1,500 as "1.5 k"."""
    for unit in ("", "k", "M", "G", "T"):
        if number < 999.5 or unit == "T":
            return f"{number:.3g} {unit}"
        number /= 1000
    return ""


def explain(target: Any, *tokens: Tensor | None, **call: Any) -> Explanation:
    """Make one call of a layer, or of ``attention``, and say what it does.

    The call is made with gradients, training mode and backend as they are; torch's random numbers and a given
    cache stay as they were. Where the backend asked for cannot run it, the explanation says why instead
    of raising.

    Args:
        target: The layer; or the queries, "B H T D".
        *tokens: What the layer takes: query, and key and value where they differ. Or the keys and the values.
        **call: Keywords of the layer's call (mask, score_mods, positions, …), or of ``attention``.

    Returns:
        The steps with shapes, strides and costs, the backend with the reasons against the others, and what is
        odd about the mask. It prints as text; ``to_dict()`` is for JSON.

    Raises:
        ShapeError: As the call itself would.

    Example:
        >>> layer = MultiHeadAttention(64, 8, mask=Causal())
        >>> found = explain(layer, torch.randn(2, 10, 64))
        >>> found.allowed_pairs, found.pairs
        (880, 1600)
        >>> [s.memory for s in found.steps if s.name in ("project q", "split q", "transpose q")]
        ['new', 'view', 'view']
    """
    first = next((t for t in (target, *tokens, *call.values()) if isinstance(t, Tensor)), None)
    cuda = [first.device] if first is not None and first.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        if isinstance(target, MultiHeadAttention):
            return _of_layer(target, tokens, call)
        if not isinstance(target, Tensor):
            raise ShapeError(f"explain takes a MultiHeadAttention or the queries first, not {type(target).__name__}.")
        seen = _Watched(call.pop("backend", "auto"))
        attention(target, *tokens, backend=seen, **call)  # type: ignore[arg-type]
        x = seen.inputs
        given = [_given(n, n[0], letters, getattr(x, n)) for n, letters in LETTERS.items()]
        return _explanation(seen, given, [], None)


LETTERS = {"query": "B H T D", "key": "B K S D", "value": "B K S V"}


def _of_layer(layer: MultiHeadAttention, tokens: tuple[Tensor | None, ...], call: dict[str, Any]) -> Explanation:
    events: list[Event] = []
    kinds: dict[str, tuple[nn.Module | None, ...]] = {
        "project": (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
    }
    kinds |= {"norm": (layer.q_norm, layer.k_norm), "rotate": (layer.rotary,)}
    handles = [
        module.register_forward_hook(lambda m, args, out, kind=kind: events.append((kind, args[0], out, m)))
        for kind, modules in kinds.items()
        for module in {id(m): m for m in modules if m is not None}.values()
    ]
    if call.get("cache") is not None:
        call["cache"] = _watched_cache(call["cache"], events)
    seen, layer_backend = _Watched(layer.backend), layer.backend
    try:
        layer.backend = seen
        with _Moves(events):
            layer(*tokens, **call)
    finally:
        layer.backend = layer_backend
        for handle in handles:
            handle.remove()
    inward = []
    letters = {"q": ("T", "H", "D"), "k": ("S", "K", "D"), "v": ("S", "K", "V")}
    widths = (layer.embed_dim, layer.key_dim, layer.value_dim)
    for (name, (count, heads, size)), full, width in zip(letters.items(), LETTERS, widths, strict=True):
        whole, apart, merged = LETTERS[full], f"B {count} {heads} {size}", f"B {count} {heads}·{size}"
        wide = f"B {count} " + ("E" if width == layer.embed_dim else f"E_{name}")
        ends = {"project": (wide, merged), "split": (merged, apart), "transpose": (apart, whole)}
        for event in _way_to(getattr(seen.inputs, full), events):
            inward.append(_layer_step(name, event, *ends.get(event[0], (whole, whole)), heads, size))
    order = ("project", "split", "transpose", "norm", "rotate", "convert", "cache")
    inward.sort(key=lambda step: order.index(step.name.split()[0]))  # stable: q, k, v within a step
    last = next(event for event in reversed(events) if event[0] == "project")
    wide = "B T E" if layer.out_dim == layer.embed_dim else "B T E_out"
    ends = {
        "transpose": ("B H T V", "B T H V"),
        "merge": ("B T H V", "B T H·V"),
        "project": ("B T H·V", wide),
    }
    outward = [
        _layer_step("out", event, *ends.get(event[0], ("B H T V", "B H T V")), "H", "V")
        for event in _way_to(last[2], events, seen.out)
    ]
    return _explanation(seen, inward, outward, layer.embed_dim)


def _way_to(tensor: Tensor, events: list[Event], start: Tensor | None = None) -> list[Event]:
    """The events that led to a tensor, oldest first: from ``start``, its projection, or what no event has."""
    way: list[Event] = []
    for event in reversed(events):  # backwards, so that a module stands for the operations in it
        kind, before, after, _ = event
        if after is tensor and after is not start and before is not after:
            way.insert(0, event)
            tensor = before
            if kind == "project" and start is None:
                break
    return way


FORMULAS = {
    "project": "{name} = tokens · W_{name}ᵀ{bias}",
    "split": "cut the last dimension into {heads} heads of {size} numbers",
    "transpose": "swap tokens and heads, so that a head has all its tokens",
    "norm": "normalise each head of {name}",
    "rotate": "turn pairs of numbers of {name} by position · frequency",
    "convert": "{name} in another dtype",
    "cache": "join {name} with those of earlier calls",
    "transpose back": "swap heads and tokens, so that a token has all its heads",
    "merge": "put the {heads} heads of a token side by side",
}


def _layer_step(name: str, event: Event, letters_in: str, letters_out: str, heads: str, size: str) -> Step:
    kind, a, b, module = event
    title = (
        {"transpose": "transpose back", "merge": "merge"}.get(kind, f"{kind} out")
        if name == "out"
        else f"{kind} {name}"
    )
    bias = " + b" if getattr(module, "bias", None) is not None else ""
    formula = FORMULAS.get(title, FORMULAS[kind]).format(name=name, heads=heads, size=size, bias=bias)
    if kind == "project" and module is not None and widens(module, a):
        formula += ", in float32, since the processor lacks products of the dtype"
    computed = kind in ("project", "norm", "rotate")
    memory = "new" if computed else "view" if _same_storage(a, b) else "copy"
    parameters = list(module.parameters()) if module is not None else []
    flops = b.numel() * {"project": 2 * a.shape[-1] + bool(bias), "norm": 4, "rotate": 3}.get(kind, 0)
    moved = 0 if memory == "view" else _bytes(a, b, *parameters)
    shapes = (letters_in, tuple(a.shape), letters_out, tuple(b.shape))
    return Step(title, formula, *shapes, b.stride(), memory, flops, flops, moved)


def _given(name: str, letter: str, letters: str, tensor: Tensor) -> Step:
    sizes = tuple(tensor.shape)
    return Step(f"given {letter}", f"the {name} tensor", letters, sizes, letters, sizes, tensor.stride(), "given")


def _explanation(seen: "_Watched", before: list[Step], after: list[Step], embed_dim: int | None) -> Explanation:
    x = seen.inputs
    batch, heads, rows, size = x.query.shape
    kv_heads, slots, v_size = x.value.shape[1:]
    sizes = {"B": batch, "T": rows, "S": slots} | ({} if embed_dim is None else {"E": embed_dim})
    sizes |= {"H": heads, "K": kv_heads, "D": size, "V": v_size}
    mask = x.mask
    for tile in x.tiles():  # a bias of -inf hides keys as a mask does
        if bool((tile == -torch.inf).any()):
            mask = mask & Dense(tile != -torch.inf).bind(batch, heads, x.queries, x.keys)
    call = (batch, heads, x.queries, x.keys)
    pairs, allowed = batch * heads * rows * slots, look_at(mask, *call, device=x.query.device).pairs
    inner = list(_attention_steps(x, seen.out, pairs, allowed))
    ends = _bytes(x.query, x.key, x.value, seen.out)
    return Explanation(
        sizes,
        str(x.query.dtype).removeprefix("torch."),
        called(x.mask),
        (*before, *inner, *after),
        seen.chosen.name if seen.refusal is None else None,
        tuple(_choices(seen, pairs, allowed)),
        pairs,
        allowed,
        ends + sum(s.bytes for s in (*before, *after)),
        tuple(lint_mask(mask, *call, device=x.query.device)),
    )


def _attention_steps(x: Inputs, out: Tensor, pairs: int, allowed: int) -> Iterator[Step]:
    """From the score to the sum: the backend does these in one, so only shapes and costs can be told."""
    scores = (*x.query.shape[:3], x.key.shape[-2])
    size, v_size, wide = x.query.shape[-1], x.value.shape[-1], max(4, x.query.element_size())
    q, k, v, o = (_bytes(t) for t in (x.query, x.key, x.value, out))
    both = 2 * pairs * wide

    def inside(name: str, formula: str, per_pair: int, moved: int, extra: int = 0) -> Step:
        work, useful = pairs * per_pair + extra, allowed * per_pair + extra
        return Step(name, formula, "B H T S", scores, "B H T S", scores, None, INSIDE, work, useful, moved)

    score = inside("score", "score = q · kᵀ, for each head on its own", 2 * size, q + k + both // 2)
    yield replace(score, letters_in="B H T D", shape_in=tuple(x.query.shape))
    yield inside("scale", f"score · {x.scale:.4g}", 1, both)
    for mod in x.score_mods:
        low = mod.lowered()
        kind = "custom" if low is None else low.kind
        formula = {
            "softcap": "cap · tanh(score / cap)",
            "slopes": "score - slope · distance",
            "tile": "score + bias",
        }.get(kind, "your function of the score; at least")
        work = {"softcap": 3, "slopes": 4}.get(kind, 1)
        yield inside("modify", f"{type(mod).__name__}: {formula}", work, both)
    if not isinstance(x.mask, Full):
        yield inside("mask", f"-inf where {called(x.mask)} does not allow the pair", 0, both)
    softmax = "weight = exp(score - max) / sum of these over the keys, for each head and query"
    yield inside("softmax", softmax, 5, both)
    if x.sinks is not None:
        rows = math.prod(scores[:3])
        yield inside("sink", "one more exp(sink) in that sum, of a key without a value", 0, 0, 3 * rows)
    if x.dropout_p > 0:
        yield inside(
            "dropout",
            f"drop a weight with probability {x.dropout_p:g}, divide the others by its rest",
            2,
            both,
        )
    total = inside("sum", "out = weight · v", 2 * v_size, both // 2 + v + o)
    yield replace(total, letters_out="B H T V", shape_out=tuple(out.shape), strides=out.stride(), memory="new")


def _choices(seen: "_Watched", pairs: int, allowed: int) -> Iterator[Choice]:
    x = seen.inputs
    listed = BACKENDS if seen.chosen in BACKENDS else (seen.chosen, *BACKENDS)
    for backend in listed:
        reason = backend.why_not(x)
        holds = ""
        if backend.name == "reference":
            rows = max((len(range(*part.indices(x.query.shape[-2]))) for part in blocks(x)), default=0)
            held = x.query.shape[0] * x.query.shape[1] * rows * x.key.shape[-2]
            holds = f"; it computes all {pairs:,} scores, {held:,} at once ({amount(4 * held)}B in float32)"
        if reason is not None:
            yield Choice(backend.name, "cannot", f"{reason}; the call has {pairs:,} scores, {allowed:,} allowed{holds}")
        elif backend is seen.chosen and seen.refusal is None:
            why = "asked for by name" if named(seen.wanted) is not None else "the first that can"
            yield Choice(backend.name, "runs it", why + seen.kernel() + holds)
        else:
            why = (
                f"{seen.wanted!r} was asked for"
                if named(seen.wanted) is not None
                else f"{seen.chosen.name} is preferred"
            )
            yield Choice(backend.name, "could run it", why + holds)


class _Watched(Backend):
    """Stands in for the backend of a call: keeps the inputs, and lets the backend really chosen run them."""

    name = "watched"

    def __init__(self, wanted: str | Backend) -> None:
        self.wanted = wanted
        self.refusal: str | None = None

    def why_not(self, x: Inputs) -> str | None:
        return None

    def run(self, x: Inputs) -> tuple[Tensor, Tensor | None]:
        asked = named(self.wanted)
        self.inputs = x
        self.refusal = None if asked is None else asked.why_not(x)
        able = [asked] if asked is not None and self.refusal is None else BACKENDS
        self.chosen = next(b for b in able if b.why_not(x) is None)
        with _Kernels() as kernels:
            self.out, lse = self.chosen.run(x)
        self.calls = kernels.calls
        return self.out, lse

    def kernel(self) -> str:
        """Which fused kernels have really been called, and how."""
        texts: dict[tuple[str, str], int] = {}
        for name, args in self.calls:
            if name == "native":
                return f"; {_native(args)}"
            mask = args.get("attn_mask") if args.get("attn_mask") is not None else args.get("attn_bias")
            dense = "no mask tensor" if mask is None else f"a mask tensor of {mask.numel():,} entries"
            shapes = f"{args['query'].shape[-2]:,} query rows on {args['key'].shape[-2]:,} keys"
            text = f"{shapes}, is_causal={args.get('is_causal', False)}, {dense})"
            blocks = args["query"].shape[0] // max(1, self.inputs.query.shape[0])  # of queries, as rows of the batch
            key = f"; torch calls {name} (", text
            texts[key] = texts.get(key, 0) + blocks
        many = {key: f"{n:,} blocks of " if n > 1 else "" for key, n in texts.items()}
        return "".join(call + many[call, text] + text for call, text in texts)


def _native(args: dict[str, Any]) -> str:
    """How the kernel of headwise was called."""
    if args["mask"] is not None:
        how = f"a mask tensor of {args['mask'].numel():,} entries"
    elif args["runs"] is not None:
        how = f"the keys of a query as up to {args['runs'].shape[-2]} runs"
    else:
        how = "the keys of a query as one run, by numbers"
    return f"the kernel is called with {args['instructions'] or instruction_sets()[0]} instructions, {how}"


class _Kernels(TorchDispatchMode):
    """Remembers the attention kernels that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "dot_product" in func.__name__ or func is OPERATOR:
            names = [a.name for a in func._schema.arguments]
            bound = dict(zip(names, args, strict=False)) | kwargs
            self.calls.append((func.__name__.split(".")[0].removeprefix("_"), bound))
        return func(*args, **kwargs)


class _Moves(TorchFunctionMode):
    """Remembers the operations that put numbers into another shape."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self.events = events

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        kind = MOVES.get(getattr(func, "__name__", ""))
        if kind is not None and isinstance(out, Tensor) and out is not args[0]:
            self.events.append((kind, args[0], out, None))
        return out


def _watched_cache(cache: Any, events: list[Event]) -> Any:
    """A copy, so that explaining a call does not store its tokens."""
    try:
        copied = copy.deepcopy(cache)
    except RuntimeError as error:
        raise UnsupportedError(f"The cache cannot be copied ({error}); fill it under torch.no_grad().") from None
    for name in ("_owner", "_source", "_version"):  # whose it is, which a copy forgets
        if hasattr(cache, name):
            setattr(copied, name, getattr(cache, name))
    append = copied.append

    def watched(key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
        found = append(key, value, *rest, **named)
        events.extend([("cache", key, found[0], None), ("cache", value, found[1], None)])
        return found

    object.__setattr__(copied, "append", watched)
    return copied


def _bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata
