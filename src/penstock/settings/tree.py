"""All settings together, and what the engine and the daemon make of them. `sections.py` has the keys of each table."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.core.jobs.admission import AdmissionLimits
from penstock.core.jobs.admission import Caps as CoreCaps
from penstock.core.jobs.ledger import FairShare
from penstock.core.jobs.load import Capacity, Senses, Thresholds
from penstock.core.jobs.ordering import Aging, Ordering
from penstock.core.jobs.preemption import Preemption
from penstock.core.jobs.retry import Schedules
from penstock.core.jobs.spending import Budget
from penstock.core.jobs.types import AddonId, HostId
from penstock.scheduler.rules import SchedulerRules
from penstock.settings.kinds import database, folder, optional
from penstock.settings.sections import (
    AddonSettings,
    Alerts,
    CapacitySettings,
    CapSettings,
    DepthSettings,
    HostSettings,
    LeaseSettings,
    Log,
    Order,
    Postgres,
    PreemptionSettings,
    QuietSettings,
    Retention,
    Retry,
    RunnerSettings,
    ServerSettings,
    TelemetrySettings,
    key,
)
from penstock.stores.api import Depth as StoreDepth
from penstock.stores.opening import SharedOptions as StoreSharing
from penstock.stores.opening import is_address

__all__ = ["Tree"]


def section(table: type) -> Any:
    return field(default_factory=table, metadata={"section": table})


def each(table: type) -> Any:
    return field(default_factory=dict, metadata={"each": table})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    data_dir: Path = key(
        folder("an absolute path, or one that begins with ~"),
        Path(),
        "database, token and socket; mode 0700. By default `penstock` in the XDG data directory",
    )
    database: str | None = key(
        optional(database()),
        None,
        "where the jobs are: a SQLite file, or a PostgreSQL that several daemons share; none: `jobs.db` in the data directory. "
        "A password is better kept in ~/.pgpass or PGPASSWORD",
        secret=True,
    )
    host: HostSettings = section(HostSettings)
    postgres: Postgres = section(Postgres)
    server: ServerSettings = section(ServerSettings)
    log: Log = section(Log)
    capacity: CapacitySettings = section(CapacitySettings)
    quiet: QuietSettings = section(QuietSettings)
    caps: CapSettings = section(CapSettings)
    depth: DepthSettings = section(DepthSettings)
    leases: LeaseSettings = section(LeaseSettings)
    order: Order = section(Order)
    retry: Retry = section(Retry)
    retention: Retention = section(Retention)
    preemption: PreemptionSettings = section(PreemptionSettings)
    runner: RunnerSettings = section(RunnerSettings)
    alerts: Alerts = section(Alerts)
    telemetry: TelemetrySettings = section(TelemetrySettings)
    addons: Mapping[str, AddonSettings] = each(AddonSettings)

    @property
    def jobs_at(self) -> str:
        """The path or the address."""
        return self.database or str(self.data_dir / "jobs.db")

    @property
    def shared(self) -> bool:
        """Other daemons may work on the same jobs."""
        return is_address(self.jobs_at)

    @property
    def sharing(self) -> StoreSharing:
        return StoreSharing(self.postgres.schema, self.postgres.connections, self.postgres.pooler)

    @property
    def socket(self) -> Path:
        return self.data_dir / "penstock.sock"

    @property
    def token_file(self) -> Path:
        return self.server.token_file or self.data_dir / "token"

    @property
    def webhook_secret_file(self) -> Path:
        return self.alerts.webhook_secret_file or self.data_dir / "webhook.secret"

    def webhooks(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Every address that is called, by its key."""
        if self.alerts.webhook is not None:
            yield ("alerts", "webhook"), self.alerts.webhook
        for name, addon in self.addons.items():
            for one, url in (("alert_webhook", addon.alert_webhook), ("webhook", addon.webhook)):
                if url is not None:
                    yield ("addons", name, one), url

    @property
    def host_id(self) -> HostId:
        """On a file the name does not follow the machine's: what was in flight under the old one must be found again."""
        usual = platform.node() if self.shared else ""
        return HostId(self.host.name or usual or SchedulerRules().host)

    def rules(self) -> SchedulerRules:
        """What the engine goes by."""
        return SchedulerRules(
            host=self.host_id,
            labels=self.host.labels,
            capacity=Capacity(
                self.capacity.total, self.capacity.reserve, self.capacity.curve, self.capacity.units
            ),
            thresholds=Thresholds(self.quiet.quiet, self.quiet.normal, self.quiet.busy, self.quiet.margin),
            senses=Senses(needed=frozenset(self.quiet.needed), fresh_for=self.quiet.fresh_for),
            limits=self._limits(),
            ordering=self.ordering(),
            schedules=Schedules(self.retry.crash, self.retry.unavailable, self.retry.start),
            preemption=Preemption(self.preemption.threshold, self.preemption.patience),
            depth=StoreDepth(self.depth.total, self.depth.per_addon),
            lease_for=self.leases.ttl,
            reserve_for=self.leases.start_timeout,
            grace=self.leases.grace,
            tick=self.order.tick,
            sense_every=self.quiet.every,
            fetch_for=self.leases.fetch_for,
            retention=self.retention.keep,
            prune_every=self.retention.every,
            prune_step=self.retention.step,
        )

    def ordering(self) -> Ordering:
        order = self.order
        return Ordering(Aging(order.aging), order.patience, order.slack, FairShare(order.half_life))

    def _limits(self) -> AdmissionLimits:
        addons = {
            name: addon.concurrent for name, addon in self.addons.items() if addon.concurrent is not None
        }
        caps = CoreCaps(
            concurrent=self.caps.concurrent,
            per_addon=self.caps.per_addon,
            addons=addons,
            per_type=self.caps.per_type,
            types=self.caps.types,
            constraints=self.caps.constraints,
        )
        budgets = {
            AddonId(name): Budget(addon.budget_day, addon.budget_month)
            for name, addon in self.addons.items()
            if addon.budget_day is not None or addon.budget_month is not None
        }
        return AdmissionLimits(caps, budgets)
