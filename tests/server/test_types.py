"""What was learned about job types, over HTTP: for people, for programs, for Prometheus."""

from __future__ import annotations

import pytest
from tests.server.http_kit import ServerKit


@pytest.fixture
def kit(tmp_path):
    made = ServerKit(tmp_path, start=False)
    yield made
    made.close()


def learned(kit, *addons):
    for addon_id in addons:
        kit.client.submit(addon_id=addon_id, job_type="mail", tags=["size:small"])
        [job] = kit.client.claim(addon_id=addon_id)
        answer = kit.client.post(
            f"/queue/jobs/{job['job_id']}/complete", {"lease_id": job["lease_id"], "state": "DONE"}
        )
        assert answer.status == 200, answer
    kit.service.learner.changed.set()
    kit.service.learner.step(kit.store.now())


def test_what_was_learned_is_shown_by_type_and_size(kit):
    before = kit.client.get("/types").json
    learned(kit, "ours")
    types = kit.client.get("/types").json["types"]

    assert before == {"types": []}
    assert [(t["addon_id"], t["job_type"], t["size"], t["attempts"]) for t in types] == [
        ("ours", "mail", "", 1),
        ("ours", "mail", "small", 1),
    ]
    assert types[0]["duration_sec"] > 0
    assert (types[0]["predictions"], types[0]["coverage"], types[0]["memory_bytes"]) == (0, None, None)


def test_a_bound_token_sees_the_types_of_its_own_addon(kit):
    learned(kit, "ours", "theirs")
    types = kit.client.mint(addon_id="ours").get("/types").json["types"]

    assert {t["addon_id"] for t in types} == {"ours"}


def test_prometheus_gets_types_without_sizes(kit):
    learned(kit, "ours")
    shown = kit.client.send("GET", "/metrics", prefix="").content.decode()

    assert 'penstock_type_duration_seconds{addon="ours",type="mail"}' in shown
    assert 'penstock_predictions{addon="ours",type="mail"} 0.0' in shown
    assert "small" not in shown
