"""
A program of the owner that gets each alert: as JSON on its standard input, and its main fields as variables
for one-liners.

Never through a shell: an alert contains texts of jobs. The program has a session and process group of its
own, and the whole group is killed when its time is over, when the scheduler stops, and when the program ends
and leaves processes behind.
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

from penstock.alerts.delivery import Message, MessageRefused, ReceiverAway, Stopped
from penstock.core.jobs.types import Moment

_WITHIN: Final = 30.0
_KEPT: Final = 1_000  # characters of its output, for the log
_VARIABLE: Final = 4_000


class CommandReceiver:
    def __init__(self, argv: Sequence[str], *, within: float = _WITHIN) -> None:
        self._argv, self._within = tuple(argv), within
        self.name = f"command {argv[0]}"
        self._running: subprocess.Popen[bytes] | None = None
        self._stopped, self._lock = False, Lock()

    def deliver(self, message: Message, now: Moment) -> None:  # noqa: ARG002  # a webhook signs with the time
        # A file and not a pipe: a program that does not read must not block this thread.
        with tempfile.TemporaryFile() as body:
            body.write(message.body)
            body.seek(0)
            try:
                process = self._start(body.fileno(), message.content)
            except OSError as error:
                raise ReceiverAway(f"it cannot be started: {error.strerror}") from error
        with process:
            output, in_time = _read_output(process, time.monotonic() + self._within)
            self._end(process)
        if self._stopped:
            raise Stopped
        words = output.decode("utf-8", "replace").strip()
        if not in_time:
            raise MessageRefused(f"it had not ended after {self._within:g} s and was killed")
        if process.returncode:
            raise MessageRefused(f"it ended with {process.returncode}" + (f": {words!r}" if words else ""))

    def cut(self) -> None:
        with self._lock:
            self._stopped = True
            if self._running is not None:
                _kill(self._running)

    def _start(self, stdin: int, content: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._stopped:
                raise Stopped
            self._running = subprocess.Popen(  # noqa: S603  # the owner's own command, from the settings
                self._argv,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_environment(content),
            )
            return self._running

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the group before waiting for the process: until then no other process can get its number."""
        with self._lock:
            self._running = None
            _kill(process)
            process.wait()


def _environment(content: Mapping[str, Any]) -> dict[str, str]:
    """
    The daemon's environment without its PENSTOCK_ variables, which may hold tokens. Long values are cut: exec
    refuses them.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    plain = {name: str(value) for name, value in content.items() if isinstance(value, (str, int))}
    return inherited | {
        f"PENSTOCK_ALERT_{name.upper()}": value[:_VARIABLE].replace("\0", "\\0")
        for name, value in plain.items()
    }


def _read_output(process: subprocess.Popen[bytes], until: float) -> tuple[bytes, bool]:
    """
    The beginning of its output, and whether it ended in time. Does not reap the process, so that its number
    stays its own.
    """
    assert process.stdout is not None
    ended, out, output = os.pidfd_open(process.pid), process.stdout.fileno(), b""
    try:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(out, select.POLLIN)
        while (rest := until - time.monotonic()) > 0:
            ready = dict(poll.poll(rest * 1_000))
            if out in ready:
                piece = os.read(out, 65_536)
                output = (output + piece)[:_KEPT]
                if not piece:
                    poll.unregister(out)
            if ended in ready:  # another process may still hold its output open
                return output, True
        return output, False
    finally:
        os.close(ended)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
