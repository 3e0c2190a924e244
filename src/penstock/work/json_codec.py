"""
JSON of job functions: results, checkpoints, arguments.

msgspec's forms (dataclasses, datetimes, UUIDs, Structs, enums) and paths. A worker of the runner begins with plain
JSON and imports msgspec for a value that plain JSON cannot carry: most functions never need it.
"""

from __future__ import annotations

import json
import sys
from pathlib import PurePath
from typing import Any

from penstock.core.text import checked_json, json_text


def json_of(value: Any, what: str = "the result") -> str:
    """A value of user code as JSON. Raises TypeError, ValueError or OverflowError where JSON has no form for it."""
    if "msgspec" not in sys.modules:
        try:
            return json_text(value, what)
        except TypeError:
            try:
                import msgspec  # noqa: PLC0415  # see above
            except ImportError:
                msgspec = None  # type: ignore[assignment]  # not installed for this Python
            if msgspec is None:
                raise
    return checked_json(lambda: encode(value), lambda: _builtins(value), what).decode()


def encode(value: Any) -> bytes:
    import msgspec  # noqa: PLC0415  # see above

    return msgspec.json.encode(value, enc_hook=_path_text)


def _builtins(value: Any) -> Any:
    import msgspec  # noqa: PLC0415  # see above

    return msgspec.to_builtins(value, enc_hook=_path_text)


def plain(text: str | bytes) -> Any:
    """Lists, mappings, texts, numbers, booleans, None."""
    return json.loads(text)


def _path_text(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    raise NotImplementedError(f"{type(value).__qualname__} has no form in JSON")


def from_text(kind: type, value: Any) -> Any:
    """For msgspec's decoders: makes a path of its text."""
    if issubclass(kind, PurePath):
        if not isinstance(value, str):
            raise TypeError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")
        return kind(value)
    raise NotImplementedError(f"{kind.__qualname__} cannot be made from JSON")
