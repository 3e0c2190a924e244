"""
Alerts, and calls to those who wait for a job, carried out of the house (`docs/alerts.md`).

    trail ──▶ reader: whom does it concern, was it told just now? ──▶ spool: a file a message ──▶ messenger: one thread a receiver

The reader decides and never waits; what it decided lies on the disk before it goes on; a messenger knows its own receiver and nobody else's.
"""

from __future__ import annotations

from penstock.alerts.alerting import Alerting, Ways

__all__ = ["Alerting", "Ways"]
