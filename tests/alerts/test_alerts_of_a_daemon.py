"""The whole way, in a real daemon: an alert that was made is delivered, whatever is killed in between."""

from __future__ import annotations

import re
import signal

import pytest
from tests import ROOT
from tests.waiting import until

PAGE = ROOT / "docs" / "alerts.md"
PRIVATE = "alerts.allow_private=true"  # the receivers are on this machine


@pytest.fixture
def genuine():
    """The receiver of the documentation."""
    names = {}
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(code, names)
    return names["genuine"]


def spend(one):
    """80 % of what a job may cost: the owner hears of it."""
    job = one.client.submit("photos", "thumbnail", cost_limit=1_000, cost_units=1)
    lease = one.client.claim(addon_id="photos", wait_sec=20).jobs[0]
    one.client.heartbeat(lease.lease_id, spent=900)
    return job.job_id


def test_a_kill_between_the_event_and_its_delivery_loses_no_alert(daemon, receivers, genuine):
    away = receivers()
    away.close()
    one = daemon(PRIVATE, f"alerts.webhook={away.url}")
    job_id = spend(one)
    one.end(signal.SIGKILL)
    back = receivers(away.port)
    one.start()
    until(lambda: back.seen)

    [(_, headers, body)] = back.seen
    [message] = back.received
    secret = (one.data / "webhook.secret").read_text().strip()
    assert (job_id, "cost_warning") == (message["job_id"], message["kind"])
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
    one = daemon(PRIVATE, f"alerts.webhook={receiver.url}")
    one.end()
    (one.data / "webhook.secret").chmod(0o644)
    with pytest.raises(AssertionError, match="chmod 600"):
        one.start()
