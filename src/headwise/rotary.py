"""Rotary position embedding: queries and keys turned by angles that grow with their position.

A score then depends on the distance between query and key alone. Two layouts exist of which dimensions form a pair:
half-split (i with i + D/2; the default, as in most checkpoints on the Hugging Face hub) and interleaved (2i with
2i + 1, as in the paper). They are related by a permutation of the dimensions of the projections.

How fast each pair turns is a value of its own, a ``Schedule``. Which coordinate of a token a pair follows, where a
token has several (time, height, width), is said by ``sections``.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headwise.errors import ShapeError
from headwise.positions import integer
from headwise.schedules import Schedule

SPECTRA = ("contiguous", "interleaved", "grouped", "axial")


def default_frequencies(
    dim: int, base: float, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Float[Tensor, " F"]:
    """Angle per position of each pair: base^(-2i/dim)."""
    return base ** (-torch.arange(0, dim, 2, dtype=dtype, device=device) / dim)


class RotaryEmbedding(nn.Module):
    """Turn each pair of dimensions of a query or key by position · frequency.

    Tokens with several coordinates have positions "A B T", one for each of A axes, and ``sections`` says how many
    of the frequencies follow each. There are four ways to share them out:

    - "contiguous": one spectrum, cut into consecutive sections (M-RoPE of Qwen2-VL, Qwen2.5-VL, GLM-4V).
    - "interleaved": one spectrum, dealt to the axes in turn until each has its number, the rest to the first axis
      (M-RoPE of Qwen3-VL, Qwen3.5).
    - "grouped": dealt likewise, but stored axis by axis (Pixtral).
    - "axial": each axis has a spectrum of its own, as a head of its share of the dimensions would (the vision parts
      of Qwen2-VL to Qwen3.5; that of Llama 4, interleaved and counting patches from 1).

    Args:
        head_dim: Dimensions of a head.
        base: Pair i turns by base^(-2i/rotary_dim) radians per token: the first by 1, the last by nearly 1/base.
        interleaved: Whether neighbours form a pair (2i, 2i + 1) rather than (i, i + rotary_dim/2).
        rotary_dim: Turn the first so many dimensions only, as GPT-NeoX, Phi and GLM do: an even number of at least
            2; None means all.
        schedule: Changes the frequencies, such as ``YaRNSchedule(4.0, 8192)``; None leaves them.
        sections: How many of the rotary_dim/2 frequencies follow each axis, such as (16, 24, 24) for time, height
            and width; None where tokens have one position.
        spectrum: Which frequencies those are, as above.

    Raises:
        ShapeError: When the arguments do not fit together, or an input does not fit them.

    Example:
        >>> rotary = RotaryEmbedding(2)
        >>> rotary(torch.tensor([[[[1.0, 0.0], [1.0, 0.0]]]]), torch.tensor([[0, 1]]))
        tensor([[[[1.0000, 0.0000],
                  [0.5403, 0.8415]]]])
        >>> time, height, width = torch.tensor([0, 1, 1]), torch.tensor([0, 1, 1]), torch.tensor([0, 1, 2])
        >>> rotary = RotaryEmbedding(12, sections=(2, 2, 2))
        >>> rotary(torch.randn(1, 1, 3, 12), torch.stack([time, height, width])[:, None]).shape
        torch.Size([1, 1, 3, 12])

    Reference: Su et al., RoFormer, 2021. https://arxiv.org/abs/2104.09864; several axes: Wang et al., Qwen2-VL,
    2024. https://arxiv.org/abs/2409.12191
    """

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10_000.0,
        interleaved: bool = False,
        rotary_dim: int | None = None,
        schedule: Schedule | None = None,
        sections: Sequence[int] | None = None,
        spectrum: str = "contiguous",
    ) -> None:
        super().__init__()
        integer(head_dim, "head_dim of a rotary embedding")
        rotary_dim = head_dim if rotary_dim is None else integer(rotary_dim, "rotary_dim of a rotary embedding")
        if rotary_dim < 2 or rotary_dim % 2:
            raise ShapeError(f"Rotary embeddings turn pairs of dimensions, and {rotary_dim} is not even and above 0.")
        if rotary_dim > head_dim:
            raise ShapeError(f"rotary_dim={rotary_dim} is more than the {head_dim} dimensions of a head; give fewer.")
        if isinstance(base, bool) or not isinstance(base, (int, float)) or not 0 < base < math.inf:
            raise ShapeError(f"A rotary base of {base!r} gives no angles; give a number above 0, such as 10000.")
        if schedule is not None and not isinstance(schedule, Schedule):
            raise ShapeError(f"schedule= takes a Schedule, not {schedule!r:.40}; leave it out for none.")
        self.head_dim = head_dim
        self.base = base
        self.interleaved = interleaved
        self.rotary_dim = rotary_dim
        self.schedule = schedule
        self.sections: Any = tuple(sections) if isinstance(sections, list) else sections
        self.spectrum = spectrum
        # of each frequency: its axis, and its place in the spectrum
        self._axes, self._places = _share_out(self.sections, spectrum, rotary_dim // 2)
        reasons = [] if schedule is None else [schedule.why_not(pairs, base) for pairs in self._spectra()]
        for reason in filter(None, reasons):
            raise ShapeError(reason)

    @property
    def follows_length(self) -> bool:
        """Whether the frequencies depend on the length of a call.

        The keys in a cache were turned when they came, at the length of their call, so that such a schedule goes
        without a cache only; give it a ``length`` of its own.
        """
        return self.schedule is not None and self.schedule.follows_length

    def forward(
        self,
        x: Float[Tensor, "B H T D"],
        position: Int[Tensor, "#B T"] | Int[Tensor, "A #B T"],
        length: int | Int[Tensor, ""] | None = None,
    ) -> Float[Tensor, "B H T D"]:
        """Rotate ``x`` as tokens that stand at ``position``.

        Args:
            x: Queries or keys.
            position: Of each token, or of each token on each axis; one for all axes where there are sections but
                one number a token.
            length: Tokens that the sequence has by now, the highest position plus 1, where ``follows_length``; not
                read elsewhere. None takes it from ``position``. Queries and keys of one call must be turned by the
                same frequencies, so give it where their positions end at different ones.

        Returns:
            The like of ``x``.
        """
        self._check(x, position)
        # float32 at least, whatever the dtype of x: half precision cannot tell neighbouring positions above 2048
        # apart. An elementwise product, since autocast would turn a matmul into half precision.
        wide = torch.promote_types(x.dtype, torch.float32)
        frequencies = self._frequencies(wide, x.device, self._length(position, length))
        angle_B1TF = self._coordinates(position).to(wide) * frequencies
        cos_B1TF, sin_B1TF = angle_B1TF.cos(), angle_B1TF.sin()
        if self.schedule is not None:
            scaling = self.schedule.attention_scaling
            cos_B1TF, sin_B1TF = cos_B1TF * scaling, sin_B1TF * scaling
        return _turn(x, cos_B1TF, sin_B1TF, self.interleaved)

    def _spectra(self) -> tuple[int, ...]:
        """How many pairs each spectrum has."""
        return self.sections if self.sections and self.spectrum == "axial" else (self.rotary_dim // 2,)

    def _frequencies(self, dtype: torch.dtype, device: torch.device, length: Tensor | None) -> Float[Tensor, " F"]:
        """Radians per position of each pair, computed anew: a buffer would be rounded by ``half()``."""
        spectra = []
        for pairs in self._spectra():
            plain = default_frequencies(2 * pairs, self.base, dtype, device)
            spectra.append(plain if self.schedule is None else self.schedule.frequencies(plain, self.base, length))
        found = spectra[0] if len(spectra) == 1 else torch.cat(spectra)
        return found[torch.tensor(self._places, device=device)] if self.spectrum == "grouped" else found

    def _coordinates(self, position: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """The position that each frequency multiplies, "B 1 T F", or one for all, "B 1 T 1"."""
        if position.dim() == 2:
            return position[:, None, :, None]
        return position[torch.tensor(self._axes, device=position.device)].movedim(0, -1)[:, None]

    def _length(self, position: Int[Tensor, "..."], length: int | Tensor | None) -> Int[Tensor, ""] | None:
        if not self.follows_length:
            return None
        if length is None:  # with a 0 for a call without tokens
            return nn.functional.pad(position.flatten(), (0, 1)).max() + 1
        if isinstance(length, Tensor):
            return length
        return torch.full((), integer(length, "The length of a rotary call"), device=position.device)

    def _check(self, x: Any, position: Any) -> None:
        if x.dim() != 4 or not x.is_floating_point():
            raise ShapeError(
                f'A rotary embedding was given {x.dtype} of shape {tuple(x.shape)}; give floating point "B H T D".'
            )
        if x.shape[-1] != self.head_dim:
            raise ShapeError(
                f"A rotary embedding for heads of {self.head_dim} was given heads of {x.shape[-1]}; make them equal."
            )
        axes = 1 if self.sections is None else len(self.sections)
        if (
            not isinstance(position, Tensor)
            or position.is_floating_point()
            or position.dim() not in (2, 2 if self.sections is None else 3)
            or position.shape[-1] != x.shape[2]
            or position.shape[-2] not in (1, x.shape[0])
            or position.shape[:-2] not in ((), (axes,))
        ):
            given = tuple(position.shape) if isinstance(position, Tensor) else type(position).__name__
            more = "" if self.sections is None else f", or ({axes}, batch, tokens) for the axes"
            raise ShapeError(
                f"Positions {given} do not fit heads of shape {tuple(x.shape)}; give one whole number per token, "
                f"(1, tokens) or (batch, tokens){more}."
            )

    def extra_repr(self) -> str:
        """The size, the base, and every setting that differs from its default."""
        shown = [f"{self.head_dim}, base={self.base:g}"] + ["interleaved"] * self.interleaved
        defaults = {"rotary_dim": self.head_dim, "schedule": None, "sections": None, "spectrum": "contiguous"}
        shown += [f"{k}={v!r}" for k, default in defaults.items() if (v := getattr(self, k)) != default]
        return ", ".join(shown)


def rotate(
    x: Float[Tensor, "B H T D"], cos: Float[Tensor, "#B T F"], sin: Float[Tensor, "#B T F"], interleaved: bool = False
) -> Float[Tensor, "B H T D"]:
    """Turn each pair of dimensions by an angle given by its cosine and sine, in float32 at least.

    (a, b) becomes (a · cos - b · sin, a · sin + b · cos). ``RotaryEmbedding`` is this with tables made from positions.

    Args:
        x: Queries or keys. Dimensions after the first 2F stay as they are.
        cos: For each pair of each token; the first size is the batch or 1.
        sin: Likewise.
        interleaved: Whether neighbours form a pair (2i, 2i + 1) rather than (i, i + F).

    Returns:
        The like of ``x``.

    Raises:
        ShapeError: When the tables do not fit.

    Example:
        >>> rotate(torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[[0.6]]]), torch.tensor([[[0.8]]]))
        tensor([[[[0.6000, 0.8000]]]])

    Reference: Su et al., RoFormer, 2021, equation 34. https://arxiv.org/abs/2104.09864
    """
    if x.dim() != 4 or not x.is_floating_point():
        raise ShapeError(f'rotate was given {x.dtype} of shape {tuple(x.shape)}; give floating point "B H T D".')
    batch, _, tokens, size = x.shape
    fits = cos.dim() == 3 and cos.shape[0] in (1, batch) and cos.shape[1] == tokens and 2 * cos.shape[2] <= size
    if not fits or cos.shape != sin.shape:
        raise ShapeError(
            f"Tables of shapes {tuple(cos.shape)} and {tuple(sin.shape)} do not fit heads of shape {tuple(x.shape)}; "
            f"give (1 or batch, tokens, pairs), at most {size // 2} pairs."
        )
    wide = torch.promote_types(x.dtype, torch.float32)
    return _turn(x, cos[:, None].to(wide), sin[:, None].to(wide), interleaved)


def _turn(x: Tensor, cos_B1TF: Tensor, sin_B1TF: Tensor, interleaved: bool) -> Tensor:
    """Turn ``x`` in the precision of the tables, and give it back in its own."""
    size = 2 * cos_B1TF.shape[-1]
    if size < x.shape[-1]:
        return torch.cat([_turn(x[..., :size], cos_B1TF, sin_B1TF, interleaved), x[..., size:]], -1)
    wide = x.to(cos_B1TF.dtype)
    a, b = wide.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else wide.chunk(2, -1)
    turned = (a * cos_B1TF - b * sin_B1TF, a * sin_B1TF + b * cos_B1TF)
    return (torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)).to(x.dtype)


def _share_out(sections: Any, spectrum: str, pairs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of each of ``pairs`` frequencies: the axis that it follows, and its place in the spectrum."""
    if spectrum not in SPECTRA:
        raise ShapeError(f"There is no spectrum {spectrum!r}; there are {', '.join(SPECTRA)}.")
    if sections is None:
        if spectrum != "contiguous":
            raise ShapeError(
                f"spectrum={spectrum!r} is for several axes; say with sections= how many frequencies each."
            )
        return (0,) * pairs, tuple(range(pairs))
    if not isinstance(sections, tuple):
        raise ShapeError(f"sections= is {type(sections).__name__}; give a tuple of whole numbers, one for each axis.")
    for number in sections:
        if integer(number, "A section of rotary frequencies") < 1:
            raise ShapeError(f"A section of {number} rotary frequencies is none; give at least 1.")
    if sum(sections) != pairs:
        raise ShapeError(f"sections={sections} share out {sum(sections)} of {pairs} pairs that turn; make them equal.")
    in_order = tuple(range(pairs))
    by_axis = tuple(axis for axis, number in enumerate(sections) for _ in range(number))
    if spectrum in ("contiguous", "axial"):
        return by_axis, in_order
    dealt: list[int] = []
    for pair in range(pairs):
        axis = pair % len(sections)
        dealt.append(axis if dealt.count(axis) < sections[axis] else 0)
    come = tuple(dealt.count(axis) for axis in range(len(sections)))
    if come != sections:
        raise ShapeError(f"sections={sections}, dealt in turn, come to {come}; give these, or another spectrum=.")
    if spectrum == "grouped":
        return by_axis, tuple(sorted(in_order, key=dealt.__getitem__))
    return tuple(dealt), in_order
