"""
A warm Python process that runs functions, one at a time.

It keeps what it has imported, and while functions are short it is handed several calls at once, so that a small job costs less than a round trip on a socket.
A call that is handed over is not begun yet: for each there is a ticket in a pipe, and whoever reads the ticket has the call, the worker to run it
or the scheduler to take it back. Like every process of a job it has a session of its own and a warden above it, which ends it, with all that
the function started, when its job must end.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import socket
import sys
import time
from collections import deque
from threading import Lock
from types import ModuleType
from typing import Any, Final

from penstock.core.errors import JobStopped, Unavailable
from penstock.core.json_text import json_text
from penstock.core.text import error_text, safe_str
from penstock.runner.context import JobContext, JobRefused, JobYielded, _current
from penstock.runner.frames import TICKET, BadFrame, Frame, Inbox, pack
from penstock.runner.links import CallMarker

__all__ = ["main"]

#: Characters of a result.
_MOST_RESULT: Final = 1_000_000


def main() -> None:
    # Taken away from the job: these are between us and the scheduler.
    talk, tickets, page = map(int, os.environ.pop("PENSTOCK_TALK").split())
    for fd in (talk, tickets, page):
        os.set_inheritable(fd, False)
    try:
        FunctionWorker(socket.socket(fileno=talk), Tickets(tickets), CallMarker(page)).run()
    except (EOFError, ConnectionError, BadFrame):
        os._exit(0)


class Tickets:
    """The worker's end of the pipe with the numbers of the calls that nobody has begun or taken back."""

    def __init__(self, fd: int) -> None:
        self._fd, self._next = fd, 0

    def take(self, call: int) -> bool:
        """False: it was taken back. Numbers only grow, so a higher one than we look for is kept for its own call."""
        if not self._next:
            try:
                self._next = int.from_bytes(os.read(self._fd, TICKET), "little")
            except BlockingIOError:
                return False
        if self._next != call:
            return False
        self._next = 0
        return True


class FunctionWorker:
    def __init__(self, sock: socket.socket, tickets: Tickets, page: CallMarker) -> None:
        self._sock, self._inbox = sock, Inbox()
        self._tickets, self._page = tickets, page
        self._pipes = (os.dup(1), os.dup(2))  # a function may close its own
        self._family = os.open(f"/proc/{os.getppid()}/task/{os.getppid()}/children", os.O_RDONLY)
        self._alone = f"{os.getpid()} ".encode()
        self._calls: deque[Frame] = deque()
        self._answers: deque[Frame] = deque()
        self._lock = Lock()
        self._stop_for = ""  # the dispatch that should stop
        self._functions: dict[tuple[str, bool], Any] = {}
        self._heard = ""  # the dispatch of which we told that it listens

    def run(self) -> None:
        while True:
            while not self._calls:
                self._receive(0)
            frame = self._calls.popleft()
            if not self._tickets.take(frame["call"]):
                continue
            self._page.running = frame["call"]
            began = time.perf_counter()
            answer = self._call(frame)
            answer["sec"] = time.perf_counter() - began
            answer["call"] = frame["call"]
            _flush()
            if self._left_something():
                answer["left"] = True
                self._sock.sendall(pack(answer))
                while True:  # nobody else's function runs beside what this one left: we are ended with it
                    self._receive(0)
            while not self._page.all_read(self._pipes):
                time.sleep(0.000_2)
            self._sock.sendall(pack(answer))

    def _left_something(self) -> bool:
        """Processes of the function: children of ours, or what hid from us and is the warden's by now."""
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return os.pread(self._family, 4_096, 0) != self._alone
        return True

    def _call(self, frame: Frame) -> Frame:
        context = self._context(frame)
        token = _current.set(context)
        try:
            function = self._function(frame["function"], by_star=frame["by_star"])
            result = _result(function(*frame["args"], **frame["kwargs"]), context)
            text = json_text(result)
            if len(text) > _MOST_RESULT:
                raise ValueError(f"the result is {len(text)} characters of JSON; at most {_MOST_RESULT}")
        except (JobYielded, JobStopped):
            return {"op": "yielded"}
        except Unavailable as error:
            return {"op": "unavailable", "error": safe_str(error)}
        except BaseException as error:  # noqa: BLE001  # SystemExit and KeyboardInterrupt too: the worker goes on
            return {"op": "failed", "error": error_text(error)}
        finally:
            _current.reset(token)
        return {"op": "done", "result": text}

    def _function(self, path: str, *, by_star: bool) -> Any:
        function = self._functions.get((path, by_star))
        if function is None:
            name = path.partition(":")[2]
            module = importlib.import_module(path.partition(":")[0])
            function = getattr(module, name)
            if not callable(function):
                raise TypeError(f"{path} is no function")
            if by_star and not _exposes(module, name):
                raise PermissionError(
                    f"{path} is not defined in its module, only imported there: "
                    "name it in the settings (runner.functions), or in the module's __all__"
                )
            self._functions[path, by_star] = function
        return function

    # the job's side of the conversation

    def _context(self, frame: Frame) -> JobContext:
        dispatch, checkpoint, call = frame["dispatch"], frame["checkpoint"], frame["call"]

        def ask(verb: str, args: dict[str, Any]) -> dict[str, Any]:
            with self._lock:
                self._sock.sendall(pack({"op": verb, "call": call, **args}))
                while not self._answers:
                    self._receive(0)
                answer = self._answers.popleft()
            if "error" in answer:
                raise JobRefused(answer["error"])
            return answer

        def should_yield() -> bool:
            if self._heard != dispatch:
                self._heard = dispatch
                ask("hears", {})
            with self._lock:
                self._look()
            return bool(self._stop_for == dispatch)

        saved = None if checkpoint is None else json.loads(checkpoint)
        return JobContext(frame["job"], dispatch, saved, ask, should_yield)

    def _look(self) -> None:
        try:
            self._receive(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return

    def _receive(self, flags: int) -> None:
        data = self._sock.recv(262_144, flags)
        if not data:
            raise EOFError
        for frame in self._inbox.feed(data):
            match frame["op"]:
                case "call":
                    self._calls.append(frame)
                case "answer":
                    self._answers.append(frame)
                case "stop":
                    self._stop_for = frame["dispatch"]


def _exposes(module: ModuleType, name: str) -> bool:
    """What `module:*` allows: the names in `__all__`, or without one what the module itself defines."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return name in listed
    return getattr(getattr(module, name), "__module__", None) == module.__name__


def _result(value: Any, context: JobContext) -> Any:
    """Of a generator: its phases one by one; a phase that has ended is a safe place to stop."""
    if inspect.iscoroutine(value):
        value.close()
        raise TypeError("the function is `async def`; wrap it in asyncio.run")
    if not inspect.isgenerator(value):
        return value
    while True:
        try:
            checkpoint = next(value)
        except StopIteration as stop:
            return stop.value
        if checkpoint is not None:
            context.save(checkpoint)
        if context.should_yield:
            value.close()
            raise JobYielded


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue  # the function closed or replaced it
