"""Caches: keys and values of earlier tokens, kept between the calls of a generation.

A cache belongs to one layer, is passed to its ``forward`` and changed in place. Keys are stored normed and rotated,
so nothing is done twice. However the tokens are cut into calls, the results are those of one call.

Rows of a batch may have different numbers of tokens: with ``lengths=`` only the real tokens of each row are stored,
one after the other without gaps, and each row continues at its own length.
"""

import copy
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from headwise.errors import CacheError, ShapeError
from headwise.positions import Number, Positions, integer

Stored = Float[Tensor, "B K L D"] | Int[Tensor, "B A L 1"]  # keys, values, or positions along A axes


class KVCache(ABC):
    """Where a layer leaves keys and values for its next call.

    A cache of your own has the one method ``append``. A call that is refused after its tokens were stored, for the sake
    of its mask for instance, has stored them.

    Example:
        >>> class Everything(KVCache):
        ...     def append(self, key, value, positions, lengths=None):
        ...         old = self.stored or {"key": key[:, :, :0], "value": value[:, :, :0]}
        ...         self.stored = {"key": torch.cat([old["key"], key], 2), "value": torch.cat([old["value"], value], 2)}
        ...         self.length += positions.count
        ...         return self.stored["key"], self.stored["value"], Positions(self.length)
        >>> layer, cache, x = MultiHeadAttention(8, 2, mask=Causal()), Everything(), torch.randn(1, 5, 8)
        >>> steps = torch.cat([layer(part, cache=cache) for part in x.split(2, 1)], 1)
        >>> torch.allclose(steps, layer(x), atol=1e-6)
        True

    Attributes:
        length: How many tokens are stored; where rows differ, a number that no row exceeds.
        lengths: How many tokens each row holds, once rows may differ; None while all hold ``length``.
        capacity: How many tokens there is room for; None for no limit.
        keeps: How many of the last tokens are kept; None for all. A query must not look further back.
        stored: The tensors "key" and "value". An exported file is given them, and returns them: there, make a cache in
            ``forward`` and set ``stored``, ``length`` and ``lengths``.
    """

    capacity: int | None = None
    keeps: int | None = None
    length: int = 0
    lengths: Int[Tensor, " B"] | None = None
    offset: Number = 0  # position less index, while positions are a run
    next_position: Int[Tensor, " B"] | None = None  # and once they are not
    _numbers: tuple[str, ...] = ("length", "lengths", "offset", "next_position")
    _owner: Any = None
    _made_in_export = True

    def __init__(self) -> None:
        self._made_in_export = torch.compiler.is_exporting()
        # "key", "value" and, where positions are no run, "position": tensors of one layout that are moved alike
        self.stored: dict[str, Tensor] = {}

    @abstractmethod
    def append(
        self,
        key: Float[Tensor, "B K T D"],
        value: Float[Tensor, "B K T V"],
        positions: Positions,
        lengths: Int[Tensor, " B"] | None = None,
    ) -> tuple[Tensor, Tensor, Positions]:
        """Store new keys and values, and return all that the queries may look at with their positions.

        ``lengths`` says how many of the new tokens of each row are real, counted from the first; None means all.

        Raises:
            CacheError: When the cache is full, or sizes, dtype or device differ from what it holds.
        """

    def next_positions(self, count: int) -> Positions:
        """Where the next ``count`` tokens stand: after those that are stored."""
        start = self.length if self.lengths is None else self.lengths
        offset = self.offset if self.next_position is None else self.next_position - start
        return Positions(count, start=start, offset=offset)

    def claim(self, layer: object) -> None:
        """Make a layer the owner; another one is refused."""
        if torch.compiler.is_exporting() and not self._made_in_export:
            raise CacheError(
                "An exported file would hold this cache as it is now; make a cache in forward, and set its stored, "
                "length and lengths from tensors that the file is given."
            )
        if self._owner is not None and self._owner is not layer:
            raise CacheError(
                "This cache belongs to another layer, whose keys it holds; make a cache for each layer of a model."
            )
        self._owner = layer

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens of each row; a negative number drops as many of the last ones.

        Rows that hold no more than that stay as they are, and dropping more than there are empties a row.
        """
        integer(length, "The length to crop to")
        if self.lengths is not None:
            self.lengths = (self.lengths + length).clamp(min=0) if length < 0 else self.lengths.clamp(max=length)
        self.length = max(0, self.length + length) if length < 0 else min(self.length, length)
        if "position" in self.stored:
            left = self.stored["position"][..., : self.length, 0].amax(1)
            gone = torch.arange(left.shape[-1], device=left.device) >= self._per_row(left, None)[0][:, None]
            self.next_position = left.masked_fill(gone, -1).amax(-1) + 1 if self.length else left.new_zeros(len(left))

    def select(self, rows: list[int] | Int[Tensor, " N"]) -> None:
        """Make row i what row ``rows[i]`` was: put beams in order, repeat a prompt, leave finished rows out."""
        if not self.stored:
            count = torch.as_tensor(rows).numel()
            raise CacheError(f"An empty cache has no rows to select {count} from; fill it first.")
        key = self.stored["key"]
        nothing = isinstance(rows, (list, tuple)) and not rows
        index = torch.as_tensor(rows, dtype=torch.int64 if nothing else None, device=key.device)
        if index.dim() != 1 or index.is_floating_point() or index.dtype == torch.bool:
            raise ShapeError(f"Rows to select are {index.dtype} of shape {tuple(index.shape)}; give whole numbers.")
        if index.device.type == "cpu" and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < len(key):
            raise ShapeError(f"Rows {index.tolist()} were selected of {len(key)}; count them from 0.")
        self.stored = {name: tensor.index_select(0, index) for name, tensor in self.stored.items()}
        for name in self._numbers:
            value = getattr(self, name)
            if isinstance(value, Tensor) and len(value) == len(key):
                setattr(self, name, value.index_select(0, index))

    def fork(self) -> "KVCache":
        """An independent copy: what is appended to one does not show in the other."""
        twin = copy.copy(self)
        twin.stored = {name: tensor.clone() for name, tensor in self.stored.items()}
        twin._owner = self._owner
        return twin

    def state_dict(self) -> dict[str, Any]:
        """All that the cache holds, as tensors and numbers, for ``torch.save`` and ``load_state_dict``."""
        return {
            "kind": type(self).__name__,
            "room": self.capacity or self.keeps,
            **{name: _copied(getattr(self, name)) for name in self._numbers},
            **{name: tensor.clone() for name, tensor in self.stored.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another cache of the same kind and size held."""
        state = dict(state)
        lacking = {"kind", "room", *self._numbers} - set(state)
        if state.get("kind") == type(self).__name__ and lacking:
            raise CacheError(
                f"The state of a cache lacks {', '.join(sorted(lacking))}; give what state_dict() returned."
            )
        ours, theirs = (
            (type(self).__name__, self.capacity or self.keeps),
            (state.pop("kind", None), state.pop("room", 0)),
        )
        if ours != theirs:
            raise CacheError(
                f"The state is that of {theirs[0]} with room for {theirs[1]} tokens, but this is {ours[0]} with room "
                f"for {ours[1]}; make one of the same kind and size."
            )
        for name in self._numbers:
            setattr(self, name, _copied(state.pop(name)))
        self.stored = {name: tensor.clone() for name, tensor in state.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_owner": None}  # a copy may go to a copy of the layer

    def __deepcopy__(self, memo: dict[Any, Any]) -> "KVCache":
        twin = copy.copy(self)
        for name, value in vars(twin).items():
            if name == "stored":  # tensors that are part of a graph can be cloned, but not deepcopied
                twin.stored = {part: tensor.clone() for part, tensor in value.items()}
            else:
                setattr(twin, name, copy.deepcopy(value, memo))
        return twin

    def _new(self, key: Tensor, value: Tensor, positions: Positions, lengths: Any) -> dict[str, Tensor]:
        """What to store, checked against what is stored."""
        new = {"key": key, "value": value}
        if not positions.is_run:
            raise CacheError("A cache numbers its tokens itself; give positions without indices, ring or filled.")
        if lengths is not None:
            _check_lengths(lengths, key.shape[0], key.shape[2], key.device)
        for name, tensor in new.items():
            held = self.stored.get(name)
            if held is None:
                continue
            if (held.shape[0], held.shape[1], held.shape[3]) != (tensor.shape[0], tensor.shape[1], tensor.shape[3]):
                raise CacheError(
                    f"The cache holds {name}s of (batch, heads, size) {held.shape[0], held.shape[1], held.shape[3]}, "
                    f"the call has {tensor.shape[0], tensor.shape[1], tensor.shape[3]}; make a new cache, or select() "
                    "rows of this one."
                )
            if held.dtype != tensor.dtype or held.device != tensor.device:
                raise CacheError(
                    f"The cache holds {name}s of {held.dtype} on {held.device}, the call has {tensor.dtype} on "
                    f"{tensor.device}; make a new cache."
                )
        start = positions.start
        if start is not self.lengths and (
            isinstance(start, Tensor) or self.lengths is not None or start != self.length
        ):
            count = f"{self.length}" if self.lengths is None else "a number of its own in each row of"
            first = "a number in each row" if isinstance(start, Tensor) else f"{start}"
            raise CacheError(
                f"The cache holds {count} tokens, but the first token of the call has index {first}; leave positions "
                "out, or crop() the cache."
            )
        same = positions.offset is self.offset or (
            isinstance(positions.offset, int) and isinstance(self.offset, int) and positions.offset == self.offset
        )
        if not self.stored:
            self.offset, same = _copied(positions.offset), True
        if "position" in self.stored or positions.positions is not None or not same:
            new["position"] = self._positions(positions, key, lengths)
        return new

    def _positions(self, positions: Positions, key: Tensor, lengths: Any) -> Int[Tensor, "B A T 1"]:
        """Positions of the new tokens in the form of keys; what was stored without gets them too."""
        device, batch = key.device, key.shape[0]
        place = _as_heads(positions.position(device), batch)
        held = self.stored.get("position")
        if held is None and self.stored:
            before = self._in_store(self.stored["key"].shape[-2]).position(device)
            held = self.stored["position"] = _as_heads(before, batch).expand(-1, place.shape[1], -1, -1).contiguous()
        if held is not None and held.shape[1] != place.shape[1]:
            if place.shape[1] != 1:
                raise CacheError(
                    f"The cache holds positions along {held.shape[1]} axes, the call has {place.shape[1]}; give as "
                    "many in every call."
                )
            place = place.expand(-1, held.shape[1], -1, -1)
        real = place.squeeze(-1).amax(1)
        if lengths is not None:
            real = real.masked_fill(torch.arange(real.shape[1], device=device) >= lengths[:, None], -1)
        after = real.amax(-1) + 1 if real.shape[1] else real.new_zeros(batch)
        before_next = self.next_positions(0)
        known = before_next.start + before_next.offset
        known = torch.as_tensor(known, device=device).expand(batch)
        none = real.shape[1] == 0 if lengths is None else lengths == 0
        self.next_position = torch.where(torch.as_tensor(none, device=device), known, torch.maximum(after, known))
        return place

    def _in_store(self, places: int) -> Positions:
        """Where the tokens stand that lie in the buffers."""
        return Positions(places, offset=self.offset)

    def _found(self, places: int, **run: Any) -> tuple[Tensor, Tensor, Positions]:
        """The first places of the buffers, with their positions."""
        found = {name: tensor[..., :places, :] for name, tensor in self.stored.items()}
        return found["key"], found["value"], self._described(found.get("position"), Positions(places, **run))

    def _described(self, position: Tensor | None, run: Positions) -> Positions:
        if position is not None:
            position = position.squeeze(-1).transpose(0, 1)
            position = position[0] if len(position) == 1 else position
        return replace(run, offset=self.offset, positions=position)

    def _per_row(self, key: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """How many tokens each row holds, and how many it is given."""
        every = torch.ones(key.shape[0], dtype=torch.int64, device=key.device)
        stored = every * self.length if self.lengths is None else self.lengths
        return stored, every * key.shape[-2] if lengths is None else lengths.to(torch.int64)

    def __repr__(self) -> str:
        room = "" if (size := self.capacity or self.keeps) is None else str(size)
        return f"{type(self).__name__}({room})"


class _Growing(KVCache):
    """Tokens in the order of their indices, from the first: what dynamic and static caches share."""

    def append(
        self,
        key: Float[Tensor, "B K T D"],
        value: Float[Tensor, "B K T V"],
        positions: Positions,
        lengths: Int[Tensor, " B"] | None = None,
    ) -> tuple[Tensor, Tensor, Positions]:
        old, rows = self.length, key.shape[-2]
        if lengths is None and self.lengths is None:
            self._check_room(old + rows)  # before anything changes
            for name, tensor in self._new(key, value, positions, lengths).items():
                self.stored[name] = self._extended(self.stored.get(name), tensor, old)
            self.length = old + rows
            return self._found(self.length)
        if lengths is not None:
            _check_lengths(lengths, key.shape[0], key.shape[2], key.device)
        stored, fresh = self._per_row(key, lengths)
        total = stored + fresh
        length = self._bound(total, old + rows)
        new = self._new(key, value, positions, lengths)
        self.length = length
        token = torch.arange(self.length, device=key.device) - stored[:, None]
        for name, tensor in new.items():
            room = self._room(self.stored.get(name), tensor, old, self.length)
            if torch.is_grad_enabled():
                room = _mixed(room[..., : self.length, :], tensor, token, fresh)
            elif rows == 1:
                _put(room, tensor, stored.clamp(max=room.shape[-2] - 1), fresh)
            else:
                room[..., : self.length, :] = _mixed(room[..., : self.length, :], tensor, token, fresh)
            self.stored[name] = room
        self.lengths = total
        return self._found(self.length, filled=total)

    def _extended(self, held: Tensor | None, new: Tensor, length: int) -> Tensor:
        """A buffer with new tokens after the first ``length``."""
        if torch.is_grad_enabled():  # an earlier call may need its keys for a gradient: leave them alone
            return new if held is None or length == 0 else torch.cat([held[..., :length, :], new], -2)
        stop = length + new.shape[-2]
        held = self._room(held, new, length, stop)
        held[..., length:stop, :] = new
        return held

    def _room(self, held: Tensor | None, new: Tensor, length: int, stop: int) -> Tensor:
        """The buffer, or a larger one that it was copied to, with room for ``stop`` tokens."""
        room = 0 if held is None else held.shape[-2]
        exact = self.capacity is None and torch.compiler.is_exporting()  # a file cannot ask whether there is room
        if held is not None and not exact and room >= max(1, stop) and not _is_frozen(held):
            return held
        size = stop if exact else max(stop, 2 * room, 64) if self.capacity is None else self.capacity
        kept = new[..., :0, :] if held is None else held[..., :length, :]
        return F.pad(kept, (0, 0, 0, size - kept.shape[-2]))

    def _check_room(self, stop: int) -> None:
        if self.capacity is not None and stop > self.capacity:
            raise CacheError(
                f"The cache has room for {self.capacity} tokens and would hold {stop}; make a larger one, crop() it, "
                "or use RollingCache for the last tokens only."
            )

    def _bound(self, total: Int[Tensor, " B"], most: int) -> int:
        """A number that no row's length exceeds, without waiting for the device where that can be avoided."""
        if torch.compiler.is_compiling():
            if self.capacity is None:
                return most
            torch._assert_async((total <= self.capacity).all(), "The cache has no room for so many tokens.")
            return min(most, self.capacity)
        if total.device.type == "cpu" or (self.capacity is not None and most > self.capacity):
            most = int(total.max()) if total.numel() else 0
            self._check_room(most)
        return most


class DynamicCache(_Growing):
    """A cache that grows with what is stored.

    Without gradients it grows in steps, so that a new token costs no copy of the old ones.

    Example:
        >>> layer, cache = MultiHeadAttention(8, 2, mask=Causal()), DynamicCache()
        >>> x = torch.randn(1, 5, 8)
        >>> steps = torch.cat([layer(x[:, :3], cache=cache), layer(x[:, 3:], cache=cache)], 1)
        >>> torch.allclose(steps, layer(x), atol=1e-6), cache.length
        (True, 5)
    """


class StaticCache(_Growing):
    """A cache with room for a fixed number of tokens, made once.

    Args:
        capacity: Number of tokens that each row has room for, at least 1.

    Raises:
        ShapeError: When ``capacity`` is below 1.
        CacheError: In a call that would store more.

    Example:
        >>> layer, cache = MultiHeadAttention(8, 2, mask=Causal()), StaticCache(4)
        >>> with torch.no_grad():
        ...     for token in torch.randn(4, 1, 1, 8):
        ...         y = layer(token, cache=cache)
        >>> cache.length, cache.stored["key"].shape
        (4, torch.Size([1, 2, 4, 4]))
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        if integer(capacity, "The capacity of a cache") < 1:
            raise ShapeError(f"A cache with room for {capacity} tokens holds nothing; give at least 1.")
        self.capacity = capacity


class RollingCache(KVCache):
    """A cache of the last tokens only, in a ring: for layers whose mask is a window.

    Args:
        size: Number of tokens to keep, at least 1. The mask must not let a query look further back, itself counted:
            ``Causal() & Window(size)`` fits exactly.

    Raises:
        ShapeError: When ``size`` is below 1.
        CacheError: In a call whose mask looks further back.

    Example:
        >>> layer, cache = MultiHeadAttention(8, 2, mask=Causal() & Window(3)), RollingCache(3)
        >>> x = torch.randn(1, 9, 8)
        >>> steps = torch.cat([layer(token, cache=cache) for token in x.split(1, 1)], 1)
        >>> torch.allclose(steps, layer(x), atol=1e-6), cache.stored["key"].shape
        (True, torch.Size([1, 2, 3, 4]))
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        if integer(size, "The size of a cache") < 1:
            raise ShapeError(f"A cache of the last {size} tokens holds nothing; give at least 1.")
        self.keeps = size

    def append(
        self,
        key: Float[Tensor, "B K T D"],
        value: Float[Tensor, "B K T V"],
        positions: Positions,
        lengths: Int[Tensor, " B"] | None = None,
    ) -> tuple[Tensor, Tensor, Positions]:
        new = self._new(key, value, positions, lengths)
        size, old, rows = self.keeps or 1, self.length, key.shape[-2]
        # a compiler would make a graph for every place of the ring; as tensors, all places are one graph
        if lengths is not None or self.lengths is not None or torch.compiler.is_compiling():
            return self._append_per_row(new, *self._per_row(key, lengths))
        kept, self.length = min(old, size), old + rows
        places, ring = min(self.length, size), self._seam(self.length)
        if rows == 1 and not torch.is_grad_enabled():  # one token takes the place of the oldest
            for name, tensor in new.items():
                held = self.stored.get(name, tensor[..., :0, :])
                whole = held.shape[-2] == size and not _is_frozen(held)
                room = held if whole else F.pad(held, (0, 0, 0, size - held.shape[-2])).clone()
                room[..., old % size, None, :] = tensor
                self.stored[name] = room
            return self._found(places, start=self.length - places, ring=ring)
        everything = {}
        for name, tensor in new.items():
            held = self.stored.get(name, tensor[..., :0, :])
            past = held[..., :kept, :].roll(-self._seam(old), -2)
            everything[name] = torch.cat([past, tensor], -2)
            self.stored[name] = everything[name][..., kept + rows - places :, :].roll(ring, -2)
        if rows == 1:
            return self._found(places, start=self.length - places, ring=ring)
        run = Positions(kept + rows, start=old - kept)
        return (
            everything["key"],
            everything["value"],
            self._described(everything.get("position"), run),
        )

    def _append_per_row(
        self, new: dict[str, Tensor], stored: Int[Tensor, " B"], fresh: Int[Tensor, " B"]
    ) -> tuple[Tensor, Tensor, Positions]:
        size, rows, device = self.keeps or 1, new["key"].shape[-2], fresh.device
        total = stored + fresh
        kept, most = stored.clamp(max=size), min(self.length, size)
        # a place of the ring holds the last index that fits it; of earlier tokens, number l lies (start + l) further
        place = torch.arange(size, device=device)
        token = total[:, None] - 1 - (total[:, None] - 1 - place) % size - stored[:, None]
        number = torch.arange(most + rows, device=device)
        past = (stored - kept)[:, None] + number
        everything = {}
        for name, tensor in new.items():
            held = self.stored.get(name, tensor[..., :0, :])
            whole = held.shape[-2] == size and not _is_frozen(held)
            ring = held if whole else F.pad(held, (0, 0, 0, size - held.shape[-2])).clone()
            if rows == 1 and not torch.is_grad_enabled():
                _put(ring, tensor, stored % size, fresh)
                self.stored[name] = ring
                continue
            before = _picked(ring, past % size)
            everything[name] = _mixed(before, tensor, number - kept[:, None], fresh)
            self.stored[name] = _mixed(ring, tensor, token, fresh)
        self.lengths, self.length = total, self.length + rows
        if rows == 1:
            ring_of = torch.where(total > size, total % size, 0)
            return self._found(size, start=total - total.clamp(max=size), ring=ring_of, filled=total.clamp(max=size))
        run = Positions(most + rows, start=stored - kept, filled=kept + fresh)
        return everything["key"], everything["value"], self._described(everything.get("position"), run)

    def _seam(self, length: int) -> int:
        """Place of the oldest token."""
        size = self.keeps or 1
        return length % size if length > size else 0

    def _in_store(self, places: int) -> Positions:
        if self.lengths is not None:
            total, size = self.lengths, self.keeps or 1
            ring = torch.where(total > size, total % size, 0)
            return Positions(places, start=total - total.clamp(max=size), offset=self.offset, ring=ring)
        start = self.length - min(self.length, self.keeps or 1)
        return Positions(places, start=start, offset=self.offset, ring=self._seam(self.length))

    def crop(self, length: int) -> None:
        integer(length, "The length to crop to")
        held = self.length if self.lengths is None else int(self.lengths.max()) if len(self.lengths) else 0
        left = max(0, held + length) if length < 0 else length
        forgotten = held - (self.keeps or 1)
        if left >= held:
            return
        if forgotten > 0 and left > 0:
            raise CacheError(
                f"The cache has forgotten {forgotten} tokens, some of which it would need after a crop to {length}; "
                "keep more tokens, or fork() it before those that you may want to drop."
            )
        super().crop(length)


class FixedCache(KVCache):
    """Keys and values that are computed once: those of an encoder, for cross-attention in every step of a decoder.

    The first call fills it from the ``key`` tokens it is given; from then on the layer projects queries only. Later
    calls leave ``key`` out, or pass the same tensor. Queries count from 0, on through the calls.

    Example:
        >>> layer, cache = MultiHeadAttention(8, 2), FixedCache()
        >>> memory, x = torch.randn(1, 7, 8), torch.randn(1, 3, 8)
        >>> steps = torch.cat([layer(token, memory, cache=cache) for token in x.split(1, 1)], 1)
        >>> torch.allclose(steps, layer(x, memory), atol=1e-6)
        True
    """

    first: Number = 0
    asked: Number = 0
    ahead: Number = 0  # position less index of the queries
    _numbers = (*KVCache._numbers, "first", "asked", "ahead")
    _source: Any = None
    _version: int | None = None

    @property
    def is_filled(self) -> bool:
        """Whether keys and values are there."""
        return bool(self.stored)

    def next_positions(self, count: int) -> Positions:
        return Positions(count, start=self.asked, offset=self.ahead)

    def append(
        self,
        key: Float[Tensor, "B K T D"],
        value: Float[Tensor, "B K T V"],
        positions: Positions,
        lengths: Int[Tensor, " B"] | None = None,
    ) -> tuple[Tensor, Tensor, Positions]:
        if self.is_filled:
            raise CacheError(
                f"The cache is filled with {self.length} keys; leave key out, or make a new FixedCache for others."
            )
        if not positions.is_run:
            raise CacheError("A cache numbers its tokens itself; give positions without indices, ring or filled.")
        if lengths is not None:
            _check_lengths(lengths, key.shape[0], key.shape[2], key.device)
        self.length, self.lengths = key.shape[-2], _copied(lengths)
        self.first, self.offset = _copied(positions.start), _copied(positions.offset)
        self.stored = {"key": key, "value": value}
        if positions.positions is not None:
            self.stored["position"] = _as_heads(positions.positions, key.shape[0])
        return self._found(self.length, start=self.first, filled=lengths)

    def recall(self, queries: Positions) -> tuple[Tensor, Tensor, Positions]:
        """What is stored, for queries that stand so; the next ones stand after them."""
        if not self.is_filled:
            raise CacheError("A FixedCache that is empty needs key tokens; give key= in the first call.")
        self.asked, self.ahead = queries.stop, queries.offset
        return self._found(self.length, start=self.first, filled=self.lengths)

    def remember(self, source: Tensor | None) -> None:
        """Note which tokens the keys come from; None where values come from others, which a later call cannot say."""
        self._source, self._version = source, _version(source)

    def is_from(self, source: Tensor) -> bool:
        """Whether these are the tokens that the keys come from, as far as can be told."""
        now = _version(source)
        return self._source is source and (now is None or self._version is None or now == self._version)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._source = None  # nobody knows

    def fork(self) -> "FixedCache":
        twin = super().fork()
        twin._source, twin._version = self._source, self._version  # type: ignore[attr-defined]
        return twin  # type: ignore[return-value]

    def crop(self, length: int) -> None:
        raise CacheError(
            f"A FixedCache is filled once and cannot be cropped to {length} keys; hide some with Padding(lengths)."
        )

    def select(self, rows: list[int] | Int[Tensor, " N"]) -> None:
        super().select(rows)
        self._source = None  # the tokens that belong to these rows are another tensor now

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_source": None}


def _check_lengths(lengths: Any, batch: int, rows: int, device: torch.device) -> None:
    if not isinstance(lengths, Tensor) or lengths.is_floating_point() or lengths.dtype == torch.bool:
        kind = lengths.dtype if isinstance(lengths, Tensor) else type(lengths).__name__
        raise ShapeError(f"lengths= is {kind}; give a tensor of whole numbers, one per row, (batch,).")
    if lengths.shape != (batch,):
        raise ShapeError(f"lengths= has shape {tuple(lengths.shape)} for {batch} rows; give one number per row.")
    if lengths.device != device:
        raise ShapeError(f"lengths= is on {lengths.device} and the keys are on {device}; move it with .to().")
    if lengths.device.type == "cpu" and not torch.compiler.is_compiling() and lengths.numel():
        least, most = int(lengths.min()), int(lengths.max())
        if least < 0 or most > rows:
            raise ShapeError(
                f"lengths= runs from {least} to {most}, but there are {rows} tokens; stay within 0 … {rows}."
            )


def _version(source: Tensor | None) -> int | None:
    """How often a tensor was written to; None where nobody counts."""
    if source is None or torch.compiler.is_compiling() or source.is_inference():
        return None
    return source._version


def _copied(value: Any) -> Any:
    """A number, or a copy of a tensor that somebody else may change."""
    return value.clone() if isinstance(value, Tensor) else value


def _is_frozen(held: Tensor) -> bool:
    """Whether torch forbids to write into a buffer, because it was made in inference mode and we are outside."""
    if torch.compiler.is_compiling():  # which cannot ask, and writes by functions of its own
        return False
    if held.requires_grad:  # an earlier call may need it for its gradient
        return True
    return held.is_inference() and not torch.is_inference_mode_enabled()


def _as_heads(position: Tensor, batch: int) -> Int[Tensor, "B A L 1"]:
    position = position[None] if position.dim() == 2 else position
    # a copy: the caller may change theirs, and rows of an expanded tensor cannot be written
    return position.transpose(0, 1).expand(batch, -1, -1)[..., None].clone()


def _mixed(held: Stored, new: Tensor, token: Int[Tensor, "B L"], fresh: Int[Tensor, " B"]) -> Stored:
    """What is held, with new token number ``token`` in each place where there is one."""
    if new.shape[-2] == 0:
        return held
    is_new: Bool[Tensor, "B 1 L 1"] = ((token >= 0) & (token < fresh[:, None]))[:, None, :, None]
    return torch.where(is_new, _picked(new, token.clamp(0, new.shape[-2] - 1)), held)


def _picked(held: Tensor, place: Int[Tensor, "B L"]) -> Stored:
    # not take_along_dim, which makes a compiler settle on the sizes
    return held.gather(-2, place[:, None, :, None].expand(-1, held.shape[1], -1, held.shape[3]))


def _put(held: Stored, new: Float[Tensor, "B K 1 D"] | Int[Tensor, "B A 1 1"], place: Tensor, fresh: Tensor) -> None:
    """Write one new token of each row into its place, in the rows that have one."""
    at = place[:, None, None, None].expand_as(new)
    held.scatter_(-2, at, torch.where((fresh > 0)[:, None, None, None], new, held.gather(-2, at)))
