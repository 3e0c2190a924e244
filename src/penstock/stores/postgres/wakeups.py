"""
Wake-ups between processes: NOTIFY after commits, LISTEN on a connection of its own, and a poll now and then.

The notice goes out behind the COMMIT and not with it: a transaction that notifies holds a lock of the whole
server until it is on disk, and commits would go one by one. Notices of commits that follow each other closely
become one, which goes with the last of them or soon after. A notice is a hint. It may be lost, and behind a
pooler in transaction mode none arrives, so a listener also asks once a second whether there are new events.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock, Thread, local
from time import monotonic
from typing import Final

import psycopg

from penstock.core.errors import PenstockError
from penstock.stores.common.rows import uuid7
from penstock.stores.postgres.database import Database
from penstock.stores.postgres.pipeline import PipelineConnection, Values, statement

POLL_SEC: Final = 1.0
#: Between two notices of one process: the first goes out at once, and those in this time become one.
GAP_SEC: Final = 0.002
#: So much longer a notice waits for a commit to go with, before it gets a round trip of its own.
SPARE_SEC: Final = GAP_SEC / 2


class NotificationListener:
    """`on_notice` is called when another process has committed events. `by_notice`: False behind a pooler."""

    def __init__(self, database: Database, on_notice: Callable[[], None], *, by_notice: bool = True) -> None:
        self._database, self._on_notice, self._by_notice = database, on_notice, by_notice
        self._me = uuid7()
        self.channel = f"penstock {database.schema}"
        self._listening = statement(
            f"LISTEN {psycopg.sql.Identifier(self.channel).as_string()}", prepared=False
        )
        self._lock, self._wake, self._closed = Lock(), Event(), Event()
        self._threads: dict[str, Thread] = {}
        self._events_seen = -1
        self._sent_at, self._local = float("-inf"), local()
        #: There are commits that no notice has reported.
        self.due = False
        if by_notice:
            database.notice = self.notice_behind

    def notice_behind(self) -> tuple[str, Values] | None:
        """A notice for a COMMIT that is about to be sent, unless the last one was just now."""
        self._local.sent = monotonic() >= self._sent_at + GAP_SEC
        return self._notice() if self._local.sent else None

    def notify(self) -> None:
        """After a commit with events, in its thread. Never blocks."""
        sent, self._local.sent = getattr(self._local, "sent", False), False
        if self._by_notice and not (sent or self.due):
            self.due = True
            self._wake.set()
            self._start("notifier", self._send_due)

    def _notice(self) -> tuple[str, Values]:
        self._sent_at = monotonic()
        self.due = False  # it reports all commits before
        return "notify_unsynced", {"channel": self.channel, "by": self._me}

    def listen(self) -> None:
        self._start("listener", self._listen)

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            threads = dict(self._threads)
        self._wake.set()
        if "listener" in threads:
            self.send()  # it waits for a notice: our own will do
        for thread in threads.values():
            thread.join()

    def _start(self, name: str, target: Callable[[], None]) -> None:
        if name in self._threads:
            return
        with self._lock:
            if name not in self._threads and not self._closed.is_set():
                self._threads[name] = Thread(target=target, name=f"penstock-{name}", daemon=True)
                self._threads[name].start()

    def _send_due(self) -> None:
        while not self._closed.is_set():
            self._wake.wait()
            self._wake.clear()
            wait = max(0, self._sent_at + GAP_SEC + SPARE_SEC - monotonic())
            if not self._closed.wait(wait) and self.due:  # no commit has taken it along meanwhile
                self.send()

    def send(self) -> None:
        """A notice in a round trip of its own."""
        with suppress(PenstockError):  # the listeners poll
            self._database.query(*self._notice())

    def _listen(self) -> None:
        con: PipelineConnection | None = None
        poll_at = 0.0
        while not self._closed.is_set():
            try:
                if con is None and self._by_notice:
                    con = self._database.connect()
                    con.exchange([(self._listening, None)])
                    poll_at = 0.0  # for events before it listened
                if self._notified(con):
                    self._on_notice()
                elif monotonic() >= poll_at:
                    poll_at = monotonic() + POLL_SEC
                    if self._has_new_events():
                        self._on_notice()
            except (psycopg.Error, PenstockError):
                # The server is away: the poll goes on, and the next pass connects anew.
                if con is not None:
                    con.close()
                    con = None
                self._closed.wait(POLL_SEC / 4)
        if con is not None:
            con.close()

    def _notified(self, con: PipelineConnection | None) -> bool:
        """True: by another process. Commits of this one have called `on_notice` at once."""
        if con is None:
            self._closed.wait(POLL_SEC)
            return False
        return any(by != self._me for by in con.notices(POLL_SEC))

    def _has_new_events(self) -> bool:
        """Whether events were committed since the last call."""
        before = self._events_seen
        self._events_seen = int(self._database.query("committed_events")[0][0])
        return before != self._events_seen
