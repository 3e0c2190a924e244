"""
Signals, heard by a thread of their own.

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

__all__ = ["heard"]


@contextmanager
def heard(handle: Callable[[signal.Signals], None]) -> Iterator[None]:
    """SIGTERM and SIGINT, as they come. Only the main thread may have handlers; elsewhere this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def listen() -> None:
        while number := os.read(read_end, 1):
            if number[0] in _HEARD:
                handle(signal.Signals(number[0]))

    listening = threading.Thread(target=listen, name="penstock-signals", daemon=True)
    listening.start()
    writes_to = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in _HEARD}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(writes_to)
        os.close(write_end)
        listening.join()
        os.close(read_end)


_HEARD = (signal.SIGTERM, signal.SIGINT)
