"""
One request: reads its headers, query and body within limits, names every wrong field, and sends the answer.

msgspec decodes a body in one pass. If that fails, the body is decoded again field by field, to name all wrong
fields and not just the first: then the client can correct them all at once.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from functools import cache
from itertools import islice
from typing import Any, Final, Generic, TypeVar, get_args
from urllib.parse import parse_qsl

import msgspec
from msgspec import Raw, UnsetType

from penstock.core.errors import NotFound
from penstock.core.jobs.job import Dispatch, Event, Job
from penstock.core.jobs.types import AddonId, DispatchId, JobId, member_of, when
from penstock.core.jobs.viewer import Viewer
from penstock.server.app_state import AppState
from penstock.server.connections import HttpConnection
from penstock.server.problems import (
    MOST_PROBLEMS,
    BadFields,
    Forbidden,
    NotJson,
    NotUtf8,
    OverLimit,
    TooLarge,
    TooSlow,
    naming_fields,
)
from penstock.server.tokens import Principal
from penstock.stores.api import Store
from penstock.wire.common import PATTERN_WORDS

T = TypeVar("T")
Q = TypeVar("Q")
B = TypeVar("B")
S = TypeVar("S", bound=msgspec.Struct)
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]
#: The name of a field, and what is wrong with it.
Problem = tuple[str, str]

#: The most seconds between two checks of a waiting request: some changes (an earliest start has come, the
#: machine is quiet) cause no event.
_LOOK_AGAIN: Final = 2.0


@dataclass(slots=True)
class Request(Generic[Q, B]):
    """
    A request, as its handler gets it. The application sets `principal`, `path` (the value of the path's
    parameter), `query` and `body`.
    """

    app_state: AppState
    scope: MutableMapping[str, Any]
    receive: Receive
    send: Send
    headers: dict[bytes, bytes] = field(init=False)
    connection: HttpConnection = field(init=False)
    store: Store = field(init=False)
    principal: Principal = field(init=False)
    path: str = field(init=False)
    query: Q = field(init=False)
    body: B = field(init=False)
    #: True for a request that may wait: its token may end meanwhile.
    waits: bool = False
    #: The future that `watch` returns, once it was called.
    gone: asyncio.Future[Any] | None = None

    def __post_init__(self) -> None:
        self.headers = dict(self.scope["headers"])
        self.connection, self.store = self.scope["penstock.connection"], self.app_state.store

    @property
    def token(self) -> str | None:
        """The bearer token of the request."""
        scheme, _, secret = self.headers.get(b"authorization", b"").partition(b" ")
        return secret.strip().decode("latin-1") if scheme.lower() == b"bearer" else None

    @property
    def job_id(self) -> JobId:
        return JobId(self.path)

    # what the token may see and ask for

    @property
    def viewer(self) -> Viewer | None:
        """
        Removes the names of other addons from an answer, for a token that is bound to one. None: the token
        may see all addons.
        """
        addon_id = self.principal.addon_id
        if addon_id is None:
            return None
        owners = self.app_state.event_addons
        return Viewer(AddonId(addon_id), lambda job_id: owners.of_job(job_id) == addon_id)

    def addon(self, name: str | None) -> AddonId | None:
        """The addon to search: that of a bound token, else the one that the request names."""
        bound = self.principal.addon_id
        if bound is not None and name is not None and name != bound:
            raise NotFound(f"there is no addon {name}", addon_id=name)
        chosen = name if bound is None else bound
        return None if chosen is None else AddonId(chosen)

    def owns(self, addon_id: str) -> bool:
        return self.principal.addon_id in (None, addon_id)

    def own_job(self, job_id: JobId) -> Job:
        """
        The job, if the token may see it; else NotFound. So a job of another addon gets the same answer as one
        that does not exist.
        """
        job = self.store.job(job_id)
        if job is None or not self.owns(job.intent.addon_id):
            raise NotFound(self._why_no_job(job_id), job_id=job_id)
        return job

    def _why_no_job(self, job_id: JobId) -> str:
        """Why there is no such job. An index of an array may have no job yet, or no longer."""
        member = member_of(job_id)
        record = self.store.array(job_id if member is None else member[0])
        if record is None or not self.owns(record.array.intent.addon_id):
            return f"there is no job {job_id}"
        if member is None:
            return f"{job_id} is an array: `penstock array` shows, waits for, cancels and retries it"
        return self.app_state.service.arrays.why_no_job(record, member[1])

    def own_lease(self, lease_id: str) -> Dispatch:
        lease = self.store.dispatch(DispatchId(lease_id))
        if lease is None or not self.owns(lease.addon_id):
            raise NotFound(f"there is no lease {lease_id}", lease_id=lease_id)
        return lease

    def check_unbound(self, reason: str) -> None:
        """Refuse a token that is bound to an addon."""
        if self.principal.addon_id is not None:
            raise Forbidden(f"this token is bound to addon {self.principal.addon_id}{reason}")

    def check_limits(self, cost_units: int, priority: int, at: str = "") -> None:
        """Refuse units or a priority beyond the limits of the token."""
        problems = [
            (f"{at}{name}", f"must be at most {most} with this token")
            for name, value, most in (
                ("cost_units", cost_units, self.principal.max_cost_units),
                ("priority", priority, self.principal.max_priority),
            )
            if most is not None and value > most
        ]
        if problems:
            raise naming_fields(OverLimit, *problems)

    # running and waiting

    def run(self, function: Callable[..., T], *args: Any) -> Awaitable[T]:
        """
        Call `function` in a thread, within the client's share of the threads. The tokens of one addon have
        one share together.
        """
        return self.app_state.pool.run(self.principal.addon_id or self.principal.name, function, *args)

    async def poll(
        self,
        wait_sec: float,
        look: Callable[[], Awaitable[T]],
        is_enough: Callable[[T], object],
        wants: Callable[[Event], bool],
    ) -> T:
        """
        Call `look` again after each event that `wants` accepts, until the answer is enough, the time is over,
        or the client has gone. Without a time to wait: call it once.
        """
        if not wait_sec:
            return await look()
        loop = self.app_state.loop
        until = loop.time() + wait_sec
        gone = self.watch()
        async with self.app_state.event_hub as hub:
            while True:
                seen = hub.position
                answer = await look()
                remaining = until - loop.time()
                if is_enough(answer) or remaining <= 0 or gone.done() or hub.closed:
                    return answer
                await self.unless_gone(hub.wait(seen, min(remaining, _LOOK_AGAIN), wants))

    async def unless_gone(self, waiting: Coroutine[Any, Any, T]) -> T | None:
        """The result of `waiting`; None if the client goes away before."""
        task = asyncio.ensure_future(waiting)
        try:
            await asyncio.wait((self.watch(), task), return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()

    def watch(self) -> asyncio.Future[Any]:
        """
        A future that completes when the client has gone away or its token has ended. Made on demand: only
        handlers that wait need it.
        """
        if self.gone is None:
            self.gone = asyncio.ensure_future(self._until_gone())
        return self.gone

    async def _until_gone(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def end(self) -> None:
        """
        End the request as if the client had gone: its handler stops waiting, and gives back claimed jobs.
        """
        self.watch().cancel()

    # reading and answering

    async def read_body(self) -> bytes:
        """
        The whole body, at most `MAX_BODY` bytes. Bytes are counted as they arrive; the announced length is
        used only to refuse early. The connection limits the time.
        """
        too_large = (number(self.headers.get(b"content-length", b"0")) or 0) > MAX_BODY
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise TooSlow("the client went away, or was too slow, before its request was complete")
            body = message["body"]
            size += len(body)
            too_large = too_large or size > MAX_BODY
            # Read and drop some of a body that is too large: a client that still sends would not read the
            # answer.
            if not too_large:
                parts.append(body)
            if not message["more_body"] or size > 16 * MAX_BODY:
                break
        if too_large:
            raise TooLarge(f"the body is larger than {MAX_BODY} bytes", limit=MAX_BODY)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def answer(self, status: int, body: bytes, headers: Iterable[Header]) -> None:
        length = [] if status == 304 else [(b"content-length", b"%d" % len(body))]
        sent = [*headers, *length]
        await self.send({"type": "http.response.start", "status": status, "headers": sent})
        await self.send(
            {"type": "http.response.body", "body": body if self.scope["method"] != "HEAD" else b""}
        )


# from bytes to a request type

MAX_BODY: Final = 1_048_576
MAX_DEPTH: Final = 32
_MAX_QUERY: Final = 8_192
_MOST_DIGITS: Final = 19


def number(text: bytes) -> int | None:
    """
    The value of a header as a whole number, 0 or more; None: it is something else, or has too many digits.
    """
    return int(text) if text.isdigit() and len(text) <= _MOST_DIGITS else None


class Decoder:
    """Decodes bodies of one request type."""

    def __init__(self, kind: type[msgspec.Struct]) -> None:
        self.kind = kind
        self._decode = msgspec.json.Decoder(kind).decode

    def __call__(self, body: bytes, headers: Mapping[bytes, bytes]) -> Any:
        content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if content_type != b"application/json":
            raise NotJson("the Content-Type must be application/json")
        if not _is_utf8(body):
            raise naming_fields(NotUtf8, (_field_not_utf8(body), "is not valid UTF-8"))
        if too_deep(body):
            raise naming_fields(BadFields, _TOO_DEEP)
        try:
            return self._decode(body)
        except msgspec.ValidationError as error:
            raise _refusal(_problems_in(body, self.kind), _problem_of(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise naming_fields(BadFields, ("body", f"is not valid JSON: {error}")) from None
        except RecursionError:
            raise naming_fields(BadFields, _TOO_DEEP) from None


def _is_utf8(text: bytes) -> bool:
    try:
        return text.isascii() or bool(text.decode())
    except UnicodeDecodeError:
        return False


def _field_not_utf8(body: bytes, name: str = "", depth: int = 0) -> str:
    """
    The name of the first field that is not UTF-8, such as `outcomes[2].result`.
    """
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
                return _field_not_utf8(bytes(part).strip(), inner, depth + 1)
    return name or "body"


_TOO_DEEP: Final = ("body", f"must not be nested deeper than {MAX_DEPTH}")


def _refusal(problems: Iterable[Problem], otherwise: Problem) -> BadFields:
    """
    A refusal with at most one problem more than an answer lists, so that the answer can say that there are
    more. `otherwise`: the problem if none is found.
    """
    return naming_fields(BadFields, *(list(islice(problems, MOST_PROBLEMS + 1)) or [otherwise]))


_BRACKETS: Final = bytes.maketrans(b"{}", b"[]")
_REST: Final = bytes(set(range(256)) - set(b"[]{}"))


def too_deep(body: bytes) -> bool:
    """
    Whether the body is nested too deep, found without parsing it: remove everything but the brackets, then
    the innermost level in each pass. 32 passes over a megabyte of brackets take a few milliseconds. A loop
    over its characters would block the event loop for half a second. A regular expression would start again
    at every quote of an unterminated string, which takes a minute for 64 KB.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return False
    # Without escapes each quote begins or ends a string, so every second part is outside of strings.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = b"".join(plain.split(b'"')[::2]).translate(_BRACKETS, _REST)
    if b"[" * (MAX_DEPTH + 1) in brackets:
        return True
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"")
        if not brackets:
            return False
    return True


def read_query(query: bytes, kind: type[S]) -> S:
    if len(query) > _MAX_QUERY:
        raise TooLarge(f"the query is longer than {_MAX_QUERY} bytes", limit=_MAX_QUERY)
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=50)
    except ValueError:
        raise naming_fields(BadFields, ("query", "must be name=value pairs in UTF-8")) from None
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise naming_fields(BadFields, (twice, "must be given once"))
    try:
        return _convert(values, kind)
    except msgspec.ValidationError as error:
        raise _refusal(_field_problems(values, kind, _convert), _problem_of(error)) from None


def _convert(value: Any, kind: type[T]) -> T:
    return msgspec.convert(value, kind, strict=False)


def _problems_in(body: bytes, kind: type[msgspec.Struct]) -> Iterator[Problem]:
    """The problems of all fields of a body: each field is decoded by itself."""
    try:
        values = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        yield "body", "must be a JSON object"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    else:
        yield from _field_problems(
            values, kind, lambda value, wanted: msgspec.json.decode(value, type=wanted)
        )


def _field_problems(
    values: Mapping[str, Any], kind: type[msgspec.Struct], read: Callable[[Any, Any], object]
) -> Iterator[Problem]:
    fields = {one.encode_name: one for one in msgspec.structs.fields(kind)}
    for name in (name for name in values if name not in fields):
        yield name[:100], f"is not a field of {kind.__name__}, which has {', '.join(fields) or 'no fields'}"
    for name, one in fields.items():
        if name in values:
            try:
                read(values[name], one.type)
            except msgspec.ValidationError as error:
                yield _problem_of(error, name, one.type)
        elif one.required:
            yield name, "is missing"


def _problem_of(error: msgspec.ValidationError, field: str = "", kind: Any = None) -> Problem:
    """
    The field and the problem in a message of msgspec. The field is after the last ` - at `. `kind`: its type.
    """
    message, _, place = str(error).rpartition(" - at ")
    path = place.removeprefix("`key` in ")
    if not message or not (path.startswith("`$") and path.endswith("`")):
        message, path = str(error), "`$`"
    path = path[2:-1]
    name = f"{field}{path}" if field else path.lstrip(".") or "body"
    if (words := pattern_words(message) or _kind_words(message)) is not None:
        return name, words
    if message.startswith("Invalid enum value") and (choices := list(_choices(kind))):
        return name, f"must be one of {', '.join(choices)}"
    words = message.replace("`", "")
    return name, f"is wrong: {words[:1].lower()}{words[1:]}"


def pattern_words(message: str) -> str | None:
    """The violated pattern of a message, in words. None: the message is not about a pattern."""
    _, is_pattern, pattern = message.partition("` matching regex ")
    if not is_pattern:
        return None
    return _PATTERN_WORDS.get(pattern, "has characters that are not allowed here")


def _choices(kind: Any) -> Iterator[str]:
    """The texts that a field of this type may have, if they are listed."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        yield from (str(one.value) for one in kind)
    for part in get_args(kind):
        if isinstance(part, str):
            yield part
        else:
            yield from _choices(part)


_KINDS: Final = {
    "str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "array": "a list",
    "object": "an object", "null": "null", "datetime": "a moment",
}  # fmt: skip
_BOUNDS: Final = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
_EXPECTED: Final = re.compile(
    r"Expected `(?P<kinds>[a-z |]+)`(?P<length> of length)?"
    r"(?: (?P<bound>[<>]=?) (?P<number>[-+.e\d]+))?(?:, got `(?P<got>[a-z]+)`)?"
)


def _kind_words(message: str) -> str | None:
    """What a value must be, in words. None: the message is about something else."""
    if message in ("Invalid RFC3339 encoded datetime", "Expected `datetime` with a timezone component"):
        return "must be a moment of RFC 3339 with its offset, such as 2026-12-24T18:00:00Z"
    if message == "Integer value out of range":
        return "is too large"
    expected = _EXPECTED.fullmatch(message)
    if expected is None or not all(kind in _KINDS for kind in expected["kinds"].split(" | ")):
        return None
    kinds = [_KINDS[kind] for kind in expected["kinds"].split(" | ")]
    if expected["bound"] is not None:
        number = expected["number"].removesuffix(".0")
        if not expected["length"]:
            return f"must be {_BOUNDS[expected['bound']]} {number}"
        if (expected["bound"], number) == (">=", "1"):
            return "must not be empty"
        unit = "characters" if expected["kinds"] == "str" else "entries"
        return f"must have {_BOUNDS[expected['bound']]} {number} {unit}"
    got = _KINDS.get(expected["got"] or "")
    return f"must be {' or '.join(kinds)}" + (f", not {got}" if got else "")


#: By pattern, as a message quotes it.
_PATTERN_WORDS: Final = {repr(pattern): words for pattern, words in PATTERN_WORDS.items()}


def or_none(value: T | UnsetType) -> T | None:
    return None if isinstance(value, UnsetType) else value


def json_text(json: Raw | UnsetType) -> str:
    return "null" if isinstance(json, UnsetType) else bytes(json).decode()


# from values to an answer


def raw_json(text: str | None) -> Raw:
    return Raw(b"null" if text is None else text.encode())


def as_answer(kind: type[S], *sources: object, **fields: object) -> S:
    """
    Make an answer from `fields`; each further field comes from the first source that has one of this name.
    Moments become datetimes.

    A field that no source has raises AttributeError, so a test with one request of each kind finds wrong
    names.
    """
    for name, at, is_moment in _origins(kind, *map(type, sources)):
        if name not in fields:
            value = getattr(sources[at], name)
            fields[name] = when(value) if is_moment and value is not None else value
    return kind(**fields)


@cache
def _origins(kind: type[msgspec.Struct], *sources: type) -> tuple[tuple[str, int, bool], ...]:
    """For each field its name, the number of its source, and whether it is a moment."""
    return tuple(
        (
            one.name,
            next((at for at, source in enumerate(sources) if hasattr(source, one.name)), -1),
            datetime in (one.type, *get_args(one.type)),
        )
        for one in msgspec.structs.fields(kind)
    )
