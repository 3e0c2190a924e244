"""The payloads of the runner's jobs, checked before anything is started, and the options of the runner.

There are three job types: `penstock.command` (a list of arguments, without a shell), `penstock.shell` (a
script for /bin/sh; a type of its own, so that a token can allow one and not the other), `penstock.function`
(a Python function by name). A payload is accepted whole or refused with the name of the wrong field. Unknown
fields are refused too: a misspelt limit would otherwise have no effect.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from penstock.core.errors import BadIntent
from penstock.core.jobs.tracker import Graces
from penstock.core.text import parsed
from penstock.runner.output import OutputLimits
from penstock.runner.warden import LIMITS
from penstock.scheduler.permissions import SystemUser

COMMAND: Final = "penstock.command"
SHELL: Final = "penstock.shell"
FUNCTION: Final = "penstock.function"
JOB_TYPES: Final = frozenset({COMMAND, SHELL, FUNCTION})

_PLACE_FIELDS: Final = ("cwd", "env", "stdin", "limits", "nice", "listens")
_MOST_ARGUMENTS: Final = 131_072  # bytes
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MODULE: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_NAME: Final = re.compile(r"[A-Za-z]\w*")  # no dot to walk along, no underscore to begin with


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandPayload:
    argv: tuple[str, ...]
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: str | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    nice: int = 0
    #: The command calls `penstock job should-yield`, so it gets time for that before SIGTERM.
    listens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionPayload:
    function: str  # module:name
    #: Only `module:*` allows it: the worker refuses a name that the module has merely imported.
    by_star: bool = False
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    #: A function with limits gets a worker of its own, because a limit cannot be raised again.
    limits: Mapping[str, int] = field(default_factory=dict)


Work: TypeAlias = CommandPayload | FunctionPayload


@dataclass(frozen=True, slots=True)
class Functions:
    """
    The functions that may run: registered names and import paths (`shop.jobs:index`; `shop.jobs:*` means all
    names in the module's `__all__`, or without one all functions that it defines). By default there are none.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    paths: Collection[str] = ()

    def find(self, name_or_path: str) -> tuple[str, bool]:
        """The import path of a function, and whether only a `module:*` allows it."""
        path = self.names.get(name_or_path, name_or_path)
        module, colon, name = path.partition(":")
        if not colon or not _MODULE.fullmatch(module) or not _NAME.fullmatch(name):
            raise _bad("function", f"must be a registered name or module:name, not {name_or_path!r:.100}")
        by_name = name_or_path in self.names or path in self.paths
        if not by_name and f"{module}:*" not in self.paths:
            raise _bad(
                "function",
                f"{name_or_path!r:.100} is not among the functions that may run here; add it to the settings",
            )
        return path, not by_name


def read(job_type: str, payload: str, functions: Functions) -> Work:
    try:
        fields = parsed(payload)
    except (ValueError, RecursionError) as error:
        raise _bad("payload", f"is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise _bad("payload", "must be a JSON object")
    match job_type:
        case "penstock.command":
            _only(fields, "argv", *_PLACE_FIELDS)
            return CommandPayload(argv=_argv(fields.get("argv")), **_place(fields))
        case "penstock.shell":
            _only(fields, "script", *_PLACE_FIELDS)
            script = fields.get("script")
            if not isinstance(script, str) or not script.strip():
                raise _bad("script", "must be a text that is not empty")
            return CommandPayload(argv=_argv(["/bin/sh", "-c", script]), **_place(fields))
        case "penstock.function":
            return _function(fields, functions)
        case _:
            raise _bad("job_type", f"must be one of {', '.join(sorted(JOB_TYPES))}")


def _function(fields: dict[str, Any], functions: Functions) -> FunctionPayload:
    _only(fields, "function", "args", "kwargs", "limits")
    name, args, kwargs = fields.get("function"), fields.get("args", []), fields.get("kwargs", {})
    if not isinstance(name, str):
        raise _bad("function", "must be a registered name or module:name")
    if not isinstance(args, list):
        raise _bad("args", "must be a list")
    if not isinstance(kwargs, dict):
        raise _bad("kwargs", "must be an object")
    path, by_star = functions.find(name)
    return FunctionPayload(
        function=path,
        by_star=by_star,
        args=tuple(args),
        kwargs=kwargs,
        limits=_limits(fields.get("limits")),
    )


def _place(fields: dict[str, Any]) -> dict[str, Any]:
    cwd, stdin, nice = fields.get("cwd"), fields.get("stdin"), fields.get("nice", 0)
    if cwd is not None and (not isinstance(cwd, str) or not cwd.startswith("/") or "\0" in cwd):
        raise _bad("cwd", "must be an absolute path")
    if stdin is not None and not isinstance(stdin, str):
        raise _bad("stdin", "must be a text")
    if type(nice) is not int or not 0 <= nice <= 19:
        raise _bad("nice", "must be 0..19")
    if not isinstance(fields.get("listens", False), bool):
        raise _bad("listens", "must be true or false")
    return {
        "cwd": cwd,
        "env": _env(fields.get("env")),
        "stdin": stdin,
        "limits": _limits(fields.get("limits")),
        "nice": nice,
        "listens": fields.get("listens", False),
    }


def _argv(argv: Any) -> tuple[str, ...]:
    if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
        raise _bad("argv", "must be a list of texts, the program first")
    if not argv[0] or any("\0" in word for word in argv):
        raise _bad("argv", "must name a program, and no argument may hold a NUL")
    if sum(len(word.encode(errors="surrogatepass")) + 1 for word in argv) > _MOST_ARGUMENTS:
        raise _bad(
            "argv", f"must be at most {_MOST_ARGUMENTS} bytes in all; hand more over as stdin or a file"
        )
    return tuple(argv)


def _env(env: Any) -> dict[str, str]:
    if env is None:
        return {}
    if not isinstance(env, dict):
        raise _bad("env", "must be an object of texts")
    for name, value in env.items():
        if not _VARIABLE.fullmatch(name):
            raise _bad("env", f"{name!r:.60} is not a name for a variable")
        if name.startswith("PENSTOCK_"):
            raise _bad("env", f"{name} is reserved for the scheduler")
        if not isinstance(value, str) or "\0" in value:
            raise _bad("env", f"{name} must be a text without NUL")
    return env


def _limits(limits: Any) -> dict[str, int]:
    if limits is None:
        return {}
    if not isinstance(limits, dict):
        raise _bad("limits", f"must be an object with some of {', '.join(LIMITS)}")
    for name, value in limits.items():
        if name not in LIMITS:
            raise _bad("limits", f"has no {name!r:.60}, only {', '.join(LIMITS)}")
        if type(value) is not int or not 0 < value < 2**40:
            raise _bad("limits", f"{name} must be a whole number above 0")
    return limits


def _only(fields: dict[str, Any], *allowed: str) -> None:
    for name in fields:
        if name not in allowed:
            raise _bad(f"{name:.60}", f"is not a field; the fields are {', '.join(allowed)}")


def _bad(name: str, message: str) -> BadIntent:
    where = name if name in {"payload", "job_type"} else f"payload.{name}"
    return BadIntent.of((where, message))


#: The variables of the daemon's environment that a job sees. All others stay behind, its secrets among them.
PASSED_ON = ("HOME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    #: How many commands, and how many functions, may run at once, whatever the units say. A function takes a
    #: warm worker.
    slots: int = 64
    workers: int = field(default_factory=lambda: 2 * (os.cpu_count() or 1))
    graces: Graces = field(default_factory=Graces)
    #: From SIGTERM to SIGKILL, for processes that a job leaves running when it has ended by itself.
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
    #: How much work of short functions is claimed before a worker is free for it: longer than a commit takes,
    #: too short to notice. 0: none.
    ahead_sec: float = 0.02
    #: A worker is replaced after this many jobs, so that leaked memory is freed.
    jobs_per_worker: int = 10_000
    #: Further names of variables that jobs may see; a trailing * stands for any ending.
    passed_on: tuple[str, ...] = ("LC_*",)
    #: The user that the jobs of an addon run as, "*" for all others. Without an entry: the daemon's own.
    users: Mapping[str, SystemUser] = field(default_factory=dict)
    #: The address of the HTTP API, for jobs that use it.
    url: str | None = None

    def user_of(self, addon_id: str) -> SystemUser | None:
        """None: the daemon's own."""
        user = self.users.get(addon_id) or self.users.get("*")
        return None if user is None or user.uid == os.getuid() else user

    def environment(self, user: SystemUser | None = None) -> dict[str, str]:
        """The environment of a job of this user, which may not be able to enter the daemon's TMPDIR."""
        ours = {name: value for name, value in os.environ.items() if self._passes(name)}
        if user is None:
            return ours
        ours.pop("TMPDIR", None)
        return ours | user.environment

    def _passes(self, name: str) -> bool:
        if name in PASSED_ON or name in self.passed_on:
            return True
        return any(word.endswith("*") and name.startswith(word[:-1]) for word in self.passed_on)
