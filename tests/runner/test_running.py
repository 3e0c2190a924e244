from __future__ import annotations

import json
import os
import shutil
import signal

import pytest

from penstock.core.errors import BadIntent
from penstock.runner.folder import RunnerFolder
from penstock.runner.payload import Functions, read
from penstock.runner.process_tree import RUNNER_MARK, children, find_marked
from penstock.stores.api import SetAddon, committed
from tests.waiting import alive, until

from .plant import pids_in


def test_a_command_is_run_with_its_arguments_and_its_output_is_kept(plant):
    job = plant.python("import sys; print('out', *sys.argv[1:]); print('err', file=sys.stderr)")

    assert json.loads(plant.settled(job).result) == {"exit_code": 0}
    assert plant.state(job) == "DONE"
    assert plant.output(job) == {"stdout": "out\n", "stderr": "err\n", "log": ""}


def test_a_script_needs_its_own_job_type(plant):
    job = plant.submit("shell", {"script": "echo $((6 * 7)) | cat"})
    plain = plant.command("echo", "$((6 * 7))")

    plant.settled(job), plant.settled(plain)
    assert plant.output(job)["stdout"] == "42\n"
    assert plant.output(plain)["stdout"] == "$((6 * 7))\n"


def test_input_and_environment_and_folder_are_as_the_job_says(plant, tmp_path):
    code = "import os, sys; print(sys.stdin.read(), os.environ['COLOUR'], os.getcwd(), sep='|')"
    job = plant.python(code, stdin="hear, hear", env={"COLOUR": "red"}, cwd=str(tmp_path))

    plant.settled(job)
    assert plant.output(job)["stdout"] == f"hear, hear|red|{tmp_path}\n"


def test_a_job_sees_a_clean_world(plants, monkeypatch):
    monkeypatch.setenv("PENSTOCK_TOKEN", "secret of the daemon")
    monkeypatch.setenv("DATABASE_PASSWORD", "hush")
    secret = os.open("/etc/hostname", os.O_RDONLY)
    os.set_inheritable(secret, True)
    code = (
        "import os, json, resource; print(json.dumps(["
        "sorted(os.environ), sorted(map(int, os.listdir('/proc/self/fd')))[:-1], oct(os.umask(0)),"
        "os.getsid(0) == os.getpid() == os.getpgid(0), resource.getrlimit(resource.RLIMIT_CORE)[0],"
        "[l.split()[1] for l in open('/proc/self/status') if l.startswith('NoNewPrivs')][0]]))"
    )

    plant = plants()
    job = plant.python(code)
    plant.settled(job)
    os.close(secret)

    environment, descriptors, umask, own_session, core, no_new = json.loads(plant.output(job)["stdout"])
    assert "DATABASE_PASSWORD" not in environment
    assert "PENSTOCK_TOKEN" not in environment
    assert "PATH" in environment
    assert (descriptors, umask, own_session, core, no_new) == ([0, 1, 2], "0o77", True, 0, "1")


def test_without_a_folder_a_job_works_in_one_of_its_own(plant):
    job = plant.python("import os; print(os.getcwd(), oct(os.stat('.').st_mode & 0o777))")

    plant.settled(job)
    folder, mode = plant.output(job)["stdout"].split()
    assert folder.startswith(str(plant.data))
    assert job in folder
    assert mode == "0o700"


@pytest.mark.parametrize(
    ("code", "state", "end"),
    [
        ("pass", "DONE", "completed"),
        ("import sys; sys.exit(3)", "FAILED", "job_error"),
        ("raise RuntimeError('the reason')", "FAILED", "job_error"),
        ("import sys; sys.exit(75)", "BLOCKED", "unavailable"),
        ("import os; os.kill(os.getpid(), 9)", "FAILED", "worker_crashed"),
        ("import os; os.abort()", "FAILED", "worker_crashed"),
    ],
)
def test_how_a_process_ends_says_where_its_job_lands(plant, code, state, end):
    job = plant.python(code)

    assert str(plant.settled(job).end) == end
    assert plant.state(job) == state


def test_the_error_says_the_code_and_the_last_of_stderr(plant):
    job = plant.python("import sys; print('x' * 100_000, file=sys.stderr); sys.exit('the reason')")

    error = plant.settled(job).error
    assert error.startswith("the command exited with code 1")
    assert error.endswith("the reason")
    assert len(error) < 5_000


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ({"argv": ["no-such-program"]}, "cannot start 'no-such-program': No such file or directory"),
        ({"argv": ["/etc/passwd"]}, "cannot start '/etc/passwd': Permission denied"),
        (
            {"argv": ["true"], "cwd": "/no/such/folder"},
            "cannot start '/no/such/folder': No such file or directory",
        ),
        ({"argv": []}, "payload.argv must be a list of texts, the program first"),
        ({"argv": ["true"], "shell": True}, "payload.shell is not a field"),
    ],
)
def test_what_cannot_be_started_is_the_jobs_own_error_and_says_why(plant, payload, words):
    job = plant.submit("command", payload)

    assert plant.settled(job).error.startswith(words)
    assert str(plant.last(job).end) == "job_error"


def test_limits_hold(plant):
    job = plant.python("x = bytearray(1_000_000_000)", limits={"memory_mb": 200})
    files = plant.python("open('big', 'wb').write(bytes(3_000_000))", limits={"file_mb": 1})

    assert "MemoryError" in plant.settled(job).error
    assert plant.settled(files).end != "completed"


def test_output_is_bounded_and_keeps_its_beginning_and_its_end(plants):
    from penstock.runner.output import OutputLimits

    plant = plants(output=OutputLimits(head=100_000, tail=100_000))
    job = plant.python("print('first');\nfor n in range(200_000): print(n)\nprint('last')")

    plant.settled(job)
    output = plant.runner.output(plant.last(job).dispatch_id)
    pieces = list(output.read(most=1 << 40))
    text = b"".join(piece.data for piece in pieces).decode()
    folder = plant.data / "runs" / job / "1"
    assert text.startswith("first\n0\n1\n")
    assert text.endswith("199999\nlast\n")
    assert sum(piece.skipped for piece in pieces) > 500_000
    assert sum(file.stat().st_size for file in folder.iterdir()) < 400_000


def test_output_can_be_followed_while_the_job_runs(plant, tmp_path):
    go = tmp_path / "go"
    code = f"import os, time; print('one', flush=True)\nwhile not os.path.exists({str(go)!r}): time.sleep(.01)\nprint('two')"
    job = plant.python(code)
    plant.until(job, "RUNNING")

    output = plant.runner.output(plant.last(job).dispatch_id)
    [first] = until(lambda: list(output.read()))
    assert (first.data, plant.state(job)) == (b"one\n", "RUNNING")
    go.touch()
    plant.settled(job)
    assert [piece.data for piece in output.read(first.end)] == [b"two\n"]


@pytest.mark.parametrize("kind", ["command", "function"])
def test_a_job_runs_after_somebody_removed_the_folder_of_all_outputs(plant, kind):
    shutil.rmtree(plant.data / "runs")

    job = plant.command("sh", "-c", "echo once") if kind == "command" else plant.function("shout", "once")

    assert str(plant.settled(job).end) == "completed"
    assert "once" in plant.output(job)["stdout"].lower()


def test_a_link_in_place_of_an_output_folder_is_not_followed(plant, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    committed(plant.store, SetAddon("a", paused=True))
    job = plant.command("echo", "secret")
    (plant.data / "runs" / job).symlink_to(elsewhere)
    committed(plant.store, SetAddon("a", paused=False))

    assert plant.settled(job).error.startswith("cannot start")
    assert list(elsewhere.iterdir()) == []


def test_what_a_command_leaves_running_is_ended_before_its_units_return(plant, tmp_path):
    job, path = plant.tree(tmp_path, "--leave")
    pids = pids_in(path, 4)

    plant.settled(job)
    assert [pid for pid in pids if alive(pid)] == []
    assert plant.state(job) == "DONE"
    assert plant.units() == 0


# functions


def test_a_function_gives_its_result_and_its_worker_stays_warm(plant):
    first, second = plant.function("pid"), None
    plant.settled(first)
    second = plant.function("pid")

    assert plant.settled(second).result == plant.settled(first).result
    assert plant.settled(plant.function("add", 2, b=3)).result == "5"


def test_a_registered_name_is_enough(plant):
    job = plant.submit("function", {"function": "add", "args": [1, 2]})

    assert plant.settled(job).result == "3"


def test_a_star_allows_what_the_module_defines_and_nothing_that_it_imports(plant):
    attempt = plant.settled(plant.function("getcwd"))

    assert str(attempt.end) == "job_error"
    assert attempt.result is None
    assert "work_for_tests:getcwd is not defined in its module" in attempt.error


def test_a_module_that_lists_its_names_offers_those_and_no_others(plants):
    plant = plants(functions=Functions(paths=["listed_for_tests:*", "work_for_tests:getcwd"]))
    listed, hidden, named = (
        plant.settled(plant.submit("function", {"function": path}))
        for path in ("listed_for_tests:getcwd", "listed_for_tests:inner", "work_for_tests:getcwd")
    )

    assert (str(listed.end), str(hidden.end), str(named.end)) == ("completed", "job_error", "completed")


@pytest.mark.parametrize(
    ("name", "end", "words"),
    [
        ("fail", "job_error", "ValueError: no such luck"),
        ("away", "unavailable", "the library is closed"),
        ("leave", "worker_crashed", "the worker exited with code 3"),
        ("unsendable", "job_error", "which JSON cannot carry"),
        ("huge", "job_error", "at most 1000000"),
        ("nothing_of_that_name", "job_error", "AttributeError"),
    ],
)
def test_how_a_function_ends_says_where_its_job_lands(plant, name, end, words):
    job = plant.function(name, *([3] if name == "leave" else []))

    attempt = plant.settled(job)
    assert str(attempt.end) == end
    assert words in attempt.error
    assert "worker.py" not in attempt.error


def test_each_function_has_its_own_output(plant):
    jobs = [plant.function("shout", f"job {n}") for n in range(6)]

    for n, job in enumerate(jobs):
        plant.settled(job)
        told = plant.output(job)
        assert sorted(told["stdout"].split("\n")) == ["", f"job {n}", "raw"]
        assert told["stderr"] == "aside\n"


def test_what_a_function_leaves_running_is_ended_with_its_worker(plant, tmp_path):
    job = plant.function("leave_a_child_behind", str(tmp_path / "pid"))

    assert plant.settled(job).result == '"left"'
    assert not alive(int((tmp_path / "pid").read_text()))
    assert plant.settled(plant.function("add", 1, 1)).result == "2"


def test_a_worker_is_replaced_when_it_has_done_its_share(plants):
    plant = plants(jobs_per_worker=2, workers=1)
    pids = [plant.settled(plant.function("pid")).result for _ in range(4)]

    assert pids[0] == pids[1] != pids[2] == pids[3]


def test_idle_workers_are_sent_home(plants):
    plant = plants(idle_sec=0.1, warm=0)
    pid = int(plant.settled(plant.function("pid")).result)

    until(lambda: not alive(pid))


@pytest.mark.parametrize(
    ("job_type", "payload", "field"),
    [
        ("command", "[]", "payload"),
        ("command", "{", "payload"),
        ("command", '{"argv": "make all"}', "payload.argv"),
        ("command", '{"argv": ["a\\u0000b"]}', "payload.argv"),
        ("command", json.dumps({"argv": ["x" * 200_000]}), "payload.argv"),
        ("command", '{"argv": ["make"], "cwd": "build"}', "payload.cwd"),
        ("command", '{"argv": ["make"], "env": {"PENSTOCK_RUNNER": "x"}}', "payload.env"),
        ("command", '{"argv": ["make"], "env": {"A=B": "x"}}', "payload.env"),
        ("command", '{"argv": ["make"], "limits": {"memroy_mb": 1}}', "payload.limits"),
        ("command", '{"argv": ["make"], "limits": {"memory_mb": true}}', "payload.limits"),
        ("command", '{"argv": ["make"], "nice": -5}', "payload.nice"),
        ("shell", '{"argv": ["make"]}', "payload.argv"),
        ("shell", '{"script": " "}', "payload.script"),
        ("function", '{"function": "os:system", "args": ["id"]}', "payload.function"),
        ("function", '{"function": "shop.jobs:index.__globals__"}', "payload.function"),
        ("function", '{"function": "shop.jobs:__import__"}', "payload.function"),
        ("function", '{"function": "shop.jobs.inner:index"}', "payload.function"),
        ("function", '{"function": "shop.jobs:index", "args": {}}', "payload.args"),
    ],
)
def test_a_bad_payload_is_refused_with_its_field(job_type, payload, field):
    with pytest.raises(BadIntent) as refused:
        read(f"penstock.{job_type}", payload, Functions(paths=["shop.jobs:*"]))

    assert refused.value.problems[0]["field"] == field


def test_a_warden_that_is_killed_while_it_waits_for_a_command_is_not_given_one(plant):
    plant.settled(plant.command("true"))
    [launcher] = [
        p.pid for p, _ in find_marked(RUNNER_MARK, {RunnerFolder(plant.data).mark}) if p.parent == os.getpid()
    ]
    [warden] = children(launcher)
    os.kill(warden, signal.SIGKILL)
    until(lambda: not alive(warden))

    job = plant.command("true")
    assert plant.settled(job).end == "completed"
    assert plant.settled(plant.command("true")).end == "completed"
    assert len(plant.store.attempts(job)) <= 2  # it may be killed just before we hear of it


def test_a_runner_without_news_leaves_the_lines_alone_until_one_of_its_own_is_seen(plants, monkeypatch):
    plant = plants(dispatch=False)
    runner, fetched = plant.runner, []
    monkeypatch.setattr(plant.job_service, "exchange", lambda *asked: fetched.append(asked) or ([], []))
    runner.exchange()
    plant.service.dispatcher.step(plant.store.now())
    runner.exchange()
    without = len(fetched)
    plant.command("true")
    plant.service.dispatcher.step(plant.store.now())
    runner.exchange()

    assert (without, len(fetched)) == (1, 2)


def test_a_runner_fetches_after_every_commit_whatever_the_last_round_saw(plants, monkeypatch):
    plant = plants(dispatch=False)
    runner, fetched = plant.runner, []
    monkeypatch.setattr(plant.job_service, "exchange", lambda *asked: fetched.append(asked) or ([], []))
    plant.service.dispatcher.step(plant.store.now())
    for _ in range(3):
        runner.look_for_stops()
        runner.exchange()

    assert len(fetched) == 3


def test_rounds_of_other_workers_know_of_the_places_that_the_runner_has_while_it_starts_jobs(
    plants, monkeypatch
):
    plant = plants(dispatch=False)
    runner, rooms = plant.runner, []
    for _ in range(3):
        plant.command("true")

    def begin(_):
        rooms.append(plant.service.pulling_workers.at(plant.store.now()).free["runner"][1])

    monkeypatch.setattr(runner, "_begin", begin)
    runner.exchange()

    assert rooms == [2, 2]


def test_a_job_shows_the_process_that_runs_it(plant, tmp_path):
    gate = tmp_path / "go"
    wait = f"import os, time, pathlib\nprint(os.getpid(), flush=True)\nwhile not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.02)"
    job_id = plant.python(wait)
    until(lambda: plant.store.job(job_id).pid is not None, what="the pid")
    pid = plant.store.job(job_id).pid
    gate.touch()
    plant.settled(job_id)

    assert plant.output(job_id)["stdout"].strip() == str(pid)
    assert (plant.store.job(job_id).pid, plant.last(job_id).pid) == (None, pid)
