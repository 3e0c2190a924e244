"""
A warm Python process that runs one function at a time.

It keeps what it has imported, so that a small job costs a round trip on a socket. Like every process of a job it has a session of its own
and a warden above it, which ends it, with all that the function started, when its job must end.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import socket
import sys
import traceback
from collections import deque
from threading import Lock
from typing import Any, Final

from penstock.core.errors import JobStopped, JobUnavailable
from penstock.runner.context import JobContext, JobRefused, JobYielded, _current
from penstock.runner.frames import BadFrame, Frame, Inbox, pack

__all__ = ["main"]

#: Characters of a result or of an error.
_MOST_RESULT: Final = 1_000_000
_MOST_ERROR: Final = 20_000


def main() -> None:
    # Taken away from the job: the socket is between us and the scheduler.
    fd = int(os.environ.pop("PENSTOCK_TALK"))
    os.set_inheritable(fd, False)
    try:
        Worker(socket.socket(fileno=fd)).run()
    except (EOFError, ConnectionError, BadFrame):
        os._exit(0)


class Worker:
    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._inbox = sock, Inbox()
        self._waiting: deque[Frame] = deque()
        self._lock = Lock()
        self._stop_for = ""  # the dispatch that should stop
        self._functions: dict[str, Any] = {}
        self._heard = ""  # the dispatch of which we told that it listens

    def run(self) -> None:
        while True:
            frame = self._next()
            if frame["op"] == "call":
                answer = self._call(frame)
                _flush()
                self._sock.sendall(pack(answer | {"dispatch": frame["dispatch"]}))

    def _call(self, frame: Frame) -> Frame:
        context = self._context(frame)
        token = _current.set(context)
        try:
            function = self._function(frame["function"])
            result = _result(function(*frame["args"], **frame["kwargs"]), context)
            text = json.dumps(result, allow_nan=False)
            if len(text) > _MOST_RESULT:
                raise ValueError(f"the result is {len(text)} characters of JSON; at most {_MOST_RESULT}")
        except (JobYielded, JobStopped):
            return {"op": "yielded"}
        except JobUnavailable as error:
            return {"op": "unavailable", "error": str(error)[:_MOST_ERROR]}
        except BaseException as error:  # noqa: BLE001  # SystemExit and KeyboardInterrupt too: the worker goes on
            return {"op": "failed", "error": _words(error)}
        finally:
            _current.reset(token)
        return {"op": "done", "result": text}

    def _function(self, path: str) -> Any:
        if path not in self._functions:
            module, _, name = path.partition(":")
            function = getattr(importlib.import_module(module), name)
            if not callable(function):
                raise TypeError(f"{path} is no function")
            self._functions[path] = function
        return self._functions[path]

    # the job's side of the conversation

    def _context(self, frame: Frame) -> JobContext:
        dispatch, checkpoint = frame["dispatch"], frame["checkpoint"]

        def ask(verb: str, args: dict[str, Any]) -> dict[str, Any]:
            with self._lock:
                self._sock.sendall(pack({"op": verb, "dispatch": dispatch, **args}))
                while (answer := self._next())["op"] != "answer":
                    pass
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

    def _next(self) -> Frame:
        while not self._waiting:
            self._receive(0)
        return self._waiting.popleft()

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
            if frame["op"] == "stop":
                self._stop_for = frame["dispatch"]
            else:
                self._waiting.append(frame)


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


def _words(error: BaseException) -> str:
    """Without our own frames at the top; and the end of it, for the last lines say most."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(error.with_traceback(trace)))[-_MOST_ERROR:]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue  # the function closed or replaced it
