"""Every Python block of every page runs, with the parts around it that the page takes for granted; shell lines name real options."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests import ROOT, SOURCES
from tests.pages import run_examples
from tests.test_readme import DOCUMENTS, python_blocks
from tests.tutorials import follow
from tests.waiting import LONG

DOCS = ROOT / "docs"
#: Pages whose blocks run in a test, and where.
RUN_IN = {
    "README.md": "test_readme.py",
    "docs/README.md": "here",
    "docs/alerts.md": "here",
    "docs/arrays.md": "here",
    "docs/cluster.md": "compiled alone: it needs a Ray cluster; tests/cluster has the same calls",
    "docs/flow-control.md": "flow/test_flow_docs.py",
    "docs/graphs.md": "graphs/test_docs.py",
    "docs/hosts.md": "here",
    "docs/how-to/test-jobs.md": "here",
    "docs/job-context.md": "here",
    "docs/jobs.md": "library/test_jobs_docs.py",
    "docs/migrate/": "migrate/test_guides.py",
    "docs/page.md": "here",
    "docs/pools.md": "test_readme.py",
    "docs/runner.md": "here",
    "docs/telemetry.md": "here",
    "docs/tutorials/": "test_tutorials.py",
    "docs/workers.md": "here",
}
#: Every test that is named above runs the whole page; pages that come later add themselves, or run as scripts below.
SCRIPTS = [
    page
    for page in DOCUMENTS
    if python_blocks(page) and not str(page.relative_to(ROOT)).startswith(tuple(RUN_IN))
]


def script(folder, *parts, **env):
    """One program of these parts, run in an empty folder."""
    (folder / "program.py").write_text("\n".join(parts))
    run = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env={**os.environ, "PYTHONPATH": str(SOURCES), **env},
        capture_output=True, text=True, check=False, timeout=2 * LONG,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


def blocks(name):
    return [code for _, code in python_blocks(ROOT / name)]


@pytest.mark.parametrize("page", SCRIPTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_examples_of_any_other_page_run_one_after_the_other(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert run_examples(page)


def test_the_eight_lines_of_the_home_page_run(tmp_path):
    assert script(tmp_path, *blocks("docs/README.md")) == "5\n"


def test_the_context_page_shows_functions_that_run(tmp_path):
    use = """
from penstock.testing import VirtualScheduler
with VirtualScheduler() as virtual:
    jobs = [virtual.job(crawl).enqueue("example.org"), virtual.job(report).enqueue("2026-11-18")]
    virtual.drain()
    print([job.result() for job in jobs])
"""

    assert script(tmp_path, *blocks("docs/job-context.md"), use) == "[3, '10 rows']\n"


def test_the_array_of_the_page_runs_to_its_end(tmp_path):
    before = "import penstock\nscheduler = penstock.Scheduler('jobs.db', capacity=100)\n"
    [code] = blocks("docs/arrays.md")
    code = code.replace("range(1, 1001)", "range(1, 21)").replace("(cost=5)", "(cost=5, run_when='any')")
    indented = "\n".join(f"    {line}" for line in code.splitlines())

    assert script(tmp_path, before, f"with scheduler:\n{indented}") == "DONE 20 \n"


def test_the_receiver_of_alerts_accepts_our_signature_and_no_other():
    from penstock.alerts.receivers import signatures

    names: dict[str, object] = {}
    exec(blocks("docs/alerts.md")[0], names)
    key = b"k" * 32
    secret = "whsec_" + base64.b64encode(key).decode()
    at, body = int(time.time()), b'{"kind": "ALERT"}'
    headers = {"Webhook-Id": "one", "Webhook-Timestamp": str(at)}
    [headers["Webhook-Signature"]] = signatures([key], "one", at, body)

    assert names["genuine"](headers, body, secret)
    assert not names["genuine"](headers, body + b" ", secret)


def test_an_attached_program_of_the_page_is_shown_by_the_daemon(daemon, tmp_path):
    running = daemon()
    seen = """
    import penstock.client
    client = penstock.Client()
    while not client.programs():
        pass
    print(client.programs()[0].name)
"""
    code = blocks("docs/page.md")[0].replace("    ...\n", seen)

    said = script(tmp_path, code, PENSTOCK_URL=running.url, PENSTOCK_TOKEN=running.token)

    assert "thumbnailer" in said


def test_the_runner_of_the_design_page_runs_a_function(tmp_path):
    before = """
from pathlib import Path
from penstock.core.jobs.load import Capacity
from penstock.runner.folder import RunnerFolder
from penstock.runner.payload import Functions, RunnerOptions
from penstock.runner.runner import Runner
from penstock.scheduler.driver import SteadyClock
from penstock.scheduler.rules import SchedulerRules
from penstock.scheduler.service import SchedulerService
from penstock.stores.sqlite.store import SqliteStore
data = Path("data").absolute()
store = SqliteStore(Path("jobs.db"), SteadyClock())
rules = SchedulerRules(capacity=Capacity(fixed=90))
"""

    assert script(tmp_path, before, *blocks("docs/runner.md"), "store.close(); print('ended')") == "ended\n"


def test_the_telemetry_page_sets_up_tracing_in_caller_and_workers(tmp_path):
    before = "def thumbnail(path): return path\n"

    script(tmp_path, before, *blocks("docs/telemetry.md"), OTEL_SDK_DISABLED="true")


def test_the_worker_of_the_page_does_its_job(daemon, tmp_path):
    running = daemon()
    [code] = blocks("docs/workers.md")
    code = code.replace("http://127.0.0.1:8420", running.url).replace("token=...", f"token={running.token!r}")
    before = "def parts(path): return [path]\ndef shrink(part, size): pass\n"
    (tmp_path / "worker.py").write_text(before + code)
    job = running.client.submit("photos", "thumbnail", {"path": "a.jpg"}, run_when="any")
    worker = subprocess.Popen(
        [sys.executable, "worker.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(SOURCES)}
    )

    done = running.client.wait(job.job_id, LONG)
    worker.send_signal(signal.SIGTERM)

    assert worker.wait(LONG) == 0
    assert (done.state, json.loads(bytes(done.result))) == ("DONE", "a.small.jpg")


def test_a_job_in_the_callers_own_transaction_as_the_page_shows_it(postgres_server, tmp_path):
    postgres_server.run("CREATE DATABASE hosts_page OWNER penstock")
    dsn = postgres_server.address("penstock", "hosts_page")
    before = f"""
import penstock, psycopg
scheduler = penstock.Scheduler({dsn!r})
@scheduler.job
def send_receipt(order_id: int) -> None: ...
order_id = 7
"""
    [code] = blocks("docs/hosts.md")
    code = code.replace("postgresql://app@db.example.org/jobs", dsn)
    code = code.replace("INSERT INTO orders ...", "CREATE TABLE orders (id int)")

    said = script(tmp_path, before, code, "print(job.state); scheduler.close()")

    assert said == "QUEUED\n"


def test_the_guide_to_tests_can_be_followed(tmp_path):
    assert follow(DOCS / "how-to" / "test-jobs.md", tmp_path) == (4, 2)


def test_the_worker_in_javascript_does_a_job(daemon, tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here")
    running = daemon()
    text = (DOCS / "how-to" / "other-languages.md").read_text("utf-8")
    (tmp_path / "worker.mjs").write_text(re.search(r'```js title="worker.mjs"\n(.*?)```', text, re.DOTALL)[1])
    job = running.client.submit("thumbs", "shout", {"text": "hello"}, run_when="any")
    env = {**os.environ, "PENSTOCK_URL": running.url, "PENSTOCK_TOKEN": running.token}

    done = subprocess.run(
        [node, "worker.mjs"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=LONG
    )

    assert done.stdout == "done: HELLO\n", done.stderr
    assert json.loads(bytes(running.client.job(job.job_id).result)) == {"shouted": "HELLO"}


# Shell lines


def commands():
    """Every line that calls `penstock`, in a block of a page."""
    for page in DOCUMENTS:
        text = page.read_text("utf-8")
        for block in re.finditer(
            r"^ *```(?:sh|console|text|)(?: title=.*)?\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE
        ):
            for line in block[1].splitlines():
                found = re.match(r"\s*(?:\$ |# |\S+ \S+ \S+ \S+ \S+ )?(?:sudo )?(penstock [a-z].*)", line)
                if found and not line.startswith(" " * 8):
                    yield f"{page.relative_to(ROOT)}: {line.strip()}", found[1]


COMMANDS = dict(commands())


def test_the_pages_have_commands():
    assert len(COMMANDS) > 20


@pytest.mark.parametrize("place", COMMANDS)
def test_a_command_of_a_page_has_only_options_that_exist(place):
    click = pytest.importorskip("click")
    from penstock.cli.main import cli

    line = re.sub(r"\s{2,}.*|\s+#.*", "", COMMANDS[place]).replace("...", "")
    words = shlex.split(re.sub(r"\$\([^)]*\)", "x", line))[1:]
    command, context = cli, click.Context(cli, info_name="penstock")
    while words and isinstance(command, click.Group):
        inner = command.get_command(context, words[0])
        assert inner is not None, f"no verb {words[0]}"
        command, words = inner, words[1:]
    known = {
        name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)
    } | {"--json", "--help", "-h"}
    if "--" in words:
        words = words[: words.index("--")]
    if command.name in ("run", "submit"):  # the words of the command belong to it
        takes_value = {
            name for p in command.params if isinstance(p, click.Option) and not p.is_flag for name in p.opts
        }
        words = until_command(words, takes_value)
    used = {word.partition("=")[0] for word in words if word.startswith("-") and word != "-"}

    assert used <= known


def until_command(words, takes_value):
    kept = []
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            break
        kept.append(word)
        if word in takes_value:
            next(rest, None)
    return kept
