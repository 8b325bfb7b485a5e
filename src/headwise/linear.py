"""Projections in half precision on a processor that has no instructions for it."""

from typing import Any, TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

# Without such instructions torch multiplies halves by plain loops, many times slower than float32, most of all for the
# gradient of the tokens. A build of torch without oneDNN cannot tell, and is left alone.
_ASKED = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
SLOW = frozenset(
    dtype for dtype, name in _ASKED.items() if hasattr(torch.ops.mkldnn, name) and not getattr(torch.ops.mkldnn, name)()
)
FEWEST = 16  # tokens: fewer cost less than the conversion of the weights
_PLAIN = (Tensor, nn.Parameter)


def project(linear: nn.Module, x: Float[Tensor, "*tokens _"]) -> Float[Tensor, "*tokens _"]:
    """``linear(x)``; by way of float32 where that is what makes it fast, rounded once.

    Args:
        linear: The projection. One that is not a bare ``nn.Linear``, because it is another class or has hooks, is
            called as it is, and so is every projection under autocast and in an export.
        x: Tokens.

    Returns:
        Projected tokens, in the dtype of ``x``.
    """
    if widens(linear, x):
        # compilers decide themselves what is kept, and transforms of functions know operators only
        transformed = torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0
        plain = not torch.is_grad_enabled() or transformed or torch.compiler.is_compiling()
        return (_wide if plain else _Wide.apply)(x, linear.weight, linear.bias)
    return linear(x)


def widens(linear: nn.Module, x: Tensor) -> TypeGuard[nn.Linear]:
    """Whether ``project`` goes by way of float32."""
    return (
        x.dtype in SLOW
        and type(linear) is nn.Linear
        and x.device.type == "cpu"
        and type(x) in _PLAIN
        and type(linear.weight) in _PLAIN
        and linear.weight.dtype == x.dtype
        and (linear.bias is None or (type(linear.bias) in _PLAIN and linear.bias.dtype == x.dtype))
        and not (linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear))
        and linear._compiled_call_impl is None
        and not (linear._backward_hooks or linear._backward_pre_hooks or _has_any_global_hook())
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_exporting()  # a file runs on other processors, and may not compare sizes
        and x.numel() >= FEWEST * x.shape[-1]
    )


def _wide(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


class _Wide(torch.autograd.Function):
    """The same, which keeps its halves for the gradients rather than their copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _wide(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        learns, wide = ctx.needs_input_grad, grad.float()
        rows = wide.flatten(0, -2)
        with torch.autocast("cpu", enabled=False):
            return (
                (wide @ weight.float()).to(x.dtype) if learns[0] else None,
                (rows.mT @ x.flatten(0, -2).float()).to(x.dtype) if learns[1] else None,
                rows.sum(0).to(x.dtype) if learns[2] else None,
            )
