from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from typing import NamedTuple
from unittest import mock

import pytest
from tests.waiting import until

from penstock.cli.main import main

PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


class Shell:
    """Runs `penstock` commands against a scheduler of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("PENSTOCK") or name == "PENSTOCK_SOAK"
        } | {"PENSTOCK_DATA_DIR": str(folder), "COLUMNS": "120", "HOME": str(folder)}
        self.daemon = None

    def up(self, *more):
        with (self.folder / "up.log").open("ab") as log:
            self.daemon = subprocess.Popen(
                [*PENSTOCK, "up", "--port", "0", "--set", "capacity.units=90", *more],
                env=self.env,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self.greeting = self.daemon.stdout.readline().decode()
        assert self.greeting, (self.folder / "up.log").read_text()
        return self

    def down(self):
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.send_signal(signal.SIGTERM)
            try:
                self.daemon.wait(40)
            except subprocess.TimeoutExpired:
                self.daemon.kill()
                self.daemon.wait()
        if self.daemon is not None:
            self.daemon.stdout.close()

    def __call__(self, *words, stdin=""):
        """Run a verb in this process: starting an interpreter costs more than most verbs. The scheduler is another process."""
        out, err = io.StringIO(), io.StringIO()
        with (
            mock.patch.dict(os.environ, self.env, clear=True),
            mock.patch.object(sys, "argv", ["penstock", *words]),
            mock.patch.object(sys, "stdin", io.StringIO(stdin)),
        ):
            with (
                contextlib.chdir(self.folder),
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
            ):
                try:
                    main()
                except SystemExit as ended:
                    code = ended.code
        return Done(code, out.getvalue(), err.getvalue())

    def answer(self, *words):
        """The JSON that a verb prints."""
        done = self("--json", *words)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def submit(self, *command):
        done = self("submit", "--", *command)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, job_id):
        return self.answer("show", job_id)

    def state(self, job_id):
        return self.job(job_id)["state"]

    def until(self, state, job_id):
        until(lambda: self.state(job_id) == state, what=f"{state} of {job_id}")


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    folder.chmod(0o700)
    shell = Shell(folder).up()
    yield shell
    shell.down()


@pytest.fixture
def alone(tmp_path):
    """No scheduler anywhere."""
    tmp_path.chmod(0o700)
    shell = Shell(tmp_path)
    yield shell
    shell.down()
