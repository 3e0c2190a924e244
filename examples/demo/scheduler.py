"""
`make run`: the real scheduler on its own database, with two add-ons at work. In a terminal it runs until Ctrl-C and
submits new sample jobs when the last ones are done, so that the page always shows activity. Without a terminal it ends
when the sample jobs are done.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from examples.demo.addons import submit_samples
from examples.demo.board import Board, LiveBoard, PlainBoard, Sight

from penstock import Client
from penstock.client.signals import handled_signals
from penstock.core.errors import NotFound

PORT = 8420
UNITS = 40
LOOK = 0.25  # seconds
BREATH = 5.0  # seconds between the end of the samples and the next ones
SETTLED = ("DONE", "FAILED", "CANCELED", "BLOCKED")


def main() -> int:
    options = _options()
    folder = Path(options.data_dir).absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    live = sys.stdout.isatty() and not options.plain
    told: list[signal.Signals] = []
    with handled_signals(told.append), ExitStack() as down:
        found = _start_daemon(folder, down)
        if found is None:
            tail = (folder / "daemon.log").read_text("utf-8")[-1_000:]
            sys.stderr.write(f"The scheduler did not start. {folder / 'daemon.log'} ends:\n{tail}")
            return 1
        client = down.enter_context(
            Client(found["url"], token=Path(found["token_file"]).read_text("ascii").strip())
        )
        _greet(found, folder, client)
        for addon in ("photos", "mail"):
            down.enter_context(_process("workers", folder, "examples.demo.addons", addon, **_access(found)))
        down.enter_context(_process("workers", folder, "examples.demo.studio", **_access(found)))
        before = _last_event(client)
        jobs = submit_samples(client)
        board: Board = LiveBoard() if live else PlainBoard()
        down.enter_context(board)
        sight = Sight(client, before)
        done = (
            _stay(sight, board, jobs, told, client)
            if live
            else _see_out(sight, board, jobs, told, options.seconds)
        )
    _part(done, jobs, folder)
    return 0 if told or done.get("DONE", 0) == len(jobs) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make run", description="The scheduler with two add-ons at work.")
    parser.add_argument(
        "--data-dir", default=".penstock", help="the directory of database and token (.penstock)"
    )
    parser.add_argument(
        "--plain", action="store_true", help="print lines of text and end when all jobs are done"
    )
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="the longest run without a terminal (120)"
    )
    return parser.parse_args()


def _start_daemon(folder: Path, down: ExitStack) -> dict[str, Any] | None:
    """Start the daemon on the usual port, or on any if another program has that one. None: it did not start."""
    if _is_free(PORT):
        found = _started_on(PORT, folder, down)
        if found is not None or _is_free(PORT):
            return found
    return _started_on(0, folder, down)


def _started_on(port: int, folder: Path, down: ExitStack) -> dict[str, Any] | None:
    # Fixed capacity: jobs start in the demo even if the machine is busy.
    settings = (f"data_dir={folder}", f"server.listen=127.0.0.1:{port}", f"capacity.units={UNITS}")
    flags = [f"--set={setting}" for setting in settings]
    return _wait_for(down.enter_context(_process("daemon", folder, "penstock.daemon", *flags)), folder)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return True
    return False


@contextmanager
def _process(
    name: str, folder: Path, module: str, *arguments: str, **env: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a module in its own session: Ctrl-C reaches only this process, which then ends the others in order."""
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(  # our own modules
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **env},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(daemon: subprocess.Popen[bytes], folder: Path) -> dict[str, Any] | None:
    while daemon.poll() is None:
        with suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads((folder / "daemon.json").read_text("utf-8"))
            if found["pid"] == daemon.pid:
                return found
        time.sleep(0.02)
    return None


def _access(found: dict[str, Any]) -> dict[str, str]:
    return {"PENSTOCK_URL": found["url"], "PENSTOCK_TOKEN_FILE": found["token_file"]}


def _greet(found: dict[str, Any], folder: Path, client: Client) -> None:
    with suppress(NotFound):  # without the page's libraries the checkout has no page
        sys.stdout.write(f"Open {client.login().url} (good once)\n")
    sys.stdout.write(f"""\
The scheduler is at {found["url"]}, its data in {folder}
(its capacity is fixed at {UNITS} units for this demo). Two add-ons, photos and mail, work on sample
jobs; a program, studio, shows its pools and graphs on the page. Try, in another terminal:

  export PENSTOCK_URL={found["url"]} PENSTOCK_TOKEN_FILE={found["token_file"]}
  .venv/bin/penstock top                                  everything live; also: ls, explain last
  api=$PENSTOCK_URL/api/system/scheduler auth="Authorization: Bearer $(cat $PENSTOCK_TOKEN_FILE)"

  curl -H "$auth" $api/stats                              jobs by state
  curl -H "$auth" "$api/queue/jobs?state=QUEUED,RUNNING"  the jobs; with /ID/explain, why one waits
  curl -H "$auth" $api/queue/jobs/submit -H 'Content-Type: application/json' \\
       -d '{{"addon_id": "photos", "job_type": "thumbnail", "payload": {{"name": "mine.jpg"}}}}'
  curl -H "$auth" -N $api/events/stream                   all events, live
  curl -H "$auth" $api/openapi.json                       all the rest
  sh examples/addon.sh                                    an add-on with nothing but curl

""")
    sys.stdout.flush()


def _last_event(client: Client) -> int:
    """The newest event: the board does not show events of earlier runs."""
    last = 0
    while (page := client.events(after=last, limit=500)).events:
        last = page.next
    return last


def _see_out(
    sight: Sight, board: Board, jobs: list[str], told: list[signal.Signals], within: float
) -> dict[str, int]:
    """Show the board until the sample jobs are settled. Returns their number by state."""
    until = time.monotonic() + within
    states: dict[str, int] = {}
    while not told:
        board.show(sight.look())
        states = sight.states(jobs)
        if _settled(states) == len(jobs) or time.monotonic() > until:
            break
        time.sleep(LOOK)
    return states


def _stay(
    sight: Sight, board: Board, jobs: list[str], told: list[signal.Signals], client: Client
) -> dict[str, int]:
    """Show the board until a signal comes; submit new samples when all are settled, and add them to `jobs`."""
    states: dict[str, int] = {}
    rest_until: float | None = None
    while not told:
        board.show(sight.look())
        states = sight.states(jobs)
        if _settled(states) == len(jobs):
            rest_until = rest_until or time.monotonic() + BREATH
            if time.monotonic() > rest_until:
                jobs += submit_samples(client)
                rest_until = None
        time.sleep(LOOK)
    return states


def _settled(states: dict[str, int]) -> int:
    return sum(states.get(state, 0) for state in SETTLED)


def _part(states: dict[str, int], jobs: list[str], folder: Path) -> None:
    told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    sys.stdout.write(
        f"\nOf {len(jobs)} sample jobs: {told or 'none looked at'}. Stopped in good order; jobs that are left continue with the "
        f"next `make run`.\nThe database stays in {folder}; remove the directory to forget it.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
