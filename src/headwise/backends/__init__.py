"""Backends: the ways to compute attention, in order of preference, and the choice among them."""

import torch

from headwise.backends.base import Backend, Inputs
from headwise.backends.native import Native
from headwise.backends.reference import Reference
from headwise.backends.sdpa import Sdpa
from headwise.errors import ShapeError, UnsupportedError

BACKENDS: tuple[Backend, ...] = (Native(), Sdpa(), Reference())


def named(name: str | Backend) -> Backend | None:
    """The backend of a name, or None for "auto"."""
    if isinstance(name, Backend):
        return name
    if isinstance(name, str) and name == "auto":
        return None
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    if isinstance(name, type) and issubclass(name, Backend):
        raise ShapeError(f"backend={name.__name__} is a class; call it, or give its name.")
    there = ", ".join(b.name for b in BACKENDS)
    raise ShapeError(f"There is no backend {name!r:.40}; there are auto, {there}.")


def choose(x: Inputs, name: str | Backend = "auto") -> Backend:
    """The backend that runs the call: the one named, or the first that can. One asked for by name is never swapped."""
    backend = named(name)
    if backend is None:
        exporting = torch.compiler.is_exporting()
        return next(b for b in BACKENDS if b.why_not(x) is None and (b.exports or not exporting))
    reason = backend.why_not(x)
    if reason is not None:
        able = ", ".join(b.name for b in BACKENDS if b.why_not(x) is None)
        raise UnsupportedError(f"Backend {backend.name!r} cannot run this call: {reason}. These can: {able}.")
    return backend
