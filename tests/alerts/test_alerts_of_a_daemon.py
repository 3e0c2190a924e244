"""The whole way, in a real daemon: an alert that was made is delivered, whatever is killed in between."""

from __future__ import annotations

import re
import signal
import tempfile
from pathlib import Path

import pytest
from tests.daemon import Daemon
from tests.waiting import until

PAGE = Path(__file__).parents[2] / "docs" / "alerts.md"


@pytest.fixture
def genuine():
    """The receiver of the documentation."""
    names = {}
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(code, names)
    return names["genuine"]


@pytest.fixture
def folder():
    """Short: the path of a Unix socket may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="pst") as name:
        yield Path(name)


@pytest.fixture
def daemon(folder):
    made = []

    def make(*flags):
        made.append(Daemon(folder, "alerts.allow_private=true", *flags))
        return made[-1].start()

    yield make
    for one in made:
        one.close()


def spend(one):
    """80 % of what a job may cost: the owner hears of it."""
    job = one.client.submit("photos", "thumbnail", cost_limit=1_000, cost_units=1)
    lease = one.client.claim(addon_id="photos", wait_sec=20).jobs[0]
    one.client.heartbeat(lease.lease_id, spent=900)
    return job.job_id


def test_a_kill_between_the_event_and_its_delivery_loses_no_alert(daemon, receivers, genuine):
    away = receivers()
    away.close()
    one = daemon(f"alerts.webhook={away.url}")
    job_id = spend(one)
    one.end(signal.SIGKILL)
    back = receivers(away.port)
    one.start()
    until(lambda: back.seen)

    [(_, headers, body)] = back.seen
    [told] = back.told
    secret = (one.data / "webhook.secret").read_text().strip()
    assert (job_id, "cost_warning") == (told["job_id"], told["kind"])
    assert genuine(headers, body, secret)
    assert not genuine(headers, body + b" ", secret)
    assert not genuine(headers | {"Webhook-Timestamp": "1000000000"}, body, secret)
    assert secret not in one.log.read_text()


def test_a_command_that_hangs_does_not_hold_up_a_stop(daemon, folder):
    marks = folder / "marks"
    one = daemon(f"alerts.command=sh, -c, touch {marks}; sleep 100")
    spend(one)
    until(marks.exists)

    assert 0 == one.end(signal.SIGTERM)
    assert "the stop took more than" not in one.log.read_text()


def test_a_secret_that_others_can_read_stops_the_start(daemon, receiver):
    one = daemon(f"alerts.webhook={receiver.url}")
    one.end()
    (one.data / "webhook.secret").chmod(0o644)
    with pytest.raises(AssertionError, match="chmod 600"):
        one.start()
