"""
Ends the streams and long polls of a token that has ended.

A token is checked when a request comes in, and some requests stay for hours. While there are any, their tokens are looked at several times a second;
where no request waits, nothing is looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from penstock.server.tokens import Principal, TokenFile

__all__ = ["TokenWatch"]

#: With the half second after which the file of tokens is read again it is less than one.
_LOOK_EVERY: Final = 0.3


class TokenWatch:
    """Lives on one event loop."""

    def __init__(self, tokens: TokenFile, loop: asyncio.AbstractEventLoop) -> None:
        self._tokens, self._loop = tokens, loop
        self._waiting: dict[object, tuple[Principal, Callable[[], object]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watching(self, principal: Principal, end: Callable[[], object]) -> Iterator[None]:
        """Calls `end` once, if the principal's token ends before the block does."""
        if principal.token_id is None:
            yield
            return
        key = object()
        self._waiting[key] = (principal, end)
        self._look_later()
        try:
            yield
        finally:
            self._waiting.pop(key, None)

    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(_LOOK_EVERY, self._look)

    def _look(self) -> None:
        self._timer = None
        for key, (principal, end) in list(self._waiting.items()):
            if not self._tokens.alive(principal):
                del self._waiting[key]
                end()
        if self._waiting:
            self._look_later()
