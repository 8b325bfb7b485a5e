"""The Transformer around attention: feed-forward, layers, encoder, decoder, and the two together.

Each part of a layer, attention or feed-forward, only adds to its input. The norm stands after the sum or before the
part:

    post norm    norm(x + part(x))         the first Transformer, BERT
    pre norm     x + part(norm(x))         GPT-2 and most models since

A decoder without an encoder, such as GPT-2, is an ``Encoder`` called with ``mask=Causal()``. Embeddings and positions
are not here: what goes in and comes out are vectors.

    python examples/transformer.py

Reference: Vaswani et al., Attention Is All You Need, 2017, section 3. https://arxiv.org/abs/1706.03762. Where the norm
stands: Xiong et al., On Layer Normalization in the Transformer Architecture, 2020. https://arxiv.org/abs/2002.04745
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from headwise import Causal, DynamicCache, FixedCache, Full, KVCache, Mask, MultiHeadAttention

Tokens = Float[Tensor, "B T E"]
Memory = Float[Tensor, "B S E"]


class FeedForward(nn.Module):
    """Two linear layers, for each token on its own: activation(x · W_hidden + b_hidden) · W_out + b_out."""

    def __init__(
        self, embed_dim: int, hidden_dim: int, activation: Callable[[Tensor], Tensor] = F.relu, bias: bool = True
    ) -> None:
        super().__init__()
        self.hidden_proj = nn.Linear(embed_dim, hidden_dim, bias)
        self.activation = activation
        self.out_proj = nn.Linear(hidden_dim, embed_dim, bias)

    def forward(self, x: Tokens) -> Tokens:
        return self.out_proj(self.activation(self.hidden_proj(x)))


class Residual(nn.Module):
    """What stands around each part: norm(x + dropout(part(x))), or x + dropout(part(norm(x)))."""

    def __init__(self, norm: nn.Module, norm_first: bool = False, dropout_p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.norm_first, self.dropout = norm, norm_first, nn.Dropout(dropout_p)

    def forward(self, x: Tokens, part: Callable[[Tensor], Tensor]) -> Tokens:
        if self.norm_first:
            return x + self.dropout(part(self.norm(x)))
        return self.norm(x + self.dropout(part(x)))


@dataclass(frozen=True)
class Parts:
    """Makes the parts of a layer; its arguments are those of every layer, encoder and decoder below.

    Args:
        embed_dim: Size of a token.
        num_heads: Number of heads.
        hidden_dim: Size inside the feed-forward; None means 4 · ``embed_dim``.
        activation: Of the feed-forward, a function of one tensor: ``F.relu``, ``F.gelu``, ``nn.GELU("tanh")``, …
        norm_first: Whether each norm stands before its part, and not after the sum.
        norm_eps: Added to the variance that a norm divides by.
        dropout_p: Probability that a number that a part adds is dropped in training; likewise an attention weight.
        bias: Whether projections and norms add biases.
        attention: Makes an attention from ``(embed_dim, num_heads)``, which is called as
            ``module(query, key, value, mask=mask)``, and with ``cache=`` where the layer is. None means
            ``MultiHeadAttention`` with this dropout and bias; another takes care of its own.
        final_norm: Whether a norm follows the last layer of a stack. None means with ``norm_first``, where no layer
            norms what it puts out.
    """

    embed_dim: int
    num_heads: int
    hidden_dim: int | None = None
    activation: Callable[[Tensor], Tensor] = F.relu
    norm_first: bool = False
    norm_eps: float = 1e-5
    dropout_p: float = 0.0
    bias: bool = True
    attention: Callable[[int, int], nn.Module] | None = None
    final_norm: bool | None = None

    def new_attention(self) -> nn.Module:
        if self.attention is not None:
            return self.attention(self.embed_dim, self.num_heads)
        return MultiHeadAttention(self.embed_dim, self.num_heads, dropout_p=self.dropout_p, bias=self.bias)

    def new_feed_forward(self) -> FeedForward:
        hidden_dim = 4 * self.embed_dim if self.hidden_dim is None else self.hidden_dim
        return FeedForward(self.embed_dim, hidden_dim, self.activation, self.bias)

    def new_norm(self) -> nn.LayerNorm:
        return nn.LayerNorm(self.embed_dim, self.norm_eps, bias=self.bias)

    def new_residual(self) -> Residual:
        return Residual(self.new_norm(), self.norm_first, self.dropout_p)

    def new_final_norm(self) -> nn.Module:
        wanted = self.norm_first if self.final_norm is None else self.final_norm
        return self.new_norm() if wanted else nn.Identity()


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward. ``options`` are those of ``Parts``."""

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        super().__init__()
        parts = Parts(embed_dim, num_heads, **options)
        self.self_attention, self.around_self_attention = parts.new_attention(), parts.new_residual()
        self.feed_forward, self.around_feed_forward = parts.new_feed_forward(), parts.new_residual()

    def forward(self, x: Tokens, *, mask: Mask = Full(), cache: KVCache | None = None) -> Tokens:
        x = self.around_self_attention(x, lambda x: attend(self.self_attention, x, x, mask, cache))
        return self.around_feed_forward(x, self.feed_forward)


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention to the memory, feed-forward. ``options`` are those of ``Parts``.

    The memory is what the encoder put out, and enters keys and values as it is.
    """

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        super().__init__()
        parts = Parts(embed_dim, num_heads, **options)
        self.self_attention, self.around_self_attention = parts.new_attention(), parts.new_residual()
        self.cross_attention, self.around_cross_attention = parts.new_attention(), parts.new_residual()
        self.feed_forward, self.around_feed_forward = parts.new_feed_forward(), parts.new_residual()

    def forward(
        self,
        x: Tokens,
        memory: Memory,
        *,
        mask: Mask = Full(),
        memory_mask: Mask = Full(),
        cache: KVCache | None = None,
        memory_cache: FixedCache | None = None,
    ) -> Tokens:
        causal = Causal() & mask
        x = self.around_self_attention(x, lambda x: attend(self.self_attention, x, x, causal, cache))
        x = self.around_cross_attention(x, lambda x: attend(self.cross_attention, x, memory, memory_mask, memory_cache))
        return self.around_feed_forward(x, self.feed_forward)


def attend(attention: nn.Module, x: Tensor, source: Tensor, mask: Mask, cache: KVCache | None) -> Tensor:
    """The attention of a layer: ``x`` asks, ``source`` is looked at and read."""
    kept = {} if cache is None else {"cache": cache}  # an attention that knows of no caches is not asked to
    return attention(x, source, source, mask=mask, **kept)


class Encoder(nn.Module):
    """``num_layers`` times ``EncoderLayer``, one after another. ``options`` are those of ``Parts``."""

    def __init__(self, embed_dim: int, num_heads: int, num_layers: int, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(embed_dim, num_heads, **options) for _ in range(num_layers))
        self.norm = Parts(embed_dim, num_heads, **options).new_final_norm()

    def forward(self, x: Tokens, *, mask: Mask = Full(), caches: Sequence[KVCache] | None = None) -> Tokens:
        each = [None] * len(self.layers) if caches is None else caches
        for layer, cache in zip(self.layers, each, strict=True):
            x = layer(x, mask=mask, cache=cache)
        return self.norm(x)


class Decoder(nn.Module):
    """``num_layers`` times ``DecoderLayer``, all with one memory. ``options`` are those of ``Parts``."""

    def __init__(self, embed_dim: int, num_heads: int, num_layers: int, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(embed_dim, num_heads, **options) for _ in range(num_layers))
        self.norm = Parts(embed_dim, num_heads, **options).new_final_norm()

    def forward(
        self,
        x: Tokens,
        memory: Memory,
        *,
        mask: Mask = Full(),
        memory_mask: Mask = Full(),
        caches: Sequence[tuple[KVCache, FixedCache]] | None = None,
    ) -> Tokens:
        each = [(None, None)] * len(self.layers) if caches is None else caches
        for layer, (cache, kept) in zip(self.layers, each, strict=True):
            x = layer(x, memory, mask=mask, memory_mask=memory_mask, cache=cache, memory_cache=kept)
        return self.norm(x)


class Transformer(nn.Module):
    """Encoder and decoder, each of ``num_layers`` layers. ``options`` are those of ``Parts``."""

    def __init__(self, embed_dim: int, num_heads: int, num_layers: int, **options: Any) -> None:
        super().__init__()
        self.encoder = Encoder(embed_dim, num_heads, num_layers, **options)
        self.decoder = Decoder(embed_dim, num_heads, num_layers, **options)

    def forward(
        self, source: Memory, target: Tokens, *, source_mask: Mask = Full(), target_mask: Mask = Full()
    ) -> Tokens:
        """``source_mask``, such as ``Padding(lengths)``, holds in the encoder and where the decoder looks at it."""
        memory = self.encoder(source, mask=source_mask)
        return self.decoder(target, memory, mask=target_mask, memory_mask=source_mask)


def main() -> None:
    """Count the parameters of the paper's base model, and decode with caches as without."""
    with torch.device("meta"):
        base = Transformer(512, 8, 6)
    for name, stack in base.named_children():
        count = sum(parameter.numel() for parameter in stack.parameters())
        print(f"{name} of 6 layers, 8 heads, 512 features: {count:,} parameters")

    torch.manual_seed(0)
    model, source, target = Transformer(64, 8, 2).eval(), torch.randn(1, 11, 64), torch.randn(1, 7, 64)
    with torch.no_grad():
        whole, memory = model(source, target), model.encoder(source)
        caches = [(DynamicCache(), FixedCache()) for _ in model.decoder.layers]
        steps = torch.cat([model.decoder(token, memory, caches=caches) for token in target.split(1, 1)], 1)
    print(f"7 tokens decoded at once and one by one with caches: {(steps - whole).abs().max():.1e} apart")


if __name__ == "__main__":
    main()
