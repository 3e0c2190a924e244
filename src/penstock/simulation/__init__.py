"""Simulation: replays a load under other settings, with the real rules on a virtual clock (SPEC BY-2)."""

from __future__ import annotations

from penstock.simulation.figures import Figures, figures
from penstock.simulation.load import Arrival, made_up, replayed
from penstock.simulation.play import Played, play

__all__ = ["Arrival", "Figures", "Played", "figures", "made_up", "play", "replayed"]
