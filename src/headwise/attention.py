"""MultiHeadAttention: the layer.

    MultiHead(query, key, value) = concat(head_1, …, head_H) · W_out
    head_i = attention(query · W_query_i, key · W_key_i, value · W_value_i)

Its forward is that equation, one seam per step: project → norm → rotate → cache → attend → merge → project.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headwise.algebra import Mask
from headwise.backends.base import Backend
from headwise.caches import FixedCache, KVCache
from headwise.checks import (
    MaskLike,
    as_mask,
    as_score_mods,
    check_dropout,
    check_layer,
    check_scale,
    check_size,
    check_switches,
    check_weight_dtype,
    complete,
    place,
)
from headwise.config import arguments, describe
from headwise.errors import ShapeError
from headwise.functional import Observer, attend, observed, prepare, run
from headwise.linear import project
from headwise.masks import Full
from headwise.positions import Positions
from headwise.projections import take_apart
from headwise.rotary import RotaryEmbedding
from headwise.score_mods import ScoreMod

Tokens = Float[Tensor, "B T E"] | Float[Tensor, "T E"]


class MultiHeadAttention(nn.Module):
    """Multi-head attention of queries over keys and values: self- or cross-attention, with any mask.

    Args:
        embed_dim: Size of a query token.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads, which must divide ``num_heads``: fewer is grouped-query
            attention, 1 is multi-query attention. None means ``num_heads``.
        head_dim: Size of a query and key head; None means ``embed_dim / num_heads``.
        v_head_dim: Size of a value head; None means ``head_dim``.
        key_dim: Size of a key token; None means ``embed_dim``.
        value_dim: Size of a value token; None means ``key_dim``.
        out_dim: Size of an output token; None means ``embed_dim``.
        query_bias: Whether the projection of queries adds a bias.
        key_bias: Likewise for keys.
        value_bias: Likewise for values.
        out_bias: Likewise for the output.
        bias: Sets all four at once; None leaves them as they are.
        scale: What dot products are multiplied by; None means 1/sqrt(head_dim).
        q_norm: Applied to each query head before rotation, such as ``nn.RMSNorm(head_dim)``.
        k_norm: Likewise for keys.
        rotary: Turns queries and keys by their position.
        rotate_first: Whether to rotate before the norms rather than after them.
        score_mods: Modifications of the scores, applied before those of a call.
        mask: A mask for every call, joined with that of the call. Numbers only: what depends on the batch goes into
            the call.
        sinks: Whether each head has a trainable logit without a value, zero at first.
        dropout_p: Probability that a weight is dropped in training.
        max_length: Refuse more query or key tokens than this; None for no limit.
        backend: "auto", or the name of one, which is then never swapped for another.
        device: Where the parameters are made.
        dtype: Of the parameters.

    Attributes:
        observer: Called with the complete ``Inputs``, the output and the log-sum-exp of each call; may return another
            output. None for no observer.

    Raises:
        ShapeError: When the arguments do not fit together.

    Example:
        >>> layer = MultiHeadAttention(64, 8, num_kv_heads=2, rotary=RotaryEmbedding(8), mask=Causal() & Window(16))
        >>> layer(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])

    Reference: Vaswani et al., Attention Is All You Need, 2017, section 3.2.2. https://arxiv.org/abs/1706.03762 (its h
    is ``num_heads``, its d_k ``head_dim``, its d_v ``v_head_dim``). Grouped heads: Ainslie et al., GQA, 2023.
    https://arxiv.org/abs/2305.13245
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        out_dim: int | None = None,
        query_bias: bool = True,
        key_bias: bool = True,
        value_bias: bool = True,
        out_bias: bool = True,
        bias: bool | None = None,
        scale: float | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        rotary: RotaryEmbedding | None = None,
        rotate_first: bool = False,
        score_mods: Sequence[ScoreMod] = (),
        mask: Mask = Full(),
        sinks: bool = False,
        dropout_p: float = 0.0,
        max_length: int | None = None,
        backend: str | Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_switches(query_bias, key_bias, value_bias, out_bias, sinks, bias is not None and bias, rotate_first)
        check_weight_dtype(dtype)
        if bias is not None:
            query_bias = key_bias = value_bias = out_bias = bias
        self.embed_dim = check_size(embed_dim, "embed_dim")
        self.num_heads = check_size(num_heads, "num_heads")
        self.num_kv_heads = self.num_heads if num_kv_heads is None else check_size(num_kv_heads, "num_kv_heads")
        if self.num_heads % self.num_kv_heads:
            raise ShapeError(f"{num_heads} query heads cannot share {num_kv_heads} key heads evenly.")
        if head_dim is None and embed_dim % num_heads:
            raise ShapeError(
                f"embed_dim {embed_dim} cannot be split evenly over {num_heads} heads; give head_dim= to choose freely."
            )
        self.head_dim = embed_dim // num_heads if head_dim is None else check_size(head_dim, "head_dim")
        self.v_head_dim = self.head_dim if v_head_dim is None else check_size(v_head_dim, "v_head_dim")
        self.key_dim = embed_dim if key_dim is None else check_size(key_dim, "key_dim")
        self.value_dim = self.key_dim if value_dim is None else check_size(value_dim, "value_dim")
        self.out_dim = embed_dim if out_dim is None else check_size(out_dim, "out_dim")
        self.scale = None if scale is None else check_scale(scale, self.head_dim)
        self.dropout_p = check_dropout(dropout_p)
        self.max_length = None if max_length is None else check_size(max_length, "max_length")
        self.mask, self.rotary, self.score_mods = mask, rotary, nn.ModuleList(as_score_mods(score_mods))
        self.q_norm, self.k_norm, self.rotate_first = q_norm, k_norm, rotate_first
        self.backend = backend
        check_layer(self)

        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(self.embed_dim, self.num_heads * self.head_dim, query_bias, **made)
        self.k_proj = nn.Linear(self.key_dim, self.num_kv_heads * self.head_dim, key_bias, **made)
        self.v_proj = nn.Linear(self.value_dim, self.num_kv_heads * self.v_head_dim, value_bias, **made)
        self.out_proj: nn.Module = nn.Linear(self.num_heads * self.v_head_dim, self.out_dim, out_bias, **made)
        self.sinks = nn.Parameter(torch.zeros(self.num_heads, **made)) if sinks else None
        self.observer: Observer | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform weights for each projection on its own, biases and sinks zero."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if isinstance(projection, nn.Linear):
                nn.init.xavier_uniform_(projection.weight)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(
        self,
        query: Tokens,
        key: Float[Tensor, "B S _"] | Float[Tensor, "S _"] | None = None,
        value: Float[Tensor, "B S _"] | Float[Tensor, "S _"] | None = None,
        *,
        mask: MaskLike = Full(),
        score_mods: Sequence[ScoreMod] = (),
        cache: KVCache | None = None,
        positions: Positions | Int[Tensor, "..."] | None = None,
        key_positions: Positions | Int[Tensor, "..."] | None = None,
        lengths: Int[Tensor, " B"] | None = None,
        seed: int | Int[Tensor, ""] | None = None,
    ) -> Float[Tensor, "B T _"] | Float[Tensor, "T _"]:
        """Attend.

        Args:
            query: Tokens that ask.
            key: Tokens that are looked at; None means those of ``query``.
            value: Tokens that are read; None means those of ``key``.
            mask: Which keys a query may attend to; joined with the layer's own mask.
            score_mods: Modifications of the scores, after the layer's own.
            cache: Keys and values of earlier calls; this call's are added to it. A ``FixedCache`` that is filled
                gives the keys and values itself.
            positions: Where the queries stand: ``Positions``, or a tensor of positions (tokens,), (batch, tokens) or
                (axes, batch, tokens), which leaves indices as they are. None asks the cache, or lets the last query
                stand with the last key.
            key_positions: Where the keys stand, likewise; None means with the queries in self-attention, else from 0.
            lengths: How many of the tokens of each row are real, counted from the first: the cache stores no others.
            seed: What makes dropout the same on every backend; None follows torch's generator.

        Returns:
            A token per query, unbatched if the query was. The output bias for a query that may see nothing.

        Raises:
            ShapeError: When sizes, dtypes or devices do not fit together.
            UnsupportedError: When the backend named cannot run the call.
            CacheError: When the cache is full, belongs to another layer, or does not fit the call.
        """
        mask = self._joined(as_mask(mask))
        q_BTE, k_BSE, v_BSE = complete(self, query, key, value, cache)
        queries, keys = place(self, q_BTE, k_BSE, mask, cache, lengths, positions, key_positions)
        length = self._length(queries, keys, q_BTE.device)
        q_BHTD = _split(project(self.q_proj, q_BTE), self.num_heads, self.head_dim)
        q_BHTD = self._turned(q_BHTD, self.q_norm, queries, length)
        if k_BSE is not None and v_BSE is not None:
            k_BKSD = _split(project(self.k_proj, k_BSE), self.num_kv_heads, self.head_dim)
            v_BKSV = _split(project(self.v_proj, v_BSE), self.num_kv_heads, self.v_head_dim)
            k_BKSD = self._turned(k_BKSD, self.k_norm, keys, length)
            if cache is not None:
                k_BKSD, v_BKSV, keys = cache.append(k_BKSD, v_BKSV, keys, lengths)
        if isinstance(cache, FixedCache):
            k_BKSD, v_BKSV, keys = cache.recall(queries)
        out_BHTV = self._attend(q_BHTD, k_BKSD, v_BKSV, mask, score_mods, queries, keys, seed)
        out_BTE = project(self.out_proj, out_BHTV.transpose(1, 2).flatten(2))
        return out_BTE if query.dim() == 3 else out_BTE[0]

    def _joined(self, mask: Mask) -> Mask:
        if isinstance(self.mask, Full):
            return mask
        return self.mask if isinstance(mask, Full) else self.mask & mask

    def _turned(
        self, x: Float[Tensor, "B N L D"], norm: nn.Module | None, at: Positions, length: Int[Tensor, ""] | None
    ) -> Float[Tensor, "B N L D"]:
        """Queries or keys normed and rotated, in the order of the layer."""
        if norm is not None and not self.rotate_first:
            x = norm(x)
        if self.rotary is not None:
            x = self.rotary(x, at.position(x.device), length)
        return norm(x) if norm is not None and self.rotate_first else x

    def _length(self, queries: Positions, keys: Positions, device: torch.device) -> Int[Tensor, ""] | None:
        """The length of the call, for a rotary schedule that follows it: one table for queries and keys."""
        if self.rotary is None or not self.rotary.follows_length:
            return None
        zero = torch.zeros(1, dtype=torch.int64, device=device)  # so that no token is a length as well
        return torch.cat([zero, queries.position(device).flatten() + 1, keys.position(device).flatten() + 1]).max()

    def _attend(
        self,
        query: Float[Tensor, "B H T D"],
        key: Float[Tensor, "B K S D"],
        value: Float[Tensor, "B K S V"],
        mask: Mask,
        score_mods: Sequence[ScoreMod],
        queries: Positions,
        keys: Positions,
        seed: int | Int[Tensor, ""] | None,
    ) -> Float[Tensor, "B H T V"]:
        dropout_p = self.dropout_p if self.training else 0.0
        if query.dtype != value.dtype:  # a norm kept in float32 may return wider queries than values under autocast
            query = query.to(value.dtype)
        if key.dtype != value.dtype:
            key = key.to(value.dtype)
        mods = (*self.score_mods, *as_score_mods(score_mods)) if len(self.score_mods) else as_score_mods(score_mods)
        call = (query, key, value, mask, mods, self.sinks, self.scale, dropout_p, seed, queries, keys)
        if self.observer is None:
            return attend(*call, self.backend)
        x = prepare(*call, "value")
        return observed(self.observer, x, *run(x, self.backend))

    def config(self) -> dict[str, Any]:
        """What builds such a layer, as a dict of plain values that JSON can hold.

        Returns:
            The arguments of the constructor that are not their defaults, and the dtype of the weights. A mask is its
            text, any other part a dict of its own arguments. Numbers that are trained are the state dict's, and a
            ``Bias`` is zeros until that is loaded. The device, hooks and whether the layer trains are not there.

        Raises:
            UnsupportedError: When no such values build the layer: it has functions, plain tensors or classes of your
                own as parts, or was changed after it was built.

        Example:
            >>> layer = MultiHeadAttention(12, 3, rotary=RotaryEmbedding(4), mask=Causal() & Window(4))
            >>> layer.config()
            {'embed_dim': 12, 'num_heads': 3, 'rotary': {'head_dim': 4}, 'mask': 'Causal() & Window(4)',
             'dtype': 'float32'}
        """
        return describe(self)

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> "MultiHeadAttention":
        """Build the layer of a configuration, with new weights.

        Args:
            config: What ``config`` returned, also by way of JSON.
            device: Where the parameters are made.
            dtype: Of the parameters, instead of the configuration's; parts that have one of their own keep it.

        Returns:
            A layer whose state dict has the names and shapes of the one that was described.

        Raises:
            ShapeError: When the configuration has names or values that mean nothing, or lacks some.

        Example:
            >>> layer = MultiHeadAttention(12, 3, num_kv_heads=1, score_mods=[Softcap(30.0)])
            >>> twin = MultiHeadAttention.from_config(layer.config())
            >>> twin.load_state_dict(layer.state_dict())
            <All keys matched successfully>
        """
        return cls(**arguments(cls, config, device, dtype))

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # load_state_dict has copied the dict, and loads the projections from it after this
        error_msgs += take_apart(self, state_dict, prefix, local_metadata.get("assign_to_params_buffers", False))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        """The sizes and every setting that differs from its default."""
        shown = [f"{self.embed_dim}, {self.num_heads}"]
        defaults = {
            "num_kv_heads": self.num_heads,
            "head_dim": self.embed_dim / self.num_heads,  # not //, which would hide one that it rounds to
            "v_head_dim": self.head_dim,
            "key_dim": self.embed_dim,
            "value_dim": self.key_dim,
            "out_dim": self.embed_dim,
            "scale": None,
            "mask": Full(),
            "dropout_p": 0.0,
            "max_length": None,
            "rotate_first": False,
            "backend": "auto",
        }
        shown += [f"{k}={v!r}" for k, default in defaults.items() if (v := getattr(self, k)) != default]
        return ", ".join(shown + ["sinks=True"] * (self.sinks is not None))


def _split(x: Float[Tensor, "B L _"], heads: int, size: int) -> Float[Tensor, "B H L _"]:
    """The features of each token as heads; a view, since unflatten is slower where calls are small."""
    return x.view(x.shape[0], x.shape[1], heads, size).transpose(1, 2)
