"""
Connections: their options, and round trips of many statements in libpq's pipeline mode.

psycopg makes the connection and converts rows. A psycopg cursor for every statement would take longer than
most statements run, so a round trip uses libpq's own calls: a connection prepares every statement once,
values go out as text, and rows come back in binary and are loaded by psycopg.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from select import POLLIN, POLLOUT, poll
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import msgspec
import psycopg
from psycopg import errors
from psycopg.adapt import Transformer
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import ConnStatus, ExecStatus, Format
from psycopg.pq.abc import PGconn, PGresult
from psycopg.rows import TupleRow

from penstock.core.errors import StoreFailed

#: Values in order, or by name. A function is called when the earlier statements have been sent to the server.
Values: TypeAlias = (
    "Sequence[Any] | Mapping[str, Any] | Callable[[], Sequence[Any] | Mapping[str, Any]] | EarlyRows | None"
)


class EarlyRows(NamedTuple):
    """
    Values of a statement whose rows `use` gets as soon as they arrive, while the server works on later
    statements. The transaction may still fail.
    """

    values: Mapping[str, Any]
    use: Callable[[list[Any]], None]


class Statement(NamedTuple):
    """An SQL statement. `names`: of its values, in the order of the text; None: values come in that order."""

    text: bytes
    names: tuple[str, ...] | None = None
    #: False for a statement that is composed for one query.
    prepared: bool = True

    def bind(self, values: Values) -> list[bytes | None]:
        if isinstance(values, EarlyRows):
            values = values.values
        if callable(values):
            values = values()
        if isinstance(values, Mapping):
            values = [values[name] for name in self.names or ()]
        return [value if value.__class__ is bytes else text(value) for value in values or ()]


Call: TypeAlias = tuple[Statement, Values]


@cache
def statement(sql: str, *, prepared: bool = True) -> Statement:
    """The statement with the server's placeholders ($1) in place of ours (%s or %(name)s)."""
    names: list[str] = []
    in_order = 0

    def numbered(match: re.Match[str]) -> str:
        nonlocal in_order
        name = match[1]
        if name is None:
            in_order += 1
            return f"${in_order}"
        if name not in names:
            names.append(name)
        return f"${names.index(name) + 1}"

    text = re.sub(r"%(?:\((\w+)\))?s", numbered, sql)
    return Statement(text.encode(), tuple(names) if names else None, prepared)


class RoundTrip(Protocol):
    """A connection that runs many calls in one round trip."""

    def exchange(self, calls: Sequence[Call], behind: Sequence[Call] = ()) -> list[list[Any]]:
        """
        The rows of each call. If a call fails, later ones do not run, and its error is raised. Without a
        BEGIN all calls are one transaction. `behind`: calls that follow; no caller waits for them, and they
        may fail unnoticed. Without other calls there is no round trip.
        """
        ...


#: A connection prepares a statement again when it was used this often: the server's first plan may be for
#: empty tables, on which a bad plan looks as good as the right one.
PREPARE_AGAIN_AT: Final = frozenset({16, 128, 1_024})


class _Prepared:
    """A prepared statement of one connection. The loaders of its rows are looked up once."""

    __slots__ = ("_has_loaders", "_rows", "name", "uses")

    def __init__(self, name: bytes, connection: PipelineConnection, uses: int = 0) -> None:
        self.name, self._rows, self._has_loaders, self.uses = name, Transformer(connection), False, uses

    def load(self, result: PGresult) -> list[Any]:
        if not result.ntuples:
            return []
        self._rows.set_pgresult(result, set_loaders=not self._has_loaders)
        self._has_loaders = True
        return self._rows.load_rows(0, result.ntuples, tuple)


class _Sent(NamedTuple):
    """A statement that was sent. `preparing`: how many results of its preparation come before its own."""

    text: bytes
    prepared: _Prepared
    preparing: int
    early: EarlyRows | None


#: When a server that does not answer counts as gone: libpq's options, in seconds, the last one in
#: milliseconds.
_PRESENCE: Final = {
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOptions:
    """
    Options of a store's connections; other programs may use the server too. `pooler`: the connections go
    through a PgBouncer in transaction mode.
    """

    statement_timeout_ms: int = 30_000
    lock_timeout_ms: int = 10_000
    #: How long a process that stops in the middle of a transaction can keep others waiting.
    idle_timeout_ms: int = 5_000
    connect_timeout_sec: int = 10
    connections: int = 16
    pooler: bool = False

    @property
    def settings(self) -> dict[str, str]:
        return {
            "search_path": "pg_catalog",
            "statement_timeout": str(self.statement_timeout_ms),
            "lock_timeout": str(self.lock_timeout_ms),
            "idle_in_transaction_session_timeout": str(self.idle_timeout_ms),
            # A connection keeps its plans, and the statistics of queue tables are always old: a plan that was
            # made for small tables would scan large ones. All of our statements can use indexes.
            "enable_seqscan": "off",
            "enable_hashjoin": "off",
            "enable_mergejoin": "off",
            # Making a plan takes longer than a batch of ten jobs, and there is only one good plan.
            "plan_cache_mode": "force_generic_plan",
            "jit": "off",
            # To start a parallel process takes longer than any of our statements.
            "max_parallel_workers_per_gather": "0",
        }

    @property
    def settings_statement(self) -> Statement:
        """The statement that sets `settings` for one transaction."""
        calls = (f"set_config('{name}', '{value}', true)" for name, value in self.settings.items())
        return statement(f"SELECT {', '.join(calls)}")

    def conninfo(self, dsn: str) -> str:
        try:
            given = conninfo_to_dict(dsn)
        except psycopg.ProgrammingError:
            # No words of libpq's error: it quotes the part that it cannot read, which may be the password.
            raise StoreFailed(
                "the address of the database cannot be read: write postgresql://USER@HOST:PORT/NAME, "
                "with %40 for an @ and %2F for a / in a name or password",
                kind="address",
            ) from None
        more: dict[str, str] = {"application_name": str(given.get("application_name") or "penstock")}
        more["client_encoding"] = "utf-8"
        more["connect_timeout"] = str(given.get("connect_timeout") or self.connect_timeout_sec)
        for name, value in _PRESENCE.items():
            more[name] = str(given.get(name) or value)
        if not self.pooler:
            pinned = " ".join(f"-c {name}={value}" for name, value in self.settings.items())
            more["options"] = f"{given.get('options') or ''} {pinned}".strip()
        return make_conninfo(dsn, **more)


class PipelineConnection(psycopg.Connection[TupleRow]):
    """A psycopg connection that also exchanges many statements in one round trip."""

    def __init__(self, pgconn: PGconn) -> None:
        super().__init__(pgconn)
        #: False behind a pooler: the next transaction may run on a server connection that has not prepared
        #: them.
        self.prepares = True
        self._by_text: dict[bytes, _Prepared] = {}
        #: Statements whose preparation was sent and is not answered yet.
        self._preparing_by_text: dict[bytes, _Prepared] = {}
        self._names = count(1)
        self._poll = poll()
        self._poll.register(pgconn.socket, POLLIN)
        #: The `behind` calls of the last round trip, while their results are outstanding.
        self._behind: list[_Sent] = []

    @property
    def is_behind(self) -> bool:
        """Whether results of `behind` calls are outstanding. All calls before them have succeeded."""
        return bool(self._behind)

    def exchange(self, calls: Sequence[Call], behind: Sequence[Call] = ()) -> list[list[Any]]:
        """Run the calls in one round trip. The results of `behind` are received with the next one."""
        if not calls or any(one.preparing for one in self._behind):  # the preparation may have failed
            self._receive_behind()
        try:
            self.pgconn.enter_pipeline_mode()
            if not calls:
                self._behind = self._send_all(behind)
                self._flush()
                return []
            sent, outstanding = self._send_all(calls), self._behind
            self._behind = self._send_all(behind) if behind else []
            if outstanding:
                self._receive(outstanding)
            answers, failure = self._receive(sent)
            if not behind:
                self.pgconn.exit_pipeline_mode()
        except BaseException:
            self.close()  # an unknown number of results is outstanding
            raise
        if failure is not None:
            self._receive_behind()
            raise failure
        return answers

    def _receive_behind(self) -> None:
        """Receive the outstanding results. Raises if the connection is lost, and not if the calls failed."""
        if self._behind:
            try:
                self._receive(self._behind)
                self._behind = []
                self.pgconn.exit_pipeline_mode()
            except BaseException:
                self.close()
                raise

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        """psycopg's cursor, which needs a connection without outstanding results."""
        self._receive_behind()
        return super().cursor(*args, **kwargs)

    def transaction(self, *args: Any, **kwargs: Any) -> Any:
        self._receive_behind()
        return super().transaction(*args, **kwargs)

    def notices(self, within_sec: float) -> list[str]:
        """
        The next notices; none if none comes in that time. psycopg's own method wakes up ten times a second.
        """
        if self._poll.poll(int(within_sec * 1_000)):
            self.pgconn.consume_input()
        notices = []
        while (notice := self.pgconn.notifies()) is not None:
            notices.append(notice.extra.decode())
        return notices

    def check_alive(self) -> None:
        """Raise the error of a lost connection before anything is sent on it."""
        while self._poll.poll(0):
            self.pgconn.consume_input()

    def _send_all(self, calls: Sequence[Call]) -> list[_Sent]:
        self._preparing_by_text.clear()
        sent = [self._send(*call) for call in calls]
        self.pgconn.pipeline_sync()
        return sent

    def _send(self, statement: Statement, values: Values) -> _Sent:
        if callable(values):
            self.pgconn.flush()
        bound = statement.bind(values)
        early = values if isinstance(values, EarlyRows) else None
        if not (self.prepares and statement.prepared):
            self.pgconn.send_query_params(statement.text, bound, result_format=Format.BINARY)
            return _Sent(statement.text, _Prepared(b"", self), 0, early)
        prepared = self._preparing_by_text.get(statement.text) or self._by_text.get(statement.text)
        preparing = 0
        if prepared is None:
            prepared, preparing = self._prepare(statement, 0), 1
        elif bound and prepared.uses in PREPARE_AGAIN_AT:
            # Not for statements without values: they have one plan, and no statement may come before a BEGIN.
            self.pgconn.send_query_params(b"DEALLOCATE " + prepared.name, [])
            prepared, preparing = self._prepare(statement, prepared.uses), 2
        prepared.uses += 1
        self.pgconn.send_query_prepared(prepared.name, bound, result_format=Format.BINARY)
        if early is not None:
            self.pgconn.send_flush_request()
        return _Sent(statement.text, prepared, preparing, early)

    def _prepare(self, statement: Statement, uses: int) -> _Prepared:
        prepared = _Prepared(b"penstock_%d" % next(self._names), self, uses)
        self._preparing_by_text[statement.text] = prepared
        self.pgconn.send_prepare(prepared.name, statement.text)
        return prepared

    def _flush(self) -> None:
        """Hand all that was sent to the socket."""
        while self.pgconn.flush():
            self._wait(POLLIN | POLLOUT)

    def _receive(self, sent: Sequence[_Sent]) -> tuple[list[list[Any]], psycopg.Error | None]:
        """The rows of each statement, and the first failure: later statements did not run."""
        self._flush()
        answers: list[list[Any]] = []
        failure: psycopg.Error | None = None
        for one in sent:
            for _ in range(one.preparing):
                failure = failure or _failure(self._result(failure))
            if one.preparing and failure is None:
                self._by_text[one.text] = one.prepared
            result = self._result(failure)
            failure = failure or _failure(result)
            rows = one.prepared.load(result) if failure is None else []
            if one.early is not None and failure is None:
                one.early.use(rows)
            answers.append(rows)
        while (result := self._result(failure)).status != ExecStatus.PIPELINE_SYNC:
            failure = failure or _failure(result)  # the implicit commit at the end may fail
        return answers, failure

    def _result(self, failure: psycopg.Error | None) -> PGresult:
        """
        The next result. `failure`: an error that the server reported before, to raise if the connection is
        lost.
        """
        pgconn = self.pgconn
        while True:
            while pgconn.is_busy():
                self._wait(POLLIN)
            result = pgconn.get_result()
            if result is not None:
                return result
            if pgconn.status != ConnStatus.OK:
                raise failure or psycopg.OperationalError("the connection is lost")

    def _wait(self, events: int) -> None:
        """
        Wait for the socket, and read from it also while sending: a server that cannot send stops reading.
        """
        if events != POLLIN:
            self._poll.modify(self.pgconn.socket, events)
        [(_, ready)] = self._poll.poll()
        if events != POLLIN:
            self._poll.modify(self.pgconn.socket, POLLIN)
        if ready & ~POLLOUT:
            self.pgconn.consume_input()


def _failure(result: PGresult) -> psycopg.Error | None:
    if result.status in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
        return None
    return errors.error_from_result(result)


def text(value: Any) -> bytes | None:
    return None if value is None else str(value).replace("\0", _NUL).encode()


_encode: Final = msgspec.json.Encoder().encode
#: Replaces the character NUL, which a text in PostgreSQL cannot have.
_NUL: Final = "\N{SYMBOL FOR NULL}"


def columns(rows: Sequence[Sequence[Any]], width: int = 0) -> list[bytes]:
    """
    Rows as one array per column, for `unnest`: one statement serves any number of rows. `width`: the number
    of columns, needed if there may be no row. A column of None alone is an empty array, which `unnest` fills
    with NULL.
    """
    return [column(values) for values in zip(*rows, strict=True)] or [b"{}"] * width


def column(values: Sequence[Any]) -> bytes:
    return b"{}" if values[0] is None and values.count(None) == len(values) else array(values)


def array(values: Sequence[Any]) -> bytes:
    """
    An array in PostgreSQL's text format. Without escapes this is JSON with other brackets, and an element
    takes a hundredth of the time that psycopg needs.
    """
    encoded = _encode(values)
    if b"\\" in encoded:
        return b"{%b}" % b",".join([_element(value) for value in values])
    return b"{%b}" % encoded[1:-1]


def _element(value: Any) -> bytes:
    if not isinstance(value, str):
        return _encode(value)
    quoted = value.replace("\\", "\\\\").replace('"', '\\"').replace("\0", _NUL)
    return b'"%b"' % quoted.encode()
