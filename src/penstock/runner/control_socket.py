"""
Requests of a running job (checkpoint, progress, spend, log, yield), and the socket for those of commands.

A function sends them through its worker, a command through this socket, and either over HTTP.
A checkpoint and an amount spent are durable before the answer; progress goes with the next heartbeat.

The socket takes one JSON object a line, and answers each with one:

    {"token": "...", "op": "progress", "progress": 0.5}
    {}

The socket's name is in the abstract namespace: a path could be too long, and a file could be left behind.
Only processes of the daemon's user and of the users in `runner.users` get an answer, and only with the token
of a running job.
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

_MAX_CHECKPOINT: Final = 1_000_000
_MAX_MESSAGE: Final = 10_000


class RunRequests:
    """
    Answers the requests of running jobs. `note` writes into the output of an attempt; `on_heartbeat` gets the
    answer to each heartbeat.
    """

    def __init__(
        self,
        job_service: JobService,
        tracker: Tracker,
        note: Callable[[ActiveDispatch, str], None],
        on_heartbeat: Callable[[ActiveDispatch, Answer], None],
    ) -> None:
        self._job_service, self._tracker = job_service, tracker
        self._note, self._on_heartbeat = note, on_heartbeat

    def answer(self, attempt: ActiveDispatch, call: Frame) -> Frame:
        # A function that sends anything also checks for a stop; a command may report without ever asking.
        if attempt.worker is not None or call.get("op") == "should_yield":
            self._tracker.hears(attempt.dispatch_id)
        try:
            return self._answer(attempt, call)
        except (Refused, Unavailable) as error:
            return {"error": str(error)}
        except Exception as error:  # the job gets an answer in any case
            log.exception("a report of job %s cannot be written", attempt.job.job_id)
            return {"error": f"the report cannot be written ({type_name(error)})"}

    def _answer(self, attempt: ActiveDispatch, call: Frame) -> Frame:
        match call.get("op"):
            case "checkpoint":
                return self._checkpoint(attempt, call.get("checkpoint"))
            case "parents":
                return {"parents": attempt.parents or "[]"}
            case "progress":
                attempt.latest_progress = _fraction(call.get("progress"))
                if message := call.get("message"):
                    self._write_note(attempt, f"{attempt.latest_progress * 100:.0f} %: {message}")
            case "spend":
                attempt.spent += _amount(call.get("amount"))
                self._send_heartbeat(attempt, spent=attempt.spent)
            case "log":
                self._write_note(attempt, call.get("message"))
            case "hears" | "should_yield":
                return {"yield": self._tracker.should_yield(attempt.dispatch_id)}
            case "yield":
                attempt.yielded = True
            case other:
                raise Refused(f"there is no request {other!r:.60}")
        return {}

    def _write_note(self, attempt: ActiveDispatch, message: Any) -> None:
        if not isinstance(message, str):
            raise Refused("message must be a text")
        self._note(attempt, f"{storable(message[:_MAX_MESSAGE])}\n")

    def _checkpoint(self, attempt: ActiveDispatch, checkpoint: Any) -> Frame:
        if checkpoint is None:
            return {"checkpoint": attempt.checkpoint}
        if not isinstance(checkpoint, str) or len(checkpoint) > _MAX_CHECKPOINT:
            raise Refused(f"checkpoint must be at most {_MAX_CHECKPOINT} characters of JSON")
        checkpoint = storable_json(checkpoint)
        try:
            parsed(checkpoint)
        except (ValueError, RecursionError) as error:
            raise Refused(f"checkpoint is not JSON: {error}") from error
        self._send_heartbeat(attempt, checkpoint=checkpoint)
        attempt.checkpoint = checkpoint
        return {}

    def _send_heartbeat(self, attempt: ActiveDispatch, **report: Any) -> None:
        answer = self._job_service.heartbeat(attempt.dispatch_id, progress=attempt.latest_progress, **report)
        self._on_heartbeat(attempt, answer)


def _fraction(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise Refused("progress must be 0..1")
    return float(value)


def _amount(value: Any) -> Money:
    try:
        amount = money_of(value)
    except ValueError:
        amount = -1
    if amount < 0:
        raise Refused("amount must be a number that is not negative, in the job's unit")
    return amount


_MAX_LINE: Final = 4_000_000
_MAX_CLIENTS: Final = 256
#: How long new clients wait when this process is out of descriptors.
_PAUSE_SEC: Final = 0.5


class ControlSocket:
    """The socket by which running commands send requests, one JSON object a line."""

    def __init__(
        self, name: str, loop: IoLoop, answer: Callable[[str, Frame], Frame], users: Collection[int] = ()
    ) -> None:
        """
        `answer` gets a token and its request. `users`: further users whose processes get an answer.
        """
        self._users = {os.getuid(), 0, *users}
        self.address = f"@{name}"
        self._loop, self._answer = loop, answer
        #: For each client, the beginning of a line whose rest has not arrived.
        self._clients: dict[socket.socket, bytes] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{name}")
        self._socket.listen(64)
        self._socket.setblocking(False)
        loop.add(self._socket, self._accept)

    def _accept(self) -> None:
        try:
            client, _ = self._socket.accept()
        except BlockingIOError:
            return  # the client is gone again
        except OSError:  # out of descriptors: the client stays in the backlog
            self._loop.pause(self._socket, _PAUSE_SEC)
            return
        if len(self._clients) >= _MAX_CLIENTS or _user(client) not in self._users:
            client.close()
            return
        client.setblocking(False)
        self._clients[client] = b""
        self._loop.add(client, partial(self._serve, client))

    def _serve(self, client: socket.socket) -> None:
        try:
            data = client.recv(65_536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, rest = (self._clients[client] + data).split(b"\n")
        self._clients[client] = rest
        answers = b"".join(json.dumps(self._reply(line)).encode() + b"\n" for line in lines)
        if not data or len(rest) > _MAX_LINE or not _send(client, answers):
            self._drop(client)

    def _reply(self, line: bytes) -> Frame:
        try:
            request: Any = json.loads(line)
        except (ValueError, RecursionError):
            request = None
        if not isinstance(request, dict) or not isinstance(request.get("token"), str):
            return {"error": "write one JSON object a line, with the token of the job"}
        return self._answer(request["token"], request)

    def _drop(self, client: socket.socket) -> None:
        del self._clients[client]
        self._loop.drop(client)
        client.close()

    def close(self) -> None:
        for client in list(self._clients):
            self._drop(client)
        self._loop.drop(self._socket)
        self._socket.close()


def _send(client: socket.socket, data: bytes) -> bool:
    """Send, or return False: only a client that does not read its answers fills the socket."""
    try:
        return not data or client.send(data) == len(data)
    except OSError:
        return False


def _user(client: socket.socket) -> int:
    size = struct.calcsize("3i")
    return int(struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1])
