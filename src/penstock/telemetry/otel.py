"""
OpenTelemetry, for those who have it (OB-1): `instrument()` is the switch, docs/telemetry.md has the names.

This file imports nothing of OpenTelemetry before somebody calls it, so `penstock.instrument` can be looked at without
the extra installed, and a program that does not use it pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.telemetry import registry

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from penstock.graphs.executor import GraphExecutor
    from penstock.pools.pool import WorkerPool


def instrument(
    pool: WorkerPool | GraphExecutor | None = None,
    *,
    meter_provider: MeterProvider | None = None,
    tracer_provider: TracerProvider | None = None,
    histograms: bool = True,
    spans: bool = True,
) -> None:
    """
    Give the numbers of a pool to OpenTelemetry, and a span to each of its calls; or of a graph executor, and to each of
    its runs; or of all of them, those to come as well. The providers are the global ones unless said otherwise, also if they are set later.

    Gauges and counters are read when somebody collects them and cost a call nothing. Histograms and spans cost what
    the SDK takes for them, many times what a call takes itself; pools of very short calls may want to leave them out.
    """
    from penstock.pools.pool import WorkerPool  # noqa: PLC0415  # it imports the world; we are asked for by its workers

    if pool is not None and not isinstance(pool, WorkerPool) and not hasattr(pool, "_instrument"):
        raise TypeError(
            f"pool is {pool!r}; it must be a WorkerPool or a GraphExecutor, or None for all of them"
        )
    meters_for, trace_calls = _load()
    meters = meters_for(meter_provider)

    def attach(thing: Any) -> None:
        if isinstance(thing, WorkerPool):
            meters.watch(thing, histograms=histograms)
            if spans:
                trace_calls(thing, tracer_provider)
        elif hasattr(thing, "_instrument"):
            thing._instrument(meters, tracer_provider, histograms=histograms, spans=spans)

    if pool is not None:
        attach(pool)
    else:
        registry.watch(attach)


def _load() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        from penstock.telemetry.meters import meters_for  # noqa: PLC0415  # only for those who ask
        from penstock.telemetry.spans import trace_calls  # noqa: PLC0415  # as above
    except ModuleNotFoundError as missing:
        if missing.name is None or not missing.name.startswith("opentelemetry"):
            raise
        raise ModuleNotFoundError(
            "OpenTelemetry is not installed; pip install 'penstock[otel]'", name=missing.name
        ) from missing
    return meters_for, trace_calls


def run_traced(trace: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In the worker: what `Tracing.begin` put beside the call has come with it; run the function as its child."""
    from penstock.telemetry.spans import run_as_child  # noqa: PLC0415  # a worker without traced calls never comes here

    return run_as_child(trace, fn, args, kwargs)
