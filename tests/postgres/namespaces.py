"""
Machines of a network that is all in the kernel: a hub where the server listens, and hosts that a cable joins to it.

Each is a network namespace that lives as long as one process and goes with it, so nothing stays behind, whatever is killed. A cable
that is pulled drops packets without a word, as a real one does: both ends go on believing in their connections.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from pathlib import Path
from time import monotonic, sleep

SERVER = "10.77.0.1"
PR_SET_PDEATHSIG = 1


class Refused(Exception):
    """Why there can be no such network here."""


class Hub:
    def __init__(self):
        missing = [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]
        if missing or os.getuid() != 0:
            raise Refused(f"needs root and {', '.join(missing) or 'ip, nsenter, unshare'}")
        self._process = isolated(["sleep", "infinity"])
        self._process.stdin.close()
        self.within = ["nsenter", "-t", str(self._process.pid), "-n", "--"]
        try:
            self._ip("link set lo up")
            self._ip(f"addr add {SERVER}/32 dev lo")
        except BaseException:
            self.close()
            raise

    def join(self, number, pid):
        """A cable to the namespace of that process."""
        self._ip(f"link add h{number} type veth peer name eth0 netns {pid}")
        self._ip(f"addr add 10.77.{number}.1/30 dev h{number}")
        self._ip(f"link set h{number} up")
        for words in (
            f"addr add 10.77.{number}.2/30 dev eth0",
            "link set eth0 up",
            f"route add default via 10.77.{number}.1",
        ):
            run(["nsenter", "-t", str(pid), "-n", "--", "ip", *words.split()])

    def pull(self, number):
        self._ip(f"link set h{number} down")

    def plug(self, number):
        self._ip(f"link set h{number} up")

    def close(self):
        self._process.kill()
        self._process.wait()

    def _ip(self, words):
        run([*self.within, "ip", *words.split()])


def isolated(command):
    """Started in a network namespace of its own, once it has one."""
    process = subprocess.Popen(
        ["unshare", "-n", "--", *command],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # noqa: PLW1509 - nothing else is done there
    )
    here, until = Path("/proc/self/ns/net").readlink(), monotonic() + 10
    while Path(f"/proc/{process.pid}/ns/net").readlink() == here:
        if process.poll() is not None or monotonic() > until:
            process.kill()
            raise Refused("the kernel gives us no network namespace")
        sleep(0.01)
    return process


def run(command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(f"{' '.join(command)}: {done.stderr.strip()}")
