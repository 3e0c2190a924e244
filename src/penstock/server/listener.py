"""
The server: listens on a TCP address and a Unix socket, with one event loop in a thread of its own.

uvicorn's protocol class reads and writes HTTP. Its server class is not used: it wakes ten times a second even
without clients, and cannot end a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Final, Self

import uvicorn
import uvloop
from prometheus_client.core import Metric
from uvicorn.server import ServerState

from penstock.core.errors import Unavailable
from penstock.core.jobs.types import DispatchId
from penstock.runner.output import Output
from penstock.runner.payload import Functions
from penstock.scheduler.permissions import private_directory, secret_key
from penstock.scheduler.service import SchedulerService
from penstock.server.app import LOOPBACK, Api, RequestLimits
from penstock.server.app_state import AppState, RunnerAccess
from penstock.server.connections import ConnectionLimits, Peers, SocketListener
from penstock.server.metrics import MetricsCollector
from penstock.server.page import WebPage
from penstock.server.stats_history import HISTORY_FILE, StatsHistory
from penstock.server.tokens import FIRST_FILE, LOCAL, Sessions, TokenFile

log = logging.getLogger("penstock.server")

_MAX_SOCKET_PATH: Final = 107  # bytes, by the kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """
    The options of a server. `directory` has the tokens and must be private. `bind` None: no TCP. `socket`
    None: no Unix socket.

    The settings refuse an address beyond loopback without TLS and `allowed_hosts`. If such an address gets
    here, connections and requests from other machines are refused (`Peers`, `check_origin`).
    """

    directory: Path
    bind: str | None = "127.0.0.1"
    port: int = 0
    socket: Path | None = None
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    trusted_proxies: Collection[str] = ()
    #: Host names that are accepted besides those of loopback.
    allowed_hosts: Collection[str] = ()
    limits: RequestLimits = field(default_factory=RequestLimits)
    connection_limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    #: Seconds for requests under way when the server stops.
    stop_sec: float = 5.0
    #: With a runner: the output of its attempts, and the functions that may be submitted to it.
    output: Callable[[DispatchId], Output] | None = None
    functions: Functions = field(default_factory=Functions)
    #: The files of the page; None: no page.
    page: Path | None = None


def serve(service: SchedulerService, config: Config) -> Server:
    """Start a server; it listens when this returns."""
    return Server(service, config).start()


class Server:
    """The HTTP server of a scheduler, in a thread of its own."""

    def __init__(self, service: SchedulerService, config: Config) -> None:
        self._config = config
        self._peers = Peers(config.trusted_proxies, tls=config.tls_cert is not None)
        self.tokens = TokenFile(config.directory, service.store.now, first=config.token_file)
        self.token_file = config.token_file or config.directory / FIRST_FILE
        self.port = 0
        #: None: the server listens on TCP alone. Also if the path of the socket is too long for the kernel.
        self.socket = config.socket
        if self.socket is not None and len(bytes(self.socket)) > _MAX_SOCKET_PATH:
            log.warning("no Unix socket: the path %s is too long; clients need PENSTOCK_URL", self.socket)
            self.socket = None
        self.listeners: list[SocketListener] = []
        self._ready, self._failed = Event(), list[BaseException]()
        self._loop = uvloop.new_event_loop()
        history = StatsHistory(config.directory / HISTORY_FILE)
        history.load(service.store.now() / 1e6)
        self.app_state = AppState(
            service,
            self.tokens,
            loop=self._loop,
            output=config.output,
            functions=config.functions,
            history=history,
        )
        self._stop = asyncio.Event()
        self.thread = Thread(target=self._run, name="penstock-http", daemon=True)

    @property
    def url(self) -> str | None:
        """The address of the API. None: only the Unix socket is served."""
        scheme, host = "https" if self._config.tls_cert else "http", self._config.bind
        if host is None:
            return None
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    def set_runner(self, runner: RunnerAccess) -> None:
        """Let running jobs of this runner call the API with the tokens that the runner gave them."""
        self.app_state.runner = runner

    def families(self) -> Iterator[Metric]:
        """The metrics of `/metrics`."""
        return MetricsCollector(self.app_state).collect()

    def login_url(self) -> str | None:
        """
        A link that opens the page once, with all rights, for the user that started the daemon. None: there is
        no page.
        """
        sessions = self.app_state.sessions
        return None if sessions is None else sessions.link(LOCAL, self.app_state.store.now()).url

    def start(self) -> Self:
        self.thread.start()
        self._ready.wait()
        if self._failed:
            self.thread.join()
            raise self._failed[0]
        return self

    def stop(self) -> None:
        """Accept no more requests. Streams and long polls end now, requests under way within `stop_sec`."""
        if self.thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has just ended by itself
                self._loop.call_soon_threadsafe(self._stop.set)
            self.thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:  # noqa: BLE001 - `start` raises it
            self._failed.append(error)
        finally:
            self._loop.close()
            self._ready.set()

    async def _serve(self) -> None:
        config, app_state = self._config, self.app_state
        hosts = LOOPBACK | {host.lower() for host in config.allowed_hosts}
        state = ServerState()
        with contextlib.ExitStack() as undo:
            undo.callback(app_state.close)
            sockets = [sock for sock in (self._tcp(undo), self._unix(undo)) if sock]
            page = self._page(app_state)
            api = Api(app_state, hosts=hosts, limits=config.limits, page=page)
            self.listeners = [self._listen(sock, api, state) for sock in sockets]
            for listener in self.listeners:
                undo.callback(listener.close)
            app_state.stats.start()
            self._ready.set()
            await self._stop.wait()
            api.stopping = True
            for listener in self.listeners:
                listener.close()
            app_state.event_hub.close()
            await app_state.stats.close()
            await self._drain(state)

    def _page(self, app_state: AppState) -> WebPage | None:
        if self._config.page is None or self.url is None:
            return None
        secure = self._config.tls_cert is not None or bool(self._config.trusted_proxies)
        app_state.sessions = Sessions(self.tokens, secure=secure, url=self.url, port=self.port)
        return WebPage(self._config.page, app_state.sessions)

    def _listen(self, sock: socket.socket, api: Api, state: ServerState) -> SocketListener:
        config = uvicorn.Config(
            app=api,
            lifespan="off",
            ws="none",
            access_log=False,
            log_config=None,
            proxy_headers=False,
            timeout_keep_alive=30,
        )
        config.load()
        limits = self._config.connection_limits
        unix = sock.family == socket.AF_UNIX
        return SocketListener(
            sock,
            config,
            state,
            most=most_connections(limits, unix=unix),
            limits=limits,
            peers=self._peers,
            tls=None if unix else self._tls(),
            loop=self._loop,
        )

    def _tls(self) -> ssl.SSLContext | None:
        if self._config.tls_cert is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(
            self._config.tls_cert, secret_key(self._config.tls_key or self._config.tls_cert)
        )
        return context

    def _tcp(self, undo: contextlib.ExitStack) -> socket.socket | None:
        bind = self._config.bind
        if bind is None:
            return None
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        sock = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((bind, self._config.port))
        except OSError as error:
            port = self._config.port
            fix = (
                "choose another port: `penstock up --port 0` takes any free one, or the setting server.listen"
            )
            raise Unavailable(
                f"cannot listen on {bind}:{port} ({error.strerror}): {fix}", bind=bind, port=port
            ) from error
        self.port = sock.getsockname()[1]
        return sock

    def _unix(self, undo: contextlib.ExitStack) -> socket.socket | None:
        path = self.socket
        if path is None:
            return None
        private_directory(path.parent)
        _clear_stale(path)
        sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sock.bind(str(path))
        undo.callback(path.unlink, missing_ok=True)
        path.chmod(0o600)
        return sock

    async def _drain(self, state: ServerState) -> None:
        for connection in list(state.connections):
            connection.shutdown()
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=self._config.stop_sec)
        for task in state.tasks:
            task.cancel()
        for connection in list(state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)


def _clear_stale(path: Path) -> None:
    """Remove the socket of a daemon that was killed. Raises Unavailable if another process listens on it."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(str(path)) == 0:
            raise Unavailable(
                f"another process listens on {path} already: is a daemon running?", path=str(path)
            )
    path.unlink()


def most_connections(limits: ConnectionLimits, *, unix: bool) -> int:
    """
    The most connections that a listener may have. Half of this process's descriptors are reserved for jobs,
    their output and the database.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most == resource.RLIM_INFINITY:
        return limits.local if unix else limits.connections
    local = min(limits.local, max(4, most // 8))
    return local if unix else min(limits.connections, max(4, most // 2 - local))
