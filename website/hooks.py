"""
Hooks of MkDocs: pages from outside of docs/, pages that the navigation does not name, the generated reference.

The sources stay plain Markdown with links that work in a file viewer. A link that leaves docs/ leads to a page
here: to SECURITY.md and its like, or to a page that shows the source file.
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import ConfigurationError
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from website import reference  # noqa: E402

#: Pages at the top of the repository that belong to the site.
TOP_PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
#: A page that the navigation does not name goes into the section of its folder.
SECTIONS = {
    "tutorials": "Tutorials",
    "how-to": "How-to guides",
    "migrate": "How-to guides",
    "why": "Explanation",
    "": "Reference",
}
LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[\w-]+)?\))")
LANGUAGES = {
    ".py": "python",
    ".sh": "sh",
    ".toml": "toml",
    ".yml": "yaml",
    ".sql": "sql",
    ".md": "markdown",
    ".json": "json",
}


def on_config(config: Any) -> Any:
    named = set(_named(config["nav"]))
    docs = Path(config["docs_dir"])
    for page in sorted(docs.rglob("*.md")):
        name = page.relative_to(docs).as_posix()
        if name not in named:
            section = SECTIONS.get(posixpath.dirname(name))
            if section is None:
                raise ConfigurationError(
                    f"docs/{name}: name it in mkdocs.yml, or its folder in website/hooks.py"
                )
            _section(config["nav"], section).append(name)
    return config


def _named(nav: Any) -> Any:
    match nav:
        case str():
            yield nav
        case list():
            for entry in nav:
                yield from _named(entry)
        case dict():
            for entry in nav.values():
                yield from _named(entry)


def _section(nav: list[Any], title: str) -> list[Any]:
    return next(entry[title] for entry in nav if title in entry)


def on_files(files: Files, config: Any) -> Files:
    for name in TOP_PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for name, text in reference.pages().items():
        files.append(File.generated(config, name, content=text))
    for name in sorted(_linked_sources(config)):
        file = File.generated(config, f"source/{name}.md", content=_source_page(name))
        file.inclusion = InclusionLevel.NOT_IN_NAV  # reached by links alone
        files.append(file)
    return files


def _linked_sources(config: Any) -> set[str]:
    """Files of the repository that a page links to and that are no pages of the site."""
    docs = Path(config["docs_dir"])
    pages = [(page, page.relative_to(docs).as_posix()) for page in docs.rglob("*.md")]
    pages += [(ROOT / name, name) for name in TOP_PAGES]
    sources = set()
    for page, name in pages:
        for _, link, _ in LINK.findall(page.read_text("utf-8")):
            source = _outside(name, link)
            if source and source not in {*TOP_PAGES, "README.md"}:
                sources.add(source)
    return sources


def _outside(page: str, link: str) -> str | None:
    """The path in the repository of a link that leaves docs/, or None."""
    base = ROOT if page in TOP_PAGES else ROOT / "docs"
    target = Path(os.path.normpath(base / posixpath.dirname(page) / link))
    if target.is_relative_to(ROOT / "docs") or not target.is_relative_to(ROOT) or not target.exists():
        return None
    return target.relative_to(ROOT).as_posix()


def _source_page(name: str) -> str:
    path = ROOT / name
    if path.is_dir():
        listed = "\n".join(f"- `{file.name}`" for file in sorted(path.iterdir()) if file.is_file())
        return f"# {name}\n\n{listed}\n"
    text = path.read_text("utf-8")
    return f"# {path.name}\n\n`{name}`\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    name = page.file.src_uri
    if name.startswith(("source/", "reference/")):
        return markdown

    def led(found: re.Match[str]) -> str:
        begin, link, end = found.groups()
        target = _target(name, link)
        return f"{begin}{target}{end}" if target else found[0]

    return LINK.sub(led, markdown)


def _target(name: str, link: str) -> str | None:
    """Where a link leads in the site, if that is another place than in the repository."""
    here = posixpath.dirname(name)
    if name in TOP_PAGES and link.startswith("docs/"):
        return link.removeprefix("docs/")
    source = _outside(name, link)
    if source is None:
        return None
    if source == "README.md":
        return posixpath.relpath("README.md", here or ".")
    target = source if source in TOP_PAGES else f"source/{source}.md"
    return posixpath.relpath(target, here or ".")
