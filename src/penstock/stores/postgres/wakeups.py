"""
Wake-ups between processes: NOTIFY after commits, LISTEN on a connection of its own, and a poll once a second.

The notice follows the COMMIT in a transaction of its own: a transaction that notifies holds a lock of the
whole server until it is on disk, so commits would go one by one. One notice serves commits that follow each
other closely; it goes with the last of them or soon after. A notice is a hint: it may be lost, and behind a
pooler in transaction mode none arrives, so a listener also checks once a second whether there are new events.
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
#: The time between two notices of one process: the first goes out at once, and one more serves all commits
#: since.
GAP_SEC: Final = 0.002
#: How much longer a notice waits for a COMMIT to go with before it gets a round trip of its own.
SPARE_SEC: Final = GAP_SEC / 2


class NotificationListener:
    """
    Sends and receives notices. `on_notice` is called when another process has committed events. `by_notice`:
    False behind a pooler, where only the poll works.
    """

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
        #: Whether there are commits that no notice has reported.
        self.due = False
        if by_notice:
            database.notice = self.notice_behind

    def notice_behind(self) -> tuple[str, Values] | None:
        """
        The notice for a COMMIT that is about to be sent; None if the last notice was less than `GAP_SEC` ago.
        """
        self._local.sent = monotonic() >= self._sent_at + GAP_SEC
        return self._notice() if self._local.sent else None

    def notify(self) -> None:
        """
        Send a notice soon, unless one went with the commit. Called after a commit with events, in its thread.
        """
        sent, self._local.sent = getattr(self._local, "sent", False), False
        if self._by_notice and not (sent or self.due):
            self.due = True
            self._wake.set()
            self._start("notifier", self._send_due)

    def _notice(self) -> tuple[str, Values]:
        self._sent_at = monotonic()
        self.due = False  # the notice reports all earlier commits
        return "notify_unsynced", {"channel": self.channel, "by": self._me}

    def listen(self) -> None:
        self._start("listener", self._listen)

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            threads = dict(self._threads)
        self._wake.set()
        if "listener" in threads:
            self.send()  # wakes the listener, which waits for a notice
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
            if not self._closed.wait(wait) and self.due:  # no COMMIT took a notice along meanwhile
                self.send()

    def send(self) -> None:
        """Send a notice in a round trip of its own."""
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
                    poll_at = 0.0  # poll at once, for events from before the LISTEN
                if self._notified(con):
                    self._on_notice()
                elif monotonic() >= poll_at:
                    poll_at = monotonic() + POLL_SEC
                    if self._has_new_events():
                        self._on_notice()
            except (psycopg.Error, PenstockError):
                # The server is away: the next pass connects anew.
                if con is not None:
                    con.close()
                    con = None
                self._closed.wait(POLL_SEC / 4)
        if con is not None:
            con.close()

    def _notified(self, con: PipelineConnection | None) -> bool:
        """Whether another process has notified. Commits of this process call listeners themselves."""
        if con is None:
            self._closed.wait(POLL_SEC)
            return False
        return any(by != self._me for by in con.notices(POLL_SEC))

    def _has_new_events(self) -> bool:
        """Whether events were committed since the last call."""
        before = self._events_seen
        self._events_seen = int(self._database.query("committed_events")[0][0])
        return before != self._events_seen
