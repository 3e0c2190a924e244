"""
Situations in which a job is explained: each is a function that arranges it and returns the kit that answers,
the job to ask about, and the names that the expected words may use.
"""

from __future__ import annotations

from penstock.core.jobs.admission import AdmissionLimits, Budget, Caps
from penstock.core.jobs.dependencies import Dependency, IfUnmet
from penstock.core.jobs.load import Capacity, Host, QuietState, Reading
from penstock.core.jobs.preemption import Preemption
from penstock.core.jobs.states import JobState
from penstock.core.jobs.types import SECOND, Constraint, EndReason, HostId
from penstock.core.jobs.workers import WorkerKinds
from penstock.scheduler.job_service import YieldRequests
from penstock.scheduler.preemption import Preempter
from penstock.stores.api import DrainHost, Query, RegisterHost, committed

ANY = WorkerKinds("a")


def present(kit):
    """A worker that polls for every job, so that rounds reserve what may start."""
    for addon in ("a", "b", "c", "d", "large", "greedy"):
        kit.pulling_workers.polled(WorkerKinds(addon), until=1 << 62)
    return kit


def lease_all(kit):
    for dispatch in kit.job_service.dispatchable():
        kit.job_service.lease(dispatch.job_id, "w1")


def running(kit, **fields):
    """A job that runs on worker w1."""
    [job_id] = kit.submit(**fields)
    kit.step()
    kit.job_service.lease(job_id, "w1")
    return job_id


def lease_of(kit, job_id):
    return kit.store.job(job_id).dispatch_id


def end(kit, job_id, how, **more):
    kit.job_service.end(lease_of(kit, job_id), how, **more)


def failed(kit, how=EndReason.JOB_ERROR, error="Traceback:\nexit code 7", **fields):
    job_id = running(kit, **fields)
    kit.later(3)
    end(kit, job_id, how, error=error)
    return job_id


def measured(kit, cpu, memory=0.1):
    kit = present(kit.under(capacity=Capacity()))
    for name, value in (("cpu", cpu), ("memory", memory)):
        kit.machine.report(Reading(name, value, kit.now))
    return kit


def limited(kit, **caps):
    return present(kit.under(limits=AdmissionLimits(Caps(**caps))))


# in the queue, and nothing holds it


def free(kit):
    return present(kit), kit.submit()[0], {}


def after_another_job(kit):
    [parent] = kit.submit()
    return present(kit), kit.submit(after=(Dependency(parent),))[0], {"parent": parent}


def after_a_job_that_failed(kit):
    present(kit)
    [parent] = kit.submit()
    [claimed] = kit.job_service.claim(ANY, 1)
    kit.job_service.end(claimed.dispatch.dispatch_id, EndReason.JOB_ERROR, error="no")
    others = kit.submit(n=4, addon_id="b")
    after = tuple(map(Dependency, (parent, *others)))
    return (
        kit,
        kit.submit(after=after, if_unmet=IfUnmet.WAIT)[0],
        {"parent": parent, "other": others[0], "third": others[1]},
    )


def free_and_a_claim_waits(kit):
    kit.job_service.claim(ANY, 1)
    kit.later(12)
    return kit, kit.submit()[0], {}


# the host


def stopping(kit):
    present(kit).machine.draining = True
    return kit, kit.submit()[0], {}


def drained(kit):
    committed(kit.store, RegisterHost(host(kit, "local")))
    committed(kit.store, DrainHost(HostId("local"), draining=True))
    present(kit).machine.drained = True
    return kit, kit.submit()[0], {}


def label_that_no_host_has(kit):
    return present(kit), kit.submit(labels=("gpu", "large"))[0], {}


def host(kit, name, **more):
    return Host(
        host=HostId(name),
        instance=name,
        capacity=more.pop("capacity", 90),
        started_at=kit.now,
        seen_at=kit.now,
        until=kit.now + 30 * SECOND,
        workers=more.pop("workers", (WorkerKinds("a"),)),
        **more,
    )


def label_of_another_host(kit):
    committed(kit.store, RegisterHost(host(kit, "render-1", labels=("gpu",))))
    return present(kit), kit.submit(labels=("gpu",))[0], {}


def busy_and_wants_normal(kit):
    kit = measured(kit, 0.62)
    return kit, kit.submit()[0], {}


def normal_and_wants_quiet(kit):
    kit = measured(kit, cpu=0.45)
    return kit, kit.submit(run_when="quiet")[0], {}


def panic(kit):
    kit = measured(kit, 0.1, memory=0.96)
    return kit, kit.submit(run_when="any")[0], {}


def large_and_panic(kit):
    kit = measured(kit, 0.1, memory=0.96)
    return kit, kit.submit(run_when="any", cost_units=70)[0], {}


def above_all_units_of_the_host(kit):
    """The job was submitted when the host gave more."""
    [job_id] = kit.submit(cost_units=80)
    return present(kit.under(capacity=Capacity(fixed=40))), job_id, {}


def one_unit(kit):
    other = running(present(kit), addon_id="b", cost_units=90)
    return kit, kit.submit(cost_units=1)[0], {"other": other}


def no_signal(kit):
    kit = present(kit.under(capacity=Capacity()))
    return kit, kit.submit(run_when="any")[0], {}


def signal_of_an_application(kit):
    kit = measured(kit, 0.1)
    kit.machine.report_application("shop", {"p95_ms": 2_000.0}, kit.now)
    return kit, kit.submit()[0], {}


def quiet_too_short(kit):
    kit = measured(kit, cpu=0.05)
    kit.machine.conditions(kit.now)
    kit.later(10)
    return kit, kit.submit(run_when="quiet", quiet_for_sec=600)[0], {}


def above_the_present_capacity(kit):
    kit = measured(kit, cpu=0.5)
    return kit, kit.submit(cost_units=80)[0], {}


# pauses


def everything_paused(kit):
    present(kit).job_service.pause()
    return kit, kit.submit()[0], {}


def addon_paused(kit):
    present(kit).job_service.pause("a")
    return kit, kit.submit()[0], {}


def behind_another_addon(kit):
    """A round that has no units left looks at the first head only, so it records no denial of this job."""
    running(present(kit), addon_id="b", cost_units=90)
    kit.submit(addon_id="c", priority=90)
    [job_id] = kit.submit()
    kit.step()
    kit.later(10)
    return job_id


def paused_while_another_job_has_all_units(kit):
    job_id = behind_another_addon(kit)
    kit.job_service.pause()
    kit.step()
    return kit, job_id, {}


def drained_while_another_job_has_all_units(kit):
    job_id = behind_another_addon(kit)
    kit, _, _ = drained(kit)
    kit.step()
    return kit, job_id, {}


def paused_twice_and_more(kit):
    kit = limited(kit, per_addon=1)
    running(kit, cost_units=90)
    kit.job_service.pause("a")
    kit.job_service.pause()
    return kit, kit.submit()[0], {}


# its own time


def earliest_start(kit):
    return present(kit), kit.submit(earliest_start_at=kit.now + 90 * SECOND)[0], {}


def earliest_start_and_paused(kit):
    present(kit).job_service.pause("a")
    return kit, kit.submit(earliest_start_at=kit.now + 900 * SECOND)[0], {}


# caps


def all_slots(kit):
    kit = limited(kit, concurrent=1)
    other = running(kit, addon_id="b")
    return kit, kit.submit()[0], {"other": other}


def cap_of_an_addon(kit):
    kit = limited(kit, addons={"a": 2})
    first, second = running(kit), running(kit, cost_units=20)
    return kit, kit.submit()[0], {"first": first, "second": second}


def cap_of_a_type(kit):
    kit = limited(kit, per_type=1)
    other = running(kit)
    running(kit, job_type="other")
    return kit, kit.submit()[0], {"other": other}


def cap_of_a_constraint(kit):
    kit = limited(kit, constraints={"disk_write_heavy": 1})
    other = running(kit, addon_id="b", constraints=Constraint.DISK_WRITE_HEAVY)
    return kit, kit.submit(constraints=Constraint.DISK_WRITE_HEAVY)[0], {"other": other}


def cap_with_many_holders(kit):
    kit = limited(kit, per_addon=4)
    names = {f"n{n}": running(kit, cost_units=10 + n) for n in range(4)}
    return kit, kit.submit()[0], names


def cap_of_zero(kit):
    kit = limited(kit, types={"a/t": 0})
    return kit, kit.submit()[0], {}


def cap_and_units(kit):
    kit = limited(kit, per_type=1)
    other = running(kit, cost_units=85)
    return kit, kit.submit()[0], {"other": other}


# budgets


def spent(kit, **budget):
    kit = present(kit.under(limits=AdmissionLimits(budgets={"a": Budget(**budget)})))
    first = running(kit)
    kit.job_service.heartbeat(lease_of(kit, first), spent=1_500_000)
    return kit, kit.submit()[0], {}


def budget_of_the_day(kit):
    return spent(kit, day=1_500_000)


def budget_of_the_month(kit):
    return spent(kit, month=1_000_000)


def budget_and_pause(kit):
    kit, job_id, names = spent(kit, day=1_500_000)
    kit.job_service.pause("a")
    return kit, job_id, names


# units and order


def no_units(kit):
    other = running(present(kit), addon_id="b", cost_units=90)
    return kit, kit.submit()[0], {"other": other}


def units_expected(kit):
    large = running(present(kit), addon_id="b", cost_units=85, expected_duration_sec=60)
    [job_id] = kit.submit(cost_units=8)
    kit.step()
    kit.later(20)
    kit.job_service.heartbeat(lease_of(kit, large))
    kit.later(21)
    return kit, job_id, {"large": large}


def units_of_several(kit):
    present(kit)
    names = {f"n{n}": running(kit, addon_id="b", cost_units=30 - n) for n in range(3)}
    return kit, kit.submit(cost_units=20)[0], names


def units_kept(kit):
    present(kit).submit(n=4, addon_id="b", cost_units=20)
    kit.step()
    [large] = kit.submit(addon_id="large", cost_units=90, priority=60)
    kit.submit(addon_id="c", cost_units=5)
    kit.step()
    lease_all(kit)
    kit.later(20)
    for dispatch in kit.store.live():
        kit.job_service.heartbeat(dispatch.dispatch_id)
    kit.later(11)
    [small] = kit.submit(addon_id="d", cost_units=5)
    kit.step()
    return kit, small, {"large": large}


def queued_ahead(kit):
    first = present(kit).submit(n=9, priority=90)
    return kit, kit.submit()[0], {"first": first[0]}


def line_ahead(kit):
    other = running(present(kit), addon_id="b", cost_units=90)
    return kit, kit.submit(n=4)[3], {"other": other}


def one_in_line_ahead(kit):
    other = running(present(kit), addon_id="b", cost_units=90)
    return kit, kit.submit(n=2)[1], {"other": other}


def ahead_by_band_and_share(kit):
    present(kit)
    other = running(kit, addon_id="greedy", cost_units=90)
    [mine] = kit.submit(addon_id="greedy", priority=45)
    [band] = kit.submit(addon_id="b", priority=90)
    [share] = kit.submit(addon_id="c", priority=42)
    return kit, mine, {"band": band, "share": share, "other": other}


def ahead_is_paused(kit):
    present(kit)
    other = running(kit, addon_id="greedy", cost_units=60)
    kit.submit(addon_id="b", priority=90)
    kit.job_service.pause("b")
    return kit, kit.submit(addon_id="greedy", cost_units=60, priority=45)[0], {"other": other}


def ahead_needs_a_label(kit):
    present(kit)
    other = running(kit, addon_id="greedy", cost_units=60)
    kit.submit(addon_id="b", priority=90, labels=("gpu",))
    return kit, kit.submit(addon_id="greedy", cost_units=60, priority=45)[0], {"other": other}


def ahead_is_not_ready(kit):
    present(kit)
    other = running(kit, addon_id="greedy", cost_units=60)
    kit.submit(addon_id="b", priority=90, earliest_start_at=kit.now + 60 * SECOND)
    return kit, kit.submit(addon_id="greedy", cost_units=60, priority=45)[0], {"other": other}


def ahead_has_no_worker_after_three_timeouts(kit):
    kit.submit(addon_id="z", priority=90, cost_units=5)
    for wait in (30, 30, 30, 60, 30, 120):
        kit.step()
        kit.later(wait)
    other = running(present(kit), addon_id="greedy", cost_units=60)
    return kit, kit.submit(addon_id="greedy", cost_units=60, priority=45)[0], {"other": other}


# workers


def no_worker_ever(kit):
    kit.job_service.claim(WorkerKinds("a", frozenset({"thumbnail", "resize"})), 1)
    return kit, kit.submit(job_type="thumnail")[0], {}


def no_worker_at_all(kit):
    return kit, kit.submit()[0], {}


def no_worker_long_after_the_start(kit):
    kit.later(3_600)
    return kit, kit.submit()[0], {}


def no_worker_and_paused(kit):
    kit.job_service.pause("a")
    return kit, kit.submit()[0], {}


def no_worker_and_too_few_units(kit):
    kit.pulling_workers.polled(WorkerKinds("greedy"), until=1 << 62)
    other = running(kit, addon_id="greedy", cost_units=60)
    return kit, kit.submit(n=2, job_type="index", cost_units=60)[1], {"other": other}


def no_worker_and_reserved(kit):
    [job_id] = kit.submit()
    kit.step()
    kit.later(18)
    return kit, job_id, {}


def no_worker_after_a_start_timeout(kit):
    [job_id] = kit.submit()
    kit.step()
    kit.later(30)
    kit.step()
    return kit, job_id, {}


def no_worker_after_three_start_timeouts(kit):
    [job_id] = kit.submit()
    for wait in (30, 30, 30, 60, 30, 120):
        kit.step()
        kit.later(wait)
    kit.step()
    return kit, job_id, {}


def worker_gone(kit):
    kit.job_service.claim(ANY, 1)
    kit.later(300)
    kit.step()
    return kit, kit.submit()[0], {}


def worker_gone_after_a_run(kit):
    [job_id] = kit.submit(retry_delays_sec=(5,))
    kit.step()
    kit.job_service.lease(job_id, "w1")
    end(kit, job_id, EndReason.JOB_ERROR, error="it broke")
    kit.later(60)
    return kit, job_id, {}


def learn(kit):
    while kit.job_service.learner.step(kit.now) <= kit.now:
        pass


def worker_of_a_scheduler_before(kit):
    """The kit that answers has started after the one whose worker ran such a job."""
    job_id = running(present(kit), addon_id="a", job_type="t")
    kit.later(3)
    end(kit, job_id, EndReason.COMPLETED)
    kit.later(60)
    learn(kit)
    kit = kit.under()
    return kit, kit.submit()[0], {}


def type_that_ran_under_a_scheduler_before(kit):
    kit, first, _ = worker_of_a_scheduler_before(kit)
    kit.job_service.cancel(first)
    return kit, kit.submit(job_type="tt")[0], {}


def worker_came_a_moment_ago(kit):
    [job_id] = kit.submit(retry_delays_sec=(5,))
    kit.step()
    kit.job_service.lease(job_id, "w1")
    end(kit, job_id, EndReason.JOB_ERROR, error="it broke")
    kit.later(6)
    return kit, job_id, {}


def worker_full(kit):
    first = kit.submit(n=2)
    kit.job_service.claim(ANY, 2, "w1")
    return kit, kit.submit()[0], {"first": first[0], "second": first[1]}


def worker_with_one_thread_full(kit):
    [first] = kit.submit()
    kit.job_service.claim(ANY, 1, "w1")
    return kit, kit.submit()[0], {"first": first}


def two_workers_full(kit):
    first = kit.submit(n=3)
    kit.job_service.claim(ANY, 2, "w1")
    kit.job_service.claim(ANY, 1, "w2")
    return kit, kit.submit()[0], {"first": first[0], "second": first[1]}


def runner_full(kit):
    kinds = WorkerKinds(job_types=frozenset({"penstock.command"}))
    [first] = kit.submit(job_type="penstock.command")
    kit.job_service.claim(kinds, 1, "runner")
    return kit, kit.submit(job_type="penstock.command")[0], {"first": first}


def runner_full_of_functions(kit):
    """The runner has other slots for functions than for commands, and one of those is taken too."""
    kit.submit(job_type="penstock.command")
    kit.job_service.claim(
        WorkerKinds(job_types=frozenset({"penstock.command", "penstock.function"})), 1, "runner"
    )
    first, second = kit.submit(job_type="penstock.function", n=2)
    kit.job_service.claim(WorkerKinds(job_types=frozenset({"penstock.function"})), 2, "runner")
    return kit, kit.submit(job_type="penstock.function")[0], {"first": first, "second": second}


def runner_disabled(kit):
    kit.job_service.explainer.runner_disabled = True
    return kit, kit.submit(job_type="penstock.command")[0], {}


def runner_disabled_and_reserved(kit):
    kit.job_service.explainer.runner_disabled = True
    [job_id] = kit.submit(job_type="penstock.command")
    kit.step()
    return kit, job_id, {}


# retries and interruptions


def retry_of_an_error(kit):
    return present(kit), failed(kit, retry_delays_sec=(600, 600, 600)), {}


def retry_of_a_crash(kit):
    return present(kit), failed(kit, EndReason.WORKER_CRASHED, None), {}


def retry_after_the_scheduler_was_killed(kit):
    return present(kit), failed(kit, EndReason.SCHEDULER_RESTARTED, None), {}


def retry_while_unavailable(kit):
    return present(kit), failed(kit, EndReason.UNAVAILABLE, "disk is away"), {}


def retry_is_due_but_there_are_no_units(kit):
    job_id = failed(present(kit), retry_delays_sec=(5,), cost_units=50)
    other = running(kit, addon_id="b", cost_units=60)
    kit.later(6)
    return kit, job_id, {"other": other}


def retry_and_paused(kit):
    job_id = failed(present(kit), retry_delays_sec=(600,))
    kit.job_service.pause("a")
    return kit, job_id, {}


def yielded_and_waits(kit):
    job_id = running(present(kit), cost_units=50)
    end(kit, job_id, EndReason.COOPERATIVE_PREEMPTION)
    other = running(kit, addon_id="b", cost_units=60, priority=90)
    return kit, job_id, {"other": other}


def yielded_after_a_minute(kit):
    """It keeps its turn, and so the moment since when it is ready."""
    job_id = running(present(kit), cost_units=50)
    kit.later(20)
    end(kit, job_id, EndReason.COOPERATIVE_PREEMPTION)
    other = running(kit, addon_id="b", cost_units=60, priority=90)
    kit.later(5)
    return kit, job_id, {"other": other}


# preemption


def with_preemption(kit):
    kit = present(kit.under(preemption=Preemption()))
    kit.job_service.explainer.preempts = True
    return kit


def preempting(kit, checkpoint=None):
    kit = with_preemption(kit)
    low = running(kit, addon_id="b", cost_units=90, priority=30)
    if checkpoint is not None:
        kit.job_service.heartbeat(lease_of(kit, low), checkpoint=checkpoint)
    [high] = kit.submit(priority=90)
    kit.step()
    preempter = Preempter(kit.store, kit.rules, kit.dispatcher, kit.job_service, YieldRequests())
    kit.job_service.explainer.preemption = lambda: preempter.cycle
    preempter.step(kit.now)
    return kit, low, high, preempter


def asked_to_yield(kit):
    kit, low, high, _ = preempting(kit)
    return kit, low, {"high": high}


def asked_to_yield_with_a_checkpoint(kit):
    kit, low, high, _ = preempting(kit, checkpoint='{"at": 1}')
    return kit, low, {"high": high}


def waits_for_a_victim(kit):
    kit, low, high, _ = preempting(kit)
    kit.later(12)
    return kit, high, {"low": low}


def waits_for_a_victim_that_was_asked_again(kit):
    kit, low, high, preempter = preempting(kit, checkpoint="1")
    for _ in range(3):
        kit.later(20)
        kit.job_service.heartbeat(lease_of(kit, low))
        preempter.step(kit.now)
    return kit, high, {"low": low}


def not_preemptible(kit):
    kit = with_preemption(kit)
    low = running(kit, addon_id="b", cost_units=90, priority=30, preemptible=False)
    [high] = kit.submit(priority=90)
    return kit, high, {"low": low}


def would_preempt_with_a_higher_priority(kit):
    kit = with_preemption(kit)
    low = running(kit, addon_id="b", cost_units=90, priority=30)
    return kit, kit.submit(priority=40)[0], {"low": low}


# deadlines


def deadline_out_of_reach(kit):
    other = running(present(kit), addon_id="b", cost_units=90, expected_duration_sec=100)
    [job_id] = kit.submit(deadline_at=kit.now + 60 * SECOND)
    return kit, job_id, {"other": other}


def deadline_within_reach(kit):
    other = running(present(kit), addon_id="b", cost_units=90, expected_duration_sec=30)
    [job_id] = kit.submit(deadline_at=kit.now + 60 * SECOND)
    return kit, job_id, {"other": other}


def deadline_passed(kit):
    running(present(kit), addon_id="b", cost_units=90)
    [job_id] = kit.submit(deadline_at=kit.now + 5 * SECOND)
    kit.step()
    kit.later(8)
    kit.step()
    return kit, job_id, {}


# in flight


def reserved(kit):
    [job_id] = present(kit).submit()
    kit.step()
    kit.later(18)
    return kit, job_id, {}


def runs(kit):
    job_id = running(present(kit), expected_duration_sec=12)
    kit.later(5)
    return kit, job_id, {}


def runs_with_a_limit(kit):
    job_id = running(present(kit), max_runtime_sec=60)
    kit.later(5)
    return kit, job_id, {}


def runs_again(kit):
    job_id = failed(present(kit), retry_delays_sec=(5,))
    kit.later(5)
    kit.step()
    kit.job_service.lease(job_id, "w2")
    kit.later(2)
    return kit, job_id, {}


def told_to_stop(kit):
    job_id = running(present(kit))
    kit.later(5)
    kit.job_service.cancel(job_id)
    return kit, job_id, {}


def runs_after_a_wait(kit):
    other = running(present(kit), addon_id="b", cost_units=90)
    [job_id] = kit.submit()
    kit.step()
    kit.later(25)
    end(kit, other, EndReason.COMPLETED)
    kit.step()
    kit.job_service.lease(job_id, "w1")
    return kit, job_id, {}


# settled


def done(kit):
    job_id = running(present(kit))
    end(kit, job_id, EndReason.COMPLETED)
    kit.later(3)
    return kit, job_id, {}


def done_after_a_wait(kit):
    kit, job_id, names = runs_after_a_wait(kit)
    end(kit, job_id, EndReason.COMPLETED)
    kit.later(3)
    return kit, job_id, names


def done_after_a_pause_a_retry_and_a_delay(kit):
    present(kit).job_service.pause("a")
    [job_id] = kit.submit(earliest_start_at=kit.now + 30 * SECOND, retry_delays_sec=(60,))
    kit.later(30)
    kit.step()
    kit.later(45)
    kit.job_service.resume("a")
    kit.step()
    kit.job_service.lease(job_id, "w1")
    end(kit, job_id, EndReason.JOB_ERROR, error="it broke")
    kit.later(60)
    kit.step()
    kit.later(4)
    kit.job_service.lease(job_id, "w1")
    end(kit, job_id, EndReason.COMPLETED)
    return kit, job_id, {}


def failed_at_once(kit):
    return present(kit), failed(kit), {}


def failed_after_all_attempts(kit):
    job_id = failed(present(kit), retry_delays_sec=(5,))
    kit.later(5)
    kit.step()
    kit.job_service.lease(job_id, "w1")
    end(kit, job_id, EndReason.JOB_ERROR, error="KeyError: 7")
    return kit, job_id, {}


def blocked_by_a_budget(kit):
    kit, _, _ = spent(kit, day=1_500_000)
    kit.step()
    [job_id] = [job.job_id for job in kit.store.find(Query(states=[JobState.RUNNING]))]
    end(kit, job_id, EndReason.COST_LIMIT_REACHED)
    return kit, job_id, {}


def blocked_by_its_limit(kit):
    job_id = running(present(kit), cost_limit=1_000_000)
    kit.job_service.heartbeat(lease_of(kit, job_id), spent=2_000_000)
    end(kit, job_id, EndReason.COST_LIMIT_REACHED)
    return kit, job_id, {}


def canceled_in_the_queue(kit):
    present(kit).job_service.pause()
    [job_id] = kit.submit()
    kit.step()
    kit.later(7)
    kit.job_service.cancel(job_id)
    return kit, job_id, {}


def canceled_while_running(kit):
    job_id = running(present(kit))
    kit.job_service.cancel(job_id)
    end(kit, job_id, EndReason.CANCELED, error="ended by SIGTERM")
    return kit, job_id, {}


# several hosts of one database


def other_host_could(kit):
    committed(kit.store, RegisterHost(host(kit, "b-host")))
    other = running(present(kit), addon_id="b", cost_units=90)
    return kit, kit.submit()[0], {"other": other}


def no_host_could(kit):
    committed(kit.store, RegisterHost(host(kit, "b-host", quiet=QuietState.PANIC, capacity=0)))
    committed(kit.store, RegisterHost(host(kit, "c-host", draining=True)))
    committed(kit.store, DrainHost(HostId("c-host"), draining=True))
    committed(kit.store, RegisterHost(host(kit, "d-host", capacity=5)))
    other = running(present(kit), addon_id="b", cost_units=90)
    return kit, kit.submit()[0], {"other": other}


def a_host_without_its_worker(kit):
    committed(kit.store, RegisterHost(host(kit, "b-host", workers=(WorkerKinds("b"),))))
    other = running(present(kit), addon_id="b", cost_units=90)
    return kit, kit.submit()[0], {"other": other}


def worker_on_another_host(kit):
    committed(kit.store, RegisterHost(host(kit, "b-host")))
    return kit, kit.submit()[0], {}


def worker_on_another_host_that_is_full(kit):
    """This host is full too, which does not matter to the job."""
    committed(kit.store, RegisterHost(host(kit, "b-host", capacity=5)))
    committed(
        kit.store, RegisterHost(host(kit, "c-host", workers=(WorkerKinds(job_types=frozenset({"t"})),)))
    )
    committed(kit.store, DrainHost(HostId("c-host"), draining=True))
    kit.pulling_workers.polled(WorkerKinds("b"), until=1 << 62)
    running(kit, addon_id="b", cost_units=90)
    return kit, kit.submit()[0], {}


def worker_on_another_host_of_a_paused_addon(kit):
    committed(kit.store, RegisterHost(host(kit, "b-host")))
    job_id = kit.submit()[0]
    kit.job_service.pause("a")
    return kit, job_id, {}


def drained_here_and_free_there(kit):
    committed(kit.store, RegisterHost(host(kit, "b-host")))
    return drained(kit)
