"""
Text, objects and JSON of user code, made safe to store and to show.

An exception message, a result, a file name or a log line can hold characters that no database stores (lone
surrogates, NUL). The `__str__` or `__repr__` of an object can raise anything. Every boundary to user code
calls these functions, so neither can break what is around it. A value that JSON cannot carry is refused by
its path in the value: the standard encoder writes NaN as a word that is not JSON, msgspec writes null in
its place; here both are refused with the same words.

Standard library only: pools and graphs use it, and so do worker processes of a Python that has nothing else
installed.
"""

from __future__ import annotations

import json
import math
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final, NoReturn, TypeGuard, TypeVar

E = TypeVar("E", bound=BaseException)

#: Characters of an error that are kept.
MAX_ERROR: Final = 16_000
_SURROGATES: Final = re.compile("[\ud800-\udfff]")
_REPLACED: Final = "\N{REPLACEMENT CHARACTER}"
#: PostgreSQL cannot store the character NUL in a text.
_NUL: Final = "\N{SYMBOL FOR NULL}"


_LOWER: Final = {ord(letter): ord(letter) + 32 for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}


def ascii_lower(text: str) -> str:
    """A to Z as a to z and nothing else, as databases of every locale do it."""
    return text.translate(_LOWER)


def storable(text: str | bytes, most: int | None = None) -> str:
    """
    Valid UTF-8 without NUL. Each bad byte or character becomes a visible sign; `most`: a longer text loses
    its middle.
    """
    if isinstance(text, bytes | bytearray | memoryview):
        text = bytes(text).decode(errors="replace")
    elif type(text) is not str:
        text = str.__str__(text)  # a subclass can override everything that follows
    if not text.isascii():
        text = _SURROGATES.sub(_REPLACED, text)
    if "\0" in text:
        text = text.replace("\0", _NUL)
    return text if most is None else shortened(text, most)


def is_storable(text: str) -> bool:
    return "\0" not in text and (text.isascii() or _SURROGATES.search(text) is None)


def shortened(text: str, most: int) -> str:
    """Keeps the beginning and the end, which say most."""
    if len(text) <= most:
        return text
    half = max(0, most - 60) // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[len(text) - half :]}"


def safe_str(value: object, most: int | None = MAX_ERROR) -> str:
    return _formatted(str, value, most)


def safe_repr(value: object, most: int | None = MAX_ERROR) -> str:
    return _formatted(repr, value, most)


def _formatted(form: Callable[[Any], str], value: object, most: int | None) -> str:
    try:
        return storable(form(value), most)
    except BaseException as error:  # noqa: BLE001  # user code may raise anything, SystemExit included
        return f"<{type_name(value)}: {form.__name__}() raised {type_name(error)}>"


def type_name(value: object) -> str:
    try:
        return storable(type(value).__name__, 200)
    except BaseException:  # noqa: BLE001  # a metaclass is user code too
        return "object of an unnamed type"


def error_line(error: BaseException) -> str:
    """What it is and what it says: `ValueError: no such file`."""
    return f"{type_name(error)}: {safe_str(error)}"


def qualified_name(value: object) -> str:
    """As a traceback names a type."""
    try:
        module, name = storable(type(value).__module__, 200), storable(type(value).__qualname__, 200)
    except BaseException:  # noqa: BLE001  # as above
        return type_name(value)
    return name if module in ("builtins", "__main__") else f"{module}.{name}"


def error_text(error: BaseException, most: int = MAX_ERROR) -> str:
    """Its line, then the traceback without the frames of Penstock at the top."""
    message = safe_str(error, most)
    line = f"{qualified_name(error)}: {message}" if message else qualified_name(error)
    return storable(f"{line}\n{traceback_text(error)}", most)


def traceback_text(error: BaseException) -> str:
    try:
        frames = _user_frames(_FRAMES.__get__(error))
        return storable("".join(traceback.format_exception(type(error), error, frames)))
    except BaseException:  # noqa: BLE001  # notes, causes, source loaders and suggestions all run user code
        return f"{error_line(error)}\n(its traceback cannot be formatted)\n"


def forget_frames(error: BaseException) -> None:
    """They hold every local variable of the call."""
    _FRAMES.__set__(error, None)


#: Read and written past what a class may override.
_FRAMES: Final[Any] = BaseException.__dict__["__traceback__"]


def _user_frames(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and str(frames.tb_frame.f_globals.get("__name__", "")).startswith("penstock."):
        frames = frames.tb_next
    return frames


def add_note(error: BaseException, note: str) -> None:
    try:
        BaseException.add_note(error, note)
    except BaseException:  # noqa: BLE001  # `__notes__` can be anything: then there is no note
        return


def is_kind(error: object, kinds: type[E] | tuple[type[E], ...]) -> TypeGuard[E]:
    """`isinstance` without a look at `__class__`, which user code can override with what raises."""
    return issubclass(type(error), kinds)


_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_WORDS: Final = "JSON has no NaN and no infinity: use None or a text in its place"


def json_text(value: Any, what: str = "the result") -> str:
    """
    For plain values. ValueError names the place of a NaN; TypeError, ValueError, RecursionError: JSON has no
    form for it.
    """
    try:
        return storable(json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")))
    except ValueError:
        refuse_not_finite(value, what)
        raise


def checked_json(encode: Callable[[], bytes], plain: Callable[[], Any], what: str = "the result") -> bytes:
    """
    For the encoders of others. `encode` may write null for NaN and may refuse lone surrogates; only then
    `plain` is asked for the value in lists, mappings and plain values.
    """
    try:
        text = encode()
    except UnicodeEncodeError:
        return json_text(plain(), what).encode()
    if b"null" in text:
        refuse_not_finite(plain(), what)
    return text


def parsed(text: str | bytes | bytearray) -> Any:
    """
    As `json.loads`, but NaN and Infinity are refused: they are not JSON, and readers in other languages fail
    on them.
    """
    return json.loads(text, parse_constant=_refuse)


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"it holds {word}: {_WORDS}")


def refuse_not_finite(value: Any, what: str = "the result") -> None:
    """ValueError, with the place of the first NaN or infinity in lists, tuples and mappings."""
    try:
        place, number = next(_not_finite(value, ""), ("", ""))
    except RecursionError:
        return  # it contains itself, which every encoder refuses
    if number:
        where = f" at {place}" if place else ""
        raise ValueError(f"{what} holds {number}{where}: {_WORDS}")


def _not_finite(value: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, float):
        if not math.isfinite(value):
            yield place, _name(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _not_finite(item, f"{place}[{storable(repr(key), 60)}]")
    elif isinstance(value, list | tuple | set | frozenset):
        for number, item in enumerate(value):
            yield from _not_finite(item, f"{place}[{number}]")


def _name(value: float) -> str:
    return "NaN" if math.isnan(value) else "infinity" if value > 0 else "-infinity"


def storable_json(text: str) -> str:
    """
    JSON from outside: lone surrogates are replaced, written as they are or as escapes. Without them it stays
    as it is.
    """
    text = storable(text)
    if _SURROGATE.search(text) is None:
        return text
    try:
        plain = json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return text  # it is not JSON, which another check reports
    return text if is_storable(plain) else storable(plain)
