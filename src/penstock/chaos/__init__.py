"""
Kills the real daemon and real jobs again and again, and checks the promises afterwards (SPEC BY-3, RS-1 to
RS-4).
"""

from __future__ import annotations

from penstock.chaos.kill_loop import Aftermath, KillLoop, PromiseCheck, check_promises

__all__ = ["Aftermath", "KillLoop", "PromiseCheck", "check_promises"]
