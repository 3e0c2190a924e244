"""
Pack old log files in the background: one process enqueues the files, another packs them, and neither loses a job.

    python examples/pack_logs.py add /var/log/shop      enqueue every *.log of a folder; returns at once
    python examples/pack_logs.py run                    do the work, until Ctrl-C
    python examples/pack_logs.py status                 list waiting, running and failed jobs, with the reasons

Adding a folder twice adds no second job: a file's job is unique by its path and its age. If you kill `run` in the
middle of a large file and start it again, it continues from the last checkpoint. It deletes a file only when the
packed copy is complete.
"""

from __future__ import annotations

import argparse
import gzip
import os
from pathlib import Path

import penstock

CHUNK = 4 << 20

# `capacity="auto"` leaves the machine to its users. Each file costs 10 of the 90 units.
scheduler = penstock.Scheduler(
    os.environ.get("PACK_LOGS_DB", "pack_logs.db"),
    capacity="auto" if os.environ.get("PACK_LOGS_AUTO") else 100,
    max_per_constraint={"disk_write_heavy": 2},
)


def version_of(path: Path) -> str:
    """The key of a file's job: the same file with new lines is a new job."""
    return f"{path}@{path.stat().st_mtime_ns}"


@scheduler.job(
    cost=10,
    run_when="quiet",
    constraints=["disk_write_heavy"],
    retries=(60, 600),
    max_runtime=3_600,
    unique=version_of,
)
def pack(ctx: penstock.JobContext, path: Path) -> int:
    """Pack a file and return the packed size. Each chunk is one gzip member, so chunks before a crash stay valid."""
    packed = path.with_suffix(".log.gz.part")
    done = ctx.checkpoint or {"read": 0, "written": 0}
    size = path.stat().st_size
    with path.open("rb") as source, packed.open("r+b" if packed.exists() else "w+b") as target:
        source.seek(done["read"])
        target.seek(done["written"])
        target.truncate()
        while chunk := source.read(CHUNK):
            target.write(gzip.compress(chunk))
            target.flush()
            os.fsync(target.fileno())
            ctx.save_checkpoint({"read": source.tell(), "written": target.tell()})
            ctx.progress(min(1.0, source.tell() / size))
            ctx.check()  # raises if the job was canceled or the program stops; the next attempt continues
        written = target.tell()
    packed.replace(path.with_suffix(".log.gz"))
    path.unlink()
    ctx.log.info("packed %s, %d bytes to %d", path, size, written)
    return written


def add(folder: Path) -> int:
    jobs = [pack.enqueue(path.absolute()) for path in sorted(folder.glob("*.log"))]
    return sum(job.created for job in jobs)


def status() -> None:
    for state, count in scheduler.counts().items():
        if count:
            print(f"{count:6} {state}")
    for job in scheduler.find("RUNNING"):
        print(f"  {job.id[-8:]} {job.progress or 0:.0%}")
    for job in scheduler.find("QUEUED", limit=3):
        print(f"  {job.explain()}")
    for job in scheduler.find(["FAILED", "BLOCKED"], limit=3):
        print(f"  {job.id[-8:]} {(job.attempts()[-1].error or '').partition(chr(10))[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Pack old log files in the background.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("add", help="enqueue every *.log of a folder").add_argument("folder", type=Path)
    commands.add_parser("run", help="do the work until Ctrl-C")
    commands.add_parser("status", help="list waiting, running and failed jobs")
    options = parser.parse_args()
    if options.command == "add":
        print(f"{add(options.folder)} new jobs")
    elif options.command == "run":
        scheduler.run()
    else:
        status()


if __name__ == "__main__":
    main()
