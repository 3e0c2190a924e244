"""What JSON carries for us: all that msgspec does, and paths."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import msgspec

from penstock.core.json_text import checked_json

__all__ = ["encode", "from_text", "plain", "text_of"]


def text_of(value: Any, what: str = "the result") -> str:
    """What a function returned or saves. Raises TypeError, ValueError or OverflowError where JSON has no form for it."""
    return checked_json(
        lambda: encode(value), lambda: msgspec.to_builtins(value, enc_hook=_to_text), what
    ).decode()


def plain(text: str) -> Any:
    return msgspec.json.decode(text)


def encode(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=_to_text)


def _to_text(value: Any) -> Any:
    if isinstance(value, PurePath):
        return str(value)
    raise NotImplementedError(f"{type(value).__qualname__} has no form in JSON")


def from_text(kind: type, value: Any) -> Any:
    if issubclass(kind, PurePath):
        if not isinstance(value, str):
            raise TypeError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")
        return kind(value)
    raise NotImplementedError(f"{kind.__qualname__} cannot be made from JSON")
