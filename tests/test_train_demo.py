"""The script that trained the model that ships."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headwise.demo import encode, load
from headwise.demo.model import WEIGHTS

SCRIPT = Path(__file__).parent.parent / "scripts" / "train_demo.py"


def run(folder, *options):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], cwd=folder, capture_output=True, text=True, check=False
    )


def test_a_quick_training_lowers_the_loss_and_saves_a_model(tmp_path):
    shipped = WEIGHTS.stat()
    done = run(tmp_path, "--quick", "--output", "small.safetensors")
    assert done.returncode == 0, done.stderr
    text = [float(x) for x in re.findall(r"text (\d+\.\d+)", done.stdout)]
    repeats = [float(x) for x in re.findall(r"repeats (\d+\.\d+)", done.stdout)]
    assert text[-1] < text[0] - 1
    assert repeats[-1] < repeats[0]
    assert re.search(r"previous token: 0\.\d+ \(layer \d, head \d\)", done.stdout)
    assert re.search(r"induction: 0\.\d+ \(layer \d, head \d\)", done.stdout)
    logits = load(tmp_path / "small.safetensors")(encode("the whale")[None])
    assert logits.shape == (1, 9, 256)
    assert torch.isfinite(logits).all()
    assert (WEIGHTS.stat().st_mtime_ns, WEIGHTS.stat().st_size) == (shipped.st_mtime_ns, shipped.st_size)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--quick", "--output", str(WEIGHTS)], "--quick does not overwrite the model that ships"),
        (["--quick", "--text", "short.txt"], "short.txt has 128 bytes; a text needs at least 129"),
        (["--steps", "0"], "--steps"),
        (["--text", "absent.txt"], "absent.txt"),
    ],
)
def test_what_it_refuses(tmp_path, options, reason):
    (tmp_path / "short.txt").write_bytes(b"x" * 128)
    shipped = WEIGHTS.read_bytes()
    done = run(tmp_path, *options)
    assert done.returncode == 2
    assert reason in done.stderr.replace("\n", " ")
    assert WEIGHTS.read_bytes() == shipped
