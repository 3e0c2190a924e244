"""
A program of the owner's that is handed the alert: on its standard input, and the main parts as variables for one-liners.

Never through a shell: an alert has words of jobs in it. It is a session and process group of its own, and the whole group is ended when its time is
over, when the scheduler stops, and when the program has left something behind.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any, Final

from penstock.alerts.messenger import MessageRefused, ReceiverAway, Stopped
from penstock.alerts.reader import Message
from penstock.core.jobs.types import Moment

__all__ = ["CommandReceiver"]

_WITHIN: Final = 30.0
_KEPT: Final = 1_000  # of what it says, for the log
_VARIABLE: Final = 4_000


class CommandReceiver:
    def __init__(self, argv: Sequence[str], *, within: float = _WITHIN) -> None:
        self._argv, self._within = tuple(argv), within
        self.name = f"command {argv[0]}"
        self._running: subprocess.Popen[bytes] | None = None
        self._stopped, self._lock = False, Lock()

    def deliver(self, message: Message, now: Moment) -> None:  # noqa: ARG002  # other ways sign with the time
        # A file and not a pipe: a program that does not read must not hold us up.
        with tempfile.TemporaryFile() as told:
            told.write(message.body)
            told.seek(0)
            try:
                process = self._start(told.fileno(), message.told)
            except OSError as error:
                raise ReceiverAway(f"it cannot be started: {error.strerror}") from error
        with process:
            said, in_time = _listen(process, time.monotonic() + self._within)
            self._end(process)
        if self._stopped:
            raise Stopped
        words = said.decode("utf-8", "replace").strip()
        if not in_time:
            raise MessageRefused(f"it had not ended after {self._within:g} s and was killed")
        if process.returncode:
            raise MessageRefused(f"it ended with {process.returncode}" + (f": {words!r}" if words else ""))

    def cut(self) -> None:
        with self._lock:
            self._stopped = True
            if self._running is not None:
                _kill(self._running)

    def _start(self, stdin: int, told: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._stopped:
                raise Stopped
            self._running = subprocess.Popen(  # noqa: S603  # the owner's own words, from the settings
                self._argv,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_environment(told),
            )
            return self._running

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """While it has not been waited for nobody else can have its number, so the group is ended before that."""
        with self._lock:
            self._running = None
            _kill(process)
            process.wait()


def _environment(told: Mapping[str, Any]) -> dict[str, str]:
    """The scheduler's own without what is meant for it, for there may be tokens in it. Long words are cut: exec takes no long variables."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    plain = {name: str(value) for name, value in told.items() if isinstance(value, (str, int))}
    return inherited | {
        f"PENSTOCK_ALERT_{name.upper()}": value[:_VARIABLE].replace("\0", "\\0")
        for name, value in plain.items()
    }


def _listen(process: subprocess.Popen[bytes], until: float) -> tuple[bytes, bool]:
    """The beginning of what it says, and whether it ended in time. It is not waited for: its number must stay its own."""
    assert process.stdout is not None
    ended, out, said = os.pidfd_open(process.pid), process.stdout.fileno(), b""
    try:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(out, select.POLLIN)
        while (left := until - time.monotonic()) > 0:
            ready = dict(poll.poll(left * 1_000))
            if out in ready:
                piece = os.read(out, 65_536)
                said = (said + piece)[:_KEPT]
                if not piece:
                    poll.unregister(out)
            if ended in ready:  # whoever else holds its output open is not waited for
                return said, True
        return said, False
    finally:
        os.close(ended)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
