"""Tables: what each head does, for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from headwise.errors import AttentionError
from headwise.show.labels import printable

LEGEND = (
    "bits: how evenly a token spreads its attention (0 one token, 3 eight alike); dist: mean distance in tokens. "
    "Shares of attention: on the token itself, the one before (prev), the one after (next), the first (1st), "
    "separators (sep), and on what followed an earlier copy of the token (ind, induction)."
)
SHARES = ("self", "previous", "next", "first", "separator", "induction")


def head_table(
    title: str,
    heads: Sequence[Mapping[str, float]],
    kinds: Sequence[str],
    pairs: Sequence[Sequence[tuple[int, int, float]]],
    tokens: Sequence[str],
) -> Any:
    """A rich table with a row per head.

    Args:
        title: What stands above it.
        heads: Entropy, distance and shares of each head, by name.
        kinds: A word for what each head mostly does.
        pairs: The strongest (query, key, weight) of each head.
        tokens: Text of each token.

    Returns:
        A ``rich.table.Table``.

    Raises:
        AttentionError: When rich is not installed.
    """
    try:
        from rich import box
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        raise AttentionError("Tables need rich: pip install 'headwise[cli]'.") from None
    table = Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("head", justify="right")
    table.add_column("mostly", no_wrap=True)
    for short in ("bits", "dist", "self", "prev", "next", "1st", "sep", "ind"):
        table.add_column(short, justify="right", no_wrap=True)
    table.add_column("strongest pairs", overflow="fold", min_width=18)
    # a name that comes more than once gets the number of its token
    pieces = [printable(token) for token in tokens]
    names = [f"{piece}[{i}]" if pieces.count(piece) > 1 else piece for i, piece in enumerate(pieces)]
    for head, (numbers, kind, found) in enumerate(zip(heads, kinds, pairs, strict=True)):
        cells = [Text(f"{numbers['entropy']:.2f}"), Text(f"{numbers['distance']:.1f}")]
        cells += [Text(_percent(numbers[name]), style="bold" if numbers[name] >= 0.4 else "") for name in SHARES]
        says = "\n".join(f"{names[q]}→{names[k]} {_percent(w)}" for q, k, w in found)
        table.add_row(str(head), kind, *cells, Text(says))
    return table


def _percent(share: float) -> str:
    return "·" if share < 0.005 else f"{share:.0%}"
