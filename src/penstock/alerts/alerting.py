"""
Alerting: reads the trail, decides which receivers an event concerns, and puts a message into their spools.

The reader's position is in a file beside the database, written after the messages: a kill in between makes it
read, and write, the same messages again. At its very first start it begins at the end of the trail. An alert
that was sent just now is counted instead of sent again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self

from penstock.alerts.delivery import Message, Messenger, Spool, Target
from penstock.alerts.receivers import CommandReceiver, Webhook, secrets_in
from penstock.core.jobs.alerts import Alert, Repeats, SentAlert
from penstock.core.jobs.changes import Change, alert_note
from penstock.core.jobs.job import Event, EventKind, Job
from penstock.core.jobs.types import HOUR, MILLISECOND, MINUTE, SECOND, AddonId, JobId, Moment, Span
from penstock.scheduler.driver import Driver
from penstock.scheduler.permissions import private_directory, replace_file
from penstock.stores.api import Apply, Store, committed

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
class AlertTargets:
    """
    Where alerts go. `dispatchable`: by addon, the address that is notified while a job waits for its worker.
    """

    log: bool = True
    command: tuple[str, ...] = ()
    webhook: str | None = None
    of_addon: Mapping[str, str] = field(default_factory=dict)
    dispatchable: Mapping[str, str] = field(default_factory=dict)
    dispatchable_for: Span = 30 * SECOND
    secret_file: Path
    allow_private: bool = False
    window: Span = HOUR
    retry_for: Span = 24 * HOUR


class Alerting:
    """
    Only for the process that dispatches: two readers of one folder would send everything twice. Raises Unsafe
    when there is no secret to sign with; later errors go to the log only.
    """

    def __init__(self, store: Store, folder: Path, targets: AlertTargets) -> None:
        self._store, self._folder, self._targets = store, private_directory(folder), targets
        if targets.webhook or targets.of_addon or targets.dispatchable:
            secrets_in(targets.secret_file)
        self._messengers: list[Messenger] = []
        receivers = Receivers(
            alerts=self._for_all_addons(),
            of_addon={name: self._for_addon("addon", name, url) for name, url in targets.of_addon.items()},
            dispatchable={
                name: self._for_addon("job", name, url) for name, url in targets.dispatchable.items()
            },
        )
        self._remove_stale()
        self._reader = TrailReader(store, self._folder / "reader.json", receivers, targets, self._notify)
        self._rounds = [
            Driver(store.now, [messenger], name=f"penstock-messenger-{n}")
            for n, messenger in enumerate(self._messengers)
        ]
        self._reading = Driver(store.now, [self._reader], name="penstock-alerts")

    def start(self) -> Self:
        self._store.on_change(self._reading.wake)
        for driver in (*self._rounds, self._reading):
            driver.start()
        return self

    def stop(self) -> None:
        """At once: a delivery under way is cut off, and is repeated after the next start."""
        self._reading.stop()
        for messenger in self._messengers:
            messenger.target.cut()
        for driver in self._rounds:
            driver.stop()
        self._reader.note(self._store.now())

    def _for_all_addons(self) -> list[Spool]:
        targets = self._targets
        spools = [self._messenger(CommandReceiver(targets.command), "command")] if targets.command else []
        return spools + (
            [self._messenger(self._webhook(targets.webhook), "webhook")] if targets.webhook else []
        )

    def _for_addon(self, role: str, addon: str, url: str) -> Spool:
        # By role and not by address: after the owner corrects an address, it gets the messages that failed
        # before.
        return self._messenger(
            self._webhook(url), f"{role}-{hashlib.sha256(addon.encode()).hexdigest()[:16]}"
        )

    def _webhook(self, url: str) -> Webhook:
        return Webhook(url, self._targets.secret_file, private=self._targets.allow_private)

    def _messenger(self, target: Target, name: str) -> Spool:
        self._messengers.append(Messenger(target, Spool(self._folder / name), self._gave_up))
        return self._messengers[-1].spool

    def _remove_stale(self) -> None:
        """Remove the spools of receivers that the settings no longer name."""
        known = {messenger.spool.folder for messenger in self._messengers}
        for folder in self._folder.iterdir():
            if folder.is_dir() and folder not in known:
                log.warning("%s: the settings no longer name its receiver, so it is removed", folder)
                shutil.rmtree(folder)

    def _notify(self) -> None:
        for driver in self._rounds:
            driver.wake()

    def _gave_up(self, target: Target, message: Message, why: str) -> None:
        """
        Record an undelivered alert in the trail, for the page and the streams. Other notices are out of date
        by now.
        """
        if message.content["type"] != "alert":
            return
        alert = Alert(
            kind=UNDELIVERED,
            addon_id=AddonId(message.content["addon_id"] or ""),
            job_id=None,
            key=f"{UNDELIVERED}/{target.name}",
            text=f"an alert could not be delivered to {target.name}: {why}",
            data={"alert": message.content["id"]},
        )
        committed(self._store, Apply([Change(self._store.now(), (alert_note(alert),))]))


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
        targets: AlertTargets,
        posted: Callable[[], None],
    ) -> None:
        self._store, self._file, self._receivers, self._posted = store, file, receivers, posted
        self._targets = targets
        self._kinds = (
            {EventKind.ALERT, EventKind.DISPATCHING} if receivers.dispatchable else {EventKind.ALERT}
        )
        self._host = socket.gethostname()
        self._due: Moment = 0
        self._noted: Moment = 0
        self._origin, self._cursor, self._repeats = self._begin(targets.window)
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
            json.dumps({"origin": self._origin, "cursor": self._cursor, "sent": self._repeats.sent}).encode(),
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
        repeated = self._repeats.record(content["key"], now)
        if repeated is None:
            return
        content["repeated"] = repeated
        if self._targets.log:
            more = f" ({repeated} more of this kind since the last)" if repeated else ""
            log.warning("alert: %s%s", content["text"], more, extra={"alert": content})
        if content["kind"] == UNDELIVERED:
            return
        addon = self._receivers.of_addon.get(content["addon_id"])
        for spool in [*self._receivers.alerts, *([] if addon is None else [addon])]:
            spool.put(
                Message(number=event.seq, content=content, due=now, until=now + self._targets.retry_for)
            )

    def _dispatchable(self, event: Event, jobs: Mapping[JobId, Job], now: Moment) -> None:
        job = None if event.job_id is None else jobs.get(event.job_id)
        spool = None if job is None else self._receivers.dispatchable.get(job.intent.addon_id)
        if job is None or spool is None or event.at + self._targets.dispatchable_for <= now:
            return
        content = self._head(event, "dispatchable") | {
            "addon_id": job.intent.addon_id,
            "job_id": job.job_id,
            "job_type": job.intent.job_type,
            "dispatch_id": event.dispatch_id,
        }
        until = event.at + self._targets.dispatchable_for
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
