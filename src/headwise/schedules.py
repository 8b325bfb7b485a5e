"""Schedules: how fast each pair of a rotary embedding turns, in models stretched to longer sequences.

Pair i of F turns by base^(-i/F) radians per token. A model that reads sequences longer than those of its training
meets angles that it never saw, most of all in its slow pairs; each schedule is a rule of what to slow down, and by
how much. It is a value: plain numbers in, frequencies out.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwise.errors import ShapeError
from headwise.positions import integer


class Schedule(ABC):
    """How fast each pair of dimensions turns, where that is not base^(-2i/D) alone.

    A schedule of your own is a frozen dataclass of numbers with the one method ``frequencies``.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Halved(Schedule):
        ...     def frequencies(self, plain, base, length=None):
        ...         return plain / 2
        >>> RotaryEmbedding(4, schedule=Halved())
        RotaryEmbedding(4, base=10000, schedule=Halved())
    """

    @abstractmethod
    def frequencies(
        self, plain: Float[Tensor, " F"], base: float, length: Int[Tensor, ""] | None = None
    ) -> Float[Tensor, " F"]:
        """Radians per position of each pair.

        Args:
            plain: The frequencies without a schedule, base^(-i/F) for pair i of F, in the dtype to compute in.
            base: That base.
            length: Tokens of the call, where the schedule follows it, else None.

        Returns:
            As many frequencies, in the same dtype.
        """

    @property
    def attention_scaling(self) -> float:
        """What turned queries and keys are multiplied by."""
        return 1.0

    @property
    def follows_length(self) -> bool:
        """Whether the frequencies depend on the length of the call."""
        return False

    def why_not(self, pairs: int, base: float) -> str | None:
        """Why so many pairs or such a base cannot be served, and what to do; None where they can."""
        return None


@dataclass(frozen=True)
class LinearSchedule(Schedule):
    """Every pair turns ``factor`` times slower, as if positions were divided by it (position interpolation).

    Args:
        factor: How many times longer than in training sequences may be.

    Raises:
        ShapeError: When ``factor`` is no finite number above 0.

    Example:
        >>> LinearSchedule(2.0).frequencies(torch.tensor([1.0, 0.1]), base=100.0)
        tensor([0.5000, 0.0500])

    Reference: Chen et al., Extending Context Window of Large Language Models via Positional Interpolation, 2023.
    https://arxiv.org/abs/2306.15595
    """

    factor: float

    def __post_init__(self) -> None:
        _above_zero(factor=self.factor)

    def frequencies(
        self, plain: Float[Tensor, " F"], base: float, length: Int[Tensor, ""] | None = None
    ) -> Float[Tensor, " F"]:
        return plain / self.factor


@dataclass(frozen=True)
class DynamicNTKSchedule(Schedule):
    """The base grows with the length, once that is above ``original_length`` ("NTK-aware" scaling).

    The slowest pair turns slower by factor · length / original_length - factor + 1, the fastest as before, those
    between in proportion.

    Args:
        factor: How strongly.
        original_length: Tokens of a sequence in training.
        length: Tokens of the sequences to come, which fixes the frequencies. None follows the length of each
            call, which goes without a cache only: its keys were turned for the length of an earlier call.

    Raises:
        ShapeError: When ``factor`` is no finite number above 0, or a length no whole number of at least 2.

    Example:
        >>> DynamicNTKSchedule(2.0, original_length=8, length=12).frequencies(torch.tensor([1.0, 0.1]), base=100.0)
        tensor([1.0000, 0.0500])

    Reference: bloc97 and emozilla, 2023, as told in Peng et al., YaRN, 2023, section 3.
    https://arxiv.org/abs/2309.00071
    """

    factor: float
    original_length: int
    length: int | None = None

    def __post_init__(self) -> None:
        _above_zero(factor=self.factor)
        _tokens(original_length=self.original_length, length=self.length)

    @property
    def follows_length(self) -> bool:
        return self.length is None

    def why_not(self, pairs: int, base: float) -> str | None:
        return None if pairs > 1 else "DynamicNTKSchedule stretches the slower of several pairs; turn more than 1."

    def frequencies(
        self, plain: Float[Tensor, " F"], base: float, length: Int[Tensor, ""] | None = None
    ) -> Float[Tensor, " F"]:
        longer = _tokens_of(self, length, plain).to(plain.dtype) / self.original_length
        slower = self.factor * longer.clamp(min=1) - (self.factor - 1)
        return plain * slower ** (-_pairs(plain) / (len(plain) - 1))


@dataclass(frozen=True)
class YaRNSchedule(Schedule):
    """Slow pairs turn ``factor`` times slower, fast ones as before, those between by a mixture of both.

    Args:
        factor: How many times longer than in training sequences may be.
        original_length: Tokens of a sequence in training.
        beta_fast: Pairs that turn more often than this in the original length stay as they are.
        beta_slow: Pairs that turn less often than this are slowed down in full.
        attention_factor: What turned queries and keys are multiplied by; None means 0.1 · ln(factor) + 1. The
            ``mscale`` and ``mscale_all_dim`` of DeepSeek give it as a quotient (that model also multiplies its
            ``scale``, which is the layer's).
        truncate: Whether the ends of the mixture are rounded to whole pairs. gpt-oss does not.

    Raises:
        ShapeError: When a number is not finite and above 0, ``original_length`` no whole number of at least 2, or
            ``beta_fast`` below ``beta_slow``.

    Example:
        >>> yarn = YaRNSchedule(4.0, original_length=64, beta_fast=8.0)
        >>> yarn.frequencies(torch.tensor([1.0, 0.1, 0.01]), base=1000.0)
        tensor([1.0000, 0.0625, 0.0025])

    Reference: Peng et al., YaRN: Efficient Context Window Extension of Large Language Models, 2023.
    https://arxiv.org/abs/2309.00071 (its β is ``beta_fast``, its α ``beta_slow``, its sqrt(1/t) ``attention_factor``).
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _above_zero(factor=self.factor, beta_fast=self.beta_fast, beta_slow=self.beta_slow)
        _above_zero(attention_factor=self.attention_scaling)
        _tokens(original_length=self.original_length)
        if self.beta_fast < self.beta_slow:
            raise ShapeError(f"beta_fast={self.beta_fast} is below beta_slow={self.beta_slow}; exchange them.")

    @property
    def attention_scaling(self) -> float:
        return 0.1 * math.log(max(self.factor, 1)) + 1 if self.attention_factor is None else self.attention_factor

    def why_not(self, pairs: int, base: float) -> str | None:
        return (
            None if base > 1 else f"YaRNSchedule tells fast pairs from slow ones, but base={base:g}; give more than 1."
        )

    def frequencies(
        self, plain: Float[Tensor, " F"], base: float, length: Int[Tensor, ""] | None = None
    ) -> Float[Tensor, " F"]:
        # which pair, as a real number, turns so often in the original length
        first, last = (
            len(plain) * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(base)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * len(plain) - 1)  # the bound is in dimensions, as published
        slowed = ((_pairs(plain) - first) / (last - first or 0.001)).clamp(0, 1)
        return plain * (1 - slowed) + plain / self.factor * slowed


@dataclass(frozen=True)
class Llama3Schedule(Schedule):
    """As YaRN, but mixed by how often a pair turns, and without a factor for the scores (Llama 3.1).

    Args:
        factor: How many times longer than in training sequences may be.
        original_length: Tokens of a sequence in training.
        low_freq_factor: Pairs that turn less often than this in the original length are slowed down in full.
        high_freq_factor: Pairs that turn more often than this stay as they are.

    Raises:
        ShapeError: When a number is not finite and above 0, ``original_length`` no whole number of at least 2, or
            ``high_freq_factor`` not above ``low_freq_factor``.

    Example:
        >>> Llama3Schedule(8.0, original_length=64).frequencies(torch.tensor([1.0, 0.25, 0.01]), base=1000.0)
        tensor([1.0000, 0.1440, 0.0012])

    Reference: the code published with Llama 3.1; Grattafiori et al., The Llama 3 Herd of Models, 2024.
    https://arxiv.org/abs/2407.21783
    """

    factor: float
    original_length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        low, high = self.low_freq_factor, self.high_freq_factor
        _above_zero(factor=self.factor, low_freq_factor=low, high_freq_factor=high)
        _tokens(original_length=self.original_length)
        if high <= low:
            raise ShapeError(f"high_freq_factor={high} is not above low_freq_factor={low}; exchange or change them.")

    def frequencies(
        self, plain: Float[Tensor, " F"], base: float, length: Int[Tensor, ""] | None = None
    ) -> Float[Tensor, " F"]:
        turns = plain * (self.original_length / (2 * math.pi))
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return plain * kept + plain / self.factor * (1 - kept)


@dataclass(frozen=True)
class LongRoPESchedule(Schedule):
    """Each pair is slowed down by a number of its own, from one list for short sequences and one for long ones.

    Args:
        factor: How many times longer than in training sequences may be; only ``attention_factor`` needs it.
        original_length: Tokens of a sequence in training. Longer ones take the long list.
        short_factor: A number for each pair.
        long_factor: Likewise.
        attention_factor: What turned queries and keys are multiplied by; None means
            sqrt(1 + ln(factor) / ln(original_length)).
        length: Tokens of the sequences to come, which fixes the list. None follows the length of each call,
            which goes without a cache only: its keys may have been turned by the other list.

    Raises:
        ShapeError: When a number is not finite and above 0, a length no whole number of at least 2, or the lists
            differ in size.

    Example:
        >>> longrope = LongRoPESchedule(4.0, 8, (1.0, 1.0), (1.0, 5.0), length=32)
        >>> longrope.frequencies(torch.tensor([1.0, 0.1]), base=100.0)
        tensor([1.0000, 0.0200])

    Reference: Ding et al., LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens, 2024.
    https://arxiv.org/abs/2402.13753
    """

    factor: float
    original_length: int
    short_factor: Sequence[float]
    long_factor: Sequence[float]
    attention_factor: float | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            numbers = getattr(self, name)
            if not isinstance(numbers, (list, tuple)):
                raise ShapeError(f"{name}= is {type(numbers).__name__}; give a tuple of numbers, one for each pair.")
            for number in numbers:
                _above_zero(**{name: number})
            object.__setattr__(self, name, tuple(numbers))  # a list could not be hashed
        if len(self.short_factor) != len(self.long_factor):
            raise ShapeError(
                f"{len(self.short_factor)} short and {len(self.long_factor)} long factors differ; give as many of each."
            )
        _tokens(original_length=self.original_length, length=self.length)
        _above_zero(factor=self.factor)
        _above_zero(attention_factor=self.attention_scaling)

    @property
    def attention_scaling(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(max(self.factor, 1)) / math.log(self.original_length))

    @property
    def follows_length(self) -> bool:
        return self.length is None

    def why_not(self, pairs: int, base: float) -> str | None:
        if len(self.short_factor) == pairs:
            return None
        return f"LongRoPESchedule has {len(self.short_factor)} factors for {pairs} pairs; give one for each."

    def frequencies(
        self, plain: Float[Tensor, " F"], base: float, length: Int[Tensor, ""] | None = None
    ) -> Float[Tensor, " F"]:
        short, long = (
            torch.tensor(numbers, dtype=plain.dtype, device=plain.device)
            for numbers in (self.short_factor, self.long_factor)
        )
        return plain / torch.where(_tokens_of(self, length, plain) > self.original_length, long, short)


@dataclass(frozen=True)
class ProportionalSchedule(Schedule):
    """The fastest pairs turn, as fast as they do in a whole head; the others stand still (Gemma 4).

    ``rotary_dim`` is the other way to turn a part of a head: its first dimensions, as if they were a head.

    Args:
        share: Share of the pairs that turn, rounded down to whole ones.
        factor: Those turn so many times slower.

    Raises:
        ShapeError: When ``share`` is not above 0 and at most 1, or ``factor`` no finite number above 0.

    Example:
        >>> ProportionalSchedule(0.5).frequencies(torch.tensor([1.0, 0.1]), base=100.0)
        tensor([1., 0.])

    Reference: Gemma 4 as published in transformers, which calls it the rope type "proportional".
    """

    share: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        _above_zero(share=self.share, factor=self.factor)
        if self.share > 1:
            raise ShapeError(f"share={self.share} is more than all pairs; give at most 1.")

    def frequencies(
        self, plain: Float[Tensor, " F"], base: float, length: Int[Tensor, ""] | None = None
    ) -> Float[Tensor, " F"]:
        return plain / self.factor * (_pairs(plain) < int(self.share * len(plain)))


def _above_zero(**numbers: Any) -> None:
    """Refuse what is no finite number above 0, by its name."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < math.inf:
            raise ShapeError(f"{name}={number!r:.40} of a rotary schedule is no finite number above 0; give one.")


def _tokens(**lengths: Any) -> None:
    """Refuse a length that is no whole number of at least 2, by its name; None stands for none."""
    for name, length in lengths.items():
        if length is not None and integer(length, f"{name} of a rotary schedule") < 2:
            raise ShapeError(f"{name}={length} of a rotary schedule is too short; give at least 2 tokens.")


def _tokens_of(schedule: Any, length: Tensor | None, plain: Tensor) -> Int[Tensor, ""]:
    """The length that a schedule works for: of the call, or its own, or that of training."""
    own = schedule.original_length if schedule.length is None else schedule.length
    return torch.full((), own, device=plain.device) if length is None else length


def _pairs(plain: Tensor) -> Float[Tensor, " F"]:
    """The number of each pair, in the dtype and on the device of the frequencies."""
    return torch.arange(len(plain), dtype=plain.dtype, device=plain.device)
