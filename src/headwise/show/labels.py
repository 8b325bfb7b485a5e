"""Labels: names of tokens that are safe and legible wherever they are shown."""

_SHOWN = {"\n": "⏎", "\r": "␍", "\t": "⇥", " ": "␣"}


def printable(piece: str) -> str:
    r"""A token's text as one visible line: control characters can neither move the cursor nor break a table.

    Args:
        piece: The text of a token.

    Returns:
        The same with white space and unprintable characters made visible.

    Example:
        >>> from headwise.show.labels import printable
        >>> printable(" a\x1b[2J")
        '␣a\\x1b[2J'
    """
    if not piece:
        return "∅"
    return "".join(
        _SHOWN[c] if c in _SHOWN else c if c.isprintable() else c.encode("unicode_escape").decode() for c in piece
    )
