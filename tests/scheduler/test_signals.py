"""How busy everybody else is: by example, from files that look like the kernel's, and for real on this machine."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from threading import Event

import psutil
import pytest

from penstock.core.errors import BadIntent
from penstock.core.jobs.load import REPORTED, QuietState, Reading
from penstock.core.jobs.types import HOUR, SECOND
from penstock.scheduler.driver import SteadyClock
from penstock.scheduler.hosts import HostLoad
from penstock.scheduler.load_sampler import Box, LoadProbe, LoadSampler, OwnProcess, ProcessIdentity, Sample
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.service import SchedulerService
from penstock.settings import load
from penstock.stores.memory.store import MemoryStore

T0 = 1_900_000_000 * SECOND
US = ProcessIdentity(1, 0.0)
IDLE = Sample(
    taken_at=1_000.0,
    cores=4,
    cpu_busy=0.0,
    cpu_total=0.0,
    load=0.0,
    memory=1_000,
    memory_used=0,
    moved=0,
    pressure={},
)


def own(cpu=0.0, *, parent=0, moved=0, private=0, runnable=False):
    return OwnProcess(parent, cpu, moved, private, runnable)


def told(*samples):
    """What the machine has been told when these samples have been taken, one after the other."""
    machine, at = HostLoad(SchedulerRules()), T0
    waiting = iter(samples)
    signals = LoadSampler(machine, lambda: next(waiting))
    for _ in samples:
        at = signals.step(at)
    return {reading.name: reading.value for reading in machine.readings()}


def after(**fields):
    """Ten seconds later, on four cores."""
    return replace(IDLE, **{"cpu_total": 40.0, "taken_at": 1_010.0} | fields)


def test_one_sample_tells_nothing_about_the_processor():
    assert told(IDLE) == {}


def test_processor_and_memory_are_shares_of_the_machine():
    readings = told(IDLE, after(cpu_busy=10.0, memory_used=700))

    assert (readings["cpu"], readings["memory"]) == (0.25, 0.7)


def test_what_our_processes_used_is_taken_out():
    before = replace(IDLE, own={US: own(100.0)})
    readings = told(before, after(cpu_busy=30.0, memory_used=900, own={US: own(120.0, private=800)}))

    assert (readings["cpu"], readings["memory"]) == (0.25, 0.1)


def test_a_job_that_began_and_ended_between_two_samples_is_still_ours():
    """Its parent waited for it, so its time is in the parent's: jobs of a second must not look like somebody's load."""
    before = replace(IDLE, own={US: own(5.0)})

    assert told(before, after(cpu_busy=20.0, own={US: own(25.0)}))["cpu"] == 0.0


def test_a_job_that_ended_is_not_taken_out_twice():
    job = ProcessIdentity(2, 500.0)
    before = replace(IDLE, own={US: own(5.0), job: own(100.0, parent=1)})
    readings = told(before, after(cpu_busy=20.0, own={US: own(5.0 + 104.0)}))

    assert readings["cpu"] == pytest.approx(16 / 40)


def test_the_past_of_a_process_that_is_new_to_us_is_not_ours():
    before = replace(IDLE, own={US: own()})
    old, young = ProcessIdentity(2, 500.0), ProcessIdentity(3, 1_005.0)
    readings = told(before, after(cpu_busy=20.0, own={US: own(), old: own(300.0), young: own(4.0)}))

    assert readings["cpu"] == pytest.approx(16 / 40)


def test_a_pid_that_came_back_is_another_process():
    before = replace(IDLE, own={US: own(), ProcessIdentity(2, 500.0): own(300.0)})
    readings = told(before, after(cpu_busy=20.0, own={US: own(), ProcessIdentity(2, 1_004.0): own(4.0)}))

    assert readings["cpu"] == pytest.approx(16 / 40)


def test_the_load_that_our_runnable_processes_make_is_taken_out_of_it():
    ours = {ProcessIdentity(pid, 0.0): own(runnable=True) for pid in range(8)}
    steps = [
        replace(after(load=8.0, own=ours), cpu_total=40.0 * n, taken_at=1_000.0 + 10 * n) for n in range(60)
    ]

    assert told(*steps)["load_per_core"] == pytest.approx(0.0, abs=0.01)
    assert told(replace(steps[0], own={}), replace(steps[1], own={}))["load_per_core"] == 2.0


def test_pressure_counts_by_the_part_that_others_had_in_what_was_waited_for():
    before = replace(IDLE, own={US: own()})
    pressure = {"cpu": 80.0, "io": 40.0, "memory": 6.0}
    readings = told(
        before,
        after(cpu_busy=40.0, moved=1_000, pressure=pressure, own={US: own(30.0, moved=750)}),
    )

    assert readings["cpu_pressure"] == pytest.approx(20.0)
    assert readings["io_pressure"] == pytest.approx(10.0)
    assert readings["memory_pressure"] == 6.0


def test_a_container_is_as_busy_as_the_part_of_it_that_may_be_used():
    box = Box(cores=0.5, cpu=100.0, memory=100, memory_used=10)
    before = replace(IDLE, box=box, own={US: own()})
    readings = told(
        before,
        after(cpu_busy=4.0, box=box._replace(cpu=104.0, memory_used=80), own={US: own(1.5)}),
    )

    assert readings["cpu"] == pytest.approx(0.5)
    assert readings["memory"] == 0.8


def test_a_scheduler_that_has_just_started_knows_what_is_usual_on_its_machine():
    machine = HostLoad(SchedulerRules())
    busy = {"load": 8.0, "usual_load": 8.0, "pressure": {"cpu": 90.0}, "usual_cpu_pressure": 80.0}
    samples = iter([replace(IDLE, **busy), after(cpu_busy=40.0, **busy)])
    signals = LoadSampler(machine, lambda: next(samples))
    for _ in range(2):
        signals.step(T0)

    usual = {reading.name: reading.usual for reading in machine.readings() if reading.usual is not None}
    assert usual == {"cpu": 1.0, "load_per_core": 2.0, "cpu_pressure": 80.0}
    assert machine.conditions(T0).quiet is QuietState.NORMAL
    assert machine.conditions(T0).capacity > 0


def test_the_first_reading_comes_early():
    signals = LoadSampler(HostLoad(SchedulerRules()), lambda: IDLE)
    dues = [T0]
    for _ in range(3):
        dues.append(signals.step(dues[-1]))

    assert [due - T0 for due in dues] == [0, 0.5 * SECOND, 2.5 * SECOND, 4.5 * SECOND]


def test_a_probe_that_fails_leaves_a_machine_that_admits_nothing():
    def broken():
        raise OSError("no /proc here")

    machine = HostLoad(SchedulerRules())
    signals = LoadSampler(machine, broken)
    with pytest.raises(OSError, match="no /proc"):
        signals.step(T0)

    assert machine.conditions(T0).capacity == 0


# files that look like the kernel's


def kernel(tmp_path, files):
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return LoadProbe(proc=tmp_path / "proc", cgroups=tmp_path / "cgroup")()


SOME = "some avg10={} avg60=0.00 avg300=4.25 total=1\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=1\n"


def test_pressure_is_read_where_the_kernel_has_it(tmp_path):
    files = {"proc/pressure/cpu": SOME.format("12.50"), "proc/pressure/io": SOME.format("0.03")}

    sample = kernel(tmp_path, files)
    assert sample.pressure == {"cpu": 12.5, "io": 0.03}
    assert sample.usual_cpu_pressure == 4.25


def test_without_any_of_it_there_is_still_a_sample(tmp_path):
    sample = kernel(tmp_path, {})

    assert (sample.pressure, sample.box) == ({}, Box())
    assert sample.memory > 0


def test_the_tightest_limit_on_the_way_up_is_ours(tmp_path):
    sample = kernel(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "proc/pressure/cpu": SOME.format("1.00"),
            "cgroup/cgroup.controllers": "cpu memory",
            "cgroup/pod/cpu.max": "150000 100000\n",
            "cgroup/pod/cpu.stat": "usage_usec 2500000\nuser_usec 1\n",
            "cgroup/pod/cpu.pressure": SOME.format("33.00"),
            "cgroup/pod/box/cpu.max": "max 100000\n",
            "cgroup/pod/box/memory.max": "1000\n",
            "cgroup/pod/box/memory.current": "700\n",
            "cgroup/pod/box/memory.stat": "anon 1\ninactive_file 200\n",
        },
    )

    assert sample.box == Box(cores=1.5, cpu=2.5, memory=1_000, memory_used=500)
    assert sample.pressure == {"cpu": 33.0}


def test_a_cgroup_without_limits_is_no_box(tmp_path):
    files = {
        "proc/self/cgroup": "0::/user.slice\n",
        "cgroup/cgroup.controllers": "",
        "cgroup/user.slice/memory.max": "max\n",
    }

    assert kernel(tmp_path, files).box == Box()


def test_the_older_cgroups_are_read_too(tmp_path):
    sample = kernel(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n",
            "cgroup/memory/memory.limit_in_bytes": "1000\n",
            "cgroup/memory/memory.usage_in_bytes": "900\n",
            "cgroup/memory/memory.stat": "total_inactive_file 100\n",
            "cgroup/cpu/cpu.cfs_quota_us": "200000\n",
            "cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "cgroup/cpuacct/cpuacct.usage": "3000000000\n",
        },
    )

    assert sample.box == Box(cores=2.0, cpu=3.0, memory=1_000, memory_used=800)


def test_the_older_way_to_say_no_limit_is_none(tmp_path):
    files = {
        "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    }

    assert kernel(tmp_path, files).box == Box()


# this machine


BUSY = "import os, sys; print(os.getpid(), flush=True)\nwhile True: pass"


@pytest.fixture
def stranger():
    """A busy process that is nobody's child of ours."""
    launch = f"{sys.executable} -c '{BUSY}' </dev/null 2>/dev/null &"
    with subprocess.Popen(["/bin/sh", "-c", launch], stdout=subprocess.PIPE, text=True) as shell:
        pid = int(shell.stdout.readline())
        shell.stdout.close()
    process = psutil.Process(pid)
    yield process
    process.kill()


def test_a_busy_process_raises_the_reading_unless_it_is_declared_ours(stranger):
    foreign, ours = LoadProbe(), LoadProbe(lambda: [stranger.pid])
    then, before = sum(stranger.cpu_times()[:2]), (foreign(), ours())
    while (used := sum(stranger.cpu_times()[:2]) - then) < 0.5:
        pass
    one, two = told(before[0], foreign()), told(before[1], ours())

    seconds = (one["cpu"] - two["cpu"]) * (foreign().cpu_total - before[0].cpu_total)
    assert stranger.pid in {process.pid for process in before[1].own}
    assert one["cpu"] > two["cpu"]
    assert seconds == pytest.approx(used, rel=0.5)


def test_our_own_children_are_ours_without_a_word():
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True) as child:
        child.stdout.readline()
        found = {process.pid for process in LoadProbe()().own}
        child.kill()

    assert child.pid in found


def test_a_house_measures_its_machine_by_itself():
    heard = Event()

    class Ear:
        def step(self, now):
            if {reading.name for reading in service.machine.readings()} >= {"cpu", "memory"}:
                heard.set()
            return now + SECOND // 10

    store = MemoryStore(SteadyClock())
    service = SchedulerService(store, SchedulerRules(), more=[Ear()])
    service.start()
    arrived = heard.wait(60)
    service.stop()

    assert arrived


# what applications tell


def reporting(**values):
    machine = HostLoad(SchedulerRules())
    for name in ("cpu", "memory"):
        machine.report(Reading(name, 0.0, T0))
    machine.report_application("shop", values, T0, 10 * SECOND)
    return machine


def test_an_application_in_trouble_makes_the_machine_busy_and_is_named():
    conditions = reporting(p95_ms=4_000.0).conditions(T0)

    assert conditions.quiet is QuietState.PANIC
    assert conditions.busy.by == "p95_ms of shop"


@pytest.mark.parametrize("name", REPORTED)
def test_a_machine_that_needs_an_applications_signal_admits_while_it_is_reported(name):
    settings = load(environ={"HOME": "/nowhere"}, flags={"quiet.needed": f"cpu, {name}"})
    machine = HostLoad(settings.rules())
    machine.report(Reading("cpu", 0.0, T0))

    assert machine.conditions(T0).quiet is QuietState.PANIC
    machine.report_application("shop", {name: 0.0}, T0)
    assert machine.conditions(T0).quiet is QuietState.QUIET


def test_the_worst_of_several_applications_counts():
    machine = reporting(p95_ms=4_000.0)
    machine.report_application("blog", {"p95_ms": 1.0}, T0)

    assert machine.conditions(T0).quiet is QuietState.PANIC


def test_an_application_that_stops_reporting_is_forgotten_after_its_own_time():
    machine = reporting(error_rate=0.5)

    assert machine.conditions(T0 + 10 * SECOND).quiet is QuietState.PANIC
    assert machine.conditions(T0 + 11 * SECOND).quiet is QuietState.QUIET


def test_an_application_cannot_stand_in_for_the_hosts_own_signals():
    with pytest.raises(BadIntent, match="cpu is not a signal"):
        reporting(cpu=0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_figure_that_is_none_is_refused_by_name(value):
    with pytest.raises(BadIntent, match="p95_ms must be a number"):
        reporting(p95_ms=value)


def test_who_reports_is_bounded():
    machine = HostLoad(SchedulerRules())
    for n in range(199):
        machine.report_application(f"app-{n}", {"in_flight": 1.0}, T0)
    machine.report_application("app-198", {"in_flight": 2.0}, T0)

    with pytest.raises(BadIntent, match="source"):
        for n in range(200, 203):
            machine.report_application(f"app-{n}", {"in_flight": 1.0}, T0)
    machine.report_application("app-999", {"in_flight": 1.0}, T0 + HOUR)
    assert len(machine.readings()) == 1


def test_how_long_a_state_lasts_counts_from_its_own_beginning():
    """Also of a state that is not quiet: the streak of quiet is another figure."""
    machine = HostLoad(SchedulerRules())
    for seconds, memory in ((0, 0.0), (10, 0.99), (50, 0.99)):
        for name, value in (("cpu", 0.0), ("memory", memory)):
            machine.report(Reading(name, value, T0 + seconds * SECOND))
        conditions = machine.conditions(T0 + seconds * SECOND)

    assert (conditions.quiet, conditions.streak) == (QuietState.PANIC, 0)
    assert machine.in_state_for(T0 + 50 * SECOND) == 40 * SECOND
