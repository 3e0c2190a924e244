"""
A load that is made up from a seed: jobs arrive at random, most of them short and some very long, as real
ones.
"""

from __future__ import annotations

from array import array
from random import Random
from typing import Final

from penstock.core.jobs.intent import Intent
from penstock.core.jobs.types import HOUR, SECOND, AddonId, Moment, Priority
from penstock.scheduler.arrivals import JobExtras, Load

_BEGAN: Final[Moment] = 1_900_000_000 * SECOND
#: The type of commands.
_TYPE: Final = "penstock.command"
_COSTS: Final = ((2, 30), (5, 60), (10, 85), (20, 95), (40, 100))
_PRIORITIES: Final = ((Priority.LOW, 20), (Priority.NORMAL, 90), (Priority.HIGH, 100))


def made_up(
    jobs: int, *, addons: int = 3, load: float = 0.9, capacity: int = 90, hosts: int = 1, seed: int = 1
) -> Load:
    """
    A made-up load. `load`: the part of all hosts' units that the jobs need; above 1 the queue grows for as
    long as jobs arrive. The addons have equally many jobs, and a tenth of the first one's jobs are
    time-sensitive with a deadline. A job that is asked to yield stops after a second, and continues later
    where it stopped.
    """
    dice, at = Random(seed), _BEGAN  # noqa: S311  # no secret: the same seed gives the same load
    made = Load(usual=JobExtras(yields_after=SECOND, resumes=True))
    shapes, lengths, needed = array("l"), array("q"), 0
    for _ in range(jobs):
        cost = min(capacity, _drawn(_COSTS, dice))
        intent = Intent(
            addon_id=AddonId(f"addon{dice.randrange(addons)}"),
            job_type=_TYPE,
            cost_units=cost,
            priority=_drawn(_PRIORITIES, dice),
        )
        runs_for = round(dice.lognormvariate(3, 1.2) * SECOND)
        shapes.append(made.number_of(intent))
        lengths.append(runs_for)
        needed += cost * runs_for
    pause = needed / (load * capacity * hosts) / max(1, jobs)
    for shape, runs_for in zip(shapes, lengths, strict=True):
        at += round(dice.expovariate(1) * pause)
        about = max(0.1, runs_for / SECOND * dice.uniform(0.7, 1.5))
        intent = made.intents[shape]
        if intent.addon_id != "addon0" or dice.random() >= 0.1:
            made.add(at, shape, runs_for, expected_sec=about)
            continue
        urgent = made.number_of(
            Intent(intent.addon_id, _TYPE, intent.cost_units, intent.priority, time_sensitive=True)
        )
        made.add(at, urgent, runs_for, expected_sec=about, deadline_at=at + runs_for + HOUR)
    return made


def _drawn(shares: tuple[tuple[int, int], ...], dice: Random) -> int:
    """
    One of the values, drawn at random. Each one is given with the sum of its percentage and of those before
    it.
    """
    drawn = dice.random() * 100
    return next(value for value, share in shares if drawn < share)
