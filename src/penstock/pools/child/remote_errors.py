"""
Exceptions that cross from a worker process to the caller.

The caller gets the very exception, with the worker's traceback as its `__cause__`, as with the standard process pool.
An exception that does not survive pickling (many do not: a constructor with two arguments is enough) would there take
the whole pool down; here it becomes a RemoteError that says what it was.
"""

from __future__ import annotations

import math
import pickle

from penstock.core.errors import NotPicklable, PenstockError
from penstock.core.text import forget_frames, qualified_name, safe_repr, safe_str, traceback_text
from penstock.pools.child import protocol


class RemoteTraceback(Exception):  # shown as a cause, never raised
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


class RemoteError(PenstockError):
    """The function raised something that cannot be rebuilt here. `type_name` and `text` say what."""

    code = "remote_error"


def pack_error(error: BaseException) -> bytes:
    text = traceback_text(error)
    forget_frames(error)
    try:
        blob, _ = protocol.dump((error, text), large=math.inf)
        pickle.loads(blob)
    except BaseException:  # noqa: BLE001  # a foreign __reduce__ or __init__ may raise anything
        name = qualified_name(error)
        message = f"{name}: {safe_str(error)} (it cannot be pickled, so this stands for it)"
        blob = pickle.dumps((RemoteError(message, type_name=name, text=text), text), 5)
    return blob


def unpack_error(blob: bytes) -> BaseException:
    error, text = pickle.loads(blob)
    error.__cause__ = RemoteTraceback(text)
    return error  # type: ignore[no-any-return]  # pack_error puts an exception there


def cannot_be_rebuilt(error: Exception) -> NotPicklable:
    return NotPicklable(f"the result cannot be rebuilt in the caller's process: {safe_repr(error)}")
