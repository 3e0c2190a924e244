"""
A process that claims and completes until nothing is left, and looks after each round whether more is in flight than may be.

    python claimer.py DSN SCHEMA HOST CAPACITY CAP
"""

# ruff: noqa: T201  # a program that answers on its standard output
from __future__ import annotations

import json
import sys

from penstock.core.jobs import changes
from penstock.core.jobs.admission import AdmissionLimits, Caps, Conditions
from penstock.core.jobs.ordering import Ordering
from penstock.core.jobs.round import Placement, RoundInputs, run_round
from penstock.core.jobs.states import JobState
from penstock.stores.api import Admit, Apply, Query, Terms, committed
from penstock.stores.postgres.store import PostgresStore


def main(dsn: str, schema: str, host: str, capacity: int, cap: int) -> None:
    store = PostgresStore(dsn, schema=schema)

    def decide(admission_view):
        return run_round(
            RoundInputs(
                admission_view,
                Conditions(capacity),
                AdmissionLimits(Caps(per_addon=cap)),
                Ordering(),
                lambda _: Placement.LEASE,
            ),
            most_leases=2,
        )

    done, excess = [], []
    print("ready", flush=True)
    sys.stdin.readline()
    while True:
        granted = [grant.dispatch for grant in committed(store, Admit(host, decide, Terms()))]
        ledger = store.ledger(host)
        if ledger.units > capacity or ledger.counts.get(("addon", "a"), 0) > cap:
            excess.append((ledger.units, ledger.counts.get(("addon", "a"), 0)))
        done += [dispatch.job_id for dispatch in granted]
        assert all(committed(store, Apply([changes.completed(d.dispatch_id, store.now()) for d in granted])))
        if not granted and not store.find(Query(states=[JobState.QUEUED], limit=1)):
            break
    print(json.dumps({"done": done, "excess": excess}))
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
