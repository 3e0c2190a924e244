"""What JSON carries for us: all that msgspec does, and paths."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import msgspec

__all__ = ["encode", "from_text", "plain", "text_of"]


def text_of(value: Any) -> str:
    """What a function returned or saves. Raises TypeError, ValueError or OverflowError where JSON has no form for it."""
    return encode(value).decode()


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
