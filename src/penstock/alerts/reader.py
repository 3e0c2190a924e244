"""What still has to be delivered to one receiver: a file a message, so that a kill at any moment loses none and a delivery costs one unlink.

The name of a message is the number of its event. A reader that was killed before it noted how far it had come writes the same messages
again, over the old ones.

From the trail to messages: what happened, whom it concerns, and whether the same was told just now.

How far it has come is in a file beside the database, written after the messages: a kill in between makes it read, and write, the same
messages again. Before its very first start nothing concerned anybody, so it begins at the end of the trail.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from penstock.core.jobs.alerts import Repeats, SentAlert
from penstock.core.jobs.job import Event, EventKind, Job
from penstock.core.jobs.types import HOUR, MILLISECOND, MINUTE, SECOND, JobId, Moment, Span
from penstock.scheduler.private_files import private_directory, replace_file
from penstock.stores.api import Store

__all__ = ["UNDELIVERED", "Message", "Reader", "Receivers", "Spool"]

log = logging.getLogger("penstock.alerts")

_ENDING: Final = ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """`told` is what the receiver gets. `tries` have failed; the next is due then, and at `until` it is given up."""

    number: int
    told: dict[str, Any]
    due: Moment
    until: Moment
    tries: int = 0

    @property
    def body(self) -> bytes:
        return json.dumps(self.told, ensure_ascii=False, separators=(",", ":")).encode()


class Spool:
    """Bounded. `put` is for the reader's thread, all else for the messenger's; a file appears and goes as a whole, so no lock is needed."""

    def __init__(self, folder: Path, most: int = 1_000) -> None:
        self.folder, self._most = private_directory(folder), most
        self._missed = 0
        for torn in folder.glob(f".*{_ENDING}.*"):  # a kill came before the name
            torn.unlink(missing_ok=True)

    def __len__(self) -> int:
        return sum(1 for _ in self._numbers())

    def put(self, message: Message) -> bool:
        """False: it is full. How many found no room is told with the next that does."""
        path = self._path(message.number)
        if not path.exists() and len(self) >= self._most:
            self._missed += 1
            if self._missed == 1:
                log.error(
                    "%s is full with %d messages: what comes now is not told there", self.folder, self._most
                )
            return False
        if self._missed:
            message = replace(message, told=message.told | {"not_told": self._missed})
            self._missed = 0
        self.keep(message)
        return True

    def keep(self, message: Message) -> None:
        replace_file(self._path(message.number), json.dumps(asdict(message)).encode())

    def messages(self, after: int = 0) -> list[Message]:
        """Those with a higher number, by number. What cannot be read is put aside: it must not stand in the way of the others."""
        return [read for number in sorted(self._numbers()) if number > after and (read := self._read(number))]

    def drop(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)

    def _read(self, number: int) -> Message | None:
        path = self._path(number)
        try:
            return Message(**json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            log.error("%s is damaged (%s) and is put aside", path, error)  # noqa: TRY400  # a line for a person
            path.rename(path.with_suffix(".damaged"))
            return None

    def _numbers(self) -> Iterator[int]:
        for path in self.folder.iterdir():
            if path.suffix == _ENDING and path.stem.isdigit():
                yield int(path.stem)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}{_ENDING}"


#: The kind of an alert about alerts. It is logged and stands in the trail, but no receiver gets it: it could fail as the first one did.
UNDELIVERED: Final = "undelivered"

_PAGE: Final = 500
#: Between two looks at a trail that goes on. People read alerts; and a job that waits for its worker waits for seconds.
_PAUSE: Final[Span] = 200 * MILLISECOND
#: How much of the trail, at most, is read twice after a kill when there was nothing to tell.
_NOTE_EVERY: Final[Span] = MINUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class Receivers:
    """Spools by whom they are for. `alerts` get those of every addon."""

    alerts: Sequence[Spool] = ()
    of_addon: Mapping[str, Spool] = field(default_factory=dict)
    #: Who is told that a job waits for its worker.
    dispatchable: Mapping[str, Spool] = field(default_factory=dict)


class Reader:
    """A part of a driver of its own. `posted` is called when there are new messages."""

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
        self.note(store.now())  # who is killed before the first alert must not begin at the end again

    def step(self, now: Moment) -> Moment:
        if now < self._due <= now + _PAUSE:
            return self._due
        self._due = now + _PAUSE
        end = self._store.newest()  # asked for before: what comes in between is read now or the next time
        while batch := self._store.events_of(self._kinds, self._cursor, _PAGE):
            self._take(batch, now)
            self._cursor = batch[-1].seq
            self.note(now)
            self._posted()
        self._cursor = max(self._cursor, end)
        if not self._noted <= now < self._noted + _NOTE_EVERY:
            self.note(now)
        return now + HOUR  # a commit rings

    def note(self, now: Moment) -> None:
        """How far it has come, and what was told in this window."""
        self._noted = now
        self._repeats.forget(now)
        replace_file(
            self._file,
            json.dumps({"origin": self._origin, "cursor": self._cursor, "told": self._repeats.told}).encode(),
        )

    def _begin(self, window: Span) -> tuple[str, int, Repeats]:
        end = self._store.newest()
        try:
            kept = json.loads(self._file.read_bytes())
            told = {key: SentAlert(*one) for key, one in kept["told"].items()}
            # A cursor behind the end belongs to a trail that is no more: a database was put back from a copy.
            return kept["origin"], min(kept["cursor"], end), Repeats(window, told)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.error("%s is damaged (%s): alerts from now on are told", self._file, error)  # noqa: TRY400  # a line for a person
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
        told = self._told(event, jobs)
        repeated = self._repeats.hear(told["key"], now)
        if repeated is None:
            return
        told["repeated"] = repeated
        if self._logged:
            more = f" ({repeated} more like it since the last time)" if repeated else ""
            log.warning("alert: %s%s", told["text"], more, extra={"alert": told})
        if told["kind"] == UNDELIVERED:
            return
        addon = self._receivers.of_addon.get(told["addon_id"])
        for spool in [*self._receivers.alerts, *([] if addon is None else [addon])]:
            spool.put(Message(number=event.seq, told=told, due=now, until=now + self._keep_for))

    def _dispatchable(self, event: Event, jobs: Mapping[JobId, Job], now: Moment) -> None:
        job = None if event.job_id is None else jobs.get(event.job_id)
        spool = None if job is None else self._receivers.dispatchable.get(job.intent.addon_id)
        if job is None or spool is None or event.at + self._dispatchable_for <= now:
            return
        told = self._head(event, "dispatchable") | {
            "addon_id": job.intent.addon_id,
            "job_id": job.job_id,
            "job_type": job.intent.job_type,
            "dispatch_id": event.dispatch_id,
        }
        until = event.at + self._dispatchable_for
        spool.put(Message(number=event.seq, told=told, due=now, until=until))

    def _told(self, event: Event, jobs: Mapping[JobId, Job]) -> dict[str, Any]:
        """Whoever wrote the alert: it has a kind, an owner, a key and words."""
        data = dict(event.data)
        job = None if event.job_id is None else jobs.get(event.job_id)
        kind = data.pop("kind", event.reason)
        job_id = data.pop("job_id", event.job_id)
        addon_id = data.pop("addon_id", None if job is None else job.intent.addon_id)
        key = data.pop("key", None) or f"{kind}/{job_id}"
        text = data.pop("text", None) or (f"job {job_id[-8:]}: {kind}" if job_id else str(kind))
        named = {"kind": kind, "addon_id": addon_id, "job_id": job_id, "key": key, "text": text, "data": data}
        return self._head(event, "alert") | named

    def _head(self, event: Event, what: str) -> dict[str, Any]:
        at = datetime.fromtimestamp(event.at // SECOND, UTC).replace(microsecond=event.at % SECOND)
        return {"id": f"{self._origin}-{event.seq}", "type": what, "at": at.isoformat(), "host": self._host}
