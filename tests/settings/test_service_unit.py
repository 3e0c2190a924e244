"""The systemd unit that SECURITY.md offers is as tight as it says, and grants what `runner.users` needs and no more."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.scheduler.permissions import NEEDED

OPS = Path(__file__).parents[2] / "ops"
UNIT, USERS = OPS / "penstock.service", OPS / "penstock.service.d" / "users.conf"


def values(file, name):
    return re.findall(rf"^{name}=(.*)$", file.read_text(), re.MULTILINE)


def test_the_unit_has_a_user_of_its_own_and_no_capability():
    assert values(UNIT, "User") == ["penstock"]
    assert values(UNIT, "CapabilityBoundingSet") == values(UNIT, "AmbientCapabilities") == [""]
    assert values(UNIT, "NoNewPrivileges") == ["yes"]


def test_the_drop_in_grants_exactly_what_switching_users_needs():
    for name in ("AmbientCapabilities", "CapabilityBoundingSet"):
        assert set(values(USERS, name)[0].split()) == set(NEEDED.values())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_exposure_of_the_unit_is_below_three():
    command = ["systemd-analyze", "security", "--offline=true", str(UNIT)]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    [score] = re.findall(r"Overall exposure level for penstock.service: ([\d.]+)", output)

    assert float(score) < 3.0
