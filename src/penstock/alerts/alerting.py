"""The reader and its messengers, put together: who is told what follows from the settings, and nothing here waits for anybody."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from penstock.alerts.command import CommandReceiver
from penstock.alerts.messenger import Messenger, Way
from penstock.alerts.reader import UNDELIVERED, Message, Reader, Receivers, Spool
from penstock.alerts.webhook import Webhook, secrets_in
from penstock.core.jobs.alerts import Alert
from penstock.core.jobs.changes import Change, alert_note
from penstock.core.jobs.types import HOUR, SECOND, AddonId, Span
from penstock.scheduler.private_files import private_directory
from penstock.scheduler.service import Driver
from penstock.stores.api import Apply, Store, committed

__all__ = ["Alerting", "Ways"]

log = logging.getLogger("penstock.alerts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """Where alerts go. `dispatchable`: by addon, who is told that a job waits for its worker, for as long as it waits."""

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
    For the process that dispatches: two readers of one folder would tell everything twice. `start` raises Unsafe when there is no
    secret to sign with; nothing that happens later reaches anybody but the log.
    """

    def __init__(self, store: Store, folder: Path, ways: Ways) -> None:
        self._store, self._folder, self._ways = store, private_directory(folder), ways
        if ways.webhook or ways.of_addon or ways.dispatchable:
            secrets_in(ways.secret_file)
        self._messengers: list[Messenger] = []
        receivers = Receivers(
            alerts=self._general(),
            of_addon={name: self._post("addon", name, url) for name, url in ways.of_addon.items()},
            dispatchable={name: self._post("job", name, url) for name, url in ways.dispatchable.items()},
        )
        self._tidy()
        self._reader = Reader(
            store,
            self._folder / "reader.json",
            receivers,
            window=ways.window,
            keep_for=ways.retry_for,
            dispatchable_for=ways.dispatchable_for,
            logged=ways.log,
            posted=self._ring,
        )
        self._rounds = [
            Driver(store.now, [messenger], name=f"penstock-messenger-{n}")
            for n, messenger in enumerate(self._messengers)
        ]
        self._reading = Driver(store.now, [self._reader], name="penstock-alerts")

    def start(self) -> Self:
        self._store.on_change(self._reading.ring)
        for driver in (*self._rounds, self._reading):
            driver.start()
        return self

    def stop(self) -> None:
        """At once: what is on its way is cut off, and is delivered after the next start."""
        self._reading.stop()
        for messenger in self._messengers:
            messenger.way.cut()
        for driver in self._rounds:
            driver.stop()
        self._reader.note(self._store.now())

    def _general(self) -> list[Spool]:
        ways = self._ways
        spools = [self._messenger(CommandReceiver(ways.command), "command")] if ways.command else []
        return spools + ([self._messenger(self._webhook(ways.webhook), "webhook")] if ways.webhook else [])

    def _post(self, role: str, addon: str, url: str) -> Spool:
        # By role and not by address: an owner who mends an address gets what could not be delivered to the wrong one.
        return self._messenger(
            self._webhook(url), f"{role}-{hashlib.sha256(addon.encode()).hexdigest()[:16]}"
        )

    def _webhook(self, url: str) -> Webhook:
        return Webhook(url, self._ways.secret_file, private=self._ways.allow_private)

    def _messenger(self, way: Way, name: str) -> Spool:
        self._messengers.append(Messenger(way, Spool(self._folder / name), self._gave_up))
        return self._messengers[-1].spool

    def _tidy(self) -> None:
        """Messages to receivers that there are no more."""
        known = {messenger.spool.folder for messenger in self._messengers}
        for folder in self._folder.iterdir():
            if folder.is_dir() and folder not in known:
                log.warning("%s: no receiver for it is set any more, so it is removed", folder)
                shutil.rmtree(folder)

    def _ring(self) -> None:
        for driver in self._rounds:
            driver.ring()

    def _gave_up(self, way: Way, message: Message, why: str) -> None:
        """In the trail too, where the page and the streams see it. A notice that a job waits is worth nothing when it does no more."""
        if message.told["type"] != "alert":
            return
        alert = Alert(
            kind=UNDELIVERED,
            addon_id=AddonId(message.told["addon_id"] or ""),
            job_id=None,
            key=f"{UNDELIVERED}/{way.name}",
            text=f"an alert could not be delivered to {way.name}: {why}",
            data={"alert": message.told["id"]},
        )
        committed(self._store, Apply([Change(self._store.now(), (alert_note(alert),))]))
