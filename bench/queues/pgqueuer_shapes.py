"""PgQueuer has neither dependencies nor arrays: an array is a bulk submit."""

from __future__ import annotations

from bench.queues.pgqueuer_ import prepare, session, submit_bulk, work

__all__ = ["array", "prepare", "session", "work"]

array = submit_bulk
