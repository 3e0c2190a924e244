"""Penstock admits, queues and dispatches work."""

from __future__ import annotations

__version__ = "0.1.0.dev0"
