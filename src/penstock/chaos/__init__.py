"""Kills the real daemon and real jobs again and again, and proves the promises from what is left (SPEC BY-3, RS-1 to RS-4)."""

from __future__ import annotations

from penstock.chaos.havoc import Aftermath, KillLoop
from penstock.chaos.proof import PromiseCheck, check_promises

__all__ = ["Aftermath", "KillLoop", "PromiseCheck", "check_promises"]
