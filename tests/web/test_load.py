"""A long queue and a busy trail: the page stays quick, and what it costs the scheduler does not grow with those who look."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from http_kit import Place

from penstock.server import event_hub
from penstock.wire import PREFIX
from tests import SOURCES
from tests.web.drive import backlog
from tests.web.web_kit import scheduler

SOAK = int(os.environ.get("PENSTOCK_SOAK", "1"))
WATCHED = 4 * SOAK  # seconds
QUEUED, EVENTS = 10_000, 200


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


#: Frames that the page painted, and the longest that it kept somebody waiting.
WATCH = """seconds => new Promise((told) => {
  const began = performance.now();
  let last = began, frames = 0, longest = 0;
  const step = (at) => {
    longest = Math.max(longest, at - last);
    last = at;
    frames += 1;
    if (at - began < seconds * 1000) requestAnimationFrame(step); else told({ frames, longest });
  };
  requestAnimationFrame(step);
})"""


#: Work that takes a second or so of processor time, so that the page's own can be compared with something on any machine.
REFERENCE = "() => { let x = 0; for (let i = 0; i < 2e8; i++) x = (x * 31 + i) | 0; return x }"


def busy(session):
    """Seconds of processor time that the page's own thread has used."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return next(one["value"] for one in metrics if one["name"] == "TaskDuration")


@pytest.mark.parametrize("path", ["", "jobs"])
def test_a_long_queue_and_a_busy_trail_leave_the_page_at_leisure(crowded, tabs, path):
    tab = tabs(crowded).sign_in()
    tab.open(path)
    session = tab.context.new_cdp_session(tab.page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    with driven(crowded, EVENTS):
        tab.until("Number(document.querySelector('.pill')?.textContent) >= 10000")
        began = busy(session)
        seen = tab.page.evaluate(WATCH, WATCHED)
        used = busy(session) - began
        done = crowded.client.stats().jobs["DONE"]
    elements = tab.page.evaluate("document.querySelectorAll('*').length")
    began = busy(session)
    tab.page.evaluate(REFERENCE)
    reference = busy(session) - began

    assert done > 0
    assert elements < QUEUED / 2, "the page does not grow with the queue"
    assert used < 1.5 * reference * SOAK, f"{used:.2f} s of a processor, {reference:.2f} s for the reference"
    if SOAK > 1:  # says something on a quiet machine only
        assert seen["longest"] < 2_000, seen


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
    place = Place(home)
    heard = [[] for _ in range(10)]

    def listen(lines):
        connection = place.client.connect()
        connection.request(
            "GET", f"{PREFIX}/pulse", headers={"Authorization": f"Bearer {place.client.token}"}
        )
        answer = connection.getresponse()
        while len(lines) < 3:
            line = answer.readline()
            if line.startswith(b"data: "):
                lines.append(line)
        connection.close()

    listeners = [threading.Thread(target=listen, args=(lines,)) for lines in heard]
    for listener in listeners:
        listener.start()
    for listener in listeners:
        listener.join()
    place.close()

    assert len({line for lines in heard for line in lines}) <= len(made)
    assert len(made) == len(set(made)), "for all who listen"
