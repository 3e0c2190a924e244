"""The documents: their examples compile and run, their links lead somewhere, their lines fit a screen."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "bench" / "README.md"]


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """Each Python block of a page, with the number of its first line."""
    text = page.read_text("utf-8")
    blocks = re.finditer(r"^```python(?: title=.*)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [(text[: block.start(1)].count("\n") + 1, block[1]) for block in blocks]


def run_as_script(page: Path, folder: Path) -> list[str]:
    """Run all Python blocks of a page as one script in an empty folder; return the lines that it prints."""
    script = folder / f"{page.stem.lower()}.py"
    script.write_text("\n\n".join(code for _, code in python_blocks(page)))
    run = subprocess.run(
        [sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_the_examples_of_the_readme_run_as_they_stand(tmp_path):
    lines = run_as_script(ROOT / "README.md", tmp_path)

    assert lines[:3] == ["5", "99.small.jpg", "Hello, user 7!"]
    assert "o process runs the jobs of jobs.db now" in lines[3]
    assert lines[4] == "5"


def test_the_figures_of_the_readme_are_those_of_the_pages_about_speed():
    table = (ROOT / "README.md").read_text("utf-8").partition("## Compared")[2].partition("\n## ")[0]
    measured = "".join(
        (ROOT / "docs" / "why" / name).read_text("utf-8") for name in ("job-speed.md", "pool-speed.md")
    )
    figures = re.findall(r"\d[\d,.]*\d/s|\d\.\d+ (?:ms|times)|\*\*\d\.\d+\*\*", table)

    assert len(figures) > 10
    assert [f for f in figures if re.sub(r"\*|/s| ms| times", "", f) not in measured] == []


def test_the_examples_of_the_page_about_pools_run_as_they_stand(tmp_path):
    assert run_as_script(ROOT / "docs" / "pools.md", tmp_path) == ["done"]


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_python_example_compiles(page):
    for line, code in python_blocks(page):
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        compile("\n" * (line - 1) + code, page, "exec", flags=flags, dont_inherit=True)


def test_every_command_that_the_readme_promises_is_a_target():
    targets = set(re.findall(r"^([a-z.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

    assert {"run", "test", "docs", "bench-pools", "bench-graphs", ".venv"} <= targets
    assert (
        set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE)) <= targets
    )


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "ARCHITECTURE.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_file_that_a_page_names_exists(page):
    for name in re.findall(r"`([a-z]+/[\w./]+\.(?:py|md|sh))`", page.read_text("utf-8")):
        assert (ROOT / name).exists() or (ROOT / "src" / "penstock" / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_setting_that_a_page_names_exists(page):
    settings = set(
        re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs" / "settings.md").read_text(), re.MULTILINE)
    )
    sections = {name.partition(".")[0] for name in settings if "." in name}
    names = re.findall(r"`(?:--set )?([a-z_]+\.[a-z_]+)(?: ?=[^`]*)?`", page.read_text("utf-8"))

    assert {name for name in names if name.partition(".")[0] in sections} <= settings


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_verb_of_the_command_that_a_page_names_exists(page):
    pytest.importorskip("click")
    from penstock.cli.main import VERBS

    verbs = re.findall(r"(?:`|^\$ |^)penstock ([a-z]+)(?= |`|$)", page.read_text("utf-8"), re.MULTILINE)

    assert set(verbs) <= set(VERBS)


def test_every_link_in_the_documents_leads_somewhere():
    pattern = r"\]\(([^)#:\s]+)(?:#[\w-]+)?\)"
    links = [(page, link) for page in DOCUMENTS for link in re.findall(pattern, page.read_text("utf-8"))]
    dead = [f"{page.relative_to(ROOT)}: {link}" for page, link in links if not (page.parent / link).exists()]

    assert len(links) > 40
    assert dead == []


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}

    assert {page for page in pages if f"({page}" not in index} == set()


@pytest.mark.parametrize("folder", ["tutorials", "how-to", "migrate"])
def test_the_index_of_a_folder_names_every_page_of_it(folder):
    index = (ROOT / "docs" / folder / "README.md").read_text("utf-8")
    pages = {page.name for page in (ROOT / "docs" / folder).glob("*.md")} - {"README.md"}

    assert {page for page in pages if f"({page}" not in index} == set()


def heading_ids(page: Path) -> set[str]:
    """As MkDocs and file viewers make them: lower case, words joined by hyphens."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_every_link_to_a_heading_finds_it():
    dead = []
    for page in DOCUMENTS:
        for link, anchor in re.findall(r"\]\(([^)#:\s]*)#([\w-]+)\)", page.read_text("utf-8")):
            target = (page.parent / link) if link else page
            if target.suffix == ".md" and target.exists() and anchor not in heading_ids(target):
                dead.append(f"{page.relative_to(ROOT)}: {link}#{anchor}")

    assert dead == []
