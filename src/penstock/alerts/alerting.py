"""The trail reader and its messengers, put together from the settings."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from penstock.alerts.command import CommandReceiver
from penstock.alerts.delivery import Message, Messenger, Spool, Target
from penstock.alerts.trail_reader import UNDELIVERED, Receivers, TrailReader
from penstock.alerts.webhook import Webhook, secrets_in
from penstock.core.jobs.alerts import Alert
from penstock.core.jobs.changes import Change, alert_note
from penstock.core.jobs.types import HOUR, SECOND, AddonId, Span
from penstock.scheduler.permissions import private_directory
from penstock.scheduler.service import Driver
from penstock.stores.api import Apply, Store, committed

log = logging.getLogger("penstock.alerts")


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
        self._reader = TrailReader(
            store,
            self._folder / "reader.json",
            receivers,
            window=targets.window,
            keep_for=targets.retry_for,
            dispatchable_for=targets.dispatchable_for,
            logged=targets.log,
            posted=self._notify,
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
            driver.ring()

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
