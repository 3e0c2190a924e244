"""A long queue and a busy trail: the page stays quick, and what it costs the scheduler does not grow with the number of pages."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from http_kit import ServerKit

from penstock.server import event_hub
from penstock.wire import PREFIX
from tests import SOURCES
from tests.waiting import until
from tests.web.drive import backlog
from tests.web.web_kit import scheduler

SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))
WATCHED = 4 * SOAK  # seconds
QUEUED, EVENTS = 10_000, 200
JOBS = 200  # done while the page is watched


@contextmanager
def driven(daemon, events):
    command = [sys.executable, str(Path(__file__).parent / "drive.py"), daemon.url, daemon.token, str(events)]
    env = {**os.environ, "PYTHONPATH": str(SOURCES)}
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield
    finally:
        process.communicate()
        assert process.returncode == 0


#: Counts the elements that the page makes, from now on.
COUNT_ELEMENTS = """() => {
  window.madeElements = 0;
  const count = (records) => {
    for (const record of records) {
      for (const node of record.addedNodes) window.madeElements += 1 + (node.querySelectorAll?.("*").length ?? 0);
    }
  };
  new MutationObserver(count).observe(document, { childList: true, subtree: true });
}"""
#: The longest time between two frames that the page painted, in milliseconds.
LONGEST_FRAME = """seconds => new Promise((resolve) => {
  const began = performance.now();
  let last = began, longest = 0;
  const step = (at) => {
    longest = Math.max(longest, at - last);
    last = at;
    if (at - began < seconds * 1000) requestAnimationFrame(step); else resolve(longest);
  };
  requestAnimationFrame(step);
})"""


@pytest.mark.parametrize("path", ["", "jobs"])
def test_a_long_queue_and_a_busy_trail_leave_the_page_at_leisure(crowded, tabs, path):
    """The page works once per frame of the live stats, however many events happen and however long the queue is."""
    tab = tabs(crowded).sign_in()
    tab.open(path)
    requests = []
    with driven(crowded, EVENTS):
        tab.until("Number(document.querySelector('.pill')?.textContent) >= 10000")
        tab.page.on("request", lambda request: requests.append(request.url))
        tab.page.evaluate(COUNT_ELEMENTS)
        before = done(crowded)
        until(lambda: done(crowded) >= before + JOBS)
        made = tab.page.evaluate("window.madeElements")
        longest = tab.page.evaluate(LONGEST_FRAME, WATCHED) if SOAK > 1 else 0
    elements = tab.page.evaluate("document.querySelectorAll('*').length")

    assert elements < QUEUED / 2, "the page does not grow with the queue"
    assert len(requests) < JOBS / 2, "it does not ask at every job"
    assert made < 20 * elements, "it does not draw itself anew at every job"
    assert longest < 2_000  # measured on a quiet machine only


def done(daemon):
    return daemon.client.stats().jobs.get("DONE", 0)


@pytest.fixture(scope="module")
def crowded():
    with scheduler() as started:
        backlog(started.client, QUEUED)
        yield started


def test_ten_pages_get_the_same_beat_and_it_is_made_once(tmp_path, monkeypatch):
    made, view = [], event_hub.frame_view
    monkeypatch.setattr(
        event_hub, "frame_view", lambda service, frame: made.append(frame.number) or view(service, frame)
    )
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    kit = ServerKit(home)
    received = [[] for _ in range(10)]

    def follow(lines):
        connection = kit.client.connect()
        connection.request(
            "GET", f"{PREFIX}/stats/stream", headers={"Authorization": f"Bearer {kit.client.token}"}
        )
        answer = connection.getresponse()
        while len(lines) < 3:
            line = answer.readline()
            if line.startswith(b"data: "):
                lines.append(line)
        connection.close()

    followers = [threading.Thread(target=follow, args=(lines,)) for lines in received]
    for follower in followers:
        follower.start()
    for follower in followers:
        follower.join()
    kit.close()

    assert len({line for lines in received for line in lines}) <= len(made)
    assert len(made) == len(set(made)), "one frame for all pages"
