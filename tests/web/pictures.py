"""
`make screenshots`: the pictures of the README, of a scheduler at work on a load that comes and goes.

    python tests/web/pictures.py [SECONDS]       how long it works before the pictures are taken (90)
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from itertools import count

from examples.demo.addons import submit_samples
from playwright.sync_api import sync_playwright

from penstock.client.client import job_of
from tests import ROOT, SOURCES
from tests.web.web_kit import Tab, chromium, scheduler

TARGET = ROOT / "docs" / "img"
SIZE = {"width": 1360, "height": 860}


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 90.0
    TARGET.mkdir(parents=True, exist_ok=True)
    with ExitStack() as down:
        daemon = down.enter_context(
            scheduler(
                "addons.photos.budget_day=0.18", "addons.photos.budget_month=5", "addons.mail.weight=200"
            )
        )
        for program in (["addons", "photos"], ["addons", "mail"], ["studio"]):
            down.enter_context(at_work(daemon, *program))
        job = command(daemon.client)
        over = threading.Event()
        working = threading.Thread(target=work, args=(daemon.client, over))
        working.start()
        down.callback(working.join)
        down.callback(over.set)
        time.sleep(seconds)
        playwright = down.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        down.callback(browser.close)
        for name, path, scheme in [
            ("overview", "", "light"),
            ("jobs", "jobs", "dark"),
            ("job", f"jobs/{job}", "light"),
            ("machine", "machine", "light"),
            ("addons", "addons", "light"),
            ("pools", "pools", "dark"),
        ]:
            take(browser, daemon, name, path, scheme)


def take(browser, daemon, name, path, scheme):
    tab = Tab(browser.new_context(viewport=SIZE, color_scheme=scheme), daemon).sign_in()
    tab.open(path)
    tab.page.wait_for_timeout(2_500)  # so that a few beats have come
    tab.page.screenshot(path=TARGET / f"{name}.png")
    tab.close()
    sys.stdout.write(f"{name}.png {(TARGET / f'{name}.png').stat().st_size // 1024} KB\n")


@contextmanager
def at_work(daemon, program, *arguments):
    env = {**os.environ, "PENSTOCK_URL": daemon.url, "PENSTOCK_TOKEN": daemon.token}
    env["PYTHONPATH"] = str(SOURCES)
    command = [sys.executable, "-m", f"examples.demo.{program}", *arguments]
    process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def command(client):
    """One that says something while it works."""
    script = 'for n in $(seq 1 200); do echo "frame $n of 200: $((n * 17 % 90 + 10)) ms"; sleep 1; done'
    job = client.submit(
        "me", "penstock.shell", {"script": script}, cost_units=5, tags=("film",), max_runtime_sec=600
    )
    return job.job_id


def work(client, over):
    """Waves of jobs, so that the charts have something to tell."""
    dice = random.Random(7)
    submit_samples(client)
    for second in count():
        if over.wait(1):
            return
        many = max(0, round(4 + 4 * math.sin(second / 6) + dice.uniform(-1, 1)))
        jobs = [
            job_of("photos", "thumbnail", {"name": f"{dice.randrange(10_000)}.jpg"}, cost_units=5)
            for _ in range(many)
        ]
        jobs += [
            job_of("mail", "send", {"to": f"user{dice.randrange(99)}@example.org"}, cost_units=3)
            for _ in range(many // 2)
        ]
        if jobs:
            client.submit_many(jobs)


if __name__ == "__main__":
    main()
