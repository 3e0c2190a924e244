"""
What do ten open pages cost the scheduler?

    python -m bench.page [ROUNDS]

A real daemon with 10,000 jobs queued, driven flat out by another process, in turns: nobody looks; ten tabs of a real Chromium are open, five on the
overview and five on the list of jobs; ten readers ask for the same and draw nothing. A browser needs processors too, so on a small machine
jobs a second say little about the daemon while one is open: there the daemon's own time counts, and jobs a second beside the readers.
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
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil
from playwright.sync_api import sync_playwright
from tests.web.drive import backlog
from tests.web.web_kit import Tab, chromium, scheduler

from penstock.http.wire import PREFIX

ROOT = Path(__file__).parents[1]
TURN = 5.0  # seconds
PAGES = 10
QUEUED = 10_000
NOBODY, TABS, READERS = "nobody", f"{PAGES} tabs", f"{PAGES} readers"


class Turn(NamedTuple):
    rate: float  # jobs a second
    cost: float  # microseconds of the daemon's processor time for each


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    found: dict[str, list[Turn]] = {NOBODY: [], TABS: [], READERS: []}
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


def report(found: dict[str, list[Turn]]) -> None:
    print(f"{'looking':>10} {'jobs/s':>9} {'daemon CPU us/job':>18} {'CPU beyond the jobs':>20}")
    bare = median(one.cost for one in found[NOBODY])
    for who, turns in found.items():
        extra = median(one.rate * (one.cost - bare) for one in turns) / 1e6
        rate, cost = median(one.rate for one in turns), median(one.cost for one in turns)
        print(f"{who:>10} {rate:>9.0f} {cost:>18.0f} {extra:>20.1%}")
    # A round's turns lie next to each other: what others did to the machine in one they did to the next as well.
    pairs = zip(found[NOBODY], found[READERS], strict=True)
    fall = 1 - median(watched.rate / alone.rate for alone, watched in pairs)
    print(f"beside {READERS} the daemon does {fall:.1%} fewer jobs a second (wanted: below 10 %)")


def turn(daemon: Any, wait: Any) -> Turn:
    drive = str(ROOT / "tests" / "web" / "drive.py")
    command = [sys.executable, drive, daemon.url, daemon.token, "0"]
    before, began = cpu(daemon), time.monotonic()
    driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    wait(TURN)
    told, _ = driver.communicate()
    took, used = time.monotonic() - began, cpu(daemon) - before
    done = max(1, int(told))
    return Turn(done / took, used / done * 1e6)


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
    beats.request("GET", f"{PREFIX}/pulse", headers=headers)
    stream = beats.getresponse()
    while not over.is_set():
        if stream.readline().startswith(b"data:") and lists:
            jobs.request("GET", f"{PREFIX}/queue/jobs?limit=100&newest_first=true", headers=headers)
            jobs.getresponse().read()
    beats.close()
    jobs.close()


if __name__ == "__main__":
    main()
