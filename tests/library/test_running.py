"""The real thing on a real file: threads, an event loop, waiting, stopping."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from queue import SimpleQueue

import pytest
from tests.waiting import LONG, until

import penstock
from penstock.core.jobs import changes
from penstock.core.jobs.types import HOUR, MILLISECOND, SECOND, EndReason
from penstock.scheduler.driver import Driver
from penstock.stores.api import Apply, Shift, committed
from penstock.work.leases import KeeperThread, LeaseKeeper


def kinds(job):
    return [str(event.kind) for event in job.events()]


# results


def test_a_job_is_on_disk_when_enqueue_returns_and_runs_when_somebody_starts(make):
    first = make()
    job = first.job(name="add")(lambda a, b: a + b).enqueue(1, 2)
    first.close()
    second = make()
    second.job(name="add")(lambda a, b: a + b)

    with second:
        assert 3 == second.get(job.id).result(LONG)


def test_what_the_function_raised_reaches_whoever_waits_with_its_traceback(real):
    @real.job
    def boom() -> None:
        raise ValueError("no such thing")

    with real, pytest.raises(penstock.JobFailed) as failed:
        boom.enqueue().result(LONG)

    assert "ValueError: no such thing" in str(failed.value)
    assert 'raise ValueError("no such thing")' in failed.value.traceback
    assert "attempt.py" not in failed.value.traceback
    assert ("FAILED", "job_error") == (failed.value.state, failed.value.reason)


def test_a_job_that_exits_or_interrupts_fails_like_any_other(real):
    leave = real.job(name="leave")(lambda: exit(3))

    @real.job
    def interrupt() -> None:
        raise KeyboardInterrupt

    with real:
        for job in (leave.enqueue(), interrupt.enqueue()):
            with pytest.raises(penstock.JobFailed, match="SystemExit|KeyboardInterrupt"):
                job.result(LONG)
        assert "ok" == real.job(name="after")(lambda: "ok").enqueue().result(LONG)


def test_what_a_job_needs_being_away_is_not_its_error(make):
    scheduler = make(unavailable_retries=())

    @scheduler.job
    def call() -> None:
        raise penstock.Unavailable("the service is down")

    with scheduler, pytest.raises(penstock.JobFailed, match="BLOCKED: .*the service is down"):
        call.enqueue().result(LONG)


def test_waiting_has_a_limit_and_says_what_it_waited_for(real):
    job = real.job(name="f")(lambda: 1).options(not_before=3600).enqueue()

    with real, pytest.raises(TimeoutError, match=r"has not ended after 0.01 s: It starts in"):
        job.result(0.01)


def test_a_job_that_nobody_runs_says_so_until_somebody_does(make):
    here, there = make(), make()
    job = here.job(name="f")(lambda: 1).options(not_before=3600).enqueue()

    assert "No process runs the jobs of jobs.db now" in str(job.explain())
    with there:
        assert "at the earliest" in str(job.explain())
    assert "nobody_runs" == job.explain().reason


def test_a_canceled_job_raises_for_whoever_waits(real):
    job = real.job(name="f")(lambda: 1).enqueue()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(job.result, LONG)
        until(lambda: real.waiter.waiting)

        assert "CANCELED" == job.cancel()
        assert "CANCELED" == job.cancel()  # again: it changes nothing

        assert isinstance(waiting.exception(LONG), penstock.JobCanceled)
    with pytest.raises(penstock.JobCanceled):
        job.result(0)


def test_a_failed_job_can_be_tried_again(real):
    broken = True

    @real.job
    def flaky() -> str:
        if broken:
            raise OSError("down")
        return "up"

    with real:
        job = flaky.enqueue()
        with pytest.raises(penstock.JobFailed):
            job.result(LONG)
        broken = False
        job.retry()
        assert "up" == job.result(LONG)
    assert 2 == len(job.attempts())


def test_enqueueing_and_waiting_from_a_loop_does_not_hold_it_up(real):
    release = threading.Event()
    hold = real.job(name="hold")(lambda: release.wait(LONG))

    async def main():
        jobs = await asyncio.gather(*(hold.enqueue_async() for _ in range(20)))
        waiting = [asyncio.create_task(job.wait()) for job in jobs]
        before = threading.active_count()
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in waiting)
        assert threading.active_count() <= before + 1  # one looks for all of them
        release.set()
        return await asyncio.gather(*waiting)

    with real:
        assert [True] * 20 == asyncio.run(main())


def test_a_wait_that_is_given_up_is_forgotten(real):
    job = real.job(name="f")(lambda: 1).options(not_before=3600).enqueue()

    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await job.wait()

    asyncio.run(main())
    assert {} == real.waiter.waiting


# running


def test_coroutines_run_side_by_side_and_not_one_thread_each(real):
    here = []

    @real.job(cost=1)
    async def meet() -> str:
        here.append(threading.current_thread().name)
        while len(here) < 3:
            await asyncio.sleep(0.001)
        return penstock.current_job().id

    with real:
        jobs = meet.enqueue_many([()] * 3)
        assert [job.id for job in jobs] == [job.result(LONG) for job in jobs]
    assert 1 == len(set(here))


def test_the_cost_of_what_runs_never_exceeds_the_capacity(make):
    scheduler = make(capacity=30, workers=8)
    running, most, lock = 0, 0, threading.Lock()

    @scheduler.job(cost=10)
    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        until(lambda: most >= 3)  # as many as the capacity allows meet here
        with lock:
            running -= 1

    with scheduler:
        for job in work.enqueue_many([()] * 40):
            job.result(LONG)

    assert 3 == most


def test_a_higher_priority_goes_first(make):
    scheduler = make(workers=1, capacity=10)
    seen = []
    note = scheduler.job(name="note")(lambda word: seen.append(word))
    jobs = [note.options(priority=p).enqueue(p) for p in (20, 90, 50)]

    with scheduler:
        for job in jobs:
            job.result(LONG)

    assert [90, 50, 20] == seen


def test_jobs_that_waited_too_long_for_a_thread_go_back_to_the_queue(make):
    scheduler = make(workers=1)
    release = threading.Event()
    quick = scheduler.job(name="quick", cost=1)(lambda: None)
    runs = []

    @scheduler.job(cost=1)
    def slow() -> None:
        runs.append(penstock.current_job().id)
        release.wait(LONG)

    with scheduler:
        for job in quick.enqueue_many([()] * 100):
            job.result(LONG)
        scheduler.work.job_runner.batching.mean_run = (
            MILLISECOND  # on any machine they are so short that it claims ahead
        )
        jobs = slow.enqueue_many([()] * 5)
        until(lambda: any("REQUEUED" in kinds(job) for job in jobs))
        states = until(lambda: (now := scheduler.counts())["RUNNING"] == 1 and now)
        release.set()
        until(lambda: scheduler.counts()["DONE"] == 105)

    assert 4 == states["QUEUED"]
    assert 5 == len(runs) == len(set(runs))


def test_one_that_turns_out_long_holds_up_none_of_the_brief_ones_behind_it(make, monkeypatch):
    """Brief ones are given to one thread, which is quicker; the others must wake up when it does not come back."""
    monkeypatch.setattr(
        "penstock.library.job_runner.STALE", 3_600 * SECOND
    )  # nor are they given back meanwhile
    scheduler = make(workers=2, capacity=100)
    go = threading.Event()

    @scheduler.job(cost=1)
    def wait_for_it(wait: bool) -> None:
        if wait:
            go.wait(60)

    with scheduler:
        for handle in wait_for_it.enqueue_many([False] * 300):
            handle.result(LONG)
        long, *brief = wait_for_it.enqueue_many([True] + [False] * 20)
        for handle in brief:
            handle.result(LONG)

        assert not long.done
        go.set()
        long.result(LONG)


def test_where_functions_may_be_long_nothing_is_claimed_before_a_thread_is_free(make):
    scheduler = make(workers=1)
    began, release = threading.Event(), threading.Event()

    @scheduler.job(cost=1)
    def hold() -> None:
        began.set()
        release.wait(LONG)

    jobs = hold.enqueue_many([()] * 3)
    with scheduler:
        began.wait(LONG)
        states = [job.state for job in jobs]
        release.set()

    assert ["RUNNING", "QUEUED", "QUEUED"] == states


def test_a_job_whose_function_is_not_known_waits_and_says_why(make):
    other = make()
    job = other.job(name="elsewhere")(lambda: 1).enqueue()
    scheduler = make()
    known = scheduler.job(name="known")(lambda: 2)

    with scheduler:
        assert 2 == known.enqueue().result(LONG)
        told = scheduler.get(job.id).explain()
        assert "No function is registered here for 'elsewhere'" in str(told)
        assert "no_function" == told.reason
        assert "QUEUED" == job.state

        scheduler.job(name="elsewhere")(lambda: 3)
        assert 3 == job.result(LONG)


def test_a_cancel_reaches_the_function_that_runs_before_its_next_heartbeat(make):
    real = make(lease=600)
    began = threading.Event()

    @real.job
    def endless(ctx: penstock.JobContext) -> None:
        began.set()
        while True:
            time.sleep(0.005)
            ctx.check()

    with real:
        job = endless.enqueue()
        began.wait(LONG)
        until(lambda: job.job.pid)  # after this heartbeat the next one comes in minutes
        job.cancel()
        with pytest.raises(penstock.JobCanceled):
            job.result(LONG)
    assert ["STOP_REQUESTED", "CANCELED"] == kinds(job)[-2:]


def test_a_cancel_of_a_function_that_has_just_begun_reaches_it_a_little_later(make, monkeypatch):
    real = make(lease=600)
    began, steps, step = threading.Event(), [], LeaseKeeper.step
    monkeypatch.setattr(LeaseKeeper, "step", lambda keeper: steps.append(1) or step(keeper))
    monkeypatch.setattr("penstock.library.job_runner.QUICK_SEC", 3_600.0)  # each has just begun

    @real.job
    def endless(ctx: penstock.JobContext) -> None:
        began.set()
        while True:
            time.sleep(0.005)
            ctx.check()

    with real:
        job = endless.enqueue()
        began.wait(LONG)
        until(lambda: job.job.pid)  # after this heartbeat the next one comes in minutes
        job.cancel()
        before = len(steps)
        until(lambda: len(steps) > before + 1)  # the keeper has seen that something changed
        assert job.state == "RUNNING"
        monkeypatch.setattr("penstock.library.job_runner.QUICK_SEC", 0.0)
        with pytest.raises(penstock.JobCanceled):
            job.result(LONG)


def test_a_coroutine_is_canceled_as_coroutines_are(make):
    real = make(lease=600)
    began, left = threading.Event(), threading.Event()

    @real.job
    async def endless() -> None:
        began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            left.set()

    with real:
        job = endless.enqueue()
        began.wait(LONG)
        time.sleep(0.3)  # no longer one that has just begun
        job.cancel()
        assert left.wait(LONG)
        with pytest.raises(penstock.JobCanceled):
            job.result(LONG)


def test_a_run_past_its_limit_is_told_and_tried_again_later(make):
    scheduler = make(crash_retries=(0.01,))
    runs = []

    @scheduler.job(max_runtime=2)
    def first_slow(ctx: penstock.JobContext) -> str:
        runs.append(ctx.attempt)
        while len(runs) == 1:
            time.sleep(0.01)
            ctx.check()
        return "quick"

    with scheduler:
        job = first_slow.enqueue()
        assert "quick" == job.result(LONG)
    assert [1, 2] == runs
    assert "TIMEOUT" in kinds(job)


def test_a_long_function_that_never_looks_up_keeps_its_lease(make):
    scheduler = make(lease=2)

    @scheduler.job
    def busy() -> str:
        end = time.monotonic() + 5  # the first heartbeat comes after a second in any case, to tell the pid
        while time.monotonic() < end:
            pass
        return "done"

    with scheduler:
        job = busy.enqueue()
        assert "done" == job.result(LONG)
    assert 1 == len(job.attempts())


def test_a_function_that_lost_its_lease_is_told_and_its_result_refused(make, monkeypatch):
    scheduler = make(lease=1, crash_retries=(0.01,) * 10, workers=1)
    runs, told = [], threading.Event()

    @scheduler.job
    def first_cut_off(ctx: penstock.JobContext) -> str:
        runs.append(ctx.fence)
        if len(runs) > 1:
            return "second"
        until(lambda: ctx.canceled)
        told.set()
        until(lambda: len(runs) > 1)  # the place of the lost one was not lost with it
        return "first"

    with scheduler:
        leases = scheduler.work.job_runner.leases
        monkeypatch.setattr(leases, "step", lambda: 0.0)  # as if the network were gone
        job = first_cut_off.enqueue()
        until(lambda: runs)
        until(lambda: job.state == "QUEUED" or len(job.attempts()) > 1)
        monkeypatch.undo()
        assert "second" == job.result(LONG)
        assert told.wait(LONG / 2)
    assert sorted(set(runs)) == runs
    *lost, last = [str(attempt.end) for attempt in job.attempts()]
    assert ({"lease_expired"}, "completed") == (set(lost), last)


def test_a_lease_that_the_function_itself_found_lost_costs_no_thread(make):
    scheduler = make(workers=1, lease=3, crash_retries=())

    @scheduler.job
    def unlucky(ctx: penstock.JobContext) -> None:
        committed(scheduler.store, Apply([_end(scheduler, ctx)]))
        with pytest.raises(penstock.JobStopped, match="checkpoint was not saved"):
            ctx.save_checkpoint(1)

    with scheduler:
        job = unlucky.enqueue()
        until(lambda: job.done)
        for n in range(5):
            assert n == scheduler.job(name="echo")(lambda n: n).enqueue(n).result(LONG)


def _end(scheduler, ctx):
    """As the keeper would, after a lease that nobody renewed."""
    job = scheduler.get(ctx.id)
    rules, now = scheduler.rules, scheduler.store.now()
    return changes.end(
        job.job,
        job.attempts()[-1],
        EndReason.LEASE_EXPIRED,
        now,
        schedules=rules.schedules,
        ordering=rules.ordering,
    )


# what a function can say


def test_progress_and_checkpoints_and_spending_are_on_record(real):
    @real.job(cost_limit="0.50", retries=(0,))
    def talkative(ctx: penstock.JobContext) -> list:
        if ctx.attempt == 1:
            ctx.progress(0.25)
            ctx.save_checkpoint({"page": 3})
            ctx.spend("0.10")
            raise OSError("again")
        return [ctx.checkpoint, ctx.checkpoint["page"]]

    with real:
        job = talkative.enqueue()
        assert [{"page": 3}, 3] == job.result(LONG)
    assert 0.25 == job.progress
    assert 100_000 == job.job.spent
    assert "CHECKPOINT" in kinds(job)


def test_a_job_that_spends_its_limit_is_stopped_and_blocked(real):
    @real.job(cost_limit=1)
    def dear(ctx: penstock.JobContext) -> None:
        for _ in range(100):
            ctx.spend(0.6)
            ctx.check()

    with real, pytest.raises(penstock.JobFailed, match="BLOCKED"):
        dear.enqueue().result(LONG)


def test_outside_of_a_job_there_is_no_current_one_and_a_direct_call_needs_none(real):
    @real.job
    def index(ctx: penstock.JobContext, path: str) -> str:
        ctx.progress(0.5)
        ctx.save_checkpoint(1)
        ctx.spend(1)
        ctx.check()
        return f"{path} {ctx.checkpoint} {ctx.attempt}"

    with pytest.raises(LookupError):
        penstock.current_job()
    assert "/a 1 1" == index("/a")


@pytest.mark.parametrize(
    "wrong", ["sNaN", "NaN", "inf", "1e999999", "1e999999999999999", -1, "much", float("nan")]
)
def test_an_amount_is_a_number_that_can_be_added(real, wrong):
    @real.job(retries=())
    def dear(ctx: penstock.JobContext) -> str:
        try:
            ctx.spend(wrong)
        except ValueError as error:
            return str(error)
        return "was taken"

    with real:
        assert "amount is" in dear.enqueue().result(LONG)


@pytest.mark.parametrize("wrong", [-0.1, 1.1, True, "half", float("nan")])
def test_progress_is_a_number_from_0_to_1(real, wrong):
    @real.job
    def tell(ctx: penstock.JobContext) -> None:
        with pytest.raises(ValueError, match="progress is"):
            ctx.progress(wrong)

    tell()


# stopping


def test_stop_waits_for_what_runs_and_loses_no_result(real):
    began = threading.Event()

    @real.job
    def work() -> str:
        began.set()
        time.sleep(1.0)  # longer than the last half second that even what is given up gets
        return "done"

    with real:
        job = work.enqueue()
        began.wait(LONG)

    assert "done" == job.result(0)


def test_a_function_that_yields_goes_back_to_the_queue_with_its_checkpoint(real):
    began = threading.Event()

    @real.job
    def pages(ctx: penstock.JobContext) -> int:
        page = ctx.checkpoint or 0
        while page < 1_000_000 and not (page > 10 and resumed):
            began.set()
            page += 1
            if ctx.should_yield:
                ctx.save_checkpoint(page)
                ctx.check()
            time.sleep(0.001)
        return page

    resumed = False
    with real:
        job = pages.enqueue()
        began.wait(LONG)
        time.sleep(0.05)
    assert "QUEUED" == job.state
    assert "graceful_shutdown" == job.attempts()[-1].end

    resumed = True
    with real:
        assert job.result(LONG) > 10
    assert job.job.counters.crash == 0


def test_stop_is_bounded_whatever_the_functions_do(make):
    scheduler = make(workers=3, stop_timeout=0.2)
    began, release = threading.Semaphore(0), threading.Event()

    @scheduler.job(cost=1)
    def deaf() -> None:
        began.release()
        while not release.is_set():
            time.sleep(0.01)

    @scheduler.job(cost=1)
    async def deaf_coroutine() -> None:
        began.release()
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    scheduler.start()
    jobs = [deaf.enqueue(), deaf.enqueue(), deaf_coroutine.enqueue(), deaf.enqueue()]
    for _ in range(3):
        began.acquire()

    scheduler.stop()

    assert not release.is_set()
    assert ["QUEUED"] * 4 == [job.state for job in jobs]
    assert {"graceful_shutdown"} == {str(job.attempts()[-1].end) for job in jobs[:3]}
    release.set()
    time.sleep(0.05)
    assert ["QUEUED"] * 4 == [job.state for job in jobs]


def test_a_scheduler_can_be_started_again_and_enqueue_between(real):
    add = real.job(name="add")(lambda a: a + 1)
    with real:
        assert 2 == add.enqueue(1).result(LONG)
    job = add.enqueue(2)
    assert "QUEUED" == job.state
    with real:
        assert 3 == job.result(LONG)
    real.stop()


def test_a_second_scheduler_on_the_file_is_refused_by_name_and_can_still_enqueue(make):
    first, second = make(), make()
    first.job(name="f")(lambda: 1)
    job = second.job(name="f")(lambda: 2)

    with first:
        with pytest.raises(penstock.DispatcherHeld, match=r"jobs\.db is dispatched by .*process \d+"):
            second.start()
        assert 1 == job.enqueue().result(LONG)
    with second:
        assert 2 == job.enqueue().result(LONG)


@pytest.mark.parametrize(("part", "starts"), [(Driver, True), (KeeperThread, True), (KeeperThread, False)])
def test_ctrl_c_while_a_scheduler_starts_puts_back_what_has_begun(make, monkeypatch, part, starts):
    began, start = threading.Event(), part.start

    def interrupted(self):
        if starts:
            start(self)
        assert began.wait(LONG)
        raise KeyboardInterrupt

    scheduler = make()

    @scheduler.job
    def forever(ctx: penstock.JobContext):
        began.set()
        while True:
            ctx.check()

    job = forever.enqueue()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(part, "start", interrupted)
        scheduler.start()

    assert ("QUEUED", 0) == (job.state, job.job.counters.crash)
    assert "graceful_shutdown" == str(job.attempts()[-1].end)
    with make() as other:  # and the right to dispatch is free again
        assert 1 == other.job(name="one")(lambda: 1).enqueue().result(LONG)


def test_in_memory_everything_works_alike():
    scheduler = penstock.Scheduler(":memory:", workers=2)
    add = scheduler.job(name="add")(lambda a: a + 1)
    with scheduler:
        assert [1, 2, 3] == [job.result(LONG) for job in add.enqueue_many([0, 1, 2])]
    scheduler.close()


def test_nothing_of_a_stopped_scheduler_is_left_running(make):
    before = set(threading.enumerate())
    scheduler = make("other.db")
    with scheduler:
        scheduler.job(name="f")(lambda: 1).enqueue().result(LONG)
    scheduler.close()

    assert set() == set(threading.enumerate()) - before


def test_max_per_job_and_depth_are_kept(make):
    scheduler = make(max_queued=2, max_per_job={"one": 1})
    one = scheduler.job(name="one", cost=1)(lambda: 1)
    one.enqueue_many([(), ()])

    with pytest.raises(penstock.QueueFull, match="the limit is 2"):
        one.enqueue()


def test_a_full_queue_can_be_waited_for(make):
    scheduler = make(max_queued=1)
    f = scheduler.job(name="f")(lambda: 1)
    first = f.enqueue()

    with pytest.raises(penstock.QueueFull):
        f.options(wait_for_space=0.05).enqueue()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(f.options(wait_for_space=30).enqueue)
        time.sleep(0.05)
        assert not waiting.done()
        first.cancel()
        assert "QUEUED" == waiting.result(LONG).state


def test_unique_calls_are_one_job(real):
    @real.job(unique=True, deadline=timedelta(hours=1))
    def sync(user: int) -> None:
        pass

    first = sync.enqueue(7)
    again = sync.options(priority="HIGH").enqueue(7)

    assert first == again
    assert (True, False) == (first.created, again.created)
    assert first != sync.enqueue(8)
    by_key = sync.options(unique_key="nightly")
    assert by_key.enqueue(9) == by_key.enqueue(9)
    with pytest.raises(penstock.KeyConflict):
        by_key.enqueue(10)


def test_a_call_with_a_deadline_says_whether_it_looks_reachable(real):
    f = real.job(name="f", expected_duration=600)(lambda: 1)

    assert f.enqueue().deadline_reachable is None
    assert f.options(deadline=timedelta(days=1)).enqueue().deadline_reachable
    assert f.options(deadline=timedelta(seconds=30)).enqueue().deadline_reachable is False
    later = f.options(deadline=timedelta(seconds=30))
    assert asyncio.run(later.enqueue_async()).deadline_reachable is False


def test_what_was_enqueued_can_be_found_and_edited(real):
    f = real.job(name="f")(lambda: 1)
    g = real.job(name="g")(lambda: 1)
    first, second = f.enqueue(), f.enqueue()
    g.options(tags=["x"]).enqueue()

    assert [second, first] == real.find("QUEUED", name="f")
    first.edit(priority="URGENT", not_before=60)
    assert 95 == first.job.intent.priority
    assert first.job.intent.earliest_start_at > first.job.created_at
    first.edit(run_when="quiet", quiet_for=600)
    assert ("quiet", 600) == (first.job.intent.run_when, first.job.intent.quiet_for_sec)
    first.edit(run_when="any")
    assert ("any", 0, 95) == (
        first.job.intent.run_when,
        first.job.intent.quiet_for_sec,
        first.job.intent.priority,
    )
    with pytest.raises(penstock.BadIntent, match="quiet_for_sec"):
        first.edit(quiet_for=600)
    assert 3 == real.counts()["QUEUED"]
    with pytest.raises(
        TypeError, match="'cost' cannot be edited; priority, not_before, deadline, run_when, quiet_for can"
    ):
        first.edit(cost=3)
    with pytest.raises(ValueError, match="state is 'LOST'"):
        real.find("LOST")
    with pytest.raises(penstock.NotFound):
        real.get("nowhere")


# claiming with the submit


def test_a_thread_that_is_idle_gets_its_job_by_the_commit_of_the_submit(make, monkeypatch):
    scheduler = make(stop_timeout=0.5)  # nobody is there to tell of the end that it waits for
    commits = []
    ran = threading.Event()
    job = scheduler.job(name="run")(ran.set)
    with scheduler:
        until(lambda: scheduler.work.job_runner.free == 4)
        scheduler.work.service.driver.stop()  # nobody else can claim
        with monkeypatch.context() as patched:
            commit = scheduler.store.commit

            def noted(*operations, **how):
                commits.append([type(operation).__name__ for operation in operations])
                return commit(*operations, **how)

            patched.setattr(scheduler.store, "commit", noted)
            handle = job.enqueue()
            assert ran.wait(LONG)
        # The learner has a thread of its own, and may commit what it has learned meanwhile.
        assert [["Submit", "Admit"]] == [names for names in commits if {"Submit", "Admit"} & {*names}]
    assert "DONE" == handle.state


def test_a_job_of_another_process_runs_in_the_thread_that_took_its_submit(make):
    scheduler, other = make(), make()
    threads = SimpleQueue()
    scheduler.job(name="run")(lambda: threads.put(threading.current_thread().name))
    elsewhere = other.job(name="run")(lambda: None)

    def thread_of_one():
        until(lambda: scheduler.work.job_runner.free == 4)
        elsewhere.enqueue()
        return threads.get(timeout=LONG)

    with scheduler:
        until(
            lambda: thread_of_one() == "penstock-relay"
        )  # not if the last job is being reported at this moment


def test_while_all_threads_are_busy_nothing_is_claimed_beside_a_submit(make):
    scheduler = make(workers=1)
    go, busy = threading.Event(), threading.Event()

    def wait() -> None:
        busy.set()
        go.wait(LONG)

    hold = scheduler.job(wait)
    with scheduler:
        first = hold.enqueue()
        assert busy.wait(LONG)

        claimed = scheduler.work.job_runner.claim()
        go.set()
        assert claimed is None
        first.result(LONG)


def test_nothing_is_claimed_for_a_scheduler_that_stops(real):
    real.job(name="run")(lambda: None)
    real.start()
    job_runner = real.work.job_runner
    real.stop()

    assert job_runner.claim() is None
    assert "QUEUED" == real.job(name="other")(lambda: None).enqueue().state


def test_two_never_claim_for_the_same_threads_at_once(real):
    real.job(name="run")(lambda: None)
    with real:
        job_runner = real.work.job_runner
        until(lambda: job_runner.claim() is not None)

        assert job_runner.claim() is None
        job_runner.take([])
        until(lambda: job_runner.claim() is not None)
        job_runner.take([])


def test_a_cancel_while_the_runtime_limit_stops_a_run_is_the_end_of_the_job(make):
    scheduler = make(crash_retries=(0.01,))
    runs, told, canceled = [], threading.Event(), threading.Event()

    @scheduler.job(max_runtime=1)
    def slow(ctx: penstock.JobContext) -> None:
        runs.append(ctx.attempt)
        until(lambda: ctx.canceled)
        told.set()
        canceled.wait(LONG)

    with scheduler:
        job = slow.enqueue()
        assert told.wait(LONG)
        job.cancel()
        canceled.set()
        with pytest.raises(penstock.JobCanceled):
            job.result(LONG)
    assert runs == [1]


def test_a_cancel_while_a_scheduler_stops_is_the_end_of_the_job(make):
    scheduler = make()
    began = threading.Event()

    @scheduler.job
    def slow(ctx: penstock.JobContext) -> None:
        began.set()
        until(lambda: ctx.should_yield)
        job.cancel()
        ctx.check()

    scheduler.start()
    job = slow.enqueue()
    assert began.wait(LONG)
    scheduler.stop()

    assert job.state == "CANCELED"


def test_a_job_shows_the_process_that_runs_it(real):
    go = threading.Event()
    job = real.job(name="wait")(lambda: go.wait(LONG) and None).enqueue()
    with real:
        until(lambda: job.job.pid is not None)
        pid = job.job.pid
        go.set()
        job.result(LONG)

    assert pid == os.getpid()
    assert [str(event.kind) for event in job.events()] == [
        "SUBMITTED",
        "ADMITTED",
        "DISPATCHING",
        "RUNNING",
        "DONE",
    ]


def test_a_run_keeps_its_lease_when_the_clock_is_set_back(make):
    scheduler = make(lease=3)
    began, go_on = threading.Event(), threading.Event()

    @scheduler.job
    def slow() -> str:
        began.set()
        go_on.wait(60)
        return "done"

    with scheduler:
        job = slow.enqueue()
        assert began.wait(LONG)
        scheduler.steady_clock.accept(-3 * HOUR)
        committed(scheduler.store, Shift(-3 * HOUR))
        [held] = scheduler.store.live()
        until(lambda: scheduler.store.dispatch(held.dispatch_id).expires_at > held.expires_at)
        go_on.set()
        assert job.result(LONG) == "done"
    assert len(job.attempts()) == 1
