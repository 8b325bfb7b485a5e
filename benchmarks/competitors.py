"""The competitors: ways to compute a case.

A competitor is a function from a problem to a ``Step``, or to the reason why it cannot take part, as text.
What it does before it returns (load a library, copy weights, build a dense mask) is not timed; ``Step.run``
is. To add one, write the function and name it in ATTENTION, GPU_ATTENTION or MODULE; a library that may be
missing is imported inside.
"""

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import headwise
from headwise.backends import BACKENDS, Backend, Inputs, Reference, choose
from headwise.functional import prepare
from headwise.masks import Causal, Full, Padding

from .cases import GPU_SIZED, Problem


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
        if bias is not None:
            scores = (scores.unflatten(2, (group, rows)) + bias).flatten(2, 3)
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
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

    def forward() -> Tensor:
        folded = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)
        return F.scaled_dot_product_attention(folded, key, value).flatten(1, 2)[:, :, None]

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
    is_causal = problem.mask == Causal() and query.shape[2] == key.shape[2]
    bias = None if is_causal else _bias(problem)
    grouped = query.shape[1] != key.shape[1]

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, bias, is_causal=is_causal, enable_gqa=grouped)

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
    if problem.device.type == "cpu" or importlib.util.find_spec("triton") is None:
        return "it is compiled by Triton, for which there is no device here"
    if problem.case not in GPU_SIZED:
        return "it is compiled anew for every case, which a run has time for at the sizes of a GPU only"
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # so that the cases before do not count as recompilations
    compiled = torch.compile(flex_attention, dynamic=False)
    query, key, value = problem.inputs
    seen, rows, slots = FLEX[problem.case.mask], query.shape[2], key.shape[2]
    blocks = None
    if seen is not None:
        blocks = create_block_mask(seen(slots - rows), None, None, rows, slots, device=problem.device)
    grouped = query.shape[1] != key.shape[1]

    def forward() -> Tensor:
        return compiled(query, key, value, block_mask=blocks, enable_gqa=grouped)

    return _step(problem, forward, problem.inputs, "compiled, block mask made beforehand")


def headwise_auto(problem: Problem) -> Step:
    """``headwise.attention`` as it is called by default."""
    query, key, value = problem.inputs

    def forward() -> Tensor:
        return headwise.attention(query, key, value, mask=problem.mask)

    return _step(problem, forward, problem.inputs, f"backend {choose(_prepared(problem)).name}")


def headwise_on(backend: Backend) -> Competitor:
    """``headwise.attention`` on a backend asked for by name."""

    def build(problem: Problem) -> Step | str:
        query, key, value = problem.inputs

        def forward() -> Tensor:
            return headwise.attention(query, key, value, mask=problem.mask, backend=backend.name)

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


# what torch says when it has no kernel left to choose from, on a GPU and on the CPU
NO_KERNEL = ("No available kernel", "No viable backend")
# masks as FlexAttention takes them: a function of how far the queries are ahead of the keys
FLEX: dict[str, Callable[[int], Callable[..., Tensor]] | None] = {
    "full": None,
    "causal": lambda ahead: lambda b, h, q, k: k <= q + ahead,
    "window128": lambda ahead: lambda b, h, q, k: (k <= q + ahead) & (q + ahead - k < 128),
}

# The first of each is what the others are compared with in the check of the run itself.
ATTENTION: dict[str, Competitor] = {
    "sdpa": sdpa,
    "sdpa grouped": sdpa_grouped,
    "sdpa math": sdpa_math,
    "plain": plain,
    "headwise reference": headwise_on(Reference()),
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


def registry(level: str, suite: str = "cpu") -> dict[str, Competitor]:
    """Who takes part in the cases of a level. On a GPU the plain formula does not: it rounds scores to the dtype."""
    if level == "module":
        return MODULE
    return ATTENTION if suite == "cpu" else GPU_ATTENTION


def _prepared(problem: Problem) -> Inputs:
    query, key, value = problem.inputs
    return prepare(query, key, value, problem.mask, (), None, None, 0.0, None, None, None)


def _step(problem: Problem, forward: Callable[[], Tensor], leaves: Sequence[Tensor], note: str = "") -> Step:
    """A step of torch code: the forward pass without a graph, or with it and the gradients of the leaves."""

    def run_forward() -> Sequence[Tensor]:
        with torch.no_grad():
            return (forward(),)

    def run_both() -> Sequence[Tensor]:
        out = forward()
        return (out, *torch.autograd.grad(out, leaves, problem.grad))

    return Step(run_both if problem.case.backward else run_forward, note)


def _bias(problem: Problem) -> Float[Tensor, "#B #H T S"] | None:
    """The mask as numbers to add: 0 and -inf, in the dtype of the inputs; None where it hides nothing."""
    allowed = problem.allowed
    if bool(allowed.all()):
        return None
    zeros = torch.zeros(allowed.shape, dtype=problem.inputs[0].dtype, device=problem.device)
    return zeros.masked_fill(~allowed, -torch.inf)


def _copy(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
