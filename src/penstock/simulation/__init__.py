"""
Simulation: replays a load under other settings, with the scheduler's rules on a virtual clock (SPEC BY-2).
"""

from __future__ import annotations

from penstock.scheduler.arrivals import Arrival, Load
from penstock.scheduler.playing import PlayedHost
from penstock.simulation.made_up import made_up
from penstock.simulation.play import Curves, Figures, Played, curves, figures, play
from penstock.simulation.recorded import Recording, recorded
from penstock.simulation.recorded_groups import change_schedules
from penstock.simulation.unplayed import unplayed

__all__ = [
    "Arrival",
    "Curves",
    "Figures",
    "Load",
    "Played",
    "PlayedHost",
    "Recording",
    "change_schedules",
    "curves",
    "figures",
    "made_up",
    "play",
    "recorded",
    "unplayed",
]
