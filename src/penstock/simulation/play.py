"""
Plays a load under given rules, and computes the figures by which two settings are compared.

The player (`scheduler/playing.py`) decides as the scheduler does. It simulates the workers, which end every
job when the load says so, and time, which jumps to the next moment at which something can happen.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from penstock.core.jobs.types import HOUR, AddonId, HostId, Moment, Span, seconds
from penstock.scheduler.arrivals import Arrival, Load
from penstock.scheduler.playing import PlayedHost, PlayedState, Player
from penstock.scheduler.rules import SchedulerRules

#: How often the progress is reported, in simulated time.
_STEP: Final[Span] = HOUR
_POINTS: Final = 100

#: A change during a play: its moment, and a function that makes it.
Change = tuple[Moment, Callable[[Player], None]]


class Played(NamedTuple):
    """A load after it was played, with the player that has the result of each job."""

    load: Load
    player: Player
    capacity: int  # of all hosts
    lasted: Span  # from the first arrival to the last end

    def wait(self, job: int) -> Span | None:
        """How long the job waited after it could have started on an empty machine; None: it never started."""
        started = self.player.started_at[job]
        return None if started < 0 else started - max(self.load.at[job], self.load.earliest_start_at[job])

    def waits(self) -> list[Span | None]:
        return [self.wait(job) for job in range(len(self.load))]

    def state(self, job: int) -> PlayedState:
        return PlayedState(self.player.state[job])


def play(
    load: Load | Iterable[Arrival],
    rules: SchedulerRules,
    *,
    hosts: int | Sequence[PlayedHost] = 1,
    weights: Mapping[str, int] | None = None,
    changes: Iterable[Change] = (),
    progress: Callable[[int], object] = lambda _: None,
) -> Played:
    """
    Play a load to its end. `hosts`: the hosts, or the number of equal hosts that each have a worker for every
    job. `weights`: of addons. `progress` is called with the number of jobs that have ended or will never
    start.
    """
    load = (load if isinstance(load, Load) else Load(load)).copy_to_play()
    if isinstance(hosts, int):
        hosts = [PlayedHost(HostId(f"host{number}")) for number in range(hosts)]
    began = load.began
    player = Player(rules, hosts, now=began, load=load)
    for addon_id, weight in (weights or {}).items():
        player.set_addon(AddonId(addon_id), weight=weight)
    for at, change in changes:
        player.at(max(at, began), partial(change, player))
    while (moment := player.next_moment()) is not None:
        player.run(moment + _STEP)
        progress(player.settled)
    capacity = sum((host.capacity or rules.capacity).most for host in hosts)
    return Played(load, player, capacity, max(player.ended_at, default=began) - began)


class AddonFigures(NamedTuple):
    """How the jobs of one addon, or of all, fared in a play."""

    addon_id: str
    jobs: int
    refused: int
    #: Jobs that started after their deadline, or never.
    late: int
    #: Jobs that were canceled while they waited or ran.
    canceled: int
    #: Jobs that had not ended at the end of the play: they had no worker, were paused, or waited for a quiet
    #: machine.
    stuck: int
    #: Seconds from ready to start: median, 95th percentile, longest.
    wait_p50: float | None
    wait_p95: float | None
    wait_max: float | None
    #: The part of all used unit-seconds.
    share: float


class ScheduleFigures(NamedTuple):
    """How many moments of a schedule became jobs, were skipped because of an earlier job, and were missed."""

    name: str
    submitted: int
    skipped: int
    missed: int


class Figures(NamedTuple):
    """The figures of one play, by which settings are compared."""

    addons: list[AddonFigures]
    everything: AddonFigures
    #: The part of all unit-seconds of the hosts that was used, from the first arrival to the last end.
    used: float
    lasted_sec: float
    preemptions: int
    retries: int
    schedules: list[ScheduleFigures]


class _JobCounts:
    """What is counted of one addon, or of all."""

    def __init__(self) -> None:
        self.jobs, self.late = 0, 0
        self.states: Counter[int] = Counter()
        self.waits = array("q")


def figures(played: Played) -> Figures:
    """The figures of a play, for each addon and for all."""
    load, player = played.load, played.player
    by_addon: dict[str, _JobCounts] = defaultdict(_JobCounts)
    everything = _JobCounts()
    for job, state in enumerate(player.state):
        wait, deadline = played.wait(job), load.deadline_at[job]
        late = bool(deadline) and (wait is None or player.started_at[job] > deadline)
        for counts in (everything, by_addon[load.intents[load.intent[job]].addon_id]):
            counts.jobs += 1
            counts.late += late
            counts.states[state] += 1
            if wait is not None:
                counts.waits.append(wait)
    used = player.used.total()
    addons = [
        _addon_figures(name, counts, player.used[AddonId(name)] / used if used else 0.0)
        for name, counts in sorted(by_addon.items())
    ]
    available = played.capacity * played.lasted
    return Figures(
        addons,
        _addon_figures("all", everything, 1.0 if used else 0.0),
        used / available if available else 0.0,
        seconds(played.lasted),
        player.preemptions,
        player.retries,
        [ScheduleFigures(each.name, each.submitted, each.skipped, each.missed) for each in player.schedules],
    )


def _addon_figures(name: str, counts: _JobCounts, share: float) -> AddonFigures:
    waits, states = sorted(counts.waits), counts.states
    stuck = (PlayedState.COMING, PlayedState.QUEUED, PlayedState.RUNNING)
    return AddonFigures(
        addon_id=name,
        jobs=counts.jobs,
        refused=states[PlayedState.REFUSED],
        late=counts.late,
        canceled=states[PlayedState.CANCELED],
        stuck=sum(states[state] for state in stuck),
        wait_p50=_percentile(waits, 0.5),
        wait_p95=_percentile(waits, 0.95),
        wait_max=_percentile(waits, 1.0),
        share=share,
    )


def _percentile(waits: Sequence[Span], part: float) -> float | None:
    return seconds(waits[min(len(waits) - 1, int(part * len(waits)))]) if waits else None


class Curves(NamedTuple):
    """The data of the plots of one play."""

    #: The percentiles 0 to 100 of the waits, in seconds.
    waits: list[float]
    #: Jobs in the queue at equal distances from the first arrival to the last end, and the hour of each
    #: point.
    queued: list[int]
    hours: list[float]


def curves(played: Played) -> Curves:
    """The data for the plots of a play."""
    waits = sorted(wait for wait in played.waits() if wait is not None)
    player, load = played.player, played.load
    arrived_at = sorted(
        at for at, state in zip(load.at, player.state, strict=True) if state != PlayedState.REFUSED
    )
    left_at = sorted(
        started if started >= 0 else ended
        for started, ended, state in zip(player.started_at, player.ended_at, player.state, strict=True)
        if state != PlayedState.REFUSED and (started >= 0 or ended >= 0)
    )
    began = load.began
    moments = [began + played.lasted * number // _POINTS for number in range(_POINTS + 1)]
    return Curves(
        [seconds(waits[min(len(waits) - 1, len(waits) * part // _POINTS)]) for part in range(_POINTS + 1)]
        if waits
        else [],
        [bisect_right(arrived_at, moment) - bisect_right(left_at, moment) for moment in moments],
        [(moment - began) / HOUR for moment in moments],
    )
