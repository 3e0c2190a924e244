"""Finds settings that contradict each other, or that this machine cannot fulfil."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TypeAlias
from urllib.parse import urlsplit

from penstock.core.jobs.alerts import refusal
from penstock.scheduler.permissions import account, missing_capabilities
from penstock.settings.settings import KeyPath, Settings

#: The keys of a contradiction, what is wrong, and how to correct it.
Contradiction: TypeAlias = tuple[tuple[KeyPath, ...], str, str]


def _paths(*dotted: str) -> tuple[KeyPath, ...]:
    return tuple(tuple(key.split(".")) for key in dotted)


def _users(users: Mapping[str, str]) -> Iterator[Contradiction]:
    """Check the users before anything runs: a job that ran as the wrong user could not be undone."""
    others = False
    for addon, name in users.items():
        try:
            others |= account(name).uid != os.geteuid()
        except KeyError:
            message = f"names the user {name!r} for addon {addon!r}, which this machine does not have"
            yield _paths("runner.users"), message, f"create it (`useradd --system {name}`) or name another"
    if others and (missing := missing_capabilities()):
        message = f"needs to switch users, which this process may not: it lacks {', '.join(missing)}"
        fix = "run the daemon as root, or by the systemd unit with the drop-in for runner.users (ops/)"
        yield _paths("runner.users"), message, fix


def contradictions(settings: Settings) -> Iterator[Contradiction]:
    """Every contradiction, the cheap checks first."""
    capacity, quiet, server = settings.capacity, settings.quiet, settings.server
    if capacity.reserve >= capacity.total:
        keys = _paths("capacity.reserve", "capacity.total")
        yield keys, "leaves no units for jobs", "let capacity.reserve be below capacity.total"
    if not quiet.quiet < quiet.normal < quiet.busy:
        keys = _paths("quiet.quiet", "quiet.normal", "quiet.busy")
        yield keys, "does not rise", "let quiet.quiet be below quiet.normal, and that below quiet.busy"
    if quiet.fresh_for < quiet.every:
        keys = _paths("quiet.fresh_for", "quiet.every")
        yield keys, "is stale before the next one is taken", "let quiet.fresh_for be at least quiet.every"
    runner, leases = settings.runner, settings.leases
    if runner.enabled and leases.grace < runner.cancel_grace + runner.term_grace:
        keys = _paths("leases.grace", "runner.cancel_grace", "runner.term_grace")
        yield (
            keys,
            "gives an attempt up, and its job to another worker, before the attempt is killed",
            "let leases.grace be at least runner.cancel_grace and runner.term_grace together",
        )
    yield from _users(runner.users if runner.enabled else {})
    if (server.tls_cert is None) != (server.tls_key is None):
        keys = _paths("server.tls_cert", "server.tls_key")
        yield keys, "is given without the other", "give server.tls_cert and server.tls_key, or neither"
    for name, file in (("tls_cert", server.tls_cert), ("tls_key", server.tls_key)):
        if file is not None and not file.is_file():
            yield _paths(f"server.{name}"), f"there is no file {file}", "name a file that exists"
    if server.listen is not None and not server.listen.local:
        yield from _exposed(settings, str(server.listen))
    if settings.telemetry.otlp is not None and not _has_otlp():
        yield _paths("telemetry.otlp"), "needs OpenTelemetry", "pip install 'penstock[otlp]', or leave it out"
    yield from _unreachable(settings)


def _has_otlp() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # its parent package is missing too
        return False


def _unreachable(settings: Settings) -> Iterator[Contradiction]:
    """
    Receivers of alerts that would fail at the first alert. Numeric addresses are checked now, host names when
    they are resolved for an alert.
    """
    alerts = settings.alerts
    if alerts.command and shutil.which(alerts.command[0]) is None:
        yield _paths("alerts.command"), f"there is no program {alerts.command[0]}", "name one that can be run"
    for path, address in settings.webhooks():
        host = urlsplit(address).hostname or ""
        with suppress(ValueError):
            if why := refusal(host, private=alerts.allow_private):
                fix = "name a receiver elsewhere" + (
                    "" if alerts.allow_private else ", or set alerts.allow_private"
                )
                yield (path,), f"is not called: {why}", fix


def _exposed(settings: Settings, address: str) -> Iterator[Contradiction]:
    """
    Settings that would expose the API to other machines. A client that may submit a command has a shell on
    this host, so a missing setting must not offer that to a network.
    """
    server = settings.server
    if server.tls_cert is None and not server.trusted_proxies:
        yield (
            _paths("server.listen"),
            f"{address} can be reached from other machines, and tokens would travel in the clear",
            "give server.tls_cert and server.tls_key, or declare server.trusted_proxies, or listen on 127.0.0.1",
        )
    if not server.allowed_hosts:
        yield (
            _paths("server.allowed_hosts"),
            f"is empty, and {address} can be reached from other machines",
            "list the host names of this scheduler",
        )
