"""
From bytes to a request type, within limits, with every wrong field named.

The quick way is one pass of msgspec. Only when it refuses is the body taken apart field by field, to name all that is wrong and not
just the first: one round trip then mends them all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final, TypeVar, get_args
from urllib.parse import parse_qsl

import msgspec

from penstock.server.problems import MOST_PROBLEMS, BadFields, NotJson, NotUtf8, TooLarge, TooSlow

MAX_BODY: Final = 1_048_576
MAX_DEPTH: Final = 32
_MAX_QUERY: Final = 8_192
_MOST_DIGITS: Final = 19

T = TypeVar("T", bound=msgspec.Struct)
Receive = Callable[[], Awaitable[Mapping[str, Any]]]


def number(text: bytes) -> int | None:
    """A header's whole number of 0 or more; None for anything else, and for more digits than any number here has."""
    return int(text) if text.isdigit() and len(text) <= _MOST_DIGITS else None


async def read_body(receive: Receive, headers: Mapping[bytes, bytes]) -> bytes:
    """
    Counted as it comes in: a length that was announced is believed only when it is too large. How long it may take is the
    connection's business, which sees the bytes arrive.
    """
    too_large = (number(headers.get(b"content-length", b"0")) or 0) > MAX_BODY
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise TooSlow("the client went away, or was too slow, before its request was complete")
        body = message["body"]
        size += len(body)
        too_large = too_large or size > MAX_BODY
        # What is too large is read on for a while and dropped: a client that still sends would not see the answer.
        if not too_large:
            parts.append(body)
        if not message["more_body"] or size > 16 * MAX_BODY:
            break
    if too_large:
        raise TooLarge(f"the body is larger than {MAX_BODY} bytes", limit=MAX_BODY)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class Decoder:
    """Of one request type."""

    def __init__(self, kind: type[msgspec.Struct]) -> None:
        self.kind = kind
        self._decode = msgspec.json.Decoder(kind).decode

    def __call__(self, body: bytes, headers: Mapping[bytes, bytes]) -> Any:
        content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if content_type != b"application/json":
            raise NotJson("the Content-Type must be application/json")
        if not _is_utf8(body):
            problem = {"field": _not_utf8_in(body), "message": "is not valid UTF-8"}
            raise NotUtf8(f"{problem['field']} {problem['message']}", problems=[problem])
        if too_deep(body):
            raise BadFields(f"the JSON is nested deeper than {MAX_DEPTH}", problems=[_deep()])
        try:
            return self._decode(body)
        except msgspec.ValidationError as error:
            raise _refusal(_or_else(_wrong_in(body, self.kind), _from(error))) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _refusal([{"field": "body", "message": f"is not JSON: {error}"}]) from None
        except RecursionError:
            raise _refusal([_deep()]) from None


def _is_utf8(text: bytes) -> bool:
    try:
        return text.isascii() or bool(text.decode())
    except UnicodeDecodeError:
        return False


def _not_utf8_in(body: bytes, name: str = "", depth: int = 0) -> str:
    """The first field that is not, as `outcomes[2].result`: fields are cut out unread, and looked at one by one."""
    kind: Any = {b"{": dict[str, msgspec.Raw], b"[": list[msgspec.Raw]}.get(body[:1])
    if kind is not None and depth < MAX_DEPTH:
        try:
            parts = msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return name or "body"
        named = (
            parts.items() if isinstance(parts, dict) else ((f"[{n}]", part) for n, part in enumerate(parts))
        )
        for part_name, part in named:
            if not _is_utf8(bytes(part)):
                inner = f"{name}{part_name}" if part_name[:1] == "[" or not name else f"{name}.{part_name}"
                return _not_utf8_in(bytes(part).strip(), inner, depth + 1)
    return name or "body"


def _deep() -> dict[str, str]:
    return {"field": "body", "message": f"must not be nested deeper than {MAX_DEPTH}"}


def _refusal(problems: Iterable[dict[str, str]]) -> BadFields:
    """Lists as many problems as an answer shows, and one more: a megabyte of unknown fields is not worth a list of them all."""
    problems = list(islice(problems, MOST_PROBLEMS + 1))
    first = problems[0]
    return BadFields(f"{first['field']} {first['message']}", problems=problems)


_BRACKETS: Final = bytes.maketrans(b"{}", b"[]")
_REST: Final = bytes(set(range(256)) - set(b"[]{}"))


def too_deep(body: bytes) -> bool:
    """
    Without parsing: everything but the brackets is removed, then each pass removes the innermost level. 32 passes over a
    megabyte of brackets take a few milliseconds, where a loop over its characters would hold the event loop for half a second.
    No regular expression: on a string without an end one starts again at every quote, which takes a minute for 64 KB.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return False
    # Without escapes every quote begins or ends a string, so every second part is outside of strings.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = b"".join(plain.split(b'"')[::2]).translate(_BRACKETS, _REST)
    if b"[" * (MAX_DEPTH + 1) in brackets:
        return True
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"")
        if not brackets:
            return False
    return True


def read_query(query: bytes, kind: type[T]) -> T:
    if len(query) > _MAX_QUERY:
        raise TooLarge(f"the query is longer than {_MAX_QUERY} bytes", limit=_MAX_QUERY)
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=50)
    except ValueError:
        raise _refusal([{"field": "query", "message": "must be name=value pairs in UTF-8"}]) from None
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _refusal([{"field": twice, "message": "must be given once"}])
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _refusal(_or_else(_wrong(values, kind, strict=False), _from(error))) from None


def _or_else(problems: Iterator[dict[str, str]], otherwise: dict[str, str]) -> Iterator[dict[str, str]]:
    yield next(problems, otherwise)
    yield from problems


def _wrong_in(body: bytes, kind: type[msgspec.Struct]) -> Iterator[dict[str, str]]:
    try:
        values = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    if isinstance(values, dict):
        yield from _wrong(values, kind)
    else:
        yield {"field": "body", "message": "must be a JSON object"}


def _wrong(
    values: dict[str, Any], kind: type[msgspec.Struct], *, strict: bool = True
) -> Iterator[dict[str, str]]:
    fields = {field.encode_name: field for field in fields_of(kind)}
    for name in (name for name in values if name not in fields):
        fix = f"is not known here; {kind.__name__} has {', '.join(fields) or 'no fields'}"
        yield {"field": name[:100], "message": fix}
    for name, field in fields.items():
        if name not in values:
            if field.required:
                yield {"field": name, "message": "is missing"}
        elif not _passes_through(field.type):
            try:
                msgspec.convert(values[name], field.type, strict=strict)
            except msgspec.ValidationError as error:
                yield _from(error, name)


def _passes_through(kind: Any) -> bool:
    """Has JSON of the user's in it: that was read as text, and a decoded value cannot be turned into text again."""
    parts = (kind, *get_args(kind))
    return msgspec.Raw in parts or any(
        _passes_through(part) if get_args(part) else _is_struct_with_raw(part) for part in parts[1:]
    )


def _is_struct_with_raw(kind: Any) -> bool:
    return (
        isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and any(msgspec.Raw in (f.type, *get_args(f.type)) for f in fields_of(kind))
    )


def fields_of(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(kind)


def _from(error: msgspec.ValidationError, field: str = "") -> dict[str, str]:
    """The place is behind the last ` - at `: what comes before it may quote the request."""
    message, _, place = str(error).rpartition(" - at ")
    path = place.removeprefix("`key` in ")
    if not message or not (path.startswith("`$") and path.endswith("`")):
        message, path = str(error), "`$`"
    path = path[2:-1]
    name = f"{field}{path}" if field else path.lstrip(".") or "body"
    words = message.replace("`", "").replace(r"$(?!\\n)'", "$'")
    return {"field": name, "message": f"is wrong: {words[:1].lower()}{words[1:]}"}
