"""A trained Llama of 264,128 numbers (stories260K, in the file format of llama2.c) around ``MultiHeadAttention``.

Its publisher prints the 200 tokens that it writes when it always takes the likeliest one, so whatever is done with
caches, padding and packing has a right answer that nobody here computed.
"""

import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise import Causal, KVCache, MultiHeadAttention, RotaryEmbedding

DATA = Path(__file__).parents[2] / "shared" / "data"
FILES = {name: DATA / name for name in ("stories260K.bin", "tok512.bin", "stories260K_200.txt")}
BOS = 1


def needs_the_files():
    """Skip where the weights, which are no part of this project, do not lie beside the checkout."""
    missing = [name for name, path in FILES.items() if not path.exists()]
    if missing:
        pytest.skip(f"{', '.join(missing)} are not in ../shared/data beside this checkout")


class Block(nn.Module):
    """Attention and a gated feed-forward, each after a norm and added to what came in."""

    def __init__(self, dim: int, hidden: int, heads: int, kv_heads: int, **how) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=1e-5)
        rotary = RotaryEmbedding(dim // heads, interleaved=True)
        self.attention = MultiHeadAttention(dim, heads, num_kv_heads=kv_heads, bias=False, rotary=rotary, **how)
        self.feed_norm = nn.RMSNorm(dim, eps=1e-5)
        self.w1, self.w3 = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, cache: KVCache | None, **how) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cache=cache, **how)
        y = self.feed_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Stories(nn.Module):
    """The model. ``mask`` is that of every layer; keywords of a call go to every attention."""

    def __init__(self, mask=Causal()) -> None:  # noqa: B008 (a frozen value)
        super().__init__()
        data = FILES["stories260K.bin"].read_bytes()
        dim, hidden, layers, heads, kv_heads, words, length = struct.unpack_from("7i", data)
        numbers = torch.frombuffer(bytearray(data[28:]), dtype=torch.float32)
        at, size = 0, dim // heads

        def take(*shape: int) -> Tensor:
            nonlocal at
            count = torch.Size(shape).numel()
            at += count
            return numbers[at - count : at].view(shape)

        self.embedding = nn.Embedding(words, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden, heads, kv_heads, mask=mask) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        order = {
            "attention_norm.weight": (dim,),
            "attention.q_proj.weight": (dim, dim),
            "attention.k_proj.weight": (kv_heads * size, dim),
            "attention.v_proj.weight": (kv_heads * size, dim),
            "attention.out_proj.weight": (dim, dim),
            "feed_norm.weight": (dim,),
            "w1.weight": (hidden, dim),
            "w2.weight": (dim, hidden),
            "w3.weight": (hidden, dim),
        }
        state = {"embedding.weight": take(words, dim)}
        for name, shape in order.items():
            state |= {f"blocks.{i}.{name}": part for i, part in enumerate(take(layers, *shape))}
        state["norm.weight"] = take(dim)
        self.load_state_dict(state, strict=True)
        self.tables = take(length, size // 2), take(length, size // 2)  # cosines and sines, as the file has them
        self.unread = len(numbers) - at

    def forward(self, tokens: Tensor, caches: list[KVCache] | None = None, **how) -> Tensor:
        """Scores of the next token after each of ``tokens`` (batch, tokens)."""
        x = self.embedding(tokens)
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, cache, **how)
        return F.linear(self.norm(x), self.embedding.weight)  # which is used twice


def words() -> list[bytes]:
    """The vocabulary: after an int32, a float32 score, an int32 length and as many bytes for each."""
    data, at, found = FILES["tok512.bin"].read_bytes(), 4, []
    while at < len(data):
        (length,) = struct.unpack_from("i", data, at + 4)
        found.append(data[at + 8 : at + 8 + length])
        at += 8 + length
    return found


def text(tokens: list[int]) -> str:
    """What the tokens after BOS say: a byte is written <0x0A>, and the first word loses its space."""
    vocabulary, out = words(), b""
    for token in tokens:
        word = vocabulary[token]
        out += bytes([int(word[3:5], 16)]) if word[:3] == b"<0x" and word[-1:] == b">" else word
    return out.removeprefix(b" ").decode()


def published() -> str:
    """The text of 200 tokens as llama2.c's own test has it."""
    return FILES["stories260K_200.txt"].read_text()
