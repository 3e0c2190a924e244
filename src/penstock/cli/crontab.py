"""
Reads a crontab file: comments, variables, `@daily` and the like, and command lines for the shell.

If a line cannot be converted, it is reported with its number and no line is imported: half a crontab that
runs here while the other half runs nowhere is worse than an error.
"""

from __future__ import annotations

import pwd
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from penstock.core.jobs.moments import CRON_WORDS, cron_problem, zone_problem

_VARIABLE: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)")
_SHELL: Final = "/bin/sh"


@dataclass
class CrontabEntry:
    line: int
    cron: str
    command: str
    zone: str | None
    env: dict[str, str] = field(default_factory=dict)

    def name(self, prefix: str) -> str:
        """The name of the schedule: the program and the line number, such as `backup.sh-12`."""
        words = [word for word in self.command.split() if "=" not in word] or ["job"]
        program = re.sub(r"[^A-Za-z0-9_.-]+", "-", words[0].rsplit("/", 1)[-1]).strip("-.") or "job"
        return f"{prefix}{program[:40]}-{self.line}"


@dataclass
class Crontab:
    entries: list[CrontabEntry] = field(default_factory=list)
    #: Lines that cannot be converted: the number and the reason.
    problems: list[tuple[int, str]] = field(default_factory=list)
    #: Lines that have no meaning here and are left out.
    notes: list[tuple[int, str]] = field(default_factory=list)


def read_crontab(text: str) -> Crontab:
    crontab, env, zone = Crontab(), dict[str, str](), None
    for number, line in _lines(text):
        variable = _VARIABLE.fullmatch(line)
        if variable is not None:
            name, value = variable[1], _unquoted(variable[2].strip())
            if name in ("CRON_TZ", "TZ"):
                zone = value
                if zone_problem(value) is not None:
                    crontab.problems.append((number, f"{name} {value!r} is not a time zone"))
            elif name == "MAILTO":
                crontab.notes.append(
                    (number, "MAILTO is ignored: `penstock logs` has the output of each job")
                )
            else:
                env[name] = value
            continue
        try:
            cron, command = _split(line)
        except ValueError as error:
            crontab.problems.append((number, str(error)))
            continue
        crontab.entries.append(CrontabEntry(number, cron, command, zone, dict(env)))
    return crontab


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.split("\n"), 1):  # a command may contain other line separators
        if (stripped := line.strip()) and not stripped.startswith("#"):
            yield number, stripped


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _split(line: str) -> tuple[str, str]:
    """
    The cron expression and the command of a line. Raises ValueError with the reason if it cannot be
    converted.
    """
    count = 1 if line.startswith("@") else 5
    words = line.split(None, count)
    if count == 1 and words[0].lower() == "@reboot":
        raise ValueError("@reboot is not a time: start the program with the machine, as a service")
    if count == 1 and words[0].lower() not in CRON_WORDS:
        raise ValueError(f"{words[0]} is not one of {', '.join(CRON_WORDS)}")
    if len(words) <= count:
        raise ValueError("a line is five fields (or @daily and the like) and a command")
    cron, command = " ".join(words[:count]), words[count]
    problem = cron_problem(cron)
    if problem is not None:
        raise ValueError(f"{cron!r} {problem}")
    user, *rest = command.split(None, 1)
    if rest and _is_user(user) and shutil.which(user) is None:
        raise ValueError(f"its sixth field is the user {user}, as in /etc/crontab: take the user out")
    if re.search(r"(?<!\\)%", command):
        raise ValueError("an unescaped % gives the command an input: write the input into a file")
    return cron, command.replace("\\%", "%")


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except (KeyError, ValueError):
        return False
    return True


def shell_payload(entry: CrontabEntry, cwd: str) -> tuple[str, dict[str, object]]:
    """The job type and the payload of the command line, for the shell that the crontab names."""
    env = {name: value for name, value in entry.env.items() if name != "SHELL"}
    place: dict[str, object] = {"cwd": entry.env.get("HOME", cwd)} | ({"env": env} if env else {})
    shell = entry.env.get("SHELL", _SHELL)
    if shell == _SHELL:
        return "penstock.shell", {"script": entry.command, **place}
    return "penstock.command", {"argv": [shell, "-c", entry.command], **place}
