"""Simulation: replays a load under other settings, with the real rules on a virtual clock (SPEC BY-2)."""

from __future__ import annotations

from penstock.scheduler.arrivals import Arrival
from penstock.simulation.play import Figures, Played, figures, made_up, play, replayed

__all__ = ["Arrival", "Figures", "Played", "figures", "made_up", "play", "replayed"]
