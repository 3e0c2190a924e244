"""The typed client: every route, every way in, and what is sent again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from http.client import HTTPResponse

import pytest
from tests.client.conftest import LEASE
from tests.daemon import environment
from tests.waiting import LONG

from penstock import AccessDenied, Client, Unreachable
from penstock.client.client import job_of
from penstock.core.errors import BadIntent, IllegalMove, KeyConflict, NotFound
from penstock.server.routes import ROUTES
from penstock.wire import PREFIX, OutcomeReport, Scope


def submit(client, **fields):
    return client.submit("photos", "work", {"n": 1}, **fields).job_id


# Every route


def test_every_route_of_the_api_has_its_method(client, monkeypatch):
    asked = set()
    ask = client.transport.request

    def note(verb, path, *rest, **options):
        asked.add((verb, path.partition("?")[0]))
        return ask(verb, path, *rest, **options)

    monkeypatch.setattr(client.transport, "request", note)
    use_everything(client)
    with client.stream(after=0) as stream:
        next(iter(stream))

    shapes = {(route.verb, route.path) for route in ROUTES}
    used = {(verb, shape_of(path, shapes)) for verb, path in asked}
    spec = {f"{PREFIX}/{path}" for path in SPEC.split()}
    assert set() == spec - {path for _, path in used}
    assert set() == used - shapes


#: Section 11 of the specification.
SPEC = """
    queue/jobs/submit queue/jobs/submit/bulk queue/jobs queue/find queue/jobs/{job_id} queue/jobs/{job_id}/cancel
    queue/jobs/{job_id}/ack queue/jobs/{job_id}/complete queue/complete/bulk queue/exchange queue/jobs/{job_id}/retry
    queue/jobs/{job_id}/edit queue/jobs/{job_id}/explain queue/jobs/{job_id}/logs queue/dispatchable queue/claim
    lease/request lease/heartbeat lease/release lease/report pause resume kick events stats leases capacity signals
    alerts queue/count queue/cancel/bulk queue/retry/bulk queue/jobs/{job_id}/rerun
    health addons addons/edit tokens tokens/create tokens/{token_id}/revoke programs programs/attach stats/history login
"""


def shape_of(path, shapes):
    if any(path == shape for _, shape in shapes):
        return path
    for _, shape in shapes:
        head, brace, rest = shape.partition("{")
        tail = rest.partition("}")[2]
        middle = path[len(head) : len(path) - len(tail)]
        if brace and path.startswith(head) and path.endswith(tail) and "/" not in middle:
            return shape
    return path


def use_everything(client):
    first = submit(client, idempotency_key="k")
    [second, third] = [s.job_id for s in client.submit_many([job_of("photos", "work") for _ in range(2)])]
    assert first in {job.job_id for job in client.jobs(states=["QUEUED", "DISPATCHING"]).jobs}
    assert [first] == client.find(first[-8:])
    assert first == client.job(first).job_id
    assert client.explain(first).text
    client.cancel(third)
    assert isinstance(client.alerts(), list)
    fourth = client.rerun(third, payload=[1], priority=60).job_id
    assert sum(client.count(addon_id="photos").values()) == 4
    assert client.jobs(since=client.job(fourth).created_at, text="[1]").jobs[0].job_id == fourth
    assert (client.cancel_all(text="[1]").changed, client.retry_all(text="[1]").changed) == (1, 0)
    later = submit(client, earliest_start_at="2999-01-01T00:00:00Z")
    assert 70 == client.edit(later, priority=70).priority
    assert "any" == client.edit(later, run_when="any").run_when

    leases = {job.job_id: job for job in client.claim(addon_id="photos", limit=5).jobs}
    beaten = client.heartbeat(leases[first].lease_id, progress=0.5, spent=0.1, checkpoint=b"[1]")
    assert beaten.ttl_sec == LEASE
    assert client.report(leases[first].lease_id, progress=0.7).lease_id
    assert "DONE" == client.complete(first, leases[first].lease_id, {"ok": True}).state
    assert "FAILED" == client.fail(second, leases[second].lease_id, "it broke").state
    assert client.retry(second).state in ("QUEUED", "DISPATCHING")
    [again] = client.claim(addon_id="photos").jobs
    exchanged = client.exchange([OutcomeReport(lease_id=again.lease_id, state="DONE")], addon_id="photos")
    assert ["DONE"] == [ended.state for ended in exchanged.outcomes]
    assert [] == exchanged.jobs

    two_step = client.submit("visuals", "index", None).job_id
    [ready] = client.dispatchable(addon_id="visuals", wait_sec=5)
    assert two_step == ready.job_id
    lease = client.lease(two_step)
    client.ack(two_step, lease.lease_id)
    [ended] = client.complete_many([OutcomeReport(lease_id=lease.lease_id, state="DONE")])
    assert ended.problem is None
    loan = client.ask("visuals", "render", cost_units=5)
    assert loan.approved
    assert [loan.lease_id] == [lease.lease_id for lease in client.leases()]
    client.release(loan.lease_id)

    assert client.logs(first).pieces == []
    assert client.events(limit=5).events
    assert client.stats().jobs["DONE"] == 3
    assert client.capacity().capacity == 100
    assert client.addons().addons
    assert client.health().status == "ok"
    client.signals("photos", p95_ms=20)
    client.attach("indexer", [])
    assert ["indexer"] == [program.name for program in client.programs()]
    assert client.history().at is not None
    with pytest.raises(NotFound, match="no page"):
        client.login()
    assert 200 == client.set_addon("photos", weight=200).weight
    client.pause()
    client.resume()
    client.kick()
    made = client.make_token("ci", [Scope.JOBS_READ])
    assert made.token.token_id in {token.token_id for token in client.tokens()}
    client.revoke_token(made.token.token_id)


# Ways in


def test_by_the_unix_socket_its_owner_needs_no_token(scheduler, folder):
    with Client(f"unix://{folder / 'data' / 'penstock.sock'}", token="") as client:
        assert "ok" == client.health().status


def test_without_anything_said_it_finds_the_daemon_of_this_user(scheduler, folder, monkeypatch):
    for name in ("PENSTOCK_URL", "PENSTOCK_TOKEN", "PENSTOCK_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(folder / "data"))

    with Client() as client:
        assert client.url.startswith("unix:///")
        assert "ok" == client.health().status


def test_the_environment_names_address_and_token(scheduler, tmp_path, monkeypatch):
    (tmp_path / "token").write_text(scheduler.secret + "\n")
    monkeypatch.setenv("PENSTOCK_URL", scheduler.url)
    monkeypatch.setenv("PENSTOCK_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.delenv("PENSTOCK_TOKEN", raising=False)

    with Client() as client:
        assert "ok" == client.health().status


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:80", "unix://", "http://"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="must be http://host:port"):
        Client(url, token="")


# Refusals


def test_refusals_are_the_errors_of_the_library_with_their_fields(client):
    job_id = submit(client, idempotency_key="k")

    with pytest.raises(BadIntent) as bad:
        client.submit("photos", "work", None, cost_units=10, deadline_at="2001-01-01T00:00:00Z")
    with pytest.raises(KeyConflict):
        client.submit("photos", "other", None, idempotency_key="k")
    with pytest.raises(NotFound):
        client.job("01a1e376-47c2-7019-a429-7c42cf4255b8")
    client.cancel(job_id)
    with pytest.raises(IllegalMove) as illegal:
        client.retry(job_id)

    assert ["deadline_at"] == [problem["field"] for problem in bad.value.problems]
    assert (422, 409) == (bad.value.status, illegal.value.status)
    assert illegal.value.hint


def test_a_field_that_no_job_has_is_refused_before_anything_is_sent(client):
    with pytest.raises(BadIntent, match="costs is not a field of a job"):
        submit(client, costs=3)
    with pytest.raises(BadIntent, match="payload cannot be written as JSON"):
        client.submit("photos", "work", object())

    assert {} == {state: n for state, n in client.stats().jobs.items() if n}


def test_a_token_without_the_scope_and_a_wrong_token_are_different_errors(client, scheduler):
    secret = client.make_token("reader", [Scope.JOBS_READ]).secret
    with Client(scheduler.url, token=secret) as reader, pytest.raises(AccessDenied) as weak:
        reader.submit("photos", "work", None)
    with Client(scheduler.url, token="pst_0_no") as stranger, pytest.raises(AccessDenied) as wrong:
        stranger.stats()

    assert (403, 401) == (weak.value.status, wrong.value.status)


def test_without_a_scheduler_the_error_says_how_to_start_one():
    with Client("http://127.0.0.1:1", token="", retry_for=0.2) as client, pytest.raises(Unreachable) as lost:
        client.stats()

    assert "No scheduler is running" in str(lost.value)
    assert lost.value.sent is False


# What is sent again


def test_only_what_is_safe_is_sent_again_when_the_answer_is_lost(client, monkeypatch):
    tries = []

    def lose(*_, **__):
        tries.append(1)
        raise Unreachable("cut", sent=True)

    monkeypatch.setattr(client.transport, "_once", lose)
    client.retry_for = 0.2
    counts = []
    for ask in (
        lambda: submit(client),
        lambda: client.claim(),
        lambda: client.rerun("j"),
        lambda: submit(client, idempotency_key="k"),
        lambda: client.rerun("j", idempotency_key="k"),
        lambda: client.complete("j", "j.1"),
        lambda: client.stats(),
    ):
        tries.clear()
        with pytest.raises(Unreachable):
            ask()
        counts.append(len(tries))

    assert [1, 1, 1] == counts[:3]
    assert min(counts[3:]) > 1


FORKS = """
import os, sys
from penstock import Client

client = Client(sys.argv[1], token=sys.argv[2])


def address():
    client.stats()
    return client.transport._idle[-1].sock.getsockname()


first = address()
copy = os.fork()
if copy:
    os.waitpid(copy, 0)
print("parent" if copy else "copy", address() == first, flush=True)
"""


def test_a_forked_process_asks_on_connections_of_its_own(scheduler):
    command = [sys.executable, "-c", FORKS, scheduler.url, scheduler.secret]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=True, timeout=LONG
    )

    assert done.stdout.splitlines() == ["copy False", "parent True"]


def test_a_ctrl_c_while_the_last_answer_is_freed_is_not_lost(client, monkeypatch):
    close = HTTPResponse.close

    def interrupted(answer):
        monkeypatch.setattr(HTTPResponse, "close", close)
        signal.raise_signal(signal.SIGINT)
        close(answer)

    client.stats()
    monkeypatch.setattr(HTTPResponse, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.stats()


def test_many_threads_share_a_client(client):
    errors = []

    def work():
        try:
            for _ in range(10):
                client.job(submit(client, cost_units=1))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)

    assert [] == errors
    assert 80 == sum(client.stats().jobs.values())


def test_waiting_for_a_job_ends_when_it_is_settled(client):
    job_id = submit(client)
    timer = threading.Timer(0.2, client.cancel, [job_id])
    timer.start()

    job = client.wait(job_id, LONG)
    timer.join()

    assert "CANCELED" == job.state
    assert "CANCELED" == client.wait(job_id).state


def test_waiting_ends_after_its_time(client):
    job = client.wait(submit(client, earliest_start_at="2999-01-01T00:00:00Z"), 0.1)

    assert "QUEUED" == job.state


def test_a_stream_of_one_job_begins_with_its_first_event(client):
    job_id = submit(client)
    client.cancel(job_id)
    seen = []
    with client.stream(job_id=job_id) as stream:
        for event in stream:
            seen.append(event)
            if event.kind == "CANCELED":
                break

    entries = [event.n for event in seen if event.kind != "ADMITTED"]  # one entry with DISPATCHING
    assert list(range(1, len(entries) + 1)) == entries
    assert "SUBMITTED" == seen[0].kind


# What it costs


def test_the_client_loads_no_server_and_no_event_loop():
    program = (
        "import json, sys\nimport penstock.client.client\n"
        "print(json.dumps([m for m in sys.modules if m.split('.')[0] in"
        " ('asyncio', 'uvicorn', 'starlette', 'uvloop', 'apsw', 'psutil', 'structlog')]))"
    )

    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
        timeout=LONG,
    )

    assert [] == json.loads(done.stdout)
    assert PREFIX == "/api/system/scheduler"
