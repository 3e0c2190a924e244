"""A runner that has no descriptor left: what cannot be started goes back to the queue, and what runs ends as it says."""

from __future__ import annotations

import errno
import os
import resource
import socket
from contextlib import contextmanager, suppress
from itertools import count, islice
from pathlib import Path

from penstock.core.errors import StoreFailed
from penstock.runner.channels import IoLoop
from penstock.runner.control_socket import ControlSocket
from tests.waiting import until


@contextmanager
def descriptors_left(n):
    """This process can open so many more."""
    used = {int(fd.name) for fd in Path("/proc/self/fd").iterdir()}
    last = list(islice((fd for fd in count() if fd not in used), n))[-1]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def open_now():
    """Counted without opening one."""
    found = 0
    for fd in range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]):
        with suppress(OSError):
            os.fstat(fd)
            found += 1
    return found


def open_readers(store, number=6):
    """
    Open the connections that threads of the scheduler may come to need at once, and that the store then keeps: opened later
    they would take the last descriptors for good.
    """
    if number:
        store.read_view("here", lambda _: open_readers(store, number - 1))


def refused(plant, jobs):
    events = [event for job in jobs for event in plant.store.events(0, 1_000, job)]
    return [event for event in events if "could not be started" in event.data.get("error", "")]


def unless_out_of_descriptors(look):
    """The test reads the same file in the same process, and may be the one that gets no descriptor."""

    def looked():
        try:
            return look()
        except StoreFailed:
            return None

    return looked


def test_a_command_that_cannot_be_started_goes_back_and_runs_when_it_can(plant, tmp_path):
    go = tmp_path / "go"
    plant.settled(plant.command("true"))
    open_readers(plant.store)
    with descriptors_left(12):
        jobs = [plant.command("sh", "-c", f"until [ -e {go} ]; do sleep 0.05; done") for _ in range(40)]
        until(unless_out_of_descriptors(lambda: refused(plant, jobs)))
        running = lambda: [job for job in jobs if plant.state(job) == "RUNNING"]  # noqa: E731
        each_has_a_process = lambda: 0 < len(running()) == len(plant.runner.pids())  # noqa: E731
        until(unless_out_of_descriptors(each_has_a_process), what="a process for each that runs")
    assert {event.reason for event in refused(plant, jobs)} == {"released"}
    go.touch()

    assert {str(plant.settled(job, 60).end) for job in jobs} == {"completed"}
    assert {plant.store.job(job).counters.crash for job in jobs} == {0}


def test_a_function_for_which_no_worker_can_be_started_goes_back_and_runs_when_it_can(plant):
    plant.settled(plant.command("true"))
    open_readers(plant.store)
    with descriptors_left(3):
        job = plant.function("add", 1, 2)
        until(lambda: plant.events(job).count(("REQUEUED", "released")) > 1)

        # A try that keeps its pair of sockets leaves none free after the second.
        until(lambda: open_now() < resource.getrlimit(resource.RLIMIT_NOFILE)[0], what="a free descriptor")

    assert str(plant.settled(job, 60).end) == "completed"


def test_a_visitor_for_whom_there_is_no_descriptor_does_not_keep_the_runner_busy(monkeypatch):
    def refuse(_):
        tried.append(1)
        raise OSError(errno.EMFILE, "too many open files")

    tried, loop = [], IoLoop()
    loop.open()
    control = ControlSocket(f"penstock-test-{os.getpid()}", loop, lambda token, _: {"token": token})
    with socket.socket(socket.AF_UNIX) as visitor:
        visitor.connect("\0" + control.address[1:])
        visitor.sendall(b'{"token": "a"}\n')
        visitor.setblocking(False)
        with monkeypatch.context() as full:
            full.setattr(socket.socket, "accept", refuse)
            for _ in range(100):
                loop.wait(0)
        assert 1 <= len(tried) < 50

        def answered():
            loop.wait(0.1)
            with suppress(BlockingIOError):
                return visitor.recv(1_000)

        assert until(answered) == b'{"token": "a"}\n'
    control.close()
    loop.close()
