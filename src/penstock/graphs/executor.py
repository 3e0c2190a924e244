"""
The graph executor: owns the lanes and the live runs.

An executor is made once and runs all graphs of a program. Its threads start on demand, take turns between
runs, and end when it is closed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from penstock.core.calls.graph_plan import Lane as LaneName
from penstock.core.calls.graph_plan import Plan, Queue
from penstock.core.calls.ticket import check_count
from penstock.core.errors import BadCall, PoolClosedError
from penstock.graphs.lanes import AnyLane, LoopLane, ThreadLane, cluster_lane, process_lane
from penstock.graphs.result import GraphTotals, LaneCounts, RunResult
from penstock.graphs.run import Run
from penstock.graphs.run_context import thread_state
from penstock.graphs.scheduled import Scheduled
from penstock.graphs.trace import LaneBars, RunRecorder, TraceRecorder
from penstock.pools.options import seconds
from penstock.pools.timers import clock
from penstock.telemetry import registry
from penstock.telemetry.registry import TaskSnapshot

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from penstock.cluster.engine import Cluster
    from penstock.graphs.graph_telemetry import GraphTelemetry
    from penstock.pools.pool import WorkerPool
    from penstock.telemetry.meters import Meters


log = logging.getLogger("penstock")

T = TypeVar("T")

_FOREVER: Final = 10.0 * 365 * 24 * 3600


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """A thread that had not ended in time, and its node (None: a call of `schedule`)."""

    thread: str
    node: str | None


class GraphExecutor:
    """
    `compute` and `io` are numbers of threads, `tasks` is how many `async def` nodes may be in flight. Nodes
    of the process lane go to `pool` (any Executor; a WorkerPool can also end running calls) or to a pool of
    `processes` workers made with the first of them. Nodes of the cluster lane go to `cluster`: a pool with
    kind="cluster", or the options of one that is made now and closed with the executor. `trace` is the share
    of runs that are recorded, from 0 to 1. `grace` is how long a node may go on when its run has ended before
    its thread is given up and replaced, and how long an error waits for the nodes beside it.

    For example:

        with penstock.GraphExecutor() as executor:
            result = executor.run(plan, {"user_id": 7})
            print(result["greeting"])
    """

    def __init__(
        self,
        compute: int | None = None,
        io: int = 32,
        *,
        tasks: int = 1000,
        pool: Executor | None = None,
        processes: int | None = None,
        cluster: WorkerPool | Cluster | None = None,
        trace: float = 0.0,
        grace: float = 5.0,
        name: str | None = None,
    ) -> None:
        compute = (os.cpu_count() or 1) if compute is None else compute
        check_count("compute", compute, least=1)
        check_count("io", io, least=1)
        check_count("tasks", tasks, least=1)
        if processes is not None:
            check_count("processes", processes, least=1)
        if pool is not None and not isinstance(pool, Executor):
            raise TypeError(
                f"pool is {pool!r}; it must be a WorkerPool or another concurrent.futures.Executor"
            )
        if not 0 <= trace <= 1:
            raise ValueError(f"trace is {trace!r}; it must be a share of the runs, from 0 to 1")
        seconds("grace", grace)
        self.name = registry.name_for(name, "graph")
        self.label = name or "graph"  # for telemetry: a program may make thousands without a name
        self.grace = grace
        self.closed = False
        self._compute = ThreadLane(f"{self.name}-compute", compute)
        self._io = ThreadLane(f"{self.name}-io", io)
        self._loop = LoopLane(f"{self.name}-loop", tasks)
        self._process = process_lane(pool, processes or os.cpu_count() or 1)
        self._cluster = cluster_lane(cluster)
        # In the order of `Queue`.
        self.lane_queues = (self._compute, self._io, self._loop, self._process, self._cluster)
        self._sample = float(trace)
        self.live_runs: set[Run] = set()
        self.live_calls: set[Scheduled[Any]] = set()
        self._submitted = count(1)
        self._totals = GraphTotals(self._compute, self._io)
        self._telemetry: GraphTelemetry | None = None
        self._run_recorder = RunRecorder(self.name)
        registry.register(self)
        self._finalizer = weakref.finalize(self, _stop_lanes, self.lane_queues)

    # Running

    def run(
        self,
        plan: Plan,
        env: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        trace: bool | None = None,
        check: bool = True,
    ) -> RunResult:
        """
        Run the plan and wait for it. Raises the error that ended the run; with `check=False` the result has
        the error. After `timeout` seconds the run ends, even if nodes still run.
        """
        if self._on_own_thread():
            raise BadCall(
                "run() inside a node blocks its worker until other workers have run the nodes, so all workers may end up "
                "waiting; make the node an async def and await arun(), or submit() and do not wait"
            )
        run = self.submit(plan, env, timeout=timeout, trace=trace)
        try:
            result = run.result()
        except BaseException:  # Ctrl-C: the caller never gets this run
            run.cancel("the caller that waited for it was interrupted")
            raise
        return result.check() if check else result

    async def arun(
        self,
        plan: Plan,
        env: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,  # noqa: ASYNC109  # it is the run's own, also when no task awaits it
        trace: bool | None = None,
        check: bool = True,
    ) -> RunResult:
        """`run` for asyncio. Canceling the awaiting task cancels the run."""
        result = await self.submit(plan, env, timeout=timeout, trace=trace)
        return result.check() if check else result

    def submit(
        self,
        plan: Plan,
        env: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        trace: bool | None = None,
    ) -> Run:
        """
        Start a run and return its Future at once. `trace`: whether to record it. None: the executor's share
        decides.
        """
        env = {} if env is None else env
        seconds("timeout", timeout, or_none=True)
        deadline = None if timeout is None else clock() + timeout
        if plan.env:
            _check_env(plan, env)
        if Queue.CLUSTER in plan.lanes:
            self._check_cluster()
        if self.closed:
            self._refuse()
        may_record = trace or self._sample or self._telemetry is not None or self._run_recorder.wanted
        recorder = self._make_recorder(plan, trace) if may_record else None
        run = Run(self, plan, env, deadline, recorder)
        if recorder is not None:
            self._run_recorder.show_run(run)
        self.live_runs.add(run)
        if self.closed:
            # The executor is being closed, and may have listed its live runs before this one was added.
            run.cancel("the executor was closed")
        run.start()
        return run

    def schedule(
        self, fn: Callable[..., T], /, *args: Any, lane: str | None = None, **kwargs: Any
    ) -> Scheduled[T]:
        """
        Call any function on a lane, without a graph. The returned Future can be awaited from any event loop
        and chained with `then`. An `async def` runs on the I/O lane's event loop.
        """
        scheduled: Scheduled[T] = self.make_scheduled(lane, fn, *args, **kwargs)
        if self.closed:
            self._refuse()
        scheduled.start()
        return scheduled

    def make_scheduled(
        self, lane: str | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Scheduled[Any]:
        waits = inspect.iscoroutinefunction(fn)
        if lane is not None and lane not in list(LaneName):
            raise ValueError(
                f"lane is {lane!r}; it must be one of {', '.join(repr(str(one)) for one in LaneName)}"
            )
        if waits and lane not in (None, LaneName.IO):
            raise ValueError(f"an async def cannot run on the {lane} lane; leave lane= out")
        queue = Queue.LOOP if waits else Queue[str(lane or LaneName.COMPUTE).upper()]
        if queue is Queue.CLUSTER:
            self._check_cluster()
        return Scheduled(self, self.lane_queues[queue], fn, args, kwargs)

    # State

    def snapshot(self) -> TaskSnapshot:
        """
        The state of the executor, like that of a pool. Pending are the ready nodes; nodes that lack an input
        are not counted.
        """
        runs, workers = list(self.live_runs), [*self._compute.workers, *self._io.workers]
        inside = {worker for run in runs for worker in list(run.node_by_worker)}
        now = self.counts()
        return TaskSnapshot(
            name=self.name,
            kind="graph",
            workers={"running": len(workers), "restarting": 0, "stopped": 0, "halted": 0},
            in_flight=now.in_flight,
            pending_queue_depth=now.pending,
            waiting_queue_depth=now.waiting,
            max_in_flight=sum(lane.width for lane in self.lane_queues),
            max_queue_depth=math.inf,
            policy="turns",
            paused=self.closed,
            load_by_worker=tuple(int(worker in inside) for worker in workers),
            settled_by_worker=(),
            totals=self._totals.as_dict(),
            last_crash=self._totals.last_error,
        )

    def lanes(self) -> LaneBars | None:
        """
        One run as a Gantt chart: bars by worker, during the run and after it. A call makes the executor
        record the next run, and after its end another one. None: no run has begun since the first call.
        """
        return self._run_recorder.current_bars()

    def __repr__(self) -> str:
        return f"<GraphExecutor {self.name!r}: {len(self.live_runs)} runs, {self.counts().in_flight} nodes in flight>"

    def attach_telemetry(
        self, meters: Meters, tracer_provider: TracerProvider | None, *, histograms: bool, spans: bool
    ) -> None:
        """Set the telemetry, for `penstock.instrument`. The last call counts."""
        from penstock.graphs.graph_telemetry import GraphTelemetry  # noqa: PLC0415  # it imports OpenTelemetry

        self._telemetry = telemetry = GraphTelemetry(
            self.label, meters if histograms else None, tracer_provider, spans=spans
        )
        meters.follow(self, GraphExecutor.counts, self._totals, telemetry.labels)

    def counts(self) -> LaneCounts:
        runs = list(self.live_runs)
        in_threads = sum(len(run.node_by_worker) for run in runs)
        elsewhere = sum(len(lane.running) for lane in (self._loop, self._process, self._cluster))
        return LaneCounts(in_threads + elsewhere, sum(run.ready() for run in runs), 0)

    # Closing

    def close(self, timeout: float | None = 10.0) -> list[LeftBehind]:
        """
        Start no more nodes, cancel live runs, and wait for the threads. Returns within the timeout, with the
        threads whose node has not returned: they are daemon threads, so the program can end.
        """
        seconds("timeout", timeout, or_none=True)
        until = clock() + (_FOREVER if timeout is None else timeout)
        self.closed = True
        runs, calls = list(self.live_runs), list(self.live_calls)
        endings: list[Run | Scheduled[Any]] = [*runs, *calls]
        for ending in endings:
            ending.cancel("the executor was closed")
        for lane in self.lane_queues:
            lane.stop()
        for pool in (self._process, self._cluster):
            pool.close(max(0.0, until - clock()))
        left_behind = [
            LeftBehind(worker.thread.name, worker.node_name())
            for lane in (self._compute, self._io)
            for worker in lane.join(until)
        ]
        if self._loop.join(until):
            left_behind.append(LeftBehind(self._loop.name, self._loop.node_in()))
        for thread in left_behind:
            log.warning("%s: the thread %s was left behind in node %r", self.name, thread.thread, thread.node)
        return left_behind

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def aclose(self, timeout: float | None = 10.0) -> list[LeftBehind]:  # noqa: ASYNC109  # for the threads, not for this coroutine
        """`close` without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(None, self.close, timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _check_cluster(self) -> None:
        if not self._cluster.width:
            raise BadCall(
                "a node is on the cluster lane, and this executor has no cluster; make it with "
                "GraphExecutor(cluster=penstock.Cluster(...))"
            )

    def _refuse(self) -> None:
        raise PoolClosedError(f"{self.name} is closed")

    # For runs and scheduled calls

    def _on_own_thread(self) -> bool:
        """Whether this thread belongs to the lanes that run nodes."""
        lane = None if thread_state.worker is None else thread_state.worker.lane
        return lane in (self._compute, self._io) or threading.current_thread() is self._loop.thread

    def on_run_end(self, run: Run, result: RunResult) -> None:
        self.live_runs.discard(run)
        self._totals.add(result)
        self._run_recorder.ended(run, result)
        if self._telemetry is not None and result.trace is not None:
            self._telemetry.measure(result, result.trace)

    def _make_recorder(self, plan: Plan, wanted: bool | None) -> TraceRecorder | None:
        """
        A recorder, if this run is to be recorded: by the caller's choice, the sampler of OpenTelemetry, the
        executor's share of runs, or `lanes()`.
        """
        spans = None if self._telemetry is None else self._telemetry.begin(plan)
        if wanted is None:
            wanted = self._is_sampled() or self._run_recorder.accepts(plan)
        return TraceRecorder(spans) if wanted or spans is not None else None

    def _is_sampled(self) -> bool:
        """
        Whether to record this run. Every n-th run is recorded, and not random ones, so that a repeated
        program records the same runs.
        """
        number = next(self._submitted)
        return int(number * self._sample) > int((number - 1) * self._sample)


def _check_env(plan: Plan, env: Mapping[str, Any]) -> None:
    missing = [name for name in plan.env if name not in env]
    if missing:
        names = ", ".join(map(repr, missing))
        given = f"; it was given {', '.join(map(repr, env))}" if env else ""
        raise BadCall(f"the run of {plan.name!r} lacks {names} in its env{given}", missing=missing)


def _stop_lanes(lanes: Iterable[AnyLane]) -> None:
    """End the threads, when the executor is freed or the program ends."""
    for lane in lanes:
        lane.stop()
