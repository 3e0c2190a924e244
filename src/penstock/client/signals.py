"""
Handles signals in a thread of its own.

A Python signal handler interrupts the main thread, which may hold a lock that the handler needs: a handler
that sets an event or writes a log line can hang the program for ever. If the kernel gives the signal to
another thread, the handler does not run while the main thread waits for a lock. So the interpreter writes the
number of the signal to a pipe, and a thread reads the pipe.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: A signal without a meaning here. With a handler it interrupts a system call.
_NUDGE = signal.SIGURG
_NUDGES = (0.02, 0.2, 1.0)  # seconds


@contextmanager
def handled_signals(handle: Callable[[signal.Signals], None]) -> Iterator[None]:
    """
    Call `handle` with each SIGTERM, SIGINT and SIGHUP. A closing terminal sends SIGHUP; a program that was
    started with nohup ignores it. Only the main thread may set handlers; in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = _STOPS if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else _STOPS[:2]
    stopping = False

    def on_signal(number: signal.Signals) -> None:
        nonlocal stopping
        # A closing terminal may send two SIGHUPs: the second does not mean "hurry".
        if number in numbers and not (stopping and number is signal.SIGHUP):
            stopping = True
            handle(number)

    with _piped(on_signal), _ignored(*numbers):
        yield


@contextmanager
def interruptible() -> Iterator[None]:
    """
    Make Ctrl-C reach a main thread that waits in a system call. A signal that comes just before the system
    call is only noted, and the call then waits regardless. So after a SIGINT the thread gets further signals
    until it has handled it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    main, over = threading.main_thread(), threading.Event()

    def nudge(number: signal.Signals) -> None:
        if number is signal.SIGINT and main.ident is not None:
            for pause in _NUDGES:
                if not over.wait(pause):
                    signal.pthread_kill(main.ident, _NUDGE)

    with _ignored(_NUDGE), _piped(nudge):
        try:
            yield
        finally:
            over.set()


@contextmanager
def _piped(handle: Callable[[signal.Signals], None]) -> Iterator[None]:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def listen() -> None:
        while number := os.read(read_end, 1):
            handle(signal.Signals(number[0]))

    listening = threading.Thread(target=listen, name="penstock-signals", daemon=True)
    listening.start()
    writes_to = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(writes_to)
        os.close(write_end)
        listening.join()
        os.close(read_end)


@contextmanager
def _ignored(*numbers: signal.Signals) -> Iterator[None]:
    """Ignore these signals by a handler that does nothing: unlike SIG_IGN it interrupts system calls."""
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
