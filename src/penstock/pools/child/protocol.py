"""
The messages between a pool and its worker processes, and their form.

A frame is a length and a list of messages, marshalled: for the plain tuples that frames are made of,
`marshal` takes half the time of `pickle`, and both ends are the same interpreter. Arguments and results that
are plain values (numbers, short strings) lie in the message as they are; everything else is pickled on its
own, so that two calls never share an object and one bad argument spoils one call.

Large buffers (NumPy arrays, `bytes`, a long pickle) leave the message: pickle protocol 5 gives them out of
band, and they are copied once into shared memory (see `shared_memory.py`).

A caller gets the very exception that its function raised, with the worker's traceback as `__cause__`, as with
the standard process pool. An exception that does not survive pickling (a constructor with two arguments is
enough) would there break the whole pool; here it becomes a RemoteError with its name, text and traceback.
"""

from __future__ import annotations

import marshal
import math
import pickle
import sys
from collections.abc import Callable
from functools import cache
from struct import Struct
from typing import Any, Final

from penstock.core.errors import NotPicklable, PenstockError
from penstock.core.text import forget_frames, qualified_name, safe_repr, safe_str, traceback_text, type_name
from penstock.pools.child.shared_memory import AVAILABLE as SHARED_MEMORY

#: Buffers of at least this many bytes go into shared memory; below it, the pipe is quicker.
LARGE: Final = 128 * 1024
#: A longer string or bytes is pickled on its own.
SHORT: Final = 4096

# To a worker: (dispatch > 0, function, body, extra), or one of these with its arguments.
DEFINE: Final = -1
CANCEL: Final = -2
FREE: Final = -3
EXIT: Final = -4
MAIN: Final = -5
DROP: Final = -6
SETUP: Final = -7

# From a worker: (dispatch > 0, kind, value, ran_for), FREE, or this with its reason and traceback.
FATAL: Final = -9

PLAIN: Final = 0
PICKLED: Final = 1
ERROR: Final = 2
SKIPPED: Final = 3
SHARED: Final = 4  # like PICKLED, but the value is a reference to shared memory

_length = Struct("<I")
PLAIN_TYPES = frozenset({int, float, bool, type(None), complex})
SHORT_TYPES = frozenset({str, bytes})


#: The last marshal format that keeps no table of objects: for a message or two that table is half of the
#: work.
_FORMAT: Final = 2


def frame(messages: list[tuple[Any, ...]]) -> bytes:
    body = marshal.dumps(messages, _FORMAT)
    return _length.pack(len(body)) + body


class Frames:
    """
    Cuts a stream into messages, and keeps the beginning of a frame whose rest has not arrived. Frames are
    copied out of the read bytes: most are so small that a view of one would take longer to make.
    """

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[Any, ...]]:
        if self._rest:
            data = self._rest + data
        end = len(data)
        if end >= 4 and 4 + _length.unpack_from(data)[0] == end:  # one frame, as mostly
            self._rest = b""
            return marshal.loads(data[4:])  # type: ignore[no-any-return]  # `frame` put a list there
        messages: list[tuple[Any, ...]] = []
        at = 0
        while end - at >= 4 and (stop := at + 4 + _length.unpack_from(data, at)[0]) <= end:
            messages += marshal.loads(data[at + 4 : stop])
            at = stop
        self._rest = data[at:]
        return messages


def is_plain(value: object) -> bool:
    kind = type(value)
    return kind in PLAIN_TYPES or (kind in SHORT_TYPES and len(value) <= SHORT)  # type: ignore[arg-type]  # str, bytes


class _OutOfBand:
    """A long bytes-like argument, pickled out of band and rebuilt with its type on the other side."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._data = data

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return type(self._data), (pickle.PickleBuffer(self._data),)


def _out_of_band(value: Any) -> Any:
    return _OutOfBand(value) if type(value) in (bytes, bytearray) and len(value) >= LARGE else value


def pack_arguments(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, portable: bool = False
) -> tuple[bytes, list[memoryview]]:
    """`fn` is None where the worker has the function already."""
    args = tuple([_out_of_band(value) for value in args])
    kwargs = {name: _out_of_band(value) for name, value in kwargs.items()}
    try:
        return dump((fn, args, kwargs), portable=portable)
    except Exception as error:  # whatever pickling raises: a foreign `__reduce__` may raise anything
        raise NotPicklable(
            f"{_unpicklable_part(fn, args, kwargs)} cannot be sent to a worker process: {safe_str(error)}{advice()}"
        ) from error


def pack_setup(setup: dict[str, Any], *, portable: bool = False) -> bytes:
    """Pickle the setup of a worker. All buffers are in band, because the pickle is kept for restarts."""
    try:
        return dump(setup, large=float("inf"), portable=portable)[0]
    except Exception as error:  # as above
        raise NotPicklable(
            f"the target or initializer cannot be sent to a worker process: {safe_str(error)}{advice()}"
        ) from error


def pack_result(value: Any) -> tuple[int, Any, list[memoryview]]:
    """
    The kind of a result, its form, and its buffers: PLAIN and the value, PICKLED and the pickle, or ERROR.
    """
    if is_plain(value):
        return PLAIN, value, []
    try:
        return PICKLED, *dump(_out_of_band(value))
    except Exception as error:  # noqa: BLE001  # pickling may raise anything
        return ERROR, pack_error(_unsendable(value, error)), []


def _unsendable(value: Any, error: Exception) -> NotPicklable:
    import inspect  # noqa: PLC0415  # only on errors

    if inspect.iscoroutine(value):
        value.close()
        return NotPicklable(
            "the function is `async def`: it gave a coroutine, not a result; call it with asyncio.run"
        )
    return NotPicklable(
        f"the result ({type_name(value)}) cannot be sent back to the caller: {safe_str(error)}{advice()}"
    )


def dump(value: Any, large: float = LARGE, *, portable: bool = False) -> tuple[bytes, list[memoryview]]:
    """
    Pickle a value, with its large buffers out of band; by `cloudpickle` if `pickle` fails and it is
    installed. `portable`: for a machine that may lack the script of `__main__`.
    """
    buffers: list[memoryview] = []

    def in_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < large or not SHARED_MEMORY:
            return True
        buffers.append(raw)
        return False

    try:
        data = pickle.dumps(value, 5, buffer_callback=in_band)
        suffices = b"__main__" not in data or not (portable or main_module() is None)
    except Exception:  # pickling may raise anything
        if cloudpickle() is None:
            raise
        suffices = False
    if not suffices and cloudpickle() is not None:
        buffers.clear()
        data = cloudpickle().dumps(value, 5, buffer_callback=in_band)
    return data, buffers


def pack_key(key: Any) -> Any:
    """
    The key of a call in its form for the worker: plain, or pickled. None if it cannot be pickled: the worker
    can do without it.
    """
    if is_plain(key) and type(key) is not bytes:
        return key
    try:
        return pickle.dumps(key, 5)
    except Exception:  # noqa: BLE001  # whatever pickling raises
        return None


@cache
def cloudpickle() -> Any:
    """The module, or None. Imported on first need: most workers never need it."""
    try:
        import cloudpickle as module  # noqa: PLC0415  # optional
    except ImportError:
        return None
    return module


def advice() -> str:
    if cloudpickle() is not None:
        return ""
    return (
        "; lambdas, closures and functions typed at a prompt need cloudpickle (pip install 'penstock[pools]')"
    )


def _unpicklable_part(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The part of a call that cannot be pickled, in words."""
    parts = [("the function", fn)]
    parts += [(f"argument {place}", value) for place, value in enumerate(args, 1)]
    parts += [(f"argument {safe_repr(name)}", value) for name, value in kwargs.items()]
    for name, value in parts:
        try:
            dump(value)
        except Exception:  # noqa: BLE001  # pickling may raise anything; this is the part that does
            return f"{name} ({safe_repr(value):.80})"
    return "the call"


def main_module() -> tuple[str, str] | None:
    """
    How a worker can import this process's `__main__`: by name or by path. None: not at all (a prompt, `-c`, a
    notebook).
    """
    main = sys.modules["__main__"]
    sys.modules.setdefault("__mp_main__", main)  # results from a worker name it so
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return "name", spec.name
    path = getattr(main, "__file__", None)
    if path is None or getattr(sys, "ps1", None) is not None or not path.endswith((".py", ".pyc", ".pyw")):
        return None
    return "path", path


def by_reference(fn: Callable[..., Any]) -> bool:
    """
    Whether a worker can get this function once and then by its number: it must be importable, so it has no
    state.
    """
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    owner = getattr(fn, "__self__", None)  # of a builtin function: its module
    if module is None or name is None or "<" in name or (owner is not None and type(owner) is not type(sys)):
        return False
    imported: Any = sys.modules.get(module)
    for part in name.split("."):
        imported = getattr(imported, part, None)
    return imported is fn and (module != "__main__" or main_module() is not None)


# Errors


class RemoteTraceback(Exception):  # shown as a cause, never raised
    """The worker's traceback: shown as a cause, never raised."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


class RemoteError(PenstockError):
    """
    The function raised an exception that cannot be rebuilt here: `type_name` and `text` describe it.

    For example:

        try:
            pool.submit(parse, text).result()
        except penstock.RemoteError as remote:
            print(remote.type_name, remote.text)
    """

    code = "remote_error"


def pack_error(error: BaseException) -> bytes:
    text = traceback_text(error)
    forget_frames(error)
    try:
        blob, _ = dump((error, text), large=math.inf)
        pickle.loads(blob)
    except BaseException:  # noqa: BLE001  # a foreign __reduce__ or __init__ may raise anything
        name = qualified_name(error)
        message = f"{name}: {safe_str(error)} (it cannot be pickled, so this stands for it)"
        blob = pickle.dumps((RemoteError(message, type_name=name, text=text), text), 5)
    return blob


def _unpack_error(blob: bytes) -> BaseException:
    error, text = pickle.loads(blob)
    error.__cause__ = RemoteTraceback(text)
    return error  # type: ignore[no-any-return]  # pack_error puts an exception there


def unpack_outcome(kind: int, value: Any, load: Callable[[Any], Any]) -> tuple[Any, BaseException | None]:
    """The result or the error of a call that sent no plain value. `load` rebuilds a result."""
    try:
        return (None, _unpack_error(value)) if kind == ERROR else (load(value), None)
    except Exception as error:  # noqa: BLE001  # unpickling runs the result's own code
        why = f"the result cannot be rebuilt in the caller's process: {safe_repr(error)}"
        return None, NotPicklable(why)
