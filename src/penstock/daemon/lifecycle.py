"""
The life of the daemon: builds a scheduler and its parts from the settings, runs it, and stops it within a
time.

It opens the store, takes the right to dispatch, listens, waits for a signal, and closes everything in the
opposite order. A timer limits the stop: when the time is over the process exits, and the next start recovers
as after a crash.
"""

from __future__ import annotations

import errno
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
from typing import Final, TextIO

import structlog

import penstock
from penstock import web
from penstock.alerts import Alerting
from penstock.client.signals import handled_signals
from penstock.core.errors import DispatcherHeld, PenstockError, Unavailable
from penstock.core.jobs.tracker import Graces
from penstock.core.jobs.types import AddonId, seconds
from penstock.core.jobs.workers import WorkerKinds
from penstock.runner.folder import RunnerFolder
from penstock.runner.payload import Functions, RunnerOptions
from penstock.runner.runner import AFTER_STOP, Runner
from penstock.scheduler.dispatcher import FOR_EVER
from penstock.scheduler.driver import SteadyClock
from penstock.scheduler.hosts import Introduction
from penstock.scheduler.permissions import account, private_directory, replace_file
from penstock.scheduler.service import SchedulerService
from penstock.server.listener import Config, Server, serve
from penstock.settings import Settings
from penstock.stores.api import SetAddon, committed
from penstock.stores.opening import open_store, shown

log = logging.getLogger("penstock.daemon")

EXIT_SETTINGS: Final = 2
EXIT_LATE: Final = 3  # the stop took longer than its time; the next start recovers
EXIT_BUG: Final = 70
EXIT_UNAVAILABLE: Final = 75  # another daemon, a port in use, a database that cannot be opened


#: The parts of a stop's time in which it waits for running jobs, and then for requests under way.
_RUNS: Final = 0.75
_REQUESTS: Final = 0.15
_LEAST_FOR_RUNS: Final = 0.1
#: Seconds after the end of a stop's time at which a thread makes the process exit, and at which the kernel
#: ends the process even if none of its threads can run.
_LEAVE_AFTER: Final = 0.4
_KILL_AFTER: Final = 0.6


def run(
    settings: Settings, *, on_ready: Callable[[Server], None] | None = None, accept_loss: bool = False
) -> int:
    """
    Run the scheduler until SIGTERM or SIGINT, and return the exit code. A second signal exits at once.
    `accept_loss`: start on a database file that has lost acknowledged jobs.
    """
    configure_logging(settings.log.format, settings.log.level)
    if os.geteuid() == 0 and "*" not in settings.runner.users:
        log.warning(
            "running as root: an addon that may submit commands may do everything on this machine; "
            'runner.users = {"*" = "USER"} runs them as another user'
        )
    stop = _Stop(seconds(settings.server.shutdown_timeout))
    with handled_signals(stop.on_signal):
        try:
            with ExitStack() as down:
                try:
                    server = _start_all(settings, down, accept_loss)
                except OSError as error:  # a full disk, a missing right: the operator can fix it
                    raise Unavailable(_unusable(error, settings)) from error
                if on_ready is not None:
                    on_ready(server)
                stop.wait()
        except DispatcherHeld as error:
            log.error("not started: a scheduler already uses this data: %s%s", error, _where(settings))  # noqa: TRY400  # a line for a person
            return EXIT_UNAVAILABLE
        except PenstockError as error:
            log.error("not started: %s", error)  # noqa: TRY400  # a line for a person
            return EXIT_UNAVAILABLE
        except Exception:  # no caller logs it; the exit code says that it is a bug
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
    Call `run` in a process that does nothing else. After a stop the process exits at once: everything is
    closed, and the normal end of the interpreter would take a second on a busy machine.
    """
    code = run(settings, on_ready=on_ready, accept_loss=accept_loss)
    if code == 0:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # the reader of the output is gone
                stream.flush()
        os._exit(0)
    return code


def stop_times(timeout: float) -> tuple[float, float]:
    """
    The seconds that a stop within `timeout` waits for running jobs, and then for requests. The rest of the
    time is for the end of the runner and of all other parts.
    """
    return max(_LEAST_FOR_RUNS, _RUNS * timeout - AFTER_STOP / 2), min(5.0, _REQUESTS * timeout)


def _start_all(settings: Settings, down: ExitStack, accept_loss: bool) -> Server:
    """Start every part in order; `down` stops them in the opposite order."""
    private_directory(settings.data_dir)
    rules, clock = settings.rules(), SteadyClock()
    store = open_store(settings.jobs_at, clock, rules.ordering, settings.sharing, accept_loss=accept_loss)
    down.callback(store.close)
    runs, runner = RunnerFolder(settings.data_dir), list[Runner]()
    if settings.shared:
        runs.lock()  # with PostgreSQL only this lock keeps a second daemon out of the data directory
        down.callback(runs.unlock)
    service = SchedulerService(
        store,
        rules,
        clock=None if settings.shared else clock,  # with PostgreSQL the clock of its server counts
        survivors=runs.survivors(),
        pids=lambda: [pid for one in runner for pid in one.pids()],
        preempts=True,
        introduction=Introduction(_instance(settings)),
    )
    service.start(_holder(settings))
    down.callback(service.stop)
    down.callback(Alerting(store, settings).start().stop)
    for name, addon in settings.addons.items():
        if addon.webhook is not None:
            # The webhook gets each reservation, so its receiver counts as a polling worker that is always
            # present.
            service.pulling_workers.polled(WorkerKinds(AddonId(name)), until=FOR_EVER)
        if addon.weight is not None:
            committed(store, SetAddon(AddonId(name), weight=addon.weight, by="settings"))
    server = serve(service, _config(settings))
    down.callback(server.stop)
    service.job_service.explainer.runner_disabled = not settings.runner.enabled
    if settings.runner.enabled:
        runner.append(Runner(service, runs, _runner_settings(settings, server)).start())
        server.set_runner(runner[0])
        down.callback(runner[0].stop, stop_times(seconds(settings.server.shutdown_timeout))[0])
    _send_metrics(settings, server, down)
    # One of the first steps of a stop: start no further job.
    down.callback(setattr, service.machine, "draining", True)
    _publish(settings, server, down)
    if server.url is not None:
        service.registration.set_url(server.url)
    return server


def _instance(settings: Settings) -> str:
    """
    The permanent id of this data directory. After a crash only a daemon with this id can take the host name
    again at once.
    """
    file = settings.data_dir / "instance"
    if not file.exists():
        replace_file(file, secrets.token_hex(16).encode())
    return file.read_text().strip()


def _holder(settings: Settings) -> str:
    name = f"{settings.host_id} " if settings.shared else ""
    return f"the daemon {name}in {settings.data_dir}"


def _config(settings: Settings) -> Config:
    server, address = settings.server, settings.server.listen
    return Config(
        directory=settings.data_dir,
        bind=None if address is None else address.host,
        port=0 if address is None else address.port,
        socket=settings.socket,
        token_file=server.token_file,
        tls_cert=server.tls_cert,
        tls_key=server.tls_key,
        trusted_proxies=server.trusted_proxies,
        allowed_hosts=server.allowed_hosts,
        stop_sec=stop_times(seconds(server.shutdown_timeout))[1],
        output=RunnerFolder(settings.data_dir).output,
        functions=_functions(settings),
        page=web.static() if web.complete() else None,
    )


def _functions(settings: Settings) -> Functions:
    return Functions(paths=settings.runner.functions)


def _runner_settings(settings: Settings, server: Server) -> RunnerOptions:
    runner, usual = settings.runner, RunnerOptions()
    return RunnerOptions(
        slots=runner.slots,
        workers=usual.workers if runner.workers is None else runner.workers,
        graces=Graces(runner.cancel_grace, runner.term_grace),
        functions=_functions(settings),
        path=tuple(str(path) for path in runner.path),
        passed_on=runner.pass_on,
        users={addon: account(user) for addon, user in runner.users.items()},
        url=server.url,
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


def _publish(settings: Settings, server: Server, down: ExitStack) -> None:
    """
    Write the addresses to the log and to `daemon.json`, where clients read them: with port 0 only the daemon
    knows the port.
    """
    socket = server.socket
    facts = {
        "pid": os.getpid(),
        "url": server.url,
        "socket": None if socket is None else str(socket),
        "token_file": str(server.token_file),
        "version": penstock.__version__,
        "started_at": datetime.now(UTC).isoformat(),
    }
    replace_file(_info_file(settings), f"{json.dumps(facts, indent=2)}\n".encode())
    down.callback(_info_file(settings).unlink, missing_ok=True)
    places = [place for place in (server.url, facts["socket"]) if place]
    log.info("listening on %s; token in %s", " and ".join(map(str, places)), server.token_file)
    if settings.shared:
        log.info("host %s of %s", settings.host_id, shown(settings.jobs_at))


def _info_file(settings: Settings) -> Path:
    return settings.data_dir / "daemon.json"


def _unusable(error: OSError, settings: Settings) -> str:
    """The file of an error and what is wrong with it; if it is in the data directory, also what to do."""
    file = Path(os.fsdecode(error.filename or settings.data_dir))
    refused = error.errno in (errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EROFS)
    hint = (
        "; --data-dir names another directory" if refused and file.is_relative_to(settings.data_dir) else ""
    )
    return f"{file}: {error.strerror}{hint}"


def _where(settings: Settings) -> str:
    with suppress(OSError, ValueError):
        facts = json.loads(_info_file(settings).read_text())
        places = " and ".join(place for place in (facts["url"], facts["socket"]) if place)
        return f". It listens on {places}; `penstock stop` stops it"
    return ""


class _Stop:
    """
    Handles the signals of a daemon. The first one requests a stop within the time. The second one, or the end
    of the time, ends the process.
    """

    def __init__(self, within: float) -> None:
        self._within, self._requested = within, threading.Event()
        self._timer = threading.Timer(within + _LEAVE_AFTER, self._exit_now)
        self._timer.daemon = True
        #: Whether to use the kernel's timer: only in the main thread of a process that runs nothing but the
        #: daemon.
        self._alarmed = threading.current_thread() is threading.main_thread()
        if self._alarmed:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the parent may have ignored it

    def on_signal(self, number: signal.Signals) -> None:
        if self._requested.is_set():
            os._exit(128 + number)
        log.info(
            "%s: stopping within %g s; a second signal kills running jobs at once", number.name, self._within
        )
        # On a busy machine or during a long C call the timer's thread may not run. The kernel's timer works
        # all the same.
        if self._alarmed:
            signal.setitimer(signal.ITIMER_REAL, self._within + _KILL_AFTER)
        self._requested.set()
        self._timer.start()

    def wait(self) -> None:
        self._requested.wait()

    def done(self) -> None:
        self._timer.cancel()
        if self._alarmed:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _exit_now(self) -> None:
        log.error("the stop took more than %s s: exiting as it is", self._within)
        os._exit(EXIT_LATE)


def configure_logging(form: str, level: str, stream: TextIO | None = None) -> None:
    """
    Log one line per record of the standard library's loggers, for a terminal or as JSON. `form`: auto,
    console or json.
    """
    out = sys.stderr if stream is None else stream
    last: list[structlog.typing.Processor]
    if form == "console" or (form == "auto" and out.isatty()):
        # Show no values of variables in tracebacks: one may be a password.
        plain = structlog.dev.plain_traceback
        last = [structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=plain)]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.add_log_level,
                structlog.stdlib.add_logger_name,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.stdlib.ExtraAdder(),
            ],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Their lines about each request or connection would fill the log.
    for noisy in ("uvicorn.access", "uvicorn.error", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
