"""Put headwise into a model that exists, in place, and take it out again.

Two kinds of attention are known: each ``nn.MultiheadAttention``, whose place a drop-in takes, and that of transformers'
models, which take headwise as their ``attn_implementation``. Everything else stays, and the report says why.
"""

import contextlib
import gc
import inspect
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention import MultiHeadAttention
from headwise.convert import huggingface, textbook
from headwise.convert.dropin import MultiheadAttention
from headwise.errors import AttentionError, ConversionError

NAME = "headwise"
# On a module that was changed: what unswap needs to know. An attribute, so that it goes through copies and pickles.
BEFORE = "_before_swap"
CALL_HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name and "state_dict" not in name)
STATE_HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name and "state_dict" in name)
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
# names of what projects to queries, keys and values, in modules that people write
QKV = tuple(
    frozenset(names.split())
    for names in (
        "q_proj k_proj v_proj",
        "query_proj key_proj value_proj",
        "query_weight key_weight value_weight",
        "q_lin k_lin v_lin",
        "query key value",
        "to_q to_k to_v",
        "w_q w_k w_v",
        "wq wk wv",
        "q k v",
        "qkv",
        "to_qkv",
        "qkv_proj",
        "query_key_value",
    )
)


@dataclass(frozen=True)
class Report:
    """What was swapped and what was left, as text when printed.

    Args:
        swapped: By the name of the module in the model: what it was, and what runs now.
        left: By name: why it stays as it is.
        notes: What to know besides.

    Example:
        >>> print(Report({"attn": "nn.MultiheadAttention → headwise"}, {}, ("Make optimizers now.",)))
        1 swapped:
          attn  nn.MultiheadAttention → headwise
        Make optimizers now.
    """

    swapped: dict[str, str]
    left: dict[str, str]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = []
        for title, entries in (("swapped", self.swapped), ("left", self.left)):
            if entries:
                lines.append(f"{len(entries)} {title}:")
                names = [name or "(the model)" for name in entries]
                width = max(map(len, names))
                lines += [f"  {name:{width}}  {text}" for name, text in zip(names, entries.values(), strict=True)]
        return "\n".join([*lines, *self.notes])


def swap(model: nn.Module) -> Report:
    """Run the attention of a model on headwise, in place.

    Each ``nn.MultiheadAttention`` gives its place to a ``headwise.convert.torch.MultiheadAttention`` with its weights,
    in the same memory, and its hooks, settings, and mode. In transformers' models, wherever in the model they are,
    "headwise" becomes the attention implementation. State dicts keep their names and values, so that old checkpoints
    load and new ones load elsewhere; a module that occurs twice still does.

    It checks itself before it changes anything for good, in evaluation mode and without calling your hooks: each
    ``nn.MultiheadAttention`` on random tokens, with and without masks; transformers' models on a few random tokens, of
    which one row is padded, or on random images. A difference above half of the dtype's digits is an error, unless what
    was there is no nearer to float64, or other implementations of transformers differ as much. The model then is as it
    was.

    Swap before you make an optimizer, wrap the model (DDP, FSDP, LoRA) or compile it: the projections of queries, keys
    and values are parameters of their own now, and an optimizer made before has the packed one, which no gradient
    reaches any more (where there is such an optimizer, a warning says so). ``unswap`` makes new ones likewise.
    ``copy.deepcopy`` of a swapped model is swapped, and can be unswapped.

    Args:
        model: Any model. If it is an ``nn.MultiheadAttention`` itself, nothing holds it in which it could be replaced.

    Returns:
        What was swapped, what was left and why. A model with nothing to swap is no error.

    Raises:
        ConversionError: When something is no module, or computes anything else after the swap.

    Example:
        >>> from headwise.convert.swap import swap, unswap
        >>> layer = torch.nn.TransformerEncoderLayer(12, 2, 20, batch_first=True).eval()
        >>> x = torch.randn(3, 5, 12)
        >>> before = layer(x)
        >>> print(swap(layer))
        1 swapped:
          self_attn  nn.MultiheadAttention → headwise
        Make optimizers after the swap: the projections of nn.MultiheadAttention are new parameters.
        >>> torch.allclose(layer(x), before, atol=1e-6)
        True
        >>> unswap(layer).swapped
        {'self_attn': 'headwise → nn.MultiheadAttention'}
    """
    _check_module(model)
    swapped: dict[str, str] = {}
    left: dict[str, str] = {}
    with torch.inference_mode(False), torch.no_grad():
        made = _drop_ins(model, swapped, left)
        for part, was in _plug_in(model, swapped, left):
            setattr(part, BEFORE, was)
    _warn_of_optimizers(made)
    _install(model, made)
    notes = []
    if made:
        notes.append("Make optimizers after the swap: the projections of nn.MultiheadAttention are new parameters.")
    _name_others(model, swapped, left)
    if not swapped:
        notes.append("Nothing was swapped." if left else "There is no attention here that headwise could take over.")
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    swapped, left = (dict(sorted(entries.items(), key=lambda it: order[it[0]])) for entries in (swapped, left))
    return Report(swapped, left, tuple(notes))


def unswap(model: nn.Module) -> Report:
    """Undo ``swap``: the classes and the attention implementations that were there, with the weights as they are now.

    The parameters of each ``nn.MultiheadAttention`` are new ones once more, in the same memory, so make optimizers
    afterwards. Drop-ins that ``swap`` did not put there stay, and so does an implementation chosen since.

    Args:
        model: One that ``swap`` was given, or a copy of it.

    Returns:
        What was put back, and what was left and why.

    Raises:
        ConversionError: When a drop-in has become something that ``nn.MultiheadAttention`` cannot be: its projections
            were wrapped (LoRA), quantised, given hooks or frozen one by one. Nothing is changed then.

    Example:
        >>> from headwise.convert.swap import swap, unswap
        >>> model = torch.nn.Transformer(12, 2, 1, 1, 20)
        >>> len(swap(model).swapped), len(unswap(model).swapped), len(unswap(model).swapped)
        (3, 3, 0)
    """
    _check_module(model)
    swapped: dict[str, str] = {}
    left: dict[str, str] = {}
    made: dict[int, tuple[nn.Module, nn.Module]] = {}
    fresh = MultiheadAttention(1, 1, device="meta")
    for name, module in model.named_modules():
        if type(module) is not MultiheadAttention or not hasattr(module, BEFORE):
            continue
        if name == "":
            raise ConversionError(
                "A drop-in that is the model itself cannot be replaced in place; call its to_stock()."
            )
        reason = _why_not_back(module, fresh)
        if reason is not None:
            raise ConversionError(f"{name} {reason} before unswap; nothing was changed.")
        with torch.inference_mode(False), torch.enable_grad():
            stock = module.to_stock()
        _carry_over(module, stock, {*vars(fresh), BEFORE})
        made[id(module)] = module, stock
        swapped[name] = "headwise → nn.MultiheadAttention"
    _warn_of_optimizers(made)
    _install(model, made)
    told: set[int] = set()
    for name, part in model.named_modules():
        was: Any = vars(part).pop(BEFORE, None)
        if was is not None:
            now = _implementations(part)
            _set(part, {path: old if now[path] == NAME else now[path] for path, old in was.items()})
            config: Any = part.config
            if id(config) not in told and now[""] == NAME:
                swapped[name] = f"{type(part).__name__}: headwise → {config._attn_implementation}"
            elif id(config) not in told:
                left[name] = f"{type(part).__name__}: {now['']} was chosen since, and stays"
            told |= {id(inner) for inner in _configs(config).values()}
    return Report(swapped, left, () if swapped or left else ("There is nothing here that swap has put in.",))


def _check_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConversionError(f"A {type(model).__name__} is not a model; give an nn.Module.")


def _named(model: nn.Module, kind: Any) -> list[tuple[str, Any]]:
    return [(name, part) for name, part in model.named_modules() if isinstance(part, kind)]


def _warn_of_optimizers(made: dict[int, tuple[nn.Module, nn.Module]]) -> None:
    """Say so if an optimizer has parameters that are to go: it would leave what takes their place untrained."""
    kept = {id(parameter) for _, new in made.values() for parameter in new.parameters()}
    gone = {id(parameter) for old, _ in made.values() for parameter in old.parameters()} - kept
    things = gc.get_objects() if gone else []
    kinds = {kind for kind in set(map(type, things)) if issubclass(kind, torch.optim.Optimizer)}
    found = [thing for thing in things if type(thing) in kinds] if kinds else []
    for optimizer in found:
        if any(id(parameter) in gone for group in optimizer.param_groups for parameter in group["params"]):
            warnings.warn(
                f"headwise: an optimizer ({type(optimizer).__name__}) has parameters of nn.MultiheadAttention that are "
                "others now, and would not train them; make it anew.",
                stacklevel=3,
            )


def _install(model: nn.Module, made: dict[int, tuple[nn.Module, nn.Module]]) -> None:
    """Put each new module wherever the old one is."""
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if id(child) in made:
                parent._modules[key] = made[id(child)][1]


# nn.MultiheadAttention


def _drop_ins(
    model: nn.Module, swapped: dict[str, str], left: dict[str, str]
) -> dict[int, tuple[nn.Module, nn.Module]]:
    """Old and new module by the old one's id, compared, but not in their places."""
    owners: dict[int, list[str]] = defaultdict(list)
    parents: dict[int, nn.Module] = {}
    wrapped: set[int] = set()
    for name, part in model.named_modules():
        for kind, parameter in part._parameters.items():
            owners[id(parameter)].append(f"{name}.{kind}" if name else kind)
        holds = id(part) in wrapped or any(base.__name__ in WRAPPERS for base in type(part).__mro__)
        for child in part.children():
            parents[id(child)] = part
            wrapped |= {id(child)} if holds else set()
    made: dict[int, tuple[nn.Module, nn.Module]] = {}
    fresh = vars(nn.MultiheadAttention(1, 1, device="meta"))
    for name, module in _named(model, nn.MultiheadAttention):
        reason = _why_left(module, parents.get(id(module)), owners)
        if reason is None and id(module) in wrapped:
            reason = "DDP or FSDP has its parameters already; swap before the model is wrapped"
        if reason is not None:
            left[name] = reason
            continue
        before = {kind: vars(module)[kind].copy() for kind in STATE_HOOKS}
        try:
            new = MultiheadAttention.from_stock(module)
        except AttentionError as error:
            left[name] = str(error)
            continue
        for kind in STATE_HOOKS:  # not one dict for both: the old module is not to know of the new one's
            vars(new)[kind] = vars(new)[kind].copy()
        vars(module).update(before)
        unchecked = _compare(name, module, new)
        _carry_over(module, new, {*fresh})
        setattr(new, BEFORE, True)
        made[id(module)] = module, new
        swapped[name] = "nn.MultiheadAttention → headwise" + (f", not checked: {unchecked}" if unchecked else "")
    return made


def _why_not_back(module: MultiheadAttention, fresh: nn.Module) -> str | None:
    if module.observer is not None:
        return "has an observer, which nn.MultiheadAttention would never call; remove it"
    if any(len(vars(module)[kind]) > len(vars(fresh)[kind]) for kind in STATE_HOOKS):
        return "was given hooks of its state dict; remove them"
    if "forward" in vars(module) or module._compiled_call_impl is not None:
        return "was compiled or its forward replaced; undo that"
    for kind in ("weight", "bias"):
        parts = [getattr(getattr(module, name), kind, None) for name in ("q_proj", "k_proj", "v_proj")]
        if module._packs and len({part.requires_grad for part in parts if isinstance(part, Tensor)}) > 1:
            return f"has projections of which some train their {kind} and some not; set requires_grad alike"
    return None


def _carry_over(old: nn.Module, new: nn.Module, known: set[str]) -> None:
    """What somebody has put on a module besides."""
    vars(new).update({key: value for key, value in vars(old).items() if key not in known})
    vars(new)["_is_full_backward_hook"] = vars(old)["_is_full_backward_hook"]


def _why_left(module: nn.Module, parent: nn.Module | None, owners: dict[int, list[str]]) -> str | None:
    if type(module) is MultiheadAttention:
        return "headwise already"
    if type(module) is not nn.MultiheadAttention:
        return f"{type(module).__name__} is a subclass of nn.MultiheadAttention and may compute something else"
    if parent is None:
        return "it is the model itself; call headwise.convert.torch.MultiheadAttention.from_stock(model)"
    if type(parent).__module__.split(".")[0] == "peft":
        return "peft has wrapped it and reads its weights; swap first, and put LoRA on its projections then"
    if module._compiled_call_impl is not None:
        return "it was compiled; swap before compile()"
    fresh = nn.MultiheadAttention(1, 1, device="meta")
    for known, part in ((fresh, module), (fresh.out_proj, module.out_proj)):
        extra = [key for kind in ("_parameters", "_buffers", "_modules") for key in vars(part)[kind]]
        extra = [key for key in extra if not hasattr(known, key)]
        if extra or type(part) not in (type(known), nn.Linear):
            return f"its {type(part).__name__} is changed: {', '.join(extra) or 'another class'}"
    if any(vars(part)[hooks] for part in module.modules() for hooks in STATE_HOOKS):
        return "it has hooks of its state dict, which would see other names"
    for name, parameter in module.named_parameters():
        if type(parameter.data) is not Tensor:
            return f"its {name} is a {type(parameter.data).__name__}"
        if len(owners[id(parameter)]) > 1:
            return f"its {name} is shared: {', '.join(owners[id(parameter)])}"
    return None


def _compare(name: str, stock: nn.MultiheadAttention, ours: nn.Module) -> str | None:
    """Raise if the two differ on small random tokens; why they could not be compared, or None."""
    weight = stock.out_proj.weight
    if weight.is_meta:
        return "its weights are on the meta device"
    sizes = (stock.embed_dim, stock.kdim, stock.vdim)
    extra = {"add_bias_kv": stock.bias_k is not None, "add_zero_attn": stock.add_zero_attn}
    exact = nn.MultiheadAttention(
        stock.embed_dim, stock.num_heads, bias=stock.in_proj_bias is not None, **extra,
        kdim=stock.kdim, vdim=stock.vdim, batch_first=stock.batch_first, device="meta",
    )  # fmt: skip
    exact.load_state_dict(
        {key: value.to("cpu", torch.float64) for key, value in stock.state_dict().items()}, assign=True
    )
    draw = torch.Generator().manual_seed(0)
    tokens = [torch.randn(2, 7, width, generator=draw, device="cpu").to(weight.dtype) for width in sizes]
    tokens[0] = tokens[0][:, :5]
    calls: list[tuple[list[Tensor], dict[str, Any]]] = [
        (tokens, {"need_weights": False}),
        (
            tokens,
            {
                "key_padding_mask": torch.arange(7, device="cpu") >= torch.tensor([[7], [5]], device="cpu"),
                "attn_mask": torch.ones(5, 7, dtype=torch.bool, device="cpu").triu(2),
                "average_attn_weights": False,
            },
        ),
    ]
    if len({*sizes}) == 1:
        calls.append((tokens[:1] * 3, {"need_weights": False}))

    def call(module: nn.Module, tokens: list[Tensor], options: dict[str, Any], like: Tensor) -> list[Tensor]:
        given = [part.to(like) if stock.batch_first else part.to(like).transpose(0, 1) for part in tokens]
        options = {key: x.to(like.device) if isinstance(x, Tensor) else x for key, x in options.items()}
        return [part.to("cpu", torch.float64) for part in module(*given, **options) if part is not None]

    with _at_rest(stock, ours, exact), torch.autocast(weight.device.type, enabled=False):
        for given, options in calls:
            try:
                before = call(stock, given, options, weight)
            except Exception as error:  # whatever it is that stock cannot do here
                return f"nn.MultiheadAttention fails itself: {_first_line(error)}"
            if not all(part.isfinite().all() for part in before):
                return "its own output is not finite"
            wanted = call(exact, given, options, exact.out_proj.weight)
            after = call(ours, given, options, weight)
            for got, was, want in zip(after, before, wanted, strict=True):
                limit = 2 * (was - want).norm().item() + _rounding(weight.dtype) * want.norm().item()
                _check_near(name, _apart(got, want), limit, weight.dtype)
    return None


def _rounding(dtype: torch.dtype) -> float:
    """Half of the digits of a number."""
    return torch.finfo(dtype).eps ** 0.5


def _apart(got: Tensor, want: Tensor) -> float:
    return (got.double() - want.double()).norm().item() if got.shape == want.shape else torch.inf


def _check_near(name: str, apart: float, limit: float, dtype: torch.dtype) -> None:
    if not apart <= limit:
        raise ConversionError(
            f"With headwise {name or 'the model'} is {apart:.2e} off in norm, and rounding in {dtype} explains "
            f"{limit:.2e}. Nothing was changed; please report it, with the sizes and settings of the module."
        )


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def _at_rest(*models: nn.Module) -> Iterator[None]:
    """In evaluation mode and without hooks, which have not asked to see this call."""
    parts = [part for model in models for part in model.modules()]
    kept = [(part, part.training, {name: vars(part)[name] for name in CALL_HOOKS}) for part in parts]
    try:
        for part, _, hooks in kept:
            part.training = False
            vars(part).update({name: type(value)() if value is not None else None for name, value in hooks.items()})
        yield
    finally:
        for part, training, hooks in kept:
            part.training = training
            vars(part).update(hooks)


# transformers


def _plug_in(
    model: nn.Module, swapped: dict[str, str], left: dict[str, str]
) -> list[tuple[nn.Module, dict[str, str | None]]]:
    """Set the attention implementation of each model of transformers; they, and what they had."""
    done: list[tuple[nn.Module, dict[str, str | None]]] = []
    try:
        for name, top in _transformers(model):
            if top.config._attn_implementation == NAME:
                left[name] = "headwise already"
                continue
            parts = [
                (part, _implementations(part)) for part in top.modules() if hasattr(part, "set_attn_implementation")
            ]
            done += parts
            try:
                reason = _plug_in_one(name, top, swapped, left)
            except (AttentionError, ValueError, ImportError) as error:
                if isinstance(error, ConversionError):
                    raise
                reason = _first_line(error)
            if reason is not None:
                left[name] = f"{type(top).__name__}: {reason}"
                for part, was in parts:
                    _set(part, was)
                del done[-len(parts) :]
    except BaseException:
        for part, was in done:
            _set(part, was)
        raise
    return done


def _transformers(model: nn.Module) -> list[tuple[str, Any]]:
    """The models of transformers in a model, those inside others left out."""
    known = sys.modules.get("transformers.modeling_utils")  # where nothing has imported it, there is none
    found = [] if known is None else _named(model, known.PreTrainedModel)
    inside = {id(part) for _, outer in found for part in outer.modules() if part is not outer}
    return [(name, part) for name, part in found if id(part) not in inside]


def _plug_in_one(name: str, top: Any, swapped: dict[str, str], left: dict[str, str]) -> str | None:
    """Why a model cannot take headwise, or None."""
    huggingface.register(NAME)
    was = top.config._attn_implementation
    inputs, want, unchecked = _first_run(top)
    top.set_attn_implementation(NAME)
    if top.config._attn_implementation != NAME:
        return "its class does not let an attention implementation be chosen"
    called: set[int] = set()
    ran: set[int] = set()
    if want is not None:
        got = _real(_run(top, inputs, called, ran), inputs)
        want = _real(want, inputs)
        apart, limit = _apart(got, want), _rounding(want.dtype) * want.double().norm().item()
        if not apart <= limit:  # a model that chooses (experts) may turn rounding into anything
            top.set_attn_implementation("sdpa" if was == "eager" else "eager")
            limit = max(limit, 2 * _apart(_real(_run(top, inputs, set(), set()), inputs), want))
            top.set_attn_implementation(NAME)
        _check_near(name, apart, limit, want.dtype)
    inner = {}
    for place, part in _innermost(top, called):
        here = ".".join(filter(None, (name, place)))
        if here in swapped or here in left:
            continue  # an nn.MultiheadAttention
        if id(part) in ran and id(part) not in called:
            left[here] = f"{type(part).__name__} computes attention itself, whatever the implementation"
            continue
        inner[here] = f"{type(part).__name__}: {was} → headwise"
        if id(part) not in called:
            inner[here] += f", not checked: {unchecked or 'the small input does not reach it'}"
    if not inner and want is not None:
        return "it calls no attention implementation"
    swapped |= inner or {name: f"{type(top).__name__}: {was} → headwise, not checked: {unchecked}"}
    return None


def _configs(config: Any, path: str = "") -> dict[str, Any]:
    """A configuration and those inside it, by their dotted names."""
    found = {path: config}
    for key in getattr(config, "sub_configs", {}):
        inner = getattr(config, key, None)
        if inner is not None:
            found |= _configs(inner, f"{path}.{key}" if path else key)
    return found


def _implementations(part: Any) -> dict[str, str | None]:
    return {path: config._attn_implementation for path, config in _configs(part.config).items()}


def _set(part: Any, implementations: dict[str, str | None]) -> None:
    for path, config in _configs(part.config).items():
        config._attn_implementation = {"": implementations[path]}  # of this one alone, not of those inside it


def _small_inputs(top: Any) -> Iterator[dict[str, Tensor]]:
    """What may be an input of the model, the likeliest first."""
    taken = inspect.signature(top.forward).parameters
    draw = torch.Generator().manual_seed(0)
    config = top.config
    text, vision = config.get_text_config(), getattr(config, "vision_config", config)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=draw, device="cpu").to(top.device, top.dtype)

    ids = torch.randint(getattr(text, "vocab_size", 1), (2, 7), generator=draw, device="cpu").to(top.device)
    words: dict[str, Tensor] = {"input_ids": ids} if "input_ids" in taken else {}
    if words and "attention_mask" in taken:
        words["attention_mask"] = (torch.arange(7) < torch.tensor([7, 5])[:, None]).to(top.device, torch.int64)
    others: dict[str, Tensor] = {}
    size, channels = getattr(vision, "image_size", None), getattr(vision, "num_channels", None)
    if "pixel_values" in taken and size is not None and isinstance(channels, int):
        others["pixel_values"] = numbers(channels, *((size, size) if isinstance(size, int) else size))
    frames = getattr(config, "max_source_positions", None)
    if "input_features" in taken and isinstance(frames, int):
        others["input_features"] = numbers(config.num_mel_bins, 2 * frames)
    if "input_values" in taken:
        others["input_values"] = numbers(2000)
    made = [words, words | others, others, {key: value[:1] for key, value in words.items()}]
    for inputs in filter(None, made):
        yield inputs | (
            {"decoder_input_ids": ids[: len(next(iter(inputs.values()))), :5]} if "decoder_input_ids" in taken else {}
        )


def _first_run(top: Any) -> tuple[dict[str, Tensor], Tensor | None, str]:
    """An input, and what the model makes of it; or why there is none."""
    why = "no small input is known for it"
    if any(parameter.is_meta for parameter in top.parameters()):
        return {}, None, "its weights are on the meta device"
    for inputs in _small_inputs(top):
        try:
            out = _run(top, inputs, set(), set())
        except Exception as error:  # whatever it is that the model cannot do with this input
            why = f"it fails on a small input: {_first_line(error)}"
            continue
        if out is None or not out.isfinite().all():
            return {}, None, "its own output is no finite tensor"
        return inputs, out, ""
    return {}, None, why


def _run(top: Any, inputs: dict[str, Tensor], called: set[int], ran: set[int]) -> Any:
    """The first output. Which parts ran, and which of them called headwise, is added to the sets."""
    parts = [part for part in top.modules() if "observer" not in part._modules]
    observers = [(part, vars(part)["observer"]) for part in parts if "observer" in vars(part)]
    with _at_rest(top), torch.autocast(top.device.type, enabled=False):
        try:
            for part in parts:
                vars(part)["observer"] = _noting(called, part)
                part.register_forward_pre_hook(_noting(ran, part))
            found = top(**inputs)[0]
        finally:
            for part in parts:
                vars(part).pop("observer", None)
            for part, observer in observers:
                vars(part)["observer"] = observer
    return found if isinstance(found, Tensor) and found.is_floating_point() else None


def _noting(ids: set[int], part: nn.Module) -> Callable[..., None]:
    return lambda *args: ids.add(id(part))


def _real(out: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """What the model gives at real tokens."""
    mask = inputs.get("attention_mask")
    same = mask is not None and "decoder_input_ids" not in inputs and out.shape[:2] == mask.shape
    return out[mask.bool()] if same and mask is not None else out


# what is not known


def _name_others(model: nn.Module, swapped: dict[str, str], left: dict[str, str]) -> None:
    """Say of what looks like attention why it stays."""
    parts = dict(model.named_modules())
    known = {id(parts[name]) for name in (*swapped, *left)}
    seen = {id(part) for _, top in _transformers(model) for part in top.modules()}
    for name, part in _innermost(model, known | seen):
        if id(part) in known or id(part) in seen:
            continue
        if isinstance(part, MultiHeadAttention):
            left[name] = "headwise already"
            continue
        meta = {key: parameter.detach().to("meta") for key, parameter in part.named_parameters()}
        try:
            textbook.load(meta, 1)
            how = "headwise.convert.textbook.load reads its weights"
        except AttentionError:
            how = "build a headwise.MultiHeadAttention and load its weights by hand"
        left[name] = f"{type(part).__name__} is not known; {how}"


def _innermost(model: nn.Module, known: set[int]) -> list[tuple[str, nn.Module]]:
    """Modules that look like attention and hold no other such module, known ones included."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def visit(name: str, part: nn.Module) -> bool:
        inside = False
        for key, child in part.named_children():
            inside |= visit(f"{name}.{key}" if name else key, child)
        alike = id(part) in known or (not inside and _looks_like_attention(part))
        if alike and not inside and id(part) not in seen:
            found.append((name, part))
            seen.add(id(part))
        return inside or alike

    visit("", model)
    return found


def _looks_like_attention(part: nn.Module) -> bool:
    if isinstance(part, (nn.MultiheadAttention, MultiHeadAttention)):
        return True
    names = {*part._modules, *part._parameters}
    return any(names >= projections for projections in QKV) or (
        "attention" in type(part).__name__.lower() and any(True for _ in part.parameters())
    )
