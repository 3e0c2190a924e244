"""
`make sbom`: the software bill of materials of a release, as CycloneDX 1.6 JSON.

Made from the lock files alone: the packages that `penstock[jobs,postgres]` installs, with the hashes of their files, and
the libraries of the page. The same lock gives the same file, byte by byte.
"""

from __future__ import annotations

import base64
import json
import re
import sys
import tomllib
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
#: The extras that a release is described with.
EXTRAS = ("jobs", "postgres")
NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*")


def main() -> None:
    version = re.search(r'__version__ = "(.+)"', (ROOT / "src/penstock/__init__.py").read_text("utf-8"))
    assert version is not None
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist" / f"penstock-{version[1]}.cdx.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(bill(version[1]), indent=2) + "\n", "utf-8")
    sys.stdout.write(f"{target}\n")


def bill(version: str) -> dict[str, Any]:
    components = [*python_packages(), *page_libraries()]
    contents = json.dumps(components, sort_keys=True) + version
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, contents)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": "penstock",
                "name": "penstock",
                "version": version,
                "purl": f"pkg:pypi/penstock@{version}",
                "licenses": [{"license": {"id": "MIT"}}],
            }
        },
        "components": components,
        "dependencies": [
            {"ref": "penstock", "dependsOn": [component["bom-ref"] for component in components]}
        ],
    }


def python_packages() -> Iterator[dict[str, Any]]:
    """From the lock of `make docs`, the smallest that has both extras; only what the extras need of it."""
    entries = dict(locked((ROOT / "requirements-docs.lock").read_text("utf-8")))
    for name in sorted(needed(entries)):
        version, hashes, _ = entries[name]
        purl = f"pkg:pypi/{name}@{version}"
        yield {
            "type": "library",
            "bom-ref": purl,
            "name": name,
            "version": version,
            "purl": purl,
            "hashes": [{"alg": "SHA-256", "content": content} for content in hashes],
        }


def locked(text: str) -> Iterator[tuple[str, tuple[str, list[str], set[str]]]]:
    """Of each entry: name, version, hashes, and the packages that asked for it."""
    for entry in re.split(r"\n(?=[a-z0-9])", text.strip()):
        pinned = re.match(r"([a-z0-9._-]+)(?:\[[^]]*\])?==([^\s;\\]+)", entry)
        if pinned is None:
            continue
        via = entry.partition("# via")[2]
        parents = {
            NAME.match(word.strip("# "))[0] for word in via.split("\n") if NAME.match(word.strip("# "))
        }  # type: ignore[index]
        yield pinned[1], (pinned[2], re.findall(r"--hash=sha256:([0-9a-f]{64})", entry), parents)


def needed(entries: dict[str, tuple[str, list[str], set[str]]]) -> set[str]:
    """The packages of the extras, and those that they bring along."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = {_name(line) for extra in EXTRAS for line in project["optional-dependencies"][extra]}
    found = wanted & entries.keys()
    while more := {name for name, (_, _, parents) in entries.items() if parents & found} - found:
        found |= more
    if missing := wanted - entries.keys():
        raise LookupError(f"not in the lock: {', '.join(sorted(missing))}; run `make lock`")
    return found


def _name(requirement: str) -> str:
    name = NAME.match(requirement)
    assert name is not None
    return name[0].lower()


def page_libraries() -> Iterable[dict[str, Any]]:
    lock = json.loads((ROOT / "src/penstock/web/package-lock.json").read_text("utf-8"))
    for path, entry in sorted(lock["packages"].items()):
        name = path.removeprefix("node_modules/")
        if not name:
            continue
        purl = f"pkg:npm/{name.replace('@', '%40')}@{entry['version']}"
        yield {
            "type": "library",
            "bom-ref": purl,
            "name": name,
            "version": entry["version"],
            "purl": purl,
            "hashes": [{"alg": "SHA-512", "content": base64.b64decode(entry["integrity"][7:]).hex()}],
            "licenses": [{"license": {"id": entry["license"]}}],
        }


if __name__ == "__main__":
    main()
