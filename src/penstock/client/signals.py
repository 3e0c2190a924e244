"""
Signals, handled by a thread of their own.

A handler runs in the middle of whatever the main thread was doing, perhaps while it holds a lock that the handler would need: to set an
event or to write a log line there can hang the program for good. And it runs only when the main thread comes round to it, which one that
waits for a lock does not when the kernel gave the signal to another thread. So the interpreter itself writes the signal's number to a pipe.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: Has no meaning here; with a handler it interrupts a system call.
_NUDGE = signal.SIGURG
_NUDGES = (0.02, 0.2, 1.0)  # seconds


@contextmanager
def handled_signals(handle: Callable[[signal.Signals], None]) -> Iterator[None]:
    """
    SIGTERM, SIGINT and SIGHUP, as they come: a terminal that is closed asks for an end too, unless we were started to outlive it (nohup).
    Only the main thread may have handlers; elsewhere this does nothing.
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
    Ctrl-C reaches a main thread that waits for an answer. Between its last look at signals and the system call it waits in, a signal is only noted; that moment is
    long where another thread is to be given the interpreter first. So a main thread that was interrupted is nudged until it has looked.
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
    """By a handler that does nothing, not by the kernel: they interrupt what waits."""
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
