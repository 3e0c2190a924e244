"""
Kills and freezes real schedulers, workers and jobs again and again, and checks the promises afterwards (SPEC
BY-3, RS-1 to RS-4).
"""

from __future__ import annotations

from penstock.chaos.checks import Aftermath, PromiseCheck, check_promises
from penstock.chaos.kill_loop import KillLoop, TrialPlan
from penstock.chaos.processes import TrialPlace

__all__ = ["Aftermath", "KillLoop", "PromiseCheck", "TrialPlace", "TrialPlan", "check_promises"]
