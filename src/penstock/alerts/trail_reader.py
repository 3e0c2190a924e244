"""
From the trail to messages: which receivers an event concerns, and whether the same alert was sent just now.

The reader's position is in a file beside the database, written after the messages: a kill in between makes it
read, and write, the same messages again. At its very first start it begins at the end of the trail.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from penstock.alerts.delivery import Message, Spool
from penstock.core.jobs.alerts import Repeats, SentAlert
from penstock.core.jobs.job import Event, EventKind, Job
from penstock.core.jobs.types import HOUR, MILLISECOND, MINUTE, SECOND, JobId, Moment, Span
from penstock.scheduler.permissions import replace_file
from penstock.stores.api import Store

log = logging.getLogger("penstock.alerts")

#: The kind of an alert about an alert. It is in the log and the trail, but no receiver gets it: it could fail
#: as the first one did.
UNDELIVERED: Final = "undelivered"

_PAGE: Final = 500
#: Between two reads of a busy trail. People read alerts, and a job waits for its worker for seconds, so this
#: is soon enough.
_PAUSE: Final[Span] = 200 * MILLISECOND
#: How much of the trail, at most, is read twice after a kill.
_NOTE_EVERY: Final[Span] = MINUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class Receivers:
    """Spools by their receivers. `alerts` get the alerts of every addon."""

    alerts: Sequence[Spool] = ()
    of_addon: Mapping[str, Spool] = field(default_factory=dict)
    #: By addon: the receiver of notices that a job waits for its worker.
    dispatchable: Mapping[str, Spool] = field(default_factory=dict)


class TrailReader:
    """One step of a driver. `posted` is called when there are new messages."""

    def __init__(
        self,
        store: Store,
        file: Path,
        receivers: Receivers,
        *,
        window: Span,
        keep_for: Span,
        dispatchable_for: Span,
        logged: bool = True,
        posted: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._file, self._receivers, self._posted = store, file, receivers, posted
        self._keep_for, self._dispatchable_for, self._logged = keep_for, dispatchable_for, logged
        self._kinds = (
            {EventKind.ALERT, EventKind.DISPATCHING} if receivers.dispatchable else {EventKind.ALERT}
        )
        self._host = socket.gethostname()
        self._due: Moment = 0
        self._noted: Moment = 0
        self._origin, self._cursor, self._repeats = self._begin(window)
        self.note(store.now())  # after a kill before the first alert it must not begin at the end again

    def step(self, now: Moment) -> Moment:
        if now < self._due <= now + _PAUSE:
            return self._due
        self._due = now + _PAUSE
        end = self._store.newest()  # read first: an event that comes in between is read now or the next time
        while batch := self._store.events_of(self._kinds, self._cursor, _PAGE):
            self._take(batch, now)
            self._cursor = batch[-1].seq
            self.note(now)
            self._posted()
        self._cursor = max(self._cursor, end)
        if not self._noted <= now < self._noted + _NOTE_EVERY:
            self.note(now)
        return now + HOUR  # a commit wakes the driver

    def note(self, now: Moment) -> None:
        """Write the position, and which alerts were sent in this window."""
        self._noted = now
        self._repeats.forget(now)
        replace_file(
            self._file,
            json.dumps({"origin": self._origin, "cursor": self._cursor, "sent": self._repeats.told}).encode(),
        )

    def _begin(self, window: Span) -> tuple[str, int, Repeats]:
        end = self._store.newest()
        try:
            kept = json.loads(self._file.read_bytes())
            sent = {key: SentAlert(*one) for key, one in kept["sent"].items()}
            # A position behind the end belongs to another trail: the database was restored from a copy.
            return kept["origin"], min(kept["cursor"], end), Repeats(window, sent)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.error("%s is damaged (%s): only alerts from now on are sent", self._file, error)  # noqa: TRY400  # a line for a person
        return secrets.token_hex(4), end, Repeats(window)

    def _take(self, batch: Sequence[Event], now: Moment) -> None:
        jobs = self._jobs(batch)
        for event in batch:
            if event.kind is EventKind.ALERT:
                self._alert(event, jobs, now)
            else:
                self._dispatchable(event, jobs, now)

    def _jobs(self, events: Sequence[Event]) -> dict[JobId, Job]:
        ids = {event.job_id for event in events if event.job_id is not None}
        return {job.job_id: job for job in self._store.jobs(list(ids))}

    def _alert(self, event: Event, jobs: Mapping[JobId, Job], now: Moment) -> None:
        content = self._content(event, jobs)
        repeated = self._repeats.hear(content["key"], now)
        if repeated is None:
            return
        content["repeated"] = repeated
        if self._logged:
            more = f" ({repeated} more of this kind since the last)" if repeated else ""
            log.warning("alert: %s%s", content["text"], more, extra={"alert": content})
        if content["kind"] == UNDELIVERED:
            return
        addon = self._receivers.of_addon.get(content["addon_id"])
        for spool in [*self._receivers.alerts, *([] if addon is None else [addon])]:
            spool.put(Message(number=event.seq, content=content, due=now, until=now + self._keep_for))

    def _dispatchable(self, event: Event, jobs: Mapping[JobId, Job], now: Moment) -> None:
        job = None if event.job_id is None else jobs.get(event.job_id)
        spool = None if job is None else self._receivers.dispatchable.get(job.intent.addon_id)
        if job is None or spool is None or event.at + self._dispatchable_for <= now:
            return
        content = self._head(event, "dispatchable") | {
            "addon_id": job.intent.addon_id,
            "job_id": job.job_id,
            "job_type": job.intent.job_type,
            "dispatch_id": event.dispatch_id,
        }
        until = event.at + self._dispatchable_for
        spool.put(Message(number=event.seq, content=content, due=now, until=until))

    def _content(self, event: Event, jobs: Mapping[JobId, Job]) -> dict[str, Any]:
        """What a receiver gets: every alert has a kind, an addon, a key and a text."""
        data = dict(event.data)
        job = None if event.job_id is None else jobs.get(event.job_id)
        kind = data.pop("kind", event.reason)
        job_id = data.pop("job_id", event.job_id)
        addon_id = data.pop("addon_id", None if job is None else job.intent.addon_id)
        key = data.pop("key", None) or f"{kind}/{job_id}"
        text = data.pop("text", None) or (f"job {job_id[-8:]}: {kind}" if job_id else str(kind))
        named = {"kind": kind, "addon_id": addon_id, "job_id": job_id, "key": key, "text": text, "data": data}
        return self._head(event, "alert") | named

    def _head(self, event: Event, kind: str) -> dict[str, Any]:
        at = datetime.fromtimestamp(event.at // SECOND, UTC).replace(microsecond=event.at % SECOND)
        return {"id": f"{self._origin}-{event.seq}", "type": kind, "at": at.isoformat(), "host": self._host}
