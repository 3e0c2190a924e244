"""
`penstock service`: what it would do, and what it does to the tree of another system.

No test machine can be expected to have a systemd that runs, so the real systemctl enables the unit in an image (`--root`), and
the steps for a machine that runs are looked at by --dry-run. `make service` boots a systemd and runs the service for real.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest
from tests import ROOT, SOURCES

UNITS = SOURCES / "penstock" / "cli" / "units"
needs_systemd = pytest.mark.skipif(shutil.which("systemctl") is None, reason="needs systemctl")


@pytest.fixture
def penstock(tmp_path):
    def run(*words):
        return subprocess.run(
            [sys.executable, "-m", "penstock", "service", *words],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(SOURCES)},
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip

    return run


def test_the_units_of_the_package_are_those_that_the_repository_shows():
    assert (UNITS / "penstock.service").read_text() == (ROOT / "ops" / "penstock.service").read_text()
    assert (UNITS / "users.conf").read_text() == (
        ROOT / "ops" / "penstock.service.d" / "users.conf"
    ).read_text()


def test_a_dry_run_prints_the_unit_and_the_steps_and_changes_nothing(penstock, tmp_path):
    done = penstock("install", "--dry-run")

    assert f"ExecStart={sys.executable} -m penstock.daemon" in done.stdout
    assert f"would write {tmp_path}/.config/systemd/user/penstock.service" in done.stdout
    assert "would run systemctl --user enable penstock.service" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_for_the_machine_needs_no_root_and_starts_with_the_account(penstock):
    steps = json.loads(penstock("install", "--system", "--users", "--dry-run", "--json").stdout)["steps"]

    assert steps == [
        "write /etc/sysusers.d/penstock.conf",
        "run systemd-sysusers /etc/sysusers.d/penstock.conf",
        "write /etc/systemd/system/penstock.service",
        "write /etc/systemd/system/penstock.service.d/users.conf",
        "run systemctl daemon-reload",
        "run systemctl enable penstock.service",
        "run systemctl restart penstock.service",
    ]


@needs_systemd
def test_install_and_remove_in_an_image(penstock, tmp_path):
    image = tmp_path / "image"
    wanted = image / "etc/systemd/system/multi-user.target.wants/penstock.service"

    installed = penstock("install", "--system", "--root", str(image))
    unit = (image / "etc/systemd/system/penstock.service").read_text()
    enabled = wanted.is_symlink()
    removed = penstock("remove", "--system", "--root", str(image))

    assert installed.returncode == 0, installed.stderr
    assert enabled
    assert f"ExecStart={sys.executable} -m penstock.daemon" in unit
    assert "User=penstock" in unit
    assert removed.returncode == 0, removed.stderr
    assert not wanted.is_symlink()
    assert "kept  jobs and tokens in /var/lib/penstock" in removed.stdout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_unit_that_is_written_is_valid_and_its_exposure_is_below_three(penstock, tmp_path):
    image = tmp_path / "image"
    penstock("install", "--system", "--root", str(image))
    unit = str(image / "etc/systemd/system/penstock.service")

    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", unit], capture_output=True, text=True, check=False
    )
    [score] = re.findall(r"Overall exposure level for penstock.service: ([\d.]+)", rated.stdout)

    assert float(score) < 3.0


def test_status_says_that_nothing_is_installed_and_how_to_install(penstock):
    done = penstock("status")

    assert done.returncode == 3
    assert "`penstock service install` writes it" in done.stdout
    assert json.loads(penstock("status", "--json").stdout)["installed"] is False


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("install", "--users"), "--users needs --system"),
        (("install", "--root", "/tmp/x"), "--root needs --system"),
        (("remove",), "so there is nothing to remove"),
    ],
)
def test_a_wrong_request_is_refused_with_its_reason(penstock, words, said):
    done = penstock(*words)

    assert done.returncode != 0
    assert said in done.stderr + done.stdout
