"""
Every setting: one class for each table, and `Settings`, which has all tables and derives the scheduler's
rules from them.

A field has a type (the allowed values, see `kinds.py`), a default, and a description in the docstring of its
class. `docs/settings.md` is made from these three. Defaults of the scheduler come from `SchedulerRules`, so
that no number is written twice.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final, TypeAlias

from msgspec import Meta, Struct

from penstock.core.jobs.admission import AdmissionLimits, Budget, Caps, FairShare
from penstock.core.jobs.load import SCALES, Capacity, Senses, Thresholds
from penstock.core.jobs.ordering import Aging, Ordering
from penstock.core.jobs.preemption import Preemption
from penstock.core.jobs.states import Schedules
from penstock.core.jobs.tracker import Graces
from penstock.core.jobs.types import HOUR, MILLISECOND, MINUTE, SECOND, AddonId, HostId, Span
from penstock.scheduler.rules import SchedulerRules
from penstock.settings import kinds
from penstock.settings.kinds import DAY, Address, Amount, Count, Score, WebAddress, choice, span
from penstock.stores.api import Depth
from penstock.stores.opening import SharedOptions, is_address, shown

#: A tuple, because the name of an addon may contain a dot.
KeyPath: TypeAlias = tuple[str, ...]

_RULES: Final = SchedulerRules()
_GRACES: Final = Graces()

UpToAnHour = Annotated[Span, span(0, HOUR)]
SecondToHour = Annotated[Span, span(SECOND, HOUR)]
SecondToDay = Annotated[Span, span(SECOND, DAY)]
Delays = tuple[Annotated[Span, span(0, 30 * DAY)], ...]


class ServerSettings(Struct, frozen=True):
    """
    Which clients can reach the scheduler.

    listen: where the HTTP API is served, besides the Unix socket `penstock.sock` in the data directory. Port
        0: any free port
    allowed_hosts: further values of the Host header that are answered; needed to listen beyond loopback
    tls_cert: certificate chain for HTTPS
    tls_key: the private key of the certificate
    trusted_proxies: proxies that do TLS for the scheduler; needed to listen beyond loopback without a
        certificate. Plain HTTP from other machines is refused
    token_file: the first token, made on first start, mode 0600; none: `token` in the data directory
    shutdown_timeout: how long a stop may take; jobs that still run after it are killed
    """

    listen: kinds.ListenAddress | None = Address("127.0.0.1", 8420)
    allowed_hosts: tuple[kinds.HostName, ...] = ()
    tls_cert: kinds.PemFile | None = None
    tls_key: kinds.PemFile | None = None
    trusted_proxies: tuple[kinds.IpAddress, ...] = ()
    token_file: kinds.FilePath | None = None
    shutdown_timeout: UpToAnHour = 30 * SECOND


class HostSettings(Struct, frozen=True):
    """
    Which of several machines this is, where they share a database.

    name: the name of this daemon, different for each daemon on one database. None: the machine's name; with
        a SQLite file, `local`
    labels: what this machine offers to jobs that ask for it: gpu, arch=arm64
    """

    name: kinds.DaemonName | None = None
    labels: tuple[kinds.Label, ...] = ()


class PostgresSettings(Struct, frozen=True):
    """
    How a postgresql:// database is used.

    schema: the schema that has the tables; made if it does not exist
    connections: the most connections that are open at once
    pooler: true behind a PgBouncer in transaction mode: no prepared statements, no LISTEN
    """

    schema: kinds.SchemaName = "penstock"
    connections: Annotated[int, Meta(ge=4, le=1_000)] = 16
    pooler: bool = False


class LogSettings(Struct, frozen=True):
    """
    What the daemon writes to standard error.

    format: auto: console in a terminal, else JSON, one object a line
    level: the lowest level that is logged
    """

    format: Annotated[str, choice(["auto", "console", "json"])] = "auto"
    level: Annotated[str, choice(["debug", "info", "warning", "error"])] = "info"


class CapacitySettings(Struct, frozen=True):
    """
    How much may run: 0 to 100 units.

    units: auto: by how busy the machine is. A number: always that many, for containers and tests
    total: units of the whole machine
    reserve: units that jobs never get
    curve: from the busy score to the share of units that may be used
    """

    units: kinds.Units = None
    total: Annotated[int, Meta(ge=1, le=100)] = _RULES.capacity.total
    reserve: Annotated[int, Meta(ge=0, le=99)] = _RULES.capacity.reserve
    curve: kinds.Curve = _RULES.capacity.curve


class QuietSettings(Struct, frozen=True):
    """
    When the machine counts as quiet. Scores are 0 to 10.

    quiet: QUIET up to this busy score
    normal: NORMAL up to this busy score
    busy: BUSY up to this busy score; above it PANIC, which admits nothing
    margin: how far the score must fall below a threshold before the state changes back
    every: how often the machine is measured
    fresh_for: how long a reading counts
    needed: signals without which nothing is admitted; error_rate, p95_ms, in_flight must be reported by an
        application
    """

    quiet: Score = _RULES.thresholds.quiet
    normal: Score = _RULES.thresholds.normal
    busy: Score = _RULES.thresholds.busy
    margin: Annotated[float, Meta(ge=0, le=5)] = _RULES.thresholds.margin
    every: Annotated[Span, span(100 * MILLISECOND, MINUTE)] = _RULES.sense_every
    fresh_for: SecondToHour = _RULES.senses.fresh_for
    needed: tuple[Annotated[str, choice(SCALES)], ...] = tuple(sorted(_RULES.senses.needed))


class CapSettings(Struct, frozen=True):
    """
    How many jobs may be in flight at once.

    concurrent: jobs in flight at once, in all
    per_addon: jobs in flight of each addon
    per_type: jobs in flight of each job type
    types: jobs in flight of one type: "addon/type", or "type" in any addon
    constraints: jobs in flight that have one constraint
    """

    concurrent: Count | None = None
    per_addon: Count | None = None
    per_type: Count | None = None
    types: Mapping[kinds.JobTypeName, Count] = {}
    constraints: Mapping[kinds.ConstraintName, Count] = {}


class AddonSettings(Struct, frozen=True):
    """
    One table per addon, as `[addons.photos]`.

    weight: its fair share, where every other addon has 100; none: the weight that it had before
    concurrent: how many of its jobs may be in flight at once
    budget_day: how much its jobs may spend in a day (UTC)
    budget_month: how much its jobs may spend in a month (UTC)
    alert_webhook: where its alerts are sent, besides `alerts.webhook`
    webhook: where a signed notice is sent when one of its jobs waits for its worker
    """

    weight: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    concurrent: Count | None = None
    budget_day: Amount | None = None
    budget_month: Amount | None = None
    alert_webhook: WebAddress | None = None
    webhook: WebAddress | None = None


class DepthSettings(Struct, frozen=True):
    """
    How many jobs may be queued. At the limit a submit is refused, or waits if it asked to.

    total: queued jobs in all
    per_addon: queued jobs of each addon
    """

    total: Count | None = _RULES.depth.total
    per_addon: Count | None = _RULES.depth.per_addon


class LeaseSettings(Struct, frozen=True):
    """
    How long a worker may be silent, late or slow to stop.

    ttl: how long a lease lasts without a heartbeat
    start_timeout: how long a reserved job waits for its worker
    grace: how long an attempt may take to stop after it was told to
    fetch_for: how long a worker counts as present after it asked for jobs
    """

    ttl: SecondToHour = _RULES.lease_for
    start_timeout: SecondToHour = _RULES.reserve_for
    grace: UpToAnHour = _RULES.grace
    fetch_for: SecondToHour = _RULES.fetch_for


class OrderSettings(Struct, frozen=True):
    """
    Which job starts next.

    tick: how often the scheduler checks the queue when there is no event
    aging: how long a job must wait to gain one point of priority
    patience: units are kept free for a job that smaller jobs have overtaken for this long
    slack: how long before its deadline a time-sensitive job becomes urgent
    half_life: the half-life of an addon's past use, which lowers its turn in fair share
    """

    tick: Annotated[Span, span(10 * MILLISECOND, HOUR)] = _RULES.tick
    aging: SecondToDay = _RULES.ordering.aging.per_point
    patience: Annotated[Span, span(0, DAY)] = _RULES.ordering.patience
    slack: Annotated[Span, span(0, 7 * DAY)] = _RULES.ordering.slack
    half_life: SecondToDay = _RULES.ordering.sharing.half_life


class RetrySettings(Struct, frozen=True):
    """
    Delays before the next attempts. The failure after the last delay is final.

    crash: after a lost worker, a lost lease or a time limit; then FAILED
    unavailable: while a service that the job needs is away; then BLOCKED
    start: while no worker starts the job; the last delay is repeated
    """

    crash: Delays = _RULES.schedules.crash
    unavailable: Delays = _RULES.schedules.unavailable
    start: Annotated[Delays, Meta(min_length=1)] = _RULES.schedules.start


class RetentionSettings(Struct, frozen=True):
    """
    How long finished jobs are kept.

    keep: how long finished jobs are kept; BLOCKED jobs stay
    every: how often old jobs are deleted
    step: how many jobs are deleted in one transaction
    """

    keep: Annotated[Span, span(MINUTE, 3_660 * DAY)] = _RULES.retention
    every: SecondToDay = _RULES.prune_every
    step: Annotated[int, Meta(ge=1, le=100_000)] = _RULES.prune_step


class PreemptionSettings(Struct, frozen=True):
    """
    Running jobs yield to jobs of clearly higher priority.

    threshold: how much higher the priority must be; none: no job is ever asked to yield
    patience: how long a job may take to yield; it is asked twice, then stopped
    """

    threshold: Annotated[int, Meta(ge=1, le=100)] | None = _RULES.preemption.threshold
    patience: SecondToHour = _RULES.preemption.patience


class RunnerSettings(Struct, frozen=True):
    """
    Commands and functions that the scheduler runs itself.

    enabled: false: the daemon runs no jobs itself; such jobs wait for a worker that claims them
    slots: how many commands may run at once, whatever the units allow
    workers: how many functions may run at once; none: two for each processor
    cancel_grace: how long an attempt that checks for stops has between the request to stop and SIGTERM
    term_grace: how long an attempt has between SIGTERM and SIGKILL
    functions: which Python functions may be run; all others are refused
    path: directories that are searched first for modules of functions
    pass_on: variables of the daemon's environment that jobs also get, besides PATH, HOME and the like
    users: the operating system user that an addon's commands and functions run as; needs root or the
        capabilities that SECURITY.md names
    """

    enabled: bool = True
    slots: Annotated[int, Meta(ge=0, le=10_000)] = 64
    workers: Annotated[int, Meta(ge=1, le=1_000)] | None = None
    cancel_grace: UpToAnHour = _GRACES.cancel
    term_grace: UpToAnHour = _GRACES.term
    functions: tuple[kinds.FunctionName, ...] = ()
    path: tuple[kinds.Directory, ...] = ()
    pass_on: tuple[kinds.VariableName, ...] = ("LC_*",)
    users: Mapping[kinds.AddonPattern, kinds.UserName] = {}


class AlertSettings(Struct, frozen=True):
    """
    Where alerts go when something needs a person (`docs/alerts.md`).

    log: one line in the log for each alert
    command: a program that gets each alert on its standard input, as JSON; never through a shell
    webhook: an address that each alert is posted to, signed
    webhook_secret_file: the key that signs webhooks, made on first start, mode 0600; none: `webhook.secret`
        in the data directory
    allow_private: whether webhooks may be on this machine or in a private network
    window: within this time only the first alert with a key is sent, later the number of the others
    retry_for: how long an alert is retried while its receiver is away
    """

    log: bool = True
    command: tuple[kinds.Argument, ...] = ()
    webhook: WebAddress | None = None
    webhook_secret_file: kinds.FilePath | None = None
    allow_private: bool = False
    window: Annotated[Span, span(0, 7 * DAY)] = HOUR
    retry_for: Annotated[Span, span(SECOND, 7 * DAY)] = DAY


class TelemetrySettings(Struct, frozen=True):
    """
    Metrics for OpenTelemetry (`docs/telemetry.md`). Prometheus fetches them from `/metrics` and needs none of
    this.

    otlp: the collector that metrics are sent to, such as http://127.0.0.1:4318; needs `penstock[otlp]`
    every: how often metrics are sent
    """

    otlp: WebAddress | None = None
    every: SecondToDay = 60 * SECOND


class Settings(Struct, frozen=True):
    """
    Every setting. Immutable.

    data_dir: database, token and socket; mode 0700. By default `penstock` in the XDG data directory
    database: where the jobs are: a SQLite file, or a PostgreSQL that several daemons share; none: `jobs.db`
        in the data directory. A password is better kept in ~/.pgpass or PGPASSWORD
    """

    data_dir: kinds.DataDirectory = Path()
    database: kinds.DatabaseAddress | None = None
    host: HostSettings = HostSettings()
    postgres: PostgresSettings = PostgresSettings()
    server: ServerSettings = ServerSettings()
    log: LogSettings = LogSettings()
    capacity: CapacitySettings = CapacitySettings()
    quiet: QuietSettings = QuietSettings()
    caps: CapSettings = CapSettings()
    depth: DepthSettings = DepthSettings()
    leases: LeaseSettings = LeaseSettings()
    order: OrderSettings = OrderSettings()
    retry: RetrySettings = RetrySettings()
    retention: RetentionSettings = RetentionSettings()
    preemption: PreemptionSettings = PreemptionSettings()
    runner: RunnerSettings = RunnerSettings()
    alerts: AlertSettings = AlertSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    addons: Mapping[str, AddonSettings] = {}
    #: Where each value that is not a default came from.
    sources: Mapping[KeyPath, str] = {}

    def __repr__(self) -> str:
        """Short and without a password, because it appears in logs."""
        return f"<Settings: jobs in {shown(self.jobs_at)}>"

    @property
    def jobs_at(self) -> str:
        """The path of the database file, or the address of the server."""
        return self.database or str(self.data_dir / "jobs.db")

    @property
    def shared(self) -> bool:
        """Whether other daemons may share the jobs."""
        return is_address(self.jobs_at)

    @property
    def sharing(self) -> SharedOptions:
        return SharedOptions(self.postgres.schema, self.postgres.connections, self.postgres.pooler)

    @property
    def socket(self) -> Path:
        return self.data_dir / "penstock.sock"

    @property
    def webhook_secret_file(self) -> Path:
        return self.alerts.webhook_secret_file or self.data_dir / "webhook.secret"

    def webhooks(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Every webhook address with its key."""
        if self.alerts.webhook is not None:
            yield ("alerts", "webhook"), self.alerts.webhook
        for name, addon in self.addons.items():
            for one, url in (("alert_webhook", addon.alert_webhook), ("webhook", addon.webhook)):
                if url is not None:
                    yield ("addons", name, one), url

    @property
    def host_id(self) -> HostId:
        """
        The name of this host. With a SQLite file it is constant, so that a renamed machine still finds its
        attempts.
        """
        usual = platform.node() if self.shared else ""
        return HostId(self.host.name or usual or SchedulerRules().host)

    def rules(self) -> SchedulerRules:
        """The scheduler's rules that follow from these settings."""
        return SchedulerRules(
            host=self.host_id,
            labels=self.host.labels,
            capacity=Capacity(
                self.capacity.total, self.capacity.reserve, self.capacity.curve, self.capacity.units
            ),
            thresholds=Thresholds(self.quiet.quiet, self.quiet.normal, self.quiet.busy, self.quiet.margin),
            senses=Senses(needed=frozenset(self.quiet.needed), fresh_for=self.quiet.fresh_for),
            limits=self._limits(),
            ordering=Ordering(
                Aging(self.order.aging),
                self.order.patience,
                self.order.slack,
                FairShare(self.order.half_life),
            ),
            schedules=Schedules(self.retry.crash, self.retry.unavailable, self.retry.start),
            preemption=Preemption(self.preemption.threshold, self.preemption.patience),
            depth=Depth(self.depth.total, self.depth.per_addon),
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

    def _limits(self) -> AdmissionLimits:
        addons = {
            name: addon.concurrent for name, addon in self.addons.items() if addon.concurrent is not None
        }
        caps = Caps(
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
