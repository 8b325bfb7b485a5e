"""Masks as text: drawn for people to look at, and parsed from what people type."""

import ast
from dataclasses import fields
from typing import Any

import torch

from headwise.algebra import Mask, evaluate
from headwise.errors import ShapeError
from headwise.masks import Dense, Document
from headwise.positions import Positions, integer


def draw(mask: Mask, queries: int, keys: int | None = None, *, batch: int = 1, heads: int = 1) -> str:
    """Draw a mask as text: a row per query, a column per key, ■ where the query may attend.

    Args:
        mask: The mask to draw.
        queries: Number of queries.
        keys: Number of keys; None means as many. The last query stands with the last key.
        batch: Number of sequences; with more than one, pictures that differ are drawn apart.
        heads: Number of heads, likewise.

    Returns:
        The picture; several, each under its heading, when sequences or heads differ.

    Example:
        >>> print(draw(Causal(), 3))
        ■ · ·
        ■ ■ ·
        ■ ■ ■
    """
    if not isinstance(mask, Mask):
        kind = mask.__name__ if isinstance(mask, type) else type(mask).__name__
        raise ShapeError(
            f"draw was given {kind}, which is no mask; call a class, and wrap a boolean tensor in Dense(tensor)."
        )
    if integer(batch, "batch") < 1 or integer(heads, "heads") < 1:
        raise ShapeError(
            f"There is nothing to draw for a batch of {batch} with {heads} heads; give at least 1 of each."
        )
    keys = integer(queries if keys is None else keys, "The number of keys")
    integer(queries, "The number of queries")
    at_queries, at_keys = Positions(queries, start=keys - queries), Positions(keys)
    seen = evaluate(mask.bind(batch, heads, at_queries, at_keys), batch, heads, at_queries, at_keys)
    pictures: dict[str, str] = {}
    for b in range(seen.shape[0]):
        for h in range(seen.shape[1]):
            title = [f"sequence {b}"] * (seen.shape[0] > 1) + [f"head {h}"] * (seen.shape[1] > 1)
            rows = seen[b, h].tolist()
            pictures[", ".join(title)] = "\n".join(" ".join("■" if s else "·" for s in row) for row in rows)
    if len(set(pictures.values())) == 1:
        return next(iter(pictures.values()))
    return "\n".join(f"{title}\n{picture}" for title, picture in pictures.items())


def parse(text: str) -> Mask:
    """Read a mask from text such as ``"Causal() & (Window(128) | Prefix(4))"``.

    The text is parsed, never evaluated: the names of masks, ``&``, ``|``, ``~``, parentheses, whole numbers, True,
    False, None, tuples and lists are all there is. Masks that hold tensors take lists.

    Args:
        text: What to read.

    Returns:
        The mask.

    Raises:
        ShapeError: When the text is not a mask; the message points at the place.

    Example:
        >>> parse("Causal() & Window(3)")
        Causal() & Window(3)
    """
    if not isinstance(text, str):
        raise ShapeError(f"A mask text is {type(text).__name__}; give a string such as 'Causal() & Window(3)'.")
    if len(text) > 10_000:
        raise ShapeError(f"A mask text of {len(text)} characters is too long; at most 10000 are read.")
    text = text.strip().replace("\n", " ")
    shown = repr(text if len(text) <= 60 else f"{text[:57]}...")
    try:
        mask = _read(ast.parse(text, mode="eval").body)
    except SyntaxError as error:
        at = error.offset or len(text) + 1
        raise ShapeError(f"{shown} is not a mask: {error.msg:.60} at character {at}.") from None
    except (RecursionError, MemoryError, ValueError) as error:
        if isinstance(error, ShapeError):
            raise
        raise ShapeError(f"This mask text cannot be read ({type(error).__name__}); nest it less deeply.") from None
    if not isinstance(mask, Mask):
        raise ShapeError(f"{shown} is not a mask but {type(mask).__name__}; write for example Causal() & Window(3).")
    return mask


def _read(node: ast.expr) -> Any:
    known = {cls.__name__: cls for cls in Mask.__subclasses__()}
    match node:
        case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr(), right=right):
            a, b = _read(left), _read(right)
            if not isinstance(a, Mask) or not isinstance(b, Mask):
                raise ShapeError(f"& and | at character {node.col_offset + 1} join two masks, and one side is not.")
            return a & b if isinstance(node.op, ast.BitAnd) else a | b
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            inner = _read(operand)
            if not isinstance(inner, Mask):
                raise ShapeError(f"~ at character {node.col_offset + 1} goes before a mask.")
            return ~inner
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))) if not isinstance(value, bool):
            return -value
        case ast.Constant(value=None | bool() | int()):
            return node.value
        case ast.Tuple(elts=items):
            return tuple(_read(item) for item in items)
        case ast.List(elts=items):
            return [_read(item) for item in items]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in known:
            if any(isinstance(a, ast.Starred) for a in args) or any(k.arg is None for k in keywords):
                raise ShapeError(f"{name}(…) at character {node.col_offset + 1} takes no * or **.")
            values = [_read(a) for a in args]
            named = {str(k.arg): _read(k.value) for k in keywords}
            if len(named) < len(keywords):
                raise ShapeError(f"{name}(…) at character {node.col_offset + 1} is given an argument twice.")
            return _build(known[name], values, named)
        case ast.Name(id=name) if name in known:
            raise ShapeError(f"{name} at character {node.col_offset + 1} needs parentheses: {name}().")
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            there = ", ".join(sorted(known))
            raise ShapeError(f"There is no mask {name!r:.40} (character {node.col_offset + 1}); there are {there}.")
    raise ShapeError(
        f"A mask text cannot hold {type(node).__name__} (character {node.col_offset + 1}); it holds masks, numbers, "
        "&, |, ~ and parentheses."
    )


def _build(cls: type[Mask], values: list[Any], named: dict[str, Any]) -> Mask:
    settable = [f.name for f in fields(cls) if f.init and f.repr]  # type: ignore[arg-type]
    unknown = [name for name in named if name not in settable]
    if unknown:
        raise ShapeError(f"{cls.__name__} has no argument {unknown[0]!r}; it takes {', '.join(settable) or 'none'}.")
    if cls in (Dense, Document):
        values = [_tensor(v) for v in values]
        named = {name: _tensor(v) for name, v in named.items()}
    try:
        return cls(*values, **named)
    except TypeError as error:
        said = str(error).replace(f"{cls.__name__}.__init__() ", "")
        raise ShapeError(f"{cls.__name__} cannot be built from this: {said}.") from None


def _tensor(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        return value
    try:
        return torch.tensor(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ShapeError(
            f"These lists make no tensor ({error}); give lists of equal length that hold numbers."
        ) from None
