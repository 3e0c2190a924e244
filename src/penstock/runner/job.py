"""
Reports and requests of a running command: `penstock job ...`, or
`python -m penstock.runner.job ...`.

    checkpoint               print the last checkpoint as JSON; nothing if there is none
    checkpoint JSON          save a checkpoint; the next attempt reads it
    parents                  print the jobs that this one waited for as JSON: a list of
                             [id, state, result]
    progress 0.5 [WORDS...]  report progress, 0..1; the words go to the output of the job
    spend 0.25               add to the cost of the job, in its unit
    log WORDS...             write a line to the output of the job
    should-yield             exit code 0: stop at the next safe place; 1: continue
    yield                    the command stopped at a safe place: with exit code 0
                             the job goes back to the queue

PENSTOCK_SOCKET and PENSTOCK_JOB_TOKEN name the scheduler; every command of a job
has them in its environment. Exit codes: 0 done, 1 no (should-yield),
2 wrong usage, 69 the scheduler cannot be reached.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any, Final

_WRONG, _UNREACHABLE = 2, 69
_FORMS: Final = {
    "checkpoint": "checkpoint [JSON]",
    "parents": "parents",
    "progress": "progress 0.5 [WORDS...]",
    "spend": "spend 0.25",
    "log": "log WORDS...",
    "should-yield": "should-yield",
    "yield": "yield",
}


def main(argv: Sequence[str]) -> int:
    match list(argv):
        case ["checkpoint"]:
            request: dict[str, Any] = {"op": "checkpoint"}
        case ["checkpoint", text]:
            request = {"op": "checkpoint", "checkpoint": text}
        case ["parents"]:
            request = {"op": "parents"}
        case ["progress", number, *words]:
            request = {"op": "progress", "progress": _number(number), "message": " ".join(words)}
        case ["spend", amount]:
            request = {"op": "spend", "amount": amount}
        case ["log", *words] if words:
            request = {"op": "log", "message": " ".join(words)}
        case ["should-yield"]:
            request = {"op": "should_yield"}
        case ["yield"]:
            request = {"op": "yield"}
        case []:
            sys.stderr.write(f"{(__doc__ or '').strip()}\n")
            return _WRONG
        case [verb, *_]:
            sys.stderr.write(f"penstock: {_wrong_usage(verb)}; `penstock job --help` explains it\n")
            return _WRONG
    return _print_answer(request)


def _wrong_usage(verb: str) -> str:
    """One line: the last line of its error output is what lists show of a job that failed."""
    if form := _FORMS.get(verb):
        return f"write `penstock job {form}`"
    return f"there is no `penstock job {verb}`, only {', '.join(_FORMS)}"


def _print_answer(request: dict[str, Any]) -> int:
    try:
        answer = send_request(request)
    except (OSError, LookupError) as error:
        sys.stderr.write(f"penstock: the scheduler cannot be reached: {error}\n")
        return _UNREACHABLE
    if "error" in answer:
        sys.stderr.write(f"penstock: {answer['error']}\n")
        return _WRONG
    if answer.get("checkpoint") is not None:
        sys.stdout.write(f"{answer['checkpoint']}\n")
    if "parents" in answer:
        sys.stdout.write(f"{answer['parents']}\n")
    return int(not answer["yield"]) if "yield" in answer else 0


def send_request(request: dict[str, Any]) -> dict[str, Any]:
    """Send one request and return its answer. Raises LookupError outside a command of a job."""
    try:
        address, token = os.environ["PENSTOCK_SOCKET"], os.environ["PENSTOCK_JOB_TOKEN"]
    except KeyError as missing:
        raise LookupError(
            f"{missing.args[0]} is not set: use this only in commands that the scheduler runs"
        ) from None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(30)
        sock.connect(f"\0{address[1:]}" if address.startswith("@") else address)
        sock.sendall(json.dumps(request | {"token": token}).encode() + b"\n")
        with sock.makefile("rb") as lines:
            answer = lines.readline()
    if not answer:
        raise ConnectionError("it closed the connection without an answer")
    decoded: dict[str, Any] = json.loads(answer)
    return decoded


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # the scheduler refuses it with a reason


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
