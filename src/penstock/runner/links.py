"""Two numbers that a warm worker and its warden share, so that nobody has to be asked which call printed what.

The worker writes which call it runs; the warden writes how often it has begun and ended reading, so an odd number means that it reads now. A worker
goes on to the next call only when its pipes are empty and nobody reads: whatever is in a pipe was printed by the call that the page names.

The runner's ends of the sockets to its processes: the launcher, the wardens, the warm workers.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fcntl import ioctl
from pathlib import Path
from struct import Struct
from termios import FIONREAD
from typing import TYPE_CHECKING, Any, Final, cast

from penstock.runner.frames import TICKET, BadFrame, Channel, Frame
from penstock.runner.process_tree import RUNNER_MARK, children, look, send

if TYPE_CHECKING:
    from penstock.runner.attempts import ActiveDispatch
    from penstock.runner.payload import FunctionPayload
    from penstock.scheduler.permissions import SystemUser


_SIZE: Final = mmap.PAGESIZE
_COUNT: Final = Struct("i")


def page_file() -> int:
    """A descriptor to hand to both."""
    fd = os.memfd_create("penstock-page", os.MFD_CLOEXEC)
    os.ftruncate(fd, _SIZE)
    return fd


class CallMarker:
    """`fd`: of a page to share; without one it is shared with nobody, for what runs alone."""

    def __init__(self, fd: int = -1) -> None:
        self._numbers = memoryview(mmap.mmap(fd, _SIZE)).cast("Q")

    @property
    def running(self) -> int:
        """The call that runs or ran last; 0: there was none yet."""
        return self._numbers[0]

    @running.setter
    def running(self, call: int) -> None:
        self._numbers[0] = call

    @contextmanager
    def reading(self) -> Iterator[None]:
        self._numbers[1] += 1
        try:
            yield
        finally:
            self._numbers[1] += 1

    def all_read(self, pipes: tuple[int, ...]) -> bool:
        """Looked at twice: who read in between has taken something out that may not be written down yet."""
        reads = self._numbers[1]
        return reads % 2 == 0 and not any(map(_waiting, pipes)) and self._numbers[1] == reads


def _waiting(pipe: int) -> int:
    """Bytes in a pipe, which either end can tell."""
    return int(_COUNT.unpack(ioctl(pipe, FIONREAD, bytes(_COUNT.size)))[0])


def python_code(path: tuple[str, ...], module: str, call: str) -> str:
    """
    A program that finds this package where we found it, whatever is installed for that Python. Only while it is imported: what else lies beside it must
    not come before the job's own modules.
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

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._sock.fileno()

    def launch(self, fds: list[int]) -> None:
        """They become the warden's. When the launcher is dead the sockets among them close with it, which is how the other end hears of it."""
        try:
            socket.send_fds(self._sock, [b"w"], fds)
        except OSError:
            return
        finally:
            for fd in fds:
                os.close(fd)

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self, wait_sec: float | None) -> None:
        """It ends what is left below it and goes. `wait_sec`: how long to wait for that; it goes on without us."""
        self._sock.close()
        try:
            self._process.wait(wait_sec)
        except subprocess.TimeoutExpired:
            self._process.returncode = 0  # it is reaped by init, when we are gone


class _Spoken:
    """What the watch asks of whomever the runner talks to: see its `Mouth`."""

    _channel: Channel

    def fileno(self) -> int:
        return self._channel.fileno()

    @property
    def unsent(self) -> bool:
        return self._channel.unsent

    def push(self) -> None:
        self._channel.push()


class WardenLink(_Spoken):
    """One warden. `mark`: what its tree carries in the environment."""

    def __init__(self, mark: str, launcher: LauncherLink, worker: Sequence[int] = ()) -> None:
        """`worker`: descriptors for a warm worker below it; they are closed here whatever happens."""
        try:
            ours, theirs = socket.socketpair()
        except OSError:
            for fd in worker:
                os.close(fd)
            raise
        self.pid = 0
        self.idle_since = 0.0
        self.watch_over(mark)
        self._channel = Channel(ours)
        launcher.launch([theirs.detach(), *worker])

    def watch_over(self, mark: str) -> None:
        """The next command, if there was one before."""
        self.mark = mark
        self.root = 0
        self.written: list[int] = []  # calls whose output is all on disk, as was asked
        self.report: Frame | None = None  # its last word on this tree
        self.refused: Frame | None = None

    def tell(self, op: str, **more: Any) -> None:
        self._channel.send({"op": op, **more})

    def hear(self) -> bool:
        """False: it will say no more; `report` says how its tree ended, or is None if it was killed itself."""
        try:
            frames = self._channel.receive()
        except BadFrame:
            frames = None
        if frames is None:
            return False
        for frame in frames:
            match frame["op"]:
                case "started":
                    self.pid, self.root = frame["warden"], frame["pid"]
                case "written":
                    self.written.append(frame["call"])
                case "refused":
                    self.refused = frame
                case "gone":
                    self.report = frame
        return True

    def kill(self, why: str) -> None:
        self.tell("kill", why=why)

    def force(self) -> None:
        """A warden that does not do its duty. What is below it falls to the launcher, which ends it."""
        if self.pid and (process := look(self.pid)):
            send(process, signal.SIGKILL)

    def close(self) -> None:
        self._channel.close()


class WorkerLink(_Spoken):
    """A warm worker: the conversation with it, the calls that it has in hand, and the warden above it."""

    def __init__(self, mark: str, launcher: LauncherLink) -> None:
        with ExitStack() as undo:  # out of descriptors halfway, it must leave none behind
            talk, theirs = map(undo.enter_context, socket.socketpair())
            self._tickets_out, self._tickets = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            undo.callback(os.close, self._tickets_out)
            undo.callback(os.close, self._tickets)
            with ExitStack() as given:
                fds = [os.dup(theirs.fileno())]
                given.callback(os.close, fds[0])
                fds.append(os.dup(self._tickets_out))
                given.callback(os.close, fds[1])
                fds.append(page_file())
                given.pop_all()
            self.warden = WardenLink(mark, launcher, fds)
            theirs.close()
            undo.pop_all()
        self._channel = Channel(talk)
        self.user: SystemUser | None = None  # as whom it runs; None: as we do
        #: By number, in their order: the first may run, the others have not begun.
        self.calls: dict[int, ActiveDispatch] = {}
        #: They have ended; what they leave is being ended or written.
        self.closing: dict[int, ActiveDispatch] = {}
        self.begun = 0  # the number of the last call
        self.last = False  # it gets no further calls
        self.heard_at = 0.0  # when it last had something to say or to do

    def hand_over(self, runs: list[ActiveDispatch]) -> None:
        """Tickets before calls: a call without one would seem to be taken back."""
        first = min((*self.calls, *self.closing, self.begun + 1))
        given = dict(enumerate(runs, self.begun + 1))
        self.begun += len(runs)
        for call, run in given.items():
            run.call, run.worker, run.warden = call, self, self.warden
        self.calls |= given
        os.write(self._tickets, b"".join(call.to_bytes(TICKET, "little") for call in given))
        self.warden.tell(
            "begin",
            first=first,
            calls=[[call, *run.folder] for call, run in given.items()],
            until=min(run.until for run in self.calls.values()),
        )
        self._channel.send(*(_call(run) for run in runs))

    def take_back(self) -> list[ActiveDispatch]:
        """Every call that it has not begun. What it reads of them later has no ticket any more."""
        try:
            tickets = os.read(self._tickets_out, 65_536)
        except BlockingIOError:
            return []
        calls = [int.from_bytes(tickets[at : at + TICKET], "little") for at in range(0, len(tickets), TICKET)]
        return [self.calls.pop(call) for call in calls if call in self.calls]

    def tell(self, frame: Frame) -> None:
        self._channel.send(frame)

    def hear(self, heard: Callable[[Frame], None]) -> bool:
        """False: it is broken or gone. What it says is checked by whoever hears it: it runs somebody's function."""
        try:
            frames = self._channel.receive()
        except BadFrame:
            return False
        for frame in frames or ():
            heard(frame)
        return frames is not None

    def hear_out(self, heard: Callable[[Frame], None]) -> None:
        """What a dead worker had said."""
        try:
            while frames := self._channel.receive():
                for frame in frames:
                    heard(frame)
        except BadFrame:
            return

    def left_behind(self) -> bool:
        """Whether its function left processes running: beside it, below the warden, or below itself."""
        return children(self.warden.pid) != [self.warden.root] or bool(children(self.warden.root))

    def close(self) -> None:
        if self.fileno() >= 0:
            self._channel.close()
            os.close(self._tickets)
            os.close(self._tickets_out)


def _call(run: ActiveDispatch) -> Frame:
    work = cast("FunctionPayload", run.work)
    return {
        "op": "call",
        "call": run.call,
        "facts": [
            run.job.job_id,
            run.job.intent.job_type,
            run.dispatch_id,
            run.dispatch.fence,
            run.job.attempt,
            run.job.intent.addon_id,
            run.job.intent.tags,
            run.job.intent.deadline_at,
            "null",  # the arguments travel as they are
            run.checkpoint,
        ],
        "function": work.function,
        "by_star": work.by_star,
        "args": work.args,
        "kwargs": work.kwargs,
    }
