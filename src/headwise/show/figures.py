"""Figures: the weights of every head of a model in one picture."""

from collections.abc import Sequence
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from headwise.errors import AttentionError
from headwise.show.labels import printable

LEFT, RIGHT, TOP, BOTTOM = 1.1, 1.0, 0.65, 0.95  # margins in inches
MOST_LABELS = 24  # more names than this beside one picture would be too small to read


def draw_heads(
    weights: Sequence[Float[Tensor, "_ T S"]],
    tokens: Sequence[str],
    path: Path,
    *,
    title: str = "",
    captions: Sequence[Sequence[str]] = (),
) -> list[int]:
    """Draw a grid of pictures, a row per layer and a column per head, and save it.

    A query is a row of its picture, a key a column; the darker, the more weight. The scale is that of the square
    root, so that small weights can be seen.

    Args:
        weights: Weights of each layer.
        tokens: Text of each token.
        path: Where to save; the ending says the format.
        title: What stands above the picture.
        captions: A word for each head of each layer; empty for none.

    Returns:
        Numbers of the tokens that no installed font can write; they are shown by number.

    Raises:
        AttentionError: When matplotlib is not installed, or the file cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import PowerNorm
        from matplotlib.figure import Figure
    except ImportError:
        raise AttentionError("Pictures need matplotlib: pip install 'headwise[plot]'.") from None
    heads = max(layer.shape[0] for layer in weights)
    names = [printable(token) for token in tokens]
    family, unwritable = _fonts("".join([title, *names]))
    labels = [f"#{i}" if set(name) & unwritable else name for i, name in enumerate(names)]
    title = "".join("?" if c in unwritable else c for c in title)

    # text of the user may hold dollars, which are no formulas here
    with matplotlib.rc_context({"text.parse_math": False, "font.family": family}):
        cell = 1.5 if len(tokens) <= MOST_LABELS else 1.9
        wide, high = LEFT + cell * heads + RIGHT, TOP + cell * len(weights) + BOTTOM
        figure = Figure(figsize=(wide, high), dpi=110)
        FigureCanvasAgg(figure)
        axes = figure.subplots(len(weights), heads, squeeze=False)
        # margins in inches: matplotlib's own layout takes seconds for so many pictures
        figure.subplots_adjust(LEFT / wide, BOTTOM / high, 1 - RIGHT / wide, 1 - TOP / high, wspace=0.07, hspace=0.16)
        norm = PowerNorm(0.5, vmin=0.0, vmax=1.0)
        image = None
        for row, layer in enumerate(weights):
            for head in range(heads):
                axis = axes[row][head]
                if head >= layer.shape[0]:
                    axis.set_axis_off()
                    continue
                image = axis.imshow(layer[head].float().cpu().numpy(), cmap="Blues", norm=norm, aspect="auto")
                caption = captions[row][head] if captions else ""
                axis.set_title(f"{row}.{head} {caption}".strip(), fontsize=7, pad=2)
                axis.tick_params(length=1, pad=1)
                named_rows, named_columns = head == 0, row == len(weights) - 1
                _name(axis.set_yticks, labels, named_rows)
                _name(axis.set_xticks, labels, named_columns, rotation=90)
        longest = int(wide * 9)  # letters that fit above the picture
        title = title if len(title) <= longest else title[: longest - 1] + "…"
        figure.suptitle(title, fontsize=11, y=1 - 0.2 / high)
        figure.supxlabel("key: what is looked at", fontsize=9, y=0.1 / high)
        figure.supylabel("query: which token looks", fontsize=9, x=0.1 / wide)
        if image is not None:
            room = figure.add_axes((1 - 0.8 / wide, 0.3, 0.15 / wide, 0.4))
            figure.colorbar(image, cax=room).set_label("weight", fontsize=9)
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:
            raise AttentionError(f"The picture cannot be saved as {path}: {error}. Choose another file.") from error
    return [i for i, name in enumerate(names) if set(name) & unwritable]


def _name(set_ticks, labels: list[str], shown: bool, **style) -> None:  # type: ignore[no-untyped-def]
    """Name each token at a tick; every so many where there are more than fit."""
    if not shown:
        set_ticks([])
        return
    step = -(-len(labels) // MOST_LABELS)
    places = range(0, len(labels), step)
    size = 6 if len(places) <= 16 else 4.5
    cut = [labels[i] if len(labels[i]) <= 14 else labels[i][:13] + "…" for i in places]
    set_ticks(list(places), cut, fontsize=size, **style)


def _fonts(text: str) -> tuple[list[str], set[str]]:
    """Fonts that together write the text, and the characters that none of the installed ones has."""
    from matplotlib import font_manager

    chosen = ["DejaVu Sans"]
    missing = set(text) - _letters(font_manager.findfont("DejaVu Sans"))
    if missing:
        for entry in font_manager.fontManager.ttflist:
            # colour fonts hold pictures, which matplotlib cannot place
            if not missing or "Color" in entry.name or "Emoji" in entry.name or entry.name in chosen:
                continue
            found = missing & _letters(entry.fname)
            if found:
                chosen.append(entry.name)
                missing -= found
    return chosen, missing


def _letters(file: str) -> set[str]:
    from matplotlib import ft2font

    try:
        return {chr(code) for code in ft2font.FT2Font(file).get_charmap()}
    except (RuntimeError, OSError):
        return set()
