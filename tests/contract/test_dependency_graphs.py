"""
Random graphs of jobs with random ends, cancels, retries and kills, on every store, beside a model that knows
nothing of tables, counters and transactions. 10,000 graphs in `make soak`. A graph that fails is printed with
its seed: PENSTOCK_SEED=1234 pytest tests/contract/test_dependency_graphs.py

Many graphs follow each other in one database; what a graph leaves waiting is canceled at its end. In some of them
the store is in a process of its own, which is killed with SIGKILL while it writes: the operation has happened
with all that follows from it, or not at all.
"""

from __future__ import annotations

import os
from copy import deepcopy
from functools import partial
from random import Random
from time import sleep

import pytest
from tests.contract import store_process
from tests.contract.conftest import STORES, ManualClock, StoreKit
from tests.contract.store_process import Killed, StoreProcess

from penstock.core.jobs import changes
from penstock.core.jobs.dependencies import Dependency, DependencyStatus, IfUnmet, ParentCondition
from penstock.core.jobs.intent import Intent
from penstock.core.jobs.types import SECOND, EndReason
from penstock.stores.api import (
    Apply,
    Complete,
    CompletedDispatch,
    Query,
    ResolveDependencies,
    Submit,
    committed,
)
from penstock.stores.common import dependencies

SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))
#: Graphs by store and kind: in this process, or in a process that is killed. 1,000 in all, times SOAK.
GRAPHS = {
    ("memory", "here"): 600,
    ("sqlite", "here"): 225,
    ("sqlite", "killed"): 50,
    ("postgres", "here"): 100,
    ("postgres", "killed"): 25,
}
GRAPHS = (
    dict(zip(GRAPHS, (100, 20, 5, 10, 3), strict=True))
    if SOAK == 1
    else {kind: count * SOAK for kind, count in GRAPHS.items()}
)
PIECE = 50
#: How many children one transaction resolves: in every third graph so few that some are left for the next.
FEW, MANY = 60, 10_000
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
        """
        Look at everything again until nothing changes. The ends of one transaction count together: if one of them fails
        the child, what the others met in that transaction does not count.
        """
        met, failed = set(self.met), {job_id for job_id, state in self.state.items() if state == "FAILED"}
        before = None
        while before != (before := (dict(self.state), len(self.met), len(self.dropped))):
            for child in sorted(self.state):
                for parent, condition in self.parents[child]:
                    if self.state[child] == "QUEUED" and parent in self.waits_for(child):
                        self.judge(parent, child, condition)
        self.met -= {
            (parent, child)
            for parent, child in self.met - met
            if self.state[child] == "FAILED" and child not in failed
        }

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
    """One graph. `open_store` gets the clock."""

    def __init__(self, kit, open_store, seed, *, kills=False):
        self.dice, self.open_store, self.kills, self.kit = Random(seed), open_store, kills, kit
        self.model, self.live = Model(), {}
        self.starts = 0
        newest = self.store.find(Query(newest_first=True, limit=1))
        #: The number of the last job before this graph.
        self.last_before = newest[0].no if newest else 0

    @property
    def store(self):
        return self.kit.store

    # acts: each is an operation and what it means for the model

    def act(self, operation, apply):
        """Commit the operation; `apply` gets the model and the answer."""
        apply(self.model, committed(self.store, operation))

    def submit(self):
        dice, jobs = self.dice, list(self.model.state)
        if_unmet = dice.choice(list(IfUnmet))
        intents, families = [], []
        for at in range(dice.choice((1, 1, 2, 4))):
            names = dice.sample(jobs, min(len(jobs), dice.choice((0, 1, 1, 2, 3))))
            names += [f"#{n}" for n in range(at) if dice.random() < 0.5]
            family = [(name, dice.choice(("ok", "ok", "ok", "done", "failed"))) for name in names]
            after = tuple(Dependency(name, ParentCondition(condition)) for name, condition in family)
            delays = dice.choice(((), (), (1,)))
            intents.append(
                Intent("a", "t", cost_units=1, after=after, if_unmet=if_unmet, retry_delays_sec=delays)
            )
            families.append(family)

        def apply(model, receipts):
            if receipts is None:  # the answer was lost with the process
                # A transaction that was undone leaves a gap in the numbers, so those after the last one may be older.
                found = self.store.find(Query(after=self.last_before, limit=10_000))
                new = [job for job in found if job.job_id not in model.state]
                assert len(new) in (0, len(intents)), "a submit is all or nothing"
                ids = [job.job_id for job in sorted(new, key=lambda job: job.no)]
            else:
                ids = [receipt.job_id for receipt in receipts]
            for job_id, family in zip(ids, families if ids else [], strict=True):
                named = [(ids[int(p[1:])] if p[0] == "#" else p, condition) for p, condition in family]
                model.add(job_id, named, str(if_unmet))

        self.act(Submit(intents), apply)

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
        parts = [jobs] if jobs and self.dice.random() < 0.5 else [[job_id] for job_id in jobs]
        for part in parts:
            done = [CompletedDispatch(self.live.pop(job_id).dispatch_id, "1") for job_id in part]

            def apply(model, answers, part=part):
                assert answers in (None, [True] * len(part))
                model.state.update(dict.fromkeys(part, "DONE"))
                model.settle()

            self.act(Complete(done), apply)

    def end(self):
        reasons = (
            EndReason.JOB_ERROR,
            EndReason.JOB_ERROR,
            EndReason.COST_LIMIT_REACHED,
            EndReason.RELEASED,
        )
        self.end_one(self.dice.choice(reasons))

    def crash(self):
        """A worker is gone: its lease ends."""
        self.end_one(EndReason.WORKER_CRASHED)

    def end_one(self, how):
        if self.live:
            job_id = self.dice.choice(list(self.live))
            dispatch = self.live.pop(job_id)
            job = self.store.job(job_id)

            def apply(model, answers):
                assert answers in (None, [True])
                model.state[job_id] = str(self.store.job(job_id).state)

            change = changes.end(job, dispatch, how, self.kit.now, **self.kit.rules)
            self.act(Apply([change]), apply)

    def cancel(self):
        job_id = self.dice.choice(list(self.model.state))
        if self.model.state[job_id] in ("QUEUED", "BLOCKED"):
            self.cancel_all([job_id])

    def cancel_all(self, jobs):
        canceled = [
            changes.cancel(self.store.job(job_id), None, self.kit.now, grace=SECOND, **self.kit.rules)
            for job_id in jobs
        ]

        def apply(model, answers):
            assert answers in (None, [True] * len(jobs))
            model.state.update(dict.fromkeys(jobs, "CANCELED"))

        if jobs:
            self.act(Apply(canceled), apply)

    def retry(self, share=0.5):
        stuck = [j for j, state in self.model.state.items() if state in ("FAILED", "BLOCKED")]
        chosen = [job_id for job_id in stuck if self.dice.random() < share]
        again = [changes.retry(self.store.job(j), self.kit.now, self.kit.rules["ordering"]) for j in chosen]

        def apply(model, answers):
            assert answers in (None, [True] * len(chosen))
            model.state.update(dict.fromkeys(chosen, "QUEUED"))

        if again:
            self.act(Apply(again), apply)

    def kill(self):
        """The process that dispatches is gone, and another one opens the store. With `kills` it dies in an operation."""
        if self.kills:
            self.kill_during(
                self.dice.choice((self.submit, self.complete, self.end, self.cancel, self.retry))
            )
        elif not hasattr(self.store, "_jobs"):
            self.store.close()
            self.kit.store = self.open_store(self.kit.clock)

    def kill_during(self, act):
        before, live = deepcopy(self.model), dict(self.live)
        candidates = []

        def interrupted(operation, apply):
            self.store.dies_in = self.dice.choice((0, self.dice.random() * 0.003))
            with pytest.raises(Killed):
                committed(self.store, operation)
            self.kit.store = self.open_store(self.kit.clock)
            candidates.append(apply)
            raise Killed

        self.act = interrupted
        try:
            act()
        except Killed:
            after = deepcopy(before)
            candidates[0](after, None)
            after.settle()
            self.resolve_pending()
            # A submit whose jobs are there has happened.
            models = (after,) if after.state.keys() != before.state.keys() else (after, before)
            matching = [model for model in models if self.differences(model) == []]
            assert matching, (
                f"neither whole nor undone: {self.differences(after)}, {self.differences(before)}"
            )
            self.model = matching[0]
            self.live = {j: d for j, d in live.items() if self.model.state[j] == "RUNNING"}
        finally:
            del self.act

    def later(self):
        self.kit.later(self.dice.choice((1, 5, 100)))
        for job_id, dispatch in list(self.live.items()):
            if dispatch.expires_at <= self.kit.now:
                self.expire(job_id)

    def expire(self, job_id):
        self.kit.end(self.live.pop(job_id), EndReason.LEASE_EXPIRED)
        self.model.state[job_id] = self.kit.state(job_id)
        self.model.settle()

    # after each act

    def resolve_pending(self):
        while dependencies.MOST_RESOLVED == FEW and committed(self.store, ResolveDependencies()):
            pass

    def check(self):
        self.resolve_pending()
        self.model.settle()
        if dependencies.MOST_RESOLVED == FEW:
            self.forget_unrecorded()
        assert self.differences(self.model) == []

    def forget_unrecorded(self):
        """Of ends that one transaction could not resolve together, some may count that would not have."""
        failed = [job_id for job_id, state in self.model.state.items() if state == "FAILED"]
        for child in failed:
            met = {(stored.parent, child) for stored in self.store.dependencies(child) if stored.child == child
                     and stored.status is DependencyStatus.MET}  # fmt: skip
            pairs = {(parent, child) for parent, _ in self.model.parents[child]}
            self.model.met = self.model.met - pairs | met

    def differences(self, model):
        """Job, what the model says, and what the store has."""
        jobs = {job.job_id: job for job in self.store.jobs(list(model.state))}
        expected = {
            job_id: (state, len(model.waits_for(job_id)) if state == "QUEUED" else 0)
            for job_id, state in model.state.items()
        }
        stored = {job_id: (str(job.state), job.unmet) for job_id, job in jobs.items()}
        return [(j, expected[j], stored.get(j)) for j in expected if stored.get(j) != expected[j]]

    def play(self, acts):
        self.submit()
        for _ in range(acts):
            act = self.dice.choices(
                (self.submit, self.start, self.complete, self.end, self.cancel, self.retry, self.later,
                 self.crash, self.kill),
                (3, 4, 3, 2, 1, 1, 1, 1, 2 if self.kills else 0.3),
            )[0]  # fmt: skip
            act()
            self.check()
        self.finish()

    def finish(self):
        """Let everything run, and retry what failed: no child is left waiting, unless it is to wait for a retry."""
        for _ in range(100):
            self.kit.later(5_000)
            for job_id in list(self.live):
                self.expire(job_id)
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
        for job_id in self.model.state:
            for stored in self.store.dependencies(job_id):
                met = (stored.parent, stored.child) in self.model.met
                if self.model.if_unmet[stored.child] != "any":  # there the order of the parents decides
                    is_met = stored.status is DependencyStatus.MET
                    assert met == is_met or self.model.state[stored.child] != "DONE"
        self.cancel_all(sorted(self.stuck()))
        self.check()

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
    graphs = GRAPHS
    if "PENSTOCK_SEED" in os.environ:
        seed = int(os.environ["PENSTOCK_SEED"])
        return [(*kind, range(seed, seed + 1)) for kind in graphs]
    return [
        (*kind, range(first, min(first + PIECE, count)))
        for kind, count in graphs.items()
        for first in range(0, count, PIECE)
    ]


@pytest.mark.long
@pytest.mark.timeout(120 if SOAK == 1 else 3_600)
@pytest.mark.parametrize(("store", "where", "seeds"), pieces(), ids=lambda given: str(given).replace(" ", ""))
def test_no_child_starts_early_and_none_waits_for_ever(request, monkeypatch, tmp_path, store, where, seeds):
    starts, kills, clock = 0, where == "killed", ManualClock()
    open_store = opener(request, store, tmp_path / "jobs.db", kills=kills)
    kit = (ProcessKit if kills else StoreKit)(open_store(clock), clock)
    try:
        for seed in seeds:
            monkeypatch.setattr(dependencies, "MOST_RESOLVED", FEW if seed % 3 == 0 else MANY)
            if kills:
                kit.store.close()
                kit.store = open_store(clock)
            play = Play(kit, open_store, seed, kills=kills)
            try:
                play.play(acts=25)
            except BaseException as error:
                error.add_note(f"PENSTOCK_SEED={seed}, store {store}, {where}")
                raise
            starts += play.starts
        assert kit.store.audit() == []
    finally:
        kit.store.close()
    assert starts > len(seeds)


class ProcessKit(StoreKit):
    def tick(self, **fields):
        return self.store.tick(**fields)


def opener(request, kind, path, *, kills):
    """A function that opens the store with a clock; `kills`: in a process of its own."""
    if kind == "memory":
        return lambda clock: STORES["memory"](request, clock)
    if kind == "sqlite":
        there = partial(store_process.sqlite, path)
    else:
        place = request.getfixturevalue("postgres_emptied")()
        there = partial(store_process.postgres, place.dsn, place.schema)
    if not kills:
        return there
    server = request.getfixturevalue("postgres_server") if kind == "postgres" else None

    def open_in_a_process(clock):
        # The server goes on with what a client that is gone has sent; its end is the end of that.
        others = "pg_stat_activity WHERE application_name = 'penstock'"
        while server is not None and server.run(f"SELECT count(*) FROM {others}") != "0":
            sleep(0.002)
        return StoreProcess(there, clock, dependencies.MOST_RESOLVED)

    return open_in_a_process
