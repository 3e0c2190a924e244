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
from tests.tutorials import steps
from tests.waiting import LONG, until

#: How each library's own worker runs beside `main()`, in the same process; Penstock's is `with scheduler:`.
OLD_WORKERS = {
    "celery": """
from celery.contrib.testing.worker import start_worker
import before
with start_worker(before.app, perform_ping_check=False, pool="solo", loglevel="ERROR"):
    before.main()
""",
    "rq": """
import threading
from rq import SimpleWorker
from rq.timeouts import TimerDeathPenalty
import before

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
import before
logging.disable()
consumer = before.huey.create_consumer(workers=1, initial_delay=0.01)
consumer.start()
before.main()
consumer.stop(graceful=True)
""",
    "apscheduler": "import before; before.main()",
}
PENSTOCK = """
import after
with after.scheduler:
    after.main()
"""
EXPECTED = {
    "celery": ["order 1 charged", "order 2 charged", "order 3 charged"],
    "rq": ["1", "2", "0"],
    "huey": ["1.jpg at 100", "2.jpg at 200", "3.jpg at 300"],
    "apscheduler": ["reminded Ada", "reminded Grace"],
}


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
    return run.stdout.splitlines()


def save(name, folder):
    for step in steps(ROOT / "docs" / "migrate" / f"{name}.md"):
        (folder / step.title).write_text(step.text)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_old_library_and_penstock_print_the_same(name, tmp_path, request):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not in this environment: `make test-migrate` has one of its own")
    if name == "rq":
        request.getfixturevalue("redis_server")
    save(name, tmp_path)

    assert printed(OLD_WORKERS[name], tmp_path) == EXPECTED[name]
    assert (
        printed(PENSTOCK if name != "apscheduler" else "import after; after.main()", tmp_path)
        == EXPECTED[name]
    )


@pytest.mark.parametrize("name", EXPECTED)
def test_the_penstock_version_of_a_guide_runs(name, tmp_path):
    pytest.importorskip("msgspec")
    save(name, tmp_path)

    assert (
        printed(PENSTOCK if name != "apscheduler" else "import after; after.main()", tmp_path)
        == EXPECTED[name]
    )
