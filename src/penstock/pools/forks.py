"""
Copies of this process that are made by `os.fork`.

A copy has our descriptors and our objects and none of our threads. In a copy of a program its pools refuse calls: their
workers belong to the other process. A copy that is made by a function inside a worker ends when that function returns:
if it went on, it would take the worker's next calls and answer in its name.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import NoReturn, Protocol


class Forkable(Protocol):
    def abandon(self) -> None:
        """Called in the copy, before any other code runs there."""


def watch_forks(part: Forkable) -> None:
    """Have this part told when it finds itself in a copy, for as long as it lives."""
    _parts.add(part)


def end_copy(error: BaseException | None) -> NoReturn:
    """
    Leave as a program leaves whose main function returned or raised `error`, without the end of a whole program: what is
    registered to run then belongs to the process that was copied.
    """
    code = 0
    try:
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        elif error is not None:
            code = 1
            sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


_parts: weakref.WeakSet[Forkable] = weakref.WeakSet()


def _abandon_all() -> None:
    for part in list(_parts):
        part.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
