"""The migration guides: the old library and Penstock on the same tasks print the same. `make test-migrate` has the libraries."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests import ROOT, SOURCES
from tests.tutorials import commands, follow, steps
from tests.waiting import LONG, until

PAGES = ROOT / "docs" / "migrate"
#: How each library's own worker runs beside `main()`, in the same process; Penstock's is `with scheduler:`.
OLD_WORKERS = {
    "celery": """
from celery.contrib.testing.worker import start_worker
with start_worker(before.app, perform_ping_check=False, pool="solo", loglevel="ERROR"):
    before.main()
""",
    "rq": """
import threading
from rq import SimpleWorker
from rq.timeouts import TimerDeathPenalty

class Worker(SimpleWorker):
    death_penalty_class = TimerDeathPenalty  # signals are for the main thread

    def _install_signal_handlers(self):
        pass

worker = Worker([before.queue], connection=before.queue.connection)
waiting = threading.Thread(target=before.main)
waiting.start()
while waiting.is_alive():
    worker.work(burst=True, logging_level="ERROR")
    waiting.join(0.1)
""",
    "huey": """
import logging
logging.disable()
consumer = before.huey.create_consumer(workers=1, initial_delay=0.01)
consumer.start()
try:
    before.main()
finally:
    consumer.stop(graceful=True)
""",
    "apscheduler": "before.main()",
}
#: What a page must answer, by a word of the answer: a user of the old library stops where one is missing.
QUESTIONS = {
    "retries": "retries=",
    "a later start": "not_before=",
    "a periodic task": "@scheduler.schedule(",
    "a result": "job.result()",
    "a result by its id": "scheduler.get(",
    "a priority": "priority=",
    "a cancellation": "job.cancel()",
    "a limit of time": "max_runtime",
    "a task after another": "after=[",
    "starts in a minute": "in a minute",
    "a test": "VirtualScheduler",
    "processes": 'kind="process"',
}


def programs():
    """Each program of a page in both versions: the page, the names of the two modules."""
    for page in OLD_WORKERS:
        titles = {step.title for step in steps(PAGES / f"{page}.md")}
        for title in sorted(titles):
            before = title.replace("after", "before")
            if title.startswith("after") and before in titles:
                yield pytest.param(
                    page, before.removesuffix(".py"), title.removesuffix(".py"), id=f"{page}-{title}"
                )


PAIRS = list(programs())


def test_every_page_has_two_programs_at_least():
    assert {page: sum(pair.values[0] == page for pair in PAIRS) for page in OLD_WORKERS} == {
        "celery": 3,
        "rq": 2,
        "huey": 3,
        "apscheduler": 2,
    }


@pytest.mark.parametrize("page", OLD_WORKERS)
def test_a_page_answers_what_a_user_of_the_old_library_asks(page):
    text = (PAGES / f"{page}.md").read_text("utf-8")

    assert [question for question, answer in QUESTIONS.items() if answer not in text] == []


@pytest.mark.parametrize("page", [*OLD_WORKERS, "README"])
def test_the_penstock_programs_of_a_page_print_what_it_shows(page, tmp_path):
    pytest.importorskip("msgspec")

    assert follow(PAGES / f"{page}.md", tmp_path)[1]


# With the old libraries


@pytest.fixture
def redis_server(tmp_path):
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server here: apt-get install redis-server")
    server = subprocess.Popen(
        [program, "--port", "6390", "--save", "", "--dir", str(tmp_path)], stdout=subprocess.DEVNULL
    )
    until(lambda: answers(6390), what="redis-server")
    yield
    server.terminate()
    server.wait(LONG)


def answers(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def printed(program, folder):
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{SOURCES}"},
        capture_output=True, text=True, check=False, timeout=3 * LONG,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def shown(page, program):
    """What the page shows below `python PROGRAM`."""
    for step in steps(PAGES / f"{page}.md"):
        for command, expected in commands(step.text):
            if command == f"python {program}.py":
                return expected + "\n"
    raise AssertionError(f"{page}.md does not run {program}.py")


def set_up(page, folder, request):
    if find_spec(page) is None:
        pytest.skip(f"{page} is not in this environment: `make test-migrate` has one of its own")
    if page == "rq":
        request.getfixturevalue("redis_server")
    for step in steps(PAGES / f"{page}.md"):
        if step.kind == "python":
            (folder / step.title).write_text(step.text)


@pytest.mark.parametrize(("page", "before", "after"), PAIRS)
def test_the_old_library_prints_what_penstock_prints(page, before, after, tmp_path, request):
    set_up(page, tmp_path, request)

    assert printed(f"import {before} as before\n{OLD_WORKERS[page]}", tmp_path) == shown(page, after)


def test_one_function_is_a_task_of_celery_and_a_job_at_once(tmp_path, request):
    set_up("celery", tmp_path, request)

    both = printed(f"import both as before\n{OLD_WORKERS['celery']}", tmp_path)

    assert both == 2 * "order 1 charged\n"
