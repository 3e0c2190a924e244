"""The five minutes of the README, as somebody new would type them; and where its links, and those of the other documents, lead."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_examples_of_the_readme_run_as_they_stand(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    run_them = """
if __name__ == "__main__":
    import asyncio

    asyncio.run(serve())
    classify()
    asyncio.run(report(["a.jpg", "b.jpg"]))
    greet()
    work()
"""
    script = tmp_path / "five_minutes.py"
    script.write_text("\n\n".join(blocks) + run_them)

    run = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )

    assert 0 == run.returncode, run.stderr
    assert ["99.small.jpg", "a.small.jpg", "3 bytes by weights.bin"] == run.stdout.splitlines()[:3]
    assert {"a.small.jpg", "b.small.jpg"} == set(run.stdout.splitlines()[3:5])
    assert "Hello, user 7!" == run.stdout.splitlines()[5]
    assert "no process runs the jobs of jobs.db now" in run.stdout.splitlines()[6]
    assert "5" == run.stdout.splitlines()[7]


def test_every_command_that_the_readme_promises_is_a_target():
    targets = set(re.findall(r"^([a-z.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

    assert {"run", "test", "bench-pools", "bench-graphs", ".venv"} <= targets
    assert (
        set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE)) <= targets
    )


def test_every_file_that_the_readme_and_the_architecture_name_exists():
    for page in ("README.md", "ARCHITECTURE.md"):
        text = (ROOT / page).read_text()
        for name in re.findall(r"`([a-z]+/[\w./]+\.(?:py|md))`", text):
            found = ROOT / name if name.startswith(("tests", "docs")) else ROOT / "src" / "penstock" / name
            assert found.exists(), f"{page} names {name}"


def test_every_link_in_the_documents_leads_somewhere():
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.md")]
    links = [(one, link) for one in documents for link in re.findall(r"\]\(([^)#:\s]+)\)", one.read_text())]
    dead = [f"{one.relative_to(ROOT)}: {link}" for one, link in links if not (one.parent / link).exists()]

    assert len(links) > 40
    assert dead == []
