"""Look: run a trained model on a text and gather what each of its heads does.

Three kinds of model: the small one that ships with headwise, MiniLM (a trained BERT, fetched by name), and a folder
that transformers can load.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwise.attention import MultiHeadAttention
from headwise.errors import AttentionError, ConversionError
from headwise.inspection import HeadStatistics, head_statistics, record, strongest_pairs

SENTENCE = "The animal didn't cross the street because it was too tired"
PAIRS = 2


@dataclass(frozen=True, eq=False)
class Layer:
    """The heads of one layer: their weights, statistics and strongest pairs."""

    name: str
    weights: Float[Tensor, "H T T"]
    statistics: HeadStatistics
    pairs: list[list[tuple[int, int, float]]]

    def kinds(self) -> list[str]:
        """A word for what each head mostly does."""
        return [self.statistics.kind(head) for head in range(len(self.pairs))]


@dataclass(frozen=True, eq=False)
class Look:
    """What a model's heads do on a text.

    Args:
        model: Name of the model.
        tokens: Text of each token.
        layers: The layers, first to last.
        against: What the model's output was compared with.
        difference: Largest difference of an output number from that.
        remark: What a reader should know, such as that the text was cut; empty for nothing.
    """

    model: str
    tokens: list[str]
    layers: list[Layer]
    against: str
    difference: float
    remark: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Everything but the weights, ready for JSON."""
        return {
            "model": self.model,
            "tokens": self.tokens,
            "compared_with": self.against,
            "difference": self.difference,
            "remark": self.remark,
            "layers": [
                {
                    "name": layer.name,
                    "heads": [
                        {
                            "mostly": kind,
                            **layer.statistics.head(head),
                            "strongest_pairs": [{"from": q, "to": k, "weight": w} for q, k, w in layer.pairs[head]],
                        }
                        for head, kind in enumerate(layer.kinds())
                    ],
                }
                for layer in self.layers
            ],
        }


@dataclass(frozen=True, eq=False)
class Tokens:
    """A text as a model reads it."""

    ids: Int[Tensor, "1 T"]
    pieces: list[str]
    special: list[bool] = field(default_factory=list)
    remark: str = ""


def look_embedded(text: str) -> Look:
    """Look at the small model that ships with headwise."""
    from headwise import demo

    model = demo.load()
    ids = demo.encode(text)
    if ids.numel() == 0:
        raise AttentionError("The text is empty, and the embedded model reads bytes; give at least one character.")
    remark = ""
    if ids.shape[-1] > model.max_length:
        remark = f"The text has {ids.shape[-1]} bytes; the first {model.max_length} are shown."
        ids = ids[..., : model.max_length]
    tokens = Tokens(ids.reshape(1, -1), demo.pieces(ids.flatten()), [False] * ids.numel(), remark)
    attentions = [m for m in model.modules() if isinstance(m, MultiHeadAttention)]

    def stock(ids: Tensor) -> Tensor:
        chosen = [attention.backend for attention in attentions]
        for attention in attentions:
            attention.backend = "reference"
        out = model(ids)
        for attention, backend in zip(attentions, chosen, strict=True):
            attention.backend = backend
        return out

    return _gather("the embedded model", model, tokens, model, stock, "the reference backend")


def look_minilm(text: str) -> Look:
    """Look at MiniLM, a trained BERT; at the embedded model where MiniLM cannot be had, with the reason as remark."""
    from headwise.demo import minilm

    try:
        return look_folder(minilm.fetch(), text, "MiniLM (a trained BERT)")
    except ConversionError as error:
        found = look_embedded(text)
        reason = str(error).rstrip(".")
        remark = f"MiniLM cannot be shown: {reason}. Here is the embedded model instead. {found.remark}"
        return replace(found, remark=remark.strip())


def look_folder(folder: Path, text: str, name: str = "") -> Look:
    """Look at a model in a folder that transformers can load; raises ConversionError where it cannot."""
    from headwise.convert import huggingface
    from headwise.demo import minilm

    huggingface.register()
    model, tokenizer = minilm.load(folder, attn_implementation="headwise")
    longest = getattr(model.config, "max_position_embeddings", 512)
    padding = getattr(getattr(model, "embeddings", None), "padding_idx", None)
    if padding is not None:  # RoBERTa counts its tokens from behind the number of padding
        longest -= padding + 1
    tokens = read(tokenizer, text, longest)

    def run(ids: Tensor) -> Tensor:
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state

    def stock(ids: Tensor) -> Tensor:
        model.set_attn_implementation("eager")
        out = run(ids)
        model.set_attn_implementation("headwise")
        return out

    try:
        return _gather(name or str(folder), model, tokens, run, stock, "the stock model")
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        if isinstance(error, AttentionError):
            raise
        said = str(error).split("\n")[0].rstrip(".")
        raise ConversionError(
            f"{type(model).__name__} cannot be looked at with a text alone: {said:.200}. Record it in Python instead, "
            "with headwise.inspection.record."
        ) from error


def read(tokenizer: Any, text: str, longest: int) -> Tokens:
    """Tokenize a text; a piece that the model does not know is named by its source text.

    Args:
        tokenizer: Of the ``tokenizers`` library.
        text: Any text.
        longest: The most tokens that the model takes.

    Returns:
        The tokens.
    """
    tokenizer.no_padding()
    tokenizer.no_truncation()
    full = len(tokenizer.encode(text).ids)
    tokenizer.enable_truncation(longest)
    found = tokenizer.encode(text)
    unknown = {tokenizer.token_to_id(piece) for piece in ("[UNK]", "<unk>")} - {None}
    pieces = [
        text[start:stop] if number in unknown and stop > start else piece
        for number, piece, (start, stop) in zip(found.ids, found.tokens, found.offsets, strict=True)
    ]
    remark = f"The text has {full} tokens; the first {longest} are shown." if full > longest else ""
    return Tokens(torch.tensor([found.ids]), pieces, [bool(s) for s in found.special_tokens_mask], remark)


def _gather(
    name: str,
    model: torch.nn.Module,
    tokens: Tokens,
    run: Callable[[Tensor], Tensor],
    stock: Callable[[Tensor], Tensor],
    against: str,
) -> Look:
    with torch.no_grad():
        with record(model) as calls:
            out = run(tokens.ids)
        difference = float((out - stock(tokens.ids)).abs().max())
    if not calls:
        raise ConversionError(
            f"No attention of {type(model).__name__} ran through headwise, so there is nothing to see."
        )
    special = torch.tensor(tokens.special)
    layers = [
        Layer(
            call.layer,
            call.weights()[0],
            head_statistics(call.inputs, separators=special & (torch.arange(len(special)) > 0), tokens=tokens.ids[0]),
            strongest_pairs(call.inputs, PAIRS, hide=special),
        )
        for call in calls
    ]
    return Look(name, tokens.pieces, layers, against, difference, tokens.remark)
