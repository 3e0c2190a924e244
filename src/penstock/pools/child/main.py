"""
The worker process, and the call target that it shares with a worker on a cluster.

One thread reads, runs and replies. It still notices a cancel while a function runs: the pool raises a counter
in a shared page. The worker checks the counter before each call and whenever the function reads
`current_call().canceled`, which costs nothing, and reads the pipe only if the counter changed.

The same page has the number of the running call. The page survives the process, so the pool knows which calls
of a dead worker had begun.

When the pool's process dies in any way, the kernel kills this process and its children: the read end of the
lifeline pipe sends SIGKILL to this process group when its last writer is gone. A thread does the same where
the kernel cannot, and where a forked copy of the parent keeps the pipe open.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import pickle
import select
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from penstock.core.text import error_line, traceback_text
from penstock.pools import context
from penstock.pools.child import protocol
from penstock.pools.child.protocol import PLAIN, PLAIN_TYPES, pack_error
from penstock.pools.child.shared_memory import AVAILABLE as SHARED_MEMORY
from penstock.pools.child.shared_memory import Arena, FilledSegment, SegmentMapper, load
from penstock.pools.context import CallContext, end_copy, process_contexts, watch_forks
from penstock.pools.timers import clock

#: The fields of the shared page.
PAGE_CANCELS, PAGE_RUNNING = 0, 1
PAGE_SIZE = 4096


def main(inlet: int, outlet: int, page_fd: int, lifeline_fd: int, parent: int) -> None:
    end_with_parent(lifeline_fd, parent)
    page = memoryview(mmap.mmap(page_fd, PAGE_SIZE)).cast("Q")
    os.close(page_fd)
    try:
        ChildWorker(inlet, outlet, page).run()
    except (EOFError, BrokenPipeError):
        os._exit(0)  # the pool is gone


def end_with_parent(lifeline: int, parent: int) -> None:
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(
            lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK
        )
    fds = [lifeline]
    if hasattr(os, "pidfd_open"):
        try:
            fds.append(os.pidfd_open(parent))
        except ProcessLookupError:
            _end_group()

    def watch() -> NoReturn:
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN | select.POLLHUP)
        poll.poll()
        _end_group()

    threading.Thread(target=watch, name="penstock-lifeline", daemon=True).start()


def _end_group() -> NoReturn:
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


class ChildWorker:
    """Reads messages, runs calls, and replies."""

    def __init__(self, inlet: int, outlet: int, page: memoryview) -> None:
        self._inlet = inlet
        self._outlet = outlet
        self._page = page
        self._peek = select.poll()
        self._peek.register(inlet, select.POLLIN)
        self._cancels = 0
        self._frames = protocol.Frames()
        self._inbox: deque[tuple[Any, ...]] = deque()
        self._target = CallTarget()
        self._functions = self._target.functions
        self._canceled: set[int] = set()
        self._mapper = SegmentMapper()
        self._arena = Arena()
        self._lent: dict[int, FilledSegment] = {}
        self._running: tuple[Any, ...] = ()
        self._is_copy = False
        watch_forks(self)

    def abandon(self) -> None:
        """
        Disable this copy of the worker, which its function forked: the calls and replies belong to the
        worker.
        """
        if not self._is_copy:  # only once: later the descriptors may belong to other files
            self._is_copy = True
            self._peek = select.poll()
            os.close(self._inlet)
            os.close(self._outlet)

    def run(self) -> None:
        process_contexts.append(self._context)
        inbox = self._inbox
        while True:
            while inbox:
                self._call(inbox.popleft())
            self._receive()

    # Receiving

    def _receive(self) -> None:
        data = os.read(self._inlet, 65536)
        if not data:
            raise EOFError
        for message in self._frames.feed(data):
            if message[0] > 0:
                self._inbox.append(message)
            else:
                self._control(*message)

    def _read_cancels(self) -> None:
        """Read the pipe if the page shows new cancels."""
        while self._page[PAGE_CANCELS] != self._cancels and self._peek.poll(0):
            self._receive()

    def _control(self, what: int, *args: Any) -> None:
        match what:
            case protocol.CANCEL:
                self._cancels += 1
                self._canceled.add(args[0])
            case protocol.DEFINE:
                self._functions[args[0]] = args[1]
            case protocol.FREE:
                self._lent.pop(args[0], None)
            case protocol.DROP:
                self._mapper.drop(args[0])
            case protocol.MAIN:
                self._set_up_or_exit(import_main, *args)
            case protocol.SETUP:
                self._set_up_or_exit(self._set_up, *args)
            case protocol.EXIT:
                self._exit()

    def _set_up(
        self, environment: tuple[list[str], str, list[str]], title: str, blob: bytes, main: Any
    ) -> None:
        sys.path[:], cwd, sys.argv[:] = environment
        os.chdir(cwd)
        _set_title(title)
        if main is not None:
            import_main(*main)
        self._target.set_up(blob)

    def _set_up_or_exit(self, fn: Any, *args: Any) -> None:
        """Make a part of the setup. If it fails, send the reason to the pool and exit."""
        try:
            fn(*args)
        except SetupFailed as failed_setup:
            self._send([(protocol.FATAL, failed_setup.reason, failed_setup.trace)])
            self._exit(1)

    def _exit(self, code: int = 0) -> NoReturn:
        """
        Exit like a program: run atexit functions and flush output, but do not join the function's threads.
        """
        import atexit  # noqa: PLC0415  # needed once

        try:
            atexit._run_exitfuncs()  # noqa: SLF001  # there is no public way without joining threads
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    # Running

    def _call(self, message: tuple[Any, ...]) -> None:
        dispatch, function, body, extra = message
        page = self._page
        if page[PAGE_CANCELS] != self._cancels:
            self._read_cancels()
        if self._canceled and dispatch in self._canceled:
            self._canceled.discard(dispatch)
            self._send([(dispatch, protocol.SKIPPED, None, 0.0)])
            return
        self._running = message
        page[PAGE_RUNNING] = dispatch
        started = clock()
        try:
            if extra is None and type(body) is tuple:
                fn = self._functions.get(function)
                value = fn(*body) if callable(fn) else self._target.function(function)(*body)
            else:
                value = self._call_fully(function, body, extra)
        except BaseException as error:  # noqa: BLE001  # the caller gets SystemExit and KeyboardInterrupt, too
            if self._is_copy:
                end_copy(error)
            kind, payload = protocol.ERROR, pack_error(error)
        else:
            if self._is_copy:
                end_copy(None)
            # The most common results, without calling `_pack`.
            kind, payload = (PLAIN, value) if type(value) in PLAIN_TYPES else self._pack(value)
            value = None
        messages: list[tuple[Any, ...]] = [(dispatch, kind, payload, clock() - started)]
        done = self._mapper.done
        while done:
            messages.append((protocol.FREE, done.popleft()))
        self._send(messages)
        page[PAGE_RUNNING] = 0
        if self._canceled:
            self._canceled.discard(dispatch)

    def _call_fully(self, function: Any, body: Any, extra: Any) -> Any:
        _, trace, ref = extra or (None, None, None)
        call: Any
        if type(body) is tuple:
            call = None, body, {}
        elif ref is None:
            call = pickle.loads(body)
        else:
            call = load(body, ref, self._mapper)
        return self._target.invoke(function, call, trace)

    def _context(self) -> CallContext:
        dispatch, _, _, extra = self._running

        def canceled() -> bool:
            self._read_cancels()
            return dispatch in self._canceled

        return make_context(dispatch, extra[0] if extra is not None else None, canceled)

    # Replying

    def _pack(self, value: Any) -> tuple[int, Any]:
        kind, data, buffers = protocol.pack_result(value)
        whole = kind == protocol.PICKLED and len(data) >= protocol.LARGE
        if not SHARED_MEMORY or not (buffers or whole):
            return kind, data
        filled = self._arena.pack([data, *buffers] if whole else [*buffers])
        self._lent[filled.ref.segment] = filled
        return protocol.SHARED, (None if whole else data, tuple(filled.ref))

    def _send(self, messages: list[tuple[Any, ...]]) -> None:
        data = protocol.frame(messages)
        sent = os.write(self._outlet, data)
        while sent < len(data):  # interrupted by a signal
            sent += os.write(self._outlet, data[sent:])


def import_main(how: str, where: str) -> None:
    """
    Import the module that is `__main__` in the pool's process, for functions that are defined there. It is
    not run as `__main__`, so code below `if __name__ == "__main__":` does not run; that is the rule of
    `multiprocessing` too.
    """
    import runpy  # noqa: PLC0415  # only scripts need it
    import types  # noqa: PLC0415  # as above

    module = types.ModuleType("__mp_main__")
    context.importing_main = True
    try:
        run = partial(runpy.run_module if how == "name" else runpy.run_path, run_name="__mp_main__")
        module.__dict__.update(or_setup_failed("your script could not be imported:", run, where))
    finally:
        context.importing_main = False
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def resident_memory(pid: int) -> int:
    """In bytes; 0 where that cannot be known."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:  # noqa: PTH123  # pathlib is slow to import
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0


def _set_title(title: str) -> None:
    try:
        from setproctitle import setproctitle  # noqa: PLC0415  # optional
    except ImportError:
        return
    setproctitle(title)


class SetupFailed(Exception):
    """No call can run in this worker. The pool gets `reason` and `trace` before the worker exits."""

    def __init__(self, reason: str, trace: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.trace = trace


def or_setup_failed(what: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Call a part of the setup. Raises SetupFailed if it raises: no call can then run in this worker."""
    try:
        return fn(*args)
    except BaseException as error:  # SystemExit, too
        raise SetupFailed(f"{what} {error_line(error)}", traceback_text(error)) from error


class CallTarget:
    """The functions that were sent to this worker, by number, and the object whose methods it calls."""

    def __init__(self) -> None:
        self.functions: dict[int, Any] = {}
        self._object: Any = None

    def set_up(self, blob: bytes) -> None:
        setup: dict[str, Any] = or_setup_failed("its setup could not be read:", pickle.loads, blob)
        if setup["initializer"] is not None:
            or_setup_failed("its initializer raised", setup["initializer"], *setup["initargs"])
        if setup["target"] is not None:
            self._object = or_setup_failed("its object could not be made:", setup["target"], *setup["args"])

    def function(self, name: Any) -> Any:
        if type(name) is str:
            return getattr(self._object, name)
        if name == 0:
            return self._object
        function = self.functions[name]
        if type(function) is bytes:
            function = self.functions[name] = pickle.loads(function)
        return function

    def invoke(self, name: Any, call: tuple[Any, tuple[Any, ...], dict[str, Any]], trace: Any) -> Any:
        """`call` is (the function, or None if it is named; arguments; keyword arguments)."""
        fn, args, kwargs = call
        fn = self.function(name) if fn is None else fn
        if trace is None:
            return fn(*args, **kwargs)
        from penstock.telemetry.spans import run_as_child  # noqa: PLC0415  # only where the caller traces

        return run_as_child(trace, fn, args, kwargs)


def make_context(dispatch: int, terms: Any, look: Callable[[], bool]) -> CallContext:
    """`terms` are (attempt, key, deadline), or None for a first attempt without the others."""
    attempt, key, deadline = terms if terms is not None else (1, None, None)
    return CallContext(dispatch, pickle.loads(key) if type(key) is bytes else key, attempt, deadline, look)
