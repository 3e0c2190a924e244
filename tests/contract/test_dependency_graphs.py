"""
Random graphs of jobs with random ends, cancels, retries and kills, on every store, beside a model that knows
nothing of tables, counters and transactions. 10,000 graphs in `make soak`. A graph that fails is printed with
its seed: PENSTOCK_SEED=1234 pytest tests/contract/test_dependency_graphs.py
"""

from __future__ import annotations

import os
from random import Random

import pytest
from tests.contract.conftest import STORES, ManualClock, StoreKit

from penstock.core.jobs import changes
from penstock.core.jobs.dependencies import Dependency, DependencyStatus, IfUnmet, ParentCondition
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.types import SECOND, EndReason
from penstock.stores.api import Apply, Complete, CompletedDispatch, ResolveDependencies, Submit, committed
from penstock.stores.common import dependencies

SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))
#: Graphs for each store, and how many of them one test plays.
GRAPHS = {"memory": 100, "sqlite": 20, "postgres": 5} if SOAK == 1 else dict.fromkeys(STORES, 1_000 * SOAK)
PIECE = 50 if SOAK == 1 else 500
ENDED = ("DONE", "FAILED", "CANCELED")


class Model:
    """What should be true, by the words of docs/dependencies.md."""

    def __init__(self):
        self.state, self.parents, self.if_unmet, self.met = {}, {}, {}, set()
        self.dropped = set()

    def add(self, job_id, parents, if_unmet):
        self.state[job_id], self.parents[job_id], self.if_unmet[job_id] = "QUEUED", parents, if_unmet

    def waits_for(self, child):
        open_ones = [p for p, _ in self.parents[child] if (p, child) not in self.met | self.dropped]
        one_is_enough = self.if_unmet[child] == "any" and len(
            self.met & {(p, child) for p, _ in self.parents[child]}
        )
        return [] if one_is_enough else open_ones

    def settle(self):
        """Look at everything again until nothing changes."""
        before = None
        while before != (before := (dict(self.state), len(self.met), len(self.dropped))):
            for child in sorted(self.state):
                for parent, condition in self.parents[child]:
                    if self.state[child] == "QUEUED" and parent in self.waits_for(child):
                        self.judge(parent, child, condition)

    def judge(self, parent, child, condition):
        state = self.state[parent]
        if state not in ENDED:
            return
        holds = {"ok": state == "DONE", "failed": state == "FAILED", "done": True}[condition]
        if holds:
            self.met.add((parent, child))
        elif self.if_unmet[child] == "any" and len(self.waits_for(child)) > 1:
            self.dropped.add((parent, child))
        elif self.if_unmet[child] == "fail":
            self.state[child] = "FAILED"
        elif self.if_unmet[child] != "wait" or state != "FAILED":
            self.state[child] = "CANCELED"


class Play:
    def __init__(self, open_store, seed):
        self.dice, self.open_store, self.clock = Random(seed), open_store, ManualClock()
        self.kit = StoreKit(open_store(self.clock), self.clock)
        self.model, self.live = Model(), {}
        self.starts = 0

    @property
    def store(self):
        return self.kit.store

    # acts

    def submit(self):
        dice, known = self.dice, list(self.model.state)
        if_unmet = dice.choice(list(IfUnmet))
        intents, families = [], []
        for at in range(dice.choice((1, 1, 2, 4))):
            names = dice.sample(known, min(len(known), dice.choice((0, 1, 1, 2, 3))))
            names += [f"#{n}" for n in range(at) if dice.random() < 0.5]
            family = [(name, dice.choice(("ok", "ok", "ok", "done", "failed"))) for name in names]
            after = tuple(Dependency(name, ParentCondition(condition)) for name, condition in family)
            delays = dice.choice(((), (), (1,)))
            intents.append(
                Intent("a", "t", cost_units=1, after=after, if_unmet=if_unmet, retry_delays_sec=delays)
            )
            families.append(family)
        ids = [receipt.job_id for receipt in committed(self.store, Submit(intents))]
        for job_id, family in zip(ids, families, strict=True):
            named = [(ids[int(p[1:])] if p[0] == "#" else p, condition) for p, condition in family]
            self.model.add(job_id, named, str(if_unmet))

    def start(self):
        for dispatch in self.kit.tick(lease=True, limit=self.dice.choice((1, 3, None))):
            job_id = dispatch.job_id
            assert self.model.state[job_id] == "QUEUED"
            assert self.model.waits_for(job_id) == [], "a child started before its conditions held"
            self.model.state[job_id] = "RUNNING"
            self.live[job_id] = dispatch
            self.starts += 1

    def complete(self):
        jobs = self.dice.sample(list(self.live), min(len(self.live), self.dice.choice((1, 2, 5))))
        done = [CompletedDispatch(self.live.pop(job_id).dispatch_id, "1") for job_id in jobs]
        if self.dice.random() < 0.5:
            assert committed(self.store, Complete(done)) == [True] * len(done)
        else:
            for each in done:
                assert committed(self.store, Complete([each])) == [True]
        for job_id in jobs:
            self.model.state[job_id] = "DONE"

    def end(self):
        if self.live:
            job_id = self.dice.choice(list(self.live))
            reasons = (
                EndReason.JOB_ERROR,
                EndReason.JOB_ERROR,
                EndReason.COST_LIMIT_REACHED,
                EndReason.RELEASED,
            )
            assert self.kit.end(self.live.pop(job_id), self.dice.choice(reasons))
            self.model.state[job_id] = self.kit.state(job_id)

    def crash(self):
        """A worker is gone: its lease ends."""
        if self.live:
            job_id = self.dice.choice(list(self.live))
            assert self.kit.end(self.live.pop(job_id), EndReason.WORKER_CRASHED)
            self.model.state[job_id] = self.kit.state(job_id)

    def cancel(self):
        job_id = self.dice.choice(list(self.model.state))
        if self.model.state[job_id] in ("QUEUED", "BLOCKED"):
            change = changes.cancel(
                self.store.job(job_id), None, self.clock.now, grace=SECOND, **self.kit.rules
            )
            assert committed(self.store, Apply([change])) == [True]
            self.model.state[job_id] = "CANCELED"

    def retry(self, share=0.5):
        stuck = [j for j, state in self.model.state.items() if state in ("FAILED", "BLOCKED")]
        chosen = [job_id for job_id in stuck if self.dice.random() < share]
        again = [changes.retry(self.store.job(j), self.clock.now, self.kit.rules["ordering"]) for j in chosen]
        if again:
            assert all(committed(self.store, Apply(again)))
        for job_id in chosen:
            self.model.state[job_id] = "QUEUED"
            self.forget_unrecorded(job_id)

    def forget_unrecorded(self, child):
        """
        Several parents may end together, one so that the child fails. Whether the conditions on the others count as met
        depends on the order then; a condition that does not is judged again.
        """
        dependencies = [
            dependency for dependency in self.store.dependencies(child) if dependency.child == child
        ]
        self.model.met -= {
            (dependency.parent, child)
            for dependency in dependencies
            if dependency.status is DependencyStatus.OPEN
        }

    def kill(self):
        """The process that dispatches is gone, and another one opens the store."""
        if not hasattr(self.store, "_jobs"):
            self.store.close()
            self.kit.store = self.open_store(self.clock)

    def later(self):
        self.kit.later(self.dice.choice((1, 5, 100)))
        for job_id, dispatch in list(self.live.items()):
            if dispatch.expires_at <= self.clock.now:
                self.kit.end(self.live.pop(job_id), EndReason.LEASE_EXPIRED)
                self.model.state[job_id] = self.kit.state(job_id)

    # after each act

    def check(self):
        while committed(self.store, ResolveDependencies()):
            pass
        self.model.settle()
        jobs = {job.job_id: job for job in self.store.jobs(list(self.model.state))}
        for job_id, state in self.model.state.items():
            job = jobs[job_id]
            assert str(job.state) == state
            assert job.unmet == (len(self.model.waits_for(job_id)) if state == "QUEUED" else 0)

    def play(self, acts):
        self.submit()
        for _ in range(acts):
            act = self.dice.choices(
                (self.submit, self.start, self.complete, self.end, self.cancel, self.retry, self.later,
                 self.crash, self.kill),
                (3, 4, 3, 2, 1, 1, 1, 1, 0.3),
            )[0]  # fmt: skip
            act()
            self.check()
        self.finish()

    def finish(self):
        """Let everything run, and retry what failed: no child is left waiting, unless it is to wait for a retry."""
        for _ in range(100):
            self.kit.later(5_000)
            for job_id in list(self.live):
                self.kit.end(self.live.pop(job_id), EndReason.LEASE_EXPIRED)
                self.model.state[job_id] = self.kit.state(job_id)
            self.check()
            self.start()
            while self.live:
                self.complete()
                self.check()
            if not self.stuck() - self.waits_for_a_retry():
                break
            self.retry(0.8)
            self.check()
        assert self.stuck() == self.waits_for_a_retry(), "a child waits for ever"
        dependencies = [
            dependency for job_id in self.model.state for dependency in self.store.dependencies(job_id)
        ]
        for dependency in dependencies:
            met = (dependency.parent, dependency.child) in self.model.met
            if (
                self.model.if_unmet[dependency.child] != "any"
            ):  # there the order of the parents decides which one was met
                assert (
                    met == (dependency.status is DependencyStatus.MET)
                    or self.model.state[dependency.child] != "DONE"
                )
        assert self.store.audit() == []

    def stuck(self):
        return {job_id for job_id, state in self.model.state.items() if state not in ENDED}

    def waits_for_a_retry(self):
        """Below a job that failed for good: it depends on one that was canceled."""
        state, if_unmet, found = self.model.state, self.model.if_unmet, set()
        for _ in state:
            found |= {
                child
                for child in self.stuck()
                if any(
                    parent in found or (state[parent] == "FAILED" and if_unmet[child] == "wait")
                    for parent in self.model.waits_for(child)
                )
            }
        return found


def pieces():
    if "PENSTOCK_SEED" in os.environ:
        seed = int(os.environ["PENSTOCK_SEED"])
        return [(store, range(seed, seed + 1)) for store in STORES]
    return [
        (store, range(first, min(first + PIECE, graphs)))
        for store, graphs in GRAPHS.items()
        for first in range(0, graphs, PIECE)
    ]


@pytest.mark.long
@pytest.mark.parametrize(("store", "seeds"), pieces(), ids=lambda given: str(given).replace(" ", ""))
def test_no_child_starts_early_and_none_waits_for_ever(request, monkeypatch, tmp_path, store, seeds):
    starts = 0
    for seed in seeds:
        monkeypatch.setattr(dependencies, "MOST_RESOLVED", (10_000, 60)[seed % 3 == 0])
        play = Play(opener(request, store, tmp_path / f"{seed}.db"), seed)
        try:
            play.play(acts=25)
        except BaseException as error:
            error.add_note(f"PENSTOCK_SEED={seed}, store {store}")
            raise
        finally:
            play.store.close()
        starts += play.starts
    assert starts > 3 * len(seeds)


def opener(request, kind, path):
    if kind == "memory":
        return lambda clock: STORES["memory"](request, clock)
    if kind == "sqlite":
        from penstock.stores.sqlite.store import SqliteStore

        return lambda clock: SqliteStore(path, clock)
    place = request.getfixturevalue("postgres_emptied")()
    from penstock.stores.postgres.store import PostgresStore

    return lambda clock: PostgresStore(place.dsn, clock, schema=place.schema)
