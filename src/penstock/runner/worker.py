"""
A warm Python process that runs functions, one at a time.

It keeps what it has imported. While functions are short it gets several calls at once, so that a small job
costs less than a round trip on a socket. Each call has a ticket in a pipe, and the process that reads the
ticket has the call: the worker runs it, or the runner takes it back. Like every process of a job the worker
has a session of its own, and a warden above it that ends it, with all that the function started, when its job
must end.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from threading import Lock
from types import ModuleType
from typing import Any

from penstock.core.errors import Refused
from penstock.core.jobs.types import Money
from penstock.core.text import storable
from penstock.runner.channels import TICKET, BadFrame, CallMarker, Frame, FrameReader, pack
from penstock.runner.process_tree import has_children
from penstock.work.context import JobFacts, takes_context
from penstock.work.outcome import CurrentJob, call_with, run


def main() -> None:
    # Taken out of the environment: the job must not talk to the runner by these.
    talk, tickets, page = map(int, os.environ.pop("PENSTOCK_TALK").split())
    for fd in (talk, tickets, page):
        os.set_inheritable(fd, False)
    try:
        FunctionWorker(socket.socket(fileno=talk), Tickets(tickets), CallMarker(page)).run()
    except (EOFError, ConnectionError, BadFrame):
        os._exit(0)


class Tickets:
    """The worker's end of the pipe with the numbers of the calls that are neither begun nor taken back."""

    def __init__(self, fd: int) -> None:
        self._fd, self._next = fd, 0

    def take(self, call: int) -> bool:
        """False: it was taken back. Numbers only grow, so a higher one is kept for its own call."""
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
        self._sock, self._frames = sock, FrameReader()
        self._tickets, self._page = tickets, page
        self._pipes = (os.dup(1), os.dup(2))  # a function may close its own
        self._children_fd = os.open(f"/proc/{os.getppid()}/task/{os.getppid()}/children", os.O_RDONLY)
        self._only_child = f"{os.getpid()} ".encode()
        self._calls: deque[Frame] = deque()
        self._answers: deque[Frame] = deque()
        self._lock = Lock()
        self._stopped_dispatch, self._canceled = "", False  # the dispatch that should stop
        self._functions: dict[tuple[str, bool], tuple[Any, bool]] = {}
        self._stoppable_dispatch = ""  # the dispatch that the scheduler knows to look at these

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
            if self._left_processes():
                answer["left"] = True
                self._sock.sendall(pack(answer))
                while True:  # no other function may run beside what this one left: the warden ends the worker
                    self._receive(0)
            while not self._page.all_read(self._pipes):
                time.sleep(0.000_2)
            self._sock.sendall(pack(answer))

    def _left_processes(self) -> bool:
        """Processes of the function: children of this one, or orphans that the warden has inherited."""
        return has_children() or os.pread(self._children_fd, 4_096, 0) != self._only_child

    def _call(self, frame: Frame) -> Frame:
        facts = _facts(frame["facts"])

        def invoke(job: CurrentJob) -> Any:
            function, wants_context = self._function(frame["function"], by_star=frame["by_star"])
            context = (job.context,) if wants_context else ()
            return call_with(function, (*context, *frame["args"]), frame["kwargs"])

        outcome = run(invoke, CurrentJob(facts, _FrameChannel(self, frame["call"], facts)))
        return {"op": "ended", **outcome._asdict()}

    def _function(self, path: str, *, by_star: bool) -> tuple[Any, bool]:
        """The function at a path, and whether its first parameter is the context."""
        entry = self._functions.get((path, by_star))
        if entry is None:
            name = path.partition(":")[2]
            module = importlib.import_module(path.partition(":")[0])
            function = getattr(module, name)
            if not callable(function):
                raise TypeError(f"{path} is not a function")
            if by_star and not _is_exported(module, name):
                raise PermissionError(
                    f"{path} is not defined in its module, only imported there: "
                    "name it in the settings (runner.functions), or in the module's __all__"
                )
            entry = self._functions[path, by_star] = (function, takes_context(function))
        return entry

    # requests of the running function, through its channel

    def ask(self, call: int, verb: str, **args: Any) -> Frame:
        with self._lock:
            self._sock.sendall(pack({"op": verb, "call": call, **args}))
            while not self._answers:
                self._receive(0)
            answer = self._answers.popleft()
        if "error" in answer:
            raise Refused(answer["error"])
        return answer

    def asked_to_stop(self, call: int, dispatch_id: str) -> tuple[bool, bool]:
        """Whether this dispatch should stop, and whether it is canceled."""
        if self._stoppable_dispatch != dispatch_id:
            self._stoppable_dispatch = dispatch_id
            self.ask(call, "hears")
        with self._lock:
            self._receive_now()
        must_stop = self._stopped_dispatch == dispatch_id
        return must_stop, must_stop and self._canceled

    def _receive_now(self) -> None:
        try:
            self._receive(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return

    def _receive(self, flags: int) -> None:
        data = self._sock.recv(262_144, flags)
        if not data:
            raise EOFError
        for frame in self._frames.feed(data):
            match frame["op"]:
                case "call":
                    self._calls.append(frame)
                case "answer":
                    self._answers.append(frame)
                case "stop":
                    self._stopped_dispatch, self._canceled = frame["dispatch"], frame["canceled"]


def _is_exported(module: ModuleType, name: str) -> bool:
    """What `module:*` allows: the names in `__all__`, or without one what the module itself defines."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return name in listed
    return getattr(getattr(module, name), "__module__", None) == module.__name__


def _facts(values: list[Any]) -> JobFacts:
    facts = JobFacts(*values)
    return facts._replace(tags=tuple(facts.tags))


class _FrameChannel:
    """To the runner, by frames on the worker's socket."""

    def __init__(self, worker: FunctionWorker, call: int, facts: JobFacts) -> None:
        self._worker, self._call, self._facts = worker, call, facts

    @property
    def yielding(self) -> bool:
        return self._worker.asked_to_stop(self._call, self._facts.dispatch_id)[0]

    @property
    def canceled(self) -> bool:
        return self._worker.asked_to_stop(self._call, self._facts.dispatch_id)[1]

    def save_checkpoint(self, text: str) -> None:
        self._worker.ask(self._call, "checkpoint", checkpoint=text)

    def progress(self, fraction: float) -> None:
        self._worker.ask(self._call, "progress", progress=fraction)

    def spend(self, total: Money, amount: Money) -> None:  # noqa: ARG002  # of the protocol
        self._worker.ask(self._call, "spend", amount=f"{amount}e-6")

    def log_handler(self) -> logging.Handler:
        handler = _JobLogHandler()
        handler.send = lambda message: self._worker.ask(self._call, "log", message=message)
        return handler


class _JobLogHandler(logging.Handler):
    """Into the job's output, apart from what the function prints."""

    send: Callable[[str], object]

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.send(storable(self.format(record)))
        except Refused:  # the run is over
            return


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue  # the function closed or replaced it
