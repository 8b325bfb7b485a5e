"""The competitors: ways to compute a case.

A competitor is a function from a problem to a ``Step``, or to the reason why it cannot take part, as text.
What it does before it returns (load a library, copy weights, build a dense mask) is not timed; ``Step.run``
is. To add one, write the function and name it in ATTENTION, GPU_ATTENTION or MODULE; a library that may be
missing is imported inside. Libraries that do not use torch read its tensors in place and return a view of theirs.
"""

import functools
import importlib.util
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import headwise
from headwise.backends import BACKENDS, Backend, Inputs, Reference, Sdpa, choose
from headwise.functional import prepare
from headwise.masks import Causal, Full, Padding

from .cases import CAP, GPU_SIZED, Problem, equal_parts, half_empty


@dataclass(frozen=True)
class Step:
    """What is timed.

    Args:
        run: Computes the case once. Returns the output and, where the case wants them, the gradients in the
            order of ``Problem.inputs``. A parameter held in pieces may come as these pieces, in order.
        note: What to know about it, such as the backend that was chosen.
    """

    run: Callable[[], Sequence[Tensor]]
    note: str = ""


Competitor = Callable[[Problem], Step | str]


def plain(problem: Problem) -> Step:
    """The formula as it stands in papers, in the dtype of the inputs, softmax in float32."""
    query, key, value = problem.inputs
    bias, scale = _bias(problem), query.shape[-1] ** -0.5
    group, rows = query.shape[1] // key.shape[1], query.shape[2]
    if bias is not None:
        bias = bias.expand(-1, query.shape[1], -1, -1).unflatten(1, (-1, group))

    def forward() -> Tensor:
        # query heads that share a key head are rows of one matrix: the keys need no copies
        scores = query.unflatten(1, (-1, group)).flatten(2, 3) @ key.mT * scale
        if problem.case.mod == "softcap":
            scores = CAP * (scores / CAP).tanh()
        if bias is not None:
            scores = (scores.unflatten(2, (group, rows)) + bias).flatten(2, 3)
        if problem.sinks is not None:
            sinks = problem.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)[..., : value.shape[2]]
        weights = F.dropout(weights, problem.dropout_p) if problem.dropout_p else weights
        return (weights @ value).unflatten(2, (group, rows)).flatten(1, 2)

    return _step(problem, forward, problem.inputs)


def sdpa(problem: Problem) -> Step:
    """PyTorch's fused attention in its best form.

    ``is_causal`` for a causal mask, else a dense mask that is made beforehand. For one query, heads that
    share a key head become the rows of one call.
    """
    query, key, value = problem.inputs
    if query.shape[1] == key.shape[1] or query.shape[2] > 1:
        return sdpa_as_called(problem)
    bias = _bias(problem)

    def forward() -> Tensor:
        heads = F.scaled_dot_product_attention(_folded(query, key), key, value, bias)
        return heads.flatten(1, 2)[:, :, None]

    return _step(problem, forward, problem.inputs, "group folded into the query rows")


def sdpa_grouped(problem: Problem) -> Step | str:
    """PyTorch's fused attention with ``enable_gqa``, as it is usually called."""
    query, key, _ = problem.inputs
    if query.shape[1] == key.shape[1]:
        return "the same as sdpa where no heads are grouped"
    return sdpa_as_called(problem)


def sdpa_math(problem: Problem) -> Step:
    """PyTorch's unfused kernel, which multiplies matrices."""
    step = sdpa_as_called(problem)

    def run() -> Sequence[Tensor]:
        with sdpa_kernel(SDPBackend.MATH):
            return step.run()

    return Step(run)


def sdpa_as_called(problem: Problem) -> Step:
    """PyTorch's ``scaled_dot_product_attention`` with the arguments that say the case."""
    query, key, value = problem.inputs
    is_causal, bias = _causal_or_bias(problem)
    grouped = query.shape[1] != key.shape[1]

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, bias, problem.dropout_p, is_causal=is_causal, enable_gqa=grouped
        )

    return _step(problem, forward, problem.inputs)


def sdpa_by(kernel: SDPBackend) -> Competitor:
    """PyTorch's fused attention in its best form, by one of its kernels."""

    def build(problem: Problem) -> Step | str:
        step = sdpa(problem)

        def run() -> Sequence[Tensor]:
            with sdpa_kernel(kernel):
                return step.run()

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch lists why each kernel was passed over
                run()
        except RuntimeError as error:
            if any(said in str(error) for said in NO_KERNEL):
                return "torch's kernel of that name does not take the case"
            raise
        return Step(run, step.note)

    return build


def flex(problem: Problem) -> Step | str:
    """PyTorch's ``flex_attention``, compiled, with a block mask where the mask hides anything."""
    on_cpu = problem.device.type == "cpu"
    if on_cpu and problem.case.backward:
        return "it has no gradients on the CPU"
    if on_cpu and problem.case.rows < 128:
        return "it is compiled anew for every case, which a run has time for at 128 rows and more only"
    if not on_cpu and importlib.util.find_spec("triton") is None:
        return "it is compiled by Triton, which is not installed"
    if not on_cpu and problem.case not in GPU_SIZED:
        return "it is compiled anew for every case, which a run has time for at the sizes of a GPU only"
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # so that the cases before do not count as recompilations
    compiled = torch.compile(flex_attention, dynamic=False)
    query, key, value = problem.inputs
    modify = problem.score_mods[0] if problem.score_mods else None
    if problem.case.mod == "alibi":  # what is compiled may read slopes but not make them
        slopes = problem.score_mods[0].slopes
        modify = lambda score, b, h, q, k: score - slopes[h] * (q - k).abs()  # noqa: E731
    seen, (batch, _, rows, slots) = FLEX[problem.case.mask], problem.scores
    blocks = None
    if seen is not None:
        for_rows = batch if isinstance(problem.mask, Padding) else None
        blocks = create_block_mask(seen(slots - rows, batch, slots), for_rows, None, rows, slots, device=problem.device)
    grouped = query.shape[1] != key.shape[1]

    def forward() -> Tensor:
        return compiled(query, key, value, modify, block_mask=blocks, enable_gqa=grouped)

    with torch.no_grad():
        compiled(query, key, value, modify, block_mask=blocks, enable_gqa=grouped)  # compiling is not its time
    return _step(problem, forward, problem.inputs, "compiled, block mask made beforehand")


def _flex_padded(ahead: int, batch: int, slots: int) -> Callable[..., Tensor]:
    lengths = half_empty(batch, slots)
    return lambda b, h, q, k: k < lengths[b]


def _flex_packed(ahead: int, batch: int, slots: int) -> Callable[..., Tensor]:
    lengths = torch.tensor(equal_parts(slots, 8))
    document = torch.arange(8).repeat_interleave(lengths)
    return lambda b, h, q, k: (k <= q) & (document[q] == document[k])


def from_package(package: str) -> Callable[[Competitor], Competitor]:
    """Mark a competitor of a library that may be missing, and that takes part forward and on the CPU."""

    def mark(build: Competitor) -> Competitor:
        @functools.wraps(build)
        def checked(problem: Problem) -> Step | str:
            if importlib.util.find_spec(package) is None:
                return f"{package} is not installed"
            if problem.device.type != "cpu" or problem.case.backward:
                return "it takes part on the CPU and forward only"
            return build(problem)

        return checked

    return mark


@from_package("onnxruntime")
def onnxruntime(problem: Problem) -> Step | str:
    """ONNX Runtime, by the fastest of its operators that take the case: each has kernels of its own."""
    if importlib.util.find_spec("onnx") is None:
        return "onnx, which writes its models, is not installed"
    if problem.case.dtype == "bfloat16":
        return "it has no kernel for bfloat16 on the CPU"
    return min((_onnx(*form) for form in _onnx_forms(problem)), key=_glance)


def _onnx_forms(problem: Problem) -> Iterator[tuple]:
    """Operator, its inputs and attributes, outputs, and the result as a view of the first output."""
    (query, key, value), one_head = problem.inputs, problem.scores[1]
    is_causal, bias = _causal_or_bias(problem)
    if query.shape[2] == 1:
        query = _folded(query, key)
    batch, heads, rows, dim = query.shape
    kv_heads, slots = key.shape[1:3]
    bias = None if bias is None else bias.expand(-1, -1, rows, -1).contiguous()

    def unfolded(out: Tensor) -> Tensor:
        return out if heads == one_head else out.flatten(1, 2)[:, :, None]

    out = torch.empty_like(query)
    how: dict[str, int | float] = {"is_causal": int(is_causal)}
    if problem.case.mod == "softcap":
        how["softcap"] = CAP
    yield "Attention", [query, key, value, bias], how, [out], unfolded(out)
    if problem.case.mod == "softcap":
        return
    flat = [t.transpose(1, 2).flatten(2).contiguous() for t in (query, key, value)]
    out = torch.empty_like(flat[0])
    result = unfolded(out.unflatten(2, (heads, dim)).transpose(1, 2))
    if heads == kv_heads:
        how = {"num_heads": heads, "unidirectional": int(is_causal)}
        yield "MultiHeadAttention", [*flat, None, None, bias], how, [out], result
    window = problem.case.mask == "window128"
    if dim % 8 or (problem.case.rows > 1 and not (is_causal or window)):
        return
    # The operator of caches: new keys are written behind those of before. A prompt has none before; in a step of
    # decoding the last key of each row is the new one, and is written where it lies already.
    query, lengths = problem.inputs[0], problem.allowed[:, 0, -1].sum(-1, dtype=torch.int32).expand(batch)
    lengths = torch.full_like(lengths, slots) if window else lengths
    new = [query, key, value]
    past = [None, None]
    present = [torch.empty_like(key), torch.empty_like(value)]
    if problem.case.rows == 1:
        past = present = [key.clone(), value.clone()]
        at = (lengths.long() - 1)[:, None, None, None].expand(-1, kv_heads, 1, dim)
        new[1:] = [t.gather(2, at) for t in (key, value)]
    flat = [t.transpose(1, 2).flatten(2).contiguous() for t in new]
    out = torch.empty_like(flat[0])
    how = {"num_heads": query.shape[1], "kv_num_heads": kv_heads, "local_window_size": 128 if window else -1}
    total = torch.tensor([slots], dtype=torch.int32)
    given = [*flat, *past, lengths - 1, total]
    result = out.unflatten(2, (query.shape[1], dim)).transpose(1, 2)
    yield "GroupQueryAttention", given, how, [out, *present], result


def _onnx(
    name: str, given: list[Tensor | None], how: dict[str, int | float], outs: list[Tensor], result: Tensor
) -> Step:
    """A step of one operator of ONNX Runtime; inputs that are None are left out."""
    import onnxruntime
    from onnx import TensorProto, helper

    kinds = {torch.float32: TensorProto.FLOAT, torch.int32: TensorProto.INT32}
    inputs = {f"input{i}": t for i, t in enumerate(given) if t is not None}
    outputs = {f"output{i}": t for i, t in enumerate(outs)}
    names = [f"input{i}" if t is not None else "" for i, t in enumerate(given)]
    node = helper.make_node(name, names, list(outputs), domain="" if name == "Attention" else "com.microsoft", **how)
    told = [
        [helper.make_tensor_value_info(name, kinds[t.dtype], t.shape) for name, t in side.items()]
        for side in (inputs, outputs)
    ]
    sets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], name, *told), opset_imports=sets, ir_version=11)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    # its threads would go on spinning in the time of others
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for side, bind in ((inputs, binding.bind_input), (outputs, binding.bind_output)):
        for name_, tensor in side.items():
            bind(name_, "cpu", 0, tensor.numpy().dtype.type, list(tensor.shape), tensor.data_ptr())

    def run(kept: object = (inputs, outputs)) -> Sequence[Tensor]:  # it does not hold what it reads and writes
        session.run_with_iobinding(binding)
        return (result,)

    return Step(run, f"{name}, intra_op_num_threads={options.intra_op_num_threads}, its layout made beforehand")


def _glance(step: Step) -> float:
    """Seconds of a call, the shorter of two after a first."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        step.run()
        times.append(time.perf_counter() - start)
    return min(times[1:])


@from_package("openvino")
def openvino(problem: Problem) -> Step | str:
    """OpenVINO's ``ScaledDotProductAttention`` on its CPU device."""
    import openvino
    from openvino import opset13

    core, threads = openvino.Core(), torch.get_num_threads()
    half = problem.case.dtype == "bfloat16"
    if half and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        return "it has no kernel for bfloat16 on this processor"
    query, key, value = problem.inputs
    if query.shape[2] == 1:
        query = _folded(query, key)
    if query.shape[1] != key.shape[1]:
        return "its operator knows no groups of heads"
    is_causal, bias = _causal_or_bias(problem)
    kind = openvino.Type.bf16 if half else openvino.Type.f32

    def shared(tensor: Tensor) -> object:
        array = tensor.view(torch.int16 if half else tensor.dtype).numpy()
        return openvino.Tensor(array, array.shape, kind)

    given = [t for t in (query, key, value, bias) if t is not None]
    nodes = [opset13.parameter(list(t.shape), kind) for t in given]
    node = opset13.scaled_dot_product_attention(*nodes, causal=is_causal)
    settings = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": kind}
    request = core.compile_model(openvino.Model([node], nodes, "attention"), "CPU", settings).create_infer_request()
    given, out = [t.contiguous() for t in given], torch.empty_like(query)
    for i, tensor in enumerate(given):
        request.set_input_tensor(i, shared(tensor))
    request.set_output_tensor(shared(out))
    result = out if problem.case.rows > 1 else out.flatten(1, 2)[:, :, None]

    def run(kept: object = given) -> Sequence[Tensor]:  # it does not hold what it reads
        request.infer()
        return (result,)

    return Step(run, f"INFERENCE_NUM_THREADS={threads}")


@from_package("jax")
def jax(problem: Problem) -> Step:
    """JAX's ``dot_product_attention``, compiled by XLA."""
    # what XLA takes for the number of cores, read once when its device is made
    threads = os.environ.setdefault("NPROC", str(torch.get_num_threads()))
    import jax

    query, key, value = (jax.dlpack.from_dlpack(t.transpose(1, 2).contiguous()) for t in problem.inputs)
    is_causal, bias = _causal_or_bias(problem)
    mask = None if bias is None else jax.numpy.asarray(problem.allowed.numpy())
    added = jax.numpy.asarray(bias.numpy()) if problem.score_mods else None
    compiled = jax.jit(functools.partial(jax.nn.dot_product_attention, is_causal=is_causal))

    def run() -> Sequence[Tensor]:
        out = compiled(query, key, value, added, mask)
        return (torch.from_dlpack(out.block_until_ready()).transpose(1, 2),)

    run()  # compiling is not its time
    return Step(run, f"NPROC={threads} when its device was made, its layout made beforehand")


@from_package("x_transformers")
def x_transformers(problem: Problem) -> Step | str:
    """``Attend`` of x-transformers with ``flash=True``, which prepares a call of SDPA."""
    from x_transformers.attend import Attend

    query, key, value = problem.inputs
    if query.shape[1] != key.shape[1]:
        return "it shares keys among other query heads, every K-th"
    is_causal, bias = _causal_or_bias(problem)
    allowed = None if bias is None else problem.allowed
    attend = Attend(flash=True, causal=is_causal)
    added = bias if problem.score_mods else None
    return _step(problem, lambda: attend(query, key, value, mask=allowed, attn_bias=added)[0], problem.inputs)


def headwise_auto(problem: Problem) -> Step:
    """``headwise.attention`` as it is called by default."""
    query, key, value = problem.inputs
    modified = {"score_mods": problem.score_mods, "sinks": problem.sinks, "dropout_p": problem.dropout_p}

    def forward() -> Tensor:
        return headwise.attention(query, key, value, mask=problem.mask, **modified)

    return _step(problem, forward, problem.inputs, f"backend {choose(_prepared(problem)).name}")


def headwise_on(backend: Backend) -> Competitor:
    """``headwise.attention`` on a backend asked for by name."""

    def build(problem: Problem) -> Step | str:
        query, key, value = problem.inputs
        modified = {"score_mods": problem.score_mods, "sinks": problem.sinks, "dropout_p": problem.dropout_p}

        def forward() -> Tensor:
            return headwise.attention(query, key, value, mask=problem.mask, backend=backend.name, **modified)

        return backend.why_not(_prepared(problem)) or _step(problem, forward, problem.inputs)

    return build


def torch_module(problem: Problem) -> Step | str:
    """``nn.MultiheadAttention(need_weights=False)``, in ``eval()`` where no gradients are asked for."""
    tokens, *weights = problem.inputs
    heads = problem.scores[1]
    made = {"device": tokens.device, "dtype": tokens.dtype}
    layer = nn.MultiheadAttention(tokens.shape[-1], heads, batch_first=True, **made)
    given = [layer.in_proj_weight, layer.in_proj_bias, layer.out_proj.weight, layer.out_proj.bias]
    _copy(given, weights)
    layer.train(problem.case.backward)
    how: dict[str, object] = {"need_weights": False}
    # its boolean masks are True where a key is hidden
    if problem.mask == Causal():
        how |= {"attn_mask": ~problem.allowed[0, 0], "is_causal": True}
    elif isinstance(problem.mask, Padding):
        how |= {"key_padding_mask": ~problem.allowed[:, 0, 0]}
    elif problem.mask != Full():
        return "no argument of it was chosen for this mask"
    return _step(problem, lambda: layer(tokens, tokens, tokens, **how)[0], [tokens, *given])


class Fused(nn.Module):
    """A module as one writes it by hand for speed: one linear layer for query, key and value, then SDPA."""

    def __init__(self, embed_dim: int, heads: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, device=device, dtype=dtype)
        self.out = nn.Linear(embed_dim, embed_dim, device=device, dtype=dtype)

    def forward(
        self, tokens: Float[Tensor, "B T E"], bias: Float[Tensor, "#B #H T T"] | None, is_causal: bool
    ) -> Float[Tensor, "B T E"]:
        query, key, value = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(query, key, value, bias, is_causal=is_causal)
        return self.out(heads.transpose(1, 2).flatten(2))


def fused_module(problem: Problem) -> Step:
    """The hand-written module with one projection for query, key and value."""
    tokens, *weights = problem.inputs
    layer = Fused(tokens.shape[-1], problem.scores[1], tokens.device, tokens.dtype)
    given = [layer.qkv.weight, layer.qkv.bias, layer.out.weight, layer.out.bias]
    _copy(given, weights)
    is_causal = problem.mask == Causal()
    bias = None if is_causal else _bias(problem)
    return _step(problem, lambda: layer(tokens, bias, is_causal), [tokens, *given])


def headwise_module(problem: Problem) -> Step:
    """``headwise.MultiHeadAttention`` as it is called by default."""
    tokens, in_weight, in_bias, out_weight, out_bias = problem.inputs
    made = {"device": tokens.device, "dtype": tokens.dtype}
    layer = headwise.MultiHeadAttention(tokens.shape[-1], problem.scores[1], **made)
    projections = [layer.q_proj, layer.k_proj, layer.v_proj]
    given = [p.weight for p in projections] + [p.bias for p in projections]
    given += [layer.out_proj.weight, layer.out_proj.bias]
    _copy(given, [*in_weight.chunk(3), *in_bias.chunk(3), out_weight, out_bias])
    layer.train(problem.case.backward)
    backends: list[str] = []
    layer.observer = lambda x, out, lse: backends.append(choose(replace(x, lse="no")).name)
    with torch.set_grad_enabled(problem.case.backward):
        layer(tokens, mask=problem.mask)
    layer.observer = None
    return _step(problem, lambda: layer(tokens, mask=problem.mask), [tokens, *given], f"backend {backends[0]}")


BIASES = ("alibi", "t5")  # what a dense mask can hold
TAKEN_BY = {
    "softcap": ("headwise", "plain", "flex", "onnxruntime"),
    "sinks": ("headwise", "plain"),
    "dropout": ("headwise", "plain", "sdpa"),
    "bias": ("headwise", "plain", "sdpa"),
}
# what torch says when it has no kernel left to choose from, on a GPU and on the CPU
NO_KERNEL = ("No available kernel", "No viable backend")
# masks as FlexAttention takes them, from how far the queries are ahead of the keys, the batch size and the keys
FLEX: dict[str, Callable[[int, int, int], Callable[..., Tensor]] | None] = {
    "full": None,
    "causal": lambda ahead, *_: lambda b, h, q, k: k <= q + ahead,
    "window128": lambda ahead, *_: lambda b, h, q, k: (k <= q + ahead) & (q + ahead - k < 128),
    "padded": _flex_padded,
    "packed8": _flex_packed,
    "prefix256": lambda ahead, *_: lambda b, h, q, k: (k <= q + ahead) | (k < 256),
}

# The first of each is what the others are compared with in the check of the run itself.
ATTENTION: dict[str, Competitor] = {
    "sdpa": sdpa,
    "sdpa grouped": sdpa_grouped,
    "sdpa math": sdpa_math,
    "plain": plain,
    "flex": flex,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "jax": jax,
    "x-transformers": x_transformers,
    "headwise reference": headwise_on(Reference()),
    "headwise sdpa": headwise_on(Sdpa()),
    "headwise": headwise_auto,
}
GPU_ATTENTION: dict[str, Competitor] = {
    "sdpa": sdpa,
    "sdpa flash": sdpa_by(SDPBackend.FLASH_ATTENTION),
    "sdpa efficient": sdpa_by(SDPBackend.EFFICIENT_ATTENTION),
    "sdpa cudnn": sdpa_by(SDPBackend.CUDNN_ATTENTION),
    "sdpa math": sdpa_by(SDPBackend.MATH),
    "flex": flex,
    **{f"headwise {backend.name}": headwise_on(backend) for backend in BACKENDS},
    "headwise": headwise_auto,
}
MODULE: dict[str, Competitor] = {
    "nn.MultiheadAttention": torch_module,
    "fused module": fused_module,
    "headwise": headwise_module,
}


def why_not(name: str, problem: Problem) -> str | None:
    """Why a competitor does not take what is done to the scores; a bias is in the dense mask that all take."""
    if problem.case.mod in TAKEN_BY and not name.startswith(TAKEN_BY[problem.case.mod]):
        unknown = {"softcap": "cap of scores", "bias": "bias that is trained"}
        return f"it knows no {unknown.get(problem.case.mod, problem.case.mod)}"
    return None


def registry(level: str, suite: str = "cpu") -> dict[str, Competitor]:
    """Who takes part in the cases of a level. On a GPU the plain formula does not: it rounds scores to the dtype."""
    if level == "module":
        return MODULE
    return ATTENTION if suite == "cpu" else GPU_ATTENTION


def _prepared(problem: Problem) -> Inputs:
    query, key, value = problem.inputs
    return prepare(
        query,
        key,
        value,
        problem.mask,
        problem.score_mods,
        problem.sinks,
        None,
        problem.dropout_p,
        None,
        None,
        None,
    )


def _step(problem: Problem, forward: Callable[[], Tensor], leaves: Sequence[Tensor], note: str = "") -> Step:
    """A step of torch code: the forward pass without a graph, or with it and the gradients of the leaves."""
    trained = leaves if problem.bias is None else [*leaves, problem.bias]

    def run_forward() -> Sequence[Tensor]:
        with torch.no_grad():
            return (forward(),)

    def run_both() -> Sequence[Tensor]:
        out = forward()
        return (out, *torch.autograd.grad(out, trained, problem.grad))

    return Step(run_both if problem.case.backward else run_forward, note)


def _bias(problem: Problem) -> Float[Tensor, "#B #H T S"] | None:
    """The mask as numbers to add: 0 and -inf, in the dtype of the inputs; None where it hides nothing.

    A modification of scores that only adds to them is in it.
    """
    allowed = problem.allowed
    if problem.bias is not None:
        return problem.bias
    if problem.case.mod in BIASES:  # in float32: rounded to a half type it would be another bias
        rows, slots = problem.scores[2:]
        zeros = torch.zeros(1, problem.scores[1], rows, slots, device=problem.device)
        return problem.modified(zeros).masked_fill(~allowed, -torch.inf)
    if bool(allowed.all()):
        return None
    zeros = torch.zeros(allowed.shape, dtype=problem.inputs[0].dtype, device=problem.device)
    return zeros.masked_fill(~allowed, -torch.inf)


def _causal_or_bias(problem: Problem) -> tuple[bool, Float[Tensor, "#B #H T S"] | None]:
    """Whether the mask is the causal one that every library knows; else what ``_bias`` gives."""
    is_causal = problem.mask == Causal() and problem.scores[2] == problem.scores[3]
    is_causal &= problem.case.mod not in BIASES
    return is_causal, None if is_causal else _bias(problem)


def _folded(query: Float[Tensor, "B H 1 D"], key: Float[Tensor, "B K S D"]) -> Float[Tensor, "B K G D"]:
    """The query heads that share a key head, as rows of one call; masks must be those of all heads."""
    return query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)


def _copy(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
