"""
Alerting: reads the trail, decides which receivers get an event, and puts a message into their spools.

The reader's position is in a file beside the database, written after the messages: after a kill in between it
writes the same messages again. At its very first start it begins at the end of the trail. Repeated alerts are
counted instead of sent.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from penstock.settings import Settings
from penstock.stores.api import Apply, Store, committed

log = logging.getLogger("penstock.alerts")

#: The kind of an alert about an undelivered alert. Only the log and the trail get it, because sending it
#: could fail like the first one.
UNDELIVERED: Final = "undelivered"

_PAGE: Final = 500
#: Seconds between two reads of a busy trail: soon enough for people, and for a job that waits for its worker.
_PAUSE: Final[Span] = 200 * MILLISECOND
#: How many events are read again after a kill, at most.
_NOTE_EVERY: Final[Span] = MINUTE


class Alerting:
    """
    Sends the alerts of one scheduler. Use it only in the process that dispatches: two readers of one folder
    would send everything twice. Raises Unsafe without a secret for signatures; later errors are only logged.
    """

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._settings = store, settings
        self._folder = private_directory(settings.data_dir / "alerts")
        if any(settings.webhooks()):
            secrets_in(settings.webhook_secret_file)
        self._messengers: list[Messenger] = []
        addons = settings.addons.items()
        receivers = Receivers(
            alerts=self._for_all_addons(),
            of_addon={
                name: self._for_addon("addon", name, addon.alert_webhook)
                for name, addon in addons
                if addon.alert_webhook
            },
            dispatchable={
                name: self._for_addon("job", name, addon.webhook) for name, addon in addons if addon.webhook
            },
        )
        self._remove_stale()
        self._reader = TrailReader(store, self._folder / "reader.json", receivers, settings, self._notify)
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
        """Stop at once. A delivery under way is aborted, and repeated after the next start."""
        self._reading.stop()
        for messenger in self._messengers:
            messenger.target.abort()
        for driver in self._rounds:
            driver.stop()
        self._reader.note(self._store.now())

    def _for_all_addons(self) -> list[Spool]:
        alerts, spools = self._settings.alerts, []
        if alerts.command:
            spools.append(self._messenger(CommandReceiver(alerts.command), "command"))
        if alerts.webhook:
            spools.append(self._messenger(self._webhook(alerts.webhook), "webhook"))
        return spools

    def _for_addon(self, role: str, addon: str, url: str) -> Spool:
        # Named by role and not by address: after its address is corrected, a receiver gets the messages that
        # failed before.
        return self._messenger(
            self._webhook(url), f"{role}-{hashlib.sha256(addon.encode()).hexdigest()[:16]}"
        )

    def _webhook(self, url: str) -> Webhook:
        settings = self._settings
        return Webhook(url, settings.webhook_secret_file, private=settings.alerts.allow_private)

    def _messenger(self, target: Target, name: str) -> Spool:
        self._messengers.append(Messenger(target, Spool(self._folder / name), self._gave_up))
        return self._messengers[-1].spool

    def _remove_stale(self) -> None:
        """Remove the spools of receivers that the settings no longer name."""
        folders = {messenger.spool.folder for messenger in self._messengers}
        for folder in self._folder.iterdir():
            if folder.is_dir() and folder not in folders:
                log.warning("%s: the settings no longer name its receiver, so it is removed", folder)
                shutil.rmtree(folder)

    def _notify(self) -> None:
        for driver in self._rounds:
            driver.wake()

    def _gave_up(self, target: Target, message: Message, why: str) -> None:
        """
        Record an undelivered alert in the trail, for the page and the streams. An undelivered notice to a
        worker is out of date by now, so it is not recorded.
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
    """The spools of all receivers. `alerts` get the alerts of every addon."""

    alerts: Sequence[Spool]
    of_addon: Mapping[str, Spool]
    #: By addon: the receiver of notices about jobs that wait for their worker.
    dispatchable: Mapping[str, Spool]


class TrailReader:
    """Reads the trail, as one step of a driver. `posted` is called when there are new messages."""

    def __init__(
        self,
        store: Store,
        file: Path,
        receivers: Receivers,
        settings: Settings,
        posted: Callable[[], None],
    ) -> None:
        self._store, self._file, self._receivers, self._posted = store, file, receivers, posted
        self._alerts, self._dispatchable_for = settings.alerts, settings.leases.start_timeout
        self._kinds = (
            {EventKind.ALERT, EventKind.DISPATCHING} if receivers.dispatchable else {EventKind.ALERT}
        )
        self._host = socket.gethostname()
        self._due: Moment = 0
        self._noted: Moment = 0
        self._origin, self._cursor, self._repeats = self._begin(self._alerts.window)
        self.note(store.now())  # after a kill before the first alert, do not begin at the end again

    def step(self, now: Moment) -> Moment:
        if now < self._due <= now + _PAUSE:
            return self._due
        self._due = now + _PAUSE
        end = self._store.newest()  # read first, so that an event in between is read now or next time
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
        """Write the position and the recently sent alerts to the file."""
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
            # A position beyond the end belongs to another trail: the database was restored from a copy.
            return kept["origin"], min(kept["cursor"], end), Repeats(window, sent)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            # A line for a person, without a traceback.
            log.error("%s is damaged (%s): only alerts from now on are sent", self._file, error)  # noqa: TRY400
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
        if self._alerts.log:
            more = f" ({repeated} more of this kind since the last)" if repeated else ""
            log.warning("alert: %s%s", content["text"], more, extra={"alert": content})
        if content["kind"] == UNDELIVERED:
            return
        addon = self._receivers.of_addon.get(content["addon_id"])
        for spool in [*self._receivers.alerts, *([] if addon is None else [addon])]:
            spool.put(Message(number=event.seq, content=content, due=now, until=now + self._alerts.retry_for))

    def _dispatchable(self, event: Event, jobs: Mapping[JobId, Job], now: Moment) -> None:
        job = None if event.job_id is None else jobs.get(event.job_id)
        spool = None if job is None else self._receivers.dispatchable.get(job.intent.addon_id)
        until = event.at + self._dispatchable_for
        if job is None or spool is None or until <= now:
            return
        content = self._head(event, "dispatchable") | {
            "addon_id": job.intent.addon_id,
            "job_id": job.job_id,
            "job_type": job.intent.job_type,
            "dispatch_id": event.dispatch_id,
        }
        spool.put(Message(number=event.seq, content=content, due=now, until=until))

    def _content(self, event: Event, jobs: Mapping[JobId, Job]) -> dict[str, Any]:
        """The content for receivers: every alert has a kind, an addon, a key and a text."""
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
