"""The figures of a played load, by which two settings are compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from penstock.core.jobs.types import SECOND, Span, seconds
from penstock.simulation.play import Played, PlayedJob

__all__ = ["AddonFigures", "Figures", "figures"]


class AddonFigures(NamedTuple):
    addon_id: str
    jobs: int
    refused: int
    #: Jobs that started after their deadline, or never.
    late: int
    #: Seconds from ready to start: median, 95th percentile, longest.
    wait_p50: float | None
    wait_p95: float | None
    wait_max: float | None
    #: Of all unit-seconds that were used.
    share: float


class Figures(NamedTuple):
    addons: list[AddonFigures]
    everything: AddonFigures
    #: Share of all unit-seconds from the first arrival to the last end.
    used: float
    lasted_sec: float


def figures(played: Played) -> Figures:
    by_addon: dict[str, list[PlayedJob]] = defaultdict(list)
    for outcome in played.outcomes:
        by_addon[outcome.arrival.intent.addon_id].append(outcome)
    used = _used(played.outcomes)
    addons = [_of(name, outcomes, used) for name, outcomes in sorted(by_addon.items())]
    there_was = played.capacity * played.lasted / SECOND
    return Figures(
        addons,
        _of("all", played.outcomes, used),
        used / there_was if there_was else 0.0,
        seconds(played.lasted),
    )


def _of(name: str, outcomes: Sequence[PlayedJob], used: float) -> AddonFigures:
    waits = sorted(outcome.wait for outcome in outcomes if outcome.wait is not None)
    return AddonFigures(
        addon_id=name,
        jobs=len(outcomes),
        refused=sum(outcome.refused for outcome in outcomes),
        late=sum(_is_late(outcome) for outcome in outcomes),
        wait_p50=_at(waits, 0.5),
        wait_p95=_at(waits, 0.95),
        wait_max=_at(waits, 1.0),
        share=_used(outcomes) / used if used else 0.0,
    )


def _used(outcomes: Sequence[PlayedJob]) -> float:
    """Unit-seconds."""
    ran = (outcome.arrival for outcome in outcomes if outcome.started is not None)
    return sum(arrival.intent.cost_units * seconds(arrival.runs_for) for arrival in ran)


def _is_late(outcome: PlayedJob) -> bool:
    deadline = outcome.arrival.intent.deadline_at
    return deadline is not None and (outcome.started is None or outcome.started > deadline)


def _at(waits: Sequence[Span], part: float) -> float | None:
    return seconds(waits[min(len(waits) - 1, int(part * len(waits)))]) if waits else None
