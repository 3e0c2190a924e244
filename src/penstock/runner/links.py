"""
A dispatch that runs here, and the runner's ends of the sockets to its processes: the launcher, the wardens,
the warm workers.
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
from penstock.runner.process_tree import RUNNER_MARK, children, look, send
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
    #: When its claim was sent (`boot_time`).
    sent_at: float
    #: Its warden kills it at this moment (`boot_time`) unless the runner names a later one before.
    until: float = 0.0
    #: With it a command can call the control socket while it runs. A function calls through its worker.
    token: str = ""
    warden: WardenLink | None = None
    worker: WorkerLink | None = None
    call: int = 0  # its number among the calls of its worker
    waits_since: float = 0.0  # for a worker
    #: What it reported, while some of its processes live or some of its output is not written.
    outcome: Outcome | None = None
    yielded: bool = False
    noted: bool = False  # it logged something, which its warden writes asynchronously
    spent: Money = 0
    #: JSON: the results of its parents; None: it has none.
    parents: str | None = None
    peak: int = 0  # bytes: the most that one process of a command had in memory

    def __post_init__(self) -> None:
        ttl = seconds(self.dispatch.expires_at - self.dispatch.admitted_at)
        super().__init__(self.dispatch.dispatch_id, self.sent_at, ttl)

    @property
    def pid(self) -> int | None:
        """The command, or the worker that has the function; None: neither has begun."""
        return (self.warden.root or None) if self.warden is not None else None

    def order(self, op: str, **more: Any) -> None:
        """To its warden, if it has one yet."""
        if self.warden is not None:
            self.warden.order(op, **more)

    @property
    def folder(self) -> list[str]:
        """Where its output is, below the folder of all runs."""
        return [self.job.job_id, str(self.dispatch.fence)]


def python_code(path: tuple[str, ...], module: str, call: str) -> str:
    """
    A program that finds this package where this process found it, whatever is installed for that Python. Our
    folder comes first only during the import: the modules beside this package must not hide the job's own.
    """
    home = str(Path(__file__).resolve().parents[2])
    return (
        f"import sys; sys.path.insert(0, {home!r}); from {module} import main; "
        f"sys.path[:] = [*{path!r}, *sys.path[1:], {home!r}]; main({call})"
    )


class LauncherLink:
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
        The descriptors go to a new warden. If the launcher is dead, the sockets among them close, as their
        other ends see.
        """
        try:
            socket.send_fds(self._sock, [b"w"], fds)
        except OSError:
            return
        finally:
            for fd in fds:
                os.close(fd)

    def close(self, wait_sec: float | None) -> None:
        """The launcher ends what is left below it and exits. `wait_sec`: how long to wait for that."""
        self._sock.close()
        try:
            self._process.wait(wait_sec)
        except subprocess.TimeoutExpired:
            self._process.returncode = 0  # init reaps it when this process is gone


class WardenLink(Channel):
    """One warden. `mark`: what its tree carries in the environment."""

    def __init__(self, mark: str, launcher: LauncherLink, loop: IoLoop, worker: Sequence[int] = ()) -> None:
        """`worker`: descriptors for a warm worker below it; they are closed here whatever happens."""
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
        """Begin with a new tree. A warden without a worker runs one command after the other."""
        self.mark = mark
        self.root = 0
        self.written: list[int] = []  # calls whose output is on disk
        self.report: Frame | None = None  # how its tree ended
        self.refused: Frame | None = None

    def order(self, op: str, **more: Any) -> None:
        self.send({"op": op, **more})

    def update(self) -> bool:
        """Take the warden's messages. False: it is gone, and without a `report` it was killed."""
        frames = self.receive()
        for frame in frames or ():
            match frame["op"]:
                case "started":
                    self.pid, self.root = frame["warden"], frame["pid"]
                case "written":
                    self.written.append(frame["call"])
                case "refused":
                    self.refused = frame
                case "gone":
                    self.report = frame
        return frames is not None

    def force(self) -> None:
        """Kill a warden that does not do its duty. The launcher inherits what is below it, and ends that."""
        if self.pid and (process := look(self.pid)):
            send(process, signal.SIGKILL)


class WorkerLink(Channel):
    """A warm worker: the channel to it, the calls that it has, and the warden above it."""

    def __init__(self, mark: str, launcher: LauncherLink, loop: IoLoop) -> None:
        with ExitStack() as undo:  # out of descriptors halfway, it must leave none behind
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
        self.user: SystemUser | None = None  # the one it runs as; None: the daemon's own
        #: By number, in their order: the first may run, the others have not begun.
        self.calls: dict[int, ActiveDispatch] = {}
        #: They have ended, but some of their processes live, or their output is not written.
        self.closing: dict[int, ActiveDispatch] = {}
        self.begun = 0  # the number of the last call
        self.last = False  # it gets no further calls
        self.active_at = 0.0  # when it last got a call or sent a frame

    def hand_over(self, runs: list[ActiveDispatch]) -> None:
        """Tickets go before calls: a call without a ticket counts as taken back."""
        first = min((*self.calls, *self.closing, self.begun + 1))
        given = dict(enumerate(runs, self.begun + 1))
        self.begun += len(runs)
        for call, run in given.items():
            run.call, run.worker, run.warden = call, self, self.warden
        self.calls |= given
        os.write(self._tickets, b"".join(call.to_bytes(TICKET, "little") for call in given))
        self.warden.order(
            "begin",
            first=first,
            calls=[[call, *run.folder] for call, run in given.items()],
            until=min(run.until for run in self.calls.values()),
        )
        self.send(*(_call(run) for run in runs))

    def take_back(self) -> list[ActiveDispatch]:
        """Every call that it has not begun. The worker skips their frames, which have no ticket any more."""
        try:
            tickets = os.read(self._tickets_out, 65_536)
        except BlockingIOError:
            return []
        calls = [int.from_bytes(tickets[at : at + TICKET], "little") for at in range(0, len(tickets), TICKET)]
        return [self.calls.pop(call) for call in calls if call in self.calls]

    def left_processes(self) -> bool:
        """Whether its function left processes running: beside it, below the warden, or below itself."""
        return children(self.warden.pid) != [self.warden.root] or bool(children(self.warden.root))

    def close(self) -> None:
        if self.fileno() >= 0:
            super().close()
            os.close(self._tickets)
            os.close(self._tickets_out)


def _call(run: ActiveDispatch) -> Frame:
    work = cast("FunctionPayload", run.work)
    facts = facts_of(run.job, run.dispatch, run.job.attempt, run.checkpoint, run.parents)
    return {
        "op": "call",
        "call": run.call,
        # The arguments travel as they are.
        "facts": facts._replace(payload="null"),
        "function": work.function,
        "by_star": work.by_star,
        "args": work.args,
        "kwargs": work.kwargs,
    }
