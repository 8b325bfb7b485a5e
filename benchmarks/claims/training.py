"""Training: the kinds of attention on the tasks, with equal parameters, equal steps and equal data.

A model is the task's embedding, the encoder of examples/transformer.py with the kind of attention in it, and the
task's readout. One seed gives every kind the same examples in the same order.
"""

import math
from collections.abc import Callable, Mapping
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.transformer import Encoder

from .tasks import TASKS, Digits, Task
from .units import Record, Unit
from .variants import VARIANTS

WIDTH, HIDDEN = 64, 128
RATE, WARM_UP = 4e-3, 50  # of AdamW; after the warm-up it falls to 0 along a cosine
ANSWERS, MOST = 8192, 1024  # so many are asked for in a test, from so many examples at most
LENGTHS = (8, 16, 32)
SHORT = ("8 heads", "feed-forward")  # what is compared where order is left out
# layers, examples a step, steps, seeds
PLAN = {
    "text": (2, 16, 600, 3),
    "digits": (2, 32, 400, 5),
    "copy": (2, 16, 600, 3),
    "recall": (1, 32, 800, 3),
    "recall of two": (1, 32, 800, 3),
}


def units(quick: bool) -> list[Unit]:
    """Every kind on every task, seed by seed, so that a run that is stopped has whole comparisons."""
    found = []
    for seed in range(1 if quick else max(seeds for *_, seeds in PLAN.values())):
        for task, (layers, rows, steps, seeds) in PLAN.items():
            if seed >= seeds:
                continue
            shared = {"seed": seed, "layers": layers, "rows": rows, "steps": 2 if quick else steps}
            shared |= {"answers": 2 if quick else ANSWERS}
            for variant in VARIANTS:
                given = {"task": task, "variant": variant, **shared}
                found.append(Unit(f"training/{task}/{variant}/seed {seed}", f"{__name__}:train", given))
        for length in LENGTHS:
            for places in (True, False):
                for variant in SHORT:
                    if places and length == 16:  # these are trained already
                        continue
                    layers, rows, steps, _ = PLAN["digits"]
                    given = {"length": length, "places": places, "variant": variant, "seed": seed}
                    given |= {"layers": layers, "rows": rows, "steps": 2 if quick else steps}
                    given |= {"answers": 2 if quick else ANSWERS}
                    name = f"order/{length} patches/{'with' if places else 'without'} places/{variant}/seed {seed}"
                    found.append(Unit(name, f"{__name__}:train_on_patches", given))
    return found


def train(task: str, variant: str, seed: int, layers: int, rows: int, steps: int, answers: int) -> dict[str, Any]:
    """One kind of attention on one task, tested at every length of the task."""
    return fit(TASKS[task](seed), variant, seed, layers, rows, steps, answers)


def train_on_patches(
    length: int, places: bool, variant: str, seed: int, layers: int, rows: int, steps: int, answers: int
) -> dict[str, Any]:
    """Digits as 8, 16 or 32 patches, with their places or as a bag."""
    return fit(Digits(seed, places, length), variant, seed, layers, rows, steps, answers)


class Model(nn.Module):
    """Embedding, encoder, readout."""

    def __init__(self, task: Task, attention: Callable[[int], nn.Module], layers: int) -> None:
        super().__init__()
        self.embedding, self.readout = task.embedding(WIDTH), task.readout(WIDTH)
        options = {"hidden_dim": HIDDEN, "activation": F.gelu, "norm_first": True}
        # the number of heads is part of the kind of attention
        self.encoder = Encoder(WIDTH, 1, layers, attention=lambda width, _: attention(width), **options)
        self.mask = task.mask

    def forward(self, inputs: Tensor) -> Tensor:
        return self.readout(self.encoder(self.embedding(inputs), mask=self.mask))


def fit(task: Task, variant: str, seed: int, layers: int, rows: int, steps: int, answers: int) -> dict[str, Any]:
    """Train a model from its seed and test it.

    Returns:
        The mean loss of the last 20 steps in bits, the parameters of attention, and for each tested length the share
        of right answers, the bits that an answer costs, and how many were asked for.
    """
    torch.manual_seed(seed)
    model = Model(task, VARIANTS[variant], layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98))
    draw = torch.Generator().manual_seed(1_000 + seed)
    low, high = task.trained
    losses = []
    for step in range(steps):
        rate = min((step + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = RATE * rate
        length = low + int(torch.randint(high - low + 1, (), generator=draw))
        batch = task.batch(rows, length, draw, test=False)
        loss = F.cross_entropy(model(batch.inputs), batch.targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item() / math.log(2))
    attention = [layer.self_attention for layer in model.encoder.layers]
    return {
        "loss": round(mean(losses[-20:]), 4),
        "parameters": sum(p.numel() for part in attention for p in part.parameters()),
        "tests": {str(length): test(task, model, length, answers) for length in task.tested},
    }


@torch.no_grad()
def test(task: Task, model: nn.Module, length: int, answers: int) -> dict[str, float]:
    """Ask a trained model what it has not seen, the same for every kind of attention, until it gave enough answers."""
    model.eval()
    draw = torch.Generator().manual_seed(length)
    right, bits, asked, examples = 0, 0.0, 0, 0
    while asked < answers and examples < MOST:
        batch = task.batch(min(16, answers), length, draw, test=True)
        scores = model(batch.inputs)
        right += int((scores.argmax(1) == batch.targets).sum())
        bits += F.cross_entropy(scores, batch.targets, reduction="sum").item() / math.log(2)
        asked, examples = asked + len(batch.targets), examples + len(batch.inputs)
        if isinstance(task, Digits):  # all that are kept for testing are one batch
            break
    return {"right": round(right / asked, 4), "bits": round(bits / asked, 4), "asked": asked}


# ---- what the results say ----


def values(records: Mapping[str, Record], task: str, variant: str, length: int | None = None) -> list[float]:
    """How well a kind does on a task, by seed: bits for the text, else the share of right answers.

    ``length`` is one of the task's; None means all that lie within those of training.
    """
    found = []
    for seed in range(PLAN[task][-1]):
        record = records.get(f"training/{task}/{variant}/seed {seed}")
        if record is not None:  # a quick run has the first seed alone
            tests = record["result"]["tests"]
            lengths = [str(length)] if length else [n for n in tests if int(n) <= TASKS[task].trained[1]]
            found.append(mean(tests[n]["bits" if task == "text" else "right"] for n in lengths))
    return found


def on_patches(records: Mapping[str, Record], length: int, places: bool, variant: str) -> list[float]:
    """The share of digits that are recognised from so many patches, by seed."""
    if places and length == 16:
        return values(records, "digits", variant)
    start = f"order/{length} patches/{'with' if places else 'without'} places/{variant}/"
    return [r["result"]["tests"][str(length)]["right"] for name, r in records.items() if name.startswith(start)]


def better(records: Mapping[str, Record], task: str, ours: str, other: str, length: int | None = None) -> int:
    """1 where ours is better with every seed, -1 where it is worse with every seed, else 0."""
    sign = -1 if task == "text" else 1
    pairs = zip(values(records, task, ours, length), values(records, task, other, length), strict=True)
    gains = [sign * (a - b) for a, b in pairs]
    return (min(gains) > 0) - (max(gains) < 0)


def percent(share: float) -> str:
    """A share as text."""
    return f"{100 * share:.1f} %"
