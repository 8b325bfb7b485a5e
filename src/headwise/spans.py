"""Spans: the keys that each query row may see, as runs.

Nearly every mask in use lets a query see a few contiguous runs of keys. While one affine run says it all (full,
causal, window, lengths and their intersections) a ``Spans`` is six numbers, or some of them a number per row of the
batch; otherwise it is a tensor of (start, stop) pairs, O(T) where a dense mask is O(T·S). The idea of intervals
instead of a dense mask is that of FlashMask (Wang et al., 2024, https://arxiv.org/abs/2410.01359), here per query
rather than per key.

Rows count the queries of a call from 0, slots its keys from 0. A slot is an index less the index of the first key.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int, Int32
from torch import Tensor

Number = int | Int[Tensor, " B"]


@dataclass(frozen=True, eq=False)
class Spans:
    """Key runs per query row.

    Without ``runs``, row t sees the slots ``max(first, t + left) <= s < min(last, t + right)``; a ``left`` or
    ``right`` of None sets no bound. Each of the four may be a tensor with a number per row of the batch. With ``runs``
    those say it, and the four numbers are unused.

    Args:
        rows: Number of queries T.
        slots: Number of keys S.
        first: No row sees a slot before this one.
        last: No row sees this slot or a later one; None means ``slots``.
        left: Lower bound that moves with the row.
        right: Upper bound, exclusive, that moves with the row.
        runs: Start and stop of each run, ascending and disjoint in the R dimension, empty ones last.

    Example:
        >>> spans = (Causal() & Window(2)).spans(Positions(3), Positions(3))
        >>> spans.is_numbers, spans.tensor()[0, 0, :, 0].tolist(), int(spans.work())
        (True, [[0, 1], [0, 2], [1, 3]], 5)
    """

    rows: int
    slots: int
    first: Number = 0
    last: Number | None = None
    left: Number | None = None
    right: Number | None = None
    runs: Int32[Tensor, "#B #H T R 2"] | None = None

    @property
    def is_numbers(self) -> bool:
        """Whether the spans are numbers, the same for the whole batch, so that reading them needs no tensor."""
        return self.runs is None and not any(isinstance(v, Tensor) for v in self._bounds())

    @property
    def is_full(self) -> bool:
        """Whether every row is known to see every slot, without looking into a tensor."""
        first, last, left, right = self._bounds()
        return (
            self.is_numbers
            and surely(first <= 0)
            and (last is None or surely(last >= self.slots))
            and (left is None or surely(left + self.rows - 1 <= 0))
            and (right is None or surely(right >= self.slots))
        )

    @property
    def reaches_all(self) -> bool:
        """Whether every row is known to see something. Numbers only; the rows that do are neighbours."""
        ends = (0,) if self.rows == 1 else (0, self.rows - 1)
        return all(_sees(self, row) for row in ends) if self.rows else True

    def reach(self) -> tuple[int, int]:
        """First slot that any row may see, and the one after the last. Numbers only; (0, 0) when there is none."""
        first, last, left, right = self._bounds()
        start = max(0, first, 0 if left is None else left)
        stop = self.slots if last is None else min(self.slots, last)
        if right is not None:
            stop = min(stop, self.rows - 1 + right)
        never = left is not None and right is not None and right <= left
        return (0, 0) if never or stop <= start or self.rows == 0 else (start, stop)

    def tensor(self, device: torch.device | str = "cpu") -> Int32[Tensor, "#B #H T R 2"]:
        """The runs as a tensor, clamped to the slots; an empty run has start == stop."""
        if self.runs is not None:
            return self.runs.to(device)
        first, last, left, right = (_column(v, device) for v in self._bounds())
        row = torch.arange(self.rows, device=device)[None, None, :, None]
        start = row * 0 + first if left is None else (row + left).clamp(min=first)
        last = self.slots if last is None else last
        stop = row * 0 + last if right is None else (row + right).clamp(max=last)
        return make_runs(start, stop, self.slots)

    def rolled(self, ring: Number) -> "Spans":
        """The same slots where they lie in a ring: slot s at (s + ring) modulo the number of slots."""
        if (isinstance(ring, int) and ring == 0) or self.is_full:
            return self
        ring = ring % max(1, self.slots)
        runs = self.tensor(ring.device if isinstance(ring, Tensor) else self.device)
        moved = runs + (ring[:, None, None, None, None] if isinstance(ring, Tensor) else ring)
        # what is pushed out at the end comes in at the beginning; one run at most does both
        moved = torch.cat([moved, moved - self.slots], -2)
        runs = make_runs(moved[..., 0], moved[..., 1], self.slots)[..., : runs.shape[-2] + 1, :]
        return Spans(self.rows, self.slots, runs=runs)

    @property
    def device(self) -> torch.device:
        """Where the tensors are; the CPU when there are none."""
        tensors = (self.runs, *self._bounds())
        return next((t.device for t in tensors if isinstance(t, Tensor)), torch.device("cpu"))

    def _bounds(self) -> tuple[Any, ...]:
        return self.first, self.last, self.left, self.right

    def work(self) -> Int[Tensor, "#B #H"]:
        """Number of (query, key) pairs that may attend: the useful work of the call."""
        runs = self.tensor(self.device).long()
        return (runs[..., 1] - runs[..., 0]).sum((-1, -2))

    def __and__(self, other: "Spans") -> "Spans":
        if self.runs is None and other.runs is None:
            return Spans(
                self.rows,
                self.slots,
                first=_higher(self.first, other.first),
                last=_lower(self.last, other.last),
                left=_higher(self.left, other.left),
                right=_lower(self.right, other.right),
            )
        a, b = _together(self, other)
        # every pair of runs meets in one run, possibly empty; at most R1 + R2 - 1 of the meetings are not
        start = torch.maximum(a[..., :, None, 0], b[..., None, :, 0]).flatten(-2)
        stop = torch.minimum(a[..., :, None, 1], b[..., None, :, 1]).flatten(-2)
        runs = make_runs(start, stop, self.slots)
        return Spans(self.rows, self.slots, runs=runs[..., : a.shape[-2] + b.shape[-2] - 1, :])

    def __invert__(self) -> "Spans":
        runs = self.tensor(self.device)
        # empty runs sit at the end as (S, S), so the gaps between neighbours are the complement
        edge = torch.zeros_like(runs[..., :1, 0])
        start = torch.cat([edge, runs[..., 1]], -1)
        stop = torch.cat([runs[..., 0], edge + self.slots], -1)
        return Spans(self.rows, self.slots, runs=make_runs(start, stop, self.slots))

    def __or__(self, other: "Spans") -> "Spans":
        a, b = _together(self, other)
        runs = make_runs(torch.cat([a[..., 0], b[..., 0]], -1), torch.cat([a[..., 1], b[..., 1]], -1), self.slots)
        start, reached = runs[..., 0], runs[..., 1].cummax(-1).values
        # a run that starts beyond all that came before opens a group; the last of a group knows how far it reached
        opens = torch.ones_like(start, dtype=torch.bool)
        opens[..., 1:] = start[..., 1:] > reached[..., :-1]
        closes = torch.ones_like(opens)
        closes[..., :-1] = opens[..., 1:]
        group_start = torch.where(opens, start, -1).cummax(-1).values
        return Spans(self.rows, self.slots, runs=make_runs(group_start, torch.where(closes, reached, 0), self.slots))


def make_runs(
    start: Int[Tensor, "*#batch R"], stop: Int[Tensor, "*#batch R"], slots: int
) -> Int32[Tensor, "*batch R 2"]:
    """Clamp runs to the slots, make empty ones (slots, slots), and sort them by start."""
    start, stop = torch.broadcast_tensors(start.clamp(0, slots), stop.clamp(0, slots))
    empty = stop <= start
    start, stop = torch.where(empty, slots, start), torch.where(empty, slots, stop)
    if start.shape[-1] > 1:
        start, order = start.sort(dim=-1, stable=True)
        stop = stop.gather(-1, order)
    return torch.stack([start, stop], -1).int()


def stack_heads(spans: list[Spans]) -> Spans:
    """Spans of several heads as one, each run list padded with empty runs to the longest."""
    device = next((s.device for s in spans if not s.is_numbers), torch.device("cpu"))
    tensors = [s.tensor(device) for s in spans]
    (batch,), longest = torch.broadcast_shapes(*(t.shape[:1] for t in tensors)), max(t.shape[-2] for t in tensors)
    rows, slots = spans[0].rows, spans[0].slots
    runs = torch.full((batch, len(spans), rows, longest, 2), slots, dtype=torch.int32, device=device)
    for head, tensor in enumerate(tensors):
        runs[:, head, :, : tensor.shape[-2]] = tensor[:, 0]
    return Spans(rows, slots, runs=runs)


def surely(condition: Any) -> bool:
    """Whether a comparison of sizes holds; in a compiler, whether it is known to hold at all of them.

    A compiler that is asked makes a graph for each answer, and an exported file is one graph.
    """
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes a second to import

    return statically_known_true(condition)


def _sees(spans: Spans, row: int) -> bool:
    first, last, left, right = spans._bounds()
    lowest = (0, first) if left is None else (0, first, row + left)
    highest = [spans.slots, *(() if last is None else (last,)), *(() if right is None else (row + right,))]
    # one by one: of the largest and the smallest a compiler knows less
    return all(surely(low < high) for low in lowest for high in highest)


def _higher(a: Any, b: Any) -> Any:
    """The tighter of two lower bounds, None for no bound."""
    if a is None or b is None:
        return b if a is None else a
    return torch.maximum(*_like(a, b)) if isinstance(a, Tensor) or isinstance(b, Tensor) else max(a, b)


def _lower(a: Any, b: Any) -> Any:
    """The tighter of two upper bounds, None for no bound."""
    if a is None or b is None:
        return b if a is None else a
    return torch.minimum(*_like(a, b)) if isinstance(a, Tensor) or isinstance(b, Tensor) else min(a, b)


def _like(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    device = a.device if isinstance(a, Tensor) else b.device
    a, b = (torch.as_tensor(v, dtype=torch.int64, device=device) for v in (a, b))
    return a, b


def _column(value: Any, device: torch.device | str) -> Any:
    return value.to(device, torch.int64)[:, None, None, None] if isinstance(value, Tensor) else value


def _together(a: Spans, b: Spans) -> tuple[Tensor, Tensor]:
    device = b.device if a.is_numbers else a.device
    a_runs, b_runs = a.tensor(device), b.tensor(device)
    lead = torch.broadcast_shapes(a_runs.shape[:3], b_runs.shape[:3])
    return a_runs.expand(*lead, *a_runs.shape[3:]), b_runs.expand(*lead, *b_runs.shape[3:])
