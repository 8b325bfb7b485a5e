#!/usr/bin/env python3
"""Train the small model that ships with headwise, and say which of its heads do what.

    python scripts/train_demo.py --output src/headwise/demo/model.safetensors

is how the shipped file was made (seed 0, 3,000 steps, torch 2.13.0; 384 seconds in one thread). On fresh random
repeats head 4 of layer 0 then gives the previous token a mean weight of 0.85, and head 7 of layer 1 gives 0.81
to what followed the last time. Another version of torch or another processor may round differently, and other
heads then take the same jobs.

A third of each batch is text. The rest is random: a segment of varying length given again and again. Only
finding its last copy predicts the next byte, so a head of the first layer learns to look at the previous
token, and a head of the second at what followed the last time (an induction head). Were all segments of one
length, looking back a fixed distance would do.

Reference: Olsson et al., In-context Learning and Induction Heads, 2022. https://arxiv.org/abs/2209.11895
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from headwise import attention_weights
from headwise.demo.model import WEIGHTS, DemoModel, load

TEXT = Path(__file__).with_name("demo_text.txt")
LENGTH = 128
TEXT_ROWS, REPEAT_ROWS = 8, 16
UNPREDICTABLE = -100  # the target that cross_entropy leaves out


def text_rows(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Spans of the text, each from a random place."""
    starts = torch.randint(len(text) - length + 1, (count, 1), generator=generator)
    return text[starts + torch.arange(length)]


def between(low: int, high: int, generator: torch.Generator) -> int:
    """A random number, small ones as often as large ones: uniform in its logarithm."""
    return round(low * (high / low) ** torch.rand((), generator=generator).item())


def repeat_row(text: Tensor, length: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """A segment again and again, and its length: a span of the text, or random bytes that all differ.

    Bytes that came twice in a segment would teach heads to compare longer contexts than one token.
    """
    size = between(3, length // 2, generator)
    if torch.rand((), generator=generator) < 0.125:
        segment = text_rows(text, 1, size, generator)[0]
    else:
        segment = torch.randperm(256, generator=generator)[:size]
    return segment.repeat(-(-length // size))[:length], size


def make_batch(text: Tensor, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs and targets: rows of text, then repeated segments, whose first copy is not asked for."""
    whole = text_rows(text, TEXT_ROWS, length + 1, generator)
    inputs, targets = [whole[:, :-1]], [whole[:, 1:]]
    for _ in range(REPEAT_ROWS):
        row, size = repeat_row(text, length + 1, generator)
        target = row[1:].clone()
        target[: size - 1] = UNPREDICTABLE
        inputs.append(row[None, :-1])
        targets.append(target[None])
    return torch.cat(inputs), torch.cat(targets)


@torch.no_grad()
def prefer_near(model: DemoModel) -> None:
    """Let the first layer start with scores that fall with distance, each head in a way of its own.

    From equal scores the heads take thousands of steps to find that the previous token matters.
    """
    attention = model.layers[0].attention
    torch.nn.init.normal_(attention.q_proj.bias, std=2.0)
    attention.k_proj.bias.copy_(attention.q_proj.bias)  # a rotated copy is most like itself at distance 0


@torch.no_grad()
def head_scores(model: DemoModel, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Mean weight of each layer and head on the previous token, and on what followed the last time.

    Measured on fresh segments of random bytes given twice; the bytes of a segment differ, so that "the last
    time" is one place.
    """
    rows, size = 16, 61
    segments = torch.stack([torch.randperm(256, generator=generator)[:size] for _ in range(rows)])
    seen: list[Tensor] = []
    for layer in model.layers:
        layer.attention.observer = lambda x, out, lse: seen.append(attention_weights(x.query, x.key, mask=x.mask))
    model(segments.repeat(1, 2))
    for layer in model.layers:
        layer.attention.observer = None
    weights_LBHTS = torch.stack(seen)
    previous_LBHT = weights_LBHTS.diagonal(-1, -2, -1)
    # the first of this diagonal belongs to the end of the first copy, where nothing came before
    followed_LBHT = weights_LBHTS.diagonal(1 - size, -2, -1)[..., 1:]
    return previous_LBHT.mean((1, 3)), followed_LBHT.mean((1, 3))


def best(scores: Tensor) -> str:
    """The highest score, and whose it is."""
    layer, head = divmod(int(scores.argmax()), scores.shape[1])
    return f"{scores.max():.3f} (layer {layer}, head {head})"


def train(model: DemoModel, text: Tensor, steps: int, generator: torch.Generator, say: Callable[[str], None]) -> None:
    """Adam with a short warm-up and a cosine decay."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.98), weight_decay=0.01)
    warm_up = max(1, min(100, steps // 4))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm_up, 0.525 + 0.475 * math.cos(math.pi * step / steps)),
    )
    started = time.perf_counter()
    probe = torch.Generator()
    for step in range(1, steps + 1):
        length = LENGTH // 2 if step <= 0.4 * steps else LENGTH  # what repeats is found sooner in short rows
        inputs, targets = make_batch(text, length, generator)
        logits = model(inputs)
        of_text = F.cross_entropy(logits[:TEXT_ROWS].flatten(0, 1), targets[:TEXT_ROWS].flatten())
        of_repeats = F.cross_entropy(logits[TEXT_ROWS:].flatten(0, 1), targets[TEXT_ROWS:].flatten())
        optimizer.zero_grad()
        (of_text + of_repeats).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step in (1, steps) or step % 100 == 0:
            previous, induction = head_scores(model, probe.manual_seed(1))
            say(
                f"step {step:5}  {time.perf_counter() - started:4.0f} s"
                f"  loss in nats: text {of_text.item():.3f}, repeats {of_repeats.item():.3f}"
                f"  previous token {best(previous)}  induction {best(induction)}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="where to save (default: demo-model.safetensors, here)")
    parser.add_argument("--text", type=Path, default=TEXT, help="a text to train on instead")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="20 steps, by default to a temporary file")
    options = parser.parse_args()
    try:
        from rich.console import Console

        say: Callable[[str], None] = Console(highlight=False, soft_wrap=True).print
    except ImportError:
        say = print

    steps, output = options.steps, options.output or Path("demo-model.safetensors")
    if options.quick:
        steps, output = 20, options.output or Path(tempfile.mkdtemp()) / "demo-model.safetensors"
        if output.resolve() == WEIGHTS.resolve():
            parser.error("--quick does not overwrite the model that ships; give another --output")
    if steps < 1:
        parser.error(f"--steps {steps} trains nothing; give at least 1")
    try:
        text = torch.tensor(list(options.text.read_bytes()), dtype=torch.int64)
    except OSError as error:
        parser.error(f"{options.text} cannot be read: {error.strerror}")
    if len(text) <= LENGTH:
        parser.error(f"{options.text} has {len(text)} bytes; a text needs at least {LENGTH + 1}")

    # sums in the same order on any machine, and hardly slower for a model as small as this
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    model = DemoModel(max_length=LENGTH)
    prefer_near(model)
    parameters = sum(p.numel() for p in model.parameters())
    say(f"{parameters:,} parameters, {len(text):,} bytes of text, {steps} steps")
    train(model, text, steps, generator, say)

    from safetensors.torch import save_file

    told = {"text": options.text.name, "seed": str(options.seed), "steps": str(steps)}
    save_file(model.state_dict(), output, {"config": json.dumps(model.config), **told})
    say(f"saved {output}: {output.stat().st_size:,} bytes")
    for name, scores in zip(("previous token", "induction"), head_scores(load(output), generator), strict=True):
        say(f"{name}: {best(scores)}; by layer and head:")
        for row in scores.tolist():
            say("   " + " ".join(f"{score:.2f}" for score in row))


if __name__ == "__main__":
    main()
