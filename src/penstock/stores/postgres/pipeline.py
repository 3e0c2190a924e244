"""
Statements on their way to the server and rows on their way back.

psycopg makes the connection and its types; a cursor for every statement would cost more than most of ours take to run. So a round trip is
made here of libpq's own calls: every statement is prepared once per connection, values go out as the text that they are made as, and rows
come back in binary and are loaded by what psycopg has for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate, count
from select import POLLIN, POLLOUT, poll
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import msgspec
import psycopg
from psycopg import errors
from psycopg.adapt import Transformer
from psycopg.pq import ConnStatus, ExecStatus, Format
from psycopg.pq.abc import PGconn, PGresult
from psycopg.rows import TupleRow

#: In order, or by name. Many may come as a function: it is called when what stands before them is with the server already.
Values: TypeAlias = (
    "Sequence[Any] | Mapping[str, Any] | Callable[[], Sequence[Any] | Mapping[str, Any]] | Heard | None"
)


class Heard(NamedTuple):
    """`then` is given the rows as soon as they have come, while the server is busy with what stands behind: how that will end is not known yet."""

    values: Mapping[str, Any]
    then: Callable[[list[Any]], None]


class Statement(NamedTuple):
    """`names`: of its values in the order in which it has them; None where they come in that order."""

    text: bytes
    names: tuple[str, ...] | None = None
    #: Not worth it for what is put together for one question.
    prepared: bool = True

    def bind(self, values: Values) -> list[bytes | None]:
        if isinstance(values, Heard):
            values = values.values
        if callable(values):
            values = values()
        if isinstance(values, Mapping):
            values = [values[name] for name in self.names or ()]
        return [value if value.__class__ is bytes else text(value) for value in values or ()]


@cache
def statement(sql: str, *, prepared: bool = True) -> Statement:
    """From the way we write them, with %s or %(name)s, to the server's, with $1."""
    names: list[str] = []
    in_order = 0

    def numbered(found: re.Match[str]) -> str:
        nonlocal in_order
        name = found[1]
        if name is None:
            in_order += 1
            return f"${in_order}"
        if name not in names:
            names.append(name)
        return f"${names.index(name) + 1}"

    text = re.sub(r"%(?:\((\w+)\))?s", numbered, sql)
    return Statement(text.encode(), tuple(names) if names else None, prepared)


class RoundTrip(Protocol):
    def exchange(
        self, calls: Sequence[tuple[Statement, Values]], behind: Sequence[tuple[Statement, Values]] = ()
    ) -> list[list[Any]]:
        """
        The rows of each. When one fails those after it are not run, and its failure is raised. Without a BEGIN before it all of them are one
        transaction. Those `behind` are another: what becomes of it is of no account, and nobody waits for it.
        """
        ...


#: After so many uses a statement is prepared anew: its plan was made for tables as they were the first time, and on empty ones any way is as good as
#: the right one.
ANEW: Final = frozenset({16, 128, 1_024})


class _Known:
    """A statement as the server has it for this connection, and how its rows are loaded, which is looked up the first time."""

    __slots__ = ("_rows", "_seen", "name", "uses")

    def __init__(self, name: bytes, connection: PipelineConnection, uses: int = 0) -> None:
        self.name, self._rows, self._seen, self.uses = name, Transformer(connection), False, uses

    def load(self, result: PGresult) -> list[Any]:
        if not result.ntuples:
            return []
        self._rows.set_pgresult(result, set_loaders=not self._seen)
        self._seen = True
        return self._rows.load_rows(0, result.ntuples, tuple)


class PipelineConnection(psycopg.Connection[TupleRow]):
    def __init__(self, pgconn: PGconn) -> None:
        super().__init__(pgconn)
        #: False behind a pooler, which hands the next transaction to a server connection that has not seen our statements.
        self.prepares = True
        self._known: dict[bytes, _Known] = {}
        #: Those whose preparing has been sent, and not been answered yet.
        self._new: dict[bytes, _Known] = {}
        self._names = count(1)
        self._ready = poll()
        self._ready.register(pgconn.socket, POLLIN)
        #: What went out behind the last round trip, and has perhaps not been answered yet.
        self._owed: list[_Sent] = []

    @property
    def owes(self) -> bool:
        """An answer, and nothing else: what was asked before is over, and was successful."""
        return bool(self._owed)

    def exchange(
        self, calls: Sequence[tuple[Statement, Values]], behind: Sequence[tuple[Statement, Values]] = ()
    ) -> list[list[Any]]:
        """All of them in one round trip."""
        pgconn = self.pgconn
        if any(one.first for one in self._owed):  # it is not known yet whether that was prepared
            self._settle()
        try:
            pgconn.enter_pipeline_mode()
            sent, owed = self._send_all(calls), self._owed
            self._owed = self._send_all(behind) if behind else []
            if owed:
                self._receive()
            results = self._receive(sent)
            if not behind:
                pgconn.exit_pipeline_mode()
        except BaseException:
            self.close()  # nobody knows what is still on its way
            raise
        if behind and _failure(results) is not None:
            self._settle()
        left = iter(results)
        answers = [self._rows(left, one) for one in sent]
        for result in left:  # of a transaction whose statements were all well, and its commit was not
            _check(result)
        return answers

    def notices(self, within_sec: float) -> list[str]:
        """What comes first within so long. psycopg's own way looks ten times a second whether it is to stop, and takes longer to say what it has."""
        if self._ready.poll(int(within_sec * 1_000)):
            self.pgconn.consume_input()
        told = []
        while (notice := self.pgconn.notifies()) is not None:
            told.append(notice.extra.decode())
        return told

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        """psycopg's own ways find the connection as they expect it."""
        self._settle()
        return super().cursor(*args, **kwargs)

    def transaction(self, *args: Any, **kwargs: Any) -> Any:
        self._settle()
        return super().transaction(*args, **kwargs)

    def _settle(self) -> None:
        """Take in what is owed. That it failed is of no account; that the connection is gone is."""
        if not self._owed:
            return
        try:
            results, owed = iter(self._receive()), self._owed
            self._owed = []
            self.pgconn.exit_pipeline_mode()
        except BaseException:
            self.close()
            raise
        with suppress(psycopg.Error):
            for one in owed:
                self._rows(results, one)

    def look(self) -> None:
        """Raises what an exchange would if the server has gone already. Nothing has been sent then."""
        while self._ready.poll(0):
            self.pgconn.consume_input()

    def _send_all(self, calls: Sequence[tuple[Statement, Values]]) -> list[_Sent]:
        self._new.clear()
        sent = [self._send(*call) for call in calls]
        self.pgconn.pipeline_sync()
        return sent

    def _send(self, asked: Statement, values: Values) -> _Sent:
        if callable(values):
            self.pgconn.flush()
        bound = asked.bind(values)
        if not (self.prepares and asked.prepared):
            self.pgconn.send_query_params(asked.text, bound, result_format=Format.BINARY)
            return _Sent(asked, _Known(b"", self), 0, values.then if isinstance(values, Heard) else None)
        known, first = self._new.get(asked.text) or self._known.get(asked.text), 0
        if known is None:
            known, first = self._prepare(asked, 0), 1
        elif (
            bound and known.uses in ANEW
        ):  # without values it is a BEGIN, before which nothing may come, or has but one plan
            self.pgconn.send_query_params(b"DEALLOCATE " + known.name, [])
            known, first = self._prepare(asked, known.uses), 2
        known.uses += 1
        self.pgconn.send_query_prepared(known.name, bound, result_format=Format.BINARY)
        if isinstance(values, Heard):
            self.pgconn.send_flush_request()
            return _Sent(asked, known, first, values.then)
        return _Sent(asked, known, first)

    def _prepare(self, asked: Statement, uses: int) -> _Known:
        known = self._new[asked.text] = _Known(b"penstock_%d" % next(self._names), self, uses)
        self.pgconn.send_prepare(known.name, asked.text)
        return known

    def _receive(self, sent: Sequence[_Sent] = ()) -> list[PGresult]:
        pgconn, heard = self.pgconn, _heard(sent)
        while pgconn.flush():
            self._wait(POLLIN | POLLOUT)
        results: list[PGresult] = []
        while True:
            while pgconn.is_busy():
                self._wait(POLLIN)
            result = pgconn.get_result()
            if result is None:
                if pgconn.status != ConnStatus.OK:
                    raise _failure(results) or psycopg.OperationalError("the connection is lost")
            elif result.status == ExecStatus.PIPELINE_SYNC:
                return results
            else:
                results.append(result)
                one = heard.get(len(results))
                if one is not None and one.then is not None and result.status == ExecStatus.TUPLES_OK:
                    one.then(one.known.load(result))

    def _wait(self, what: int) -> None:
        """What has come is taken in also while we send: a server that cannot answer does not read on."""
        if what != POLLIN:
            self._ready.modify(self.pgconn.socket, what)
        [(_, ready)] = self._ready.poll()
        if what != POLLIN:
            self._ready.modify(self.pgconn.socket, POLLIN)
        if ready & ~POLLOUT:
            self.pgconn.consume_input()

    def _rows(self, results: Iterator[PGresult], sent: _Sent) -> list[Any]:
        if sent.first:
            for _ in range(sent.first):
                _check(next(results))
            self._known[sent.asked.text] = sent.known
        result = next(results)
        _check(result)
        return sent.known.load(result) if sent.then is None else []


class _Sent(NamedTuple):
    """`first`: how many answers come before its own. `then`: who has its rows."""

    asked: Statement
    known: _Known
    first: int
    then: Callable[[list[Any]], None] | None = None


def _heard(sent: Sequence[_Sent]) -> dict[int, _Sent]:
    """By which answer is theirs, counted from 1."""
    numbers = accumulate(one.first + 1 for one in sent)
    return {number: one for number, one in zip(numbers, sent, strict=True) if one.then is not None}


def _check(result: PGresult) -> None:
    if (failure := _failure([result])) is not None:
        raise failure


def _failure(results: Sequence[PGresult]) -> psycopg.Error | None:
    """Of the first that failed; those behind it were not run."""
    for result in results:
        if result.status not in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
            return errors.error_from_result(result)
    return None


def text(value: Any) -> bytes | None:
    return None if value is None else str(value).replace("\0", _NUL).encode()


_encode: Final = msgspec.json.Encoder().encode
#: For the character NUL, which text in PostgreSQL cannot hold.
_NUL: Final = "\N{SYMBOL FOR NULL}"


def columns(rows: Sequence[Sequence[Any]], width: int = 0) -> list[bytes]:
    """
    Rows as one array per column, for `unnest`: one statement and one round trip, however many rows. `width`: of those that may be none.
    A column without a value is empty: `unnest` goes by the longest, and fills up the others.
    """
    return [column(values) for values in zip(*rows, strict=True)] or [b"{}"] * width


def column(values: Sequence[Any]) -> bytes:
    return b"{}" if values[0] is None and values.count(None) == len(values) else array(values)


def array(values: Sequence[Any]) -> bytes:
    """
    An array as PostgreSQL writes it, which is nearly how JSON does: an element costs a hundredth of what psycopg's own way does.
    They part at what JSON escapes.
    """
    listed = _encode(values)
    if b"\\" in listed:
        return b"{%b}" % b",".join([_element(value) for value in values])
    return b"{%b}" % listed[1:-1]


def _element(value: Any) -> bytes:
    if not isinstance(value, str):
        return _encode(value)
    quoted = value.replace("\\", "\\\\").replace('"', '\\"').replace("\0", _NUL)
    return b'"%b"' % quoted.encode()
