"""What a job says and asks while it runs, and with what it begins again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from penstock import current_job
from penstock.core.errors import NotFound
from penstock.core.jobs.dependencies import Dependency
from penstock.core.jobs.types import SECOND, EndReason
from penstock.runner.job import main as report
from penstock.stores.api import SetAddon, committed
from tests import SOURCES
from tests.waiting import LONG, alive, until

from .plant import HERE

JOB = f"PYTHONPATH={SOURCES} {sys.executable} -m penstock.runner.job"


def test_a_function_tells_how_far_it_is_and_saves_where_it_is(plant):
    job = plant.function("tell")

    assert json.loads(plant.settled(job).result) == [job, {"at": 3}]
    assert plant.store.checkpoint(job) == '{"at":3}'
    assert plant.output(job)["log"] == "half way\n"
    assert ("CHECKPOINT", "") in plant.events(job)


def test_a_command_and_a_function_read_the_results_of_their_parents(plant):
    parent = plant.function("tell")
    after = (Dependency(parent),)
    command = plant.submit("shell", {"script": f"{JOB} parents"}, after=after)
    function = plant.function("parents", fields={"after": after})

    plant.settled(command)
    expected = [[parent, "DONE", [parent, {"at": 3}]]]
    assert json.loads(plant.output(command)["stdout"]) == expected
    assert json.loads(plant.settled(function).result) == expected


def test_progress_is_told_while_the_job_runs(plant, tmp_path):
    script = f"{JOB} progress 0.25 && until [ -e {tmp_path}/go ]; do sleep 0.05; done"
    job = plant.submit("shell", {"script": script})

    until(lambda: plant.store.job(job).progress == 0.25)
    assert plant.state(job) == "RUNNING"
    (tmp_path / "go").touch()
    plant.settled(job)


def test_a_command_says_the_same_through_its_environment(plant):
    script = f"{JOB} checkpoint && {JOB} checkpoint '[1, 2]' && {JOB} checkpoint && {JOB} log two words; {JOB} progress 0.5 half; {JOB} should-yield; echo $?"
    job = plant.submit("shell", {"script": script})

    plant.settled(job)
    assert plant.output(job) == {"stdout": "[1, 2]\n1\n", "stderr": "", "log": "two words\n50 %: half\n"}
    assert plant.store.checkpoint(job) == "[1, 2]"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("progress 2", 2, "progress must be 0..1"),
        ("progress much", 2, "progress must be 0..1"),
        ("spend -1", 2, "amount must be a number that is not negative"),
        ("spend sNaN", 2, "amount must be a number that is not negative"),
        ("spend 1e999999", 2, "amount must be a number that is not negative"),
        ("spend NaN", 2, "amount must be a number that is not negative"),
        ("checkpoint {", 2, "checkpoint is not JSON"),
        ("dance", 2, "should-yield"),
    ],
)
def test_what_is_said_wrongly_is_refused_with_the_reason_and_the_job_goes_on(plant, words, code, says):
    job = plant.submit("shell", {"script": f"{JOB} {words}; echo $?"})

    assert str(plant.settled(job).end) == "completed"
    assert plant.output(job)["stdout"] == f"{code}\n"
    assert says in plant.output(job)["stderr"]


def test_a_token_is_good_for_its_run_and_no_longer(plant):
    job = plant.submit("shell", {"script": "echo $PENSTOCK_JOB_TOKEN $PENSTOCK_SOCKET; sleep 0.2"})
    plant.settled(job)
    token, address = plant.output(job)["stdout"].split()

    assert plant.runner.dispatch_of(token) is None
    with pytest.raises(NotFound):
        plant.runner.call(token, {"op": "should_yield"})
    env = {**os.environ, "PENSTOCK_JOB_TOKEN": token, "PENSTOCK_SOCKET": address}
    late = subprocess.run(
        [sys.executable, "-m", "penstock.runner.job", "checkpoint", "9"],
        env=env,
        check=False,
        capture_output=True,
        text=True,
    )
    assert (late.returncode, late.stderr) == (2, "penstock: no running job has this token\n")
    assert plant.store.checkpoint(job) is None


def test_the_control_socket_answers_nonsense_and_goes_on(plant):
    with socket.socket(socket.AF_UNIX) as visitor:
        visitor.connect(f"\0{plant.runner.address[1:]}")
        visitor.sendall(b'nonsense\n{"op": 1}\n{"token": "x", "op": "spend"}\n')
        with visitor.makefile() as lines:
            answers = [json.loads(lines.readline()) for _ in range(3)]

    assert all("error" in answer for answer in answers)
    assert plant.settled(plant.command("true")).end == "completed"


def test_outside_a_job_there_is_no_context():
    with pytest.raises(LookupError):
        current_job()


def test_a_preempted_function_goes_on_from_its_checkpoint(plant, tmp_path):
    path = tmp_path / "n"
    job = plant.function("listen", str(path))
    until(lambda: path.exists() and path.read_text() > "2")
    committed(plant.store, SetAddon("a", paused=True))
    plant.runner.ask_to_yield(plant.store.job(job).dispatch_id)

    plant.until(job, "QUEUED")
    reached = json.loads(plant.store.checkpoint(job))
    assert plant.events(job)[-1] == ("REQUEUED", "cooperative_preemption")
    path.unlink()
    committed(plant.store, SetAddon("a", paused=False))
    assert int(until(lambda: path.exists() and path.read_text())) > reached
    plant.job_service.cancel(job)
    plant.until(job, "CANCELED")


def test_a_generator_stops_between_phases_and_no_phase_is_done_twice(plant, tmp_path):
    done, go = tmp_path / "done", tmp_path / "go"
    job = plant.function("phases", str(done), str(go))
    until(lambda: done.exists() and "think" in done.read_text())
    committed(plant.store, SetAddon("a", paused=True))
    plant.runner.ask_to_yield(plant.store.job(job).dispatch_id)

    plant.until(job, "QUEUED")
    assert json.loads(plant.store.checkpoint(job)) == ["fetch", "think"]
    committed(plant.store, SetAddon("a", paused=False))
    assert json.loads(plant.settled(job).result) == ["fetch", "think", "write"]
    assert done.read_text().split() == ["fetch", "think", "write"]


def test_a_command_that_yields_goes_on_from_its_checkpoint(plant, tmp_path):
    script = (
        f'if [ -n "$({JOB} checkpoint)" ]; then echo again; exit 0; fi; touch {tmp_path}/up; '
        f"until {JOB} should-yield; do sleep 0.05; done; {JOB} checkpoint 7 && {JOB} yield"
    )
    job = plant.submit("shell", {"script": script})
    until((tmp_path / "up").exists)
    plant.runner.ask_to_yield(plant.store.job(job).dispatch_id)

    assert str(plant.settled(job).end) == "completed"
    assert plant.output(job)["stdout"] == "again\n"
    assert [str(attempt.end) for attempt in plant.store.attempts(job)] == [
        "cooperative_preemption",
        "completed",
    ]


def test_after_a_shutdown_a_job_resumes_from_its_checkpoint(plants, tmp_path):
    first = plants()
    done, go = tmp_path / "done", tmp_path / "go"
    job = first.function("phases", str(done), str(go))
    until(lambda: done.exists() and "think" in done.read_text())
    first.stop()
    second = plants()

    assert json.loads(second.settled(job).result) == ["fetch", "think", "write"]
    assert done.read_text().split() == ["fetch", "think", "write"]
    assert [str(attempt.end) for attempt in second.store.attempts(job)] == ["graceful_shutdown", "completed"]


def test_spending_stops_at_the_limit_and_a_retry_grants_it_again(plant):
    job = plant.function("spend", ["0.4", "0.4", 0.4], "wait", fields={"cost_limit": 1_000_000})

    attempt = plant.until(job, "BLOCKED")
    assert (str(attempt.end), attempt.spent) == ("cost_limit_reached", 1_200_000)
    assert ("SIGNALED", "term") not in plant.events(job)
    plant.job_service.retry(job)
    plant.until(job, "BLOCKED")
    assert plant.store.job(job).spent == 2_400_000


def test_spending_below_the_limit_is_nobodys_business(plant):
    job = plant.function("spend", ["0.4", "0.4"], fields={"cost_limit": 1_000_000})

    assert plant.settled(job).result == '"within the limit"'
    assert plant.store.job(job).spent == 800_000


LATE = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from penstock.core.jobs.types import EndReason
from penstock.core.jobs.workers import WorkerKinds
from tests.runner.plant import Plant, SECOND
plant = Plant(Path({data!r}), dispatch=False, rules={{"lease_for": SECOND}})
job = plant.function("sleep", {path!r}, 60)
[claimed] = plant.job_service.claim(WorkerKinds(own=True), 1, "late")
print(claimed.dispatch.dispatch_id, flush=True)
sys.stdin.readline()
for late in (
    lambda d: plant.job_service.end(d, result='"stolen"'),
    lambda d: plant.job_service.end(d, EndReason.JOB_ERROR, error="late"),
    lambda d: plant.job_service.heartbeat(d, checkpoint='"late"', spent=5),
):
    try:
        print(late(claimed.dispatch.dispatch_id), flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
"""


def test_a_worker_that_was_stopped_while_the_next_attempt_began_changes_nothing(plants, tmp_path):
    """A process of its own that claimed the job is stopped until its lease is over; then it goes on, reports, and is refused."""
    root, path = str(HERE.parents[1]), str(tmp_path / "pid")
    code = LATE.format(root=root, data=str(tmp_path / "data"), path=path)
    late = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    stale = late.stdout.readline().strip()
    os.kill(late.pid, signal.SIGSTOP)
    plant = plants(rules={"lease_for": SECOND})
    job = stale.rpartition(".")[0]
    until((tmp_path / "pid").exists)
    until(lambda: plant.store.job(job).pid is not None)  # the last that the new attempt writes by itself
    before = plant.store.job(job), plant.store.dispatch(stale), plant.units(), plant.events(job)

    assert [str(attempt.end) for attempt in plant.store.attempts(job)] == ["lease_expired", "None"]
    os.kill(late.pid, signal.SIGCONT)
    told, _ = late.communicate("go on\n", timeout=LONG)
    assert told.split() == ["StaleDispatch"] * 3
    assert (plant.store.job(job), plant.store.dispatch(stale), plant.units(), plant.events(job)) == before
    plant.job_service.cancel(job)
    plant.until(job, "CANCELED")


def test_a_worker_of_ours_that_is_stopped_does_not_outlive_its_attempt(plant, tmp_path):
    job = plant.function("sleep", str(tmp_path / "pid"))
    pid = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
    os.kill(pid, signal.SIGSTOP)
    plant.job_service.stop(f"{job}.1", EndReason.WORKER_CRASHED)

    until(lambda: len(plant.store.attempts(job)) == 2)
    assert not alive(pid)
    plant.job_service.cancel(job)
    plant.until(job, "CANCELED")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["spend"], "penstock: write `penstock job spend 0.25`; `penstock job --help` explains it\n"),
        (
            ["heartbeat", "1"],
            (
                "penstock: there is no `penstock job heartbeat`, only checkpoint, parents, progress, spend, log,"
                " should-yield, yield; `penstock job --help` explains it\n"
            ),
        ),
    ],
)
def test_a_wrong_report_of_a_command_is_refused_in_one_line(words, error, capsys):
    assert report(words) == 2
    assert capsys.readouterr().err == error
