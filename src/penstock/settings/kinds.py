"""
Kinds of values: how a setting may be written, how it is converted for msgspec, and how it is shown.

A setting is declared once, by its type: `ttl: Annotated[Span, span(SECOND, HOUR)]`. msgspec checks the value
against the type. `kind_of` reads the same type for refusals, documentation and listing, so they agree.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, NamedTuple, Union, get_args, get_origin
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from penstock.core.jobs.alerts import HTTP_PORTS
from penstock.core.jobs.intent import LABEL, LABEL_WORDS
from penstock.core.jobs.types import HOUR, MILLISECOND, MINUTE, SECOND, Money, Span
from penstock.stores.opening import is_address, shown


def _same(value: Any) -> Any:
    return value


class Kind(NamedTuple):
    """
    One kind of value. `words`: what a value may be. `prepare`: converts what people write for msgspec.
    `show`: the inverse of `prepare`.
    """

    words: str
    prepare: Callable[[Any], Any] = _same
    show: Callable[[Any], str] = str


_PLAIN: Final[Mapping[Any, Kind]] = {
    int: Kind("a whole number"),
    float: Kind("a number", show=lambda value: f"{value:g}"),
    bool: Kind("true or false", show=lambda value: str(value).lower()),
}


def kind_of(hint: Any) -> Kind:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        kind = kind_of(args[0])
        for meta in args[1:]:
            kind = _refined(kind, meta) if isinstance(meta, Meta) else kind
        return kind
    if origin in {Union, UnionType}:
        return _optional(kind_of(args[0]))
    if origin is tuple:
        return _list(kind_of(args[0]))
    if origin is Mapping:
        return _table(kind_of(args[0]), kind_of(args[1]))
    return _PLAIN.get(hint, Kind("text"))


def convert(value: object, hint: Any) -> Any:
    """Convert and check a prepared value; "4" is a number too. Raises msgspec.ValidationError."""
    return msgspec.convert(value, hint, strict=not isinstance(value, (str, dict)), dec_hook=_read_path)


def _read_path(kind: type, value: Any) -> Any:
    """Read a path. A relative one is refused: it would depend on where the daemon was started."""
    if kind is not Path or not isinstance(value, (str, Path)) or not Path(value).expanduser().is_absolute():
        raise ValueError(value)
    return Path(value).expanduser()


def _refined(kind: Kind, meta: Meta) -> Kind:
    extra = meta.extra or {}
    words = meta.description or (kind.words if meta.ge is None else f"{kind.words} of {meta.ge} to {meta.le}")
    before = extra.get("prepare", _same)
    return Kind(words, lambda value: kind.prepare(before(value)), extra.get("show", kind.show))


def _optional(kind: Kind) -> Kind:
    return Kind(
        f'{kind.words}, or "none"',
        lambda value: None if value is None or value == "none" else kind.prepare(value),
        lambda value: "none" if value is None else kind.show(value),
    )


def _list(kind: Kind) -> Kind:
    """A list; from the environment or a flag also words with commas between them."""

    def prepare(value: Any) -> list[Any]:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        return [kind.prepare(one) for one in (value if isinstance(value, (list, tuple)) else [value])]

    return Kind(f"a list; each is {kind.words}", prepare, lambda values: ", ".join(map(kind.show, values)))


def _table(names: Kind, kind: Kind) -> Kind:
    return Kind(
        f"a table; each name is {names.words}, each value {kind.words}",
        lambda value: {names.prepare(name): kind.prepare(one) for name, one in value.items()},
        lambda values: "{" + ", ".join(f"{name} = {kind.show(one)}" for name, one in values.items()) + "}",
    )


def _meta(words: str, prepare: Any = _same, show: Any = str, **limits: Any) -> Meta:
    return Meta(description=words, extra={"prepare": prepare, "show": show}, **limits)


def text(words: str, pattern: str) -> Meta:
    return Meta(pattern=rf"\A(?:{pattern})\Z", description=words)


def choice(words: Iterable[str]) -> Meta:
    words = list(words)
    pattern = rf"\A(?:{'|'.join(words)})\Z"
    return _meta(f"one of {', '.join(words)}", lambda value: value.lower(), pattern=pattern)


DAY: Final[Span] = 24 * HOUR
_UNITS: Final = {"ms": MILLISECOND, "s": SECOND, "m": MINUTE, "h": HOUR, "d": DAY}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")


def span(least: Span, most: Span) -> Meta:
    words = f'a span of {show_span(least)} to {show_span(most)}, such as "30s" or "1m30s"'
    return _meta(words, _read_span, show_span, ge=least, le=most)


def _read_span(value: Any) -> Span:
    if isinstance(value, str):
        parts = _PART.findall(value)
        if parts and not _PART.sub("", value).strip():
            return round(sum(float(count) * _UNITS[unit] for count, unit in parts))
    return round(_number(value) * SECOND)


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError(value)
    return float(value)


def show_span(value: Span) -> str:
    words = ""
    for unit, size in reversed(_UNITS.items()):
        count, value = divmod(value, size)
        words += f"{count}{unit}" if count else ""
    return words or "0s"


Count = Annotated[int, Meta(ge=0, le=1_000_000_000)]
Score = Annotated[float, Meta(ge=0, le=10)]

PemFile = Annotated[Path, Meta(description="the path of a PEM file")]
FilePath = Annotated[Path, Meta(description="the path of a file")]
Directory = Annotated[Path, Meta(description="an absolute path")]
DataDirectory = Annotated[Path, Meta(description="an absolute path, or one that begins with ~")]

_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9_.:/@-]{0,127}"
JobTypeName = Annotated[str, text("the name of an addon or a job type", _NAME)]
AddonPattern = Annotated[str, text('the name of an addon, or "*" for all others', rf"\*|{_NAME}")]
ConstraintName = Annotated[str, choice(["cpu_heavy", "disk_write_heavy", "network_heavy"])]
Label = Annotated[str, text(LABEL_WORDS, LABEL.pattern)]
DaemonName = Annotated[str, text("1 to 128 letters, digits and ._:@-", r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")]
HostName = Annotated[str, text("a host name, with or without a port", r"[A-Za-z0-9.:\[\]-]{1,255}")]
IpAddress = Annotated[str, text("an IP address", r"[0-9a-fA-F.:]{2,45}")]
SchemaName = Annotated[str, text("the name of a schema", r"[a-z_][a-z0-9_]{0,62}")]
UserName = Annotated[str, text("the name of an operating system user", r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")]
Argument = Annotated[str, text("a program or an argument of it", r"[^\0]{1,4000}")]
FunctionName = Annotated[
    str,
    text(
        "module:name, or module:* for what a module defines or has in __all__",
        r"[A-Za-z_][\w.]*:(\*|[A-Za-z_]\w*)",
    ),
]
VariableName = Annotated[
    str, text("the name of a variable; a trailing * stands for any ending", r"[A-Za-z_]\w*\*?")
]


def _read_money(value: Any) -> Money:
    return round(_number(value) * 1_000_000)


def _show_money(value: Money) -> str:
    return f"{value / 1_000_000:g}"


Amount = Annotated[Money, _meta("an amount above 0, such as 2.50", _read_money, _show_money, ge=1)]

#: A fixed capacity. None: the capacity is measured.
Units = Annotated[
    Annotated[int, Meta(ge=0, le=100)] | None,
    _meta(
        '"auto", or a whole number of 0 to 100',
        lambda value: None if value == "auto" else value,
        lambda value: "auto" if value is None else str(value),
    ),
]


def _rising(value: Any) -> Any:
    if any(one[0] >= following[0] for one, following in pairwise(value)):
        raise ValueError(value)
    return value


Curve = Annotated[
    tuple[tuple[float, Annotated[float, Meta(ge=0, le=1)]], ...],
    _meta(
        "a list of [busy score, share of 0 to 1] with rising scores",
        _rising,
        lambda values: "[" + ", ".join(f"[{x:g}, {y:g}]" for x, y in values) + "]",
        min_length=1,
    ),
]


def _read_database(value: Any) -> str:
    return value if isinstance(value, str) and is_address(value) else str(_read_path(Path, value))


#: Settings are always shown without the password of this address.
DatabaseAddress = Annotated[
    str, _meta("an absolute path, or postgresql://USER@HOST/NAME", _read_database, shown)
]


class Address(NamedTuple):
    """An address to listen on."""

    host: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9.:-]+\Z")]
    port: Annotated[int, Meta(ge=0, le=65_535)]

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the address."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def _read_listen(value: str) -> tuple[str, int]:
    host, _, port = value.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


ListenAddress = Annotated[Address, _meta('"host:port" or "[::1]:port"', _read_listen)]


def _read_web_address(value: str) -> str:
    parts = urlsplit(value)
    if not parts.hostname or parts.fragment or (parts.port or 443) not in HTTP_PORTS:
        raise ValueError(value)
    return value


#: An address that the daemon calls. A user or password in it is refused, because addresses are listed and
#: logged.
WebAddress = Annotated[
    str,
    _meta(
        'an address such as "https://example.org/alerts": no user, no #, port 80, 443 or from 1024 on',
        _read_web_address,
        pattern=r"\Ahttps?://[A-Za-z0-9.\[\]:_-]+(/[!-~]*)?\Z",
    ),
]
