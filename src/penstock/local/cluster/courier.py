"""
The thread that talks to the engine for one crew.

What is asked of it is done in order and with no lock held: a call into Ray may take a while, and Ray tells what happened
on threads of its own, which must not run callers' code.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from penstock.local.blocking import never_block_here

log = logging.getLogger("penstock")


class CallSender:
    def __init__(self, name: str) -> None:
        self._name = name
        self._errands: SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def post(self, fn: Callable[..., object], *args: Any) -> None:
        """From any thread; the first one starts it, with the gate's lock held."""
        self._errands.put((fn, args))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"penstock-{self._name}", daemon=True)
            self._thread.start()

    def when(self, ref: Any, answer: Callable[[Any, BaseException | None], object]) -> None:
        """Have `answer` called with what Ray has to say about this reference."""
        ref.future().add_done_callback(lambda future: self.post(_tell, answer, future))

    def leave(self) -> None:
        self._errands.put(None)

    def _run(self) -> None:
        never_block_here()
        while (node_call := self._errands.get()) is not None:
            fn, args = node_call
            try:
                fn(*args)
            except Exception:  # the next errand is another worker's and knows nothing of this one
                log.exception("the courier of %s stumbled", self._name)
            del node_call, fn, args  # or the last result would live until the next one comes


def _tell(answer: Callable[[Any, BaseException | None], object], future: Any) -> None:
    error = future.exception()
    answer(None if error is not None else future.result(), error)
