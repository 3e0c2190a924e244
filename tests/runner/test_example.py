from __future__ import annotations

import subprocess
import sys

from .plant import HERE


def test_the_agent_stops_at_its_limit_and_goes_on_where_it_was():
    run = subprocess.run(
        [sys.executable, HERE.parents[1] / "examples" / "agent.py"],
        check=True,
        capture_output=True,
        text=True,
    )

    *told, result = run.stdout.splitlines()
    assert told == [
        "BLOCKED after $1.00, 4 of 6 steps done",
        "the owner is told: cost_limit_reached",
        "DONE after $1.50, 6 of 6 steps done",
    ]
    assert '"answer": 42' in result
    assert run.stderr == ""
