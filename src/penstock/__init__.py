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
    from penstock.core.explain import Explanation as Explanation
    from penstock.core.graph import Const as Const
    from penstock.core.graph import Env as Env
    from penstock.core.graph import Lane as Lane
    from penstock.core.graph import NodeStatus as NodeStatus
    from penstock.core.graph import Plan as Plan
    from penstock.core.graph import RunStatus as RunStatus
    from penstock.core.refusals import BadIntent as BadIntent
    from penstock.core.refusals import DispatcherHeld as DispatcherHeld
    from penstock.core.refusals import IllegalMove as IllegalMove
    from penstock.core.refusals import KeyConflict as KeyConflict
    from penstock.core.refusals import NotFound as NotFound
    from penstock.core.refusals import OutcomeUnknown as OutcomeUnknown
    from penstock.core.refusals import QueueFull as QueueFull
    from penstock.core.refusals import Refused as Refused
    from penstock.core.refusals import StoreFailed as StoreFailed
    from penstock.core.refusals import Unavailable as Unavailable
    from penstock.core.states import JobState as JobState
    from penstock.jobs.arguments import BadArgument as BadArgument
    from penstock.jobs.context import JobContext as JobContext
    from penstock.jobs.context import current_job as current_job
    from penstock.jobs.function import JobFunction as JobFunction
    from penstock.jobs.handle import JobHandle as JobHandle
    from penstock.jobs.outcomes import JobCanceled as JobCanceled
    from penstock.jobs.outcomes import JobFailed as JobFailed
    from penstock.jobs.scheduler import Scheduler as Scheduler
    from penstock.local.call import Call as Call
    from penstock.local.call import CancelSignal as CancelSignal
    from penstock.local.cluster.options import Cluster as Cluster
    from penstock.local.context import CallContext as CallContext
    from penstock.local.context import current_call as current_call
    from penstock.local.flow import parallel_limit as parallel_limit
    from penstock.local.flow_sync import parallel_limit_sync as parallel_limit_sync
    from penstock.local.flow_terms import Settled as Settled
    from penstock.local.graphs.builder import Graph as Graph
    from penstock.local.graphs.context import RunContext as RunContext
    from penstock.local.graphs.context import current_run as current_run
    from penstock.local.graphs.executor import GraphExecutor as GraphExecutor
    from penstock.local.graphs.result import RunResult as RunResult
    from penstock.local.graphs.trace import Trace as Trace
    from penstock.local.graphs.trace import write_chrome as write_chrome
    from penstock.local.hooks import QueueHooks as QueueHooks
    from penstock.local.options import set_defaults as set_defaults
    from penstock.local.otel import instrument as instrument
    from penstock.local.pool import WorkerPool as WorkerPool
    from penstock.local.registry import snapshot as snapshot
    from penstock.local.registry import subscribe as subscribe
    from penstock.local.remote import RemoteError as RemoteError
    from penstock.local.singleton import SingletonWorker as SingletonWorker
    from penstock.local.task import Task as Task

__version__ = "0.1.0.dev0"

_HOMES = {
    "penstock.client.attach": ("attach",),
    "penstock.client.client": ("Client",),
    "penstock.client.worker": ("Worker",),
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
    "penstock.core.graph": ("Const", "Env", "Lane", "NodeStatus", "Plan", "RunStatus"),
    "penstock.core.explain": ("Explanation",),
    "penstock.core.refusals": (
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
    "penstock.core.states": ("JobState",),
    "penstock.jobs.arguments": ("BadArgument",),
    "penstock.jobs.context": ("JobContext", "current_job"),
    "penstock.jobs.function": ("JobFunction",),
    "penstock.jobs.handle": ("JobHandle",),
    "penstock.jobs.outcomes": ("JobCanceled", "JobFailed"),
    "penstock.jobs.scheduler": ("Scheduler",),
    "penstock.local.call": ("Call", "CancelSignal"),
    "penstock.local.cluster.options": ("Cluster",),
    "penstock.local.context": ("CallContext", "current_call"),
    "penstock.local.flow": ("parallel_limit",),
    "penstock.local.flow_sync": ("parallel_limit_sync",),
    "penstock.local.flow_terms": ("Settled",),
    "penstock.local.graphs.builder": ("Graph",),
    "penstock.local.graphs.context": ("RunContext", "current_run"),
    "penstock.local.graphs.executor": ("GraphExecutor",),
    "penstock.local.graphs.result": ("RunResult",),
    "penstock.local.graphs.trace": ("Trace", "write_chrome"),
    "penstock.local.hooks": ("QueueHooks",),
    "penstock.local.options": ("set_defaults",),
    "penstock.local.otel": ("instrument",),
    "penstock.local.pool": ("WorkerPool",),
    "penstock.local.registry": ("snapshot", "subscribe"),
    "penstock.local.remote": ("RemoteError",),
    "penstock.local.singleton": ("SingletonWorker",),
    "penstock.local.task": ("Task",),
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
