"""What `pip install penstock` gives: a page that opens, and a sentence where an extra is missing."""

from __future__ import annotations

import json
import zipfile

import pytest

from penstock.web import LIBRARIES
from tests.web.installing import (
    Environment,
    borrowed_packages,
    build,
    fresh_copy,
    open_the_page,
    unpack,
    without_npm,
)

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An sdist of a fresh copy, and the wheel that a machine without npm makes of it."""
    folder = tmp_path_factory.mktemp("built")
    copy, dist = folder / "copy", folder / "dist"
    dist.mkdir()
    sdist = build("sdist", fresh_copy(copy), dist, "--no-isolation")
    unpacked = unpack(sdist, folder / "unpacked")
    wheel = build("wheel", unpacked, dist, "--no-isolation", PATH=without_npm(folder / "bin"))
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    environment = Environment(tmp_path_factory.mktemp("env") / "venv")
    environment.pip_install("--no-deps", str(built[1]))
    return environment


def test_an_sdist_has_the_libraries_of_the_page_and_its_wheel_needs_no_network(built):
    names = zipfile.ZipFile(built[1]).namelist()

    assert {f"penstock/web/static/vendor/{name}" for name in LIBRARIES} <= set(names)


def test_without_the_extra_the_command_names_it(installed):
    refused = installed.run("penstock", "up")

    assert refused.returncode == 2
    assert 'pip install "penstock[jobs]"' in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("name", ["Scheduler", "Client", "Worker", "JobState"])
def test_without_the_extra_a_name_of_the_durable_half_says_which_extra_it_needs(installed, name):
    refused = installed.run("python", "-c", f"import penstock; penstock.{name}")

    assert (
        f'penstock.{name} needs msgspec, which is not installed: pip install "penstock[jobs]"'
        in (refused.stderr.splitlines()[-1])
    )


def test_without_the_extra_pools_run(installed):
    program = "import penstock\nwith penstock.WorkerPool(1, kind='thread') as pool: print(pool.submit(int).result())"

    assert installed.run("python", "-c", program).stdout == "0\n"


def test_an_installed_penstock_shows_its_page_and_a_running_job(installed, browser, tmp_path):
    env = {"PENSTOCK_DATA_DIR": str(tmp_path / "data"), **borrowed_packages()}

    with installed.up(**env) as link:
        submitted = installed.run(
            "penstock", "submit", "--json", "--when", "any", "--", "sleep", "600", **env
        )
        open_the_page(browser, link, json.loads(submitted.stdout)["job_id"])
        place = installed.run("python", "-c", "import penstock; print(penstock.__file__)", **env).stdout
        canceled = installed.run("penstock", "cancel", "last", **env)

    assert place.startswith(str(installed.folder))
    assert canceled.returncode == 0


def test_doctor_notices_that_the_page_has_no_libraries(installed, tmp_path):
    [file] = installed.folder.glob("lib/*/site-packages/penstock/web/static/vendor/hooks.js")
    env = {"PENSTOCK_DATA_DIR": str(tmp_path / "data"), **borrowed_packages()}

    whole = installed.run("penstock", "doctor", **env)
    file.rename(tmp_path / "hooks.js")
    broken = installed.run("penstock", "doctor", **env)
    (tmp_path / "hooks.js").rename(file)

    assert "the page and its libraries are here" in whole.stdout
    assert broken.returncode == 1
    assert "the scheduler serves no page: its libraries are missing (hooks.js)" in broken.stdout
