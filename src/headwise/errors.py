"""Errors: what headwise raises, and nothing else.

AttentionError
├── ShapeError        (also ValueError)           sizes, dtypes, devices or arguments that do not fit together
├── UnsupportedError  (also NotImplementedError)  a correct request that the chosen backend or module cannot serve
├── CacheError        (also RuntimeError)         a cache that is full, shared or does not match
└── ConversionError   (also ValueError)           weights that cannot be read as multi-head attention

Each message says what is wrong, with both numbers, and then what to do.
"""


class AttentionError(Exception):
    """Base class of every error that headwise raises on purpose."""


class ShapeError(AttentionError, ValueError):
    """Sizes, dtypes, devices or arguments do not fit together."""


class UnsupportedError(AttentionError, NotImplementedError):
    """The request makes sense, but the backend or module named cannot serve it."""


class CacheError(AttentionError, RuntimeError):
    """A key/value cache is full, shared by mistake, or does not match the call."""


class ConversionError(AttentionError, ValueError):
    """Weights or a module cannot be turned into headwise layers."""
