"""The runner's ends of the sockets to its processes: the launcher, the wardens, the warm workers."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.runner.frames import BadFrame, Channel, Frame
from penstock.runner.trees import RUNNER_MARK, children, look, send

__all__ = ["LauncherLink", "WardenLink", "WorkerLink", "python_code"]


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

    def launch(self, control: socket.socket, talk: socket.socket | None) -> None:
        """When it is dead the sockets close with it, which is how the other end hears of it."""
        fds = [control.fileno()] + ([] if talk is None else [talk.fileno()])
        try:
            socket.send_fds(self._sock, [b"w"], fds)
        except OSError:
            return
        finally:
            control.close()
            if talk is not None:
                talk.close()

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self, wait_sec: float | None) -> None:
        """It ends what is left below it and goes. `wait_sec`: how long to wait for that; it goes on without us."""
        self._sock.close()
        try:
            self._process.wait(wait_sec)
        except subprocess.TimeoutExpired:
            self._process.returncode = 0  # it is reaped by init, when we are gone


class WardenLink:
    """One warden. `mark`: what its tree carries in the environment."""

    def __init__(self, mark: str, launcher: LauncherLink, talk: socket.socket | None = None) -> None:
        ours, theirs = socket.socketpair()
        self.mark = mark
        self.pid = self.root = 0
        self.written = False  # all output of the job that is over
        self.report: Frame | None = None  # its last word
        self.refused: Frame | None = None
        self._channel = Channel(ours)
        launcher.launch(theirs, talk)

    def fileno(self) -> int:
        return self._channel.fileno()

    @property
    def unsent(self) -> bool:
        return self._channel.unsent

    def push(self) -> None:
        self._channel.push()

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
                    self.written = True
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


class WorkerLink:
    """A warm worker: the conversation with it, and the warden above it."""

    def __init__(self, warden: WardenLink, talk: socket.socket) -> None:
        self.warden = warden
        self.jobs = 0
        self.idle_since = 0.0
        self._channel = Channel(talk)

    def fileno(self) -> int:
        return self._channel.fileno()

    @property
    def unsent(self) -> bool:
        return self._channel.unsent

    def push(self) -> None:
        self._channel.push()

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

    def left_behind(self) -> bool:
        """Whether its function left processes running: beside it, below the warden, or below itself."""
        return children(self.warden.pid) != [self.warden.root] or bool(children(self.warden.root))

    def close(self) -> None:
        self._channel.close()
