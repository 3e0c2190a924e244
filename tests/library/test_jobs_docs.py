"""The page and the example do what they say."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.library.conftest import SOURCES
from tests.pages import run_examples
from tests.waiting import until

from penstock.library.options import LibrarySettings, Options

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "jobs.md"
EXAMPLE = ROOT / "examples" / "pack_logs.py"


def test_the_examples_of_the_page_run_as_they_stand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert run_examples(PAGE) >= 6


@pytest.mark.parametrize("name", [*Options.__annotations__, *LibrarySettings.__annotations__])
def test_every_option_and_setting_is_on_the_page(name):
    assert f"`{name}" in PAGE.read_text("utf-8")


@pytest.fixture
def logs(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    for n in range(3):
        (folder / f"{n}.log").write_text(f"line of {n}\n" * 1_000)
    return folder


def run(tmp_path, *args):
    env = {**os.environ, "PYTHONPATH": SOURCES, "PACK_LOGS_DB": str(tmp_path / "pack.db")}
    return subprocess.Popen([sys.executable, str(EXAMPLE), *args], env=env, stdout=subprocess.PIPE, text=True)


def test_the_example_packs_in_one_process_what_another_adds(tmp_path, logs):
    assert "3 new jobs\n" == run(tmp_path, "add", str(logs)).communicate(timeout=30)[0]
    assert "0 new jobs\n" == run(tmp_path, "add", str(logs)).communicate(timeout=30)[0]
    assert "No process runs the jobs of pack.db now" in run(tmp_path, "status").communicate(timeout=30)[0]

    worker = run(tmp_path, "run")
    until(lambda: not list(logs.glob("*.log")))
    worker.send_signal(signal.SIGINT)
    worker.communicate(timeout=30)

    assert ["0.log.gz", "1.log.gz", "2.log.gz"] == sorted(file.name for file in logs.iterdir())
    assert "line of 1\n" * 1_000 == gzip.decompress((logs / "1.log.gz").read_bytes()).decode()
    assert "     3 DONE\n" == run(tmp_path, "status").communicate(timeout=30)[0]


def test_a_file_that_was_cut_off_is_finished_from_its_checkpoint(tmp_path, logs, monkeypatch):
    monkeypatch.setenv("PACK_LOGS_DB", str(tmp_path / "pack.db"))
    monkeypatch.syspath_prepend(str(ROOT))
    from examples import pack_logs

    from penstock.testing import VirtualScheduler

    monkeypatch.setattr(pack_logs, "CHUNK", 3_000)
    with VirtualScheduler.over(pack_logs.scheduler) as virtual:
        job = pack_logs.pack.enqueue(logs / "0.log")
        compress, calls = gzip.compress, []

        def breaks_once(data):
            calls.append(data)
            if len(calls) == 3:
                raise OSError("disk full")
            return compress(data)

        monkeypatch.setattr(pack_logs.gzip, "compress", breaks_once)
        virtual.drain(advance=600)

        assert job.result(0) == (logs / "0.log.gz").stat().st_size
    assert 5 == len(calls)  # four chunks, the third of them twice
    assert "line of 0\n" * 1_000 == gzip.decompress((logs / "0.log.gz").read_bytes()).decode()
