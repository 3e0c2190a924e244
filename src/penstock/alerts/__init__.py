"""
Sends alerts to owners, and notices to workers whose job waits, by commands and webhooks (`docs/alerts.md`).

    trail ──▶ TrailReader: which receivers? ──▶ Spool: one file per message ──▶ Messenger: one thread each

The reader decides and never waits. It writes its messages to the disk before it reads on. Each messenger
serves one receiver.
"""

from __future__ import annotations

from penstock.alerts.alerting import Alerting

__all__ = ["Alerting"]
