"""Ours, as a daemon that runs functions itself: in processes of their own, each with a warden above it that can always end it."""

from __future__ import annotations

import json
import threading

from bench.fresh import ROOT
from bench.queues import daemon
from penstock import Client
from penstock.client.client import job_of

GUARANTEE = "on disk"


def prepare() -> None:
    daemon.start(
        "runner.workers=2",
        f"runner.functions={json.dumps(['bench.queues.tick:tick'])}",
        f"runner.path={json.dumps([str(ROOT)])}",
        f"runner.pass_on={json.dumps(['BENCH_*'])}",
    )


def submit_bulk(count: int) -> None:
    """They wait until `work` lets them."""
    tick = job_of("bench", "penstock.function", {"function": "bench.queues.tick:tick"}, cost_units=1)
    with Client() as client:
        client.pause()
        for first in range(0, count, 1_000):
            client.submit_many([tick] * min(1_000, count - first))


def work() -> None:
    with Client() as client:
        client.resume()
    threading.Event().wait()
