"""Jobs that the scheduler runs itself, over HTTP: who may submit one, and what it printed."""

from __future__ import annotations

import json
import sys

import pytest
from http_kit import Client, ServerKit

from penstock.runner.folder import RunnerFolder
from penstock.runner.payload import RunnerOptions
from penstock.runner.runner import Runner


def command(*argv, **more):
    return {"addon_id": "a", "job_type": "penstock.command", "payload": {"argv": list(argv)} | more}


SCRIPT = {"addon_id": "a", "job_type": "penstock.shell", "payload": {"script": "echo hello"}}


@pytest.mark.parametrize(
    ("job", "scope"), [(command("/bin/true"), "jobs:submit:command"), (SCRIPT, "jobs:submit:shell")]
)
def test_a_command_needs_a_scope_of_its_own_and_a_script_another(kit, job, scope):
    others = ["jobs:submit:registered", "jobs:submit:command", "jobs:submit:shell", "jobs:read"]
    weak = kit.client.mint(scopes=[other for other in others if other != scope])
    before = kit.store.newest()

    for path, body in [("/queue/jobs/submit", job), ("/queue/jobs/submit/bulk", {"jobs": [job]})]:
        answer = weak.post(path, body)
        assert (answer.status, scope in answer.json["detail"]) == (403, True)
    assert kit.store.newest() == before
    assert kit.client.mint(scopes=others).post("/queue/jobs/submit", job).status == 200


@pytest.mark.parametrize(
    ("job", "field"),
    [
        (command(), "payload.argv"),
        (command("/bin/true", shell=True), "payload.shell"),
        (command("/bin/true", env={"PENSTOCK_TOKEN": "x"}), "payload.env"),
        (command("/bin/true", cwd="relative"), "payload.cwd"),
        (SCRIPT | {"payload": {"script": " "}}, "payload.script"),
        (SCRIPT | {"payload": None}, "payload"),
        ({"addon_id": "a", "job_type": "penstock.function", "payload": {"function": "os:system"}}, "payload.function"),
    ],
)  # fmt: skip
def test_what_the_runner_would_refuse_is_refused_at_submit(client, job, field):
    answer = client.post("/queue/jobs/submit", job)
    assert (answer.status, answer.fields) == (422, [field])

    bulk = client.post("/queue/jobs/submit/bulk", {"jobs": [{"addon_id": "a", "job_type": "t"}, job]})
    assert (bulk.status, bulk.fields) == (422, [f"jobs[1].{field}"])


def test_a_job_that_never_ran_has_printed_nothing(client):
    job_id = client.submit()

    received = client.get(f"/queue/jobs/{job_id}/logs").json
    assert (received["pieces"], received["attempt"], received["over"]) == ([], 0, False)
    assert client.get(f"/queue/jobs/{job_id}/logs?attempt=1").status == 404
    client.post(f"/queue/jobs/{job_id}/cancel")
    assert client.get(f"/queue/jobs/{job_id}/logs").json["over"] is True


SPEAKS = """
import json, os, urllib.error, urllib.request
def ask(path, body=None):
    request = urllib.request.Request(os.environ["PENSTOCK_URL"] + "/api/system/scheduler/" + path,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": "Bearer " + os.environ["PENSTOCK_JOB_TOKEN"], "Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
say = lambda **body: ask("run/self", body)
print(json.dumps([
    say(op="checkpoint", checkpoint={"page": 7}), say(op="checkpoint"), say(op="should_yield"), say(op="spend", amount=0.25),
    say(op="progress", progress=0.5), say(op="log", message="half way"), say(op="spend")[0], ask("stats")[0], ask("queue/claim", {})[0],
]))
print(os.environ["PENSTOCK_JOB_TOKEN"])
"""


def test_a_run_speaks_for_itself_over_http_and_its_token_is_good_for_nothing_else(tmp_path):
    runs = RunnerFolder(tmp_path)
    kit = ServerKit(tmp_path, output=runs.output)
    runner = Runner(kit.service, runs, RunnerOptions(url=kit.server.url)).start()
    kit.server.set_runner(runner)
    try:
        client = kit.client
        job_id = client.post("/queue/jobs/submit", command(sys.executable, "-c", SPEAKS)).json["job_id"]
        job = client.get(f"/queue/jobs/{job_id}?wait_sec=30").json
        pieces = client.get(f"/queue/jobs/{job_id}/logs").json["pieces"]
        lines = "".join(piece["text"] for piece in pieces if piece["stream"] == "stdout").splitlines()
        saved, read, should, spent, *_, without, stats, claim = json.loads(lines[0])
    finally:
        runner.stop(5)
        late = Client(kit.server, lines[1])
        refused = late.post("/run/self", {"op": "should_yield"}).status
        kit.close()

    assert (job["state"], job["checkpoint"], job["spent"]) == ("DONE", {"page": 7}, 0.25)
    assert (saved[0], read[1]["checkpoint"], should[1]["yield"], spent[0]) == (200, {"page": 7}, False, 200)
    assert "half way" in "".join(piece["text"] for piece in pieces if piece["stream"] == "log")
    assert (without, stats, claim, refused) == (422, 403, 403, 401)


def test_only_a_runs_own_token_speaks_for_it(client):
    assert client.post("/run/self", {"op": "should_yield"}).status == 403


def test_the_output_of_a_command_is_followed_to_its_end(tmp_path):
    runs = RunnerFolder(tmp_path)
    kit = ServerKit(tmp_path, output=runs.output)
    runner = Runner(kit.service, runs).start()
    try:
        client = kit.client
        script = "echo one; sleep 0.3; echo two >&2; echo h\\303\\251"
        job = SCRIPT | {"payload": {"script": script}}
        job_id = client.post("/queue/jobs/submit", job).json["job_id"]
        pieces, offset, over = [], 0, False
        while not over:
            received = client.get(f"/queue/jobs/{job_id}/logs?offset={offset}&wait_sec=10").json
            pieces += [(piece["stream"], piece["text"]) for piece in received["pieces"]]
            offset, over = received["next"], received["over"] and not received["pieces"]

        assert "".join(text for stream, text in pieces if stream == "stdout").splitlines()[0] == "one"
        assert "".join(text for stream, text in pieces if stream == "stderr") == "two\n"
        assert client.get(f"/queue/jobs/{job_id}?wait_sec=10").json["state"] == "DONE"
    finally:
        runner.stop(5)
        kit.close()
