"""
Wake-ups between processes: NOTIFY after commits, LISTEN on a connection of its own, and a look at the database now and then.

The notice is sent after the commit and not with it: a transaction that notifies holds a lock of the whole server while it is written
to disk, and commits would go one by one. But it goes out behind the COMMIT, and nobody waits for it. Notices of commits that follow each other
closely become one, which goes with the last of them or soon after. All of it is a hint: one may be lost,
and behind a pooler in transaction mode none arrives, so whoever listens also asks once a second whether something was told.
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
#: Between two notices of one process: the first goes out at once, those close behind it become one.
GAP_SEC: Final = 0.002
#: So much longer it waits for a commit to go with, which is nearly free, before a round trip is made for it.
SPARE_SEC: Final = GAP_SEC / 2


class NotificationListener:
    def __init__(self, link: Database, heard: Callable[[], None], *, by_notice: bool = True) -> None:
        self._link, self._heard, self._by_notice = link, heard, by_notice
        self._me = uuid7()
        self.channel = f"penstock {link.schema}"
        self._listening = statement(
            f"LISTEN {psycopg.sql.Identifier(self.channel).as_string()}", prepared=False
        )
        self._lock, self._rung, self._closed = Lock(), Event(), Event()
        self._threads: dict[str, Thread] = {}
        self._seen = -1
        self._told_at, self._along = float("-inf"), local()
        #: There is something that no notice has told of.
        self._due = False
        if by_notice:
            link.behind = self.along

    def along(self) -> tuple[str, Values] | None:
        """With a COMMIT that is about to be sent, behind it: where nothing was told for a while nobody need be woken for it."""
        self._along.told = monotonic() >= self._told_at + GAP_SEC
        return self._notice() if self._along.told else None

    def ring(self) -> None:
        """After a commit, in its thread. Never blocks."""
        told, self._along.told = getattr(self._along, "told", False), False
        if self._by_notice and not (told or self._due):
            self._due = True
            self._rung.set()
            self._start("ring", self._send)

    def _notice(self) -> tuple[str, Values]:
        self._told_at = monotonic()
        self._due = False  # it tells of all that was committed before
        return "notify_unsynced", {"channel": self.channel, "by": self._me}

    def listen(self) -> None:
        self._start("ear", self._attend)

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            threads = dict(self._threads)
        self._rung.set()
        if "ear" in threads:
            self._tell()  # it waits for a notice: our own will do
        for thread in threads.values():
            thread.join()

    def _start(self, name: str, target: Callable[[], None]) -> None:
        if name in self._threads:
            return
        with self._lock:
            if name not in self._threads and not self._closed.is_set():
                self._threads[name] = Thread(target=target, name=f"penstock-{name}", daemon=True)
                self._threads[name].start()

    def _send(self) -> None:
        while not self._closed.is_set():
            self._rung.wait()
            self._rung.clear()
            wait = max(0, self._told_at + GAP_SEC + SPARE_SEC - monotonic())
            if not self._closed.wait(wait) and self._due:  # no commit has taken it along meanwhile
                self._tell()

    def _tell(self) -> None:
        with suppress(PenstockError):  # those who wait look by themselves
            self._link.glance(*self._notice())

    def _attend(self) -> None:
        con: PipelineConnection | None = None
        look_at = 0.0
        while not self._closed.is_set():
            try:
                if con is None and self._by_notice:
                    con = self._link.connect()
                    con.exchange([(self._listening, None)])
                    look_at = 0.0  # for what was told before it listened
                if self._notified(con):
                    self._heard()
                elif monotonic() >= look_at:
                    look_at = monotonic() + POLL_SEC
                    if self._something_new():
                        self._heard()
            except (psycopg.Error, PenstockError):
                # Away: the poll goes on, and the next round connects anew.
                if con is not None:
                    con.close()
                    con = None
                self._closed.wait(POLL_SEC / 4)
        if con is not None:
            con.close()

    def _notified(self, con: PipelineConnection | None) -> bool:
        """True: by somebody else. Our own commits rang here at once."""
        if con is None:
            self._closed.wait(POLL_SEC)
            return False
        return any(by != self._me for by in con.notices(POLL_SEC))

    def _something_new(self) -> bool:
        """Whether anything was told since the last look."""
        before = self._seen
        self._seen = int(self._link.glance("committed_events")[0][0])
        return before != self._seen
