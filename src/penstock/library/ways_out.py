"""
The ways out of an explanation as Python calls.

An explanation names a command, such as `penstock cancel 5d2f10aa`. The command asks a daemon, and no daemon
answers for the jobs of a file that a program dispatches itself.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any, Final

from msgspec.structs import replace

from penstock.core.jobs.explain import Explanation

#: The argument of `Scheduler` for a setting of the daemon.
_ARGUMENTS: Final = {
    "capacity.units": "capacity={value}",
    "caps.concurrent": "max_concurrent={value}",
    "caps.types": 'max_per_job={{"{name}": {value}}}',
    "caps.constraints": 'max_per_constraint={{"{name}": {value}}}',
    "host.labels": "labels={labels}",
}


def with_calls(explanation: Explanation) -> Explanation:
    """The explanation with a Python call in place of each command that a program can call itself."""
    text, gates = explanation.text, []
    for gate in explanation.gates:
        call = _call(gate.way_out, explanation)
        gates.append(replace(gate, way_out=call))
        text = text.replace(f"`{gate.way_out}`", f"`{call}`")
    call = _call(explanation.way_out, explanation)
    text = text.replace(f"`{explanation.way_out}`", f"`{call}`")
    return replace(explanation, text=text, gates=tuple(gates), way_out=call)


def _call(command: str, explanation: Explanation) -> str:
    match shlex.split(command):
        case ["penstock", "cancel", *_, job]:
            return f"{_handle(job, explanation)}.cancel()"
        case ["penstock", "retry", job]:
            return f"{_handle(job, explanation)}.retry()"
        case ["penstock", "edit", job, "--priority", priority]:
            return f'{_handle(job, explanation)}.edit(priority="{priority}")'
        case ["penstock", "edit", job, "--not-before-none"]:
            return f"{_handle(job, explanation)}.edit(not_before=None)"
        case ["penstock", "edit", job, "--when", run_when]:
            return f'{_handle(job, explanation)}.edit(run_when="{run_when}")'
        case ["penstock", "edit", job, "--quiet-for", "0s"]:
            return f"{_handle(job, explanation)}.edit(quiet_for=0)"
        case ["penstock", "stop", "&&", "penstock", "up", "--set", setting]:
            return _with_argument(setting) or command
        case _:
            return command


def _handle(end: str, explanation: Explanation) -> str:
    """The expression for the job whose id ends so; `job` is the explained one."""
    if explanation.job_id.endswith(end):
        return "job"
    return f'scheduler.get("{next((one for one in _others(explanation) if one.endswith(end)), end)}")'


def _others(explanation: Explanation) -> Iterator[str]:
    """The ids of the jobs that an explanation names in its data."""
    data: dict[str, Any] = explanation.reason_data or {}
    preemption = explanation.preemption
    named = [*explanation.held_by, *data.get("parents", ())]
    if preemption is not None:
        named += [preemption.victim, preemption.wanted_by]
    return (job_id for job_id in named if job_id is not None)


def _with_argument(setting: str) -> str:
    key, _, value = setting.rpartition("=")
    section, _, name = key.rpartition(".") if key not in _ARGUMENTS else (key, "", "")
    while section and section not in _ARGUMENTS:  # the name of a job type may contain dots
        section, _, first = section.rpartition(".")
        name = f"{first}.{name}"
    if not section:
        return ""
    name = name.rpartition("/")[2]  # jobs of a program are named without their addon
    labels = str(value.split(","))
    return f"Scheduler(..., {_ARGUMENTS[section].format(name=name, value=value, labels=labels)})"
