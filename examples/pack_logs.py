"""
Old log files, packed in the background: one process says what shall be done, another does it, and neither loses anything.

    python examples/pack_logs.py add /var/log/shop      enqueue every *.log of a folder; returns at once
    python examples/pack_logs.py run                    do the work, until Ctrl-C
    python examples/pack_logs.py status                 what waits, what runs, what failed and why

Adding a folder twice adds nothing: a file's job is unique by its path and its age. Kill `run` in the middle of a large file and start it
again: the file is finished from where its last checkpoint was. Nothing is deleted before its packed copy is whole.
"""

from __future__ import annotations

import argparse
import gzip
import os
from pathlib import Path

import penstock

CHUNK = 4 << 20

# `capacity="auto"`: never at the expense of what people do on this machine. Each file costs 10 of its 90 units.
scheduler = penstock.Scheduler(
    os.environ.get("PACK_LOGS_DB", "pack_logs.db"),
    capacity="auto" if os.environ.get("PACK_LOGS_AUTO") else 100,
    max_per_constraint={"disk_write_heavy": 2},
)


def version_of(path: Path) -> str:
    """The same file with new lines in it is new work."""
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
    """The packed file's size. Each chunk is a gzip member of its own, so what was written before a crash stays good."""
    packed = path.with_suffix(".log.gz.part")
    done = ctx.load_checkpoint({"read": 0, "written": 0})
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
            ctx.check()  # canceled, or the program is stopping: the checkpoint is where the next attempt begins
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
    commands.add_parser("status", help="what waits, what runs, what failed")
    asked = parser.parse_args()
    if asked.command == "add":
        print(f"{add(asked.folder)} new jobs")
    elif asked.command == "run":
        scheduler.run()
    else:
        status()


if __name__ == "__main__":
    main()
