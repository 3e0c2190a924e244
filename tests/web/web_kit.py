"""What the browser tests and the makers of pictures share: a daemon, jobs in every state, a page that tells what its console said."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from penstock import wire
from penstock.client.client import job_of
from tests.daemon import Daemon
from tests.waiting import LONG

UNITS = 40
#: Whatever a user can say, with what a page could mistake it for.
EVIL = (
    "<img src=x onerror=\"window.pwned='img';alert(1)\"><script>window.pwned='script'</script>"
    "<svg onload=alert(2)>&lt;b&gt;\"' ${window.pwned='template'} javascript:alert(3)"
)
MARK = "<b id=planted>bold</b>"


def pool(name, workers, load, pending, waiting, **more):
    return wire.TaskInfo(
        name=name, workers={"running": workers}, in_flight=sum(load), pending_queue_depth=pending,
        waiting_queue_depth=waiting, max_in_flight=workers, max_queue_depth=40, policy="block", paused=False,
        load_by_worker=tuple(load), settled_by_worker=(100,) * workers,
        totals={"submitted": 1_204, "succeeded": 1_180, "failed": 3}, **{"kind": "process", "last_crash": None} | more,
    )  # fmt: skip


def bar(node, lane, worker, ready, started, ended, **more):
    return wire.LaneBar(
        node=node, lane=lane, worker=worker, ready=ready, started=started, ended=ended, **{"failed": False, "critical": False} | more
    )  # fmt: skip


#: A run that goes on: one that waited for a worker, one that failed, one with a name that a page could mistake for something else.
LANES = wire.LanesInfo(
    graph=f"album {MARK}", run=7, status="running", seconds=0.9, nodes=12, left_out=3,
    bars=[
        bar("fetch", "io", "loop-1", 0.0, 0.0, 0.2, critical=True),
        bar("decode", "compute", "compute-1", 0.2, 0.3, 0.5, critical=True),
        bar("resize", "compute", "compute-2", 0.2, 0.4, 0.6, failed=True),
        bar(MARK, "process", "process-1", 0.5, 0.5, None),
    ],
)  # fmt: skip
POOLS = [
    pool("decode", 8, (1, 1, 0, 1, 1, 0, 1, 1), 12, 0),
    pool("encode", 4, (1, 1, 1, 1), 38, 7, last_crash=f"killed by signal 9 {MARK}"),
    pool("upload", 2, (0, 1), 0, 0),
    pool("press", 2, (1, 0), 0, 0, kind="graph", lanes=LANES),
]


def chromium():
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def scheduler(*flags):
    with tempfile.TemporaryDirectory(prefix="pst") as folder:
        # No units are kept for a job that waits long: on a busy machine the tests take longer than that.
        daemon = Daemon(Path(folder), f"capacity.units={UNITS}", "order.patience=1d", *flags)
        try:
            yield daemon.start()
        finally:
            daemon.close()


def populate(client):
    """A job in every state, each with something to break out of a page with."""
    hostile = {"payload": {EVIL: [EVIL, MARK]}, "tags": (MARK, "tagged"), "idempotency_key": MARK}
    jobs = {}

    def submitted(name, **fields):
        jobs[name] = client.submit("photos", "thumbnail", **fields).job_id
        return jobs[name]

    def claimed():
        return client.claim(addon_id="photos", wait_sec=30, worker=MARK).jobs[0]

    submitted("done", **hostile)
    run = claimed()
    client.heartbeat(run.lease_id, progress=0.5, checkpoint=json.dumps({"at": EVIL}).encode())
    client.complete(run.job_id, run.lease_id, {"html": EVIL, "mark": MARK})
    submitted("failed", idempotency_key=None, payload=None)
    run = claimed()
    client.fail(run.job_id, run.lease_id, f"Traceback: {EVIL} {MARK}")
    submitted("blocked", cost_limit=1.0)
    run = claimed()
    client.heartbeat(run.lease_id, spent=5.0)
    client.fail(run.job_id, run.lease_id, "too dear")
    submitted("canceled")
    client.cancel(jobs["canceled"])
    submitted("running", tags=("tagged",))
    jobs["lease"] = claimed().lease_id
    client.heartbeat(jobs["lease"], progress=0.25, spent=0.5)
    script = (
        f"printf '\\033[31mred\\033[0m\\n'; printf '%s\\n' '{MARK}'; echo oops >&2; printf '10 %%\\r99 %%\\n'"
    )
    jobs["command"] = client.submit(
        "me", "penstock.command", {"argv": ["sh", "-c", script]}, cost_units=5
    ).job_id
    client.wait(jobs["command"], LONG)
    nightly = job_of("photos", "report", {EVIL: [EVIL, MARK]})
    client.add_schedule("nightly", nightly, cron="0 6 * * mon-fri", zone="Europe/Berlin")
    jobs["scheduled"] = client.run_schedule("nightly").job_id
    client.submit_array("1-100%2", job_of("mail", "digest", {EVIL: MARK}, cost_units=UNITS))
    digest = job_of("mail", "digest", {EVIL: MARK}, cost_units=UNITS)
    client.submit_batch("nightly", "mail", [digest] * 3, on_end=digest, on_failure=digest)
    for number in range(3):
        jobs[f"queued{number}"] = client.submit("mail", "send", {"n": number}, cost_units=UNITS).job_id
    return jobs


@contextmanager
def alive(client, lease_id):
    """What runs goes on running, and a program goes on showing its pools, however long the tests take."""
    over = threading.Event()

    def beat():
        while True:
            client.heartbeat(lease_id)
            client.attach("encoder", POOLS)
            if over.wait(2):
                return

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Tab:
    """A page somebody is signed in to. `close` fails the test if the console had something to say."""

    def __init__(self, context, daemon):
        self.context, self.daemon, self.page = context, daemon, context.new_page()
        self.complaints, self.dialogs, self._expected = [], [], ()
        self.page.set_default_timeout(LONG * 1_000)
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", self._dialog)

    def _hear(self, message):
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _dialog(self, dialog):
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def sign_in(self):
        self.page.goto(self.daemon.client.login().url)
        self.live()
        return self

    def live(self):
        self.page.wait_for_selector(".connection[data-state=live]")

    def open(self, path):
        """By the address alone, as a click on a link does."""
        self.page.evaluate("path => { location.hash = path }", f"#/{path}")
        self.settled()
        return self.page

    def settled(self):
        self.until("!document.querySelector('main .empty')?.textContent.includes('…')")

    def shows(self, text, within="main"):
        there = "([where, text]) => document.querySelector(where)?.innerText.includes(text)"
        return self.until(there, [within, text])

    def until(self, script, given=None):
        """Asked again and again from outside: the page's policy lets nothing be evaluated within, waiting included."""
        ends = time.monotonic() + LONG
        while not (found := self.page.evaluate(script, given)):
            assert time.monotonic() < ends, (
                f"it did not come: {script} {given}\n{self.page.inner_text('body')}"
            )
            self.page.wait_for_timeout(30)
        return found

    def picture(self, path):
        """Of the whole page, in a window that is as high as it is."""
        size = self.page.viewport_size
        high = max(size["height"], self.page.evaluate("document.documentElement.scrollHeight"))
        self.page.set_viewport_size({**size, "height": high})
        self.page.screenshot(path=path)
        self.page.set_viewport_size(size)

    def close(self):
        self.context.close()
        self.check()

    def expect(self, *words):
        """Complaints that have one of these in them are no failure, whenever the browser comes to make them."""
        self._expected = words

    def check(self):
        said, self.complaints, self.dialogs = [*self.complaints, *self.dialogs], [], []
        said = [line for line in said if not any(word in line for word in self._expected)]
        assert not said, said
