"""
The tables of the settings, one class each: the name, kind and default of every key, and what it is for. `docs/settings.md` is made from them.

The defaults that the engine has are taken from there: a number that is written twice will differ one day.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from penstock.core.jobs.intent import LABEL, LABEL_WORDS
from penstock.core.jobs.load import SCALES, TOLD, Points
from penstock.core.jobs.tracker import Graces
from penstock.core.jobs.types import HOUR, MILLISECOND, MINUTE, SECOND, Money, Span
from penstock.scheduler.rules import SchedulerRules
from penstock.settings.kinds import (
    DAY,
    Address,
    SettingKind,
    address,
    choice,
    folder,
    integer,
    many,
    money,
    named,
    number,
    optional,
    points,
    span,
    switch,
    text,
    unit_count,
    web_address,
)

__all__ = [
    "AddonSettings",
    "Alerts",
    "CapSettings",
    "CapacitySettings",
    "DepthSettings",
    "HostSettings",
    "LeaseSettings",
    "Log",
    "Order",
    "Postgres",
    "PreemptionSettings",
    "QuietSettings",
    "Retention",
    "Retry",
    "RunnerSettings",
    "ServerSettings",
    "TelemetrySettings",
    "key",
]

T = TypeVar("T")

_RULES: Final = SchedulerRules()
_GRACES: Final = Graces()
_NAME: Final = text("the name of an addon or a job type", r"[A-Za-z0-9][A-Za-z0-9_.:/@-]{0,127}")
_FLAG_NAMES: Final = choice("cpu_heavy", "disk_write_heavy", "network_heavy")
_COUNT: Final = integer(0, 1_000_000_000)


def key(kind: SettingKind[T], default: T, doc: str, *, secret: bool = False) -> Any:
    """`secret`: not in the repr, which ends up in logs."""
    return field(default=default, repr=not secret, metadata={"kind": kind, "doc": doc})


def keys(kind: SettingKind[Mapping[str, T]], doc: str) -> Any:
    return field(default_factory=dict, metadata={"kind": kind, "doc": doc})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Who may reach the scheduler."""

    listen: Address | None = key(
        optional(address()),
        Address("127.0.0.1", 8420),
        "where the HTTP API is served, besides the Unix socket `penstock.sock` in the data directory. Port 0: any free one",
    )
    allowed_hosts: tuple[str, ...] = key(
        many(text("a host name, with or without a port", r"[A-Za-z0-9.:\[\]-]{1,255}")),
        (),
        "further values of the Host header that are answered; needed to listen beyond loopback",
    )
    tls_cert: Path | None = key(
        optional(folder("the path of a PEM file")), None, "certificate chain for HTTPS"
    )
    tls_key: Path | None = key(optional(folder("the path of a PEM file")), None, "its private key")
    trusted_proxies: tuple[str, ...] = key(
        many(text("an IP address", r"[0-9a-fA-F.:]{2,45}")),
        (),
        "proxies that do TLS for us; needed to listen beyond loopback without a certificate. Plain HTTP from other machines is refused",
    )
    token_file: Path | None = key(
        optional(folder("the path of a file")),
        None,
        "the first token, made on first start, mode 0600; none: `token` in the data directory",
    )
    shutdown_timeout: Span = key(
        span(0, HOUR), 30 * SECOND, "how long a stop may take; what has not ended by then is ended"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """Which of several machines this is, where they share a database."""

    name: str | None = key(
        optional(text("1 to 128 letters, digits and ._:@-", r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")),
        None,
        "no two daemons on one database may have the same. None: the machine's name; on a file, `local`",
    )
    labels: tuple[str, ...] = key(
        many(text(LABEL_WORDS, LABEL.pattern)), (), "what it has, that jobs may ask for: gpu, arch=arm64"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Postgres:
    """How a postgresql:// database is used."""

    schema: str = key(
        text("the name of a schema", r"[a-z_][a-z0-9_]{0,62}"),
        "penstock",
        "where the tables are; made if it is not there",
    )
    connections: int = key(integer(4, 1_000), 16, "the most that are open at once")
    pooler: bool = key(
        switch(), False, "true behind a PgBouncer in transaction mode: no prepared statements, no LISTEN"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    format: str = key(
        choice("auto", "console", "json"), "auto", "auto: console in a terminal, else JSON, one object a line"
    )
    level: str = key(choice("debug", "info", "warning", "error"), "info", "what is worth a line")


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacitySettings:
    """How much may run: 0 to 100 units."""

    units: int | None = key(
        unit_count(),
        None,
        "auto: by how busy the machine is. A number: always so many, for containers and tests",
    )
    total: int = key(integer(1, 100), _RULES.capacity.total, "units of the whole machine")
    reserve: int = key(integer(0, 99), _RULES.capacity.reserve, "units that jobs never get")
    curve: Points = key(
        points(), _RULES.capacity.curve, "from the busy score to the share of units that may be used"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuietSettings:
    """When the machine counts as quiet. Scores are 0 to 10."""

    quiet: float = key(number(0, 10), _RULES.thresholds.quiet, "QUIET up to this busy score")
    normal: float = key(number(0, 10), _RULES.thresholds.normal, "NORMAL up to this one")
    busy: float = key(
        number(0, 10), _RULES.thresholds.busy, "BUSY up to this one; above it PANIC, which admits nothing"
    )
    margin: float = key(
        number(0, 5), _RULES.thresholds.margin, "how far below a threshold the score must fall to be believed"
    )
    every: Span = key(
        span(100 * MILLISECOND, MINUTE), _RULES.sense_every, "how often the machine is measured"
    )
    fresh_for: Span = key(span(SECOND, HOUR), _RULES.senses.fresh_for, "how long a reading counts")
    needed: tuple[str, ...] = key(
        many(choice(*SCALES)),
        tuple(sorted(_RULES.senses.needed)),
        f"signals without which nothing is admitted; {', '.join(TOLD)} have to be reported by an application",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CapSettings:
    """How many may be in flight at once."""

    concurrent: int | None = key(optional(_COUNT), None, "in all")
    per_addon: int | None = key(optional(_COUNT), None, "of each addon")
    per_type: int | None = key(optional(_COUNT), None, "of each job type")
    types: Mapping[str, int] = keys(named(_COUNT, _NAME), 'of one type: "addon/type", or "type" in any addon')
    constraints: Mapping[str, int] = keys(named(_COUNT, _FLAG_NAMES), "of the jobs that lean on one thing")


@dataclass(frozen=True, slots=True, kw_only=True)
class AddonSettings:
    """One table per addon, as `[addons.photos]`."""

    weight: int | None = key(
        optional(integer(1, 10_000)), None, "its share beside the others' 100; none: as it was set before"
    )
    concurrent: int | None = key(optional(_COUNT), None, "how many of its jobs may be in flight at once")
    budget_day: Money | None = key(optional(money()), None, "what its jobs may spend in a day (UTC)")
    budget_month: Money | None = key(optional(money()), None, "and in a month")
    alert_webhook: str | None = key(
        optional(web_address()), None, "who is told of its alerts, besides `alerts.webhook`"
    )
    webhook: str | None = key(
        optional(web_address()), None, "who is told, signed, that a job of it waits for its worker"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthSettings:
    """How many may be queued. At the limit a submit is refused, or waits if it asked to."""

    total: int | None = key(optional(_COUNT), _RULES.depth.total, "in all")
    per_addon: int | None = key(optional(_COUNT), _RULES.depth.per_addon, "of each addon")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionSettings:
    """A running job makes room for one that counts for clearly more."""

    threshold: int | None = key(
        optional(integer(1, 100)),
        _RULES.preemption.threshold,
        "by how much the priority must be higher; none: nobody is ever asked to make room",
    )
    patience: Span = key(
        span(SECOND, HOUR),
        _RULES.preemption.patience,
        "how long a run that was asked may take; it is asked twice, and then made to",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    ttl: Span = key(span(SECOND, HOUR), _RULES.lease_for, "how long a lease lasts without a heartbeat")
    start_timeout: Span = key(
        span(SECOND, HOUR), _RULES.reserve_for, "how long a reserved job waits for its worker"
    )
    grace: Span = key(span(0, HOUR), _RULES.grace, "how long a run that was told to stop may take to be gone")
    fetch_for: Span = key(
        span(SECOND, HOUR), _RULES.fetch_for, "how long a worker that came for jobs is expected to come again"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    tick: Span = key(
        span(10 * MILLISECOND, HOUR), _RULES.tick, "how often the queue is looked at when nothing happens"
    )
    aging: Span = key(
        span(SECOND, DAY), _RULES.ordering.aging.per_point, "how long a job waits for one point of priority"
    )
    patience: Span = key(
        span(0, DAY), _RULES.ordering.patience, "a job passed over for so long gets room kept for it"
    )
    slack: Span = key(
        span(0, 7 * DAY), _RULES.ordering.slack, "how early a time-sensitive job becomes urgent"
    )
    half_life: Span = key(
        span(SECOND, DAY), _RULES.ordering.sharing.half_life, "how fast a share that was had is forgotten"
    )


_DELAYS: Final = many(span(0, 30 * DAY))


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Delays before each next attempt; all are used, the failure after the last one is final."""

    crash: tuple[Span, ...] = key(
        _DELAYS, _RULES.schedules.crash, "worker, lease or time limit lost; then FAILED"
    )
    unavailable: tuple[Span, ...] = key(
        _DELAYS, _RULES.schedules.unavailable, "what the job needs is away; then BLOCKED"
    )
    start: tuple[Span, ...] = key(
        many(span(0, 30 * DAY), least=1), _RULES.schedules.start, "nobody came for it; the last is repeated"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    keep: Span = key(
        span(MINUTE, 3_660 * DAY), _RULES.retention, "how long finished jobs are kept; BLOCKED ones stay"
    )
    every: Span = key(span(SECOND, DAY), _RULES.prune_every, "how often old ones are looked for")
    step: int = key(integer(1, 100_000), _RULES.prune_step, "how many are forgotten in one transaction")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """Commands and functions that the scheduler runs itself."""

    enabled: bool = key(
        switch(), True, "false: nothing is run here, and such jobs wait for a worker that claims them"
    )
    slots: int = key(integer(0, 10_000), 64, "how many commands may run at once, whatever the units say")
    workers: int | None = key(
        optional(integer(1, 1_000)), None, "how many functions may run at once; none: two for each processor"
    )
    cancel_grace: Span = key(
        span(0, HOUR),
        _GRACES.cancel,
        "how long a run that listens may take from being told to stop to SIGTERM",
    )
    term_grace: Span = key(span(0, HOUR), _GRACES.term, "how long a run may take from SIGTERM to SIGKILL")
    functions: tuple[str, ...] = key(
        many(
            text(
                "module:name, or module:* for what a module defines or has in __all__",
                r"[A-Za-z_][\w.]*:(\*|[A-Za-z_]\w*)",
            )
        ),
        (),
        "which Python functions may be run; no others are",
    )
    path: tuple[Path, ...] = key(
        many(folder("an absolute path")), (), "where modules of functions are looked for first"
    )
    pass_on: tuple[str, ...] = key(
        many(text("the name of a variable; a trailing * stands for any ending", r"[A-Za-z_]\w*\*?")),
        ("LC_*",),
        "variables of the scheduler's environment that jobs may see, besides PATH, HOME and the like",
    )
    users: Mapping[str, str] = keys(
        named(
            text("the name of an operating system user", r"[A-Za-z_][A-Za-z0-9_.-]{0,31}"),
            text('the name of an addon, or "*" for all others', r"\*|[A-Za-z0-9][A-Za-z0-9_.:/@-]{0,127}"),
        ),
        "the operating system user that an addon's commands and functions run as; needs root or the capabilities that SECURITY.md names",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Alerts:
    """How the owner hears of what needs a person (`docs/alerts.md`)."""

    log: bool = key(switch(), True, "a line in the log for each")
    command: tuple[str, ...] = key(
        many(text("a program or an argument of it", r"[^\0]{1,4000}")),
        (),
        "a program that gets each on its standard input, as JSON; never through a shell",
    )
    webhook: str | None = key(optional(web_address()), None, "an address that each is posted to, signed")
    webhook_secret_file: Path | None = key(
        optional(folder("the path of a file")),
        None,
        "what webhooks are signed with, made on first start, mode 0600; none: `webhook.secret` in the data directory",
    )
    allow_private: bool = key(
        switch(), False, "whether webhooks may be on this machine or in a private network"
    )
    window: Span = key(
        span(0, 7 * DAY), HOUR, "of alerts with one key one is told in so long, and then how many were not"
    )
    retry_for: Span = key(
        span(SECOND, 7 * DAY), DAY, "how long it is tried to deliver one to a receiver that is away"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings:
    """Metrics for OpenTelemetry (`docs/telemetry.md`). Prometheus fetches them from `/metrics` and needs none of this."""

    otlp: str | None = key(
        optional(web_address()),
        None,
        "the collector that metrics are sent to, such as http://127.0.0.1:4318; needs `penstock[otlp]`",
    )
    every: Span = key(span(SECOND, DAY), 60 * SECOND, "how often")
