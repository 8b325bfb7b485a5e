"""A small trained transformer that ships with the package: two layers of eight heads over bytes.

It is large enough to have grown heads with a job (one looks at the previous token, one at what followed the
last time), and small enough to load in milliseconds. ``scripts/train_demo.py`` trained it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.attention import MultiHeadAttention
from headwise.errors import ConversionError, ShapeError
from headwise.masks import Causal
from headwise.rotary import RotaryEmbedding

WEIGHTS = Path(__file__).with_name("model.safetensors")
VOCABULARY = 256  # one token a byte


class Block(nn.Module):
    """One layer: attention, then a feed-forward of each token alone; both read normed tokens and add to them.

    Args:
        embed_dim: Size of a token.
        num_heads: Number of heads.
        hidden: Size inside the feed-forward.
        max_length: Refuse more tokens than this.
        rotary_base: Base of the rotary embedding.
    """

    def __init__(self, embed_dim: int, num_heads: int, hidden: int, max_length: int, rotary_base: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(embed_dim)
        self.attention = MultiHeadAttention(
            embed_dim,
            num_heads,
            rotary=RotaryEmbedding(embed_dim // num_heads, base=rotary_base),
            mask=Causal(),
            max_length=max_length,
        )
        self.feed_forward_norm = nn.LayerNorm(embed_dim)
        self.expand = nn.Linear(embed_dim, hidden)
        self.contract = nn.Linear(hidden, embed_dim)

    def forward(self, tokens: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        """Pass tokens through the layer."""
        tokens = tokens + self.attention(self.attention_norm(tokens))
        return tokens + self.contract(F.gelu(self.expand(self.feed_forward_norm(tokens))))


class DemoModel(nn.Module):
    """A causal transformer over bytes, whose attention is ``MultiHeadAttention`` with rotary embeddings.

    Args:
        num_heads: Heads of each layer.
        embed_dim: Size of a token.
        hidden: Size inside each feed-forward.
        max_length: Most bytes that it takes: as many as it was trained on.
        rotary_bases: Base of the rotary embeddings of each layer. A low one in the first, so that all six pairs
            of a head turn within so few bytes and tell near from nearer; a high one in the second, so that most
            pairs hardly turn and tokens are found however far they are.

    Attributes:
        layers: The layers; ``layers[i].attention`` is the attention of layer i.

    Example:
        >>> from headwise.demo.model import DemoModel
        >>> DemoModel()(torch.tensor([[72, 105, 33]])).shape
        torch.Size([1, 3, 256])

    Reference: Elhage et al., A Mathematical Framework for Transformer Circuits, 2021, on why induction heads
    need two layers. https://transformer-circuits.pub/2021/framework/
    """

    def __init__(
        self,
        num_heads: int = 8,
        embed_dim: int = 96,
        hidden: int = 128,
        max_length: int = 128,
        rotary_bases: Sequence[float] = (100.0, 1e6),
    ) -> None:
        super().__init__()
        self.config = {
            "num_heads": num_heads,
            "embed_dim": embed_dim,
            "hidden": hidden,
            "max_length": max_length,
            "rotary_bases": list(rotary_bases),
        }
        self.max_length = max_length
        self.embedding = nn.Embedding(VOCABULARY, embed_dim)
        self.layers = nn.ModuleList(Block(embed_dim, num_heads, hidden, max_length, base) for base in rotary_bases)
        self.norm = nn.LayerNorm(embed_dim)
        self.unembedding = nn.Linear(embed_dim, VOCABULARY, bias=False)

    def forward(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T 256"]:
        """Score every byte as the one that follows.

        Args:
            ids: Bytes, as ``encode`` gives them.

        Returns:
            A logit for each of the 256 bytes after each byte of the input.

        Raises:
            ShapeError: When there are more than ``max_length`` bytes.
        """
        if ids.shape[-1] > self.max_length:
            raise ShapeError(
                f"The text has {ids.shape[-1]} bytes, but the embedded model takes at most "
                f"{self.max_length}. Give a shorter one."
            )
        tokens = self.embedding(ids)
        for layer in self.layers:
            tokens = layer(tokens)
        return self.unembedding(self.norm(tokens))


def load(path: Path = WEIGHTS) -> DemoModel:
    """The trained model, in eval mode and float32.

    Args:
        path: A file that ``scripts/train_demo.py`` saved; by default the one that ships with the package.

    Returns:
        The model. Neither the network nor torch's random stream is touched.

    Raises:
        ConversionError: When safetensors is not installed or the file is not such a model.

    Example:
        >>> from headwise.demo.model import load
        >>> model = load()
        >>> len(model.layers), model.layers[1].attention.num_heads
        (2, 8)
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ConversionError(
            "The embedded model is stored by safetensors, which is missing. Run pip install 'headwise[cli]'."
        ) from error
    try:
        with safe_open(path, "pt") as file:
            config: dict[str, Any] = json.loads((file.metadata() or {})["config"])
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        with torch.device("meta"):  # no random initialisation, which would move torch's random stream
            model = DemoModel(**config)
        model.load_state_dict(state, assign=True)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConversionError(
            f"{path} is no model of scripts/train_demo.py: {type(error).__name__}: {error}. Train it again."
        ) from error
    return model.eval()


def encode(text: str) -> Int[Tensor, " T"]:
    """The UTF-8 bytes of a text.

    Args:
        text: Any text. A byte of the command line that is no UTF-8, which Python keeps as half of a surrogate
            pair, is that byte again.

    Returns:
        One number from 0 to 255 a byte, as int64.

    Raises:
        ShapeError: When the text holds another half of a surrogate pair.

    Example:
        >>> from headwise.demo.model import encode
        >>> encode("né")
        tensor([110, 195, 169])
    """
    try:
        return torch.tensor(list(text.encode("utf-8", "surrogateescape")), dtype=torch.int64)
    except UnicodeEncodeError as error:
        raise ShapeError(
            f"Character {error.start} of the text is half of a surrogate pair, which has no bytes. Remove it."
        ) from error


def pieces(ids: Int[Tensor, " T"]) -> list[str]:
    r"""What to show for each byte.

    Args:
        ids: Bytes, as ``encode`` gives them.

    Returns:
        As many texts as bytes. A character of several bytes stands at its first, the others are shown in
        hexadecimal, as is what is no UTF-8; a space is shown as ␣, a newline as ``\n``.

    Example:
        >>> from headwise.demo.model import encode, pieces
        >>> pieces(encode("né !"))
        ['n', 'é', '\\xa9', '␣', '!']
    """
    shown = []
    for char in bytes(ids.tolist()).decode("utf-8", "surrogateescape"):
        first, *rest = char.encode("utf-8", "surrogateescape")
        if char == " ":
            shown.append("␣")
        elif "\udc80" <= char <= "\udcff":
            shown.append(f"\\x{first:02x}")
        else:
            shown.append(char if char.isprintable() else char.encode("unicode_escape").decode())
        shown += [f"\\x{byte:02x}" for byte in rest]
    return shown
