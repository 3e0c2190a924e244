"""Simulation: replays a load under other settings, with the real rules on a virtual clock (SPEC BY-2)."""

from __future__ import annotations

from penstock.simulation.play import Arrival, Figures, Played, figures, made_up, play, replayed

__all__ = ["Arrival", "Figures", "Played", "figures", "made_up", "play", "replayed"]
