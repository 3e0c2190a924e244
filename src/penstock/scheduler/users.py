"""
Operating system users that jobs run as (`runner.users`): looked up once, at the start.

Whether this process may become another user is a matter of capabilities. Root has them. A service that is not root must have them as ambient
ones: the launcher is started by exec, which takes all others away.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

#: By number: to become another user, to signal its processes, and to find those that a killed warden left.
NEEDED: Final[Mapping[int, str]] = {
    5: "CAP_KILL",
    6: "CAP_SETGID",
    7: "CAP_SETUID",
    19: "CAP_SYS_PTRACE",
}


class SystemUser(NamedTuple):
    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str

    @property
    def environment(self) -> dict[str, str]:
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name, "SHELL": self.shell}


def account(name: str) -> SystemUser:
    """KeyError: this machine has no such user."""
    found = pwd.getpwnam(name)
    groups = tuple(sorted(os.getgrouplist(name, found.pw_gid)))
    home = found.pw_dir if Path(found.pw_dir).is_dir() else "/"
    return SystemUser(name, found.pw_uid, found.pw_gid, groups, home, found.pw_shell or "/bin/sh")


def missing_capabilities() -> list[str]:
    """What this process lacks to run jobs as other users."""
    field = "CapEff" if os.geteuid() == 0 else "CapAmb"
    status = dict(
        line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line
    )
    held = int(status.get(field, "0"), 16)
    return [name for number, name in NEEDED.items() if not held >> number & 1]
