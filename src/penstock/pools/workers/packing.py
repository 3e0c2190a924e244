"""
Making the payload of a call for a worker process: naming its function, pickling its arguments, copying
buffers into shared memory.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

from penstock.core.errors import NotPicklable
from penstock.core.text import safe_repr
from penstock.pools.child import protocol, shared_memory
from penstock.pools.child.protocol import PLAIN_TYPES, SHORT, SHORT_TYPES
from penstock.pools.future import Call


class PackedFunction:
    """A function that is sent to a worker once and then named by its number."""

    __slots__ = ("blob", "needs_main", "number")

    def __init__(self, number: int, blob: bytes, needs_main: bool) -> None:
        self.number = number
        self.blob = blob
        self.needs_main = needs_main


class Packed:
    """Arguments that do not fit into a message as they are."""

    __slots__ = ("data", "filled", "needs_main")

    def __init__(
        self, data: bytes | None, filled: shared_memory.FilledSegment | None, needs_main: bool
    ) -> None:
        self.data = data
        self.filled = filled
        self.needs_main = needs_main


class Packer:
    def __init__(self) -> None:
        self._functions: dict[Any, PackedFunction] = {}
        self._numbers = count(1)
        self.arena = shared_memory.Arena()
        self._lock = threading.Lock()

    def pack_call(
        self, call: Call[Any], fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], None] | None:
        """Name the function. Returns the function that makes the payload, or None if it is made already."""
        function: Any
        try:
            function = self._functions[fn]
        except (KeyError, TypeError):
            function = fn if type(fn) is str else self._function(fn)
        if function is not None and not kwargs:
            for (
                value
            ) in args:  # `protocol.is_plain`, written out: calling it takes as long as all the rest here
                kind = type(value)
                if kind not in PLAIN_TYPES and (kind not in SHORT_TYPES or len(value) > SHORT):
                    break
            else:
                call.function = function
                call.body = args
                return None
        call.function = 0 if function is None else function
        return lambda: self._pack(call, fn if function is None else None, args, kwargs)

    def _function(self, fn: Any) -> Any:
        """None: the function must travel with each call, because it cannot be imported or carries state."""
        if not protocol.by_reference(fn):
            return None
        blob = pickle.dumps(fn, 5)
        packed = self._functions[fn] = PackedFunction(next(self._numbers), blob, b"__main__" in blob)
        return packed

    def _pack(self, call: Call[Any], fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        data, buffers = protocol.pack_arguments(fn, args, kwargs)
        needs_main = b"__main__" in data
        if needs_main and not protocol.main_can_be_imported() and protocol.cloudpickle() is None:
            raise NotPicklable(
                f"{safe_repr(call.fn, 200)} or its arguments live in a __main__ that no worker can import{protocol.advice()}"
            )
        if not shared_memory.AVAILABLE or not (buffers or len(data) >= protocol.LARGE):
            call.body = Packed(data, None, needs_main)
            return
        inline = len(data) < protocol.LARGE
        with self._lock:
            filled = self.arena.pack([*buffers] if inline else [data, *buffers])
        call.body = Packed(data if inline else None, filled, needs_main)

    @property
    def kept(self) -> int:
        """Bytes of shared memory that are not in use now."""
        return self.arena.kept

    def trim(self) -> list[int]:
        """
        Release memory that is not in use. Returns the numbers of the segments, which the workers then close,
        too.
        """
        with self._lock:
            return self.arena.trim()
