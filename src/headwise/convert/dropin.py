"""``nn.MultiheadAttention`` that runs on headwise, and what its masks mean.

The only place that knows that both boolean masks of that class mean the opposite of headwise's: True hides there.
"""

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.algebra import Mask
from headwise.backends.reference import plain_precision
from headwise.checks import check_dropout, check_dtype, check_size, check_tensor, check_weight_dtype
from headwise.errors import ConversionError, ShapeError, UnsupportedError
from headwise.functional import Observer, attend, attention_weights, observed, prepare, run
from headwise.linear import project
from headwise.masks import Causal, Dense, Document, Full, Padding, Prefix
from headwise.positions import Positions
from headwise.projections import PROJECTIONS, take_apart
from headwise.score_mods import Bias, ScoreMod

STOCK = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")
HOOKS = tuple(name for name in vars(nn.Module()) if "_hook" in name)


class MultiheadAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` on headwise: the same arguments, state dict, masks and results.

    ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj`` are modules that every call runs, so that hooks, LoRA and
    quantisation reach them. Their parameters are what an optimizer sees; the state dict has the names, shapes and order
    of stock's, and either class loads the other's. Inside ``nn.TransformerEncoderLayer``,
    ``nn.TransformerDecoderLayer`` and ``nn.Transformer`` it is always called, where stock's fast path reads the weights
    and calls nothing.

    It differs from stock where stock's answer is wrong or depends on the mode:

    - ``is_causal=True`` hides later keys, by index (the last query sees all keys), together with every other mask and
      without need of one. It never hides what ``add_bias_kv`` and ``add_zero_attn`` append. Stock takes it for a hint.
    - A query that may see nothing gets zeros before the output projection, and weights of zero; stock gives NaN.
    - Weights are those before dropout, so that each row sums to 1; stock returns them after it.
    - A boolean and a floating point mask may be given together.
    - Errors are headwise's.

    Args:
        embed_dim: Size of a query token and of an output token.
        num_heads: Number of heads, which must divide ``embed_dim``.
        dropout: Probability that a weight is dropped in training.
        bias: Whether the four projections add a bias.
        add_bias_kv: Whether a learned key and value are appended to those of every sequence.
        add_zero_attn: Whether a key and a value of zeros are appended.
        kdim: Size of a key token; None means ``embed_dim``.
        vdim: Size of a value token; None means ``embed_dim``.
        batch_first: Whether tokens are (batch, tokens, features) rather than (tokens, batch, features).
        device: Where the parameters are made.
        dtype: Of the parameters.

    Attributes:
        observer: As that of ``MultiHeadAttention``: called with the complete ``Inputs``, the output and the
            log-sum-exp of each call; may return another output. None for no observer.

    Raises:
        ShapeError: When the arguments do not fit together.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(12, 3, batch_first=True)
        >>> layer.self_attn = headwise.convert.torch.MultiheadAttention.from_stock(layer.self_attn)
        >>> layer(torch.randn(2, 7, 12)).shape
        torch.Size([2, 7, 12])

    Reference: Vaswani et al., Attention Is All You Need, 2017, section 3.2.2. https://arxiv.org/abs/1706.03762
    """

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        switches = {"bias": bias, "add_bias_kv": add_bias_kv, "add_zero_attn": add_zero_attn}
        for name, switch in (switches | {"batch_first": batch_first}).items():
            if not isinstance(switch, bool):
                raise ShapeError(f"{name} is {switch!r}; give True or False.")
        check_weight_dtype(dtype)
        self.embed_dim = check_size(embed_dim, "embed_dim")
        self.num_heads = check_size(num_heads, "num_heads")
        self.kdim = embed_dim if kdim is None else check_size(kdim, "kdim")
        self.vdim = embed_dim if vdim is None else check_size(vdim, "vdim")
        if embed_dim % num_heads:
            raise ShapeError(
                f"embed_dim {embed_dim} cannot be split evenly over {num_heads} heads; MultiHeadAttention takes "
                "head_dim= to choose freely."
            )
        self.head_dim = embed_dim // num_heads
        self.dropout = check_dropout(dropout)
        self.batch_first, self.add_zero_attn = batch_first, add_zero_attn
        self.observer: Observer | None = None
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        for name, width in zip(PROJECTIONS, (embed_dim, self.kdim, self.vdim), strict=True):
            projection = nn.Linear(width, embed_dim, bias, device="meta")  # draws no random numbers
            projection.weight = nn.Parameter(torch.empty(embed_dim, width, **made))
            if bias:
                projection.bias = nn.Parameter(torch.empty(embed_dim, **made))
            self.add_module(name, projection)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, **made)  # type: ignore[assignment]
        for name in ("bias_k", "bias_v"):
            extra = nn.Parameter(torch.empty(1, 1, embed_dim, **made)) if add_bias_kv else None
            self.register_parameter(name, extra)
        self._lay_together()
        self.register_state_dict_post_hook(_pack)
        self._reset_parameters()

    @classmethod
    def from_stock(cls, module: nn.MultiheadAttention) -> "MultiheadAttention":
        """The drop-in of a module, with the module's weights: the same memory, not copies.

        Parameters that both have are the same objects: those of ``out_proj``, ``bias_k``, ``bias_v``, and the three
        weights of a module whose inputs differ in width. The others, ``in_proj_weight`` and ``in_proj_bias``, become
        three parameters each that lie in their memory. An optimizer must therefore be made afterwards: one that was
        made before would leave these as they are. What trains, gradients, hooks, dropout and the mode are taken over.

        Args:
            module: An ``nn.MultiheadAttention``, no longer to be used beside the drop-in.

        Raises:
            ConversionError: When it is another class, or computes its weights from others.
            ShapeError: When it drops every weight.

        Example:
            >>> theirs = torch.nn.MultiheadAttention(12, 3, batch_first=True)
            >>> ours, x = headwise.convert.torch.MultiheadAttention.from_stock(theirs), torch.randn(2, 7, 12)
            >>> torch.allclose(ours(x, x, x)[0], theirs(x, x, x)[0], atol=1e-6)
            True
        """
        _refuse_unknown(module)
        _refuse_odd(module, ("bias_k", "bias_v", *STOCK))
        _refuse_odd(module.out_proj, ("weight", "bias"), "out_proj.")
        made = cls(
            int(module.embed_dim),  # stock keeps whatever acts as a number or a switch
            int(module.num_heads),
            float(module.dropout),
            module.in_proj_bias is not None,
            module.bias_k is not None,
            bool(module.add_zero_attn),
            int(module.kdim),
            int(module.vdim),
            bool(module.batch_first),
            device="meta",
        )
        weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
        if module.in_proj_weight is not None:
            weights = _apart(module.in_proj_weight)
        biases = [None] * 3 if module.in_proj_bias is None else _apart(module.in_proj_bias)
        for name, weight, bias in zip(PROJECTIONS, weights, biases, strict=True):
            projection = getattr(made, name)
            projection.weight, projection.bias = weight, bias
        made.out_proj.weight, made.out_proj.bias = module.out_proj.weight, module.out_proj.bias
        made.bias_k, made.bias_v = module.bias_k, module.bias_v
        _hand_over_hooks(module, made)
        _hand_over_hooks(module.out_proj, made.out_proj)
        return made.train(module.training)

    def to_stock(self) -> nn.MultiheadAttention:
        """An ``nn.MultiheadAttention`` with the weights as they are now, as ``from_stock`` the other way round.

        ``in_proj_weight`` lies in the memory of the three weights as long as these lie one after another, which they
        do from the start and after ``to``, ``deepcopy`` and ``load_state_dict``; otherwise it is a copy. It trains if
        one of them does.

        Raises:
            ConversionError: When a projection is no longer a plain ``nn.Linear``, or has hooks that would be lost.

        Example:
            >>> ours = headwise.convert.torch.MultiheadAttention(12, 3)
            >>> ours.to_stock().in_proj_weight.shape
            torch.Size([36, 12])
        """
        for name in (*PROJECTIONS, "out_proj"):
            projection = getattr(self, name)
            if type(projection) is not nn.Linear:
                raise ConversionError(
                    f"{name} is {type(projection).__name__}, not nn.Linear, and nn.MultiheadAttention has no place for "
                    "it; merge or unload what wraps it first."
                )
            _refuse_odd(projection, ("weight", "bias"), f"{name}.")
            hooks = projection._forward_hooks or projection._forward_pre_hooks or projection._backward_hooks
            if hooks and name != "out_proj":
                raise ConversionError(
                    f"{name} has hooks, which nn.MultiheadAttention would never call; remove them first."
                )
        made = nn.MultiheadAttention(
            self.embed_dim,
            self.num_heads,
            self.dropout,
            self.q_proj.bias is not None,
            self.bias_k is not None,
            self.add_zero_attn,
            self.kdim,
            self.vdim,
            self.batch_first,
            device="meta",
        )
        if made.in_proj_weight is not None:
            made.in_proj_weight = self._one_parameter("weight")  # type: ignore[assignment]
        else:
            for name in PROJECTIONS:
                setattr(made, f"{name}_weight", getattr(self, name).weight)
        made.in_proj_bias = self._one_parameter("bias")  # type: ignore[assignment]
        made.out_proj.weight, made.out_proj.bias = self.out_proj.weight, self.out_proj.bias
        made.bias_k, made.bias_v = self.bias_k, self.bias_v
        _hand_over_hooks(self, made)
        _hand_over_hooks(self.out_proj, made.out_proj)
        return made.train(self.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            query: Tokens that ask: (batch, tokens, embed_dim) if ``batch_first``, else (tokens, batch, embed_dim), or
                (tokens, embed_dim). A nested tensor has a sequence of its own length in each row, and no masks.
            key: Tokens that are looked at, likewise, of size ``kdim``.
            value: Tokens that are read, as many, of size ``vdim``.
            key_padding_mask: (batch, keys), or (keys,) without a batch. A boolean one is True where a key is *hidden*;
                a floating point one is added to the scores.
            need_weights: Whether to return weights as well; it costs their memory.
            attn_mask: (queries, keys), or (batch * heads, queries, keys). A boolean one is True where a key is
                *hidden*; a floating point one is added to the scores.
            average_attn_weights: Whether weights are averaged over heads.
            is_causal: Whether later keys are hidden, besides what the masks hide.

        Returns:
            The output, in the layout of ``query``; and None or the weights before dropout: (batch, queries, keys), or
            (batch, heads, queries, keys), without a batch if the query had none. The columns of keys that are appended
            come last.

        Raises:
            ShapeError: When sizes, dtypes or devices do not fit together.
            UnsupportedError: When nested tensors come with masks or with ordinary tensors.
        """
        if any(isinstance(x, Tensor) and x.is_nested for x in (query, key, value)):
            return self._ragged(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        self._check(query, key, value)
        batch_dim = 1 if query.dim() == 3 and not self.batch_first else 0
        q_BTE, k_BSE, v_BSE = (x if x.dim() == 3 else x[None] for x in (query, key, value))
        batch, rows, slots = q_BTE.shape[batch_dim], q_BTE.shape[1 - batch_dim], k_BSE.shape[1 - batch_dim]
        heads = batch * self.num_heads
        attn_mask = self._padded(attn_mask, "attn_mask", (rows, slots), (heads, rows, slots))
        one = (slots,) if query.dim() == 2 else (batch, slots)
        key_padding_mask = self._padded(key_padding_mask, "key_padding_mask", one)
        mask, score_mods = from_torch_masks(attn_mask, key_padding_mask, num_heads=self.num_heads)
        if is_causal:
            mask = mask & self._also_appended(Causal(), slots)
        out, weights = self._attend(
            q_BTE, k_BSE, v_BSE, batch_dim, mask, score_mods, need_weights, average_attn_weights
        )
        if query.dim() == 2:
            return out[0], None if weights is None else weights[0]
        return out, weights

    def _ragged(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """A call with nested tensors: the lengths of the sequences are the mask."""
        if not (query.is_nested and key.is_nested and value.is_nested):
            raise UnsupportedError("Some of query, key and value are nested tensors; give all three so, or none.")
        if key_padding_mask is not None or attn_mask is not None:
            raise UnsupportedError(
                "A nested tensor says by its lengths what is padding, and takes no masks besides; leave them out, or "
                "give padded tensors."
            )
        if is_causal and query is not key:
            raise UnsupportedError(
                "is_causal=True needs query and key to be the same nested tensor, as in self-attention; give padded "
                "tensors and an attn_mask."
            )
        if query is key is value and not self._appended and not need_weights:  # one row, in which nothing is padding
            lengths = [len(sequence) for sequence in query.unbind()]
            row = torch.cat(list(query.unbind()))[None]
            self._check(row, row, row)
            documents: Mask = Document.from_lengths(lengths, device=query.device)
            documents = documents & Causal() if is_causal else documents
            out, _ = self._attend(row, row, row, 0, documents, (), False, False)
            return self._as_nested(list(out[0].split(lengths)), query), None
        padded = {id(x): nn.utils.rnn.pad_sequence(list(x.unbind()), batch_first=True) for x in (query, key, value)}
        q_BTE, k_BSE, v_BSE = padded[id(query)], padded[id(key)], padded[id(value)]
        self._check(q_BTE, k_BSE, v_BSE)
        real = Padding(torch.tensor([len(sequence) for sequence in key.unbind()], device=query.device))
        seen = real & Causal() if is_causal else real
        mask = self._also_appended(seen, k_BSE.shape[1])
        out, weights = self._attend(q_BTE, k_BSE, v_BSE, 0, mask, (), need_weights, average_attn_weights)
        cut = [row[: len(sequence)] for row, sequence in zip(out, query.unbind(), strict=True)]
        return self._as_nested(cut, query), weights

    @staticmethod
    def _as_nested(sequences: list[Tensor], like: Tensor) -> Tensor:
        if like.layout == torch.jagged:  # with the very offsets of the query, so that the two can be added
            offsets: Tensor = like.offsets()  # type: ignore[attr-defined]
            return torch.nested.nested_tensor_from_jagged(torch.cat(sequences), offsets)
        return torch.nested.as_nested_tensor(sequences)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim: int,
        mask: Mask,
        score_mods: tuple[ScoreMod, ...],
        need_weights: bool,
        average: bool,
    ) -> tuple[Tensor, Tensor | None]:
        q_BHTD = self._heads(project(self.q_proj, query), batch_dim)
        k_BHSD = self._heads(project(self.k_proj, key), batch_dim)
        v_BHSD = self._heads(project(self.v_proj, value), batch_dim)
        rows, slots = q_BHTD.shape[2], k_BHSD.shape[2]
        k_BHSD, v_BHSD = self._extended(k_BHSD, self.bias_k), self._extended(v_BHSD, self.bias_v)
        queries = Positions(rows, start=slots - rows)  # the last query stands with the last key that was given
        dropout_p = self.dropout if self.training else 0.0
        call = (q_BHTD, k_BHSD, v_BHSD, mask, score_mods, None, None, dropout_p, None, queries, None)
        if self.observer is None:
            out_BHTD = attend(*call, "auto")
        else:
            x = prepare(*call, "value")
            out_BHTD = observed(self.observer, x, *run(x))
        weights = None
        if need_weights:
            if isinstance(mask, Full) and not score_mods:  # nothing to hide, and no row that sees nothing
                x = prepare(*call)
                with plain_precision(x):
                    wide = torch.promote_types(x.query.dtype, torch.float32)
                    weights = (x.query.to(wide) @ x.key.to(wide).mT * x.scale).softmax(-1)
            else:
                weights = attention_weights(q_BHTD, k_BHSD, mask=mask, score_mods=score_mods, query_positions=queries)
            weights = (weights.mean(1) if average else weights).to(out_BHTD.dtype)
        tokens = out_BHTD.permute(2, 0, 1, 3) if batch_dim else out_BHTD.transpose(1, 2)
        return project(self.out_proj, tokens.flatten(2)), weights

    def _heads(self, tokens: Tensor, batch_dim: int) -> Tensor:
        """Projected tokens as (batch, heads, tokens, head size)."""
        split = tokens.view(*tokens.shape[:2], self.num_heads, self.head_dim)
        return split.permute(1, 2, 0, 3) if batch_dim else split.transpose(1, 2)

    @property
    def _appended(self) -> int:
        """Number of keys that are appended to every sequence."""
        return int(self.bias_k is not None) + int(self.add_zero_attn)

    def _also_appended(self, mask: Mask, slots: int) -> Mask:
        """A mask, and besides the keys that are appended."""
        return mask | Prefix(self._appended, start=slots) if self._appended else mask

    def _extended(self, x_BHSD: Tensor, extra: Tensor | None) -> Tensor:
        """Keys or values, and after them those of every sequence: the learned one, and one of zeros."""
        parts = [x_BHSD]
        if extra is not None:
            learned = extra.view(1, self.num_heads, 1, self.head_dim).to(x_BHSD.dtype)
            parts.append(learned.expand(x_BHSD.shape[0], -1, -1, -1))
        if self.add_zero_attn:
            parts.append(x_BHSD.new_zeros(x_BHSD.shape[0], self.num_heads, 1, self.head_dim))
        return x_BHSD if len(parts) == 1 else torch.cat(parts, 2)

    def _check(self, query: Any, key: Any, value: Any) -> None:
        for name, tokens, width, projection in (
            ("query", query, self.embed_dim, self.q_proj),
            ("key", key, self.kdim, self.k_proj),
            ("value", value, self.vdim, self.v_proj),
        ):
            check_tensor(tokens, name)
            if tokens.dim() not in (2, 3) or tokens.dim() != query.dim():
                order = "batch, tokens" if self.batch_first else "tokens, batch"
                raise ShapeError(
                    f"{name} is {tuple(tokens.shape)}; give ({order}, {width}), or all (tokens, width) unbatched."
                )
            if tokens.shape[-1] != width:
                raise ShapeError(
                    f"{name} has tokens of size {tokens.shape[-1]}, but the module takes {width}; project them."
                )
            check_dtype(tokens, projection, name)

    def _padded(self, mask: Any, name: str, *shapes: tuple[int, ...]) -> Tensor | None:
        """A mask that hides none of the keys that are appended, and adds nothing to their scores."""
        if mask is None:
            return None
        check_tensor(mask, name)
        if tuple(mask.shape) not in shapes:
            raise ShapeError(f"{name} is {tuple(mask.shape)}; give {' or '.join(map(str, shapes))}.")
        return F.pad(mask, (0, self._appended)) if self._appended else mask

    @property
    def _qkv_same_embed_dim(self) -> bool:
        # what nn.TransformerEncoderLayer asks before it computes attention itself and calls no module
        return False

    @property
    def in_proj_weight(self) -> Tensor | None:  # type: ignore[override]
        """The weights of ``q_proj``, ``k_proj`` and ``v_proj`` as one matrix; None where their inputs differ in width.

        Their own memory, as long as they lie one after another: what is written to it is theirs. Gradients flow to
        them and are found there.
        """
        return self._packed("weight") if self._packs else None

    @property
    def in_proj_bias(self) -> Tensor | None:  # type: ignore[override]
        """The biases of the three, likewise; None if they have none."""
        return self._packed("bias")

    @property
    def q_proj_weight(self) -> Tensor | None:  # type: ignore[override]
        """The weight of ``q_proj`` where the three inputs differ in width, otherwise None."""
        return None if self._packs else _plain(self.q_proj, "weight")

    @property
    def k_proj_weight(self) -> Tensor | None:  # type: ignore[override]
        """Likewise of ``k_proj``."""
        return None if self._packs else _plain(self.k_proj, "weight")

    @property
    def v_proj_weight(self) -> Tensor | None:  # type: ignore[override]
        """Likewise of ``v_proj``."""
        return None if self._packs else _plain(self.v_proj, "weight")

    @property
    def _packs(self) -> bool:
        return self.kdim == self.vdim == self.embed_dim

    def _packed(self, kind: str) -> Tensor | None:
        if not torch.compiler.is_compiling():
            self._lay_together()  # after a projection was given other weights
        query, key, value = (_plain(projection, kind) for projection in (self.q_proj, self.k_proj, self.v_proj))
        if query is None or key is None or value is None:
            return None
        return _together([query, key, value])

    def _one_parameter(self, kind: str) -> nn.Parameter | None:
        packed = self._packed(kind)
        if packed is None:
            return None
        made = nn.Parameter(packed.detach(), packed.requires_grad)
        grads = [getattr(getattr(self, name), kind).grad for name in PROJECTIONS]
        if all(grad is not None for grad in grads):
            made.grad = torch.cat(grads)
        return made

    def _lay_together(self) -> None:
        """Put the three weights, and the three biases, one after another in memory, as stock has them."""
        for kind in ("weight", "bias") if self._packs else ("bias",):
            parts: list[Any] = [getattr(getattr(self, name), kind, None) for name in PROJECTIONS]
            if any(type(part) is not nn.Parameter for part in parts) or _adjacent(parts):
                continue
            if len({(part.dtype, part.device) for part in parts}) == 1:
                for part, place in zip(parts, torch.cat([part.data for part in parts]).chunk(3), strict=True):
                    part.data = place

    def _reset_parameters(self) -> None:
        # the order and the numbers of stock under the same seed
        with torch.no_grad():
            for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
                if weight is not None:
                    nn.init.xavier_uniform_(weight)
            for bias in (self.in_proj_bias, self.out_proj.bias):
                if bias is not None:
                    nn.init.zeros_(bias)
            for extra in (self.bias_k, self.bias_v):
                if extra is not None:
                    nn.init.xavier_normal_(extra)

    def _apply(self, fn: Any, recurse: bool = True) -> "MultiheadAttention":
        super()._apply(fn, recurse)
        self._lay_together()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)
        self._lay_together()

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
        layer = SimpleNamespace(
            embed_dim=self.embed_dim,
            key_dim=self.kdim,
            value_dim=self.vdim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.head_dim,
            v_head_dim=self.head_dim,
            **{name: getattr(self, name) for name in PROJECTIONS},
        )
        error_msgs += take_apart(layer, state_dict, prefix, copy=False)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        """The sizes, and every setting that differs from its default."""
        shown = [f"{self.embed_dim}, {self.num_heads}"]
        defaults = {"dropout": 0.0, "add_zero_attn": False, "kdim": self.embed_dim, "vdim": self.embed_dim}
        defaults["batch_first"] = False
        shown += [f"{k}={v!r}" for k, default in defaults.items() if (v := getattr(self, k)) != default]
        return ", ".join(shown + ["add_bias_kv=True"] * (self.bias_k is not None))


def _pack(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Give the entries of a module the names and the order of stock's."""
    if not isinstance(module, MultiheadAttention):  # but the stock one that gave its hooks
        return
    own = {name: state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix)}
    made: dict[str, Any] = {}
    for kind in ("weight", "bias"):
        names = [f"{prefix}{name}.{kind}" for name in PROJECTIONS]
        if not all(isinstance(own.get(name), Tensor) for name in names):
            continue  # wrapped or quantised: there is no such thing in stock
        parts = [own.pop(name) for name in names]
        if kind == "weight" and not module._packs:
            made |= {f"{prefix}{name}_weight": part for name, part in zip(PROJECTIONS, parts, strict=True)}
        else:
            made[f"{prefix}in_proj_{kind}"] = _together(parts)
    state_dict.update(made | own)


class _Together(torch.autograd.Function):
    """Tensors that lie one after another in memory, as the one that they are parts of."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.rows = [part.shape[0] for part in parts]
        first = parts[0].detach()
        return first.as_strided((sum(ctx.rows), *first.shape[1:]), first.stride())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad.split(ctx.rows)


def _together(parts: list[Tensor]) -> Tensor:
    """The parts as one tensor: their own memory where they lie together, else a copy."""
    if torch.compiler.is_compiling() or not _adjacent(parts):
        return torch.cat(parts)
    return _Together.apply(*parts)


def _adjacent(parts: list[Tensor]) -> bool:
    first = parts[0]
    if any(type(part) not in (Tensor, nn.Parameter) or not part.is_contiguous() for part in parts):
        return False
    if any(torch._C._functorch.is_functorch_wrapped_tensor(part) for part in parts):
        return False
    end, storage = first.storage_offset(), first.untyped_storage()._cdata
    for part in parts:
        if part.untyped_storage()._cdata != storage or part.storage_offset() != end or part.dtype != first.dtype:
            return False
        end += part.numel()
    return True


def _plain(projection: nn.Module, kind: str) -> Tensor | None:
    """The weight or bias of a projection, also of one that is quantised."""
    part: Any = getattr(projection, kind)
    part = part() if callable(part) and not isinstance(part, Tensor) else part
    return part.dequantize() if isinstance(part, Tensor) and part.is_quantized else part


def _apart(packed: nn.Parameter) -> list[nn.Parameter]:
    """The three parts of a parameter as parameters in the same memory."""
    parts = [nn.Parameter(part, packed.requires_grad) for part in packed.detach().chunk(3)]
    if packed.grad is not None:
        for part, grad in zip(parts, packed.grad.chunk(3), strict=True):
            part.grad = grad
    return parts


def _refuse_unknown(module: Any) -> None:
    known = isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward
    if not known or "forward" in vars(module):
        raise ConversionError(
            f"{type(module).__name__} is not nn.MultiheadAttention, or has a forward of its own, so its "
            "formula is not known; for a hand-written module see headwise.convert.textbook."
        )


def _refuse_odd(module: nn.Module, names: tuple[str, ...], where: str = "") -> None:
    """Refuse weights that are computed from others: pruned, normed or parametrised."""
    for name in names:
        if name not in module._parameters and getattr(module, name) is not None:
            raise ConversionError(
                f"{where}{name} is no parameter of its own, but computed from others (by pruning, a norm or a "
                "parametrisation); make it one first, such as by remove_parametrizations."
            )


def _hand_over_hooks(old: nn.Module, new: nn.Module) -> None:
    """Let two modules have the same hooks, so that a handle still removes them."""
    for name in HOOKS:
        hooks = vars(old)[name]
        if name == "_state_dict_hooks" and isinstance(new, MultiheadAttention):
            key = next(key for key, hook in vars(new)[name].items() if hook is _pack)
            hooks[key] = _pack
            hooks.move_to_end(key, last=False)
        elif name == "_state_dict_hooks":
            hooks = OrderedDict((key, hook) for key, hook in hooks.items() if hook is not _pack)
        vars(new)[name] = hooks


def from_torch_masks(
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    *,
    num_heads: int | None = None,
) -> tuple[Mask, tuple[ScoreMod, ...]]:
    """The masks of a call of ``nn.MultiheadAttention`` as a mask and score modifications.

    Boolean masks are True where they *hide*; they are turned round and intersected. Floating point ones are
    added to the scores, so they become ``Bias``. The hint ``is_causal`` has no counterpart: it says what
    ``attn_mask`` holds, and a causal layer is better given ``Causal()``.

    Args:
        attn_mask: (queries, keys), or (batch * heads, queries, keys) with the heads of a sequence side by
            side.
        key_padding_mask: (batch, keys), or (keys,) for a call without a batch.
        num_heads: Number of heads; needed for an ``attn_mask`` of three dimensions.

    Returns:
        The mask and the score modifications, for ``mask=`` and ``score_mods=`` of a call.

    Raises:
        ShapeError: When a mask is neither boolean nor floating point, has another number of dimensions, or
            the number of heads is missing or does not divide it.

    Example:
        >>> hides = torch.ones(3, 3, dtype=torch.bool).triu(1)
        >>> mask, score_mods = headwise.convert.torch.from_torch_masks(hides)
        >>> print(draw(mask, 3))
        ■ · ·
        ■ ■ ·
        ■ ■ ■
        >>> score_mods
        ()
    """
    mask: Mask = Full()
    score_mods: list[ScoreMod] = []
    for name, given, dims in (
        ("attn_mask", attn_mask, (2, 3)),
        ("key_padding_mask", key_padding_mask, (1, 2)),
    ):
        if given is None:
            continue
        if given.dtype != torch.bool and not given.is_floating_point():
            raise ShapeError(f"{name} is of dtype {given.dtype}; nn.MultiheadAttention takes booleans or floats.")
        if given.dim() not in dims:
            raise ShapeError(
                f"{name} has {given.dim()} dimensions; nn.MultiheadAttention takes {dims[0]} or {dims[1]}."
            )
        if name == "key_padding_mask":
            given = given if given.dim() == 2 else given[None]
            hides: Mask | None = Padding(~given) if given.dtype == torch.bool else None
            added = given[:, None, None, :]
        else:
            added = given if given.dim() == 2 else _by_head(given, num_heads)
            hides = Dense(~added) if given.dtype == torch.bool else None
        if hides is None:
            score_mods.append(Bias(added))
        else:
            mask = hides if isinstance(mask, Full) else mask & hides
    return mask, tuple(score_mods)


def _by_head(mask: Tensor, num_heads: int | None) -> Tensor:
    """(batch * heads, T, S) as (batch, heads, T, S): the heads of one sequence stand side by side."""
    if num_heads is None:
        raise ShapeError(
            f"attn_mask of shape {tuple(mask.shape)} mixes batch and heads in its first dimension; say how "
            "many heads there are with num_heads=."
        )
    if num_heads < 1 or mask.shape[0] % num_heads:
        raise ShapeError(
            f"{mask.shape[0]} masks cannot be shared evenly by {num_heads} heads; the first dimension must "
            "be batch * heads."
        )
    return mask.unflatten(0, (mask.shape[0] // num_heads, num_heads))
