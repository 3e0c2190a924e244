"""
The launcher: the process that forks wardens. The scheduler's own process has threads and must not fork.

It is small, has no thread and runs no foreign code. It forks a warden for each pair of sockets that it gets.
It is the subreaper above the wardens, so it inherits the processes of a killed warden, and ends them. It
exits when the scheduler is gone and no process is left below it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import time
from typing import NoReturn

from penstock.runner.process_tree import (
    become_subreaper,
    children,
    descendants,
    drain_pipe,
    has_children,
    read_process,
    send_signal,
)  # fmt: skip
from penstock.runner.warden import Warden

_AGAIN_MS = 50
_TIME_FOR_WARDENS = 3.0


def main(control_fd: int) -> None:
    control = socket.socket(fileno=control_fd)
    become_subreaper()
    wakeup = _child_wakeups()
    gc.collect()
    gc.freeze()  # so that wardens share memory with the launcher
    Launcher(control, wakeup).run()


def _child_wakeups() -> int:
    """
    A descriptor that is readable when a child has ended. Signals that end a terminal session or a service are
    for the scheduler, which then ends the launcher in order. The launcher handles them and does nothing: an
    ignored signal would stay ignored in every program that is started from here.
    """
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for signum in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


class Launcher:
    def __init__(self, control: socket.socket, wakeup: int) -> None:
        self._control, self._wakeup = control, wakeup
        self._wardens: set[int] = set()
        self._orphaned = False

    def run(self) -> NoReturn:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        strays, give_up_at = False, float("inf")
        while not (self._orphaned and not has_children()):
            for fd, _ in poll.poll(_AGAIN_MS if strays or self._orphaned else None):
                if fd == self._wakeup:
                    drain_pipe(self._wakeup)
                elif not self._launch():
                    self._orphaned = True
                    give_up_at = time.monotonic() + _TIME_FOR_WARDENS
                    poll.unregister(self._control)
            self._reap()
            if time.monotonic() > give_up_at:
                self._wardens.clear()  # one that is not gone by now is stopped or stuck, and ended like a stray
            strays = self._end_strays()
        os._exit(0)

    def _launch(self) -> bool:
        try:
            _, fds, _, _ = socket.recv_fds(self._control, 1, 4)
        except ConnectionError:
            return False
        if not fds:
            return False
        pid = os.fork()
        if pid == 0:
            self._become_warden(fds)
        self._wardens.add(pid)
        for fd in fds:
            os.close(fd)
        return True

    def _become_warden(self, fds: list[int]) -> NoReturn:
        try:
            self._control.close()
            os.close(self._wakeup)
            wakeup = _child_wakeups()
            Warden(socket.socket(fileno=fds[0]), fds[1:], wakeup).run()
        except BaseException as error:  # noqa: BLE001  # a warden must not continue as a second launcher
            sys.stderr.write(f"penstock: a warden failed: {error!r}\n")
        finally:
            os._exit(70)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                self._wardens.discard(pid)

    def _end_strays(self) -> bool:
        """End the children that are no wardens: they were below a warden that was killed."""
        strays = [child for child in children(os.getpid()) if child not in self._wardens]
        for stray in strays:
            if root := read_process(stray):
                send_signal(root, signal.SIGKILL)
            for process in descendants(stray):
                send_signal(process, signal.SIGKILL)
        return bool(strays)
