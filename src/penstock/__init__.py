"""
Penstock admits, queues and dispatches work.

The public names are imported on first use, so that a program pays for what it touches: pools and graphs need nothing
but the standard library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.client.attach import attach as attach
    from penstock.client.client import Client as Client
    from penstock.client.worker import Worker as Worker
    from penstock.cluster.engine import Cluster as Cluster
    from penstock.core.calls.graph_plan import Const as Const
    from penstock.core.calls.graph_plan import Env as Env
    from penstock.core.calls.graph_plan import Lane as Lane
    from penstock.core.calls.graph_plan import NodeStatus as NodeStatus
    from penstock.core.calls.graph_plan import Plan as Plan
    from penstock.core.calls.graph_plan import RunStatus as RunStatus
    from penstock.core.errors import BadCall as BadCall
    from penstock.core.errors import CallCanceled as CallCanceled
    from penstock.core.errors import CallEnded as CallEnded
    from penstock.core.errors import CallTimeout as CallTimeout
    from penstock.core.errors import GraphError as GraphError
    from penstock.core.errors import JobStopped as JobStopped
    from penstock.core.errors import JobUnavailable as JobUnavailable
    from penstock.core.errors import NotPicklable as NotPicklable
    from penstock.core.errors import PenstockError as PenstockError
    from penstock.core.errors import PoolClosedError as PoolClosedError
    from penstock.core.errors import QueueDropError as QueueDropError
    from penstock.core.errors import WorkerCrashedError as WorkerCrashedError
    from penstock.core.jobs.explain import Explanation as Explanation
    from penstock.core.jobs.refusals import BadIntent as BadIntent
    from penstock.core.jobs.refusals import DispatcherHeld as DispatcherHeld
    from penstock.core.jobs.refusals import IllegalMove as IllegalMove
    from penstock.core.jobs.refusals import KeyConflict as KeyConflict
    from penstock.core.jobs.refusals import NotFound as NotFound
    from penstock.core.jobs.refusals import OutcomeUnknown as OutcomeUnknown
    from penstock.core.jobs.refusals import QueueFull as QueueFull
    from penstock.core.jobs.refusals import Refused as Refused
    from penstock.core.jobs.refusals import StoreFailed as StoreFailed
    from penstock.core.jobs.refusals import Unavailable as Unavailable
    from penstock.core.jobs.states import JobState as JobState
    from penstock.flow.parallel import parallel_limit as parallel_limit
    from penstock.flow.parallel_sync import parallel_limit_sync as parallel_limit_sync
    from penstock.flow.pullers import Settled as Settled
    from penstock.graphs.builder import Graph as Graph
    from penstock.graphs.executor import GraphExecutor as GraphExecutor
    from penstock.graphs.result import RunResult as RunResult
    from penstock.graphs.run_context import RunContext as RunContext
    from penstock.graphs.run_context import current_run as current_run
    from penstock.graphs.trace import Trace as Trace
    from penstock.graphs.trace import write_chrome as write_chrome
    from penstock.library.arguments import BadArgument as BadArgument
    from penstock.library.context import JobContext as JobContext
    from penstock.library.context import current_job as current_job
    from penstock.library.function import JobFunction as JobFunction
    from penstock.library.handle import JobCanceled as JobCanceled
    from penstock.library.handle import JobFailed as JobFailed
    from penstock.library.handle import JobHandle as JobHandle
    from penstock.library.scheduler import Scheduler as Scheduler
    from penstock.pools.child.remote_errors import RemoteError as RemoteError
    from penstock.pools.context import CallContext as CallContext
    from penstock.pools.context import current_call as current_call
    from penstock.pools.future import Call as Call
    from penstock.pools.future import CancelSignal as CancelSignal
    from penstock.pools.options import set_defaults as set_defaults
    from penstock.pools.pool import WorkerPool as WorkerPool
    from penstock.pools.singleton import SingletonWorker as SingletonWorker
    from penstock.pools.task import Task as Task
    from penstock.telemetry.hooks import QueueHooks as QueueHooks
    from penstock.telemetry.otel import instrument as instrument
    from penstock.telemetry.registry import snapshot as snapshot
    from penstock.telemetry.registry import subscribe as subscribe

__version__ = "0.1.0.dev0"

_HOMES = {
    "penstock.client.attach": ("attach",),
    "penstock.client.client": ("Client",),
    "penstock.client.worker": ("Worker",),
    "penstock.cluster.engine": ("Cluster",),
    "penstock.core.calls.graph_plan": (
        "Const",
        "Env",
        "Lane",
        "NodeStatus",
        "Plan",
        "RunStatus",
    ),
    "penstock.core.errors": (
        "BadCall",
        "CallCanceled",
        "CallEnded",
        "CallTimeout",
        "GraphError",
        "JobStopped",
        "JobUnavailable",
        "NotPicklable",
        "PenstockError",
        "PoolClosedError",
        "QueueDropError",
        "WorkerCrashedError",
    ),
    "penstock.core.jobs.explain": ("Explanation",),
    "penstock.core.jobs.refusals": (
        "BadIntent",
        "DispatcherHeld",
        "IllegalMove",
        "KeyConflict",
        "NotFound",
        "OutcomeUnknown",
        "QueueFull",
        "Refused",
        "StoreFailed",
        "Unavailable",
    ),
    "penstock.core.jobs.states": ("JobState",),
    "penstock.flow.parallel": ("parallel_limit",),
    "penstock.flow.parallel_sync": ("parallel_limit_sync",),
    "penstock.flow.pullers": ("Settled",),
    "penstock.graphs.builder": ("Graph",),
    "penstock.graphs.executor": ("GraphExecutor",),
    "penstock.graphs.result": ("RunResult",),
    "penstock.graphs.run_context": (
        "RunContext",
        "current_run",
    ),
    "penstock.graphs.trace": (
        "Trace",
        "write_chrome",
    ),
    "penstock.library.arguments": ("BadArgument",),
    "penstock.library.context": (
        "JobContext",
        "current_job",
    ),
    "penstock.library.function": ("JobFunction",),
    "penstock.library.handle": (
        "JobCanceled",
        "JobFailed",
        "JobHandle",
    ),
    "penstock.library.scheduler": ("Scheduler",),
    "penstock.pools.child.remote_errors": ("RemoteError",),
    "penstock.pools.context": (
        "CallContext",
        "current_call",
    ),
    "penstock.pools.future": (
        "Call",
        "CancelSignal",
    ),
    "penstock.pools.options": ("set_defaults",),
    "penstock.pools.pool": ("WorkerPool",),
    "penstock.pools.singleton": ("SingletonWorker",),
    "penstock.pools.task": ("Task",),
    "penstock.telemetry.hooks": ("QueueHooks",),
    "penstock.telemetry.otel": ("instrument",),
    "penstock.telemetry.registry": (
        "snapshot",
        "subscribe",
    ),
}
_home_of = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_home_of)]  # noqa: PLE0604  # strings, all of them


def __getattr__(name: str) -> Any:
    home = _home_of.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # noqa: PLC0415  # only for names that were not used before

    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
