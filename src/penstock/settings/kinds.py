"""
What a value may look like, and how it is shown: one `SettingKind` per sort of value, so that the refusal, the documentation and
the listing of a setting are made from the same words and cannot drift apart.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

from penstock.core.jobs.load import Points
from penstock.core.jobs.outbound import HTTP_PORTS
from penstock.core.jobs.types import HOUR, MILLISECOND, MINUTE, SECOND, Money, Span
from penstock.stores.opening import is_address, shown

__all__ = [
    "Address",
    "SettingKind",
    "address",
    "choice",
    "database",
    "folder",
    "integer",
    "many",
    "money",
    "named",
    "number",
    "optional",
    "points",
    "show_span",
    "span",
    "switch",
    "text",
    "unit_count",
    "web_address",
]

T = TypeVar("T")
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class SettingKind(Generic[T]):
    """`read` raises ValueError when the value is not one; `words` say what would be."""

    words: str
    read: Callable[[object], T]
    show: Callable[[T], str] = str


DAY: Final[Span] = 24 * HOUR
_UNITS: Final = {"ms": MILLISECOND, "s": SECOND, "m": MINUTE, "h": HOUR, "d": DAY}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")


def span(least: Span, most: Span) -> SettingKind[Span]:
    def read(value: object) -> Span:
        found = _span(value)
        if not least <= found <= most:
            raise ValueError
        return found

    return SettingKind(
        f'a span of {show_span(least)} to {show_span(most)}, such as "30s" or "1m30s"', read, show_span
    )


def _span(value: object) -> Span:
    if isinstance(value, str):
        parts = _PART.findall(value)
        if not parts or _PART.sub("", value).strip():
            return round(float(value) * SECOND)
        return round(sum(float(count) * _UNITS[unit] for count, unit in parts))
    return round(_float(value) * SECOND)


def show_span(value: Span) -> str:
    if value == 0:
        return "0s"
    words = ""
    for unit, size in reversed(_UNITS.items()):
        count, value = divmod(value, size)
        words += f"{count}{unit}" if count else ""
    return words or "0s"


def integer(least: int, most: int) -> SettingKind[int]:
    def read(value: object) -> int:
        found = int(value) if isinstance(value, str) else value
        if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= most:
            raise ValueError
        return found

    return SettingKind(f"a whole number of {least} to {most}", read)


def number(least: float, most: float) -> SettingKind[float]:
    def read(value: object) -> float:
        found = _float(value)
        if not least <= found <= most:
            raise ValueError
        return found

    return SettingKind(f"a number of {least:g} to {most:g}", read, lambda value: f"{value:g}")


def _float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError  # noqa: TRY004  # one refusal for all: the words of the kind
    found = float(value)
    if not math.isfinite(found):
        raise ValueError
    return found


def switch() -> SettingKind[bool]:
    def read(value: object) -> bool:
        if isinstance(value, str):
            value = {"true": True, "false": False}.get(value.lower())
        if not isinstance(value, bool):
            raise ValueError  # noqa: TRY004  # one refusal for all: the words of the kind
        return value

    return SettingKind("true or false", read, lambda value: str(value).lower())


def money() -> SettingKind[Money]:
    def read(value: object) -> Money:
        found = round(_float(value) * 1_000_000)
        if found <= 0:
            raise ValueError
        return found

    return SettingKind("an amount above 0, such as 2.50", read, lambda value: f"{value / 1_000_000:g}")


def choice(*words: str) -> SettingKind[str]:
    def read(value: object) -> str:
        if not isinstance(value, str) or value.lower() not in words:
            raise ValueError
        return value.lower()

    return SettingKind(f"one of {', '.join(words)}", read)


def text(words: str, pattern: str = r".{1,1000}") -> SettingKind[str]:
    shape = re.compile(pattern)

    def read(value: object) -> str:
        if not isinstance(value, str) or not shape.fullmatch(value):
            raise ValueError
        return value

    return SettingKind(words, read)


def folder(words: str) -> SettingKind[Path]:
    """A path. `~` is the home directory; a relative one would mean another place at each start, so it is refused."""

    def read(value: object) -> Path:
        if not isinstance(value, (str, Path)) or not str(value):
            raise ValueError
        path = Path(value).expanduser()
        if not path.is_absolute():
            raise ValueError
        return path

    return SettingKind(words, read)


def database() -> SettingKind[str]:
    """Shown without its password, wherever settings are shown."""
    file = folder("")

    def read(value: object) -> str:
        return value if isinstance(value, str) and is_address(value) else str(file.read(value))

    return SettingKind("an absolute path, or postgresql://USER@HOST/NAME", read, shown)


def unit_count() -> SettingKind[int | None]:
    """Fixed capacity, or None: measured."""

    def read(value: object) -> int | None:
        return None if value == "auto" else integer(0, 100).read(value)

    return SettingKind(
        '"auto", or a whole number of 0 to 100', read, lambda value: "auto" if value is None else str(value)
    )


def optional(kind: SettingKind[T]) -> SettingKind[T | None]:
    def read(value: object) -> T | None:
        return None if value == "none" else kind.read(value)

    return SettingKind(
        f'{kind.words}, or "none"', read, lambda value: "none" if value is None else kind.show(value)
    )


def many(kind: SettingKind[T], *, least: int = 0) -> SettingKind[tuple[T, ...]]:
    """From a file a list; from the environment or a flag also words with commas between."""

    def read(value: object) -> tuple[T, ...]:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        elif not isinstance(value, (list, tuple)):
            value = [value]
        if len(value) < least:
            raise ValueError
        return tuple(kind.read(one) for one in value)

    return SettingKind(
        f"a list; each is {kind.words}", read, lambda values: ", ".join(kind.show(one) for one in values)
    )


def named(kind: SettingKind[T], names: SettingKind[K]) -> SettingKind[Mapping[K, T]]:
    def read(value: object) -> Mapping[K, T]:
        if not isinstance(value, dict):
            raise ValueError  # noqa: TRY004  # one refusal for all: the words of the kind
        return {names.read(name): kind.read(one) for name, one in value.items()}

    def show(values: Mapping[K, T]) -> str:
        return "{" + ", ".join(f"{names.show(n)} = {kind.show(v)}" for n, v in values.items()) + "}"

    return SettingKind(f"a table; each name is {names.words}, each value {kind.words}", read, show)


def points() -> SettingKind[Points]:
    """A curve, as `[[2, 1.0], [8, 0.0]]`."""

    def read(value: object) -> Points:
        if not isinstance(value, (list, tuple)) or len(value) < 1:
            raise ValueError
        found = tuple((_float(x), _float(y)) for x, y in value)
        rising = all(a[0] < b[0] for a, b in pairwise(found))
        if not rising or not all(0 <= y <= 1 for _, y in found):
            raise ValueError
        return found

    def show(values: Points) -> str:
        return "[" + ", ".join(f"[{x:g}, {y:g}]" for x, y in values) + "]"

    return SettingKind("a list of [busy score, share of 0 to 1] with rising scores", read, show)


class Address(NamedTuple):
    """Where to listen."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def local(self) -> bool:
        """Nobody on another machine can reach it."""
        return self.host == "localhost" or _is_loopback(self.host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address() -> SettingKind[Address]:
    def read(value: object) -> Address:
        if isinstance(value, Address):
            return value
        if not isinstance(value, str):
            raise ValueError  # noqa: TRY004  # one refusal for all: the words of the kind
        host, _, port = value.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not re.fullmatch(r"[A-Za-z0-9.:-]+", host) or not port.isdigit() or int(port) > 65_535:
            raise ValueError
        return Address(host, int(port))

    return SettingKind('"host:port" or "[::1]:port"', read)


def web_address() -> SettingKind[str]:
    """Whom we call. No user and password in it: addresses are listed and logged."""

    def read(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(r"https?://[A-Za-z0-9.\[\]:_-]+(/[!-~]*)?", value):
            raise ValueError
        parts = urlsplit(value)
        if not parts.hostname or parts.fragment or (parts.port or 443) not in HTTP_PORTS:
            raise ValueError
        return value

    return SettingKind(
        'an address such as "https://example.org/alerts": without user and #, on port 80, 443 or from 1024 on',
        read,
    )
