"""Penstock as a stranger gets it: built from a fresh copy of the checkout, installed by pip, started, opened."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from contextlib import contextmanager

from tests import ROOT
from tests.waiting import LONG

#: Does what a machine without npm and without a network would do.
NO_NPM = "#!/bin/sh\necho 'npm was called' >&2\nexit 1\n"


def fresh_copy(target):
    """The files that git has, or would have: no environment, and no library of the page."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():  # not deleted since
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


def build(kind, source, target, *options, **env):
    """`kind` is sdist or wheel. The file that came out."""
    before = set(target.glob("*"))
    command = [sys.executable, "-m", "build", f"--{kind}", "--outdir", str(target), *options, str(source)]
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, check=False, timeout=10 * LONG
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [made] = set(target.glob("*")) - before
    return made


def unpack(sdist, target):
    with tarfile.open(sdist) as archive:
        archive.extractall(target, filter="data")
    [folder] = target.iterdir()
    return folder


def without_npm(folder):
    """A PATH on which npm fails: a build that calls it fails too."""
    folder.mkdir()
    (folder / "npm").write_text(NO_NPM)
    (folder / "npm").chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def borrowed_packages():
    """The packages of the tests. Penstock is not among them: it is installed as editable there."""
    site = next(path for path in sys.path if path.endswith("site-packages"))
    return {"PYTHONPATH": site}


class Environment:
    """A virtual environment of its own, and nothing of the checkout."""

    def __init__(self, folder):
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=10 * LONG)

    def pip_install(self, *what):
        command = [str(self.folder / "bin" / "pip"), "install", "--quiet", *what]
        done = subprocess.run(
            command, env=self.env(), capture_output=True, text=True, check=False, timeout=10 * LONG
        )
        assert done.returncode == 0, done.stderr

    def env(self, **more):
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK", "PYTHON"))
        }
        return {**kept, "PATH": f"{self.folder / 'bin'}{os.pathsep}{kept['PATH']}", **more}

    def run(self, *command, **env):
        return subprocess.run(
            [str(self.folder / "bin" / command[0]), *command[1:]],
            cwd=self.folder, env=self.env(**env), capture_output=True, text=True, check=False, timeout=2 * LONG,
        )  # fmt: skip

    @contextmanager
    def up(self, **env):
        """`penstock up`, and the link to the page that it prints."""
        log = self.folder / "up.log"
        with log.open("wb") as errors:
            daemon = subprocess.Popen(
                [str(self.folder / "bin" / "penstock"), "up", "--port", "0", "--set", "capacity.units=90"],
                cwd=self.folder, env=self.env(**env),
                stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        try:
            greeting = daemon.stdout.readline()
            link = re.match(r"page  (\S+)", greeting)
            assert link, greeting + log.read_text()
            yield link[1]
        finally:
            daemon.terminate()
            daemon.communicate(timeout=LONG)


def open_the_page(browser, link, job_id):
    """A stranger follows the link and sees the job run. A complaint on the console is a failure."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(LONG * 1_000)
    complaints = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(link)
    page.wait_for_selector(".connection[data-state=live]")
    page.evaluate("path => { location.hash = path }", f"#/jobs/{job_id}")
    page.locator("main").get_by_text("RUNNING").first.wait_for()
    context.close()
    assert complaints == []
