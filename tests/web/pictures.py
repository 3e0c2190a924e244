"""
`make screenshots`: the pictures of the documentation, of a scheduler at work on a load that comes and goes.

    python -m tests.web.pictures [SECONDS]       how long it works before the pictures are taken (90)

Every page is taken at two widths and in both themes: what the window shows goes to docs/img, the whole page for a
reviewer to build/pictures. The same scheduler's answers in a terminal go to docs/img as SVG (see terminal_pictures).
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
from PIL import Image
from playwright.sync_api import sync_playwright

from penstock.client.client import job_of
from tests import ROOT, SOURCES
from tests.web.terminal_pictures import take_terminals
from tests.web.web_kit import Tab, chromium, scheduler

TARGET = ROOT / "docs" / "img"
REVIEW = ROOT / "build" / "pictures"
SIZES = {"wide": {"width": 1440, "height": 900}, "narrow": {"width": 390, "height": 844}}
SCHEMES = ("light", "dark")
#: The colours of one picture; the pages have few, so a palette saves two thirds of the bytes and is not seen.
COLORS = 256


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 90.0
    for folder in (TARGET, REVIEW):
        folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as down:
        daemon = down.enter_context(
            scheduler(
                "addons.photos.budget_day=0.60", "addons.photos.budget_month=5", "addons.mail.weight=200"
            )
        )
        for program in (["addons", "photos"], ["addons", "mail"], ["studio"]):
            down.enter_context(at_work(daemon, *program))
        jobs = submit_scene(daemon.client)
        over = threading.Event()
        working = threading.Thread(target=work, args=(daemon.client, over))
        working.start()
        down.callback(working.join)
        down.callback(over.set)
        time.sleep(seconds)
        take_terminals(daemon, jobs, TARGET)
        playwright = down.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        down.callback(browser.close)
        for width, size in SIZES.items():
            for scheme in SCHEMES:
                tab = Tab(browser.new_context(viewport=size, color_scheme=scheme), daemon).sign_in()
                for name, path in pages(jobs).items():
                    take(tab, f"{name}-{width}-{scheme}.png", path)
                tab.close()


def pages(jobs):
    """The name of a picture, and the address of its page."""
    return {
        "overview": "",
        "jobs": "jobs",
        "job": f"jobs/{jobs['film']}",
        "family": f"jobs/{jobs['build']}",
        "failed": f"jobs/{jobs['failed']}",
        "arrays": "arrays",
        "batches": "batches",
        "schedules": "schedules",
        "machine": "machine",
        "addons": "addons",
        "workers": "workers",
        "pools": "pools",
        "alerts": "alerts",
    }


def take(tab, name, path):
    tab.open(path)
    tab.page.wait_for_timeout(2_500)  # so that a few beats have come
    tab.page.evaluate("scrollTo(0, 0)")
    tab.page.screenshot(path=TARGET / name)
    shrink(TARGET / name)
    tab.picture(REVIEW / name)
    sys.stdout.write(f"{name} {(TARGET / name).stat().st_size // 1024} KB\n")


def shrink(path):
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(
            COLORS, Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE
        )
    small.save(path, optimize=True)


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


def submit_scene(client):
    """Jobs that a reader knows from work: a film, a build with its steps, a job that fails, schedules, an array."""

    def script(text, addon="me", **fields):
        fields = {"cost_units": 2, "max_runtime_sec": 900, "run_when": "any"} | fields
        return client.submit(addon, "penstock.shell", {"script": text}, **fields).job_id

    frames = 'for n in $(seq 1 600); do echo "frame $n of 600: $((n * 17 % 90 + 10)) ms"; sleep 1; done'
    jobs = {"film": script(frames, tags=("film",), cost_units=5)}
    checkout = script("git clone --depth 1 https://git.example.org/shop.git", "ci")
    jobs["checkout"] = checkout
    client.wait(checkout, 60)  # there is no such host: it fails, and a person retries it as a new job
    fetch = script("echo 'fetched 214 files'; sleep 2", "ci")
    jobs["build"] = script(
        'for n in $(seq 1 600); do echo "[$n/600] cc part$n.c"; sleep 1; done', "ci", after=(fetch,)
    )
    tests = script("make test", "ci", after=(jobs["build"],))
    script("make docs", "ci", after=(jobs["build"],))
    script("make package", "ci", after=(jobs["build"],))
    script("./notify-the-team", "ci", after=(f"{tests}:failed",))
    jobs["failed"] = script(
        "echo 'connecting to db.example.org'; echo 'connection refused' >&2; exit 7",
        "reports",
        retry_delays_sec=(1, 2),
    )
    script("sleep 1; exit 3", "reports")
    client.submit("photos", "album", {"pictures": 400}, cost_units=4, cost_limit=0.30, run_when="any")
    client.submit("ml", "train", {"model": "small", "epochs": 40}, cost_units=30, labels=("gpu",))
    for name, line, what in (
        ("nightly-backup", "0 2 * * *", "pg_dump shop | gzip > /backup/shop.gz"),
        ("weekly-report", "0 7 * * mon", "python report.py --last-week"),
        ("thin-logs", "*/15 * * * *", "true"),
    ):
        client.add_schedule(
            name,
            job_of("me", "penstock.shell", {"script": what}, cost_units=2),
            cron=line,
            zone="Europe/Berlin",
        )
    client.run_schedule("thin-logs")
    client.pause_schedule("weekly-report")
    sweep = job_of(
        "ml",
        "penstock.shell",
        {"script": "sleep 3; test $PENSTOCK_ARRAY_INDEX -ne 7"},
        cost_units=1,
        run_when="any",
    )
    client.submit_array("1-200%2", sweep)
    step = job_of("ml", "penstock.shell", {"script": "sleep 2"}, cost_units=1, run_when="any")
    client.submit_batch("nightly-report", "ml", [step] * 20, on_end=step, on_failure=step)
    return jobs


def work(client, over):
    """Waves of jobs, so that the charts have something to tell."""
    dice = random.Random(7)
    submit_samples(client)
    for second in count():
        if over.wait(1):
            return
        many = max(0, round(1.8 + 2 * math.sin(second / 6) + dice.uniform(-1, 1)))
        jobs = [
            job_of(
                "photos", "thumbnail", {"name": f"{dice.randrange(10_000)}.jpg"}, cost_units=4, run_when="any"
            )
            for _ in range(many)
        ]
        jobs += [
            job_of(
                "mail", "send", {"to": f"user{dice.randrange(99)}@example.org"}, cost_units=3, run_when="any"
            )
            for _ in range(many // 2)
        ]
        if jobs:
            client.submit_many(jobs)


if __name__ == "__main__":
    main()
