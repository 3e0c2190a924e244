"""
Are the tests worth their time? Plants one bug after the other in a copy of the sources and expects the tests to fail.

    python tests/mutants/run.py            every planted bug must be found
    python tests/mutants/run.py queue:     only those whose name contains "queue:"; more than one can be given
    python tests/mutants/run.py -j 1       one at a time, and not one more than there are processors
    python tests/mutants/run.py --idle     runs all tests to their end, and names those that no planted bug makes fail

Each `*_mutants.py` beside this file has a list `MUTANTS` of (name, file below src/, function, old code, new code, what pytest
is to run). `planting.py` says how the old code is found; if it is not there exactly once, that is an error, not a pass. A list
with `NEEDS` is left out where that module is not installed, because its tests would be skipped. Where they are skipped for want of
something else, such as a browser, the planted bug has neither been found nor survived. One that makes pytest itself
hang, so that no test fails, is not found. The last lines count all that for each list.
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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))  # a script has its own folder there

from tests.mutants.planting import Mutant, NotPlanted  # noqa: E402  # not before it is there
from tests.mutants.planting import plant as plant_in  # noqa: E402  # not before it is there

#: Seconds that a test may take longer than all did without a planted bug. After that it fails, and has found it.
PATIENCE = 120.0


class Run(NamedTuple):
    verdict: str
    failed: frozenset[str]
    seconds: float
    output: str


def main() -> int:
    parser = ArgumentParser(description="plant bugs and see whether the tests find them")
    parser.add_argument("names", nargs="*", help="only the planted bugs whose name contains one of these")
    parser.add_argument("--idle", action="store_true", help="name the tests that no planted bug makes fail")
    jobs = (
        os.cpu_count() or 1
    ) + 1  # half of the time they wait, for what a planted bug keeps from happening
    parser.add_argument("-j", "--jobs", type=int, default=jobs, help=f"how many to try at once ({jobs})")
    options = parser.parse_args()
    mutants = [mutant for mutant in collect() if any(name in mutant.name for name in options.names or [""])]
    if not mutants:
        print(f"no planted bug has {' or '.join(options.names)} in its name")
        return 2
    batches = batched(mutants)
    with ThreadPoolExecutor(options.jobs) as pool:
        sound = list(pool.map(lambda batch: plant(None, batch, every=True), batches.values()))
        unsound = [run.output for run in sound if run.verdict not in {"survived", "skipped"}]
        if unsound:
            print(*unsound, "the tests fail without any planted bug; that has to be mended first", sep="\n")
            return 2
        took = {key: run.seconds for key, run in zip(batches, sound, strict=True)}
        runs = pool.map(
            lambda mutant: plant(mutant, mutant.tests, every=options.idle, patience=patience(mutant, took)),
            mutants,
        )
        done = list(report(mutants, runs))
    failed = set[str]().union(*(run.failed for run in done))
    print(*summary(mutants, done), sep="\n")
    if options.idle:
        never = [name for batch in batches.values() for name in names_of_tests(batch) if name not in failed]
        print(f"{len(never)} tests that none of them makes fail", *dict.fromkeys(never), sep="\n  ")
    return 0 if all(run.verdict in {"found", "skipped"} for run in done) else 1


def collect() -> list[Mutant]:
    lists = [runpy.run_path(str(path)) for path in sorted(HERE.glob("*_mutants.py"))]
    found = [one["MUTANTS"] for one in lists if "NEEDS" not in one or find_spec(one["NEEDS"]) is not None]
    mutants = [Mutant(*entry) for entries in found for entry in entries]
    twice = {mutant.name for mutant in mutants if [other.name for other in mutants].count(mutant.name) > 1}
    assert not twice, f"two planted bugs of one name: {twice}"
    return mutants


def batched(mutants: list[Mutant]) -> dict[tuple[str, ...], tuple[str, ...]]:
    """What pytest has to run for all of them: once per folder, and apart for each `-k`, which would choose among the others' tests too."""
    found: dict[tuple[str, ...], list[str]] = {}
    for mutant in mutants:
        for key, target in keyed(mutant):
            found.setdefault(key, []).append(target)
    return {key: (*dict.fromkeys(targets), *key[1:]) for key, targets in found.items()}


def keyed(mutant: Mutant) -> Iterator[tuple[tuple[str, ...], str]]:
    """Its targets, each with the batch that has it."""
    targets = list(takewhile(lambda word: not word.startswith("-"), mutant.tests))
    for target in targets:
        yield (Path(target.split("::")[0]).parts[1], *mutant.tests[len(targets) :]), target


def patience(mutant: Mutant, took: Mapping[tuple[str, ...], float]) -> float:
    """Else a test that finds nothing would run into its time limit on a machine that is slow."""
    return PATIENCE + 2 * sum(took[key] for key in {key for key, _ in keyed(mutant)})


def report(mutants: list[Mutant], runs: Iterable[Run]) -> Iterator[Run]:
    """A line for each, as soon as it is there."""
    width = max(len(mutant.name) for mutant in mutants)
    for mutant, run in zip(mutants, runs, strict=True):
        first = min(run.failed, default="")
        print(f"{mutant.name:<{width}}  {run.verdict:<8}  {run.seconds:5.1f} s  {first}", flush=True)
        if run.verdict == "broken":
            print(run.output)
        yield run


def summary(mutants: list[Mutant], runs: list[Run]) -> Iterator[str]:
    """How many of each list were found. Skipped: their tests are skipped here, so they were not tried."""
    counts = {name: Counter[str]() for name in (*(list_of(mutant) for mutant in mutants), "all")}
    for mutant, run in zip(mutants, runs, strict=True):
        for count in (counts[list_of(mutant)], counts["all"]):
            count.update({"planted": 1, run.verdict: 1, "seconds": round(run.seconds)})
    columns = ("planted", "found", "survived", "hung", "skipped", "broken", "seconds")
    yield f"\n{'list':<14}" + "".join(f"{column:>9}" for column in columns)
    for name, count in counts.items():
        yield f"{name:<14}" + "".join(f"{count[column]:>9}" for column in columns)


def list_of(mutant: Mutant) -> str:
    return mutant.name.partition(":")[0]


def plant(
    mutant: Mutant | None, targets: tuple[str, ...], *, every: bool, patience: float | None = None
) -> Run:
    with copied_sources() as (src, env):
        if mutant is not None:
            path = src / mutant.file
            text = path.read_text("utf-8")
            try:
                path.write_text(plant_in(text, mutant), "utf-8")
            except NotPlanted as error:
                return Run("broken", frozenset(), 0, f"{error}\n")
            for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
                compiled.unlink()
        return run_tests(targets, env, every=every, patience=patience)


@contextmanager
def copied_sources() -> Iterator[tuple[Path, dict[str, str]]]:
    """
    A copy that is imported in place of the installed package, and a Hypothesis that remembers nothing of it. With what was compiled of
    it: some tests start a hundred processes.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-mutant-") as scratch:
        Path(scratch).chmod(0o755)  # some tests run jobs as another user, who must be able to import the copy
        src = Path(scratch) / "src"
        shutil.copytree(ROOT / "src", src, ignore=shutil.ignore_patterns("*.pyc.*"))  # half written
        env = {**os.environ, "PYTHONPATH": str(src), "HYPOTHESIS_STORAGE_DIRECTORY": scratch}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        where = [sys.executable, "-c", "import penstock; print(penstock.__file__)"]
        found = subprocess.run(where, env=env, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert Path(found.strip()).is_relative_to(src), f"the tests would import {found}"
        yield src, env


def run_tests(targets: tuple[str, ...], env: dict[str, str], *, every: bool, patience: float | None) -> Run:
    began = time.monotonic()
    limit = [] if patience is None else [f"--timeout={patience:.0f}"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--tb=no",
        "-rfE",
        *limit,
        *([] if every else ["-x"]),
        *targets,
    ]
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
        output, _ = process.communicate(timeout=None if patience is None else 2 * patience)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return Run("hung", frozenset(), time.monotonic() - began, output)
    failed = frozenset(re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+::[^\s\[]+)", output, re.MULTILINE))
    # Anything else is pytest's way to say that no test ran: the planted bug does not even import, or a target is gone.
    verdict = {0: "survived", 1: "found"}.get(process.returncode, "broken")
    if verdict == "survived" and re.search(r"\b\d+ passed\b", output) is None:
        verdict = "skipped"
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
