"""Bad input of every option: refused where it is written, by its name, with what to write instead."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

import penstock
from penstock.scheduler.rules import SchedulerRules


@pytest.mark.parametrize(
    ("option", "value", "error", "message"),
    [
        ("cost", 0, penstock.BadIntent, r"cost_units must be 1\.\.100"),
        ("cost", 101, penstock.BadIntent, "cost_units"),
        ("cost", 2.5, TypeError, "cost is 2.5; it must be a whole number"),
        ("cost", True, TypeError, "cost is True"),
        ("priority", 0, penstock.BadIntent, "priority must be"),
        (
            "priority",
            "SOON",
            ValueError,
            r"priority must be 1..100 or one of LOW, NORMAL, HIGH, URGENT, not 'SOON'",
        ),
        ("priority", 5.0, TypeError, "priority is 5.0"),
        ("run_when", "never", ValueError, "run_when is 'never'; it must be one of 'any', 'normal', 'quiet'"),
        ("quiet_for", 60, penstock.BadIntent, 'quiet_for_sec needs run_when "quiet"'),
        ("constraints", ["gpu"], ValueError, "constraints has 'gpu'; there are cpu_heavy, disk_write_heavy"),
        ("constraints", "cpu_heavy", TypeError, r"must be a list of strings: \['cpu_heavy'\]"),
        ("max_runtime", -1, ValueError, "max_runtime is -1"),
        ("max_runtime", 0, penstock.BadIntent, "max_runtime_sec must be above 0"),
        (
            "max_runtime",
            "60",
            TypeError,
            "max_runtime is '60'; it must be a number of seconds or a timedelta",
        ),
        ("max_active", float("inf"), ValueError, "max_active is inf"),
        ("expected_duration", float("nan"), ValueError, "expected_duration is nan"),
        (
            "retries",
            3,
            TypeError,
            r"retries is 3; it must be the delays before each retry, e\.g\. \(60, 300\)",
        ),
        ("retries", (-5,), ValueError, "retries is -5"),
        ("retries", [1] * 21, penstock.BadIntent, "retry_delays_sec must be at most 20 delays"),
        ("unique", "path", TypeError, "unique is 'path'; it must be True"),
        ("unique_key", 7, TypeError, "unique_key is 7; it must be a string"),
        ("unique_key", "", penstock.BadIntent, r"idempotency_key must be 1\.\.200 characters"),
        ("labels", "gpu", TypeError, r"labels is 'gpu'; it must be a list of strings: \['gpu'\]"),
        (
            "labels",
            ["a b"],
            penstock.BadIntent,
            "labels must be at most 16 different labels, each 1 to 64 letters",
        ),
        ("tags", "one", TypeError, r"tags is 'one'; it must be a list of strings: \['one'\]"),
        ("tags", [1], TypeError, "tags is"),
        ("tags", ["x" * 65], penstock.BadIntent, "tags must be at most 32 tags"),
        ("deadline", datetime(2030, 1, 1), ValueError, "which has no time zone; say which"),  # noqa: DTZ001
        ("deadline", "tomorrow", TypeError, "deadline is 'tomorrow'; it must be a datetime with a time zone"),
        ("not_before", -60, ValueError, "not_before is -60"),
        ("preemptible", 0, TypeError, "preemptible is 0; it must be True or False"),
        ("time_sensitive", 1, TypeError, "time_sensitive is 1; it must be True or False"),
        ("time_sensitive", True, penstock.BadIntent, "time_sensitive needs deadline_at"),
        ("cost_limit", "much", ValueError, "cost_limit is 'much'; it must be a sum of money"),
        ("cost_limit", 0, penstock.BadIntent, "cost_limit must be above 0"),
        ("wait_for_space", -1, ValueError, "wait_for_space is -1"),
        ("unit", "", penstock.BadIntent, "unit must be"),
        ("addon", "", penstock.BadIntent, "addon_id must be"),
        ("colour", "red", TypeError, "'colour' is not an option of a job; there are addon, cost"),
    ],
)
def test_a_bad_option_is_refused_where_it_is_given(scheduler, option, value, error, message):
    with pytest.raises(error, match=message):
        scheduler.job(**{option: value})(print)
    good = scheduler.job(name="good")(lambda: None)
    with pytest.raises(error, match=message):
        good.options(**{option: value})

    assert {"good"} == set(scheduler.functions)


def test_a_deadline_that_has_passed_is_refused_by_the_call_and_not_by_the_decorator(scheduler):
    late = scheduler.job(deadline=0)(print)

    with pytest.raises(penstock.BadIntent, match="deadline_at has passed already"):
        late.enqueue()


def test_options_reach_the_job(scheduler, clock):
    @scheduler.job(
        name="import.photos",
        cost=20,
        priority="high",
        run_when="quiet",
        quiet_for=timedelta(minutes=5),
        constraints=["cpu_heavy", "network_heavy"],
        max_runtime=0.5,
        max_active=timedelta(hours=1),
        expected_duration=90,
        retries=(60, timedelta(minutes=5)),
        tags=["night"],
        deadline=timedelta(hours=2),
        not_before=60,
        time_sensitive=True,
        preemptible=False,
        cost_limit="1.50",
        unit="EUR",
        addon="photos",
        unique=lambda path: path,
    )
    def photos(path: str) -> None: ...

    intent = photos.enqueue("/a").job.intent

    now = clock()
    assert ("photos", "import.photos", 20, 75) == (
        intent.addon_id, intent.job_type, intent.cost_units, intent.priority,
    )  # fmt: skip
    assert ("quiet", 300, ("cpu_heavy", "network_heavy")) == (
        intent.run_when, intent.quiet_for_sec, intent.constraints.names,
    )  # fmt: skip
    assert (1, 3600, 90.0) == (intent.max_runtime_sec, intent.max_active_sec, intent.expected_duration_sec)
    assert ((60, 300), ("night",), True) == (intent.retry_delays_sec, intent.tags, intent.time_sensitive)
    assert not intent.preemptible
    assert (7_200_000_000, 60_000_000) == (intent.deadline_at - now, intent.earliest_start_at - now)
    assert (1_500_000, "EUR", "import.photos:/a") == (intent.cost_limit, intent.unit, intent.idempotency_key)


@pytest.mark.parametrize(
    ("setting", "value", "error", "message"),
    [
        ("capacity", 0, ValueError, r"capacity is 0; it must be 1\.\.100 units, or 'auto'"),
        ("capacity", "much", ValueError, "capacity is 'much'"),
        ("workers", 0, ValueError, "workers is 0; it must be a whole number of at least 1"),
        ("workers", 2.5, ValueError, "workers is 2.5"),
        ("kind", "fiber", ValueError, "kind is 'fiber'; it must be 'thread' or 'process'"),
        ("kind", "process", ValueError, "kind='process' needs a file"),
        ("lease", 0.01, ValueError, "lease is 0.01; it must be at least 0.1 s"),
        ("lease", None, TypeError, "lease is None"),
        ("crash_retries", 60, TypeError, r"crash_retries is 60; it must be the delays"),
        ("unavailable_retries", ["x"], TypeError, "unavailable_retries is 'x'"),
        ("max_queued", 0, ValueError, "max_queued is 0"),
        ("max_concurrent", -1, ValueError, "max_concurrent is -1"),
        ("max_per_job", {"f": 0}, ValueError, r"max_per_job\['f'\] is 0"),
        ("max_per_constraint", {"gpu": 1}, ValueError, "it must be a dict with cpu_heavy"),
        ("keep_settled", -1, ValueError, "keep_settled is -1"),
        ("stop_timeout", "long", TypeError, "stop_timeout is 'long'"),
        ("rules", {}, TypeError, "rules is {}; it must be a penstock.scheduler.rules.SchedulerRules"),
        ("tempo", 3, TypeError, "'tempo' is not a setting of a Scheduler; there are capacity"),
        ("addon", 7, TypeError, "addon is 7"),
    ],
)
def test_a_bad_setting_is_refused_by_name(setting, value, error, message):
    with pytest.raises(error, match=message):
        penstock.Scheduler(":memory:", **{setting: value})


def test_rules_and_settings_are_not_mixed():
    with pytest.raises(TypeError, match="capacity and rules say the same thing twice"):
        penstock.Scheduler(":memory:", rules=SchedulerRules(), capacity=5)


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        (
            "mysql://localhost/jobs",
            ValueError,
            "mysql:// is not supported; give the file that holds the jobs",
        ),
        ("", ValueError, "is not a path"),
        (7, TypeError, "7 is not a path"),
        (b"jobs.db", TypeError, "is not a path"),
    ],
)
def test_where_must_be_a_path(where, error, message):
    with pytest.raises(error, match=message):
        penstock.Scheduler(where)


def test_a_file_that_is_no_database_is_left_alone(tmp_path):
    file = tmp_path / "letter.txt"
    file.write_text("Dear Sir, " * 100)
    f = penstock.Scheduler(file).job(name="f")(lambda: 1)

    with pytest.raises(penstock.StoreFailed, match="letter.txt"):
        f.enqueue()
    assert "Dear Sir" == file.read_text()[:8]


def test_two_functions_of_one_name_are_refused(scheduler):
    scheduler.job(name="index")(len)

    with pytest.raises(
        ValueError, match=r"there is a job 'index' already \(builtins.len\); give one of them another name"
    ):
        scheduler.job(name="index")(print)


@pytest.mark.parametrize("name", ["", "-x", "a b", "x" * 129])
def test_a_name_that_cannot_be_a_job_type_is_refused(scheduler, name):
    with pytest.raises(penstock.BadIntent, match="job_type must be"):
        scheduler.job(name=name)(print)


def test_what_is_not_a_function_is_refused(scheduler):
    with pytest.raises(TypeError, match="is not a function; write @scheduler.job"):
        scheduler.job(5)
    f = scheduler.job(name="f")(lambda: 1)
    with pytest.raises(TypeError, match="f is a job already"):
        scheduler.job(f)


def test_the_context_must_be_the_first_parameter(scheduler):
    def late(path: str, ctx: penstock.JobContext) -> None: ...

    with pytest.raises(TypeError, match="the JobContext must be the first parameter, 'ctx' is not"):
        scheduler.job(late)
