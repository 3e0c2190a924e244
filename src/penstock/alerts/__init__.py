"""
Alerts, and notices to workers that a job waits for them, sent to commands and webhooks (`docs/alerts.md`).

    trail ──▶ TrailReader: which receivers? ──▶ Spool: one file per message ──▶ Messenger: one thread each

The reader decides and never waits; its messages are on the disk before it reads on; each messenger serves one
receiver.
"""

from __future__ import annotations

from penstock.alerts.alerting import Alerting

__all__ = ["Alerting"]
