"""The batching machine: what one commit or request reports and claims, and when the next plan is due."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.client.worker import Worker, WorkerLoop
from penstock.core.jobs.types import MILLISECOND, SECOND
from penstock.core.jobs.workers import (
    AHEAD,
    BRIEF,
    FEW,
    HELD,
    MOST_AHEAD,
    MOST_AT_ONCE,
    SOON,
    Batching,
    BatchPlan,
)
from penstock.library.job_runner import JobRunner
from penstock.runner.folder import RunnerFolder
from penstock.runner.payload import RunnerOptions
from penstock.runner.runner import Runner
from penstock.work.executors import ProcessExecutor, ThreadExecutor

NOW = 10**9
BRIEF_RUN, SHORT_RUN, LONG_RUN = 10, 2 * MILLISECOND, SECOND
PLACES = 4
THREADS = Batching(PLACES)
SERVER = Batching(PLACES, expensive=True)
PROCESSES = Batching(PLACES, ahead=0)
SDK = Batching(PLACES, prefetch=20, expensive=True)
RUNNER = Batching(PLACES, threads=False)


def plan(batching=THREADS, *, mean_run=SHORT_RUN, now=NOW, free=0, waiting=0, ended=0, **more):
    batching = replace(batching, mean_run=mean_run)
    return batching.plan(now, free=free, waiting=waiting, ended=ended, **more)


# one plan


def test_an_idle_worker_claims_for_each_free_place():
    assert plan(free=3, mean_run=LONG_RUN) == BatchPlan(claim=3)
    assert plan(free=3, mean_run=None) == BatchPlan(claim=3)


def test_an_ended_attempt_makes_room_for_a_claim_in_the_same_commit():
    assert plan(ended=2, mean_run=LONG_RUN) == BatchPlan(report=2, claim=2)


def test_short_functions_are_claimed_ahead():
    assert plan(mean_run=SHORT_RUN).claim == PLACES * AHEAD // SHORT_RUN
    assert plan(mean_run=BRIEF_RUN).claim == MOST_AHEAD
    assert plan(mean_run=AHEAD).claim == 0


def test_nothing_is_claimed_ahead_where_an_attempt_is_expensive_to_hand_over():
    assert plan(PROCESSES, free=1, mean_run=BRIEF_RUN).claim == 1


def test_nothing_is_claimed_ahead_for_a_place_whose_attempt_is_long():
    assert plan(stuck=3).claim == AHEAD // SHORT_RUN
    assert plan(stuck=PLACES).claim == 0


def test_the_user_says_how_many_jobs_are_prefetched_however_long_they_are():
    assert plan(SDK, free=PLACES, mean_run=LONG_RUN).claim == PLACES + 20


def test_a_few_free_places_are_not_worth_a_commit_while_others_are_about_to_end():
    assert plan(SDK, free=-11).claim == 0
    assert plan(SDK, free=-10).claim == 10
    assert plan(SDK, free=-20, ended=1).claim == 1


def test_half_of_a_large_batch_is_reported_while_the_other_half_runs():
    assert plan(Batching(200), ended=200).report == 100
    assert plan(Batching(200), ended=200, mean_run=BRIEF_RUN).report == 200
    assert plan(Batching(200, expensive=True), ended=200).report == 200
    assert plan(Batching(200, threads=False), ended=200, mean_run=BRIEF_RUN).report == 100


def test_few_attempts_are_reported_together():
    assert plan(Batching(4), ended=4).report == 4
    assert plan(Batching(60), ended=60).report == FEW


def test_a_batch_that_is_half_through_is_not_reported_in_two():
    half = {"waiting": 2, "ended": 2, "mean_run": BRIEF_RUN, "taken_at": NOW}

    assert plan(**half) == BatchPlan(again_at=NOW + SOON)
    assert plan(**half, now=NOW + SOON).report == 2
    assert plan(SERVER, **half, now=NOW + SOON) == BatchPlan(wake=True, again_at=NOW + 2 * SOON)
    assert plan(SERVER, **half, now=NOW + HELD).report == 2


def test_sleeping_threads_are_woken_for_attempts_that_wait_for_a_while():
    assert not plan(waiting=6, taken_at=NOW).wake
    assert plan(waiting=6, taken_at=NOW, now=NOW + SOON).wake
    assert not plan(now=NOW + SOON).wake


def test_an_end_fills_a_batch_when_nothing_waits_behind_it():
    short, brief = replace(THREADS, mean_run=SHORT_RUN), replace(THREADS, mean_run=BRIEF_RUN)

    assert short.is_full(0, 1)
    assert short.is_full(2, 2)
    assert not brief.is_full(2, 2)
    assert not SERVER.is_full(2, 2)


def test_the_first_run_sets_the_mean_duration_and_the_next_ones_only_correct_it():
    batching = Batching(PLACES)
    batching.learn(10)
    assert batching.mean_run == 10
    batching.learn(16 * SECOND)

    assert SECOND <= batching.mean_run < 2 * SECOND


# every owner of a machine


def of_library(kind, *, shared):
    executor = Mock(ahead=kind.ahead)
    return JobRunner(
        {}, lambda *_: executor, workers=PLACES, name="", now=lambda: NOW, expensive=shared
    ).batching


def of_sdk_worker(prefetch):
    loop = WorkerLoop(Worker("http://127.0.0.1:9", token="none"), {}, PLACES, prefetch, processes=False)
    loop.finish(0)
    return loop.batching


def of_runner(tmp_path):
    store = Mock(shared=False)
    return Runner(Mock(store=store), RunnerFolder(tmp_path), RunnerOptions(workers=PLACES)).batching


def test_library_sdk_worker_and_runner_own_such_a_machine(tmp_path):
    assert of_library(ThreadExecutor, shared=False) == THREADS
    assert of_library(ThreadExecutor, shared=True) == SERVER
    assert of_library(ProcessExecutor, shared=False) == PROCESSES
    assert of_sdk_worker(20) == SDK
    assert of_runner(tmp_path) == RUNNER


@dataclass
class Owner:
    """An owner on a virtual clock, whose functions take the given spans. A commit takes 1 ms."""

    batching: Batching
    runs: list[int]
    now: int = NOW
    taken_at: int = 0
    waiting: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    reports: list[tuple[int, list[int]]] = field(default_factory=list)
    most_in_flight: int = 0

    def work(self):
        """Until all jobs have run and are reported."""
        runs = iter(self.runs)
        while sum(len(ended) for _, ended in self.reports) < len(self.runs):
            self._run()
            plan = self.batching.plan(
                self.now,
                free=self.batching.places - len(self.running) - len(self.waiting) - len(self.ended),
                waiting=len(self.waiting),
                ended=len(self.ended),
                taken_at=self.taken_at,
            )
            claimed = list(islice(runs, plan.claim))
            if plan.report or claimed:
                self.now += MILLISECOND
                self.reports.append((self.now, self.ended[: plan.report]))
                del self.ended[: plan.report]
                self.waiting += claimed
                self.taken_at = self.now if claimed else self.taken_at
                in_flight = len(self.running) + len(self.waiting) + len(self.ended)
                self.most_in_flight = max(self.most_in_flight, in_flight)
            else:
                assert self.running or plan.again_at is not None
                self.now = min([*self.running, *filter(None, [plan.again_at])])

    def _run(self):
        """Each place runs one attempt after the other until now."""
        while self.running and min(self.running) <= self.now:
            end = min(self.running)
            self.running.remove(end)
            self.ended.append(end)
            self._begin(end)
        self._begin(self.now)

    def _begin(self, at):
        while self.waiting and len(self.running) < self.batching.places:
            run = self.waiting.pop(0)
            self.batching.learn(run)
            self.running.append(at + run)


@pytest.mark.parametrize("batching", [THREADS, SERVER, PROCESSES, SDK, RUNNER], ids=lambda b: repr(b)[:70])
@settings(deadline=None)
@given(runs=st.lists(st.sampled_from([BRIEF_RUN, BRIEF, SHORT_RUN, AHEAD]), max_size=300))
def test_every_attempt_is_reported_once_and_soon(batching, runs):
    owner = Owner(replace(batching), runs)
    owner.work()

    assert sum(len(ended) for _, ended in owner.reports) == len(runs)
    assert owner.most_in_flight <= PLACES + MOST_AHEAD
    for reported_at, ended in owner.reports:
        assert len(ended) <= MOST_AT_ONCE
        assert all(reported_at - end <= 2 * HELD for end in ended)


@settings(deadline=None)
@given(
    batching=st.sampled_from([THREADS, SERVER, PROCESSES, SDK, RUNNER]),
    waiting=st.integers(0, 700),
    running=st.integers(0, 500),
    ended=st.integers(0, 2_000),
    mean_run=st.none() | st.integers(0, 10 * SECOND),
    age=st.integers(0, SECOND),
)
def test_a_plan_is_within_its_bounds(batching, waiting, running, ended, mean_run, age):
    in_flight = running + waiting + ended
    made = plan(
        batching,
        free=PLACES - in_flight,
        waiting=waiting,
        ended=ended,
        mean_run=mean_run,
        taken_at=NOW - age,
    )

    assert 0 <= made.report <= min(ended, MOST_AT_ONCE)
    assert 0 <= made.claim <= MOST_AT_ONCE
    assert in_flight - made.report + made.claim <= max(PLACES + MOST_AHEAD, in_flight)
    if made.again_at is not None:
        assert NOW < made.again_at <= NOW + HELD
    if age >= HELD and ended:
        assert made.report
