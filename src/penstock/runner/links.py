"""
An attempt of this runner, and the runner's ends of the sockets to its processes: the launcher, the wardens
and the warm workers.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from penstock.core.jobs.job import Dispatch, Job
from penstock.core.jobs.types import Money, seconds
from penstock.runner.channels import TICKET, Channel, Frame, IoLoop, make_page
from penstock.runner.payload import FunctionPayload, Work
from penstock.runner.process_tree import RUNNER_MARK, children, read_process, send_signal
from penstock.scheduler.permissions import SystemUser
from penstock.work.leases import ActiveLease, facts_of
from penstock.work.outcome import Outcome


@dataclass(eq=False)
class ActiveDispatch(ActiveLease):
    """One attempt at a job, while this runner is responsible for it."""

    job: Job
    dispatch: Dispatch  # as the store last returned it
    work: Work
    checkpoint: str | None
    #: When the runner sent the claim (`boot_time`).
    sent_at: float
    #: The warden kills the attempt at this moment (`boot_time`), unless the runner names a later one before.
    until: float = 0.0
    #: A running command sends it to the control socket. A function sends its requests through its worker.
    token: str = ""
    warden: WardenLink | None = None
    worker: WorkerLink | None = None
    call: int = 0  # the number of the call in its worker
    waiting_since: float = 0.0  # since when it has waited for a worker
    #: The reported outcome, while a process of the attempt lives or some of its output is not written.
    outcome: Outcome | None = None
    yielded: bool = False
    has_notes: bool = False  # its warden still writes a log line
    spent: Money = 0
    #: The results of its parents, as JSON. None: it has no parents.
    parents: str | None = None
    peak_memory: int = 0  # bytes, of the largest process of a command

    def __post_init__(self) -> None:
        ttl = seconds(self.dispatch.expires_at - self.dispatch.admitted_at)
        super().__init__(self.dispatch.dispatch_id, self.sent_at, ttl)

    @property
    def pid(self) -> int | None:
        """The process of the command, or of the worker that has the function. None: neither has started."""
        return (self.warden.root or None) if self.warden is not None else None

    def order(self, op: str, **more: Any) -> None:
        """Send an order to the warden, if the attempt has one yet."""
        if self.warden is not None:
            self.warden.order(op, **more)

    @property
    def folder(self) -> list[str]:
        """The folder of its output, below the runner's folder."""
        return [self.job.job_id, str(self.dispatch.fence)]


def python_code(path: tuple[str, ...], module: str, call: str) -> str:
    """
    Code for `python -c` that imports `module` from this very package, whatever that Python has installed. The
    package's folder comes first only during the import: modules beside the package must not hide the job's
    own.
    """
    home = str(Path(__file__).resolve().parents[2])
    return (
        f"import sys; sys.path.insert(0, {home!r}); from {module} import main; "
        f"sys.path[:] = [*{path!r}, *sys.path[1:], {home!r}]; main({call})"
    )


class LauncherLink:
    """The launcher and the socket to it. `mark`: the launcher's value of RUNNER_MARK."""

    def __init__(self, mark: str) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = python_code((), "penstock.runner.launcher", str(theirs.fileno()))
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and our own code
                [sys.executable, "-I", "-S", "-c", code],
                env={RUNNER_MARK: mark},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def fileno(self) -> int:
        return self._sock.fileno()

    def launch(self, fds: list[int]) -> None:
        """
        Start a warden with these descriptors. If the launcher is dead they are closed, which their other ends
        see.
        """
        try:
            socket.send_fds(self._sock, [b"w"], fds)
        except OSError:
            return
        finally:
            for fd in fds:
                os.close(fd)

    def close(self, wait_sec: float | None) -> None:
        """Let the launcher end all processes below it and exit. `wait_sec`: how long to wait for its exit."""
        self._sock.close()
        try:
            self._process.wait(wait_sec)
        except subprocess.TimeoutExpired:
            self._process.returncode = 0  # not reaped here: init does it when this process is gone


class WardenLink(Channel):
    """One warden and the socket to it. `mark`: the value of DISPATCH_MARK in its processes."""

    def __init__(self, mark: str, launcher: LauncherLink, loop: IoLoop, worker: Sequence[int] = ()) -> None:
        """`worker`: descriptors for a warm worker below the warden. They are closed here in any case."""
        try:
            ours, theirs = socket.socketpair()
        except OSError:
            for fd in worker:
                os.close(fd)
            raise
        super().__init__(ours, loop)
        self.pid = 0
        self.idle_since = 0.0
        self.watch_over(mark)
        launcher.launch([theirs.detach(), *worker])

    def watch_over(self, mark: str) -> None:
        """Begin with a new tree: a warden without a worker runs one command after the other."""
        self.mark = mark
        self.root = 0
        self.written_calls: list[int] = []  # calls whose output is on disk
        self.report: Frame | None = None  # how its tree ended
        self.refused: Frame | None = None

    def order(self, op: str, **more: Any) -> None:
        self.send({"op": op, **more})

    def update(self) -> bool:
        """Read the warden's messages. False: the warden is gone; if it left no `report`, it was killed."""
        frames = self.receive()
        for frame in frames or ():
            match frame["op"]:
                case "started":
                    self.pid, self.root = frame["warden"], frame["pid"]
                case "written":
                    self.written_calls.append(frame["call"])
                case "refused":
                    self.refused = frame
                case "gone":
                    self.report = frame
        return frames is not None

    def force(self) -> None:
        """Kill a warden that does not react. The launcher inherits its processes and ends them."""
        if self.pid and (process := read_process(self.pid)):
            send_signal(process, signal.SIGKILL)


class WorkerLink(Channel):
    """A warm worker: the channel to it, its calls, and the warden above it."""

    def __init__(self, mark: str, launcher: LauncherLink, loop: IoLoop) -> None:
        with ExitStack() as undo:  # if descriptors run out halfway, close those made so far
            ours, theirs = map(undo.enter_context, socket.socketpair())
            self._tickets_out, self._tickets = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            undo.callback(os.close, self._tickets_out)
            undo.callback(os.close, self._tickets)
            with ExitStack() as given:
                fds = [os.dup(theirs.fileno())]
                given.callback(os.close, fds[0])
                fds.append(os.dup(self._tickets_out))
                given.callback(os.close, fds[1])
                fds.append(make_page())
                given.pop_all()
            self.warden = WardenLink(mark, launcher, loop, fds)
            theirs.close()
            undo.pop_all()
        super().__init__(ours, loop)
        self.user: SystemUser | None = None  # None: the daemon's own user
        #: By number, in order: the first may run, the others have not begun.
        self.calls: dict[int, ActiveDispatch] = {}
        #: Ended calls of which a process lives, or some output is not written.
        self.closing: dict[int, ActiveDispatch] = {}
        self.begun = 0  # the number of the last call
        self.last = False  # it gets no further calls
        self.active_at = 0.0  # when it last got a call or sent a frame

    def hand_over(self, attempts: list[ActiveDispatch]) -> None:
        """Send calls to the worker. Tickets go first: a call without a ticket counts as taken back."""
        first = min((*self.calls, *self.closing, self.begun + 1))
        given = dict(enumerate(attempts, self.begun + 1))
        self.begun += len(attempts)
        for call, attempt in given.items():
            attempt.call, attempt.worker, attempt.warden = call, self, self.warden
        self.calls |= given
        os.write(self._tickets, b"".join(call.to_bytes(TICKET, "little") for call in given))
        self.warden.order(
            "begin",
            first=first,
            calls=[[call, *attempt.folder] for call, attempt in given.items()],
            until=min(attempt.until for attempt in self.calls.values()),
        )
        self.send(*(_call(attempt) for attempt in attempts))

    def take_back(self) -> list[ActiveDispatch]:
        """
        Take back every call that the worker has not begun. It skips their frames, which have no ticket any
        more.
        """
        try:
            tickets = os.read(self._tickets_out, 65_536)
        except BlockingIOError:
            return []
        calls = [int.from_bytes(tickets[at : at + TICKET], "little") for at in range(0, len(tickets), TICKET)]
        return [self.calls.pop(call) for call in calls if call in self.calls]

    def left_processes(self) -> bool:
        """Whether a function left processes running, below the worker or below its warden."""
        return children(self.warden.pid) != [self.warden.root] or bool(children(self.warden.root))

    def close(self) -> None:
        if self.fileno() >= 0:
            super().close()
            os.close(self._tickets)
            os.close(self._tickets_out)


def _call(attempt: ActiveDispatch) -> Frame:
    work = cast("FunctionPayload", attempt.work)
    facts = facts_of(attempt.job, attempt.dispatch, attempt.job.attempt, attempt.checkpoint, attempt.parents)
    return {
        "op": "call",
        "call": attempt.call,
        # The arguments travel as they are.
        "facts": facts._replace(payload="null"),
        "function": work.function,
        "by_star": work.by_star,
        "args": work.args,
        "kwargs": work.kwargs,
    }
