"""Jobs of an addon run as the operating system user that `runner.users` names, and nothing of the daemon's is theirs."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.runner.process_tree import read_process
from penstock.scheduler.permissions import NEEDED, account
from penstock.settings import BadSettings, load
from tests.waiting import until

OTHER = "nobody"
SOURCES = Path(penstock.__file__).parents[1]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may switch users here")


@pytest.fixture
def other():
    return account(OTHER)


@pytest.fixture
def switching(plants, other):
    return plants(users={"a": other})


def python_for_all(other):
    """An interpreter that the other user may execute: ours may lie in a home that is closed to it."""
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    for python in (sys.executable, "/usr/bin/python3"):
        if subprocess.run(["/usr/bin/env", python, "-c", check], user=other.uid, check=False).returncode == 0:
            return python
    return pytest.skip("no Python here that another user may execute")


@as_root
def test_a_command_runs_as_the_user_of_its_addon(switching, other):
    job_id = switching.command("/bin/sh", "-c", 'id -u; id -g; id -G; echo "$HOME $USER $LOGNAME"; pwd')
    switching.until(job_id, "DONE")
    uid, gid, groups, names, folder = switching.output(job_id)["stdout"].splitlines()

    assert (int(uid), int(gid)) == (other.uid, other.gid)
    assert {int(group) for group in groups.split()} == set(other.groups)
    assert names == f"{other.home} {OTHER} {OTHER}"
    assert folder == other.home


@as_root
def test_an_addon_without_a_user_of_its_own_runs_as_the_daemon(switching):
    job_id = switching.command("/usr/bin/id", "-u", fields={"addon_id": "b"})
    switching.until(job_id, "DONE")

    assert switching.output(job_id)["stdout"].strip() == str(os.getuid())


@as_root
def test_a_star_stands_for_all_other_addons(plants, other):
    plant = plants(users={"*": other})
    job_id = plant.command("/usr/bin/id", "-u", fields={"addon_id": "b"})
    plant.until(job_id, "DONE")

    assert plant.output(job_id)["stdout"].strip() == str(other.uid)


@as_root
def test_a_job_of_another_user_has_no_capability_and_cannot_read_the_database(switching):
    script = f"grep CapEff /proc/self/status; cat {switching.data}/jobs.db >/dev/null || echo refused"
    job_id = switching.command("/bin/sh", "-c", script)
    switching.until(job_id, "DONE")

    assert switching.output(job_id)["stdout"].split() == ["CapEff:", "0" * 16, "refused"]


@as_root
def test_a_job_of_another_user_can_talk_to_the_scheduler(switching, other):
    """As `penstock job progress` does, without the package: its files may be closed to that user."""
    talk = (
        "import json, os, socket\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "s.connect('\\0' + os.environ['PENSTOCK_SOCKET'][1:])\n"
        "said = {'token': os.environ['PENSTOCK_JOB_TOKEN'], 'op': 'checkpoint', 'checkpoint': '[1]'}\n"
        "s.sendall(json.dumps(said).encode() + b'\\n')\n"
        "print(s.makefile().readline())\n"
    )
    job_id = switching.command(python_for_all(other), "-I", "-S", "-c", talk)
    switching.until(job_id, "DONE")

    assert json.loads(switching.output(job_id)["stdout"]) == {}
    assert switching.store.checkpoint(job_id) == "[1]"


@as_root
def test_a_tree_of_another_user_is_ended_to_the_last_process(switching, other):
    job_id = switching.command(
        "/bin/sh",
        "-c",
        "trap '' TERM; (trap '' TERM; setsid sleep 1000 & sleep 1000) & echo up; wait; sleep 1000",
    )
    until(lambda: "up" in switching.output(job_id)["stdout"] if switching.last(job_id) else False)
    switching.job_service.cancel(job_id)
    switching.until(job_id, "CANCELED")

    assert [pid for pid in switching.ours() if uid_of(pid) == other.uid] == []


@as_root
def test_a_killed_warden_leaves_no_process_of_another_user(switching, other):
    job_id = switching.command("/bin/sh", "-c", "echo up; sleep 1000")
    until(lambda: "up" in switching.output(job_id)["stdout"] if switching.last(job_id) else False)
    [root] = until(switching.runner.pids)
    os.kill(read_process(root).parent, signal.SIGKILL)  # its warden

    until(lambda: uid_of(root) != other.uid)


@as_root
def test_functions_of_two_users_never_share_a_worker(plants, other):
    plant = plants(users={"a": other}, python=python_for_all(other))
    mine = [plant.function("user_and_pid", fields={"addon_id": "a"}) for _ in range(3)]
    ours = [plant.function("user_and_pid", fields={"addon_id": "b"}) for _ in range(3)]
    results = {job_id: json.loads(plant.until(job_id, "DONE").result) for job_id in mine + ours}

    assert {results[job_id][0] for job_id in mine} == {other.uid}
    assert {results[job_id][0] for job_id in ours} == {os.getuid()}
    assert {results[job_id][1] for job_id in mine}.isdisjoint({results[job_id][1] for job_id in ours})


def uid_of(pid):
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except FileNotFoundError:
        return None


def test_a_user_that_the_machine_does_not_have_is_refused(tmp_path):
    with pytest.raises(BadSettings) as refused:
        load(environ={"PENSTOCK_DATA_DIR": str(tmp_path)}, file=settings_file(tmp_path, "no-such-user"))

    assert "names the user 'no-such-user' for addon 'photos'" in str(refused.value)


def test_a_daemon_that_may_not_switch_refuses_the_setting(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.settings.checks.missing_capabilities", lambda: ["CAP_SETUID"])
    with pytest.raises(BadSettings) as refused:
        load(environ={"PENSTOCK_DATA_DIR": str(tmp_path)}, file=settings_file(tmp_path, another_user()))

    assert "needs to switch users, which this process may not: it lacks CAP_SETUID" in str(refused.value)
    assert "drop-in for runner.users" in str(refused.value)


def test_the_daemons_own_user_needs_no_right_to_switch(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.settings.checks.missing_capabilities", lambda: ["CAP_SETUID"])
    own = pwd.getpwuid(os.geteuid()).pw_name
    settings = load(environ={"PENSTOCK_DATA_DIR": str(tmp_path)}, file=settings_file(tmp_path, own))

    assert settings.runner.users == {"photos": own}


def another_user():
    return next(user.pw_name for user in pwd.getpwall() if user.pw_uid != os.geteuid())


def settings_file(folder, user):
    file = folder / "config.toml"
    file.write_text(f'[runner.users]\nphotos = "{user}"\n')
    return file


@as_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_capabilities_of_a_service_that_is_not_root_do_not_reach_its_jobs(other):
    """As a warden starts them: `_prepare` runs in each job between fork and exec."""
    code = (
        f"import os, subprocess, sys; sys.path.insert(0, {str(SOURCES)!r})\n"
        "from penstock.scheduler.permissions import missing_capabilities\n"
        "from penstock.runner.warden import _prepare\n"
        "print(missing_capabilities(), flush=True)\n"
        "job = ['/bin/grep', '-E', 'CapEff|NoNewPrivs', '/proc/self/status']\n"
        "subprocess.run(job, preexec_fn=_prepare(os.getpid(), {}, 0))\n"
    )
    caps = ",".join(["-all", *(f"+{name.removeprefix('CAP_').lower()}" for name in NEEDED.values())])
    service = ["setpriv", f"--reuid={other.uid}", f"--regid={other.gid}", "--clear-groups"]
    service += [f"--inh-caps={caps}", f"--ambient-caps={caps}"]
    told = subprocess.run(
        [*service, python_for_all(other), "-c", code], capture_output=True, text=True, check=True
    )

    assert told.stdout.split() == ["[]", "CapEff:", "0" * 16, "NoNewPrivs:", "1"]
