"""
The composition root: settings in, a running scheduler out, and an end in time whatever hangs.

Nothing here decides anything. It opens the store, takes the right to dispatch, listens, waits for a signal, and takes it all down again in the
opposite order. A timer stands behind the way down: when the time is over the process leaves, and what that leaves undone is what
a crash leaves undone, which the next start mends.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import penstock
from penstock import web
from penstock.alerts import Alerting, AlertTargets
from penstock.client.signals import heard
from penstock.core.errors import DispatcherHeld, PenstockError, Unavailable
from penstock.core.jobs.tracker import Graces
from penstock.core.jobs.types import AddonId, seconds
from penstock.daemon.logs import configure
from penstock.runner import Functions, Leftovers, Runner, RunnerOptions
from penstock.runner.runner import AFTER_STOP
from penstock.scheduler.clock import SteadyClock
from penstock.scheduler.hosts import Introduction
from penstock.scheduler.private_files import private_directory, replace_file
from penstock.scheduler.pulling_workers import FOR_EVER, WorkerKinds
from penstock.scheduler.service import SchedulerService
from penstock.scheduler.users import account
from penstock.server.listener import Config, Server, serve
from penstock.settings import Settings
from penstock.stores.api import SetAddon, committed
from penstock.stores.opening import open_store, shown

__all__ = ["EXIT_BUG", "EXIT_LATE", "EXIT_SETTINGS", "EXIT_UNAVAILABLE", "run", "run_program", "shares"]

log = logging.getLogger("penstock.daemon")

EXIT_SETTINGS: Final = 2
EXIT_LATE: Final = 3  # the stop took longer than it may; what it left undone the next start mends
EXIT_BUG: Final = 70
EXIT_UNAVAILABLE: Final = 75  # another daemon, a port in use, a database that cannot be opened


#: Of the time that a stop may take: for runs to yield or be ended, and then for requests that are being served.
_RUNS: Final = 0.75
_REQUESTS: Final = 0.15
_LEAST_FOR_RUNS: Final = 0.1
#: After the time of a stop the process leaves by itself, and a little later by the kernel, which needs no thread of ours for it.
_LEAVE_AFTER: Final = 0.4
_KILL_AFTER: Final = 0.6


def run(
    settings: Settings, *, on_ready: Callable[[Server], None] | None = None, accept_loss: bool = False
) -> int:
    """
    Until SIGTERM or SIGINT; a second one does not wait. The exit code is the answer. `accept_loss`: start on a database file that has lost
    acknowledged work.
    """
    configure(settings.log.format, settings.log.level)
    if os.geteuid() == 0 and "*" not in settings.runner.users:
        log.warning(
            "running as root: an addon that may submit commands may do everything on this machine; "
            'runner.users = {"*" = "USER"} runs them as another user'
        )
    stop = _Stop(seconds(settings.server.shutdown_timeout))
    with heard(stop.hear):
        try:
            with ExitStack() as down:
                try:
                    server = _up(settings, down, accept_loss)
                except OSError as error:  # a full disk, a right that is missing: the operator can mend it
                    raise Unavailable(f"{error.filename or settings.data_dir}: {error.strerror}") from error
                if on_ready is not None:
                    on_ready(server)
                stop.wait()
        except DispatcherHeld as error:
            log.error("not started: %s%s", error, _where(settings))  # noqa: TRY400  # a line for a person, not a crash
            return EXIT_UNAVAILABLE
        except PenstockError as error:
            log.error("not started: %s", error)  # noqa: TRY400  # a line for a person, not a crash
            return EXIT_UNAVAILABLE
        except Exception:  # the last one who can write it down, and the exit code says that it was our fault
            log.exception("the daemon failed")
            return EXIT_BUG
        finally:
            stop.done()
    log.info("stopped")
    return 0


def run_program(
    settings: Settings, *, on_ready: Callable[[Server], None] | None = None, accept_loss: bool = False
) -> int:
    """
    `run` as all that a process does. After a stop it does not come back: everything is closed, and to take the interpreter apart, which would join
    threads and free memory, takes a second on a busy machine, which the stop does not have.
    """
    code = run(settings, on_ready=on_ready, accept_loss=accept_loss)
    if code == 0:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # the other end is gone
                stream.flush()
        os._exit(0)
    return code


def shares(timeout: float) -> tuple[float, float]:
    """
    How long a stop within `timeout` seconds waits for runs, and then for requests. Together with what the runner may take beyond
    its share they leave a part of the time for closing everything else.
    """
    return max(_LEAST_FOR_RUNS, _RUNS * timeout - AFTER_STOP / 2), min(5.0, _REQUESTS * timeout)


def _up(settings: Settings, down: ExitStack, accept_loss: bool) -> Server:
    """In this order: what is put on `down` last is taken down first."""
    private_directory(settings.data_dir)
    rules, clock = settings.rules(), SteadyClock()
    store = open_store(settings.jobs_at, clock, rules.ordering, settings.sharing, accept_loss=accept_loss)
    down.callback(store.close)
    runs, runner = Leftovers(settings.data_dir), list[Runner]()
    if settings.shared:
        runs.take()  # a file has its own lock; here nothing else keeps two daemons out of one data directory
        down.callback(runs.give_back)
    service = SchedulerService(
        store,
        rules,
        clock=None if settings.shared else clock,  # a server's clock is not ours to follow
        survivors=runs.survivors(),
        pids=lambda: [pid for one in runner for pid in one.pids()],
        preempts=True,
        introduction=Introduction(_instance(settings)),
    )
    service.start(_holder(settings))
    down.callback(service.stop)
    down.callback(Alerting(store, settings.data_dir / "alerts", _alert_targets(settings)).start().stop)
    for name, addon in settings.addons.items():
        if (
            addon.webhook is not None
        ):  # told of each reservation, so it is a two-step worker that is always present
            service.fetchers.polled(WorkerKinds(AddonId(name)), until=FOR_EVER)
        if addon.weight is not None:
            committed(store, SetAddon(AddonId(name), weight=addon.weight, by="settings"))
    config = _config(settings)
    server = serve(service, config)
    down.callback(server.stop)
    if settings.runner.enabled:
        runner.append(Runner(service, runs, _runner_settings(settings, server)).start())
        server.set_runner(runner[0])
        down.callback(runner[0].stop, shares(seconds(settings.server.shutdown_timeout))[0])
    _send_metrics(settings, server, down)
    down.callback(
        setattr, service.machine, "draining", True
    )  # before anything else goes: nothing more is granted
    _tell(settings, server, config.socket, down)
    if settings.server.listen is not None:
        service.registration.tell(server.url)
    return server


def _instance(settings: Settings) -> str:
    """Of this data directory, for good: after a crash it takes its own name up again, and nobody else with the same name can."""
    file = settings.data_dir / "instance"
    if not file.exists():
        replace_file(file, secrets.token_hex(16).encode())
    return file.read_text().strip()


def _holder(settings: Settings) -> str:
    return (
        f"the daemon {settings.host_id} in {settings.data_dir}"
        if settings.shared
        else f"the daemon in {settings.data_dir}"
    )


def _config(settings: Settings) -> Config:
    server, address = settings.server, settings.server.listen
    return Config(
        directory=settings.data_dir,
        bind=None if address is None else address.host,
        port=0 if address is None else address.port,
        socket=_socket(settings),
        token_file=server.token_file,
        tls_cert=server.tls_cert,
        tls_key=server.tls_key,
        trusted_proxies=server.trusted_proxies,
        allowed_hosts=server.allowed_hosts,
        stop_sec=shares(seconds(server.shutdown_timeout))[1],
        output=Leftovers(settings.data_dir).output,
        functions=_functions(settings),
        page=web.static() if web.complete() else None,
    )


def _socket(settings: Settings) -> Path | None:
    """The kernel has room for 107 characters. Somebody deep in a tree of directories still gets a scheduler."""
    if len(bytes(settings.socket)) <= _MAX_SOCKET_PATH:
        return settings.socket
    log.warning(
        "no Unix socket: %s is longer than the kernel takes; clients need PENSTOCK_URL", settings.socket
    )
    return None


_MAX_SOCKET_PATH: Final = 107


def _alert_targets(settings: Settings) -> AlertTargets:
    alerts, addons = settings.alerts, settings.addons
    return AlertTargets(
        log=alerts.log,
        command=alerts.command,
        webhook=alerts.webhook,
        of_addon={name: one.alert_webhook for name, one in addons.items() if one.alert_webhook is not None},
        dispatchable={name: one.webhook for name, one in addons.items() if one.webhook is not None},
        dispatchable_for=settings.leases.start_timeout,
        secret_file=settings.webhook_secret_file,
        allow_private=alerts.allow_private,
        window=alerts.window,
        retry_for=alerts.retry_for,
    )


def _functions(settings: Settings) -> Functions:
    return Functions(paths=settings.runner.functions)


def _runner_settings(settings: Settings, server: Server) -> RunnerOptions:
    told, usual = settings.runner, RunnerOptions()
    return RunnerOptions(
        slots=told.slots,
        workers=usual.workers if told.workers is None else told.workers,
        graces=Graces(told.cancel_grace, told.term_grace),
        functions=_functions(settings),
        path=tuple(str(path) for path in told.path),
        passed_on=told.pass_on,
        users={addon: account(user) for addon, user in told.users.items()},
        url=server.url if settings.server.listen is not None else None,
    )


def _send_metrics(settings: Settings, server: Server, down: ExitStack) -> None:
    if settings.telemetry.otlp is None:
        return
    from penstock.daemon.telemetry import OtlpExport, otlp  # noqa: PLC0415  # an extra, and slow to load

    telemetry = OtlpExport(
        server.families,
        otlp(settings.telemetry.otlp),
        every=seconds(settings.telemetry.every),
        attributes={"service.instance.id": settings.host_id},
    )
    down.callback(telemetry.start().stop)


def _tell(settings: Settings, server: Server, socket: Path | None, down: ExitStack) -> None:
    """Into the log, and into `daemon.json` for whoever looks for us: with port 0 nobody else knows."""
    url = server.url if settings.server.listen is not None else None
    told = {
        "pid": os.getpid(),
        "url": url,
        "socket": None if socket is None else str(socket),
        "token_file": str(server.token_file),
        "version": penstock.__version__,
        "started_at": datetime.now(UTC).isoformat(),
    }
    replace_file(_whoami(settings), f"{json.dumps(told, indent=2)}\n".encode())
    down.callback(_whoami(settings).unlink, missing_ok=True)
    places = [place for place in (url, told["socket"]) if place]
    log.info("listening on %s; token in %s", " and ".join(map(str, places)), server.token_file)
    if settings.shared:
        log.info("host %s of %s", settings.host_id, shown(settings.jobs_at))


def _whoami(settings: Settings) -> Path:
    return settings.data_dir / "daemon.json"


def _where(settings: Settings) -> str:
    with suppress(OSError, ValueError):
        told = json.loads(_whoami(settings).read_text())
        return f". It listens on {' and '.join(place for place in (told['url'], told['socket']) if place)}"
    return ""


class _Stop:
    """The first signal asks for an end within the time; the second, or the end of the time, takes it."""

    def __init__(self, within: float) -> None:
        self._within, self._told = within, threading.Event()
        self._timer = threading.Timer(within + _LEAVE_AFTER, self._leave)
        self._timer.daemon = True
        #: Only a program of our own is ended by the kernel, and only its main thread may say so.
        self._alarmed = threading.current_thread() is threading.main_thread()
        if self._alarmed:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # our parent may have ignored it

    def hear(self, number: signal.Signals) -> None:
        if self._told.is_set():
            os._exit(128 + number)
        log.info("%s: stopping within %s s", number.name, self._within)
        # The timer needs a turn of the interpreter, which a busy machine or a long call of C code may not give it. The kernel's ends us in any case.
        if self._alarmed:
            signal.setitimer(signal.ITIMER_REAL, self._within + _KILL_AFTER)
        self._told.set()
        self._timer.start()

    def wait(self) -> None:
        self._told.wait()

    def done(self) -> None:
        self._timer.cancel()
        if self._alarmed:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _leave(self) -> None:
        log.error("the stop took more than %s s: leaving as it is", self._within)
        os._exit(EXIT_LATE)
