"""The tasks: real text and real images, with the answer near or far away.

Text is that of scripts/demo_text.txt, chapters of Moby-Dick, of which the last tenth is kept for testing. Images are
the 1,797 handwritten digits of scikit-learn, of which a fifth, another for each seed, is kept for testing.
"""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headwise import Causal, Full, Mask

TEXT = Path(__file__).resolve().parents[2] / "scripts" / "demo_text.txt"
WORDS = 128  # the commonest words of the text; recall leaves out the others


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows of one length.

    Args:
        inputs: What ``Task.embedding`` takes.
        targets: The class to be found by each output of ``Task.readout``.
    """

    inputs: Tensor
    targets: Int[Tensor, " N"]


class Task(ABC):
    """Something to learn.

    Args:
        seed: Says which part is kept for testing, where that differs by seed.
    """

    mask: Mask = Full()
    tested: tuple[int, ...]
    """Lengths of the tests."""
    trained: tuple[int, int]
    """Shortest and longest length in training."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @abstractmethod
    def embedding(self, width: int) -> nn.Module:
        """From inputs to tokens ``B T E``."""

    @abstractmethod
    def readout(self, width: int) -> nn.Module:
        """From tokens ``B T E`` to scores of classes ``N C``."""

    @abstractmethod
    def batch(self, count: int, length: int, generator: torch.Generator, test: bool) -> Batch:
        """Random examples of a length, from the part for training or for testing."""


class Classify(nn.Module):
    """Scores of classes from what ``pick`` takes of the tokens."""

    def __init__(self, width: int, classes: int, pick: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.pick = nn.Linear(width, classes), pick

    def forward(self, tokens: Float[Tensor, "B T E"]) -> Float[Tensor, "N C"]:
        return self.linear(self.pick(tokens))


class Text(Task):
    """The next byte of a text, from the bytes before it."""

    mask = Causal()
    trained, tested = (64, 64), (64,)

    def embedding(self, width: int) -> nn.Module:
        return Sinusoids(256, width)

    def readout(self, width: int) -> nn.Module:
        return Classify(width, 256, lambda tokens: tokens.flatten(0, 1))

    def batch(self, count: int, length: int, generator: torch.Generator, test: bool) -> Batch:
        part = split(text_bytes(), test)
        starts = torch.randint(len(part) - length, (count, 1), generator=generator)
        rows = part[starts + torch.arange(length + 1)]
        return Batch(rows[:, :-1], rows[:, 1:].flatten())


class Digits(Task):
    """Which digit an image shows, cut into as many patches as there are tokens.

    Args:
        seed: Which fifth is kept for testing, among others.
        places: Whether a token says where its patch was; without, an image is a bag of patches.
    """

    trained, tested = (16, 16), (16,)
    PATCHES: ClassVar = {8: (1, 8), 16: (2, 2), 32: (1, 2)}  # tokens: rows and columns of a patch

    def __init__(self, seed: int, places: bool = True, length: int = 16) -> None:
        super().__init__(seed)
        self.places, self.trained, self.tested = places, (length, length), (length,)

    def embedding(self, width: int) -> nn.Module:
        length = self.trained[0]
        return Patches(64 // length, width, length if self.places else 0)

    def readout(self, width: int) -> nn.Module:
        return Classify(width, 10, lambda tokens: tokens.mean(1))

    def batch(self, count: int, length: int, generator: torch.Generator, test: bool) -> Batch:
        images, classes = digits()
        # the fifths do not depend on the generator, which differs between training and testing
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(20))
        held = torch.zeros(len(images), dtype=torch.bool)
        held[order[self.seed % 5 :: 5]] = True
        among = torch.nonzero(held == test).flatten()
        chosen = among if test else among[torch.randint(len(among), (count,), generator=generator)]
        high, wide = self.PATCHES[length]
        patches = images[chosen].unflatten(1, (-1, high)).unflatten(3, (-1, wide)).transpose(2, 3)
        return Batch(patches.flatten(3).flatten(1, 2), classes[chosen])


class Patches(nn.Module):
    """A linear layer for each patch, and a learned vector for each place where there are places."""

    def __init__(self, pixels: int, width: int, places: int) -> None:
        super().__init__()
        self.linear = nn.Linear(pixels, width)
        self.places = nn.Parameter(torch.randn(places, width) * 0.02) if places else None

    def forward(self, patches: Float[Tensor, "B T P"]) -> Float[Tensor, "B T E"]:
        tokens = self.linear(patches)
        return tokens if self.places is None else tokens + self.places


class Copy(Task):
    """A piece of text, then as many empty slots: fill each with the byte as far back as the piece is long.

    A slot has the same sinusoids as the byte that belongs there, so that lengths not seen in training can be asked for.
    """

    trained, tested = (8, 32), (8, 16, 32, 64, 128)
    EMPTY = 256

    def embedding(self, width: int) -> nn.Module:
        return Sinusoids(257, width, parts=2)

    def readout(self, width: int) -> nn.Module:
        return Classify(width, 256, lambda tokens: tokens[:, tokens.shape[1] // 2 :].flatten(0, 1))

    def batch(self, count: int, length: int, generator: torch.Generator, test: bool) -> Batch:
        part = split(text_bytes(), test)
        starts = torch.randint(len(part) - length, (count, 1), generator=generator)
        piece = part[starts + torch.arange(length)]
        return Batch(torch.cat([piece, torch.full_like(piece, self.EMPTY)], 1), piece.flatten())


class Sinusoids(nn.Module):
    """A learned vector for each symbol plus sinusoids of its place.

    Args:
        symbols: How many there are.
        width: Size of a token.
        parts: In so many parts of equal length the places start again.
    """

    def __init__(self, symbols: int, width: int, parts: int = 1) -> None:
        super().__init__()
        self.symbols, self.parts = nn.Embedding(symbols, width), parts
        nn.init.normal_(self.symbols.weight, std=0.5)  # about as large as the sinusoids, so that both are heard
        self.register_buffer("rates", 10_000 ** (-torch.arange(0, width, 2) / width), persistent=False)

    def forward(self, inputs: Int[Tensor, "B T"]) -> Float[Tensor, "B T E"]:
        angles = torch.arange(inputs.shape[1] // self.parts)[:, None] * self.rates
        return self.symbols(inputs) + torch.cat([angles.sin(), angles.cos()], 1).repeat(self.parts, 1)


class Recall(Task):
    """Given a passage as a bag of pairs of neighbouring words: which word followed this one?

    A token is a pair; the last token is the question. There are no places: only what a pair holds leads to it,
    however far away it stands. Words asked for occur once in the passage.
    """

    trained, tested = (8, 32), (8, 16, 32, 64, 128)
    questions = 1

    def embedding(self, width: int) -> nn.Module:
        return Pairs(width)

    def readout(self, width: int) -> nn.Module:
        wide = Classify(width, WORDS * self.questions, lambda tokens: tokens[:, -1])
        return nn.Sequential(wide, nn.Unflatten(1, (self.questions, WORDS)), nn.Flatten(0, 1))

    def batch(self, count: int, length: int, generator: torch.Generator, test: bool) -> Batch:
        part = split(common_words(), test)
        starts = torch.randint(len(part) - length, (count, 1), generator=generator)
        rows = part[starts + torch.arange(length + 1)]
        first, second = rows[:, :-1], rows[:, 1:]
        alone = (first[:, :, None] == first[:, None]).sum(-1) == 1
        # a passage without enough words that occur once, which is rare, asks for one that occurs more often
        luck = torch.rand(first.shape, generator=generator) + alone
        asked = luck.topk(self.questions, dim=1).indices
        empty = torch.full((count, 1), WORDS)
        question = [first.gather(1, asked[:, i : i + 1]) for i in range(self.questions)]
        pair = torch.stack([torch.cat([first, question[0]], 1), torch.cat([second, empty], 1)], -1)
        other = torch.cat([torch.full_like(first, WORDS), question[1] if self.questions > 1 else empty], 1)
        return Batch(torch.cat([pair, other[..., None]], -1), second.gather(1, asked).flatten())


class RecallOfTwo(Recall):
    """The same with two words asked for by the same token, both to be answered."""

    questions = 2


class Pairs(nn.Module):
    """A learned vector for each word, turned by a matrix of its own for each of the three roles, and the sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS + 1, width, padding_idx=WORDS)
        self.roles = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, inputs: Int[Tensor, "B T 3"]) -> Float[Tensor, "B T E"]:
        return sum(role(self.words(inputs[..., i])) for i, role in enumerate(self.roles))  # type: ignore[return-value]


@cache
def text_bytes() -> Int[Tensor, " L"]:
    """The text, without the line that says where it comes from."""
    return torch.tensor(list(TEXT.read_bytes().split(b"\n", 1)[1]), dtype=torch.int64)


@cache
def common_words() -> Int[Tensor, " L"]:
    """The words of the text in small letters, by rank; those beyond the commonest are left out."""
    words = re.findall(r"[a-z]+", bytes(text_bytes().tolist()).decode().lower())
    rank = {word: i for i, (word, _) in enumerate(Counter(words).most_common(WORDS))}
    return torch.tensor([rank[word] for word in words if word in rank])


@cache
def digits() -> tuple[Float[Tensor, "N 8 8"], Int[Tensor, " N"]]:
    """The images, 0 to 1, and what they show."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.images / 16, dtype=torch.float32), torch.tensor(found.target, dtype=torch.int64)


def split(whole: Tensor, test: bool) -> Tensor:
    """The last tenth for testing, what stands before it for training."""
    border = len(whole) * 9 // 10
    return whole[border:] if test else whole[:border]


TASKS: dict[str, type[Task]] = {
    "text": Text,
    "digits": Digits,
    "copy": Copy,
    "recall": Recall,
    "recall of two": RecallOfTwo,
}
