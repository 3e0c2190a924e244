"""
The worker, on whatever machine of the cluster it is.

Ray gives it three groups of threads: one runs calls, one by one; one gets cancels and heartbeats while a call
runs; and one waits for as long as the worker lives, so that the pool notices its end at once, whether it
works or idles.

It ends itself when it has had no heartbeat from its pool for the time of its lease. So a pool that cannot
reach it needs only to wait before it gives the call to another worker: no call runs twice at the same time. A
heartbeat grants time from the moment when it was *sent*: one that was delayed on its way grants that much
less. The two clocks differ by an unknown amount, which the quickest heartbeat so far bounds best.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import sys
import threading
import time
from typing import Any, Final

from penstock.pools.child import protocol
from penstock.pools.child.main import CallTarget, SetupFailed, is_plain_result, make_context, unsendable
from penstock.pools.child.protocol import pack_error
from penstock.pools.context import CallContext, process_contexts
from penstock.pools.timers import clock

#: The version of the messages between a pool and its workers. A machine with another version is refused.
PROTOCOL: Final = 1
#: Ray's groups of threads beside the one that runs calls, and the number of threads in each.
CONCURRENCY_GROUPS: Final = {"control": 1, "lifetime": 1}


class Actor:
    def __init__(self, lease: float) -> None:
        self._target = CallTarget()
        self._running: tuple[int, Any] = (0, None)
        self._canceled = 0  # the dispatch that was canceled last; a worker has one call at a time
        self._reports_memory = False
        self._released = threading.Event()
        self._lease = lease
        self._lag = math.inf  # our clock minus the pool's, plus the delay of the quickest heartbeat
        self._until = math.inf
        process_contexts.append(self._context)

    # The thread of calls

    def set_up(
        self, version: int, paths: list[str], blob: bytes, *, reports_memory: bool
    ) -> tuple[str, int, tuple[str, str] | None]:
        """Returns the machine, the process, and why no call can run here, if so."""
        import ray  # noqa: PLC0415  # the pool's side must be able to say that it is missing there

        self._reports_memory = reports_memory
        node = ray.get_runtime_context().get_node_id()
        try:
            if version != PROTOCOL:
                raise SetupFailed(
                    "its machine has another version of Penstock than the pool; install the same", ""
                )
            sys.path += [path for path in paths if path not in sys.path and os.path.isdir(path)]  # noqa: PTH112  # sys.path has strings
            self._target.set_up(blob)
        except SetupFailed as failed_setup:
            return node, os.getpid(), (failed_setup.reason, failed_setup.trace)
        return node, os.getpid(), None

    def call(
        self, dispatch: int, body: Any, function: Any, blob: bytes | None, extra: Any
    ) -> tuple[int, Any, float, int]:
        """
        Returns the kind of outcome, the outcome, how long the call took, and our memory. `blob` is the
        function, the first time that it is named.
        """
        if blob is not None:
            self._target.functions[function] = blob
        if self._canceled == dispatch:
            return protocol.SKIPPED, None, 0.0, 0
        terms = trace = None
        if extra is not None:
            (attempt, key, remaining), trace = extra
            terms = attempt, key, None if remaining is None else clock() + remaining
        self._running = dispatch, terms
        started = clock()
        try:
            call = (None, body, {}) if type(body) is tuple else unpack(body)
            value = self._target.invoke(function, call, trace)
        except BaseException as error:  # noqa: BLE001  # the caller gets SystemExit and KeyboardInterrupt, too
            kind, payload = protocol.ERROR, pack_error(error)
        else:
            kind, payload = _pack(value)
        return kind, payload, clock() - started, _memory() if self._reports_memory else 0

    def _context(self) -> CallContext:
        dispatch, terms = self._running
        return make_context(dispatch, terms, lambda: self._canceled == dispatch)

    # The group `control`

    def cancel(self, dispatch: int) -> None:
        self._canceled = dispatch

    def heartbeat(self, sent: float) -> None:
        if self._until == math.inf:
            threading.Thread(target=self._keep_lease, name="penstock-lease", daemon=True).start()
        self._lag = min(self._lag, clock() - sent)
        self._until = sent + self._lag + self._lease

    def _keep_lease(self) -> None:
        while (remaining := self._until - clock()) > 0 or self._until == math.inf:
            time.sleep(min(remaining, self._lease))
        os.kill(os.getpid(), signal.SIGKILL)

    def release(self) -> None:
        self._released.set()

    # The group `lifetime`

    def wait_for_release(self) -> None:
        self._released.wait()


def _pack(value: Any) -> tuple[int, Any]:
    if is_plain_result(value):
        return protocol.PLAIN, value
    try:
        data, buffers = protocol.pack_result(value)
    except Exception as error:  # noqa: BLE001  # pickling may raise anything
        return protocol.ERROR, pack_error(unsendable(value, error))
    return protocol.PICKLED, [data, *map(pickle.PickleBuffer, buffers)] if buffers else data


def _memory() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123  # as in process.py
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0


def unpack(body: Any) -> Any:
    """
    The inverse of packing: pickled bytes, or a list of them and their buffers. Buffers are copied: those in
    the object store are read-only and shared, and an array that came from a process worker can be written to.
    """
    if type(body) is bytes:
        return pickle.loads(body)
    data, *buffers = body
    return pickle.loads(data, buffers=[bytearray(buffer) for buffer in buffers])
