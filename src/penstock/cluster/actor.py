"""The worker, on whatever machine of the cluster it is.

Ray gives it three lines of threads: one runs calls, one by one; one hears of cancels and beats while a call runs; and
one is held for as long as the worker lives, so that its end is heard by the pool at once, whether it works or idles.

It ends itself when it has not heard from its pool for as long as its lease says. So a pool that cannot reach it needs
only to wait before it gives the call to another worker: nothing runs twice at the same time. A beat grants time from
when it was *sent*: one that was held up on its way grants that much less. The two clocks differ by an unknown amount,
which the quickest beat so far bounds best.

The payload of a call to a cluster worker: pickled for a machine that may lack the caller's script, with what is large
beside it in Ray's object store.

It lies there from before the call enters the queue until it is settled, so that a requeued call does not copy it again.
"""

#: Of what travels between a pool and its workers. A machine whose Penstock speaks another one is refused.
from __future__ import annotations

import math
import os
import pickle
import signal
import sys
import threading
import time
from typing import Any, Final

from penstock.pools.child import protocol as wire
from penstock.pools.child.call_target import CallTarget, Unready, is_plain_result, make_context, unsendable
from penstock.pools.child.packing import PackedFunction, Packer
from penstock.pools.child.remote_errors import pack_error
from penstock.pools.context import CallContext, in_process
from penstock.pools.future import Call
from penstock.pools.timers import clock

PROTOCOL: Final = 1
#: The lines of threads beside the one that runs calls, and how wide each is.
LINES: Final = {"control": 1, "hold": 1}


class Actor:
    def __init__(self, lease: float) -> None:
        self._target = CallTarget()
        self._running: tuple[int, Any] = (0, None)
        self._canceled = 0  # the dispatch that was cancelled last; a worker has one call at a time
        self._reports_memory = False
        self._leaving = threading.Event()
        self._lease = lease
        self._lag = math.inf  # our clock minus the pool's, and what the quickest beat took
        self._until = math.inf
        in_process.append(self._context)

    # The line of calls

    def set_up(
        self, protocol: int, paths: list[str], blob: bytes, *, reports_memory: bool
    ) -> tuple[str, int, tuple[str, str] | None]:
        """Where we are, and why no call can run here, if so."""
        import ray  # noqa: PLC0415  # here it is, and the pool's side must be able to say that it is missing there

        self._reports_memory = reports_memory
        node = ray.get_runtime_context().get_node_id()
        try:
            if protocol != PROTOCOL:
                raise Unready(
                    "its machine has another version of Penstock than the pool; install the same", ""
                )
            sys.path += [path for path in paths if path not in sys.path and os.path.isdir(path)]  # noqa: PTH112  # as sys.path is made of
            self._target.set_up(blob)
        except Unready as unready:
            return node, os.getpid(), (unready.reason, unready.trace)
        return node, os.getpid(), None

    def call(
        self, dispatch: int, body: Any, function: Any, blob: bytes | None, extra: Any
    ) -> tuple[int, Any, float, int]:
        """What became of it, how long it took, and how large we are. `blob` is the function, the first time that it is named."""
        if blob is not None:
            self._target.functions[function] = blob
        if self._canceled == dispatch:
            return wire.SKIPPED, None, 0.0, 0
        terms = trace = None
        if extra is not None:
            (attempt, key, remaining), trace = extra
            terms = attempt, key, None if remaining is None else clock() + remaining
        self._running = dispatch, terms
        started = clock()
        try:
            call = (None, body, {}) if type(body) is tuple else unpack(body)
            value = self._target.invoke(function, call, trace)
        except BaseException as error:  # noqa: BLE001  # SystemExit and KeyboardInterrupt are the caller's to see, too
            kind, payload = wire.ERROR, pack_error(error)
        else:
            kind, payload = _pack(value)
        return kind, payload, clock() - started, _memory() if self._reports_memory else 0

    def _context(self) -> CallContext:
        dispatch, terms = self._running
        return make_context(dispatch, terms, lambda: self._canceled == dispatch)

    # The line of control

    def cancel(self, dispatch: int) -> None:
        self._canceled = dispatch

    def beat(self, sent: float) -> None:
        if self._until == math.inf:
            threading.Thread(target=self._keep_lease, name="penstock-lease", daemon=True).start()
        self._lag = min(self._lag, clock() - sent)
        self._until = sent + self._lag + self._lease

    def _keep_lease(self) -> None:
        while (remaining := self._until - clock()) > 0 or self._until == math.inf:
            time.sleep(min(remaining, self._lease))
        os.kill(os.getpid(), signal.SIGKILL)

    def let_go(self) -> None:
        self._leaving.set()

    # The line that is held

    def hold(self) -> None:
        self._leaving.wait()


def _pack(value: Any) -> tuple[int, Any]:
    if is_plain_result(value):
        return wire.PLAIN, value
    try:
        data, buffers = wire.pack_result(value)
    except Exception as error:  # noqa: BLE001  # whatever pickling raises
        return wire.ERROR, pack_error(unsendable(value, error))
    return wire.PICKLED, [data, *map(pickle.PickleBuffer, buffers)] if buffers else data


def _memory() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123  # as in process.py
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0


class ClusterPacker(Packer):
    def __init__(self, ray: Any) -> None:
        super().__init__()
        self._ray = ray

    def _function(self, fn: Any) -> PackedFunction | None:
        """What is in `__main__` travels by value, with each call: no other machine could import it."""
        return None if getattr(fn, "__module__", None) == "__main__" else super()._function(fn)

    def _pack(self, call: Call[Any], fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        data, buffers = wire.pack_arguments(fn, args, kwargs, portable=True)
        large = buffers or len(data) >= wire.LARGE
        call.body = self._ray.put([data, *map(pickle.PickleBuffer, buffers)]) if large else data


def unpack(body: Any) -> Any:
    """
    Pickled bytes, or a list of them and their buffers. Buffers are copied: those in the object store are read-only and
    shared by all, and an array that came by a process worker can be written to, too.
    """
    if type(body) is bytes:
        return pickle.loads(body)
    data, *buffers = body
    return pickle.loads(data, buffers=[bytearray(buffer) for buffer in buffers])
