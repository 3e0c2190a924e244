"""
JSON of user code as text: what JSON has no form for is refused by its place, and text that cannot be stored is replaced.

Python's own encoders differ: the standard one writes NaN as a word that is no JSON, msgspec writes null in its place. Here both are refused with the same words.
Standard library only, as in `text`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn

from penstock.core.text import storable

__all__ = ["json_text", "parsed", "refuse_not_finite", "storable_json"]

#: Every escape, so that a backslash which is itself escaped begins none. The group: a surrogate without its partner.
_ESCAPES: Final = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\(u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)
_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_WORDS: Final = "JSON has no NaN and no infinity: use None or a text in its place"


def json_text(value: Any, what: str = "the result") -> str:
    """For plain values. ValueError names the place of a NaN; TypeError, ValueError, RecursionError: JSON has no form for it."""
    try:
        return storable(json.dumps(value, allow_nan=False, ensure_ascii=False))
    except ValueError:
        refuse_not_finite(value, what)
        raise


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
    """JSON from outside: lone surrogates are replaced, written as they are or as escapes. It stays the JSON that it was otherwise."""
    text = storable(text)
    return text if _SURROGATE.search(text) is None else _ESCAPES.sub(_replaced, text)


def _replaced(escape: re.Match[str]) -> str:
    return escape[0] if escape[1] is None else r"\ufffd"
