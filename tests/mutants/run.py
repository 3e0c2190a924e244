"""
Are the tests worth their time? Plants one bug after the other in a copy of the sources and expects the tests to fail.

    python tests/mutants/run.py            every planted bug must be found
    python tests/mutants/run.py queue      only those whose name contains "queue"
    python tests/mutants/run.py --idle     runs all tests to their end, and names those that no planted bug makes fail

Each `*_mutants.py` beside this file has a list `MUTANTS` of (name, file below src/, old text, new text, what pytest is
to run). The old text must be there exactly once: a list that has fallen behind its file is an error, not a pass. A list
with `NEEDS` is left out where that module is not installed, because its tests would be skipped.
"""

# ruff: noqa: T201  # a command that prints a table
from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))  # a script has its own folder there

from tests.mutants.planting import Mutant  # noqa: E402  # not before it is there

PATIENCE = 180.0  # seconds; a planted bug may make the tests hang, and that is a way to find it


class Run(NamedTuple):
    verdict: str
    failed: frozenset[str]
    seconds: float
    output: str


def main() -> int:
    parser = ArgumentParser(description="plant bugs and see whether the tests find them")
    parser.add_argument("name", nargs="?", default="", help="only the planted bugs whose name contains this")
    parser.add_argument("--idle", action="store_true", help="name the tests that no planted bug makes fail")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="how many to try at once (1)")
    options = parser.parse_args()
    mutants = [mutant for mutant in collect() if options.name in mutant.name]
    if not mutants:
        print(f"no planted bug has {options.name!r} in its name")
        return 2
    targets = tuple(dict.fromkeys(target for mutant in mutants for target in mutant.tests))
    sound = plant(None, targets, every=True)
    if sound.verdict != "survived":
        print(f"{sound.output}\nthe tests fail without any planted bug; that has to be mended first")
        return 2
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = pool.map(lambda mutant: plant(mutant, mutant.tests, every=options.idle), mutants)
        failed, bad = report(mutants, runs)
    print(f"\n{len(mutants) - bad} of {len(mutants)} planted bugs found")
    if options.idle:
        never = [name for name in names_of_tests(targets) if name not in failed]
        print(f"{len(never)} tests that none of them makes fail", *never, sep="\n  ")
    return 1 if bad else 0


def collect() -> list[Mutant]:
    lists = [runpy.run_path(str(path)) for path in sorted(HERE.glob("*_mutants.py"))]
    found = [one["MUTANTS"] for one in lists if "NEEDS" not in one or find_spec(one["NEEDS"]) is not None]
    mutants = [Mutant(*entry) for entries in found for entry in entries]
    twice = {mutant.name for mutant in mutants if [other.name for other in mutants].count(mutant.name) > 1}
    assert not twice, f"two planted bugs of one name: {twice}"
    return mutants


def report(mutants: list[Mutant], runs: Iterable[Run]) -> tuple[set[str], int]:
    """All tests that failed, and how many planted bugs they have not found."""
    width = max(len(mutant.name) for mutant in mutants)
    failed: set[str] = set()
    bad = 0
    for mutant, run in zip(mutants, runs, strict=True):
        failed |= run.failed
        print(
            f"{mutant.name:<{width}}  {run.verdict:<8}  {len(run.failed):>3} failed  {run.seconds:5.1f} s",
            flush=True,
        )
        if run.verdict not in {"found", "hung"}:
            bad += 1
        if run.verdict == "broken":
            print(run.output)
    return failed, bad


def plant(mutant: Mutant | None, targets: tuple[str, ...], *, every: bool) -> Run:
    with copied_sources() as (src, env):
        if mutant is not None:
            path = src / mutant.file
            text = path.read_text("utf-8")
            if text.count(mutant.old) != 1:
                times = text.count(mutant.old)
                return Run("broken", frozenset(), 0, f"its old text is {times} times in {mutant.file}\n")
            path.write_text(text.replace(mutant.old, mutant.new), "utf-8")
        return run_tests(targets, env, every=every)


@contextmanager
def copied_sources() -> Iterator[tuple[Path, dict[str, str]]]:
    """A copy that is imported in place of the installed package, and a Hypothesis that remembers nothing of it."""
    with tempfile.TemporaryDirectory(prefix="penstock-mutant-") as scratch:
        src = Path(scratch) / "src"
        shutil.copytree(ROOT / "src", src, ignore=shutil.ignore_patterns("__pycache__"))
        env = {
            **os.environ,
            "PYTHONPATH": str(src),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HYPOTHESIS_STORAGE_DIRECTORY": scratch,
        }
        where = [sys.executable, "-c", "import penstock; print(penstock.__file__)"]
        found = subprocess.run(where, env=env, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert Path(found.strip()).is_relative_to(src), f"the tests would import {found}"
        yield src, env


def run_tests(targets: tuple[str, ...], env: dict[str, str], *, every: bool) -> Run:
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "--tb=no", "-rfE", *([] if every else ["-x"]), *targets]
    process = subprocess.Popen(
        command,
        env=env,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return Run("hung", frozenset(), time.monotonic() - began, output)
    failed = frozenset(re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+::[^\s\[]+)", output, re.MULTILINE))
    # Anything else is pytest's way to say that no test ran: the planted bug does not even import, or a target is gone.
    verdict = {0: "survived", 1: "found"}.get(process.returncode, "broken")
    return Run(verdict, failed, time.monotonic() - began, output)


def names_of_tests(targets: tuple[str, ...]) -> list[str]:
    """Without their parameters: a test has been seen failing if one of its cases has."""
    command = [sys.executable, "-m", "pytest", "--collect-only", *targets]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line for line in listed.stdout.splitlines() if "::" in line]
    assert lines, listed.stdout
    return list(dict.fromkeys(line.split("[")[0] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
