"""
`make first-minute`: a fresh machine, from the wheel and from the sdist to a page with live jobs in two minutes.

Builds both from a fresh copy with `python -m build`, installs each with plain pip in an environment of its own,
runs `penstock up`, submits a job and sees it run on the page. `uvx` and `pipx run` start the same wheel where
they are installed. Prints the seconds from `python -m venv` to the page; exits with 1 above the limit.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.web.installing import Environment, build, fresh_copy, open_the_page
from tests.web.web_kit import chromium

LIMIT = 120.0


def main():
    browser_path = chromium()
    if browser_path is None:
        sys.exit("first-minute needs Chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="pst") as folder, sync_playwright() as playwright:
        root = Path(folder)
        dist = root / "dist"
        dist.mkdir()
        source = fresh_copy(root / "copy")
        packages = {"wheel": build("wheel", source, dist), "sdist": build("sdist", source, dist)}
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        slow = [kind for kind, file in packages.items() if visit(browser, kind, file, root / kind) > LIMIT]
        browser.close()
        for runner in tool_runs(packages["wheel"]):
            version = subprocess.run(runner, capture_output=True, text=True, check=True).stdout.strip()
            sys.stdout.write(f"{Path(runner[0]).name:6} {version}\n")
    if slow:
        sys.exit(f"longer than {LIMIT:.0f} s: {', '.join(slow)}")


def visit(browser, kind, package, folder):
    """Seconds from nothing to a running job on the page."""
    folder.mkdir()
    began = time.monotonic()
    environment = Environment(folder / "venv")
    environment.pip_install(f"{package}[jobs]")
    data = {"PENSTOCK_DATA_DIR": str(folder / "data")}
    with environment.up(**data) as link:
        words = ("submit", "--json", "--when", "any", "--", "sleep", "600")
        job = json.loads(environment.run("penstock", *words, **data).stdout)
        open_the_page(browser, link, job["job_id"])
        took = time.monotonic() - began
        environment.run("penstock", "cancel", job["job_id"], **data)
        doctor = environment.run("penstock", "doctor", **data)
    assert doctor.returncode == 0, doctor.stdout
    sys.stdout.write(f"{kind:6} a page with a running job after {took:.0f} s\n")
    return took


def tool_runs(wheel):
    """The tools that run a command without installing it, if they are here."""
    if uvx := shutil.which("uvx"):
        yield [uvx, "--from", f"{wheel}[jobs]", "penstock", "--version"]
    if pipx := shutil.which("pipx"):
        yield [pipx, "run", "--spec", f"{wheel}[jobs]", "penstock", "--version"]


if __name__ == "__main__":
    main()
