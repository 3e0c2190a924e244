"""
JSON of user code as text: what JSON has no form for is refused by its place, and text that cannot be stored is replaced.

Python's own encoders differ: the standard one writes NaN as a word that is no JSON, msgspec writes null in its place. Here both are refused with the same words.
Standard library only, as in `text`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NoReturn

from penstock.core.text import is_storable, storable

__all__ = ["checked_json", "json_text", "parsed", "refuse_not_finite", "storable_json"]

_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_WORDS: Final = "JSON has no NaN and no infinity: use None or a text in its place"


def json_text(value: Any, what: str = "the result") -> str:
    """For plain values. ValueError names the place of a NaN; TypeError, ValueError, RecursionError: JSON has no form for it."""
    try:
        return storable(json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")))
    except ValueError:
        refuse_not_finite(value, what)
        raise


def checked_json(encode: Callable[[], bytes], plain: Callable[[], Any], what: str = "the result") -> bytes:
    """
    For the encoders of others. `encode` may write null for NaN and may refuse lone surrogates; only then `plain` is asked for the value in lists,
    mappings and plain values.
    """
    try:
        text = encode()
    except UnicodeEncodeError:
        return json_text(plain(), what).encode()
    if b"null" in text:
        refuse_not_finite(plain(), what)
    return text


def parsed(text: str | bytes | bytearray) -> Any:
    """As `json.loads`, but NaN and Infinity are refused: they are no JSON, and readers in other languages fail on them."""
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
    """JSON from outside: lone surrogates are replaced, written as they are or as escapes. Without them it stays as it is."""
    text = storable(text)
    if _SURROGATE.search(text) is None:
        return text
    try:
        plain = json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return text  # no JSON: that is said elsewhere
    return text if is_storable(plain) else storable(plain)
