"""
One worker on a cluster: the actor, on a machine that Ray chooses, and the pool's side (the link to the actor,
and the worker's slot).

Ray gives the actor three groups of threads: one runs calls one by one, one gets cancels and heartbeats
meanwhile, and one waits as long as the worker lives, so that the pool notices its end at once.

The actor ends itself when it has had no heartbeat from its pool for the time of its lease. So a pool that
cannot reach it waits that long before it gives the call to another worker, and no call runs twice at the same
time. A heartbeat grants time from the moment when it was *sent*, so a delayed one grants less. The difference
of the two clocks is unknown; the quickest heartbeat so far gives the best bound.

The methods of a link are called on the group's Ray thread, because calls into Ray may take a while.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from penstock.cluster.engine import Cluster
from penstock.pools.child import protocol
from penstock.pools.child.main import CallTarget, SetupFailed, make_context, resident_memory
from penstock.pools.child.protocol import pack_error
from penstock.pools.context import CallContext, process_contexts
from penstock.pools.timers import clock
from penstock.pools.workers.base import Condition, WorkerSlot

#: The version of the messages between a pool and its workers. A machine with another version is refused.
PROTOCOL: Final = 1
#: Ray's groups of threads beside the one that runs calls, and the number of threads in each.
CONCURRENCY_GROUPS: Final = {"control": 1, "lifetime": 1}
#: Seconds that may be added to a lease for the delay of a heartbeat and the difference of the clocks.
_SLACK: Final = 0.5


class Actor:
    def __init__(self, lease: float) -> None:
        self._target = CallTarget()
        self._running: tuple[int, Any] = (0, None)
        self._canceled = 0  # the dispatch that was canceled last; a worker has one call at a time
        self._reports_memory = False
        self._released = threading.Event()
        self._lease = lease
        self._lag = math.inf  # this clock minus the pool's, plus the delay of the quickest heartbeat
        self._until = math.inf
        process_contexts.append(self._context)

    # The thread of calls

    def set_up(
        self, version: int, paths: list[str], blob: bytes, *, reports_memory: bool
    ) -> tuple[str, int, tuple[str, str] | None]:
        """Set up the worker. Returns its machine, its process, and the reason if no call can run here."""
        import ray  # noqa: PLC0415  # the pool's side must be able to say that it is missing there

        self._reports_memory = reports_memory
        node = ray.get_runtime_context().get_node_id()
        try:
            if version != PROTOCOL:
                raise SetupFailed(
                    "its machine has another version of Penstock than the pool; install the same", ""
                )
            new = [path for path in paths if path not in sys.path]
            sys.path += filter(os.path.isdir, new)
            self._target.set_up(blob)
        except SetupFailed as failed_setup:
            return node, os.getpid(), (failed_setup.reason, failed_setup.trace)
        return node, os.getpid(), None

    def call(
        self, dispatch: int, body: Any, function: Any, blob: bytes | None, extra: Any
    ) -> tuple[int, Any, float, int]:
        """
        Run a call. Returns the kind of outcome, the outcome, the duration, and the memory of this process.
        `blob`: the function, at its first use.
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
        payload: Any
        try:
            call = (None, body, {}) if type(body) is tuple else unpack(body)
            value = self._target.invoke(function, call, trace)
        except BaseException as error:  # noqa: BLE001  # the caller gets SystemExit, too
            kind, payload = protocol.ERROR, pack_error(error)
        else:
            kind, payload, buffers = protocol.pack_result(value)
            if buffers:
                payload = [payload, *map(pickle.PickleBuffer, buffers)]
        return kind, payload, clock() - started, resident_memory(os.getpid()) if self._reports_memory else 0

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


def unpack(body: Any) -> Any:
    """
    Unpickle a body: bytes, or a list of bytes and their buffers. Buffers are copied, because those in the
    object store are shared and read-only, while arrays of process workers are writable.
    """
    if type(body) is bytes:
        return pickle.loads(body)
    data, *buffers = body
    return pickle.loads(data, buffers=[bytearray(buffer) for buffer in buffers])


#: A function that gets the answer of the actor, or Ray's error.
Answer = Callable[[Any, BaseException | None], object]


def actor_class(ray: Any, terms: Cluster) -> Any:
    """
    The actor's class, made once per group because each is registered in the cluster. Ray restarts and retries
    nothing: the pool does.
    """
    return ray.remote(
        num_cpus=terms.cpus,
        num_gpus=terms.gpus,
        resources=dict(terms.resources),
        runtime_env=None if terms.runtime_env is None else dict(terms.runtime_env),
        max_restarts=0,
        max_task_retries=0,
        concurrency_groups=CONCURRENCY_GROUPS,
    )(Actor)


class ActorLink:
    """The connection to one actor."""

    def __init__(self, ray: Any, actors: Any, lease: float, when: Callable[[Any, Answer], None]) -> None:
        """
        `actors`: the result of `actor_class`. `when(ref, answer)` calls `answer` later, on the Ray thread.
        """
        self._ray = ray
        self._actors = actors
        self._lease = lease
        self._when = when
        self._actor: Any = None
        self._unanswered = False
        self.heartbeat_sent_at: float | None = None  # when the last heartbeat was sent
        self.node: str | None = None  # the machine that it is on
        self.doubted = False  # an error that need not be its death
        self.given_up = False  # only the end of its lease is certain now

    def open(
        self, setup: tuple[list[str], bytes], *, reports_memory: bool, ready: Answer, dead: Answer
    ) -> None:
        actor = self._actors.remote(self._lease)
        self._actor = actor
        self._when(actor.wait_for_release.options(concurrency_group="lifetime").remote(), dead)
        self._when(actor.set_up.remote(PROTOCOL, *setup, reports_memory=reports_memory), ready)

    def call(self, message: tuple[Any, ...], answer: Answer) -> None:
        self._when(self._actor.call.remote(*message), answer)

    def cancel(self, dispatch: int) -> None:
        self._actor.cancel.options(concurrency_group="control").remote(dispatch)

    def heartbeat(self) -> bool:
        """Send a heartbeat. False: the actor has not answered for so long that its lease is over."""
        if self._unanswered:
            return clock() < self.lease_over()
        self._unanswered = True
        self.heartbeat_sent_at = clock()
        self._when(
            self._actor.heartbeat.options(concurrency_group="control").remote(self.heartbeat_sent_at),
            self._heartbeat_answered,
        )
        return True

    def _heartbeat_answered(self, _: Any, error: BaseException | None) -> None:
        self._unanswered = error is not None

    def lease_over(self) -> float:
        """The moment when the actor has certainly ended."""
        return 0.0 if self.heartbeat_sent_at is None else self.heartbeat_sent_at + self._lease + _SLACK

    def retire(self, gone: Answer) -> None:
        """Let the actor finish its call and exit."""
        self._actor.release.options(concurrency_group="control").remote()
        self._when(self._actor.__ray_terminate__.remote(), gone)

    def kill(self) -> None:
        self._ray.kill(self._actor, no_restart=True)


class ClusterWorker(WorkerSlot):
    """
    The slot of a worker on a cluster, which has one call at a time. A result that is under way when the
    worker dies is lost, so with several calls the pool could not know which had begun. Other calls wait in
    the pool for a free worker.
    """

    def __init__(self, number: int, end: Callable[[ClusterWorker, ActorLink], object]) -> None:
        """`end(worker, link)`: a function that kills the actor soon."""
        super().__init__(number)
        self._end = end
        self.link: ActorLink | None = None  # to the present actor; answers from another one are late
        self.ready = False

    def connect(self, link: ActorLink) -> None:
        self.open()
        self.link = link
        self.ready = False
        self.sent = 0  # the dispatch that was sent last
        self.functions_sent: set[int] = set()  # functions that were sent to it
        self.pid: int | None = None
        self.size = 0
        self.cause = ""

    @property
    def running(self) -> int:
        return self.sent

    @property
    def free(self) -> bool:
        return self.ready and not self.calls and self.condition is Condition.LIVE

    @property
    def coming(self) -> bool:
        return self.condition is Condition.LIVE and not self.ready

    def kill(self, why: str) -> None:
        super().kill(why)
        if self.link is not None:
            self._end(self, self.link)

    def reap(self) -> str:
        return self.failure[0] if self.failure is not None else self.cause

    def close(self) -> None:
        super().close()
        self.link, self.ready = None, False

    def memory(self) -> int:
        return self.size
