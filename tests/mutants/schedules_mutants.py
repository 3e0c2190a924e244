"""Bugs in schedules: their moments, their policies, and one job for each moment."""

from __future__ import annotations

from tests.mutants.planting import Mutant

_MOMENTS = ("tests/core/test_moments.py",)
_RULES = ("tests/core/test_schedules.py",)
_STORES = ("tests/contract/test_schedules.py",)
_KIT = ("tests/testing/test_virtual_schedules.py",)

MUTANTS = [
    Mutant(
        "schedules: a clock that was a year ahead silences every schedule for a year",
        "penstock/scheduler/schedules.py",
        "ScheduleFirer.step",
        "        if now < self._last_step:  # the first step, or the clock was set back",
        "        if False:",
        _STORES,
    ),
    Mutant(
        "schedules: a host that does not know the zone of one schedule fires none",
        "penstock/scheduler/schedules.py",
        "ScheduleFirer._fire",
        "            except Unavailable as problem:",
        "            except QueueFull as problem:",
        _STORES,
    ),
    Mutant(
        "schedules: an alert comes although another host fires",
        "penstock/scheduler/schedules.py",
        "ScheduleFirer._pass_over",
        "key = (record.name, record.version)",
        "key = (record.name, 0)",
        _STORES,
    ),
    Mutant(
        "schedules: a moment that waits is left to the scheduler that was faster",
        "penstock/scheduler/schedules.py",
        "ScheduleFirer.step",
        "min([now + _WAITING, *(max(m, now + _AGAIN) for m in moments if m is not None)])",
        "min([max(m, now + _AGAIN) for m in moments if m is not None], default=now + _WAITING)",
        _STORES,
    ),
    Mutant(
        "schedules: a time in the missing hour is lost",
        "penstock/core/jobs/moments.py",
        "cron_after",
        "if in_gap is not None and in_gap < stretch.start + stretch.offset:",
        "if False:",
        _MOMENTS,
    ),
    Mutant(
        "schedules: a time in the doubled hour comes twice",
        "penstock/core/jobs/moments.py",
        "cron_after",
        "            lowest = max(lowest, stretch.wall_before)",
        "            pass",
        _MOMENTS,
    ),
    Mutant(
        "schedules: an hourly line skips the second pass of the doubled hour",
        "penstock/core/jobs/moments.py",
        "CronLine.__init__",
        'fields.split()[1] != "*"',
        "True",
        _MOMENTS,
    ),
    Mutant(
        "schedules: overlap skip starts a second job",
        "penstock/core/jobs/schedules.py",
        "look",
        "first = pending[0] if pending and not running else None",
        "first = pending[0] if pending else None",
        _RULES,
    ),
    Mutant(
        "schedules: a moment that is skipped waits instead",
        "penstock/core/jobs/schedules.py",
        "_overlap",
        "        return pending, due",
        "        return (*pending, *due), ()",
        _RULES,
    ),
    Mutant(
        "schedules: missed moments are made up for though they are to be skipped",
        "penstock/core/jobs/schedules.py",
        "_due",
        "        moments = ()",
        "        pass",
        _RULES,
    ),
    Mutant(
        "schedules: a resume makes up for the pause",
        "penstock/core/jobs/schedules.py",
        "resume",
        "last_moment=max(now, record.state.last_moment)",
        "last_moment=record.state.last_moment",
        _RULES,
    ),
    Mutant(
        "schedules: every moment is fired again",
        "penstock/core/jobs/schedules.py",
        "look",
        "last_moment=state.last_moment if due.last is None else due.last",
        "last_moment=state.last_moment",
        _RULES,
    ),
    Mutant(
        "schedules: a removed schedule gives its version to the next",
        "penstock/core/jobs/schedules.py",
        "_next_version",
        "return max(version + 1, now)",
        "return version + 1",
        _RULES,
    ),
    *(
        Mutant(
            f"schedules: {store} writes a decision on an older version",
            f"penstock/stores/{file}",
            function,
            old,
            "if False:",
            _STORES,
        )
        for store, file, function, old in (
            (
                "memory",
                "memory/store.py",
                "MemoryStore._write_schedule",
                "if change.version != (0 if known is None else known.version):",
            ),
            (
                "SQLite",
                "sqlite/maintenance.py",
                "_write_schedule",
                "if change.version != (0 if known is None else known[0]):",
            ),
            (
                "PostgreSQL",
                "postgres/maintenance.py",
                "MaintenanceWriter._write_schedule",
                "if change.version != (known[0][0] if known else 0):",
            ),
        )
    ),
    Mutant(
        "schedules: two daemons fire one moment",
        "penstock/stores/postgres/maintenance.py",
        "MaintenanceWriter._write_schedule",
        "if change.version != (known[0][0] if known else 0):",
        "if False:",
        ("tests/postgres/test_schedules.py", "-k", "daemons"),
    ),
    Mutant(
        "schedules: the running job is not canceled",
        "penstock/core/jobs/schedules.py",
        "to_cancel",
        "return [job_id for job_id in record.state.active if job_id not in ended]",
        "return []",
        _KIT,
    ),
    Mutant(
        "schedules: a bound token touches the schedule of another addon",
        "penstock/server/handlers/schedules.py",
        "_own",
        "if record is None or not call.owns(record.schedule.intent.addon_id):",
        "if record is None:",
        ("tests/server/test_schedules.py",),
    ),
    Mutant(
        "schedules: a command is scheduled without the right to run one",
        "penstock/server/handlers/schedules.py",
        "schedule_add",
        '    may_submit(call, intent, "job.")\n',
        "",
        ("tests/server/test_schedules.py",),
    ),
]
