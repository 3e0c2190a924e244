"""Ours on the PostgreSQL that the peers use too, as a library: any number of hosts could share it, and every claim is fenced and audited."""

from __future__ import annotations

import psycopg

from bench.queues.penstock_ import GUARANTEE, session, submit_bulk, work
from bench.queues.tick import server

__all__ = ["GUARANTEE", "prepare", "session", "submit_bulk", "work"]


def prepare() -> None:
    with psycopg.connect(server(), autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS penstock CASCADE")
