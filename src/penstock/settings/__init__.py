"""Settings of the daemon: TOML < environment < flags, checked as a whole. `docs/settings.md` lists them."""

from __future__ import annotations

from penstock.settings.kinds import Address, show_span
from penstock.settings.reading import BadSettings, Problem, Setting, Settings, load

__all__ = ["Address", "BadSettings", "Problem", "Setting", "Settings", "load", "show_span"]
