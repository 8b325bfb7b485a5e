"""Projections in half precision on a processor that has no instructions for it."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

# Without such instructions torch multiplies halves by a plain loop, at about an eighth of the speed of float32, and the
# gradient of the tokens at a hundredth. A build of torch without oneDNN cannot tell, and is left alone.
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
    if type(linear) is nn.Linear and widens(linear, x):
        bias = None if linear.bias is None else linear.bias.float()
        return nn.functional.linear(x.float(), linear.weight.float(), bias).to(x.dtype)
    return linear(x)


def widens(linear: nn.Module, x: Tensor) -> bool:
    """Whether ``project`` goes by way of float32."""
    return (
        x.dtype in SLOW
        and type(linear) is nn.Linear
        and x.device.type == "cpu"
        and type(x) in _PLAIN
        and type(linear.weight) in _PLAIN
        and linear.weight.dtype == x.dtype
        and not (linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear))
        and not (linear._backward_hooks or linear._backward_pre_hooks or _has_any_global_hook())
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_exporting()  # a file runs on other processors, and may not compare sizes
        and x.numel() >= FEWEST * x.shape[-1]
    )
