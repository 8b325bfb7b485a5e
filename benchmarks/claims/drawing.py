"""What all figures share. Colours are Okabe and Ito's; shapes and lines say the same in grey print."""

from pathlib import Path
from typing import Any

BLUE, SKY, RED, GREEN, PINK, ORANGE = "#0072B2", "#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#E69F00"
BLACK, GREY, GRID = "#000000", "#555555", "#dddddd"


def figure(width: float, height: float) -> Any:
    """An empty figure, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write a figure; an SVG has the same bytes for the same numbers, and looks the same whatever fonts there are."""
    import matplotlib

    # no date, and names of its parts that do not change
    with matplotlib.rc_context({"svg.hashsalt": "headwise", "svg.fonttype": "path"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
