"""The daemon as users have it: a process of its own on a data directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import cached_property

from penstock import Client
from tests import SOURCES
from tests.waiting import LONG, until


def environment(**more):
    return {**os.environ, "PYTHONPATH": str(SOURCES), "PYTHONDONTWRITEBYTECODE": "", **more}


class Daemon:
    """One data directory and the daemon on it, if it runs. Of two flags for one setting the last counts."""

    FLAGS = (
        "server.listen=127.0.0.1:0",
        "capacity.units=100",
        "retry.crash=0s,0s,0s,0s,0s",
        "log.format=json",
    )

    def __init__(self, folder, *flags):
        self.data, self.log = folder / "data", folder / "daemon.log"
        self.flags = [f"data_dir={self.data}", *self.FLAGS, *flags]
        self.process, self.url = None, ""

    def start(self, *more):
        """On the same port as before, so that whoever talks to it finds it again."""
        flags = [*self.flags, *([f"server.listen={self.url.rpartition('/')[2]}"] if self.url else [])]
        command = [sys.executable, "-m", "penstock.daemon", *more, *(f"--set={flag}" for flag in flags)]
        with self.log.open("ab") as log:
            # On SIGABRT it logs what each of its threads does.
            told = environment(PYTHONFAULTHANDLER="1")
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=told)
        until(lambda: self.process.poll() is not None or self.told().get("pid") == self.process.pid)
        assert self.process.poll() is None, self.log.read_text()
        self.url = self.told()["url"]
        return self

    def told(self):
        try:
            return json.loads((self.data / "daemon.json").read_text())
        except (OSError, ValueError):
            return {}

    @property
    def token(self):
        return (self.data / "token").read_text().strip()

    @cached_property
    def client(self):
        return Client(self.url, token=self.token, retry_for=LONG)

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(LONG)

    def close(self):
        if self.process is not None and self.process.poll() is None:
            assert self.end() == 0, self.log.read_text()
        if "client" in self.__dict__:
            self.client.close()
