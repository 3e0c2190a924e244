"""
What do ten open pages cost the scheduler?

    python -m bench.page [ROUNDS]

A real daemon, driven flat out by another process, in turns: nobody looks; ten tabs of a real Chromium are open, five on the overview and
five on the list of jobs, with 10,000 jobs queued. The browser and the driver need processors too, so jobs a second say little on a small
machine. What counts is the daemon's own time: whatever it spends beyond what those jobs cost when nobody looks, it spends on the pages.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import psutil
from playwright.sync_api import sync_playwright
from tests.web.drive import backlog
from tests.web.web_kit import Tab, chromium, scheduler

ROOT = Path(__file__).parents[1]
TURN = 5.0  # seconds
PAGES = 10
QUEUED = 10_000


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    found: dict[int, list[tuple[float, float]]] = {0: [], PAGES: []}
    with scheduler() as daemon, sync_playwright() as playwright:
        backlog(daemon.client, QUEUED)
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        for number in range(rounds):
            for pages in (0, PAGES) if number % 2 else (PAGES, 0):
                found[pages].append(turn(daemon, browser, pages))
        browser.close()
    report(found[0], found[PAGES])


def report(alone: list[tuple[float, float]], watched: list[tuple[float, float]]) -> None:
    print(f"{'pages':>6} {'jobs/s':>9} {'daemon CPU us/job':>18}")
    for pages, turns in ((0, alone), (PAGES, watched)):
        print(
            f"{pages:>6} {median(rate for rate, _ in turns):>9.0f} {median(cost for _, cost in turns):>18.0f}"
        )
    bare = median(cost for _, cost in alone)
    extra = median(rate * (cost - bare) for rate, cost in watched) / 1e6
    print(
        f"{PAGES} pages take {extra:.1%} of a processor from the daemon: at its limit it does so much less (wanted: below 10 %)"
    )


def turn(daemon, browser, pages) -> tuple[float, float]:
    """Jobs a second, and microseconds of the daemon's processor time for each."""
    tabs = [Tab(browser.new_context(), daemon).sign_in() for _ in range(pages)]
    for number, tab in enumerate(tabs):
        tab.open("jobs" if number % 2 else "")
    drive = str(ROOT / "tests" / "web" / "drive.py")
    command = [sys.executable, drive, daemon.url, daemon.token, "0"]
    before, began = cpu(daemon), time.monotonic()
    driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    if tabs:
        tabs[0].page.wait_for_timeout(TURN * 1_000)
    else:
        time.sleep(TURN)
    told, _ = driver.communicate()
    took, used = time.monotonic() - began, cpu(daemon) - before
    for tab in tabs:
        tab.close()
    return int(told) / took, used / int(told) * 1e6


def cpu(daemon) -> float:
    times = psutil.Process(daemon.process.pid).cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()
