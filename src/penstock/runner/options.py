"""What the runner goes by: what settings are read into."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.core.tracker import Graces
from penstock.engine.users import SystemUser
from penstock.runner.output import OutputLimits
from penstock.runner.payload import Functions

__all__ = ["RunnerOptions"]

#: Of the scheduler's own environment, what a job may see. Everything else, its secrets among them, stays behind.
PASSED_ON = ("HOME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    #: How many commands, and how many functions, may run at once, whatever the units say. A function takes a warm worker.
    slots: int = 64
    workers: int = field(default_factory=lambda: 2 * (os.cpu_count() or 1))
    graces: Graces = field(default_factory=Graces)
    #: For what a job leaves running when it has ended by itself: from SIGTERM to SIGKILL.
    stragglers_sec: float = 1.0
    output: OutputLimits = field(default_factory=OutputLimits)
    functions: Functions = field(default_factory=Functions)
    #: Which Python runs functions, where it looks for modules first, and where it works.
    python: str = sys.executable
    path: tuple[str, ...] = ()
    cwd: str = "/"
    #: Warm workers that are kept when there is nothing to do, and for how long the others are.
    warm: int = 2
    idle_sec: float = 60.0
    #: Of short functions so much work is claimed before a worker is free for it: longer than a commit takes, shorter than anybody notices. 0: none.
    ahead_sec: float = 0.02
    #: A worker is replaced after so many jobs, so that what they leak is given back.
    jobs_per_worker: int = 10_000
    #: Further names of variables that jobs may see; a trailing * stands for any ending.
    passed_on: tuple[str, ...] = ("LC_*",)
    #: As whom the jobs of an addon run, "*" for all others; an addon that is not found runs as we do.
    users: Mapping[str, SystemUser] = field(default_factory=dict)
    #: Where the HTTP API is, for jobs that would rather use it.
    url: str | None = None

    def user_of(self, addon_id: str) -> SystemUser | None:
        """None: our own."""
        user = self.users.get(addon_id) or self.users.get("*")
        return None if user is None or user.uid == os.getuid() else user

    def environment(self, user: SystemUser | None = None) -> dict[str, str]:
        """Of a job of this user. Our TMPDIR may be a place that only we can enter."""
        ours = {name: value for name, value in os.environ.items() if self._passes(name)}
        if user is None:
            return ours
        ours.pop("TMPDIR", None)
        return ours | user.environment

    def _passes(self, name: str) -> bool:
        if name in PASSED_ON or name in self.passed_on:
            return True
        return any(word.endswith("*") and name.startswith(word[:-1]) for word in self.passed_on)
