"""
Drives the API by its own description: `make fuzz`, or with few examples as a part of the tests.

    python tests/server/fuzz.py [examples per operation]

The server is real, on a loopback port, with jobs in every state, so that ids can be met. Waits are cut short; the stream is left out, for it never ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from http_kit import ServerKit

from penstock.server.app import RequestLimits

#: Left out: `positive_data_acceptance`, because what a description can say is not all that must hold (a deadline that has passed, a
#: state that has no such move), and `use_after_free` and `ensure_resource_availability`, which take an id that a POST answers for one that a DELETE would end.
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,response_schema_conformance,negative_data_rejection,ignored_auth,unsupported_method,missing_required_header"


ALL_PHASES = "examples,coverage,fuzzing,stateful"


def fuzz(folder: Path, examples: int, *, phases: str = ALL_PHASES, paths: str = "") -> tuple[int, str]:
    kit = ServerKit(folder, limits=RequestLimits(longest_wait_sec=0.02))
    try:
        _furnish(kit.client)
        description = folder / "openapi.json"
        description.write_text(json.dumps(kit.client.get("/openapi.json").json))
        command = [
            sys.executable, "-m", "schemathesis.cli", "run", str(description), "--url", f"http://127.0.0.1:{kit.server.port}",
            "-H", f"Authorization: Bearer {kit.client.token}", "--checks", CHECKS, "--phases", phases, "-n", str(examples),
            "--seed", "1", "--exclude-path-regex", "/(events/stream|stats/stream)$", "--suppress-health-check", "all", "--no-color",
            "--generation-database", "none", "--request-timeout", "20", "--continue-on-failure",
        ]  # fmt: skip
        if paths:
            command += ["--include-path-regex", paths]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        return done.returncode, done.stdout + done.stderr
    finally:
        kit.close()


def _furnish(client) -> None:
    """One job of each kind to stumble over."""
    for _ in range(5):
        client.submit(cost_units=5)
    for job in client.claim(limit=3, wait_sec=5)[:2]:
        outcome = {"lease_id": job["lease_id"], "state": "FAILED", "error": "on purpose"}
        client.post(f"/queue/jobs/{job['job_id']}/complete", outcome)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        code, received = fuzz(Path(scratch), int(sys.argv[1]) if len(sys.argv) > 1 else 100)
    print(received)  # noqa: T201 - a command for people
    sys.exit(code)
