"""What a run may say about itself and ask, whichever way it comes: from a function through its worker, from a command through the
door, or over HTTP. A checkpoint and an amount spent are written down before the answer; progress rides on the next heartbeat.

Where a running command says and asks things: a Unix socket, one JSON object a line in each direction.

    {"token": "...", "op": "progress", "progress": 0.5}
    {}

The name is in the abstract namespace, so there is no path to grow too long and no file to leave behind. Only processes of our own user and of those in `runner.users` get an answer, and
only with the token of a run that is still running.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final

from penstock.core.errors import Refused, Unavailable
from penstock.core.jobs.tracker import Tracker
from penstock.core.jobs.types import Money, money_of
from penstock.core.text import parsed, storable, storable_json, type_name
from penstock.runner.channels import Frame, IoLoop
from penstock.runner.links import ActiveDispatch
from penstock.scheduler.job_service import Answer, JobService

log = logging.getLogger("penstock.runner")

_MOST_CHECKPOINT: Final = 1_000_000
_MOST_MESSAGE: Final = 10_000


class RunRequests:
    """`note`: into the output of the run. `told`: what a heartbeat was answered."""

    def __init__(
        self,
        job_service: JobService,
        tracker: Tracker,
        note: Callable[[ActiveDispatch, str], None],
        told: Callable[[ActiveDispatch, Answer], None],
    ) -> None:
        self._job_service, self._tracker, self._note, self._told = job_service, tracker, note, told

    def answer(self, run: ActiveDispatch, call: Frame) -> Frame:
        # A function that talks to us at all will look; a command may only tell, and never ask.
        if run.worker is not None or call.get("op") == "should_yield":
            self._tracker.hears(run.dispatch_id)
        try:
            return self._answer(run, call)
        except _Wrong as error:
            return {"error": str(error)}
        except (Refused, Unavailable) as error:
            return {"error": str(error)}
        except Exception as error:  # whatever it is, the run that said it gets an answer
            log.exception("what job %s said cannot be written", run.job.job_id)
            return {"error": f"it cannot be written ({type_name(error)})"}

    def _answer(self, run: ActiveDispatch, call: Frame) -> Frame:
        match call.get("op"):
            case "checkpoint":
                return self._checkpoint(run, call.get("checkpoint"))
            case "progress":
                run.latest_progress = _fraction(call.get("progress"))
                if message := call.get("message"):
                    self._write_note(run, f"{run.latest_progress * 100:.0f} %: {message}")
            case "spend":
                run.spent += _amount(call.get("amount"))
                self._beat(run, spent=run.spent)
            case "log":
                self._write_note(run, call.get("message"))
            case "hears" | "should_yield":
                return {"yield": self._tracker.should_yield(run.dispatch_id)}
            case "yield":
                run.yielded = True
            case other:
                raise _Wrong(f"there is nothing called {other!r:.60} to say or ask")
        return {}

    def _write_note(self, run: ActiveDispatch, message: Any) -> None:
        if not isinstance(message, str):
            raise _Wrong("message must be a text")
        self._note(run, storable(message[:_MOST_MESSAGE]))

    def _checkpoint(self, run: ActiveDispatch, checkpoint: Any) -> Frame:
        if checkpoint is None:
            return {"checkpoint": run.checkpoint}
        if not isinstance(checkpoint, str) or len(checkpoint) > _MOST_CHECKPOINT:
            raise _Wrong(f"checkpoint must be at most {_MOST_CHECKPOINT} characters of JSON")
        checkpoint = storable_json(checkpoint)
        try:
            parsed(checkpoint)
        except (ValueError, RecursionError) as error:
            raise _Wrong(f"checkpoint is no JSON: {error}") from error
        self._beat(run, checkpoint=checkpoint)
        run.checkpoint = checkpoint
        return {}

    def _beat(self, run: ActiveDispatch, **what: Any) -> None:
        answer = self._job_service.heartbeat(run.dispatch_id, progress=run.latest_progress, **what)
        self._told(run, answer)


class _Wrong(ValueError):
    pass


def _fraction(said: Any) -> float:
    if isinstance(said, bool) or not isinstance(said, int | float) or not 0 <= said <= 1:
        raise _Wrong("progress must be 0..1")
    return float(said)


def _amount(said: Any) -> Money:
    try:
        amount = money_of(said)
    except ValueError:
        amount = -1
    if amount < 0:
        raise _Wrong("amount must be a number that is not negative, in the job's unit")
    return amount


_MOST_LINE: Final = 4_000_000
_MOST_VISITORS: Final = 256
#: Where no descriptor is left for a visitor, the next look is so much later.
_PAUSE_SEC: Final = 0.5


class ControlSocket:
    def __init__(
        self, name: str, watch: IoLoop, answer: Callable[[str, Frame], Frame], users: Collection[int] = ()
    ) -> None:
        """`answer`: to a token and what was said with it. `users`: further ones whose processes get an answer."""
        self._users = {os.getuid(), 0, *users}
        self.address = f"@{name}"
        self._watch, self._answer = watch, answer
        self._visitors: dict[socket.socket, bytearray] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{name}")
        self._socket.listen(64)
        self._socket.setblocking(False)
        watch.add(self._socket, self._knocked)

    def _knocked(self) -> None:
        try:
            visitor, _ = self._socket.accept()
        except BlockingIOError:
            return  # it is gone again
        except OSError:  # no descriptor is left: it stays in line
            self._watch.pause(self._socket, _PAUSE_SEC)
            return
        if len(self._visitors) >= _MOST_VISITORS or _user(visitor) not in self._users:
            visitor.close()
            return
        visitor.setblocking(False)
        self._visitors[visitor] = bytearray()
        self._watch.add(visitor, partial(self._hear, visitor))

    def _hear(self, visitor: socket.socket) -> None:
        said = self._visitors[visitor]
        try:
            data = visitor.recv(65_536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        said += data
        *lines, rest = bytes(said).split(b"\n")
        self._visitors[visitor] = bytearray(rest)
        answers = b"".join(json.dumps(self._reply(line)).encode() + b"\n" for line in lines)
        if not data or len(rest) > _MOST_LINE or not _send(visitor, answers):
            self._dismiss(visitor)

    def _reply(self, line: bytes) -> Frame:
        try:
            said: Any = json.loads(line)
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict) or not isinstance(said.get("token"), str):
            return {"error": "say one JSON object a line, with the token of the job"}
        return self._answer(said["token"], said)

    def _dismiss(self, visitor: socket.socket) -> None:
        del self._visitors[visitor]
        self._watch.drop(visitor)
        visitor.close()

    def close(self) -> None:
        for visitor in list(self._visitors):
            self._dismiss(visitor)
        self._watch.drop(self._socket)
        self._socket.close()


def _send(visitor: socket.socket, data: bytes) -> bool:
    """False: it does not read its answers. Who asks little and reads them never fills a socket."""
    try:
        return visitor.send(data) == len(data) if data else True
    except OSError:
        return False


def _user(visitor: socket.socket) -> int:
    size = struct.calcsize("3i")
    return int(struct.unpack("3i", visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1])
