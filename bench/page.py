"""
What do ten open pages cost the scheduler?

    python -m bench.page [ROUNDS]

A real daemon with 10,000 jobs queued and 200 events a second, in turns: nobody looks; ten tabs of a real Chromium are open, five on the overview and five on
the list of jobs; ten readers ask for the same and draw nothing. What counts is the daemon's own processor time: what the pages take of it, it
cannot give to jobs. Jobs a second would tell of the browser as well, which needs processors too, and of whatever else the machine does.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import psutil
from playwright.sync_api import sync_playwright
from tests.web.drive import backlog
from tests.web.web_kit import Tab, chromium, scheduler

from penstock.wire import PREFIX

ROOT = Path(__file__).parents[1]
TURN, WARM_UP = 8.0, 1.5  # seconds
PAGES = 10
QUEUED, EVENTS = 10_000, 200
NOBODY, TABS, READERS = "nobody", f"{PAGES} tabs", f"{PAGES} readers"


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    found: dict[str, list[float]] = {NOBODY: [], TABS: [], READERS: []}
    with scheduler() as daemon, sync_playwright() as playwright:
        backlog(daemon.client, QUEUED)
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        lookers: dict[str, Callable[[], AbstractContextManager[Any]]]
        lookers = {NOBODY: nullcontext, TABS: lambda: tabs(daemon, browser), READERS: lambda: readers(daemon)}
        for number in range(rounds):
            for who in list(found)[:: 1 if number % 2 else -1]:
                with lookers[who]() as wait:
                    found[who].append(turn(daemon, wait if who == TABS else time.sleep))
        browser.close()
    report(found)


def report(found: dict[str, list[float]]) -> None:
    bare = median(found[NOBODY])
    print(f"{'looking':>10} {'daemon, of a processor':>24} {'for those who look':>20}")
    for who, shares in found.items():
        print(f"{who:>10} {median(shares):>24.1%} {median(shares) - bare:>20.1%}")
    print("That much less can a daemon do that is at its limit (wanted: below 10 %).")


def turn(daemon: Any, wait: Any) -> float:
    """The share of a processor that the daemon used."""
    drive = str(ROOT / "tests" / "web" / "drive.py")
    command = [sys.executable, drive, daemon.url, daemon.token, str(EVENTS)]
    driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    wait(WARM_UP)
    before, began = cpu(daemon), time.monotonic()
    wait(TURN)
    share = (cpu(daemon) - before) / (time.monotonic() - began)
    driver.communicate()
    return share


def cpu(daemon: Any) -> float:
    times = psutil.Process(daemon.process.pid).cpu_times()
    return times.user + times.system


@contextmanager
def tabs(daemon: Any, browser: Any) -> Iterator[Any]:
    opened = [Tab(browser.new_context(), daemon).sign_in() for _ in range(PAGES)]
    for number, tab in enumerate(opened):
        tab.open("jobs" if number % 2 else "")
    yield lambda seconds: opened[0].page.wait_for_timeout(seconds * 1_000)
    for tab in opened:
        tab.close()


@contextmanager
def readers(daemon: Any) -> Iterator[None]:
    """What the tabs ask for: a stream of beats each, and at every beat the first page of jobs for half of them."""
    over = threading.Event()
    reading = [
        threading.Thread(target=read, args=(daemon, over, bool(number % 2))) for number in range(PAGES)
    ]
    for reader in reading:
        reader.start()
    yield
    over.set()
    for reader in reading:
        reader.join()


def read(daemon: Any, over: threading.Event, lists: bool) -> None:
    beats, jobs = (HTTPConnection(urlsplit(daemon.url).netloc, timeout=30) for _ in range(2))
    headers = {"Authorization": f"Bearer {daemon.token}"}
    beats.request("GET", f"{PREFIX}/stats/stream", headers=headers)
    stream = beats.getresponse()
    while not over.is_set():
        if stream.readline().startswith(b"data:") and lists:
            jobs.request("GET", f"{PREFIX}/queue/jobs?limit=100&newest_first=true", headers=headers)
            jobs.getresponse().read()
    beats.close()
    jobs.close()


if __name__ == "__main__":
    main()
